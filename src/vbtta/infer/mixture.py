"""The continuous mixture as a problem to climb: data, prior, bound and steps."""

__all__ = ["MixtureProblem", "mixture_problem", "pose_mixture"]

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vbtta.infer import continuous, truth
from vbtta.infer.accelerate import Ascent, ascend, hastened_weights, vanishing_weights
from vbtta.infer.blocks import Block
from vbtta.infer.continuous import Density, MixturePrior, MixtureState, MixtureStatistics
from vbtta.infer.intervals import WeightInformation
from vbtta.infer.matrices import Reader, from_log_cholesky, log_cholesky
from vbtta.infer.mixture_information import weight_information
from vbtta.infer.mixture_posterior import MixtureFactors, MixturePosterior
from vbtta.infer.standard import ContinuousBlocks, continuous_data
from vbtta.infer.truth import AnnotatorPrior, AnnotatorStatistics
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, GaussianMixture

_MOST_SCORED = 100_000  # labels from which intervals are estimated
_MOST_SCREENED = 20_000  # labels from which the prior's scale is


class Sums(NamedTuple):
    """All statistics of a pass."""

    views: MixtureStatistics
    annotators: AnnotatorStatistics | None


@dataclass(frozen=True)
class MixtureProblem:
    """Data and prior of a continuous mixture, with or without annotators."""

    data: ContinuousBlocks
    prior: MixturePrior
    annotator_prior: AnnotatorPrior | None

    @property
    def n_labels(self) -> float:
        """J."""
        return self.data.n_labels

    def evaluate(self, state: MixtureFactors) -> tuple[float, Sums]:
        """Bound and statistics at a state: one pass over the blocks."""
        density, prior = self._density(state.views), self.prior

        def one(block: Block) -> Sums:  # holds on to nothing but what it needs: it may travel
            expected = continuous.expectation(block, density, prior, state.annotators)
            people = None
            if state.annotators is not None and expected.truth is not None:
                people = truth.annotator_statistics(block, state.annotators, expected.truth, expected.share)
            return Sums(continuous.statistics(expected), people)

        sums = self.data.total(one)
        bound = float(sums.views.log_evidence) - self._penalty(state.views)
        if state.annotators is not None and self.annotator_prior is not None:
            bound -= truth.divergence(state.annotators, self.annotator_prior)
        return bound, sums

    def update(self, state: MixtureFactors, statistics: Sums) -> MixtureFactors:
        """One step of every factor."""
        people = state.annotators
        if people is not None and statistics.annotators is not None and self.annotator_prior is not None:
            people = truth.update(people, statistics.annotators, self.annotator_prior)
        return MixtureFactors(self._step(state.views, statistics.views), people)

    def hasten(self, before: MixtureFactors, after: MixtureFactors, statistics: Sums) -> MixtureFactors:
        """More of the weights' update where they creep; a Dirichlet's do not."""
        if after.views.weight_counts is not None:
            return after
        weights = hastened_weights(before.views.weights, after.views.weights, statistics.views.overlap)
        if weights is after.views.weights:
            return after
        return after._replace(views=after.views._replace(weights=weights))

    def pack(self, state: MixtureFactors) -> Array:
        """(sqrt w, m, log-Cholesky of G^-1, ln nu_k, log-Cholesky of V_k), then the annotators' likewise."""
        views, people = state
        weights = views.weights if views.weight_counts is None else views.weight_counts
        parts = [
            np.sqrt(weights),
            views.theta_mean,
            log_cholesky(views.theta_covariance),
            np.log(views.dof - self._least_dof),
            log_cholesky(views.inverse_scale),
        ]
        if people is not None:
            parts.append(truth.pack(people))
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
            dof=self._least_dof + np.exp(np.minimum(take(K), 300)),
            inverse_scale=from_log_cholesky(take(K, C * (C + 1) // 2), C),
        )
        people = None if like.annotators is None else truth.unpack(take, like.annotators)
        return MixtureFactors(views, people)

    def trimmed(self, state: MixtureFactors) -> list[MixtureFactors]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        views = state.views
        if views.weight_counts is not None:
            return []
        return [state._replace(views=views._replace(weights=weights)) for weights in vanishing_weights(views.weights)]

    def weights(self, state: MixtureFactors) -> Array:
        """The weights of the views: (K,)."""
        return state.views.weights

    def bound_terms(self, state: MixtureFactors, statistics: Sums) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""
        terms = continuous.bound_terms(state.views, statistics.views, self.prior)
        if state.annotators is not None and self.annotator_prior is not None:
            # here J_S - Pi_z is the evidence of the label sets, the truth integrated out
            terms["J_S"] = float(statistics.views.log_evidence) - terms["J_z"]
            terms["Pi_z"] = 0.0
            terms["KL_annotators"] = truth.divergence(state.annotators, self.annotator_prior)
        terms["J_S"] += self.unit_change
        return terms

    @property
    def unit_change(self) -> float:
        """What the bound in the labels' units has on top of that in standard units."""
        return -self.data.n_labels * float(np.log(self.data.standard.scale).sum())

    def posterior(self, state: MixtureFactors, information: WeightInformation | None = None) -> MixturePosterior:
        """What remains when the data are gone."""
        return MixturePosterior(self.prior, state, self.data.standard, information)

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> MixturePosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need unless they are unwanted."""
        state: MixtureFactors = ascent.state
        if not intervals:
            return self.posterior(state)
        some = self.data.some(_MOST_SCORED)
        likelihood, first = likelihood_problem(some, self, state)
        found = ascend(likelihood, first, EM(tol=1e-6, max_steps=200))
        return self.posterior(state, weight_information(some, self.data, likelihood.prior, found.state))

    def _density(self, views: MixtureState) -> Density:
        return Density.of(views, self.prior, views.expected_log_weights)

    def _penalty(self, views: MixtureState) -> float:
        return continuous.divergence(views, self.prior)

    def _step(self, views: MixtureState, total: MixtureStatistics) -> MixtureState:
        return continuous.update(views, total, self.prior)

    @property
    def _least_dof(self) -> int:
        return self.data.n_outputs - 1


def _variance_within(data: ContinuousBlocks, prior: MixturePrior, first: MixtureState) -> tuple[float, ...]:
    """Residual variance of a label around its own view, in the labels' units: (C,), the prior's v.

    A view's residuals against all labels are those of the labels it explains and of the others'; where views
    differ much, that is far too large a guess. A short fit tells them apart.
    """
    some = data.some(_MOST_SCREENED)
    factors = ascend(MixtureProblem(some, prior, None), MixtureFactors(first, None), EM(max_steps=30, tol=1e-4)).state
    views = factors.views
    within = views.weights @ np.diagonal(views.inverse_scale / views.dof[:, None, None], axis1=1, axis2=2)
    return tuple(np.minimum(within, prior.residual_variance) * data.standard.scale**2)


class LikelihoodProblem(MixtureProblem):
    """The same data and prior with calibration and precision at their mode, for intervals.

    The bound charges a view for the doubt about its calibration, and rightly drops views that are worth less;
    but a dropped view may still have had a small weight. Intervals therefore come from the likelihood.
    """

    def _density(self, views: MixtureState) -> Density:
        return Density.of(views, self.prior, views.expected_log_weights, plug_in=True)

    def _penalty(self, views: MixtureState) -> float:
        """Minus the log prior of theta and ln Lambda, up to a constant."""
        precision = views.precision
        log_det = np.linalg.slogdet(precision)[1]
        trace = np.einsum("cd,kcd->", self.prior.inverse_scale, precision)
        return float(0.5 * (trace - self.prior.nu * log_det.sum() + self.prior.beta * (views.theta_mean**2).sum()))

    def _step(self, views: MixtureState, total: MixtureStatistics) -> MixtureState:
        return continuous.update(views, total, self.prior, plug_in=True)


def likelihood_problem(
    some: ContinuousBlocks, problem: MixtureProblem, state: MixtureFactors
) -> tuple[LikelihoodProblem, MixtureFactors]:
    """The likelihood's problem and a start that gives dropped views a chance: as they are, as precise as the others."""
    views, prior = state.views, problem.prior
    dropped = views.weights == 0
    weights = np.where(dropped, 0.1 / max(dropped.sum(), 1), 0.9 * views.weights)
    typical = np.einsum("k,kcd->cd", views.weights, views.inverse_scale / views.dof[:, None, None])
    own_scale = np.where(dropped[:, None, None], views.dof[:, None, None] * typical, views.inverse_scale)
    first = views._replace(weights=weights / weights.sum(), weight_counts=None, inverse_scale=own_scale)
    prior = prior._replace(concentration=None, inverse_scale=prior.nu * typical)
    return LikelihoodProblem(some, prior, problem.annotator_prior), state._replace(views=first)


def mixture_problem(
    predictions: ViewPredictions, labels: LabelSets, spec: GaussianMixture, *, annotators: bool
) -> tuple[MixtureProblem, MixtureFactors]:
    """The problem that data and model pose, and where to start."""
    if spec.heteroscedastic and predictions.variance is None:
        raise ValueError(
            "heteroscedastic=True needs the views' variance over draws; give ViewPredictions(variance=...), or leave "
            "the option off"
        )
    data = continuous_data(predictions, labels, with_variance=spec.heteroscedastic)
    return pose_mixture(data, spec, annotators=annotators)


def pose_mixture(
    data: ContinuousBlocks, spec: GaussianMixture, *, annotators: bool
) -> tuple[MixtureProblem, MixtureFactors]:
    """The problem that laid-out data and model pose, and where to start."""
    prior, state = continuous.start(data, spec)
    if spec.v is None:
        prior, state = continuous.start(data, replace(spec, v=_variance_within(data, prior, state)))
    if not annotators:
        return MixtureProblem(data, prior, None), MixtureFactors(state, None)
    people = truth.default_prior(prior.residual_variance, spec.gamma)
    return MixtureProblem(data, prior, people), MixtureFactors(
        state, truth.start(data.n_annotators, data.n_outputs, people)
    )
