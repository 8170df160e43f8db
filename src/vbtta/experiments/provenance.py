"""Where a result comes from: the versions, the machine and the time of each trial, and the state of the code."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["NOT_RECORDED", "circumstances", "code_state", "made_by", "provenance"]

_PACKAGES = ("vbtta", "numpy", "scipy", "torch", "pyro-ppl", "kornia")
NOT_RECORDED = "not recorded"


def circumstances() -> dict[str, Any]:
    """Versions, machine and time, taken where and when a trial runs."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def provenance(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an item's trials say about how they were made."""
    return {
        "made": made_by(trials),
        "code": sorted({trial["code"] for trial in trials}),
        "seconds": round(sum(trial["seconds"] for trial in trials), 1),
    }


def made_by(trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every combination of versions and machine with the number of trials it made; what trials do not say is marked."""
    made: list[dict[str, Any]] = []
    for trial in trials:
        facts = trial.get("made", {})
        entry = {name: facts.get(name, NOT_RECORDED) for name in ("versions", "machine", "processor")}
        same = next((one for one in made if {**one, "trials": 0} == {**entry, "trials": 0}), None)
        if same is None:
            made.append({**entry, "trials": 1})
        else:
            same["trials"] += 1
    return made


def code_state() -> str:
    """Git hash of the package's source, marked where it has changed since."""
    if _git("ls-files", "--", "__init__.py") in ("", "unknown"):  # a copy inside some other repository
        return "unknown"
    commit = _git("rev-parse", "HEAD")
    if commit != "unknown" and _git("status", "--porcelain", "--untracked-files=no", "--", "."):
        return f"{commit} with changes"
    return commit


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


def _git(*arguments: str) -> str:
    folder = Path(__file__).parents[1]
    try:
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
