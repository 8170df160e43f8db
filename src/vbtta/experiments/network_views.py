"""A network on one sample, and its predictions under views; both are kept in the cache folder and shared by items."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vbtta.augment.base import BuiltIn
from vbtta.augment.fingerprint import view_fingerprint
from vbtta.collect import collect_views
from vbtta.experiments.batches import unit_images
from vbtta.experiments.item import Places
from vbtta.experiments.samples import Sample, SampleConfig, draw_sample
from vbtta.experiments.training import ImageNetwork, TrainingConfig, train
from vbtta.predictions import ViewPredictions

try:
    import fcntl
except ImportError:  # not on Windows: two processes may then make the same thing
    fcntl = None  # type: ignore[assignment]

__all__ = ["NetworkConfig", "Trained", "trained_network"]

_FORMAT = 1  # part of the name of cached predictions: raise it when they would differ
_POOL = 2000  # training images that mixup and cutmix mix in


@dataclass(frozen=True)
class NetworkConfig:
    """How the ResNet-18 of a data set is trained: Adam, a warm-up and a cosine, flips and shifts.

    Parameters
    ----------
    width : int
        Channels of its first stage; 64 in the usual network. At least 8: with 4 the backward pass of torch 2.13's
        convolutions in channels-last order writes out of bounds on a CPU.
    epochs, batch_size : int
        Passes over the training part, and images a step.
    learning_rate : float
        Largest learning rate.
    crop : int
        Largest random shift in pixels.
    """

    width: int = 64
    epochs: int = 200
    batch_size: int = 128
    learning_rate: float = 1e-3
    crop: int = 4

    def __post_init__(self) -> None:
        """Refuse a width that crashes the process."""
        if self.width < 8:
            raise ValueError(f"width must be at least 8; got {self.width}.")


@dataclass(frozen=True)
class Trained:
    """A sample and the network that was trained on its training part."""

    sample: Sample
    network: ImageNetwork
    key: str  # names the network in the cache
    places: Places

    @property
    def pool(self) -> torch.Tensor:
        """Training images in [0, 1] for mixup and cutmix."""
        return unit_images(self.sample.images[:: max(1, len(self.sample.images) // _POOL)][:_POOL])

    def views(self, images: NDArray[np.uint8], views: Sequence[BuiltIn], *, draws: int, seed: int) -> ViewPredictions:
        """Predictions for images under views, from the cache where they are there.

        Parameters
        ----------
        images : ndarray of uint8, shape (N, channels, H, W)
            Images.
        views : sequence of views
            Views of images in [0, 1].
        draws : int
            Draws of each stochastic view.
        seed : int
            Decides the draws.

        Returns
        -------
        ViewPredictions
        """
        path = self._path(images, views, draws, seed)
        if path is None:
            return self._collect(images, views, draws, seed)
        with _alone(path.parent, path.stem):
            if path.is_file():
                return ViewPredictions.load(path)
            found = self._collect(images, views, draws, seed)
            found.save(path)
            return found

    def _collect(self, images: NDArray[np.uint8], views: Sequence[BuiltIn], draws: int, seed: int) -> ViewPredictions:
        before = torch.get_num_threads()
        torch.set_num_threads(self.places.threads)
        try:
            return collect_views(self.network, unit_images(images), views, draws=draws, batch_size=250, seed=seed)
        finally:
            torch.set_num_threads(before)

    def _path(self, images: NDArray[np.uint8], views: Sequence[BuiltIn], draws: int, seed: int) -> Path | None:
        if self.places.cache is None:
            return None
        described: dict[str, Any] = {
            "format": _FORMAT,
            "network": self.key,
            "images": hashlib.sha256(np.ascontiguousarray(images).data).hexdigest(),
            "views": [(view.name, view_fingerprint(view)) for view in views],
            "draws": draws,
            "seed": seed,
        }
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        return self.places.cache / "views" / f"{digest}.npz"


def trained_network(config: SampleConfig, network: NetworkConfig, places: Places) -> Trained:
    """Draw the sample and train its network, or load it from the cache.

    Parameters
    ----------
    config : SampleConfig
        The sample; its seed is the network's, too.
    network : NetworkConfig
        How to train.
    places : Places
        Data and cache.

    Returns
    -------
    Trained
    """
    sample = draw_sample(config, places)
    training = TrainingConfig(
        sample.task,
        "resnet18",
        sample.outputs,
        {"width": network.width},
        epochs=network.epochs,
        batch_size=network.batch_size,
        optimizer="adam",
        learning_rate=network.learning_rate,
        crop=network.crop,
        seed=config.seed,
    )
    folder = None if places.cache is None else places.cache / "checkpoints"
    key = hashlib.sha256(json.dumps(asdict(config) | asdict(training), sort_keys=True).encode()).hexdigest()
    with _alone(folder, key):
        fitted = train(training, sample.images, sample.targets, cache=folder, threads=places.threads)
    return Trained(sample, fitted, key, places)


@contextmanager
def _alone(folder: Path | None, name: str) -> Iterator[None]:
    """Let one process at a time make what another needs, too; the second finds it made (where files can be locked)."""
    if folder is None or fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, or the process dies
        yield
