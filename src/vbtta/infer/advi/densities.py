"""Joint log densities on the unconstrained space: a prior drawn site by site, and a likelihood with z summed out.

A prior is written once, as a function of `sample(name, distribution)`. With `pyro.sample` it is a Pyro model; with
the scorer below it gives the log prior of many parameter vectors at a time, the particles, along a first axis.
"""

__all__ = ["Density", "Sample", "UnconstrainedDensity", "Units", "Values", "tensor"]

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from vbtta._support.extras import require
from vbtta.infer.advi.guide import Site, site_slices, unconstrained_size
from vbtta.labels import Array

torch = require("torch", "advi")
pyro = require("pyro", "advi")
constraints = torch.distributions.constraints

Values = dict[str, Any]  # tensors by site name
Units = Any  # a slice or an index tensor of labels or instances
Sample = Callable[[str, Any], Any]

_ENTRIES = 1 << 20  # of the largest temporary of a chunk


class Density(Protocol):
    """A model with its data. Its units are independent given the parameters; sums run over some of them."""

    n_units: int
    width: int  # entries of a temporary per unit and particle

    def prior(self, sample: Sample) -> Values:
        """Draw every site."""
        ...

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Log likelihood of some units under every particle: (M,)."""
        ...

    def start(self) -> dict[str, Array]:
        """Where to start, for sites that have a better place than their prior's mean."""
        ...


class UnconstrainedDensity:
    """ln P(data, parameters(u)) + ln |d parameters / du|, and its gradient, for many u at once."""

    def __init__(self, density: Density) -> None:
        self.density = density
        finder = _Finder()
        with torch.no_grad():
            density.prior(finder)
        self.sites = tuple(finder.sites)
        self.start = _start(finder, density.start())
        self._places = site_slices(self.sites)
        self._transforms = {
            site.name: torch.distributions.biject_to(getattr(constraints, site.kind)) for site in self.sites
        }

    @property
    def n_units(self) -> int:
        """Number of independent units of data."""
        return self.density.n_units

    def value_and_gradient(self, vectors: Array, units: Array | None = None) -> tuple[Array, Array]:
        """Values (M,) and gradients (M, D) at vectors (M, D); `units` estimate the sum over all of them.

        Large data are taken in chunks, whose gradients with respect to the parameters add up. Where a matrix cannot be
        factored the values are not numbers, for the ascent to see that it went astray.
        """
        try:
            return self._value_and_gradient(tensor(vectors).requires_grad_(), units)
        except torch.linalg.LinAlgError:
            return np.full(len(vectors), np.nan), np.zeros_like(vectors)

    def _value_and_gradient(self, u: Any, units: Array | None) -> tuple[Array, Array]:
        values, log_joint = self._prior(u)
        scale = 1.0 if units is None else self.n_units / len(units)
        chunks = self._chunks(len(u), units)
        if len(chunks) == 1:
            total = log_joint + scale * self.density.log_likelihood(values, chunks[0])
            (gradient,) = torch.autograd.grad(total.sum(), u)
            return total.detach().numpy(), gradient.numpy()
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        likelihood, sums = torch.zeros(len(u), dtype=torch.float64), None
        for chunk in chunks:
            part = self.density.log_likelihood(leaves, chunk)
            found = torch.autograd.grad(part.sum(), list(leaves.values()), allow_unused=True)
            sums = found if sums is None else [_plus(one, other) for one, other in zip(sums, found, strict=True)]
            likelihood = likelihood + part.detach()
        carried = log_joint.sum()
        for value, slope in zip(values.values(), sums or (), strict=True):
            if slope is not None:
                carried = carried + scale * (value * slope).sum()
        (gradient,) = torch.autograd.grad(carried, u)
        return (log_joint.detach() + scale * likelihood).numpy(), gradient.numpy()

    def value(self, vectors: Array) -> Array:
        """Values (M,) at vectors (M, D), all data."""
        with torch.no_grad():
            values, total = self._prior(tensor(vectors))
            for chunk in self._chunks(len(vectors), None):
                total = total + self.density.log_likelihood(values, chunk)
        return np.asarray(total.numpy())

    def _prior(self, u: Any) -> tuple[Values, Any]:
        scorer = _Scorer()
        for site in self.sites:
            free = u[..., self._places[site.name]].reshape(*u.shape[:-1], *site.unconstrained_shape)
            transform = self._transforms[site.name]
            value = transform(free)
            scorer.values[site.name] = value
            if site.kind != "real":
                volume = transform.log_abs_det_jacobian(free, value)
                scorer.total = scorer.total + volume.reshape(len(u), -1).sum(dim=1)
        self.density.prior(scorer)
        return scorer.values, scorer.total + torch.zeros(len(u), dtype=torch.float64)

    def _chunks(self, particles: int, units: Array | None) -> list[Units]:
        size = max(1, _ENTRIES // (particles * self.density.width))
        if units is not None:
            chosen = torch.from_numpy(units)
            return [chosen[first : first + size] for first in range(0, len(units), size)]
        if size >= self.n_units:
            return [slice(None)]
        return [slice(first, min(first + size, self.n_units)) for first in range(0, self.n_units, size)]


class _Finder:
    """Records the sites of a prior, with their prior means."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.means: dict[str, Any] = {}

    def __call__(self, name: str, distribution: Any) -> Any:
        shape = tuple(int(n) for n in (*distribution.batch_shape, *distribution.event_shape))
        self.sites.append(Site(name, kind_of(name, distribution.support), shape))
        mean = distribution.mean
        self.means[name] = mean if bool(torch.isfinite(mean).all()) else None
        return mean


class _Scorer:
    """Adds up log priors of given values."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.total: Any = 0.0

    def __call__(self, name: str, distribution: Any) -> Any:
        value = self.values[name]
        log_prior = distribution.log_prob(value)
        self.total = self.total + (log_prior if log_prior.ndim == 1 else log_prior.reshape(len(value), -1).sum(dim=1))
        return value


def kind_of(name: str, support: Any) -> str:
    """What a site's support is called here."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.real:
        return "real"
    if support is constraints.simplex:
        return "simplex"
    if support is constraints.unit_interval:
        return "unit_interval"
    positive = support in (constraints.positive, constraints.nonnegative)
    if positive or (getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound")):
        return "positive"
    raise ValueError(
        f"site {name!r} has support {support}; here a site is real, positive, in the unit interval or a simplex. "
        "Draw it from one of those and transform it inside the model"
    )


def tensor(values: Array) -> Any:
    """An array as a tensor of doubles (or of integers, if it has them)."""
    values = np.ascontiguousarray(values)
    return torch.from_numpy(values if values.dtype.kind == "i" else values.astype(np.float64))


def _start(finder: _Finder, known: dict[str, Array]) -> Array:
    """The unconstrained vector of the known places and, for other sites, of the prior's means."""
    parts = []
    for site in finder.sites:
        place = tensor(known[site.name]) if site.name in known else finder.means[site.name]
        if place is None:
            parts.append(np.zeros(unconstrained_size(site)))
            continue
        place = place.expand(site.shape).to(torch.float64)
        transform = torch.distributions.biject_to(getattr(constraints, site.kind))
        parts.append(np.nan_to_num(transform.inv(place).numpy().ravel()))
    return np.concatenate(parts) if parts else np.zeros(0)


def _plus(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other
