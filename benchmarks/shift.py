"""Distribution shift: a strong network under corruptions, with weights from clean, mixed or no labels.

    python -m benchmarks.shift --data DATA --cache .cache

Test images are corrupted by noise, blur, loss of contrast and JPEG compression at three strengths. Policies are fitted
on clean images, on a mixture of clean and corrupted ones, or on that mixture without labels. The reference
adapts the network in place of weights: one gradient step of the last layer on the entropy of the mean prediction over
the views of an input, as in MEMO (Zhang, Levine and Finn, 2022), which does so for all layers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from benchmarks.train_models import PRETRAINED
from reproduction.networks import trained_network
from reproduction.pretrained import FineTuned
from reproduction.provenance import provenance
from reproduction.records import Places
from vbtta import CategoricalMixture, LabelSets, ViewPredictions, fit_policy
from vbtta._support.checks import require
from vbtta._support.files import atomic_path
from vbtta.augment import Identity, images
from vbtta.baselines import fit_baseline

Array = NDArray[Any]
STRENGTHS = (1, 2, 3)
KINDS = ("noise", "blur", "contrast", "jpeg")
METHODS = ("original", "original+t", "uniform", "uniform+t", "vbtta", "vbtta-mixture", "vbtta-input")
_LEVELS: dict[str, tuple[float, float, float]] = {
    "noise": (0.03, 0.07, 0.12),  # standard deviation
    "blur": (0.5, 0.8, 1.2),  # pixels of a 32 x 32 image
    "contrast": (0.6, 0.4, 0.25),  # share that is left
    "jpeg": (60.0, 30.0, 12.0),  # quality
}
_STEP = 0.005  # of the gradient step on the last layer
_RESAMPLES = 1000


def corrupt(batch: torch.Tensor, kind: str, strength: int, seed: int) -> torch.Tensor:
    """Corrupt images (N, 3, H, W) in [0, 1]; `strength` is 1, 2 or 3."""
    level = _LEVELS[kind][strength - 1]
    if kind == "noise":
        noise = torch.randn(batch.shape, generator=torch.Generator().manual_seed(seed))
        return (batch + level * noise).clamp(0, 1)
    if kind == "contrast":
        return (batch - 0.5) * level + 0.5
    kornia = require("kornia", "torch")
    if kind == "blur":
        sigma = level * batch.shape[2] / 32
        side = 2 * int(3 * sigma + 1) + 1
        blurred: torch.Tensor = kornia.filters.gaussian_blur2d(batch, (side, side), (sigma, sigma))
        return blurred
    quality = torch.full((len(batch),), level)
    coded: torch.Tensor = kornia.enhance.jpeg_codec_differentiable(batch, quality)
    return coded.clamp(0, 1)


def few_views() -> list[Any]:
    """Eight views: for every corruption one that might undo some of it."""
    return [
        Identity(),
        images.HorizontalFlip(),
        images.Crop("center", 0.875),
        images.Shift(0.06, 0.0),
        images.Rotate(10.0),
        images.Blur(0.7),
        images.Contrast(1.6),
        images.Brightness(0.1),
    ]


def adapted(features: Array, weight: Array, bias: Array, rate: float = _STEP) -> Array:
    """Probabilities (N, C) of the first view after a gradient step of the last layer on the marginal entropy.

    Features are (N, K, F). The entropy is H(p), p the mean over views of softmax(W f_k + b); the step changes the
    logits of the first view by -rate * sum_k (f_1 . f_k + 1) dH/dz_k, so no gradient needs to be stored.
    """
    logits = features @ weight.T + bias  # (N, K, C)
    proba = special.softmax(logits, axis=2)
    mean = proba.mean(axis=1, keepdims=True)
    slope = -(np.log(mean) + 1) / features.shape[1]  # dH/dp_k
    gradient = proba * (slope - (slope * proba).sum(axis=2, keepdims=True))  # dH/dz_k
    kernel = np.einsum("nf,nkf->nk", features[:, 0], features) + 1
    changed = logits[:, 0] - rate * np.einsum("nk,nkc->nc", kernel, gradient)
    return np.asarray(special.softmax(changed, axis=1))


def run(
    name: str = "cifar10n-pretrained",
    seed: int = 0,
    *,
    data: str,
    cache: str,
    n_test: int = 300,
    n_calibration: int = 500,
) -> dict[str, Any]:
    """Scores of every method, calibration and condition, with losses of every image for the intervals."""
    start = time.perf_counter()
    setup = PRETRAINED[name].at(seed)
    trained = trained_network(setup.sample, setup.network, Places(Path(data), Path(cache)))
    network, sample = trained.network, trained.sample
    assert isinstance(network, FineTuned)
    conditions = [("clean", 0), *((kind, strength) for kind in KINDS for strength in STRENGTHS)]
    calibration, labels = sample.calibration[-n_calibration:], sample.labels[-n_calibration:]
    mixed = np.random.default_rng(seed).integers(len(conditions), size=len(calibration))
    test_images, truth = sample.test[:n_test], sample.truth[:n_test]
    clean, _ = _views(network, calibration, cache, "clean", 0)
    outputs = np.empty_like(clean.outputs)
    for number, (kind, strength) in enumerate(conditions):
        chosen = np.flatnonzero(mixed == number)
        outputs[chosen] = _views(network, calibration[chosen], cache, kind, strength)[0].outputs
    mixture = ViewPredictions(outputs, names=clean.names)
    fits: dict[str, dict[str, Any]] = {
        "clean": _fitted(clean, labels, seed),
        "mixture": _fitted(mixture, labels, seed),
        "none": {"vbtta, no labels": fit_policy(mixture, None, task="classification", seed=seed)},
    }
    weight, bias = (part.detach().numpy().astype(np.float64) for part in network.tail.head.parameters())
    rows: list[dict[str, Any]] = []
    losses: dict[tuple[str, str, str, int], Array] = {}
    for kind, strength in conditions:
        views, features = _views(network, test_images, cache, kind, strength)
        probabilities: dict[tuple[str, str], Array] = {("none", "entropy step"): adapted(features, weight, bias)}
        for calibrated, fitted in fits.items():
            for method, policy in fitted.items():
                probabilities[calibrated, method] = _proba(policy, views)
        for (calibrated, method), proba in probabilities.items():
            loss = -np.log(np.maximum(proba[np.arange(len(truth)), truth], 1e-12))
            losses[calibrated, method, kind, strength] = loss
            rows.append(
                {
                    "calibration": calibrated,
                    "method": method,
                    "corruption": kind,
                    "strength": strength,
                    "nll": float(loss.mean()),
                    "accuracy": float(np.mean(proba.argmax(axis=1) == truth)),
                }
            )
        print(f"{kind} {strength}: done", file=sys.stderr, flush=True)
    return {
        "network": name,
        "seed": seed,
        "n_test": len(truth),
        "n_calibration": len(calibration),
        "views": list(clean.names),
        "levels": _LEVELS,
        "provenance": provenance(),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
        "against_tempered": _intervals(losses, len(truth)),
    }


def summary(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Means over corruptions of each strength, by calibration and method."""
    keys = dict.fromkeys((row["calibration"], row["method"]) for row in outcome["rows"])
    lines = []
    for calibrated, method in keys:
        chosen = [row for row in outcome["rows"] if (row["calibration"], row["method"]) == (calibrated, method)]
        line: dict[str, Any] = {"calibration": calibrated, "method": method}
        for strength in (0, *STRENGTHS):
            part = [row for row in chosen if row["strength"] == strength]
            line[f"nll_{strength}"] = float(np.mean([row["nll"] for row in part]))
            line[f"accuracy_{strength}"] = float(np.mean([row["accuracy"] for row in part]))
        lines.append(line)
    return lines


def markdown(outcome: Mapping[str, Any]) -> str:
    """A table of the means, and where it comes from."""
    intervals = {(row["calibration"], row["method"]): row for row in outcome["against_tempered"]}
    head = ["labels", "method", "clean", *(f"strength {strength}" for strength in STRENGTHS), "NLL minus tempered"]
    body = []
    for line in summary(outcome):
        cells = [f"{100 * line[f'accuracy_{s}']:.1f}, {line[f'nll_{s}']:.3f}" for s in (0, *STRENGTHS)]
        change = intervals[line["calibration"], line["method"]]
        text = f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
        body.append([line["calibration"], line["method"], *cells, text])
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
    made = outcome["provenance"]
    return (
        "# Distribution shift\n\n"
        f"{outcome['network']}, seed {outcome['seed']}: {outcome['n_test']} test images, each corrupted by noise, "
        f"blur, loss of contrast and JPEG at three strengths; {len(outcome['views'])} views; "
        f"{outcome['n_calibration']} calibration images, clean, or each with a corruption chosen at random (clean "
        "among them), or these without labels. Cells are accuracy (%) and NLL, "
        "means over the four corruptions. "
        "The last column is the mean over all corrupted sets minus that of the unaugmented network with a temperature "
        "fitted on the same labels (on clean ones where there are none), with a 95 % bootstrap interval over images. "
        "`entropy step`: one gradient step of the last layer on the marginal entropy over the views of an input.\n\n"
        f"{table}\n\nMade at {made['time']} from commit {made['git'][:12]} in {outcome['seconds']:.0f} s.\n"
    )


def _views(
    network: FineTuned, batch: NDArray[np.uint8], cache: str, kind: str, strength: int
) -> tuple[ViewPredictions, Array]:
    """Logits under the views, and the features of the last layer (N, K, F)."""
    features, views, folder = [], few_views(), Path(cache)
    for view in views:

        def change(part: torch.Tensor, view: Callable[[Any], Any] = view) -> torch.Tensor:
            start = int(part[0].sum() * 1000) % (1 << 31)  # noise that depends on the images alone
            bad = corrupt(part, kind, strength, start) if strength else part
            changed: torch.Tensor = view(bad)
            return changed

        maps = network.stored_maps(batch, folder, f"shift {kind} {strength} {view!r}", change)
        features.append(network.features_of_maps(maps).astype(np.float64))
    stacked = np.stack(features, axis=1)
    head = network.tail.head
    logits = stacked @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    return ViewPredictions(logits, names=[view.name for view in views]), stacked


def _proba(policy: Any, views: ViewPredictions) -> Array:
    prediction = policy.predict(views)
    return np.asarray(getattr(prediction, "proba", prediction))


def _fitted(views: ViewPredictions, labels: Array, seed: int) -> dict[str, Any]:
    sets = LabelSets.from_array(labels)
    known: dict[str, Any] = {"vbtta-mixture": "mixture", "vbtta-input": CategoricalMixture(weights="input")}
    fitted: dict[str, Any] = {}
    for method in METHODS:
        if method.startswith("vbtta"):
            model = known.get(method, "auto")
            fitted[method] = fit_policy(views, sets, task="classification", model=model, seed=seed)
        else:
            fitted[method] = fit_baseline(method, views, sets, task="classification")
    return fitted


def _intervals(losses: Mapping[tuple[str, str, str, int], Array], n: int) -> list[dict[str, Any]]:
    """Mean NLL over corrupted sets minus that of the tempered network, with a bootstrap over images."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES) / n
    rows = []
    for calibrated, method in dict.fromkeys(key[:2] for key in losses):
        reference = "clean" if calibrated == "none" else calibrated
        gaps = [
            loss - losses[reference, "original+t", kind, strength]
            for (labels, name, kind, strength), loss in losses.items()
            if (labels, name) == (calibrated, method) and strength
        ]
        gap = np.mean(gaps, axis=0)
        low, high = np.quantile(drawn @ gap, [0.025, 0.975])
        value = float(gap.mean())
        rows.append(
            {"calibration": calibrated, "method": method, "value": value, "low": float(low), "high": float(high)}
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Policies under distribution shift.")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder for networks and maps")
    networks = [name for name in PRETRAINED if not name.startswith("utkface")]
    parser.add_argument("--network", default=networks[0], choices=networks)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=300, help="number of test images")
    parser.add_argument("--calibration", type=int, default=500, help="number of calibration images")
    parser.add_argument("--out", type=Path, default=Path("results/shift"))
    options = parser.parse_args(arguments)
    if not options.data or not Path(options.data).is_dir():
        print("no data folder: pass --data or set VBTTA_DATA", file=sys.stderr)
        return 1
    sizes = {"n_test": options.test, "n_calibration": options.calibration}
    outcome = run(options.network, options.seed, data=options.data, cache=options.cache, **sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("results.json", json.dumps(outcome, indent=1) + "\n"), ("README.md", markdown(outcome))):
        with atomic_path(options.out / name) as temporary:
            temporary.write_text(text)
    print(markdown(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
