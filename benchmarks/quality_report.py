"""The quality benchmark's outcome for people: a page of tables and one figure."""

from __future__ import annotations

from typing import Any

from reproduction.tallies import plural
from vbtta._support.checks import require

__all__ = ["figure", "markdown", "point_metric", "short_title", "strong_figure", "strong_table", "strong_text"]

_TITLES = {
    "cifar10n": "CIFAR-10N: three human labels an image, clean test labels",
    "utkface": "UTKFace: age, with a second label of standard deviation 5 years",
    "food101": "Food-101, ten classes: one label an image",
    "mnist1000": "MNIST, 1,000 training digits: three simulated annotators of accuracy 0.9, 0.8 and 0.7",
}
_SEEN = (
    "Choices were made on other images, but the test images of networks of seed 0 were scored with earlier defaults "
    "too, before these were final."
)
_SHORT = {"cifar10n": "CIFAR-10N", "utkface": "UTKFace", "food101": "Food-101 (10)", "mnist1000": "MNIST (1,000)"}
_PRETRAINED = "-pretrained"
_LARGER_IS_BETTER = ("accuracy",)
# Why a promise was not kept, by data set and the beginning of the promise.
_REASONS = {
    ("mnist1000", "the default policy has the best NLL"): (
        "The mixture with weights by input is one of the stack's members; with 1,000 inputs the prior and the other "
        "members, which are nearly as good on held-out labels, keep some of the weight."
    ),
    ("food101-light", "with half of the views"): (
        "`select_views` searches for the log score, which is better with half of the views; accuracy is not its aim."
    ),
}


def markdown(outcome: dict[str, Any]) -> str:
    """All tables, each with its verdicts."""
    made = outcome["provenance"]
    parts = [
        "# Pretrained networks"
        if all(_PRETRAINED in name for name in outcome["data_sets"])
        else "# Quality on real data",
        (
            f"Networks that never saw the images below, 25 deterministic views; scored on the {outcome['part']} part "
            "against the true labels. Values are means over seeds and calibration samples; differences have 95 % "
            "intervals from a paired bootstrap over images and over networks, or over calibration samples of one "
            "network (over images alone where there is one sample; those of ECE, which is never negative, lean low). "
            "`vbtta` is `fit_policy` with its defaults, `vbtta-half` is `select_views` with half of the views, "
            "`vbtta-input` the mixture with weights by input, `vbtta-sequential` `fit_sequential`, whose number of "
            "views is the mean over images. Bold: the best of a column."
        ),
        "![NLL of every method minus the default policy's](figure.svg)",
    ]
    if any("data_sha256" in result for result in outcome["data_sets"].values()):
        parts.insert(2, _SEEN)
    if any(_PRETRAINED in name for name in outcome["data_sets"]):
        parts += [
            STRONG_TITLE,
            strong_text(outcome),
            strong_table(outcome),
            "![Changes by method; hollow: fewer calibration images](strong.svg)",
        ]
    for name, result in outcome["data_sets"].items():
        parts += [f"## {_long(name)}", _size(result), _verdicts(name, result), _values(result), _differences(result)]
    if "note" in outcome:
        parts.append(outcome["note"])
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    parts.append(
        f"Made at {made['time']} from commit {made['git'][:12]} with {versions}. Hashes of the predictions, weights "
        "and warnings are in results.json."
    )
    return "\n\n".join(parts) + "\n"


def figure(outcome: dict[str, Any]) -> Any:
    """A panel a data set: NLL of every method minus the default policy's, with intervals."""
    sets = outcome["data_sets"]
    new = require("matplotlib.figure", "cli").Figure(figsize=(4.2 * max(1, len(sets)), 5.2), layout="constrained")
    for place, (name, data) in enumerate(sets.items()):
        axes = new.add_subplot(1, len(sets), place + 1)
        rows = sorted(data["methods"], key=lambda row: -row["minus_vbtta"]["nll"][0])
        for height, row in enumerate(rows):
            value, low, high = row["minus_vbtta"]["nll"]
            colour = "tab:blue" if row["baseline"] else "tab:orange"
            axes.plot([low, high], [height, height], color=colour, linewidth=1.5)
            axes.plot([value], [height], "o", color=colour, markersize=4)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=0.02)
        axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(short_title(name), fontsize=10)
        axes.set_xlabel("NLL minus vbtta's", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return new


STRONG_TITLE = "## Does it still help a pretrained network, and what hurts it?"
# Accuracy or MAE without augmentation that a fine-tuned network should have, from the numbers of the paper.
_GOALS = {"cifar10n": 0.889, "food101": 0.783, "utkface": 6.4}


def strong_text(outcome: dict[str, Any]) -> str:
    """What helps and what hurts, counted from the intervals."""
    lines = []
    for name, result in outcome["data_sets"].items():
        better, worse = (
            [row["method"] for row in result["methods"] if _verdict(row, result) == sign] for sign in (1, -1)
        )
        point = point_metric(result)
        lines.append(
            f"* {short_title(name)}, {_number(_by_name(result)['original']['values'][point], point)} without "
            f"augmentation{_goal(name, result)}: "
            f"better {_title(point)} with {_listed(better)}; worse with {_listed(worse)}"
        )
    return (
        "Beyond the 95 % interval, against the same network without augmentation (`small` was trained from scratch, "
        "`pretrained` is a fine-tuned EfficientNet-Lite0):\n\n" + "\n".join(lines)
    )


def strong_table(outcome: dict[str, Any]) -> str:
    """Change of accuracy (MAE) against no augmentation, and of NLL against it with a temperature, by method."""
    sets = outcome["data_sets"]
    methods = list(dict.fromkeys(row["method"] for result in sets.values() for row in result["methods"]))
    rows = []
    for method in methods:
        cells = [method]
        for result in sets.values():
            row = _by_name(result).get(method)
            point = point_metric(result)
            cells.append(
                ""
                if row is None
                else f"{_marked(row['minus_original'][point], point)}, {_marked(row['minus_tempered']['nll'], 'nll')}"
            )
        rows.append(cells)
    return (
        "Accuracy (points) or MAE (years) minus `original`'s, and NLL minus that of `original+t` (regression: "
        "`original`); bold: better beyond the interval, struck: worse beyond it.\n\n"
        + _table(["method", *map(short_title, sets)], rows)
    )


def strong_figure(outcome: dict[str, Any]) -> Any:
    """A column a data set: changes of accuracy or MAE, and of NLL; hollow: with fewer calibration images."""
    sets = outcome["data_sets"]
    bases = [name for name in sets if _PRETRAINED in name and "@" not in name]
    new = require("matplotlib.figure", "cli").Figure(figsize=(4.2 * len(bases), 9.5), layout="constrained")
    for column, base in enumerate(bases):
        cases = {kind: sets[kind] for kind in (*(name for name in sets if name.startswith(f"{base}@")), base)}
        methods = [row["method"] for row in sets[base]["methods"]][::-1]
        for line, (reference, pick) in enumerate((("original", point_metric), ("tempered", lambda result: "nll"))):
            axes = new.add_subplot(2, len(bases), line * len(bases) + column + 1)
            for kind, result in cases.items():
                whole = kind == base
                metric = pick(result)
                scale = 100 if metric == "accuracy" else 1
                for height, method in enumerate(methods):
                    row = _by_name(result).get(method)
                    if row is None:
                        continue
                    value, low, high = (scale * number for number in row[f"minus_{reference}"][metric])
                    place = height + (0.15 if whole else -0.15)
                    colour = "tab:blue" if row["baseline"] else "tab:orange"
                    axes.plot([low, high], [place, place], color=colour, linewidth=1.2, alpha=1 if whole else 0.5)
                    filling = colour if whole else "white"
                    axes.plot([value], [place], "o", color=colour, markersize=4, markerfacecolor=filling)
            axes.axvline(0, color="0.6", linewidth=0.8)
            if metric == "nll":
                axes.set_xscale("symlog", linthresh=0.2)
            axes.set_yticks(range(len(methods)), methods, fontsize=8)
            axes.tick_params(axis="x", labelsize=8)
            axes.set_title(short_title(base), fontsize=10)
            unit = "points" if metric == "accuracy" else "years" if metric == "mae" else "nats"
            against = "no augmentation" if line == 0 or result["task"] == "regression" else "no augmentation, tempered"
            axes.set_xlabel(f"{_title(metric).removesuffix(' (%)')} minus {against} ({unit})", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    return new


def _goal(key: str, result: dict[str, Any]) -> str:
    """Whether a fine-tuned network is as good as it should be."""
    base, point = _base(key), point_metric(result)
    if _PRETRAINED not in key or base not in _GOALS:
        return ""
    value = _by_name(result)["original"]["values"][point]
    met = value >= _GOALS[base] if point in _LARGER_IS_BETTER else value <= _GOALS[base]
    by = f"missed by {_number(abs(value - _GOALS[base]), point)}"
    if point == "accuracy":
        error = (value * (1 - value) / result["n_test"]) ** 0.5
        by += f"; the standard error from {result['n_test']:,} test images is {_number(error, point)}"
    return f" (goal {_number(_GOALS[base], point)}: {'met' if met else by})"


def point_metric(result: dict[str, Any]) -> str:
    """Accuracy, or the absolute error."""
    return "accuracy" if result["task"] == "classification" else "mae"


def _verdict(row: dict[str, Any], result: dict[str, Any]) -> int:
    """1: better than no augmentation beyond the interval, -1: worse, 0: neither."""
    point = point_metric(result)
    return _sign(row["minus_original"][point], point)


def _sign(difference: tuple[float, float, float], metric: str) -> int:
    _, low, high = difference
    sign = 1 if low > 0 else -1 if high < 0 else 0
    return sign if metric in _LARGER_IS_BETTER else -sign


def _marked(difference: tuple[float, float, float], metric: str) -> str:
    digits = f"{100 * difference[0]:+.1f}" if metric == "accuracy" else f"{difference[0]:+.3f}"
    mark = {1: "**", 0: "", -1: "~~"}[_sign(difference, metric)]
    return f"{mark}{digits}{mark}"


def _by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in result["methods"]}


def _listed(methods: list[str]) -> str:
    return ", ".join(f"`{method}`" for method in methods) or "none"


def short_title(key: str) -> str:
    """A data set with its network and, unless it is the usual one, the number of calibration images."""
    return f"{_SHORT.get(_base(key), _base(key))} {_network(key)}"


def _base(key: str) -> str:
    """A data set, whatever its network and number of calibration images."""
    return key.partition("@")[0].removesuffix(_PRETRAINED).removesuffix("-light")


def _long(key: str) -> str:
    return f"{_TITLES.get(_base(key), _base(key))}, {_network(key)}"


def _network(key: str) -> str:
    """The kind of network and, unless it is the usual one, the number of calibration images."""
    name, _, size = key.partition("@")
    kind = "pretrained" if _PRETRAINED in name else "small" if _base(key) in _SHORT else "own"
    return f"{kind}, {size} images" if size else kind


def _size(result: dict[str, Any]) -> str:
    seeds = f"{plural(len(result['seeds']), 'network')} (seeds {', '.join(map(str, result['seeds']))})"
    sample = (
        f"{result['calibration']:,} calibration images, {plural(len(result['trials']), 'calibration sample')} in all"
    )
    seconds = [value for value in result.get("training_seconds", []) if value is not None]
    minutes = f" Training took {max(seconds) / 60:.0f} processor minutes at most." if seconds else ""
    return f"{result['n_test']:,} test images; {seeds}; {sample}.{minutes}"


def _verdicts(name: str, result: dict[str, Any]) -> str:
    lines = []
    for verdict in result["verdicts"]:
        line = f"* {'yes' if verdict['holds'] else '**no**'}: {verdict['claim']} ({verdict['evidence']})"
        reasons = [
            text for (place, claim), text in _REASONS.items() if place == name and verdict["claim"].startswith(claim)
        ]
        lines.append(line if verdict["holds"] or not reasons else f"{line}. {reasons[0]}")
    return "\n".join(lines)


def _values(result: dict[str, Any]) -> str:
    metrics = result["metrics"]
    best = {metric: _best([row["values"][metric] for row in result["methods"]], metric) for metric in metrics}
    rows = []
    for row in result["methods"]:
        cells = [row["method"]]
        for metric in metrics:
            text = _number(row["values"][metric], metric)
            cells.append(f"**{text}**" if text == _number(best[metric], metric) else text)
        rows.append([*cells, f"{row['views']:.1f}", f"{row['fit_seconds']:.1f}"])
    return _table(["method", *map(_title, metrics), "views", "fit (s)"], rows)


def _differences(result: dict[str, Any]) -> str:
    metrics = [metric for metric in result["metrics"] if metric in ("nll", "accuracy", "mae", "ece", "crps")]
    rows = [
        [row["method"], *(_interval(row["minus_vbtta"][metric], metric) for metric in metrics)]
        for row in result["methods"]
        if row["method"] != "vbtta"
    ]
    return "Minus `vbtta` (bold where the interval excludes 0):\n\n" + _table(["method", *map(_title, metrics)], rows)


def _interval(difference: tuple[float, float, float], metric: str) -> str:
    value, low, high = difference
    text = f"{_signed(value, metric)} [{_signed(low, metric)}, {_signed(high, metric)}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _best(values: list[float], metric: str) -> float:
    if metric == "coverage":
        return min(values, key=lambda value: abs(value - 0.9))
    return max(values) if metric in _LARGER_IS_BETTER else min(values)


def _number(value: float, metric: str) -> str:
    return f"{100 * value:.2f}" if metric in ("accuracy", "ece", "coverage") else f"{value:.4f}"


def _signed(value: float, metric: str) -> str:
    return f"{100 * value:+.2f}" if metric in ("accuracy", "ece", "coverage") else f"{value:+.4f}"


def _title(metric: str) -> str:
    names = {"accuracy": "accuracy (%)", "ece": "ECE (%)", "coverage": "90 % coverage (%)", "brier": "Brier"}
    return names.get(metric, metric.upper())


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
