"""Committed results on strong networks and under shift: pages and claims follow from the rows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import shift
from benchmarks.quality_report import markdown, point_metric

RESULTS = Path(__file__).parents[1] / "results"


def _read(name: str) -> dict:
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


def test_the_page_on_strong_networks_is_that_of_its_rows() -> None:
    outcome = _read("strong")
    assert (RESULTS / "strong" / "README.md").read_text(encoding="utf-8") == markdown(outcome)
    assert re.fullmatch(r"[0-9a-f]{40}", outcome["provenance"]["git"])


def test_what_helps_and_hurts_strong_networks_follows_from_the_intervals() -> None:
    outcome = _read("strong")
    page = (RESULTS / "strong" / "README.md").read_text(encoding="utf-8")
    lines = iter(re.findall(r"^\* (.+): better .+? with (.+); worse with (.+)$", page, flags=re.M))
    for data_set in outcome["data_sets"].values():
        point = point_metric(data_set)
        sign = 1 if point == "accuracy" else -1
        _, better, worse = next(lines)
        # Means over trials, and differences of these, computed again from what every trial gave.
        mean = {row["method"]: np.mean([trial[point] for trial in row["by_seed"]]) for row in data_set["methods"]}
        for row in data_set["methods"]:
            value, low, high = row["minus_original"][point]
            assert value == pytest.approx(mean[row["method"]] - mean["original"], abs=1e-9)
            assert low - 1e-9 <= value <= high + 1e-9
            assert (f"`{row['method']}`" in re.split(r", ", better)) == (min(sign * low, sign * high) > 0)
            assert (f"`{row['method']}`" in re.split(r", ", worse)) == (max(sign * low, sign * high) < 0)
        assert {"original", "original+t"} <= set(mean) or data_set["task"] == "regression"


def test_the_page_on_shift_is_that_of_its_rows() -> None:
    outcome = _read("shift")
    page = (RESULTS / "shift" / "README.md").read_text(encoding="utf-8")
    assert page == shift.markdown(outcome)
    for interval in outcome["against_tempered"]:
        reference = "clean" if interval["calibration"] == "none" else interval["calibration"]

        def mean(labels: str, method: str) -> float:
            rows = [row for row in outcome["rows"] if (row["calibration"], row["method"]) == (labels, method)]
            return float(np.mean([row["nll"] for row in rows if row["strength"] > 0]))

        gap = mean(interval["calibration"], interval["method"]) - mean(reference, "original+t")
        assert interval["value"] == pytest.approx(gap, abs=1e-9)
        assert interval["low"] <= interval["value"] <= interval["high"]
