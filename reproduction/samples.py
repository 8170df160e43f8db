"""The paper's image data sets cut into training, calibration and test parts, and made-up stand-ins for quick runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from reproduction.datasets import load_cifar10, load_cifar10n, load_food101, load_mnist, load_utkface
from reproduction.records import DataMissing, Places
from reproduction.store import cached_arrays, fingerprint

Images = NDArray[np.uint8]
DataSet = Literal["mnist", "cifar10n", "food101", "utkface"]
AGE_NOISE = 5.0  # the paper's N(y, 5), read as a standard deviation
_CLASSES = 10


@dataclass(frozen=True)
class SampleConfig:
    """Which images, and how many of them for each part (fewer where the data set has fewer)."""

    data_set: DataSet
    seed: int  # decides the split, and which of several labels is trained on
    n_training: int  # from the training split, as the calibration part
    n_calibration: int
    n_test: int
    size: int = 32  # side length: CIFAR-10 is cropped, Food-101 and UTKFace are resized, MNIST stays as it is
    synthetic: bool = False  # patterns in noise of the same kind instead of the data set
    one_split: ClassVar[bool] = False  # whether all seeds have the same images in each part


@dataclass(frozen=True)
class OneSplitConfig(SampleConfig):
    """The same images in each part for all seeds: the seed decides the labels that are trained on, and second ages."""

    one_split: ClassVar[bool] = True


@dataclass(frozen=True)
class Sample:
    """Images (N, channels, H, W) and labels of one trial.

    The network is trained on `images` with one noisy target each, (N,); weights are fitted on the `calibration`
    images, other training images, with all labels they carry, (N, J); `truth` is that of the test images, (N,).
    `outputs` is the number of classes, 1 in regression.
    """

    task: Literal["classification", "regression"]
    outputs: int
    images: Images
    targets: NDArray[Any]
    calibration: Images
    labels: NDArray[Any]
    test: Images
    truth: NDArray[Any]


@dataclass(frozen=True)
class _Source:
    """A whole data set; `people` are all labels that its training images carry, (N, J)."""

    images: Images
    people: NDArray[Any]
    test: Images
    truth: NDArray[Any]


def draw_sample(config: SampleConfig, places: Places) -> Sample:
    """Draw the parts of a trial; raises DataMissing if the data set is not in the data folder.

    Examples
    --------
    >>> config = SampleConfig("utkface", 0, n_training=20, n_calibration=6, n_test=5, size=8, synthetic=True)
    >>> sample = draw_sample(config, Places())
    >>> sample.task, sample.images.shape, sample.labels.shape, sample.truth.shape
    ('regression', (20, 3, 8, 8), (6, 2), (5,))
    """
    number = list(_LOADERS).index(config.data_set)
    rng = np.random.default_rng([config.seed, number])
    source = _synthetic(config, rng) if config.synthetic else _load(config, places, rng)
    split = np.random.default_rng([0, number]) if config.one_split else rng
    order = split.permutation(len(source.images))
    calibration = np.sort(order[: config.n_calibration])
    training = np.sort(order[config.n_calibration :][: config.n_training])
    chosen = rng.integers(source.people.shape[1], size=len(training))  # which of an image's labels is trained on
    test = np.sort(split.permutation(len(source.test))[: config.n_test])
    regression = config.data_set == "utkface"
    return Sample(
        "regression" if regression else "classification",
        1 if regression else int(source.people.max()) + 1,
        source.images[training],
        source.people[training, chosen],
        source.images[calibration],
        source.people[calibration],
        source.test[test],
        source.truth[test],
    )


def _load(config: SampleConfig, places: Places, rng: np.random.Generator) -> _Source:
    if places.data is None:
        raise DataMissing(f"{config.data_set}: no data folder; pass --data or set VBTTA_DATA.")
    folder, load = places.data, _LOADERS[config.data_set]
    try:
        source = _Source(**cached_arrays(_cache(config, folder, places.cache), lambda: vars(load(folder, config.size))))
    except FileNotFoundError as error:
        raise DataMissing(str(error)) from error
    if config.data_set == "utkface":
        source = replace(source, people=_two_ages(source.people[:, 0], rng))
    return source


def _cache(config: SampleConfig, folder: Path, cache: Path | None) -> Path | None:
    """The file of decoded images: decoding takes longer than training a small network."""
    if cache is None:
        return None
    files = sorted((file.name, file.stat().st_mtime) for file in folder.iterdir())
    name = fingerprint(config.data_set, config.size, str(folder.resolve()), files)
    return cache / "images" / f"{config.data_set}-{name}.npz"


def _mnist(folder: Path, size: int) -> _Source:
    source, test = load_mnist("train", folder), load_mnist("test", folder)
    return _Source(source.images, source.labels[:, None], test.images, test.labels)


def _cifar10n(folder: Path, size: int) -> _Source:
    source, test = load_cifar10n(folder), load_cifar10("test", folder)
    people = np.stack([source.extra[f"label_{person}"] for person in (1, 2, 3)], axis=1)
    return _Source(_centre(source.images, size), people, _centre(test.images, size), test.labels)


def _food101(folder: Path, size: int) -> _Source:
    source, test = load_food101("train", folder, size=size), load_food101("test", folder, size=size)
    seen = {image.tobytes() for image in test.images}
    source = source.take([image.tobytes() not in seen for image in source.images])  # a few copies of test images
    return _Source(source.images, source.labels[:, None], test.images, test.labels)


def _utkface(folder: Path, size: int) -> _Source:
    source, test = load_utkface("train", folder, size=size), load_utkface("test", folder, size=size)
    return _Source(source.images, source.labels[:, None], test.images, test.labels.astype(np.float64))


_LOADERS: dict[str, Callable[[Path, int], _Source]] = {
    "mnist": _mnist,
    "cifar10n": _cifar10n,
    "food101": _food101,
    "utkface": _utkface,
}


def _centre(images: Images, size: int) -> Images:
    """Cut a square out of the middle."""
    edge = max(0, (images.shape[2] - size) // 2)
    return np.ascontiguousarray(images[:, :, edge : edge + size, edge : edge + size])


def _two_ages(age: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the age and a second, noisy label, (N, 2)."""
    return np.stack([age, age + AGE_NOISE * rng.standard_normal(len(age))], axis=1)


def _synthetic(config: SampleConfig, rng: np.random.Generator) -> _Source:
    """Ten patterns in noise, or, for ages, one pattern whose strength is the age."""
    n_training = config.n_training + config.n_calibration
    total = n_training + config.n_test
    channels = 1 if config.data_set == "mnist" else 3
    shape = (channels, config.size, config.size)
    patterns = np.kron(rng.uniform(-1, 1, (_CLASSES, channels, 4, 4)), np.ones((config.size // 4, config.size // 4)))
    if config.data_set == "utkface":
        truth: NDArray[Any] = rng.uniform(1, 100, total)
        signal = (truth[:, None, None, None] / 50 - 1) * patterns[0]
        people = _two_ages(truth, rng)
    else:
        truth = rng.integers(_CLASSES, size=total)
        signal = patterns[truth]
        n_people = 3 if config.data_set == "cifar10n" else 1
        wrong = rng.random((total, n_people)) < (0.2 if n_people > 1 else 0.0)
        people = np.where(wrong, rng.integers(_CLASSES, size=wrong.shape), truth[:, None])
    pixels = 128 + 60 * signal + 60 * rng.standard_normal((total, *shape))
    images = np.clip(pixels, 0, 255).astype(np.uint8)
    return _Source(images[:n_training], people[:n_training], images[n_training:], truth[n_training:])
