"""Does it help? Methods x metrics on a test set, with paired bootstrap intervals.

Every metric is a function of sums over instances, so a resample of instances is a matrix product.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta import metrics, plotting
from vbtta._support.checks import between, one_of, require, shown, whole_number
from vbtta._support.tensors import Progress
from vbtta.baselines import BASELINES, fit_baseline
from vbtta.baselines.methods import normal_prediction, residual_variance
from vbtta.conformal import conformalize, shared_rows, unwrapped
from vbtta.data.labels import Array, LabelSets, class_positions
from vbtta.data.predictions import Rows, ViewPredictions, draws_of, require_views, row_hashes
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction
from vbtta.fit import fit_policy
from vbtta.models.base import InMemory
from vbtta.sequential import fit_sequential

METRICS = {
    "classification": ("accuracy", "nll", "brier", "ece"),
    "regression": ("mse", "mae", "nll", "crps", "coverage"),
}
BY_IMAGE = ("dice", "iou")  # further metrics of classification, where instances have groups
_MODELS: dict[str, Any] = {"vbtta": "auto", "vbtta-mixture": "mixture", "vbtta-latent": "latent"}
_POLICIES: dict[str, Any] = {name: partial(fit_policy, model=model) for name, model in _MODELS.items()}
_POLICIES["vbtta-sequential"] = fit_sequential
COVERAGE_LEVEL = 0.9
_LARGER_IS_BETTER = ("accuracy", *BY_IMAGE)
_WITH_TEMPERATURE = ("original", "uniform", "greedy")
_BINS = 15
_CELLS = 1 << 22  # of the largest block of resampled counts
_MAX_HASHED = 2048  # training rows that are looked for in the test sample


class Difference(NamedTuple):
    """Every method minus one of them, with intervals."""

    reference: str
    value: Array  # (methods, metrics)
    low: Array  # (methods, metrics)
    high: Array  # (methods, metrics)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods x metrics on one test set; made by :func:`vbtta.comparison.compare`."""

    task: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Array  # (methods, metrics)
    against_original: Difference | None  # from the identity view alone, with paired bootstrap intervals
    against_best: Difference | None  # likewise from the baseline with the best test NLL
    fit_seconds: Array  # (methods,): 0 for methods that were fitted already
    views_used: Array  # (methods,)
    forward_passes: Array  # (methods,): draws summed over the views used, on average where methods stop early
    n_instances: int  # test instances with a label
    n_labels: float
    level: float  # of the intervals
    notes: tuple[str, ...]
    fitted: dict[str, Any]  # the fitted methods by name

    def __repr__(self) -> str:
        return f"Comparison({self.task}: {len(self.methods)} methods on {self.n_instances:,} instances)"

    def __str__(self) -> str:
        """The values as a plain table, the best likelihood first, with the difference from no augmentation."""
        reference = None if self.against_original is None else self.against_original.reference
        return "\n".join([repr(self), *aligned(table_cells(self.to_records(), self.metrics, reference))])

    def __getitem__(self, key: tuple[str, str]) -> float:
        """One value by method and metric: ``comparison["uniform", "nll"]``."""
        method, metric = key
        for name, known in ((method, self.methods), (metric, self.metrics)):
            if name not in known:
                raise KeyError(f"{name!r} is not in the comparison; there are {', '.join(known)}")
        return float(self.values[self.methods.index(method), self.metrics.index(metric)])

    @property
    def references(self) -> dict[str, Difference]:
        """The differences that there are, by "original" and "best"."""
        pairs = (("original", self.against_original), ("best", self.against_best))
        return {name: difference for name, difference in pairs if difference is not None}

    def to_records(self) -> list[dict[str, Any]]:
        """One dictionary of plain values a method, for JSON."""
        tables = {"": self.values}
        for name, difference in self.references.items():
            tables |= dict(zip([f"_minus_{name}{end}" for end in ("", "_low", "_high")], difference[1:], strict=True))
        fields = {f"{metric}{end}": tables[end][:, s] for s, metric in enumerate(self.metrics) for end in tables}
        fields |= {name: getattr(self, name) for name in ("fit_seconds", "views_used", "forward_passes")}
        columns = [self.methods, *(values.tolist() for values in fields.values())]
        return [dict(zip(["method", *fields], row, strict=True)) for row in zip(*columns, strict=True)]

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row a method, columns as in :meth:`to_records`."""
        return require("pandas", "cli").DataFrame(self.to_records()).set_index("method")

    def to_markdown(self) -> str:
        """The values, best in bold, then the differences with their intervals."""
        records = self.to_records()
        parts = [_markdown_table(table_cells(records, self.metrics, bold=True))]
        for name, difference in self.references.items():
            intervals = f"{100 * self.level:g} % paired bootstrap intervals (bold where they exclude 0)"
            rows = [
                [record["method"], *(change_text(record, metric, name, bold=True) for metric in self.metrics)]
                for record in records
                if record["method"] != difference.reference
            ]
            table = _markdown_table([["method", *map(metric_title, self.metrics)], *rows])
            parts += [f"Minus `{difference.reference}`, with {intervals}:", table]
        return "\n\n".join([*parts, " ".join(closing_sentences(self.n_labels, self.n_instances, self.notes))]) + "\n"

    def plot(self, metric: str = "nll", against: str = "best") -> Any:
        """A matplotlib Figure: every method's difference in one metric from "best" or "original", with its interval."""
        for argument, name, known in (("metric", metric, self.metrics), ("against", against, self.references)):
            if name not in known:
                raise ValueError(f"{argument} must be one of {', '.join(known) or 'none here'}; got {name!r}")
        s = self.metrics.index(metric)
        order = np.argsort(metric_loss(metric, self.values[:, s]), kind="stable")  # the best on top
        reference, *tables = self.references[against]
        value, low, high = (table[order, s] for table in tables)
        names = [f"{self.methods[m]}  ({self.values[m, s]:.4g})" for m in order]
        better = "larger" if metric in _LARGER_IS_BETTER else "smaller"
        better = "nearer the level" if "coverage" in metric else better
        title = f"{metric_title(metric)} minus {reference} ({better} is better)"
        return plotting.differences(names, value, low, high, title)


def compare(
    train_predictions: ViewPredictions,
    train_labels: LabelSets | ArrayLike,
    test_predictions: ViewPredictions,
    test_labels: LabelSets | ArrayLike,
    *,
    task: str,
    methods: Sequence[Any] | Mapping[str, Any] | None = None,
    metrics: Sequence[str] = (),
    background: Any = None,
    resamples: int = 2000,
    level: float = 0.95,
    sets: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Compare ways to aggregate views: fitted on one sample, scored on another.

    Classification: accuracy, negative log-likelihood, Brier score and expected calibration error; regression: squared
    and absolute error, negative log-likelihood, CRPS and the coverage of 90 % intervals. Every test label counts as
    often as its count. Differences have percentile intervals from a paired bootstrap over test instances, or over the
    groups of the test predictions (images, patients) where there are any.

    Parameters
    ----------
    train_predictions, test_predictions : ViewPredictions
    train_labels, test_labels : LabelSets or array
    task : "classification" or "regression"
    metrics, background : list of "dice" and "iou"; class, optional
        Overlap by image as further metrics: means over the classes of an image but `background`, then over images. Rows
        are positions of maps and groups their images, as from :func:`vbtta.collect_dense`. The scores are estimates
        from the sampled positions, by their instance weights where they have some; those of whole maps are in
        `vbtta.metrics`.
    methods : list or dict, optional
        Names of baselines (see :func:`vbtta.baselines.fit_baseline`), "vbtta" (:func:`vbtta.fit.fit_policy` with its
        defaults), "vbtta-mixture", "vbtta-latent", "vbtta-sequential" (:func:`vbtta.fit_sequential`); functions of
        (predictions, labels) that return an object with `predict`; or such objects. Their `predict` returns a
        Prediction or an array, (N, C) probabilities or means; means get a normal density of the calibration residuals'
        mean square. By default all names but "vbtta-sequential".
    resamples, level : int, float
        Of the bootstrap and its intervals.
    sets : float, optional
        Level of conformal sets (intervals in regression) whose mean size and coverage are metrics too. For these a
        method is fitted to a random half of the training sample and calibrated on the other; those that are fitted
        already are calibrated on all of it, by cross-conformal prediction where they were fitted to it.
    seed, progress : int, bool
        For the bootstrap and the policies' folds; whether to count the methods that are done.
    """
    one_of("task", task, tuple(METRICS))
    for part in (train_predictions, test_predictions):
        require_views(part)
    between("level", level, 0.01, 0.99)
    by_image = tuple(dict.fromkeys([metrics] if isinstance(metrics, str) else metrics))
    if by_image and (task != "classification" or test_predictions.groups is None or not set(by_image) <= set(BY_IMAGE)):
        known = "'dice' and 'iou', for classes of test_predictions with groups (images, as of collect_dense)"
        raise ValueError(f"metrics may name {known}; got {shown(list(by_image))} for {task}")
    scored_as = (*METRICS[task], *by_image)
    if sets is not None:
        between("sets", sets, 0.01, 0.999)
        scored_as = (*scored_as, f"set_size_{sets:g}", f"set_coverage_{sets:g}")
    resamples = whole_number("resamples", resamples, least=1)
    labels = train_predictions.align(train_labels)
    test = held_out(test_predictions, test_predictions.align(test_labels), task)
    chosen, notes = entries(methods, task, seed), []
    _warn_of_shared_rows(chosen, train_predictions.take(labels.labelled), test_predictions)
    kept = [entry for entry in chosen if entry.baseline not in ("original", "original+t")]
    if "identity" not in train_predictions.names and len(kept) < len(chosen):
        notes.append("no view is named identity, so original is left out")
        chosen = kept
    if not chosen:
        raise ValueError("no method is left to compare: no view is named 'identity', which 'original' needs")

    n_draws = {name: draws_of(test_predictions.fingerprints.get(name, "")) or 1 for name in test_predictions.names}
    names, fitted, sums = [entry.name for entry in chosen], {}, []
    fit_seconds, n_used, forward_passes = np.zeros((3, len(chosen)))
    with Progress("methods", len(chosen), progress) as bar:
        for m, entry in enumerate(chosen):
            start = time.perf_counter()
            method = fitted[entry.name] = fit(entry, train_predictions, labels)
            fit_seconds[m] = time.perf_counter() - start if method is not entry.method else 0.0
            at_test = predict(entry, method, test_predictions, (train_predictions, labels), task)
            scores, used = columns(at_test, test), views_used(method, train_predictions)
            if by_image:
                overlap = _overlap_columns(at_test, test, background)
                scores |= {metric: overlap[metric] for metric in by_image}
            if sets is not None:
                scores |= _set_columns(entry, InMemory(train_predictions, labels), test_predictions, test, sets, seed)
            sums.append(scores)
            n_used[m], forward_passes[m] = len(used), sum(n_draws.get(view, 1) for view in used)
            if hasattr(method, "passes"):  # it stops early
                forward_passes[m] *= np.mean(method.passes(test_predictions)) / max(len(used), 1)
            bar.advance(1)
    values = resampled(sums, test, np.ones((1, test.n_instances)))[0]
    replicates = bootstrap(sums, test, resamples=resamples, seed=seed)
    loss = values[:, METRICS[task].index("nll")]
    original = next((m for m, entry in enumerate(chosen) if entry.baseline == "original"), None)
    best = min((m for m, entry in enumerate(chosen) if entry.baseline), key=lambda m: loss[m], default=None)
    if test_predictions.groups is not None:
        notes.append(f"intervals are over the {test.n_instances:,} groups of the test instances")
    if best is not None:
        notes.append(f"the baseline with the best test NLL is {names[best]}, chosen with hindsight")
    return Comparison(
        task=task,
        methods=tuple(names),
        metrics=scored_as,
        values=values,
        against_original=None if original is None else _difference(names, values, replicates, original, level),
        against_best=None if best is None else _difference(names, values, replicates, best, level),
        fit_seconds=fit_seconds,
        views_used=n_used.astype(int),
        forward_passes=forward_passes,
        n_instances=len(np.unique(test.row)),
        n_labels=float(test.times.sum()),
        level=level,
        notes=tuple(notes),
        fitted=fitted,
    )


def _warn_of_shared_rows(chosen: Sequence[Entry], train: ViewPredictions, test: ViewPredictions) -> None:
    """Test rows that a method was fitted to, here or before."""
    known = {f"{entry.name!r} was": getattr(unwrapped(entry.method)[0], "rows", Rows()) for entry in chosen}
    if any(not hasattr(entry.method, "predict") for entry in chosen):
        subsample = train.take(slice(None, None, -(-len(train) // _MAX_HASHED) or 1))
        known["the methods are"] = Rows(subsample.names, row_hashes(subsample.outputs))
    for subject, rows in known.items():
        if shared := shared_rows(rows, test):
            reason = f"test_predictions hold rows that {subject} fitted to ({shared}), whose scores are too good"
            warnings.warn(f"{reason}; give other rows", stacklevel=3)


class Entry(NamedTuple):
    """A method: its name in the table, how to fit it (or the fitted object), and its baseline's name, if any."""

    name: str
    method: Any
    baseline: str | None


class HeldOut(NamedTuple):
    """The labels of the test instances that have one."""

    row: Array  # (J,) of the predictions
    instance: Array  # (J,) 0..N-1, labelled instances only; where there are groups, groups of them
    y: Array  # (J,) class positions or (J, C) values
    times: Array  # (J,) how often each label was given
    n_instances: int


def _set_columns(
    entry: Entry, sample: InMemory, test_views: ViewPredictions, test: HeldOut, level: float, seed: int
) -> dict[str, Array]:
    """Per-instance sums of the sizes of a method's sets, or widths of its intervals, and of their coverage."""
    rows, groups = sample.labels.labelled, sample.predictions.groups
    fitted, held = entry.method, rows
    if not hasattr(entry.method, "predict"):
        units = rows if groups is None else groups[rows]
        shuffled = np.random.default_rng(seed).permutation(np.unique(units))
        first = np.isin(units, shuffled[: len(shuffled) // 2])
        half = sample.take(rows[first])
        fitted, held = fit(entry, half.predictions, half.labels), rows[~first]
    rest = sample.take(held)
    policy, sequential, _ = unwrapped(fitted)
    cross = bool(shared_rows(getattr(policy, "rows", Rows()), rest.predictions))
    conformal = conformalize(sequential or policy, rest.predictions, rest.labels, level=level, cross=cross, seed=seed)
    if isinstance(fitted.predict(sample.predictions.take(held[:1])), CategoricalPrediction):
        inside = conformal.predict_set(test_views)
        size, covered = inside.sum(axis=1)[test.row], inside[test.row, test.y]
    else:
        lower, upper = (limit[test.row] for limit in conformal.predict_interval(test_views))
        size, covered = (upper - lower).mean(axis=1), ((lower <= test.y) & (test.y <= upper)).mean(axis=1)
    return {f"set_size_{level:g}": _sums(size, test), f"set_coverage_{level:g}": _sums(covered, test)}


def default_methods(task: str) -> list[str]:
    """Every baseline of a task, temperature-scaled ones where calibration alone may be the gain, and the policies."""
    scaled = [f"{name}+t" for name in _WITH_TEMPERATURE] if task == "classification" else []
    return [*BASELINES[task], *scaled, *_MODELS]


def entries(methods: Sequence[Any] | Mapping[str, Any] | None, task: str, seed: int) -> list[Entry]:
    """The methods to run, each under a name of its own."""
    if methods is None:
        methods = default_methods(task)
    if isinstance(methods, str) or not len(methods):
        raise ValueError(f"methods must be a list or a dict of methods; got {methods!r}")
    named = methods.items() if isinstance(methods, Mapping) else [(None, method) for method in methods]
    chosen = [_entry(name, method, task, seed) for name, method in named]
    times = Counter(entry.name for entry in chosen)
    if repeated := sorted(name for name in times if times[name] > 1):
        raise ValueError(f"methods {repeated} occur more than once; give a dict of names and methods")
    return chosen


def fit(entry: Entry, predictions: ViewPredictions, labels: LabelSets) -> Any:
    """The fitted method: an object with `predict` is fitted already."""
    if hasattr(entry.method, "predict"):
        return entry.method
    fitted = entry.method(predictions, labels)
    if not hasattr(fitted, "predict"):
        raise TypeError(f"method {entry.name!r} must return something with .predict; got {type(fitted).__name__}")
    return fitted


def predict(
    entry: Entry, fitted: Any, predictions: ViewPredictions, train: tuple[ViewPredictions, LabelSets], task: str
) -> Prediction:
    """A prediction with a distribution: plain means get a normal density of their calibration residuals."""

    def plain(values: Any, n_rows: int) -> Array:
        array = np.asarray(values, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 and C == 1 else array
        if array.shape != (n_rows, C):
            raise ValueError(f"method {entry.name!r} must predict an array of shape {n_rows, C}; got {array.shape}")
        return array

    prediction, C = fitted.predict(predictions), predictions.outputs.shape[2]
    if isinstance(prediction, CategoricalPrediction | ContinuousPrediction):
        if isinstance(prediction, CategoricalPrediction) != (task == "classification"):
            raise TypeError(f"method {entry.name!r} gives a {type(prediction).__name__}, which is not for {task}")
        outputs = prediction.proba if isinstance(prediction, CategoricalPrediction) else prediction.location[:, 0]
        plain(outputs, len(predictions))
        return prediction
    mean = plain(prediction, len(predictions))
    if task == "classification":
        classes = np.arange(C) if predictions.classes is None else predictions.classes
        return CategoricalPrediction(mean, np.zeros(len(mean)), classes)
    views, labels = train
    y, at_train = labels.continuous(C), plain(fitted.predict(views), len(views))
    return normal_prediction(mean, residual_variance(y - at_train[labels.instance], y, labels.count))


def views_used(fitted: Any, predictions: ViewPredictions) -> tuple[str, ...]:
    """The views a fitted method needs, by name: all of them where it does not say."""
    attributes = ("used", "used_names", *(["names"] if hasattr(fitted, "stages") else []))
    return next((tuple(getattr(fitted, name)) for name in attributes if hasattr(fitted, name)), predictions.names)


def _entry(name: Any, method: Any, task: str, seed: int) -> Entry:
    if isinstance(method, str):
        label = method if name is None else str(name)
        if method in _POLICIES:
            return Entry(label, partial(_POLICIES[method], task=task, seed=seed), None)
        if (method.removesuffix("+t") if task == "classification" else method) in BASELINES[task]:
            return Entry(label, partial(fit_baseline, method, task=task), method)
        known = ", ".join([*BASELINES[task], *_POLICIES])
        raise ValueError(f"there is no {task} method {method!r}; there are {known}")
    kind = type(method).__name__
    if not hasattr(method, "predict") and not callable(method):
        raise TypeError(f"a method is a name, a function of (predictions, labels) or has .predict; got {kind}")
    name = name or getattr(method, "name", None) or getattr(method, "__name__", None) or kind
    return Entry(str(name), method, None)


def held_out(predictions: ViewPredictions, labels: LabelSets, task: str) -> HeldOut:
    """The labels of test predictions, aligned with them already."""
    if not len(labels):
        raise ValueError("test_labels are empty; a comparison needs at least one test label")
    n_outputs = predictions.outputs.shape[2]
    y = labels.categorical(n_outputs, predictions.classes) if task == "classification" else labels.continuous(n_outputs)
    unit = labels.instance if predictions.groups is None else predictions.groups[labels.instance]
    units, instance = np.unique(unit, return_inverse=True)
    return HeldOut(labels.instance, instance, y, labels.count, len(units))


def columns(prediction: Prediction, test: HeldOut) -> dict[str, Array]:
    """Per-instance sums of every metric's scores, by metric: (N, 1), or (N, bins) for the calibration error."""
    y, at_labels = test.y, prediction.take(test.row)
    if isinstance(at_labels, CategoricalPrediction):
        proba = at_labels.proba
        gap, bin_index = metrics.calibration_gaps(y, proba, bins=_BINS)
        return {
            "accuracy": _sums(metrics.hits(y, proba), test),
            "nll": _sums(-np.log(np.maximum(proba[np.arange(len(y)), y], np.finfo(np.float64).tiny)), test),
            "brier": _sums(metrics.brier_scores(y, proba), test),
            "ece": _sums(gap, test, bin_index),
        }
    return {
        "mse": _sums(metrics.squared_errors(y, at_labels.mean), test),
        "mae": _sums(metrics.absolute_errors(y, at_labels.mean), test),
        "nll": _sums(-at_labels.log_prob(y), test),
        "crps": _sums(at_labels.crps(y).mean(axis=1), test),
        "coverage": _sums(metrics.covered(y, *at_labels.interval(COVERAGE_LEVEL)), test),
    }


def _overlap_columns(prediction: Any, test: HeldOut, background: Any) -> dict[str, Array]:
    """Score of every image with a class to score, and how many images that is, by metric: (N, 2)."""
    shape = (test.n_instances, prediction.proba.shape[1])
    left_out = None
    if background is not None:
        left_out = int(class_positions(np.array([background]), shape[1], prediction.classes)[0])
    predicted = prediction.proba.argmax(axis=1)[test.row]
    dice = metrics.class_dice(test.instance, test.y, predicted, test.times, shape)
    means = {"dice": dice, "iou": dice / (2 - dice)}
    by_image = {name: metrics.mean_over_classes(scores, left_out) for name, scores in means.items()}
    return {name: np.stack([np.nan_to_num(mean), ~np.isnan(mean)], axis=1) for name, mean in by_image.items()}


def _sums(scores: Array, test: HeldOut, bin_index: Array | None = None) -> Array:
    width, place = (1, 0) if bin_index is None else (_BINS, bin_index)
    flat = np.bincount(test.instance * width + place, scores * test.times, test.n_instances * width)
    return flat.reshape(test.n_instances, width)


def bootstrap(sums: Sequence[Mapping[str, Array]], test: HeldOut, *, resamples: int, seed: int) -> Array:
    """The metrics of every method on resampled instances, the same for all of them: (resamples, methods, metrics)."""
    generator, size, parts = np.random.default_rng(seed), test.n_instances, []
    at_once = max(1, _CELLS // size)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn = generator.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
        multiplicity = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        parts.append(resampled(sums, test, multiplicity.astype(np.float64)))
    return np.concatenate(parts)


def resampled(sums: Sequence[Mapping[str, Array]], test: HeldOut, multiplicity: Array) -> Array:
    """Metrics where instance n occurs multiplicity[r, n] times: (R, methods, metrics)."""
    total = multiplicity @ np.bincount(test.instance, weights=test.times, minlength=test.n_instances)  # (R,)
    names, tables = zip(*(item for method in sums for item in method.items()), strict=True)
    ends = np.cumsum([table.shape[1] for table in tables])[:-1]
    blocks = np.split(multiplicity @ np.concatenate(tables, axis=1), ends, axis=1)
    values = []
    for name, block in zip(names, blocks, strict=True):
        top = np.abs(block).sum(axis=1) if name == "ece" else block[:, 0]
        values.append(top / (np.maximum(block[:, 1], 1) if name in BY_IMAGE else total))
    return np.stack(values, axis=1).reshape(len(multiplicity), len(sums), -1)


def _difference(names: list[str], values: Array, replicates: Array, reference: int, level: float) -> Difference:
    low, high = np.quantile(replicates - replicates[:, [reference]], [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return Difference(names[reference], values - values[reference], low, high)


def metric_loss(metric: str, value: Array) -> Array:
    """A metric turned so that less is better."""
    if "coverage" in metric:
        return np.abs(value - float(metric.removeprefix("set_").partition("_")[2] or COVERAGE_LEVEL))
    return -value if metric in _LARGER_IS_BETTER else value


def metric_title(metric: str) -> str:
    """The heading of a metric's column."""
    if metric.startswith("set_"):
        _, quantity, level = metric.split("_")
        return f"{quantity} of sets ({100 * float(level):g} %)"
    special = {"coverage": f"coverage ({100 * COVERAGE_LEVEL:g} %)", "dice": "Dice", "iou": "IoU"}
    return special.get(metric, metric if metric in ("accuracy", "brier") else metric.upper())


def best_methods(records: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """The methods with the best value of a metric, as printed; records as in :meth:`Comparison.to_records`."""
    known = [record for record in records if record[metric] is not None]
    loss = metric_loss(metric, np.array([record[metric] for record in known])).round(4)
    return [record["method"] for record, value in zip(known, loss, strict=True) if value == loss.min()]


def change_text(record: Mapping[str, Any], metric: str, reference: str, *, bold: bool = False) -> str:
    """Difference of a method from "original" or "best" with its interval; empty where it is unknown."""
    key = f"{metric}_minus_{reference}"
    if record.get(key) is None:
        return ""
    value, low, high = (record[f"{key}{end}"] for end in ("", "_low", "_high"))
    mark = "**" if bold and (low > 0 or high < 0) else ""
    return f"{mark}{value:+.4f} [{low:+.4f}, {high:+.4f}]{mark}"


def table_cells(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], original: str | None = None, *, bold: bool = False
) -> list[list[str]]:
    """Lines of a table of metrics under its titles, with the difference from `original` or the best values in bold."""
    best = {metric: best_methods(records, metric) if bold else [] for metric in names}
    change = ["NLL minus original"] if original else []
    lines = [["method", *map(metric_title, names), *change, "views", "passes", "fit (s)"]]
    for record in sorted(records, key=lambda record: (record["nll"] is None, record["nll"])):
        method = record["method"]
        values = ["-" if record[metric] is None else f"{record[metric]:.4f}" for metric in names]
        values = [f"**{text}**" if method in best[metric] else text for metric, text in zip(names, values, strict=True)]
        if original:
            values.append("" if method == original else change_text(record, "nll", "original"))
        cost = str(record["views_used"]), f"{record['forward_passes']:.4g}", f"{record['fit_seconds']:.2f}"
        lines.append([method, *values, *cost])
    return lines


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Lines of a plain table: the first column to the left, the others to the right."""
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join([first.ljust(width[0]), *map(str.rjust, rest, width[1:])]) for first, *rest in rows]


def closing_sentences(n_labels: float, n_instances: int, notes: Sequence[str]) -> list[str]:
    """The size of the test set, and the notes."""
    return [f"{n_labels:,g} labels of {n_instances:,} test instances.", *(f"{n[0].upper()}{n[1:]}." for n in notes)]


def _markdown_table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
