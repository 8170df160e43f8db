"""Held-out log scores by K-fold cross-validation, with groups of rows kept together."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta._support.tensors import Progress
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.models.base import InMemory, Model, Posterior
from vbtta.models.parts.annotators import LabelFacts
from vbtta.policy import ConvergenceWarning, Policy

_FOLDS, _FEW_FOLDS, MANY_UNITS = 5, 3, 500  # folds below, and from, MANY_UNITS instances or groups
MIN_UNITS = 5  # labelled instances, or groups of them, below which nothing is held out
_EVEN_ODDS, _NOISY_EVEN_ODDS = 20.0, 80.0  # instances at even prior odds that views help
_TEMPERATURE = 5.0  # divides the held-out gain, in nats, in the log odds that views help
_LARGEST_DIFFERENCE = 1e6  # nats between two scores of an instance: squares must not overflow
MAX_INSTANCES = 20_000  # of the cross-validated sample: enough to choose between models
_LARGE = 1_000_000  # entries of the outputs above which block layouts are not cached
_MIN_SAMPLE, _MAX_ENTRIES = 2_000, 10_000_000  # least sample size; entries of outputs in a larger sample

Folds = list[tuple[Array, Array]]  # training and held-out rows


class CrossValidated(NamedTuple):
    """Outcome of the fits to all folds."""

    scores: Array  # (n,): log scores of the held-out instances times their weights, in the order of the folds
    units: Array | None  # (n,): the group of each, where there are groups
    fold: Array  # (n,): the fold of each
    importance: Array  # (n,): the weights of the instances, ones where there are none
    posterior: Posterior | None = None  # of the fit to all folds but the last


def cross_validate(
    fits: Sequence[Callable[..., Policy]], sample: InMemory, folds: Folds, *, progress: bool = False
) -> list[CrossValidated]:
    """K-fold held-out log scores of label sets, noise model included, for every fit.

    A fit is called with the training data and the policies that the earlier fits have for them.
    """
    by_fold: list[list[Policy]] = []
    bar = Progress("held-out fits", len(folds) * len(fits), True) if progress else None
    with bar or nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # scores near the optimum hardly differ
        if sample.predictions.outputs.size > _LARGE:
            sample.forget_layouts()
        for train, _ in folds:
            inside, policies = sample.take(train), list[Policy]()
            for fit in fits:
                policies.append(fit(inside, policies))
                if bar is not None:
                    bar.advance(1)
            by_fold.append(policies)
            del inside  # another fold, or the scores, would take as much memory again
    return score_folds(zip(*by_fold, strict=True), sample, folds)


def score_folds(fits: Iterable[Sequence[Policy]], sample: InMemory, folds: Folds) -> list[CrossValidated]:
    """Held-out scores of fits, each given as one policy per fold, fitted to the fold's training rows."""
    rows = np.concatenate([rows for _, rows in folds])
    groups, weights = sample.predictions.groups, sample.labels.instance_weights
    fold = np.repeat(np.arange(len(folds)), [len(rows) for _, rows in folds])
    of_rows = (None if groups is None else groups[rows], fold, np.ones(len(rows)) if weights is None else weights[rows])
    every, scores = list(fits), list[list[Array]]()
    for by_fold, (_, inside) in zip(zip(*every, strict=True), folds, strict=True):
        part = sample.take(inside)
        scores.append([policy.log_scores(part) for policy in by_fold])
    return [
        CrossValidated(np.concatenate(of_fit), *of_rows, policies[-1].posterior)
        for policies, of_fit in zip(every, zip(*scores, strict=True), strict=True)
    ]


def compare_scores(first: CrossValidated, second: CrossValidated) -> tuple[float, float]:
    """Mean difference of two scores per instance, first minus second, and its standard error.

    Groups count as one draw each.
    """
    difference = np.clip(first.scores - second.scores, -_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
    n_instances = len(difference)
    if first.units is not None:
        difference = np.bincount(np.unique(first.units, return_inverse=True)[1], difference)
    error = np.sqrt(len(difference)) * difference.std(ddof=1)
    return float(difference.sum() / n_instances), float(error / n_instances)


def stack_scores(
    members: list[CrossValidated], prior_count: Array, even_odds: float | None
) -> tuple[tuple[Array, Array], CrossValidated]:
    """Stacking weights from held-out scores, and the stack's own held-out scores; prior counts are (M,).

    An instance is scored with stacking weights from the other folds. With `even_odds` the last member is the raw
    network, and takes the probability that the others do not help (:func:`trust`).
    """
    first = members[0]
    scores = np.stack([member.scores for member in members], axis=1) / first.importance[:, None]  # (n, M)
    sizes = first.importance
    if first.units is not None:
        sizes = sizes * _independent_share(scores, first.units)
    held_out = np.empty(len(scores))
    weights, covariance = stacking_weights(scores, sizes, prior_count)
    for fold in np.unique(first.fold):
        inside = first.fold == fold
        of_others = stacking_weights(scores[~inside], sizes[~inside], prior_count, weights)[0]
        held_out[inside] = special.logsumexp(scores[inside] + np.log(of_others), axis=1)
    if even_odds is not None:
        log_odds = trust(float(sizes.sum()), even_odds, float(sizes @ (held_out - scores[:, -1])))
        shares = special.log_expit(log_odds) + held_out, special.log_expit(-log_odds) + scores[:, -1]
        held_out, weights = np.logaddexp(*shares), hedged(weights, log_odds)
        covariance = special.expit(log_odds) ** 2 * covariance
    return (weights, covariance), first._replace(scores=held_out * first.importance)


def even_odds(raw: Model, labels: LabelFacts) -> float:
    """Number of instances at even prior odds that views help: larger for single labels of unknown accuracy."""
    single = not labels.overlap and getattr(raw.resolve(labels), "noise", None) == "uniform"
    return _NOISY_EVEN_ODDS if single else _EVEN_ODDS


def trust(n_instances: float, even_odds: float, gain: float = 0.0) -> float:
    """Log odds that a stack is better than the raw network, given its gain (docs/method, "Stacking")."""
    return float(np.log(n_instances / even_odds) + gain / _TEMPERATURE)


def hedged(weights: Array, log_odds: float) -> Array:
    """Stacking weights (M,), mixed with the raw network, the last member, by the odds that the stack is better."""
    mixed = special.expit(log_odds) * weights
    mixed[-1] += special.expit(-log_odds)
    return np.asarray(mixed)


def prior_counts(n_views: int, raw: bool, count: float) -> Array:
    """Prior counts (M,): `count` for each member with views; for the raw network, the last, the sum of theirs."""
    return np.array([count] * n_views + [count * n_views] * raw)


def _independent_share(scores: Array, units: Array) -> float:
    """How many independent rows a row of a group counts as: the inverse of Kish's design effect.

    It is the variance of the total score if rows were independent, divided by its variance with independent groups, for
    the members' scores (n, M) less their mean: 1 for independent rows, n_groups / n_rows if a group's rows are copies.
    """
    groups, place = np.unique(units, return_inverse=True)
    relative = scores - scores.mean(axis=1, keepdims=True)
    relative -= relative.mean(axis=0)
    sums = np.stack([np.bincount(place, column) for column in relative.T])  # (M, groups)
    clustered = float((sums**2).sum()) * len(groups) / max(len(groups) - 1, 1)
    least = len(groups) / len(units)
    return float(np.clip((relative**2).sum() / clustered, least, 1.0)) if clustered > 0 else least


def stacking_weights(
    scores: Array, sizes: Array, prior_count: float | Array, start: Array | None = None
) -> tuple[Array, Array]:
    """The mode of the weights w (M,) of predictive distributions, by Newton's method on the simplex; their covariance.

        sum_i s_i ln sum_m w_m exp(l_im) + sum_m c_m ln w_m

    l_im are log scores (n, M), s_i sizes (n,) and c_m the prior's counts. The objective is concave and self-concordant.
    """
    n_members = scores.shape[1]
    relative = np.exp(scores - scores.max(axis=1, keepdims=True))  # (n, M)
    weights = np.full(n_members, 1 / n_members) if start is None else start
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
    return weights / weights.sum(), covariance


def check_units(labels: LabelSets, groups: Array | None, purpose: str, remedy: str) -> None:
    """Refuse samples that are too small for held-out scores."""
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
    size = min(MAX_INSTANCES, max(_MIN_SAMPLE, _MAX_ENTRIES // n_entries))
    return rng.permutation(n_instances) if n_instances <= size else rng.choice(n_instances, size, replace=False)


def folds_of(predictions: ViewPredictions, labels: LabelSets, seed: int) -> Folds:
    """Folds of the labelled instances, by a seed, or of a sample of them (:func:`sampled`)."""
    rows = labels.labelled
    return split(rows[sampled(len(rows), seed, predictions.outputs[0].size)], predictions.groups)


def split(rows: Array, groups: Array | None = None) -> Folds:
    """Training and held-out rows of five folds, three where units are many, in the order of the rows.

    Groups (N,) stay together: dealt out in the order in which they first occur, each to the fold with fewest rows.
    """
    n_units = len(rows) if groups is None else len(np.unique(groups[rows]))
    n_folds = min(_FOLDS if n_units < MANY_UNITS else _FEW_FOLDS, n_units)
    if groups is None:
        parts = np.array_split(rows, n_folds)
    else:
        _, first, group = np.unique(groups[rows], return_index=True, return_inverse=True)
        sizes = np.bincount(group)
        fold_of, filled = np.zeros(len(first), dtype=np.intp), np.zeros(n_folds)
        for place in np.argsort(first):
            fold_of[place] = np.argmin(filled)
            filled[fold_of[place]] += sizes[place]
        parts = [rows[fold_of[group] == fold] for fold in range(len(filled))]
    return [
        (np.sort(np.concatenate([*parts[:held], *parts[held + 1 :]])), np.sort(part)) for held, part in enumerate(parts)
    ]
