"""From draws to the conjugate distributions of the same moments, which the EM engine's posteriors are made of."""

__all__ = ["match_dirichlet", "match_gamma", "match_wishart", "precision_draws"]

import numpy as np
from scipy import special

from vbtta.labels import Array

_MOST_DOF = 1e9


def precision_draws(draws: dict[str, Array], inverse_scale: Array) -> Array:
    """Lambda = T T^T from Bartlett's sites: (M, K, C, C); `inverse_scale` is the prior's V, diagonal."""
    root = np.sqrt(draws["chi_squared"])  # (M, K, C)
    C = root.shape[-1]
    factor = root[..., None] * np.eye(C)
    if C > 1:
        factor[(Ellipsis, *np.tril_indices(C, -1))] = draws["lower"]
    factor = factor / np.sqrt(np.diagonal(inverse_scale))[:, None]
    return np.asarray(factor @ np.swapaxes(factor, -1, -2))


def match_wishart(draws: Array) -> tuple[Array, Array]:
    """Degrees of freedom (K,) and inverse scales (K, C, C) with the draws' E[Lambda] and E ln|Lambda|.

    The gap ln|E Lambda| - E ln|Lambda| depends on the degrees of freedom alone and falls with them: bisection. They
    stay above C + 1, so that the predictive variance is finite.
    """
    C = draws.shape[-1]
    mean = draws.mean(axis=0)
    gap = np.linalg.slogdet(mean)[1] - np.linalg.slogdet(draws)[1].mean(axis=0)  # (K,)
    low, high = np.full(len(gap), np.log(C + 1.1)), np.full(len(gap), np.log(_MOST_DOF))
    for _ in range(80):
        middle = 0.5 * (low + high)
        nu = np.exp(middle)
        terms = special.digamma(0.5 * (nu[:, None] - np.arange(C)))
        wide = C * np.log(0.5 * nu) - terms.sum(axis=1) > gap
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    dof = np.exp(0.5 * (low + high))
    return dof, np.asarray(dof[:, None, None] * np.linalg.inv(mean))


def match_gamma(draws: Array) -> tuple[Array, Array]:
    """Shapes and rates (U,) with the draws' mean and mean logarithm."""
    dof, inverse_scale = match_wishart_of_one(draws)
    return 0.5 * dof, 0.5 * inverse_scale


def match_wishart_of_one(draws: Array) -> tuple[Array, Array]:
    """As :func:`match_wishart` for scalars (M, U), without the lower limit on the degrees of freedom."""
    mean = draws.mean(axis=0)
    gap = np.maximum(np.log(mean) - np.log(draws).mean(axis=0), 1e-12)
    low, high = np.full(len(gap), -5.0), np.full(len(gap), np.log(_MOST_DOF))
    for _ in range(80):
        middle = 0.5 * (low + high)
        wide = middle - special.digamma(np.exp(middle)) > gap
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    shape = np.exp(0.5 * (low + high))
    return 2 * shape, 2 * shape / mean


def match_dirichlet(draws: Array) -> Array:
    """Counts (..., n) of Dirichlets with the draws' means and, over the entries, total variance; draws (M, ..., n)."""
    mean, variance = draws.mean(axis=0), draws.var(axis=0)
    total = (mean * (1 - mean)).sum(axis=-1) / np.maximum(variance.sum(axis=-1), 1e-300) - 1
    return np.asarray(mean * np.maximum(total, 1e-3)[..., None])
