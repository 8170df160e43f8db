"""Loaders for the paper's data sets, from their official archives or Hugging Face style parquet files."""

from vbtta.datasets.images import ImageData
from vbtta.datasets.named import load_cifar10, load_cifar10n, load_food101, load_mnist, load_utkface
from vbtta.datasets.official import load_image_folder
from vbtta.datasets.parquet import load_parquet

__all__ = [
    "ImageData",
    "load_cifar10",
    "load_cifar10n",
    "load_food101",
    "load_image_folder",
    "load_mnist",
    "load_parquet",
    "load_utkface",
]
