"""The options of the mixture for rankings."""

from dataclasses import dataclass

from vbtta._support.checks import positive
from vbtta.models.base import Model


@dataclass(frozen=True, kw_only=True)
class RankingMixture(Model):
    """Rankings of a list's items from a mixture of views that score the items, by Plackett-Luce; engine ADVI only.

    The best item is drawn with probabilities softmax(kappa_k f_k), the next likewise from the remaining items, and so
    on; ln kappa_k = ln kappa + xi_k.

    Parameters
    ----------
    concentration : float, optional
        Dirichlet concentration of the weights; 1 by default.
    kappa_scale, xi_scale : float
        Prior standard deviations of the common log inverse temperature, for scores whose variance within a list is
        one on average, and of the views' deviations from it.
    """

    concentration: float | None = None
    kappa_scale: float = 1.0
    xi_scale: float = 0.1

    def __post_init__(self) -> None:
        positive(concentration=self.concentration, kappa_scale=self.kappa_scale, xi_scale=self.xi_scale)
