"""What one worker of a fit does: it holds some of the blocks, and adds up statistics over them."""

__all__ = ["Layout", "Part", "Scan", "Taken", "Worker", "joined"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.blocks import Node, nodes
from vbtta.infer.categorical_data import categorical_block, probability_views
from vbtta.infer.standard import Standard, lay_out
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.scale.label_tables import LabelReader
from vbtta.scale.tables import Source


class Scan(NamedTuple):
    """What the labels of a source are like."""

    n_instances: int  # with a label
    n_labels: int  # rows, counts not included
    n_total: float  # counts included
    n_several: int  # instances with two labels or more
    named: bool  # whether annotators are
    annotator_names: tuple[str, ...]
    largest: Array  # (C,) of the labels' absolute values; empty unless they are numbers


class Part(NamedTuple):
    """Consecutive blocks of instances with a label, and where they come from."""

    first: int  # block
    n_blocks: int
    size: int  # instances of a block
    slices: tuple[tuple[Source, int, int], ...]  # labelled instances from .. to of each source


@dataclass(frozen=True)
class Layout:
    """How a model wants its blocks."""

    task: str
    views: tuple[str, ...] | None  # some of them
    annotator_names: tuple[str, ...]
    with_variance: bool
    noise: str = "none"
    classes_last: bool = False


class Taken(NamedTuple):
    """Labelled instances, raw: predictions and labels whose instances count from 0."""

    predictions: ViewPredictions
    labels: LabelSets


@dataclass
class _Held:
    part: Part
    taken: Taken | None  # until it is laid out
    blocks: Sequence[Any] = ()
    looks: tuple[Array, Array] | None = None


class Worker:
    """Holds parts of the data; every answer is small.

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

    def n_given(self) -> int:
        """Labels in all, matched or not."""
        return self.labels.n_given()

    def scan(self, source: Source) -> Scan:
        """Look at the labels of a source."""
        labels = self._labels(source)
        size = np.bincount(labels.instance, labels.count, source.n_rows)
        value = labels.value.astype(np.float64) if labels.value.dtype.kind in "iufb" else np.zeros((0, 0))
        value = value[:, None] if value.ndim == 1 else value
        return Scan(
            n_instances=len(labels.labelled),
            n_labels=len(labels),
            n_total=labels.total,
            n_several=int((size >= 2).sum()),
            named=labels.annotator is not None,
            annotator_names=labels.annotator_names,
            largest=np.abs(value).max(axis=0, initial=0),
        )

    def take(self, source: Source, places: Array, layout: Layout) -> Taken:
        """Some of a source's labelled instances."""
        labels = self._labels(source)
        rows = labels.labelled[places]
        predictions = source.read() if layout.views is None else source.read().select(layout.views)
        return Taken(predictions.take(rows), _renamed(labels.take(rows), layout.annotator_names))

    def hold(self, number: int, part: Part, layout: Layout) -> None:
        """Read a part of the data and keep it."""
        found = [self.take(source, np.arange(start, stop), layout) for source, start, stop in part.slices]
        self.held[number] = _Held(part, joined(found))

    def drop(self) -> None:
        """Forget all parts."""
        self.held.clear()

    def lay_out(self, number: int, layout: Layout, standard: Standard | None) -> tuple[Array, Array]:
        """Arrange a part as blocks; the widest range of its logits, and which views look like probabilities."""
        held = self.held[number]
        if held.taken is None and held.looks is not None:
            return held.looks
        assert held.taken is not None
        predictions, labels = held.taken
        mean, size = predictions.mean, held.part.size
        rows = np.arange(len(predictions))
        variance = predictions.variance if layout.with_variance else None
        held.looks = np.zeros(mean.shape[1]), np.zeros(mean.shape[1], dtype=bool)
        if standard is not None:
            annotator = np.zeros(len(labels), dtype=np.intp) if labels.annotator is None else labels.annotator
            value = labels.continuous(mean.shape[2])
            held.blocks = lay_out(mean, variance, rows, labels.instance, value, labels.count, annotator, standard, size)
            held.taken = None
            return held.looks
        position = labels.categorical(mean.shape[2], predictions.classes)
        table = label_noise.label_table(labels, position, layout.noise)
        whole = categorical_block(mean, variance, rows, table, layout.noise, classes_last=layout.classes_last)
        held.blocks = whole.split(size)
        held.taken, held.looks = None, (whole.spread(), probability_views(mean))
        return held.looks

    def nodes(self, numbers: Sequence[int], what: tuple[Callable[[Any], Any], int, str]) -> list[Node]:
        """Sums of a function over every n-th block of some parts, or over their labels."""
        function, every, of = what
        found: list[Node] = []
        with np.errstate(all="ignore"):  # the driver looks at the sums
            for number in numbers:
                part = self.held[number].part
                first = -(-part.first // every)
                chosen = self._items(number, of)[first * every - part.first :: every]
                found += nodes(function, chosen, first)
        return found

    def _items(self, number: int, of: str) -> Sequence[Any]:
        held = self.held[number]
        if of == "blocks":
            return held.blocks
        assert held.taken is not None
        labels, size = held.taken.labels, held.part.size
        value = labels.continuous(held.taken.predictions.mean.shape[2])
        edges = np.searchsorted(labels.instance, np.arange(held.part.n_blocks + 1) * size).tolist()
        return [(value[start:stop], labels.count[start:stop]) for start, stop in pairwise(edges)]

    def _labels(self, source: Source) -> LabelSets:
        return self.labels.of(source.first, source.ids(), source.n_rows)


def _renamed(labels: LabelSets, names: tuple[str, ...]) -> LabelSets:
    """The same labels with annotators numbered as in the whole data set."""
    if labels.annotator is None or labels.annotator_names == names:
        return labels
    place = np.searchsorted(np.array(names), np.array(labels.annotator_names))
    return replace(labels, annotator=place[labels.annotator], annotator_names=names)


def joined(found: list[Taken]) -> Taken:
    """Instances one after the other."""
    if len(found) == 1:
        return found[0]
    predictions = found[0].predictions.concat([one.predictions for one in found[1:]])
    firsts = np.cumsum([0, *(one.labels.n_instances for one in found)])
    sets = [one.labels for one in found]
    people = [one.annotator for one in sets if one.annotator is not None]
    labels = replace(
        sets[0],
        instance=np.concatenate([one.instance + first for one, first in zip(sets, firsts, strict=False)]),
        value=np.concatenate([one.value for one in sets]),
        count=np.concatenate([one.count for one in sets]),
        annotator=np.concatenate(people) if people else None,
        n_instances=int(firsts[-1]),
        ids=None,
    )
    return Taken(predictions, labels)
