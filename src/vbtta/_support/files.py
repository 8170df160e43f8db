"""Files that are whole or not there, and records of arrays as plain data (dicts, lists, numbers) for JSON."""

__all__ = ["atomic_path", "fields_from_plain", "finite", "from_plain", "read_json", "to_plain", "write_json"]

import dataclasses
import json
import math
import os
import secrets
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from vbtta._version import __version__

T = TypeVar("T")

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
    """A dataclass, NamedTuple, array or number as JSON knows it; by its `to_dict` where it has one."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
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
    if hasattr(kind, "from_dict"):
        return kind.from_dict(data)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if data is None else from_plain(options[0], data)
    if origin is np.ndarray:
        return _array(data)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return fields_from_plain(kind, data)
    if origin is dict:
        return {name: from_plain(get_args(kind)[1], entry) for name, entry in data.items()}
    if origin is tuple:
        return tuple(from_plain(get_args(kind)[0], entry) for entry in data)
    if kind in (float, int, bool, str):
        if not isinstance(data, int | float | str) or isinstance(data, str) != (kind is str):
            raise ValueError(f"expected {kind.__name__}, found {data!r}")
        return kind(data)
    return data


def fields_from_plain(kind: type[T], data: Any) -> T:
    """A dataclass or NamedTuple from the plain data of its fields."""
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} is missing or damaged")
    hints = {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}
    absent = [name for name in hints if name not in data and name not in getattr(kind, "_field_defaults", {})]
    if absent:
        raise ValueError(f"{kind.__name__} lacks {absent[0]!r}")
    return kind(**{name: from_plain(hint, data[name]) for name, hint in hints.items() if name in data})


def _array(data: Any) -> Any:
    try:
        array = np.asarray(data)
    except ValueError:
        raise ValueError("an array is damaged: its rows have different lengths") from None
    if array.dtype == object:
        raise ValueError("an array is damaged: it holds something other than numbers or strings")
    return array.astype(np.float64) if array.dtype.kind in "if" else array


def write_json(path: str | os.PathLike[str], kind: str, version: int, data: dict[str, Any]) -> None:
    """Write JSON of a format and version, atomically: one top-level entry a line and arrays in one line each."""
    entries = {"format": kind, "version": version, "vbtta": __version__, **data}
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in entries.items()]
    with atomic_path(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_json(
    path: str | os.PathLike[str], kind: str, version: int, name: str, build: Callable[[dict[str, Any]], T]
) -> T:
    """Build what :func:`write_json` wrote; another format, a newer version or a damaged file is refused."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {name} file at {path}; write one with its save method")
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file, parse_constant=_no_constant)
    except ValueError as error:  # not text, not JSON, or a number that is none
        raise ValueError(f"{path} is not a {name}: it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != kind:
        raise ValueError(f"{path} is not a {name}: its format is not {kind!r}; write one with its save method")
    if type(data.get("version")) is not int or not 1 <= data["version"] <= version:
        raise ValueError(
            f"{path} has version {data.get('version')!r} of the format, and this vbtta ({__version__}) reads up to "
            f"{version}; upgrade vbtta"
        )
    try:
        return build(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is a damaged {name}: {reason}; save it again") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is no number")
