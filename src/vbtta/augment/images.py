"""Views of images (N, C, H, W) that move pixels: flips, rotations, shifts, crops, blur; torch and kornia."""

__all__ = [
    "Blur",
    "Crop",
    "HorizontalFlip",
    "Rotate",
    "Rotate90",
    "Shift",
    "VerticalFlip",
    "Zoom",
]

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vbtta._support.extras import missing_extra
from vbtta._support.random import RowStreams
from vbtta.augment.arrays import check_floating, check_number
from vbtta.augment.base import Batch, BuiltIn, number

try:
    import kornia.filters
    import kornia.geometry.transform
    import torch
    from torch.nn import functional
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "torch") from error

_PADDINGS = {
    "reflection": "reflect",
    "border": "replicate",
    "zeros": "constant",
}  # kornia's name: torch's name
_CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right", "center")


@dataclass(frozen=True)
class ImageView(BuiltIn):
    """Base of the image views: checks the batch, and lets NumPy images through torch and back.

    All are deterministic, keep tensors on their device, and can be exported with a free batch size.
    """

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Transform a batch of images."""
        if isinstance(batch, np.ndarray):
            return self(torch.from_numpy(np.ascontiguousarray(batch))).numpy()
        if batch.ndim != 4:
            raise ValueError(f"view {self.name} takes images (N, C, H, W); got shape {tuple(batch.shape)}.")
        return self.transform(batch)

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Transform images (N, C, H, W)."""
        raise NotImplementedError


@dataclass(frozen=True)
class HorizontalFlip(ImageView):
    """Mirror left and right.

    Examples
    --------
    >>> import numpy as np
    >>> HorizontalFlip()(np.array([[[[1.0, 2.0, 3.0]]]]))
    array([[[[3., 2., 1.]]]])
    """

    def default_name(self) -> str:
        """Return `hflip`."""
        return "hflip"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Reverse the columns."""
        return torch.flip(images, (-1,))


@dataclass(frozen=True)
class VerticalFlip(ImageView):
    """Mirror top and bottom.

    Examples
    --------
    >>> VerticalFlip()(np.array([[[[1.0], [2.0], [3.0]]]])).ravel()
    array([3., 2., 1.])
    """

    def default_name(self) -> str:
        """Return `vflip`."""
        return "vflip"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Reverse the rows."""
        return torch.flip(images, (-2,))


@dataclass(frozen=True)
class Rotate90(ImageView):
    """Turn by quarters, counter-clockwise, exactly: (H, W) becomes (W, H) for an odd number of quarters.

    Parameters
    ----------
    quarters : int
        1, 2 or 3.

    Examples
    --------
    >>> Rotate90(1)(np.array([[[[1.0, 2.0, 3.0]]]])).shape
    (1, 1, 3, 1)
    >>> Rotate90(2)(np.array([[[[1.0, 2.0, 3.0]]]])).ravel()
    array([3., 2., 1.])
    """

    quarters: int

    def check(self) -> None:
        """Refuse other numbers of quarters."""
        if isinstance(self.quarters, bool) or self.quarters not in (1, 2, 3):
            raise ValueError(f"Rotate90: quarters must be 1, 2 or 3; got {self.quarters!r}.")
        self.store(quarters=int(self.quarters))

    def default_name(self) -> str:
        """Name the angle."""
        return f"rotate90({90 * self.quarters:+d})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Turn the images."""
        return torch.rot90(images, self.quarters, (-2, -1))


@dataclass(frozen=True)
class Rotate(ImageView):
    """Turn about the centre, counter-clockwise, keeping the size.

    Parameters
    ----------
    degrees : float
        The angle.
    padding : {"reflection", "border", "zeros"}
        What is seen beyond the border of the image.

    Examples
    --------
    >>> Rotate(15).name
    'rotate(+15)'
    """

    degrees: float
    padding: str = "reflection"

    def check(self) -> None:
        """Refuse an angle that is not finite, and an unknown padding."""
        check_number("Rotate", "degrees", self.degrees, above=-math.inf)
        _check_padding("Rotate", self.padding)

    def default_name(self) -> str:
        """Name the angle."""
        return f"rotate({number(self.degrees, signed=True)}{_unless_default(self.padding)})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Turn the images."""
        check_floating(self, images)
        return _turn_and_zoom(images, self.degrees, 1.0, self.padding)


@dataclass(frozen=True)
class Zoom(ImageView):
    """Enlarge (factor above 1) or shrink about the centre, keeping the size.

    Parameters
    ----------
    factor : float
        How much larger things appear.
    padding : {"reflection", "border", "zeros"}
        What is seen beyond the border of the image.

    Examples
    --------
    >>> image = np.zeros((1, 1, 9, 9))
    >>> image[:, :, 4, 4] = 1.0
    >>> int((Zoom(3.0)(image) > 0).sum())  # one pixel becomes a blot
    25
    """

    factor: float
    padding: str = "reflection"

    def check(self) -> None:
        """Refuse a factor that is not positive, and an unknown padding."""
        check_number("Zoom", "factor", self.factor, above=0.0)
        _check_padding("Zoom", self.padding)

    def default_name(self) -> str:
        """Name the factor."""
        return f"zoom({number(self.factor)}{_unless_default(self.padding)})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Zoom the images."""
        check_floating(self, images)
        return _turn_and_zoom(images, 0.0, self.factor, self.padding)


@dataclass(frozen=True)
class Shift(ImageView):
    """Move right and down by a share of the size, rounded to whole pixels so that nothing is blurred.

    Parameters
    ----------
    x, y : float
        Share of the width (to the right) and of the height (downwards), between -1 and 1. One row and one column
        of the image stay in the picture, however small it is.
    padding : {"reflection", "border", "zeros"}
        What comes in from beyond the border of the image.

    Examples
    --------
    >>> Shift(0.25, 0.0, padding="zeros")(np.array([[[[1.0, 2.0, 3.0, 4.0]]]])).ravel()
    array([0., 1., 2., 3.])
    """

    x: float
    y: float
    padding: str = "reflection"

    def check(self) -> None:
        """Refuse shifts out of the picture, and an unknown padding."""
        for argument, share in (("x", self.x), ("y", self.y)):
            check_number("Shift", argument, share, above=-1.0)
            if share >= 1:
                raise ValueError(f"Shift: {argument} is a share of the size, below 1; got {share}.")
        _check_padding("Shift", self.padding)

    def default_name(self) -> str:
        """Name both shares."""
        shares = f"{number(self.x, signed=True)},{number(self.y, signed=True)}"
        return f"shift({shares}{_unless_default(self.padding)})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Pad on one side and cut on the other."""
        check_floating(self, images)
        height, width = images.shape[-2:]
        right, down = _pixels(self.x, width), _pixels(self.y, height)
        margins = (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0))  # left, right, top, bottom
        padded = functional.pad(images, margins, mode=_PADDINGS[self.padding])
        top, left = max(-down, 0), max(-right, 0)
        return padded[..., top : top + height, left : left + width]


@dataclass(frozen=True)
class Crop(ImageView):
    """Cut out a corner or the centre and resize it to the size of the image (bilinear).

    Parameters
    ----------
    position : {"top_left", "top_right", "bottom_left", "bottom_right", "center"}
        Which part.
    scale : float
        Its height and width as a share of the image's, above 0 and at most 1.

    Examples
    --------
    >>> Crop("top_left", 0.5)(np.array([[[[1.0, 2.0], [3.0, 4.0]]]])).ravel()
    array([1., 1., 1., 1.])
    """

    position: str
    scale: float = 0.875

    def check(self) -> None:
        """Refuse unknown positions and scales above 1."""
        if self.position not in _CORNERS:
            raise ValueError(f"Crop: position must be one of {', '.join(_CORNERS)}; got {self.position!r}.")
        check_number("Crop", "scale", self.scale, above=0.0)
        if self.scale > 1:
            raise ValueError(f"Crop: scale must be at most 1; got {self.scale}.")

    def default_name(self) -> str:
        """Name position and scale."""
        return f"crop({self.position},{number(self.scale)})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Cut and resize."""
        check_floating(self, images)
        height, width = images.shape[-2:]
        crop_height, crop_width = max(1, round(self.scale * height)), max(1, round(self.scale * width))
        spare_rows, spare_columns = height - crop_height, width - crop_width
        if self.position == "center":
            top, left = spare_rows // 2, spare_columns // 2
        else:
            top = spare_rows if self.position.startswith("bottom") else 0
            left = spare_columns if self.position.endswith("right") else 0
        part = images[..., top : top + crop_height, left : left + crop_width]
        return functional.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Blur(ImageView):
    """Blur with a Gaussian kernel, cut at three standard deviations.

    Parameters
    ----------
    sigma : float
        Standard deviation of the kernel in pixels.

    Examples
    --------
    >>> image = np.zeros((1, 1, 9, 9))
    >>> image[:, :, 4, 4] = 1.0
    >>> blurred = Blur(1.0)(image)
    >>> print(blurred.sum().round(3), blurred.max().round(2))
    1.0 0.16
    """

    sigma: float

    def check(self) -> None:
        """Refuse a sigma that is not positive."""
        check_number("Blur", "sigma", self.sigma, above=0.0)

    def default_name(self) -> str:
        """Name sigma."""
        return f"blur({number(self.sigma)})"

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Blur the images."""
        check_floating(self, images)
        radius = math.ceil(3 * self.sigma)
        if radius >= min(images.shape[-2:]):
            raise ValueError(
                f"view {self.name} needs images larger than {radius} pixels; got {tuple(images.shape[-2:])}."
            )
        size, sigma = 2 * radius + 1, float(self.sigma)
        blurred: torch.Tensor = kornia.filters.gaussian_blur2d(images, (size, size), (sigma, sigma))
        return blurred


def _turn_and_zoom(images: torch.Tensor, degrees: float, factor: float, padding: str) -> torch.Tensor:
    """Warp all images by one matrix in pixels, so that images that are not square keep their proportions."""
    height, width = images.shape[-2:]
    centre = images.new_tensor([[(width - 1) / 2, (height - 1) / 2]])
    matrix = kornia.geometry.transform.get_rotation_matrix2d(
        centre, images.new_tensor([degrees]), images.new_tensor([[factor, factor]])
    )  # (1, 2, 3)
    warped: torch.Tensor = kornia.geometry.transform.affine(images, matrix, "bilinear", padding)
    return warped


def _pixels(share: float, size: int) -> int:
    """A share of the size in whole pixels, at most all but one."""
    return max(1 - size, min(size - 1, round(share * size)))


def _check_padding(owner: str, padding: Any) -> None:
    if padding not in _PADDINGS:
        raise ValueError(f"{owner}: padding must be one of {', '.join(_PADDINGS)}; got {padding!r}.")


def _unless_default(padding: str) -> str:
    return "" if padding == "reflection" else f",{padding}"
