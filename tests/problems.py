"""Random problems that several test files pose."""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy import special

from vbtta import LabelSets, ViewPredictions
from vbtta.models.base import InMemory, pose

NAMES = ["identity", "flip", "blur"]


def random_problem(
    rng: np.random.Generator,
    *,
    n_instances: int,
    n_views: int,
    n_outputs: int,
    n_columns: int = 1,
    gaps: float = 0.0,
    counts: bool = False,
    annotators: bool = False,
) -> tuple[ViewPredictions, LabelSets]:
    """Views of unequal quality and ragged labels around the first of them."""
    truth = rng.normal(size=(n_instances, 1, n_outputs))
    quality = rng.uniform(0.05, 2.0, size=(1, n_views, 1))
    mean = truth * rng.uniform(0.3, 1.5, size=(1, n_views, 1)) + quality * rng.normal(
        size=(n_instances, n_views, n_outputs)
    )
    variance = rng.exponential(0.2, size=mean.shape)
    labels = truth + 0.3 * rng.normal(size=(n_instances, n_columns, n_outputs))
    labels += 0.3 * rng.normal(size=(1, n_columns, 1)) * annotators
    absent = rng.random((n_instances, n_columns)) < gaps
    absent[0, 0] = False
    rows, columns = np.nonzero(~absent)
    return ViewPredictions(mean, variance), LabelSets.from_table(
        rows,
        labels[rows, columns],
        annotator=columns if annotators else None,
        count=rng.integers(1, 5, size=len(rows)) if counts else None,
        n_instances=n_instances,
    )


def posed(predictions: ViewPredictions, labels: LabelSets, model: Any, *, noise: str) -> tuple[Any, Any]:
    """The problem of a model with a noise, and its first state."""
    return pose(replace(model, noise=noise), InMemory(predictions, labels))


def numbers_of_a_view(seed: int = 0, N: int = 250, noise: float = 0.15) -> tuple[ViewPredictions, np.ndarray]:
    """Labels follow one of three views, rescaled and shifted."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=(N, 1)) + 0.7 * rng.normal(size=(N, 3))
    z = rng.choice(3, size=N, p=[0.55, 0.3, 0.15])
    return ViewPredictions(f[:, :, None]), 1.2 * f[np.arange(N), z] + 0.3 + noise * rng.normal(size=N)


def classes_of_a_view(
    seed: int = 0, N: int = 250, n_labels: int = 1, accuracy: float = 1.0
) -> tuple[ViewPredictions, LabelSets]:
    """Classes follow one of two views; annotators err at a rate."""
    rng = np.random.default_rng(seed)
    f = 2 * rng.normal(size=(N, 3, 3))
    z = rng.choice(3, size=N, p=[0.6, 0.4, 0.0])
    proba = special.softmax(f[np.arange(N), z], axis=1)
    truth = (proba.cumsum(axis=1) < rng.random((N, 1))).sum(axis=1)
    wrong = rng.random((N, n_labels)) > accuracy
    y = np.where(wrong, rng.integers(3, size=(N, n_labels)), truth[:, None])
    return ViewPredictions(f), LabelSets.from_array(y, annotators="columns" if n_labels > 1 else None)


def class_problem(seed: int = 0, n: int = 120, C: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, C, size=n)
    logits = rng.normal(size=(n, 3, C))
    logits[np.arange(n), :, truth] += [2.5, 2.0, 0.3]
    return logits, truth
