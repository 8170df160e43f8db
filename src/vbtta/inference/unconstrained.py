"""Joint log densities on the unconstrained space: a prior over named sites, and a likelihood with z summed out.

A prior is a function of `sample(name, distribution)`. With `pyro.sample` it is a Pyro model; with a `_PriorScorer` it
gives the log prior of many parameter vectors at once. These are the particles, the first axis of every tensor.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from vbtta.data.labels import Array
from vbtta.inference.guide import Site, site_slices

Values = dict[str, Tensor]  # parameters by site name
Units = slice | Tensor  # labels or instances, by position
Sample = Callable[[str, Any], Tensor]  # of a name and a distribution, torch's or Pyro's
CHUNK_ENTRIES = 1 << 20  # of the largest temporary array of a chunk


class Density(Protocol):
    """A model with its data, whose units are independent given the parameters."""

    @property
    def n_units(self) -> int:
        """Number of units: labels, or instances where the labels of an instance depend on each other."""

    @property
    def width(self) -> int:
        """Entries of a temporary array per unit and particle."""

    def prior(self, sample: Sample) -> Values:
        """Sample every site."""

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Log likelihood of the given units under every particle: (M,)."""

    def start(self) -> dict[str, Array]:
        """Start values of sites; the others start at their prior's mean."""


class UnconstrainedDensity:
    """ln P(data, parameters(u)) + ln |d parameters / du|, and its gradient, for many u at once."""

    def __init__(self, density: Density) -> None:
        self.density = density
        recorder = _SiteRecorder()
        with torch.no_grad():
            density.prior(recorder)
        self.sites = tuple(recorder.sites)
        self.start = _start(recorder, density.start())
        self.slices = site_slices(self.sites)
        self._transforms = {site.name: _transform(site) for site in self.sites}

    @property
    def n_units(self) -> int:
        """Number of independent units of data."""
        return self.density.n_units

    def value_and_gradient(self, vectors: Array, units: Array | None = None) -> tuple[Array, Array]:
        """Values (M,) and gradients (M, D) at vectors (M, D); `units` estimate the sum over all of them."""
        # Large data are processed in chunks, whose gradients with respect to the parameters are added. If a matrix
        # cannot be factored, the values are NaN, which the ascent treats as divergence.
        try:
            return self._value_and_gradient(tensor(vectors).requires_grad_(), units)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return np.full(len(vectors), np.nan), np.zeros_like(vectors)

    def _value_and_gradient(self, u: Tensor, units: Array | None) -> tuple[Array, Array]:
        values, total = self._prior(u)
        scale = 1.0 if units is None else self.n_units / len(units)
        chunks = self._chunks(len(u), units)
        if len(chunks) == 1:
            total = total + scale * self.density.log_likelihood(values, chunks[0])
            (gradient,) = torch.autograd.grad(total.sum(), u)
            return total.detach().numpy(), gradient.numpy()
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        likelihood = torch.zeros(len(u), dtype=torch.float64)
        for chunk in chunks:
            part = self.density.log_likelihood(leaves, chunk)
            part.sum().backward()  # type: ignore[no-untyped-call]
            likelihood += part.detach()
        objective = total.sum()  # whose gradient is that of the whole density
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                objective = objective + scale * (values[name] * leaf.grad).sum()
        (gradient,) = torch.autograd.grad(objective, u)
        return (total.detach() + scale * likelihood).numpy(), gradient.numpy()

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
        total = torch.zeros(len(u), dtype=torch.float64)
        for site in self.sites:
            free = u[..., self.slices[site.name]].reshape(*u.shape[:-1], *site.unconstrained_shape)
            transform = self._transforms[site.name]
            values[site.name] = transform(free)
            if site.kind != "real":
                volume = transform.log_abs_det_jacobian(free, values[site.name])
                total = total + volume.reshape(len(u), -1).sum(dim=1)
        scorer = _PriorScorer(values, total)
        self.density.prior(scorer)
        return values, scorer.total

    def _chunks(self, particles: int, units: Array | None) -> list[Units]:
        size = max(1, CHUNK_ENTRIES // (particles * self.density.width))
        if units is not None:
            positions = torch.from_numpy(units)
            return [positions[first : first + size] for first in range(0, len(units), size)]
        if size >= self.n_units:
            return [slice(None)]
        return [slice(first, min(first + size, self.n_units)) for first in range(0, self.n_units, size)]


class _SiteRecorder:
    """A `sample` function that records the sites of a prior and their prior means."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.means: dict[str, Tensor] = {}  # the finite ones

    def __call__(self, name: str, distribution: Any) -> Tensor:
        shape = tuple(int(n) for n in (*distribution.batch_shape, *distribution.event_shape))
        self.sites.append(Site(name, _kind(name, distribution.support), shape))
        mean: Tensor = distribution.mean
        if torch.isfinite(mean).all():
            self.means[name] = mean
        return mean


class _PriorScorer:
    """A `sample` function that returns given values and adds up their log prior."""

    def __init__(self, values: Values, total: Tensor) -> None:
        self.values, self.total = values, total

    def __call__(self, name: str, distribution: Any) -> Tensor:
        value = self.values[name]
        log_prior = distribution.log_prob(value)
        self.total = self.total + (log_prior if log_prior.ndim == 1 else log_prior.reshape(len(value), -1).sum(dim=1))
        return value


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


def _start(recorder: _SiteRecorder, known: dict[str, Array]) -> Array:
    """The unconstrained start vector, from start values or prior means; zeros for sites without either."""
    parts = [np.zeros(0)]
    for site in recorder.sites:
        value = tensor(known[site.name]) if site.name in known else recorder.means.get(site.name)
        if value is None:
            parts.append(np.zeros(site.size))
        else:
            free = _transform(site).inv(value.expand(site.shape).to(torch.float64))
            parts.append(np.nan_to_num(free.numpy().ravel()))
    return np.concatenate(parts)
