"""Images with masks or contours, and small U-Nets trained on them, cached for the benchmark of dense outputs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vbtta._support.files import atomic_path
from vbtta.data.images import decode_images

__all__ = ["EPOCHS", "Scenes", "UNet", "load", "trained"]

EPOCHS = {"nuclei": 16, "contours": 8}
_WIDTH, _BATCH, _RATE = 8, 10, 4e-3


class Scenes(NamedTuple):
    """Images (N, 3, H, W) in [0, 1] and the raters' masks (R, H, W) of each."""

    images: Tensor
    masks: list[NDArray[np.uint8]]

    def take(self, rows: range) -> Scenes:
        """Some of the images."""
        return Scenes(self.images[rows.start : rows.stop], self.masks[rows.start : rows.stop])


def load(name: str, part: str, folder: str) -> Scenes:
    """Read a part (train, calibration, test) of nuclei or contours."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(Path(folder) / f"{name}.parquet")
    rows = [row for row in table.to_pylist() if row["split"] == part]
    images = decode_images([row["image"]["bytes"] for row in rows], mode="RGB", where=name)
    drawn = [row["raters"] if name == "contours" else [row["mask"]] for row in rows]
    masks = [decode_images([_content(file) for file in files], mode="L", where=name)[:, 0] for files in drawn]
    return Scenes(torch.from_numpy(images).float() / 255, masks)


def _content(file: Any) -> bytes:
    """The bytes of an image file, with or without its path."""
    content = file["bytes"] if isinstance(file, dict) else file
    assert isinstance(content, bytes)
    return content


class UNet(nn.Module):
    """Three levels of two convolutions each; maps (B, 3, H, W) to logits (B, C, H, W), H and W multiples of 4."""

    def __init__(self, n_classes: int, width: int = _WIDTH) -> None:
        super().__init__()
        self.outer = _convolutions(3, width)
        self.middle = _convolutions(width, 2 * width)
        self.inner = _convolutions(2 * width, 4 * width)
        self.middle_up = _convolutions(6 * width, 2 * width)
        self.outer_up = _convolutions(3 * width, width)
        self.last = nn.Conv2d(width, n_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        halve, double = nn.functional.max_pool2d, nn.functional.interpolate
        fine = self.outer(images)
        medium = self.middle(halve(fine, 2))
        coarse = self.inner(halve(medium, 2))
        medium = self.middle_up(torch.cat([medium, double(coarse, scale_factor=2)], dim=1))
        logits: Tensor = self.last(self.outer_up(torch.cat([fine, double(medium, scale_factor=2)], dim=1)))
        return logits


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    """Two convolutions with batch normalisation."""
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv2d(channels, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers)


def trained(name: str, seed: int, folder: str, cache: str) -> UNet:
    """The network of a data set and seed; training continues after the last epoch that is in the cache.

    The loss is the mean cross-entropy to all raters; images are mirrored left to right at random.
    """
    torch.manual_seed(seed)
    network = UNet(3 if name == "nuclei" else 2)
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-2)
    Path(cache).mkdir(parents=True, exist_ok=True)
    path, done = Path(cache) / f"dense-{name}-seed{seed}.pt", 0
    if path.is_file():
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        done = state["epochs"]
    if done < EPOCHS[name]:
        scenes = load(name, "train", folder)
        targets = torch.stack([_shares(masks, network.last.out_channels) for masks in scenes.masks])
        for epoch in range(done, EPOCHS[name]):
            for group in optimiser.param_groups:
                group["lr"] = _RATE * 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS[name]))
            loss = _epoch(network.train(), optimiser, scenes.images, targets, np.random.default_rng([seed, epoch]))
            state = {"network": network.state_dict(), "optimiser": optimiser.state_dict(), "epochs": epoch + 1}
            with atomic_path(path) as temporary:
                torch.save(state, temporary)
            print(f"{name} seed {seed} epoch {epoch + 1}/{EPOCHS[name]}: loss {loss:.4f}", flush=True)
    return network.eval()


def _shares(masks: NDArray[np.uint8], n_classes: int) -> Tensor:
    """The share of the raters for every class: (C, H, W)."""
    return torch.from_numpy(np.stack([(masks == c).mean(axis=0) for c in range(n_classes)])).float()


def _epoch(
    network: UNet, optimiser: torch.optim.Optimizer, images: Tensor, targets: Tensor, random: np.random.Generator
) -> float:
    """One pass over the images; the mean loss."""
    losses = []
    for rows in np.array_split(random.permutation(len(images)), len(images) // _BATCH):
        inputs, wanted = images[rows], targets[rows]
        if random.random() < 0.5:
            inputs, wanted = inputs.flip(-1), wanted.flip(-1)
        loss = nn.functional.cross_entropy(network(inputs), wanted)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    return float(np.mean(losses))


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    trained(sys.argv[1], int(sys.argv[2]), os.environ["VBTTA_DATA"], ".cache")
