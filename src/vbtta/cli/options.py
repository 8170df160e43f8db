"""Arguments and options that several commands take."""

__all__ = ["Annotators", "Engine", "LabelsFile", "Model", "PredictionsFile", "Seed", "Task", "TaskOption"]

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Task(StrEnum):
    """What the labels are."""

    classification = "classification"
    regression = "regression"


class Model(StrEnum):
    """What is assumed."""

    auto = "auto"
    mixture = "mixture"
    latent = "latent"


class Engine(StrEnum):
    """How it is inferred."""

    auto = "auto"
    em = "em"
    advi = "advi"


PredictionsFile = Annotated[
    Path, typer.Argument(metavar="PREDICTIONS", help="Predictions under all views: .npz or .parquet.")
]
LabelsFile = Annotated[
    Path,
    typer.Argument(
        metavar="LABELS",
        help="Labels: .csv or .parquet, wide (label_1, label_2, ...) or long (instance, annotator, label).",
    ),
]
TaskOption = Annotated[Task, typer.Option("--task", help="What the labels are.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides the folds and the bootstrap.")]
Annotators = Annotated[
    bool,
    typer.Option("--columns-are-annotators", help="Numbered label columns of a wide table are always the same people."),
]
