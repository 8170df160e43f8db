"""The EM engine: plain steps, and SQUAREM extrapolation that is kept only where it does not lower the bound.

When EM converges slowly, the weights that shrink to zero are extrapolated by a quadratic model of the bound. On six
problems SQUAREM alone needs 13 to 14 % more passes (benchmarks/em.py). Other weights are left to SQUAREM: one that runs
ahead of its view's calibration can end at zero where it should not.

R. Varadhan and C. Roland, "Simple and globally convergent methods for accelerating the convergence
of any EM algorithm", Scandinavian Journal of Statistics 35 (2008).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from vbtta._support.checks import between, whole_number
from vbtta.data.labels import Array


@dataclass(frozen=True, kw_only=True)
class EM:
    """Variational EM: closed-form steps that never lower the bound (docs/method, eqs. 4 to 10 and 15 to 24).

    Parameters
    ----------
    max_steps : int
        Most accepted updates.
    tol : float
        Stop when the bound gains less than this per label; 0 runs `max_steps` without a warning.
    accelerate : bool
        Whether to extrapolate between steps.
    keep_states : bool
        Whether to keep every step's state for :meth:`Policy.at_step`.

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import EM, ViewPredictions, fit_policy
    >>> views = np.random.default_rng(0).normal(size=(200, 3, 1))  # (N, K, C)
    >>> engine = EM(keep_states=True)
    >>> policy = fit_policy(ViewPredictions(views), views[:, 0, 0], task="regression", model="mixture", engine=engine)
    >>> bool((np.diff(policy.history.elbo) >= -1e-9).all())  # but for rounding
    True
    >>> policy.at_step(1).weights.round(2), policy.weights.round(2)
    (array([0.33, 0.33, 0.33]), array([1., 0., 0.]))
    """

    max_steps: int = 1000
    tol: float = 1e-7
    accelerate: bool = True
    keep_states: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_steps", whole_number("max_steps", self.max_steps, least=1))
        between("tol", self.tol, 0, 1)

    @property
    def unconverged(self) -> str:
        """What to say of a fit that did not converge."""
        return f" did not converge in {self.max_steps} steps; raise EM(max_steps=...) or tol"


TRIM_THRESHOLDS = (1e-2, 1e-4, 1e-6)  # weights below which zero is tried at the end
_MAX_STRETCH = 1e6  # of an extrapolation, in updates
_FAST = 0.1  # share of the last Newton step's gain, or of the tolerance, below which a step needs no extrapolation
_FLAT, _FLAT_CYCLES = 1e-3, 5  # share of the tolerance, and cycles below it: weights of equal views may go on moving
_SLOW_CHANGE = 3e-3  # change of every weight below which vanishing ones are extrapolated
_SMALL_SHARE = 0.5  # of an equal share, below which a shrinking weight counts as vanishing
_EXTRA_UPDATES = 4
S = TypeVar("S")
T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)


class _Labels(Protocol):
    @property
    def n_labels(self) -> float: ...


class Problem(ABC, Generic[S, T, P_co]):
    """A model with its data, as an ascent sees it."""

    data: _Labels
    newton: ClassVar[bool] = False  # whether updates are Newton steps: one that gains next to nothing is the last

    @property
    def unit_change(self) -> float:
        """Difference between the bound in the labels' units and in standard units; classes have none."""
        return 0.0

    @abstractmethod
    def evaluate(self, state: S) -> tuple[float, T]:
        """The bound at a state and the statistics for the next update: one pass over the data."""

    @abstractmethod
    def update(self, state: S, statistics: T) -> S:
        """The next state; it does not lower the bound."""

    def extrapolate(self, before: S, after: S, statistics: T) -> S:
        """A state beyond the plain update from `before` to `after`, whose bound may be lower; or `after`."""
        return after

    @abstractmethod
    def pack(self, state: S) -> Array:
        """The state as an unconstrained vector, in which extrapolation is meaningful."""

    @abstractmethod
    def unpack(self, vector: Array, like: S) -> S:
        """The state of a vector."""

    def trimmed(self, state: S) -> list[S]:
        """States with vanishing weights set to zero, boldest first; none where updates put weights at zero."""
        return []

    @abstractmethod
    def weights(self, state: S) -> Array:
        """The weights of the views: (K,)."""

    @abstractmethod
    def bound_terms(self, state: S, statistics: T) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""

    @abstractmethod
    def posterior(self, state: S) -> P_co:
        """What remains when the data are gone; without intervals of the weights."""

    @abstractmethod
    def finish(self, ascent: "Ascent", *, intervals: bool = True) -> P_co:
        """The posterior at the end of an ascent, with what intervals need unless they are unwanted."""


class Fit(NamedTuple, Generic[P]):
    """What a policy needs of a fit, by either engine."""

    posterior: P
    bounds: Array  # (T,) in the labels' units
    weights: Array  # (T, K)
    bound: float
    terms: dict[str, float]
    converged: bool
    steps: tuple[P, ...]


class Ascent(NamedTuple):
    """End and history of an ascent."""

    state: Any
    statistics: Any
    bounds: list[float]  # after every accepted update
    weights: list[Array]
    states: list[Any]  # as many, or empty
    converged: bool
    passes: int  # evaluations of the bound, rejected ones included


def fit_problem(problem: Problem[S, T, P], start: S, engine: EM, *, intervals: bool = True) -> Fit[P]:
    """Climb from a starting state to a posterior."""
    ascent = ascend(problem, start, engine)
    bounds = np.array(ascent.bounds) + problem.unit_change
    return Fit(
        posterior=problem.finish(ascent, intervals=intervals),
        bounds=bounds,
        weights=np.array(ascent.weights),
        bound=float(bounds[-1]),
        terms=problem.bound_terms(ascent.state, ascent.statistics),
        converged=ascent.converged,
        steps=tuple(problem.posterior(state) for state in ascent.states),
    )


def ascend(problem: Problem[S, T, Any], start: S, engine: EM) -> Ascent:
    """Climb from a starting state until the bound gains less than the tolerance per label."""
    # A cycle takes two plain updates x0 -> x1 -> x2 and looks at x' = x0 + 2 a r + a^2 u with r = x1 - x0,
    # u = x2 - 2 x1 + x0, a = |r|/|u|, or at a shorter step. x' is accepted if its bound is at least x1's, else x2 is
    # taken, which EM guarantees; one more plain update steadies it. So no accepted update falls.
    # Newton steps go on without extrapolation as long as each gains far less than the one before.
    ascender, flat_cycles, last_gain = _Ascender(problem, start, engine), 0, np.inf
    while not (ascender.full or ascender.converged):
        before, origin, origin_state = ascender.bound, problem.weights(ascender.state), ascender.state
        allowed = engine.tol * problem.data.n_labels
        ascender.step()
        gain = ascender.bound - before
        fast = problem.newton and gain <= _FAST * max(last_gain, allowed)
        last_gain = gain
        if engine.accelerate and not (fast or ascender.full):
            ascender.squarem(origin_state)
        if engine.accelerate and not (fast or ascender.full):
            ascender.step()
        allowed *= _FAST if fast and engine.accelerate else 1
        moved = float(np.abs(problem.weights(ascender.state) - origin).max())
        gain = ascender.bound - before
        flat_cycles = flat_cycles + 1 if gain <= _FLAT * allowed else 0
        still = moved <= np.sqrt(engine.tol) or flat_cycles >= _FLAT_CYCLES
        if engine.tol > 0 and gain <= allowed and still:
            ascender.converged = not ascender.trim()
    return ascender.summary()


class _Ascender(Generic[S, T]):
    """The current state of an ascent and its moves."""

    def __init__(self, problem: Problem[S, T, Any], start: S, engine: EM) -> None:
        self.problem, self.engine = problem, engine
        self.converged = False
        self.passes = 0
        self.history: list[tuple[float, Array, Any]] = []
        self._accept(start, *self._evaluate(start))

    @property
    def full(self) -> bool:
        """Whether all steps are used up."""
        return len(self.history) >= self.engine.max_steps

    def step(self) -> None:
        """An update, with vanishing weights extrapolated where that does not lower the bound."""
        self._take(*self._next())

    def squarem(self, origin: S) -> None:
        """Extrapolate from the state before the last update through this one, or take the next update."""
        problem = self.problem
        plain, second = self._next()
        first_vector, middle = problem.pack(origin), problem.pack(self.state)
        r = middle - first_vector
        u = problem.pack(second) - middle - r
        length = float(np.linalg.norm(r)) / max(float(np.linalg.norm(u)), 1e-300)
        for stretch in (length, 1 + 0.25 * (length - 1)):
            if not 1 < stretch < _MAX_STRETCH:
                continue
            with np.errstate(all="ignore"):  # an extrapolation may overflow; then it is rejected
                state = problem.unpack(first_vector + 2 * stretch * r + stretch**2 * u, second)
                value, sums = self._evaluate(state)
            if np.isfinite(value) and value >= self.bound:
                return self._accept(state, value, sums)
        return self._take(plain, second)

    def trim(self) -> bool:
        """Put vanishing weights to zero where that does not lower the bound; whether it did."""
        for state in self.problem.trimmed(self.state):
            value, sums = self._evaluate(state)
            if value >= self.bound:
                self._accept(state, value, sums)
                return True
        return False

    def summary(self) -> Ascent:
        """End and history so far."""
        bounds, weights, states = zip(*self.history, strict=True)
        return Ascent(
            state=self.state,
            statistics=self.statistics,
            bounds=list(bounds),
            weights=list(weights),
            states=list(states) if self.engine.keep_states else [],
            converged=self.converged or self.engine.tol == 0,
            passes=self.passes,
        )

    def _next(self) -> tuple[S, S]:
        """The plain update and the one to try first."""
        plain = self.problem.update(self.state, self.statistics)
        return plain, self.problem.extrapolate(self.state, plain, self.statistics) if self.engine.accelerate else plain

    def _take(self, plain: S, state: S) -> None:
        """Accept a state if its bound is not lower, else the plain update, whose bound never is."""
        value, sums = self._evaluate(state)
        if state is not plain and not value >= self.bound:
            state = plain
            value, sums = self._evaluate(plain)
        self._accept(state, value, sums)

    def _evaluate(self, state: S) -> tuple[float, T]:
        self.passes += 1
        return self.problem.evaluate(state)

    def _accept(self, state: S, bound: float, statistics: T) -> None:
        self.state, self.bound, self.statistics = state, bound, statistics
        self.history.append((bound, self.problem.weights(state), state if self.engine.keep_states else None))


def extrapolated_weights(before: Array, after: Array, overlap: Array) -> Array:
    """Several updates of vanishing weights from one pass, where all change slowly; else the plain update."""
    # The bound is concave in the weights w. Its gradient there is m_k / w_k with m = sum_j p_j, p the responsibilities,
    # and at w_k a_k, to first order, (2 m - S a)_k / w_k with S = sum_j p_j p_j^T. An update multiplies weights by
    # their gradient over J: the first takes a_k from 1 to m_k / (J w_k), which `after` says, the next ones follow.
    vanishing = (before > 0) & (after < _SMALL_SHARE / len(after))
    if not vanishing.any() or np.abs(after - before).max() > _SLOW_CHANGE:
        return after
    first = after / np.maximum(before, 1e-300)  # (K,): m / (J w)
    shares = overlap / np.maximum(overlap.sum(axis=1, keepdims=True), 1e-300)  # S / m
    relative = first
    for _ in range(_EXTRA_UPDATES):
        relative = relative * first * np.maximum(2 - shares @ relative, 0.3)
    weights = np.where(vanishing, before * relative, after)
    return np.asarray(weights / weights.sum())


def vanishing_weights(weights: Array) -> list[Array]:
    """Weights with the small ones at zero, boldest first: EM alone takes them there in infinitely many steps."""
    candidates: list[Array] = []
    for limit in TRIM_THRESHOLDS:
        kept = np.where(weights < limit, 0, weights)
        kept = kept / kept.sum() if kept.any() else weights
        if np.count_nonzero(kept) < np.count_nonzero(weights) and not any(np.array_equal(kept, c) for c in candidates):
            candidates.append(kept)
    return candidates
