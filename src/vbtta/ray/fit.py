"""fit_policy on a cluster: the same options, the same policy; the data stay on the workers."""

__all__ = ["Calibration", "LabelReader", "RemoteViews", "fit_policy", "label_reader"]

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta.crossval import CrossValidated, cross_validate, sampled, split
from vbtta.data.files import Chunk, LabelFiles, open_chunks, parquet_files, views_of_schema
from vbtta.data.labels import Array, LabelSets, look_up
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_sample, policy_of, quick_fit
from vbtta.inference.blocks import Block, Node, block_size, join, nodes
from vbtta.inference.em import EM, fit_problem
from vbtta.models.base import Engine, Model, Posterior, pose
from vbtta.models.parts import label_noise
from vbtta.models.parts.class_data import (
    CategoricalBlock,
    CategoricalBlocks,
    block_rows,
    categorical_block,
    check_logits,
    probability_views,
    refuse_suspects,
)  # fmt: skip
from vbtta.models.parts.gate import FeatureChoice, GateData
from vbtta.models.parts.standard import ContinuousBlocks, LabelMoments, Standard, label_moments, lay_out, standard_of
from vbtta.policy import Policy
from vbtta.ray.cluster import Fleet, check_workers, connect

_PARTS = 4  # a worker: what a lost one held is shared out among the others
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
    names: Sequence[str] | None = None,
    workers: int | None = None,
    worker_options: dict[str, Any] | None = None,
    address: str | None = None,
    columns_are_annotators: bool = False,
) -> Policy:
    """Fit a policy to more data than one machine holds: :func:`vbtta.fit_policy` with the data spread over a cluster.

    Every worker keeps its blocks in memory. In a step the state of the fit goes out and sums over blocks come
    back, a few kilobytes; they are added in an order that depends on the number of blocks alone, which makes the
    answer that of :func:`vbtta.fit_policy`, whatever the number of workers. The parts of a worker that is
    lost go to the others. Held-out scores, of the members of a stack and for the guard, are of 20,000 instances at
    most, here on the driver.

    Parameters
    ----------
    dataset : path, list of paths, or ray.data.Dataset
        What :func:`vbtta.ray.collect_views` wrote: parquet files with the columns `instance`, `outputs` (K*C
        numbers) and, for heteroscedastic and probit models, `variance`; or an `.npz` file of
        :meth:`ViewPredictions.save`. Paths must be the same on all nodes.
    labels : LabelSets, array or path
        Labels in memory, copied to every node once; or parquet files with `instance` and `label` (and
        `annotator`, `count`), or `instance`, `label_1`, `label_2`, ..., of which every worker reads its share.
    task, model, engine, guard, seed, progress
        As in :func:`vbtta.fit_policy`; the engine is EM, and the task regression or classification.
    names : K strings, optional
        Names of the views, where the data set does not say.
    workers : int, optional
        How many; by default one a core of the cluster.
    worker_options : dict, optional
        What every worker needs, as `ray.remote` takes it, for instance ``{"memory": 8 << 30}``.
    address : str, optional
        Of the cluster, as `ray.init` takes it; by default the one Ray is connected to, or this machine.
    columns_are_annotators : bool
        Whether the numbered columns of wide label files are always the same people.

    Returns
    -------
    Policy

    Examples
    --------
    The page "A cluster" (docs/cluster.md) fits weights to predictions that it collects, with labels in a parquet file.
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
    chunks = _ray_chunks(dataset, names) if hasattr(dataset, "to_arrow_refs") else open_chunks(dataset, names)
    with Calibration(chunks, reader, task, workers, worker_options) as calibration:
        return fit_sample(calibration, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


def _ray_chunks(dataset: Any, names: Sequence[str] | None) -> list[Chunk]:
    """Blocks of a Ray data set, which is computed once and kept in the object store."""
    ray = connect()
    refs = dataset.materialize().to_arrow_refs()
    describe = ray.remote(num_cpus=0)(lambda table: (table.num_rows, table.schema))
    blocks = [(ref, *block) for ref, block in zip(refs, ray.get([describe.remote(ref) for ref in refs]), strict=True)]
    blocks = [block for block in blocks if block[1]]
    if not blocks:
        raise ValueError("dataset: the Ray data set holds no rows")
    views = views_of_schema(blocks[0][2], names, "the Ray data set")
    firsts = np.cumsum([0, *(n_rows for _, n_rows, _ in blocks)]).tolist()
    return [Chunk("block", ref, 0, first, n, views) for (ref, n, _), first in zip(blocks, firsts[:-1], strict=True)]


# -- the data on the workers ----------------------------------------------------------------------


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

        columns = {name: getattr(table, name) for name in ("label", "annotator", "count", "weight")}
        known: dict[str, Any] = {name: None if column is None else column[~unknown] for name, column in columns.items()}
        return LabelSets.from_long(replace(table, instance=rows[~unknown], n_rows=n_rows, **known))


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
    n_given: float  # labels, counts included
    values: frozenset[Any]  # different labels; empty unless they are classes


class Part(NamedTuple):
    """Consecutive blocks of instances with a label, and where they come from."""

    first: int  # block
    n_blocks: int
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


@dataclass
class _Held:
    part: Part
    sample: Sample | None  # until it is laid out
    blocks: Sequence[Any] = ()


class Worker:
    """Holds parts of the data; its answers are small."""

    def __init__(self, labels: LabelReader) -> None:
        self.labels = labels
        self.plan, self.held = -1, dict[int, _Held]()

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
            n_given=float(labels.labels_per_instance.sum()),
            values=frozenset() if labels.value.dtype.kind == "f" else frozenset(labels.value.ravel().tolist()),
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
        return predictions.take(rows), labels

    def hold(self, numbers: Sequence[int], request: tuple[int, Sequence[Part], Layout]) -> list[None]:
        """Read some parts of the data and keep them; parts of another plan are dropped."""
        plan, parts, layout = request
        if plan != self.plan:
            self.plan, self.held = plan, {}
        for number in numbers:
            samples = [self.take(chunk, np.arange(start, stop), layout) for chunk, start, stop in parts[number].slices]
            self.held[number] = _Held(parts[number], joined(samples))
        return [None] * len(numbers)

    def lay_out(self, numbers: Sequence[int], request: tuple[Layout, Standard | None]) -> list[tuple[Array, Array]]:
        """Arrange parts as blocks; the widest range of their logits, and which views look like probabilities."""
        return [self._lay_out(self.held[number], *request) for number in numbers]

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

    def _lay_out(self, held: _Held, layout: Layout, standard: Standard | None) -> tuple[Array, Array]:
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
        return whole.ranges.max(axis=0), probability_views(outputs)

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
    parts, sets = zip(*samples, strict=True)
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
    return parts[0].concat(parts[1:]), together


# -- the data on the driver: counts, and sums over blocks that workers hold -------------------------


class Calibration:
    """Predictions and labels on a cluster as :func:`vbtta.fit.fit_sample` wants them, counted but not read.

    Workers are stopped at the end of a `with` block.
    """

    def __init__(
        self, chunks: list[Chunk], labels: LabelReader, task: str, n_workers: int | None, options: dict[str, Any]
    ) -> None:
        self.chunks = chunks
        self.views = chunks[0].empty  # names, outputs and classes; no rows
        self.n_outputs = self.views.outputs.shape[2]
        if task == "classification":
            check_logits(self.views)
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
        cores = int(connect().cluster_resources().get("CPU", 0))
        if n_workers is not None and not 1 <= n_workers <= cores:
            raise ValueError(
                f"workers must be between 1 and the {cores} cores of the cluster; got {n_workers}. Add nodes, or leave "
                "it out for one worker a core"
            )
        self.fleet = Fleet(Worker, (labels,), n_workers or cores, options)
        try:
            self.fleet.wait()
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
        values = frozenset().union(*(scan.values for scan in scans))
        self.labels_per_value = sum(scan.n_given for scan in scans) / max(1, len(values))
        shapes = [scan.largest for scan in scans if len(scan.largest)]
        self.largest = np.max(shapes, axis=0) if shapes else np.zeros(0)
        self._plans = count()  # numbers of distributions of the data
        self._samples: dict[int, Sample] = {}  # by seed
        self._edges = np.cumsum([0, *(scan.n_instances for scan in scans)])  # labelled instances before each chunk

    def __enter__(self) -> "Calibration":
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.close()

    @property
    def labels(self) -> "Calibration":
        """What is known of the labels: this."""
        return self

    @property
    def n_units(self) -> int:
        """N+."""
        return self.n_instances

    @property
    def names(self) -> tuple[str, ...]:
        """Of the views."""
        return self.views.names

    @property
    def maps(self) -> bool:
        """Not known here, where features are not computed either."""
        return False

    def settle(self, model: Model, start: Posterior | None, *, alone: bool) -> tuple[Model, Posterior | None]:
        """Options that the data decide are decided where they are."""
        return model.settle(RemoteViews(self, ("identity",) if alone else None), start)

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        """Features are kept in one process."""
        return False

    def fit(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int, progress: bool
    ) -> Policy:
        """One resolved model; the data stay where they are."""
        assert isinstance(engine, EM)
        views = self.views.select(["identity"]) if alone else self.views
        fit = fit_problem(*pose(model, RemoteViews(self, ("identity",) if alone else None), start), engine)
        return policy_of(fit, model, engine, views, self.annotator_names)

    def scores(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int
    ) -> CrossValidated:
        """Held-out log scores of a sample, which is brought here once a seed."""
        order = sampled(self.n_units, seed, len(self.names) * self.n_outputs)
        places = np.sort(order)
        if seed not in self._samples:
            layout = Layout(None, self.annotator_names, with_variance=True)
            self._samples[seed] = self.take(places, layout)
        predictions, labels = self._samples[seed]
        folds = split(np.searchsorted(places, order), predictions.groups)
        views = predictions.select(["identity"]) if alone else predictions
        return cross_validate(quick_fit(model, engine, seed, start), views, labels, folds)

    def take(self, places: Array, layout: Layout) -> Sample:
        """Some labelled instances, in ascending order, brought here."""
        chunk = np.searchsorted(self._edges, places, side="right") - 1
        calls = [
            ("take", (self.chunks[number], places[chunk == number] - self._edges[number], layout))
            for number in np.unique(chunk).tolist()
        ]
        return joined(self.fleet.anywhere(calls))

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
        parts = [
            Part(first, last - first, size, self._slices(first * size, min(last * size, self.n_instances)))
            for first, last in pairwise(edges)
        ]
        self.fleet.share_out(n_parts)
        self.fleet.over_parts("hold", (next(self._plans), parts, layout), lasting=True)

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
        layout = Layout(self.names, home.annotator_names, with_variance)
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
        home.fleet.over_parts("lay_out", (layout, standard), lasting=True)
        return RemoteContinuous(
            standard, n_views, home.n_outputs, home.total, home.n_instances,
            max(1, len(home.annotator_names)), with_variance, home,
        )  # fmt: skip

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Features are kept in one process."""
        raise ValueError("weights='input' needs all predictions in memory; fit_policy takes a sample of the rows")

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> "RemoteCategorical":
        """Labelled instances with their logits and classes, in blocks on the workers."""
        home, names = self.home, self.names or self.home.views.names
        people = len(home.annotator_names) if home.named and noise in ("annotator", "confusion") else 1
        variance = with_variance and self.has_variance
        layout = Layout(self.names, home.annotator_names, variance, noise, classes_last)
        size = block_rows(len(names), home.n_outputs, label_noise.n_entries(noise, home.n_outputs, people))
        home.distribute(size, layout)
        summaries = home.fleet.over_parts("lay_out", (layout, None), lasting=True)
        refuse_suspects(names, np.min([suspects for _, suspects in summaries], axis=0))
        return RemoteCategorical(
            len(names), home.n_outputs, home.n_instances, home.total, home.n_rows, people,
            np.max([spread for spread, _ in summaries], axis=0), home, layout,
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
