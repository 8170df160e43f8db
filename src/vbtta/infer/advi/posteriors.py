"""What ADVI leaves, as the same posteriors as the EM engines': moments of Q, with the draws behind them.

Weights are posterior means, their intervals quantiles of draws. Calibration enters predictions with its mean and
covariance under Q (in class labels with its mean), precisions as the Wishart of the same moments.
"""

__all__ = [
    "AdviCategoricalPosterior",
    "AdviLatentClassPosterior",
    "AdviLatentPosterior",
    "AdviMixturePosterior",
    "WeightDraws",
    "draw_intervals",
    "weights_of",
]

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from vbtta.infer.advi.families import laplace_nodes
from vbtta.infer.advi.guide import Guide
from vbtta.infer.categorical_latent_posterior import LatentClassPosterior
from vbtta.infer.categorical_posterior import CategoricalPosterior
from vbtta.infer.consensus import normalise
from vbtta.infer.latent_fit import LatentPosterior
from vbtta.infer.mixture_posterior import MixturePosterior
from vbtta.labels import Array, LabelSets
from vbtta.mixtures import variance_factor
from vbtta.predictions import ContinuousPrediction, ViewPredictions

N_DRAWS = 4000
_INTERVAL_DRAWS = 20_000  # of the weights alone: quantiles need more than means


def weights_of(values: dict[str, Array]) -> Array:
    """The weights of the views (..., K) among a model's parameters."""
    name = _weight_site(values)
    if name == "pool":
        return np.asarray(values["pool"] / values["pool"].sum(axis=-1, keepdims=True))
    if name == "class_weights":
        return np.asarray(values["class_weights"].mean(axis=-2))  # (..., C, K)
    return values["weights"]


def _weight_site(names: Collection[str]) -> str:
    """Which parameter they follow from; a pool has no other, and a user's own model has `weights`."""
    return next(name for name in ("class_weights", "weights", "pool") if name in names)


def draw_intervals(guide: Guide, kept: Array, level: float) -> Array:
    """Equal-tailed intervals (K, 2) of the weights of the kept views: quantiles of draws."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, such as 0.9; got {level}")
    name = _weight_site([site.name for site in guide.sites])
    found = weights_of(guide.only(name).draw(_INTERVAL_DRAWS))[:, kept.astype(int)]
    share = found / found.sum(axis=1, keepdims=True)
    return np.asarray(np.quantile(share, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0).T)


@dataclass(frozen=True)
class WeightDraws:
    """What all of them share: Q, and which of its views are kept."""

    guide: Guide
    kept: Array  # (K,): positions among the views of the fit

    def draws(self, size: int = N_DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in the model's standard units."""
        return self.guide.draw(size, seed)

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights: quantiles of draws."""
        return draw_intervals(self.guide, self.kept, level)

    def keep(self, views: Array) -> Any:
        """The same with only some of the views."""
        return replace(super().keep(views), kept=self.kept[views])  # type: ignore[misc]


@dataclass(frozen=True)
class AdviMixturePosterior(WeightDraws, MixturePosterior):
    """A continuous mixture with normal, Student-t or Laplace components."""

    component: str
    tail: float  # degrees of freedom of a Student-t component

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture; a Laplace component is a mixture of normals itself."""
        return self._with_family(super().predict(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels: the posterior of the view decides between the views."""
        if self.component == "normal":
            return super().consensus(predictions, labels, annotator)
        prediction = self.predict(predictions)
        value = labels.continuous(prediction.location.shape[2])
        N, K = prediction.weights.shape[0], int((self.predictive_weights > 0).sum())
        own = np.log(prediction.weights).reshape(N, K, -1)  # view, node
        each = self._log_components(prediction, labels, value).reshape(len(value), K, -1)
        share = own - special.logsumexp(own, axis=2, keepdims=True)
        evidence = special.logsumexp(share[labels.instance] + each, axis=2)  # (J, K)
        log_view = special.logsumexp(own, axis=2)
        np.add.at(log_view, labels.instance, labels.count[:, None] * evidence)
        weights = (normalise(log_view)[:, :, None] * np.exp(share)).reshape(N, -1)
        return replace(prediction, weights=weights)

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


@dataclass(frozen=True)
class AdviLatentPosterior(WeightDraws, LatentPosterior):
    """A latent pool for continuous labels."""


@dataclass(frozen=True)
class AdviCategoricalPosterior(WeightDraws, CategoricalPosterior):
    """A mixture for class labels."""


@dataclass(frozen=True)
class AdviLatentClassPosterior(WeightDraws, LatentClassPosterior):
    """A latent pool for class labels."""
