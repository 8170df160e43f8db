"""A fitted mixture of views for class labels: what remains when the data are gone, and what it predicts."""

__all__ = ["CategoricalPosterior", "LabelReader", "class_names", "joint_information", "row_blocks", "score_labels"]

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.calibration import Calibration
from vbtta.infer.categorical import Likelihood, components
from vbtta.infer.categorical_data import check_logits, shifted
from vbtta.infer.intervals import WeightInformation, weight_intervals
from vbtta.infer.label_noise import AnnotatorAccuracy, NoiseModel
from vbtta.labels import Array, LabelSets
from vbtta.predictions import CategoricalPrediction, ViewPredictions

_ENTRIES = 1 << 18  # of a block of logits


@dataclass(frozen=True)
class LabelReader:
    """Reads label sets through a fitted noise model."""

    noise: NoiseModel
    counts: Array  # (U, 2) or (U, C, C)
    named: bool

    def log_evidence(self, labels: LabelSets, position: Array, annotator: Array, *, expected: bool) -> Array:
        """Log evidence for every class, a row a labelled instance: (N+, C).

        Under E[ln A], as the fit has it, or with `expected` under E[A], which predicts labels. Strangers (-1) are
        as good as the prior says; where nobody was named, one matrix is everybody's.
        """
        counts, who = self.counts, np.zeros_like(annotator)
        if self.named:
            counts = np.concatenate([counts, self.noise.prior[None]])
            who = np.where(annotator < 0, len(counts) - 1, annotator)
        rows, instance = np.unique(labels.instance, return_inverse=True)
        table = label_noise.LabelTable(instance, position, who, labels.count, len(rows), len(counts))
        if expected:
            log_noise = np.log(counts) - np.log(counts.sum(axis=-1, keepdims=True))
        else:
            log_noise = label_noise.log_expected(counts)
        return label_noise.log_evidence(self.noise, log_noise, table)


@dataclass(frozen=True)
class CategoricalPosterior:
    """A fitted categorical mixture: calibrated views, their weights and, where modelled, the label noise."""

    link: str
    weights: Array  # (K,)
    class_weights: Array | None  # (K, C)
    calibration: Calibration
    noise: NoiseModel | None
    noise_counts: Array | None  # (U, 2) or (U, C, C)
    named: bool
    information: WeightInformation | None

    @property
    def gain(self) -> float:
        """Views are calibrated one by one: the pool has no gain of its own."""
        return 1.0

    @property
    def kappa(self) -> Array:
        """The inverse temperatures of the views: (K,)."""
        return np.exp(self.calibration.log_kappa)

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        if self.information is None:
            raise ValueError("this policy has no intervals: it is a step on the way, not the end of a fit")
        return weight_intervals(self.weights, self.information, level)

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Class probabilities for inputs whose views are those of positive weight, in order."""
        N, _, C = predictions.mean.shape
        proba, information = np.empty((N, C)), np.empty(N)
        for rows, joint in self._joint(predictions):
            proba[rows], information[rows] = joint.sum(axis=1).T, joint_information(joint)
        return CategoricalPrediction(proba, information, class_names(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The true class of every input given its labels; `annotator` (J,) is -1 for people the fit did not meet.

        Without a noise model: the views' predictions under the posterior of the view given all labels.
        """
        N, _, C = predictions.mean.shape
        position = labels.categorical(C, predictions.classes)
        evidence = np.zeros((N, C))
        reader = self._reader()
        if reader is not None:
            evidence[labels.labelled] = reader.log_evidence(labels, position, annotator, expected=False)
        proba, information = np.empty((N, C)), np.empty(N)
        for rows, joint in self._joint(predictions):
            if reader is not None:
                found = evidence[rows].T
                joint *= np.exp(found - found.max(axis=0))[:, None]
            else:
                joint *= _view_evidence(joint, labels, position, rows)
            joint /= joint.sum(axis=(0, 1))
            proba[rows], information[rows] = joint.sum(axis=1).T, joint_information(joint)
        return CategoricalPrediction(proba, information, class_names(predictions))

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, noise included: (N+,)."""
        return score_labels(self.predict(predictions), labels, annotator, self._reader(), predictions)

    def keep(self, views: Array) -> "CategoricalPosterior":
        """The same with only some of the views."""
        weights, by_class, known = self.weights[views], self.class_weights, self.information
        if by_class is not None:
            by_class = by_class[views] / np.maximum(by_class[views].sum(axis=0), 1e-300)
        if known is not None:
            centre = known.centre[views] / max(known.centre[views].sum(), 1e-300)
            known = WeightInformation(centre, known.information[np.ix_(views, views)], known.profile[views])
        return replace(
            self,
            weights=weights / weights.sum(),
            class_weights=by_class,
            calibration=self.calibration._replace(log_kappa=self.calibration.log_kappa[views]),
            information=known,
        )

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
        """Accuracies and confusion matrices of the annotators."""
        if self.noise is None or self.noise_counts is None:
            return None
        return label_noise.describe(self.noise, self.noise_counts, names)

    def _reader(self) -> LabelReader | None:
        if self.noise is None or self.noise_counts is None:
            return None
        return LabelReader(self.noise, self.noise_counts, self.named)

    def _joint(self, predictions: ViewPredictions) -> Iterator[tuple[slice, Array]]:
        """Blocks of P(class, view), (C, K, n)."""
        check_logits(predictions)
        used = self.weights > 0
        calibration = Calibration(self.calibration.log_kappa[used], self.calibration.offset)
        by_class = None if self.class_weights is None else self.class_weights[used]
        likelihood = Likelihood(self.link, True, calibration, self.weights[used], by_class)
        for rows, variance in row_blocks(predictions, self.link):
            proba, inverse = components(shifted(predictions.mean[rows]), variance, likelihood)
            proba *= inverse * self.weights[used][:, None] if by_class is None else inverse
            if by_class is not None:
                proba *= by_class.T[:, :, None]
            proba /= proba.sum(axis=(0, 1))
            yield rows, proba


def row_blocks(predictions: ViewPredictions, link: str) -> Iterator[tuple[slice, Array | None]]:
    """Blocks of rows and, for a probit, their variances over draws (C, K, n)."""
    N, K, C = predictions.mean.shape
    step = max(1, _ENTRIES // (K * C))
    for first in range(0, N, step):
        rows = slice(first, min(first + step, N))
        variance = None
        if predictions.variance is not None and link == "probit":
            variance = predictions.variance[rows].astype(np.float64).transpose(2, 1, 0)
        yield rows, variance


def score_labels(
    prediction: CategoricalPrediction,
    labels: LabelSets,
    annotator: Array,
    reader: LabelReader | None,
    predictions: ViewPredictions,
) -> Array:
    """Log probability of every labelled input's labels under class probabilities and a noise model: (N+,)."""
    position = labels.categorical(prediction.proba.shape[1], predictions.classes)
    rows = labels.labelled
    tiny = np.finfo(np.float64).tiny
    if reader is None:
        each = np.log(np.maximum(prediction.proba[labels.instance, position], tiny))
        return np.asarray(np.bincount(labels.instance, labels.count * each, labels.n_instances)[rows])
    evidence = reader.log_evidence(labels, position, annotator, expected=True)
    top = evidence.max(axis=1)
    inside = (np.exp(evidence - top[:, None]) * prediction.proba[rows]).sum(axis=1)
    return np.asarray(top + np.log(np.maximum(inside, tiny)))


def joint_information(joint: Array) -> Array:
    """Mutual information between class and view of P(class, view), (C, K, n): (n,)."""
    by_view, by_class = joint.sum(axis=0), joint.sum(axis=1)
    information = _entropy(by_view, 0) + _entropy(by_class, 0) - _entropy(joint, (0, 1))
    return np.asarray(np.maximum(information, 0))


def _entropy(proba: Array, axis: int | tuple[int, ...]) -> Array:
    return np.asarray(-(proba * np.log(np.where(proba > 0, proba, 1.0))).sum(axis=axis))


def _view_evidence(joint: Array, labels: LabelSets, position: Array, rows: slice) -> Array:
    """How much more an instance's labels speak for a view than for the best of them: (K, n)."""
    inside = slice(*np.searchsorted(labels.instance, [rows.start, rows.stop]))
    instance = labels.instance[inside] - rows.start
    by_view = joint / joint.sum(axis=0)  # (C, K, n)
    tiny = np.finfo(np.float64).tiny
    each = np.log(np.maximum(by_view[position[inside], :, instance], tiny)) * labels.count[inside][:, None]  # (j, K)
    total = np.zeros((joint.shape[2], joint.shape[1]))
    np.add.at(total, instance, each)
    return np.asarray(np.exp(total - total.max(axis=1, keepdims=True)).T)


def class_names(predictions: ViewPredictions) -> Array:
    """What the outputs stand for: (C,)."""
    return np.arange(predictions.mean.shape[2]) if predictions.classes is None else predictions.classes
