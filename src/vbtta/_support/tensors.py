"""NumPy arrays and torch tensors alike; torch is never imported here, only used where it is loaded already."""

__all__ = ["copy_of", "is_floating", "is_instance", "is_tensor", "like", "n_rows_of", "rows_of", "to_array", "where"]

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = Any  # an array or tensor of N rows, or a dict, tuple or list of such


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
    if isinstance(batch, tuple | list):
        return n_rows_of(batch[0])
    return int(batch.shape[0]) if hasattr(batch, "shape") else len(batch)


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Some rows of every array of a batch."""
    if isinstance(batch, Mapping):
        return {key: rows_of(part, rows) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(rows_of(part, rows) for part in batch)
    return [batch[row] for row in rows] if isinstance(batch, list) else batch[rows]
