"""Decoding of image files, and maps as image files: PNG and TIFF by Pillow, NIfTI by nibabel."""

import gzip
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta._support.checks import require
from vbtta._support.files import atomic_path

MAP_SUFFIXES = (".png", ".tif", ".tiff", ".nii", ".nii.gz")


def decode_images(
    files: Iterable[bytes | Path], *, mode: str, size: int | None = None, where: str = "images"
) -> NDArray[np.uint8]:
    """Decode image files, given as contents or paths, to an array (N, 3, H, W) for mode RGB or (N, 1, H, W) for L.

    `size` is the side length to which the central square is resized; without it all images must have one size.
    `where` names the source in errors.
    """
    arrays: list[NDArray[np.uint8]] = []
    for row, file in enumerate(files):
        name = f"{where}, row {row}" if isinstance(file, bytes) else str(file)
        pixels = _pixels(file, name, lambda image: _square(image.convert(mode), size))
        if arrays and pixels.shape != arrays[0].shape:
            own, first = (f"{image.shape[1]} x {image.shape[0]}" for image in (pixels, arrays[0]))
            raise ValueError(f"{where}, row {row}: the image is {own} pixels, the first one {first}; pass size=...")
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
    square = image.crop((left, top, left + side, top + side))
    return square.resize((size, size), require("PIL.Image", "data").Resampling.LANCZOS)


def map_files(folder: Path) -> dict[str, Path]:
    """The images and volumes of a folder by name without suffix, in alphabetical order."""
    names = {path: path.name.removesuffix(".gz") for path in sorted(folder.iterdir()) if suffix_of(path)}
    files = {Path(name).stem: path for path, name in names.items()}
    if len(files) < len(names):
        raise ValueError(f"{folder} has several files of one name and different suffixes; keep one of each")
    return files


def suffix_of(path: Path) -> str:
    """The suffix of a map's file, empty for other files."""
    return next((suffix for suffix in sorted(MAP_SUFFIXES, key=len) if path.name.lower().endswith(suffix)), "")


def read_image(path: Path) -> NDArray[np.float32]:
    """An image (channels, H, W) with pixels from 0 to 1, or a volume (channels, X, Y, Z) with its own values."""
    if ".nii" in suffix_of(path):
        volume = np.asarray(require("nibabel").load(path).dataobj, dtype=np.float32)
        return volume[None] if volume.ndim == 3 else np.moveaxis(volume, -1, 0)
    modes = {"P": "RGB", "RGBA": "RGB", "CMYK": "RGB", "LA": "L", "1": "L"}
    pixels = _pixels(path, str(path), lambda image: _single(image).convert(modes.get(image.mode, image.mode)))
    scale = float(np.iinfo(pixels.dtype).max) if pixels.dtype in (np.uint8, np.uint16) else 1.0
    channels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    return np.ascontiguousarray(channels, dtype=np.float32) / np.float32(scale)


def read_mask(path: Path) -> NDArray[Any]:
    """A map of whole numbers (H, W) or (X, Y, Z); floating-point numbers of a regression stay as they are."""
    if ".nii" in suffix_of(path):
        values = np.asarray(require("nibabel").load(path).dataobj)
    else:
        values = _pixels(path, str(path), _single)
        if values.ndim > 2:
            raise ValueError(f"{path} is a colour image; a mask has one channel of class numbers")
    whole = values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.rint(values)).all()
    return values.astype(np.int64) if whole or values.dtype.kind in "bui" else values


def write_map(path: Path, values: NDArray[Any], source: Path) -> None:
    """Write a map (H, W) as PNG (whole numbers) or TIFF (others), or a volume as NIfTI with the source's geometry."""
    if values.dtype.kind in "iu":
        values = values.astype(np.uint8 if values.max(initial=0) < 256 else np.uint16)
    with atomic_path(path) as temporary:
        if ".nii" in suffix_of(path):
            nibabel = require("nibabel")
            volume = nibabel.Nifti1Image(values, nibabel.load(source).affine)
            temporary.write_bytes(gzip.compress(volume.to_bytes()) if path.suffix == ".gz" else volume.to_bytes())
        else:
            image = require("PIL.Image", "data").fromarray(values)
            image.save(temporary, format="PNG" if path.suffix == ".png" else "TIFF")


def _pixels(file: bytes | Path, name: str, change: Callable[[Any], Any]) -> NDArray[Any]:
    """Pixels of an image file, after a change of the Pillow image; `name` is the file in errors."""
    try:
        with require("PIL.Image", "data").open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            return np.asarray(change(image))
    except (OSError, TypeError) as error:
        raise ValueError(f"{name} is not an image that can be read: {error}") from error


def _single(image: Any) -> Any:
    """The image of a file with one page."""
    if getattr(image, "n_frames", 1) > 1:
        raise TypeError(f"it has {image.n_frames} pages; save each as a file, or volumes as NIfTI")
    return image
