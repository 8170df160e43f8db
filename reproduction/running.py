"""Trials of the items: kept by fingerprint, run in parallel, resumable; and a sample of them run again as a check."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from joblib import Parallel, delayed, parallel_config
from threadpoolctl import threadpool_limits

from reproduction.items import ITEMS
from reproduction.provenance import provenance
from reproduction.records import DataMissing, Places, Row
from reproduction.store import fingerprint, write_text
from reproduction.training import torch_threads

NOT_RECORDED = "not recorded"
_STALE = 3600.0  # seconds after which the part file of a killed run is removed
_WATCH = 0.5  # seconds between a worker's looks at its parent
_TOLERANCE = 1e-6


class ResultsDiffer(ValueError):  # noqa: N818  (a finding of the check, not a fault of the code)
    """Raised by :func:`verify`: kept results are not what the code makes."""


class Job(NamedTuple):
    """One trial of an item, and the file that keeps its record."""

    item: str
    trial: Any
    kept: Path


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
    """The trials of an item, each with its file in the store."""
    item = ITEMS[name]
    return [
        Job(name, trial, store / f"{name}-{fingerprint(name, item.version, _plain(trial))}.json")
        for trial in item.trials(config)
    ]


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

    Where the data set of an item is not there, DataMissing comes in its place. `store` is the folder that keeps the
    records of finished trials; a trial found there is not run again. `jobs` processes have ``places.threads`` threads
    each; `note` receives lines about the progress.
    """
    store.mkdir(parents=True, exist_ok=True)
    _remove_stale(store, names)
    wanted = {name: jobs_of(name, ITEMS[name].profiles[profile], store) for name in names}
    absent = {name: [job for job in wanted[name] if not job.kept.is_file()] for name in names}
    for name in names:
        kept = len(wanted[name]) - len(absent[name])
        remark = f", {kept} kept from before" if kept else ""
        note(f"{name}: {len(absent[name])} of {len(wanted[name])} trials to run{remark}")
    calls = [(job, places) for name in names for job in absent[name]]
    results = _run(_keep, calls, jobs, places.threads)
    for name in names:
        missing = None
        for place in range(1, len(absent[name]) + 1):
            result = next(results)
            if isinstance(result, DataMissing):
                missing = result
            else:
                note(f"{name}: {place} of {len(absent[name])} trials done ({result:.1f} s)")
        yield missing or _outcome(name, profile, [json.loads(job.kept.read_text("utf-8")) for job in wanted[name]])


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write rows and provenance as JSON, one row a line, atomically."""
    head = [
        f"  {json.dumps(field.name)}: {_dump(getattr(outcome, field.name))},"
        for field in dataclasses.fields(outcome)
        if field.name != "trials"
    ]
    trials = []
    for trial in outcome.trials:
        described = ", ".join(f"{json.dumps(key)}: {_dump(value)}" for key, value in trial.items() if key != "rows")
        rows = ",\n".join(f"      {_dump(row)}" for row in trial["rows"])
        trials.append(f'    {{{described}, "rows": [\n{rows}\n    ]}}')
    write_text(path, "{\n" + "\n".join(head) + '\n  "trials": [\n' + ",\n".join(trials) + "\n  ]\n}\n")


def read_outcome(path: Path) -> Outcome:
    """Read what :func:`write_outcome` wrote."""
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no outcome of an experiment: {error}; run the experiment again") from None


def verify(outcome: Outcome, places: Places, *, sample: int, seed: int | None = None, jobs: int = 2) -> float:
    """Run a random sample of an outcome's trials again, without caches; the largest difference found.

    Raises ResultsDiffer where the code is another version, the trials are others, or a row differs by more
    than 1e-6 (relative to the larger of 1 and the number); DataMissing where the data set of a trial is not there.
    """
    item = ITEMS[outcome.item]
    config = item.profiles[outcome.profile]
    if outcome.version != item.version or outcome.config != _plain(config):
        raise ResultsDiffer(
            f"{outcome.item}: the results were made by version {outcome.version} with another configuration than the "
            f"code's (version {item.version}); run the experiment again"
        )
    recorded = {json.dumps(trial["trial"], sort_keys=True): trial["rows"] for trial in outcome.trials}
    known = {json.dumps(_plain(trial), sort_keys=True): trial for trial in item.trials(config)}
    if set(recorded) != set(known):
        raise ResultsDiffer(f"{outcome.item}: the results have other trials than the code; run the experiment again")
    chosen = random.Random(seed).sample(sorted(known), min(sample, len(known)))
    uncached = dataclasses.replace(places, cache=None)
    calls = [(outcome.item, known[text], uncached) for text in chosen]
    results = list(_run(_rows_or_missing, calls, jobs, places.threads))
    largest = 0.0
    for text, rows in zip(chosen, results, strict=True):
        if isinstance(rows, DataMissing):
            raise rows
        largest = max(largest, _difference(f"{outcome.item} {text}", recorded[text], rows))
    return largest


def made_by(trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every combination of versions and machine with the number of trials it made; missing facts are marked."""
    made: list[dict[str, Any]] = []
    for trial in trials:
        facts = trial.get("made", {})
        entry = {name: facts.get(name, NOT_RECORDED) for name in ("versions", "machine", "processor")}
        same = next((known for known in made if {**known, **entry} == known), None)
        if same is None:
            made.append({**entry, "trials": 1})
        else:
            same["trials"] += 1
    return made


def _run(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int, threads: int
) -> Generator[Any, None, None]:
    """Results of the calls in order, from so many processes; a single job runs in this one."""
    with parallel_config(
        "loky",
        n_jobs=max(1, min(jobs, len(calls))),
        inner_max_num_threads=threads,
        initializer=_begin,
        initargs=(os.getpid(),),
    ):
        parallel = Parallel(return_as="generator", batch_size=1, max_nbytes=None)
    results: Generator[Any, None, None] = parallel(delayed(function)(*call) for call in calls)
    return results


def _begin(parent: int) -> None:
    """Prepare a worker: interrupts are the parent's to handle, and the worker ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _keep(job: Job, places: Places) -> float | DataMissing:
    """Run a trial and keep its record; the seconds it took."""
    start = time.perf_counter()
    rows = _rows_or_missing(job.item, job.trial, places)
    if isinstance(rows, DataMissing):
        return rows
    seconds = time.perf_counter() - start
    made = provenance()
    code = made.pop("git") + " with changes" * made.pop("uncommitted_changes")
    record = {"trial": _plain(job.trial), "code": code, "seconds": round(seconds, 2), "made": made, "rows": rows}
    write_text(job.kept, _dump(record))
    return seconds


def _rows_or_missing(name: str, trial: Any, places: Places) -> list[Row] | DataMissing:
    """The rows of a trial as JSON gives them back; missing data are a result, not a failure of the run."""
    with threadpool_limits(places.threads), torch_threads(places.threads):
        try:
            rows: list[Row] = json.loads(_dump(ITEMS[name].run_trial(trial, places)))
        except DataMissing as missing:
            return missing
    return rows


def _outcome(name: str, profile: str, trials: list[dict[str, Any]]) -> Outcome:
    facts = {
        "made": made_by(trials),
        "code": sorted({trial["code"] for trial in trials}),
        "seconds": round(sum(trial["seconds"] for trial in trials), 1),
    }
    return Outcome(name, profile, ITEMS[name].version, _plain(ITEMS[name].profiles[profile]), facts, trials)


def _difference(what: str, before: list[Row], after: list[Row]) -> float:
    """The largest difference of numbers, relative where they are large; anything else must be equal."""
    if [set(row) for row in before] != [set(row) for row in after]:
        raise ResultsDiffer(f"{what}: run again it gives other rows")
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        for key, value in old.items():
            again = new[key]
            lists = isinstance(value, list) and isinstance(again, list) and len(value) == len(again)
            pairs = list(zip(value, again, strict=True)) if lists else [(value, again)]  # type: ignore[arg-type]
            for recorded, rerun in pairs:
                gap = _gap(recorded, rerun)
                if not gap <= _TOLERANCE:
                    raise ResultsDiffer(f"{what}: {key} is {recorded} in the results and {rerun} when run again")
                largest = max(largest, gap)
    return largest


def _gap(old: Any, new: Any) -> float:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)):
        return float(abs(old - new) / max(1.0, abs(old)))
    return 0.0 if old == new else math.inf


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON gives it back."""
    fields: dict[str, Any] = json.loads(_dump(dataclasses.asdict(record)))
    return fields


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=lambda array: array.tolist())


def _remove_stale(store: Path, names: Sequence[str]) -> None:
    """Remove part files of runs that were killed long ago."""
    for name in names:
        for path in store.glob(f".{name}-*.part"):
            if time.time() - path.stat().st_mtime > _STALE:
                path.unlink(missing_ok=True)
