"""Any callable as a view: functions and the transforms of torchvision, kornia, albumentations and ttach."""

__all__ = ["as_view", "as_views"]

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vbtta._support.extras import require
from vbtta._support.random import RowStreams
from vbtta.augment.base import Augmentation, Batch, BuiltIn, is_tensor, number

# Transforms of torchvision.transforms.v2 that never draw; one too few here is safe, only slower.
_FIXED_TORCHVISION = frozenset(
    {
        "CenterCrop",
        "ConvertImageDtype",
        "Grayscale",
        "Identity",
        "LinearTransformation",
        "Normalize",
        "Pad",
        "RGB",
    }
    | {"Resize", "ToDtype", "ToImage", "ToPureTensor"}
)


def as_view(obj: Any, name: str | None = None, *, stochastic: bool | None = None) -> Augmentation:
    """Make a view of a callable, or of another library's transform.

    Parameters
    ----------
    obj : view or callable
        * a view: returned as it is, or renamed;
        * a function `f(batch)`, taken to be deterministic, or `f(batch, rng)`, taken to be stochastic. One that draws
          behind the scenes (torch.randn, np.random) cannot be recognised and would not follow the seed: let it draw
          from `rng`;
        * a module or transform of torch, kornia or torchvision.transforms.v2. If it draws random numbers (dropout in
          training mode does) it is applied row by row, with torch's generator set for each row: results do not depend
          on batching. A module of your own that draws in its `forward` needs `stochastic=True`;
        * an albumentations transform, applied image by image to (N, C, H, W) batches.
    name : str, optional
        The view's name; taken from the object if not given.
    stochastic : bool, optional
        Whether the object draws, where that is not recognised from it.

    Returns
    -------
    Augmentation
        The view.

    Examples
    --------
    >>> import numpy as np
    >>> def double(batch):
    ...     return 2 * batch
    >>> view = as_view(double)
    >>> view.name, view.stochastic, view(np.ones((1, 2)))
    ('double', False, array([[2., 2.]]))
    """
    if isinstance(obj, type):
        raise TypeError(f"a view must be an object, not a class: use {obj.__name__}(...).")
    if isinstance(obj, Augmentation) and isinstance(obj.name, str):
        return obj if name in (None, obj.name) else _rename(obj, str(name))
    if _is_compose(obj):
        raise TypeError(f"a ttach Compose stands for {len(obj)} views; use as_views(compose), which lists them.")
    if _is_from(obj, "ttach"):
        raise TypeError(
            f"a ttach transform stands for several views; use as_views(ttach.Compose([{_name_of(obj)}()]))."
        )
    if not callable(obj):
        raise TypeError(f"a view must be callable; got {type(obj).__name__}.")
    view_name = name or _name_of(obj)
    if _is_from(obj, "albumentations"):
        return AlbumentationsView(view_name, obj, stochastic is not False)
    if _is_from(obj, "kornia.augmentation") or _is_from(obj, "torchvision"):
        draws = _draws(obj) if stochastic is None else stochastic
        return SeededView(view_name, obj) if draws else FunctionView(view_name, obj, False, False)
    if stochastic is None and _is_from(obj, "torch.nn") and any(_is_random(part) for part in obj.modules()):
        return SeededView(view_name, obj)
    takes_rng = _takes_rng(obj)
    if stochastic and not takes_rng:
        if _is_from(obj, "torch"):
            return SeededView(view_name, obj)
        raise TypeError(
            f"view {view_name} is said to be stochastic but takes no rng: write it as f(batch, rng) and draw "
            f"from rng.uniform, rng.normal, rng.beta or rng.integers, so that a seed gives the same views."
        )
    return FunctionView(view_name, obj, takes_rng if stochastic is None else stochastic, takes_rng)


def as_views(objects: Any) -> list[Augmentation]:
    """Make a list of views with distinct names; a ttach Compose becomes one view per combination.

    Parameters
    ----------
    objects : view, callable, ttach Compose, or an iterable of these
        What `as_view` takes, and ttach's Compose.

    Returns
    -------
    list of Augmentation
        The views, in order.

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> [view.name for view in as_views([Identity(), GaussianNoise(0.1)])]
    ['identity', 'noise(0.1)']
    """
    single = isinstance(objects, Augmentation) or callable(objects) or _is_compose(objects)
    if not single and (isinstance(objects, str | bytes | Mapping) or not isinstance(objects, Iterable)):
        raise TypeError(
            f"views must be a view, a function or a list of these; got {type(objects).__name__}. "
            f"A file of views is read by load_views(path)."
        )
    listed: Iterable[Any] = [objects] if single else objects
    views: list[Augmentation] = []
    for obj in listed:
        views.extend(_expand(obj) if _is_compose(obj) else [as_view(obj)])
    if not views:
        raise ValueError("there must be at least one view; got an empty list.")
    names = [view.name for view in views]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"view names must differ; {', '.join(repeated)} occurs more than once. "
            f"Give names with as_view(obj, name=...)."
        )
    return views


@dataclass(frozen=True)
class FunctionView:
    """A function of the batch, and of the streams if it takes them."""

    name: str
    function: Callable[..., Any]
    stochastic: bool
    takes_rng: bool

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Call the function."""
        return self.function(batch, rng) if self.takes_rng else self.function(batch)


@dataclass(frozen=True)
class SeededView:
    """A transform that draws from torch's generator, which is set for each row and put back afterwards."""

    name: str
    transform: Callable[..., Any]
    stochastic: bool = True

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Transform row by row."""
        if not is_tensor(batch):
            raise TypeError(f"view {self.name} takes torch tensors; got {type(batch).__name__}.")
        torch = require("torch", "torch")
        device = batch.device
        on_cpu = device.type == "cpu"
        devices = [] if on_cpu else [device]
        rows = []
        with torch.random.fork_rng(devices=devices, device_type="cuda" if on_cpu else device.type):
            for i, seed in enumerate(_seeds(self.name, batch, rng)):
                torch.default_generator.manual_seed(seed)
                if not on_cpu:
                    torch.get_device_module(device).manual_seed(seed)
                rows.append(self.transform(batch[i : i + 1]))
        return torch.cat(rows)


@dataclass(frozen=True)
class AlbumentationsView:
    """An albumentations transform, applied to each image as (H, W, C) with its generator set for the row."""

    name: str
    transform: Any
    stochastic: bool = True

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Transform image by image."""
        if batch.ndim != 4:
            raise ValueError(f"view {self.name} takes images (N, C, H, W); got shape {tuple(batch.shape)}.")
        images = batch.detach().cpu().numpy() if is_tensor(batch) else batch
        seeds = _seeds(self.name, batch, rng) if self.stochastic else [0] * len(images)
        results = []
        for image, seed in zip(images, seeds, strict=True):
            self.transform.set_random_seed(seed)
            last = np.ascontiguousarray(np.moveaxis(image, 0, -1))  # (H, W, C)
            results.append(np.moveaxis(self.transform(image=last)["image"], -1, 0))
        stacked = np.stack(results)
        if not is_tensor(batch):
            return stacked
        torch = require("torch", "torch")
        return torch.from_numpy(np.ascontiguousarray(stacked)).to(batch.device)


def _seeds(name: str, batch: Batch, rng: RowStreams | None) -> list[int]:
    if rng is None or len(rng) != len(batch):
        raise ValueError(
            f"view {name} draws random numbers: call it with rng=RowStreams(seed, view.name, draw, rows), "
            f"one row number per row of the batch."
        )
    return [int(seed) for seed in rng.integers(2**32)]


def _rename(view: Augmentation, name: str) -> Augmentation:
    if isinstance(view, (BuiltIn, FunctionView, SeededView, AlbumentationsView)):
        return replace(view, name=name)
    return FunctionView(name, view, view.stochastic, True)


def _is_from(obj: Any, package: str) -> bool:
    """Whether the object's class or one of its bases is defined in a package; imports nothing."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in type(obj).__mro__)


def _is_compose(obj: Any) -> bool:
    return _is_from(obj, "ttach") and hasattr(obj, "aug_transform_parameters")


def _expand(compose: Any) -> list[Augmentation]:
    """List the combinations of a ttach Compose; the one that changes nothing is the identity."""
    views: list[Augmentation] = []
    for transformer, values in zip(compose, compose.aug_transform_parameters, strict=True):
        parts = [
            _ttach_name(transform, value)
            for transform, value in zip(compose.aug_transforms, values, strict=True)
            if value not in (transform.identity_param, getattr(transform, "original_size", None))
        ]
        views.append(FunctionView("+".join(parts) or "identity", transformer.augment_image, False, False))
    return views


def _ttach_name(transform: Any, value: Any) -> str:
    kind = type(transform).__name__
    if isinstance(value, bool):
        return kind
    if isinstance(value, partial):  # the crops of FiveCrops
        value = value.func.__name__
    return f"{kind}({number(value) if isinstance(value, (int, float)) else value})"


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None)
    if name == "<lambda>":
        raise ValueError("a lambda has no name of its own: give it one with vbtta.augment.as_view(function, name=...).")
    return name or type(obj).__name__


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a second positional argument is required, or one is called rng."""
    if _is_from(function, "torch.nn"):
        function = function.forward  # type: ignore[attr-defined]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "rng")


def _is_random(part: Any) -> bool:
    """Whether a part of a module draws: another library's transform, or torch's dropout in training mode."""
    if _is_from(part, "kornia.augmentation") or _is_from(part, "torchvision.transforms"):
        return _draws(part)
    names = {base.__name__ for base in type(part).__mro__ if f"{base.__module__}.".startswith("torch.nn.")}
    if names & {"FractionalMaxPool2d", "FractionalMaxPool3d"}:
        return True
    dropout = getattr(part, "dropout", 0.0)  # of recurrent layers and attention
    drops = bool(names) and isinstance(dropout, float) and dropout > 0
    return part.training and (drops or any("Dropout" in name or name == "RReLU" for name in names))


def _draws(transform: Any) -> bool:
    """Whether a transform of kornia.augmentation or torchvision draws random numbers."""
    if _is_from(transform, "kornia.augmentation"):
        return True
    if type(transform).__name__ == "Compose":
        return any(_draws(part) for part in transform.transforms)
    return type(transform).__name__ not in _FIXED_TORCHVISION
