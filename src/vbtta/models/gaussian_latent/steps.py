"""Continuous outputs pooled inside the model: y = sum_k v_k f_k + b + noise, v >= 0 (docs/method, "Pooling").

    v_k ~ Normal(1/K, 1/lambda) on v_k >= 0,   b ~ Student-t of a scale,   Lambda ~ Wishart(nu, V)

The noise has precision omega Lambda with omega = 1 or exp(-2 a x), x the pooled prediction (of a preliminary fit).
Given Lambda the mode in (v, b) is a small convex problem on the second moments of (f, 1, y), which are
formed once. The weights are w = v / sum v; the sum is the gain.
"""

from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference.blocks import Block, products
from vbtta.inference.laplace import log_volume, pool_penalty, solve
from vbtta.inference.linalg import inverse_and_log_det, student_precision
from vbtta.models.gaussian_mixture.steps import SLOPE_SCALE, scale_covariate, slope_step
from vbtta.models.parts.annotators import AnnotatorState
from vbtta.models.parts.standard import SMALLEST_VARIANCE, ContinuousBlocks

_LEAST_SHRINKAGE = 1e-10  # relative to the largest curvature: equal views of equal labels leave it singular
_SLOPE_STEPS, _PRELIMINARY_STEPS = 10, 5
_SHRINKAGES = 10.0 ** np.arange(-1.0, 8.01, 0.25)  # candidates for lambda


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
    dof: Annotated[Array, ""]
    inverse_scale: Annotated[Array, "C C"]
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


class Moments(NamedTuple):
    """Sums over labels (or, with annotators, over instances and their truths) for outputs c, d, times omega."""

    xx: Array  # (C, C, K, K): f_c f_d^T
    x1: Array  # (C, K): f_c
    xy: Array  # (C, C, K): f_c y_d
    y1: Array  # (C,)
    yy: Array  # (C, C)
    n: Array  # ()
    size: Array  # (): without omega
    log_omega: Array  # (): half the log determinants of omega


def moments_of(
    block: Block, scale: Scale | None = None, targets: Array | None = None, covariance: Array | None = None
) -> Moments:
    """Sums of one block; targets (C, n) with covariances (n, C, C) replace the labels."""
    log_omega = np.zeros(block.mean.shape[2]) if scale is None else scale.log_omega(block.mean)
    if targets is None:
        mean, instance = block.mean, slice(None) if block.instance is None else block.instance
        mean, log_omega, targets, count = mean[:, :, instance], log_omega[instance], block.value, block.repeats
    else:
        mean, count = block.mean, np.ones(block.mean.shape[2])
    C, K, _ = mean.shape
    size, log_det = count.sum(), 0.5 * C * (count @ log_omega)
    count = count * np.exp(log_omega)
    weighted = mean * count
    flat = mean.reshape(C * K, -1)
    xx = products(weighted.reshape(C * K, -1), flat).reshape(C, K, C, K).transpose(0, 2, 1, 3)
    xy = products(weighted.reshape(C * K, -1), targets).reshape(C, K, C).transpose(0, 2, 1)
    yy = products(targets * count, targets)
    return Moments(
        xx,
        weighted.sum(axis=2),
        xy,
        np.vecdot(targets, count),
        yy if covariance is None else yy + np.einsum("n,ncd->cd", count, covariance),
        np.asarray(count.sum()),
        np.asarray(size),
        np.asarray(log_det),
    )


def choose_slope(data: ContinuousBlocks, moments: Moments, prior: LatentPrior) -> Scale:
    """The mode of the slope a under its normal prior, around the pool of a preliminary fit."""
    pool, offset, precision = settled_pool(moments, prior)
    scale = Scale(0.0, pool, offset)
    for _ in range(_SLOPE_STEPS):

        def derivatives(block: Block, scale: Scale = scale, precision: Array = precision) -> tuple[Array, Array]:
            instance = slice(None) if block.instance is None else block.instance
            x, omega = scale.covariate(block.mean)[instance], np.exp(scale.log_omega(block.mean))[instance]
            residual = block.value - np.einsum("k,ckn->cn", pool, block.mean)[:, instance] - offset[:, None]
            square = omega * np.einsum("cj,cd,dj->j", residual, precision, residual)
            return block.repeats @ (x * (square - len(offset))), block.repeats @ (x**2 * square)

        first, second = data.total(derivatives)
        step = slope_step(scale.slope, float(first), float(second), SLOPE_SCALE)
        scale = scale._replace(slope=scale.slope + step)
        if abs(step) < 1e-4:
            break
        precision = _precision_around(data.total(partial(moments_of, scale=scale)), pool, offset, prior)
    return scale


def settled_pool(moments: Moments, prior: LatentPrior) -> tuple[Array, Array, Array]:
    """Pool, offset and precision after a few updates in turn."""
    K = moments.x1.shape[1]
    pool, offset = np.full(K, 1 / K), mean_residual(moments)
    for _ in range(_PRELIMINARY_STEPS):
        precision = _precision_around(moments, pool, offset, prior)
        pool, offset = solve(*curvature(moments, precision, prior, offset), K)
    return pool, offset, _precision_around(moments, pool, offset, prior)


def _precision_around(moments: Moments, pool: Array, offset: Array, prior: LatentPrior) -> Array:
    inverse_scale = prior.inverse_scale + residual_outer(moments, pool, offset)
    return np.asarray((prior.nu + moments.size) * inverse_and_log_det(inverse_scale)[0])


def curvature(moments: Moments, precision: Array, prior: LatentPrior, offset: Array) -> tuple[Array, Array]:
    """Quadratic energy u^T A u / 2 - g^T u of u = (v, b), tangent at an offset: A (K + C, K + C) and g (K + C,)."""
    K, C = moments.x1.shape[1], len(precision)
    quadratic = np.empty((K + C, K + C))
    gram = np.einsum("cd,cdkl->kl", precision, moments.xx)
    shrinkage = max(prior.shrinkage, _LEAST_SHRINKAGE * float(np.diagonal(gram).max()))
    quadratic[:K, :K] = gram + shrinkage * np.eye(K)
    quadratic[:K, K:] = moments.x1.T @ precision
    quadratic[K:, :K] = quadratic[:K, K:].T
    quadratic[K:, K:] = moments.n * precision + np.diag(student_precision(offset**2, prior.offset_scale))
    linear = np.concatenate([np.einsum("cd,cdk->k", precision, moments.xy) + shrinkage / K, precision @ moments.y1])
    return quadratic, linear


def residual_outer(moments: Moments, pool: Array, offset: Array) -> Array:
    """Sum of (y - F v - b)(y - F v - b)^T: (C, C)."""
    fitted_y = moments.xy @ pool  # (C, C)
    fitted = np.einsum("k,cdkl,l->cd", pool, moments.xx, pool)
    gap = moments.y1 - moments.x1 @ pool
    outer = moments.yy - fitted_y - fitted_y.T + fitted + moments.n * np.outer(offset, offset)
    outer -= np.outer(gap, offset) + np.outer(offset, gap)
    values, vectors = np.linalg.eigh(0.5 * (outer + outer.T))
    return np.asarray((vectors * np.maximum(values, 0)) @ vectors.T)  # rounding must not make it indefinite


def mean_residual(moments: Moments) -> Array:
    """Mean of the labels minus the plain average of the views: (C,)."""
    return np.asarray((moments.y1 - moments.x1.mean(axis=1)) / np.maximum(moments.n, 1.0))


def variance_around_average(moments: Moments) -> Array:
    """Residual variance of every output around the plain average of the views (C,); its mean counts as one label."""
    C, K = moments.x1.shape
    n = max(float(moments.n), 1.0)
    square = np.diagonal(residual_outer(moments, np.full(K, 1 / K), np.zeros(C))) / n
    mean = mean_residual(moments)
    return np.asarray(np.maximum(np.maximum(square - mean**2, 0) + mean**2 / n, SMALLEST_VARIANCE))


def choose_shrinkage(moments: Moments, prior: LatentPrior) -> float:
    """Lambda that maximises the Laplace evidence, precision and lambda in turn."""
    best = float(_SHRINKAGES[len(_SHRINKAGES) // 2])
    K = moments.x1.shape[1]
    pool, offset = np.full(K, 1 / K), mean_residual(moments)
    for _ in range(20):
        precision = _precision_around(moments, pool, offset, prior)
        candidates = [prior._replace(shrinkage=float(value)) for value in _SHRINKAGES]
        found = float(
            _SHRINKAGES[int(np.argmax([_log_evidence(moments, precision, one, offset) for one in candidates]))]
        )
        pool, offset = solve(*curvature(moments, precision, prior._replace(shrinkage=found), offset), K)
        if found == best:
            break
        best = found
    return best


def _log_evidence(moments: Moments, precision: Array, prior: LatentPrior, offset: Array) -> float:
    """Laplace evidence of lambda at a precision, up to terms free of lambda."""
    quadratic, linear = curvature(moments, precision, prior, offset)
    K = moments.x1.shape[1]
    pool, offset = solve(quadratic, linear, K)
    u = np.concatenate([pool, offset])
    energy = 0.5 * u @ quadratic @ u - linear @ u + 0.5 * prior.shrinkage / K
    constant = pool_penalty(np.full(K, 1 / K), prior.shrinkage, 1.0)  # of the prior, at its peak
    return log_volume(quadratic, linear, u, K) - float(energy) - constant
