"""Continuous data in standard units, laid out in blocks: what the inference iterates over."""

__all__ = ["ContinuousData", "Standard", "continuous_data"]

from typing import NamedTuple

import numpy as np

from vbtta.infer.blocks import Block, block_bounds
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions

_ROWS_AT_A_TIME = 1 << 14
_SMALLEST_SCALE = 1e-100  # of labels, so that its square is a number too


class Standard(NamedTuple):
    """The labels' location and scale, which the priors are relative to."""

    location: Array  # (C,)
    scale: Array  # (C,)

    def apply(self, values: Array) -> Array:
        """Values (..., C) in standard units."""
        return np.asarray((values - self.location) / self.scale)


class ContinuousData(NamedTuple):
    """Labelled instances in standard units."""

    blocks: list[Block]
    standard: Standard
    n_views: int
    n_outputs: int
    n_labels: float  # J, counts included
    n_instances: int  # N+, those with a label
    n_annotators: int

    def some(self, most: int) -> "ContinuousData":
        """Every n-th block, so that about `most` labels remain."""
        n_labels = sum(len(block.repeats) for block in self.blocks)
        blocks = self.blocks[:: max(1, n_labels // most)]
        return self._replace(blocks=blocks, n_labels=float(sum(block.repeats.sum() for block in blocks)))


def continuous_data(
    predictions: ViewPredictions, labels: LabelSets, standard: Standard | None = None, *, with_variance: bool = False
) -> ContinuousData:
    """Lay out predictions and labels, already aligned, in blocks of standard units."""
    n_views, n_outputs = predictions.mean.shape[1:]
    value = labels.continuous(n_outputs)  # (J, C)
    standard = standard or _standard(value, labels, predictions)
    rows, instance = np.unique(labels.instance, return_inverse=True)
    mean = _views_first(predictions.mean, rows, standard.location, standard.scale)
    variance = None
    if with_variance and predictions.variance is not None:
        variance = _views_first(predictions.variance, rows, np.zeros(n_outputs), standard.scale**2)
    targets = np.ascontiguousarray(standard.apply(value).T)  # (C, J)
    annotator = np.zeros(len(labels), dtype=np.intp) if labels.annotator is None else labels.annotator
    blocks = []
    for first, last in block_bounds(instance, n_views):
        inside = slice(int(instance[first]), int(instance[last - 1]) + 1)
        single = inside.stop - inside.start == last - first
        blocks.append(
            Block(
                mean=mean[:, :, inside],
                variance=None if variance is None else variance[:, :, inside],
                instance=None if single else instance[first:last] - inside.start,
                value=targets[:, first:last],
                repeats=labels.count[first:last],
                annotator=annotator[first:last],
            )
        )
    return ContinuousData(
        blocks, standard, n_views, n_outputs, labels.total, len(rows), max(1, len(labels.annotator_names))
    )


def _standard(value: Array, labels: LabelSets, predictions: ViewPredictions) -> Standard:
    """Mean and standard deviation of the labels; where they do not vary, the size of the residuals."""
    share = labels.count / labels.count.sum()
    location = share @ value
    scale = np.sqrt(share @ (value - location) ** 2)
    size = np.abs(value).max(axis=0)
    flat = scale <= 1e-12 * size
    if flat.any():
        some = slice(0, min(len(labels), 4096))
        residual = value[some, None] - predictions.mean[labels.instance[some]]  # (j, K, C)
        typical = np.median(np.abs(residual), axis=(0, 1))
        scale = np.where(flat, np.where(typical > 1e-12 * size, typical, np.where(size > 0, size, 1.0)), scale)
    if not (scale > _SMALLEST_SCALE).all() or (size > 1 / _SMALLEST_SCALE).any():
        worst = float(scale.min()) if not (scale > _SMALLEST_SCALE).all() else float(size.max())
        raise ValueError(f"labels are of size {worst:.3g}, whose square is no number; rescale labels and predictions")
    return Standard(location, scale)


def _views_first(values: Array, rows: Array, location: Array, scale: Array) -> Array:
    """Rows of an (N, K, C) array as (C, K, n) doubles in standard units."""
    laid_out = np.empty((values.shape[2], values.shape[1], len(rows)))
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[start : start + _ROWS_AT_A_TIME]
        chunk = np.asarray(values[part], dtype=np.float64)
        laid_out[:, :, start : start + len(part)] = ((chunk - location) / scale).transpose(2, 1, 0)
    return laid_out
