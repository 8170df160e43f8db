"""View predictions as parquet files: one row an instance, `instance, mean[K*C], variance[K*C]`."""

__all__ = [
    "About",
    "Source",
    "load_predictions",
    "open_sources",
    "parquet_files",
    "plain_column",
    "prediction_table",
]

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta.labels import Array
from vbtta.predictions import ViewPredictions

_KEY = b"vbtta"  # of a parquet file's metadata
_ROWS = 1 << 16  # of an .npz file read at once


@dataclass(frozen=True)
class About:
    """What the numbers of a row are: K views of C outputs each."""

    names: tuple[str, ...]
    n_outputs: int
    classes: tuple[Any, ...] | None = None
    fingerprints: tuple[str, ...] = ()
    generated_names: bool = False
    has_variance: bool = False

    @property
    def size(self) -> int:
        """Numbers of a row, K*C."""
        return len(self.names) * self.n_outputs

    def to_json(self) -> bytes:
        """For a file's metadata."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "About":
        """What :meth:`to_json` wrote."""
        found = json.loads(text)
        classes = found["classes"]
        return cls(
            tuple(found["names"]),
            int(found["n_outputs"]),
            None if classes is None else tuple(classes),
            tuple(found["fingerprints"]),
            bool(found["generated_names"]),
            bool(found["has_variance"]),
        )

    @classmethod
    def of(cls, predictions: ViewPredictions) -> "About":
        """What predictions say of themselves."""
        classes = None if predictions.classes is None else tuple(predictions.classes.tolist())
        prints = tuple(predictions.fingerprints.get(name, "") for name in predictions.names)
        names, generated = predictions.names, predictions.generated_names
        with_variance = predictions.variance is not None
        return cls(names, predictions.mean.shape[2], classes, prints if any(prints) else (), generated, with_variance)

    def predictions(self, ids: Array | None, mean: Array, variance: Array | None) -> ViewPredictions:
        """Rows of numbers as predictions, checked."""
        shape = (len(mean), len(self.names), self.n_outputs)
        return ViewPredictions(
            mean.reshape(shape),
            None if variance is None else variance.reshape(shape),
            names=None if self.generated_names else self.names,
            ids=ids,
            classes=self.classes,
            fingerprints={name: text for name, text in zip(self.names, self.fingerprints, strict=False) if text},
        )


class Source(NamedTuple):
    """Some rows of a data set that can be read on their own: a row group of a parquet file, a range, a block."""

    kind: str  # "parquet", "npz" or "block"
    where: Any  # path, or reference to an Arrow table
    part: int  # row group, or first row in the file
    first: int  # row of the whole data set
    n_rows: int
    about: About

    def read(self) -> ViewPredictions:
        """All rows."""
        if self.kind == "npz":
            predictions = ViewPredictions.load(self.where, mmap=True)
            found = predictions.take(slice(self.part, self.part + self.n_rows))
            mean = np.array(found.mean)
            variance = None if found.variance is None else np.array(found.variance)
            return self.about.predictions(found.ids, mean, variance)
        table = self._table(None)
        variance = _numbers(table, "variance") if "variance" in table.column_names else None
        ids = plain_column(table, "instance") if "instance" in table.column_names else None
        return self.about.predictions(ids, _numbers(table, "mean"), variance)

    def ids(self) -> Array | None:
        """The rows' identifiers alone."""
        if self.kind == "npz":
            ids = ViewPredictions.load(self.where, mmap=True).ids
            return None if ids is None else ids[self.part : self.part + self.n_rows]
        table = self._table(["instance"])
        return plain_column(table, "instance") if "instance" in table.column_names else None

    def _table(self, columns: list[str] | None) -> Any:
        if self.kind == "block":
            table = require("ray", "ray").get(self.where)
            return table if columns is None else table.select([one for one in columns if one in table.column_names])
        parquet = require("pyarrow.parquet", "ray")
        with parquet.ParquetFile(self.where) as file:
            names = file.schema_arrow.names
            columns = [one for one in (columns or ("instance", "mean", "variance")) if one in names]
            return file.read_row_group(self.part, columns=columns)


def prediction_table(ids: Array, mean: Array, variance: Array | None, about: About) -> Any:
    """Predictions (n, K, C) as an Arrow table."""
    arrow = require("pyarrow", "ray")
    size = mean.shape[1] * mean.shape[2]
    columns = {"instance": arrow.array(ids)}
    for name, values in (("mean", mean), ("variance", variance)):
        if values is not None:
            columns[name] = arrow.FixedSizeListArray.from_arrays(
                arrow.array(np.ascontiguousarray(values).ravel()), size
            )
    return arrow.table(columns).replace_schema_metadata({_KEY: about.to_json()})


def open_sources(dataset: Any, names: Sequence[str] | None = None) -> list[Source]:
    """The parts of a data set of view predictions, in order; what they hold is not read.

    Parameters
    ----------
    dataset : path, list of paths, or ray.data.Dataset
        Parquet files or a folder of them, as :func:`vbtta.scale.collect_views` writes them; one `.npz` file of
        :meth:`ViewPredictions.save`; or a Ray data set with a column `mean`.
    names : K strings, optional
        Names of the views, where the files do not say.
    """
    if isinstance(dataset, str | os.PathLike) and str(dataset).endswith(".npz"):
        return _of_npz(Path(dataset), names)
    if hasattr(dataset, "to_arrow_refs"):
        return _of_ray(dataset, names)
    paths = parquet_files(dataset)
    parquet = require("pyarrow.parquet", "ray")

    def look(path: str) -> tuple[list[int], Any]:
        try:
            footer = parquet.read_metadata(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"dataset: {path} is not a parquet file: {error}") from None
        return [
            footer.row_group(group).num_rows for group in range(footer.num_row_groups)
        ], footer.schema.to_arrow_schema()

    with ThreadPoolExecutor(16) as pool:  # a footer is small, but may be far away
        found = list(pool.map(look, paths))
    about = _about(found[0][1], names, paths[0])
    sources, first = [], 0
    for path, (sizes, schema) in zip(paths, found, strict=True):
        if _about(schema, names, path) != about:
            raise ValueError(f"dataset: {path} holds other views or outputs than {paths[0]}; keep one run in a folder")
        for group, size in enumerate(sizes):
            if size:
                sources.append(Source("parquet", path, group, first, size, about))
                first += size
    if not sources:
        raise ValueError(f"dataset: {dataset} holds no rows")
    return sources


def load_predictions(dataset: Any, names: Sequence[str] | None = None) -> ViewPredictions:
    """All of a data set's predictions in memory."""
    first, *others = [source.read() for source in open_sources(dataset, names)]
    try:
        return first.concat(others) if others else first
    except ValueError as error:
        raise ValueError(f"dataset: the files of {dataset} cannot be joined: {error}") from None


def parquet_files(dataset: Any, name: str = "dataset") -> list[str]:
    """Paths of the parquet files that a path, a folder or a list of paths stands for, in order."""
    given = [dataset] if isinstance(dataset, str | os.PathLike) else dataset
    if not isinstance(given, Sequence) or not given or not all(isinstance(one, str | os.PathLike) for one in given):
        raise TypeError(f"{name} must be a path or a list of paths; got {dataset!r}")
    paths: list[str] = []
    for one in map(Path, given):
        if not one.exists():
            raise FileNotFoundError(f"{name}: there is nothing at {one}; all nodes must see it under this path")
        inside = sorted(one.glob("*.parquet")) if one.is_dir() else [one]
        if not inside:
            raise ValueError(f"{name}: the folder {one} holds no .parquet files")
        paths += [str(path.resolve()) for path in inside]
    return paths


def _of_npz(path: Path, names: Sequence[str] | None) -> list[Source]:
    predictions = ViewPredictions.load(path, mmap=True)
    about, where = _renamed(About.of(predictions), names, str(path)), str(path.resolve())
    return [
        Source("npz", where, first, first, min(_ROWS, len(predictions) - first), about)
        for first in range(0, len(predictions), _ROWS)
    ]


def _of_ray(dataset: Any, names: Sequence[str] | None) -> list[Source]:
    """Blocks of a Ray data set; it is computed once and kept in the object store."""
    ray = require("ray", "ray")
    refs = dataset.materialize().to_arrow_refs()
    describe = ray.remote(num_cpus=0)(lambda table: (table.num_rows, table.schema))
    found = ray.get([describe.remote(ref) for ref in refs])
    kept = [(ref, size, schema) for ref, (size, schema) in zip(refs, found, strict=True) if size]
    if not kept:
        raise ValueError("dataset: the Ray data set holds no rows")
    about = _about(kept[0][2], names, "the Ray data set")
    firsts = np.cumsum([0, *(size for _, size, _ in kept)]).tolist()
    return [
        Source("block", ref, 0, first, size, about) for (ref, size, _), first in zip(kept, firsts[:-1], strict=True)
    ]


def _about(schema: Any, names: Sequence[str] | None, where: str) -> About:
    if "mean" not in schema.names:
        raise ValueError(f"dataset: {where} has no column 'mean' (K*C numbers a row); it has {', '.join(schema.names)}")
    if schema.metadata and _KEY in schema.metadata:
        return _renamed(About.from_json(schema.metadata[_KEY]), names, where)
    if names is None:
        raise ValueError(f"dataset: {where} does not say which views its columns hold; give names=[...]")
    size = getattr(schema.field("mean").type, "list_size", None)
    if size is None or size % len(names):
        raise ValueError(
            f"dataset: 'mean' of {where} must be lists of a fixed size, K*C numbers with K = {len(names)}; got "
            f"{schema.field('mean').type}. Lists of one length can be cast: "
            "column.cast(pyarrow.list_(pyarrow.float64(), size))"
        )
    return About(tuple(names), size // len(names), has_variance="variance" in schema.names)


def _renamed(about: About, names: Sequence[str] | None, where: str) -> About:
    """With the caller's names, unless the data set has names of its own."""
    if names is None or tuple(names) == about.names:
        return about
    if not about.generated_names or len(names) != len(about.names):
        raise ValueError(f"names: {where} holds the views {', '.join(about.names)}; leave names out")
    return replace(about, names=tuple(names), generated_names=False)


def _numbers(table: Any, name: str) -> Array:
    """A column of lists as (n, K*C) floats."""
    column = table[name].combine_chunks()
    if column.null_count:
        raise ValueError(f"dataset: column {name!r} has gaps; every instance needs all its predictions")
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(len(table), -1)


def plain_column(table: Any, name: str) -> Array:
    """A column of numbers or words."""
    if str(table[name].type) in ("string", "large_string"):
        return np.array(table[name].to_pylist(), dtype=str)
    return np.asarray(table[name].to_numpy())
