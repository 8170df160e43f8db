"""Weight intervals from the likelihood, and Laplace approximations of latent pools."""

from typing import Annotated, NamedTuple

import numpy as np
from scipy import special

from vbtta._support.checks import between
from vbtta.data.labels import Array
from vbtta.inference.linalg import check_covariance, check_positive, cholesky
from vbtta.inference.linalg import inverse as inverse_of

PROFILE_GRID = np.concatenate([[0.0], np.geomspace(1e-5, 1.0, 40)])  # of a dropped view's profile likelihood


class WeightInformation(NamedTuple):
    """The log likelihood around its maximum, as a function of the weights."""

    centre: Annotated[Array, "K"]  # the maximum
    information: Annotated[Array, "K K"]  # outer products of scores, nuisance parameters eliminated
    profile: Annotated[Array, "K G"]  # log likelihood with view k at a weight of the grid, the others scaled down
    clustered: Annotated[Array, "K K"] | None = None  # variance of the score if units have groups
    n_groups: int = 0  # 0 if units are independent

    def take(self, views: Array) -> "WeightInformation":
        """Some of the views, whose weights sum to one again."""
        centre, square = self.centre[views] / max(self.centre[views].sum(), 1e-300), np.ix_(views, views)
        clustered = None if self.clustered is None else self.clustered[square]
        return WeightInformation(centre, self.information[square], self.profile[views], clustered, self.n_groups)


class PoolUncertainty(NamedTuple):
    """Laplace approximation of a latent pool v under a weakened prior, for intervals."""

    centre: Annotated[Array, "K"]  # the mode
    covariance: Annotated[Array, "K K", check_covariance]  # zero for weights held at 0
    slope: Annotated[Array, "K"]  # gradient at an active bound v_k = 0; 0 where the weight is free
    stiffness: Annotated[Array, "K", check_positive]  # curvature there
    n_groups: int = 0  # 0 if instances are independent

    def take(self, views: Array) -> "PoolUncertainty":
        """Some of the views."""
        covariance = self.covariance[np.ix_(views, views)]
        return PoolUncertainty(self.centre[views], covariance, self.slope[views], self.stiffness[views], self.n_groups)


def group_sums(scores: Array, size: Array, group: Array, n_groups: int) -> Array:
    """Sums (P + 1, G) over the units of each group, of their scores (P, n) and of how often they count (n,)."""
    return np.stack([np.bincount(group, row, n_groups) for row in (*scores, size)])


def score_variance(sums: Array) -> Array:
    """Variance (P, P) of the score from its sums over independent groups: the middle of a sandwich."""
    # Scores are centred: the mean score of a weight held at zero is negative, and is not variation.
    scores, size, n_groups = sums[:-1], sums[-1], sums.shape[1]
    if n_groups == 1:  # one group does not show the variation between groups
        return 1e12 * np.eye(len(scores))
    centred = scores - np.outer(scores.sum(axis=1) / size.sum(), size)
    return np.asarray(n_groups / (n_groups - 1) * centred @ centred.T)


def weight_information(
    centre: Array, outer: Array, nuisance_prior: Array, profile: Array, sums: Array | None, n_kept: int
) -> WeightInformation:
    """The information on weights when nuisance parameters are inferred too: a Schur complement."""
    # `outer` (P, P) sums outer products of scores, weights first; `sums` are sums of scores over groups, if any.
    # With groups the profile of a dropped view is divided by the design effect of its weight. With a gate the first
    # `n_kept` scores are those of (ln v, b), and their largest design effect is used.
    K, gated = n_kept, n_kept > len(centre)
    inside = outer[K:, K:] + nuisance_prior
    inside[np.diag_indices_from(inside)] += 1e-10 * np.abs(np.diagonal(inside)).max(initial=1e-300)
    response = np.linalg.solve(inside, outer[K:, :K])
    information = outer[:K, :K] - outer[:K, K:] @ response
    if sums is None:
        return WeightInformation(centre, information, profile)
    variance, mean = score_variance(sums), sums[:K].sum(axis=1)
    moves = np.eye(K) - (0 if gated else centre)  # view k takes weight from all the others
    alone = outer[:K, :K] - np.outer(mean, mean) / sums[-1].sum()  # the variance if units were independent
    with np.errstate(over="ignore"):  # an infinite effect makes the profile flat
        effect = _forms(moves, variance[:K, :K]) / np.maximum(_forms(moves, alone), 1e-300)
    effect = np.full(len(centre), effect.max()) if gated else effect
    variance[K:, K:] += nuisance_prior
    efficient = np.concatenate([np.eye(K), -response.T], axis=1)
    clustered = efficient @ variance @ efficient.T
    return WeightInformation(centre, information, profile / np.maximum(effect, 1)[:, None], clustered, sums.shape[1])


def _forms(rows: Array, matrix: Array) -> Array:
    """a^T M a for every row a."""
    return np.asarray(np.vecdot(rows @ matrix, rows))


def inverse_information(centre: Array, covariance: Array, profile: Array, n_groups: int = 0) -> WeightInformation:
    """The information of which a covariance of the weights (K, K) is the inverse, within the simplex's face."""
    moves = _tangent(centre)
    inner = moves.T @ covariance @ moves + 1e-12 * np.eye(moves.shape[1])
    return WeightInformation(centre, moves @ inverse_of(inner) @ moves.T, profile, None, n_groups)


def _tangent(weights: Array) -> Array:
    """Orthonormal directions (K, F - 1) that keep the sum and the zeros of weights."""
    free = np.flatnonzero(weights > 0)
    moves = np.zeros((len(weights), len(free) - 1))
    moves[free] = np.linalg.svd(np.eye(len(free)) - 1 / len(free))[0][:, :-1]
    return moves


def weight_intervals(estimate: Array, known: WeightInformation | None, level: float) -> Array:
    """Intervals (K, 2) at a level, around the likelihood's maximum; they hold the estimate too."""
    # Positive weights: the lower limit is normal, the upper limit is normal on the square root, which is wider. Zero
    # weights: [0, u], u the quantile of the profile likelihood. The lower limits of other views are scaled by 1 - u,
    # because a dropped view might take weight from them.
    check_level(level, known is not None)
    assert known is not None
    weights = known.centre
    free = np.flatnonzero(weights > 0)
    moves = _tangent(weights)
    # prior information of one label, so that the inverse exists
    inner = moves.T @ known.information @ moves + np.eye(moves.shape[1])
    inverse = inverse_of(inner)
    if known.clustered is not None:
        inverse = inverse @ (moves.T @ known.clustered @ moves + np.eye(moves.shape[1])) @ inverse
    covariance = moves @ inverse @ moves.T
    reach = reach_of(level, known.n_groups) * np.sqrt(np.maximum(np.diagonal(covariance)[free], 0))
    bounds = np.zeros((len(weights), 2))
    bounds[free, 0] = np.maximum(weights[free] - reach, 0)
    bounds[free, 1] = weights[free] + reach + reach**2 / (4 * weights[free])
    dropped = np.flatnonzero((weights == 0) | (estimate == 0))
    for k in dropped:
        bounds[k] = 0, max(bounds[k, 1], _upper_limit(known.profile[k], level))
    if len(dropped):
        bounds[:, 0] *= 1 - bounds[dropped, 1].max()
    return _with_estimate(bounds, estimate)


def weight_profile(ratio: Array, weights: Array | float, count: Array) -> Array:
    """Log likelihood (K, G) with view k at the grid's weights and the others in proportion, less the maximum."""
    # `ratio` (K, n) is a unit's density under view k over that under the mixture.
    others = np.maximum((1 - weights * ratio) / np.maximum(1 - weights, 1e-12), 1e-300)  # without view k
    columns = [np.vecdot(np.log(np.maximum((1 - w) * others + w * ratio, 1e-300)), count) for w in PROFILE_GRID]
    return np.stack(columns, axis=1)


def pool_intervals(estimate: Array, uncertainty: PoolUncertainty | None, level: float) -> Array:
    """Intervals (K, 2) of the weights v / sum v at a level, by Laplace; they hold the estimate (K,) too."""
    # Positive weights are normal; zero weights have a normal cut off at 0.
    check_level(level, uncertainty is not None)
    assert uncertainty is not None
    K, gain = len(estimate), max(float(uncertainty.centre.sum()), 1e-300)
    weights = uncertainty.centre / gain if uncertainty.centre.any() else np.full(K, 1 / K)
    jacobian = (np.eye(K) - weights[:, None]) / gain
    variance = np.maximum(np.diagonal(jacobian @ uncertainty.covariance @ jacobian.T), 0)
    reach = reach_of(level, uncertainty.n_groups) * np.sqrt(variance)
    bounds = np.stack([weights - reach, weights + reach], axis=1)
    pinned = uncertainty.centre == 0
    root = np.sqrt(uncertainty.stiffness[pinned])
    scaled_slope = uncertainty.slope[pinned] / root  # the energy s v + h v^2 / 2 is a normal's tail beyond this
    limit = -special.ndtri_exp(np.log1p(-level) + special.log_ndtr(-scaled_slope)) - scaled_slope
    bounds[pinned] = np.stack([np.zeros_like(limit), limit / root / gain], axis=1)
    return _with_estimate(bounds, estimate)


def _with_estimate(bounds: Array, estimate: Array) -> Array:
    """Intervals (K, 2) of weights that hold the estimate too."""
    lower, upper = np.minimum(bounds[:, 0], estimate), np.maximum(bounds[:, 1], estimate)
    return np.asarray(np.clip(np.stack([lower, upper], axis=1), 0, 1))


def reach_of(level: float, n_groups: int) -> float:
    """Half-width of the standard normal's interval; of Student's t if the variance is estimated from groups."""
    tail = 0.5 + 0.5 * level
    return float(special.stdtrit(n_groups - 1, tail) if n_groups > 1 else special.ndtri(tail))


class NoIntervalsError(ValueError):
    """A policy has no intervals of its weights."""


def check_level(level: float, known: bool) -> None:
    """Refuse what is not a level of confidence, and a fit without intervals."""
    between("level", level, 1e-6, 1 - 1e-6)
    if not known:
        raise NoIntervalsError("this policy has no intervals: it is a step on the way, not the end of a fit")


def _upper_limit(profile: Array, level: float) -> float:
    """The level-quantile of the profile likelihood, normalised over the weights of the grid."""
    # A chi-squared limit is too small at the boundary: if none of J labels supports a view, its 90 % limit is 0.8 / J,
    # but no support has a probability of 10 % at a weight of 2.3 / J.
    height = np.exp(profile - profile.max())
    mass = np.concatenate([[0.0], np.cumsum(0.5 * (height[1:] + height[:-1]) * np.diff(PROFILE_GRID))])
    return float(np.interp(level, mass / mass[-1], PROFILE_GRID))


def solve(quadratic: Array, linear: Array, n_views: int) -> tuple[Array, Array]:
    """The minimum with v >= 0 and b free: eliminate b, then non-negative least squares."""
    from scipy.optimize import nnls

    K = n_views
    cross, inner = quadratic[:K, K:], quadratic[K:, K:]
    with np.errstate(over="ignore", invalid="ignore"):
        reduced = quadratic[:K, :K] - cross @ _solved(inner, cross.T)
        target = linear[:K] - cross @ _solved(inner, linear[K:])
        reduced = 0.5 * (reduced + reduced.T)
    if not (np.isfinite(reduced).all() and np.isfinite(target).all()):
        raise ValueError("predictions, labels or priors differ too much in size for a latent pool; rescale them")
    diagonal = np.diagonal(quadratic)[:K]  # below its rounding error no digit of the difference is left
    np.fill_diagonal(reduced, np.maximum(np.diagonal(reduced), np.finfo(float).eps * diagonal))
    factor = cholesky(reduced)
    pool = nnls(factor.T, np.linalg.solve(factor, target), maxiter=100 * K)[0]
    return pool, _solved(inner, linear[K:] - cross.T @ pool)


def _solved(matrix: Array, right: Array) -> Array:
    """The solution of a positive definite system, whose matrix rounding may have made singular."""
    try:
        return np.asarray(np.linalg.solve(matrix, right))
    except np.linalg.LinAlgError:
        return np.asarray(inverse_of(matrix) @ right)


def pool_uncertainty(
    quadratic: Array, linear: Array, n_views: int, shrinkage: float, centre: float, variance: Array | None = None
) -> PoolUncertainty:
    """Quadratic approximation of the energy around its mode, with the prior precision of v lowered to 1/gain^2."""
    # This prior keeps the approximation proper without labels. `variance` is that of the score if there are groups: the
    # covariance becomes a sandwich, and gradient and curvature at the bounds are divided by the design effect.
    K, weak = n_views, min(shrinkage, 1 / centre**2)
    diagonal = np.arange(K)
    quadratic, linear = quadratic.copy(), linear.copy()
    quadratic[diagonal, diagonal] -= shrinkage - weak
    linear[:K] -= (shrinkage - weak) * centre / K
    pool, offset = solve(quadratic, linear, K)
    free = np.concatenate([pool > 0, np.ones(len(offset), dtype=bool)])
    inside = np.flatnonzero(pool > 0)
    covariance, inverse = np.zeros((K, K)), inverse_of(quadratic[np.ix_(free, free)])
    forces = np.stack(pinned_forces(quadratic, linear, np.concatenate([pool, offset]), free))
    if variance is not None:
        variance[diagonal, diagonal] += weak
        efficient = np.eye(len(free))[~free]
        efficient[:, free] = -quadratic[np.ix_(~free, free)] @ inverse
        forces /= np.maximum(_forms(efficient, variance) / forces[1], 1)
        inverse = inverse @ variance[np.ix_(free, free)] @ inverse
        inverse = 0.5 * (inverse + inverse.T)
    covariance[np.ix_(inside, inside)] = inverse[: len(inside), : len(inside)]
    slope, stiffness = np.zeros(K), np.ones(K)
    slope[pool == 0], stiffness[pool == 0] = forces
    return PoolUncertainty(pool, covariance, slope, stiffness)


def pinned_forces(quadratic: Array, linear: Array, u: Array, free: Array) -> tuple[Array, Array]:
    """Gradient and curvature at the active bounds, for the coordinates held at 0."""
    pinned = ~free
    slope = np.maximum((quadratic @ u - linear)[pinned], 0)
    cross = quadratic[np.ix_(pinned, free)]
    response = inverse_of(quadratic[np.ix_(free, free)]) @ cross.T
    stiffness = np.diagonal(quadratic)[pinned] - np.einsum("pf,fp->p", cross, response)
    return slope, np.maximum(stiffness, 1e-12)


def log_volume(quadratic: Array, linear: Array, u: Array, n_views: int) -> float:
    """Log integral of exp(-energy) around its mode u = (v, b), relative to the peak."""
    # Free coordinates are integrated as normals; a weight at 0 over the half-line, where its energy is s v + h v^2 / 2.
    free = np.concatenate([u[:n_views] > 0, np.ones(len(u) - n_views, dtype=bool)])
    slope, stiffness = pinned_forces(quadratic, linear, u, free)
    half_lines = 0.5 * np.log(0.5 * np.pi / stiffness) + np.log(special.erfcx(slope / np.sqrt(2 * stiffness)))
    log_det = 2 * np.log(np.diagonal(cholesky(quadratic[np.ix_(free, free)]))).sum()
    return float(0.5 * free.sum() * np.log(2 * np.pi) - 0.5 * log_det + half_lines.sum())


def pool_penalty(pool: Array, shrinkage: float, centre: float) -> float:
    """Minus the log prior of v, normals of precision lambda around g / K cut off at 0."""
    K = len(pool)
    penalty = 0.5 * shrinkage * float(((pool - centre / K) ** 2).sum()) - 0.5 * K * np.log(shrinkage / (2 * np.pi))
    return float(penalty + K * special.log_ndtr(np.sqrt(shrinkage) * centre / K))


def pool_weights(pool: Array) -> Array:
    """Weights w = v / sum v; uniform where all are zero."""
    total = pool.sum()
    return np.asarray(pool / total) if total > 0 else np.full(len(pool), 1 / len(pool))
