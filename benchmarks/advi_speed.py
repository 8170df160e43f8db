"""ADVI's times: how a step grows with the data, and EM, ADVI and PyMC from fresh processes on the toy problem.

PyMC 5 is looked for in the interpreter that the environment variable VBTTA_PYMC_PYTHON names, else in this one; where
there is none, the outcome says so and holds the other measurements. Processes run in turn, round after round; a ratio
is the median over rounds of ratios within a round, so that a busy moment does not decide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.em import toy
from benchmarks.exact_mixture import standard_problem
from benchmarks.problems import posed
from benchmarks.pymc_fit import seconds
from vbtta import ADVI, EM, ConvergenceWarning, GaussianMixture, LabelSets, ViewPredictions, fit_policy
from vbtta.inference.em import ascend as ascend_em

__all__ = ["growth", "mixed", "run", "timing"]

Array = np.ndarray[Any, Any]

_STEPS, _PARTICLES = 300, 1  # of the timed fits; pm.fit draws one particle by default
_MODEL = GaussianMixture(concentration=1.0)
_FRESH = """
import sys, warnings
import numpy as np
from vbtta import ADVI, EM, GaussianMixture, LabelSets, ViewPredictions, fit_policy
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
predictions = ViewPredictions(data["predictions"])
labels = LabelSets.from_table(data["instance"], data["value"], n_instances=len(predictions))
engine = EM() if sys.argv[2] == "em" else ADVI(steps=int(sys.argv[3]), particles=int(sys.argv[4]))
fit_policy(predictions, labels, task="regression", model=GaussianMixture(concentration=1.0), engine=engine, guard=False)
"""


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    return {"timing": timing(quick), "growth": growth(quick)}


def growth(quick: bool) -> dict[str, Any]:
    """Exponents of a step's time in J and K, and in J where a step sees a batch."""
    from vbtta.inference.advi import ascend_draws as ascend
    from vbtta.inference.unconstrained import UnconstrainedDensity
    from vbtta.models.gaussian_mixture.density import MixtureDensity

    def step(n_labels: int, n_views: int, batch: int | None = None, steps: int = 3) -> float:
        """Seconds of one step of the ascent, all of it: draws, batch, density, gradient, Adam."""
        predictions, labels, _ = mixed(np.random.default_rng(0), np.full(n_views, 1 / n_views), n_labels)
        problem, first = posed(predictions, labels, _MODEL, noise="none")
        density = UnconstrainedDensity(MixtureDensity(problem, first, "normal"))
        engine = ADVI(steps=steps, batch_size=batch)
        ascend(density, engine, 0, n_labels)
        return float(np.median([seconds(lambda: ascend(density, engine, 0, n_labels)) for _ in range(5)])) / steps

    def exponent(sizes: list[int], times: list[float]) -> float:
        return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])

    scale = 2_000 if quick else 20_000
    sizes, views = [scale, 4 * scale, 16 * scale], [4, 16, 64]
    whole, by_view = [step(size, 8) for size in sizes], [step(scale, count) for count in views]
    batches = [step(size, 8, batch=1000, steps=20) for size in sizes]
    return {
        "J": {"sizes": sizes, "step_seconds": whole, "exponent": exponent(sizes, whole), "limit": 1.1},
        "K": {"sizes": views, "step_seconds": by_view, "exponent": exponent(views, by_view), "limit": 1.1},
        "J_in_batches_of_1000": {
            "sizes": sizes,
            "step_seconds": batches,
            "exponent": exponent(sizes, batches),
            "limit": 0.1,
        },
    }


def timing(quick: bool) -> dict[str, Any]:
    """The toy problem (J = 1,300, K = 6) by EM, ADVI and PyMC from fresh processes, and PyMC's weights beside ours."""
    with tempfile.TemporaryDirectory() as folder:
        toy_file, mixed_file = Path(folder, "toy.npz"), Path(folder, "mixed.npz")
        save(toy_file, *toy())
        predictions, labels, _ = mixed(np.random.default_rng(0), np.array([0.5, 0.3, 0.15, 0.05]), 500)
        save(mixed_file, predictions, labels)
        own = [sys.executable, "-c", _FRESH, str(toy_file)]
        commands = {"em": [*own, "em"], "advi": [*own, "advi", str(_STEPS), str(_PARTICLES)]}
        imports = "import vbtta, torch, pyro"
        commands["advi_imports"] = [sys.executable, "-c", imports]
        python = os.environ.get("VBTTA_PYMC_PYTHON", sys.executable)
        has_pymc = subprocess.run([python, "-c", "import pymc"], capture_output=True, check=False).returncode == 0
        script = [python, "-W", "ignore", str(Path(__file__).with_name("pymc_fit.py"))]
        fit = [*script, str(toy_file), str(_STEPS), str(_PARTICLES)]
        if has_pymc:
            commands["pymc"] = [*fit, "0", "0"]
            output(commands["pymc"])  # fills the compile cache
        times = rounds(commands, 1 if quick else 5)
        results: dict[str, Any] = {
            "steps": _STEPS,
            "particles": _PARTICLES,
            "fresh_process_seconds": times,
            **_in_process(quick),
        }
        if not has_pymc:
            return {
                **results,
                "pymc": f"not installed in {Path(python).name}: set VBTTA_PYMC_PYTHON to one that has it",
            }
        inside = json.loads(output([*fit, "1" if quick else "5", "0"]))
        second = float(np.median(inside["further"]))
        return {
            **results,
            "pymc_version": inside["version"],
            "pymc_first_fit": inside["first"],
            "pymc_further_fits": inside["further"],
            "pymc_compiled_steps": inside["compiled_steps"],
            "advi_over_pymc": {"ratio": paired(times["advi"], times["pymc"]), "limit": 1.0},
            "pymc_over_em": {"ratio": paired(times["pymc"], times["em"]), "least": 5.0},
            "pymc_second_over_em_engine": {"ratio": second / results["em_engine_seconds"], "least": 30.0},
            "pymc_second_over_em_policy": {"ratio": second / results["em_policy_seconds"]},
            "pymc_compiled_steps_over_advi_steps": {
                "ratio": float(np.median(inside["compiled_steps"])) / results["advi_policy_seconds"]
            },
            "weights": _agreement(script, mixed_file, predictions, labels, 1000 if quick else 10_000),
        }


def _in_process(quick: bool) -> dict[str, float]:
    """EM as an engine (problem posed and run to convergence) and with all a policy has on top, such as intervals."""
    predictions, labels = toy()
    repeats = 3 if quick else 15

    def engine() -> Any:
        problem, first = posed(predictions, labels, _MODEL, noise="none")
        return ascend_em(problem, first, EM())

    def policy(how: EM | ADVI) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return fit_policy(predictions, labels, task="regression", model=_MODEL, engine=how, guard=False)

    if not engine().converged:
        raise RuntimeError("EM did not converge on the toy problem")
    advi = ADVI(steps=_STEPS, particles=_PARTICLES)
    policy(advi)
    return {
        "em_engine_seconds": float(np.median([seconds(engine) for _ in range(repeats)])),
        "em_policy_seconds": float(np.median([seconds(lambda: policy(EM())) for _ in range(repeats)])),
        "advi_policy_seconds": float(np.median([seconds(lambda: policy(advi)) for _ in range(3)])),
    }


def _agreement(
    script: list[str], path: Path, predictions: ViewPredictions, labels: LabelSets, long_run: int
) -> dict[str, Any]:
    """Weights of a long run in PyMC and of one here."""
    theirs = np.array(json.loads(output([*script, str(path), "10", "1", "0", str(long_run)]))["weights"])
    engine = ADVI(steps=1500, particles=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        ours = fit_policy(predictions, labels, task="regression", model=_MODEL, engine=engine).weights
    return {
        "ours": ours.tolist(),
        "pymc": theirs.tolist(),
        "largest_difference": float(np.abs(ours - theirs).max()),
        "limit": 0.05,
    }


def rounds(commands: dict[str, list[str]], repeats: int) -> dict[str, list[float]]:
    """Wall times of processes that take turns."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            start = time.perf_counter()
            output(command)
            times[name].append(time.perf_counter() - start)
    return times


def paired(one: list[float], other: list[float]) -> float:
    return float(np.median(np.array(one) / np.array(other)))


def output(command: list[str]) -> str:
    """The last line that a process prints."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {process.stderr[-2000:]}")
    return (process.stdout.strip().splitlines() or [""])[-1]


def save(path: Path, predictions: ViewPredictions, labels: LabelSets) -> None:
    """The problem for both sides: raw for ours, in standard units and with the same priors for PyMC."""
    np.savez(
        path,
        predictions=predictions.outputs,
        instance=labels.instance,
        value=labels.value,
        **standard_problem(predictions, labels)._asdict(),
    )


def mixed(rng: np.random.Generator, weights: Array, n_labels: int) -> tuple[ViewPredictions, LabelSets, Array]:
    """Labels that follow one of several views each, rescaled, shifted and with noise."""
    K = len(weights)
    f = rng.normal(size=(n_labels, 1)) + 0.7 * rng.normal(size=(n_labels, K))
    view = rng.choice(K, size=n_labels, p=weights)
    y = 1.2 * f[np.arange(n_labels), view] + 0.3 + 0.2 * rng.normal(size=n_labels)
    return ViewPredictions(f[:, :, None]), LabelSets.from_array(y), weights
