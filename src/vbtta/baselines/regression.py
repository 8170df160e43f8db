"""Regression baselines: a linear rule for the mean, and one normal residual density around it."""

__all__ = ["REGRESSION", "RegressionData", "residual_variance"]

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize

from vbtta.baselines.averaging import average_linear
from vbtta.labels import Array


class RegressionData(NamedTuple):
    """The labels of a calibration sample with the views' outputs for their instances."""

    outputs: Array  # (J, K, C)
    y: Array  # (J, C)
    times: Array  # (J,) how often each label was given
    identity: int | None  # position of the unaugmented view


def residual_variance(residual: Array, y: Array, count: Array) -> Array:
    """Mean squared residual of every output, (C,): the maximum-likelihood variance about the prediction.

    Kept above a trillionth of the labels' own mean square, so that a perfect fit still has a density.
    """
    share = count / count.sum()
    floor = np.maximum(1e-12 * (share @ y**2), np.finfo(np.float64).tiny)
    return np.asarray(np.maximum(share @ residual**2, floor))


def _original(data: RegressionData) -> Array:
    assert data.identity is not None
    return np.asarray(np.eye(data.outputs.shape[1])[data.identity])


def _uniform(data: RegressionData) -> Array:
    return np.full(data.outputs.shape[1], 1 / data.outputs.shape[1])


def _best_view(data: RegressionData) -> Array:
    """The view with the best calibration log-likelihood under its own residual density."""
    n_views = data.outputs.shape[1]
    score = [np.log(residual_variance(data.y - data.outputs[:, k], data.y, data.times)).sum() for k in range(n_views)]
    return np.asarray(np.eye(n_views)[int(np.argmin(score))])


def _nnls(data: RegressionData) -> Array:
    """Non-negative least squares for every output: no intercept, weights need not sum to 1."""
    root = np.sqrt(data.times)
    columns = [
        optimize.nnls(data.outputs[:, :, c] * root[:, None], data.y[:, c] * root)[0] for c in range(data.y.shape[1])
    ]
    return _by_output(columns)


def _bma(data: RegressionData) -> Array:
    columns = [average_linear(data.outputs[:, :, c], data.y[:, c], data.times) for c in range(data.y.shape[1])]
    return _by_output(columns)


REGRESSION: dict[str, Callable[[RegressionData], Array]] = {
    "original": _original,
    "uniform": _uniform,
    "best_view": _best_view,
    "bma": _bma,
    "nnls": _nnls,
}


def _by_output(columns: list[Array]) -> Array:
    """One weight a view, or with several outputs one a view and output."""
    return np.asarray(columns[0]) if len(columns) == 1 else np.stack(columns, axis=1)
