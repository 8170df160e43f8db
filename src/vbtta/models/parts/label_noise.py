"""Label noise: what separates the labels of an instance from its true class (docs/method, eq. 22).

A kind of noise is a class with an entry in :data:`NOISES`; all that depends on the kind is there and, for ADVI, in its
torch counterpart. The parameters of annotator u, rows of probabilities, have Dirichlet priors and Dirichlet Q.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from scipy import sparse, special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction
from vbtta.inference.linalg import Reader, kl_dirichlet
from vbtta.models.parts.annotators import LabelFacts

Sampler = Callable[[np.random.Generator, Array], Array]  # labels (J,) of true classes (J,)
_LEVEL = 0.9  # of the intervals of accuracies
_MIN_ROW_LABELS = 10  # of a row of a confusion matrix
_MAX_ENTRIES = 1 << 27  # of all confusion matrices: a gigabyte


class LabelTable(NamedTuple):
    """Labels of labelled instances, which count from 0 in order."""

    instance: Array  # (J,)
    label: Array  # (J,): positions among the classes
    annotator: Array  # (J,); zeros where all are alike
    repeats: Array  # (J,): how often each label was given, times the instance's weight
    importance: Array  # (N+,): weights of the instances
    n_instances: int  # N+
    n_annotators: int

    def part(self, labels: slice, first: int, last: int) -> "LabelTable":
        """Some labels, which are those of instances from first up to last."""
        columns = (self.instance[labels] - first, self.label[labels], self.annotator[labels], self.repeats[labels])
        return LabelTable(*columns, self.importance[first:last], last - first, self.n_annotators)

    @property
    def given(self) -> Array:
        """How often each label was given: (J,)."""
        return np.asarray(self.repeats / self.importance[self.instance])


class NoiseModel(NamedTuple):
    """The kind of noise and the prior counts of one annotator."""

    kind: str  # a name in NOISES
    prior: Array  # (2,) right and wrong, or (C, C)
    n_classes: int
    accuracy_prior: tuple[float, float]  # Beta of an accuracy, right and wrong
    named: bool  # whether annotators are told apart

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
        return FittedNoise(self, np.repeat(self.prior[None], n_annotators, axis=0))

    def update(self, expected_counts: Array) -> "FittedNoise":
        """Q given expected counts."""
        return FittedNoise(self, self.prior + expected_counts)


class AnnotatorAccuracy(NamedTuple):
    """Annotators of class labels."""

    names: tuple[str, ...]
    accuracy: Array  # (U,): posterior mean of the probability that a label is right
    accuracy_interval: Array  # (U, 2): 90 %
    confusion: Array  # (U, C, C): posterior mean of A_u, true class by label


class FittedNoise(NamedTuple):
    """A noise model and the Dirichlet counts of Q."""

    model: NoiseModel
    counts: Array  # (U, 2) or (U, C, C)

    def evidence(self) -> Callable[[LabelTable], Array]:
        """A function that gives the log evidence of a table's labels for every class under E[ln A]: (N+, C)."""
        kind, C = self.model.of_kind, self.model.n_classes
        return partial(kind.log_evidence, log_noise=log_expected(self.counts), n_classes=C)

    def divergence(self) -> float:
        """KL(Q || prior), summed over annotators and rows."""
        return float(kl_dirichlet(self.counts, self.model.prior).sum())

    def pack(self) -> Array:
        """Logarithms of the counts, as a vector."""
        return np.log(self.counts).ravel()

    def unpack(self, take: Reader) -> "FittedNoise":
        """The noise of the next entries of a packed vector."""
        return self._replace(counts=np.exp(np.clip(take(*self.counts.shape), -30, 300)))

    def class_factors(self, labels: LabelSets, position: Array, annotator: Array) -> Array:
        """Evidence of an instance's labels for every class, the largest 1, under E[ln A]: (N, C), ones unlabelled."""
        log_evidence = self.label_evidence(labels, position, annotator, log_expected)
        factors = np.ones((labels.n_instances, self.model.n_classes))
        factors[labels.labelled] = np.exp(log_evidence - log_evidence.max(axis=1, keepdims=True))
        return factors

    def label_evidence(
        self, labels: LabelSets, position: Array, annotator: Array, log_noise: Callable[[Array], Array]
    ) -> Array:
        """Log evidence for every class, a row a labelled instance, given what makes log A of counts: (N+, C)."""
        # Unknown annotators (-1) have the prior's counts; where annotators are not named, one matrix is everybody's.
        counts, who = self.counts, np.zeros_like(annotator)
        if self.model.named:
            counts = np.concatenate([counts, self.model.prior[None]])
            who = np.where(annotator < 0, len(counts) - 1, annotator)
        rows, instance = np.unique(labels.instance, return_inverse=True)
        table = LabelTable(instance, position, who, labels.count, _importance(labels, rows), len(rows), len(counts))
        return self.model.of_kind.log_evidence(table, log_noise(counts), self.model.n_classes)

    def label_sampler(self, annotator: Array) -> Sampler:
        """Draws labels; `annotator` (J,) is one past the last for unknown ones, who have the average counts."""
        return self.model.of_kind.sampler(self, annotator)


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

    def log_evidence(self, table: LabelTable, log_noise: Array, n_classes: int) -> Array:
        """Sum over an instance's labels of ln A_u[c, y_ij] for every class c, given logarithms of A: (N+, C)."""

    def expected_counts(self, truth: Array, table: LabelTable) -> Array:
        """Expected counts given the probabilities of the true classes (N+, C); additive over instances."""

    def accuracy_counts(self, noise: FittedNoise) -> Array:
        """Beta counts of every annotator's accuracy: (U, 2)."""

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

    def log_evidence(self, table: LabelTable, log_noise: Array, n_classes: int) -> Array:
        N, C = table.n_instances, n_classes
        right, wrong = log_noise[table.annotator].T
        wrong = wrong - np.log(C - 1)
        evidence = np.bincount(table.instance * C + table.label, table.given * (right - wrong), N * C).reshape(N, C)
        return evidence + np.bincount(table.instance, table.given * wrong, N)[:, None]

    def expected_counts(self, truth: Array, table: LabelTable) -> Array:
        right = table.repeats * truth[table.instance, table.label]
        both = [np.bincount(table.annotator, each, table.n_annotators) for each in (right, table.repeats - right)]
        return np.stack(both, axis=1)

    def accuracy_counts(self, noise: FittedNoise) -> Array:
        return noise.counts

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

    def log_evidence(self, table: LabelTable, log_noise: Array, n_classes: int) -> Array:
        rows = np.swapaxes(log_noise, 1, 2).reshape(-1, n_classes)  # (U C, C): annotator and label, true class
        return np.asarray(self._incidence(table, table.given, n_classes) @ rows)

    def expected_counts(self, truth: Array, table: LabelTable) -> Array:
        U, C = table.n_annotators, truth.shape[1]
        expected = np.asarray(self._incidence(table, table.repeats, C).T @ truth).reshape(
            U, C, C
        )  # annotator, label, true class
        return np.ascontiguousarray(np.swapaxes(expected, 1, 2))

    def accuracy_counts(self, noise: FittedNoise) -> Array:
        """Expected counts on and off the diagonal, added to the prior of an accuracy."""
        # The prior of the matrices, a few labels for every class, would pull an accuracy with the weight of them all.
        given = np.maximum(noise.counts - noise.model.prior, 0)  # (U, C, C)
        right = np.trace(given, axis1=1, axis2=2)
        wrong = np.maximum(given.sum(axis=(1, 2)) - right, 0)
        return np.stack([right, wrong], axis=1) + noise.model.accuracy_prior

    def matrices(self, mean: Array, n_classes: int) -> Array:
        return mean

    def sampler(self, noise: FittedNoise, annotator: Array) -> Sampler:
        """With the expected counts and one label a row of the prior."""
        # The whole prior stands for a dozen labels of every class, which few annotators have given: labels simulated
        # through it would be noisier than those that the matrices come from.
        prior, C = noise.model.prior, noise.model.n_classes
        counts = np.maximum(noise.counts - prior, 0) + prior / prior.sum(axis=1, keepdims=True)
        counts = _with_average(counts).reshape(-1, C)  # annotator and true class by label

        def draw(generator: np.random.Generator, truth: Array) -> Array:
            needed, place = np.unique(annotator * C + truth, return_inverse=True)
            rows = np.maximum(generator.standard_gamma(counts[needed]), 1e-300)
            cumulative = np.cumsum((rows / rows.sum(axis=1, keepdims=True))[place], axis=1)
            above = generator.random(len(truth))[:, None] > cumulative
            return np.asarray(np.minimum(above.sum(axis=1), C - 1))

        return draw

    def _incidence(self, table: LabelTable, repeats: Array, n_classes: int) -> sparse.csr_array:
        """How often annotator u gave label y to instance i: (N+, U C)."""
        column = table.annotator * n_classes + table.label
        shape = (table.n_instances, table.n_annotators * n_classes)
        return sparse.csr_array((repeats, (table.instance, column)), shape=shape)


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
    if labels.total >= _MIN_ROW_LABELS * n_annotators * labels.n_values:
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
    model, counts = noise
    beta = model.of_kind.accuracy_counts(noise)
    levels = np.array([0.5 - 0.5 * _LEVEL, 0.5 + 0.5 * _LEVEL])
    return AnnotatorAccuracy(
        names=names if len(names) == len(counts) else ("all",),
        accuracy=beta[:, 0] / beta.sum(axis=1),
        accuracy_interval=special.betaincinv(beta[:, :1], beta[:, 1:], levels),
        confusion=model.of_kind.matrices(counts / counts.sum(axis=-1, keepdims=True), model.n_classes),
    )


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
    evidence = noise.label_evidence(labels, position, annotator, _log_mean)
    top = evidence.max(axis=1)
    likelihood = (np.exp(evidence - top[:, None]) * prediction.proba[rows]).sum(axis=1)
    return np.asarray((top + np.log(np.maximum(likelihood, tiny))) * _importance(labels, rows))


def _log_mean(counts: Array) -> Array:
    """Ln E[A] under Q, which predicts labels."""
    return np.asarray(np.log(counts) - np.log(counts.sum(axis=-1, keepdims=True)))
