"""Regression baselines: a linear rule for the mean, and one normal residual density around it. A new one goes in here.

Every method gives the weights of the views, (K,), or (K, C) where they differ by output.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize

from vbtta.baselines.solvers import average_linear
from vbtta.data.labels import Array


class RegressionData(NamedTuple):
    """The labels of a calibration sample with the views' outputs for their instances."""

    outputs: Array  # (J, K, C)
    y: Array  # (J, C)
    times: Array  # (J,) how often each label was given
    identity: int | None  # position of the unaugmented view


def residual_variance(residual: Array, y: Array, count: Array) -> Array:
    """Mean squared residual of every output, (C,): the maximum-likelihood variance about the prediction.

    Kept above 1e-12 times the labels' own mean square, so that a perfect fit still has a density.
    """
    share = count / count.sum()
    floor = np.maximum(1e-12 * (share @ y**2), np.finfo(np.float64).tiny)
    return np.asarray(np.maximum(share @ residual**2, floor))


def weighted_sum(outputs: Array, weights: Array) -> Array:
    """sum_k w_k f_k with weights (K,) or (K, C): (N, C)."""
    return np.asarray((outputs * (weights if weights.ndim == 2 else weights[:, None])).sum(axis=1))


def _original(data: RegressionData) -> Array:
    assert data.identity is not None
    return np.asarray(np.eye(data.outputs.shape[1])[data.identity])


def _best_view(data: RegressionData) -> Array:
    """The view with the best calibration log-likelihood under its own residual density."""
    n_views = data.outputs.shape[1]
    score = [np.log(residual_variance(data.y - data.outputs[:, k], data.y, data.times)).sum() for k in range(n_views)]
    return np.asarray(np.eye(n_views)[int(np.argmin(score))])


def _by_output(solve: Callable[[Array, Array, Array], Array]) -> Callable[[RegressionData], Array]:
    """Solve for every output alone, from (J, K) outputs, (J,) labels and their counts."""

    def fit(data: RegressionData) -> Array:
        columns = [solve(data.outputs[:, :, c], data.y[:, c], data.times) for c in range(data.y.shape[1])]
        return np.asarray(columns[0]) if len(columns) == 1 else np.stack(columns, axis=1)

    return fit


def _nnls(outputs: Array, y: Array, times: Array) -> Array:
    """Non-negative least squares: no intercept, weights need not sum to 1."""
    root = np.sqrt(times)
    return np.asarray(optimize.nnls(outputs * root[:, None], y * root)[0])


REGRESSION: dict[str, Callable[[RegressionData], Array]] = {
    "original": _original,
    "uniform": lambda data: np.full(data.outputs.shape[1], 1 / data.outputs.shape[1]),
    "best_view": _best_view,
    "bma": _by_output(average_linear),
    "nnls": _by_output(_nnls),
}
