"""Public functions with arrays and options that are wrong in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.base import Family, Rng, check, check_finite, odd_array, pick, scalar
from vbtta import LabelSets, ViewPredictions, metrics


def _maybe(rng: Rng, value: Any, chance: float = 0.3) -> Any:
    return value if rng.random() < chance else None


def labels(rng: Rng, folder: Path) -> str:
    """Labels of arrays, tables, counts and rankings are refused or usable."""
    n = int(rng.integers(0, 7))
    way = int(rng.integers(5))
    shape = pick(rng, ((n,), (n, 2), (n, 2, 2)))
    if way == 0:
        people = _maybe(rng, pick(rng, ("columns", ["a", "b"], 3)), 0.2)
        labels = LabelSets.from_array(odd_array(rng, shape), missing=_maybe(rng, scalar(rng), 0.2), annotators=people)
    elif way == 1:
        instance = pick(rng, (np.arange(n), odd_array(rng, (n,)), [f"i{k}" for k in range(n)]))
        labels = LabelSets.from_table(
            instance,
            odd_array(rng, (n,)),
            _maybe(rng, odd_array(rng, (n,))),
            _maybe(rng, odd_array(rng, (n,))),
            _maybe(rng, scalar(rng), 0.2),
        )
    elif way == 2:
        labels = LabelSets.from_counts(odd_array(rng, (n, 3)))
    elif way == 3:
        labels = LabelSets.from_rankings(
            pick(rng, (odd_array(rng, (n, 3)), [odd_array(rng, (2,)) for _ in range(n)])),
            _maybe(rng, odd_array(rng, (n,))),
        )
    else:
        columns = {name: odd_array(rng, (n,)) for name in ("label", "instance", "annotator", "count", "instance_weight")
                   if rng.random() < 0.6 or name == "label"}  # fmt: skip
        labels = LabelSets.from_table(columns)
    check_finite("labels", labels.value, labels.count)
    check(labels.value.dtype.kind in "iufbU", f"labels of dtype {labels.value.dtype}")
    check((labels.count >= 0).all() and labels.n_instances >= 0, "counts below zero")
    return _use(rng, labels)


def _use(rng: Rng, labels: LabelSets) -> str:
    """What a fit asks of labels: each is refused or finite."""
    n = min(labels.n_instances, 50)
    ids = pick(rng, (None, None, np.arange(n), np.array([f"i{k}" for k in range(n)])))
    try:
        aligned = labels.align(n, ids)
        form = int(rng.integers(3))
        if form == 0:
            check_finite("numbers", aligned.continuous(int(rng.integers(1, 3))))
        elif form == 1:
            positions = aligned.categorical(3, _maybe(rng, np.array(["a", "b", "c"])))
            check(((positions >= 0) & (positions < 3)).all(), "a class out of range")
        else:
            aligned.rankings(3)
        aligned.take(np.arange(n // 2))
    except ValueError:
        return "built, refused in use"
    return "built and used"


def predictions(rng: Rng, folder: Path) -> str:
    """View predictions of odd arrays, names, ids, classes, groups and features."""
    n, k, c = (int(size) for size in rng.integers(0, 5, size=3))
    outputs = rng.normal(size=(n, k, c)) if rng.random() < 0.6 else odd_array(rng, (n, k, c))
    shapes = {"variance": (n, k, c), "names": (k,), "ids": (n,), "classes": (c,), "groups": (n,), "draws": (n, k, 2, c),
              "features": (n, k, 2), "feature_names": (2,)}  # fmt: skip
    options = {name: odd_array(rng, shape) for name, shape in shapes.items() if rng.random() < 0.25}
    if rng.random() < 0.05:
        options["fingerprints"] = scalar(rng)
    predictions = ViewPredictions(outputs, **options)
    check_finite("outputs", predictions.outputs, *([] if predictions.variance is None else [predictions.variance]))
    path = folder / pick(rng, ("views.npz", "views.parquet"))
    if path.suffix == ".parquet" and predictions.features is not None:
        return "built"
    try:
        predictions.save(path)
    except ValueError:
        return "built, refused by its format"
    if len(predictions) or path.suffix == ".npz":
        again = ViewPredictions.load(path)
        check(
            np.array_equal(again.outputs, predictions.outputs) and again.names == predictions.names,
            "differs after saving",
        )
    return "built and saved"


def choices(rng: Rng, folder: Path) -> str:
    """take, select, concat and align of predictions with odd arguments."""
    predictions = ViewPredictions(rng.normal(size=(6, 3, 2)), names=["identity", "a", "b"], ids=range(6))
    way = int(rng.integers(5))
    if way == 0:
        predictions.select(pick(rng, (scalar(rng), odd_array(rng, (2,)), ["a", "a"], [], ["identity"])))
    elif way == 1:
        predictions.concat(
            pick(rng, (scalar(rng), [scalar(rng)], predictions, [predictions.select(["a"])])),
            axis=pick(rng, ("inputs", "views", 0, None)),
        )
    elif way == 2:
        predictions.with_groups(odd_array(rng, (6,)))
    elif way == 3:
        predictions.align(odd_array(rng, (6,)))
    else:
        LabelSets.from_array(np.arange(6.0)).with_weights(odd_array(rng, (6,)))
    return "used"


_METRICS: dict[str, tuple[tuple[int, ...], ...]] = {
    "mse": ((5,), (5,)), "mae": ((5,), (5,)), "nll": ((5,),), "crps": ((5,),), "interval_coverage": ((5,), (5,), (5,)),
    "accuracy": ((5,), (5, 3)), "brier": ((5,), (5, 3)), "ece": ((5,), (5, 3)), "dice": ((2, 4, 4), (2, 4, 4)),
    "iou": ((2, 4, 4), (2, 4, 4)), "average_precision": ((5,), (5,)),
}  # fmt: skip


def scores(rng: Rng, folder: Path) -> str:
    """Metrics: a number or an error; NaN only where NaN went in."""
    name = pick(rng, sorted(_METRICS))
    arguments = []
    for place, shape in enumerate(_METRICS[name]):
        good = rng.integers(0, 3, size=shape) if place == 0 else rng.random(shape)
        arguments.append(good if rng.random() < 0.4 else odd_array(rng, shape))
    with np.errstate(all="ignore"):
        value = getattr(metrics, name)(*arguments)
    check(isinstance(value, float | int | np.floating), f"{name} returned {type(value).__name__}")
    return "a number" if np.isfinite(value) else "a number that is not finite"


FAMILIES = (
    Family("label arrays and columns", labels, 0.13),
    Family("prediction arrays", predictions, 0.08),
    Family("choices of inputs and views", choices, 0.03),
    Family("metrics", scores, 0.05),
)
