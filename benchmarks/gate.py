"""Coverage of the intervals of a gate's coefficients, and what a gate costs where it is not needed.

``python -m benchmarks.gate`` prints a table; tests/test_gate.py has the same with fewer samples. With ``--cache`` the
views of `benchmarks.train_models` are read instead.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from benchmarks.views import find_views, load_views
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


SAMPLES, COST_SAMPLES, HELD_OUT = 500, 40, 3000


def coverage(task: str, n_labels: int) -> float:
    """Share of 90 % intervals that hold the true coefficient."""
    hits = []
    for seed in range(SAMPLES):
        predictions, labels = gated_data(task, seed, n_labels)
        gate = fit(task, predictions, labels, features="none").gate
        assert gate is not None
        lower, upper = gate.interval(0.9).T
        hits.append((lower <= TRUE * gate.scale) & (TRUE * gate.scale <= upper))
    return float(np.mean(hits))


def cost(task: str, n_labels: int) -> float:
    """Held-out log score lost to constant weights, in nats an input, where the weights are constant."""
    losses = []
    for seed in range(COST_SAMPLES):
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


def _simulated() -> None:
    for task in RECORDS:
        for n_labels in (20, 50, 300, 1000):
            print(f"{task} {n_labels:5d} labels: cost {cost(task, n_labels):+.4f} nats", flush=True)
        print(f"{task} coverage of 90 % intervals, 300 labels: {coverage(task, 300):.3f}", flush=True)


def _real(cache: str, out: Path) -> None:
    """Write a page of the data sets whose views are in the cache."""
    lines = [
        "| data | seed | log score, constant weights | gate | gained (standard error) |",
        "| --- |" + " ---: |" * 4,
    ]
    for name in ("cifar10n", "utkface", "mnist1000", "food101"):
        for seed in range(3):
            if find_views(name, seed, cache) is None:
                continue
            found = on_real_data(name, seed, cache)
            cells = f"{found['view']:.4f} | {found['input']:.4f} | {found['gain']:+.4f} ({found['error']:.4f})"
            lines.append(f"| {name} | {seed} | {cells} |")
            print(lines[-1], flush=True)
    head = (
        "# Weights that depend on the input, on real data\n\nMixtures fitted to people's labels; clean test labels.\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text("\n".join([head, *lines]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", help="folder of cached views: real data instead of simulated ones")
    parser.add_argument("--out", type=Path, default=Path("results/gate"))
    options = parser.parse_args()
    if options.cache is None:
        _simulated()
    else:
        _real(options.cache, options.out)
