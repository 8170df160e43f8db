"""A step is a map over cache-sized blocks of instances, a sum in a fixed order, and an update.

Statistics are added in pairs: blocks 0 and 1, 2 and 3, ..., then those sums in pairs, and so on. Which sums are made
depends on the number of blocks alone, so whoever holds some of the blocks (a thread, another machine) can add what
belongs together and hand over the few sums that remain: the answer is the same to the last bit.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import pairwise
from time import thread_time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vbtta.data.labels import Array

_ENTRIES = 1 << 15  # of one (K, labels) array in a block: a few of them fit a core's second-level cache
_LONGEST = 1 << 13  # labels of a block: BLAS takes longer sums on threads of its own, and ours would wait for them
_ALONE = 1 << 18  # multiplications of a product of matrices that BLAS does not spread over threads
_SHORTEST = 64  # labels: with fewer in a piece, the product is large and threads are worth it
_TASKS = 32  # a thread: enough to keep all of them busy to the end
_MIN_THREADED_SECONDS = 2e-2  # of processor time, below which starting threads costs more than they gain
BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


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
    group: Array | None = None  # (n,): numbers of the instances' groups, where they come in groups
    first: int = 0  # labelled instances before the block


class Node(NamedTuple):
    """The sum over blocks `place << level` up to `(place + 1) << level`, or to the last one."""

    level: int
    place: int
    value: Any


def block_size(n_views: int, n_labels: int, n_instances: int) -> int:
    """Instances of a block: as many as have labels, on average, for cache-sized arrays."""
    labels_each = -(-n_labels // max(n_instances, 1))
    return max(64, min(_ENTRIES // n_views, _LONGEST) // max(labels_each, 1))


def total(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT]) -> ResultT:
    """The sum of a function over blocks, on several threads (NumPy releases the lock)."""
    if len(blocks) == 1:
        return function(blocks[0])
    edges = np.linspace(0, len(blocks), min(_TASKS * _cores(), len(blocks)) + 1).astype(int).tolist()
    ranges = list(pairwise(edges))
    parts = map_blocks(lambda part: nodes(function, blocks[part[0] : part[1]], part[0]), ranges)
    result: ResultT = join(node for part in parts for node in part)
    return result


def nodes(function: Callable[[BlockT], Any], blocks: Iterable[BlockT], first: int = 0) -> list[Node]:
    """The sums that consecutive blocks, from number `first`, allow without any other: a few, in order."""
    return _merged(Node(0, place, function(block)) for place, block in enumerate(blocks, first))


def join(parts: Iterable[Node]) -> Any:
    """The sum over all blocks, from the nodes of all of them in order."""
    stack = _merged(parts)
    value = stack.pop().value
    while stack:
        value = plus(stack.pop().value, value)
    return value


def plus(first: Any, second: Any) -> Any:
    """Statistics, nested tuples of arrays, added field by field; a field that is None stays None."""
    if first is None:
        return None
    if not isinstance(first, tuple):
        return first + second
    fields = (plus(one, other) for one, other in zip(first, second, strict=True))
    return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)


def map_blocks(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT]) -> list[ResultT]:
    """Apply a function to every block; results in order, whichever threads compute them.

    The first block is timed: threads are started where the others will take longer than starting them.
    """
    start = thread_time()
    first, others = function(blocks[0]), blocks[1:]
    threads = min(_cores(), len(others))
    if threads <= 1 or (thread_time() - start) * len(others) < _MIN_THREADED_SECONDS:
        return [first, *map(function, others)]
    contexts = [copy_context() for _ in others]  # NumPy's error state would not reach the threads otherwise
    with ThreadPoolExecutor(threads) as pool:
        return [first, *pool.map(lambda context, block: context.run(function, block), contexts, others)]


def _merged(parts: Iterable[Node]) -> list[Node]:
    """Nodes in order, with brothers replaced by their parent as long as there are any."""
    stack: list[Node] = []
    for node in parts:
        while stack and node.place % 2 and stack[-1][:2] == (node.level, node.place - 1):
            node = Node(node.level + 1, node.place // 2, plus(stack.pop().value, node.value))
        stack.append(node)
    return stack


def products(one: Array, other: Array) -> Array:
    """Sums over the last axis of products of rows, one @ other.T, in pieces that BLAS takes on the calling thread."""
    # Threads share the blocks already. BLAS would wake others for each of these products, and where the cores are busy
    # waiting for them takes far longer than multiplying.
    piece = _ALONE // max(len(one) * len(other), 1)
    if piece < _SHORTEST:
        return np.asarray(one @ other.T)
    total = one[:, :piece] @ other[:, :piece].T
    for first in range(piece, one.shape[1], piece):
        total += one[:, first : first + piece] @ other[:, first : first + piece].T
    return np.asarray(total)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
