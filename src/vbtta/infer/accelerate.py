"""Ascent on a bound: plain steps, and SQUAREM extrapolation that is kept only where it gains.

R. Varadhan and C. Roland, "Simple and globally convergent methods for accelerating the convergence
of any EM algorithm", Scandinavian Journal of Statistics 35 (2008).
"""

__all__ = ["Ascent", "Problem", "ascend", "vanishing_weights"]

from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vbtta.labels import Array
from vbtta.specs import EM

_VANISHING = (1e-2, 1e-4, 1e-6)  # weights below which zero is tried at the end

S = TypeVar("S")
T = TypeVar("T")


class Problem(Protocol[S, T]):
    """What an ascent needs to know of a model and its data."""

    n_labels: float

    def evaluate(self, state: S) -> tuple[float, T]:
        """The bound at a state and the statistics for the next update: one pass over the data."""
        ...

    def update(self, state: S, statistics: T) -> S:
        """The next state; it does not lower the bound."""
        ...

    def pack(self, state: S) -> Array:
        """The state as an unconstrained vector, in which extrapolation is meaningful."""
        ...

    def unpack(self, vector: Array, like: S) -> S:
        """The state of a vector."""
        ...

    def trimmed(self, state: S) -> list[S]:
        """States with vanishing weights set to zero, boldest first; empty where there are none."""
        ...

    def weights(self, state: S) -> Array:
        """The weights of the views: (K,)."""
        ...


class Ascent(NamedTuple):
    """Where an ascent ended and how it got there."""

    state: Any
    statistics: Any
    bounds: list[float]  # after every accepted update
    weights: list[Array]
    states: list[Any]  # as many, or empty
    converged: bool
    passes: int  # evaluations of the bound, rejected ones included


def ascend(problem: Problem[S, T], start: S, engine: EM) -> Ascent:
    """Climb from a starting state until the bound gains less than the tolerance per label.

    One cycle takes two plain updates x0 -> x1 -> x2 and evaluates x' = x0 - 2 a r + a^2 u with
    r = x1 - x0, u = x2 - 2 x1 + x0, a = -|r|/|u|. Evaluating x1 and x' costs two passes; x' is accepted
    if its bound is at least x1's, else x2 is taken, which EM guarantees. So no accepted update falls.
    """
    bound, statistics = problem.evaluate(start)
    state, passes = start, 1
    history: list[tuple[float, Array, Any]] = [(bound, problem.weights(start), start)]

    def accept(new: S, value: float, sums: T) -> None:
        nonlocal state, bound, statistics
        state, bound, statistics = new, value, sums
        history.append((value, problem.weights(new), new if engine.keep_states else None))

    longest = 4.0  # of the extrapolation; grows where it helps
    converged = False
    while len(history) < engine.max_steps and not converged:
        before, origin = bound, problem.weights(state)
        first = problem.update(state, statistics)
        value, sums = problem.evaluate(first)
        passes += 1
        start_vector = problem.pack(state) if engine.accelerate else None
        accept(first, value, sums)
        if start_vector is not None and len(history) < engine.max_steps:
            second = problem.update(first, sums)
            middle = problem.pack(first)
            r = middle - start_vector
            u = problem.pack(second) - middle - r
            length = float(np.linalg.norm(r)) / max(float(np.linalg.norm(u)), 1e-300)
            step = min(max(length, 1.0), longest)
            candidate = second
            if step > 1.0:
                candidate = problem.unpack(start_vector + 2 * step * r + step**2 * u, second)
            with np.errstate(all="ignore"):
                value, sums = problem.evaluate(candidate)
            passes += 1
            if np.isfinite(value) and value >= bound:
                longest = longest * 4 if step == longest else longest
            elif step > 1.0:
                longest = max(longest / 4, 4.0)
                candidate = second
                value, sums = problem.evaluate(second)
                passes += 1
            accept(candidate, value, sums)
        moved = float(np.abs(problem.weights(state) - origin).max())
        small = engine.tol > 0 and bound - before <= engine.tol * problem.n_labels
        if small and moved <= np.sqrt(engine.tol):
            converged = True
            for candidate in problem.trimmed(state):
                value, sums = problem.evaluate(candidate)
                passes += 1
                if value >= bound:  # a weight that wants to be zero: put it there, and go on
                    accept(candidate, value, sums)
                    converged = False
                    break
    bounds, weights, states = zip(*history, strict=True)
    return Ascent(
        state=state,
        statistics=statistics,
        bounds=list(bounds),
        weights=list(weights),
        states=list(states) if engine.keep_states else [],
        converged=converged or engine.tol == 0,
        passes=passes,
    )


def vanishing_weights(weights: Array) -> list[Array]:
    """Weights with the small ones at zero, boldest first: EM alone takes them there in infinitely many steps."""
    candidates: list[Array] = []
    for limit in _VANISHING:
        kept = np.where(weights < limit, 0, weights)
        kept = kept / kept.sum() if kept.any() else weights
        if np.count_nonzero(kept) < np.count_nonzero(weights) and not any(np.array_equal(kept, c) for c in candidates):
            candidates.append(kept)
    return candidates
