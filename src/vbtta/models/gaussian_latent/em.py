"""EM for the latent pool of continuous labels: a convex problem for the pool, closed forms for the rest (eq. 19)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference import laplace, linalg
from vbtta.inference.em import Ascent, Block, Problem, products
from vbtta.inference.laplace import pool_weights
from vbtta.inference.linalg import Reader, inverse
from vbtta.models.base import Posterior, Source
from vbtta.models.gaussian_latent.posterior import LatentPosterior, LatentPrior, LatentState, Scale
from vbtta.models.gaussian_latent.spec import GaussianLatent
from vbtta.models.gaussian_mixture.em import initialise as initialise_mixture
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.parts import annotators
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorStatistics, Truth
from vbtta.models.parts.standard import SLOPE_SCALE, SMALLEST_VARIANCE, ContinuousBlocks, slope_step

_SLOPE_STEPS, _PRELIMINARY_STEPS = 10, 5
_SHRINKAGES = (10.0 ** np.arange(-1.0, 8.01, 0.25)).tolist()  # candidates for lambda


class Moments(NamedTuple):
    """Sums over labels (or, with annotators, over instances and their truths)."""

    table: Array  # (C, C, K + 2, K + 2): omega a_c a_d^T, a_c = (f_c, 1, y_c) for output c
    size: Array  # ()
    log_omega: Array  # (): half the log determinants of omega

    @property
    def n_views(self) -> int:
        """K."""
        return int(self.table.shape[-1]) - 2

    @property
    def mean_residual(self) -> Array:
        """Mean of the labels minus the plain average of the views: (C,)."""
        sums = np.einsum("cck->ck", self.table[..., -2])  # of (f, 1, y)
        return np.asarray((sums[:, -1] - sums[:, :-2].mean(axis=1)) / np.maximum(sums[:, -2], 1.0))

    def residual_outer(self, pool: Array, offset: Array) -> Array:
        """Sum of omega (y - F v - b)(y - F v - b)^T: (C, C)."""
        C = len(offset)
        factors = np.column_stack([np.tile(pool, (C, 1)), offset, np.full(C, -1.0)])  # (C, K + 2)
        values, vectors = np.linalg.eigh(np.einsum("ck,cdkl,dl->cd", factors, self.table, factors))
        return np.asarray((vectors * np.maximum(values, 0)) @ vectors.T)  # rounding must not make it indefinite

    def precision_around(self, pool: Array, offset: Array, prior: LatentPrior) -> Array:
        """E[Lambda] at a pool: (C, C)."""
        inverse_scale = prior.inverse_scale + self.residual_outer(pool, offset)
        return np.asarray((prior.nu + self.size) * linalg.inverse_and_log_det(inverse_scale)[0])


def moments_of(block: Block, scale: Scale | None = None, truth: Truth | None = None) -> Moments:
    """Sums of one block; a truth replaces the labels."""
    log_omega = np.zeros(block.mean.shape[2]) if scale is None else scale.log_omega(block.mean)
    mean, targets, count = block.mean, block.value, block.repeats
    if truth is not None:
        targets, count = truth.mean[:, 0], np.ones(mean.shape[2])
    elif block.instance is not None:
        mean, log_omega = mean[:, :, block.instance], log_omega[block.instance]
    C, K, _ = mean.shape
    columns = np.concatenate([mean, np.ones((C, 1, len(count))), targets[:, None]], axis=1).reshape(C * (K + 2), -1)
    omega = count * np.exp(log_omega)
    table = products(columns * omega, columns).reshape(C, K + 2, C, K + 2).transpose(0, 2, 1, 3)
    if truth is not None:
        table[:, :, -1, -1] += np.einsum("n,ncd->cd", omega, truth.covariance[0])
    return Moments(table, np.asarray(count.sum()), np.asarray(0.5 * C * (count @ log_omega)))


def choose_slope(data: ContinuousBlocks, moments: Moments, prior: LatentPrior) -> Scale:
    """The mode of the slope a under its normal prior, around the pool of a preliminary fit."""
    K = moments.n_views
    pool, offset = np.full(K, 1 / K), moments.mean_residual
    for _ in range(_PRELIMINARY_STEPS):
        precision = moments.precision_around(pool, offset, prior)
        pool, offset = laplace.solve(*curvature(moments, precision, prior, offset), K)
    precision, scale = moments.precision_around(pool, offset, prior), Scale(0.0, pool, offset)
    for _ in range(_SLOPE_STEPS):

        def derivatives(block: Block, scale: Scale = scale, precision: Array = precision) -> tuple[Array, Array]:
            instance = slice(None) if block.instance is None else block.instance
            x, omega = scale.covariate(block.mean)[instance], np.exp(scale.log_omega(block.mean))[instance]
            residual = block.value - np.einsum("k,ckn->cn", pool, block.mean)[:, instance] - offset[:, None]
            square = omega * np.einsum("cj,cd,dj->j", residual, precision, residual)
            return block.repeats @ (x * (square - len(offset))), block.repeats @ (x**2 * square)

        first, second = data.total(derivatives)
        step = slope_step(scale.slope, float(first), float(second), SLOPE_SCALE)
        scale = scale._replace(slope=scale.slope + step)
        if abs(step) < 1e-4:
            break
        precision = data.total(partial(moments_of, scale=scale)).precision_around(pool, offset, prior)
    return scale


def curvature(moments: Moments, precision: Array, prior: LatentPrior, offset: Array) -> tuple[Array, Array]:
    """Quadratic energy u^T A u / 2 - g^T u of u = (v, b), tangent at an offset: A (K + C, K + C) and g (K + C,)."""
    K, C = moments.n_views, len(precision)
    gram = np.einsum("cd,cdkl->kl", precision, moments.table)
    by_offset = np.einsum("cd,cdk->kd", precision, moments.table[..., -2])  # (K + 2, C)
    quadratic = np.empty((K + C, K + C))
    quadratic[:K, :K] = gram[:K, :K] + prior.shrinkage * np.eye(K)
    quadratic[:K, K:], quadratic[K:, :K] = by_offset[:K], by_offset[:K].T
    quadratic[K:, K:] = moments.table[0, 0, -2, -2] * precision
    quadratic[K:, K:] += np.diag(linalg.student_precision(offset**2, prior.offset_scale))
    return quadratic, np.concatenate([gram[:K, -1] + prior.shrinkage / K, by_offset[-1]])


def choose_shrinkage(moments: Moments, prior: LatentPrior) -> LatentPrior:
    """The prior with lambda of the largest Laplace evidence on a grid, precision and lambda in turn."""
    K, before = moments.n_views, 0.0
    pool, offset = np.full(K, 1 / K), moments.mean_residual
    for _ in range(20):
        precision = moments.precision_around(pool, offset, prior)
        candidates = [prior._replace(shrinkage=shrinkage) for shrinkage in _SHRINKAGES]
        prior = candidates[int(np.argmax([_log_evidence(moments, precision, trial, offset) for trial in candidates]))]
        pool, offset = laplace.solve(*curvature(moments, precision, prior, offset), K)
        if prior.shrinkage == before:
            break
        before = prior.shrinkage
    return prior


def _log_evidence(moments: Moments, precision: Array, prior: LatentPrior, offset: Array) -> float:
    """Log evidence of lambda by Laplace, up to terms free of it."""
    K, shrinkage = moments.n_views, prior.shrinkage
    quadratic, linear = curvature(moments, precision, prior, offset)
    u = np.concatenate(laplace.solve(quadratic, linear, K))
    energy = 0.5 * u @ quadratic @ u - linear @ u + 0.5 * shrinkage / K
    constant = laplace.pool_penalty(np.full(K, 1 / K), shrinkage, 1.0)  # of the prior, at its peak
    return laplace.log_volume(quadratic, linear, u, K) - float(energy) - constant


class Sums(NamedTuple):
    """All statistics of a pass."""

    moments: Moments
    annotators: AnnotatorStatistics | None
    log_evidence: Array  # () of the labels, where annotators are modelled


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
        C, precision, scale = self.data.n_outputs, state.precision, self.scale
        log_det = linalg.inverse_and_log_det(state.inverse_scale)[1]
        log_precision = float(linalg.wishart_log_det(state.dof, log_det, C))
        if state.annotators is None:
            moments = self.moments
            outer = moments.residual_outer(state.pool, state.offset)
            constant = float(moments.size) * (log_precision - C * np.log(2 * np.pi))
            bound = 0.5 * (constant - float((precision * outer).sum())) + float(moments.log_omega)
            return bound - self._penalty(state), Sums(moments, None, np.zeros(()))

        def block_sums(block: Block) -> Sums:
            truth = _truth(block, state, scale, precision, log_precision)
            people = annotators.statistics(block, state.annotators, truth, np.ones((1, block.mean.shape[2])))
            return Sums(moments_of(block, scale, truth), people, truth.log_evidence.sum())

        sums = self.data.total(block_sums)
        return float(sums.log_evidence) - self._penalty(state), sums

    def update(self, state: LatentState, statistics: Sums) -> LatentState:
        """The pool at the current precision, then the precision at the new pool, then the annotators."""
        moments = statistics.moments
        quadratic, linear = curvature(moments, state.precision, self.prior, state.offset)
        pool, offset = laplace.solve(quadratic, linear, self.data.n_views)
        dof = self.prior.nu + moments.size
        inverse_scale = self.prior.inverse_scale + moments.residual_outer(pool, offset)
        people = annotators.update(state.annotators, statistics.annotators, self.annotator_prior)
        return LatentState(pool, offset, dof, inverse_scale, people, self.scale.slope)

    def pack(self, state: LatentState) -> Array:
        """(sqrt v, b, log-Cholesky of V), then the annotators' likewise."""
        own = np.sqrt(state.pool), state.offset, linalg.log_cholesky(state.inverse_scale)
        return np.concatenate([*own, annotators.pack(state.annotators)])

    def unpack(self, vector: Array, like: LatentState) -> LatentState:
        """The state of a vector; degrees of freedom depend on the data alone and are `like`'s."""
        C, take = self.data.n_outputs, Reader(vector)
        pool, offset = take(self.data.n_views) ** 2, take(C)
        inverse_scale = linalg.from_log_cholesky(take(C * (C + 1) // 2), C)
        people = annotators.unpack(take, like.annotators)
        return like._replace(pool=pool, offset=offset, inverse_scale=inverse_scale, annotators=people)

    def weights(self, state: LatentState) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(state.pool)

    def bound_terms(self, state: LatentState, statistics: Sums) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""
        penalty = self._penalty(state)
        return {"J_S": self.evaluate(state)[0] + penalty + self.unit_change, "penalty": penalty}

    def posterior(self, state: LatentState) -> LatentPosterior:
        """What remains when the data are gone; without uncertainty of the pool."""
        size = self.data.n_views + self.data.n_outputs
        return LatentPosterior(state, self.data.standard, None, np.zeros((size, size)))

    def finish(self, ascent: Ascent[LatentState, Sums], *, intervals: bool = True) -> LatentPosterior:
        """The posterior at the end, with the Laplace approximation of the pool, which predictions need too."""
        state, K = ascent.state, self.data.n_views
        quadratic, linear = curvature(ascent.statistics.moments, state.precision, self.prior, state.offset)
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
        uncertainty = uncertainty._replace(n_groups=self.data.n_groups)
        return replace(self.posterior(state), uncertainty=uncertainty, covariance=covariance)

    def _group_sums(self, state: LatentState) -> tuple[Array, Array]:
        """Sums of the scores of (v, b) over the instances of every group, and of their outer products over all."""
        n_groups, precision, scale = self.data.n_groups, state.precision, self.scale

        def block_sums(block: Block) -> tuple[Array, Array]:
            assert block.group is not None
            instance, targets, count = np.arange(block.mean.shape[2]), block.value, block.repeats
            if state.annotators is not None:
                targets = _truth(block, state, scale, precision, 0.0).mean[:, 0]
                count = np.ones(len(instance))
            elif block.instance is not None:
                instance = block.instance
            views = block.mean[:, :, instance]
            residual = targets - np.einsum("k,ckj->cj", state.pool, views) - state.offset[:, None]
            pull = precision @ residual * np.exp(scale.log_omega(block.mean))[instance]
            scores = np.concatenate([np.einsum("ckj,cj->kj", views, pull), pull])
            weighted = scores * count
            return laplace.group_sums(weighted, count, block.group[instance], n_groups), products(weighted, scores)

        return self.data.total(block_sums)

    def _penalty(self, state: LatentState) -> float:
        """Minus the log priors of the pool, plus the divergences of the other factors."""
        prior = self.prior
        penalty = laplace.pool_penalty(state.pool, prior.shrinkage, 1.0) + 0.5 * (self.scale.slope / SLOPE_SCALE) ** 2
        penalty -= float(linalg.student_log_density(state.offset**2, prior.offset_scale).sum())
        dof, scale = np.atleast_1d(state.dof), state.inverse_scale[None]
        penalty += float(linalg.kl_wishart(dof, scale, prior.nu, prior.inverse_scale).sum())
        return penalty + annotators.divergence(state.annotators, self.annotator_prior)


def _truth(block: Block, state: LatentState, scale: Scale, precision: Array, log_precision: Array | float) -> Truth:
    """The truth of a block's instances given all labels."""
    assert state.annotators is not None
    mean = np.einsum("k,ckn->cn", state.pool, block.mean)[:, None] + state.offset[:, None, None]  # (C, 1, n)
    log_omega = scale.log_omega(block.mean)[None]  # (1, n)
    precision, log_precision = np.exp(log_omega)[..., None, None] * precision, log_precision + len(mean) * log_omega
    return annotators.infer_truth(block, state.annotators, mean, precision, log_precision)


def pose(source: Source, spec: GaussianLatent, start: Posterior | None = None) -> tuple[LatentProblem, LatentState]:
    """The problem that data and model pose, and where to start: the plain average of the views."""
    data = source.continuous(with_variance=False)
    C, K = data.n_outputs, data.n_views
    views = GaussianMixture(link="shift", nu=C + 2 if spec.nu is None else spec.nu, v=spec.v)
    reference, _ = initialise_mixture(data, views)
    moments, equal = data.total(moments_of), np.full(K, 1 / K)
    scale = reference.inverse_scale
    if spec.v is None:  # the average of the views may be far better than each of them
        n, mean = max(float(moments.size), 1.0), moments.mean_residual
        square = np.diagonal(moments.residual_outer(equal, np.zeros(C))) / n
        variance = np.maximum(square - mean**2, 0) + mean**2 / n  # the mean counts as one label
        scale = np.minimum(scale, reference.nu * np.diag(np.maximum(variance, SMALLEST_VARIANCE)))
    prior = LatentPrior(spec.shrinkage or 1.0, math.sqrt(2 / spec.beta), reference.nu, scale)
    prior = prior if spec.shrinkage else choose_shrinkage(moments, prior)
    scale_of = Scale(0.0, equal, np.zeros(C))
    if spec.scale != "constant":
        scale_of = choose_slope(data, moments, prior)
        moments = data.total(partial(moments_of, scale=scale_of))
        prior = prior if spec.shrinkage else choose_shrinkage(moments, prior)
    offset = moments.mean_residual  # its prior would shrink a large one to zero, and EM might stay there
    people_prior, people = annotators.initialise(
        spec.noise, spec.gamma, data.n_annotators, reference.residual_variance, start
    )
    dof, inverse_scale = prior.nu + moments.size, prior.inverse_scale + moments.residual_outer(equal, offset)
    first = LatentState(equal, offset, np.asarray(dof), inverse_scale, people, scale_of.slope)
    return LatentProblem(data, prior, people_prior, moments, scale_of), first
