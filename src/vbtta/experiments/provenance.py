"""Where a result comes from: versions, the state of the code, the machine, the time."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["code_state", "provenance"]

_PACKAGES = ("vbtta", "numpy", "scipy", "torch", "pyro-ppl", "kornia")


def provenance() -> dict[str, Any]:
    """Facts about the run that made a result."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def code_state() -> str:
    """Git hash of the package's source, marked where it has changed since."""
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
