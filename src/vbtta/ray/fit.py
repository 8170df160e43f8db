"""fit_policy on a cluster: the same options, the same policy; the data stay on the workers."""

__all__ = ["Calibration", "LabelReader", "RemoteViews", "fit_policy", "label_reader"]

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import require, whole_number
from vbtta.crossval import CrossValidated, cross_validate, sampled, split
from vbtta.data.files import Chunk, columns_of, footers, open_chunks, parquet_files
from vbtta.data.labels import ID_COLUMNS, Array, LabelSets, LongLabels, long_labels, look_up
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import Candidate, fit_sample, policy_of, quick_fit
from vbtta.inference.em import EM, Block, Node, block_size, fit_problem, join, nodes
from vbtta.models.base import Engine, InMemory, Model, Posterior, pose
from vbtta.models.parts import class_data, label_noise
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks
from vbtta.models.parts.gate import FeatureChoice, GateData
from vbtta.models.parts.standard import ContinuousBlocks, LabelMoments, Standard, label_moments, lay_out, standard_of
from vbtta.policy import Policy
from vbtta.ray.cluster import Tasks, answer, check_workers, connect

_LABEL_COLUMN = re.compile("instance|id|item|task|label(_.+)?|annotator|worker|count|instance_weight")
_LOOKED_AT = 4096  # labels, as in memory, whose residuals estimate a scale

ResultT = TypeVar("ResultT")
Sample = tuple[ViewPredictions, LabelSets]  # of some labelled instances, which count from 0


def fit_policy(
    dataset: Any,
    labels: LabelSets | ArrayLike | str | os.PathLike[str],
    *,
    task: str,
    model: Model | str = "auto",
    engine: EM | str = "auto",
    guard: bool | Literal["hard"] = True,
    seed: int = 0,
    progress: bool = False,
    workers: int | None = None,
    worker_options: dict[str, Any] | None = None,
    address: str | None = None,
    columns_are_annotators: bool = False,
) -> Policy:
    """Fit a policy to more data than one machine holds: :func:`vbtta.fit_policy` with the data spread over a cluster.

    Blocks of the data stay in the nodes' memory. In a step the state of the fit goes out and sums over blocks come
    back, a few kilobytes; they are added in an order that depends on the number of blocks alone, which makes the
    answer that of :func:`vbtta.fit_policy`, whatever the number of workers. What is lost with a node is read again on
    the others. Held-out scores, of the members of a stack and for the guard, are of 20,000 instances at most, here on
    the driver.

    Parameters
    ----------
    dataset : path or list of paths
        What :func:`vbtta.ray.collect_views` wrote: parquet files with the columns `instance`, `outputs` (K*C
        numbers) and, for heteroscedastic and probit models, `variance`. Paths must be the same on all nodes.
    labels : LabelSets, array or path
        Labels in memory, copied to every node once; or parquet files with `instance` and `label` (and
        `annotator`, `count`), or `instance`, `label_1`, `label_2`, ..., of which every worker reads its share.
    task, model, engine, guard, seed, progress
        As in :func:`vbtta.fit_policy`; the engine is EM, and the task regression or classification.
    workers, worker_options, address
        As in :func:`vbtta.ray.collect_views`.
    columns_are_annotators : bool
        Whether the numbered columns of wide label files are always the same people.

    Returns
    -------
    Policy
    """
    if task not in ("regression", "classification"):
        raise ValueError(f"task must be 'regression' or 'classification' on a cluster; got {task!r}")
    if isinstance(engine, str) and engine == "auto":
        engine = "em"
    if engine != "em" and not isinstance(engine, EM):
        raise ValueError(
            f"engine must be 'auto', 'em' or EM(...) on a cluster; got {engine!r}. ADVI runs in memory, with "
            "ADVI(batch_size=...) on a sample: vbtta.fit_policy"
        )
    if labels is None:
        raise ValueError("labels must be given on a cluster; without any, fit in memory: vbtta.fit_policy(..., None)")
    seed = whole_number("seed", seed, 0)
    workers, worker_options = check_workers(workers, worker_options)
    connect(address)
    reader = label_reader(labels, columns_are_annotators=columns_are_annotators)
    sample = Calibration(open_chunks(dataset), reader, task, Tasks(workers, worker_options))
    return fit_sample(sample, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


# -- the data on the workers ----------------------------------------------------------------------


@dataclass(frozen=True)
class LabelReader:
    """Labels in memory (copied to every node once) or in parquet files, of which each worker reads its share."""

    sets: LabelSets | None = None
    by_id: bool = False  # whether `sets` are paired by id
    paths: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # of the files
    columns_are_annotators: bool = False

    def of_chunk(self, chunk: Chunk) -> LabelSets:
        """The labels of a chunk's rows, which count from 0."""
        return self.of(chunk.first, chunk.ids(), chunk.n_rows)

    def of(self, first: int, ids: Array | None, n_rows: int) -> LabelSets:
        """The labels of rows `first` to `first + n_rows` of the data, whose instances then count from 0."""
        if self.sets is not None:
            rows = self.sets.instance - first
            unknown = (rows < 0) | (rows >= n_rows)
            if self.by_id and ids is not None:
                rows, unknown = self.sets.locate(ids)
            return self.sets.place(rows, n_rows, kept=np.flatnonzero(~unknown))
        if ids is None:
            raise ValueError("labels name instances, but the predictions have no column 'instance'; write one")
        arrow = require("pyarrow.compute", "ray")
        files = require("pyarrow.dataset", "ray").dataset(list(self.paths))
        key = next(name for name in ID_COLUMNS if name in self.columns)
        bounds = None  # the first and the last of the ids
        if len(ids) and (str(files.schema.field(key).type) in ("string", "large_string")) == (ids.dtype.kind in "US"):
            low, high = np.sort(ids)[[0, -1]].tolist()
            bounds = (arrow.field(key) >= low) & (arrow.field(key) <= high)
        table = self._long(files.to_table(columns=list(self.columns), filter=bounds), ", ".join(self.paths), 0)
        rows, unknown = look_up(table.instance, ids)
        columns = {name: getattr(table, name) for name in ("label", "annotator", "count", "weight")}
        known: dict[str, Any] = {name: None if column is None else column[~unknown] for name, column in columns.items()}
        return LabelSets.from_long(replace(table, instance=rows[~unknown], n_rows=n_rows, **known))

    def n_labels(self, path: str) -> int:
        """Number of labels in one of the files; raises where one lacks its instance, annotator or count."""
        total, first = 0, 0
        with require("pyarrow.parquet", "ray").ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(self.columns))
                labels = self._long(table, path, first)
                total += len(labels.label) if labels.count is None else int((labels.count > 0).sum())
                first += len(table)
        return total

    def _long(self, table: Any, where: str, first_row: int) -> LongLabels:
        options: dict[str, Any] = {"columns_are_annotators": self.columns_are_annotators, "first_row": first_row}
        return long_labels(columns_of(table), f"labels: {where}", **options)


def label_reader(
    labels: LabelSets | ArrayLike | str | os.PathLike[str], *, columns_are_annotators: bool = False
) -> LabelReader:
    """A reader of labels in memory, or of the parquet files at a path."""
    if not isinstance(labels, str | os.PathLike):
        return LabelReader(labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels))
    paths = parquet_files(labels, "labels")
    schemas = [footer.schema.to_arrow_schema().names for footer in footers(paths, "labels")]
    columns = [sorted(filter(_LABEL_COLUMN.fullmatch, names)) for names in schemas]
    for path, names, known in zip(paths, schemas, columns, strict=True):
        wide = any(name.startswith("label_") for name in known)
        if not set(known) & set(ID_COLUMNS) or ("label" in known) == wide:
            raise ValueError(
                f"labels: {path} must have the columns instance and label, or instance and label_1, label_2, ...; it "
                f"has {', '.join(names)}"
            )
        if known != columns[0]:
            first = f"{paths[0]} has {', '.join(columns[0])}"
            raise ValueError(f"labels: {path} has the columns {', '.join(known)}, but {first}; give all files the same")
    return LabelReader(None, False, tuple(paths), tuple(columns[0]), columns_are_annotators)


class Scan(NamedTuple):
    """Summary of the labels of a chunk."""

    n_instances: int  # with a label
    n_labels: int  # rows, counts not included
    n_total: float  # counts and weights included
    n_several: int  # instances with two labels or more
    named: bool  # whether annotators are
    annotator_names: tuple[str, ...]
    largest: Array  # (C,) of the labels' absolute values; empty unless they are numbers
    n_given: float  # labels, counts included
    values: frozenset[Any]  # different labels; empty unless they are classes


class Part(NamedTuple):
    """Consecutive blocks of instances with a label, and where they come from."""

    first: int  # block
    size: int  # instances of a block
    slices: tuple[tuple[Chunk, int, int], ...]  # labelled instances from .. to of each chunk


@dataclass(frozen=True)
class Layout:
    """How a model needs its blocks."""

    views: tuple[str, ...] | None  # a selection of them
    annotator_names: tuple[str, ...]
    with_variance: bool
    noise: str = "none"
    classes_last: bool = False


# -- tasks: they run on the workers ---------------------------------------------------------------


def scan(labels: LabelReader, chunk: Chunk) -> Scan:
    """Summarise the labels of a chunk."""
    sets = labels.of_chunk(chunk)
    value = sets.value.astype(np.float64) if sets.value.dtype.kind in "iufb" else np.zeros((0, 0))
    value = value[:, None] if value.ndim == 1 else value
    return Scan(
        n_instances=len(sets.labelled),
        n_labels=len(sets),
        n_total=sets.total,
        n_several=int((sets.labels_per_instance >= 2).sum()),
        named=sets.annotator is not None,
        annotator_names=sets.annotator_names,
        largest=np.abs(value).max(axis=0, initial=0),
        n_given=float(sets.labels_per_instance.sum()),
        values=frozenset() if sets.value.dtype.kind == "f" else frozenset(sets.value.ravel().tolist()),
    )


def take(labels: LabelReader, chunk: Chunk, places: Array, layout: Layout) -> Sample:
    """Some of a chunk's labelled instances, by their places among these."""
    sets = labels.of_chunk(chunk)
    rows = sets.labelled[places]
    predictions = chunk.read() if layout.views is None else chunk.read().select(layout.views)
    sets = sets.take(rows)
    if sets.annotator is not None and sets.annotator_names != layout.annotator_names:
        place = np.searchsorted(np.array(layout.annotator_names), np.array(sets.annotator_names))
        sets = replace(sets, annotator=place[sets.annotator], annotator_names=layout.annotator_names)
    return predictions.take(rows), sets


def read_part(labels: LabelReader, part: Part, layout: Layout) -> Sample:
    """The labelled instances of a part."""
    return joined([take(labels, chunk, np.arange(start, stop), layout) for chunk, start, stop in part.slices])


def label_blocks(part: Part, sample: Sample) -> list[tuple[Array, Array]]:
    """Labels and counts of every block of a part."""
    predictions, labels = sample
    value = labels.continuous(predictions.outputs.shape[2])
    edges = np.searchsorted(labels.instance, np.arange(0, len(predictions) + part.size, part.size)).tolist()
    return [(value[start:stop], labels.count[start:stop]) for start, stop in pairwise(edges)]


def continuous_blocks(part: Part, sample: Sample, layout: Layout, standard: Standard) -> list[Block]:
    """A part in standard units."""
    predictions, labels = sample
    outputs, variance = predictions.outputs, predictions.variance if layout.with_variance else None
    annotator = np.zeros(len(labels), dtype=np.intp) if labels.annotator is None else labels.annotator
    value, rows = labels.continuous(outputs.shape[2]), np.arange(len(predictions))
    return lay_out(outputs, variance, rows, labels.instance, value, labels.count, annotator, standard, part.size)


def class_block(part: Part, sample: Sample, layout: Layout) -> CategoricalBlock:
    """A part with its logits and classes."""
    predictions, labels = sample
    outputs, variance = predictions.outputs, predictions.variance if layout.with_variance else None
    position = labels.categorical(outputs.shape[2], predictions.classes)
    table = label_noise.label_table(labels, position, layout.noise)
    rows = np.arange(len(predictions))
    return class_data.categorical_block(outputs, variance, rows, table, layout.noise, classes_last=layout.classes_last)


def sums(part: Part, data: Any, request: tuple[Callable[[Any], Any], int]) -> list[Node]:
    """Sums of a function over every n-th block of a part."""
    function, every = request
    blocks = data.split(part.size) if isinstance(data, CategoricalBlock) else data
    first = -(-part.first // every)
    with np.errstate(all="ignore"):  # the driver checks the sums
        return nodes(function, blocks[first * every - part.first :: every], first)


def joined(samples: list[Sample]) -> Sample:
    """Instances one after the other."""
    if len(samples) == 1:
        return samples[0]
    parts, sets = zip(*samples, strict=True)
    firsts = np.cumsum([0, *(labels.n_instances for labels in sets)])
    fields: dict[str, Any] = {"n_instances": int(firsts[-1]), "ids": None}
    for name in ("value", "count", "annotator", "instance_weights"):
        present = [getattr(labels, name) for labels in sets if getattr(labels, name) is not None]
        fields[name] = np.concatenate(present) if present else None
    fields["instance"] = np.concatenate([labels.instance + n for labels, n in zip(sets, firsts, strict=False)])
    return parts[0].concat(parts[1:]), replace(sets[0], **fields)


# -- the driver: counts, and references to what the tasks made -------------------------------------


class Calibration:
    """Predictions and labels on a cluster as :func:`vbtta.fit.fit_sample` wants them, counted but not read."""

    maps = False  # not known here, where features are not computed either

    def __init__(self, chunks: list[Chunk], labels: LabelReader, task: str, tasks: Tasks) -> None:
        self.chunks, self.tasks = chunks, tasks
        self.views = chunks[0].empty  # names, outputs and classes; no rows
        self.names, self.n_outputs = self.views.names, self.views.outputs.shape[2]
        self.labels = self  # as far as their facts go
        if task == "classification":
            class_data.check_logits(self.views)
        if chunks[0].has_groups():
            warnings.warn(
                "predictions have groups: on a cluster weight intervals take rows for independent and are too short; "
                "fit a sample in memory with fit_policy for intervals",
                stacklevel=3,
            )
        sets = labels.sets
        if sets is not None:
            labels = replace(labels, by_id=sets.pairs_by_id(chunks[0].ids()))
            n_rows = sum(chunk.n_rows for chunk in chunks)
            if not labels.by_id and not sets.open_ended and sets.n_instances != n_rows:
                raise ValueError(
                    f"labels are for {sets.n_instances} instances but the dataset has {n_rows}; they are paired by row"
                )
        self._reader = connect().put(labels)
        n_files = sum(tasks.results(LabelReader.n_labels, [(self._reader, path) for path in labels.paths]))
        scans: list[Scan] = tasks.results(scan, [(self._reader, chunk) for chunk in chunks])
        self._edges = np.cumsum([0, *(scan.n_instances for scan in scans)])  # labelled instances before each chunk
        self.n_units = self.n_instances = int(self._edges[-1])  # N+
        self.n_rows = sum(scan.n_labels for scan in scans)  # labels without their counts
        self.total = float(sum(scan.n_total for scan in scans))  # J
        n_given = n_files if sets is None else len(sets)
        if not self.n_instances:
            raise ValueError("labels are empty, or none names an instance of the dataset: at least one needs a label")
        if n_given > self.n_rows:
            raise ValueError(
                f"labels: {n_given - self.n_rows:,} of {n_given:,} name an instance that the dataset does not have; "
                "leave them out, or add the instances"
            )
        if n_given < self.n_rows:
            raise ValueError(f"dataset: {self.n_rows - n_given:,} labels would count twice; number the instances anew")
        names = sorted({name for scan in scans for name in scan.annotator_names})
        self.named = any(scan.named for scan in scans)
        self.annotator_names = tuple(names) if sets is None else sets.annotator_names
        several = sum(scan.n_several for scan in scans)
        self.overlap = several >= max(1, min(20, 0.1 * self.n_instances))
        values = frozenset().union(*(scan.values for scan in scans))
        self.labels_per_value = sum(scan.n_given for scan in scans) / max(1, len(values))
        shapes = [scan.largest for scan in scans if len(scan.largest)]
        self.largest = np.max(shapes, axis=0) if shapes else np.zeros(0)
        self._samples: dict[int, Sample] = {}  # by seed

    def source(self, *, alone: bool) -> "RemoteViews":
        """All views, or the identity alone, where they are."""
        return RemoteViews(self, ("identity",) if alone else None)

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        """Features are kept in one process."""
        return False

    def fit(self, candidate: Candidate, engine: Engine, *, seed: int, progress: bool) -> Policy:
        """The policy of a candidate; the data stay where they are."""
        assert isinstance(engine, EM)
        model, start, alone, _, weights = candidate
        views = self.views.select(["identity"]) if alone else self.views
        fit = fit_problem(*pose(model, self.source(alone=alone), start), engine, weights=weights)
        return policy_of(fit, model, engine, views, self.annotator_names)

    def scores(
        self, candidates: Sequence[Candidate], engine: Engine, *, seed: int, progress: bool, n_folds: int | None = None
    ) -> list[CrossValidated]:
        """Held-out log scores of a sample, which is brought here once a seed."""
        order = sampled(self.n_units, seed, len(self.names) * self.n_outputs)
        places = np.sort(order)
        if seed not in self._samples:
            self._samples[seed] = self.take(places, Layout(None, self.annotator_names, with_variance=True))
        sample = InMemory(*self._samples[seed])
        folds = split(np.searchsorted(places, order), sample.predictions.groups)[:n_folds]
        fits = [partial(quick_fit, candidate, engine, seed) for candidate in candidates]
        return cross_validate(fits, sample, folds, progress=progress)

    def take(self, places: Array, layout: Layout) -> Sample:
        """Some labelled instances, in ascending order, brought here."""
        chunk = np.searchsorted(self._edges, places, side="right") - 1
        calls = [
            (self._reader, self.chunks[number], places[chunk == number] - self._edges[number], layout)
            for number in np.unique(chunk).tolist()
        ]
        return joined(self.tasks.results(take, calls))

    def read(self, size: int, layout: Layout) -> "Parts":
        """All labelled instances, a part of whole blocks for every worker."""
        n_blocks = -(-self.n_instances // size)
        edges = np.linspace(0, n_blocks, min(n_blocks, self.tasks.n_workers) + 1).astype(int).tolist()
        parts = []
        for first, last in pairwise(edges):
            starts = np.maximum(first * size - self._edges[:-1], 0).tolist()
            stops = np.minimum(last * size - self._edges[:-1], np.diff(self._edges)).tolist()
            slices = zip(self.chunks, starts, stops, strict=True)
            parts.append(Part(first, size, tuple(each for each in slices if each[1] < each[2])))
        calls = [(self._reader, part, layout) for part in parts]
        return Parts(self.tasks, parts, self.tasks.start(read_part, calls, scheduling_strategy="SPREAD"))


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of the data, as tasks left them on the nodes."""

    tasks: Tasks
    parts: list[Part]
    data: list[Any]  # references

    def map(self, function: Callable[..., Any], *arguments: Any) -> "Parts":
        """What a function makes of every part."""
        calls = [(part, data, *arguments) for part, data in zip(self.parts, self.data, strict=True)]
        return replace(self, data=self.tasks.start(function, calls))

    def sum(self, function: Callable[[Any], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        request = connect().put((function, every))
        nodes_of_parts: list[list[Node]] = answer(self.map(sums, request).data)
        result: ResultT = join(node for part_nodes in nodes_of_parts for node in part_nodes)
        return result


class RemoteViews:
    """Some views, or all, of predictions on a cluster: a :class:`vbtta.models.base.Source`."""

    def __init__(self, home: Calibration, names: tuple[str, ...] | None) -> None:
        self.home, self.names = home, names
        self.has_variance, self.named = home.views.variance is not None, home.named

    def continuous(self, *, with_variance: bool) -> "RemoteContinuous":
        """Labelled instances in standard units, in blocks on the workers."""
        home, n_views = self.home, len(self.names or self.home.views.names)
        layout = Layout(self.names, home.annotator_names, with_variance)
        if len(home.largest) != home.n_outputs:
            home.take(np.arange(1), layout)[1].continuous(home.n_outputs)  # says what is wrong with the labels
            raise ValueError("labels must be numbers in a regression")
        samples = home.read(block_size(n_views, home.n_rows, home.n_instances), layout)
        labels = samples.map(label_blocks)

        def moments(centre: Array) -> LabelMoments:
            return labels.sum(lambda block: label_moments(block[0], block[1], centre))

        def some() -> tuple[Array, Array]:
            predictions, labels = home.take(np.arange(min(home.n_instances, _LOOKED_AT)), layout)
            value = labels.continuous(home.n_outputs)[:_LOOKED_AT]
            return value, predictions.outputs[labels.instance[:_LOOKED_AT]]

        standard = standard_of(moments, home.largest, some)
        return RemoteContinuous(
            standard, n_views, home.n_outputs, home.total, home.n_instances, max(1, len(home.annotator_names)),
            with_variance, samples.map(continuous_blocks, layout, standard), home.n_rows,
        )  # fmt: skip

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Features are kept in one process."""
        raise ValueError("weights='input' needs all predictions in memory; fit_policy takes a sample of the rows")

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> "RemoteCategorical":
        """Labelled instances with their logits and classes, in blocks on the workers."""
        home, names = self.home, self.names or self.home.views.names
        people = len(home.annotator_names) if home.named and noise in ("annotator", "confusion") else 1
        layout = Layout(self.names, home.annotator_names, with_variance and self.has_variance, noise, classes_last)
        size = class_data.block_rows(len(names), home.n_outputs, label_noise.n_entries(noise, home.n_outputs, people))
        parts = home.read(size, layout).map(class_block, layout)
        ranges = parts.map(lambda _, block: (block.ranges.max(axis=0), class_data.probability_views(block.mean)))
        widest, suspects = zip(*answer(ranges.data), strict=True)
        class_data.refuse_suspects(names, np.min(suspects, axis=0))
        return RemoteCategorical(
            len(names), home.n_outputs, home.n_instances, home.total, home.n_rows, people,
            np.max(widest, axis=0), parts, home, layout,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RemoteContinuous(ContinuousBlocks):
    """Blocks of labelled instances in standard units, on workers."""

    parts: Parts
    n_rows: int  # labels without their counts
    every: int = 1

    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, in an order that depends on their number alone."""
        return self.parts.sum(function, self.every)

    def some(self, most: int) -> "RemoteContinuous":
        """Every n-th block, so that about `most` labels remain."""
        fewer = replace(self, every=max(1, self.n_rows // most))
        return replace(fewer, n_labels=fewer.total(lambda block: float(block.repeats.sum())))


@dataclass(frozen=True, eq=False)
class RemoteCategorical(CategoricalBlocks):
    """Blocks of labelled instances' logits, on workers."""

    parts: Parts
    home: Calibration
    layout: Layout

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        return self.parts.sum(function, every)

    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""
        return self.home.take(np.arange(self.n_instances) if places is None else places, self.layout)
