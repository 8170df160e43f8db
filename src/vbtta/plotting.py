"""Figures in one style: every figure is a function of arrays and returns a matplotlib Figure.

Text and axes have a placeholder colour, which :func:`to_svg` replaces by the page's, so that pages may be dark.
"""

__all__ = [
    "COLOURS", "MAX_BARS", "cost_curve", "coverage", "differences", "gate", "reliability", "save_svg", "set_sizes",
    "styled", "to_svg", "weights",
]  # fmt: skip

import os
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from io import StringIO
from typing import Any

import numpy as np

from vbtta._support.checks import printable, require
from vbtta._support.files import atomic_path
from vbtta.data.labels import Array

COLOURS = ("#2a86c8", "#d55e00", "#009e73", "#b86bb0", "#c98f00", "#56b4e9")
_INK, _FAINT, _GREY = "#010101", "#020202", "#8a8f98"
_WIDTH = 4.8  # inches: readable on a phone
MAX_BARS = 40  # views, methods or annotators of one figure
_POINTS: dict[str, Any] = {"color": COLOURS[0], "markersize": 4, "capsize": 2, "linewidth": 1.2}
_NO_METADATA = dict.fromkeys(["Date", "Creator", "Format", "Type"])


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's defaults with this style, as a context or a decorator; the user's own settings are ignored."""
    matplotlib = require("matplotlib", "cli")
    off = ("axes.spines.right", "axes.spines.top", "legend.frameon", "text.parse_math", "text.usetex")
    sizes = {"font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8}
    lines = {"axes.linewidth": 0.8, "grid.linewidth": 0.8, "lines.linewidth": 1.4, "axes.axisbelow": True}
    other = {"grid.color": _FAINT, "svg.fonttype": "none", "svg.hashsalt": "vbtta"}
    ink = {f"{part}color": _INK for part in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")}
    style = {**ink, **dict.fromkeys(off, False), **sizes, **lines, **other}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
        yield


@styled()
def weights(names: Sequence[str], values: Array, interval: Array) -> Any:
    """Weights of the views (K,), the largest on top, with their intervals (K, 2); marks carry the ids view-k."""
    order = np.argsort(-values, kind="stable")[:MAX_BARS]
    figure, axes = _axes(0.9 + 0.22 * len(order))
    place = np.arange(len(order))[::-1]
    right = max(0.05, 1.04 * float(max(values.max(), interval.max())))
    for spot, k in zip(place, order, strict=True):
        low, high = interval[k]
        axes.barh(spot, values[k], height=0.62, color=COLOURS[0] if values[k] >= 0.01 else _GREY)
        axes.plot([low, high], [spot, spot], color=_INK, linewidth=1.1, solid_capstyle="butt")
        axes.barh(spot, right, height=1, alpha=0, zorder=5, gid=f"view-{k}")  # invisible, for the tooltip
    axes.set_yticks(place, [_clean(names[k]) for k in order])
    axes.set_xlim(0, right)
    return _finish(figure, "weight, with 90 % interval", grid="x")


@styled()
def cost_curve(cost: Array, score: Array, error: Array, chosen: int) -> Any:
    """Log score of sets of views against what they cost, with standard errors: (P,) each."""
    figure, axes = _axes(2.8)
    axes.errorbar(cost, score, yerr=error, fmt="o-", **_POINTS)
    axes.plot(cost[chosen], score[chosen], "o", color=COLOURS[1], markersize=8, zorder=5, label="chosen")
    axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finish(figure, "cost of the views (1 each, unless given)", "log score", grid="y")


@styled()
def gate(features: Sequence[str], values: Array, views: Sequence[str], shares: Array, bins: int = 12) -> Any:
    """Mean weight (N, K) of every view against each of its features (N, K, F), in bins of as many inputs."""
    n_rows = -(-len(features) // 2)
    figure = require("matplotlib.figure", "cli").Figure(figsize=(_WIDTH, 0.6 + 1.7 * n_rows), layout="constrained")
    heaviest = np.argsort(-shares.mean(axis=0), kind="stable")[: len(COLOURS)]
    for f, name in enumerate(features):
        axes = figure.add_subplot(n_rows, min(2, len(features)), f + 1)
        for colour, k in zip(COLOURS, heaviest, strict=False):
            parts = np.array_split(np.argsort(values[:, k, f], kind="stable"), min(bins, len(values)))
            middle, mean = ([column[part, k].mean() for part in parts] for column in (values[:, :, f], shares))
            axes.plot(middle, mean, ".-", color=colour, linewidth=1.2, label=_clean(views[k]) if f == 0 else None)
        axes.set_ylim(0, 1)
        axes.set_xlabel(_clean(name))
    figure.legend(loc="outside lower center", ncols=3, handlelength=1.2, columnspacing=1.0)
    figure.supylabel("weight", fontsize=9)
    return figure


@styled()
def set_sizes(share: Array) -> Any:
    """Shares of the inputs whose set has 0, 1, 2, ... classes."""
    figure, axes = _axes(2.4)
    axes.bar(np.arange(len(share)), share, width=max(0.8, len(share) / 60), color=COLOURS[0])
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finish(figure, "classes in the set", "share of inputs", grid="y")


@styled()
def differences(
    names: Sequence[str], value: Array, low: Array, high: Array, label: str, reference: float | None = 0.0
) -> Any:
    """Estimates with intervals in the order given from the top, and a vertical line at the reference: (M,) each."""
    names, value, low, high = names[:MAX_BARS], value[:MAX_BARS], low[:MAX_BARS], high[:MAX_BARS]
    figure, axes = _axes(0.9 + 0.22 * len(names))
    place = np.arange(len(names))[::-1]
    if reference is not None:
        axes.axvline(reference, color=_INK, linewidth=0.8)
    # A percentile interval need not hold the estimate (the calibration error's is biased upwards).
    axes.errorbar(value, place, xerr=np.maximum([value - low, high - value], 0), fmt="o", label="estimate", **_POINTS)
    axes.set_yticks(place, [_clean(name) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    return _finish(figure, label, grid="x")


@styled()
def reliability(confidence: Array, hit: Array, times: Array, bins: int = 10) -> Any:
    """How often predictions of a confidence are right: (J,) confidences, 0 or 1, and how often each counts."""
    figure, axes = _axes(3.2)
    bin_index = np.minimum((confidence * bins).astype(np.intp), bins - 1)
    total = np.bincount(bin_index, weights=times, minlength=bins)
    used = np.flatnonzero(total)
    mean = np.bincount(bin_index, weights=times * confidence, minlength=bins)[used] / total[used]
    right = np.bincount(bin_index, weights=times * hit, minlength=bins)[used] / total[used]
    smooth = (right * total[used] + 1) / (total[used] + 2)  # rule of succession: not 0 or 1 after one label
    error = np.sqrt(smooth * (1 - smooth) / total[used])
    axes.bar((used + 0.5) / bins, total[used] / total.sum(), width=0.9 / bins, color=_GREY, alpha=0.4)
    _unit_square(axes)
    axes.errorbar(mean, right, yerr=error, fmt="o-", **_POINTS)
    return _finish(figure, "confidence (bars: share of labels)", "share that is right")


@styled()
def coverage(levels: Array, covered: Array) -> Any:
    """Share of labels inside their intervals against the level of the intervals: (L,) each."""
    figure, axes = _axes(2.8)
    _unit_square(axes)
    axes.plot(levels, covered, "o-", color=COLOURS[0], markersize=4, linewidth=1.2)
    return _finish(figure, "level of the interval", "share of labels inside")


def to_svg(figure: Any, alt: str, prefix: str, titles: Mapping[str, str] | None = None) -> str:
    """A matplotlib Figure as an inline `<svg>` element in the page's text colour, with a text alternative.

    The prefix is put before all ids, which must differ within a page; `titles` are tooltips by the id (gid) of a mark.
    """
    buffer = StringIO()
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # missing glyphs
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    head, _, body = buffer.getvalue().partition("<svg ")[2].partition(">")
    head = re.sub('(width|height)="[^"]*" ', "", head)
    body = re.sub("<[^>]*>", partial(_recoloured, prefix), body.rstrip())  # tags, not the names between them
    text = f'<svg role="img" aria-label="{escape(_clean(alt, 1000))}" {head}>{body}'
    for name, title in (titles or {}).items():
        mark = f'<g id="{prefix}-{name}">'
        text = text.replace(mark, f"{mark}<title>{escape(_clean(title, 400))}</title>")
    return text


def _recoloured(prefix: str, tag: re.Match[str]) -> str:
    """A tag in the page's text colour, with the prefix before its ids."""
    text = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=href="#)', f"{prefix}-", tag[0]).replace(_INK, "currentColor")
    return text.replace(f"stroke: {_FAINT}", "stroke: currentColor; stroke-opacity: 0.15")


def save_svg(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, on white, atomically; the same figure gives the same bytes."""
    with styled(), atomic_path(path) as temporary:
        figure.savefig(temporary, format="svg", facecolor="white", metadata=_NO_METADATA)


def _axes(height: float) -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "cli").Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Any, xlabel: str, ylabel: str = "", *, grid: str = "") -> Any:
    """Labels, and grid lines across an axis."""
    axes = figure.axes[0]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if grid:
        axes.grid(axis=grid)
    return figure


def _unit_square(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)


def _clean(text: str, longest: int = 28) -> str:
    """A name without characters that XML or matplotlib cannot represent, shortened; wide letters count more."""
    letters = [letter for letter in printable(text) if not unicodedata.combining(letter)]
    width = np.cumsum([1 + (unicodedata.east_asian_width(c) in "WF") + 0.6 * c.isupper() for c in letters] or [0])
    return "".join(letters) if width[-1] <= longest else "".join(letters[: (width < longest).sum()]) + "…"
