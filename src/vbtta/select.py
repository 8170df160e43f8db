"""select_views: the best policy that a budget of forward passes allows, and what more would buy."""

__all__ = ["select_views"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import shown, whole_number
from vbtta.crossval import MIN_UNITS, CrossValidated, compare_scores, cross_validate, n_units
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_policy, model_record, quick_fit
from vbtta.inference.em import EM
from vbtta.models.base import InMemory, Model
from vbtta.policy import Policy, Selection, SelectionPoint

_SEARCH_INSTANCES = 4_000  # at most: a search fits a hundred times or more
_MIN_TRIED = 4  # views tried in a step
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

    The model is chosen once, on all views, and so is its shrinkage. Sets of views are then compared by cross-validated
    log score, each with its own fits: views are added one by one, the most useful for its cost first, and dropped again
    where the rest does better without; from the other end, views are dropped from the full set in the order of their
    weights. Views that gained little when they were tried last are not tried again at every step. The scores
    in the curve are those that decided, so the chosen set's is optimistic: test the policy on other data. For the
    same reason the views that the fit on all of them gives a weight are kept where the budget pays for them, unless
    another set is better by two standard errors.

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
    >>> policy.selection.chosen.views
    ('identity', 'flip')
    """
    unknown = sorted(set(fit_options) - {"model", "engine", "guard", "seed", "progress"})
    if unknown:
        raise TypeError(f"select_views() got an unexpected keyword argument {unknown[0]!r}")
    _check_model(task, fit_options.get("model", "auto"))
    if labels is None:
        raise ValueError("labels must be given: views are selected by held-out scores; got None")
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    price = _prices(cost, predictions.names)
    _check_budget(budget, price)
    n_held_out = n_units(labels, predictions.groups)
    if n_held_out < MIN_UNITS:
        raise ValueError(
            f"views are selected by held-out scores, which need at least {MIN_UNITS} labelled inputs or groups of "
            f"them; got {n_held_out}. Use fit_policy and Policy.prune"
        )
    options = {"seed": 0, "guard": True, **fit_options}
    options["seed"] = whole_number("seed", options["seed"], 0)
    whole = fit_policy(predictions, labels, task=task, **{**options, "guard": False})
    engine = whole.engine if isinstance(whole.engine, EM) else EM()
    rows = np.sort(np.random.default_rng(options["seed"]).permutation(labels.labelled)[:_SEARCH_INSTANCES])
    subsample = InMemory(predictions.take(rows), labels.take(rows))
    settled = whole.model.settle(subsample)
    scaled = settled != whole.model  # not where the caller fixed it
    search = _Search(*subsample, settled, scaled, engine, int(options["seed"]), price, float(budget))
    search.from_all()
    search.from_none()
    used = tuple(name for name, weight in zip(whole.names, whole.weights, strict=True) if weight > 0)
    chosen = search.choose(used)
    selection = Selection(float(budget), price, search.point(chosen), search.curve(chosen))
    fixed = {**options, "model": whole.model}
    policy = fit_policy(predictions.select(chosen), labels, task=task, **fixed)
    if options["guard"] and "identity" in set(predictions.names) - set(chosen):
        reason = "the view 'identity' was not chosen, so there is nothing to compare with"
        policy = replace(policy, guard=policy.guard._replace(reason=reason))
    return policy.among(
        predictions.names,
        generated_names=predictions.generated_names,
        fingerprints=predictions.fingerprints,
        selection=selection,
    )


@dataclass
class _Search:
    """Sets of views with their cross-validated scores."""

    predictions: ViewPredictions
    labels: LabelSets
    model: Model  # for all views
    scaled: bool  # whether its shrinkage is to suit the number of views
    engine: EM
    seed: int
    price: dict[str, float]
    budget: float
    scored: dict[Views, CrossValidated] = field(default_factory=dict)
    last_gain: dict[str, float] = field(default_factory=dict)  # of adding a view, when that was tried last

    def value(self, views: Views) -> float:
        """Cross-validated score of a set."""
        return float(self._scored(views).scores.mean())

    def cost(self, views: Views) -> float:
        return sum(self.price[name] for name in views)

    def fits(self, views: Views) -> bool:
        return self.cost(views) <= self.budget * (1 + 1e-9)

    def choose(self, used: Views) -> Views:
        """The best set that the budget allows; the one the full fit uses, if it does, unless another is clearly better.

        The best of many scores is optimistic: its lead must exceed two standard errors.
        """
        if self.fits(used):
            self._scored(used)
        best = max((views for views in self.scored if self.fits(views)), key=self.value)
        if not self.fits(used):
            return best
        lead, error = compare_scores(self._scored(best), self._scored(used))
        return best if lead > 2 * error else used

    def from_all(self) -> None:
        """Drop views from the full set, the lightest first."""
        views = self.predictions.names
        while len(views) > 1:
            weights = self._weights(views)
            idle = {name for name in views if weights[name] == 0} or {min(views, key=weights.__getitem__)}
            views = self._ordered(set(views) - idle)
        self._scored(views)

    def from_none(self) -> None:
        """Add views while the budget lasts, and drop those that have become superfluous."""
        current: Views = ()
        best_of_size: dict[int, float] = {}
        best, without_gain = -np.inf, 0
        while without_gain < _PATIENCE:
            larger = self._best_addition(current)
            if larger is None:
                break
            current = larger
            best_of_size[len(current)] = max(self.value(current), best_of_size.get(len(current), -np.inf))
            while len(current) > 2:
                smaller = self._best_removal(current)
                if self.value(smaller) <= best_of_size.get(len(smaller), -np.inf):
                    break
                current = smaller
                best_of_size[len(current)] = self.value(current)
            gained = self.value(current) > best
            best, without_gain = max(best, self.value(current)), 0 if gained else without_gain + 1

    def _best_addition(self, current: Views) -> Views | None:
        """The set with the view added that gains most for its cost; None where the budget pays for no other.

        Gains shrink as the set grows: views that gained most before are tried first, and the rest is skipped once the
        best gain exceeds what the next one gained before.
        """
        added = {name: self._ordered({*current, name}) for name in self.predictions.names if name not in current}
        names = [name for name, views in added.items() if self.fits(views)]
        names.sort(key=lambda name: -self.last_gain.get(name, np.inf))
        best, best_gain = None, -np.inf
        for place, name in enumerate(names):
            if place >= _MIN_TRIED and best_gain >= self.last_gain.get(name, np.inf):
                break
            gain = self._gain(added[name], current)
            if current:
                self.last_gain[name] = gain
            if best is None or gain > best_gain:
                best, best_gain = added[name], gain
        return best

    def _best_removal(self, current: Views) -> Views:
        """The best set with one of the lightest views dropped."""
        weights = self._weights(current)
        lightest = sorted(current, key=weights.__getitem__)[:_MIN_TRIED]
        return max((self._ordered(set(current) - {name}) for name in lightest), key=self.value)

    def _gain(self, views: Views, before: Views) -> float:
        """Gain in score for what it costs more; where nothing gains, the smallest loss."""
        if not before:
            return self.value(views)
        gain = self.value(views) - self.value(before)
        return gain / (self.cost(views) - self.cost(before)) if gain > 0 else gain

    def _scored(self, views: Views) -> CrossValidated:
        if views not in self.scored:
            fit = quick_fit(self._model(len(views)), self.engine, self.seed)
            self.scored[views] = cross_validate(fit, self.predictions.select(views), self.labels, seed=self.seed)
        return self.scored[views]

    def _model(self, size: int) -> Model:
        """The model for a number of views: their weights differ from 1/K by as much, relative to it, as all views'."""
        return self.model.rescale(size / len(self.predictions.names)) if self.scaled else self.model

    def _weights(self, views: Views) -> dict[str, float]:
        return dict(zip(views, self._scored(views).weights.tolist(), strict=True))

    def _ordered(self, views: set[str]) -> Views:
        return tuple(name for name in self.predictions.names if name in views)

    def point(self, views: Views) -> SelectionPoint:
        difference = compare_scores(self._scored(views), self._scored(self.predictions.names))
        return SelectionPoint(views, self.cost(views), self.value(views), *difference)

    def curve(self, chosen: Views) -> tuple[SelectionPoint, ...]:
        """The best set of every size, every set that no cheaper one matches, and the chosen one; cheapest first."""
        ranked = sorted(self.scored, key=lambda views: (self.cost(views), -self.value(views)))
        kept = {chosen}
        top = -np.inf
        for views in ranked:
            if self.value(views) > top:
                kept.add(views)
                top = self.value(views)
        for size in {len(views) for views in ranked}:
            kept.add(max((views for views in ranked if len(views) == size), key=self.value))
        return tuple(self.point(views) for views in ranked if views in kept)


def _prices(cost: Any, names: Views) -> dict[str, float]:
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


def _check_model(task: str, model: Any) -> None:
    """A search fits a hundred times or more, which only closed forms can."""
    record = model_record("mixture" if isinstance(model, str) and model == "auto" else model, task)
    if record.obstacle:
        raise ValueError(
            f"views are selected by many fits, and {record.obstacle} has no closed form; use fit_policy and "
            "Policy.prune"
        )


def _check_budget(budget: float, price: dict[str, float]) -> None:
    cheapest = min(price, key=price.__getitem__)
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget >= price[cheapest]:
        raise ValueError(
            f"budget must be a number that pays for a view at least; got {budget!r}, and the cheapest view, "
            f"{cheapest!r}, costs {price[cheapest]:g}"
        )
