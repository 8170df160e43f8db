"""The continuous mixture in PyMC: python benchmarks/pymc_fit.py problem.npz steps particles repeats long_run.

A process of its own, which needs PyMC 5 and nothing of vbtta. Prints one line of JSON: seconds of the first fit and,
with `repeats`, of further fits in the same process and of compiled steps alone; with `long_run` steps, the weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


def main(path: str, steps: int, particles: int, repeats: int, long_run: int) -> dict[str, Any]:
    import numpy as np

    pm: Any = import_module("pymc")

    with np.load(path) as data:
        f, y = data["f"], data["y"]  # (J, K), (J,), in standard units
        beta, nu, inverse_scale = (float(data[name]) for name in ("beta", "nu", "inverse_scale"))
    K = f.shape[1]
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(K))
        slope = pm.Normal("slope", 0, beta**-0.5, shape=K)
        offset = pm.Normal("offset", 0, beta**-0.5, shape=K)
        precision = pm.Gamma("precision", nu / 2, inverse_scale / 2, shape=K)
        pm.NormalMixture("y", w=weights, mu=f * (1 + slope) + offset, sigma=precision**-0.5, observed=y)
    options: dict[str, Any] = {"method": "fullrank_advi", "progressbar": False, "obj_n_mc": particles}
    results: dict[str, Any] = {"version": pm.__version__}
    with model:
        results["first"] = seconds(lambda: pm.fit(steps, random_seed=0, **options))
        results["further"] = [seconds(lambda: pm.fit(steps, random_seed=1, **options)) for _ in range(repeats)]
        if repeats:
            inference = pm.FullRankADVI(model=model, random_seed=2)
            inference.fit(1, progressbar=False, obj_n_mc=particles)
            results["compiled_steps"] = [
                seconds(lambda: inference.refine(steps, progressbar=False)) for _ in range(repeats)
            ]
        if long_run:
            optimizer = pm.adam(learning_rate=0.01)
            trace = pm.fit(long_run, random_seed=0, obj_optimizer=optimizer, **options).sample(4000, random_seed=0)
            results["weights"] = trace.posterior["weights"].mean(("chain", "draw")).values.tolist()
    return results


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))))
