"""Inputs of a predictor from parquet files: images, arrays, or plain columns of numbers."""

__all__ = ["Piece", "pieces_of", "read_batches", "read_inputs"]

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.checks import require
from vbtta.data.files import columns_of, decode_images, footers, parquet_files
from vbtta.data.labels import Array
from vbtta.ray.cluster import blame

_PIECES = 8  # of a row group, at most: each is read from the group's start
_BUFFER = 1 << 18  # bytes of a column read at once; a whole group's columns may be larger than memory


class Piece(NamedTuple):
    """Consecutive rows of one input file: what one task works on."""

    path: str
    file: int  # its number
    start: int  # row of the file
    stop: int
    first: int  # row of the whole data set
    stamp: str  # changes with the file

    @property
    def name(self) -> str:
        """Of its result; names sort as the rows do."""
        return f"part-{self.file:07d}-{self.start:012d}"


def pieces_of(dataset: Any, rows: int, *, alike: bool = True) -> list[Piece]:
    """Input files cut into pieces of so many rows, or more where row groups are large; only footers are read.

    Where the files must be `alike`, the columns that inputs are made of are the same in all.
    """
    if hasattr(dataset, "write_parquet"):
        raise ValueError(
            "dataset must be paths of parquet files, by which finished parts are known again; a ray.data.Dataset does "
            "not tell its files: write it once, dataset.write_parquet(folder), and give the folder"
        )
    paths = parquet_files(dataset)
    files = footers(paths, "dataset")
    _check_columns(paths, [file.schema.to_arrow_schema().names for file in files], alike)
    pieces: list[Piece] = []
    first = 0
    for number, (path, file) in enumerate(zip(paths, files, strict=True)):
        largest = max((file.row_group(group).num_rows for group in range(file.num_row_groups)), default=0)
        size = max(rows, -(-largest // _PIECES))
        state = os.stat(path)
        stamp = f"{os.path.basename(path)} {state.st_size} {state.st_mtime_ns}"
        pieces += [
            Piece(path, number, start, min(start + size, file.num_rows), first + start, stamp)
            for start in range(0, file.num_rows, size)
        ]
        first += file.num_rows
    if not pieces:
        raise ValueError(f"dataset: {dataset} holds no rows")
    return pieces


def read_batches(piece: Piece, batch_size: int, read: Callable[[Any], Any] | None) -> Iterator[tuple[int, Array, Any]]:
    """First row in the whole data set, ids and inputs of batches; the next one is read while one is worked on."""
    make = partial(read_inputs, where=piece.path) if read is None else read
    with ThreadPoolExecutor(1) as pool:
        tables = _tables(piece, batch_size)
        coming = pool.submit(next, tables, None)
        first = piece.first
        while (table := coming.result()) is not None:
            coming = pool.submit(next, tables, None)
            ids = columns_of(table, ["instance"]).get("instance", np.arange(first, first + len(table)))
            with blame("read"):
                inputs = make(table)
            yield first, ids, inputs
            first += len(table)


def read_inputs(table: Any, where: str = "dataset") -> Array:
    """A predictor's inputs (n, ...) from a table.

    A column `image` of image files becomes numbers from 0 to 1 of shape (n, 3, H, W); a column `inputs` of lists (of
    lists ...) or tensors becomes an array; other tables must be numbers, one column a feature.
    """
    names = table.column_names
    if "image" in names:
        files: list[Any] = [
            cell.get("bytes") if isinstance(cell, dict) else cell for cell in table["image"].to_pylist()
        ]
        return decode_images(files, mode="RGB", where=where).astype(np.float32) / 255
    if "inputs" in names:
        column = table["inputs"].combine_chunks()
        if hasattr(column, "to_numpy_ndarray"):
            return np.asarray(column.to_numpy_ndarray())
        if hasattr(column.type, "shape"):  # Ray's own tensors
            return np.asarray(column.to_numpy(zero_copy_only=False))
        return _nested(column, where)
    try:
        columns = [table[name].to_numpy() for name in names if name != "instance"]
        return np.stack([column.astype(np.float64) for column in columns], axis=1)
    except (TypeError, ValueError):
        raise ValueError(
            f"dataset: {where} has no column 'image' or 'inputs', so all columns but 'instance' must be numbers; it "
            f"has {', '.join(names)}. Or give read=..., which makes inputs of a table"
        ) from None


def _check_columns(paths: list[str], names: list[list[str]], alike: bool) -> None:
    """The first file's columns are those of all: ids everywhere or nowhere, and inputs of the same columns."""
    for path, columns in zip(paths, names, strict=True):
        if ("instance" in columns) != ("instance" in names[0]):
            having, lacking = (path, paths[0]) if "instance" in columns else (paths[0], path)
            raise ValueError(f"dataset: {having} has a column 'instance' and {lacking} has none; give all files one")
        if alike and _of_inputs(columns) != _of_inputs(names[0]):
            raise ValueError(
                f"dataset: {path} has the columns {', '.join(columns)}, but {paths[0]} has {', '.join(names[0])}; give "
                "all files the same ones in the same order, or read=..."
            )


def _of_inputs(names: list[str]) -> list[str]:
    """The columns that :func:`read_inputs` looks at."""
    for name in ("image", "inputs"):
        if name in names:
            return [name]
    return [name for name in names if name != "instance"]


def _tables(piece: Piece, batch_size: int) -> Iterator[Any]:
    """The rows of a piece in batches; row groups that hold none of them are not read."""
    arrow, parquet = require("pyarrow", "ray"), require("pyarrow.parquet", "ray")
    with parquet.ParquetFile(piece.path, buffer_size=_BUFFER, pre_buffer=False) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        edges = np.cumsum([0, *sizes])
        groups = [group for group in range(len(sizes)) if edges[group] < piece.stop and edges[group + 1] > piece.start]
        at = int(edges[groups[0]])
        for batch in file.iter_batches(batch_size=batch_size, row_groups=groups):
            low, high = max(piece.start - at, 0), min(piece.stop - at, len(batch))
            at += len(batch)
            if high > low:
                yield arrow.Table.from_batches([batch.slice(low, high - low)])
            if at >= piece.stop:
                return


def _nested(column: Any, where: str) -> Array:
    """A column of equally long lists as one array."""
    shape = [len(column)]
    while hasattr(column.type, "value_type"):
        if column.null_count:
            raise ValueError(f"dataset: column 'inputs' of {where} has gaps")
        inner = column.flatten()
        lengths = require("pyarrow.compute", "ray").list_value_length
        if not hasattr(column.type, "list_size") and len(lengths(column).unique()) != 1:
            raise ValueError(f"dataset: the lists of column 'inputs' of {where} differ in length; pad them")
        shape.append(len(inner) // len(column))
        column = inner
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
