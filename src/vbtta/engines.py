"""One model and one engine on one data set: a policy."""

__all__ = ["fit_model", "resolve"]

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from vbtta.infer.accelerate import ascend
from vbtta.infer.latent_fit import latent_problem
from vbtta.infer.mixture import mixture_problem
from vbtta.labels import LabelSets
from vbtta.policy import ConvergenceWarning, History, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, GaussianLatent, GaussianMixture, ModelSpec


def resolve(model: ModelSpec, labels: LabelSets) -> ModelSpec:
    """The model with its noise decided, where it was left open.

    Annotator noise and view noise can be told apart only where instances carry several labels.
    """
    if isinstance(model, GaussianMixture | GaussianLatent):
        overlap = _overlaps(labels)
        if model.noise == "annotator" and not overlap:
            warnings.warn(
                "noise='annotator' was asked for but hardly any instance has two labels: annotator noise and view "
                "noise cannot be told apart, and the split follows the prior",
                stacklevel=3,
            )
        if model.noise is None:
            return replace(model, noise="annotator" if overlap and len(labels.annotator_names) > 1 else "none")
    return model


def fit_model(predictions: ViewPredictions, labels: LabelSets, model: ModelSpec, engine: EM, *, task: str) -> Policy:
    """Fit one resolved model to aligned data."""
    problem, first = _problem(predictions, labels, model)
    ascent = ascend(problem, first, engine)
    if not ascent.converged:
        warnings.warn(
            f"{type(model).__name__} did not converge in {engine.max_steps} steps; raise EM(max_steps=...) or tol",
            ConvergenceWarning,
            stacklevel=3,
        )
    return Policy(
        task=task,
        names=predictions.names,
        generated_names=predictions.generated_names,
        model=model,
        engine=engine,
        posterior=problem.finish(ascent),
        history=History(np.array(ascent.bounds) + problem.unit_change, np.array(ascent.weights)),
        elbo=ascent.bounds[-1] + problem.unit_change,
        elbo_terms=problem.bound_terms(ascent.state, ascent.statistics),
        converged=ascent.converged,
        n_outputs=predictions.mean.shape[2],
        classes=predictions.classes,
        fingerprints=predictions.fingerprints,
        annotator_names=labels.annotator_names,
        steps=tuple(problem.posterior(state) for state in ascent.states),
    )


def _problem(predictions: ViewPredictions, labels: LabelSets, model: ModelSpec) -> tuple[Any, Any]:
    if isinstance(model, GaussianMixture):
        if model.component != "normal":
            raise ValueError(f"component={model.component!r} has no closed form; use engine='advi'")
        return mixture_problem(predictions, labels, model, annotators=model.noise == "annotator")
    if isinstance(model, GaussianLatent):
        return latent_problem(predictions, labels, model, annotators=model.noise == "annotator")
    raise ValueError(f"no engine for {type(model).__name__}")


def _overlaps(labels: LabelSets) -> bool:
    """Whether at least 20 instances, or a tenth of the labelled ones, carry two labels or more."""
    size = labels.labels_per_instance
    return bool((size >= 2).sum() >= max(1, min(20, 0.1 * (size > 0).sum())))
