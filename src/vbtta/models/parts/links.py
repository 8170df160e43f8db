"""Links: how utilities of classes become probabilities, and what calibration needs of their gradients.

The utilities of view k are kappa_k f_k + o with variances kappa_k^2 g_k over draws. A link depends on differences of
utilities alone: the largest logit of an input and view is stored as 0. To add a link, derive from :class:`Link`, enter
it in :data:`LINKS`, and enter its log-probability in torch for ADVI and `TTAModule`. Everything else asks the link.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.models.parts.calibration import Calibration
from vbtta.models.parts.probit import log_probit, log_probit_vjp

MAX_CURVATURE_CLASSES = 128  # up to which the offsets' curvature is a matrix, not its diagonal
_MIN_LOG_PROBA = -600.0  # no product of a few probabilities underflows
_MIN_RESPONSIBILITY = 1e-12  # of an input and view whose gradient is computed


@dataclass(frozen=True, eq=False)
class MixedViews:
    """A block of calibrated views and their mixture."""

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
        return self.proba * self.logits

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
    by_utility: Array | None  # (C, K, n); None for a canonical link, whose curvature does not need it


class Link(ABC):
    """A map from utilities to class probabilities; this class derives everything from `log_proba` and `gradient`."""

    uses_variance = False  # whether variances over draws enter
    classes_last = True  # whether logits are kept with classes last in memory
    canonical = False  # ln P is u less its log normaliser: the curvature is exact, and a safe Newton step is known
    information = 1.0  # Fisher information relative to the softmax's, where classes are equally probable

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
        return ViewScores(by_kappa.T, by_utility.sum(axis=1).T, by_utility.T)


class Softmax(Link):
    """P(c) proportional to exp u_c."""

    classes_last = False
    canonical = True

    def log_proba(self, utility: Array, variance: Array | None) -> Array:
        """Utilities less their log normaliser."""
        return np.asarray(special.log_softmax(utility, axis=-1))

    def gradient(self, utility: Array, variance: Array | None, weight: Array) -> tuple[Array, None]:
        """Weights less their expectation."""
        proba, inverse = self.proba(utility.T.copy(order="K"), None)
        return weight - (proba * (inverse * weight.sum(axis=-1))).T, None

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
        expected = views.expected(share)
        return ViewScores(by_kappa, views.mixture * ratio - expected, None)


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
    if subscripts in _PRODUCTS and views.strides[0] < views.strides[2]:  # classes last in memory: BLAS is faster
        total = _PRODUCTS[subscripts](views.T, weights.T).T
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
    """Unnormalised probabilities of every class under every calibrated view, (C, K, n), and inverse sums (K, n)."""
    return link.proba(*_utilities(logits, variance, calibration))


def _utilities(logits: Array, variance: Array | None, calibration: Calibration) -> tuple[Array, Array | None]:
    """Utilities and their variances: (C, K, n) each."""
    kappa = np.exp(calibration.log_kappa)[:, None]
    utility = logits * kappa.astype(logits.dtype)
    if calibration.offset.any():
        utility += calibration.offset[:, None, None].astype(logits.dtype)
    return utility, None if variance is None else variance * kappa**2


def _probit_scale(variance: Array | None) -> Array | float:
    """Standard deviations of the utilities: their noise has unit variance."""
    return 1.0 if variance is None else np.sqrt(variance + 1)
