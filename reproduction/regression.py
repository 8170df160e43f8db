"""Tables 2 and 3: uniform TTA and VB-TTA on the artificial regression, step by step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reproduction.artificial import Sample, Setting, make_sample, views_of
from reproduction.records import Cell, Claim, Item, Places, Row, Rows
from reproduction.scoring import fit_steps, predicted_mean, round_list
from reproduction.tallies import (
    Difference,
    Spread,
    agreement,
    listed,
    markdown_table,
    number,
    paired,
    partly,
    select,
    spread,
)
from vbtta import ADVI, ConvergenceWarning, GaussianMixture, Policy, ViewPredictions, fit_policy

SMALL = Setting(instances=120, test_instances=100, epochs=5, width=16, folds=2)  # of the smoke profile
SETS: dict[str, tuple[str, ...]] = {
    "mixup": ("mixup(0.1)", "mixup(0.5)", "mixup(0.9)"),
    "cutmix": ("cutmix(0.1)", "cutmix(0.5)", "cutmix(0.9)"),
}
SETS["mixup + cutmix"] = SETS["mixup"] + SETS["cutmix"]
_STEPS = (1, 50, 100, 200, 300)
# Mean squared error and its standard deviation over ten trials, by distribution, views and step; step 1 is uniform TTA.
PAPER: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "gaussian": {
        "mixup": ((0.147, 0.044), (0.040, 0.019), (0.039, 0.013), (0.038, 0.014), (0.038, 0.012)),
        "cutmix": ((0.201, 0.060), (0.062, 0.028), (0.039, 0.024), (0.037, 0.013), (0.033, 0.012)),
        "mixup + cutmix": ((0.381, 0.039), (0.087, 0.020), (0.048, 0.016), (0.035, 0.011), (0.026, 0.011)),
    },
    "gamma": {
        "mixup": ((0.176, 0.075), (0.137, 0.052), (0.088, 0.025), (0.052, 0.019), (0.043, 0.017)),
        "cutmix": ((0.230, 0.103), (0.081, 0.079), (0.040, 0.024), (0.038, 0.015), (0.033, 0.013)),
        "mixup + cutmix": ((0.385, 0.066), (0.099, 0.024), (0.053, 0.020), (0.043, 0.014), (0.029, 0.013)),
    },
}
_TRANSDUCTIVE: dict[str, str | int] = {"reading": "transductive"}
_TRAINING: dict[str, str | int] = {"fitted_on": "training"}
_OTHER_PROTOCOLS: dict[str, dict[str, str | int]] = {
    "transductive": _TRANSDUCTIVE,
    "one draw, inductive": {"draws": 1},
    "one draw, transductive": {"draws": 1, **_TRANSDUCTIVE},
    "fitted on training views, inductive": _TRAINING,
}
_BLOCKS: tuple[tuple[str, dict[str, str | int], str], ...] = (
    # title, what differs from the main protocol, engine
    ("Inductive: fresh inputs, {draws} draws, weights fitted out-of-fold, EM", {}, "em"),
    ("The same by ADVI", {}, "advi"),
    ('The same by EM with offsets only, no rescaling (`link="shift"`)', {}, "em, offsets only"),
    ("Transductive: the labelled instances, views and labels together, EM", _TRANSDUCTIVE, "em"),
    ("Transductive, ADVI", _TRANSDUCTIVE, "advi"),
    ("Ablation: one draw a view, inductive, EM", {"draws": 1}, "em"),
    ("Ablation: one draw a view, transductive, EM", {"draws": 1, **_TRANSDUCTIVE}, "em"),
    ("Ablation: fitted on the training views, inductive, EM", _TRAINING, "em"),
    ("Ablation: fitted on the training views, transductive, EM", {**_TRAINING, **_TRANSDUCTIVE}, "em"),
    (
        "Ablation: fitted on the training views, one draw, transductive, EM",
        {**_TRAINING, **_TRANSDUCTIVE, "draws": 1},
        "em",
    ),
)
Link = Literal["affine", "shift"]
Pair = tuple[ViewPredictions, ViewPredictions]  # of the calibration sample and of the test instances


@dataclass(frozen=True)
class Config:
    """Choices of a profile."""

    setting: Setting  # the problem and its network
    seeds: int = 10
    draws: int = 32  # of every view; one draw is an ablation
    steps: tuple[int, ...] = (1, 50, 100, 200, 300)  # updates after which errors are reported
    learning_rate: float = 0.05  # of ADVI, which takes as many steps


@dataclass(frozen=True)
class Trial:
    """One data set and its networks."""

    setting: Setting
    draws: int
    steps: tuple[int, ...] = field(default_factory=tuple)
    learning_rate: float = 0.05


def _trials(config: Config) -> list[Trial]:
    """One a seed."""
    return [
        Trial(replace(config.setting, seed=seed), config.draws, config.steps, config.learning_rate)
        for seed in range(config.seeds)
    ]


def _run_trial(trial: Trial, places: Places) -> list[Row]:
    """Errors of every strategy, engine, reading and ablation; one row a strategy, with its steps in columns.

    *Inductive*: predictions of fresh inputs. *Transductive*: the truth of the labelled instances from their views and
    labels together, by ``Policy.consensus``. Errors are against the polynomial without noise.
    """
    sample = make_sample(trial.setting)
    by_draws = views_of(trial.setting, sample, tuple(dict.fromkeys((trial.draws, 1))), places.cache)
    plain = by_draws[trial.draws].network_mse
    rows: list[Row] = [{"seed": trial.setting.seed, "method": "network", "reading": "inductive", "mse_1": plain}]
    for draws, views in by_draws.items():
        for fitted_on, calibration in (("out-of-fold", views.out_of_fold), ("training", views.training)):
            for name, members in SETS.items():
                common: Row = {"seed": trial.setting.seed, "views": name, "draws": draws, "fitted_on": fitted_on}
                part = (calibration.select(members), views.test.select(members))
                main = draws == trial.draws and fitted_on == "out-of-fold"
                rows += [{**common, **row} for row in _strategies(trial, sample, part, main)]
    return rows


def fit_em(calibration: ViewPredictions, sample: Sample, steps: int, link: Link = "affine") -> Policy:
    """VB-TTA by plain EM updates; second labels are anonymous, so every label is a view's (the paper's model)."""
    return fit_steps(calibration, sample.labels, "regression", GaussianMixture(link=link, noise="none"), steps)


def uniform_mean(views: ViewPredictions) -> NDArray[np.float64]:
    """Uniform TTA: the average of the views, (N,)."""
    return np.asarray(views.outputs[:, :, 0].mean(axis=1))


def error(predicted: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """Mean squared error."""
    return float(np.mean((predicted - truth) ** 2))


def _strategies(trial: Trial, sample: Sample, views: Pair, main: bool) -> Iterator[Row]:
    """Uniform TTA and VB-TTA by EM; in the main protocol also by ADVI, and with offsets instead of rescaling."""
    calibration, test = views
    for reading, part, truth in (("inductive", test, sample.test_truth), ("transductive", calibration, sample.truth)):
        yield {"method": "uniform", "reading": reading, "mse_1": error(uniform_mean(part), truth)}
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
        state = policy.at_step(step)
        inductive[f"mse_{step}"] = error(predicted_mean(state.predict(views[1])), sample.test_truth)
        consensus = predicted_mean(state.consensus(views[0], sample.labels))
        transductive[f"mse_{step}"] = error(consensus, sample.truth)
    shown = [step - 1 for step in trial.steps]
    inductive["bound"] = round_list(policy.history.elbo[shown], 4)
    inductive["first_weights"] = round_list(policy.history.weights[0])
    inductive["weights"] = round_list(policy.history.weights[-1])
    for reading, row in (("inductive", inductive), ("transductive", transductive)):
        yield {"method": "vb", "engine": engine, "reading": reading, **row}


def _table(rows: Rows, config: Config) -> str:
    """The paper's rows for every reading, engine and ablation."""
    setting = config.setting
    inputs = "N(0, I)" if setting.distribution == "gaussian" else "Gamma(2, 2)"
    network = spread(select(rows, method="network"), "mse_1")
    parts = [
        f"Mean squared error against the noise-free polynomial, mean (± standard deviation) over {config.seeds} "
        f"trials; {setting.instances:,} training instances of dimension {setting.dimension} from {inputs}, "
        f"{setting.test_instances:,} test instances. The paper does not state its polynomial, noise, network width, "
        f"number of draws, or whether it scores new inputs. Chosen here, once: degree three, 90 / 8 / 2 % of the "
        f"variance in linear terms, products of two and of three inputs, standard deviation {setting.scale:g} (so "
        f"that uniform 3-TTA with mixup errs about as much as the paper's); "
        f"label noise {setting.noise:g}; a second label, off the first by {setting.extra_noise:g}, for "
        f"{100 * setting.doubled:g} % of the instances; hidden layers of {setting.width}, {setting.epochs} epochs. "
        f"Step 1 is the start of the fit: equal weights on views that are already calibrated; uniform TTA is the plain "
        f"average. ADVI: learning rate {config.learning_rate:g}. The network without augmentation: {network.text()}.",
        _paper_block(setting.distribution),
    ]
    for title, changed, engine in _BLOCKS:
        parts.append(f"**{title.format(draws=config.draws)}**\n\n{_block(rows, _where(rows, changed), engine)}")
    return "\n\n".join(parts)


def _cells(rows: Rows, distribution: str) -> list[Cell]:
    """Return every cell of the paper that we have too, in both readings: uniform TTA, and VB-TTA by EM."""
    cells = []
    for reading in ("inductive", "transductive"):
        where = _where(rows, {"reading": reading})
        for views, numbers in PAPER[distribution].items():
            for step, (paper, sd) in zip(_STEPS, numbers, strict=True):
                method = {"method": "uniform"} if step == 1 else {"method": "vb", "engine": "em"}
                chosen = select(rows, views=views, **where, **method)
                if chosen and f"mse_{step}" in chosen[0]:
                    ours = spread(chosen, f"mse_{step}")
                    what = f"{_name(views, step == 1)}, " + ("uniform" if step == 1 else f"step {step}")
                    verdict = agreement(ours, paper, sd, larger_is_better=False, trials=len(chosen))
                    cells.append(Cell(f"{what}, {reading}", paper, ours.mean, ours.sd, verdict))
    return cells


def _gains(rows: Rows, engine: str = "em", **changed: object) -> dict[str, Difference]:
    """Uniform TTA's error minus VB-TTA's after the last step, by set of views."""
    return {
        views: paired(_uniform(rows, views, **changed), _vb(rows, views, engine, **changed), "mse_1", _last(rows))
        for views in SETS
    }


def _gains_elsewhere(rows: Rows) -> dict[str, dict[str, Difference]]:
    return {name: _gains(rows, "em", **changed) for name, changed in _OTHER_PROTOCOLS.items()}


def _gains_over_network(rows: Rows) -> dict[str, Difference]:
    plain = select(rows, method="network")
    return {views: paired(plain, _vb(rows, views), "mse_1", _last(rows)) for views in SETS}


def _three_minus_six(rows: Rows, engine: str = "em", **changed: object) -> dict[str, Difference]:
    six = _vb(rows, "mixup + cutmix", engine, **changed)
    return {views: paired(_vb(rows, views, engine, **changed), six, _last(rows)) for views in ("mixup", "cutmix")}


def _uniform_six_minus_three(rows: Rows) -> dict[str, Difference]:
    six = _uniform(rows, "mixup + cutmix")
    return {views: paired(six, _uniform(rows, views), "mse_1") for views in ("mixup", "cutmix")}


def _all_positive(gains: Mapping[str, Difference]) -> bool:
    return all(gain.mean > 0 for gain in gains.values())


def _in_text(gains: Mapping[str, Difference]) -> str:
    return listed(gains, lambda gain: f"{gain.mean:+.4f} (± {gain.error:.4f}; {gain.positive} of {gain.trials})", ", ")


def _path(rows: Rows, engine: str, views: str) -> tuple[float, float, float, float]:
    """Mean errors: uniform TTA, VB-TTA at step 1, at the next reported step, and at the last."""
    fitted = _vb(rows, views, engine)
    first, middle, last = (spread(fitted, key).mean for key in ("mse_1", _middle(rows), _last(rows)))
    return spread(_uniform(rows, views), "mse_1").mean, first, middle, last


def _share(before: float, there: float, end: float) -> float:
    """The share of a fall that has happened; NaN where nothing falls."""
    return (before - there) / (before - end) if before > end else math.nan


def _early_shares(rows: Rows, start: int) -> dict[str, float]:
    """Shares of the fall by the middle step, from uniform TTA (start 0) or from step 1 (start 1)."""
    paths = {f"{engine} {views}": _path(rows, engine, views) for engine in ("em", "advi") for views in SETS}
    return {name: _share(path[start], path[2], path[3]) for name, path in paths.items()}


def _calibration_shares(rows: Rows) -> dict[str, float]:
    """The share of the fall that calibrated views with equal weights give."""
    paths = {views: _path(rows, "em", views) for views in SETS}
    return {views: _share(uniform, first, last) for views, (uniform, first, _, last) in paths.items()}


def _beats_uniform(rows: Rows) -> bool | str:
    if not all(_all_positive(_gains(rows, engine)) for engine in ("em", "advi")):
        return False
    by_offsets = all(gain.clear for gain in _gains(rows, "em, offsets only").values())
    return by_offsets or "holds if a view may be rescaled (the affine link)"


def _six_are_better(rows: Rows) -> bool | str:
    if not all(_all_positive(_three_minus_six(rows, engine)) for engine in ("em", "advi")):
        return False
    return _all_positive(_three_minus_six(rows, fitted_on="training")) or "holds if weights are fitted out-of-fold"


def _six_against_three(rows: Rows) -> str:
    gaps = {
        f"{reading}, em, against 3 {views}": gap
        for reading in ("inductive", "transductive")
        for views, gap in _three_minus_six(rows, reading=reading).items()
    }
    on_training = {f"against {views}": gap for views, gap in _three_minus_six(rows, fitted_on="training").items()}
    return (
        f"the three views' error minus the six's: {listed(gaps, Difference.text)}; fitted on training views "
        f"{listed(on_training, Difference.text, ', ')}"
    )


def _early_in_text(rows: Rows) -> str:
    from_uniform, after_first = (
        listed(_early_shares(rows, start), lambda share: f"{100 * share:.0f} %" if share == share else "no fall", ", ")
        for start in (0, 1)
    )
    return f"share of the fall from uniform TTA: {from_uniform}; of the fall after step 1: {after_first}"


def _parts_of_the_gain(rows: Rows) -> str:
    parts = []
    for views, share in _calibration_shares(rows).items():
        uniform, first, _, last = _path(rows, "em", views)
        by_weights = "" if math.isnan(share) else f" ({100 * (1 - share):.0f} % of the fall is the weights')"
        parts.append(f"{views} {uniform:.4f} -> {first:.4f} -> {last:.4f}{by_weights}")
    return "uniform -> equal weights on calibrated views (step 1) -> inferred weights: " + "; ".join(parts)


def _errors_with_network(rows: Rows) -> str:
    uniform = " / ".join(f"{spread(_uniform(rows, views), 'mse_1').mean:.4f} ({views})" for views in SETS)
    fitted = " / ".join(f"{spread(_vb(rows, views), _last(rows)).mean:.4f} ({views})" for views in SETS)
    return (
        f"no augmentation {spread(select(rows, method='network'), 'mse_1').text(4)}, uniform TTA {uniform}, VB-TTA "
        f"{fitted}; fall of the error from no augmentation to VB-TTA: {_in_text(_gains_over_network(rows))}"
    )


_CLAIMS = (
    Claim(
        lambda rows: f"VB-TTA after {_step(_last(rows))} steps beats uniform TTA in every row (inductive)",
        _beats_uniform,
        lambda rows: (
            "fall of the error "
            + "; ".join(f"{engine}: {_in_text(_gains(rows, engine))}" for engine in ("em", "advi", "em, offsets only"))
        ),
    ),
    Claim(
        "The same in the other readings and ablations (EM)",
        lambda rows: partly(
            {name: _all_positive(gains) for name, gains in _gains_elsewhere(rows).items()},
            "holds if one leaves out: {failed}",
        ),
        lambda rows: (
            "fall of the error "
            + "; ".join(f"{name}: {_in_text(gains)}" for name, gains in _gains_elsewhere(rows).items())
        ),
    ),
    Claim("6-VB-TTA is better than either 3-VB-TTA", _six_are_better, _six_against_three),
    Claim(
        lambda rows: f"Most of the gain is there by step {_step(_middle(rows))}",
        lambda rows: all(share >= 0.5 for share in _early_shares(rows, 0).values()),
        _early_in_text,
    ),
    Claim(
        "Without optimised weights, more views are worse (6-TTA against 3-TTA)",
        lambda rows: _all_positive(_uniform_six_minus_three(rows)),
        lambda rows: (
            f"the six's error minus the three's: {listed(_uniform_six_minus_three(rows), Difference.text, ', ')}; "
            "squared error is convex, so the average of both averages cannot be worse than the worse of them"
        ),
    ),
    Claim(
        "The gain comes from the weights",
        lambda rows: all(share <= 0.5 for share in _calibration_shares(rows).values()),
        _parts_of_the_gain,
    ),
    Claim(
        "Not in the paper: VB-TTA beats the network without augmentation (inductive, EM)",
        lambda rows: partly(
            {views: gain.mean > 0 for views, gain in _gains_over_network(rows).items()},
            "holds if the views are not {failed} alone, which no augmentation beats",
            " or ",
        ),
        _errors_with_network,
    ),
)


def _block(rows: Rows, where: Mapping[str, object], engine: str) -> str:
    keys = _keys(rows)
    alone = select(rows, method="network", reading=where["reading"])  # scored on fresh inputs only
    body = [["no augmentation", spread(alone, "mse_1").text(), *["-"] * len(keys)]] if alone else []
    body += [
        [_name(views, True), spread(select(rows, method="uniform", views=views, **where), "mse_1").text()]
        + ["-"] * len(keys)
        for views in SETS
    ]
    for views in SETS:
        fitted = select(rows, method="vb", engine=engine, views=views, **where)
        body.append([_name(views, False), "-", *(spread(fitted, key).text() for key in keys)])
    return markdown_table(["strategy", "uniform", *(f"step {_step(key)}" for key in keys)], body)


def _paper_block(distribution: str) -> str:
    paper = {views: [Spread(*entry).text() for entry in entries] for views, entries in PAPER[distribution].items()}
    body = [[_name(views, True), entries[0], *["-"] * 4] for views, entries in paper.items()]
    body += [[_name(views, False), *entries] for views, entries in paper.items()]
    return "**The paper**\n\n" + markdown_table(["strategy", *(f"step {step}" for step in _STEPS)], body)


def _name(views: str, uniform: bool) -> str:
    return f"{len(SETS[views])}-{'TTA' if uniform else 'VB-TTA'} ({views})"


def _uniform(rows: Rows, views: str, **changed: object) -> list[Row]:
    return select(rows, method="uniform", views=views, **_where(rows, changed))


def _vb(rows: Rows, views: str, engine: str = "em", **changed: object) -> list[Row]:
    return select(rows, method="vb", engine=engine, views=views, **_where(rows, changed))


def _where(rows: Rows, changed: Mapping[str, object]) -> dict[str, object]:
    """Conditions of the main protocol, some of them changed."""
    most = max(int(number(row, "draws")) for row in rows if "draws" in row)
    return {"draws": most, "fitted_on": "out-of-fold", "reading": "inductive", **changed}


def _keys(rows: Rows) -> list[str]:
    """The columns of errors, one a reported step."""
    row = next(row for row in rows if row["method"] == "vb")
    return [key for key in row if key.startswith("mse_")]


def _middle(rows: Rows) -> str:
    """The column of the first reported step after the start: 50 in the paper."""
    return _keys(rows)[1]


def _last(rows: Rows) -> str:
    return _keys(rows)[-1]


def _step(key: str) -> int:
    return int(key.removeprefix("mse_"))


def item(distribution: Literal["gaussian", "gamma"], inputs: str) -> Item[Config, Trial]:
    """Table 2 or 3."""
    small, usual = replace(SMALL, distribution=distribution), Setting(distribution)
    return Item(
        f"Artificial regression, {inputs}",
        3,
        {
            "smoke": Config(small, seeds=1, draws=4, steps=(1, 10, 20)),
            "cpu": Config(usual),
            "paper": Config(replace(usual, test_instances=10_000), seeds=10, draws=256),
        },
        _trials,
        _run_trial,
        _table,
        _CLAIMS,
        lambda rows: _cells(rows, distribution),
    )
