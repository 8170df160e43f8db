"""`fit_baseline`: a name, views and labels in; a fitted aggregator out."""

__all__ = ["BASELINES", "fit_baseline"]

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from vbtta.baselines.classification import CLASSIFICATION, ClassificationData
from vbtta.baselines.contract import Baseline
from vbtta.baselines.pools import temperature
from vbtta.baselines.regression import REGRESSION, RegressionData, residual_variance
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions

BASELINES: dict[str, tuple[str, ...]] = {
    "classification": tuple(CLASSIFICATION),
    "regression": tuple(REGRESSION),
}


def fit_baseline(name: str, predictions: ViewPredictions, labels: LabelSets | ArrayLike, *, task: str) -> Baseline:
    """Fit one of the usual ways to aggregate views on calibration labels.

    Every label counts as often as its count; there is no model of label noise.

    Parameters
    ----------
    name : str
        For classification "original" (the view named identity), "uniform", "geometric", "max", "best_view", "aug_tta",
        "class_tta", "aug_or_class_tta" (the better of the two on a held-out fifth), "greedy", "entropy", "bma" or
        "mixture_mle"; "+t" appended adds one temperature fitted on the aggregated probabilities. For regression
        "original", "uniform", "best_view", "bma" or "nnls", each with a normal density of the calibration residuals'
        mean square.
    predictions : ViewPredictions
        Views of the calibration sample, (N, K, C).
    labels : LabelSets or array
        Its labels; arrays go through :meth:`LabelSets.from_array`.
    task : "classification" or "regression"

    Returns
    -------
    Baseline
        With `.weights` and `.predict(predictions)`.

    Examples
    --------
    >>> logits = np.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]]])  # 2 inputs, 2 views, 2 classes
    >>> views = ViewPredictions(logits, names=["identity", "flip"])
    >>> best = fit_baseline("best_view", views, [0, 1], task="classification")
    >>> best
    Baseline(best_view, classification: 1 of 2 views)
    >>> best.predict(views).label
    array([0, 1])
    """
    if task not in BASELINES:
        raise ValueError(f"task must be one of {', '.join(BASELINES)}; got {task!r}")
    method, plus, suffix = name.partition("+")
    if method not in BASELINES[task] or (plus and suffix != "t"):
        also = "; each also with '+t' appended" if task == "classification" else ""
        raise ValueError(f"there is no {task} baseline {name!r}; there are {', '.join(BASELINES[task])}{also}")
    if plus and task == "regression":
        raise ValueError(f"{name!r}: a temperature is for classification; there are {', '.join(BASELINES[task])}")
    if method == "original" and "identity" not in predictions.names:
        raise ValueError(f"'original' needs a view named 'identity'; the views are {list(predictions.names)}")
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    if not len(labels):
        raise ValueError("labels are empty; a baseline needs at least one label")
    fit = _fit_classification if task == "classification" else _fit_regression
    return fit(name, method, predictions, labels)


def _fit_classification(name: str, method: str, predictions: ViewPredictions, labels: LabelSets) -> Baseline:
    n_classes = predictions.mean.shape[2]
    position = labels.categorical(n_classes, predictions.classes)  # (J,)
    rows, row = np.unique(labels.instance, return_inverse=True)
    target = np.zeros((len(rows), n_classes))  # (N+, C)
    np.add.at(target, (row, position), labels.count)
    logits = np.asarray(predictions.mean[rows], dtype=np.float64)
    fitted = CLASSIFICATION[method](ClassificationData(logits, target, _identity(predictions)))
    scale = temperature(fitted.rule(logits[:, fitted.used]), target) if name.endswith("+t") else 1.0
    return Baseline(
        name=name,
        task="classification",
        names=predictions.names,
        weights=fitted.weights,
        used=tuple(predictions.names[k] for k in fitted.used),
        n_outputs=n_classes,
        rule=fitted.rule,
        generated_names=predictions.generated_names,
        temperature=scale,
        classes=predictions.classes,
    )


def _fit_regression(name: str, method: str, predictions: ViewPredictions, labels: LabelSets) -> Baseline:
    y = labels.continuous(predictions.mean.shape[2])
    outputs = np.asarray(predictions.mean, dtype=np.float64)[labels.instance]
    data = RegressionData(outputs, y, labels.count, _identity(predictions))
    weights = REGRESSION[method](data)
    used = np.flatnonzero(weights if weights.ndim == 1 else weights.any(axis=1))
    if not used.size:
        used = np.array([0])  # a prediction of 0 needs a view to say how many inputs there are
    return Baseline(
        name=name,
        task="regression",
        names=predictions.names,
        weights=weights,
        used=tuple(predictions.names[k] for k in used),
        n_outputs=predictions.mean.shape[2],
        rule=partial(_weighted_sum, weights=weights[used]),
        generated_names=predictions.generated_names,
        variance=residual_variance(y - _weighted_sum(outputs, weights), y, labels.count),
    )


def _weighted_sum(outputs: Array, weights: Array) -> Array:
    """sum_k w_k f_k with weights (K,) or (K, C): (N, C)."""
    share = weights if weights.ndim == 2 else weights[:, None]
    return np.asarray((outputs * share).sum(axis=1))


def _identity(predictions: ViewPredictions) -> int | None:
    return predictions.names.index("identity") if "identity" in predictions.names else None
