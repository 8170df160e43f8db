"""Row-keyed random streams: the numbers of a row do not depend on the batch it is in."""

__all__ = ["RowStreams"]

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from vbtta._support.checks import positive

FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

# Philox4x64-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_WORDS_PER_BLOCK = 4
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)

# NumPy's own Philox, set to each row in turn, gives the same words and is faster for few rows or long ones.
_FEW_ROWS = 64
_LONG_ROW = 16  # blocks
# Counters worked on at once: the temporaries of a round stay in the second-level cache.
_CHUNK = 4096
_NOT_BY_ROW = ("bit_generator", "bytes", "permuted", "shuffle", "spawn")  # methods that have no meaning row by row


class RowStreams:
    """Independent random streams for the rows of a batch, keyed by (seed, view, draw, row).

    The numbers are those of the counter-based generator Philox4x64-10: a hash of (seed, view, draw) is the key, and row
    and position in the row's stream are the counter. A row receives the same numbers whatever batch, order or process
    it is in. Each call takes the next numbers of every row's stream.

    It has the methods of `numpy.random.Generator`, with the same arguments. `size` begins with the number of rows, as
    in ``rng.normal(0, 0.1, batch.shape)``; without it there is one number a row, or one for every entry of the
    parameters. ``rng.choice(values)`` and ``rng.permutation(n)`` give one result a row. Iterating gives one
    `numpy.random.Generator` a row, for rows of different lengths:
    ``[change(row, generator) for row, generator in zip(batch, rng)]``.

    Parameters
    ----------
    seed : int
    view : str
        The name of the view that draws.
    draw : int
        Which draw of the view this is.
    rows : array of int, shape (N,)
        Row numbers in the whole data set (not in the batch), none negative.

    Examples
    --------
    >>> whole = RowStreams(0, "noise(0.1)", 0, range(6)).normal(size=(6, 2))
    >>> part = RowStreams(0, "noise(0.1)", 0, [4, 5]).normal(size=(2, 2))
    >>> whole.shape, bool((whole[4:] == part).all())
    ((6, 2), True)
    """

    def __init__(self, seed: int, view: str, draw: int, rows: Sequence[int] | range | npt.NDArray[np.integer]) -> None:
        row_numbers = np.asarray(rows)
        if row_numbers.ndim != 1 or (row_numbers.size and row_numbers.dtype.kind not in "iu"):
            kind = f"shape {row_numbers.shape}, type {row_numbers.dtype}"
            raise ValueError(f"rows must be a one-dimensional array of whole numbers; got {kind}.")
        if row_numbers.size and row_numbers.min() < 0:
            raise ValueError(f"rows must not be negative; got {row_numbers.min()}. Count from the first row.")
        self.rows: WordArray = row_numbers.astype(np.uint64)
        self._key = _key(seed, view, draw)
        self._iterations = 0
        self._next_block = 1  # NumPy's Philox uses counter 1 for its first block

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[np.random.Generator]:
        """One generator a row, new ones every time."""
        self._iterations += 1  # the second word of the counter, which is 0 for numbers of all rows together
        key = np.array(self._key, dtype=np.uint64)  # NumPy rounds lists of large whole numbers to floats
        for row in self.rows:
            counter = np.array([0, self._iterations, row, 0], dtype=np.uint64)
            yield np.random.Generator(np.random.Philox(key=key, counter=counter))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Other methods of NumPy's generators, called with the same parameters for every row."""
        method = None if name in _NOT_BY_ROW or name.startswith("_") else getattr(np.random.Generator, name, None)
        if method is None:
            raise AttributeError(f"RowStreams has no {name!r}; iterate over it for one NumPy generator a row")
        signature = inspect.signature(method)

        def draw(*args: Any, **options: Any) -> npt.NDArray[Any]:
            call = signature.bind(None, *args, **options)
            if call.arguments.get("size") is not None:
                call.arguments["size"] = self._row_shape(call.arguments["size"])
            return np.stack([np.asarray(method(generator, *call.args[1:], **call.kwargs)) for generator in self])

        return draw

    def _row_shape(self, size: Any, *parameters: Any) -> tuple[int, ...]:
        """The shape of a row's numbers, from that of all or of the parameters."""
        shape = np.broadcast_shapes(*map(np.shape, parameters)) or (len(self),)
        if size is not None:
            shape = tuple(np.atleast_1d(np.asarray(size, dtype=np.intp)).tolist())
        if shape[:1] != (len(self),):
            given = shape if size is None else size
            raise ValueError(f"size must begin with the number of rows, {len(self)}; got {given}")
        return shape[1:]

    def random(self, size: Any = None) -> FloatArray:
        """Draw uniform numbers strictly between 0 and 1."""
        return self._uniform(self._row_shape(size))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> FloatArray:
        """Draw uniform numbers strictly between two others."""
        numbers = self._uniform(self._row_shape(size, low, high))
        return np.asarray(low + np.subtract(high, low) * numbers)

    def _uniform(self, shape: tuple[int, ...]) -> FloatArray:
        """Uniform numbers strictly between 0 and 1: (N,) + shape."""
        words = self._words(math.prod(shape))
        words >>= np.uint64(12)
        numbers = words.astype(np.float64)
        numbers += 0.5  # exact in 53 bits, so neither 0 nor 1 can come out
        numbers *= 2.0**-52
        return numbers.reshape(len(self.rows), *shape)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> FloatArray:
        """Draw normal numbers, by inverting the distribution function."""
        numbers = self._uniform(self._row_shape(size, loc, scale))
        special.ndtri(numbers, out=numbers)
        numbers *= scale
        numbers += loc
        return numbers

    def beta(self, a: float, b: float, size: Any = None) -> FloatArray:
        """Draw Beta(a, b) numbers.

        For a = b: if U, V are uniform and c = (U^(-1/a) - 1) cos^2(2 pi V), then sqrt(2 a c), with the sign
        of the cosine, has Student's t distribution with 2a degrees of freedom, and
        1/2 + sign/2 sqrt(c / (1 + c)) is Beta(a, a) (L. Devroye, "Random variate generation in one line of
        code", 1996). Otherwise the distribution function is inverted, which is slower.
        """
        positive(a=a, b=b)
        shape = self._row_shape(size)
        if a != b:
            return np.asarray(special.betaincinv(a, b, self._uniform(shape)), dtype=np.float64)
        radius, angle = np.moveaxis(self._uniform((2, *shape)), 1, 0)
        cosine = np.cos(2.0 * math.pi * angle)
        with np.errstate(over="ignore"):  # c = inf is right: the number is 0 or 1 to double precision
            c = np.expm1(-np.log(radius) / a) * cosine**2
            root = np.sqrt(1.0 / (1.0 + 1.0 / c))
            nearer_end = 0.5 / ((1.0 + c) * (1.0 + root))  # (1 - root) / 2 without cancellation
        return np.asarray(np.where(cosine > 0, 1.0 - nearer_end, nearer_end))

    def integers(
        self, low: int, high: int | None = None, size: Any = None, *, endpoint: bool = False
    ) -> npt.NDArray[np.int64]:
        """Draw whole numbers from `low` to `high` - 1, or from 0 to `low` - 1, equally likely to 1 part in 2^52 / n."""
        low, high = (0, low + endpoint) if high is None else (low, high + endpoint)
        if not 1 <= high - low <= 2**32:
            raise ValueError(f"high must be between {low + 1} and {low} + 2**32; got {high}.")
        numbers = self._uniform(self._row_shape(size))
        numbers *= high - low
        return numbers.astype(np.int64) + low

    def _words(self, n_words: int) -> WordArray:
        """Take the next 64-bit words of every row, (N, n_words); a call always starts a new block."""
        n_blocks = -(-n_words // _WORDS_PER_BLOCK)
        first_block = self._next_block
        self._next_block += n_blocks
        if n_blocks >= _LONG_ROW or len(self.rows) < _FEW_ROWS:
            return _words_row_by_row(self._key, self.rows, first_block, n_words)
        words = np.empty((len(self.rows), n_blocks, _WORDS_PER_BLOCK), dtype=np.uint64)
        blocks = np.arange(first_block, first_block + n_blocks, dtype=np.uint64)
        rows_at_once = _CHUNK // max(n_blocks, 1)
        for start in range(0, len(self.rows), rows_at_once):
            rows = self.rows[start : start + rows_at_once]
            block, row = np.broadcast_arrays(blocks[None, :], rows[:, None])
            words[start : start + rows_at_once] = _philox(block, row, self._key)
        return words.reshape(len(self.rows), -1)[:, :n_words]


def _key(seed: int, view: str, draw: int) -> tuple[int, int]:
    """128 bits that identify (seed, view, draw)."""
    text = json.dumps(["vbtta row stream", int(seed), str(view), int(draw)])
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def _philox(block: WordArray, row: WordArray, key: tuple[int, int]) -> WordArray:
    """Philox4x64-10 of the counters (block, 0, row, 0): shape (..., 4)."""
    # 64-bit sums and products are meant to wrap around; NumPy does so silently for arrays.
    x0, x1, x2, x3 = block, np.zeros_like(block), row, np.zeros_like(row)
    for step in range(_ROUNDS):
        key0, key1 = (np.uint64((key[i] + step * _KEY_STEPS[i]) % 2**64) for i in range(2))
        high0, low0 = _multiply(x0, _MULTIPLIERS[0])
        high1, low1 = _multiply(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
    return np.stack([x0, x1, x2, x3], axis=-1)


def _multiply(x: WordArray, factor: int) -> tuple[WordArray, WordArray]:
    """High and low 64 bits of the 128-bit product x * factor, by schoolbook multiplication of halves."""
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    x_low, x_high = x & _LOW_HALF, x >> _HALF_BITS
    middle = x_high * factor_low + (x_low * factor_low >> _HALF_BITS)  # below 2^64: no overflow
    other = x_low * factor_high + (middle & _LOW_HALF)
    high = x_high * factor_high + (middle >> _HALF_BITS) + (other >> _HALF_BITS)
    return high, x * np.uint64(factor)


def _words_row_by_row(key: tuple[int, int], rows: WordArray, first_block: int, n_words: int) -> WordArray:
    """Make the words of `_philox` with NumPy's compiled generator, set to each row's counter in turn."""
    generator = np.random.Philox(key=0)
    state: Any = generator.state
    state["state"]["key"] = np.array(key, dtype=np.uint64)
    words = np.empty((len(rows), n_words), dtype=np.uint64)
    for i, row in enumerate(rows):
        # The counter is raised before a block is made, and position 4 says that the buffer is used up.
        state["state"]["counter"] = np.array([first_block - 1, 0, row, 0], dtype=np.uint64)
        state["buffer_pos"] = _WORDS_PER_BLOCK
        generator.state = state
        words[i] = generator.random_raw(n_words)
    return words
