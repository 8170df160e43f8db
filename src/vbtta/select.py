"""select_views: the best policy that a budget of forward passes allows, and what more would buy."""

from __future__ import annotations

__all__ = ["prices", "select_views"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import shown, whole_number
from vbtta.crossval import (
    CrossValidated,
    Folds,
    check_units,
    compare_scores,
    prior_counts,
    score_folds,
    split,
    stack_scores,
)
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_policy, model_record, quick_fit
from vbtta.inference.em import EM
from vbtta.models.base import InMemory, Model, Posterior
from vbtta.policy import Policy, Selection, SelectionPoint

_MAX_INSTANCES = 4_000  # of the search, which fits some fifty times
_COARSE = 1e-4  # tolerance of fits that start from one with more views of the same rows
_SHRINK = 0.75  # share of the cost that is kept from one level to the next

Views = tuple[str, ...]


def select_views(
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike,
    *,
    budget: float,
    task: str,
    cost: Mapping[str, float] | Sequence[float] | None = None,
    **fit_options: Any,
) -> Policy:
    """Fit the best policy whose views together cost no more than a budget.

    Recursive elimination: fit to all views, keep those with most weight for their cost, fit to these, and so on down to
    one view. The search is repeated within every fold of a cross-validation, on its training rows alone, and what it
    finds there is scored on the held-out rows. So the scores of the curve are honest: they include the luck of
    the search. How much the sets of the folds have in common tells how stable the choice is.

    Parameters
    ----------
    predictions : ViewPredictions
        Under all K candidate views.
    labels : LabelSets or array
        As in :func:`fit_policy`.
    budget : float
        Most that the views may cost together: a number of views where `cost` is not given, which is one of forward
        passes only if every view takes one.
    task : str
        As in :func:`fit_policy`.
    cost : dict by view name or K numbers, optional
        What each view costs, in any unit: forward passes or milliseconds (see :func:`vbtta.collect.measure_cost`). By
        default 1 each, also for a stochastic view of M draws, which takes M forward passes: where these count, say so.
    **fit_options
        Passed to :func:`fit_policy`: model, engine, guard, seed, progress.

    Returns
    -------
    Policy
        With weight zero for the views left out, and the cost-quality curve as `policy.selection`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=100)
    >>> views = np.stack([truth + noise * rng.normal(size=100) for noise in (0.2, 0.2, 2.0)], axis=1)
    >>> predictions = ViewPredictions(views[:, :, None], names=["identity", "flip", "noise"])
    >>> policy = select_views(predictions, truth, budget=2, task="regression", model="latent")
    >>> policy.selection.chosen.views, policy.selection.stability
    (('identity', 'flip'), 1.0)
    """
    unknown = sorted(set(fit_options) - {"model", "engine", "guard", "seed", "progress"})
    if unknown:
        raise TypeError(f"select_views() got an unexpected keyword argument {unknown[0]!r}")
    options = {"model": "auto", "seed": 0, "guard": True, **fit_options}
    record = _searchable(task, options["model"])
    if labels is None:
        raise ValueError("labels must be given: views are selected by held-out scores; got None")
    labels = predictions.align(labels)
    price = prices(cost, predictions.names)
    _check_budget(budget, price)
    check_units(labels, predictions.groups, "views are selected", "fit_policy and Policy.prune")
    options["seed"] = whole_number("seed", options["seed"], 0)
    predictions.check_finite()
    search = _Search.over(predictions, labels, record.resolve(labels), options, price, float(budget))
    selection = search.run()
    policy = fit_policy(predictions.select(selection.chosen.views), labels, task=task, **options)
    if options["guard"] and "identity" in set(predictions.names) - set(selection.chosen.views):
        reason = "the view 'identity' was not chosen, so there is nothing to compare with"
        policy = replace(policy, guard=policy.guard._replace(reason=reason))
    return policy.among(
        predictions.names,
        generated_names=predictions.generated_names,
        fingerprints=predictions.fingerprints,
        selection=selection,
    )


class _Level(NamedTuple):
    """One set of views of an elimination, and the policies fitted to it."""

    views: Views
    policies: list[Policy]  # of the members; the raw network's last, where the identity is among the views


@dataclass(frozen=True)
class _Search:
    """Recursive elimination on all rows and within every fold."""

    sample: InMemory
    members: tuple[Model, ...]  # settled on all rows and views
    free: tuple[bool, ...]  # of every member: whether its shrinkage is to suit the number of views
    raw: Model | None
    prior_count: float
    engine: EM
    seed: int
    price: dict[str, float]
    budget: float

    @classmethod
    def over(
        cls,
        predictions: ViewPredictions,
        labels: LabelSets,
        record: Model,
        options: dict[str, Any],
        price: dict[str, float],
        budget: float,
    ) -> Self:
        """The search on a random sample of the labelled rows."""
        rows = np.sort(np.random.default_rng(options["seed"]).permutation(labels.labelled)[:_MAX_INSTANCES])
        sample = InMemory(predictions.take(rows).select(predictions.names), labels.take(rows))
        stack = record.as_stack()
        open_members = (record,) if stack is None else stack.members
        open_members = tuple(model for model in open_members if model.ungated not in open_members)
        members = tuple(model.settle(sample)[0] for model in open_members)
        free = tuple(settled != model for settled, model in zip(members, open_members, strict=True))
        raw, prior_count = (None, 1.0) if stack is None else (stack.raw, stack.prior_count)
        engine = options.get("engine")
        engine = engine if isinstance(engine, EM) else EM()
        return cls(sample, members, free, raw, prior_count, engine, int(options["seed"]), price, budget)

    def run(self) -> Selection:
        """The curve, and the largest affordable set unless a smaller one is better by two standard errors."""
        predictions, labels = self.sample
        levels = self.eliminate(*self.sample, [None] * len(self.members))
        whole = [policy.posterior for policy in levels[0].policies]
        shared = [model.one_optimum(len(predictions), len(predictions.names)) for model in self.members]
        starts = [start if one else None for start, one in zip(whole, shared, strict=False)]
        folds = split(np.random.default_rng(self.seed).permutation(len(predictions)), predictions.groups)
        searches = [self.eliminate(predictions.take(train), labels.take(train), starts) for train, _ in folds]
        depth = min(len(levels), *map(len, searches))
        scores = [self._held_out([levels[place] for levels in searches], folds) for place in range(depth)]
        points = []
        for level, score in zip(levels, scores, strict=False):
            difference, error = compare_scores(score, scores[0])
            points.append(SelectionPoint(level.views, self.cost(level.views), score.scores.mean(), difference, error))
        affordable = [place for place, point in enumerate(points) if self.fits(point.views)]
        chosen = affordable[0]
        for place in affordable[1:]:
            lead, error = compare_scores(scores[place], scores[chosen])
            chosen = place if lead > 2 * error else chosen
        stability = _mean_jaccard([found[chosen].views for found in searches])
        curve = tuple(sorted(points, key=lambda point: point.cost))
        return Selection(self.budget, self.price, points[chosen], curve, stability)

    def eliminate(
        self, predictions: ViewPredictions, labels: LabelSets, starts: Sequence[Posterior | None]
    ) -> list[_Level]:
        """Sets of views from all of them down to one, each the heaviest of the one before and fitted from its fit."""
        views, levels = predictions.names, list[_Level]()
        raw = None
        if self.raw is not None and "identity" in views:
            raw = quick_fit(self.raw, self.engine, self.seed)(predictions.select(["identity"]), labels)
        while True:
            policies = []
            for model, free, start in zip(self.members, self.free, starts, strict=True):
                scaled = model.rescale(len(views) / len(predictions.names)) if free else model
                begin = raw.posterior if start is None and raw is not None else start
                engine = replace(self.engine, tol=max(self.engine.tol, _COARSE)) if levels else self.engine
                fit = quick_fit(scaled, engine, self.seed, begin)
                policies.append(fit(predictions.select(views), labels))
            weights = dict(zip(views, np.mean([policy.weights for policy in policies], axis=0).tolist(), strict=True))
            levels.append(_Level(views, policies if raw is None or "identity" not in views else [*policies, raw]))
            if len(views) == 1:
                return levels
            kept = self._heaviest(views, weights)
            places = np.array([views.index(name) for name in kept])
            starts = [_restricted(policy.posterior, places) for policy in policies]
            views = kept

    def _heaviest(self, views: Views, weights: dict[str, float]) -> Views:
        """The next set: what three quarters of the cost pay for, or the budget if that is met first."""
        limit = _SHRINK * self.cost(views)
        if not self.fits(views):
            limit = max(limit, self.budget)
        order = sorted(views, key=lambda name: -weights[name] / self.price[name])
        kept: set[str] = set()
        for name in order:
            if sum(self.price[other] for other in kept) + self.price[name] <= limit * (1 + 1e-9):
                kept.add(name)
        kept = kept or {order[0]}
        if len(kept) == len(views):
            kept.discard(order[-1])
        return tuple(name for name in views if name in kept)

    def _held_out(self, found: list[_Level], folds: Folds) -> CrossValidated:
        """Scores of the stack that every fold found, on the rows that it did not see."""
        predictions, labels = self.sample
        n_members = min(len(level.policies) for level in found)
        scores = [
            score_folds([level.policies[member] for level in found], predictions, labels, folds)
            for member in range(n_members)
        ]
        with_raw = n_members > len(self.members)
        return stack_scores(scores, prior_counts(len(self.members), with_raw, self.prior_count))[1]

    def cost(self, views: Views) -> float:
        return sum(self.price[name] for name in views)

    def fits(self, views: Views) -> bool:
        return self.cost(views) <= self.budget * (1 + 1e-9)


def _restricted(posterior: Posterior, places: Array) -> Posterior | None:
    """A posterior of fewer views, to start from; None where they have next to no weight."""
    return posterior.keep(places) if posterior.weights[places].sum() > 0.01 else None


def _mean_jaccard(sets: list[Views]) -> float:
    """Mean share of views that two sets have in common."""
    pairs = [(set(one), set(other)) for one, other in combinations(sets, 2)]
    return float(np.mean([len(one & other) / len(one | other) for one, other in pairs]))


def prices(cost: Any, names: Views) -> dict[str, float]:
    """The cost of every view by name, 1 each where it is not given."""
    if cost is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(cost, Mapping):
        missing = [name for name in names if name not in cost]
        if missing:
            raise ValueError(f"cost says nothing of the views {missing}; give every view's")
        values = [cost[name] for name in names]
    else:
        if isinstance(cost, str) or not hasattr(cost, "__iter__"):
            raise ValueError(f"cost must be a dict by view name or {len(names)} numbers, one a view; got {cost!r}")
        values = list(cost)
        if len(values) != len(names):
            raise ValueError(f"cost must be {len(names)} numbers, one a view; got {len(values)}")
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Real) or not 0 < float(value) < np.inf:
            raise ValueError(f"cost must be positive; view {name!r} has {shown(value)}")
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _searchable(task: str, model: Any) -> Model:
    """The model's record; a search fits some fifty times, which only closed forms can."""
    record = model_record(model, task)
    if record.obstacle:
        raise ValueError(
            f"views are selected by many fits, and {record.obstacle} has no closed form; use fit_policy and "
            "Policy.prune"
        )
    return record


def _check_budget(budget: float, price: dict[str, float]) -> None:
    cheapest = min(price, key=price.__getitem__)
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget >= price[cheapest]:
        raise ValueError(
            f"budget must be a number that pays for a view at least; got {budget!r}, and the cheapest view, "
            f"{cheapest!r}, costs {price[cheapest]:g}"
        )
