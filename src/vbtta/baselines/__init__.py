"""The other aggregators of views, each as its authors define it, behind one contract."""

__all__ = ["BASELINES", "Baseline", "fit_baseline"]

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from vbtta.baselines.base import Baseline, Fitted, temperature, used_views
from vbtta.baselines.classification import CLASSIFICATION, ClassificationData
from vbtta.baselines.regression import REGRESSION, RegressionData, residual_variance, weighted_sum
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions

BASELINES: dict[str, tuple[str, ...]] = {"classification": tuple(CLASSIFICATION), "regression": tuple(REGRESSION)}


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
        mean square. `vbtta.baselines.BASELINES` lists them by task.
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
    n_outputs = predictions.outputs.shape[2]
    identity = predictions.names.index("identity") if "identity" in predictions.names else None
    scale, variance = 1.0, None
    if task == "classification":
        rows, row = np.unique(labels.instance, return_inverse=True)
        target = np.zeros((len(rows), n_outputs))  # (N+, C)
        np.add.at(target, (row, labels.categorical(n_outputs, predictions.classes)), labels.count)
        logits = np.asarray(predictions.outputs[rows], dtype=np.float64)
        fitted = CLASSIFICATION[method](ClassificationData(logits, target, identity))
        if plus:
            scale = temperature(fitted.rule(logits[:, fitted.used]), target)
    else:
        y = labels.continuous(n_outputs)
        outputs = np.asarray(predictions.outputs, dtype=np.float64)[labels.instance]
        weights = REGRESSION[method](RegressionData(outputs, y, labels.count, identity))
        used = used_views(weights)
        fitted = Fitted(weights, used.tolist(), partial(weighted_sum, weights=weights[used]))
        variance = residual_variance(y - weighted_sum(outputs, weights), y, labels.count)
    return Baseline(
        name=name,
        task=task,
        names=predictions.names,
        weights=fitted.weights,
        used=tuple(predictions.names[k] for k in fitted.used),
        n_outputs=n_outputs,
        rule=fitted.rule,
        generated_names=predictions.generated_names,
        temperature=scale,
        variance=variance,
        classes=predictions.classes if task == "classification" else None,
    )
