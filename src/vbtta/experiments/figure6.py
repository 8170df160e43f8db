"""Figure 6: mean absolute error and its standard deviation over the optimisation on UTKFace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vbtta.experiments import age_paths
from vbtta.experiments.age_paths import PROFILES, Config, Trial, run_trial, trials
from vbtta.experiments.image_setups import STRATEGIES
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.report import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "TITLE", "VERSION", "Config", "Trial", "cells", "claims", "figures", "run", "run_trial"]
__all__ += ["table", "trials"]

TITLE = "Mean absolute error and its standard deviation over the optimisation on UTKFace"
VERSION = 1
_VISIBLE = 5e-4  # in the third decimal, which the table shows


def run(config: Config, places: Places) -> list[Row]:
    """All trials, one after the other."""
    return [row for trial in trials(config) for row in run_trial(trial, places)]


def table(rows: Sequence[Row], config: Config) -> str:
    """Error and spread at a few steps."""
    shown = [step for step in (1, 2, 5, 10, 20, 50, 100, 200, 300) if step <= config.steps]
    body = []
    for strategy, names in STRATEGIES.items():
        for key, label in (("mae", "MAE"), ("error_sd", "standard deviation of the error")):
            mean = age_paths.along(rows, strategy, key).mean(axis=0)
            body.append([f"{len(names)}-VB-TTA ({strategy}), {label}", *(f"{mean[step - 1]:.3f}" for step in shown)])
    text = markdown_table(["", *(f"step {step}" for step in shown)], body)
    return (
        f"{text}\n\n{age_paths.caption(rows, config)} The standard deviation is that of the absolute error over test "
        "faces; the paper does not say which it draws."
    )


def cells(rows: Sequence[Row]) -> list[Cell]:
    """None: the paper's figure has no numbers."""
    return []


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Whether error and spread fall, and how soon."""
    found = []
    words = {
        "mae": "The mean absolute error falls over the optimisation",
        "error_sd": "The standard deviation of the error falls over the optimisation",
    }
    for key, sentence in words.items():
        curves = {strategy: age_paths.along(rows, strategy, key) for strategy in STRATEGIES}
        falls = [float((curve[:, 0] - curve[:, -1]).mean()) for curve in curves.values()]
        count = sum(fall > 0 for fall in falls)
        verdict = "holds" if count == len(falls) else "does not hold"
        if 0 < count < len(falls):
            lower = " and ".join(name for name, fall in zip(curves, falls, strict=True) if fall > 0)
            verdict = f"holds if the views are {lower}"
        early = _minima(curves)
        if count and early:
            verdict += "; " if count < len(falls) else " if only the ends are compared; "
            verdict += "the least is earlier for " + ", ".join(f"{name} (step {at})" for name, at in early.items())
        marks = sorted({1, min(50, curves["Mixup"].shape[1]), curves["Mixup"].shape[1]})
        numbers = "; ".join(
            f"{strategy}: "
            + ", ".join(f"{curve[:, step - 1].mean():.3f} at step {step}" for step in marks)
            + (f", least {curve.mean(axis=0).min():.3f} at step {early[strategy]}" if strategy in early else "")
            for strategy, curve in curves.items()
        )
        found.append(Claim(sentence, verdict, numbers))
    return found


def _minima(curves: Mapping[str, NDArray[np.float64]]) -> dict[str, int]:
    """Steps of the least values, of the strategies that end visibly above theirs."""
    means = {strategy: curve.mean(axis=0) for strategy, curve in curves.items()}
    return {name: int(mean.argmin()) + 1 for name, mean in means.items() if mean[-1] - mean.min() > _VISIBLE}


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Two panels: the error, and its standard deviation."""
    panels = [("mae", "mean absolute error (years)"), ("error_sd", "standard deviation of the error")]
    return {"figure6": age_paths.bands(rows, panels)}
