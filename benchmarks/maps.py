"""Memory and speed of maps: TTAModule against its network, plain passes and ttach; memory of collect_dense."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import ttach
from torch import nn

from benchmarks.dense_networks import UNet
from benchmarks.module import policy_of, take_turns
from vbtta import collect_dense, fit_policy
from vbtta.augment import (
    Blur,
    Brightness,
    Chain,
    Crop,
    Rotate,
    Rotate90,
    Shift,
    VerticalFlip,
    Zoom,
    as_views,
    d4,
    invert_view,
)
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.module import TTAModule

_CLASSES = 5
_BY_CLASS = CategoricalMixture(weights="view_class")
_BY_INPUT = CategoricalMixture(weights="input", features="own", gate_scale=1.0)
_FULL = [*d4(), VerticalFlip(), Chain((VerticalFlip(), Rotate90(1))), Brightness(0.1), Blur(1.0)]
_PARTIAL = [*d4(), Rotate(10.0), Zoom(1.1), Shift(0.05, 0.05), Crop("center", 0.9)]


def run(quick: bool = False) -> dict[str, Any]:
    """Peaks of memory in megabytes and what is allowed, paired ratios of CPU seconds; the network is a small U-Net."""
    torch.manual_seed(0)
    network = UNet(_CLASSES).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return {
                "classes": _CLASSES,
                "module_memory": module_memory(network, 256 if quick else 1024),
                "collect_memory": collect_memory(20 if quick else 500),
                "speed": speed(network, *((128, 2) if quick else (512, 21))),
            }
    finally:
        torch.set_num_threads(threads)


def module_memory(network: nn.Module, side: int) -> dict[str, Any]:
    """Peaks of one image: allowed are the network's own with its input, two output maps a member and a mask."""
    image, results = torch.rand(1, 3, side, side), {}
    alone = peak(lambda: network(image.clone()))  # a view is an input of its own
    for name, views in {"all seen": _FULL, "partly seen": _PARTIAL}.items():
        small = torch.rand(10, 3, 48, 64)
        classes = np.random.default_rng(0).integers(0, _CLASSES, size=(10, 48, 64))
        sample = collect_dense(network, small, views, classes, positions=50)
        policies = {
            "mixture": policy_of(views, len(views), _CLASSES),
            "default": fit_policy(*sample, task="classification", guard=False),
            "class weights": fit_policy(*sample, task="classification", model=_BY_CLASS, guard=False),
            "input weights": fit_policy(*sample, task="classification", model=_BY_INPUT, guard=False),
        }
        for kind, policy in policies.items():
            module = TTAModule(network, views, policy).eval()
            module(small[:1])  # from now on it knows that the network returns maps
            members, pixels = len(module.pools), side**2 * 4 / 1e6
            allowed = alone + (2 * _CLASSES * members + 1) * pixels
            measured = peak(lambda module=module: module(image))  # type: ignore[misc]
            results[f"{kind}, {name}"] = {"members": members, "views": len(module.views), "peak": measured}
            results[f"{kind}, {name}"] |= {"allowed": allowed, "within": measured <= allowed}
    return {"side": side, "network": alone, **results}


def peak(call: Callable[[], object]) -> float:
    """The most memory of tensors that a call holds at once, in megabytes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(np.cumsum(changes).max() / 1e6)


def collect_memory(n_images: int) -> dict[str, Any]:
    """Peak of arrays while maps of 256 x 256 under 12 views are collected, beside the images and masks."""
    images = np.zeros((n_images, 1, 256, 256), dtype=np.float32)
    masks, batch_size = np.zeros((n_images, 256, 256), dtype=np.uint8), 8
    tracemalloc.start()
    predictions, _ = collect_dense(
        lambda batch: np.repeat(batch, _CLASSES, axis=1), images, _FULL, masks, batch_size=batch_size
    )
    measured = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    batch = batch_size * (1 + 2 * _CLASSES) * 256**2 * 4 / 1e6  # inputs, their maps, and the maps undone
    allowed = 1.5 * predictions.outputs.nbytes / 1e6 + batch
    all_maps = n_images * len(_FULL) * _CLASSES * 256**2 * 4 / 1e6
    results = {"images": n_images, "sampled": predictions.outputs.nbytes / 1e6, "batch": batch, "all_maps": all_maps}
    return {**results, "peak": measured, "allowed": allowed, "within": measured <= allowed}


def speed(network: nn.Module, side: int, repeats: int) -> dict[str, Any]:
    """One image under the symmetries of the square; the ceiling is every view, one pass for it, and its inverse."""
    compose = ttach.Compose([ttach.HorizontalFlip(), ttach.Rotate90([0, 90, 180, 270])])
    theirs, ours, image = as_views(compose), d4(), torch.rand(1, 3, side, side)
    modules = [TTAModule(network, views, policy_of(views, 8, _CLASSES)).eval() for views in (ours, theirs)]
    wrapper = ttach.SegmentationTTAWrapper(network, compose, merge_mode="mean")  # of logits
    softmax = nn.Sequential(network, nn.Softmax(1))
    of_probabilities = ttach.SegmentationTTAWrapper(softmax, compose, merge_mode="mean")  # as the module's mixture

    def ceiling() -> None:
        for view in ours:
            augmented = view(image)
            invert_view(view, network(augmented), augmented, image)

    contenders: dict[str, Callable[[], object]] = {"module": lambda: modules[0](image), "ceiling": ceiling}
    contenders |= {"module_of_ttach_views": lambda: modules[1](image), "ttach": lambda: wrapper(image)}
    contenders["ttach_of_probabilities"] = lambda: of_probabilities(image)
    seconds = take_turns(contenders, repeats)
    ratios = {
        "module_to_ceiling": seconds["module"] / seconds["ceiling"],
        "module_to_ttach": seconds["module"] / seconds["ttach"],
        "module_of_ttach_views_to_ttach": seconds["module_of_ttach_views"] / seconds["ttach"],
        "module_to_ttach_of_probabilities": seconds["module"] / seconds["ttach_of_probabilities"],
    }
    return {
        "side": side,
        "views": 8,
        "repeats": repeats,
        "limits": {"module_to_ceiling": 1.05, "module_to_ttach": 1.0},
        **{name: float(np.median(values)) for name, values in ratios.items()},
        "median_seconds": {name: float(np.median(times)) for name, times in seconds.items()},
        "fastest_seconds": {name: float(times.min()) for name, times in seconds.items()},
    }
