"""A user's own Pyro model in place of the likelihood: a function ``(predictions, labels, prior) -> None``.

Its arguments hold float64 tensors in standard units, described by the classes below (docs/guides/own-model.md has the
rules). It may get a minibatch of the inputs; the log probability of the minibatch's labels is then scaled up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.advi import AdviTask
from vbtta.inference.unconstrained import Density, Units, Values
from vbtta.models.base import InMemory, Posterior, load
from vbtta.models.parts.tensors import ViewsDensity
from vbtta.models.pyro.spec import PyroModel


class PyroPredictions(NamedTuple):
    """Predictions of labelled inputs."""

    outputs: Tensor  # (n, K, C)
    variance: Tensor | None  # (n, K, C)
    rows: Units


@dataclass(frozen=True)
class PyroLabels:
    """Labels of the predictions' inputs."""

    value: Tensor  # (j, C) or (j,)
    instance: Tensor  # (j,)
    annotator: Tensor  # (j,)
    count: Tensor  # (j,)
    n_annotators: int


class PyroViews(NamedTuple):
    """Calibrated views."""

    weights: Tensor  # (K,)
    location: Tensor | None = None  # (n, K, C) in regression
    scale: Tensor | None = None  # (n, K, C): standard deviations, likewise
    log_proba: Tensor | None = None  # (n, K, C) in classification

    @property
    def log_weights(self) -> Tensor:
        """Logarithms of the weights: (K,)."""
        return self.weights.log()


class PyroPrior(NamedTuple):
    """The prior of the views' parameters."""

    base: ViewsDensity

    def sample(self, predictions: PyroPredictions) -> PyroViews:
        """Draw weights and calibration, and calibrate the views with them."""
        values = self.base.prior(pyro.sample)
        return PyroViews(values["weights"], **self.base.calibrated(values, predictions.rows))


Function = Callable[[PyroPredictions, PyroLabels, PyroPrior], None]
Arguments = tuple[PyroPredictions, PyroLabels, PyroPrior]


class PyroDensity(Density):
    """The joint density of a Pyro model, from its traces."""

    def __init__(self, function: Function, base: ViewsDensity, seed: int) -> None:
        self._function, self._base, self._vectorise = function, base, True
        self.n_units, self.width = len(base.tensors.first) - 1, base.width
        with torch.random.fork_rng(devices=[]), pyro.validation_enabled(False):
            torch.manual_seed(seed)
            traces = [_sites(_trace(function, self._arguments(slice(0, size)))) for size in (1, min(2, self.n_units))]
        free = [{name: site for name, site in sites.items() if not site["is_observed"]} for sites in traces]
        self.priors = {name: site["fn"].mask(False) for name, site in free[0].items()}  # the trace has their densities
        shapes = [{name: site["value"].shape for name, site in sites.items()} for sites in free]
        problems = {
            "does not draw the views' weights; call prior.sample(predictions) in it": "weights" not in self.priors,
            "draws 'class_weights', which is a name of the views' model; rename it": "class_weights" in self.priors,
            "says nothing about the labels; end it with pyro.factor or obs=...": len(traces[0]) == len(self.priors),
            "draws sites whose shapes depend on the number of inputs; sum them out": shapes[0] != shapes[1],
        }
        for problem, occurs in problems.items():
            if occurs:
                raise ValueError(f"{_name(function)} {problem}")

    def start(self) -> dict[str, Array]:
        """The start of the views' model."""
        return {name: value for name, value in self._base.start().items() if name in self.priors}

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Log joint density of some units and their share of the prior, all particles at once where possible: (M,)."""
        arguments = self._arguments(units)
        share = len(arguments[0].outputs) / self.n_units
        with pyro.validation_enabled(False):
            if self._vectorise:
                try:
                    total: Tensor = torch.vmap(lambda particle: self._log_joint(particle, arguments, share))(values)
                    return total
                except RuntimeError:  # the function branches on values or has operations that vmap does not support
                    self._vectorise = False
            particles = [dict(zip(values, particle, strict=True)) for particle in zip(*values.values(), strict=True)]
            return torch.stack([self._log_joint(particle, arguments, share) for particle in particles])

    def _log_joint(self, values: Values, arguments: Arguments, share: float) -> Tensor:
        trace = poutine.trace(poutine.condition(self._function, data=values)).get_trace(*arguments)
        trace.compute_log_prob()
        total = torch.zeros((), dtype=torch.float64)
        for name, site in _sites(trace).items():
            total = total + site["log_prob_sum"] * (share if name in self.priors else 1.0)
        return total

    def _arguments(self, units: Units) -> Arguments:
        tensors = self._base.tensors
        labels, owner = tensors.labels_of_rows(units)
        variance = None if tensors.variance is None else tensors.variance[:, units].transpose(0, 1)
        columns = tensors.value[labels], owner, tensors.annotator[labels], tensors.count[labels]
        views = PyroPredictions(tensors.mean[:, units].transpose(0, 1), variance, units)
        return views, PyroLabels(*columns, tensors.n_annotators), PyroPrior(self._base)


def _trace(function: Function, arguments: Arguments) -> Any:
    try:
        return poutine.trace(function).get_trace(*arguments)
    except RuntimeError as error:
        if "Multiple" not in str(error):
            raise  # an error in the function itself
        raise ValueError(
            f"{_name(function)} draws two sites of one name ({error}); call prior.sample once, and give other sites "
            "names that the views' parameters do not have"
        ) from None


def _sites(trace: Any) -> dict[str, Any]:
    """The sites that a trace drew or observed; a plate's choice of indices is neither."""
    subsample = poutine.util.site_is_subsample
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample" and not subsample(site)}


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", repr(function))


def pose(source: InMemory, model: PyroModel, seed: int) -> AdviTask[Posterior]:
    """The density of the user's function, with the priors and the posterior of the mixture that it wraps."""
    if isinstance(model.function, str):
        raise ValueError(f"the function of the model is known by its name only, {model.function!r}; pass it")
    assert model.views is not None  # completed by for_task
    base: ViewsDensity
    task: AdviTask[Posterior]
    base, task = load(model.views, "density").pose_views(source, model.views)
    return task._replace(density=PyroDensity(model.function, base, seed))
