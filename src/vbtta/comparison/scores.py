"""What a method scores on every test instance, and how sure that is: per-instance sums and their bootstrap.

Every metric is a function of sums over instances, so a resample of instances is a matrix product: a mean over labels
is one column of sums divided by the resampled number of labels, the calibration error one column a bin.
"""

__all__ = ["COVERAGE_LEVEL", "METRICS", "HeldOut", "bootstrap", "columns", "evaluate", "held_out", "resampled"]

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vbtta import metrics
from vbtta.labels import Array, LabelSets
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, Prediction, ViewPredictions

METRICS = {
    "classification": ("accuracy", "nll", "brier", "ece"),
    "regression": ("mse", "mae", "nll", "crps", "coverage"),
}
COVERAGE_LEVEL = 0.9
_BINS = 15
_CELLS = 1 << 22  # of the largest block of resampled counts


class HeldOut(NamedTuple):
    """The labels of the test instances that have one."""

    row: Array  # (J,) of the predictions
    instance: Array  # (J,) 0..N-1, labelled instances only
    y: Array  # (J,) class positions or (J, C) values
    times: Array  # (J,) how often each label was given
    n_instances: int


def held_out(predictions: ViewPredictions, labels: LabelSets, task: str) -> HeldOut:
    """The labels of test predictions, aligned with them already."""
    if not len(labels):
        raise ValueError("test_labels are empty; a comparison needs at least one test label")
    n_outputs = predictions.mean.shape[2]
    y = labels.categorical(n_outputs, predictions.classes) if task == "classification" else labels.continuous(n_outputs)
    rows, instance = np.unique(labels.instance, return_inverse=True)
    return HeldOut(labels.instance, instance, y, labels.count, len(rows))


def columns(prediction: Prediction, test: HeldOut) -> dict[str, Array]:
    """Per-instance sums of every metric's scores, by metric: (N, 1), or (N, bins) for the calibration error."""
    if isinstance(prediction, CategoricalPrediction):
        proba = prediction.proba[test.row]
        chosen = proba[np.arange(len(test.y)), test.y]
        gap, home = metrics.calibration_gaps(test.y, proba, bins=_BINS)
        return {
            "accuracy": _sums(metrics.hits(test.y, proba), test),
            "nll": _sums(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)), test),
            "brier": _sums(metrics.brier_scores(test.y, proba), test),
            "ece": _sums(gap, test, home),
        }
    mean = prediction.mean[test.row]
    lower, upper = (end[test.row] for end in prediction.interval(COVERAGE_LEVEL))
    at_labels = ContinuousPrediction(
        prediction.weights[test.row], prediction.dof, prediction.location[test.row], prediction.scale[test.row]
    )
    return {
        "mse": _sums(metrics.squared_errors(test.y, mean), test),
        "mae": _sums(metrics.absolute_errors(test.y, mean), test),
        "nll": _sums(-at_labels.log_prob(test.y), test),
        "crps": _sums(at_labels.crps(test.y).mean(axis=1), test),
        "coverage": _sums(metrics.covered(test.y, lower, upper), test),
    }


def evaluate(found: Sequence[Mapping[str, Array]], test: HeldOut) -> Array:
    """The metrics of every method: (methods, metrics)."""
    return np.asarray(resampled(found, test, np.ones((1, test.n_instances)))[0])


def bootstrap(found: Sequence[Mapping[str, Array]], test: HeldOut, *, resamples: int, seed: int) -> Array:
    """The metrics of every method on resampled instances, the same for all of them: (resamples, methods, metrics)."""
    generator = np.random.default_rng(seed)
    size = test.n_instances
    at_once = max(1, _CELLS // size)
    parts = []
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn = generator.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
        multiplicity = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        parts.append(resampled(found, test, multiplicity.astype(np.float64)))
    return np.concatenate(parts)


def resampled(found: Sequence[Mapping[str, Array]], test: HeldOut, multiplicity: Array) -> Array:
    """Metrics where instance n occurs multiplicity[r, n] times: (R, methods, metrics)."""
    labels = np.bincount(test.instance, weights=test.times, minlength=test.n_instances)
    total = multiplicity @ labels  # (R,)
    everything = np.concatenate([table for method in found for table in method.values()], axis=1)
    sums = multiplicity @ everything
    values = np.empty((len(multiplicity), len(found), len(found[0])))
    column = 0
    for m, method in enumerate(found):
        for s, table in enumerate(method.values()):
            block = sums[:, column : column + table.shape[1]]
            values[:, m, s] = (block[:, 0] if table.shape[1] == 1 else np.abs(block).sum(axis=1)) / total
            column += table.shape[1]
    return values


def _sums(scores: Array, test: HeldOut, home: Array | None = None) -> Array:
    width = 1 if home is None else _BINS
    cell = test.instance * width + (0 if home is None else home)
    flat = np.bincount(cell, weights=scores * test.times, minlength=test.n_instances * width)
    return flat.reshape(test.n_instances, width)
