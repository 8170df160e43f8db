"""The user's images and network for the quality benchmark: a folder of images by class, or a MedMNIST file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.train_models import Part, Prepared, image_views
from vbtta import ViewPredictions, collect_views
from vbtta.cli.files import load_predictor
from vbtta.data.images import decode_images

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
Split = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, channels, H, W) and classes (N,)


def prepare(source: Path, network: str, cache: Path, side: int) -> Prepared:
    """Predictions of a user's network under the benchmark's 25 views, from the cache or collected now.

    `source` is a folder with subfolders `val` and `test` of images by class, a folder of images by class (split in
    halves at random), or a MedMNIST .npz file; images that the network has not seen. `network` is
    "package.module:factory"; the network takes images (N, channels, H, W) in [0, 1] and returns logits. Classes are
    numbered in alphabetical order of their folders.
    """
    splits, classes = _medmnist(source) if source.suffix == ".npz" else _folder(source, side)
    predictor = load_predictor(network, None)
    parts = {}
    for part, (images, labels) in splits.items():
        first = _collect(predictor, images[:2], classes).outputs  # another network, or other weights, differ there
        described = f"{network} {image_views()!r} {images.shape}".encode()
        key = hashlib.sha256(described + first.tobytes() + images.tobytes()).hexdigest()[:16]
        path = cache / "own" / f"{source.stem}-{part}-{key}.npz"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _collect(predictor, images, classes).save(path)
        parts[part] = Part(ViewPredictions.load(path), {"clean": labels, "label_1": labels})
    n_outputs = parts["test"].predictions.outputs.shape[2]
    if n_outputs != len(classes):
        raise ValueError(f"--network must give {len(classes)} logits, one a class of {source}; it gives {n_outputs}")
    return Prepared(source.stem, "classification", parts)


def _collect(predictor: Any, images: NDArray[np.uint8], classes: list[str]) -> ViewPredictions:
    predictions = collect_views(predictor, images.astype(np.float32) / 255, image_views(), batch_size=100)
    return ViewPredictions(predictions.outputs, names=predictions.names, ids=np.arange(len(images)))


def _medmnist(path: Path) -> tuple[dict[str, Split], list[str]]:
    """Parts of a MedMNIST file: validation images to calibrate on, test images to score."""
    splits = {}
    with np.load(path, allow_pickle=False) as stored:
        for part, prefix in (("calibration", "val"), ("test", "test")):
            for key in (f"{prefix}_images", f"{prefix}_labels"):
                if key not in stored.files:
                    raise ValueError(f"{path} has no array {key!r}; it has {', '.join(stored.files)}")
            images, labels = stored[f"{prefix}_images"], stored[f"{prefix}_labels"]
            if labels.reshape(len(labels), -1).shape[1] != 1:
                raise ValueError(f"{path} has several labels an image; only one class an image can be compared")
            images = images[..., None] if images.ndim == 3 else images
            splits[part] = (np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels.reshape(-1).astype(np.int64))
    n_classes = 1 + max(int(labels.max()) for _, labels in splits.values())
    return splits, [str(number) for number in range(n_classes)]


def _folder(folder: Path, side: int) -> tuple[dict[str, Split], list[str]]:
    if not folder.is_dir():
        raise ValueError(f"--images must be a folder or an .npz file; {folder} is neither")
    if (folder / "val").is_dir() and (folder / "test").is_dir():
        classes = _classes(folder / "test")
        return {
            part: _read(folder / name, classes, side) for part, name in (("calibration", "val"), ("test", "test"))
        }, classes
    classes = _classes(folder)
    images, labels = _read(folder, classes, side)
    order = np.random.default_rng(0).permutation(len(images))
    halves = {"calibration": np.sort(order[: len(order) // 2]), "test": np.sort(order[len(order) // 2 :])}
    return {part: (images[rows], labels[rows]) for part, rows in halves.items()}, classes


def _classes(folder: Path) -> list[str]:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise ValueError(f"{folder} needs a subfolder for each of two classes or more; it has {len(classes)}")
    return classes


def _read(folder: Path, classes: list[str], side: int) -> Split:
    files = [
        (path, number)
        for number, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise ValueError(f"{folder} has no images in its class folders ({', '.join(_SUFFIXES)})")
    images = decode_images([path for path, _ in files], mode="RGB", size=side, where=str(folder))
    return images, np.array([number for _, number in files])
