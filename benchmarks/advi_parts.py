"""ADVI's own ascent against Pyro's automatic guide: processor time to equal accuracy of the weights.

Both fit the same densities with the same particles, Adam and cosine, with several numbers of steps; errors are those
against a long fit. Pyro's gradients keep the score of Q, whose noise does not vanish at the posterior.
"""

from __future__ import annotations

import math
import time
from typing import Any
from unittest import mock

import numpy as np
import pyro
import torch
from pyro import infer as untyped_infer

from benchmarks.advi_speed import mixed
from benchmarks.em import classes
from vbtta import ADVI, CategoricalMixture, GaussianMixture
from vbtta.inference import advi
from vbtta.inference.advi import constrain
from vbtta.inference.em import Fit
from vbtta.models.base import InMemory, pose_density

infer: Any = untyped_infer


def run(quick: bool = False) -> dict[str, Any]:
    """Both ascents on small and medium problems of numbers and classes, on one thread."""
    outcome: dict[str, Any] = {"versions": {"torch": torch.__version__, "pyro": pyro.__version__}, "least_ratio": 1.5}
    torch.set_num_threads(1)
    for size, n, K, rounds in (("small", 250, 3, 3), ("medium", 4000, 8, 2)):
        numbers = mixed(np.random.default_rng(0), np.full(K, 1 / K), n)[:2]
        problems = {
            "numbers": (*numbers, GaussianMixture(concentration=1.0)),
            "classes": (*classes(0, n // 2, K), CategoricalMixture(concentration=1.0, noise="none")),
        }
        for name, problem in problems.items():
            steps = (10, 20) if quick else (150, 600, 2400)
            outcome[f"{name}_{size}"] = compare(*problem, steps, 1 if quick else rounds)
    return outcome


def compare(predictions: Any, labels: Any, model: Any, steps: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Seconds and mean errors of the weights by steps, and the ratio of the times to the autoguide's last error."""

    def fit_with(n_steps: int, seed: int) -> Fit[Any]:
        engine = ADVI(steps=n_steps, learning_rate=0.05)
        source = InMemory(predictions, labels)
        return advi.fit_density(
            lambda: pose_density(model, source, seed), engine, seed=seed, n_labels=labels.total, progress=False
        )

    reference = fit_with(2 * steps[-1], 99).posterior.weights
    outcome: dict[str, Any] = {"steps": steps}
    for name, ascend in (("own", advi.ascend_draws), ("autoguide", autoguide_ascend)):
        times, errors = np.empty((2, len(steps), rounds))
        with mock.patch("vbtta.inference.advi.ascend_draws", ascend):
            for i, seed in np.ndindex(times.shape):
                start = time.process_time()
                weights = fit_with(steps[i], seed).posterior.weights
                times[i, seed] = time.process_time() - start
                errors[i, seed] = abs(weights - reference).max()
        outcome[name] = {"seconds": times.min(axis=1).tolist(), "weight_error": errors.mean(axis=1).tolist()}
    own, other = outcome["own"], outcome["autoguide"]
    # the first error of ours that is not larger, or on the line between the two around it (logarithms of both)
    falling = np.minimum.accumulate(own["weight_error"])[::-1]
    needed = math.exp(np.interp(math.log(other["weight_error"][-1]), np.log(falling), np.log(own["seconds"][::-1])))
    return {**outcome, "ratio": other["seconds"][-1] / needed}


def autoguide_ascend(density: Any, engine: ADVI, seed: int, n_labels: float, *, progress: bool) -> advi.AdviAscent:
    """The ascent by Pyro: AutoMultivariateNormal, Trace_ELBO with all particles at once, the same Adam and cosine."""
    likelihood, first_site = density.density.log_likelihood, density.sites[0]

    def model() -> None:
        values = density.density.prior(pyro.sample)
        if values[first_site.name].ndim == len(first_site.shape):  # a trace without particles
            values = {name: value[None] for name, value in values.items()}
        pyro.factor("labels", likelihood(values, slice(None)).squeeze())

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        first = {name: torch.tensor(value[0]) for name, value in constrain(density.sites, density.start[None]).items()}
        scale = min(0.1, 1 / math.sqrt(n_labels))
        guide: Any = infer.autoguide.AutoMultivariateNormal(
            model, init_loc_fn=infer.autoguide.init_to_value(values=first), init_scale=scale
        )
        settings: dict[str, Any] = {
            "optimizer": torch.optim.Adam,
            "optim_args": {"lr": engine.learning_rate, "betas": (0.9, 0.99)},
            "lr_lambda": lambda step: advi._step_length((step + 0.5) / engine.steps),
        }
        scheduler = pyro.optim.PyroLRScheduler(torch.optim.lr_scheduler.LambdaLR, settings)
        loss = infer.Trace_ELBO(num_particles=engine.particles, vectorize_particles=True, max_plate_nesting=0)
        svi: Any = infer.SVI(model, guide, scheduler, loss)
        bounds, means = [], []
        with pyro.validation_enabled(False):
            guide()
            for _ in range(engine.steps):
                means.append(guide.loc.detach().numpy().copy())
                bounds.append(-svi.step())
                scheduler.step()
        factor = (guide.scale[..., None] * guide.scale_tril).detach().numpy()
        return advi.AdviAscent(guide.loc.detach().numpy(), factor, np.array(bounds), np.array(means), [], True)
    finally:
        torch.set_default_dtype(default)
