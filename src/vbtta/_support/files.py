"""Files that are whole or not there, and records of arrays as plain data (dicts, lists, numbers) for JSON."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import secrets
import socket
import stat
import types
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from vbtta._version import __version__

T = TypeVar("T")

_PREFIX = 40  # letters of the target's name, so that the temporary name is not too long for the file system
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the target's folder; it replaces the target when the block succeeds.

    A reader sees the old file or the new one, never a part of either, and a failure leaves no temporary file. Links are
    followed and the old file's mode is kept. Temporary files of processes that were killed are removed.
    """
    target = checked_target(path)
    _remove_stale(target.parent)
    temporary = target.with_name(f".{target.name[:_PREFIX]}.{_machine()}.{os.getpid()}.{secrets.token_hex(8)}.part")
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode) if target.exists() else None
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            os.close(os.open(temporary, flags, 0o666 if mode is None else mode | 0o200))
            yield temporary
            _sync(temporary)
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:  # of the temporary file: name the target
        if error.filename not in (None, str(temporary), temporary):
            raise
        remedy = "; free some space, or write elsewhere" if error.errno in _FULL else ""
        reason = f"{error.strerror or error}{remedy}"
        raise OSError(error.errno or errno.EIO, reason, os.fspath(path)) from error
    with suppress(OSError):  # not all file systems sync folders
        _sync(target.parent)


def checked_target(path: str | os.PathLike[str]) -> Path:
    """The file that a path stands for, links followed, if it can be written."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise ValueError(f"cannot write {path}: it is a link that leads back to itself; remove it first")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is a device, pipe or socket; give the name of a file")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in {target.parent}; choose another folder")
    return target


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


@cache
def _machine() -> str:
    """Within which process ids are unique: this host and its name space of processes."""
    space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else ""
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


@cache
def _remove_stale(folder: Path) -> None:
    """Remove temporary files of dead processes of this machine, once in a process and folder."""
    for file in folder.glob(f".*.{_machine()}.*.part") if os.name == "posix" else ():
        process = file.name.split(".")[-3]
        with suppress(OSError, ValueError, OverflowError):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                file.unlink()


def set_aside(path: Path, reason: object) -> None:
    """Rename a damaged file of an earlier run, so that it is made again."""
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    text = str(reason).partition("\n")[0]
    warnings.warn(f"{path} is damaged ({text}); it is set aside as {aside.name} and made again", stacklevel=3)


def to_plain(value: Any) -> Any:
    """A dataclass, NamedTuple, array or number in the types of JSON; by its `to_dict` where it has one."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if names := getattr(value, "_fields", getattr(value, "__dataclass_fields__", ())):
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return value


def finite(value: Any) -> Any:
    """Plain data without the numbers that JSON does not have: they become None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def from_plain(kind: Any, data: Any, sizes: dict[str, int] | None = None) -> Any:
    """The value of a type, from what :func:`to_plain` made of it; raises ValueError where it does not fit.

    Arrays may be of a shape, as `Annotated[Array, "K C"]` (alternatives are separated by a bar); `sizes` has the
    lengths of the axes, and takes those that are met first. Functions after the shape refuse other arrays.
    """
    sizes = {} if sizes is None else sizes
    if hasattr(kind, "from_dict"):
        return kind.from_dict(data)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if data is None else from_plain(options[0], data, sizes)
    if origin is Annotated:
        array = _shaped(_array(data), kind.__metadata__[0], sizes)
        for check in kind.__metadata__[1:]:
            check(array)
        return array
    if origin is np.ndarray:
        return _array(data)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return fields_from_plain(kind, data, sizes)
    if origin is dict:
        return {name: from_plain(get_args(kind)[1], entry, sizes) for name, entry in data.items()}
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"expected a list, found {data!r:.80}")
        return tuple(from_plain(get_args(kind)[0], entry, sizes) for entry in data)
    if kind in (float, int, bool, str):
        if not fits(kind, data):
            raise ValueError(f"expected {kind.__name__}, found {data!r:.80}")
        return kind(data)
    return data


def fields_from_plain(kind: type[T], data: Any, sizes: dict[str, int] | None = None) -> T:
    """A dataclass or NamedTuple from the plain data of its fields, by its `validate` if any; errors name the field."""
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} is missing or damaged")
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name[0] != "_"}
    absent = [name for name in hints if name not in data and name not in getattr(kind, "_field_defaults", {})]
    if absent:
        raise ValueError(f"{kind.__name__} lacks {absent[0]!r}")
    values = {}
    for name, hint in hints.items():
        try:
            values.update({name: from_plain(hint, data[name], sizes)} if name in data else {})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    record: Any = kind(**values)
    if hasattr(record, "validate"):
        record.validate()
    return record  # type: ignore[no-any-return]


def fits(kind: Any, value: Any) -> bool:
    """Whether plain data may stand for an option of a type, as far as its annotation tells."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(option, value) for option in options)
    if origin is Literal:
        return value in options
    if kind in (float, int):
        return isinstance(value, kind | int) and not isinstance(value, bool)
    if kind in (bool, str, types.NoneType, Any):
        return isinstance(value, str | int | float if kind is Any else kind)
    if origin in (tuple, Sequence):
        return isinstance(value, list) and all(fits(options[0], entry) for entry in value)
    return isinstance(value, str if origin is Callable else dict)  # the name of a function, or a record


def _has_truth_values(data: Any) -> bool:
    return any(map(_has_truth_values, data)) if isinstance(data, list) else isinstance(data, bool)


def _array(data: Any) -> Any:
    try:
        array = np.asarray(data)
    except ValueError:
        raise ValueError("an array is damaged: its rows have different lengths") from None
    if array.dtype.kind not in "ifU" or not isinstance(data, list | int | float) or _has_truth_values(data):
        raise ValueError("an array is damaged: it holds something other than numbers or strings")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("an array is damaged: it holds a number that is not finite")
    return array if array.dtype.kind == "U" else array.astype(np.float64)


def _shaped(array: Any, shapes: str, sizes: dict[str, int]) -> Any:
    """The array, if its axes have the lengths that letters or digits stand for."""
    for letters in (shape.split() for shape in shapes.split("|")):
        if array.shape == (0,):  # JSON does not tell the other axes
            array = array.reshape(0, *(sizes.get(letter, 0) for letter in letters[1:]))
        axis_sizes = dict(zip(letters, array.shape, strict=False))
        lengths = {**axis_sizes, **sizes}
        wanted = [int(letter) if letter.isdigit() else lengths[letter] for letter in letters[: array.ndim]]
        if array.dtype.kind == "f" and len(letters) == array.ndim and list(array.shape) == wanted:
            sizes.update({letter: n for letter, n in axis_sizes.items() if not letter.isdigit()})
            return array
    known = ", ".join(f"{letter} = {n}" for letter, n in sizes.items())
    raise ValueError(f"an array of numbers ({shapes}) with {known} has shape {array.shape}")


def write_json(path: str | os.PathLike[str], kind: str, version: int, data: dict[str, Any]) -> None:
    """Write JSON of a format and version, atomically: one top-level entry a line and arrays in one line each."""
    entries = {"format": kind, "version": version, "vbtta": __version__, **data}
    entries["checksum"] = _checksum(entries)
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in entries.items()]
    with atomic_path(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_json(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    name: str,
    build: Callable[[dict[str, Any]], T],
    verify: bool = True,
) -> T:
    """Build what :func:`write_json` wrote; another format, a newer version or a damaged file is refused."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {name} file at {path}; write one with its save method")
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError) as error:  # not text, not JSON, or a number that is none
        raise ValueError(f"{path} is not a {name}: it is not JSON ({error}); save it again") from None
    if not isinstance(data, dict) or data.get("format") != kind:
        raise ValueError(f"{path} is not a {name}: its format is not {kind!r}; use load of the class that saved it")
    if type(data.get("version")) is not int or not 1 <= data["version"] <= version:
        raise ValueError(
            f"{path} has version {data.get('version')!r:.80} of the format, and this vbtta ({__version__}) reads up to "
            f"{version}; upgrade vbtta"
        )
    if verify and data.pop("checksum", None) != _checksum(data):
        raise ValueError(
            f"{path} is a damaged {name}: its checksum does not match its content; save it again, or load a file that "
            "was edited by hand with verify=False"
        )
    if not isinstance(data.get("vbtta"), str):
        raise ValueError(f"{path} is a damaged {name}: vbtta is {data.get('vbtta')!r:.80}, no version; save it again")
    try:
        return build(data)
    except Exception as error:  # whatever damaged numbers lead to
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise ValueError(f"{path} is a damaged {name}: {reason}; save it again") from None


def _checksum(entries: dict[str, Any]) -> str:
    """SHA-256 of the entries, whatever their order and the file's white space."""
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"it holds {text:.40}, which is no number")
    return float(text)
