"""Figure 3: where mixup and cutmix send fixed inputs, Gaussian training inputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vbtta.experiments.clouds import (
    CloudConfig,
    CloudTrial,
    claims,
    cloud_trials,
    draw_clouds,
    no_cells,
    run_cloud,
    table,
)
from vbtta.experiments.item import Places, Row, run_all

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

TITLE = "Points made by mixup and cutmix around fixed inputs, Gaussian data"
VERSION = 1
Config, Trial = CloudConfig, CloudTrial
PROFILES = {
    "smoke": CloudConfig("gaussian", pool=500, distances=(0.0, 2.0), alphas=(0.5,), draws=100, repeats=20, shown=100),
    "cpu": CloudConfig("gaussian"),
    "paper": CloudConfig("gaussian"),
}
trials, run_trial, cells = cloud_trials, run_cloud, no_cells


def run(config: CloudConfig, places: Places) -> list[Row]:
    """All trials in this process."""
    return run_all(sys.modules[__name__], config, places)


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The clouds."""
    return {"figure3": draw_clouds(rows)}
