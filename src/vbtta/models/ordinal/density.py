"""The mixture for ordered levels as a log density, with the view summed out."""

import numpy as np
import torch
from torch import Tensor

from vbtta.data.labels import Array, class_positions
from vbtta.inference.advi import AdviTask
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.base import InMemory, Posterior
from vbtta.models.ordinal.posterior import OrdinalPosterior
from vbtta.models.ordinal.spec import OrdinalMixture
from vbtta.models.parts.ordered import score_of
from vbtta.models.parts.tensors import ScoreMixture, dirichlet

_MAX_CUT = 35.0  # absolute value of a cut point; no utility reaches it


class OrdinalDensity(ScoreMixture):
    """Cumulative probit: P_k(y <= c) = Phi(b_c - s_k f_k), f in standard units.

    The cut points follow from the levels' frequencies q at scores of unit variance, b = sqrt(1 + s^2) Phi^-1(cumsum q):
    a simplex, which keeps them in order and starts at the frequencies observed.
    """

    def __init__(self, score: Array, level: Array, count: Array, n_levels: int, spec: OrdinalMixture) -> None:
        super().__init__(score.T, count, spec.concentration, "log_slope", spec.slope_scale, spec.xi_scale)
        self.priors["frequency"] = dirichlet(spec.level_concentration, n_levels)
        self._level = tensor(level)  # (J,)
        self._counts = np.bincount(level, count, n_levels) + 0.5

    def start(self) -> dict[str, Array]:
        """The frequencies observed."""
        return {"frequency": self._counts / self._counts.sum()}

    def log_views(self, values: Values, units: Units) -> Tensor:
        """Log probability of labels under every view: (M, K, j)."""
        edges, level, utility = _edges(values), self._level[units], self.utility(values, units)
        low = edges[..., None, level] - utility  # (M, K, j)
        high = edges[..., None, level + 1] - utility
        flip = low + high > 0  # the difference of two tails is exact on the lower side
        low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
        log_high: Tensor = torch.special.log_ndtr(high)
        gap = torch.clamp(torch.special.log_ndtr(low) - log_high, max=-1e-12)
        return log_high + torch.log(-torch.expm1(gap))


def _edges(values: Values) -> Tensor:
    """Cut points between all levels, with one beyond each end: (M, L + 1)."""
    below = torch.cumsum(values["frequency"], dim=-1)[..., :-1]
    stretch = torch.sqrt(1 + torch.exp(2 * values["log_slope"]))[..., None]
    inner = stretch * torch.special.ndtri(torch.clamp(below, 1e-12, 1 - 1e-12))
    end = torch.full((*inner.shape[:-1], 1), _MAX_CUT, dtype=torch.float64)
    return torch.cat([-end, torch.clamp(inner, -_MAX_CUT, _MAX_CUT), end], dim=-1)


def pose(source: InMemory, spec: OrdinalMixture, seed: int) -> AdviTask[Posterior]:
    """The density of a mixture and its posterior."""
    predictions, labels = source.predictions, source.labels
    if predictions.outputs.shape[2] != 1:
        raise ValueError(
            f"task='ordinal' takes one score an input and view, (N, K, 1); got {predictions.outputs.shape[2]} outputs. "
            "For class logits use their expected level, or task='classification'"
        )
    levels = tuple(spec.levels or ())
    position = class_positions(labels.value.reshape(len(labels)), len(levels), np.asarray(levels))
    values = np.asarray(predictions.outputs[labels.instance], dtype=np.float64)  # (J, K, 1)
    units = score_of(values, labels.count, within=False)
    density = OrdinalDensity(units.apply(values)[:, :, 0], position, labels.count, len(levels), spec)
    return AdviTask(density, lambda guide: OrdinalPosterior.of(guide, units, levels))
