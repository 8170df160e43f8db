"""Corrupted images: noise, blur and low contrast at three strengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

__all__ = ["CORRUPTIONS", "corrupt"]

# What the strengths 1, 2 and 3 mean, for pixels in [0, 1].
CORRUPTIONS: dict[str, tuple[float, float, float]] = {
    "noise": (0.04, 0.08, 0.12),  # standard deviation
    "blur": (0.6, 0.9, 1.3),  # standard deviation of the Gaussian, pixels
    "contrast": (0.5, 0.3, 0.15),  # what distances from the image's mean are multiplied by
}


def corrupt(images: NDArray[np.uint8], kind: str, strength: int, seed: int = 0) -> NDArray[np.uint8]:
    """Corrupt images.

    Parameters
    ----------
    images : ndarray of uint8, shape (N, channels, H, W)
        Images.
    kind : {"none", "noise", "blur", "contrast"}
        How; "none" returns them as they are.
    strength : int
        1, 2 or 3.
    seed : int
        Of the noise.

    Returns
    -------
    ndarray of uint8, shape (N, channels, H, W)

    Examples
    --------
    >>> image = np.array([[[[0, 200]]]], dtype=np.uint8)
    >>> corrupt(image, "contrast", 1)
    array([[[[ 50, 150]]]], dtype=uint8)
    """
    if kind == "none":
        return images
    if kind not in CORRUPTIONS or strength not in (1, 2, 3):
        raise ValueError(f"kind must be one of {sorted(CORRUPTIONS)} and strength 1, 2 or 3; got {kind!r}, {strength}.")
    amount = CORRUPTIONS[kind][strength - 1]
    pixels = images.astype(np.float64)
    if kind == "noise":
        pixels += 255 * amount * np.random.default_rng(seed).standard_normal(pixels.shape)
    elif kind == "blur":
        pixels = ndimage.gaussian_filter(pixels, sigma=(0, 0, amount, amount), mode="reflect")
    else:
        centre = pixels.mean(axis=(1, 2, 3), keepdims=True)
        pixels = centre + amount * (pixels - centre)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
