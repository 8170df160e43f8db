"""What stands between the true class and a label: nothing, one accuracy, accuracies, or confusion matrices.

    y_ij | t_i = c ~ Categorical(A_u[c, :])

"uniform" and "annotator": A_u has a_u on the diagonal and (1 - a_u)/(C - 1) off it, a_u ~ Beta, one for all or
one an annotator. "confusion": rows of A_u ~ Dirichlet, one matrix an annotator, or one for all where nobody is
named. Q(a_u) is a Beta, a Dirichlet of two, and Q(A_u) a Dirichlet a row, so one array of counts describes
either: (U, 2), right and wrong, or (U, C, C), true class and label (docs/method, "Categorical outputs").
"""

__all__ = [
    "AnnotatorAccuracy",
    "LabelTable",
    "NoiseModel",
    "default_noise",
    "describe",
    "divergence",
    "expected_counts",
    "label_table",
    "log_evidence",
    "log_expected",
    "n_entries",
    "noise_model",
    "start",
    "update",
]

from typing import NamedTuple

import numpy as np
from scipy import sparse, special

from vbtta.infer.matrices import kl_dirichlet
from vbtta.labels import Array, LabelSets
from vbtta.specs import CategoricalLatent, CategoricalMixture, CategoricalNoise

_LEVEL = 0.9  # of the intervals of accuracies
_MOST_ENTRIES = 1 << 27  # of all confusion matrices: a gigabyte


class NoiseModel(NamedTuple):
    """The kind of noise and the prior counts of one annotator."""

    kind: str  # "uniform", "annotator" or "confusion"
    prior: Array  # (2,) right and wrong, or (C, C)
    n_classes: int
    accuracy_prior: tuple[float, float]  # Beta of an accuracy, right and wrong


class LabelTable(NamedTuple):
    """Labels of labelled instances, which count from 0 in order."""

    instance: Array  # (J,)
    label: Array  # (J,): positions among the classes
    annotator: Array  # (J,); zeros where all are alike
    repeats: Array  # (J,): how often each label was given
    n_instances: int  # N+
    n_annotators: int


class AnnotatorAccuracy(NamedTuple):
    """Annotators of class labels."""

    names: tuple[str, ...]
    accuracy: Array  # (U,): posterior mean of the probability that a label is right
    accuracy_interval: Array  # (U, 2): 90 %
    confusion: Array  # (U, C, C): posterior mean of A_u, true class by label


def default_noise(labels: LabelSets) -> CategoricalNoise:
    """Confusion where at least 20 instances, or a tenth of the labelled ones, carry two labels or more; else none.

    From single labels a confusion matrix invents noise: what a view gets wrong is charged to the annotators.

    Examples
    --------
    >>> default_noise(LabelSets.from_array([0, 1, 1]))
    'none'
    >>> default_noise(LabelSets.from_array([[0, 0], [1, 0], [1, 1]]))
    'confusion'
    """
    return "confusion" if labels.overlap else "none"


def noise_model(kind: str, n_classes: int, spec: CategoricalMixture | CategoricalLatent) -> NoiseModel | None:
    """The noise model of a specification; None for "none"."""
    if kind == "none":
        return None
    if kind == "confusion":
        diagonal, off = spec.confusion_prior
        prior = np.full((n_classes, n_classes), off / (n_classes - 1))
        np.fill_diagonal(prior, diagonal)
        return NoiseModel(kind, prior, n_classes, spec.accuracy_prior)
    return NoiseModel(kind, np.array(spec.accuracy_prior, dtype=np.float64), n_classes, spec.accuracy_prior)


def label_table(labels: LabelSets, position: Array, kind: str) -> LabelTable:
    """The labels as the noise model sees them; `position` is each label's class."""
    rows, instance = np.unique(labels.instance, return_inverse=True)
    named = labels.annotator is not None and kind in ("annotator", "confusion")
    annotator = labels.annotator if named and labels.annotator is not None else np.zeros(len(position), dtype=np.intp)
    people = len(labels.annotator_names) if named else 1
    return LabelTable(instance, position, annotator, labels.count, len(rows), people)


def start(model: NoiseModel, n_annotators: int) -> Array:
    """Everybody as good as the prior says."""
    if n_annotators * model.prior.size > _MOST_ENTRIES:
        raise ValueError(
            f"noise='confusion' would need {n_annotators} matrices of {model.n_classes} x {model.n_classes}; "
            "use noise='annotator', one accuracy each"
        )
    return np.repeat(model.prior[None], n_annotators, axis=0)


def log_expected(counts: Array) -> Array:
    """E[ln a], E[ln(1 - a)] or E[ln A] under Q: shaped like the counts."""
    return np.asarray(special.digamma(counts) - special.digamma(counts.sum(axis=-1, keepdims=True)))


def log_evidence(model: NoiseModel, log_noise: Array, table: LabelTable) -> Array:
    """Sum over an instance's labels of ln A_u[c, y_ij], for every class c: (N+, C).

    `log_noise` is shaped like the counts and holds :func:`log_expected`, or any other logarithms of A.
    """
    N, C = table.n_instances, model.n_classes
    if model.kind == "confusion":
        rows = np.swapaxes(log_noise, 1, 2).reshape(-1, C)  # (U C, C): annotator and label, true class
        return np.asarray(_incidence(table, C) @ rows)
    right, wrong = log_noise[table.annotator].T
    wrong = wrong - np.log(C - 1)
    evidence = np.bincount(table.instance * C + table.label, table.repeats * (right - wrong), N * C).reshape(N, C)
    return evidence + np.bincount(table.instance, table.repeats * wrong, N)[:, None]


def update(model: NoiseModel, truth: Array, table: LabelTable) -> Array:
    """Q given the probabilities of the true classes (N+, C): prior plus expected counts."""
    return model.prior + expected_counts(model, truth, table)


def expected_counts(model: NoiseModel, truth: Array, table: LabelTable) -> Array:
    """How often labels were right and wrong (U, 2), or what was called what (U, C, C), in expectation; additive."""
    U, C = table.n_annotators, model.n_classes
    if model.kind == "confusion":
        expected = np.asarray(_incidence(table, C).T @ truth).reshape(U, C, C)  # annotator, label, true class
        return np.ascontiguousarray(np.swapaxes(expected, 1, 2))
    right = table.repeats * truth[table.instance, table.label]
    both = [np.bincount(table.annotator, right, U), np.bincount(table.annotator, table.repeats - right, U)]
    return np.stack(both, axis=1)


def n_entries(kind: str, n_classes: int, n_annotators: int) -> int:
    """Size of the expected counts."""
    return {"none": 0, "confusion": n_classes * n_classes}.get(kind, 2) * n_annotators


def divergence(model: NoiseModel, counts: Array) -> float:
    """KL(Q || prior), all annotators and rows together."""
    return float(kl_dirichlet(counts, model.prior).sum())


def describe(model: NoiseModel, counts: Array, names: tuple[str, ...]) -> AnnotatorAccuracy:
    """Accuracies with intervals, and confusion matrices.

    An annotator's accuracy under "confusion" is that of the labels given, whichever their classes: a Beta of the
    expected counts on and off the diagonal, added to the prior of an accuracy. The prior of the matrices, a few labels
    for every class, would pull an accuracy with the weight of them all.
    """
    C = model.n_classes
    mean = counts / counts.sum(axis=-1, keepdims=True)
    if model.kind == "confusion":
        given = np.maximum(counts - model.prior, 0)  # (U, C, C)
        right = np.trace(given, axis1=1, axis2=2)
        beta = np.stack([right, np.maximum(given.sum(axis=(1, 2)) - right, 0)], axis=1) + model.accuracy_prior
        accuracy, confusion = beta[:, 0] / beta.sum(axis=1), mean
    else:
        beta, accuracy = counts, mean[:, 0]
        confusion = np.repeat((mean[:, 1] / (C - 1))[:, None, None] * np.ones((C, C)), 1, axis=0)
        confusion[:, np.arange(C), np.arange(C)] = accuracy[:, None]
    levels = np.array([0.5 - 0.5 * _LEVEL, 0.5 + 0.5 * _LEVEL])
    interval = special.betaincinv(beta[:, :1], beta[:, 1:], levels)
    names = names if len(names) == len(counts) else ("all",)
    return AnnotatorAccuracy(names, accuracy, interval, confusion)


def _incidence(table: LabelTable, n_classes: int) -> sparse.csr_array:
    """How often annotator u gave label y to instance i: (N+, U C)."""
    column = table.annotator * n_classes + table.label
    shape = (table.n_instances, table.n_annotators * n_classes)
    return sparse.csr_array((table.repeats, (table.instance, column)), shape=shape)
