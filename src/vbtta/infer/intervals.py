"""Intervals for weights on the simplex, from the observed information; never [0, 0]."""

__all__ = ["WeightInformation", "eliminate", "weight_intervals"]

from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.labels import Array


class WeightInformation(NamedTuple):
    """The log likelihood around its maximum, as a function of the weights alone."""

    gradient: (
        Array  # (K,): sum_j rho_jk - J, what a unit of weight moved to view k would gain; 0 where the weight is free
    )
    information: Array  # (K, K): sum_j rho_j rho_j^T less what the nuisance parameters take away


def eliminate(information: Array, n_weights: int, nuisance_prior: Array) -> Array:
    """The information on the first parameters when the others are inferred too: a Schur complement."""
    inside = information[n_weights:, n_weights:] + np.diag(nuisance_prior)
    cross = information[:n_weights, n_weights:]
    return np.asarray(information[:n_weights, :n_weights] - cross @ np.linalg.solve(inside, cross.T))


def weight_intervals(weights: Array, known: WeightInformation, level: float) -> Array:
    """Intervals (K, 2) at a level.

    A free weight gets the interval of its square root's normal approximation, whose variance hardly depends
    on the weight. A weight at zero gets the one-sided profile limit: the w at which
    -g w + h w^2 / 2 reaches the quantile, g its gradient and h its information when the free weights give way.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, such as 0.9; got {level}")
    free = np.flatnonzero(weights > 0)
    two_sided, one_sided = special.ndtri(0.5 + 0.5 * level), special.ndtri(level)
    moves = _tangent(weights, free)  # (K, F - 1): directions that keep the sum and the zeros
    inner = moves.T @ known.information @ moves
    inverse = np.linalg.pinv(inner, hermitian=True)
    covariance = moves @ inverse @ moves.T
    error = np.sqrt(np.maximum(np.diagonal(covariance), 0))
    bounds = np.zeros((len(weights), 2))
    root = np.sqrt(weights[free])
    reach = two_sided * error[free] / (2 * root)
    bounds[free, 0] = np.maximum(root - reach, 0) ** 2
    bounds[free, 1] = (root + reach) ** 2
    for k in np.flatnonzero(weights == 0):
        direction = -weights.copy()
        direction[k] += 1
        pull = known.information @ direction
        curvature = max(direction @ pull - (moves.T @ pull) @ inverse @ (moves.T @ pull), 1e-12)
        slope = min(known.gradient[k], 0.0)
        bounds[k, 1] = (slope + np.sqrt(slope**2 + curvature * one_sided**2)) / curvature
    return np.clip(bounds, 0, 1)


def _tangent(weights: Array, free: Array) -> Array:
    """An orthonormal basis of the directions within the simplex's face."""
    basis = np.zeros((len(weights), max(len(free) - 1, 0)))
    if len(free) > 1:
        centred = np.eye(len(free)) - 1 / len(free)
        basis[free] = np.linalg.svd(centred)[0][:, : len(free) - 1]
    return basis
