"""Networks on real data, small and pretrained, and their view predictions, cached for the quality benchmark.

    python -m benchmarks.train_models --data DATA --cache .cache --seeds 0 1 2 --jobs 2

Each data set and seed gets a folder ``<name>-seed<seed>`` in the cache with ``dev.npz``, ``calibration.npz``
and ``test.npz`` (ViewPredictions; ids are rows of the source file) and ``labels.npz`` (columns
``<part>_clean``, ``<part>_label_1``, ...). Networks never see an image of these parts. Choices are made on
``dev``; ``test`` is for the final comparison only. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from reproduction.datasets import ImageData, load_cifar10, load_cifar10n, load_food101, load_mnist, load_utkface
from reproduction.networks import SETUPS, Trained, trained_network
from reproduction.pretrained import FineTuned
from reproduction.records import Places
from reproduction.samples import Sample
from reproduction.training import ImageNetwork, TrainingConfig, train
from vbtta._support.files import atomic_path
from vbtta.augment import images
from vbtta.augment.base import BuiltIn, Chain
from vbtta.augment.serial import describe
from vbtta.augment.sets import standard_images
from vbtta.data.predictions import ViewPredictions

__all__ = ["BENCHMARKS", "PARTS", "PRETRAINED", "Part", "Prepared", "image_views", "is_ready", "prepare", "prepare_all"]

PARTS = ("dev", "calibration", "test")
_FORMAT = 2  # raise it when splits or labels change
Columns = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """View predictions of one part, with its labels: ``clean`` and, except in test, ``label_1``, ..."""

    predictions: ViewPredictions
    labels: Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set ready for the comparison of methods: parts dev, calibration and test."""

    name: str
    task: Literal["classification", "regression"]
    parts: Mapping[str, Part]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Training images with one noisy target each, and the parts that are held out, with their labels."""

    images: NDArray[np.uint8]
    targets: NDArray[Any]
    parts: Mapping[str, tuple[ImageData, Columns]]


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    source: Callable[[str, int], _Source]
    config: TrainingConfig


def prepare(name: str, seed: int, data: str, cache: str, *, threads: int | None = 1) -> Prepared:
    """Train the network of a data set and collect its views, or read both from the cache."""
    folder = Path(cache) / f"{name}-seed{seed}"
    described = _describe(name, seed)
    note = folder / "config.json"
    if not note.is_file() or note.read_text() != described:  # other views or another network: start again
        for part in (*PARTS, "labels"):
            (folder / f"{part}.npz").unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(described)
    if not all((folder / f"{part}.npz").is_file() for part in (*PARTS, "labels")):
        if threads is not None:
            torch.set_num_threads(threads)
        create = _create_pretrained if name in PRETRAINED else _create
        create(name, seed, folder, data, Path(cache))
    with np.load(folder / "labels.npz", allow_pickle=False) as stored:
        labels = {key: stored[key] for key in stored.files}
    parts = {
        part: Part(
            ViewPredictions.load(folder / f"{part}.npz"),
            {key.removeprefix(f"{part}_"): column for key, column in labels.items() if key.startswith(f"{part}_")},
        )
        for part in PARTS
    }
    return Prepared(name, "regression" if name.startswith("utkface") else "classification", parts)


def is_ready(name: str, seed: int, cache: str) -> bool:
    """Whether the network of a data set is trained and its views are in the cache."""
    folder = Path(cache) / f"{name}-seed{seed}"
    note = folder / "config.json"
    described = _describe(name, seed)
    files = [folder / f"{part}.npz" for part in (*PARTS, "labels")]
    return note.is_file() and note.read_text() == described and all(file.is_file() for file in files)


def image_views() -> list[BuiltIn]:
    """Deterministic views: the common set, some stronger ones, and some that should do harm."""
    stronger = [
        images.Rotate(25.0),
        images.Rotate(-25.0),
        images.Crop("center", 0.75),
        Chain((images.HorizontalFlip(), images.Rotate(10.0))),
    ]
    harmful = [images.VerticalFlip(), images.Rotate90(1), images.Blur(2.0)]
    return [*standard_images(), *stronger, *harmful]


def cifar10n(data: str, seed: int) -> _Source:
    """40,000 images with one of their three human labels; 5,000 for dev and 5,000 to calibrate."""
    source = load_cifar10n(data)
    people = np.stack([source.extra[f"label_{person}"] for person in (1, 2, 3)], axis=1)  # (N, 3)
    rng = np.random.default_rng(seed)
    dev, calibration, training = _split(rng, len(source), 5000, 5000)
    chosen = people[np.arange(len(source)), rng.integers(3, size=len(source))]
    columns = {"clean": source.labels, **{f"label_{person}": people[:, person - 1] for person in (1, 2, 3)}}
    parts = _held_out(source, columns, load_cifar10("test", data), dev, calibration)
    return _Source(source.images[training], chosen[training], parts)


def utkface(data: str, seed: int) -> _Source:
    """Ages, each with a second label of standard deviation 5 years; trained on one of the two."""
    source = load_utkface("train", data)
    rng = np.random.default_rng(seed)
    dev, calibration, training = _split(rng, len(source), 1500, 3000)
    second = source.labels + 5.0 * rng.standard_normal(len(source))
    chosen = np.where(rng.random(len(source)) < 0.5, source.labels, second)
    columns = {"clean": source.labels, "label_1": source.labels.astype(np.float64), "label_2": second}
    parts = _held_out(source, columns, load_utkface("test", data), dev, calibration)
    return _Source(source.images[training], chosen[training], parts)


def food101(data: str, seed: int) -> _Source:
    """Ten classes of Food-101: one label an image, some of them wrong by design of the data set."""
    source, test = load_food101("train", data), load_food101("test", data)
    seen = {image.tobytes() for image in test.images}
    source = source.take([image.tobytes() not in seen for image in source.images])  # a few copies of test images
    dev, calibration, training = _split(np.random.default_rng(seed), len(source), 500, 1000)
    parts = _held_out(source, {"clean": source.labels, "label_1": source.labels}, test, dev, calibration)
    return _Source(source.images[training], source.labels[training], parts)


def mnist1000(data: str, seed: int) -> _Source:
    """1,000 training digits, labelled by one of three simulated annotators of accuracy 0.9, 0.8 and 0.7."""
    source = load_mnist("train", data)
    rng = np.random.default_rng(seed)
    source = source.take(np.sort(rng.permutation(len(source))[:7000]))
    dev, calibration, training = _split(rng, len(source), 5000, 1000)
    people = _annotate(rng, source.labels, (0.9, 0.8, 0.7))
    chosen = people[np.arange(len(source)), rng.integers(3, size=len(source))]
    columns = {"clean": source.labels, **{f"label_{person}": people[:, person - 1] for person in (1, 2, 3)}}
    parts = _held_out(source, columns, load_mnist("test", data), dev, calibration)
    return _Source(source.images[training], chosen[training], parts)


BENCHMARKS: dict[str, _Benchmark] = {
    "cifar10n": _Benchmark(
        cifar10n,
        TrainingConfig("classification", "small_resnet", 10, {"width": 16}, epochs=15, learning_rate=0.2),
    ),
    "utkface": _Benchmark(
        utkface,
        TrainingConfig(
            "regression",
            "small_resnet",
            1,
            {"width": 16, "stem_stride": 2},
            epochs=25,
            optimizer="adam",
            learning_rate=3e-3,
            weight_decay=0.05,
            loss="absolute",
        ),
    ),
    "food101": _Benchmark(
        food101,
        TrainingConfig(
            "classification",
            "small_resnet",
            10,
            {"width": 16, "stem_stride": 2},
            epochs=60,
            batch_size=64,
            learning_rate=0.1,
            weight_decay=1e-3,
            crop=8,
        ),
    ),
    "mnist1000": _Benchmark(
        mnist1000,
        TrainingConfig(
            "classification",
            "convnet",
            10,
            epochs=30,
            batch_size=50,
            optimizer="adam",
            learning_rate=2e-3,
            weight_decay=0.05,
            crop=2,
            flip=False,
        ),
    ),
}


# EfficientNet-Lite0, fine-tuned as in the profile `pretrained` of the reproduction.


def _light(name: str) -> _Benchmark:
    """Half the width, a third of the epochs, 8,000 training images at most; parts of 500, 1,500 and 2,000."""
    full = BENCHMARKS[name]
    options = {**full.config.network_options, "width": full.config.network_options["width"] // 2}

    def source(data: str, seed: int) -> _Source:
        whole, rng = full.source(data, seed), np.random.default_rng(seed)
        chosen, parts = np.sort(rng.permutation(len(whole.images))[:8_000]), {}
        for part, (images_of_part, columns) in whole.parts.items():
            rows = np.sort(rng.permutation(len(images_of_part))[: _LIGHT_PARTS[part]])
            parts[part] = images_of_part.take(rows), {key: column[rows] for key, column in columns.items()}
        return _Source(whole.images[chosen], whole.targets[chosen], parts)

    return _Benchmark(source, replace(full.config, network_options=options, epochs=-(-full.config.epochs // 3)))


_LIGHT_PARTS = {"dev": 500, "calibration": 1_500, "test": 2_000}
BENCHMARKS |= {f"{name}-light": _light(name) for name in ("cifar10n", "utkface", "food101")}
PRETRAINED = {f"{name}-pretrained": setup for name, setup in SETUPS["pretrained"].items()}
_DEV_IMAGES = 200  # of the images that those networks have not seen


def _describe(name: str, seed: int) -> str:
    """Describe all that the cached predictions depend on."""
    views = {"views": [describe(view) for view in image_views()]}
    config: Any = PRETRAINED[name].at(seed) if name in PRETRAINED else replace(BENCHMARKS[name].config, seed=seed)
    return json.dumps({"format": _FORMAT, "config": dataclasses.asdict(config), **views}, sort_keys=True)


def _create(name: str, seed: int, folder: Path, data: str, cache: Path) -> None:
    source = BENCHMARKS[name].source(data, seed)
    config = replace(BENCHMARKS[name].config, seed=seed)
    network = train(config, source.images, source.targets, cache=cache / "checkpoints", progress=True)
    _save_labels(folder, {part: source.parts[part][1] for part in PARTS})
    for part in PARTS:
        _save_views(folder, part, partial(_collect, network, source.parts[part][0]))


def _create_pretrained(name: str, seed: int, folder: Path, data: str, cache: Path) -> None:
    """Parts dev and calibration are the images that the reproduction calibrates on."""
    setup = PRETRAINED[name].at(seed)
    trained = trained_network(setup.sample, setup.network, Places(Path(data), cache))
    assert isinstance(trained.network, FineTuned)
    sample, people = trained.sample, trained.sample.labels.T
    given = {
        "clean": _clean(setup.sample.data_set, sample, data),
        **{f"label_{person}": column for person, column in enumerate(people, start=1)},
    }
    order = np.random.default_rng(0).permutation(len(sample.calibration))  # rows of the sources are sorted by class
    rows = {"dev": np.sort(order[:_DEV_IMAGES]), "calibration": np.sort(order[_DEV_IMAGES:])}
    labels = {part: {key: column[rows[part]] for key, column in given.items()} for part in rows}
    _save_labels(folder, {**labels, "test": {"clean": sample.truth}})
    (folder / "training.json").write_text(json.dumps({"processor_seconds": trained.network.seconds}))
    for part in PARTS:
        images = sample.test if part == "test" else sample.calibration[rows[part]]
        _save_views(folder, part, partial(_collect_pretrained, trained, images, cache))


def _clean(name: str, sample: Sample, data: str) -> NDArray[Any]:
    """True labels of the images to calibrate on: CIFAR-10's own, or the first given one."""
    if name != "cifar10n":
        return np.asarray(sample.labels[:, 0])
    source = load_cifar10n(data)
    known = {image.tobytes(): label for image, label in zip(source.images, source.labels, strict=True)}
    return np.array([known[image.tobytes()] for image in sample.calibration])


def _save_labels(folder: Path, parts: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    labels = {f"{part}_{key}": column for part, columns in parts.items() for key, column in columns.items()}
    with atomic_path(folder / "labels.npz") as temporary, temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **labels)


def _save_views(folder: Path, part: str, collect: Callable[[], ViewPredictions]) -> None:
    path = folder / f"{part}.npz"
    if not path.is_file():
        collect().save(path)
        print(f"{path} written", file=sys.stderr, flush=True)


def _collect_pretrained(trained: Trained, images: NDArray[np.uint8], cache: Path) -> ViewPredictions:
    """Views with the frozen blocks' maps from the cache, which networks of all seeds share."""
    network = trained.network
    assert isinstance(network, FineTuned)
    outputs, views = [], image_views()
    for view in views:
        maps = network.stored_maps(images, cache, repr(view), view)
        outputs.append(network.of_maps(maps))
    return ViewPredictions(np.stack(outputs, axis=1), names=[view.name for view in views])


def _collect(network: ImageNetwork, data: ImageData, batch_size: int = 250) -> ViewPredictions:
    views = image_views()
    outputs = []
    with torch.inference_mode():
        for start in range(0, len(data), batch_size):
            batch = torch.from_numpy(data.images[start : start + batch_size]).float() / 255
            outputs.append(torch.stack([network(view(batch)) for view in views], dim=1))  # (B, K, C)
    mean = torch.cat(outputs).numpy()  # (N, K, C)
    classes = list(data.classes) or None
    return ViewPredictions(mean, names=[view.name for view in views], ids=data.ids, classes=classes)


def _split(rng: np.random.Generator, n: int, n_dev: int, n_calibration: int) -> list[NDArray[np.intp]]:
    """Row numbers, sorted, for dev, calibration and training."""
    return [np.sort(rows) for rows in np.split(rng.permutation(n), [n_dev, n_dev + n_calibration])]


def _held_out(
    source: ImageData,
    columns: Columns,
    test: ImageData,
    dev: NDArray[np.intp],
    calibration: NDArray[np.intp],
) -> dict[str, tuple[ImageData, Columns]]:
    def part(rows: NDArray[np.intp]) -> tuple[ImageData, Columns]:
        return source.take(rows), {name: column[rows] for name, column in columns.items()}

    return {"dev": part(dev), "calibration": part(calibration), "test": (test, {"clean": test.labels})}


def _annotate(rng: np.random.Generator, labels: NDArray[np.int64], accuracies: Sequence[float]) -> NDArray[np.int64]:
    """Simulate labels (N, annotators); each annotator takes a class for one of two others."""
    n_classes = int(labels.max()) + 1
    people = np.empty((len(labels), len(accuracies)), dtype=np.int64)
    for person, accuracy in enumerate(accuracies):
        mistaken_for = rng.integers(1, n_classes, size=(n_classes, 2))  # offsets: never the digit itself
        offset = mistaken_for[labels, rng.integers(2, size=len(labels))]
        wrong = rng.random(len(labels)) >= accuracy
        people[:, person] = np.where(wrong, (labels + offset) % n_classes, labels)
    return people


def _summary(prepared: Prepared) -> str:
    """Score of the identity view on dev; the test part stays closed here."""
    dev = prepared.parts["dev"]
    identity = dev.predictions.select(["identity"]).outputs[:, 0]  # (N, C)
    if prepared.task == "classification":
        return f"dev accuracy {np.mean(identity.argmax(axis=1) == dev.labels['clean']):.4f}"
    return f"dev mean absolute error {np.abs(identity[:, 0] - dev.labels['clean']).mean():.3f}"


def _job(arguments: tuple[str, int, str, str]) -> str:
    name, seed, data, cache = arguments
    start = time.perf_counter()
    try:
        summary = _summary(prepare(name, seed, data, cache))
    except FileNotFoundError as error:
        summary = f"skipped: {error}"
    return f"{name} seed {seed}: {summary} ({time.perf_counter() - start:.0f} s)"


def prepare_all(names: Sequence[str], seeds: Sequence[int], data: str, cache: str, jobs: int) -> None:
    """Train what is not cached, several networks at a time with one thread each."""
    work = [(name, seed, data, cache) for seed in seeds for name in names if not is_ready(name, seed, cache)]
    if not work:
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for line in pool.map(_job, work):
            print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the benchmark's networks and cache their view predictions.")
    parser.add_argument(
        "names", nargs="*", help=f"data sets, by default all of {', '.join([*BENCHMARKS, *PRETRAINED])}"
    )
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder for networks and predictions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="networks trained at a time, one thread each")
    options = parser.parse_args()
    known = [*BENCHMARKS, *PRETRAINED]
    names = options.names or [name for name in known if not name.endswith("-light")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"unknown data sets {unknown}; choose from {', '.join(known)}")
    if not options.data or not Path(options.data).is_dir():
        print("no data folder: pass --data or set VBTTA_DATA; nothing was trained", file=sys.stderr)
        return 1
    prepare_all(names, options.seeds, options.data, options.cache, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
