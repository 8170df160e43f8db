"""`vbtta demo`: training, views, fit, comparison, diagnosis and report on data that ships with scikit-learn.

An illustration, not evidence: training size, views and noise model were chosen by hand, with the test digits in sight,
so that views can help at all. Trained on untilted digits only, the same network gains nothing from them.
"""

__all__ = ["run"]

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from vbtta._support.checks import require
from vbtta._support.random import RowStreams
from vbtta.augment.arrays import GaussianNoise, Identity
from vbtta.augment.base import Augmentation, apply_view
from vbtta.augment.foreign import as_view
from vbtta.cli.files import comparison_table, read_labels, write_arrays, write_run_report
from vbtta.cli.running import Talk, write_json
from vbtta.collect import collect_views
from vbtta.comparison import compare
from vbtta.data.files import write_table
from vbtta.data.labels import Array
from vbtta.diagnostics import diagnose
from vbtta.fit import fit_policy
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.report.documents import (
    annotators_in_words,
    comparison_document,
    diagnosis_document,
    gain_in_words,
    policy_document,
    views_in_words,
)

_METHODS = ("original", "original+t", "uniform", "uniform+t", "geometric", "best_view", "aug_tta", "greedy", "vbtta")
_EXAMPLES = 4
SKILL = {"ann": 0.95, "bob": 0.8, "cleo": 0.6}  # how often each annotator is right
_N_TRAIN, _N_CALIBRATION = 150, 700
_COPIES = 6  # of every training digit, all but one tilted and shifted
_SHARE = 0.75  # of the calibration digits that an annotator labels

Predictor = Callable[[Array], Array]


def run(out: Path, seed: int, talk: Talk) -> None:
    """Make the files of a run and its report, and print what came out."""
    started = time.perf_counter()
    with _one_thread():
        policy, comparison, summary = _fit_and_compare(out, seed, talk)
    talk.note("writing the report ...")
    write_run_report(out, out / "report.html", Talk(False, True))
    seconds = time.perf_counter() - started
    skills = ", ".join(f"{name} {100 * value:.0f} %" for name, value in SKILL.items())
    steps = [
        "Trained a small network on scikit-learn's handwritten digits and looked at 700 more under "
        f"{len(policy.names)} views.",
        f"Simulated three annotators who are right with different probability ({skills}); "
        "the fit knows the form of their errors, not these numbers.",
        f"Inferred the weights of the views and the skill of the annotators together ({policy.model_name}).",
        "Compared methods on digits with clean labels, which no method was fitted to.",
    ]
    findings = [*views_in_words(policy), *gain_in_words(comparison), *annotators_in_words(policy, SKILL)]
    sections = {"What it did": steps, "What it found": findings, "Diagnosis": summary}
    texts = ["\n  ".join([title, *lines]) for title, lines in sections.items()]
    texts.insert(2, comparison_table(comparison, talk))
    texts.append(f"Done in {seconds:.0f} s. Open {out / 'report.html'}")
    document = {
        **policy_document(policy),
        "comparison": comparison,
        "diagnosis": summary,
        "skill": SKILL,
        "written": str(out / "report.html"),
        "seconds": seconds,
    }
    talk.result(document, "\n\n".join(texts))


def _one_thread() -> Any:
    """Limit to one thread, which is fastest for so little data; torch must be loaded before the limit."""
    with suppress(ImportError):
        require("torch", "torch")
    require("sklearn.datasets", "cli")
    return require("threadpoolctl", "cli").threadpool_limits(1)


def _fit_and_compare(out: Path, seed: int, talk: Talk) -> tuple[Any, dict[str, Any], list[str]]:
    """Write the files of a run to the folder; policy, comparison and summary of the diagnosis."""
    digits, views = split(seed), make_views()
    talk.note(f"training a small network on {len(digits.train[0])} digits ...")
    network, kind = train(*digits.train, seed=seed)
    talk.note(f"predicting {len(digits.calibration[0]) + len(digits.test[0]):,} digits under {len(views)} views ...")
    calibration, test = (
        collect_views(network, images, views, draws=10, keep_draws=60, seed=seed + place)
        for place, (images, _) in enumerate((digits.calibration, digits.test))
    )
    calibration.save(out / "predictions.npz")
    test.save(out / "test_predictions.npz")
    columns = zip(("instance", "annotator", "label"), annotate(digits.calibration[1], seed), strict=True)
    write_table(out / "labels.csv", dict(columns))
    write_table(out / "test_labels.csv", {"label": digits.test[1]})
    labels = read_labels(out / "labels.csv").sets.align(len(calibration))

    talk.note(f"fitting to {len(labels):,} labels of three annotators ...")
    fit = partial(fit_policy, task="classification", model=CategoricalLatent(noise="annotator"), seed=seed)
    policy = fit(calibration, labels)
    policy.save(out / "policy.json")
    talk.note(f"comparing {len(_METHODS)} methods on {len(test)} digits with clean labels ...")
    methods = {name: fit if name == "vbtta" else name for name in _METHODS}
    outcome = compare(calibration, labels, test, digits.test[1], task="classification", methods=methods, seed=seed)
    comparison = comparison_document(outcome)
    write_json(out / "comparison.json", comparison)
    talk.note("diagnosing ...")
    diagnosis = diagnose(policy, calibration, labels, incoming=test, seed=seed)
    write_json(out / "diagnosis.json", diagnosis_document(diagnosis))

    prediction: Any = policy.predict(test)
    rows = np.argsort(-prediction.mutual_information, kind="stable")[:_EXAMPLES]
    images = np.stack([_pictures(view, digits.test[0][rows], seed) for view in views], axis=1)  # (E, K, 8, 8)
    names = np.array([view.name for view in views])
    write_arrays(out / "examples.npz", {"rows": rows, "names": names, "images": images})
    text = [
        f"{len(digits.train[0])} digits trained {kind}; {len(calibration)} more were labelled by three simulated "
        f"annotators of different skill, {len(labels):,} labels in all; {len(test)} with clean labels are the test.",
        f"The network saw every digit under {len(views)} views, some of which make another digit of it.",
    ]
    story = {"title": "Handwritten digits, three annotators, twelve views", "text": text, "skill": SKILL}
    write_json(out / "run.json", {"story": story, "options": {"command": "vbtta demo", "seed": seed}})
    return policy, comparison, diagnosis.summary().splitlines()


def _pictures(view: Any, images: Any, seed: int) -> Any:
    """The augmented images of a view: (E, 8, 8) uint8."""
    streams = RowStreams(seed, view.name, 0, np.arange(len(images))) if view.stochastic else None
    augmented = np.asarray(apply_view(view, images, streams))
    return (255 * augmented[:, 0].clip(0, 1)).round().astype(np.uint8)


# -- digits, network, views, annotators -----------------------------------------------------------


class Digits(NamedTuple):
    """Digits in three parts: (N, 1, 8, 8) in [0, 1] and their classes."""

    train: tuple[Array, Array]
    calibration: tuple[Array, Array]
    test: tuple[Array, Array]


def split(seed: int = 0) -> Digits:
    """Scikit-learn's digits, shuffled and cut into training, calibration and test."""
    digits = require("sklearn.datasets", "cli").load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    cuts = np.split(order, [_N_TRAIN, _N_TRAIN + _N_CALIBRATION])
    return Digits(*((images[rows], digits.target[rows]) for rows in cuts))


def train(images: Array, classes: Array, seed: int = 0) -> tuple[Predictor, str]:
    """A small network that gives logits, and its description: by torch where that is installed, else by scikit-learn.

    It learns from tilted and shifted copies too, as networks do that later meet augmented inputs.
    """
    rng = np.random.default_rng([seed, 2])
    images = np.concatenate([images, *(_tilted(images, rng) for _ in range(_COPIES - 1))])
    classes = np.tile(classes, _COPIES)
    try:
        torch = require("torch", "torch")
    except ImportError:
        return _train_sklearn(images, classes, seed)
    return _train_torch(torch, images, classes, seed)


def make_views() -> list[Augmentation]:
    """Twelve views: small changes that keep a digit's class, and some that change it."""
    functions: dict[str, Predictor] = {
        "rotate 10°": lambda x: _rotate(x, 10.0),
        "rotate -10°": lambda x: _rotate(x, -10.0),
        "rotate 90°": lambda x: _rotate(x, 90.0),
        "half a pixel left": lambda x: _shift(x, 0.0, -0.5),
        "half a pixel right": lambda x: _shift(x, 0.0, 0.5),
        "half a pixel up": lambda x: _shift(x, -0.5, 0.0),
        "half a pixel down": lambda x: _shift(x, 0.5, 0.0),
        "mirror": lambda x: x[..., ::-1].copy(),
        "upside down": lambda x: x[..., ::-1, ::-1].copy(),
        "negative": lambda x: 1 - x,
    }
    views = [as_view(function, name) for name, function in functions.items()]
    return [Identity(), *views, GaussianNoise(0.15, name="noise")]


def annotate(classes: Array, seed: int = 0) -> tuple[Array, Array, Array]:
    """Labels of simulated annotators: instance, annotator and label, (J,) each; every digit has at least one."""
    rng = np.random.default_rng([seed, 1])
    names = np.array(list(SKILL))
    labelled = rng.random((len(classes), len(names))) < _SHARE
    without = np.flatnonzero(~labelled.any(axis=1))
    labelled[without, rng.integers(0, len(names), len(without))] = True
    instance, person = np.nonzero(labelled)
    right = rng.random(len(instance)) < np.array(list(SKILL.values()))[person]
    other = (classes[instance] + rng.integers(1, 10, len(instance))) % 10
    return instance, names[person], np.where(right, classes[instance], other)


def _train_torch(torch: Any, images: Array, classes: Array, seed: int) -> tuple[Predictor, str]:
    nn = torch.nn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 10),
        )  # fmt: skip
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
        x, y = torch.from_numpy(images), torch.from_numpy(classes)
        for _ in range(60):
            for rows in torch.randperm(len(x)).split(50):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
    net.eval()

    def logits(batch: Array) -> Array:
        with torch.no_grad():
            return np.asarray(net(torch.from_numpy(np.asarray(batch, dtype=np.float32))).numpy())

    return logits, "a convolutional network (torch)"


def _train_sklearn(images: Array, classes: Array, seed: int) -> tuple[Predictor, str]:
    network = require("sklearn.neural_network", "cli").MLPClassifier((64,), learning_rate_init=3e-3, random_state=seed)
    for _ in range(60):
        network.partial_fit(images.reshape(len(images), -1), classes, classes=np.arange(10))

    def logits(batch: Array) -> Array:
        return np.asarray(network.predict_log_proba(batch.reshape(len(batch), -1)).clip(-30))

    return logits, "a network of one hidden layer (scikit-learn)"


def _tilted(images: Array, rng: np.random.Generator) -> Array:
    turned = [ndimage.rotate(image[0], rng.uniform(-15, 15), reshape=False, order=1) for image in images]
    moved = [ndimage.shift(image, rng.uniform(-0.8, 0.8, 2), order=1) for image in turned]
    return np.stack(moved)[:, None].astype(np.float32)


def _rotate(images: Array, degrees: float) -> Array:
    return np.asarray(ndimage.rotate(images, degrees, axes=(2, 3), reshape=False, order=1))


def _shift(images: Array, down: float, right: float) -> Array:
    return np.asarray(ndimage.shift(images, (0, 0, down, right), order=1))
