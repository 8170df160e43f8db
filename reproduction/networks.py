"""Networks on images: sizes of samples and networks in each profile, and predictions under views, both cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reproduction.paper_views import mixup_and_cutmix
from reproduction.pretrained import FineTuned, PretrainedConfig, fine_tune
from reproduction.pretrained import digest as pretrained_digest
from reproduction.records import Places
from reproduction.samples import OneSplitConfig, Sample, SampleConfig, draw_sample
from reproduction.store import exclusive, fingerprint
from reproduction.training import ImageNetwork, TrainingConfig, train, unit_images
from vbtta import ViewPredictions, collect_views
from vbtta.augment import Augmentation, Identity

_FORMAT = 2  # part of the name of cached predictions: raise it when they would differ
_POOL = 2000  # training images that mixup and cutmix mix in
STRATEGIES: dict[str, tuple[str, ...]] = {
    "Mixup": ("mixup(0.1)", "mixup(0.5)", "mixup(0.9)"),
    "CutMix": ("cutmix(0.1)", "cutmix(0.5)", "cutmix(0.9)"),
}
STRATEGIES["Mixup + CutMix"] = STRATEGIES["Mixup"] + STRATEGIES["CutMix"]


@dataclass(frozen=True)
class NetworkConfig:
    """How the ResNet-18 of a data set is trained: Adam, a warm-up and a cosine, flips and shifts."""

    width: int = 64  # channels of its first stage, 64 in the usual network
    epochs: int = 200
    batch_size: int = 128
    learning_rate: float = 1e-3
    crop: int = 4  # largest random shift in pixels

    @property
    def described(self) -> str:
        """Size and training, for captions."""
        return f"width {self.width} (64 in the paper), {self.epochs} epochs (200)"

    def __post_init__(self) -> None:
        """Refuse a width of 4: torch 2.13's backward pass in channels-last order then writes out of bounds on a CPU."""
        if self.width < 8:
            raise ValueError(f"width must be at least 8; got {self.width}.")


@dataclass(frozen=True)
class ImageSetup:
    """A data set's sample, its network and the number of draws of each view."""

    sample: SampleConfig
    network: NetworkConfig | PretrainedConfig
    draws: int

    def at(self, seed: int) -> ImageSetup:
        """Return the same with another seed."""
        return replace(self, sample=replace(self.sample, seed=seed))


@dataclass(frozen=True)
class StepsTrial:
    """A setup with its seed, and the number of EM updates."""

    setup: ImageSetup
    steps: int


_SMALL = NetworkConfig(width=8, epochs=8, batch_size=32, learning_rate=3e-3, crop=1)
_FULL = NetworkConfig()
SETUPS: dict[str, dict[str, ImageSetup]] = {
    "smoke": {
        name: ImageSetup(SampleConfig(name, 0, 96, 60, 50, size=8, synthetic=True), _SMALL, draws=2)
        for name in ("cifar10n", "food101", "utkface")
    },
    "cpu": {
        "cifar10n": ImageSetup(
            SampleConfig("cifar10n", 0, 10_000, 800, 1000, size=24), NetworkConfig(16, 5, 128, 3e-3, 2), draws=4
        ),
        "food101": ImageSetup(
            SampleConfig("food101", 0, 4000, 800, 1000, size=24), NetworkConfig(16, 12, 64, 3e-3, 2), draws=4
        ),
        "utkface": ImageSetup(
            SampleConfig("utkface", 0, 12_000, 800, 1000, size=24), NetworkConfig(16, 3, 128, 3e-3, 2), draws=4
        ),
    },
    "pretrained": {
        "cifar10n": ImageSetup(
            OneSplitConfig("cifar10n", 0, 48_800, 1200, 1200),
            PretrainedConfig(size=128, small=96, epochs=5, mixup=0.2, copies=("plain", "cropped", "small")),
            draws=2,
        ),
        "food101": ImageSetup(
            OneSplitConfig("food101", 0, 2546, 1200, 1000, size=64),
            PretrainedConfig(size=192, small=128, epochs=8),
            draws=2,
        ),
        "utkface": ImageSetup(
            OneSplitConfig("utkface", 0, 14_000, 1200, 1200, size=64),
            PretrainedConfig(mixup=0.0, copies=("plain", "cropped", "small")),
            draws=2,
        ),
    },
    "paper": {
        "cifar10n": ImageSetup(SampleConfig("cifar10n", 0, 49_000, 1000, 10_000, size=32), _FULL, draws=32),
        "food101": ImageSetup(SampleConfig("food101", 0, 75_000, 2000, 25_250, size=64), _FULL, draws=32),
        "utkface": ImageSetup(SampleConfig("utkface", 0, 20_000, 1000, 5000, size=64), _FULL, draws=32),
    },
}


@dataclass(frozen=True)
class Trained:
    """A sample and the network that was trained on its training part; `key` names the network in the cache."""

    sample: Sample
    network: ImageNetwork | FineTuned
    key: str
    cache: Path | None

    @property
    def pool(self) -> torch.Tensor:
        """Training images in [0, 1] for mixup and cutmix."""
        return unit_images(self.sample.images[:: max(1, len(self.sample.images) // _POOL)][:_POOL])

    def views(
        self, images: NDArray[np.uint8], views: Sequence[Augmentation], *, draws: int, seed: int
    ) -> ViewPredictions:
        """Predictions for images (N, channels, H, W) under views of images in [0, 1], from the cache if there."""

        def collect() -> ViewPredictions:
            predictor = self.network.fast if isinstance(self.network, FineTuned) else self.network
            return collect_views(predictor, unit_images(images), views, draws=draws, batch_size=250, seed=seed)

        if self.cache is None:
            return collect()
        # The pool of mixup and cutmix follows from the network's training images.
        name = fingerprint(_FORMAT, self.key, _POOL, images, [repr(view) for view in views], draws, seed)
        path = self.cache / "views" / f"{name}.npz"
        with exclusive(path.parent, name):
            if path.is_file():
                return ViewPredictions.load(path)
            predictions = collect()
            predictions.save(path)
            return predictions


class PaperViews(NamedTuple):
    """Identity, three mixups and three cutmixes of the calibration and the test part of a sample."""

    sample: Sample
    calibration: ViewPredictions
    test: ViewPredictions

    def chosen(self, names: Sequence[str]) -> tuple[ViewPredictions, ViewPredictions]:
        """Return calibration and test views of these names."""
        return self.calibration.select(names), self.test.select(names)


def trained_network(config: SampleConfig, network: NetworkConfig | PretrainedConfig, places: Places) -> Trained:
    """Draw the sample and train its network, or load it from the cache; the sample's seed is the network's, too."""
    sample = draw_sample(config, places)
    if isinstance(network, PretrainedConfig):
        key = pretrained_digest(network, sample, config.seed)
        with exclusive(places.cache, key):
            tuned = fine_tune(network, sample, seed=config.seed, cache=places.cache, progress=True)
        return Trained(sample, tuned, key, places.cache)
    options, digits = asdict(network), config.data_set == "mnist"
    training = TrainingConfig(
        sample.task,
        "resnet18",
        sample.outputs,
        {"width": options.pop("width"), **({"channels": 1} if digits else {})},
        optimizer="adam",
        flip=not digits,
        seed=config.seed,
        **options,
    )
    folder = None if places.cache is None else places.cache / "checkpoints"
    key = training.digest(sample.images, sample.targets)
    with exclusive(folder, key):
        fitted = train(training, sample.images, sample.targets, cache=folder)
    return Trained(sample, fitted, key, places.cache)


def paper_views(setup: ImageSetup, places: Places) -> PaperViews:
    """Train the network of a setup and predict both held-out parts under the paper's views, or read the cache."""
    trained = trained_network(setup.sample, setup.network, places)
    views = [Identity(), *mixup_and_cutmix(trained.pool)]
    sample, seed = trained.sample, setup.sample.seed
    calibration = trained.views(sample.calibration, views, draws=setup.draws, seed=2 * seed)
    return PaperViews(sample, calibration, trained.views(sample.test, views, draws=setup.draws, seed=2 * seed + 1))
