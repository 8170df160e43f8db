"""Posterior predictive checks of the label sets, and the sensitivity of the weights to the priors."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.views import labelled_sample
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction
from vbtta.fit import fit_model
from vbtta.inference.em import EM
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.policy import ConvergenceWarning, Policy

_FACTOR = 3.0  # by which every prior is multiplied and divided
_PRIORS = ("beta", "gamma", "nu", "shrinkage", "kappa_scale", "xi_scale", "offset_scale", "confusion_prior")
_OF_NOISE = {"gamma": "annotator", "confusion_prior": "confusion"}  # priors of one noise model only

Draw = Callable[[np.random.Generator], Array]
Statistic = Callable[["_Sets"], float]


class PredictiveCheck(NamedTuple):
    """A statistic of the label sets, observed and simulated."""

    statistic: str
    observed: float
    expected: float  # mean over simulations
    low: float  # of the central 95 %
    high: float
    p_value: float  # two-sided share of simulations that are as extreme


class Sensitivity(NamedTuple):
    """Change of the weights when one prior is changed."""

    prior: str
    factor: float
    distance: float  # total variation between the two sets of weights, 0 to 1


class _Sets(NamedTuple):
    """Label sets and their predictions."""

    value: Array  # (J,) class positions or (J, C) numbers
    instance: Array  # (J,)
    repeats: Array  # (J,)
    n_instances: int
    centre: Array  # (J,) predicted class or (J, C) predicted mean
    spread: Array  # (J, C) predicted standard deviation; ones for classes

    def mean(self, scores: Array) -> float:
        """Mean over labels of one score each, (J,), or several, (J, C)."""
        each = scores if scores.ndim == 1 else scores.mean(axis=1)
        return float((self.repeats * each).sum() / self.repeats.sum())

    @property
    def residual(self) -> Array:
        """Residuals in predicted standard deviations: (J, C)."""
        return np.asarray((self.value - self.centre) / self.spread)


def predictive_checks(
    policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, simulations: int = 200, seed: int = 0
) -> tuple[PredictiveCheck, ...]:
    """Compare the label sets with simulated ones of the same inputs and annotators.

    Labels are drawn from the predictive distribution. Where label noise is modelled, the labels of an instance share
    one truth and are drawn through the annotators' noise, error rates of classes drawn from their posterior. A small
    p-value names a respect in which the model is wrong.
    """
    labels = labels.align(len(predictions), predictions.ids)
    rows = labelled_sample(labels, seed)
    given = labels.take(rows)
    prediction = policy.predict(predictions.take(rows))
    statistics: dict[str, Statistic]
    if isinstance(prediction, CategoricalPrediction):
        n_classes = prediction.proba.shape[1]
        value = given.categorical(n_classes, predictions.classes)
        centre, spread = prediction.proba.argmax(axis=1)[given.instance], np.ones((len(given), 1))
        statistics = {"share of labels that are the predicted class": lambda sets: sets.mean(sets.value == sets.centre)}
        repeated: dict[str, Statistic] = {"share of pairs of labels that agree": _agreement}
        frequencies: dict[str, Statistic] = {
            f"frequency of class {prediction.classes[c]}": partial(_frequency, c) for c in range(n_classes)
        }
    else:
        value = given.continuous(prediction.mean.shape[1])
        centre, spread = prediction.mean[given.instance], np.sqrt(prediction.variance)[given.instance]
        statistics = {
            "mean residual, in predicted deviations": lambda sets: sets.mean(sets.residual),
            "mean squared residual, in predicted variances": lambda sets: sets.mean(sets.residual**2),
            "share of residuals beyond 2 deviations": lambda sets: sets.mean(np.abs(sets.residual) > 2),
            "share of residuals beyond 4 deviations": lambda sets: sets.mean(np.abs(sets.residual) > 4),
            "mean cubed residual, in predicted deviations": lambda sets: sets.mean(sets.residual**3),
        }
        repeated, frequencies = {"spread among the labels of an instance": _within}, {}
    if (given.labels_per_instance >= 2).any():
        statistics |= repeated
    if len(frequencies) <= 20:
        statistics |= frequencies
    sets = _Sets(value, given.instance, given.count, given.n_instances, centre, spread)
    draw, generator = _simulator(policy, prediction, given), np.random.default_rng(seed)
    simulated = [sets._replace(value=draw(generator)) for _ in range(simulations)]
    return tuple(_check(name, statistic, sets, simulated) for name, statistic in statistics.items())


def prior_sensitivity(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> tuple[Sensitivity, ...]:
    """Changes of the weights when every prior in turn is multiplied by 3 and divided by 3: one fit each.

    Of a stack, its heaviest member is fitted.
    """
    policy = policy.heaviest_member
    if not isinstance(policy.engine, EM):
        raise ValueError(f"sensitivity refits by EM; the policy was fitted by {type(policy.engine).__name__}")
    labels = labels.align(len(predictions), predictions.ids)
    rows = labelled_sample(labels, 0)
    views, given = predictions.select(policy.fitted or policy.names).take(rows), labels.take(rows)
    if len(views.names) == 1:
        return ()

    def weights(model: Any) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return fit_model(views, given, model, policy.engine).weights

    reference, noise = weights(policy.model), getattr(policy.model, "noise", None)
    changes = []
    for prior in _PRIORS:
        value = getattr(policy.model, prior, None)
        if value is None or _OF_NOISE.get(prior, noise) != noise:
            continue
        for factor in (1 / _FACTOR, _FACTOR):
            changed = tuple(factor * entry for entry in value) if isinstance(value, tuple) else factor * value
            refitted = weights(replace(cast("Any", policy.model), **{prior: changed}))
            changes.append(Sensitivity(prior, factor, float(0.5 * np.abs(refitted - reference).sum())))
    return tuple(changes)


def annotator_places(names: Sequence[str], labels: LabelSets) -> Array:
    """Every label's annotator by position in the fit, one past the last for annotators that it did not meet: (J,).

    All positions are 0 where the fit has one annotator or none by name.
    """
    if len(names) <= 1 or labels.annotator is None:
        return np.full(len(labels), 0 if len(names) <= 1 else len(names))
    known = {name: place for place, name in enumerate(names)}
    return np.array([known.get(name, len(names)) for name in labels.annotator_names])[labels.annotator]


def _frequency(c: int, sets: _Sets) -> float:
    return sets.mean(sets.value == c)


def _agreement(sets: _Sets) -> float:
    """Of all pairs of labels of one instance, those that are equal."""
    C = int(sets.value.max()) + 1
    counts = np.bincount(sets.instance * C + sets.value, sets.repeats, sets.n_instances * C).reshape(-1, C)
    total = counts.sum(axis=1)
    return float((counts * (counts - 1)).sum() / max((total * (total - 1)).sum(), 1e-300))


def _within(sets: _Sets) -> float:
    """Standard deviation of labels around the mean of their instance, pooled over instances and outputs."""
    weight = np.bincount(sets.instance, sets.repeats, sets.n_instances)
    degrees = np.maximum(weight - 1, 0).sum()
    total = 0.0
    for column in sets.value.T:
        mean = np.bincount(sets.instance, sets.repeats * column, sets.n_instances) / np.where(weight > 0, weight, 1)
        total += float((sets.repeats * (column - mean[sets.instance]) ** 2).sum())
    return float(np.sqrt(total / max(degrees * sets.value.shape[1], 1e-300)))


def _check(name: str, statistic: Statistic, observed: _Sets, simulated: list[_Sets]) -> PredictiveCheck:
    value, values = statistic(observed), np.array([statistic(sets) for sets in simulated])
    low, high = np.quantile(values, [0.025, 0.975])
    tail = min(1 + (values <= value).sum(), 1 + (values >= value).sum())
    p_value = min(1.0, 2 * tail / (1 + len(values)))
    return PredictiveCheck(name, float(value), float(values.mean()), float(low), float(high), float(p_value))


def _simulator(policy: Policy, prediction: Prediction, labels: LabelSets) -> Draw:
    """A function that draws new labels of the same inputs and annotators: (J,) class positions or (J, C) numbers."""
    annotators = policy.annotators
    if isinstance(prediction, CategoricalPrediction):
        if annotators is None:
            return lambda generator: _draw_class(generator, prediction.proba[labels.instance])
        assert policy.label_noise is not None
        draw_labels = policy.label_noise.label_sampler(annotator_places(annotators.names, labels))
        return lambda generator: draw_labels(generator, _draw_class(generator, prediction.proba)[labels.instance])
    if annotators is None:
        return lambda generator: _draw_number(generator, prediction, labels.instance)
    assert isinstance(annotators, AnnotatorNoise)
    bias = np.concatenate([annotators.bias, np.zeros((1, annotators.bias.shape[1]))])
    scale = np.concatenate([annotators.noise, np.sqrt((annotators.noise**2).mean(axis=0, keepdims=True))])
    annotator = annotator_places(annotators.names, labels)

    def numbers(generator: np.random.Generator) -> Array:
        truth = _draw_number(generator, prediction, np.arange(labels.n_instances))  # (N, C)
        error = bias[annotator] + scale[annotator] * generator.standard_normal((len(annotator), bias.shape[1]))
        return np.asarray(truth[labels.instance] + error)

    return numbers


def _draw_class(generator: np.random.Generator, proba: Array) -> Array:
    above = generator.random(len(proba))[:, None] > np.cumsum(proba, axis=1)
    return np.asarray(np.minimum(above.sum(axis=1), proba.shape[1] - 1))


def _draw_number(generator: np.random.Generator, prediction: ContinuousPrediction, rows: Array) -> Array:
    """One draw of the predictive mixture for each of the rows: (J, C)."""
    view = _draw_class(generator, prediction.weights[rows])
    dof = prediction.dof[view]
    factor = np.linalg.cholesky(prediction.scale[rows, view])  # (J, C, C)
    normal = generator.standard_normal((len(rows), factor.shape[1]))
    finite = np.where(np.isinf(dof), 1.0, dof)
    shrink = np.where(np.isinf(dof), 1.0, np.sqrt(finite / generator.chisquare(finite)))
    return np.asarray(prediction.location[rows, view] + shrink[:, None] * np.einsum("jcd,jd->jc", factor, normal))
