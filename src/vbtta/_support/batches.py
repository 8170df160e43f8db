"""Inputs of any kind, batch by batch: arrays, tensors, tables, DataLoaders, iterators."""

__all__ = ["batches_of"]

from collections.abc import Iterator, Mapping
from typing import Any

from vbtta._support.checks import whole_number


def batches_of(inputs: Any, batch_size: int) -> tuple[Iterator[Any], int | None]:
    """Batches of the inputs, and the number of rows where it is known beforehand.

    Arrays, tensors, tables, and dicts and tuples of them are cut into batches of `batch_size` rows; DataLoaders and
    iterators give batches of their own.

    Examples
    --------
    >>> import numpy as np
    >>> batches, n_rows = batches_of(np.zeros((5, 2)), 2)
    >>> n_rows, [len(batch) for batch in batches]
    (5, [2, 2, 1])
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    n_rows = _n_rows(inputs)
    if n_rows is not None:
        if n_rows == 0:
            raise ValueError("inputs are empty; there must be at least one row")
        return (_rows(inputs, start, start + batch_size) for start in range(0, n_rows, batch_size)), n_rows
    if isinstance(inputs, str | bytes) or not hasattr(inputs, "__iter__"):
        raise TypeError(
            f"inputs must be an array, a tensor, a dict or tuple of them, a DataLoader or an iterator of batches; "
            f"got {type(inputs).__name__}"
        )
    if isinstance(inputs, list) and _is_row(inputs):
        raise TypeError("inputs is a list of numbers; make an array of it, as np.asarray(inputs)")
    if _shuffles(inputs):
        raise ValueError("inputs is a DataLoader that shuffles, so its rows cannot be matched: use shuffle=False")
    return _checked(inputs), None


def _n_rows(inputs: Any) -> int | None:
    """Rows of an array, a table, or a dict or tuple of them; None for what has to be iterated over."""
    if isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and inputs):
        parts = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        lengths = {key: _n_rows(part) for key, part in parts.items()}
        if not lengths or len(set(lengths.values())) > 1 or None in lengths.values():
            raise ValueError(f"inputs must be arrays with the same number of rows; got {lengths}")
        return next(iter(lengths.values()))
    if hasattr(inputs, "toarray"):
        raise TypeError("inputs is a sparse matrix, which views cannot work on; use inputs.toarray()")
    shape = getattr(inputs, "shape", None)
    if shape is None:
        return None
    if len(shape) == 0:
        raise ValueError("inputs must have rows; got a single number")
    return int(shape[0])


def _is_row(values: Any) -> bool:
    """Whether a list holds numbers, or lists of numbers."""
    first = values[0] if isinstance(values, list) and values else None
    return isinstance(first, float | int) or (isinstance(first, list) and _is_row(first))


def _shuffles(loader: Any) -> bool:
    """Whether a DataLoader draws the order of its rows, by itself or through a sampler of batches."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any("Random" in type(s).__name__ or getattr(s, "shuffle", False) is True for s in samplers)


def _rows(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _rows(part, start, stop) for key, part in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_rows(part, start, stop) for part in inputs)
    return inputs.iloc[start:stop] if hasattr(inputs, "iloc") else inputs[start:stop]


def _checked(inputs: Any) -> Iterator[Any]:
    """The batches of an iterable, which must be as many as it says."""
    try:
        promised: int | None = len(inputs)
    except TypeError:
        promised = None
    n_batches = 0
    for n_batches, batch in enumerate(inputs, start=1):  # noqa: B007
        yield batch
    if n_batches == 0:
        raise ValueError("inputs gave no batch; an iterator can be used only once, so make a new one")
    if promised is not None and n_batches < promised:
        raise ValueError(
            f"inputs ended after {n_batches} of {promised} batches; the results would not match the labels"
        )
