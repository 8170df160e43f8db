"""The mixture for rankings as a log density, with the view summed out."""

import numpy as np
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.advi import AdviTask
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.base import InMemory, Posterior
from vbtta.models.parts.ordered import score_of
from vbtta.models.parts.tensors import ScoreMixture
from vbtta.models.ranking.posterior import RankingPosterior, in_order
from vbtta.models.ranking.spec import RankingMixture


class RankingDensity(ScoreMixture):
    """Plackett-Luce: prod_r softmax over the remaining items of kappa_k f_k, f in standard units."""

    def __init__(self, score: Array, orders: Array, count: Array, spec: RankingMixture) -> None:
        ordered, ranked = in_order(score, orders)  # (J, K, L), (J, L)
        scores = ordered.transpose(1, 0, 2)
        super().__init__(scores, count, spec.concentration, "log_kappa", spec.kappa_scale, spec.xi_scale)
        self._ranked = tensor(ranked.astype(np.float64))

    def log_views(self, values: Values, units: Units) -> Tensor:
        """Log probability of rankings under every view: (M, K, j)."""
        utility = self.utility(values, units)  # (M, K, j, L)
        rest = torch.logcumsumexp(utility.flip(-1), dim=-1).flip(-1)
        return (self._ranked[units] * (utility - rest)).sum(dim=-1)


def pose(source: InMemory, spec: RankingMixture, seed: int) -> AdviTask[Posterior]:
    """The density of a mixture and its posterior."""
    predictions, labels = source.predictions, source.labels
    orders = labels.rankings(predictions.outputs.shape[2])
    values = np.asarray(predictions.outputs[labels.instance], dtype=np.float64)  # (J, K, L)
    units = score_of(values, labels.count, within=True)
    density = RankingDensity(units.apply(values), orders, labels.count, spec)
    return AdviTask(density, lambda guide: RankingPosterior.of(guide, units))
