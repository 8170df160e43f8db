"""Random problems that several test files pose."""

from dataclasses import replace
from typing import Any

import numpy as np

from vbtta import LabelSets, ViewPredictions
from vbtta.models.base import InMemory, pose


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
