"""Figure 5: errors and weights along the optimisation on the artificial regression."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vbtta.experiments.artificial import Setting, make_sample, views_of
from vbtta.experiments.item import Cell, Claim, Places, Row, run_all
from vbtta.experiments.regression import SETS, error, fit_em, predicted_mean, uniform_mean
from vbtta.experiments.report import markdown_table
from vbtta.experiments.scoring import round_list
from vbtta.experiments.tallies import paired, select, spread
from vbtta.plotting import COLOURS, styled

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

TITLE = "Errors and weights along the optimisation, artificial regression"
VERSION = 2
_DISTRIBUTIONS = ("gaussian", "gamma")


@dataclass(frozen=True)
class Config:
    """Choices of a profile; the problem is that of tables 2 and 3."""

    setting: Setting
    seeds: int = 10
    draws: int = 32
    steps: int = 300


@dataclass(frozen=True)
class Trial:
    """One data set and its networks."""

    setting: Setting
    draws: int
    steps: int


PROFILES = {
    "smoke": Config(
        Setting(instances=120, test_instances=100, epochs=5, width=16, folds=2), seeds=1, draws=4, steps=20
    ),
    "cpu": Config(Setting()),
    "paper": Config(Setting(test_instances=10_000), draws=256),
}


def trials(config: Config) -> list[Trial]:
    """One a distribution and seed."""
    return [
        Trial(replace(config.setting, distribution=distribution, seed=seed), config.draws, config.steps)
        for distribution in _DISTRIBUTIONS
        for seed in range(config.seeds)
    ]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """Test error, bound and weights along plain EM updates, weights fitted out-of-fold; one row a set of views."""
    sample = make_sample(trial.setting)
    views = views_of(trial.setting, sample, (trial.draws,), places.cache)[trial.draws]
    shown = _shown(trial.steps)
    rows: list[Row] = []
    for name, members in SETS.items():
        test = views.test.select(members)
        policy = fit_em(views.out_of_fold.select(members), sample, trial.steps)
        path = [error(predicted_mean(policy.at_step(step).predict(test)), sample.test_truth) for step in shown]
        row: Row = {
            "distribution": trial.setting.distribution,
            "seed": trial.setting.seed,
            "views": name,
            "uniform_mse": error(uniform_mean(test), sample.test_truth),
            "largest_weight": float(policy.weights.max()),
            "effective_views": float(1 / (policy.weights**2).sum()),
            "steps": [float(step) for step in shown],
            "mse": round_list(path),
            "bound": round_list(policy.history.elbo[[step - 1 for step in shown]], 3),
        }
        for k, member in enumerate(members):
            row[f"weight {member}"] = round_list(policy.history.weights[[step - 1 for step in shown], k])
        rows.append(row)
    return rows


def run(config: Config, places: Places) -> list[Row]:
    """All trials in this process."""
    return run_all(sys.modules[__name__], config, places)


def table(rows: Sequence[Row], config: Config) -> str:
    """How even the weights are in the end."""
    body = [
        [
            distribution,
            views,
            spread(found, "largest_weight").text(),
            spread(found, "effective_views").text(2),
            f"{len(SETS[views])}",
        ]
        for distribution in _DISTRIBUTIONS
        for views in SETS
        if (found := select(rows, distribution=distribution, views=views))
    ]
    return (
        f"First row of the figure: test error along {config.steps} plain EM updates, mean and range of the middle half "
        f"of {config.seeds} trials; dashed, uniform TTA. Second row: mean weights. The problem is that of tables 2 and "
        "3, inductive reading. The paper shows one run with ADVI. Below, how even the weights are in the end: 1 / sum "
        "of squared weights counts the views that matter.\n\n"
        + markdown_table(["inputs", "views", "largest weight", "effective views", "views in all"], body)
    )


def cells(rows: Sequence[Row]) -> list[Cell]:
    """The paper prints no numbers here."""
    return []


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Judge what the paper reads from its figure."""
    mixup, cutmix = select(rows, views="mixup"), select(rows, views="cutmix")
    gap = paired(mixup, cutmix, "largest_weight").mean
    dominated = spread(mixup, "largest_weight").mean
    even = spread(cutmix, "effective_views").mean
    rising = [bool(np.all(np.diff(_list(row, "bound")) > -1e-6 * abs(_list(row, "bound")[-1]))) for row in rows]
    return [
        Claim(
            "Among mixups one takes a large weight",
            "holds" if dominated > 0.5 else "does not hold",
            f"largest weight {spread(mixup, 'largest_weight').text()}, {gap:+.3f} against the cutmixes'",
        ),
        Claim(
            "Cutmixes get nearly equal weights",
            "holds" if even > 2.7 else "does not hold",
            f"effective views {spread(cutmix, 'effective_views').text(2)} of 3, largest weight "
            f"{spread(cutmix, 'largest_weight').text()}",
        ),
        Claim(
            "The optimisation converges (the bound rises to a standstill)",
            "holds" if all(rising) else "does not hold",
            f"rises in {sum(rising)} of {len(rising)} fits",
        ),
    ]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """One figure a distribution."""
    return {
        f"figure5_{distribution}": _draw(select(rows, distribution=distribution))
        for distribution in _DISTRIBUTIONS
        if select(rows, distribution=distribution)
    }


@styled
def _draw(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    panels = figure.subplots(2, len(SETS), sharex=True, sharey="row")
    for column, (views, members) in enumerate(SETS.items()):
        found = select(rows, views=views)
        steps = _list(found[0], "steps")
        errors = np.array([_list(row, "mse") for row in found])  # (trials, steps)
        top, bottom = panels[:, column]
        top.fill_between(steps, *np.quantile(errors, (0.25, 0.75), axis=0), color=COLOURS[0], alpha=0.2, linewidth=0)
        top.plot(steps, errors.mean(axis=0), color=COLOURS[0])
        top.axhline(spread(found, "uniform_mse").mean, color="#010101", linewidth=0.8, linestyle=(0, (4, 3)))
        top.set_title(f"{len(members)}-VB-TTA ({views})", fontsize=9)
        top.set_ylim(0, None)
        for place, member in enumerate(members):
            weights = np.array([_list(row, f"weight {member}") for row in found])
            bottom.plot(steps, weights.mean(axis=0), color=COLOURS[place], label=member)
        bottom.set_ylim(0, None)
        bottom.set_xscale("log")
        bottom.xaxis.set_major_formatter("{x:.0f}")
        bottom.set_xlabel("update")
        bottom.legend(ncols=1 if len(members) < 4 else 2)
    panels[0, 0].set_ylabel("mean squared error")
    panels[1, 0].set_ylabel("weight")
    return figure


def _shown(steps: int) -> list[int]:
    """About forty steps, evenly on a logarithmic scale."""
    return sorted({round(step) for step in np.geomspace(1, steps, 40)})


def _list(row: Row, key: str) -> list[float]:
    value = row[key]
    assert isinstance(value, list)
    return value
