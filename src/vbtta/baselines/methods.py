"""The methods: from labelled outputs of the views to weights and a rule that pools them. A new baseline goes in here.

A rule maps the outputs (N, K, C) of the views it uses to log probabilities or, in a regression, means (N, C).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.baselines import solvers
from vbtta.baselines.solvers import Votes
from vbtta.data.labels import Array
from vbtta.distributions import ContinuousPrediction
from vbtta.metrics import entropy

_SLOPE_RANGE = (0.01, 100.0)  # of inverse temperatures
_GREEDY_STEPS = 100
_CONFIDENCES = np.append(np.linspace(0.3, 0.99, 70), 1 - np.geomspace(9e-3, 1e-5, 30)).tolist()  # that stop early
_LOG_TAU_RANGE = (np.log(1e-2), np.log(1e2))
Rule = Callable[[Array], Array]


class Sample(NamedTuple):
    """A calibration sample: of classes one row a labelled instance, of numbers one a label."""

    outputs: Array  # (J, K, C)
    target: Array  # (J, C): how often each class was given, or numbers
    times: Array  # (J,): how often labels were given
    identity: int | None  # position of the unaugmented view
    votes: Votes | None = None  # class labels with their annotators

    @property
    def n_views(self) -> int:
        """K."""
        return int(self.outputs.shape[1])

    @property
    def log_proba(self) -> Array:
        """Log probabilities of the views: (J, K, C)."""
        return np.asarray(special.log_softmax(self.outputs, axis=2))


class Fitted(NamedTuple):
    """The fit of a baseline: weights to show, the views that are needed, and the rule that pools those."""

    weights: Array | None  # (K,), (K, C)
    used: list[int]
    rule: Rule
    passes: Rule | None = None  # outputs of the used views to the number of them that is needed (N,), where that varies
    density: Callable[[Array], ContinuousPrediction] | None = None  # of point predictions; normal where there is none


def pooled(weights: Array, rule: Callable[..., Array]) -> Fitted:
    """A rule of weighted views; at least one is used, which tells how many inputs there are."""
    used = np.flatnonzero(weights if weights.ndim == 1 else weights.any(axis=1))
    used = used if used.size else np.array([0])
    return Fitted(weights, used.tolist(), partial(rule, weights=weights[used]))


def _alone(data: Sample, view: Any) -> Array:
    return np.asarray(np.eye(data.n_views)[view])


def _uniform(data: Sample) -> Array:
    return np.full(data.n_views, 1 / data.n_views)


def _learning_loss(data: Sample, loss: Callable[[Array], Array], pool: Callable[..., Array]) -> Fitted:
    """The m views of smallest predicted loss, averaged; of m = 1, 2, 4, ... that of smallest calibration loss."""
    places = slice(None) if data.identity is None else slice(data.identity, data.identity + 1)
    seen = data.outputs[:, places].mean(axis=1)
    unit = np.where(seen.std(axis=0) > 0, seen.std(axis=0), 1.0)
    losses = np.stack([loss(pool(data.outputs, weights=np.eye(data.n_views)[k])) for k in range(data.n_views)], axis=1)
    root = np.sqrt(data.times)[:, None]
    design = np.concatenate([np.ones_like(root), seen / unit], axis=1) * root
    gram = design.T @ design + np.diag(np.append(1e-9, np.ones(len(unit))))
    slopes = np.linalg.solve(gram, design.T @ (losses * root))  # (C + 1, K)
    slopes[1:] /= unit[:, None]
    rule = partial(lowest_loss_pool, places=places, slopes=slopes, pool=pool)
    sizes = [2**power for power in range(int(np.log2(data.n_views)) + 1)]
    best = min(sizes, key=lambda m: float(data.times @ loss(rule(data.outputs, m=m))))
    return Fitted(None, list(range(data.n_views)), partial(rule, m=best))


def lowest_loss_pool(outputs: Array, places: slice, slopes: Array, pool: Callable[..., Array], m: int) -> Array:
    """The average of the m views of smallest loss, as slopes (C + 1, K) predict it from the views at `places`."""
    predicted = slopes[0] + outputs[:, places].mean(axis=1) @ slopes[1:]
    rank = np.argsort(np.argsort(predicted, axis=1, kind="stable"), axis=1)
    return pool(outputs, weights=(rank < m)[:, :, None] / m)


# -- classification -------------------------------------------------------------------------------


def linear_pool(logits: Array, weights: Array) -> Array:
    """Ln sum_k w_k softmax(z_k), w on the simplex: (K,), or (N, K, 1) where it differs by input."""
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights if weights.ndim == 3 else weights[:, None])
    return np.asarray(special.logsumexp(special.log_softmax(logits, axis=2) + log_weights, axis=1))


def weighted_sum(outputs: Array, weights: Array) -> Array:
    """sum_k w_k f_k with weights (K,), (K, C) or, where they differ by input, (N, K, 1): (N, C)."""
    return np.asarray((outputs * (weights[:, None] if weights.ndim == 1 else weights)).sum(axis=1))


def logit_pool(logits: Array, weights: Array) -> Array:
    """Ln softmax(sum_k theta_k z_k), with theta (K,) or one a class (K, C)."""
    return np.asarray(special.log_softmax(weighted_sum(logits, weights), axis=1))


def maximum_pool(logits: Array) -> Array:
    """Elementwise maximum of the views' probabilities, renormalised."""
    return np.asarray(special.log_softmax(special.log_softmax(logits, axis=2).max(axis=1), axis=1))


def entropy_pool(logits: Array, tau: float) -> Array:
    """Linear pool with weights of each input proportional to exp(-H(p_k)/tau)."""
    return linear_pool(logits, special.softmax(-entropy(special.softmax(logits, axis=2)) / tau, axis=1)[:, :, None])


def best_slope(
    log_proba: Array, target: Array, slope: float = _SLOPE_RANGE[1], rtol: float = 1e-12
) -> tuple[float, float]:
    """Largest log-likelihood of label counts (N, C) under softmax(slope * log_proba), and the slope 1 / T."""
    # Newton's method: concave in the slope, with derivatives sum_nc t_nc (l_nc - E_n l) and -sum_n t_n Var_n(l).
    weight = target.sum(axis=1)
    linear = float(np.vdot(target, log_proba))
    for _ in range(50):
        p = np.exp(slope * log_proba)  # logarithms of probabilities do not overflow
        normaliser = p.sum(axis=1)
        p *= log_proba
        first = p.sum(axis=1) / normaliser
        second = np.einsum("nc,nc->n", p, log_proba) / normaliser - first**2
        gradient, curvature = linear - float(weight @ first), float(weight @ second)
        value = slope * linear - float(weight @ np.log(normaliser))
        step = gradient / max(curvature, 1e-300)
        if abs(step) < rtol * slope:
            return value + 0.5 * gradient * step, slope + step
        before = slope
        slope = float(np.clip(slope + step, max(0.5 * slope, _SLOPE_RANGE[0]), min(2 * slope, _SLOPE_RANGE[1])))
        if slope == before:  # a limit
            break
    return value, slope


def n_right(target: Array, log_proba: Array) -> float:
    """How many of the labels (N, C) are the most probable class."""
    return float(np.take_along_axis(target, log_proba.argmax(axis=1)[:, None], axis=1).sum())


def _aug_or_class_tta(data: Sample) -> Fitted:
    """AugTTA or ClassTTA: whichever is right more often on a fifth of the instances that neither was trained on."""
    order = np.random.default_rng(0).permutation(len(data.outputs))
    n_held = max(1, len(order) // 5)
    held, rest = order[:n_held], np.sort(order[n_held:])
    training = data._replace(outputs=data.outputs[rest], target=data.target[rest]) if len(rest) else data

    def score(fitted: Fitted) -> tuple[float, float]:
        log_proba = fitted.rule(data.outputs[held][:, fitted.used])
        return n_right(data.target[held], log_proba), float((data.target[held] * log_proba).sum())

    return max((CLASSIFICATION[name](training) for name in ("aug_tta", "class_tta")), key=score)


def _greedy(data: Sample) -> Array:
    """How often greedy search on the calibrated log-likelihood takes every view into the running mean."""
    proba = special.softmax(data.outputs, axis=2)
    times = np.zeros(data.n_views)
    total = np.zeros_like(data.target)  # (N, C)
    slope = np.ones(data.n_views)  # inverse temperatures, each from its candidate's last fit
    for step in range(_GREEDY_STEPS):
        score = np.empty(data.n_views)
        for k in range(data.n_views):
            mean = np.log(np.maximum((total + proba[:, k]) / (step + 1), 1e-300))
            score[k], slope[k] = best_slope(mean, data.target, slope[k], rtol=1e-3)
        best = int(score.argmax())
        total += proba[:, best]
        times[best] += 1
    return np.asarray(times / times.sum())


def _entropy(data: Sample) -> Fitted:
    """Weights of each input proportional to exp(-H(p_k)/tau), tau by maximum likelihood."""
    row, label = np.nonzero(data.target)
    proba = special.softmax(data.outputs, axis=2)
    disorder, likelihood, count = entropy(proba)[row], proba[row, :, label], data.target[row, label]  # (J, K) twice

    def loss(log_tau: float) -> float:
        weights = special.softmax(-disorder / np.exp(log_tau), axis=1)
        return -float(count @ np.log(np.maximum((weights * likelihood).sum(axis=1), 1e-300)))

    best = optimize.minimize_scalar(loss, bounds=_LOG_TAU_RANGE, method="bounded", options={"xatol": 1e-4})
    return Fitted(None, list(range(data.n_views)), partial(entropy_pool, tau=float(np.exp(best.x))))


def staged_pool(logits: Array, threshold: float, order: list[int], ends: Array, count: bool = False) -> Array:
    """Log of the mean of the first views, or their number: the first of `ends` that is confident, else the last."""
    totals = special.softmax(logits[:, order], axis=2).cumsum(axis=1)[:, ends - 1]
    means = totals / ends[:, None]  # (N, M, C)
    confident = means.max(axis=2) >= threshold
    confident[:, -1] = True
    last = confident.argmax(axis=1)
    return np.asarray(ends[last] if count else np.log(np.maximum(means[np.arange(len(means)), last], 1e-300)))


def _stopped(data: Sample, sizes: list[int]) -> Fitted:
    """Views in stages of these sizes, the identity first; an input stops when their mean is confident."""
    first = data.identity or 0
    order = [first, *(k for k in range(data.n_views) if k != first)]
    stage = partial(staged_pool, order=order, ends=np.cumsum([size for size in sizes if size]))

    hits = (n_right(data.target, stage(data.outputs, threshold=value)) for value in (np.inf, *_CONFIDENCES))
    full = next(hits)
    threshold = next((value for value, right in zip(_CONFIDENCES, hits, strict=False) if right >= full), np.inf)
    rule = partial(stage, threshold=threshold)
    return Fitted(None, list(range(data.n_views)), rule, partial(rule, count=True))


def _mixture_mle(data: Sample) -> Array:
    row, label = np.nonzero(data.target)
    return solvers.mixture_weights(data.log_proba[row, :, label], data.target[row, label])


def _noisy(data: Sample, views: Any) -> Array:
    """Coefficients of some views, inferred together with the annotators' confusion matrices."""
    assert data.votes is not None
    coefficients = np.zeros(data.n_views)
    coefficients[views] = solvers.stacked_truth(data.votes, data.log_proba[:, views])
    return coefficients


def _after_dawid_skene(data: Sample) -> Array:
    assert data.votes is not None
    truth = solvers.dawid_skene(data.votes, data.outputs.shape[2])
    return solvers.conditional_logit(data.log_proba, truth, solvers.best_ridge(data.log_proba, truth))[1]


CLASSIFICATION: dict[str, Callable[[Sample], Fitted]] = {
    "original": lambda data: pooled(_alone(data, data.identity), linear_pool),
    "uniform": lambda data: pooled(_uniform(data), linear_pool),
    "geometric": lambda data: pooled(_uniform(data), logit_pool),  # softmax of mean ln p_k = of mean z_k
    "max": lambda data: Fitted(None, list(range(data.n_views)), maximum_pool),
    "best_view": lambda data: pooled(
        _alone(data, np.einsum("nc,nkc->k", data.target, data.log_proba).argmax()), linear_pool
    ),
    "aug_tta": lambda data: pooled(solvers.train_view_weights(data.outputs, data.target), logit_pool),
    "class_tta": lambda data: pooled(solvers.train_class_weights(data.outputs, data.target), logit_pool),
    "aug_or_class_tta": _aug_or_class_tta,
    "greedy": lambda data: pooled(_greedy(data), linear_pool),
    "entropy": _entropy,
    "learning_loss": lambda data: _learning_loss(
        data, lambda log_proba: -(data.target * log_proba).sum(axis=1) / data.times, linear_pool
    ),
    "adaptta": lambda data: _stopped(data, [1] * data.n_views),
    "selective_tta": lambda data: _stopped(data, [1, data.n_views - 1]),
    "bma": lambda data: pooled(solvers.average_logit(data.log_proba, data.target), logit_pool),
    "mixture_mle": lambda data: pooled(_mixture_mle(data), linear_pool),
    "original_noise": lambda data: pooled(_noisy(data, [data.identity]), logit_pool),
    "raykar": lambda data: pooled(_noisy(data, list(range(data.n_views))), logit_pool),
    "dawid_skene": lambda data: pooled(_after_dawid_skene(data), logit_pool),
}

# -- regression -----------------------------------------------------------------------------------


def residual_variance(residual: Array, y: Array, count: Array) -> Array:
    """Mean squared residual of every output, (C,): the maximum-likelihood variance about the prediction."""
    # Kept above 1e-12 times the labels' own mean square, so that a perfect fit still has a density.
    share = count / count.sum()
    floor = np.maximum(1e-12 * (share @ y**2), np.finfo(np.float64).tiny)
    return np.asarray(np.maximum(share @ residual**2, floor))


def normal_prediction(mean: Array, variance: Array) -> ContinuousPrediction:
    """Normal densities of one variance (C,) around point predictions (N, C)."""
    n_inputs, n_outputs = mean.shape
    scale = np.broadcast_to(np.diag(variance), (n_inputs, 1, n_outputs, n_outputs))
    return ContinuousPrediction(np.ones((n_inputs, 1)), np.array([np.inf]), mean[:, None], scale)


def _best_view(data: Sample) -> Array:
    """The view with the best calibration log-likelihood under its own residual density."""
    y, residual = data.target, data.target[:, None] - data.outputs
    score = [np.log(residual_variance(residual[:, k], y, data.times)).sum() for k in range(data.n_views)]
    return _alone(data, np.argmin(score))


def _by_output(data: Sample, solve: Callable[[Array, Array, Array], Array]) -> Array:
    """Solve for every output alone, from (J, K) outputs, (J,) labels and their counts."""
    columns = [solve(data.outputs[:, :, c], data.target[:, c], data.times) for c in range(data.target.shape[1])]
    return np.asarray(columns[0]) if len(columns) == 1 else np.stack(columns, axis=1)


def _nnls(outputs: Array, y: Array, count: Array) -> Array:
    """Non-negative least squares: no intercept, weights need not sum to 1."""
    root = np.sqrt(count)
    return np.asarray(optimize.nnls(outputs * root[:, None], y * root)[0])


def _nnls_t(data: Sample) -> Fitted:
    """The same with a Student t whose scale depends on the prediction."""
    fitted = REGRESSION["nnls"](data)
    mean = fitted.rule(data.outputs[:, fitted.used])
    return fitted._replace(density=solvers.student_density(mean, data.target, data.times))


REGRESSION: dict[str, Callable[[Sample], Fitted]] = {
    "original": lambda data: pooled(_alone(data, data.identity), weighted_sum),
    "uniform": lambda data: pooled(_uniform(data), weighted_sum),
    "best_view": lambda data: pooled(_best_view(data), weighted_sum),
    "learning_loss": lambda data: _learning_loss(
        data,
        lambda mean: ((data.target - mean) ** 2 / residual_variance(data.target, data.target, data.times)).sum(axis=1),
        weighted_sum,
    ),
    "bma": lambda data: pooled(_by_output(data, solvers.average_linear), weighted_sum),
    "nnls": lambda data: pooled(_by_output(data, _nnls), weighted_sum),
    "nnls_t": _nnls_t,
}
