"""Labels of a calibration sample: from arrays, tables, counts, rankings and pandas objects, checked once."""

from __future__ import annotations

__all__ = [
    "ID_COLUMNS", "Array", "LabelSets", "as_array", "as_table", "by_id", "check_one_index", "class_positions",
    "first_seen", "frame_of", "id_column", "id_like", "index_of", "is_absent", "look_up", "pair_ids", "people_of",
    "rows_of_table",
]  # fmt: skip

import os
import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vbtta._support.checks import printable, real_array, require, row_numbers, shown, to_array, whole_number

Array = NDArray[Any]

_ID_LIKE = re.compile(
    r"(?i:(^|[_\s-])(id|uid|uuid|index|filename)$|^unnamed: \d+$|^__index_level_\d+__$)|[a-z0-9]I[dD]$"
)
ID_COLUMNS = ("instance", "id", "item", "task")
_NEVER_ROWS = ID_COLUMNS[1:]  # whole numbers in such a column are ids, not row numbers
_ANNOTATOR_COLUMNS = ("annotator", "worker", "rater", "user")
_UNKNOWN = "unknown"  # all annotators without a name
_WIDE = re.compile(r"label_(.+)")
_KNOWN = {"label", "count", "instance_weight", *ID_COLUMNS, *_ANNOTATOR_COLUMNS}
_NO_ANNOTATORS = {"y", "target", "class", "group", "patient", "subject", "fold", "split"}  # columns beside labels
_MOST_WEIGHTS = 1 << 27  # a gigabyte
_SEVERAL = (list, tuple, dict, set, np.ndarray)  # what is no number or string
_LARGEST_TOTAL = 1e15  # of the counts: beyond it sums lose single labels


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The labels of a calibration sample, one entry a label, sorted by instance.

    Build it with :meth:`from_array`, :meth:`from_table`, :meth:`from_counts` or :meth:`from_rankings`; the
    fields are validated there and never change. The index of a pandas object becomes the instances' `ids`, which must
    be ids of the predictions; an index that counts the rows from 0 does not.

    `instance` (J,) are rows of the labelled instances, ascending; `value` (J,) or (J, C) the labels, numbers or
    strings; `count` (J,) how often each was given, times the weight of its instance; `annotator` (J,) indices into
    `annotator_names`, or None. `n_instances` counts labelled and unlabelled instances; `ids` (in the order of the
    table) and `instance_weights` (n_instances,) are theirs, where given.
    """

    instance: Array
    value: Array
    count: Array
    annotator: Array | None
    annotator_names: tuple[str, ...]
    n_instances: int
    ids: Array | None = None
    by_position: bool = False  # values are positions among the classes (from counts) or items (from rankings)
    open_ended: bool = False  # integers of a table without `n_instances`: rows, or ids where predictions have such
    columns: int | None = None  # of the array the labels came from
    instance_weights: Array | None = None
    soft: bool = False  # counts are probabilities of classes, which need no noise model
    unnamed_rows: bool = False  # of a table without ids: not paired with predictions that have ids

    # -- building -----------------------------------------------------------------------------

    @classmethod
    def from_array(cls, Y: Any, *, missing: object = None, annotators: str | Sequence[Hashable] | None = None) -> Self:
        """Read labels from an array with one row an instance.

        Parameters
        ----------
        Y : (N,), (N, M) or (N, M, C) array, Series or DataFrame
            One label, up to M labels, or up to M vector labels for each instance. NaN, None and NA
            mean "no label"; masked entries too. A DataFrame with a column `label` or one of ids is read by
            :meth:`from_table`.
        missing : optional
            One more value that means "no label", for instance -1 or "".
        annotators : "columns" or M names, optional
            Whether column m is always the same annotator. By default the names of a DataFrame's columns, where they are
            strings or `Y.columns.name` is `worker` or the like; columns of arrays are anonymous labels.
        """
        names = {str(name).lower() for name in getattr(as_table(Y), "columns", ())}
        is_table = "label" in names or (not names.isdisjoint(ID_COLUMNS) and any(map(_WIDE.fullmatch, names)))
        if isinstance(Y, Mapping) or (missing is None and annotators is None and is_table):
            return cls.from_table(Y)
        source = rows_of_table(Y, "Y")
        table, annotators = source.values, people_of(source.names or []) if annotators is None else annotators
        if table.ndim not in (1, 2, 3) or 0 in table.shape[2:]:
            raise ValueError(f"Y must be (N,), (N, M) or (N, M, C) with C at least 1; got shape {table.shape}")
        absent = is_absent(table, missing)
        if isinstance(Y, np.ma.MaskedArray):
            absent |= np.ma.getmaskarray(Y)
        if table.ndim == 1:
            table, absent = table[:, None], absent[:, None]
        if table.ndim == 3:
            partial = absent.any(axis=2) & ~absent.all(axis=2)
            if partial.any():
                row, column = np.argwhere(partial)[0]
                raise ValueError(f"Y[{row}, {column}] is a vector label with gaps; give all its outputs or none")
            absent = np.asarray(absent.any(axis=2))
        rows, column = np.nonzero(~absent)
        people = () if annotators is None else _names_of_columns(annotators, table.shape[1])
        value, person = table[rows, column], column if people else None
        return cls._build(source, rows, len(table), value, None, person, people, table.shape[1])

    @classmethod
    def from_table(
        cls, instance: Any, label: ArrayLike | None = None, annotator: ArrayLike | None = None,
        count: ArrayLike | None = None, n_instances: int | None = None,
    ) -> Self:  # fmt: skip
        """Read labels from a long table: one row a label, as crowd-sourcing platforms export it.

        Parameters
        ----------
        instance : (J,) array, or DataFrame
            Row number of the instance, or its id (paired with the predictions' `ids`). A DataFrame or a dict of
            columns is the whole table, with the columns `instance` (or `id`, `item`, `task`: ids, also where they are
            whole numbers), `label` (or `label_1`, `label_2`, ..., one row an instance) and optionally `annotator` (or
            `worker`, `rater`, `user`), `count` and `instance_weight`; without a column of ids its index has them. Any
            dataframe library will do.
        label : (J,) or (J, C) array
        annotator : (J,) array, optional
            Who gave the label; any hashable values. Those without a name (None, NaN) count as one, `unknown`.
        count : (J,) array, optional
            How often the label was given.
        n_instances : int, optional
            Number of instances; then `instance` holds row numbers.
        """
        if label is None:
            table = as_table(instance)
            if not _is_frame(table) and not isinstance(table, Mapping):
                raise ValueError("label must be given, or one table with the columns instance and label")
            levels = [str(name).lower() for name in getattr(getattr(table, "index", None), "names", ())]
            if levels and set(levels) <= {*ID_COLUMNS, *_ANNOTATOR_COLUMNS} - set(map(str, table.columns)):
                table = table.reset_index()
        else:
            key = str(getattr(instance, "name", "")).lower()
            optional = {"label": label, "annotator": annotator, "count": count}
            table = {key if key in ID_COLUMNS else "instance": instance}
            table |= {name: values for name, values in optional.items() if values is not None}
        names = list(table.columns if _is_frame(table) else table)
        columns = {str(name): table[name] for name in names}
        check_one_index(**columns)
        if id_column(names, "the table") is None and not id_like(columns):
            of_pandas: Any = next((column for column in columns.values() if hasattr(column, "iloc")), None)
            index = index_of(of_pandas, "table")
            others = {name: columns[name] for name in columns if not (name.lower() in _KNOWN or _WIDE.fullmatch(name))}
            maybe_rows = index is not None and of_pandas.index.name is None and index.dtype.kind in "iu"
            columns |= {} if index is None or (maybe_rows and _maybe_ids(others)) else {"id": index}
        arrays = {name: as_array(column, printable(name)) for name, column in columns.items()}
        return cls.from_columns(arrays, "the table", n_instances)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Array], where: str, n_instances: int | None = None) -> Self:
        """Labels of a table by its columns' names, as :meth:`from_table`; `where` names the table in errors."""
        key, table = _long_labels(columns, where)
        instance, value, weight = _id_values(table["instance"], "instance"), table["label"], table["instance_weight"]
        unnamed = key is None and n_instances is None
        n_instances = len(next(iter(columns.values()))) if unnamed else n_instances
        annotator, names = (None, ()) if table["annotator"] is None else _annotator_codes(table["annotator"])
        count = None if table["count"] is None else _checked_counts(table["count"])
        by_row = instance.dtype.kind in "iu" and (n_instances is not None or key not in _NEVER_ROWS)
        ids, rows, size = None if by_row else instance, np.arange(len(instance)), len(instance)
        if by_row:
            rows, size = instance.astype(np.int64), int(instance.max()) + 1 if instance.size else 0
            if instance.size and instance.min() < 0:
                raise ValueError(f"instance must not be negative; got {int(instance.min())}")
            if size > (2**62 if weight is None else _MOST_WEIGHTS):
                raise ValueError(f"instance {size - 1} is too large for a row number; give ids as strings")
            if n_instances is not None and size > whole_number("n_instances", n_instances, least=0):
                raise ValueError(f"instance {size - 1} does not exist: n_instances is {n_instances}")
            size = size if n_instances is None else int(n_instances)
        elif n_instances is not None:
            raise ValueError(f"instance must be row numbers where n_instances is given; got {instance.dtype}")
        keep = slice(None) if count is None else count > 0
        count, annotator = (None if part is None else part[keep] for part in (count, annotator))
        source, open_ended = TableRows(value, ids, None, unnamed), by_row and n_instances is None
        labels = cls._build(source, rows[keep], size, value[keep], count, annotator, names, open_ended=open_ended)
        if weight is None:
            return labels
        rows = rows if labels.ids is None else look_up(instance, labels.ids)[0]
        weights, stated = np.ones(labels.n_instances), real_array("instance_weight", weight)
        weights[rows] = stated
        if (weights[rows] != stated).any():
            raise ValueError("instance_weight differs between labels of an instance; give every instance one weight")
        return labels.with_weights(weights)

    @classmethod
    def from_counts(cls, counts: Any) -> Self:
        """Read how often each class was given to each instance: an (N, C) array.

        The columns of a DataFrame, as `pandas.crosstab` makes it, are the classes by name.
        """
        rows = rows_of_table(counts, "counts")
        if rows.values.ndim != 2:
            raise ValueError(f"counts must be (N, C), how often each class was given; got shape {rows.values.shape}")
        return cls._from_counts(_checked_counts(rows.values), rows)

    @classmethod
    def _from_counts(cls, table: Array, source: TableRows, *, soft: bool = False) -> Self:
        rows, classes = np.nonzero(table)
        value = classes if source.names is None else np.asarray(source.names)[classes]
        by_position, columns = (True, table.shape[1]) if source.names is None else (False, None)
        count = table[rows, classes]
        return cls._build(source, rows, len(table), value, count, columns=columns, by_position=by_position, soft=soft)

    @classmethod
    def from_probabilities(cls, proba: Any) -> Self:
        """Read soft labels: probabilities (N, C) of the classes; a row of NaN or zeros is no label.

        The fit maximises the expected log probability, sum_c p_c log P(c), without a noise model unless one is named.
        The columns of a DataFrame are the classes by name.
        """
        rows = rows_of_table(proba, "proba")
        values = np.nan_to_num(_numbers("proba", rows.values), nan=0.0)
        sums = values.sum(axis=-1)
        if values.ndim != 2 or (values < 0).any() or not np.all((np.abs(sums - 1) < 1e-3) | (sums == 0)):
            raise ValueError("proba must be (N, C), not negative, with rows that sum to 1; from_counts takes counts")
        return cls._from_counts(values / np.where(sums > 0, sums, 1)[:, None], rows, soft=True)

    @classmethod
    def from_multilabel(cls, Y: Any) -> Self:
        """Read which of C labels every input has: (N, C) of 0 and 1, NaN where it is not known.

        Instances are pairs of an input and a label, as in :meth:`ViewPredictions.as_binary`. A DataFrame is paired by
        its ids, and by its columns' names, which are the predictions' classes.
        """
        source = rows_of_table(Y, "Y")
        values = _numbers("Y", source.values)
        if values.ndim != 2 or not np.isin(values[~np.isnan(values)], (0, 1)).all():
            raise ValueError(f"Y must be (N, C) of 0 and 1, NaN where it is not known; got shape {values.shape}")
        flat = values.ravel()
        rows = np.flatnonzero(~np.isnan(flat))
        if source.names is not None and (source.ids is not None or source.names != list(range(len(source.names)))):
            inputs = np.arange(len(values)) if source.ids is None else source.ids
            source = source._replace(ids=pair_ids(inputs, source.names), unnamed=False)
        columns = None if source.ids is not None else values.shape[1]
        return cls._build(source, rows, flat.size, flat[rows].astype(np.int64), columns=columns)

    @classmethod
    def from_rankings(cls, orders: Sequence[ArrayLike | None], instance: ArrayLike | None = None) -> Self:
        """Read rankings of a list's items.

        Parameters
        ----------
        orders : sequence of J sequences
            Every entry is one ranking: positions of items among the predictions' outputs, the best first. Items left
            out come after those named. An empty entry or None means "no ranking".
        instance : (J,) array, optional
            Row of the ranked instance, where there are several rankings of one; by default entry i ranks instance i.
        """
        if hasattr(orders, "columns"):
            raise ValueError("orders is a table; give a list of rankings, as orders.to_numpy()")
        if instance is not None:
            check_one_index(instance=instance, orders=orders)
        rows = [np.zeros(0) if order is None else as_array(order, "orders") for order in orders]
        for place, row in enumerate(rows):
            if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0)):
                raise ValueError(f"orders[{place}] must be positions of items, best first; got {shown(row.tolist())}")
            if len(np.unique(row)) < len(row):
                raise ValueError(f"orders[{place}] names an item twice: {shown(row.tolist())}")
        key = np.arange(len(rows)) if instance is None else as_array(instance, "instance")
        if key.shape != (len(rows),) or (key.size and (key.dtype.kind not in "iu" or key.min() < 0)):
            raise ValueError(f"instance must be {len(rows)} row numbers, one a ranking; got shape {key.shape}")
        kept = np.flatnonzero([row.size for row in rows])
        items = list(zip_longest(*(rows[place] for place in kept), fillvalue=-1)) or np.zeros((1, 0))
        value = np.array(items, dtype=np.int64).T  # (J, L)
        ids = None if instance is not None else index_of(orders, "orders")
        unnamed = instance is None and ids is None and hasattr(orders, "to_numpy")
        source, size = TableRows(value, ids, None, unnamed), int(key.max()) + 1 if key.size else 0
        return cls._build(source, key[kept], size, value, by_position=True, open_ended=instance is not None)

    @classmethod
    def _build(
        cls, source: TableRows, rows: Array, n_rows: int, value: Array, count: Array | None = None,
        annotator: Array | None = None, annotator_names: tuple[str, ...] = (), columns: int | None = None, **rest: Any,
    ) -> Self:  # fmt: skip
        """Labels of rows of a table, one after the other; rows of one id are one instance."""
        ids = source.ids
        if ids is not None:
            ids, place = first_seen(ids)
            rows, n_rows, columns = place[rows], len(ids), columns if len(ids) == n_rows else None
        order = np.argsort(rows, kind="stable")
        instance, value = rows[order].astype(np.intp), value[order]
        annotator = None if annotator is None else annotator[order].astype(np.intp)
        if annotator is not None and count is None:
            _warn_repeats(instance, annotator, annotator_names, ids)
        count = np.ones(len(instance)) if count is None else count[order]
        if value.dtype == object:
            value = _plain_values(value)
        if value.dtype.kind in "cmM":
            raise ValueError(f"labels must be real numbers or strings; got {value.dtype}")
        if value.dtype.kind == "f" and not np.all(np.isfinite(value)):
            row = instance[np.argwhere(~np.isfinite(value))[0][0]]
            raise ValueError(f"labels must be finite; instance {row} has an infinite one; NaN means no label")
        if len(count) and count.max() > _LARGEST_TOTAL / len(count):
            raise ValueError(f"counts are too large ({count.max():.3g}); divide them by a common factor")
        rest |= {"ids": ids, "columns": columns, "unnamed_rows": source.unnamed}
        return cls(instance, value, count, annotator, annotator_names, n_rows, **rest)

    def with_weights(self, weights: ArrayLike) -> Self:
        """The same labels with weights of the instances, in place of earlier ones.

        For a given noise model, an instance of weight 2 counts like two instances; for numbers with annotators, like
        its labels given twice.

        Parameters
        ----------
        weights : (n_instances,) array, Series or table
            Positive numbers, in the order of `ids` where there are ids; a Series is paired with them by its index, a
            table by its column of ids.
        """
        values: Array = real_array("instance_weights", by_id(weights, self.ids, "instance_weights", "the labels"))
        if values.shape != (self.n_instances,):
            raise ValueError(f"instance_weights must be {self.n_instances} numbers; got shape {values.shape}")
        if not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError("instance_weights must be positive; leave out the labels of instances that do not count")
        return replace(self, count=self._unweighted * values[self.instance], instance_weights=values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the labels as a long table, to a `.csv` or `.parquet` file."""
        from vbtta.data.files import write_labels

        write_labels(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LabelSets:
        """Read labels from a `.csv` or `.parquet` file, long or wide."""
        from vbtta.data.files import read_labels

        return read_labels(path)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row a label: instance, label, annotator and count, as :meth:`from_table` reads.

        Soft labels read back as counts; labels of vectors, rankings and of counts without names do not read back.
        """
        return frame_of(self.table() | {"count": self.count})

    def table(self) -> dict[str, Array]:
        """Columns with a row a label: instance, label (or label_0, ... of vectors) and annotator."""
        values = self._columns()
        names = ["label"] if values.shape[1] == 1 else [f"label_{c}" for c in range(values.shape[1])]
        columns = {"instance": self.instance if self.ids is None else self.ids[self.instance]}
        if self.annotator is not None:
            columns["annotator"] = np.array(self.annotator_names)[self.annotator]
        return columns | dict(zip(names, values.T, strict=True))

    # -- reading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.instance)

    def __repr__(self) -> str:
        people = f" by {len(self.annotator_names)} annotators" if self.annotator is not None else ""
        return f"LabelSets({len(self):,} labels of {self.n_instances:,} instances{people})"

    @property
    def total(self) -> float:
        """Number of labels, counts and weights included (J)."""
        return float(self.count.sum())

    @cached_property
    def labelled(self) -> Array:
        """Rows of the instances with at least one label, ascending: (N+,)."""
        return np.unique(self.instance)

    @property
    def labels_per_instance(self) -> Array:
        """Number of labels of each instance, counts included, weights not: (N,)."""
        return np.bincount(self.instance, weights=self._unweighted, minlength=self.n_instances)

    @property
    def overlap(self) -> bool:
        """Whether at least 20 instances, or a tenth of the labelled ones, carry two labels or more."""
        size = self.labels_per_instance
        return bool((size >= 2).sum() >= max(1, min(20, 0.1 * (size > 0).sum())))

    @property
    def labels_per_value(self) -> float:
        """How often each of the different labels was given, on average."""
        return float(self._unweighted.sum()) / max(1, len(np.unique(self.value, axis=0)))

    def _columns(self) -> Array:
        return self.value if self.value.ndim == 2 else self.value[:, None]

    @property
    def _unweighted(self) -> Array:
        return self.count if self.instance_weights is None else self.count / self.instance_weights[self.instance]

    def continuous(self, n_outputs: int) -> Array:
        """The labels as (J, C) floats."""
        if self.by_position:
            raise ValueError("labels of counts or rankings are no numbers; a regression takes from_array or from_table")
        try:
            value = self._columns().astype(np.float64)
        except (TypeError, ValueError) as error:
            word = str(error).partition(": ")[2].removeprefix("np.str_(").removesuffix(")")
            raise ValueError(f"labels must be numbers in a regression; got {word}") from None
        if not np.isfinite(value).all():
            raise ValueError("labels must be finite numbers in a regression; got text such as 'nan' or 'inf'")
        if value.shape[1] != n_outputs:
            sizes = f"{value.shape[1]} output(s), the predictions {n_outputs}"
            raise ValueError(f"labels have {sizes}; vector labels go in as (N, M, C)")
        return value

    def categorical(self, n_classes: int, classes: Array | None = None) -> Array:
        """The labels as (J,) positions among the classes, which are 0..C-1 where none are named."""
        if self.value.ndim == 2 and self.value.shape[1] != 1:
            raise ValueError("labels are vectors; a classification takes one class a label (from_counts for counts)")
        if self.by_position and self.columns not in (None, n_classes):
            raise ValueError(f"labels have {self.columns} columns, one a class, but there are {n_classes} classes")
        self._check_no_indicators(n_classes, classes)
        return class_positions(self.value.reshape(len(self)), n_classes, None if self.by_position else classes)

    def rankings(self, n_items: int) -> Array:
        """The labels as (J, L) orders of all items, best first, -1 where a ranking ends early."""
        if not self.by_position or self.value.ndim != 2:
            raise ValueError("labels are not rankings; build them with LabelSets.from_rankings")
        if self.value.size and self.value.max() >= n_items:
            raise ValueError(f"a ranking names item {int(self.value.max())}, but the predictions have {n_items} items")
        return np.pad(self.value, ((0, 0), (0, n_items - self.value.shape[1])), constant_values=-1)

    # -- rearranging --------------------------------------------------------------------------

    def pairs_by_id(self, ids: Array | None) -> bool:
        """Whether the labels' instances are found among the predictions' ids, rather than by row."""
        unlike_rows = ids is not None and not np.array_equal(ids, np.arange(len(ids)))
        if (self.ids is not None and ids is None) or (self.unnamed_rows and unlike_rows):
            raise _pairing_error("labels", self.ids, "the predictions", ids)
        return self.ids is not None or (ids is not None and self.open_ended)

    def align(self, n_instances: int, ids: Array | None = None) -> Self:
        """Pair with predictions: by id where both sides have ids, else by row.

        Returns the same labels with `instance` counting the rows of the predictions.
        """
        rows = self.instance
        if self.pairs_by_id(ids):
            assert ids is not None
            names, own = (rows, slice(None)) if self.ids is None else (self.ids, rows)
            rows, unknown = (values[own] for values in look_up(names, ids))
            if unknown.any():
                raise ValueError(
                    f"labels name instance {str(names[own][unknown][0])!r}, which is not among the predictions' ids, "
                    f"such as {str(ids[0])!r} ({int(unknown.sum())} of {len(unknown)} labels are not); to pair by row "
                    "leave that column out, or give from_table(n_instances=...)"
                )
        elif len(rows) and rows[-1] >= n_instances:
            remedy = "; where these are ids, give ViewPredictions(ids=...)" if ids is None and self.open_ended else ""
            raise ValueError(f"labels name instance {rows[-1]} but the predictions have {n_instances} inputs{remedy}")
        elif not self.open_ended and self.n_instances != n_instances:
            sizes = f"{self.n_instances} instances but the predictions for {n_instances}"
            raise ValueError(f"labels are for {sizes}; they are paired by row")
        return self.place(rows, n_instances, ids)

    def place(self, rows: Array, n_instances: int, ids: Array | None = None, kept: Array | None = None) -> Self:
        """The same labels, or those `kept`, with other rows as their instances."""
        kept = np.arange(len(self)) if kept is None else kept
        order = kept[np.argsort(rows[kept], kind="stable")]
        weights = None
        if self.instance_weights is not None:
            weights = np.ones(n_instances)
            weights[rows[order]] = self.instance_weights[self.instance[order]]
        changes: dict[str, Any] = {"n_instances": n_instances, "ids": ids, "open_ended": False, "unnamed_rows": False}
        return replace(self, **self._entries(order), instance=rows[order], instance_weights=weights, **changes)

    def take(self, rows: Array) -> Self:
        """The labels of some instances; the k-th of `rows` becomes instance k."""
        rows = row_numbers(rows, self.n_instances)
        end = np.searchsorted(self.instance, rows, side="right")
        length = end - np.searchsorted(self.instance, rows, side="left")
        instance = np.repeat(np.arange(len(rows)), length)
        order = np.repeat(end - np.cumsum(length), length) + np.arange(len(instance))
        ids, weights = (None if values is None else values[rows] for values in (self.ids, self.instance_weights))
        changes: dict[str, Any] = {"n_instances": len(rows), "ids": ids, "instance_weights": weights, "columns": None}
        return replace(self, **self._entries(order), instance=instance, **changes)

    def _entries(self, order: Array) -> dict[str, Any]:
        """What labels have besides their instances, in an order."""
        annotator = None if self.annotator is None else self.annotator[order]
        return {"value": self.value[order], "count": self.count[order], "annotator": annotator}

    def _check_no_indicators(self, n_classes: int, classes: Array | None) -> None:
        """Refuse a column a class: probabilities, or tables of 0 and 1 that are too large for that to be chance."""
        people = set(self.annotator_names) - set([] if classes is None else classes.astype(str).tolist())
        full = self.columns == n_classes > 1 and len(self) == self.n_instances * n_classes
        if not full or self.by_position or self.value.dtype.kind not in "iufb":
            return
        table = self.value.reshape(self.n_instances, -1)
        binary = np.isin(table, (0, 1)).all()
        shares = (table >= 0).all() and np.all(np.abs(table.sum(axis=1, dtype=np.float64) - 1) < 1e-3)
        if people and not (shares and binary and n_classes > 2):
            return
        if shares and not binary:
            raise ValueError("labels look like probabilities of the classes; use LabelSets.from_probabilities(Y)")
        if shares and self.n_instances >= (20 if n_classes == 2 else 5):  # two annotators may disagree
            raise ValueError(f"labels look one-hot: {n_classes} columns, one 1 a row; use LabelSets.from_counts(Y)")
        if binary and n_classes > 2 and self.n_instances >= 20:
            remedy = "use task='multilabel', or LabelSets.from_array(Y, annotators='columns') if columns are annotators"
            raise ValueError(f"labels look multi-hot: {n_classes} columns of 0 and 1; {remedy}")


# -- tables ---------------------------------------------------------------------------------------


def _long_labels(table: Mapping[str, Array], where: str) -> tuple[str | None, dict[str, Any]]:
    """The name of the column of ids, if any, and instance, label, annotator, count and weight of every label.

    A long table has the column `label` and one row a label; a wide one has `label_1`, `label_2`, ... and one row an
    instance, gaps where there is no label. Columns such as `label_ann` name their annotators; numbered ones are
    anonymous. Without ids the instances are rows of the table. `where` names the table in errors.
    """
    lower = [name.lower() for name in table]
    table = {small if small in _KNOWN and lower.count(small) == 1 else name: column
             for small, (name, column) in zip(lower, table.items(), strict=True)}  # fmt: skip
    key, person = (
        _one_column([name for name in names if name in table], where) for names in (ID_COLUMNS, _ANNOTATOR_COLUMNS)
    )
    endings = {name: match.group(1) for name in table if (match := _WIDE.fullmatch(name))}
    for name, column in table.items():
        first = next(iter(table.values()))
        if column.shape[:1] != first.shape[:1] or column.ndim not in ((1, 2) if name == "label" else (1,)):
            remedy = "" if column.ndim else "; a dict of ids goes in as pandas.Series"
            raise ValueError(f"{where}: columns must be lists of one length; {name!r} has shape {column.shape}{remedy}")
    _check_unused({name: table[name] for name in table if name not in {*_KNOWN, *endings}}, table, key, person, where)
    if endings and "label" in table:
        raise ValueError(f"{where} has both columns 'label' (long) and {next(iter(endings))!r} (wide); keep one layout")
    if not endings and "label" not in table:
        names = ", ".join(printable(name) for name in list(table)[:8])
        ids = "instance (or id, item, task)"
        raise ValueError(f"{where} has no labels: give columns {ids} and label (or label_1, ...); it has {names}")
    cells = [table[name] for name in endings or ["label"]]
    absent = np.stack([is_absent(column).all(axis=tuple(range(1, column.ndim))) for column in cells], axis=1)  # (N, M)
    rows, column = np.nonzero(~absent)
    if len({kind.dtype.kind in "iufb" for kind in cells}) > 1 or any(kind.dtype == object for kind in cells):
        cells = [column.astype(object) for column in cells]
    label = np.stack(cells, axis=1)[rows, column]
    columns = {name: table[name][rows] for name in (key, person, "count", "instance_weight") if name in table}
    for name, values in columns.items():
        if name != person and (gaps := is_absent(values)).any():
            raise ValueError(f"{where}, row {rows[np.argmax(gaps)]} has no {name}; fill it in, or leave the row out")
    named = not all(ending.isdigit() for ending in endings.values())
    return key, {
        "instance": columns.get(key, rows),
        "label": _plain_values(label) if label.dtype == object else label,
        "annotator": np.array(list(endings.values()))[column] if named else columns.get(person),
        "count": columns.get("count"),
        "instance_weight": columns.get("instance_weight"),
    }


def _check_unused(
    unused: Mapping[str, Array], table: Mapping[str, Array], key: str | None, person: str | None, where: str
) -> None:
    """Refuse columns that may be meant as labels, ids or annotators under another name."""
    words = [name for name in unused if len(name) > 4 and not name[-1].isdigit()]
    misspelt = {name: near[0] for name in words if (near := get_close_matches(name.lower(), sorted(_KNOWN), 1, 0.8))}
    misspelt |= {name: "instance_weight" for name in unused if re.fullmatch("(sample_?)?weights?", name.lower())}
    people = [name for name, column in unused.items() if column.dtype.kind in "OSU" or id_like([name])
              or (column.dtype.kind in "iu" and 2 * len(np.unique(column)) <= len(column))]  # fmt: skip
    if misspelt:
        name, meant = next(iter(misspelt.items()))
        meant = "annotator" if meant == "label" and "label" in table else meant  # a labeler gives the labels
    elif "label" not in table and not any(map(_WIDE.fullmatch, table)):
        return  # without labels there is another error
    elif unused and key is None:
        name, meant = [*_maybe_ids(unused), *unused][0], "instance"
    elif people and person is None and key is not None and len(set(table[key].tolist())) < len(table[key]):
        name, meant = people[0], "annotator"  # several labels of an input, and nobody named
    else:
        return
    reason = {"instance": " if it holds ids", "annotator": " if it says who gave the labels"}.get(meant, "")
    raise ValueError(f"{where}: its column {name!r} is not used; rename it to {meant!r}{reason}, or leave it out")


def _one_column(names: Sequence[Any], where: str) -> Any:
    """The name among synonyms; None where there is none."""
    if len(names) > 1:
        raise ValueError(f"{where} has the columns {names[0]!r} and {names[1]!r}, which mean the same; keep one")
    return names[0] if names else None


# -- pandas, without importing it -------------------------------------------------------------------


class TableRows(NamedTuple):
    """Values with one row an instance, and what a table says about its rows and columns."""

    values: Array
    ids: Array | None
    names: list[Any] | None  # of the columns, without that of the ids
    unnamed: bool  # a table without ids


def rows_of_table(values: Any, name: str) -> TableRows:
    """The values of an array, Series or table with one row an instance, whose ids are in a column or the index."""
    values = as_table(values)
    if not hasattr(values, "to_numpy"):
        return TableRows(as_array(values, name), None, None, False)
    ids, names = index_of(values, name), None
    if _is_frame(values):
        names = list(values.columns)
        key = id_column(names, name)
        if key is not None:
            ids = _id_values(as_array(values[key], str(key)), str(key))
            names.remove(key)
        if not names:
            raise ValueError(f"{name} is a table of ids alone; give it as a column, or add one of values")
        unused = _maybe_ids({name: values[name] for name in names}) if len(names) > 1 else id_like(names)
        if unused and (key is None or len(names) > 1):  # a single column beside that of the ids holds the values
            first, reason = unused[0], "looks like ids, by its name or as it differs in every row"
            remedy = f"make it the index, as {name}.set_index({first!r}), or give {name}.to_numpy() if it holds labels"
            raise ValueError(f"{name} has a column {first!r}, which {reason}: {remedy}")
        values = values[names]
        if str(getattr(values.columns, "name", "")).lower() in _ANNOTATOR_COLUMNS:  # as pivot_table makes them
            names = [str(column) for column in names]
    return TableRows(as_array(values.to_numpy(), name), ids, names, ids is None)


def id_column(names: Iterable[Any], where: str) -> Any:
    """The one column that has a name for ids, in any case; None where there is none."""
    names = list(names)
    if len(set(map(str, names))) < len(names):
        raise ValueError(f"{where} names a column twice: {printable(', '.join(map(str, names)))}")
    if any(isinstance(name, tuple) for name in names):
        raise ValueError(f"{where} has columns of several levels; join their names, as '_'.join")
    return _one_column([name for name in names if str(name).lower() in ID_COLUMNS], where)


def id_like(names: Iterable[Any]) -> list[str]:
    """The columns whose names end like those of ids."""
    return [name for name in names if isinstance(name, str) and _ID_LIKE.search(name)]


def _maybe_ids(table: Mapping[Any, Any]) -> list[Any]:
    """The columns that look like ids, by their names or as whole numbers or texts that differ in every row."""
    cells = {name: np.asarray(table[name]).tolist() for name in table}
    plain = [name for name, column in cells.items() if all(isinstance(cell, int | str) for cell in column)]
    return [*id_like(cells), *(name for name in plain if len(set(cells[name])) == len(cells[name]) > 20)]


def pair_ids(ids: Array, names: Any) -> Array:
    """Ids of pairs of an input and a label, those of an input side by side."""
    first, second = np.char.add(np.asarray(ids).astype(str), "/"), np.asarray(names).astype(str)
    return np.char.add(np.repeat(first, len(second)), np.tile(second, len(first)))


def as_table(values: Any) -> Any:
    """A dataframe of any library (Arrow, polars, ...) with pandas' way to its columns; anything else as it is."""
    if isinstance(values, list | tuple) and values and hasattr(values[0], "iloc"):
        raise ValueError("a list of pandas objects has several indices; join them first, as pd.concat(..., axis=1)")
    values = values.to_native() if hasattr(values, "to_native") else values  # narwhals hides the index
    values = values.to_pandas() if hasattr(values, "to_iterable_dataset") else values  # of Hugging Face
    if hasattr(values, "collect_schema") and not hasattr(values, "to_numpy"):
        raise ValueError("the table is lazy; give it as .collect()")
    values = np.asarray(values) if hasattr(values, "_from_sequence") else values  # a pandas column without its index
    if hasattr(values, "to_numpy") or not (hasattr(values, "__dataframe__") or hasattr(values, "__arrow_c_stream__")):
        return values
    return require("narwhals", "data").from_native(values, eager_only=True, allow_series=True)


def frame_of(columns: Mapping[str, Any], index: Any = None) -> Any:
    """A pandas DataFrame; pandas is loaded here alone."""
    return require("pandas", "cli").DataFrame(dict(columns), index=index)


def by_id(values: Any, ids: Array | None, name: str, owner: str) -> Any:
    """Values of a Series or table in the order of the ids, by its index or column of ids; anything else as it is.

    A table gives (N, F), or (N,) where it has one column besides that of the ids.
    """
    if isinstance(values, Mapping):
        raise ValueError(f"{name} is a dict; give it as pandas.Series({name}), or a table of its columns")
    if not hasattr(as_table(values), "to_numpy") or hasattr(values, "get_indexer"):  # an index has none itself
        return values
    array, index, names, _ = rows_of_table(values, name)
    array = array[:, 0] if names is not None and len(names) == 1 else array
    if index is None and (ids is None or np.array_equal(ids, np.arange(len(array)))):
        return array
    if index is None or ids is None:
        raise _pairing_error(name, index, owner, ids)
    rows, unknown = look_up(ids, index)
    known, times = np.unique(index, return_counts=True)
    wrong = [*ids[unknown], *known[times > 1]]
    if wrong:
        raise ValueError(f"{name} must have one entry an id; {str(wrong[0])!r} has none or several")
    return array[rows]


def _pairing_error(name: str, ids: Array | None, owner: str, owner_ids: Array | None) -> ValueError:
    """The error where one side alone has ids, so that nothing tells which rows belong together."""
    known, given, other = (owner_ids, owner, name) if ids is None else (ids, name, owner)
    example = "" if known is None else str(next(iter(known), ""))
    remedy = "give both ids (an index, a column 'id', ids=; several labels an input also classes=), or pair by row: "
    remedy += f"{name}.to_numpy(), or row numbers in a column 'instance'"
    return ValueError(f"{given} name rows by id (such as {example!r}) but {other} have no ids; {remedy}")


def _is_frame(values: object) -> bool:
    return hasattr(values, "columns") and hasattr(values, "to_numpy")


def index_of(values: Any, name: str) -> Array | None:
    """The index of a Series or DataFrame as ids; None where there is none, or it is pandas' default."""
    if not hasattr(values, "iloc"):
        return None
    index = values.index
    if getattr(index, "nlevels", 1) > 1:
        raise ValueError(f"{name} has an index of several levels; use LabelSets.from_table({name}.reset_index())")
    values = index.get_level_values(0) if hasattr(index, "levels") else index
    ids = _id_values(np.asarray(values), f"the index of {name}")
    # an index made by pivot_table, groupby or sort_index can count from 0 as well, and holds ids
    default = type(index).__name__ == "RangeIndex" and index.name is None
    return None if default and np.array_equal(ids, np.arange(len(ids))) else ids


def people_of(columns: list[Hashable]) -> list[str] | None:
    """The annotators that columns of a DataFrame are named for; numbers and label_1, label_2, ... name none."""
    if len(columns) < 2 or not all(isinstance(name, str) for name in columns):
        return None
    if other := [name for name in columns if str(name).lower() in _NO_ANNOTATORS]:
        raise ValueError(f"column {other[0]!r} is no annotator: name that of labels 'label', or leave others out")
    endings = [match.group(1) for name in columns if (match := _WIDE.fullmatch(str(name)))]
    if len(endings) < len(columns):
        return [str(name) for name in columns]
    return None if all(ending.isdigit() for ending in endings) else endings


def check_one_index(**columns: Any) -> None:
    """Refuse pandas objects side by side of different indices, or in another order than an array of their ids."""
    indices = {name: values.index for name, values in columns.items() if hasattr(values, "iloc")}
    first = next(iter(indices), "")
    other = next((name for name, index in indices.items() if not np.array_equal(index, indices[first])), None)
    key = next((name for name in columns if name.lower() in ID_COLUMNS), first)
    if other is None and key not in indices and first and (ids := index_of(columns[first], first)) is not None:
        other = None if np.array_equal(ids.astype(str), as_array(columns[key], key).astype(str)) else key
    if other is not None:
        remedy = f"take them from one table, as {other}.loc[{first}.index], or pair them by row with .to_numpy()"
        raise ValueError(f"{first} and {other} have different pandas indices or ids: {remedy}")


# -- values -----------------------------------------------------------------------------------------


def is_absent(values: Array, missing: object = None) -> Array:
    """Where an array says "no label": NaN, None, NA, and one more value."""
    absent = np.zeros(values.shape, dtype=bool)
    if values.dtype.kind in "fc":
        absent = np.isnan(values)
    elif values.dtype.kind in "mM":
        absent = np.isnat(values)
    elif values.dtype == object:
        absent.ravel()[:] = [entry is None or _is_nan(entry) for entry in values.ravel()]
    try:
        with np.errstate(over="ignore"):
            matches = np.asarray(False if missing is None else values == missing, dtype=bool)
    except (ArithmeticError, TypeError, ValueError):  # an integer that no float can hold, or objects that are arrays
        return absent
    if matches.shape not in ((), values.shape):
        raise ValueError(f"missing must be one value; got {shown(missing)}")
    return np.asarray(absent | matches)


def _is_nan(entry: object) -> bool:
    """Whether an entry is NaN, or NA or NaT of pandas."""
    return type(entry).__name__ in ("NAType", "NaTType") or (isinstance(entry, float | np.floating) and entry != entry)


def as_array(values: ArrayLike, name: str) -> Array:
    """An array of the values; ragged input gets a clear error."""
    try:
        array = to_array(values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} has rows of different lengths; fill gaps with NaN, or use from_table") from None
    parts = [entry for entry in array.flat if isinstance(entry, _SEVERAL)] if array.dtype == object else []
    if array.dtype.kind in "cV" or parts:
        raise ValueError(f"{name} must hold real numbers or strings; got {shown(parts[0]) if parts else array.dtype}")
    return np.char.decode(array, "utf-8", "replace") if array.dtype.kind == "S" else array


def _numbers(name: str, cells: Array) -> Array:
    """The cells as floats, gaps as NaN."""
    return np.asarray(real_array(name, np.where(is_absent(cells), np.nan, cells) if cells.dtype == object else cells))


def _plain_values(values: Array) -> Array:
    """Objects (the dtype of pandas columns with gaps) as numbers or strings."""
    entries = list(values.ravel())
    texts = all(isinstance(entry, str) for entry in entries)
    if not texts and not all(isinstance(entry, int | float | np.number | np.bool_) for entry in entries):
        kinds = sorted({type(entry).__name__ for entry in entries})
        raise ValueError(f"labels must be all numbers or all strings; got {', '.join(kinds)}")
    try:
        plain = np.array(entries, dtype=str if texts else None)
    except OverflowError:
        plain = values
    if plain.dtype == object:
        raise ValueError(f"labels must be real numbers of a size that a float can hold; got {shown(entries)}")
    return plain.reshape(values.shape)


def _id_values(values: Array, name: str) -> Array:
    """Ids as integers or strings; gaps elsewhere in a table may have made integers floats."""
    if is_absent(values).any():
        raise ValueError(f"{name} has gaps; every label needs the row or id of its instance")
    if values.dtype == object and all(isinstance(entry, int | float | np.number) for entry in values):
        values = _plain_values(values)
    values = _whole(values)
    if values.dtype.kind in "iu":
        return values
    texts = values.astype(str)
    if not all(map(str.strip, texts)):  # blank cells of a file are gaps
        raise ValueError(f"{name} has a blank id; every label needs the row or id of its instance")
    return texts


def _checked_counts(counts: ArrayLike) -> Array:
    """Counts as floats, finite and not negative."""
    values: Array = real_array("counts", counts)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        raise ValueError(f"counts must be finite and not negative; got {values[wrong][0]}. Leave out labels not given")
    return values


def _names_of_columns(annotators: str | Sequence[Hashable], columns: int) -> tuple[str, ...]:
    """The annotators that the columns of an array stand for."""
    if isinstance(annotators, str) or not isinstance(annotators, Iterable):
        if annotators != "columns":
            raise ValueError(f"annotators must be 'columns' or a list of names; got {annotators!r}")
        return tuple(f"annotator_{column}" for column in range(columns))
    names = tuple(str(name) for name in annotators)
    if len(names) != columns or len(set(names)) != len(names):
        raise ValueError(f"annotators must be {columns} different names, one a column of Y; got {list(names)}")
    return names


def _warn_repeats(instance: Array, annotator: Array, names: tuple[str, ...], ids: Array | None) -> None:
    """Warn where an annotator labels an instance twice; instances are in order."""
    order = np.lexsort((annotator, instance))
    again = (np.diff(annotator[order]) == 0) & (np.diff(instance[order]) == 0)
    again &= annotator[order][1:] != (names.index(_UNKNOWN) if _UNKNOWN in names else -1)
    if again.any():
        first = order[int(np.argmax(again))]
        name = printable(instance[first] if ids is None else ids[instance[first]])
        warnings.warn(
            f"annotator {names[annotator[first]]!r} labels instance {name} twice ({int(again.sum())} such repeats in "
            "all), and every label counts; keep one of them, or pass count= where repeats are meant",
            stacklevel=4,
        )


def _annotator_codes(values: Array) -> tuple[Array, tuple[str, ...]]:
    """Every label's annotator as a position among the names, which are sorted."""
    unnamed = is_absent(values) | (np.char.strip(values.astype(str)) == "")
    if unnamed.size and unnamed.all():
        raise ValueError("annotator has only gaps; name the annotators, or leave the argument out")
    if unnamed.any():
        values = np.where(unnamed, _UNKNOWN, _whole(np.where(unnamed, values[~unnamed][0], values)).astype(str))
    names, codes = np.unique(values.astype(str), return_inverse=True)
    return codes, tuple(str(name) for name in names)


def class_positions(value: Array, n_classes: int, classes: Array | None) -> Array:
    """Positions of class values among the classes, which are 0..C-1 where none are named.

    Whole numbers are positions, too, where the classes are words and none of them is a number that occurs.
    """
    if classes is not None:
        position, unknown = look_up(value, classes)
        if unknown.all() and classes.dtype.kind == "U" and _whole(value).dtype.kind in "iub":
            return class_positions(value, n_classes, None)
        if unknown.any():
            known = ", ".join(map(printable, classes[:20]))
            raise ValueError(f"label {str(value[unknown][0])!r} is not among the classes ({known})")
        return position
    hint = f"labels other than 0..{n_classes - 1} need classes=[...] in collect_views or ViewPredictions"
    if value.dtype.kind not in "iufb" and value.size:
        words = [str(word) for word in value.flat if not str(word).isdecimal()]
        if words:
            raise ValueError(f"label {words[0]!r} is not a class number; {hint}")
        value = value.astype(np.int64)
    with np.errstate(invalid="ignore"):  # what is too large for an integer is found below
        position = value.astype(np.int64)
    if not np.array_equal(position, value):
        raise ValueError(f"label {value[position != value][0]} is not a whole number; {hint}")
    wrong = (position < 0) | (position >= n_classes)
    if wrong.any():
        raise ValueError(f"label {int(position[wrong][0])} is outside 0..{n_classes - 1}; {hint}")
    return position


def first_seen(values: Array) -> tuple[Array, Array]:
    """Distinct values in the order of their first row, and every row's place among them."""
    distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return distinct[order], np.argsort(order)[inverse]


def look_up(queries: Array, known: Array) -> tuple[Array, Array]:
    """Positions of the queries among the known values, and which queries are unknown."""
    kinds = {queries.dtype.kind, known.dtype.kind}
    if kinds == {"i", "u"} or len({kind in "US" for kind in kinds}) > 1:  # those have floats in common
        queries, known = (_whole(values).astype(str) for values in (queries, known))
    if not len(known):
        return np.zeros(len(queries), dtype=np.intp), np.ones(len(queries), dtype=bool)
    order = np.argsort(known, kind="stable")
    position = order[np.minimum(np.searchsorted(known, queries, sorter=order), len(known) - 1)]
    return position, np.asarray(known[position] != queries)


def _whole(values: Array) -> Array:
    """Floats that are all whole numbers as integers; others as they are."""
    if values.dtype.kind == "f" and np.all((values == np.floor(values)) & (np.abs(values.astype(float)) < 2**53)):
        return values.astype(np.int64)
    return values
