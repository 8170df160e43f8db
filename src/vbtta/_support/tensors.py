"""Batches of any kind: arrays, torch tensors (torch is used where it is loaded already), tables, DataLoaders, lists."""

import copy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vbtta._support.checks import is_instance, is_tensor, require, whole_number

Batch = Any  # an array or tensor of N rows, a RowList, or a dict, tuple or list of such


class RowList(list[Any]):
    """A batch with one entry a row: texts, images of different sizes, rows of different lengths."""


def as_batch(batch: Any) -> Batch:
    """A batch whose lists of rows are marked as RowList; a list of arrays holds parts, such as inputs and labels."""
    if isinstance(batch, Mapping):
        return {key: _stacked(part) if type(part) is list and part else as_batch(part) for key, part in batch.items()}
    if any(is_instance(batch, "pyarrow", kind) for kind in ("Table", "RecordBatch", "ChunkedArray", "Array")):
        batch = batch.to_pandas()
    if isinstance(batch, np.ndarray):
        return RowList(batch.tolist()) if batch.ndim == 1 and batch.dtype.kind in "OUST" else batch
    if type(batch) not in (list, tuple) or not len(batch):
        return batch
    if is_numbers(batch):
        try:
            return np.asarray(batch)
        except ValueError:  # rows of different lengths
            return RowList(batch)
    values = batch[0].values() if isinstance(batch[0], Mapping) else ()  # a dict that holds one number or text is a row
    if any(not isinstance(value, Mapping | list | tuple) and not len(getattr(value, "shape", ())) for value in values):
        return {key: _stacked([row[key] for row in batch]) for key in batch[0]}
    return RowList(batch) if _has_rows(batch) else type(batch)(as_batch(part) for part in batch)


def _stacked(entries: list[Any]) -> Batch:
    """A column of rows."""
    if len({getattr(entry, "shape", None) for entry in entries} | {None}) != 2:
        return as_batch(entries) if not hasattr(entries[0], "shape") else RowList(entries)
    return sys.modules["torch"].stack(entries) if is_tensor(entries[0]) else np.stack(entries)


def _has_rows(values: Any) -> bool:
    """Whether the entries of a list are rows: texts, images and other objects, or signals of different lengths."""
    shapes: list[Any] = [getattr(entry, "shape", None) for entry in values]
    if None not in shapes:
        return {len(shape) for shape in shapes} == {1} and len(set(shapes)) > 1
    return not isinstance(values[0], Mapping | list | tuple) and shapes[0] is None


def is_numbers(values: Any) -> bool:
    """Whether a list holds numbers, or lists of numbers."""
    first = values[0] if isinstance(values, list | tuple) and values else None
    return isinstance(first, float | int | np.number) or (isinstance(first, list | tuple) and is_numbers(first))


def is_floating(values: Any) -> bool:
    """Whether an array or tensor holds floating-point numbers."""
    return bool(values.is_floating_point()) if is_tensor(values) else np.asarray(values).dtype.kind == "f"


def resized(maps: Any, size: tuple[int, ...]) -> Any:
    """Tensors (N, C, ...) at another size, bilinear or trilinear."""
    mode = "bilinear" if len(size) == 2 else "trilinear"
    return require("torch", "torch").nn.functional.interpolate(maps, size=size, mode=mode, align_corners=False)


def to_tensor(array: NDArray[Any]) -> Any:
    """A NumPy array as a tensor, without a copy if it can be."""
    return require("torch", "torch").from_numpy(np.ascontiguousarray(array))


def like(values: NDArray[Any], batch: Any) -> Any:
    """Bring NumPy values to the type, precision and device of the batch."""
    if is_tensor(batch):
        return to_tensor(values).to(device=batch.device, dtype=batch.dtype)
    return values.astype(batch.dtype, copy=False)


def where(mask: NDArray[np.bool_], chosen: Any, other: Any) -> Any:
    """Entries of `chosen` where the mask is true, of `other` elsewhere."""
    if is_tensor(chosen):
        return sys.modules["torch"].where(to_tensor(mask).to(chosen.device), chosen, other)
    return np.where(mask, chosen, other)


def copy_of(batch: Batch) -> Batch:
    """A copy of every array of a batch."""
    if is_tensor(batch):
        return batch.clone()
    if type(batch) is dict:
        return {key: copy_of(part) for key, part in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(copy_of(part) for part in batch)
    return batch.copy() if isinstance(batch, np.ndarray) else copy.deepcopy(batch)


def n_rows_of(batch: Batch) -> int:
    """Number of rows of a batch."""
    if isinstance(batch, Mapping):
        return n_rows_of(next(iter(batch.values())))
    if isinstance(batch, tuple | list) and not isinstance(batch, RowList):
        return n_rows_of(batch[0])
    return int(batch.shape[0]) if hasattr(batch, "shape") else len(batch)


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Some rows of every array of a batch."""
    if isinstance(batch, Mapping):
        return {key: rows_of(part, rows) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(rows_of(part, rows) for part in batch)
    if isinstance(batch, list):
        return type(batch)(batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows])
    return batch.iloc[rows] if hasattr(batch, "iloc") else batch[rows]


def batches_of(inputs: Any, batch_size: int) -> tuple[Iterator[Any], int | None]:
    """Batches of the inputs that `collect_views` takes, and the number of rows where it is known beforehand."""
    batch_size = whole_number("batch_size", batch_size, 1)
    original, inputs = inputs, as_batch(inputs)
    shapes: set[Any] = {getattr(row, "shape", None) for row in original} if type(original) is list else {None}
    if None not in shapes and len(set(map(len, shapes))) == 1 and len({shape[1:] for shape in shapes}) > 1:
        inputs = RowList(original)  # images of different sizes; batches have rows of one shape
    if type(inputs) is list and all(isinstance(row, Mapping) and row.keys() == inputs[0].keys() for row in inputs):
        inputs = {key: _stacked([row[key] for row in inputs]) for key in (inputs[0] if inputs else ())}
    if isinstance(original, list) and hasattr(inputs, "shape"):
        raise TypeError("inputs is a list of numbers; make an array of it, as np.asarray(inputs)")
    if is_instance(inputs, "datasets", "IterableDataset"):
        return map(as_batch, inputs.iter(batch_size)), None
    n_rows = _n_rows(inputs)
    if n_rows is not None:
        if n_rows == 0:
            raise ValueError("inputs are empty; there must be at least one row")
        parts = (slice(start, start + batch_size) for start in range(0, n_rows, batch_size))
        return (as_batch(rows_of(inputs, part)) for part in parts), n_rows
    if isinstance(inputs, str | bytes) or not hasattr(inputs, "__iter__"):
        raise TypeError(
            "inputs must be an array, a tensor, a list of rows, a dict or tuple of them, a DataLoader (of a data set) "
            f"or an iterator of batches; got {type(inputs).__name__}"
        )
    if isinstance(original, list):
        raise TypeError(
            "inputs is a list of arrays, which may be rows or batches: stack rows, as np.stack(inputs) or "
            "torch.stack(inputs), and give batches as iter(inputs)"
        )
    if _shuffles(inputs):
        raise ValueError("inputs is a DataLoader that shuffles, so its rows cannot be matched: use shuffle=False")
    return map(as_batch, _checked(inputs, batch_size)), None


def _n_rows(inputs: Any) -> int | None:
    """Rows of an array, a table, or a dict or tuple of them; None for what has to be iterated over."""
    if isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and inputs):
        parts = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        lengths = {key: _n_rows(part) for key, part in parts.items()}
        if len(set(lengths.values())) > 1 or None in lengths.values():
            raise ValueError(f"inputs must be arrays with the same number of rows; got {lengths}")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, np.ma.MaskedArray):
        raise ValueError("inputs is a masked array: fill its gaps, as inputs.filled(value)")
    if hasattr(inputs, "toarray"):
        raise TypeError("inputs is a sparse matrix, which views cannot work on; use inputs.toarray()")
    if isinstance(inputs, RowList) or (isinstance(inputs, Sequence) and not isinstance(inputs, list | str | bytes)):
        return len(inputs)
    shape = getattr(inputs, "shape", None)
    if shape is None:
        return None
    if len(shape) == 0:
        raise ValueError("inputs must have rows; got a single number")
    return int(shape[0])


def _shuffles(loader: Any) -> bool:
    """Whether a DataLoader draws the order of its rows, by itself or through a sampler of batches."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any("Random" in type(s).__name__ or getattr(s, "shuffle", False) is True for s in samplers)


def _checked(inputs: Any, batch_size: int) -> Iterator[Any]:
    """The batches of an iterable; single rows are collected into batches. It must not end before its length."""
    promised = length_hint(inputs) if hasattr(inputs, "__len__") else 0
    n_entries, rows = 0, []
    for n_entries, entry in enumerate(inputs, start=1):  # noqa: B007
        if not isinstance(entry, str | bytes) and (hasattr(entry, "__len__") or hasattr(entry, "shape")):
            yield entry
            continue
        rows.append(entry)
        if len(rows) == batch_size:
            yield rows
            rows = []
    if rows:
        yield rows
    if n_entries == 0:
        raise ValueError("inputs gave no batch; an iterator can be used only once, so make a new one")
    if n_entries < promised:
        raise ValueError(f"inputs ended after {n_entries} of {promised} batches; results would not match the labels")


class Progress:
    """Counts finished units (a plural noun) and estimates the time left; silent unless enabled."""

    def __init__(self, unit: str, total: int | None, enabled: bool) -> None:
        self.unit, self.total, self.enabled = unit, total, enabled
        self.done = 0
        self._started = self._written = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.enabled:
            self._write()
            print(file=sys.stderr, flush=True)

    def advance(self, n: int) -> None:
        """Count `n` more; writes at most five times a second."""
        self.done += n
        if self.enabled and time.monotonic() - self._written > 0.2:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        passed = self._written - self._started
        text = f"{self.done:,} {self.unit} in {passed:.0f} s"
        if self.total:
            left = passed * (self.total - self.done) / max(self.done, 1)
            text = f"{self.done:,} of {self.total:,} {self.unit}, {passed:.0f} s passed, about {left:.0f} s left"
        print(f"\rvbtta: {text:<70}", end="", file=sys.stderr, flush=True)
