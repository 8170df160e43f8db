"""Temperatures and class offsets: utilities kappa_k f_ik + o, ln kappa_k = ln kappa + xi_k.

    ln kappa ~ Normal(0, a^2),   xi_k ~ Normal(0, b^2),   o_c ~ Normal(0, s^2),   all at their mode

Given ln kappa_k the mode of ln kappa is linear in them, so a state holds ln kappa_k and o alone.
"""

from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array

WIDE = 30.0  # range of logits above which the likelihood may be flat at kappa = 1
_START_RANGES = (30.0, 10.0, 3.0)  # of calibrated logits, where wide ones start
_MAX_STEP = 2.0  # of ln kappa
_MAX_UTILITY = 450.0  # up to which log probabilities are not cut off, a step's change included
_FRACTIONS = 0.75 ** np.arange(40)  # of a step


class CalibrationPrior(NamedTuple):
    """Standard deviations."""

    kappa_scale: float  # a
    xi_scale: float  # b
    offset_scale: float  # s


class Calibration(NamedTuple):
    """Temperatures and offsets."""

    log_kappa: Array  # (K,)
    offset: Array  # (C,)


class CalibrationSums(NamedTuple):
    """Derivatives of the expected log-likelihood in kappa_k and o; curvatures are minus the second ones."""

    kappa: Array  # (K,)
    offset: Array  # (C,)
    kappa_curvature: Array  # (K,)
    cross_curvature: Array  # (C, K)
    offset_curvature: Array  # (C, C), or its diagonal (C,) where classes are many


def common_log_kappa(log_kappa: Array, prior: CalibrationPrior) -> float:
    """The mode of ln kappa given all ln kappa_k."""
    inner = 1 / prior.xi_scale**2
    return float(inner * log_kappa.sum() / (1 / prior.kappa_scale**2 + len(log_kappa) * inner))


def log_prior(state: Calibration, prior: CalibrationPrior) -> float:
    """Log density of ln kappa, xi and o at the state."""
    common = common_log_kappa(state.log_kappa, prior)
    return (
        log_normal(np.array([common]), prior.kappa_scale)
        + log_normal(state.log_kappa - common, prior.xi_scale)
        + log_normal(state.offset, prior.offset_scale)
    )


def gradient(state: Calibration, sums: CalibrationSums, prior: CalibrationPrior) -> Array:
    """Of the expected log-likelihood plus log prior with respect to (ln kappa_k, o): (K + C,)."""
    pull = (state.log_kappa - common_log_kappa(state.log_kappa, prior)) / prior.xi_scale**2
    by_kappa = np.exp(state.log_kappa) * sums.kappa - pull
    return np.concatenate([by_kappa, sums.offset - state.offset / prior.offset_scale**2])


def log_kappa_precision(n_views: int, prior: CalibrationPrior) -> Array:
    """Prior precision of all ln kappa_k, their common part at its mode: (K, K)."""
    inner = 1 / prior.xi_scale**2
    shared = inner**2 / (1 / prior.kappa_scale**2 + n_views * inner)
    return inner * np.eye(n_views) - shared


def precision(n_views: int, n_classes: int, prior: CalibrationPrior) -> Array:
    """Prior precision of (ln kappa_k, o), whose prior mean is 0: (K + C, K + C)."""
    result = np.zeros((n_views + n_classes, n_views + n_classes))
    result[:n_views, :n_views] = log_kappa_precision(n_views, prior)
    result[n_views:, n_views:] = np.eye(n_classes) / prior.offset_scale**2
    return result


def information(state: Calibration, sums: CalibrationSums) -> Array:
    """Minus the Hessian of the expected log-likelihood in (ln kappa_k, o), without that of exp: (K + C, K + C)."""
    K, kappa = len(state.log_kappa), np.exp(state.log_kappa)
    result = np.empty((K + len(state.offset), K + len(state.offset)))
    result[:K, :K] = np.diag(kappa**2 * np.maximum(sums.kappa_curvature, 0))
    result[K:, :K] = sums.cross_curvature * kappa
    result[:K, K:] = result[K:, :K].T
    offset = sums.offset_curvature
    result[K:, K:] = offset if offset.ndim == 2 else np.diag(offset)
    return result


def direction(state: Calibration, sums: CalibrationSums, prior: CalibrationPrior) -> Array:
    """A Newton step of (ln kappa_k, o), (K + C,), without the curvature of exp, so that it is an ascent direction."""
    curvature = information(state, sums) + precision(len(state.log_kappa), len(state.offset), prior)
    curvature[np.diag_indices_from(curvature)] *= 1 + 1e-10
    step = np.linalg.solve(curvature, gradient(state, sums, prior))
    return np.asarray(step / max(1.0, np.abs(step).max() / _MAX_STEP))


def moved(state: Calibration, step: Array, fraction: float = 1.0) -> Calibration:
    """The state after a fraction of a step."""
    K = len(state.log_kappa)
    return Calibration(state.log_kappa + fraction * step[:K], state.offset + fraction * step[K:])


def starts(ranges: Array, *, common: bool = False) -> list[Array]:
    """Candidates for ln kappa_k to start from, given the ranges of the views' logits (K,): 0 unless one is wide."""
    # Under logits in the hundreds wrong labels have hardly any probability: the likelihood is flat. With `common`, all
    # ln kappa_k of a candidate are equal.
    plain = np.zeros(len(ranges))
    if ranges.max() <= WIDE:
        return [plain]
    equal = [plain + np.log(aim / np.median(ranges)) for aim in _START_RANGES]
    if common:
        return [plain, *equal]
    wide = ranges > WIDE
    return [plain, *equal, *(np.where(wide, np.log(aim / np.where(wide, ranges, 1)), 0) for aim in _START_RANGES)]


def safe_fraction(
    state: Calibration, step: Array, sums: CalibrationSums, prior: CalibrationPrior, spread: Array
) -> float:
    """The fraction of a step that maximises a lower bound on the gain, which holds for the softmax link."""
    # Along a change d of an instance's utilities, the log normaliser's third derivative is a third central moment of d,
    # at most range(d) times its second. So it rises by at most E d + Var d (e^R - 1 - R)/R^2, R = range(d), and R is at
    # most |change of kappa_k| * spread_k + range(change of o). The sums then bound the gain of any step from below,
    # without another pass. The bound does not hold where utilities are cut off: there the fraction is 0.
    kappa, before = np.exp(state.log_kappa), log_prior(state, prior)
    best, best_gain, inner = 0.0, 0.0, sums.offset_curvature
    if (kappa * spread).max() + np.ptp(state.offset) > _MAX_UTILITY:
        return 0.0
    for fraction in _FRACTIONS.tolist():
        new = moved(state, step, fraction)
        by_kappa, by_offset = np.exp(new.log_kappa) - kappa, new.offset - state.offset
        reach = float((np.abs(by_kappa) * spread).max() + np.ptp(by_offset))
        if reach > 100:
            continue
        form = sums.kappa_curvature @ by_kappa**2 + 2 * by_offset @ sums.cross_curvature @ by_kappa
        form += by_offset @ inner @ by_offset if inner.ndim == 2 else inner @ by_offset**2
        rise = 0.5 if reach < 1e-4 else (np.expm1(reach) - reach) / reach**2
        gain = sums.kappa @ by_kappa + sums.offset @ by_offset - rise * form + log_prior(new, prior) - before
        if gain > best_gain:
            best, best_gain = fraction, float(gain)
        elif best_gain > 0:
            break
    return best


def log_normal(values: Array, scale: float) -> float:
    """Log density of independent normal values of mean 0."""
    return float(-0.5 * (values**2).sum() / scale**2 - len(values) * np.log(scale * np.sqrt(2 * np.pi)))
