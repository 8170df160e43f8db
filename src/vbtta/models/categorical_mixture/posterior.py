"""The fitted mixture of views for class labels, and its predictions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction
from vbtta.inference.guide import WeightDraws
from vbtta.inference.laplace import WeightInformation, weight_intervals
from vbtta.models.base import Pooling, Posterior
from vbtta.models.parts.calibration import Calibration
from vbtta.models.parts.class_data import (
    SoftmaxViews,
    class_names,
    joint_information,
    prediction_blocks,
    prediction_rows,
)
from vbtta.models.parts.gate import Gate
from vbtta.models.parts.label_noise import AnnotatorAccuracy, FittedNoise, class_factors, describe, score_labels
from vbtta.models.parts.links import LINKS, view_proba


@dataclass(frozen=True)
class CategoricalPosterior(Posterior):
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

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        return weight_intervals(self.weights, self.information, level)

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Class probabilities for inputs whose views are those of positive weight, in order."""
        if self.class_weights is not None or self.link != "softmax":
            return _prediction(predictions, self._joint(predictions))
        used, gate_weights = self.weights > 0, None if self.gate is None else self.gate.by_rows(predictions)
        proba, information = np.empty((len(predictions), len(self.calibration.offset))), np.empty(len(predictions))
        for rows in prediction_rows(predictions):
            weights = self.weights[used] if gate_weights is None else gate_weights(rows)
            views = SoftmaxViews(predictions.outputs[rows], self.kappa[used], self.calibration.offset, weights)
            proba[rows] = views.mixture / views.mixture.sum(axis=1, keepdims=True)
            information[rows] = views.information(proba[rows])
        return CategoricalPrediction(proba, information, class_names(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The true class of every input given its labels; `annotator` (J,) is -1 for those unknown to the fit.

        Without a noise model one of the labels is right.
        """
        factors = class_factors(self.noise, predictions, labels, annotator)

        def blocks() -> Iterator[tuple[slice, Array]]:
            for rows, joint in self._joint(predictions):
                joint = np.maximum(joint, np.finfo(np.float64).tiny) * factors[rows].T[:, None]
                joint /= joint.sum(axis=(0, 1))
                yield rows, joint

        return _prediction(predictions, blocks())

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, noise included: (N+,)."""
        return score_labels(self.noise, self.predict(predictions), predictions, labels, annotator)

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

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorAccuracy | None:
        """Accuracies and confusion matrices of the annotators."""
        return describe(self.noise, names)

    def pooling(self) -> Pooling:
        """The weighted average of the views' probabilities."""
        used, offset = self.weights > 0, self.calibration.offset
        weights = np.repeat(self.weights[:, None], len(offset), axis=1)
        if self.class_weights is not None:
            weights = self.class_weights
        scale = np.repeat(self.kappa[used][:, None], len(offset), axis=1)
        rows = np.broadcast_to(offset, scale.shape).copy()
        return Pooling("mixture", self.link, scale, rows, weights[used], self.gate)

    def _joint(self, predictions: ViewPredictions) -> Iterator[tuple[slice, Array]]:
        """Blocks of P(class, view), (C, K, n)."""
        link, used = LINKS[self.link], self.weights > 0
        calibration = Calibration(self.calibration.log_kappa[used], self.calibration.offset)
        gate_weights = None if self.gate is None else self.gate.by_rows(predictions)
        for rows, logits, variance in prediction_blocks(predictions, with_variance=link.uses_variance):
            joint, inverse = view_proba(link, logits, variance, calibration)
            if gate_weights is not None:
                joint *= inverse * gate_weights(rows).T
            elif self.class_weights is None:
                joint *= inverse * self.weights[used][:, None]
            else:
                joint *= inverse
                joint *= self.class_weights[used].T[:, :, None]
            joint /= joint.sum(axis=(0, 1))
            yield rows, joint


@dataclass(frozen=True)
class SampledCategoricalPosterior(WeightDraws, CategoricalPosterior):
    """A mixture for class labels."""


def _prediction(predictions: ViewPredictions, blocks: Iterable[tuple[slice, Array]]) -> CategoricalPrediction:
    """The prediction of blocks of P(class, view)."""
    N, _, C = predictions.outputs.shape
    proba, information = np.empty((N, C)), np.empty(N)
    for rows, joint in blocks:
        proba[rows], information[rows] = joint.sum(axis=1).T, joint_information(joint)
    return CategoricalPrediction(proba, information, class_names(predictions))
