"""A fitted mixture for rankings: what remains without the data, and its predictions."""

from dataclasses import dataclass

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.models.parts.ordered import OrderedPosterior


@dataclass(frozen=True)
class RankingPosterior(OrderedPosterior):
    """A mixture of views for rankings."""

    def joint_of_draw(self, score: Array, values: dict[str, Array]) -> Array:
        """P(best item, view) under one draw of the parameters: (L, K, n)."""
        kappa = np.exp(values["log_kappa"] + values["xi"])
        proba = special.softmax(kappa[:, None] * score, axis=2)  # (n, K, L)
        return np.asarray((proba * values["weights"][:, None]).transpose(2, 1, 0))

    def log_views(self, predictions: ViewPredictions, labels: LabelSets, joint: Array | None = None) -> Array:
        """Log probability of every ranking under every view, averaged over draws: (J, K)."""
        orders = labels.rankings(predictions.outputs.shape[2])
        score, chosen = in_order(self.score_units.apply(predictions.outputs[labels.instance]), orders)
        parts = []
        for values in self.parameters():
            utility = np.exp(values["log_kappa"] + values["xi"])[:, None] * score  # (J, K, L)
            rest = np.logaddexp.accumulate(utility[..., ::-1], axis=-1)[..., ::-1]
            parts.append((chosen[:, None] * (utility - rest)).sum(axis=-1))
        return np.asarray(special.logsumexp(parts, axis=0) - np.log(len(parts)))

    def log_labels(self, predictions: ViewPredictions, labels: LabelSets) -> Array:
        """Log probability of every ranking: (J,)."""
        return np.asarray(special.logsumexp(self.log_views(predictions, labels) + np.log(self.weights), axis=1))


def in_order(score: Array, orders: Array) -> tuple[Array, Array]:
    """Scores (J, K, L) with the ranked items first, and which places (J, L) are ranked."""
    ranked = orders >= 0
    place = np.full(orders.shape, orders.shape[1])  # of each item; the unranked ones come last, in their own order
    row, column = np.nonzero(ranked)
    place[row, orders[row, column]] = column
    complete = np.argsort(place, axis=1, kind="stable")
    return np.take_along_axis(score, complete[:, None], axis=2), ranked
