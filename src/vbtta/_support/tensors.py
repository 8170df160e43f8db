"""NumPy arrays and torch tensors alike; torch is never imported here, only used where it is loaded already."""

__all__ = [
    "RowList", "as_batch", "copy_of", "is_floating", "is_instance", "is_tensor", "like", "n_rows_of", "rows_of",
    "to_array", "where",
]  # fmt: skip

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = Any  # an array or tensor of N rows, a RowList, or a dict, tuple or list of such


class RowList(list[Any]):
    """A batch with one entry a row: texts, images of different sizes, rows of different lengths."""


def as_batch(batch: Any) -> Batch:
    """The batch with lists of one entry a row as such; a list of arrays has one entry a part, such as inputs, labels.

    Examples
    --------
    >>> type(as_batch(["two", "texts"])).__name__, type(as_batch([np.zeros(2), np.ones(2)])).__name__
    ('RowList', 'list')
    """
    if isinstance(batch, Mapping):
        return {key: as_batch(part) for key, part in batch.items()}
    if isinstance(batch, np.ndarray):
        return RowList(batch.tolist()) if batch.ndim == 1 and batch.dtype.kind in "OUST" else batch
    if type(batch) not in (list, tuple) or not len(batch):
        return batch
    if is_numbers(batch):
        try:
            return np.asarray(batch)
        except ValueError:  # rows of different lengths
            return RowList(batch)
    if isinstance(batch[0], Mapping) and any(map(_is_single, batch[0].values())):
        return {key: _stacked([row[key] for row in batch]) for key in batch[0]}
    return RowList(batch) if _has_rows(batch) else type(batch)(as_batch(part) for part in batch)


def _is_single(value: Any) -> bool:
    """Whether this is one number, text or other object, so that a dict that holds it is a row."""
    return not isinstance(value, Mapping | list | tuple) and len(getattr(value, "shape", ())) == 0


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


def is_instance(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a class of a package that may not be installed."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor."""
    return is_instance(value, "torch", "Tensor")


def is_floating(values: Any) -> bool:
    """Whether an array or tensor holds floating-point numbers."""
    return bool(values.is_floating_point()) if is_tensor(values) else np.asarray(values).dtype.kind == "f"


def to_array(values: Any) -> NDArray[Any]:
    """A tensor or anything array-like as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    if not is_tensor(values):
        return np.asarray(values)
    values = values.detach().cpu()
    return np.asarray((values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy())


def like(values: NDArray[Any], batch: Any) -> Any:
    """Bring NumPy values to the type, precision and device of the batch."""
    if is_tensor(batch):
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=batch.device, dtype=batch.dtype)
    return values.astype(batch.dtype, copy=False)


def where(mask: NDArray[np.bool_], chosen: Any, other: Any) -> Any:
    """Entries of `chosen` where the mask is true, of `other` elsewhere."""
    if is_tensor(chosen):
        torch = sys.modules["torch"]
        return torch.where(torch.from_numpy(np.ascontiguousarray(mask)).to(chosen.device), chosen, other)
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
    return type(batch)(batch[row] for row in rows) if isinstance(batch, list) else batch[rows]
