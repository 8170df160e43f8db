"""Automatic differentiation variational inference: the engine's options, its family Q, the ascent, and a whole fit.

Q(u) = Normal(m, L L^T) on the unconstrained space, parameters = T(u), T site by site: the identity, exp, the logistic
function or stick-breaking. They are here in NumPy too, so that a saved policy predicts and has intervals without torch.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Generic, Literal, NamedTuple, Self, TypeVar

import numpy as np
from scipy import linalg, special

from vbtta._support.checks import between, one_of, positive, require, whole_number
from vbtta._support.tensors import Progress
from vbtta.data.labels import Array
from vbtta.inference.em import Fit
from vbtta.inference.laplace import check_level

if TYPE_CHECKING:
    from vbtta.inference.unconstrained import Density, UnconstrainedDensity


@dataclass(frozen=True, kw_only=True)
class ADVI:
    """Automatic differentiation variational inference on Pyro: a full-rank normal on the unconstrained parameters.

    Parameters
    ----------
    steps : int
        Gradient steps, all of which are taken; the step length falls along a cosine.
    bound : {"elbo", "renyi", "iwae"}
        What is maximised. All bound the log evidence from below; the importance-weighted one is the tightest for a
        given number of particles, and its gradient the noisiest.
    alpha : float, optional
        Order of the Renyi bound, between 0 (importance-weighted) and 1 (ELBO); 0.5 by default.
    particles : int
        Draws per step.
    batch_size : int, optional
        Labels (or instances, where their labels share a truth) per step; all of them by default. With batches, only
        the ELBO's history is unbiased; the final bound is from all data.
    learning_rate : float
        Of Adam.
    keep_states : bool
        Whether to keep the state that every step started from for :meth:`Policy.at_step`.

    Notes
    -----
    Weights always have a Dirichlet prior here; its concentration is 1 where the model states none.
    """

    steps: int = 3000
    bound: Literal["elbo", "renyi", "iwae"] = "elbo"
    alpha: float | None = None
    particles: int = 8
    batch_size: int | None = None
    learning_rate: float = 0.02
    keep_states: bool = False

    def __post_init__(self) -> None:
        one_of("bound", self.bound, ("elbo", "renyi", "iwae"))
        positive(learning_rate=self.learning_rate)
        for name in ("steps", "particles", "batch_size"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least=1))
        if self.alpha is not None and self.bound != "renyi":
            raise ValueError(f"alpha is the order of bound='renyi'; leave it out with bound={self.bound!r}")
        if self.alpha is not None:
            between("alpha", self.alpha, 0, 1)

    @property
    def unconverged(self) -> str:
        """The warning about a fit that did not converge."""
        advice = "raise ADVI(steps=...) or learning_rate"
        return f": the bound still moved at the end of {self.steps} steps of ADVI; {advice}"

    @property
    def order(self) -> float:
        """The order of the bound as a Renyi bound: 1 for the ELBO, 0 for the importance-weighted one."""
        return {"elbo": 1.0, "iwae": 0.0, "renyi": 0.5 if self.alpha is None else self.alpha}[self.bound]


N_DRAWS = 4000  # for moments
_INTERVAL_DRAWS = 20_000  # of the weights alone: quantiles need more than means
_MAX_DOF = 1e9  # of a matched Wishart or gamma distribution
_LOG_2PI = math.log(2 * math.pi)
_MAX_PARAMETERS = 2000  # of a full-rank normal
_MAX_START_SCALE = 0.1  # of Q
_BETAS = (0.9, 0.99)  # of Adam; a short memory of squares, as runs are short
_WARM_UP = 0.05  # fraction of the steps over which the step length rises
_CHANGE_TOLERANCE = 1e-3  # of the running bound, per label, for convergence
_GAIN_TOLERANCE = 1e-2  # of the predicted gain of a Newton step, per label, likewise
_LEAST_WINDOW = 5  # a tenth of the steps: fewer do not show their noise
_NOISE_TOLERANCE = 0.1  # of the running bound's standard error, per label, likewise
_BOUND_DRAWS = 1024  # for the reported bound
_DRAWS_AT_ONCE = 64  # of the draws for the reported bound
_SINGLE_THREAD_ENTRIES = 1 << 18  # entries of a step's arrays below which one thread is fastest
_WEIGHT_SITES = ("class_weights", "weights", "pool")  # the first that a model has decides the weights
P = TypeVar("P")


class DivergenceError(RuntimeError):
    """The bound was not finite, also with a shorter step."""


class AdviAscent(NamedTuple):
    """The result of an ascent and its history."""

    mean: Array  # (D,)
    factor: Array  # (D, D)
    bounds: Array  # (T,): one estimate a step
    means: Array  # (T, D): of Q, before each step
    factors: list[Array]  # likewise, or empty
    converged: bool


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

    def validate(self) -> None:
        """Refuse sites that Q cannot have; for a guide that was read from a file."""
        for site in self.sites:
            if site.kind not in _TRANSFORMS or min(site.shape, default=0 if site.kind == "simplex" else 1) < 1:
                raise ValueError(f"site {site.name!r} has kind {site.kind!r} and shape {site.shape}")
        if len({site.name for site in self.sites}) < len(self.sites):
            raise ValueError("two sites have the same name")
        if sum(site.size for site in self.sites) != len(self.mean):
            raise ValueError(f"its {len(self.sites)} sites do not make the {len(self.mean)} entries of the mean")

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
        place = site_slices(self.sites)[name]
        upper: Array = linalg.qr(self.factor[place].T, mode="r")[0][: place.stop - place.start]
        return Guide(tuple(site for site in self.sites if site.name == name), self.mean[place], upper.T)


class AdviTask(NamedTuple, Generic[P]):
    """A density, and the function that turns Q into a posterior."""

    density: "Density"
    finish: Callable[[Guide], P]
    unit_change: float = 0.0  # of the bound, from standard units to the labels'


def fit_density(pose: Callable[[], AdviTask[P]], engine: ADVI, *, seed: int, n_labels: float, progress: bool) -> Fit[P]:
    """Fit the density that `pose` builds, in any gradient mode of the caller."""
    # `pose` may import torch and Pyro: they are known to be installed when it is called.
    torch, _ = require("torch", "advi"), require("pyro", "advi")
    with torch.inference_mode(False), torch.enable_grad():
        from vbtta.inference.unconstrained import UnconstrainedDensity

        task = pose()
        density = UnconstrainedDensity(task.density)
        n_units = min(engine.batch_size or density.n_units, density.n_units)
        with _threads(task.density.width * engine.particles * n_units):
            ascent = ascend_draws(density, engine, seed, n_labels, progress=progress)
            bound, terms = estimate_bound(density, ascent.mean, ascent.factor, engine, seed)
        if not np.isfinite(bound):
            raise _diverged("under the final draws", engine)
        terms["J_joint"] += task.unit_change
        steps = zip(ascent.means[: len(ascent.factors)], ascent.factors, strict=True)
        return Fit(
            posterior=task.finish(Guide(density.sites, ascent.mean, ascent.factor)),
            bounds=ascent.bounds + task.unit_change,
            weights=weights_of(constrain(density.sites, ascent.means)),
            bound=bound + task.unit_change,
            terms=terms,
            converged=ascent.converged,
            steps=tuple(task.finish(Guide(density.sites, mean, factor)) for mean, factor in steps),
        )


@contextmanager
def _threads(entries: int) -> Iterator[None]:
    """One thread for small arrays, where starting several takes longer than the computation."""
    torch = require("torch", "advi")
    before = torch.get_num_threads()
    torch.set_num_threads(1 if entries < _SINGLE_THREAD_ENTRIES else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ascend_draws(
    density: "UnconstrainedDensity", engine: ADVI, seed: int, n_labels: float, *, progress: bool = False
) -> AdviAscent:
    """Maximise the bound; if it is not finite, retry once with a tenth of the step length."""
    # Gradients leave out the score of Q, whose noise does not vanish at the posterior. To equal accuracy of the weights
    # Pyro's SVI with AutoMultivariateNormal takes 4.4 to 25 times as long (results/bench/advi_parts.json).
    D = len(density.start)
    if D > _MAX_PARAMETERS:
        raise ValueError(
            f"the model has {D} parameters, and a full-rank normal is kept for at most {_MAX_PARAMETERS}; use "
            "noise='annotator' instead of confusion matrices, fewer views, or engine='em'"
        )
    with suppress(DivergenceError):
        return _ascend(density, engine, engine.learning_rate, seed, n_labels, progress)
    return _ascend(density, engine, 0.1 * engine.learning_rate, seed, n_labels, progress)


def _diverged(place: str, engine: ADVI) -> DivergenceError:
    return DivergenceError(
        f"the bound was not finite {place} with learning_rate={engine.learning_rate:g}, nor with a tenth of it; try a "
        "smaller ADVI(learning_rate=...), more particles, bound='elbo', or look for extreme values in the data"
    )


def _ascend(
    density: "UnconstrainedDensity", engine: ADVI, learning_rate: float, seed: int, n_labels: float, progress: bool
) -> AdviAscent:
    """The ascent; refused where the bound is not finite."""
    torch = require("torch", "advi")
    rng = np.random.default_rng(seed)
    mean, D = density.start.copy(), len(density.start)
    factor = min(_MAX_START_SCALE, 1 / math.sqrt(max(n_labels, 1.0))) * np.eye(D)
    change = torch.zeros(D + 1, D, dtype=torch.float64)  # of the mean, then of the rows of L
    change.grad = torch.zeros_like(change)
    moves, gradient = change.numpy(), change.grad.numpy()  # share their memory
    adam = torch.optim.Adam([change], betas=_BETAS, maximize=True, fused=True)
    below, diagonal = np.tril(np.ones((D, D)), -1), np.arange(D)
    in_batches = engine.batch_size is not None and engine.batch_size < density.n_units
    bounds, factors = np.empty(engine.steps), []
    means, pulls = np.empty((2, engine.steps, D))  # of Q; gradients of the bound in e's mean, L^T g
    with np.errstate(all="ignore"), Progress("steps of ADVI", engine.steps, progress) as report:
        for step in range(engine.steps):
            means[step] = mean
            if engine.keep_states:
                factors.append(factor.copy())
            noise = rng.standard_normal((engine.particles, D))
            units = rng.integers(density.n_units, size=engine.batch_size) if in_batches else None
            log_ratio, slope = _log_ratio(density, mean, factor, noise, units)
            bounds[step] = bound_of(log_ratio, engine.order)
            if not (np.isfinite(bounds[step]) and np.isfinite(slope).all()):
                raise _diverged(f"in step {step + 1}", engine)
            fraction = (step + 0.5) / engine.steps
            order = 1 + (engine.order - 1) * min(max(3 * fraction - 1, 0.0), 1.0)  # from 1 on, in the middle third
            slope *= _coefficients(log_ratio, order)[:, None]
            gradient[0] = slope.sum(axis=0)
            pulls[step] = gradient[0] @ factor
            gradient[1:] = slope.T @ noise  # d bound / d L
            old = factor[diagonal, diagonal]
            gradient[1:][diagonal, diagonal] *= old  # the diagonal is exp of its parameter
            adam.param_groups[0]["lr"] = learning_rate * _step_length(fraction)
            moves[:] = 0  # Adam's steps depend on the gradients alone
            adam.step()
            mean = mean + moves[0]
            # entries of L move in proportion to their row, the posterior standard deviation of the parameter
            factor = factor + below * moves[1:] * np.sqrt((factor**2).sum(axis=1, keepdims=True))
            factor[diagonal, diagonal] = old * np.exp(moves[1:][diagonal, diagonal])
            report.advance(1)
        if not np.isfinite(factor).all():
            raise _diverged("after the last step", engine)
    return AdviAscent(mean, factor, bounds, means, factors, _has_converged(bounds, pulls, n_labels))


def _log_ratio(
    density: "UnconstrainedDensity", mean: Array, factor: Array, noise: Array, units: Array | None
) -> tuple[Array, Array]:
    """Log importance weights ln P - ln Q (M,) of draws, and their gradients (M, D) in the draws."""
    value, slope = density.value_and_gradient(mean + noise @ factor.T, units)
    slope_of_q, _ = linalg.lapack.dtrtrs(factor.T, noise.T)  # L^-T e; if L is singular, ln Q is infinite
    return value - _log_q(noise, factor), slope + slope_of_q.T


def bound_of(log_ratio: Array, order: float) -> float:
    """The Renyi bound of an order from log importance weights (M,)."""
    if order == 1:
        return float(log_ratio.mean())
    power = 1 - order
    return float((special.logsumexp(power * log_ratio) - math.log(len(log_ratio))) / power)


def estimate_bound(
    density: "UnconstrainedDensity", mean: Array, factor: Array, engine: ADVI, seed: int
) -> tuple[float, dict[str, float]]:
    """The bound from many draws and all data, and its terms: J (plus) and Pi (minus)."""
    rng = np.random.default_rng([seed, 1])
    repeats = max(1, _BOUND_DRAWS // engine.particles)
    noise = rng.standard_normal((repeats * engine.particles, len(mean)))
    draws, log_q = mean + noise @ factor.T, _log_q(noise, factor)
    starts = range(0, len(draws), _DRAWS_AT_ONCE)
    joint = np.concatenate([density.value(draws[first : first + _DRAWS_AT_ONCE]) for first in starts])
    ratios = (joint - log_q).reshape(repeats, engine.particles)
    bound = float(np.mean([bound_of(log_ratio, engine.order) for log_ratio in ratios]))
    terms = {"J_joint": float(joint.mean()), "Pi_q": float(log_q.mean())}
    if engine.order != 1:
        terms["J_tightening"] = bound - terms["J_joint"] + terms["Pi_q"]
    return bound, terms


def _log_q(noise: Array, factor: Array) -> Array:
    log_det = np.log(np.diagonal(factor)).sum()
    return np.asarray(-0.5 * (noise**2).sum(axis=1) - log_det - 0.5 * noise.shape[1] * _LOG_2PI)


def _coefficients(log_ratio: Array, order: float) -> Array:
    """Weights of the draws' gradients in the gradient of the bound: (M,)."""
    if order == 1:
        return np.full(len(log_ratio), 1 / len(log_ratio))
    share = special.softmax((1 - order) * log_ratio)
    return np.asarray(order * share + (1 - order) * share**2)


def _step_length(fraction: float) -> float:
    """Step length over its maximum: a short linear rise, then half a cosine down to zero."""
    if fraction < _WARM_UP:
        return fraction / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (fraction - _WARM_UP) / (1 - _WARM_UP)))


def _has_converged(bounds: Array, pulls: Array, n_labels: float) -> bool:
    """Whether the bound (T,) changes little at the end, or no more than by its standard error, and has no slope."""
    # The last tenth is compared with the tenth before 70 % of the run: later, steps are too short to change the bound.
    # The bound of a run that never moved is steady too; what a Newton step of Q's mean would gain, g^T L L^T g / 2 less
    # its bias and two standard errors, shows that it has not converged.
    window, T = len(bounds) // 10, len(bounds)
    if window < _LEAST_WINDOW:
        return False
    last, before = bounds[-window:], bounds[(7 * T) // 10 - window : (7 * T) // 10]
    change, error = abs(last.mean() - before.mean()), math.sqrt((last.var() + before.var()) / window)
    average, variance = pulls[-window:].mean(axis=0), pulls[-window:].var(axis=0, ddof=1) / window
    gain = 0.5 * (average @ average - variance.sum() - 2 * math.sqrt(2 * (variance @ variance)))
    steady = change <= _CHANGE_TOLERANCE * n_labels + 2 * error and error <= _NOISE_TOLERANCE * n_labels
    return bool(steady and gain <= _GAIN_TOLERANCE * n_labels)


def site_slices(sites: tuple[Site, ...]) -> dict[str, slice]:
    """The entries of u that belong to each site."""
    slices, first = {}, 0
    for site in sites:
        slices[site.name] = slice(first, first + site.size)
        first = slices[site.name].stop
    return slices


def constrain(sites: tuple[Site, ...], vectors: Array) -> dict[str, Array]:
    """Parameters (..., *shape) of unconstrained vectors (..., D)."""
    values = {}
    for site, place in zip(sites, site_slices(sites).values(), strict=True):
        free = vectors[..., place].reshape(*vectors.shape[:-1], *site.unconstrained_shape)
        values[site.name] = _TRANSFORMS[site.kind](free)
    return values


def _stick_breaking(values: Array) -> Array:
    """Simplices of n entries from n - 1 real numbers; zeros give 1/n."""
    remaining = values.shape[-1] - np.arange(values.shape[-1])
    fraction = special.expit(values - np.log(remaining))
    rest = np.cumprod(1 - fraction, axis=-1)
    ones = np.ones((*values.shape[:-1], 1))
    return np.asarray(np.concatenate([fraction, ones], axis=-1) * np.concatenate([ones, rest], axis=-1))


_TRANSFORMS = {"real": np.asarray, "positive": np.exp, "unit_interval": special.expit, "simplex": _stick_breaking}


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
    value = values[name].mean(axis=-2) if name == "class_weights" else values[name]  # of (..., C, K)
    return np.asarray(value / value.sum(axis=-1, keepdims=True)) if name == "pool" else value


def _weight_site(names: Collection[str]) -> str:
    """The site that decides the weights; a `pool` does only where there are no `weights`."""
    return next(name for name in _WEIGHT_SITES if name in names)


@dataclass(frozen=True)
class WeightDraws:
    """A posterior by ADVI: Q, and which of its views are kept; others enter predictions by their moments under Q."""

    guide: Guide
    kept: Annotated[Array, "K"]  # positions among the views of the fit

    def validate(self) -> None:
        """Refuse positions that no view has; for a posterior that was read from a file."""
        n_views = {site.name: site.shape[-1] for site in self.guide.sites if site.name in _WEIGHT_SITES and site.shape}
        if not n_views:
            raise ValueError("no site decides the weights")
        known = np.isin(self.kept, np.arange(n_views[_weight_site(n_views)])).all()
        if not known or len(set(self.kept)) < len(self.kept):
            raise ValueError("kept: positions are not those of views")

    def draws(self, size: int = N_DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in the model's standard units; weights of the kept views."""
        draws = self.guide.draw(size, seed)
        name = _weight_site(draws)
        weights = draws[name][..., self.kept.astype(int)]
        return draws | {name: weights if name == "pool" else weights / weights.sum(axis=-1, keepdims=True)}

    def weight_interval(self, level: float) -> Array:
        """Equal-tailed intervals (K, 2) of the weights of the kept views: quantiles of draws; normal with a gate."""
        if getattr(self, "gate", None) is not None:
            return super().weight_interval(level)  # type: ignore[misc, no-any-return]
        check_level(level, known=True)
        name = _weight_site([site.name for site in self.guide.sites])
        weights = weights_of(self.guide.only(name).draw(_INTERVAL_DRAWS))[:, self.kept.astype(int)]
        weights = weights / weights.sum(axis=1, keepdims=True)
        return np.asarray(np.quantile(weights, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0).T)

    def keep(self, views: Array) -> Self:
        """The same with only some of the views."""
        rest: Self = super().keep(views)  # type: ignore[misc]
        return replace(rest, kept=self.kept[views])
