"""Decoding of image files."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta._support.checks import require


def decode_images(
    files: Iterable[bytes | Path], *, mode: str, size: int | None = None, where: str = "images"
) -> NDArray[np.uint8]:
    """Decode image files, given as contents or paths, to an array (N, 3, H, W) for mode RGB or (N, 1, H, W) for L.

    `size` is the side length to which the central square is resized; without it all images must have one size.
    `where` names the source in errors.
    """
    pillow = require("PIL.Image", "data")
    arrays: list[NDArray[np.uint8]] = []
    for row, file in enumerate(files):
        try:
            with pillow.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                pixels = np.asarray(_square(image.convert(mode), size), dtype=np.uint8)
        except (OSError, TypeError) as error:
            name = f"{where}, row {row}" if isinstance(file, bytes) else str(file)
            raise ValueError(f"{name} is not an image that can be read: {error}.") from error
        if arrays and pixels.shape != arrays[0].shape:
            raise ValueError(
                f"{where}, row {row}: the image is {pixels.shape[1]} x {pixels.shape[0]} pixels, "
                f"the first one {arrays[0].shape[1]} x {arrays[0].shape[0]}. Pass size=... to resize them."
            )
        arrays.append(pixels)
    if not arrays:
        return np.zeros((0, 3 if mode == "RGB" else 1, size or 0, size or 0), dtype=np.uint8)
    stacked = np.stack(arrays)  # (N, H, W) or (N, H, W, 3)
    return stacked[:, None] if mode == "L" else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _square(image: Any, size: int | None) -> Any:
    """Centre square of a Pillow image, resized by Lanczos' filter."""
    if size is None:
        return image
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    if side != max(image.size):
        image = image.crop((left, top, left + side, top + side))
    resampling = require("PIL.Image", "data").Resampling.LANCZOS
    return image if side == size else image.resize((size, size), resampling)
