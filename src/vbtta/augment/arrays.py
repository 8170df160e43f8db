"""Views of any array, NumPy or torch: noise, affine maps, dropped features, and rows of a pool mixed in."""

__all__ = ["Affine", "CutMix", "FeatureDropout", "GaussianNoise", "Identity", "Mixup", "Pool"]

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vbtta._support.checks import is_tensor, to_array
from vbtta._support.fingerprints import array_digest
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, like, where
from vbtta.augment.base import BuiltIn, Number, Positive, Probability, Symmetry, check_floating, check_streams


class Identity(BuiltIn, label="identity"):
    """The unchanged input; the view that the guard compares with."""

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Return the batch."""
        return batch

    def _symmetry(self, n_axes: int) -> Symmetry:
        return False, frozenset()


class GaussianNoise(BuiltIn, label="noise", stochastic=True):
    """Add independent normal noise to every feature: x + std * e, e ~ Normal(0, I).

    `clip` are the smallest and largest value allowed afterwards, (0, 1) for images in that range.
    """

    std: Positive
    clip: tuple[float, float] | None = None

    def _check(self) -> None:
        if self.clip is not None:
            bounds = np.array(self.clip, dtype=float)
            if bounds.shape != (2,) or not bounds[0] < bounds[1]:
                raise ValueError(f"GaussianNoise: clip must be (low, high) with low < high; got {self.clip!r}.")
            self._store(clip=tuple(bounds.tolist()))

    def _default_name(self) -> str:
        limits = "" if self.clip is None else "," + "..".join(map(Number().text, self.clip))
        return f"noise({Number().text(self.std)}{limits})"

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Add the noise."""
        check_floating(self, batch)
        result = batch + like(check_streams(self, batch, rng).normal(0.0, self.std, tuple(batch.shape)), batch)
        return result if self.clip is None else result.clip(*self.clip)


class Affine(BuiltIn):
    """Map the features (the last axis) affinely: x A^T + b, with A (D, D) and b (D,), zero if not given."""

    invertible: ClassVar[bool] = False
    A: npt.NDArray[np.float64] | Sequence[Sequence[float]] = field(compare=False)
    b: npt.NDArray[np.float64] | Sequence[float] | None = field(default=None, compare=False)
    digest: str = field(init=False, repr=False)  # stands for A and b in comparisons

    def _check(self) -> None:
        matrix = np.array(self.A, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"Affine: A must be a square matrix (D, D); got shape {matrix.shape}.")
        offset = np.zeros(len(matrix)) if self.b is None else np.array(self.b, dtype=np.float64)
        if offset.shape != (len(matrix),):
            raise ValueError(f"Affine: b must have shape ({len(matrix)},) to go with A; got {offset.shape}.")
        if not (np.isfinite(matrix).all() and np.isfinite(offset).all()):
            raise ValueError("Affine: A and b must be finite.")
        self._store(A=matrix, b=offset, digest=hashlib.sha256(matrix.tobytes() + offset.tobytes()).hexdigest())

    def _default_name(self) -> str:
        return f"affine({self.digest[:8]})"

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Map every row."""
        check_floating(self, batch)
        matrix, offset = np.asarray(self.A), np.asarray(self.b)
        if batch.shape[-1] != len(matrix):
            n, shape = len(matrix), tuple(batch.shape)
            raise ValueError(f"view {self.name} maps {n} features; the batch has {shape[-1]} (shape {shape}).")
        return batch @ like(matrix, batch).T + like(offset, batch)


class FeatureDropout(BuiltIn, label="dropout", stochastic=True):
    """Replace each feature by `fill` with probability p, independently; 0 is the mean of standardised features."""

    p: Probability
    fill: Annotated[float, Number()] = 0.0

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Replace the features drawn."""
        check_floating(self, batch)
        kept = check_streams(self, batch, rng).random(tuple(batch.shape)) >= self.p
        return where(kept, batch, like(np.asarray(self.fill, dtype=np.float64), batch))


class Pool:
    """Rows (P, ...) that mixup and cutmix mix in, shaped like those of a batch: usually the training inputs.

    Views share them. They are an array or a tensor: of a table give the columns of floating-point numbers, in the order
    of the inputs' own.
    """

    def __init__(self, rows: Any) -> None:
        if hasattr(rows, "columns"):
            remedy = "give the inputs' columns of floats as an array, pool[columns].to_numpy()"
            raise TypeError(f"pool is a table, whose columns may differ from those of the inputs; {remedy}.")
        self.rows = rows if is_tensor(rows) else np.asarray(rows)
        shape = tuple(self.rows.shape)
        if len(shape) < 2 or shape[0] == 0:
            raise ValueError(f"pool must be (P, ...); one feature is a last axis of 1; got shape {shape}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pool) and np.array_equal(np.asarray(self.rows), np.asarray(other.rows))

    def __hash__(self) -> int:
        return hash(tuple(self.rows.shape))

    def take(self, index: np.ndarray[Any, Any], batch: Batch) -> Any:
        """Take the rows `index`, (N,), in the type, precision and device of the batch."""
        if not is_tensor(self.rows):
            return like(self.rows[index], batch)
        chosen = self.rows[sys.modules["torch"].from_numpy(index).to(self.rows.device)]
        return chosen.to(batch) if is_tensor(batch) else like(to_array(chosen), batch)

    def fingerprint_data(self) -> Any:
        """Shape, type and hash of the rows, for the fingerprints of views."""
        return array_digest(self.rows)


class Mixing(BuiltIn, stochastic=True):
    """Base of mixup and cutmix: (1 - share) x + share x*, with a partner x* of the pool for each row."""

    invertible: ClassVar[bool] = False
    by_feature: ClassVar[bool] = False  # whether every feature has a share of its own
    alpha: Positive
    pool: Pool

    def _check(self) -> None:
        self._store(pool=self.pool if isinstance(self.pool, Pool) else Pool(self.pool))

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        streams = check_streams(self, batch, rng)
        check_floating(self, batch)
        pool_shape, batch_shape = tuple(self.pool.rows.shape[1:]), tuple(batch.shape[1:])
        if pool_shape != batch_shape:
            raise ValueError(f"view {self.name}: pool rows have shape {pool_shape}, rows of the batch {batch_shape}.")
        partners = self.pool.take(streams.integers(len(self.pool.rows)), batch)
        shape = batch_shape if self.by_feature else (1,) * len(batch_shape)
        return batch + like(streams.beta(self.alpha, self.alpha, (len(batch), *shape)), batch) * (partners - batch)


class Mixup(Mixing, label="mixup"):
    """Move each row towards a row of the pool: (1 - lambda) x + lambda x*, lambda ~ Beta(alpha, alpha).

    The paper uses an alpha of 0.1, 0.5 and 0.9. x* is drawn from `pool`: an array or tensor (P, ...), or a
    :class:`Pool`.
    """


class CutMix(Mixing, label="cutmix"):
    """Mix feature by feature: (1 - M) * x + M * x*, every entry of M drawn from Beta(alpha, alpha).

    This is the paper's cutmix with a Beta mask (its formula lacks the "1 -"); `pool` as in :class:`Mixup`.
    """

    by_feature: ClassVar[bool] = True
