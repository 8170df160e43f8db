"""fit_sequential: views in stages, and every input computes as many stages as it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import one_of, positive, shown, whole_number
from vbtta.crossval import CrossValidated, check_units, compare_scores, folds_of, n_units, score_folds
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import Rows, ViewPredictions, require_views
from vbtta.distributions import CategoricalPrediction, Prediction, merge
from vbtta.fit import fit_policy, refit
from vbtta.inference.em import EM
from vbtta.models.base import InMemory, Model
from vbtta.policy import KEPT, Policy, Saved
from vbtta.select import prices

_ALPHA = 0.05  # probability that the upper limit of the loss is too low
_N_THRESHOLDS = 100
_UNDECIDED_SHARE = 0.05  # of a group's rows at which it stops
_EXCESS_SCALE = 2.0  # prior standard deviation of the realised loss, relative to that which the full policy expects
_LEAST_UNITS, _FEW_UNITS = 15, 100  # labelled inputs or groups: for an early stop, and for a normal limit of the excess
_DRAWS = 16  # of an input's predictive distribution
_SMALL = 1e-6
_LARGEST_COEFFICIENT = 1e6  # of an expected gain's logarithm

Views = tuple[str, ...]


class SequentialPoint(NamedTuple):
    """A setting of the stopping rule, with its cross-validated cost and score."""

    threshold: float
    passes: float  # mean number of views computed
    cost: float  # mean cost of these
    score: float  # log score, mean over labelled inputs
    loss: float  # against the full policy: expected by it, corrected by the labels
    standard_error: float  # of the loss that the full policy expects
    loss_upper: float  # upper 95 % confidence limit of the loss


class GainModel(NamedTuple):
    """Log-linear regression of the expected gain in log score on standardised features and their squares."""

    center: Annotated[Array, "F"]
    scale: Annotated[Array, "F"]
    coefficients: Annotated[Array, "P"]  # 1 + 2F

    def expected(self, features: Array) -> Array:
        """Expected gains (n,) at features (n, F)."""
        linear = _design((features - self.center) / self.scale) @ self.coefficients
        return np.asarray(np.exp(np.clip(linear, -50, 10)))


@dataclass(frozen=True, eq=False)
class SequentialPolicy(Saved):
    """Policies of nested sets of views, and a rule that says after which of them an input stops."""

    _format = "vbtta-sequential", "sequential policy"

    policies: tuple[Policy, ...]  # one a stage; the last is the full policy
    cost: dict[str, float]  # of every view
    tolerance: float  # largest loss in log score that was allowed, in nats
    by_group: bool = False  # whether rows of a group stop together
    threshold: float = 0.0  # stop where the expected gain in log score from the remaining views is at most this
    gains: tuple[GainModel, ...] = ()  # the expected gain after every stage but the last
    loss: float = 0.0  # against the full policy, in nats an input
    loss_upper: float = 0.0  # its upper 95 % confidence limit
    curve: tuple[SequentialPoint, ...] = ()  # cost and score of other thresholds, cheapest first

    def __post_init__(self) -> None:
        if not self.policies or len(self.gains) < len(self.policies) - 1:
            raise ValueError(f"it has {len(self.policies)} stages and {len(self.gains)} expected gains")
        if len({(policy.task, policy.n_outputs, str(policy.classes)) for policy in self.policies}) > 1:
            raise ValueError("its stages differ in task, outputs or classes")
        for center, scale, coefficients in self.gains:
            shapes = {center.shape, scale.shape, ((len(coefficients) - 1) / 2,)}
            if len(shapes) > 1 or not np.all(scale > 0) or np.abs(coefficients).max() > _LARGEST_COEFFICIENT:
                raise ValueError("its expected gains are damaged")
        if any(self.cost.get(name, 0) <= 0 for name in self.names):
            raise ValueError("its cost of a view is missing or not positive")

    def __repr__(self) -> str:
        sizes = ", ".join(str(len(stage)) for stage in self.stages)
        return f"SequentialPolicy({self.task}, views by stage: {sizes}; loss at most {self.loss_upper:.4f} nats)"

    @property
    def task(self) -> str:
        """What the policy predicts."""
        return self.policies[-1].task

    @cached_property
    def stages(self) -> tuple[Views, ...]:
        """Names of the views that every stage adds."""
        used = [policy.used_names for policy in self.policies]
        known = accumulate(used, initial=())  # by the stages before
        return tuple(tuple(name for name in new if name not in old) for new, old in zip(used, known, strict=False))

    @property
    def names(self) -> Views:
        """Names of all views, in the order in which they are computed."""
        return tuple(name for stage in self.stages for name in stage)

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The predictive distribution of every input after its last stage, with `passes`; needs all views, by name."""
        return replace(self._stopped(predictions)[0], ids=predictions.ids)

    def passes(self, predictions: ViewPredictions) -> Array:
        """Number of views that every input needs: (N,)."""
        return np.asarray(self.predict(predictions).passes)

    def run(self, compute: Callable[[int, Array], ArrayLike], n_rows: int, groups: Array | None = None) -> Prediction:
        """Predict while computing views only for the inputs that need them, with any runtime.

        `compute`, of a stage and the positions of the rows that are left, returns the outputs (n, V, C) of the V views
        `stages[stage]` for these rows. `groups` (n_rows,) are rows that stop together, such as an image's positions.
        """
        n_rows = whole_number("n_rows", n_rows, 0)
        if groups is not None and len(groups) != n_rows:
            raise ValueError(f"groups must be {n_rows}, one a row; got {len(groups)}")

        def collect(stage: int, rows: Array) -> ViewPredictions:
            outputs, (n, views) = np.asarray(compute(stage, rows)), (len(rows), len(self.stages[stage]))
            if outputs.ndim != 3 or outputs.shape[:2] != (n, views):
                raise ValueError(f"compute must return ({n}, {views}, C) at stage {stage}; got {outputs.shape}")
            of_rows = None if groups is None else np.asarray(groups)[rows]
            return ViewPredictions(outputs, names=self.stages[stage], classes=self.policies[-1].classes, groups=of_rows)

        return self._run(collect, n_rows, groups)[0]

    def score(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Array:
        """Log score of every labelled input's label set after its last stage, noise model included: (N+,)."""
        last = self._stopped(predictions)[1]
        labels, scores = predictions.align(labels), np.full(len(predictions), np.nan)
        for m, policy in enumerate(self.policies):
            if len(rows := np.intersect1d(np.flatnonzero(last == m), labels.labelled)):
                scores[rows] = policy.score(predictions.take(rows), labels.take(rows))
        return scores[labels.labelled]

    def consensus(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Prediction:
        """The true label of every input from its labels and all views."""
        return self.policies[-1].consensus(predictions, labels)

    def prune(self, min_weight: float = KEPT) -> Self:
        """The same with every stage's policy without its views of less weight; loss and curve are those before."""
        return replace(self, policies=tuple(policy.prune(min_weight) for policy in self.policies))

    def refit(self, sample: InMemory) -> Self:
        """Stages and rule as they are, with their policies fitted to other aligned data."""
        return replace(self, policies=tuple(_refit_stages(self.policies, sample)))

    def go_on(self, stage: int, features: Array, n_groups: int) -> Array:
        """Which rows, or groups of rows of one size, need the next stage, from features (N, F) in their order."""
        undecided = self.gains[stage].expected(features) > self.threshold
        return np.asarray(undecided.reshape(n_groups, -1).mean(axis=1) > _UNDECIDED_SHARE)

    def check_groups(self, maps: bool) -> None:
        """Refuse maps where rows stop one by one; warn of rows without groups where those stop together."""
        if maps and not self.by_group:
            raise ValueError("the network returns maps; fit the sequential policy to collect_dense")
        if self.by_group and not maps and len(self.stages) > 1:
            warnings.warn(
                "rows of a group stop together, and the predictions have no groups: rows stop one by one, for which "
                "the limit of the loss does not hold; give ViewPredictions(groups=...), or run(groups=...)",
                stacklevel=5,
            )

    def _stopped(self, predictions: ViewPredictions) -> tuple[Prediction, Array]:
        """Predictions from the views of all stages, and the last stage of every row."""
        require_views(predictions)
        for place, stage in enumerate(self.stages):
            if missing := [name for name in stage if name not in predictions.names]:
                raise ValueError(
                    f"the sequential policy needs the views {missing} at stage {place + 1} of {len(self.stages)}, "
                    "which the predictions lack; collect them, or fit with stages=..."
                )
        groups = predictions.groups if self.by_group else None
        return self._run(lambda m, rows: predictions.select(self.stages[m]).take(rows), len(predictions), groups)

    def _run(
        self, collect: Callable[[int, Array], ViewPredictions], n_rows: int, groups: Array | None
    ) -> tuple[Prediction, Array]:
        """Stage after stage for the rows that are left: predictions, and the last stage of every row."""
        if groups is None:
            self.check_groups(maps=False)
        rows, last, parts = np.arange(n_rows), np.zeros(n_rows, dtype=np.intp), list[tuple[Array, Prediction]]()
        views = collect(0, rows)
        for m, (policy, stage) in enumerate(zip(self.policies, self.stages, strict=True)):
            if m and stage:  # pruning may leave a stage without a view of its own
                views = views.concat(collect(m, rows), axis="views")
            prediction = policy.predict(views)
            stops = np.ones(len(rows), dtype=bool)
            if m + 1 < len(self.policies):
                expected = self.gains[m].expected(gain_features(policy, prediction, views))
                stops = _stops(expected, self.threshold, None if groups is None else groups[rows])
            parts.append((rows[stops], prediction.take(stops)))
            last[rows] = m
            rows, views = rows[~stops], views.take(~stops)
            if not len(rows):
                break
        return replace(merge(parts, n_rows), passes=np.cumsum([len(stage) for stage in self.stages])[last]), last


def fit_sequential(
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike,
    *,
    task: str,
    tolerance: float = 0.005,
    cost: Mapping[str, float] | Sequence[float] | None = None,
    model: Model | Literal["auto", "mixture", "latent"] = "auto",
    engine: EM | Literal["auto", "em"] = "auto",
    stages: Sequence[Sequence[str] | str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SequentialPolicy:
    """Fit policies of growing sets of views, and a rule that stops early where more views would change little.

    The full policy is that of :func:`fit_policy`. Stages are its 1, 2, 4, 8, ... views of most weight for their cost;
    each predicts by a fit of its own, or by the full policy without the other views, whichever is closer to the full
    prediction. An input stops after the first stage whose expected gain from the remaining views is below a threshold:
    the Kullback-Leibler divergence of the stage's prediction from the full one, regressed on entropy and margin (in
    regression on variance, disagreement of the views so far, and mean). First stage and threshold are those of the
    lowest cost whose loss in log score against the full policy is at most `tolerance`, as an upper 95 % confidence
    limit (docs/method, "Early stops").

    Parameters
    ----------
    predictions : ViewPredictions
        Under all candidate views, which must have names. With groups, folds keep them together and all rows of a group
        stop together, when at most one in twenty would go on: pixels of an image.
    labels : LabelSets or array
        As in :func:`fit_policy`.
    task : {"classification", "regression"}
    tolerance : float
        Largest loss in nats an input.
    cost : dict by view name or K numbers, optional
        As in :func:`select_views`; by default 1 each.
    model, engine, seed, progress
        As in :func:`fit_policy`; a closed form is needed.
    stages : sequence of view names or of lists of them, optional
        Views that every stage adds, instead of those of most weight; such as those that share a pass.

    Returns
    -------
    SequentialPolicy
        Where the tolerance cannot be met, a warning says so and the full policy is the only stage.
    """
    positive(tolerance=np.nan if tolerance is None else tolerance)
    seed = whole_number("seed", seed, 0)
    one_of("task", task, ("classification", "regression"))
    require_views(predictions)
    if engine not in ("auto", "em") and not isinstance(engine, EM):
        raise ValueError(f"engine must be 'auto', 'em' or EM(...): stages are fitted some fifty times; got {engine!r}")
    if predictions.generated_names:
        raise ValueError("views must have names, by which stages are matched; use ViewPredictions(names=...)")
    labels = predictions.align(labels)
    check_units(labels, predictions.groups, "stopping rules are chosen", "fit_policy")
    price = prices(cost, predictions.names)
    options: dict[str, Any] = {"task": task, "engine": engine, "seed": seed, "progress": progress}
    if stages is None:
        full = fit_policy(predictions, labels, model=model, **options)
        nested = _heaviest(full, price)
    else:
        nested = _given_stages(stages, predictions.names)
        full = fit_policy(predictions.select(nested[-1]), labels, model=model, **options)
    options |= {"model": full.model, "guard": False}
    rows = predictions.take(labels.labelled)
    target, early = full.predict(rows), []
    for views in nested[:-1]:
        candidates = [fit_policy(predictions.select(views), labels, **options), *_part_of(full, views)]
        divergence = _divergences(target, [policy.predict(rows) for policy in candidates])
        closest = candidates[int(np.argmin([values.mean() for values in divergence]))]
        early.append(replace(closest, rows=Rows()))  # the full policy has the rows
    policies = _growing([*early, full] if len(full.used_names) > 1 else [full])
    all_views = SequentialPolicy(policies[-1:], price, tolerance, predictions.groups is not None)
    return all_views if len(policies) == 1 else _choose(all_views, policies, InMemory(predictions, labels), seed)


def _given_stages(stages: Sequence[Sequence[str] | str], names: Views) -> list[Views]:
    """The views up to every stage."""
    if isinstance(stages, str) or not all(isinstance(stage, str | Sequence) for stage in stages) or not len(stages):
        raise ValueError(f"stages must be a list of the views, or lists of views, that each adds; got {shown(stages)}")
    added = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in stages]
    nested = list(accumulate(added))
    for new, views in zip(added, nested, strict=True):
        if not new or not set(new) <= set(names) or len(set(views)) < len(views):
            raise ValueError(f"stages must add views of {list(names)}, each once; got the stage {list(new)}")
    return nested


def _heaviest(policy: Policy, price: Mapping[str, float]) -> list[Views]:
    """The 1, 2, 4, 8, ... views of most weight for their cost, up to all that are used."""
    weights = dict(zip(policy.names, policy.weights, strict=True))
    order = sorted(policy.used_names, key=lambda name: -weights[name] / price[name])
    sizes = [2**m for m in range(len(order)) if 2**m < len(order)]
    return [tuple(order[:size]) for size in (*sizes, len(order))]


def _part_of(policy: Policy, views: Views) -> list[Policy]:
    """The policy with only some of its views, where it uses any of them."""
    kept = [k for k, name in enumerate(policy.fitted or policy.names) if name in views]
    return [policy.restrict(kept)] if set(views) & set(policy.used_names) else []


def _refit_stages(policies: Sequence[Policy], sample: InMemory) -> list[Policy]:
    """The stages' policies, fitted to other data: parts of the full policy, which know all its views, or their own."""
    *early, last = policies
    full = refit(last, sample)
    parts = [_part_of(full, policy.used_names) if policy.names == last.names else [] for policy in early]
    return [*(part[0] if part else refit(policy, sample) for part, policy in zip(parts, early, strict=True)), full]


def _growing(policies: list[Policy]) -> tuple[Policy, ...]:
    """The stages' policies without views of weight zero, and without stages that add no view."""
    kept: list[Policy] = []
    for policy in policies:
        while kept and set(policy.used_names) <= {name for earlier in kept for name in earlier.used_names}:
            kept.pop()
        kept.append(policy.prune(np.finfo(np.float64).tiny))
    return tuple(kept)


class _Evidence(NamedTuple):
    """What is known of n calibration inputs after each of M stages."""

    scores: Array  # (M, n): held out
    divergence: Array  # (M, n): expected losses against the full policy
    excess: Array  # (M, n): held-out losses beyond those that the refits expect
    expected: Array  # (M - 1, n): predicted gains, by regressions on the other folds
    full: CrossValidated

    def limits(self, first: int, sequential: SequentialPolicy, alpha: float) -> list[SequentialPoint]:
        """Cost, score and upper limit of the loss for every threshold, with stops from stage `first` on."""
        passes = np.cumsum([len(stage) for stage in sequential.stages])
        cost = np.cumsum([sum(sequential.cost[name] for name in stage) for stage in sequential.stages])
        n_rows, units, quantile = len(self.full.scores), self.full.units, float(-special.ndtri(alpha))
        # with probability alpha, n inputs show no loss that one in n / -ln(alpha) inputs has
        place = np.arange(n_rows) if units is None else np.unique(units, return_inverse=True)[1]
        losses = np.stack([np.bincount(place, stage) for stage in self.divergence[first:]])
        unseen_loss = -np.log(alpha) * float(np.quantile(losses, 0.99, axis=1).max()) / n_rows
        zero_scores, points = self.full._replace(scores=np.zeros(n_rows)), []
        few = max(1.0, _FEW_UNITS / losses.shape[1])
        thresholds = np.quantile(self.expected[first:], np.linspace(0, 1, _N_THRESHOLDS + 1)[1:])
        for threshold in (0.0, *np.unique(thresholds).tolist()):  # expected gains are positive: at 0 nothing stops
            stops = [_stops(stage, threshold, units) for stage in self.expected[first:]]
            last = np.argmax([*stops, np.ones(n_rows, dtype=bool)], axis=0)  # (n,)
            stopped = first + last, np.arange(n_rows)
            loss, error = compare_scores(self.full._replace(scores=self.divergence[stopped]), zero_scores)
            excess, excess_error = compare_scores(self.full._replace(scores=self.excess[stopped]), zero_scores)
            # by a normal prior of the excess around 0
            shrinkage = 1 / (1 + (excess_error / max(_EXCESS_SCALE * loss, _SMALL**2)) ** 2)
            upper = 0.0
            if np.any(stops):
                excess_upper = shrinkage * excess + quantile * few * float(np.sqrt(shrinkage)) * excess_error
                upper = loss + quantile * error + unseen_loss + max(excess_upper, 0.0)
            means = float(passes[last].mean()), float(cost[last].mean()), float(self.scores[stopped].mean())
            points.append(SequentialPoint(threshold, *means, loss + max(shrinkage * excess, 0.0), error, upper))
        return points


def _choose(whole: SequentialPolicy, policies: tuple[Policy, ...], sample: InMemory, seed: int) -> SequentialPolicy:
    """The first stage and the threshold of the lowest cost within the tolerance."""
    folds = folds_of(sample.predictions, sample.labels, seed)
    refits = [_refit_stages(policies, sample.take(train)) for train, _ in folds]
    by_stage = score_folds(zip(*refits, strict=True), sample, folds)
    parts = [sample.predictions.take(held) for _, held in folds]
    held_out = np.concatenate([_gains_and_features(*pair)[0] for pair in zip(refits, parts, strict=True)], axis=1)
    rows = np.concatenate([held for _, held in folds])
    gain, features = _gains_and_features(policies, sample.predictions.take(rows))  # divergences need no labels
    full, scores = by_stage[-1], np.stack([stage.scores for stage in by_stage])
    expected, at_last = np.empty_like(gain), np.zeros((1, len(rows)))
    for m, fold in np.ndindex(len(gain), len(folds)):
        held = full.fold == fold
        expected[m, held] = _fit_gain(features[m, ~held], gain[m, ~held]).expected(features[m, held])
    divergence, of_refits = (np.vstack([values, at_last]) * full.importance for values in (gain, held_out))
    evidence = _Evidence(scores, divergence, scores[-1] - scores - of_refits, expected, full)
    gains = [_fit_gain(*stage) for stage in zip(features, gain, strict=True)]
    best, lowest = whole, sum(whole.cost[name] for name in whole.names)
    n_units_known = n_units(sample.labels, sample.predictions.groups)
    for first in range(len(gains) if n_units_known >= _LEAST_UNITS else 0):
        candidate = replace(whole, policies=policies[first:], gains=tuple(gains[first:]))
        points = evidence.limits(first, candidate, _ALPHA / len(gains))
        *_, chosen = takewhile(lambda point: point.loss_upper <= whole.tolerance, points)
        if chosen.cost < lowest:
            known = {(point.cost, point.score): point for point in (*points, chosen)}
            curve, lowest = tuple(known[key] for key in sorted(known)), chosen.cost
            outcome = {name: getattr(chosen, name) for name in ("threshold", "loss", "loss_upper")}
            best = replace(candidate, curve=curve, **outcome)
    if best is whole:
        warnings.warn(
            f"no early stop keeps the loss in log score within tolerance={best.tolerance:g} nats at 95 % confidence; "
            "the full policy is the only stage. Give a larger tolerance or more labels",
            stacklevel=3,
        )
    return best


def _gains_and_features(policies: Sequence[Policy], views: ViewPredictions) -> tuple[Array, Array]:
    """Gain by the other views (M - 1, n), and features (M - 1, n, F), after every stage but the last."""
    *early, full = (policy.predict(views) for policy in policies)
    features = [gain_features(*stage, views) for stage in zip(policies, early, strict=False)]
    return np.stack(_divergences(full, early)), np.stack(features)


def _stops(expected: Array, threshold: float, groups: Array | None) -> Array:
    """Where the expected gain is small; all rows of a group, if few of them are undecided: (n,)."""
    decided = expected <= threshold
    if groups is None or not len(groups):
        return decided
    _, place = np.unique(groups, return_inverse=True)
    share = np.bincount(place, ~decided) / np.bincount(place)
    return (share <= _UNDECIDED_SHARE)[place]


def gain_features(policy: Policy, prediction: Prediction, views: ViewPredictions) -> Array:
    """Features for the regression of the expected gain, from the policy's views alone: (N, F)."""
    if isinstance(prediction, CategoricalPrediction):
        highest, second = np.sort(prediction.proba, axis=1)[:, :-3:-1].T
        return class_features(prediction.entropy, highest - second)
    variance = prediction.variance
    disagreement = np.var(views.select(policy.used_names).outputs, axis=1, dtype=np.float64)
    spread = np.log(variance).mean(axis=1), np.log(disagreement / variance + _SMALL).mean(axis=1)
    return np.column_stack([*spread, prediction.mean])


def class_features(entropy: Array, margin: Array) -> Array:
    """Those of a classification, from arrays (N,)."""
    return np.stack([np.log(entropy + _SMALL), margin], axis=1)


def _divergences(full: Any, early: Sequence[Any]) -> list[Array]:
    """Expected gains (N,) in log score if the full prediction holds: Kullback-Leibler divergences.

    Those of densities are means of r - 1 - ln r, r their ratio early / full, over draws of the full prediction: r - 1
    has mean zero, and cancels most of the noise of -ln r.
    """
    if isinstance(full, CategoricalPrediction):
        smallest = np.finfo(np.float64).tiny
        return [special.rel_entr(full.proba, np.maximum(part.proba, smallest)).sum(axis=1) for part in early]
    generator, totals = np.random.default_rng(0), np.zeros((len(early), len(full.mean)))
    for _ in range(_DRAWS):
        y = full.draw(generator)
        log_density = full.log_prob(y)
        for total, prediction in zip(totals, early, strict=True):
            log_ratio = np.minimum(prediction.log_prob(y) - log_density, 50.0)
            total += (np.expm1(log_ratio) - log_ratio) / _DRAWS
    return list(totals)


def _fit_gain(features: Array, gain: Array) -> GainModel:
    """Log-linear regression of gains (n,) on features (n, F), by Newton's method with a small ridge."""
    center, scale = features.mean(axis=0), features.std(axis=0)
    scale = np.where(scale > _SMALL, scale, 1e12)  # constant features become zero
    mean = max(float(gain.mean()), _SMALL)
    design = _design((features - center) / scale)
    ridge, coefficients = np.eye(design.shape[1]), np.zeros(design.shape[1])
    for _ in range(50):
        rate = np.exp(design @ coefficients)
        gradient = design.T @ (gain / mean - rate) - coefficients
        step = np.linalg.solve((design.T * rate) @ design + ridge, gradient)
        step *= min(1.0, 1.0 / max(float(np.abs(design @ step).max()), _SMALL))
        coefficients += step
        if np.abs(step).max() < _SMALL:
            break
    coefficients[0] += np.log(mean)
    return GainModel(center, scale, coefficients)


def _design(standard: Array) -> Array:
    """One, standardised features and their squares; beyond four standard deviations they are held."""
    held = np.clip(standard, -4, 4)
    return np.column_stack([np.ones(len(held)), held, held**2])
