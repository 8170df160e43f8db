"""Label noise: what separates the labels of an instance from its true class (docs/method, eqs. 22 to 22b).

A kind of noise is a class with an entry in :data:`NOISES`; all that depends on the kind is there and, for ADVI, in its
torch counterpart. The parameters of annotator u, rows of probabilities, have Dirichlet priors and Dirichlet Q.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from scipy import sparse, special

from vbtta.data.labels import Array, LabelSets, frame_of
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, draw_positions
from vbtta.inference.linalg import Reader, kl_dirichlet
from vbtta.models.parts.annotators import LabelFacts, brief

Sampler = Callable[[np.random.Generator, Array], Array]  # labels (J,) of true classes (J,)
_LOG_COUNTS = (-30.0, 23.0)  # of extrapolated states: beyond, divergences of Q from its prior lose their digits
_LEVEL = 0.9  # of the intervals of accuracies
_MIN_ROW_LABELS = 10  # of a row of a confusion matrix
_PRIOR_SCALE = 1.0  # standard deviation of the logarithms of the prior counts that annotators share
_COPIED = 0.4  # h: how often a label of a hard instance is its apparent class
_LEVEL_PRIOR = np.array([20.0, 6.0])  # Dirichlet counts of easy and hard instances
_NO_LEVELS = (np.zeros(0),) * 3  # statistics without item difficulty
_MAX_EXPONENT = 300.0  # of numbers whose products are finite
_MIN_ROWS = 3  # of annotators or their matrices, to infer the prior that they share
_MIN_INFORMATION = 0.05  # share of the labels that count in an accuracy's interval, at least
_MAX_RATE, _SMALL_CHANGE = 0.995, 0.01  # of EM's convergence, and share of the wrong labels that is not extrapolated
_FEW_ANSWERS = 12  # of all annotators, up to which a dense matrix of them is multiplied faster than a sparse one
_MAX_ENTRIES = 1 << 27  # of all confusion matrices: a gigabyte


class LabelGroups(NamedTuple):
    """Equal labels of an instance, taken together: G groups, in the order of the instances."""

    first: Array  # (G,): the first label of every group
    owner: Array  # (G,): the instance
    label: Array  # (G,)
    start: Array | None  # (N+,): the first group of every instance; None where each has one


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Labels of labelled instances, which count from 0, in the order of instances and classes."""

    instance: Array  # (J,)
    label: Array  # (J,): positions among the classes
    annotator: Array  # (J,); zeros where all are alike
    repeats: Array  # (J,): how often each label was given, times the instance's weight
    importance: Array  # (N+,): weights of the instances
    n_instances: int  # N+
    n_annotators: int
    apparent_class: Array | None = None  # (N+, C): G, where item difficulty is modelled
    _incidences: dict[int, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    def part(self, labels: slice, first: int, last: int) -> "LabelTable":
        """Some labels, which are those of instances from first up to last."""
        columns = (self.instance[labels] - first, self.label[labels], self.annotator[labels], self.repeats[labels])
        apparent_class = None if self.apparent_class is None else self.apparent_class[first:last]
        return LabelTable(*columns, self.importance[first:last], last - first, self.n_annotators, apparent_class)

    @cached_property
    def given(self) -> Array:
        """How often each label was given: (J,)."""
        return np.asarray(self.repeats / self.importance[self.instance])

    @cached_property
    def groups(self) -> LabelGroups:
        """Equal labels of every instance."""
        new = (np.diff(self.instance) != 0) | (np.diff(self.label) != 0)
        first = np.flatnonzero(np.concatenate([[True], new]))
        owner = self.instance[first]
        start = None if len(owner) == self.n_instances else np.searchsorted(owner, np.arange(self.n_instances))
        return LabelGroups(first, owner, self.label[first], start)

    @cached_property
    def apparent(self) -> tuple[Array, Array, Array]:
        """G of every group's label (G, 1), of the classes that no label names (N+, 1), and how many labels (N+, 1)."""
        assert self.apparent_class is not None
        apparent_class = self.apparent_class[self.groups.owner, self.groups.label][:, None]
        total = np.bincount(self.instance, self.given, self.n_instances)[:, None]
        return apparent_class, np.maximum(1 - self.over_groups(apparent_class), 0), total

    def incidence(self, n_answers: int) -> tuple[Any, Any]:
        """How often a group has an annotator's answer, (G, U A), and the same with the instances' weights, (U A, G).

        The matrices are sparse unless small. With one answer, A = 1, labels are told apart by their annotators alone.
        """
        if n_answers not in self._incidences:
            answer = self.annotator * n_answers + (self.label if n_answers > 1 else 0)
            ends = np.append(self.groups.first, len(answer))
            shape = len(self.groups.first), self.n_annotators * n_answers
            answered = sparse.csr_array((self.given, answer, ends), shape=shape)
            counted = sparse.csc_array((self.repeats, answer, ends), shape=shape[::-1])
            few = shape[1] <= _FEW_ANSWERS
            self._incidences[n_answers] = (answered.toarray(), counted.toarray()) if few else (answered, counted)
        return self._incidences[n_answers]

    @cached_property
    def members(self) -> sparse.csr_array:
        """Which groups are an instance's: (N+, G)."""
        n_groups = len(self.groups.first)
        ends = np.append(np.arange(n_groups) if self.groups.start is None else self.groups.start, n_groups)
        return sparse.csr_array((np.ones(n_groups), np.arange(n_groups), ends), shape=(self.n_instances, n_groups))

    def over_groups(self, values: Array) -> Array:
        """Sums of the groups' values (G, c) for every instance."""
        return values if self.groups.start is None else np.asarray(self.members @ values)

    def by_group(self, values: Array) -> Array:
        """Values of the instances (N+, c) for every group."""
        return values if self.groups.start is None else np.take(values, self.groups.owner, axis=0)


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
                f"noise={self.kind!r} would need {n_annotators} matrices of {self.n_classes} x {self.n_classes}; "
                "use noise='annotator', one accuracy each"
            )
        counts = np.repeat(self.prior[None], n_annotators, axis=0)
        several = self.of_kind.per_annotator and counts.size // counts.shape[-1] >= _MIN_ROWS
        start = FittedNoise(self, counts, _strength_of(self) if several else None)
        return start._replace(levels=_LEVEL_PRIOR, tally=np.zeros_like(counts)) if self.difficulty else start


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
        return frame_of({"accuracy": self.accuracy, "low": low, "high": high}, list(self.names))


class NoiseSums(NamedTuple):
    """Additive expected counts; with item difficulty those that draws of the annotators' rows explain."""

    counts: Array  # (U, 2) or (U, C, C)
    doubt: Array  # (U,): sum over labels of q (1 - q), q the probability that the label is right
    tally: Array  # counts of all labels; () without item difficulty
    levels: Array  # (E,); () without item difficulty
    level_doubt: Array  # (): sum over instances of q (1 - q), q the probability that it is hard


class FittedNoise(NamedTuple):
    """A noise model and the Dirichlet counts of Q."""

    model: NoiseModel
    counts: Annotated[Array, "U 2|U C C"]  # (U, 2) or (U, C, C)
    strength: Annotated[Array, "2"] | None = None  # prior counts, right and wrong, that annotators share
    levels: Annotated[Array, "E"] | None = None  # of the levels of difficulty
    tally: Annotated[Array, "U 2|U C C"] | None = None  # counts of all labels, without the prior
    doubt: Annotated[Array, "U"] | None = None  # as in NoiseSums

    def validate(self) -> None:
        """Refuse what no fit finds; for noise that was read from a file."""
        if not all((part > 0).all() for part in (self.counts, self.strength, self.levels) if part is not None):
            raise ValueError("counts, strength and levels of the noise must be positive")
        if self.levels is not None and self.levels.shape != _LEVEL_PRIOR.shape:
            raise ValueError(f"the noise has {len(self.levels)} levels of difficulty, not {len(_LEVEL_PRIOR)}")

    @property
    def prior(self) -> Array:
        """The prior counts of one annotator."""
        if self.strength is None:
            return self.model.prior
        right, wrong = self.strength.tolist()
        return self.model.of_kind.prior(self.model.n_classes, (right, wrong), (right, wrong))

    @property
    def expected(self) -> Array:
        """Expected counts of true classes and labels, without the prior: like `counts`."""
        return np.maximum(self.counts - self.prior, 0) if self.tally is None else self.tally

    def resume(self, previous: "FittedNoise | None") -> "FittedNoise":
        """`previous`, the noise of another fit, if it has the same form; else this noise."""
        if previous is None or (previous.model.kind, previous.counts.shape) != (self.model.kind, self.counts.shape):
            return self
        forms = [(noise.levels is None, noise.strength is None) for noise in (previous, self)]
        return previous._replace(model=self.model) if forms[0] == forms[1] else self

    def reader(self) -> Callable[[LabelTable], "LabelReading"]:
        """A function that reads a table's labels under E[ln A] and E[ln pi]; serialised to workers."""
        log_levels = None if self.levels is None else log_expected(self.levels)
        return partial(LabelReading, self.model.of_kind, log_expected(self.counts), log_levels, self.model.n_classes)

    def update(self, sums: NoiseSums) -> "FittedNoise":
        """Q given expected counts, and the prior counts that annotators share."""
        strength = None if self.strength is None else self._shared_prior(sums.counts)
        updated = self._replace(strength=strength, doubt=sums.doubt if len(sums.doubt) else None)
        if self.levels is not None:
            updated = updated._replace(levels=_LEVEL_PRIOR + sums.levels, tally=sums.tally)
        return updated._replace(counts=updated.prior + sums.counts)

    def extrapolated(self, before: "FittedNoise", sums: NoiseSums) -> "FittedNoise | None":
        """Accuracies and levels after many updates like that from `before` (Aitken); None where about the same.

        EM converges at the rate sum q (1 - q) / (n a (1 - a)), the share of the information that the truths take.
        """
        counts, levels, pairs = self.counts, self.levels, []
        if counts.ndim == 2:
            counts = _aitken(before.counts - before.prior, counts, self.prior, sums.doubt)
            pairs.append((counts, self.counts))
        if self.levels is not None and before.levels is not None:
            levels = _aitken(before.levels - _LEVEL_PRIOR, self.levels, _LEVEL_PRIOR, sums.level_doubt)
            pairs.append((levels, self.levels))
        moved = any((np.abs(new - old) > _SMALL_CHANGE * old)[..., 1].any() for new, old in pairs)
        return self._replace(counts=counts, levels=levels) if moved else None

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
        counts = np.exp(np.clip(take(*self.counts.shape), *_LOG_COUNTS))
        levels = None if self.levels is None else np.exp(np.clip(take(len(self.levels)), *_LOG_COUNTS))
        return self._replace(counts=counts, levels=levels)

    def _shared_prior(self, counts: Array) -> Array:
        """The prior counts of a row after a Newton step in their logarithms, the rows integrated out given counts."""
        model, strength = self.model, self.strength
        right, wrong = model.of_kind.split(counts)  # (R,) and (R, cells)
        centre, cells, total = _strength_of(model), wrong.shape[1], right + wrong.sum(axis=1)

        def height(a: float, b: float) -> float:
            rows = special.gammaln(a + right) - special.gammaln(a + b + total)
            cell = special.gammaln(b / cells + wrong).sum() - wrong.size * special.gammaln(b / cells)
            norm = len(right) * (special.gammaln(a + b) - special.gammaln(a))
            return float(rows.sum() + norm + cell + _log_strength_prior(np.array([a, b]), model))

        def rises(function: Callable[[Any], Any]) -> tuple[float, float, float]:
            """Differences that the labels make to a function of a, b / cells and a + b."""
            of_right, of_both = function(a + right) - function(a), function(a + b) - function(a + b + total)
            return of_right.sum(), (function(b / cells + wrong) - function(b / cells)).sum(), of_both.sum()

        assert strength is not None
        (a, b), before = strength, height(*strength)
        of_right, of_wrong, of_both = rises(special.digamma)
        slope = np.array([of_right + of_both, of_wrong / cells + of_both]) * strength
        of_right, of_wrong, of_both = rises(_trigamma)
        bend = np.diag([of_right, of_wrong / cells**2]) + of_both
        hessian = bend * np.outer(strength, strength) + np.diag(slope - _PRIOR_SCALE**-2)
        slope -= np.log(strength / centre) / _PRIOR_SCALE**2
        values, vectors = np.linalg.eigh(hessian)
        step = vectors @ ((slope @ vectors) / np.maximum(np.abs(values), _PRIOR_SCALE**-2))
        step /= max(1, np.abs(step).max())
        candidates = (strength * np.exp(fraction * step) for fraction in (1.0, 0.5, 0.1, 0.01))
        return next((candidate for candidate in candidates if height(*candidate) >= before), strength)

    def label_evidence(self, labels: LabelSets, annotator: Array, predictions: ViewPredictions) -> Array:
        """Log probability of an instance's labels under E[A] for every class, given the views: (N+, C).

        Unknown annotators (-1) are the average of the known; where annotators are not named, one matrix is everybody's.
        """
        counts, person = self.counts, np.zeros_like(annotator)
        if self.model.named:
            counts = _with_average(counts)
            person = np.where(annotator < 0, len(counts) - 1, annotator)
        position = labels.categorical(self.model.n_classes, predictions.classes)
        table, log_levels = _table(labels, position, person, len(counts)), None
        if self.levels is not None:
            apparent_class = apparent_proba(predictions.outputs[labels.labelled])
            table, log_levels = replace(table, apparent_class=apparent_class), log_mean(self.levels)
        return LabelReading(self.model.of_kind, log_mean(counts), log_levels, self.model.n_classes, table).log_evidence

    def label_sampler(self, annotator: Array, instance: Array, outputs: Array) -> Sampler:
        """Draws labels of instances (J,) with outputs (N, K, C); error rates are drawn from Q every time.

        `annotator` (J,) is one past the last for unknown ones, who have the average counts.
        """
        prior, model, levels = self.prior, self.model, self.levels
        if self.counts.ndim == 3:
            # A row of the prior stands for a dozen labels of a class, which few annotators have given: labels simulated
            # through it would be noisier than those that the matrices come from. It counts as one label.
            prior = prior / prior.sum(axis=1, keepdims=True)
        counts = _with_average(np.maximum(self.counts - self.prior, 0) + prior)
        apparent_class = None if levels is None else apparent_proba(outputs)  # (N, C)

        def draw(generator: np.random.Generator, truth: Array) -> Array:
            rows = np.maximum(generator.standard_gamma(counts), 1e-300)
            matrices = model.of_kind.matrices(rows / rows.sum(axis=-1, keepdims=True), model.n_classes)
            own = draw_positions(generator, matrices[annotator, truth])
            if levels is None or apparent_class is None:
                return own
            share = generator.choice([0.0, _COPIED], size=len(apparent_class), p=generator.dirichlet(levels))  # (N,)
            same = generator.random(len(truth)) < share[instance]
            return np.where(same, draw_positions(generator, apparent_class)[instance], own)

        return draw


class LabelReading:
    """Labels of a table under given ln A and, with item difficulty, ln pi."""

    def __init__(
        self, kind: "NoiseKind", log_noise: Array, log_levels: Array | None, n_classes: int, table: LabelTable
    ) -> None:
        self._kind, self._table = kind, table
        self._hard: Array | None = None
        log_answer = kind.per_answer(log_noise, n_classes)
        self.log_evidence = table.over_groups(kind.answers(log_answer, table, n_classes))  # (N+, C)
        if log_levels is None:
            return
        apparent_class, others, total = table.apparent
        odds = _COPIED / (1 - _COPIED) * np.exp(-log_answer)
        self._copied = odds / (1 + odds)  # P(a label is copied | it is the apparent class)
        gain = kind.answers(np.log1p(odds), table, n_classes)  # ln of the product of 1 + odds: (G, C)
        top = np.zeros((1, 1))
        if gain.max(initial=0) > _MAX_EXPONENT:
            top = gain.copy() if table.groups.start is None else np.maximum.reduceat(gain, table.groups.start)
            gain -= table.by_group(top)
        apparent = np.exp(gain, out=gain)
        apparent *= apparent_class
        scale = table.over_groups(apparent)
        scale = scale + others * np.exp(-top)  # (N+, C)
        apparent /= table.by_group(scale)
        self._apparent = apparent  # P(d_i is the group's label): (G, C)
        log_odds = np.log(scale) + (top + log_levels[1] - log_levels[0] + total * np.log1p(-_COPIED))  # of being hard
        smaller = np.exp(-np.abs(log_odds))
        self._hard = np.where(log_odds > 0, 1, smaller) / (1 + smaller)  # given the class: (N+, C)
        self.log_evidence = self.log_evidence + (np.log1p(smaller) + np.maximum(log_odds, 0) + log_levels[0])

    def sums(self, truth: Array) -> NoiseSums:
        """Expected counts given the probabilities of the true classes (N+, C)."""
        kind, table = self._kind, self._table
        of_groups = table.by_group(truth)
        right = of_groups[np.arange(len(of_groups)), table.groups.label]
        doubt = table.incidence(1)[1] @ (right * (1 - right))
        tally = kind.counts(of_groups, table)
        if self._hard is None:
            return NoiseSums(tally, doubt, *_NO_LEVELS)
        hard = self._hard * truth
        own = tally - self._copied * kind.counts(table.by_group(hard) * self._apparent, table)
        share = np.vecdot(self._hard, truth)
        levels = np.array([table.importance @ (1 - share), table.importance @ share])
        return NoiseSums(np.maximum(own, 0), doubt, tally, levels, np.asarray(table.importance @ (share * (1 - share))))


def apparent_proba(outputs: Array) -> Array:
    """The softmax of the average over views of logits (n, K, C), G: (n, C)."""
    return np.asarray(special.softmax(outputs.mean(axis=1, dtype=np.float64), axis=1))


@dataclass(frozen=True)
class _Accuracy:
    """A label is right with probability a_u, else any other class: counts (U, 2) of right and wrong."""

    per_annotator: bool
    accuracy_prior: tuple[float, float]

    def prior(self, n_classes: int, confusion: tuple[float, float], accuracy: tuple[float, float]) -> Array:
        """Prior counts of one annotator."""
        return np.array(accuracy, dtype=np.float64)

    def answers(self, values: Array, table: LabelTable, n_classes: int) -> Array:
        """Sums of values like the parameters over the labels of every group, for all true classes: (G, C)."""
        right, wrong = (table.incidence(1)[0] @ values).T
        rows = np.repeat(wrong[:, None], n_classes, axis=1)
        rows[np.arange(len(right)), table.groups.label] = right
        return rows

    def per_answer(self, log_noise: Array, n_classes: int) -> Array:
        """Logarithms of A's entries, shaped like the parameters."""
        return np.asarray(log_noise - [0, np.log(n_classes - 1)])

    def split(self, counts: Array) -> tuple[Array, Array]:
        """Right answers of every row, (R,), and all kinds of wrong ones."""
        return counts[:, 0], counts[:, 1:]

    def counts(self, truth: Array, table: LabelTable) -> Array:
        """Expected counts given the probabilities of every group's true class (G, C)."""
        right = truth[np.arange(len(truth)), table.groups.label]
        return np.asarray(table.incidence(1)[1] @ np.stack([right, truth @ np.ones(truth.shape[1]) - right], axis=1))

    def right_and_wrong(self, counts: Array) -> Array:
        """Expected counts of right and wrong labels: (U, 2)."""
        return counts

    def matrices(self, mean: Array, n_classes: int) -> Array:
        """Confusion matrices (U, C, C) of the parameters."""
        wrong, diagonal = mean[:, 1] / (n_classes - 1), np.arange(n_classes)
        confusion = np.repeat(wrong, n_classes**2).reshape(-1, n_classes, n_classes)
        confusion[:, diagonal, diagonal] = mean[:, :1]
        return confusion


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

    def split(self, counts: Array) -> tuple[Array, Array]:
        C = counts.shape[-1]
        return np.diagonal(counts, axis1=1, axis2=2).ravel(), counts[:, ~np.eye(C, dtype=bool)].reshape(-1, C - 1)

    def counts(self, truth: Array, table: LabelTable) -> Array:
        U, C = table.n_annotators, truth.shape[1]
        expected = (table.incidence(C)[1] @ truth).reshape(U, C, C)  # annotator, label, true class
        return np.ascontiguousarray(np.swapaxes(expected, 1, 2))

    def right_and_wrong(self, counts: Array) -> Array:
        right = np.trace(counts, axis1=1, axis2=2)
        return np.stack([right, np.maximum(counts.sum(axis=(1, 2)) - right, 0)], axis=1)

    def matrices(self, mean: Array, n_classes: int) -> Array:
        return mean


NoiseKind = _Accuracy | _Confusion
NOISES: dict[str, NoiseKind | None] = {
    "none": None,
    "uniform": _Accuracy(per_annotator=False, accuracy_prior=(19.0, 0.5)),  # few errors: labels may be single
    "annotator": _Accuracy(per_annotator=True, accuracy_prior=(8.0, 2.0)),
    "confusion": _Confusion(),
}


def default_noise(labels: LabelFacts) -> str:
    """One accuracy for all where labels hardly overlap; else confusion matrices, if there are labels enough.

    Ten labels for every row of a matrix are enough; with fewer every annotator has one accuracy (docs/method, eq. 22).
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
    annotator, n_annotators, noise = labels.annotator, len(labels.annotator_names), NOISES[kind]
    if annotator is None or noise is None or not noise.per_annotator:
        annotator, n_annotators = np.zeros(len(position), dtype=np.intp), 1
    return _table(labels, position, annotator, n_annotators)


def _table(labels: LabelSets, position: Array, annotator: Array, n_annotators: int) -> LabelTable:
    rows, order = labels.labelled, np.lexsort((position, labels.instance))
    instance = np.searchsorted(rows, labels.instance[order])
    columns = (position[order], annotator[order], labels.count[order])
    return LabelTable(instance, *columns, _importance(labels, rows), len(rows), n_annotators)


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
    model, counts = noise.model, noise.prior + noise.expected
    beta = _accuracy_counts(noise)
    levels = np.array([0.5 - 0.5 * _LEVEL, 0.5 + 0.5 * _LEVEL])
    return AnnotatorAccuracy(
        names=names if len(names) == len(counts) else ("all",),
        accuracy=beta[:, 0] / beta.sum(axis=1),
        accuracy_interval=special.betaincinv(beta[:, :1], beta[:, 1:], levels),
        confusion=model.of_kind.matrices(counts / counts.sum(axis=-1, keepdims=True), model.n_classes),
    )


def _accuracy_counts(noise: FittedNoise) -> Array:
    """Beta counts of every annotator's accuracy, (U, 2), without the pull of their common prior (docs/method)."""
    kind, prior = noise.model.of_kind, np.array(noise.model.accuracy_prior)
    expected = kind.right_and_wrong(noise.expected)
    right, n = expected[:, 0], np.maximum(expected.sum(axis=1), 1e-300)
    share = np.ones(len(n))
    if noise.doubt is not None:
        share = np.maximum(1 - noise.doubt / np.maximum(expected.prod(axis=1) / n, 1e-300), _MIN_INFORMATION)
    if kind.per_annotator and len(n) >= _MIN_ROWS:
        average = (right.sum() + prior[0] / prior.sum()) / (n.sum() + 1)
        prior = np.array([average, 1 - average])
        if noise.counts.ndim == 2:  # the step is for one parameter an annotator
            own = np.maximum(noise.counts - noise.prior, 0)
            gap = own[:, 0] / np.maximum(own.sum(axis=1), 1e-300) - noise.counts[:, 0] / noise.counts.sum(axis=1)
            right = np.clip(right + n * np.minimum(1 / share - 1, 1) * gap, 0, n)
    counts = prior + np.stack([right, n - right], axis=1)
    return np.asarray(counts * ((prior.sum() + share * n) / (prior.sum() + n))[:, None])


def class_factors(
    noise: FittedNoise | None, predictions: ViewPredictions, labels: LabelSets, annotator: Array
) -> Array:
    """What the posterior of an instance's class is multiplied by, given its labels: (N, C), ones without labels.

    With a noise model this is their probability under E[A], relative to the largest. Without one, a label of the
    instance taken at random is right: the share of the labels that name the class.
    """
    n_classes = predictions.outputs.shape[2]
    factors = np.ones((labels.n_instances, n_classes))
    if noise is None:
        position = labels.categorical(n_classes, predictions.classes)
        tally = np.bincount(labels.instance * n_classes + position, labels.count, factors.size).reshape(factors.shape)
        factors[labels.labelled] = tally[labels.labelled] / tally.max(axis=1, keepdims=True)[labels.labelled]
    else:
        log_evidence = noise.label_evidence(labels, annotator, predictions)
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
    rows, tiny = labels.labelled, np.finfo(np.float64).tiny
    if noise is None:
        position = labels.categorical(prediction.proba.shape[1], predictions.classes)
        log_score = np.log(np.maximum(prediction.proba[labels.instance, position], tiny))
        return np.asarray(np.bincount(labels.instance, labels.count * log_score, labels.n_instances)[rows])
    evidence = noise.label_evidence(labels, annotator, predictions)
    top = evidence.max(axis=1)
    likelihood = (np.exp(evidence - top[:, None]) * prediction.proba[rows]).sum(axis=1)
    return np.asarray((top + np.log(np.maximum(likelihood, tiny))) * _importance(labels, rows))


def _aitken(before: Array, counts: Array, prior: Array, doubt: Array) -> Array:
    """Where updates of pairs of counts (..., 2) end, given those before without their prior; the same if of others."""
    total, change = counts.sum(axis=-1), counts - prior - before
    if (np.abs(change.sum(axis=-1)) > _SMALL_CHANGE * total).any():
        return counts
    rate = np.minimum(doubt * _trigamma(counts).sum(axis=-1), _MAX_RATE)
    first = np.clip(counts[..., 0] + rate / (1 - rate) * change[..., 0], prior[0], total - prior[1])
    return np.stack([first, total - first], axis=-1)


def _trigamma(x: Any) -> Any:
    """The second derivative of ln Gamma to four digits, several times faster than SciPy's."""
    inverse = 1 / (x + 2)
    series = inverse * (1 + inverse * (0.5 + inverse * (1 / 6 - inverse**2 / 30)))
    return 1 / x**2 + 1 / (x + 1) ** 2 + series


def log_mean(counts: Array) -> Array:
    """Ln E[A] under Q, which predicts labels."""
    return np.asarray(np.log(counts) - np.log(counts.sum(axis=-1, keepdims=True)))


def _strength_of(model: NoiseModel) -> Array:
    """The prior counts of a row, right and wrong: (2,)."""
    first = model.prior.reshape(-1, model.prior.shape[-1])[0]
    return np.array([first[0], first[1:].sum()])


def _log_strength_prior(strength: Array, model: NoiseModel) -> float:
    """Log density of the shared prior counts' logarithms."""
    deviation = np.log(strength / _strength_of(model)) / _PRIOR_SCALE
    return float(-0.5 * deviation @ deviation - 2 * np.log(_PRIOR_SCALE * np.sqrt(2 * np.pi)))
