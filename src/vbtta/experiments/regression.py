"""Uniform TTA and VB-TTA on the artificial regression, step by step: the trials of tables 2 and 3 and of figure 5."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta.experiments.artificial import Sample, Setting, make_sample, views_of
from vbtta.experiments.item import Places, Row
from vbtta.experiments.scoring import fit_steps, round_list
from vbtta.fit import fit_policy
from vbtta.policy import ConvergenceWarning, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import ADVI, GaussianMixture

__all__ = ["SETS", "Config", "Trial", "error", "fit_em", "predicted_mean", "run_trial", "trials", "uniform_mean"]

SETS = {
    "mixup": ("mixup(0.1)", "mixup(0.5)", "mixup(0.9)"),
    "cutmix": ("cutmix(0.1)", "cutmix(0.5)", "cutmix(0.9)"),
    "mixup + cutmix": ("mixup(0.1)", "mixup(0.5)", "mixup(0.9)", "cutmix(0.1)", "cutmix(0.5)", "cutmix(0.9)"),
}
Pair = tuple[ViewPredictions, ViewPredictions]  # of the calibration sample and of the test instances


@dataclass(frozen=True)
class Config:
    """Choices of a profile.

    Parameters
    ----------
    setting : Setting
        The problem and its network.
    seeds : int
        Trials.
    draws : int
        Of every view; one draw is an ablation.
    steps : ints
        Updates after which errors are reported.
    learning_rate : float
        Of ADVI, which takes as many steps.
    """

    setting: Setting
    seeds: int = 10
    draws: int = 32
    steps: tuple[int, ...] = (1, 50, 100, 200, 300)
    learning_rate: float = 0.05


@dataclass(frozen=True)
class Trial:
    """One data set and its networks."""

    setting: Setting
    draws: int
    steps: tuple[int, ...] = field(default_factory=tuple)
    learning_rate: float = 0.05


def trials(config: Config) -> list[Trial]:
    """One a seed."""
    return [
        Trial(replace(config.setting, seed=seed), config.draws, config.steps, config.learning_rate)
        for seed in range(config.seeds)
    ]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """Errors of every strategy, engine, reading and ablation; one row a strategy, with its steps in columns.

    *Inductive*: predictions of fresh inputs. *Transductive*: the truth of the labelled instances from their views and
    labels together, by ``Policy.consensus``. Errors are against the polynomial without noise.
    """
    sample = make_sample(trial.setting)
    found = views_of(trial.setting, sample, tuple(dict.fromkeys((trial.draws, 1))), places.cache)
    plain = found[trial.draws].network_mse
    rows: list[Row] = [{"seed": trial.setting.seed, "method": "network", "reading": "inductive", "mse_1": plain}]
    for draws, views in found.items():
        for fitted_on, calibration in (("out-of-fold", views.out_of_fold), ("training", views.training)):
            for name, members in SETS.items():
                common: Row = {"seed": trial.setting.seed, "views": name, "draws": draws, "fitted_on": fitted_on}
                part = (calibration.select(members), views.test.select(members))
                main = draws == trial.draws and fitted_on == "out-of-fold"
                rows += [{**common, **row} for row in _strategies(trial, sample, part, main)]
    return rows


def fit_em(calibration: ViewPredictions, sample: Sample, steps: int, link: Any = "affine") -> Policy:
    """VB-TTA by plain EM updates; second labels are anonymous, so every label is a view's (the paper's model)."""
    return fit_steps(calibration, sample.labels, "regression", GaussianMixture(link=link, noise="none"), steps)


def uniform_mean(views: ViewPredictions) -> NDArray[np.float64]:
    """Uniform TTA: the average of the views, (N,)."""
    return np.asarray(views.mean[:, :, 0].mean(axis=1))


def predicted_mean(prediction: Any) -> NDArray[np.float64]:
    """The point prediction of a single output, (N,)."""
    return np.asarray(prediction.mean[:, 0])


def error(predicted: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """Mean squared error."""
    return float(np.mean((predicted - truth) ** 2))


def _strategies(trial: Trial, sample: Sample, views: Pair, main: bool) -> Iterator[Row]:
    """Uniform TTA and VB-TTA by EM; in the main protocol also by ADVI, and with offsets instead of rescaling."""
    calibration, test = views
    yield {
        "method": "uniform",
        "reading": "inductive",
        "mse_1": error(uniform_mean(test), sample.test_truth),
    }
    yield {
        "method": "uniform",
        "reading": "transductive",
        "mse_1": error(uniform_mean(calibration), sample.truth),
    }
    last = trial.steps[-1]
    yield from _errors("em", fit_em(calibration, sample, last), trial, sample, views)
    if main:
        yield from _errors("em, offsets only", fit_em(calibration, sample, last, "shift"), trial, sample, views)
        yield from _errors("advi", _fit_advi(calibration, sample, trial), trial, sample, views)


def _fit_advi(calibration: ViewPredictions, sample: Sample, trial: Trial) -> Policy:
    engine = ADVI(steps=trial.steps[-1], learning_rate=trial.learning_rate, keep_states=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of steps is the paper's
        return fit_policy(
            calibration,
            sample.labels,
            task="regression",
            model=GaussianMixture(noise="none"),
            engine=engine,
            guard=False,
            seed=trial.setting.seed,
        )


def _errors(engine: str, policy: Policy, trial: Trial, sample: Sample, views: Pair) -> Iterator[Row]:
    """Errors in both readings after each of the steps."""
    inductive: Row = {}
    transductive: Row = {}
    for step in trial.steps:
        found = policy.at_step(step)
        inductive[f"mse_{step}"] = error(predicted_mean(found.predict(views[1])), sample.test_truth)
        agreed = found.consensus(views[0], sample.labels)
        transductive[f"mse_{step}"] = error(predicted_mean(agreed), sample.truth)
    shown = [step - 1 for step in trial.steps]
    inductive["bound"] = round_list(policy.history.elbo[shown], 4)
    inductive["first_weights"] = round_list(policy.history.weights[0])
    inductive["weights"] = round_list(policy.history.weights[-1])
    for reading, row in (("inductive", inductive), ("transductive", transductive)):
        yield {"method": "vb", "engine": engine, "reading": reading, **row}
