"""Figures 6 and 7: error, its standard deviation and the bound over the optimisation of the weights on UTKFace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reproduction.networks import SETUPS, STRATEGIES, ImageSetup, NetworkConfig, StepsTrial, paper_views
from reproduction.records import Claim, Item, Places, Row, Rows
from reproduction.scoring import fit_steps, predicted_mean, round_list
from reproduction.tallies import listed, markdown_table, number, numbers, partly, plural, select
from vbtta import GaussianMixture, metrics
from vbtta.plotting import COLOURS, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 300)  # those that tables show
_VISIBLE = 5e-4  # in the third decimal, which the table shows
_CONVERGED = 1e-3  # nats a label, over the last third of the updates
_ROUNDING = 1e-6  # nats


@dataclass(frozen=True)
class Config:
    """Seeds, the sample and the network, and the number of EM updates."""

    seeds: tuple[int, ...]
    setup: ImageSetup
    steps: int = 300


def _trials(config: Config) -> list[StepsTrial]:
    """One trial a seed."""
    return [StepsTrial(config.setup.at(seed), config.steps) for seed in config.seeds]


def _run_trial(trial: StepsTrial, places: Places) -> list[Row]:
    """One row a strategy, with a list over the steps for everything that is followed."""
    views = paper_views(trial.setup, places)
    sample, config = views.sample, trial.setup.sample
    rows: list[Row] = []
    for strategy, names in STRATEGIES.items():
        calibration, test = views.chosen(names)
        policy = fit_steps(calibration, sample.labels, "regression", GaussianMixture(), trial.steps)
        predicted = [predicted_mean(policy.at_step(t + 1).predict(test)) for t in range(policy.n_steps)]
        errors = np.stack([metrics.absolute_errors(sample.truth, mean) for mean in predicted])  # (T, N)
        rows.append(
            {
                "seed": config.seed,
                "synthetic": config.synthetic,
                "strategy": strategy,
                "n_labels": int(sample.labels.size),
                "mae": round_list(errors.mean(axis=1), 8),
                "error_sd": round_list(errors.std(axis=1, ddof=1), 8),
                "bound": round_list(policy.history.elbo, 8),
            }
        )
    return rows


def _along(rows: Rows, strategy: str, key: str) -> NDArray[np.float64]:
    """One list of every seed, (seeds, T)."""
    return np.array([numbers(row, key) for row in select(rows, strategy=strategy)])


def _labels(rows: Rows) -> NDArray[np.float64]:
    """Numbers of labels, (seeds,)."""
    return np.array([number(row, "n_labels") for row in select(rows, strategy=next(iter(STRATEGIES)))])


@styled()
def _bands(rows: Rows, panels: Sequence[tuple[str, str]], per_label: bool = False) -> Any:
    """Curves over the steps, one a strategy: means over seeds with bands of one standard deviation.

    One panel for each (key, label of the vertical axis); `per_label` draws minus the value divided by the number of
    labels, as for a bound.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    figure = Figure(figsize=(4.8 if len(panels) == 1 else 7.2, 3.0), layout="constrained")
    for axes, (key, label) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for colour, (strategy, names) in zip(COLOURS, STRATEGIES.items(), strict=False):
            values = _along(rows, strategy, key)
            if per_label:
                values = -values / _labels(rows)[:, None]
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


def _caption(config: Config) -> str:
    """The protocol, for both figures."""
    sample, network = config.setup.sample, config.setup.network
    source = "Made-up images instead of faces; not comparable." if sample.synthetic else "UTKFace."
    return (
        f"{source} {plural(len(config.seeds), 'seed')}, {config.steps} plain EM updates of the weights, fitted on "
        f"{sample.n_calibration} held-out training faces with two labels each and scored on up to {sample.n_test} test "
        f"faces of {sample.size} x {sample.size} pixels; {'ResNet-18 of ' * isinstance(network, NetworkConfig)}"
        f"{network.described}, {config.setup.draws} draws a view. The first update has uniform weights, with the "
        "views already calibrated by one update. Bands are one standard deviation over seeds."
    )


def _error_table(rows: Rows, config: Config) -> str:
    """Error and spread at a few steps."""
    shown = [step for step in _STEPS if step <= config.steps]
    body = []
    for strategy, names in STRATEGIES.items():
        for key, label in (("mae", "MAE"), ("error_sd", "standard deviation of the error")):
            mean = _along(rows, strategy, key).mean(axis=0)
            body.append([f"{len(names)}-VB-TTA ({strategy}), {label}", *(f"{mean[step - 1]:.3f}" for step in shown)])
    return (
        f"{markdown_table(['', *(f'step {step}' for step in shown)], body)}\n\n{_caption(config)} The standard "
        "deviation is that of the absolute error over test faces; the paper does not say which it draws."
    )


def _bound_table(rows: Rows, config: Config) -> str:
    """Nats a label at a few steps."""
    shown = [step for step in _STEPS if step <= config.steps]
    body = []
    for strategy, names in STRATEGIES.items():
        mean = (-_along(rows, strategy, "bound") / _labels(rows)[:, None]).mean(axis=0)
        body.append([f"{len(names)}-VB-TTA ({strategy})", *(f"{mean[step - 1]:.4f}" for step in shown)])
    head = ["negative bound, nats a label", *(f"step {step}" for step in shown)]
    return f"{markdown_table(head, body)}\n\n{_caption(config)}"


def _curves(rows: Rows, key: str) -> dict[str, NDArray[np.float64]]:
    """Means over seeds, (T,), by strategy."""
    return {strategy: _along(rows, strategy, key).mean(axis=0) for strategy in STRATEGIES}


def _early_minima(curves: Mapping[str, NDArray[np.float64]]) -> dict[str, int]:
    """Steps of the least values, of the strategies that end visibly above theirs."""
    return {name: int(curve.argmin()) + 1 for name, curve in curves.items() if curve[-1] - curve.min() > _VISIBLE}


def _falls(key: str) -> Callable[[Rows], bool | str]:
    """Whether a curve falls from the first to the last step, for which strategies, and where it turns."""

    def predicate(rows: Rows) -> bool | str:
        curves = _curves(rows, key)
        falls = {name: bool(curve[0] > curve[-1]) for name, curve in curves.items()}
        verdict = partly(falls, "holds if the views are {passed}", " and ")
        early = ", ".join(f"{name} (step {step})" for name, step in _early_minima(curves).items())
        if not early or verdict is False:
            return verdict
        condition = "holds if only the ends are compared" if verdict is True else verdict
        return f"{condition}; the least is earlier for {early}"

    return predicate


def _values_along(key: str) -> Callable[[Rows], str]:
    def evidence(rows: Rows) -> str:
        parts = []
        curves = _curves(rows, key)
        early = _early_minima(curves)
        for name, curve in curves.items():
            marks = sorted({1, min(50, len(curve)), len(curve)})
            values = ", ".join(f"{curve[step - 1]:.3f} at step {step}" for step in marks)
            least = f", least {curve.min():.3f} at step {early[name]}" if name in early else ""
            parts.append(f"{name}: {values}{least}")
        return "; ".join(parts)

    return evidence


def _late_gains(rows: Rows) -> dict[str, float]:
    """The largest gain of the bound over the last third of the updates, nats a label, by strategy."""
    bounds = {strategy: _along(rows, strategy, "bound") for strategy in STRATEGIES}
    return {
        strategy: float(((bound[:, -1] - bound[:, 2 * bound.shape[1] // 3]) / _labels(rows)).max())
        for strategy, bound in bounds.items()
    }


def _least_rise(rows: Rows) -> float:
    return min(float(np.diff(_along(rows, strategy, "bound"), axis=1).min()) for strategy in STRATEGIES)


_ERROR_CLAIMS = tuple(
    Claim(f"The {words} falls over the optimisation", _falls(key), _values_along(key))
    for key, words in (("mae", "mean absolute error"), ("error_sd", "standard deviation of the error"))
)
_BOUND_CLAIMS = (
    Claim(
        "The bound converges",
        lambda rows: max(_late_gains(rows).values()) < _CONVERGED or "holds if more updates follow",
        lambda rows: (
            "largest gain over the last third of the updates, nats a label: "
            + listed(_late_gains(rows), "{:.1e}".format)
        ),
    ),
    Claim(
        "Not in the paper: the bound never falls (with the corrected updates)",
        lambda rows: _least_rise(rows) > -_ROUNDING,
        lambda rows: f"smallest change between two updates {_least_rise(rows):+.1e} nats",
    ),
)


def _figure6(rows: Rows) -> dict[str, Figure]:
    panels = [("mae", "mean absolute error (years)"), ("error_sd", "standard deviation of the error")]
    return {"figure6": _bands(rows, panels)}


def _figure7(rows: Rows) -> dict[str, Figure]:
    return {"figure7": _bands(rows, [("bound", "negative bound (nats a label)")], per_label=True)}


_PROFILES = {
    "smoke": Config((0, 1), SETUPS["smoke"]["utkface"], steps=12),
    "cpu": Config((0, 1), SETUPS["cpu"]["utkface"]),
    "pretrained": Config((0, 1, 2), SETUPS["pretrained"]["utkface"]),
    "paper": Config((0, 1, 2, 3, 4), SETUPS["paper"]["utkface"]),
}
FIGURE6 = Item(
    "Mean absolute error and its standard deviation over the optimisation on UTKFace",
    1,
    _PROFILES,
    _trials,
    _run_trial,
    _error_table,
    _ERROR_CLAIMS,
    figures=_figure6,
)
FIGURE7 = Item(
    "The negative bound over the optimisation on UTKFace",
    1,
    _PROFILES,
    _trials,
    _run_trial,
    _bound_table,
    _BOUND_CLAIMS,
    figures=_figure7,
)
