"""The optimisation problems of the baselines: SGD, mixture proportions, BMA, conditional logits, noise of labels."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.crossval import stacking_weights
from vbtta.data.labels import Array
from vbtta.distributions import ContinuousPrediction

_LEARNING_RATE, _MOMENTUM, _WEIGHT_DECAY = 0.01, 0.9, 1e-4
_BATCH = 1000
_VIEW_EPOCHS, _CLASS_EPOCHS = 20, 30
_ALL_SUBSETS_UP_TO = 7  # views
_LOG_WINDOW = np.log(20.0)
_SUBSETS_PER_SIZE = 5
_MAX_STEPS, _TOLERANCE = 100, 1e-5  # of the EM, and change of a probability at which it stops
_LEAST = 1e-10  # probability in a confusion matrix
_RIDGES = (1000.0, 100.0, 10.0, 1.0, 0.1)  # of coefficients in units of the views' spread
_FAR = 3.0  # standard deviations to which the prediction counts in the scale

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


def mixture_weights(log_likelihood: Array, count: Array) -> Array:
    """Weights w (K,) that maximise sum_j n_j ln sum_k w_k exp(log_likelihood_jk), with counts n (J,)."""
    weights = stacking_weights(log_likelihood, count / count.sum(), 1e-10)[0]
    weights = np.where(weights > 1e-7, weights, 0.0)
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


def _average(fit: FitSubset, n_views: int, n_labels: float) -> Array:
    """Coefficients (K,) averaged over subsets of views with weights proportional to exp(-BIC/2)."""
    scores: list[float] = []
    coefficients: list[Array] = []
    candidates: list[Subset] = [(k,) for k in range(n_views)]
    while candidates:
        scored: list[tuple[float, Subset]] = []
        for subset in candidates:
            log_likelihood, coefficient = fit(subset)
            scored.append((log_likelihood - 0.5 * len(subset) * np.log(n_labels), subset))  # -BIC/2
            coefficients.append(np.zeros(n_views))
            coefficients[-1][list(subset)] = coefficient
        scores += [score for score, _ in scored]
        if n_views > _ALL_SUBSETS_UP_TO:
            window = max(scores) - _LOG_WINDOW
            scored = sorted((entry for entry in scored if entry[0] >= window), reverse=True)[:_SUBSETS_PER_SIZE]
        larger = {tuple(sorted((*subset, k))) for _, subset in scored for k in range(n_views) if k not in subset}
        candidates = sorted(larger)
    averaged = special.softmax(np.array(scores)) @ np.stack(coefficients)
    # Contributions of models far outside the window are no reason to run a view.
    return np.where(np.abs(averaged) > 1e-6 * np.abs(averaged).max(), averaged, 0.0)


def conditional_logit(features: Array, target: Array, ridge: float = 0.0) -> tuple[float, Array]:
    """Coefficients of P(c) = softmax_c(sum_k b_k x_kc) by Newton's method; a ridge is their precision around 1/K."""
    # In units of each view's spread over classes, so that the start is never in the flat part of the softmax.
    n_views = features.shape[1]
    weight = target.sum(axis=1)
    features = features - features.mean(axis=2, keepdims=True)
    unit = np.sqrt((features**2).mean(axis=(0, 2)))
    unit = np.where(unit > 0, unit, 1.0)
    features = features / unit[:, None]

    def objective(coefficient: Array) -> float:
        pooled = np.einsum("k,nkc->nc", coefficient, features)
        penalty = 0.5 * ridge * ((coefficient - unit / n_views) ** 2).sum()
        return float((target * special.log_softmax(pooled, axis=1)).sum() - penalty)

    coefficient = np.full(n_views, 1 / n_views)
    value = objective(coefficient)
    for _ in range(50):
        proba = special.softmax(np.einsum("k,nkc->nc", coefficient, features), axis=1)
        mean = np.einsum("nc,nkc->nk", proba, features)
        gradient = np.einsum("nc,nkc->k", target, features) - weight @ mean - ridge * (coefficient - unit / n_views)
        spread = features * np.sqrt(proba * weight[:, None])[:, None]  # (N, K, C)
        flat = np.moveaxis(spread, 1, 0).reshape(n_views, -1)
        hessian = flat @ flat.T - (mean * weight[:, None]).T @ mean
        precision = ridge + 1e-9 * np.trace(hessian) / n_views + np.finfo(np.float64).tiny
        step = np.linalg.solve(hessian + precision * np.eye(n_views), gradient)
        size, new_value = 1.0, objective(coefficient + step)
        while new_value < value and size > 1e-8:
            size *= 0.5
            new_value = objective(coefficient + size * step)
        if new_value <= value:
            break
        gain, value = new_value - value, new_value
        coefficient = coefficient + size * step
        if gain < 1e-10 * (1 + abs(value)):
            break
    return value, coefficient / unit


def best_ridge(log_proba: Array, truth: Array) -> float:
    """The ridge whose fit to four fifths of the instances predicts the truth (N, C) of the others best."""
    held = np.random.default_rng(0).permutation(len(truth)) < len(truth) // 5

    def score(ridge: float) -> float:
        coefficient = conditional_logit(log_proba[~held], truth[~held], ridge)[1]
        pooled = np.einsum("k,nkc->nc", coefficient, log_proba[held])
        return float((truth[held] * special.log_softmax(pooled, axis=1)).sum())

    return max(_RIDGES, key=score)  # the first, the strongest, where nothing is held out


class Votes(NamedTuple):
    """Class labels, one entry each."""

    row: Array  # (J,): instances, which count from 0
    label: Array  # (J,)
    annotator: Array  # (J,); zeros where annotators are not named
    times: Array  # (J,): how often each was given


def infer_truth(votes: Votes, n_classes: int, log_prior: Callable[[Array], Array]) -> Array:
    """Posterior (N, C) of the true classes by EM; `log_prior` gives the best log prior (N, C), or (C,), for one."""
    n_rows, people = int(votes.row.max()) + 1, int(votes.annotator.max()) + 1
    truth = np.zeros((n_rows, n_classes))
    np.add.at(truth, (votes.row, votes.label), votes.times)
    truth /= truth.sum(axis=1, keepdims=True)
    for _ in range(_MAX_STEPS):
        counts = np.zeros((people, n_classes, n_classes))  # annotator, label, truth
        np.add.at(counts, (votes.annotator, votes.label), truth[votes.row] * votes.times[:, None])
        noise = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
        evidence = np.zeros_like(truth)
        log_noise = np.log(np.maximum(noise, _LEAST))
        np.add.at(evidence, votes.row, log_noise[votes.annotator, votes.label] * votes.times[:, None])
        before, truth = truth, special.softmax(log_prior(truth) + evidence, axis=1)
        if np.abs(truth - before).max() < _TOLERANCE:
            break
    return truth


def dawid_skene(votes: Votes, n_classes: int) -> Array:
    """Posterior of the true classes from labels alone."""
    return infer_truth(votes, n_classes, lambda truth: np.log(np.maximum(truth.mean(axis=0), _LEAST)))


def stacked_truth(votes: Votes, log_proba: Array) -> Array:
    """Coefficients (K,) of stacked log probabilities (N, K, C), inferred together with the annotators' matrices."""
    coefficient = np.zeros(log_proba.shape[1])
    ridge = best_ridge(log_proba, dawid_skene(votes, log_proba.shape[2]))

    def log_prior(truth: Array) -> Array:
        coefficient[:] = conditional_logit(log_proba, truth, ridge)[1]
        return np.asarray(special.log_softmax(np.einsum("k,nkc->nc", coefficient, log_proba), axis=1))

    infer_truth(votes, log_proba.shape[2], log_prior)
    return coefficient


def student_density(mean: Array, y: Array, count: Array) -> Callable[[Array], ContinuousPrediction]:
    """Student t around point predictions (N, C), whose log scale is linear in the prediction, by maximum likelihood."""
    centre, unit, C = mean.mean(axis=0), np.maximum(mean.std(axis=0), 1e-300), mean.shape[1]
    x, residual = _covariate(mean, centre, unit), y - mean
    typical = np.sqrt(np.maximum(np.average(residual**2, axis=0, weights=count), 1e-12 * np.mean(y**2) + 1e-300))

    def loss(parameters: Array) -> float:
        log_scale, slope, dof = parameters[:C], parameters[C], 2 + np.exp(parameters[C + 1])
        square = ((residual / (typical * np.exp(log_scale))) ** 2).sum(axis=1) * np.exp(-2 * slope * x)
        norm = special.gammaln((dof + C) / 2) - special.gammaln(dof / 2) - C / 2 * np.log(dof)
        return -float(count @ (norm - log_scale.sum() - C * slope * x - (dof + C) / 2 * np.log1p(square / dof)))

    bounds = [(-5.0, 5.0)] * C + [(-2.0, 2.0), (-3.0, 6.0)]
    best = optimize.minimize(loss, np.append(np.zeros(C + 1), 1.5), bounds=bounds).x
    scale = np.diag((typical * np.exp(best[:C])) ** 2)
    return partial(_student, centre=centre, unit=unit, scale=scale, slope=best[C], dof=2 + np.exp(best[C + 1]))


def _covariate(mean: Array, centre: Array, unit: Array) -> Array:
    return np.asarray(np.clip(((mean - centre) / unit).mean(axis=1), -_FAR, _FAR))


def _student(mean: Array, centre: Array, unit: Array, scale: Array, slope: float, dof: float) -> ContinuousPrediction:
    stretch = np.exp(2 * slope * _covariate(mean, centre, unit))[:, None, None, None]
    return ContinuousPrediction(np.ones((len(mean), 1)), np.array([dof]), mean[:, None], stretch * scale)
