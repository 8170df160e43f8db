"""Fitted mixtures for ordered levels and for rankings: what remains when the data are gone, and what they predict."""

__all__ = ["CutPoints", "OrdinalPosterior", "RankingPosterior", "Score", "in_order", "score_of"]

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from vbtta.infer.advi.guide import Guide
from vbtta.infer.advi.posteriors import draw_intervals
from vbtta.infer.categorical_posterior import class_names, joint_information
from vbtta.labels import Array, LabelSets, class_positions
from vbtta.predictions import CategoricalPrediction, ViewPredictions

_DRAWS = 4000  # for intervals
_FEW_DRAWS = 50  # that predictions are averaged over
_TINY = np.finfo(np.float64).tiny


class Score(NamedTuple):
    """Location and scale of the views' scores, which the priors are relative to."""

    location: float
    scale: float

    def apply(self, values: Array) -> Array:
        """Scores in standard units."""
        return np.asarray((values - self.location) / self.scale, dtype=np.float64)


def score_of(values: Array, *, within: bool) -> Score:
    """Mean and standard deviation of scores (n, K, L); with `within`, only the deviation within a list."""
    if within:
        spread = float(np.sqrt(np.var(values, axis=2).mean()))
        return Score(0.0, spread if spread > 0 else 1.0)
    spread = float(np.std(values))
    return Score(float(np.mean(values)), spread if spread > 0 else 1.0)


class CutPoints(NamedTuple):
    """Where one level gives way to the next, in the scores' units, with the noise around a score."""

    value: Array  # (L - 1,)
    interval: Array  # (L - 1, 2): 90 %
    noise: float  # standard deviation of the latent value around the score


@dataclass(frozen=True)
class _OrderedPosterior:
    guide: Guide
    weights: Array  # (K,)
    kept: Array  # (K,): positions among the views of the fit
    score_units: Score

    @property
    def gain(self) -> float:
        """A mixture has no gain of its own."""
        return 1.0

    def draws(self, size: int = _DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in standard units."""
        return self.guide.draw(size, seed)

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights: quantiles of draws."""
        return draw_intervals(self.guide, self.kept, level)

    def keep(self, views: Array) -> Any:
        """The same with only some of the views."""
        weights = self.weights[views]
        return replace(self, weights=weights / weights.sum(), kept=self.kept[views])

    def describe_annotators(self, names: tuple[str, ...]) -> None:
        """Annotators are not modelled here."""
        return

    def _parameters(self) -> list[dict[str, Array]]:
        """A few draws, with the weights of the kept views."""
        draws = self.draws(_FEW_DRAWS)
        columns = self.kept.astype(int)
        weights = draws["weights"][:, columns]
        draws = {**draws, "weights": weights / weights.sum(axis=1, keepdims=True), "xi": draws["xi"][:, columns]}
        return [{name: value[m] for name, value in draws.items()} for m in range(_FEW_DRAWS)]

    def _joint(self, predictions: ViewPredictions) -> Array:
        """P(class, view) averaged over draws: (L, K, n)."""
        score = self.score_units.apply(predictions.mean)
        parts = [self._one_joint(score, values) for values in self._parameters()]
        return np.asarray(np.mean(parts, axis=0))

    def _one_joint(self, score: Array, values: dict[str, Array]) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class OrdinalPosterior(_OrderedPosterior):
    """A mixture of views for ordered levels."""

    levels: tuple[Any, ...]

    @property
    def cut_points(self) -> CutPoints:
        """Where levels change, in the scores' units."""
        draws = self.draws()
        slope = np.exp(draws["log_slope"])[:, None]
        cuts = self.score_units.location + self.score_units.scale * _cuts(draws) / slope
        interval = np.quantile(cuts, [0.05, 0.95], axis=0).T
        return CutPoints(cuts.mean(axis=0), interval, float(self.score_units.scale / slope.mean()))

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Probabilities of the levels."""
        joint = self._joint(predictions)
        return CategoricalPrediction(joint.sum(axis=1).T, joint_information(joint), self._names)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The views' predictions under the posterior of the view given all labels of an input."""
        joint = self._joint(predictions)
        by_view = joint / joint.sum(axis=0)
        position = self._positions(labels)
        each = np.log(np.maximum(by_view[position, :, labels.instance], _TINY)) * labels.count[:, None]  # (J, K)
        total = np.zeros((joint.shape[2], joint.shape[1]))
        np.add.at(total, labels.instance, each)
        joint = joint * np.exp(total - total.max(axis=1, keepdims=True)).T
        joint /= joint.sum(axis=(0, 1))
        return CategoricalPrediction(joint.sum(axis=1).T, joint_information(joint), self._names)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set: (N+,)."""
        proba = self.predict(predictions).proba[labels.instance, self._positions(labels)]
        each = labels.count * np.log(np.maximum(proba, _TINY))
        return np.asarray(np.bincount(labels.instance, each, labels.n_instances)[labels.labelled])

    @property
    def _names(self) -> Array:
        return np.asarray(self.levels)

    def _positions(self, labels: LabelSets) -> Array:
        return class_positions(labels.value.reshape(len(labels)), len(self.levels), self._names)

    def _one_joint(self, score: Array, values: dict[str, Array]) -> Array:
        utility = np.exp(values["log_slope"] + values["xi"]) * score[:, :, 0]  # (n, K)
        below = special.ndtr(_cuts(values)[:, None, None] - utility.T)  # (L - 1, K, n)
        edge = np.zeros((1, *below.shape[1:]))
        return np.diff(np.concatenate([edge, below, edge + 1]), axis=0) * values["weights"][:, None]


@dataclass(frozen=True)
class RankingPosterior(_OrderedPosterior):
    """A mixture of views for rankings."""

    def predict(self, predictions: ViewPredictions) -> CategoricalPrediction:
        """Probabilities that each item is the best; sorted by them, items are in their predicted order."""
        joint = self._joint(predictions)
        return CategoricalPrediction(joint.sum(axis=1).T, joint_information(joint), class_names(predictions))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> CategoricalPrediction:
        """The views' predictions under the posterior of the view given all rankings of a list."""
        total = np.zeros(predictions.mean.shape[:2])  # (n, K)
        np.add.at(total, labels.instance, labels.count[:, None] * self._log_views(predictions, labels))
        joint = self._joint(predictions) * np.exp(total - total.max(axis=1, keepdims=True)).T
        joint /= joint.sum(axis=(0, 1))
        return CategoricalPrediction(joint.sum(axis=1).T, joint_information(joint), class_names(predictions))

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled list's rankings: (N+,)."""
        each = special.logsumexp(self._log_views(predictions, labels) + np.log(self.weights), axis=1)
        return np.asarray(np.bincount(labels.instance, labels.count * each, labels.n_instances)[labels.labelled])

    def _log_views(self, predictions: ViewPredictions, labels: LabelSets) -> Array:
        """Log probability of every ranking under every view, averaged over draws: (J, K)."""
        orders = labels.rankings(predictions.mean.shape[2])
        score, chosen = in_order(self.score_units.apply(predictions.mean[labels.instance]), orders)  # (J, K, L), (J, L)
        parts = []
        for values in self._parameters():
            utility = np.exp(values["log_kappa"] + values["xi"])[:, None] * score
            left = np.logaddexp.accumulate(utility[..., ::-1], axis=-1)[..., ::-1]
            parts.append((chosen[:, None] * (utility - left)).sum(axis=-1))
        return np.asarray(special.logsumexp(parts, axis=0) - np.log(len(parts)))

    def _one_joint(self, score: Array, values: dict[str, Array]) -> Array:
        kappa = np.exp(values["log_kappa"] + values["xi"])
        proba = special.softmax(kappa[:, None] * score, axis=2)  # (n, K, L)
        return np.asarray((proba * values["weights"][:, None]).transpose(2, 1, 0))


def in_order(score: Array, orders: Array) -> tuple[Array, Array]:
    """Scores (J, K, L) with the ranked items first, and which of the places (J, L) were chosen."""
    chosen = orders >= 0
    unranked = np.ones_like(chosen)
    row, place = np.nonzero(chosen)
    unranked[row, orders[row, place]] = False
    rest = np.argsort(~unranked, axis=1, kind="stable")  # unranked items first
    complete = np.empty_like(orders)
    for line, size in enumerate(chosen.sum(axis=1)):
        complete[line, :size] = orders[line, :size]
        complete[line, size:] = rest[line, : orders.shape[1] - size]
    return np.take_along_axis(score, complete[:, None], axis=2), chosen


def _cuts(values: dict[str, Array]) -> Array:
    """Cut points (..., L - 1) from the levels' frequencies."""
    below = np.cumsum(values["frequency"], axis=-1)[..., :-1]
    stretch = np.sqrt(1 + np.exp(2 * values["log_slope"]))[..., None]
    return np.asarray(stretch * special.ndtri(np.clip(below, 1e-12, 1 - 1e-12)))
