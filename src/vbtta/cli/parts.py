"""Finished parts of long work, kept beside the output until it is complete."""

__all__ = ["Parts", "ScoredParts", "fingerprint", "write_arrays"]

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.files import atomic_path
from vbtta.comparison import Scored
from vbtta.data.labels import Array


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits of a hash of the parts; arrays count with all their bytes."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).tobytes())
        else:
            state.update(json.dumps(part, sort_keys=True, default=str).encode())
        state.update(b"\0")
    return state.hexdigest()[:16]


def write_arrays(path: Path, members: Mapping[str, Array]) -> None:
    """Write an .npz file of plain arrays, atomically."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **members)


class Parts:
    """A folder of arrays beside an output (None: nothing is kept); the key is a fingerprint of data and options."""

    def __init__(self, output: Path | None, key: str) -> None:
        self.folder = None if output is None else output.with_name(f"{output.name}.parts")
        self.key = key

    def load(self, name: str) -> dict[str, Array] | None:
        """A part that was kept, or None."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as members:
            return {key: members[key] for key in members.files}

    def save(self, name: str, members: Mapping[str, Array]) -> None:
        """Keep a part."""
        path = self._path(name)
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            write_arrays(path, members)

    def clear(self) -> None:
        """Remove all parts: the output is complete."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40]
        return self.folder / f"{self.key}-{fingerprint(name)[:8]}-{plain}.npz"


class ScoredParts(dict[str, Scored]):
    """Scored methods of a comparison, kept as parts; those kept before are read at the start."""

    def __init__(self, parts: Parts, names: Iterable[str]) -> None:
        super().__init__()
        self.parts = parts
        for name in names:
            members = parts.load(name)
            if members is not None:
                columns = {str(metric): members[f"metric_{metric}"] for metric in members["order"]}
                views = tuple(str(view) for view in members["views"])
                super().__setitem__(name, Scored(columns, views, float(members["seconds"])))

    def __setitem__(self, name: str, score: Scored) -> None:
        super().__setitem__(name, score)
        members = {f"metric_{metric}": table for metric, table in score.columns.items()}
        members |= {"order": np.array(list(score.columns)), "views": np.array(score.views)}
        self.parts.save(name, {**members, "seconds": np.array(score.seconds)})
