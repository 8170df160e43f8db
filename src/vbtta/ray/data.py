"""The data of a fit on the driver: counts, and sums over blocks that workers hold."""

__all__ = ["Calibration", "RemoteCategorical", "RemoteContinuous", "RemoteViews"]

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from vbtta.data.files import Chunk
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.blocks import Block, block_size, join
from vbtta.models.parts import label_noise
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks, block_rows, refuse_suspects
from vbtta.models.parts.standard import ContinuousBlocks, LabelMoments, label_moments, standard_of
from vbtta.ray.cluster import Fleet
from vbtta.ray.worker import LabelReader, Layout, Part, Sample, Scan, Worker, joined

_PARTS = 4  # a worker: what a lost one held is shared out among the others
_LOOKED_AT = 4096  # labels, as in memory, whose residuals estimate a scale

ResultT = TypeVar("ResultT")


class Calibration:
    """Predictions and labels on a cluster, counted but not read; workers are stopped at the end of a `with` block.

    Parameters
    ----------
    chunks : list of Chunk
    labels : LabelReader
    n_workers : int or None
    options : dict
        Of the workers, as `ray.remote` takes them.
    """

    def __init__(
        self, chunks: list[Chunk], labels: LabelReader, n_workers: int | None, options: dict[str, Any]
    ) -> None:
        self.chunks = chunks
        self.views = chunks[0].empty  # names, outputs and classes; no rows
        self.n_outputs = self.views.outputs.shape[2]
        sets = labels.sets
        if sets is not None:
            labels = replace(labels, by_id=sets.pairs_by_id(chunks[0].ids()))
            n_rows = sum(chunk.n_rows for chunk in chunks)
            if not labels.by_id and not sets.open_ended and sets.n_instances != n_rows:
                raise ValueError(
                    f"labels are for {sets.n_instances} instances but the dataset has {n_rows}; they are paired by row"
                )
        self.fleet = Fleet(Worker, (labels,), n_workers, options)
        try:
            paths = () if labels.files is None else labels.files.paths
            n_given = sum(self.fleet.anywhere([("n_labels", (path,)) for path in paths])) if sets is None else len(sets)
            scans: list[Scan] = self.fleet.anywhere([("scan", (chunk,)) for chunk in chunks])
            self.n_instances = sum(scan.n_instances for scan in scans)  # N+
            self.n_rows = sum(scan.n_labels for scan in scans)  # labels without their counts
            self.total = float(sum(scan.n_total for scan in scans))  # J
            self._check(n_given)
        except BaseException:
            self.fleet.close()
            raise
        names = sorted({name for scan in scans for name in scan.annotator_names})
        self.named = any(scan.named for scan in scans)
        self.annotator_names = tuple(names) if labels.sets is None else labels.sets.annotator_names
        several = sum(scan.n_several for scan in scans)
        self.overlap = several >= max(1, min(20, 0.1 * self.n_instances))
        shapes = [scan.largest for scan in scans if len(scan.largest)]
        self.largest = np.max(shapes, axis=0) if shapes else np.zeros(0)
        self._edges = np.cumsum([0, *(scan.n_instances for scan in scans)])  # labelled instances before each chunk

    def __enter__(self) -> "Calibration":
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.close()

    def take(self, places: Array, layout: Layout) -> tuple[ViewPredictions, LabelSets]:
        """Some labelled instances, in ascending order, brought here."""
        chunk = np.searchsorted(self._edges, places, side="right") - 1
        calls = [
            ("take", (self.chunks[number], places[chunk == number] - self._edges[number], layout))
            for number in np.unique(chunk).tolist()
        ]
        samples: list[Sample] = self.fleet.anywhere(calls)
        return joined(samples)

    def layout(self, task: str, **options: Any) -> Layout:
        """How instances are read."""
        return Layout(task, annotator_names=self.annotator_names, **options)

    def sum(self, function: Callable[[Any], ResultT], every: int, of: str) -> ResultT:
        """The sum of a function over every n-th block; workers send sums."""
        sums = self.fleet.over_parts("nodes", (function, every, of))
        result: ResultT = join(sorted(sums, key=lambda node: node.place << node.level))
        return result

    def distribute(self, size: int, layout: Layout) -> None:
        """Have the workers read all labelled instances, in parts of whole blocks."""
        n_blocks = -(-self.n_instances // size)
        n_parts = min(n_blocks, _PARTS * len(self.fleet))
        edges = np.linspace(0, n_blocks, n_parts + 1).astype(int).tolist()
        parts = {
            number: Part(first, last - first, size, self._slices(first * size, min(last * size, self.n_instances)))
            for number, (first, last) in enumerate(pairwise(edges))
        }
        self.fleet.give({number: ("hold", (number, part, layout)) for number, part in parts.items()})

    def _slices(self, start: int, stop: int) -> tuple[tuple[Chunk, int, int], ...]:
        """Where labelled instances from .. to are: chunks, and the places among their labelled instances."""
        first, last = np.searchsorted(self._edges, [start, stop - 1], side="right") - 1
        slices = []
        for number in range(int(first), int(last) + 1):
            low, high = int(self._edges[number]), int(self._edges[number + 1])
            if high > low:
                slices.append((self.chunks[number], max(start, low) - low, min(stop, high) - low))
        return tuple(slices)

    def _check(self, n_given: int) -> None:
        """Raise unless every label belongs to one instance."""
        if not self.n_instances:
            raise ValueError(
                "labels are empty, or none of them names an instance of the dataset: at least one needs a label"
            )
        if n_given > self.n_rows:
            raise ValueError(
                f"labels: {n_given - self.n_rows:,} of {n_given:,} name an instance that the dataset does not have; "
                "leave them out, or add the instances"
            )
        if n_given < self.n_rows:
            raise ValueError(
                f"dataset: instances are not unique, so {self.n_rows - n_given:,} labels would count twice; number the "
                "instances anew"
            )


@dataclass(frozen=True)
class RemoteViews:
    """Some views, or all, of predictions on a cluster: a :class:`vbtta.models.base.Source`."""

    home: Calibration
    names: tuple[str, ...] | None

    @property
    def has_variance(self) -> bool:
        """Whether predictions have variances over draws."""
        return self.home.views.variance is not None

    @property
    def named(self) -> bool:
        """Whether labels name their annotators."""
        return self.home.named

    def continuous(self, *, with_variance: bool) -> "RemoteContinuous":
        """Labelled instances in standard units, in blocks on the workers."""
        home, n_views = self.home, len(self.names or self.home.views.names)
        layout = home.layout("regression", views=self.names, with_variance=with_variance)
        home.distribute(block_size(n_views, home.n_rows, home.n_instances), layout)

        def moments(centre: Array) -> LabelMoments:
            return home.sum(lambda part: label_moments(part[0], part[1], centre), 1, "labels")

        def some() -> tuple[Array, Array]:
            predictions, labels = home.take(np.arange(min(home.n_instances, _LOOKED_AT)), layout)
            value = labels.continuous(home.n_outputs)[:_LOOKED_AT]
            return value, predictions.outputs[labels.instance[:_LOOKED_AT]]

        if len(home.largest) != home.n_outputs:
            home.take(np.arange(1), layout)[1].continuous(home.n_outputs)  # says what is wrong with the labels
            raise ValueError("labels must be numbers in a regression")
        standard = standard_of(moments, home.largest, some)
        home.fleet.each({number: ("lay_out", (number, layout, standard)) for number in home.fleet.owner})
        return RemoteContinuous(
            standard, n_views, home.n_outputs, home.total, home.n_instances,
            max(1, len(home.annotator_names)), with_variance, home,
        )  # fmt: skip

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> "RemoteCategorical":
        """Labelled instances with their logits and classes, in blocks on the workers."""
        home, names = self.home, self.names or self.home.views.names
        people = len(home.annotator_names) if home.named and noise in ("annotator", "confusion") else 1
        variance = with_variance and self.has_variance
        options = {"with_variance": variance, "noise": noise, "classes_last": classes_last}
        layout = home.layout("classification", views=self.names, **options)
        size = block_rows(len(names), home.n_outputs, label_noise.n_entries(noise, home.n_outputs, people))
        home.distribute(size, layout)
        summaries = home.fleet.each({number: ("lay_out", (number, layout, None)) for number in home.fleet.owner})
        refuse_suspects(names, np.min([suspects for _, suspects in summaries.values()], axis=0))
        return RemoteCategorical(
            len(names), home.n_outputs, home.n_instances, home.total, home.n_rows, people,
            np.max([spread for spread, _ in summaries.values()], axis=0), home, layout,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RemoteContinuous(ContinuousBlocks):
    """Blocks of labelled instances in standard units, on workers."""

    home: Calibration
    every: int = 1

    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, in an order that depends on their number alone."""
        return self.home.sum(function, self.every, "blocks")

    def some(self, most: int) -> "RemoteContinuous":
        """Every n-th block, so that about `most` labels remain."""
        fewer = replace(self, every=max(1, self.home.n_rows // most))
        return replace(fewer, n_labels=float(fewer.total(_n_labels)))


@dataclass(frozen=True, eq=False)
class RemoteCategorical(CategoricalBlocks):
    """Blocks of labelled instances' logits, on workers."""

    home: Calibration
    layout: Layout

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        return self.home.sum(function, every, "blocks")

    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""
        return self.home.take(np.arange(self.n_instances) if places is None else places, self.layout)


def _n_labels(block: Block) -> float:
    return float(block.repeats.sum())
