"""What every statistical model has in common: the typed bases and the one registry; and stacks of models.

docs/contribute/architecture.md says what is in the files of a model's folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, get_type_hints

import numpy as np

from vbtta._support.checks import positive
from vbtta._support.files import fits
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import Prediction
from vbtta.inference.advi import ADVI, AdviTask
from vbtta.inference.em import EM, Problem
from vbtta.inference.laplace import PoolUncertainty, WeightInformation, pool_intervals, pool_weights, weight_intervals
from vbtta.models.parts.annotators import AnnotatorNoise, LabelFacts
from vbtta.models.parts.class_data import CategoricalBlocks, categorical_data
from vbtta.models.parts.gate import FeatureChoice, Gate, GateData
from vbtta.models.parts.label_noise import AnnotatorAccuracy
from vbtta.models.parts.standard import ContinuousBlocks, continuous_data

Engine = EM | ADVI


class Entry(NamedTuple):
    """Where a model is and what it is called."""

    task: str
    short_name: str  # in fit_policy(model=...)
    folder: str
    posterior: str
    closed: bool = True  # whether EM fits it; then ADVI's posterior has a class of its own, Sampled...


MODELS = {
    "GaussianMixture": Entry("regression", "mixture", "gaussian_mixture", "MixturePosterior"),
    "GaussianLatent": Entry("regression", "latent", "gaussian_latent", "LatentPosterior"),
    "CategoricalMixture": Entry("classification", "mixture", "categorical_mixture", "CategoricalPosterior"),
    "CategoricalLatent": Entry("classification", "latent", "categorical_latent", "LatentClassPosterior"),
    "OrdinalMixture": Entry("ordinal", "mixture", "ordinal", "OrdinalPosterior", closed=False),
    "RankingMixture": Entry("ranking", "mixture", "ranking", "RankingPosterior", closed=False),
    "PyroModel": Entry("", "", "pyro", ""),  # task and posterior are those of its `views`
    "Stack": Entry("", "", "", ""),  # task and posteriors are those of its members
}
LayoutT = TypeVar("LayoutT")
PosteriorT = TypeVar("PosteriorT", bound="Posterior")


class Model:
    """A statistical model as a frozen record of its options. The defaults here suit models without such options."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def raw_network(cls) -> "Model | None":
        """The model of the network as it is, with one temperature or scale; None where there is none."""
        return None

    def as_stack(self) -> "Stack | None":
        """The model if it is a stack of others, else None."""
        return None

    @property
    def obstacle(self) -> str:
        """What has no closed form, so that EM cannot fit the model; empty where it can."""
        return "" if MODELS[type(self).__name__].closed else f"task={task_of(self)!r}"

    @property
    def views_model(self) -> "Model":
        """The model that says how views are calibrated: this one, unless it wraps another."""
        return self

    def for_task(self, task: str) -> Self:
        """The model, completed for a task; refused if it is for another."""
        if task_of(self) != task:
            fitting = ", ".join(kind.__name__ for kind in models_of(task).values())
            raise ValueError(f"model {type(self).__name__} is not for task={task!r}; use one of {fitting}")
        return self

    def resolve(self, labels: "LabelFacts") -> Self:
        """The model with the options that labels decide, where they were left open."""
        return self

    def without_labels(self) -> Self:
        """The model as it is fitted without labels; most need them."""
        raise ValueError(f"labels=None fits a CategoricalMixture; got model={self!r}")

    def settle(self, source: "Source", start: "Posterior | None" = None) -> "tuple[Self, Posterior | None]":
        """The resolved model with the options that the data decide, and a posterior to start its fit from."""
        return self, start

    def alternatives(self, *, maps: bool) -> tuple[Self, ...]:
        """Models among which held-out scores decide: features of maps by position or image, if left open."""
        if not maps or (getattr(self, "weights", ""), getattr(self, "features", "")) != ("input", "auto"):
            return (self,)
        return replace(self, features="own"), replace(self, features="pooled")

    def choices(self, labels: "LabelFacts") -> tuple[Self, ...]:
        """The model with all values of the options that it leaves open and held-out scores decide, the default first.

        A stack decides once for all its members. Here it is the scale of a regression.
        """
        if getattr(self, "scale", "") is not None:
            return (self,)
        return tuple(replace(self, scale=scale) for scale in ("prediction", "constant"))

    def adopt(self, other: "Model") -> Self:
        """The model with another's scale, label noise and item difficulty where it leaves them open."""
        names = [name for name in ("scale", "noise", "difficulty") if getattr(self, name, "") is None]
        return replace(self, **{name: getattr(other, name, None) for name in names})

    @property
    def ungated(self) -> Self | None:
        """The same with constant weights, where weights depend on the input; else None."""
        gated = getattr(self, "weights", "") == "input"
        return replace(self, weights="view", features="auto") if gated else None

    def is_optional(self, members: "Sequence[Model]") -> bool:
        """Whether it joins a stack by evidence alone: a gate of open features, beside the same constant weights."""
        return getattr(self, "features", "") == "auto" and self.ungated in members

    def gate_wanted(self, source: "Source", start: "Posterior | None") -> bool:
        """Whether the evidence for weights that depend on the input is decisive, and a module can compute them."""
        gate: GateData = load(self, "em").pose(source, self, start)[0].gate
        return gate.decisive and not gate.features.spread

    def with_noise_of(self, raw: "Posterior") -> Self:
        """The resolved model with the label noise that the raw network infers as its prior."""
        return self

    def rescale(self, share: float) -> Self:
        """The settled model for a share of its views."""
        return self

    def one_optimum(self, n_units: int, n_views: int) -> bool:
        """Whether fits to some of the units may start from that to all: else they would inherit its local optimum."""
        return n_views == 1


class LatentModel(Model):
    """A model of one weighted sum of the views, whose weights are shrunk towards equal ones."""

    shrinkage: float | None

    def one_optimum(self, n_units: int, n_views: int) -> bool:
        """The likelihood of a pool is concave but for the label noise."""
        return True

    def settle(self, source: "Source", start: "Posterior | None" = None) -> "tuple[Self, Posterior | None]":
        """Decide the shrinkage by the evidence."""
        if self.shrinkage is not None:
            return self, start
        problem, first = load(self, "em").pose(source, self, start)
        return replace(self, shrinkage=problem.shrinkage), problem.posterior(first)

    def rescale(self, share: float) -> Self:
        """Weights differ from 1/K by as much, relative to it, as those of all views."""
        return self if self.shrinkage is None else replace(self, shrinkage=self.shrinkage * share**2)


@dataclass(frozen=True, kw_only=True)
class Stack(Model):
    """Several models, fitted one by one; the weights of their predictions are inferred from held-out scores.

    Stacking of predictive distributions (Yao, Vehtari, Simpson and Gelman 2018; docs/method, "Stacking").

    Parameters
    ----------
    members : models of one task
        Each is fitted to all views. One with ``weights="input"`` beside the same with constant weights is left out
        unless the evidence for it is decisive (docs/method, eq. 27).
    raw : model, optional
        Fitted to the identity view alone: the network as it is, with one temperature or scale. Where labels are single,
        the accuracy that it infers is the prior of the members'.
    prior_count : float
        Dirichlet prior of the members' weights, as instances per member beyond a flat prior; for the raw network as
        many as for all the others together. The larger it is, the more instances it takes to move the weights away from
        these shares. The raw network also takes the probability that the others do not help, which begins high and
        falls with the number of instances.
    """

    members: tuple[Model, ...]
    raw: Model | None = None
    prior_count: float = 1.0

    def __post_init__(self) -> None:
        if not self.members or not all(isinstance(member, Model) and not member.as_stack() for member in self.members):
            raise ValueError(f"members must be model records, such as (CategoricalMixture(),); got {self.members!r}")
        positive(prior_count=self.prior_count)

    def as_stack(self) -> "Stack":
        """Itself."""
        return self

    @property
    def obstacle(self) -> str:
        """That of the first model that has one."""
        return next((model.obstacle for model in (*self.members, self.raw) if model and model.obstacle), "")

    @property
    def views_model(self) -> Model:
        """The first member's."""
        return self.members[0].views_model

    def for_task(self, task: str) -> Self:
        """All members, completed for a task."""
        return self._map_models(lambda model: model.for_task(task))

    def resolve(self, labels: LabelFacts) -> Self:
        """All members with the options that labels decide."""
        return self._map_models(lambda model: model.resolve(labels))

    def _map_models(self, change: Callable[[Model], Model]) -> Self:
        return replace(self, members=tuple(map(change, self.members)), raw=self.raw and change(self.raw))


class Source(Protocol):
    """Predictions and labels, in memory or on a cluster, as models read them: in blocks."""

    @property
    def has_variance(self) -> bool:
        """Whether predictions have variances over draws."""

    @property
    def named(self) -> bool:
        """Whether labels name their annotators."""

    def continuous(self, *, with_variance: bool) -> ContinuousBlocks:
        """Labelled instances in standard units."""

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> CategoricalBlocks:
        """Labelled instances with their logits and classes."""

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Labelled instances with their features, as :meth:`GateData.of` takes them."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """Aligned predictions and labels, as a :class:`Source`; data are laid out once for all models that read them."""

    predictions: ViewPredictions
    labels: LabelSets
    _layouts: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def has_variance(self) -> bool:
        """Whether predictions have variances over draws."""
        return self.predictions.variance is not None

    @property
    def named(self) -> bool:
        """Whether labels name their annotators."""
        return self.labels.annotator is not None

    def continuous(self, *, with_variance: bool) -> ContinuousBlocks:
        """Labelled instances in standard units."""
        return self._laid_out(with_variance, partial(continuous_data, with_variance=with_variance))

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> CategoricalBlocks:
        """Labelled instances with their logits and classes."""
        options = {"noise": noise, "with_variance": with_variance, "classes_last": classes_last}
        return self._laid_out(tuple(options.values()), partial(categorical_data, **options))  # type: ignore[arg-type]

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Labelled instances with their features, which depend on which weights are positive alone."""
        key = (features, shared, (weights > 0).tobytes(), None if unit is None else unit.tobytes())
        return self._laid_out(key, partial(GateData.of, choice=features, weights=weights, shared=shared, unit=unit))

    def select(self, names: Sequence[str]) -> "InMemory":
        """Some of the views."""
        same = tuple(names) == self.predictions.names
        return self if same else InMemory(self.predictions.select(names), self.labels)

    def take(self, rows: Array) -> "InMemory":
        """Some of the rows."""
        return InMemory(self.predictions.take(rows), self.labels.take(rows))

    def forget_layouts(self) -> None:
        """Free memory: the next fit lays the data out again."""
        self._layouts.clear()

    def _laid_out(self, key: Hashable, lay_out: Callable[[ViewPredictions, LabelSets], LayoutT]) -> LayoutT:
        if key not in self._layouts:
            self._layouts[key] = lay_out(self.predictions, self.labels)
        layout: LayoutT = self._layouts[key]
        return layout


class Pooling(NamedTuple):
    """A point prediction as plain arrays, for a network or an export that computes it elsewhere.

        linear:   sum_k w_k (s_k f_k + b_k)
        mixture:  sum_k w_k P(s_k f_k + b_k), divided by its sum over the classes where weights are by class
        latent:   P(sum_k w_k (s_k f_k + b_k))

    Weights sum to 1, divided by the sum of those that are present. Views are those of positive weight, in the order of
    the fit; P is the link.
    """

    kind: str  # "linear", "mixture" or "latent"
    link: str  # a name in links.LINKS; "" for a linear pool
    scale: Array  # (K, C)
    offset: Array  # (K, C)
    weights: Array  # (K, C); with a gate, positive for the views that w_k(x) is shared among
    gate: Gate | None = None


class Posterior(ABC):
    """A fitted model without its data.

    Predictions handed to it hold the views of positive weight only, in the order of the fit. `annotator` gives for
    every label the annotator's position in the fit, or -1 for an unknown one.
    """

    if TYPE_CHECKING:  # fields of some models
        information: WeightInformation | None  # of mixtures

        @property
        def weights(self) -> Array:
            """The weights of the views: (K,)."""

    @property
    def gain(self) -> float:
        """Factor of the weighted average; a mixture, whose views are calibrated one by one, has none."""
        return 1.0

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""
        return weight_intervals(self.weights, self.information, level)

    @abstractmethod
    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The predictive distribution."""

    @abstractmethod
    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Prediction:
        """The truth of every input given its labels."""

    @abstractmethod
    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set: (N+,)."""

    @abstractmethod
    def keep(self, views: Array) -> "Posterior":
        """The same with only some of the views, an index array; their weights sum to one again."""

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | AnnotatorAccuracy | None:
        """What the fit knows of the annotators."""
        return None

    def pooling(self) -> Pooling:
        """The point prediction as plain arrays, without variances over draws, where it has a closed form."""
        raise ValueError(
            f"a {type(self).__name__} has no closed point prediction outside Policy.predict; fit with engine='em'"
        )


class PoolPosterior(Posterior):
    """A fitted pool, whose weights are those of one sum of the views."""

    if TYPE_CHECKING:  # fields of the models
        uncertainty: PoolUncertainty | None

        @property
        def pool(self) -> Array:
            """The factors v of the views: (K,)."""

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return pool_weights(self.pool)

    @property
    def gain(self) -> float:
        """Factor of the weighted average: the sum of v."""
        return float(self.pool.sum())

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights by Laplace: normal where free, the half-line's quantile at zero."""
        return pool_intervals(self.weights, self.uncertainty, level)

    def kept_pool(self, views: Array) -> Array:
        """The factors of some of the views, which take over the gain of the others."""
        pool = self.pool[views]
        return pool * (self.gain / pool.sum()) if pool.sum() > 0 else pool


def task_of(model: Model) -> str:
    """The task that a model is for."""
    return MODELS[type(model.views_model).__name__].task


def models_of(task: str) -> dict[str, type[Model]]:
    """The models of a task by their short names."""
    models = {entry.short_name: _type(name) for name, entry in MODELS.items() if entry.task == task}
    if not models:
        known = sorted({entry.task for entry in MODELS.values() if entry.task})
        raise ValueError(f"task must be one of {known}, or 'multilabel' in fit_policy (then .prune()); got {task!r}")
    return models


def pose(model: Model, source: Source, start: Posterior | None = None) -> tuple[Problem[Any, Any, Posterior], Any]:
    """The problem that EM solves, and the state it starts from: near a posterior of similar data or models if given."""
    if model.obstacle:
        raise ValueError(f"{model.obstacle} has no closed form; use engine='advi'")
    return load(model, "em").pose(source, model, start)  # type: ignore[no-any-return]


def of_kind(posterior: Posterior | None, kind: type[PosteriorT], n_views: int) -> PosteriorT | None:
    """The posterior if it is of a kind and of as many views, else None: fits may start from those of other models."""
    return posterior if isinstance(posterior, kind) and len(posterior.weights) == n_views else None


def nearest(model: Model, engine: Engine, posteriors: Sequence[Posterior], n_views: int) -> Posterior | None:
    """The posterior to start a fit from: the last one of the model's own kind and views, else the first."""
    kind = posterior_type(model, engine)
    alike = [posterior for posterior in posteriors if type(posterior) is kind and len(posterior.weights) == n_views]
    candidates = [*posteriors[:1], *alike]
    return candidates[-1] if candidates else None


def pose_density(model: Model, source: InMemory, seed: int) -> AdviTask[Posterior]:
    """The log density that ADVI approximates, and what turns its result into a posterior."""
    return load(model, "density").pose(source, model, seed)  # type: ignore[no-any-return]


def posterior_type(model: Model, engine: Engine) -> type[Posterior]:
    """The class of a model's posterior."""
    entry = MODELS[type(model.views_model).__name__]
    name = f"Sampled{entry.posterior}" if entry.closed and isinstance(engine, ADVI) else entry.posterior
    return getattr(load(model.views_model, "posterior"), name)  # type: ignore[no-any-return]


def record_to_dict(record: Model | Engine) -> dict[str, Any]:
    """A record as plain data: its kind and options."""
    options = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    return {"kind": type(record).__name__, **options}


def record_from_dict(data: dict[str, Any]) -> Any:
    """The record that :func:`record_to_dict` described."""
    options = dict(data)
    name = str(options.pop("kind", None))
    if name not in MODELS and name not in _ENGINES:
        raise ValueError(f"unknown model or engine {name!r}; known are {sorted([*MODELS, *_ENGINES])}")
    kind: Callable[..., Any] = _ENGINES[name] if name in _ENGINES else _type(name)
    unknown = sorted(set(options) - {field.name for field in fields(kind)})  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"{name} has no option {unknown[0]!r}")
    hints = get_type_hints(kind)
    if wrong := [key for key, value in options.items() if not fits(hints[key], value)]:
        raise ValueError(f"{name} has {wrong[0]} {options[wrong[0]]!r:.80}")
    return kind(**{key: _rich(value) for key, value in options.items()})


_ENGINES: dict[str, type[Any]] = {"EM": EM, "ADVI": ADVI}


def _type(name: str) -> type[Model]:
    if name == "Stack":
        return Stack
    return getattr(import_module(f"vbtta.models.{MODELS[name].folder}.spec"), name)  # type: ignore[no-any-return]


def load(model: Model, role: str) -> Any:
    """The file of a role in a model's folder."""
    return import_module(f"vbtta.models.{MODELS[type(model).__name__].folder}.{role}")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return record_to_dict(value)  # type: ignore[arg-type]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if callable(value):  # a function by its module and name; another callable by its type's
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return record_from_dict(value)
    return tuple(map(_rich, value)) if isinstance(value, list) else value
