"""Held-out log scores by K-fold cross-validation, with groups of rows kept together."""

__all__ = ["MIN_UNITS", "CrossValidated", "compare_scores", "cross_validate", "n_units", "sampled", "split"]

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.policy import ConvergenceWarning, Policy

_FOLDS = 5
MIN_UNITS = 5  # labelled instances, or groups of them, below which nothing is held out
_MAX_INSTANCES = 20_000  # enough to choose between models

Folds = list[tuple[Array, Array]]  # training and held-out rows


class CrossValidated(NamedTuple):
    """Outcome of the fits to all folds."""

    scores: Array  # (n,): of every held-out instance, in the order of the folds
    units: Array | None  # (n,): the group of each, where there are groups
    weights: Array  # (K,): average over the folds


def cross_validate(
    fit: Callable[[ViewPredictions, LabelSets], Policy],
    predictions: ViewPredictions,
    labels: LabelSets,
    *,
    seed: int,
    folds: Folds | None = None,
) -> CrossValidated:
    """Fit to all folds but one and score that one, in turn: log scores of label sets, noise model included.

    The seed decides the folds of the labelled instances, of 20,000 of them at most, unless folds are given.
    """
    if folds is None:
        rows = labels.labelled
        folds = split(rows[sampled(len(rows), seed)], predictions.groups)
    scores, weights = [], []
    for train, held in folds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a near-optimum scores as well
            policy = fit(predictions.take(train), labels.take(train))
        scores.append(policy.score(predictions.take(held), labels.take(held)))
        weights.append(policy.weights)
    held_out = np.concatenate([held for _, held in folds])
    units = None if predictions.groups is None else predictions.groups[held_out]
    return CrossValidated(np.concatenate(scores), units, np.mean(weights, axis=0))


def compare_scores(one: CrossValidated, other: CrossValidated) -> tuple[float, float]:
    """Difference of two total scores, one minus the other, and its standard error; groups count as one draw each."""
    difference = one.scores - other.scores
    if one.units is not None:
        difference = np.bincount(np.unique(one.units, return_inverse=True)[1], difference)
    return float(difference.sum()), float(np.sqrt(len(difference)) * difference.std(ddof=1))


def n_units(labels: LabelSets, groups: Array | None) -> int:
    """Number of labelled instances, or of their groups: what can be held out."""
    return len(labels.labelled) if groups is None else len(np.unique(groups[labels.labelled]))


def sampled(n_instances: int, seed: int) -> Array:
    """Positions of 20,000 instances at most, in random order; it takes memory for those alone."""
    rng = np.random.default_rng(seed)
    if n_instances <= _MAX_INSTANCES:
        return rng.permutation(n_instances)
    return rng.choice(n_instances, _MAX_INSTANCES, replace=False)


def split(rows: Array, groups: Array | None = None) -> Folds:
    """Training and held-out rows of five folds at most, in the order of the rows; groups (N,) stay together.

    Groups are dealt out in the order in which they first occur, each to the fold that has fewest rows so far.
    """
    if groups is None:
        parts = np.array_split(rows, min(_FOLDS, len(rows)))
    else:
        _, first, group = np.unique(groups[rows], return_index=True, return_inverse=True)
        sizes = np.bincount(group)
        fold_of, filled = np.zeros(len(first), dtype=np.intp), np.zeros(min(_FOLDS, len(first)))
        for place in np.argsort(first):
            fold_of[place] = np.argmin(filled)
            filled[fold_of[place]] += sizes[place]
        parts = [rows[fold_of[group] == fold] for fold in range(len(filled))]
    return [
        (np.sort(np.concatenate([*parts[:held], *parts[held + 1 :]])), np.sort(part)) for held, part in enumerate(parts)
    ]
