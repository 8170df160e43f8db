"""Run the attack: python -m benchmarks.fuzz [--cases 100000] [--minutes 5] [--seed 0] [--out results/fuzz].

Every case is known by seed, family and number, and can be run alone: --only FAMILY --number N. Cases run in processes
of their own with limited memory; a case that takes more than a minute is a hang. Finished chunks are kept under --work,
and the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz import arrays, files, fits, properties
from benchmarks.fuzz.base import ALLOWED, Family
from reproduction.provenance import provenance
from vbtta._support.files import atomic_path

FAMILIES = (*files.FAMILIES, *arrays.FAMILIES, *fits.FAMILIES, *properties.FAMILIES)
_CHUNK = 100
_HANG = 60  # seconds
_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None  # every write waits for the disk
_MEMORY = 6 << 30  # bytes of address space, of which torch takes much when loaded
_LARGE = 1 << 28  # bytes by which one case may enlarge the process


class HangError(BaseException):
    """A case took too long."""


def _too_long(*_: Any) -> None:
    raise HangError


def run_case(family: Family, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """Outcome of a case, and what was wrong where something was."""
    rng = np.random.default_rng([seed, zlib.crc32(family.name.encode()), number])
    signal.signal(signal.SIGPROF, _too_long)  # of the process's own time, whatever else the machine does
    signal.setitimer(signal.ITIMER_PROF, _HANG)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # NumPy's; families of fits look at all themselves
            outcome = family.case(rng, folder)
    except ALLOWED as error:
        if type(error) not in ALLOWED and not type(error).__module__.startswith(("vbtta", "torch.distributions")):
            return "FAILED", f"bare {type(error).__name__}: {error}"
        outcome = f"refused: {type(error).__name__ if type(error) in ALLOWED else 'own error'}"
        if "\n" in str(error) or not str(error):
            return "FAILED", f"message of {str(error).count(chr(10)) + 1} lines: {error!r}"
        if family in files.FAMILIES and str(folder) not in str(error):
            return "FAILED", f"message without the file's name: {error}"
        if family.name != "options" and not _ours(error):
            return "FAILED", f"{type(error).__name__} from elsewhere: {error} ({_place(error)})"
    except HangError:
        return "FAILED", f"hang of more than {_HANG} s"
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error} ({_place(error)})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if family in files.FAMILIES and 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > _LARGE:
        return "FAILED", f"took more than {_LARGE >> 20} MB"
    return outcome, ""


def _ours(error: BaseException) -> bool:
    """Whether the error was raised by this package, which says what to do, rather than fell through it."""
    frames = traceback.extract_tb(error.__traceback__)
    return "vbtta" in frames[-1].filename.replace(os.sep, "/").split("/")


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "vbtta" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"


def run_chunk(family_name: str, seed: int, first: int, size: int) -> dict[str, Any]:
    """Outcomes of consecutive cases of a family, counted; failures in full."""
    family = next(family for family in FAMILIES if family.name == family_name)
    counts: Counter[str] = Counter()
    failures = []
    start = time.process_time()
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as folder:
        for number in range(first, first + size):
            outcome, reason = run_case(family, seed, number, Path(folder))
            counts[outcome] += 1
            if outcome == "FAILED":
                failures.append({"number": number, "reason": reason[:400].replace(folder, "FOLDER")})
    seconds = time.process_time() - start
    return {"family": family_name, "seed": seed, "first": first, "size": size, "counts": dict(counts),
            "failures": failures, "seconds": seconds}  # fmt: skip


def _start_worker() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for family in (files, fits):  # imports, before memory is measured
        assert family.FAMILIES
    import_module("vbtta.inference.unconstrained")  # torch and Pyro, of ADVI


def run(
    cases: int, seed: int, work: Path, workers: int, minutes: float | None, only: str | None
) -> list[dict[str, Any]]:
    """All chunks, those of an earlier run included, until the time is up."""
    work.mkdir(parents=True, exist_ok=True)
    wanted = []
    for family in FAMILIES:
        if only in (None, family.name):
            n_cases = cases if only else max(20, round(cases * family.share / sum(f.share for f in FAMILIES)))
            wanted += [(family.name, seed, first, min(_CHUNK, n_cases - first)) for first in range(0, n_cases, _CHUNK)]
    wanted.sort(key=lambda chunk: chunk[2])  # a part of every family early
    file = work / f"chunks-{seed}.jsonl"
    done = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            chunk = json.loads(line)
            done[chunk["family"], chunk["seed"], chunk["first"], chunk["size"]] = chunk
    left = [chunk for chunk in wanted if chunk not in done]
    end = time.monotonic() + 60 * minutes if minutes else np.inf
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, max_tasks_per_child=400) as pool:
        waiting = iter(left)
        running = {pool.submit(run_chunk, *chunk): chunk for chunk, _ in zip(waiting, range(2 * workers), strict=False)}
        while running:
            finished = next(as_completed(running))
            chunk = running.pop(finished)
            done[chunk] = finished.result()
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(done[chunk]) + "\n")
            for failure in done[chunk]["failures"]:
                print(f"{chunk[0]} {failure['number']}: {failure['reason']}", file=sys.stderr, flush=True)
            following = next(waiting, None) if time.monotonic() < end else None
            if following:
                running[pool.submit(run_chunk, *following)] = following
    return [done[chunk] for chunk in wanted if chunk in done]


def summarise(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Outcomes by family."""
    table: dict[str, Any] = {}
    for chunk in chunks:
        entry = table.setdefault(
            chunk["family"], {"cases": 0, "outcomes": Counter(), "cpu_seconds": 0.0, "failures": []}
        )
        entry["cases"] += chunk["size"]
        entry["outcomes"].update(chunk["counts"])
        entry["cpu_seconds"] += chunk["seconds"]
        entry["failures"] += chunk["failures"]
    for entry in table.values():
        entry["outcomes"], entry["cpu_seconds"] = (
            dict(sorted(entry["outcomes"].items())),
            round(entry["cpu_seconds"], 1),
        )
    total = sum(entry["cases"] for entry in table.values())
    failed = sum(len(entry["failures"]) for entry in table.values())
    return {"cases": total, "failed": failed, "seeds": sorted({chunk["seed"] for chunk in chunks}), "families": table}


def page(summary: dict[str, Any]) -> str:
    """The summary in Markdown."""
    lines = [
        "# Bad input", "", f"{summary['cases']:,} cases of `python -m benchmarks.fuzz` (seed "
        f"{', '.join(map(str, summary['seeds']))}): {summary['failed']} failures. A failure is any exception but "
        "`ValueError`, `TypeError`, `FileNotFoundError` and the package's own, a message of more than one line or "
        "without the file's name, NaN, a NumPy warning, a changed file that is read differently, a minute without an "
        "answer, or a quarter of a gigabyte for a small file.", "", "| family | cases | outcomes |", "|---|---|---|",
    ]  # fmt: skip
    for name, entry in summary["families"].items():
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in entry["outcomes"].items())
        lines.append(f"| {name} | {entry['cases']:,} | {outcomes} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, count, write the summary; the exit code tells whether anything fell through."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever is left")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--out", help="folder of the summary; by default none is written")
    parser.add_argument("--work", default="runs/fuzz", help="folder of finished chunks")
    parser.add_argument("--only", help="one family", choices=[family.name for family in FAMILIES])
    parser.add_argument("--number", type=int, help="one case of that family, with its traceback")
    options = parser.parse_args(arguments)
    if options.number is not None:
        family = next(family for family in FAMILIES if family.name == options.only)
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng([options.seed, zlib.crc32(family.name.encode()), options.number])
            print(family.case(rng, Path(folder)))
        return 0
    chunks = run(options.cases, options.seed, Path(options.work), options.workers, options.minutes, options.only)
    summary = summarise(chunks)
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        document = {**summary, "provenance": provenance()}
        for name, text in (("summary.json", json.dumps(document, indent=1) + "\n"), ("README.md", page(summary))):
            with atomic_path(Path(options.out) / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
    print(page(summary))
    return 1 if summary["failed"] else 0
