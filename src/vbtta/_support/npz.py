"""Arrays from .npz files: never unpickled, and mapped where they can be."""

__all__ = ["read_npz"]

import os
import zipfile
from collections.abc import Collection
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray


def read_npz(path: str | os.PathLike[str], mapped: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """All arrays of a file by name; those in `mapped` stay on disk where they are stored uncompressed.

    NumPy's own `mmap_mode` ignores `.npz` files; here a member is mapped by its offset in the archive.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            return {
                info.filename.removesuffix(".npy"): _read_member(archive, file, info, str(path), mapped)
                for info in archive.infolist()
            }
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is not an .npz file; write one with ViewPredictions.save or numpy.savez") from None


def _read_member(
    archive: zipfile.ZipFile, file: BinaryIO, info: zipfile.ZipInfo, path: str, mapped: Collection[str]
) -> NDArray[Any]:
    name = info.filename.removesuffix(".npy")
    try:
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(member)
            header_size = member.tell()
        if dtype.hasobject:
            raise ValueError("holds pickled objects, which are never loaded")
        if name not in mapped or info.compress_type != zipfile.ZIP_STORED:
            with archive.open(info) as member:
                return np.asarray(np.lib.format.read_array(member, allow_pickle=False))
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: array {name!r} cannot be read: {error}") from None
    file.seek(info.header_offset + 26)  # the local header repeats the name and may have another extra field
    skip = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
    offset = info.header_offset + 30 + skip + header_size
    order: Literal["F", "C"] = "F" if fortran else "C"
    if not np.prod(shape):
        return np.zeros(shape, dtype=dtype)  # an empty array cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)
