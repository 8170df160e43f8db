"""Finished parts of long work, kept beside the output until it is whole."""

__all__ = ["Parts", "ScoredParts", "fingerprint"]

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.files import atomic_path
from vbtta.comparison.running import Scored
from vbtta.labels import Array


def fingerprint(*parts: Any) -> str:
    """Sixteen digits that differ where any of the parts does; arrays count with all their bytes."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).tobytes())
        else:
            state.update(json.dumps(part, sort_keys=True, default=str).encode())
        state.update(b"\0")
    return state.hexdigest()[:16]


class Parts:
    """A folder of arrays beside an output; parts of other data or options are not found there.

    Parameters
    ----------
    output : Path or None
        The file that the work will make; without one nothing is kept.
    key : str
        Fingerprint of all that the result depends on.
    """

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

    def save(self, name: str, members: dict[str, Array]) -> None:
        """Keep a part."""
        path = self._path(name)
        if path is None:
            return
        path.parent.mkdir(exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **members)

    def clear(self) -> None:
        """Remove all parts: the output is whole."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40]
        return self.folder / f"{self.key}-{fingerprint(name)[:8]}-{plain}.npz"


class ScoredParts(MutableMapping[str, Scored]):
    """Scored methods of a comparison, kept as parts.

    Parameters
    ----------
    parts : Parts
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.known: dict[str, Scored] = {}

    def __getitem__(self, name: str) -> Scored:
        if name not in self.known:
            found = self.parts.load(name)
            if found is None:
                raise KeyError(name)
            views = tuple(str(view) for view in found.pop("views"))
            seconds = float(found.pop("seconds"))
            order = [str(metric) for metric in found.pop("order")]
            self.known[name] = Scored({metric: found[f"metric_{metric}"] for metric in order}, views, seconds)
        return self.known[name]

    def __setitem__(self, name: str, value: Scored) -> None:
        self.known[name] = value
        members = {f"metric_{metric}": table for metric, table in value.columns.items()}
        order = np.array(list(value.columns))
        self.parts.save(
            name, {**members, "order": order, "views": np.array(value.views), "seconds": np.array(value.seconds)}
        )

    def __delitem__(self, name: str) -> None:
        del self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)
