"""The fitted latent pool for continuous labels, and its predictions."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import ContinuousPrediction
from vbtta.inference.guide import WeightDraws
from vbtta.inference.laplace import PoolUncertainty, pool_intervals, pool_weights
from vbtta.models.base import Pooling, Posterior
from vbtta.models.gaussian_latent.steps import LatentState
from vbtta.models.gaussian_mixture.steps import scale_covariate
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.standard import Standard


@dataclass(frozen=True)
class LatentPosterior(Posterior):
    """A fitted pool: one calibrated average of the views and, where modelled, the annotators."""

    state: LatentState
    standard: Standard
    uncertainty: PoolUncertainty
    covariance: Annotated[Array, "P P"]  # of (v, b) by Laplace; zero for weights held at 0

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(self.state.pool)

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by: the sum of v."""
        return float(self.state.pool.sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        return pool_intervals(self.weights, self.uncertainty, level)

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive distribution for inputs whose views are those of positive weight, in order: one Student-t."""
        state, C = self.state, len(self.state.offset)
        used = self.weights > 0
        mean = self.standard.apply_to_predictions(predictions.outputs)  # (N, K, C)
        location = np.einsum("k,nkc->nc", state.pool[used], mean) + state.offset
        K = len(used)
        uncertainty = np.einsum(
            "nkc,kl,nld->ncd", mean, self.covariance[:K, :K][np.ix_(used, used)], mean, optimize=True
        )
        cross = np.einsum("nkc,kd->ncd", mean, self.covariance[:K, K:][used])
        uncertainty += cross + cross.swapaxes(1, 2) + self.covariance[K:, K:]
        dof = state.dof + 1 - C
        stretch = np.exp(2 * state.scale_slope * scale_covariate(location, 1))[:, None, None]
        scale = stretch * state.inverse_scale / dof + (dof - 2) / dof * uncertainty
        units = self.standard.scale
        return ContinuousPrediction(
            np.ones((len(mean), 1)),
            np.atleast_1d(dof),
            (self.standard.location + units * location)[:, None],
            (units[:, None] * scale * units)[:, None],
        )

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels; `annotator` (J,) is -1 for unknown annotators."""
        return annotators.consensus(self.predict(predictions), labels, annotator, self.state.annotators, self.standard)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, annotators included: (N+,)."""
        return annotators.score_labels(
            self.predict(predictions), labels, annotator, self.state.annotators, self.standard
        )

    def keep(self, views: Array) -> "LatentPosterior":
        """The same with only some of the views; they take over the gain of the others."""
        pool = self.state.pool[views]
        pool = pool * (self.gain / pool.sum()) if pool.sum() > 0 else pool
        inside = np.concatenate([views, len(self.state.pool) + np.arange(len(self.state.offset))])
        return replace(
            self,
            state=self.state._replace(pool=pool),
            uncertainty=self.uncertainty.take(views),
            covariance=self.covariance[np.ix_(inside, inside)],
        )

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | None:
        """Biases and noise levels of the annotators."""
        people = self.state.annotators
        return None if people is None else annotators.annotator_noise(people, self.standard, names)

    def pooling(self) -> Pooling:
        """The weighted sum of the views plus an offset."""
        weights = np.repeat(self.weights[self.weights > 0][:, None], len(self.state.offset), axis=1)
        scale, offset = self.standard.linear(np.full(weights.shape, self.gain), self.state.offset)
        return Pooling("linear", "", scale, offset, weights)


@dataclass(frozen=True)
class SampledLatentPosterior(WeightDraws, LatentPosterior):
    """A latent pool for continuous labels."""
