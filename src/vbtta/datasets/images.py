"""The one result type of all loaders, and where their data are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vbtta._support.images import decode_images

__all__ = ["ImageData", "data_folder", "decode_images"]

_ROW_NUMBERS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # stands for "0..N-1" until N is known


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images with their labels.

    Parameters
    ----------
    images : ndarray of uint8, shape (N, 3, H, W) or (N, 1, H, W)
        Pixels.
    labels : ndarray, shape (N,)
        Class numbers (int64), or numbers such as ages.
    extra : mapping of str to ndarray, each of shape (N,)
        Further columns: other annotators' labels, file names.
    classes : tuple of str
        Class names in the order of the class numbers; empty where labels are no classes.
    ids : ndarray of int64, shape (N,), optional
        Row of each image in its source, before any row was left out; by default 0..N-1.

    Examples
    --------
    >>> data = ImageData(np.zeros((3, 1, 2, 2), dtype=np.uint8), np.array([0, 1, 1]), classes=("cat", "dog"))
    >>> data.take([2, 0]).ids
    array([2, 0])
    """

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    extra: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()
    ids: NDArray[np.int64] = dataclasses.field(default_factory=lambda: _ROW_NUMBERS)

    def __post_init__(self) -> None:
        """Check shapes once, so that no user of the data has to."""
        if self.images.ndim != 4 or self.images.dtype != np.uint8 or self.images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 of shape (N, 3, H, W) or (N, 1, H, W); "
                f"got {self.images.dtype} {self.images.shape}."
            )
        if self.ids is _ROW_NUMBERS:
            object.__setattr__(self, "ids", np.arange(len(self.images)))
        columns = {"labels": self.labels, "ids": self.ids, **self.extra}
        for name, column in columns.items():
            if column.shape != (len(self.images),):
                raise ValueError(
                    f"{name} must have one entry per image, shape ({len(self.images)},); got {column.shape}."
                )
        if self.classes and len(self.labels):
            lowest, highest = self.labels.min(), self.labels.max()
            if lowest < 0 or highest >= len(self.classes):
                raise ValueError(
                    f"labels must be class numbers in 0..{len(self.classes) - 1}; got {lowest}..{highest}."
                )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: ArrayLike) -> ImageData:
        """Keep these rows (numbers or a mask), in this order."""
        chosen = np.asarray(rows)
        return dataclasses.replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            extra={name: column[chosen] for name, column in self.extra.items()},
            ids=self.ids[chosen],
        )


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder that holds the data: the argument, else the environment variable ``VBTTA_DATA``."""
    chosen = folder if folder is not None else os.environ.get("VBTTA_DATA")
    if not chosen:
        raise FileNotFoundError(
            "no data folder given. Pass folder=..., or set the environment variable VBTTA_DATA to the folder "
            "that holds the data sets."
        )
    path = Path(chosen)
    if not path.is_dir():
        raise FileNotFoundError(f"the data folder {path} does not exist. Pass folder=..., or set VBTTA_DATA.")
    return path
