"""The variational family: a full-rank normal on the unconstrained space, and draws from it.

    u = m + L e,   e ~ Normal(0, I),   parameters = T(u)

T is site by site: the identity, exp, the logistic function or stick-breaking. Here in NumPy, for predictions and
intervals; the densities use torch's transforms, which are the same functions.
"""

__all__ = ["Guide", "Site", "constrain", "site_slices", "unconstrained_size"]

from typing import NamedTuple

import numpy as np
from scipy import linalg, special

from vbtta.labels import Array


class Site(NamedTuple):
    """One named parameter of a model."""

    name: str
    kind: str  # "real", "positive", "unit_interval" or "simplex", the latter along the last axis
    shape: tuple[int, ...]

    @property
    def unconstrained_shape(self) -> tuple[int, ...]:
        """A simplex of n entries has n - 1 free ones."""
        return (*self.shape[:-1], self.shape[-1] - 1) if self.kind == "simplex" else self.shape


class Guide(NamedTuple):
    """Q(u) = Normal(m, L L^T) and the sites that u holds, one after the other."""

    sites: tuple[Site, ...]
    mean: Array  # (D,): m
    factor: Array  # (D, D): L, lower triangular

    def draw(self, size: int, seed: int = 0) -> dict[str, Array]:
        """Draws (size, *shape) of every site; the same for the same seed.

        Each entry of e takes the midpoints of `size` equally likely intervals, in an order of its own (a Latin
        hypercube): independent draws of one seed would make all intervals too narrow or too wide by the same luck.
        """
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


def unconstrained_size(site: Site) -> int:
    """Number of entries of u that a site takes."""
    return int(np.prod(site.unconstrained_shape, dtype=np.int64))


def site_slices(sites: tuple[Site, ...]) -> dict[str, slice]:
    """Where each site's entries stand in u."""
    places, first = {}, 0
    for site in sites:
        last = first + unconstrained_size(site)
        places[site.name] = slice(first, last)
        first = last
    return places


def constrain(sites: tuple[Site, ...], vectors: Array) -> dict[str, Array]:
    """Parameters (..., *shape) of unconstrained vectors (..., D)."""
    places = site_slices(sites)
    return {
        site.name: _TRANSFORMS[site.kind](
            vectors[..., places[site.name]].reshape(*vectors.shape[:-1], *site.unconstrained_shape)
        )
        for site in sites
    }


def _stick_breaking(values: Array) -> Array:
    """Simplices of n entries from n - 1: what is left of the stick is broken again and again; zeros give 1/n."""
    remaining = values.shape[-1] - np.arange(values.shape[-1])  # pieces still to come
    broken = special.expit(values - np.log(remaining))
    left = np.cumprod(1 - broken, axis=-1)
    one = np.ones((*values.shape[:-1], 1))
    return np.asarray(np.concatenate([broken, one], axis=-1) * np.concatenate([one, left], axis=-1))


_TRANSFORMS = {
    "real": np.asarray,
    "positive": np.exp,
    "unit_interval": special.expit,
    "simplex": _stick_breaking,
}
