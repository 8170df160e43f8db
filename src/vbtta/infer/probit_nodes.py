"""Where to place the quadrature nodes of the probit integral."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

__all__ = ["BLOCK_SIZE", "Block", "blocks"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

BLOCK_SIZE = 1 << 16  # elements of one work array: 512 kB, about six of them are alive at a time
_LOWER, _UPPER = 20.0, 7.5  # reach of the window, in scales
_LOWER_CANDIDATES = (-2.0, 0.0, 2.0, 4.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0)  # tried in turn
_ACTIVE = 9.0  # beyond mu + 9 s a factor Phi is 1 to double precision
_MOST_NODES = 160  # trapezoid nodes; rows that need more get panels
_PANEL = 1.5  # width of a panel, in scales
_PANEL_NODES, _PANEL_WEIGHTS = np.polynomial.legendre.leggauss(12)


class Block(NamedTuple):
    """Some rows with their nodes; rows come last so that every reduction runs over a leading axis."""

    rows: Indices  # (R,) which rows
    mean: Array  # (C, R), up to a constant per row
    scale: Array  # (C, R)
    nodes: Array  # (Q, R)
    log_weights: Array  # (Q, R), -inf for padding
    lower: Array  # (R,) where the nodes begin
    complete: bool  # nothing of note lies below


class _Window(NamedTuple):
    """How far the integral of each row runs, and with how many nodes."""

    lower: Array  # (N,)
    upper: Array  # (N,)
    active_until: Array  # (C, N) where the class stops to matter for the choice of nodes
    complete: NDArray[np.bool_]  # (N,) no class has more than 1e-10 of its probability below
    n_nodes: Indices  # (N,), 0 for rows that need panels


def blocks(mean: Array, scale: Array) -> Iterator[Block]:
    """Cut rows (N, C) into cache-sized blocks of rows with equally many nodes.

    * **Window.** From the highest lo = mu_t - s_t {-2, 0, ..., 17}, t the class of the largest mu - 8 s, at which
      every class's integrand still has 6.5 widths to climb to its peak, but no lower than max(mu - 20 s). To
      max(mu + 7.5 s), or further where a wide class is overshadowed by a narrow one.
    * **Trapezoid rule.** Its step shrinks with the number m of classes near the top, since the density of
      their maximum narrows: s / (0.87 + 0.81 ln m), with s the smallest scale in the window, keeps the error
      near 1e-9 (a fixed step of 0.7 s is wrong by 1e-4 for ten equal classes).
    * **Panels** of 12 Gauss-Legendre points where the trapezoid rule takes more than 160 nodes, as wide as
      the smallest scale still active at v allows. As lo >= mu_c - 20 s_c for all c, narrow classes sit
      at the left end and panels only widen: their number grows with the logarithm of the ratio of
      scales, not with C.
    """
    n_rows, n_classes = mean.shape
    slab = max(8, BLOCK_SIZE // n_classes)  # rows whose windows are worked out together
    for start in range(0, n_rows, slab):
        slab_mean = np.ascontiguousarray(mean[start : start + slab].T)  # (C, rows), as everything below
        slab_scale = np.ascontiguousarray(scale[start : start + slab].T)
        # only differences count: with the left end at 0 no rounding of large means keeps a panel from ending
        slab_mean = slab_mean - (slab_mean - _LOWER * slab_scale).max(axis=0)
        window = _window(slab_mean, slab_scale)
        kind = 2 * window.n_nodes + window.complete
        for key in np.unique(kind):
            n_nodes, group = int(key) // 2, np.flatnonzero(kind == key)
            size = int(np.clip(BLOCK_SIZE // (n_classes * (n_nodes or 256)), 8, 512))
            for part in np.split(group, range(size, len(group), size)):
                block_mean, block_scale = slab_mean[:, part], slab_scale[:, part]
                lower, upper = window.lower[part], window.upper[part]
                if n_nodes:
                    nodes, log_weights = _trapezoid(lower, upper, n_nodes)
                else:
                    nodes, log_weights = _panels(lower, upper, window.active_until[:, part], block_scale)
                complete = bool(key % 2)
                yield Block(part + start, block_mean, block_scale, nodes, log_weights, lower, complete)


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

    def count(lower: Array) -> Array:
        smallest = np.where(active_until > lower, scale, np.inf).min(axis=0)
        return np.asarray(np.ceil((upper - lower) * density / smallest) + 1.0)

    n_nodes = count(lower)
    bucket = np.where(n_nodes > _MOST_NODES, 0.0, 4.0 * np.ceil(n_nodes / 4.0))
    return _Window(lower, upper, active_until, complete, bucket.astype(np.intp))


def _lower_limit(mean: Array, scale: Array, at_top: tuple[Indices, Indices]) -> tuple[Array, NDArray[np.bool_]]:
    """Highest candidate (N,) with at most 1e-10 of any class's probability below, and whether there is one.

    ln g_c = ln phi(x_c) + sum_{i != c} ln Phi(x_i) is concave with curvature of at most k; where its slope is
    6.5 sqrt(k) or more, the peak lies at least 6.5 widths above.
    """
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
_ROUGH_HAZARD = np.exp(-0.5 * _ROUGH_X**2 - 0.5 * np.log(2.0 * np.pi) - log_ndtr(_ROUGH_X))


def _rough_hazard(x: Array) -> Array:
    """phi(x) / Phi(x) to about 0.02: enough to choose a window."""
    position = x * 32.0
    position += 0.5 - 32.0 * _ROUGH_X[0]
    np.clip(position, 0.0, float(len(_ROUGH_HAZARD) - 1), out=position)
    hazard: Array = np.take(_ROUGH_HAZARD, position.astype(np.intp), mode="clip")
    return np.maximum(hazard, -x, out=hazard)
