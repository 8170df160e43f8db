"""The mixture of calibrated views for class labels, as a problem to climb."""

__all__ = ["CategoricalProblem", "CategoricalState", "Statistics", "categorical_problem", "pose_categorical"]

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.infer import calibration, class_weights, label_noise, latent
from vbtta.infer.accelerate import Ascent, vanishing_weights
from vbtta.infer.calibration import Calibration, CalibrationPrior
from vbtta.infer.categorical import Likelihood, Sums, run_pass
from vbtta.infer.categorical_data import CategoricalBlock, CategoricalBlocks, CategoricalData, categorical_data
from vbtta.infer.categorical_posterior import CategoricalPosterior
from vbtta.infer.categorical_scores import weight_information
from vbtta.infer.intervals import WeightInformation
from vbtta.infer.label_noise import NoiseModel
from vbtta.infer.matrices import Reader, kl_dirichlet
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.specs import CategoricalMixture

_BOLD_ENOUGH = 0.5  # share of a Newton step that needs no second thought
_SHARES = (1.0, 0.5, 0.25, 0.05)  # of a step whose gain nothing guarantees
_MOST_TRIED = 2_000  # instances on which the start is chosen
_SETTLED = 0.2  # change of temperatures and offsets below which the weights take Newton steps


class CategoricalState(NamedTuple):
    """Weights, calibration and Q of the noise."""

    weights: Array  # (K,); with class weights the common ones they are drawn to
    weight_counts: Array | None  # (K,): Q(w), where w has a Dirichlet prior
    class_weights: Array | None  # (K, C)
    calibration: Calibration
    noise: Array | None  # (U, 2) or (U, C, C)


class Statistics(NamedTuple):
    """What a pass over the data leaves."""

    views: Sums
    noise: Array | None  # the next Q of the noise
    bound: float


@dataclass(frozen=True, eq=False)
class CategoricalProblem:
    """Data and priors of a categorical mixture."""

    data: CategoricalBlocks
    spec: CategoricalMixture
    noise: NoiseModel | None
    named: bool  # whether annotators are told apart
    _last: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def n_labels(self) -> float:
        """J."""
        return self.data.n_labels

    @property
    def prior(self) -> CalibrationPrior:
        """The prior of the calibration."""
        return CalibrationPrior(self.spec.kappa_scale, self.spec.xi_scale, self.spec.offset_scale)

    def evaluate(self, state: CategoricalState) -> tuple[float, Statistics]:
        """Bound and statistics at a state: one pass, unless it is the state looked at last."""
        if self._last.get("state") is state:
            return self._last["bound"], self._last["statistics"]
        likelihood, model = self._likelihood(state), self._noise(state)

        def one(block: CategoricalBlock) -> tuple[Sums, Array | None]:  # it may travel, and holds what it needs alone
            evidence = None if model is None else label_noise.log_evidence(*model, block.table)
            sums, truth = run_pass(block, likelihood, evidence)
            if model is None or truth is None:
                return sums, None
            return sums, label_noise.expected_counts(model[0], truth, block.table)

        views, counts = self.data.total(one)
        noise = None if self.noise is None or counts is None else self.noise.prior + counts
        bound = float(views.log_evidence) - sum(self._penalties(state).values())
        statistics = Statistics(views, noise, bound)
        self._last.update(state=state, bound=bound, statistics=statistics)
        return bound, statistics

    def update(self, state: CategoricalState, statistics: Statistics) -> CategoricalState:
        """One step of every factor, which does not lower the bound.

        EM has closed forms for weights and noise, and for the softmax link a share of the calibration's Newton step is
        known to gain. Bolder steps (Newton's for the weights too, once the temperatures have settled) are
        tried first and taken where the bound does not fall; what was looked at last is not computed twice.
        """
        views, now = statistics.views, state.calibration
        plain = self._update_weights(state, views)._replace(noise=statistics.noise)
        step, safe = np.zeros(self.data.n_views + self.data.n_classes), 1.0
        if self.spec.calibrate:
            step = calibration.direction(now, views.calibration, self.prior)
            certain = self.spec.link == "softmax" and state.class_weights is None
            safe = 0.0
            if certain:
                safe = calibration.cautious_share(now, step, views.calibration, self.prior, self.data.widest)
        trials = []
        if state.class_weights is None and state.weight_counts is None and np.abs(step).max() < _SETTLED:
            weights, log_kappa = self._newton(state, views)
            if np.abs(weights - state.weights).max() > 1e-12:
                bolder = step
                if self.spec.link == "softmax":
                    bolder = np.concatenate([log_kappa - now.log_kappa, step[self.data.n_views :]])
                trials.append((plain._replace(weights=weights), bolder))
        if safe < _BOLD_ENOUGH and np.abs(step).max() > 1e-10:
            trials += [(plain, share * step) for share in (_SHARES[:1] if safe > 0 else _SHARES)]
        for after, change in trials:
            bold = after._replace(calibration=calibration.moved(now, change))
            if self.evaluate(bold)[0] >= statistics.bound - 1e-13 * abs(statistics.bound):
                return bold
        return plain._replace(calibration=calibration.moved(now, step, safe))

    def hasten(self, before: CategoricalState, after: CategoricalState, statistics: Statistics) -> CategoricalState:
        """Nothing to hasten: the update holds Newton's weights."""
        return after

    def pack(self, state: CategoricalState) -> Array:
        """(sqrt w, sqrt w_kc, ln kappa_k, o, ln of the noise's counts)."""
        parts = [np.sqrt(state.weights if state.weight_counts is None else state.weight_counts)]
        if state.class_weights is not None:
            parts.append(np.sqrt(state.class_weights).ravel())
        if self.spec.calibrate:
            parts += [*state.calibration]
        if state.noise is not None:
            parts.append(np.log(state.noise).ravel())
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: CategoricalState) -> CategoricalState:
        """The state of a vector."""
        K, C, take = self.data.n_views, self.data.n_classes, Reader(vector)
        weights = take(K) ** 2
        by_class = None
        if like.class_weights is not None:
            by_class = take(K, C) ** 2
            by_class = by_class / by_class.sum(axis=0)
        calibrated = like.calibration
        if self.spec.calibrate:
            calibrated = Calibration(np.clip(take(K), -40, 20), np.clip(take(C), -50, 50))
        noise = None if like.noise is None else np.exp(np.clip(take(*like.noise.shape), -30, 300))
        counts = None if like.weight_counts is None else np.maximum(weights, 1e-10)
        return CategoricalState(weights / weights.sum(), counts, by_class, calibrated, noise)

    def trimmed(self, state: CategoricalState) -> list[CategoricalState]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        if state.weight_counts is not None:
            return []
        candidates = []
        for kept in vanishing_weights(self.weights(state)):
            if state.class_weights is None:
                candidates.append(state._replace(weights=kept))
                continue
            inside = kept > 0
            by_class, common = state.class_weights * inside[:, None], state.weights * inside
            if common.sum() > 0 and (by_class.sum(axis=0) > 0).all():
                candidates.append(
                    state._replace(weights=common / common.sum(), class_weights=by_class / by_class.sum(axis=0))
                )
        return candidates

    def weights(self, state: CategoricalState) -> Array:
        """The weights of the views, (K,): the mean over classes where they differ by class."""
        return _weights(state)

    def bound_terms(self, state: CategoricalState, statistics: Statistics) -> dict[str, float]:
        """The bound, term by term: J_S minus the rest."""
        return {"J_S": float(statistics.views.log_evidence), **self._penalties(state)}

    @property
    def unit_change(self) -> float:
        """Classes have no units."""
        return 0.0

    def posterior(self, state: CategoricalState, information: WeightInformation | None = None) -> CategoricalPosterior:
        """What remains when the data are gone."""
        return CategoricalPosterior(
            link=self.spec.link,
            weights=_weights(state),
            class_weights=state.class_weights,
            calibration=state.calibration,
            noise=self.noise,
            noise_counts=state.noise,
            named=self.named,
            information=information,
        )

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> CategoricalPosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need unless they are unwanted."""
        state: CategoricalState = ascent.state
        if not intervals:
            return self.posterior(state)
        weights = self.weights(state)
        likelihood = self._likelihood(state)
        if state.class_weights is None:
            likelihood = likelihood._replace(weights=weights)
        known = weight_information(self.data, likelihood, self._noise(state), weights, self.prior)
        return self.posterior(state, known)

    def _likelihood(self, state: CategoricalState) -> Likelihood:
        weights = state.weights
        if state.weight_counts is not None:
            weights = np.exp(special.digamma(state.weight_counts) - special.digamma(state.weight_counts.sum()))
        return Likelihood(self.spec.link, self.spec.calibrate, state.calibration, weights, state.class_weights)

    def _noise(self, state: CategoricalState) -> tuple[NoiseModel, Array] | None:
        """The noise model and E[ln A]."""
        if self.noise is None or state.noise is None:
            return None
        return self.noise, label_noise.log_expected(state.noise)

    def _penalties(self, state: CategoricalState) -> dict[str, float]:
        """Divergences of Q from its priors, and minus the log priors of what is at its mode."""
        terms = {}
        if state.weight_counts is not None and self.spec.concentration is not None:
            prior = np.full(self.data.n_views, self.spec.concentration)
            terms["KL_w"] = float(kl_dirichlet(state.weight_counts, prior))
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            terms["penalty_w"] = -class_weights.log_prior(state.class_weights, state.weights, strength)
        if self.spec.calibrate:
            terms["penalty_calibration"] = -calibration.log_prior(state.calibration, self.prior)
        if self.noise is not None and state.noise is not None:
            terms["KL_noise"] = label_noise.divergence(self.noise, state.noise)
        return terms

    def _newton(self, state: CategoricalState, views: Sums) -> tuple[Array, Array]:
        """Newton's weights and ln kappa_k, or the present ones where there is no such step.

        sum_j ln sum_k w_k P_jk - J sum_k w_k has its maximum on the simplex; outer products of slopes stand for minus
        its Hessian (for the weights they are it), and weights are kept from falling below 0.
        """
        K, now = self.data.n_views, state.calibration
        u = np.concatenate([state.weights, now.log_kappa])
        units = np.concatenate([np.ones(K), np.exp(now.log_kappa)])  # slopes in kappa become slopes in ln kappa
        curvature = views.information * units * units[:, None]
        gradient = np.concatenate([views.slope - float(views.size), np.zeros(K)])
        if self.spec.calibrate:
            curvature[K:, K:] += calibration.log_kappa_precision(K, self.prior)
            gradient[K:] = calibration.gradient(now, views.calibration, self.prior)[:K]
        else:
            curvature[K:, K:] += np.eye(K)
        scale = np.sqrt(np.maximum(np.diagonal(curvature), 1e-300))  # views of any likelihood compare
        curvature = curvature / np.outer(scale, scale) + 1e-9 * np.eye(2 * K)
        try:
            weights, log_kappa = latent.solve(curvature, curvature @ (u * scale) + gradient / scale, K)
        except (RuntimeError, np.linalg.LinAlgError):  # no solution within the limit
            return state.weights, now.log_kappa
        weights, log_kappa = weights / scale[:K], log_kappa / scale[K:]
        change = np.clip(log_kappa - now.log_kappa, -0.5, 0.5)
        return (weights / weights.sum() if weights.sum() > 0 else state.weights), now.log_kappa + change

    def _update_weights(self, state: CategoricalState, views: Sums) -> CategoricalState:
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            by_class = class_weights.update_class_weights(views.class_count, views.class_load, state.weights, strength)
            common = class_weights.update_common_weights(by_class)
            return state._replace(weights=common, class_weights=by_class)
        counts = None if self.spec.concentration is None else self.spec.concentration + views.share
        weights = views.share if counts is None else counts
        return state._replace(weights=weights / weights.sum(), weight_counts=counts)


def categorical_problem(
    predictions: ViewPredictions, labels: LabelSets, spec: CategoricalMixture, *, noise: str
) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem that data and a model pose, and where to start: equal weights, kappa 1 unless logits are wide."""
    if spec.weights == "view_class" and spec.concentration is not None:
        raise ValueError(
            "concentration is the prior of weights='view'; with weights='view_class' use class_concentration"
        )
    probit = spec.link == "probit"
    data = categorical_data(predictions, labels, noise=noise, with_variance=probit, classes_last=probit)
    named = labels.annotator is not None and noise in ("annotator", "confusion")
    return pose_categorical(data, spec, noise=noise, named=named)


def pose_categorical(
    data: CategoricalBlocks, spec: CategoricalMixture, *, noise: str, named: bool
) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem that laid-out data and a model pose, and where to start."""
    K, C = data.n_views, data.n_classes
    model = label_noise.noise_model(noise, C, spec)
    uniform = np.full(K, 1 / K)
    counts = None
    if spec.concentration is not None:
        units = data.n_labels if model is None else data.n_instances
        counts = spec.concentration + uniform * units
    first = CategoricalState(
        weights=uniform,
        weight_counts=counts,
        class_weights=np.full((K, C), 1 / K) if spec.weights == "view_class" else None,
        calibration=Calibration(np.zeros(K), np.zeros(C)),
        noise=None if model is None else label_noise.start(model, data.n_annotators),
    )
    problem = CategoricalProblem(data, spec, model, named)
    return problem, _started(problem, first) if spec.calibrate else first


def _started(problem: CategoricalProblem, first: CategoricalState) -> CategoricalState:
    """The first state with temperatures that suit wide logits: of a few candidates those of the highest bound."""
    data = problem.data
    if data.widest.max() <= calibration.WIDE:
        return first
    if data.n_instances > _MOST_TRIED or not isinstance(data, CategoricalData):
        places = np.linspace(0, data.n_instances - 1, min(_MOST_TRIED, data.n_instances)).astype(int)
        noise = "none" if problem.noise is None else problem.noise.kind
        some = categorical_problem(*data.take(places), problem.spec, noise=noise)[1]
        return first._replace(calibration=some.calibration)
    tried = [
        first._replace(calibration=first.calibration._replace(log_kappa=log_kappa))
        for log_kappa in calibration.starts(data.ranges())
    ]
    return max(tried, key=lambda state: problem.evaluate(state)[0]) if len(tried) > 1 else first


def _weights(state: CategoricalState) -> Array:
    return state.weights if state.class_weights is None else np.asarray(state.class_weights.mean(axis=1))
