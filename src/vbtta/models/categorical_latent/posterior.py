"""The fitted latent pool for class labels, and its predictions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import view_information
from vbtta.inference.advi import WeightDraws
from vbtta.inference.laplace import PoolUncertainty
from vbtta.models.base import Pooling, PoolPosterior
from vbtta.models.categorical_mixture.posterior import ClassPosterior
from vbtta.models.parts.class_data import BlockReader, SoftmaxViews, link_arguments
from vbtta.models.parts.label_noise import FittedNoise
from vbtta.models.parts.links import LINKS, Calibration, contract, view_proba


@dataclass(frozen=True)
class LatentClassPosterior(ClassPosterior, PoolPosterior):
    """A fitted pool: one calibrated sum of the views' logits and, where modelled, the label noise."""

    link: str  # a name in LINKS
    pool: Annotated[Array, "K"]  # v
    offset: Annotated[Array, "C"]
    noise: FittedNoise | None
    uncertainty: PoolUncertainty | None  # of the fitted v; intervals of the weights do not depend on its scale

    def keep(self, views: Array) -> "LatentClassPosterior":
        """The same with only some of the views, scaled to the gain of all."""
        uncertainty = None if self.uncertainty is None else self.uncertainty.take(views)
        return replace(self, pool=self.kept_pool(views), uncertainty=uncertainty)

    def pooling(self) -> Pooling:
        """The link of the weighted sum of the views' logits."""
        weights = np.repeat(self.weights[self.weights > 0][:, None], len(self.offset), axis=1)
        offset = np.broadcast_to(self.offset, weights.shape).copy()
        return Pooling("latent", self.link, np.full(weights.shape, self.gain), offset, weights)

    def _block_reader(self, predictions: ViewPredictions) -> BlockReader:
        # For the mutual information every view's probabilities are those of a pool of its logits alone.
        link, weights = LINKS[self.link], self.weights[self.weights > 0]
        kappa = np.full(len(weights), max(self.gain, 1e-300))

        def block(rows: slice) -> tuple[Array, Callable[[Array], Array]]:
            if link.canonical:
                views = SoftmaxViews(predictions.outputs[rows], kappa, self.offset, weights)
                return views.pooled(weights, self.offset), views.information
            arguments = link_arguments(predictions, rows, link)
            proba, inverse = link.proba(*pooled_utility(*arguments, self.gain * weights, self.offset))
            by_view, scale = view_proba(link, *arguments, Calibration(np.log(kappa), self.offset))
            shares = (by_view * scale).T * weights[:, None]  # (n, K, C)
            return (proba * inverse).T, lambda proba: view_information(proba, shares)

        return block


@dataclass(frozen=True)
class SampledLatentClassPosterior(WeightDraws, LatentClassPosterior):
    """A latent pool for class labels."""


def pooled_utility(logits: Array, variance: Array | None, pool: Array, offset: Array) -> tuple[Array, Array | None]:
    """Pooled utilities, the largest of an instance 0, and their variances sum_k v_k^2 g_k: (C, n) each."""
    utility = contract("ckn,k->cn", logits, pool) + offset[:, None]
    utility -= utility.max(axis=0)
    return utility, None if variance is None else np.einsum("ckn,k->cn", variance, pool**2)
