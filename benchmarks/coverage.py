"""Coverage of 90 % intervals in simulations.

    python -m benchmarks coverage

`coverage`: weights where the positions of an image are strongly correlated, 40 images of 20 positions. Under a mixture
all positions of an image follow one view; under a latent pool they share most of the noise. Intervals that take
positions for independent (naive) are compared with those of groups.

`crowd_coverage`: weights inside the simplex and at its boundary, annotators' accuracies, and predictions (randomised
sets of 90 % probability), with independent instances, five annotators of whom three label an instance, and with or
without hard instances, whose labels are the class they look like with probability 0.4.

`annotator_coverage`: accuracies of 3 to 10 people, all of them, the best and the worst, by the default fit, which
chooses noise model and item difficulty; "pairs": all wrong answers are the class beside the true one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from vbtta import CategoricalMixture, LabelSets, ViewPredictions, fit_policy

__all__ = ["MODELS", "TRUTH", "annotator_coverage", "correlated", "coverage", "crowd_coverage", "degenerate", "run"]

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


ACCURACY = np.array([0.95, 0.9, 0.85, 0.75, 0.65])  # of the annotators' own labels
CROWD_TRUTH = np.append(TRUTH, 0.0)
NAMES = ["identity", "flip", "crop", "blur"]


def crowd(
    random: np.random.Generator, n: int, hard: float, own_accuracy: Any = ACCURACY, n_classes: int = 5, pairs: float = 0
) -> tuple[ViewPredictions, LabelSets, Any, Any]:
    """Predictions, labels, true classes, and the annotators' accuracies with those of hard instances included.

    `pairs` is the share of the wrong answers that are the class beside the true one.
    """
    K, C, U = len(CROWD_TRUTH), n_classes, len(own_accuracy)
    outputs = 2 * random.normal(size=(n, 1, C)) + 1.5 * random.normal(size=(n, K, C))
    view = random.choice(K, n, p=CROWD_TRUTH)
    truth = drawn(random, special.softmax(outputs[np.arange(n), view], axis=1))
    looks = special.softmax(outputs.mean(axis=1), axis=1)
    apparent, is_hard = drawn(random, looks), random.random(n) < hard
    annotator = np.argsort(random.random((n, U)), axis=1)[:, :3]
    wrong = (truth[:, None] + random.integers(1, C, size=(n, 3))) % C
    wrong = np.where(random.random((n, 3)) < pairs, truth[:, None] ^ 1, wrong)
    own = np.where(random.random((n, 3)) < own_accuracy[annotator], truth[:, None], wrong)
    copied = is_hard[:, None] & (random.random((n, 3)) < 0.4)
    labels = LabelSets.from_table(
        instance=np.repeat(np.arange(n), 3),
        label=np.where(copied, apparent[:, None], own).ravel(),
        annotator=np.char.zfill(annotator.ravel().astype(str), 2),
        n_instances=n,
    )
    share = 0.4 * hard
    accuracy = (1 - share) * own_accuracy + share * looks[np.arange(n), truth].mean()
    return ViewPredictions(outputs, names=NAMES), labels, truth, accuracy


def drawn(random: np.random.Generator, proba: Any) -> Any:
    """Classes (n,) of probabilities (n, C)."""
    return (random.random((len(proba), 1)) > proba.cumsum(axis=1)[:, :-1]).sum(axis=1)


def crowd_coverage(n_problems: int, hard: float, seed: int = 0, n: int = 300) -> dict[str, float]:
    """Shares of 90 % intervals and sets that hold the truth."""
    hits: dict[str, list[Any]] = {"interior": [], "boundary": [], "annotators": [], "predictions": []}
    for problem in range(n_problems):
        random = np.random.default_rng([seed, problem])
        predictions, labels, truth, accuracy = crowd(random, 2 * n, hard)
        sample = predictions.take(slice(n)), labels.take(np.arange(n))
        policy = fit_policy(*sample, task="classification", model=CategoricalMixture(noise="annotator"), guard=False)
        low, high = policy.weight_interval(0.9).T
        inside = (low <= CROWD_TRUTH + 1e-12) & (high >= CROWD_TRUTH)
        hits["interior"].append(inside[:-1])
        hits["boundary"].append(inside[-1:])
        annotators: Any = policy.annotators
        low, high = annotators.accuracy_interval[np.argsort(annotators.names)].T
        hits["annotators"].append((low <= accuracy) & (high >= accuracy))
        prediction: Any = policy.predict(predictions.take(slice(n, None)))
        hits["predictions"].append(in_set(random, prediction.proba, truth[n:]))
    return {name: float(np.concatenate(each).mean()) for name, each in hits.items()}


def annotator_coverage(
    n_problems: int, n: int, people: int, hard: float, pairs: float = 0, seed: int = 0
) -> dict[str, Any]:
    """Share of the default's 90 % intervals that hold an annotator's accuracy, its error, the noise models chosen."""
    held, errors, chosen = [], [], []
    for problem in range(n_problems):
        random = np.random.default_rng([seed, problem])
        predictions, labels, _, accuracy = crowd(random, n, hard, np.linspace(0.95, 0.65, people), 10, pairs)
        policy = fit_policy(predictions, labels, task="classification")
        annotators: Any = policy.annotators
        order = np.argsort(annotators.names)
        low, high = annotators.accuracy_interval[order].T
        held.append((low <= accuracy) & (high >= accuracy))
        errors.append(annotators.accuracy[order] - accuracy)
        model: Any = (policy.members or (policy,))[0].model
        chosen.append(f"{model.noise}{', difficulty' if model.difficulty else ''}")
    return {
        "coverage": float(np.mean(held)),
        "best_annotator": float(np.mean(held, axis=0)[0]),
        "worst_annotator": float(np.mean(held, axis=0)[-1]),
        "bias": np.mean(errors, axis=0).tolist(),
        "chosen": {name: chosen.count(name) for name in sorted(set(chosen))},
    }


def in_set(random: np.random.Generator, proba: Any, truth: Any) -> Any:
    """Whether the most probable classes of 90 % hold the truth (n,); the last of them with the probability needed."""
    own = proba[np.arange(len(proba)), truth]
    above = (proba * (proba > own[:, None])).sum(axis=1)
    return random.random(len(proba)) < (0.9 - above) / own


def degenerate(seed: int = 0) -> dict[str, float]:
    """Change of the held-out log score by ten copies of a view, and that of 50 views and 40 instances."""
    random = np.random.default_rng(seed)
    predictions, labels, truth, _ = crowd(random, 1300, 0.0)
    fitted, known, held_out = predictions.take(slice(300)), labels.take(np.arange(300)), predictions.outputs[300:]
    scores = []
    for copies in (0, 10):
        views = [np.concatenate([each, *[each[:, 1:2]] * copies], axis=1) for each in (fitted.outputs, held_out)]
        policy = fit_policy(ViewPredictions(views[0]), known, task="classification")
        scores.append(policy.predict(ViewPredictions(views[1])).log_prob(truth[300:]).mean())
    many = random.normal(size=(1040, 50, 5)) + 2 * np.eye(5)[classes := random.integers(0, 5, 1040)][:, None]
    policy = fit_policy(ViewPredictions(many[:40]), classes[:40], task="classification")
    wide = policy.predict(ViewPredictions(many[40:])).log_prob(classes[40:]).mean()
    return {"ten_copies": float(scores[1] - scores[0]), "fifty_views_forty_instances": float(wide)}


def run(quick: bool = False) -> dict[str, Any]:
    """Coverage of every model."""
    n_problems, seed = 8 if quick else 240, 1
    outcome: dict[str, Any] = {name: coverage(name, n_problems, seed) for name in MODELS}
    crowds = {f"hard_{hard}": crowd_coverage(n_problems // 2, hard, seed) for hard in (0.0, 0.25)}
    cells = [(hard, n, size, 0) for hard in (0.0, 0.25) for n, size in ((150, 3), (300, 5), (1000, 3), (1000, 10))]
    outcome["annotators"] = {
        f"hard_{hard}_{n}_inputs_{size}_people{'_pairs' * pairs}": annotator_coverage(
            n_problems // 4, n, size, hard, pairs, seed=2
        )
        for hard, n, size, pairs in [*cells, (0.0, 300, 3, 1), (0.0, 1000, 3, 1)]
    }
    return {"problems": n_problems, "seed": seed, "level": 0.9, **outcome, "crowd": crowds, "degenerate": degenerate()}
