"""Views of images (N, C, H, W): flips, rotations, shifts, crops, blur, colours; torch loads on first use.

They take volumes (N, C, D, H, W), too, whose slices (H, W) are turned, moved and blurred.
"""

__all__ = [
    "Blur", "Brightness", "Contrast", "Crop", "Flip", "Gamma",
    "HorizontalFlip", "Rotate", "Rotate90", "Shift", "VerticalFlip", "Zoom",
]  # fmt: skip

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from vbtta._support.checks import require
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, resized, to_tensor
from vbtta.augment import base
from vbtta.augment.base import BuiltIn, Choice, Number, Positive, Signed, Symmetry, turn_and_mirror
from vbtta.data.labels import Array

if TYPE_CHECKING:
    from torch import Tensor

_TORCH_PADDING = {"reflection": "reflect", "border": "replicate", "zeros": "constant"}  # modes of grid_sample and pad
_GREY = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601
POSITIONS = ("top_left", "top_right", "bottom_left", "bottom_right", "center")  # of crops
Padding = Annotated[str, Choice(tuple(_TORCH_PADDING))]
Share = Annotated[float, Number(above=-1.0, below=1.0, signed=True)]  # of an axis' length


class ImageView(BuiltIn):
    """Base of the image views: checks the batch, and takes NumPy images through torch and back.

    All are deterministic, keep tensors on their device, and can be exported with a free batch size. Subclasses work in
    `_transform`, or if they are geometric in `_affine`; `interpolates` says whether whole numbers would be rounded.
    """

    interpolates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require("torch", "torch")
        super().__post_init__()

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        if isinstance(batch, np.ndarray):
            return self(to_tensor(batch)).numpy()
        base.check_images(self, batch, volumes=True)
        if self.interpolates:
            base.check_floating(self, batch)
        return self._by_slice(self._transform, batch)

    def _transform(self, images: "Tensor") -> "Tensor":
        """Transform images (N, C, H, W): by default each pixel has the value where `_affine` moves it."""
        return _warp(images, self._affine(*images.shape[-2:]), self.padding)  # type: ignore[attr-defined]

    def _undo(self, outputs: Batch, rng: RowStreams | None) -> Batch:
        if isinstance(outputs, np.ndarray):
            return self._undo(to_tensor(outputs), rng).numpy()
        return self._by_slice(self._restore, outputs) if self.partial else self._restore(outputs)

    def _cover(self, mask: Batch, rng: RowStreams | None) -> Batch:
        """The mask moved as an image with zeros beyond its border; colours and blur leave it as it is."""
        if self.interpolates and not self.partial:
            return mask
        options: Any = {"padding": "zeros"} if hasattr(self, "padding") else {}
        return replace(self, **options)(mask)

    def _by_slice(self, function: Callable[["Tensor"], "Tensor"], images: "Tensor") -> "Tensor":
        """A function of images (N, C, H, W), applied to all slices of volumes."""
        if images.ndim == 4 or not self.interpolates:
            return function(images)
        slices = images.movedim(2, 1)  # (N, D, C, H, W)
        mapped = function(slices.flatten(0, 1))
        return mapped.reshape(*slices.shape[:2], *mapped.shape[1:]).movedim(1, 2)

    def _restore(self, outputs: "Tensor", /) -> "Tensor":
        """Outputs (N, C, H, W) of transformed images in the geometry of the images."""
        return _warp(outputs, np.linalg.inv(self._affine(*outputs.shape[-2:])), "zeros") if self.partial else outputs


class ExactView(ImageView):
    """Base of flips and quarter turns, which are exact; see `BuiltIn._symmetry`."""

    interpolates: ClassVar[bool] = False

    def _transform(self, images: "Tensor") -> "Tensor":
        return turn_and_mirror(images, self._symmetry(images.ndim))  # type: ignore[no-any-return]

    def _restore(self, outputs: "Tensor") -> "Tensor":
        return turn_and_mirror(outputs, self._symmetry(outputs.ndim), undo=True)  # type: ignore[no-any-return]

    def _affine(self, height: int, width: int) -> Array:
        turned, mirrored = self._symmetry(4)
        x, y = -1 in mirrored, -2 in mirrored
        new_height, new_width = self._size_after(height, width)
        matrix = _matrix(1 - 2 * x, 0, 0, 1 - 2 * y, x * (new_width - 1), y * (new_height - 1))
        return matrix[[1, 0, 2]] if turned else matrix

    def _size_after(self, height: int, width: int) -> tuple[int, int]:
        return (width, height) if self._symmetry(4)[0] else (height, width)

    def _symmetry(self, n_axes: int) -> Symmetry:
        raise NotImplementedError


class HorizontalFlip(ExactView, label="hflip"):
    """Mirror left and right."""

    def _symmetry(self, n_axes: int) -> Symmetry:
        return False, frozenset({-1})


class VerticalFlip(ExactView, label="vflip"):
    """Mirror top and bottom."""

    def _symmetry(self, n_axes: int) -> Symmetry:
        return False, frozenset({-2})


class Flip(ExactView, label="flip"):
    """Mirror along axes: 0 and 1 are height and width of images; 0, 1 and 2 depth, height and width of volumes."""

    axes: Sequence[int]

    def _check(self) -> None:
        axes: Any = self.axes
        if isinstance(axes, str) or not isinstance(axes, Sequence) or not set(axes) <= {0, 1, 2} or not axes:
            raise ValueError(f"Flip: axes must be some of 0, 1 and 2; got {axes!r}.")
        self._store(axes=tuple(sorted({int(axis) for axis in axes})))

    def _symmetry(self, n_axes: int) -> Symmetry:
        if max(self.axes) + 2 >= n_axes:
            raise ValueError(f"view {self.name} mirrors axis {max(self.axes)} of volumes; images have axes 0 and 1.")
        return False, frozenset(axis + 2 - n_axes for axis in self.axes)

    def _default_name(self) -> str:
        return f"flip({','.join(map(str, self.axes))})"


class Rotate90(ExactView):
    """Rotate by 1, 2 or 3 quarter turns, counter-clockwise and exactly: (H, W) becomes (W, H) for 1 and 3."""

    quarters: int

    def _check(self) -> None:
        if isinstance(self.quarters, bool) or self.quarters not in (1, 2, 3):
            raise ValueError(f"Rotate90: quarters must be 1, 2 or 3; got {self.quarters!r}.")
        self._store(quarters=int(self.quarters))

    def _default_name(self) -> str:
        return f"rotate90({90 * self.quarters:+d})"

    def _symmetry(self, n_axes: int) -> Symmetry:
        return self.quarters != 2, frozenset({1: {-2}, 2: {-2, -1}, 3: {-1}}[self.quarters])


class Rotate(ImageView, label="rotate"):
    """Rotate by degrees about the centre, counter-clockwise, keeping the size.

    `padding` are the values beyond the border of the image: "reflection", "border" or "zeros".
    """

    partial: ClassVar[bool] = True
    degrees: Signed
    padding: Padding = "reflection"

    def _affine(self, height: int, width: int) -> Array:
        return _about_centre(-self.degrees, 1.0, height, width)


class Zoom(ImageView, label="zoom"):
    """Enlarge (factor above 1) or shrink about the centre, keeping the size; `padding` as in :class:`Rotate`."""

    partial: ClassVar[bool] = True
    factor: Positive
    padding: Padding = "reflection"

    def _affine(self, height: int, width: int) -> Array:
        return _about_centre(0.0, 1 / self.factor, height, width)


class Shift(ImageView, label="shift"):
    """Move right by a share `x` of the width and down by a share `y` of the height, between -1 and 1.

    Both are rounded to whole pixels, so that nothing is blurred; at least one row and one column of the image stay in
    the picture. `padding` as in :class:`Rotate`.
    """

    partial: ClassVar[bool] = True
    x: Share
    y: Share
    padding: Padding = "reflection"

    def _transform(self, images: "Tensor") -> "Tensor":
        return self._move(images, 1, _TORCH_PADDING[self.padding])

    def _restore(self, outputs: "Tensor") -> "Tensor":
        return self._move(outputs, -1, "constant")

    def _move(self, images: "Tensor", sign: int, padding: str) -> "Tensor":
        """Pad on one side and cut on the other."""
        height, width = images.shape[-2:]
        right, down = (sign * pixels for pixels in self._pixels(height, width))
        top, left = max(-down, 0), max(-right, 0)
        margins = (max(right, 0), left, max(down, 0), top)  # left, right, top, bottom
        padded: Tensor = require("torch", "torch").nn.functional.pad(images, margins, mode=padding)
        return padded[..., top : top + height, left : left + width]

    def _affine(self, height: int, width: int) -> Array:
        return _matrix(1, 0, 0, 1, *(-pixels for pixels in self._pixels(height, width)))

    def _pixels(self, height: int, width: int) -> list[int]:
        """Whole pixels to the right and down, at most all but one."""
        shares = (self.x, width), (self.y, height)
        return [max(1 - size, min(size - 1, round(share * size))) for share, size in shares]


class Crop(ImageView):
    """Cut out a corner or the centre and resize it to the size of the image (bilinear).

    `position` is "top_left", "top_right", "bottom_left", "bottom_right" or "center"; `scale` is its height and width as
    a share of the image's.
    """

    partial: ClassVar[bool] = True
    position: Annotated[str, Choice(POSITIONS)]
    scale: Annotated[float, Number(above=0.0, below=math.nextafter(1.0, 2.0))] = 0.875

    def _default_name(self) -> str:
        return f"crop({self.position},{Number().text(self.scale)})"

    def _transform(self, images: "Tensor") -> "Tensor":
        top, left, height, width = self._box(*images.shape[-2:])
        part: Tensor = resized(images[..., top : top + height, left : left + width], tuple(images.shape[-2:]))
        return part

    def _affine(self, height: int, width: int) -> Array:
        top, left, crop_height, crop_width = self._box(height, width)
        x, y = crop_width / width, crop_height / height
        return _matrix(x, 0, 0, y, left + 0.5 * (x - 1), top + 0.5 * (y - 1))

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part."""
        crop = max(1, round(self.scale * height)), max(1, round(self.scale * width))
        spare = height - crop[0], width - crop[1]
        if self.position == "center":
            return spare[0] // 2, spare[1] // 2, *crop
        return spare[0] * self.position.startswith("bottom"), spare[1] * self.position.endswith("right"), *crop


class Blur(ImageView, label="blur"):
    """Blur with a Gaussian kernel of standard deviation `sigma` in pixels, cut at three of them."""

    sigma: Positive

    def _transform(self, images: "Tensor") -> "Tensor":
        import torch
        from torch.nn import functional

        radius, (height, width) = math.ceil(3 * self.sigma), images.shape[-2:]
        if radius >= min(height, width):
            raise ValueError(f"view {self.name} needs images larger than {radius} pixels; got {(height, width)}.")
        distance = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
        kernel = torch.softmax(-0.5 * (distance / self.sigma) ** 2, 0)
        padded = functional.pad(images, (radius,) * 4, mode="reflect").flatten(0, 1)[:, None]  # (N C, 1, H, W)
        blurred = functional.conv2d(functional.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])
        return blurred.reshape(images.shape)


class ColourView(ImageView):
    """Base of the colour views, which work on images in [0, 1].

    For images that were normalised, (image - `mean`) / `std` by channel, the view works on the image before
    normalisation. Subclasses work in `_adjust`, whose result is clipped to [0, 1].
    """

    mean: Sequence[float] | None = field(default=None, kw_only=True)
    std: Sequence[float] | None = field(default=None, kw_only=True)

    def _check(self) -> None:
        """Refuse mean without std, different lengths, and std that is not positive."""
        kind = type(self).__name__
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"{kind}: give both mean and std, or neither.")
        if self.mean is not None and self.std is not None:
            mean, std = tuple(map(float, self.mean)), tuple(map(float, self.std))
            if len(mean) != len(std) or min(std, default=0.0) <= 0:
                raise ValueError(f"{kind}: mean and std need one entry per channel, std positive; got {mean}, {std}.")
            self._store(mean=mean, std=std)

    @property
    def value_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The smallest and largest value that is not clipped."""
        ends = [((0 - m) / s, (1 - m) / s) for m, s in zip(self.mean or [0.0], self.std or [1.0], strict=True)]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _transform(self, images: "Tensor") -> "Tensor":
        if self.mean is None or self.std is None:
            return self._adjust(images).clamp(0.0, 1.0)
        if images.shape[1] != len(self.mean):
            raise ValueError(f"view {self.name} is for {len(self.mean)} channels; the images have {images.shape[1]}.")
        mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (self._adjust((images * std + mean).clamp(0.0, 1.0)).clamp(0.0, 1.0) - mean) / std

    def _by_slice(self, function: Callable[["Tensor"], "Tensor"], images: "Tensor") -> "Tensor":
        """Whole volumes as one image (N, C, D H, W): their mean grey is that of all slices."""
        return function(images.flatten(2, -2)).reshape(images.shape)

    def _adjust(self, images: "Tensor") -> "Tensor":
        """Change the colours of images in [0, 1]."""
        raise NotImplementedError


class Brightness(ColourView, label="brightness"):
    """Add a constant, such as 0.1 for a tenth of the way from black to white, and clip to [0, 1].

    `mean` and `std` tell how the images were normalised, one entry per channel, if they were.
    """

    amount: Signed

    def _adjust(self, images: "Tensor") -> "Tensor":
        return images + self.amount


class Contrast(ColourView, label="contrast"):
    """Scale the distance of every pixel from the image's mean grey, and clip to [0, 1].

    A `factor` above 1 is more contrast; `mean` and `std` as in :class:`Brightness`.
    """

    factor: Positive

    def _adjust(self, images: "Tensor") -> "Tensor":
        shares = _GREY if images.shape[1] == 3 else [1 / images.shape[1]] * images.shape[1]
        grey = (images.mean((2, 3), keepdim=True) * images.new_tensor(shares).view(1, -1, 1, 1)).sum(1, keepdim=True)
        return grey + self.factor * (images - grey)


class Gamma(ColourView, label="gamma"):
    """Raise every pixel to a power: above 1 darker, below 1 lighter; `mean` and `std` as in :class:`Brightness`."""

    gamma: Positive

    def _adjust(self, images: "Tensor") -> "Tensor":
        """Clip first: a power of a negative number is NaN."""
        return images.clamp(0.0, 1.0) ** self.gamma


def _warp(images: "Tensor", matrix: Array, padding: str) -> "Tensor":
    """Images whose pixel at (x, y) is that of the given images at `matrix` (x, y, 1), bilinear between pixels."""
    import torch

    sizes = images.shape[-1], images.shape[-2]  # width and height
    x, y = (torch.arange(size, dtype=images.dtype, device=images.device) for size in sizes)
    # -1 and 1 are the centres of the outermost pixels, where reflections turn, or else edges, for axes of length 1
    by_centre = padding != "zeros"
    lengths = np.maximum(np.array(sizes)[:, None] - by_centre, 1)
    scaled = (2 * matrix[:2] + [0, 0, not by_centre]) / lengths - [0, 0, 1]
    grid = torch.stack([a * x + (b * y[:, None] + c) for a, b, c in scaled.tolist()], dim=-1)  # (H, W, 2)
    grids = grid.expand(images.shape[0], -1, -1, -1)
    return torch.nn.functional.grid_sample(images, grids, padding_mode=padding, align_corners=by_centre)


def _matrix(xx: float, xy: float, yx: float, yy: float, x: float, y: float) -> Array:
    """An affine map of points (x, y, 1)."""
    return np.array([[xx, xy, x], [yx, yy, y], [0.0, 0.0, 1.0]])


def _about_centre(degrees: float, factor: float, height: int, width: int) -> Array:
    """A turn and a zoom of points: y points down, so a turn to the left has the sine above."""
    cos, sin = factor * math.cos(math.radians(degrees)), factor * math.sin(math.radians(degrees))
    x, y = (width - 1) / 2, (height - 1) / 2
    return _matrix(cos, sin, -sin, cos, x - cos * x - sin * y, y + sin * x - cos * y)
