"""Steps of a fit to a stream: stochastic natural-gradient variational Bayes.

A step looks at one block, as if all data were like it, and moves the natural parameters of every factor a share rho_t
of the way: eta <- (1 - rho_t) eta + rho_t eta_hat(block), rho_t = (t + delay)^-decay, t the number of labels before the
block in units of its own. For the conjugate factors that is an average of sufficient statistics (M. Hoffman et al.,
"Stochastic variational inference", JMLR 14, 2013).
The weights have no conjugate factor, and a view's weight, calibration and precision explain the same labels, so that
closed forms creep. For them the natural parameters are those of a joint normal, curvature A and l = A u + gradient of
each block's second-order expansion, and the state is the maximum of the averaged expansion
(M. E. Khan and H. Rue, "The Bayesian learning rule", JMLR 24, 2023).
"""

__all__ = ["ClassStream", "ContinuousStream"]

from typing import Any, NamedTuple

import numpy as np

from vbtta.infer import calibration, label_noise, latent
from vbtta.infer.accelerate import ascend
from vbtta.infer.blocks import Block, plus
from vbtta.infer.calibration import Calibration
from vbtta.infer.categorical_mixture import CategoricalProblem, CategoricalState, categorical_problem
from vbtta.infer.continuous import Density, MixtureState, MixtureStatistics, expectation
from vbtta.infer.mixture import MixtureProblem, Sums, mixture_problem
from vbtta.infer.mixture_information import scores_of
from vbtta.infer.mixture_posterior import MixtureFactors
from vbtta.infer.standard import continuous_data
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, CategoricalMixture, GaussianMixture

_LEAST = 5e-3  # a weight in a stream: a view that is of no use in one block may be of use in the next
_USED = 0.01  # weight from which a view's calibration is moved together with the weights
_FARTHEST = 0.3  # that it moves at once
# How the first labels are fitted: to the end, as expansions around a poor state mislead the steps after it.
_FIRST = EM(tol=1e-6, max_steps=300)


class _Expansion(NamedTuple):
    """Averages over labels of minus the bound's expansion u^T A u / 2 - l^T u, up to a constant."""

    curvature: Array  # (P, P): A
    linear: Array  # (P,): l


class ContinuousStream:
    """The stream of a continuous mixture, in the standard units of its first block."""

    def __init__(self, predictions: ViewPredictions, labels: LabelSets, model: GaussianMixture) -> None:
        self.model = model
        self.problem, first = mixture_problem(predictions, labels, model, annotators=model.noise == "annotator")
        self.state: MixtureFactors = _floored(ascend(self.problem, first, _FIRST).state)
        self.mean = self._average()
        self.expansion = self._expanded()

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        views = self.state.views
        return _cut(views.weights) if views.weight_counts is None else views.weights

    def step(self, predictions: ViewPredictions, labels: LabelSets, rate: float, n_labels: float) -> None:
        """Learn from a block."""
        prior, standard = self.problem.prior, self.problem.data.standard
        data = continuous_data(predictions, labels, standard, with_variance=self.model.heteroscedastic)
        self.problem = MixtureProblem(data, prior, self.problem.annotator_prior)
        self.mean = _blend(self.mean, self._average(), rate)
        self.expansion = _blend(self.expansion, self._expanded(), rate)
        views = _shifted(self.mean.views, self.state.views.theta_mean, prior.n_outputs, -1)
        after = self.problem.update(self.state, _scaled(Sums(views, self.mean.annotators), n_labels))
        self.state = after._replace(views=self._together(after.views, n_labels))

    def bound(self, n_labels: float) -> float:
        """The bound's estimate in the labels' units."""
        evidence = n_labels * float(self.mean.views.log_evidence)
        return evidence - self.penalty - n_labels * float(np.log(self.problem.data.standard.scale).sum())

    def posterior(self) -> Any:
        """What remains."""
        return self.problem.posterior(self.state._replace(views=self.state.views._replace(weights=self.weights)))

    def _average(self) -> Sums:
        """Statistics a label, with residuals as they are without any calibration: those of all blocks compare."""
        bound, sums = self.problem.evaluate(self.state)
        self.penalty = float(sums.views.log_evidence) - bound
        raw = _shifted(sums.views, self.state.views.theta_mean, self.problem.prior.n_outputs, 1)
        average: Sums = _scaled(Sums(raw, sums.annotators), 1 / self.problem.n_labels)
        return average

    def _expanded(self) -> _Expansion:
        """The bound around the state in u = (w, theta, ln|Lambda|/C), by the slopes of every label."""
        prior, views, people = self.problem.prior, self.state.views, self.state.annotators
        weights = np.exp(views.expected_log_weights)
        weights = weights / weights.sum()
        density = Density.of(views, prior, views.expected_log_weights)

        def one(block: Block) -> tuple[Array, Array, Array]:
            expected = expectation(block, density, prior, people)
            ratio = expected.share / (expected.repeats * weights[:, None])
            slopes = scores_of(expected, density, weights, ratio)
            return (slopes * expected.repeats) @ slopes.T, slopes @ expected.repeats, expected.repeats.sum()

        curvature, rise, size = self.problem.data.total(one)
        rise[: len(weights)] -= size
        here = np.concatenate([weights, views.theta_mean.T.ravel(), _log_precision(views)])
        return _Expansion(curvature / size, (curvature @ here + rise) / size)

    def _together(self, views: MixtureState, n_labels: float) -> MixtureState:
        """Weights, calibration and precision at the maximum of the averaged expansion and the prior.

        EM's closed forms (`views`) creep where views overlap; they stand for views of next to no weight.
        """
        prior, before = self.problem.prior, self.state.views
        K, D = views.theta_mean.shape
        strength = np.concatenate(
            [np.zeros(K), np.full(K * D, prior.beta), np.full(K, 0.5 * prior.nu * prior.n_outputs)]
        )
        centre = np.zeros(len(strength))
        centre[-K:] = np.log(prior.nu) - np.linalg.slogdet(prior.inverse_scale)[1] / prior.n_outputs
        curvature = self.expansion.curvature + np.diag(strength) / n_labels
        linear = self.expansion.linear + strength * centre / n_labels
        weights, others = _maximum(_Expansion(curvature, linear), before.weights)
        if not len(others):
            return views
        used = np.minimum(weights, before.weights) > _USED
        theta = np.where(used[:, None], _near(others[: K * D].reshape(D, K).T, before.theta_mean), views.theta_mean)
        level = np.where(used, _near(others[K * D :], _log_precision(before)), _log_precision(views))
        scale = views.inverse_scale * np.exp(_log_precision(views) - level)[:, None, None]
        counts = None if prior.concentration is None else prior.concentration + n_labels * weights
        weights = weights if counts is None else counts / counts.sum()
        return views._replace(weights=weights, weight_counts=counts, theta_mean=theta, inverse_scale=scale)


class ClassStream:
    """The stream of a categorical mixture."""

    def __init__(self, predictions: ViewPredictions, labels: LabelSets, model: CategoricalMixture) -> None:
        self.model, self.noise = model, model.noise or label_noise.default_noise(labels)
        self.problem, first = categorical_problem(predictions, labels, model, noise=self.noise)
        self.state: CategoricalState = _floored_classes(ascend(self.problem, first, _FIRST).state)
        self.average, self.expansion, self.calibration, self.counts = self._look()

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return _cut(self.state.weights) if self.state.weight_counts is None else self.state.weights

    def step(self, predictions: ViewPredictions, labels: LabelSets, rate: float, n_labels: float) -> None:
        """Learn from a block."""
        self.problem = categorical_problem(predictions, labels, self.model, noise=self.noise)[0]
        average, expansion, temperature, counts = self._look()
        self.average = _blend(self.average, average, rate)
        self.expansion = _blend(self.expansion, expansion, rate)
        self.calibration = _blend(self.calibration, temperature, rate)
        self.counts = None if counts is None or self.counts is None else _blend(self.counts, counts, rate)
        state = self.state
        if state.weight_counts is not None and self.model.concentration is not None:
            total = self.model.concentration + n_labels * self.average[1]
            state = state._replace(weights=total / total.sum(), weight_counts=total)
        else:
            state = state._replace(weights=self._weighted(n_labels)[0])
        if self.model.calibrate:
            state = state._replace(calibration=self._calibrated(n_labels))
        if self.counts is not None and self.problem.noise is not None:
            state = state._replace(noise=self.problem.noise.prior + n_labels * self.counts)
        self.state = state

    def bound(self, n_labels: float) -> float:
        """The bound's estimate."""
        return n_labels * float(self.average[0]) - self.penalty

    def posterior(self) -> Any:
        """What remains."""
        return self.problem.posterior(self.state._replace(weights=self.weights))

    @property
    def _together(self) -> bool:
        """Whether weights and temperatures are moved together: a view may be made useful by either."""
        return self.model.calibrate and self.model.link == "softmax"

    def _weighted(self, n_labels: float) -> tuple[Array, Array | None]:
        """Weights and, where they move together, ln kappa_k at the maximum of the averaged expansion and the prior."""
        K, before = self.problem.data.n_views, self.state.weights
        if not self._together:
            curvature, linear = self.expansion.curvature[:K, :K], self.expansion.linear[:K]
            return _maximum(_Expansion(curvature, linear), before)[0], None
        prior = np.zeros((2 * K, 2 * K))
        prior[K:, K:] = calibration.log_kappa_precision(K, self.problem.prior)
        whole = _Expansion(self.expansion.curvature + prior / n_labels, self.expansion.linear)
        weights, log_kappa = _maximum(whole, before)
        return weights, log_kappa if len(log_kappa) else None

    def _calibrated(self, n_labels: float) -> Calibration:
        """The mode of temperatures and offsets under the averaged expansions and the prior."""
        now, prior, K = self.state.calibration, self.problem.prior, self.problem.data.n_views
        curvature, linear = _scaled(self.calibration, n_labels)
        inside = curvature + calibration.precision(K, len(now.offset), prior)
        step = np.linalg.solve(inside, linear) - np.concatenate(now)
        known = self._weighted(n_labels)[1] if self._together else None
        if known is not None:
            step[:K] = known - now.log_kappa
            given = linear[K:] - inside[K:, :K] @ known
            step[K:] = np.linalg.solve(inside[K:, K:], given) - now.offset
        return calibration.moved(now, step / max(1.0, float(np.abs(step).max())))

    def _look(self) -> tuple[tuple[Array, Array], _Expansion, _Expansion, Array | None]:
        """Averages over the block's labels: (evidence, shares), expansions in weights and calibration, noise."""
        problem: CategoricalProblem = self.problem
        bound, found = problem.evaluate(self.state)
        self.penalty = float(found.views.log_evidence) - bound
        views, K, share = found.views, problem.data.n_views, 1 / problem.n_labels
        now = self.state.calibration
        units = np.concatenate([np.ones(K), np.exp(now.log_kappa)])  # slopes in kappa become slopes in ln kappa
        curvature = views.information * np.outer(units, units)
        rise = np.concatenate([views.slope - float(views.size), views.calibration.kappa * units[K:]])
        linear = curvature @ np.concatenate([self.state.weights, now.log_kappa]) + rise
        inside = calibration.information(now, views.calibration)
        slope = np.concatenate([np.exp(now.log_kappa) * views.calibration.kappa, views.calibration.offset])
        counts = None if found.noise is None or problem.noise is None else share * (found.noise - problem.noise.prior)
        return (
            _scaled((views.log_evidence, views.share), share),
            _scaled(_Expansion(curvature, linear), share),
            _scaled(_Expansion(inside, inside @ np.concatenate(now) + slope), share),
            counts,
        )


def _log_precision(views: MixtureState) -> Array:
    """ln|E Lambda_k|/C: (K,)."""
    C = views.inverse_scale.shape[1]
    return np.asarray(np.log(views.dof) - np.linalg.slogdet(views.inverse_scale)[1] / C)


def _near(values: Array, before: Array) -> Array:
    """Values, not too far from those before."""
    return np.clip(values, before - _FARTHEST, before + _FARTHEST)


def _maximum(expansion: _Expansion, before: Array) -> tuple[Array, Array]:
    """Weights on the simplex, and what else there is, where the averaged expansion has its maximum.

    Where there is none: the weights before, and nothing else.
    """
    curvature, linear = expansion
    K = len(before)
    scale = np.sqrt(np.maximum(np.diagonal(curvature), 1e-300))
    ridge = 1e-9 * np.eye(len(scale))
    try:
        weights, others = latent.solve(curvature / np.outer(scale, scale) + ridge, linear / scale, K)
    except (RuntimeError, np.linalg.LinAlgError):
        return before, np.zeros(0)
    weights = weights / scale[:K]
    total = weights.sum()
    if not np.isfinite(total) or total <= 0:
        return before, np.zeros(0)
    return _kept(weights / total), others / scale[K:]


def _shifted(views: MixtureStatistics, theta: Array, n_outputs: int, sign: int) -> MixtureStatistics:
    """Moments of (f, 1, e) from the residual e at a calibration to that without one (sign 1), or back (-1)."""
    C, (K, D) = n_outputs, theta.shape
    change = np.tile(np.eye(3 * C), (K, 1, 1))
    first = 2 * C - D  # without slopes theta acts on the column of ones alone
    for d in range(D):
        change[:, 2 * C + d % C, first + d] = sign * theta[:, d]
    return views._replace(moments=change @ views.moments @ np.swapaxes(change, 1, 2))


def _floored(state: MixtureFactors) -> MixtureFactors:
    views = state.views
    return (
        state if views.weight_counts is not None else state._replace(views=views._replace(weights=_kept(views.weights)))
    )


def _floored_classes(state: CategoricalState) -> CategoricalState:
    return state if state.weight_counts is not None else state._replace(weights=_kept(state.weights))


def _kept(weights: Array) -> Array:
    kept = np.maximum(weights, _LEAST)
    return np.asarray(kept / kept.sum())


def _cut(weights: Array) -> Array:
    """Weights without those that are kept up for the next block alone."""
    found = np.where(weights > 2 * _LEAST, weights, 0)
    return np.asarray(found / found.sum())


def _scaled(sums: Any, factor: float) -> Any:
    """Statistics times a number."""
    if sums is None:
        return None
    if not isinstance(sums, tuple):
        return factor * sums
    fields = [_scaled(one, factor) for one in sums]
    return type(sums)(*fields) if hasattr(sums, "_fields") else tuple(fields)


def _blend(before: Any, now: Any, rate: float) -> Any:
    return plus(_scaled(before, 1 - rate), _scaled(now, rate))
