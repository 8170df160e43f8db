"""Loaders of the paper's data sets: the same images and labels come out of every layout."""

import gzip
import hashlib
import io
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from reproduction.datasets import (
    ImageData,
    load_cifar10,
    load_cifar10n,
    load_food101,
    load_mnist,
    load_parquet,
    load_utkface,
)

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_parquet(path: Path, pixels: np.ndarray, names: list[str] | None = None, **columns: list) -> None:
    cells = [{"bytes": png(image), "path": None} for image in pixels]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, image_type), **columns})
    features = {"label": {"names": names, "_type": "ClassLabel"}} if names else {}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)


class TestImageData:
    def test_take_keeps_columns_and_source_rows_together(self, rng):
        images = rng.integers(256, size=(6, 3, 2, 2), dtype=np.uint8)
        data = ImageData(images, np.arange(6), {"other": np.arange(6) * 10}, ids=np.arange(6) + 100)
        part = data.take(np.array([False, True, False, False, True, True])).take([2, 0])
        assert part.ids.tolist() == [105, 101]
        assert part.labels.tolist() == [5, 1]
        assert part.extra["other"].tolist() == [50, 10]
        np.testing.assert_array_equal(part.images, images[[5, 1]])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"images": np.zeros((2, 4, 4, 3), np.uint8)}, "images must be uint8"),
            ({"images": np.zeros((2, 3, 4, 4))}, "images must be uint8"),
            ({"labels": np.zeros(3)}, "labels must have one entry per image"),
            ({"extra": {"age": np.zeros(1)}}, "age must have one entry per image"),
            ({"labels": np.array([0, 2]), "classes": ("a", "b")}, r"class numbers in 0\.\.1; got 0\.\.2"),
        ],
    )
    def test_wrong_shapes_are_named(self, change, message):
        right = {"images": np.zeros((2, 3, 4, 4), np.uint8), "labels": np.zeros(2)}
        with pytest.raises(ValueError, match=message):
            ImageData(**(right | change))


class TestWhere:
    def test_folder_from_environment(self, tmp_path, rng, monkeypatch):
        pixels = rng.integers(256, size=(2, 28, 28), dtype=np.uint8)
        write_parquet(tmp_path / "mnist-test.parquet", pixels, [str(digit) for digit in range(10)], label=[7, 1])
        monkeypatch.setenv("VBTTA_DATA", str(tmp_path))
        data = load_mnist("test")
        np.testing.assert_array_equal(data.images[:, 0], pixels)
        assert data.labels.tolist() == [7, 1]
        assert data.classes[7] == "7"

    def test_no_folder(self, monkeypatch):
        monkeypatch.delenv("VBTTA_DATA", raising=False)
        with pytest.raises(FileNotFoundError, match="set the environment variable VBTTA_DATA"):
            load_mnist("test")

    def test_folder_does_not_exist(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
            load_mnist("test", tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("load", "expected"),
        [
            (lambda folder: load_mnist("train", folder), "train-images-idx3-ubyte"),
            (lambda folder: load_cifar10("test", folder), r"cifar10-test\.parquet"),
            (load_cifar10n, r"cifar10n-train\.parquet"),
            (lambda folder: load_utkface("train", folder), "UTKFace/"),
            (lambda folder: load_food101("train", folder), "food-101/"),
        ],
    )
    def test_empty_folder_says_what_is_expected(self, load, expected, tmp_path):
        with pytest.raises(FileNotFoundError, match=expected):
            load(tmp_path)

    @pytest.mark.parametrize("load", [lambda folder: load_cifar10("test", folder), load_cifar10n])
    def test_pickled_archives_are_not_read(self, load, tmp_path):
        (tmp_path / "cifar-10-batches-py").mkdir()
        (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"cos\nsystem\n")
        with pytest.raises(FileNotFoundError, match="not read: parquet files, idx files and folders") as told:
            load(tmp_path)
        assert len(str(told.value).splitlines()) == 1

    def test_unknown_split(self, tmp_path):
        with pytest.raises(ValueError, match="split must be 'train' or 'test'; got 'valid'"):
            load_mnist("valid", tmp_path)


class TestParquet:
    def test_cifar10n_columns(self, tmp_path, rng):
        pixels = rng.integers(256, size=(3, 32, 32, 3), dtype=np.uint8)
        people = {f"label_{person}": [person, 0, 9] for person in (1, 2, 3)}
        write_parquet(tmp_path / "cifar10n-train.parquet", pixels, CLASSES, label=[1, 0, 9], **people)
        data = load_cifar10n(tmp_path)
        np.testing.assert_array_equal(data.images, pixels.transpose(0, 3, 1, 2))
        assert data.extra["label_3"].tolist() == [3, 0, 9]
        assert data.classes == tuple(CLASSES)
        assert load_cifar10("train", tmp_path).extra == {}

    def test_utkface_keeps_one_of_each_image_and_its_row(self, tmp_path, rng):
        write_parquet(
            tmp_path / "utkface.parquet",
            rng.integers(256, size=(5, 8, 8, 3), dtype=np.uint8),
            age=[20, 30, 40, 50, 60],
            split=["train", "test", "train", "test", "train"],
            duplicate_of=["", "", "a.jpg", "", ""],
        )
        train, test = load_utkface("train", tmp_path), load_utkface("test", tmp_path, size=4)
        assert train.labels.tolist() == [20, 60]
        assert train.ids.tolist() == [0, 4]
        assert test.labels.tolist() == [30, 50]
        assert test.images.shape == (2, 3, 4, 4)

    def test_food_sample_splits(self, tmp_path, rng):
        pixels = rng.integers(256, size=(3, 8, 8, 3), dtype=np.uint8)
        write_parquet(
            tmp_path / "food101-10.parquet",
            pixels,
            ["pie", "ribs"],
            label=[0, 1, 1],
            split=["train", "test", "train"],
        )
        assert load_food101("train", tmp_path).labels.tolist() == [0, 1]
        assert load_food101("test", tmp_path).ids.tolist() == [1]
        with pytest.raises(ValueError, match="needs the official folder"):
            load_food101("test", tmp_path, classes=3)

    def test_missing_column_and_broken_image_are_named(self, tmp_path, rng):
        path = tmp_path / "some.parquet"
        write_parquet(path, rng.integers(256, size=(2, 4, 4, 3), dtype=np.uint8), label=[0, 1])
        with pytest.raises(ValueError, match="no column 'age'; it has image, label"):
            load_parquet(path, label="age")
        with pytest.raises(FileNotFoundError, match=r"other\.parquet does not exist"):
            load_parquet(tmp_path / "other.parquet")
        pq.write_table(pa.table({"image": [png(np.zeros((4, 4, 3), np.uint8)), b"no image"], "label": [0, 1]}), path)
        with pytest.raises(ValueError, match="row 1 is not an image"):
            load_parquet(path)

    def test_images_of_two_sizes_need_a_size(self, tmp_path):
        path = tmp_path / "some.parquet"
        cells = [png(np.zeros((4, 4, 3), np.uint8)), png(np.full((6, 9, 3), 200, np.uint8))]
        pq.write_table(pa.table({"image": cells, "label": [0.5, 1.5]}), path)
        with pytest.raises(ValueError, match=r"row 1: the image is 9 x 6 pixels, the first one 4 x 4.*size="):
            load_parquet(path)
        data = load_parquet(path, size=4)
        assert data.images.shape == (2, 3, 4, 4)
        assert data.images[1].min() == data.images[1].max() == 200
        assert data.labels.tolist() == [0.5, 1.5]


class TestIdx:
    @pytest.mark.parametrize("gzipped", [False, True])
    def test_round_trip(self, tmp_path, rng, gzipped):
        pixels = rng.integers(256, size=(4, 28, 28), dtype=np.uint8)
        folder = tmp_path / "MNIST" / "raw"
        folder.mkdir(parents=True)
        files = {
            "t10k-images-idx3-ubyte": struct.pack(">IIII", 0x803, 4, 28, 28) + pixels.tobytes(),
            "t10k-labels-idx1-ubyte": struct.pack(">II", 0x801, 4) + bytes([3, 1, 4, 1]),
        }
        for name, content in files.items():
            if gzipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        data = load_mnist("test", tmp_path)
        np.testing.assert_array_equal(data.images[:, 0], pixels)
        assert data.labels.tolist() == [3, 1, 4, 1]

    def test_damaged(self, tmp_path):
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 1) + b"\1")
        images = tmp_path / "train-images-idx3-ubyte"
        images.write_bytes(struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(100))
        with pytest.raises(ValueError, match=r"should hold \[2, 28, 28\] bytes but holds 100"):
            load_mnist("train", tmp_path)
        images.write_bytes(b"<html>")
        with pytest.raises(ValueError, match="not an idx file"):
            load_mnist("train", tmp_path)


class TestFolders:
    def test_food(self, tmp_path, rng):
        folder = tmp_path / "food-101"
        (folder / "meta").mkdir(parents=True)
        (folder / "meta" / "classes.txt").write_text("pie\nribs\nsalad\n")
        (folder / "meta" / "train.txt").write_text("salad/3\npie/1\n")
        (folder / "meta" / "test.txt").write_text("ribs/2\n")
        for number, name in enumerate(("pie/1", "ribs/2", "salad/3"), start=1):
            path = folder / "images" / f"{name}.jpg"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (20, 10), (number * 50,) * 3).save(path)
        train = load_food101("train", tmp_path, size=8)
        assert train.images.shape == (2, 3, 8, 8)
        assert train.labels.tolist() == [2, 0]
        assert [round(float(image.mean())) for image in train.images] == [150, 50]
        assert load_food101("test", tmp_path).images.shape == (1, 3, 64, 64)
        assert load_food101("train", tmp_path, classes=1).extra["path"].tolist() == ["pie/1"]
        chosen = load_food101("train", tmp_path, classes=["salad", "pie"])
        assert chosen.classes == ("salad", "pie")
        assert chosen.labels.tolist() == [0, 1]
        with pytest.raises(ValueError, match="classes has \\['soup'\\]"):
            load_food101("train", tmp_path, classes=["soup"])

    def test_utkface(self, tmp_path, rng):
        folder = tmp_path / "UTKFace"
        folder.mkdir()
        names = [f"{age}_0_1_2017{age:04d}.jpg.chip.jpg" for age in range(1, 31)]
        for name in names:
            Image.fromarray(rng.integers(256, size=(10, 10, 3), dtype=np.uint8)).save(folder / name)
        copy = "99_0_0_copy.jpg"
        (folder / copy).write_bytes((folder / sorted(names)[0]).read_bytes())
        train, test = load_utkface("train", tmp_path, size=8), load_utkface("test", tmp_path, size=8)
        assert sorted([*train.extra["path"], *test.extra["path"]]) == sorted(names)
        for data, is_test in ((train, False), (test, True)):
            assert len(data) > 0
            for name, age, row in zip(data.extra["path"], data.labels, data.ids, strict=True):
                digest = hashlib.sha256(str(name).encode()).digest()
                assert (int.from_bytes(digest[:8], "big") % 100 < 20) == is_test
                assert int(name.split("_")[0]) == age
                assert sorted([*names, copy])[row] == name
        (folder / "holiday.jpg").write_bytes(png(np.zeros((4, 4, 3), np.uint8)))
        with pytest.raises(ValueError, match=r"holiday\.jpg has no age"):
            [load_utkface(split, tmp_path) for split in ("train", "test")]
