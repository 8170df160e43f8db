"""What every statistical model has in common: the typed bases and the one registry.

A model is a folder: `spec.py` (the record that users write), `em.py` (a problem for the EM ascent), `posterior.py`
(what remains when the data are gone), `intervals.py` (of the weights) and `density.py` (the log density for ADVI, which
needs torch and loads on use). Models without a closed form have no `em.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import Prediction
from vbtta.inference.advi import ADVI, AdviTask
from vbtta.inference.em import EM, Problem
from vbtta.models.parts.annotators import AnnotatorNoise, LabelFacts
from vbtta.models.parts.class_data import CategoricalBlocks, categorical_data
from vbtta.models.parts.gate import FeatureChoice, Gate, GateData
from vbtta.models.parts.label_noise import AnnotatorAccuracy
from vbtta.models.parts.standard import ContinuousBlocks, continuous_data

if TYPE_CHECKING:
    from vbtta.models.stack.spec import Stack

Engine = EM | ADVI


class Entry(NamedTuple):
    """Where a model is and what it is called."""

    task: str
    short_name: str  # in fit_policy(model=...)
    folder: str
    posterior: str  # of EM; "" where there is no closed form
    sampled_posterior: str  # of ADVI


MODELS = {
    "GaussianMixture": Entry(
        "regression", "mixture", "gaussian_mixture", "MixturePosterior", "SampledMixturePosterior"
    ),
    "GaussianLatent": Entry("regression", "latent", "gaussian_latent", "LatentPosterior", "SampledLatentPosterior"),
    "CategoricalMixture": Entry(
        "classification", "mixture", "categorical_mixture", "CategoricalPosterior", "SampledCategoricalPosterior"
    ),
    "CategoricalLatent": Entry(
        "classification", "latent", "categorical_latent", "LatentClassPosterior", "SampledLatentClassPosterior"
    ),
    "OrdinalMixture": Entry("ordinal", "mixture", "ordinal", "", "OrdinalPosterior"),
    "RankingMixture": Entry("ranking", "mixture", "ranking", "", "RankingPosterior"),
    "PyroModel": Entry("", "", "pyro", "", ""),  # task and posterior are those of its `views`
    "Stack": Entry("", "", "stack", "", ""),  # task and posteriors are those of its members
}


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
        return "" if MODELS[type(self).__name__].posterior else f"task={task_of(self)!r}"

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
        """Models among which held-out scores decide; `maps`: rows are positions, and their groups images."""
        return (self,)

    @property
    def scales(self) -> tuple[Self, ...]:
        """The model with every scale of a regression that it leaves open, the one to take without scores first."""
        if getattr(self, "scale", "") is not None:
            return (self,)
        return tuple(replace(self, scale=scale) for scale in ("prediction", "constant"))

    @property
    def ungated(self) -> "Model | None":
        """The same with constant weights, where weights depend on the input; else None."""
        return None

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


class InMemory(NamedTuple):
    """Aligned predictions and labels."""

    predictions: ViewPredictions
    labels: LabelSets

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
        return continuous_data(self.predictions, self.labels, with_variance=with_variance)

    def categorical(self, *, noise: str, with_variance: bool, classes_last: bool) -> CategoricalBlocks:
        """Labelled instances with their logits and classes."""
        return categorical_data(
            self.predictions, self.labels, noise=noise, with_variance=with_variance, classes_last=classes_last
        )

    def gate(self, features: FeatureChoice, weights: Array, *, shared: bool, unit: Array | None) -> GateData:
        """Labelled instances with their features."""
        return GateData.of(self.predictions, self.labels, features, weights, shared=shared, unit=unit)


class Pooling(NamedTuple):
    """A point prediction as plain arrays, for a network or an export that computes it elsewhere.

        linear:   sum_k w_k (s_k f_k + b_k)
        mixture:  sum_k w_k P(s_k f_k + b_k), divided by its sum over the classes where weights are by class
        latent:   P(sum_k w_k (s_k f_k + b_k))

    Weights of the views, or of the views for each class, sum to 1; where some views are missing, divide by the sum of
    the others. With a gate they are w_k(x). Views are those of positive weight in the order of the fit; P is the link.
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

    if TYPE_CHECKING:  # a field of some models

        @property
        def weights(self) -> Array:
            """The weights of the views: (K,)."""

    @property
    def gain(self) -> float:
        """Factor of the weighted average; a mixture, whose views are calibrated one by one, has none."""
        return 1.0

    @abstractmethod
    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the weights."""

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


def task_of(model: Model) -> str:
    """The task that a model is for."""
    return MODELS[type(model.views_model).__name__].task


def models_of(task: str) -> dict[str, type[Model]]:
    """The models of a task by their short names."""
    found = {entry.short_name: _type(name) for name, entry in MODELS.items() if entry.task == task}
    if not found:
        known = sorted({entry.task for entry in MODELS.values() if entry.task} | {"multilabel"})
        raise ValueError(f"task must be one of {known}; got {task!r}")
    return found


def pose(model: Model, source: Source, start: Posterior | None = None) -> tuple[Problem[Any, Any, Posterior], Any]:
    """The problem that EM climbs, and the state it starts from: near a posterior of similar data or models if given."""
    if model.obstacle:
        raise ValueError(f"{model.obstacle} has no closed form; use engine='advi'")
    return load(model, "em").pose(source, model, start)  # type: ignore[no-any-return]


def nearest(model: Model, engine: Engine, posteriors: Sequence[Posterior], n_views: int) -> Posterior | None:
    """The posterior to start a fit from: the last one of the model's own kind and views, else the first."""
    kind = posterior_type(model, engine)
    alike = [each for each in posteriors if type(each) is kind and len(each.weights) == n_views]
    return alike[-1] if alike else posteriors[0] if posteriors else None


def pose_density(model: Model, source: InMemory, seed: int) -> AdviTask[Posterior]:
    """The log density that ADVI climbs, and what turns its result into a posterior."""
    return load(model, "density").pose(source, model, seed)  # type: ignore[no-any-return]


def posterior_type(model: Model, engine: Engine) -> type[Posterior]:
    """The class of a model's posterior."""
    entry = MODELS[type(model.views_model).__name__]
    name = entry.sampled_posterior if isinstance(engine, ADVI) else entry.posterior
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
    return kind(**{key: _rich(value) for key, value in options.items()})


_ENGINES: dict[str, type[Any]] = {"EM": EM, "ADVI": ADVI}


def _type(name: str) -> type[Model]:
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
