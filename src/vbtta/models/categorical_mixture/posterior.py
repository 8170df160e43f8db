"""The fitted mixture of views for class labels, and what all posteriors of class labels share."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, view_information
from vbtta.inference.advi import WeightDraws
from vbtta.inference.laplace import WeightInformation
from vbtta.models.base import Pooling, Posterior
from vbtta.models.parts.class_data import BlockReader, SoftmaxViews, class_prediction, link_arguments
from vbtta.models.parts.gate import Gate
from vbtta.models.parts.label_noise import AnnotatorAccuracy, FittedNoise, class_factors, describe, score_labels
from vbtta.models.parts.links import LINKS, Calibration, view_proba


class ClassPosterior(Posterior):
    """A posterior that gives class probabilities, with or without label noise."""

    noise: FittedNoise | None

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Class probabilities for inputs whose views are those of positive weight, in order."""
        return class_prediction(predictions, None, self._block_reader(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The true class of every input given its labels; without a noise model one of the labels is right."""
        factors = class_factors(self.noise, predictions, labels, annotator)
        return class_prediction(predictions, factors, self._block_reader(predictions))

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, noise included: (N+,)."""
        prediction = class_prediction(predictions, None, self._block_reader(predictions), informed=False)
        return score_labels(self.noise, prediction, predictions, labels, annotator)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
        """Accuracies and confusion matrices of the annotators."""
        return describe(self.noise, names)

    @abstractmethod
    def _block_reader(self, predictions: ViewPredictions) -> BlockReader:
        """A function that gives class probabilities of some rows, and what gives their information."""


@dataclass(frozen=True)
class CategoricalPosterior(ClassPosterior):
    """A fitted categorical mixture: calibrated views, their weights and, where modelled, the label noise."""

    link: str  # a name in LINKS
    weights: Annotated[Array, "K"]
    class_weights: Annotated[Array, "K C"] | None
    calibration: Calibration
    noise: FittedNoise | None
    information: WeightInformation | None
    gate: Gate | None

    @property
    def kappa(self) -> Array:
        """The inverse temperatures of the views: (K,)."""
        return np.exp(self.calibration.log_kappa)

    def keep(self, views: Array) -> "CategoricalPosterior":
        """The same with only some of the views."""
        weights, by_class = self.weights[views], self.class_weights
        if by_class is not None:
            by_class = by_class[views] / np.maximum(by_class[views].sum(axis=0), 1e-300)
        return replace(
            self,
            weights=weights / weights.sum(),
            class_weights=by_class,
            calibration=self.calibration._replace(log_kappa=self.calibration.log_kappa[views]),
            information=None if self.information is None else self.information.take(views),
            gate=None if self.gate is None else self.gate.keep(views),
        )

    def pooling(self) -> Pooling:
        """The weighted average of the views' probabilities."""
        used, offset = self.weights > 0, self.calibration.offset
        weights = np.repeat(self.weights[:, None], len(offset), axis=1)
        if self.class_weights is not None:
            weights = self.class_weights
        scale = np.repeat(self.kappa[used][:, None], len(offset), axis=1)
        rows = np.broadcast_to(offset, scale.shape).copy()
        return Pooling("mixture", self.link, scale, rows, weights[used], self.gate)

    def _block_reader(self, predictions: ViewPredictions) -> BlockReader:
        link, used = LINKS[self.link], self.weights > 0
        calibration = self.calibration._replace(log_kappa=self.calibration.log_kappa[used])
        gate_weights = None if self.gate is None else self.gate.by_rows(predictions)

        def block(rows: slice) -> tuple[Array, Callable[[Array], Array]]:
            weights = self.weights[used] if gate_weights is None else gate_weights(rows)  # (K,) or (n, K)
            if link.canonical and self.class_weights is None:
                views = SoftmaxViews(predictions.outputs[rows], self.kappa[used], calibration.offset, weights)
                return views.mixture, views.information
            joint, inverse = view_proba(link, *link_arguments(predictions, rows, link), calibration)
            by_class = weights[..., None] if self.class_weights is None else self.class_weights[used]
            shares = (joint * inverse).T * by_class  # (n, K, C)
            return shares.sum(axis=1), lambda proba: view_information(proba, shares)

        return block


@dataclass(frozen=True)
class SampledCategoricalPosterior(WeightDraws, CategoricalPosterior):
    """A mixture for class labels."""
