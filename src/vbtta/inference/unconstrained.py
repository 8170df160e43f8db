"""Joint log densities on the unconstrained space: a prior over named sites, and a likelihood with z summed out.

A prior is a function of `sample(name, distribution)`. With `pyro.sample` it is a Pyro model; with a function that looks
values up it gives the log prior of many parameter vectors at once: the particles, the first axis of every tensor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from vbtta.data.labels import Array
from vbtta.inference.advi import Site, site_slices

Values = dict[str, Tensor]  # parameters by site name
Units = slice | Tensor  # labels or instances, by position
Sample = Callable[[str, Any], Tensor]  # of a name and a distribution, torch's or Pyro's
CHUNK_ENTRIES = 1 << 20  # of the largest temporary array of a chunk


class Density(ABC):
    """A model with its data, whose units are independent given the parameters."""

    n_units: int  # labels, or instances where the labels of an instance depend on each other
    width: int  # entries of a temporary array per unit and particle
    priors: dict[str, Any]  # distributions by site name

    def prior(self, sample: Sample) -> Values:
        """Sample every site; overridden where one's prior depends on another."""
        return {name: sample(name, prior) for name, prior in self.priors.items()}

    def start(self) -> dict[str, Array]:
        """Start values of sites; the others start at their prior's mean."""
        return {}

    @abstractmethod
    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Log likelihood of the given units under every particle: (M,)."""


class UnconstrainedDensity:
    """ln P(data, parameters(u)) + ln |d parameters / du|, and its gradient, for many u at once."""

    def __init__(self, density: Density) -> None:
        self.density, self.n_units = density, density.n_units
        start, known, sites = [np.zeros(0)], density.start(), []

        def record(name: str, distribution: Any) -> Tensor:
            shape = tuple(int(n) for n in (*distribution.batch_shape, *distribution.event_shape))
            site, mean = Site(name, _kind(name, distribution.support), shape), torch.tensor(torch.nan)
            sites.append(site)
            with suppress(NotImplementedError):
                mean = distribution.mean
            value = tensor(known[name]) if name in known else mean
            free = _transform(site).inv(value.expand(shape).to(torch.float64)) if torch.isfinite(value).all() else None
            start.append(np.zeros(site.size) if free is None else np.nan_to_num(free.numpy().ravel()))
            return mean

        with torch.no_grad():
            density.prior(record)
        self.sites, self.start = tuple(sites), np.concatenate(start)
        self.slices = site_slices(self.sites)

    def value_and_gradient(self, vectors: Array, units: Array | None = None) -> tuple[Array, Array]:
        """Values (M,) and gradients (M, D) at vectors (M, D); `units` estimate the sum over all of them."""
        # Large data are processed in chunks, whose gradients are added. If a matrix cannot be factored, the values are
        # NaN, which the ascent treats as divergence.
        u = tensor(vectors).requires_grad_()
        total = np.zeros(len(u))
        scale, chunks = 1.0 if units is None else self.n_units / len(units), self._chunks(len(u), units)
        try:
            for chunk in chunks:
                values, log_prior = self._prior(u)
                part = log_prior / len(chunks) + scale * self.density.log_likelihood(values, chunk)
                part.sum().backward()  # type: ignore[no-untyped-call]
                total += part.detach().numpy()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return np.full(len(vectors), np.nan), np.zeros_like(vectors)
        assert u.grad is not None
        return total, u.grad.numpy()

    def value(self, vectors: Array) -> Array:
        """Values (M,) at vectors (M, D), all data."""
        with torch.no_grad():
            values, total = self._prior(tensor(vectors))
            for chunk in self._chunks(len(vectors), None):
                total = total + self.density.log_likelihood(values, chunk)
        return np.asarray(total.numpy())

    def _prior(self, u: Tensor) -> tuple[Values, Tensor]:
        """The parameters, and their log prior plus the log Jacobian of the transforms: (M,)."""
        values: Values = {}
        parts: list[Tensor] = []
        for site in self.sites:
            free = u[..., self.slices[site.name]].reshape(*u.shape[:-1], *site.unconstrained_shape)
            transform = _transform(site)
            values[site.name] = transform(free)
            if site.kind != "real":
                parts.append(transform.log_abs_det_jacobian(free, values[site.name]))

        def look_up(name: str, distribution: Any) -> Tensor:
            parts.append(distribution.log_prob(values[name]))
            return values[name]

        self.density.prior(look_up)
        return values, torch.cat([part.reshape(len(u), -1) for part in parts], dim=1).sum(dim=1)

    def _chunks(self, particles: int, units: Array | None) -> list[Units]:
        size = max(1, CHUNK_ENTRIES // (particles * self.density.width))
        if units is not None:
            return list(torch.split(torch.from_numpy(units), size))
        if size >= self.n_units:
            return [slice(None)]
        return [slice(first, min(first + size, self.n_units)) for first in range(0, self.n_units, size)]


def _kind(name: str, support: Any) -> str:
    """The kind of a site, from the support of its distribution."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    for kind in ("real", "simplex", "unit_interval"):
        if support is getattr(constraints, kind):
            return kind
    positive = support in (constraints.positive, constraints.nonnegative)
    if positive or (getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound")):
        return "positive"
    raise ValueError(
        f"site {name!r} has support {support}; here a site is real, positive, in the unit interval or a simplex. "
        "Draw it from one of those and transform it inside the model"
    )


def _transform(site: Site) -> Any:
    return biject_to(getattr(constraints, site.kind))


def tensor(values: Array) -> Tensor:
    """An array as a tensor of doubles, or of 64-bit integers if it has integers."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64 if values.dtype.kind == "i" else np.float64))
