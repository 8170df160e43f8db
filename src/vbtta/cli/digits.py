"""The demo's data: handwritten digits, a small network, a dozen views and three annotators of different skill.

An illustration, not evidence: training size, views and noise model were chosen by hand, with the test digits in sight,
so that views can help at all. Trained on untilted digits only, the same network gains nothing from them.
"""

__all__ = ["SKILL", "Digits", "annotate", "make_views", "split", "train"]

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from vbtta._support.checks import require
from vbtta.augment.arrays import GaussianNoise, Identity
from vbtta.augment.base import Augmentation
from vbtta.augment.foreign import as_view
from vbtta.data.labels import Array

SKILL = {"ann": 0.95, "bob": 0.8, "cleo": 0.6}  # how often each annotator is right
_N_TRAIN, _N_CALIBRATION = 150, 700
_COPIES = 6  # of every training digit, all but one tilted and shifted
_SHARE = 0.75  # of the calibration digits that an annotator labels

Predictor = Callable[[Array], Array]


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
