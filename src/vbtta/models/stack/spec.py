"""Options of a stack: several models whose predictions are averaged."""

__all__ = ["Stack", "default_stack"]

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from vbtta._support.checks import positive
from vbtta.models.base import Model, models_of
from vbtta.models.parts.annotators import LabelFacts


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
        many as for all the others together, so that the odds that the views help are even. The larger it is, the more
        instances it takes to move the weights away from these shares.

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import CategoricalLatent, CategoricalMixture, Stack, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.integers(0, 3, size=300)
    >>> logits = np.eye(3)[truth][:, None] + rng.normal(size=(300, 4, 3))
    >>> model = Stack(members=(CategoricalMixture(), CategoricalLatent()))
    >>> policy = fit_policy(ViewPredictions(logits), truth, task="classification", model=model)
    >>> [type(member.model).__name__ for member in policy.members], bool(policy.member_weights[1] > 0.9)
    (['CategoricalMixture', 'CategoricalLatent'], True)
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
        models = (*self.members, self.raw) if self.raw else self.members
        return next((model.obstacle for model in models if model.obstacle), "")

    @property
    def views_model(self) -> Model:
        """The first member's."""
        return self.members[0].views_model

    def for_task(self, task: str) -> Self:
        """All members, completed for a task."""
        return self._each(lambda model: model.for_task(task))

    def resolve(self, labels: LabelFacts) -> Self:
        """All members with the options that labels decide."""
        return self._each(lambda model: model.resolve(labels))

    def _each(self, change: Callable[[Model], Model]) -> Self:
        raw = None if self.raw is None else change(self.raw)
        return replace(self, members=tuple(change(member) for member in self.members), raw=raw)


def default_stack(task: str) -> Model:
    """The models of a task, the gated mixture and the raw network, stacked; a task's only model where there is one."""
    kinds: dict[str, Any] = dict(models_of(task))
    raw = kinds["mixture"].raw_network()
    if raw is None:
        return kinds["mixture"]()  # type: ignore[no-any-return]
    members = (kinds["mixture"](), kinds["mixture"](weights="input"), kinds["latent"]())
    return Stack(members=members, raw=raw)
