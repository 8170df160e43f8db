"""Options of the mixture for continuous labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from vbtta._support.checks import one_of, positive
from vbtta.models.base import Model, Posterior, Source, load
from vbtta.models.parts.annotators import ContinuousNoise, LabelFacts, ScaleChoice, check_scale, default_noise
from vbtta.models.parts.gate import FeatureChoice, check_weights


@dataclass(frozen=True, kw_only=True)
class GaussianMixture(Model):
    """Continuous labels as a mixture of calibrated views (docs/method, "Continuous outputs", eqs. 1 to 18).

    Parameters
    ----------
    link : {"affine", "shift"}
        Whether a view may be rescaled and shifted, or only shifted: H in eq. 2.
    noise : {"none", "annotator"}, optional
        Whether labels are the truth plus an annotator's bias and noise (eqs. 13 and 14). By default annotators are
        modelled where they are named, their labels overlap and the component is normal.
    heteroscedastic : bool
        Whether a view counts less where its draws vary more: Omega in eq. 2.
    scale : {"prediction", "constant"}, optional
        Whether the logarithm of the standard deviation around a view is linear in the view's prediction (eq. 2), with
        one slope for all views, or constant. By default the held-out score decides; "prediction" where there is none.
    weights : {"view", "input"}
        One weight a view, or one that depends on the input through features of the views' outputs (eq. 25).
    features : {"auto", "all", "own", "pooled", "none"} or callable
        As in :class:`CategoricalMixture`; "all" is a view's distance from the median of the views, its square, and the
        spread over draws where there is one.
    gate_scale : float, optional
        Prior standard deviation of the coefficients of ``weights="input"`` (eq. 25); by default the evidence decides.
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood (eq. 7).
    component : {"normal", "student_t", "laplace"}
        Distribution of a label around its view; Laplace for ADVI and one output only. Tails pay where labels stray and
        every view is needed: a view that explains nothing becomes the wide component that strays need, and a mixture of
        normals with such a view is heavy-tailed by itself.
    beta : float
        Prior precision of a view's calibration around the common one (eq. 3), in standardised units.
    common_scale : float, optional
        Scale of the Student-t prior of the common calibration (eq. 3): how far a slope is expected from 1, and an
        offset from 0 in standard deviations of the labels. By default sqrt(2 / beta), which is 0.1.
    nu : float, optional
        Prior degrees of freedom of the precision (eq. 3); C + 9 by default, less with fewer than 8 labels.
    v : float or C floats, optional
        Prior residual variance in the labels' units; by default from what a typical view leaves (the median
        one, or the best where most are useless) and what a short preliminary fit leaves around a label's own view.
    gamma : float
        Prior precision of the annotators' biases (eq. 14), in standardised units.
    """

    link: Literal["affine", "shift"] = "affine"
    noise: ContinuousNoise | None = None
    heteroscedastic: bool = False
    scale: ScaleChoice | None = None
    weights: Literal["view", "input"] = "view"
    features: FeatureChoice = "auto"
    gate_scale: float | None = None
    concentration: float | None = None
    component: Literal["normal", "student_t", "laplace"] = "normal"
    beta: float = 200.0
    common_scale: float | None = None
    nu: float | None = None
    v: float | Sequence[float] | None = None
    gamma: float = 1.0

    def __post_init__(self) -> None:
        one_of("link", self.link, ("affine", "shift"))
        one_of("scale", self.scale, (None, "prediction", "constant"))
        one_of("noise", self.noise, (None, "none", "annotator"))
        one_of("weights", self.weights, ("view", "input"))
        check_weights(self.weights, self.concentration, self.features)
        one_of("component", self.component, ("normal", "student_t", "laplace"))
        positive(concentration=self.concentration, gate_scale=self.gate_scale, beta=self.beta)
        positive(common_scale=self.common_scale, nu=self.nu, gamma=self.gamma)
        check_scale(self.v)

    @classmethod
    def raw_network(cls) -> "GaussianMixture":
        """One residual scale: the shift is all but fixed at zero."""
        return cls(link="shift", beta=1e8, scale="constant")

    @property
    def obstacle(self) -> str:
        """EM has no Laplace components, and no heavy tails around a truth that labels share."""
        closed = self.component == "normal" or (self.component == "student_t" and self.noise != "annotator")
        return "" if closed else f"component={self.component!r}"

    def settle(self, source: Source, start: Posterior | None = None) -> tuple[Self, Posterior | None]:
        """Decide the prior residual variance."""
        v = load(self, "em").settled_variance(source, self, start) if self.v is None else self.v
        return replace(self, v=v), start

    def resolve(self, labels: LabelFacts) -> Self:
        """Decide the noise; heavy tails and a shared truth have no closed form together."""
        noise: ContinuousNoise = default_noise(self.noise, labels)
        if self.noise is None and self.component != "normal":
            noise = "none"
        return replace(self, noise=noise)
