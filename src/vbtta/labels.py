"""Label sets: for every instance any number of labels, with annotators and counts where known."""

__all__ = ["Array", "LabelSets", "class_positions"]

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta._support.words import shown
from vbtta.label_values import (
    Array,
    annotator_codes,
    any_known,
    as_array,
    checked_counts,
    checked_rows,
    class_positions,
    is_absent,
    names_of_columns,
    plain_values,
    rows_of,
    whole_numbers,
)

_LARGEST_COUNT = 1e15  # of all labels together: beyond that sums lose single labels


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The labels of a calibration sample, one entry a label, sorted by instance.

    Build it with :meth:`from_array`, :meth:`from_table`, :meth:`from_counts` or :meth:`from_rankings`; the
    fields are validated there and never change.

    Attributes
    ----------
    instance : (J,) int array
        Row of the labelled instance, ascending.
    value : (J,) or (J, C) array
        The labels as given: numbers or strings, or vectors for several outputs.
    count : (J,) float array
        How often each label was given.
    annotator : (J,) int array or None
        Index into `annotator_names`.
    n_instances : int
        Number of instances, labelled or not.
    ids : (n_instances,) array or None
        Identifiers of the instances, where labels came with them.
    by_position : bool
        Values are positions among the classes (from counts) or items (from rankings) rather than class values.
    open_ended : bool
        Instances are integers from a table without `n_instances`: row numbers, or ids where the
        predictions have integer ids; there may be more instances than the largest of them.
    columns : int or None
        Number of columns of the array the labels came from.

    Examples
    --------
    >>> labels = LabelSets.from_array([[1.0, 1.2], [3.0, float("nan")]])
    >>> labels
    LabelSets(3 labels of 2 instances)
    >>> labels.instance
    array([0, 0, 1])
    """

    instance: Array
    value: Array
    count: Array
    annotator: Array | None
    annotator_names: tuple[str, ...]
    n_instances: int
    ids: Array | None = None
    by_position: bool = False
    open_ended: bool = False
    columns: int | None = None

    # -- building -----------------------------------------------------------------------------

    @classmethod
    def from_array(
        cls, Y: ArrayLike, *, missing: object = None, annotators: str | Sequence[Hashable] | None = None
    ) -> Self:
        """Read labels from an array with one row an instance.

        Parameters
        ----------
        Y : (N,), (N, M) or (N, M, C) array
            One label, up to M labels, or up to M vector labels for each instance. NaN, None and NA
            mean "no label"; masked entries too.
        missing : optional
            One more value that means "no label", for instance -1 or "".
        annotators : "columns" or M names, optional
            Whether column m is always the same annotator. By default columns are anonymous labels.
        """
        table = np.ma.getdata(Y) if isinstance(Y, np.ma.MaskedArray) else as_array(Y, "Y")
        if table.ndim not in (1, 2, 3):
            raise ValueError(f"Y must be (N,), (N, M) or (N, M, C); got shape {table.shape}")
        absent = is_absent(table, missing)
        if isinstance(Y, np.ma.MaskedArray):
            absent |= np.ma.getmaskarray(Y)
        if table.ndim == 1:
            table, absent = table[:, None], absent[:, None]
        n_instances, columns = table.shape[:2]
        if table.ndim == 3:
            if table.shape[2] == 0:
                raise ValueError(f"Y has no outputs (shape {table.shape}); its last axis must be at least 1")
            partial = absent.any(axis=2) & ~absent.all(axis=2)
            if partial.any():
                where = tuple(int(index) for index in np.argwhere(partial)[0])
                raise ValueError(
                    f"Y[{where[0]}, {where[1]}] is a vector label with gaps; give all its outputs or none of them"
                )
            absent = np.asarray(absent.any(axis=2))
        rows, column = np.nonzero(~absent)
        names: tuple[str, ...] = ()
        if annotators is not None:
            names = names_of_columns(annotators, columns)
        return cls._build(
            instance=rows,
            value=table[rows, column],
            count=np.ones(len(rows)),
            annotator=column if names else None,
            annotator_names=names,
            n_instances=n_instances,
            columns=columns,
        )

    @classmethod
    def from_table(
        cls,
        instance: ArrayLike,
        label: ArrayLike,
        annotator: ArrayLike | None = None,
        count: ArrayLike | None = None,
        n_instances: int | None = None,
    ) -> Self:
        """Read labels from a long table: one row a label, as crowd-sourcing platforms export it.

        Parameters
        ----------
        instance : (J,) array
            Row number of the instance, or its id (paired with the predictions' `ids`).
        label : (J,) or (J, C) array
        annotator : (J,) array, optional
            Who gave the label; any hashable values without gaps.
        count : (J,) array, optional
            How often the label was given.
        n_instances : int, optional
            Number of instances; then `instance` holds row numbers.
        """
        key, value = as_array(instance, "instance"), as_array(label, "label")
        if key.ndim != 1 or value.ndim not in (1, 2) or len(value) != len(key):
            raise ValueError(
                f"instance must be (J,) and label (J,) or (J, C) of the same length; "
                f"got shapes {key.shape} and {value.shape}"
            )
        if key.size and is_absent(key, None).any():
            raise ValueError("instance has gaps; every label needs the row or id of its instance")
        gaps = is_absent(value, None)
        gaps = np.asarray(gaps.any(axis=1)) if gaps.ndim == 2 else gaps
        if gaps.any():
            raise ValueError(f"label is missing in row {int(np.argmax(gaps))}; leave such rows out")
        code: Array | None = None
        names: tuple[str, ...] = ()
        if annotator is not None:
            code, names = annotator_codes(annotator, len(key))
        times = np.ones(len(key)) if count is None else checked_counts(count, (len(key),))
        ids, open_ended = None, False
        key = whole_numbers(key)
        if key.dtype.kind in "iu":
            rows = checked_rows(key)
            open_ended = n_instances is None
            size = int(rows.max()) + 1 if rows.size else 0
            if n_instances is not None and size > whole_number("n_instances", n_instances, least=0):
                raise ValueError(f"instance {size - 1} does not exist: n_instances is {n_instances}")
            size = size if n_instances is None else int(n_instances)
        elif n_instances is not None:
            raise ValueError(
                f"instance must be row numbers where n_instances is given; got dtype {key.dtype}. Leave n_instances "
                "out to pair by id"
            )
        else:
            ids, rows = np.unique(key.astype(str), return_inverse=True)
            size = len(ids)
        keep = times > 0
        return cls._build(
            instance=rows[keep],
            value=value[keep],
            count=times[keep],
            annotator=None if code is None else code[keep],
            annotator_names=names,
            n_instances=size,
            ids=ids,
            open_ended=open_ended,
        )

    @classmethod
    def from_counts(cls, counts: ArrayLike) -> Self:
        """Read how often each class was given to each instance: an (N, C) array."""
        table = as_array(counts, "counts")
        if table.ndim != 2:
            raise ValueError(f"counts must be (N, C), how often each class was given; got shape {table.shape}")
        table = checked_counts(table, table.shape)
        rows, classes = np.nonzero(table)
        return cls._build(
            instance=rows,
            value=classes,
            count=table[rows, classes],
            annotator=None,
            annotator_names=(),
            n_instances=len(table),
            by_position=True,
        )

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

        Examples
        --------
        >>> LabelSets.from_rankings([[2, 0, 1], [1], None]).value
        array([[ 2,  0,  1],
               [ 1, -1, -1]])
        """
        rows = [np.zeros(0) if order is None else as_array(order, "orders") for order in orders]
        for place, row in enumerate(rows):
            if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0)):
                raise ValueError(f"orders[{place}] must be positions of items, the best first; got {row.tolist()}")
            if len(np.unique(row)) < len(row):
                raise ValueError(f"orders[{place}] names an item twice: {row.tolist()}")
        key = np.arange(len(rows)) if instance is None else as_array(instance, "instance")
        if key.shape != (len(rows),) or (key.size and (key.dtype.kind not in "iu" or key.min() < 0)):
            raise ValueError(f"instance must be {len(rows)} row numbers, one a ranking; got shape {key.shape}")
        kept = np.array([place for place, row in enumerate(rows) if row.size], dtype=np.intp)
        value = np.full((len(kept), max((len(rows[place]) for place in kept), default=1)), -1, dtype=np.int64)
        for line, place in enumerate(kept):
            value[line, : len(rows[place])] = rows[place]
        return cls._build(
            instance=key[kept],
            value=value,
            count=np.ones(len(kept)),
            annotator=None,
            annotator_names=(),
            n_instances=int(key.max()) + 1 if key.size else 0,
            by_position=True,
            open_ended=instance is not None,
        )

    @classmethod
    def _build(cls, *, instance: Array, value: Array, annotator: Array | None, count: Array, **rest: Any) -> Self:
        order = np.argsort(instance, kind="stable")
        value = value[order]
        if value.dtype == object:
            value = plain_values(value)
        if value.dtype.kind == "c":
            raise ValueError(f"labels must be real numbers or strings; got {value.dtype}")
        if value.dtype.kind == "f" and not np.all(np.isfinite(value)):
            row = int(instance[order][np.argwhere(~np.isfinite(value))[0][0]])
            raise ValueError(f"labels must be finite; instance {row} has an infinite one; NaN means no label")
        if len(count) and count.max() > _LARGEST_COUNT / len(count):
            raise ValueError(f"counts are too large ({count.max():.3g}); divide them by a common factor")
        return cls(
            instance=instance[order].astype(np.intp),
            value=value,
            count=count[order],
            annotator=None if annotator is None else annotator[order].astype(np.intp),
            **rest,
        )

    # -- reading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.instance)

    def __repr__(self) -> str:
        people = f" by {len(self.annotator_names)} annotators" if self.annotator is not None else ""
        return f"LabelSets({len(self):,} labels of {self.n_instances:,} instances{people})"

    @property
    def total(self) -> float:
        """Number of labels, counts included (J)."""
        return float(self.count.sum())

    @property
    def labelled(self) -> Array:
        """Rows of the instances with at least one label, ascending: (N+,)."""
        return np.unique(self.instance)

    @property
    def labels_per_instance(self) -> Array:
        """Number of labels of each instance, counts included: (N,)."""
        return np.bincount(self.instance, weights=self.count, minlength=self.n_instances)

    @property
    def overlap(self) -> bool:
        """Whether at least 20 instances, or a tenth of the labelled ones, carry two labels or more."""
        size = self.labels_per_instance
        return bool((size >= 2).sum() >= max(1, min(20, 0.1 * (size > 0).sum())))

    def continuous(self, n_outputs: int) -> Array:
        """The labels as (J, C) floats."""
        if self.by_position:
            raise ValueError(
                "labels from counts or rankings are no numbers; a regression takes from_array or from_table"
            )
        try:
            value = self.value.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"labels must be numbers in a regression; got {shown(_no_number(self.value))}") from None
        value = value[:, None] if value.ndim == 1 else value
        if value.shape[1] != n_outputs:
            raise ValueError(
                f"labels have {value.shape[1]} output(s) but the predictions {n_outputs}; "
                "vector labels go in as (N, M, C)"
            )
        return value

    def categorical(self, n_classes: int, classes: Array | None = None) -> Array:
        """The labels as (J,) positions among the classes, which are 0..C-1 where none are named."""
        if self.value.ndim == 2 and self.value.shape[1] != 1:
            raise ValueError("labels are vectors; a classification takes one class a label (from_counts for counts)")
        value = self.value.reshape(len(self))
        if self.columns == n_classes > 1 and self._looks_one_hot():
            raise ValueError(
                f"labels look one-hot: {n_classes} columns of 0 and 1, one 1 a row; use LabelSets.from_counts(Y)"
            )
        return class_positions(value, n_classes, None if self.by_position else classes)

    def rankings(self, n_items: int) -> Array:
        """The labels as (J, L) orders of all items, best first, -1 where a ranking ends early."""
        if not self.by_position or self.value.ndim != 2:
            raise ValueError("labels are not rankings; build them with LabelSets.from_rankings")
        if self.value.size and self.value.max() >= n_items:
            raise ValueError(f"a ranking names item {int(self.value.max())}, but the predictions have {n_items} items")
        orders = np.full((len(self), n_items), -1, dtype=np.int64)
        orders[:, : self.value.shape[1]] = self.value
        return orders

    # -- rearranging --------------------------------------------------------------------------

    def align(self, n_instances: int, ids: Array | None = None) -> Self:
        """Pair with predictions: by id where both sides have ids, else by row.

        Returns the same labels with `instance` counting the rows of the predictions.
        """
        if self.ids is not None:
            if ids is None:
                raise ValueError(
                    f"labels name their instances by id (such as {str(self.ids[0])!r}) but the predictions have none; "
                    "give ViewPredictions(ids=...)"
                )
            rows = rows_of(self.ids, ids)[self.instance]
        elif self.open_ended and ids is not None and (ids.dtype.kind in "iu" or any_known(self.instance, ids)):
            rows = rows_of(self.instance, ids)
        else:
            rows = self.instance
            if len(rows) and rows[-1] >= n_instances:
                raise ValueError(
                    f"labels name instance {int(rows[-1])} but the predictions have {n_instances} instances"
                )
            if not self.open_ended and self.n_instances != n_instances:
                raise ValueError(
                    f"labels are for {self.n_instances} instances but the predictions for {n_instances}; "
                    "they are paired by row"
                )
        order = np.argsort(rows, kind="stable")
        return replace(self._reorder(order), instance=rows[order], n_instances=n_instances, ids=ids, open_ended=False)

    def take(self, rows: Array) -> Self:
        """The labels of some instances; the k-th of `rows` becomes instance k."""
        start = np.searchsorted(self.instance, rows, side="left")
        length = np.searchsorted(self.instance, rows, side="right") - start
        instance = np.repeat(np.arange(len(rows)), length)
        offset = np.arange(len(instance)) - np.repeat(np.cumsum(length) - length, length)
        index = np.repeat(start, length) + offset
        ids = None if self.ids is None else self.ids[rows]
        return replace(self._reorder(index), instance=instance, n_instances=len(rows), ids=ids, columns=None)

    def _reorder(self, index: Array) -> Self:
        return replace(
            self,
            instance=self.instance[index],
            value=self.value[index],
            count=self.count[index],
            annotator=None if self.annotator is None else self.annotator[index],
        )

    def _looks_one_hot(self) -> bool:
        """Whether the labels are a table of 0 and 1 with one 1 a row, and that can be no accident.

        Two anonymous annotators of two classes may well disagree on a few instances.
        """
        columns = self.columns or 0
        fewest = 20 if columns == 2 else 5
        if self.value.dtype.kind not in "iufb" or self.annotator is not None or self.n_instances < fewest:
            return False
        if len(self) != self.n_instances * columns:
            return False
        table = self.value.reshape(self.n_instances, -1)
        return bool(np.isin(table, (0, 1)).all() and (table.sum(axis=1) == 1).all())


def _no_number(values: Array) -> object:
    """The first of the values that is no number."""
    for value in values.flat:
        try:
            float(value)
        except (TypeError, ValueError):
            return value
    return values.flat[0]
