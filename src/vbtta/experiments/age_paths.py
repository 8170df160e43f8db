"""Error, spread and bound along the optimisation of the weights on UTKFace: what figures 6 and 7 draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta.experiments.image_setups import SETUPS, STRATEGIES, ImageSetup, paper_views
from vbtta.experiments.item import Places, Row
from vbtta.experiments.scoring import fit_steps, round_list
from vbtta.experiments.tallies import plural, select
from vbtta.metrics import absolute_errors
from vbtta.plotting import COLOURS, styled
from vbtta.predictions import ContinuousPrediction, Prediction
from vbtta.specs import GaussianMixture

__all__ = ["PROFILES", "Config", "Trial", "along", "bands", "caption", "run_trial", "trials"]


@dataclass(frozen=True)
class Trial:
    """One seed: its sample of faces and its network."""

    setup: ImageSetup
    steps: int


@dataclass(frozen=True)
class Config:
    """Seeds, the sample and the network, and the number of EM updates."""

    seeds: tuple[int, ...]
    setup: ImageSetup
    steps: int = 300


PROFILES = {
    "smoke": Config((0, 1), SETUPS["smoke"]["utkface"], steps=12),
    "cpu": Config((0, 1), SETUPS["cpu"]["utkface"]),
    "paper": Config((0, 1, 2, 3, 4), SETUPS["paper"]["utkface"]),
}


def trials(config: Config) -> list[Trial]:
    """One trial a seed."""
    return [Trial(config.setup.at(seed), config.steps) for seed in config.seeds]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """One row a strategy, with a list over the steps for everything that is followed."""
    found = paper_views(trial.setup, places)
    truth = found.sample.truth
    rows: list[Row] = []
    for strategy, names in STRATEGIES.items():
        calibration, test = found.chosen(names)
        policy = fit_steps(calibration, found.sample.labels, "regression", GaussianMixture(), trial.steps)
        predicted = [_mean(policy.at_step(t + 1).predict(test)) for t in range(policy.n_steps)]
        errors = np.stack([absolute_errors(truth, mean) for mean in predicted])  # (T, N)
        rows.append(
            {
                "seed": trial.setup.sample.seed,
                "synthetic": trial.setup.sample.synthetic,
                "strategy": strategy,
                "n_labels": int(found.sample.labels.size),
                "mae": round_list(errors.mean(axis=1), 8),
                "error_sd": round_list(errors.std(axis=1, ddof=1), 8),
                "bound": round_list(policy.history.elbo, 8),
            }
        )
    return rows


def _mean(prediction: Prediction) -> NDArray[np.float64]:
    assert isinstance(prediction, ContinuousPrediction)
    return prediction.mean[:, 0]


def along(rows: Sequence[Row], strategy: str, key: str) -> NDArray[np.float64]:
    """One list of every seed, (seeds, T)."""
    return np.array([row[key] for row in select(rows, strategy=strategy)], dtype=np.float64)


@styled
def bands(rows: Sequence[Row], panels: Sequence[tuple[str, str]], per_label: bool = False) -> Any:
    """Curves over the steps, one a strategy: means over seeds with bands of one standard deviation.

    Parameters
    ----------
    rows : sequence of Row
        From :func:`run_trial`.
    panels : sequence of (key, label of the vertical axis)
        One panel each, side by side.
    per_label : bool
        Draw minus the value, divided by the number of labels, as for a bound.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    figure = Figure(figsize=(4.8 if len(panels) == 1 else 7.2, 3.0), layout="constrained")
    for axes, (key, label) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for colour, (strategy, names) in zip(COLOURS, STRATEGIES.items(), strict=False):
            values = along(rows, strategy, key)
            if per_label:
                counts = np.array([row["n_labels"] for row in select(rows, strategy=strategy)], dtype=np.float64)
                values = -values / counts[:, None]
            step, mean = np.arange(1, values.shape[1] + 1), values.mean(axis=0)
            sd = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
            axes.fill_between(step, mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)
            axes.plot(step, mean, color=colour, label=f"{len(names)}-VB-TTA ({strategy})")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.set_xlabel("update")
        axes.set_ylabel(label)
        axes.grid(axis="y")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(panels) == 1 else 3)
    return figure


def caption(rows: Sequence[Row], config: Config) -> str:
    """What was run, for the captions of both figures."""
    sample, network = config.setup.sample, config.setup.network
    source = "Made-up images instead of faces; not comparable." if sample.synthetic else "UTKFace."
    return (
        f"{source} {plural(len(config.seeds), 'seed')}, {config.steps} plain EM updates of the weights, fitted on "
        f"{sample.n_calibration} held-out training faces with two labels each and scored on up to {sample.n_test} test "
        f"faces of {sample.size} x {sample.size} pixels; ResNet-18 of width {network.width} (64 in the paper), "
        f"{network.epochs} epochs (200), {config.setup.draws} draws a view. The first update has uniform weights, with "
        "the views already calibrated by one update. Bands are one standard deviation over seeds."
    )
