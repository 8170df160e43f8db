"""Fingerprints of views and their predictions: equal for equal parameters, on any machine.

A prediction's is `<hash of the view>/<kind of output>[/<draws>]`; a policy compares those of its fit with new ones.
"""

import hashlib
import inspect
import json
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from vbtta._support.checks import is_instance, is_tensor, to_array

UNKNOWN = "-"  # the fingerprint of a view whose parameters cannot be read
_MAX_LISTED = 1000  # entries of an array that is written out rather than hashed
_PRINTING_PACKAGES = ("torch.", "kornia.", "torchvision.")  # modules whose repr shows all parameters but the tensors


def view_fingerprint(view: object) -> str:
    """Twelve hexadecimal digits for a view's class and parameters, without its name.

    A function or a module of your own has the fingerprint "-", which matches any other.
    """
    parameters = describe(view)
    if parameters is None:
        return UNKNOWN
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:12]


def prediction_fingerprint(view: Any, output_kind: str, draws: int) -> str:
    """Fingerprint of a view's predictions: the view, the kind of output and the draws of a stochastic view."""
    text = f"{view_fingerprint(view)}/{output_kind}"
    return f"{text}/{draws}" if view.stochastic else text


def describe(value: Any) -> Any:
    """Parameters as plain data, None if they cannot be read; an object's method `fingerprint_data` overrides this."""
    if hasattr(value, "fingerprint_data"):
        return value.fingerprint_data()
    if is_tensor(value):
        return array_digest(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return None
        return array_digest(value) if value.size > _MAX_LISTED else value.tolist()
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, tuple | list):
        parts = [describe(part) for part in value]
        return None if None in parts else parts
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # Rotate(10) and Rotate(10.0) are the same view
    if isinstance(value, str | bool):
        return value
    if is_instance(value, "torch.nn", "Module"):
        return _describe_module(value)
    if isinstance(value, partial):
        return describe([getattr(value.func, "__qualname__", None), list(value.args), value.keywords])
    if is_dataclass(value) and not isinstance(value, type):
        parameters = {item.name: getattr(value, item.name) for item in fields(value) if item.name != "name"}
        described = {name: describe(part) for name, part in parameters.items() if part is not None}
        return None if None in described.values() else [type(value).__qualname__, described]
    return _complete_repr(value)


def array_digest(values: Any) -> list[Any]:
    """Shape, type and hash of an array or tensor."""
    array = np.ascontiguousarray(to_array(values))
    return [list(array.shape), str(array.dtype), hashlib.sha256(array.data).hexdigest()]


def _describe_module(module: Any) -> Any:
    """A torch module by its repr and its tensors; None if a submodule does not show its parameters."""
    for part in module.modules():
        hidden = any(inspect.isroutine(attribute) for attribute in vars(part).values())
        if hidden or not f"{type(part).__module__}.".startswith(_PRINTING_PACKAGES):
            return None
    text = _complete_repr(module)
    tensors = {name: array_digest(tensor) for name, tensor in module.state_dict().items() if is_tensor(tensor)}
    return text if text is None or not tensors else [text, tensors]


def _complete_repr(value: Any) -> str | None:
    """The repr if it shows all parameters: no address, no function, nothing elided."""
    text = repr(value)
    return None if any(sign in text for sign in ("0x", "function", "...")) else text
