"""Mixtures of Student-t distributions: density, quantiles and CRPS as functions of arrays.

Component k of row n has weight w_nk, degrees of freedom d_k (infinite: a normal), location
(C outputs) and a scale matrix S; its covariance is S d/(d - 2).
"""

__all__ = ["crps", "log_density", "moments", "quantile", "variance_factor"]

from itertools import pairwise

import numpy as np
from scipy import special

from vbtta.labels import Array

# Beyond this many degrees of freedom a t is a normal to 1e-8, and log-gamma differences lose digits.
_NORMAL_FROM = 1e8
# Probabilities whose quantiles cut the line into panels on which a mixture's CDF is smooth.
_PANELS = np.array([1e-7, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5])
_PANELS = np.concatenate([_PANELS, 1 - _PANELS[-2::-1]])
_BLOCK = 1 << 20  # entries of the largest temporary


def moments(weights: Array, dof: Array, location: Array, scale: Array) -> tuple[Array, Array]:
    """Mean (N, C) and covariance (N, C, C); location is (N, K, C), scale (N, K, C, C)."""
    mean = np.einsum("nk,nkc->nc", weights, location)
    deviation = location - mean[:, None]  # (N, K, C)
    covariance = np.einsum("nk,nkcd->ncd", weights * variance_factor(dof), scale)
    covariance += np.einsum("nk,nkc,nkd->ncd", weights, deviation, deviation)
    return mean, covariance


def variance_factor(dof: Array) -> Array:
    """Covariance over scale, d/(d - 2): (K,); 1 for a normal."""
    finite = np.where(np.isinf(dof), 3.0, dof)
    return np.where(np.isinf(dof), 1.0, finite / (finite - 2))


def log_density(y: Array, weights: Array, dof: Array, location: Array, scale: Array) -> Array:
    """Log density (N,) of vectors y (N, C)."""
    n_outputs = location.shape[2]
    factor = np.linalg.cholesky(scale)  # (N, K, C, C)
    residual = (y[:, None] - location)[..., None]  # (N, K, C, 1)
    distance = (np.linalg.solve(factor, residual)[..., 0] ** 2).sum(axis=2)  # (N, K)
    log_det = 2 * np.log(np.diagonal(factor, axis1=2, axis2=3)).sum(axis=2)
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    log_kernel = _log_student(distance, dof, n_outputs) - 0.5 * log_det
    return np.asarray(special.logsumexp(log_weights + log_kernel, axis=1))


def quantile(q: float, weights: Array, dof: Array, location: Array, spread: Array) -> Array:
    """The q-quantile of every output's marginal: (N, C); spread is (N, K, C), a standard scale.

    The quantile lies between the components' own; bisection there halves the bracket until it
    is down to rounding.
    """
    return _bisect(q, weights, dof, location, spread, steps=60)


def crps(y: Array, weights: Array, dof: Array, location: Array, spread: Array) -> Array:
    """Continuous ranked probability score, the integral of (F(x) - 1{x >= y})^2: (N, C).

    Gauss-Legendre on panels between the mixture's own (approximate) quantiles and y, so that no
    component, however narrow, falls between the nodes.
    """
    size = max(1, _BLOCK // (location.shape[1] * location.shape[2] * 8))
    parts = [
        _crps_block(y[s], weights[s], dof, location[s], spread[s])
        for s in (slice(start, start + size) for start in range(0, len(y), size))
    ]
    return np.concatenate(parts) if parts else np.zeros_like(y)


def _crps_block(y: Array, weights: Array, dof: Array, location: Array, spread: Array) -> Array:
    knots = [_bisect(float(q), weights, dof, location, spread, steps=12) for q in _PANELS]
    edges = np.sort(np.stack([*knots, y]), axis=0)  # (P, N, C)
    node, node_weight = np.polynomial.legendre.leggauss(8)
    total = np.zeros_like(y)
    for left, right in pairwise(edges):
        half = 0.5 * (right - left)
        beyond = left >= y  # y is an edge: every panel lies on one side of it
        for position, share in zip(node, node_weight, strict=True):
            below = _cdf(left + half * (1 + position), weights, dof, location, spread)
            total += share * half * np.where(beyond, 1 - below, below) ** 2
    return total


def _cdf(x: Array, weights: Array, dof: Array, location: Array, spread: Array) -> Array:
    """Marginal distribution functions (N, C) at x (N, C)."""
    standard = (x[:, None] - location) / spread  # (N, K, C)
    below = np.empty_like(standard)
    for k, degrees in enumerate(dof):
        below[:, k] = special.ndtr(standard[:, k]) if degrees > _NORMAL_FROM else special.stdtr(degrees, standard[:, k])
    return np.asarray(np.einsum("nk,nkc->nc", weights, below))


def _bisect(q: float, weights: Array, dof: Array, location: Array, spread: Array, steps: int) -> Array:
    component = location + spread * special.stdtrit(dof, q)[:, None]  # (N, K, C)
    used = weights[:, :, None] > 0
    low = np.where(used, component, np.inf).min(axis=1)
    high = np.where(used, component, -np.inf).max(axis=1)
    for _ in range(steps):
        middle = 0.5 * (low + high)
        short = _cdf(middle, weights, dof, location, spread) < q
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.asarray(0.5 * (low + high))


def _log_student(distance: Array, dof: Array, n_outputs: int) -> Array:
    """Log density of a standard C-dimensional t at squared Mahalanobis distances (N, K)."""
    degrees = np.minimum(dof, _NORMAL_FROM)
    student = (
        special.gammaln(0.5 * (degrees + n_outputs))
        - special.gammaln(0.5 * degrees)
        - 0.5 * n_outputs * np.log(np.pi * degrees)
        - 0.5 * (degrees + n_outputs) * np.log1p(distance / degrees)
    )
    normal = -0.5 * n_outputs * np.log(2 * np.pi) - 0.5 * distance
    return np.asarray(np.where(dof > _NORMAL_FROM, normal, student))
