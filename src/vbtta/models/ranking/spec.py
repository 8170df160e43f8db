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

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import ADVI, LabelSets, RankingMixture, ViewPredictions, fit_policy
    >>> scores = np.random.default_rng(0).normal(size=(300, 2, 4))  # of two views; the first tells the order
    >>> orders = LabelSets.from_rankings(np.argsort(-scores[:, 0], axis=1)[:, :2])  # the best two of each list
    >>> engine = ADVI(steps=300, particles=2, learning_rate=0.1)
    >>> model = RankingMixture()
    >>> fit_policy(ViewPredictions(scores), orders, task="ranking", model=model, engine=engine).weights.round(1)
    array([1., 0.])
    """

    concentration: float | None = None
    kappa_scale: float = 1.0
    xi_scale: float = 0.1

    def __post_init__(self) -> None:
        positive(concentration=self.concentration, kappa_scale=self.kappa_scale, xi_scale=self.xi_scale)
