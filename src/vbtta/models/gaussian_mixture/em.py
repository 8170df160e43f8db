"""EM for the mixture of continuous labels: closed forms for every factor, with or without annotators (eqs. 4 to 11)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import special
from scipy.linalg import block_diag

from vbtta.data.labels import Array
from vbtta.inference import laplace, linalg
from vbtta.inference.em import EM, Ascent, Block, Problem, ascend, extrapolated_weights, products, vanishing_weights
from vbtta.inference.laplace import WeightInformation
from vbtta.inference.linalg import Reader, from_log_cholesky, log_cholesky
from vbtta.models.base import Posterior, Source, of_kind
from vbtta.models.gaussian_mixture import posterior as e_step
from vbtta.models.gaussian_mixture.posterior import MixturePosterior, MixturePrior, MixtureState
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorStatistics
from vbtta.models.parts.gate import Gate, GateData, Lookup, weight_scores, with_gate
from vbtta.models.parts.standard import SLOPE_SCALE, SMALLEST_VARIANCE, ContinuousBlocks, slope_step

_FIRST_TAIL, _TAILS = 4.0, np.geomspace(0.05, 200, 100) + 2  # degrees of freedom of Student-t components
_START_SCALE = 10.0  # of the common calibration's prior at the start, at least
_MIN_START_WEIGHT = 1e-3  # shared by all views, at a start from another fit: EM does not move weights away from zero
_INTERVAL_LABELS = 100_000  # labels from which intervals are estimated, at most
_COMMON_LABELS = 20  # that a typical view's residual variance counts for in that of all views
_SCREENING_ROUNDS = 3  # of a few steps each
_SCREENING_LABELS = 20_000  # labels from which the prior's scale is estimated, at most


class MixtureStatistics(NamedTuple):
    """Additive sufficient statistics: sums over labels of responsibilities p."""

    log_evidence: Array  # (): sum of logsumexp_k ln p~
    mass: Array  # (K,): sum of p
    moments: Array  # (1, K, 3C, 3C): sum of p a a^T, a = Omega^1/2 (f, 1, e); then with x p, x^2 p where x is in use
    log_omega: Array  # (): sum of p/2 ln|Omega|
    covariate_mass: Array  # (): sum of x p
    overlap: Array  # (K, K): sum of p p^T, up to a factor
    feature_mass: Array  # (F,): sum of p times features; (0,) without a gate
    log_tail: Array  # (): sum of p (ln u - u), u = E u of Student-t components
    annotators: AnnotatorStatistics | None = None


def statistics(expected: e_step.Expectation) -> MixtureStatistics:
    """Sums over a block's labels (or instances)."""
    share, x, u = expected.share, expected.covariate, expected.precision
    shares = [share if u is None else share * u]
    if x is not None:
        shares += [shares[0] * x, shares[0] * x**2]
    every = max(1, len(share) // 16)  # with many views the overlap is that of some labels: time stays linear in K
    subsample, repeats = share[:, ::every], expected.repeats[::every]
    return MixtureStatistics(
        log_evidence=np.asarray(expected.log_evidence),
        mass=share.sum(axis=1),
        moments=_moments(shares, expected),
        log_omega=np.asarray(0.0 if expected.log_omega is None else np.vdot(share, expected.log_omega)),
        covariate_mass=np.asarray(0.0 if x is None else np.vdot(share, x)),
        overlap=products(subsample, subsample if (repeats == 1).all() else subsample / repeats),
        feature_mass=np.zeros(0) if expected.gate is None else np.einsum("kn,fkn->f", share, expected.gate.values),
        log_tail=np.asarray(0.0 if u is None else np.vdot(share, np.log(u) - u)),
    )


def _moments(shares: list[Array], expected: e_step.Expectation) -> Array:
    """Sums of share a a^T, a = Omega^1/2 (f, 1, e), the truth's covariance included: (len(shares), K, 3C, 3C)."""
    C, K, _ = expected.residual.shape
    features = [*expected.features, *expected.residual]
    first = 3 * C - len(features)  # without slopes f is no feature
    moments = np.zeros((len(shares), K, 3 * C, 3 * C))
    for share, table in zip(shares, moments, strict=True):
        for row, feature in enumerate(features, first):
            weighted = share if feature is None else share * feature
            for column, other in enumerate(features[row - first :], row):
                value = weighted.sum(axis=1) if other is None else np.vecdot(weighted, other)
                table[:, row, column] = table[:, column, row] = value
    if expected.truth is not None:  # e gains the truth's covariance
        covariance = expected.truth.covariance
        if expected.root is not None:
            root = np.moveaxis(expected.root, 0, -1)  # (K, n, C)
            covariance = root[..., :, None] * covariance * root[..., None, :]
        moments[..., 2 * C :, 2 * C :] += np.stack([np.einsum("kn,kncd->kcd", share, covariance) for share in shares])
    return moments


def update(state: MixtureState, total: MixtureStatistics, prior: MixturePrior, plug_in: bool = False) -> MixtureState:
    """The state that maximises the bound factor by factor: all theta, then Lambda at the new theta, then w."""
    # With ``plug_in`` the uncertainty of theta does not enter Lambda: the mode instead of the mean field.
    C, inside = prior.n_outputs, prior.regressors
    regressor = total.moments[..., inside, inside]  # (., K, D, D): sum of p h h^T
    cross = total.moments[..., inside, 2 * C :]  # (., K, D, C): sum of p h e^T
    output = np.arange(regressor.shape[-1]) % C  # which output a column of H acts on
    belongs = np.eye(C)[output]  # (D, C)

    beta, precision = prior.beta, state.precision
    information = e_step.for_regressors(precision, prior.affine) * regressor[0]  # (K, D, D): sum of p H^T Lambda H
    pull = np.einsum("kdc,kdc->kd", precision[:, output], cross[0])  # sum of p H^T Lambda e
    theta_covariance = linalg.inverse_and_log_det(beta * np.eye(len(output)) + information)[0]
    follows = beta * theta_covariance  # (K, D, D): how far theta_k moves with theta_0
    common_precision = np.einsum("kde,kef->df", follows, information)
    common_precision += np.diag(linalg.student_precision(_common_square(state, plug_in), prior.common_scale))
    common_covariance = linalg.inverse_and_log_det(0.5 * (common_precision + common_precision.T))[0]
    target = pull + np.einsum("kde,ke->kd", information, state.theta_mean)
    common_mean = common_covariance @ np.einsum("kde,ke->d", follows, target)
    change = np.einsum("kde,ke->kd", theta_covariance, pull + beta * (common_mean - state.theta_mean))

    back = -change[:, :, None] * belongs  # (K, D, C): e at the new theta is e + back^T h
    turned = np.swapaxes(back, 1, 2)
    squares = total.moments[..., 2 * C :, 2 * C :] + turned @ cross + np.swapaxes(cross, -1, -2) @ back
    squares += turned @ regressor @ back
    if not plug_in:
        uncertainty = theta_covariance + follows @ common_covariance @ follows
        squares += belongs.T @ (uncertainty * regressor) @ belongs
    squares = 0.5 * (squares + np.swapaxes(squares, -1, -2))  # (., K, C, C): sum of p E e e^T at the new theta
    inverse_scale, dof = prior.inverse_scale + squares[0], prior.nu + total.mass
    scale_slope = state.scale_slope
    if prior.slope_scale:
        new_precision = dof[:, None, None] * linalg.inverse_and_log_det(inverse_scale)[0]
        first, second = (float((new_precision * tilted).sum()) for tilted in squares[1:])
        slope = first - C * float(total.covariate_mass)
        scale_slope = scale_slope + slope_step(float(scale_slope), slope, second, prior.slope_scale)

    counts = None if prior.concentration is None else prior.concentration + total.mass
    weights = total.mass if counts is None else counts
    theta = state.theta_mean + change, theta_covariance, common_mean, common_covariance
    last = state.slopes, _update_tail(float(state.tail), total, C), state.annotators
    return MixtureState(weights / weights.sum(), counts, *theta, dof, inverse_scale, scale_slope, *last)


def _update_tail(tail: float, total: MixtureStatistics, n_outputs: int) -> Array:
    """The degrees of freedom of Student-t components on a grid that raise the bound most, or the current ones."""
    if not tail:
        return np.zeros(())
    shape, grid, n_labels = 0.5 * (tail + n_outputs), np.append(tail, _TAILS), total.mass.sum()
    half, log_tail = 0.5 * grid, total.log_tail + n_labels * (special.digamma(shape) - math.log(shape))  # E ln u - E u
    value = n_labels * (half * np.log(half) - special.gammaln(half)) + half * log_tail - _tail_penalty(grid)
    return np.asarray(grid[np.argmax(value)])


def _tail_penalty(tail: Any) -> Any:
    """Minus the log prior of degrees of freedom: a gamma distribution of shape 2 and rate 0.1, from 2 on."""
    return 0.1 * (tail - 2) - np.log(0.01 * (tail - 2))


def _common_square(state: MixtureState, plug_in: bool) -> Array:
    """E theta_0^2, entry by entry: (D,)."""
    return np.asarray(state.common_mean**2 + (0.0 if plug_in else np.diagonal(state.common_covariance)))


def _calibration_terms(state: MixtureState, prior: MixturePrior, plug_in: bool = False) -> tuple[float, float]:
    """E ln P(theta_0, all theta_k), bounded below where tails are heavy, and the entropy of Q."""
    K, D = state.theta_mean.shape
    squares = ((state.theta_mean - state.common_mean) ** 2).sum()
    log_prior = linalg.student_log_density(_common_square(state, plug_in), prior.common_scale).sum()
    log_prior += 0.5 * K * D * np.log(prior.beta / (2 * np.pi))
    if plug_in:
        return float(log_prior - 0.5 * prior.beta * squares), 0.0
    own, common = state.theta_covariance, state.common_covariance
    stays = prior.beta * own - np.eye(D)  # theta_k - theta_0 as a function of theta_0
    squares += np.einsum("kdd->", own) + np.vdot(stays @ common, stays)
    log_dets = linalg.inverse_and_log_det(own)[1].sum() + linalg.inverse_and_log_det(common)[1]
    entropy = 0.5 * ((K + 1) * D * (1 + np.log(2 * np.pi)) + log_dets)
    return float(log_prior - 0.5 * prior.beta * squares), float(entropy)


def initialise(data: ContinuousBlocks, spec: GaussianMixture) -> tuple[MixturePrior, MixtureState]:
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

    def equal_shares(block: Block) -> MixtureStatistics:
        mean = block.mean if block.instance is None else block.mean[:, :, block.instance]
        share = np.broadcast_to(block.repeats / K, mean.shape[1:])
        features = [*(mean if prior.affine else []), *[None] * C]
        residual = block.value[:, None] - mean
        return statistics(e_step.Expectation(features, residual, block.repeats, share, 0.0, None, None, None, None))

    total = data.total(equal_shares)
    variance = _residual_variance(total.moments[0], C, prior.affine, data.n_labels)  # (K, C)
    if spec.v is not None and np.asarray(spec.v).size not in (1, C):
        raise ValueError(f"v must be one number, or one for each of the {C} output(s); got {spec.v!r}")
    best = variance.min(axis=0) * (1 + math.sqrt(8 / data.n_labels))  # two standard errors above
    typical = np.minimum(best, np.median(variance, axis=0))
    typical = typical if spec.v is None else np.asarray(spec.v) / data.standard.scale**2
    typical = np.maximum(np.broadcast_to(typical, (C,)), SMALLEST_VARIANCE)
    prior = prior._replace(inverse_scale=prior.nu * np.diag(typical), residual_variance=typical)
    size = 2 * C if prior.affine else C
    theta = np.zeros((K, size)), np.zeros((K, size, size)), np.zeros(size), np.zeros((size, size))
    inverse_scale = np.eye(C) * np.maximum(variance, typical * 1e-3)[:, :, None]
    flat = MixtureState(np.full(K, 1 / K), None, *theta, np.ones(K), inverse_scale, np.zeros(()))
    tail = np.asarray(_FIRST_TAIL if spec.component == "student_t" else 0.0)
    # Wide: else the prior would shrink a large common calibration to zero, and EM might stay there.
    wide = prior._replace(common_scale=max(_START_SCALE, prior.common_scale), slope_scale=0.0)
    return prior, update(flat, total, wide)._replace(tail=tail)


def _residual_variance(moments: Array, n_outputs: int, affine: bool, n_labels: float) -> Array:
    """Residual variance of every view and output around its own least-squares calibration: (K, C)."""
    # What the calibration explains counts as the residual of one more label: with two labels it explains all.
    f, ones, e = (np.arange(n_outputs) + part * n_outputs for part in range(3))
    mean = moments / moments[:, ones[0], ones[0]][:, None, None]
    square, explained = mean[:, e, e], mean[:, ones, e] ** 2
    if affine:
        own = mean[:, f, f] - mean[:, f, ones] ** 2
        covariance = mean[:, f, e] - mean[:, f, ones] * mean[:, ones, e]
        varies = own > 1e-12 * mean[:, f, f]
        explained = explained + np.divide(covariance**2, own, out=np.zeros_like(own), where=varies)
    n_left = max(n_labels - (2.0 if affine else 1.0), 1.0)
    return np.asarray((np.maximum(square - explained, 0) * n_labels + explained) / n_left)


@dataclass(frozen=True)
class MixtureProblem(Problem[MixtureState, MixtureStatistics, MixturePosterior]):
    """Data and prior of a continuous mixture, with or without annotators."""

    data: ContinuousBlocks
    prior: MixturePrior
    annotator_prior: AnnotatorPrior | None
    plug_in: bool = False  # calibration and precision at their mode: the likelihood, not the bound
    gate: GateData | None = None
    jump: tuple[MixtureState, MixtureState] | None = None  # first state of a gate, and its first update

    def evaluate(self, state: MixtureState) -> tuple[float, MixtureStatistics]:
        """Bound and statistics at a state: one pass over the blocks."""
        prior, gate = self.prior, None if self.gate is None else self.gate.lookup(state.weights, state.slopes)
        density = e_step.Density.of(state, prior, state.expected_log_weights, self.plug_in)

        def block_sums(block: Block) -> MixtureStatistics:  # serialised to workers: captures nothing else
            expected = e_step.expectation(block, density, prior, state.annotators, gate)
            people = annotators.statistics(block, state.annotators, expected.truth, expected.share)
            return statistics(expected)._replace(annotators=people)

        sums = self.data.total(block_sums)
        log_prior, entropy = _calibration_terms(state, prior, self.plug_in)
        bound = float(sums.log_evidence) + log_prior + entropy - sum(self._penalties(state).values())
        if not self.plug_in:
            divergences = linalg.kl_wishart(state.dof, state.inverse_scale, prior.nu, prior.inverse_scale)
            return bound - float(divergences.sum()), sums
        precision = state.precision  # minus the log prior of ln Lambda
        trace = float(np.einsum("cd,kcd->", prior.inverse_scale, precision))
        return bound - 0.5 * (trace - prior.nu * float(np.linalg.slogdet(precision)[1].sum())), sums

    def update(self, state: MixtureState, statistics: MixtureStatistics) -> MixtureState:
        """One step of every factor; the first of a gate is the fit with constant weights."""
        if self.jump is not None and state is self.jump[0]:
            return self.jump[1]
        people = annotators.update(state.annotators, statistics.annotators, self.annotator_prior)
        after = update(state, statistics, self.prior, self.plug_in)._replace(annotators=people)
        if self.gate is None:
            return after
        weights, slopes = self.gate.update(state.weights, after.slopes, statistics.mass, statistics.feature_mass)
        return after._replace(weights=weights, slopes=slopes)

    def extrapolate(self, before: MixtureState, after: MixtureState, statistics: MixtureStatistics) -> MixtureState:
        """Extrapolate vanishing weights; under a Dirichlet none vanishes."""
        if after.weight_counts is not None:
            return after
        weights = extrapolated_weights(before.weights, after.weights, statistics.overlap)
        return after if weights is after.weights else after._replace(weights=weights)

    def pack(self, state: MixtureState) -> Array:
        """(sqrt w, m, log-Cholesky of S, the same of theta_0, ln nu_k, log-Cholesky of V_k), then the annotators'."""
        weights = state.weights if state.weight_counts is None else state.weight_counts
        parts = [np.sqrt(weights), state.theta_mean, log_cholesky(state.theta_covariance), state.common_mean]
        parts += [log_cholesky(state.common_covariance), np.log(state.dof - self.data.n_outputs + 1)]
        parts += [log_cholesky(state.inverse_scale), state.scale_slope, state.slopes, annotators.pack(state.annotators)]
        return np.concatenate([part.ravel() for part in parts])

    def unpack(self, vector: Array, like: MixtureState) -> MixtureState:
        """The state of a vector; annotators' shapes depend on the data alone and are `like`'s."""
        (K, D), C, take = like.theta_mean.shape, self.data.n_outputs, Reader(vector)
        weights = take(K) ** 2
        counts = None if like.weight_counts is None else weights
        theta = take(K, D), from_log_cholesky(take(K, D * (D + 1) // 2), D)
        common = take(D), from_log_cholesky(take(D * (D + 1) // 2), D)
        dof = C - 1 + np.exp(np.minimum(take(K), 300))
        rest = from_log_cholesky(take(K, C * (C + 1) // 2), C), take(1)[0], take(len(like.slopes)), like.tail
        people = annotators.unpack(take, like.annotators)
        return MixtureState(weights / weights.sum(), counts, *theta, *common, dof, *rest, people)

    def trimmed(self, state: MixtureState, statistics: MixtureStatistics) -> list[MixtureState]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        if state.weight_counts is not None:
            return []
        gate, weights = self.gate, state.weights
        trimmed = vanishing_weights(weights) if gate is None else gate.trimmed(weights, state.slopes)
        return [state._replace(weights=weights) for weights in trimmed]

    def started_at(self, state: MixtureState, weights: Array) -> MixtureState | None:
        """A first state with other weights; none with a gate, which starts from the optimum of constant weights."""
        counts = state.weight_counts
        counts = None if counts is None else weights * counts.sum()
        return None if self.gate else state._replace(weights=weights, weight_counts=counts)

    def weights(self, state: MixtureState) -> Array:
        """The weights of the views, (K,): the mean over inputs where they differ by these."""
        return state.weights if self.gate is None else self.gate.average(state.weights, state.slopes)

    def bound_terms(self, state: MixtureState, statistics: MixtureStatistics) -> dict[str, float]:
        """The paper's seven terms, repaired, in the labels' units: J minus the others is the bound (method, eq. 11)."""
        prior, C, moments, mass = self.prior, self.data.n_outputs, statistics.moments[0], statistics.mass
        density = e_step.Density.of(state, prior, np.zeros(len(state.weights)))
        error = np.vdot(density.residual_form, moments[:, 2 * C :, 2 * C :])
        error += np.vdot(density.regressor_form, moments[:, prior.regressors, prior.regressors])
        log_prior, entropy = _calibration_terms(state, prior)

        def expected_log_wishart(dof: Array | float, inverse_scale: Array) -> float:
            """Sum over views of E ln Wishart(Lambda_k; dof, inverse scale)."""
            normaliser = linalg.wishart_log_normaliser(np.asarray(dof), np.linalg.slogdet(inverse_scale)[1], C)
            quadratic = (inverse_scale * density.residual_form).sum(axis=(1, 2))
            return float((normaliser + 0.5 * (dof - C - 1) * density.log_precision - 0.5 * quadratic).sum())

        of_labels = float(mass @ density.constant + statistics.log_omega - 0.5 * error)
        of_views = float(mass[mass > 0] @ state.expected_log_weights[mass > 0])
        evidence = float(statistics.log_evidence)
        if self.gate is not None:
            of_views = self.gate.expected_log_weight(state.weights, state.slopes, mass, statistics.feature_mass)
        if state.annotators is not None or state.tail:  # the truth or a label's precision is integrated out
            of_labels = evidence - of_views
        return {
            "J_S": of_labels + self.unit_change,
            "J_z": of_views,
            "J_mu": log_prior,
            "J_Sigma": expected_log_wishart(prior.nu, prior.inverse_scale),
            "Pi_mu": -entropy,
            "Pi_Sigma": expected_log_wishart(state.dof, state.inverse_scale),
            "Pi_z": of_labels + of_views - evidence,  # sum of p ln p, as ln p = ln p~ - logsumexp
            **self._penalties(state),
        }

    def _penalties(self, state: MixtureState) -> dict[str, float]:
        """Divergences from the prior, or minus log priors at the mode, of all but calibration and precisions."""
        prior, terms = self.prior, {}
        if prior.slope_scale:
            terms["penalty"] = 0.5 * (float(state.scale_slope) / prior.slope_scale) ** 2
        if state.weight_counts is not None:
            same = np.full_like(state.weights, prior.concentration)
            terms["KL_w"] = float(linalg.kl_dirichlet(state.weight_counts, same))
        if self.gate is not None:
            terms["penalty_gate"] = -self.gate.log_prior(state.slopes)
        if state.annotators is not None:
            terms["KL_annotators"] = annotators.divergence(state.annotators, self.annotator_prior)
        if state.tail:
            terms["penalty_tail"] = float(_tail_penalty(state.tail))
        return terms

    def posterior(
        self, state: MixtureState, information: WeightInformation | None = None, gate: Gate | None = None
    ) -> MixturePosterior:
        """What remains when the data are gone; the state's weights are then averages."""
        if self.gate is not None:
            gate = gate or self.gate.gate(state.weights, state.slopes)
            state = state._replace(weights=self.weights(state), slopes=np.zeros(0))
        return MixturePosterior(self.prior, state, self.data.standard, information, gate)

    def finish(self, ascent: Ascent[MixtureState, MixtureStatistics], *, intervals: bool = True) -> MixturePosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need unless they are unwanted."""
        state = ascent.state
        if not intervals:
            return self.posterior(state)
        subsample = self.data if self.data.n_groups else self.data.subsample(_INTERVAL_LABELS)  # groups stay whole
        if self.gate is not None:  # at the bound's maximum: features depend on the views in use
            fitted = state.weights, state.slopes
            known = weight_information(subsample, self.data, self.prior, state, self.gate.lookup(*fitted))
            gate, known = self.gate.finish(*fitted, known)
            return self.posterior(state, known, gate)
        # At the likelihood's maximum, from a small weight and a typical precision for dropped views: the bound drops
        # those that gain less than the uncertainty of their calibration costs, and they may have some weight.
        dropped, dof = state.weights == 0, state.dof[:, None, None]
        weights = np.where(dropped, 0.1 / max(dropped.sum(), 1), 0.9 * state.weights)
        typical = np.einsum("k,kcd->cd", state.weights, state.inverse_scale / dof)
        own_scale = np.where(dropped[:, None, None], dof * typical, state.inverse_scale)
        changes = {"weights": weights / weights.sum(), "weight_counts": None, "inverse_scale": own_scale}
        prior = self.prior._replace(concentration=None, inverse_scale=self.prior.nu * typical)
        likelihood = MixtureProblem(subsample, prior, self.annotator_prior, plug_in=True)
        mode = ascend(likelihood, state._replace(**changes), EM(tol=1e-5, max_steps=200)).state
        return self.posterior(state, weight_information(subsample, self.data, prior, mode, None))

    def settle_gate(self, state: MixtureState, scale: float | None) -> "MixtureProblem":
        """The problem with the prior scale of its gate, by the evidence at a state of constant weights if open."""
        assert self.gate is not None
        prior, weights = self.prior, state.weights
        lookup = self.gate.lookup(weights, state.slopes)
        density = e_step.Density.of(state, prior, state.expected_log_weights)

        def block_score(block: Block) -> tuple[Array, Array]:  # gradient in b (F,), and outer products of its units
            expected = e_step.expectation(block, density, prior, state.annotators, lookup)
            assert expected.gate is not None
            scores = weight_scores(expected.gate, weights, expected.share / expected.repeats)[len(weights) :]
            return scores @ expected.repeats, products(scores * expected.repeats, scores)

        return replace(self, gate=self.gate.with_prior(scale, *self.data.total(block_score)))


def _variance_within(data: ContinuousBlocks, prior: MixturePrior, state: MixtureState) -> tuple[float, ...]:
    """Residual variance of a label around its own view, in the labels' units: (C,), the prior's v."""
    # A view's residuals include those of labels that other views explain, and of all labels before calibration; their
    # variance is far too large a guess where views differ much. A short fit separates them.
    subsample = data.subsample(_SCREENING_LABELS)
    for _ in range(_SCREENING_ROUNDS):
        state = ascend(MixtureProblem(subsample, prior, None), state, EM(max_steps=10, tol=1e-4)).state
        squares = np.diagonal(state.inverse_scale - prior.inverse_scale, axis1=1, axis2=2).sum(axis=0)
        n_labels = (state.dof - prior.nu).sum()
        within = (squares + _COMMON_LABELS * prior.residual_variance) / (n_labels + _COMMON_LABELS)
        within = np.where(np.isfinite(within), within, prior.residual_variance)
        prior = prior._replace(inverse_scale=prior.nu * np.diag(within))
    return tuple(np.diagonal(prior.inverse_scale) / prior.nu * data.standard.scale**2)


def pose(source: Source, spec: GaussianMixture, start: Posterior | None = None) -> tuple[MixtureProblem, MixtureState]:
    """The problem that data and model pose, and where to start."""
    if spec.heteroscedastic and not source.has_variance:
        remedy = "give ViewPredictions(variance=...), collect with draws=2 or more, or leave the option off"
        raise ValueError(f"heteroscedastic=True needs the views' variance over draws; {remedy}")
    data = source.continuous(with_variance=spec.heteroscedastic)
    if spec.v is None:
        spec = replace(spec, v=settled_variance(source, spec, start))
    prior, state = initialise(data, spec)
    people_prior, people = annotators.initialise(
        spec.noise, spec.gamma, data.n_annotators, prior.residual_variance, start
    )
    problem = MixtureProblem(data, prior, people_prior)
    own = of_kind(start, MixturePosterior, data.n_views)
    factors = _resume(state, own)._replace(annotators=people)
    if spec.weights != "input":
        return problem, factors
    features = partial(source.gate, spec.features, shared=people is not None, unit=data.standard.prediction_scale)
    gate, fitted = (None, False) if own is None else (own.gate, True)
    return with_gate(problem, factors, gate, features, spec.gate_scale, fitted=fitted, resumed=start is not None)


def _resume(first: MixtureState, start: MixturePosterior | None) -> MixtureState:
    """What another fit inferred about the views if it is of the same form, else the first state."""
    before = first if start is None else start.state
    alike = (before.weight_counts is None) == (first.weight_counts is None)
    if before is first or not alike or before.theta_mean.shape != first.theta_mean.shape:
        return first
    weights = before.weights
    if before.weight_counts is None:
        weights = (weights + _MIN_START_WEIGHT / len(weights)) / (1 + _MIN_START_WEIGHT)
    return before._replace(weights=weights, slopes=first.slopes)


def settled_variance(source: Source, spec: GaussianMixture, start: Posterior | None) -> tuple[float, ...]:
    """The prior's v where it is left open, (C,): that of a fit to start from if it has the same views."""
    data = source.continuous(with_variance=spec.heteroscedastic)
    own = of_kind(start, MixturePosterior, data.n_views)
    if own is not None and data.n_views > 1:
        return tuple(np.diagonal(own.prior.inverse_scale) / own.prior.nu * own.standard.scale**2)
    return _variance_within(data, *initialise(data, spec))


def weight_information(
    subsample: ContinuousBlocks, data: ContinuousBlocks, prior: MixturePrior, state: MixtureState, gate: Lookup | None
) -> WeightInformation:
    """Sums of outer products of scores at the likelihood's maximum, calibration and precision eliminated."""
    # Scores of a subsample are scaled up to all data. A dropped view is profiled over a grid of weights, both at its
    # fitted calibration and at the common one with the others' precision. With a gate it is that on (ln v, b).
    K, n_groups, free = len(state.weights), subsample.n_groups, state.weights > 0
    flat = np.zeros(K)  # equal weights: dropped views have scores too
    density = e_step.Density.of(state, prior, flat, plug_in=True)
    pooled = state.dof[:, None, None] * np.linalg.inv(np.einsum("k,kcd->cd", state.weights, state.precision))
    uncalibrated = state._replace(
        theta_mean=np.where(free[:, None], state.theta_mean, state.common_mean),
        inverse_scale=np.where(free[:, None, None], state.inverse_scale, pooled),
    )
    plain = e_step.Density.of(uncalibrated, prior, flat, plug_in=True)

    def block_sums(block: Block) -> tuple[Array, Array, Array, Array, Array | None]:
        expected = e_step.expectation(block, density, prior, state.annotators, gate)
        baseline = e_step.expectation(block, plain, prior, state.annotators, gate)
        count, grouped = expected.repeats, None
        gated = np.ones((K, 1)) if expected.gate is None else expected.gate.factor
        weights = state.weights[:, None] * gated  # (K, 1) or (K, j)
        # rho (K, j), a view's density over the mixture's; responsibilities here are of equal weights
        ratio, plain_ratio = (part.share / (state.weights @ part.share) / gated for part in (expected, baseline))
        scores = _scores(expected, density, state.weights, weights * ratio, ratio)
        if block.group is not None:
            one_each = block.instance is None or state.annotators is not None
            group = block.group if one_each else block.group[block.instance]
            grouped = laplace.group_sums(scores * count, count, group, n_groups)
        profile, plain_profile = (laplace.weight_profile(ratios, weights, count) for ratios in (ratio, plain_ratio))
        return products(scores * count, scores), profile, plain_profile, np.asarray(count.sum()), grouped

    outer, fitted, unfitted, seen, grouped = subsample.total(block_sums)
    total = data.n_labels if state.annotators is None else data.n_instances
    C, n_free = prior.n_outputs, int(free.sum())
    common = linalg.student_precision(state.common_mean**2, prior.common_scale)  # (D,)
    shared = prior.beta * (prior.beta / (common + n_free * prior.beta))  # (D,)
    inner = prior.beta * np.eye(n_free) - shared[:, None, None]  # (D, F, F)
    nuisance = block_diag(*inner, 0.5 * prior.nu * C * np.eye(n_free))
    scale = total / float(seen)
    profile = np.maximum(*(scale * (curve - curve.max(axis=1, keepdims=True)) for curve in (fitted, unfitted)))
    n_kept = K if gate is None else K + len(gate.values)
    return laplace.weight_information(state.weights, scale * outer, nuisance, profile, grouped, n_kept)


def _scores(expected: e_step.Expectation, density: e_step.Density, weights: Array, share: Array, ratio: Array) -> Array:
    """Derivatives of every label's log likelihood: weights, calibration, log precision; (K + F (D + 1), j)."""
    free = np.flatnonzero(weights > 0)
    first = ratio if expected.gate is None else weight_scores(expected.gate, weights, share)
    share, residual = share[free], expected.residual[:, free]  # (F, j), (C, F, j)
    u = 1.0 if expected.precision is None else expected.precision[free]
    C = len(residual)
    pull = u * np.einsum("kcd,dkj->ckj", density.residual_form[free], residual)  # u Lambda e
    columns = [share if feature is None else share * feature[free] for feature in expected.features]
    calibration = [column * pull[d % C] for d, column in enumerate(columns)]
    distance = (residual * pull).sum(axis=0)
    if expected.truth is not None:
        distance += np.einsum("kcd,kjcd->kj", density.residual_form[free], expected.truth.covariance[free])
    return np.concatenate([first, *calibration, share * 0.5 * (C - distance)])
