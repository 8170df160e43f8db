"""Figure 7: the negative bound over the optimisation on UTKFace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vbtta.experiments import age_paths
from vbtta.experiments.age_paths import PROFILES, Config, Trial, run_trial, trials
from vbtta.experiments.image_setups import STRATEGIES
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.report import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "TITLE", "VERSION", "Config", "Trial", "cells", "claims", "figures", "run", "run_trial"]
__all__ += ["table", "trials"]

TITLE = "The negative bound over the optimisation on UTKFace"
VERSION = 1
_CONVERGED = 1e-3  # nats a label, over the last third of the updates
_ROUNDING = 1e-6  # nats


def run(config: Config, places: Places) -> list[Row]:
    """All trials, one after the other."""
    return [row for trial in trials(config) for row in run_trial(trial, places)]


def table(rows: Sequence[Row], config: Config) -> str:
    """Nats a label at a few steps."""
    shown = [step for step in (1, 2, 5, 10, 20, 50, 100, 200, 300) if step <= config.steps]
    body = []
    for strategy, names in STRATEGIES.items():
        mean = (-age_paths.along(rows, strategy, "bound") / _labels(rows)[:, None]).mean(axis=0)
        body.append([f"{len(names)}-VB-TTA ({strategy})", *(f"{mean[step - 1]:.4f}" for step in shown)])
    text = markdown_table(["negative bound, nats a label", *(f"step {step}" for step in shown)], body)
    return f"{text}\n\n{age_paths.caption(rows, config)}"


def cells(rows: Sequence[Row]) -> list[Cell]:
    """None: the paper's figure has no numbers."""
    return []


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Whether the bound rises all the way, and settles."""
    bounds = {strategy: age_paths.along(rows, strategy, "bound") for strategy in STRATEGIES}
    least = min(float(np.diff(bound, axis=1).min()) for bound in bounds.values())
    late = {
        strategy: float(((bound[:, -1] - bound[:, 2 * bound.shape[1] // 3]) / _labels(rows)).max())
        for strategy, bound in bounds.items()
    }
    settled = max(late.values()) < _CONVERGED
    return [
        Claim(
            "The bound converges",
            "holds" if settled else "holds if more updates follow",
            "largest gain over the last third of the updates, nats a label: "
            + "; ".join(f"{strategy} {gain:.1e}" for strategy, gain in late.items()),
        ),
        Claim(
            "Not in the paper: the bound never falls (with the corrected updates)",
            "holds" if least > -_ROUNDING else "does not hold",
            f"smallest change between two updates {least:+.1e} nats",
        ),
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """One panel."""
    return {"figure7": age_paths.bands(rows, [("bound", "negative bound (nats a label)")], per_label=True)}


def _labels(rows: Sequence[Row]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Labels of each seed, in the order of the rows of one strategy."""
    first = next(iter(STRATEGIES))
    return np.array([row["n_labels"] for row in rows if row["strategy"] == first], dtype=np.float64)
