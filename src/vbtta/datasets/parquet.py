"""Parquet files in the Hugging Face convention: images as encoded bytes, class names in the metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta._support.extras import require
from vbtta.datasets.images import ImageData, decode_images

__all__ = ["load_parquet"]


def load_parquet(
    path: str | os.PathLike[str],
    *,
    image: str = "image",
    label: str = "label",
    mode: str = "RGB",
    size: int | None = None,
    keep: dict[str, str] | None = None,
) -> ImageData:
    """Read a parquet file of images.

    Parameters
    ----------
    path : path
        The file.
    image, label : str
        Names of the image column (binary, or a struct with the field ``bytes``) and of the label column.
    mode : {"RGB", "L"}
        Colour or grey.
    size : int, optional
        Side length to resize to; None keeps the images as they are.
    keep : mapping of str to str, optional
        Keep only rows where each named column equals the given text, for example ``{"split": "test"}``.

    Returns
    -------
    ImageData
        ``extra`` has all further columns; ``ids`` are row numbers in the file.
    """
    reader = require("pyarrow.parquet", "data")
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"{source} does not exist. Check the path, or the folder in VBTTA_DATA.")
    table = reader.read_table(source)
    for name in (image, label, *(keep or {})):
        if name not in table.column_names:
            raise ValueError(f"{source} has no column {name!r}; it has {', '.join(table.column_names)}.")
    rows = np.arange(table.num_rows)
    for name, value in (keep or {}).items():
        rows = rows[np.asarray(table[name].take(rows).to_pylist(), dtype=object) == value]
    table = table.take(rows)
    contents: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in table[image].to_pylist()]
    extra = {name: _array(table, name) for name in table.column_names if name not in (image, label)}
    labels = _array(table, label)
    if labels.dtype.kind not in "iuf" or not np.isfinite(labels).all():
        raise ValueError(f"{source}, column {label!r}: every label must be a number; got {table[label].type}.")
    return ImageData(
        decode_images(contents, mode=mode, size=size, where=str(source)),
        labels,
        extra,
        _class_names(table.schema.metadata or {}, label),
        rows,
    )


def _array(table: Any, name: str) -> NDArray[Any]:
    column = table[name]
    kind = str(column.type)
    if kind in ("string", "large_string"):
        return np.asarray(["" if cell is None else cell for cell in column.to_pylist()], dtype=np.str_)
    return np.asarray(column.to_numpy())


def _class_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(features[label].get("names", ()))
    except (KeyError, ValueError):
        return ()  # the metadata is optional
