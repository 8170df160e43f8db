"""Files: faults at every step of a write, kills, full disks, damaged and hostile content."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache, reduce
from importlib.util import module_from_spec, spec_from_file_location
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from golden import class_data, level_data, number_data, ranking_data
from vbtta import (
    ADVI,
    EM,
    CategoricalMixture,
    ConvergenceWarning,
    GaussianMixture,
    LabelSets,
    Policy,
    ViewPredictions,
    conformalize,
    fit_policy,
    fit_sequential,
)
from vbtta._support import files as support
from vbtta._support.files import atomic_path, set_aside
from vbtta.data.files import read_npz, read_table, write_table

_SPEC = spec_from_file_location("docs_schema", Path(__file__).parents[1] / "docs" / "_site" / "schema.py")
assert _SPEC is not None
assert _SPEC.loader is not None
schema: Any = module_from_spec(_SPEC)
_SPEC.loader.exec_module(schema)


def parts(folder: Path) -> list[Path]:
    return list(folder.glob(".*.part"))


# -- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, "old"])
def test_a_fault_at_any_step_leaves_the_old_file_or_the_new_one(
    old: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every system call of a write fails in turn, as SQLite tests its writes."""
    target = tmp_path / "target"
    real = {name: getattr(os, name) for name in ("open", "close", "stat", "chmod", "fsync", "replace")}
    left = [0]  # calls before the fault
    with atomic_path(target):  # what is looked up once
        pass

    def faulty(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                if name == "close":
                    real["close"](*arguments)
                raise OSError(errno.EIO, "injected")
            return real[name](*arguments, **options)

        return call

    for n_before in range(50):
        target.unlink(missing_ok=True) if old is None else target.write_text(old)
        left[0] = n_before
        failure = ""
        with monkeypatch.context() as patch:
            patch.setattr(support, "os", SimpleNamespace(**{**vars(os), **{name: faulty(name) for name in real}}))
            try:
                with atomic_path(target) as temporary:
                    temporary.write_bytes(b"new")
            except OSError as error:
                failure = str(error)
        content = target.read_text() if target.exists() else None
        assert content in (old, "new") if failure else content == "new"
        assert not failure or str(target) in failure
        assert parts(tmp_path) == []
        if left[0] >= 0:  # all steps had their turn
            assert not failure
            assert n_before > 5
            return
    pytest.fail("a write has more steps than were tried")


def test_links_are_followed_modes_kept_and_devices_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with atomic_path(link) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600  # before there is anything to read
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    os.mkfifo(tmp_path / "pipe")
    for odd in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is a device, pipe or socket; give the name of a file"), atomic_path(odd):
            pass
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_that_leads_back_to_itself_is_refused_and_stays(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ValueError, match=rf"cannot write {tmp_path}/a: it is a link that leads back to itself; remove"):
        policy.save(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()


FULL = """
import resource, sys
import numpy as np
from vbtta import ViewPredictions
views = ViewPredictions(np.zeros((1000, 2, 3)))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    views.save(sys.argv[1])
except OSError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_full_disk_is_named_and_the_old_file_stays(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"views{suffix}"
    ViewPredictions(np.ones((2, 2, 3))).save(path)
    before = path.read_bytes()
    for size in (0, 100, 400):
        done = subprocess.run(
            [sys.executable, "-c", FULL, path, str(size)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3, done.stderr
        assert f"'{path}'" in done.stdout
        assert "free some space" in done.stdout
        assert path.read_bytes() == before
        assert parts(tmp_path) == []


WAITING = """
import sys
from vbtta._support.files import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("inside", flush=True)
    sys.stdin.read()
"""


def _inside(target: Path) -> "subprocess.Popen[str]":
    """A process that is in the midst of a write."""
    command = [sys.executable, "-c", WAITING, str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    return process


def test_parts_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, alive = _inside(tmp_path / "dead"), _inside(tmp_path / "alive")
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    (tmp_path / ".other.0badcafe.1.0123456789abcdef.part").touch()  # of another machine
    assert len(parts(tmp_path)) == 3
    support._remove_stale.cache_clear()
    with atomic_path(tmp_path / "next") as temporary:
        temporary.write_text("whole")
    left = sorted(path.name[:6] for path in parts(tmp_path))
    assert left == [".alive", ".other"]
    alive.communicate("")
    assert (tmp_path / "alive").read_text() == "half"
    assert not (tmp_path / "dead").exists()


def _write(target: Path, text: str, barrier: Any) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text(text)
        barrier.wait(60)


def test_two_writers_leave_one_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, texts = context.Barrier(2), ["a" * 100_000, "b" * 100_000]
    writers = [context.Process(target=_write, args=(tmp_path / "target", text, barrier)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert (tmp_path / "target").read_text() in texts
    assert parts(tmp_path) == []


def _as_somebody_else(target: Path, answers: Any) -> None:
    if os.getuid() == 0:  # nothing is forbidden to root
        os.setegid(65534)
        os.seteuid(65534)
    try:
        with atomic_path(target):
            pass
    except OSError as error:
        answers.put((type(error).__name__, str(error)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_folder_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "locked"
        folder.mkdir()
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        process = context.Process(target=_as_somebody_else, args=(folder / "target", answers))
        process.start()
        kind, message = answers.get()
        process.join()
        assert kind == "PermissionError"
        assert str(folder / "target") in message


def test_damaged_parts_are_named_and_set_aside(tmp_path: Path) -> None:
    part = tmp_path / "part.npz"
    part.write_bytes(b"PK\x03\x04 cut off")
    with pytest.warns(UserWarning, match=r"part.npz is damaged \(cut\); it is set aside as part.npz.damaged and made"):
        set_aside(part, "cut\nmore")
    assert not part.exists()
    assert (tmp_path / "part.npz.damaged").exists()


# -- npz ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_is_noticed(mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "views.npz"
    ViewPredictions(np.ones((100, 2, 3))).save(path)
    data = bytearray(path.read_bytes())
    place = data.index(np.float64(1).tobytes() * 20)
    data[place + 7] ^= 0x10
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"views.npz: array 'outputs' cannot be read: Bad CRC-32.*; write the file"):
        ViewPredictions.load(path, mmap=mmap)


def _archive(path: Path, header: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    text = header.ljust(118 - 1) + "\n"
    member = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + content
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("outputs.npy", member)
        archive.writestr("secret.npy", member)
    return path


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("shape", ["(9, 1, 1)", "(100000000000, 1, 1)", "(2, -1, -1)", "(1, 1, 1)"])
def test_a_header_that_does_not_match_its_member_is_refused_before_memory_is_taken(
    shape: str, mmap: bool, tmp_path: Path
) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    path = _archive(tmp_path / "views.npz", header, np.zeros(2).tobytes())
    with pytest.raises(ValueError, match=r"array 'outputs' cannot be read: shape .* does not match its 16 bytes"):
        ViewPredictions.load(path, mmap=mmap)


def test_a_bomb_is_not_inflated(tmp_path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (16777216, 1, 1), }"
    path = _archive(tmp_path / "views.npz", header, bytes(1 << 27), zipfile.ZIP_DEFLATED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"\d+ bytes would inflate to \d+; save uncompressed"):
        read_npz(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # kilobytes


def test_many_small_members_are_no_way_round_the_limit(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "views.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for member in range(3):
            archive.writestr(f"extra_{member}.npy", bytes(1 << 25))
    with pytest.raises(ValueError, match=rf"views.npz: \d+ bytes would inflate to {3 << 25}; save uncompressed"):
        read_npz(tmp_path / "views.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for second in ("outputs.npy", "outputs"):
        np.savez(tmp_path / "views.npz", outputs=np.ones((3, 1, 2)))
        with zipfile.ZipFile(tmp_path / "views.npz", "a") as archive:
            archive.writestr(second, archive.read("outputs.npy"))
        with pytest.raises(ValueError, match="some of its arrays are missing or there twice; write it again"):
            ViewPredictions.load(tmp_path / "views.npz")


def test_a_lost_member_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "views.npz"
    ViewPredictions(np.ones((3, 1, 2)), np.ones((3, 1, 2))).save(path)
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\x01\x02")
    first = data.index(b"PK\x01\x02")
    data[first + 32] = len(data) - 22 - second  # the first entry of the directory takes the second for its comment
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"views.npz"):
        ViewPredictions.load(path)


# -- tables ---------------------------------------------------------------------------------------


def test_formulas_are_neutralised_and_come_back(tmp_path: Path) -> None:
    cells = np.array(["=1+1", "+1", "-1", "@x", "'=1", "''-", "plain", "'quoted'"])
    write_table(tmp_path / "cells.csv", {"=name": cells, "number": -np.arange(8)})
    text = (tmp_path / "cells.csv").read_text(encoding="utf-8").splitlines()
    assert text[:4] == ["'=name,number", "'=1+1,0", "'+1,-1", "'-1,-2"]
    table = read_table(tmp_path / "cells.csv")
    assert table["=name"].tolist() == cells.tolist()
    assert table["number"].tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_labels_that_are_not_there_are_named(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"^no table at {tmp_path}/none{suffix}; give the path of a .csv"):
        LabelSets.load(tmp_path / f"none{suffix}")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/folder{suffix} is a folder; give the path of a .csv"):
        LabelSets.load(tmp_path / f"folder{suffix}")


def test_carriage_returns_of_text_come_back(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    cells = ["a\r=1", "a\rb\r\nc", 'a"', 'x,"y"', "word", "'", "'' =1"]
    write_table(path, {"n": np.array(cells), "m": np.arange(len(cells)) - 0.5})
    table = read_table(path)
    assert table["n"].tolist() == cells
    assert table["m"].tolist() == [n - 0.5 for n in range(len(cells))]
    labels = LabelSets.from_table(np.arange(3), [0, 1, 0], ["a\r=HYPERLINK(1)", "b", "c"], n_instances=3)
    labels.save(path)
    assert LabelSets.load(path).annotator_names == labels.annotator_names


@pytest.mark.parametrize("cell", [" before", "after ", "\u2003wide", "\n=1", "\t"])
def test_text_with_white_space_around_it_is_not_written_to_a_csv(cell: str, tmp_path: Path) -> None:
    labels = LabelSets.from_table(np.array(["a", f"{cell}b" if cell == "\t" else cell]), [0, 1])
    with pytest.raises(ValueError, match=r"/labels.csv: '.*' has white space around it, which CSV files do not keep"):
        labels.save(tmp_path / "labels.csv")
    assert not (tmp_path / "labels.csv").exists()
    labels.save(tmp_path / "labels.parquet")
    assert LabelSets.load(tmp_path / "labels.parquet").ids.tolist() == labels.ids.tolist()  # type: ignore[union-attr]


def test_blank_labels_are_not_written_to_a_csv(tmp_path: Path) -> None:
    labels = LabelSets.from_array(["", "a"])
    with pytest.raises(ValueError, match=r"/labels.csv: a label is blank, which stands for none in CSV files; write a"):
        labels.save(tmp_path / "labels.csv")
    labels.save(tmp_path / "labels.parquet")
    assert LabelSets.load(tmp_path / "labels.parquet").value.tolist() == ["", "a"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_texts_that_end_with_nul_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"labels{suffix}"
    cells = ["a\0", "a", "b\0c"]
    if suffix == ".csv":
        path.write_text("\n".join(["label", *cells]), encoding="utf-8")
    else:
        write_table(path, {"label": np.array(cells, dtype=object)})
    with pytest.raises(ValueError, match=rf"^{path} cannot be read: a text ends with the character NUL"):
        LabelSets.load(path)


def test_names_of_columns_are_escaped_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text('"a\nb","a\nb"\n1,2\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"names a column twice: a\\nb, a\\nb$"):
        LabelSets.load(path)
    with pytest.raises(ValueError, match=r"^\\n has rows of different lengths"):
        LabelSets.from_table({"\n": [[1], [1, 2]], "label": [0, 1]})


def test_white_space_around_cells_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text(' a ,number, blank\n b ," 1"," "\n" c",2 ,""\n', encoding="utf-8")
    table = {name: column.tolist() for name, column in read_table(path).items()}
    assert table == {"a": ["b", "c"], "number": [1, 2], "blank": [None, None]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LabelSets.from_array(np.array([10**30, 1], dtype=object)),
        lambda: LabelSets.from_array(np.array([1, float("inf")], dtype=object)),
        lambda: LabelSets.from_array(np.array([1, 2], dtype="m8[s]")),
        lambda: LabelSets.from_array(np.array([1, 2], dtype=complex)),
        lambda: LabelSets.from_table([0, 1], [1, 2], count=np.array([1, 2], dtype="m8[s]")),
        lambda: LabelSets.from_table([0, 1], [1, 2], count=np.array([1, 2j])),
        lambda: LabelSets.from_table({"instance": [0, 1], "label": 3}),
        lambda: LabelSets.from_table({"instance": [0, 1], "label": [1]}),
        lambda: LabelSets.from_table(np.array([], dtype=str), np.array([])).align(2),
    ],
)
def test_unusable_labels_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


# -- policies -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> Policy:
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=60)
    views = ViewPredictions(np.eye(3)[label][:, None] + rng.normal(size=(60, 2, 3)), names=["identity", "flip"])
    return fit_policy(views, label, task="classification", model="mixture", guard=False)


@pytest.fixture
def saved(policy: Policy, tmp_path: Path) -> Path:
    policy.save(tmp_path / "policy.json")
    return tmp_path / "policy.json"


def edit(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        *parents, last = name.split("__")
        node = tree
        for parent in parents:
            node = node[int(parent) if parent.isdigit() else parent]
        node[int(last) if last.isdigit() else last] = value
    path.write_text(json.dumps(tree), encoding="utf-8")


def test_a_changed_digit_is_noticed_unless_it_is_meant(policy: Policy, saved: Path) -> None:
    kappa = policy.posterior.calibration.log_kappa.tolist()  # type: ignore[attr-defined]
    edit(saved, posterior__calibration__log_kappa=[kappa[0] + 1e-9, *kappa[1:]])
    with pytest.raises(ValueError, match=r"policy.json is a damaged policy: its checksum .* verify=False"):
        Policy.load(saved)
    assert Policy.load(saved, verify=False).names == policy.names


def test_white_space_and_order_are_no_damage(policy: Policy, saved: Path) -> None:
    tree = json.loads(saved.read_text(encoding="utf-8"))
    saved.write_text(json.dumps(dict(sorted(tree.items())), indent=7), encoding="utf-8")
    assert (Policy.load(saved).weights == policy.weights).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_outputs": 10**8}, r"offset: an array of numbers \(C\) with .* C = 100000000.* has shape \(3,\)"),
        ({"n_outputs": 2}, "has shape"),
        ({"n_outputs": True}, "expected int"),
        ({"weights": [0.5, 0.6]}, "disagree"),
        ({"weights": [2.0, -1.0], "posterior__weights": [2.0, -1.0]}, "not shares"),
        ({"posterior__weights": [0.5, 0.5, 0.0]}, r"\(K\) with K = 2.* has shape \(3,\)"),
        ({"posterior__calibration__log_kappa": [1.0, None]}, "log_kappa: an array is damaged"),
        ({"history__weights": [[1.0]]}, "history|weights"),
        ({"views": ["flip", "flip"]}, "not distinct"),
        ({"converged": 2}, "expected bool"),
        ({"classes": [1, 2]}, "classes must be 3 integers or strings"),
    ],
)
def test_a_policy_is_checked_when_it_is_read(changes: dict[str, Any], message: str, saved: Path) -> None:
    edit(saved, **changes)
    with pytest.raises(ValueError, match=f"policy.json is a damaged policy: .*({message})") as caught:
        Policy.load(saved, verify=False)
    assert "\n" not in str(caught.value)


@cache
def policy_with(kind: str) -> Policy:
    """A policy of every model, with label noise and item difficulty, stacked, or of a task that ADVI fits."""
    classes: dict[str, Any] = {
        "mixture": "mixture",
        "latent": "latent",
        "by class": CategoricalMixture(weights="view_class"),
        "by input": CategoricalMixture(weights="input"),
        "noise": CategoricalMixture(noise="annotator", difficulty=True),
        "stack": "auto",
    }
    if kind in classes:
        data = class_data(5, labels=3 if kind == "noise" else 0)
        return fit_policy(*data, task="classification", model=classes[kind], guard=False)
    numbers: dict[str, Any] = {
        "numbers by input": GaussianMixture(weights="input"),
        "pool of numbers": "latent",
        "stack of numbers": "auto",
    }
    if kind in numbers:
        return fit_policy(*number_data(5), task="regression", model=numbers[kind], guard=False)
    if kind == "several labels":
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(30, 2, 3))
        labels = (logits[:, 0] > 0).astype(int)
        return fit_policy(ViewPredictions(logits), labels, task="multilabel", model="mixture", guard=False)
    pytest.importorskip("pyro", reason="ADVI needs the extra advi")
    task, data = {"numbers": ("regression", number_data), "levels": ("ordinal", level_data),
                  "rankings": ("ranking", ranking_data)}[kind]  # fmt: skip
    with pytest.warns(ConvergenceWarning):
        return fit_policy(*data(5), task=task, engine=ADVI(steps=8, particles=2), guard=False)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("noise", {"posterior__noise__counts": [[1.0, 0.0]] * 3}, "must be positive"),
        ("noise", {"posterior__noise__counts": [[1.0, -1.0]] * 3}, "must be positive"),
        ("noise", {"posterior__noise__levels": [20.0]}, "1 levels of difficulty, not 2"),
        ("noise", {"posterior__information__n_groups": 10**400}, "int"),
        ("numbers", {"posterior__kept": [0, 1, 1e9]}, "positions are not those of views"),
        ("numbers", {"posterior__kept": [0, 0.5, 1]}, "positions are not those of views"),
        ("numbers", {"posterior__kept": [0, 1, 1]}, "positions are not those of views"),
        ("numbers", {"posterior__guide__sites__0__kind": "x"}, "has kind 'x'"),
        ("numbers", {"posterior__guide__sites__0__shape": []}, r"shape \(\)"),
        ("numbers", {"posterior__guide__sites__0__shape": [2]}, "do not make the"),
        ("numbers", {"posterior__state__common_covariance__0": [-1.0, 0.0]}, "common_covariance: .*not symmetric"),
        ("numbers", {"posterior__state__tail": -1.0}, "tail: .*must not be negative"),
        ("pool of numbers", {"posterior__covariance__0__0": -1.0}, "covariance: .*not symmetric"),
        ("pool of numbers", {"posterior__covariance": [[1.0]]}, "covariance: 1 rows; weights and offset have"),
        ("pool of numbers", {"posterior__uncertainty__covariance__0__1": 9.0}, "covariance: .*not symmetric"),
        ("pool of numbers", {"posterior__state__inverse_scale": [[-1.0]]}, "inverse_scale: .*positive semi-definite"),
        ("pool of numbers", {"posterior__uncertainty__stiffness__0": -1.0}, "stiffness: numbers must be positive"),
        ("latent", {"posterior__uncertainty__covariance__0__0": -1e9}, "covariance: .*not symmetric"),
        ("numbers by input", {"posterior__gate__covariance__0__0": -1.0}, "gate: covariance: .*positive semi-definite"),
        ("numbers by input", {"posterior__gate__covariance": [[1.0]]}, "gate: covariance: .*has shape"),
        ("levels", {"n_outputs": 2}, "n_outputs is 2"),
        ("levels", {"posterior__levels": [0, 1, 1, 2]}, "does not predict"),
        ("levels", {"posterior__guide__sites": []}, "do not make the"),
        ("rankings", {"posterior__guide__sites": [], "posterior__guide__mean": [], "posterior__guide__factor": []},
         "no site decides the weights"),
    ],
)  # fmt: skip
def test_a_policy_that_predicts_is_refused_if_other_uses_would_fail(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.json"
    policy_with(kind).save(path)
    Policy.load(path)
    edit(path, **changes)
    with pytest.raises(ValueError, match=f"policy.json is a damaged policy: .*{message}.*; save it again") as caught:
        Policy.load(path, verify=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("component", "tail"), [("normal", 5.0), ("student_t", 0.0)])
def test_heavy_tails_go_with_the_model_of_a_policy(component: Any, tail: float, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    model = GaussianMixture(component=component)
    fit_policy(*number_data(5), task="regression", model=model, guard=False).save(path)
    edit(path, posterior__state__tail=tail)
    with pytest.raises(ValueError, match=f"damaged policy: tail: {tail} degrees of freedom do not go with the comp"):
        Policy.load(path, verify=False)


def test_a_step_of_a_fit_has_no_intervals_and_is_loaded_all_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task": "regression", "model": "mixture", "engine": EM(keep_states=True)}
    step = fit_policy(*number_data(5), guard=False, **options).at_step(2)
    step.save(tmp_path / "step.json")
    again = Policy.load(tmp_path / "step.json")
    np.testing.assert_array_equal(again.weights, step.weights)
    with pytest.raises(ValueError, match="has no intervals"):
        again.weight_interval()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"format": "vbtta-policy", "a": 1e999}', "NaN"])
def test_text_that_is_no_policy_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"policy.json is not a policy: it is not JSON"):
        Policy.load(path)


SCHEMA = jsonschema.Draft202012Validator(json.loads(schema.FILE.read_text(encoding="utf-8")))
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "x", [], {}, [1], ["x"], [[1]])


def test_the_published_schema_is_that_of_the_types() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.laid_out(schema.policy_schema()) + "\n"
    SCHEMA.check_schema(SCHEMA.schema)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all entries of plain data, the first of a list for all."""
    yield path
    for key in node if isinstance(node, dict) else range(min(1, len(node))) if isinstance(node, list) else ():
        yield from places(node[key], (*path, key))


@pytest.mark.parametrize(
    "kind",
    ["mixture", "latent", "by class", "by input", "noise", "stack", "several labels", "numbers by input",
     "pool of numbers", "stack of numbers", "numbers", "levels", "rankings"],
)  # fmt: skip
def test_the_published_schema_says_what_the_checks_say(kind: str, tmp_path: Path) -> None:
    """Both accept every saved policy, and both refuse any entry of it that has a wrong type."""
    policy_with(kind).save(tmp_path / "policy.json")
    tree = json.loads((tmp_path / "policy.json").read_text(encoding="utf-8"))
    SCHEMA.validate(tree)
    disagreements = []
    for path in places(tree):
        if not path or path[0] in ("format", "version", "vbtta", "checksum") or ("stack" in kind and len(path) > 3):
            continue  # read_json looks at these, and members are policies
        *parents, last = path
        node = reduce(getitem, parents, tree)
        old = node[last]
        for value in WRONG:
            node[last] = value
            try:
                Policy.from_dict(tree)
                loads = True
            except (ValueError, TypeError, LookupError, AttributeError):  # which read_json turns into one
                loads = False
            content_decides = type(value) is type(old) or isinstance(value, list | int | float)
            if loads != SCHEMA.is_valid(tree) and (loads or not content_decides):
                disagreements.append((path, value, "loads" if loads else "is refused"))
        node[last] = old
    assert not disagreements, disagreements


@pytest.mark.filterwarnings("ignore:no early stop")
def test_members_and_wrapped_policies_are_checked_too(tmp_path: Path) -> None:
    predictions, labels = number_data(5, n=120)
    first, second = (predictions.take(rows) for rows in (np.arange(60), np.arange(60, 120)))
    stack = fit_policy(first, labels.take(np.arange(60)), task="regression")
    mixture = next(m for m, member in enumerate(stack.members) if isinstance(member.model, GaussianMixture))
    state = f"posterior__members__{mixture}__posterior__state__theta_covariance"
    stages = fit_sequential(first, labels.take(np.arange(60)), task="regression", model="mixture")
    sets = conformalize(stages, second, labels.take(np.arange(60, 120)))
    path = tmp_path / "policy.json"
    for saved, change in (
        (stack, state),
        (stages, "policies__0__posterior__state__theta_covariance"),
        (sets, "policy__policies__0__posterior__state__theta_covariance"),
    ):
        saved.save(path)
        value = reduce(lambda node, key: node[int(key) if key.isdigit() else key], change.split("__"),
                       json.loads(path.read_text(encoding="utf-8")))  # fmt: skip
        edit(path, **{change: (-np.array(value)).tolist()})
        with pytest.raises(ValueError, match=r"theta_covariance: .*not symmetric"):
            type(saved).load(path, verify=False)
    stack.save(path)
    edit(path, posterior__covariance__0__0=-1.0)
    with pytest.raises(ValueError, match="the covariance of its members' weights is none"):
        Policy.load(path, verify=False)


def test_a_csv_that_is_cut_within_quotes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text('id,label\n1,"a\n2,b\n3,c\n')
    with pytest.raises(ValueError, match=r"labels\.csv is not a CSV file in UTF-8: unexpected end of data"):
        LabelSets.load(tmp_path / "labels.csv")
