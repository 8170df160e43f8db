"""The options of the mixture for ordered levels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from vbtta._support.checks import positive, shown
from vbtta.data.labels import LabelSets
from vbtta.models.base import Model
from vbtta.models.parts.annotators import LabelFacts

_MAX_FRACTIONAL_LEVELS = 20  # unless levels are stated


@dataclass(frozen=True, kw_only=True)
class OrdinalMixture(Model):
    """Ordered levels from a mixture of views of one score each, by a cumulative probit; engine ADVI only.

    P_k(y <= c | x) = Phi(b_c - s_k f_k(x)), with common cut points b, which are inferred, and slopes
    ln s_k = ln s + xi_k. Annotators are not distinguished: all labels of an input count alike.

    Parameters
    ----------
    levels : sequence, optional
        The levels in ascending order; by default the numbers that occur among the labels.
    concentration : float, optional
        Dirichlet concentration of the weights; 1 by default.
    slope_scale, xi_scale : float
        Prior standard deviations of the common log slope, for scores of unit variance, and of the views' deviations.
    level_concentration : float
        Dirichlet concentration of the levels' frequencies, from which the cut points follow.
    """

    levels: Sequence[Any] | None = None
    concentration: float | None = None
    slope_scale: float = 1.0
    xi_scale: float = 0.1
    level_concentration: float = 1.0

    def __post_init__(self) -> None:
        positive(concentration=self.concentration, level_concentration=self.level_concentration)
        positive(slope_scale=self.slope_scale, xi_scale=self.xi_scale)
        if self.levels is not None:
            ordered = isinstance(self.levels, Sequence | np.ndarray) and not isinstance(self.levels, str)
            if not ordered or len(self.levels) < 2 or len(set(self.levels)) < len(self.levels):
                raise ValueError(f"levels must be two values or more, different, ascending; got {shown(self.levels)}")
            object.__setattr__(self, "levels", tuple(self.levels))

    def resolve(self, labels: LabelFacts) -> Self:
        """Take the levels from the labels."""
        if self.levels is not None:
            return self
        if not isinstance(labels, LabelSets):
            raise ValueError("levels must be stated where labels are not in memory: OrdinalMixture(levels=[...])")
        return replace(self, levels=_levels(labels))


def _levels(labels: LabelSets) -> tuple[Any, ...]:
    """The numbers among the labels, in ascending order."""
    if labels.value.dtype.kind not in "iufb" or labels.by_position:
        raise ValueError(
            f"labels such as {str(labels.value.flat[0])!r} have no order of their own; state it with "
            "OrdinalMixture(levels=[...]), the lowest first"
        )
    levels = tuple(np.unique(labels.value).tolist())
    if len(levels) < 2:
        raise ValueError(f"labels have one level only, {levels[0]!r}; state all with OrdinalMixture(levels=[...])")
    if len(levels) > _MAX_FRACTIONAL_LEVELS and any(level != int(level) for level in levels):
        raise ValueError(
            f"labels have {len(levels)} different values with fractions, such as {levels[0]!r}, and are no levels; use "
            "task='regression', or state the levels with OrdinalMixture(levels=[...])"
        )
    return levels
