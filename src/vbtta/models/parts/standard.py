"""Continuous data in standard units, laid out in blocks: what the inference iterates over."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.em import Block, block_size, total

SMALLEST_VARIANCE = 1e-12  # of a residual, in standard units: perfect predictions stay finite
_MOST_KEPT = 32  # cache-sized blocks
_SMALLEST_SCALE = 1e-100  # of labels, so that its square is a number too
MAX_SAMPLE = 4096  # labels whose residuals replace the scale of labels that do not vary
_FAR = 5.0  # standard deviations of the labels between them and predictions in the same units, at most
_OTHER_UNITS = 10.0  # ratio of the standard deviations of labels and predictions in the same units, at most
SLOPE_SCALE = 0.1  # prior standard deviation of the slope of ln sd in the prediction
_MAX_COVARIATE = 3.0
ResultT = TypeVar("ResultT")


class Standard(NamedTuple):
    """The labels' location and scale, which the priors are relative to, and those of the predictions.

    They are the same unless predictions are in other units: far from the labels, or on another scale altogether.
    """

    location: Annotated[Array, "C|"]
    scale: Annotated[Array, "C|"]
    prediction_location: Annotated[Array, "C|"]
    prediction_scale: Annotated[Array, "C|"]

    def apply(self, values: Array) -> Array:
        """Labels (..., C) in standard units."""
        return np.asarray((values - self.location) / self.scale)

    def apply_to_predictions(self, values: Array) -> Array:
        """Predictions (..., C) in standard units."""
        return np.asarray((values - self.prediction_location) / self.prediction_scale)

    def linear(self, gain: Array, shift: Array) -> tuple[Array, Array]:
        """Factors and offsets (K, C) of predictions, from gains and shifts in standard units."""
        factor = gain * (self.scale / self.prediction_scale)
        return factor, self.location + self.scale * shift - factor * self.prediction_location


@dataclass(frozen=True, eq=False)
class ContinuousBlocks(ABC):
    """Blocks of labelled instances in standard units, wherever they are: all that an inference asks of its data."""

    standard: Standard
    n_views: int
    n_outputs: int
    n_labels: float  # J, counts included
    n_instances: int  # N+, those with a label
    n_annotators: int
    has_variance: bool  # whether blocks hold variances
    n_groups: int  # of instances; 0 where they are independent
    n_rows: int  # labels without their counts

    @property
    def unit_change(self) -> float:
        """Difference between the log density in the labels' units and in standard units."""
        return -self.n_labels * float(np.log(self.standard.scale).sum())

    @abstractmethod
    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, in an order that depends on their number alone."""

    @abstractmethod
    def subsample(self, most: int) -> Self:
        """Every n-th block, so that about `most` labels remain."""


@dataclass(frozen=True, eq=False)
class ContinuousData(ContinuousBlocks):
    """Labelled instances in standard units, in memory."""

    blocks: Sequence[Block]

    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, on several threads."""
        return total(function, self.blocks)

    def subsample(self, most: int) -> Self:
        """Every n-th block, so that about `most` labels remain."""
        blocks = kept(self.blocks[:: max(1, self.n_rows // most)])
        n_rows, n_labels = np.sum([(len(block.repeats), block.repeats.sum()) for block in blocks], axis=0)
        return replace(self, blocks=blocks, n_rows=int(n_rows), n_labels=float(n_labels))


def continuous_data(predictions: ViewPredictions, labels: LabelSets, *, with_variance: bool = False) -> ContinuousData:
    """Lay out predictions and labels, already aligned, in blocks of standard units."""
    (n_views, n_outputs), rows = predictions.outputs.shape[1:], labels.labelled
    size = block_size(n_views, len(labels), len(rows))
    standard = standard_of(labels, predictions.outputs[labels.instance[:MAX_SAMPLE]], size)
    group = predictions.group_numbers(rows)
    blocks = kept(lay_out(predictions, labels, standard, size, with_variance, group))
    people, n_groups = max(1, len(labels.annotator_names)), 0 if group is None else 1 + int(group.max())
    facts = people, with_variance and predictions.variance is not None, n_groups, len(labels)
    return ContinuousData(standard, n_views, n_outputs, labels.total, len(rows), *facts, blocks)


class Blocks(Sequence[Block]):
    """Blocks that are laid out whenever they are read: there is no copy of the predictions."""

    def __init__(self, lay_out: Callable[[int], Block], numbers: range) -> None:
        self._lay_out, self._numbers = lay_out, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        number = self._numbers[place]
        return self._lay_out(number) if isinstance(number, int) else Blocks(self._lay_out, number)


def kept(blocks: Sequence[Block]) -> Sequence[Block]:
    """Blocks that are laid out once if they are few; laying them out takes a tenth of a pass."""
    return blocks if len(blocks) > _MOST_KEPT else list(blocks)


def lay_out(
    predictions: ViewPredictions,
    labels: LabelSets,
    standard: Standard,
    size: int,
    with_variance: bool,
    group: Array | None = None,
) -> Blocks:
    """Blocks of `size` labelled instances, of groups (N+,), in standard units."""
    rows, unit, location = labels.labelled, standard.prediction_scale, standard.prediction_location
    instance, value = np.searchsorted(rows, labels.instance), labels.continuous(len(unit))
    parts, variance = _label_edges(instance, len(rows), size), predictions.variance if with_variance else None

    def block(number: int) -> Block:
        part, inside = parts[number], slice(number * size, min((number + 1) * size, len(rows)))
        single = inside.stop - inside.start == part.stop - part.start
        return Block(
            mean=_views_first(predictions.outputs, rows[inside], location, unit),
            variance=None if variance is None else _views_first(variance, rows[inside], 0 * unit, unit**2),
            instance=None if single else instance[part] - inside.start,
            value=np.ascontiguousarray(standard.apply(value[part]).T),
            repeats=labels.count[part],
            annotator=np.zeros(part.stop - part.start, np.intp) if labels.annotator is None else labels.annotator[part],
            group=None if group is None else group[inside],
            first=inside.start,
        )

    return Blocks(block, range(len(parts)))


def standard_of(labels: LabelSets, mean: Array, size: int) -> Standard:
    """Mean and standard deviation of the labels; where they do not vary, the size of the residuals.

    Sums are over blocks of `size` labelled instances. Predictions (j, K, C) of the first labels decide whether they are
    in other units.
    """
    value, count, rows = labels.continuous(mean.shape[2]), labels.count, labels.labelled
    parts = _label_edges(np.searchsorted(rows, labels.instance), len(rows), size)
    n, location = total(lambda part: (count[part].sum(), count[part] @ value[part]), parts)
    location = location / n
    scale = np.sqrt(total(lambda part: count[part] @ (value[part] - location) ** 2, parts) / n)
    value, largest = value[: len(mean)], np.abs(value).max(axis=0)
    flat = scale <= 1e-12 * largest
    if flat.any():
        typical = np.median(np.abs(value[:, None] - mean), axis=(0, 1))
        scale = np.where(flat, np.where(typical > 1e-12 * largest, typical, np.where(largest > 0, largest, 1.0)), scale)
    if not (scale > _SMALLEST_SCALE).all() or (largest > 1 / _SMALLEST_SCALE).any():
        worst = float(scale.min()) if not (scale > _SMALLEST_SCALE).all() else float(largest.max())
        raise ValueError(f"labels are of size {worst:.3g}, whose square is no number; rescale labels and predictions")
    centre, spread = np.median(mean.mean(axis=0), axis=0), mean.std(axis=(0, 1))
    apart = (np.abs(centre - location) > _FAR * scale) | (spread > _OTHER_UNITS * scale)
    apart |= (spread < scale / _OTHER_UNITS) & (spread > 1e-12 * np.abs(centre))
    spread = np.where(spread > 1e-12 * np.abs(centre), spread, scale)
    return Standard(location, scale, np.where(apart, centre, location), np.where(apart, spread, scale))


def _label_edges(instance: Array, n_instances: int, size: int) -> list[slice]:
    """The labels of every `size` instances, which count from 0."""
    edges = np.searchsorted(instance, np.arange(0, n_instances + size, size)).tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _views_first(values: Array, rows: Array, location: Array, scale: Array) -> Array:
    """Rows of an (N, K, C) array as (C, K, n) doubles in standard units."""
    whole = rows[-1] - rows[0] == len(rows) - 1  # no row is left out: no copy is made
    chosen = values[rows[0] : rows[-1] + 1] if whole else values[rows]
    laid_out = np.subtract(chosen.transpose(2, 1, 0), location[:, None, None], dtype=np.float64, order="C")
    laid_out /= scale[:, None, None]
    return laid_out


def scale_covariate(mean: Array, output_axis: int) -> Array:
    """x: the prediction in standard units, averaged over outputs, at most 3 in size."""
    average = mean.squeeze(output_axis) if mean.shape[output_axis] == 1 else mean.mean(axis=output_axis)
    return np.asarray(np.clip(average, -_MAX_COVARIATE, _MAX_COVARIATE))


def slope_step(current: float, first: float, second: float, scale: float) -> float:
    """A step of b that does not lower the expected log density, whose derivatives are `first` and -2 `second`.

    With q the squared distances, q exp(-2 d x) exceeds its tangent by at most 4 d^2 q x^2 (exp(R) - 1 - R) / R^2,
    R = 2 |d| max |x|: a lower bound on the gain of any step d.
    """
    step = (first - current / scale**2) / (2 * second + 1 / scale**2)
    step = float(np.clip(step, -0.5, 0.5))
    while abs(step) > 1e-12:
        reach = 2 * abs(step) * _MAX_COVARIATE
        rise = 0.5 if reach < 1e-4 else (np.expm1(reach) - reach) / reach**2
        gain = step * first - 2 * step**2 * rise * second - ((current + step) ** 2 - current**2) / (2 * scale**2)
        if gain >= 0:
            return step
        step *= 0.7
    return 0.0
