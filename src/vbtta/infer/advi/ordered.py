"""Ordered levels and rankings: likelihoods that have no closed-form engine, as densities with z summed out."""

__all__ = ["OrdinalDensity", "RankingDensity"]

from typing import Any

import numpy as np

from vbtta._support.extras import require
from vbtta.infer.advi.densities import Sample, Units, Values, tensor
from vbtta.infer.advi.ordered_posteriors import in_order
from vbtta.labels import Array
from vbtta.specs import OrdinalMixture, RankingMixture

torch = require("torch", "advi")
dist = require("pyro.distributions", "advi")

_FAR = 35.0  # where a cut point is out of reach of any utility


class OrdinalDensity:
    """Cumulative probit: P_k(y <= c) = Phi(b_c - s_k f_k), f in standard units.

    The cut points follow from the levels' frequencies q at scores of unit variance, b = sqrt(1 + s^2) Phi^-1(cumsum q):
    a simplex, which keeps them in order and starts at the frequencies observed.
    """

    def __init__(self, score: Array, level: Array, count: Array, n_levels: int, spec: OrdinalMixture) -> None:
        self._score, self._level = tensor(score.T), tensor(level.astype(np.int64))  # (K, J), (J,)
        self._count = tensor(count)
        K, self.n_units = self._score.shape
        self.width = 4 * K
        seen = np.bincount(level, count, n_levels) + 0.5
        self._frequency = seen / seen.sum()
        one = torch.ones((), dtype=torch.float64)
        concentration = 1.0 if spec.concentration is None else spec.concentration
        self._priors = {
            "weights": dist.Dirichlet(concentration * one.expand(K), validate_args=False),
            "log_slope": dist.Normal(0 * one, spec.slope_scale * one, validate_args=False),
            "xi": dist.Normal(torch.zeros(K, dtype=torch.float64), spec.xi_scale, validate_args=False).to_event(1),
            "frequency": dist.Dirichlet(spec.level_concentration * one.expand(n_levels), validate_args=False),
        }

    def prior(self, sample: Sample) -> Values:
        """Weights, slopes, and the levels' frequencies."""
        return {name: sample(name, prior) for name, prior in self._priors.items()}

    def start(self) -> dict[str, Array]:
        """The frequencies observed."""
        return {"frequency": self._frequency}

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Sum over labels of ln sum_k w_k P_k(y): (M,)."""
        edges = _edges(values)  # (M, L + 1)
        level = self._level[units]
        utility = torch.exp(values["log_slope"][..., None] + values["xi"])[..., None] * self._score[:, units]
        low = edges[..., None, level] - utility  # (M, K, j)
        high = edges[..., None, level + 1] - utility
        flip = low + high > 0  # the difference of two tails is exact on the lower side
        low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
        log_high = torch.special.log_ndtr(high)
        gap = torch.clamp(torch.special.log_ndtr(low) - log_high, max=-1e-12)
        each = log_high + torch.log(-torch.expm1(gap))
        mixed = torch.logsumexp(values["weights"].log()[..., None] + each, dim=-2)
        return (self._count[units] * mixed).sum(dim=-1)


def _edges(values: Values) -> Any:
    below = torch.cumsum(values["frequency"], dim=-1)[..., :-1]
    stretch = torch.sqrt(1 + torch.exp(2 * values["log_slope"]))[..., None]
    inner = stretch * torch.special.ndtri(torch.clamp(below, 1e-12, 1 - 1e-12))
    far = torch.full((*inner.shape[:-1], 1), _FAR, dtype=torch.float64)
    return torch.cat([-far, torch.clamp(inner, -_FAR, _FAR), far], dim=-1)


class RankingDensity:
    """Plackett-Luce: prod_r softmax over what is left of kappa_k f_k, f in standard units."""

    def __init__(self, score: Array, orders: Array, count: Array, spec: RankingMixture) -> None:
        ordered, chosen = in_order(score, orders)  # (J, K, L), (J, L)
        self._score, self._chosen = tensor(ordered.transpose(1, 0, 2)), tensor(chosen.astype(np.float64))
        self._count = tensor(count)
        K, self.n_units, L = self._score.shape
        self.width = 4 * K * L
        one = torch.ones((), dtype=torch.float64)
        concentration = 1.0 if spec.concentration is None else spec.concentration
        self._priors = {
            "weights": dist.Dirichlet(concentration * one.expand(K), validate_args=False),
            "log_kappa": dist.Normal(0 * one, spec.kappa_scale * one, validate_args=False),
            "xi": dist.Normal(torch.zeros(K, dtype=torch.float64), spec.xi_scale, validate_args=False).to_event(1),
        }

    def prior(self, sample: Sample) -> Values:
        """Weights and temperatures."""
        return {name: sample(name, prior) for name, prior in self._priors.items()}

    def start(self) -> dict[str, Array]:
        """Uniform weights, temperatures of one."""
        return {}

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Sum over rankings of ln sum_k w_k P_k(order): (M,)."""
        kappa = torch.exp(values["log_kappa"][..., None] + values["xi"])
        utility = kappa[..., None, None] * self._score[:, units]  # (M, K, j, L)
        left = torch.logcumsumexp(utility.flip(-1), dim=-1).flip(-1)
        each = (self._chosen[units] * (utility - left)).sum(dim=-1)
        mixed = torch.logsumexp(values["weights"].log()[..., None] + each, dim=-2)
        return (self._count[units] * mixed).sum(dim=-1)
