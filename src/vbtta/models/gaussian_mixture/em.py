"""EM for the mixture of continuous labels: closed forms for every factor, with or without annotators."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference.blocks import Block
from vbtta.inference.em import EM, Ascent, Problem, ascend, extrapolated_weights, vanishing_weights
from vbtta.inference.laplace import WeightInformation
from vbtta.inference.linalg import Reader, from_log_cholesky, log_cholesky
from vbtta.models.base import Posterior, Source
from vbtta.models.gaussian_mixture import steps
from vbtta.models.gaussian_mixture.intervals import gate_score, weight_information
from vbtta.models.gaussian_mixture.posterior import MixtureFactors, MixturePosterior
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.gaussian_mixture.steps import Density, MixturePrior, MixtureState, MixtureStatistics
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorStatistics
from vbtta.models.parts.gate import PRELIMINARY, Gate, GateData
from vbtta.models.parts.standard import ContinuousBlocks

_LIFT = 1e-3  # share of the weights that all views have, at a start from another fit
_INTERVAL_LABELS = 100_000  # labels from which intervals are estimated, at most
_COMMON_LABELS = 20  # that the median view's residual variance counts for in that of all views
_SCREENING_ROUNDS = 3  # of a few steps each
_SCREENING_LABELS = 20_000  # labels from which the prior's scale is estimated, at most


class Sums(NamedTuple):
    """All statistics of a pass."""

    views: MixtureStatistics
    annotators: AnnotatorStatistics | None


@dataclass(frozen=True)
class MixtureProblem(Problem[MixtureFactors, Sums, MixturePosterior]):
    """Data and prior of a continuous mixture, with or without annotators."""

    data: ContinuousBlocks
    prior: MixturePrior
    annotator_prior: AnnotatorPrior | None
    plug_in: bool = False  # calibration and precision at their mode: the likelihood, not the bound
    gate: GateData | None = None
    jump: tuple[MixtureFactors, MixtureFactors] | None = None  # first state of a gate, and its first update

    def evaluate(self, state: MixtureFactors) -> tuple[float, Sums]:
        """Bound and statistics at a state: one pass over the blocks."""
        views, prior = state.views, self.prior
        density = Density.of(views, prior, views.expected_log_weights, self.plug_in)
        gate = None if self.gate is None else self.gate.lookup(views.weights, views.slopes)

        def block_sums(block: Block) -> Sums:  # serialised to workers: captures nothing else
            expected = steps.expectation(block, density, prior, state.annotators, gate)
            people = None
            if state.annotators is not None and expected.truth is not None:
                people = annotators.annotator_statistics(block, state.annotators, expected.truth, expected.share)
            return Sums(steps.statistics(expected), people)

        sums = self.data.total(block_sums)
        bound = float(sums.views.log_evidence) - self._penalty(views)
        if self.gate is not None:
            bound += self.gate.log_prior(views.slopes)
        if state.annotators is not None and self.annotator_prior is not None:
            bound -= annotators.divergence(state.annotators, self.annotator_prior)
        return bound, sums

    def update(self, state: MixtureFactors, statistics: Sums) -> MixtureFactors:
        """One step of every factor; the first of a gate is the fit with constant weights."""
        if self.jump is not None and state is self.jump[0]:
            return self.jump[1]
        people = state.annotators
        if people is not None and statistics.annotators is not None and self.annotator_prior is not None:
            people = annotators.update(people, statistics.annotators, self.annotator_prior)
        views = steps.update(state.views, statistics.views, self.prior, self.plug_in)
        if self.gate is not None:
            total = statistics.views
            weights, slopes = self.gate.update(state.views.weights, views.slopes, total.mass, total.feature_mass)
            views = views._replace(weights=weights, slopes=slopes)
        return MixtureFactors(views, people)

    def extrapolate(self, before: MixtureFactors, after: MixtureFactors, statistics: Sums) -> MixtureFactors:
        """Extrapolate vanishing weights; under a Dirichlet none vanishes."""
        if after.views.weight_counts is not None:
            return after
        weights = extrapolated_weights(before.views.weights, after.views.weights, statistics.views.overlap)
        if weights is after.views.weights:
            return after
        return after._replace(views=after.views._replace(weights=weights))

    def pack(self, state: MixtureFactors) -> Array:
        """(sqrt w, m, log-Cholesky of S, the same of theta_0, ln nu_k, log-Cholesky of V_k), then the annotators'."""
        views, people = state
        weights = views.weights if views.weight_counts is None else views.weight_counts
        parts = [
            np.sqrt(weights),
            views.theta_mean,
            log_cholesky(views.theta_covariance),
            views.common_mean,
            log_cholesky(views.common_covariance),
            np.log(views.dof - self._least_dof),
            log_cholesky(views.inverse_scale),
            views.scale_slope,
            views.slopes,
        ]
        if people is not None:
            parts.append(annotators.pack(people))
        return np.concatenate([part.ravel() for part in parts])

    def unpack(self, vector: Array, like: MixtureFactors) -> MixtureFactors:
        """The state of a vector; annotators' shapes depend on the data alone and are `like`'s."""
        K, D = like.views.theta_mean.shape
        C = self.data.n_outputs
        take = Reader(vector)
        weights = take(K) ** 2
        counted = like.views.weight_counts is not None
        views = MixtureState(
            weights=weights / weights.sum(),
            weight_counts=weights if counted else None,
            theta_mean=take(K, D),
            theta_covariance=from_log_cholesky(take(K, D * (D + 1) // 2), D),
            common_mean=take(D),
            common_covariance=from_log_cholesky(take(D * (D + 1) // 2), D),
            dof=self._least_dof + np.exp(np.minimum(take(K), 300)),
            inverse_scale=from_log_cholesky(take(K, C * (C + 1) // 2), C),
            scale_slope=take(1)[0],
            slopes=take(len(like.views.slopes)),
        )
        people = None if like.annotators is None else annotators.unpack(take, like.annotators)
        return MixtureFactors(views, people)

    def trimmed(self, state: MixtureFactors) -> list[MixtureFactors]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        views = state.views
        if views.weight_counts is not None:
            return []
        gate = self.gate
        trimmed = vanishing_weights(views.weights) if gate is None else gate.trimmed(views.weights, views.slopes)
        return [state._replace(views=views._replace(weights=weights)) for weights in trimmed]

    def weights(self, state: MixtureFactors) -> Array:
        """The weights of the views, (K,): the mean over inputs where they differ by these."""
        views, gate = state.views, self.gate
        return views.weights if gate is None else gate.average(views.weights, views.slopes)

    def bound_terms(self, state: MixtureFactors, statistics: Sums) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""
        views, total = state.views, statistics.views
        terms = steps.bound_terms(views, total, self.prior)
        if self.gate is not None:
            before = terms["J_z"]
            terms["J_z"] = self.gate.expected_log_weight(views.weights, views.slopes, total.mass, total.feature_mass)
            terms["Pi_z"] += terms["J_z"] - before
            terms["penalty_gate"] = -self.gate.log_prior(views.slopes)
        if state.annotators is not None and self.annotator_prior is not None:
            # here J_S - Pi_z is the evidence of the label sets, the truth integrated out
            terms["J_S"] = float(statistics.views.log_evidence) - terms["J_z"]
            terms["Pi_z"] = 0.0
            terms["KL_annotators"] = annotators.divergence(state.annotators, self.annotator_prior)
        terms["J_S"] += self.unit_change
        return terms

    @property
    def unit_change(self) -> float:
        """Difference between the bound in the labels' units and in standard units."""
        return -self.data.n_labels * float(np.log(self.data.standard.scale).sum())

    def posterior(
        self, state: MixtureFactors, information: WeightInformation | None = None, gate: Gate | None = None
    ) -> MixturePosterior:
        """What remains when the data are gone; the state's weights are then averages."""
        if self.gate is not None:
            gate = gate or self.gate.gate(state.views.weights, state.views.slopes)
            state = state._replace(views=state.views._replace(weights=self.weights(state), slopes=np.zeros(0)))
        return MixturePosterior(self.prior, state, self.data.standard, information, gate)

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> MixturePosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need unless they are unwanted."""
        state: MixtureFactors = ascent.state
        if not intervals:
            return self.posterior(state)
        subsample = self.data if self.data.n_groups else self.data.some(_INTERVAL_LABELS)  # groups stay whole
        if self.gate is not None:  # at the bound's maximum: features depend on the views in use
            fitted = state.views.weights, state.views.slopes
            known = weight_information(subsample, self.data, self.prior, state, self.gate.lookup(*fitted))
            gate, known = self.gate.finish(*fitted, known)
            return self.posterior(state, known, gate)
        likelihood, first = likelihood_problem(subsample, self, state)
        mode = ascend(likelihood, first, EM(tol=1e-6, max_steps=200)).state
        return self.posterior(state, weight_information(subsample, self.data, likelihood.prior, mode))

    def resume(self, first: MixtureFactors, posterior: Any) -> MixtureFactors:
        """The first state with what another fit found: all of it if of the same form, else the annotators."""
        views, people = first.views, annotators.resume(first.annotators, posterior.state.annotators)
        before: MixtureState = getattr(posterior.state, "views", views)
        alike = before.theta_mean.shape == views.theta_mean.shape
        if before is not views and alike and (before.weight_counts is None) == (views.weight_counts is None):
            weights = before.weights
            if before.weight_counts is None:  # EM does not move weights away from zero
                weights = (weights + _LIFT / len(weights)) / (1 + _LIFT)
            views = before._replace(weights=weights, slopes=views.slopes)
        return MixtureFactors(views, people)

    def _penalty(self, views: MixtureState) -> float:
        """Divergence of Q from its prior; with `plug_in`, minus the log prior of theta and ln Lambda."""
        if not self.plug_in:
            return steps.divergence(views, self.prior)
        precision = views.precision
        log_det = np.linalg.slogdet(precision)[1]
        trace = np.einsum("cd,kcd->", self.prior.inverse_scale, precision)
        log_prior = steps.calibration_terms(views, self.prior, plug_in=True)[0]
        return float(0.5 * (trace - self.prior.nu * log_det.sum()) - log_prior) + steps.slope_penalty(views, self.prior)

    @property
    def _least_dof(self) -> int:
        return self.data.n_outputs - 1


def _variance_within(data: ContinuousBlocks, prior: MixturePrior, first: MixtureState) -> tuple[float, ...]:
    """Residual variance of a label around its own view, in the labels' units: (C,), the prior's v."""
    # A view's residuals include those of labels that other views explain, and of all labels before calibration; their
    # variance is far too large a guess where views differ much. A short fit separates them.
    subsample = data.some(_SCREENING_LABELS)
    state = MixtureFactors(first, None)
    for _ in range(_SCREENING_ROUNDS):
        state = ascend(MixtureProblem(subsample, prior, None), state, EM(max_steps=10, tol=1e-4)).state
        squares = np.diagonal(state.views.inverse_scale - prior.inverse_scale, axis1=1, axis2=2).sum(axis=0)
        n_labels = (state.views.dof - prior.nu).sum()
        within = (squares + _COMMON_LABELS * prior.residual_variance) / (n_labels + _COMMON_LABELS)
        prior = prior._replace(inverse_scale=prior.nu * np.diag(within))
    return tuple(np.diagonal(prior.inverse_scale) / prior.nu * data.standard.scale**2)


def likelihood_problem(
    subsample: ContinuousBlocks, problem: MixtureProblem, state: MixtureFactors
) -> tuple[MixtureProblem, MixtureFactors]:
    """The likelihood's problem, for intervals, started with a small weight and a typical precision for dropped views.

    The bound charges a view for the uncertainty of its calibration and drops views that gain less than that; such a
    view may still have a small weight.
    """
    views, prior = state.views, problem.prior
    dropped = views.weights == 0
    weights = np.where(dropped, 0.1 / max(dropped.sum(), 1), 0.9 * views.weights)
    typical = np.einsum("k,kcd->cd", views.weights, views.inverse_scale / views.dof[:, None, None])
    own_scale = np.where(dropped[:, None, None], views.dof[:, None, None] * typical, views.inverse_scale)
    first = views._replace(weights=weights / weights.sum(), weight_counts=None, inverse_scale=own_scale)
    prior = prior._replace(concentration=None, inverse_scale=prior.nu * typical)
    return MixtureProblem(subsample, prior, problem.annotator_prior, plug_in=True), state._replace(views=first)


def pose(
    source: Source, spec: GaussianMixture, start: Posterior | None = None
) -> tuple[MixtureProblem, MixtureFactors]:
    """The problem that data and model pose, and where to start."""
    if spec.heteroscedastic and not source.has_variance:
        raise ValueError(
            "heteroscedastic=True needs the views' variance over draws; give ViewPredictions(variance=...) or collect "
            "the views with draws=2 or more, or leave the option off"
        )
    if spec.weights == "input" and spec.concentration is not None:
        raise ValueError("concentration is the prior of weights='view'; with weights='input' leave it out")
    data = source.continuous(with_variance=spec.heteroscedastic)
    prior, state = steps.start(data, spec)
    if spec.v is None:
        prior, state = steps.start(data, replace(spec, v=_variance_within(data, prior, state)))
    people, first = None, None
    if spec.noise == "annotator":
        people = annotators.default_prior(prior.residual_variance, spec.gamma)
        first = annotators.start(data.n_annotators, data.n_outputs, people)
    problem, factors = MixtureProblem(data, prior, people), MixtureFactors(state, first)
    factors = factors if start is None else problem.resume(factors, start)
    return (problem, factors) if spec.weights != "input" else _gated(source, problem, factors, spec, start)


def settled_variance(source: Source, spec: GaussianMixture) -> tuple[float, ...]:
    """The prior's v where it is left open: (C,)."""
    data = source.continuous(with_variance=spec.heteroscedastic)
    return _variance_within(data, *steps.start(data, spec))


def _gated(
    source: Source, problem: MixtureProblem, first: MixtureFactors, spec: GaussianMixture, start: Posterior | None
) -> tuple[MixtureProblem, MixtureFactors]:
    """The problem of a gate, whose first update is the fit with constant weights."""
    before: Gate | None = getattr(start, "gate", None)
    constant: MixtureFactors = first if before is not None else ascend(problem, first, PRELIMINARY).state
    weights, unit = constant.views.weights, problem.data.standard.prediction_scale
    gate = source.gate(spec.features, weights, shared=first.annotators is not None, unit=unit)
    slopes = np.zeros(gate.n_features)
    if before is not None and len(before.coefficients) == len(slopes):
        gate = replace(gate, prior_scale=before.prior_scale)
        views = first.views._replace(weights=gate.positive(before.weights), slopes=before.coefficients)
        return replace(problem, gate=gate), first._replace(views=views)
    density = Density.of(constant.views, problem.prior, constant.views.expected_log_weights)
    score = gate_score(problem.data, density, problem.prior, constant, gate.lookup(weights, slopes))
    gate = gate.with_prior(spec.gate_scale, *score)
    views = constant.views._replace(weights=gate.positive(weights), slopes=slopes)
    if start is not None:
        return replace(problem, gate=gate), constant._replace(views=views)
    first = first._replace(views=first.views._replace(slopes=slopes))
    return replace(problem, gate=gate, jump=(first, constant._replace(views=views))), first
