"""The probit integral: the probability that each of several independent normal utilities is the largest (eq. 20).

One set of nodes per row serves all classes (docs/method, "The probit integral"). P is within 1e-8 of the integral where
the scales of a row differ by up to 10 x, and within 1e-5 up to 10,000 x. Improbable classes keep their leading digits
down to P = 1e-80 or so; below, ln P is finite and ordered, but rough.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from vbtta.inference.em import buffer

Array = NDArray[np.float64]
BLOCK_SIZE = 1 << 16  # elements of one work array: 512 kB, about six of them are alive at a time
_CHUNK = 64  # nodes of a work array
_LOWER, _UPPER = 20.0, 7.5  # reach of the window, in scales
_NEGLIGIBLE = 9.0  # standard deviations below which a normal density has no mass, with the first nodes' corrections
_ACTIVE = 9.0  # beyond mu + 9 s a factor Phi is 1 to double precision
_STRETCH = 42.0  # scales of a class above the lowest node within which it may be active
_FIRST_WEIGHTS = np.array([36799, 176648, 54851, 177984, 89437, 130936, 119585]) / 120960  # Gregory's
_LOG_SQRT_2PI = 0.5 * np.log(2.0 * np.pi)


class ProbitGradient(NamedTuple):
    """Log-probabilities and the gradient of their weighted sum, all of shape (..., C)."""

    log_proba: Array
    grad_mean: Array
    grad_scale: Array


def log_probit(mean: ArrayLike, scale: ArrayLike = 1.0) -> Array:
    """Log-probability of each class under independent Gaussian utilities of means (..., C) and standard deviations.

    It is finite and at most 0, and not renormalised: how far a row's sum is from 1 shows the error.
    """
    mean = np.asarray(mean, dtype=np.float64)
    return _by_blocks(mean, np.broadcast_to(np.asarray(scale, dtype=np.float64), mean.shape), None)[0]


def log_probit_vjp(mean: ArrayLike, scale: ArrayLike, cotangent: ArrayLike) -> ProbitGradient:
    """Log-probabilities, and the gradient of sum_c r_c ln P(Y = c) for weights r, the quadrature's nodes held fixed."""
    mean = np.asarray(mean, dtype=np.float64)
    scale, weight = (np.broadcast_to(np.asarray(values, dtype=np.float64), mean.shape) for values in (scale, cotangent))
    return ProbitGradient(*_by_blocks(mean, scale, weight))


def _by_blocks(mean: Array, scale: Array, weight: Array | None) -> list[Array]:
    """Log-probabilities (..., C) and, with weights, gradients of their weighted sum in mean and scale."""
    results = [np.zeros(mean.shape) for _ in range(1 if weight is None else 3)]
    n_classes = mean.shape[-1]
    if n_classes == 1:
        return results
    arrays = [array.reshape(-1, n_classes) for array in (mean, scale, *([] if weight is None else [weight]))]
    flat = [result.reshape(-1, n_classes) for result in results]
    size = max(1, BLOCK_SIZE // (_CHUNK * n_classes))
    for first in range(0, len(flat[0]), size):
        rows = slice(first, first + size)
        block_mean, block_scale, *weights = (np.ascontiguousarray(array[rows].T) for array in arrays)
        # only differences matter: with the lowest node at 0, large means lose no digits of the steps
        quadrature = _Quadrature(block_mean - _lowest_node(block_mean, block_scale), block_scale)
        tail = _tail(quadrature.mean, quadrature.scale)
        log_proba = _integrate(quadrature, tail)
        values = [log_proba, *(_pull_back(quadrature, tail, log_proba, weights[0]) if weights else [])]
        for result, value in zip(flat, values, strict=True):
            result[rows] = value.T
    np.minimum(results[0], 0.0, out=results[0])
    return results


def _lowest_node(mean: Array, scale: Array) -> Array:
    """For means and scales (C, R) a limit (R,) with less than 1e-10 of any class's probability below, if it is near."""
    # As phi(x) / Phi(x) > -x, the slope of class c's ln phi(x_c) + ln Phi(x_t), t another class, is above that of two
    # normal densities' product. Below that product's centre the integrand falls at least as fast as the product.
    top, precision = mean.argmax(axis=0)[None], scale**-2.0
    of_both = precision + np.take_along_axis(precision, top, axis=0)
    centre = (precision * mean + np.take_along_axis(precision * mean, top, axis=0)) / of_both
    below = centre - _NEGLIGIBLE / np.sqrt(of_both)
    np.put_along_axis(below, top, np.take_along_axis(mean - _NEGLIGIBLE * scale, top, axis=0), axis=0)
    return np.asarray(np.maximum(below.min(axis=0), (mean - _LOWER * scale).max(axis=0)))


class _Terms(NamedTuple):
    """Some nodes, each (q, C, R)."""

    x: Array
    log_hazard: Array
    log_share: Array  # ln of weight * F * h_c / s_c


class _Quadrature:
    """The trapezoid rule in t, the nodes being v = a s (exp(t / a) - 1), for rows whose lowest node is 0.

    There it has Gregory's correction. s is the smallest scale of a row, a = 42.
    """

    def __init__(self, mean: Array, scale: Array) -> None:
        self.mean, self.scale = mean, scale  # (C, R): rows come last, so that reductions run over a leading axis
        self._inverse, self._log_scale = 1.0 / scale, np.log(scale)
        top = (mean - 8.0 * scale).argmax(axis=0)
        gap = np.maximum(mean[top, np.arange(len(top))] - mean, 0.0) / scale
        # an improbable class has its mass above mu_t: in units of s_c, phi falls as far from `gap` on as from 0
        beyond = np.minimum(gap, 20.0) ** 2
        upper = (mean + scale * np.sqrt(beyond + _UPPER**2)).max(axis=0)
        active = mean + scale * np.sqrt(beyond + _ACTIVE**2) > 0
        self._unit = _STRETCH * np.where(active, scale, np.inf).min(axis=0)  # (R,): a s
        n_rivals = np.exp(gap * gap / -18.0).sum(axis=0)
        length = _STRETCH * np.log1p(upper / self._unit)
        self._last = np.ceil(length * (1.3 + 1.2 * np.log(np.maximum(n_rivals, 2.0))))  # (R,): number of the last node
        self._step = length / self._last
        self._kept: Iterable[_Terms] = ()  # between passes, where one chunk is enough

    def __iter__(self) -> Iterator[_Terms]:
        starts = range(0, int(self._last.max()) + 1, _CHUNK)
        if len(starts) > 1 or not self._kept:
            self._kept = map(self._terms, starts) if len(starts) > 1 else [self._terms(0)]
        return iter(self._kept)

    def _terms(self, first: int) -> _Terms:
        place = np.arange(first, min(first + _CHUNK, int(self._last.max()) + 1))[:, None]
        rise = self._step * place / _STRETCH  # (q, R)
        log_weight = np.where(place <= self._last, np.log(self._step * self._unit / _STRETCH) + rise, -np.inf)
        if first == 0:
            log_weight[: len(_FIRST_WEIGHTS)] += np.log(_FIRST_WEIGHTS)[:, None]
        shape = (len(place), *self.mean.shape)
        x = np.subtract((self._unit * np.expm1(rise))[:, None], self.mean, out=buffer("x", shape))
        x *= self._inverse
        log_cdf = fast_log_ndtr(x)
        log_weight += log_cdf.sum(axis=1)  # plus ln F
        log_hazard = np.multiply(x, x, out=buffer("hazard", shape))
        log_hazard *= -0.5
        log_hazard -= _LOG_SQRT_2PI
        log_hazard -= log_cdf
        log_share = np.add(log_hazard, log_weight[:, None], out=log_cdf)
        log_share -= self._log_scale
        return _Terms(x, log_hazard, log_share)


def _integrate(quadrature: _Quadrature, tail: "_Tail") -> Array:
    """Log-probabilities (C, R), not yet capped at 0."""
    highest, total = tail.log_value, np.ones_like(tail.log_value)
    for terms in quadrature:
        higher = np.maximum(highest, terms.log_share.max(axis=0))
        share = np.subtract(terms.log_share, higher, out=buffer("share", terms.x.shape))
        total *= np.exp(highest - higher)
        total += np.exp(share, out=share).sum(axis=0)
        highest = higher
    return np.asarray(highest + np.log(total))


def _pull_back(quadrature: _Quadrature, tail: "_Tail", log_proba: Array, weight: Array) -> tuple[Array, Array]:
    """Gradients (C, R) of sum_c weight_c ln P_c with respect to mean and scale."""
    by_mean, by_scale = np.zeros_like(log_proba), np.zeros_like(log_proba)
    for terms in quadrature:
        share = np.exp(np.subtract(terms.log_share, log_proba, out=terms.log_share), out=terms.log_share)
        share *= weight
        hazard = np.exp(terms.log_hazard, out=terms.log_hazard)
        slope = np.add(terms.x, hazard, out=buffer("share", terms.x.shape))
        slope *= share
        hazard *= share.sum(axis=1)[:, None]
        slope -= hazard
        by_mean += slope.sum(axis=0)
        slope *= terms.x
        slope -= share
        by_scale += slope.sum(axis=0)
    scale = quadrature.scale
    below = _pull_back_tail(scale, tail, weight * np.exp(tail.log_value - log_proba))
    return by_mean / scale + below[0], by_scale / scale + below[1]


class _Tail(NamedTuple):
    """The integral below the lowest node, 0, each (C, R): the logarithm of the integrand is continued as a parabola."""

    x: Array
    hazard: Array  # h = phi / Phi
    excess: Array  # x + h
    bend: Array  # h (x + h), minus the second derivative of ln Phi
    curvature: Array  # k_c
    z: Array
    log_value: Array


def _tail(mean: Array, scale: Array) -> _Tail:
    x = -mean / scale
    log_cdf = log_ndtr(x)
    log_hazard = -0.5 * x * x - _LOG_SQRT_2PI - log_cdf
    hazard = np.exp(log_hazard)
    excess = x + hazard
    bend = hazard * excess
    slope = (hazard / scale).sum(axis=0) - excess / scale
    curvature = (bend / scale**2).sum(axis=0) + (1.0 - bend) / scale**2
    z = -slope / np.sqrt(curvature)
    log_value = log_cdf.sum(axis=0) + log_hazard - np.log(scale)
    log_value += 0.5 * z * z + _LOG_SQRT_2PI + log_ndtr(z) - 0.5 * np.log(curvature)
    return _Tail(x, hazard, excess, bend, curvature, z, log_value)


def _pull_back_tail(scale: Array, tail: _Tail, share: Array) -> tuple[Array, Array]:
    """Gradients (C, R) of the part below the lowest node, share (C, R) being its weight in the objective."""
    # The lowest node moves with the class that decides it, and curvatures change little there: both are held fixed.
    # (Their derivative at a fixed lo grows with the square of the distance to an improbable class, and is wrong.)
    x, hazard, excess, bend, curvature, z, _ = tail
    rise = z + np.exp(-0.5 * z * z - _LOG_SQRT_2PI - log_ndtr(z))
    by_slope = -share * rise / np.sqrt(curvature)
    by_curvature = -0.5 * share * (1.0 + z * rise) / curvature
    sum_slope, sum_curvature = by_slope.sum(axis=0), by_curvature.sum(axis=0)
    by_x = share.sum(axis=0) * hazard - share * excess
    by_x -= (sum_slope * bend + by_slope * (1.0 - bend)) / scale
    by_scale = -share / scale + (by_slope * excess - sum_slope * hazard) / scale**2
    by_scale -= 2.0 * (sum_curvature * bend + by_curvature * (1.0 - bend)) / scale**3
    return -by_x / scale, by_scale - by_x * x / scale


_TABLE_FROM, _TABLE_TO, _TABLE_DENSITY = -20.0, 9.0, 128


def _cubic_table() -> Array:
    """Coefficients (4, cells + 1) of ln Phi on cells of width 1/128: cubics through 4 Chebyshev points."""
    points = 0.5 - 0.5 * np.cos(np.pi * (np.arange(4) + 0.5) / 4)
    cells = np.arange(int((_TABLE_TO - _TABLE_FROM) * _TABLE_DENSITY) + 1)
    values = log_ndtr(_TABLE_FROM + (cells + points[:, None]) / _TABLE_DENSITY)
    return np.ascontiguousarray(np.linalg.solve(np.vander(points, 4, increasing=True), values))


_TABLE = _cubic_table()


def fast_log_ndtr(x: Array) -> Array:
    """Table look-up of ln Phi(x) to 1e-12, several times faster than SciPy's; valid until the thread's next use."""
    position = np.subtract(x, _TABLE_FROM, out=buffer("position", x.shape))
    position *= _TABLE_DENSITY
    np.clip(position, 0.0, float(_TABLE.shape[1] - 1), out=position)
    cell = buffer("cell", x.shape).view(np.int64)
    np.copyto(cell, position, casting="unsafe")
    position -= cell
    value = np.take(_TABLE[3], cell, out=buffer("log_cdf", x.shape), mode="clip")
    coefficient = buffer("share", x.shape)
    for row in _TABLE[2::-1]:
        value *= position
        value += np.take(row, cell, out=coefficient, mode="clip")
    if x.min(initial=0.0) < _TABLE_FROM:
        far = x < _TABLE_FROM
        value[far] = log_ndtr(x[far])
    return value
