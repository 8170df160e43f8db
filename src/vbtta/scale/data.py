"""The data of a fit as the driver sees them: counts, and sums over blocks that workers hold."""

__all__ = ["Calibration", "RemoteCategorical", "RemoteContinuous"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.blocks import Block, block_size, join
from vbtta.infer.categorical_data import CategoricalBlock, block_rows, refuse_suspects
from vbtta.infer.standard import LabelMoments, Standard, label_moments, standard_of
from vbtta.label_values import any_known
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.scale.cluster import Fleet
from vbtta.scale.label_tables import LabelReader
from vbtta.scale.tables import About, Source
from vbtta.scale.worker import Layout, Part, Scan, Taken, Worker, joined

_PARTS = 4  # a worker: what a lost one held is shared out among the others
_LOOKED_AT = 4096  # labels, as in memory, whose residuals stand in for a scale

ResultT = TypeVar("ResultT")


class Calibration:
    """Predictions and labels on a cluster, counted but not read; workers are let go at the end of a `with` block.

    Parameters
    ----------
    sources : list of Source
    labels : LabelReader
    n_workers : int or None
    options : dict
        Of the workers, as `ray.remote` takes them.
    """

    def __init__(
        self, sources: list[Source], labels: LabelReader, n_workers: int | None, options: dict[str, Any]
    ) -> None:
        self.sources = sources
        self.about: About = sources[0].about
        if labels.sets is not None and labels.sets.open_ended:
            ids = sources[0].ids()
            labels = replace(labels, by_id=ids is not None and any_known(labels.sets.instance, ids))
        n_rows = sum(source.n_rows for source in sources)
        sets = labels.sets
        if sets is not None and sets.ids is None and not sets.open_ended and sets.n_instances != n_rows:
            raise ValueError(
                f"labels are for {sets.n_instances} instances but the dataset has {n_rows}; they are paired by row"
            )
        self.fleet = Fleet(Worker, (labels,), n_workers, options)
        try:
            scans: list[Scan] = self.fleet.anywhere([("scan", (source,)) for source in sources])
            self.n_instances = sum(scan.n_instances for scan in scans)  # N+
            self.n_rows = sum(scan.n_labels for scan in scans)  # labels without their counts
            self.total = float(sum(scan.n_total for scan in scans))  # J
            self._check(scans)
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
        self._edges = np.cumsum([0, *(scan.n_instances for scan in scans)])  # labelled instances before each source

    def __enter__(self) -> "Calibration":
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.close()

    def take(self, places: Array, layout: Layout) -> tuple[ViewPredictions, LabelSets]:
        """Some labelled instances, in ascending order, brought here."""
        source = np.searchsorted(self._edges, places, side="right") - 1
        calls = [
            ("take", (self.sources[one], places[source == one] - self._edges[one], layout))
            for one in np.unique(source).tolist()
        ]
        found: list[Taken] = self.fleet.anywhere(calls)
        predictions, labels = joined(found)
        return predictions, labels

    def layout(self, task: str, **options: Any) -> Layout:
        """How raw instances are wanted."""
        return Layout(task, annotator_names=self.annotator_names, **options)

    def continuous(self, *, views: tuple[str, ...] | None, with_variance: bool) -> "RemoteContinuous":
        """Blocks in standard units on the workers."""
        n_views = len(views or self.about.names)
        layout = self.layout("regression", views=views, with_variance=with_variance)
        size = block_size(n_views, self.n_rows, self.n_instances)
        n_blocks = self._distribute(size, layout)

        def moments(centre: Array) -> LabelMoments:
            return self.sum(lambda part: label_moments(part[0], part[1], centre), 1, "labels")

        def some() -> tuple[Array, Array]:
            predictions, labels = self.take(np.arange(min(self.n_instances, _LOOKED_AT)), layout)
            value = labels.continuous(self.about.n_outputs)[:_LOOKED_AT]
            return value, predictions.mean[labels.instance[:_LOOKED_AT]]

        if len(self.largest) != self.about.n_outputs:
            self.take(np.arange(1), layout)[1].continuous(self.about.n_outputs)  # says what is wrong with the labels
            raise ValueError("labels must be numbers in a regression")
        standard = standard_of(moments, self.largest, some)
        self.fleet.each({number: ("lay_out", (number, layout, standard)) for number in self.fleet.owner})
        return RemoteContinuous(
            self, standard, n_views, self.about.n_outputs, self.total, self.n_instances,
            max(1, len(self.annotator_names)), with_variance, n_blocks,
        )  # fmt: skip

    def categorical(
        self, *, views: tuple[str, ...] | None, noise: str, with_variance: bool, classes_last: bool
    ) -> "RemoteCategorical":
        """Blocks of logits on the workers."""
        names = views or self.about.names
        people = len(self.annotator_names) if self.named and noise in ("annotator", "confusion") else 1
        layout = self.layout(
            "classification", views=views, with_variance=with_variance, noise=noise, classes_last=classes_last
        )
        size = block_rows(len(names), self.about.n_outputs, label_noise.n_entries(noise, self.about.n_outputs, people))
        self._distribute(size, layout)
        looks = self.fleet.each({number: ("lay_out", (number, layout, None)) for number in self.fleet.owner})
        refuse_suspects(names, np.min([suspects for _, suspects in looks.values()], axis=0))
        return RemoteCategorical(
            self, layout, len(names), self.about.n_outputs, self.n_instances, self.total, self.n_rows, people,
            np.max([spread for spread, _ in looks.values()], axis=0),
        )  # fmt: skip

    def sum(self, function: Callable[[Any], ResultT], every: int, of: str) -> ResultT:
        """The sum of a function over every n-th block: a function goes out, sums come back."""
        found = self.fleet.over_parts("nodes", (function, every, of))
        result: ResultT = join(sorted(found, key=lambda node: node.place << node.level))
        return result

    def _distribute(self, size: int, layout: Layout) -> int:
        """Have the workers read all labelled instances, in parts of whole blocks; the number of blocks."""
        n_blocks = -(-self.n_instances // size)
        n_parts = min(n_blocks, _PARTS * len(self.fleet))
        edges = np.linspace(0, n_blocks, n_parts + 1).astype(int).tolist()
        parts = {
            number: Part(first, last - first, size, self._slices(first * size, min(last * size, self.n_instances)))
            for number, (first, last) in enumerate(pairwise(edges))
        }
        self.fleet.give({number: ("hold", (number, part, layout)) for number, part in parts.items()})
        return n_blocks

    def _slices(self, start: int, stop: int) -> tuple[tuple[Source, int, int], ...]:
        """Where labelled instances from .. to are: sources, and the places among their labelled instances."""
        first, last = np.searchsorted(self._edges, [start, stop - 1], side="right") - 1
        found = []
        for one in range(int(first), int(last) + 1):
            low, high = int(self._edges[one]), int(self._edges[one + 1])
            if high > low:
                found.append((self.sources[one], max(start, low) - low, min(stop, high) - low))
        return tuple(found)

    def _check(self, scans: Sequence[Scan]) -> None:
        """Every label belongs to one instance."""
        if not self.n_instances:
            raise ValueError(
                "labels are empty, or none of them names an instance of the dataset: at least one needs a label"
            )
        given = self.fleet.anywhere([("n_given", ())])[0]
        if given > self.n_rows:
            raise ValueError(
                f"labels: {given - self.n_rows:,} of {given:,} name an instance that the dataset does not have; leave "
                "them out, or add the instances"
            )
        if given < self.n_rows:
            raise ValueError(
                f"dataset: instances are not unique, so {self.n_rows - given:,} labels would count twice; number the "
                "instances anew"
            )


@dataclass(frozen=True, eq=False)
class RemoteContinuous:
    """Blocks of labelled instances in standard units, on workers."""

    home: Calibration
    standard: Standard
    n_views: int
    n_outputs: int
    n_labels: float
    n_instances: int
    n_annotators: int
    has_variance: bool
    n_blocks: int
    every: int = 1

    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, in an order that depends on their number alone."""
        return self.home.sum(function, self.every, "blocks")

    def some(self, most: int) -> "RemoteContinuous":
        """Every n-th block, so that about `most` labels remain."""
        fewer = replace(self, every=max(1, self.home.n_rows // most))
        return replace(fewer, n_labels=float(fewer.total(_n_labels)))


@dataclass(frozen=True, eq=False)
class RemoteCategorical:
    """Blocks of labelled instances' logits, on workers."""

    home: Calibration
    layout: Layout
    n_views: int
    n_classes: int
    n_instances: int
    n_labels: float
    n_rows: int
    n_annotators: int
    widest: Array

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        return self.home.sum(function, every, "blocks")

    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""
        return self.home.take(np.arange(self.n_instances) if places is None else places, self.layout)


def _n_labels(block: Block) -> float:
    return float(block.repeats.sum())
