"""conformalize: prediction sets and intervals that cover with a stated probability, whatever the policy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import one_of, shown, whole_number
from vbtta._support.files import fields_from_plain, from_plain
from vbtta.crossval import check_units, folds_of
from vbtta.data.labels import Array, LabelSets, by_id, is_absent
from vbtta.data.predictions import Rows, ViewPredictions, require_views, row_hashes
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction, merge
from vbtta.fit import refit
from vbtta.models.base import InMemory
from vbtta.policy import Policy, Saved
from vbtta.sequential import SequentialPolicy

METHODS = ("lac", "aps", "raps", "distributional")
_CONSENSUS_NODES = 20  # quantiles that stand for the truth's distribution in a regression
_PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)  # of RAPS, as its authors try them
_TUNING_SHARE = 0.2  # of the calibration units, for the two parameters of RAPS
_MAX_SHARED = 0.01  # share of rows known from the fit that may be chance: equal inputs

Method = Literal["lac", "aps", "raps", "distributional"]


class Penalty(NamedTuple):
    """RAPS adds `strength` to the score for every class ranked beyond `rank`."""

    strength: float
    rank: float


_NO_PENALTY = Penalty(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class ConformalPolicy(Saved):
    """A policy whose sets or intervals cover the label with a stated probability; made by :func:`conformalize`."""

    _format = "vbtta-conformal", "conformal policy"

    policy: Any  # Policy, SequentialPolicy or another predictor
    method: Method
    levels: Annotated[Array, "L"]  # probabilities of coverage
    covers: str  # the next "label", or the "truth" behind noisy labels
    thresholds: Annotated[Array, "S T L"]  # largest score inside, by stratum, output (one of classes) and level
    n_units: Annotated[Array, "S"]  # calibration inputs, or groups, of every stratum; labels have shares
    strata: tuple[str, ...] | None = None  # their names; the classes where `by_class`
    by_class: bool = False
    one_level: bool = False
    penalty: Penalty = _NO_PENALTY

    def __post_init__(self) -> None:
        if self.thresholds.ndim != 3 or self.thresholds.shape[2] != len(self.levels) or not len(self.levels):
            raise ValueError("its thresholds do not match its levels")
        names = self.strata or ("",)
        ordered = len(set(names)) == len(names) if self.by_class else list(names) == sorted(set(names))
        if not len(self.thresholds) == len(self.n_units) == len(names) or not ordered:
            raise ValueError("its thresholds do not match its strata")
        one_of("method", self.method, METHODS)
        one_of("covers", self.covers, ("label", "truth"))
        inside = np.all((self.levels > 0) & (self.levels < 1)) and (len(self.levels) == 1 or not self.one_level)
        if not inside or self.penalty.strength < 0 or np.any(self.n_units < 0):
            raise ValueError("its levels, penalty or numbers of inputs are damaged")

    def __repr__(self) -> str:
        levels = ", ".join(f"{level:g}" for level in self.levels)
        return f"ConformalPolicy({self.method}, covers the {self.covers} at {levels}, {self.policy!r})"

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The predictive distribution of the policy itself."""
        return self.policy.predict(predictions)  # type: ignore[no-any-return]

    def predict_set(self, predictions: ViewPredictions, *, strata: ArrayLike | None = None) -> Array:
        """Which classes are in the set of every input: (N, C) booleans, (N, C, L) for several levels."""
        prediction = self.policy.predict(predictions)
        if not isinstance(prediction, CategoricalPrediction):
            raise ValueError("predict_set is for classes, and this policy predicts numbers; use predict_interval")
        score = class_scores(prediction.proba, self.method, self.penalty)
        stratum, thresholds = self._stratum(strata, predictions), self.thresholds[:, 0]  # (N,), (S, L)
        largest = thresholds[None] if self.by_class else thresholds[stratum][:, None]
        inside = score[:, :, None] <= largest + 1e-12  # probabilities of another batch differ in the last digits
        return inside[:, :, 0] if self.one_level else inside

    def predict_interval(self, predictions: ViewPredictions, *, strata: ArrayLike | None = None) -> tuple[Array, Array]:
        """Lower and upper limits of every input and output: (N, C) each, (N, C, L) for several levels."""
        prediction = self.policy.predict(predictions)
        if not isinstance(prediction, ContinuousPrediction):
            raise ValueError("predict_interval is for numbers, and this policy predicts classes; use predict_set")
        stratum = self._stratum(strata, predictions)
        limits = np.empty((2, *prediction.mean.shape, len(self.levels)))
        for s, output, place, side in np.ndindex(*self.thresholds.shape, 2):
            rows, sign = stratum == s, 2 * side - 1
            q = 0.5 + sign * float(self.thresholds[s, output, place])
            values = prediction.take(rows).quantile(q)[:, output] if 0 < q < 1 else sign * np.inf
            limits[side, rows, output, place] = values
        lower, upper = limits[..., 0] if self.one_level else limits
        return lower, upper

    def columns(self, predictions: ViewPredictions, levels: Sequence[float]) -> dict[str, Array]:
        """A table with one row an input: classes of its sets, bars between them, and their number; or limits."""
        places = [self.levels.tolist().index(level) for level in levels]
        selection = replace(self, levels=self.levels[places], thresholds=self.thresholds[..., places], one_level=False)
        table: dict[str, Array] = {}
        if self.method != "distributional":
            sets = selection.predict_set(predictions)
            names = np.asarray(self.policy.predict(predictions.take(slice(0, 1))).classes, dtype=str)
            for place, level in enumerate(levels):
                table[f"set_{level:g}"] = np.array(["|".join(names[row]) for row in sets[:, :, place]])
                table[f"size_{level:g}"] = sets[:, :, place].sum(axis=1)
            return table
        for name, limits in zip(("lower", "upper"), selection.predict_interval(predictions), strict=True):
            ends = [f"_{c + 1}" for c in range(limits.shape[1])] if limits.shape[1] > 1 else [""]
            for (c, end), (place, level) in product(enumerate(ends), enumerate(levels)):
                table[f"{name}_{level:g}{end}"] = limits[:, c, place]
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy with its thresholds as human-readable JSON, atomically."""
        if not isinstance(self.policy, Policy | SequentialPolicy):
            raise ValueError(f"a ConformalPolicy of {type(self.policy).__name__} cannot be saved; use a Policy")
        super().save(path)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """What a file says; raises ValueError or KeyError where it is damaged."""
        policy: Any = from_plain(SequentialPolicy if "policies" in data["policy"] else Policy, data["policy"])
        n_thresholds = unwrapped(policy)[0].n_outputs if data["method"] == "distributional" else 1
        return replace(fields_from_plain(cls, data, {"T": n_thresholds}), policy=policy)

    def _stratum(self, strata: ArrayLike | None, predictions: ViewPredictions) -> Array:
        """The stratum of every row by its place."""
        if self.strata is None or self.by_class:
            if strata is not None:
                raise ValueError("strata were not given to conformalize as an array, so predictions take none")
            return np.zeros(len(predictions), dtype=np.intp)
        if strata is None:
            raise ValueError(f"strata must be given: the stratum of every input, one of {shown(self.strata)}")
        names = _stratum_names(strata, predictions)
        if len(unknown := np.setdiff1d(names, self.strata)):
            known = shown(self.strata)
            raise ValueError(f"strata has {shown(unknown[0])}, which was not in the calibration sample: {known}")
        return np.searchsorted(np.array(self.strata), names)  # they are sorted


def load_policy(path: str | os.PathLike[str]) -> Policy | SequentialPolicy | ConformalPolicy:
    """Read a policy of any kind, by the format that its file names."""
    kinds: dict[str, Any] = {kind._format[0]: kind for kind in (ConformalPolicy, SequentialPolicy)}
    kind = ""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError), open(path, encoding="utf-8") as file:
        kind = str(json.load(file)["format"])
    return kinds.get(kind, Policy).load(path)  # type: ignore[no-any-return]  # load says what is wrong


def unwrapped(policy: Any) -> tuple[Policy, SequentialPolicy | None, ConformalPolicy | None]:
    """The policy of all views in a policy of any kind, and the sequential and the conformal one around it."""
    conformal = policy if isinstance(policy, ConformalPolicy) else None
    inner: Any = policy if conformal is None else conformal.policy
    sequential = inner if isinstance(inner, SequentialPolicy) else None
    return inner if sequential is None else sequential.policies[-1], sequential, conformal


def conformalize(
    policy: Any,
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike,
    *,
    level: float | Sequence[float] = 0.9,
    method: Method | None = None,
    strata: Literal["class"] | ArrayLike | None = None,
    cross: bool = False,
    covers: Literal["label", "truth"] = "label",
    seed: int = 0,
) -> ConformalPolicy:
    """Calibrate prediction sets or intervals that cover a new input's label with probability `level` or more.

    Split conformal prediction: the threshold is the ceil((n + 1) level)-th smallest score of n calibration inputs. The
    guarantee holds on average over inputs like those of the calibration sample, in finite samples and whatever the
    policy is worth; a better policy gives smaller sets. Of several labels of an input each counts with its share, so
    that one drawn at random is covered.

    Parameters
    ----------
    policy : Policy, SequentialPolicy or any other object with their `predict`
    predictions : ViewPredictions
        Inputs that the policy was not fitted to. Rows of a group are one draw: a row drawn from a new group is covered.
    labels : LabelSets or array
        Their labels. Instance weights make an input count more; a new input counts as the average one.
    level : float or several
        Probability of coverage.
    method : {"lac", "aps", "raps", "distributional"}, optional
        Classification: "lac" (default; 1 - p_y, the smallest sets), "aps" (probability of the classes above y, so that
        hard inputs get larger sets) or "raps" ("aps" with a penalty on far ranks, tuned on a fifth of the sample).
        Sets of the last two always hold the most probable class. Regression: "distributional",
        |F(y) - 1/2| of the predictive distribution, so that intervals are as wide and asymmetric as that is.
    strata : "class" or (N,) array, optional
        Coverage within every class, or within every stratum of inputs; the latter need theirs for predictions too.
    cross : bool
        Whether `predictions` are the policy's own calibration sample. The policy's specification is then refitted to
        folds, by groups where there are groups, for held-out scores; coverage is approximate, since the policy
        itself has seen all folds.
    covers : {"label", "truth"}
        With "truth" the scores of all values are weighted by the policy's consensus of the truth given the labels
        (`policy.consensus`): sets cover the truth behind noisy labels as far as that consensus is calibrated.
    seed : int
        Decides the folds, and the part that tunes "raps".
    """
    levels = np.atleast_1d(np.asarray(level))
    if levels.dtype.kind != "f" or levels.ndim != 1 or not len(levels) or not np.all((levels > 0) & (levels < 1)):
        raise ValueError(f"level must be between 0 and 1, such as 0.9, or several such numbers; got {shown(level)}")
    levels = levels.astype(np.float64)
    one_of("covers", covers, ("label", "truth"))
    one_of("cross", cross, (True, False))
    whole_number("seed", seed, 0)
    require_views(predictions)
    if not hasattr(policy, "predict"):
        raise TypeError(f"policy must be a Policy, a SequentialPolicy or have their predict; got {shown(policy)}")
    if getattr(policy, "multilabel", False):
        raise ValueError("policy predicts several labels an input, of which sets are not defined; use one label each")
    labels = predictions.align(labels)
    if not len(labels):
        raise ValueError("labels are empty: conformalize needs at least one labelled input")
    rows, prediction, inputs, weight, value = _calibration(policy, predictions, labels, cross, covers, seed)
    categorical = isinstance(prediction, CategoricalPrediction)
    method = method or ("lac" if categorical else "distributional")
    one_of("method", method, METHODS[:3] if categorical else METHODS[3:])
    units = rows if predictions.groups is None else predictions.groups[rows]  # (n,)
    penalty, tuning = _NO_PENALTY, np.zeros(len(rows), dtype=bool)
    if isinstance(prediction, CategoricalPrediction):
        if method == "raps":
            shuffled = np.random.default_rng(seed).permutation(np.unique(units))
            tuning = np.isin(units, shuffled[: int(_TUNING_SHARE * len(shuffled))])
            used = tuning[inputs]
            penalty = _tune(prediction.proba, tuning, inputs[used], weight[used], value[used], levels)
        scores = class_scores(prediction.proba, method, penalty)[inputs, value][:, None]
    else:
        scores = np.abs(prediction.take(inputs).cdf(value) - 0.5)  # (J, C)
    names: tuple[str, ...] = ("",)
    stratum = np.zeros(len(inputs), dtype=np.intp)
    by_class = isinstance(strata, str) and strata == "class"
    if by_class:
        if not isinstance(prediction, CategoricalPrediction):
            raise ValueError("strata='class' is for classification; give an array with the stratum of every input")
        names, stratum = tuple(map(str, prediction.classes)), value
    elif strata is not None:
        known, stratum = np.unique(_stratum_names(strata, predictions)[rows[inputs]], return_inverse=True)
        names = tuple(known.tolist())
    thresholds, n_units, highest = [], [], float(levels.max())
    needed = highest / (1 - highest) * (1 - 1e-9)  # n + 1 >= 1 / (1 - level)
    for place, name in enumerate(names):
        inside = ~tuning[inputs] & (stratum == place)
        _, unit = np.unique(units[inputs[inside]], return_inverse=True)
        counts = weight[inside] / np.maximum(np.bincount(unit, weight[inside]), 1)[unit]  # those of a unit sum to 1
        n_units.append(float(counts.sum()))
        if n_units[-1] < needed:
            where = f"stratum {name!r} has" if name else "there are"
            raise ValueError(
                f"level {highest:g} needs at least {int(np.ceil(needed))} labelled calibration inputs, or groups of "
                f"them, and {where} {n_units[-1]:.4g}; give more, or a lower level"
            )
        if labels.instance_weights is not None:
            counts = counts * labels.instance_weights[rows[inputs[inside]]]
            counts *= n_units[-1] / counts.sum()
        thresholds.append([_smallest_covering(column, counts, levels) for column in scores[inside].T])
    calibrated = np.array(thresholds), np.array(n_units), None if strata is None else names
    return ConformalPolicy(policy, method, levels, covers, *calibrated, by_class, np.ndim(level) == 0, penalty)


def class_scores(proba: Array, method: str, penalty: Penalty = _NO_PENALTY) -> Array:
    """Scores of all classes, the larger the less they conform, as :func:`conformalize` defines them: (N, C)."""
    if method == "lac":
        return np.asarray(1 - proba)
    order = np.argsort(-proba, axis=1, kind="stable")
    ordered = np.take_along_axis(proba, order, axis=1)
    above = np.cumsum(ordered, axis=1) - ordered
    above += penalty.strength * np.maximum(np.arange(1, proba.shape[1] + 1) - penalty.rank, 0)
    return np.take_along_axis(above, np.argsort(order, axis=1), axis=1)


def _calibration(
    policy: Any, predictions: ViewPredictions, labels: LabelSets, cross: bool, covers: str, seed: int
) -> tuple[Array, Prediction, Array, Array, Array]:
    """Labelled rows (n,), their predictions by policies that were not fitted to them, and the values to be covered."""
    held_out: list[tuple[Any, Array]] = [(policy, labels.labelled)]
    if cross:
        if not isinstance(policy, Policy | SequentialPolicy):
            raise ValueError(f"cross=True refits a Policy or a SequentialPolicy; got {type(policy).__name__}")
        check_units(labels, predictions.groups, "cross=True finds thresholds", "other rows, with cross=False")
        fit = policy.refit if isinstance(policy, SequentialPolicy) else partial(refit, policy)
        sample, folds = InMemory(predictions, labels), folds_of(predictions, labels, seed)
        held_out = [(fit(sample.take(train)), held) for train, held in folds]
    elif shared := shared_rows(getattr(unwrapped(policy)[0], "rows", Rows()), predictions.take(labels.labelled)):
        remedy = "give other rows, or cross=True (vbtta fit --sets) for the calibration sample itself"
        raise ValueError(f"predictions hold rows that the policy was fitted to ({shared}); {remedy}")
    parts, values, start = [], [], 0
    for predictor, rows in held_out:
        views, sets = predictions.take(rows), labels.take(rows)
        prediction = predictor.predict(views)
        parts.append((np.arange(start, start + len(rows)), prediction))
        inputs, weight = sets.instance, sets.count / np.bincount(sets.instance, sets.count)[sets.instance]
        if covers == "truth":
            inputs, weight, value = _truth(predictor, views, sets)
        elif isinstance(prediction, CategoricalPrediction):
            value = sets.categorical(prediction.proba.shape[1], prediction.classes)
        else:
            value = sets.continuous(prediction.mean.shape[1])
        values.append((inputs + start, weight, value))
        start += len(rows)
    inputs, weight, value = (np.concatenate(arrays) for arrays in zip(*values, strict=True))
    return np.concatenate([rows for _, rows in held_out]), merge(parts, start), inputs, weight, value


def _truth(predictor: Any, views: ViewPredictions, labels: LabelSets) -> tuple[Array, Array, Array]:
    """Inputs (J,), weights (J,) that sum to 1 an input, and values of the consensus."""
    if not hasattr(predictor, "consensus"):
        raise ValueError(f"covers='truth' needs a policy with a consensus; got {type(predictor).__name__}")
    truth: Prediction = predictor.consensus(views, labels)
    if isinstance(truth, CategoricalPrediction):
        inputs, position = np.nonzero(truth.proba)
        return inputs, truth.proba[inputs, position], position
    nodes = (np.arange(_CONSENSUS_NODES) + 0.5) / _CONSENSUS_NODES
    inputs = np.tile(np.arange(len(views)), _CONSENSUS_NODES)
    value = truth.quantile(nodes).reshape(len(inputs), -1)  # (Q, N, C) before
    return inputs, np.full(len(inputs), 1 / _CONSENSUS_NODES), value


def shared_rows(known: Rows, predictions: ViewPredictions) -> str:
    """Number of rows known from a fit, in words; empty where it may be chance. Rows that occur twice do not count."""
    if not known.hashes or not set(known.views) <= set(predictions.names):
        return ""
    hashes = known.hashes, row_hashes(predictions.select(known.views).outputs)
    counted = [np.unique(np.array(side), return_counts=True) for side in hashes]
    sides = [values[times == 1] for values, times in counted]
    n_shared = len(np.intersect1d(*sides))
    return f"at least {n_shared} of {len(predictions)}" if n_shared > _MAX_SHARED * min(map(len, sides)) else ""


def _smallest_covering(score: Array, weight: Array, levels: Array) -> list[float]:
    """The smallest scores below which a share `level` of the weights lies, with weight 1 at infinity: (L,)."""
    order = np.argsort(score, kind="stable")
    below = np.cumsum(weight[order])
    needed = levels * (below[-1] + 1)
    place = np.searchsorted(below, needed * (1 - 1e-12))
    return [float(value) for value in score[order][np.minimum(place, len(order) - 1)]]


def _stratum_names(strata: ArrayLike, predictions: ViewPredictions) -> Array:
    """The stratum of every row: (N,) strings."""
    names = np.asarray(by_id(strata, predictions.ids, "strata", "the predictions"))
    if names.shape != (len(predictions),):
        raise ValueError(f"strata must be 'class' or {len(predictions)} names, one an input; got shape {names.shape}")
    if (absent := is_absent(names)).any():
        raise ValueError(f"strata must be known for every input; that of row {int(absent.argmax())} is missing")
    return names.astype(str)


def _tune(proba: Array, tuning: Array, inputs: Array, weight: Array, position: Array, levels: Array) -> Penalty:
    """RAPS's rank, which covers at the highest level, and the strength with the smallest sets on average."""
    if not tuning.any():
        raise ValueError("method 'raps' is tuned on a fifth of the calibration inputs, which are too few; use 'aps'")
    ranks = 1.0 + (proba[inputs] > proba[inputs, position][:, None]).sum(axis=1)
    rank = max(_smallest_covering(ranks, weight, levels))

    def size(penalty: Penalty) -> int:
        scores = class_scores(proba, "raps", penalty)
        largest = _smallest_covering(scores[inputs, position], weight, levels)
        return int((scores[tuning][:, :, None] <= np.array(largest)).sum())

    return min((Penalty(strength, rank) for strength in _PENALTIES), key=size)
