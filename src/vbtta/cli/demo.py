"""`vbtta demo`: a network that finds cells, three raters, twelve views; training, fit, comparison, diagnosis, report.

An illustration, not evidence: images, raters and views are made up, and were chosen so that views can help.
"""

import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from vbtta import metrics
from vbtta._support.checks import require
from vbtta.augment.serial import load_views
from vbtta.cli.files import comparison_table, write_run_report
from vbtta.cli.running import Talk, write_json
from vbtta.comparison import compare
from vbtta.data.labels import Array
from vbtta.dense import collect_dense
from vbtta.diagnostics import diagnose
from vbtta.diagnostics.diagnosis import annotators_in_words
from vbtta.module import TTAModule
from vbtta.report import documents
from vbtta.report.maps import map_examples
from vbtta.select import select_views

_METHODS = ("original", "original+t", "uniform", "uniform+t", "aug_tta", "greedy")
_BUDGET = 4  # passes of the network per image
_SIZE = 64  # pixels across an image
_N_TRAIN, _N_CALIBRATION, _N_TEST = 16, 40, 60
_LIGHT = (1.0, 0.8, 0.8)  # brightness of the three parts: the lamp got dimmer after the training
VIEWS = Path(__file__).with_name("demo_views.toml")
RATERS = {"ann": "careful", "bob": "draws wide", "cleo": "misses cells"}


def run(out: Path, seed: int, talk: Talk) -> None:
    """Make the files of a run and its report, and print what came out."""
    started = time.perf_counter()
    torch = require("torch", "torch")
    with require("threadpoolctl", "cli").threadpool_limits(1):  # fastest for so little data
        document, findings = _fit_and_compare(torch, out, seed, talk)
    seconds = time.perf_counter() - started
    gained, learned, checked = (
        "\n".join([title, *(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="    ") for line in lines)])
        for title, lines in findings.items()
    )
    table = comparison_table(document["comparison"], talk)
    closing = "Images and raters are simulated: the numbers are an illustration, not evidence."
    done = f"Done in {seconds:.0f} s. Open {out / 'report.html'}"
    text = "\n\n".join([gained, table, learned, checked, closing, done])
    talk.result(document | {"written": str(out / "report.html"), "seconds": seconds}, text)


def _fit_and_compare(torch: Any, out: Path, seed: int, talk: Talk) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Write the files of a run to the folder; its document for --json, and sentences by title."""
    train, calibration, test = (
        draw_cells(n, light, np.random.default_rng([seed, part]))
        for part, (n, light) in enumerate(zip((_N_TRAIN, _N_CALIBRATION, _N_TEST), _LIGHT, strict=True))
    )
    talk.note(f"training a small U-Net on {_N_TRAIN} images of cells ...")
    network, views = train_network(torch, *train, seed), load_views(VIEWS)
    (images, cells), (test_images, test_cells) = ((torch.from_numpy(part[0]), part[1]) for part in (calibration, test))
    drawn, truth = rate(cells, np.random.default_rng([seed, 3])), (test_cells > 0).astype(int)
    talk.note(f"predicting {_N_CALIBRATION + _N_TEST} images under {len(views)} views ...")
    fitted = collect_dense(network, images, views, drawn, positions=50, raters=list(RATERS), seed=seed)
    held_out = collect_dense(network, test_images, views, truth, positions=200, seed=seed)
    for prefix, (predictions, labels) in (("", fitted), ("test_", held_out)):
        predictions.save(out / f"{prefix}predictions.npz")
        predictions.align(labels).save(out / f"{prefix}labels.csv")
    skill = dict(zip(RATERS, (drawn == (cells > 0)[:, None]).mean(axis=(0, 2, 3)).tolist(), strict=True))

    talk.note(f"fitting seven methods to {len(fitted[1]):,} labels of three raters, and comparing ...")
    options: dict[str, Any] = {"task": "classification", "seed": seed}
    methods = {name: name for name in _METHODS} | {"vbtta": partial(select_views, budget=_BUDGET, **options)}
    outcome = compare(*fitted, *held_out, methods=methods, **options)
    policy, comparison = outcome.fitted["vbtta"], documents.comparison_document(outcome)
    policy.save(out / "policy.json")
    write_json(out / "comparison.json", comparison)
    diagnosis = documents.diagnosis_document(diagnose(policy, *fitted, incoming=held_out[0], seed=seed))
    write_json(out / "diagnosis.json", diagnosis)

    module = TTAModule(network, views, policy).eval()
    with torch.no_grad():
        proba = {"network": network(test_images).softmax(1).numpy(), "policy": module(test_images).numpy()}
    dice = {name: metrics.dice(truth, maps, background=0) for name, maps in proba.items()}
    overlap = f"Overlap with the true cells (Dice): {dice['policy']:.3f}, by the network alone {dice['network']:.3f}."
    people = ", ".join(f"{name} {manner}" for name, manner in RATERS.items())
    text = [
        f"A small network learned to find cells in {_N_TRAIN} simulated images. Three simulated raters outlined the "
        f"cells of {_N_CALIBRATION} more ({people}); {_N_TEST} images with the true outlines are the test. The light "
        "is dimmer there than in the training images, so views with more contrast help.",
        "An illustration: images and raters are simulated so that views can help.",
        overlap,
    ]
    story = {"title": f"Finding cells: three raters, {len(views)} views", "text": text}
    write_json(out / "run.json", {"story": story, "options": {"command": "vbtta demo", "seed": seed}})
    talk.note("writing the report ...")
    examples = map_examples(module, list(test_images), list(truth), background=0)
    write_run_report(out, out / "report.html", Talk(False, True), maps=examples)
    summary = diagnosis["summary"]
    alerts = [line.removeprefix("! ") for line in summary if line.startswith("! ")]
    document = {"comparison": comparison, "diagnosis": summary, "skill": skill, "dice": dice}
    return documents.policy_document(policy) | document, {
        "What was gained": [overlap, *documents.gain_in_words(comparison)],
        "What was learned": [*documents.views_in_words(policy), *annotators_in_words(policy.annotators, skill)],
        "Diagnosis": alerts or ["Nothing needs attention; the report has all checks."],
    }


# -- cells, raters, network ----------------------------------------------------------------------


def draw_cells(n: int, light: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Bright ellipses on an uneven, noisy background: images (N, 1, H, W), and numbers of the cells (N, H, W)."""
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
    return images, cells


def rate(cells: Array, rng: np.random.Generator) -> Array:
    """Cell or not by the three raters: (N, R, H, W)."""
    marked = np.stack([cells > 0] * len(RATERS), axis=1)
    for numbers, (careful, wide, sparse) in zip(cells, marked, strict=True):
        rough = ndimage.gaussian_filter(rng.normal(size=numbers.shape), 2) * 4
        careful[:] = ndimage.gaussian_filter((numbers > 0).astype(float), 1) > 0.5 + 0.1 * rough
        wide[:] = ndimage.binary_dilation(numbers > 0, iterations=2)
        sparse[np.isin(numbers, np.flatnonzero(rng.random(numbers.max() + 1) < 0.3))] = False
    return marked.astype(np.int64)


def train_network(torch: Any, images: Array, cells: Array, seed: int) -> Any:
    """A U-Net of one level."""
    nn = torch.nn

    def convolutions(n_in: int, n_out: int) -> list[Any]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.Conv2d(n_out, n_out, 3, padding=1), nn.ReLU()]

    class UNet(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Sequential(*convolutions(1, 12))
            self.low = nn.Sequential(
                nn.MaxPool2d(4), *convolutions(12, 24), nn.Upsample(scale_factor=4, mode="bilinear")
            )
            self.end = nn.Conv2d(36, 2, 3, padding=1)

        def forward(self, images: Any) -> Any:
            top = self.top(images)
            return self.end(torch.cat([top, self.low(top)], 1))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = UNet()
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        inputs, masks = torch.from_numpy(images), torch.from_numpy((cells > 0).astype(np.int64))
        for _ in range(40):
            for rows in torch.randperm(len(inputs)).split(8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(inputs[rows]), masks[rows]).backward()
                optimizer.step()
    return network.eval()
