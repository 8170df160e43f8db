"""What posteriors by ADVI have in common: Q itself, and intervals of the weights from draws.

Weights are posterior means. Calibration enters predictions with its mean and covariance under Q (for class labels with
its mean), precisions as the Wishart distribution of the same moments.
"""

from dataclasses import dataclass, replace
from typing import Self

from vbtta.data.labels import Array
from vbtta.inference.guide import N_DRAWS, Guide, draw_intervals


@dataclass(frozen=True)
class WeightDraws:
    """Q, and which of its views are kept."""

    guide: Guide
    kept: Array  # (K,): positions among the views of the fit

    def draws(self, size: int = N_DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in the model's standard units."""
        return self.guide.draw(size, seed)

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights: quantiles of draws."""
        return draw_intervals(self.guide, self.kept, level)

    def keep(self, views: Array) -> Self:
        """The same with only some of the views."""
        rest: Self = super().keep(views)  # type: ignore[misc]
        return replace(rest, kept=self.kept[views])
