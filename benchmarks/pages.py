"""Tables and lists of README.md and the guides that show committed results.

    python -m benchmarks.pages     # writes them anew; the tests compare

A table is found by its first row; the README's list is the one below its table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_report import short_title
from reproduction import input_weights
from reproduction.tallies import markdown_table
from vbtta._support.files import atomic_path

__all__ = ["PAGES", "main", "rewritten"]

ROOT = Path(__file__).parents[1]
_SETS = {
    "cifar10n-pretrained": ("CIFAR-10N, pretrained", "three people's"),
    "food101-pretrained": ("Food-101, pretrained", "one"),
    "utkface-pretrained": ("UTKFace, age, pretrained", "two, one noisy"),
    "mnist1000": ("MNIST", "three, simulated"),
}
_METHODS = {
    "original": "no augmentation",
    "original+t": "no augmentation, one temperature",
    "uniform": "uniform average",
    "aug_tta": "learned weights (AugTTA)",
    "greedy+t": "greedy policy search, tempered",
    "bma": "averaged logistic regressions (BMA)",
    "raykar": "logistic regression with label noise (Raykar)",
    "vbtta": "**vbtta, defaults**",
}
_RIVALS = {
    **_METHODS,
    "class_tta": "learned weights by class (ClassTTA)",
    "uniform+t": "the uniform average with one temperature",
}
_SMALL = [
    ("cifar10n-light", 1, "CIFAR-10N, one label"),
    ("cifar10n-light", 3, "CIFAR-10N, three"),
    ("mnist1000", 1, "MNIST, one"),
    ("mnist1000", 3, "MNIST, three"),
    ("food101-light", 1, "Food-101, one"),
    ("utkface-light", 1, "UTKFace, one"),
    ("utkface-light", 2, "UTKFace, two"),
]


def read(name: str, file: str = "results.json") -> Any:
    """A committed document."""
    return json.loads((ROOT / "results" / name / file).read_text(encoding="utf-8"))


def compared() -> dict[str, Any]:
    """Data sets of the comparison of methods, small and pretrained networks."""
    return {**read("quality")["data_sets"], **read("strong")["data_sets"]}


def readme_table() -> str:
    """Accuracy or absolute error, and NLL, of the main methods."""
    comparisons = compared()
    rows: dict[str, dict[str, Any]] = {name: _rows(comparisons[name]) for name in _SETS}
    best = {
        name: min(rows[name][method]["values"]["nll"] for method in _METHODS if method in rows[name]) for name in _SETS
    }
    body = [
        ["labels an image", *(labels for _, labels in _SETS.values())],
        ["networks", *(str(len(comparisons[name]["seeds"])) for name in _SETS)],
    ]
    for method, words in _METHODS.items():
        cells = [words]
        for name in _SETS:
            if method not in rows[name]:
                cells.append("–")
                continue
            value = rows[name][method]["values"]
            nll = f"**{value['nll']:.3f}**" if value["nll"] == best[name] else f"{value['nll']:.3f}"
            cells.append(
                f"{100 * value['accuracy']:.1f}, {nll}" if "accuracy" in value else f"{value['mae']:.2f}, {nll}"
            )
        body.append(cells)
    return markdown_table(["", *(title for title, _ in _SETS.values())], body)


def readme_list() -> str:
    """What the README says about the results."""
    return "\n".join(f"- {sentence}" for sentence in _sentences())


def _sentences() -> Iterator[str]:
    comparisons = compared()
    yield (
        "The likelihood gains most where several people labelled each image: most other methods take their answers for "
        f"the truth. With one label an image (Food-101) it {_against_best(comparisons['food101-pretrained'])}."
    )
    yield _accuracy(comparisons)
    images = _rows(comparisons["cifar10n-pretrained"])
    nll = {method: images[method]["values"]["nll"] for method in ("original+t", "original_noise", "vbtta")}
    tempered, noise, views = nll.values()
    yield (
        f"On CIFAR-10N it gains {tempered - views:.3f} nats over one temperature. The model of label noise gives "
        f"{tempered - noise:.3f} of them, the views {noise - views:.3f}. Raykar's method models the noise too, and "
        f"{_both(images, _rows(comparisons['cifar10n-pretrained@100']))}."
    )
    labels = read("cifar10n")["labels"]
    consensus, majority = (100 * np.mean([row[key] for row in labels]) for key in ("consensus", "majority"))
    yield (
        f"Consensus labels of CIFAR-10N are right for {consensus:.1f} % of the images, against {majority:.1f} % for "
        "the majority vote ([results](results/cifar10n/README.md))."
    )
    few = [_few(comparisons, name) for name in _SETS if f"{name}@100" in comparisons]
    better = "; ".join(text for text in few if text)
    yield f"With 100 images {better or 'no other method has a better likelihood beyond its interval'}."
    yield _few_labels()


def _few_labels() -> str:
    """The largest mean losses to the raw network over small samples, of likelihood and of accuracy or error."""
    cells: dict[tuple[str, str, int, int], list[float]] = {}
    for row in read("small", "rows.json")["rows"]:
        for score in ("nll", "error") if row["size"] <= 50 else ():
            kind = row["task"] if score == "error" else score
            cell = cells.setdefault((kind, row["data"], row["labels"], row["size"]), [])
            cell.append(row["default"][score] - row["raw"][score])
    means = {cell: float(np.mean(losses)) for cell, losses in cells.items()}
    nll, points, years = (
        max(0.0, *(mean for cell, mean in means.items() if cell[0] == kind))
        for kind in ("nll", "classification", "regression")
    )
    return (
        "With [10 to 50 labelled inputs](results/small/README.md) it stays near the network with one temperature or "
        f"scale: in the mean over samples it loses at most {nll:.4f} nats, {points:.2f} points of accuracy and "
        f"{years:.2f} years."
    )


def _both(many: dict[str, Any], few: dict[str, Any]) -> str:
    """How Raykar's method does with 1,000 and with 100 images."""
    with_many, with_few = (_change(rows["raykar"]["minus_vbtta"]["nll"]) for rows in (many, few))
    if with_many == with_few == "is level":
        return "is as good within its interval, with 1,000 images and with 100"
    return f"{with_many} with 1,000 images and {with_few} with 100"


def _against_best(result: dict[str, Any]) -> str:
    value, low, high = _rows(result)[result["best_baseline"]]["minus_vbtta"]["nll"]
    rival = _RIVALS.get(result["best_baseline"], result["best_baseline"])
    if low <= 0 <= high:
        return f"is as good as the best of them, {rival}"
    return f"is {'better' if value > 0 else 'worse'} than the best of them, {rival}, by {_range(value, low, high)} nats"


def _accuracy(comparisons: dict[str, Any]) -> str:
    lost = [name for name, result in comparisons.items() if not result["verdicts"][1]["holds"]]
    if not lost:
        return "Accuracy is that of the best other method everywhere, within its interval."
    return (
        f"Accuracy is that of the best other method, within its interval, except on {' and '.join(map(_place, lost))}."
    )


def _place(key: str) -> str:
    """A data set and, unless it is the usual one, the number of calibration images."""
    name, _, size = key.partition("@")
    title = _SETS[name][0].partition(",")[0] if name in _SETS else short_title(name)
    return f"{title} with {size} images" if size else title


def _change(difference: tuple[float, float, float]) -> str:
    """What a method's likelihood is against the default's."""
    value, low, high = difference
    return (
        "is level"
        if low <= 0 <= high
        else f"is {'worse' if value > 0 else 'better'} by {_range(value, low, high)} nats"
    )


def _range(value: float, low: float, high: float) -> str:
    ends = sorted((abs(low), abs(high)))
    return f"{abs(value):.3f} ({ends[0]:.3f} to {ends[1]:.3f})"


def _few(comparisons: dict[str, Any], name: str) -> str:
    """A baseline that is better than the default beyond the interval, if there is one."""
    result = comparisons[f"{name}@100"]
    value, low, high = _rows(result)[result["best_baseline"]]["minus_vbtta"]["nll"]
    rival, data = _RIVALS.get(result["best_baseline"], result["best_baseline"]), _SETS[name][0].partition(",")[0]
    return f"{rival} has the better likelihood on {data}, by {_range(value, low, high)} nats" if high < 0 else ""


def _rows(result: dict[str, Any]) -> dict[str, Any]:
    return {row["method"]: row for row in result["methods"]}


def small_table() -> str:
    """The default minus the raw network on small samples."""
    rows = read("small", "rows.json")["rows"]
    body = []
    for size in sorted({row["size"] for row in rows}):
        cells = [str(size)]
        for data, each, _ in _SMALL:
            cell = [row for row in rows if (row["data"], row["labels"], row["size"]) == (data, each, size)]
            cells.append(f"{np.mean([row['default']['nll'] - row['raw']['nll'] for row in cell]):+.3f}")
        body.append(cells)
    return markdown_table(["labelled inputs", *(words for _, _, words in _SMALL)], body)


def curve_table() -> str:
    """The default on growing samples, by pretrained networks."""
    sets = read("learning_curve")["data_sets"]
    images, faces = sets["cifar10n-pretrained"], sets["utkface-pretrained"]

    def cells(size: int | None) -> list[str]:
        shown = []
        for result, point, each in ((images, "accuracy", 1), (images, "accuracy", 3), (faces, "mae", 1)):
            rows = [result["rules"]["original"]]
            if size is not None:
                rows = [row for row in result["rows"] if (row["instances"], row["labels_each"]) == (size, each)]
            value, nll = (np.mean([row[metric] for row in rows]) for metric in (point, "nll"))
            shown += [f"{100 * value:.1f}" if point == "accuracy" else f"{value:.2f}", f"{nll:.2f}"]
        return shown

    sizes = sorted({row["instances"] for row in images["rows"]})
    body = [[f"{size:,} images or faces", *cells(size)] for size in sizes]
    header = [
        "labelled inputs",
        *("CIFAR-10N, one label: accuracy (%)", "NLL", "three labels: accuracy (%)", "NLL"),
        *("UTKFace, one label: error (years)", "NLL"),
    ]
    return markdown_table(header, [*body, ["no augmentation", *cells(None)]])


def sequential_table() -> str:
    """Passes, time and loss of policies that stop early, over the networks of a data set."""
    titles = {
        "cifar10n-pretrained": "CIFAR-10N, pretrained",
        "utkface-pretrained": "UTKFace, pretrained",
        "mnist1000": "MNIST, small network",
        "nuclei": "nuclei, segmentation by a small network",
    }
    outcome, body = read("sequential"), []
    for name, title in titles.items():
        results = list(outcome[name].values())
        stops = [result["sequential"] for result in results]
        spent = [_ends([result["time"][size]["ratio"] for result in results], ".2f") for size in ("64", "1")]
        losses = [f"{stop['loss']['mean']:.4f} ({stop['loss']['error']:.4f})" for stop in stops]
        of = _ends([result["passes_of_all"] for result in results], "d")
        body.append([title, _ends([stop["passes"] for stop in stops], ".1f"), of, *spent, ", ".join(losses)])
    header = ["passes", "of", "time, batches of 64", "of one", "loss in nats (standard error)"]
    return markdown_table(["data, three networks each", *header], body)


def _ends(values: Sequence[float], form: str) -> str:
    """The smallest and the largest of some numbers."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def sets_table() -> str:
    """Conformal sets and intervals, against other methods', over the networks of a data set."""
    outcome, body = read("sequential"), []
    people = [result["noisy"] for result in outcome["cifar10n-pretrained"].values()]
    for covers, words in (("label", "plain"), ("truth", "weighted by the consensus")):
        covered = _ends([100 * entry[covers]["coverage"] for entry in people], ".1f")
        size = _ends([entry[covers]["size"] for entry in people], ".2f")
        cells = [words, f"{covered} % of the clean labels", f"{size} classes"]
        body.append(["CIFAR-10N, three human labels an image", *cells])
    for name, title, score, rival, words in (
        ("cifar10n-pretrained", "CIFAR-10N, clean labels", "lac", "aug_tta", "AugTTA"),
        ("mnist1000", "MNIST", "lac", "aug_tta", "AugTTA"),
        ("utkface-pretrained", "UTKFace", "distributional", "uniform", "the uniform average"),
    ):
        for level, (other, reference) in product((90, 99), (("original", "the identity view"), (rival, words))):
            key = f"{score}, {level} %"
            sets = [result["sets"] for result in outcome[name].values()]
            changes = [100 * (entry["vbtta"][key]["size"] / entry[other][key]["size"] - 1) for entry in sets]
            body.append([title, f"{level} %, against {reference}", "the same", f"{_ends(changes, '+.1f')} %"])
    return markdown_table(["data, labels", "sets", "covers", "size"], body)


def gate_table() -> str:
    """Gains of weights that depend on the input."""
    outcome = read("input_weights", "rows.json")
    rows: list[Any] = [row for trial in outcome["trials"] for row in trial["rows"]]
    body = []
    for part, words in input_weights.PARTS.items():
        gain, reach = input_weights.gained(rows, part)
        seeds = len({row["seed"] for row in rows if row["part"] == part})
        body.append([f"{words}, {seeds} small networks", f"{gain:+.3f} (± {reach:.3f})"])
    titles = {"cifar10n": "CIFAR-10N", "utkface": "UTKFace", "food101": "Food-101", "mnist1000": "MNIST"}
    for row in read("gate")["rows"]:
        title = f"{titles[row['data']]}, {row['network']} network of seed {row['seed']}, 25 views"
        body.append([title, f"{row['gain']:+.3f} (± {1.96 * row['error']:.3f})"])
    return markdown_table(["data", "gained (95 % interval)"], body)


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (readme_table, readme_list),
    "docs/guides/how-many.md": (small_table, curve_table),
    "docs/guides/sequential.md": (sequential_table,),
    "docs/guides/conformal.md": (sets_table,),
    "docs/guides/input-weights.md": (gate_table,),
}


def rewritten(page: str) -> str:
    """The text of a page with the tables and lists of the results as they are now."""
    text, after = (ROOT / page).read_text(encoding="utf-8"), 0
    for make in PAGES[page]:
        new = make()
        first = new.splitlines()[0]
        pattern = rf"^{re.escape(first)}\n(?:\|.*\n)+" if first.startswith("|") else r"^- (?:.+\n)+"
        match = re.compile(pattern, flags=re.M).search(text, after)
        if match is None:
            raise ValueError(f"{page} has no table that begins with {first!r}")
        text, after = f"{text[: match.start()]}{new}\n{text[match.end() :]}", match.start() + len(new)
    return text


def main() -> int:
    """Write all pages."""
    for page in PAGES:
        text = rewritten(page)
        with atomic_path(ROOT / page) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
