"""What the families of cases share: values that hurt, mutations of bytes and of plain data, and the verdict on one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ALLOWED = (ValueError, TypeError, FileNotFoundError)  # of bad input; DivergenceError of ADVI is a ValueError
Rng = np.random.Generator


class WrongError(AssertionError):
    """A call returned, and should not have, or returned nonsense."""


class Family(NamedTuple):
    """One kind of attack: a function of a generator and an empty folder, which raises or returns what it saw."""

    name: str
    case: Callable[[Rng, Path], str]
    share: float  # of all cases


def check(condition: Any, message: str) -> None:
    """Count a case as a failure unless a condition holds."""
    if not condition:
        raise WrongError(message)


def check_finite(name: str, *arrays: Any) -> None:
    """No NaN and no infinity in a result."""
    for array in arrays:
        values = np.asarray(array)
        check(values.dtype.kind not in "fc" or np.isfinite(values).all(), f"{name} has NaN or infinity")


def pick(rng: Rng, options: Any) -> Any:
    """One of the options as it is (NumPy's own choice would make an array of them)."""
    return options[int(rng.integers(len(options)))]


NUMBERS = (
    0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(2**63), 0.0, -0.0, 0.5, 1.5, 1e-320, 1e-12,
    1e12, 1e100, 1e155, 1e300, 1e308, -1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "identity", "view_0", "0", "00", "1.0", "-1", "NaN", "nan", "inf", "None", "null", "true", "=1+1",
    "+1", "@cmd", "-2+3", "\t=1", "\x1b[31mred\x1b[0m", "\x00", "\r\n", "a,b", '"', "'", "<script>alert(1)</script>",
    "é", "\u202eabc", "\ud800", "x" * 300, "🂡" * 5, "../../etc/passwd", "1e999", "1_000", "٣", "NA", "1970-01-01",
)  # fmt: skip


def scalar(rng: Rng) -> Any:
    """A value that somebody might pass where a number or a string belongs."""
    kind = rng.integers(8)
    if kind < 3:
        return pick(rng, NUMBERS)
    if kind < 5:
        return pick(rng, TEXTS)
    odd: tuple[Any, ...] = (
        None, True, False, [], {}, (), b"x", object(), complex(1, 2), np.float32(0.1), np.int8(3), np.str_("a"),
        np.datetime64("2020-01-01"), np.datetime64("NaT"), np.timedelta64(1, "D"), lambda: 0, int, [1, "a"], {"a": 1},
        float(rng.normal()), int(rng.integers(-5, 50)), np.zeros(0), np.zeros((2, 2)), np.ma.masked, ..., range(3),
    )  # fmt: skip
    return pick(rng, odd)


def odd_array(rng: Rng, shape: tuple[int, ...]) -> Any:
    """An array that may have the wrong dtype, shape, entries or gaps."""
    size = math.prod(shape)
    kind = int(rng.integers(14))
    if kind == 0:
        values: Any = rng.normal(size=shape)
    elif kind == 1:
        values = rng.integers(-1, 4, size=shape)
    elif kind == 2:
        values = (10.0 ** rng.uniform(-320, 308, size=shape)) * rng.choice([-1, 1], size=shape)
    elif kind == 3:
        values = np.where(rng.random(shape) < 0.3, pick(rng, (np.nan, np.inf, -np.inf)), rng.normal(size=shape))
    elif kind in (4, 5):
        values = np.empty(size, dtype=object)
        values[:] = [scalar(rng) for _ in range(size)]
        values = values.reshape(shape)
    elif kind == 6:
        values = np.array([pick(rng, TEXTS) for _ in range(size)], dtype=str).reshape(shape)
    elif kind == 7:
        values = np.full(shape, pick(rng, (0, 1, 1e-300, 1e90, -5)))
    elif kind == 8:
        values = rng.normal(size=shape).astype(pick(rng, ("f2", "f4", "c8", "c16", ">f8", "f8")))
    elif kind == 9:
        values = rng.integers(0, 100, size=shape).astype(
            pick(rng, ("i1", "u8", "m8[s]", "M8[D]", "S3", "?", "U5", "O"))
        )
    elif kind == 10:
        values = np.ma.masked_array(rng.normal(size=shape), mask=rng.random(shape) < 0.3)
    elif kind == 11:
        values = [scalar(rng) for _ in range(int(rng.integers(0, 5)))]
    elif kind == 12:
        return scalar(rng)
    else:
        values = rng.normal(size=shape).tolist()
        if isinstance(values, list) and values and rng.random() < 0.5:
            values[int(rng.integers(len(values)))] = scalar(rng)
    if isinstance(values, np.ndarray) and rng.random() < 0.25:
        change = int(rng.integers(5))
        if change == 0 and values.ndim:
            values = values[: int(rng.integers(len(values) + 1))]
        elif change == 1:
            values = values[..., None]
        elif change == 2:
            values = values.ravel()
        elif change == 3 and values.ndim > 1:
            values = np.asfortranarray(values)[::-1]
        elif change == 4 and values.ndim:
            values = values[:0]
    return values


def mutate_bytes(rng: Rng, data: bytes) -> bytes:
    """One to three changes of a file: bits, bytes, integers, pieces."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not out:
            return bytes(rng.integers(0, 256, size=int(rng.integers(0, 50)), dtype=np.uint8))
        # half of the changes hit the beginning or the end, where headers and directories are
        edge = min(len(out), 400)
        low, high = ((0, len(out)), (0, edge), (len(out) - edge, len(out)))[int(rng.choice(3, p=[0.5, 0.2, 0.3]))]
        place, kind = int(rng.integers(low, high)), int(rng.integers(9))
        length = int(rng.integers(1, 64))
        if kind <= 1:
            out[place] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            out[place] = int(rng.choice([0, 1, 9, 10, 32, 48, 127, 128, 255]))
        elif kind == 3:
            word = int(rng.choice(np.array([0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, len(out)])))
            out[place : place + 4] = word.to_bytes(4, "little")
        elif kind == 4:
            del out[place : place + length]
        elif kind == 5:
            out[place:place] = out[place : place + length]
        elif kind == 6:
            out[place:place] = rng.integers(0, 256, size=length, dtype=np.uint8).tobytes()
        elif kind == 7:
            del out[place:]
        else:
            other = int(rng.integers(len(out)))
            out[place : place + length] = out[other : other + length]
    return bytes(out)


def mutate_tree(rng: Rng, tree: Any, odd: Callable[[Rng], Any]) -> Any:
    """Plain data with one to three entries changed, dropped, doubled or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(int(rng.integers(1, 4))):
        node: Any = tree
        parents: list[tuple[Any, Any]] = []
        while isinstance(node, dict | list) and len(node) and (not parents or rng.random() < 0.8):
            key = pick(rng, list(node)) if isinstance(node, dict) else int(rng.integers(len(node)))
            parents.append((node, key))
            node = node[key]
        if not parents:
            return tree
        parent, key = parents[-1]
        value, kind = parent[key], int(rng.integers(7))
        if kind <= 1:
            parent[key] = odd(rng)
        elif kind == 2 and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            parent[key] = value * pick(rng, (0, -1, 2, 1 + 1e-9, 1e6, 1e-6, 1e200)) + pick(rng, (0, 0, 1e-9, 1))
        elif kind == 3:
            del parent[key]
        elif kind == 4 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(value))
        elif kind == 5 and isinstance(parent, dict):
            parent[pick(rng, list(parent))] = copy.deepcopy(value)
        elif isinstance(value, list):
            parent[key] = value[: int(rng.integers(len(value) + 1))]
    return tree
