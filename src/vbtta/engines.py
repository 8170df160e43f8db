"""One model and one engine on one data set: a policy."""

__all__ = ["fit_model", "fit_posed", "fit_without_labels", "resolve", "settle"]

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.accelerate import ascend
from vbtta.infer.categorical_latent import categorical_latent_problem
from vbtta.infer.categorical_mixture import categorical_problem
from vbtta.infer.latent_fit import latent_problem
from vbtta.infer.mixture import mixture_problem
from vbtta.labels import LabelSets
from vbtta.policy import ConvergenceWarning, History, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import (
    ADVI,
    EM,
    CategoricalLatent,
    CategoricalMixture,
    EngineSpec,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
    OrdinalMixture,
    PyroModel,
    RankingMixture,
)

_MOST_FRACTIONS = 20  # levels that are no whole numbers, unless they are stated


def resolve(model: ModelSpec, labels: LabelSets) -> ModelSpec:
    """The model with its noise decided, where it was left open.

    Annotator noise and view noise can be told apart only where instances carry several labels: without them a noise
    model would invent what it explains.
    """
    if isinstance(model, GaussianMixture | GaussianLatent):
        if model.noise == "annotator" and not labels.overlap:
            warnings.warn(
                "noise='annotator' was asked for but hardly any instance has two labels: annotator noise and view "
                "noise cannot be told apart, and the split follows the prior",
                stacklevel=3,
            )
        if model.noise is None:
            if isinstance(model, GaussianMixture) and model.component != "normal":
                return replace(model, noise="none")  # heavy tails and a shared truth have no closed form
            return replace(model, noise="annotator" if labels.overlap and len(labels.annotator_names) > 1 else "none")
        return model
    if isinstance(model, OrdinalMixture):
        return model if model.levels is not None else replace(model, levels=_levels(labels))
    if isinstance(model, RankingMixture | PyroModel):
        return model
    return model if model.noise is not None else replace(model, noise=label_noise.default_noise(labels))


def settle(predictions: ViewPredictions, labels: LabelSets, model: ModelSpec) -> ModelSpec:
    """The resolved model with its shrinkage decided by aligned data, where it was left open."""
    if not isinstance(model, GaussianLatent | CategoricalLatent) or model.shrinkage is not None:
        return model
    return replace(model, shrinkage=_problem(predictions, labels, model)[0].shrinkage)


def fit_model(
    predictions: ViewPredictions,
    labels: LabelSets,
    model: ModelSpec,
    engine: EngineSpec,
    *,
    task: str,
    seed: int = 0,
    progress: bool = False,
    intervals: bool = True,
) -> Policy:
    """Fit one resolved model to aligned data; the seed matters to ADVI alone.

    Without ``intervals`` the policy predicts but knows no intervals for its weights, which is all that a
    held-out score needs.
    """
    if isinstance(engine, ADVI):
        from vbtta.infer.advi.engine import fit_advi

        found = fit_advi(predictions, labels, model, engine, seed=seed, progress=progress)
        return _advi_policy(found, predictions, model, engine, task, labels.annotator_names)
    problem, first = _problem(predictions, labels, model)
    return fit_posed(problem, first, model, engine, predictions, labels.annotator_names, task=task, intervals=intervals)


def fit_posed(
    problem: Any,
    first: Any,
    model: ModelSpec,
    engine: EM,
    predictions: ViewPredictions,
    annotator_names: tuple[str, ...],
    *,
    task: str,
    intervals: bool = True,
) -> Policy:
    """Climb from the first state of a problem; of the predictions only what they say of themselves is asked."""
    ascent = ascend(problem, first, engine)
    if not ascent.converged:
        warnings.warn(
            f"{type(model).__name__} did not converge in {engine.max_steps} steps; raise EM(max_steps=...) or tol",
            ConvergenceWarning,
            stacklevel=4,
        )
    return Policy(
        task=task,
        names=predictions.names,
        generated_names=predictions.generated_names,
        model=model,
        engine=engine,
        posterior=problem.finish(ascent, intervals=intervals),
        history=History(np.array(ascent.bounds) + problem.unit_change, np.array(ascent.weights)),
        elbo=ascent.bounds[-1] + problem.unit_change,
        elbo_terms=problem.bound_terms(ascent.state, ascent.statistics),
        converged=ascent.converged,
        n_outputs=predictions.mean.shape[2],
        classes=predictions.classes,
        fingerprints=predictions.fingerprints,
        annotator_names=annotator_names,
        steps=tuple(problem.posterior(state) for state in ascent.states),
    )


def fit_without_labels(
    predictions: ViewPredictions, model: CategoricalMixture, engine: ADVI, *, seed: int = 0, progress: bool = False
) -> Policy:
    """Weights of a classifier's views from their agreement and confidence alone."""
    from vbtta.infer.advi.engine import fit_unsupervised

    plain = replace(model, noise="none", calibrate=False, weights="view", link="softmax")
    found = fit_unsupervised(predictions, plain, engine, seed=seed, progress=progress)
    return replace(_advi_policy(found, predictions, plain, engine, "classification", ()), unsupervised=True)


def _advi_policy(
    found: Any, predictions: ViewPredictions, model: ModelSpec, engine: ADVI, task: str, people: tuple[str, ...]
) -> Policy:
    if not found.converged:
        warnings.warn(
            f"{type(model).__name__}: the bound still moved at the end of {engine.steps} steps of ADVI; raise "
            "ADVI(steps=...) or learning_rate",
            ConvergenceWarning,
            stacklevel=4,
        )
    return Policy(
        task=task,
        names=predictions.names,
        generated_names=predictions.generated_names,
        model=model,
        engine=engine,
        posterior=found.posterior,
        history=History(found.bounds, found.weights),
        elbo=found.bound,
        elbo_terms=found.terms,
        converged=found.converged,
        n_outputs=predictions.mean.shape[2],
        classes=predictions.classes,
        fingerprints=predictions.fingerprints,
        annotator_names=people,
        steps=found.steps,
    )


def _levels(labels: LabelSets) -> tuple[Any, ...]:
    """The numbers that occur, in ascending order."""
    if labels.value.dtype.kind not in "iufb" or labels.by_position:
        raise ValueError(
            f"labels such as {str(labels.value.flat[0])!r} have no order of their own; state it with "
            "OrdinalMixture(levels=[...]), the lowest first"
        )
    levels = tuple(np.unique(labels.value).tolist())
    if len(levels) < 2:
        raise ValueError(f"labels have one level only, {levels[0]!r}; state all with OrdinalMixture(levels=[...])")
    if len(levels) > _MOST_FRACTIONS and any(level != int(level) for level in levels):
        raise ValueError(
            f"labels have {len(levels)} different values with fractions, such as {levels[0]!r}, and are no levels; use "
            "task='regression', or state the levels with OrdinalMixture(levels=[...])"
        )
    return levels


def _problem(predictions: ViewPredictions, labels: LabelSets, model: ModelSpec) -> tuple[Any, Any]:
    if isinstance(model, GaussianMixture):
        if model.component != "normal":
            raise ValueError(f"component={model.component!r} has no closed form; use engine='advi'")
        return mixture_problem(predictions, labels, model, annotators=model.noise == "annotator")
    if isinstance(model, GaussianLatent):
        return latent_problem(predictions, labels, model, annotators=model.noise == "annotator")
    if not isinstance(model, CategoricalMixture | CategoricalLatent):
        raise ValueError(f"{type(model).__name__} has no closed form; use engine='advi'")
    noise = model.noise or label_noise.default_noise(labels)
    if isinstance(model, CategoricalMixture):
        return categorical_problem(predictions, labels, model, noise=noise)
    return categorical_latent_problem(predictions, labels, model, noise=noise)
