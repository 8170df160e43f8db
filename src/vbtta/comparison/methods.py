"""What can be compared: baselines and policies by name, functions that fit, and whatever is fitted already."""

__all__ = ["Entry", "default_methods", "entries", "fit", "predict", "views_used"]

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vbtta.baselines import BASELINES, fit_baseline
from vbtta.baselines.regression import residual_variance
from vbtta.fit import fit_policy
from vbtta.labels import Array, LabelSets
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, Prediction, ViewPredictions

POLICIES = {"vbtta": "auto", "vbtta-mixture": "mixture", "vbtta-latent": "latent"}
_WITH_TEMPERATURE = ("original", "uniform", "greedy")


class Entry(NamedTuple):
    """One method: its name in the table, how to fit it (or the fitted object), and the baseline it is, if any."""

    name: str
    method: Any
    baseline: str | None


def default_methods(task: str) -> list[str]:
    """Every baseline of a task, temperature-scaled ones where calibration alone may be the gain, and the policies."""
    scaled = [f"{name}+t" for name in _WITH_TEMPERATURE] if task == "classification" else []
    return [*BASELINES[task], *scaled, *POLICIES]


def entries(methods: Sequence[Any] | Mapping[str, Any] | None, task: str, seed: int) -> list[Entry]:
    """The methods to run, each under a name of its own."""
    if methods is None:
        methods = default_methods(task)
    if isinstance(methods, str) or not len(methods):
        raise ValueError(f"methods must be a list or a dict of methods; got {methods!r}")
    named = methods.items() if isinstance(methods, Mapping) else [(None, method) for method in methods]
    found = [_entry(name, method, task, seed) for name, method in named]
    names = [entry.name for entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"methods {twice} occur more than once; give a dict of names and methods")
    return found


def fit(entry: Entry, predictions: ViewPredictions, labels: LabelSets) -> Any:
    """The fitted method: what has `predict` is fitted already."""
    if hasattr(entry.method, "predict"):
        return entry.method
    fitted = entry.method(predictions, labels)
    if not hasattr(fitted, "predict"):
        raise TypeError(f"method {entry.name!r} must return something with .predict; got {type(fitted).__name__}")
    return fitted


def predict(
    entry: Entry, fitted: Any, predictions: ViewPredictions, train: tuple[ViewPredictions, LabelSets], task: str
) -> Prediction:
    """A prediction with a distribution: plain means get a normal density of their calibration residuals."""
    found = fitted.predict(predictions)
    expected = CategoricalPrediction if task == "classification" else ContinuousPrediction
    shape = (len(predictions), predictions.mean.shape[2])
    if isinstance(found, expected):
        got = found.proba.shape if isinstance(found, CategoricalPrediction) else found.location[:, 0].shape
        if got != shape:
            raise ValueError(f"method {entry.name!r} must predict {shape} outputs; got {got}")
        return found
    if isinstance(found, CategoricalPrediction | ContinuousPrediction):
        raise TypeError(f"method {entry.name!r} gives a {type(found).__name__}, which is not for {task}")
    mean = _plain(found, shape, entry.name)
    if task == "classification":
        classes = np.arange(shape[1]) if predictions.classes is None else predictions.classes
        return CategoricalPrediction(mean, np.zeros(len(mean)), classes)
    views, labels = train
    y = labels.continuous(shape[1])
    at_train = _plain(fitted.predict(views), (len(views), shape[1]), entry.name)
    variance = residual_variance(y - at_train[labels.instance], y, labels.count)
    scale = np.broadcast_to(np.diag(variance), (len(mean), 1, shape[1], shape[1]))
    return ContinuousPrediction(np.ones((len(mean), 1)), np.array([np.inf]), mean[:, None], scale)


def views_used(fitted: Any, predictions: ViewPredictions) -> tuple[str, ...]:
    """The views a fitted method needs, by name: all of them where it does not say."""
    if hasattr(fitted, "used"):
        return tuple(fitted.used)
    weights, names = getattr(fitted, "weights", None), tuple(getattr(fitted, "names", predictions.names))
    if weights is None or len(weights) != len(names):
        return predictions.names
    needed = np.flatnonzero(np.abs(np.asarray(weights)).reshape(len(names), -1).sum(axis=1))
    return tuple(names[k] for k in needed)


def _entry(name: Any, method: Any, task: str, seed: int) -> Entry:
    if isinstance(method, str):
        label = method if name is None else str(name)
        if method in POLICIES:
            return Entry(label, _policy(task, POLICIES[method], seed), None)
        base = method.removesuffix("+t") if task == "classification" else method
        if base in BASELINES[task]:
            return Entry(label, partial(_baseline, method, task), method)
        known = ", ".join([*BASELINES[task], *POLICIES])
        raise ValueError(f"there is no {task} method {method!r}; there are {known}")
    if not hasattr(method, "predict") and not callable(method):
        raise TypeError(
            f"a method is a name, a function of (predictions, labels) or an object with .predict; got "
            f"{type(method).__name__}"
        )
    if name is None:
        name = getattr(method, "name", None) or getattr(method, "__name__", None) or type(method).__name__
    return Entry(str(name), method, None)


def _baseline(method: str, task: str, predictions: ViewPredictions, labels: LabelSets) -> Any:
    return fit_baseline(method, predictions, labels, task=task)


def _policy(task: str, model: Any, seed: int) -> Callable[[ViewPredictions, LabelSets], Any]:
    return partial(fit_policy, task=task, model=model, seed=seed)


def _plain(found: Any, shape: tuple[int, int], name: str) -> Array:
    array = np.asarray(found, dtype=np.float64)
    array = array[:, None] if array.ndim == 1 and shape[1] == 1 else array
    if array.shape != shape:
        raise ValueError(f"method {name!r} must predict an array of shape {shape}; got {array.shape}")
    return array
