"""The continuous latent pool as a problem to climb and as a posterior to predict from."""

__all__ = ["LatentPosterior", "LatentProblem", "latent_problem", "pose_latent"]

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.infer import continuous, latent, truth
from vbtta.infer.accelerate import Ascent
from vbtta.infer.blocks import Block
from vbtta.infer.consensus import pool_truth
from vbtta.infer.intervals import PoolDoubt, pool_intervals
from vbtta.infer.latent import LatentPrior, LatentState, Moments
from vbtta.infer.matrices import (
    Reader,
    from_log_cholesky,
    inverse_and_log_det,
    kl_wishart,
    log_cholesky,
    wishart_log_det,
)
from vbtta.infer.posterior import AnnotatorNoise, annotator_noise
from vbtta.infer.standard import ContinuousBlocks, Standard, continuous_data
from vbtta.infer.truth import AnnotatorPrior, AnnotatorStatistics
from vbtta.labels import Array, LabelSets
from vbtta.mixtures import log_density as mixture_log_density
from vbtta.predictions import ContinuousPrediction, ViewPredictions
from vbtta.specs import GaussianLatent, GaussianMixture


class Sums(NamedTuple):
    """All statistics of a pass."""

    moments: Moments
    annotators: AnnotatorStatistics | None


@dataclass(frozen=True)
class LatentProblem:
    """Data and prior of a latent pool, with or without annotators."""

    data: ContinuousBlocks
    prior: LatentPrior
    annotator_prior: AnnotatorPrior | None
    moments: Moments  # of the labels

    @property
    def n_labels(self) -> float:
        """J."""
        return self.data.n_labels

    @property
    def shrinkage(self) -> float:
        """Lambda."""
        return self.prior.shrinkage

    def evaluate(self, state: LatentState) -> tuple[float, Sums]:
        """Bound on ln P(S, v, b) and statistics at a state."""
        C = self.data.n_outputs
        log_det = inverse_and_log_det(state.inverse_scale)[1]
        log_precision = float(wishart_log_det(state.dof, log_det, C))
        precision, people = state.precision, None
        if state.annotators is None:
            moments = self.moments
            outer = latent.residual_outer(moments, state.pool, state.offset)
            bound = 0.5 * float(moments.n) * (log_precision - C * np.log(2 * np.pi)) - 0.5 * float(
                (precision * outer).sum()
            )
        else:
            moments, people, evidence = self._truth_pass(state, precision, log_precision)
            bound = evidence
        return bound - self._penalty(state), Sums(moments, people)

    def update(self, state: LatentState, statistics: Sums) -> LatentState:
        """The pool at the current precision, then the precision at the new pool, then the annotators."""
        moments = statistics.moments
        quadratic, linear = latent.curvature(moments, state.precision, self.prior)
        pool, offset = latent.solve(quadratic, linear, self.data.n_views)
        outer = latent.residual_outer(moments, pool, offset)
        people = state.annotators
        if people is not None and statistics.annotators is not None and self.annotator_prior is not None:
            people = truth.update(people, statistics.annotators, self.annotator_prior)
        return LatentState(pool, offset, self.prior.nu + moments.n, self.prior.inverse_scale + outer, people)

    def hasten(self, before: LatentState, after: LatentState, statistics: Sums) -> LatentState:
        """Nothing to hasten: the update holds Newton's weights."""
        return after

    def pack(self, state: LatentState) -> Array:
        """(sqrt v, b, log-Cholesky of V), then the annotators' likewise."""
        parts = [np.sqrt(state.pool), state.offset, log_cholesky(state.inverse_scale)]
        if state.annotators is not None:
            parts.append(truth.pack(state.annotators))
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: LatentState) -> LatentState:
        """The state of a vector; degrees of freedom depend on the data alone and are `like`'s."""
        C, take = self.data.n_outputs, Reader(vector)
        pool, offset = take(self.data.n_views) ** 2, take(C)
        inverse_scale = from_log_cholesky(take(C * (C + 1) // 2), C)
        people = None if like.annotators is None else truth.unpack(take, like.annotators)
        return LatentState(pool, offset, like.dof, inverse_scale, people)

    def trimmed(self, state: LatentState) -> list[LatentState]:
        """Nothing to trim: the convex step puts weights at zero by itself."""
        return []

    def weights(self, state: LatentState) -> Array:
        """The weights of the views: (K,)."""
        return _weights(state.pool)

    def bound_terms(self, state: LatentState, statistics: Sums) -> dict[str, float]:
        """The bound, term by term, in the labels' units."""
        bound, _ = self.evaluate(state)
        penalty = self._penalty(state)
        return {"J_S": bound + penalty + self.unit_change, "penalty": penalty}

    @property
    def unit_change(self) -> float:
        """What the bound in the labels' units has on top of that in standard units."""
        return -self.data.n_labels * float(np.log(self.data.standard.scale).sum())

    def posterior(self, state: LatentState) -> "LatentPosterior":
        """What remains when the data are gone; without doubts about the pool."""
        K, size = self.data.n_views, self.data.n_views + self.data.n_outputs
        return LatentPosterior(state, self.data.standard, PoolDoubt.none(K), np.zeros((size, size)))

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> "LatentPosterior":
        """The posterior at the end of an ascent, with the Laplace approximation of the pool.

        That is part of its predictions, too: there is nothing to save without `intervals`.
        """
        state, K = ascent.state, self.data.n_views
        quadratic, linear = latent.curvature(ascent.statistics.moments, state.precision, self.prior)
        free = np.concatenate([state.pool > 0, np.ones(self.data.n_outputs, dtype=bool)])
        covariance = np.zeros_like(quadratic)
        covariance[np.ix_(free, free)] = np.linalg.inv(quadratic[np.ix_(free, free)])
        return replace(
            self.posterior(state),
            doubt=latent.pool_doubt(quadratic, linear, K, self.prior.shrinkage, 1.0),
            covariance=covariance,
        )

    def _truth_pass(
        self, state: LatentState, precision: Array, log_precision: float
    ) -> tuple[Moments, AnnotatorStatistics, float]:
        people = state.annotators
        assert people is not None

        def one(block: Block) -> tuple[Moments, AnnotatorStatistics, Array]:
            mean = np.einsum("k,ckn->cn", state.pool, block.mean)[:, None] + state.offset[:, None, None]  # (C, 1, n)
            found = truth.infer_truth(
                mean, precision[None, None], np.full((1, 1), log_precision), truth.summarise(block, people)
            )
            share = np.ones((1, mean.shape[2]))
            sums = truth.annotator_statistics(block, people, found, share)
            spread = found.covariance[0].sum(axis=0)
            return latent.moments_of(block, found.mean[:, 0], spread), sums, found.log_evidence.sum()

        moments, sums, evidence = self.data.total(one)
        return moments, sums, float(evidence)

    def _penalty(self, state: LatentState) -> float:
        """Minus the log priors of the pool, plus the divergences of the other factors."""
        K, prior = self.data.n_views, self.prior
        penalty = 0.5 * prior.shrinkage * float(((state.pool - 1 / K) ** 2).sum())
        penalty -= 0.5 * K * np.log(prior.shrinkage / (2 * np.pi))
        penalty += K * float(special.log_ndtr(np.sqrt(prior.shrinkage) / K))
        penalty += 0.5 * prior.beta * float((state.offset**2).sum())
        penalty -= 0.5 * len(state.offset) * np.log(prior.beta / (2 * np.pi))
        dof, scale = np.atleast_1d(state.dof), state.inverse_scale[None]
        penalty += float(kl_wishart(dof, scale, prior.nu, prior.inverse_scale).sum())
        if state.annotators is not None and self.annotator_prior is not None:
            penalty += truth.divergence(state.annotators, self.annotator_prior)
        return float(penalty)


def latent_problem(
    predictions: ViewPredictions, labels: LabelSets, spec: GaussianLatent, *, annotators: bool
) -> tuple[LatentProblem, LatentState]:
    """The problem that data and model pose, and where to start: the plain average of the views."""
    return pose_latent(continuous_data(predictions, labels), spec, annotators=annotators)


def pose_latent(data: ContinuousBlocks, spec: GaussianLatent, *, annotators: bool) -> tuple[LatentProblem, LatentState]:
    """The problem that laid-out data and model pose, and where to start."""
    C, K = data.n_outputs, data.n_views
    reference, _ = continuous.start(data, GaussianMixture(link="shift", beta=spec.beta, nu=spec.nu, v=spec.v))
    moments = data.total(latent.moments_of)
    scale = reference.inverse_scale
    if spec.v is None:  # the views' own variance is a poor guess where their average is far better than each of them
        scale = np.minimum(scale, reference.nu * np.diag(latent.variance_around_average(moments)))
    prior = LatentPrior(1.0, spec.beta, reference.nu, scale)
    shrinkage = latent.choose_shrinkage(moments, prior) if spec.shrinkage is None else spec.shrinkage
    prior = prior._replace(shrinkage=shrinkage)
    outer = latent.residual_outer(moments, np.full(K, 1 / K), np.zeros(C))
    people, people_prior = None, None
    if annotators:
        people_prior = truth.default_prior(reference.residual_variance, spec.gamma)
        people = truth.start(data.n_annotators, C, people_prior)
    first = LatentState(
        np.full(K, 1 / K), np.zeros(C), np.asarray(prior.nu + moments.n), prior.inverse_scale + outer, people
    )
    return LatentProblem(data, prior, people_prior, moments), first


@dataclass(frozen=True)
class LatentPosterior:
    """A fitted pool: one calibrated average of the views and, where modelled, the annotators."""

    state: LatentState
    standard: Standard
    doubt: PoolDoubt
    covariance: Array  # (K + C, K + C): of (v, b) by Laplace; zero for weights held at 0

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return _weights(self.state.pool)

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by: the sum of v."""
        return float(self.state.pool.sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        return pool_intervals(self.weights, self.doubt, level)

    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive distribution for inputs whose views are those of positive weight, in order: one Student-t."""
        state, C = self.state, len(self.state.offset)
        used = self.weights > 0
        mean = self.standard.apply(predictions.mean)  # (N, K, C)
        location = np.einsum("k,nkc->nc", state.pool[used], mean) + state.offset
        K = len(used)
        doubt = np.einsum("nkc,kl,nld->ncd", mean, self.covariance[:K, :K][np.ix_(used, used)], mean, optimize=True)
        cross = np.einsum("nkc,kd->ncd", mean, self.covariance[:K, K:][used])
        doubt += cross + cross.swapaxes(1, 2) + self.covariance[K:, K:]
        dof = state.dof + 1 - C
        scale = state.inverse_scale / dof + (dof - 2) / dof * doubt
        units = self.standard.scale
        return ContinuousPrediction(
            np.ones((len(mean), 1)),
            np.atleast_1d(dof),
            (self.standard.location + units * location)[:, None],
            (units[:, None] * scale * units)[:, None],
        )

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels; without annotators labels tell nothing beyond the fit."""
        prediction = self.predict(predictions)
        if self.state.annotators is None:
            return prediction
        return pool_truth(prediction, labels, annotator, self.state.annotators, self.standard)[0]

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, annotators included: (N+,)."""
        prediction = self.predict(predictions)
        people, rows = self.state.annotators, labels.labelled
        if people is not None:
            return np.asarray(pool_truth(prediction, labels, annotator, people, self.standard)[1][rows])
        which = labels.instance
        each = mixture_log_density(
            labels.continuous(len(self.state.offset)),
            prediction.weights[which],
            prediction.dof,
            prediction.location[which],
            prediction.scale[which],
        )
        return np.asarray(np.bincount(which, labels.count * each, labels.n_instances)[rows])

    def keep(self, views: Array) -> "LatentPosterior":
        """The same with only some of the views; they take over the gain of the others."""
        pool = self.state.pool[views]
        pool = pool * (self.gain / pool.sum()) if pool.sum() > 0 else pool
        inside = np.concatenate([views, len(self.state.pool) + np.arange(len(self.state.offset))])
        return replace(
            self,
            state=self.state._replace(pool=pool),
            doubt=self.doubt.take(views),
            covariance=self.covariance[np.ix_(inside, inside)],
        )

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | None:
        """Biases and noise levels of the annotators."""
        people = self.state.annotators
        return None if people is None else annotator_noise(people, self.standard, names)


def _weights(pool: Array) -> Array:
    total = pool.sum()
    return pool / total if total > 0 else np.full(len(pool), 1 / len(pool))
