"""The latent pool for continuous labels: its parameters and the fitted model (docs/method, "Pooling", eq. 19)."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import ContinuousPrediction
from vbtta.inference.advi import WeightDraws
from vbtta.inference.laplace import PoolUncertainty
from vbtta.inference.linalg import check_covariance, check_positive, cholesky, inverse_and_log_det
from vbtta.models.base import Pooling, PoolPosterior
from vbtta.models.parts.annotators import AnnotatorState, LabelPooling
from vbtta.models.parts.standard import Standard, scale_covariate


class LatentPrior(NamedTuple):
    """Hyperparameters in standard units."""

    shrinkage: float  # lambda
    offset_scale: float  # of the offset's Student-t
    nu: float
    inverse_scale: Array  # (C, C): V


class LatentState(NamedTuple):
    """Point estimates of the pool, Q of its precision and of the annotators."""

    pool: Annotated[Array, "K"]  # v
    offset: Annotated[Array, "C"]  # b
    dof: Annotated[Array, "", check_positive]
    inverse_scale: Annotated[Array, "C C", check_covariance]
    annotators: AnnotatorState | None
    scale_slope: float = 0.0  # a

    @property
    def precision(self) -> Array:
        """E[Lambda]: (C, C)."""
        return np.asarray(self.dof * inverse_and_log_det(self.inverse_scale)[0])


class Scale(NamedTuple):
    """How the standard deviation depends on the prediction of a preliminary fit: exp(a x)."""

    slope: float  # a
    pool: Array  # (K,)
    offset: Array  # (C,)

    def covariate(self, mean: Array) -> Array:
        """X of inputs whose views are (C, K, n): (n,)."""
        return scale_covariate(np.einsum("k,ckn->cn", self.pool, mean) + self.offset[:, None], 0)

    def log_omega(self, mean: Array) -> Array:
        """Logarithms of omega: (n,)."""
        return -2 * self.slope * self.covariate(mean) if self.slope else np.zeros(mean.shape[2])


@dataclass(frozen=True)
class LatentPosterior(LabelPooling, PoolPosterior):
    """A fitted pool: one calibrated average of the views and, where modelled, the annotators."""

    state: LatentState
    standard: Standard
    uncertainty: PoolUncertainty | None
    covariance: Annotated[Array, "P P", check_covariance]  # of (v, b) by Laplace; zero for weights held at 0

    def validate(self) -> None:
        """Refuse a covariance that is not of the pool and the offset; for a posterior that was read from a file."""
        size = len(self.state.pool) + len(self.state.offset)
        if len(self.covariance) != size:
            raise ValueError(f"covariance: {len(self.covariance)} rows; weights and offset have {size} entries")

    @property
    def pool(self) -> Array:
        """The factors v of the views: (K,)."""
        return self.state.pool

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive distribution for inputs whose views are those of positive weight, in order: one Student-t."""
        state, C = self.state, len(self.state.offset)
        used = self.weights > 0
        mean = self.standard.apply_to_predictions(predictions.outputs)  # (N, K, C)
        location = np.einsum("k,nkc->nc", state.pool[used], mean) + state.offset
        root, K = cholesky(self.covariance), len(used)
        spread = np.tensordot(mean, root[:K][used], axes=(1, 0)) + root[K:]  # (N, C, P)
        uncertainty = np.einsum("ncp,ndp->ncd", spread, spread)  # by a root, so that rounding leaves it positive
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

    def keep(self, views: Array) -> "LatentPosterior":
        """The same with only some of the views; they take over the gain of the others."""
        inside = np.concatenate([views, len(self.state.pool) + np.arange(len(self.state.offset))])
        return replace(
            self,
            state=self.state._replace(pool=self.kept_pool(views)),
            uncertainty=None if self.uncertainty is None else self.uncertainty.take(views),
            covariance=self.covariance[np.ix_(inside, inside)],
        )

    def pooling(self) -> Pooling:
        """The weighted sum of the views plus an offset."""
        weights = np.repeat(self.weights[self.weights > 0][:, None], len(self.state.offset), axis=1)
        scale, offset = self.standard.linear(np.full(weights.shape, self.gain), self.state.offset)
        return Pooling("linear", "", scale, offset, weights)


@dataclass(frozen=True)
class SampledLatentPosterior(WeightDraws, LatentPosterior):
    """A latent pool for continuous labels."""
