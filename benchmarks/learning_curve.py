"""How many labels and instances are enough: the default policy on growing calibration samples.

    python -m benchmarks.learning_curve --data DATA        # writes results/learning_curve

Networks and predictions are those of the quality benchmark, pretrained ones unless others are named. Scored against
clean labels on the test part: nothing is chosen here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train_models import Part, Prepared, is_ready, prepare
from reproduction.provenance import provenance
from vbtta import metrics
from vbtta._support.checks import require
from vbtta._support.files import atomic_path
from vbtta.baselines import fit_baseline
from vbtta.data.labels import Array, LabelSets
from vbtta.fit import fit_policy
from vbtta.plotting import COLOURS
from vbtta.policy import GuardWarning

__all__ = ["curve", "figure", "main", "markdown"]

SIZES = (25, 50, 100, 200, 500, 1000, 2000)
_MANY = 500  # instances from which a sample is hardly different from the next
_SHOWN = {
    f"{name}{kind}": (f"{title}{', pretrained' if kind else ''}", shown)
    for kind in ("-pretrained", "")
    for name, title, shown in (
        ("cifar10n", "CIFAR-10N", ("nll", "accuracy", "ece")),
        ("utkface", "UTKFace", ("nll", "mae")),
    )
}
_DEFAULT = tuple(_SHOWN)[:2]
_PARTS = {"test": "test", "dev": "development"}
_AXES = {
    "nll": "negative log-likelihood",
    "accuracy": "accuracy (%)",
    "ece": "calibration error (%)",
    "mae": "absolute error (years)",
}


def curve(prepared: Prepared, sizes: Sequence[int], repeats: int, *, say: bool = True) -> dict[str, Any]:
    """Scores by number of instances and of labels each, and those of two rules that need no labels."""
    source, target = prepared.parts["calibration"], prepared.parts["test"]
    columns = np.stack([source.labels[key] for key in sorted(source.labels) if key.startswith("label_")], axis=1)
    rows = []
    for size in (size for size in sizes if size <= len(columns)):
        for each in (1, columns.shape[1]):
            for repeat in range(repeats if size < _MANY else max(1, repeats // 2)):
                rng = np.random.default_rng([size, repeat])
                chosen = np.sort(rng.permutation(len(columns))[:size])
                labels = drawn_labels(columns[chosen], each, rng, people=prepared.task == "regression")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", GuardWarning)
                    policy = fit_policy(source.predictions.take(chosen), labels, task=prepared.task, seed=repeat)
                row = {"instances": size, "labels_each": each, "repeat": repeat, **_scores(policy, target)}
                row |= {"model": type(policy.model).__name__, "guard": policy.guard.fell_back}
                rows.append(row)
                if say:
                    print(prepared.name, row, flush=True)
    rules = {
        name: _scores(fit_baseline(name, source.predictions, LabelSets.from_array(columns), task=prepared.task), target)
        for name in ("original", "uniform")
    }
    return {"task": prepared.task, "n_scored": len(target.predictions), "rows": rows, "rules": rules}


def drawn_labels(columns: Array, each: int, rng: np.random.Generator, *, people: bool) -> LabelSets:
    """One label an instance, from a column at random, or all of them."""
    if each == 1:
        return LabelSets.from_array(columns[np.arange(len(columns)), rng.integers(columns.shape[1], size=len(columns))])
    return LabelSets.from_array(columns, annotators="columns" if people else None)


def _scores(policy: Any, target: Part) -> dict[str, float]:
    prediction, truth = policy.predict(target.predictions), target.labels["clean"]
    scores = {"nll": metrics.nll(prediction.log_prob(truth))}
    if hasattr(prediction, "proba"):
        return scores | {
            "accuracy": metrics.accuracy(truth, prediction.proba),
            "ece": metrics.ece(truth, prediction.proba),
        }
    return scores | {"mae": metrics.mae(truth[:, None], prediction.mean)}


def figure(outcome: dict[str, Any]) -> Any:
    """A panel a data set and metric: means over samples, the samples as dots, and the rules without labels."""
    panels = [(name, metric) for name in outcome["data_sets"] for metric in _SHOWN[name][1] if metric != "ece"]
    new = require("matplotlib.figure", "cli").Figure(
        figsize=(7.4, 2.9 * ((len(panels) + 1) // 2)), layout="constrained"
    )
    for place, (name, metric) in enumerate(panels):
        axes, result = new.add_subplot((len(panels) + 1) // 2, 2, place + 1), outcome["data_sets"][name]
        unit = 100 if metric == "accuracy" else 1
        for colour, each in zip(COLOURS, sorted({row["labels_each"] for row in result["rows"]}), strict=False):
            rows = [row for row in result["rows"] if row["labels_each"] == each]
            sizes = sorted({row["instances"] for row in rows})
            means = [np.mean([row[metric] for row in rows if row["instances"] == size]) for size in sizes]
            label = f"vbtta, {each} label{'s' if each > 1 else ''} each"
            axes.plot(sizes, unit * np.array(means), "-", color=colour, label=label)
            axes.plot([row["instances"] for row in rows], [unit * row[metric] for row in rows], ".", ms=3, color=colour)
        for style, (rule, title) in zip(
            ("--", ":"), {"original": "no augmentation", "uniform": "uniform average"}.items(), strict=True
        ):
            axes.axhline(unit * result["rules"][rule][metric], color="0.45", ls=style, lw=1, label=title)
        axes.set_xscale("log")
        axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES], fontsize=8)
        axes.minorticks_off()
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(_SHOWN[name][0], fontsize=10)
        axes.set_xlabel("calibration instances", fontsize=9)
        axes.set_ylabel(_AXES[metric], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if metric == "nll":  # the first panel of a data set
            axes.legend(fontsize=7, framealpha=0.9, edgecolor="none")
    return new


def markdown(outcome: dict[str, Any]) -> str:
    """The outcome as a page."""
    lines = [
        "# Learning curve: how many labels and instances are enough",
        "",
        "The default policy fitted to random calibration samples of growing size, with one label an instance or all of "
        f"them, and scored against clean labels on the {_PARTS[outcome['part']]} part. Means over samples "
        f"({outcome['repeats']} a size below {_MANY} instances, {max(1, outcome['repeats'] // 2)} from there on), one "
        "network a data set (seed 0), 25 views.",
        "",
        "![Scores against the number of calibration instances](figure.svg)",
    ]
    for name, result in outcome["data_sets"].items():
        title, shown = _SHOWN[name]
        lines += [
            "",
            f"## {title}",
            "",
            f"| instances | labels each | {' | '.join(_AXES[metric] for metric in shown)} | guard fell back |",
            "| ---: | ---: | " + " | ".join("---:" for _ in shown) + " | ---: |",
        ]
        keys = sorted({(row["instances"], row["labels_each"]) for row in result["rows"]})
        for size, each in keys:
            rows = [row for row in result["rows"] if (row["instances"], row["labels_each"]) == (size, each)]
            cells = [_cell(metric, float(np.mean([row[metric] for row in rows]))) for metric in shown]
            fell = f"{sum(row['guard'] for row in rows)} of {len(rows)}"
            lines.append(f"| {size:,} | {each} | {' | '.join(cells)} | {fell} |")
        for rule, title in {"original": "no augmentation", "uniform": "uniform average"}.items():
            lines.append(
                f"| {title} | | {' | '.join(_cell(metric, result['rules'][rule][metric]) for metric in shown)} | |"
            )
    made = outcome["provenance"]
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    commit = f"commit {made['git'][:12]}{' plus uncommitted changes' if made['uncommitted_changes'] else ''}"
    return "\n".join([*lines, "", f"Made at {made['time']} from {commit} with {versions}."]) + "\n"


def _cell(metric: str, value: float) -> str:
    return f"{100 * value:.1f}" if metric in ("accuracy", "ece") else f"{value:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="The default policy on growing calibration samples.")
    parser.add_argument("names", nargs="*", help=f"data sets, by default {', '.join(_DEFAULT)}")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder of networks and predictions")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=8, help="samples of every size below 500; half as many above")
    parser.add_argument("--out", default="results/learning_curve")
    options = parser.parse_args(arguments)
    names = options.names or _DEFAULT
    if not set(names) <= set(_SHOWN):
        parser.error(f"unknown data sets {sorted(set(names) - set(_SHOWN))}; choose from {', '.join(_SHOWN)}")
    if not options.data:
        print("no data folder: pass --data or set VBTTA_DATA", file=sys.stderr)
        return 1
    missing = [name for name in names if not is_ready(name, 0, options.cache)]
    if missing:
        print(f"no network is trained yet; run python -m benchmarks.train_models {missing[0]} first", file=sys.stderr)
        return 1
    made = provenance()
    results = {
        name: curve(prepare(name, 0, options.data, options.cache), options.sizes, options.repeats) for name in names
    }
    outcome = {"provenance": made, "part": "test", "repeats": options.repeats, "data_sets": results}
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"results.json": json.dumps(outcome, indent=1) + "\n", "README.md": markdown(outcome)}
    for name, text in texts.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    with atomic_path(folder / "figure.svg") as temporary:
        figure(outcome).savefig(temporary, format="svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
