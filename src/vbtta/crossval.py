"""Held-out log scores by K-fold cross-validation, with groups of rows kept together."""

__all__ = [
    "MIN_UNITS",
    "CrossValidated",
    "Folds",
    "Stacking",
    "check_units",
    "compare_scores",
    "cross_validate",
    "folds_of",
    "n_units",
    "prior_counts",
    "sampled",
    "score_folds",
    "split",
    "stack_scores",
    "stacking_weights",
]

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.policy import ConvergenceWarning, Policy

_FOLDS = 5
MIN_UNITS = 5  # labelled instances, or groups of them, below which nothing is held out
_MAX_INSTANCES = 20_000  # enough to choose between models
_MIN_SAMPLE, _MAX_ENTRIES = 2_000, 10_000_000  # instances where outputs are many, and outputs of all views of them

Folds = list[tuple[Array, Array]]  # training and held-out rows


class CrossValidated(NamedTuple):
    """Outcome of the fits to all folds."""

    scores: Array  # (n,): of every held-out instance, in the order of the folds; weighted where instances are
    units: Array | None  # (n,): the group of each, where there are groups
    fold: Array  # (n,): the fold of each
    importance: Array  # (n,): the weights of the instances, ones where there are none


class Stacking(NamedTuple):
    """Weights of stacked predictions."""

    weights: Array  # (M,), on the simplex
    covariance: Array  # (M, M) of the weights, from the curvature


def cross_validate(
    fit: Callable[[ViewPredictions, LabelSets], Policy],
    predictions: ViewPredictions,
    labels: LabelSets,
    folds: Folds,
) -> CrossValidated:
    """Fit to all folds but one and score that one, in turn: log scores of label sets, noise model included."""
    policies = []
    for train, _ in folds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a near-optimum scores as well
            policies.append(fit(predictions.take(train), labels.take(train)))
    return score_folds(policies, predictions, labels, folds)


def score_folds(
    policies: list[Policy], predictions: ViewPredictions, labels: LabelSets, folds: Folds
) -> CrossValidated:
    """Held-out scores of policies fitted to the training rows of the folds, one each."""
    held = [held for _, held in folds]
    scores = [
        policy.score(predictions.take(rows), labels.take(rows)) for policy, rows in zip(policies, held, strict=True)
    ]
    held_out = np.concatenate(held)
    units = None if predictions.groups is None else predictions.groups[held_out]
    fold = np.repeat(np.arange(len(folds)), [len(rows) for rows in held])
    importance = np.ones(len(held_out)) if labels.instance_weights is None else labels.instance_weights[held_out]
    return CrossValidated(np.concatenate(scores), units, fold, importance)


def compare_scores(one: CrossValidated, other: CrossValidated) -> tuple[float, float]:
    """Mean difference of two scores per instance, one minus the other, and its standard error.

    Groups count as one draw each.
    """
    difference = one.scores - other.scores
    n_instances = len(difference)
    if one.units is not None:
        difference = np.bincount(np.unique(one.units, return_inverse=True)[1], difference)
    error = np.sqrt(len(difference)) * difference.std(ddof=1)
    return float(difference.sum() / n_instances), float(error / n_instances)


def stack_scores(members: list[CrossValidated], prior_count: Array) -> tuple[Stacking, CrossValidated]:
    """Stacking weights from held-out scores, and the stack's own held-out scores; prior counts are (M,).

    An instance is scored with the weights that the other folds give, so that the score is honest.
    """
    first = members[0]
    scores = np.stack([member.scores for member in members], axis=1) / first.importance[:, None]  # (n, M)
    sizes = first.importance
    if first.units is not None:
        sizes = sizes * _independent_share(scores, first.units)
    held_out = np.empty(len(scores))
    for fold in np.unique(first.fold):
        inside = first.fold == fold
        weights = stacking_weights(scores[~inside], sizes[~inside], prior_count).weights
        held_out[inside] = special.logsumexp(scores[inside] + np.log(weights), axis=1)
    return stacking_weights(scores, sizes, prior_count), first._replace(scores=held_out * first.importance)


def prior_counts(n_views: int, raw: bool, count: float) -> Array:
    """Prior counts (M,) of members with views and, the last, of the raw network: as much as all the others together."""
    return np.array([count] * n_views + [count * n_views] * raw)


def _independent_share(scores: Array, units: Array) -> float:
    """How many independent rows a row of a group counts as: the inverse of Kish's design effect.

    It is the variance of a sum of rows over that of a sum of groups, for the members' scores (n, M) relative to each
    other: 1 where rows of a group are independent, the number of groups over that of rows where they are copies.
    """
    groups, place = np.unique(units, return_inverse=True)
    relative = scores - scores.mean(axis=1, keepdims=True)
    relative -= relative.mean(axis=0)
    sums = np.stack([np.bincount(place, column) for column in relative.T])  # (M, groups)
    clustered = float((sums**2).sum()) * len(groups) / max(len(groups) - 1, 1)
    least = len(groups) / len(units)
    return float(np.clip((relative**2).sum() / clustered, least, 1.0)) if clustered > 0 else least


def stacking_weights(scores: Array, sizes: Array, prior_count: float | Array) -> Stacking:
    """The mode of the weights w of M predictive distributions, by Newton's method on the simplex.

        sum_i s_i ln sum_m w_m exp(l_im) + sum_m c_m ln w_m

    l_im are log scores (n, M), s_i sizes (n,) and c_m the prior's counts. The objective is concave and self-concordant.
    """
    n_members = scores.shape[1]
    relative = np.exp(scores - scores.max(axis=1, keepdims=True))  # (n, M)
    weights = np.full(n_members, 1 / n_members)
    to_zero_sum = np.eye(n_members)[:, 1:] - np.eye(n_members)[:, :1]  # (M, M - 1): directions that keep the sum

    def objective(weights: Array) -> float:
        return float(sizes @ np.log(relative @ weights) + (prior_count * np.log(weights)).sum())

    for _ in range(100):
        ratio = relative / (relative @ weights)[:, None]
        gradient = to_zero_sum.T @ (ratio.T @ sizes + prior_count / weights)
        curvature = (ratio * sizes[:, None]).T @ ratio + np.diag(prior_count / weights**2)
        covariance = to_zero_sum @ np.linalg.solve(to_zero_sum.T @ curvature @ to_zero_sum, to_zero_sum.T)
        step = covariance @ (ratio.T @ sizes + prior_count / weights)
        decrement = float(gradient @ step[1:])
        if decrement < 1e-10:
            break
        fraction, before = min(1.0, 0.9 / max(float((-step / weights).max()), 1e-300)), objective(weights)
        while objective(weights + fraction * step) < before:
            fraction /= 2
        weights = weights + fraction * step
    return Stacking(weights / weights.sum(), covariance)


def check_units(labels: LabelSets, groups: Array | None, purpose: str, remedy: str) -> None:
    """Refuse samples of which nothing can be held out."""
    if n_units(labels, groups) < MIN_UNITS:
        raise ValueError(
            f"{purpose} by held-out scores, which need at least {MIN_UNITS} labelled inputs or groups of them; got "
            f"{n_units(labels, groups)}. Use {remedy}"
        )


def n_units(labels: LabelSets, groups: Array | None) -> int:
    """Number of labelled instances, or of their groups: what can be held out."""
    return len(labels.labelled) if groups is None else len(np.unique(groups[labels.labelled]))


def sampled(n_instances: int, seed: int, n_entries: int) -> Array:
    """Positions of 20,000 instances at most, or 2,000 where they have many outputs and views, in random order."""
    rng = np.random.default_rng(seed)
    size = min(_MAX_INSTANCES, max(_MIN_SAMPLE, _MAX_ENTRIES // n_entries))
    return rng.permutation(n_instances) if n_instances <= size else rng.choice(n_instances, size, replace=False)


def folds_of(predictions: ViewPredictions, labels: LabelSets, seed: int) -> Folds:
    """Folds of the labelled instances, by a seed: of 20,000 of them at most, or 2,000 where outputs are many."""
    rows = labels.labelled
    return split(rows[sampled(len(rows), seed, predictions.outputs[0].size)], predictions.groups)


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
