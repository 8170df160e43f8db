"""Coverage of the intervals of a gate's coefficients, and what a gate costs where it is not needed.

``python -m benchmarks gate`` runs the simulations; tests/test_gate.py has the same with fewer samples. With
``python -m benchmarks.gate --cache FOLDER`` the views of `benchmarks.train_models` are read instead.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from benchmarks.views import load_views
from reproduction.provenance import provenance
from vbtta import CategoricalMixture, GaussianMixture, Policy, ViewPredictions, fit_policy

TRUE = np.array([0.9, -0.6])  # b, in the units of the features
BASE = np.array([0.5, 0.3, 0.2])
RECORDS = {"classification": CategoricalMixture, "regression": GaussianMixture}


def gated_data(task: str, seed: int, n: int, slopes: np.ndarray = TRUE) -> tuple[ViewPredictions, np.ndarray]:
    """Labels from one of three views each, chosen with weights that depend on two given features."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 3, len(slopes)))
    weights = special.softmax(np.log(BASE) + features @ slopes, axis=1)
    view = (rng.random((n, 1)) > weights.cumsum(axis=1)).sum(axis=1)
    if task == "regression":
        outputs = rng.normal(size=(n, 3, 1))
        labels = outputs[np.arange(n), view, 0] + 0.3 * rng.normal(size=n)
    else:
        outputs = 2.5 * rng.normal(size=(n, 3, 4))
        proba = special.softmax(outputs[np.arange(n), view], axis=1)
        labels = (rng.random((n, 1)) > proba.cumsum(axis=1)).sum(axis=1)
    views, about = ["identity", "flip", "crop"], ["sharp", "tilted"]
    return ViewPredictions(outputs, names=views, features=features, feature_names=about), labels


def fit(task: str, predictions: ViewPredictions, labels: Any, **options: Any) -> Policy:
    model = RECORDS[task](**{"weights": "input", **options})
    return fit_policy(predictions, labels, task=task, model=model, guard=False)


def log_score(policy: Policy, predictions: ViewPredictions, labels: np.ndarray) -> float:
    return float(policy.predict(predictions).log_prob(labels).mean())


HELD_OUT = 3000


def coverage(task: str, n_labels: int, n_samples: int) -> dict[str, Any]:
    """Share of 90 % intervals that hold the true coefficient, and its mean estimate in units of the features."""
    hits, estimates = [], []
    for seed in range(n_samples):
        predictions, labels = gated_data(task, seed, n_labels)
        gate = fit(task, predictions, labels, features="none").gate
        assert gate is not None
        lower, upper = gate.interval(0.9).T
        hits.append((lower <= TRUE * gate.scale) & (TRUE * gate.scale <= upper))
        estimates.append(gate.coefficients / gate.scale)
    return {"coverage": float(np.mean(hits)), "estimate": np.mean(estimates, axis=0).tolist(), "truth": TRUE.tolist()}


def time_ratio(task: str, n_labels: int, n_samples: int) -> float:
    """Processor time of fits with a gate, relative to those with constant weights."""
    seconds = {"view": 0.0, "input": 0.0}
    for seed in range(n_samples):
        predictions, labels = gated_data(task, seed, n_labels)
        for weights in seconds:
            start = time.process_time()
            fit(task, predictions, labels, weights=weights)
            seconds[weights] += time.process_time() - start
    return seconds["input"] / seconds["view"]


def cost(task: str, n_labels: int, n_samples: int) -> float:
    """Held-out log score lost to constant weights, in nats an input, where the weights are constant."""
    losses = []
    for seed in range(n_samples):
        predictions, labels = gated_data(task, seed, n_labels + HELD_OUT, slopes=np.zeros(2))
        views = ViewPredictions(predictions.outputs)
        fitted, held_out = views.take(slice(n_labels)), views.take(slice(n_labels, None))
        policies = [fit(task, fitted, labels[:n_labels], weights=weights) for weights in ("view", "input")]
        constant, gated = (log_score(policy, held_out, labels[n_labels:]) for policy in policies)
        losses.append(constant - gated)
    return float(np.mean(losses))


def on_real_data(name: str, seed: int, cache: str) -> dict[str, Any]:
    """Log scores of clean test labels on cached views, constant weights and those of a gate, and their difference."""
    task, views, labels, test, truth = load_views(name, seed, cache)
    scores = {
        weights: fit(task, views, labels, weights=weights).predict(test).log_prob(truth)
        for weights in ("view", "input")
    }
    gain = scores["input"] - scores["view"]
    means = {weights: float(score.mean()) for weights, score in scores.items()}
    return {**means, "gain": float(gain.mean()), "error": float(gain.std() / np.sqrt(len(gain)))}


def run(quick: bool = False) -> dict[str, Any]:
    """Coverage, cost and time of gates, by task."""
    n_samples, outcome = (4 if quick else 100), {}
    for task in RECORDS:
        outcome[task] = {
            "b": coverage(task, 300, n_samples),
            "cost": {n_labels: cost(task, n_labels, -(-n_samples // 4)) for n_labels in (50, 300)},
            "time_ratio": time_ratio(task, 1000, -(-n_samples // 10)),
        }
    return {"labels": 300, "samples": n_samples, **outcome}


_NETWORKS = {"": "small", "-light": "small", "-pretrained": "pretrained"}


def _real(cache: str, out: Path) -> None:
    """Write rows and a page of the data sets whose views are in the cache."""
    rows = []
    for name, (kind, words), seed in product(
        ("cifar10n", "utkface", "mnist1000", "food101"), _NETWORKS.items(), range(3)
    ):
        if (Path(cache) / f"{name}{kind}-seed{seed}" / "test.npz").is_file():
            rows.append({"data": name, "network": words, "seed": seed, **on_real_data(f"{name}{kind}", seed, cache)})
            print(rows[-1], flush=True)
    outcome = {"provenance": provenance(), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(outcome, indent=1) + "\n")
    (out / "README.md").write_text(markdown(outcome))


def markdown(outcome: dict[str, Any]) -> str:
    """The page of the gains on real data."""
    lines = [
        "# Weights that depend on the input, on real data",
        "",
        "Mixtures fitted to all of people's labels of the calibration part, 25 views; log scores of clean test labels.",
        "",
        "| data | network | seed | log score, constant weights | gate | gained (standard error) |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for row in outcome["rows"]:
        cells = f"{row['view']:.4f} | {row['input']:.4f} | {row['gain']:+.4f} ({row['error']:.4f})"
        lines.append(f"| {row['data']} | {row['network']} | {row['seed']} | {cells} |")
    made = outcome["provenance"]
    return "\n".join([*lines, "", f"Made at {made['time']} from commit {made['git'][:12]}."]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True, help="folder of cached views")
    parser.add_argument("--out", type=Path, default=Path("results/gate"))
    options = parser.parse_args()
    _real(options.cache, options.out)
