"""Bayesian model averaging over subsets of views, weighted by exp(-BIC/2).

Sherkatghanad, Abdar, Bakhtyari, Plawiak, Makarenkov, "BayTTA: Uncertainty-aware medical image classification with
optimized test-time augmentation using Bayesian model averaging" (2024): one regression without intercept on every
subset of views, coefficients averaged with the models' weights. Their models are two-class logistic regressions on
0/1 votes. Here they are conditional logits, P(c) proportional to exp(sum_k b_k ln p_kc), which for two classes is
logistic regression on the views' log odds: a vote carries no confidence, and there may be more than two classes. All
subsets are fitted while there are at most 127 (the seven views of their code); with more views the subsets grow one
view at a time from the best ones (their "window": weight at least 1/20 of the best so far, and here at most five a
size), until none of a size is in the window.
"""

__all__ = ["average_linear", "average_logit"]

from collections.abc import Callable
from itertools import combinations

import numpy as np
from scipy import special

from vbtta.labels import Array

_ALL_SUBSETS_UP_TO = 7
_LOG_WINDOW = np.log(20.0)
_KEPT = 5

Subset = tuple[int, ...]
Fit = Callable[[Subset], tuple[float, Array]]  # subset -> maximised log-likelihood, coefficients


def average_logit(log_proba: Array, target: Array) -> Array:
    """Averaged coefficients of conditional logits on subsets of views: (K,).

    Parameters
    ----------
    log_proba : (N, K, C) array
        Log probabilities of the views.
    target : (N, C) array
        How often each class was given.
    """

    def fit(subset: Subset) -> tuple[float, Array]:
        return _conditional_logit(log_proba[:, subset], target)

    return _average(fit, log_proba.shape[1], float(target.sum()))


def average_linear(outputs: Array, y: Array, count: Array) -> Array:
    """Averaged coefficients of linear regressions of one output on subsets of views: (K,).

    Parameters
    ----------
    outputs : (J, K) array
        Predictions of the views for each label's instance.
    y, count : (J,) arrays
    """
    gram = (outputs * count[:, None]).T @ outputs  # (K, K)
    moment = (outputs * count[:, None]).T @ y
    power, total = float(count @ y**2), float(count.sum())
    smallest = 1e-12 * max(power, np.finfo(np.float64).tiny)

    def fit(subset: Subset) -> tuple[float, Array]:
        index = list(subset)
        coefficient = np.linalg.lstsq(gram[np.ix_(index, index)], moment[index], rcond=None)[0]
        residual = max(power - float(moment[index] @ coefficient), smallest)
        return -0.5 * total * (np.log(2 * np.pi * residual / total) + 1), coefficient

    return _average(fit, outputs.shape[1], total)


def _average(fit: Fit, n_views: int, n_labels: float) -> Array:
    scores: list[float] = []
    coefficients: list[Array] = []
    best = -np.inf
    candidates: list[Subset] = [(k,) for k in range(n_views)]
    for size in range(1, n_views + 1):
        of_this_size: list[tuple[float, Subset]] = []
        for subset in candidates:
            log_likelihood, coefficient = fit(subset)
            score = log_likelihood - 0.5 * size * np.log(n_labels)  # -BIC/2
            full = np.zeros(n_views)
            full[list(subset)] = coefficient
            scores.append(score)
            coefficients.append(full)
            of_this_size.append((score, subset))
        best = max(best, max(score for score, _ in of_this_size))
        if n_views <= _ALL_SUBSETS_UP_TO:
            candidates = list(combinations(range(n_views), size + 1))
        else:
            good = sorted((entry for entry in of_this_size if entry[0] >= best - _LOG_WINDOW), reverse=True)[:_KEPT]
            grown = {tuple(sorted((*subset, k))) for _, subset in good for k in range(n_views) if k not in subset}
            candidates = sorted(grown)
        if not candidates:
            break
    weights = special.softmax(np.array(scores))
    averaged = weights @ np.stack(coefficients)
    # What models far outside the window contribute is no reason to run a view.
    return np.where(np.abs(averaged) > 1e-6 * np.abs(averaged).max(), averaged, 0.0)


def _conditional_logit(features: Array, target: Array, max_steps: int = 50) -> tuple[float, Array]:
    """Maximum-likelihood coefficients of P(c) = softmax_c(sum_k b_k x_kc) by Newton's method.

    In units of each view's spread over classes, so that the start is never in the flat part of the softmax.
    """
    n_views = features.shape[1]
    weight = target.sum(axis=1)
    features = features - features.mean(axis=2, keepdims=True)
    unit = np.sqrt((features**2).mean(axis=(0, 2)))
    unit = np.where(unit > 0, unit, 1.0)
    features = features / unit[:, None]
    coefficient = np.full(n_views, 1 / n_views)
    value = _logit_value(coefficient, features, target)
    for _ in range(max_steps):
        proba = special.softmax(np.einsum("k,nkc->nc", coefficient, features), axis=1)
        mean = np.einsum("nc,nkc->nk", proba, features)
        gradient = np.einsum("nc,nkc->k", target, features) - weight @ mean
        spread = features * np.sqrt(proba * weight[:, None])[:, None]  # (N, K, C)
        flat = np.moveaxis(spread, 1, 0).reshape(n_views, -1)
        hessian = flat @ flat.T - (mean * weight[:, None]).T @ mean
        ridge = 1e-9 * np.trace(hessian) / n_views + np.finfo(np.float64).tiny
        step = np.linalg.solve(hessian + ridge * np.eye(n_views), gradient)
        size = 1.0
        moved = _logit_value(coefficient + step, features, target)
        while moved < value and size > 1e-8:
            size *= 0.5
            moved = _logit_value(coefficient + size * step, features, target)
        if moved <= value:
            break
        gain, value = moved - value, moved
        coefficient = coefficient + size * step
        if gain < 1e-10 * (1 + abs(value)):
            break
    return value, coefficient / unit


def _logit_value(coefficient: Array, features: Array, target: Array) -> float:
    pooled = np.einsum("k,nkc->nc", coefficient, features)
    return float((target * special.log_softmax(pooled, axis=1)).sum())
