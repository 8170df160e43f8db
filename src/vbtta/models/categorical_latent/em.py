"""EM for the latent pool of class labels: a closed form for the noise, Newton steps for pool and offsets."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference import laplace
from vbtta.inference.em import EM, Ascent, ascend
from vbtta.inference.laplace import PoolUncertainty, pool_weights
from vbtta.inference.linalg import Reader, student_log_density, student_precision
from vbtta.models.base import InMemory, Posterior, Source
from vbtta.models.categorical_latent.posterior import LatentClassPosterior
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.models.categorical_latent.steps import PoolSums, minus, run_pool_pass
from vbtta.models.parts import calibration
from vbtta.models.parts.calibration import CalibrationPrior
from vbtta.models.parts.class_data import CategoricalBlock
from vbtta.models.parts.class_model import BlockPass, ClassProblem, Statistics
from vbtta.models.parts.label_noise import FittedNoise
from vbtta.models.parts.links import LINKS

_FRACTIONS = 0.5 ** np.arange(11)  # of a Newton step, tried in turn
_SPREADS = (30.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.03, 0.01)  # candidates for K / sqrt(lambda)
_MAX_SHRINKAGE_INSTANCES = 4_000  # on which lambda is chosen


class LatentClassState(NamedTuple):
    """Pool, centre of its prior, offsets, and Q of the noise."""

    pool: Array  # (K,): v
    centre: float  # g
    offset: Array  # (C,)
    noise: FittedNoise | None


class PoolExpansion(NamedTuple):
    """Energy v^T A v / 2 - l^T v of the pool, the offsets at their minimum for every v."""

    quadratic: Array  # (K, K): A
    linear: Array  # (K,): l
    anchor: Array  # (C,): the offsets at v = 0
    response: Array  # (C, K): their change with -v
    log_det: float  # of their curvature

    def offset(self, pool: Array) -> Array:
        """The offsets (C,) given a pool."""
        return np.asarray(self.anchor - self.response @ pool)


@dataclass(frozen=True, eq=False)
class LatentClassProblem(ClassProblem[LatentClassState, PoolSums]):
    """Data and priors of a latent pool for class labels."""

    spec: CategoricalLatent
    shrinkage: float
    common_start = True

    def update(self, state: LatentClassState, statistics: Statistics[PoolSums]) -> LatentClassState:
        """The noise's closed form and a Newton step of the pool, halved until the bound does not fall."""
        # The step takes into account that the centre g follows the pool: with g fixed, a strong prior around it would
        # keep the gain from changing.
        plain = state._replace(noise=statistics.noise)
        expansion = self._expansion(state, statistics.sums, following=True)
        pool = laplace.solve(expansion.quadratic, expansion.linear, self.data.n_views)[0]
        offset = expansion.offset(pool)

        def moved(fraction: float) -> LatentClassState:
            new = pool if fraction == 1 else state.pool + fraction * (pool - state.pool)
            after = plain._replace(pool=new, offset=state.offset + fraction * (offset - state.offset))
            return after._replace(centre=self._best_centre(after))

        accepted = None
        if np.abs(np.concatenate([pool - state.pool, offset - state.offset])).max() > 1e-12:
            accepted = self.first_acceptable((moved(fraction) for fraction in _FRACTIONS), statistics)
        return plain._replace(centre=self._best_centre(plain)) if accepted is None else accepted

    def pack(self, state: LatentClassState) -> Array:
        """(sqrt v, ln g, o, ln of the noise's counts)."""
        parts = [np.sqrt(state.pool), np.array([np.log(state.centre)]), state.offset]
        if state.noise is not None:
            parts.append(state.noise.pack())
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: LatentClassState) -> LatentClassState:
        """The state of a vector."""
        take = Reader(vector)
        pool = take(self.data.n_views) ** 2
        centre = float(np.exp(np.clip(take(1)[0], -30, 30)))
        offset = np.clip(take(self.data.n_classes), -50, 50)
        noise = None if like.noise is None else like.noise.unpack(take)
        return LatentClassState(pool, centre, offset, noise)

    def weights(self, state: LatentClassState) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(state.pool)

    def posterior(self, state: LatentClassState) -> LatentClassPosterior:
        """The fitted model without its data; without intervals of the weights."""
        uncertainty = PoolUncertainty.none(self.data.n_views)
        return LatentClassPosterior(self.spec.link, state.pool, state.offset, state.noise, uncertainty)

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> LatentClassPosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need, at hardly any cost."""
        state: LatentClassState = ascent.state
        weak = min(self.shrinkage, 1 / state.centre**2)  # prior precision that remains
        expansion = self._expansion(state, ascent.statistics.sums, weak=weak)
        quadratic, linear = expansion.quadratic, expansion.linear
        uncertainty = laplace.pool_uncertainty(
            quadratic, linear, self.data.n_views, self.shrinkage, state.centre, self._score_variance(state, expansion)
        )
        return replace(self.posterior(state), uncertainty=uncertainty._replace(n_groups=self.data.n_groups))

    def _score_variance(self, state: LatentClassState, expansion: PoolExpansion) -> Array | None:
        """Variance (K, K) of the pool's score, the offsets eliminated, where instances come in groups."""
        n_groups, K, C = self.data.n_groups, self.data.n_views, self.data.n_classes
        if not n_groups:
            return None
        evidence_of = None if state.noise is None else state.noise.evidence()
        difficulty = self.noise is not None and self.noise.difficulty
        link, offsets = LINKS[self.spec.link], self.spec.offset_scale > 0

        def block_sums(block: CategoricalBlock) -> Array:
            assert block.group is not None
            evidence = None if evidence_of is None else evidence_of(block.looked_at if difficulty else block.table)
            scores = np.empty((K + C, block.n_instances))
            run_pool_pass(block, link, state.pool, state.offset, evidence, offsets=offsets, scores=scores)
            size = block.table.importance if block.mass is None else block.mass.sum(axis=1)
            return laplace.group_sums(scores, size, block.group, n_groups)

        variance = laplace.score_variance(self.data.total(block_sums))
        variance[K:, K:] += self._offset_precision * np.eye(C)
        efficient = np.concatenate([np.eye(K), -expansion.response.T], axis=1)
        return np.asarray(efficient @ variance @ efficient.T)

    def log_laplace_evidence(self, state: LatentClassState, statistics: Statistics[PoolSums]) -> float:
        """Log evidence of lambda but for a constant: (v, o) integrated out around their mode."""
        expansion = self._expansion(state, statistics.sums)
        volume = laplace.log_volume(expansion.quadratic, expansion.linear, state.pool, self.data.n_views)
        return statistics.bound + volume - 0.5 * expansion.log_det

    def _expansion(
        self, state: LatentClassState, sums: PoolSums, *, following: bool = False, weak: float | None = None
    ) -> PoolExpansion:
        """Second-order expansion of minus the bound in (v, o), the offsets eliminated."""
        # The curvature is that of the evidence if positive definite (with the pool's prior precision lowered to `weak`
        # where given), else that of complete data, which always is. With `following`, g is eliminated.
        K, of_offset = self.data.n_views, self._offset_precision
        prior = self.shrinkage * np.eye(K)
        pull = self.shrinkage * (state.pool - state.centre / K)
        if following:  # g is at its mode for every v: eliminate it by its curvatures given v and under its own prior
            stiffness = self.shrinkage / K
            own = student_precision(np.log(state.centre) ** 2, self.spec.kappa_scale) / state.centre**2
            prior -= stiffness**2 / (stiffness + own)
            pull = self.shrinkage * (state.pool - state.pool.mean()) + self._centre_slope(state.centre)
        least = prior if weak is None else weak * np.eye(K)
        for curvature in (minus(sums.complete, sums.missing), sums.complete):
            response = calibration.solve_tail(curvature.offset, of_offset, curvature.cross)
            reduced = curvature.pool - curvature.cross.T @ response
            definite = np.linalg.eigvalsh(reduced + least)[0] >= 0.1 * np.linalg.eigvalsh(least)[0]
            if curvature is sums.complete or (definite and curvature.offset_eigenvalues().min() >= -0.9 * of_offset):
                break
        by_offset = sums.gradient[K:] - of_offset * state.offset
        step = calibration.solve_tail(curvature.offset, of_offset, by_offset[:, None])[:, 0]
        linear = sums.gradient[:K] - pull - curvature.cross.T @ step
        log_det = np.log(curvature.offset_eigenvalues() + of_offset).sum()
        quadratic = reduced + prior
        anchor = state.offset + step + response @ state.pool
        return PoolExpansion(quadratic, quadratic @ state.pool + linear, anchor, response, float(log_det))

    @property
    def _offset_precision(self) -> float:
        return CalibrationPrior(self.spec.kappa_scale, 1.0, self.spec.offset_scale).offset_precision

    def _block_pass(self, state: LatentClassState) -> BlockPass[PoolSums]:
        link, pool, offset, offsets = LINKS[self.spec.link], state.pool, state.offset, self.spec.offset_scale > 0
        return lambda block, evidence: run_pool_pass(block, link, pool, offset, evidence, offsets=offsets)

    def _penalties(self, state: LatentClassState) -> dict[str, float]:
        terms = {
            "penalty_pool": self._pool_penalty(state.pool, state.centre),
            "penalty_offset": -calibration.log_normal(state.offset, self.spec.offset_scale),
        }
        if state.noise is not None:
            terms["KL_noise"] = state.noise.divergence()
        return terms

    def _pool_penalty(self, pool: Array, centre: float) -> float:
        """Minus the log priors of v and of ln g."""
        penalty = laplace.pool_penalty(pool, self.shrinkage, centre)
        return penalty - float(student_log_density(np.log(centre) ** 2, self.spec.kappa_scale))

    def _centre_slope(self, centre: float) -> float:
        """Slope of g's own part of the penalty, which at its mode is lambda times (the mean of v - g / K)."""
        place = np.sqrt(self.shrinkage) * centre / self.data.n_views
        hazard = np.exp(-0.5 * place**2 - special.log_ndtr(place)) / np.sqrt(2 * np.pi)  # phi / Phi
        precision = student_precision(np.log(centre) ** 2, self.spec.kappa_scale)
        return float(precision * np.log(centre) / centre + np.sqrt(self.shrinkage) * hazard)

    def _best_centre(self, state: LatentClassState) -> float:
        """A mode of g given v, or the present one where the search finds none better."""
        from scipy.optimize import brentq

        def slope(log_centre: float) -> float:
            centre = float(np.exp(log_centre))
            return self._centre_slope(centre) - self.shrinkage * float(state.pool.mean() - centre / len(state.pool))

        ends = np.log([max(state.pool.sum(), 1e-6), 1.0, state.centre])
        low, high = ends.min() - 1, ends.max() + 1
        while slope(low) > 0:
            low -= 1
        centre = float(np.exp(brentq(slope, low, high, xtol=1e-14)))
        better = self._pool_penalty(state.pool, centre) < self._pool_penalty(state.pool, state.centre)
        return centre if better else state.centre

    def resume(self, first: LatentClassState, posterior: Any) -> LatentClassState:
        """The first state with what another fit found: all of it if it is a pool, else gain and noise."""
        pooling = posterior.pooling()
        noise = None if first.noise is None else first.noise.resume(posterior.noise)
        gain = max(float((pooling.weights * pooling.scale).sum(axis=0).mean()), 1e-10)
        alike = pooling.kind == "latent" and len(posterior.weights) == self.data.n_views
        weights = posterior.weights if alike else first.pool
        state = LatentClassState(gain * weights, gain, pooling.offset[0], noise)
        return state._replace(centre=self._best_centre(state))

    def _on_subsample(self, places: Array) -> tuple["LatentClassProblem", LatentClassState]:
        return _posed(InMemory(*self.data.take(places)), self.spec, self.shrinkage)

    def _scaled(self, state: LatentClassState, log_kappa: Array) -> LatentClassState:
        pool = state.pool * np.exp(log_kappa)
        return state._replace(pool=pool, centre=float(pool.sum()))


def pose(
    source: Source, spec: CategoricalLatent, start: Posterior | None = None
) -> tuple[LatentClassProblem, LatentClassState]:
    """The problem, its shrinkage chosen by the evidence unless given, and its first state: the average logits."""
    problem, first = _posed(source, spec, 1.0 if spec.shrinkage is None else spec.shrinkage)
    first = problem._scaled(first, problem.start_log_kappa(first)) if start is None else problem.resume(first, start)
    if spec.shrinkage is None:
        return _choose_shrinkage(problem, first)
    alike = start is not None and len(start.weights) == problem.data.n_views
    return problem, first if alike else problem.coarse_start(first)


def _posed(source: Source, spec: CategoricalLatent, shrinkage: float) -> tuple[LatentClassProblem, LatentClassState]:
    """The problem and its first state with a gain of 1."""
    data, noise = spec.lay_out(source)
    K, C = data.n_views, data.n_classes
    start = None if noise is None else noise.start(data.n_annotators)
    first = LatentClassState(np.full(K, 1 / K), 1.0, np.zeros(C), start)
    return LatentClassProblem(data, noise, spec, shrinkage), first


def _choose_shrinkage(
    whole: LatentClassProblem, state: LatentClassState
) -> tuple[LatentClassProblem, LatentClassState]:
    """The problem with lambda that maximises the Laplace evidence, on a sample where instances are many; its mode."""
    problem, K, n_instances = whole, whole.data.n_views, whole.data.n_instances
    if n_instances > _MAX_SHRINKAGE_INSTANCES:
        places = np.linspace(0, n_instances - 1, _MAX_SHRINKAGE_INSTANCES).astype(int)
        problem = _posed(InMemory(*whole.data.take(places)), whole.spec, 1.0)[0]
    evidences: dict[int, float] = {}

    def evidence(place: int) -> float:
        nonlocal state
        if not 0 <= place < len(_SPREADS):
            return -np.inf
        if place not in evidences:
            candidate = replace(problem, shrinkage=(K / _SPREADS[place]) ** 2)
            ascent = ascend(candidate, state, EM(tol=1e-5, max_steps=60, accelerate=False))
            evidences[place] = candidate.log_laplace_evidence(ascent.state, ascent.statistics)
            state = ascent.state._replace(pool=np.maximum(ascent.state.pool, 1e-3 / K))  # the next one's start
        return evidences[place]

    best = _SPREADS.index(1.0)
    while max(evidence(best - 1), evidence(best + 1)) > evidence(best):
        best += 1 if evidence(best + 1) > evidence(best - 1) else -1
    return replace(whole, shrinkage=(K / _SPREADS[best]) ** 2), state
