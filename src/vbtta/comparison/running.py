"""`compare`: fit every method on one sample, score it on another."""

__all__ = ["Scored", "compare"]

import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import between, whole_number
from vbtta._support.fingerprints import draws_of
from vbtta.comparison.methods import entries, fit, predict, views_used
from vbtta.comparison.scores import METRICS, bootstrap, columns, evaluate, held_out
from vbtta.comparison.table import Comparison, Difference
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions


class Scored(NamedTuple):
    """What is kept of a method once it was fitted and scored."""

    columns: dict[str, Array]  # per-instance sums by metric
    views: tuple[str, ...]  # that it needs
    seconds: float  # of its fit


def compare(
    train_predictions: ViewPredictions,
    train_labels: LabelSets | ArrayLike,
    test_predictions: ViewPredictions,
    test_labels: LabelSets | ArrayLike,
    *,
    task: str,
    methods: Sequence[Any] | Mapping[str, Any] | None = None,
    draws: int | Mapping[str, int] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    store: MutableMapping[str, Scored] | None = None,
) -> Comparison:
    """Compare ways to aggregate views: fitted on one sample, scored on another.

    Classification: accuracy, negative log-likelihood, Brier score and expected calibration error; regression: squared
    and absolute error, negative log-likelihood, CRPS and the coverage of 90 % intervals. Every test label counts as
    often as its count. Differences have percentile intervals from a paired bootstrap over test instances.

    Parameters
    ----------
    train_predictions, test_predictions : ViewPredictions
    train_labels, test_labels : LabelSets or array
    task : "classification" or "regression"
    methods : list or dict, optional
        Names of baselines (see :func:`vbtta.baselines.fit_baseline`), "vbtta" (:func:`vbtta.fit.fit_policy` with its
        defaults), "vbtta-mixture", "vbtta-latent"; functions of (predictions, labels) that return an object with
        `predict`; or such objects. Theirs may return a Prediction or an array, (N, C) probabilities or means; means
        get a normal density of the calibration residuals' mean square. By default all names.
    draws : int or dict, optional
        Draws of every view, or by name (1 where absent), for the number of forward passes; by default what the
        predictions tell.
    resamples : int
        Of the bootstrap.
    level : float
        Of the intervals.
    seed : int
        For the bootstrap and the policies' folds.
    store : mapping, optional
        Filled with what was scored, by method, as it goes; methods found there are not fitted again (and are not in
        `Comparison.fitted`), so a comparison of the same data can go on where it was interrupted.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.normal(size=400)
    >>> outputs = y[:, None, None] + rng.normal(size=(400, 3, 1))
    >>> views = ViewPredictions(outputs, names=["identity", "flip", "crop"])
    >>> train, test = np.arange(200), np.arange(200, 400)
    >>> outcome = compare(views.take(train), y[train], views.take(test), y[test],
    ...                   task="regression", methods=["original", "uniform"])
    >>> outcome
    Comparison(regression: 2 methods on 200 instances)
    >>> outcome["uniform", "mse"] < outcome["original", "mse"]
    True
    >>> outcome.against_original.high[1, 0] < 0  # beyond doubt
    np.True_
    """
    if task not in METRICS:
        raise ValueError(f"task must be one of {', '.join(METRICS)}; got {task!r}")
    between("level", level, 0.01, 0.99)
    resamples = whole_number("resamples", resamples, least=1)
    labels = _labels(train_labels, train_predictions)
    test = held_out(test_predictions, _labels(test_labels, test_predictions), task)
    chosen, notes = entries(methods, task, seed), []
    if "identity" not in train_predictions.names:
        kept = [entry for entry in chosen if entry.baseline not in ("original", "original+t")]
        if len(kept) < len(chosen) or methods is None:
            notes.append("no view is named identity, so original is left out")
        chosen = kept
    if not chosen:
        raise ValueError("no method is left to compare: no view is named 'identity', which 'original' needs")

    scored: MutableMapping[str, Scored] = {} if store is None else store
    fitted: dict[str, Any] = {}
    for entry in chosen:
        if entry.name in scored:
            continue
        start = time.perf_counter()
        method = fit(entry, train_predictions, labels)
        spent = time.perf_counter() - start if method is not entry.method else 0.0
        at_test = predict(entry, method, test_predictions, (train_predictions, labels), task)
        scored[entry.name] = Scored(columns(at_test, test), views_used(method, train_predictions), spent)
        fitted[entry.name] = method

    outcome = [scored[entry.name] for entry in chosen]
    seconds, used, found = ([getattr(one, part) for one in outcome] for part in ("seconds", "views", "columns"))
    values = evaluate(found, test)
    replicates = bootstrap(found, test, resamples=resamples, seed=seed)
    names, loss = [entry.name for entry in chosen], values[:, METRICS[task].index("nll")]
    original = next((m for m, entry in enumerate(chosen) if entry.baseline == "original"), None)
    baselines = [m for m, entry in enumerate(chosen) if entry.baseline is not None]
    best = min(baselines, key=lambda m: loss[m]) if baselines else None
    if best is not None:
        notes.append(f"the baseline with the best test NLL is {names[best]}, chosen with hindsight")
    return Comparison(
        task=task,
        methods=tuple(names),
        metrics=METRICS[task],
        values=values,
        against_original=_difference(names, values, replicates, original, level),
        against_best=_difference(names, values, replicates, best, level),
        fit_seconds=np.array(seconds),
        views_used=np.array([len(views) for views in used]),
        forward_passes=np.array([sum(_draws(draws, view, test_predictions) for view in views) for views in used]),
        n_instances=test.n_instances,
        n_labels=float(test.times.sum()),
        level=level,
        notes=tuple(notes),
        fitted=fitted,
    )


def _difference(
    names: list[str], values: Array, replicates: Array, reference: int | None, level: float
) -> Difference | None:
    if reference is None:
        return None
    tails = [0.5 - 0.5 * level, 0.5 + 0.5 * level]
    low, high = np.quantile(replicates - replicates[:, [reference]], tails, axis=0)
    return Difference(names[reference], values - values[reference], low, high)


def _labels(labels: LabelSets | ArrayLike, predictions: ViewPredictions) -> LabelSets:
    sets = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    return sets.align(len(predictions), predictions.ids)


def _draws(draws: int | Mapping[str, int] | None, view: str, predictions: ViewPredictions) -> int:
    if draws is None:
        return draws_of(predictions.fingerprints.get(view, "")) or 1
    return whole_number("draws", draws.get(view, 1) if isinstance(draws, Mapping) else draws, least=1)
