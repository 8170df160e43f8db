"""The continuous mixture in PyMC, as a process of its own: python benchmarks/pymc_fit.py problem.npz steps particles.

Needs PyMC 5 and nothing of vbtta. Prints one line of JSON: times of the first and the second fit, of compiled steps
alone, and the weights of a long run.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any


def main(path: str, steps: int, particles: int, long_run: int) -> dict[str, Any]:
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
    with model:
        begin = time.perf_counter()
        pm.fit(steps, random_seed=0, **options)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        pm.fit(steps, random_seed=1, **options)
        second = time.perf_counter() - begin
        inference = pm.FullRankADVI(model=model, random_seed=2)
        inference.fit(1, progressbar=False, obj_n_mc=particles)
        begin = time.perf_counter()
        inference.refine(steps, progressbar=False)
        alone = time.perf_counter() - begin
        found: dict[str, Any] = {"first": first, "second": second, "compiled_steps": alone, "version": pm.__version__}
        if long_run:
            optimizer = pm.adam(learning_rate=0.01)
            trace = pm.fit(long_run, random_seed=0, obj_optimizer=optimizer, **options).sample(2000, random_seed=0)
            found["weights"] = trace.posterior["weights"].mean(("chain", "draw")).values.tolist()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
