"""A compact trainer for small networks: noisy labels or numbers, seeded, resumable from a cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vbtta._support.files import atomic_path
from vbtta.experiments import nets
from vbtta.experiments.batches import augment_batch, unit_images

__all__ = ["ImageNetwork", "TrainingConfig", "predict", "train"]

_FORMAT = 1  # part of the hash: raise it when the same configuration would train another network


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How a network is built and trained; its hash names the checkpoint.

    Parameters
    ----------
    task : {"classification", "regression"}
        Cross-entropy on class numbers, or ``loss`` on standardised numbers.
    network, network_options : str, mapping
        Name and options for :func:`vbtta.experiments.nets.build`.
    outputs : int
        Number of classes or regression targets, C.
    epochs, batch_size : int
        Passes over the data and images per step.
    optimizer : {"sgd", "adam"}
        SGD with Nesterov momentum 0.9, or AdamW. One warm-up of a tenth of the steps, then a cosine to zero.
    learning_rate, weight_decay : float
        Largest learning rate, and weight decay on every parameter of two dimensions or more.
    loss : {"squared", "absolute"}
        The regression loss.
    crop : int
        Random shifts by up to so many pixels, the border filled by reflection; 0 for none.
    flip : bool
        Random horizontal flips.
    seed : int
        Seed of initial weights, order of images and augmentation.
    """

    task: Literal["classification", "regression"]
    network: str
    outputs: int
    network_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 10
    batch_size: int = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    loss: Literal["squared", "absolute"] = "squared"
    crop: int = 4
    flip: bool = True
    seed: int = 0

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
        """Hash of the configuration and of the data it is applied to, for the names of cached files."""
        data = hashlib.sha256(np.ascontiguousarray(images).data)
        data.update(np.ascontiguousarray(targets).data)
        described = {"format": _FORMAT, "data": data.hexdigest(), **dataclasses.asdict(self)}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


class ImageNetwork(nn.Module):
    """A network on images in [0, 1], with the data's standardisation of inputs and outputs inside.

    So views are made of plain images, and regression outputs are in the user's units.

    Parameters
    ----------
    network : torch.nn.Module
        Maps (B, channels, H, W) to (B, C).
    channels, outputs : int
        Sizes of the stored means and scales.
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

    Parameters
    ----------
    config : TrainingConfig
        What to train and how.
    images : ndarray of uint8, shape (N, channels, H, W)
        Training images.
    targets : ndarray, shape (N,) or (N, C)
        Class numbers, or numbers to predict.
    cache : path, optional
        Folder for checkpoints, one after each epoch; an interrupted run continues there and ends with the
        weights it would have had. None keeps nothing.
    threads : int, optional
        CPU threads for torch; None leaves them as they are.
    progress : bool
        Print one line per epoch to standard error.

    Returns
    -------
    ImageNetwork
        The trained network, in evaluation mode.
    """
    images, targets = _checked(config, images, targets)
    previous_threads = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _train(config, images, targets, None if cache is None else Path(cache), progress)
    finally:
        torch.set_num_threads(previous_threads)


def predict(network: nn.Module, images: NDArray[np.uint8], *, batch_size: int = 500) -> NDArray[np.float32]:
    """Evaluate the network on unaugmented images.

    Parameters
    ----------
    network : torch.nn.Module
        Takes images in [0, 1].
    images : ndarray of uint8, shape (N, channels, H, W)
        Images.
    batch_size : int
        Images per forward pass.

    Returns
    -------
    ndarray of float32, shape (N, C)
    """
    with torch.inference_mode():
        outputs = [
            network(unit_images(images[start : start + batch_size])) for start in range(0, len(images), batch_size)
        ]
    result: NDArray[np.float32] = torch.cat(outputs).numpy()
    return result


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


def _train(
    config: TrainingConfig,
    images: NDArray[np.uint8],
    targets: NDArray[Any],
    cache: Path | None,
    progress: bool,
) -> ImageNetwork:
    network: ImageNetwork = ImageNetwork(
        nets.build(config.network, config.outputs, seed=config.seed, **config.network_options),
        images.shape[1],
        config.outputs,
    )
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _optimizer(config, network)
    generator = torch.Generator().manual_seed(config.seed)
    _standardise(network, config, images, targets)
    checkpoint = None if cache is None else cache / f"{config.network}-{config.digest(images, targets)}.pt"
    first_epoch = _restore(checkpoint, config, network, optimizer, generator)
    target = torch.as_tensor(targets)
    if config.task == "regression":
        target = (target.float() - network.output_mean) / network.output_scale
    for epoch in range(first_epoch, config.epochs):
        start = time.perf_counter()
        mean_loss = _epoch(config, network, optimizer, generator, images, target, epoch)
        if checkpoint is not None:
            _save(checkpoint, config, network, optimizer, generator, epoch + 1)
        if progress:
            seconds = time.perf_counter() - start
            line = f"{config.network}: epoch {epoch + 1}/{config.epochs}  loss {mean_loss:.4f}  {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return network.eval()


def _epoch(
    config: TrainingConfig,
    network: ImageNetwork,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    images: NDArray[np.uint8],
    target: Tensor,
    epoch: int,
) -> float:
    network.train()
    n_images, total = len(images), 0.0
    n_batches = math.ceil(n_images / config.batch_size)
    order = torch.randperm(n_images, generator=generator)
    # Nearly equal batches: a last batch of one image would break batch normalisation.
    for step, rows in enumerate(torch.tensor_split(order, n_batches)):
        rate = _learning_rate(config, (epoch * n_batches + step) / (config.epochs * n_batches))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = augment_batch(unit_images(images[rows.numpy()]), config.crop, config.flip, generator)
        # Undo the output scaling: the loss is in standardised units.
        output = (network(batch) - network.output_mean) / network.output_scale
        loss = _loss(config, output, target[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.item() * len(rows)
    return total / n_images


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


def _save(
    path: Path,
    config: TrainingConfig,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    epochs: int,
) -> None:
    """Write the state after ``epochs`` epochs; the last checkpoint holds weights only."""
    state: dict[str, Any] = {"epochs": epochs, "network": network.state_dict()}
    if epochs < config.epochs:
        state |= {"optimizer": optimizer.state_dict(), "generator": generator.get_state()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        torch.save(state, temporary)


def _restore(
    path: Path | None,
    config: TrainingConfig,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Load the checkpoint, if there is one, and return how many epochs it has behind it."""
    if path is None or not path.exists():
        return 0
    try:
        state = torch.load(path, weights_only=True)
        epochs = int(state["epochs"])
        network.load_state_dict(state["network"])
        if epochs < config.epochs:
            optimizer.load_state_dict(state["optimizer"])
            generator.set_state(state["generator"])
    except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a checkpoint of this network ({error}). Delete it to train anew.") from error
    return epochs
