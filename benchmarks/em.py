"""Speed of the continuous mixture: a step against np.exp, its growth and memory, and what acceleration saves."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from benchmarks.problems import posed
from vbtta import EM, GaussianMixture, LabelSets, ViewPredictions
from vbtta.inference.em import ascend
from vbtta.models.gaussian_mixture.em import MixtureProblem


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    size = 100_000 if quick else 1_000_000
    return {
        "step": step_against_exp(size, 32),
        "growth": growth(quick),
        "acceleration": {"toy": passes_saved(*toy()), "correlated": passes_saved(*correlated())},
    }


def step_against_exp(n_labels: int, n_views: int) -> dict[str, float]:
    """One step (a pass and an update) against np.exp over a (J, K) array, and the memory it needs beyond its data."""
    problem, state = random_problem(n_labels, n_views)
    array = np.random.default_rng(1).normal(size=(n_labels, n_views))

    def step() -> None:
        _, statistics = problem.evaluate(state)
        problem.update(state, statistics)

    exp_seconds = fastest(lambda: np.exp(array))
    step_seconds = fastest(step)
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "J": n_labels,
        "K": n_views,
        "exp_seconds": exp_seconds,
        "step_seconds": step_seconds,
        "ratio": step_seconds / exp_seconds,
        "limit": 5.0,
        # the laid-out predictions are one array of doubles, as large as the user's own
        "arrays_of_memory": 1 + peak / array.nbytes,
        "arrays_limit": 3.0,
    }


def growth(quick: bool) -> dict[str, float]:
    """Exponents of time in J and in K, from log-log fits over a factor of 16; both at most 1.1."""
    scale = 20_000 if quick else 100_000
    sizes, views = [scale, 4 * scale, 16 * scale], [4, 16, 64]
    by_labels = [step_seconds(size, 8) for size in sizes]
    by_views = [step_seconds(scale, count) for count in views]
    return {
        "exponent_in_J": float(np.polyfit(np.log(sizes), np.log(by_labels), 1)[0]),
        "exponent_in_K": float(np.polyfit(np.log(views), np.log(by_views), 1)[0]),
        "limit": 1.1,
    }


def step_seconds(n_labels: int, n_views: int) -> float:
    problem, state = random_problem(n_labels, n_views)
    return fastest(lambda: problem.evaluate(state))


def passes_saved(predictions: ViewPredictions, labels: LabelSets) -> dict[str, Any]:
    """Passes until plain EM's final bound is reached to 1e-6 relative; at most a quarter of plain EM's.

    Plain EM creeps, so where it is stopped matters: at the default tolerance, and when it has truly converged.
    """
    return {f"tol_{tol:g}": _passes_saved(predictions, labels, tol) for tol in (1e-7, 1e-9)}


def _passes_saved(predictions: ViewPredictions, labels: LabelSets, tol: float) -> dict[str, float]:
    problem, first = posed(predictions, labels, GaussianMixture(), noise="none")
    plain = ascend(problem, first, EM(max_steps=5000, accelerate=False, tol=tol))
    target = plain.bounds[-1] - 1e-6 * abs(plain.bounds[-1])
    watched = CountingProblem(problem.data, problem.prior, None)
    watched.seen.clear()
    fast = ascend(watched, first, EM(max_steps=5000, tol=1e-9))
    passes = int(np.argmax(np.array(watched.seen) >= target)) + 1
    return {
        "plain_passes": plain.passes,
        "accelerated_passes": passes,
        "ratio": passes / plain.passes,
        "limit": 0.25,
        "bound_difference": fast.bounds[-1] - plain.bounds[-1],
    }


class CountingProblem(MixtureProblem):
    """Remembers the bound of every pass, rejected leaps included."""

    seen: ClassVar[list[float]] = []

    def evaluate(self, state: Any) -> Any:
        """One pass, remembered."""
        bound, statistics = super().evaluate(state)
        self.seen.append(bound)
        return bound, statistics


def toy() -> tuple[ViewPredictions, LabelSets]:
    """A stand-in for the paper's toy problem: six mixed views that shrink the prediction, 1,300 labels."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=1000)
    shrink = np.array([0.95, 0.8, 0.7, 0.9, 0.6, 0.5])
    f = (
        truth[:, None] * shrink
        + 0.25 * rng.normal(size=(1000, 1))
        + np.array([0.05, 0.1, 0.15] * 2) * rng.normal(size=(1000, 6))
    )
    rows = np.r_[np.arange(1000), rng.permutation(1000)[:300]]
    labels = truth[rows] + np.where(np.arange(1300) < 1000, 0.1, 0.4) * rng.normal(size=1300)
    return ViewPredictions(f[:, :, None]), LabelSets.from_table(rows, labels, n_instances=1000)


def correlated() -> tuple[ViewPredictions, LabelSets]:
    """Eighteen views of one network: their errors are mostly shared, and plain EM creeps."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=3000)
    shared = 0.4 * rng.normal(size=3000)
    f = (truth + shared)[:, None] * rng.uniform(0.8, 1.0, 18) + np.linspace(0.05, 0.5, 18) * rng.normal(size=(3000, 18))
    Y = truth[:, None] + 0.2 * rng.normal(size=(3000, 2))
    return ViewPredictions(f[:, :, None]), LabelSets.from_array(Y)


def random_problem(n_labels: int, n_views: int) -> tuple[MixtureProblem, Any]:
    rng = np.random.default_rng(0)
    f = rng.normal(size=(n_labels, n_views, 1))
    labels = LabelSets.from_array(f[:, 0, 0] + 0.3 * rng.normal(size=n_labels))
    return posed(ViewPredictions(f), labels, GaussianMixture(v=0.1), noise="none")


def fastest(work: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
