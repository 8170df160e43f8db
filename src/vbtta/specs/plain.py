"""Records as plain data, and back."""

__all__ = ["spec_from_dict", "spec_to_dict"]

from dataclasses import fields, is_dataclass
from typing import Any, get_args

import numpy as np

from vbtta.specs.engines import EngineSpec
from vbtta.specs.models import ModelSpec

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(ModelSpec) + get_args(EngineSpec)}


def spec_to_dict(spec: ModelSpec | EngineSpec) -> dict[str, Any]:
    """A record as plain data: its kind and options."""
    return {"kind": type(spec).__name__, **{field.name: _plain(getattr(spec, field.name)) for field in fields(spec)}}


def spec_from_dict(data: dict[str, Any]) -> Any:
    """The record that :func:`spec_to_dict` described."""
    options = dict(data)
    kind = _KINDS.get(str(options.pop("kind", None)))
    if kind is None:
        raise ValueError(f"unknown model or engine {data.get('kind')!r}; known are {sorted(_KINDS)}")
    unknown = sorted(set(options) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no option {unknown[0]!r}")
    return kind(**{key: _rich(value) for key, value in options.items()})


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return spec_to_dict(value)  # type: ignore[arg-type]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return _name(value) if callable(value) else value


def _name(function: Any) -> str:
    """A function's module and name; of another callable its type's."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return spec_from_dict(value)
    return tuple(value) if isinstance(value, list) else value
