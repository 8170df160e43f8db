"""Classification baselines: from label counts to weights and a rule for pooling logits. A new one goes in here only."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.baselines import base, solvers
from vbtta.baselines.base import Fitted
from vbtta.data.labels import Array
from vbtta.metrics import entropy

_GREEDY_STEPS = 100
_LOG_TAU_RANGE = (np.log(1e-2), np.log(1e2))


class ClassificationData(NamedTuple):
    """The labelled instances of a calibration sample."""

    logits: Array  # (N, K, C)
    target: Array  # (N, C) how often each class was given
    identity: int | None  # position of the unaugmented view

    @property
    def n_views(self) -> int:
        """K."""
        return int(self.logits.shape[1])

    @property
    def log_proba(self) -> Array:
        """Log probabilities of the views: (N, K, C)."""
        return np.asarray(special.log_softmax(self.logits, axis=2))


def _linear(weights: Array) -> Fitted:
    used = base.used_views(weights)
    return Fitted(weights, used.tolist(), partial(base.linear_pool, weights=weights[used]))


def _logit(weights: Array) -> Fitted:
    used = base.used_views(weights)
    return Fitted(weights, used.tolist(), partial(base.logit_pool, weights=weights[used]))


def _original(data: ClassificationData) -> Fitted:
    assert data.identity is not None
    return _linear(np.eye(data.n_views)[data.identity])


def _best_view(data: ClassificationData) -> Fitted:
    return _linear(np.eye(data.n_views)[int(np.einsum("nc,nkc->k", data.target, data.log_proba).argmax())])


def _aug_or_class_tta(data: ClassificationData) -> Fitted:
    """AugTTA or ClassTTA: whichever is right more often on a fifth of the instances that neither was trained on.

    Shanmugam and others choose so. The likelihood decides between equals; the weights are those of the four fifths.
    """
    order = np.random.default_rng(0).permutation(len(data.logits))
    n_held = max(1, len(order) // 5)
    held, rest = order[:n_held], np.sort(order[n_held:])
    training = data._replace(logits=data.logits[rest], target=data.target[rest]) if len(rest) else data

    def score(fitted: Fitted) -> tuple[float, float]:
        log_proba = fitted.rule(data.logits[held][:, fitted.used])
        hits = np.take_along_axis(data.target[held], log_proba.argmax(axis=1)[:, None], axis=1).sum()
        return float(hits), float((data.target[held] * log_proba).sum())

    return max((CLASSIFICATION[name](training) for name in ("aug_tta", "class_tta")), key=score)


def _greedy(data: ClassificationData) -> Fitted:
    """Greedy Policy Search on the calibrated log-likelihood.

    Molchanov, Lyzhov, Molchanova, Ashukha, Vetrov, "Greedy Policy Search: A Simple Baseline for Learnable
    Test-Time Augmentation" (2020): the running mean of probabilities takes in, with replacement, the view that
    gives the best log-likelihood after refitting one temperature; policies of 100 views, as in the authors' code.
    A view's weight is how often it was taken.
    """
    proba = special.softmax(data.logits, axis=2)
    times = np.zeros(data.n_views)
    total = np.zeros_like(data.target)  # (N, C)
    slope = np.ones(data.n_views)  # inverse temperatures, each from its candidate's last fit
    for step in range(_GREEDY_STEPS):
        score = np.empty(data.n_views)
        for k in range(data.n_views):
            mean = np.log(np.maximum((total + proba[:, k]) / (step + 1), 1e-300))
            score[k], slope[k] = base.calibrated_log_likelihood(mean, data.target, slope[k])
        best = int(score.argmax())
        total += proba[:, best]
        times[best] += 1
    return _linear(times / times.sum())


def _entropy(data: ClassificationData) -> Fitted:
    """Weights of each input proportional to exp(-H(p_k)/tau), tau by maximum likelihood."""
    row, label = np.nonzero(data.target)
    proba = special.softmax(data.logits, axis=2)
    disorder, likelihood, count = entropy(proba)[row], proba[row, :, label], data.target[row, label]  # (J, K) twice

    def loss(log_tau: float) -> float:
        weights = special.softmax(-disorder / np.exp(log_tau), axis=1)
        return -float(count @ np.log(np.maximum((weights * likelihood).sum(axis=1), 1e-300)))

    best = optimize.minimize_scalar(loss, bounds=_LOG_TAU_RANGE, method="bounded", options={"xatol": 1e-4})
    return Fitted(None, list(range(data.n_views)), partial(base.entropy_pool, tau=float(np.exp(best.x))))


def _mixture_mle(data: ClassificationData) -> Fitted:
    row, label = np.nonzero(data.target)
    return _linear(solvers.mixture_weights(data.log_proba[row, :, label], data.target[row, label]))


CLASSIFICATION: dict[str, Callable[[ClassificationData], Fitted]] = {
    "original": _original,
    "uniform": lambda data: _linear(np.full(data.n_views, 1 / data.n_views)),
    "geometric": lambda data: _logit(np.full(data.n_views, 1 / data.n_views)),  # softmax of mean ln p_k = of mean z_k
    "max": lambda data: Fitted(None, list(range(data.n_views)), base.maximum_pool),
    "best_view": _best_view,
    "aug_tta": lambda data: _logit(solvers.train_view_weights(data.logits, data.target)),
    "class_tta": lambda data: _logit(solvers.train_class_weights(data.logits, data.target)),
    "aug_or_class_tta": _aug_or_class_tta,
    "greedy": _greedy,
    "entropy": _entropy,
    "bma": lambda data: _logit(solvers.average_logit(data.log_proba, data.target)),
    "mixture_mle": _mixture_mle,
}
