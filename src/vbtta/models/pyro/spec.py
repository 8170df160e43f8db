"""The options of a user's own Pyro model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from vbtta._support.checks import shown, takes
from vbtta.models.base import Model, models_of
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.gaussian_mixture.spec import GaussianMixture


@dataclass(frozen=True)
class PyroModel(Model):
    """A mixture of views whose likelihood is a Pyro model of the user's; engine ADVI only.

    Parameters
    ----------
    function : callable
        ``function(predictions, labels, prior) -> None``, a Pyro model: it draws the views' parameters with
        ``prior.sample(predictions)`` and any others with ``pyro.sample``, and says how probable the labels are with
        ``pyro.factor`` or observed sites (see :mod:`vbtta.models.pyro.density`). A loaded policy has only its name.
    views : GaussianMixture or CategoricalMixture, optional
        How views are calibrated and which priors they have; the task's mixture by default. Noise, component and class
        weights are modelled by the function and stay at their defaults here.
    """

    function: Callable[[Any, Any, Any], None] | str
    views: GaussianMixture | CategoricalMixture | None = None

    def __post_init__(self) -> None:
        if not callable(self.function) and not isinstance(self.function, str):
            raise ValueError(f"function must be a Pyro model (predictions, labels, prior); got {shown(self.function)}")
        if callable(self.function):
            takes("function", self.function, "predictions", "labels", "prior")
        for option, only in (("noise", (None, "none")), ("component", ("normal",)), ("weights", ("view",))):
            value = getattr(self.views, option, only[0])
            if value not in only:
                raise ValueError(
                    f"views have {option}={value!r}, which is what the function is there for; leave it out"
                )

    @property
    def obstacle(self) -> str:
        """EM has no closed form for the function."""
        return "a model of your own"

    @property
    def views_model(self) -> Model:
        """The mixture that calibrates the views."""
        return self if self.views is None else self.views

    def for_task(self, task: str) -> Self:
        """Take the task's mixture for the views where none is given."""
        if task not in ("regression", "classification"):
            raise ValueError(f"a model of your own is for regression and classification; got task={task!r}")
        views: Any = models_of(task)["mixture"]() if self.views is None else self.views.for_task(task)
        return replace(self, views=views)
