"""Class labels: logits and labels laid out in blocks, classes first, and the EM problem that all their models share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, entropy
from vbtta.inference.em import EM, Problem, ascend, buffer, total
from vbtta.models.parts import label_noise, links
from vbtta.models.parts.label_noise import FittedNoise, LabelReading, LabelTable, NoiseModel, NoiseSums

if TYPE_CHECKING:
    from vbtta.models.base import Posterior  # noqa: F401, named in a base class below

_ENTRIES = 1 << 18  # of an array of logits in work: it and a few like it fit a core's share of the cache
_WIDEST_SINGLE = 100.0  # range of logits up to which covariances in single precision are exact enough
_FEW_CLASSES = 48  # up to which logits are worked on with instances last in memory
_MOST_STORED = 1 << 20  # logits up to which they are stored so; else they are laid out again in every pass
_SINGLE_LOGITS = 1 << 9  # of an instance, given in single precision or less, from which a fit works in it
_MIN_SIZE_RATIO = 8  # of a block's logits to its noise statistics, so that adding these takes no time
_MIN_LOGIT = -1e12  # after the shift: keeps products finite
_PROBED_ROWS = 256  # looked at at once
_GLANCED_ROWS = 16  # looked at where a policy predicts, up to twice as many
_MIN_PROBABILITY_ROWS = 5  # from which rows that sum to 1 are not taken for logits
_PREDICTED_ENTRIES = 1 << 17  # of a block of logits to predict
MAX_START_INSTANCES = 2_000  # on which the first temperatures are chosen
_COARSE_INSTANCES, _COARSE = 4_000, EM(tol=1e-5, max_steps=100)  # on which a fit to many more is prepared
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False)
class CategoricalBlock:
    """Labelled instances. Nothing is copied where logits are many: they are read from the predictions.

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
    classes_last: bool = True  # in memory

    @property
    def n_instances(self) -> int:
        """N+, those with a label."""
        return self.table.n_instances

    @cached_property
    def parts(self) -> list[slice]:
        """Instances to be worked on at once."""
        step = _step(*self.mean.shape[1:])
        return [slice(first, min(first + step, self.n_instances)) for first in range(0, self.n_instances, step)]

    @cached_property
    def looked_at(self) -> LabelTable:
        """The labels with the probabilities of the average logits."""
        outputs = self.mean if self.rows is None else self.mean[self.rows]
        return replace(self.table, apparent_class=label_noise.apparent_proba(outputs))

    def logits(self, part: slice) -> Array:
        """Shifted logits of some labelled instances: (C, K, n), not to be written to."""
        if self.stored is not None:
            return self.stored[:, :, part]
        finer = np.result_type(self.mean, self.precision)  # large logits are shifted before they are rounded
        values = np.subtract(self._take(self.mean, part), self.top[part, :, None], dtype=finer)
        if self.ranges.max() > -_MIN_LOGIT:
            np.maximum(values, _MIN_LOGIT, out=values)
        values = values.astype(self.precision, copy=False).transpose(2, 1, 0)
        return values if self.classes_last else np.ascontiguousarray(values)

    def variances(self, part: slice) -> Array | None:
        """Variances over draws of the same, where there are any: (C, K, n)."""
        if self.variance is None:
            return None
        return np.asarray(self._take(self.variance, part), dtype=np.float64).transpose(2, 1, 0)

    def split(self, size: int) -> list["CategoricalBlock"]:
        """The same in blocks of so many instances."""
        names = ("top", "ranges", "rows", "mass", "group", *(("mean", "variance") if self.rows is None else ()))
        blocks = []
        for first in range(0, self.n_instances, size):
            inside = slice(first, min(first + size, self.n_instances))
            labels = slice(*np.searchsorted(self.table.instance, [inside.start, inside.stop]))
            fields = {name: value[inside] for name in names if (value := getattr(self, name)) is not None}
            stored = None if self.stored is None else self.stored[:, :, inside]
            table = self.table.part(labels, first, inside.stop)
            blocks.append(replace(self, **fields, stored=stored, table=table, first=first))
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
    n_groups = 0  # of instances; 0 where they are independent

    @abstractmethod
    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, in an order that depends on their number alone."""

    @abstractmethod
    def take(self, places: Array | None) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels of some labelled instances, or of all."""

    def single(self) -> "CategoricalBlocks":
        """The same with logits in single precision, where they can be had."""
        return self


@dataclass(frozen=True, eq=False)
class CategoricalData(CategoricalBlocks):
    """All labelled instances, in memory, and the blocks they are worked on in."""

    whole: CategoricalBlock
    blocks: Sequence[CategoricalBlock]
    source: tuple[ViewPredictions, LabelSets]
    double: bool  # whether the link needs double precision
    n_groups: int = 0

    def total(self, function: Callable[[CategoricalBlock], ResultT], every: int = 1) -> ResultT:
        """The sum of a function over every n-th block, on several threads."""
        return total(function, self.blocks[::every])

    def single(self) -> "CategoricalData":
        """The same with logits in single precision, where the link allows it."""
        whole = self.whole
        if self.double or whole.precision is np.float32 or self.widest.max() > _WIDEST_SINGLE:
            return self
        stored = None if whole.stored is None else whole.stored.astype(np.float32)
        whole = replace(whole, stored=stored, precision=np.float32)
        return replace(self, whole=whole, blocks=whole.split(self.blocks[0].n_instances))

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
    """Lay out checked and aligned predictions and labels."""
    _, K, C = predictions.outputs.shape
    table = label_noise.label_table(labels, labels.categorical(C, predictions.classes), noise)
    rows = labels.labelled
    variance = predictions.variance if with_variance else None
    whole = categorical_block(predictions.outputs, variance, rows, table, noise, classes_last=classes_last)
    group = predictions.group_numbers(rows)
    whole, n_groups = replace(whole, group=group), 0 if group is None else 1 + int(group.max())
    blocks = whole.split(block_rows(K, C, label_noise.n_entries(noise, C, table.n_annotators)))
    facts = (K, C, len(rows), labels.total, len(table.label), table.n_annotators, whole.ranges.max(axis=0))
    return CategoricalData(*facts, whole, blocks, (predictions, labels), classes_last, n_groups)


def categorical_block(
    mean: Array, variance: Array | None, rows: Array, table: LabelTable, noise: str, *, classes_last: bool
) -> CategoricalBlock:
    """Labelled rows (n,) of predictions (N, K, C) and their labels, laid out."""
    (N, K, C), size, mass = mean.shape, len(rows), None
    if noise == "none":
        mass = np.bincount(table.instance * C + table.label, table.repeats, size * C).reshape(size, C)
    single = mean.itemsize <= 4 and K * C >= _SINGLE_LOGITS and not classes_last
    precision = np.float32 if single else np.float64
    stored, classes_last = None, classes_last or C > _FEW_CLASSES
    if not classes_last and size * K * C <= _MOST_STORED:
        stored = np.empty((C, K, size), dtype=precision)
    top, ranges = np.empty((2, size, K))
    for first in range(0, size, step := _step(K, C)):
        part = slice(first, first + step)
        logits = (mean[part] if size == N else mean[rows[part]]).transpose(2, 1, 0)
        if not classes_last:  # reductions over a short last axis are slow
            logits = np.ascontiguousarray(logits)
        top[part] = logits.max(axis=0).T
        ranges[part] = np.minimum(top[part] - logits.min(axis=0).T, -_MIN_LOGIT)
        if stored is not None:
            np.maximum(np.subtract(logits, top[part].T, out=stored[:, :, part]), _MIN_LOGIT, out=stored[:, :, part])
    known = None if size == N else rows, top.astype(precision, copy=False), ranges, stored
    return CategoricalBlock(mean, variance, *known, table, mass, precision=precision, classes_last=classes_last)


def block_rows(n_views: int, n_classes: int, n_statistics: int) -> int:
    """Instances of a block: cache-sized, or more where the noise has many statistics."""
    step = _step(n_views, n_classes)
    return step * -(-max(1, _MIN_SIZE_RATIO * n_statistics) // (step * n_views * n_classes))


def _step(n_views: int, n_classes: int) -> int:
    return max(1, _ENTRIES // (n_views * n_classes))


def check_logits(predictions: ViewPredictions, *, fitted: bool = False) -> None:
    """Raise where predictions cannot be logits of two classes or more: one output, or a view whose rows sum to 1.

    Once a policy is `fitted` some rows are looked at, as all take time, and all views must be alike.
    """
    outputs = predictions.outputs
    if outputs.shape[2] == 1:
        raise ValueError(
            "predictions have one output (C = 1); a classification needs a logit for every class. For a binary "
            "logit l stack zeros and l: np.concatenate([np.zeros_like(l), l], axis=2)"
        )
    rows = outputs[:: max(1, len(outputs) // _GLANCED_ROWS)] if fitted else outputs
    suspects = np.full(outputs.shape[1], len(rows) >= _MIN_PROBABILITY_ROWS)
    for first in range(0, len(rows), _PROBED_ROWS):
        if suspects.any():  # sums are rounded to half precision or three digits
            part = rows[first : first + _PROBED_ROWS]
            suspects &= ((part >= 0).all(axis=2) & (np.abs(part.sum(axis=2) - 1) <= 5e-3)).all(axis=0)
    if suspects.all() if fitted else suspects.any():
        raise ValueError(
            f"predictions look like probabilities: all rows of view {predictions.names[suspects.argmax()]!r} are "
            "non-negative and sum to 1. Pass logits: collect_views(..., output=torch.log) of a network with a softmax, "
            "or ViewPredictions(np.log(np.maximum(p, 1e-12)), names=...)"
        )


# class probabilities (n, C) of some rows, and a function that gives their information (n,)
BlockReader = Callable[[slice], tuple[Array, Callable[[Array], Array]]]


def class_prediction(
    predictions: ViewPredictions, factors: Array | None, block: BlockReader, *, informed: bool = True
) -> CategoricalPrediction:
    """The prediction of blocks of rows, without the views' information unless `informed`.

    Probabilities are multiplied by factors (N, C) where given, and divided by their sum.
    """
    N, K, C = predictions.outputs.shape
    proba, information, step = np.empty((N, C)), np.zeros(N), max(1, _PREDICTED_ENTRIES // (K * C))
    for first in range(0, N, step):
        rows = slice(first, first + step)
        mixed, information_of = block(rows)
        mixed = mixed if factors is None else np.maximum(mixed, np.finfo(np.float64).tiny) * factors[rows]
        mixed[...] = proba[rows] = mixed / (mixed @ np.ones(C))[:, None]
        if informed and K > 1:
            information[rows] = information_of(mixed)
    return CategoricalPrediction(proba, information, class_names(predictions))


def link_arguments(predictions: ViewPredictions, rows: slice, link: links.Link) -> tuple[Array, Array | None]:
    """Shifted logits of some rows in double precision and, where the link uses them, variances: (C, K, n) each."""
    logits, variance = predictions.outputs[rows], None
    if predictions.variance is not None and link.uses_variance:
        variance = predictions.variance[rows].astype(np.float64).transpose(2, 1, 0)
    values = np.subtract(logits, logits.max(axis=2, keepdims=True), dtype=np.float64)
    return np.maximum(values, _MIN_LOGIT, out=values).transpose(2, 1, 0), variance


class SoftmaxViews:
    """A block of views with softmax probabilities P_k(c) of kappa_k f_k + o, their mixture and its information.

    The offsets, common to all views, are factors exp(o) of sums over classes. A block is valid until the thread's next.
    """

    def __init__(self, logits: Array, kappa: Array, offset: Array, weights: Array) -> None:
        kind = np.float32 if logits.itemsize <= 4 else np.float64
        self._tiny = np.finfo(kind).tiny
        self._factor, self._weights = np.exp(offset - offset.max()), weights.astype(kind, order="C")  # (C,)
        scale = np.repeat(kappa.astype(kind), logits.shape[2]).reshape(logits.shape[1:])  # no broadcast: faster
        self._utility = buffer("logits", logits.shape, kind)
        np.multiply(logits, scale if np.ptp(kappa) else scale[0, 0], out=self._utility)
        self._power, self._total = self._exponentials()
        if not (self._utility.min() > _MIN_LOGIT and self._total.min() > 1e-10 and self._total.max() < 1e26):
            shifted = np.subtract(logits, logits.max(axis=2, keepdims=True), dtype=np.float64)
            self._utility[...] = np.maximum(shifted, _MIN_LOGIT) * kappa[:, None]
            self._power, self._total = self._exponentials()
        self._rate = self._weights / self._total  # (n, K): w_k / Z_k
        self.mixture = np.maximum((self._rate[:, None] @ self._power)[:, 0] * self._factor, 1e3 * self._tiny)  # (n, C)

    def _exponentials(self) -> tuple[Array, Array]:
        """Exponentials (n, K, C) of the utilities, and their sums Z_k times the factors (n, K)."""
        with np.errstate(over="ignore"):
            power = np.exp(self._utility, out=buffer("power", self._utility.shape, self._utility.dtype))
            factor = self._factor.astype(power.dtype)
            return power, (power.reshape(-1, len(factor)) @ factor).reshape(power.shape[:2])

    def pooled(self, weights: Array, offset: Array) -> Array:
        """Class probabilities of the weighted sum of the utilities: (n, C)."""
        utility = np.ascontiguousarray((weights.astype(self._rate.dtype) @ self._utility).T) + offset[:, None]
        power = np.exp(utility - utility.max(axis=0))  # (C, n)
        return np.ascontiguousarray((power / power.sum(axis=0)).T)

    def information(self, proba: Array) -> Array:
        """Mutual information of class and view, given class probabilities (n, C): (n,). The utilities are lost."""
        # ln P(c, k) = ln rate_k + u_kc + ln tilt_c: what depends on class and view enters by its expectation alone
        by_view, of_view, tilt = self._weights, np.log(self._total), self._factor
        if proba is not self.mixture:  # else the views have their weights
            tilt = tilt * np.minimum(proba / self.mixture, 1e30)
            by_view = self._rate * (self._power @ tilt.astype(self._rate.dtype)[:, :, None])[:, :, 0]
            of_view = np.log(np.maximum(by_view, self._tiny) / np.maximum(self._rate, self._tiny))
        self._utility *= self._power
        utility = (self._rate[:, None] @ self._utility)[:, 0]  # (n, C)
        left_open = np.vecdot(by_view, of_view, dtype=np.float64) - np.vecdot(utility, tilt)
        entire = entropy(proba)
        of_class = np.vecdot(proba, np.log(np.maximum(tilt, self._tiny)))
        return np.asarray(np.clip(entire - left_open + of_class, 0, entire))


def class_names(predictions: ViewPredictions) -> Array:
    """Names of the outputs: (C,)."""
    return np.arange(predictions.outputs.shape[2]) if predictions.classes is None else predictions.classes


def label_reader(noise: FittedNoise | None) -> Callable[[CategoricalBlock], LabelReading | None]:
    """A function that reads a block's labels, None without a noise model; serialised to workers."""
    if noise is None:
        return lambda block: None
    read, difficulty = noise.reader(), noise.model.difficulty
    return lambda block: read(block.looked_at if difficulty else block.table)


def truth_posterior(log_evidence: Array, proba: Array) -> tuple[Array, Array]:
    """Posterior (C, n) of the true classes under probabilities (C, n), and log normalisers, of evidence (n, C)."""
    log_evidence = np.array(log_evidence.T, order="C")  # a copy
    top = log_evidence.max(axis=0)
    posterior = np.exp(np.subtract(log_evidence, top, out=log_evidence), out=log_evidence)
    posterior *= proba
    norm = posterior.sum(axis=0)
    posterior /= norm
    return posterior, top + np.log(norm)


StateT = TypeVar("StateT", bound=Any)  # with the noise model's Q, `noise`
SumsT = TypeVar("SumsT", bound=Any)  # additive, with `log_evidence`
BlockPass = Callable[[CategoricalBlock, Array | None], tuple[SumsT, Array | None]]


class Statistics(NamedTuple, Generic[SumsT]):
    """Result of a pass over the data."""

    sums: SumsT
    counts: NoiseSums | None
    bound: float

    def next_noise(self, before: FittedNoise | None) -> tuple[FittedNoise | None, FittedNoise | None]:
        """The next Q of the noise and that after many such updates, None where it is about the same."""
        if before is None or self.counts is None:
            return None, None
        after = before.update(self.counts)
        return after, after.extrapolated(before, self.counts)


@dataclass(frozen=True, eq=False)
class ClassProblem(Problem[StateT, Statistics[SumsT], "Posterior"], Generic[StateT, SumsT]):
    """Data and noise model of class labels; derived classes add weights, calibration and their priors."""

    data: CategoricalBlocks
    noise: NoiseModel | None
    newton: ClassVar[bool] = True
    common_start: ClassVar[bool] = False  # whether all ln kappa_k start from one value
    _last: dict[str, tuple[StateT, Statistics[SumsT]]] = field(default_factory=dict, init=False, repr=False)

    def evaluate(self, state: StateT) -> tuple[float, Statistics[SumsT]]:
        """Bound and statistics at a state: one pass, unless it is the last evaluated state or one to remember."""
        for known, statistics in self._last.values():
            if known is state:
                return statistics.bound, statistics
        block_pass, read = self._block_pass(state), label_reader(state.noise)

        def block_statistics(block: CategoricalBlock) -> tuple[SumsT, NoiseSums | None]:
            """Serialised to workers: captures nothing else."""
            reading = read(block)
            sums, truth = block_pass(block, None if reading is None else reading.log_evidence)
            return sums, None if reading is None or truth is None else reading.sums(truth)

        sums, counts = self.data.total(block_statistics)
        bound = float(sums.log_evidence) - sum(self._penalties(state).values())
        statistics = Statistics(sums, counts, bound)
        self._last["evaluation"] = state, statistics
        return bound, statistics

    def remember(self, state: StateT, statistics: Statistics[SumsT]) -> None:
        """Spare the pass at a state that another prior's problem has evaluated."""
        bound = float(statistics.sums.log_evidence) - sum(self._penalties(state).values())
        self._last[f"state {id(state)}"] = state, statistics._replace(bound=bound)

    def bound_terms(self, state: StateT, statistics: Statistics[SumsT]) -> dict[str, float]:
        """The bound, term by term: J_S minus the rest."""
        return {"J_S": float(statistics.sums.log_evidence), **self._penalties(state)}

    def first_acceptable(self, candidates: Iterable[StateT], statistics: Statistics[SumsT]) -> StateT:
        """The first candidate whose bound is not lower, or the last, which is EM's."""
        least = statistics.bound - 1e-13 * abs(statistics.bound)
        for candidate in candidates:
            if self.evaluate(candidate)[0] >= least:
                break
        return candidate

    def quick(self) -> Self:
        """The same in single precision: exact enough for held-out scores and first guesses."""
        problem = replace(self, data=self.data.single())
        problem._last.update(self._last)
        return problem

    def start_log_kappa(self, first: StateT) -> Array:
        """Where to start ln kappa_k: 0, or for wide logits the candidate of the highest bound, on a subsample."""
        data = self.data
        if data.widest.max() <= links.WIDE:
            return np.zeros(data.n_views)
        if data.n_instances > MAX_START_INSTANCES or not isinstance(data, CategoricalData):
            places = np.linspace(0, data.n_instances - 1, min(MAX_START_INSTANCES, data.n_instances)).astype(int)
            subsample, state = self._on_subsample(places)
            return subsample.start_log_kappa(state)
        candidates = links.start_candidates(np.median(data.whole.ranges, axis=0), common=self.common_start)
        if len(candidates) == 1:
            return candidates[0]
        return max(candidates, key=lambda log_kappa: self.evaluate(self._scaled(first, log_kappa))[0])

    def coarse_start(self, first: StateT) -> StateT:
        """Where to start from: with very many instances the optimum of some of them."""
        n_instances = self.data.n_instances
        if n_instances < 2 * _COARSE_INSTANCES:
            return first
        subsample, _ = self._on_subsample(np.linspace(0, n_instances - 1, _COARSE_INSTANCES).astype(int))
        state: StateT = ascend(subsample, first, _COARSE).state
        return state

    @abstractmethod
    def _block_pass(self, state: StateT) -> BlockPass[SumsT]:
        """Sums over a block and, with evidence of the labels (n, C), the posterior of the true classes (n, C)."""

    @abstractmethod
    def _penalties(self, state: StateT) -> dict[str, float]:
        """Divergences of Q from its priors, and minus the log priors of what is at its mode."""

    @abstractmethod
    def _on_subsample(self, places: Array) -> tuple["ClassProblem[StateT, SumsT]", StateT]:
        """The problem of some labelled instances and its first state."""

    @abstractmethod
    def _scaled(self, state: StateT, log_kappa: Array) -> StateT:
        """A first state with inverse temperatures."""
