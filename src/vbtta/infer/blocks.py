"""A step is a map over cache-sized blocks of instances, a sum in a fixed order, and an update."""

__all__ = ["Block", "add", "block_bounds", "map_blocks"]

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vbtta.labels import Array

_ENTRIES = 1 << 15  # of one (K, labels) array in a block: a few of them fit a core's second-level cache

BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")
SumT = TypeVar("SumT", bound=tuple[Any, ...])


class Block(NamedTuple):
    """Some labelled instances with their labels. Views come first: inner loops run over instances.

    An instance's labels are consecutive, and `instance` counts from 0 within the block; it is None
    where every instance has exactly one label.
    """

    mean: Array  # (C, K, n) standardised predictions
    variance: Array | None  # (C, K, n) their variances over draws
    instance: Array | None  # (j,)
    value: Array  # (C, j) standardised labels
    repeats: Array  # (j,): how often each label was given
    annotator: Array  # (j,); zeros where nobody is named


def block_bounds(instance: Array, n_views: int) -> list[tuple[int, int]]:
    """Ranges of labels, whole instances each, of a size that depends on the number of views alone."""
    size = max(64, _ENTRIES // n_views)
    starts = np.flatnonzero(np.diff(instance, prepend=-1))  # first label of every instance
    bounds: list[tuple[int, int]] = []
    first = 0
    while first < len(instance):
        following = np.searchsorted(starts, first + size)
        last = int(starts[following]) if following < len(starts) else len(instance)
        bounds.append((first, last))
        first = last
    return bounds


def map_blocks(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT]) -> list[ResultT]:
    """Apply a function to every block, on several threads (NumPy releases the lock); results in order.

    Every call runs in the caller's context: NumPy's error state would not reach the threads otherwise.
    """
    threads = min(_cores(), len(blocks))
    if threads <= 1:
        return [function(block) for block in blocks]
    contexts = [copy_context() for _ in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda context, block: context.run(function, block), contexts, blocks))


def add(parts: Sequence[SumT]) -> SumT:
    """Sum additive statistics field by field, in order, so that the answer does not depend on threads."""
    kind = type(parts[0])
    return kind(*(np.sum(np.stack(field), axis=0) for field in zip(*parts, strict=True)))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
