"""Figure 4: where mixup and cutmix send fixed inputs, Gamma(2, 2) training inputs."""

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

TITLE = "Points made by mixup and cutmix around fixed inputs, Gamma(2, 2) data"
VERSION = 1
Config, Trial = CloudConfig, CloudTrial
PROFILES = {
    "smoke": CloudConfig("gamma", pool=500, distances=(0.0, 2.0), alphas=(0.5,), draws=100, repeats=20, shown=100),
    "cpu": CloudConfig("gamma"),
    "paper": CloudConfig("gamma"),
}
trials, run_trial, cells = cloud_trials, run_cloud, no_cells


def run(config: CloudConfig, places: Places) -> list[Row]:
    """All trials in this process."""
    return run_all(sys.modules[__name__], config, places)


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The clouds."""
    return {"figure4": draw_clouds(rows)}
