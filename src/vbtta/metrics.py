"""Metrics: arrays in, one float out, every label weighted by its count.

The plural functions give one number a label, the singular ones their weighted mean; only the calibration error is no
mean over labels. Errors, CRPS and coverage are averaged over outputs, where there are several.
"""

__all__ = [
    "absolute_errors",
    "accuracy",
    "brier",
    "brier_scores",
    "calibration_gaps",
    "covered",
    "crps",
    "ece",
    "entropy",
    "hits",
    "interval_coverage",
    "mae",
    "mse",
    "nll",
    "squared_errors",
]

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta.data.labels import Array

_SUM_TOLERANCE = 1e-6


def mse(y: ArrayLike, mean: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean squared error of point predictions.

    Parameters
    ----------
    y : (J,) or (J, C) array
        Labels.
    mean : array shaped like y
        Point predictions for the same labels.
    weights : (J,) array, optional
        How often each label was given; 1 where absent.

    Examples
    --------
    >>> mse([1.0, 3.0], [1.0, 1.0])
    2.0
    >>> mse([1.0, 3.0], [1.0, 1.0], weights=[3, 1])
    1.0
    """
    return _average(squared_errors(y, mean), weights)


def mae(y: ArrayLike, mean: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean absolute error of point predictions; arguments as in :func:`mse`.

    Examples
    --------
    >>> mae([1.0, 3.0], [1.0, 1.0])
    1.0
    """
    return _average(absolute_errors(y, mean), weights)


def nll(log_prob: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean negative log-likelihood in nats, from `prediction.log_prob(y)`, (J,).

    Examples
    --------
    >>> round(nll(np.log([0.5, 0.125])), 4)
    1.3863
    """
    values = np.asarray(log_prob, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"log_prob must be (J,), one log probability a label; got shape {values.shape}")
    return _average(-values, weights, "log_prob")


def crps(scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean continuous ranked probability score, from `prediction.crps(y)`, (J,) or (J, C).

    Examples
    --------
    >>> crps([[0.2, 0.4], [0.1, 0.1]])
    0.2
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim not in (1, 2):
        raise ValueError(f"scores must be (J,) or (J, C), from prediction.crps(y); got shape {values.shape}")
    if (values < 0).any():
        raise ValueError(f"scores must not be negative; got {values.min()}. Give prediction.crps(y), not log scores")
    return _average(_over_outputs(values), weights, "scores")


def interval_coverage(y: ArrayLike, lower: ArrayLike, upper: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Share of labels inside their intervals, ends included.

    Parameters
    ----------
    y, lower, upper : (J,) or (J, C) arrays
    weights : (J,) array, optional

    Examples
    --------
    >>> interval_coverage([0.0, 1.0, 5.0, 2.0], [0, 0, 0, 0], [2, 2, 2, 2])
    0.75
    """
    return _average(covered(y, lower, upper), weights)


def accuracy(y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Share of labels that are the most probable class.

    Parameters
    ----------
    y : (J,) int array
        Labels as positions 0..C-1 (`LabelSets.categorical`).
    proba : (J, C) array
        Class probabilities for the same labels.
    weights : (J,) array, optional

    Examples
    --------
    >>> accuracy([0, 1], [[0.9, 0.1], [0.8, 0.2]])
    0.5
    """
    return _average(hits(y, proba), weights)


def brier(y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Brier score: squared distance from the label's indicator, summed over classes (0 to 2).

    Examples
    --------
    >>> round(brier([0, 1], [[0.9, 0.1], [0.8, 0.2]]), 6)
    0.65
    """
    return _average(brier_scores(y, proba), weights)


def ece(
    y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None, *, bins: int = 15, adaptive: bool = False
) -> float:
    """Expected calibration error of the most probable class: sum_b (n_b / n) |accuracy_b - confidence_b|.

    Bins of the confidence have equal width (a, b], or with `adaptive` equal mass.

    Examples
    --------
    >>> round(ece([0, 1], [[0.9, 0.1], [0.8, 0.2]]), 6)
    0.45
    """
    times = _weights(weights, len(np.asarray(y)))
    gap, bin_index = calibration_gaps(y, proba, times, bins=bins, adaptive=adaptive)
    return float(np.abs(np.bincount(bin_index, weights=times * gap, minlength=bins)).sum() / times.sum())


def entropy(proba: Array) -> Array:
    """Entropy in nats along the last axis; zero probabilities contribute nothing.

    Examples
    --------
    >>> entropy(np.array([[0.5, 0.5], [1.0, 0.0]])).round(2)
    array([0.69, 0.  ])
    """
    return np.asarray(special.entr(proba).sum(axis=-1))


def squared_errors(y: ArrayLike, mean: ArrayLike) -> Array:
    """Squared error of every label, averaged over outputs: (J,).

    Examples
    --------
    >>> squared_errors([[1.0, 0.0], [3.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]])
    array([0., 2.])
    """
    target, mean = _same_shape(y=y, mean=mean)
    return _over_outputs((target - mean) ** 2)


def absolute_errors(y: ArrayLike, mean: ArrayLike) -> Array:
    """Absolute error of every label, averaged over outputs: (J,).

    Examples
    --------
    >>> absolute_errors([1.0, 3.0], [1.0, 1.0])
    array([0., 2.])
    """
    target, mean = _same_shape(y=y, mean=mean)
    return _over_outputs(np.abs(target - mean))


def covered(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> Array:
    """Share of every label's outputs inside the interval: (J,).

    Examples
    --------
    >>> covered([0.0, 5.0], [-1.0, -1.0], [1.0, 1.0])
    array([1., 0.])
    """
    target, low, high = _same_shape(y=y, lower=lower, upper=upper)
    if (low > high).any():
        raise ValueError("lower must not exceed upper; were they swapped?")
    return _over_outputs(((low <= target) & (target <= high)).astype(np.float64))


def hits(y: ArrayLike, proba: ArrayLike) -> Array:
    """Whether every label is the most probable class, 0 or 1: (J,).

    Examples
    --------
    >>> hits([0, 1], [[0.9, 0.1], [0.8, 0.2]])
    array([1., 0.])
    """
    position, table = _classes(y, proba)
    return np.asarray(table.argmax(axis=1) == position, dtype=np.float64)


def brier_scores(y: ArrayLike, proba: ArrayLike) -> Array:
    """Brier score of every label: (J,).

    Examples
    --------
    >>> brier_scores([0, 1], [[0.9, 0.1], [0.8, 0.2]]).round(2)
    array([0.02, 1.28])
    """
    position, table = _classes(y, proba)
    return np.asarray((table**2).sum(axis=1) - 2 * table[np.arange(len(position)), position] + 1)


def calibration_gaps(
    y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None, *, bins: int = 15, adaptive: bool = False
) -> tuple[Array, Array]:
    """Hit minus confidence of every label, (J,), and the bin of its confidence, (J,) in 0..bins-1.

    Bins of equal mass are cut by mid-ranks, so labels of equal confidence share a bin whatever their order.

    Examples
    --------
    >>> gap, bin_index = calibration_gaps([0, 1], [[0.9, 0.1], [0.8, 0.2]], bins=4)
    >>> gap.round(1), bin_index
    (array([ 0.1, -0.8]), array([3, 3]))
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}")
    position, table = _classes(y, proba)
    confidence = table.max(axis=1)
    gap = (table.argmax(axis=1) == position) - confidence
    if not adaptive:  # the k-th bin is (k/bins, (k+1)/bins]
        return gap, np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence, side="left")
    times = _weights(weights, len(position))
    _, rank = np.unique(confidence, return_inverse=True)
    mass = np.bincount(rank, weights=times)
    share = (np.cumsum(mass) - 0.5 * mass) / mass.sum()
    return gap, np.minimum((share * bins).astype(np.intp), bins - 1)[rank]


def _average(values: Array, weights: ArrayLike | None, name: str = "the values") -> float:
    if np.isnan(values).any():
        raise ValueError(f"{name} must be numbers; got NaN for label {int(np.argmax(np.isnan(values)))}")
    times = _weights(weights, len(values))
    counted = times > 0  # 0 times infinity is NaN
    return float(np.dot(values[counted], times[counted]) / times.sum())


def _weights(weights: ArrayLike | None, n_labels: int) -> Array:
    if n_labels == 0:
        raise ValueError("there are no labels to average over; give at least one")
    if weights is None:
        return np.ones(n_labels)
    times = np.asarray(weights, dtype=np.float64)
    if times.shape != (n_labels,):
        raise ValueError(f"weights must be ({n_labels},), one a label; got shape {times.shape}")
    if not np.all(np.isfinite(times)) or (times < 0).any() or times.sum() <= 0:
        raise ValueError("weights must be finite, not negative and not all zero")
    return times


def _over_outputs(values: Array) -> Array:
    return values if values.ndim == 1 else np.asarray(values.mean(axis=1))


def _same_shape(**arrays: ArrayLike) -> list[Array]:
    checked = {name: np.asarray(values, dtype=np.float64) for name, values in arrays.items()}
    shape = checked["y"].shape
    if len(shape) not in (1, 2):
        raise ValueError(f"y must be (J,) or (J, C); got shape {shape}")
    for name, values in checked.items():
        if values.shape != shape:
            raise ValueError(f"{name} must be shaped like y, {shape}; got {values.shape}")
        if np.isnan(values).any():
            raise ValueError(f"{name} has NaN in it; leave out labels without a value")
    return list(checked.values())


def _classes(y: ArrayLike, proba: ArrayLike) -> tuple[Array, Array]:
    position, table = np.asarray(y), np.asarray(proba, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"proba must be (J, C); got shape {table.shape}")
    if position.shape != table.shape[:1]:
        raise ValueError(f"y must be ({len(table)},), one class a row of proba; got shape {position.shape}")
    if position.dtype.kind not in "iu":
        raise ValueError(f"y must be class positions 0..{table.shape[1] - 1}; got dtype {position.dtype}")
    if len(position) and not 0 <= position.min() <= position.max() < table.shape[1]:
        wrong = position[(position < 0) | (position >= table.shape[1])][0]
        raise ValueError(f"y must be class positions 0..{table.shape[1] - 1}; got {int(wrong)}")
    if not np.all(table >= 0) or not np.allclose(table.sum(axis=1), 1, rtol=0, atol=_SUM_TOLERANCE):
        raise ValueError("proba must be probabilities: not negative, rows summing to 1. Logits need a softmax first")
    return position, table
