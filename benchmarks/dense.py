"""Segmentation of nuclei and contours by several raters: learned weights against the usual averages of views.

    python -m benchmarks.dense --data DATA --seeds 0 1 2

Small U-Nets (`benchmarks.dense_networks`), 60 calibration images of 200 positions each, 17 views, all test images.
Scores are by image; intervals are of paired differences over images. A finished data set and seed is kept in the
cache, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, special
from torch import Tensor

from benchmarks import dense_networks
from benchmarks.dense_networks import Scenes, UNet, load, trained
from reproduction.provenance import provenance
from vbtta import LabelSets, Policy, TTAModule, ViewPredictions, collect_dense, fit_baseline, fit_policy, metrics
from vbtta._support.files import atomic_path
from vbtta.augment import GaussianNoise, RowStreams, d4, images
from vbtta.augment.base import Augmentation, apply_view, invert_view

__all__ = ["main", "run"]

Array = NDArray[Any]
Scores = dict[str, dict[str, Array]]  # by method and metric: (images,), NaN where not defined
DATA_SETS = ("nuclei", "contours")
LARGER_IS_BETTER = ("dice", "average_precision", "log_score")
_CALIBRATION, _POSITIONS, _RATER_POSITIONS, _LEFT_OUT = 60, 200, 400, 3
_BATCH = 10


def views() -> list[Augmentation]:
    """The 17 views; the first eight are flips and quarter turns."""
    return [
        *d4(),
        *(images.Zoom(factor) for factor in (1.25, 0.8)),
        images.Blur(1.0),
        GaussianNoise(0.05, clip=(0.0, 1.0)),
        *(images.Brightness(amount) for amount in (0.1, -0.1)),
        images.Contrast(1.3),
        *(images.Gamma(gamma) for gamma in (1.4, 0.7)),
    ]


def run(
    quick: bool = False,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    names: Sequence[str] = DATA_SETS,
    data: str | None = None,
    cache: str = ".cache",
    only_finished: bool = False,
) -> dict[str, Any]:
    """Scores of every method, and differences from the default policy; `quick` takes few images and one seed.

    `only_finished` leaves out seeds whose scores are not in the cache.
    """
    folder = data or os.environ.get("VBTTA_DATA")
    if not folder or not Path(folder).is_dir():
        return {"skipped": "no data folder: pass --data or set VBTTA_DATA"}
    outcome: dict[str, Any] = {"provenance": provenance(), "views": [view.name for view in views()]}
    for name in names:
        wanted = [seed for seed in seeds if not only_finished or _place(name, seed, cache, quick=quick).is_file()]
        wanted = wanted[:1] if quick else wanted
        if not wanted:
            continue
        pairs = [_stored(name, seed, folder, cache, quick=quick) for seed in wanted]
        scores = [part[0] for part in pairs]
        outcome[name] = {
            "seeds": wanted,
            "epochs": dense_networks.EPOCHS[name],
            "methods": _table(scores, "stack"),
            "weights": [part[1] for part in pairs],
        }
    return outcome


def _place(name: str, seed: int, cache: str, *, quick: bool) -> Path:
    """The file of the scores of one data set and seed, named after all that they depend on."""
    settings: list[object] = [name, seed, quick, dense_networks.EPOCHS[name], [repr(view) for view in views()]]
    settings += [_CALIBRATION, _POSITIONS, _RATER_POSITIONS, _LEFT_OUT]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    return Path(cache) / f"dense-{name}-seed{seed}-{key}.json"


def _stored(name: str, seed: int, folder: str, cache: str, *, quick: bool) -> tuple[Scores, dict[str, Any]]:
    """Scores by image and the weights of the policies of one data set and seed, from the cache where they are there."""
    path = _place(name, seed, cache, quick=quick)
    if not path.is_file():
        scores, weights = _measure(name, seed, folder, cache, quick=quick)
        plain = {method: {metric: row.tolist() for metric, row in rows.items()} for method, rows in scores.items()}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps({"scores": plain, "weights": weights}))
        print(f"{path} written", file=sys.stderr, flush=True)
    stored = json.loads(path.read_text())
    arrays = {
        method: {metric: np.array(row) for metric, row in rows.items()} for method, rows in stored["scores"].items()
    }
    return arrays, stored["weights"]


def _measure(name: str, seed: int, folder: str, cache: str, *, quick: bool) -> tuple[Scores, dict[str, Any]]:
    """Fit the policies of one data set and seed, and score all methods on the test images."""
    network = trained(name, seed, folder, cache)
    calibration = load(name, "calibration", folder).take(range(10 if quick else _CALIBRATION))
    test = load(name, "test", folder)
    test = test.take(range(6 if quick else len(test.masks)))
    predictions, labels = _collected(network, calibration, _POSITIONS, seed)
    fits = {"mixture": "mixture", "latent": "latent", "stack": "auto"}
    policies = {
        method: fit_policy(predictions, labels, task="classification", model=model, seed=seed)  # type: ignore[arg-type]
        for method, model in fits.items()
    }
    temperature = fit_baseline("original+t", predictions, labels, task="classification").temperature
    scores: Scores = {}
    for start in range(0, len(test.masks), _BATCH):
        part = test.take(range(start, min(start + _BATCH, len(test.masks))))
        for method, maps in _maps(network, part.images, policies, temperature, seed, start):
            for metric, row in _map_scores(name, maps, part.masks).items():
                known = scores.setdefault(method, {}).get(metric, np.zeros(0))
                scores[method][metric] = np.concatenate([known, row])
    if name == "contours":
        for method, row in _left_out(network, policies, calibration, test, seed).items():
            scores.setdefault(method, {})["log_score"] = row
    weights = {
        method: dict(zip(policy.names, np.round(policy.weights, 4).tolist(), strict=True))
        for method, policy in policies.items()
    }
    return scores, weights


def _collected(network: UNet, scenes: Scenes, positions: int, seed: int) -> tuple[ViewPredictions, LabelSets]:
    """Outputs of all views and the raters' labels at sampled positions."""
    return collect_dense(network, scenes.images, views(), scenes.masks, positions=positions, seed=seed)


def _maps(
    network: UNet, batch: Tensor, policies: dict[str, Policy], temperature: float, seed: int, first: int
) -> Iterator[tuple[str, Array]]:
    """Probability maps (B, C, H, W) of every method."""
    sets = {"uniform flips": ("identity", "hflip"), "uniform flips and turns": tuple(view.name for view in d4())}
    sets["uniform all"] = tuple(view.name for view in views())
    sums = {method: [torch.zeros(()), torch.zeros(())] for method in sets}
    with torch.inference_mode():
        for view in views():
            rows = np.arange(first, first + len(batch))
            augmented = apply_view(view, batch, RowStreams(seed, view.name, 0, rows))
            logits = network(augmented)
            restored, seen = invert_view(view, logits, augmented, batch, RowStreams(seed, view.name, 0, rows))
            mask = torch.ones(()) if seen is None else seen.float()
            if view.name == "identity":
                yield "identity", logits.softmax(dim=1).numpy()
                yield "identity + temperature", (logits / temperature).softmax(dim=1).numpy()
            for method, members in sets.items():
                if view.name in members:
                    total, weight = sums[method]
                    sums[method] = [total + mask * restored.softmax(dim=1), weight + mask]
        for method, (total, weight) in sums.items():
            yield method, (total / weight).numpy()
        for method, policy in policies.items():
            yield method, TTAModule(network, views(), policy, seed=seed)(batch).numpy()


def _map_scores(name: str, maps: Array, masks: Sequence[Array]) -> dict[str, Array]:
    """Scores of maps (B, C, H, W) by image, means over the raters."""
    rows: dict[str, list[float]] = {}
    for proba, raters in zip(maps.astype(np.float64), masks, strict=True):
        repeated = np.broadcast_to(proba, (len(raters), *proba.shape))
        y, p = metrics.map_rows(raters, repeated)
        values = {"nll": float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).mean()), "ece": metrics.ece(y, p)}
        if name == "nuclei":
            dice = metrics.dice_scores(raters, repeated.argmax(axis=1), len(proba))[:, 1:]
            values["dice"] = float(np.nanmean(dice)) if np.isfinite(dice).any() else float("nan")
        else:
            precisions = metrics.average_precisions(raters, repeated[:, 1])
            defined = np.isfinite(precisions).any()
            values["average_precision"] = float(np.nanmean(precisions)) if defined else float("nan")
        for metric, value in values.items():
            rows.setdefault(metric, []).append(value)
    return {metric: np.array(values) for metric, values in rows.items()}


def _left_out(
    network: UNet, policies: dict[str, Policy], calibration: Scenes, test: Scenes, seed: int
) -> dict[str, Array]:
    """Mean log score of a rater whom the method has not seen, given the other raters of the image: by image."""
    # Each of the first raters is left out in turn. The rivals' maps get a slope and an offset of their logits, fitted
    # to left-out raters of the calibration images; the policies are used as they were fitted.
    samples = {}
    for part, scenes in (("calibration", calibration), ("test", test)):
        predictions, _ = _collected(network, scenes, _RATER_POSITIONS, seed + 1000)
        assert predictions.ids is not None
        assert predictions.groups is not None
        place = np.array([int(text.rsplit(":", 1)[1]) for text in predictions.ids])
        samples[part] = predictions, predictions.groups.astype(int), place
    rivals = {
        "mean of the other raters": _mean_of_raters,
        "STAPLE": _staple,
        "STAPLE through its raters": _staple_raters,
    }
    scores = {}
    for method, rival in rivals.items():
        logits, labels, _ = _rival_rows(calibration, rival, *samples["calibration"][1:])
        solution = optimize.minimize(lambda line, x, y: _log_loss(line, x, y).mean(), [1.0, 0.0], (logits, labels))
        logits, labels, group = _rival_rows(test, rival, *samples["test"][1:])
        scores[method] = _by_image(-_log_loss(solution.x, logits, labels), group, len(test.masks))
    predictions, image, place = samples["test"]
    given = np.full((len(image), max(map(len, test.masks))), np.nan)
    for i, masks in enumerate(test.masks):
        rows = np.flatnonzero(image == i)
        given[rows, : len(masks)] = masks.reshape(len(masks), -1)[:, place[rows]].T
    for method, policy in policies.items():
        gains, groups = [], []
        everybody = policy.score(predictions, LabelSets.from_array(given))
        for rater in range(_LEFT_OUT):
            others = given.copy()
            others[:, rater] = np.nan
            gains.append(everybody - policy.score(predictions, LabelSets.from_array(others)))
            groups.append(image)
        scores[method] = _by_image(np.concatenate(gains), np.concatenate(groups), len(test.masks))
    return scores


def _rival_rows(scenes: Scenes, rival: Any, image: Array, place: Array) -> tuple[Array, Array, Array]:
    """Logits of a rival's maps at the positions, labels of the left-out raters there, and their images."""
    logits, labels, groups = [], [], []
    for i, masks in enumerate(scenes.masks):
        positions = place[image == i]
        for rater in range(_LEFT_OUT):
            chance = rival(np.delete(masks, rater, axis=0)).ravel()[positions]
            logits.append(special.logit(np.clip(chance, 1e-6, 1 - 1e-6)))
            labels.append(masks[rater].ravel()[positions])
            groups.append(np.full(len(positions), i))
    return np.concatenate(logits), np.concatenate(labels), np.concatenate(groups)


def _log_loss(line: Array, logits: Array, labels: Array) -> Array:
    """Minus the log probability of 0-1 labels, the logits on a line."""
    utility = line[0] * logits + line[1]
    return np.asarray(np.logaddexp(0, utility) - labels * utility)


def _by_image(values: Array, image: Array, n_images: int) -> Array:
    return np.asarray(np.bincount(image, values, n_images) / np.bincount(image, minlength=n_images))


def _mean_of_raters(masks: Array) -> Array:
    """Share of the raters, one half counted as one more of each."""
    return np.asarray((masks.sum(axis=0) + 0.5) / (len(masks) + 1))


def _staple(masks: Array) -> Array:
    """SimpleITK's map of the truth."""
    return _run_staple(masks)[0]


def _staple_raters(masks: Array) -> Array:
    """Probability that another rater draws a contour: STAPLE's truth through the raters' mean quality."""
    truth, sensitivity, specificity = _run_staple(masks)
    return np.asarray(truth * sensitivity + (1 - truth) * (1 - specificity))


def _run_staple(masks: Array) -> tuple[Array, float, float]:
    """Truth, mean sensitivity and mean specificity; the share of the raters where nobody drew anything."""
    if not masks.any():
        return _mean_of_raters(masks), 1.0, 1.0
    sitk: Any = import_module("SimpleITK")
    staple = sitk.STAPLEImageFilter()
    staple.SetForegroundValue(1)
    truth = sitk.GetArrayFromImage(staple.Execute([sitk.GetImageFromArray(mask) for mask in masks]))
    return np.asarray(truth), float(np.mean(staple.GetSensitivity())), float(np.mean(staple.GetSpecificity()))


def _table(seeds: Sequence[Scores], reference: str) -> dict[str, dict[str, Any]]:
    """Means by method and metric, and the differences from a reference with 95 % intervals over images."""
    table: dict[str, dict[str, Any]] = {}
    for method, rows in seeds[0].items():
        table[method] = {}
        for metric in rows:
            mean, other = (np.mean([scores[m][metric] for scores in seeds], axis=0) for m in (method, reference))
            gap = (mean - other)[np.isfinite(mean - other)]
            reach = 1.96 * gap.std(ddof=1) / np.sqrt(len(gap))
            table[method][metric] = {
                "mean": float(np.nanmean(mean)),
                "by_seed": [float(np.nanmean(scores[method][metric])) for scores in seeds],
                f"minus_{reference}": [float(gap.mean()), float(gap.mean() - reach), float(gap.mean() + reach)],
                "images": len(gap),
            }
    return table


def markdown(outcome: dict[str, Any]) -> str:
    """The outcome as a page."""
    lines = [
        "# Dense outputs: nuclei and contours",
        "",
        f"Small U-Nets, {_CALIBRATION} calibration images of {_POSITIONS} positions, {len(outcome['views'])} views. "
        "Means over test images (and seeds); in brackets the difference from the default stack with its paired 95 % "
        "interval over images. NLL and ECE: less is better. Dice: mean of nucleus and edge. Contours are scored "
        "against every rater of an image: the policies' maps are of the truth behind the raters, whose noise they "
        "model, so a map calibrated to single raters may have a smaller NLL. The log score is of a rater whom the "
        "method has not seen, given the image's other raters; rivals are calibrated to left-out raters of the "
        "calibration images.",
    ]
    for name in (name for name in DATA_SETS if name in outcome):
        part = outcome[name]
        columns = list(dict.fromkeys(metric for rows in part["methods"].values() for metric in rows))
        lines += ["", f"## {name.capitalize()}, seeds {', '.join(map(str, part['seeds']))}", ""]
        lines += [f"| method | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        for method, rows in part["methods"].items():
            cells = [_cell(rows[metric]) if metric in rows else "" for metric in columns]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines += ["", *_verdicts(part["methods"], columns)]
        if name == "nuclei":
            stack, plain = part["methods"]["stack"], part["methods"]["identity"]
            change = 100 * (stack["nll"]["mean"] / plain["nll"]["mean"] - 1)
            points = 100 * (stack["dice"]["mean"] - plain["dice"]["mean"])
            against = f"NLL {change:+.1f} % (goal -10), Dice {points:+.2f} points (goal +1)"
            lines.append(f"* The stack against identity: {against}.")
    made = outcome["provenance"]
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    lines += ["", f"Made at {made['time']} from commit {made['git'][:12]} with {versions}."]
    return "\n".join(lines) + "\n"


def _cell(score: dict[str, Any]) -> str:
    gap, low, high = score["minus_stack"]
    return f"{score['mean']:.4f} ({gap:+.4f} [{low:+.4f}, {high:+.4f}])"


def _verdicts(methods: dict[str, dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """For every metric, the methods that the stack beats beyond the interval, and those that beat it."""
    for metric in columns:
        sign = -1 if metric in LARGER_IS_BETTER else 1
        gaps = {method: rows[metric]["minus_stack"][1:] for method, rows in methods.items() if metric in rows}
        ends = {method: sorted((sign * low, sign * high)) for method, (low, high) in gaps.items()}
        beaten = ", ".join(method for method, (low, _) in ends.items() if low > 0) or "none"
        better = ", ".join(method for method, (_, high) in ends.items() if high < 0) or "none"
        yield f"* {metric}: the stack is better than {beaten}; worse than {better}."


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Segmentation of nuclei and contours of several raters.")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder for networks and finished seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--names", nargs="+", choices=DATA_SETS, default=DATA_SETS)
    parser.add_argument("--out", default="results/dense", help="folder for results.json and README.md")
    parser.add_argument("--only-finished", action="store_true", help="leave out seeds that are not in the cache")
    parser.add_argument("--quick", action="store_true", help="few images: whether it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcome = run(
        options.quick,
        seeds=options.seeds,
        names=options.names,
        data=options.data,
        cache=options.cache,
        only_finished=options.only_finished,
    )
    if "skipped" in outcome:
        print(outcome["skipped"], file=sys.stderr)
        return 1
    Path(options.out).mkdir(parents=True, exist_ok=True)
    texts = {"results.json": json.dumps(outcome, indent=1) + "\n", "README.md": markdown(outcome)}
    for name, text in texts.items():
        with atomic_path(Path(options.out) / name) as temporary:
            temporary.write_text(text)
    print(texts["README.md"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
