"""Classification baselines: from label counts to weights and a rule for pooling logits."""

__all__ = ["CLASSIFICATION", "ClassificationData", "Fitted"]

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.baselines import pools
from vbtta.baselines.averaging import average_logit
from vbtta.baselines.contract import CategoricalRule
from vbtta.baselines.sgd import train_class_weights, train_view_weights
from vbtta.baselines.simplex import mixture_weights
from vbtta.labels import Array

_GREEDY_STEPS = 100
_LOG_TAU_RANGE = (np.log(1e-2), np.log(1e2))


class ClassificationData(NamedTuple):
    """The labelled instances of a calibration sample."""

    logits: Array  # (N, K, C)
    target: Array  # (N, C) how often each class was given
    identity: int | None  # position of the unaugmented view


class Fitted(NamedTuple):
    """What a fit returns: weights to show, the views that are needed, and the rule that pools those."""

    weights: Array | None  # (K,), (K, C)
    used: list[int]
    rule: CategoricalRule


def _original(data: ClassificationData) -> Fitted:
    assert data.identity is not None
    return _single(data, data.identity)


def _uniform(data: ClassificationData) -> Fitted:
    return _linear(np.full(data.logits.shape[1], 1 / data.logits.shape[1]))


def _geometric(data: ClassificationData) -> Fitted:
    """The softmax of mean log p_k, which is the softmax of the mean logits."""
    return _logit(np.full(data.logits.shape[1], 1 / data.logits.shape[1]))


def _max(data: ClassificationData) -> Fitted:
    return Fitted(None, list(range(data.logits.shape[1])), pools.maximum_pool)


def _best_view(data: ClassificationData) -> Fitted:
    log_proba = special.log_softmax(data.logits, axis=2)
    return _single(data, int(np.einsum("nc,nkc->k", data.target, log_proba).argmax()))


def _aug_tta(data: ClassificationData) -> Fitted:
    return _logit(train_view_weights(data.logits, data.target))


def _class_tta(data: ClassificationData) -> Fitted:
    return _logit(train_class_weights(data.logits, data.target))


def _aug_or_class_tta(data: ClassificationData) -> Fitted:
    """AugTTA or ClassTTA: which of them is right more often on a fifth of the instances that neither was trained on.

    Shanmugam and others choose so. The likelihood decides between equals; the weights are those of the four fifths.
    """
    order = np.random.default_rng(0).permutation(len(data.logits))
    n_held = max(1, len(order) // 5)
    held, rest = order[:n_held], np.sort(order[n_held:])
    part = data._replace(logits=data.logits[rest], target=data.target[rest]) if len(rest) else data

    def score(fitted: Fitted) -> tuple[float, float]:
        log_proba = fitted.rule(data.logits[held][:, fitted.used])
        hits = np.take_along_axis(data.target[held], log_proba.argmax(axis=1)[:, None], axis=1).sum()
        return float(hits), float((data.target[held] * log_proba).sum())

    return max((_aug_tta(part), _class_tta(part)), key=score)


def _greedy(data: ClassificationData) -> Fitted:
    """Greedy Policy Search on the calibrated log-likelihood.

    Molchanov, Lyzhov, Molchanova, Ashukha, Vetrov, "Greedy Policy Search: A Simple Baseline for Learnable
    Test-Time Augmentation" (2020): the running mean of probabilities takes in, with replacement, the view that
    gives the best log-likelihood after refitting one temperature; policies of 100 views, as in the authors' code.
    A view's weight is how often it was taken.
    """
    proba = special.softmax(data.logits, axis=2)
    n_views = proba.shape[1]
    taken = np.zeros(n_views)
    total = np.zeros_like(data.target)  # (N, C)
    slope = np.ones(n_views)  # inverse temperatures, each from its candidate's last fit
    for step in range(_GREEDY_STEPS):
        score = np.empty(n_views)
        for k in range(n_views):
            mean = np.log(np.maximum((total + proba[:, k]) / (step + 1), 1e-300))
            score[k], slope[k] = pools.calibrated_log_likelihood(mean, data.target, slope[k])
        best = int(score.argmax())
        total += proba[:, best]
        taken[best] += 1
    return _linear(taken / taken.sum())


def _entropy(data: ClassificationData) -> Fitted:
    """Weights of each input proportional to exp(-H(p_k)/tau), tau by maximum likelihood."""
    row, label = np.nonzero(data.target)
    proba = special.softmax(data.logits, axis=2)
    entropy = special.entr(proba).sum(axis=2)[row]  # (J, K)
    likelihood, count = proba[row, :, label], data.target[row, label]

    def loss(log_tau: float) -> float:
        weights = special.softmax(-entropy / np.exp(log_tau), axis=1)
        return -float(count @ np.log(np.maximum((weights * likelihood).sum(axis=1), 1e-300)))

    found = optimize.minimize_scalar(loss, bounds=_LOG_TAU_RANGE, method="bounded", options={"xatol": 1e-4})
    rule = partial(pools.entropy_pool, tau=float(np.exp(found.x)))
    return Fitted(None, list(range(data.logits.shape[1])), rule)


def _bma(data: ClassificationData) -> Fitted:
    return _logit(average_logit(special.log_softmax(data.logits, axis=2), data.target))


def _mixture_mle(data: ClassificationData) -> Fitted:
    row, label = np.nonzero(data.target)
    log_likelihood = special.log_softmax(data.logits, axis=2)[row, :, label]  # (J, K)
    return _linear(mixture_weights(log_likelihood, data.target[row, label]))


CLASSIFICATION: dict[str, Callable[[ClassificationData], Fitted]] = {
    "original": _original,
    "uniform": _uniform,
    "geometric": _geometric,
    "max": _max,
    "best_view": _best_view,
    "aug_tta": _aug_tta,
    "class_tta": _class_tta,
    "aug_or_class_tta": _aug_or_class_tta,
    "greedy": _greedy,
    "entropy": _entropy,
    "bma": _bma,
    "mixture_mle": _mixture_mle,
}


def _single(data: ClassificationData, view: int) -> Fitted:
    return _linear(np.eye(data.logits.shape[1])[view])


def _linear(weights: Array) -> Fitted:
    used = np.flatnonzero(weights)
    return Fitted(weights, used.tolist(), partial(pools.linear_pool, weights=weights[used]))


def _logit(weights: Array) -> Fitted:
    used = np.flatnonzero(weights if weights.ndim == 1 else weights.any(axis=1))
    used = used if used.size else np.array([0])  # equal probabilities need a view to say how many inputs there are
    return Fitted(weights, used.tolist(), partial(pools.logit_pool, weights=weights[used]))
