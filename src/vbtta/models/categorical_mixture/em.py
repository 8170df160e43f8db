"""EM for the categorical mixture: closed forms for weights and noise, Newton steps for calibration and weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference import laplace
from vbtta.inference.em import Ascent, ascend, vanishing_weights
from vbtta.inference.laplace import WeightInformation
from vbtta.inference.linalg import Reader, kl_dirichlet
from vbtta.models.base import InMemory, Posterior, Source
from vbtta.models.categorical_mixture import steps
from vbtta.models.categorical_mixture.intervals import gate_score, weight_information
from vbtta.models.categorical_mixture.posterior import CategoricalPosterior
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.categorical_mixture.steps import Likelihood, ViewSums
from vbtta.models.parts import calibration
from vbtta.models.parts.calibration import Calibration, CalibrationPrior
from vbtta.models.parts.class_model import BlockPass, ClassProblem, Statistics
from vbtta.models.parts.gate import PRELIMINARY, Gate, GateData
from vbtta.models.parts.label_noise import FittedNoise
from vbtta.models.parts.links import LINKS

NO_LINE_SEARCH_ABOVE = 0.5  # safe fraction of the Newton step
_FRACTIONS = (1.0, 0.5, 0.25, 0.05)  # of a step without a guaranteed gain
_SETTLED = 0.2  # change of temperatures and offsets below which the weights take Newton steps


class CategoricalState(NamedTuple):
    """Weights, calibration and Q of the noise."""

    weights: Array  # (K,); with class weights the common ones they are drawn to, with a gate the base weights
    weight_counts: Array | None  # (K,): Q(w), where w has a Dirichlet prior
    class_weights: Array | None  # (K, C)
    calibration: Calibration
    noise: FittedNoise | None
    slopes: Array = np.zeros(0)  # (F,): coefficients of the gate


@dataclass(frozen=True, eq=False)
class CategoricalProblem(ClassProblem[CategoricalState, ViewSums]):
    """Data and priors of a categorical mixture."""

    spec: CategoricalMixture
    gate: GateData | None = None
    jump: tuple[CategoricalState, CategoricalState] | None = None  # first state of a gate, and its first update

    @property
    def prior(self) -> CalibrationPrior:
        """The prior of the calibration."""
        return CalibrationPrior(self.spec.kappa_scale, self.spec.xi_scale, self.spec.offset_scale)

    def update(self, state: CategoricalState, statistics: Statistics[ViewSums]) -> CategoricalState:
        """One step of every factor, which does not lower the bound; a gate's first is the constant weights' fit."""
        # EM has closed forms for weights and noise, and for a canonical link a fraction of the calibration's Newton
        # step is known to gain. Larger steps (Newton's for the weights too, once the temperatures have settled) are
        # tried first and taken where the bound does not fall.
        if self.jump is not None and state is self.jump[0]:
            return self.jump[1]
        sums, now, canonical = statistics.sums, state.calibration, LINKS[self.spec.link].canonical
        plain = self._update_weights(state, sums)._replace(noise=statistics.noise)
        step, safe = np.zeros(self.data.n_views + self.data.n_classes), 1.0
        if self.spec.calibrate:
            step, safe = calibration.direction(now, sums.calibration, self.prior), 0.0
            if canonical and state.class_weights is None:
                safe = calibration.safe_fraction(now, step, sums.calibration, self.prior, self.data.widest)

        def candidates() -> Iterator[CategoricalState]:
            size = np.abs(step).max()
            if state.class_weights is None and state.weight_counts is None and size < _SETTLED:
                weights, log_kappa = self._newton(state, sums)
                if np.abs(weights - state.weights).max() > 1e-12:
                    joint = step
                    if canonical:
                        joint = np.concatenate([log_kappa - now.log_kappa, step[self.data.n_views :]])
                    yield plain._replace(weights=weights, calibration=calibration.moved(now, joint))
            if safe < NO_LINE_SEARCH_ABOVE and size > 1e-10:
                for fraction in _FRACTIONS[:1] if safe > 0 else _FRACTIONS:
                    yield plain._replace(calibration=calibration.moved(now, fraction * step))

        accepted = self.first_acceptable(candidates(), statistics)
        return plain._replace(calibration=calibration.moved(now, step, safe)) if accepted is None else accepted

    def pack(self, state: CategoricalState) -> Array:
        """(sqrt w, b, sqrt w_kc, ln kappa_k, o, ln of the noise's counts)."""
        parts = [np.sqrt(state.weights if state.weight_counts is None else state.weight_counts), state.slopes]
        if state.class_weights is not None:
            parts.append(np.sqrt(state.class_weights).ravel())
        if self.spec.calibrate:
            parts += [*state.calibration]
        if state.noise is not None:
            parts.append(state.noise.pack())
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: CategoricalState) -> CategoricalState:
        """The state of a vector."""
        K, C, take = self.data.n_views, self.data.n_classes, Reader(vector)
        weights, slopes = take(K) ** 2, take(len(like.slopes))
        by_class = None
        if like.class_weights is not None:
            by_class = take(K, C) ** 2
            by_class = by_class / by_class.sum(axis=0)
        calibrated = like.calibration
        if self.spec.calibrate:
            calibrated = Calibration(np.clip(take(K), -40, 20), np.clip(take(C), -50, 50))
        noise = None if like.noise is None else like.noise.unpack(take)
        counts = None if like.weight_counts is None else np.maximum(weights, 1e-10)
        return CategoricalState(weights / weights.sum(), counts, by_class, calibrated, noise, slopes)

    def trimmed(self, state: CategoricalState) -> list[CategoricalState]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        if state.weight_counts is not None:
            return []
        if self.gate is not None:
            return [state._replace(weights=kept) for kept in self.gate.trimmed(state.weights, state.slopes)]
        candidates = []
        for kept in vanishing_weights(self.weights(state)):
            if state.class_weights is None:
                candidates.append(state._replace(weights=kept))
                continue
            common, by_class = state.weights * (kept > 0), state.class_weights * (kept > 0)[:, None]
            if common.sum() > 0 and (by_class.sum(axis=0) > 0).all():
                common, by_class = common / common.sum(), by_class / by_class.sum(axis=0)
                candidates.append(state._replace(weights=common, class_weights=by_class))
        return candidates

    def weights(self, state: CategoricalState) -> Array:
        """The weights of the views, (K,): the mean over classes or inputs where they differ by these."""
        if self.gate is not None:
            return self.gate.average(state.weights, state.slopes)
        return state.weights if state.class_weights is None else np.asarray(state.class_weights.mean(axis=1))

    def posterior(
        self, state: CategoricalState, information: WeightInformation | None = None, gate: Gate | None = None
    ) -> CategoricalPosterior:
        """The fitted model without its data."""
        if self.gate is not None:
            gate = gate or self.gate.gate(state.weights, state.slopes)
        return CategoricalPosterior(
            link=self.spec.link,
            weights=self.weights(state),
            class_weights=state.class_weights,
            calibration=state.calibration,
            noise=state.noise,
            information=information,
            gate=gate,
        )

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> CategoricalPosterior:
        """The posterior at the end of an ascent, with the information for intervals unless unwanted."""
        state: CategoricalState = ascent.state
        if not intervals:
            return self.posterior(state)
        likelihood = self._likelihood(state)._replace(weights=state.weights)
        information = weight_information(self.data, likelihood, state.noise, self.weights(state), self.prior)
        if self.gate is None:
            return self.posterior(state, information)
        gate, known = self.gate.finish(state.weights, state.slopes, information)
        return self.posterior(state, known, gate)

    def resume(self, first: CategoricalState, posterior: Any) -> CategoricalState:
        """The first state with what another fit found: all of it if of the same form, else temperature and noise."""
        noise = None if first.noise is None else first.noise.resume(posterior.noise)
        pool = posterior.pooling()
        alike = pool.kind == "mixture" and len(posterior.weights) == self.data.n_views
        if alike and (posterior.class_weights is None) == (first.class_weights is None):
            weights = posterior.weights
            if first.class_weights is not None:  # EM does not move weights away from zero
                weights = (weights + 1e-3 / len(weights)) / (1 + 1e-3)
            counts = None if first.weight_counts is None else np.maximum(weights * first.weight_counts.sum(), 1e-10)
            state = first._replace(weights=weights, weight_counts=counts, noise=noise)
            return state._replace(class_weights=posterior.class_weights, calibration=posterior.calibration)
        if not self.spec.calibrate:
            return first._replace(noise=noise)
        gain = float((pool.weights * pool.scale).sum(axis=0).mean())
        calibrated = Calibration(np.full(self.data.n_views, np.log(max(gain, 1e-10))), pool.offset[0])
        return first._replace(calibration=calibrated, noise=noise)

    def _likelihood(self, state: CategoricalState) -> Likelihood:
        weights = state.weights
        if state.weight_counts is not None:
            weights = np.exp(special.digamma(state.weight_counts) - special.digamma(state.weight_counts.sum()))
        return Likelihood(
            link=LINKS[self.spec.link],
            calibrate=self.spec.calibrate,
            offsets=self.spec.offset_scale > 0,
            calibration=state.calibration,
            weights=weights,
            class_weights=state.class_weights,
            gate=None if self.gate is None else self.gate.lookup(state.weights, state.slopes),
        )

    def _block_pass(self, state: CategoricalState) -> BlockPass[ViewSums]:
        likelihood = self._likelihood(state)
        return lambda block, evidence: steps.run_pass(block, likelihood, evidence)

    def _penalties(self, state: CategoricalState) -> dict[str, float]:
        terms = {}
        if state.weight_counts is not None and self.spec.concentration is not None:
            prior = np.full(self.data.n_views, self.spec.concentration)
            terms["KL_w"] = float(kl_dirichlet(state.weight_counts, prior))
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            terms["penalty_w"] = -steps.log_class_prior(state.class_weights, state.weights, strength)
        if self.spec.calibrate:
            terms["penalty_calibration"] = -calibration.log_prior(state.calibration, self.prior)
        if self.gate is not None:
            terms["penalty_gate"] = -self.gate.log_prior(state.slopes)
        if state.noise is not None:
            terms["KL_noise"] = state.noise.divergence()
        return terms

    def _newton(self, state: CategoricalState, sums: ViewSums) -> tuple[Array, Array]:
        """Newton's weights and ln kappa_k, or the present ones where there is no such step."""
        # sum_j ln sum_k w_k P_jk - J sum_k w_k has its maximum on the simplex. Minus its Hessian is approximated by
        # outer products of slopes, exactly so for the weights, which are constrained to be non-negative.
        K, now = self.data.n_views, state.calibration
        u = np.concatenate([state.weights, now.log_kappa])
        units = np.concatenate([np.ones(K), np.exp(now.log_kappa)])  # from slopes in kappa to slopes in ln kappa
        curvature = sums.information * units * units[:, None]
        gradient = np.concatenate([sums.slope - sums.size, np.zeros(K)])
        if self.spec.calibrate:
            curvature[K:, K:] += calibration.log_kappa_precision(now.log_kappa, self.prior)
            gradient[K:] = calibration.gradient(now, sums.calibration, self.prior)[:K]
        else:
            curvature[K:, K:] += np.eye(K)
        scale = np.sqrt(np.maximum(np.diagonal(curvature), 1e-300))  # a unit diagonal
        curvature = curvature / np.outer(scale, scale) + 1e-9 * np.eye(2 * K)
        try:
            weights, log_kappa = laplace.solve(curvature, curvature @ (u * scale) + gradient / scale, K)
        except (RuntimeError, np.linalg.LinAlgError):  # no solution within the limit
            return state.weights, now.log_kappa
        weights, log_kappa = weights / scale[:K], log_kappa / scale[K:]
        change = np.clip(log_kappa - now.log_kappa, -0.5, 0.5)
        weights = weights / weights.sum() if weights.sum() > 0 else state.weights
        return weights if self.gate is None else self.gate.positive(weights), now.log_kappa + change

    def _update_weights(self, state: CategoricalState, sums: ViewSums) -> CategoricalState:
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            by_class = steps.update_class_weights(sums.class_count, sums.class_load, state.weights, strength)
            common = steps.update_common_weights(by_class)
            return state._replace(weights=common, class_weights=by_class)
        if self.gate is not None:
            weights, slopes = self.gate.update(state.weights, state.slopes, sums.share, sums.feature_mass)
            return state._replace(weights=weights, slopes=slopes)
        counts = None if self.spec.concentration is None else self.spec.concentration + sums.share
        weights = sums.share if counts is None else counts
        return state._replace(weights=weights / weights.sum(), weight_counts=counts)

    def _on_subsample(self, places: Array) -> tuple["CategoricalProblem", CategoricalState]:
        return _posed(InMemory(*self.data.take(places)), self.spec)

    def _scaled(self, state: CategoricalState, log_kappa: Array) -> CategoricalState:
        return state._replace(calibration=state.calibration._replace(log_kappa=log_kappa))


def pose(
    source: Source, spec: CategoricalMixture, start: Posterior | None = None
) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem of data and a model, and its first state: equal weights, kappa 1 unless logits are wide."""
    if spec.weights != "view" and spec.concentration is not None:
        remedy = "use class_concentration" if spec.weights == "view_class" else "leave it out"
        raise ValueError(f"concentration is the prior of weights='view'; with weights={spec.weights!r} {remedy}")
    problem, first = _posed(source, spec)
    if start is not None:
        first = problem.resume(first, start)
    elif spec.calibrate:
        first = problem._scaled(first, problem.start_log_kappa(first))
    if first.class_weights is None and (start is None or len(start.weights) != problem.data.n_views):
        first = problem.coarse_start(first)
    return (problem, first) if spec.weights != "input" else _gated(source, problem, first, start)


def _gated(
    source: Source, problem: CategoricalProblem, first: CategoricalState, start: Posterior | None
) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem of a gate, whose first update is the fit with constant weights."""
    spec, before = problem.spec, getattr(start, "gate", None)
    constant = first if before is not None else ascend(problem, first, PRELIMINARY).state
    gate = source.gate(spec.features, constant.weights, shared=problem.noise is not None, unit=None)
    slopes = np.zeros(gate.n_features)
    if before is not None and len(before.coefficients) == len(slopes):
        gate = replace(gate, prior_scale=before.prior_scale)
        first = first._replace(weights=gate.positive(before.weights), slopes=before.coefficients)
        return replace(problem, gate=gate), first
    likelihood = problem._likelihood(constant)._replace(gate=gate.lookup(constant.weights, slopes))
    gate = gate.with_prior(spec.gate_scale, *gate_score(problem.data, likelihood, constant.noise))
    constant = constant._replace(weights=gate.positive(constant.weights), slopes=slopes)
    if start is not None:
        return replace(problem, gate=gate), constant
    first = first._replace(slopes=slopes)
    return replace(problem, gate=gate, jump=(first, constant)), first


def _posed(source: Source, spec: CategoricalMixture) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem, and its first state with kappa 1."""
    data, noise = spec.lay_out(source)
    K, C = data.n_views, data.n_classes
    uniform = np.full(K, 1 / K)
    counts = None
    if spec.concentration is not None:
        counts = spec.concentration + uniform * (data.n_labels if noise is None else data.n_instances)
    first = CategoricalState(
        weights=uniform,
        weight_counts=counts,
        class_weights=np.full((K, C), 1 / K) if spec.weights == "view_class" else None,
        calibration=Calibration(np.zeros(K), np.zeros(C)),
        noise=None if noise is None else noise.start(data.n_annotators),
    )
    return CategoricalProblem(data, noise, spec), first
