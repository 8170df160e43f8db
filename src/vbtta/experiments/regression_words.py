"""Tables 2 and 3 in words: the paper's numbers, ours beside them, and what becomes of its claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vbtta.experiments.item import Cell, Claim, Row
from vbtta.experiments.regression import SETS, Config
from vbtta.experiments.report import markdown_table
from vbtta.experiments.tallies import Difference, agreement, number, paired, select, spread

__all__ = ["PAPER", "cells", "claims", "table"]

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
_MAIN: dict[str, Any] = {"fitted_on": "out-of-fold", "reading": "inductive"}
_BLOCKS: tuple[tuple[str, dict[str, Any], str], ...] = (
    # title, what differs from the main protocol, engine
    ("Inductive: fresh inputs, {draws} draws, weights fitted out-of-fold, EM", {}, "em"),
    ("The same by ADVI", {}, "advi"),
    ('The same by EM with offsets only, no rescaling (`link="shift"`)', {}, "em, offsets only"),
    ("Transductive: the labelled instances, views and labels together, EM", {"reading": "transductive"}, "em"),
    ("Transductive, ADVI", {"reading": "transductive"}, "advi"),
    ("Ablation: one draw a view, inductive, EM", {"draws": 1}, "em"),
    ("Ablation: one draw a view, transductive, EM", {"draws": 1, "reading": "transductive"}, "em"),
    ("Ablation: fitted on the training views, inductive, EM", {"fitted_on": "training"}, "em"),
    (
        "Ablation: fitted on the training views, transductive, EM",
        {"fitted_on": "training", "reading": "transductive"},
        "em",
    ),
    (
        "Ablation: fitted on the training views, one draw, transductive, EM",
        {"fitted_on": "training", "reading": "transductive", "draws": 1},
        "em",
    ),
)


def table(rows: Sequence[Row], config: Config) -> str:
    """Markdown: the paper's rows for every reading, engine and ablation."""
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


def cells(rows: Sequence[Row], distribution: str) -> list[Cell]:
    """Return every cell of the paper that we have too, in both readings: uniform TTA, and VB-TTA by EM."""
    found = []
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
                    found.append(Cell(f"{what}, {reading}", paper, ours.mean, ours.sd, verdict))
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Judge what the paper reads from the table."""
    last = _last(rows)
    return [
        _beats_uniform(rows, last),
        _beats_uniform_elsewhere(rows, last),
        _more_views(rows, last),
        _early(rows, last),
        _uniform_with_more_views(rows),
        _what_gains(rows, last),
        _beats_the_network(rows, last),
    ]


def _beats_uniform(rows: Sequence[Row], last: int) -> Claim:
    gains = {engine: _gains(rows, {}, engine, last) for engine in ("em", "advi", "em, offsets only")}
    won = {engine: all(gain.mean > 0 for gain in found.values()) for engine, found in gains.items()}
    verdict = "does not hold"
    if won["em"] and won["advi"]:
        offsets = all(gain.mean > 2 * gain.error for gain in gains["em, offsets only"].values())
        verdict = "holds" if offsets else "holds if a view may be rescaled (the affine link)"
    words = "; ".join(f"{engine}: {_words(found)}" for engine, found in gains.items())
    return Claim(
        f"VB-TTA after {last} steps beats uniform TTA in every row (inductive)",
        verdict,
        f"fall of the error {words}",
    )


def _beats_uniform_elsewhere(rows: Sequence[Row], last: int) -> Claim:
    where: dict[str, dict[str, Any]] = {
        "transductive": {"reading": "transductive"},
        "one draw, inductive": {"draws": 1},
        "one draw, transductive": {"draws": 1, "reading": "transductive"},
        "fitted on training views, inductive": {"fitted_on": "training"},
    }
    gains = {name: _gains(rows, changed, "em", last) for name, changed in where.items()}
    won = [name for name, found in gains.items() if all(gain.mean > 0 for gain in found.values())]
    lost = [name for name in gains if name not in won]
    return Claim(
        "The same in the other readings and ablations (EM)",
        "holds" if not lost else f"holds if one leaves out: {', '.join(lost)}" if won else "does not hold",
        "fall of the error " + "; ".join(f"{name}: {_words(found)}" for name, found in gains.items()),
    )


def _beats_the_network(rows: Sequence[Row], last: int) -> Claim:
    plain = select(rows, method="network")
    gains = {
        views: paired(_column(plain, "mse_1"), _column(_vb(rows, {}, "em", views), f"mse_{last}"), "value")
        for views in SETS
    }
    won = [views for views, gain in gains.items() if gain.mean > 0]
    lost = [views for views in gains if views not in won]
    verdict = f"holds if the views are not {' or '.join(lost)} alone, which no augmentation beats"
    return Claim(
        "Not in the paper: VB-TTA beats the network without augmentation (inductive, EM)",
        "holds" if not lost else verdict if won else "does not hold",
        f"no augmentation {spread(plain, 'mse_1').text(4)}, uniform TTA {_means(rows, 'uniform', 'mse_1')}, VB-TTA "
        f"{_means(rows, 'vb', f'mse_{last}')}; fall of the error from no augmentation to VB-TTA: {_words(gains)}",
    )


def _means(rows: Sequence[Row], method: str, key: str) -> str:
    """Mean errors by set of views."""
    found = {views: _uniform(rows, {}, views) if method == "uniform" else _vb(rows, {}, "em", views) for views in SETS}
    return " / ".join(f"{spread(chosen, key).mean:.4f} ({views})" for views, chosen in found.items())


def _more_views(rows: Sequence[Row], last: int) -> Claim:
    found = {}
    for reading in ("inductive", "transductive"):
        for engine in ("em", "advi"):
            six = _vb(rows, {"reading": reading}, engine, "mixup + cutmix")
            for views in ("mixup", "cutmix"):
                three = _vb(rows, {"reading": reading}, engine, views)
                found[f"{reading}, {engine}, against 3 {views}"] = paired(three, six, f"mse_{last}")
    inductive = all(gap.mean > 0 for name, gap in found.items() if name.startswith("inductive"))
    training = [
        paired(
            _vb(rows, {"fitted_on": "training"}, "em", views),
            _vb(rows, {"fitted_on": "training"}, "em", "mixup + cutmix"),
            f"mse_{last}",
        )
        for views in ("mixup", "cutmix")
    ]
    verdict = "does not hold"
    if inductive:
        verdict = "holds" if all(gap.mean > 0 for gap in training) else "holds if weights are fitted out-of-fold"
    words = "; ".join(f"{name} {gap.text()}" for name, gap in found.items() if "advi" not in name)
    return Claim(
        "6-VB-TTA is better than either 3-VB-TTA",
        verdict,
        f"the three views' error minus the six's: {words}; fitted on training views against mixup "
        f"{training[0].text()}, against cutmix {training[1].text()}",
    )


def _early(rows: Sequence[Row], last: int) -> Claim:
    middle = _middle(rows)
    shares, later = {}, {}
    for engine in ("em", "advi"):
        for views in SETS:
            before = spread(_uniform(rows, {}, views), "mse_1").mean
            found = _vb(rows, {}, engine, views)
            first, there, end = (spread(found, f"mse_{step}").mean for step in (1, middle, last))
            shares[f"{engine} {views}"] = _share(before, there, end)
            later[f"{engine} {views}"] = _share(first, there, end)
    good = all(share is not None and share >= 0.5 for share in shares.values())
    return Claim(
        f"Most of the gain is there by step {middle}",
        "holds" if good else "does not hold",
        f"share of the fall from uniform TTA: {_percent(shares)}; of the fall after step 1: {_percent(later)}",
    )


def _share(before: float, there: float, end: float) -> float | None:
    """How much of a fall has happened; None where nothing falls."""
    return (before - there) / (before - end) if before > end else None


def _percent(shares: dict[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'no fall' if share is None else f'{100 * share:.0f} %'}" for name, share in shares.items()
    )


def _uniform_with_more_views(rows: Sequence[Row]) -> Claim:
    gaps = {
        views: paired(_uniform(rows, {}, "mixup + cutmix"), _uniform(rows, {}, views), "mse_1")
        for views in ("mixup", "cutmix")
    }
    worse = all(gap.mean > 0 for gap in gaps.values())
    return Claim(
        "Without optimised weights, more views are worse (6-TTA against 3-TTA)",
        "holds" if worse else "does not hold",
        "the six's error minus the three's: "
        + ", ".join(f"{views} {gap.text()}" for views, gap in gaps.items())
        + "; squared error is convex, so the average of both averages cannot be worse than the worse of them",
    )


def _what_gains(rows: Sequence[Row], last: int) -> Claim:
    parts, shares = [], []
    for views in SETS:
        found = _vb(rows, {}, "em", views)
        plain = spread(_uniform(rows, {}, views), "mse_1").mean
        first, end = spread(found, "mse_1").mean, spread(found, f"mse_{last}").mean
        share = _share(plain, first, end)
        shares.append(share)
        calibration = "" if share is None else f" ({100 * (1 - share):.0f} % of the fall is the weights')"
        parts.append(f"{views} {plain:.4f} -> {first:.4f} -> {end:.4f}{calibration}")
    mostly = all(share is not None and share <= 0.5 for share in shares)
    return Claim(
        "The gain comes from the weights",
        "holds" if mostly else "does not hold",
        "uniform -> equal weights on calibrated views (step 1) -> inferred weights: " + "; ".join(parts),
    )


def _block(rows: Sequence[Row], where: dict[str, Any], engine: str) -> str:
    steps = _steps(rows)
    alone = select(rows, method="network", reading=where["reading"])  # scored on fresh inputs only
    body = [["no augmentation", spread(alone, "mse_1").text(), *["-"] * len(steps)]] if alone else []
    body += [
        [_name(views, True), spread(select(rows, method="uniform", views=views, **where), "mse_1").text()]
        + ["-"] * len(steps)
        for views in SETS
    ]
    for views in SETS:
        found = select(rows, method="vb", engine=engine, views=views, **where)
        body.append([_name(views, False), "-", *(spread(found, f"mse_{step}").text() for step in steps)])
    return markdown_table(["strategy", "uniform", *(f"step {step}" for step in steps)], body)


def _paper_block(distribution: str) -> str:
    body = []
    for views, numbers in PAPER[distribution].items():
        body.append([_name(views, True), _cell(numbers[0]), *["-"] * 4])
    for views, numbers in PAPER[distribution].items():
        body.append([_name(views, False), *(_cell(one) for one in numbers)])
    return "**The paper**\n\n" + markdown_table(["strategy", *(f"step {step}" for step in _STEPS)], body)


def _cell(entry: tuple[float, float]) -> str:
    return f"{entry[0]:.3f} (± {entry[1]:.3f})"


def _name(views: str, uniform: bool) -> str:
    return f"{len(SETS[views])}-{'TTA' if uniform else 'VB-TTA'} ({views})"


def _gains(rows: Sequence[Row], changed: dict[str, Any], engine: str, last: int) -> dict[str, Difference]:
    """Uniform TTA's error minus VB-TTA's, by set of views."""
    found = {}
    for views in SETS:
        before, after = _uniform(rows, changed, views), _vb(rows, changed, engine, views)
        found[views] = paired(_column(before, "mse_1"), _column(after, f"mse_{last}"), "value")
    return found


def _column(rows: Sequence[Row], key: str) -> list[Row]:
    """One column under a common name, so that different columns can be compared."""
    return [{"value": number(row, key)} for row in rows]


def _words(gains: dict[str, Difference]) -> str:
    return ", ".join(
        f"{views} {gain.mean:+.4f} (± {gain.error:.4f}; {gain.positive} of {gain.trials})"
        for views, gain in gains.items()
    )


def _uniform(rows: Sequence[Row], changed: dict[str, Any], views: str) -> list[Row]:
    return select(rows, method="uniform", views=views, **_where(rows, changed))


def _vb(rows: Sequence[Row], changed: dict[str, Any], engine: str, views: str) -> list[Row]:
    return select(rows, method="vb", engine=engine, views=views, **_where(rows, changed))


def _where(rows: Sequence[Row], changed: dict[str, Any]) -> dict[str, Any]:
    """Conditions of the main protocol, some of them changed."""
    most = max(int(number(row, "draws")) for row in rows if "draws" in row)
    return {"draws": most, **_MAIN, **changed}


def _steps(rows: Sequence[Row]) -> list[int]:
    row = next(row for row in rows if row["method"] == "vb")
    return [int(key.removeprefix("mse_")) for key in row if key.startswith("mse_")]


def _last(rows: Sequence[Row]) -> int:
    return _steps(rows)[-1]


def _middle(rows: Sequence[Row]) -> int:
    """The first step that is reported after the start: 50 in the paper."""
    return _steps(rows)[1]
