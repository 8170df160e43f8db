"""Files of the reproduction: written whole or not at all, named by what they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta._support.files import atomic_path, set_aside
from vbtta.data.files import read_npz

try:
    import fcntl
except ImportError:  # Windows: two processes may then make the same file
    fcntl = None  # type: ignore[assignment]


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over JSON-able values and arrays.

    Examples
    --------
    >>> fingerprint("mnist", 28) == fingerprint("mnist", 28) != fingerprint("mnist", 32)
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cached_arrays(path: Path | None, make: Callable[[], Mapping[str, NDArray[Any]]]) -> Mapping[str, NDArray[Any]]:
    """Arrays from an .npz file, or made and written there; a path of None keeps nothing."""
    if path is None:
        return make()
    with exclusive(path.parent, path.stem):
        if path.is_file():
            try:
                return read_npz(path)
            except ValueError as error:
                set_aside(path, error)
        arrays = make()
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        return arrays


@contextmanager
def exclusive(folder: Path | None, name: str) -> Iterator[None]:
    """Let one process at a time make a file; those that waited find it made (where files can be locked)."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if folder is None or fcntl is None:
        yield
        return
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process dies
        yield
