"""Does it help? All methods on real data, small networks and pretrained ones, on images that no choice has seen.

    python -m benchmarks.quality --data DATA                  # trains what is not cached, then compares
    python -m benchmarks.quality --part dev                   # on the development part, where choices are made
    python -m benchmarks.quality --sizes 100 1000 --draws 3   # few and many calibration images, drawn three times
    python -m benchmarks.quality --images FOLDER --network pkg.mod:make    # your images, your network

Writes results.json, README.md and figure.svg. Everything is cached and an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import own_images
from benchmarks.cells import (
    CALIBRATION,
    HALF,
    SEQUENTIAL,
    Cell,
    Task,
    data_hashes,
    known_names,
    load_task,
    methods_of,
    run_cells,
    task_of,
    tasks,
    training_seconds,
)
from benchmarks.pooled import pool, verdicts
from benchmarks.quality_report import figure, markdown, strong_figure
from benchmarks.train_models import prepare_all
from reproduction.provenance import provenance
from vbtta._support.files import atomic_path

__all__ = ["main", "run"]

_NOTE = "Fit times are processor seconds."
_SLOW = ("bma", HALF, SEQUENTIAL)


def run(
    quick: bool = False,
    *,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    part: str = "test",
    data: str | None = None,
    cache: str = ".cache",
    only_ready: bool = False,
    skip: Sequence[str] = (),
    jobs: int = 2,
    sizes: Sequence[int] = (CALIBRATION,),
    draws: int = 1,
) -> dict[str, Any]:
    """Compare all methods; the outcome as plain data.

    Parameters
    ----------
    quick : bool
        One network on digits, a small calibration sample and no slow method: whether it runs, not how good it is.
    names : list of str
        Data sets, by default all.
    seeds : list of int
        Of networks and splits.
    part : "test" or "dev"
    data : str, optional
        Folder of the data sets, by default VBTTA_DATA; without it the result says that it was skipped.
    cache : str
        Folder of trained networks, their predictions and finished cells.
    only_ready : bool
        Whether to leave out what is not trained yet.
    skip : list of str
        Methods to leave out.
    jobs : int
        Networks trained at a time.
    sizes : list of int
        Numbers of calibration images.
    draws : int
        Calibration samples of every size below 1,000; of that size there is one.
    """
    folder = data or os.environ.get("VBTTA_DATA")
    if not folder or not Path(folder).is_dir():
        return {"skipped": "no data folder: pass --data or set VBTTA_DATA"}
    if quick:
        names, seeds, skip = ["mnist1000"], [0], [*skip, *_SLOW]
    start = time.perf_counter()
    if not only_ready:
        prepare_all(known_names(names), seeds, folder, cache, jobs)
    outcome: dict[str, Any] = {"part": part, "provenance": provenance(), "note": _NOTE, "data_sets": {}}
    for name in known_names(names):
        for size in sizes:
            trials: dict[tuple[int, int], tuple[list[Cell], Any, str]] = {}
            for _, seed in tasks([name], seeds, cache, only_ready=only_ready):
                try:
                    for draw in range(draws if size < CALIBRATION else 1):
                        task = load_task(name, seed, folder, cache, part=part, quick=quick, size=size, draw=draw)
                        trials[seed, draw] = _cells(task, cache, part, skip)
                except FileNotFoundError as error:
                    print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
                    break
            if trials:
                trained = sorted({seed for seed, _ in trials})
                outcome["data_sets"][key_of(name, size)] = {
                    **_summary(trials, size),
                    "data_sha256": {seed: data_hashes(name, seed, cache) for seed in trained},
                    "training_seconds": [training_seconds(name, seed, cache) for seed in trained],
                }
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    return outcome


def run_own(
    images: Path, network: str, *, cache: str, side: int, sizes: Sequence[int], draws: int, skip: Sequence[str]
) -> dict[str, Any]:
    """Compare all methods on the user's images with the user's network: one network, hence intervals over images."""
    start = time.perf_counter()
    outcome: dict[str, Any] = {"part": "test", "provenance": provenance(), "note": _NOTE, "data_sets": {}}
    prepared = own_images.prepare(images, network, Path(cache), side)
    n_calibration = len(prepared.parts["calibration"].predictions)
    for size in (min(size, n_calibration) for size in sizes):
        n_draws = draws if size < n_calibration else 1
        tasks_ = {(0, draw): task_of(prepared, 0, part="test", size=size, draw=draw) for draw in range(n_draws)}
        trials = {key: _cells(task, cache, "test", skip) for key, task in tasks_.items()}
        outcome["data_sets"][key_of(prepared.name, size)] = _summary(trials, size)
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    return outcome


def key_of(name: str, size: int) -> str:
    """Name of a data set in the outcome: with its number of calibration images unless that is 1,000."""
    return name if size == CALIBRATION else f"{name}@{size}"


def _cells(task: Task, cache: str, part: str, skip: Sequence[str]) -> tuple[list[Cell], Any, str]:
    methods = [method for method in methods_of(task.kind) if method not in skip]
    ids = np.arange(len(task.test)) if task.test.ids is None else task.test.ids
    return run_cells(task, methods, cache, part=part), ids, task.kind


def _summary(trials: dict[tuple[int, int], tuple[list[Cell], Any, str]], size: int) -> dict[str, Any]:
    cells = {trial: methods for trial, (methods, _, _) in trials.items()}
    pooled = pool(next(iter(trials.values()))[2], cells, {trial: ids for trial, (_, ids, _) in trials.items()})
    best = pooled.best("nll", pooled.baselines)
    tempered = "original+t" if "original+t" in pooled.methods else "original"
    references = {"vbtta": "vbtta", "best_baseline": best, "original": "original", "tempered": tempered}
    rows = []
    for m, method in enumerate(pooled.methods):
        records = [dict(methods[m].record) for methods in cells.values()]
        differences = {
            f"minus_{name}": {metric: pooled.difference(method, reference, metric) for metric in pooled.metrics}
            for name, reference in references.items()
            if reference in pooled.methods
        }
        rows.append(
            {
                "method": method,
                "baseline": method in pooled.baselines,
                "values": dict(zip(pooled.metrics, pooled.values[m].tolist(), strict=True)),
                "by_seed": [dict(zip(pooled.metrics, row.tolist(), strict=True)) for row in pooled.by_seed[:, m]],
                **differences,
                "views": float(np.mean([record.get("passes", len(record["views"])) for record in records])),
                "fit_seconds": float(np.mean([record["fit_seconds"] for record in records])),
                "details": [
                    {key: record[key] for key in ("model", "noise", "guard", "weights", "warnings") if key in record}
                    for record in records
                ],
            }
        )
    return {
        "task": pooled.task,
        "metrics": list(pooled.metrics),
        "calibration": size,
        "seeds": sorted({seed for seed, _ in cells}),
        "trials": [f"seed {seed}, draw {draw}" for seed, draw in cells],
        "n_test": len(next(iter(cells.values()))[0].columns["nll"]),
        "best_baseline": best,
        "methods": rows,
        "verdicts": [
            {"claim": verdict.claim, "holds": verdict.holds, "evidence": verdict.evidence}
            for verdict in verdicts(pooled)
        ],
    }


def write(outcome: dict[str, Any], folder: Path) -> None:
    """Results as JSON, Markdown and figure, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"results.json": json.dumps(outcome, indent=1) + "\n", "README.md": markdown(outcome)}
    for name, text in texts.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text)
    drawings = {"figure.svg": figure}
    if any("-pretrained" in name for name in outcome["data_sets"]):
        drawings["strong.svg"] = strong_figure
    for name, draw in drawings.items():
        with atomic_path(folder / name) as temporary:
            draw(outcome).savefig(temporary, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare all methods on real data.")
    parser.add_argument("names", nargs="*", help="data sets, by default all")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder for networks, predictions and finished cells")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--part", choices=["test", "dev"], default="test")
    parser.add_argument("--out", help="folder for the outcome; by default results/quality, nothing for dev")
    parser.add_argument("--only-ready", action="store_true", help="leave out what is not trained yet")
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out")
    parser.add_argument("--jobs", type=int, default=2, help="networks trained at a time, one thread each")
    parser.add_argument("--sizes", type=int, nargs="+", default=[CALIBRATION], help="numbers of calibration images")
    parser.add_argument("--draws", type=int, default=1, help="calibration samples of every size below 1,000")
    parser.add_argument("--images", type=Path, help="your images: a folder by class, or a MedMNIST .npz file")
    parser.add_argument("--network", metavar="PACKAGE.MODULE:FACTORY", help="makes your network (with --images)")
    parser.add_argument("--side", type=int, default=224, help="side length of the images of a folder (with --images)")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if (options.images is None) != (options.network is None):
        parser.error("--images and --network go together")
    sampling = {"sizes": options.sizes, "draws": options.draws, "skip": options.skip, "cache": options.cache}
    try:
        if options.images is not None:
            outcome = run_own(options.images, options.network, side=options.side, **sampling)
        else:
            outcome = run(
                options.quick,
                names=options.names,
                seeds=options.seeds,
                part=options.part,
                data=options.data,
                only_ready=options.only_ready,
                jobs=options.jobs,
                **sampling,
            )
    except ValueError as error:
        parser.error(str(error))
    if "skipped" in outcome:
        print(outcome["skipped"], file=sys.stderr)
        return 1
    kept = options.part == "test" and not options.quick and options.images is None
    out = options.out or ("results/quality" if kept else None)
    if out:
        write(outcome, Path(out))
    print(markdown(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
