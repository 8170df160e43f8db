"""Common sets of views."""

__all__ = ["d4", "five_crop", "flips", "paper_mixup_cutmix", "standard_images"]

from collections.abc import Sequence
from typing import Any

from vbtta.augment.arrays import Identity
from vbtta.augment.base import BuiltIn, Chain
from vbtta.augment.mixing import CutMix, Mixup, Pool

# The image views need torch and kornia, so the functions import them: mixup of tables works without.


def flips() -> list[BuiltIn]:
    """List identity and the three mirror images.

    Returns
    -------
    list of 4 views
        `identity`, `hflip`, `vflip`, and both one after the other.

    Examples
    --------
    >>> [view.name for view in flips()]
    ['identity', 'hflip', 'vflip', 'hflip+vflip']
    """
    from vbtta.augment.images import HorizontalFlip, VerticalFlip

    return [Identity(), HorizontalFlip(), VerticalFlip(), Chain((HorizontalFlip(), VerticalFlip()))]


def d4() -> list[BuiltIn]:
    """List the eight symmetries of the square: quarter turns, and quarter turns of the mirror image.

    Images that are not square change from (H, W) to (W, H) in four of them.

    Returns
    -------
    list of 8 views
        `identity` first.

    Examples
    --------
    >>> [view.name for view in d4()][:4]
    ['identity', 'rotate90(+90)', 'rotate90(+180)', 'rotate90(+270)']
    """
    from vbtta.augment.images import HorizontalFlip, Rotate90

    turns = [Rotate90(quarters) for quarters in (1, 2, 3)]
    mirrored = [Chain((HorizontalFlip(), turn)) for turn in turns]
    return [Identity(), *turns, HorizontalFlip(), *mirrored]


def five_crop(scale: float = 0.875) -> list[BuiltIn]:
    """List the four corners and the centre, each resized to the size of the image.

    Parameters
    ----------
    scale : float
        Height and width of a crop as a share of the image's.

    Returns
    -------
    list of 5 views
        No identity among them.

    Examples
    --------
    >>> [view.name for view in five_crop(0.5)][:2]
    ['crop(top_left,0.5)', 'crop(top_right,0.5)']
    """
    from vbtta.augment.images import Crop

    places = ("top_left", "top_right", "bottom_left", "bottom_right", "center")
    return [Crop(place, scale) for place in places]


def paper_mixup_cutmix(pool: Any, alphas: Sequence[float] = (0.1, 0.5, 0.9)) -> list[BuiltIn]:
    """List the views of the paper's experiment on artificial data: mixup and cutmix at three strengths.

    Parameters
    ----------
    pool : array, tensor, path of a .npy file, or Pool, shape (P, ...)
        The training inputs.
    alphas : sequence of float
        Parameters of the Beta distributions.

    Returns
    -------
    list of views
        Mixup for every alpha, then cutmix for every alpha; no identity, as in the paper.

    Examples
    --------
    >>> import numpy as np
    >>> [view.name for view in paper_mixup_cutmix(np.zeros((10, 3)))]
    ['mixup(0.1)', 'mixup(0.5)', 'mixup(0.9)', 'cutmix(0.1)', 'cutmix(0.5)', 'cutmix(0.9)']
    """
    shared = Pool.of(pool)
    return [*(Mixup(alpha, shared) for alpha in alphas), *(CutMix(alpha, shared) for alpha in alphas)]


def standard_images(*, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> list[BuiltIn]:
    """List 18 deterministic views for photographs.

    Parameters
    ----------
    mean, std : sequence of float, optional
        How the images were normalised, one entry per channel, if they are not in [0, 1].

    Returns
    -------
    list of 18 views
        `identity` first; none changes the size of the images.

    Examples
    --------
    >>> import numpy as np
    >>> views = standard_images()
    >>> len(views), {view(np.zeros((2, 3, 16, 16))).shape for view in views}
    (18, {(2, 3, 16, 16)})
    """
    from vbtta.augment.colours import Brightness, Contrast, Gamma
    from vbtta.augment.images import Blur, HorizontalFlip, Rotate, Shift, Zoom

    return [
        Identity(),
        HorizontalFlip(),
        Rotate(10.0),
        Rotate(-10.0),
        Shift(0.08, 0.0),
        Shift(-0.08, 0.0),
        Shift(0.0, 0.08),
        Shift(0.0, -0.08),
        Zoom(1.15),
        Zoom(0.9),
        Chain((HorizontalFlip(), Zoom(1.15))),
        Brightness(0.1, mean=mean, std=std),
        Brightness(-0.1, mean=mean, std=std),
        Contrast(1.3, mean=mean, std=std),
        Contrast(0.75, mean=mean, std=std),
        Gamma(1.3, mean=mean, std=std),
        Gamma(0.75, mean=mean, std=std),
        Blur(0.7),
    ]
