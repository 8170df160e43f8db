"""Table 1: combinations of views of MNIST digits, a small network trained on 50 of them, and weights by VB-TTA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vbtta.augment import GaussianNoise, Identity, Mixup
from vbtta.augment.base import BuiltIn
from vbtta.augment.images import Rotate
from vbtta.augment.mixing import Pool
from vbtta.collect import collect_views
from vbtta.experiments import table1_words as words
from vbtta.experiments.batches import unit_images
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.samples import SampleConfig, draw_sample
from vbtta.experiments.scoring import fit_steps, round_list, scores, uniform
from vbtta.experiments.training import ImageNetwork, TrainingConfig, train
from vbtta.predictions import ViewPredictions
from vbtta.specs import CategoricalLatent, CategoricalMixture, ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "TITLE", "VERSION", "Config", "Trial", "cells", "claims", "figures", "run", "run_trial"]
__all__ += ["table", "trials"]

TITLE = "Combinations of views of MNIST digits, 50 training images"
VERSION = 2

# The paper's letters: the identity, or nothing done; two rotations; noise; mixup.
LETTERS = "ABCDE"
COMBINATIONS = tuple(
    "+".join(letters)
    for size in range(1, 6)
    for letters in combinations(LETTERS, size)
    if size == 1 or letters[0] == "A"  # the paper lists only combinations with A
)


@dataclass(frozen=True)
class Trial:
    """One draw of training images.

    Parameters
    ----------
    seed : int
        Decides the images, the network and the draws.
    n_training, n_test, folds : int
        Images to train on and to test on; parts that they are split into for out-of-fold views.
    epochs : int
        Passes over the training images, in batches of 25, with Adam.
    draws : int
        Draws of noise and of mixup; their logits are averaged.
    noise, alpha : float
        Standard deviation of the noise in pixels of [0, 1]; parameter of mixup's Beta distribution.
    steps : int
        EM updates of VB-TTA.
    synthetic : bool
        Patterns in noise instead of MNIST.
    """

    seed: int
    n_training: int = 50
    n_test: int = 10_000
    folds: int = 5
    epochs: int = 60
    draws: int = 32
    noise: float = 0.1
    alpha: float = 0.5
    steps: int = 300
    synthetic: bool = False


@dataclass(frozen=True)
class Config:
    """Seeds, and what all trials share."""

    seeds: tuple[int, ...]
    trial: Trial


PROFILES = {
    "smoke": Config((0, 1), Trial(0, n_test=120, folds=2, epochs=12, draws=2, steps=20, synthetic=True)),
    "cpu": Config(tuple(range(10)), Trial(0, n_test=3000, draws=8)),
    "paper": Config(tuple(range(10)), Trial(0, draws=32)),
}


def trials(config: Config) -> list[Trial]:
    """One trial a seed."""
    return [replace(config.trial, seed=seed) for seed in config.seeds]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """Train, look through all views, and score all combinations."""
    size = SampleConfig("mnist", trial.seed, trial.n_training, 0, trial.n_test, size=28, synthetic=trial.synthetic)
    sample = draw_sample(size, places)
    before = torch.get_num_threads()
    torch.set_num_threads(places.threads)
    try:
        return _run(trial, sample.images, sample.targets, sample.test, sample.truth)
    finally:
        torch.set_num_threads(before)


def run(config: Config, places: Places) -> list[Row]:
    """All trials, one after the other."""
    return [row for trial in trials(config) for row in run_trial(trial, places)]


def table(rows: Sequence[Row], config: Config) -> str:
    """Return the paper's table with a column of ours, and the rows that it lacks."""
    return words.table(rows, config.trial.draws, len(config.seeds), config.trial)


def cells(rows: Sequence[Row]) -> list[Cell]:
    """All 20 accuracies beside the paper's."""
    return words.cells(rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper reads from the table."""
    return words.claims(rows)


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """None."""
    return {}


def _run(
    trial: Trial, images: NDArray[np.uint8], targets: NDArray[Any], test: NDArray[np.uint8], truth: NDArray[Any]
) -> list[Row]:
    network = _network(trial, images, targets)
    views = _views(trial, images)
    seen = _collect(network, views, test, trial.draws, trial.seed)
    once = _collect(network, views, test, 1, trial.seed)
    fitted_on = {
        "out-of-fold": _out_of_fold(trial, images, targets),
        "training": _collect(network, views, images, trial.draws, trial.seed + 1000),
    }
    rows: list[Row] = []
    for draws, predictions in ((trial.draws, seen), (1, once)):
        for combination in COMBINATIONS:
            chosen = predictions.select([views[LETTERS.index(letter)].name for letter in combination.split("+")])
            pooled = uniform(chosen, truth, chosen, "classification")
            rows.append(_row(trial, combination, "uniform", "none", draws, scores(pooled, truth)))
    models: dict[str, ModelSpec] = {"mixture": CategoricalMixture(), "latent": CategoricalLatent()}
    for where, calibration in fitted_on.items():
        for name, model in models.items():
            policy = fit_steps(calibration, targets, "classification", model, trial.steps)
            for step in (1, policy.n_steps):
                state = policy.at_step(step)
                row = _row(trial, "+".join(LETTERS), name, where, trial.draws, scores(state.predict(seen), truth))
                row |= {"step": step, "weights": round_list(state.weights), "bound": state.elbo}
                rows.append(row)
    return rows


def _row(trial: Trial, combination: str, model: str, where: str, draws: int, found: Row) -> Row:
    choices: Row = {"views": combination, "model": model, "fitted_on": where, "draws": draws}
    return {"seed": trial.seed, "synthetic": trial.synthetic, **choices, **found}


def _network(trial: Trial, images: NDArray[np.uint8], targets: NDArray[Any]) -> ImageNetwork:
    config = TrainingConfig(
        "classification",
        "convnet",
        10,
        epochs=trial.epochs,
        batch_size=25,
        optimizer="adam",
        learning_rate=2e-3,
        weight_decay=0.0,
        crop=0,
        flip=False,
        seed=trial.seed,
    )
    return train(config, images, targets)


def _views(trial: Trial, pool: NDArray[np.uint8]) -> list[BuiltIn]:
    return [
        Identity(),
        Rotate(20.0, padding="zeros"),
        Rotate(-20.0, padding="zeros"),
        GaussianNoise(trial.noise),
        Mixup(trial.alpha, Pool(unit_images(pool))),
    ]


def _collect(
    network: ImageNetwork, views: Sequence[BuiltIn], images: NDArray[np.uint8], draws: int, seed: int
) -> ViewPredictions:
    found = collect_views(network, unit_images(images), views, draws=draws, batch_size=1000, seed=seed)
    # Without the views' fingerprints: a fold's mixup draws from another pool than that of the whole sample.
    return ViewPredictions(found.mean, names=found.names)


def _out_of_fold(trial: Trial, images: NDArray[np.uint8], targets: NDArray[Any]) -> ViewPredictions:
    """Views of each training image through a network that has not seen it."""
    order = np.random.default_rng(trial.seed).permutation(len(images))
    mean = np.empty((len(images), len(LETTERS), 10))
    for fold, held_out in enumerate(np.array_split(order, trial.folds)):
        kept = np.setdiff1d(order, held_out)
        views = _views(trial, images[kept])
        network = _network(trial, images[kept], targets[kept])
        mean[held_out] = _collect(network, views, images[held_out], trial.draws, trial.seed + 10 + fold).mean
    return ViewPredictions(mean, names=[view.name for view in _views(trial, images)])
