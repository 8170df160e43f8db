"""Table 2: VB-TTA on the artificial regression, Gaussian inputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vbtta.experiments import regression_words
from vbtta.experiments.artificial import Setting
from vbtta.experiments.item import Cell, Places, Row, run_all
from vbtta.experiments.regression import Config, Trial, run_trial, trials
from vbtta.experiments.regression_words import claims, table

__all__ = [
    "PROFILES",
    "TITLE",
    "VERSION",
    "Config",
    "Trial",
    "cells",
    "claims",
    "figures",
    "run",
    "run_trial",
    "table",
    "trials",
]

TITLE = "Artificial regression, Gaussian inputs"
VERSION = 3
PROFILES = {
    "smoke": Config(
        Setting("gaussian", instances=120, test_instances=100, epochs=5, width=16, folds=2),
        seeds=1,
        draws=4,
        steps=(1, 10, 20),
    ),
    "cpu": Config(Setting("gaussian")),
    "paper": Config(Setting("gaussian", test_instances=10_000), seeds=10, draws=256),
}


def run(config: Config, places: Places) -> list[Row]:
    """All trials in this process."""
    return run_all(sys.modules[__name__], config, places)


def cells(rows: Sequence[Row]) -> list[Cell]:
    """The paper's cells beside ours."""
    return regression_words.cells(rows, "gaussian")


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """None: figure 5 shows the histories."""
    return {}
