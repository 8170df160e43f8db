"""Class labels from one weighted sum of the views' logits, as a problem to climb (docs/method, "Pooling").

    y ~ softmax or probit of sum_k v_k f_ik + o,   v_k ~ Normal(g/K, 1/lambda) on v_k >= 0,   ln g ~ Normal(0, a^2)

(v, g, o) are at their mode: damped Newton steps on the evidence, non-negative least squares inside. The weights are
w = v / sum v, the gain is the sum.
"""

__all__ = ["LatentClassProblem", "LatentClassState", "categorical_latent_problem", "pose_categorical_latent"]

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.infer import calibration, label_noise, latent
from vbtta.infer.accelerate import Ascent, ascend
from vbtta.infer.categorical_data import CategoricalBlock, CategoricalBlocks, CategoricalData, categorical_data
from vbtta.infer.categorical_latent_posterior import LatentClassPosterior, pool_weights
from vbtta.infer.categorical_pool import PoolSums, run_pool_pass
from vbtta.infer.intervals import PoolDoubt
from vbtta.infer.label_noise import NoiseModel
from vbtta.infer.matrices import Reader
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, CategoricalLatent

_SHARES = 0.5 ** np.arange(11)  # of a Newton step, tried in turn
_SPREADS = (
    30.0,
    10.0,
    5.0,
    3.0,
    2.0,
    1.0,
    0.5,
    0.3,
    0.2,
    0.1,
    0.03,
    0.01,
)  # candidates for K / sqrt(lambda): deviations of K v_k
_MOST_TRIED = 4_000  # instances on which lambda is chosen
_MOST_STARTED = 2_000  # and the first gain


class LatentClassState(NamedTuple):
    """Pool, centre of its prior, offsets, and Q of the noise."""

    pool: Array  # (K,): v
    centre: float  # g
    offset: Array  # (C,)
    noise: Array | None  # (U, 2) or (U, C, C)


class Statistics(NamedTuple):
    """What a pass over the data leaves."""

    sums: PoolSums
    noise: Array | None  # the next Q of the noise
    bound: float


@dataclass(frozen=True, eq=False)
class LatentClassProblem:
    """Data and priors of a latent pool for class labels."""

    data: CategoricalBlocks
    spec: CategoricalLatent
    shrinkage: float
    noise: NoiseModel | None
    named: bool  # whether annotators are told apart
    _last: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def n_labels(self) -> float:
        """J."""
        return self.data.n_labels

    def evaluate(self, state: LatentClassState) -> tuple[float, Statistics]:
        """Bound and statistics at a state: one pass, unless it is the state looked at last."""
        if self._last.get("state") is state:
            return self._last["bound"], self._last["statistics"]
        link, pool, offset, model = self.spec.link, state.pool, state.offset, self._noise(state)

        def one(
            block: CategoricalBlock,
        ) -> tuple[PoolSums, Array | None]:  # it may travel, and holds what it needs alone
            evidence = None if model is None else label_noise.log_evidence(*model, block.table)
            sums, truth = run_pool_pass(block, link, pool, offset, evidence)
            if model is None or truth is None:
                return sums, None
            return sums, label_noise.expected_counts(model[0], truth, block.table)

        sums, counts = self.data.total(one)
        noise = None if self.noise is None or counts is None else self.noise.prior + counts
        bound = float(sums.log_evidence) - sum(self._penalties(state).values())
        statistics = Statistics(sums, noise, bound)
        self._last.update(state=state, bound=bound, statistics=statistics)
        return bound, statistics

    def update(self, state: LatentClassState, statistics: Statistics) -> LatentClassState:
        """The noise's closed form and a Newton step of the pool, halved until the bound does not fall.

        The centre g follows the pool, and the step knows it: taken for fixed, it would keep a pool that is held tightly
        around it from changing its gain.
        """
        plain = state._replace(noise=statistics.noise)
        quadratic, linear = self._expansion(state, statistics.sums, following=True)
        pool, offset = latent.solve(quadratic, linear, self.data.n_views)
        if np.abs(np.concatenate([pool - state.pool, offset - state.offset])).max() > 1e-12:
            for share in _SHARES:
                new = pool if share == 1 else state.pool + share * (pool - state.pool)
                bold = plain._replace(pool=new, offset=state.offset + share * (offset - state.offset))
                bold = bold._replace(centre=self._best_centre(bold))
                if self.evaluate(bold)[0] >= statistics.bound - 1e-13 * abs(statistics.bound):
                    return bold
        return plain._replace(centre=self._best_centre(plain))

    def hasten(self, before: LatentClassState, after: LatentClassState, statistics: Statistics) -> LatentClassState:
        """Nothing to hasten: the update holds Newton's weights."""
        return after

    def pack(self, state: LatentClassState) -> Array:
        """(sqrt v, ln g, o, ln of the noise's counts)."""
        parts = [np.sqrt(state.pool), np.array([np.log(state.centre)]), state.offset]
        if state.noise is not None:
            parts.append(np.log(state.noise).ravel())
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: LatentClassState) -> LatentClassState:
        """The state of a vector."""
        take = Reader(vector)
        pool = take(self.data.n_views) ** 2
        centre = float(np.exp(np.clip(take(1)[0], -30, 30)))
        offset = np.clip(take(self.data.n_classes), -50, 50)
        noise = None if like.noise is None else np.exp(np.clip(take(*like.noise.shape), -30, 300))
        return LatentClassState(pool, centre, offset, noise)

    def trimmed(self, state: LatentClassState) -> list[LatentClassState]:
        """Nothing to trim: the Newton step puts weights at zero by itself."""
        return []

    def weights(self, state: LatentClassState) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(state.pool)

    def bound_terms(self, state: LatentClassState, statistics: Statistics) -> dict[str, float]:
        """The bound, term by term: J_S minus the rest."""
        return {"J_S": float(statistics.sums.log_evidence), **self._penalties(state)}

    @property
    def unit_change(self) -> float:
        """Classes have no units."""
        return 0.0

    def posterior(self, state: LatentClassState) -> LatentClassPosterior:
        """What remains when the data are gone; without doubts about the pool."""
        K = self.data.n_views
        certain = PoolDoubt.none(K)
        return LatentClassPosterior(
            self.spec.link, state.pool, state.offset, self.noise, state.noise, self.named, certain
        )

    def finish(self, ascent: Ascent, *, intervals: bool = True) -> LatentClassPosterior:
        """The posterior at the end of an ascent, with what intervals for the weights need: it costs next to nothing."""
        state: LatentClassState = ascent.state
        weak = min(self.shrinkage, 1 / state.centre**2)  # what is left of the prior
        quadratic, linear = self._expansion(state, ascent.statistics.sums, weak=weak)
        doubt = latent.pool_doubt(quadratic, linear, self.data.n_views, self.shrinkage, state.centre)
        return replace(self.posterior(state), doubt=doubt)

    def log_laplace_evidence(self, state: LatentClassState, statistics: Statistics) -> float:
        """Log evidence of lambda: (v, o) integrated out around their mode, weights at 0 over the half-line."""
        quadratic, linear = self._expansion(state, statistics.sums)
        free = _free(state)
        u = np.concatenate([state.pool, state.offset])
        slope, stiffness = latent.pinned_forces(quadratic, linear, u, free)
        half_lines = 0.5 * np.log(0.5 * np.pi / stiffness) + np.log(special.erfcx(slope / np.sqrt(2 * stiffness)))
        log_det = np.linalg.slogdet(quadratic[np.ix_(free, free)])[1]
        return float(statistics.bound + 0.5 * free.sum() * np.log(2 * np.pi) - 0.5 * log_det + half_lines.sum())

    def _expansion(
        self, state: LatentClassState, sums: PoolSums, *, following: bool = False, weak: float | None = None
    ) -> tuple[Array, Array]:
        """Second-order expansion u^T A u / 2 - l^T u of minus the bound in u = (v, o): A and l.

        The curvature of the evidence where that is positive definite, else that of complete data, which always is; with
        `weak`, where it is so with the prior precision of the pool lowered to that.
        """
        K, C = self.data.n_views, self.data.n_classes
        by_offset = np.full(C, 1 / self.spec.offset_scale**2)
        prior = np.diag(np.concatenate([np.full(K, self.shrinkage), by_offset]))
        pull = np.concatenate([self.shrinkage * (state.pool - state.centre / K), by_offset * state.offset])
        if (
            following
        ):  # g is at its best for every v: lambda/K is its stiffness given v, the other that of its own prior
            stiffness = self.shrinkage / K
            prior[:K, :K] -= stiffness**2 / (stiffness + 1 / (self.spec.kappa_scale * state.centre) ** 2)
            pull[:K] = self.shrinkage * (state.pool - state.pool.mean()) + self._centre_slope(state.centre)
        least = prior if weak is None else np.diag(np.concatenate([np.full(K, weak), by_offset]))
        seen = sums.complete - sums.missing
        if np.linalg.eigvalsh(seen + least)[0] < 0.1 * np.linalg.eigvalsh(least)[0]:
            seen = sums.complete
        quadratic = seen + prior
        return quadratic, quadratic @ np.concatenate([state.pool, state.offset]) + sums.gradient - pull

    def _noise(self, state: LatentClassState) -> tuple[NoiseModel, Array] | None:
        """The noise model and E[ln A]."""
        if self.noise is None or state.noise is None:
            return None
        return self.noise, label_noise.log_expected(state.noise)

    def _penalties(self, state: LatentClassState) -> dict[str, float]:
        """Minus the log priors of what is at its mode, and the divergence of the noise."""
        scale = self.spec.offset_scale
        offset = 0.5 * float((state.offset**2).sum()) / scale**2
        offset += len(state.offset) * np.log(scale * np.sqrt(2 * np.pi))
        terms = {"penalty_pool": self._pool_penalty(state.pool, state.centre), "penalty_offset": float(offset)}
        if self.noise is not None and state.noise is not None:
            terms["KL_noise"] = label_noise.divergence(self.noise, state.noise)
        return terms

    def _pool_penalty(self, pool: Array, centre: float) -> float:
        K, scale = len(pool), self.spec.kappa_scale
        penalty = 0.5 * self.shrinkage * float(((pool - centre / K) ** 2).sum())
        penalty -= 0.5 * K * np.log(self.shrinkage / (2 * np.pi))
        penalty += K * float(special.log_ndtr(np.sqrt(self.shrinkage) * centre / K))
        return float(penalty + 0.5 * (np.log(centre) / scale) ** 2 + np.log(scale * np.sqrt(2 * np.pi)))

    def _centre_slope(self, centre: float) -> float:
        """Slope of g's own part of the penalty, which at its mode is lambda times (the mean of v - g / K)."""
        place = np.sqrt(self.shrinkage) * centre / self.data.n_views
        hazard = np.exp(-0.5 * place**2 - special.log_ndtr(place)) / np.sqrt(2 * np.pi)  # phi / Phi
        return float(np.log(centre) / (centre * self.spec.kappa_scale**2) + np.sqrt(self.shrinkage) * hazard)

    def _best_centre(self, state: LatentClassState) -> float:
        """The mode of g given v, or the present one where the search finds none better."""
        from scipy.optimize import minimize_scalar

        ends = np.log([max(state.pool.sum(), 1e-6), 1.0, state.centre])
        found = minimize_scalar(
            lambda log_centre: self._pool_penalty(state.pool, float(np.exp(log_centre))),
            bounds=(ends.min() - 1, ends.max() + 1),
            method="bounded",
            options={"xatol": 1e-10},
        )
        centre = float(np.exp(found.x))
        better = self._pool_penalty(state.pool, centre) < self._pool_penalty(state.pool, state.centre)
        return centre if better else state.centre


def categorical_latent_problem(
    predictions: ViewPredictions, labels: LabelSets, spec: CategoricalLatent, *, noise: str
) -> tuple[LatentClassProblem, LatentClassState]:
    """The problem that aligned data and a model pose, and where to start: the average logits, scaled if wide."""
    probit = spec.link == "probit"
    data = categorical_data(predictions, labels, noise=noise, with_variance=probit, classes_last=probit)
    named = labels.annotator is not None and noise in ("annotator", "confusion")
    return pose_categorical_latent(data, spec, noise=noise, named=named)


def pose_categorical_latent(
    data: CategoricalBlocks, spec: CategoricalLatent, *, noise: str, named: bool
) -> tuple[LatentClassProblem, LatentClassState]:
    """The problem that laid-out data and a model pose, and where to start."""
    shrinkage = spec.shrinkage
    if shrinkage is None:
        shrinkage = _choose_shrinkage(data, spec, noise)
    K, C = data.n_views, data.n_classes
    model = label_noise.noise_model(noise, C, spec)
    first = LatentClassState(
        np.full(K, 1 / K),
        1.0,
        np.zeros(C),
        None if model is None else label_noise.start(model, data.n_annotators),
    )
    problem = LatentClassProblem(data, spec, shrinkage, model, named)
    return problem, _started(problem, first)


def _started(problem: LatentClassProblem, first: LatentClassState) -> LatentClassState:
    """The first state with a gain that suits wide logits: of a few candidates that of the highest bound."""
    data = problem.data
    if data.widest.max() <= calibration.WIDE:
        return first
    if data.n_instances > _MOST_STARTED or not isinstance(data, CategoricalData):
        places = np.linspace(0, data.n_instances - 1, min(_MOST_STARTED, data.n_instances)).astype(int)
        spec = replace(problem.spec, shrinkage=problem.shrinkage)
        noise = "none" if problem.noise is None else problem.noise.kind
        some = categorical_latent_problem(*data.take(places), spec, noise=noise)[1]
        return first._replace(pool=some.pool, centre=some.centre)
    tried = []
    for log_gain in calibration.starts(data.ranges(), together=True):
        pool = first.pool * np.exp(log_gain)
        tried.append(first._replace(pool=pool, centre=float(pool.sum())))
    return max(tried, key=lambda state: problem.evaluate(state)[0]) if len(tried) > 1 else first


def _choose_shrinkage(data: CategoricalBlocks, spec: CategoricalLatent, noise: str) -> float:
    """Lambda that maximises the Laplace evidence, on a sample of the instances where there are many."""
    places = None
    if data.n_instances > _MOST_TRIED:
        places = np.linspace(0, data.n_instances - 1, _MOST_TRIED).astype(int)
    predictions, labels = data.take(places)
    K = data.n_views
    problem, state = categorical_latent_problem(predictions, labels, replace(spec, shrinkage=1.0), noise=noise)
    found: dict[int, float] = {}

    def evidence(place: int) -> float:
        nonlocal state
        if not 0 <= place < len(_SPREADS):
            return -np.inf
        if place not in found:
            tried: Any = replace(problem, shrinkage=(K / _SPREADS[place]) ** 2, _last={})
            ascent = ascend(tried, state, EM(tol=1e-5, max_steps=60))
            state = ascent.state._replace(pool=np.maximum(ascent.state.pool, 1e-3 / K))  # where the next one starts
            found[place] = tried.log_laplace_evidence(ascent.state, ascent.statistics)
        return found[place]

    best = _SPREADS.index(1.0)
    while max(evidence(best - 1), evidence(best + 1)) > evidence(best):
        best += 1 if evidence(best + 1) > evidence(best - 1) else -1
    return float((K / _SPREADS[best]) ** 2)


def _free(state: LatentClassState) -> Array:
    return np.concatenate([state.pool > 0, np.ones(len(state.offset), dtype=bool)])
