"""fit_sequential: views in stages, and every input computes as many stages as it needs."""

__all__ = ["SequentialPoint", "SequentialPolicy", "fit_sequential"]

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import positive, whole_number
from vbtta._support.files import from_plain, read_json, to_plain, write_json
from vbtta._support.fingerprints import Rows
from vbtta.crossval import MIN_UNITS, CrossValidated, compare_scores, n_units, sampled, split
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction, merge
from vbtta.fit import fit_policy, refit
from vbtta.inference.em import EM
from vbtta.models.base import Model
from vbtta.policy import KEPT, Policy
from vbtta.select import prices, select_views

_FORMAT, _VERSION = "vbtta-sequential", 1
_UPPER = 1.645  # standard errors above the mean: one-sided 95 % limit
_UNSEEN = _UPPER**2 / 2  # rare large losses that are added to those seen, as in the interval of Agresti and Coull
_CONFIDENCES = 1 - np.geomspace(1e-4, 0.5, 60)
_GAINS = np.geomspace(1e-5, 1.0, 60)
_UNDECIDED_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)  # of a group's rows
_CLEARLY_FEWER = 0.95  # of the cost of the simpler rule
_SMALL = 1e-6

Views = tuple[str, ...]


class SequentialPoint(NamedTuple):
    """A setting of the stopping rule, with its cross-validated cost and score."""

    threshold: float
    undecided: float  # share of undecided rows at which a group stops
    passes: float  # mean number of views computed
    cost: float  # mean cost of these
    score: float  # log score, mean over labelled inputs
    loss: float  # of score against the full policy
    standard_error: float  # of the loss
    loss_upper: float  # upper 95 % confidence limit of the loss


class GainModel(NamedTuple):
    """Log-linear regression of the expected gain in log score on standardised features and their squares."""

    center: Array  # (F,)
    scale: Array  # (F,)
    coefficients: Array  # (1 + 2F,)


@dataclass(frozen=True, eq=False)
class SequentialCategorical(CategoricalPrediction):
    """Class probabilities, and the number of views computed for every input: `passes` (N,)."""

    passes: Array


@dataclass(frozen=True, eq=False)
class SequentialContinuous(ContinuousPrediction):
    """Predictive distributions, and the number of views computed for every input: `passes` (N,)."""

    passes: Array


@dataclass(frozen=True, eq=False)
class SequentialPolicy:
    """Policies of nested sets of views, and a rule that says after which of them an input stops.

    Attributes
    ----------
    policies : tuple of Policy
        One a stage; the last is the full policy.
    rule : {"confidence", "gain"}
        Stop where the largest class probability is at least `threshold`, or where the expected gain in log score from
        the remaining views is at most `threshold` nats.
    threshold : float
    undecided : float
        A group of rows stops when at most this share of them would go on.
    by_group : bool
        Whether rows of a group stop together.
    gains : tuple of GainModel
        The expected gain after every stage but the last.
    cost : dict
        Of every view.
    tolerance : float
        Largest loss in log score that was allowed, in nats.
    loss, loss_upper : float
        Cross-validated loss against the full policy, and its upper 95 % confidence limit, in nats an input.
    curve : tuple of SequentialPoint
        Cost and score of other thresholds, cheapest first.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> label = rng.integers(3, size=2000)
    >>> clear = rng.uniform(0, 6, size=(2000, 1, 1))
    >>> views = ViewPredictions(
    ...     clear * np.eye(3)[label][:, None] + rng.normal(size=(2000, 4, 3)), names=["identity", *"abc"]
    ... )
    >>> sequential = fit_sequential(views, label, task="classification", model="latent", tolerance=0.02)
    >>> prediction = sequential.predict(views)
    >>> bool(1 <= prediction.passes.mean() < 4)
    True
    """

    policies: tuple[Policy, ...]
    rule: Literal["confidence", "gain"]
    threshold: float
    undecided: float
    by_group: bool
    gains: tuple[GainModel, ...]
    cost: dict[str, float]
    tolerance: float
    loss: float
    loss_upper: float
    curve: tuple[SequentialPoint, ...]

    def __repr__(self) -> str:
        sizes = ", ".join(str(len(stage)) for stage in self.stages)
        stop = f"stops by {self.rule}, " if len(self.policies) > 1 else ""
        return f"SequentialPolicy({self.task}, views by stage: {sizes}; {stop}loss at most {self.loss_upper:.4f} nats)"

    @property
    def task(self) -> str:
        """What the policy predicts."""
        return self.policies[-1].task

    @property
    def stages(self) -> tuple[Views, ...]:
        """Names of the views that every stage adds."""
        known: set[str] = set()
        stages = []
        for policy in self.policies:
            stages.append(tuple(name for name in policy.used_names if name not in known))
            known.update(stages[-1])
        return tuple(stages)

    @property
    def names(self) -> Views:
        """Names of all views, in the order in which they are computed."""
        return tuple(name for stage in self.stages for name in stage)

    @property
    def rows(self) -> Rows:
        """Hashes of the rows of the fit."""
        return self.policies[-1].rows

    def predict(self, predictions: ViewPredictions) -> SequentialCategorical | SequentialContinuous:
        """The predictive distribution of every input after its last stage, with `passes`; needs all views, by name."""
        stages = [predictions.select(stage) if stage else None for stage in self._checked_stages(predictions)]

        def collect(stage: int, rows: Array) -> ViewPredictions:
            part = stages[stage]
            assert part is not None
            return part.take(rows)

        return self._run(collect, len(predictions), predictions.groups)

    def passes(self, predictions: ViewPredictions) -> Array:
        """Number of views that every input needs: (N,)."""
        return self.predict(predictions).passes

    def run(
        self, compute: Callable[[int, Array], ArrayLike], n_rows: int
    ) -> SequentialCategorical | SequentialContinuous:
        """Predict while computing views only for the inputs that need them, with any runtime.

        Parameters
        ----------
        compute : function of a stage and the positions of the rows that are left
            Returns the outputs (n, V, C) of the V views `stages[stage]` for these rows.
        n_rows : int
            Number of inputs.
        """

        def collect(stage: int, rows: Array) -> ViewPredictions:
            outputs = np.asarray(compute(stage, rows))
            return ViewPredictions(outputs, names=self.stages[stage], classes=self.policies[-1].classes)

        return self._run(collect, n_rows, None)

    def score(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Array:
        """Log score of every labelled input's label set after its last stage, noise model included: (N+,)."""
        labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
        labels = labels.align(len(predictions), predictions.ids)
        passes = self.passes(predictions)
        scores = np.full(len(predictions), np.nan)
        for policy, total in zip(self.policies, np.cumsum([len(stage) for stage in self.stages]), strict=True):
            rows = labels.labelled[passes[labels.labelled] == total]
            if len(rows):
                scores[rows] = policy.score(predictions.take(rows), labels.take(rows))
        return scores[labels.labelled]

    def consensus(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Prediction:
        """The true label of every input from its labels and all views."""
        return self.policies[-1].consensus(predictions, labels)

    def prune(self, min_weight: float = KEPT) -> Self:
        """The same with every stage's policy without its views of less weight; loss and curve are those before."""
        return replace(self, policies=tuple(policy.prune(min_weight) for policy in self.policies))

    def refit(self, predictions: ViewPredictions, labels: LabelSets) -> Self:
        """Stages and rule as they are, with their policies fitted to other aligned data."""
        return replace(self, policies=tuple(refit(policy, predictions, labels) for policy in self.policies))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write stages and rule as human-readable JSON, atomically."""
        write_json(path, _FORMAT, _VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; another format, a newer version or a damaged file is refused."""
        return read_json(path, _FORMAT, _VERSION, "sequential policy", cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data for JSON."""
        names = [field.name for field in fields(self) if field.name != "policies"]
        data = {name: to_plain(getattr(self, name)) for name in names}
        return {**data, "policies": [policy.to_dict() for policy in self.policies]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The policy that :meth:`to_dict` described."""
        policy = cls(
            policies=tuple(Policy.from_dict(entry) for entry in data["policies"]),
            rule=data["rule"],
            by_group=from_plain(bool, data["by_group"]),
            gains=from_plain(tuple[GainModel, ...], data["gains"]),
            cost={name: from_plain(float, value) for name, value in data["cost"].items()},
            curve=from_plain(tuple[SequentialPoint, ...], data["curve"]),
            **{
                name: from_plain(float, data[name])
                for name in ("threshold", "undecided", "tolerance", "loss", "loss_upper")
            },
        )
        if policy.rule not in ("confidence", "gain") or not policy.policies:
            raise ValueError(f"its rule is {policy.rule!r} and it has {len(policy.policies)} stages")
        return policy

    def _checked_stages(self, predictions: ViewPredictions) -> tuple[Views, ...]:
        stages = self.stages
        for place, stage in enumerate(stages):
            missing = [name for name in stage if name not in predictions.names]
            if missing:
                raise ValueError(
                    f"the sequential policy needs the views {missing} at stage {place + 1} of {len(stages)}, which the "
                    "predictions lack; collect them, or fit with stages=..."
                )
        return stages

    def _run(
        self, collect: Callable[[int, Array], ViewPredictions], n_rows: int, groups: Array | None
    ) -> SequentialCategorical | SequentialContinuous:
        """Stage after stage, of the rows that are left."""
        rows, passes, n_views = np.arange(n_rows), np.zeros(n_rows, dtype=np.int64), 0
        collected: ViewPredictions | None = None
        parts: list[tuple[Array, Prediction]] = []
        for m, (policy, stage) in enumerate(zip(self.policies, self.stages, strict=True)):
            if stage:
                new = collect(m, rows)
                collected = new if collected is None else collected.concat(new, axis="views")
            assert collected is not None
            n_views += len(stage)
            passes[rows] = n_views
            prediction = policy.predict(collected)
            stops = np.ones(len(rows), dtype=bool)
            if m + 1 < len(self.policies):
                stops = self._stops(m, prediction, collected, None if groups is None else groups[rows])
            parts.append((rows[stops], prediction.take(stops)))
            rows, collected = rows[~stops], collected.take(~stops)
            if not len(rows):
                break
        return _with_passes(merge(parts, n_rows), passes)

    def _early_features(self, predicted: Sequence[Prediction], views: ViewPredictions) -> Array:
        """Features after every stage but the last, from the predictions of all: (M - 1, N, F)."""
        names = [self.names[: sum(map(len, self.stages[: m + 1]))] for m in range(len(predicted) - 1)]
        return np.stack(
            [_features(prediction, views.select(known)) for prediction, known in zip(predicted, names, strict=False)]
        )

    def _stops(self, m: int, prediction: Prediction, collected: ViewPredictions, groups: Array | None) -> Array:
        """Which rows stop after stage m: (N,)."""
        by_confidence = self.rule == "confidence"
        values = (
            _confidence(prediction)
            if by_confidence
            else _expected_gain(self.gains[m], _features(prediction, collected))
        )
        return _together(_decided(self.rule, values, self.threshold), groups if self.by_group else None, self.undecided)


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

    Stages are the nested sets of :func:`select_views`, the smallest first. Every stage has its own policy, of the same
    model. An input stops after the first stage that is confident, or whose expected gain from the remaining views is
    small: the Kullback-Leibler divergence of the stage's prediction from the full one, regressed on entropy and margin
    (in regression on variance, disagreement of the views so far, and mean). Threshold and rule are those of the lowest
    cost whose loss in log score against the full policy is at most `tolerance`, as an upper 95 % confidence limit by
    cross-validation. The limit allows for rare large losses that the sample does not show, so that a small tolerance
    needs many labels: with losses of 3 nats at most some 2,000 for a tolerance of 0.005.

    Parameters
    ----------
    predictions : ViewPredictions
        Under all candidate views, which must have names. With groups, folds keep them together and all rows of a group
        stop together, by the share of rows that are undecided: pixels of an image.
    labels : LabelSets or array
        As in :func:`fit_policy`.
    task : {"classification", "regression"}
    tolerance : float
        Largest loss in nats an input.
    cost : dict by view name or K numbers, optional
        As in :func:`select_views`; by default 1 each.
    model, engine
        As in :func:`fit_policy`; a closed form is needed.
    stages : sequence of view names or of lists of them, optional
        Views that every stage adds, instead of the sets of :func:`select_views`; such as those that share a pass.
    seed : int
        Decides the folds.
    progress : bool
        Whether to say on the standard error stream what is being done.

    Returns
    -------
    SequentialPolicy
        Where the tolerance cannot be met, a warning says so and the full policy is the only stage.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=300)
    >>> views = ViewPredictions(truth[:, None, None] + rng.normal(size=(300, 3, 1)), names=["identity", *"ab"])
    >>> sequential = fit_sequential(views, truth, task="regression", model="latent", tolerance=1.0)
    >>> sequential.passes(views).max() <= 3
    np.True_
    """
    positive(tolerance=tolerance)
    seed = whole_number("seed", seed, 0)
    if task not in ("classification", "regression"):
        raise ValueError(f"task must be 'classification' or 'regression'; got {task!r}")
    if engine not in ("auto", "em") and not isinstance(engine, EM):
        raise ValueError(f"engine must be 'auto', 'em' or EM(...): stages are fitted some fifty times; got {engine!r}")
    if predictions.generated_names:
        raise ValueError("views must have names, by which stages are matched; use ViewPredictions(names=...)")
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    n_held_out = n_units(labels, predictions.groups)
    if n_held_out < MIN_UNITS:
        raise ValueError(
            f"stopping rules are chosen by held-out scores, which need at least {MIN_UNITS} labelled inputs or groups "
            f"of them; got {n_held_out}. Use fit_policy"
        )
    price = prices(cost, predictions.names)
    options: dict[str, Any] = {"task": task, "engine": engine, "seed": seed, "progress": progress}
    if stages is None:
        budget = sum(price.values())
        full = select_views(predictions, labels, budget=budget, cost=price, model=model, **options)
        assert full.selection is not None
        chosen = full.selection.chosen.views
        nested = [point.views for point in full.selection.curve if set(point.views) <= set(chosen)]
    else:
        nested = _given_stages(stages, predictions.names)
        full = fit_policy(predictions.select(nested[-1]), labels, model=model, **options)
    options = {**options, "model": full.model, "guard": False}
    policies = [fit_policy(predictions.select(views), labels, **options) for views in nested[:-1]]
    policies = [replace(policy, rows=Rows()) for policy in policies]  # the full policy has them
    policies = _growing([_pruned(policy) for policy in (*policies, full)])
    if len(policies) == 1:
        return SequentialPolicy((*policies,), "confidence", 0.0, 0.0, False, (), price, tolerance, 0.0, 0.0, ())
    sequential = SequentialPolicy(
        (*policies,), "gain", 0.0, 0.0, predictions.groups is not None, (), price, tolerance, 0.0, 0.0, ()
    )
    return _choose_rule(sequential, predictions, labels, seed)


def _given_stages(stages: Sequence[Sequence[str] | str], names: Views) -> list[Views]:
    nested: list[Views] = []
    for stage in stages:
        new = (stage,) if isinstance(stage, str) else tuple(stage)
        before = nested[-1] if nested else ()
        unknown = [name for name in new if name not in names]
        if not new or unknown or set(new) & set(before):
            problem = f"lacks views {unknown}" if unknown else "has none, or has some of an earlier stage"
            raise ValueError(f"stages must be lists of views that each stage adds; {list(new)!r}: {problem}")
        nested.append((*before, *new))
    if not nested:
        raise ValueError("stages must be at least one list of views; got none")
    return nested


def _pruned(policy: Policy) -> Policy:
    """Without the views of weight zero, so that a fit to other rows does not need them either."""
    return policy.prune(np.finfo(np.float64).tiny)


def _growing(policies: list[Policy]) -> list[Policy]:
    """Without the stages after which a later one needs no more views."""
    kept: list[Policy] = []
    for policy in policies:
        while kept and set(policy.used_names) <= {name for earlier in kept for name in earlier.used_names}:
            kept.pop()
        kept.append(policy)
    return kept


class _HeldOut(NamedTuple):
    """Held-out results of M stages for n labelled inputs."""

    scores: Array  # (M, n)
    confidence: Array  # (M - 1, n); zeros in regression
    gain: Array  # (M - 1, n): Kullback-Leibler divergence from the full policy's prediction
    features: Array  # (M - 1, n, F), less their fold's mean: what differs by fold alone says nothing of an input
    fold: Array  # (n,)
    groups: Array | None  # (n,)

    @property
    def large_loss(self) -> float:
        """What stopping early can cost an input, or a group of them: the 99 % quantile after any stage."""
        loss = np.maximum(self.scores[-1] - self.scores[:-1], 0)
        if self.groups is not None:
            place = np.unique(self.groups, return_inverse=True)[1]
            loss = np.stack([np.bincount(place, stage) for stage in loss])
        return float(np.quantile(loss, 0.99))


def _choose_rule(
    sequential: SequentialPolicy, predictions: ViewPredictions, labels: LabelSets, seed: int
) -> SequentialPolicy:
    """The rule and threshold of the lowest cost within the tolerance."""
    held_out = _hold_out(sequential, predictions, labels, seed)
    n_early = len(sequential.policies) - 1
    expected = np.empty_like(held_out.gain)
    for m, fold in np.ndindex(n_early, int(held_out.fold.max()) + 1):
        held = held_out.fold == fold
        model = _fit_gain(held_out.features[m, ~held], held_out.gain[m, ~held])
        expected[m, held] = _expected_gain(model, held_out.features[m, held])
    rules: dict[Literal["confidence", "gain"], tuple[Array, Array]] = {"gain": (expected, _GAINS)}
    if sequential.task == "classification":
        rules["confidence"] = held_out.confidence, _CONFIDENCES
    shares = _UNDECIDED_SHARES if sequential.by_group else (0.0,)
    never = np.zeros_like(expected, dtype=bool)
    full = _point(sequential, held_out, never, 0.0, 0.0)
    points, best = {}, {}
    for rule, (values, thresholds) in rules.items():
        points[rule] = [
            _point(sequential, held_out, _decided(rule, values, threshold), float(threshold), share)
            for threshold in thresholds
            for share in shares
        ]
        allowed = [point for point in points[rule] if point.loss_upper <= sequential.tolerance]
        best[rule] = min((*allowed, full), key=lambda point: (point.cost, point.loss))
    simpler = "confidence" in rules and best["gain"].cost >= _CLEARLY_FEWER * best["confidence"].cost
    rule = "confidence" if simpler else "gain"
    chosen = best[rule]
    known = predictions.take(labels.labelled[sampled(len(labels.labelled), seed, predictions.outputs.shape[2])])
    predicted = [policy.predict(known) for policy in sequential.policies]
    curve = {(point.cost, point.score): point for point in (*points[rule], full, chosen)}
    sequential = replace(
        sequential,
        rule=rule,
        threshold=chosen.threshold,
        undecided=chosen.undecided,
        gains=tuple(
            _fit_gain(held_out.features[m], held_out.gain[m])._replace(center=center)
            for m, center in enumerate(sequential._early_features(predicted, known).mean(axis=1))
        ),
        loss=chosen.loss,
        loss_upper=chosen.loss_upper,
        curve=tuple(curve[key] for key in sorted(curve)),
    )
    if chosen.cost < full.cost:
        return sequential
    warnings.warn(
        f"no early stop keeps the loss in log score within tolerance={sequential.tolerance:g} nats at 95 % confidence; "
        "the full policy is the only stage. Give a larger tolerance or more labels",
        stacklevel=3,
    )
    return replace(sequential, policies=sequential.policies[-1:], gains=())


def _hold_out(sequential: SequentialPolicy, predictions: ViewPredictions, labels: LabelSets, seed: int) -> _HeldOut:
    """Scores, confidence, gains and features of all stages by cross-validation."""
    rows = labels.labelled
    folds = split(rows[sampled(len(rows), seed, predictions.outputs.shape[2])], predictions.groups)
    parts = []
    for train, held in folds:
        fold = sequential.refit(predictions.take(train), labels.take(train))
        views, truth = predictions.take(held), labels.take(held)
        predicted = [policy.predict(views) for policy in fold.policies]
        features = sequential._early_features(predicted, views)
        parts.append(
            (
                np.stack([policy.score(views, truth) for policy in fold.policies]),
                np.stack([_confidence(prediction) for prediction in predicted[:-1]]),
                np.stack([_divergence(predicted[-1], prediction) for prediction in predicted[:-1]]),
                features - features.mean(axis=1, keepdims=True),
            )
        )
    held_rows = np.concatenate([held for _, held in folds])
    fold_of = np.repeat(np.arange(len(folds)), [len(held) for _, held in folds])
    groups = None if predictions.groups is None else predictions.groups[held_rows]
    scores, confidence, gain, features = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return _HeldOut(scores, confidence, gain, features, fold_of, groups)


def _point(
    sequential: SequentialPolicy, held_out: _HeldOut, decided: Array, threshold: float, undecided: float
) -> SequentialPoint:
    """Cost and score of stopping where it is decided, (M - 1, n)."""
    stops = np.stack([_together(stage, held_out.groups, undecided) for stage in decided])
    last = np.where(stops.any(axis=0), stops.argmax(axis=0), len(stops))  # (n,)
    scores = np.take_along_axis(held_out.scores, last[None], axis=0)[0]
    full = CrossValidated(held_out.scores[-1], held_out.groups, held_out.fold, np.ones(len(scores)))
    loss, error = compare_scores(full, full._replace(scores=scores))
    passes = np.cumsum([len(stage) for stage in sequential.stages])
    cost = np.cumsum([sum(sequential.cost[name] for name in stage) for stage in sequential.stages])
    upper = 0.0
    if stops.any():  # large losses are rare: a sample may have none, and the setting was chosen for that
        unseen = held_out.large_loss / len(scores)
        upper = loss + _UNSEEN * unseen + _UPPER * float(np.sqrt(error**2 + _UNSEEN * unseen**2))
    mean_passes, mean_cost = float(passes[last].mean()), float(cost[last].mean())
    return SequentialPoint(threshold, undecided, mean_passes, mean_cost, float(scores.mean()), loss, error, upper)


def _decided(rule: str, values: Array, threshold: float) -> Array:
    return values >= threshold if rule == "confidence" else values <= threshold


def _together(decided: Array, groups: Array | None, undecided: float) -> Array:
    """All rows of a group stop when at most a share of them is undecided."""
    if groups is None or not len(groups):
        return decided
    _, place = np.unique(groups, return_inverse=True)
    share = np.bincount(place, ~decided) / np.bincount(place)
    return (share <= undecided + 1e-12)[place]


def _confidence(prediction: Prediction) -> Array:
    """The largest class probability; numbers have none."""
    if isinstance(prediction, CategoricalPrediction):
        return np.asarray(prediction.proba.max(axis=1))
    return np.zeros(len(prediction.location))


def _features(prediction: Prediction, collected: ViewPredictions) -> Array:
    """What the expected gain is regressed on, from the views computed so far: (N, F)."""
    if isinstance(prediction, CategoricalPrediction):
        first, second = np.sort(prediction.proba, axis=1)[:, :-3:-1].T
        return np.stack([np.log(prediction.entropy + _SMALL), first - second], axis=1)
    variance = prediction.variance
    disagreement = np.var(collected.outputs, axis=1, dtype=np.float64)
    spread = np.log(variance).mean(axis=1), np.log(disagreement / variance + _SMALL).mean(axis=1)
    return np.column_stack([*spread, prediction.mean])


def _divergence(full: Prediction, early: Prediction) -> Array:
    """Expected gain in log score if the full prediction holds: Kullback-Leibler divergence, of matched normals."""
    if isinstance(full, CategoricalPrediction) and isinstance(early, CategoricalPrediction):
        tiny = np.finfo(np.float64).tiny
        ratio = np.log(np.maximum(full.proba, tiny)) - np.log(np.maximum(early.proba, tiny))
        return np.asarray((full.proba * ratio).sum(axis=1))
    assert isinstance(full, ContinuousPrediction)
    assert isinstance(early, ContinuousPrediction)
    ratio = full.variance / early.variance
    shift = (full.mean - early.mean) ** 2 / early.variance
    return np.asarray(0.5 * (ratio + shift - 1 - np.log(ratio)).sum(axis=1))


def _fit_gain(features: Array, gain: Array) -> GainModel:
    """Log-linear regression of gains (n,) on centred features (n, F), by Newton's method with a small ridge."""
    center, scale = np.zeros(features.shape[1]), features.std(axis=0)
    scale = np.where(scale > _SMALL, scale, 1e12)  # a constant says nothing
    mean = max(float(gain.mean()), _SMALL)
    design = _design(features, center, scale)
    ridge = np.eye(design.shape[1])
    coefficients = np.zeros(design.shape[1])
    for _ in range(50):
        rate = np.exp(design @ coefficients)
        gradient = design.T @ (gain / mean - rate) - ridge @ coefficients
        step = np.linalg.solve((design.T * rate) @ design + ridge, gradient)
        step *= min(1.0, 1.0 / max(float(np.abs(design @ step).max()), _SMALL))
        coefficients += step
        if np.abs(step).max() < _SMALL:
            break
    coefficients[0] += np.log(mean)
    return GainModel(center, scale, coefficients)


def _expected_gain(model: GainModel, features: Array) -> Array:
    return np.asarray(np.exp(np.clip(_design(features, model.center, model.scale) @ model.coefficients, -50, 10)))


def _design(features: Array, center: Array, scale: Array) -> Array:
    """One, standardised features and their squares; beyond four standard deviations they are held."""
    standard = np.clip((features - center) / scale, -4, 4)
    return np.column_stack([np.ones(len(features)), standard, standard**2])


def _with_passes(prediction: Prediction, passes: Array) -> SequentialCategorical | SequentialContinuous:
    if isinstance(prediction, CategoricalPrediction):
        return SequentialCategorical(prediction.proba, prediction.mutual_information, prediction.classes, passes)
    return SequentialContinuous(prediction.weights, prediction.dof, prediction.location, prediction.scale, passes)
