"""Label noise: what separates the labels of an instance from its true class (docs/method, eq. 22).

A kind of noise is a class with an entry in :data:`NOISES`; all that depends on the kind is there and, for ADVI, in its
torch counterpart. The parameters of annotator u, rows of probabilities, have Dirichlet priors and Dirichlet Q. The
counts of that prior are common to all annotators and at their mode, with a log-normal prior around the given ones.

With item difficulty an instance belongs to a level e with probability pi_e. It has an apparent class d_i, and each of
its labels is that class with probability h_e, else a draw of the annotator's row (docs/method, eqs. 22a and 22b):

    d_i ~ G_i,   P(y_ij | t_i = c, d_i, e) = h_e 1[y_ij = d_i] + (1 - h_e) A_u[c, y_ij]

G_i is the softmax of the views' average logits.

Labels that agree with each other and with the views are then weaker evidence than independent ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from scipy import sparse, special

from vbtta.data.labels import Array, LabelSets, frame_of
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction
from vbtta.inference.linalg import Reader, kl_dirichlet
from vbtta.models.parts.annotators import LabelFacts, brief

Sampler = Callable[[np.random.Generator, Array], Array]  # labels (J,) of true classes (J,)
_LEVEL = 0.9  # of the intervals of accuracies
_MIN_ROW_LABELS = 10  # of a row of a confusion matrix
_PRIOR_SCALE = 1.0  # standard deviation of the logarithms of the prior counts that annotators share
_SHARES = np.array([0.0, 0.4])  # h_e: how often a label is the apparent class, at every level of difficulty
_LEVEL_PRIOR = np.array([20.0, 6.0])  # Dirichlet counts of the levels
_MIN_ROWS = 3  # of annotators or their matrices, to infer the prior that they share
_MIN_INFORMATION = 0.05  # share of the labels that count in an accuracy's interval, at least
_PRIOR_STEPS = 20  # until the prior of the accuracies has settled
_LOOKED_ENTRIES = 1 << 18  # of logits at once
_MAX_ENTRIES = 1 << 27  # of all confusion matrices: a gigabyte


class LabelGroups(NamedTuple):
    """Equal labels of an instance, taken together: G groups, in the order of the instances."""

    owner: Array  # (G,): the instance
    label: Array  # (G,)
    first: Array | None  # (N+,): first group of every instance; None where each has one
    of_label: Array  # (J,): the group of every label


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Labels of labelled instances, which count from 0 in order."""

    instance: Array  # (J,)
    label: Array  # (J,): positions among the classes
    annotator: Array  # (J,); zeros where all are alike
    repeats: Array  # (J,): how often each label was given, times the instance's weight
    importance: Array  # (N+,): weights of the instances
    n_instances: int  # N+
    n_annotators: int
    looks: Array | None = None  # (J,): G_i(y_ij), where item difficulty is modelled
    _memo: dict[int, tuple[sparse.csr_array, sparse.csr_array]] = field(default_factory=dict, repr=False)

    def part(self, labels: slice, first: int, last: int) -> "LabelTable":
        """Some labels, which are those of instances from first up to last."""
        columns = (self.instance[labels] - first, self.label[labels], self.annotator[labels], self.repeats[labels])
        looks = None if self.looks is None else self.looks[labels]
        return LabelTable(*columns, self.importance[first:last], last - first, self.n_annotators, looks)

    @cached_property
    def given(self) -> Array:
        """How often each label was given: (J,)."""
        return np.asarray(self.repeats / self.importance[self.instance])

    @cached_property
    def groups(self) -> LabelGroups:
        """Equal labels of every instance."""
        stride = int(self.label.max(initial=0)) + 1
        cell, of_label = np.unique(self.instance * stride + self.label, return_inverse=True)
        owner = cell // stride
        first = None if len(cell) == self.n_instances else np.searchsorted(owner, np.arange(self.n_instances))
        return LabelGroups(owner, cell % stride, first, of_label)

    def incidence(self, n_answers: int) -> tuple[sparse.csr_array, sparse.csr_array]:
        """How often a group has an annotator's answer, (G, U A), and the same with the instances' weights, (U A, G).

        With one answer, A = 1, labels are told apart by their annotators alone.
        """
        if n_answers not in self._memo:
            answer = self.annotator * n_answers + (self.label if n_answers > 1 else 0)
            shape = (len(self.groups.owner), self.n_annotators * n_answers)
            given = sparse.csr_array((self.given, (self.groups.of_label, answer)), shape=shape)
            counted = sparse.csr_array((self.repeats, (answer, self.groups.of_label)), shape=shape[::-1])
            self._memo[n_answers] = given, counted
        return self._memo[n_answers]

    def over_groups(self, values: Array, operation: np.ufunc = np.add) -> Array:
        """Values of the groups (G, ...), added up or otherwise reduced over the groups of every instance."""
        return values if self.groups.first is None else operation.reduceat(values, self.groups.first, axis=0)


class NoiseModel(NamedTuple):
    """The kind of noise and the prior counts of one annotator."""

    kind: str  # a name in NOISES
    prior: Annotated[Array, "2|C C"]  # (2,) right and wrong, or (C, C)
    n_classes: int
    accuracy_prior: tuple[float, float]  # Beta of an accuracy, right and wrong
    named: bool  # whether annotators are told apart
    difficulty: bool = False

    @property
    def of_kind(self) -> "NoiseKind":
        """What the kind computes."""
        kind = NOISES[self.kind]
        assert kind is not None
        return kind

    def start(self, n_annotators: int) -> "FittedNoise":
        """Q at the prior for every annotator."""
        if n_annotators * self.prior.size > _MAX_ENTRIES:
            raise ValueError(
                f"noise='confusion' would need {n_annotators} matrices of {self.n_classes} x {self.n_classes}; "
                "use noise='annotator', one accuracy each"
            )
        counts = np.repeat(self.prior[None], n_annotators, axis=0)
        several = self.of_kind.per_annotator and counts.size // counts.shape[-1] >= _MIN_ROWS
        start = FittedNoise(self, counts, _strength_of(self) if several else None)
        return start._replace(levels=_LEVEL_PRIOR, tally=np.zeros_like(counts)) if self.difficulty else start

    def update(self, expected_counts: Array) -> "FittedNoise":
        """Q given expected counts, at the prior's own counts."""
        return FittedNoise(self, self.prior + expected_counts)


class AnnotatorAccuracy(NamedTuple):
    """Annotators of class labels."""

    names: tuple[str, ...]
    accuracy: Array  # (U,): posterior mean of the probability that a label is right
    accuracy_interval: Array  # (U, 2): 90 %
    confusion: Array  # (U, C, C): posterior mean of A_u, true class by label

    def __repr__(self) -> str:
        return f"AnnotatorAccuracy({brief(self.names, self.accuracy)})"

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row an annotator: accuracy and the limits of its interval."""
        low, high = self.accuracy_interval.T
        columns = {"accuracy": self.accuracy, "low": low, "high": high}
        return frame_of(columns, list(self.names))


class NoiseSums(NamedTuple):
    """Additive expected counts; with item difficulty those that draws of the annotators' rows explain."""

    counts: Array  # (U, 2) or (U, C, C)
    doubt: Array  # (U,): sum over labels of q (1 - q), q the probability that the label is right
    tally: Array  # counts of all labels; () without item difficulty
    levels: Array  # (E,); () without item difficulty


class FittedNoise(NamedTuple):
    """A noise model and the Dirichlet counts of Q."""

    model: NoiseModel
    counts: Annotated[Array, "U 2|U C C"]  # (U, 2) or (U, C, C)
    strength: Annotated[Array, "2"] | None = (
        None  # (2,): prior counts, right and wrong, that annotators share; None as in the model
    )
    levels: Annotated[Array, "E"] | None = None  # of the levels of difficulty
    tally: Annotated[Array, "U 2|U C C"] | None = None  # counts of all labels, without the prior
    doubt: Annotated[Array, "U"] | None = (
        None  # (U,): sum over labels of q (1 - q), q the probability that the label is right
    )

    @property
    def prior(self) -> Array:
        """The prior counts of one annotator."""
        return self.model.prior if self.strength is None else _prior_of(self.model, self.strength)

    @property
    def given(self) -> Array:
        """Expected counts of true classes and labels, without the prior: like `counts`."""
        return np.maximum(self.counts - self.prior, 0) if self.tally is None else self.tally

    def resume(self, other: "FittedNoise | None") -> "FittedNoise":
        """The noise that another fit found, if it is of the same form; else this."""
        if other is None or (other.model.kind, other.counts.shape) != (self.model.kind, self.counts.shape):
            return self
        alike = (other.levels is None) == (self.levels is None) and (other.strength is None) == (self.strength is None)
        return other._replace(model=self.model) if alike else self

    def reader(self) -> Callable[[LabelTable], "LabelReading"]:
        """A function that reads a table's labels under E[ln A] and E[ln pi]; serialised to workers."""
        log_levels = None if self.levels is None else log_expected(self.levels)
        return partial(LabelReading, self.model.of_kind, log_expected(self.counts), log_levels, self.model.n_classes)

    def evidence(self) -> Callable[[LabelTable], Array]:
        """A function that gives the log evidence of a table's labels for every class under E[ln A]: (N+, C)."""
        read = self.reader()
        return lambda table: read(table).log_evidence

    def update(self, sums: NoiseSums) -> "FittedNoise":
        """Q given expected counts, then a Newton step of the prior counts that annotators share."""
        updated = self._replace(counts=self.prior + sums.counts, doubt=sums.doubt if len(sums.doubt) else None)
        if self.levels is not None:
            updated = updated._replace(levels=_LEVEL_PRIOR + sums.levels, tally=sums.tally)
        return updated if self.strength is None else updated._shared_prior()

    def divergence(self) -> float:
        """KL(Q || prior), summed over annotators, rows and levels, and minus the log prior of the shared counts."""
        total = float(kl_dirichlet(self.counts, self.prior).sum())
        if self.levels is not None:
            total += float(kl_dirichlet(self.levels, _LEVEL_PRIOR))
        return total if self.strength is None else total - _log_strength_prior(self.strength, self.model)

    def pack(self) -> Array:
        """Logarithms of the counts, as a vector."""
        return np.asarray(np.log(np.concatenate([self.counts.ravel(), [] if self.levels is None else self.levels])))

    def unpack(self, take: Reader) -> "FittedNoise":
        """The noise of the next entries of a packed vector."""
        counts = np.exp(np.clip(take(*self.counts.shape), -30, 300))
        levels = None if self.levels is None else np.exp(np.clip(take(len(self.levels)), -30, 300))
        return self._replace(counts=counts, levels=levels)

    def _shared_prior(self) -> "FittedNoise":
        """The prior counts after a Newton step in their logarithms, halved until the bound does not fall."""
        model, rows = self.model, self.counts.size // self.counts.shape[-1]
        right, wrong = model.of_kind.log_sums(log_expected(self.counts))
        cells = model.prior.shape[-1] - 1  # wrong answers of a row

        def height(logs: Array) -> float:
            a, b = np.exp(logs)
            norm = special.gammaln(a + b) - special.gammaln(a) - cells * special.gammaln(b / cells)
            return float(rows * norm + a * right + b / cells * wrong + _log_strength_prior(np.exp(logs), model))

        assert self.strength is not None
        a, b = strength = self.strength
        both = special.digamma(a + b)
        slope = np.array([rows * (both - special.digamma(a)) + right, rows * (both - special.digamma(b / cells))])
        slope[1] += wrong / cells
        bend = rows * (special.polygamma(1, a + b) - np.diag(special.polygamma(1, [a, b / cells]) / [1, cells]))
        offset = np.log(strength / _strength_of(model)) / _PRIOR_SCALE**2
        hessian = bend * np.outer(strength, strength)
        hessian += np.diag(np.minimum(slope * strength, 0) - _PRIOR_SCALE**-2)
        step = np.clip(np.linalg.solve(hessian, offset - slope * strength), -1, 1)
        logs, before = np.log(strength), height(np.log(strength))
        steps = (logs + fraction * step for fraction in (1.0, 0.5, 0.1, 0.01))
        better = next((candidate for candidate in steps if height(candidate) >= before), logs)
        return self._replace(strength=np.exp(better))

    def label_evidence(self, labels: LabelSets, position: Array, annotator: Array, outputs: Array) -> Array:
        """Log probability of an instance's labels under E[A] for every class, given the views' outputs: (N+, C).

        Unknown annotators (-1) are the average of the known; where annotators are not named, one matrix is everybody's.
        """
        counts, who = self.counts, np.zeros_like(annotator)
        if self.model.named:
            counts = _with_average(counts)
            who = np.where(annotator < 0, len(counts) - 1, annotator)
        rows, instance = np.unique(labels.instance, return_inverse=True)
        table = LabelTable(instance, position, who, labels.count, _importance(labels, rows), len(rows), len(counts))
        log_levels = None
        if self.levels is not None:
            looks = label_looks(outputs, labels.instance, position)
            table, log_levels = replace(table, looks=looks), log_mean(self.levels)
        return LabelReading(self.model.of_kind, log_mean(counts), log_levels, self.model.n_classes, table).log_evidence

    def label_sampler(self, annotator: Array, instance: Array, outputs: Array) -> Sampler:
        """Draws labels of instances (J,) with outputs (N, K, C).

        `annotator` (J,) is one past the last for unknown ones, who have the average counts.
        """
        if self.levels is None:
            return self.model.of_kind.sampler(self, annotator)
        draw_own = self.model.of_kind.sampler(self._replace(tally=None), annotator)
        above = apparent_proba(outputs).cumsum(axis=1)[:, :-1]  # (N, C - 1)
        levels = self.levels

        def draw(generator: np.random.Generator, truth: Array) -> Array:
            share = generator.choice(_SHARES, size=len(above), p=generator.dirichlet(levels))  # (N,)
            apparent = (generator.random((len(above), 1)) > above).sum(axis=1)
            same = generator.random(len(truth)) < share[instance]
            return np.where(same, apparent[instance], draw_own(generator, truth))

        return draw


class LabelReading:
    """Labels of a table under given ln A and, with item difficulty, ln pi."""

    def __init__(
        self, kind: "NoiseKind", log_noise: Array, log_levels: Array | None, n_classes: int, table: LabelTable
    ) -> None:
        self._kind, self._table, C = kind, table, n_classes
        self._levels: list[tuple[Array | None, Array]] = []
        log_answer, owner = kind.per_answer(log_noise, C), table.groups.owner
        base = table.over_groups(kind.answers(log_answer, table, C))
        if log_levels is None:
            self.log_evidence = base  # (N+, C)
            return
        assert table.looks is not None
        looks = np.empty((len(owner), 1))
        looks[table.groups.of_label, 0] = table.looks
        others = np.maximum(1 - table.over_groups(looks), 0)  # apparent classes that no label names: (N+, 1)
        total = np.bincount(table.instance, table.given, table.n_instances)[:, None]
        heights = np.empty((len(log_levels), *base.shape))  # (E, N+, C)
        for height, log_level, share in zip(heights, log_levels, _SHARES, strict=True):
            height[:] = base + log_level
            if share == 0:
                self._levels.append((None, np.zeros(0)))
                continue
            odds = share / (1 - share) * np.exp(-log_answer)
            gain = kind.answers(np.log1p(odds), table, C)  # ln of the product of 1 + odds: (G, C)
            top = table.over_groups(gain, np.maximum)
            gain -= top if table.groups.first is None else top[owner]
            apparent = np.exp(gain, out=gain)
            apparent *= looks
            scale = table.over_groups(apparent) + others * np.exp(-top)  # (N+, C)
            apparent /= scale if table.groups.first is None else scale[owner]  # P(d_i is the group's label)
            height += total * np.log1p(-share) + top + np.log(scale)
            self._levels.append((apparent, odds / (1 + odds)))
        top = heights.max(axis=0)
        self._shares = np.exp(heights - top)  # of the levels, given the class: (E, N+, C)
        scale = self._shares.sum(axis=0)
        self._shares /= scale
        self.log_evidence = top + np.log(scale)

    def sums(self, truth: Array) -> NoiseSums:
        """Expected counts given the probabilities of the true classes (N+, C)."""
        kind, table, none = self._kind, self._table, np.zeros(0)
        owner, label = table.groups[:2]
        right = truth[owner, label]
        doubt = table.incidence(1)[1] @ (right * (1 - right))
        tally = kind.counts(truth[owner], table)
        if not self._levels:
            return NoiseSums(tally, doubt, none, none)
        own, levels = tally, self._shares * truth
        for level, (apparent, copied) in zip(levels, self._levels, strict=True):
            if apparent is not None:  # less the labels that are no draws of the annotator's row
                own = own - copied * kind.counts(level[owner] * apparent, table)
        return NoiseSums(np.maximum(own, 0), doubt, tally, np.einsum("enc,n->e", levels, table.importance))


def label_looks(outputs: Array, row: Array, position: Array) -> Array:
    """Probability of every label's class under the average of its row's logits (N, K, C): (J,)."""
    looks = np.empty(len(row))
    step = max(1, _LOOKED_ENTRIES // outputs[0].size)
    for first in range(0, len(row), step):
        part = slice(first, first + step)
        proba = apparent_proba(outputs[row[part]])
        looks[part] = proba[np.arange(len(proba)), position[part]]
    return looks


def apparent_proba(outputs: Array) -> Array:
    """The softmax of the average over views of logits (n, K, C), G: (n, C)."""
    return np.asarray(special.softmax(np.asarray(outputs, dtype=np.float64).mean(axis=1), axis=1))


class NoiseKind(Protocol):
    """One kind of noise: the shape of its parameters, and what depends on it."""

    @property
    def per_annotator(self) -> bool:
        """Whether annotators, where named, have parameters of their own."""

    @property
    def accuracy_prior(self) -> tuple[float, float]:
        """Default Beta counts of an accuracy, right and wrong."""

    def prior(self, n_classes: int, confusion: tuple[float, float], accuracy: tuple[float, float]) -> Array:
        """Prior counts of one annotator."""

    def answers(self, values: Array, table: LabelTable, n_classes: int) -> Array:
        """Sums of values like the parameters over the labels of every group, for all true classes: (G, C)."""

    def per_answer(self, log_noise: Array, n_classes: int) -> Array:
        """Logarithms of A's entries, shaped like the parameters."""

    def log_sums(self, log_noise: Array) -> tuple[float, float]:
        """Sums of the logarithms of right and of wrong answers."""

    def counts(self, truth: Array, table: LabelTable) -> Array:
        """Expected counts given the probabilities of every group's true class (G, C); additive over labels."""

    def right_and_wrong(self, given: Array) -> Array:
        """Expected counts of right and wrong labels: (U, 2)."""

    def matrices(self, mean: Array, n_classes: int) -> Array:
        """Confusion matrices (U, C, C) of the parameters."""

    def sampler(self, noise: FittedNoise, annotator: Array) -> Sampler:
        """See :meth:`FittedNoise.label_sampler`; error rates are drawn from Q every time."""


@dataclass(frozen=True)
class _Accuracy:
    """A label is right with probability a_u, else any other class: counts (U, 2) of right and wrong."""

    per_annotator: bool
    accuracy_prior: tuple[float, float]

    def prior(self, n_classes: int, confusion: tuple[float, float], accuracy: tuple[float, float]) -> Array:
        return np.array(accuracy, dtype=np.float64)

    def answers(self, values: Array, table: LabelTable, n_classes: int) -> Array:
        right, wrong = (table.incidence(1)[0] @ values).T
        rows = np.repeat(wrong[:, None], n_classes, axis=1)
        rows[np.arange(len(right)), table.groups.label] = right
        return rows

    def per_answer(self, log_noise: Array, n_classes: int) -> Array:
        return np.asarray(log_noise - [0, np.log(n_classes - 1)])

    def log_sums(self, log_noise: Array) -> tuple[float, float]:
        return float(log_noise[:, 0].sum()), float(log_noise[:, 1].sum())

    def counts(self, truth: Array, table: LabelTable) -> Array:
        right = truth[np.arange(len(truth)), table.groups.label]
        return np.asarray(table.incidence(1)[1] @ np.stack([right, truth.sum(axis=1) - right], axis=1))

    def right_and_wrong(self, given: Array) -> Array:
        return given

    def matrices(self, mean: Array, n_classes: int) -> Array:
        wrong, diagonal = mean[:, 1] / (n_classes - 1), np.arange(n_classes)
        confusion = np.repeat(wrong, n_classes**2).reshape(-1, n_classes, n_classes)
        confusion[:, diagonal, diagonal] = mean[:, :1]
        return confusion

    def sampler(self, noise: FittedNoise, annotator: Array) -> Sampler:
        (right, wrong), C = _with_average(noise.counts).T, noise.model.n_classes

        def draw(generator: np.random.Generator, truth: Array) -> Array:
            accuracy = generator.beta(right, wrong)[annotator]
            other = (truth + generator.integers(1, C, len(truth))) % C
            return np.where(generator.random(len(truth)) < accuracy, truth, other)

        return draw


class _Confusion:
    """A confusion matrix: counts (U, C, C), true class by label."""

    per_annotator = True
    accuracy_prior = (8.0, 2.0)

    def prior(self, n_classes: int, confusion: tuple[float, float], accuracy: tuple[float, float]) -> Array:
        prior = np.full((n_classes, n_classes), confusion[1] / (n_classes - 1))
        np.fill_diagonal(prior, confusion[0])
        return prior

    def answers(self, values: Array, table: LabelTable, n_classes: int) -> Array:
        rows = np.swapaxes(values, 1, 2).reshape(-1, n_classes)  # (U C, C): annotator and label, true class
        return np.asarray(table.incidence(n_classes)[0] @ rows)

    def per_answer(self, log_noise: Array, n_classes: int) -> Array:
        return log_noise

    def log_sums(self, log_noise: Array) -> tuple[float, float]:
        right = float(np.trace(log_noise, axis1=1, axis2=2).sum())
        return right, float(log_noise.sum()) - right

    def counts(self, truth: Array, table: LabelTable) -> Array:
        U, C = table.n_annotators, truth.shape[1]
        expected = (table.incidence(C)[1] @ truth).reshape(U, C, C)  # annotator, label, true class
        return np.ascontiguousarray(np.swapaxes(expected, 1, 2))

    def right_and_wrong(self, given: Array) -> Array:
        right = np.trace(given, axis1=1, axis2=2)
        return np.stack([right, np.maximum(given.sum(axis=(1, 2)) - right, 0)], axis=1)

    def matrices(self, mean: Array, n_classes: int) -> Array:
        return mean

    def sampler(self, noise: FittedNoise, annotator: Array) -> Sampler:
        """With the expected counts and one label a row of the prior.

        The whole prior stands for a dozen labels of every class, which few annotators have given: labels simulated
        through it would be noisier than those that the matrices come from.
        """
        prior, C = noise.prior, noise.model.n_classes
        counts = noise.given + prior / prior.sum(axis=1, keepdims=True)
        counts = _with_average(counts).reshape(-1, C)  # annotator and true class by label

        def draw(generator: np.random.Generator, truth: Array) -> Array:
            needed, place = np.unique(annotator * C + truth, return_inverse=True)
            rows = np.maximum(generator.standard_gamma(counts[needed]), 1e-300)
            cumulative = np.cumsum((rows / rows.sum(axis=1, keepdims=True))[place], axis=1)
            above = generator.random(len(truth))[:, None] > cumulative
            return np.asarray(np.minimum(above.sum(axis=1), C - 1))

        return draw


NOISES: dict[str, NoiseKind | None] = {
    "none": None,
    "uniform": _Accuracy(per_annotator=False, accuracy_prior=(19.0, 0.5)),  # few errors: labels may be single
    "annotator": _Accuracy(per_annotator=True, accuracy_prior=(8.0, 2.0)),
    "confusion": _Confusion(),
}


def default_noise(labels: LabelFacts) -> str:
    """One accuracy for all where labels hardly overlap; else confusion matrices, if there are labels enough.

    Ten labels for every row of a matrix are enough; with fewer every annotator has one accuracy. From single labels a
    confusion matrix would be charged with the views' errors; one accuracy is identified by the labels that confident
    and otherwise reliable predictions contradict.
    """
    if not labels.overlap:
        return "uniform"
    n_annotators = max(1, len(labels.annotator_names))
    if labels.labels_per_value >= _MIN_ROW_LABELS * n_annotators:
        return "confusion"
    return "annotator" if n_annotators > 1 else "uniform"


def n_entries(kind: str, n_classes: int, n_annotators: int) -> int:
    """Size of the expected counts."""
    noise = NOISES[kind]
    return 0 if noise is None else noise.prior(n_classes, (1, 1), (1, 1)).size * n_annotators


def label_table(labels: LabelSets, position: Array, kind: str) -> LabelTable:
    """The labels as the noise model sees them; `position` is each label's class."""
    rows, instance = np.unique(labels.instance, return_inverse=True)
    annotator, n_annotators, noise = labels.annotator, len(labels.annotator_names), NOISES[kind]
    if annotator is None or noise is None or not noise.per_annotator:
        annotator, n_annotators = np.zeros(len(position), dtype=np.intp), 1
    return LabelTable(instance, position, annotator, labels.count, _importance(labels, rows), len(rows), n_annotators)


def _importance(labels: LabelSets, rows: Array) -> Array:
    """Weights of some instances."""
    return np.ones(len(rows)) if labels.instance_weights is None else labels.instance_weights[rows]


def _with_average(counts: Array) -> Array:
    """The counts of all annotators, and their average."""
    return np.concatenate([counts, counts.mean(axis=0, keepdims=True)])


def log_expected(counts: Array) -> Array:
    """E[ln a], E[ln(1 - a)] or E[ln A] under Q: shaped like the counts."""
    return np.asarray(special.digamma(counts) - special.digamma(counts.sum(axis=-1, keepdims=True)))


def describe(noise: FittedNoise | None, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
    """Accuracies with intervals, and confusion matrices; None without a noise model."""
    if noise is None:
        return None
    model, counts = noise.model, noise.prior + noise.given
    beta = _accuracy_counts(noise)
    levels = np.array([0.5 - 0.5 * _LEVEL, 0.5 + 0.5 * _LEVEL])
    return AnnotatorAccuracy(
        names=names if len(names) == len(counts) else ("all",),
        accuracy=beta[:, 0] / beta.sum(axis=1),
        accuracy_interval=special.betaincinv(beta[:, :1], beta[:, 1:], levels),
        confusion=model.of_kind.matrices(counts / counts.sum(axis=-1, keepdims=True), model.n_classes),
    )


def _accuracy_counts(noise: FittedNoise) -> Array:
    """Beta counts of every annotator's accuracy: (U, 2).

    The prior is that of an accuracy, which annotators share: that of confusion matrices, a few labels for every class,
    would pull with the weight of them all. Counts are reduced to the observed information (Louis): complete data have
    n / (a (1 - a)), and the truth's doubt takes sum q (1 - q) / (a (1 - a))^2 of it.
    """
    given = noise.model.of_kind.right_and_wrong(noise.given)
    if noise.doubt is not None:
        most = np.maximum(given.prod(axis=1) / np.maximum(given.sum(axis=1), 1e-300), 1e-300)  # n a (1 - a)
        given = given * np.maximum(1 - noise.doubt / most, _MIN_INFORMATION)[:, None]
    kind = "annotator" if noise.model.of_kind.per_annotator else "uniform"
    model = noise.model._replace(kind=kind, prior=np.array(noise.model.accuracy_prior), difficulty=False)
    accuracies, none = model.start(len(given)), np.zeros(0)
    for _ in range(_PRIOR_STEPS):
        accuracies = accuracies.update(NoiseSums(given, none, none, none))
    return accuracies.counts


def class_factors(
    noise: FittedNoise | None, predictions: ViewPredictions, labels: LabelSets, annotator: Array
) -> Array:
    """What the posterior of an instance's class is multiplied by, given its labels: (N, C), ones without labels.

    With a noise model this is their probability under E[A], relative to the largest. Without one, a label of the
    instance taken at random is right: the share of the labels that name the class.
    """
    n_classes = predictions.outputs.shape[2]
    position = labels.categorical(n_classes, predictions.classes)
    factors = np.ones((labels.n_instances, n_classes))
    if noise is None:
        tally = np.bincount(labels.instance * n_classes + position, labels.count, factors.size).reshape(factors.shape)
        factors[labels.labelled] = tally[labels.labelled] / tally.max(axis=1, keepdims=True)[labels.labelled]
    else:
        log_evidence = noise.label_evidence(labels, position, annotator, predictions.outputs)
        factors[labels.labelled] = np.exp(log_evidence - log_evidence.max(axis=1, keepdims=True))
    return factors


def score_labels(
    noise: FittedNoise | None,
    prediction: CategoricalPrediction,
    predictions: ViewPredictions,
    labels: LabelSets,
    annotator: Array,
) -> Array:
    """Log probability of every labelled input's labels under class probabilities and a noise model: (N+,)."""
    position = labels.categorical(prediction.proba.shape[1], predictions.classes)
    rows = labels.labelled
    tiny = np.finfo(np.float64).tiny
    if noise is None:
        each = np.log(np.maximum(prediction.proba[labels.instance, position], tiny))
        return np.asarray(np.bincount(labels.instance, labels.count * each, labels.n_instances)[rows])
    evidence = noise.label_evidence(labels, position, annotator, predictions.outputs)
    top = evidence.max(axis=1)
    likelihood = (np.exp(evidence - top[:, None]) * prediction.proba[rows]).sum(axis=1)
    return np.asarray((top + np.log(np.maximum(likelihood, tiny))) * _importance(labels, rows))


def log_mean(counts: Array) -> Array:
    """Ln E[A] under Q, which predicts labels."""
    return np.asarray(np.log(counts) - np.log(counts.sum(axis=-1, keepdims=True)))


def _strength_of(model: NoiseModel) -> Array:
    """The prior counts of a row, right and wrong: (2,)."""
    first = model.prior.reshape(-1, model.prior.shape[-1])[0]
    return np.array([first[0], first[1:].sum()])


def _prior_of(model: NoiseModel, strength: Array) -> Array:
    """The prior counts of an annotator with other counts of a row."""
    pair = (float(strength[0]), float(strength[1]))
    return model.of_kind.prior(model.n_classes, pair, pair)


def _log_strength_prior(strength: Array, model: NoiseModel) -> float:
    """Log density of the shared prior counts' logarithms."""
    deviation = np.log(strength / _strength_of(model)) / _PRIOR_SCALE
    return float(-0.5 * deviation @ deviation - 2 * np.log(_PRIOR_SCALE * np.sqrt(2 * np.pi)))
