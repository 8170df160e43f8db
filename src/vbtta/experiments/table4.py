"""Table 4: CIFAR-10N, Food-101 and UTKFace with a ResNet-18, views by mixup and cutmix, uniform and weighted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vbtta.experiments import table4_words as words
from vbtta.experiments.image_setups import SETUPS, STRATEGIES, ImageSetup, paper_views
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.scoring import fit_steps, round_list, scores, uniform
from vbtta.specs import CategoricalLatent, CategoricalMixture, GaussianLatent, GaussianMixture, ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "TITLE", "VERSION", "Config", "Trial", "cells", "claims", "figures", "run", "run_trial"]
__all__ += ["table", "trials"]

TITLE = "CIFAR-10N, Food-101 and UTKFace with a ResNet-18"
VERSION = 2

# What VB-TTA assumes: the default mixture first, then the paper's likelihood where it differs, and the other pool.
MODELS: dict[str, dict[str, ModelSpec]] = {
    "classification": {
        "mixture": CategoricalMixture(),
        "mixture, no label noise": CategoricalMixture(noise="none"),
        "latent pool": CategoricalLatent(),
    },
    "regression": {
        "mixture": GaussianMixture(),
        "mixture, shift only": GaussianMixture(link="shift"),
        "latent pool": GaussianLatent(),
    },
}


@dataclass(frozen=True)
class Trial:
    """One data set and seed."""

    setup: ImageSetup
    steps: int = 300


@dataclass(frozen=True)
class Config:
    """Seeds, data sets and the number of EM updates."""

    seeds: tuple[int, ...]
    setups: tuple[ImageSetup, ...]
    steps: int = 300


PROFILES = {
    "smoke": Config((0,), tuple(SETUPS["smoke"].values()), steps=10),
    "cpu": Config((0, 1), tuple(SETUPS["cpu"].values())),
    "paper": Config((0, 1, 2, 3, 4), tuple(SETUPS["paper"].values())),
}


def trials(config: Config) -> list[Trial]:
    """One trial a seed and data set."""
    return [Trial(setup.at(seed), config.steps) for seed in config.seeds for setup in config.setups]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """Uniform and optimised weights for every strategy, with and without the identity among the views."""
    config = trial.setup.sample
    found = paper_views(trial.setup, places)
    task, truth = found.sample.task, found.sample.truth
    labels = found.sample.labels
    base: Row = {"data_set": config.data_set, "seed": config.seed, "synthetic": config.synthetic}
    base |= {"width": trial.setup.network.width, "epochs": trial.setup.network.epochs}
    calibration, test = found.chosen(["identity"])
    alone = scores(uniform(calibration, labels, test, task), truth)
    rows: list[Row] = [{**base, "strategy": "none", "identity": True, "method": "identity", **alone}]
    for strategy, names in STRATEGIES.items():
        for with_identity in (False, True):
            calibration, test = found.chosen(["identity", *names] if with_identity else names)
            here: Row = {**base, "strategy": strategy, "identity": with_identity}
            rows.append({**here, "method": "uniform", **scores(uniform(calibration, labels, test, task), truth)})
            for name, model in MODELS[task].items():
                policy = fit_steps(calibration, labels, task, model, trial.steps)
                rise = float(np.diff(policy.history.elbo).min())
                for last, step in ((False, 1), (True, policy.n_steps)):
                    state = policy.at_step(step)
                    row: Row = {**here, "method": name, "step": step, "last": last}
                    row |= {"bound": state.elbo, "least_rise": rise}
                    rows.append({**row, "weights": round_list(state.weights), **scores(state.predict(test), truth)})
    return rows


def run(config: Config, places: Places) -> list[Row]:
    """All trials, one after the other."""
    return [row for trial in trials(config) for row in run_trial(trial, places)]


def table(rows: Sequence[Row], config: Config) -> str:
    """Return the paper's table with ours beside it, and the rows that it lacks."""
    return words.table(rows, config.setups, config.steps)


def cells(rows: Sequence[Row]) -> list[Cell]:
    """All 18 numbers beside the paper's."""
    return words.cells(rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper reads from the table."""
    return words.claims(rows)


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """None."""
    return {}
