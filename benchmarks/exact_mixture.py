"""The exact posterior of the continuous mixture by Gibbs sampling, many problems of one size at a time.

    z | rest ~ Categorical,   w | z ~ Dirichlet(1 + n),   theta_k | rest ~ Normal,   Lambda_k | rest ~ Gamma

For one output and the affine link. Slow and asymptotically exact: what intervals of an approximation are judged by.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.problems import posed
from vbtta import GaussianMixture, LabelSets, ViewPredictions

__all__ = ["StandardProblem", "sample_weights", "standard_problem"]

Array = np.ndarray[Any, Any]


class StandardProblem(NamedTuple):
    """Data in standard units, one row a label, and the priors that go with them."""

    f: Array  # (J, K)
    y: Array  # (J,)
    beta: float
    nu: float
    inverse_scale: float


def standard_problem(predictions: ViewPredictions, labels: LabelSets) -> StandardProblem:
    """What the engines make of data with one output."""
    problem, _ = posed(predictions, labels, GaussianMixture(), noise="none")
    prior, standard = problem.prior, problem.data.standard
    return StandardProblem(
        standard.apply(predictions.outputs)[labels.instance, :, 0],
        standard.apply(labels.continuous(1))[:, 0],
        prior.beta,
        prior.nu,
        float(prior.inverse_scale[0, 0]),
    )


def sample_weights(problems: list[StandardProblem], sweeps: int, burn_in: int, seed: int = 0) -> Array:
    """Draws (sweeps, P, K) of the weights under a Dirichlet prior of concentration 1."""
    rng = np.random.default_rng(seed)
    f = np.stack([problem.f for problem in problems])  # (P, J, K)
    gap = np.stack([problem.y for problem in problems])[:, :, None] - f
    beta, nu, scale = (
        np.array([getattr(problem, name) for problem in problems])[:, None] for name in StandardProblem._fields[2:]
    )
    P, _, K = f.shape
    weights, precision = np.full((P, K), 1 / K), nu / scale * np.ones(K)
    slope, offset = np.zeros((P, K)), np.zeros((P, K))
    draws = np.empty((sweeps, P, K))
    for sweep in range(-burn_in, sweeps):
        residual = gap - slope[:, None] * f - offset[:, None]
        log_share = (np.log(weights) + 0.5 * np.log(precision))[:, None] - 0.5 * precision[:, None] * residual**2
        view = (log_share + rng.gumbel(size=f.shape)).argmax(axis=2)
        mine = (view[:, :, None] == np.arange(K)).astype(np.float64)
        count = mine.sum(axis=1)
        gamma = np.maximum(rng.gamma(1 + count), 1e-300)
        weights = gamma / gamma.sum(axis=1, keepdims=True)
        slope, offset = _calibration(rng, mine, f, gap, precision, beta)
        residual = gap - slope[:, None] * f - offset[:, None]
        rate = scale + (mine * residual**2).sum(axis=1)
        precision = 2 * rng.gamma(0.5 * (nu + count)) / rate
        if sweep >= 0:
            draws[sweep] = weights
    return draws


def _calibration(
    rng: np.random.Generator, mine: Array, f: Array, gap: Array, precision: Array, beta: Array
) -> tuple[Array, Array]:
    """Slopes and offsets (P, K) from their normal: the Cholesky factor of a 2 x 2 precision, written out."""
    a = beta + precision * (mine * f**2).sum(axis=1)
    b = precision * (mine * f).sum(axis=1)
    d = beta + precision * mine.sum(axis=1)
    first, second = precision * (mine * f * gap).sum(axis=1), precision * (mine * gap).sum(axis=1)
    l11 = np.sqrt(a)
    l21 = b / l11
    l22 = np.sqrt(d - l21**2)
    noise = rng.standard_normal((2, *a.shape))
    forward = first / l11
    offset = ((second - l21 * forward) / l22 + noise[1]) / l22
    return (forward + noise[0] - l21 * offset) / l11, offset
