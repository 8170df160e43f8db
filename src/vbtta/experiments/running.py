"""Trials of the experiments: kept by hash, run in parallel, resumable; and a sample of them run again as a check."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vbtta._support.files import atomic_path
from vbtta._support.plain import to_plain
from vbtta.experiments.item import DataMissing, Item, Places, Row, load_item
from vbtta.experiments.provenance import circumstances, code_state, provenance

__all__ = ["Job", "Outcome", "ResultsDiffer", "jobs_of", "read_outcome", "run_items", "verify", "write_outcome"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OLD = 3600.0  # seconds after which the part file of a killed run is litter
_TOLERANCE = 1e-6


class ResultsDiffer(ValueError):  # noqa: N818  (a finding of the check, not a fault of the code)
    """Raised by :func:`verify`: kept results are not what the code makes."""


@dataclass(frozen=True)
class Job:
    """One trial of an item, and the file that keeps what came of it."""

    item: str
    version: int
    trial: Any
    kept: Path

    @property
    def described(self) -> dict[str, Any]:
        """The trial as JSON knows it."""
        fields: dict[str, Any] = _described(self.trial)
        return fields


@dataclass(frozen=True)
class Outcome:
    """All that is known of an item once its trials are done: the only source of its tables and figures."""

    item: str
    profile: str
    version: int
    config: dict[str, Any]
    provenance: dict[str, Any]
    trials: list[dict[str, Any]]  # trial, code, seconds, made (versions and machine), rows

    @property
    def rows(self) -> list[Row]:
        """Rows of all trials, in order."""
        return [row for trial in self.trials for row in trial["rows"]]


def jobs_of(name: str, config: Any, store: Path) -> list[Job]:
    """The trials of an item, each with its place in the store."""
    item = load_item(name)
    found = []
    for trial in item.trials(config):
        text = json.dumps([name, item.VERSION, _described(trial)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append(Job(name, item.VERSION, trial, store / f"{name}-{digest}.json"))
    return found


def run_items(
    names: Sequence[str],
    profile: str,
    places: Places,
    store: Path,
    *,
    jobs: int = 2,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Outcome | DataMissing]:
    """Run the trials that the store does not have, and yield each item's outcome when its trials are done.

    Parameters
    ----------
    names : sequence of str
        Items, in the order in which they are wanted.
    profile : str
        Which of an item's configurations.
    places : Places
        Data and checkpoints.
    store : Path
        Folder that keeps finished trials; a trial found there is not run again.
    jobs : int
        Processes, each with ``places.threads`` threads.
    note : callable
        Told what is going on, line by line.

    Yields
    ------
    Outcome, or DataMissing where the data set of an item is not there
    """
    store.mkdir(parents=True, exist_ok=True)
    _clear_litter(store, names)
    state = code_state()
    wanted = {name: jobs_of(name, load_item(name).PROFILES[profile], store) for name in names}
    absent = [job for name in names for job in wanted[name] if not job.kept.is_file()]
    for name in names:
        missing = sum(not job.kept.is_file() for job in wanted[name])
        kept = len(wanted[name]) - missing
        note(f"{name}: {missing} of {len(wanted[name])} trials to run" + (f", {kept} kept from before" if kept else ""))
    with _processes(min(jobs, len(absent)), places.threads) as submit:
        futures = {job.kept: submit(_work, job, places, state) for job in absent}
        for name in names:
            try:
                _wait(name, wanted[name], futures, note)
            except DataMissing as missing_data:
                for job in wanted[name]:
                    if job.kept in futures:
                        futures[job.kept].cancel()
                yield missing_data
                continue
            yield _outcome(name, profile, [json.loads(job.kept.read_text(encoding="utf-8")) for job in wanted[name]])


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write rows and provenance as JSON, one row a line, atomically."""
    head = {
        "item": outcome.item,
        "profile": outcome.profile,
        "version": outcome.version,
        "config": outcome.config,
        "provenance": outcome.provenance,
    }
    lines = [f"  {json.dumps(key)}: {_dump(value)}," for key, value in head.items()]
    trials = []
    for trial in outcome.trials:
        described = ", ".join(f"{json.dumps(key)}: {_dump(value)}" for key, value in trial.items() if key != "rows")
        rows = ",\n".join(f"      {_dump(row)}" for row in trial["rows"])
        trials.append(f'    {{{described}, "rows": [\n{rows}\n    ]}}')
    text = "{\n" + "\n".join(lines) + '\n  "trials": [\n' + ",\n".join(trials) + "\n  ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_outcome(path: Path) -> Outcome:
    """Read what :func:`write_outcome` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(**data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no outcome of an experiment: {error}; run the experiment again") from None


def verify(outcome: Outcome, places: Places, *, sample: int, seed: int | None = None, jobs: int = 2) -> float:
    """Run a random sample of an outcome's trials again; the largest difference found.

    Raises ResultsDiffer where the code is another version, the trials are others, or a row differs by more
    than 1e-6 (relative to the larger of 1 and the number); DataMissing where the data set of a trial is not there.
    """
    item = load_item(outcome.item)
    config = item.PROFILES[outcome.profile]
    if outcome.version != item.VERSION or outcome.config != _described(config):
        raise ResultsDiffer(
            f"{outcome.item}: the results were made by version {outcome.version} with another configuration than the "
            f"code's (version {item.VERSION}); run the experiment again"
        )
    recorded = {json.dumps(trial["trial"], sort_keys=True): trial for trial in outcome.trials}
    known = {json.dumps(_described(trial), sort_keys=True): trial for trial in item.trials(config)}
    if set(recorded) != set(known):
        raise ResultsDiffer(f"{outcome.item}: the results have other trials than the code; run the experiment again")
    chosen = random.Random(seed).sample(sorted(known), min(sample, len(known)))
    fresh = Places(places.data, None, places.threads)  # no checkpoints: everything is made again
    with _processes(min(jobs, len(chosen)), places.threads) as submit:
        futures = [submit(_rows_of, outcome.item, known[text], fresh) for text in chosen]
        gaps = [
            _difference(f"{outcome.item} {text}", recorded[text]["rows"], future.result())
            for text, future in zip(chosen, futures, strict=True)
        ]
    return max(gaps, default=0.0)


def _wait(name: str, jobs: Sequence[Job], futures: dict[Path, Future[float]], note: Callable[[str], None]) -> None:
    """Wait for an item's trials, and say how far it is."""
    open_jobs = [job for job in jobs if job.kept in futures]
    for place, job in enumerate(open_jobs, start=1):
        seconds = futures[job.kept].result()
        note(f"{name}: {place} of {len(open_jobs)} trials done ({seconds:.1f} s)")


def _work(job: Job, places: Places, state: str) -> float:
    """Run a trial and keep what comes of it (in a process of its own)."""
    start = time.perf_counter()
    rows = _rows_of(job.item, job.trial, places)
    seconds = time.perf_counter() - start
    record = {
        "trial": job.described,
        "code": state,
        "seconds": round(seconds, 2),
        "made": circumstances(),
        "rows": rows,
    }
    with atomic_path(job.kept) as temporary:
        temporary.write_text(_dump(record), encoding="utf-8")
    return seconds


def _rows_of(name: str, trial: Any, places: Places) -> list[Row]:
    item = load_item(name)
    rows: list[Row] = json.loads(_dump(to_plain(item.run_trial(trial, places))))
    return rows


def _outcome(name: str, profile: str, trials: list[dict[str, Any]]) -> Outcome:
    item: Item = load_item(name)
    return Outcome(name, profile, item.VERSION, _described(item.PROFILES[profile]), provenance(trials), trials)


@contextmanager
def _processes(jobs: int, threads: int) -> Iterator[Callable[..., Future[Any]]]:
    """A pool of processes that end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)[::-1]
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    pool = ProcessPoolExecutor(max(jobs, 1), context, initializer=_begin, initargs=(theirs, threads))
    try:
        yield pool.submit
    except BaseException:
        ours.close()  # the workers stop where they are; finished trials are kept
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        ours.close()
        theirs.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _begin(lifeline: Connection, threads: int) -> None:
    """Set up a worker: as many threads as it may have, and an end when nobody waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))


def _end_with(lifeline: Connection) -> None:
    """Wait until the other end of a pipe is closed, by the runner or by its death, and stop at once."""
    lifeline.poll(None)
    os._exit(1)


def _difference(what: str, before: list[Row], after: list[Row]) -> float:
    """The largest difference of numbers, relative where they are large; anything else must be equal."""
    if len(before) != len(after) or any(set(old) != set(new) for old, new in zip(before, after, strict=True)):
        raise ResultsDiffer(f"{what}: run again it gives other rows")
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        for key, value in old.items():
            gap = _gap(value, new[key])
            if not gap <= _TOLERANCE:
                raise ResultsDiffer(f"{what}: {key} is {value} in the results and {new[key]} when run again")
            largest = max(largest, gap)
    return largest


def _gap(old: Any, new: Any) -> float:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return max((_gap(*pair) for pair in zip(old, new, strict=True)), default=0.0)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)):
        return float(abs(old - new) / max(1.0, abs(old)))
    return 0.0 if old == new else math.inf


def _described(value: Any) -> Any:
    """A dataclass as JSON gives it back."""
    return json.loads(_dump(to_plain(value)))


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _clear_litter(store: Path, names: Sequence[str]) -> None:
    """Remove part files of runs that were killed long ago."""
    for name in names:
        for path in store.glob(f".{name}-*.part"):
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink(missing_ok=True)
