"""A fitted continuous mixture: what remains when the data are gone, and what it predicts."""

__all__ = ["MixtureFactors", "MixturePosterior"]

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vbtta.infer import continuous
from vbtta.infer.consensus import normalise, pool_truth
from vbtta.infer.continuous import MixturePrior, MixtureState
from vbtta.infer.intervals import WeightInformation, weight_intervals
from vbtta.infer.posterior import AnnotatorNoise, annotator_noise
from vbtta.infer.standard import Standard
from vbtta.infer.truth import AnnotatorState
from vbtta.labels import Array, LabelSets
from vbtta.mixtures import log_density as mixture_log_density
from vbtta.predictions import ContinuousPrediction, ViewPredictions

_HARDLY = 0.1  # of the labels that the view with most of them has


class MixtureFactors(NamedTuple):
    """All factors of Q."""

    views: MixtureState
    annotators: AnnotatorState | None


@dataclass(frozen=True)
class MixturePosterior:
    """A fitted continuous mixture: calibrated views, their weights and, where modelled, the annotators."""

    prior: MixturePrior
    state: MixtureFactors
    standard: Standard
    information: WeightInformation | None

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return self.state.views.weights

    @property
    def predictive_weights(self) -> Array:
        """The weights without those of views that hardly a label speaks for: (K,).

        Under a Dirichlet such a view keeps a weight of its own and, with it, the prior's doubt about its calibration,
        which is vast: it alone would decide the predictive variance.
        """
        counts = self.state.views.weight_counts
        if counts is None:
            return self.weights
        concentration = 1.0 if self.prior.concentration is None else self.prior.concentration
        labels = counts - concentration
        known = labels >= min(1.0, _HARDLY * labels.max(), labels.max())
        return np.asarray(np.where(known, self.weights, 0.0) / self.weights[known].sum())

    @property
    def gain(self) -> float:
        """Views are calibrated one by one: the pool has no gain of its own."""
        return 1.0

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        if self.information is None:
            raise ValueError("this policy has no intervals: it is a step on the way, not the end of a fit")
        return weight_intervals(self.weights, self.information, level)

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture for inputs whose views are the policy's views of positive weight, in order."""
        weights = self.predictive_weights
        used = weights > 0
        if used.sum() < len(predictions.names):
            known = used[self.weights > 0]
            predictions = predictions.select([name for name, one in zip(predictions.names, known, strict=True) if one])
        location, scale, dof = self._components(predictions, used)
        weights = np.broadcast_to(weights[used], location.shape[:2])
        return ContinuousPrediction(weights, dof, location, scale)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels; `annotator` (J,) is -1 for people the fit did not meet."""
        prior_view = self.predict(predictions)
        with np.errstate(divide="ignore"):
            log_weights = np.log(prior_view.weights)
        if self.state.annotators is None:
            value = labels.continuous(prior_view.location.shape[2])
            log_share = log_weights.copy()
            np.add.at(
                log_share, labels.instance, labels.count[:, None] * self._log_components(prior_view, labels, value)
            )
            return ContinuousPrediction(normalise(log_share), prior_view.dof, prior_view.location, prior_view.scale)
        return pool_truth(prior_view, labels, annotator, self.state.annotators, self.standard)[0]

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, annotators included: (N+,)."""
        prediction = self.predict(predictions)
        rows = labels.labelled
        if self.state.annotators is not None:
            return np.asarray(pool_truth(prediction, labels, annotator, self.state.annotators, self.standard)[1][rows])
        value = labels.continuous(prediction.location.shape[2])
        each = mixture_log_density(
            value,
            prediction.weights[labels.instance],
            prediction.dof,
            prediction.location[labels.instance],
            prediction.scale[labels.instance],
        )
        return np.asarray(np.bincount(labels.instance, labels.count * each, labels.n_instances)[rows])

    def keep(self, views: Array) -> "MixturePosterior":
        """The same with only some of the views."""
        kept = self.state.views.take(views)
        kept = kept._replace(weights=kept.weights / kept.weights.sum())
        known = self.information
        if known is not None:
            centre = known.centre[views] / max(known.centre[views].sum(), 1e-300)
            known = WeightInformation(centre, known.information[np.ix_(views, views)], known.profile[views])
        return replace(self, state=self.state._replace(views=kept), information=known)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | None:
        """Biases and noise levels of the annotators."""
        people = self.state.annotators
        return None if people is None else annotator_noise(people, self.standard, names)

    def _components(self, predictions: ViewPredictions, used: Array) -> tuple[Array, Array, Array]:
        """Locations (N, K, C), scale matrices (N, K, C, C) and degrees of freedom (K,) in the labels' units."""
        C = self.prior.n_outputs
        views = self.state.views.take(used)
        mean = self.standard.apply(predictions.mean)  # (N, K, C)
        offset, gain = continuous.calibration(views.theta_mean, C)
        dof = views.dof + 1 - C
        regressors = [mean, np.ones_like(mean)] if self.prior.affine else [np.ones_like(mean)]
        doubt = np.zeros((*mean.shape, C))  # H G^-1 H^T
        for row, left in enumerate(regressors):
            for column, right in enumerate(regressors):
                block = views.theta_covariance[:, row * C : (row + 1) * C, column * C : (column + 1) * C]
                doubt += left[..., :, None] * block * right[..., None, :]
        noise = views.inverse_scale / dof[:, None, None]
        if self.prior.heteroscedastic:
            if predictions.variance is None:
                raise ValueError(
                    "the policy was fitted with heteroscedastic=True: predictions need a variance, as those of the "
                    "fit had"
                )
            variance = predictions.variance / self.standard.scale**2
            loss = np.sqrt(1 + variance / self.prior.residual_variance)  # omega^-1/2
            noise = loss[..., :, None] * noise * loss[..., None, :]
        scale = noise + ((dof - 2) / dof)[:, None, None] * doubt
        units = self.standard.scale
        return self.standard.location + units * (offset + gain * mean), units[:, None] * scale * units, dof

    def _log_components(self, prediction: ContinuousPrediction, labels: LabelSets, value: Array) -> Array:
        """Log density of every label under every view: (J, K)."""
        one = np.ones((len(value), 1))
        rows = labels.instance
        columns = [
            mixture_log_density(
                value,
                one,
                prediction.dof[k : k + 1],
                prediction.location[rows, k : k + 1],
                prediction.scale[rows, k : k + 1],
            )
            for k in range(len(prediction.dof))
        ]
        return np.stack(columns, axis=1)
