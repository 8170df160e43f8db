"""Labels where the instances are: of a few rows at a time, from a file or from memory."""

__all__ = ["LabelReader", "label_reader"]

import os
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.extras import require
from vbtta.label_values import look_up
from vbtta.labels import Array, LabelSets
from vbtta.scale.tables import parquet_files, plain_column


@dataclass(frozen=True)
class LabelReader:
    """Labels in memory (on every node once) or in parquet files, of which each worker reads its share.

    Files are long (`instance, label`, optionally `annotator` and `count`) or wide (`instance, label_1, label_2, ...`);
    where they are sorted by instance, a worker reads no more than it needs.
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
        given = [arrow.field(name).is_valid() for name in wide or ["label"]]
        if "count" in names and not wide:
            given[0] &= arrow.field("count") > 0
        return sum(int(files.count_rows(filter=one)) for one in given)

    def _names(self) -> tuple[list[str], list[str]]:
        names = require("pyarrow.parquet", "ray").read_schema(self.paths[0]).names
        wide = [name for name in names if re.fullmatch(r"label_.+", name)]
        if "instance" not in names or ("label" in names) == bool(wide):
            raise ValueError(
                f"labels: {self.paths[0]} must have the columns instance and label, or instance and label_1, label_2, "
                f"...; it has {', '.join(names)}"
            )
        return names, wide

    def _read(self, ids: Array) -> tuple[Array, Array, Array | None, Array | None]:
        """Instances, labels, annotators and counts as a long table, of about the instances asked for."""
        dataset, arrow = require("pyarrow.dataset", "ray"), require("pyarrow.compute", "ray")
        names, wide = self._names()
        files = dataset.dataset(list(self.paths))
        bounds = None
        if len(ids) and (files.schema.field("instance").type == "string") == (ids.dtype.kind in "US"):
            low, high = np.sort(ids)[[0, -1]].tolist()
            bounds = (arrow.field("instance") >= low) & (arrow.field("instance") <= high)
        columns = ["instance", *(wide or [one for one in ("label", "annotator", "count") if one in names])]
        table = files.to_table(columns=columns, filter=bounds)
        if not wide:
            table = table.filter(arrow.is_valid(table["label"]))
            found = {name: plain_column(table, name) for name in columns}
            return found["instance"], found["label"], found.get("annotator"), found.get("count")
        people = [name.removeprefix("label_") for name in wide]
        named = self.columns_are_annotators or not all(one.isdigit() for one in people)
        parts = [table.select(["instance", name]).rename_columns(["instance", "label"]) for name in wide]
        given = [part.filter(arrow.is_valid(part["label"])) for part in parts]
        who = np.repeat(people, [len(part) for part in given])
        instance = np.concatenate([plain_column(part, "instance") for part in given])
        return instance, np.concatenate([plain_column(part, "label") for part in given]), who if named else None, None


def label_reader(
    labels: LabelSets | ArrayLike | str | os.PathLike[str], *, columns_are_annotators: bool = False
) -> LabelReader:
    """A reader of labels in memory, or of the parquet files at a path."""
    if isinstance(labels, str | os.PathLike):
        return LabelReader(None, tuple(parquet_files(labels, "labels")), columns_are_annotators)
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
