"""Common sets of views."""

__all__ = ["d4", "five_crop", "flips", "standard_images", "volume_flips"]

from collections.abc import Mapping, Sequence
from itertools import combinations

from vbtta.augment import images
from vbtta.augment.arrays import Identity
from vbtta.augment.base import BuiltIn, Chain
from vbtta.augment.images import HorizontalFlip, Rotate90, VerticalFlip


def flips() -> list[BuiltIn]:
    """List identity and the three mirror images: left and right, top and bottom, both."""
    return [Identity(), HorizontalFlip(), VerticalFlip(), Chain((HorizontalFlip(), VerticalFlip()))]


def volume_flips(
    axes: Sequence[int] = (0, 1, 2), swap: Mapping[int, Sequence[tuple[int, int]]] | None = None
) -> list[BuiltIn]:
    """List identity and all mirror images along some axes: of volumes (N, C, D, H, W) along all three, seven.

    `swap` are pairs of classes, such as left and right kidney, that a mirror along an axis exchanges, by axis.
    """
    if not set(swap or {}) <= set(axes) or len(set(axes)) < len(axes):
        raise ValueError(f"axes must be different and hold every axis of swap; got {list(axes)} and swap={swap}")
    views: list[BuiltIn] = [Identity()]
    choices = [choice for size in range(len(axes)) for choice in combinations(sorted(axes), size + 1)]
    for choice in choices:
        pairs = [tuple(sorted(pair)) for axis in choice for pair in (swap or {}).get(axis, ())]
        odd = [pair for pair in dict.fromkeys(pairs) if pairs.count(pair) % 2]  # two exchanges cancel
        views.append(images.Flip(choice, swap_classes=odd or None))
    return views


def d4() -> list[BuiltIn]:
    """List the eight symmetries of the square: quarter turns, and quarter turns of the mirror image.

    Images that are not square change from (H, W) to (W, H) in four of them.
    """
    turns = [Rotate90(quarters) for quarters in (1, 2, 3)]
    return [Identity(), *turns, HorizontalFlip(), *(Chain((HorizontalFlip(), turn)) for turn in turns)]


def five_crop(scale: float = 0.875) -> list[BuiltIn]:
    """List the four corners and the centre, each a share `scale` of height and width, resized; without identity."""
    return [images.Crop(position, scale) for position in images.POSITIONS]


def standard_images(*, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> list[BuiltIn]:
    """List 18 deterministic views for photographs, `identity` first; none changes the size of the images.

    `mean` and `std` tell how the images were normalised, one entry per channel, if they are not in [0, 1].
    """
    return [
        Identity(),
        HorizontalFlip(),
        *(images.Rotate(degrees) for degrees in (10.0, -10.0)),
        *(images.Shift(x, y) for x, y in ((0.08, 0.0), (-0.08, 0.0), (0.0, 0.08), (0.0, -0.08))),
        *(images.Zoom(factor) for factor in (1.15, 0.9)),
        Chain((HorizontalFlip(), images.Zoom(1.15))),
        *(images.Brightness(amount, mean=mean, std=std) for amount in (0.1, -0.1)),
        *(images.Contrast(factor, mean=mean, std=std) for factor in (1.3, 0.75)),
        *(images.Gamma(gamma, mean=mean, std=std) for gamma in (1.3, 0.75)),
        images.Blur(0.7),
    ]
