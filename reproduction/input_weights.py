"""Beyond the paper: weights that depend on the input against constant ones, where inputs are alike and where not."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reproduction.extensions import corrupt
from reproduction.networks import SETUPS, ImageSetup, NetworkConfig, Trained, trained_network
from reproduction.records import Claim, DataMissing, Item, Places, Row, Rows
from reproduction.samples import SampleConfig
from reproduction.tallies import markdown_table, number, plural, select
from vbtta import CategoricalMixture, GaussianMixture, LabelSets, ViewPredictions, collect_dense, fit_policy
from vbtta.augment import (
    Augmentation,
    Blur,
    Brightness,
    Contrast,
    Gamma,
    HorizontalFlip,
    Identity,
    Rotate,
    Rotate90,
    Zoom,
    d4,
)

PARTS = {
    "digits": "MNIST, as it is",
    "digits, turned": "MNIST, 30 % of the inputs turned by a quarter, a half or three quarters",
    "digits, corrupted": "MNIST, a random third each with noise, blur or little contrast",
    "cifar10n": "CIFAR-10N, three human labels each",
    "cifar10n, turned": "CIFAR-10N, 30 % turned",
    "cifar10n, corrupted": "CIFAR-10N, a third each with noise, blur or little contrast",
    "utkface": "UTKFace, ages",
    "nuclei": "nuclei, pixels of segmentations",
}
METHODS = {"constant": "view", "input": "input"}
_TURNED = 0.3
_KINDS = ("noise", "blur", "contrast")
_STRENGTH = 3
_POSITIONS, _IMAGES = 200, 60  # of a nuclei image, and calibration images


@dataclass(frozen=True)
class Trial:
    """One seed of one part."""

    part: str
    setup: ImageSetup


@dataclass(frozen=True)
class Config:
    """Seeds, parts and sizes."""

    seeds: tuple[int, ...]
    parts: tuple[str, ...]
    digits: ImageSetup
    cifar10n: ImageSetup
    utkface: ImageSetup


class Data(NamedTuple):
    """Views and labels to fit to, and views and truth to score on."""

    calibration: ViewPredictions
    labels: Any
    test: ViewPredictions
    truth: Any


def _trials(config: Config) -> list[Trial]:
    setups = {"digits": config.digits, "nuclei": config.digits, "cifar10n": config.cifar10n, "utkface": config.utkface}
    return [
        Trial(part, setups[part.partition(",")[0]].at(seed))  # of the nuclei's only the seed counts
        for part in config.parts
        for seed in config.seeds
    ]


def _run_trial(trial: Trial, places: Places) -> list[Row]:
    """Scores of both kinds of weights on the same test inputs."""
    task = "regression" if trial.part == "utkface" else "classification"
    record = GaussianMixture if task == "regression" else CategoricalMixture
    data = _nuclei(trial, places) if trial.part == "nuclei" else _images(trial, places)
    truth = data.test.align(data.truth)
    base: Row = {
        "part": trial.part,
        "seed": trial.setup.sample.seed,
        "synthetic": trial.setup.sample.synthetic and trial.part != "nuclei",
    }
    rows, log_scores = [], {}
    for method, weights in METHODS.items():
        model = record(weights=weights)  # type: ignore[arg-type]
        policy = fit_policy(data.calibration, data.labels, task=task, model=model, guard=False)
        prediction = policy.predict(data.test.take(truth.instance))
        log_scores[method] = prediction.log_prob(truth.value)
        row: Row = {"method": method, "nll": -float(log_scores[method].mean())}
        if task == "classification":
            row["accuracy"] = float(np.mean(prediction.label == truth.value))  # type: ignore[union-attr]
        else:
            row["mae"] = float(np.abs(prediction.mean[:, 0] - truth.value).mean())  # type: ignore[union-attr]
        if policy.gate is not None:
            spread = policy.weights_for(data.test).std(axis=0).max()  # of a view's weight over inputs
            row |= {
                "prior_scale": policy.gate.prior_scale,
                "spread": float(spread),
                "features": policy.gate.features.choice,
            }
        rows.append({**base, **row})
    gain = log_scores["input"] - log_scores["constant"]
    unit = truth.instance if data.test.groups is None else data.test.groups[truth.instance]
    place = np.unique(unit, return_inverse=True)[1]
    residual = np.bincount(place, gain - gain.mean())
    rows[-1] |= {"gain": float(gain.mean()), "gain_error": float(np.sqrt((residual**2).sum()) / len(gain))}
    return rows


def _images(trial: Trial, places: Places) -> Data:
    """Views of the images of a part."""
    trained, seed = trained_network(trial.setup.sample, trial.setup.network, places), trial.setup.sample.seed
    sample, kind = trained.sample, trial.part.partition(", ")[2]
    labels = sample.labels if sample.labels.shape[1] > 1 else sample.labels[:, 0]
    return Data(
        _views(trained, sample.calibration, kind, 2 * seed),
        labels,
        _views(trained, sample.test, kind, 2 * seed + 1),
        sample.truth,
    )


def _views(trained: Trained, images: NDArray[np.uint8], kind: str, seed: int) -> ViewPredictions:
    """Predictions for images that are changed in a way, under views that might undo it and some that do not."""
    rng = np.random.default_rng([seed, 7])
    views: list[Augmentation] = [Identity(), HorizontalFlip(), Zoom(1.15), Rotate(10.0), Rotate(-10.0), Zoom(0.9)]
    if kind == "turned":
        images = images.copy()
        for row in np.flatnonzero(rng.random(len(images)) < _TURNED):
            images[row] = np.rot90(images[row], int(rng.integers(1, 4)), axes=(1, 2))
        views = [Identity(), *(Rotate90(turns) for turns in (1, 2, 3))]
    elif kind == "corrupted":
        chosen = rng.integers(len(_KINDS), size=len(images))
        images = images.copy()
        for place, name in enumerate(_KINDS):
            images[chosen == place] = corrupt(images[chosen == place], name, _STRENGTH, seed=seed)
        views = [Identity(), Blur(0.7), Blur(1.2), Contrast(2.0), Contrast(5.0), Gamma(0.75), Zoom(1.15)]
    return trained.views(images, views, draws=1, seed=seed)


def _nuclei(trial: Trial, places: Places) -> Data:
    """Random positions of segmented images; the benchmark of dense outputs has the network."""
    from benchmarks.dense_networks import load, trained

    if places.data is None or not (places.data / "nuclei.parquet").is_file():
        raise DataMissing("nuclei: no nuclei.parquet; pass --data or set VBTTA_DATA.")
    folder, seed = os.fspath(places.data), trial.setup.sample.seed
    network = trained("nuclei", seed, folder, os.fspath(places.cache or ".cache"))
    views = [*d4(), *(Brightness(amount) for amount in (0.1, -0.1)), Contrast(1.3), Gamma(0.7), Blur(1.0)]

    def collected(part: str) -> tuple[ViewPredictions, LabelSets]:
        scenes = load("nuclei", part, folder)
        masks = np.stack([masks[0] for masks in scenes.masks])
        rows = slice(_IMAGES if part == "calibration" else None)
        return collect_dense(network, scenes.images[rows], views, masks[rows], positions=_POSITIONS, seed=seed)

    return Data(*collected("calibration"), *collected("test"))


def gained(rows: Rows, part: str) -> tuple[float, float]:
    """Nats gained by weights that depend on the input, and half of the 95 % interval, by inputs and by seeds."""
    chosen = select(rows, part=part, method="input")
    gains = np.array([number(row, "gain") for row in chosen])
    by_input = math.sqrt(sum(number(row, "gain_error") ** 2 for row in chosen)) / len(gains)
    by_seed = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return float(gains.mean()), 1.96 * max(by_input, by_seed)


def _parts(rows: Rows) -> list[str]:
    return [part for part in PARTS if select(rows, part=part)]


def _table(rows: Rows, config: Config) -> str:
    body = []
    for part in _parts(rows):
        cells = []
        for key in ("mae" if part == "utkface" else "accuracy", "nll"):
            for method in METHODS:
                values = [number(row, key) for row in select(rows, part=part, method=method)]
                percent = key == "accuracy"
                cells.append(f"{100 * np.mean(values):.1f} %" if percent else f"{np.mean(values):.4f}")
        gain, reach = gained(rows, part)
        body.append([PARTS[part], *cells, f"{gain:+.4f} (± {reach:.4f})"])
    header = ["data", "constant: accuracy or MAE", "input", "constant: NLL", "input", "nats gained, 95 % interval"]
    n_seeds = len({row["seed"] for row in rows})
    made_up = " Made-up images stand in for the data sets." if rows[0]["synthetic"] else ""
    sizes = {
        "digits": f"{config.digits.sample.n_calibration} digits",
        "cifar10n": f"{config.cifar10n.sample.n_calibration} images of CIFAR-10N (all three labels)",
        "utkface": f"{config.utkface.sample.n_calibration} faces (two labels)",
        "nuclei": f"{_IMAGES} images of nuclei of {_POSITIONS} positions",
    }
    fitted = ", ".join(sizes[name] for name in sizes if select(rows, part=name))
    return (
        f"{markdown_table(header, body)}\n\nMixtures with temperatures, fitted to {fitted}; small networks; "
        f"{plural(n_seeds, 'seed')}. The interval is the larger of that over inputs (images for nuclei) and that over "
        f"seeds.{made_up}"
    )


def _listed(rows: Rows, parts: list[str]) -> str:
    return "; ".join(f"{part} {gained(rows, part)[0]:+.4f} (± {gained(rows, part)[1]:.4f})" for part in parts)


def _mixed(rows: Rows) -> list[str]:
    return [part for part in _parts(rows) if "," in part]


def _alike(rows: Rows) -> list[str]:
    return [part for part in _parts(rows) if "," not in part]


def _helps_mixed(rows: Rows) -> bool | str:
    clear = [part for part in _mixed(rows) if gained(rows, part)[0] > gained(rows, part)[1]]
    if len(clear) in (0, len(_mixed(rows))):
        return bool(clear)
    return f"holds if the inputs are mixed in a way that a view undoes: {'; '.join(clear)}"


def _cheap_alike(rows: Rows) -> bool | str:
    """Whether the whole interval of the gain lies above -0.003."""
    clear = [part for part in _alike(rows) if gained(rows, part)[0] - gained(rows, part)[1] > -0.003]
    if len(clear) in (0, len(_alike(rows))):
        return bool(clear)
    return f"holds if the interval is narrow enough to tell: {'; '.join(clear)}"


_CLAIMS = (
    Claim(
        "Not in the paper: where inputs are mixed, weights that depend on the input predict better than constant ones",
        _helps_mixed,
        lambda rows: f"nats gained: {_listed(rows, _mixed(rows))}",
    ),
    Claim(
        "Not in the paper: where inputs are alike they cost less than 0.003 nats",
        _cheap_alike,
        lambda rows: f"nats gained: {_listed(rows, _alike(rows))}",
    ),
)


def _config(profile: str, seeds: tuple[int, ...], parts: tuple[str, ...]) -> Config:
    setups = SETUPS[profile]
    sizes = {"smoke": (96, 60, 50), "cpu": (3000, 600, 3000), "paper": (20_000, 1000, 10_000)}[profile]
    small = profile == "smoke"
    sample = SampleConfig("mnist", 0, *sizes, size=8 if small else 28, synthetic=small)
    network = NetworkConfig(8, 8, 32, 3e-3, 1) if small else NetworkConfig(8, 6, 64, 3e-3, 2)
    others = [setups["cifar10n"], setups["utkface"]]
    if profile == "cpu":  # smaller than elsewhere: there are more trials
        width = NetworkConfig(8, 5, 64, 3e-3, 2)
        others = [
            ImageSetup(replace(setup.sample, n_training=5000, n_test=3000), width, setup.draws) for setup in others
        ]
    return Config(seeds, parts, ImageSetup(sample, network, 1), *others)


ITEM = Item(
    "Beyond the paper: weights that depend on the input",
    1,
    {
        "smoke": _config("smoke", (0,), tuple(part for part in PARTS if part != "nuclei")),
        "cpu": _config("cpu", (0, 1, 2), tuple(PARTS)),
        "paper": _config("paper", (0, 1, 2, 3, 4), tuple(PARTS)),
    },
    _trials,
    _run_trial,
    _table,
    _CLAIMS,
)
