"""Component families of a continuous mixture that are not normal, as mixtures of normals of different scale."""

__all__ = ["laplace_nodes"]

import numpy as np

from vbtta.labels import Array

_STEP = 0.6
_LOWEST, _HIGHEST = -12.0, 3.6  # of ln s: the density is cut where exp(-s) or s is negligible


def laplace_nodes() -> tuple[Array, Array]:
    """Variances s and shares of the normals that make up a Laplace distribution of unit variance.

    A normal whose variance is exponential is a Laplace. The integral over ln s is smooth and falls off at both
    ends, where the trapezoid rule converges fast; shares sum to 1 and the variance is 1.

    Examples
    --------
    >>> size, share = laplace_nodes()
    >>> density = (share * np.exp(-0.5 / size) / np.sqrt(2 * np.pi * size)).sum()  # at 1
    >>> float(abs(density - np.exp(-np.sqrt(2)) / np.sqrt(2)) < 1e-4)
    1.0
    """
    log_size = np.arange(_LOWEST, _HIGHEST, _STEP)
    size = np.exp(log_size)
    share = size * np.exp(-size)
    share = share / share.sum()
    return size / (share @ size), share
