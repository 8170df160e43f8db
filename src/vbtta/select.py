"""select_views: the best policy that a budget of forward passes allows, and what more would buy."""

__all__ = ["select_views"]

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta.crossval import cross_validated_scores
from vbtta.engines import fit_model
from vbtta.fit import fit_policy
from vbtta.labels import Array, LabelSets
from vbtta.policy import ConvergenceWarning, Policy, Selection, SelectionPoint
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, ModelSpec

_FEWEST = 5  # labelled instances below which nothing is held out
_MOST_INSTANCES = 4_000  # of a search, which fits a hundred times or more
_PATIENCE = 3  # additions in a row that gain nothing before the search ends

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

    The model is chosen once, on all views. Sets of views are then compared by cross-validated log score, each with
    its own fit: views are added one by one, the most useful for its cost first, and dropped again where the rest does
    better without; from the other end, views are dropped from the full set in the order of their weights. The scores
    in the curve are those that decided, so the chosen set's is somewhat flattering: test the policy on other data.

    Parameters
    ----------
    predictions : ViewPredictions
        Under all K candidate views.
    labels : LabelSets or array
        As in :func:`fit_policy`.
    budget : float
        Most that the views may cost together: a number of forward passes where `cost` is not given.
    task : str
        As in :func:`fit_policy`.
    cost : dict by view name or K numbers, optional
        What each view costs, in any unit: forward passes (the draws of a stochastic view) or milliseconds (see
        :func:`vbtta.collect.measure_cost`). By default 1 each.
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
    >>> policy.selection.chosen.views
    ('identity', 'flip')
    """
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    price = _prices(cost, predictions.names)
    _check_budget(budget, price)
    if len(labels.labelled) < _FEWEST:
        raise ValueError(
            f"views are selected by held-out scores, which need at least {_FEWEST} labelled inputs; got "
            f"{len(labels.labelled)}. Use fit_policy and Policy.prune"
        )
    options = {"seed": 0, "guard": True, **fit_options}
    whole = fit_policy(predictions, labels, task=task, **{**options, "guard": False})
    engine = whole.engine if isinstance(whole.engine, EM) else EM()
    some = np.sort(np.random.default_rng(options["seed"]).permutation(labels.labelled)[:_MOST_INSTANCES])
    search = _Search(
        predictions.take(some), labels.take(some), whole.model, engine, task, int(options["seed"]), price, float(budget)
    )
    search.from_all()
    search.from_none()
    chosen = max((views for views in search.scores if search.fits(views)), key=search.value)
    selection = Selection(float(budget), price, search.point(chosen), search.curve())
    fixed = {**options, "model": whole.model}
    return _among_all(fit_policy(predictions.select(chosen), labels, task=task, **fixed), predictions, selection)


@dataclass
class _Search:
    """Sets of views, each with the scores of its own fits."""

    predictions: ViewPredictions
    labels: LabelSets
    model: ModelSpec
    engine: EM
    task: str
    seed: int
    price: dict[str, float]
    budget: float
    scores: dict[Views, Array] = field(default_factory=dict)

    def value(self, views: Views) -> float:
        """Cross-validated score of a set."""
        if views not in self.scores:
            self.scores[views] = cross_validated_scores(
                self.predictions.select(views), self.labels, self.model, self.engine, task=self.task, seed=self.seed
            )
        return float(self.scores[views].mean())

    def cost(self, views: Views) -> float:
        return sum(self.price[name] for name in views)

    def fits(self, views: Views) -> bool:
        return self.cost(views) <= self.budget * (1 + 1e-9)

    def ordered(self, views: set[str]) -> Views:
        return tuple(name for name in self.predictions.names if name in views)

    def from_all(self) -> None:
        """Drop views from the full set, the lightest first."""
        views = self.predictions.names
        quick = replace(self.engine, tol=max(self.engine.tol, 1e-6), max_steps=100, keep_states=False)
        self.value(views)
        while len(views) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # an order is all that is asked for
                policy = fit_model(self.predictions.select(views), self.labels, self.model, quick, task=self.task)
            weights = dict(zip(views, policy.weights, strict=True))
            idle = {name for name in views if weights[name] == 0} or {min(views, key=weights.__getitem__)}
            views = self.ordered(set(views) - idle)
            self.value(views)

    def from_none(self) -> None:
        """Add views while the budget lasts, and drop those that have become superfluous."""
        current: Views = ()
        best_of_size: dict[int, float] = {}
        best, without_gain = -np.inf, 0
        while without_gain < _PATIENCE:
            larger = [self.ordered({*current, name}) for name in self.predictions.names if name not in current]
            larger = [views for views in larger if self.fits(views)]
            if not larger:
                break
            current = max(larger, key=lambda views: self._worth(views, current))
            best_of_size[len(current)] = max(self.value(current), best_of_size.get(len(current), -np.inf))
            while len(current) > 2:
                smaller = max((self.ordered(set(current) - {name}) for name in current), key=self.value)
                if self.value(smaller) <= best_of_size.get(len(smaller), -np.inf):
                    break
                current = smaller
                best_of_size[len(current)] = self.value(current)
            gained = self.value(current) > best
            best, without_gain = max(best, self.value(current)), 0 if gained else without_gain + 1

    def _worth(self, views: Views, before: Views) -> float:
        """Gain in score for what it costs more; where nothing gains, the smallest loss."""
        if not before:
            return self.value(views)
        gain = self.value(views) - self.value(before)
        return gain / (self.cost(views) - self.cost(before)) if gain > 0 else gain

    def point(self, views: Views) -> SelectionPoint:
        difference = self.scores[views] - self.scores[self.predictions.names]
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        return SelectionPoint(views, self.cost(views), self.value(views), float(difference.mean()), float(error))

    def curve(self) -> tuple[SelectionPoint, ...]:
        """The best set of every size, and every set that no cheaper one matches; cheapest first."""
        ranked = sorted(self.scores, key=lambda views: (self.cost(views), -self.value(views)))
        kept: set[Views] = set()
        top = -np.inf
        for views in ranked:
            if self.value(views) > top:
                kept.add(views)
                top = self.value(views)
        for size in {len(views) for views in ranked}:
            kept.add(max((views for views in ranked if len(views) == size), key=self.value))
        return tuple(self.point(views) for views in ranked if views in kept)


def _among_all(policy: Policy, predictions: ViewPredictions, selection: Selection) -> Policy:
    """The policy of some views as one of all, the others with weight zero."""
    names = predictions.names
    weights = np.zeros((policy.n_steps, len(names)))
    weights[:, [names.index(name) for name in policy.names]] = policy.history.weights
    return replace(
        policy,
        names=names,
        generated_names=predictions.generated_names,
        fitted=policy.fitted or policy.names,
        history=policy.history._replace(weights=weights),
        fingerprints=predictions.fingerprints,
        selection=selection,
    )


def _prices(cost: Mapping[str, float] | Sequence[float] | None, names: Views) -> dict[str, float]:
    if cost is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(cost, Mapping):
        missing = [name for name in names if name not in cost]
        if missing:
            raise ValueError(f"cost says nothing of the views {missing}; give every view's")
        values = [cost[name] for name in names]
    else:
        values = list(cost)
        if len(values) != len(names):
            raise ValueError(f"cost must be {len(names)} numbers, one a view; got {len(values)}")
    found = {name: float(value) for name, value in zip(names, values, strict=True)}
    wrong = [name for name, value in found.items() if not (np.isfinite(value) and value > 0)]
    if wrong:
        raise ValueError(f"cost must be positive; view {wrong[0]!r} has {found[wrong[0]]}")
    return found


def _check_budget(budget: float, price: dict[str, float]) -> None:
    cheapest = min(price, key=price.__getitem__)
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget >= price[cheapest]:
        raise ValueError(
            f"budget must be a number that pays for a view at least; got {budget!r}, and the cheapest view, "
            f"{cheapest!r}, costs {price[cheapest]:g}"
        )
