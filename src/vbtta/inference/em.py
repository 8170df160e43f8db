"""The EM engine: plain steps, and SQUAREM extrapolation that is kept only where it does not lower the bound.

R. Varadhan and C. Roland, "Simple and globally convergent methods for accelerating the convergence of any EM
algorithm" (2008). A pass is a sum in pairs over blocks, in an order that depends on their number alone.
"""

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from time import thread_time
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from vbtta._support.checks import between, whole_number
from vbtta.data.labels import Array
from vbtta.inference.linalg import TOO_LARGE


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
_SINGLE_TOL = 1e-5  # from which single precision is exact enough; the default is as coarse up to 10,000 inputs
_COARSE_GAIN = 0.05  # nats that the last cycle of a short ascent may gain
_COMPARABLE = 1.0  # nats below the highest optimum, down to which others are reported
_SAME_WEIGHTS = 0.02  # difference of every weight between two ascents to the same optimum
_SMALL_SHARE = 0.5  # of an equal share, below which a shrinking weight counts as vanishing
_EXTRA_UPDATES, _MAX_GROWTH = 4, 1e3  # of updates, and a factor that none of them exceeds: powers stay finite
_ENTRIES = 1 << 15  # of one (K, labels) array in a block: a few of them fit a core's second-level cache
_LONGEST = 1 << 13  # labels of a block: above it BLAS starts its own threads, which slow down ours
_ALONE = 1 << 18  # multiplications of a product of matrices that BLAS does not spread over threads
_SHORTEST = 64  # labels: with fewer in a piece, the product is large and threads are worth it
_TASKS = 32  # a thread: enough to keep all of them busy to the end
_MIN_THREADED_SECONDS = 2e-2  # of processor time, below which starting threads costs more than they gain
S = TypeVar("S")
T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


class Problem(ABC, Generic[S, T, P_co]):
    """A model with its data, as an ascent sees it."""

    data: Any  # with `n_labels` and, where labels have units, `unit_change`
    newton: ClassVar[bool] = False  # whether updates are Newton steps: one that gains next to nothing is the last

    @property
    def unit_change(self) -> float:
        """Difference between the bound in the labels' units and in standard units; classes have none."""
        return float(getattr(self.data, "unit_change", 0.0))

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

    def trimmed(self, state: S, statistics: T) -> list[S]:
        """States with vanishing weights set to zero, most zeros first; none where updates put weights at zero."""
        return []

    def started_at(self, state: S, weights: Array) -> S | None:
        """A first state with other weights, from which another optimum may be found; None where there is only one."""
        return None

    def quick(self) -> Self:
        """A cheaper problem, exact enough for held-out scores."""
        return self

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
    def finish(self, ascent: "Ascent[S, T]", *, intervals: bool = True) -> P_co:
        """The posterior at the end of an ascent, with what intervals need unless they are unwanted."""


class Optimum(NamedTuple):
    """An optimum of the bound that was found and not taken."""

    elbo: float
    weights: Annotated[Array, "V"]


class Fit(NamedTuple, Generic[P]):
    """What a policy needs of a fit, by either engine."""

    posterior: P
    bounds: Array  # (T,) in the labels' units
    weights: Array  # (T, K)
    bound: float
    terms: dict[str, float]
    converged: bool
    steps: tuple[P, ...]
    other_optima: tuple[Optimum, ...] = ()


class Ascent(NamedTuple, Generic[S, T]):
    """End and history of an ascent."""

    state: S
    statistics: T
    bounds: list[float]  # after every accepted update
    weights: list[Array]
    states: list[S]  # as many, or empty
    converged: bool
    passes: int  # evaluations of the bound, rejected ones included


def fit_problem(
    problem: Problem[S, T, P], start: S, engine: EM, *, intervals: bool = True, weights: Sequence[Array] = ()
) -> Fit[P]:
    """Ascend from a starting state, and from it with other weights (K,): the posterior at the highest optimum."""
    cheapest = problem.quick() if engine.tol >= _SINGLE_TOL or not intervals else problem
    ascent, others = _best_ascent(cheapest, start, ascend(cheapest, start, engine), engine, weights)
    if not math.isfinite(ascent.bounds[-1]):
        raise ValueError(TOO_LARGE)
    bounds = np.array(ascent.bounds) + problem.unit_change
    return Fit(
        posterior=problem.finish(ascent, intervals=intervals),
        bounds=bounds,
        weights=np.array(ascent.weights),
        bound=float(bounds[-1]),
        terms=problem.bound_terms(ascent.state, ascent.statistics),
        converged=ascent.converged,
        steps=tuple(problem.posterior(state) for state in ascent.states),
        other_optima=tuple(Optimum(end.bounds[-1] + problem.unit_change, end.weights[-1]) for end in others),
    )


def _best_ascent(
    problem: Problem[S, T, Any], start: S, first: Ascent[S, T], engine: EM, weights: Sequence[Array]
) -> tuple[Ascent[S, T], list[Ascent[S, T]]]:
    """The ascent to the highest optimum, and those to others that are about as high, highest first."""
    # A short ascent shows which optimum a start leads to. It is continued if that optimum is new and about as high.
    ends, gain = [first], _COARSE_GAIN / max(problem.data.n_labels, 1)
    coarse = EM(tol=max(engine.tol, gain), max_steps=engine.max_steps)
    starts = [problem.started_at(start, row) for row in weights] if first.converged and engine.tol > 0 else []
    for state in starts:
        if state is None:
            continue
        near = ascend(problem.quick(), state, coarse)
        lowest = max(end.bounds[-1] for end in ends) - _COMPARABLE
        if near.bounds[-1] > lowest and _is_new(near, ends):
            end = ascend(problem, near.state, engine)
            ends += [end] if end.bounds[-1] > lowest and _is_new(end, ends) else []
    best, *others = sorted(ends, key=lambda end: -end.bounds[-1])
    others = [end for end in others if end.bounds[-1] > best.bounds[-1] - _COMPARABLE]
    if best is first:
        return best, others
    # the history begins where all ascents do, and does not fall
    begin = sum(bound < first.bounds[0] for bound in best.bounds)
    joined = {name: getattr(first, name)[:1] + getattr(best, name)[begin:] for name in ("bounds", "weights", "states")}
    return best._replace(**joined), others


def _is_new(ascent: Ascent[S, T], ends: Sequence[Ascent[S, T]]) -> bool:
    """Whether an ascent ends at other weights than all others."""
    return all(np.abs(ascent.weights[-1] - end.weights[-1]).max() > _SAME_WEIGHTS for end in ends)


def ascend(problem: Problem[S, T, Any], start: S, engine: EM) -> Ascent[S, T]:
    """Take EM steps from a starting state until the bound gains less than the tolerance per label."""
    # A cycle takes two plain updates x0 -> x1 -> x2 and looks at x' = x0 + 2 a r + a^2 u with r = x1 - x0,
    # u = x2 - 2 x1 + x0, a = |r|/|u|, or at a shorter step. x' is accepted if its bound is at least x1's, else x2 is
    # taken, which EM guarantees; one more plain update follows it. So no accepted update falls.
    # Newton steps go on without extrapolation as long as each gains far less than the one before.
    ascender, flat_cycles, last_gain, converged = _Ascender(problem, start, engine), 0, np.inf, False
    while not (ascender.full or converged):
        before, origin, origin_state = ascender.bound, problem.weights(ascender.state), ascender.state
        allowed = engine.tol * problem.data.n_labels
        ascender.step()
        gain = ascender.bound - before
        fast, last_gain = problem.newton and gain <= _FAST * max(last_gain, allowed), gain
        if engine.accelerate and not (fast or ascender.full):
            ascender.squarem(origin_state)
        if engine.accelerate and not (fast or ascender.full):
            ascender.step()
        allowed *= _FAST if fast and engine.accelerate else 1
        moved, gain = float(np.abs(problem.weights(ascender.state) - origin).max()), ascender.bound - before
        flat_cycles = flat_cycles + 1 if gain <= _FLAT * allowed else 0
        still = moved <= np.sqrt(engine.tol) or flat_cycles >= _FLAT_CYCLES
        if engine.tol > 0 and gain <= allowed and still:
            converged = not ascender.trim()
    bounds, weights, states = map(list, zip(*ascender.history, strict=True))
    end = ascender.state, ascender.statistics
    kept = states if engine.keep_states else []
    return Ascent(*end, bounds, weights, kept, converged or engine.tol == 0, ascender.passes)


class _Ascender(Generic[S, T]):
    """The current state of an ascent and its moves."""

    def __init__(self, problem: Problem[S, T, Any], start: S, engine: EM) -> None:
        self.problem, self.engine, self.passes, self.stuck = problem, engine, 0, False
        self.history: list[tuple[float, Array, Any]] = []
        self._accept(start, *self._evaluate(start))

    @property
    def full(self) -> bool:
        """Whether all steps are used up, or none can be taken."""
        return self.stuck or len(self.history) >= self.engine.max_steps

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
        for state in self.problem.trimmed(self.state, self.statistics):
            value, sums = self._evaluate(state)
            if value >= self.bound:
                self._accept(state, value, sums)
                return True
        return False

    def _next(self) -> tuple[S, S]:
        """The plain update and the one to try first."""
        plain = self.problem.update(self.state, self.statistics)
        return plain, self.problem.extrapolate(self.state, plain, self.statistics) if self.engine.accelerate else plain

    def _take(self, plain: S, state: S) -> None:
        """Accept a state if its bound is not lower, else the plain update, whose bound never is."""
        value, sums = self._evaluate(state)
        if state is not plain and not value >= self.bound:
            state, (value, sums) = plain, self._evaluate(plain)
        self.stuck = math.isnan(value)  # numbers beyond the range of a float: the state before stays
        self._accept(*((self.state, value, self.statistics) if self.stuck else (state, value, sums)))

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
    if np.abs(after - before).max() > _SLOW_CHANGE or not vanishing.any():
        return after
    first = np.minimum(after / np.maximum(before, 1e-300), _MAX_GROWTH)  # (K,): m / (J w)
    shares = overlap / np.maximum(overlap.sum(axis=1, keepdims=True), 1e-300)  # S / m
    relative = first
    for _ in range(_EXTRA_UPDATES):
        relative = relative * first * np.maximum(2 - shares @ relative, 0.3)
    weights = np.where(vanishing, before * relative, after)
    return np.asarray(weights / weights.sum())


def vanishing_weights(weights: Array) -> list[Array]:
    """Weights with the small ones at zero, most zeros first: EM alone takes them there in infinitely many steps."""
    candidates: list[Array] = []
    for limit in TRIM_THRESHOLDS:
        kept = np.where(weights < limit, 0, weights)
        kept = kept / kept.sum() if kept.any() else weights
        if np.count_nonzero(kept) < np.count_nonzero(weights) and not any(np.array_equal(kept, c) for c in candidates):
            candidates.append(kept)
    return candidates


# A pass allocates and frees many arrays of a few hundred kilobytes. Once glibc's malloc has freed one larger than that,
# it keeps such memory for reuse instead of returning it to the system: passes over small data take half the time.
bytearray(1 << 24)


_LOCAL = threading.local()


def buffer(name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """The calling thread's array of a name, valid until its next use: allocating costs as much as the arithmetic."""
    size, buffers = math.prod(shape), _LOCAL.__dict__
    if name not in buffers or buffers[name].size < size or buffers[name].dtype != dtype:
        buffers[name] = np.empty(size, dtype)
    array: Array = buffers[name][:size].reshape(shape)
    return array


class Block(NamedTuple):
    """Some labelled instances with their labels. Views come first: inner loops run over instances."""

    mean: Array  # (C, K, n) standardised predictions
    variance: Array | None  # (C, K, n) their variances over draws
    instance: Array | None  # (j,): sorted, from 0 within the block; None where every instance has one label
    value: Array  # (C, j) standardised labels
    repeats: Array  # (j,): how often each label was given
    annotator: Array  # (j,); zeros where annotators have no names
    group: Array | None = None  # (n,): numbers of the instances' groups, where they come in groups
    first: int = 0  # labelled instances before the block


class Node(NamedTuple):
    """The sum over blocks `place << level` up to `(place + 1) << level`, or to the last one."""

    level: int
    place: int
    value: Any


def block_size(n_views: int, n_labels: int, n_instances: int) -> int:
    """Instances of a block: as many as have labels, on average, for cache-sized arrays."""
    labels_each = -(-n_labels // max(n_instances, 1))
    return max(64, min(_ENTRIES // n_views, _LONGEST) // max(labels_each, 1))


def total(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT]) -> ResultT:
    """The sum of a function over blocks, on several threads (NumPy releases the lock)."""
    if len(blocks) == 1:
        return function(blocks[0])
    edges = np.linspace(0, len(blocks), min(_TASKS * _cores(), len(blocks)) + 1).astype(int).tolist()
    ranges = list(pairwise(edges))
    parts = map_blocks(lambda part: nodes(function, blocks[part[0] : part[1]], part[0]), ranges)
    result: ResultT = join(node for part in parts for node in part)
    return result


def nodes(function: Callable[[BlockT], Any], blocks: Iterable[BlockT], first: int = 0) -> list[Node]:
    """The sums that consecutive blocks, from number `first`, allow without any other: a few, in order."""
    return _merged(Node(0, place, function(block)) for place, block in enumerate(blocks, first))


def join(parts: Iterable[Node]) -> Any:
    """The sum over all blocks, from the nodes of all of them in order."""
    stack = _merged(parts)
    value = stack.pop().value
    while stack:
        value = plus(stack.pop().value, value)
    return value


def plus(first: Any, second: Any) -> Any:
    """Statistics, nested tuples of arrays, added field by field; a field that is None stays None."""
    if first is None:
        return None
    if not isinstance(first, tuple):
        return first + second
    fields = (plus(left, right) for left, right in zip(first, second, strict=True))
    return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)


def map_blocks(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT]) -> Iterator[ResultT]:
    """Apply a function to every block, in order; on threads where, by the first one's time, they are worth starting."""
    start = thread_time()
    yield function(blocks[0])
    others = blocks[1:]
    threads = min(_cores(), len(others))
    if threads <= 1 or (thread_time() - start) * len(others) < _MIN_THREADED_SECONDS:
        yield from map(function, others)
        return
    contexts = [copy_context() for _ in others]  # NumPy's error state would not reach the threads otherwise
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda context, block: context.run(function, block), contexts, others)


def _merged(parts: Iterable[Node]) -> list[Node]:
    """Nodes in order; two siblings are replaced by their parent, until no two are left."""
    stack: list[Node] = []
    for node in parts:
        while stack and node.place % 2 and stack[-1][:2] == (node.level, node.place - 1):
            node = Node(node.level + 1, node.place // 2, plus(stack.pop().value, node.value))
        stack.append(node)
    return stack


def products(left: Array, right: Array) -> Array:
    """Sums over the last axis of products of rows, one @ other.T, in pieces that BLAS takes on the calling thread."""
    # Threads share the blocks already. BLAS would start further threads for each of these products, and where the
    # cores are busy waiting for them takes far longer than multiplying.
    piece = _ALONE // max(len(left) * len(right), 1)
    if piece < _SHORTEST:
        return np.asarray(left @ right.T)
    total = left[:, :piece] @ right[:, :piece].T
    for first in range(piece, left.shape[1], piece):
        total += left[:, first : first + piece] @ right[:, first : first + piece].T
    return np.asarray(total)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
