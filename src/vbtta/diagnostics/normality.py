"""Are the draws of a stochastic view Gaussian around their mean? Tests and shares of rejections."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta.data.labels import Array

_SIMULATIONS = (999, 3999)  # of a null distribution: the standard error of a level of 0.05 is 0.007 or 0.0034
_MAX_PAIRS = 1e8  # of points in all simulations, above the smallest number of simulations
_MAX_NULL_SIZE = 400  # points: with the smoothing held fixed, the null distribution hardly changes beyond
_ROUNDING = 1e-12  # relative, of a statistic: in very many dimensions all samples agree up to that
_ENTRIES = 1 << 22  # of the largest temporary
_MAX_INSTANCES = 200  # whose draws are tested
_MAX_DRAWS = 200  # of an instance, for the multivariate test, whose cost grows with their square
_QQ_LEVELS = np.concatenate([[0.001, 0.005], np.linspace(0.01, 0.99, 99), [0.995, 0.999]])
_MIN_VARIANCE = 1e-10  # relative to the largest; directions with less are constant


class HenzeZirkler(NamedTuple):
    """Outcome of the Henze-Zirkler test."""

    statistic: float
    p_value: float
    dimension: int  # directions in which the sample varies


class Normality(NamedTuple):
    """Shares of instances whose draws are not Gaussian, by view; NaN for views whose draws do not vary.

    At a level of 0.05, about that share is expected of views that are Gaussian.
    """

    names: tuple[str, ...]
    henze_zirkler: Array  # (K,): all outputs together
    anderson_darling: Array  # (K,): output by output, Holm-corrected
    shapiro_wilk: Array  # (K,)
    tested: Array  # (K,) int: instances with draws that vary
    level: float
    qq_normal: Array  # (Q,): quantiles of the standard normal
    qq_draws: Array  # (K, Q): those of the standardised draws


def henze_zirkler(sample: ArrayLike, *, simulations: int | None = None, seed: int = 0) -> HenzeZirkler:
    """Henze and Zirkler's test of multivariate normality of a sample (n, d) or (n,).

    With D_j the squared Mahalanobis distance of x_j from the mean, D_jk that between x_j and x_k, and
    b = ((2d + 1)/4)^(1/(d+4)) n^(1/(d+4)) / sqrt(2), the statistic

        1/n sum_jk exp(-b^2 D_jk / 2) - 2 (1 + b^2)^(-d/2) sum_j exp(-b^2 D_j / (2 (1 + b^2))) + n (1 + 2 b^2)^(-d/2)

    is the weighted distance between the empirical characteristic function and the normal one. Its null distribution is
    simulated: 999 to 3999 times, with at most 400 points. Directions without variance are left out.
    """
    points = np.asarray(sample, dtype=np.float64)
    points = points[:, None] if points.ndim == 1 else points
    if points.ndim != 2 or not np.isfinite(points).all():
        raise ValueError(f"sample must be a finite array of shape (n, d); got shape {points.shape}")
    white = _whiten(points)
    n, d = white.shape
    if d == 0 or n < d + 2:
        least = f"{points.shape[1] + 2} points in {points.shape[1]} dimensions"
        raise ValueError(f"sample must vary and have at least {least}; got {n} points that vary in {d}")
    smoothing = float(((2 * d + 1) / 4) ** (1 / (d + 4)) * n ** (1 / (d + 4)) / np.sqrt(2))
    statistic = float(_statistics(white[None], smoothing)[0])
    n_null = min(n, max(_MAX_NULL_SIZE, 4 * d))
    if simulations is None:
        simulations = int(np.clip(_MAX_PAIRS / n_null**2, *_SIMULATIONS))
    null = _null_distribution(n_null, d, smoothing, simulations, (seed, n, d))
    above = simulations - np.searchsorted(null, statistic - _ROUNDING * abs(statistic))
    return HenzeZirkler(statistic, float((1 + above) / (1 + simulations)), d)


def anderson_darling(sample: Array) -> Array:
    """P-values of the Anderson-Darling test along the first axis, mean and variance estimated.

    The statistic A^2 is SciPy's, whose p-values end at 0.01, too coarse to correct for many outputs. Here they are
    D'Agostino and Stephens' approximation for A^2 (1 + 0.75/n + 2.25/n^2).
    """
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about the p-value, which is not used
        statistic = np.apply_along_axis(lambda column: stats.anderson(column).statistic, 0, sample)
    a = np.minimum(statistic * (1 + 0.75 / len(sample) + 2.25 / len(sample) ** 2), 100)
    pieces = [  # from A^2 = 0.6, 0.34, 0.2 and 0
        np.exp(1.2937 - 5.709 * a + 0.0186 * a**2),
        np.exp(0.9177 - 4.279 * a - 1.38 * a**2),
        1 - np.exp(-8.318 + 42.796 * a - 59.938 * a**2),
        1 - np.exp(-13.436 + 101.14 * a - 223.73 * a**2),
    ]
    return np.asarray(np.clip(np.select([a >= 0.6, a >= 0.34, a >= 0.2, a < 0.2], pieces), 0, 1))


def holm(p_values: ArrayLike) -> Array:
    """P-values (n,) corrected for their number, step by step (Holm)."""
    p = np.asarray(p_values, dtype=np.float64)
    order, corrected = np.argsort(p), np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return corrected


def normality_of(
    draws: ArrayLike, names: Sequence[str] | None = None, *, level: float = 0.05, seed: int = 0
) -> Normality:
    """Test M draws of K views for n instances (n, K, M, C): outputs of a model, or the augmented inputs themselves.

    At most 200 instances are tested, at the level; the seed is that of simulated null distributions.
    """
    values = np.asarray(draws, dtype=np.float64)
    if values.ndim != 4 or values.shape[2] < 8:
        raise ValueError(f"draws must be (n, K, M, C), M at least 8 draws of K views; got shape {values.shape}")
    values, K = values[:_MAX_INSTANCES], values.shape[1]
    views = tuple(f"view_{k}" for k in range(K)) if names is None else tuple(names)
    if len(views) != K:
        raise ValueError(f"names must be {K} strings, one a view; got {len(views)}")
    rejected, tested = np.full((3, K), np.nan), np.zeros(K, dtype=np.intp)
    quantiles = np.full((K, len(_QQ_LEVELS)), np.nan)
    for k in range(K):
        samples = [sample[:, _varies(sample)] for sample in values[:, k] if _varies(sample).any()]
        tested[k] = len(samples)
        if samples:
            rejected[:, k] = np.mean([_rejections(sample, level, seed) for sample in samples], axis=0)
            quantiles[k] = np.quantile(np.concatenate([qq_points(sample).ravel() for sample in samples]), _QQ_LEVELS)
    return Normality(views, rejected[0], rejected[1], rejected[2], tested, level, special.ndtri(_QQ_LEVELS), quantiles)


def qq_points(sample: Array) -> Array:
    """Draws (M, C) as standard normal scores, exactly so if the draws are normal."""
    # Of studentised residuals r, r sqrt((M - 2) / (M - 1 - r^2)) has a Student-t distribution with M - 2 degrees.
    M, r = len(sample), (sample - sample.mean(axis=0)) / sample.std(axis=0)
    student = r * np.sqrt((M - 2) / np.maximum(M - 1 - r**2, 1e-12))
    lower = special.stdtr(M - 2, -np.abs(student))  # the small tail keeps its digits
    return np.asarray(-np.sign(student) * special.ndtri(lower))


def _rejections(sample: Array, level: float, seed: int) -> tuple[float, float, float]:
    """Whether one instance's draws (M, C) fail the three tests; NaN where they are too few for the first."""
    from scipy import stats

    first = sample[:_MAX_DRAWS]
    enough = len(first) >= _whiten(first).shape[1] + 2
    multivariate = float(henze_zirkler(first, seed=seed).p_value < level) if enough else np.nan
    p_values = anderson_darling(sample), stats.shapiro(sample, axis=0).pvalue
    anderson, shapiro = (float((holm(values) < level).any()) for values in p_values)
    return multivariate, anderson, shapiro


def _varies(sample: Array) -> Array:
    """Which outputs vary over the draws; constants in single precision differ in the seventh digit."""
    return np.asarray(sample.std(axis=0) > 1e-7 * np.abs(sample).max(axis=0))


def _whiten(sample: Array) -> Array:
    """Centred and with unit covariance (1/n) in the directions that vary, whatever the outputs' units: (n, rank)."""
    centred = np.asarray((sample - sample.mean(axis=0))[:, _varies(sample)])
    if not centred.shape[1]:
        return centred
    centred /= centred.std(axis=0)
    value, vector = np.linalg.eigh(centred.T @ centred / len(sample))
    kept = value > _MIN_VARIANCE * value[-1]
    return np.asarray(centred @ (vector[:, kept] / np.sqrt(value[kept])))


def _statistics(white: Array, smoothing: float) -> Array:
    """Henze-Zirkler statistics of whitened samples (B, n, d): (B,)."""
    _, n, d = white.shape
    b2 = smoothing**2
    norm = (white**2).sum(axis=2)  # (B, n): D_j
    inner = white @ white.transpose(0, 2, 1)  # (B, n, n)
    pairs = np.exp(-0.5 * b2 * (norm[:, :, None] + norm[:, None] - 2 * inner)).sum(axis=(1, 2)) / n
    single = 2 * (1 + b2) ** (-d / 2) * np.exp(-b2 * norm / (2 * (1 + b2))).sum(axis=1)
    return np.asarray(pairs - single + n * (1 + 2 * b2) ** (-d / 2))


@lru_cache(maxsize=64)
def _null_distribution(n: int, d: int, smoothing: float, simulations: int, seed: tuple[int, ...]) -> Array:
    """Sorted statistics of simulated normal samples: (simulations,)."""
    generator, at_once = np.random.default_rng(seed), max(1, _ENTRIES // n**2)
    statistics = []
    for first in range(0, simulations, at_once):
        sample = generator.standard_normal((min(at_once, simulations - first), n, d))
        sample -= sample.mean(axis=1, keepdims=True)
        factor = np.linalg.cholesky(sample.transpose(0, 2, 1) @ sample / n)  # (B, d, d)
        white = np.linalg.solve(factor, sample.transpose(0, 2, 1)).transpose(0, 2, 1)
        statistics.append(_statistics(white, smoothing))
    return np.sort(np.concatenate(statistics))
