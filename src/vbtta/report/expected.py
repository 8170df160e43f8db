"""What labels a policy expects: its prediction of the truth, seen through the annotators who gave them."""

__all__ = ["by_label", "expected_labels"]

from typing import Any

import numpy as np

from vbtta.labels import Array, LabelSets
from vbtta.mixtures import variance_factor
from vbtta.policy import Policy
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, Prediction


def by_label(prediction: Prediction, instance: Array) -> Prediction:
    """A prediction of inputs as one of their labels: a row a label, whose instances are given (J,)."""
    if isinstance(prediction, CategoricalPrediction):
        information = prediction.mutual_information[instance]
        return CategoricalPrediction(prediction.proba[instance], information, prediction.classes)
    weights, location, scale = prediction.weights, prediction.location, prediction.scale
    return ContinuousPrediction(weights[instance], prediction.dof, location[instance], scale[instance])


def expected_labels(policy: Policy, truth: Prediction, labels: LabelSets) -> Prediction:
    """The distribution of every label, from that of its input's truth, a row a label; noise must be modelled.

    An annotator the fit did not meet is unbiased and otherwise as those it met are on average.
    """
    people = policy.annotators
    who = _places(policy, labels, _size(people))
    if isinstance(truth, CategoricalPrediction):
        matrices = np.concatenate([people.confusion, people.confusion.mean(axis=0, keepdims=True)])  # (U + 1, C, C)
        proba = np.empty_like(truth.proba)
        for place in np.unique(who):
            proba[who == place] = truth.proba[who == place] @ matrices[place]
        return CategoricalPrediction(proba, np.zeros(len(proba)), truth.classes)
    C = people.bias.shape[1]
    bias = np.concatenate([people.bias, np.zeros((1, C))])[who]  # (J, C)
    variance = people.noise**2 + people.bias_error**2
    variance = np.concatenate([variance, variance.mean(axis=0, keepdims=True)])[who]  # (J, C)
    noise = variance[:, None] / variance_factor(truth.dof)[:, None]  # (J, K, C), as scales
    return ContinuousPrediction(
        truth.weights, truth.dof, truth.location + bias[:, None], truth.scale + noise[..., None] * np.eye(C)
    )


def _size(people: Any) -> int:
    """U, 1 where all are alike."""
    return len(people.confusion) if hasattr(people, "confusion") else len(people.noise)


def _places(policy: Policy, labels: LabelSets, n_people: int) -> Array:
    """Every label's annotator by the place in the fit, the number of them for strangers: (J,)."""
    if n_people == 1 or labels.annotator is None:
        return np.zeros(len(labels), dtype=np.intp)
    known = {name: place for place, name in enumerate(policy.annotator_names)}
    return np.array([known.get(name, n_people) for name in labels.annotator_names], dtype=np.intp)[labels.annotator]
