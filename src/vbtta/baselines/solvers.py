"""The optimisation problems of the baselines: SGD, mixture proportions, and Bayesian model averaging.

**AugTTA and ClassTTA** (Shanmugam, Blalock, Balakrishnan, Guttag, "Better Aggregation in Test-Time Augmentation",
2021), with the settings of the authors' code: cross entropy of the aggregated logits; learning rate 0.01, momentum
0.9, weight decay 1e-4; start 1/K; weights clamped at 0 after every step; batches of 1,000 instances in the order given
(one step an epoch where there are fewer). Labels of one instance share its batch, and a batch's loss is the mean over
its labels.

**BMA** (Sherkatghanad, Abdar, Bakhtyari, Plawiak, Makarenkov, "BayTTA: Uncertainty-aware medical image classification
with optimized test-time augmentation using Bayesian model averaging", 2024): one regression without intercept on every
subset of views, coefficients averaged with weights proportional to exp(-BIC/2). Their models are two-class logistic
regressions on 0/1 votes. Here they are conditional logits, P(c) proportional to exp(sum_k b_k ln p_kc), which for two
classes is logistic regression on the views' log odds: a vote carries no confidence, and there may be more than two
classes. All subsets are fitted while there are at most 127 (the seven views of their code); with more views the
subsets grow one view at a time from the best ones (their "window": weight at least 1/20 of the best so far, and here
at most five a size), until none of a size is in the window.
"""

import warnings
from collections.abc import Callable
from itertools import combinations

import numpy as np
from scipy import optimize, special

from vbtta.data.labels import Array

_LEARNING_RATE, _MOMENTUM, _WEIGHT_DECAY = 0.01, 0.9, 1e-4
_BATCH = 1000
_VIEW_EPOCHS, _CLASS_EPOCHS = 20, 30
_ALL_SUBSETS_UP_TO = 7  # views
_LOG_WINDOW = np.log(20.0)
_SUBSETS_PER_SIZE = 5

Subset = tuple[int, ...]
FitSubset = Callable[[Subset], tuple[float, Array]]  # subset -> maximised log-likelihood, coefficients
Gradient = Callable[[Array, Array, Array], Array]  # weights, logits, target -> gradient


def train_view_weights(logits: Array, target: Array, epochs: int = _VIEW_EPOCHS) -> Array:
    """AugTTA: theta (K,) of sum_k theta_k z_k / sum_k theta_k, on the simplex; logits (N, K, C), target (N, C)."""

    def gradient(theta: Array, z: Array, t: Array) -> Array:
        total = theta.sum()
        pooled = np.einsum("k,nkc->nc", theta, z) / total
        slope = _logit_gradient(pooled, t)
        return np.asarray((np.einsum("nc,nkc->k", slope, z) - (slope * pooled).sum()) / total)

    theta = _descend(np.full(logits.shape[1], 1 / logits.shape[1]), logits, target, epochs, gradient)
    return np.asarray(theta / theta.sum())


def train_class_weights(logits: Array, target: Array, epochs: int = _CLASS_EPOCHS) -> Array:
    """ClassTTA: theta of sum_k theta_kc z_kc, not normalised: (K, C)."""

    def gradient(theta: Array, z: Array, t: Array) -> Array:
        return np.asarray(np.einsum("nc,nkc->kc", _logit_gradient(np.einsum("kc,nkc->nc", theta, z), t), z))

    return _descend(np.full(logits.shape[1:], 1 / logits.shape[1]), logits, target, epochs, gradient)


def mixture_weights(log_likelihood: Array, count: Array, *, gap: float = 1e-9, max_steps: int = 200) -> Array:
    """Weights w (K,) that maximise sum_j n_j ln sum_k w_k exp(log_likelihood_jk), with counts n (J,)."""
    # Sequential quadratic programming as in mixsqp (Kim, Carbonetto, Stephens, Anitescu, "A fast algorithm for maximum
    # likelihood estimation of mixture proportions using sequential quadratic programming", 2020): the simplex is
    # replaced by w >= 0 and a term sum_k w_k in the objective, every quadratic problem is solved exactly by
    # non-negative least squares, and steps are halved until the objective falls. With the gradient of the mean
    # log-likelihood d_k = (1/n) sum_j n_j L_jk / (L w)_j, no weights are better than w by more than max_k d_k - 1: the
    # iteration ends when that is below `gap`.
    scaled = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True))  # a factor a row changes nothing
    share = count / count.sum()

    def objective(weights: Array) -> float:
        mixed = scaled @ weights
        return float(weights.sum() - share @ np.log(mixed)) if mixed.min() > 0 else np.inf

    weights = np.full(scaled.shape[1], 1 / scaled.shape[1])
    value = objective(weights)
    for _ in range(max_steps):
        ratio = scaled / (scaled @ weights)[:, None]  # (J, K)
        slope = share @ ratio  # (K,)
        if slope.max() - 1 <= gap:
            break
        hessian = (ratio * share[:, None]).T @ ratio
        direction = _nonnegative_quadratic(hessian, hessian @ weights - (1 - slope)) - weights
        step, trial = 1.0, weights + direction
        while objective(trial) >= value and step > 1e-10:
            step *= 0.5
            trial = weights + step * direction
        if objective(trial) >= value:
            trial = weights * slope  # rounding stops the quadratic steps; an EM step never lowers the likelihood
            if objective(trial) >= value:
                break
        weights = trial / trial.sum()  # the best of its multiples
        value = objective(weights)
    else:
        warnings.warn(f"mixture weights did not converge in {max_steps} steps", RuntimeWarning, stacklevel=2)
    weights = np.where(weights > 1e-12, weights, 0.0)
    return np.asarray(weights / weights.sum())


def average_logit(log_proba: Array, target: Array) -> Array:
    """Averaged coefficients (K,) of conditional logits of label counts (N, C) on log probabilities (N, K, C)."""
    n_views, n_labels = log_proba.shape[1], float(target.sum())
    return _average(lambda subset: conditional_logit(log_proba[:, subset], target), n_views, n_labels)


def average_linear(outputs: Array, y: Array, count: Array) -> Array:
    """Averaged coefficients (K,) of linear regressions of labels (J,) on one output of the views, (J, K)."""
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


def _descend(theta: Array, logits: Array, target: Array, epochs: int, gradient: Gradient) -> Array:
    """Projected SGD with momentum and weight decay."""
    velocity = np.zeros_like(theta)
    for _ in range(epochs):
        for first in range(0, len(logits), _BATCH):
            rows = slice(first, first + _BATCH)
            velocity = _MOMENTUM * velocity + gradient(theta, logits[rows], target[rows]) + _WEIGHT_DECAY * theta
            updated = np.maximum(theta - _LEARNING_RATE * velocity, 0.0)
            if not updated.any():  # weights that are all 0 define nothing: keep the last that did
                return theta
            theta = updated
    return theta


def _logit_gradient(pooled: Array, target: Array) -> Array:
    """Gradient of the mean cross entropy in the aggregated logits: (N, C)."""
    per_input = target.sum(axis=1, keepdims=True)
    return np.asarray((per_input * special.softmax(pooled, axis=1) - target) / target.sum())


def _nonnegative_quadratic(hessian: Array, linear: Array) -> Array:
    """Minimise 1/2 x'Hx - linear'x over x >= 0, as least squares with H = R'R."""
    ridge = 1e-10 * np.trace(hessian) / len(hessian)
    lower = np.linalg.cholesky(hessian + ridge * np.eye(len(hessian)))
    return np.asarray(optimize.nnls(lower.T, np.linalg.solve(lower, linear))[0])


def _average(fit: FitSubset, n_views: int, n_labels: float) -> Array:
    """Coefficients (K,) averaged over subsets of views with weights proportional to exp(-BIC/2)."""
    scores: list[float] = []
    coefficients: list[Array] = []
    candidates: list[Subset] = [(k,) for k in range(n_views)]
    for size in range(1, n_views + 1):
        scored: list[tuple[float, Subset]] = []
        for subset in candidates:
            log_likelihood, coefficient = fit(subset)
            scored.append((log_likelihood - 0.5 * size * np.log(n_labels), subset))  # -BIC/2
            coefficients.append(np.zeros(n_views))
            coefficients[-1][list(subset)] = coefficient
        scores += [score for score, _ in scored]
        if n_views <= _ALL_SUBSETS_UP_TO:
            candidates = list(combinations(range(n_views), size + 1))
        else:
            window = max(scores) - _LOG_WINDOW
            best = sorted((entry for entry in scored if entry[0] >= window), reverse=True)[:_SUBSETS_PER_SIZE]
            larger = {tuple(sorted((*subset, k))) for _, subset in best for k in range(n_views) if k not in subset}
            candidates = sorted(larger)
        if not candidates:
            break
    averaged = special.softmax(np.array(scores)) @ np.stack(coefficients)
    # Contributions of models far outside the window are no reason to run a view.
    return np.where(np.abs(averaged) > 1e-6 * np.abs(averaged).max(), averaged, 0.0)


def conditional_logit(features: Array, target: Array, max_steps: int = 50) -> tuple[float, Array]:
    """Maximum-likelihood coefficients of P(c) = softmax_c(sum_k b_k x_kc) by Newton's method."""
    # In units of each view's spread over classes, so that the start is never in the flat part of the softmax.
    n_views = features.shape[1]
    weight = target.sum(axis=1)
    features = features - features.mean(axis=2, keepdims=True)
    unit = np.sqrt((features**2).mean(axis=(0, 2)))
    unit = np.where(unit > 0, unit, 1.0)
    features = features / unit[:, None]

    def log_likelihood(coefficient: Array) -> float:
        pooled = np.einsum("k,nkc->nc", coefficient, features)
        return float((target * special.log_softmax(pooled, axis=1)).sum())

    coefficient = np.full(n_views, 1 / n_views)
    value = log_likelihood(coefficient)
    for _ in range(max_steps):
        proba = special.softmax(np.einsum("k,nkc->nc", coefficient, features), axis=1)
        mean = np.einsum("nc,nkc->nk", proba, features)
        gradient = np.einsum("nc,nkc->k", target, features) - weight @ mean
        spread = features * np.sqrt(proba * weight[:, None])[:, None]  # (N, K, C)
        flat = np.moveaxis(spread, 1, 0).reshape(n_views, -1)
        hessian = flat @ flat.T - (mean * weight[:, None]).T @ mean
        ridge = 1e-9 * np.trace(hessian) / n_views + np.finfo(np.float64).tiny
        step = np.linalg.solve(hessian + ridge * np.eye(n_views), gradient)
        size, new_value = 1.0, log_likelihood(coefficient + step)
        while new_value < value and size > 1e-8:
            size *= 0.5
            new_value = log_likelihood(coefficient + size * step)
        if new_value <= value:
            break
        gain, value = new_value - value, new_value
        coefficient = coefficient + size * step
        if gain < 1e-10 * (1 + abs(value)):
            break
    return value, coefficient / unit
