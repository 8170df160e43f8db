"""EM for the latent pool of class labels: a closed form for the noise, Newton steps for pool and offsets.

The curvature of the log evidence is that of complete data less that of the missing truths (docs/method, eq. 24b).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference import laplace
from vbtta.inference.em import EM, Ascent, ascend, buffer, join, nodes, products
from vbtta.inference.laplace import pool_weights
from vbtta.inference.linalg import Reader, student_log_density, student_precision
from vbtta.models.base import InMemory, Source, of_kind
from vbtta.models.categorical_latent.posterior import LatentClassPosterior, pooled_utility
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.models.categorical_mixture.posterior import ClassPosterior
from vbtta.models.parts import class_data, links
from vbtta.models.parts.class_data import CategoricalBlock, ClassProblem, Statistics
from vbtta.models.parts.label_noise import FittedNoise

_FRACTIONS = tuple((0.5 ** np.arange(11)).tolist())  # of a Newton step, tried in turn
_SPREADS = (30.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.03, 0.01)  # candidates for K / sqrt(lambda)
_MAX_SHRINKAGE_INSTANCES = 4_000  # on which lambda is chosen
_SEARCH = EM(tol=1e-4, max_steps=60, accelerate=False)  # stops after a Newton step that gains less


class PoolCurvature(NamedTuple):
    """A curvature in (v, o)."""

    pool: Array  # (K, K)
    cross: Array  # (C, K)
    offset: Array  # (C,): a diagonal that bounds it


class PoolSums(NamedTuple):
    """Additive statistics; derivatives are with respect to (v, o)."""

    log_evidence: Array  # ()
    gradient: Array  # (K + C,); zeros for offsets that are not inferred, in the curvatures too
    complete: PoolCurvature  # if the truth were known
    missing: PoolCurvature  # of the missing truths


def run_pool_pass(
    block: CategoricalBlock,
    link: links.Link,
    pool: Array,
    offset: Array,
    evidence: Array | None,
    *,
    offsets: bool,
    scores: Array | None = None,
) -> tuple[PoolSums, Array | None]:
    """Statistics of a block's instances and, with a noise model, the truth's posterior (n, C).

    `offsets` says whether class offsets are inferred; `scores` (K + C, n) takes the gradients of the instances.
    """
    truth = None if evidence is None else np.empty_like(evidence)

    def part_sums(part: slice) -> PoolSums:
        logits, variance = block.logits(part), block.variances(part)
        utility, spread = pooled_utility(logits, variance, pool, offset)
        proba, inverse = link.proba(utility.copy(order="K"), spread)
        proba = proba * inverse  # in double precision, as all arrays (C, n) are
        if evidence is not None and truth is not None:
            size = block.table.importance[part]
            posterior, log_norm = class_data.truth_posterior(evidence[part], proba)
            truth[part] = posterior.T
            total = (size * log_norm).sum()
            posterior = posterior * size
        else:
            assert block.mass is not None
            posterior = np.ascontiguousarray(block.mass[part].T)
            size, total = posterior.sum(axis=0), (posterior * np.log(proba)).sum()
        in_variance = None
        if link.canonical:
            by_utility = posterior - proba * size  # (C, n)
        else:
            by_utility, in_variance = link.gradient(utility.T, None if spread is None else spread.T, posterior.T)
            by_utility = by_utility.T
        by_pool = links.contract("ckn,cn->kn", logits, by_utility)
        if in_variance is not None and variance is not None:
            by_pool += 2 * pool[:, None] * np.einsum("nc,ckn->kn", in_variance, variance)
        complete = _covariance(logits, proba * size, size, link.information, offsets=offsets)
        missing = PoolCurvature(*map(np.zeros_like, complete))
        if truth is not None:
            missing = missing._replace(pool=_covariance(logits, posterior, size, link.information, offsets=False).pool)
        gradients = np.concatenate([by_pool, offsets * by_utility])
        if scores is not None:
            scores[:, part] = gradients
        return PoolSums(np.asarray(total), gradients.sum(axis=1), complete, missing)

    sums: PoolSums = join(nodes(part_sums, block.parts))
    return sums, truth


def _covariance(logits: Array, proba: Array, size: Array, information: float, *, offsets: bool) -> PoolCurvature:
    """Sum over instances of the covariances of (f, 1_c) under proba / size, times size and `information`."""
    C, K, n = logits.shape
    mean = links.contract("ckn,cn->kn", logits, proba)  # (K, n), times size
    inverse, root = 1 / np.maximum(size, 1e-300), np.sqrt(proba).astype(logits.dtype, copy=False)
    if logits.strides[0] < logits.strides[2]:  # classes are last in memory
        rows = np.multiply(logits.transpose(1, 2, 0), root.T, out=buffer("rows", (K, n, C), logits.dtype))
    else:
        rows = np.multiply(logits.transpose(1, 0, 2), root, out=buffer("rows", (K, C, n), logits.dtype))
    rows = rows.reshape(K, -1)
    pool = information * (products(rows, rows) - products(mean * inverse, mean))
    if not offsets:
        return PoolCurvature(pool, np.zeros((C, K)), np.zeros(C))
    cross = information * (links.contract("ckn,cn->ck", logits, proba) - products(proba * inverse, mean))
    return PoolCurvature(pool, cross, information * proba.sum(axis=1))


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
    response: Array  # (C, K): minus their derivative in v
    log_det: float  # of their curvature


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
        after, noise = statistics.next_noise(state.noise)
        plain = state._replace(noise=after)
        expansion = self._expansion(state, statistics.sums, following=True)
        pool = laplace.solve(expansion.quadratic, expansion.linear, self.data.n_views)[0]
        offset = expansion.anchor - expansion.response @ pool

        def moved(fraction: float) -> LatentClassState:
            new = pool if fraction == 1 else state.pool + fraction * (pool - state.pool)
            step = plain._replace(pool=new, offset=state.offset + fraction * (offset - state.offset))
            return step._replace(centre=self._best_centre(step))

        def candidates() -> Iterator[LatentClassState]:
            if noise is not None:
                yield moved(1.0)._replace(noise=noise)
            if np.abs(np.concatenate([pool - state.pool, offset - state.offset])).max() > 1e-12:
                yield from map(moved, _FRACTIONS)
            yield plain._replace(centre=self._best_centre(plain))

        return self.first_acceptable(candidates(), statistics)

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
        return LatentClassPosterior(self.spec.link, state.pool, state.offset, state.noise, None)

    def finish(
        self, ascent: Ascent[LatentClassState, Statistics[PoolSums]], *, intervals: bool = True
    ) -> LatentClassPosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need."""
        state: LatentClassState = ascent.state
        if not intervals:
            return self.posterior(state)
        weak = min(self.shrinkage, 1 / state.centre**2)  # prior precision that remains
        expansion = self._expansion(state, ascent.statistics.sums, weak=weak)
        energy, variance = (expansion.quadratic, expansion.linear), self._score_variance(state, expansion)
        uncertainty = laplace.pool_uncertainty(*energy, self.data.n_views, self.shrinkage, state.centre, variance)
        return replace(self.posterior(state), uncertainty=uncertainty._replace(n_groups=self.data.n_groups))

    def _score_variance(self, state: LatentClassState, expansion: PoolExpansion) -> Array | None:
        """Variance (K, K) of the pool's score, the offsets eliminated, where instances come in groups."""
        n_groups, K, C = self.data.n_groups, self.data.n_views, self.data.n_classes
        if not n_groups:
            return None
        read, link = class_data.label_reader(state.noise), links.LINKS[self.spec.link]
        offsets = self.spec.offset_scale > 0

        def block_sums(block: CategoricalBlock) -> Array:
            assert block.group is not None
            reading, scores = read(block), np.empty((K + C, block.n_instances))
            evidence = None if reading is None else reading.log_evidence
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
            pull = self.shrinkage * (state.pool - state.pool.mean()) + self._centre_slope()(state.centre)
        least = prior if weak is None else weak * np.eye(K)
        by_offset = sums.gradient[K:] - of_offset * state.offset
        for curvature in (PoolCurvature(*map(np.subtract, sums.complete, sums.missing)), sums.complete):
            right = np.column_stack([curvature.cross, by_offset])
            solved = right / (curvature.offset + of_offset)[:, None]
            response, step = solved[:, :-1], solved[:, -1]
            reduced = curvature.pool - curvature.cross.T @ response
            if np.linalg.eigvalsh(reduced + least)[0] >= 0.1 * np.linalg.eigvalsh(least)[0]:
                break
        else:  # only rounding can make the curvature of complete data indefinite
            values, vectors = np.linalg.eigh(reduced)
            reduced = (vectors * np.maximum(values, 0)) @ vectors.T
        linear = sums.gradient[:K] - pull - curvature.cross.T @ step
        log_det = np.log(curvature.offset + of_offset).sum()
        quadratic = reduced + prior
        anchor = state.offset + step + response @ state.pool
        return PoolExpansion(quadratic, quadratic @ state.pool + linear, anchor, response, float(log_det))

    @property
    def _offset_precision(self) -> float:
        return 1 / self.spec.offset_scale**2 if self.spec.offset_scale else 1.0  # unused without offsets

    def _block_pass(self, state: LatentClassState) -> class_data.BlockPass[PoolSums]:
        link, pool, offset, offsets = links.LINKS[self.spec.link], state.pool, state.offset, self.spec.offset_scale > 0
        return lambda block, evidence: run_pool_pass(block, link, pool, offset, evidence, offsets=offsets)

    def _penalties(self, state: LatentClassState) -> dict[str, float]:
        terms = {
            "penalty_pool": self._pool_penalty(state.pool, state.centre),
            "penalty_offset": -links.log_normal(state.offset, self.spec.offset_scale),
        }
        if state.noise is not None:
            terms["KL_noise"] = state.noise.divergence()
        return terms

    def _pool_penalty(self, pool: Array, centre: float) -> float:
        """Minus the log priors of v and of ln g."""
        penalty = laplace.pool_penalty(pool, self.shrinkage, centre)
        return penalty - float(student_log_density(np.log(centre) ** 2, self.spec.kappa_scale))

    def _centre_slope(self) -> Callable[[float], float]:
        """Slope of g's own part of the penalty, which at its mode is lambda times (the mean of v - g / K)."""
        root, n_views, kappa_scale = math.sqrt(self.shrinkage), self.data.n_views, self.spec.kappa_scale

        def slope(centre: float) -> float:
            log_centre, place = math.log(centre), root * centre / n_views / math.sqrt(2)
            hazard = math.sqrt(2 / math.pi) * math.exp(-place * place) / math.erfc(-place)  # phi / Phi
            return float(student_precision(log_centre**2, kappa_scale) * log_centre / centre + root * hazard)

        return slope

    def _best_centre(self, state: LatentClassState) -> float:
        """A mode of g given v, or the present one where the search finds none better."""
        from scipy.optimize import brentq

        total, stiffness, own = float(state.pool.sum()), self.shrinkage / self.data.n_views, self._centre_slope()

        def slope(log_centre: float) -> float:  # without self: SciPy keeps it until garbage is collected
            centre = math.exp(log_centre)
            return own(centre) + stiffness * (centre - total)

        ends = [math.log(end) for end in (max(total, 1e-6), 1.0, state.centre)]
        low, high = min(ends) - 1, max(ends) + 1
        while slope(low) > 0:
            low -= 1
        centre = math.exp(brentq(slope, low, high, xtol=1e-12))
        before = self._pool_penalty(state.pool, state.centre)
        return centre if self._pool_penalty(state.pool, centre) <= before + 1e-13 * abs(before) else state.centre

    def resume(self, first: LatentClassState, posterior: ClassPosterior) -> LatentClassState:
        """The first state with what another fit found: all of it if it is a pool, else gain and noise."""
        pooling = posterior.pooling()
        noise = None if first.noise is None else first.noise.resume(posterior.noise)
        gain = max(float((pooling.weights * pooling.scale).sum(axis=0).mean()), 1e-10)
        own = of_kind(posterior, LatentClassPosterior, self.data.n_views)
        weights = first.pool if own is None else own.weights
        offset = pooling.offset[0] if self.spec.offset_scale > 0 else first.offset
        state = LatentClassState(gain * weights, gain, offset, noise)
        return state._replace(centre=self._best_centre(state))

    def _on_subsample(self, places: Array) -> tuple["LatentClassProblem", LatentClassState]:
        return _posed(InMemory(*self.data.take(places)), self.spec, self.shrinkage)

    def _scaled(self, state: LatentClassState, log_kappa: Array) -> LatentClassState:
        pool = state.pool * np.exp(log_kappa)
        return state._replace(pool=pool, centre=float(pool.sum()))


def pose(
    source: Source, spec: CategoricalLatent, start: ClassPosterior | None = None
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
    problem = problem.quick()
    evidences: dict[int, float] = {}
    sums = problem.evaluate(state)[1]

    def evidence(place: int) -> float:
        nonlocal state, sums
        if not 0 <= place < len(_SPREADS):
            return -np.inf
        if place not in evidences:
            candidate = replace(problem, shrinkage=(K / _SPREADS[place]) ** 2)
            candidate.remember(state, sums)
            ascent = ascend(candidate, state, _SEARCH)
            evidences[place] = candidate.log_laplace_evidence(ascent.state, ascent.statistics)
            state, sums = ascent.state, ascent.statistics  # the next one's start
        return evidences[place]

    best = _SPREADS.index(1.0)
    for step in (-1, 1):  # the evidence has one peak
        while evidence(best + step) > evidence(best):
            best += step
    return replace(whole, shrinkage=(K / _SPREADS[best]) ** 2), state
