"""A fitted latent pool for class labels: what remains when the data are gone, and what it predicts."""

__all__ = ["LatentClassPosterior", "pool_weights"]

from dataclasses import dataclass, replace

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.calibration import Calibration
from vbtta.infer.categorical import Likelihood, components
from vbtta.infer.categorical_data import check_logits, shifted
from vbtta.infer.categorical_pool import pool_proba
from vbtta.infer.categorical_posterior import LabelReader, class_names, row_blocks, score_labels
from vbtta.infer.intervals import PoolDoubt, pool_intervals
from vbtta.infer.label_noise import AnnotatorAccuracy, NoiseModel
from vbtta.labels import Array, LabelSets
from vbtta.predictions import CategoricalPrediction, ViewPredictions, view_information


@dataclass(frozen=True)
class LatentClassPosterior:
    """A fitted pool: one calibrated sum of the views' logits and, where modelled, the label noise."""

    link: str
    pool: Array  # (K,): v
    offset: Array  # (C,)
    noise: NoiseModel | None
    noise_counts: Array | None  # (U, 2) or (U, C, C)
    named: bool
    doubt: PoolDoubt

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(self.pool)

    @property
    def class_weights(self) -> None:
        """The pool has one weight a view."""
        return None

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by: the sum of v."""
        return float(self.pool.sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights by Laplace: normal where free, the half-line's quantile at zero."""
        return pool_intervals(self.weights, self.doubt, level)

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Class probabilities for inputs whose views are those of positive weight, in order.

        For the mutual information every view's probabilities are those of a pool of its logits alone.
        """
        return self._classes(predictions, None)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The true class of every input given its labels; without a noise model labels tell nothing beyond the fit."""
        N, _, C = predictions.mean.shape
        position, reader = labels.categorical(C, predictions.classes), self._reader()
        if reader is None:
            return self.predict(predictions)
        found = reader.log_evidence(labels, position, annotator, expected=False)
        evidence = np.ones((N, C))
        evidence[labels.labelled] = np.exp(found - found.max(axis=1, keepdims=True))
        return self._classes(predictions, evidence)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, noise included: (N+,)."""
        return score_labels(self.predict(predictions), labels, annotator, self._reader(), predictions)

    def keep(self, views: Array) -> "LatentClassPosterior":
        """The same with only some of the views; they take over the gain of the others, and doubts grow along."""
        pool, doubt = self.pool[views], self.doubt.take(views)
        scale = self.gain / pool.sum() if pool.sum() > 0 else 1.0
        if doubt.known:  # of v times the scale
            doubt = PoolDoubt(
                doubt.centre * scale, doubt.covariance * scale**2, doubt.slope / scale, doubt.stiffness / scale**2
            )
        return replace(self, pool=pool * scale, doubt=doubt)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
        """Accuracies and confusion matrices of the annotators."""
        if self.noise is None or self.noise_counts is None:
            return None
        return label_noise.describe(self.noise, self.noise_counts, names)

    def _classes(self, predictions: ViewPredictions, evidence: Array | None) -> CategoricalPrediction:
        """Class probabilities from the views and, where given, the labels' evidence (N, C), a factor of each class."""
        check_logits(predictions)
        N, _, C = predictions.mean.shape
        weights = self.weights[self.weights > 0]
        alone = Calibration(np.full(len(weights), np.log(max(self.gain, 1e-300))), self.offset)
        likelihood = Likelihood(self.link, True, alone, weights, None)
        proba, information = np.empty((N, C)), np.empty(N)
        for rows, variance in row_blocks(predictions, self.link):
            logits = shifted(predictions.mean[rows])
            found = pool_proba(logits, variance, self.link, self.gain * weights, self.offset).T
            found = found if evidence is None else found * evidence[rows]
            proba[rows] = found / found.sum(axis=1, keepdims=True)
            each, inverse = components(logits, variance, likelihood)
            information[rows] = view_information(proba[rows], (each * inverse * weights[:, None]).T)
        return CategoricalPrediction(proba, information, class_names(predictions))

    def _reader(self) -> LabelReader | None:
        if self.noise is None or self.noise_counts is None:
            return None
        return LabelReader(self.noise, self.noise_counts, self.named)


def pool_weights(pool: Array) -> Array:
    """Weights w = v / sum v; uniform where all are zero."""
    total = pool.sum()
    return np.asarray(pool / total) if total > 0 else np.full(len(pool), 1 / len(pool))
