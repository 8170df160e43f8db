"""Does it help? All methods on four real data sets, three networks each, on images that no choice has seen.

    python -m benchmarks.quality --data DATA                  # trains what is not cached, then compares
    python -m benchmarks.quality --part dev                   # on the development part, where choices are made

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

from benchmarks.cells import (
    HALF,
    Cell,
    data_hashes,
    known_names,
    load_task,
    methods_of,
    run_cells,
    tasks,
)
from benchmarks.pooled import Pooled, pool, verdicts
from benchmarks.quality_report import figure, markdown
from benchmarks.train_models import prepare_all
from reproduction.provenance import provenance
from vbtta._support.files import atomic_path

__all__ = ["main", "run"]

_SLOW = ("bma", HALF)


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
    """
    folder = data or os.environ.get("VBTTA_DATA")
    if not folder or not Path(folder).is_dir():
        return {"skipped": "no data folder: pass --data or set VBTTA_DATA"}
    if quick:
        names, seeds, skip = ["mnist1000"], [0], [*skip, *_SLOW]
    start = time.perf_counter()
    if not only_ready:
        prepare_all(known_names(names), seeds, folder, cache, jobs)
    outcome: dict[str, Any] = {"part": part, "provenance": provenance(), "data_sets": {}}
    for name in known_names(names):
        found = {}
        for _, seed in tasks([name], seeds, cache, only_ready=only_ready):
            try:
                found[seed] = _seed(name, seed, folder, cache, part, quick, skip)
            except FileNotFoundError as error:
                print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
                break
        if found:
            cells = {seed: cells for seed, (cells, _, _) in found.items()}
            ids = {seed: ids for seed, (_, ids, _) in found.items()}
            kind = next(iter(found.values()))[2]
            outcome["data_sets"][name] = _summary(pool(kind, cells, ids), cells, name, cache)
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    return outcome


def _seed(
    name: str, seed: int, data: str, cache: str, part: str, quick: bool, skip: Sequence[str]
) -> tuple[list[Cell], Any, str]:
    task = load_task(name, seed, data, cache, part=part, quick=quick)
    methods = [method for method in methods_of(task.kind) if method not in skip]
    cells = run_cells(task, methods, cache, part=part)
    ids = np.arange(len(task.test)) if task.test.ids is None else task.test.ids
    return cells, ids, task.kind


def _summary(pooled: Pooled, cells: dict[int, list[Cell]], name: str, cache: str) -> dict[str, Any]:
    best = pooled.best("nll", pooled.baselines)
    rows = []
    for m, method in enumerate(pooled.methods):
        records = [dict(found[m].record) for found in cells.values()]
        rows.append(
            {
                "method": method,
                "baseline": method in pooled.baselines,
                "values": dict(zip(pooled.metrics, pooled.values[m].tolist(), strict=True)),
                "by_seed": [dict(zip(pooled.metrics, row.tolist(), strict=True)) for row in pooled.by_seed[:, m]],
                "minus_vbtta": {metric: pooled.difference(method, "vbtta", metric) for metric in pooled.metrics},
                "minus_best_baseline": {metric: pooled.difference(method, best, metric) for metric in pooled.metrics},
                "minus_original": {metric: pooled.difference(method, "original", metric) for metric in pooled.metrics},
                "views": float(np.mean([len(record["views"]) for record in records])),
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
        "seeds": list(cells),
        "n_test": {seed: len(next(iter(found[0].columns.values()))) for seed, found in cells.items()},
        "best_baseline": best,
        "methods": rows,
        "verdicts": [
            {"claim": verdict.claim, "holds": verdict.holds, "evidence": verdict.evidence}
            for verdict in verdicts(pooled)
        ],
        "data_sha256": {seed: data_hashes(name, seed, cache) for seed in cells},
    }


def write(outcome: dict[str, Any], folder: Path) -> None:
    """Results as JSON, Markdown and figure, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"results.json": json.dumps(outcome, indent=1) + "\n", "README.md": markdown(outcome)}
    for name, text in texts.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text)
    with atomic_path(folder / "figure.svg") as temporary:
        figure(outcome).savefig(temporary, format="svg", metadata={"Date": None})


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
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    try:
        outcome = run(
            options.quick,
            names=options.names,
            seeds=options.seeds,
            part=options.part,
            data=options.data,
            cache=options.cache,
            only_ready=options.only_ready,
            skip=options.skip,
            jobs=options.jobs,
        )
    except ValueError as error:
        parser.error(str(error))
    if "skipped" in outcome:
        print(outcome["skipped"], file=sys.stderr)
        return 1
    out = options.out or ("results/quality" if options.part == "test" and not options.quick else None)
    if out:
        write(outcome, Path(out))
    print(markdown(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
