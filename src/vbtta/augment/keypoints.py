"""Views of images whose outputs are coordinates of points."""

__all__ = ["Keypoints", "keypoint_views"]

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch
from vbtta.augment.base import Augmentation, Chain, Choice, check_invertible, move_points
from vbtta.augment.foreign import as_views


class Keypoints(Chain):
    """Views applied one after the other, and a predictor's coordinates brought back to the input image.

    Outputs are rows (N, 2 P): x and y of the first point, of the second, and so on.

    Built-in `views` (often one) of images of `size` (height, width). `coordinates` are "pixel", whose centres are whole
    numbers, or "unit", shares of width and height; `swap_classes` are pairs of points, as left and right.
    """

    size: Sequence[int]
    coordinates: Annotated[str, Choice(("pixel", "unit"))] = "pixel"

    def _check(self) -> None:
        super()._check()
        size: Any = self.size
        whole = isinstance(size, Sequence) and all(isinstance(n, int | np.integer) and n > 0 for n in size)
        if not whole or len(size) != 2:
            raise ValueError(f"Keypoints: size must be height and width of the images, as (256, 192); got {size!r}.")
        self._store(size=tuple(map(int, size)))
        self._affine(*self.size)  # refuses views that cannot move points
        check_invertible(self.views)

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Apply the views in order to images of the given size."""
        if tuple(batch.shape[-2:]) != self.size:
            shape = tuple(batch.shape)
            raise ValueError(f"view {self.name} moves points of images {self.size}; got images {shape}: set size=.")
        return super().__call__(batch, rng)

    def restore_rows(self, outputs: Batch) -> Batch:
        """Coordinates (N, 2 P) in the augmented images as coordinates in the images."""
        if outputs.shape[1] % 2:
            raise ValueError(f"view {self.name}: keypoints are rows x, y, x, y, ...; got {outputs.shape[1]} outputs.")
        points = outputs.reshape(len(outputs), -1, 2)
        if self.coordinates == "pixel":
            return self.inverse_points(points, self.size).reshape(outputs.shape)
        pixels = move_points(points, _to_pixels(*self._size_after(*self.size)))
        restored = self.inverse_points(pixels, self.size)
        return move_points(restored, np.linalg.inv(_to_pixels(*self.size))).reshape(outputs.shape)


def keypoint_views(
    views: Any, size: Sequence[int], *, swap: Sequence[Sequence[int]] = (), coordinates: str = "pixel"
) -> list[Augmentation]:
    """Built-in views for a predictor of coordinates; `size` and `coordinates` as in :class:`Keypoints`.

    Pairs of points in `swap`, left and right of the same by their numbers, are exchanged by every view that mirrors.
    """
    result: list[Augmentation] = []
    for view in as_views(views):
        plain = Keypoints((view,), size, coordinates)
        mirrors = bool(swap) and np.linalg.det(plain._affine(*plain.size)) < 0
        result.append(replace(plain, name="", swap_classes=swap) if mirrors else plain)
    return result


def _to_pixels(height: int, width: int) -> Any:
    """From shares of width and height to pixels, whose centres are whole numbers."""
    return np.array([[width, 0, -0.5], [0, height, -0.5], [0, 0, 1.0]])
