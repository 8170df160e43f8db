"""Labels drawn from a fitted model, for the inputs and annotators of the observed ones."""

__all__ = ["simulator"]

from collections.abc import Callable

import numpy as np

from vbtta.infer.categorical_latent_posterior import LatentClassPosterior
from vbtta.infer.categorical_posterior import CategoricalPosterior
from vbtta.infer.label_noise import NoiseModel
from vbtta.labels import Array, LabelSets
from vbtta.policy import Policy
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, Prediction

Draw = Callable[[np.random.Generator], Array]


def simulator(policy: Policy, prediction: Prediction, labels: LabelSets) -> Draw:
    """A function that draws new labels: (J,) class positions or (J, C) numbers.

    Where label noise is modelled the labels of an instance share one truth.
    """
    people = policy.annotators
    if isinstance(prediction, CategoricalPrediction):
        if people is None:
            return lambda generator: _draw_class(generator, prediction.proba[labels.instance])
        assert isinstance(policy.posterior, CategoricalPosterior | LatentClassPosterior)  # the ones that have people
        noise, counts = policy.posterior.noise, policy.posterior.noise_counts
        assert noise is not None
        assert counts is not None
        return _noisy_classes(prediction.proba, labels.instance, noise, counts, _places(people.names, labels))
    if people is None:
        return lambda generator: _draw_number(generator, prediction, labels.instance)
    bias = np.concatenate([people.bias, np.zeros((1, people.bias.shape[1]))])
    scale = np.concatenate([people.noise, np.sqrt((people.noise**2).mean(axis=0, keepdims=True))])
    who = _places(people.names, labels)

    def numbers(generator: np.random.Generator) -> Array:
        truth = _draw_number(generator, prediction, np.arange(labels.n_instances))  # (N, C)
        error = bias[who] + scale[who] * generator.standard_normal((len(who), bias.shape[1]))
        return np.asarray(truth[labels.instance] + error)

    return numbers


def _noisy_classes(proba: Array, instance: Array, noise: NoiseModel, counts: Array, who: Array) -> Draw:
    """Classes through error rates that are drawn anew from their posterior every time.

    Of the prior of a confusion matrix one label a row stays. It stands for a dozen labels of every class, which few
    annotators have given: labels simulated through them would be noisier than those that the matrices come from.
    """
    C = noise.n_classes
    if noise.kind == "confusion":
        counts = np.maximum(counts - noise.prior, 0) + noise.prior / noise.prior.sum(axis=1, keepdims=True)
    counts = np.concatenate([counts, counts.mean(axis=0, keepdims=True)])  # strangers come last

    def through_matrices(generator: np.random.Generator) -> Array:
        truth = _draw_class(generator, proba)[instance]  # (J,)
        needed, place = np.unique(who * C + truth, return_inverse=True)  # annotator and true class
        rows = np.maximum(generator.standard_gamma(counts.reshape(-1, C)[needed]), 1e-300)
        return _draw_class(generator, (rows / rows.sum(axis=1, keepdims=True))[place])

    def through_accuracies(generator: np.random.Generator) -> Array:
        truth = _draw_class(generator, proba)[instance]
        accuracy = generator.beta(counts[:, 0], counts[:, 1])[who]
        wrong = (truth + generator.integers(1, C, len(truth))) % C
        return np.where(generator.random(len(truth)) < accuracy, truth, wrong)

    return through_matrices if noise.kind == "confusion" else through_accuracies


def _places(names: tuple[str, ...], labels: LabelSets) -> Array:
    """Every label's annotator among those of the fit, and one past the last for strangers."""
    if labels.annotator is None:
        return np.full(len(labels), 0 if len(names) == 1 else len(names))
    known = {name: place for place, name in enumerate(names)}
    if len(names) == 1:
        return np.zeros(len(labels), dtype=np.intp)
    return np.array([known.get(name, len(names)) for name in labels.annotator_names])[labels.annotator]


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
