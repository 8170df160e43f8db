"""Options of the latent pool for class labels."""

from dataclasses import dataclass

from vbtta._support.checks import positive
from vbtta.models.base import LatentModel
from vbtta.models.categorical_mixture.spec import ClassModel


@dataclass(frozen=True, kw_only=True)
class CategoricalLatent(ClassModel, LatentModel):
    """Class labels from one weighted sum of the views' logits (docs/method, eqs. 20 to 24 with one view).

    As in eq. 19 the one view is the weighted sum: kappa_k f_ik becomes sum_k v_k f_ik with v_k >= 0, where the weights
    are w = v / sum(v) and the gain is sum(v).

    Parameters
    ----------
    shrinkage : float, optional
        Prior precision of every weight around the common temperature's share; by default from the evidence.
    link, noise, difficulty, kappa_scale, offset_scale, confusion_prior, accuracy_prior
        As in :class:`CategoricalMixture`.
    """

    shrinkage: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(shrinkage=self.shrinkage)
