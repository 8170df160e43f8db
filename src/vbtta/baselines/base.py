"""A fitted baseline, and the rules that pool the logits (N, K, C) of K views into log probabilities (N, C)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction, view_information
from vbtta.metrics import entropy

TEMPERATURES = (0.01, 100.0)  # the range
_SLOPE_RANGE = (1 / TEMPERATURES[1], 1 / TEMPERATURES[0])

Rule = Callable[[Array], Array]  # outputs (N, K, C) of the used views -> log probabilities or means (N, C)


class Fitted(NamedTuple):
    """The fit of a baseline: weights to show, the views that are needed, and the rule that pools those."""

    weights: Array | None  # (K,), (K, C)
    used: list[int]
    rule: Rule


@dataclass(frozen=True, eq=False)
class Baseline:
    """A fitted aggregator; make one with :func:`vbtta.baselines.fit_baseline`.

    Attributes
    ----------
    name : str
        The method.
    task : "classification" or "regression"
    names : K strings
        The views it was fitted on.
    weights : (K,) or (K, C) array, or None
        One weight a view, or one a view and class (output); None where there are none, as for the maximum.
    used : strings
        The views it needs for a prediction.
    n_outputs : int
        C.
    temperature : float
        What log probabilities are divided by; 1 unless the name ends in "+t". Between 0.01 and 100.
    variance : (C,) array or None
        Mean squared residual of the calibration labels (regression).
    """

    name: str
    task: str
    names: tuple[str, ...]
    weights: Array | None
    used: tuple[str, ...]
    n_outputs: int
    rule: Rule
    generated_names: bool = False
    temperature: float = 1.0
    variance: Array | None = None
    classes: Array | None = None

    def __repr__(self) -> str:
        limit = f", temperature at its limit {self.temperature:g}" if self.temperature_at_limit else ""
        return f"Baseline({self.name}, {self.task}: {len(self.used)} of {len(self.names)} views{limit})"

    @property
    def temperature_at_limit(self) -> bool:
        """Whether the likelihood is highest beyond the range: all labels are predicted, or none better than chance.

        Then the limit says little about the predictions' confidence, and more labels are needed.
        """
        return self.temperature in TEMPERATURES

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """Aggregate the views of new inputs into one predictive distribution."""
        outputs = np.asarray(self._needed(predictions).outputs, dtype=np.float64)
        pooled = self.rule(outputs)
        if self.variance is not None:
            return normal_prediction(pooled, self.variance)
        if self.temperature != 1:
            pooled = special.log_softmax(pooled / self.temperature, axis=1)
        classes = predictions.classes if predictions.classes is not None else self.classes
        proba, shares = np.exp(pooled), self._pool_weights()[:, None] * special.softmax(outputs, axis=2)
        return CategoricalPrediction(
            proba, view_information(proba, shares), np.arange(self.n_outputs) if classes is None else classes
        )

    def _needed(self, predictions: ViewPredictions) -> ViewPredictions:
        """The used views, after a check that the predictions match the fit."""
        _, n_views, n_outputs = predictions.outputs.shape
        if (self.generated_names or predictions.generated_names) and n_views != len(self.names):
            raise ValueError(
                f"predictions have {n_views} views but {self.name!r} was fitted on {len(self.names)}; generated names "
                "cannot be matched, so name the views with ViewPredictions(names=[...])"
            )
        missing = [name for name in self.used if name not in predictions.names]
        if missing:
            raise ValueError(f"views {missing} are missing from the predictions; {self.name!r} needs {list(self.used)}")
        if n_outputs != self.n_outputs:
            raise ValueError(f"predictions have {n_outputs} outputs but {self.name!r} was fitted on {self.n_outputs}")
        fitted, given = self.classes, predictions.classes
        if fitted is not None and given is not None and not np.array_equal(fitted, given):
            raise ValueError(
                f"predictions have classes {given.tolist()} but {self.name!r} was fitted on {fitted.tolist()}"
            )
        return predictions.select(self.used)

    def _pool_weights(self) -> Array:
        """Weights of the used views on the simplex, for the views' disagreement: (K,)."""
        equal = np.full(len(self.used), 1 / len(self.used))
        if self.weights is None or self.weights.ndim == 2:
            return equal
        share = self.weights[[self.names.index(name) for name in self.used]]
        return share / share.sum() if (share >= 0).all() and share.sum() > 0 else equal


def normal_prediction(mean: Array, variance: Array) -> ContinuousPrediction:
    """Normal densities of one variance (C,) around point predictions (N, C)."""
    n_inputs, n_outputs = mean.shape
    scale = np.broadcast_to(np.diag(variance), (n_inputs, 1, n_outputs, n_outputs))
    return ContinuousPrediction(np.ones((n_inputs, 1)), np.array([np.inf]), mean[:, None], scale)


def used_views(weights: Array) -> Array:
    """Positions of the views with weight; at least one, which tells how many inputs there are."""
    used = np.flatnonzero(weights if weights.ndim == 1 else weights.any(axis=1))
    return used if used.size else np.array([0])


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
    return np.asarray(special.log_softmax(special.log_softmax(logits, axis=2).max(axis=1), axis=1))


def entropy_pool(logits: Array, tau: float) -> Array:
    """Linear pool with weights of each input proportional to exp(-H(p_k)/tau)."""
    return linear_pool(logits, special.softmax(-entropy(special.softmax(logits, axis=2)) / tau, axis=1))


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
