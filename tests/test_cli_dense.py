"""Folders of images and masks on the command line."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from test_cli import run
from vbtta import LabelSets, Policy, ViewPredictions
from vbtta.data.images import read_image, read_mask, write_map

NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    network = nn.Conv2d(1, 3, 3, padding=1)
    with torch.no_grad():
        network.weight.mul_(0.1)
        network.weight[:, 0, 1, 1] = torch.tensor([-9.0, 0.0, 9.0])
        network.bias.copy_(torch.tensor([4.0, 1.0, -5.0]))
    return network

def make_3d():
    return nn.Conv3d(1, 2, 1)
"""
VIEWS = '[[views]]\nview = "Identity"\n\n[[views]]\nview = "HorizontalFlip"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("densenet.py").write_text(NETWORK)
    Path("views.toml").write_text(VIEWS)
    rng = np.random.default_rng(0)
    for name in ("images", "ann", "bob"):
        Path(name).mkdir()
    for i in range(8):
        mask = rng.integers(0, 3, size=(3, 4 + i)).repeat(4, 0).repeat(4, 1).astype(np.uint8)
        noisy = np.clip(mask * 100 + 20 * rng.normal(size=mask.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(f"images/{i}.{'tif' if i % 2 else 'png'}")
        Image.fromarray(mask).save(f"ann/{i}.png")
        drawn = np.where(rng.random(mask.shape) < 0.2, rng.integers(0, 3, mask.shape), mask).astype(np.uint8)
        if i != 3:
            Image.fromarray(drawn).save(f"bob/{i}.png")
    return tmp_path


COLLECT = ("views", "--dense", "--predictor", "densenet:make", "--data", "images", "--views", "views.toml")


def test_images_and_masks_become_predictions_a_policy_and_maps(folder):
    result = run(*COLLECT, "--masks", "ann", "--out", "p.npz", "--labels", "l.csv", "--positions", "60")
    assert (result.code, result.err) == (0, ""), result.err
    predictions, labels = ViewPredictions.load("p.npz"), LabelSets.load("l.csv")
    assert predictions.outputs.shape == (480, 2, 3)
    assert labels.annotator is None
    assert sorted(set(predictions.groups.tolist())) == [str(i) for i in range(8)]
    name, place = str(predictions.ids[-1]).split(":")  # type: ignore[index]
    answer = predictions.align(labels).value[-1]
    assert answer == np.asarray(Image.open(f"ann/{name}.png")).ravel()[int(place)]
    assert run("fit", "p.npz", "l.csv", "--task", "classification", "--out", "policy.json").code == 0
    arguments = ("--predictor", "densenet:make", "--views", "views.toml", "--policy", "policy.json")
    assert "would be overwritten" in run("predict", "images", "--dense", *arguments, "--out", "images").err
    result = run("predict", "images", "--dense", *arguments, "--out", "maps", "--entropy")
    assert result.code == 0, result.err
    scores = []
    for i in range(8):
        truth, drawn = (np.asarray(Image.open(f"{name}/{i}.png")) for name in ("ann", "maps"))
        entropy = np.asarray(Image.open(f"maps/{i}_entropy.tif"))
        assert truth.shape == drawn.shape == entropy.shape
        assert 0 <= entropy.min() < entropy.max() <= np.log(3) + 1e-6
        scores.append((truth == drawn).mean())
    assert np.mean(scores) > 0.9
    assert entropy[truth != drawn].mean() > entropy[truth == drawn].mean()


def test_folders_of_masks_are_raters(folder):
    result = run(*COLLECT, "--masks", "ann", "--masks", "bob", "--out", "p.npz", "--labels", "l.parquet")
    assert result.code == 0, result.err
    labels = LabelSets.load("l.parquet")
    assert sorted(labels.annotator_names) == ["ann", "bob"]
    assert sorted(np.unique(labels.labels_per_instance).tolist()) == [1, 2]  # one image has no mask of bob's
    assert (
        run("fit", "p.npz", "l.parquet", "--task", "classification", "--model", "mixture", "--out", "p.json").code == 0
    )
    policy = Policy.load("p.json")
    accuracy = dict(zip(policy.annotator_names, policy.annotators.accuracy, strict=True))
    assert accuracy["ann"] > accuracy["bob"] + 0.05


def test_the_report_of_a_segmentation_has_pictures(folder):
    Path("run").mkdir()
    masks = ("--masks", "ann", "--masks", "bob")
    assert run(*COLLECT, *masks, "--out", "run/predictions.npz", "--labels", "run/labels.csv").code == 0
    fit = ("fit", "run/predictions.npz", "run/labels.csv", "--task", "classification", "--out", "run/policy.json")
    assert run(*fit).code == 0
    network = ("--predictor", "densenet:make", "--views", "views.toml")
    result = run("report", "run", "--data", "images", *masks, *network)
    assert result.code == 0, result.err
    page = Path("run/report.html").read_text()
    assert "ann" in page.partition("annotators-section")[2]
    assert 'id="reliability-' in page
    shown = re.findall(r"<h3>Image (\d): Dice ([\d.]+)</h3>", page)
    scores = [float(score) for _, score in shown]
    assert len(shown) == 4
    assert scores == sorted(scores)
    assert {f'alt="{title} of' in page for title in ("input", "truth", "prediction", "entropy", "hflip")} == {True}
    Image.fromarray(np.full((12, 16), 7, np.uint8)).save("ann/0.png")  # no class of the policy: nothing to score
    result = run("report", "run", "--data", "images", "--masks", "ann", *network)
    assert result.code == 0, result.err
    assert "Image 0:" not in Path("run/report.html").read_text()
    result = run("report", "run", "--data", "images", "--masks", "ann", "--predictor", "densenet:make")
    assert (result.code, result.out) == (2, "")


def test_ignored_values_and_images_without_masks_are_left_out(folder):
    Path("ann/0.png").unlink()
    result = run(*COLLECT, "--masks", "ann", "--out", "p.npz", "--labels", "l.csv", "--ignore", "2")
    assert "1 images without a mask are left out" in result.err
    assert set(LabelSets.load("l.csv").value.tolist()) == {0, 1}


def test_masks_of_other_values_than_class_numbers(folder):
    for file in Path("ann").glob("*.png"):
        Image.fromarray(np.asarray(Image.open(file)) * np.uint8(100)).save(file)
    classes = [part for value in (0, 100, 200) for part in ("--classes", str(value))]
    assert run(*COLLECT, "--masks", "ann", "--out", "p.npz", "--labels", "l.csv", *classes).code == 0
    assert set(LabelSets.load("l.csv").value.tolist()) <= {0, 100, 200}
    assert list(ViewPredictions.load("p.npz").classes) == [0, 100, 200]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "p.npz"), "--dense needs --masks, --labels and --backend local"),
        (("--masks", "ann", "--masks", "twin/ann", "--out", "p.npz", "--labels", "l.csv"), "must differ"),
        (("--masks", "ann", "--out", "p.npz", "--labels", "l.csv", "--batch-size", "2"), "leave out --batch-size"),
        (("--masks", "none", "--out", "p.npz", "--labels", "l.csv"), "none: no such folder"),
        (("--masks", "empty", "--out", "p.npz", "--labels", "l.csv"), "empty: no such folder of images"),
        (("--masks", "other", "--out", "p.npz", "--labels", "l.csv"), "has a mask of its name in other"),
        (("--masks", "colour", "--out", "p.npz", "--labels", "l.csv"), "is a colour image"),
    ],
)
def test_wrong_folders_are_refused(folder, arguments, message):
    for name in ("empty", "other", "colour", "twin/ann"):
        Path(name).mkdir(parents=True)
    Image.fromarray(np.zeros((12, 16), np.uint8)).save("twin/ann/0.png")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save("other/x.png")
    Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save("colour/0.png")
    result = run(*COLLECT, *arguments)
    assert result.code in (1, 2)
    assert message in result.err
    assert len(result.err.strip().splitlines()) <= 2


def test_predicting_maps_needs_a_network(folder):
    result = run("predict", "images", "--dense", "--policy", "policy.json", "--out", "maps")
    assert (result.code, result.out) == (2, "")
    assert "--dense needs --predictor and --views" in result.err


def test_kinds_of_image_files(tmp_path):
    rng = np.random.default_rng(0)
    kinds = {
        "grey.png": rng.integers(0, 256, (4, 5), dtype=np.uint8),
        "deep.tif": rng.integers(0, 65536, (4, 5), np.uint16),
    }
    kinds |= {"rgb.png": rng.integers(0, 256, (4, 5, 3), dtype=np.uint8), "float.tif": rng.random((4, 5), np.float32)}
    for name, pixels in kinds.items():
        Image.fromarray(pixels).save(tmp_path / name)
        scale = {"u1": 255, "u2": 65535}.get(pixels.dtype.str[1:], 1)
        expected = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
        np.testing.assert_allclose(read_image(tmp_path / name), expected / scale, rtol=1e-6)
    palette = Image.fromarray(np.array([[0, 2], [1, 0]], np.uint8))
    palette = palette.convert("P")
    palette.save(tmp_path / "palette.png")
    assert read_mask(tmp_path / "palette.png").tolist() == np.asarray(palette).tolist()
    palette.save(tmp_path / "pages.tif", save_all=True, append_images=[palette])
    with pytest.raises(ValueError, match="is not an image that can be read: it has 2 pages"):
        read_image(tmp_path / "pages.tif")
    write_map(tmp_path / "many.png", np.array([[0, 300]]), tmp_path / "grey.png")
    assert read_mask(tmp_path / "many.png").tolist() == [[0, 300]]
    write_map(tmp_path / "depth.tif", np.array([[0.5, 1.25]], np.float32), tmp_path / "grey.png")
    assert read_mask(tmp_path / "depth.tif").tolist() == [[0.5, 1.25]]


def test_volumes_keep_their_geometry(folder):
    nibabel = pytest.importorskip("nibabel")
    rng, affine = np.random.default_rng(0), np.diag([1.0, 2.0, 3.0, 1.0])
    for name in ("volumes", "truth"):
        Path(name).mkdir()
    for i in range(6):
        volume = rng.normal(size=(5, 6, 7)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(volume, affine), f"volumes/{i}.nii.gz")
        nibabel.save(nibabel.Nifti1Image((volume > 0).astype(np.uint8), affine), f"truth/{i}.nii.gz")
    Path("views.toml").write_text(VIEWS.replace('"HorizontalFlip"', '"Flip"\naxes = [0]'))
    network = ("--predictor", "densenet:make_3d", "--views", "views.toml")
    files = ("--data", "volumes", "--masks", "truth", "--out", "p.npz", "--labels", "l.csv")
    result = run("views", "--dense", *network, *files)
    assert result.code == 0, result.err
    assert run("fit", "p.npz", "l.csv", "--task", "classification", "--out", "policy.json").code == 0
    result = run("predict", "volumes", "--dense", *network, "--policy", "policy.json", "--out", "maps", "--entropy")
    assert result.code == 0, result.err
    for name in ("0.nii.gz", "0_entropy.nii.gz"):
        image = nibabel.load(f"maps/{name}")
        assert image.shape == (5, 6, 7)
        np.testing.assert_array_equal(image.affine, affine)
