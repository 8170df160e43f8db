"""Speed of EM: a step against np.exp, its growth and memory, what acceleration saves, passes of six problems."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from scipy import special

from benchmarks.problems import posed
from vbtta import EM, CategoricalMixture, GaussianLatent, GaussianMixture, LabelSets, ViewPredictions
from vbtta.inference.em import ascend
from vbtta.models.gaussian_mixture.em import MixtureProblem


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    size = 100_000 if quick else 1_000_000
    return {
        "step": step_against_exp(size, 32),
        "growth": growth(quick),
        "acceleration": {"toy": passes_saved(*toy()), "correlated": passes_saved(*correlated())},
        "passes_to_converge": passes_to_converge(2 if quick else 24),
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


def passes_to_converge(draws: int) -> dict[str, Any]:
    """Mean passes over draws of six problems, with vanishing weights extrapolated and by SQUAREM alone; must save 10 %.

    Passes of one draw change by up to a factor of two with the slightest change of the path, so many are averaged.
    """
    results: dict[str, Any] = {"draws": draws}
    for tol in (1e-7, 1e-9):
        extrapolated = _mean_passes(tol, draws)
        with mock.patch.object(MixtureProblem, "extrapolate", lambda self, before, after, statistics: after):
            alone = _mean_passes(tol, draws)
        ratio = sum(alone.values()) / sum(extrapolated.values())
        results[f"tol_{tol:g}"] = {"extrapolated": extrapolated, "squarem_alone": alone, "ratio": ratio, "least": 1.1}
    return results


def _mean_passes(tol: float, draws: int) -> dict[str, float]:
    engine = EM(max_steps=5000, tol=tol)
    return {
        name: float(np.mean([ascend(*pose(seed), engine).passes for seed in range(draws)]))
        for name, pose in PROBLEMS.items()
    }


class CountingProblem(MixtureProblem):
    """Remembers the bound of every pass, rejected leaps included."""

    seen: ClassVar[list[float]] = []

    def evaluate(self, state: Any) -> Any:
        """One pass, remembered."""
        bound, statistics = super().evaluate(state)
        self.seen.append(bound)
        return bound, statistics


def toy(seed: int = 0) -> tuple[ViewPredictions, LabelSets]:
    """A stand-in for the paper's toy problem: six mixed views that shrink the prediction, 1,300 labels."""
    rng = np.random.default_rng(seed)
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


def correlated(seed: int = 1) -> tuple[ViewPredictions, LabelSets]:
    """Eighteen views of one network: their errors are mostly shared, and plain EM converges slowly."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=3000)
    shared = 0.4 * rng.normal(size=3000)
    f = (truth + shared)[:, None] * rng.uniform(0.8, 1.0, 18) + np.linspace(0.05, 0.5, 18) * rng.normal(size=(3000, 18))
    Y = truth[:, None] + 0.2 * rng.normal(size=(3000, 2))
    return ViewPredictions(f[:, :, None]), LabelSets.from_array(Y)


def sparse(seed: int) -> tuple[ViewPredictions, LabelSets]:
    """A thousand labels, each of which follows one of eight views, four of them never."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=(1000, 1)) + 0.7 * rng.normal(size=(1000, 8))
    view = rng.choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])
    y = 1.2 * f[np.arange(1000), view] + 0.3 + 0.2 * rng.normal(size=1000)
    return ViewPredictions(f[:, :, None]), LabelSets.from_array(y)


def annotated(seed: int) -> tuple[ViewPredictions, LabelSets]:
    """Two outputs, eight views and three annotators of different precision."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(600, 1, 2))
    f = truth + 0.3 * rng.normal(size=(600, 1, 2)) + np.linspace(0.1, 0.6, 8)[:, None] * rng.normal(size=(600, 8, 2))
    y = truth + np.array([0.1, 0.2, 0.5])[:, None] * rng.normal(size=(600, 3, 2))
    return ViewPredictions(f), LabelSets.from_array(y, annotators="columns")


def classes(seed: int, n_instances: int = 1500, n_views: int = 10) -> tuple[ViewPredictions, LabelSets]:
    """Labels of five classes, drawn from what one of the views predicts."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=(n_instances, 1, 5)) + rng.normal(size=(n_instances, n_views, 5))
    proba = special.softmax(2 * f[np.arange(n_instances), rng.integers(3, size=n_instances)], axis=1)
    return ViewPredictions(f), LabelSets.from_array((proba.cumsum(axis=1) < rng.random((n_instances, 1))).sum(axis=1))


PROBLEMS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "toy": lambda seed: posed(*toy(seed), GaussianMixture(), noise="none"),
    "correlated": lambda seed: posed(*correlated(seed), GaussianMixture(), noise="none"),
    "sparse": lambda seed: posed(*sparse(seed), GaussianMixture(), noise="none"),
    "annotated": lambda seed: posed(*annotated(seed), GaussianMixture(), noise="annotator"),
    "pool": lambda seed: posed(*correlated(seed), GaussianLatent(), noise="none"),
    "classes": lambda seed: posed(*classes(seed), CategoricalMixture(), noise="none"),
}


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
