"""Weights by view and class, drawn towards common ones: P(c | x) proportional to sum_k w_kc P_k(c | x).

    ln prior = a sum_c sum_k w_k ln(w_kc / w_k),   w_kc and w at their mode

For a given w this is the Dirichlet(1 + a w) of each class, relative to its peak, which is at w itself; a is its
strength, in labels. (Were the density not divided by its peak, the joint mode would have all classes on one view: the
peak is highest there.) ln Z_i, the log normaliser, lies below its tangent in the weights, so each class's weights
maximise sum_k R_kc ln w_kc - B_kc w_kc, R the responsibilities and B the tangent's slopes: the bound cannot fall.
"""

import numpy as np
from scipy import special

from vbtta.data.labels import Array

_MIN_NUMERATOR = 1e-150  # whose inverse's square is finite


def log_prior(class_weights: Array, common: Array, strength: float) -> float:
    """Log prior of the class weights (K, C) and the common ones (K,)."""
    inside = common > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(class_weights[inside]) - np.log(common[inside])[:, None]
    return float(strength * common[inside] @ ratio.sum(axis=1))


def update_class_weights(count: Array, load: Array, common: Array, strength: float) -> Array:
    """Class weights (K, C) from responsibilities and slopes, (C, K) each.

    w_kc = (R_kc + a w_k) / (B_kc + m_c), where m_c makes them sum to one: a root that Newton reaches from the left.
    Denominators are kept as differences from the view's that starts at weight 1: where it has next to no
    responsibility, B_kc + m_c would cancel to nothing.
    """
    top = np.maximum(count + strength * common, 0)  # (C, K)
    top[top < _MIN_NUMERATOR] = 0
    positive = top > 0
    first = np.where(positive, top - load, -np.inf).argmax(axis=1)[:, None]
    gap = load - np.take_along_axis(load, first, axis=1) + np.take_along_axis(top, first, axis=1)
    base = np.where(positive, np.maximum(gap, top), 1.0)  # B_kc + m_c at the start; no less than the numerator
    shift = np.zeros((len(top), 1))
    for _ in range(200):
        weights = top / (base + shift)
        excess = weights.sum(axis=1, keepdims=True) - 1
        shift = shift + np.maximum(excess, 0) / (weights / (base + shift)).sum(axis=1, keepdims=True)
        if np.abs(excess).max() < 1e-14:
            break
    weights = top / (base + shift)
    return np.asarray((weights / weights.sum(axis=1, keepdims=True)).T)


def update_common_weights(class_weights: Array) -> Array:
    """Common weights (K,) at their mode given the class weights: proportional to the geometric means over classes."""
    inside = np.asarray((class_weights > 0).all(axis=1))
    level = np.where(inside, np.log(np.where(inside[:, None], class_weights, 1)).mean(axis=1), -np.inf)
    return np.asarray(special.softmax(level))
