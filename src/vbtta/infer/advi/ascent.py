"""Ascent on a bound: reparametrised gradients of a full-rank normal, Adam, a cosine of step lengths.

With importance weights r_i = P(data, u_i) / Q(u_i) of M particles the Renyi bound of order a is

    L_a = 1/(1 - a) ln (1/M) sum_i r_i^(1-a),   a -> 1: the ELBO,  a = 0: the importance-weighted bound.

Its gradient is taken along the draws' paths alone: sum_i (a s_i + (1 - a) s_i^2) d ln r_i / du_i du_i, with
s_i proportional to r_i^(1-a). For a = 1 that is the estimator whose noise vanishes as Q nears the posterior, and one
particle gives the same for every a. Far from the posterior one particle has all the weight and the gradient of a < 1
tells little, so a run starts on the ELBO and goes over to its bound on the way. G. Roeder, Y. Wu, D. Duvenaud,
"Sticking the landing: simple, lower-variance gradient estimators for variational inference" (2017); G. Tucker,
D. Lawson, S. Gu, C. Maddison, "Doubly reparameterized gradient estimators for Monte Carlo objectives" (2019).
"""

__all__ = ["AdviAscent", "DivergenceError", "LogDensity", "ascend", "bound_of", "diverged", "estimate_bound"]

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from scipy import linalg, special

from vbtta.labels import Array
from vbtta.specs import ADVI

_LOG_2PI = math.log(2 * math.pi)
_LARGEST = 2000  # unconstrained parameters of a full-rank normal
_FIRST_SCALE = 0.1  # of Q, at most
_MOMENTUM, _MEMORY, _SMALL = 0.9, 0.99, 1e-8  # of Adam; a short memory, as the cosine is short
_WARM_UP = 0.05  # share of the steps over which the step length rises
_SETTLED = 1e-3  # change of the running bound, per label, at which a run counts as converged
_IN_SIGHT = 1e-2  # likewise, of the gain that its gradient promises
_NOISIEST = 0.1  # likewise, of the running bound's own noise
_PROBES, _BATCH_PROBES = 8, 32  # pairs of groups of draws that look for it, on all units and on batches
_FINAL_DRAWS = 1024  # for the bound that is reported
_AT_ONCE = 64  # of them


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
    vbtta.infer.advi.ascent.DivergenceError: the bound was not finite ...
    """


class LogDensity(Protocol):
    """A log density on the unconstrained space."""

    start: Array  # (D,)

    @property
    def n_units(self) -> int:
        """Number of independent units of data."""
        ...

    def value_and_gradient(self, vectors: Array, units: Array | None = None) -> tuple[Array, Array]:
        """Values (M,) and gradients (M, D), from some units or all."""
        ...

    def value(self, vectors: Array) -> Array:
        """Values (M,)."""
        ...


class AdviAscent(NamedTuple):
    """Where an ascent ended and how it got there."""

    mean: Array  # (D,)
    factor: Array  # (D, D)
    bounds: Array  # (T,): one estimate a step
    means: Array  # (T, D): of Q, before each step
    factors: list[Array]  # likewise, or empty
    converged: bool


def ascend(
    density: LogDensity, engine: ADVI, seed: int, n_labels: float, report: Callable[[int, float], None] | None = None
) -> AdviAscent:
    """Climb for all steps; a bound that is not finite is retried once, with a tenth of the step length."""
    D = len(density.start)
    if D > _LARGEST:
        raise ValueError(
            f"the model has {D} parameters, and a full-rank normal is kept for at most {_LARGEST}; use "
            "noise='annotator' instead of confusion matrices, fewer views, or engine='em'"
        )
    for shrink in (1.0, 0.1):
        found = _run(density, engine, shrink * engine.learning_rate, seed, n_labels, report)
        if isinstance(found, AdviAscent):
            return found
    raise diverged(f"in step {found} with learning_rate={engine.learning_rate:g}, and a tenth of it did not help")


def diverged(where: str) -> DivergenceError:
    """The error, with what to try."""
    return DivergenceError(
        f"the bound was not finite {where}; try a smaller ADVI(learning_rate=...), more particles, bound='elbo', or "
        "look for extreme values among the predictions and labels"
    )


def _run(
    density: LogDensity,
    engine: ADVI,
    learning_rate: float,
    seed: int,
    n_labels: float,
    report: Callable[[int, float], None] | None,
) -> AdviAscent | int:
    """The ascent, or the step in which the bound was not finite."""
    rng = np.random.default_rng(seed)
    mean, D = density.start.copy(), len(density.start)
    factor = min(_FIRST_SCALE, 1 / math.sqrt(max(n_labels, 1.0))) * np.eye(D)
    adam_mean, adam_factor = _Adam(mean.shape), _Adam(factor.shape)
    below, diagonal = np.tril(np.ones((D, D)), -1), np.arange(D)
    bounds, means, factors = np.empty(engine.steps), np.empty((engine.steps, D)), []
    with np.errstate(all="ignore"):
        for step in range(engine.steps):
            means[step] = mean
            if engine.keep_states:
                factors.append(factor.copy())
            noise = rng.standard_normal((engine.particles, D))
            units = _batch(density, engine, rng)
            value, slope = density.value_and_gradient(mean + noise @ factor.T, units)
            log_ratio = value - _log_q(noise, factor)
            bounds[step] = bound_of(log_ratio, engine.order)
            if not (np.isfinite(bounds[step]) and np.isfinite(slope).all()):
                return step + 1
            path = _along(slope, noise, factor)
            progress = (step + 0.5) / engine.steps
            path *= _coefficients(log_ratio, _order_now(engine.order, progress))[:, None]
            length = learning_rate * _schedule(progress)
            mean = mean + adam_mean.step(path.sum(axis=0), length)
            outer = path.T @ noise  # (D, D): d bound / d L
            old = factor[diagonal, diagonal]
            outer[diagonal, diagonal] *= old  # the diagonal is exp of its parameter
            change = adam_factor.step(outer, length)
            factor = factor + below * change * _row_scale(factor)
            factor[diagonal, diagonal] = old * np.exp(change[diagonal, diagonal])
            if report is not None:
                report(step, float(bounds[step]))
        if not np.isfinite(factor).all():
            return engine.steps
        converged = _settled(bounds, n_labels)
        if converged:
            gain = _gain_in_sight(density, mean, factor, engine, seed)
            converged = gain <= _IN_SIGHT * n_labels
    return AdviAscent(mean, factor, bounds, means, factors, bool(converged))


def _gain_in_sight(density: LogDensity, mean: Array, factor: Array, engine: ADVI, seed: int) -> float:
    """What a Newton step of Q's mean would add to the bound, g^T L L^T g / 2, for all that the draws can tell.

    A run that never moved has a steady bound as well; its gradient tells it from one that arrived. Draws come in
    pairs of opposite sign, and what the noise of their mean adds to the square is taken off.
    """
    rng = np.random.default_rng([seed, 2])
    probes = _PROBES if _batch(density, engine, rng) is None else _BATCH_PROBES
    slopes = np.empty((probes, len(mean)))  # L^T g, which has no units
    for probe in range(probes):
        noise, units = rng.standard_normal((engine.particles, len(mean))), _batch(density, engine, rng)
        pair = (_path(density, mean, factor, engine, sign * noise, units) for sign in (1, -1))
        slopes[probe] = 0.5 * sum(pair) @ factor
    average, doubt = slopes.mean(axis=0), slopes.var(axis=0, ddof=1) / probes
    return float(0.5 * (average @ average - doubt.sum() - 2 * math.sqrt(2 * (doubt @ doubt))))


def _batch(density: LogDensity, engine: ADVI, rng: np.random.Generator) -> Array | None:
    """Units of a step; None for all of them."""
    if engine.batch_size is None or engine.batch_size >= density.n_units:
        return None
    return rng.integers(density.n_units, size=engine.batch_size)


def _path(density: LogDensity, mean: Array, factor: Array, engine: ADVI, noise: Array, units: Array | None) -> Array:
    """The gradient of the bound along Q's mean from some draws and some units: (D,)."""
    value, slope = density.value_and_gradient(mean + noise @ factor.T, units)
    path = _along(slope, noise, factor)
    return np.asarray(_coefficients(value - _log_q(noise, factor), engine.order) @ path)


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
    repeats = max(1, _FINAL_DRAWS // engine.particles)
    joint, log_q = np.empty((repeats, engine.particles)), np.empty((repeats, engine.particles))
    at_once = max(1, _AT_ONCE // engine.particles)
    for row in range(0, repeats, at_once):
        some = slice(row, min(row + at_once, repeats))
        noise = rng.standard_normal(((some.stop - some.start) * engine.particles, len(mean)))
        joint[some] = density.value(mean + noise @ factor.T).reshape(-1, engine.particles)
        log_q[some] = _log_q(noise, factor).reshape(-1, engine.particles)
    bound = float(np.mean([bound_of(one, engine.order) for one in joint - log_q]))
    terms = {"J_joint": float(joint.mean()), "Pi_q": float(log_q.mean())}
    if engine.order != 1:
        terms["J_tightening"] = bound - terms["J_joint"] + terms["Pi_q"]
    return bound, terms


def _log_q(noise: Array, factor: Array) -> Array:
    log_det = np.log(np.diagonal(factor)).sum()
    return np.asarray(-0.5 * (noise**2).sum(axis=1) - log_det - 0.5 * noise.shape[1] * _LOG_2PI)


def _along(slope: Array, noise: Array, factor: Array) -> Array:
    """Gradients (M, D) of ln P - ln Q at draws, from those of ln P: that of -ln Q is L^-T e."""
    back = linalg.solve_triangular(factor, noise.T, lower=True, trans="T", check_finite=False)
    return np.asarray(slope + back.T)


def _coefficients(log_ratio: Array, order: float) -> Array:
    share = special.softmax((1 - order) * log_ratio)
    return np.asarray(order * share + (1 - order) * share**2)


def _order_now(order: float, progress: float) -> float:
    """From 1 to the order asked for, between a third and two thirds of the run."""
    return 1 + (order - 1) * min(max(3 * progress - 1, 0.0), 1.0)


def _row_scale(factor: Array) -> Array:
    """Size of each row of L: its entries move in proportion, whatever the parameter's posterior width."""
    return np.asarray(np.sqrt((factor**2).sum(axis=1, keepdims=True)))


def _schedule(progress: float) -> float:
    """Step length over its largest: a short rise, then half a cosine down to zero."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))


def _settled(bounds: Array, n_labels: float) -> bool:
    """Whether the running mean of the bound has hardly changed, or no more than by chance, since the steps got short.

    The last tenth is compared with the tenth up to 70 %: any later the steps are too short for a change to show.
    """
    window, T = max(1, len(bounds) // 10), len(bounds)
    last, before = bounds[T - window :], bounds[max(0, (7 * T) // 10 - window) : (7 * T) // 10]
    if not len(before):
        return False
    change = abs(last.mean() - before.mean())
    chance = math.sqrt((last.var() + before.var()) / window)
    return bool(change <= _SETTLED * n_labels + 2 * chance and chance <= _NOISIEST * n_labels)


class _Adam:
    """D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization" (2015), upwards."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._first, self._second, self._time = np.zeros(shape), np.zeros(shape), 0

    def step(self, gradient: Array, length: float) -> Array:
        self._time += 1
        self._first += (1 - _MOMENTUM) * (gradient - self._first)
        self._second += (1 - _MEMORY) * (gradient**2 - self._second)
        size = np.sqrt(self._second / (1 - _MEMORY**self._time)) + _SMALL
        return np.asarray(length * self._first / (1 - _MOMENTUM**self._time) / size)
