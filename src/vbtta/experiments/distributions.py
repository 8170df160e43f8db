"""Inputs of the artificial problems: Gaussian, or Gamma(2, 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_inputs", "mean_and_sd"]


def draw_inputs(distribution: str, rng: np.random.Generator, n_rows: int, dimension: int) -> NDArray[np.float64]:
    """Independent coordinates, (n_rows, dimension): N(0, 1) or Gamma(2, 2), shape and rate.

    Examples
    --------
    >>> draw_inputs("gamma", np.random.default_rng(0), 4, 2).shape
    (4, 2)
    """
    if distribution == "gaussian":
        return rng.standard_normal((n_rows, dimension))
    if distribution == "gamma":
        return rng.gamma(2.0, 0.5, (n_rows, dimension))
    raise ValueError(f"distribution must be 'gaussian' or 'gamma'; got {distribution!r}.")


def mean_and_sd(distribution: str) -> tuple[float, float]:
    """Mean and standard deviation of a coordinate."""
    return (0.0, 1.0) if distribution == "gaussian" else (1.0, float(np.sqrt(0.5)))
