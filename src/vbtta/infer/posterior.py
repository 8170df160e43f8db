"""What a policy asks of a fitted model, whichever model it is."""

__all__ = ["AnnotatorNoise", "Posterior", "annotator_noise"]

from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy import special

from vbtta.infer.standard import Standard
from vbtta.infer.truth import AnnotatorState
from vbtta.labels import Array, LabelSets
from vbtta.predictions import Prediction, ViewPredictions


class Posterior(Protocol):
    """A fitted model without its data.

    Predictions handed to it hold the views of positive weight only, in the order of the fit.
    `annotator` gives for every label the annotator's place in the fit, or -1 for a stranger.
    """

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        ...

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by."""
        ...

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        ...

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The predictive distribution."""
        ...

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Prediction:
        """The truth of every input given its labels."""
        ...

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set: (N+,)."""
        ...

    def keep(self, views: Array) -> "Posterior":
        """The same with only some of the views, an index array; their weights sum to one again."""
        ...

    def describe_annotators(self, names: tuple[str, ...]) -> Any:
        """What the fit knows of the annotators, or None."""
        ...


class AnnotatorNoise(NamedTuple):
    """Annotators of continuous labels, in the labels' units."""

    names: tuple[str, ...]
    bias: Array  # (U, C): what they add on average; biases sum to zero
    bias_error: Array  # (U, C): its standard deviation
    noise: Array  # (U, C): standard deviation of their labels around the truth
    noise_interval: Array  # (U, C, 2): 90 %


def annotator_noise(people: AnnotatorState, standard: Standard, names: tuple[str, ...]) -> AnnotatorNoise:
    """Biases and noise levels of annotators with their uncertainty."""
    error = np.sqrt(np.diagonal(people.bias_covariance))[:, None] * standard.scale
    quantiles = special.gammaincinv(people.shape[:, None], [0.95, 0.05]) / people.rate[:, None]  # of tau: (U, 2)
    interval = standard.scale[:, None] / np.sqrt(quantiles)[:, None]
    noise = standard.scale / np.sqrt(people.precision)[:, None]
    return AnnotatorNoise(names, people.bias * standard.scale, error, noise, interval)
