"""ADVI: coverage of its weight intervals, agreement with EM and PyMC, and times against both from fresh processes.

PyMC 5 is looked for in the interpreter that the environment variable VBTTA_PYMC_PYTHON names, else in this one; where
there is none, the outcome says so and holds the other measurements.
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

from benchmarks.em import fastest, toy
from vbtta import ADVI, ConvergenceWarning, GaussianMixture, LabelSets, ViewPredictions, fit_policy
from vbtta.infer.mixture import mixture_problem

_STEPS, _PARTICLES = 300, 1  # of the timed fits; pm.fit draws one particle by default
_LEVEL = 0.9
_FRESH = """
import sys, time
import numpy as np
from vbtta import ADVI, EM, GaussianMixture, LabelSets, ViewPredictions, fit_policy
import warnings
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
predictions = ViewPredictions(data["predictions"])
labels = LabelSets.from_table(data["instance"], data["value"], n_instances=len(predictions))
engine = EM() if sys.argv[2] == "em" else ADVI(steps=int(sys.argv[3]), particles=int(sys.argv[4]))
start = time.perf_counter()
fit_policy(predictions, labels, task="regression", model=GaussianMixture(concentration=1.0), engine=engine, guard=False)
print(time.perf_counter() - start)
"""


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    return {
        "coverage": coverage(4 if quick else 40),
        "growth": growth(quick),
        "timing": timing(quick),
    }


def coverage(problems: int) -> dict[str, Any]:
    """How often 90 % intervals hold the true weight, over problems whose weights are drawn from the prior."""
    hits = []
    for seed in range(problems):
        rng = np.random.default_rng(seed)
        weights = rng.dirichlet(np.ones(3))
        predictions, labels, _ = mixed(rng, weights, 300)
        policy = fit_policy(
            predictions,
            labels,
            task="regression",
            model=GaussianMixture(concentration=1.0),
            engine=ADVI(steps=800, particles=4, learning_rate=0.05),
        )
        low, high = policy.weight_interval(_LEVEL).T
        hits.append(np.mean((low <= weights) & (weights <= high)))
    share, error = float(np.mean(hits)), float(np.std(hits, ddof=1) / np.sqrt(problems))
    within = bool(abs(share - _LEVEL) <= 2 * error)
    return {"problems": problems, "level": _LEVEL, "share": share, "standard_error": error, "within_two_errors": within}


def growth(quick: bool) -> dict[str, Any]:
    """Exponents of a step's time in J and K, and the time of a step on a batch for small and large J."""
    from vbtta.infer.advi.continuous import MixtureDensity
    from vbtta.infer.advi.densities import UnconstrainedDensity

    def step(n_labels: int, n_views: int, batch: int | None = None) -> float:
        rng = np.random.default_rng(0)
        predictions, labels, _ = mixed(rng, np.full(n_views, 1 / n_views), n_labels)
        problem, first = mixture_problem(predictions, labels, GaussianMixture(), annotators=False)
        density = UnconstrainedDensity(MixtureDensity(problem, first, "normal"))
        vectors = density.start + 0.01 * rng.normal(size=(8, len(density.start)))
        units = None if batch is None else rng.integers(n_labels, size=batch)
        return fastest(lambda: density.value_and_gradient(vectors, units))

    scale = 2_000 if quick else 20_000
    sizes, views = [scale, 4 * scale, 16 * scale], [4, 16, 64]
    return {
        "exponent_in_J": float(np.polyfit(np.log(sizes), np.log([step(size, 8) for size in sizes]), 1)[0]),
        "exponent_in_K": float(np.polyfit(np.log(views), np.log([step(scale, count) for count in views]), 1)[0]),
        "batch_seconds": {str(size): step(size, 8, batch=1000) for size in sizes},
    }


def timing(quick: bool) -> dict[str, Any]:
    """The toy problem (J = 1,300, K = 6) by EM, ADVI and PyMC from fresh processes, and PyMC's weights beside ours."""
    with tempfile.TemporaryDirectory() as folder:
        toy_file, mixed_file = Path(folder, "toy.npz"), Path(folder, "mixed.npz")
        save(toy_file, *toy())
        predictions, labels, _ = mixed(np.random.default_rng(0), np.array([0.5, 0.3, 0.15, 0.05]), 500)
        save(mixed_file, predictions, labels)
        repeats = 1 if quick else 3
        em, _ = fresh([sys.executable, "-c", _FRESH, str(toy_file), "em"], repeats)
        model = GaussianMixture(concentration=1.0)
        em_fit = fastest(lambda: fit_policy(*toy(), task="regression", model=model, engine="em", guard=False))
        arguments = [str(toy_file), "advi", str(_STEPS), str(_PARTICLES)]
        advi, advi_fit = fresh([sys.executable, "-c", _FRESH, *arguments], repeats)
        found: dict[str, Any] = {
            "steps": _STEPS,
            "particles": _PARTICLES,
            "em_fresh_process": em,
            "em_fit": em_fit,
            "advi_fresh_process": advi,
            "advi_fit": advi_fit,
        }
        python = os.environ.get("VBTTA_PYMC_PYTHON", sys.executable)
        missing = subprocess.run([python, "-c", "import pymc"], capture_output=True, check=False).returncode != 0
        if missing:
            return {**found, "pymc": f"not installed in {Path(python).name}: set VBTTA_PYMC_PYTHON to one that has it"}
        script = str(Path(__file__).with_name("pymc_fit.py"))
        command = [python, "-W", "ignore", script, str(toy_file), str(_STEPS), str(_PARTICLES), "0"]
        subprocess.run(command, capture_output=True, check=True)  # fills the compile cache
        first_only = [python, "-W", "ignore", "-c", _PYMC_FIRST, script, *command[4:7]]
        pymc, _ = fresh(first_only, repeats)
        inside = json.loads(output(command))
        long_run = 1000 if quick else 10_000
        theirs = json.loads(output([*command[:4], str(mixed_file), "10", "1", str(long_run)]))["weights"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            ours = fit_policy(
                predictions,
                labels,
                task="regression",
                model=model,
                engine=ADVI(steps=1500, particles=4),
            ).weights
        return {
            **found,
            "pymc_fresh_process": pymc,
            "pymc_first_fit": inside["first"],
            "pymc_second_fit": inside["second"],
            "pymc_compiled_steps": inside["compiled_steps"],
            "pymc_version": inside["version"],
            "advi_over_pymc": {"ratio": advi / pymc, "limit": 1.0},
            "pymc_over_em": {"ratio": pymc / em, "least": 5.0},
            "pymc_second_over_em_fit": {"ratio": inside["second"] / em_fit, "least": 30.0},
            "weights": {
                "ours": ours.tolist(),
                "pymc": theirs,
                "largest_difference": float(np.abs(ours - theirs).max()),
                "limit": 0.05,
            },
        }


_PYMC_FIRST = """
import sys, time
import numpy as np
import pymc as pm
_, problem, steps, particles = sys.argv[1:5]
data = np.load(problem)
f, y, beta, nu, scale = (data[name] for name in ("f", "y", "beta", "nu", "inverse_scale"))
K = f.shape[1]
start = time.perf_counter()
with pm.Model():
    w = pm.Dirichlet("weights", np.ones(K))
    slope = pm.Normal("slope", 0, beta**-0.5, shape=K)
    offset = pm.Normal("offset", 0, beta**-0.5, shape=K)
    precision = pm.Gamma("precision", nu / 2, scale / 2, shape=K)
    pm.NormalMixture("y", w=w, mu=f * (1 + slope) + offset, sigma=precision**-0.5, observed=y)
    pm.fit(int(steps), method="fullrank_advi", progressbar=False, obj_n_mc=int(particles), random_seed=0)
print(time.perf_counter() - start)
"""


def fresh(command: list[str], repeats: int) -> tuple[float, float]:
    """Fastest wall time of a process, and of the work it reports, in seconds."""
    whole, inner = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        inner.append(float(output(command).split()[-1]))
        whole.append(time.perf_counter() - start)
    return min(whole), min(inner)


def output(command: list[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {found.stderr[-2000:]}")
    return found.stdout.strip().splitlines()[-1]


def save(path: Path, predictions: ViewPredictions, labels: LabelSets) -> None:
    """The problem for both sides: raw for ours, in standard units and with the same priors for PyMC."""
    problem, _ = mixture_problem(predictions, labels, GaussianMixture(), annotators=False)
    prior, standard = problem.prior, problem.data.standard
    np.savez(
        path,
        predictions=predictions.mean,
        instance=labels.instance,
        value=labels.value,
        f=standard.apply(predictions.mean)[labels.instance, :, 0],
        y=standard.apply(labels.continuous(1))[:, 0],
        beta=prior.beta,
        nu=prior.nu,
        inverse_scale=prior.inverse_scale[0, 0],
    )


def mixed(
    rng: np.random.Generator, weights: np.ndarray[Any, Any], n_labels: int
) -> tuple[ViewPredictions, LabelSets, np.ndarray[Any, Any]]:
    """Labels that follow one of several views each, rescaled, shifted and with noise."""
    K = len(weights)
    f = rng.normal(size=(n_labels, 1)) + 0.7 * rng.normal(size=(n_labels, K))
    view = rng.choice(K, size=n_labels, p=weights)
    y = 1.2 * f[np.arange(n_labels), view] + 0.3 + 0.2 * rng.normal(size=n_labels)
    return ViewPredictions(f[:, :, None]), LabelSets.from_array(y), weights
