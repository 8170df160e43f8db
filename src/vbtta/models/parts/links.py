"""Calibrated links: how logits become class probabilities, under temperatures and offsets (docs/method, eqs. 20, 21).

ln kappa_k = ln kappa + xi_k and the offsets are at their mode. Given ln kappa_k that of ln kappa is known, so a state
holds ln kappa_k and o alone. The largest logit of an input and view is stored as 0. To add a link, derive from
:class:`Link`, enter it in :data:`LINKS`, and enter its log-probability in torch for ADVI and `TTAModule`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference.em import buffer
from vbtta.inference.linalg import TAIL_DOF, student_log_density, student_precision
from vbtta.models.parts.probit import log_probit, log_probit_vjp

WIDE = 10.0  # range of logits above which several kappa are tried: at 1 label noise may explain the network's errors
_START_RANGES = (30.0, 10.0, 3.0)  # of calibrated logits, where wide ones start
_MAX_STEP = 2.0  # of ln kappa
_MIN_LOG_PROBA = -600.0  # no product of a few probabilities underflows
_MIN_RESPONSIBILITY = 1e-12  # of an input and view whose gradient is computed


class Calibration(NamedTuple):
    """Temperatures and offsets."""

    log_kappa: Annotated[Array, "K"]
    offset: Annotated[Array, "C"]

    def moved(self, step: Array, fraction: float = 1.0) -> "Calibration":
        """After a fraction of a step (K + C,)."""
        K = len(self.log_kappa)
        return Calibration(self.log_kappa + fraction * step[:K], self.offset + fraction * step[K:])


class CalibrationSums(NamedTuple):
    """Derivatives of the expected log-likelihood in kappa_k and o; curvatures are minus the second ones."""

    kappa: Array  # (K,)
    offset: Array  # (C,)
    kappa_curvature: Array  # (K,)
    cross_curvature: Array  # (C, K)
    offset_curvature: Array  # (C,): a diagonal that bounds it

    @classmethod
    def zeros(cls, n_views: int, n_classes: int) -> "CalibrationSums":
        """Of a calibration that is not inferred."""
        K, C = n_views, n_classes
        return cls(np.zeros(K), np.zeros(C), np.zeros(K), np.zeros((C, K)), np.zeros(C))


class CalibrationPrior(NamedTuple):
    """Scales of the prior, and Newton steps under it."""

    kappa_scale: float  # a
    xi_scale: float  # b
    offset_scale: float  # s

    @property
    def offset_precision(self) -> float:
        """1/s^2; without offsets, whose derivatives are zero then, any positive number."""
        return 1 / self.offset_scale**2 if self.offset_scale else 1.0

    def common(self, log_kappa: Array) -> float:
        """The mode of ln kappa given all ln kappa_k that is nearest to their mean."""
        return _common(float(log_kappa.sum()) / len(log_kappa), len(log_kappa) / self.xi_scale**2, self.kappa_scale)

    def log_density(self, state: Calibration) -> float:
        """Log density of ln kappa, xi and o at a state."""
        common = self.common(state.log_kappa)
        return (
            float(student_log_density(common**2, self.kappa_scale))
            + log_normal(state.log_kappa - common, self.xi_scale)
            + log_normal(state.offset, self.offset_scale)
        )

    def gradient(self, state: Calibration, sums: CalibrationSums) -> Array:
        """Of the expected log-likelihood plus log prior with respect to (ln kappa_k, o): (K + C,)."""
        pull = (state.log_kappa - self.common(state.log_kappa)) / self.xi_scale**2
        by_kappa = np.exp(state.log_kappa) * sums.kappa - pull
        return np.concatenate([by_kappa, sums.offset - self.offset_precision * state.offset])

    def log_kappa_precision(self, log_kappa: Array) -> Array:
        """Prior precision of all ln kappa_k, their common part at its mode, or an upper bound on it: (K, K)."""
        inner = 1 / self.xi_scale**2
        outer = student_precision(self.common(log_kappa) ** 2, self.kappa_scale)
        return np.asarray(inner * np.eye(len(log_kappa)) - inner**2 / (outer + len(log_kappa) * inner))

    def direction(self, state: Calibration, sums: CalibrationSums) -> Array:
        """A Newton step of (ln kappa_k, o), (K + C,), without the curvature of exp: an ascent direction."""
        kappa, ridge = np.exp(state.log_kappa), 1 + 1e-10
        inside = np.diag(kappa**2 * np.maximum(sums.kappa_curvature, 0)) + self.log_kappa_precision(state.log_kappa)
        inside[np.diag_indices_from(inside)] *= ridge
        slope = self.gradient(state, sums)
        by_kappa, by_offset = slope[: len(kappa)], slope[len(kappa) :]
        if not self.offset_scale:
            step = np.concatenate([np.linalg.solve(inside, by_kappa), np.zeros(len(by_offset))])
        else:
            cross = sums.cross_curvature * kappa
            right = np.column_stack([cross, by_offset])
            solved = right / (sums.offset_curvature + ridge * self.offset_precision)[:, None]
            response, offset = solved[:, :-1], solved[:, -1]
            log_kappa = np.linalg.solve(inside - cross.T @ response, by_kappa - cross.T @ offset)
            step = np.concatenate([log_kappa, offset - response @ log_kappa])
        return np.asarray(step / max(1.0, np.abs(step).max() / _MAX_STEP))


@lru_cache(maxsize=8)  # a state's is needed several times
def _common(mean: float, inner: float, scale: float) -> float:
    """The mode c of ln kappa, given the mean of ln kappa_k and the precision of that mean."""
    # The root of (c - m) (2 a^2 + c^2) K / b^2 + 3 c that is nearest to the mean m.
    tail = TAIL_DOF * scale**2
    roots = np.roots([1.0, -mean, tail + (TAIL_DOF + 1) / inner, -tail * mean])
    return float(min(roots[np.isreal(roots)].real, key=lambda root: abs(root - mean)))


def start_candidates(ranges: Array, *, common: bool) -> list[Array]:
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


def log_normal(values: Array, scale: float) -> float:
    """Log density of independent normal values of mean 0; 0 where the scale is, and so are they."""
    if not scale:
        return 0.0
    return float(values @ values / (-2 * scale**2)) - len(values) * math.log(scale * math.sqrt(2 * math.pi))


@dataclass(frozen=True, eq=False)
class MixedViews:
    """A block of calibrated views and their mixture, valid until the thread's next block."""

    logits: Array  # (C, K, n): f
    variance: Array | None  # (C, K, n): g
    calibration: Calibration
    proba: Array  # (C, K, n): P_k(c), before division by its sum
    inverse: Array  # (K, n): one over that sum
    joint: Array  # (C, K, n): proba, times the class weights if any
    scale: Array  # (K, n): inverse, times the weights if they are not by class
    mixture: Array  # (C, n): sum_k w_k P_k(c)
    _last: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def weighted(self) -> Array:
        """P_k(c) f_c before division: (C, K, n)."""
        return np.multiply(self.proba, self.logits, out=_like("weighted", self.proba))

    @cached_property
    def squared(self) -> Array:
        """P_k(c) f_c^2 before division: (C, K, n)."""
        return np.multiply(self.weighted, self.logits, out=_like("squared", self.proba))

    def expected(self, share: Array) -> Array:
        """Sum over views of share (K, n) times P_k: (C, n), kept for the last share."""
        if self._last.get("share") is not share:
            self._last.update(share=share, mixed=contract("ckn,kn->cn", self.proba, share * self.inverse))
        return self._last["mixed"]

    @cached_property
    def mean(self) -> Array:
        """E_k f: (K, n)."""
        return np.asarray(class_sum(self.weighted) * self.inverse)


class ViewScores(NamedTuple):
    """Gradients of sum_kc r_kc ln P_k(c) for every instance."""

    by_kappa: Array  # (K, n)
    by_offset: Array  # (C, n)


class Link(ABC):
    """A map from utilities to class probabilities; this class derives everything from `log_proba` and `gradient`."""

    uses_variance = False  # whether variances over draws enter
    classes_last = True  # whether logits are kept with classes last in memory
    canonical = False  # ln P is u less its log normaliser: the curvature is exact
    information = 1.0  # Fisher information relative to the softmax's, where classes are equally probable; its curvature

    @abstractmethod
    def log_proba(self, utility: Array, variance: Array | None) -> Array:
        """Log-probabilities (..., C) of utilities and their variances, (..., C) each."""

    @abstractmethod
    def gradient(self, utility: Array, variance: Array | None, weight: Array) -> tuple[Array, Array | None]:
        """Gradients of sum_c weight_c ln P(c) in utilities and variances, (m, C) as all arguments are."""

    def proba(self, utility: Array, variance: Array | None) -> tuple[Array, Array]:
        """Unnormalised probabilities (C, ..., n) of utilities, which may be overwritten, and their inverse sums."""
        spread = None if variance is None else np.ascontiguousarray(variance.T)
        log_proba = self.log_proba(np.ascontiguousarray(utility.T), spread).T
        return np.exp(np.maximum(log_proba, _MIN_LOG_PROBA)), np.ones(utility.shape[1:])

    def scores(self, views: MixedViews, ratio: Array, share: Array) -> ViewScores:
        """Gradients for responsibilities r = joint * scale * ratio, ratio (C, n); share (K, n) is their class sum."""
        responsibility = (views.joint * views.scale * ratio[:, None]).T  # (n, K, C)
        used = np.abs(responsibility).sum(axis=2) > _MIN_RESPONSIBILITY  # (n, K)
        utility, variance = _utilities(views.logits, views.variance, views.calibration)
        rows = None if variance is None else variance.T[used]
        in_utility, in_variance = self.gradient(utility.T[used], rows, responsibility[used])
        by_utility, by_kappa = np.zeros(responsibility.shape), np.zeros(used.shape)
        by_utility[used] = in_utility
        by_kappa[used] = (in_utility * views.logits.T[used]).sum(axis=1)
        if in_variance is not None and views.variance is not None:
            kappa = np.broadcast_to(np.exp(views.calibration.log_kappa), used.shape)[used]
            by_kappa[used] += 2 * kappa * (in_variance * views.variance.T[used]).sum(axis=1)
        return ViewScores(by_kappa.T, by_utility.sum(axis=1).T)


class Softmax(Link):
    """P(c) proportional to exp u_c."""

    classes_last = False
    canonical = True

    def log_proba(self, utility: Array, variance: Array | None) -> Array:
        """Utilities less their log normaliser."""
        return np.asarray(special.log_softmax(utility, axis=-1))

    def gradient(self, utility: Array, variance: Array | None, weight: Array) -> tuple[Array, None]:
        """Weights less their expectation."""
        return weight - special.softmax(utility, axis=-1) * weight.sum(axis=-1, keepdims=True), None

    def proba(self, utility: Array, variance: Array | None) -> tuple[Array, Array]:
        """Exponentials, in place: the largest utilities are near 0. In single precision small ones may become 0."""
        if utility.itemsize == 8:
            np.maximum(utility, _MIN_LOG_PROBA, out=utility)
        proba = np.exp(utility, out=utility)
        return proba, 1 / class_sum(proba)

    def scores(self, views: MixedViews, ratio: Array, share: Array) -> ViewScores:
        """Sums over classes without an array of the responsibilities."""
        product = views.weighted if views.joint is views.proba else views.joint * views.logits
        by_kappa = contract("ckn,cn->kn", product, ratio) * views.scale - share * views.mean
        return ViewScores(by_kappa, views.mixture * ratio - views.expected(share))


class Probit(Link):
    """P(c) is the probability that a normal utility of mean u_c and variance s_c^2 + 1 is the largest."""

    uses_variance = True
    information = 1.3

    def log_proba(self, utility: Array, variance: Array | None) -> Array:
        """By quadrature."""
        return log_probit(utility, _probit_scale(variance))

    def gradient(self, utility: Array, variance: Array | None, weight: Array) -> tuple[Array, Array | None]:
        """The quadrature's own derivative."""
        scale = _probit_scale(variance)
        result = log_probit_vjp(utility, scale, weight)
        return result.grad_mean, None if variance is None else 0.5 * result.grad_scale / scale


LINKS: dict[str, Link] = {"softmax": Softmax(), "probit": Probit()}


def contract(subscripts: str, views: Array, weights: Array) -> Array:
    """A sum of products of an array (C, K, n) and a smaller one, computed in the precision of the first."""
    weights = weights.astype(views.dtype, copy=False)
    classes_last = views.strides[0] < views.strides[2]  # in memory
    if subscripts in _PRODUCTS and classes_last:  # BLAS is faster
        total = _PRODUCTS[subscripts](views.T, weights.T).T
    elif subscripts.endswith("->ck") and not classes_last:
        total = np.vecdot(views, weights if subscripts == "ckn,kn->ck" else weights[:, None])
    else:
        total = np.einsum(subscripts, views, weights)
    return total.astype(np.float64, copy=False)


def class_sum(views: Array) -> Array:
    """The sum over classes (K, n) of an array (C, K, n)."""
    if views.strides[0] > views.strides[-1]:
        return np.asarray(views.sum(axis=0))
    return np.asarray((views.T @ np.ones(len(views), dtype=views.dtype)).T)


_PRODUCTS: dict[str, Callable[[Array, Array], Array]] = {
    "ckn,kn->cn": lambda views, weights: (weights[:, None] @ views)[:, 0],
    "ckn,cn->kn": lambda views, weights: (views @ weights[:, :, None])[:, :, 0],
    "ckn,k->cn": lambda views, weights: weights @ views,
}


def view_proba(link: Link, logits: Array, variance: Array | None, calibration: Calibration) -> tuple[Array, Array]:
    """Unnormalised probabilities of every class under every calibrated view, (C, K, n), and inverse sums (K, n).

    The probabilities may be in the thread's buffer: they are valid until its next block.
    """
    return link.proba(*_utilities(logits, variance, calibration))


def _utilities(logits: Array, variance: Array | None, calibration: Calibration) -> tuple[Array, Array | None]:
    """Utilities and their variances: (C, K, n) each."""
    kappa = np.exp(calibration.log_kappa)[:, None]
    utility = np.multiply(logits, kappa.astype(logits.dtype), out=_like("utility", logits))
    if calibration.offset.any():
        utility += calibration.offset[:, None, None].astype(logits.dtype)
    return utility, None if variance is None else variance * kappa**2


def _probit_scale(variance: Array | None) -> Array | float:
    """Standard deviations of the utilities: their noise has unit variance."""
    return 1.0 if variance is None else np.sqrt(variance + 1)


def _like(name: str, views: Array) -> Array:
    """The thread's array of a name, shaped and laid out in memory like another (C, K, n)."""
    if views.strides[0] < views.strides[2]:
        return buffer(name, views.shape[::-1], views.dtype).T
    return buffer(name, views.shape, views.dtype)
