"""Any callable as a view: functions, transforms of torchvision, timm, kornia, albumentations, MONAI and ttach."""

__all__ = ["as_view", "as_views"]

import inspect
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vbtta._support.checks import is_tensor, require, to_array
from vbtta._support.fingerprints import describe
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, RowList, to_tensor
from vbtta.augment.base import MIN_SEEN_SHARE, Augmentation, BuiltIn, Number, check_images, check_streams, ones_like

# Transforms of torchvision.transforms.v2 that never draw; a transform that is missing here is only slower.
_DETERMINISTIC_TORCHVISION = {
    "CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation", "Normalize", "Pad",
    "RGB", "Resize", "TenCrop", "ToDtype", "ToImage", "ToPureTensor",
}  # fmt: skip

_DRAWING = threading.RLock()  # generators and parameters of such transforms are shared by all threads
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


def as_view(
    obj: Any, name: str | None = None, *,
    stochastic: bool | None = None, inverse: Callable[[Batch], Batch] | None = None,
) -> Augmentation:  # fmt: skip
    """Make a view of a callable, or of another library's transform.

    Parameters
    ----------
    obj : view or callable
        * a view: returned as it is, or renamed;
        * a function `f(batch)`, taken to be deterministic, or `f(batch, rng)`, taken to be stochastic: it draws from
          `rng`, a :class:`RowStreams` with the methods of NumPy's generators, and not from a global generator
          (torch.randn, np.random), which is not recognised and does not follow the seed;
        * a module or transform of torch, kornia, timm or torchvision.transforms.v2. If it draws random numbers (dropout
          in training mode does) it is applied row by row, with the generators of torch and Python set for each row. A
          module of your own that draws in its `forward` needs `stochastic=True`;
        * an albumentations transform, or a MONAI array transform, applied to one image after the other.
    name : str, optional
        The view's name; taken from the object if not given.
    stochastic : bool, optional
        Whether the object draws random numbers, if that cannot be recognised.
    inverse : callable, optional
        For maps: a function from outputs (N, C, H, W) of the augmented inputs to the geometry of the inputs, zero where
        the view sees nothing; of a stochastic view `f(outputs, rng)` with streams as those it drew from. kornia's,
        MONAI's and ttach's transforms have their own.
    """
    if isinstance(obj, type):
        raise TypeError(f"a view must be an object, not a class: use {obj.__name__}(...).")
    if isinstance(obj, Augmentation) and isinstance(obj.name, str):
        if inverse is None and name in (None, obj.name):
            return obj
        if inverse is None and isinstance(obj, BuiltIn | ForeignView):
            return replace(obj, name=str(name))  # type: ignore[return-value]
        inverse = getattr(obj, "inverse", None) if inverse is None else inverse
        return FunctionView(str(name or obj.name), obj, obj.stochastic, inverse, True)
    if _is_from(obj, "ttach") or _crops(obj):
        raise TypeError(f"{_name_of(obj)} stands for several views; use as_views, of ttach with a Compose.")
    if not callable(obj):
        kind = type(obj).__name__
        raise TypeError(f"a view must be callable: a function, a transform, or as HorizontalFlip(); got {kind}.")
    view_name = name or _name_of(obj)
    if _is_from(obj, "albumentations"):
        return AlbumentationsView(view_name, obj, stochastic is not False, inverse)
    if _is_from(obj, "monai.transforms"):
        return MonaiView(view_name, obj, _draws(obj) if stochastic is None else stochastic, inverse)
    if any(_is_from(obj, package) for package in ("kornia.augmentation", "torchvision", "timm")):
        if _draws(obj) if stochastic is None else stochastic:
            return SeededView(view_name, obj, True, inverse)
        return FunctionView(view_name, obj, False, inverse, tensors=True)
    takes_rng = _takes_rng(obj)
    draws = stochastic is None and _is_from(obj, "torch.nn") and any(map(_is_random, obj.modules()))
    if draws or (stochastic and not takes_rng and _is_from(obj, "torch")):
        return SeededView(view_name, obj, True, inverse)
    if stochastic and not takes_rng:
        remedy = "write it as f(batch, rng) and draw from rng, so that a seed gives the same views"
        raise TypeError(f"view {view_name} is said to be stochastic but takes no rng: {remedy}.")
    return FunctionView(view_name, obj, takes_rng if stochastic is None else stochastic, inverse, takes_rng)


def as_views(objects: Any) -> list[Augmentation]:
    """Make a list of views with distinct names of a view, a callable (see :func:`as_view`), or a list or dict of these.

    Keys of a dict are the names. A ttach Compose becomes one view per combination; FiveCrop and TenCrop of torchvision,
    and a Compose with one of them, become five and ten.
    """
    single = isinstance(objects, Augmentation) or callable(objects) or _is_compose(objects)
    if isinstance(objects, Mapping) and not single:
        objects = [as_view(obj, str(name)) for name, obj in objects.items()]
    if not single and (isinstance(objects, str | bytes) or not isinstance(objects, Iterable)):
        kind = type(objects).__name__
        raise TypeError(f"views must be a view, a function or a list of these; got {kind}. Read files by load_views.")
    views: list[Augmentation] = []
    for obj in [objects] if single else objects:
        views.extend(_expand(obj) if _is_compose(obj) else _corners(obj) or [as_view(obj)])
    if not views:
        raise ValueError("there must be at least one view; got an empty list.")
    names = [view.name for view in views]
    repeated = ", ".join(sorted({name for name in names if names.count(name) > 1}))
    if repeated:
        raise ValueError(f"view names must differ; {repeated} occurs more than once. Use as_view(obj, name=...).")
    return views


@dataclass(frozen=True)
class ForeignView:
    """Base of the views made of another library's objects."""

    name: str
    function: Callable[..., Any]
    stochastic: bool = True
    undo: Callable[[Batch], Batch] | None = None
    partial: bool = field(default=True, kw_only=True)  # whether the view may miss positions

    @property
    def inverse(self) -> Callable[[Batch, RowStreams | None], Batch] | None:
        """Outputs (N, C, H, W) of the augmented inputs in the geometry of the inputs; None if that is not known."""
        return None if self.undo is None else self._undo

    def _undo(self, outputs: Batch, rng: RowStreams | None = None) -> Batch:
        undo: Any = self.undo
        return undo(outputs, rng) if _takes_rng(undo) else undo(outputs)

    def seen(self, outputs: Batch, rng: RowStreams | None = None) -> Batch | None:
        """Mask (1 or N, 1, H, W) of the positions that the view sees: those the inverse does not fill with zeros."""
        if self.inverse is None or not self.partial:
            return None
        return self.inverse(ones_like(outputs if self.stochastic else outputs[:1]), rng) >= MIN_SEEN_SHARE

    def fingerprint_data(self) -> Any:
        """Parameters of the wrapped object."""
        return describe(self.function)


@dataclass(frozen=True)
class FunctionView(ForeignView):
    """A function of the batch, and of the streams if it takes them."""

    takes_rng: bool = False
    tensors: bool = False  # whether it takes tensors and images one after the other, but neither arrays nor lists

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        if self.tensors:
            one = partial(_of_tensors, self.function)
            return RowList(map(one, batch)) if isinstance(batch, RowList) else one(batch)
        return self.function(batch, rng) if self.takes_rng else self.function(batch)


@dataclass(frozen=True)
class RowByRowView(ForeignView):
    """A transform applied to one row after the other, with its generator seeded for each."""

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        return self._by_row(self._apply, batch, rng)

    @property
    def inverse(self) -> Callable[[Batch, RowStreams | None], Batch] | None:
        """The inverse given, or else the transform's own with the random numbers drawn again; None without either."""
        known = any(_is_from(self.function, package) for package in ("kornia.augmentation", "monai"))
        own = self.undo is None and known and hasattr(self.function, "inverse")
        return partial(self._by_row, self._draw_and_undo) if own else super().inverse

    def _by_row(self, function: Callable[[Any], Any], batch: Batch, rng: RowStreams | None = None) -> Batch:
        seeds = check_streams(self, batch, rng).integers(2**32) if self.stochastic else np.zeros(len(batch), int)
        results = []
        with _DRAWING:
            for row, seed in zip(batch, seeds.tolist(), strict=True):
                self._seed(seed, row)
                results.append(to_array(function(row)) if isinstance(row, np.ndarray) else function(row))
        if not is_tensor(batch):
            return RowList(results) if isinstance(batch, RowList) else np.stack(results)
        torch = require("torch", "torch")
        return torch.stack([torch.as_tensor(result, device=batch.device) for result in results])

    def _seed(self, seed: int, row: Batch) -> None: ...
    def _apply(self, row: Batch) -> Batch: ...
    def _draw_and_undo(self, outputs: Batch) -> Batch: ...


@dataclass(frozen=True)
class SeededView(RowByRowView):
    """A transform that draws from torch's and Python's generators, whose states are restored afterwards."""

    def _by_row(self, function: Callable[[Any], Any], batch: Batch, rng: RowStreams | None = None) -> Batch:
        if isinstance(batch, np.ndarray):
            return to_array(self._by_row(function, to_tensor(batch), rng))
        if not is_tensor(batch) and not isinstance(batch, RowList):
            raise TypeError(f"view {self.name} takes tensors, arrays or lists of images; got {type(batch).__name__}.")
        torch = require("torch", "torch")
        fork, device = torch.random.fork_rng, getattr(batch, "device", torch.device("cpu"))
        on_cpu = device.type == "cpu"
        with _DRAWING, fork([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
            before = random.getstate()
            try:
                return super()._by_row(function, batch, rng)
            finally:
                random.setstate(before)

    def _seed(self, seed: int, row: Batch) -> None:
        torch = require("torch", "torch")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if is_tensor(row) and row.device.type != "cpu":
            torch.get_device_module(row.device).manual_seed(seed)

    def _apply(self, row: Batch) -> Batch:
        return self.function(row[None])[0] if is_tensor(row) else _of_tensors(self.function, row)

    def _draw_and_undo(self, outputs: Batch) -> Batch:
        """Kornia keeps the parameters of its last call, and draws them from the size of the images."""
        transform: Any = self.function
        transform(outputs.new_zeros((1, 3, *outputs.shape[1:])))
        return transform.inverse(outputs[None])[0]


@dataclass(frozen=True)
class AlbumentationsView(RowByRowView):
    """An albumentations transform, applied to each image, of PIL or (C, H, W), as (H, W, C)."""

    def _seed(self, seed: int, row: Batch) -> None:
        self.function.set_random_seed(seed)  # type: ignore[attr-defined]

    def _apply(self, row: Batch) -> Batch:
        if not hasattr(row, "shape"):
            return require("PIL.Image", "data").fromarray(self.function(image=np.asarray(row))["image"])
        check_images(self, row[None])
        last = np.ascontiguousarray(np.moveaxis(to_array(row), 0, -1))  # (H, W, C)
        return np.ascontiguousarray(np.moveaxis(self.function(image=last)["image"], -1, 0))


@dataclass(frozen=True)
class MonaiView(RowByRowView):
    """A MONAI transform, applied to each image (C, H, W) or volume."""

    def _seed(self, seed: int, row: Batch) -> None:
        if self.stochastic:
            self.function.set_random_state(seed)  # type: ignore[attr-defined]

    def _apply(self, row: Batch) -> Batch:
        return self.function(row).as_tensor()

    def _draw_and_undo(self, outputs: Batch) -> Batch:
        """MONAI records its operations in the tensor it returns; positions beyond the augmented image are zero."""
        transform: Any = self.function
        traced = transform(outputs[:1] * 0)
        operations = [_with_zeros(operation) for operation in traced.applied_operations]
        return transform.inverse(type(traced)(outputs, applied_operations=operations)).as_tensor()


def _of_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """The result for an array as that for a tensor: torchvision returns arrays as they are."""
    return to_array(function(to_tensor(values))) if isinstance(values, np.ndarray) else function(values)


def _with_zeros(operation: Any) -> Any:
    """A record of MONAI's with zeros as the padding of the inverse."""
    if not isinstance(operation, Mapping):
        return operation
    return {key: "zeros" if key == "padding_mode" else _with_zeros(value) for key, value in operation.items()}


def _is_from(obj: Any, package: str) -> bool:
    """Whether the object's class or one of its bases is defined in a package."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in type(obj).__mro__)


def _is_compose(obj: Any) -> bool:
    """Whether the object is a ttach Compose."""
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
        undo = None if any("FiveCrops" in part for part in parts) else transformer.deaugment_mask
        name = "+".join(parts) or "identity"  # flips, turns and resizing see all of an image
        views.append(FunctionView(name, transformer.augment_image, False, undo, partial=False))
    return views


def _crops(obj: Any) -> int:
    """Number of the crops that a transform of torchvision returns together, by itself or as a part of a Compose."""
    if not _is_from(obj, "torchvision"):
        return 0
    parts = obj.transforms if type(obj).__name__ == "Compose" else ()
    return max([{"FiveCrop": 5, "TenCrop": 10}.get(type(obj).__name__, 0), *map(_crops, parts)])


def _corners(obj: Any) -> list[Augmentation]:
    """The crops of FiveCrop or TenCrop, one view each."""
    corners = ("top_left", "top_right", "bottom_left", "bottom_right", "center")
    names = [f"crop({corner})" for corner in corners] + [f"mirrored crop({corner})" for corner in corners]
    draws = _draws(obj)
    kind: Any = SeededView if draws else partial(FunctionView, tensors=True)
    return [kind(names[i], partial(_part, obj, i), draws) for i in range(_crops(obj))]


def _part(function: Callable[[Batch], Any], place: int, batch: Batch) -> Batch:
    """One of the results of a function."""
    return function(batch)[place]


def _ttach_name(transform: Any, value: Any) -> str:
    kind = type(transform).__name__
    if isinstance(value, bool):
        return kind
    if isinstance(value, partial):  # the crops of FiveCrops
        value = value.func.__name__
    return f"{kind}({Number().text(value) if isinstance(value, int | float) else value})"


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None)
    if name == "<lambda>":
        raise ValueError("a lambda has no name of its own: give it one with vbtta.augment.as_view(function, name=...).")
    return name or type(obj).__name__


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether there is a second positional argument that is required or called rng."""
    if _is_from(function, "torch.nn"):
        function = function.forward  # type: ignore[attr-defined]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "rng")


def _is_random(part: Any) -> bool:
    """Whether a submodule draws: another library's transform, or dropout in training mode."""
    if _is_from(part, "kornia.augmentation") or _is_from(part, "torchvision.transforms"):
        return _draws(part)
    dropout = getattr(part, "dropout", 0.0)  # of recurrent layers and attention
    return part.training and ("Dropout" in type(part).__name__ or (isinstance(dropout, float) and dropout > 0))


def _draws(transform: Any) -> bool:
    """Whether a transform of kornia.augmentation, torchvision or MONAI draws random numbers."""
    if _is_from(transform, "kornia.augmentation"):
        return True
    if type(transform).__name__ == "Compose":
        return any(map(_draws, transform.transforms))
    if _is_from(transform, "monai.transforms"):
        return hasattr(transform, "set_random_state")
    return type(transform).__name__ not in _DETERMINISTIC_TORCHVISION
