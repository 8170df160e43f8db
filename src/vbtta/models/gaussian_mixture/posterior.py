"""The fitted mixture of views for continuous labels, and its predictions."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import ContinuousPrediction, variance_factor
from vbtta.inference.guide import WeightDraws
from vbtta.inference.laplace import WeightInformation, weight_intervals
from vbtta.models.base import Pooling, Posterior
from vbtta.models.gaussian_mixture import steps
from vbtta.models.gaussian_mixture.steps import MixturePrior, MixtureState
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorNoise, AnnotatorState
from vbtta.models.parts.gate import Gate
from vbtta.models.parts.standard import Standard

MIN_RELATIVE_SHARE = 0.1  # of the most supported view's labels
_STEP = 0.6
_LOWEST, _HIGHEST = -12.0, 3.6  # of ln s: the density is cut where exp(-s) or s is negligible


def laplace_nodes() -> tuple[Array, Array]:
    """Variances s and shares of the normals that make up a Laplace distribution of unit variance."""
    # A normal whose variance is exponential is a Laplace. The integral over ln s is smooth and falls off at both ends,
    # where the trapezoid rule converges fast; shares sum to 1 and the variance is 1.
    size = np.exp(np.arange(_LOWEST, _HIGHEST, _STEP))
    share = size * np.exp(-size)
    share = share / share.sum()
    return size / (share @ size), share


class MixtureFactors(NamedTuple):
    """All factors of Q."""

    views: MixtureState
    annotators: AnnotatorState | None


@dataclass(frozen=True)
class MixturePosterior(Posterior):
    """A fitted continuous mixture: calibrated views, their weights and, where modelled, the annotators."""

    prior: MixturePrior
    state: MixtureFactors
    standard: Standard
    information: WeightInformation | None
    gate: Gate | None

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return self.state.views.weights

    @property
    def predictive_weights(self) -> Array:
        """The weights without those of views that hardly any label supports: (K,)."""
        # Under a Dirichlet such a view keeps a positive weight, and the prior variance of its calibration, which is
        # large, would dominate the predictive variance.
        counts = self.state.views.weight_counts
        if counts is None:
            return self.weights
        concentration = 1.0 if self.prior.concentration is None else self.prior.concentration
        labels = counts - concentration
        supported = labels >= min(1.0, MIN_RELATIVE_SHARE * labels.max(), labels.max())
        return np.asarray(np.where(supported, self.weights, 0.0) / self.weights[supported].sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        return weight_intervals(self.weights, self.information, level)

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture for inputs whose views are the policy's views of positive weight, in order."""
        weights = self.predictive_weights
        used = weights > 0
        kept = used[self.weights > 0]
        weights = np.broadcast_to(weights[used], (len(predictions), int(used.sum())))
        if self.gate is not None:
            weights = self.gate.weights_for(predictions)[:, kept]
            weights = weights / weights.sum(axis=1, keepdims=True)
        if not kept.all():
            predictions = predictions.select([name for name, keep in zip(predictions.names, kept, strict=True) if keep])
        location, scale, dof = self._components(predictions, used)
        return ContinuousPrediction(weights, dof, location, scale)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels; `annotator` (J,) is -1 for unknown annotators."""
        return annotators.consensus(self.predict(predictions), labels, annotator, self.state.annotators, self.standard)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, annotators included: (N+,)."""
        return annotators.score_labels(
            self.predict(predictions), labels, annotator, self.state.annotators, self.standard
        )

    def keep(self, views: Array) -> "MixturePosterior":
        """The same with only some of the views."""
        kept = self.state.views.take(views)
        kept = kept._replace(weights=kept.weights / kept.weights.sum())
        known = None if self.information is None else self.information.take(views)
        gate = None if self.gate is None else self.gate.keep(views)
        return replace(self, state=self.state._replace(views=kept), information=known, gate=gate)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | None:
        """Biases and noise levels of the annotators."""
        people = self.state.annotators
        return None if people is None else annotators.annotator_noise(people, self.standard, names)

    def pooling(self) -> Pooling:
        """sum_k w_k (a_k + g_k f_k), a and g the calibration."""
        used, C = self.weights > 0, self.prior.n_outputs
        weights = np.repeat(self.predictive_weights[used][:, None], C, axis=1)
        shift, gain = steps.calibration(self.state.views.theta_mean[used], C)  # (K, C) each
        scale, offset = self.standard.linear(np.broadcast_to(gain, weights.shape), shift)
        return Pooling("linear", "", scale, offset, weights, self.gate)

    def _components(self, predictions: ViewPredictions, used: Array) -> tuple[Array, Array, Array]:
        """Locations (N, K, C), scale matrices (N, K, C, C) and degrees of freedom (K,) in the labels' units."""
        C = self.prior.n_outputs
        views = self.state.views.take(used)
        mean = self.standard.apply_to_predictions(predictions.outputs)  # (N, K, C)
        offset, gain = steps.calibration(views.theta_mean, C)
        dof = views.dof + 1 - C
        covariance = views.calibration_covariance(self.prior.beta)
        regressors = [mean, np.ones_like(mean)] if self.prior.affine else [np.ones_like(mean)]
        doubt = np.zeros((*mean.shape, C))  # H Cov(theta) H^T
        for row, left in enumerate(regressors):
            for column, right in enumerate(regressors):
                block = covariance[:, row * C : (row + 1) * C, column * C : (column + 1) * C]
                doubt += left[..., :, None] * block * right[..., None, :]
        noise = views.inverse_scale / dof[:, None, None]
        if self.prior.heteroscedastic:
            if predictions.variance is None:
                raise ValueError(
                    "the policy was fitted with heteroscedastic=True: predictions need a variance, as those of the "
                    "fit had"
                )
            variance = predictions.variance / self.standard.prediction_scale**2
            loss = np.sqrt(1 + variance / self.prior.residual_variance)  # omega^-1/2
            noise = loss[..., :, None] * noise * loss[..., None, :]
        if self.prior.slope_scale:
            tilt = np.exp(2 * views.scale_slope * steps.scale_covariate(mean, 2))  # (N, K)
            noise = tilt[..., None, None] * noise
        scale = noise + ((dof - 2) / dof)[:, None, None] * doubt
        units = self.standard.scale
        return self.standard.location + units * (offset + gain * mean), units[:, None] * scale * units, dof


@dataclass(frozen=True)
class SampledMixturePosterior(WeightDraws, MixturePosterior):
    """A continuous mixture with normal, Student-t or Laplace components."""

    component: str
    tail: float  # degrees of freedom of a Student-t component

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture; a Laplace component is a mixture of normals itself."""
        return self._with_family(super().predict(predictions))

    def _with_family(self, prediction: ContinuousPrediction) -> ContinuousPrediction:
        if self.component == "normal":
            return prediction
        scale = variance_factor(prediction.dof)[:, None, None] * prediction.scale
        if self.component == "student_t":
            return replace(prediction, scale=scale, dof=np.full(len(prediction.dof), self.tail))
        size, share = laplace_nodes()
        N, K, C = prediction.location.shape
        return ContinuousPrediction(
            weights=(prediction.weights[:, :, None] * share).reshape(N, -1),
            dof=np.full(K * len(size), np.inf),
            location=np.repeat(prediction.location, len(size), axis=1),
            scale=(scale[:, :, None] * size[:, None, None]).reshape(N, -1, C, C),
        )
