"""What each view contributes: how many count, which explain the same labels, what is lost without one."""

__all__ = ["Influence", "Overlap", "effective_views", "influence_of", "overlap_of", "some_labelled"]

import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.crossval import cross_validated_scores
from vbtta.engines import fit_model
from vbtta.labels import Array, LabelSets
from vbtta.policy import ConvergenceWarning, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM

_MOST_INSTANCES = 4_000  # of a check that fits many times


class Overlap(NamedTuple):
    """Which views explain the same label sets."""

    names: tuple[str, ...]  # the views of positive weight
    share: Array  # (K,): of the label sets that a view explains, by the posterior of the view given the labels
    matrix: Array  # (K, K): 1 where two views explain the same sets in the same proportions, 0 where never the same


class Influence(NamedTuple):
    """What leaving out one view changes; zero for views without weight."""

    names: tuple[str, ...]
    bound: Array  # (K,): bound without the view minus the bound with it
    score: Array  # (K,): the same of the cross-validated log score of an instance, on average
    standard_error: Array  # (K,): of `score`


def effective_views(weights: Array) -> float:
    """Exponential of the weights' entropy: K where all are equal, 1 where one has all the weight.

    Examples
    --------
    >>> effective_views(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    return float(np.exp(special.entr(weights).sum()))


def overlap_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> Overlap:
    """How often two views explain the same labels.

    The posterior probability r_ik that view k made the labels of instance i, proportional to w_k times the
    probability of these labels under the calibrated view alone, label noise included, has overlap
    sum_i r_ik r_il / sqrt(sum_i r_ik^2 sum_i r_il^2).
    """
    fitted = policy.fitted or policy.names
    used = np.flatnonzero(policy.posterior.weights > 0)
    labels = labels.align(len(predictions), predictions.ids)
    log_share = np.stack(
        [_alone(policy, k).score(predictions, labels) + np.log(policy.posterior.weights[k]) for k in used], axis=1
    )  # (N+, K)
    share = special.softmax(log_share, axis=1)
    gram = share.T @ share
    size = np.sqrt(np.diagonal(gram))
    size = np.where(size > 0, size, 1.0)
    return Overlap(tuple(fitted[k] for k in used), share.mean(axis=0), gram / np.outer(size, size))


def some_labelled(labels: LabelSets, seed: int) -> Array:
    """Rows of labelled instances, all or a random choice of them, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(labels.labelled)[:_MOST_INSTANCES])


def influence_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, seed: int = 0) -> Influence:
    """Fit without each view of positive weight in turn: change of the bound and of held-out scores.

    Negative changes speak for a view. Only models that EM fits; from 4,000 labelled instances at most.
    """
    if not isinstance(policy.engine, EM):
        raise ValueError(f"influence refits by EM; the policy was fitted by {type(policy.engine).__name__}")
    engine = replace(policy.engine, keep_states=False)
    labels = labels.align(len(predictions), predictions.ids)
    some = some_labelled(labels, seed)
    inside, given = predictions.select(policy.names).take(some), labels.take(some)
    fitted = policy.fitted or policy.names
    bound, score, error = np.zeros((3, len(policy.names)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # differences are what is asked for
        whole_bound, whole_scores = _bound_and_scores(inside.select(fitted), given, policy, engine, seed)
        for k, name in enumerate(policy.names):
            if policy.weights[k] == 0 or len(fitted) == 1:
                continue
            rest = inside.select([other for other in fitted if other != name])
            found_bound, scores = _bound_and_scores(rest, given, policy, engine, seed)
            change = scores - whole_scores
            bound[k], score[k] = found_bound - whole_bound, change.mean()
            error[k] = change.std(ddof=1) / np.sqrt(len(change))
    return Influence(policy.names, bound, score, error)


def _alone(policy: Policy, view: np.intp | int) -> Policy:
    """The policy with one of its fitted views only, calibrated as it is there."""
    name = (policy.fitted or policy.names)[view]
    return replace(policy, posterior=policy.posterior.keep(np.array([view])), fitted=(name,), steps=())


def _bound_and_scores(
    predictions: ViewPredictions, labels: LabelSets, policy: Policy, engine: EM, seed: int
) -> tuple[float, Array]:
    bound = fit_model(predictions, labels, policy.model, engine, task=policy.task).elbo
    return bound, cross_validated_scores(predictions, labels, policy.model, engine, task=policy.task, seed=seed)
