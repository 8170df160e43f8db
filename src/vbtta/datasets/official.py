"""The data sets as their authors publish them, and image folders with a table of labels."""

from __future__ import annotations

import csv
import gzip
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta.datasets.images import ImageData, decode_images
from vbtta.datasets.safe_pickle import load_pickle, load_torch_file

__all__ = [
    "load_cifar_batches",
    "load_cifar_human_labels",
    "load_food_folder",
    "load_idx_pair",
    "load_image_folder",
    "load_utkface_folder",
]

_IDX_BYTES = 0x08  # the idx code of unsigned bytes, the only type MNIST uses
_CIFAR_SIDE = 32
_HUMAN_LABELS = {
    "random_label1": "label_1",
    "random_label2": "label_2",
    "random_label3": "label_3",
    "worse_label": "worse_label",
    "aggre_label": "aggre_label",
}


def load_idx_pair(images: str | os.PathLike[str], labels: str | os.PathLike[str]) -> ImageData:
    """Read an idx file of images and one of labels (MNIST's format), plain or ending in ``.gz``."""
    pixels, numbers = _read_idx(Path(images), n_axes=3), _read_idx(Path(labels), n_axes=1)
    classes = tuple(str(digit) for digit in range(10))
    return ImageData(pixels[:, None], numbers.astype(np.int64), classes=classes)


def load_cifar_batches(folder: str | os.PathLike[str], split: str) -> ImageData:
    """Read the python version of CIFAR-10: a folder ``cifar-10-batches-py``, split "train" or "test"."""
    source = Path(folder)
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    images, labels = [], []
    for name in names:
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source / name} does not exist. Unpack the whole of cifar-10-python.tar.gz.")
        batch = load_pickle(source / name)
        try:
            images.append(np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE))
            labels.append(np.asarray(batch["labels"], dtype=np.int64))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source / name} is not a CIFAR-10 batch ({error}). Unpack the archive again.") from error
    meta = load_pickle(source / "batches.meta") if (source / "batches.meta").is_file() else {}
    classes = tuple(meta.get("label_names", (str(number) for number in range(10))))
    return ImageData(np.concatenate(images), np.concatenate(labels), classes=classes)


def load_cifar_human_labels(path: str | os.PathLike[str]) -> dict[str, NDArray[np.int64]]:
    """Read ``CIFAR-10_human.pt``: columns clean_label, label_1 to label_3, worse_label and aggre_label."""
    content = load_torch_file(path)
    try:
        columns = {ours: np.asarray(content[theirs], dtype=np.int64) for theirs, ours in _HUMAN_LABELS.items()}
        columns["clean_label"] = np.asarray(content["clean_label"], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the labels of CIFAR-10N ({error}). Download it again.") from error
    return columns


def load_food_folder(
    folder: str | os.PathLike[str], split: str, *, size: int, classes: Sequence[str] | int | None = None
) -> ImageData:
    """Read a folder ``food-101`` with ``images`` and ``meta``; ``classes``: names, or the first so many."""
    source = Path(folder)
    names = _lines(source / "meta" / "classes.txt")
    if isinstance(classes, int):
        names = names[:classes]
    elif classes is not None:
        unknown = sorted(set(classes) - set(names))
        if unknown:
            raise ValueError(f"classes has {unknown}, which {source / 'meta' / 'classes.txt'} has not.")
        names = list(classes)
    number = {name: index for index, name in enumerate(names)}
    paths = [path for path in _lines(source / "meta" / f"{split}.txt") if path.split("/")[0] in number]
    files = [source / "images" / f"{path}.jpg" for path in paths]
    labels = np.asarray([number[path.split("/")[0]] for path in paths], dtype=np.int64)
    images = decode_images(files, mode="RGB", size=size, where=str(source))
    return ImageData(images, labels, {"path": np.asarray(paths, dtype=np.str_)}, tuple(names))


def load_utkface_folder(folder: str | os.PathLike[str], split: str, *, size: int) -> ImageData:
    """Read a folder of UTKFace files, named ``age_gender_race_date.jpg``; byte-identical copies are left out.

    A file is a test image if the first 8 bytes of the SHA-256 of its name, as a number, modulo 100 are below
    20: the split does not depend on which other files are there.
    """
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    seen: set[bytes] = set()
    rows: list[int] = []
    for row, path in enumerate(files):
        content = hashlib.sha256(path.read_bytes()).digest()
        if content not in seen and _utkface_split(path.name) == split:
            rows.append(row)
        seen.add(content)
    kept = [files[row] for row in rows]
    return ImageData(
        decode_images(kept, mode="RGB", size=size, where=str(folder)),
        np.asarray([_utkface_age(path) for path in kept], dtype=np.int64),
        {"path": np.asarray([path.name for path in kept], dtype=np.str_)},
        ids=np.asarray(rows, dtype=np.int64),
    )


def load_image_folder(
    folder: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    *,
    path: str = "path",
    label: str = "label",
    mode: str = "RGB",
    size: int | None = None,
) -> ImageData:
    """Read images that a CSV file lists with their labels.

    Parameters
    ----------
    folder : path
        The folder that the file names in the table refer to.
    labels : path
        A CSV file with a header.
    path, label : str
        The columns with the file names and with the labels. Labels that are whole numbers
        stay so, other numbers become floats; if any is no number, all are class names, numbered
        in alphabetical order.
    mode : {"RGB", "L"}
        Colour or grey.
    size : int, optional
        Side length to crop and resize to; None if all images have one size.

    Returns
    -------
    ImageData
        ``extra`` has the table's other columns, converted in the same way, but left as text where they are
        no numbers.
    """
    table = Path(labels)
    with table.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        header = list(reader.fieldnames or ())
        records = list(reader)
    for name in (path, label):
        if name not in header:
            raise ValueError(f"{table} has no column {name!r}; it has {', '.join(header) or 'no header'}.")
    for row, record in enumerate(records):
        if None in record or None in record.values() or not record[label].strip():
            raise ValueError(
                f"{table}, row {row + 2}: one entry per column and a label are needed. Leave unlabelled out."
            )
    files = [Path(folder) / record[path] for record in records]
    numbers = _numbers([record[label] for record in records])
    classes: tuple[str, ...] = ()
    if numbers.dtype.kind == "U":
        names, numbers = np.unique(numbers, return_inverse=True)
        classes = tuple(str(name) for name in names)
    extra = {name: _numbers([record[name] for record in records]) for name in header if name != label}
    return ImageData(decode_images(files, mode=mode, size=size, where=str(table)), numbers, extra, classes)


def _read_idx(path: Path, n_axes: int) -> NDArray[np.uint8]:
    """Read an idx file: two zero bytes, type code, number of axes, big-endian 32-bit lengths, data."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:4] != bytes((0, 0, _IDX_BYTES, n_axes)):
        raise ValueError(f"{path} is not an idx file of bytes with {n_axes} axes; it starts with {raw[:4].hex()}.")
    lengths = np.frombuffer(raw, dtype=">u4", count=n_axes, offset=4).tolist()
    data = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * n_axes)
    if len(data) != int(np.prod(lengths)):
        raise ValueError(f"{path} should hold {lengths} bytes but holds {len(data)}. Download it again.")
    return data.reshape(lengths).copy()


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Unpack the whole of food-101.tar.gz, meta/ included.")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _utkface_split(name: str) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "test" if number % 100 < 20 else "train"


def _utkface_age(path: Path) -> int:
    age = path.name.split("_")[0]
    if not age.isdigit():
        raise ValueError(f"{path} has no age: UTKFace names are age_gender_race_date.jpg. Remove other files.")
    return int(age)


def _numbers(texts: Sequence[str]) -> NDArray[Any]:
    """Whole numbers, else floats, else the text itself."""
    for kind in (np.int64, np.float64):
        try:
            return np.asarray([kind(text) for text in texts])
        except ValueError:
            continue
    return np.asarray(texts, dtype=np.str_)
