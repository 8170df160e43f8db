"""Early stops and conformal sets on real data: passes, loss, time, coverage and set sizes, against other methods.

    python -m benchmarks.sequential --cache .cache --data DATA --seeds 0 --out results/sequential

Reads the view predictions of `benchmarks.train_models` (and nuclei by the network of `benchmarks.dense_networks`); what
is not in the cache is left out. Finished data sets are kept there, so an interrupted run continues. Calibration labels
are those of people where there are any; the test labels are clean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.train_models import BENCHMARKS, is_ready
from benchmarks.views import Data, find_views, load_views
from reproduction.provenance import provenance
from vbtta import (
    CategoricalLatent,
    LabelSets,
    SequentialPolicy,
    TTAModule,
    ViewPredictions,
    collect_dense,
    conformalize,
    fit_baseline,
    fit_policy,
    fit_sequential,
)
from vbtta._support.files import atomic_path

__all__ = ["main"]

Array = NDArray[Any]
DATA_SETS = ("cifar10n", "utkface", "mnist1000", "nuclei")
_VERSION, _TOLERANCE, _LEVEL, _SPLITS = 2, 0.005, 0.9, 200
_POSITIONS, _REPEATS = 200, 9
_MODEL: Literal["latent"] = "latent"  # one model, a third of the time of the default stack


def _data(name: str, seed: int, data: str, cache: str) -> Data:
    """The views of a data set, from the cache."""
    if name != "nuclei":
        return load_views(name, seed, cache)
    from benchmarks.dense import views
    from benchmarks.dense_networks import load, trained

    network = trained(name, seed, data, cache)
    parts: list[Any] = []
    for part in ("calibration", "test"):
        scenes = load(name, part, data)
        masks = np.stack([masks[0] for masks in scenes.masks])
        parts += collect_dense(network, scenes.images, views(), masks, positions=_POSITIONS, seed=seed)
    return Data("classification", *parts)


def _mean(values: Array, groups: Array | None) -> dict[str, float]:
    """A mean with its standard error; rows of a group are one draw."""
    place = np.arange(len(values)) if groups is None else np.unique(groups, return_inverse=True)[1]
    residual = np.bincount(place, values - values.mean())
    return {"mean": float(values.mean()), "error": float(np.sqrt((residual**2).sum()) / len(values))}


def _stops(data: Data) -> tuple[dict[str, Any], SequentialPolicy]:
    """Passes, and loss in log score of the clean test labels against all views, of the rules that stop early."""
    task, views, labels, test, truth = data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sequential = fit_sequential(views, labels, task=task, tolerance=_TOLERANCE, model=_MODEL)
    full = sequential.policies[-1]
    answers = test.align(truth)
    rows = test.take(answers.instance)
    groups = rows.groups
    at_full, prediction = full.predict(rows), sequential.predict(rows)
    result: dict[str, Any] = {
        "rule": sequential.rule,
        "stages": [list(stage) for stage in sequential.stages],
        "loss_upper": sequential.loss_upper,
        "warned": any("no early stop" in str(entry.message) for entry in caught),
        "passes_of_all": len(full.used_names),
    }
    methods: dict[str, tuple[Any, Any, Array]] = {"sequential": (prediction, at_full, prediction.passes)}
    if task == "classification":
        uniform = fit_baseline("uniform", views, labels, task=task).predict(rows)
        for name in ("adaptta", "selective_tta"):
            baseline = fit_baseline(name, views, labels, task=task)
            methods[name] = (baseline.predict(rows), uniform, baseline.passes(rows))
    for name, (stopped, reference, passes) in methods.items():
        lost = reference.log_prob(answers.value) - stopped.log_prob(answers.value)
        result[name] = {"loss": _mean(lost, groups), "passes": float(passes.mean())}
    result["curve"] = [point._asdict() for point in sequential.curve]
    return result, sequential


def _sets(data: Data, splits: int) -> dict[str, Any]:
    """Mean size and coverage over splits of the clean test labels into calibration and new inputs, of all methods."""
    task, views, labels, test, truth = data
    fitted: dict[str, Any] = {"vbtta": fit_policy(views, labels, task=task, model=_MODEL, guard=False)}
    for name in ("original", "aug_tta") if task == "classification" else ("original", "uniform"):
        fitted[name] = fit_baseline(name, views, labels, task=task)
    answers = test.align(truth)
    rows = test.take(answers.instance)
    result: dict[str, Any] = {}
    methods = ("lac", "aps", "raps") if task == "classification" else ("distributional",)
    units = np.arange(len(rows)) if rows.groups is None else rows.groups
    numbers = ViewPredictions(np.arange(len(rows))[:, None, None].astype(float), groups=rows.groups)
    for name, policy in fitted.items():
        known = _Known(policy.predict(rows))
        for method in methods:
            sizes, covered = [], []
            for split in range(splits):
                drawn = np.random.default_rng(split).permutation(np.unique(units))
                inside = np.isin(units, drawn[: min(1000, len(drawn) // 2)])
                options: dict[str, Any] = {"level": _LEVEL, "method": method, "seed": split}
                conformal = conformalize(known, numbers.take(inside), answers.value[inside], **options)
                new, y = numbers.take(~inside), answers.value[~inside]
                if task == "classification":
                    sets = conformal.predict_set(new)
                    sizes.append(sets.sum(axis=1).mean())
                    covered.append(sets[np.arange(len(y)), y.astype(int)].mean())
                else:
                    lower, upper = (limit[:, 0] for limit in conformal.predict_interval(new))
                    sizes.append((upper - lower).mean())
                    covered.append(((lower <= y) & (y <= upper)).mean())
            result.setdefault(name, {})[method] = {
                "size": float(np.mean(sizes)),
                "coverage": float(np.mean(covered)),
                "error": float(np.std(covered) / np.sqrt(splits)),
            }
    return result


class _Known:
    """A prediction that is computed once; views are row numbers."""

    def __init__(self, prediction: Any) -> None:
        self.prediction = prediction

    def predict(self, predictions: ViewPredictions) -> Any:
        return self.prediction.take(predictions.outputs[:, 0, 0].astype(int))


def _noisy_sets(views: ViewPredictions, labels: LabelSets, test: ViewPredictions, truth: Array) -> dict[str, Any]:
    """Coverage of the clean labels by sets from human labels, plain and weighted by the consensus, over five splits."""
    result: dict[str, list[list[float]]] = {"label": [], "truth": []}
    for split in range(5):
        order = np.random.default_rng(split).permutation(len(views))
        first, second = (np.sort(half) for half in np.array_split(order, 2))
        policy = fit_policy(
            views.take(first), labels.take(first), task="classification", model=CategoricalLatent(), guard=False
        )
        for covers in result:
            conformal = conformalize(policy, views.take(second), labels.take(second), level=_LEVEL, covers=covers)  # type: ignore[arg-type]
            sets = conformal.predict_set(test)
            result[covers].append([float(sets[np.arange(len(truth)), truth].mean()), float(sets.sum(axis=1).mean())])
    return {
        covers: {"coverage": float(np.mean(rows, axis=0)[0]), "size": float(np.mean(rows, axis=0)[1])}
        for covers, rows in result.items()
    }


def _times(name: str, seed: int, data: str, cache: str, sequential: SequentialPolicy) -> dict[str, Any]:
    """Processor time of one module with all views and one that stops early, in turn, for batches of 1 and 64."""
    import dataclasses

    import torch

    from benchmarks.train_models import image_views
    from reproduction.training import train

    torch.set_num_threads(1)
    benchmark = BENCHMARKS[name]
    source = benchmark.source(data, seed)
    config = dataclasses.replace(benchmark.config, seed=seed)
    network = train(config, source.images, source.targets, cache=Path(cache) / "checkpoints")
    images = torch.from_numpy(source.parts["test"][0].images[:256]).float() / 255
    modules = [TTAModule(network, image_views(), part) for part in (sequential.policies[-1], sequential)]
    result: dict[str, Any] = {}
    for size in (1, 64):
        batches = list(torch.split(images[:64], 1)) if size == 1 else list(torch.split(images, 64))
        spent = np.zeros((_REPEATS, 2))
        for repeat in range(_REPEATS):
            for place, module in enumerate(modules):
                spent[repeat, place] = _processor_time(module, batches)
        with torch.no_grad():
            difference = max(
                float(
                    (_joined(modules[1], batches) - _joined(modules[1], [images[: 64 if size == 1 else 256]]))
                    .abs()
                    .max()
                ),
                0.0,
            )
        ratio = spent[:, 1] / spent[:, 0]
        result[str(size)] = {"ratio": float(np.median(ratio)), "regrouped_difference": difference}
    return result


def _joined(module: Callable[..., Any], batches: Sequence[Any]) -> Any:
    import torch

    return torch.cat([module(batch) for batch in batches])


def _processor_time(module: Callable[..., Any], batches: Sequence[Any]) -> float:
    import torch

    start = time.process_time()
    with torch.no_grad():
        for batch in batches:
            module(batch)
    return time.process_time() - start


def _measure(name: str, seed: int, data: str, cache: str, *, splits: int = _SPLITS) -> dict[str, Any]:
    given = _data(name, seed, data, cache)
    result, sequential = _stops(given)
    result["sets"] = _sets(given, splits)
    if name.startswith("cifar10n"):
        result["noisy"] = _noisy_sets(given.views, given.labels, given.test, given.truth)
    if name in BENCHMARKS and is_ready(name, seed, cache) and len(sequential.policies) > 1:
        result["time"] = _times(name, seed, data, cache, sequential)
    return result


def run(seeds: Sequence[int], names: Sequence[str], data: str, cache: str) -> dict[str, Any]:
    """What is in the cache, by data set and seed."""
    outcome: dict[str, Any] = {"provenance": provenance(), "tolerance": _TOLERANCE, "level": _LEVEL, "splits": _SPLITS}
    for name in names:
        for seed in seeds:
            place = Path(cache) / f"sequential-{name}-seed{seed}-{_VERSION}.json"
            network = Path(cache) / f"dense-{name}-seed{seed}.pt"
            trained = network.is_file() if name == "nuclei" else find_views(name, seed, cache) is not None
            if not place.is_file() and trained:
                result = _measure(name, seed, data, cache)
                with atomic_path(place) as temporary:
                    temporary.write_text(json.dumps(result))
                print(f"{name} seed {seed}: {result['sequential']}", file=sys.stderr, flush=True)
            if place.is_file():
                outcome.setdefault(name, {})[str(seed)] = json.loads(place.read_text())
    return outcome


def markdown(outcome: dict[str, Any]) -> str:
    """The page of the results."""
    lines = [
        "# Early stops and conformal sets\n",
        f"Small networks, latent pools; tolerance {outcome['tolerance']:g} nats. Loss: log score of the clean test "
        "labels, all views minus early stops, with standard errors; for AdapTTA and Selective TTA all views are their "
        "plain mean. Time: processor time of the module that stops early over that with all views, batches of 1 and "
        "64, one thread.\n",
        "| data | seed | method | passes | of | loss (nats) | time, 1 | 64 |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    found = [(name, seed, result) for name in DATA_SETS for seed, result in outcome.get(name, {}).items()]
    for name, seed, result in found:
        for method in ("sequential", "adaptta", "selective_tta"):
            if method not in result:
                continue
            entry = result[method]
            spent = [
                f"{result['time'][size]['ratio']:.2f}" if method == "sequential" and "time" in result else ""
                for size in ("1", "64")
            ]
            of = result["passes_of_all"] if method == "sequential" else 18 if name != "nuclei" else 17
            loss = f"{entry['loss']['mean']:+.4f} ± {entry['loss']['error']:.4f}"
            lines.append(_row(name, seed, method, f"{entry['passes']:.2f}", of, loss, *spent))
    lines += [
        f"\n## Sets and intervals of {100 * outcome['level']:g} %\n",
        f"Means over {outcome['splits']} splits of the test data into at most 1,000 calibration inputs (images of "
        "nuclei: half) and the rest. Size: classes in a set, or width of an interval.\n",
        "| data | seed | score | method | size | against the identity | coverage |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for name, seed, result in found:
        for method in result["sets"]["original"]:
            for policy in result["sets"]:
                entry, first = result["sets"][policy][method], result["sets"]["original"][method]
                change = f"{100 * (entry['size'] / first['size'] - 1):+.1f} %"
                covered = f"{100 * entry['coverage']:.2f} % ± {100 * entry['error']:.2f}"
                lines.append(_row(name, seed, method, policy, f"{entry['size']:.3f}", change, covered))
    for name, seed, result in found:
        if "noisy" in result:
            label, truth = result["noisy"]["label"], result["noisy"]["truth"]
            lines.append(
                f"\n{name}, seed {seed}: thresholds from human labels: sets cover {100 * label['coverage']:.1f} % "
                f"of the clean labels ({label['size']:.2f} classes), weighted by the consensus "
                f"{100 * truth['coverage']:.1f} % ({truth['size']:.2f} classes)."
            )
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write results.json and README.md."""
    parser = argparse.ArgumentParser(description="Early stops and conformal sets on the benchmark's data sets.")
    parser.add_argument("names", nargs="*", help=f"data sets, by default {', '.join(DATA_SETS)}")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder of the view predictions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/sequential"))
    options = parser.parse_args(arguments)
    if not options.data or not Path(options.data).is_dir():
        print("no data folder: pass --data or set VBTTA_DATA", file=sys.stderr)
        return 1
    outcome = run(options.seeds, options.names or DATA_SETS, options.data, options.cache)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(outcome, indent=1) + "\n")
    (options.out / "README.md").write_text(markdown(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
