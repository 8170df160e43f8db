"""A trainer for small networks: noisy labels or numbers, seeded, resumable from a cache folder."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from reproduction import nets
from reproduction.store import fingerprint
from vbtta._support.files import atomic_path

_FORMAT = 1  # part of the hash: raise it when the same configuration would train another network


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How a network is built and trained; its fingerprint names the checkpoint."""

    task: Literal["classification", "regression"]
    network: str  # a name in nets.NETWORKS
    outputs: int  # number of classes or regression targets, C
    network_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 10
    batch_size: int = 128
    optimizer: Literal["sgd", "adam"] = "sgd"  # with Nesterov momentum 0.9, or AdamW; warm-up, then a cosine to zero
    learning_rate: float = 0.1  # the largest
    weight_decay: float = 5e-4  # on every parameter of two dimensions or more
    loss: Literal["squared", "absolute"] = "squared"  # of regression, on standardised numbers
    crop: int = 4  # random shifts by up to so many pixels, the border filled by reflection
    flip: bool = True  # random horizontal flips
    seed: int = 0  # of initial weights, order of images and augmentation

    def __post_init__(self) -> None:
        """Reject what cannot be trained before hours are spent on it."""
        for name, allowed in (
            ("task", ("classification", "regression")),
            ("optimizer", ("sgd", "adam")),
            ("loss", ("squared", "absolute")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        for name in ("outputs", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")

    def digest(self, images: NDArray[np.uint8], targets: NDArray[Any]) -> str:
        """Fingerprint of the configuration and the data, for the names of cached files."""
        return fingerprint(_FORMAT, dataclasses.asdict(self), images, targets)


class ImageNetwork(nn.Module):
    """A network on images in [0, 1], with the standardisation of its inputs and outputs inside.

    So views are made of plain images, and regression outputs are in the user's units.
    """

    input_mean: Tensor
    input_scale: Tensor
    output_mean: Tensor
    output_scale: Tensor

    def __init__(self, network: nn.Module, channels: int, outputs: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("input_mean", torch.zeros(channels, 1, 1))
        self.register_buffer("input_scale", torch.ones(channels, 1, 1))
        self.register_buffer("output_mean", torch.zeros(outputs))
        self.register_buffer("output_scale", torch.ones(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, H, W) in [0, 1] to logits or predictions (B, C)."""
        standardised = (images - self.input_mean) / self.input_scale
        output: Tensor = self.network(standardised.contiguous(memory_format=torch.channels_last))
        return output * self.output_scale + self.output_mean


def train(
    config: TrainingConfig,
    images: NDArray[np.uint8],
    targets: NDArray[Any],
    *,
    cache: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> ImageNetwork:
    """Train a network, or load it from the cache if the same one was trained there before.

    Targets are class numbers (N,) or numbers (N, C). The cache folder has a checkpoint after each epoch; an interrupted
    run continues there and ends with the weights it would have had. `threads` are torch's; `progress` prints one line
    per epoch to standard error.
    """
    images, targets = _checked(config, images, targets)
    with torch_threads(threads):
        training = _Training(config, images, targets, None if cache is None else Path(cache))
        while training.epochs < config.epochs:
            start = time.perf_counter()
            loss = training.epoch()
            training.save()
            if progress:
                line = f"{config.network}: epoch {training.epochs}/{config.epochs}  loss {loss:.4f}"
                print(f"{line}  {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return training.network.eval()


def predict(network: nn.Module, images: NDArray[np.uint8], *, batch_size: int = 500) -> NDArray[np.float32]:
    """Outputs for unaugmented images, (N, C); the network takes images in [0, 1]."""
    with torch.inference_mode():
        outputs = [
            network(unit_images(images[start : start + batch_size])) for start in range(0, len(images), batch_size)
        ]
    result: NDArray[np.float32] = torch.cat(outputs).numpy()
    return result


def unit_images(images: NDArray[np.uint8]) -> Tensor:
    """Convert bytes to floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)


def augment_batch(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift each image by up to ``crop`` pixels (reflected border), flip half of them left to right."""
    size, _, height, width = images.shape
    rows = torch.arange(height).expand(size, height)  # (B, H)
    columns = torch.arange(width).expand(size, width)  # (B, W)
    if flip:
        flipped = torch.rand(size, 1, generator=generator) < 0.5
        columns = torch.where(flipped, width - 1 - columns, columns)
    if crop > 0:
        shift = torch.randint(-crop, crop + 1, (2, size, 1), generator=generator)
        rows, columns = _reflect(rows + shift[0], height), _reflect(columns + shift[1], width)
    instance = torch.arange(size)[:, None, None]
    # Advanced indices around a slice put the channels last: (B, H, W, channels).
    return images[instance, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Fold positions outside 0..size-1 back, without repeating the border."""
    position = position.abs()
    return (size - 1) - (size - 1 - position).abs()


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """So many threads for torch inside the block; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _checked(
    config: TrainingConfig, images: NDArray[np.uint8], targets: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    images, targets = np.asarray(images), np.asarray(targets)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(f"images must be uint8 of shape (N, channels, H, W); got {images.dtype} {images.shape}.")
    if len(targets) != len(images):
        raise ValueError(f"targets must have one row per image; got {len(targets)} for {len(images)} images.")
    if len(images) == 0:
        raise ValueError("images must hold at least one image; got none.")
    if config.task == "classification":
        targets = targets.astype(np.int64)
        if targets.ndim != 1 or targets.min() < 0 or targets.max() >= config.outputs:
            raise ValueError(f"targets must be class numbers in 0..{config.outputs - 1} of shape (N,).")
        return images, targets
    targets = targets.astype(np.float64).reshape(len(images), -1)
    if targets.shape[1] != config.outputs or not np.isfinite(targets).all():
        raise ValueError(f"targets must be finite and of shape (N, {config.outputs}); got {targets.shape}.")
    return images, targets


class _Training:
    """The state of a training: network, optimizer, random numbers and the number of epochs done."""

    def __init__(
        self, config: TrainingConfig, images: NDArray[np.uint8], targets: NDArray[Any], cache: Path | None
    ) -> None:
        self.config, self.images, self.epochs = config, images, 0
        body = nets.build(config.network, config.outputs, seed=config.seed, **config.network_options)
        network = ImageNetwork(body, images.shape[1], config.outputs)
        self.network: ImageNetwork = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = _optimizer(config, self.network)
        self.generator = torch.Generator().manual_seed(config.seed)
        _standardise(self.network, config, images, targets)
        self.target = torch.as_tensor(targets)
        if config.task == "regression":
            self.target = (self.target.float() - self.network.output_mean) / self.network.output_scale
        self.checkpoint = cache and cache / f"{config.network}-{config.digest(images, targets)}.pt"
        if self.checkpoint is not None and self.checkpoint.exists():
            self._restore(self.checkpoint)

    def epoch(self) -> float:
        """One pass over the images; the mean loss."""
        config, total = self.config, 0.0
        self.network.train()
        n_batches = math.ceil(len(self.images) / config.batch_size)
        order = torch.randperm(len(self.images), generator=self.generator)
        # Nearly equal batches: a last batch of one image would break batch normalisation.
        for step, rows in enumerate(torch.tensor_split(order, n_batches)):
            for group in self.optimizer.param_groups:
                group["lr"] = _learning_rate(config, (self.epochs * n_batches + step) / (config.epochs * n_batches))
            batch = augment_batch(unit_images(self.images[rows.numpy()]), config.crop, config.flip, self.generator)
            # Undo the output scaling: the loss is in standardised units.
            output = (self.network(batch) - self.network.output_mean) / self.network.output_scale
            loss = _loss(config, output, self.target[rows])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += loss.item() * len(rows)
        self.epochs += 1
        return total / len(self.images)

    def save(self) -> None:
        """Write a checkpoint; the last one holds weights only."""
        if self.checkpoint is None:
            return
        state: dict[str, Any] = {"epochs": self.epochs, "network": self.network.state_dict()}
        if self.epochs < self.config.epochs:
            state |= {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.checkpoint) as temporary:
            torch.save(state, temporary)

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            self.epochs = int(state["epochs"])
            self.network.load_state_dict(state["network"])
            if self.epochs < self.config.epochs:
                self.optimizer.load_state_dict(state["optimizer"])
                self.generator.set_state(state["generator"])
        except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} is not a checkpoint of this network ({error}). Delete it to train anew."
            ) from error


def _loss(config: TrainingConfig, output: Tensor, target: Tensor) -> Tensor:
    if config.task == "classification":
        return functional.cross_entropy(output, target)
    if config.loss == "squared":
        return functional.mse_loss(output, target)
    return functional.l1_loss(output, target)


def _learning_rate(config: TrainingConfig, done: float) -> float:
    """Linear warm-up over the first tenth, then half a cosine to zero; ``done``: share of steps so far."""
    warm_up = 0.1
    if done < warm_up:
        return config.learning_rate * (0.05 + 0.95 * done / warm_up)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def _optimizer(config: TrainingConfig, network: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in network.parameters() if p.ndim >= 2]
    free = [p for p in network.parameters() if p.ndim < 2]  # biases and batch-norm scales
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def _standardise(
    network: ImageNetwork, config: TrainingConfig, images: NDArray[np.uint8], targets: NDArray[Any]
) -> None:
    # Means from a pixel histogram per channel: exact, and without a float copy of the images.
    levels = np.arange(256) / 255
    for channel in range(images.shape[1]):
        share = np.bincount(images[:, channel].ravel(), minlength=256) / images[:, channel].size
        mean = float(share @ levels)
        network.input_mean[channel] = mean
        network.input_scale[channel] = max(math.sqrt(float(share @ (levels - mean) ** 2)), 1e-3)
    if config.task == "regression":
        network.output_mean.copy_(torch.as_tensor(targets.mean(axis=0)))
        network.output_scale.copy_(torch.as_tensor(np.maximum(targets.std(axis=0), 1e-12)))
