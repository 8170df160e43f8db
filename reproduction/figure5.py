"""Figure 5: errors and weights along the optimisation on the artificial regression."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reproduction.artificial import Setting, make_sample, views_of
from reproduction.records import Claim, Item, Places, Row, Rows
from reproduction.regression import SETS, SMALL, error, fit_em, uniform_mean
from reproduction.scoring import predicted_mean, round_list
from reproduction.tallies import markdown_table, numbers, paired, select, spread
from vbtta.plotting import COLOURS, styled

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


def _trials(config: Config) -> list[Trial]:
    """One a distribution and seed."""
    return [
        Trial(replace(config.setting, distribution=distribution, seed=seed), config.draws, config.steps)
        for distribution in _DISTRIBUTIONS
        for seed in range(config.seeds)
    ]


def _run_trial(trial: Trial, places: Places) -> list[Row]:
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


def _table(rows: Rows, config: Config) -> str:
    """How even the weights are in the end."""
    body = [
        [
            distribution,
            views,
            spread(chosen, "largest_weight").text(),
            spread(chosen, "effective_views").text(2),
            f"{len(SETS[views])}",
        ]
        for distribution in _DISTRIBUTIONS
        for views in SETS
        if (chosen := select(rows, distribution=distribution, views=views))
    ]
    return (
        f"First row of the figure: test error along {config.steps} plain EM updates, mean and range of the middle half "
        f"of {config.seeds} trials; dashed, uniform TTA. Second row: mean weights. The problem is that of tables 2 and "
        "3, inductive reading. The paper shows one run with ADVI. Below, how even the weights are in the end: 1 / sum "
        "of squared weights counts the views that matter.\n\n"
        + markdown_table(["inputs", "views", "largest weight", "effective views", "views in all"], body)
    )


def _rises(row: Row) -> bool:
    bound = np.array(numbers(row, "bound"))
    return bool(np.all(np.diff(bound) > -1e-6 * abs(bound[-1])))


def _mixup_weights(rows: Rows) -> str:
    mixup, cutmix = select(rows, views="mixup"), select(rows, views="cutmix")
    gap = paired(mixup, cutmix, "largest_weight").mean
    return f"largest weight {spread(mixup, 'largest_weight').text()}, {gap:+.3f} against the cutmixes'"


def _cutmix_weights(rows: Rows) -> str:
    cutmix = select(rows, views="cutmix")
    even, largest = spread(cutmix, "effective_views"), spread(cutmix, "largest_weight")
    return f"effective views {even.text(2)} of 3, largest weight {largest.text()}"


_CLAIMS = (
    Claim(
        "Among mixups one takes a large weight",
        lambda rows: spread(select(rows, views="mixup"), "largest_weight").mean > 0.5,
        _mixup_weights,
    ),
    Claim(
        "Cutmixes get nearly equal weights",
        lambda rows: spread(select(rows, views="cutmix"), "effective_views").mean > 2.7,
        _cutmix_weights,
    ),
    Claim(
        "The optimisation converges (the bound rises to a standstill)",
        lambda rows: all(map(_rises, rows)),
        lambda rows: f"rises in {sum(map(_rises, rows))} of {len(rows)} fits",
    ),
)


def _figures(rows: Rows) -> dict[str, Any]:
    """One figure a distribution."""
    by_distribution = {name: select(rows, distribution=name) for name in _DISTRIBUTIONS}
    return {f"figure5_{name}": _draw(chosen) for name, chosen in by_distribution.items() if chosen}


@styled()
def _draw(rows: Rows) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    panels = figure.subplots(2, len(SETS), sharex=True, sharey="row")
    for column, (views, members) in enumerate(SETS.items()):
        chosen = select(rows, views=views)
        steps = numbers(chosen[0], "steps")
        errors = np.array([numbers(row, "mse") for row in chosen])  # (trials, steps)
        top, bottom = panels[:, column]
        top.fill_between(steps, *np.quantile(errors, (0.25, 0.75), axis=0), color=COLOURS[0], alpha=0.2, linewidth=0)
        top.plot(steps, errors.mean(axis=0), color=COLOURS[0])
        top.axhline(spread(chosen, "uniform_mse").mean, color="#010101", linewidth=0.8, linestyle=(0, (4, 3)))
        top.set_title(f"{len(members)}-VB-TTA ({views})", fontsize=9)
        top.set_ylim(0, None)
        for place, member in enumerate(members):
            weights = np.array([numbers(row, f"weight {member}") for row in chosen])
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


ITEM = Item(
    "Errors and weights along the optimisation, artificial regression",
    2,
    {
        "smoke": Config(SMALL, seeds=1, draws=4, steps=20),
        "cpu": Config(Setting()),
        "paper": Config(Setting(test_instances=10_000), draws=256),
    },
    _trials,
    _run_trial,
    _table,
    _CLAIMS,
    figures=_figures,
)
