"""select_views: the best policy that a budget of forward passes allows, and what more would buy."""

__all__ = ["select_views"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta._support.words import shown
from vbtta.crossval import CrossValidated, cross_validate
from vbtta.engines import settle
from vbtta.fit import fit_policy
from vbtta.labels import LabelSets
from vbtta.policy import Policy, Selection, SelectionPoint
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM, CategoricalLatent, GaussianLatent, ModelSpec, PyroModel

_FEWEST = 5  # labelled instances below which nothing is held out
_MOST_INSTANCES = 4_000  # of a search, which fits a hundred times or more
_LEAST_TRIED = 4  # views in a step, however little they promise
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
    in the curve are those that decided, so the chosen set's is somewhat flattering: test the policy on other data. For
    the same reason the views that the fit on all of them gives a weight are kept where the budget pays for them, unless
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
    if len(labels.labelled) < _FEWEST:
        raise ValueError(
            f"views are selected by held-out scores, which need at least {_FEWEST} labelled inputs; got "
            f"{len(labels.labelled)}. Use fit_policy and Policy.prune"
        )
    options = {"seed": 0, "guard": True, **fit_options}
    options["seed"] = whole_number("seed", options["seed"], 0)
    whole = fit_policy(predictions, labels, task=task, **{**options, "guard": False})
    engine = whole.engine if isinstance(whole.engine, EM) else EM()
    some = np.sort(np.random.default_rng(options["seed"]).permutation(labels.labelled)[:_MOST_INSTANCES])
    fewer, their_labels = predictions.take(some), labels.take(some)
    settled = settle(fewer, their_labels, whole.model)
    scaled = settled != whole.model  # not where the caller fixed it
    search = _Search(fewer, their_labels, settled, scaled, engine, task, int(options["seed"]), price, float(budget))
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
    return _among_all(policy, predictions, selection)


@dataclass
class _Search:
    """Sets of views, each with what its own fits came to."""

    predictions: ViewPredictions
    labels: LabelSets
    model: ModelSpec  # for all views
    scaled: bool  # whether its shrinkage is to suit the number of views
    engine: EM
    task: str
    seed: int
    price: dict[str, float]
    budget: float
    found: dict[Views, CrossValidated] = field(default_factory=dict)
    last_worth: dict[str, float] = field(default_factory=dict)  # of adding a view, when that was tried last

    def value(self, views: Views) -> float:
        """Cross-validated score of a set."""
        return float(self._look(views).scores.mean())

    def cost(self, views: Views) -> float:
        return sum(self.price[name] for name in views)

    def fits(self, views: Views) -> bool:
        return self.cost(views) <= self.budget * (1 + 1e-9)

    def choose(self, used: Views) -> Views:
        """The best set that the budget allows; the one the full fit uses, if it does, unless another is clearly better.

        The best of many scores is too good to be true: where nothing forces a choice among sets, its lead must exceed
        two standard errors.
        """
        if self.fits(used):
            self._look(used)
        best = max((views for views in self.found if self.fits(views)), key=self.value)
        if not self.fits(used):
            return best
        lead = self._look(best).scores - self._look(used).scores
        return best if lead.mean() > 2 * lead.std(ddof=1) / np.sqrt(len(lead)) else used

    def from_all(self) -> None:
        """Drop views from the full set, the lightest first."""
        views = self.predictions.names
        while len(views) > 1:
            weights = self._weights(views)
            idle = {name for name in views if weights[name] == 0} or {min(views, key=weights.__getitem__)}
            views = self._ordered(set(views) - idle)
        self._look(views)

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

        A view gains less the more others are there already, or hardly more: those that gained most before are tried
        first, and the rest is left untried when the best gain is above what the next one gained before.
        """
        added = {name: self._ordered({*current, name}) for name in self.predictions.names if name not in current}
        names = [name for name, views in added.items() if self.fits(views)]
        names.sort(key=lambda name: -self.last_worth.get(name, np.inf))
        best, most = None, -np.inf
        for place, name in enumerate(names):
            if place >= _LEAST_TRIED and most >= self.last_worth.get(name, np.inf):
                break
            worth = self._worth(added[name], current)
            if current:
                self.last_worth[name] = worth
            if best is None or worth > most:
                best, most = added[name], worth
        return best

    def _best_removal(self, current: Views) -> Views:
        """The best set with one of the lightest views dropped."""
        weights = self._weights(current)
        lightest = sorted(current, key=weights.__getitem__)[:_LEAST_TRIED]
        return max((self._ordered(set(current) - {name}) for name in lightest), key=self.value)

    def _worth(self, views: Views, before: Views) -> float:
        """Gain in score for what it costs more; where nothing gains, the smallest loss."""
        if not before:
            return self.value(views)
        gain = self.value(views) - self.value(before)
        return gain / (self.cost(views) - self.cost(before)) if gain > 0 else gain

    def _look(self, views: Views) -> CrossValidated:
        if views not in self.found:
            self.found[views] = cross_validate(
                self.predictions.select(views),
                self.labels,
                self._model(len(views)),
                self.engine,
                task=self.task,
                seed=self.seed,
            )
        return self.found[views]

    def _model(self, size: int) -> ModelSpec:
        """The model for a number of views: their weights differ from 1/K by as much, relative to it, as all views'."""
        model, share = self.model, size / len(self.predictions.names)
        if not self.scaled or not isinstance(model, GaussianLatent | CategoricalLatent) or model.shrinkage is None:
            return model
        return replace(model, shrinkage=model.shrinkage * share**2)

    def _weights(self, views: Views) -> dict[str, float]:
        return dict(zip(views, self._look(views).weights.tolist(), strict=True))

    def _ordered(self, views: set[str]) -> Views:
        return tuple(name for name in self.predictions.names if name in views)

    def point(self, views: Views) -> SelectionPoint:
        difference = self._look(views).scores - self._look(self.predictions.names).scores
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        return SelectionPoint(views, self.cost(views), self.value(views), float(difference.mean()), float(error))

    def curve(self, chosen: Views) -> tuple[SelectionPoint, ...]:
        """The best set of every size, every set that no cheaper one matches, and the chosen one; cheapest first."""
        ranked = sorted(self.found, key=lambda views: (self.cost(views), -self.value(views)))
        kept = {chosen}
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
    own = callable(model) or isinstance(model, PyroModel) or getattr(model, "component", "normal") != "normal"
    if own or task in ("ordinal", "ranking"):
        what = f"task={task!r}" if not own else "the model"
        raise ValueError(
            f"views are selected by many fits, and {what} has no closed form; use fit_policy and Policy.prune"
        )


def _check_budget(budget: float, price: dict[str, float]) -> None:
    cheapest = min(price, key=price.__getitem__)
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget >= price[cheapest]:
        raise ValueError(
            f"budget must be a number that pays for a view at least; got {budget!r}, and the cheapest view, "
            f"{cheapest!r}, costs {price[cheapest]:g}"
        )
