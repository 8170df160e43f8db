"""The benchmark of dense outputs: its scores, and which method its page calls better."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import dense

pytest.importorskip("torch")


def test_maps_are_scored_by_image_and_rater() -> None:
    raters = [np.array([[[0, 1], [0, 0]], [[0, 1], [1, 0]]], dtype=np.uint8)]
    contour = np.array([[0.1, 0.8], [0.5, 0.2]])
    scores = dense._map_scores("contours", np.stack([1 - contour, contour])[None], raters)
    common = np.log(0.9) + np.log(0.8) + np.log(0.8) + np.log(0.5)
    assert scores["nll"] == pytest.approx([-common / 4])
    assert scores["average_precision"] == pytest.approx([1.0])
    three = np.stack([1 - contour, contour - 0.01, np.full_like(contour, 0.01)])[None]
    assert dense._map_scores("nuclei", three, raters)["dice"] == pytest.approx(
        [np.mean([1.0, 2 / 3])]
    )  # the second rater's other pixel is missed


def test_the_page_says_who_is_better() -> None:
    noise = 0.01 * np.random.default_rng(0).normal(size=(2, 30))
    scores = {
        "stack": {"nll": 0.5 + noise[0], "dice": 0.8 + noise[0]},
        "worse": {"nll": 0.6 + noise[1], "dice": 0.7 + noise[1]},
        "better": {"nll": 0.4 + noise[1], "dice": 0.9 + noise[1]},
        "alike": {"nll": 0.5 + noise[0][::-1], "dice": np.where(np.arange(30) == 0, np.nan, 0.8 + noise[0][::-1])},
    }
    table = dense._table([scores, scores], "stack")
    assert table["alike"]["dice"]["images"] == 29
    assert table["worse"]["nll"]["minus_stack"][0] == pytest.approx(0.1, abs=0.01)
    assert list(dense._verdicts(table, ["nll", "dice"])) == [
        f"* {metric}: the stack is better than worse; worse than better." for metric in ("nll", "dice")
    ]


def test_without_data_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dense.main(["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 1
    assert "--data" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_raters_qualities_of_staple() -> None:
    pytest.importorskip("SimpleITK")
    random = np.random.default_rng(0)
    truth = random.random((40, 40)) < 0.3
    masks = np.stack([np.where(random.random(truth.shape) < 0.1, ~truth, truth) for _ in range(4)]).astype(np.uint8)
    proba, sensitivity, specificity = dense._run_staple(masks)
    assert ((proba > 0.5) == truth).mean() > 0.95
    assert sensitivity == pytest.approx(0.9, abs=0.04)
    assert specificity == pytest.approx(0.9, abs=0.04)
    assert dense._run_staple(np.zeros((3, 4, 4), dtype=np.uint8))[0].max() < 0.2


def test_committed_results_are_those_of_their_page() -> None:
    folder = Path(__file__).parents[1] / "results" / "dense"
    outcome = json.loads((folder / "results.json").read_text())
    assert (folder / "README.md").read_text() == dense.markdown(outcome)
