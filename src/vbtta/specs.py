"""What is assumed and how it is inferred: models and engines as small frozen records, validated when built."""

__all__ = [
    "ADVI",
    "EM",
    "CategoricalLatent",
    "CategoricalMixture",
    "EngineSpec",
    "GaussianLatent",
    "GaussianMixture",
    "ModelSpec",
    "OrdinalMixture",
    "PyroModel",
    "RankingMixture",
    "spec_from_dict",
    "spec_to_dict",
]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from vbtta._support.checks import one_of, positive, takes, whole_number
from vbtta._support.words import shown

ContinuousNoise = Literal["none", "annotator"]
CategoricalNoise = Literal["none", "uniform", "annotator", "confusion"]


@dataclass(frozen=True, kw_only=True)
class GaussianMixture:
    """Continuous labels as a mixture of calibrated views (docs/method, "Continuous outputs").

    Parameters
    ----------
    link : {"affine", "shift"}
        Whether a view may be rescaled and shifted, or only shifted.
    noise : {"none", "annotator"}, optional
        Whether labels are the truth plus an annotator's bias and noise. By default annotators are
        modelled where they are named, their labels overlap and the component is normal.
    heteroscedastic : bool
        Whether a view counts less where its draws vary more.
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood.
    component : {"normal", "student_t", "laplace"}
        Distribution of a label around its view; other than normal for ADVI only. Tails pay where labels stray and every
        view is needed: a view that explains nothing becomes the wide component that strays need, and a mixture of
        normals with such a view is heavy-tailed by itself.
    beta : float
        Prior precision of the calibration, in standardised units.
    nu : float, optional
        Prior degrees of freedom of the precision; C + 2 by default.
    v : float or C floats, optional
        Prior residual variance in the labels' units; by default the smaller of the median over views of what is
        observed and of what a short preliminary fit leaves around a label's own view.
    gamma : float
        Prior precision of the annotators' biases, in standardised units.
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
    """Continuous labels around one weighted average of the views (docs/method, "Pooling").

    Parameters
    ----------
    noise : {"none", "annotator"}, optional
        As in :class:`GaussianMixture`.
    shrinkage : float, optional
        Prior precision of every weight around 1/K, in standardised units; by default from the evidence.
    beta, nu, v, gamma
        As in :class:`GaussianMixture`; beta is the precision of the common offset.
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
    """Class labels from a mixture of calibrated views (docs/method, "Categorical outputs").

    Parameters
    ----------
    link : {"softmax", "probit"}
        How logits become probabilities.
    noise : {"none", "uniform", "annotator", "confusion"}, optional
        What separates a label from the true class: nothing, one accuracy for all, one accuracy an
        annotator, or a confusion matrix an annotator. By default confusion where enough instances carry two labels
        or more, else none: from single labels a confusion matrix invents noise.
    calibrate : bool
        Whether temperatures and class offsets are inferred.
    weights : {"view", "view_class"}
        One weight a view, or one a view and class.
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood.
    kappa_scale, xi_scale, offset_scale : float
        Prior standard deviations of the common log inverse temperature, of the views' deviations from it and
        of the class offsets.
    confusion_prior : (float, float)
        Dirichlet counts of a confusion row: on the diagonal, and in all off it.
    accuracy_prior : (float, float)
        Beta counts of an accuracy: right and wrong.
    class_concentration : float
        How strongly the class weights of ``weights="view_class"`` are drawn towards the common ones.
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
    """Class labels from one weighted sum of the views' logits (docs/method, "Pooling").

    Parameters
    ----------
    shrinkage : float, optional
        Prior precision of every weight around the common temperature's share; by default from the evidence.
    link, noise, offset_scale, confusion_prior, accuracy_prior
        As in :class:`CategoricalMixture`.
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
            if isinstance(self.levels, str) or len(self.levels) < 2 or len(set(self.levels)) < len(self.levels):
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


@dataclass(frozen=True, kw_only=True)
class EM:
    """Variational EM: closed-form steps that never lower the bound.

    Parameters
    ----------
    max_steps : int
        Most accepted updates.
    tol : float
        Stop when the bound gains less than this per label; 0 runs `max_steps` without a warning.
    accelerate : bool
        Whether to extrapolate between steps.
    keep_states : bool
        Whether to keep every step's state for :meth:`Policy.at_step`.
    """

    max_steps: int = 1000
    tol: float = 1e-7
    accelerate: bool = True
    keep_states: bool = False

    def __post_init__(self) -> None:
        whole_number("max_steps", self.max_steps, least=1)
        if not isinstance(self.tol, float | int) or not self.tol >= 0:
            raise ValueError(f"tol must be a number that is not negative; got {self.tol!r}")


@dataclass(frozen=True, kw_only=True)
class ADVI:
    """Automatic differentiation variational inference on Pyro: a full-rank normal on the unconstrained parameters.

    Parameters
    ----------
    steps : int
        Gradient steps, all of which are taken; the step length falls along a cosine.
    bound : {"elbo", "renyi", "iwae"}
        What is maximised. All bound the log evidence from below; the importance-weighted one is the tightest for a
        number of particles, and its weights the noisiest.
    alpha : float, optional
        Order of the Renyi bound, between 0 (importance-weighted) and 1 (ELBO); 0.5 by default.
    particles : int
        Draws per step.
    batch_size : int, optional
        Labels (or instances, where their labels share a truth) per step; all of them by default. Bounds other
        than the ELBO are then no longer bounds on the way; at the end all data count.
    learning_rate : float
        Of Adam.
    keep_states : bool
        Whether to keep the state that every step started from for :meth:`Policy.at_step`.

    Notes
    -----
    Weights always have a Dirichlet prior here; its concentration is 1 where the model states none.
    """

    steps: int = 3000
    bound: Literal["elbo", "renyi", "iwae"] = "elbo"
    alpha: float | None = None
    particles: int = 8
    batch_size: int | None = None
    learning_rate: float = 0.02
    keep_states: bool = False

    def __post_init__(self) -> None:
        one_of("bound", self.bound, ("elbo", "renyi", "iwae"))
        positive(learning_rate=self.learning_rate)
        for name in ("steps", "particles", "batch_size"):
            value = getattr(self, name)
            if value is not None:
                whole_number(name, value, least=1)
        if self.alpha is not None and self.bound != "renyi":
            raise ValueError(f"alpha is the order of bound='renyi'; leave it out with bound={self.bound!r}")
        if self.alpha is not None and not (isinstance(self.alpha, float | int) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha must be between 0 and 1; got {self.alpha!r}")

    @property
    def order(self) -> float:
        """The order of the bound as a Renyi bound: 1 for the ELBO, 0 for the importance-weighted one."""
        if self.bound == "renyi":
            return 0.5 if self.alpha is None else self.alpha
        return 1.0 if self.bound == "elbo" else 0.0


ModelSpec = (
    GaussianMixture
    | GaussianLatent
    | CategoricalMixture
    | CategoricalLatent
    | OrdinalMixture
    | RankingMixture
    | PyroModel
)
EngineSpec = EM | ADVI
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        GaussianMixture,
        GaussianLatent,
        CategoricalMixture,
        CategoricalLatent,
        OrdinalMixture,
        RankingMixture,
        PyroModel,
        EM,
        ADVI,
    )
}


def spec_to_dict(spec: ModelSpec | EngineSpec) -> dict[str, Any]:
    """A record as plain data: its kind and options."""
    return {"kind": type(spec).__name__, **{field.name: _plain(getattr(spec, field.name)) for field in fields(spec)}}


def spec_from_dict(data: dict[str, Any]) -> Any:
    """The record that :func:`spec_to_dict` described."""
    options = dict(data)
    kind = _KINDS.get(str(options.pop("kind", None)))
    if kind is None:
        raise ValueError(f"unknown model or engine {data.get('kind')!r}; known are {sorted(_KINDS)}")
    unknown = sorted(set(options) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no option {unknown[0]!r}")
    return kind(**{key: _rich(value) for key, value in options.items()})


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return spec_to_dict(value)  # type: ignore[arg-type]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return spec_from_dict(value)
    return tuple(value) if isinstance(value, list) else value


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
