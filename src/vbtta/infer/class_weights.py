"""Weights by view and class, drawn towards common ones: P(c | x) proportional to sum_k w_kc P_k(c | x).

    w_.c ~ Dirichlet(1 + a w),   at their mode, as is w

The mode of the prior is w itself; a is its strength, in labels. ln Z_i, the log normaliser, lies below its
tangent in the weights, so each class's weights maximise sum_k R_kc ln w_kc - B_kc w_kc, R the responsibilities and B
the tangent's slopes: a step that cannot lower the bound.
"""

__all__ = ["log_prior", "update_class_weights", "update_common_weights"]

import numpy as np
from scipy import special

from vbtta.labels import Array


def log_prior(class_weights: Array, common: Array, strength: float) -> float:
    """Log density of the class weights (K, C) given the common ones (K,)."""
    K, C = class_weights.shape
    normaliser = special.gammaln(K + strength) - special.gammaln(1 + strength * common).sum()
    return float(C * normaliser + special.xlogy(strength * common[:, None], class_weights).sum())


def update_class_weights(count: Array, load: Array, common: Array, strength: float) -> Array:
    """Class weights (K, C) from responsibilities and slopes, (C, K) each.

    w_kc = (R_kc + a w_k) / (B_kc + m_c), where m_c makes them sum to one: a root that Newton reaches from the left.
    """
    top = count + strength * common  # (C, K)
    shift = np.where(top > 0, top - load, -np.inf).max(axis=1, keepdims=True)
    for _ in range(100):
        weights = np.where(top > 0, top / np.maximum(load + shift, 1e-300), 0)
        excess = weights.sum(axis=1, keepdims=True) - 1
        slope = np.where(top > 0, weights / np.maximum(load + shift, 1e-300), 0).sum(axis=1, keepdims=True)
        shift = shift + excess / slope
        if np.abs(excess).max() < 1e-14:
            break
    weights = np.where(top > 0, top / np.maximum(load + shift, 1e-300), 0)
    return np.asarray((weights / weights.sum(axis=1, keepdims=True)).T)


def update_common_weights(class_weights: Array, strength: float) -> Array:
    """Common weights (K,) at their mode given the class weights: digamma(1 + a w_k) = mean_c ln w_kc - m, or w_k = 0."""
    with np.errstate(divide="ignore"):
        level = np.log(class_weights).mean(axis=1)  # (K,)
    low = level.max() - special.digamma(1 + strength)  # one view takes it all
    high = level.max() - special.digamma(1.0)  # none takes any
    for _ in range(80):
        middle = 0.5 * (low + high)
        if _size(level - middle).sum() > strength:
            low = middle
        else:
            high = middle
    weights = _size(level - 0.5 * (low + high))
    return np.asarray(weights / weights.sum())


def _size(level: Array) -> Array:
    """The x >= 0 with digamma(1 + x) = level, 0 where there is none."""
    positive = level > special.digamma(1.0)
    goal = np.where(positive, level, 0.0)
    x = np.where(goal > -2.22, np.exp(goal) + 0.5, 1.0)
    for _ in range(8):
        x = np.maximum(x - (special.digamma(x) - goal) / special.polygamma(1, x), 1e-3)
    return np.where(positive, np.maximum(x - 1, 0), 0)
