"""What is assumed about labels and views."""

__all__ = [
    "CategoricalLatent",
    "CategoricalMixture",
    "CategoricalNoise",
    "GaussianLatent",
    "GaussianMixture",
    "ModelSpec",
    "OrdinalMixture",
    "PyroModel",
    "RankingMixture",
]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vbtta._support.checks import one_of, positive, takes
from vbtta._support.words import shown

ContinuousNoise = Literal["none", "annotator"]
CategoricalNoise = Literal["none", "uniform", "annotator", "confusion"]


@dataclass(frozen=True, kw_only=True)
class GaussianMixture:
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
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood (eq. 7).
    component : {"normal", "student_t", "laplace"}
        Distribution of a label around its view; other than normal for ADVI only. Tails pay where labels stray and every
        view is needed: a view that explains nothing becomes the wide component that strays need, and a mixture of
        normals with such a view is heavy-tailed by itself.
    beta : float
        Prior precision of the calibration (eq. 3), in standardised units.
    nu : float, optional
        Prior degrees of freedom of the precision (eq. 3); C + 2 by default.
    v : float or C floats, optional
        Prior residual variance in the labels' units; by default the smaller of the median over views of what is
        observed and of what a short preliminary fit leaves around a label's own view.
    gamma : float
        Prior precision of the annotators' biases (eq. 14), in standardised units.

    Examples
    --------
    Where every label follows one of the views, the weights are the views' shares of the labels:

    >>> import numpy as np
    >>> from vbtta import GaussianMixture, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> views = rng.normal(size=(400, 3))  # (N, K)
    >>> labels = views[np.arange(400), rng.choice(3, size=400, p=[0.7, 0.3, 0.0])]
    >>> predictions = ViewPredictions(views[:, :, None], names=["identity", "flip", "blur"])
    >>> policy = fit_policy(predictions, labels, task="regression", model=GaussianMixture(link="shift"))
    >>> policy.weights.round(1)
    array([0.7, 0.3, 0. ])
    """

    link: Literal["affine", "shift"] = "affine"
    noise: ContinuousNoise | None = None
    heteroscedastic: bool = False
    concentration: float | None = None
    component: Literal["normal", "student_t", "laplace"] = "normal"
    beta: float = 0.01
    nu: float | None = None
    v: float | Sequence[float] | None = None
    gamma: float = 1.0

    def __post_init__(self) -> None:
        one_of("link", self.link, ("affine", "shift"))
        one_of("noise", self.noise, (None, "none", "annotator"))
        one_of("component", self.component, ("normal", "student_t", "laplace"))
        positive(concentration=self.concentration, beta=self.beta, nu=self.nu, gamma=self.gamma)
        _check_scale(self.v)


@dataclass(frozen=True, kw_only=True)
class GaussianLatent:
    """Continuous labels around one weighted average of the views (docs/method, "Pooling", eq. 19).

    Parameters
    ----------
    noise : {"none", "annotator"}, optional
        As in :class:`GaussianMixture`: eqs. 13 to 18 around the one average.
    shrinkage : float, optional
        Prior precision lambda of every weight around 1/K, in standardised units; by default from the evidence.
    beta, nu, v, gamma
        As in :class:`GaussianMixture`; beta is the precision of the common offset, and v is by default the smaller of
        the residual variances around the median view and around the plain average.

    Examples
    --------
    Where views err independently, their average errs less than each of them (here half as much):

    >>> import numpy as np
    >>> from vbtta import GaussianLatent, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=400)
    >>> views = truth[:, None] + 0.4 * rng.normal(size=(400, 4))  # (N, K)
    >>> policy = fit_policy(ViewPredictions(views[:, :, None]), truth, task="regression", model=GaussianLatent())
    >>> found = policy.predict(ViewPredictions(views[:, :, None])).mean[:, 0]
    >>> print((views - truth[:, None]).std().round(1), (found - truth).std().round(1))
    0.4 0.2
    """

    noise: ContinuousNoise | None = None
    shrinkage: float | None = None
    beta: float = 0.01
    nu: float | None = None
    v: float | Sequence[float] | None = None
    gamma: float = 1.0

    def __post_init__(self) -> None:
        one_of("noise", self.noise, (None, "none", "annotator"))
        positive(shrinkage=self.shrinkage, beta=self.beta, nu=self.nu, gamma=self.gamma)
        _check_scale(self.v)


@dataclass(frozen=True, kw_only=True)
class CategoricalMixture:
    """Class labels from a mixture of calibrated views (docs/method, "Categorical outputs", eqs. 20 to 24).

    Parameters
    ----------
    link : {"softmax", "probit"}
        How logits become probabilities (eq. 20).
    noise : {"none", "uniform", "annotator", "confusion"}, optional
        What separates a label from the true class (eq. 22): nothing, one accuracy for all, one accuracy an
        annotator, or a confusion matrix an annotator. By default confusion where enough instances carry two labels
        or more, else none: from single labels a confusion matrix invents noise.
    calibrate : bool
        Whether temperatures and class offsets are inferred (eq. 21).
    weights : {"view", "view_class"}
        One weight a view, or one a view and class.
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood (eq. 23).
    kappa_scale, xi_scale, offset_scale : float
        Prior standard deviations of the common log inverse temperature, of the views' deviations from it and
        of the class offsets (eq. 21).
    confusion_prior : (float, float)
        Dirichlet counts of a confusion row: on the diagonal, and in all off it.
    accuracy_prior : (float, float)
        Beta counts of an accuracy: right and wrong.
    class_concentration : float
        How strongly the class weights of ``weights="view_class"`` are drawn towards the common ones.

    Examples
    --------
    Two annotators, of whom the second says anything in half of the cases and so is right in two out of three:

    >>> import numpy as np
    >>> from vbtta import CategoricalMixture, LabelSets, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.integers(0, 3, size=1000)
    >>> predictions = ViewPredictions(2 * np.eye(3)[truth][:, None] + rng.normal(size=(1000, 2, 3)))  # (N, K, C)
    >>> said = np.where(rng.random((1000, 2)) < [0.0, 0.5], rng.integers(0, 3, size=(1000, 2)), truth[:, None])
    >>> labels = LabelSets.from_array(said, annotators=["ann", "bob"])
    >>> policy = fit_policy(predictions, labels, task="classification", model=CategoricalMixture(noise="annotator"))
    >>> policy.annotators.accuracy.round(1)
    array([1. , 0.7])
    """

    link: Literal["softmax", "probit"] = "softmax"
    noise: CategoricalNoise | None = None
    calibrate: bool = True
    weights: Literal["view", "view_class"] = "view"
    concentration: float | None = None
    kappa_scale: float = 1.0
    xi_scale: float = 0.1
    offset_scale: float = 0.1
    confusion_prior: tuple[float, float] = (8.5, 4.5)
    accuracy_prior: tuple[float, float] = (8.0, 2.0)
    class_concentration: float = 20.0

    def __post_init__(self) -> None:
        one_of("weights", self.weights, ("view", "view_class"))
        positive(concentration=self.concentration, class_concentration=self.class_concentration)
        _check_categorical(self)


@dataclass(frozen=True, kw_only=True)
class CategoricalLatent:
    """Class labels from one weighted sum of the views' logits (docs/method, eqs. 20 to 24 with one view).

    As in eq. 19 the one view is the weighted sum: kappa_k f_ik becomes sum_k v_k f_ik with v_k >= 0, where the weights
    are w = v / sum(v) and the gain is sum(v).

    Parameters
    ----------
    shrinkage : float, optional
        Prior precision of every weight around the common temperature's share; by default from the evidence.
    link, noise, offset_scale, confusion_prior, accuracy_prior
        As in :class:`CategoricalMixture`.

    Examples
    --------
    Views whose logits err independently are right together more often than each alone:

    >>> import numpy as np
    >>> from vbtta import CategoricalLatent, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.integers(0, 3, size=500)
    >>> predictions = ViewPredictions(np.eye(3)[truth][:, None] + rng.normal(size=(500, 6, 3)))  # (N, K, C)
    >>> policy = fit_policy(predictions, truth, task="classification", model=CategoricalLatent())
    >>> alone, together = predictions.mean[:, 0].argmax(axis=1), policy.predict(predictions).label
    >>> bool((together == truth).mean() > (alone == truth).mean() + 0.2)
    True
    """

    link: Literal["softmax", "probit"] = "softmax"
    noise: CategoricalNoise | None = None
    shrinkage: float | None = None
    kappa_scale: float = 1.0
    offset_scale: float = 0.1
    confusion_prior: tuple[float, float] = (8.5, 4.5)
    accuracy_prior: tuple[float, float] = (8.0, 2.0)

    def __post_init__(self) -> None:
        positive(shrinkage=self.shrinkage)
        _check_categorical(self)


@dataclass(frozen=True, kw_only=True)
class OrdinalMixture:
    """Ordered levels from a mixture of views of one score each, by a cumulative probit; engine ADVI only.

    P_k(y <= c | x) = Phi(b_c - s_k f_k(x)), with common cut points b, which are inferred, and slopes
    ln s_k = ln s + xi_k. Annotators are not told apart: all labels of an input count alike.

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

    Examples
    --------
    Three levels from scores cut at -1 and 1; the posterior finds the cut points:

    >>> import numpy as np
    >>> from vbtta import ADVI, OrdinalMixture, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> score = rng.normal(size=500)
    >>> levels = np.digitize(score + 0.2 * rng.normal(size=500), [-1.0, 1.0])
    >>> predictions = ViewPredictions(score[:, None, None], names=["identity"])  # (N, K, 1)
    >>> engine = ADVI(steps=300, particles=2, learning_rate=0.1)
    >>> policy = fit_policy(predictions, levels, task="ordinal", model=OrdinalMixture(), engine=engine)
    >>> policy.predict(ViewPredictions([[[-3.0]], [[0.0]], [[3.0]]], names=["identity"])).label
    array([0, 1, 2])
    """

    levels: Sequence[Any] | None = None
    concentration: float | None = None
    slope_scale: float = 1.0
    xi_scale: float = 0.1
    level_concentration: float = 1.0

    def __post_init__(self) -> None:
        positive(
            concentration=self.concentration,
            slope_scale=self.slope_scale,
            xi_scale=self.xi_scale,
            level_concentration=self.level_concentration,
        )
        if self.levels is not None:
            ordered = isinstance(self.levels, Sequence | np.ndarray) and not isinstance(self.levels, str)
            if not ordered or len(self.levels) < 2 or len(set(self.levels)) < len(self.levels):
                raise ValueError(
                    f"levels must be two values or more, all different, ascending; got {shown(self.levels)}"
                )
            object.__setattr__(self, "levels", tuple(self.levels))


@dataclass(frozen=True, kw_only=True)
class RankingMixture:
    """Rankings of a list's items from a mixture of views that score the items, by Plackett-Luce; engine ADVI only.

    The best item is drawn with probabilities softmax(kappa_k f_k), the next from what is left likewise, and so on;
    ln kappa_k = ln kappa + xi_k.

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
    >>> rng = np.random.default_rng(0)
    >>> scores = rng.normal(size=(300, 2, 4))  # (N, K, C): two views of four items; the first tells their order
    >>> orders = LabelSets.from_rankings(np.argsort(-scores[:, 0], axis=1)[:, :2])  # the best two of each list
    >>> engine = ADVI(steps=300, particles=2, learning_rate=0.1)
    >>> policy = fit_policy(ViewPredictions(scores), orders, task="ranking", model=RankingMixture(), engine=engine)
    >>> policy.weights.round(1)
    array([1., 0.])
    """

    concentration: float | None = None
    kappa_scale: float = 1.0
    xi_scale: float = 0.1

    def __post_init__(self) -> None:
        positive(concentration=self.concentration, kappa_scale=self.kappa_scale, xi_scale=self.xi_scale)


@dataclass(frozen=True)
class PyroModel:
    """A mixture of views whose likelihood is a Pyro model of the user's; engine ADVI only.

    Parameters
    ----------
    function : callable
        ``function(predictions, labels, prior) -> None``, a Pyro model: it draws the views' parameters with
        ``prior.sample(predictions)`` and any others with ``pyro.sample``, and says how probable the labels are with
        ``pyro.factor`` or observed sites (see :mod:`vbtta.infer.advi.own`). A loaded policy has its name only.
    views : GaussianMixture or CategoricalMixture, optional
        How views are calibrated and which priors they have; the task's mixture by default. Their noise, component and
        class weights are the function's business and stay at their defaults.

    Examples
    --------
    Labels that stray like a Laplace variable around their view:

    >>> import numpy as np
    >>> import pyro
    >>> import pyro.distributions as dist
    >>> import torch
    >>> from vbtta import ADVI, PyroModel, ViewPredictions, fit_policy
    >>> def laplace(predictions, labels, prior):
    ...     views = prior.sample(predictions)
    ...     around = dist.Laplace(views.location[labels.instance], views.scale[labels.instance])  # (j, K, C)
    ...     each = around.log_prob(labels.value[:, None]).sum(dim=-1)  # (j, K)
    ...     pyro.factor("labels", torch.logsumexp(views.log_weights + each, dim=-1).sum())
    >>> rng = np.random.default_rng(0)
    >>> views = rng.normal(size=(200, 2, 1))  # (N, K, C)
    >>> labels = views[:, 0] + 0.3 * rng.laplace(size=(200, 1))
    >>> engine = ADVI(steps=600, particles=2, learning_rate=0.1)
    >>> policy = fit_policy(ViewPredictions(views), labels, task="regression", model=PyroModel(laplace), engine=engine)
    >>> policy.weights.round(1)
    array([1., 0.])
    """

    function: Callable[[Any, Any, Any], None] | str
    views: GaussianMixture | CategoricalMixture | None = None

    def __post_init__(self) -> None:
        if not callable(self.function) and not isinstance(self.function, str):
            raise ValueError(f"function must be a Pyro model (predictions, labels, prior); got {self.function!r}")
        if callable(self.function):
            takes("function", self.function, "predictions", "labels", "prior")
        for option, only in (("noise", (None, "none")), ("component", ("normal",)), ("weights", ("view",))):
            value = getattr(self.views, option, only[0])
            if value not in only:
                raise ValueError(
                    f"views have {option}={value!r}, which is what the function is there for; leave it out"
                )


ModelSpec = (
    GaussianMixture
    | GaussianLatent
    | CategoricalMixture
    | CategoricalLatent
    | OrdinalMixture
    | RankingMixture
    | PyroModel
)


def _check_categorical(spec: CategoricalMixture | CategoricalLatent) -> None:
    one_of("link", spec.link, ("softmax", "probit"))
    one_of("noise", spec.noise, (None, "none", "uniform", "annotator", "confusion"))
    positive(kappa_scale=spec.kappa_scale, offset_scale=spec.offset_scale, xi_scale=getattr(spec, "xi_scale", None))
    for name in ("confusion_prior", "accuracy_prior"):
        if len(getattr(spec, name)) != 2:
            raise ValueError(f"{name} must be two numbers; got {getattr(spec, name)}")
        for value in getattr(spec, name):
            positive(**{name: value})


def _check_scale(v: float | Sequence[float] | None) -> None:
    for value in [] if v is None else v if isinstance(v, Sequence | np.ndarray) else [v]:
        positive(v=value)
