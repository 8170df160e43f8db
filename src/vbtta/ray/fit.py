"""fit_policy on a cluster: the same options, the same policy; predictions stay on the workers."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta.crossval import CrossValidated, cross_validate, sampled, split
from vbtta.data.files import Chunk, open_chunks, read_labels
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import Candidate, fit_sample, policy_of, quick_fit
from vbtta.inference.em import EM, Block, Node, block_size, fit_problem, join, nodes
from vbtta.models.base import Engine, InMemory, Model, Posterior, pose
from vbtta.models.parts import class_data, label_noise
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks
from vbtta.models.parts.gate import FeatureChoice, GateData
from vbtta.models.parts.standard import MAX_SAMPLE, ContinuousBlocks, Standard, lay_out, standard_of
from vbtta.policy import Policy
from vbtta.ray.cluster import Tasks, check_workers, connect

ResultT = TypeVar("ResultT")
Slices = list[tuple[Chunk, Array]]  # rows of chunks


def fit_policy(
    dataset: Any, labels: LabelSets | ArrayLike | str | os.PathLike[str], *, task: str, model: Model | str = "auto",
    engine: EM | str = "auto", guard: bool | Literal["hard"] = True, seed: int = 0, progress: bool = False,
    workers: int | None = None, worker_options: dict[str, Any] | None = None, address: str | None = None,
) -> Policy:  # fmt: skip
    """Fit a policy to more data than one machine holds: :func:`vbtta.fit_policy` with the data spread over a cluster.

    The result is that of :func:`vbtta.fit_policy`, for any number of workers, and also when nodes are lost. The driver
    holds labels and ids, and computes held-out scores of at most 20,000 instances.

    Parameters
    ----------
    dataset : path or list of paths
        What :func:`vbtta.ray.collect_views` wrote: parquet files with the columns `instance`, `outputs` (K*C
        numbers) and, for heteroscedastic and probit models, `variance`. Paths must be the same on all nodes.
    labels : LabelSets, array or path
        Labels in memory, or a CSV or parquet file, as :meth:`LabelSets.load` reads it.
    task, model, engine, guard, seed, progress
        As in :func:`vbtta.fit_policy`; the engine is EM, and the task regression or classification.
    workers, worker_options, address
        As in :func:`vbtta.ray.collect_views`.
    """
    if task not in ("regression", "classification"):
        raise ValueError(f"task must be 'regression' or 'classification' on a cluster; got {task!r}")
    if engine not in ("auto", "em") and not isinstance(engine, EM):
        remedy = "ADVI runs in memory, on a sample: vbtta.fit_policy"
        raise ValueError(f"engine must be 'auto', 'em' or EM(...) on a cluster; got {engine!r}. {remedy}")
    if labels is None:
        raise ValueError("labels must be given on a cluster; without any, fit in memory: vbtta.fit_policy(..., None)")
    seed = whole_number("seed", seed, 0)
    workers, worker_options = check_workers(workers, worker_options)
    connect(address)
    chunks = open_chunks(dataset)
    if isinstance(labels, str | os.PathLike):
        labels = read_labels(labels)
    sample = Calibration.of(chunks, labels, task, Tasks(workers, worker_options))
    engine = "em" if engine == "auto" else engine
    return fit_sample(sample, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


# -- tasks: they run on the workers ---------------------------------------------------------------


def read_rows(slices: Slices, names: tuple[str, ...]) -> ViewPredictions:
    """Read some rows of chunks, with the named views only."""
    first, *others = [chunk.read().select(names).take(rows) for chunk, rows in slices]
    return first.concat(others) if others else first


def continuous_part(
    slices: Slices, names: tuple[str, ...], labels: LabelSets, size: int, standard: Standard, with_variance: bool
) -> list[Block]:
    """Labelled instances in standard units, in blocks."""
    return list(lay_out(read_rows(slices, names), labels, standard, size, with_variance))


def categorical_part(
    slices: Slices, names: tuple[str, ...], labels: LabelSets, layout: dict[str, Any]
) -> CategoricalBlock:
    """Labelled instances with their logits and classes; rows count as independent."""
    return replace(class_data.categorical_data(read_rows(slices, names), labels, **layout).whole, group=None)


def sums(data: Any, first: int, size: int, function: Callable[[Any], Any], every: int) -> list[Node]:
    """Sums of a function over every n-th block of a part, whose first block has the number `first`."""
    blocks = data.split(size) if isinstance(data, CategoricalBlock) else data
    place = -(-first // every)
    with np.errstate(all="ignore"):  # the driver checks the sums
        return nodes(function, blocks[place * every - first :: every], place)


# -- the driver: labels, and references to the results of tasks ------------------------------------


@dataclass(frozen=True, eq=False)
class Parts:
    """Consecutive blocks of labelled instances, as tasks left them on the nodes."""

    tasks: Tasks
    size: int  # instances of a block
    firsts: list[int]  # blocks before each part
    data: list[Any]  # references

    def sum(self, function: Callable[[Any], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        sent = connect().put(function)
        calls = [(data, first, self.size, sent, every) for data, first in zip(self.data, self.firsts, strict=True)]
        parts: list[list[Node]] = self.tasks.results(sums, calls)
        result: ResultT = join(node for part in parts for node in part)
        return result


@dataclass(frozen=True, eq=False)
class Calibration:
    """A :class:`vbtta.fit.Sample` and its :class:`vbtta.models.base.Source`; workers read the predictions, in parts."""

    chunks: list[Chunk]
    labels: LabelSets  # aligned with the rows of all chunks
    rows: Array  # of the labelled instances, ascending
    n_units: int  # number of labelled instances
    named: bool  # whether labels name their annotators
    views: ViewPredictions  # an empty one: the names and shapes of the views that are read
    tasks: Tasks
    _samples: dict[int, InMemory] = field(default_factory=dict)  # by seed
    maps = False  # not known here, where features are not computed either

    @classmethod
    def of(cls, chunks: list[Chunk], labels: Any, task: str, tasks: Tasks) -> "Calibration":
        """Pair chunks of predictions and labels."""
        if task == "classification":
            class_data.check_logits(chunks[0].empty)
        if chunks[0].table(("group",)).column_names:
            problem = "predictions have groups: on a cluster weight intervals do not allow for them and are too short"
            warnings.warn(f"{problem}; fit a sample in memory with fit_policy for intervals", stacklevel=3)
        ids = tasks.results(Chunk.ids, [(chunk,) for chunk in chunks])
        rows = np.zeros((sum(chunk.n_rows for chunk in chunks), 1, 1), dtype=np.float32)
        aligned = ViewPredictions(rows, ids=None if ids[0] is None else np.concatenate(ids)).align(labels)
        if not len(aligned):
            raise ValueError("labels are empty: at least one instance needs a label")
        rows, named = aligned.labelled, aligned.annotator is not None
        return cls(chunks, aligned, rows, len(rows), named, chunks[0].empty, tasks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the views."""
        return self.views.names

    @property
    def has_variance(self) -> bool:
        """Whether predictions have variances over draws."""
        return self.views.variance is not None

    def source(self, *, alone: bool) -> "Calibration":
        """All views, or the identity alone."""
        return replace(self, views=self.views.select(["identity"])) if alone else self

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        """False: a gate needs its features in one process."""
        return False

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Refused: a gate needs its features in one process."""
        raise ValueError("weights='input' needs all predictions in memory; fit_policy takes a sample of the rows")

    def fit(self, candidate: Candidate, engine: Engine, *, seed: int, progress: bool) -> Policy:
        """The policy of a candidate; the data stay where they are."""
        assert isinstance(engine, EM)
        model, source = candidate.model, self.source(alone=candidate.alone)
        fit = fit_problem(*pose(model, source, candidate.start), engine, weights=candidate.weights)
        return policy_of(fit, model, engine, source.views, self.labels.annotator_names)

    def scores(
        self, candidates: Sequence[Candidate], engine: Engine, *, seed: int, progress: bool, n_folds: int | None = None
    ) -> list[CrossValidated]:
        """Held-out log scores of a sample, which the driver reads once for every seed."""
        order = sampled(self.n_units, seed, int(np.prod(self.views.outputs.shape[1:])))
        places = np.sort(order)
        if seed not in self._samples:
            self._samples[seed] = InMemory(*self.take(places))
        sample = self._samples[seed]
        folds = split(np.searchsorted(places, order), sample.predictions.groups)[:n_folds]
        fits = [partial(quick_fit, candidate, engine, seed) for candidate in candidates]
        return cross_validate(fits, sample, folds, progress=progress)

    def take(self, places: Array) -> tuple[ViewPredictions, LabelSets]:
        """Read some labelled instances, in ascending order, into the driver's memory."""
        rows = self.rows[places]
        first, *others = self.tasks.results(read_rows, [([piece], self.names) for piece in self._slices(rows)])
        return first.concat(others), self.labels.take(rows)

    def continuous(self, *, with_variance: bool) -> "RemoteContinuous":
        """Labelled instances in standard units, in blocks on the workers."""
        n_views, n_outputs = self.views.outputs.shape[1:]
        labels, size = self.labels, block_size(n_views, len(self.labels), self.n_units)
        sample, sample_labels = self.take(np.arange(min(self.n_units, MAX_SAMPLE)))
        standard = standard_of(labels, sample.outputs[sample_labels.instance[:MAX_SAMPLE]], size)
        people = max(1, len(labels.annotator_names))
        parts = self._read(continuous_part, size, size, standard, with_variance)
        facts = people, with_variance, 0, len(labels)
        return RemoteContinuous(standard, n_views, n_outputs, labels.total, self.n_units, *facts, parts)

    def categorical(self, *, noise: str, **layout: Any) -> "RemoteCategorical":
        """Labelled instances with their logits and classes, in blocks on the workers."""
        K, C = self.views.outputs.shape[1:]
        kind = label_noise.NOISES[noise]
        people = len(self.labels.annotator_names) if self.named and kind is not None and kind.per_annotator else 1
        size = class_data.block_rows(K, C, label_noise.n_entries(noise, C, people))
        parts = self._read(categorical_part, size, {"noise": noise, **layout})
        widest = self.tasks.results(lambda block: block.ranges.max(axis=0), [(data,) for data in parts.data])
        counts = (self.n_units, self.labels.total, len(self.labels), people)
        return RemoteCategorical(K, C, *counts, np.max(widest, axis=0), parts, self)

    def _slices(self, rows: Array) -> Slices:
        """The chunks that hold some of the ascending `rows`, each with the positions of these rows in it."""
        edges = np.searchsorted(rows, [*(chunk.first for chunk in self.chunks), np.inf]).tolist()
        chunks = zip(self.chunks, pairwise(edges), strict=True)
        return [(chunk, rows[low:high] - chunk.first) for chunk, (low, high) in chunks if low < high]

    def _read(self, lay_out: Callable[..., Any], size: int, *arguments: Any) -> Parts:
        """Lay out all labelled instances on the workers, in one part of whole blocks each."""
        n_blocks = -(-len(self.rows) // size)
        edges = np.linspace(0, n_blocks, min(n_blocks, self.tasks.n_workers) + 1).astype(int).tolist()
        parts = [self.rows[first * size : last * size] for first, last in pairwise(edges)]
        calls = [(self._slices(part), self.names, self.labels.take(part), *arguments) for part in parts]
        return Parts(self.tasks, size, edges[:-1], self.tasks.start(lay_out, calls, spread=True))


@dataclass(frozen=True, eq=False)
class RemoteContinuous(ContinuousBlocks):
    """Blocks of labelled instances in standard units, on workers."""

    parts: Parts
    every: int = 1

    def total(self, function: Callable[[Block], ResultT]) -> ResultT:
        """The sum of a function over all blocks, in an order that depends on their number alone."""
        return self.parts.sum(function, self.every)

    def subsample(self, most: int) -> "RemoteContinuous":
        """Every n-th block, so that about `most` labels remain."""
        fewer = replace(self, every=max(1, self.n_rows // most))
        return replace(fewer, n_labels=fewer.total(lambda block: float(block.repeats.sum())))


@dataclass(frozen=True, eq=False)
class RemoteCategorical(CategoricalBlocks):
    """Blocks of labelled instances' logits, on workers."""

    parts: Parts
    calibration: Calibration

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""
        return self.parts.sum(function, every)

    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""
        return self.calibration.take(np.arange(self.n_instances) if places is None else places)
