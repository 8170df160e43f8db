"""Where a result comes from: versions, state of the code, machine and time."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("vbtta", "numpy", "scipy", "torch", "pyro-ppl", "kornia")
_CODE = ("src", "reproduction", "benchmarks")


def provenance() -> dict[str, Any]:
    """Facts about the process that makes a result; `git` is the commit of the code, "unknown" outside its repository.

    Examples
    --------
    >>> sorted(provenance())
    ['git', 'machine', 'processor', 'time', 'uncommitted_changes', 'versions']
    """
    known = _git("ls-files", "--", "reproduction/provenance.py") not in ("", "unknown")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "git": _git("rev-parse", "HEAD") if known else "unknown",
        "uncommitted_changes": known and _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE) != "",
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


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
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()
