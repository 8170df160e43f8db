"""Mixtures of views that give scores: what the posteriors for ordered levels and for rankings share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction
from vbtta.inference.advi import N_DRAWS, Guide, WeightDraws
from vbtta.models.base import Posterior
from vbtta.models.parts.class_data import class_names
from vbtta.models.parts.standard import Standard

_PREDICTION_DRAWS = 50  # that predictions are averaged over


def score_of(values: Array, count: Array, *, within: bool) -> Standard:
    """Mean and standard deviation of scores (J, K, L) of labels with counts; with `within`, those within a list."""
    location = 0.0 if within else float(np.average(values.mean(axis=(1, 2)), weights=count))
    squares = np.var(values, axis=2).mean(axis=1) if within else ((values - location) ** 2).mean(axis=(1, 2))
    spread = float(np.sqrt(np.average(squares, weights=count)))
    own = np.asarray(location), np.asarray(spread if spread > 0 else 1.0)
    return Standard(*own, *own)


@dataclass(frozen=True)
class OrderedPosterior(WeightDraws, Posterior):
    """A mixture of views for ordered levels or for rankings."""

    weights: Annotated[Array, "K"]
    score_units: Standard  # of the views' scores, which the priors are relative to

    @classmethod
    def of(cls, guide: Guide, units: Standard, *rest: Any) -> Self:
        """The posterior of a fit, with all views."""
        weights = guide.draw(N_DRAWS)["weights"].mean(axis=0)
        return cls(guide, np.arange(len(weights)), weights, units, *rest)

    def keep(self, views: Array) -> Self:
        """The same with only some of the views."""
        weights = self.weights[views]
        return replace(self, weights=weights / weights.sum(), kept=self.kept[views])

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Probabilities of the levels, or of each item to be the best: sorted by them, items are in predicted order."""
        return self._prediction(predictions, self.joint(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The views' predictions under the posterior of the view given all labels of an input."""
        joint = self.joint(predictions)
        total = np.zeros((joint.shape[2], joint.shape[1]))  # (n, K)
        np.add.at(total, labels.instance, labels.count[:, None] * self.log_views(predictions, labels, joint))
        joint *= np.exp(total - total.max(axis=1, keepdims=True)).T
        return self._prediction(predictions, joint / joint.sum(axis=(0, 1)))

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's labels: (N+,)."""
        log_labels = labels.count * self.log_labels(predictions, labels)
        return np.asarray(np.bincount(labels.instance, log_labels, labels.n_instances)[labels.labelled])

    def parameters(self) -> list[dict[str, Array]]:
        """The draws that predictions are averaged over, with the weights of the kept views."""
        draws = self.draws(_PREDICTION_DRAWS)
        draws["xi"] = draws["xi"][:, self.kept.astype(int)]
        return [{name: value[m] for name, value in draws.items()} for m in range(_PREDICTION_DRAWS)]

    def joint(self, predictions: ViewPredictions) -> Array:
        """P(class, view) averaged over draws: (L, K, n)."""
        score = self.score_units.apply(predictions.outputs)
        return np.asarray(sum(self.joint_of_draw(score, values) for values in self.parameters()) / _PREDICTION_DRAWS)

    @abstractmethod
    def joint_of_draw(self, score: Array, values: dict[str, Array]) -> Array:
        """P(class, view) under one draw of the parameters: (L, K, n)."""

    @abstractmethod
    def log_views(self, predictions: ViewPredictions, labels: LabelSets, joint: Array) -> Array:
        """Log probability of every label under every view: (J, K)."""

    @abstractmethod
    def log_labels(self, predictions: ViewPredictions, labels: LabelSets) -> Array:
        """Log probability of every label: (J,)."""

    def class_names(self, predictions: ViewPredictions) -> Array:
        """The items, or levels: (L,)."""
        return class_names(predictions)

    def _prediction(self, predictions: ViewPredictions, joint: Array) -> CategoricalPrediction:
        """The prediction of P(class, view), (L, K, n), with the mutual information of the two."""
        by_view, by_class = joint.sum(axis=0), joint.sum(axis=1)
        entropies = special.entr(by_view).sum(axis=0) + special.entr(by_class).sum(axis=0)
        information = np.maximum(entropies - special.entr(joint).sum(axis=(0, 1)), 0)
        return CategoricalPrediction(by_class.T, information, self.class_names(predictions))
