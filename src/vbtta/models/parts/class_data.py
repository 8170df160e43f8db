"""Logits and class labels laid out for the inference: blocks of instances, classes first."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.blocks import total
from vbtta.models.parts import label_noise
from vbtta.models.parts.label_noise import LabelTable

_ENTRIES = 1 << 17  # of an array of logits in work: it and a few like it fit a core's second-level cache
_SINGLE_LOGITS = 1 << 10  # of an instance, given in single precision or less, from which work is in single precision
_FEW_CLASSES = 48  # up to which instances come last in memory: reductions over a short last axis are slow
_MIN_SIZE_RATIO = 8  # of a block's logits to its noise statistics, so that adding these takes no time
_MIN_LOGIT = -1e12  # after the shift: keeps products finite
_PROBE_ROWS = 256  # looked at before all rows are
_MIN_PROBABILITY_ROWS = 5  # from which rows that sum to 1 are no accident
_PREDICTED_ENTRIES = 1 << 17  # of a block of logits to predict
_SAFE_LOGIT, _MIN_PROBA = 60.0, 1e-35  # of which exponentials are finite, and a probability, in single precision
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False)
class CategoricalBlock:
    """Labelled instances. Nothing is copied where classes are many: logits are read from the predictions.

    Logits are shifted so that the largest of an instance and view is 0, which changes no probability.
    """

    mean: Array  # (N, K, C) as given
    variance: Array | None  # (N, K, C)
    rows: Array | None  # (N+,) rows with a label; None where all have one
    top: Array  # (N+, K): the largest logit
    ranges: Array  # (N+, K): and how far the smallest is below it
    stored: Array | None  # (C, K, N+), shifted
    table: LabelTable
    mass: Array | None  # (N+, C): how often each class was given, for labels without noise
    group: Array | None = None  # (N+,): numbers of the instances' groups, where they come in groups
    first: int = 0  # labelled instances before the block
    precision: type[np.floating[Any]] = np.float64  # of the logits in work

    @property
    def n_instances(self) -> int:
        """N+, those with a label."""
        return self.table.n_instances

    @property
    def parts(self) -> list[slice]:
        """Instances to be worked on at once."""
        step = _step(*self.mean.shape[1:])
        return [slice(first, min(first + step, self.n_instances)) for first in range(0, self.n_instances, step)]

    @cached_property
    def looked_at(self) -> LabelTable:
        """The labels with the probability that the views give to each."""
        row = self.table.instance if self.rows is None else self.rows[self.table.instance]
        return replace(self.table, looks=label_noise.label_looks(self.mean, row, self.table.label))

    def logits(self, part: slice) -> Array:
        """Shifted logits of some labelled instances: (C, K, n), not to be written to."""
        if self.stored is not None:
            return self.stored[:, :, part]
        values = np.subtract(self._take(self.mean, part), self.top[part, :, None], dtype=self.precision)
        if self.ranges.max() > -_MIN_LOGIT:
            np.maximum(values, _MIN_LOGIT, out=values)
        return values.transpose(2, 1, 0)

    def variances(self, part: slice) -> Array | None:
        """Variances over draws of the same, where there are any: (C, K, n)."""
        if self.variance is None:
            return None
        return np.asarray(self._take(self.variance, part), dtype=np.float64).transpose(2, 1, 0)

    def split(self, size: int) -> list["CategoricalBlock"]:
        """The same in blocks of so many instances."""
        blocks, in_place = [], self.rows is None
        for first in range(0, self.n_instances, size):
            inside = slice(first, min(first + size, self.n_instances))
            labels = slice(*np.searchsorted(self.table.instance, [inside.start, inside.stop]))
            block = CategoricalBlock(
                mean=self.mean[inside] if in_place else self.mean,
                variance=self.variance[inside] if in_place and self.variance is not None else self.variance,
                rows=None if self.rows is None else self.rows[inside],
                top=self.top[inside],
                ranges=self.ranges[inside],
                stored=None if self.stored is None else self.stored[:, :, inside],
                table=self.table.part(labels, first, inside.stop),
                mass=None if self.mass is None else self.mass[inside],
                group=None if self.group is None else self.group[inside],
                first=first,
                precision=self.precision,
            )
            blocks.append(block)
        return blocks

    def _take(self, array: Array, part: slice) -> Array:
        return np.asarray(array[part] if self.rows is None else array[self.rows[part]])


@dataclass(frozen=True, eq=False)
class CategoricalBlocks(ABC):
    """Blocks of labelled instances, wherever they are: all that an inference asks of its data."""

    n_views: int
    n_classes: int
    n_instances: int  # N+, those with a label
    n_labels: float  # J, counts included
    n_rows: int  # labels without their counts
    n_annotators: int  # that the noise model tells apart
    widest: Array  # (K,): largest range of every view's logits

    @property
    def n_groups(self) -> int:
        """Number of groups of instances; 0 where instances are independent."""
        return 0

    @abstractmethod
    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""

    @abstractmethod
    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""


@dataclass(frozen=True, eq=False)
class CategoricalData(CategoricalBlocks):
    """All labelled instances, in memory, and the blocks they are worked on in."""

    whole: CategoricalBlock
    blocks: Sequence[CategoricalBlock]
    source: tuple[ViewPredictions, LabelSets]

    @property
    def n_groups(self) -> int:
        """Number of groups of instances; 0 where instances are independent."""
        return 0 if self.whole.group is None else int(self.whole.group.max()) + 1

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, on several threads."""
        return total(function, self.blocks[::every])

    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""
        predictions, labels = self.source
        if places is None:
            return self.source
        rows = labels.labelled[places]
        return predictions.take(rows), labels.take(rows)


def categorical_data(
    predictions: ViewPredictions, labels: LabelSets, *, noise: str, with_variance: bool, classes_last: bool = False
) -> CategoricalData:
    """Check predictions and labels, already aligned, and lay them out."""
    check_logits(predictions)
    refuse_probabilities(predictions)
    if not len(labels):
        raise ValueError("labels are empty: at least one instance needs a label")
    _, K, C = predictions.outputs.shape
    position = labels.categorical(C, predictions.classes)
    table = label_noise.label_table(labels, position, noise)
    rows = labels.labelled
    variance = predictions.variance if with_variance else None
    whole = categorical_block(predictions.outputs, variance, rows, table, noise, classes_last=classes_last)
    whole = replace(whole, group=predictions.group_numbers(rows))
    blocks = whole.split(block_rows(K, C, label_noise.n_entries(noise, C, table.n_annotators)))
    size = (K, C, len(rows), labels.total, len(table.label), table.n_annotators)
    return CategoricalData(*size, whole.ranges.max(axis=0), whole, blocks, (predictions, labels))


def categorical_block(
    mean: Array, variance: Array | None, rows: Array, table: LabelTable, noise: str, *, classes_last: bool
) -> CategoricalBlock:
    """Labelled rows (n,) of predictions (N, K, C) and their labels, laid out."""
    N, K, C = mean.shape
    size = len(rows)
    mass = None
    if noise == "none":
        mass = np.bincount(table.instance * C + table.label, table.repeats, size * C).reshape(size, C)
    precision = np.float32 if not classes_last and mean.dtype.itemsize <= 4 and K * C >= _SINGLE_LOGITS else np.float64
    top, ranges = np.empty((2, size, K))
    for first in range(0, size, step := _step(K, C)):
        part = slice(first, first + step)
        logits = mean[part] if size == N else mean[rows[part]]
        top[part] = logits.max(axis=2)
        ranges[part] = np.minimum(top[part] - logits.min(axis=2), -_MIN_LOGIT)
    known = (top.astype(precision, copy=False), ranges)
    block = CategoricalBlock(
        mean, variance, None if size == N else rows, *known, None, table, mass, precision=precision
    )
    if C > _FEW_CLASSES or classes_last:
        return block
    stored = np.empty((C, K, size), dtype=precision)
    for part in block.parts:
        stored[:, :, part] = block.logits(part)
    return replace(block, stored=stored)


def block_rows(n_views: int, n_classes: int, n_statistics: int) -> int:
    """Instances of a block: cache-sized, or more where the noise has many statistics."""
    step = _step(n_views, n_classes)
    return step * -(-max(1, _MIN_SIZE_RATIO * n_statistics) // (step * n_views * n_classes))


def _step(n_views: int, n_classes: int) -> int:
    return max(1, _ENTRIES // (n_views * n_classes))


def shifted(logits: Array) -> Array:
    """Logits (n, K, C) as (C, K, n) in double precision, the largest of each row 0."""
    values = np.subtract(logits, logits.max(axis=2, keepdims=True), dtype=np.float64)
    np.maximum(values, _MIN_LOGIT, out=values)
    return np.asarray(values.transpose(2, 1, 0))


def check_logits(predictions: ViewPredictions) -> None:
    """Raise where the predictions cannot be logits of two classes or more."""
    C = predictions.outputs.shape[2]
    if C == 1:
        raise ValueError(
            "predictions have one output (C = 1); a classification needs a logit for every class. For a binary "
            "logit l stack zeros and l: np.concatenate([np.zeros_like(l), l], axis=2)"
        )


def refuse_probabilities(predictions: ViewPredictions) -> None:
    """Raise where a view's rows are probabilities; a handful of rows may sum to 1 by chance and are let pass."""
    if len(predictions.outputs) >= _MIN_PROBABILITY_ROWS:
        refuse_suspects(predictions.names, probability_views(predictions.outputs))


def refuse_suspects(names: Sequence[str], suspects: Array) -> None:
    """Raise where any of the views (K,) is suspected of being probabilities."""
    if suspects.any():
        name = names[int(np.argmax(suspects))]
        raise ValueError(
            f"predictions look like probabilities: all rows of view {name!r} are "
            "non-negative and sum to 1. Pass logits, for instance ViewPredictions(np.log(p)) (floor zeros first: "
            "np.log(np.maximum(p, 1e-12)))"
        )


def probability_views(mean: Array) -> Array:
    """Which views' rows are all non-negative and sum to 1: (K,)."""
    suspects = _sum_to_one(mean[:_PROBE_ROWS])
    step = max(1, (1 << 20) // mean[0].size)
    for first in range(0, len(mean), step):
        if not suspects.any():
            break
        suspects &= _sum_to_one(mean[first : first + step])
    return suspects


def _sum_to_one(values: Array) -> Array:
    """Which views' rows are non-negative and sum to 1, up to the rounding of half precision or three digits: (K,)."""
    return np.asarray(((values >= 0).all(axis=2) & (np.abs(values.sum(axis=2) - 1) <= 5e-3)).all(axis=0))


def prediction_blocks(
    predictions: ViewPredictions, *, with_variance: bool
) -> Iterator[tuple[slice, Array, Array | None]]:
    """Blocks of rows to predict, with shifted logits and, where wanted, variances over draws, (C, K, n) each."""
    for rows in prediction_rows(predictions):
        variance = None
        if predictions.variance is not None and with_variance:
            variance = predictions.variance[rows].astype(np.float64).transpose(2, 1, 0)
        yield rows, shifted(predictions.outputs[rows]), variance


def prediction_rows(predictions: ViewPredictions) -> list[slice]:
    """Blocks of rows to predict."""
    check_logits(predictions)
    N, K, C = predictions.outputs.shape
    step = max(1, _PREDICTED_ENTRIES // (K * C))
    return [slice(first, min(first + step, N)) for first in range(0, N, step)]


class SoftmaxViews:
    """A block of views with softmax probabilities P_k(c) of kappa_k f_k + o, their mixture and its information.

    The offsets, common to all views, are factors exp(o) of sums over classes: the array of all logits (n, K, C) is
    scaled, exponentiated and multiplied by vectors. Many logits in single precision are worked on in that.
    """

    def __init__(self, logits: Array, kappa: Array, offset: Array, weights: Array) -> None:
        single = logits.dtype.itemsize <= 4 and logits[0].size >= _SINGLE_LOGITS
        self._type = np.float32 if single else np.float64
        self._utility = np.multiply(logits, kappa[:, None].astype(self._type), dtype=self._type)
        if max(self._utility.max(), -self._utility.min()) > _SAFE_LOGIT:
            self._utility -= self._utility.max(axis=2, keepdims=True)
        self._power = np.exp(self._utility)
        self._factor = np.exp(offset - offset.max())  # (C,)
        self._rate = weights / (self._power @ self._factor.astype(self._type))  # (n, K): w_k / Z_k
        each = (self._rate.astype(self._type)[:, None] @ self._power)[:, 0]
        self.mixture = np.maximum(each * self._factor, _MIN_PROBA if single else np.finfo(np.float64).tiny)  # (n, C)

    def pooled(self, weights: Array, offset: Array) -> Array:
        """Class probabilities of the weighted sum of the utilities: (n, C)."""
        return np.asarray(special.softmax(weights.astype(self._type) @ self._utility + offset, axis=1))

    def information(self, proba: Array) -> Array:
        """Mutual information of class and view, given class probabilities (n, C): (n,)."""
        # ln P(c, k) = ln rate_k + u_kc + ln tilt_c: what depends on class and view enters by its expectation alone
        tilt = self._factor * np.minimum(proba / self.mixture, 1e30)
        lean = tilt.astype(self._type)[:, :, None]
        by_view = self._rate * (self._power @ lean)[:, :, 0]
        utility = self._rate * ((self._power * self._utility) @ lean)[:, :, 0]
        log_joint = (special.xlogy(by_view, self._rate) + utility).sum(axis=1) + special.xlogy(proba, tilt).sum(axis=1)
        left_open, entropy = special.xlogy(by_view, by_view).sum(axis=1) - log_joint, special.entr(proba).sum(axis=1)
        return np.asarray(np.clip(entropy - left_open, 0, entropy))


def joint_information(joint: Array) -> Array:
    """Mutual information between class and view of P(class, view), (C, K, n): (n,)."""
    by_view, by_class = joint.sum(axis=0), joint.sum(axis=1)
    entropies = special.entr(by_view).sum(axis=0) + special.entr(by_class).sum(axis=0)
    return np.asarray(np.maximum(entropies - special.entr(joint).sum(axis=(0, 1)), 0))


def class_names(predictions: ViewPredictions) -> Array:
    """Names of the outputs: (C,)."""
    return np.arange(predictions.outputs.shape[2]) if predictions.classes is None else predictions.classes
