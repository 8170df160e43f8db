"""select_views: the best policy that a budget of forward passes allows, and what more would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta import crossval
from vbtta._support.checks import shown, whole_number
from vbtta.crossval import compare_scores
from vbtta.data.labels import LabelSets, by_id
from vbtta.data.predictions import ViewPredictions, require_views
from vbtta.fit import Candidate, checked, fit_policy, model_record, quick_fit
from vbtta.inference.em import EM
from vbtta.models.base import InMemory, Model, Posterior, Stack
from vbtta.policy import Policy, Selection, SelectionPoint

_MAX_INSTANCES = 4_000  # of the search, which fits some fifty times
_COARSE = 3e-4  # tolerance of fits that start from one with more views or rows
_SHRINK = 0.5  # share of the cost that is kept from one level to the next

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
    one view. The search is repeated within every fold of a cross-validation, on its training rows alone, and scored on
    the held-out rows: the scores of the curve include the luck of the search, and sets that differ between folds show
    an unstable choice.

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
    """
    if unknown := sorted(set(fit_options) - {"model", "engine", "guard", "seed", "progress"}):
        raise TypeError(f"select_views() got an unexpected keyword argument {unknown[0]!r}")
    options = {"model": "auto", "seed": 0, "guard": True, **fit_options}
    record = model_record(options["model"], task)
    if record.obstacle:
        reason = f"{record.obstacle} has no closed form"
        raise ValueError(f"views are selected by many fits, and {reason}; use fit_policy and Policy.prune")
    if labels is None:
        raise ValueError("labels must be given: views are selected by held-out scores; got None")
    require_views(predictions)
    labels = checked(predictions, labels, task)
    price = prices(cost, predictions.names)
    cheapest = min(price, key=price.__getitem__)
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget >= price[cheapest]:
        raise ValueError(
            f"budget must be a number that pays for a view at least; got {budget!r}, and the cheapest view, "
            f"{cheapest!r}, costs {price[cheapest]:g}"
        )
    crossval.check_units(labels, predictions.groups, "views are selected", "fit_policy and Policy.prune")
    seed, engine = whole_number("seed", options["seed"], 0), options.get("engine")
    search = _Search(engine if isinstance(engine, EM) else EM(), seed, price, float(budget))
    selection = search.run(InMemory(predictions, labels), record.resolve(labels))
    policy = fit_policy(predictions.select(selection.chosen.views), labels, task=task, **options)
    if options["guard"] and "identity" in set(predictions.names) - set(selection.chosen.views):
        reason = "the view 'identity' was not chosen, so there is nothing to compare with"
        policy = replace(policy, guard=policy.guard._replace(reason=reason))
    known = {"generated_names": predictions.generated_names, "fingerprints": predictions.fingerprints}
    return policy.among(predictions.names, **known, selection=selection)


_Level = tuple[Views, list[Policy]]  # a set of views, and the members' policies; the raw network's last, if it is seen


class _Member(NamedTuple):
    """A model of the search, settled on all rows and views."""

    model: Model
    free: bool  # whether its shrinkage is to suit the number of views
    start: Posterior | None = None


@dataclass(frozen=True)
class _Search:
    """Recursive elimination on all rows and within every fold."""

    engine: EM
    seed: int
    price: dict[str, float]
    budget: float

    def run(self, sample: InMemory, record: Model) -> Selection:
        """The curve, and the largest affordable set unless a smaller one is better by two standard errors."""
        rng = np.random.default_rng(self.seed)
        sample = sample.take(np.sort(rng.permutation(sample.labels.labelled)[:_MAX_INSTANCES]))
        sample = InMemory(sample.predictions.select(sample.predictions.names), sample.labels)  # views have names
        n_rows, n_views = sample.predictions.outputs.shape[:2]
        stack = record.as_stack() or Stack(members=(record,))
        models = [model for model in stack.members if not model.is_optional(stack.members)]
        gates = [model for model in stack.members if model not in models]
        alone = self.alone(sample, stack.raw, None)
        first = None if alone is None else alone.posterior
        settled = [model.settle(sample, first)[0] for model in models]
        members = [_Member(after, after != before) for after, before in zip(settled, models, strict=True)]
        levels = self.eliminate(sample, members, alone)
        for gate in gates if n_views > 1 else []:  # joins where the evidence for it is decisive, as in fit_policy
            posterior = levels[0][1][models.index(gate.ungated or gate)].posterior
            if gate.gate_wanted(sample, posterior):
                members.append(_Member(gate.settle(sample, posterior)[0], False))
                levels = self.eliminate(sample, members, alone)
        shared = [
            member._replace(start=policy.posterior) if member.model.one_optimum(n_rows, n_views) else member
            for member, policy in zip(members, levels[0][1], strict=False)
        ]
        folds = crossval.split(np.random.default_rng(self.seed).permutation(n_rows), sample.predictions.groups)
        parts = [sample.take(train) for train, _ in folds]
        searches = [self.eliminate(part, shared, self.alone(part, stack.raw, first)) for part in parts]
        depth = min(len(levels), *map(len, searches))
        scores = []
        for place in range(depth):
            # every member's policies, one a fold; the raw network's only if all folds kept the identity
            by_fold = [search[place][1] for search in searches]
            by_member = crossval.score_folds(zip(*by_fold, strict=False), sample, folds)
            raw = stack.raw if len(by_member) > len(members) else None
            counts = crossval.prior_counts(len(members), raw is not None, stack.prior_count)
            odds = None if raw is None else crossval.even_odds(raw, sample.labels)
            scores.append(crossval.stack_scores(by_member, counts, odds)[1] if len(by_member) > 1 else by_member[0])
        points = [
            SelectionPoint(views, self.cost(views), score.scores.mean(), *compare_scores(score, scores[0]))
            for (views, _), score in zip(levels, scores, strict=False)
        ]
        chosen, *smaller = (place for place, point in enumerate(points) if self.fits(point.views))
        for place in smaller:
            gain, error = compare_scores(scores[place], scores[chosen])
            chosen = place if gain > 2 * error else chosen
        sets = combinations([set(search[chosen][0]) for search in searches], 2)
        stability = float(np.mean([len(first & second) / len(first | second) for first, second in sets]))
        curve = tuple(sorted(points, key=lambda point: point.cost))
        return Selection(self.budget, self.price, points[chosen], curve, stability)

    def alone(self, sample: InMemory, raw: Model | None, start: Posterior | None) -> Policy | None:
        """The raw network, where the identity is among the views."""
        if raw is None or "identity" not in sample.predictions.names:
            return None
        return quick_fit(Candidate(raw, start, alone=True), self.engine, self.seed, sample)

    def eliminate(self, sample: InMemory, members: Sequence[_Member], alone: Policy | None) -> list[_Level]:
        """Sets of views from all of them down to one, each the heaviest of the one before and fitted from its fit."""
        names = views = sample.predictions.names
        levels, coarse = list[_Level](), replace(self.engine, tol=max(self.engine.tol, _COARSE))
        starts = [member.start for member in members]
        while True:
            if alone is not None and views == ("identity",):
                return [*levels, (views, [alone])]
            policies, part = list[Policy](), sample.select(views)
            candidates = members if len(views) > 1 else members[:1]  # of one view all models are alike
            for member, start in zip(candidates, starts, strict=False):
                model = member.model.rescale(len(views) / len(names)) if member.free else member.model
                begin = alone.posterior if start is None and alone is not None else start
                engine = self.engine if start is None else coarse
                begin = begin if model.ungated is None else None  # a gate starts from constant weights
                policies.append(quick_fit(Candidate(model, begin), engine, self.seed, part, policies))
            levels.append((views, [*policies, alone] if alone is not None and "identity" in views else policies))
            if len(views) == 1:
                return levels
            kept = self._affordable(views, self._most_needed(views, policies, alone, part))
            places = np.array([views.index(name) for name in kept])
            starts = [fit.posterior.keep(places) if fit.weights[places].sum() > 0.01 else None for fit in policies]
            views = kept

    def _most_needed(self, views: Views, policies: Sequence[Policy], alone: Policy | None, part: InMemory) -> list[str]:
        """The views in order: by weight or, where a gate fits the labels best, by what its log score would lose.

        Few labels may rank views wrongly: the identity also has the raw network's prior share, as in a stack.
        Without the views D an input's score changes by ln(1 - sum_D r_k) - ln(1 - sum_D w_k): r are the
        responsibilities, w the weights. Views that only some inputs need stay, and views that replace each other go.
        """
        price = np.array([self.price[name] for name in views])
        constant = [policy for policy in policies if policy.gate is None]
        gated = len(constant) < len(policies)
        best = max(policies, key=lambda policy: float(policy.log_scores(part).sum())) if gated else policies[0]
        if best.gate is None:
            weights = np.mean([policy.weights for policy in constant], axis=0)
            if alone is not None and "identity" in views:
                n_units = crossval.n_units(part.labels, part.predictions.groups)
                log_odds = crossval.trust(n_units, crossval.even_odds(alone.model, part.labels))
                weights = special.expit(log_odds) * weights + special.expit(-log_odds) * alone.among(views).weights
            return [views[k] for k in np.argsort(-weights / price, kind="stable")]
        used = np.flatnonzero(best.weights > 0)
        shares = np.maximum(best.weights_for(part.predictions)[:, used], np.finfo(np.float64).tiny)
        scores = np.stack([best.restrict([k]).log_scores(part) for k in used], axis=1)  # (N, K)
        importance = np.ones(len(scores)) if part.labels.instance_weights is None else part.labels.instance_weights
        responsibility = special.softmax(np.log(shares) + scores / importance[:, None], axis=1)
        eliminated, kept = [k for k in range(len(views)) if k not in used], np.stack([responsibility, shares])
        while len(used):
            without = np.maximum(kept.sum(axis=2, keepdims=True) - kept, 1e-12)  # (2, N, n): each of the views in turn
            loss = importance @ (np.log(without[1]) - np.log(without[0]))
            place = int(np.argmin(loss / price[used]))
            eliminated.append(int(used[place]))
            used, kept = np.delete(used, place), np.delete(kept, place, axis=2)
        return [views[k] for k in reversed(eliminated)]

    def _affordable(self, views: Views, order: Sequence[str]) -> Views:
        """The next set: what half of the cost pays for, or the budget if that is met first."""
        limit = max(_SHRINK * self.cost(views), 0.0 if self.fits(views) else self.budget)
        kept: set[str] = set()
        for name in order:
            if sum(self.price[view] for view in kept) + self.price[name] <= limit * (1 + 1e-9):
                kept.add(name)
        kept = kept or {order[0]}
        if len(kept) == len(views):
            kept.discard(order[-1])
        return tuple(name for name in views if name in kept)

    def cost(self, views: Views) -> float:
        return sum(self.price[name] for name in views)

    def fits(self, views: Views) -> bool:
        return self.cost(views) <= self.budget * (1 + 1e-9)


def prices(cost: Any, names: Views) -> dict[str, float]:
    """The cost of every view by name, 1 each where it is not given."""
    if cost is None:
        return dict.fromkeys(names, 1.0)
    if not isinstance(cost, Mapping):
        cost = by_id(cost, np.array(names), "cost", "the views")
        values = list(cost) if hasattr(cost, "__iter__") and not isinstance(cost, str) else []
        if len(values) != len(names):
            raise ValueError(f"cost must be a dict by view name or {len(names)} numbers, one a view; got {shown(cost)}")
        cost = dict(zip(names, values, strict=True))
    if missing := [name for name in names if name not in cost]:
        raise ValueError(f"cost says nothing of the views {missing}; give every view's")
    for name in names:
        if not isinstance(cost[name], Real) or not 0 < float(cost[name]) < np.inf:
            raise ValueError(f"cost must be positive; view {name!r} has {shown(cost[name])}")
    return {name: float(cost[name]) for name in names}
