"""The variational family: a full-rank normal on the unconstrained space, draws from it and its moments.

    u = m + L e,   e ~ Normal(0, I),   parameters = T(u)

T is site by site: the identity, exp, the logistic function or stick-breaking. Densities use torch's transforms; here
are the same functions in NumPy, so that a saved policy predicts and has intervals without torch.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

import numpy as np
from scipy import linalg, special

from vbtta.data.labels import Array

N_DRAWS = 4000  # for moments
_INTERVAL_DRAWS = 20_000  # of the weights alone: quantiles need more than means
_MAX_DOF = 1e9  # of a matched Wishart or gamma distribution


class Site(NamedTuple):
    """One named parameter of a model."""

    name: str
    kind: str  # "real", "positive", "unit_interval" or "simplex", the latter along the last axis
    shape: tuple[int, ...]

    @property
    def unconstrained_shape(self) -> tuple[int, ...]:
        """A simplex of n entries has n - 1 free ones."""
        return (*self.shape[:-1], self.shape[-1] - 1) if self.kind == "simplex" else self.shape

    @property
    def size(self) -> int:
        """Number of entries of u that a site takes."""
        return math.prod(self.unconstrained_shape)


class Guide(NamedTuple):
    """Q(u) = Normal(m, L L^T) and the sites that u consists of."""

    sites: tuple[Site, ...]
    mean: Annotated[Array, "Q"]  # m
    factor: Annotated[Array, "Q Q"]  # L, lower triangular

    def draw(self, size: int, seed: int = 0) -> dict[str, Array]:
        """Draws (size, *shape) of every site; the same for the same seed."""
        # Each entry of e takes the midpoints of `size` equally likely intervals, in random order (a Latin hypercube).
        # With independent draws, the sampling error of one seed would bias all intervals the same way.
        noise = np.empty((size, len(self.mean)))
        noise[:] = special.ndtri((np.arange(size) + 0.5) / size)[:, None]
        noise = np.random.default_rng(seed).permuted(noise, axis=0)
        return constrain(self.sites, self.mean + noise @ self.factor.T)

    def only(self, name: str) -> "Guide":
        """Q of one site alone."""
        site = next(site for site in self.sites if site.name == name)
        rows = self.factor[site_slices(self.sites)[name]]
        upper: Array = linalg.qr(rows.T, mode="r")[0][: len(rows)]
        return Guide((site,), self.mean[site_slices(self.sites)[name]], upper.T)

    def marginal(self, name: str) -> tuple[Array, Array]:
        """Mean (n,) and covariance (n, n) of a site's unconstrained entries."""
        rows = self.factor[site_slices(self.sites)[name]]
        return self.mean[site_slices(self.sites)[name]], np.asarray(rows @ rows.T)


def site_slices(sites: tuple[Site, ...]) -> dict[str, slice]:
    """The entries of u that belong to each site."""
    slices, first = {}, 0
    for site in sites:
        slices[site.name] = slice(first, first + site.size)
        first = slices[site.name].stop
    return slices


def constrain(sites: tuple[Site, ...], vectors: Array) -> dict[str, Array]:
    """Parameters (..., *shape) of unconstrained vectors (..., D)."""
    slices = site_slices(sites)
    return {
        site.name: _TRANSFORMS[site.kind](
            vectors[..., slices[site.name]].reshape(*vectors.shape[:-1], *site.unconstrained_shape)
        )
        for site in sites
    }


def _stick_breaking(values: Array) -> Array:
    """Simplices of n entries from n - 1 real numbers; zeros give 1/n."""
    remaining = values.shape[-1] - np.arange(values.shape[-1])
    fraction = special.expit(values - np.log(remaining))
    rest = np.cumprod(1 - fraction, axis=-1)
    ones = np.ones((*values.shape[:-1], 1))
    return np.asarray(np.concatenate([fraction, ones], axis=-1) * np.concatenate([ones, rest], axis=-1))


_TRANSFORMS = {"real": np.asarray, "positive": np.exp, "unit_interval": special.expit, "simplex": _stick_breaking}


def precision_draws(draws: dict[str, Array], inverse_scale: Array) -> Array:
    """Lambda = T T^T from the sites of Bartlett's decomposition: (M, K, C, C); `inverse_scale` is the prior's V."""
    root = np.sqrt(draws["chi_squared"])  # (M, K, C)
    C = root.shape[-1]
    factor = root[..., None] * np.eye(C)
    if C > 1:
        factor[(Ellipsis, *np.tril_indices(C, -1))] = draws["lower"]
    factor = factor / np.sqrt(np.diagonal(inverse_scale))[:, None]  # V is diagonal
    return np.asarray(factor @ np.swapaxes(factor, -1, -2))


def match_wishart(draws: Array, least: float = 0.1) -> tuple[Array, Array]:
    """Degrees of freedom (K,) and inverse scales (K, C, C) with the mean and the mean log determinant of draws."""
    # ln|E Lambda| - E ln|Lambda| depends on the degrees of freedom alone and falls with them: bisection. They are at
    # least C + 1 + `least`; a positive `least` keeps the predictive variance finite.
    C = draws.shape[-1]
    mean = draws.mean(axis=0)
    gap = np.linalg.slogdet(mean)[1] - np.linalg.slogdet(draws)[1].mean(axis=0)  # (K,)
    low, high = np.full(len(gap), np.log(C + 1 + least)), np.full(len(gap), np.log(_MAX_DOF))
    for _ in range(80):
        middle = 0.5 * (low + high)
        dof = np.exp(middle)
        digammas = special.digamma(0.5 * (dof[:, None] - np.arange(C)))
        too_small = C * np.log(0.5 * dof) - digammas.sum(axis=1) > gap
        low, high = np.where(too_small, middle, low), np.where(too_small, high, middle)
    dof = np.exp(0.5 * (low + high))
    return dof, np.asarray(dof[:, None, None] * np.linalg.inv(mean))


def match_gamma(draws: Array) -> tuple[Array, Array]:
    """Shapes and rates (U,) with the mean and the mean logarithm of draws (M, U): a Wishart distribution of C = 1."""
    dof, inverse_scale = match_wishart(draws[..., None, None], least=0.01 - 2)
    return 0.5 * dof, 0.5 * inverse_scale[:, 0, 0]


def match_dirichlet(draws: Array) -> Array:
    """Counts (..., n) of Dirichlets with the means and the total variance of draws (M, ..., n)."""
    mean, variance = draws.mean(axis=0), draws.var(axis=0)
    total = (mean * (1 - mean)).sum(axis=-1) / np.maximum(variance.sum(axis=-1), 1e-300) - 1
    return np.asarray(mean * np.maximum(total, 1e-3)[..., None])


def weights_of(values: dict[str, Array]) -> Array:
    """The weights of the views (..., K) as a function of a model's parameters."""
    name = _weight_site(values)
    if name == "pool":
        return np.asarray(values["pool"] / values["pool"].sum(axis=-1, keepdims=True))
    if name == "class_weights":
        return np.asarray(values["class_weights"].mean(axis=-2))  # (..., C, K)
    return values["weights"]


def _weight_site(names: Collection[str]) -> str:
    """The site that decides the weights; a `pool` does only where there are no `weights`."""
    return next(name for name in ("class_weights", "weights", "pool") if name in names)


@dataclass(frozen=True)
class WeightDraws:
    """A posterior by ADVI: Q, and which of its views are kept.

    Weights are posterior means. Calibration enters predictions with its mean and covariance under Q (for class labels
    with its mean), precisions as the Wishart distribution of the same moments.
    """

    guide: Guide
    kept: Annotated[Array, "K"]  # positions among the views of the fit

    def draws(self, size: int = N_DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in the model's standard units."""
        return self.guide.draw(size, seed)

    def weight_interval(self, level: float) -> Array:
        """Equal-tailed intervals (K, 2) of the weights of the kept views: quantiles of draws.

        Weights that depend on the input have the normal intervals of their average.
        """
        if getattr(self, "gate", None) is not None:
            bounds: Array = super().weight_interval(level)  # type: ignore[misc]
            return bounds
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, such as 0.9; got {level}")
        name = _weight_site([site.name for site in self.guide.sites])
        weights = weights_of(self.guide.only(name).draw(_INTERVAL_DRAWS))[:, self.kept.astype(int)]
        weights = weights / weights.sum(axis=1, keepdims=True)
        return np.asarray(np.quantile(weights, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0).T)

    def keep(self, views: Array) -> Self:
        """The same with only some of the views."""
        rest: Self = super().keep(views)  # type: ignore[misc]
        return replace(rest, kept=self.kept[views])
