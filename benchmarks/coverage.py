"""Coverage of 90 % intervals of the weights where the positions of an image are strongly correlated.

    python -m benchmarks coverage

40 images of 20 positions. Under a mixture all positions of an image follow one view; under a latent pool they share
most of the noise. Intervals that take positions for independent (naive) are compared with those of groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vbtta import LabelSets, ViewPredictions, fit_policy

__all__ = ["MODELS", "TRUTH", "correlated", "coverage", "run"]

MODELS = {
    "GaussianMixture": ("regression", "mixture"),
    "GaussianLatent": ("regression", "latent"),
    "CategoricalMixture": ("classification", "mixture"),
    "CategoricalLatent": ("classification", "latent"),
}
TRUTH = np.array([0.5, 0.3, 0.2])


def correlated(
    name: str, random: np.random.Generator, n_images: int = 40, n_positions: int = 20
) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and labels of a model whose weights are TRUTH, with images as groups."""
    task, model = MODELS[name]
    K, C = len(TRUTH), 1 if task == "regression" else 2
    image = np.repeat(np.arange(n_images), n_positions)
    shared = random.normal(size=(n_images, K, C))
    outputs = 2 * (0.9 * shared[image] + 0.4 * random.normal(size=(len(image), K, C)))
    view = random.choice(K, n_images, p=TRUTH)[image]  # the one that explains the image
    centre = outputs[np.arange(len(image)), view] if model == "mixture" else np.einsum("k,nkc->nc", TRUTH, outputs)
    if task == "regression":
        noise = 0.9 * random.normal(size=n_images)[image] + 0.4 * random.normal(size=len(image))
        labels = centre[:, 0] + (0.3 if model == "mixture" else 1.0) * noise
        return ViewPredictions(outputs, groups=image), LabelSets.from_array(labels)
    # logistic noise of an image, so that every position has the model's probabilities and they agree
    place = random.uniform(size=n_images)[image]
    labels = (place < 1 / (1 + np.exp(centre[:, 0] - centre[:, 1]))).astype(int)
    return ViewPredictions(outputs, groups=image), LabelSets.from_array(labels)


def coverage(name: str, n_problems: int, seed: int = 0) -> dict[str, float]:
    """Share of 90 % intervals that hold the true weight, with groups and without."""
    task, model = MODELS[name]
    hits = {"clustered": 0.0, "naive": 0.0}
    for problem in range(n_problems):
        predictions, labels = correlated(name, np.random.default_rng([seed, problem]))
        independent = ViewPredictions(predictions.outputs)
        for kind, sample in (("clustered", predictions), ("naive", independent)):
            policy = fit_policy(sample, labels, task=task, model=model, guard=False)  # type: ignore[arg-type]
            low, high = policy.weight_interval(0.9).T
            hits[kind] += float(np.mean((low <= TRUTH) & (high >= TRUTH))) / n_problems
    return hits


def run(quick: bool = False) -> dict[str, Any]:
    """Coverage of every model."""
    n_problems, seed = 10 if quick else 400, 1
    outcome = {name: coverage(name, n_problems, seed) for name in MODELS}
    return {"problems": n_problems, "seed": seed, "level": 0.9, **outcome}
