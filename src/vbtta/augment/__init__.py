"""Views of the inputs: the protocol, the built-in views, and other libraries' transforms as views.

Views of any array (NumPy or torch) need NumPy only; the image views load torch on first use.
"""

from vbtta._support.random import RowStreams
from vbtta.augment.arrays import Affine, CutMix, FeatureDropout, GaussianNoise, Identity, Mixup, Pool
from vbtta.augment.base import Augmentation, Chain, apply_view, invert_view
from vbtta.augment.foreign import as_view, as_views
from vbtta.augment.images import (
    Blur,
    Brightness,
    Contrast,
    Crop,
    Flip,
    Gamma,
    HorizontalFlip,
    Rotate,
    Rotate90,
    Shift,
    VerticalFlip,
    Zoom,
)  # fmt: skip
from vbtta.augment.keypoints import Keypoints, keypoint_views
from vbtta.augment.serial import load_views, save_views
from vbtta.augment.sets import d4, five_crop, flips, standard_images, volume_flips

__all__ = [
    "Affine", "Augmentation", "Blur", "Brightness", "Chain", "Contrast", "Crop", "CutMix",
    "FeatureDropout", "Flip", "Gamma", "GaussianNoise", "HorizontalFlip", "Identity", "Keypoints", "Mixup", "Pool",
    "Rotate", "Rotate90", "RowStreams", "Shift", "VerticalFlip", "Zoom", "apply_view", "as_view", "as_views", "d4",
    "five_crop", "flips", "invert_view", "keypoint_views", "load_views", "save_views",
    "standard_images", "volume_flips",
]  # fmt: skip
