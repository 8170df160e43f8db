"""Speed on a cluster: a step by two workers against one, what a step ships, and collection against a plain loop.

`python -m benchmarks.scale` writes the sizing table of docs/cluster.md from results/bench/scale.json.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.em import fastest
from vbtta import GaussianMixture, ViewPredictions, collect_views
from vbtta._support.checks import require
from vbtta._support.files import atomic_path
from vbtta.augment import GaussianNoise, Identity
from vbtta.data.files import open_chunks, read_labels
from vbtta.models.base import pose
from vbtta.ray import collect_views as collect_on_cluster
from vbtta.ray.cluster import Tasks
from vbtta.ray.fit import Calibration, sums

_FEATURES = 256
_ROWS = 1 << 16


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else runs goes before workers, not before a loop
    ray = require("ray", "ray")
    # "local" is a cluster of its own, whatever RAY_ADDRESS says
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            step = step_by_workers(Path(folder), 200_000 if quick else 5_000_000, 16)
            collection = collection_overhead(Path(folder), 4_000 if quick else 30_000)
    finally:
        ray.shutdown()
    return {"step": step, "collection": collection}


def step_by_workers(folder: Path, n_labels: int, n_views: int) -> dict[str, float]:
    """One step (a pass and an update) by one worker and by two, one thread each; limit 0.7."""
    views, labels = write_problem(folder, n_labels, n_views)
    given = read_labels(labels)
    results: dict[str, float] = {"J": n_labels, "K": n_views}
    for n_workers, name in ((1, "one"), (2, "two")):
        calibration = Calibration.of(open_chunks(views), given, "regression", Tasks(n_workers, {}))
        start = time.perf_counter()
        parts = calibration.continuous(with_variance=False).parts
        require("ray", "ray").wait(parts.data, num_returns=len(parts.data))
        results[f"{name}_loading_seconds"] = time.perf_counter() - start
        problem, state = pose(GaussianMixture(v=0.1, noise="none"), calibration)

        def step(problem: Any = problem, state: Any = state) -> None:
            problem.update(state, problem.evaluate(state)[1])

        results[f"{name}_worker_seconds"] = fastest(step)
        results["bytes_in_memory"] = float(parts.sum(_size_of()))
        calls = [(*each, parts.size, _size_of(), 1) for each in zip(parts.data, parts.firsts, strict=True)]
        answers = parts.tasks.results(sums, calls)
        results["bytes_back"] = len(pickle.dumps(problem.evaluate(state)[1])) * sum(map(len, answers))
    results["bytes_on_disk"] = sum(path.stat().st_size for path in views.glob("*.parquet"))
    results["bytes_of_labels"] = labels.stat().st_size
    results["ratio"] = results["two_worker_seconds"] / results["one_worker_seconds"]
    results["limit"] = 0.7
    return results


def collection_overhead(folder: Path, n_inputs: int, repeats: int = 3) -> dict[str, float]:
    """Seconds an input more, with one worker on a cluster and in a plain loop with one thread; limit 1.15.

    Differences between n and 3n inputs are taken: starting a worker is paid once, and is reported by itself. It takes
    seconds that vary, so the two jobs are repeated in turns and the fastest of each counts.
    """
    sizes = (n_inputs, 3 * n_inputs)
    for size in (64, *sizes):
        inputs = np.random.default_rng(0).normal(size=(size, _FEATURES)).astype(np.float32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(inputs.ravel()), _FEATURES)
        pq.write_table(pa.table({"inputs": lists}), folder / f"inputs-{size}.parquet", row_group_size=8192)
    views = [Identity(), GaussianNoise(0.1)]
    limits = require("threadpoolctl", "cli").threadpool_limits

    def plain(size: int, out: str) -> None:
        with limits(1):
            column = pq.read_table(folder / f"inputs-{size}.parquet")["inputs"].combine_chunks()
            rows = column.flatten().to_numpy().reshape(-1, _FEATURES)
            collect_views(network(), rows, views, draws=2).save(folder / f"{out}.npz")

    def cluster(size: int, out: str) -> None:
        inputs = folder / f"inputs-{size}.parquet"
        collect_on_cluster(network, inputs, views, folder / out, key="small network", draws=2, workers=1)

    jobs = {"plain": plain, "cluster": cluster}
    for name, job in jobs.items():  # the first calls start what stays, and do not count
        job(64, f"{name}-first")
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(repeats):
        for size in sizes:
            for name, job in jobs.items():
                taken = seconds(partial(job, size, f"{name}-{size}-{turn}"))
                times.setdefault((name, size), []).append(taken)
    short, long = ({name: min(times[name, size]) for name in jobs} for size in sizes)
    each = {name: (long[name] - short[name]) / (2 * n_inputs) for name in jobs}
    return {
        "inputs": n_inputs,
        "views": len(views),
        "repeats": repeats,
        "plain_seconds": long["plain"],
        "cluster_seconds": long["cluster"],
        "start_seconds": short["cluster"] - n_inputs * each["cluster"],
        "plain_seconds_per_million": 1e6 * each["plain"],
        "cluster_seconds_per_million": 1e6 * each["cluster"],
        "ratio": each["cluster"] / each["plain"],
        "limit": 1.15,
    }


def network() -> Callable[[np.ndarray], np.ndarray]:
    """A model whose work is that of a small network."""
    rng = np.random.default_rng(1)
    layers = [rng.normal(size=shape).astype(np.float32) / 16 for shape in ((_FEATURES, 512), (512, 512), (512, 10))]

    def model(batch: np.ndarray) -> np.ndarray:
        for layer in layers:
            batch = np.maximum(batch @ layer, 0)
        return batch

    return model


def write_problem(folder: Path, n_labels: int, n_views: int) -> tuple[Path, Path]:
    """Predictions in single precision and one label each, as parquet files."""
    rng = np.random.default_rng(0)
    names = [f"view {k}" for k in range(n_views)]
    views = folder / "views"
    views.mkdir()
    values = []
    for first in range(0, n_labels, _ROWS):
        rows = np.arange(first, min(first + _ROWS, n_labels))
        mean = rng.normal(size=(len(rows), n_views, 1)).astype(np.float32)
        values.append(mean[:, 0, 0] + 0.3 * rng.normal(size=len(rows)))
        ViewPredictions(mean, names=names, ids=rows).save(views / f"part-{first:012d}.parquet")
    labels = folder / "labels.parquet"
    table = pa.table({"instance": np.arange(n_labels), "label": np.concatenate(values)})
    pq.write_table(table, labels, row_group_size=_ROWS)
    return views, labels


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _size_of() -> Callable[[Any], int]:
    return lambda block: sum(field.nbytes for field in block if field is not None)  # a lambda travels by itself


def sizing(outcome: dict[str, Any]) -> str:
    """The table of docs/cluster.md: what a million instances take, and 1e9 by multiplication."""
    step, collection = outcome["step"], outcome["collection"]
    millions, K = step["J"] / 1e6, step["K"]
    one = step["one_worker_seconds"] / millions
    megabytes = {name: step[f"bytes_{name}"] / millions / 1e6 for name in ("on_disk", "of_labels", "in_memory")}
    loading = step["one_loading_seconds"] / millions
    nodes = step["bytes_back"] / 1e3
    passes = 60
    rows = [
        ("predictions on disk (single precision)", f"{megabytes['on_disk']:.0f} MB", f"{megabytes['on_disk']:.0f} GB"),
        ("labels on disk", f"{megabytes['of_labels']:.0f} MB", f"{megabytes['of_labels']:.0f} GB"),
        ("memory of all workers together", f"{megabytes['in_memory']:.0f} MB", f"{megabytes['in_memory']:.0f} GB"),
        ("loading, time of one core", f"{loading:.1f} s", f"{loading * 1000 / 3600:.1f} h"),
        ("one pass, time of one core", f"{one:.2f} s", f"{one * 1000 / 60:.0f} min"),
        (f"a fit of {passes} passes, time of one core", f"{passes * one:.0f} s", f"{passes * one * 1000 / 3600:.1f} h"),
    ]
    table = "\n".join(f"| {what} | {million} | {billion} |" for what, million, billion in rows)
    cores = 256
    minutes = (passes * one + loading) * 1000 / cores / 60
    each = collection["cluster_seconds_per_million"] / 1e6 / collection["views"]
    heading = f"| K = {K} views, C = 1 output, one label each | 10^6 instances | 10^9 instances |\n| --- | --- | --- |"
    room = 1.5 * megabytes["in_memory"] / cores
    fitting = (
        f"So 10^9 instances fit {cores} cores with {room:.1f} GB each (half as much again as the blocks, to load), "
        f"and the fit takes about {minutes:.1f} minutes there. A pass over {step['J']:,.0f} instances on two workers "
        f"brings {nodes:.0f} kB back to the driver; that grows with the workers and the logarithm of the instances."
    )
    collecting = (
        f"Collecting: one worker took {collection['ratio']:.2f} times a plain loop's time an input, and "
        f"{collection['start_seconds']:.0f} s to start. The model decides the rest: with m seconds an input and view, "
        f"10^9 instances take 10^9 K m / workers seconds. The benchmark's small network (m = {1e3 * each:.2f} ms, "
        f"draws included) would take {1e9 * K * each / 3600 / cores:.1f} hours for K = {K} on {cores} cores."
    )
    return f"{heading}\n{table}\n\n{fitting}\n\n{collecting}\n"


def main() -> int:
    """Write the table."""
    outcome = json.loads(Path("results/bench/scale.json").read_text(encoding="utf-8"))["outcome"]
    page = Path("docs/cluster.md")
    text = page.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- sizing -->\n).*?(\n<!-- end -->)", re.DOTALL)
    with atomic_path(page) as temporary:
        temporary.write_text(marked.sub(lambda match: match[1] + sizing(outcome) + match[2], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
