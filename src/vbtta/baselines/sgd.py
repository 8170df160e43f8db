"""AugTTA and ClassTTA: aggregation weights trained by stochastic gradient descent.

Shanmugam, Blalock, Balakrishnan, Guttag, "Better Aggregation in Test-Time Augmentation" (2021), with the settings of
the authors' code: cross entropy of the aggregated logits; learning rate 0.01, momentum 0.9, weight decay 1e-4; start
1/K; weights clamped at 0 after every step; batches of 1,000 instances in the order given (one step an epoch where
there are fewer). Labels of one instance share its batch, and a batch's loss is the mean over its labels.
"""

__all__ = ["train_class_weights", "train_view_weights"]

from collections.abc import Callable

import numpy as np
from scipy import special

from vbtta.labels import Array

_LEARNING_RATE, _MOMENTUM, _WEIGHT_DECAY = 0.01, 0.9, 1e-4
_BATCH = 1000
_VIEW_EPOCHS, _CLASS_EPOCHS = 20, 30


def train_view_weights(logits: Array, target: Array, epochs: int = _VIEW_EPOCHS) -> Array:
    """AugTTA: theta of sum_k theta_k z_k / sum_k theta_k, returned on the simplex: (K,).

    Parameters
    ----------
    logits : (N, K, C) array
    target : (N, C) array
        How often each class was given.
    """
    start = np.full(logits.shape[1], 1 / logits.shape[1])
    theta = _descend(start, logits, target, epochs, _view_gradient)
    return np.asarray(theta / theta.sum())


def train_class_weights(logits: Array, target: Array, epochs: int = _CLASS_EPOCHS) -> Array:
    """ClassTTA: theta of sum_k theta_kc z_kc, not normalised: (K, C)."""
    start = np.full(logits.shape[1:], 1 / logits.shape[1])
    return _descend(start, logits, target, epochs, _class_gradient)


def _descend(
    theta: Array, logits: Array, target: Array, epochs: int, gradient: Callable[[Array, Array, Array], Array]
) -> Array:
    velocity = np.zeros_like(theta)
    for _ in range(epochs):
        for first in range(0, len(logits), _BATCH):
            rows = slice(first, first + _BATCH)
            slope = gradient(theta, logits[rows], target[rows]) + _WEIGHT_DECAY * theta
            velocity = _MOMENTUM * velocity + slope
            moved = np.maximum(theta - _LEARNING_RATE * velocity, 0.0)
            if not moved.any():  # weights that are all 0 define nothing: keep the last that did
                return theta
            theta = moved
    return theta


def _view_gradient(theta: Array, logits: Array, target: Array) -> Array:
    total = theta.sum()
    pooled = np.einsum("k,nkc->nc", theta, logits) / total
    pull = _logit_gradient(pooled, target)
    return np.asarray((np.einsum("nc,nkc->k", pull, logits) - (pull * pooled).sum()) / total)


def _class_gradient(theta: Array, logits: Array, target: Array) -> Array:
    pooled = np.einsum("kc,nkc->nc", theta, logits)
    return np.asarray(np.einsum("nc,nkc->kc", _logit_gradient(pooled, target), logits))


def _logit_gradient(pooled: Array, target: Array) -> Array:
    """Gradient of the mean cross entropy in the aggregated logits: (N, C)."""
    per_input = target.sum(axis=1, keepdims=True)
    return np.asarray((per_input * special.softmax(pooled, axis=1) - target) / target.sum())
