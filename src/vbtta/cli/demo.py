"""`vbtta demo`: a network that finds cells, three raters, twelve views; training, fit, comparison, diagnosis, report.

An illustration, not evidence: images, raters and views are made up, and were chosen so that views can help.
"""

__all__ = ["run"]

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from vbtta import metrics
from vbtta._support.checks import require
from vbtta.augment.arrays import Identity
from vbtta.augment.base import Augmentation
from vbtta.augment.images import Blur, Brightness, Contrast, HorizontalFlip, Rotate, Rotate90, VerticalFlip, Zoom
from vbtta.cli.files import comparison_table, write_arrays, write_run_report
from vbtta.cli.running import Talk, write_json
from vbtta.comparison import compare
from vbtta.data.files import write_table
from vbtta.data.labels import Array, LabelSets
from vbtta.dense import collect_dense
from vbtta.diagnostics import diagnose
from vbtta.fit import fit_policy
from vbtta.module import TTAModule
from vbtta.report.documents import (
    annotators_in_words,
    comparison_document,
    diagnosis_document,
    gain_in_words,
    policy_document,
    views_in_words,
)
from vbtta.report.maps import map_arrays, map_examples

_METHODS = ("original", "original+t", "uniform", "uniform+t", "aug_tta", "greedy", "vbtta")
_SIZE = 64  # pixels across an image
_N_TRAIN, _N_CALIBRATION, _N_TEST = 16, 40, 60
_LIGHT = (1.0, 0.8, 0.8)  # brightness of the three parts: the lamp got dimmer after the training
RATERS = {"ann": "careful", "bob": "draws wide", "cleo": "misses cells"}


class Cells(NamedTuple):
    """Images of cells."""

    images: Array  # (N, 1, H, W) float32
    cells: Array  # (N, H, W): 0 background, else the number of the cell


def run(out: Path, seed: int, talk: Talk) -> None:
    """Make the files of a run and its report, and print what came out."""
    started = time.perf_counter()
    torch = require("torch", "torch")
    with require("threadpoolctl", "cli").threadpool_limits(1):  # fastest for so little data
        document, findings = _fit_and_compare(torch, out, seed, talk)
    talk.note("writing the report ...")
    write_run_report(out, out / "report.html", Talk(False, True))
    seconds = time.perf_counter() - started
    texts = [
        "\n  ".join(["What was gained", *findings["gained"]]),
        comparison_table(document["comparison"], talk),
        "\n  ".join(["What was learned", *findings["learned"]]),
        "\n  ".join(["Diagnosis", *document["diagnosis"]]),
        "Images and raters are made up: the numbers illustrate, they are no evidence.",
        f"Done in {seconds:.0f} s. Open {out / 'report.html'}",
    ]
    talk.result(document | {"written": str(out / "report.html"), "seconds": seconds}, "\n\n".join(texts))


def _fit_and_compare(torch: Any, out: Path, seed: int, talk: Talk) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Write the files of a run to the folder; its document for --json, and sentences by title."""
    train, calibration, test = (
        draw_cells(n, light, np.random.default_rng([seed, part]))
        for part, (n, light) in enumerate(zip((_N_TRAIN, _N_CALIBRATION, _N_TEST), _LIGHT, strict=True))
    )
    talk.note(f"training a small U-Net on {_N_TRAIN} images of cells ...")
    network = train_network(torch, train, seed)
    drawn, views = rate(calibration.cells, np.random.default_rng([seed, 3])), make_views()
    talk.note(f"predicting {_N_CALIBRATION + _N_TEST} images under {len(views)} views ...")
    tensors = [torch.from_numpy(part.images) for part in (calibration, test)]
    classes, truth = ["background", "cell"], (test.cells > 0).astype(int)
    collected = [
        collect_dense(network, inputs, views, target, positions=n, seed=seed, classes=classes, raters=raters)
        for inputs, target, n, raters in ((tensors[0], drawn, 50, list(RATERS)), (tensors[1], truth, 200, None))
    ]
    for prefix, (predictions, labels) in zip(("", "test_"), collected, strict=True):
        predictions.save(out / f"{prefix}predictions.npz")
        write_table(out / f"{prefix}labels.csv", _columns(labels, predictions.ids, classes))
    (predictions, labels), (test_predictions, test_labels) = collected
    skill = dict(zip(RATERS, (drawn == (calibration.cells > 0)[:, None]).mean(axis=(0, 2, 3)).tolist(), strict=True))

    talk.note(f"fitting to {len(labels):,} labels of three raters ...")
    policy = fit_policy(predictions, labels, task="classification", seed=seed)
    policy.save(out / "policy.json")
    talk.note(f"comparing {len(_METHODS)} methods on {_N_TEST} images with the true outlines ...")
    outcome = compare(
        predictions, labels, test_predictions, test_labels, task="classification", methods=_METHODS, seed=seed
    )
    comparison = comparison_document(outcome)
    write_json(out / "comparison.json", comparison)
    diagnosis = diagnose(policy, predictions, labels, incoming=test_predictions, seed=seed)
    write_json(out / "diagnosis.json", diagnosis_document(diagnosis))

    module = TTAModule(network, views, policy).eval()
    examples = map_examples(module, list(tensors[1]), list(truth), background=0)
    write_arrays(out / "maps.npz", map_arrays(examples))
    with torch.no_grad():
        proba = {"network": network(tensors[1]).softmax(1).numpy(), "policy": module(tensors[1]).numpy()}
    dice = {name: metrics.dice(truth, maps, background=0) for name, maps in proba.items()}
    overlap = f"Overlap with the true cells (Dice): {dice['policy']:.3f}, by the network alone {dice['network']:.3f}."
    gained = [overlap, *gain_in_words(comparison)]
    learned = [*views_in_words(policy), *annotators_in_words(policy, skill)]
    people = ", ".join(f"{name} {manner}" for name, manner in RATERS.items())
    text = [
        f"A small network learned to find cells in {_N_TRAIN} made-up images. Three simulated raters outlined the "
        f"cells of {_N_CALIBRATION} more ({people}); {_N_TEST} images with the true outlines are the test. The lamp is "
        "dimmer there than in the training images, as it happens, so views with more contrast help.",
        "An illustration: images and raters are made up so that views can help.",
        overlap,
    ]
    story = {"title": f"Finding cells: three raters, {len(views)} views", "text": text, "skill": skill}
    write_json(out / "run.json", {"story": story, "options": {"command": "vbtta demo", "seed": seed}})
    summary = diagnosis.summary().splitlines()
    document = {**policy_document(policy), "comparison": comparison, "diagnosis": summary, "skill": skill, "dice": dice}
    return document, {"gained": gained, "learned": learned}


def _columns(labels: LabelSets, ids: Array | None, classes: list[str]) -> dict[str, Array]:
    """A long table of labels."""
    assert ids is not None
    columns = {"instance": ids[labels.instance], "label": np.array(classes)[labels.value.astype(int).ravel()]}
    if labels.annotator is not None:
        columns["annotator"] = np.array(labels.annotator_names)[labels.annotator]
    return columns


# -- cells, raters, views, network ----------------------------------------------------------------


def draw_cells(n: int, light: float, rng: np.random.Generator) -> Cells:
    """Bright ellipses on an uneven, noisy background."""
    rows, columns = np.mgrid[:_SIZE, :_SIZE]
    images, cells = np.zeros((n, 1, _SIZE, _SIZE), np.float32), np.zeros((n, _SIZE, _SIZE), np.int64)
    for image, numbers in zip(images[:, 0], cells, strict=True):
        slope = rng.normal(size=2) * 0.25
        image += 0.3 + (slope[0] * rows + slope[1] * columns) / _SIZE
        for number in range(1, rng.integers(5, 10)):
            y, x = rng.uniform(4, _SIZE - 4, size=2)
            long, short = rng.uniform(6, 10), rng.uniform(4, 6)
            angle = rng.uniform(0, np.pi)
            along = (rows - y) * np.cos(angle) + (columns - x) * np.sin(angle)
            across = (columns - x) * np.cos(angle) - (rows - y) * np.sin(angle)
            radius = np.hypot(along / long, across / short)
            image += rng.uniform(0.25, 0.7) / (1 + np.exp(12 * (radius - 1)))
            numbers[radius < 1] = number
        image[:] = light * np.clip(ndimage.gaussian_filter(image, 0.7) + 0.15 * rng.normal(size=image.shape), 0, 1)
    return Cells(images, cells)


def rate(cells: Array, rng: np.random.Generator) -> Array:
    """Cell or not by the three raters: (N, R, H, W)."""
    marked = np.stack([cells > 0] * len(RATERS), axis=1)
    for numbers, (careful, wide, sparse) in zip(cells, marked, strict=True):
        rough = ndimage.gaussian_filter(rng.normal(size=numbers.shape), 2) * 4
        careful[:] = ndimage.gaussian_filter((numbers > 0).astype(float), 1) > 0.5 + 0.1 * rough
        wide[:] = ndimage.binary_dilation(numbers > 0, iterations=2)
        sparse[np.isin(numbers, np.flatnonzero(rng.random(numbers.max() + 1) < 0.3))] = False
    return marked.astype(np.int64)


def make_views() -> list[Augmentation]:
    """Twelve views: turns and mirrors, more contrast, and some that the network cannot read."""
    turned = [HorizontalFlip(), VerticalFlip(), Rotate90(1), Rotate90(2), Rotate90(3)]
    return [Identity(), *turned, Contrast(1.3), Contrast(1.6), Zoom(1.2), Blur(1.5), Brightness(0.3), Rotate(30.0)]


def train_network(torch: Any, data: Cells, seed: int) -> Any:
    """A U-Net of one level."""
    nn = torch.nn

    class UNet(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
            )
            self.low = nn.Sequential(
                nn.MaxPool2d(4), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
                nn.Upsample(scale_factor=4, mode="bilinear"),
            )  # fmt: skip
            self.end = nn.Conv2d(36, 2, 3, padding=1)

        def forward(self, images: Any) -> Any:
            top = self.top(images)
            return self.end(torch.cat([top, self.low(top)], 1))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = UNet()
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        images, masks = torch.from_numpy(data.images), torch.from_numpy((data.cells > 0).astype(np.int64))
        for _ in range(40):
            for rows in torch.randperm(len(images)).split(8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(images[rows]), masks[rows]).backward()
                optimizer.step()
    return network.eval()
