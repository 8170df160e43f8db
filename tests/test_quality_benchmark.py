"""The quality benchmark: its numbers are those of compare, finished cells are not run again, verdicts follow."""

import json

import numpy as np
import pytest

from benchmarks import cells, cifar10n, quality
from benchmarks.pooled import Pooled, pool, verdicts
from benchmarks.quality_report import figure, markdown
from benchmarks.train_models import Part, Prepared
from vbtta import ViewPredictions, compare

METHODS = ["original", "uniform", "mixture_mle", "vbtta"]  # enough for every kind of verdict


def prepared(seed=0, n=300):
    """Three views of four classes; in calibration three people label."""
    rng = np.random.default_rng(seed)

    def part(start):
        truth = rng.integers(0, 4, n)
        logits = rng.normal(size=(n, 3, 4))
        logits[np.arange(n), :, truth] += [2.0, 1.5, 0.2]
        people = np.where(rng.random((n, 3)) < 0.8, truth[:, None], rng.integers(0, 4, (n, 3)))
        labels = {"clean": truth, **{f"label_{person}": people[:, person - 1] for person in (1, 2, 3)}}
        ids = np.arange(start, start + n)
        return Part(ViewPredictions(logits, names=["identity", "flip", "crop"], ids=ids), labels)

    return Prepared("mnist1000", "classification", {"dev": part(0), "calibration": part(1000), "test": part(2000)})


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "prepare", lambda name, seed, data, cache: prepared(seed))
        patch.setattr(quality, "prepare_all", lambda names, seeds, data, cache, jobs: None)
        patch.setattr(quality, "data_hashes", lambda name, seed, cache: {})
        patch.setattr(quality, "methods_of", lambda kind: METHODS)
        return quality.run(names=["mnist1000"], seeds=[0, 1], part="dev", data=folder, cache=folder)


def test_values_are_those_of_compare(outcome):
    for row in outcome["data_sets"]["mnist1000"]["methods"]:
        for seed, scores in enumerate(row["by_seed"]):
            task = cells.task_of(prepared(seed), seed, part="dev")
            expected = compare(
                task.calibration,
                task.labels,
                task.test,
                task.test_truth,
                task="classification",
                methods=[row["method"]],
                resamples=1,
                seed=seed,
            )
            assert scores == {metric: pytest.approx(expected[row["method"], metric]) for metric in expected.metrics}
        both = [scores["nll"] for scores in row["by_seed"]]
        assert row["values"]["nll"] == pytest.approx(np.mean(both))


def test_the_outcome_is_plain_and_readable(outcome, tmp_path):
    quality.write(outcome, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["part"] == "dev"
    page = (tmp_path / "out" / "README.md").read_text()
    assert page == markdown(outcome)
    assert "| vbtta |" in page
    assert "the default policy has the best NLL" in page
    assert (tmp_path / "out" / "figure.svg").read_text().startswith("<?xml")
    assert len(figure(outcome).axes) == 1


def test_finished_cells_are_not_run_again_and_changed_data_are(tmp_path, monkeypatch):
    task = cells.task_of(prepared(), 0, part="dev")
    first = cells.run_cells(task, METHODS[:3], str(tmp_path), part="dev", say=False)

    def fail(*arguments):
        raise AssertionError("ran again")

    monkeypatch.setattr(cells, "_run", fail)
    again = cells.run_cells(task, METHODS[:3], str(tmp_path), part="dev", say=False)
    for before, after in zip(first, again, strict=True):
        assert before.record == after.record
        np.testing.assert_array_equal(before.columns["ece"], after.columns["ece"])
    other = cells.task_of(prepared(1), 0, part="dev")
    with pytest.raises(AssertionError, match="ran again"):
        cells.run_cells(other, METHODS[:1], str(tmp_path), part="dev", say=False)


def test_calibration_labels_never_include_the_truth():
    task = cells.task_of(prepared(), 0, part="test")
    assert task.labels.value.shape == (900,)
    assert task.labels.annotator_names == ("annotator_0", "annotator_1", "annotator_2")
    assert not np.array_equal(task.labels.value.reshape(-1, 3)[:, 0], task.truth)
    assert set(task.calibration.ids) <= set(range(1000, 1300))
    assert set(task.test.ids) == set(range(2000, 2300))


def test_shared_images_are_resampled_together(tmp_path):
    cells_by_seed = {}
    for seed in (0, 1):
        task = cells.task_of(prepared(), 0, part="dev")  # the same data twice: nothing is learned from the second
        cells_by_seed[seed] = cells.run_cells(task, METHODS[:2], str(tmp_path), part="dev", say=False)
    ids = np.arange(300)
    once = pool("classification", {0: cells_by_seed[0]}, {0: ids}).difference("uniform", "original", "nll")
    twice = pool("classification", cells_by_seed, {0: ids, 1: ids}).difference("uniform", "original", "nll")
    apart = pool("classification", cells_by_seed, {0: ids, 1: ids + 300}).difference("uniform", "original", "nll")
    assert twice == pytest.approx(once)
    assert apart[2] - apart[1] < 0.85 * (once[2] - once[1])


def pooled(loss, spread=0.01):
    """NLL by method, with accuracy its negative, and noise in the replicates."""
    names = tuple(loss)
    value = np.array(list(loss.values()))
    values = np.stack([-value, value, value, value], axis=1)
    noise = spread * np.random.default_rng(0).normal(size=(2000, len(names), 4))
    baselines = tuple(name for name in names if not name.startswith("vbtta"))
    metrics = ("accuracy", "nll", "brier", "ece")
    return Pooled("classification", names, baselines, metrics, values, values[None], values + noise)


def test_verdicts_follow_from_the_intervals():
    def holds(loss):
        return [verdict.holds for verdict in verdicts(pooled(loss))]

    assert holds({"original": 1.0, "vbtta": 0.5, "vbtta-half": 0.5}) == [True, True, True]
    assert holds({"original": 0.5, "vbtta": 1.0, "vbtta-half": 2.0}) == [False, False, False]
    assert holds({"original": 0.999, "vbtta": 1.0, "vbtta-half": 1.001}) == [True, True, True]
    assert holds({"original": 1.0, "vbtta": 0.5, "vbtta-latent": 0.4}) == [False, True]


def test_margins_follow_from_the_numbers():
    losses = {**dict.fromkeys(cifar10n.RIVALS, 0.5), "vbtta": 0.4}
    good = {"consensus": 0.95, "majority": 0.91, "annotators_estimated": 0.83, "annotators_true": 0.82}
    margins = cifar10n.margins(pooled(losses), [good])
    assert [row["holds"] for row in margins] == [True, False, True, True, True]  # its calibration error is 40 % here
    worse = {**good, "consensus": 0.93, "annotators_estimated": 0.88}
    margins = cifar10n.margins(pooled({**losses, "vbtta": 0.46}), [good, worse])
    assert [row["holds"] for row in margins] == [False, False, True, True, False]


def test_without_data_the_outcome_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("VBTTA_DATA", raising=False)
    assert "no data folder" in quality.run()["skipped"]
    assert "no data folder" in cifar10n.run(data=str(tmp_path / "nowhere"))["skipped"]
    with pytest.raises(ValueError, match="unknown data sets"):
        quality.run(names=["imagenet"], data=str(tmp_path))
