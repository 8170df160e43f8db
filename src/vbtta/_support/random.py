"""Row-keyed random streams: the numbers of a row do not depend on the batch it is in."""

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

_WORDS_PER_BLOCK = 4  # of Philox4x64-10
_NOT_BY_ROW = ("bit_generator", "bytes", "permuted", "shuffle", "spawn")  # methods that have no meaning row by row
_OF_VECTORS = ("choice", "dirichlet", "multi", "permutation")  # beginnings of methods whose parameters are vectors


class RowStreams:
    """Independent random streams for the rows of a batch, keyed by (seed, view, draw, row).

    The numbers are those of the counter-based generator Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
    numbers: as easy as 1, 2, 3", 2011): a hash of (seed, view, draw) is the key, and row and position in the row's
    stream are the counter. A row receives the same numbers whatever batch, order or process it is in. Each call takes
    the next numbers of every row's stream.

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
    """

    def __init__(self, seed: int, view: str, draw: int, rows: Sequence[int] | range | npt.NDArray[np.integer]) -> None:
        row_numbers = np.asarray(rows)
        if row_numbers.ndim != 1 or (row_numbers.size and row_numbers.dtype.kind not in "iu"):
            kind = f"shape {row_numbers.shape}, type {row_numbers.dtype}"
            raise ValueError(f"rows must be a one-dimensional array of whole numbers; got {kind}.")
        if row_numbers.size and row_numbers.min() < 0:
            raise ValueError(f"rows must not be negative; got {row_numbers.min()}. Count from the first row.")
        self.rows: WordArray = row_numbers.astype(np.uint64)
        text = json.dumps(["vbtta row stream", int(seed), str(view), int(draw)])
        self._key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u8").astype(np.uint64)
        self._iterations = 0
        self._next_block = 1  # NumPy's Philox uses counter 1 for its first block

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[np.random.Generator]:
        """One generator a row, new ones every time."""
        self._iterations += 1  # the second word of the counter, which is 0 for numbers of all rows together
        for row in self.rows:
            counter = np.array([0, self._iterations, row, 0], dtype=np.uint64)
            yield np.random.Generator(np.random.Philox(key=self._key, counter=counter))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Other methods of NumPy's generators; of array parameters a row gets its part, but not of vectors."""
        method = None if name in _NOT_BY_ROW or name.startswith("_") else getattr(np.random.Generator, name, None)
        if method is None:
            raise AttributeError(f"RowStreams has no {name!r}; iterate over it for one NumPy generator a row")

        def draw(*args: Any, **options: Any) -> npt.NDArray[Any]:
            _, *bound = inspect.signature(method).bind(None, *args, **options).arguments.items()
            arguments: dict[str, Any] = dict(bound)  # but for the generator
            names = [] if name.startswith(_OF_VECTORS) else [key for key in arguments if key != "size"]
            arrays = {key: arguments[key] for key in names if np.ndim(arguments[key])}
            if arrays or arguments.get("size") is not None:
                arguments["size"] = self._row_shape(arguments.get("size"), *arrays.values())
            by_row = [np.broadcast_to(array, (len(self), *arguments["size"])) for array in arrays.values()]
            rows = [dict(zip(arrays, values, strict=True)) for values in zip(*by_row, strict=True)] or [{}] * len(self)
            return np.stack([method(rng, **arguments | row) for rng, row in zip(self, rows, strict=True)])

        return draw

    def _row_shape(self, size: Any, *parameters: Any) -> tuple[int, ...]:
        """The shape of a row's numbers, from that of all or of the parameters."""
        shape = np.broadcast_shapes(*map(np.shape, parameters)) or (len(self),)
        if size is not None:
            shape = tuple(np.atleast_1d(np.asarray(size, dtype=np.intp)).tolist())
        if shape[:1] != (len(self),):
            raise ValueError(f"size must begin with the number of rows, {len(self)}; got {shape}")
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

    def beta(self, a: Any, b: Any, size: Any = None) -> FloatArray:
        """Draw Beta(a, b) numbers: where a = b from Student's t (Devroye, "Random variate generation in one line").

        Otherwise the distribution function is inverted, which is slower.
        """
        positive(a=np.min(a), b=np.min(b))
        shape = self._row_shape(size, a, b)
        if np.any(np.not_equal(a, b)):
            return np.asarray(special.betaincinv(a, b, self._uniform(shape)), dtype=np.float64)
        radius, angle = np.moveaxis(self._uniform((2, *shape)), 1, 0)
        cosine = np.cos(2.0 * math.pi * angle)
        with np.errstate(over="ignore"):  # where c is infinite, the number is 0 or 1 to double precision
            c = np.expm1(-np.log(radius) / a) * cosine**2
            root = np.sqrt(1.0 / (1.0 + 1.0 / c))
            nearer_end = 0.5 / ((1.0 + c) * (1.0 + root))  # (1 - root) / 2 without cancellation
        return np.asarray(np.where(cosine > 0, 1.0 - nearer_end, nearer_end))

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: npt.DTypeLike = np.int64, endpoint: bool = False
    ) -> npt.NDArray[Any]:
        """Draw whole numbers from `low` to `high` - 1, or from 0 to `low` - 1, equally likely to 1 part in 2^52 / n."""
        low, high = (0, low) if high is None else (low, high)
        low, high = np.asarray(low, np.int64), np.asarray(high, np.int64) + endpoint
        if np.any(high - low < 1) or np.any(high - low > 2**32):
            raise ValueError(f"high must be between {low + 1} and {low} + 2**32; got {high}.")
        numbers = self._uniform(self._row_shape(size, low, high)) * (high - low)
        return np.asarray(numbers.astype(np.int64) + low, dtype=dtype)

    def _words(self, n_words: int) -> WordArray:
        """Take the next 64-bit words of every row, (N, n_words); a call always starts a new block."""
        generator = np.random.Philox(key=0)
        state: Any = generator.state
        state["state"]["key"] = self._key
        counter = state["state"]["counter"]  # raised before a block is made
        counter[0] = self._next_block - 1
        state["buffer_pos"] = _WORDS_PER_BLOCK  # the buffer is used up
        self._next_block += -(-n_words // _WORDS_PER_BLOCK)
        words = np.empty((len(self.rows), n_words), dtype=np.uint64)
        for i, row in enumerate(self.rows):
            counter[2] = row
            generator.state = state
            words[i] = generator.random_raw(n_words)
        return words
