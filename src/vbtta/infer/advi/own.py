"""A user's own Pyro model in place of the likelihood.

The model is a function ``(predictions, labels, prior) -> None``. It gets tensors of doubles in standard units:

* `predictions`: ``mean`` (n, K, C) and ``variance`` (n, K, C) or None, of labelled inputs;
* `labels`: ``value`` (j, C), or (j,) class positions; ``instance`` (j,), the row of `predictions` each belongs to;
  ``annotator`` (j,), ``count`` (j,), and ``n_annotators``;
* `prior`: ``prior.sample(predictions)`` draws weights and calibration under the priors of the views' model and
  returns the calibrated views: ``weights`` (K,), ``log_weights`` (K,) and, in regression, ``location`` and ``scale``
  (n, K, C), or, in classification, ``log_proba`` (n, K, C).

Everything else is Pyro: draw further parameters with ``pyro.sample``, from distributions that are real, positive, in
the unit interval or on a simplex; say how probable the labels are with ``pyro.factor`` or observed sites. Latent
variables of single labels must be summed out. The function may see a batch of the inputs; what it says about labels is
scaled up.
"""

__all__ = ["OwnDensity", "OwnLabels", "OwnPredictions", "OwnPrior", "OwnViews"]

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta.infer.advi.categorical import CategoricalDensity
from vbtta.infer.advi.continuous import MixtureDensity
from vbtta.infer.advi.densities import Sample, Units, Values
from vbtta.labels import Array

torch = require("torch", "advi")
pyro = require("pyro", "advi")


class OwnPredictions(NamedTuple):
    """Predictions of labelled inputs."""

    mean: Any  # (n, K, C)
    variance: Any  # (n, K, C) or None
    rows: Units


class OwnLabels(NamedTuple):
    """Their labels."""

    value: Any  # (j, C) or (j,)
    instance: Any  # (j,)
    annotator: Any  # (j,)
    count: Any  # (j,)
    n_annotators: int


class OwnViews(NamedTuple):
    """Calibrated views."""

    weights: Any  # (K,)
    location: Any  # (n, K, C) in regression, else None
    scale: Any  # (n, K, C): standard deviations, likewise
    log_proba: Any  # (n, K, C) in classification, else None

    @property
    def log_weights(self) -> Any:
        """Logarithms of the weights: (K,)."""
        return self.weights.log()


class OwnPrior:
    """Draws the views' parameters as the model they come from has them."""

    def __init__(self, base: MixtureDensity | CategoricalDensity) -> None:
        self._base = base

    def sample(self, predictions: OwnPredictions) -> OwnViews:
        """Weights and calibration, and the views so calibrated."""
        values = self._base.prior(pyro.sample)
        if isinstance(self._base, CategoricalDensity):
            log_proba = self._base.log_views(values, predictions.rows).transpose(0, 1)
            return OwnViews(values["weights"], None, None, log_proba)
        views = self._base.views(values, predictions.rows)
        covariance = torch.cholesky_inverse(views.factor)  # (K, C, C)
        scale = torch.diagonal(covariance, dim1=-2, dim2=-1).sqrt()[:, None]  # (K, 1, C)
        scale = scale.expand(views.location.shape) if views.root is None else scale / views.root
        return OwnViews(values["weights"], views.location.transpose(0, 1), scale.transpose(0, 1), None)


class OwnDensity:
    """The joint density of a Pyro model, from its traces."""

    def __init__(self, function: Callable[..., None], base: MixtureDensity | CategoricalDensity, seed: int) -> None:
        self._function, self._base, self._prior = function, base, OwnPrior(base)
        self._together = True
        self.n_units, self.width = base.tensors.first.shape[0] - 1, base.width
        with torch.random.fork_rng(devices=[]), pyro.validation_enabled(False):
            torch.manual_seed(seed)
            sites, others = (
                _sites(_traced(function, self._arguments(slice(0, size)))) for size in (1, min(2, self.n_units))
            )
        self._latent = {name: site["fn"] for name, site in sites.items() if not site["is_observed"]}
        for name in self._latent:
            if name not in others or others[name]["value"].shape != sites[name]["value"].shape:
                raise ValueError(
                    f"site {name!r} of {_name(function)} has another shape where there are more inputs; sum latent "
                    "variables of single inputs or labels out"
                )
        if "weights" not in self._latent:
            raise ValueError(
                f"{_name(function)} does not draw the views' weights; call prior.sample(predictions) in it"
            )
        if "class_weights" in self._latent:
            raise ValueError(f"{_name(function)} draws 'class_weights', which is a name of the views' model; rename it")
        if len(sites) == len(self._latent):
            raise ValueError(f"{_name(function)} says nothing about the labels; end it with pyro.factor or obs=...")

    def prior(self, sample: Sample) -> Values:
        """All latent sites; their densities are the trace's business."""
        return {name: sample(name, _Flat(distribution)) for name, distribution in self._latent.items()}

    def start(self) -> dict[str, Array]:
        """Where the views' model starts."""
        known = self._base.start()
        return {name: place for name, place in known.items() if name in self._latent}

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Log joint density of some units and their share of the prior, all particles at once where possible: (M,)."""
        arguments = self._arguments(units)
        share = len(arguments[0].mean) / self.n_units
        particles = len(next(iter(values.values())))
        with pyro.validation_enabled(False):
            if self._together:
                try:
                    return torch.vmap(lambda one: self._one(one, arguments, share))(values)
                except RuntimeError:  # it branches on values, or uses what vmap cannot
                    self._together = False
            parts = [
                self._one({name: value[m] for name, value in values.items()}, arguments, share)
                for m in range(particles)
            ]
        return torch.stack(parts)

    def _one(self, values: Values, arguments: tuple[Any, ...], share: float) -> Any:
        trace = pyro.poutine.trace(pyro.poutine.condition(self._function, data=values)).get_trace(*arguments)
        trace.compute_log_prob()
        total = torch.zeros((), dtype=torch.float64)
        for name, site in _sites(trace).items():
            total = total + site["log_prob_sum"] * (share if name in self._latent else 1.0)
        return total

    def _arguments(self, units: Units) -> tuple[OwnPredictions, OwnLabels, OwnPrior]:
        base: Any = self._base
        tensors, classes = base.tensors, isinstance(base, CategoricalDensity)
        labels, owner = tensors.labels_of_rows(units)
        mean, value = (tensors.logits, tensors.label) if classes else (tensors.mean, tensors.value)
        variance = None if tensors.variance is None else tensors.variance[:, units].transpose(0, 1)
        n_annotators = tensors.n_annotators if classes else base.n_annotators
        return (
            OwnPredictions(mean[:, units].transpose(0, 1), variance, units),
            OwnLabels(value[labels], owner, tensors.annotator[labels], tensors.count[labels], n_annotators),
            self._prior,
        )


class _Flat:
    """A site's shape, support and mean, without its density."""

    def __init__(self, distribution: Any) -> None:
        self.batch_shape, self.event_shape = distribution.batch_shape, distribution.event_shape
        self.support = distribution.support
        try:
            self.mean = distribution.mean
        except NotImplementedError:
            self.mean = torch.tensor(np.nan)

    def log_prob(self, value: Any) -> Any:
        return torch.zeros(len(value), dtype=torch.float64)


def _traced(function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    try:
        return pyro.poutine.trace(function).get_trace(*arguments)
    except RuntimeError as error:
        if "Multiple" not in str(error):
            raise  # the function's own
        raise ValueError(
            f"{_name(function)} draws two sites of one name ({error}); call prior.sample once, and give other sites "
            "names that the views' parameters do not have"
        ) from None


def _sites(trace: Any) -> dict[str, Any]:
    """What a trace drew or observed; a plate's choice of indices is neither."""
    subsample = pyro.poutine.util.site_is_subsample
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample" and not subsample(site)}


def _name(function: Callable[..., None]) -> str:
    return getattr(function, "__qualname__", repr(function))
