"""EM for the latent pool of continuous labels: a convex problem for the pool, closed forms for the rest."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from vbtta._support.matrices import inverse
from vbtta.data.labels import Array
from vbtta.inference import laplace, linalg
from vbtta.inference.blocks import Block, products
from vbtta.inference.em import Ascent, Problem
from vbtta.inference.laplace import PoolUncertainty, pool_weights
from vbtta.inference.linalg import Reader
from vbtta.models.base import Posterior, Source
from vbtta.models.gaussian_latent import steps
from vbtta.models.gaussian_latent.posterior import LatentPosterior
from vbtta.models.gaussian_latent.spec import GaussianLatent
from vbtta.models.gaussian_latent.steps import LatentPrior, LatentState, Moments, Scale
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.gaussian_mixture.steps import SLOPE_SCALE
from vbtta.models.gaussian_mixture.steps import start as mixture_start
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorStatistics, Truth
from vbtta.models.parts.standard import ContinuousBlocks


class Sums(NamedTuple):
    """All statistics of a pass."""

    moments: Moments
    annotators: AnnotatorStatistics | None


@dataclass(frozen=True)
class LatentProblem(Problem[LatentState, Sums, LatentPosterior]):
    """Data and prior of a latent pool, with or without annotators."""

    data: ContinuousBlocks
    prior: LatentPrior
    annotator_prior: AnnotatorPrior | None
    moments: Moments  # of the labels
    scale: Scale

    @property
    def shrinkage(self) -> float:
        """Lambda."""
        return self.prior.shrinkage

    def evaluate(self, state: LatentState) -> tuple[float, Sums]:
        """Bound on ln P(S, v, b) and statistics at a state."""
        C = self.data.n_outputs
        log_det = linalg.inverse_and_log_det(state.inverse_scale)[1]
        log_precision = float(linalg.wishart_log_det(state.dof, log_det, C))
        precision, people = state.precision, None
        if state.annotators is None:
            moments = self.moments
            outer = steps.residual_outer(moments, state.pool, state.offset)
            constant = float(moments.size) * (log_precision - C * np.log(2 * np.pi))
            bound = 0.5 * (constant - float((precision * outer).sum())) + float(moments.log_omega)
        else:
            moments, people, evidence = self._truth_pass(state, precision, log_precision)
            bound = evidence
        return bound - self._penalty(state), Sums(moments, people)

    def update(self, state: LatentState, statistics: Sums) -> LatentState:
        """The pool at the current precision, then the precision at the new pool, then the annotators."""
        moments = statistics.moments
        quadratic, linear = steps.curvature(moments, state.precision, self.prior, state.offset)
        pool, offset = laplace.solve(quadratic, linear, self.data.n_views)
        outer = steps.residual_outer(moments, pool, offset)
        people = state.annotators
        if people is not None and statistics.annotators is not None and self.annotator_prior is not None:
            people = annotators.update(people, statistics.annotators, self.annotator_prior)
        dof, inverse_scale = self.prior.nu + moments.size, self.prior.inverse_scale + outer
        return LatentState(pool, offset, dof, inverse_scale, people, self.scale.slope)

    def pack(self, state: LatentState) -> Array:
        """(sqrt v, b, log-Cholesky of V), then the annotators' likewise."""
        parts = [np.sqrt(state.pool), state.offset, linalg.log_cholesky(state.inverse_scale)]
        if state.annotators is not None:
            parts.append(annotators.pack(state.annotators))
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: LatentState) -> LatentState:
        """The state of a vector; degrees of freedom depend on the data alone and are `like`'s."""
        C, take = self.data.n_outputs, Reader(vector)
        pool, offset = take(self.data.n_views) ** 2, take(C)
        inverse_scale = linalg.from_log_cholesky(take(C * (C + 1) // 2), C)
        people = None if like.annotators is None else annotators.unpack(take, like.annotators)
        return LatentState(pool, offset, like.dof, inverse_scale, people, like.scale_slope)

    def weights(self, state: LatentState) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(state.pool)

    def bound_terms(self, state: LatentState, statistics: Sums) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""
        bound, _ = self.evaluate(state)
        penalty = self._penalty(state)
        return {"J_S": bound + penalty + self.unit_change, "penalty": penalty}

    @property
    def unit_change(self) -> float:
        """Difference between the bound in the labels' units and in standard units."""
        return -self.data.n_labels * float(np.log(self.data.standard.scale).sum())

    def posterior(self, state: LatentState) -> LatentPosterior:
        """What remains when the data are gone; without uncertainty of the pool."""
        K, size = self.data.n_views, self.data.n_views + self.data.n_outputs
        return LatentPosterior(state, self.data.standard, PoolUncertainty.none(K), np.zeros((size, size)))

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> LatentPosterior:
        """The posterior at the end, with the Laplace approximation of the pool, which predictions need too."""
        state, K = ascent.state, self.data.n_views
        quadratic, linear = steps.curvature(ascent.statistics.moments, state.precision, self.prior, state.offset)
        free = np.concatenate([state.pool > 0, np.ones(self.data.n_outputs, dtype=bool)])
        covariance = np.zeros_like(quadratic)
        covariance[np.ix_(free, free)] = inverse(quadratic[np.ix_(free, free)])
        variance = None
        if self.data.n_groups:
            of_offset = linalg.student_precision(state.offset**2, self.prior.offset_scale)  # (C,)
            prior = np.diag(np.concatenate([np.full(K, self.prior.shrinkage), of_offset]))
            sums, outer = self._group_sums(state)
            variance = laplace.score_variance(sums)
            variance[K:, K:] += prior[K:, K:]
            if state.annotators is not None:  # the curvature of complete data counts truths as known: take the scores'
                mode = np.concatenate([state.pool, state.offset])
                linear = (outer + prior) @ mode + linear - quadratic @ mode
                quadratic = outer + prior
        uncertainty = laplace.pool_uncertainty(quadratic, linear, K, self.prior.shrinkage, 1.0, variance)
        return replace(
            self.posterior(state),
            uncertainty=uncertainty._replace(n_groups=self.data.n_groups),
            covariance=covariance,
        )

    def _group_sums(self, state: LatentState) -> tuple[Array, Array]:
        """Sums of the scores of (v, b) over the instances of every group, and of their outer products over all."""
        n_groups, precision, scale = self.data.n_groups, state.precision, self.scale

        def block_sums(block: Block) -> tuple[Array, Array]:
            assert block.group is not None
            instance = np.arange(block.mean.shape[2]) if block.instance is None else block.instance
            if state.annotators is None:
                targets, count = block.value, block.repeats
            else:
                truth = _truth(block, state, scale, precision, 0.0)
                targets, instance = truth.mean[:, 0], np.arange(block.mean.shape[2])
                count = np.ones(len(instance))
            views = block.mean[:, :, instance]
            residual = targets - np.einsum("k,ckj->cj", state.pool, views) - state.offset[:, None]
            pull = precision @ residual * np.exp(scale.log_omega(block.mean))[instance]
            scores = np.concatenate([np.einsum("ckj,cj->kj", views, pull), pull])
            weighted = scores * count
            return laplace.group_sums(weighted, count, block.group[instance], n_groups), products(weighted, scores)

        return self.data.total(block_sums)

    def _truth_pass(
        self, state: LatentState, precision: Array, log_precision: float
    ) -> tuple[Moments, AnnotatorStatistics, float]:
        people, scale = state.annotators, self.scale
        assert people is not None

        def block_sums(block: Block) -> tuple[Moments, AnnotatorStatistics, Array]:
            posterior = _truth(block, state, scale, precision, log_precision)
            share = np.ones((1, block.mean.shape[2]))
            sums = annotators.annotator_statistics(block, people, posterior, share)
            moments = steps.moments_of(block, scale, posterior.mean[:, 0], posterior.covariance[0])
            return moments, sums, posterior.log_evidence.sum()

        moments, sums, evidence = self.data.total(block_sums)
        return moments, sums, float(evidence)

    def _penalty(self, state: LatentState) -> float:
        """Minus the log priors of the pool, plus the divergences of the other factors."""
        prior = self.prior
        penalty = laplace.pool_penalty(state.pool, prior.shrinkage, 1.0) + 0.5 * (self.scale.slope / SLOPE_SCALE) ** 2
        penalty -= float(linalg.student_log_density(state.offset**2, prior.offset_scale).sum())
        dof, scale = np.atleast_1d(state.dof), state.inverse_scale[None]
        penalty += float(linalg.kl_wishart(dof, scale, prior.nu, prior.inverse_scale).sum())
        if state.annotators is not None and self.annotator_prior is not None:
            penalty += annotators.divergence(state.annotators, self.annotator_prior)
        return float(penalty)


def _truth(block: Block, state: LatentState, scale: Scale, precision: Array, log_precision: float) -> Truth:
    """The truth of a block's instances given all labels."""
    assert state.annotators is not None
    mean = np.einsum("k,ckn->cn", state.pool, block.mean)[:, None] + state.offset[:, None, None]  # (C, 1, n)
    labels, log_omega = annotators.summarise(block, state.annotators), scale.log_omega(block.mean)[None]  # (1, n)
    precision = np.exp(log_omega)[..., None, None] * precision
    return annotators.infer_truth(mean, precision, log_precision + len(mean) * log_omega, labels)


def pose(source: Source, spec: GaussianLatent, start: Posterior | None = None) -> tuple[LatentProblem, LatentState]:
    """The problem that data and model pose, and where to start: the plain average of the views."""
    data = source.continuous(with_variance=False)
    C, K = data.n_outputs, data.n_views
    views = GaussianMixture(link="shift", nu=C + 2 if spec.nu is None else spec.nu, v=spec.v)
    reference, _ = mixture_start(data, views)
    moments = data.total(steps.moments_of)
    scale = reference.inverse_scale
    if spec.v is None:  # the average of the views may be far better than each of them
        scale = np.minimum(scale, reference.nu * np.diag(steps.variance_around_average(moments)))
    prior = LatentPrior(1.0, math.sqrt(2 / spec.beta), reference.nu, scale)
    prior = _with_shrinkage(prior, moments, spec)
    scale_of = Scale(0.0, np.full(K, 1 / K), np.zeros(C))
    if spec.scale != "constant":
        scale_of = steps.choose_slope(data, moments, prior)
        moments = data.total(partial(steps.moments_of, scale=scale_of))
        prior = _with_shrinkage(prior, moments, spec)
    offset = steps.mean_residual(moments)  # from a far one, shrunken to zero, EM might not return
    outer = steps.residual_outer(moments, np.full(K, 1 / K), offset)
    people, people_prior = None, None
    if spec.noise == "annotator":
        people_prior = annotators.default_prior(reference.residual_variance, spec.gamma)
        people = annotators.start(data.n_annotators, C, people_prior)
        people = annotators.resume(people, getattr(getattr(start, "state", None), "annotators", None))
    dof, inverse_scale = np.asarray(prior.nu + moments.size), prior.inverse_scale + outer
    first = LatentState(np.full(K, 1 / K), offset, dof, inverse_scale, people, scale_of.slope)
    return LatentProblem(data, prior, people_prior, moments, scale_of), first


def _with_shrinkage(prior: LatentPrior, moments: Moments, spec: GaussianLatent) -> LatentPrior:
    shrinkage = steps.choose_shrinkage(moments, prior) if spec.shrinkage is None else spec.shrinkage
    return prior._replace(shrinkage=shrinkage)
