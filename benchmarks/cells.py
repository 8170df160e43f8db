"""One method on one data set and seed: fitted, scored on every held-out instance, and kept in the cache.

A cell's key covers all that it depends on: the method, the calibration sample, the predictions, and the source of
the code that fits and scores. What is unchanged is not run again; what has changed is.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import vbtta
from benchmarks.train_models import BENCHMARKS, PARTS, PRETRAINED, Prepared, is_ready, prepare
from vbtta._support.files import atomic_path
from vbtta.comparison import HeldOut, columns, default_methods, entries, fit, held_out, predict, views_used
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_policy
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.policy import Policy
from vbtta.select import select_views
from vbtta.sequential import fit_sequential

__all__ = [
    "HALF",
    "Cell",
    "Task",
    "data_hashes",
    "known_names",
    "load_task",
    "methods_of",
    "run_cells",
    "task_of",
    "tasks",
    "training_seconds",
]

Array = NDArray[Any]
HALF = "vbtta-half"  # select_views with half of the views
INPUT = "vbtta-input"  # the mixture with weights that depend on the input
SEQUENTIAL = "vbtta-sequential"  # fit_sequential with its defaults
CALIBRATION = 1000
# Whose columns of labels are people: simulated ones, and the two sources of ages. CIFAR-10N's are many people's.
_ANNOTATED = ("mnist1000", "utkface", "utkface-light", "utkface-pretrained")
_SHARED = ("data", "distributions.py", "metrics.py", "comparison.py")
_BASELINES = (*_SHARED, "baselines")
_POLICIES = (*_SHARED, "models", "inference", "policy.py", "crossval.py", "fit.py", "select.py", "sequential.py")


class Task(NamedTuple):
    """A data set and seed: what to fit on and what to score on."""

    name: str
    seed: int
    kind: str  # "classification" or "regression"
    calibration: ViewPredictions
    labels: LabelSets
    truth: Array  # of the calibration instances
    test: ViewPredictions
    test_truth: Array


@dataclass(frozen=True)
class Cell:
    """A method's scores: sums of every metric for every held-out instance, and what it cost."""

    method: str
    columns: Mapping[str, Array]
    record: Mapping[str, Any]


def tasks(names: Sequence[str], seeds: Sequence[int], cache: str, *, only_ready: bool) -> Iterator[tuple[str, int]]:
    """Names and seeds to run: all, or those whose networks are trained."""
    for name in names:
        for seed in seeds:
            if not only_ready or is_ready(name, seed, cache):
                yield name, seed


def load_task(
    name: str,
    seed: int,
    data: str,
    cache: str,
    *,
    part: str,
    quick: bool = False,
    size: int = CALIBRATION,
    draw: int = 0,
) -> Task:
    """Calibration sample and held-out part of a data set, from the cache or newly trained."""
    return task_of(prepare(name, seed, data, cache), seed, part=part, quick=quick, size=size, draw=draw)


def task_of(
    prepared: Prepared, seed: int, *, part: str, quick: bool = False, size: int = CALIBRATION, draw: int = 0
) -> Task:
    """Calibration instances with all of their labels, and the held-out part with the true ones."""
    source, target = prepared.parts["calibration"], prepared.parts[part]
    size = min(len(source.predictions), 200 if quick else size)
    generator = np.random.default_rng([seed, size, draw] if draw else [seed, size])
    rows = np.sort(generator.permutation(len(source.predictions))[:size])
    given = [source.labels[key][rows] for key in sorted(source.labels) if key.startswith("label_")]
    people = "columns" if prepared.name in _ANNOTATED else None
    test = np.arange(len(target.predictions))[: 1000 if quick else None]
    return Task(
        prepared.name,
        seed,
        prepared.task,
        source.predictions.take(rows),
        LabelSets.from_array(np.stack(given, axis=1), annotators=people),
        source.labels["clean"][rows],
        target.predictions.take(test),
        target.labels["clean"][test],
    )


def methods_of(kind: str) -> list[str]:
    """Every method of `compare`, and three variants: weights by input, sequential views, half of the views."""
    return [*default_methods(kind), INPUT, SEQUENTIAL, HALF]


def run_cells(task: Task, methods: Sequence[str], cache: str, *, part: str, say: bool = True) -> list[Cell]:
    """Every method's cell, read from the cache or run now."""
    folder = Path(cache) / "quality"
    folder.mkdir(parents=True, exist_ok=True)
    inputs = _digest_task(task)
    test = _held_out(task)
    cells = []
    for method in methods:
        path = folder / f"{task.name}-seed{task.seed}-{part}-{method}-{_key(method, inputs)}.npz"
        if not path.is_file():
            cell = _run(task, method, test)
            _save(path, cell)
            if say:
                record = cell.record
                print(
                    f"{task.name} seed {task.seed} {part}: {method:15s} NLL {record['values']['nll']:.4f} "
                    f"({record['fit_seconds']:.1f} s)",
                    flush=True,
                )
        cells.append(_load(path, method))
    return cells


def data_hashes(name: str, seed: int, cache: str) -> dict[str, str]:
    """SHA-256 of the predictions and labels that were compared."""
    folder = Path(cache) / f"{name}-seed{seed}"
    return {part: hashlib.sha256((folder / f"{part}.npz").read_bytes()).hexdigest() for part in (*PARTS, "labels")}


def training_seconds(name: str, seed: int, cache: str) -> float | None:
    """Processor time of a pretrained network's training, without maps that another network had left."""
    path = Path(cache) / f"{name}-seed{seed}" / "training.json"
    return float(json.loads(path.read_text())["processor_seconds"]) if path.is_file() else None


def _run(task: Task, method: str, test: HeldOut) -> Cell:
    variants: dict[str, Any] = {
        INPUT: partial(fit_policy, model=_by_input(task.kind)),
        SEQUENTIAL: fit_sequential,
        HALF: partial(select_views, budget=task.calibration.outputs.shape[1] // 2),
    }
    known = {name: partial(function, task=task.kind, seed=task.seed) for name, function in variants.items()}
    [entry] = entries({method: known.get(method, method)}, task.kind, task.seed)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit(entry, task.calibration, task.labels)
        seconds = time.process_time() - start
        prediction = predict(entry, fitted, task.test, (task.calibration, task.labels), task.kind)
    sums = columns(prediction, test)
    values = {
        metric: float((table.sum() if table.shape[1] == 1 else np.abs(table.sum(axis=0)).sum()) / test.times.sum())
        for metric, table in sums.items()
    }
    record = {
        "method": method,
        "baseline": entry.baseline is not None,
        "values": values,
        "fit_seconds": seconds,
        "views": list(views_used(fitted, task.calibration)),
        "warnings": sorted({str(warning.message) for warning in caught}),
        **({"passes": float(np.mean(prediction.passes))} if prediction.passes is not None else {}),
        **(_describe(fitted) if isinstance(fitted, Policy) else {}),
    }
    return Cell(method, sums, record)


def _by_input(kind: str) -> CategoricalMixture | GaussianMixture:
    return CategoricalMixture(weights="input") if kind == "classification" else GaussianMixture(weights="input")


def _describe(policy: Policy) -> dict[str, Any]:
    return {
        "model": type(policy.model).__name__,
        "noise": getattr(policy.model, "noise", None),
        "guard": policy.guard.reason,
        "steps": policy.n_steps,
        "converged": policy.converged,
        "weights": {
            name: round(float(weight), 6)
            for name, weight in zip(policy.names, policy.weights, strict=True)
            if weight > 0
        },
    }


def _held_out(task: Task) -> HeldOut:
    return held_out(task.test, LabelSets.from_array(task.test_truth), task.kind)


def _key(method: str, inputs: str) -> str:
    sources = _POLICIES if method.startswith("vbtta") else _BASELINES
    return hashlib.sha256(f"{method} {inputs} {_source_digest(sources)}".encode()).hexdigest()[:16]


@cache
def _source_digest(parts: tuple[str, ...]) -> str:
    """Of the files of the package that a method depends on."""
    root = Path(vbtta.__file__).parent
    digest = hashlib.sha256()
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest_task(task: Task) -> str:
    digest = hashlib.sha256(json.dumps([task.name, task.seed, task.kind, task.calibration.names]).encode())
    people = np.zeros(0) if task.labels.annotator is None else task.labels.annotator
    for array in (task.calibration.outputs, task.labels.value, people, task.test.outputs, task.test_truth):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _save(path: Path, cell: Cell) -> None:
    members = {f"sum_{metric}": table for metric, table in cell.columns.items()}
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, record=np.array(json.dumps(dict(cell.record))), **members)


def _load(path: Path, method: str) -> Cell:
    with np.load(path, allow_pickle=False) as stored:
        sums = {key.removeprefix("sum_"): stored[key] for key in stored.files if key.startswith("sum_")}
        return Cell(method, sums, json.loads(str(stored["record"])))


def known_names(names: Sequence[str]) -> list[str]:
    """The data sets asked for, all by default."""
    known = [*BENCHMARKS, *PRETRAINED]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown data sets {unknown}; choose from {', '.join(known)}")
    return list(names) or known
