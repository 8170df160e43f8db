"""The paper's data sets by name: each is found in the data folder in whichever layout is there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vbtta.datasets.images import ImageData, data_folder
from vbtta.datasets.official import (
    load_cifar_batches,
    load_cifar_human_labels,
    load_food_folder,
    load_idx_pair,
    load_utkface_folder,
)
from vbtta.datasets.parquet import load_parquet

__all__ = ["load_cifar10", "load_cifar10n", "load_food101", "load_mnist", "load_utkface"]

Split = Literal["train", "test"]


def load_mnist(split: Split, folder: str | os.PathLike[str] | None = None) -> ImageData:
    """MNIST: 28 x 28 grey digits.

    Parameters
    ----------
    split : {"train", "test"}
        60,000 or 10,000 images.
    folder : path, optional
        The data folder, by default ``VBTTA_DATA``, with ``mnist-train.parquet`` and ``mnist-test.parquet``,
        or the idx files (also gzipped, or in torchvision's ``MNIST/raw``).

    Returns
    -------
    ImageData
        Images (N, 1, 28, 28).
    """
    root = _checked(split, folder)
    parquet = root / f"mnist-{split}.parquet"
    if parquet.is_file():
        return load_parquet(parquet, mode="L")
    part = "train" if split == "train" else "t10k"
    places = [root / "MNIST" / "raw", root / "mnist", root]
    endings = [f"{dash}{kind}-ubyte{gz}" for dash in "-." for kind in ("idx{}",) for gz in ("", ".gz")]
    images = _first(place / f"{part}-images{ending.format(3)}" for place in places for ending in endings)
    labels = _first(place / f"{part}-labels{ending.format(1)}" for place in places for ending in endings)
    if images is None or labels is None:
        raise _absent("MNIST", root, [parquet.name, f"{part}-images-idx3-ubyte and {part}-labels-idx1-ubyte"])
    return load_idx_pair(images, labels)


def load_cifar10(split: Split, folder: str | os.PathLike[str] | None = None) -> ImageData:
    """CIFAR-10 with its clean labels only: 32 x 32 colour images of ten classes.

    Parameters
    ----------
    split : {"train", "test"}
        50,000 or 10,000 images.
    folder : path, optional
        The data folder, by default ``VBTTA_DATA``, with ``cifar10-test.parquet`` and
        ``cifar10n-train.parquet``, or the official folder ``cifar-10-batches-py``.

    Returns
    -------
    ImageData
        Images (N, 3, 32, 32).
    """
    root = _checked(split, folder)
    parquet = root / ("cifar10-test.parquet" if split == "test" else "cifar10n-train.parquet")
    if parquet.is_file():
        return dataclasses.replace(load_parquet(parquet), extra={})
    if (root / "cifar-10-batches-py").is_dir():
        return load_cifar_batches(root / "cifar-10-batches-py", split)
    raise _absent("CIFAR-10", root, [parquet.name, "cifar-10-batches-py/"])


def load_cifar10n(folder: str | os.PathLike[str] | None = None) -> ImageData:
    """CIFAR-10N: the training images of CIFAR-10 with three human labels each.

    Parameters
    ----------
    folder : path, optional
        The data folder, by default ``VBTTA_DATA``, with ``cifar10n-train.parquet``, or the official folder
        ``cifar-10-batches-py`` and ``CIFAR-10_human.pt``.

    Returns
    -------
    ImageData
        ``labels`` are the clean ones; ``extra`` has label_1, label_2, label_3 (three people),
        aggre_label (their majority) and worse_label (a wrong one of the three where there is one: it was
        chosen with the clean label in view, so do not treat it as an annotator).

    References
    ----------
    Wei, Zhu, Cheng, Liu, Niu, Liu: Learning with noisy labels revisited: a study using real-world human
    annotations, ICLR 2022.
    """
    root = data_folder(folder)
    parquet = root / "cifar10n-train.parquet"
    if parquet.is_file():
        return load_parquet(parquet)
    human = _first([root / "CIFAR-10_human.pt", root / "cifar-10-batches-py" / "CIFAR-10_human.pt"])
    if human is None or not (root / "cifar-10-batches-py").is_dir():
        raise _absent("CIFAR-10N", root, [parquet.name, "cifar-10-batches-py/ and CIFAR-10_human.pt"])
    data = load_cifar_batches(root / "cifar-10-batches-py", "train")
    columns = load_cifar_human_labels(human)
    if not np.array_equal(columns.pop("clean_label"), data.labels):
        raise ValueError(
            f"the clean labels in {human} are not those of the images: one of the two is in another order."
        )
    return dataclasses.replace(data, extra=columns)


def load_utkface(split: Split, folder: str | os.PathLike[str] | None = None, *, size: int | None = None) -> ImageData:
    """UTKFace: faces with the age in years; byte-identical copies are left out (many have another age).

    Parameters
    ----------
    split : {"train", "test"}
        A fixed split by file name, about 80 to 20.
    folder : path, optional
        The data folder, by default ``VBTTA_DATA``, with ``utkface.parquet``, or a folder ``UTKFace`` of
        image files.
    size : int, optional
        Side length to resize to; by default 64.

    Returns
    -------
    ImageData
        ``labels`` are ages; ``extra["path"]`` has the file names.
    """
    root = _checked(split, folder)
    if (root / "utkface.parquet").is_file():
        return load_parquet(root / "utkface.parquet", label="age", size=size, keep={"split": split, "duplicate_of": ""})
    if (root / "UTKFace").is_dir():
        return load_utkface_folder(root / "UTKFace", split, size=size or 64)
    raise _absent("UTKFace", root, ["utkface.parquet", "UTKFace/"])


def load_food101(
    split: Split,
    folder: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    classes: Sequence[str] | int | None = None,
) -> ImageData:
    """Food-101: photographs of dishes, cropped to their centre square; training labels are noisy.

    Parameters
    ----------
    split : {"train", "test"}
        The authors' split.
    folder : path, optional
        The data folder, by default ``VBTTA_DATA``, with the official folder ``food-101``, or with
        ``food101-10.parquet``, a sample of its first ten classes.
    size : int, optional
        Side length to resize to; by default 64.
    classes : sequence of str or int, optional
        Names of the classes to keep, or the first so many; by default all. Only with the official folder.

    Returns
    -------
    ImageData
        ``extra["path"]`` has the file names.

    References
    ----------
    Bossard, Guillaumin, Van Gool: Food-101, mining discriminative components with random forests, ECCV 2014.
    """
    root = _checked(split, folder)
    if (root / "food-101").is_dir():
        return load_food_folder(root / "food-101", split, size=size or 64, classes=classes)
    if (root / "food101-10.parquet").is_file():
        if classes not in (None, 10):
            raise ValueError(f"classes={classes!r} needs the official folder food-101; the sample has ten classes.")
        return load_parquet(root / "food101-10.parquet", size=size, keep={"split": split})
    raise _absent("Food-101", root, ["food-101/", "food101-10.parquet"])


def _checked(split: str, folder: str | os.PathLike[str] | None) -> Path:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test'; got {split!r}.")
    return data_folder(folder)


def _first(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _absent(name: str, root: Path, choices: Sequence[str]) -> FileNotFoundError:
    return FileNotFoundError(
        f"{name} is not in {root}: expected {', or '.join(choices)}. Put it there, or pass another folder "
        f"(folder=... or VBTTA_DATA)."
    )
