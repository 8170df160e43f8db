"""Every command end to end on small files, and every error of wrong use."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from vbtta import Policy, ViewPredictions, fit_policy
from vbtta.augment import load_views
from vbtta.cli.app import app
from vbtta.cli.files import read_predictions
from vbtta.cli.running import Talk, as_json_text
from vbtta.data.files import read_labels

CLASSES = np.array(["cat", "cow", "dog"])
NAMES = ["identity", "flip", "blur"]
COMMANDS = ["demo", "views", "fit", "predict", "compare", "diagnose", "report"]
MODEL = """
import numpy as np

def make():
    weights = np.random.default_rng(0).normal(size=(4, 3))
    return lambda batch: batch @ weights

ready = make().__call__

def module():
    import torch
    return torch.nn.Linear(4, 3).double()
"""
VIEWS = '[[views]]\nview = "Identity"\n\n[[views]]\nview = "GaussianNoise"\nstd = 0.1\n'


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run(*args: object) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def problem(rng: np.random.Generator, n: int) -> tuple[ViewPredictions, np.ndarray, np.ndarray]:
    """Logits under three views, true classes, and three noisy labels each with gaps (-1)."""
    truth = rng.integers(0, 3, n)
    logits = 2.5 * np.eye(3)[truth][:, None] + rng.normal(size=(n, 3, 3)) * np.array([1.0, 1.2, 4.0])[:, None]
    labels = np.where(rng.random((n, 3)) < 0.85, truth[:, None], rng.integers(0, 3, (n, 3)))
    labels[rng.random((n, 3)) < 0.3] = -1
    labels[0] = truth[0]
    return ViewPredictions(logits, names=NAMES, classes=CLASSES), truth, labels


def wide(path: Path, labels: np.ndarray) -> None:
    rows = [",".join("" if cell < 0 else CLASSES[cell] for cell in row) for row in labels]
    path.write_text("\n".join(["label_1,label_2,label_3", *rows]) + "\n")


def long(path: Path, labels: np.ndarray) -> None:
    rows = [f"{n},{'abc'[m]},{CLASSES[labels[n, m]]}" for n, m in zip(*np.nonzero(labels >= 0), strict=True)]
    path.write_text("\n".join(["instance,annotator,label", *rows]) + "\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples of the help texts name."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(3)
    views, _, labels = problem(rng, 60)
    views.save(folder / "preds.npz")
    wide(folder / "labels.csv", labels)
    long(folder / "long.csv", labels)
    test, truth, _ = problem(rng, 80)
    test.save(folder / "test.npz")
    (folder / "test.csv").write_text("label\n" + "\n".join(CLASSES[truth]) + "\n")
    problem(rng, 20)[0].save(folder / "new_preds.npz")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "mod.py").write_text(MODEL)
    (folder / "views.toml").write_text(VIEWS)
    np.save(folder / "inputs.npy", rng.normal(size=(7, 4)))
    (folder / "run-folder").mkdir()
    return folder


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    monkeypatch.syspath_prepend(str(files))
    return files


def example(command: str) -> list[str]:
    """The command line that a help text shows."""
    text = run(command, "--help").out
    lines = text.partition("Example:")[2].partition("Options:")[0].partition("Arguments:")[0]
    words = shlex.split(" ".join(lines.split()))
    assert words[:2] == ["vbtta", command]
    return words[1:]


def test_the_examples_of_the_help_texts_run(here: Path) -> None:
    shown = ["views", "fit", "predict", "compare", "diagnose", "report"]
    before = (here / "preds.npz").read_bytes()
    for command in shown:
        if command == "report":
            (here / "run-folder" / "policy.json").write_bytes((here / "policy.json").read_bytes())
        if command == "views":
            args = [word.replace("preds.npz", "made.npz") for word in example(command)]
        else:
            args = example(command)
        done = run(*args)
        assert done.code == 0, (command, done.err)
    for name in ("made.npz", "policy.json", "report.html", "predictions.parquet", "comparison.json"):
        assert (here / name).stat().st_size > 0
    assert (here / "run-folder" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (here / "preds.npz").read_bytes() == before
    assert not list(here.glob("*.parts"))


def test_the_demo_runs_from_training_to_report(tmp_path: Path) -> None:
    assert example("demo") == ["demo", "--out", "runs/demo"]
    done = run("demo", "--out", tmp_path / "runs" / "demo", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    weight = {view["name"]: view["weight"] for view in document["views"]}
    assert len(weight) == 12
    assert weight["contrast(1.3)"] + weight["contrast(1.6)"] > 0.3
    assert sum(weight[name] for name in ("zoom(1.2)", "blur(1.5)", "brightness(+0.3)")) < 0.1
    assert document["dice"]["policy"] > document["dice"]["network"] + 0.02
    methods = {record["method"]: record for record in document["comparison"]["methods"]}
    assert methods["vbtta"]["nll_minus_original_high"] < 0
    people = Policy.load(tmp_path / "runs" / "demo" / "policy.json").annotators
    for name, accuracy in zip(people.names, people.accuracy, strict=True):
        assert abs(accuracy - document["skill"][name]) < 0.06
    assert "training a small U-Net" in done.err
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert page.count("<svg") == 5  # differences, weights, reliability, annotators, cost curve
    assert page.count("data:image/png") == 4 * (4 + sum(value > 0 for value in weight.values()))
    again = run("report", tmp_path / "runs" / "demo", "--quiet")
    assert again.code == 0
    assert again.err == ""


@pytest.mark.parametrize("labels", ["labels.csv", "long.csv"])
def test_both_layouts_are_told_apart_and_echoed(labels: str, here: Path, tmp_path: Path) -> None:
    done = run("fit", "preds.npz", labels, "--task", "classification", "--out", tmp_path / "p.json", "--json")
    assert done.code == 0, done.err
    n_labels = len(read_labels(Path("long.csv")))
    people = "" if labels == "labels.csv" else ", 3 annotators"
    assert f"read 60 instances, {n_labels} labels{people}, 3 classes" in done.err
    assert f"({labels}, paired by row)" in done.err
    document = json.loads(done.out)
    weights = {view["name"]: view["weight"] for view in document["views"]}
    assert weights["blur"] == min(weights.values()) < 0.2
    assert sum(weights.values()) == pytest.approx(1)


def test_the_same_labels_from_all_layouts(here: Path, tmp_path: Path) -> None:
    text = (here / "labels.csv").read_text()
    (tmp_path / "named.csv").write_text(text.replace("label_1,label_2,label_3", "label_p1,label_p2,label_p3"))
    flat = read_labels(tmp_path / "named.csv")
    table = {
        "instance": pa.array(flat.instance),
        "annotator": [flat.annotator_names[a] for a in flat.annotator],
        "label": flat.value.tolist(),
    }
    pq.write_table(pa.table(table), tmp_path / "long.parquet")
    deep = read_labels(tmp_path / "long.parquet")
    named = read_labels(here / "long.csv")
    for other in (deep, named):
        np.testing.assert_array_equal(flat.instance, other.instance)
        np.testing.assert_array_equal(flat.value, other.value)
        np.testing.assert_array_equal(flat.annotator, other.annotator)
    assert flat.annotator_names == deep.annotator_names == ("p1", "p2", "p3")
    columns: dict[str, Any] = {"label_ann": ["cat", None], "label_bob": ["cow", "dog"]}
    pq.write_table(pa.table(columns), tmp_path / "wide.parquet")
    assert read_labels(tmp_path / "wide.parquet").annotator_names == ("ann", "bob")


def test_numbers_names_and_gaps_in_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("instance,label\n007,1.5\n010,\n\n011,2\n")
    sets = read_labels(path)
    assert list(sets.ids) == ["007", "011"]  # names, not numbers
    assert sets.value.tolist() == [1.5, 2.0]
    path.write_text("instance,label\n1_000,1.5\n٣,2\n")  # which Python reads as 1000 and 3
    assert list(read_labels(path).ids) == ["1_000", "٣"]
    path.write_text("instance,label\n1e999,é\n")  # which Python reads as infinity
    assert list(read_labels(path).ids) == ["1e999"]
    path.write_text("\ufefflabel\nNA\nNone\n")  # classes may be called that
    assert read_labels(path).value.tolist() == ["NA", "None"]


def test_an_id_column_in_another_order_is_paired_by_id(here: Path, tmp_path: Path) -> None:
    views, truth, _ = problem(np.random.default_rng(0), 60)
    ids = np.array([f"img{row}" for row in range(60)])
    ViewPredictions(views.outputs, names=NAMES, classes=CLASSES, ids=ids).save(tmp_path / "preds.npz")
    order = np.random.default_rng(1).permutation(60)
    rows = [f"{ids[row]},{CLASSES[truth[row]]},w{row % 2}" for row in order]
    (tmp_path / "labels.csv").write_text("\n".join(["item,label,worker", *rows]) + "\n")
    args = ["fit", tmp_path / "preds.npz", tmp_path / "labels.csv", "--task", "classification"]
    done = run(*args, "--out", tmp_path / "p.json")
    assert done.code == 0, done.err
    assert "60 labels, 2 annotators" in done.err
    assert "labels.csv, paired by id)" in done.err
    sets = read_labels(tmp_path / "labels.csv").align(60, ids)
    np.testing.assert_array_equal(sets.value, CLASSES[truth])


def test_predictions_in_parquet(here: Path, tmp_path: Path) -> None:
    views = ViewPredictions.load("preds.npz")
    n, k, _ = views.outputs.shape
    table = {"instance": np.repeat(np.arange(n), k), "view": np.tile(views.names, n)}
    table |= {f"logit_{name}": views.outputs[:, :, c].ravel() for c, name in enumerate(CLASSES)}
    order = np.random.default_rng(0).permutation(n * k)
    pq.write_table(pa.table({name: column[order] for name, column in table.items()}), tmp_path / "p.parquet")
    predictions = read_predictions(tmp_path / "p.parquet")
    assert predictions.classes is not None
    assert predictions.ids is not None
    assert set(predictions.names) == set(views.names)
    np.testing.assert_array_equal(predictions.select(NAMES).outputs[np.argsort(predictions.ids)], views.outputs)
    fit = run("fit", tmp_path / "p.parquet", "long.csv", "--task", "classification", "-o", tmp_path / "p.json")
    assert fit.code == 0
    assert "paired by id" in fit.err
    pq.write_table(pa.table({name: column[:-1] for name, column in table.items()}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="has 0 rows of view 'blur'"):
        read_predictions(tmp_path / "p.parquet")


def test_regression_end_to_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=120)
    mean = truth[:, None, None] + rng.normal(size=(120, 3, 1)) * np.array([0.4, 0.4, 3.0])[:, None]
    views = ViewPredictions(mean, names=NAMES)
    train, test = np.arange(60), np.arange(60, 120)
    for name, rows in (("train", train), ("test", test)):
        views.take(rows).save(tmp_path / f"{name}.npz")
        lines = "\n".join(f"{value},{value + 0.1}" for value in truth[rows])
        (tmp_path / f"{name}.csv").write_text(f"label_1,label_2\n{lines}\n")
    pair = (tmp_path / "train.npz", tmp_path / "train.csv")
    policy, report = tmp_path / "policy.json", tmp_path / "report.html"
    options = ["--task", "regression", "--budget", "2", "-o", policy, "--report", report]
    assert run("fit", *pair, *options).code == 0
    assert Policy.load(policy).weights[2] == 0
    assert report.read_text().count("<svg") >= 3  # weights, cost curve, coverage
    done = run("predict", tmp_path / "test.npz", "--policy", policy, "--out", tmp_path / "out.csv")
    assert done.code == 0, done.err
    header, *rest = (tmp_path / "out.csv").read_text().splitlines()
    assert header == "instance,mean,std,lower,upper"
    table = np.array([line.split(",") for line in rest], dtype=float)
    assert np.corrcoef(table[:, 1], truth[test])[0, 1] > 0.9
    methods = ["--methods", "original,uniform,vbtta-mixture"]
    done = run("compare", *pair, "--test", tmp_path / "test.npz", tmp_path / "test.csv", *methods)
    assert done.code == 0
    assert "vbtta-mixture" in done.out
    done = run(
        "diagnose", pair[0], "-p", policy, "--labels", pair[1], "--incoming", tmp_path / "test.npz", "--no-refit"
    )
    assert done.code == 0
    assert "Incoming views look as before" in done.out


def test_the_consensus_is_written(here: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "policy.json", tmp_path / "consensus.csv"
    done = run("fit", "preds.npz", "long.csv", "--task", "classification", "--out", out, "--consensus", table)
    assert done.code == 0, done.err
    assert f"wrote {out} and {table}" in done.out
    header, *rows = [line.split(",") for line in table.read_text().splitlines()]
    assert header == ["instance", "label", "certainty", "proba_cat", "proba_cow", "proba_dog", "labels"]
    labels = read_labels(Path("long.csv"))
    truth = Policy.load(out).consensus(ViewPredictions.load("preds.npz"), labels)
    assert [row[1] for row in rows] == truth.label.tolist()
    np.testing.assert_allclose([float(row[2]) for row in rows], truth.proba.max(axis=1))
    assert [int(row[-1]) for row in rows] == labels.labels_per_instance.tolist()
    told_off(2, "must end in .csv or .parquet", args=["fit", "p.npz", "l.csv", "--task", "regression", "--out", out,
                                                      "--consensus", "c.txt"])  # fmt: skip


def test_predictions_in_parquet_come_out_as_they_should(here: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    assert run("fit", "preds.npz", "labels.csv", "--task", "classification", "-o", policy).code == 0
    done = run("predict", "new_preds.npz", "-p", policy, "-o", tmp_path / "out.parquet", "--json")
    assert json.loads(done.out)["rows"] == 20
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    expected = Policy.load(policy).predict(ViewPredictions.load("new_preds.npz"))
    assert table["label"] == expected.label.tolist()
    np.testing.assert_array_equal(table["proba_cow"], expected.proba[:, 1])


def test_views_resume_view_by_view(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vbtta import collect

    args = ["views", "--predictor", "pkg.mod:make", "--data", "inputs.npy", "--views", "views.toml", "--draws", "5"]
    args += ["--out"]
    assert run(*args, tmp_path / "whole.npz").code == 0
    real, calls = collect.collect_views, []

    def interrupted(*positional: Any, **options: Any) -> Any:
        calls.append(positional[2][0].name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*positional, **options)

    monkeypatch.setattr(collect, "collect_views", interrupted)
    done = run(*args, tmp_path / "parts.npz")
    assert done.code == 130
    assert "the same command goes on" in done.err
    assert not (tmp_path / "parts.npz").exists()
    assert run(*args, tmp_path / "parts.npz").code == 0
    assert calls == ["identity", "noise(0.1)", "noise(0.1)"]
    assert (tmp_path / "parts.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    views = ViewPredictions.load(tmp_path / "parts.npz")
    model = import_module("pkg.mod").make()
    direct = real(model, np.load("inputs.npy"), load_views("views.toml"), draws=5)
    np.testing.assert_array_equal(views.outputs, direct.outputs)
    np.testing.assert_array_equal(views.variance, direct.variance)


def test_inputs_in_damaged_files_are_an_error_of_one_line(here: Path, tmp_path: Path) -> None:
    inputs = np.load("inputs.npy")
    np.savez(tmp_path / "whole.npz", inputs=inputs)
    np.savez(tmp_path / "unnamed.npz", inputs)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    whole, single = (tmp_path / "whole.npz").read_bytes(), Path("inputs.npy").read_bytes()
    middle = len(whole) // 2
    damaged = {
        "changed.npz": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
        "cut.npz": whole[:middle], "cut.npy": single[:200], "empty.npz": b"", "empty.npy": b"",
        "archive.npy": whole, "array.npz": single,
    }  # fmt: skip
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    args = ["views", "--predictor", "pkg.mod:make", "--views", "views.toml", "--out", tmp_path / "v.npz", "--data"]
    for name in (*damaged, "unnamed.npz", "objects.npy"):
        done = run(*args, tmp_path / name)
        assert done.code == 1
        assert re.fullmatch(rf"vbtta: error: .*{name}.*; .*\n", done.err), done.err
        assert "--debug" not in done.err
    assert run(*args, tmp_path / "whole.npz").code == 0


def test_inputs_in_tables_keep_their_ids(here: Path, tmp_path: Path) -> None:
    inputs, names = np.load("inputs.npy"), [f"row{i}" for i in range(len(np.load("inputs.npy")))]
    columns = {"instance": names, **{f"x{c}": inputs[:, c] for c in range(inputs.shape[1])}}
    args = ["views", "--predictor", "pkg.mod:make", "--views", "views.toml", "--out", tmp_path / "v.npz", "--data"]
    assert run(*args, "inputs.npy").code == 0
    expected = ViewPredictions.load(tmp_path / "v.npz").outputs
    pq.write_table(pa.table(columns), tmp_path / "plain.parquet")
    pq.write_table(pa.table({"inputs": inputs.tolist(), "instance": names}), tmp_path / "lists.parquet")
    lines = [",".join(columns), *(",".join(map(repr, row)) for row in inputs.tolist())]
    lines[1:] = [f"{name},{line}" for name, line in zip(names, lines[1:], strict=True)]
    (tmp_path / "plain.csv").write_text("\n".join(lines) + "\n")
    for file in ("plain.parquet", "lists.parquet", "plain.csv"):
        done = run(*args, tmp_path / file)
        assert done.code == 0, done.err
        views = ViewPredictions.load(tmp_path / "v.npz")
        np.testing.assert_array_equal(views.outputs, expected)
        assert list(views.ids) == names  # type: ignore[arg-type]
    (tmp_path / "text.csv").write_text("a,b\n1,x\n")
    told_off(1, "text.csv", "must be numbers", args=[*args, tmp_path / "text.csv"])
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "plain.parquet").read_bytes()[:-9])
    told_off(1, "torn.parquet cannot be read", args=[*args, tmp_path / "torn.parquet"])


def test_weights_are_loaded_without_running_code(here: Path, tmp_path: Path) -> None:
    import pickle

    import torch

    args = ["views", "--predictor", "pkg.mod:module", "--data", "inputs.npy", "--views", "views.toml", "--out"]
    net = torch.nn.Linear(4, 3).double()
    torch.save(net.state_dict(), tmp_path / "good.pt")
    assert run(*args, tmp_path / "out.npz", "--weights", tmp_path / "good.pt").code == 0
    expected = net(torch.from_numpy(np.load("inputs.npy"))).detach().numpy()
    np.testing.assert_allclose(ViewPredictions.load(tmp_path / "out.npz").outputs[:, 0], expected)

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    with open(tmp_path / "evil.pt", "wb") as file:
        pickle.dump(Evil(), file)
    done = run(*args, tmp_path / "out2.npz", "--weights", tmp_path / "evil.pt")
    assert done.code == 1
    assert "evil.pt holds no weights for pkg.mod:module" in done.err
    assert not (tmp_path / "pwned").exists()


def told_off(code: int, *words: str, args: Sequence[object]) -> None:
    """One line on the error stream that says what is wrong; nothing on standard output."""
    done = run(*args)
    assert done.code == code, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("read ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("vbtta: error: ")
    for word in words:
        assert word in lines[0]
    assert done.out == ""


def test_wrong_use_and_failures_are_one_line(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"

    def fit(views: str | Path, labels: str | Path, target: Path = out) -> list[str | Path]:
        return ["fit", views, labels, "--task", "classification", "--out", target]

    told_off(2, "nope.npz", "no such file", args=fit("nope.npz", "labels.csv"))
    told_off(2, "labels.xlsx", args=fit("preds.npz", _touch(tmp_path / "labels.xlsx")))
    task = ["fit", "preds.npz", "labels.csv", "--out", out, "--task"]
    told_off(2, "--task", "did you mean 'classification'?", args=[*task, "clasification"])
    told_off(2, "--model", "did you mean 'latent'?", args=[*task, "classification", "--model", "latnet"])
    told_off(2, "--engine", "did you mean 'advi'?", args=[*task, "classification", "--engine", "adiv"])
    told_off(2, "No such option", args=[*fit("preds.npz", "labels.csv"), "--nope"])
    told_off(2, "--sequential", args=[*fit("preds.npz", "labels.csv"), "--sequentail"])
    told_off(2, "Missing", args=["predict", "preds.npz"])
    told_off(2, "No such command", "'fit'", args=["fti"])
    told_off(2, "p.txt", ".json", args=fit("preds.npz", "labels.csv", tmp_path / "p.txt"))
    test = ["--test", "test.npz", "test.csv"]
    told_off(2, "magic", "uniform", args=["compare", "preds.npz", "labels.csv", *test, "--methods", "magic"])
    compare = ["compare", "preds.npz", "labels.csv", "--methods"]
    told_off(2, "did you mean 'uniform'?", args=[*compare, "original,unifrom", *test])
    made = ["--data", "inputs.npy", "--views", "views.toml", "--out", tmp_path / "v.npz"]
    told_off(2, "pkg.nope", args=["views", "--predictor", "pkg.nope:make", *made])
    on_ray = ["views", "--predictor", "pkg.mod:make", "--data", "x.parquet", "--views", "views.toml"]
    on_ray += ["--backend", "ray"]
    told_off(2, "--backend ray needs --key", args=[*on_ray, "--out", tmp_path / "parts"])
    told_off(2, "no attribute 'nope'", args=["views", "--predictor", "pkg.mod:nope", *made])
    told_off(2, "a function without arguments", args=["views", "--predictor", "pkg.mod:ready", *made])
    told_off(2, "no such folder", args=["report", tmp_path / "nope"])
    told_off(2, "policy.json", args=["report", tmp_path])

    (tmp_path / "text.npz").write_text("not an archive")
    told_off(1, "text.npz is not an .npz file", args=fit(tmp_path / "text.npz", "labels.csv"))
    np.savez(tmp_path / "pickled.npz", outputs=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    told_off(1, "pickled.npz", "never loaded", args=fit(tmp_path / "pickled.npz", "labels.csv"))
    (tmp_path / "unknown.csv").write_text("instance,annotator,label\n0,a,cat\n5000,a,dog\n")
    told_off(1, "unknown.csv", "5000", "60 inputs", args=fit("preds.npz", tmp_path / "unknown.csv"))
    (tmp_path / "ids.csv").write_text("id,label\nx7,cat\nx8,dog\n")
    told_off(1, "by id (such as 'x7')", "add an array `ids`", args=fit("preds.npz", tmp_path / "ids.csv"))
    (tmp_path / "short.csv").write_text("label_1,label_2\ncat,\ndog,cat\n")
    told_off(1, "short.csv", "2 instances", "for 60", args=fit("preds.npz", tmp_path / "short.csv"))
    (tmp_path / "ragged.csv").write_text("label_1,label_2\ncat\n")
    told_off(1, "ragged.csv", "line 2", args=fit("preds.npz", tmp_path / "ragged.csv"))
    (tmp_path / "class.csv").write_text("instance,label\n0,horse\n")
    told_off(1, "class.csv", "horse", args=fit("preds.npz", tmp_path / "class.csv"))
    (tmp_path / "typo.csv").write_text("instance,annotator,lable\n0,a,cat\n")
    told_off(
        1, "typo.csv", "column 'lable' is not used; rename it to 'label'", args=fit("preds.npz", tmp_path / "typo.csv")
    )
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    told_off(1, "other.csv", "id, item, task", "label_1", args=fit("preds.npz", tmp_path / "other.csv"))
    (tmp_path / "marks.csv").write_text("instance;label\n0;cat\n")
    told_off(1, "marks.csv has ';' between", "write commas", args=fit("preds.npz", tmp_path / "marks.csv"))
    (tmp_path / "labeler.csv").write_text("image,labeler,label\n0,a,cat\n")
    renamed = "'labeler' is not used; rename it to 'annotator'"
    told_off(1, renamed, args=fit("preds.npz", tmp_path / "labeler.csv"))
    (tmp_path / "who.csv").write_text("instance,anotator,label\n0,a,cat\n")
    told_off(
        1, "who.csv", "'anotator' is not used; rename it to 'annotator'", args=fit("preds.npz", tmp_path / "who.csv")
    )
    told_off(1, "does not exist", "create it", args=fit("preds.npz", "labels.csv", tmp_path / "nope" / "p.json"))
    (tmp_path / "folder.json").mkdir()
    told_off(1, "it is a folder", args=fit("preds.npz", "labels.csv", tmp_path / "folder.json"))

    assert run(*fit("preds.npz", "labels.csv")).code == 0
    views = ViewPredictions.load("preds.npz")
    ViewPredictions(views.outputs, names=["identity", "crop", "zoom"], classes=CLASSES).save(tmp_path / "crop.npz")
    result = ["--out", tmp_path / "o.csv"]
    told_off(1, "p.json does not fit", "'flip'", args=["predict", tmp_path / "crop.npz", "--policy", out, *result])
    told_off(1, "is not a policy", args=["predict", "preds.npz", "--policy", "labels.csv", *result])
    told_off(1, "p.json does not fit", args=["diagnose", tmp_path / "crop.npz", "--policy", out])
    left = {path.name for path in tmp_path.iterdir()}
    assert not {"o.csv", "v.npz"} & left
    assert not any(name.endswith(".part") for name in left)


def test_options_that_need_another_are_not_ignored(here: Path, tmp_path: Path) -> None:
    fit = ["fit", "preds.npz", "labels.csv", "--task", "classification", "--out", tmp_path / "p.json"]
    told_off(2, "--tolerance goes with --sequential", args=[*fit, "--tolerance", "0.1"])
    told_off(2, "--workers goes with --backend ray", args=[*fit, "--workers", "2"])
    told_off(2, "leave out --no-guard", args=[*fit, "--no-guard", "--hard-guard"])
    told_off(2, "--sequential has no guard", args=[*fit, "--sequential", "--no-guard"])
    told_off(2, "--sequential has no guard", args=[*fit, "--sequential", "--hard-guard"])
    views = ["views", "--predictor", "pkg.mod:make", "--data", "inputs.npy", "--views", "views.toml", "--out"]
    told_off(2, "--key goes with --backend ray", args=[*views, tmp_path / "v.npz", "--key", "x"])
    told_off(2, "--positions goes with --dense", args=[*views, tmp_path / "v.npz", "--positions", "5"])
    told_off(2, "--ignore goes with --dense", args=[*views, tmp_path / "v.npz", "--ignore", "0"])
    told_off(2, "--masks goes with --data", args=["report", here, "--masks", here])
    told_off(2, "--data needs --masks, --predictor and --views", args=["report", here, "--data", here])
    predict = ["predict", "preds.npz", "--policy", "policy.json", "--out", tmp_path / "o.csv"]
    told_off(2, "--entropy goes with --dense", args=[*predict, "--entropy"])
    told_off(2, "--calibration goes with --sets", args=[*predict, "--calibration", "preds.npz", "labels.csv"])


def test_several_labels_an_input(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    classes, ids = np.array(["car", "bus", "bike"]), np.array([f"img{row}" for row in range(160)])
    logits = rng.normal(scale=2, size=(160, 3))
    present = (rng.random((160, 3)) < 1 / (1 + np.exp(-logits))).astype(int)
    outputs = 2 * logits[:, None] + rng.normal(size=(160, 3, 3)) * np.array([1.0, 1.0, 4.0])[:, None]
    for name, rows in (("", slice(0, 100)), ("test_", slice(100, 160))):
        part = ViewPredictions(outputs[rows], names=NAMES, classes=classes, ids=ids[rows])
        part.save(tmp_path / f"{name}predictions.npz")
        lines = [f"{ids[row]},{','.join(map(str, present[row, ::-1]))}" for row in range(160)[rows]][::-1]
        (tmp_path / f"{name}labels.csv").write_text("\n".join(["id,label_bike,label_bus,label_car", *lines]))
    pair, test = ([tmp_path / f"{end}{name}" for name in ("predictions.npz", "labels.csv")] for end in ("", "test_"))
    policy = tmp_path / "policy.json"
    done = run("fit", *pair, "--task", "multilabel", "--out", policy, "--report", tmp_path / "fit.html")
    assert done.code == 0, done.err
    assert "100 instances, 300 labels, 3 classes" in done.err
    fitted = Policy.load(policy)
    assert fitted.multilabel
    assert fitted.weights[2] < 0.1
    direct = fit_policy(ViewPredictions.load(pair[0]), present[:100], task="multilabel")
    np.testing.assert_allclose(fitted.weights, direct.weights, atol=1e-6)
    assert run("predict", test[0], "--policy", policy, "--out", tmp_path / "out.parquet").code == 0
    proba = pq.read_table(tmp_path / "out.parquet").to_pydict()["proba_bus"]
    assert np.corrcoef(proba, 1 / (1 + np.exp(-logits[100:, 1])))[0, 1] > 0.9
    methods = ("--task", "multilabel", "--methods", "original,uniform,vbtta-mixture")
    done = run("compare", *pair, "--test", *test, *methods, "--out", tmp_path / "comparison.json")
    assert done.code == 0, done.err
    assert "vbtta-mixture" in done.out
    done = run("diagnose", pair[0], "-p", policy, "--labels", pair[1], "--incoming", test[0], "--no-refit")
    assert "Simulated label sets look like the observed ones" in done.out, done.err
    assert run("report", tmp_path).code == 0
    assert "Reliability on test labels" in (tmp_path / "report.html").read_text()
    (tmp_path / "labels.csv").write_text("id,label_bike,label_bsu,label_car\nimg0,0,1,0\n")
    told_off(1, "no column 'bus'; did you mean 'bsu'?", args=["fit", *pair, *methods[:2], "--out", policy])


def test_remedies_are_for_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proba = rng.dirichlet(np.ones(3), size=(60, 2))
    np.savez(tmp_path / "logits.npz", outputs=np.log(proba), names=["identity", "flip"])
    np.savez(tmp_path / "proba.npz", outputs=proba, names=["identity", "flip"])
    classes = proba[:, 0].argmax(axis=1)  # which the identity says, and the flip does not
    (tmp_path / "numbers.csv").write_text("label\n" + "\n".join(map(str, classes)))
    (tmp_path / "words.csv").write_text("label\n" + "\n".join(np.array(["cat", "cow", "dog"])[classes]))
    end = ["--task", "classification", "--out", tmp_path / "p.json"]
    words = "add an array `classes` to the predictions file"
    told_off(1, "is not a class number", words, args=["fit", tmp_path / "logits.npz", tmp_path / "words.csv", *end])
    numbers = ["fit", tmp_path / "proba.npz", tmp_path / "numbers.csv", *end, "--quiet"]
    told_off(1, "predictions look like probabilities: all rows of view", "np.log", args=numbers)
    assert "(fit again with --hard-guard" in run("fit", tmp_path / "logits.npz", tmp_path / "numbers.csv", *end).out
    predict = ["predict", tmp_path / "proba.npz", "--policy", tmp_path / "p.json", "--out", tmp_path / "out.csv"]
    told_off(1, "does not fit", "predictions look like probabilities", args=predict)
    told_off(2, "--level is for intervals of numbers; give --sets", args=[*predict, "--level", "0.5"])
    np.savez(tmp_path / "named.npz", outputs=np.log(proba), ids=[f"i{row}" for row in range(60)])
    unnamed = ["fit", tmp_path / "named.npz", tmp_path / "numbers.csv", *end]
    told_off(1, "by id (such as 'i0') but labels have no ids; give labels a column 'id' with these", args=unnamed)


def test_errors_name_the_file_that_was_asked_for(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "p.json"

    def fit(views: str | Path, labels: str | Path, target: Path = out) -> list[str | Path]:
        return ["fit", views, labels, "--task", "classification", "--out", target]

    mean = ViewPredictions.load("preds.npz").outputs.copy()
    mean[3, 1, 0] = np.nan
    np.savez(tmp_path / "gaps.npz", outputs=mean, names=NAMES)
    told_off(1, f"{tmp_path / 'gaps.npz'}: outputs must be finite", args=fit(tmp_path / "gaps.npz", "labels.csv"))
    columns = {"instance": [0, 0], "view": ["identity", "flip"], "output": [1.0, float("nan")]}
    pq.write_table(pa.table(columns), tmp_path / "gaps.parquet")
    told_off(1, "gaps.parquet: outputs must be finite", args=fit(tmp_path / "gaps.parquet", "labels.csv"))
    for header in ("instance,annotator,label", "label_1,label_2", "label_1,label_2\n,", "label"):
        (tmp_path / "header.csv").write_text(header + "\n")
        told_off(1, "header.csv holds no labels", args=fit("preds.npz", tmp_path / "header.csv"))

    opened = os.open

    def refused(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".part"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", refused)
    done = run(*fit("preds.npz", "labels.csv"), "--quiet")
    assert done.code == 1
    assert done.err == f"vbtta: error: {out}: Permission denied; check the path and its permissions\n"


def test_words_for_numbers_are_shown_as_they_are(tmp_path: Path) -> None:
    ViewPredictions(np.zeros((2, 2, 1)), names=["identity", "flip"]).save(tmp_path / "v.npz")
    (tmp_path / "words.csv").write_text("label\n1.5\ncow\n")
    args = ["fit", tmp_path / "v.npz", tmp_path / "words.csv", "--task", "regression", "-o", tmp_path / "p.json"]
    told_off(1, "got 'cow'", args=args)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "vbtta.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vbtta ")
    done = subprocess.run([sys.executable, "-m", "vbtta.cli", "fit"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "see vbtta fit --help" in done.stderr


def test_a_report_says_what_is_not_recorded(here: Path, tmp_path: Path) -> None:
    args = ["preds.npz", "labels.csv", "--task", "classification", "--out", tmp_path / "policy.json"]
    assert run("fit", *args, "--report", tmp_path / "fit.html").code == 0
    assert run("report", tmp_path).code == 0
    entry = "<dt>seed</dt><dd>not recorded</dd>"
    assert entry in (tmp_path / "report.html").read_text()
    assert "<dt>options</dt><dd>not recorded</dd>" in (tmp_path / "report.html").read_text()
    assert entry not in (tmp_path / "fit.html").read_text()
    (tmp_path / "run.json").write_text('{"options": {"seed": 3}}')
    assert run("report", tmp_path, "--out", tmp_path / "report.html").code == 0
    assert "<dt>seed</dt><dd>3</dd>" in (tmp_path / "report.html").read_text()


def test_a_report_of_a_policy_alone_says_what_is_left_out(here: Path, tmp_path: Path) -> None:
    fit = ["fit", "preds.npz", "labels.csv", "--task", "classification", "--model", "mixture", "--no-guard"]
    assert run(*fit, "--out", tmp_path / "policy.json").code == 0
    assert "has no predictions.npz with labels.csv" in run("report", tmp_path).err
    (tmp_path / "report.html").write_text("the page of the fit")
    told_off(2, "report.html may have more", "--out", args=["report", tmp_path])
    assert (tmp_path / "report.html").read_text() == "the page of the fit"
    for name, kept in (("preds.npz", "predictions.npz"), ("labels.csv", "labels.csv")):
        (tmp_path / kept).write_bytes(Path(name).read_bytes())
    assert "has no predictions.npz" not in run("report", tmp_path).err


def test_debug_shows_the_traceback(here: Path, tmp_path: Path) -> None:
    args = ["fit", tmp_path / "labels.csv", "labels.csv", "--task", "regression", "--out", tmp_path / "p.json"]
    assert "Traceback" not in run(*args).err
    done = run(*args, "--debug")
    assert done.code == 2
    assert "Traceback" in done.err


def test_results_and_remarks_go_separate_ways(here: Path, tmp_path: Path) -> None:
    args = ["compare", "preds.npz", "labels.csv", "--test", "test.npz", "test.csv", "--methods", "original,vbtta"]
    loud, quiet = run(*args), run(*args, "--quiet", "--json")
    assert quiet.err == ""
    assert "read 60 instances" in loud.err
    assert "read" not in loud.out
    assert "Test accuracy" in loud.out
    assert "warning" not in loud.err
    same = run("compare", "preds.npz", "labels.csv", "--test", "preds.npz", "labels.csv", "--methods", "uniform")
    assert "vbtta: warning: test_predictions hold rows that the methods are fitted to (at least 60 of 60)" in same.err
    document = json.loads(quiet.out)
    assert [record["method"] for record in document["methods"]] == ["original", "vbtta"]


def test_what_a_predictor_prints_is_no_result(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talkative.py").write_text(
        "from pkg.mod import make as _make\n\ndef make():\n    print('hi')\n    return _make()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    args = ["views", "--predictor", "talkative:make", "--data", "inputs.npy", "--views", "views.toml"]
    done = run(*args, "--out", tmp_path / "v.npz", "--json")
    assert "hi" in done.err
    assert json.loads(done.out)["inputs"] == 7


def test_json_knows_no_infinity() -> None:
    assert json.loads(as_json_text({"a": [float("nan"), 1.0], "b": {"c": float("inf")}})) == {
        "a": [None, 1.0],
        "b": {"c": None},
    }


def test_names_cannot_command_the_terminal() -> None:
    text = Talk(False, False).table([["view", "weight"], ["\x1b[31mred[bold]", "1"]])
    assert "\x1b" not in text
    assert "[bold]" in text


def _touch(path: Path) -> Path:
    path.touch()
    return path


def test_stages_and_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("fit", 500), ("held", 150), ("new", 200)):
        truth = rng.integers(0, 3, n)
        strength = np.where(rng.random(n) < 0.7, 12.0, 1.0)[:, None, None]
        logits = strength * np.eye(3)[truth][:, None] + rng.normal(size=(n, 3, 3))
        ViewPredictions(logits, names=NAMES, classes=CLASSES).save(tmp_path / f"{name}.npz")
        (tmp_path / f"{name}.csv").write_text("label\n" + "\n".join(CLASSES[truth]) + "\n")
    fitted, new, held = ([tmp_path / f"{name}{end}" for end in (".npz", ".csv")] for name in ("fit", "new", "held"))
    staged, out, page = tmp_path / "staged.json", tmp_path / "out.csv", tmp_path / "page.html"
    options = ("--task", "classification", "--model", "latent", "--sequential", "--tolerance", "0.1", "--json")
    result = run("fit", *fitted, *options, "--out", staged, "--report", page)
    document = json.loads(result.out)["sequential"]
    assert len(document["stages"]) > 1
    assert document["loss_upper"] <= 0.1
    assert "an input stops early by its expected gain" in page.read_text()
    sets = ("predict", new[0], "--policy", staged, "--out", out, "--sets", "0.9", "--sets", "0.5")
    assert "--calibration PREDICTIONS LABELS" in run(*sets).err
    assert "rows that the policy was fitted to" in run(*sets, "--calibration", *fitted).err
    assert run(*sets, "--calibration", *held).code == 0
    header, *rows = [line.split(",") for line in out.read_text().splitlines()]
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    held_labels = new[1].read_text().split()[1:]
    inside = [label in text.split("|") for label, text in zip(held_labels, columns["set_0.9"], strict=True)]
    assert 0.8 < np.mean(inside) < 0.99
    assert [len(text.split("|")) if text else 0 for text in columns["set_0.9"]] == list(map(int, columns["size_0.9"]))
    assert set(columns["passes"]) > {"1"}
    covering = tmp_path / "covering.json"
    run("fit", *held, "--task", "classification", "--model", "latent", "--sets", "0.9", "--out", covering)
    assert run("predict", new[0], "--policy", covering, "--sets", "0.9", "--out", out).code == 0
    assert "fit with --sets 0.8" in run("predict", new[0], "--policy", covering, "--sets", "0.8", "--out", out).err
    assert "views are kept" in run("diagnose", held[0], "--policy", covering, "--no-refit").out


def test_damaged_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "views.toml").write_text(VIEWS)
    np.savez(tmp_path / "inputs.npz", inputs=np.zeros((3, 4)), ids=["a", "b", "c"])
    whole = (tmp_path / "inputs.npz").read_bytes()
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "changed.npz").write_bytes(whole[:150] + b"\x01" + whole[151:])
    (tmp_path / "cut.npz").write_bytes(whole[:-30])
    (tmp_path / "empty.npy").write_bytes(b"")
    for name, reason in {
        "other.npz": "has no array `inputs`; write it with",
        "changed.npz": "array 'inputs' cannot be read: Bad CRC-32",
        "cut.npz": "is not an .npz file",
        "empty.npy": "cannot be read: EOF",
    }.items():
        options = ["--views", tmp_path / "views.toml", "--out", tmp_path / "preds.npz"]
        result = run("views", "--predictor", "json:loads", "--data", tmp_path / name, *options)
        assert result.code in (1, 2)
        assert re.fullmatch(rf"vbtta: error: \S*{name}:? {reason}.*\n", result.err), result.err
