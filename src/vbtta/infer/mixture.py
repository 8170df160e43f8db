"""The continuous mixture as a problem to climb: data, prior, bound and steps."""

__all__ = ["MixtureProblem", "mixture_problem"]

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vbtta.infer import continuous, truth
from vbtta.infer.accelerate import Ascent, vanishing_weights
from vbtta.infer.blocks import Block, add, map_blocks
from vbtta.infer.continuous import Density, MixturePrior, MixtureState, MixtureStatistics
from vbtta.infer.intervals import WeightInformation, eliminate
from vbtta.infer.matrices import Reader, from_log_cholesky, log_cholesky
from vbtta.infer.mixture_posterior import MixtureFactors, MixturePosterior
from vbtta.infer.standard import ContinuousData, continuous_data
from vbtta.infer.truth import AnnotatorPrior, AnnotatorStatistics
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.specs import GaussianMixture

_MOST_SCORED = 100_000  # labels from which the information is estimated


class Sums(NamedTuple):
    """All statistics of a pass."""

    views: MixtureStatistics
    annotators: AnnotatorStatistics | None


@dataclass(frozen=True)
class MixtureProblem:
    """Data and prior of a continuous mixture, with or without annotators."""

    data: ContinuousData
    prior: MixturePrior
    annotator_prior: AnnotatorPrior | None

    @property
    def n_labels(self) -> float:
        """J."""
        return self.data.n_labels

    def evaluate(self, state: MixtureFactors) -> tuple[float, Sums]:
        """Bound and statistics at a state: one pass over the blocks."""
        density = Density.of(state.views, self.prior, state.views.expected_log_weights)

        def one(block: Block) -> Sums:
            expected = continuous.expectation(block, density, self.prior, state.annotators)
            people = None
            if state.annotators is not None and expected.truth is not None:
                people = truth.annotator_statistics(block, state.annotators, expected.truth, expected.share)
            return Sums(continuous.statistics(expected), people)

        parts = map_blocks(one, self.data.blocks)
        views = add([part.views for part in parts])
        people = [part.annotators for part in parts if part.annotators is not None]
        bound = float(views.log_evidence) - continuous.divergence(state.views, self.prior)
        if state.annotators is not None and self.annotator_prior is not None:
            bound -= truth.divergence(state.annotators, self.annotator_prior)
        return bound, Sums(views, add(people) if people else None)

    def update(self, state: MixtureFactors, statistics: Sums) -> MixtureFactors:
        """One step of every factor."""
        people = state.annotators
        if people is not None and statistics.annotators is not None and self.annotator_prior is not None:
            people = truth.update(people, statistics.annotators, self.annotator_prior)
        return MixtureFactors(continuous.update(state.views, statistics.views, self.prior), people)

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
        return MixturePosterior(self.prior, state, self.annotator_prior, self.data.standard, information)

    def finish(self, ascent: Ascent, first: MixtureFactors) -> MixturePosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need."""
        return self.posterior(ascent.state, self._information(ascent.state, first))

    def _information(self, state: MixtureFactors, first: MixtureFactors) -> WeightInformation:
        """Observed information of the weights: outer products of scores, calibration eliminated.

        A view of weight zero has forgotten its calibration; it is judged at the one it had at the start, where
        all labels were fitted to it.
        """
        views, K = state.views, len(state.views.weights)
        free = views.weights > 0
        known = MixtureState(
            views.weights,
            None,
            *(
                np.where(free.reshape(-1, *[1] * (now.ndim - 1)), now, then)
                for now, then in zip(views[2:], first.views[2:], strict=True)
            ),
        )
        density = Density.of(known, self.prior, np.zeros(K))
        step = max(1, int(self.data.n_labels // _MOST_SCORED))
        blocks = self.data.blocks[::step]

        def one(block: Block) -> tuple[Array, Array, Array]:
            expected = continuous.expectation(block, density, self.prior, state.annotators)
            count = block.repeats if state.annotators is None else np.ones(expected.share.shape[1])
            scores = _scores(expected, density, views.weights, count)
            return (scores * count) @ scores.T, scores[:K] @ count, np.asarray(count.sum())

        parts = map_blocks(one, blocks)
        information = np.sum([part[0] for part in parts], axis=0)
        gain = np.sum([part[1] for part in parts], axis=0)
        seen = float(sum(part[2] for part in parts))
        all_units = self.data.n_labels if state.annotators is None else self.data.n_instances
        D, C = views.theta_mean.shape[1], self.data.n_outputs
        nuisance = np.concatenate(
            [np.full(D * free.sum(), self.prior.beta), np.full(free.sum(), 0.5 * self.prior.nu * C)]
        )
        scale = all_units / seen
        gradient = np.where(free, 0.0, scale * (gain - seen))
        return WeightInformation(gradient, eliminate(scale * information, K, nuisance))

    @property
    def _least_dof(self) -> int:
        return self.data.n_outputs - 1


def mixture_problem(
    predictions: ViewPredictions, labels: LabelSets, spec: GaussianMixture, *, annotators: bool
) -> tuple[MixtureProblem, MixtureFactors]:
    """The problem that data and model pose, and where to start."""
    data = continuous_data(predictions, labels, with_variance=spec.heteroscedastic)
    prior, state = continuous.start(data, spec)
    if not annotators:
        return MixtureProblem(data, prior, None), MixtureFactors(state, None)
    people = AnnotatorPrior(1.0, float(prior.residual_variance.mean()), spec.gamma)
    return MixtureProblem(data, prior, people), MixtureFactors(
        state, truth.start(data.n_annotators, data.n_outputs, people)
    )


def _scores(expected: continuous.Expectation, density: Density, weights: Array, count: Array) -> Array:
    """Derivatives of every label's log likelihood: weights, calibration, log precision; (K + F (D + 1), j).

    The expectation was taken with equal weights, so that views of weight zero have a score too.
    """
    relative = expected.share / count
    ratio = relative / (weights @ relative)  # (K, j): rho
    free = np.flatnonzero(weights > 0)
    share = weights[free, None] * ratio[free]  # (F, j)
    pull = np.einsum("kcd,dkj->ckj", density.residual_form, expected.residual)[:, free]  # Lambda e
    residual = expected.residual[:, free]
    C = len(residual)
    columns = [regressor[free] for regressor in expected.regressors]
    if expected.log_omega is None:
        columns += [np.ones_like(share)] * C
    calibration = [share * column * pull[d % C] for d, column in enumerate(columns)]
    distance = (residual * pull).sum(axis=0)
    if expected.truth is not None:
        distance += np.einsum("kcd,kjcd->kj", density.residual_form[free], expected.truth.covariance[free])
    precision = share * 0.5 * (C - distance)
    return np.concatenate([ratio, *calibration, precision])
