"""Small networks, each built with weights that depend on its seed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a skip connection, projected where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(channels_in, channels_out, stride)
        self.second = nn.Sequential(
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out)
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(images)) + self.skip(images))


class ConvolutionalNetwork(nn.Module):
    """Convolutions, the mean over positions (or all of them, flattened), and a linear layer."""

    def __init__(self, features: nn.Module, head: nn.Linear, flatten: bool = False) -> None:
        super().__init__()
        self.features, self.head, self.flatten = features, head, flatten

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, H, W) to outputs (B, C)."""
        maps = self.features(images)
        output: Tensor = self.head(maps.flatten(1) if self.flatten else maps.mean(dim=(2, 3)))
        return output


def resnet18(outputs: int, channels: int = 3, width: int = 64) -> nn.Module:
    """ResNet-18 (He et al., CVPR 2016) for small images: a 3 x 3 stem without pooling, four stages of two basic blocks.

    `width` is the number of channels of the first stage, doubled at each further one: 64 in the usual network.
    """
    blocks: list[nn.Module] = [_convolution(channels, width)]
    previous = width
    for stage in range(4):
        current = width * 2**stage
        blocks += [
            _BasicBlock(previous, current, stride=1 if stage == 0 else 2),
            _BasicBlock(current, current, stride=1),
        ]
        previous = current
    return ConvolutionalNetwork(nn.Sequential(*blocks), nn.Linear(previous, outputs))


def small_resnet(outputs: int, channels: int = 3, width: int = 16, stem_stride: int = 1) -> nn.Module:
    """A residual network that spends its time at low resolution, for training on a CPU.

    A stem at full resolution (or half of it: `stem_stride` 2), then three stages that halve the resolution and double
    the number of channels, `width` in the stem, each followed by one basic block.
    """
    blocks: list[nn.Module] = [_convolution(channels, width, stride=stem_stride)]
    for current in (2 * width, 4 * width, 8 * width):
        blocks += [_convolution(current // 2, current, stride=2), _BasicBlock(current, current, stride=1)]
    return ConvolutionalNetwork(nn.Sequential(*blocks), nn.Linear(8 * width, outputs))


def convnet(outputs: int, channels: int = 1, size: int = 28, width: int = 16) -> nn.Module:
    """Three layers: two convolutions with pooling, one linear layer (the paper's MNIST network)."""
    first, second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
    features = nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2))
    return ConvolutionalNetwork(features, nn.Linear(2 * width * (size // 4) ** 2, outputs), flatten=True)


def mlp(outputs: int, inputs: int, width: int = 64) -> nn.Module:
    """Three linear layers with ReLU between them (the paper's artificial regression)."""
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function for function in (resnet18, small_resnet, convnet, mlp)
}


def build(name: str, outputs: int, *, seed: int, **options: Any) -> nn.Module:
    """Make a network of NETWORKS; `seed` decides its initial weights, and torch's global generator stays as it was.

    Examples
    --------
    >>> network = build("small_resnet", 10, seed=0, width=4)
    >>> tuple(network(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    if name not in NETWORKS:
        raise ValueError(f"name must be one of {sorted(NETWORKS)}; got {name!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name](outputs, **options)
