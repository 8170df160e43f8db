"""Scores of pooled views on test data: uniform pools, and policies along their optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vbtta import metrics
from vbtta.baselines import fit_baseline
from vbtta.experiments.item import Row
from vbtta.fit import fit_policy
from vbtta.labels import LabelSets
from vbtta.policy import Policy
from vbtta.predictions import CategoricalPrediction, Prediction, ViewPredictions
from vbtta.specs import EM, ModelSpec

__all__ = ["fit_steps", "round_list", "scores", "uniform"]

Task = Literal["classification", "regression"]


def scores(prediction: Prediction, truth: NDArray[Any]) -> Row:
    """Accuracy and log loss of class probabilities; absolute error, its standard deviation and log loss of numbers.

    Parameters
    ----------
    prediction : Prediction
        Of N inputs.
    truth : ndarray, shape (N,)
        Class numbers, or numbers.

    Returns
    -------
    dict
        ``accuracy`` and ``nll``, or ``mae``, ``error_sd`` and ``nll``.
    """
    log_loss = metrics.nll(prediction.log_prob(truth))
    if isinstance(prediction, CategoricalPrediction):
        return {"accuracy": float(np.mean(prediction.label == truth)), "nll": log_loss}
    errors = metrics.absolute_errors(truth, prediction.mean[:, 0])
    return {"mae": float(errors.mean()), "error_sd": float(errors.std(ddof=1)), "nll": log_loss}


def uniform(
    calibration: ViewPredictions, labels: LabelSets | ArrayLike, test: ViewPredictions, task: Task
) -> Prediction:
    """Every view with weight 1/K: the average of probabilities, or of numbers.

    Labels are needed for the width of a regression's density only.
    """
    return fit_baseline("uniform", calibration, labels, task=task).predict(test)


def fit_steps(
    calibration: ViewPredictions, labels: LabelSets | ArrayLike, task: Task, model: ModelSpec, steps: int
) -> Policy:
    """VB-TTA with exactly so many plain EM updates, every one of them kept; the first has uniform weights."""
    engine = EM(max_steps=steps, tol=0.0, accelerate=False, keep_states=True)
    return fit_policy(calibration, labels, task=task, model=model, engine=engine, guard=False)


def round_list(values: Sequence[float] | NDArray[Any], digits: int = 6) -> list[float]:
    """Numbers for a row, without digits that mean nothing."""
    return [round(float(value), digits) for value in values]
