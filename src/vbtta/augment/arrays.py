"""Views of any array, NumPy or torch: noise, affine maps, dropped features."""

__all__ = ["Affine", "FeatureDropout", "GaussianNoise", "Identity"]

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, like, where
from vbtta.augment.base import BuiltIn, Number, Positive, check_floating, check_streams


@dataclass(frozen=True)
class Identity(BuiltIn, label="identity"):
    """The unchanged input; the view that the guard compares with.

    Examples
    --------
    >>> Identity().name
    'identity'
    """

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class GaussianNoise(BuiltIn, label="noise", stochastic=True):
    """Add independent normal noise to every feature: x + std * e, e ~ Normal(0, I).

    Parameters
    ----------
    std : float
        Standard deviation of the noise, in the units of the input.
    clip : (float, float), optional
        Smallest and largest value allowed afterwards, (0, 1) for images in that range.

    Examples
    --------
    >>> from vbtta.augment import RowStreams
    >>> view = GaussianNoise(0.1)
    >>> view(np.zeros((3, 2)), RowStreams(0, view.name, 0, range(3))).shape
    (3, 2)
    """

    std: Positive
    clip: tuple[float, float] | None = None

    def _check(self) -> None:
        if self.clip is not None:
            try:
                low, high = (float(bound) for bound in self.clip)
            except (TypeError, ValueError):
                low = high = math.nan
            if not low < high:
                raise ValueError(f"GaussianNoise: clip must be (low, high) with low < high; got {self.clip!r}.")
            self._store(clip=(low, high))

    def default_name(self) -> str:
        """Name the standard deviation and the limits."""
        limits = "" if self.clip is None else "," + "..".join(map(Number().text, self.clip))
        return f"noise({Number().text(self.std)}{limits})"

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Add the noise."""
        check_floating(self, batch)
        noise = check_streams(self, batch, rng).normal(tuple(batch.shape[1:]))
        noise *= self.std
        result = batch + like(noise, batch)
        return result if self.clip is None else result.clip(*self.clip)


@dataclass(frozen=True)
class Affine(BuiltIn):
    """Map the features (the last axis) affinely: x A^T + b.

    Parameters
    ----------
    A : array, shape (D, D)
        The matrix.
    b : array, shape (D,), optional
        The offset, zero if not given.

    Examples
    --------
    >>> mirror = Affine([[-1.0, 0.0], [0.0, 1.0]], name="mirror")
    >>> mirror(np.array([[1.0, 2.0]]))
    array([[-1.,  2.]])
    """

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
        digest = hashlib.sha256(matrix.tobytes() + offset.tobytes()).hexdigest()
        self._store(A=matrix, b=offset, digest=digest)

    def default_name(self) -> str:
        """Name the first digits of a hash of A and b."""
        return f"affine({self.digest[:8]})"

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Map every row."""
        check_floating(self, batch)
        matrix, offset = np.asarray(self.A), np.asarray(self.b)
        if batch.shape[-1] != len(matrix):
            n, shape = len(matrix), tuple(batch.shape)
            raise ValueError(f"view {self.name} maps {n} features; the batch has {shape[-1]} (shape {shape}).")
        return batch @ like(matrix, batch).T + like(offset, batch)


@dataclass(frozen=True)
class FeatureDropout(BuiltIn, label="dropout", stochastic=True):
    """Replace each feature by a fixed value with probability p, independently.

    Parameters
    ----------
    p : float
        Probability that a feature is replaced, between 0 and 1.
    fill : float
        Its value then: 0 is the mean of standardised features.

    Examples
    --------
    >>> from vbtta.augment import RowStreams
    >>> view = FeatureDropout(0.5)
    >>> dropped = view(np.ones((1000, 4)), RowStreams(0, view.name, 0, range(1000)))
    >>> print(np.unique(dropped), dropped.mean().round(1))
    [0. 1.] 0.5
    """

    p: Annotated[float, Number(above=0.0, below=1.0)]
    fill: Annotated[float, Number()] = 0.0

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Replace the features drawn."""
        check_floating(self, batch)
        kept = check_streams(self, batch, rng).uniform(tuple(batch.shape[1:])) >= self.p
        return where(kept, batch, like(np.asarray(self.fill, dtype=np.float64), batch))
