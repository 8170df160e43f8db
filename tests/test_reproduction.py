"""The runner of the reproduction and its command: kept trials, kills, checks, and errors in one line."""

import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reproduction import running
from reproduction.clouds import Config
from reproduction.command import main
from reproduction.items import ITEMS
from reproduction.records import DataMissing, Places
from reproduction.report import write_item, write_summary
from reproduction.running import Outcome, jobs_of, read_outcome, run_items, verify, write_outcome

ROOT = Path(__file__).parents[1]


class Answer(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def run(*args: str | Path) -> Answer:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = main([str(argument) for argument in args])
        except SystemExit as end:  # --help
            code = int(str(end.code))
    return Answer(code, stdout.getvalue(), stderr.getvalue())


def with_version(monkeypatch: pytest.MonkeyPatch, name: str, version: int) -> None:
    monkeypatch.setitem(ITEMS, name, dataclasses.replace(ITEMS[name], version=version))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two small items, made once by the help text's example."""
    lines = [line.split() for line in run("--help").stdout.splitlines()]
    [example] = [line[4:] for line in lines if line[:4] == ["Example:", "python", "-m", "reproduction"]]
    folder = tmp_path_factory.mktemp("here")
    with contextlib.chdir(folder):
        result = run("figure1", *example)
    assert result.exit_code == 0, result.stderr
    return folder / "results"


def rows_of(path: Path) -> Any:
    """What must be the same in every run."""
    document = json.loads((path / "rows.json").read_text())
    return document["config"], [(trial["trial"], trial["rows"]) for trial in document["trials"]]


def test_the_list_names_every_item() -> None:
    result = run("ls")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(ITEMS)
    assert set(json.loads(run("ls", "--json").stdout)) == set(ITEMS)


def test_an_item_leaves_rows_tables_figures_and_a_summary(results: Path) -> None:
    outcome = read_outcome(results / "figure3" / "rows.json")
    assert outcome.profile == "smoke"
    assert len(outcome.rows) == 2 * len(outcome.trials) == 4
    [made] = outcome.provenance["made"]
    assert made["versions"]["numpy"]
    assert made["processor"]
    assert made["trials"] == len(outcome.trials)
    assert all(trial["made"]["versions"] == made["versions"] and trial["made"]["time"] for trial in outcome.trials)
    assert outcome.provenance["code"] == sorted({trial["code"] for trial in outcome.trials})
    assert (results / "figure3" / "figure3.svg").read_text().startswith("<?xml")
    assert "Henze-Zirkler" in (results / "figure3" / "table.md").read_text()
    summary = (results / "README.md").read_text()
    assert "## figure1" in summary
    assert "does not hold" in summary
    assert "too small to judge" in summary
    assert f"numpy {made['versions']['numpy']}" in summary


def test_finished_trials_are_kept_and_nothing_is_computed_to_draw(results: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (results / ".trials").glob("*.json")}
    drawn = (results / "figure3" / "figure3.svg").read_bytes()
    result = run("figure3", "--profile", "smoke", "--out", results, "--jobs", "1", "--json")
    assert "0 of 2 trials to run, 2 kept from before" in result.stderr
    assert [claim["verdict"] for claim in json.loads(result.stdout)["items"]["figure3"]]
    assert {path.name: path.stat().st_mtime_ns for path in (results / ".trials").glob("*.json")} == before
    assert (results / "figure3" / "figure3.svg").read_bytes() == drawn


def test_committed_tables_and_verdicts_follow_from_the_committed_rows(tmp_path: Path) -> None:
    for name in ITEMS:
        write_item(tmp_path / name, read_outcome(ROOT / "results" / name / "rows.json"))
        for file in ("rows.json", "table.md"):
            assert (tmp_path / name / file).read_text() == (ROOT / "results" / name / file).read_text()
    write_summary(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "results" / "README.md").read_text()


def test_a_trial_has_its_own_place_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item, other = ITEMS["figure3"], ITEMS["figure4"]
    config = item.profiles["smoke"]
    places = {job.kept for job in jobs_of("figure3", config, tmp_path)}
    assert len(places) == len(item.trials(config))
    assert not places & {job.kept for job in jobs_of("figure4", other.profiles["smoke"], tmp_path)}
    with_version(monkeypatch, "figure3", item.version + 1)
    assert not places & {job.kept for job in jobs_of("figure3", config, tmp_path)}


def test_verify_runs_trials_again(results: Path, tmp_path: Path) -> None:
    result = run("figure3", "--verify", "--out", results, "--sample", "1", "--jobs", "1")
    assert result.exit_code == 0
    assert "1 trials agree, largest difference 0.0e+00" in result.stdout

    outcome = read_outcome(results / "figure3" / "rows.json")
    for trial in outcome.trials:
        trial["rows"][1]["skewness"] += 1e-4
    write_outcome(tmp_path / "figure3" / "rows.json", outcome)
    result = run("figure3", "--verify", "--out", tmp_path, "--sample", "1", "--jobs", "1")
    assert result.exit_code == 1
    assert "skewness is" in result.stderr
    assert len(result.stderr.splitlines()) == 2  # what it does, and what is wrong


def test_provenance_is_that_of_the_trials_not_of_the_day_they_are_written(results: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    old, new = sorted((results / ".trials").glob("figure3-*.json"))
    record = json.loads(old.read_text())
    del record["made"]  # as kept before trials said how they were made
    (store / old.name).write_text(json.dumps(record))
    record = json.loads(new.read_text())
    record["made"]["versions"]["numpy"] = "1.0.0"
    record["made"]["processor"] = "abacus"
    (store / new.name).write_text(json.dumps(record))
    assert run("figure3", "--profile", "smoke", "--out", out, "--cache", store).exit_code == 0
    made = {entry["processor"]: entry for entry in read_outcome(out / "figure3" / "rows.json").provenance["made"]}
    assert set(made) == {"abacus", "not recorded"}
    assert made["abacus"]["versions"]["numpy"] == "1.0.0"
    assert made["not recorded"]["versions"] == "not recorded"
    summary = (out / "README.md").read_text()
    assert "1 of them: versions and machine not recorded" in summary
    assert "numpy 1.0.0" in summary


def test_verify_skips_what_it_has_no_data_for(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_faces(outcome: Outcome, *args: Any, **options: Any) -> float:
        if outcome.item == "figure1":
            raise DataMissing("faces: no data folder")
        return verify(outcome, *args, **options)

    monkeypatch.setattr(running, "verify", without_faces)
    arguments = ("--verify", "--out", results, "--sample", "1", "--jobs", "1")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "figure1: skipped, faces: no data folder" in result.stdout
    assert "figure3: 1 trials agree" in result.stdout
    assert "1 of 2 items skipped" in result.stdout
    result = run("figure1", *arguments)
    assert result.exit_code == 1
    assert "reproduction: error: nothing was checked" in result.stderr

    for name in ("figure1", "figure3"):
        outcome = read_outcome(results / name / "rows.json")
        for trial in outcome.trials:
            trial["rows"].pop()
        write_outcome(tmp_path / name / "rows.json", outcome)
    result = run("--verify", "--out", tmp_path, "--sample", "1", "--jobs", "1", "--json")
    assert result.exit_code == 1
    assert "other rows" in result.stderr
    assert set(json.loads(result.stdout)) == {"figure1", "figure3"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_missing_data_are_told_from_a_difference(jobs: int) -> None:
    outcome = read_outcome(ROOT / "results" / "figure6" / "rows.json")
    with pytest.raises(DataMissing, match="no data folder"):
        verify(outcome, Places(), sample=2, jobs=jobs)


def test_verify_refuses_results_of_other_code(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = read_outcome(results / "figure3" / "rows.json")
    outcome.trials.pop()
    with pytest.raises(ValueError, match="other trials"):
        verify(outcome, Places(), sample=1)
    with_version(monkeypatch, "figure3", ITEMS["figure3"].version + 1)
    with pytest.raises(ValueError, match="version 1"):
        verify(outcome, Places(), sample=1)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "name at least one item"),
        (("table9",), 2, "table9: no such item"),
        (("figure1", "--profile", "huge"), 2, "huge"),
        (("figure1", "--jobs", "0"), 2, "--jobs"),
        (("figure1", "--data", "nowhere"), 2, "nowhere: no such folder"),
        (("figure1", "--verify", "--out", "nowhere"), 1, "rows.json does not exist"),
        (("--verify", "--out", "nowhere"), 1, "holds no results"),
        (("figure3", "--verify", "--out", "damaged"), 1, "is no outcome"),
        (("figure1", "--out", "file"), 1, "file"),
    ],
)
def test_wrong_use_and_failures_are_one_line(
    args: tuple[str, ...], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    Path("damaged/figure3").mkdir(parents=True)
    Path("damaged/figure3/rows.json").write_text('{"item": "figure3"}')
    result = run(*args)
    assert result.exit_code == code
    assert result.stderr.startswith("reproduction: error: ")
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_missing_data_skips_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_there(names: list[str], *args: Any, **options: Any) -> Iterator[DataMissing]:
        return (DataMissing("faces are not in any folder; give --data") for _ in names)

    monkeypatch.setattr(running, "run_items", nothing_there)
    result = run("table4", "--out", tmp_path, "--profile", "smoke")
    assert result.exit_code == 1
    assert "table4: skipped, faces are not in any folder" in result.stderr
    assert "reproduction: error: table4 was not made" in result.stderr
    result = run("all", "--out", tmp_path, "--profile", "smoke", "--json")
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)["skipped"]) == set(ITEMS)


def test_a_trial_that_fails_ends_the_run_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poor = Config("gaussian", pool=100, distances=(0.0,), alphas=(0.5, -1.0), draws=20, repeats=2, shown=5)
    monkeypatch.setitem(ITEMS, "figure3", dataclasses.replace(ITEMS["figure3"], profiles={"smoke": poor}))
    for jobs in (1, 2):
        with pytest.raises(ValueError, match="alpha must be"):
            list(run_items(["figure3"], "smoke", Places(), tmp_path / "store", jobs=jobs))
        assert len(list((tmp_path / "store").glob("[!.]*"))) == 1


@pytest.mark.slow
def test_a_run_survives_being_killed(results: Path, tmp_path: Path) -> None:
    whole = rows_of(results / "figure3")
    out, dice = tmp_path / "killed", random.Random(8)
    args = ["figure3", "--profile", "smoke", "--out", str(out)]
    kept = []
    for attempt in range(10):
        process = subprocess.Popen(
            [sys.executable, "-m", "reproduction", *args, "--jobs", str(1 + attempt % 2)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), *sys.path) if path)},
        )
        assert process.stderr is not None
        for _, _line in zip(range(dice.randint(1, 3)), process.stderr, strict=False):
            pass  # what there is to run, then one line a trial
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        _wait_for_the_end(process.pid)
        files = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]
        for path in files:
            _check_whole(path)
        if (out / "figure3" / "rows.json").exists():
            assert rows_of(out / "figure3") == whole
        kept.append(len(list((out / ".trials").glob("[!.]*.json"))))
    assert kept == sorted(kept)
    assert kept[-1] > 0
    assert run(*args).exit_code == 0
    assert rows_of(out / "figure3") == whole
    assert (out / "figure3" / "figure3.svg").read_bytes() == (results / "figure3" / "figure3.svg").read_bytes()


def _wait_for_the_end(group: int) -> None:
    """The workers of a killed runner end by themselves."""
    for _ in range(6000):  # five minutes, on a machine however busy
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("workers outlive their runner")


def _check_whole(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".json":
        json.loads(text)
    elif path.suffix == ".svg":
        assert text.rstrip().endswith("</svg>")
    else:
        assert text.endswith("\n")
