"""Temperatures and class offsets: utilities kappa_k f_ik + o, ln kappa_k = ln kappa + xi_k.

    ln kappa ~ Student_2(0, a),   xi_k ~ Normal(0, b^2),   o_c ~ Normal(0, s^2),   all at their mode

Few labels leave ln kappa near 0; the heavy tails allow for logits of another scale, which labels show at once. Given
ln kappa_k the mode of ln kappa is known, so a state holds ln kappa_k and o alone. s = 0 switches the offsets off.
"""

from typing import Annotated, NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference.linalg import student_log_density, student_precision

WIDE = 30.0  # range of logits above which the likelihood may be flat at kappa = 1
_START_RANGES = (30.0, 10.0, 3.0)  # of calibrated logits, where wide ones start
_MAX_STEP = 2.0  # of ln kappa
_MAX_UTILITY = 450.0  # up to which log probabilities are not cut off, a step's change included
_FRACTIONS = 0.75 ** np.arange(40)  # of a step


class CalibrationPrior(NamedTuple):
    """Scales."""

    kappa_scale: float  # a
    xi_scale: float  # b
    offset_scale: float  # s

    @property
    def offset_precision(self) -> float:
        """1/s^2; without offsets, whose derivatives are zero then, any positive number."""
        return 1 / self.offset_scale**2 if self.offset_scale else 1.0


class Calibration(NamedTuple):
    """Temperatures and offsets."""

    log_kappa: Annotated[Array, "K"]
    offset: Annotated[Array, "C"]


class CalibrationSums(NamedTuple):
    """Derivatives of the expected log-likelihood in kappa_k and o; curvatures are minus the second ones."""

    kappa: Array  # (K,)
    offset: Array  # (C,)
    kappa_curvature: Array  # (K,)
    cross_curvature: Array  # (C, K)
    offset_curvature: Array  # (C, C), or its diagonal (C,) where classes are many


def common_log_kappa(log_kappa: Array, prior: CalibrationPrior) -> float:
    """The mode of ln kappa given all ln kappa_k, by EM: the Student t is a mixture of normals of different widths."""
    inner, total, common = 1 / prior.xi_scale**2, float(log_kappa.sum()), float(log_kappa.mean())
    for _ in range(100):
        previous = common
        common = inner * total / (student_precision(common**2, prior.kappa_scale) + len(log_kappa) * inner)
        if abs(common - previous) <= 1e-15 * abs(common):
            break
    return common


def log_prior(state: Calibration, prior: CalibrationPrior) -> float:
    """Log density of ln kappa, xi and o at the state."""
    common = common_log_kappa(state.log_kappa, prior)
    return (
        float(student_log_density(common**2, prior.kappa_scale))
        + log_normal(state.log_kappa - common, prior.xi_scale)
        + log_normal(state.offset, prior.offset_scale)
    )


def gradient(state: Calibration, sums: CalibrationSums, prior: CalibrationPrior) -> Array:
    """Of the expected log-likelihood plus log prior with respect to (ln kappa_k, o): (K + C,)."""
    pull = (state.log_kappa - common_log_kappa(state.log_kappa, prior)) / prior.xi_scale**2
    by_kappa = np.exp(state.log_kappa) * sums.kappa - pull
    return np.concatenate([by_kappa, sums.offset - prior.offset_precision * state.offset])


def log_kappa_precision(log_kappa: Array, prior: CalibrationPrior) -> Array:
    """Prior precision of all ln kappa_k, their common part at its mode, or an upper bound on it: (K, K)."""
    inner = 1 / prior.xi_scale**2
    outer = student_precision(common_log_kappa(log_kappa, prior) ** 2, prior.kappa_scale)
    return np.asarray(inner * np.eye(len(log_kappa)) - inner**2 / (outer + len(log_kappa) * inner))


def direction(state: Calibration, sums: CalibrationSums, prior: CalibrationPrior) -> Array:
    """A Newton step of (ln kappa_k, o), (K + C,), without the curvature of exp, so that it is an ascent direction."""
    kappa, ridge = np.exp(state.log_kappa), 1 + 1e-10
    inside = np.diag(kappa**2 * np.maximum(sums.kappa_curvature, 0)) + log_kappa_precision(state.log_kappa, prior)
    inside[np.diag_indices_from(inside)] *= ridge
    slope = gradient(state, sums, prior)
    by_kappa, by_offset = slope[: len(kappa)], slope[len(kappa) :]
    cross = sums.cross_curvature * kappa
    solved = solve_tail(sums.offset_curvature, ridge * prior.offset_precision, np.column_stack([cross, by_offset]))
    response, offset = solved[:, :-1], solved[:, -1]
    log_kappa = np.linalg.solve(inside - cross.T @ response, by_kappa - cross.T @ offset)
    step = np.concatenate([log_kappa, offset - response @ log_kappa])
    return np.asarray(step / max(1.0, np.abs(step).max() / _MAX_STEP))


def solve_tail(curvature: Array, precision: float, right: Array) -> Array:
    """The solution (C, m) for the offsets, of a curvature (C, C) or its diagonal (C,) plus a prior precision."""
    if curvature.ndim == 1:
        return np.asarray(right / (curvature + precision)[:, None])
    return np.linalg.solve(curvature + precision * np.eye(len(curvature)), right)


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
    equal = [plain + np.log(aim / (np.median(ranges) or 1.0)) for aim in _START_RANGES]
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
    """Log density of independent normal values of mean 0; 0 where the scale is, and so are they."""
    if not scale:
        return 0.0
    return float(-0.5 * (values**2).sum() / scale**2 - len(values) * np.log(scale * np.sqrt(2 * np.pi)))
