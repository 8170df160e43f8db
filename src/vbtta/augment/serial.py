"""Views as data: names and parameters, to and from dictionaries, TOML and JSON."""

__all__ = ["MODULE_OF", "load_views", "save_views", "views_from_dict", "views_to_dict"]

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.files import atomic_path
from vbtta.augment.base import Augmentation, BuiltIn
from vbtta.augment.foreign import as_views
from vbtta.augment.mixing import Pool

# Where each built-in view lives: what a file of views may name. Modules are imported only when one is asked for.
_HOME = {
    "arrays": ("Affine", "FeatureDropout", "GaussianNoise", "Identity"),
    "base": ("Chain",),
    "mixing": ("CutMix", "CutMixBox", "Mixup"),
    "images": (
        "Blur", "Crop", "HorizontalFlip", "Rotate", "Rotate90", "Shift", "VerticalFlip", "Zoom",
    ),
    "colours": ("Brightness", "Contrast", "Gamma"),
}  # fmt: skip
MODULE_OF = {view: module for module, views in _HOME.items() for view in views}


def views_to_dict(views: Iterable[Augmentation]) -> dict[str, Any]:
    """Describe built-in views by their class and parameters, in values that TOML and JSON know.

    Parameters
    ----------
    views : iterable of Augmentation
        Built-in views. A mixup pool must come from a file (`Pool.save`): it is described by path and hash.

    Returns
    -------
    dict
        `{"views": [{"view": "Rotate", "degrees": 15.0, ...}, ...]}`; a name is included only if it is not the
        one made from the parameters.

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> views_to_dict([Identity(), GaussianNoise(0.1)])
    {'views': [{'view': 'Identity'}, {'view': 'GaussianNoise', 'std': 0.1}]}
    """
    return {"views": [_describe(view) for view in views]}


def views_from_dict(data: Mapping[str, Any], root: str | os.PathLike[str] | None = None) -> list[Augmentation]:
    """Make the views that `views_to_dict` described.

    Parameters
    ----------
    data : mapping
        With the key `views`.
    root : path, optional
        The folder that relative paths of pools start from; the working directory if not given.

    Returns
    -------
    list of Augmentation
        The views, with distinct names.

    Examples
    --------
    >>> [view.name for view in views_from_dict({"views": [{"view": "GaussianNoise", "std": 0.1}]})]
    ['noise(0.1)']
    """
    entries = data.get("views")
    if not isinstance(entries, list) or not entries:
        raise ValueError('views must be described as a list under the key "views"; in TOML: one [[views]] each.')
    folder = Path() if root is None else Path(root)
    return as_views([_build(entry, folder) for entry in entries])


def load_views(path: str | os.PathLike[str]) -> list[Augmentation]:
    r"""Read views from a .toml or .json file; paths of pools start from the file's folder.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    list of Augmentation
        The views.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "views.toml"
    ...     _ = file.write_text('[[views]]\nview = "Identity"\n\n[[views]]\nview = "GaussianNoise"\nstd = 0.1\n')
    ...     [view.name for view in load_views(file)]
    ['identity', 'noise(0.1)']
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"file of views {file} not found.")
    text = file.read_text(encoding="utf-8")
    try:
        data = _reader(file)(text)
        if not isinstance(data, Mapping):
            raise ValueError("the file must hold a table with the key views.")
        return views_from_dict(data, file.parent)
    except ValueError as error:  # TOML and JSON errors are ValueErrors too
        raise ValueError(f"{file}: {error}") from error


def save_views(views: Iterable[Augmentation], path: str | os.PathLike[str]) -> None:
    """Write views to a .toml or .json file that `load_views` reads.

    Parameters
    ----------
    views : iterable of Augmentation
        Built-in views.
    path : path
        The file. Pools in its folder or below are referred to by relative paths, so that the folder can move.

    Examples
    --------
    >>> import tempfile
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_views([Identity(), GaussianNoise(0.1)], Path(folder) / "views.toml")
    ...     [view.name for view in load_views(Path(folder) / "views.toml")]
    ['identity', 'noise(0.1)']
    """
    file = Path(path)
    _reader(file)  # refuses other kinds of file
    described = [_describe(view, file.parent) for view in views]
    if file.suffix == ".json":
        text = json.dumps({"views": described}, indent=2) + "\n"
    else:
        tables = ("\n".join(f"{key} = {_toml(value)}" for key, value in entry.items()) for entry in described)
        text = "\n".join(f"[[views]]\n{table}\n" for table in tables)
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _describe(view: Augmentation, root: Path | None = None) -> dict[str, Any]:
    kind = type(view).__name__
    if not isinstance(view, BuiltIn) or kind not in MODULE_OF:
        raise TypeError(
            f"view {view.name} ({kind}) is not a built-in view and cannot be written to a file; "
            f"keep the Python code that makes it."
        )
    entry: dict[str, Any] = {"view": kind}
    for item in fields(view):
        value = getattr(view, item.name)
        if item.init and value is not None and (item.name != "name" or value != view.default_name()):
            entry[item.name] = _plain(value, view, root)
    return entry


def _plain(value: Any, view: BuiltIn, root: Path | None) -> Any:
    """Bring a parameter to numbers, strings, lists and dictionaries."""
    if isinstance(value, Pool):
        if value.path is None:
            raise ValueError(
                f"view {view.name} has a pool in memory, which a file of views cannot hold: make it with "
                f"Pool.save(rows, path) and use that pool."
            )
        return {"path": _relative(value.path, root), "sha256": value.sha256}
    if isinstance(value, BuiltIn):
        return _describe(value, root)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return [_plain(part, view, root) for part in value]
    return value


def _relative(path: Path, root: Path | None) -> str:
    if root is None:
        return path.as_posix()
    full, folder = path.resolve(), root.resolve()
    return (full.relative_to(folder) if full.is_relative_to(folder) else full).as_posix()


def _build(entry: Any, root: Path) -> BuiltIn:
    if not isinstance(entry, Mapping) or "view" not in entry:
        raise ValueError(f'each view needs the key "view" with the name of its class; got {entry!r}.')
    kind = entry["view"]
    if kind not in MODULE_OF:
        raise ValueError(f"unknown view {kind!r}; there are {', '.join(sorted(MODULE_OF))}.")
    view_class = getattr(import_module(f"vbtta.augment.{MODULE_OF[kind]}"), kind)
    known = {item.name for item in fields(view_class) if item.init}
    parameters = {key: value for key, value in entry.items() if key != "view"}
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise ValueError(f"view {kind} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    if "pool" in parameters:
        parameters["pool"] = _build_pool(parameters["pool"], root)
    if "views" in parameters:
        parameters["views"] = tuple(_build(link, root) for link in parameters["views"])
    try:
        view: BuiltIn = view_class(**parameters)
    except TypeError as error:
        raise ValueError(f"view {kind}: {error}") from error
    return view


def _build_pool(described: Any, root: Path) -> Pool:
    if isinstance(described, str):
        described = {"path": described}
    if not isinstance(described, Mapping) or "path" not in described:
        raise ValueError(f"a pool is described by path and sha256; got {described!r}.")
    return Pool.load(root / described["path"], described.get("sha256"))


def _reader(file: Path) -> Any:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    if file.suffix not in readers:
        raise ValueError(f"views are kept in .toml or .json files; got {file}.")
    return readers[file.suffix]


def _toml(value: Any) -> str:
    """Write a plain value in TOML: scalars look as in JSON, but for the delete character in strings."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
