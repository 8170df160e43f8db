"""Metrics: arrays in, one float out, every label weighted by its count.

The plural functions give one number a label, the singular ones their weighted mean; only the calibration error is no
mean over labels. Errors, CRPS and coverage are averaged over outputs, where there are several.

Of maps (segmentation), Dice, intersection over union and average precision are computed by image: the plural functions
give one row an image. For the other metrics :func:`map_rows` makes rows of maps. Pandas objects that are compared must
have one index, in one order.
"""

__all__ = [
    "accuracy", "average_precision", "brier", "crps", "dice", "dice_scores", "ece", "entropy", "interval_coverage",
    "iou", "mae", "map_rows", "mse", "nll", "top_k_accuracy",
]  # fmt: skip

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import real_array, shown, whole_number
from vbtta.data.labels import Array, as_array, check_one_index
from vbtta.distributions import entropy

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
    """
    return _average(squared_errors(y, mean), weights, y=y)


def mae(y: ArrayLike, mean: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean absolute error of point predictions; arguments as in :func:`mse`."""
    return _average(absolute_errors(y, mean), weights, y=y)


def nll(log_prob: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean negative log-likelihood in nats, from `prediction.log_prob(y)`, (J,)."""
    values = real_array("log_prob", log_prob)
    if values.ndim != 1:
        raise ValueError(f"log_prob must be (J,), one log probability a label; got shape {values.shape}")
    return _average(-values, weights, log_prob=log_prob)


def crps(scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean continuous ranked probability score, from `prediction.crps(y)`, (J,) or (J, C)."""
    values = real_array("scores", scores)
    if values.ndim not in (1, 2) or 0 in values.shape[1:]:
        raise ValueError(f"scores must be (J,) or (J, C), from prediction.crps(y); got shape {values.shape}")
    if (values < 0).any():
        raise ValueError(f"scores must not be negative; got {values.min()}. Give prediction.crps(y), not log scores")
    return _average(_over_outputs(values), weights, scores=scores)


def interval_coverage(y: ArrayLike, lower: ArrayLike, upper: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Share of labels y, (J,) or (J, C), inside their intervals, ends included."""
    return _average(covered(y, lower, upper), weights, y=y)


def accuracy(y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Share of labels y, positions 0..C-1 (J,), that are the most probable class of proba (J, C)."""
    return _average(hits(y, proba), weights, y=y)


def top_k_accuracy(y: ArrayLike, proba: ArrayLike, k: int = 5, weights: ArrayLike | None = None) -> float:
    """Share of labels that are among the k most probable classes; ties count against the label."""
    position, table = _classes(y, proba)
    k = whole_number("k", k, least=1)
    own = np.take_along_axis(table, position[:, None], axis=1)
    return _average((np.sum(table >= own, axis=1) <= k).astype(np.float64), weights, y=y)


def brier(y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Brier score: squared distance from the label's indicator, summed over classes (0 to 2)."""
    return _average(brier_scores(y, proba), weights, y=y)


def ece(y: ArrayLike, proba: ArrayLike, weights: ArrayLike | None = None, *, bins: int = 15) -> float:
    """Expected calibration error of the most probable class: sum_b (n_b / n) |accuracy_b - confidence_b|.

    Bins of the confidence have equal width (a, b].
    """
    gap, bin_index = calibration_gaps(y, proba, bins=bins)
    times = _weights(weights, len(gap), y=y)
    return float(np.abs(np.bincount(bin_index, weights=times * gap, minlength=bins)).sum() / times.sum())


def squared_errors(y: ArrayLike, mean: ArrayLike) -> Array:
    """Squared error of every label, averaged over outputs: (J,)."""
    target, mean = _same_shape(y=y, mean=mean)
    return _over_outputs((target - mean) ** 2)


def absolute_errors(y: ArrayLike, mean: ArrayLike) -> Array:
    """Absolute error of every label, averaged over outputs: (J,)."""
    target, mean = _same_shape(y=y, mean=mean)
    return _over_outputs(np.abs(target - mean))


def covered(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> Array:
    """Share of every label's outputs inside the interval: (J,)."""
    target, low, high = _same_shape(y=y, lower=lower, upper=upper)
    if (low > high).any():
        raise ValueError("lower must not exceed upper; were they swapped?")
    return _over_outputs(((low <= target) & (target <= high)).astype(np.float64))


def hits(y: ArrayLike, proba: ArrayLike) -> Array:
    """Whether every label is the most probable class, 0 or 1: (J,)."""
    position, table = _classes(y, proba)
    return np.asarray(table.argmax(axis=1) == position, dtype=np.float64)


def brier_scores(y: ArrayLike, proba: ArrayLike) -> Array:
    """Brier score of every label: (J,)."""
    position, table = _classes(y, proba)
    return np.asarray((table**2).sum(axis=1) - 2 * table[np.arange(len(position)), position] + 1)


def calibration_gaps(y: ArrayLike, proba: ArrayLike, *, bins: int = 15) -> tuple[Array, Array]:
    """Hit minus confidence of every label, (J,), and the bin of its confidence, (J,) in 0..bins-1."""
    bins = whole_number("bins", bins, least=1)
    position, table = _classes(y, proba)
    confidence = table.max(axis=1)
    gap = (table.argmax(axis=1) == position) - confidence
    return gap, np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence, side="left")  # (k/bins, (k+1)/bins]


def dice(
    y: ArrayLike,
    maps: ArrayLike,
    n_classes: int | None = None,
    *,
    ignore: int | None = None,
    background: int | None = None,
) -> float:
    """Mean Dice score: over the classes of an image, then over images.

    Parameters
    ----------
    y : (N, H, W) or (N, D, H, W) int array
        Classes, positions 0..C-1.
    maps : array
        Predicted classes, shaped like y, or class probabilities (N, C, H, W).
    n_classes, ignore, background : int, optional
        C, for predicted classes; value of y that means "no label"; class that is left out of the mean.
    """
    return _mean_by_image(dice_scores(y, maps, n_classes, ignore=ignore), background)


def iou(
    y: ArrayLike,
    maps: ArrayLike,
    n_classes: int | None = None,
    *,
    ignore: int | None = None,
    background: int | None = None,
) -> float:
    """Mean intersection over union: over the classes of an image, then over images; arguments as in :func:`dice`."""
    return _mean_by_image(iou_scores(y, maps, n_classes, ignore=ignore), background)


def dice_scores(y: ArrayLike, maps: ArrayLike, n_classes: int | None = None, *, ignore: int | None = None) -> Array:
    """Dice score of every image and class, (N, C); NaN for a class that is neither there nor predicted."""
    truth, predicted = as_array(y, "y"), as_array(maps, "maps")
    if predicted.ndim == truth.ndim + 1 and truth.ndim:
        probabilities = real_array("maps", maps)
        if np.isnan(probabilities).any():
            raise ValueError("maps must be numbers; got NaN. Check the network's outputs")
        n_classes, predicted = predicted.shape[1], probabilities.argmax(axis=1)
    if predicted.shape != truth.shape or truth.ndim < 2:
        raise ValueError(f"maps must be shaped like y, {truth.shape}, or (N, C, ...); got {np.shape(maps)}")
    if n_classes is None:
        raise ValueError("n_classes must be given for predicted classes; probabilities (N, C, ...) have them")
    labelled = np.ones(truth.shape, dtype=bool) if ignore is None else truth != ignore
    for name, values in (("y", truth[labelled]), ("maps", predicted[labelled])):
        if values.dtype.kind not in "iub" or (values.size and not 0 <= values.min() <= values.max() < n_classes):
            raise ValueError(f"{name} must be class positions 0..{n_classes - 1}; leave out others by ignore=")
    image = np.broadcast_to(np.arange(len(truth)).reshape(-1, *[1] * (truth.ndim - 1)), truth.shape)[labelled]
    true_class, predicted_class = (values[labelled].astype(np.intp) for values in (truth, predicted))
    return class_dice(image, true_class, predicted_class, np.ones(image.shape), (len(truth), n_classes))


def iou_scores(y: ArrayLike, maps: ArrayLike, n_classes: int | None = None, *, ignore: int | None = None) -> Array:
    """Intersection over union of every image and class, (N, C); NaN for a class neither there nor predicted."""
    scores = dice_scores(y, maps, n_classes, ignore=ignore)
    return np.asarray(scores / (2 - scores))


def average_precision(y: ArrayLike, score: ArrayLike) -> float:
    """Mean over images of the average precision of scores (N, ...) for maps y of 0 and 1.

    Images of zeros are left out.
    """
    values = average_precisions(y, score)
    if np.isnan(values).all():
        raise ValueError("y has no positive in any image; average precision is not defined")
    return float(np.nanmean(values))


def average_precisions(y: ArrayLike, score: ArrayLike) -> Array:
    """Average precision of every image, (N,): the mean precision at the positives, ties shared; NaN without any."""
    truth, values = as_array(y, "y"), real_array("score", score)
    if truth.shape != values.shape or truth.ndim < 2 or not np.isin(truth, (0, 1)).all() or np.isnan(values).any():
        shapes = f"{truth.shape}, {values.shape}"
        raise ValueError(f"y must be (N, ...) of 0 and 1 and score numbers of its shape; got {shapes}")
    precisions = np.full(len(truth), np.nan)
    for image in np.flatnonzero(truth.reshape(len(truth), -1).any(axis=1)):
        levels, rank = np.unique(-values[image].ravel(), return_inverse=True)
        positives = np.cumsum(np.bincount(rank, weights=truth[image].ravel(), minlength=len(levels)))
        precision = positives / np.cumsum(np.bincount(rank, minlength=len(levels)))
        precisions[image] = np.dot(precision, np.diff(positives, prepend=0)) / positives[-1]
    return precisions


def map_rows(y: ArrayLike, proba: ArrayLike, *, ignore: int | None = None) -> tuple[Array, Array]:
    """Rows (J,) and (J, C) of all labelled positions of maps (N, H, W) and (N, C, H, W), for the other metrics."""
    truth, maps = as_array(y, "y"), as_array(proba, "proba")
    if maps.ndim != truth.ndim + 1 or maps.shape[:1] + maps.shape[2:] != truth.shape:
        raise ValueError(f"proba must be (N, C, ...) for y (N, ...); got {maps.shape} and {truth.shape}")
    rows = np.moveaxis(maps, 1, -1).reshape(-1, maps.shape[1])
    kept = slice(None) if ignore is None else truth.ravel() != ignore
    return truth.ravel()[kept], rows[kept]


def class_dice(image: Array, truth: Array, predicted: Array, times: Array, shape: tuple[int, int]) -> Array:
    """Dice score of every image and class, (N, C), of labels with counts (J,): NaN for a class that is in neither."""
    sizes = [
        np.bincount(image * shape[1] + position, weight, shape[0] * shape[1]).reshape(shape)
        for position, weight in ((truth, times), (predicted, times), (truth, times * (truth == predicted)))
    ]
    with np.errstate(invalid="ignore"):
        return np.asarray(2 * sizes[2] / (sizes[0] + sizes[1]))


def mean_over_classes(scores: Array, background: int | None) -> Array:
    """Mean (N,) over the classes that an image has, without the background; NaN for an image without any."""
    kept = scores if background is None else np.delete(scores, background, axis=1)
    present = ~np.isnan(kept)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(present, kept, 0).sum(axis=1) / present.sum(axis=1))


def _mean_by_image(scores: Array, background: int | None) -> float:
    means = mean_over_classes(scores, background)
    if np.isnan(means).all():
        raise ValueError("no image has a class to score; check ignore and background")
    return float(np.nanmean(means))


def _average(values: Array, weights: ArrayLike | None, **scored: Any) -> float:
    if np.isnan(values).any():
        raise ValueError(f"{next(iter(scored))} must be numbers; got NaN for label {int(np.argmax(np.isnan(values)))}")
    times = _weights(weights, len(values), **scored)
    counted = times > 0  # 0 times infinity is NaN
    return float(np.dot(values[counted], times[counted]) / times.sum())


def _weights(weights: ArrayLike | None, n_labels: int, **scored: Any) -> Array:
    check_one_index(**scored, weights=weights)
    if n_labels == 0:
        raise ValueError("there are no labels to average over; give at least one")
    if weights is None:
        return np.ones(n_labels)
    times: Array = real_array("weights", weights)
    if times.shape != (n_labels,):
        raise ValueError(f"weights must be ({n_labels},), one a label; got shape {times.shape}")
    if not np.all(np.isfinite(times)) or (times < 0).any() or times.sum() <= 0:
        raise ValueError("weights must be finite, not negative and not all zero")
    return times


def _over_outputs(values: Array) -> Array:
    return values if values.ndim == 1 else np.asarray(values.mean(axis=1))


def _same_shape(**arrays: ArrayLike) -> list[Array]:
    check_one_index(**arrays)
    checked = {name: real_array(name, values) for name, values in arrays.items()}
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
    check_one_index(y=y, proba=proba)
    position, table = as_array(y, "y"), real_array("proba", proba)
    if table.ndim != 2:
        raise ValueError(f"proba must be (J, C); got shape {table.shape}")
    if position.shape != table.shape[:1]:
        raise ValueError(f"y must be ({len(table)},), one class a row of proba; got shape {position.shape}")
    wrong = position if position.dtype.kind not in "iu" else position[(position < 0) | (position >= table.shape[1])]
    if len(wrong):
        got = f"{shown(wrong[0])} of dtype {wrong.dtype}"
        raise ValueError(f"y must be class positions 0..{table.shape[1] - 1}; got {got}")
    if not np.all(table >= 0) or not np.allclose(table.sum(axis=1), 1, rtol=0, atol=_SUM_TOLERANCE):
        raise ValueError("proba must be probabilities: not negative, rows summing to 1. Logits need a softmax first")
    return position.astype(np.intp), table
