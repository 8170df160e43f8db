"""View predictions of `benchmarks.train_models`, read from its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vbtta import LabelSets, ViewPredictions

__all__ = ["Data", "find_views", "load_views"]


class Data(NamedTuple):
    """Views and labels to fit to, and views and clean labels to score on."""

    task: str
    views: ViewPredictions
    labels: Any
    test: ViewPredictions
    truth: Any


def find_views(name: str, seed: int, cache: str) -> Path | None:
    """The folder of a data set's views by its network, or by a lighter one; None where there is none."""
    folders = [Path(cache) / f"{name}{kind}-seed{seed}" for kind in ("", "-light")]
    return next((folder for folder in folders if (folder / "test.npz").is_file()), None)


def load_views(name: str, seed: int, cache: str) -> Data:
    """The views of a data set, with people's labels of the calibration part."""
    folder = find_views(name, seed, cache)
    assert folder is not None
    with np.load(folder / "labels.npz", allow_pickle=False) as columns:
        people = [columns[key] for key in columns.files if key.startswith("calibration_label_")]
        truth = columns["test_clean"]
    known = not name.startswith("cifar10n")  # whose columns are many people's
    names = [f"person {k}" for k in range(len(people))] if known else None
    labels = LabelSets.from_array(np.stack(people, axis=1), annotators=names)
    views, test = (ViewPredictions.load(folder / f"{part}.npz") for part in ("calibration", "test"))
    return Data("regression" if name.startswith("utkface") else "classification", views, labels, test, truth)
