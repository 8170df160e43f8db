"""The probit integral: the probability that each of several independent normal utilities is the largest.

With x_c = (v - mu_c) / s_c, F(v) = prod_c Phi(x_c) and the hazard h_c = phi(x_c) / Phi(x_c),

    P(Y = c) = integral of F(v) h_c(v) / s_c dv.

One set of nodes v_q per row serves all classes, so a row costs O(C Q). P is within 1e-8 of the integral where the
scales of a row differ by up to 10 x and within 1e-5 up to 10,000 x. Sums are of log F + log h, so that improbable
classes keep their leading digits down to P = 1e-80 or so. For classes still less probable the nodes may miss the peak:
the logarithm of the integrand is continued below the lowest node as a parabola, and ln P is finite and ordered, but
rough.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from vbtta.inference.em import buffer

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
BLOCK_SIZE = 1 << 16  # elements of one work array: 512 kB, about six of them are alive at a time
_LOWER, _UPPER = 20.0, 7.5  # reach of the window, in scales
_LOWER_CANDIDATES = (-2.0, 0.0, 2.0, 4.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0)  # tried in turn
_ACTIVE = 9.0  # beyond mu + 9 s a factor Phi is 1 to double precision
_MAX_NODES = 160  # trapezoid nodes; rows that need more get panels
_PANEL = 1.5  # width of a panel, in scales
_PANEL_NODES, _PANEL_WEIGHTS = np.polynomial.legendre.leggauss(12)
_LOG_SQRT_2PI = 0.5 * np.log(2.0 * np.pi)


class ProbitGradient(NamedTuple):
    """Log-probabilities and the gradient of their weighted sum, all of shape (..., C)."""

    log_proba: Array
    grad_mean: Array
    grad_scale: Array


def log_probit(mean: ArrayLike, scale: ArrayLike = 1.0) -> Array:
    """Log-probability of each class under independent Gaussian utilities of means (..., C) and standard deviations.

    It is finite and at most 0, and not renormalised: how far a row's sum is from 1 shows the error.

    Examples
    --------
    >>> np.exp(log_probit([[0.0, 0.0, 0.0], [1.0, 0.0, -1.0]])).round(4)
    array([[0.3333, 0.3333, 0.3333],
           [0.7288, 0.2241, 0.0472]])
    """
    mean = np.asarray(mean, dtype=np.float64)
    return _by_blocks(mean, np.broadcast_to(np.asarray(scale, dtype=np.float64), mean.shape), None)[0]


def log_probit_vjp(mean: ArrayLike, scale: ArrayLike, cotangent: ArrayLike) -> ProbitGradient:
    """Log-probabilities, and the gradient of sum_c r_c ln P(Y = c) for weights r.

    The derivative is that of the quadrature sum itself, with its nodes held fixed. With pi_cq the share of
    node q in P(Y = c) and A_q = sum_c r_c pi_cq,

        d/dmu_c = (1 / s_c) sum_q [ r_c pi_cq (x_cq + h_cq) - A_q h_cq ],
        d/ds_c  = (1 / s_c) sum_q { x_cq [ r_c pi_cq (x_cq + h_cq) - A_q h_cq ] - r_c pi_cq }.
    """
    mean = np.asarray(mean, dtype=np.float64)
    scale, weight = (np.broadcast_to(np.asarray(each, dtype=np.float64), mean.shape) for each in (scale, cotangent))
    return ProbitGradient(*_by_blocks(mean, scale, weight))


def _by_blocks(mean: Array, scale: Array, weight: Array | None) -> list[Array]:
    """Log-probabilities (..., C) and, with weights, gradients of their weighted sum in mean and scale."""
    results = [np.zeros(mean.shape) for _ in range(1 if weight is None else 3)]
    n_classes = mean.shape[-1]
    if n_classes == 1:
        return results
    flat = [result.reshape(-1, n_classes) for result in results]
    weights = None if weight is None else weight.reshape(-1, n_classes)
    for block in _blocks(mean.reshape(-1, n_classes), scale.reshape(-1, n_classes)):
        sweep = _Sweep(block)
        log_proba, tail = _integrate(sweep)
        values = [log_proba]
        if weights is not None:
            values += _pull_back(sweep, log_proba, tail, weights[block.rows].T)
        for rows, value in zip(flat, values, strict=True):
            rows[block.rows] = value.T
    np.minimum(results[0], 0.0, out=results[0])
    return results


class _NodeBlock(NamedTuple):
    """Some rows with their nodes; rows come last so that every reduction runs over a leading axis."""

    rows: Indices  # (R,) positions of the rows
    mean: Array  # (C, R), up to a constant per row
    scale: Array  # (C, R)
    nodes: Array  # (Q, R)
    log_weights: Array  # (Q, R), -inf for padding
    lower: Array  # (R,): the lowest node
    complete: bool  # the integral below it is negligible


class _Window(NamedTuple):
    """Limits of the integral of each row, and its number of nodes."""

    lower: Array  # (N,)
    upper: Array  # (N,)
    active_until: Array  # (C, N): above it the class does not restrict the nodes
    complete: NDArray[np.bool_]  # (N,) no class has more than 1e-10 of its probability below
    n_nodes: Indices  # (N,), 0 for rows that need panels


def _blocks(mean: Array, scale: Array) -> Iterator[_NodeBlock]:
    """Cut rows (N, C) into cache-sized blocks of rows with equally many nodes."""
    # * **Window.** From the highest lo = mu_t - s_t {-2, 0, ..., 17}, t the class of the largest mu - 8 s, at which
    #   every class's integrand has its peak at least 6.5 widths above, but no lower than max(mu - 20 s). To
    #   max(mu + 7.5 s), or further where a wide class has a lower mean than a narrow one.
    # * **Trapezoid rule.** Its step shrinks with the number m of classes near the top, since the density of
    #   their maximum narrows: s / (0.87 + 0.81 ln m), with s the smallest scale in the window, keeps the error
    #   near 1e-9 (a fixed step of 0.7 s is wrong by 1e-4 for ten equal classes).
    # * **Panels** of 12 Gauss-Legendre points where the trapezoid rule takes more than 160 nodes, as wide as
    #   the smallest scale active at v allows. As lo >= mu_c - 20 s_c for all c, narrow classes are at the left end and
    #   panels only widen: their number grows with the logarithm of the ratio of scales, not with C.
    n_rows, n_classes = mean.shape
    slab = max(8, BLOCK_SIZE // n_classes)  # rows whose windows are computed together
    for start in range(0, n_rows, slab):
        slab_mean = np.ascontiguousarray(mean[start : start + slab].T)  # (C, rows), as everything below
        slab_scale = np.ascontiguousarray(scale[start : start + slab].T)
        # only differences matter: with the left end at 0, rounding of large means cannot make a panel's width 0
        slab_mean = slab_mean - (slab_mean - _LOWER * slab_scale).max(axis=0)
        window = _window(slab_mean, slab_scale)
        kind = 2 * window.n_nodes + window.complete
        for key in np.unique(kind).tolist():
            n_nodes, group = key // 2, np.flatnonzero(kind == key)
            size = int(np.clip(BLOCK_SIZE // (n_classes * (n_nodes or 256)), 8, 512))
            for part in np.split(group, range(size, len(group), size)):
                block_mean, block_scale = slab_mean[:, part], slab_scale[:, part]
                lower, upper = window.lower[part], window.upper[part]
                if n_nodes:
                    nodes, log_weights = _trapezoid(lower, upper, n_nodes)
                else:
                    nodes, log_weights = _panels(lower, upper, window.active_until[:, part], block_scale)
                yield _NodeBlock(part + start, block_mean, block_scale, nodes, log_weights, lower, bool(key % 2))


def _window(mean: Array, scale: Array) -> _Window:
    """Limits of the integral and number of trapezoid nodes, for N rows given as (C, N)."""
    top = (mean - 8.0 * scale).argmax(axis=0)
    at_top = (top, np.arange(len(top)))
    lower, complete = _lower_limit(mean, scale, at_top)
    gap = np.maximum(mean[at_top] - mean, 0.0) / scale
    # an improbable class has its mass above mu_t: in units of s_c, phi falls as far from `gap` on as from 0
    beyond = np.minimum(gap, 20.0) ** 2
    upper = (mean + scale * np.sqrt(beyond + _UPPER**2)).max(axis=0)
    active_until = mean + scale * np.sqrt(beyond + _ACTIVE**2)
    n_rivals = np.exp(gap * gap / -18.0).sum(axis=0)
    density = 0.87 + 0.81 * np.log(np.maximum(n_rivals, 2.0))  # nodes per scale
    smallest = np.where(active_until > lower, scale, np.inf).min(axis=0)
    n_nodes = np.ceil((upper - lower) * density / smallest) + 1.0
    bucket = np.where(n_nodes > _MAX_NODES, 0.0, 4.0 * np.ceil(n_nodes / 4.0))
    return _Window(lower, upper, active_until, complete, bucket.astype(np.intp))


def _lower_limit(mean: Array, scale: Array, at_top: tuple[Indices, Indices]) -> tuple[Array, NDArray[np.bool_]]:
    """Highest candidate (N,) with at most 1e-10 of any class's probability below, and whether there is one."""
    # ln g_c = ln phi(x_c) + sum_{i != c} ln Phi(x_i) is concave with curvature of at most k; where its slope is
    # 6.5 sqrt(k) or more, the peak lies at least 6.5 widths above.
    top_mean, top_scale = mean[at_top], scale[at_top]
    lower = (mean - _LOWER * scale).max(axis=0)
    inverse = 1.0 / scale
    complete = np.zeros(len(lower), dtype=np.bool_)
    left = np.arange(len(lower))  # rows without a limit so far
    for depth in _LOWER_CANDIDATES:
        candidate = top_mean - depth * top_scale
        x = (candidate - mean) * inverse
        hazard = _rough_hazard(x)
        x += hazard
        x *= inverse
        hazard *= inverse
        slope = hazard.sum(axis=0) - x.max(axis=0)
        hazard *= x
        curvature = hazard.sum(axis=0) + inverse.max(axis=0) ** 2
        steep = (slope > 0.0) & (slope * slope > 42.0 * curvature) & (candidate > lower[left])
        lower[left[steep]], complete[left[steep]] = candidate[steep], True
        if steep.any():
            keep = ~steep
            left, top_mean, top_scale = left[keep], top_mean[keep], top_scale[keep]
            mean, inverse = mean[:, keep], inverse[:, keep]
        if not left.size:
            break
    return lower, complete


def _trapezoid(lower: Array, upper: Array, n_nodes: int) -> tuple[Array, Array]:
    step = (upper - lower) / (n_nodes - 1)
    nodes = lower + step * np.arange(n_nodes)[:, None]
    log_weights = np.repeat(np.log(step)[None], n_nodes, axis=0)
    log_weights[[0, -1]] -= np.log(2.0)
    return nodes, log_weights


def _panels(lower: Array, upper: Array, active_until: Array, scale: Array) -> tuple[Array, Array]:
    """Composite Gauss-Legendre; a panel spans 1.5 of the smallest scale still active at its left end."""
    edges = [lower]
    while (edges[-1] < upper).any():
        smallest = np.where(active_until > edges[-1], scale, np.inf).min(axis=0)
        edges.append(np.minimum(edges[-1] + _PANEL * smallest, upper))
    edge = np.stack(edges)  # (panels + 1, R); rows that end early have panels of width 0
    centre, half = 0.5 * (edge[1:] + edge[:-1]), 0.5 * np.diff(edge, axis=0)
    nodes = centre[:, None] + half[:, None] * _PANEL_NODES[:, None]
    with np.errstate(divide="ignore"):
        log_weights = np.log(half)[:, None] + np.log(_PANEL_WEIGHTS)[:, None]
    return nodes.reshape(-1, len(lower)), log_weights.reshape(-1, len(lower))


_ROUGH_X = np.arange(-20.0, 9.0, 1 / 32)
_ROUGH_HAZARD = np.exp(-0.5 * _ROUGH_X**2 - _LOG_SQRT_2PI - log_ndtr(_ROUGH_X))


def _rough_hazard(x: Array) -> Array:
    """phi(x) / Phi(x) to about 0.02: enough to choose a window."""
    position = x * 32.0
    position += 0.5 - 32.0 * _ROUGH_X[0]
    np.clip(position, 0.0, float(len(_ROUGH_HAZARD) - 1), out=position)
    hazard: Array = np.take(_ROUGH_HAZARD, position.astype(np.intp), mode="clip")
    return np.maximum(hazard, -x, out=hazard)


class _Tail(NamedTuple):
    """The integral below the lowest node lo, each (C, R).

    There ln g_c, g_c the integrand, is continued as a parabola with its slope b_c and curvature k_c at lo:
    g_c(lo) sqrt(2 pi / k_c) exp(z^2 / 2) Phi(z) with z = -b_c / sqrt(k_c).
    """

    x: Array
    hazard: Array  # h = phi / Phi
    excess: Array  # x + h
    bend: Array  # h (x + h), minus the second derivative of ln Phi
    curvature: Array  # k_c
    z: Array
    log_value: Array


class _Terms(NamedTuple):
    """One chunk of nodes, each (q, C, R)."""

    x: Array
    log_hazard: Array
    log_share: Array  # ln of weight * F * h_c / s_c


class _Sweep:
    """The terms of all nodes, chunk by chunk; kept between passes where one chunk is enough."""

    def __init__(self, block: _NodeBlock) -> None:
        n_classes, n_rows = block.mean.shape
        chunk = max(1, BLOCK_SIZE // (n_classes * n_rows))
        if block.nodes.size * n_classes <= 2 * BLOCK_SIZE:
            chunk = len(block.nodes)
        self.block, self.starts = block, range(0, len(block.nodes), chunk)
        self.inverse, self.log_scale = 1.0 / block.scale, np.log(block.scale)
        self.kept = [self._chunk(0)] if len(self.starts) == 1 else None

    def __iter__(self) -> Iterator[_Terms]:
        return iter(self.kept) if self.kept else (self._chunk(start) for start in self.starts)

    def _chunk(self, start: int) -> _Terms:
        part = slice(start, start + self.starts.step)
        nodes = self.block.nodes[part, None]
        shape = (len(nodes), *self.block.mean.shape)
        x = np.subtract(nodes, self.block.mean, out=buffer("x", shape))
        x *= self.inverse
        log_cdf = fast_log_ndtr(x)
        base = log_cdf.sum(axis=1)  # (q, R), log F
        base += self.block.log_weights[part]
        log_hazard = np.multiply(x, x, out=buffer("hazard", shape))
        log_hazard *= -0.5
        log_hazard -= _LOG_SQRT_2PI
        log_hazard -= log_cdf
        log_share = np.add(log_hazard, base[:, None], out=log_cdf)
        log_share -= self.log_scale
        return _Terms(x, log_hazard, log_share)


def _integrate(sweep: _Sweep) -> tuple[Array, _Tail | None]:
    """Log-probabilities (C, R), not yet capped at 0, and the part below the window unless it is negligible."""
    tail = None if sweep.block.complete else _tail(sweep.block)
    highest = np.full_like(sweep.block.mean, -np.inf) if tail is None else tail.log_value
    total = (highest > -np.inf).astype(np.float64)
    for terms in sweep:
        higher = np.maximum(highest, terms.log_share.max(axis=0))
        share = np.subtract(terms.log_share, higher, out=buffer("share", terms.x.shape))
        np.exp(share, out=share)
        total *= np.exp(highest - higher)
        total += share.sum(axis=0)
        highest = higher
    return highest + np.log(total), tail


def _pull_back(sweep: _Sweep, log_proba: Array, tail: _Tail | None, weight: Array) -> list[Array]:
    """Gradients (C, R) of sum_c weight_c ln P_c with respect to mean and scale."""
    block = sweep.block
    grad_mean, grad_scale = np.zeros_like(block.mean), np.zeros_like(block.mean)
    for terms in sweep:
        share = np.exp(np.subtract(terms.log_share, log_proba, out=terms.log_share), out=terms.log_share)
        share *= weight
        hazard = np.exp(terms.log_hazard, out=terms.log_hazard)
        slope = np.add(terms.x, hazard, out=buffer("share", terms.x.shape))
        slope *= share
        hazard *= share.sum(axis=1)[:, None]
        slope -= hazard
        grad_mean += slope.sum(axis=0)
        slope *= terms.x
        slope -= share
        grad_scale += slope.sum(axis=0)
    grad_mean /= block.scale
    grad_scale /= block.scale
    if tail is not None:
        below = _pull_back_tail(block.scale, tail, weight * np.exp(tail.log_value - log_proba))
        grad_mean += below[0]
        grad_scale += below[1]
    return [grad_mean, grad_scale]


def _tail(block: _NodeBlock) -> _Tail:
    scale = block.scale
    x = (block.lower - block.mean) / scale
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
    """Gradients (C, R) of the part below lo, share (C, R) being its weight in the objective."""
    # lo moves with the class that sets it and the bends there change little: bends and nodes are held fixed.
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
