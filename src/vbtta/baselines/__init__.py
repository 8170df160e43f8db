"""The other aggregators of views, each as its authors define it, behind one contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import one_of, shown
from vbtta.baselines import methods
from vbtta.baselines.methods import CLASSIFICATION, REGRESSION, Rule
from vbtta.baselines.solvers import Votes
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions, require_views
from vbtta.distributions import CategoricalPrediction, Prediction, view_information

BASELINES: dict[str, tuple[str, ...]] = {"classification": tuple(CLASSIFICATION), "regression": tuple(REGRESSION)}


@dataclass(frozen=True, eq=False)
class Baseline:
    """A fitted aggregator; make one with :func:`fit_baseline`."""

    name: str
    task: str
    names: tuple[str, ...]  # the K views it was fitted on
    weights: Array | None  # (K,), or (K, C) with one a class or output; None where there are none, as for the maximum
    used: tuple[str, ...]  # the views that a prediction needs
    n_outputs: int
    rule: Rule
    generated_names: bool
    temperature: float  # what log probabilities are divided by, between 0.01 and 100; 1 without "+t"
    classes: Array | None
    stops: Rule | None  # of those that stop early
    density: Callable[[Array], Prediction] | None  # of pooled numbers (regression)

    def __repr__(self) -> str:
        return f"Baseline({self.name}, {self.task}: {len(self.used)} of {len(self.names)} views)"

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """Aggregate the views of new inputs into one predictive distribution."""
        outputs = np.asarray(self._needed(predictions).outputs, dtype=np.float64)
        pooled = self.rule(outputs)
        if self.density is not None:
            return self.density(pooled)
        if self.temperature != 1:
            pooled = special.log_softmax(pooled / self.temperature, axis=1)
        named = predictions.classes if predictions.classes is not None else self.classes
        classes = np.arange(self.n_outputs) if named is None else named
        proba, shares = np.exp(pooled), self._pool_weights()[:, None] * special.softmax(outputs, axis=2)
        return CategoricalPrediction(proba, view_information(proba, shares), classes)

    def passes(self, predictions: ViewPredictions) -> Array:
        """Number of views that every input needs: (N,)."""
        if self.stops is None:
            return np.full(len(predictions), len(self.used))
        return self.stops(np.asarray(self._needed(predictions).outputs, dtype=np.float64))

    def _needed(self, predictions: ViewPredictions) -> ViewPredictions:
        """The used views, after a check that the predictions match the fit."""
        _, n_views, n_outputs = predictions.outputs.shape
        if (self.generated_names or predictions.generated_names) and n_views != len(self.names):
            problem = f"predictions have {n_views} unnamed views but {self.name!r} was fitted on {len(self.names)}"
            raise ValueError(f"{problem}; name them with ViewPredictions(names=[...])")
        if n_outputs != self.n_outputs:
            raise ValueError(f"predictions have {n_outputs} outputs but {self.name!r} was fitted on {self.n_outputs}")
        own, other = self.classes, predictions.classes
        if own is not None and other is not None and not np.array_equal(own, other):
            raise ValueError(f"predictions have classes {shown(other)} but {self.name!r} was fitted on {shown(own)}")
        return predictions.select(self.used)

    def _pool_weights(self) -> Array:
        """Weights of the used views on the simplex, for the views' disagreement: (K,)."""
        equal = np.full(len(self.used), 1 / len(self.used))
        if self.weights is None or self.weights.ndim == 2:
            return equal
        share = self.weights[[self.names.index(name) for name in self.used]]
        return share / share.sum() if (share >= 0).all() and share.sum() > 0 else equal


def fit_baseline(name: str, predictions: ViewPredictions, labels: LabelSets | ArrayLike, *, task: str) -> Baseline:
    """Fit one of the usual ways to aggregate views on calibration labels.

    Every label counts as often as its count. Only "original_noise", "raykar" and "dawid_skene" model label noise, by a
    confusion matrix an annotator.

    Parameters
    ----------
    name : str
        One of `vbtta.baselines.BASELINES[task]`, such as "original" (the view named identity), "uniform", "aug_tta" or
        "greedy"; the table "Baselines" of the documentation (docs/reference/judging.md) says what each does, and where
        it is from. In classification "+t" appended adds one temperature, fitted on the aggregated probabilities.
    predictions, labels
        Of the calibration sample; arrays of labels go through :meth:`LabelSets.from_array`.
    task : "classification" or "regression"
    """
    one_of("task", task, tuple(BASELINES))
    require_views(predictions)
    method, plus, suffix = str(name).partition("+")
    if method not in BASELINES[task] or (plus and (suffix != "t" or task == "regression")):
        also = "each also with '+t' appended" if task == "classification" else "a temperature is for classification"
        raise ValueError(f"there is no {task} baseline {name!r}; there are {', '.join(BASELINES[task])}; {also}")
    if method.startswith("original") and "identity" not in predictions.names:
        raise ValueError(f"{method!r} needs a view named 'identity'; the views are {list(predictions.names)}")
    labels = predictions.align(labels)
    if not len(labels):
        raise ValueError("labels are empty; a baseline needs at least one label")
    n_outputs, temperature, classes = predictions.outputs.shape[2], 1.0, predictions.classes
    identity = predictions.names.index("identity") if "identity" in predictions.names else None
    if task == "classification":
        rows, row = np.unique(labels.instance, return_inverse=True)
        target = np.zeros((len(rows), n_outputs))  # (N+, C)
        label = labels.categorical(n_outputs, classes)
        np.add.at(target, (row, label), labels.count)
        outputs = np.asarray(predictions.outputs[rows], dtype=np.float64)
        votes = Votes(row, label, np.zeros_like(row) if labels.annotator is None else labels.annotator, labels.count)
        fitted = CLASSIFICATION[method](methods.Sample(outputs, target, target.sum(axis=1), identity, votes))
        if plus:
            temperature = 1 / methods.best_slope(fitted.rule(outputs[:, fitted.used]), target)[1]
    else:
        y = labels.continuous(n_outputs)
        outputs = np.asarray(predictions.outputs, dtype=np.float64)[labels.instance]
        fitted, classes = REGRESSION[method](methods.Sample(outputs, y, labels.count, identity)), None
        variance = methods.residual_variance(y - fitted.rule(outputs[:, fitted.used]), y, labels.count)
        normal = partial(methods.normal_prediction, variance=variance)
        fitted = fitted._replace(density=fitted.density or normal)
    used, generated = tuple(predictions.names[k] for k in fitted.used), predictions.generated_names
    described = name, task, predictions.names, fitted.weights, used, n_outputs
    return Baseline(*described, fitted.rule, generated, temperature, classes, fitted.passes, fitted.density)
