"""What the experiments on photographs share: sizes of samples and networks in each profile, and the paper's views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vbtta.augment import Identity
from vbtta.augment.base import BuiltIn
from vbtta.augment.mixing import Pool
from vbtta.augment.sets import paper_mixup_cutmix
from vbtta.experiments.item import Places
from vbtta.experiments.network_views import NetworkConfig, Trained, trained_network
from vbtta.experiments.samples import Sample, SampleConfig
from vbtta.predictions import ViewPredictions

__all__ = ["SETUPS", "STRATEGIES", "ImageSetup", "PaperViews", "paper_views"]

STRATEGIES: dict[str, tuple[str, ...]] = {
    "Mixup": ("mixup(0.1)", "mixup(0.5)", "mixup(0.9)"),
    "CutMix": ("cutmix(0.1)", "cutmix(0.5)", "cutmix(0.9)"),
}
STRATEGIES["Mixup + CutMix"] = STRATEGIES["Mixup"] + STRATEGIES["CutMix"]


@dataclass(frozen=True)
class ImageSetup:
    """A data set's sample, its network and the number of draws of each view."""

    sample: SampleConfig
    network: NetworkConfig
    draws: int

    def at(self, seed: int) -> ImageSetup:
        """Return the same with another seed."""
        return replace(self, sample=replace(self.sample, seed=seed))


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
    "paper": {
        "cifar10n": ImageSetup(SampleConfig("cifar10n", 0, 49_000, 1000, 10_000, size=32), _FULL, draws=32),
        "food101": ImageSetup(SampleConfig("food101", 0, 75_000, 2000, 25_250, size=64), _FULL, draws=32),
        "utkface": ImageSetup(SampleConfig("utkface", 0, 20_000, 1000, 5000, size=64), _FULL, draws=32),
    },
}


@dataclass(frozen=True)
class PaperViews:
    """Identity, three mixups and three cutmixes of the calibration and the test part of a sample."""

    sample: Sample
    calibration: ViewPredictions
    test: ViewPredictions

    def chosen(self, names: Sequence[str]) -> tuple[ViewPredictions, ViewPredictions]:
        """Return calibration and test views of these names."""
        return self.calibration.select(names), self.test.select(names)


def paper_views(setup: ImageSetup, places: Places) -> PaperViews:
    """Train the network of a setup and see both held-out parts through the paper's views, or read them from the cache.

    Parameters
    ----------
    setup : ImageSetup
        What to train and to look at.
    places : Places
        Data and cache.

    Returns
    -------
    PaperViews
    """
    trained = trained_network(setup.sample, setup.network, places)
    views = _views(trained)
    sample, seed = trained.sample, setup.sample.seed
    calibration = trained.views(sample.calibration, views, draws=setup.draws, seed=2 * seed)
    return PaperViews(sample, calibration, trained.views(sample.test, views, draws=setup.draws, seed=2 * seed + 1))


def _views(trained: Trained) -> list[BuiltIn]:
    return [Identity(), *paper_mixup_cutmix(Pool(trained.pool))]
