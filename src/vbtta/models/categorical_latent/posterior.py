"""The fitted latent pool for class labels, and its predictions."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, view_information
from vbtta.inference.guide import WeightDraws
from vbtta.inference.laplace import PoolUncertainty, pool_intervals, pool_weights
from vbtta.models.base import Pooling, Posterior
from vbtta.models.categorical_latent.steps import pool_proba
from vbtta.models.parts.calibration import Calibration
from vbtta.models.parts.class_data import SoftmaxViews, class_names, prediction_blocks, prediction_rows
from vbtta.models.parts.label_noise import AnnotatorAccuracy, FittedNoise, class_factors, describe, score_labels
from vbtta.models.parts.links import LINKS, view_proba


@dataclass(frozen=True)
class LatentClassPosterior(Posterior):
    """A fitted pool: one calibrated sum of the views' logits and, where modelled, the label noise."""

    link: str  # a name in LINKS
    pool: Annotated[Array, "K"]  # v
    offset: Annotated[Array, "C"]
    noise: FittedNoise | None
    uncertainty: PoolUncertainty

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
        """Factor of the weighted average: the sum of v."""
        return float(self.pool.sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights by Laplace: normal where free, the half-line's quantile at zero."""
        return pool_intervals(self.weights, self.uncertainty, level)

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Class probabilities for inputs whose views are those of positive weight, in order."""
        # For the mutual information every view's probabilities are those of a pool of its logits alone.
        return self._classes(predictions, None)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The true class of every input given its labels; without a noise model one of the labels is right."""
        factors = class_factors(self.noise, predictions, labels, annotator)
        return self._classes(predictions, factors)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, noise included: (N+,)."""
        return score_labels(self.noise, self.predict(predictions), predictions, labels, annotator)

    def keep(self, views: Array) -> "LatentClassPosterior":
        """The same with only some of the views, scaled to the gain of all; the doubts are scaled too."""
        pool, uncertainty = self.pool[views], self.uncertainty.take(views)
        scale = self.gain / pool.sum() if pool.sum() > 0 else 1.0
        if uncertainty.known:  # of v times the scale
            uncertainty = PoolUncertainty(
                uncertainty.centre * scale,
                uncertainty.covariance * scale**2,
                uncertainty.slope / scale,
                uncertainty.stiffness / scale**2,
                uncertainty.n_groups,
            )
        return replace(self, pool=pool * scale, uncertainty=uncertainty)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
        """Accuracies and confusion matrices of the annotators."""
        return describe(self.noise, names)

    def pooling(self) -> Pooling:
        """The link of the weighted sum of the views' logits."""
        weights = np.repeat(self.weights[self.weights > 0][:, None], len(self.offset), axis=1)
        offset = np.broadcast_to(self.offset, weights.shape).copy()
        return Pooling("latent", self.link, np.full(weights.shape, self.gain), offset, weights)

    def _classes(self, predictions: ViewPredictions, factors: Array | None) -> CategoricalPrediction:
        """Class probabilities, times factors (N, C) from labels where given."""
        N, _, C = predictions.outputs.shape
        link, weights = LINKS[self.link], self.weights[self.weights > 0]
        alone = Calibration(np.full(len(weights), np.log(max(self.gain, 1e-300))), self.offset)
        proba, information = np.empty((N, C)), np.empty(N)
        if link.canonical:
            for rows in prediction_rows(predictions):
                views = SoftmaxViews(predictions.outputs[rows], np.full(len(weights), self.gain), self.offset, weights)
                pooled = views.pooled(weights, self.offset)
                pooled = pooled if factors is None else np.maximum(pooled, np.finfo(np.float64).tiny) * factors[rows]
                proba[rows] = pooled / pooled.sum(axis=1, keepdims=True)
                information[rows] = views.information(proba[rows])
            return CategoricalPrediction(proba, information, class_names(predictions))
        for rows, logits, variance in prediction_blocks(predictions, with_variance=link.uses_variance):
            pooled = pool_proba(link, logits, variance, self.gain * weights, self.offset).T
            pooled = pooled if factors is None else np.maximum(pooled, np.finfo(np.float64).tiny) * factors[rows]
            proba[rows] = pooled / pooled.sum(axis=1, keepdims=True)
            each, inverse = view_proba(link, logits, variance, alone)
            information[rows] = view_information(proba[rows], (each * inverse * weights[:, None]).T)
        return CategoricalPrediction(proba, information, class_names(predictions))


@dataclass(frozen=True)
class SampledLatentClassPosterior(WeightDraws, LatentClassPosterior):
    """A latent pool for class labels."""
