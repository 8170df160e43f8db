"""What a view does, in a few digits: equal for equal parameters, whatever process or machine."""

__all__ = ["prediction_fingerprint", "view_fingerprint"]

import hashlib
import inspect
import json
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from vbtta.augment.base import Augmentation, BuiltIn, is_tensor
from vbtta.augment.foreign import AlbumentationsView, FunctionView, SeededView
from vbtta.augment.mixing import Pool

UNKNOWN = "-"
_FEW = 1000  # entries of an array that is written out rather than hashed
_TELLING = ("torch.", "kornia.", "torchvision.")  # whose modules print all their parameters but the tensors


def view_fingerprint(view: Augmentation) -> str:
    """Twelve hexadecimal digits that stand for a view's kind and parameters, its name left out.

    A pool counts by its rows, a dataclass by its fields. Another library's transform counts by its printed form and
    its tensors where these tell its parameters; a function, or a module of your own, does not tell what it does and has
    the fingerprint "-", which fits any other.

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise
    >>> view_fingerprint(GaussianNoise(0.1)) == view_fingerprint(GaussianNoise(0.1, name="n"))
    True
    >>> view_fingerprint(GaussianNoise(0.1)) == view_fingerprint(GaussianNoise(0.2))
    False
    """
    described = _describe(view)
    if described is None:
        return UNKNOWN
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def prediction_fingerprint(view: Augmentation, output_kind: str, draws: int) -> str:
    """What made a view's predictions: the view, the kind of output and, of a stochastic view, the number of draws."""
    text = f"{view_fingerprint(view)}/{output_kind}"
    return f"{text}/{draws}" if view.stochastic else text


def _describe(value: Any) -> Any:
    """Parameters as plain data; None where they cannot be told."""
    if isinstance(value, Pool):
        return _digest(value.rows)
    if isinstance(value, BuiltIn):
        parts = {
            item.name: _describe(getattr(value, item.name))
            for item in fields(value)
            if item.name != "name" and getattr(value, item.name) is not None
        }
        return None if None in parts.values() else [type(value).__name__, parts]
    if is_tensor(value):
        return _digest(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return None
        return _digest(value) if value.size > _FEW else value.tolist()
    if isinstance(value, np.generic):
        return _describe(value.item())
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, tuple | list):
        parts_of = [_describe(part) for part in value]
        return None if None in parts_of else parts_of
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # Rotate(10) and Rotate(10.0) are the same view
    if isinstance(value, str | bool):
        return value
    if isinstance(value, FunctionView | SeededView | AlbumentationsView):
        value = value.function if isinstance(value, FunctionView) else value.transform
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return _describe_module(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {item.name: _describe(getattr(value, item.name)) for item in fields(value) if item.name != "name"}
        return None if None in parts.values() else [type(value).__qualname__, parts]
    return _printed(value)


def _describe_module(module: Any) -> Any:
    """A torch module by its printed form, its tensors and which parts draw; None where a part hides its parameters."""
    for part in module.modules():
        hidden = any(inspect.isroutine(held) for held in vars(part).values())
        if hidden or not f"{type(part).__module__}.".startswith(_TELLING):
            return None
    text = _printed(module)
    tensors = {name: _digest(tensor) for name, tensor in module.state_dict().items() if is_tensor(tensor)}
    if text is None or not tensors:
        return text
    return [text, tensors]


def _printed(value: Any) -> str | None:
    """The printed form, where it tells all: no address, no function, nothing elided."""
    text = repr(value)
    return None if any(sign in text for sign in ("0x", "function", "...")) else text


def _digest(values: Any) -> list[Any]:
    """Shape, type and a hash of an array or tensor."""
    if is_tensor(values):
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()  # NumPy has no bfloat16
    array = np.ascontiguousarray(values)
    return [list(array.shape), str(array.dtype), hashlib.sha256(array.data).hexdigest()]
