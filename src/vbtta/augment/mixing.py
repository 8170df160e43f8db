"""Views that mix in rows of a pool: mixup, the paper's cutmix, and cutmix with a box; NumPy or torch."""

__all__ = ["CutMix", "CutMixBox", "Mixup", "Pool"]

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vbtta._support.files import atomic_path
from vbtta._support.fingerprints import array_digest
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, is_tensor, like, to_array, where
from vbtta.augment.base import BuiltIn, Positive, check_floating, check_images, check_streams


class Pool:
    """Rows that mixup and cutmix mix in, usually the training inputs.

    Parameters
    ----------
    rows : array or tensor, shape (P, ...)
        One row per instance, shaped like the rows of a batch. Only rows of a file can be written into a file of views:
        `path` and `sha256` are its path and hash, or None.

    Examples
    --------
    >>> pool = Pool(np.eye(3))
    >>> len(pool), pool.path
    (3, None)
    """

    def __init__(self, rows: Any) -> None:
        array = rows if is_tensor(rows) else np.asarray(rows)
        if array.ndim < 2 or len(array) == 0:
            raise ValueError(
                f"pool must be (P, ...) with at least one row; got shape {tuple(array.shape)}. "
                f"A single feature needs a last axis of length 1."
            )
        self.rows = array
        self.path: Path | None = None
        self.sha256: str | None = None

    @classmethod
    def of(cls, source: Any) -> "Pool":
        """Make a pool of an array, a tensor or the path of a .npy file; a pool stays as it is."""
        if isinstance(source, cls):
            return source
        return cls.load(source) if isinstance(source, (str, os.PathLike)) else cls(source)

    @classmethod
    def load(cls, path: str | os.PathLike[str], sha256: str | None = None) -> "Pool":
        """Open a .npy file (mapped, not read into memory), and check its hash if one is given."""
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"pool file {file} not found; give the path of the .npy file with the pool.")
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 is not None and digest != sha256:
            raise ValueError(
                f"pool file {file} has sha256 {digest[:12]}..., expected {sha256[:12]}...: not the pool "
                f"these views were made with. Restore that file, or remove sha256 to accept this one."
            )
        try:
            pool = cls(np.load(file, mmap_mode="r", allow_pickle=False))
        except ValueError as error:
            raise ValueError(f"pool file {file} is not usable: {error}") from error
        pool.path, pool.sha256 = file, digest
        return pool

    @classmethod
    def save(cls, rows: Any, path: str | os.PathLike[str]) -> "Pool":
        """Write the rows to a .npy file and return the pool that refers to it."""
        if Path(path).suffix != ".npy":
            raise ValueError(f"a pool is saved as a .npy file; got {path}.")
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.save(stream, to_array(rows), allow_pickle=False)
        return cls.load(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pool):
            return NotImplemented
        if self.rows is other.rows or (self.sha256 is not None and self.sha256 == other.sha256):
            return True
        return np.array_equal(np.asarray(self.rows), np.asarray(other.rows))

    def __hash__(self) -> int:
        return hash(tuple(self.rows.shape))

    def __repr__(self) -> str:
        source = "" if self.path is None else f", {str(self.path)!r}"
        return f"Pool({tuple(self.rows.shape)}{source})"

    def take(self, index: np.ndarray[Any, Any], batch: Batch) -> Any:
        """Take the rows `index`, (N,), in the type, precision and device of the batch."""
        if not is_tensor(self.rows):
            return like(self.rows[index], batch)
        chosen = self.rows[sys.modules["torch"].from_numpy(index).to(self.rows.device)]
        return chosen.to(batch) if is_tensor(batch) else like(to_array(chosen), batch)

    def fingerprint_data(self) -> Any:
        """Shape, type and hash of the rows, for the fingerprints of views."""
        return array_digest(self.rows)


@dataclass(frozen=True)
class Mixing(BuiltIn, stochastic=True):
    """Base of mixup and cutmix: draws a partner x* of the pool for each row; subclasses work in `_mix`."""

    invertible: ClassVar[bool] = False
    alpha: Positive
    pool: Pool

    def _check(self) -> None:
        self._store(pool=Pool.of(self.pool))

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        streams = check_streams(self, batch, rng)
        check_floating(self, batch)
        pool_shape, batch_shape = tuple(self.pool.rows.shape[1:]), tuple(batch.shape[1:])
        if pool_shape != batch_shape:
            raise ValueError(
                f"view {self.name}: rows of the pool have shape {pool_shape}, rows of the batch {batch_shape}; the "
                f"pool must hold inputs of the same model."
            )
        return self._mix(batch, self.pool.take(streams.integers(len(self.pool)), batch), streams)

    def _mix(self, batch: Batch, partners: Batch, streams: RowStreams) -> Batch:
        """Mix each row of the batch with its partner."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mixup(Mixing, label="mixup"):
    """Move each row towards a row of the pool: (1 - lambda) x + lambda x*, lambda ~ Beta(alpha, alpha).

    Parameters
    ----------
    alpha : float
        Parameter of the Beta distribution; the paper uses 0.1, 0.5 and 0.9.
    pool : array, tensor, path of a .npy file, or Pool, shape (P, ...)
        Where x* is drawn from.

    Examples
    --------
    >>> from vbtta.augment import RowStreams
    >>> view = Mixup(0.5, np.ones((10, 2)))
    >>> mixed = view(np.zeros((4, 2)), RowStreams(0, view.name, 0, range(4)))
    >>> view.name, bool(np.all((mixed >= 0) & (mixed <= 1)))
    ('mixup(0.5)', True)
    """

    def _mix(self, batch: Batch, partners: Batch, streams: RowStreams) -> Batch:
        share = streams.beta(self.alpha, self.alpha, (1,) * (batch.ndim - 1))  # (N, 1, ...)
        return batch + like(share, batch) * (partners - batch)


@dataclass(frozen=True)
class CutMix(Mixing, label="cutmix"):
    """Mix feature by feature: (1 - M) * x + M * x*, every entry of M drawn from Beta(alpha, alpha).

    This is the paper's cutmix with a Beta mask (its formula lacks the "1 -"). The cutmix that pastes a box of
    another image is `CutMixBox`.

    Parameters
    ----------
    alpha, pool
        As in :class:`Mixup`.

    Examples
    --------
    >>> from vbtta.augment import RowStreams
    >>> view = CutMix(0.5, np.ones((10, 4)))
    >>> mixed = view(np.zeros((1, 4)), RowStreams(0, view.name, 0, [0]))
    >>> len(np.unique(mixed))  # every feature has its own share of the partner
    4
    """

    def _mix(self, batch: Batch, partners: Batch, streams: RowStreams) -> Batch:
        mask = like(streams.beta(self.alpha, self.alpha, tuple(batch.shape[1:])), batch)
        return batch + mask * (partners - batch)


@dataclass(frozen=True)
class CutMixBox(Mixing, label="cutmix_box"):
    """Paste a box of a pool image: a share lambda ~ Beta(alpha, alpha) of the area, at a uniform place.

    The box has the image's proportions, sides sqrt(lambda) of it, and is cut at the border (Yun et al.,
    "CutMix: regularization strategy to train strong classifiers with localizable features", 2019).

    Parameters
    ----------
    alpha, pool
        As in :class:`Mixup`; the pool holds images (P, C, H, W).

    Examples
    --------
    >>> from vbtta.augment import RowStreams
    >>> view = CutMixBox(0.5, np.ones((10, 3, 8, 8)))
    >>> mixed = view(np.zeros((5, 3, 8, 8)), RowStreams(0, view.name, 0, range(5)))
    >>> bool((mixed[:, 0] == mixed[:, 2]).all())  # the box is the same in all channels
    True
    """

    def _mix(self, batch: Batch, partners: Batch, streams: RowStreams) -> Batch:
        check_images(self, batch)
        side = np.sqrt(streams.beta(self.alpha, self.alpha))  # (N,)
        centre = streams.uniform((2,))  # (N, 2): down, across
        inside = [
            np.abs(np.arange(0.5, size) - centre[:, [axis]] * size) <= side[:, None] * size / 2
            for axis, size in enumerate(batch.shape[2:])
        ]  # (N, H) and (N, W)
        box = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # (N, 1, H, W)
        return where(box, partners, batch)
