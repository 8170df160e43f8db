"""Held-out scores: what decides between models, and whether the views help at all."""

__all__ = ["CrossValidated", "cross_validate", "cross_validated_scores", "folds_of", "sampled", "split"]

import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vbtta.engines import fit_model
from vbtta.labels import Array, LabelSets
from vbtta.policy import ConvergenceWarning
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, EngineSpec, ModelSpec

_FOLDS = 5
_MOST_INSTANCES = 20_000  # a choice needs no more than that


class CrossValidated(NamedTuple):
    """What the fits to the folds came to."""

    scores: Array  # (N+,): of every held-out instance, in the order of the folds
    weights: Array  # (K,): average over the folds


def folds_of(labels: LabelSets, seed: int) -> list[tuple[Array, Array]]:
    """Training and held-out rows: five folds of the labelled instances, of 20,000 of them at most."""
    rows = labels.labelled
    return split(rows[sampled(len(rows), seed)])


def sampled(n_instances: int, seed: int) -> Array:
    """Places of 20,000 instances at most, in random order; it takes memory for those alone."""
    rng = np.random.default_rng(seed)
    if n_instances <= _MOST_INSTANCES:
        return rng.permutation(n_instances)
    return rng.choice(n_instances, _MOST_INSTANCES, replace=False)


def split(rows: Array) -> list[tuple[Array, Array]]:
    """Training and held-out rows, of five folds at most."""
    parts = np.array_split(rows, min(_FOLDS, len(rows)))
    return [
        (np.sort(np.concatenate([*parts[:held], *parts[held + 1 :]])), np.sort(part)) for held, part in enumerate(parts)
    ]


def cross_validate(
    predictions: ViewPredictions,
    labels: LabelSets,
    model: ModelSpec,
    engine: EngineSpec,
    *,
    task: str,
    seed: int,
    folds: list[tuple[Array, Array]] | None = None,
) -> CrossValidated:
    """Fit to all folds but one, score the one, in turn; the seed decides the folds unless they are given."""
    quick = replace(engine, keep_states=False)
    if isinstance(quick, EM):
        quick = replace(quick, tol=max(quick.tol, 1e-6), max_steps=min(quick.max_steps, 300))
    scores, weights = [], []
    for train, held in folds_of(labels, seed) if folds is None else folds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a near-optimum scores as well
            policy = fit_model(
                predictions.take(train), labels.take(train), model, quick, task=task, intervals=False, seed=seed
            )
        scores.append(policy.score(predictions.take(held), labels.take(held)))
        weights.append(policy.weights)
    return CrossValidated(np.concatenate(scores), np.mean(weights, axis=0))


def cross_validated_scores(
    predictions: ViewPredictions, labels: LabelSets, model: ModelSpec, engine: EngineSpec, *, task: str, seed: int
) -> Array:
    """Log score of every held-out instance's label set, noise model included, in the order of the folds."""
    return cross_validate(predictions, labels, model, engine, task=task, seed=seed).scores
