"""Reading pickled arrays without running what a pickle may ask to run.

A pickle is a program: it may import and call anything. The official CIFAR-10 batches and the CIFAR-10N labels
are pickles of dictionaries with arrays, so a few names are enough to read them. None of those names reaches
NumPy: each is replaced by a record of its arguments here, from which arrays are made after shape and type
were checked.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["load_pickle", "load_torch_file"]

_TYPES = {"b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}


def load_pickle(path: str | os.PathLike[str]) -> Any:
    """Read a pickle of containers, text, numbers and numeric arrays; anything else is refused.

    Parameters
    ----------
    path : path
        The file. Text of Python 2 comes back as str where it is ASCII, else as bytes.

    Returns
    -------
    dict, list, tuple, str, bytes, number or ndarray
    """
    source = Path(path)
    with source.open("rb") as stream:
        return _load(stream, source)


def load_torch_file(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save`` that holds containers, text, numbers and NumPy arrays, but no tensors.

    Both of torch's layouts are read: the zip archive, and the older row of pickles.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    dict, list, tuple, str, bytes, number or ndarray
    """
    source = Path(path)
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            members = [name for name in archive.namelist() if name.split("/")[-1] == "data.pkl"]
            if len(members) != 1:
                raise ValueError(f"{source} is not a file of torch.save: it has no data.pkl.")
            return _load(io.BytesIO(archive.read(members[0])), source)
    with source.open("rb") as stream:
        for _ in range(3):  # a magic number, the layout's version, the machine's byte order
            _load(stream, source)
        return _load(stream, source)


class _DataType:
    """Stands for ``numpy.dtype``: remembers the code and the byte order."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = _text(code)
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def numpy(self) -> np.dtype[Any]:
        if self.code not in _TYPES or self.order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"arrays of type {self.order}{self.code} are not read")
        return np.dtype(self.code if self.order == "|" else self.order + self.code)


class _Array:
    """Stands for ``numpy.ndarray``: remembers what it was to be made of."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def numpy(self) -> NDArray[Any]:
        _, shape, data_type, column_major, raw = self.state
        if not isinstance(data_type, _DataType) or not isinstance(raw, bytes | bytearray):
            raise pickle.UnpicklingError("arrays of objects are not read")
        flat = np.frombuffer(bytes(raw), dtype=data_type.numpy())
        lengths = [int(length) for length in shape]
        if any(length < 0 for length in lengths) or math.prod(lengths) != len(flat):
            raise pickle.UnpicklingError(f"an array of shape {shape} does not fit {len(raw)} bytes")
        return flat.reshape(lengths, order="F" if column_major else "C").copy()


def _from_buffer(raw: Any, data_type: Any, shape: Any, order: Any) -> _Array:
    """Stand-in for ``numpy._core.numeric._frombuffer``, which newer pickles of arrays call."""
    array = _Array()
    array.state = (1, shape, data_type, _text(order) == "F", raw)
    return array


class _Scalar:
    """Stands for ``numpy._core.multiarray.scalar``: an array of one number."""

    def __init__(self, data_type: Any, raw: Any) -> None:
        self.array = _Array()
        self.array.state = (1, (), data_type, False, raw)

    def numpy(self) -> Any:
        return self.array.numpy()[()]


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand-in for ``_codecs.encode``, by which Python 3 writes bytes in the pickle protocol of Python 2."""
    if _text(encoding) != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding!r} is not read")
    return str(text).encode("latin1") if isinstance(text, str) else bytes(text)


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not read") from None

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it holds tensors, which are not read")


def _load(stream: Any, source: Path) -> Any:
    try:
        return _finish(_Reader(stream, encoding="bytes").load())
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(
            f"{source} cannot be read: {error}. Only pickles of plain containers and numeric arrays are "
            f"read; download the official file again if this should be one."
        ) from error


def _finish(value: Any) -> Any:
    """Turn stand-ins into arrays, and the byte strings of Python 2 into text where they are ASCII."""
    if isinstance(value, dict):
        return {_finish(key): _finish(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_finish(entry) for entry in value)
    if isinstance(value, _Array | _Scalar | _DataType):
        return value.numpy()
    if isinstance(value, bytes) and value.isascii():
        return value.decode("ascii")
    if value is None or isinstance(value, bytes | bytearray | str | int | float | bool):
        return value
    raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, which is not read")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)
