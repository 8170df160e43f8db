"""Where a result comes from: versions, the state of the code, the machine, the time."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["provenance"]

_PACKAGES = ("vbtta", "numpy", "scipy", "torch", "kornia")


def provenance() -> dict[str, Any]:
    """Facts about the run that made a result."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "git": _git("rev-parse", "HEAD"),
        "uncommitted_changes": _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks") != "",
        "machine": f"{platform.system()} {platform.machine()}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
