"""Files of predictions (npz, parquet) and labels (CSV, parquet), for library, command line and Ray."""

import csv
import json
import math
import os
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from vbtta._support.checks import one_of, printable, require
from vbtta._support.files import atomic_path
from vbtta.data.labels import Array, LabelSets, first_seen
from vbtta.data.predictions import ViewPredictions, pivot

_METADATA = b"vbtta"  # key of a parquet file's metadata
_REMEDY = ". Predictions of other files: ViewPredictions.load(path).save('views.parquet')"
_FORMULA = re.compile(r"'*[=+\-@]")  # the beginning of a cell that a spreadsheet might compute
_MAX_INFLATION = 200  # times that the arrays of a file may be larger than the file

# -- predictions ----------------------------------------------------------------------------------


def read_predictions(path: Any, *, mmap: bool = False) -> ViewPredictions:
    """Read predictions from an .npz file, a parquet file (either layout), or a folder or list of parquet files."""
    if isinstance(path, str | os.PathLike):
        if not os.path.exists(path):
            raise FileNotFoundError(f"no predictions file at {path}; write one with ViewPredictions.save")
        if Path(path).suffix == ".npz":
            return _read_predictions_npz(path, mmap)
        if Path(path).suffix == ".parquet" and "outputs" not in _schema(path, "predictions").names:
            return one_row_a_view(read_table(path), path)
        if Path(path).suffix != ".parquet" and not os.path.isdir(path):
            raise ValueError(f"{path}: predictions are read from .npz or .parquet; write one with ViewPredictions.save")
    first, *others = [chunk.read() for chunk in open_chunks(path)]
    try:
        return first.concat(others) if others else first
    except ValueError as error:
        raise ValueError(f"dataset: the files of {path} cannot be joined: {error}") from None


def write_predictions(path: str | os.PathLike[str], predictions: ViewPredictions) -> None:
    """Write predictions to an .npz file, uncompressed so that it can be mapped, or to a parquet file."""
    one_of(f"the ending of {path}", Path(path).suffix, (".npz", ".parquet"))
    if Path(path).suffix == ".parquet":
        with atomic_path(path) as temporary:
            write_arrow(prediction_table(predictions), temporary)
        return
    keys = ("outputs", "variance", "ids", "classes", "groups", "draws", "features")
    members = {key: getattr(predictions, key) for key in keys}
    members["names"] = None if predictions.generated_names else predictions.names
    members["feature_names"] = predictions.feature_names or None
    if predictions.fingerprints:
        members["fingerprints"] = [predictions.fingerprints.get(name, "") for name in predictions.names]
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        arrays = {key: np.asarray(values) for key, values in members.items() if values is not None}
        np.savez(file, allow_pickle=False, **arrays)


def _read_predictions_npz(path: str | os.PathLike[str], mmap: bool) -> ViewPredictions:
    members = read_npz(path, mapped=("outputs", "variance") if mmap else ())
    if "outputs" not in members:
        raise ValueError(f"{path} has no array 'outputs' of shape (N, K, C); it has {sorted(members)}")
    names = [str(name) for name in members["names"]] if "names" in members else None
    prints = zip(names or (), members.get("fingerprints", ()), strict=False)
    fingerprints = {name: str(text) for name, text in prints if str(text)}
    rest = {key: members.get(key) for key in ("ids", "classes", "groups", "draws", "features", "feature_names")}
    try:
        return ViewPredictions(
            members["outputs"], members.get("variance"), names=names, fingerprints=fingerprints, **rest
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _native(values: Array) -> Array:
    """The same in the machine's byte order, the only one that Arrow knows."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def prediction_table(predictions: ViewPredictions) -> Any:
    """Predictions as an Arrow table with one row an instance: `instance, outputs[K*C], variance[K*C], group`."""
    arrow = require("pyarrow", "data")
    if predictions.features is not None:
        raise ValueError(f"features {list(predictions.feature_names)} are kept in .npz files only; save to one")
    _, n_views, n_outputs = predictions.outputs.shape
    columns = {}
    if predictions.ids is not None:
        columns["instance"] = arrow.array(_native(predictions.ids))
    for name in ("outputs", "variance"):
        if (values := getattr(predictions, name)) is not None:
            flat = arrow.array(_native(np.ascontiguousarray(values).ravel()))
            columns[name] = arrow.FixedSizeListArray.from_arrays(flat, n_views * n_outputs)
    if predictions.groups is not None:
        columns["group"] = arrow.array(_native(predictions.groups))
    metadata = {
        "names": None if predictions.generated_names else predictions.names,
        "shape": [n_views, n_outputs],
        "classes": None if predictions.classes is None else predictions.classes.tolist(),
        "fingerprints": predictions.fingerprints,
    }
    return arrow.table(columns).replace_schema_metadata({_METADATA: json.dumps(metadata).encode()})


class Chunk(NamedTuple):
    """Consecutive rows of predictions that can be read on their own: a row group of a parquet file."""

    where: Any  # path of the file
    place: int  # number of the row group
    first: int  # row of the whole data set
    n_rows: int
    empty: ViewPredictions  # no rows: views, outputs and classes

    def read(self) -> ViewPredictions:
        """All rows."""
        table = self.table(("instance", "outputs", "variance", "group"))
        shape = (len(table), *self.empty.outputs.shape[1:])
        with reading(self.where):
            arrays = {name: _lists(table[name], name).reshape(shape) for name in ("outputs", "variance")
                      if name in table.column_names}  # fmt: skip
            keys = columns_of(table, ["instance", "group"])
            return self.empty.like(arrays["outputs"], arrays.get("variance"), keys.get("instance"), keys.get("group"))

    def ids(self) -> Array | None:
        """The rows' identifiers alone."""
        return columns_of(self.table(("instance",))).get("instance")

    def table(self, columns: Iterable[str]) -> Any:
        """Some columns of a row group, as far as they are there."""
        parquet = require("pyarrow.parquet", "data")
        with reading(self.where), parquet.ParquetFile(self.where, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            return file.read_row_group(self.place, columns=[name for name in columns if name in names])


def open_chunks(dataset: Any) -> list[Chunk]:
    """The row groups of parquet files with one row an instance, in order; only footers are read."""
    paths = parquet_files(dataset)
    files = footers(paths, "dataset")
    with reading(dataset):
        schemas = [footer.schema.to_arrow_schema() for footer in files]
    empty = _views_of_schema(schemas[0], paths[0])
    chunks, first = [], 0
    for path, footer, schema in zip(paths, files, schemas, strict=True):
        if _views_of(schema) != _views_of(schemas[0]):
            raise ValueError(f"dataset: {path} holds other views or outputs than {paths[0]}; keep one run in a folder")
        for group in range(footer.num_row_groups):
            size = footer.row_group(group).num_rows
            if size:
                chunks.append(Chunk(path, group, first, size, empty))
                first += size
    if not chunks:
        raise ValueError(f"dataset: {dataset} holds no rows")
    return chunks


@contextmanager
def reading(where: Any) -> Iterator[None]:
    """Name the file, in one line, in what a damaged one makes Arrow and constructors raise."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, OSError, EOFError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise ValueError(f"{where} cannot be read: {reason}; write it again") from None


def _views_of_schema(schema: Any, where: str) -> ViewPredictions:
    """Predictions without rows, of the views that a file's schema describes."""
    if "outputs" not in schema.names or _METADATA not in (schema.metadata or {}):
        columns = f"the columns {', '.join(schema.names)}"
        remedy = "save it with ViewPredictions.save, or give a row an instance and view"
        raise ValueError(f"dataset: {where} does not say which views it holds: {remedy}; it has {columns}")
    with reading(where):
        known = json.loads(schema.metadata[_METADATA])
        zeros = np.zeros((0, *known.pop("shape")))
        return ViewPredictions(zeros, zeros if "variance" in schema.names else None, **known)


def parquet_files(dataset: Any, name: str = "dataset") -> list[str]:
    """Paths of the parquet files that a path, a folder or a list of paths stands for, in order."""
    if hasattr(dataset, "write_parquet"):
        remedy = "write it once, dataset.write_parquet(folder), and give the folder"
        raise ValueError(f"{name} must be paths of parquet files, which a ray.data.Dataset does not tell: {remedy}")
    entries = [dataset] if isinstance(dataset, str | os.PathLike) else dataset
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(p, str | os.PathLike) for p in entries):
        raise TypeError(f"{name} must be a path or a list of paths; got {dataset!r}")
    paths: list[str] = []
    for path in map(Path, entries):
        if not path.exists():
            raise FileNotFoundError(f"{name}: there is nothing at {path}; all nodes must see it under this path")
        inside = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{name}: the folder {path} holds no .parquet files")
        paths += [str(file.resolve()) for file in inside]
    return paths


def _views_of(schema: Any) -> tuple[Any, ...]:
    """What must be the same in all files of a data set."""
    return (schema.metadata or {}).get(_METADATA), schema.field("outputs").type, "variance" in schema.names


def one_row_a_view(table: Mapping[str, Array], path: Any) -> ViewPredictions:
    """Predictions of a table with one row an instance and view."""
    for name in ("instance", "view"):
        if name not in table:
            raise ValueError(f"{path} has no column {name!r}; predictions have one row an instance and view")
    columns = [name for name in table if re.fullmatch(r"output(_.+)?|logit_.+", name)]
    if not columns:
        raise ValueError(f"{path} has no outputs: name them output, output_1, ... or logit_<class>")
    ids, row = first_seen(table["instance"])
    names, view = first_seen(table["view"].astype(str))
    times = np.bincount(row * len(names) + view, minlength=len(ids) * len(names))
    if (times != 1).any():
        where = int(np.argmax(times != 1))
        raise ValueError(
            f"{path}: instance {printable(ids[where // len(names)])} has {times[where]} rows of view "
            f"{str(names[where % len(names)])!r}; every instance needs one row of every view"
        )
    by_view = partial(pivot, table, row=row, view=view, shape=(len(ids), len(names)), where=path)
    spread = [f"variance_{name.partition('_')[2]}" if "_" in name else "variance" for name in columns]
    features = [name for name in table if name.startswith("feature_")]
    groups = None
    if "group" in table:
        groups = table["group"][np.unique(row, return_index=True)[1]]
        if (groups[row] != table["group"]).any():
            raise ValueError(f"{path}: 'group' differs between the views of an instance; give every instance one group")
    endings = [name.removeprefix("logit_") for name in columns]
    try:
        return ViewPredictions(
            by_view(columns), by_view(spread) if all(name in table for name in spread) else None, names=list(names),
            ids=ids, groups=groups, classes=_typed(endings) if columns[0].startswith("logit_") else None,
            features=by_view(features) if features else None,
            feature_names=[name.removeprefix("feature_") for name in features] or None,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


# -- labels ---------------------------------------------------------------------------------------


def read_labels(path: str | os.PathLike[str]) -> LabelSets:
    """Read labels from a CSV or parquet file, in either layout; as :meth:`LabelSets.from_table` reads its columns."""
    try:
        table = read_table(path)
        sets = LabelSets.from_columns(table, str(path))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    if not len(sets):
        raise ValueError(f"{path} holds no labels: the lines below its first are empty or missing; add some")
    return sets


def write_labels(path: str | os.PathLike[str], labels: LabelSets) -> None:
    """Write labels in the long layout to a CSV or parquet file."""
    if labels.by_position or labels.value.ndim > 1 or labels.soft:
        raise ValueError("counts, probabilities, rankings and vectors are not written; keep the arrays or tables")
    if Path(path).suffix == ".csv" and "" in labels.value.astype(str):
        raise ValueError(f"{path}: a label is blank, which stands for none in CSV files; write a .parquet")
    columns, weights = labels.table(), np.ones(len(labels))
    if labels.instance_weights is not None:
        weights = columns["instance_weight"] = labels.instance_weights[labels.instance]
    if (labels.count != weights).any():
        columns["count"] = labels.count / weights
    write_table(path, columns)


# -- tables ---------------------------------------------------------------------------------------


def read_table(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Columns of a CSV or parquet file; of a CSV blank cells are None, and white space around cells is left out."""
    path = Path(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"no table at {path}; give the path of a .csv or .parquet file")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the path of a .csv or .parquet file")
    if path.suffix == ".parquet":
        _schema(path, "")
        with reading(path):
            return columns_of(require("pyarrow.parquet", "data").read_table(path, page_checksum_verification=True))
    if path.suffix != ".csv":
        raise ValueError(f"{path}: tables are read from .csv or .parquet files")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}; save it as one") from None
    if not rows:
        raise ValueError(f"{path} is empty; its first line must name the columns")
    header = [_without_quote(name) for name in rows[0]]
    if len(header) == 1 and (mark := re.search("[;\t]", header[0])):
        raise ValueError(f"{path} has {mark[0]!r} between its columns; write commas")
    if len(set(header)) < len(header):
        raise ValueError(f"{path} names a column twice: {printable(', '.join(header))}")
    body = [row for row in rows[1:] if row]
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} cells, but the first line names {len(header)} columns")
    cells = list(zip(*body, strict=True)) if body else [()] * len(header)
    with reading(path):
        return {name: _typed(list(column)) for name, column in zip(header, cells, strict=True)}


def write_table(path: str | os.PathLike[str], columns: Mapping[str, Array]) -> None:
    """Write named columns to a CSV or parquet file."""
    one_of(f"the ending of {path}", Path(path).suffix, (".csv", ".parquet"))
    with atomic_path(path) as temporary:
        if Path(path).suffix == ".parquet":
            write_arrow(require("pyarrow", "data").table({k: _native(v) for k, v in columns.items()}), temporary)
            return
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            rows = chain([columns], zip(*(column.tolist() for column in columns.values()), strict=True))
            csv.writer(file).writerows([_plain(cell, path) for cell in row] for row in rows)


def write_arrow(table: Any, path: Path) -> None:
    """Write an Arrow table to a parquet file with checksums of its pages."""
    require("pyarrow.parquet", "data").write_table(table, path, write_page_checksum=True)


def _plain(cell: Any, path: Any) -> Any:
    """A cell; text that a spreadsheet might take for a formula gets a leading apostrophe."""
    if isinstance(cell, str) and cell != cell.strip():
        raise ValueError(f"{path}: {cell!r} has white space around it, which CSV files do not keep; write a .parquet")
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _without_quote(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def columns_of(table: Any, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Columns of an Arrow table as arrays: numbers, strings, or objects where there are gaps."""
    columns = table.column_names if names is None else [name for name in names if name in table.column_names]
    return {name: _column(table[name]) for name in columns}


def _column(column: Any) -> Array:
    kind = str(column.type)
    if kind in ("double", "float", "halffloat") or (re.fullmatch(r"u?int\d+|bool", kind) and not column.null_count):
        return np.asarray(column.to_numpy())
    return _from_list(column.to_pylist())


def _lists(column: Any, name: str) -> Array:
    """The numbers of a column of lists, one after the other."""
    if column.null_count:
        raise ValueError(f"dataset: column {name!r} has gaps; every instance needs all its predictions")
    return np.asarray(column.combine_chunks().flatten().to_numpy(zero_copy_only=False))


def footers(paths: Sequence[str], name: str) -> list[Any]:
    """Metadata of parquet files, read in parallel: each is small, but may be far away."""
    parquet = require("pyarrow.parquet", "data")

    def footer(path: str) -> Any:
        try:
            return parquet.read_metadata(path)
        except (OSError, ValueError, NotImplementedError) as error:
            reason = f"{str(error).splitlines()[0]}{_REMEDY if name == 'dataset' else ''}"
            raise ValueError(f"{name}{': ' if name else ''}{path} is not a parquet file: {reason}") from None

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(footer, paths))


def _schema(path: Any, name: str) -> Any:
    footer = footers([str(path)], name)[0]
    with reading(path):
        return footer.schema.to_arrow_schema()


def _typed(cells: list[str]) -> Array:
    """Cells of a CSV column: whole numbers, numbers or text; empty ones are None.

    "007", "1_000", "٣", "inf" and "1e999", which no float can hold, are text.
    """
    filled = [cell for cell in cells if cell]
    whole = all(re.fullmatch(r"0|-?[1-9][0-9]*", cell) for cell in filled)
    plain = all(cell.isascii() and "_" not in cell for cell in filled) and not all(map(str.isdigit, filled))
    if filled and (whole or plain):
        with suppress(ValueError):
            number = int if whole else float
            numbers = [number(cell) if cell else None for cell in cells]
            if whole or not any(map(math.isinf, filter(None, numbers))):
                return _from_list(numbers)
    return _from_list([_without_quote(cell) or None for cell in cells])


def _from_list(cells: list[Any]) -> Array:
    """An array of plain values; with gaps an array of objects."""
    if any(isinstance(cell, str) and cell.endswith("\0") for cell in cells):
        raise ValueError("a text ends with the character NUL, which arrays of NumPy do not keep")
    if any(cell is None for cell in cells):
        array = np.empty(len(cells), dtype=object)
        array[:] = cells
        return array
    return np.asarray(cells)


# -- npz ------------------------------------------------------------------------------------------


def read_npz(path: str | os.PathLike[str], mapped: Collection[str] = ()) -> dict[str, Array]:
    """All arrays of an .npz file by name, never unpickled; those in `mapped` stay on disk if stored uncompressed.

    NumPy's own `mmap_mode` ignores `.npz` files; here a member is mapped by its offset in the archive. Sizes are
    compared with the file before memory is taken, and checksums are verified, of mapped members too.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file at {path}; write one with ViewPredictions.save or numpy.savez")
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            file.seek(max(0, size - (1 << 16) - 22))
            n_members = file.read().rpartition(b"PK\x05\x06")[2][6:8]  # as its directory's end says
            if int.from_bytes(n_members, "little") != len(members):
                raise _MemberError(f"{path} is damaged: some of its arrays are missing or there twice; write it again")
            if (total := sum(info.file_size for info in members.values())) > max(_MAX_INFLATION * size, 1 << 26):
                raise _MemberError(f"{path}: {size} bytes would inflate to {total}; save uncompressed (numpy.savez)")
            return {name: _read_member(archive, file, info, str(path), mapped) for name, info in members.items()}
    except _MemberError as error:
        raise ValueError(str(error)) from None
    except Exception:  # zipfile raises many kinds
        raise ValueError(f"{path} is not an .npz file; write one with ViewPredictions.save or numpy.savez") from None


class _MemberError(ValueError):
    """An array of an .npz file cannot be read."""


def _read_member(
    archive: zipfile.ZipFile, file: BinaryIO, info: zipfile.ZipInfo, path: str, mapped: Collection[str]
) -> Array:
    name = info.filename.removesuffix(".npy")
    stored = info.compress_type == zipfile.ZIP_STORED
    try:
        size = os.fstat(file.fileno()).st_size
        if info.compress_size > size or (stored and info.file_size != info.compress_size):
            raise ValueError(f"it claims {info.compress_size} of the file's {size} bytes; the file is cut or damaged")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(member)
            header_size = member.tell()
        if dtype.hasobject:
            raise ValueError("holds pickled objects, which are never loaded")
        if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != info.file_size - header_size:
            raise ValueError(f"shape {shape} of {dtype} does not match its {info.file_size - header_size} bytes")
        if name not in mapped or not stored or 0 in shape:  # an empty array cannot be mapped
            with archive.open(info) as member:
                array = np.asarray(np.lib.format.read_array(member, allow_pickle=False))
                member.read()  # to the end, where the checksum is compared
                return array
        _verify_member(path, info.filename, size, os.fstat(file.fileno()).st_mtime_ns)
    except Exception as error:  # of zipfile, its decompressors and NumPy's reader of headers: many kinds
        reason = str(error).partition("\n")[0]
        raise _MemberError(f"{path}: array {name!r} cannot be read: {reason}; write the file again") from None
    file.seek(info.header_offset + 26)  # the local header repeats the name and may have another extra field
    skip = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
    offset = info.header_offset + 30 + skip + header_size
    order: Literal["F", "C"] = "F" if fortran else "C"
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)


@lru_cache(256)
def _verify_member(path: str, member: str, size: int, time: int) -> None:
    """Compare a member with its checksum, once for a file of a size and time."""
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        while stream.read(1 << 20):
            pass
