"""Ways to turn the logits of K views into one log probability: functions of arrays (N, K, C) -> (N, C)."""

__all__ = [
    "TEMPERATURES",
    "calibrated_log_likelihood",
    "entropy_pool",
    "linear_pool",
    "logit_pool",
    "maximum_pool",
    "temperature",
]

import numpy as np
from scipy import optimize, special

from vbtta.labels import Array

TEMPERATURES = (0.01, 100.0)  # the range
_SLOPE_RANGE = (1 / TEMPERATURES[1], 1 / TEMPERATURES[0])


def linear_pool(logits: Array, weights: Array) -> Array:
    """Ln sum_k w_k softmax(z_k), w on the simplex: (K,), or (N, K) where it differs by input."""
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)[..., None]
    return np.asarray(special.logsumexp(special.log_softmax(logits, axis=2) + log_weights, axis=1))


def logit_pool(logits: Array, weights: Array) -> Array:
    """Ln softmax(sum_k theta_k z_k), with theta (K,) or one a class (K, C)."""
    theta = weights if weights.ndim == 2 else weights[:, None]
    return np.asarray(special.log_softmax((logits * theta).sum(axis=1), axis=1))


def maximum_pool(logits: Array) -> Array:
    """Elementwise maximum of the views' probabilities, renormalised."""
    largest = special.log_softmax(logits, axis=2).max(axis=1)
    return np.asarray(special.log_softmax(largest, axis=1))


def entropy_pool(logits: Array, tau: float) -> Array:
    """Linear pool with weights of each input proportional to exp(-H(p_k)/tau)."""
    entropy = special.entr(special.softmax(logits, axis=2)).sum(axis=2)  # (N, K)
    return linear_pool(logits, special.softmax(-entropy / tau, axis=1))


def temperature(log_proba: Array, target: Array) -> float:
    """The T that maximises the likelihood of label counts (N, C) under softmax(log_proba / T).

    The log-likelihood is concave in the slope 1/T; its derivative is sum_nc t_nc (l_nc - E_n l).
    """
    weight = target.sum(axis=1)

    def derivative(log_slope: float) -> float:
        p = special.softmax(np.exp(log_slope) * log_proba, axis=1)
        return float((target * log_proba).sum() - weight @ (p * log_proba).sum(axis=1))

    low, high = np.log(_SLOPE_RANGE)
    if derivative(low) <= 0:
        return TEMPERATURES[1]
    if derivative(high) >= 0:
        return TEMPERATURES[0]
    return float(np.exp(-optimize.brentq(derivative, low, high, xtol=1e-10)))


def calibrated_log_likelihood(log_proba: Array, target: Array, slope: float) -> tuple[float, float]:
    """Log-likelihood after refitting the slope 1/T from a good start, and the slope.

    Newton's method on the concave function of the slope: derivative as in :func:`temperature`, second derivative
    -sum_n t_n Var_n(l). Once a step is below a thousandth, its quadratic gain is right to some 1e-9 a label.
    """
    weight = target.sum(axis=1)
    linear = float(np.vdot(target, log_proba))
    for _ in range(20):
        p = np.exp(slope * log_proba)  # logarithms of probabilities do not overflow
        normaliser = p.sum(axis=1)
        p *= log_proba
        first = p.sum(axis=1) / normaliser
        second = np.einsum("nc,nc->n", p, log_proba) / normaliser - first**2
        gradient, curvature = linear - float(weight @ first), float(weight @ second)
        value = slope * linear - float(weight @ np.log(normaliser))
        step = gradient / max(curvature, 1e-300)
        if abs(step) < 1e-3 * slope:
            return value + 0.5 * gradient * step, slope + step
        slope = float(np.clip(slope + step, max(0.5 * slope, _SLOPE_RANGE[0]), min(2 * slope, _SLOPE_RANGE[1])))
    return value, slope
