"""Speed of TTAModule: against plain forward passes with the same augmentations, against ttach, and with fewer views."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import ttach
from torch import nn

from reproduction.nets import build
from vbtta.augment import Augmentation, as_views
from vbtta.inference.em import EM
from vbtta.models.categorical_mixture.posterior import CategoricalPosterior
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts.links import Calibration
from vbtta.module import TTAModule
from vbtta.policy import History, Policy

_CLASSES, _SIZE = 10, 32
_REPEATS = {1: 40, 32: 31, 256: 5}


def run(quick: bool = False) -> dict[str, Any]:
    """Paired medians: all contenders take turns, and a ratio is the median over turns of the ratios within a turn.

    Times are of one thread. The ceiling is every view's augmentation and one forward pass for it; small batches can
    do better, because several views share a pass.
    """
    network = build("small_resnet", _CLASSES, seed=0).eval()
    compose = ttach.Compose([ttach.HorizontalFlip(), ttach.VerticalFlip(), ttach.Rotate90([0, 90, 180, 270])])
    views = as_views(compose)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other wherever something else runs beside them
    try:
        with torch.inference_mode():
            timings = {
                f"batch_{n_rows}": at_batch_size(network, compose, views, n_rows, 3 if quick else repeats)
                for n_rows, repeats in _REPEATS.items()
                if not quick or n_rows < 256
            }
    finally:
        torch.set_num_threads(threads)
    return {
        "views": len(views),
        "parameters": sum(tensor.numel() for tensor in network.parameters()),
        "threads": 1,
        "limits": {"module_to_ceiling": 1.05, "module_to_ttach": 1.0, "four_to_sixteen_views": 0.25},
        **timings,
    }


def at_batch_size(
    network: nn.Module, compose: Any, views: list[Augmentation], n_rows: int, repeats: int
) -> dict[str, Any]:
    """Seconds and ratios at one batch size."""
    images = torch.rand(n_rows, 3, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    module = TTAModule(network, views, policy_of(views, len(views))).eval()
    few = TTAModule(network, views, policy_of(views, 4)).eval()
    other = ttach.ClassificationTTAWrapper(network, compose, merge_mode="mean")

    def ceiling() -> None:
        for view in views:
            network(view(images))

    contenders: dict[str, Callable[[], object]] = {
        "module": lambda: module(images),
        "ceiling": ceiling,
        "ttach": lambda: other(images),
        "four_views": lambda: few(images),
    }
    seconds = take_turns(contenders, repeats)
    return {
        "median_seconds": {name: float(np.median(times)) for name, times in seconds.items()},
        "module_to_ceiling": float(np.median(seconds["module"] / seconds["ceiling"])),
        "module_to_ttach": float(np.median(seconds["module"] / seconds["ttach"])),
        "four_to_sixteen_views": float(np.median(seconds["four_views"] / seconds["module"])),
        "repeats": repeats,
        # what each takes when nothing else runs beside it: neighbours on the host take the cache for minutes at a time
        "fastest_seconds": {name: float(times.min()) for name, times in seconds.items()},
    }


def take_turns(contenders: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """CPU seconds of every contender in every turn, (repeats,) each; the order is shuffled, the first turn is lost."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name in rng.permutation(list(contenders)):
            start = time.thread_time()  # on one thread the same as the clock's, but for other programs' share
            contenders[name]()
            if turn:
                seconds[name].append(time.thread_time() - start)
    return {name: np.array(times) for name, times in seconds.items()}


def policy_of(views: list[Any], n_used: int, n_classes: int = _CLASSES) -> Policy:
    """A mixture with equal weights for the first views and none for the others."""
    weights = np.where(np.arange(len(views)) < n_used, 1 / n_used, 0.0)
    posterior = CategoricalPosterior(
        link="softmax",
        weights=weights,
        class_weights=None,
        calibration=Calibration(np.zeros(len(views)), np.zeros(n_classes)),
        noise=None,
        information=None,
        gate=None,
    )
    return Policy(
        names=tuple(view.name for view in views),
        model=CategoricalMixture(),
        engine=EM(),
        posterior=posterior,
        history=History(np.zeros(1), weights[None]),
        final_elbo=0.0,
        elbo_terms={},
        converged=True,
        n_outputs=n_classes,
    )
