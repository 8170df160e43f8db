"""Batches of training images: bytes to floats, random shifts and flips."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["augment_batch", "unit_images"]


def unit_images(images: NDArray[np.uint8]) -> Tensor:
    """Convert bytes to floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)


def augment_batch(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift each image by up to ``crop`` pixels (reflected border) and flip half of them left to right.

    Parameters
    ----------
    images : Tensor, shape (B, channels, H, W)
        A batch.
    crop : int
        Largest shift in either direction; less than H and W.
    flip : bool
        Whether to flip.
    generator : torch.Generator
        Where the shifts and flips come from.

    Returns
    -------
    Tensor, shape (B, channels, H, W)
    """
    size, _, height, width = images.shape
    rows = torch.arange(height).expand(size, height)  # (B, H)
    columns = torch.arange(width).expand(size, width)  # (B, W)
    if flip:
        flipped = torch.rand(size, 1, generator=generator) < 0.5
        columns = torch.where(flipped, width - 1 - columns, columns)
    if crop > 0:
        shift = torch.randint(-crop, crop + 1, (2, size, 1), generator=generator)
        rows, columns = _reflect(rows + shift[0], height), _reflect(columns + shift[1], width)
    instance = torch.arange(size)[:, None, None]
    # Advanced indices around a slice put the channels last: (B, H, W, channels).
    return images[instance, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Fold positions outside 0..size-1 back, without repeating the border."""
    position = position.abs()
    return (size - 1) - (size - 1 - position).abs()
