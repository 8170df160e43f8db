"""Loaders: the same images and labels come out of every layout, and nothing runs that a file asks to run."""

import gzip
import hashlib
import io
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vbtta.datasets import (
    ImageData,
    load_cifar10,
    load_cifar10n,
    load_food101,
    load_image_folder,
    load_mnist,
    load_parquet,
    load_utkface,
)
from vbtta.datasets.safe_pickle import load_pickle, load_torch_file

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
            (lambda folder: load_cifar10("test", folder), "cifar-10-batches-py/"),
            (load_cifar10n, "CIFAR-10_human.pt"),
            (lambda folder: load_utkface("train", folder), "UTKFace/"),
            (lambda folder: load_food101("train", folder), "food-101/"),
        ],
    )
    def test_empty_folder_says_what_is_expected(self, load, expected, tmp_path):
        with pytest.raises(FileNotFoundError, match=expected):
            load(tmp_path)

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


class TestCifarBatches:
    @pytest.fixture
    def archive(self, tmp_path, rng) -> tuple[Path, np.ndarray]:
        pixels = rng.integers(256, size=(12, 3, 32, 32), dtype=np.uint8)
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir()
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        for start, name in zip(range(0, 12, 2), names, strict=True):
            rows = slice(start, start + 2)
            batch = {
                b"data": pixels[rows].reshape(2, -1),
                b"labels": [start % 10, 1],
                b"batch_label": b"part",
            }
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [c.encode() for c in CLASSES]}, protocol=2))
        return tmp_path, pixels

    @pytest.fixture
    def people(self) -> dict[str, np.ndarray]:
        columns = {f"random_label{person}": np.arange(10) % (person + 1) for person in (1, 2, 3)}
        clean = np.array([0, 1, 2, 1, 4, 1, 6, 1, 8, 1])
        return columns | {
            "clean_label": clean,
            "aggre_label": clean[::-1].copy(),
            "worse_label": np.zeros(10, int),
        }

    def test_train_and_test(self, archive):
        folder, pixels = archive
        train, test = load_cifar10("train", folder), load_cifar10("test", folder)
        np.testing.assert_array_equal(train.images, pixels[:10])
        np.testing.assert_array_equal(test.images, pixels[10:])
        assert train.labels.tolist() == [0, 1, 2, 1, 4, 1, 6, 1, 8, 1]
        assert test.classes == tuple(CLASSES)

    @pytest.mark.parametrize("archived", [True, False], ids=["zip", "legacy"])
    def test_human_labels(self, archive, people, archived):
        folder, _ = archive
        torch.save(people, folder / "CIFAR-10_human.pt", _use_new_zipfile_serialization=archived)
        data = load_cifar10n(folder)
        assert sorted(data.extra) == ["aggre_label", "label_1", "label_2", "label_3", "worse_label"]
        np.testing.assert_array_equal(data.extra["label_2"], people["random_label2"])
        np.testing.assert_array_equal(data.extra["aggre_label"], people["aggre_label"])

    def test_labels_in_another_order(self, archive, people):
        folder, _ = archive
        people["clean_label"] = people["clean_label"][::-1].copy()
        torch.save(people, folder / "CIFAR-10_human.pt")
        with pytest.raises(ValueError, match="another order"):
            load_cifar10n(folder)

    def test_incomplete(self, archive):
        folder, _ = archive
        (folder / "cifar-10-batches-py" / "data_batch_4").unlink()
        with pytest.raises(FileNotFoundError, match=r"data_batch_4 does not exist.*Unpack"):
            load_cifar10("train", folder)


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class TestSafePickle:
    @pytest.mark.parametrize("protocol", range(6))
    def test_arrays_of_every_protocol(self, tmp_path, rng, protocol):
        content = {
            "numbers": rng.normal(size=(3, 4)),
            "columns first": np.asfortranarray(rng.integers(9, size=(3, 4))),
            "other order": np.arange(3, dtype=">i4"),
            "bytes": np.arange(6, dtype=np.uint8).reshape(2, 3),
            "one": np.float32(1.5),
            "list": [1, 2.5, "text", None, True, (3, 4)],
        }
        (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=protocol))
        read = load_pickle(tmp_path / "file")
        assert list(read) == list(content)
        assert read["list"] == content["list"]
        for name in ("numbers", "columns first", "other order", "bytes", "one"):
            np.testing.assert_array_equal(read[name], content[name])
            assert read[name].dtype == content[name].dtype

    def test_as_python_2_wrote_it(self, tmp_path):
        # Opcode for opcode what Python 2 makes of {"data": array([255, 0, 7], uint8), "labels": [2]}.
        data_type = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        state = b"(K\x01K\x03\x85" + data_type + b"\x89U\x03\xff\x00\x07tb"
        (tmp_path / "file").write_bytes(b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x02eu.")
        read = load_pickle(tmp_path / "file")
        assert read["data"].tolist() == [255, 0, 7]
        assert read["data"].dtype == np.uint8
        assert read["labels"] == [2]

    @pytest.mark.parametrize(
        "evil",
        [
            Malicious(os.mkdir, "ran"),
            Malicious(eval, "__import__('os').mkdir('ran')"),
            Malicious(getattr, "text", "upper"),
            np.array([Malicious(os.mkdir, "ran")], dtype=object),
            np.array([None, 1], dtype=object),
            np.array(["text"]),
            np.zeros(1, dtype=[("field", "i4")]),
            {1, 2},
            Path("ran"),
            torch.nn.Linear,
        ],
        ids=["call", "eval", "getattr", "object array", "objects", "text", "fields", "set", "path", "class"],
    )
    @pytest.mark.parametrize("protocol", [2, 5])
    def test_anything_else_is_refused_and_not_run(self, tmp_path, monkeypatch, evil, protocol):
        monkeypatch.chdir(tmp_path)
        Path("file").write_bytes(pickle.dumps({"data": evil}, protocol=protocol))
        with pytest.raises(ValueError, match="file cannot be read"):
            load_pickle("file")
        assert not Path("ran").exists()

    def test_torch_files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        torch.save({"labels": Malicious(os.mkdir, "ran")}, "evil.pt")
        with pytest.raises(ValueError, match="which is not read"):
            load_torch_file("evil.pt")
        assert not Path("ran").exists()
        torch.save({"labels": torch.zeros(2)}, "tensors.pt")
        with pytest.raises(ValueError, match=r"tensors\.pt cannot be read"):
            load_torch_file("tensors.pt")

    def test_shape_that_does_not_fit(self, tmp_path):
        raw = pickle.dumps(np.arange(6, dtype=np.uint8).reshape(2, 3), protocol=2)
        broken = raw.replace(b"K\x02K\x03", b"K\x02K\x04")
        assert broken != raw
        (tmp_path / "file").write_bytes(broken)
        with pytest.raises(ValueError, match="does not fit 6 bytes"):
            load_pickle(tmp_path / "file")

    @pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02]q\x00h\x00a."], ids=["empty", "text", "loop"])
    def test_damaged(self, tmp_path, content):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            load_pickle(tmp_path / "file")


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

    def test_table_of_class_names(self, tmp_path, rng):
        pixels = rng.integers(256, size=(3, 5, 5, 3), dtype=np.uint8)
        for row, image in enumerate(pixels):
            Image.fromarray(image).save(tmp_path / f"{row}.png")
        table = tmp_path / "labels.csv"
        table.write_text("path,label,second\n2.png,dog,1\n0.png,cat,2\n1.png,dog,3\n")
        data = load_image_folder(tmp_path, table)
        np.testing.assert_array_equal(data.images, pixels[[2, 0, 1]].transpose(0, 3, 1, 2))
        assert data.classes == ("cat", "dog")
        assert data.labels.tolist() == [1, 0, 1]
        assert data.extra["second"].tolist() == [1, 2, 3]
        assert load_image_folder(tmp_path, table, mode="L").images.shape == (3, 1, 5, 5)

    def test_table_of_numbers(self, tmp_path):
        for name in ("a", "b"):
            Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
        table = tmp_path / "labels.csv"
        table.write_text("file,age\na.png,1.5\nb.png,2\n")
        data = load_image_folder(tmp_path, table, path="file", label="age")
        assert data.labels.tolist() == [1.5, 2.0]
        assert data.classes == ()

    def test_table_errors_name_the_place(self, tmp_path):
        Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
        table = tmp_path / "labels.csv"
        table.write_text("path,label\na.png,1\n")
        with pytest.raises(ValueError, match="no column 'age'; it has path, label"):
            load_image_folder(tmp_path, table, label="age")
        table.write_text("path,label\na.png,1\na.png,\n")
        with pytest.raises(ValueError, match="row 3"):
            load_image_folder(tmp_path, table)
        table.write_text("path,label\nabsent.png,1\n")
        with pytest.raises(ValueError, match=r"absent\.png is not an image that can be read"):
            load_image_folder(tmp_path, table)
