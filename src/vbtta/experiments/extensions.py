"""What the paper leaves to future work: other components, tighter bounds, and weights under a shifted distribution."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from vbtta.augment import Identity
from vbtta.augment.base import BuiltIn
from vbtta.augment.colours import Contrast, Gamma
from vbtta.augment.images import Blur, HorizontalFlip, Rotate, Zoom
from vbtta.experiments import extensions_words as words
from vbtta.experiments.corruptions import CORRUPTIONS, corrupt
from vbtta.experiments.image_setups import SETUPS, STRATEGIES, ImageSetup, paper_views
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.network_views import trained_network
from vbtta.experiments.scoring import round_list, scores, uniform
from vbtta.fit import fit_policy
from vbtta.policy import ConvergenceWarning, Policy
from vbtta.predictions import ContinuousPrediction, ViewPredictions
from vbtta.specs import ADVI, EM, CategoricalMixture, EngineSpec, GaussianMixture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "TITLE", "VERSION", "Config", "Trial", "cells", "claims", "figures", "run", "run_trial"]
__all__ += ["table", "trials"]

TITLE = "Beyond the paper: Student-t components, tighter bounds, weights under distribution shift"
VERSION = 2
Kind = Literal["inference", "shift"]


@dataclass(frozen=True)
class Trial:
    """One seed of one of the two parts.

    Parameters
    ----------
    kind : {"inference", "shift"}
        Components and bounds on UTKFace, or corrupted CIFAR-10 images.
    setup : ImageSetup
        Sample and network, shared with table 4.
    advi_steps : int
        Gradient steps of ADVI.
    n_shift : int
        Calibration and test images that are corrupted, at most.
    """

    kind: Kind
    setup: ImageSetup
    advi_steps: int
    n_shift: int


@dataclass(frozen=True)
class Config:
    """Seeds and sizes."""

    seeds: tuple[int, ...]
    inference: ImageSetup
    shift: ImageSetup
    advi_steps: int
    n_shift: int


PROFILES = {
    name: Config(seeds, SETUPS[name]["utkface"], SETUPS[name]["cifar10n"], steps, n_shift)
    for name, seeds, steps, n_shift in (
        ("smoke", (0,), 20, 30),
        ("cpu", (0, 1), 600, 500),
        ("paper", (0, 1, 2, 3, 4), 3000, 5000),
    )
}

_ADVI = "ADVI, normal, ELBO"


def trials(config: Config) -> list[Trial]:
    """Both parts for every seed."""
    setups: dict[Kind, ImageSetup] = {"inference": config.inference, "shift": config.shift}
    return [
        Trial(kind, setup.at(seed), config.advi_steps, config.n_shift)
        for seed in config.seeds
        for kind, setup in setups.items()
    ]


def run_trial(trial: Trial, places: Places) -> list[Row]:
    """Rows of one part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # rows say whether a fit converged
        rows = _inference(trial, places) if trial.kind == "inference" else _shift(trial, places)
    base: Row = {"part": trial.kind, "seed": trial.setup.sample.seed, "synthetic": trial.setup.sample.synthetic}
    return [{**base, **row} for row in rows]


def run(config: Config, places: Places) -> list[Row]:
    """All trials, one after the other."""
    return [row for trial in trials(config) for row in run_trial(trial, places)]


def table(rows: Sequence[Row], config: Config) -> str:
    """Two tables."""
    return words.table(rows, config.advi_steps, config.n_shift, config.inference, config.shift)


def cells(rows: Sequence[Row]) -> list[Cell]:
    """None: the paper has no numbers for these."""
    return []


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper hopes for."""
    return words.claims(rows)


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Accuracy under shift."""
    return {"shift": words.shift_figure(rows)}


def _inference(trial: Trial, places: Places) -> list[Row]:
    """Components and bounds, on the paper's six views of faces and the identity."""
    found = paper_views(trial.setup, places)
    calibration, test = found.chosen(["identity", *STRATEGIES["Mixup + CutMix"]])
    steps, seed = trial.advi_steps, trial.setup.sample.seed
    # One concentration for all: ADVI's weights always have a Dirichlet prior, so EM's have it, too.
    plain = GaussianMixture(concentration=1.0, noise="none")
    ways: dict[str, tuple[GaussianMixture, EngineSpec]] = {
        "EM, normal": (plain, EM()),
        _ADVI: (plain, ADVI(steps=steps)),
        "ADVI, normal, Renyi 0.5": (plain, ADVI(steps=steps, bound="renyi")),
        "ADVI, normal, IWAE": (plain, ADVI(steps=steps, bound="iwae")),
    }
    ways["ADVI, student-t, ELBO"] = (replace(plain, component="student_t"), ADVI(steps=steps))
    ways["ADVI, laplace, ELBO"] = (replace(plain, component="laplace"), ADVI(steps=steps))
    rows: list[Row] = []
    reference: Policy | None = None
    for name, (model, engine) in ways.items():
        policy = fit_policy(
            calibration, found.sample.labels, task="regression", model=model, engine=engine, guard=False, seed=seed
        )
        reference = reference or policy
        prediction = policy.predict(test)
        assert isinstance(prediction, ContinuousPrediction)
        row = scores(prediction, found.sample.truth)
        row["crps"] = float(np.mean(prediction.crps(found.sample.truth)))
        row |= {"bound": policy.elbo / found.sample.labels.size, "converged": policy.converged}
        row["from_em"] = float(np.abs(policy.weights - reference.weights).max())
        rows.append({"method": name, **row, "weights": round_list(policy.weights)})
    return rows


def _shift(trial: Trial, places: Places) -> list[Row]:
    """Weights from clean images, from corrupted labelled ones and from corrupted unlabelled ones."""
    trained = trained_network(trial.setup.sample, trial.setup.network, places)
    sample, seed = trained.sample, trial.setup.sample.seed
    rows_used = slice(0, trial.n_shift)
    labels, truth = sample.labels[rows_used], sample.truth[rows_used]
    conditions = [("none", 0), *((kind, strength) for kind in CORRUPTIONS for strength in (1, 2, 3))]
    views = _shift_views()
    rows: list[Row] = []
    clean: Policy | None = None
    for kind, strength in conditions:
        calibration, test = (
            trained.views(corrupt(images[rows_used], kind, strength, seed=part), views, draws=1, seed=seed)
            for part, images in enumerate((sample.calibration, sample.test))
        )
        here = _fit(calibration, labels)
        clean = clean or here
        unlabelled = fit_policy(
            test, None, task="classification", engine=ADVI(steps=trial.advi_steps // 2), guard=False, seed=seed
        )
        alone = test.select(["identity"])
        found = {
            "identity": (scores(uniform(alone, truth, alone, "classification"), truth), None),
            "uniform": (scores(uniform(test, truth, test, "classification"), truth), None),
            "weights of clean images": (scores(clean.predict(test), truth), clean),
            "weights of shifted images": (scores(here.predict(test), truth), here),
            "weights without labels": (scores(unlabelled.predict(test), truth), unlabelled),
        }
        for method, (row, policy) in found.items():
            weights = None if policy is None else round_list(policy.weights)
            rows.append({"corruption": kind, "strength": strength, "method": method, **row, "weights": weights})
    return rows


def _fit(calibration: ViewPredictions, labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Policy:
    return fit_policy(calibration, labels, task="classification", model=CategoricalMixture(), engine="em", guard=False)


def _shift_views() -> list[BuiltIn]:
    """Views that might undo a corruption, and some that do not."""
    return [
        Identity(),
        HorizontalFlip(),
        Zoom(1.15),
        Rotate(10.0),
        Blur(0.7),
        Contrast(2.0),
        Contrast(0.75),
        Gamma(0.75),
    ]
