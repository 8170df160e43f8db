"""Labels where the instances are: of a few rows at a time, from a file or from memory."""

__all__ = ["LabelReader", "label_reader"]

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.extras import require
from vbtta.label_values import look_up
from vbtta.labels import Array, LabelSets
from vbtta.scale.tables import parquet_files, plain_column

_LONG = ("label", "annotator", "count")  # columns of a long file, besides the instance


@dataclass(frozen=True)
class LabelReader:
    """Labels in memory (on every node once) or in parquet files, of which each worker reads its share.

    Files are long (`instance, label`, optionally `annotator` and `count`) or wide (`instance, label_1, label_2, ...`);
    a null or NaN is no label. Where they are sorted by instance, a worker reads no more than it needs.
    """

    sets: LabelSets | None
    paths: tuple[str, ...] = ()
    columns_are_annotators: bool = False
    by_id: bool = False  # whether whole numbers of `sets` are ids that are written as words

    def of(self, first: int, ids: Array | None, n_rows: int) -> LabelSets:
        """The labels of rows `first` to `first + n_rows` of the data, whose instances then count from 0."""
        if self.sets is not None:
            return _some(self.sets, first, ids, n_rows, self.by_id)
        if ids is None:
            raise ValueError("labels name instances, but the predictions have no column 'instance'; write one")
        instance, value, annotator, count = self._read(ids)
        rows, unknown = look_up(instance, ids)
        known = np.flatnonzero(~unknown)
        return LabelSets.from_table(
            rows[known],
            value[known],
            None if annotator is None else annotator[known],
            None if count is None else count[known],
            n_instances=n_rows,
        )

    def n_given(self) -> int:
        """Labels in all."""
        if self.sets is not None:
            return len(self.sets)
        dataset, arrow = require("pyarrow.dataset", "ray"), require("pyarrow.compute", "ray")
        names, wide = self._names()
        files = dataset.dataset(list(self.paths))

        def there(name: str) -> Any:  # is_null(nan_is_null=True) is decided by a file's statistics, which count no NaN
            valid, kind = arrow.field(name).is_valid(), str(files.schema.field(name).type)
            return valid & ~arrow.is_nan(arrow.field(name)) if kind in ("double", "float", "halffloat") else valid

        given = [there(name) for name in wide or ["label"]]
        if files.count_rows(filter=~there("instance")):
            self._refuse_gaps("instance")
        if "count" in names and not wide:
            given[0] &= arrow.field("count") > 0
        return sum(int(files.count_rows(filter=one)) for one in given)

    def _names(self) -> tuple[list[str], list[str]]:
        return _layout(self.paths[0], require("pyarrow.parquet", "ray").read_schema(self.paths[0]).names)

    def _read(self, ids: Array) -> tuple[Array, Array, Array | None, Array | None]:
        """Instances, labels, annotators and counts as a long table, of about the instances asked for."""
        dataset, arrow = require("pyarrow.dataset", "ray"), require("pyarrow.compute", "ray")
        names, wide = self._names()
        files = dataset.dataset(list(self.paths))
        bounds = None
        if len(ids) and (files.schema.field("instance").type == "string") == (ids.dtype.kind in "US"):
            low, high = np.sort(ids)[[0, -1]].tolist()
            bounds = (arrow.field("instance") >= low) & (arrow.field("instance") <= high)
        columns = ["instance", *(wide or [one for one in _LONG if one in names])]
        table = files.to_table(columns=columns, filter=bounds)
        if not wide:
            table = _given(table)
            for name in columns:
                if arrow.any(arrow.is_null(table[name], nan_is_null=True)).as_py():
                    self._refuse_gaps(name)
            found = {name: plain_column(table, name) for name in columns}
            return found["instance"], found["label"], found.get("annotator"), found.get("count")
        people = [name.removeprefix("label_") for name in wide]
        named = self.columns_are_annotators or not all(one.isdigit() for one in people)
        parts = [table.select(["instance", name]).rename_columns(["instance", "label"]) for name in wide]
        given = [_given(part) for part in parts]
        who = np.repeat(people, [len(part) for part in given])
        instance = np.concatenate([plain_column(part, "instance") for part in given])
        return instance, np.concatenate([plain_column(part, "label") for part in given]), who if named else None, None

    def _refuse_gaps(self, name: str) -> None:
        """Say in which row of which file a label comes without its instance, annotator or count."""
        arrow, parquet = require("pyarrow.compute", "ray"), require("pyarrow.parquet", "ray")
        wide = self._names()[1]
        for path in self.paths:
            table = parquet.read_table(path, columns=[name, *(wide or ["label"])])
            labels = [np.asarray(arrow.is_null(table[one], nan_is_null=True)) for one in wide or ["label"]]
            absent = np.asarray(arrow.is_null(table[name], nan_is_null=True)) & ~np.all(labels, axis=0)
            if absent.any():
                raise ValueError(
                    f"labels: {path}, row {int(absent.argmax())} has no {name}; fill it in, or leave the row out"
                )


def _layout(path: str, names: list[str]) -> tuple[list[str], list[str]]:
    """A file's columns, and those of a wide one that hold labels."""
    wide = [name for name in names if re.fullmatch(r"label_.+", name)]
    if "instance" not in names or ("label" in names) == bool(wide):
        raise ValueError(
            f"labels: {path} must have the columns instance and label, or instance and label_1, label_2, ...; it has "
            f"{', '.join(names)}"
        )
    return names, wide


def _check_files(paths: list[str]) -> None:
    """All are parquet files with the same columns of labels."""
    parquet = require("pyarrow.parquet", "ray")

    def columns(path: str) -> set[str]:
        try:
            names = parquet.read_schema(path).names
        except (OSError, ValueError) as error:
            raise ValueError(
                f"labels: {path} is not a parquet file: {str(error).splitlines()[0]} Write one, as "
                "pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), ...), or give LabelSets"
            ) from None
        wide = _layout(path, names)[1]
        return {"instance", *wide} | ({*_LONG} & {*names} if not wide else set())

    with ThreadPoolExecutor(16) as pool:  # a footer is small, but may be far away
        found = list(pool.map(columns, paths))
    for path, those in zip(paths, found, strict=True):
        if those != found[0]:
            raise ValueError(
                f"labels: {path} has the columns {', '.join(sorted(those))}, but {paths[0]} has "
                f"{', '.join(sorted(found[0]))}; give all files the same"
            )


def _given(table: Any) -> Any:
    """The rows with a label; NaN is none."""
    arrow = require("pyarrow.compute", "ray")
    return table.filter(arrow.invert(arrow.is_null(table["label"], nan_is_null=True)))


def label_reader(
    labels: LabelSets | ArrayLike | str | os.PathLike[str], *, columns_are_annotators: bool = False
) -> LabelReader:
    """A reader of labels in memory, or of the parquet files at a path."""
    if isinstance(labels, str | os.PathLike):
        paths = parquet_files(labels, "labels")
        _check_files(paths)
        return LabelReader(None, tuple(paths), columns_are_annotators)
    return LabelReader(labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels))


def _some(labels: LabelSets, first: int, ids: Array | None, n_rows: int, by_id: bool) -> LabelSets:
    """The labels of some rows, paired as :meth:`LabelSets.align` pairs them with all."""
    if labels.ids is not None:
        if ids is None:
            raise ValueError(
                f"labels name their instances by id (such as {str(labels.ids[0])!r}) but the predictions have none"
            )
        rows, unknown = look_up(labels.ids, ids)
        rows, unknown = rows[labels.instance], unknown[labels.instance]
    elif labels.open_ended and ids is not None and (by_id or ids.dtype.kind in "iu"):
        rows, unknown = look_up(labels.instance, ids)
    else:
        rows = labels.instance - first
        unknown = (rows < 0) | (rows >= n_rows)
    known = np.flatnonzero(~unknown)
    return LabelSets(
        instance=rows[known],
        value=labels.value[known],
        count=labels.count[known],
        annotator=None if labels.annotator is None else labels.annotator[known],
        annotator_names=labels.annotator_names,
        n_instances=n_rows,
        by_position=labels.by_position,
    ).align(n_rows)
