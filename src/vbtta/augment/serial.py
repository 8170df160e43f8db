"""Views as data: classes and parameters, to and from dictionaries, TOML and JSON."""

__all__ = ["load_views", "save_views", "views_from_dict", "views_to_dict"]

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.files import atomic_path
from vbtta.augment import arrays, base, images, keypoints, text
from vbtta.augment.arrays import Pool
from vbtta.augment.base import Augmentation, BuiltIn
from vbtta.augment.foreign import as_views

# Classes that files of views may name: the views in the modules' __all__.
_MODULES = (arrays, base, images, keypoints, text)
_PUBLIC = [getattr(module, name) for module in _MODULES for name in module.__all__]
_KINDS: dict[str, type[BuiltIn]] = {kind.__name__: kind for kind in _PUBLIC if hasattr(kind, "full_name")}


def views_to_dict(views: Iterable[Augmentation]) -> dict[str, Any]:
    """Describe built-in views by their class and parameters, in values that TOML and JSON know.

    A mixup pool must come from a file (`Pool.save`): it is described by path and hash.

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> views_to_dict([Identity(), GaussianNoise(0.1)])
    {'views': [{'view': 'Identity'}, {'view': 'GaussianNoise', 'std': 0.1}]}
    """
    return {"views": [_describe(view) for view in views]}


def views_from_dict(data: Mapping[str, Any], root: str | os.PathLike[str] | None = None) -> list[Augmentation]:
    """Make the views that `views_to_dict` described; paths of pools start from `root`, or the working directory.

    Examples
    --------
    >>> [view.name for view in views_from_dict({"views": [{"view": "GaussianNoise", "std": 0.1}]})]
    ['noise(0.1)']
    """
    entries = data.get("views")
    if not isinstance(entries, list) or not entries:
        raise ValueError('views must be described as a list under the key "views"; in TOML: one [[views]] each.')
    return as_views([_build(entry, Path(root or ".")) for entry in entries])


def load_views(path: str | os.PathLike[str]) -> list[Augmentation]:
    """Read views from a .toml or .json file, as `save_views` writes it; paths of pools start from the file's folder.

    Examples
    --------
    >>> load_views("views.yaml")
    Traceback (most recent call last):
        ...
    ValueError: views are kept in .toml or .json files; got views.yaml.
    """
    file = _checked(path)
    if not file.is_file():
        raise FileNotFoundError(f"file of views {file} not found.")
    try:
        text = file.read_text(encoding="utf-8")
        data: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        if not isinstance(data, Mapping):
            raise ValueError("the file must hold a table with the key views.")
        return views_from_dict(data, file.parent)
    except (ValueError, TypeError, RecursionError) as error:  # TOML and JSON errors are ValueErrors too
        raise ValueError(f"{file}: {error}") from error


def save_views(views: Iterable[Augmentation], path: str | os.PathLike[str]) -> None:
    """Write built-in views to a .toml or .json file that `load_views` reads.

    Pools in the file's folder or below are referred to by relative paths, so that the folder can move.

    Examples
    --------
    >>> import tempfile
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_views([Identity(), GaussianNoise(0.1)], Path(folder) / "views.toml")
    ...     [view.name for view in load_views(Path(folder) / "views.toml")]
    ['identity', 'noise(0.1)']
    """
    file = _checked(path)
    described = [_describe(view, file.parent) for view in views]
    if file.suffix == ".json":
        text = json.dumps({"views": described}, indent=2) + "\n"
    else:
        tables = ("\n".join(f"{key} = {_toml(value)}" for key, value in entry.items()) for entry in described)
        text = "\n".join(f"[[views]]\n{table}\n" for table in tables)
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _checked(path: str | os.PathLike[str]) -> Path:
    if Path(path).suffix not in (".toml", ".json"):
        raise ValueError(f"views are kept in .toml or .json files; got {path}.")
    return Path(path)


def _describe(view: Augmentation, root: Path | None = None) -> dict[str, Any]:
    """Class and parameters of a view; paths of pools are relative to `root`."""
    kind = type(view).__name__
    if not isinstance(view, BuiltIn) or kind not in _KINDS:
        remedy = "keep the Python code that makes it"
        raise TypeError(f"view {view.name} ({kind}) is not a built-in view and cannot be written to a file; {remedy}.")
    entry: dict[str, Any] = {"view": kind}
    for item in fields(view):
        value = getattr(view, item.name)
        if item.init and value is not None and (item.name != "name" or value != view.full_name()):
            entry[item.name] = _plain(value, view, root)
    return entry


def _plain(value: Any, view: BuiltIn, root: Path | None) -> Any:
    """Bring a parameter to numbers, strings, lists and dictionaries."""
    if isinstance(value, Pool):
        if value.path is None:
            raise ValueError(f"view {view.name} has a pool in memory: write it to a file by Pool.save(rows, path).")
        path = value.path
        if root is not None:
            path, folder = path.resolve(), root.resolve()
            path = path.relative_to(folder) if path.is_relative_to(folder) else path
        return {"path": path.as_posix(), "sha256": value.sha256}
    if isinstance(value, Augmentation):
        return _describe(value, root)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(part, view, root) for part in value]
    return value


def _build(entry: Any, root: Path) -> BuiltIn:
    """The view that an entry describes."""
    if not isinstance(entry, Mapping) or "view" not in entry:
        raise ValueError(f'each view needs the key "view" with the name of its class; got {entry!r}.')
    kind = entry["view"]
    if kind not in _KINDS:
        raise ValueError(f"unknown view {kind!r}; there are {', '.join(sorted(_KINDS))}.")
    view_class = _KINDS[kind]
    known = {item.name for item in fields(view_class) if item.init}
    parameters = {key: value for key, value in entry.items() if key != "view"}
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise ValueError(f"view {kind} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    if "pool" in parameters:
        pool = parameters["pool"]
        described = {"path": pool} if isinstance(pool, str) else pool
        if not isinstance(described, Mapping) or "path" not in described:
            raise ValueError(f"a pool is described by path and sha256; got {described!r}.")
        parameters["pool"] = Pool.load(root / described["path"], described.get("sha256"))
    if "views" in parameters:
        parameters["views"] = tuple(_build(part, root) for part in parameters["views"])
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
