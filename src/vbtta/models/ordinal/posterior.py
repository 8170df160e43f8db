"""Posterior of the mixture for ordered levels: what is kept without the data, and its predictions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets, class_positions
from vbtta.data.predictions import ViewPredictions
from vbtta.models.parts.ordered import OrderedPosterior

_TINY = np.finfo(np.float64).tiny


class CutPoints(NamedTuple):
    """The scores at which levels change, and the noise around a score, in the scores' units."""

    value: Array  # (L - 1,)
    interval: Array  # (L - 1, 2): 90 %
    noise: float  # standard deviation of the latent value around the score


@dataclass(frozen=True)
class OrdinalPosterior(OrderedPosterior):
    """A mixture of views for ordered levels."""

    levels: tuple[Any, ...]

    @property
    def cut_points(self) -> CutPoints:
        """The scores at which levels change, in the scores' units."""
        draws = self.draws()
        slope = np.exp(draws["log_slope"])[:, None]
        cuts = self.score_units.location + self.score_units.scale * _cut_points(draws) / slope
        interval = np.quantile(cuts, [0.05, 0.95], axis=0).T
        return CutPoints(cuts.mean(axis=0), interval, float(self.score_units.scale / slope.mean()))

    def joint_of_draw(self, score: Array, values: dict[str, Array]) -> Array:
        """P(level, view) under one draw of the parameters: (L, K, n)."""
        utility = np.exp(values["log_slope"] + values["xi"]) * score[:, :, 0]  # (n, K)
        below = special.ndtr(_cut_points(values)[:, None, None] - utility.T)  # (L - 1, K, n)
        edge = np.zeros((1, *below.shape[1:]))
        return np.diff(np.concatenate([edge, below, edge + 1]), axis=0) * values["weights"][:, None]

    def log_views(self, predictions: ViewPredictions, labels: LabelSets, joint: Array) -> Array:
        """Log probability of every label under every view: (J, K)."""
        by_view = joint / joint.sum(axis=0)
        return np.asarray(np.log(np.maximum(by_view[self._positions(labels), :, labels.instance], _TINY)))

    def log_labels(self, predictions: ViewPredictions, labels: LabelSets) -> Array:
        """Log probability of every label: (J,)."""
        proba = self.predict(predictions).proba[labels.instance, self._positions(labels)]
        return np.asarray(np.log(np.maximum(proba, _TINY)))

    def class_names(self, predictions: ViewPredictions) -> Array:
        """The levels: (L,)."""
        return np.asarray(self.levels)

    def _positions(self, labels: LabelSets) -> Array:
        return class_positions(labels.value.reshape(len(labels)), len(self.levels), np.asarray(self.levels))


def _cut_points(values: dict[str, Array]) -> Array:
    """Cut points (..., L - 1) in standard units, from the levels' frequencies."""
    below = np.cumsum(values["frequency"], axis=-1)[..., :-1]
    latent_sd = np.sqrt(1 + np.exp(2 * values["log_slope"]))[..., None]  # of slope * score + noise, both of variance 1
    return np.asarray(latent_sd * special.ndtri(np.clip(below, 1e-12, 1 - 1e-12)))
