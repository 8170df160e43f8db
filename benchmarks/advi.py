"""ADVI: heavy tails, coverage of its weight intervals and agreement with EM; ten minutes or so on two cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.advi_families import families
from benchmarks.advi_speed import mixed
from benchmarks.exact_mixture import sample_weights, standard_problem
from vbtta import ADVI, EM, GaussianMixture, fit_policy

_LEVEL = 0.9


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements."""
    return {"families": families(quick), "coverage": coverage(4 if quick else 160)}


def coverage(problems: int) -> dict[str, Any]:
    """How often 90 % intervals hold the true weight, over problems whose weights are drawn from the prior.

    The first 40 problems are listed by themselves. Beside the share stands that of the exact posterior's intervals on
    the same problems, and the exact posterior's mass within ADVI's: over problems drawn from the prior its mean is the
    coverage, too, without the luck of the truths drawn. Weights of ADVI and EM are compared on the way.
    """
    truths, intervals, posed, gaps = [], [], [], []
    for seed in range(problems):
        rng = np.random.default_rng(seed)
        predictions, labels, weights = mixed(rng, rng.dirichlet(np.ones(3)), 300)
        engines = (ADVI(steps=800, particles=4, learning_rate=0.05), EM())
        advi, em = (
            fit_policy(
                predictions,
                labels,
                task="regression",
                model=GaussianMixture(concentration=1.0),
                engine=engine,
                guard=False,
            )
            for engine in engines
        )
        truths.append(weights)
        intervals.append(advi.weight_interval(_LEVEL))
        posed.append(standard_problem(predictions, labels))
        gaps.append(float(np.abs(advi.weights - em.weights).max()))
    truth, interval = np.array(truths), np.array(intervals)  # (P, K), (P, K, 2)
    exact = sample_weights(posed, sweeps=1500, burn_in=300)  # (T, P, K)
    tail = 0.5 * (1 - _LEVEL)
    exact_interval = np.moveaxis(np.quantile(exact, [tail, 1 - tail], axis=0), 0, 2)
    mass = ((interval[..., 0] <= exact) & (exact <= interval[..., 1])).mean(axis=(0, 2))  # (P,)
    return {
        "problems": problems,
        "level": _LEVEL,
        "share": _share(truth, interval),
        "share_of_first_40": _share(truth[:40], interval[:40]),
        "exact_posterior_share": _share(truth, exact_interval),
        "exact_posterior_share_of_first_40": _share(truth[:40], exact_interval[:40]),
        "exact_mass_within": {"mean": float(mass.mean()), "least": float(mass.min())},
        "em_advi_largest_difference": {"median": float(np.median(gaps)), "largest": max(gaps), "each": gaps},
    }


def _share(truth: np.ndarray[Any, Any], interval: np.ndarray[Any, Any]) -> dict[str, Any]:
    hits = ((interval[..., 0] <= truth) & (truth <= interval[..., 1])).mean(axis=1)  # (P,)
    share, error = float(hits.mean()), float(hits.std(ddof=1) / np.sqrt(len(hits)))
    return {"share": share, "standard_error": error, "within_two_errors": bool(abs(share - _LEVEL) <= 2 * error)}
