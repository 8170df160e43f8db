"""Figure 1: test-time augmentation as a mixture, a drawn schematic for the documentation; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reproduction.records import PROFILES, Item
from vbtta.plotting import COLOURS, styled

_INK = "#010101"
# Names, places of the clouds, locations and scales of the model's predictions, weights.
_VIEWS = (("crop", 2.4, -0.3, 0.35, 0.6), ("mixup", 1.2, 0.5, 0.6, 0.3), ("noise", 0.0, 1.6, 0.9, 0.1))


@dataclass(frozen=True)
class _Nothing:
    """There is nothing to choose and nothing to measure."""


@styled()
def _draw() -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Ellipse

    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    left.set(xlim=(-0.6, 7.6), ylim=(-0.8, 3.3))
    left.axis("off")
    left.plot(0, 1.2, "o", color=_INK, markersize=8)
    left.text(0, 0.85, "input x", ha="center", va="top")
    rng = np.random.default_rng(3)
    for (name, height, _, _, weight), colour in zip(_VIEWS, COLOURS, strict=False):
        _arrow(left, (0.2, 1.2), (1.75, height))
        left.add_patch(Ellipse((2.5, height), 1.3, 0.75, facecolor=colour, alpha=0.2, edgecolor=colour))
        left.plot(
            2.5 + 0.22 * rng.normal(size=24), height + 0.12 * rng.normal(size=24), ".", color=colour, markersize=4
        )
        left.text(2.5, height + 0.42, name, ha="center", va="bottom", color=colour)
        _arrow(left, (3.2, height), (4.05, height))
        left.text(5.05, height, f"model\nweight {weight:g}", ha="center", va="center", fontsize=8)
        _arrow(left, (6.0, height), (7.4, 1.2 + 0.25 * (height - 1.2)))
    grid = np.linspace(-2, 4.5, 300)
    total = np.zeros_like(grid)
    for (_, _, location, scale, weight), colour in zip(_VIEWS, COLOURS, strict=False):
        part = weight * np.exp(-0.5 * ((grid - location) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
        right.fill_between(grid, part, color=colour, alpha=0.25, linewidth=0)
        right.plot(grid, part, color=colour)
        total += part
    right.plot(grid, total, color=_INK, linewidth=1.8)
    right.set(xlabel="label y", yticks=[], xticks=[], title="mixture of the weighted views")
    right.title.set_fontsize(9)
    right.spines["left"].set_visible(False)
    return figure


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _INK, "linewidth": 0.9})


ITEM: Item[_Nothing, _Nothing] = Item(
    "Test-time augmentation as a mixture of views (schematic)",
    1,
    dict.fromkeys(PROFILES, _Nothing()),
    trials=lambda config: [],
    run_trial=lambda trial, places: [],
    table=lambda rows, config: (
        "An input, where its views send it, what the model says of each, and the weighted mixture of these. Drawn by "
        "hand, nothing is measured."
    ),
    figures=lambda rows: {"figure1": _draw()},
)
