"""Label values as people write them: gaps, counts, annotators, classes and ids, checked and made plain."""

__all__ = [
    "Array",
    "annotator_codes",
    "any_known",
    "as_array",
    "checked_counts",
    "checked_rows",
    "class_positions",
    "is_absent",
    "look_up",
    "names_of_columns",
    "plain_values",
    "rows_of",
    "whole_numbers",
]

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def as_array(values: ArrayLike, name: str) -> Array:
    """An array of the values; ragged input gets a sentence instead of NumPy's."""
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{name} has rows of different lengths; fill the gaps with NaN or None, or use LabelSets.from_table"
        ) from None


def is_absent(values: Array, missing: object) -> Array:
    """Where an array says "no label"."""
    if values.dtype.kind in "fc":
        absent = np.isnan(values)
    elif values.dtype.kind in "mM":
        raise ValueError(f"labels must be numbers or strings; got {values.dtype}")
    elif values.dtype == object:
        flags = [entry is None or _not_equal_to_itself(entry) for entry in values.ravel()]
        absent = np.array(flags, dtype=bool).reshape(values.shape)
    else:
        absent = np.zeros(values.shape, dtype=bool)
    if missing is not None:
        absent = absent | np.asarray(values == missing, dtype=bool)
    return absent


def _not_equal_to_itself(entry: object) -> bool:
    """Whether an entry is NaN or pandas' NA (whose comparisons refuse to be true or false)."""
    try:
        return bool(entry != entry)
    except TypeError:
        return True


def plain_values(values: Array) -> Array:
    """Objects (what pandas and None leave behind) as numbers or strings."""
    entries = list(values.ravel())
    if all(isinstance(entry, str) for entry in entries):
        return np.array(entries, dtype=str).reshape(values.shape)
    if all(isinstance(entry, int | float | np.number | np.bool_) for entry in entries):
        return np.array(entries).reshape(values.shape)
    kinds = sorted({type(entry).__name__ for entry in entries})
    raise ValueError(f"labels must be all numbers or all strings; got {', '.join(kinds)}")


def checked_counts(counts: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Counts as floats of a shape, finite and not negative."""
    try:
        values = np.asarray(counts).astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("counts must be numbers of a size that a float can hold") from None
    if values.shape != shape:
        raise ValueError(f"counts must have shape {shape}; got {values.shape}")
    if not np.all(np.isfinite(values)) or (values < 0).any():
        wrong = values[~(np.isfinite(values) & (values >= 0))][0]
        raise ValueError(f"counts must be finite and not negative; got {wrong}. Leave out labels that were not given")
    return values


def whole_numbers(values: Array) -> Array:
    """Floats that are all whole as integers (gaps elsewhere make columns of ids floats); other values as they are."""
    if values.dtype.kind == "f" and np.all((values == np.floor(values)) & (np.abs(values) < 2**53)):
        return values.astype(np.int64)
    return values


def checked_rows(key: Array) -> Array:
    """Row numbers, not negative and of a size that an index can have."""
    if key.size and key.min() < 0:
        raise ValueError(f"instance must not be negative; got {int(key.min())}")
    if key.size and key.max() >= 2**62:
        raise ValueError(f"instance {int(key.max())} is too large for a row number; give ids as strings")
    return key.astype(np.int64)


def names_of_columns(annotators: str | Sequence[Hashable], columns: int) -> tuple[str, ...]:
    """The annotators that the columns of an array stand for."""
    if isinstance(annotators, str) or not isinstance(annotators, Iterable):
        if annotators != "columns":
            raise ValueError(f"annotators must be 'columns' or a list of names; got {annotators!r}")
        return tuple(f"annotator_{column}" for column in range(columns))
    names = tuple(str(name) for name in annotators)
    if len(names) != columns or len(set(names)) != len(names):
        raise ValueError(f"annotators must be {columns} different names, one a column of Y; got {list(names)}")
    return names


def annotator_codes(annotator: ArrayLike, n_labels: int) -> tuple[Array, tuple[str, ...]]:
    """Every label's annotator as a position among the names, which are sorted."""
    values = np.asarray(annotator)
    if values.shape != (n_labels,):
        raise ValueError(f"annotator must be ({n_labels},), one a label; got shape {values.shape}")
    if is_absent(values, None).any():
        raise ValueError("annotator has gaps; name every label's annotator, or leave the argument out")
    names, codes = np.unique(values.astype(str), return_inverse=True)
    return codes, tuple(str(name) for name in names)


def class_positions(value: Array, n_classes: int, classes: Array | None) -> Array:
    """Positions of class values among the classes, which are 0..C-1 where none are named.

    Integers are positions, too, where the classes are words and none of them is a number that occurs.
    """
    if classes is not None:
        position, unknown = look_up(value, classes)
        if unknown.all() and classes.dtype.kind == "U" and value.dtype.kind in "iub":
            return class_positions(value, n_classes, None)
        if unknown.any():
            known = ", ".join(str(name) for name in classes[:20])
            raise ValueError(f"label {str(value[unknown][0])!r} is not among the classes ({known})")
        return position
    hint = f"name the classes with ViewPredictions(classes=[...]) if labels are not 0..{n_classes - 1}"
    if value.dtype.kind not in "iufb":
        raise ValueError(f"label {str(value.flat[0])!r} is not a class number; {hint}")
    position = value.astype(np.int64)
    if not np.array_equal(position, value):
        raise ValueError(f"label {value[position != value][0]} is not a whole number; {hint}")
    wrong = (position < 0) | (position >= n_classes)
    if wrong.any():
        raise ValueError(f"label {int(position[wrong][0])} is outside 0..{n_classes - 1}; {hint}")
    return position


def look_up(wanted: Array, known: Array) -> tuple[Array, Array]:
    """Positions of wanted values among the known ones, and which of them are unknown."""
    if (wanted.dtype.kind in "US") != (known.dtype.kind in "US"):
        wanted, known = _words(wanted), _words(known)
    if not len(known):
        return np.zeros(len(wanted), dtype=np.intp), np.ones(len(wanted), dtype=bool)
    order = np.argsort(known, kind="stable")
    position = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
    return position, np.asarray(known[position] != wanted)


def _words(values: Array) -> Array:
    """Values as strings; gaps may have made whole numbers floats, and 1.0 is called "1"."""
    if values.dtype.kind == "f" and np.all(values == np.floor(values)):
        values = values.astype(np.int64)
    return values.astype(str)


def any_known(wanted: Array, ids: Array) -> bool:
    """Whether any of the wanted values is among the ids."""
    return bool(len(wanted)) and not bool(look_up(wanted, ids)[1].all())


def rows_of(wanted: Array, ids: Array) -> Array:
    """Rows of the instances that labels name, among the predictions' ids."""
    rows, unknown = look_up(wanted, ids)
    if unknown.any():
        raise ValueError(
            f"labels name instance {str(wanted[unknown][0])!r}, which is not among the predictions' ids "
            f"({int(unknown.sum())} of {len(unknown)} are not)"
        )
    return rows
