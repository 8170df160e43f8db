"""Table 4 in words: the paper's numbers, ours beside them, and what becomes of its claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vbtta.experiments.image_setups import STRATEGIES, ImageSetup
from vbtta.experiments.item import Cell, Claim, Row
from vbtta.experiments.report import markdown_table
from vbtta.experiments.tallies import Difference, agreement, number, paired, plural, select, spread

__all__ = ["METRICS", "PAPER", "cells", "claims", "table"]

NAMES = {"cifar10n": "CIFAR-10N", "food101": "Food-101", "utkface": "UTKFace"}
METRICS = {"cifar10n": "accuracy", "food101": "accuracy", "utkface": "mae"}
FULL_WIDTH = 64  # of the usual ResNet-18
# Mean and standard deviation; accuracy, and for UTKFace the mean absolute error in years.
PAPER: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("uniform", "Mixup"): {"cifar10n": (0.887, 0.013), "food101": (0.761, 0.025), "utkface": (7.820, 2.103)},
    ("uniform", "CutMix"): {"cifar10n": (0.895, 0.014), "food101": (0.755, 0.016), "utkface": (7.451, 1.640)},
    ("uniform", "Mixup + CutMix"): {"cifar10n": (0.909, 0.010), "food101": (0.783, 0.022), "utkface": (7.409, 1.812)},
    ("mixture", "Mixup"): {"cifar10n": (0.916, 0.011), "food101": (0.779, 0.024), "utkface": (7.001, 0.625)},
    ("mixture", "CutMix"): {"cifar10n": (0.921, 0.009), "food101": (0.773, 0.015), "utkface": (6.688, 0.757)},
    ("mixture", "Mixup + CutMix"): {"cifar10n": (0.929, 0.006), "food101": (0.798, 0.010), "utkface": (6.405, 0.491)},
}


def table(rows: Sequence[Row], setups: Sequence[ImageSetup], steps: int) -> str:
    """Markdown: the paper's rows, ours, then those with the identity and the ablations."""
    there = _data_sets(rows)
    body = [["no augmentation", *_row(rows, there, "identity", "none", True)]]
    for method, strategy in PAPER:
        label = f"{_count(strategy)}-{'VB-TTA' if method == 'mixture' else 'TTA'} ({strategy})"
        paper = [f"{mean:.3f} (± {sd:.3f})" for mean, sd in (PAPER[method, strategy][name] for name in there)]
        body.append([f"{label}, paper", *paper])
        body.append([f"{label}, ours", *_row(rows, there, method, strategy, False)])
    for strategy in STRATEGIES:
        for method, label in (("uniform", "TTA"), ("mixture", "VB-TTA")):
            body.append([f"identity + {strategy}: {label}", *_row(rows, there, method, strategy, True)])
    both = "Mixup + CutMix"
    body.append([f"{both}, VB-TTA at step 1 (uniform weights)", *_row(rows, there, "mixture", both, False, last=False)])
    body.append(
        [f"{both}, VB-TTA, no model of label noise", *_row(rows, there, "mixture, no label noise", both, False)]
    )
    body.append([f"{both}, VB-TTA, views shifted only", *_row(rows, there, "mixture, shift only", both, False)])
    for with_identity in (False, True):
        label = f"{'identity + ' if with_identity else ''}{both}, VB-TTA, latent pool"
        body.append([label, *_row(rows, there, "latent pool", both, with_identity)])
    heads = ["strategy", *(f"{NAMES[name]}, {'MAE' if METRICS[name] == 'mae' else METRICS[name]}" for name in there)]
    return f"{markdown_table(heads, body)}\n\n{_caption(rows, setups, steps)}\n\n{_weights(rows, there)}"


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Rows of the paper for the data sets that were run."""
    found = []
    for (method, strategy), numbers in PAPER.items():
        for name in _data_sets(rows):
            mean, sd = numbers[name]
            first = select(rows, data_set=name)[0]
            ours = spread(_select(rows, name, method, strategy, False), METRICS[name])
            verdict = agreement(ours, mean, sd, larger_is_better=METRICS[name] == "accuracy")
            if rows[0]["synthetic"]:
                verdict = "not comparable: made-up images"
            elif name == "food101":
                verdict = "not comparable: ten of 101 classes"
            elif (width := number(first, "width")) < FULL_WIDTH:
                verdict = f"level not comparable: width {width:g} of {FULL_WIDTH}, {first['epochs']} epochs of 200"
            label = f"{_count(strategy)}-{'VB-TTA' if method == 'mixture' else 'TTA'} ({strategy})"
            found.append(Cell(f"{NAMES[name]}, {label}", mean, ours.mean, ours.sd, verdict))
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Weights against none, six views against three, spread over trials, and the unaugmented network."""
    there = _data_sets(rows)
    pairs = [(name, strategy) for name in there for strategy in STRATEGIES]
    gains = {pair: _gain(rows, pair[0], "mixture", "uniform", pair[1]) for pair in pairs}
    better = sum(gain.mean > 0 for gain in gains.values())
    always = sum(gain.positive == gain.trials for gain in gains.values())
    from_weights = {pair: _steps_gain(rows, *pair) for pair in pairs}
    growth = {name: [_growth(rows, name, method) for method in ("uniform", "mixture")] for name in there}
    narrower = [pair for pair in pairs if _sd(rows, *pair, "mixture") < _sd(rows, *pair, "uniform")]
    alone = {name: _over_identity(rows, name) for name in there}
    numbers = "; ".join(f"{NAMES[name]} {strategy} {gain.mean:+.3f}" for (name, strategy), gain in gains.items())
    return [
        Claim(
            "Optimising the weights improves on uniformly weighted TTA",
            _share({_name(pair): gain.mean > 0 for pair, gain in gains.items()}),
            f"better in {better} of {len(pairs)} comparisons on average, in every seed in {always}: {numbers} "
            "(accuracy gained, or years of error saved)",
        ),
        Claim(
            "Not in the paper: the weights themselves do it, not the calibration of the views (the same calibrated "
            "mixture at step 1 has uniform weights)",
            _share({_name(pair): gain.mean > 0 for pair, gain in from_weights.items()}),
            "step 1 to the last: "
            + "; ".join(
                f"{NAMES[name]} {strategy} {gain.mean:+.3f}" for (name, strategy), gain in from_weights.items()
            ),
        ),
        Claim(
            "Going from three views (CutMix) to six gains more with optimised than with uniform weights",
            _share({NAMES[name]: weighted > plain for name, (plain, weighted) in growth.items()}),
            "; ".join(
                f"{NAMES[name]}: uniform {plain:+.3f}, optimised {best:+.3f}" for name, (plain, best) in growth.items()
            )
            + ". (The paper's text quotes other numbers for UTKFace than its table.)",
        ),
        Claim(
            "Optimising the weights reduces the spread over trials",
            _share({_name(pair): pair in narrower for pair in pairs}),
            f"smaller standard deviation in {len(narrower)} of {len(pairs)} comparisons, over "
            f"{plural(len({row['seed'] for row in rows}), 'seed')}, which is few for a standard deviation",
        ),
        Claim(
            "Not in the paper: 6-VB-TTA is better than the network without augmentation",
            _share({NAMES[name]: without.mean > 0 for name, (without, _) in alone.items()}),
            "; ".join(
                f"{NAMES[name]} {without.mean:+.3f}, with the identity among the views {within.mean:+.3f}"
                for name, (without, within) in alone.items()
            ),
        ),
    ]


def _caption(rows: Sequence[Row], setups: Sequence[ImageSetup], steps: int) -> str:
    n_seeds = len({row["seed"] for row in rows})
    sizes = "; ".join(
        f"{NAMES[setup.sample.data_set]}: up to {setup.sample.n_training} training images of {setup.sample.size} x "
        f"{setup.sample.size} pixels, {setup.sample.n_calibration} to fit weights on, up to {setup.sample.n_test} to "
        f"test on, width {setup.network.width} (64 in the paper), {setup.network.epochs} epochs (200), "
        f"{setup.draws} draws a view"
        for setup in setups
    )
    made_up = " **Made-up images stand in for all data sets; nothing is comparable.**" if rows[0]["synthetic"] else ""
    return (
        f"Mean and standard deviation over {plural(n_seeds, 'seed')}. Differs from the paper: {sizes}.{made_up} "
        "CIFAR-10N images are cropped to their centre where smaller than 32 pixels. Food-101 is a sample of its first "
        "ten classes and **not comparable**. The network is trained on one of an image's labels, chosen at random "
        "(UTKFace: the age, or the age with noise; N(y, 5) is read as standard deviation 5). Weights are fitted on "
        "held-out training images with all their labels (three people, one label, two ages), never on test labels. "
        "Mixup and cutmix are the paper's (for cutmix a mask of Beta numbers, pixel by pixel) with alpha 0.1, 0.5 and "
        "0.9, and logits are averaged over draws. The networks were not trained on such images. VB-TTA is the mixture "
        "with temperatures (softmax link in place of the paper's probit) or affine calibration and, where images carry "
        f"several labels, a confusion matrix; {steps} plain EM updates."
    )


def _weights(rows: Sequence[Row], there: Sequence[str]) -> str:
    """Mean weights of the six views and the identity, by data set."""
    lines = []
    names = ("identity", *STRATEGIES["Mixup + CutMix"])
    for name in there:
        lists = [row["weights"] for row in _select(rows, name, "mixture", "Mixup + CutMix", True)]
        means = [sum(column) / len(column) for column in zip(*lists, strict=True)]
        lines.append([NAMES[name], *(f"{mean:.2f}" for mean in means)])
    return "Mean weights of VB-TTA over all seven views:\n\n" + markdown_table(["", *names], lines)


def _row(
    rows: Sequence[Row], there: Sequence[str], method: str, strategy: str, identity: bool, *, last: bool = True
) -> list[str]:
    found = [_select(rows, name, method, strategy, identity, last=last) for name in there]
    return [spread(part, METRICS[name]).text() if part else "" for name, part in zip(there, found, strict=True)]


def _select(
    rows: Sequence[Row], name: str, method: str, strategy: str, identity: bool, *, last: bool = True
) -> list[Row]:
    found = select(rows, data_set=name, method=method, strategy=strategy, identity=identity)
    return [row for row in found if row.get("last", last) is last]


def _gain(rows: Sequence[Row], name: str, better: str, worse: str, strategy: str) -> Difference:
    """Accuracy gained or error saved."""
    return _signed(name, _select(rows, name, better, strategy, False), _select(rows, name, worse, strategy, False))


def _signed(name: str, better: Sequence[Row], worse: Sequence[Row]) -> Difference:
    if METRICS[name] == "mae":
        return paired(worse, better, "mae")
    return paired(better, worse, METRICS[name])


def _steps_gain(rows: Sequence[Row], name: str, strategy: str) -> Difference:
    first = _select(rows, name, "mixture", strategy, False, last=False)
    return _signed(name, _select(rows, name, "mixture", strategy, False), first)


def _growth(rows: Sequence[Row], name: str, method: str) -> float:
    six, three = (_select(rows, name, method, strategy, False) for strategy in ("Mixup + CutMix", "CutMix"))
    return _signed(name, six, three).mean


def _over_identity(rows: Sequence[Row], name: str) -> tuple[Difference, Difference]:
    alone = _select(rows, name, "identity", "none", True)
    without, within = (_select(rows, name, "mixture", "Mixup + CutMix", identity) for identity in (False, True))
    return _signed(name, without, alone), _signed(name, within, alone)


def _sd(rows: Sequence[Row], name: str, strategy: str, method: str) -> float:
    return spread(_select(rows, name, method, strategy, False), METRICS[name]).sd


def _share(found: Mapping[str, bool]) -> str:
    """Say what must be left out for a claim to hold, if that is less than half."""
    failed = [name for name, holds in found.items() if not holds]
    if not failed:
        return "holds"
    return "does not hold" if 2 * len(failed) >= len(found) else f"holds if left out: {', '.join(failed)}"


def _name(pair: tuple[str, str]) -> str:
    return f"{NAMES[pair[0]]} {pair[1]}"


def _data_sets(rows: Sequence[Row]) -> list[str]:
    return [name for name in NAMES if any(row["data_set"] == name for row in rows)]


def _count(strategy: str) -> int:
    return len(STRATEGIES[strategy])
