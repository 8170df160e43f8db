"""Whether a fitted model makes labels like the observed ones, and whether its weights hang on its priors."""

__all__ = ["PredictiveCheck", "Sensitivity", "predictive_checks", "prior_sensitivity"]

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from vbtta.diagnostics.simulation import simulator
from vbtta.diagnostics.views import some_labelled
from vbtta.engines import fit_model
from vbtta.labels import Array, LabelSets
from vbtta.policy import ConvergenceWarning, Policy
from vbtta.predictions import CategoricalPrediction, ViewPredictions
from vbtta.specs import EM

_FACTOR = 3.0  # priors are made so much stronger and weaker
_PRIORS = ("beta", "gamma", "nu", "shrinkage", "kappa_scale", "xi_scale", "offset_scale", "confusion_prior")
_OF_NOISE = {"gamma": "annotator", "confusion_prior": "confusion"}  # matter to one noise model only


class PredictiveCheck(NamedTuple):
    """One statistic of the label sets, and what the model expects of it."""

    statistic: str
    observed: float
    expected: float  # mean over simulations
    low: float  # of the central 95 %
    high: float
    p_value: float  # two-sided share of simulations that are as extreme


class Sensitivity(NamedTuple):
    """How far the weights move when one prior is changed."""

    prior: str
    factor: float
    distance: float  # total variation between the two sets of weights, 0 to 1


Statistic = Callable[["_Sets"], float]


class _Sets(NamedTuple):
    """Label sets next to what was predicted for them."""

    value: Array  # (J,) class positions or (J, C) numbers
    instance: Array  # (J,)
    repeats: Array  # (J,)
    n_instances: int
    centre: Array  # (J,) predicted class or (J, C) predicted mean
    spread: Array  # (J, C) predicted standard deviation; ones for classes


def predictive_checks(
    policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, simulations: int = 200, seed: int = 0
) -> tuple[PredictiveCheck, ...]:
    """Compare the label sets with simulated ones of the same inputs and annotators.

    Labels are drawn from the predictive distribution and, where label noise is modelled, through what the labels say of
    it, error rates of classes drawn from their posterior: then the labels of an instance share one truth. A small
    p-value names a respect in which the model is wrong.
    """
    labels = labels.align(len(predictions), predictions.ids)
    rows = some_labelled(labels, seed)
    given = labels.take(rows)
    prediction = policy.predict(predictions.take(rows))
    generator = np.random.default_rng(seed)
    if isinstance(prediction, CategoricalPrediction):
        value = given.categorical(prediction.proba.shape[1], predictions.classes)
        centre = prediction.proba.argmax(axis=1)[given.instance]
        spread = np.ones((len(given), 1))
        statistics = _class_statistics(prediction.proba.shape[1], prediction.classes, given)
    else:
        value = given.continuous(prediction.mean.shape[1])
        centre, spread = prediction.mean[given.instance], np.sqrt(prediction.variance)[given.instance]
        statistics = _number_statistics(given)
    sets = _Sets(value, given.instance, given.count, given.n_instances, centre, spread)
    draw = simulator(policy, prediction, given)
    simulated = [sets._replace(value=draw(generator)) for _ in range(simulations)]
    return tuple(_check(name, rule, sets, simulated) for name, rule in statistics.items())


def prior_sensitivity(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> tuple[Sensitivity, ...]:
    """How far the weights move when every prior in turn is multiplied by 3 and divided by 3: one fit each."""
    if not isinstance(policy.engine, EM):
        raise ValueError(f"sensitivity refits by EM; the policy was fitted by {type(policy.engine).__name__}")
    labels = labels.align(len(predictions), predictions.ids)
    rows = some_labelled(labels, 0)
    inside, given = predictions.select(policy.fitted or policy.names).take(rows), labels.take(rows)
    if len(inside.names) == 1:
        return ()

    def weights(model: Any) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return fit_model(inside, given, model, policy.engine, task=policy.task).weights

    reference, noise = weights(policy.model), getattr(policy.model, "noise", None)
    found = []
    for prior in _PRIORS:
        value = getattr(policy.model, prior, None)
        if value is None or _OF_NOISE.get(prior, noise) != noise:
            continue
        for factor in (1 / _FACTOR, _FACTOR):
            changed = tuple(factor * entry for entry in value) if isinstance(value, tuple) else factor * value
            moved = weights(replace(cast("Any", policy.model), **{prior: changed}))
            found.append(Sensitivity(prior, factor, float(0.5 * np.abs(moved - reference).sum())))
    return tuple(found)


def _class_statistics(n_classes: int, classes: Array, labels: LabelSets) -> dict[str, Statistic]:
    statistics: dict[str, Statistic] = {"share of labels that are the predicted class": _hits}
    if (labels.labels_per_instance >= 2).any():
        statistics["share of pairs of labels that agree"] = _agreement
    if n_classes <= 20:
        for c in range(n_classes):
            statistics[f"frequency of class {classes[c]}"] = _frequency(c)
    return statistics


def _number_statistics(labels: LabelSets) -> dict[str, Statistic]:
    statistics: dict[str, Statistic] = {
        "mean residual, in predicted deviations": lambda sets: _mean(_standard(sets).mean(axis=1), sets),
        "mean squared residual, in predicted variances": lambda sets: _mean((_standard(sets) ** 2).mean(axis=1), sets),
        "share of residuals beyond 2 deviations": lambda sets: _mean((np.abs(_standard(sets)) > 2).mean(axis=1), sets),
        "share of residuals beyond 4 deviations": lambda sets: _mean((np.abs(_standard(sets)) > 4).mean(axis=1), sets),
        "mean cubed residual, in predicted deviations": lambda sets: _mean((_standard(sets) ** 3).mean(axis=1), sets),
    }
    if (labels.labels_per_instance >= 2).any():
        statistics["spread among the labels of an instance"] = _within
    return statistics


def _mean(each: Array, sets: _Sets) -> float:
    return float((sets.repeats * each).sum() / sets.repeats.sum())


def _standard(sets: _Sets) -> Array:
    return np.asarray((sets.value - sets.centre) / sets.spread)


def _hits(sets: _Sets) -> float:
    return _mean(sets.value == sets.centre, sets)


def _frequency(c: int) -> Statistic:
    return lambda sets: _mean(sets.value == c, sets)


def _agreement(sets: _Sets) -> float:
    """Of all pairs of labels of one instance, those that are equal."""
    C = int(sets.value.max()) + 1
    each = np.bincount(sets.instance * C + sets.value, sets.repeats, sets.n_instances * C).reshape(-1, C)
    total = each.sum(axis=1)
    return float((each * (each - 1)).sum() / max((total * (total - 1)).sum(), 1e-300))


def _within(sets: _Sets) -> float:
    """Standard deviation of labels around the mean of their instance, pooled over instances and outputs."""
    weight = np.bincount(sets.instance, sets.repeats, sets.n_instances)
    degrees = np.maximum(weight - 1, 0).sum()
    total = 0.0
    for column in sets.value.T:
        mean = np.bincount(sets.instance, sets.repeats * column, sets.n_instances) / np.where(weight > 0, weight, 1)
        total += float((sets.repeats * (column - mean[sets.instance]) ** 2).sum())
    return float(np.sqrt(total / max(degrees * sets.value.shape[1], 1e-300)))


def _check(name: str, rule: Statistic, observed: _Sets, simulated: list[_Sets]) -> PredictiveCheck:
    value, expected = rule(observed), np.array([rule(sets) for sets in simulated])
    low, high = np.quantile(expected, [0.025, 0.975])
    below, above = (1 + (expected <= value).sum()), (1 + (expected >= value).sum())
    p_value = min(1.0, 2 * min(below, above) / (1 + len(expected)))
    return PredictiveCheck(name, float(value), float(expected.mean()), float(low), float(high), float(p_value))
