"""Options of the latent pool for continuous labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from vbtta._support.checks import one_of, positive
from vbtta.models.base import LatentModel
from vbtta.models.parts.annotators import ContinuousNoise, LabelFacts, ScaleChoice, check_scale, default_noise


@dataclass(frozen=True, kw_only=True)
class GaussianLatent(LatentModel):
    """Continuous labels around one weighted average of the views (docs/method, "Pooling", eq. 19).

    Parameters
    ----------
    noise : {"none", "annotator"}, optional
        As in :class:`GaussianMixture`: eqs. 13 to 18 around the one average.
    shrinkage : float, optional
        Prior precision lambda of every weight around 1/K, in standardised units; by default from the evidence.
    scale : {"prediction", "constant"}, optional
        As in :class:`GaussianMixture`; the prediction is that of the pool.
    beta, nu, v, gamma
        As in :class:`GaussianMixture`; the common offset has a Student-t prior of scale sqrt(2 / beta), and v is by
        default the smaller of the residual variances around a typical view and around the plain average.
    """

    noise: ContinuousNoise | None = None
    shrinkage: float | None = None
    scale: ScaleChoice | None = None
    beta: float = 200.0
    nu: float | None = None
    v: float | Sequence[float] | None = None
    gamma: float = 1.0

    def __post_init__(self) -> None:
        one_of("noise", self.noise, (None, "none", "annotator"))
        one_of("scale", self.scale, (None, "prediction", "constant"))
        positive(shrinkage=self.shrinkage, beta=self.beta, nu=self.nu, gamma=self.gamma)
        check_scale(self.v)

    def resolve(self, labels: LabelFacts) -> Self:
        """Decide the noise."""
        return replace(self, noise=default_noise(self.noise, labels))
