"""Scores of pooled views on test data: uniform pools, and policies along their optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reproduction.records import Row
from vbtta import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    Policy,
    ViewPredictions,
    fit_baseline,
    fit_policy,
    metrics,
)
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction

Task = Literal["classification", "regression"]
Model = CategoricalMixture | CategoricalLatent | GaussianMixture | GaussianLatent


def scores(prediction: Prediction, truth: NDArray[Any]) -> Row:
    """``accuracy`` and ``nll`` of class probabilities; ``mae``, ``error_sd``, ``nll`` of numbers; truth is (N,)."""
    log_loss = metrics.nll(prediction.log_prob(truth))
    if isinstance(prediction, CategoricalPrediction):
        return {"accuracy": float(np.mean(prediction.label == truth)), "nll": log_loss}
    errors = metrics.absolute_errors(truth, predicted_mean(prediction))
    return {"mae": float(errors.mean()), "error_sd": float(errors.std(ddof=1)), "nll": log_loss}


def predicted_mean(prediction: Prediction) -> NDArray[np.float64]:
    """The point prediction of a single continuous output, (N,)."""
    assert isinstance(prediction, ContinuousPrediction)
    return prediction.mean[:, 0]


def mean_crps(prediction: Prediction, truth: NDArray[Any]) -> float:
    """The mean continuous ranked probability score."""
    assert isinstance(prediction, ContinuousPrediction)
    return float(np.mean(prediction.crps(truth)))


def uniform(
    calibration: ViewPredictions, labels: LabelSets | ArrayLike, test: ViewPredictions, task: Task
) -> Prediction:
    """Every view with weight 1/K; labels only decide the width of a regression's density."""
    return fit_baseline("uniform", calibration, labels, task=task).predict(test)


def fit_steps(
    calibration: ViewPredictions, labels: LabelSets | ArrayLike, task: Task, model: Model, steps: int
) -> Policy:
    """VB-TTA with exactly so many plain EM updates, every one of them kept; the first has uniform weights."""
    engine = EM(max_steps=steps, tol=0.0, accelerate=False, keep_states=True)
    return fit_policy(calibration, labels, task=task, model=model, engine=engine, guard=False)


def round_list(values: Sequence[float] | NDArray[Any], digits: int = 6) -> list[float]:
    """Numbers for a row, rounded."""
    return [round(float(value), digits) for value in values]
