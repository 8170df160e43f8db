"""Inputs of any kind, batch by batch (arrays, tensors, tables, DataLoaders, iterators), and a progress line."""

__all__ = ["Progress", "batches_of"]

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from vbtta._support.checks import whole_number
from vbtta._support.tensors import RowList, as_batch, is_instance


def batches_of(inputs: Any, batch_size: int) -> tuple[Iterator[Any], int | None]:
    """Batches of the inputs, and the number of rows where it is known beforehand.

    Arrays, tensors, tables, lists of texts, images or other rows, data sets of Hugging Face, and dicts and tuples of
    them are cut into batches of `batch_size` rows; DataLoaders and iterators give batches of their own.

    Examples
    --------
    >>> import numpy as np
    >>> batches, n_rows = batches_of(np.zeros((5, 2)), 2)
    >>> n_rows, [len(batch) for batch in batches]
    (5, [2, 2, 1])
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    given, inputs = inputs, as_batch(inputs)
    if isinstance(given, list) and hasattr(inputs, "shape"):
        raise TypeError("inputs is a list of numbers; make an array of it, as np.asarray(inputs)")
    if is_instance(inputs, "datasets", "IterableDataset"):
        return map(as_batch, inputs.iter(batch_size)), None
    n_rows = _n_rows(inputs)
    if n_rows is not None:
        if n_rows == 0:
            raise ValueError("inputs are empty; there must be at least one row")
        return (as_batch(_rows(inputs, start, start + batch_size)) for start in range(0, n_rows, batch_size)), n_rows
    if isinstance(inputs, str | bytes) or not hasattr(inputs, "__iter__"):
        raise TypeError(
            f"inputs must be an array, a tensor, a list of rows, a dict or tuple of them, a DataLoader or an iterator "
            f"of batches; "
            f"got {type(inputs).__name__}"
        )
    if _shuffles(inputs):
        raise ValueError("inputs is a DataLoader that shuffles, so its rows cannot be matched: use shuffle=False")
    return map(as_batch, _checked(inputs)), None


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


def _rows(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _rows(part, start, stop) for key, part in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_rows(part, start, stop) for part in inputs)
    if isinstance(inputs, RowList):
        return RowList(inputs[start:stop])
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
