"""Views as data: classes and parameters, to and from dictionaries, TOML and JSON."""

__all__ = ["load_views", "save_views"]

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import one_of
from vbtta._support.files import atomic_path
from vbtta.augment import arrays, base, images, keypoints, text
from vbtta.augment.arrays import Mixing
from vbtta.augment.base import Augmentation, BuiltIn
from vbtta.augment.foreign import as_views

# Classes that files of views may name: the views in the modules' __all__.
_MODULES = (arrays, base, images, keypoints, text)
_PUBLIC = [getattr(module, name) for module in _MODULES for name in module.__all__]
_BUILT_IN: list[type[BuiltIn]] = [kind for kind in _PUBLIC if hasattr(kind, "full_name")]
_KINDS = {kind.__name__: kind for kind in _BUILT_IN if not issubclass(kind, Mixing)}


def load_views(path: str | os.PathLike[str]) -> list[Augmentation]:
    """Read views from a .toml or .json file, as `save_views` writes it."""
    file = Path(path)
    one_of(f"the ending of {path}", file.suffix, (".toml", ".json"))
    if not file.is_file():
        raise FileNotFoundError(f"file of views {file} not found.")
    try:
        text = file.read_text(encoding="utf-8")
        data: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        entries = data.get("views") if isinstance(data, Mapping) else None
        if not isinstance(entries, list) or not entries:
            raise ValueError('the file must hold a list under the key "views"; in TOML: one [[views]] each.')
        return as_views([_build(entry) for entry in entries])
    except (ValueError, TypeError, RecursionError) as error:  # TOML and JSON errors are ValueErrors too
        raise ValueError(f"{file}: {error}") from error


def save_views(views: Iterable[Augmentation], path: str | os.PathLike[str]) -> None:
    """Write built-in views to a .toml or .json file that `load_views` reads.

    Views that hold arrays of a user's data, as mixup its pool, are refused.
    """
    one_of(f"the ending of {path}", Path(path).suffix, (".toml", ".json"))
    described = [describe(view) for view in views]
    if Path(path).suffix == ".json":
        text = json.dumps({"views": described}, indent=2) + "\n"
    else:
        tables = ("\n".join(f"{key} = {_toml(value)}" for key, value in entry.items()) for entry in described)
        text = "\n".join(f"[[views]]\n{table}\n" for table in tables)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def describe(view: Augmentation) -> dict[str, Any]:
    """Class and parameters of a view, in values that TOML and JSON know."""
    kind = type(view).__name__
    if not isinstance(view, BuiltIn) or kind not in _KINDS:
        reason = "has a pool" if isinstance(view, Mixing) else "is not a built-in view"
        remedy = "and cannot be written to a file; keep the Python code that makes it"
        raise TypeError(f"view {view.name} ({kind}) {reason} {remedy}.")
    entry: dict[str, Any] = {"view": kind}
    for item in fields(view):
        value = getattr(view, item.name)
        if item.init and value is not None and (item.name != "name" or value != view.full_name()):
            entry[item.name] = _plain(value)
    return entry


def _plain(value: Any) -> Any:
    """Bring a parameter to numbers, strings, lists and dictionaries."""
    if isinstance(value, Augmentation):
        return describe(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _build(entry: Any) -> BuiltIn:
    """The view that an entry describes."""
    if not isinstance(entry, Mapping) or "view" not in entry:
        raise ValueError(f'each view needs the key "view" with the name of its class; got {entry!r}.')
    kind = entry["view"]
    if kind not in _KINDS:
        raise ValueError(f"unknown view {kind!r}; there are {', '.join(sorted(_KINDS))}.")
    view_class = _KINDS[kind]
    known = {item.name for item in fields(view_class) if item.init}
    parameters = {key: value for key, value in entry.items() if key != "view"}
    if unknown := sorted(set(parameters) - known):
        raise ValueError(f"view {kind} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    if "views" in parameters:
        parameters["views"] = tuple(_build(part) for part in parameters["views"])
    try:
        return view_class(**parameters)
    except TypeError as error:
        raise ValueError(f"view {kind}: {error}") from error


def _toml(value: Any) -> str:
    """Write a plain value in TOML: scalars look as in JSON, but for the delete character in strings."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
