"""Logits and class labels laid out for the inference: blocks of instances, classes first."""

__all__ = ["CategoricalData", "categorical_data", "check_logits", "refuse_probabilities", "shifted"]

from dataclasses import dataclass

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.label_noise import LabelTable
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions

_ENTRIES = 1 << 16  # of a block of logits: it and a few like it fit a core's second-level cache
_FEW_CLASSES = 48  # up to which instances come last in memory: reductions over a short last axis are slow
_GROUPS = 64  # of blocks whose statistics are added as they come
_LOWEST = -1e12  # of a shifted logit: keeps products finite whatever comes in
_PROBE = 256  # rows looked at before all are
_FEWEST_ROWS = 5  # from which rows that sum to 1 are no accident


@dataclass(frozen=True, eq=False)
class CategoricalData:
    """Labelled instances. Nothing is copied where classes are many: blocks are read from the predictions.

    Logits are shifted so that the largest of an instance and view is 0, which changes no probability.
    """

    mean: Array  # (N, K, C) as given
    variance: Array | None  # (N, K, C)
    rows: Array | None  # (N+,) rows with a label; None where all have one
    stored: Array | None  # (C, K, N+), shifted
    table: LabelTable
    mass: Array | None  # (N+, C): how often each class was given, for labels without noise
    n_labels: float  # J, counts included
    blocks: tuple[tuple[slice, ...], ...]  # of labelled instances, in groups
    spread: Array  # (K,): largest range of a view's logits

    @property
    def n_views(self) -> int:
        """K."""
        return int(self.mean.shape[1])

    @property
    def n_classes(self) -> int:
        """C."""
        return int(self.mean.shape[2])

    @property
    def n_instances(self) -> int:
        """N+, those with a label."""
        return self.table.n_instances

    def logits(self, part: slice) -> Array:
        """Shifted logits of some labelled instances: (C, K, n), not to be written to."""
        return self.stored[:, :, part] if self.stored is not None else shifted(self._take(self.mean, part))

    def variances(self, part: slice) -> Array | None:
        """Variances over draws of the same, where there are any: (C, K, n)."""
        if self.variance is None:
            return None
        return np.asarray(self._take(self.variance, part), dtype=np.float64).transpose(2, 1, 0)

    def ranges(self) -> Array:
        """Median over instances of the range of every view's logits: (K,)."""
        found = [-self.logits(part).min(axis=0) for group in self.blocks for part in group]
        return np.asarray(np.median(np.concatenate(found, axis=1), axis=1))

    def _take(self, array: Array, part: slice) -> Array:
        return np.asarray(array[part] if self.rows is None else array[self.rows[part]])


def categorical_data(
    predictions: ViewPredictions, labels: LabelSets, *, noise: str, with_variance: bool, classes_last: bool = False
) -> CategoricalData:
    """Check predictions and labels, already aligned, and lay them out."""
    check_logits(predictions)
    refuse_probabilities(predictions)
    if not len(labels):
        raise ValueError("labels are empty: at least one instance needs a label")
    N, K, C = predictions.mean.shape
    position = labels.categorical(C, predictions.classes)
    table = label_noise.label_table(labels, position, noise)
    rows = labels.labelled
    size = len(rows)
    mass = None
    if noise == "none":
        mass = np.bincount(table.instance * C + table.label, table.repeats, size * C).reshape(size, C)
    step = max(1, _ENTRIES // (K * C))
    blocks = [slice(first, min(first + step, size)) for first in range(0, size, step)]
    groups = [tuple(group) for group in np.array_split(np.array(blocks), min(_GROUPS, len(blocks)))]
    data = CategoricalData(
        mean=predictions.mean,
        variance=predictions.variance if with_variance else None,
        rows=None if size == N else rows,
        stored=None,
        table=table,
        mass=mass,
        n_labels=labels.total,
        blocks=tuple(groups),
        spread=np.zeros(K),
    )
    stored = np.empty((C, K, size)) if C <= _FEW_CLASSES and not classes_last else None
    spread = np.zeros(K)
    for part in blocks:
        logits = data.logits(part)
        np.maximum(spread, -logits.min(axis=(0, 2)), out=spread)
        if stored is not None:
            stored[:, :, part] = logits
    return CategoricalData(**{**vars(data), "stored": stored, "spread": spread})


def shifted(logits: Array) -> Array:
    """Logits (n, K, C) as (C, K, n) in double precision, the largest of each row 0."""
    values = logits.astype(np.float64)
    values -= values.max(axis=2, keepdims=True)
    np.maximum(values, _LOWEST, out=values)
    return values.transpose(2, 1, 0)


def check_logits(predictions: ViewPredictions) -> None:
    """Raise where the predictions cannot be logits of two classes or more."""
    C = predictions.mean.shape[2]
    if C == 1:
        raise ValueError(
            "predictions have one output (C = 1); a classification needs a logit for every class. For a binary "
            "logit l stack zeros and l: np.concatenate([np.zeros_like(l), l], axis=2)"
        )


def refuse_probabilities(predictions: ViewPredictions) -> None:
    """Raise where a view's rows are probabilities; a handful of rows may sum to 1 by chance and are let pass."""
    mean = predictions.mean
    if len(mean) < _FEWEST_ROWS:
        return
    suspects = _views_that_sum_to_one(mean[:_PROBE])
    step = max(1, (1 << 20) // mean[0].size)
    for first in range(0, len(mean), step):
        if not suspects.any():
            return
        suspects &= _views_that_sum_to_one(mean[first : first + step])
    if suspects.any():
        name = predictions.names[int(np.argmax(suspects))]
        raise ValueError(
            f"predictions look like probabilities: all rows of view {name!r} are "
            "non-negative and sum to 1. Pass logits, for instance ViewPredictions(np.log(p)) (floor zeros first: "
            "np.log(np.maximum(p, 1e-12)))"
        )


def _views_that_sum_to_one(values: Array) -> Array:
    """Which views' rows are non-negative and sum to 1, up to the rounding of half precision or three digits: (K,)."""
    good = (values >= 0).all(axis=2) & (np.abs(values.sum(axis=2) - 1) <= 5e-3)
    return np.asarray(good.all(axis=0))
