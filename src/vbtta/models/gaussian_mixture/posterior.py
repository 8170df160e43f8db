"""The mixture for continuous labels: its parameters, its E-step and the fitted model (docs/method, eqs. 1 to 12)."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import ContinuousPrediction, variance_factor
from vbtta.inference import linalg
from vbtta.inference.advi import WeightDraws
from vbtta.inference.em import Block
from vbtta.inference.laplace import WeightInformation
from vbtta.inference.linalg import check_covariance, check_not_negative, check_positive
from vbtta.models.base import Pooling, Posterior
from vbtta.models.parts.annotators import AnnotatorState, LabelPooling, Truth, infer_truth
from vbtta.models.parts.gate import Gate, Lookup
from vbtta.models.parts.standard import Standard, scale_covariate

MIN_RELATIVE_SHARE = 0.1  # of the most supported view's labels


class MixturePrior(NamedTuple):
    """Hyperparameters in standard units."""

    beta: float  # precision of a view's calibration around the common one
    common_scale: float  # of the common calibration's Student-t
    nu: float
    inverse_scale: Annotated[Array, "C C", check_covariance]  # V
    residual_variance: Annotated[Array, "C"]  # sigma_0^2, of a typical view
    concentration: float | None
    affine: bool
    heteroscedastic: bool
    slope_scale: float  # of b, the slope of ln sd in the prediction; 0 where the scale is constant

    @property
    def n_outputs(self) -> int:
        """C."""
        return len(self.residual_variance)

    @property
    def regressors(self) -> slice:
        """Where H's columns stand in the moments of (f, 1, e)."""
        return slice(0 if self.affine else self.n_outputs, 2 * self.n_outputs)


class MixtureState(NamedTuple):
    """The factors of Q and the weights."""

    weights: Annotated[Array, "K"]  # their mean under a Dirichlet; base weights where there is a gate
    weight_counts: Annotated[Array, "K"] | None  # (K,) Dirichlet parameters of Q(w)
    theta_mean: Annotated[Array, "K D"]  # m
    theta_covariance: Annotated[Array, "K D D", check_covariance]  # S_k, given the common calibration
    common_mean: Annotated[Array, "D"]  # m_0
    common_covariance: Annotated[Array, "D D", check_covariance]  # S_0
    dof: Annotated[Array, "K", check_positive]  # nu_k
    inverse_scale: Annotated[Array, "K C C", check_covariance]  # V_k
    scale_slope: Annotated[Array, ""]  # b, at its mode
    slopes: Annotated[Array, "0|F"] = np.zeros(0)  # coefficients of the gate
    tail: Annotated[Array, "", check_not_negative] = np.zeros(())  # degrees of freedom, of Student-t components; else 0
    annotators: AnnotatorState | None = None

    def take(self, views: Array) -> "MixtureState":
        """Some of the views."""
        own = ("weights", "weight_counts", "theta_mean", "theta_covariance", "dof", "inverse_scale")
        return self._replace(**{name: value[views] for name in own if (value := getattr(self, name)) is not None})

    def calibration_covariance(self, beta: float) -> Array:
        """Covariance of theta_k with that of the common calibration: (K, D, D)."""
        follows = beta * self.theta_covariance
        return np.asarray(self.theta_covariance + follows @ self.common_covariance @ follows)

    @property
    def precision(self) -> Array:
        """E[Lambda_k] = nu_k V_k^-1: (K, C, C)."""
        return np.asarray(self.dof[:, None, None] * linalg.inverse_and_log_det(self.inverse_scale)[0])

    @property
    def expected_log_weights(self) -> Array:
        """Ln w_k, or its expectation under the Dirichlet: (K,)."""
        if self.weight_counts is not None:
            return np.asarray(special.digamma(self.weight_counts) - special.digamma(self.weight_counts.sum()))
        with np.errstate(divide="ignore"):
            return np.log(self.weights)


class Density(NamedTuple):
    """ln p~ as a function of (f, 1, e): a constant and two quadratic forms a view."""

    shift: Array  # (C, K): offsets of the calibration
    gain: Array  # (C, K): 1 + slopes
    constant: Array  # (K,)
    log_precision: Array  # (K,): E ln|Lambda|
    residual_form: Array  # (K, C, C): E[Lambda]
    regressor_form: Array  # (K, D, D): E[Lambda] times the covariance of theta, for H's columns
    scale_slope: float  # b
    tail: float

    @classmethod
    def of(cls, state: MixtureState, prior: MixturePrior, log_weights: Array, plug_in: bool = False) -> "Density":
        """The density at a state; with ``plug_in`` calibration and precision are taken as known."""
        C = prior.n_outputs
        inverse, log_det = linalg.inverse_and_log_det(state.inverse_scale)
        precision = state.dof[:, None, None] * inverse
        if plug_in:
            log_precision, form = C * np.log(state.dof) - log_det, np.zeros_like(state.theta_covariance)
        else:
            log_precision = linalg.wishart_log_det(state.dof, log_det, C)
            form = for_regressors(precision, prior.affine) * state.calibration_covariance(prior.beta)
        constant = 0.5 * (log_precision - C * np.log(2 * np.pi)) + log_weights
        shift, gain = calibration(state.theta_mean, C)
        slope, tail = float(state.scale_slope), float(state.tail)
        return cls(shift.T, gain.T, constant, log_precision, precision, form, slope, tail)


class Expectation(NamedTuple):
    """Result of the E-step for the labels of a block (without annotators) or its instances (with them)."""

    features: list[Array | None]  # (K, j) each: Omega^1/2 (f, 1), None for ones, without f where only shifts are fitted
    residual: Array  # (C, K, j): Omega^1/2 e
    repeats: Array  # (j,): counts
    share: Array  # (K, j): responsibilities times counts
    log_evidence: float
    root: Array | None  # (C, K, j): Omega^1/2; None where it is one
    log_omega: Array | None  # (K, j): ln|Omega|/2
    covariate: Array | None  # (K, j): x, where the scale depends on it
    truth: Truth | None
    gate: Lookup | None = None  # of the labels or instances
    precision: Array | None = None  # (K, j): E u, u the relative precision of a label under a Student-t component


def calibration(theta: Array, n_outputs: int) -> tuple[Array, Array]:
    """Offsets and gains (..., C) of calibration parameters (..., D)."""
    if theta.shape[-1] == n_outputs:
        return theta, np.ones_like(theta)
    return theta[..., n_outputs:], 1 + theta[..., :n_outputs]


def for_regressors(precision: Array, affine: bool) -> Array:
    """(K, C, C) matrices repeated over the columns of H = [diag(f), I]: (K, D, D), or to be broadcast to that."""
    return np.tile(precision, (1, 2, 2)) if affine and precision.shape[-1] > 1 else precision


def expectation(
    block: Block,
    density: Density,
    prior: MixturePrior,
    annotators: AnnotatorState | None = None,
    gate: Lookup | None = None,
) -> Expectation:
    """The E-step of a block."""
    # Without annotators z belongs to a label and the residual is the label's; with them z and the truth t belong to an
    # instance, and the residual is that of the truth's mean.
    instance = slice(None) if annotators is not None or block.instance is None else block.instance
    mean = block.mean[:, :, instance]  # (C, K, j)
    root, log_omega, covariate = None, None, None
    if prior.heteroscedastic and block.variance is not None:
        variance = block.variance[:, :, instance] / prior.residual_variance[:, None, None]
        root, log_omega = 1 / np.sqrt(1 + variance), -0.5 * np.log1p(variance).sum(axis=0)
    if prior.slope_scale:
        covariate = scale_covariate(mean, 0)
        log_tilt = (-density.scale_slope * len(mean)) * covariate  # of all outputs
        tilt = np.exp(log_tilt if len(mean) == 1 else log_tilt / len(mean))
        root = np.broadcast_to(tilt, mean.shape) if root is None else root * tilt
        log_omega = log_tilt if log_omega is None else log_omega + log_tilt
    truth, count = None, block.repeats
    residual = density.gain[:, :, None] * mean
    residual += density.shift[:, :, None]
    if annotators is None:
        np.subtract(block.value[:, None], residual, out=residual)
    else:
        view_precision = density.residual_form[:, None]  # (K, 1, C, C)
        if root is not None:
            last = np.moveaxis(root, 0, -1)  # (K, n, C)
            view_precision = last[..., :, None] * view_precision * last[..., None, :]
        # the normal of t loses its (2 pi)^-C/2, which the constant below has, in the integral over t
        truth = infer_truth(block, annotators, residual, view_precision, len(mean) * np.log(2 * np.pi))
        residual, count = truth.mean - residual, np.ones(mean.shape[2])
    features: list[Array | None] = [None] * len(mean)
    if root is not None:
        residual *= root
        features = list(root)
    if prior.affine:
        features = [*(mean if root is None else mean * root), *features]
    log_density = _form(features, density.regressor_form)
    log_density = log_density + (_form(list(residual), density.residual_form) if truth is None else 0.0)
    precision = None
    if density.tail:  # a normal whose precision is Gamma(tail / 2, tail / 2): Q(u | z) is a gamma distribution too
        both = density.tail + len(mean)
        precision = both / (density.tail + log_density)
        log_density = (0.5 * both) * np.log(precision * (density.tail / both))
        log_density += special.gammaln(0.5 * both) - special.gammaln(0.5 * density.tail)
        log_density -= 0.5 * len(mean) * np.log(0.5 * density.tail)
    else:
        log_density *= -0.5
    log_density += density.constant[:, None]
    if log_omega is not None:
        log_density += log_omega
    if truth is not None:
        log_density = log_density + truth.log_evidence
    if gate is not None:
        gate = gate.rows(slice(block.first, block.first + block.mean.shape[2])).rows(instance)
        log_density += gate.offset
    share, log_evidence = responsibilities(log_density, count)
    weights = root, log_omega, covariate, truth, gate, precision
    return Expectation(features, residual, count, share, log_evidence, *weights)


def responsibilities(log_density: Array, count: Array) -> tuple[Array, float]:
    """Responsibilities times counts (in place) and the block's log evidence from ln p~ (K, j)."""
    top = log_density.max(axis=0)
    log_density -= top
    share = np.exp(log_density, out=log_density)
    total = share.sum(axis=0)
    share *= count / total
    return share, float(count @ (top + np.log(total)))


def _form(features: list[Array | None], form: Array) -> Array:
    """a^T F a, (K, j) or (K, 1); features a are (K, j) each, None for ones, which come last."""
    total = np.zeros((len(form), 1))
    for row in reversed(range(len(features))):
        feature = features[row]
        inner = form[:, row, row, None] * (1.0 if feature is None else feature)
        for column, other in enumerate(features[row + 1 :], row + 1):
            inner += 2 * form[:, row, column, None] * (1.0 if other is None else other)
        if feature is not None:
            inner *= feature
        total = np.add(total, inner, out=inner)
    return total


@dataclass(frozen=True)
class MixturePosterior(LabelPooling, Posterior):
    """A fitted continuous mixture: calibrated views, their weights and, where modelled, the annotators."""

    prior: MixturePrior
    state: MixtureState
    standard: Standard
    information: WeightInformation | None
    gate: Gate | None

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return self.state.weights

    @property
    def predictive_weights(self) -> Array:
        """The weights without those of views that hardly any label supports: (K,)."""
        # Under a Dirichlet such a view keeps a positive weight, and the prior variance of its calibration, which is
        # large, would dominate the predictive variance.
        counts = self.state.weight_counts
        if counts is None:
            return self.weights
        labels = counts - (1.0 if self.prior.concentration is None else self.prior.concentration)
        supported = labels >= min(1.0, MIN_RELATIVE_SHARE * labels.max(), labels.max())
        return np.asarray(np.where(supported, self.weights, 0.0) / self.weights[supported].sum())

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture for inputs whose views are the policy's views of positive weight, in order."""
        weights = self.predictive_weights
        used = weights > 0
        kept = used[self.weights > 0]
        weights = np.broadcast_to(weights[used], (len(predictions), int(used.sum())))
        if self.gate is not None:
            weights = self.gate.weights_for(predictions)[:, kept]
            weights = weights / weights.sum(axis=1, keepdims=True)
        if not kept.all():
            predictions = predictions.select([name for name, keep in zip(predictions.names, kept, strict=True) if keep])
        location, scale, dof = self._components(predictions, used)
        if tail := float(self.state.tail):
            scale, dof = variance_factor(dof)[:, None, None] * scale, np.full(len(dof), tail)
        return ContinuousPrediction(weights, dof, location, scale)

    def keep(self, views: Array) -> "MixturePosterior":
        """The same with only some of the views."""
        kept = self.state.take(views)
        kept = kept._replace(weights=kept.weights / kept.weights.sum())
        known = None if self.information is None else self.information.take(views)
        gate = None if self.gate is None else self.gate.keep(views)
        return replace(self, state=kept, information=known, gate=gate)

    def pooling(self) -> Pooling:
        """sum_k w_k (a_k + g_k f_k), a and g the calibration."""
        used, C = self.weights > 0, self.prior.n_outputs
        weights = np.repeat(self.predictive_weights[used][:, None], C, axis=1)
        shift, gain = calibration(self.state.theta_mean[used], C)  # (K, C) each
        scale, offset = self.standard.linear(np.broadcast_to(gain, weights.shape), shift)
        return Pooling("linear", "", scale, offset, weights, self.gate)

    def _components(self, predictions: ViewPredictions, used: Array) -> tuple[Array, Array, Array]:
        """Locations (N, K, C), scale matrices (N, K, C, C) and degrees of freedom (K,) in the labels' units."""
        C = self.prior.n_outputs
        views = self.state.take(used)
        mean = self.standard.apply_to_predictions(predictions.outputs)  # (N, K, C)
        offset, gain = calibration(views.theta_mean, C)
        dof = views.dof + 1 - C
        covariance = views.calibration_covariance(self.prior.beta)
        of_mean = np.broadcast_to(covariance[:, -C:, -C:], (*mean.shape, C))
        if self.prior.affine:  # H Cov(theta) H^T
            row, column = mean[..., :, None], mean[..., None, :]
            of_mean = of_mean + covariance[:, C:, :C] * column
            of_mean += row * (covariance[:, :C, :C] * column + covariance[:, :C, C:])
        noise = views.inverse_scale / dof[:, None, None]
        if self.prior.heteroscedastic:
            if predictions.variance is None:
                raise ValueError("the policy was fitted with heteroscedastic=True: predictions need a variance too")
            variance = predictions.variance / self.standard.prediction_scale**2
            loss = np.sqrt(1 + variance / self.prior.residual_variance)  # omega^-1/2
            noise = loss[..., :, None] * noise * loss[..., None, :]
        if self.prior.slope_scale:
            tilt = np.exp(2 * views.scale_slope * scale_covariate(mean, 2))  # (N, K)
            noise = tilt[..., None, None] * noise
        scale = noise + ((dof - 2) / dof)[:, None, None] * of_mean
        units = self.standard.scale
        return self.standard.location + units * (offset + gain * mean), units[:, None] * scale * units, dof


@dataclass(frozen=True)
class SampledMixturePosterior(WeightDraws, MixturePosterior):
    """A continuous mixture with normal, Student-t or Laplace components."""

    component: str

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive mixture; a Laplace component is a mixture of normals itself."""
        prediction = super().predict(predictions)
        if self.component != "laplace":
            return prediction
        scale = variance_factor(prediction.dof)[:, None, None] * prediction.scale
        size, share = laplace_nodes()
        N, K, C = prediction.location.shape
        return ContinuousPrediction(
            weights=(prediction.weights[:, :, None] * share).reshape(N, -1),
            dof=np.full(K * len(size), np.inf),
            location=np.repeat(prediction.location, len(size), axis=1),
            scale=(scale[:, :, None] * size[:, None, None]).reshape(N, -1, C, C),
        )


def laplace_nodes() -> tuple[Array, Array]:
    """Variances s and shares of the normals that make up a Laplace distribution of unit variance."""
    # A normal whose variance is exponential is a Laplace. The integral over ln s is smooth and falls off at both ends,
    # where the trapezoid rule converges fast; shares sum to 1 and the variance is 1.
    size = np.exp(np.arange(-12.0, 3.6, 0.6))
    share = size * np.exp(-size)
    share = share / share.sum()
    return size / (share @ size), share
