"""The paper's data sets: Hugging Face style parquet files, idx files, and folders of images as their authors publish.

Pickled archives are not read, because unpickling a file can run any code.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vbtta.data.images import decode_images

Split = Literal["train", "test"]
Folder = str | os.PathLike[str]
_IDX_BYTES = 0x08  # the idx code of unsigned bytes, the only type MNIST uses
_ROW_NUMBERS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # stands for "0..N-1" until N is known


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images (N, 1 or 3, H, W) with their labels, (N,): class numbers, or numbers such as ages.

    `extra` has further columns (other annotators' labels, file names), `classes` the class names in the order of the
    class numbers, `ids` the row of each image in its source, before any row was left out (by default 0..N-1).

    Examples
    --------
    >>> data = ImageData(np.zeros((3, 1, 2, 2), dtype=np.uint8), np.array([0, 1, 1]), classes=("cat", "dog"))
    >>> data.take([2, 0]).ids
    array([2, 0])
    """

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    extra: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()
    ids: NDArray[np.int64] = dataclasses.field(default_factory=lambda: _ROW_NUMBERS)

    def __post_init__(self) -> None:
        """Check shapes once, so that no user of the data has to."""
        if self.images.ndim != 4 or self.images.dtype != np.uint8 or self.images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 of shape (N, 3, H, W) or (N, 1, H, W); "
                f"got {self.images.dtype} {self.images.shape}."
            )
        if self.ids is _ROW_NUMBERS:
            object.__setattr__(self, "ids", np.arange(len(self.images)))
        for name, column in {"labels": self.labels, "ids": self.ids, **self.extra}.items():
            if column.shape != (len(self.images),):
                raise ValueError(
                    f"{name} must have one entry per image, shape ({len(self.images)},); got {column.shape}."
                )
        if self.classes and len(self.labels):
            lowest, highest = self.labels.min(), self.labels.max()
            if lowest < 0 or highest >= len(self.classes):
                raise ValueError(
                    f"labels must be class numbers in 0..{len(self.classes) - 1}; got {lowest}..{highest}."
                )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: ArrayLike) -> ImageData:
        """Keep these rows (numbers or a mask), in this order."""
        chosen = np.asarray(rows)
        return dataclasses.replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            extra={name: column[chosen] for name, column in self.extra.items()},
            ids=self.ids[chosen],
        )


def load_mnist(split: Split, folder: Folder | None = None) -> ImageData:
    """MNIST: 28 x 28 grey digits, 60,000 to train on and 10,000 to test on.

    The folder (by default ``VBTTA_DATA``, as of all loaders) has ``mnist-train.parquet`` and ``mnist-test.parquet``,
    or the idx files (also gzipped, or in torchvision's ``MNIST/raw``).
    """
    root = _checked(split, folder)
    parquet = root / f"mnist-{split}.parquet"
    if parquet.is_file():
        return load_parquet(parquet, mode="L")
    part = "train" if split == "train" else "t10k"
    places = [root / "MNIST" / "raw", root / "mnist", root]
    endings = [f"{dash}idx{{}}-ubyte{gz}" for dash in "-." for gz in ("", ".gz")]
    images = _first(place / f"{part}-images{ending.format(3)}" for place in places for ending in endings)
    labels = _first(place / f"{part}-labels{ending.format(1)}" for place in places for ending in endings)
    if images is None or labels is None:
        raise _absent("MNIST", root, [parquet.name, f"{part}-images-idx3-ubyte and {part}-labels-idx1-ubyte"])
    pixels, digits = _read_idx(images, n_axes=3), _read_idx(labels, n_axes=1)
    return ImageData(pixels[:, None], digits.astype(np.int64), classes=tuple(map(str, range(10))))


def load_cifar10(split: Split, folder: Folder | None = None) -> ImageData:
    """CIFAR-10 with its clean labels only: 32 x 32 colour images of ten classes, 50,000 and 10,000.

    The folder has ``cifar10n-train.parquet`` and ``cifar10-test.parquet``.
    """
    root = _checked(split, folder)
    name = "cifar10-test.parquet" if split == "test" else "cifar10n-train.parquet"
    return dataclasses.replace(_cifar("CIFAR-10", root, name), extra={})


def load_cifar10n(folder: Folder | None = None) -> ImageData:
    """CIFAR-10N (Wei et al., ICLR 2022): the training images of CIFAR-10 with three human labels each.

    The folder has ``cifar10n-train.parquet``. ``labels`` are the clean ones; ``extra`` has label_1, label_2, label_3
    (three people), aggre_label (their majority) and worse_label (a wrong one of the three where there is one: it was
    chosen with the clean label in view, so do not treat it as an annotator).
    """
    return _cifar("CIFAR-10N", _data_folder(folder), "cifar10n-train.parquet")


def load_utkface(split: Split, folder: Folder | None = None, *, size: int | None = None) -> ImageData:
    """UTKFace: faces with the age in years; byte-identical copies are left out (many have another age).

    The folder has ``utkface.parquet``, or a folder ``UTKFace`` of image files (resized to `size`, by default 64). The
    split is fixed by file name, about 80 to 20. ``extra["path"]`` has the file names.
    """
    root = _checked(split, folder)
    if (root / "utkface.parquet").is_file():
        return load_parquet(root / "utkface.parquet", label="age", size=size, keep={"split": split, "duplicate_of": ""})
    if (root / "UTKFace").is_dir():
        return _utkface_folder(root / "UTKFace", split, size=size or 64)
    raise _absent("UTKFace", root, ["utkface.parquet", "UTKFace/"])


def load_food101(
    split: Split,
    folder: Folder | None = None,
    *,
    size: int | None = None,
    classes: Sequence[str] | int | None = None,
) -> ImageData:
    """Food-101 (Bossard et al., ECCV 2014): photographs of dishes, centre squares; training labels are noisy.

    The folder has the authors' folder ``food-101``, or ``food101-10.parquet``, a sample of its first ten classes.
    `size` is the side length to resize to, by default 64. `classes`, only with the folder: names of the classes to
    keep, or the first so many. ``extra["path"]`` has the file names.
    """
    root = _checked(split, folder)
    if (root / "food-101").is_dir():
        return _food_folder(root / "food-101", split, size=size or 64, classes=classes)
    if (root / "food101-10.parquet").is_file():
        if classes not in (None, 10):
            raise ValueError(f"classes={classes!r} needs the official folder food-101; the sample has ten classes.")
        return load_parquet(root / "food101-10.parquet", size=size, keep={"split": split})
    raise _absent("Food-101", root, ["food-101/", "food101-10.parquet"])


def load_parquet(
    path: Folder,
    *,
    image: str = "image",
    label: str = "label",
    mode: str = "RGB",
    size: int | None = None,
    keep: Mapping[str, str] | None = None,
) -> ImageData:
    """Read a parquet file of images; `ids` are row numbers in the file, ``extra`` has all further columns.

    The image column is binary, or a struct with the field ``bytes``. `size` is the side length to resize to, None
    keeps the images as they are. `keep`: only rows where each named column equals the text, as ``{"split": "test"}``.
    """
    import pyarrow.parquet

    source, wanted = Path(path), keep or {}
    if not source.is_file():
        raise FileNotFoundError(f"{source} does not exist. Check the path, or the folder in VBTTA_DATA.")
    table = pyarrow.parquet.read_table(source)
    for name in (image, label, *wanted):
        if name not in table.column_names:
            raise ValueError(f"{source} has no column {name!r}; it has {', '.join(table.column_names)}.")
    rows = np.arange(table.num_rows)
    for name, value in wanted.items():
        rows = rows[np.asarray(table[name].take(rows).to_pylist(), dtype=object) == value]
    table = table.take(rows)
    contents: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in table[image].to_pylist()]
    extra = {name: _array(table[name]) for name in table.column_names if name not in (image, label)}
    labels = _array(table[label])
    if labels.dtype.kind not in "iuf" or not np.isfinite(labels).all():
        raise ValueError(f"{source}, column {label!r}: every label must be a number; got {table[label].type}.")
    images = decode_images(contents, mode=mode, size=size, where=str(source))
    return ImageData(images, labels, extra, _class_names(table.schema.metadata or {}, label), rows)


def _data_folder(folder: Folder | None) -> Path:
    """The folder that holds the data: the argument, else the environment variable ``VBTTA_DATA``."""
    chosen = folder if folder is not None else os.environ.get("VBTTA_DATA")
    if not chosen:
        raise FileNotFoundError(
            "no data folder given. Pass folder=..., or set the environment variable VBTTA_DATA to the folder "
            "that holds the data sets."
        )
    path = Path(chosen)
    if not path.is_dir():
        raise FileNotFoundError(f"the data folder {path} does not exist. Pass folder=..., or set VBTTA_DATA.")
    return path


def _checked(split: str, folder: Folder | None) -> Path:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test'; got {split!r}.")
    return _data_folder(folder)


def _first(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _absent(name: str, root: Path, choices: Sequence[str]) -> FileNotFoundError:
    return FileNotFoundError(
        f"{name} is not in {root}: expected {', or '.join(choices)}. Put it there, or pass another folder "
        f"(folder=... or VBTTA_DATA)."
    )


def _cifar(data_set: str, root: Path, name: str) -> ImageData:
    if (root / name).is_file():
        return load_parquet(root / name)
    if (root / "cifar-10-batches-py").exists() or (root / "CIFAR-10_human.pt").exists():
        raise FileNotFoundError(
            f"{root} holds {data_set} as pickled archives only, which are not read: parquet files, idx files and "
            f"folders of images are. Convert it to {name}."
        )
    raise _absent(data_set, root, [name])


def _food_folder(folder: Path, split: str, *, size: int, classes: Sequence[str] | int | None) -> ImageData:
    """Read a folder ``food-101`` with ``images`` and ``meta``."""
    names = _lines(folder / "meta" / "classes.txt")
    if isinstance(classes, int):
        names = names[:classes]
    elif classes is not None:
        unknown = sorted(set(classes) - set(names))
        if unknown:
            raise ValueError(f"classes has {unknown}, which {folder / 'meta' / 'classes.txt'} has not.")
        names = list(classes)
    number = {name: index for index, name in enumerate(names)}
    paths = [path for path in _lines(folder / "meta" / f"{split}.txt") if path.split("/")[0] in number]
    files = [folder / "images" / f"{path}.jpg" for path in paths]
    labels = np.asarray([number[path.split("/")[0]] for path in paths], dtype=np.int64)
    images = decode_images(files, mode="RGB", size=size, where=str(folder))
    return ImageData(images, labels, {"path": np.asarray(paths, dtype=np.str_)}, tuple(names))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Unpack the whole of food-101.tar.gz, meta/ included.")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _utkface_folder(folder: Path, split: str, *, size: int) -> ImageData:
    """Read a folder of UTKFace files, named ``age_gender_race_date.jpg``; byte-identical copies are left out."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
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


def _utkface_split(name: str) -> str:
    """A file is a test image if the first 8 bytes of the SHA-256 of its name, as a number, modulo 100 are below 20."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "test" if number % 100 < 20 else "train"


def _utkface_age(path: Path) -> int:
    age = path.name.split("_")[0]
    if not age.isdigit():
        raise ValueError(f"{path} has no age: UTKFace names are age_gender_race_date.jpg. Remove other files.")
    return int(age)


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


def _array(column: Any) -> NDArray[Any]:
    if str(column.type) in ("string", "large_string"):
        return np.asarray(["" if cell is None else cell for cell in column.to_pylist()], dtype=np.str_)
    return np.asarray(column.to_numpy())


def _class_names(metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(features[label].get("names", ()))
    except (KeyError, ValueError):
        return ()  # the metadata is optional
