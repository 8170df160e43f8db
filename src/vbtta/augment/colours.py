"""Views of images (N, C, H, W) that change colours: brightness, contrast, gamma; torch and kornia."""

__all__ = ["Brightness", "Contrast", "Gamma"]

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vbtta._support.extras import missing_extra
from vbtta.augment.arrays import check_floating, check_number
from vbtta.augment.base import number
from vbtta.augment.images import ImageView

try:
    import kornia.enhance
    import torch
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "torch") from error


@dataclass(frozen=True)
class ColourView(ImageView):
    """Base of the colour views, which need to know where black and white are.

    Images are taken to be in [0, 1]. If they were normalised, (image - mean) / std, give mean and std: the
    view then works on the image before normalisation.
    """

    mean: Sequence[float] | None = field(default=None, kw_only=True)
    std: Sequence[float] | None = field(default=None, kw_only=True)

    def check(self) -> None:
        """Refuse one of mean and std without the other, different lengths, and std that is not positive."""
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"{type(self).__name__}: give both mean and std, or neither.")
        if self.mean is not None and self.std is not None:
            mean, std = tuple(float(m) for m in self.mean), tuple(float(s) for s in self.std)
            if len(mean) != len(std) or min(std, default=0.0) <= 0:
                raise ValueError(
                    f"{type(self).__name__}: mean and std must have one entry per channel, std positive; "
                    f"got {mean} and {std}."
                )
            self.store(mean=mean, std=std)

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """Change the colours of the images before normalisation."""
        check_floating(self, images)
        if self.mean is None or self.std is None:
            return self.recolour(images)
        if images.shape[1] != len(self.mean):
            raise ValueError(
                f"view {self.name} has mean and std for {len(self.mean)} channels; the images have {images.shape[1]}."
            )
        mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        # Rounding may leave [0, 1] by a hair, and a power of a negative number is NaN.
        return (self.recolour((images * std + mean).clamp(0.0, 1.0)) - mean) / std

    def recolour(self, images: torch.Tensor) -> torch.Tensor:
        """Change the colours of images in [0, 1]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Brightness(ColourView):
    """Add a constant, and cut at 0 and 1.

    Parameters
    ----------
    amount : float
        What is added: 0.1 is a tenth of the way from black to white.
    mean, std : sequence of float, optional
        How the images were normalised, one entry per channel.

    Examples
    --------
    >>> view = Brightness(0.25)
    >>> view.name, view(torch.tensor([[[[0.0, 0.5, 1.0]]]])).flatten().tolist()
    ('brightness(+0.25)', [0.25, 0.75, 1.0])
    """

    amount: float

    def check(self) -> None:
        """Refuse an amount that is not finite."""
        check_number("Brightness", "amount", self.amount, above=-math.inf)
        super().check()

    def default_name(self) -> str:
        """Name the amount."""
        return f"brightness({number(self.amount, signed=True)})"

    def recolour(self, images: torch.Tensor) -> torch.Tensor:
        """Add the amount."""
        result: torch.Tensor = kornia.enhance.adjust_brightness(images, float(self.amount))
        return result


@dataclass(frozen=True)
class Contrast(ColourView):
    """Scale the distance of every pixel from the image's mean grey, and cut at 0 and 1.

    Parameters
    ----------
    factor : float
        Above 1 for more contrast.
    mean, std : sequence of float, optional
        How the images were normalised, one entry per channel.

    Examples
    --------
    >>> Contrast(2.0)(torch.tensor([[[[0.25, 0.5, 0.75]]]])).flatten().tolist()
    [0.0, 0.5, 1.0]
    """

    factor: float

    def check(self) -> None:
        """Refuse a factor that is not positive."""
        check_number("Contrast", "factor", self.factor, above=0.0)
        super().check()

    def default_name(self) -> str:
        """Name the factor."""
        return f"contrast({number(self.factor)})"

    def recolour(self, images: torch.Tensor) -> torch.Tensor:
        """Scale the contrast."""
        result: torch.Tensor = kornia.enhance.adjust_contrast_with_mean_subtraction(images, float(self.factor))
        return result


@dataclass(frozen=True)
class Gamma(ColourView):
    """Raise every pixel to a power: above 1 darker, below 1 lighter.

    Parameters
    ----------
    gamma : float
        The power.
    mean, std : sequence of float, optional
        How the images were normalised, one entry per channel.

    Examples
    --------
    >>> Gamma(2.0)(torch.tensor([[[[0.0, 0.5, 1.0]]]])).flatten().tolist()
    [0.0, 0.25, 1.0]
    """

    gamma: float

    def check(self) -> None:
        """Refuse a power that is not positive."""
        check_number("Gamma", "gamma", self.gamma, above=0.0)
        super().check()

    def default_name(self) -> str:
        """Name the power."""
        return f"gamma({number(self.gamma)})"

    def recolour(self, images: torch.Tensor) -> torch.Tensor:
        """Raise to the power."""
        result: torch.Tensor = kornia.enhance.adjust_gamma(images.clamp(0.0, 1.0), float(self.gamma))
        return result
