"""Automatic differentiation variational inference: the engine's options, the stochastic ascent, and a whole fit."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from scipy import linalg, special

from vbtta._support.checks import between, one_of, positive, require, whole_number
from vbtta.data.labels import Array
from vbtta.inference.em import Fit
from vbtta.inference.guide import Guide, constrain, weights_of

if TYPE_CHECKING:
    from vbtta.inference.unconstrained import Density


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

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import ADVI, ViewPredictions, fit_policy
    >>> ADVI(bound="renyi").order, ADVI(bound="iwae").order
    (0.5, 0.0)
    >>> rng = np.random.default_rng(0)
    >>> views = rng.normal(size=(400, 2, 1))  # (N, K, C)
    >>> labels = views[np.arange(400), rng.choice(2, size=400, p=[0.7, 0.3])] + 0.1 * rng.normal(size=(400, 1))
    >>> engine = ADVI(steps=300, particles=2, learning_rate=0.05)
    >>> policy = fit_policy(ViewPredictions(views), labels, task="regression", engine=engine)
    >>> policy.weights.round(1)
    array([0.7, 0.3])
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
        return (
            f": the bound still moved at the end of {self.steps} steps of ADVI; raise ADVI(steps=...) or learning_rate"
        )

    @property
    def order(self) -> float:
        """The order of the bound as a Renyi bound: 1 for the ELBO, 0 for the importance-weighted one."""
        if self.bound == "renyi":
            return 0.5 if self.alpha is None else self.alpha
        return 1.0 if self.bound == "elbo" else 0.0


_LOG_2PI = math.log(2 * math.pi)
_MAX_PARAMETERS = 2000  # of a full-rank normal
_MAX_START_SCALE = 0.1  # of Q
_BETAS = (0.9, 0.99)  # of Adam; a short memory of squares, as runs are short
_WARM_UP = 0.05  # fraction of the steps over which the step length rises
_CHANGE_TOLERANCE = 1e-3  # of the running bound, per label, for convergence
_GAIN_TOLERANCE = 1e-2  # of the predicted gain of a Newton step, per label, likewise
_NOISE_TOLERANCE = 0.1  # of the running bound's standard error, per label, likewise
_PROBES, _BATCH_PROBES = 8, 32  # pairs of groups of draws that estimate the predicted gain: all units, batches
_BOUND_DRAWS = 1024  # for the reported bound
_DRAWS_AT_ONCE = 64  # of them
_SINGLE_THREAD_ENTRIES = 1 << 18  # entries of a step's arrays below which one thread is fastest
P = TypeVar("P")


class DivergenceError(RuntimeError):
    """The bound was not finite, also with a shorter step.

    Examples
    --------
    A model that gives the labels no finite probability:

    >>> from vbtta import ADVI, PyroModel, ViewPredictions, fit_policy
    >>> def impossible(predictions, labels, prior):
    ...     pyro.factor("labels", prior.sample(predictions).log_weights.sum() * float("nan"))
    >>> import pyro
    >>> views = ViewPredictions(np.zeros((5, 2, 1)), names=["identity", "flip"])
    >>> fit_policy(views, np.arange(5.0), task="regression", model=PyroModel(impossible), engine=ADVI(steps=5))
    Traceback (most recent call last):
        ...
    vbtta.inference.advi.DivergenceError: the bound was not finite ...
    """


class LogDensity(Protocol):
    """A log density on the unconstrained space."""

    start: Array  # (D,)

    @property
    def n_units(self) -> int:
        """Number of independent units of data."""

    def value_and_gradient(self, vectors: Array, units: Array | None = None) -> tuple[Array, Array]:
        """Values (M,) and gradients (M, D), from some units or all."""

    def value(self, vectors: Array) -> Array:
        """Values (M,)."""


class AdviAscent(NamedTuple):
    """The result of an ascent and its history."""

    mean: Array  # (D,)
    factor: Array  # (D, D)
    bounds: Array  # (T,): one estimate a step
    means: Array  # (T, D): of Q, before each step
    factors: list[Array]  # likewise, or empty
    converged: bool


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
            raise _diverged(f"under the final draws with learning_rate={engine.learning_rate:g}")
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
    if entries < _SINGLE_THREAD_ENTRIES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ascend_draws(
    density: LogDensity, engine: ADVI, seed: int, n_labels: float, *, progress: bool = False
) -> AdviAscent:
    """Maximise the bound; if it is not finite, retry once with a tenth of the step length."""
    # Written here for batches, Renyi bounds and gradients without the score of Q, whose noise does not vanish at the
    # posterior; benchmarks/advi_parts.py compares it with Pyro's SVI and AutoMultivariateNormal.
    D = len(density.start)
    if D > _MAX_PARAMETERS:
        raise ValueError(
            f"the model has {D} parameters, and a full-rank normal is kept for at most {_MAX_PARAMETERS}; use "
            "noise='annotator' instead of confusion matrices, fewer views, or engine='em'"
        )
    for fraction in (1.0, 0.1):
        result = _ascend(density, engine, fraction * engine.learning_rate, seed, n_labels, progress)
        if isinstance(result, AdviAscent):
            return result
    raise _diverged(f"in step {result} with learning_rate={engine.learning_rate:g}, and a tenth of it did not help")


def _diverged(place: str) -> DivergenceError:
    return DivergenceError(
        f"the bound was not finite {place}; try a smaller ADVI(learning_rate=...), more particles, bound='elbo', or "
        "look for extreme values among the predictions and labels"
    )


def _ascend(
    density: LogDensity, engine: ADVI, learning_rate: float, seed: int, n_labels: float, progress: bool
) -> AdviAscent | int:
    """The ascent, or the number of the step in which the bound was not finite."""
    torch = require("torch", "advi")
    rng = np.random.default_rng(seed)
    mean, D = density.start.copy(), len(density.start)
    factor = min(_MAX_START_SCALE, 1 / math.sqrt(max(n_labels, 1.0))) * np.eye(D)
    change = torch.zeros(D + 1, D, dtype=torch.float64)  # of the mean, then of the rows of L
    change.grad = torch.zeros_like(change)
    moves, gradient = change.numpy(), change.grad.numpy()  # share their memory
    adam = torch.optim.Adam([change], betas=_BETAS, maximize=True, fused=True)
    below, diagonal = np.tril(np.ones((D, D)), -1), np.arange(D)
    bounds, means, factors = np.empty(engine.steps), np.empty((engine.steps, D)), []
    with np.errstate(all="ignore"):
        for step in range(engine.steps):
            means[step] = mean
            if engine.keep_states:
                factors.append(factor.copy())
            noise = rng.standard_normal((engine.particles, D))
            log_ratio, slope = _log_ratio(density, mean, factor, noise, _batch(density, engine, rng))
            bounds[step] = bound_of(log_ratio, engine.order)
            if not (np.isfinite(bounds[step]) and np.isfinite(slope).all()):
                return step + 1
            fraction = (step + 0.5) / engine.steps
            order = 1 + (engine.order - 1) * min(max(3 * fraction - 1, 0.0), 1.0)  # from 1 on, in the middle third
            slope *= _coefficients(log_ratio, order)[:, None]
            gradient[0] = slope.sum(axis=0)
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
            if progress and (step % max(1, engine.steps // 20) == 0 or step == engine.steps - 1):
                line = f"vbtta: ADVI step {step + 1} of {engine.steps}, bound {bounds[step]:.1f}"
                print(line, file=sys.stderr, flush=True)
        if not np.isfinite(factor).all():
            return engine.steps
        converged = _is_steady(bounds, n_labels) and (
            _predicted_gain(density, mean, factor, engine, seed) <= _GAIN_TOLERANCE * n_labels
        )
    return AdviAscent(mean, factor, bounds, means, factors, converged)


def _log_ratio(
    density: LogDensity, mean: Array, factor: Array, noise: Array, units: Array | None
) -> tuple[Array, Array]:
    """Log importance weights ln P - ln Q (M,) of draws, and their gradients (M, D) in the draws."""
    value, slope = density.value_and_gradient(mean + noise @ factor.T, units)
    slope_of_q, _ = linalg.lapack.dtrtrs(factor.T, noise.T)  # L^-T e; if L is singular, ln Q is infinite
    return value - _log_q(noise, factor), slope + slope_of_q.T


def _predicted_gain(density: LogDensity, mean: Array, factor: Array, engine: ADVI, seed: int) -> float:
    """The gain of the bound by a Newton step of Q's mean, g^T L L^T g / 2, less two standard errors."""
    # The bound of a run that never moved is steady too; its gradient shows that it has not converged. Draws come in
    # pairs of opposite sign, and the variance of their mean is subtracted from its square.
    rng = np.random.default_rng([seed, 2])
    probes = _PROBES if _batch(density, engine, rng) is None else _BATCH_PROBES
    slopes = np.zeros((probes, len(mean)))  # L^T g
    for probe in range(probes):
        noise, units = rng.standard_normal((engine.particles, len(mean))), _batch(density, engine, rng)
        for signed_noise in (noise, -noise):
            log_ratio, slope = _log_ratio(density, mean, factor, signed_noise, units)
            slopes[probe] += 0.5 * (_coefficients(log_ratio, engine.order) @ slope) @ factor
    average, variance = slopes.mean(axis=0), slopes.var(axis=0, ddof=1) / probes
    return float(0.5 * (average @ average - variance.sum() - 2 * math.sqrt(2 * (variance @ variance))))


def _batch(density: LogDensity, engine: ADVI, rng: np.random.Generator) -> Array | None:
    """Units of a step; None for all of them."""
    if engine.batch_size is None or engine.batch_size >= density.n_units:
        return None
    return rng.integers(density.n_units, size=engine.batch_size)


def bound_of(log_ratio: Array, order: float) -> float:
    """The Renyi bound of an order from log importance weights (M,)."""
    if order == 1:
        return float(log_ratio.mean())
    power = 1 - order
    return float((special.logsumexp(power * log_ratio) - math.log(len(log_ratio))) / power)


def estimate_bound(
    density: LogDensity, mean: Array, factor: Array, engine: ADVI, seed: int
) -> tuple[float, dict[str, float]]:
    """The bound from many draws and all data, and its terms: J (plus) and Pi (minus)."""
    rng = np.random.default_rng([seed, 1])
    repeats = max(1, _BOUND_DRAWS // engine.particles)
    joint, log_q = np.empty((repeats, engine.particles)), np.empty((repeats, engine.particles))
    at_once = max(1, _DRAWS_AT_ONCE // engine.particles)
    for row in range(0, repeats, at_once):
        rows = slice(row, min(row + at_once, repeats))
        noise = rng.standard_normal(((rows.stop - rows.start) * engine.particles, len(mean)))
        joint[rows] = density.value(mean + noise @ factor.T).reshape(-1, engine.particles)
        log_q[rows] = _log_q(noise, factor).reshape(-1, engine.particles)
    bound = float(np.mean([bound_of(log_ratio, engine.order) for log_ratio in joint - log_q]))
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


def _is_steady(bounds: Array, n_labels: float) -> bool:
    """Whether the running mean of the bound changes little, or no more than by its standard error."""
    # The last tenth is compared with the tenth before 70 % of the run: later, steps are too short to change the bound.
    window, T = max(1, len(bounds) // 10), len(bounds)
    last, before = bounds[T - window :], bounds[max(0, (7 * T) // 10 - window) : (7 * T) // 10]
    if not len(before):
        return False
    change = abs(last.mean() - before.mean())
    error = math.sqrt((last.var() + before.var()) / window)
    return bool(change <= _CHANGE_TOLERANCE * n_labels + 2 * error and error <= _NOISE_TOLERANCE * n_labels)
