"""Continuous outputs: a mixture of calibrated views by closed-form variational EM (docs/method, eqs. 1 to 12).

    z_ij ~ Categorical(w),   y_ij | z_ij = k ~ Normal(f_ik + H_ik theta_k, (Omega_ik^1/2 Lambda_k Omega_ik^1/2)^-1)
    theta_k ~ Normal(theta_0, I / beta),   theta_0 ~ Student-t of a scale, entry by entry
    Lambda_k ~ Wishart(nu, V),   V the inverse scale

Q(theta_0) Q(theta_k | theta_0) is the exact posterior given responsibilities and precisions: with S_k = G_k^-1,

    theta_0 ~ Normal(m_0, S_0),   theta_k | theta_0 ~ Normal(m_k + beta S_k (theta_0 - m_0), S_k)

A step needs, for every view, the second moments of (f, 1, e) under the responsibilities, e the residual
at the current calibration: enough for theta, the residual at the new one and Lambda without another pass.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference import linalg
from vbtta.inference.blocks import Block, products
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.parts.annotators import AnnotatorState, Truth, infer_truth, summarise
from vbtta.models.parts.gate import Lookup
from vbtta.models.parts.standard import SMALLEST_VARIANCE, ContinuousBlocks

_MAX_COVARIATE = 3.0
_WIDE = 10.0  # scale of the common calibration's prior at the start


SLOPE_SCALE = 0.1  # prior standard deviation of b


class MixturePrior(NamedTuple):
    """Hyperparameters in standard units."""

    beta: float  # precision of a view's calibration around the common one
    common_scale: float  # of the common calibration's Student-t
    nu: float
    inverse_scale: Annotated[Array, "C C"]  # V
    residual_variance: Annotated[Array, "C"]  # sigma_0^2, of the median view
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
    theta_covariance: Annotated[Array, "K D D"]  # S_k, given the common calibration
    common_mean: Annotated[Array, "D"]  # m_0
    common_covariance: Annotated[Array, "D D"]  # S_0
    dof: Annotated[Array, "K"]  # nu_k
    inverse_scale: Annotated[Array, "K C C"]  # V_k
    scale_slope: Annotated[Array, ""]  # b, at its mode
    slopes: Annotated[Array, "0|F"] = np.zeros(0)  # coefficients of the gate

    def take(self, views: Array) -> "MixtureState":
        """Some of the views."""
        return self._replace(
            weights=self.weights[views],
            weight_counts=None if self.weight_counts is None else self.weight_counts[views],
            theta_mean=self.theta_mean[views],
            theta_covariance=self.theta_covariance[views],
            dof=self.dof[views],
            inverse_scale=self.inverse_scale[views],
        )

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


class MixtureStatistics(NamedTuple):
    """Additive sufficient statistics: sums over labels of responsibilities p."""

    log_evidence: Array  # (): sum of logsumexp_k ln p~
    mass: Array  # (K,): sum of p
    moments: Array  # (K, 3C, 3C): sum of p a a^T, a = Omega^1/2 (f, 1, e)
    log_omega: Array  # (): sum of p/2 ln|Omega|
    tilted: Array | None  # (2, K, 3C, 3C): the moments with x p and x^2 p, where the scale depends on x
    tilted_mass: Array | None  # (): sum of x p
    overlap: Array  # (K, K): sum of p p^T, up to a factor
    feature_mass: Array  # (F,): sum of p times features; (0,) without a gate


class Expectation(NamedTuple):
    """Result of the E-step for the labels of a block (without annotators) or its instances (with them)."""

    regressors: list[Array]  # (K, j) each: f, and Omega^1/2 where it is not one
    residual: Array  # (C, K, j): e
    repeats: Array  # (j,): counts
    share: Array  # (K, j): responsibilities times counts
    log_evidence: float
    log_omega: Array | None  # (K, j): ln|Omega|/2
    covariate: Array | None  # (K, j): x, where the scale depends on it
    truth: Truth | None
    gate: Lookup | None = None  # of the labels or instances


class Density(NamedTuple):
    """ln p~ as a function of (f, 1, e): a constant and two quadratic forms a view."""

    shift: Array  # (C, K): offsets of the calibration
    gain: Array  # (C, K): 1 + slopes
    constant: Array  # (K,)
    residual_form: Array  # (K, C, C): E[Lambda]
    regressor_form: Array  # (K, D, D): E[Lambda] spread over the covariance of theta
    scale_slope: float  # b

    @classmethod
    def of(cls, state: MixtureState, prior: MixturePrior, log_weights: Array, plug_in: bool = False) -> "Density":
        """The density at a state; with ``plug_in`` calibration and precision are taken as known."""
        n_outputs = prior.n_outputs
        inverse, log_det = linalg.inverse_and_log_det(state.inverse_scale)
        precision = state.dof[:, None, None] * inverse
        log_precision = linalg.wishart_log_det(state.dof, log_det, n_outputs)
        if plug_in:
            log_precision = n_outputs * np.log(state.dof) - log_det
        constant = 0.5 * (log_precision - n_outputs * np.log(2 * np.pi))
        shift, gain = calibration(state.theta_mean, n_outputs)
        uncertainty = 0.0 if plug_in else state.calibration_covariance(prior.beta)
        form = spread(precision, prior.affine) * np.ones_like(state.theta_covariance) * uncertainty
        return cls(shift.T, gain.T, constant + log_weights, precision, form, float(state.scale_slope))


def calibration(theta: Array, n_outputs: int) -> tuple[Array, Array]:
    """Offsets and gains (..., C) of calibration parameters (..., D)."""
    if theta.shape[-1] == n_outputs:
        return theta, np.ones_like(theta)
    return theta[..., n_outputs:], 1 + theta[..., :n_outputs]


def spread(precision: Array, affine: bool) -> Array:
    """(K, C, C) matrices repeated over the columns of H = [diag(f), I]: (K, D, D), or to be broadcast to that."""
    return np.tile(precision, (1, 2, 2)) if affine and precision.shape[-1] > 1 else precision


def expectation(
    block: Block,
    density: Density | None,
    prior: MixturePrior,
    annotators: AnnotatorState | None = None,
    gate: Lookup | None = None,
) -> Expectation:
    """The E-step of a block; with no density, every view is responsible for the same share."""
    # Without annotators z belongs to a label and the residual is the label's; with them z and the truth t belong to an
    # instance, and the residual is that of the truth's mean.
    instance = block.instance if annotators is None else None
    mean = block.mean if instance is None else block.mean[:, :, instance]  # (C, K, j)
    covariate = scale_covariate(mean, 0) if density is not None and prior.slope_scale else None  # (K, j)
    root = None if density is None else _root_omega(block, instance, prior)  # (C, K, j)
    if density is not None and covariate is not None:
        tilt = np.exp(-density.scale_slope * covariate)
        root = np.broadcast_to(tilt, mean.shape) if root is None else root * tilt
    log_omega = None if root is None else np.log(root).sum(axis=0)  # (K, j): ln|Omega|/2
    if density is None:
        residual = block.value[:, None] - mean
        share = np.broadcast_to(block.repeats / mean.shape[1], mean.shape[1:])
        return Expectation(list(mean) if prior.affine else [], residual, block.repeats, share, 0.0, None, None, None)

    truth = None
    count = block.repeats
    if annotators is None:
        residual = block.value[:, None] - density.shift[:, :, None]  # (C, K, j): e
        residual -= density.gain[:, :, None] * mean
    else:
        calibrated = density.gain[:, :, None] * mean
        calibrated += density.shift[:, :, None]
        truth = _truth(block, density, calibrated, root, annotators)
        residual = truth.mean - calibrated
        count = np.ones(mean.shape[2])
    if root is not None:
        residual *= root
        mean = mean * root
    regressors = list(mean) if prior.affine else []
    if root is not None:
        regressors += list(root)
    form = density.regressor_form
    if root is None:  # columns of ones: their part of the form is linear and constant
        n_slopes = len(regressors)
        log_density = np.empty(mean.shape[1:])
        log_density[:] = (density.constant - 0.5 * form[:, n_slopes:, n_slopes:].sum(axis=(1, 2)))[:, None]
        _subtract_half_form(log_density, regressors, form, 2 * form[:, :n_slopes, n_slopes:].sum(axis=2))
    else:
        log_density = density.constant[:, None] + log_omega
        _subtract_half_form(log_density, regressors, form, None)
    if truth is None:
        _subtract_half_form(log_density, list(residual), density.residual_form, None)
    else:
        log_density += truth.log_evidence
    if gate is not None:
        gate = gate.rows(slice(block.first, block.first + block.mean.shape[2]))
        gate = gate if instance is None else gate.rows(instance)
        log_density += gate.offset
    share, log_evidence = responsibilities(log_density, count)
    return Expectation(regressors, residual, count, share, log_evidence, log_omega, covariate, truth, gate)


def statistics(expected: Expectation) -> MixtureStatistics:
    """Sums over a block's labels (or instances)."""
    share, covariate, tilted, tilted_mass = expected.share, expected.covariate, None, None
    if covariate is not None:
        shares = share * covariate, share * covariate**2
        tilted, tilted_mass = np.stack([_all_moments(expected, one) for one in shares]), shares[0].sum()
    return MixtureStatistics(
        log_evidence=np.asarray(expected.log_evidence),
        mass=share.sum(axis=1),
        moments=_all_moments(expected, share),
        log_omega=np.asarray(0.0 if expected.log_omega is None else np.vdot(share, expected.log_omega)),
        tilted=tilted,
        tilted_mass=tilted_mass,
        overlap=_overlap(share, expected.repeats),
        feature_mass=np.zeros(0) if expected.gate is None else np.einsum("kn,fkn->f", share, expected.gate.values),
    )


def _all_moments(expected: Expectation, share: Array) -> Array:
    """Sums of share a a^T, a = Omega^1/2 (f, 1, e), the truth's covariance included: (K, 3C, 3C)."""
    residual = expected.residual
    n_outputs, n_views, _ = residual.shape
    ones = [None] * n_outputs if expected.log_omega is None else []
    features = [*expected.regressors, *ones, *residual]
    first = 3 * n_outputs - len(features)  # without slopes f is no feature
    moments = np.zeros((n_views, 3 * n_outputs, 3 * n_outputs))
    moments[:, first:, first:] = _moments(share, features)
    if expected.truth is not None:  # e gains the truth's covariance
        covariance = expected.truth.covariance
        if expected.log_omega is not None:
            root = np.moveaxis(np.stack(expected.regressors[-n_outputs:]), 0, -1)  # (K, n, C)
            covariance = root[..., :, None] * covariance * root[..., None, :]
        moments[:, 2 * n_outputs :, 2 * n_outputs :] += np.einsum("kn,kncd->kcd", share, covariance)
    return moments


def _overlap(share: Array, repeats: Array) -> Array:
    """Sum of p p^T: (K, K), up to a factor. With many views only some labels are used: time stays linear in K."""
    every = max(1, len(share) // 16)
    share, repeats = share[:, ::every], repeats[::every]
    return products(share, share if (repeats == 1).all() else share / repeats)


def responsibilities(log_density: Array, count: Array) -> tuple[Array, float]:
    """Responsibilities times counts (in place) and the block's log evidence from ln p~ (K, j)."""
    top = log_density.max(axis=0)
    log_density -= top
    share = np.exp(log_density, out=log_density)
    total = share.sum(axis=0)
    share *= count / total
    return share, float(count @ (top + np.log(total)))


def update(state: MixtureState, total: MixtureStatistics, prior: MixturePrior, plug_in: bool = False) -> MixtureState:
    """The state that maximises the bound factor by factor: all theta, then Lambda at the new theta, then w."""
    # With ``plug_in`` the uncertainty of theta does not enter Lambda: the mode instead of the mean field.
    C, inside = prior.n_outputs, prior.regressors
    moments = total.moments
    regressor = moments[:, inside, inside]  # (K, D, D): sum of p h h^T
    cross = moments[:, inside, 2 * C :]  # (K, D, C): sum of p h e^T
    precision = state.precision
    output = np.arange(regressor.shape[1]) % C  # which output a column of H acts on
    belongs = np.eye(C)[output]  # (D, C)

    beta, unit = prior.beta, np.eye(len(output))
    information = spread(precision, prior.affine) * regressor  # (K, D, D): sum of p H^T Lambda H
    pull = np.einsum("kdc,kdc->kd", precision[:, output], cross)  # sum of p H^T Lambda e
    theta_covariance = linalg.inverse_and_log_det(beta * unit + information)[0]
    follows = beta * theta_covariance  # (K, D, D): how far theta_k moves with theta_0
    square = common_square(state, plug_in)
    common_precision = np.diag(linalg.student_precision(square, prior.common_scale))
    common_precision += np.einsum("kde,kef->df", follows, information)
    common_covariance = linalg.inverse_and_log_det(0.5 * (common_precision + common_precision.T))[0]
    target = pull + np.einsum("kde,ke->kd", information, state.theta_mean)
    common_mean = common_covariance @ np.einsum("kde,ke->d", follows, target)
    change = np.einsum("kde,ke->kd", theta_covariance, pull + beta * (common_mean - state.theta_mean))

    back = -change[:, :, None] * belongs  # (K, D, C): e at the new theta is e + back^T h
    uncertainty = np.zeros_like(follows) if plug_in else theta_covariance + follows @ common_covariance @ follows

    def squares(moments: Array) -> Array:
        """E e e^T at the new theta, summed: (K, C, C)."""
        regressor, cross = moments[:, inside, inside], moments[:, inside, 2 * C :]
        outer = moments[:, 2 * C :, 2 * C :] + np.swapaxes(cross, 1, 2) @ back + np.swapaxes(back, 1, 2) @ cross
        outer += np.swapaxes(back, 1, 2) @ regressor @ back + belongs.T @ (uncertainty * regressor) @ belongs
        return np.asarray(0.5 * (outer + np.swapaxes(outer, 1, 2)))

    inverse_scale, dof = prior.inverse_scale + squares(moments), prior.nu + total.mass
    scale_slope = state.scale_slope
    if total.tilted is not None and total.tilted_mass is not None:
        new_precision = dof[:, None, None] * linalg.inverse_and_log_det(inverse_scale)[0]
        first, second = (float((new_precision * squares(tilted)).sum()) for tilted in total.tilted)
        slope = first - C * float(total.tilted_mass)
        scale_slope = scale_slope + slope_step(float(scale_slope), slope, second, prior.slope_scale)

    counts = None if prior.concentration is None else prior.concentration + total.mass
    weights = total.mass if counts is None else counts
    return MixtureState(
        weights=weights / weights.sum(),
        weight_counts=counts,
        theta_mean=state.theta_mean + change,
        theta_covariance=theta_covariance,
        common_mean=common_mean,
        common_covariance=common_covariance,
        dof=dof,
        inverse_scale=inverse_scale,
        scale_slope=scale_slope,
        slopes=state.slopes,
    )


def scale_covariate(mean: Array, output_axis: int) -> Array:
    """x: the prediction in standard units, averaged over outputs, at most 3 in size."""
    return np.asarray(np.clip(mean.mean(axis=output_axis), -_MAX_COVARIATE, _MAX_COVARIATE))


def slope_step(current: float, first: float, second: float, scale: float) -> float:
    """A step of b that does not lower the expected log density, whose derivatives are `first` and -2 `second`.

    With q the squared distances, q exp(-2 d x) exceeds its tangent by at most 4 d^2 q x^2 (exp(R) - 1 - R) / R^2,
    R = 2 |d| max |x|: a lower bound on the gain of any step d.
    """
    step = (first - current / scale**2) / (2 * second + 1 / scale**2)
    step = float(np.clip(step, -0.5, 0.5))
    while abs(step) > 1e-12:
        reach = 2 * abs(step) * _MAX_COVARIATE
        rise = 0.5 if reach < 1e-4 else (np.expm1(reach) - reach) / reach**2
        gain = step * first - 2 * step**2 * rise * second - ((current + step) ** 2 - current**2) / (2 * scale**2)
        if gain >= 0:
            return step
        step *= 0.7
    return 0.0


def divergence(state: MixtureState, prior: MixturePrior) -> float:
    """KL from the prior of theta, Lambda and, under a Dirichlet, w."""
    prior_term, entropy = calibration_terms(state, prior)
    total = -prior_term - entropy + slope_penalty(state, prior)
    total += linalg.kl_wishart(state.dof, state.inverse_scale, prior.nu, prior.inverse_scale).sum()
    if state.weight_counts is not None and prior.concentration is not None:
        total += linalg.kl_dirichlet(state.weight_counts, np.full_like(state.weight_counts, prior.concentration))
    return float(total)


def slope_penalty(state: MixtureState, prior: MixturePrior) -> float:
    """Minus the log prior of b at its mode, up to a constant."""
    return 0.5 * float(state.scale_slope) ** 2 / prior.slope_scale**2 if prior.slope_scale else 0.0


def common_square(state: MixtureState, plug_in: bool) -> Array:
    """E theta_0^2, entry by entry: (D,)."""
    return np.asarray(state.common_mean**2 + (0.0 if plug_in else np.diagonal(state.common_covariance)))


def calibration_terms(state: MixtureState, prior: MixturePrior, plug_in: bool = False) -> tuple[float, float]:
    """E ln P(theta_0, all theta_k), bounded below where tails are heavy, and the entropy of Q."""
    K, D = state.theta_mean.shape
    squares = ((state.theta_mean - state.common_mean) ** 2).sum()
    log_common = linalg.student_log_density(common_square(state, plug_in), prior.common_scale).sum()
    log_views = 0.5 * K * D * np.log(prior.beta / (2 * np.pi))
    if plug_in:
        return float(log_common + log_views - 0.5 * prior.beta * squares), 0.0
    own = state.theta_covariance
    stays = prior.beta * own - np.eye(D)  # theta_k - theta_0 as a function of theta_0
    spread_out = np.trace(own, axis1=1, axis2=2).sum()
    spread_out += np.einsum("kde,ef,kdf->", stays, state.common_covariance, stays)
    log_dets = np.linalg.slogdet(own)[1].sum() + np.linalg.slogdet(state.common_covariance)[1]
    entropy = 0.5 * ((K + 1) * D * (1 + np.log(2 * np.pi)) + log_dets)
    return float(log_common + log_views - 0.5 * prior.beta * (squares + spread_out)), float(entropy)


def bound_terms(state: MixtureState, total: MixtureStatistics, prior: MixturePrior) -> dict[str, float]:
    """The paper's seven terms, repaired; they sum (J minus Pi) to the bound (docs/method, eq. 11)."""
    C, inside = prior.n_outputs, prior.regressors
    n_views = len(state.theta_mean)
    prior_of_theta, entropy_of_theta = calibration_terms(state, prior)
    inverse, log_det = linalg.inverse_and_log_det(state.inverse_scale)
    precision = state.dof[:, None, None] * inverse
    log_precision = linalg.wishart_log_det(state.dof, log_det, C)
    density = Density.of(state, prior, state.expected_log_weights)
    error = np.einsum("kcd,kcd->", precision, total.moments[:, 2 * C :, 2 * C :])
    error += np.einsum("kde,kde->", density.regressor_form, total.moments[:, inside, inside])
    used = total.mass > 0
    terms = {
        "J_S": 0.5 * total.mass @ log_precision
        - 0.5 * C * np.log(2 * np.pi) * total.mass.sum()
        + total.log_omega
        - 0.5 * error,
        "J_z": total.mass[used] @ state.expected_log_weights[used],
        "J_mu": prior_of_theta,
        "J_Sigma": n_views
        * linalg.wishart_log_normaliser(np.asarray(prior.nu), np.linalg.slogdet(prior.inverse_scale)[1], C)
        + 0.5 * (prior.nu - C - 1) * log_precision.sum()
        - 0.5 * np.einsum("cd,kcd->", prior.inverse_scale, precision),
        "Pi_mu": -entropy_of_theta,
        "Pi_Sigma": (
            linalg.wishart_log_normaliser(state.dof, log_det, C)
            + 0.5 * (state.dof - C - 1) * log_precision
            - 0.5 * state.dof * C
        ).sum(),
    }
    terms["Pi_z"] = terms["J_S"] + terms["J_z"] - total.log_evidence  # sum of p ln p, as ln p = ln p~ - logsumexp
    if prior.slope_scale:
        terms["penalty"] = slope_penalty(state, prior)
    if state.weight_counts is not None and prior.concentration is not None:
        terms["KL_w"] = linalg.kl_dirichlet(state.weight_counts, np.full(n_views, prior.concentration))
    return {name: float(value) for name, value in terms.items()}


def start(data: ContinuousBlocks, spec: GaussianMixture) -> tuple[MixturePrior, MixtureState]:
    """Prior and first state: equal responsibilities, precisions from the residuals, uniform weights."""
    C, K = data.n_outputs, data.n_views
    prior = MixturePrior(
        beta=spec.beta,
        common_scale=math.sqrt(2 / spec.beta) if spec.common_scale is None else spec.common_scale,
        nu=C + 1 + min(data.n_labels, 8) if spec.nu is None else spec.nu,
        inverse_scale=np.eye(C),
        residual_variance=np.ones(C),
        concentration=spec.concentration,
        affine=spec.link == "affine",
        heteroscedastic=spec.heteroscedastic and data.has_variance,
        slope_scale=SLOPE_SCALE if spec.scale != "constant" else 0.0,
    )
    if prior.nu <= C + 1:
        raise ValueError(f"nu must exceed C + 1 = {C + 1}, or a view's predictive variance is infinite; got {prior.nu}")
    total = data.total(lambda block: statistics(expectation(block, None, prior)))
    variance = residual_variance(total.moments, C, prior.affine, data.n_labels)  # (K, C)
    if spec.v is not None and np.asarray(spec.v).size not in (1, C):
        raise ValueError(f"v must be one number, or one for each of the {C} output(s); got {spec.v!r}")
    typical = np.median(variance, axis=0) if spec.v is None else np.asarray(spec.v) / data.standard.scale**2
    typical = np.maximum(np.broadcast_to(typical, (C,)), SMALLEST_VARIANCE)
    prior = prior._replace(inverse_scale=prior.nu * np.diag(typical), residual_variance=typical)
    size = 2 * C if prior.affine else C
    flat = MixtureState(
        weights=np.full(K, 1 / K),
        weight_counts=None,
        theta_mean=np.zeros((K, size)),
        theta_covariance=np.zeros((K, size, size)),
        common_mean=np.zeros(size),
        common_covariance=np.zeros((size, size)),
        dof=np.ones(K),
        inverse_scale=np.eye(C) * np.maximum(variance, typical * 1e-3)[:, :, None],
        scale_slope=np.zeros(()),
    )
    # a wide prior: from a common calibration that is far off, shrunken to zero, EM might not return
    return prior, update(flat, total, prior._replace(common_scale=max(_WIDE, prior.common_scale)))


def residual_variance(moments: Array, n_outputs: int, affine: bool, n_labels: float) -> Array:
    """Residual variance of every view and output around its own least-squares calibration: (K, C).

    What the calibration explains counts as the residual of one more label: with two labels it explains all.
    """
    f, one, e = (np.arange(n_outputs) + part * n_outputs for part in range(3))
    mean = moments / moments[:, one[0], one[0]][:, None, None]
    square, explained = mean[:, e, e], mean[:, one, e] ** 2
    if affine:
        own = mean[:, f, f] - mean[:, f, one] ** 2
        covariance = mean[:, f, e] - mean[:, f, one] * mean[:, one, e]
        varies = own > 1e-12 * mean[:, f, f]
        explained = explained + np.divide(covariance**2, own, out=np.zeros_like(own), where=varies)
    n_left = max(n_labels - (2.0 if affine else 1.0), 1.0)
    return np.asarray((np.maximum(square - explained, 0) * n_labels + explained) / n_left)


def _root_omega(block: Block, instance: Array | None, prior: MixturePrior) -> Array | None:
    """Omega^1/2 with omega = 1/(1 + g/sigma_0^2), an input's share of confidence in a view: (C, K, j)."""
    if not prior.heteroscedastic or block.variance is None:
        return None
    variance = block.variance if instance is None else block.variance[:, :, instance]
    return np.asarray(1 / np.sqrt(1 + variance / prior.residual_variance[:, None, None]))


def _truth(block: Block, density: Density, calibrated: Array, root: Array | None, annotators: AnnotatorState) -> Truth:
    """Q(t | z) of a block; the evidence leaves out what the density's constant holds."""
    precision = density.residual_form[:, None]  # (K, 1, C, C)
    if root is not None:
        last = np.moveaxis(root, 0, -1)  # (K, n, C)
        precision = last[..., :, None] * precision * last[..., None, :]
    nothing = np.zeros((1, 1))
    truth = infer_truth(calibrated, precision, nothing, summarise(block, annotators))
    # the normal of t loses its (2 pi)^-C/2, which the constant has, in the integral over t
    return truth._replace(log_evidence=truth.log_evidence + 0.5 * len(calibrated) * np.log(2 * np.pi))


def _subtract_half_form(target: Array, features: list[Array], form: Array, linear: Array | None) -> None:
    """Subtract (a^T F a + l^T a)/2 from the target (K, j), in place; features a are (K, j) each."""
    for row, feature in enumerate(features):
        inner = feature * (-0.5 * form[:, row, row, None])
        if linear is not None:
            inner -= 0.5 * linear[:, row, None]
        for column in range(row):
            inner -= form[:, row, column, None] * features[column]
        inner *= feature
        target += inner


def _moments(share: Array, features: list[Array | None]) -> Array:
    """Sums of share a a^T over labels: (K, F, F); None stands for a feature of ones."""
    n_features = len(features)
    moments = np.empty((len(share), n_features, n_features))
    for row, feature in enumerate(features):
        weighted = share if feature is None else share * feature
        for column in range(row, n_features):
            other = features[column]
            value = weighted.sum(axis=1) if other is None else np.vecdot(weighted, other)
            moments[:, row, column] = moments[:, column, row] = value
    return moments
