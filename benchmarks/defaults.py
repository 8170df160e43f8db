"""Speed of what users call first: the default fit, select_views and predict, beside the baselines.

Times are of one process's processor, in passes of np.exp over the (N, K, C) array in double precision (for predict, in
the array's own), measured before and after within the run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vbtta import LabelSets, ViewPredictions, fit_baseline, fit_policy, select_views

BASELINES = ("aug_tta", "greedy", "bma")


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements, with the limits that they are to meet."""
    shrink = 10 if quick else 1
    fit_policy(*crowd(60, 2, 3), task="classification")  # what is imported on first use is not counted
    cells: dict[str, Any] = {}
    for name, labels, annotators in (("single", 1, 0), ("three", 3, 0), ("crowd", 3, 40)):
        data = crowd(1_000 // shrink, 18, 10, labels=labels, annotators=annotators)
        cells[f"fit_{name}"] = {**measured(*data, lambda p, y: fit_policy(p, y, task="classification")), "limit": 900}
        if name != "crowd":
            select = measured(*data, lambda p, y: select_views(p, y, task="classification", budget=4))
            cells[f"select_{name}"] = {**select, "limit": 2_500}
    for name, n, n_classes in (("hundred_classes", 100_000, 100), ("thousand_classes", 20_000, 1_000)):
        predictions, given = crowd(n // shrink, 25, n_classes, dtype=np.float32)
        fit = measured(predictions, given, lambda p, y: fit_policy(p, y, task="classification"))
        policy = fit.pop("policy")
        passes = measured(predictions, given, partial(_predict, policy), precision=np.float32)["passes"]
        n_members = max(1, len(policy.members))
        cells[name] = {**fit, "limit": 150, "predict_passes_a_member": passes / n_members, "predict_limit": 4}
    predictions, numbers = regression(1_000 // shrink, 18)
    cells["regression"] = {
        **measured(predictions, numbers, lambda p, y: fit_policy(p, y, task="regression")),
        "limit_seconds": 0.6,
    }
    for cell in cells.values():
        cell.pop("policy", None)
    return {"cells": cells, "baselines": baselines(1_000 // shrink), "exponents": exponents(shrink)}


def baselines(n: int) -> dict[str, dict[str, float]]:
    """The same of other methods on single labels of 18 views and ten classes."""
    data = crowd(n, 18, 10)
    outcome = {}
    for name in BASELINES:
        cell = measured(*data, partial(fit_baseline, name, task="classification"))
        outcome[name] = {key: cell[key] for key in ("passes", "seconds")}
    return outcome


def exponents(shrink: int) -> dict[str, float]:
    """How the processor time of a mixture's fit grows with every size: slopes in logarithms, at most 1.1."""
    base = {"n": 2_000 // shrink, "n_views": 8, "n_classes": 10, "annotators": 50}
    outcome = {}
    for size in base:
        factors = (1, 2, 4)
        seconds = []
        for factor in factors:
            data = crowd(**{**base, size: base[size] * factor}, labels=3)
            seconds.append(measured(*data, lambda p, y: fit_policy(p, y, task="classification"))["seconds"])
        outcome[size] = float(np.polyfit(np.log(factors), np.log(seconds), 1)[0])
    return outcome


def _predict(policy: Any, predictions: ViewPredictions, _: Any) -> Any:
    return policy.predict(predictions)


def measured(
    predictions: ViewPredictions, labels: Any, call: Callable[[ViewPredictions, Any], Any], precision: Any = np.float64
) -> dict[str, Any]:
    """Processor seconds of a call, and the same in passes of np.exp."""
    before = exp_seconds(predictions.outputs, precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        policy = call(predictions, labels)
        seconds = time.process_time() - start
    one_pass = min(before, exp_seconds(predictions.outputs, precision))
    return {"passes": seconds / one_pass, "seconds": seconds, "pass_seconds": one_pass, "policy": policy}


def exp_seconds(outputs: Any, precision: Any) -> float:
    """Processor seconds of np.exp over the array, from a slice of it where it is large."""
    part = np.asarray(outputs[: max(1, 5_000_000 // outputs[0].size)], dtype=precision)
    times = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats := max(1, 2_000_000 // part.size)):
            np.exp(part)
        times.append((time.process_time() - start) / repeats)
    return min(times) * len(outputs) / len(part)


def crowd(
    n: int, n_views: int, n_classes: int, labels: int = 1, annotators: int = 0, dtype: Any = np.float64
) -> tuple[ViewPredictions, LabelSets]:
    """Logits of correlated views of unequal quality, and noisy labels."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, n_classes, size=n)
    size = np.linspace(0.2, 1.2, n_views)
    logits = np.empty((n, n_views, n_classes), dtype=dtype)
    for row in range(0, n, 1_000):
        rows = slice(row, min(row + 1_000, n))
        common = 1.2 * rng.normal(size=(rows.stop - row, 1, n_classes))
        common[np.arange(rows.stop - row), 0, truth[rows]] += 3 + np.log(n_classes / 10)
        logits[rows] = common + size[:, None] * rng.normal(size=(rows.stop - row, n_views, n_classes))
    given = np.where(rng.random((n, labels)) < 0.85, truth[:, None], rng.integers(0, n_classes, size=(n, labels)))
    predictions = ViewPredictions(logits, names=["identity", *(f"view{k}" for k in range(1, n_views))])
    if not annotators:
        return predictions, LabelSets.from_array(given)
    who = rng.integers(0, annotators, size=n)[:, None] + np.arange(labels)
    table = LabelSets.from_table(
        instance=np.repeat(np.arange(n), labels),
        label=given.ravel(),
        annotator=(who % annotators).ravel().astype(str),
        n_instances=n,
    )
    return predictions, table


def regression(n: int, n_views: int) -> tuple[ViewPredictions, Any]:
    """Correlated views of unequal quality, and one label an input."""
    rng = np.random.default_rng(0)
    truth = 35 + 10 * rng.normal(size=(n, 1, 1))
    views = (
        truth
        + 4 * rng.normal(size=(n, 1, 1))
        + np.linspace(0.5, 3, n_views)[:, None] * rng.normal(size=(n, n_views, 1))
    )
    names = ["identity", *(f"view{k}" for k in range(1, n_views))]
    return ViewPredictions(views, names=names), truth[:, 0, 0] + rng.normal(size=n)
