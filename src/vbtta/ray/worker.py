"""A worker of a fit: it holds some of the blocks, and adds up statistics over them."""

__all__ = ["LabelReader", "Layout", "Part", "Sample", "Scan", "Worker", "joined", "label_reader"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta.data.files import Chunk, LabelFiles, parquet_files
from vbtta.data.labels import Array, LabelSets, look_up
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.blocks import Node, nodes
from vbtta.models.parts import label_noise
from vbtta.models.parts.class_data import categorical_block, probability_views
from vbtta.models.parts.standard import Standard, lay_out


@dataclass(frozen=True)
class LabelReader:
    """Labels in memory (copied to every node once) or in parquet files, of which each worker reads its share."""

    sets: LabelSets | None = None
    files: LabelFiles | None = None
    by_id: bool = False  # whether `sets` are paired by id

    def of(self, first: int, ids: Array | None, n_rows: int) -> LabelSets:
        """The labels of rows `first` to `first + n_rows` of the data, whose instances then count from 0."""
        if self.sets is not None:
            rows = self.sets.instance - first
            unknown = (rows < 0) | (rows >= n_rows)
            if self.by_id and ids is not None:
                rows, unknown = self.sets.locate(ids)
            return self.sets.place(rows, n_rows, kept=np.flatnonzero(~unknown))
        assert self.files is not None
        if ids is None:
            raise ValueError("labels name instances, but the predictions have no column 'instance'; write one")
        table = self.files.share(ids)
        rows, unknown = look_up(table.instance, ids)

        def known(column: Array | None) -> Array | None:
            return None if column is None else column[~unknown]

        return LabelSets.from_long(
            replace(
                table,
                instance=rows[~unknown],
                label=table.label[~unknown],
                annotator=known(table.annotator),
                count=known(table.count),
                weight=known(table.weight),
                n_rows=n_rows,
            )
        )


def label_reader(
    labels: LabelSets | ArrayLike | str | os.PathLike[str], *, columns_are_annotators: bool = False
) -> LabelReader:
    """A reader of labels in memory, or of the parquet files at a path."""
    if isinstance(labels, str | os.PathLike):
        return LabelReader(files=LabelFiles(tuple(parquet_files(labels, "labels")), columns_are_annotators))
    return LabelReader(labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels))


class Scan(NamedTuple):
    """Summary of the labels of a chunk."""

    n_instances: int  # with a label
    n_labels: int  # rows, counts not included
    n_total: float  # counts and weights included
    n_several: int  # instances with two labels or more
    named: bool  # whether annotators are
    annotator_names: tuple[str, ...]
    largest: Array  # (C,) of the labels' absolute values; empty unless they are numbers


class Part(NamedTuple):
    """Consecutive blocks of instances with a label, and where they come from."""

    first: int  # block
    n_blocks: int
    size: int  # instances of a block
    slices: tuple[tuple[Chunk, int, int], ...]  # labelled instances from .. to of each chunk


@dataclass(frozen=True)
class Layout:
    """How a model needs its blocks."""

    task: str
    views: tuple[str, ...] | None  # a selection of them
    annotator_names: tuple[str, ...]
    with_variance: bool
    noise: str = "none"
    classes_last: bool = False


class Sample(NamedTuple):
    """Predictions and labels of some labelled instances, which count from 0."""

    predictions: ViewPredictions
    labels: LabelSets


@dataclass
class _Held:
    part: Part
    sample: Sample | None  # until it is laid out
    blocks: Sequence[Any] = ()


class Worker:
    """Holds parts of the data; its answers are small.

    Parameters
    ----------
    labels : LabelReader
    """

    def __init__(self, labels: LabelReader) -> None:
        self.labels = labels
        self.held: dict[int, _Held] = {}

    def ready(self) -> bool:
        """Whether it has started."""
        return True

    def n_labels(self, path: str) -> int:
        """Number of labels in a file, matched or not."""
        assert self.labels.files is not None
        return self.labels.files.n_labels(path)

    def scan(self, chunk: Chunk) -> Scan:
        """Summarise the labels of a chunk."""
        labels = self._labels(chunk)
        value = labels.value.astype(np.float64) if labels.value.dtype.kind in "iufb" else np.zeros((0, 0))
        value = value[:, None] if value.ndim == 1 else value
        return Scan(
            n_instances=len(labels.labelled),
            n_labels=len(labels),
            n_total=labels.total,
            n_several=int((labels.labels_per_instance >= 2).sum()),
            named=labels.annotator is not None,
            annotator_names=labels.annotator_names,
            largest=np.abs(value).max(axis=0, initial=0),
        )

    def take(self, chunk: Chunk, places: Array, layout: Layout) -> Sample:
        """Some of a chunk's labelled instances, by their places among these."""
        labels = self._labels(chunk)
        rows = labels.labelled[places]
        predictions = chunk.read() if layout.views is None else chunk.read().select(layout.views)
        labels = labels.take(rows)
        if labels.annotator is not None and labels.annotator_names != layout.annotator_names:
            place = np.searchsorted(np.array(layout.annotator_names), np.array(labels.annotator_names))
            labels = replace(labels, annotator=place[labels.annotator], annotator_names=layout.annotator_names)
        return Sample(predictions.take(rows), labels)

    def hold(self, number: int, part: Part, layout: Layout) -> None:
        """Read a part of the data and keep it."""
        samples = [self.take(chunk, np.arange(start, stop), layout) for chunk, start, stop in part.slices]
        self.held[number] = _Held(part, joined(samples))

    def drop(self) -> None:
        """Forget all parts."""
        self.held.clear()

    def lay_out(self, number: int, layout: Layout, standard: Standard | None) -> tuple[Array, Array]:
        """Arrange a part as blocks; returns the widest range of its logits, and which views look like probabilities."""
        held = self.held[number]
        assert held.sample is not None
        predictions, labels = held.sample
        held.sample = None
        outputs, size = predictions.outputs, held.part.size
        rows = np.arange(len(predictions))
        variance = predictions.variance if layout.with_variance else None
        if standard is not None:
            annotator = np.zeros(len(labels), dtype=np.intp) if labels.annotator is None else labels.annotator
            value = labels.continuous(outputs.shape[2])
            held.blocks = lay_out(
                outputs, variance, rows, labels.instance, value, labels.count, annotator, standard, size
            )
            return np.zeros(outputs.shape[1]), np.zeros(outputs.shape[1], dtype=bool)
        position = labels.categorical(outputs.shape[2], predictions.classes)
        table = label_noise.label_table(labels, position, layout.noise)
        whole = categorical_block(outputs, variance, rows, table, layout.noise, classes_last=layout.classes_last)
        held.blocks = whole.split(size)
        return whole.spread(), probability_views(outputs)

    def nodes(self, numbers: Sequence[int], request: tuple[Callable[[Any], Any], int, str]) -> list[Node]:
        """Sums of a function over every n-th block of some parts, or over their labels."""
        function, every, of = request
        sums: list[Node] = []
        with np.errstate(all="ignore"):  # the driver checks the sums
            for number in numbers:
                part = self.held[number].part
                first = -(-part.first // every)
                chosen = self._items(number, of)[first * every - part.first :: every]
                sums += nodes(function, chosen, first)
        return sums

    def _items(self, number: int, of: str) -> Sequence[Any]:
        held = self.held[number]
        if of == "blocks":
            return held.blocks
        assert held.sample is not None
        predictions, labels = held.sample
        value = labels.continuous(predictions.outputs.shape[2])
        edges = np.searchsorted(labels.instance, np.arange(held.part.n_blocks + 1) * held.part.size).tolist()
        return [(value[start:stop], labels.count[start:stop]) for start, stop in pairwise(edges)]

    def _labels(self, chunk: Chunk) -> LabelSets:
        return self.labels.of(chunk.first, chunk.ids(), chunk.n_rows)


def joined(samples: list[Sample]) -> Sample:
    """Instances one after the other."""
    if len(samples) == 1:
        return samples[0]
    sets = [sample.labels for sample in samples]
    firsts = np.cumsum([0, *(labels.n_instances for labels in sets)])
    people = [labels.annotator for labels in sets if labels.annotator is not None]
    weights = [labels.instance_weights for labels in sets if labels.instance_weights is not None]
    together = replace(
        sets[0],
        instance=np.concatenate([labels.instance + first for labels, first in zip(sets, firsts, strict=False)]),
        value=np.concatenate([labels.value for labels in sets]),
        count=np.concatenate([labels.count for labels in sets]),
        annotator=np.concatenate(people) if people else None,
        n_instances=int(firsts[-1]),
        ids=None,
        instance_weights=np.concatenate(weights) if weights else None,
    )
    return Sample(samples[0].predictions.concat([sample.predictions for sample in samples[1:]]), together)
