"""Small networks for the experiments, each built with weights that depend on its seed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["NETWORKS", "ConvNet", "MultilayerPerceptron", "ResNet18", "SmallResNet", "build"]


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3 x 3 stem without pooling, four stages of two basic blocks.

    Parameters
    ----------
    outputs : int
        Number of classes or regression targets, C.
    channels : int
        Channels of the input images.
    width : int
        Channels of the first stage, doubled at each further one: 64 in the usual network, 8 to 16 for a CPU.

    References
    ----------
    He, Zhang, Ren, Sun: Deep residual learning for image recognition, CVPR 2016.
    """

    def __init__(self, outputs: int, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = [_convolution(channels, width)]
        previous = width
        for stage, current in enumerate(widths):
            blocks.append(_BasicBlock(previous, current, stride=1 if stage == 0 else 2))
            blocks.append(_BasicBlock(current, current, stride=1))
            previous = current
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(previous, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, H, W) to outputs (B, C)."""
        output: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return output


class SmallResNet(nn.Module):
    """A residual network that spends its time at low resolution, for training on a CPU.

    A stem at full resolution, then three stages that halve it, each followed by one basic block.

    Parameters
    ----------
    outputs : int
        Number of classes or regression targets, C.
    channels : int
        Channels of the input images.
    width : int
        Channels of the stem; the stages have 2, 4 and 8 times as many.
    stem_stride : int
        2 halves the resolution once more, for 64 x 64 images.
    """

    def __init__(self, outputs: int, channels: int = 3, width: int = 16, stem_stride: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(channels, width, stride=stem_stride),
            _convolution(width, 2 * width, stride=2),
            _BasicBlock(2 * width, 2 * width, stride=1),
            _convolution(2 * width, 4 * width, stride=2),
            _BasicBlock(4 * width, 4 * width, stride=1),
            _convolution(4 * width, 8 * width, stride=2),
            _BasicBlock(8 * width, 8 * width, stride=1),
        )
        self.head = nn.Linear(8 * width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, H, W) to outputs (B, C)."""
        output: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return output


class ConvNet(nn.Module):
    """Three layers: two convolutions with pooling, one linear layer (the paper's MNIST network).

    Parameters
    ----------
    outputs : int
        Number of classes or regression targets, C.
    channels, size : int
        Channels and side length of the square input images.
    width : int
        Channels of the first convolution; the second has twice as many.
    """

    def __init__(self, outputs: int, channels: int = 1, size: int = 28, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(2 * width * (size // 4) ** 2, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, size, size) to outputs (B, C)."""
        output: Tensor = self.head(self.features(images).flatten(1))
        return output


class MultilayerPerceptron(nn.Module):
    """Three linear layers with ReLU between them (the paper's artificial regression).

    Parameters
    ----------
    outputs : int
        Number of regression targets or classes, C.
    inputs : int
        Dimension of the inputs.
    width : int
        Units of both hidden layers.
    """

    def __init__(self, outputs: int, inputs: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (B, D) to outputs (B, C)."""
        output: Tensor = self.layers(inputs)
        return output


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": ResNet18,
    "small_resnet": SmallResNet,
    "convnet": ConvNet,
    "mlp": MultilayerPerceptron,
}


def build(name: str, outputs: int, *, seed: int, **options: Any) -> nn.Module:
    """Make a network whose initial weights depend on ``seed`` only; torch's global generator stays as it was.

    Parameters
    ----------
    name : str
        One of ``NETWORKS``.
    outputs : int
        Number of outputs, C.
    seed : int
        Seed of the initial weights.
    **options
        Passed to the network's class.

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
