"""Files that are whole or not there, and records of arrays as plain data (dicts, lists, numbers) for JSON."""

__all__ = ["atomic_path", "finite", "from_plain", "to_plain"]

import dataclasses
import math
import os
import secrets
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

_PREFIX = 40  # letters of the target's name, so that the temporary name is not too long for the file system


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the target's folder; it replaces the target when the block succeeds.

    A reader sees the old file or the new one, never a part of either, and a failure leaves no temporary file.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the name of a file in it")
    temporary = target.with_name(f".{target.name[:_PREFIX]}.{secrets.token_hex(8)}.part")
    with _renamed_errors(target, temporary):
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _renamed_errors(target: Path, temporary: Path) -> Iterator[None]:
    """Make errors about the temporary file name the target."""
    try:
        yield
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(target), None
        raise


def to_plain(value: Any) -> Any:
    """A dataclass, NamedTuple, array or number as JSON knows it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return value


def finite(value: Any) -> Any:
    """Plain data without the numbers that JSON does not have: they become None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of a type, from what :func:`to_plain` made of it; raises ValueError where it does not fit."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if data is None else from_plain(options[0], data)
    if origin is np.ndarray:
        return _array(data)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        if not isinstance(data, dict):
            raise ValueError(f"{kind.__name__} is missing or damaged")
        hints = {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}
        absent = [name for name in hints if name not in data]
        if absent:
            raise ValueError(f"{kind.__name__} lacks {absent[0]!r}")
        return kind(**{name: from_plain(hint, data[name]) for name, hint in hints.items()})
    if origin is tuple:
        return tuple(from_plain(get_args(kind)[0], entry) for entry in data)
    if kind in (float, int, bool, str):
        if not isinstance(data, int | float | str) or isinstance(data, str) != (kind is str):
            raise ValueError(f"expected {kind.__name__}, found {data!r}")
        return kind(data)
    return data


def _array(data: Any) -> Any:
    try:
        array = np.asarray(data)
    except ValueError:
        raise ValueError("an array is damaged: its rows have different lengths") from None
    if array.dtype == object:
        raise ValueError("an array is damaged: it holds something other than numbers or strings")
    return array.astype(np.float64) if array.dtype.kind in "if" else array
