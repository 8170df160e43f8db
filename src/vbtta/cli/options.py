"""Arguments and options that several commands take."""

__all__ = [
    "Address",
    "Annotators",
    "Backend",
    "BackendOption",
    "Engine",
    "LabelsFile",
    "Model",
    "PredictionsFile",
    "Seed",
    "Task",
    "TaskOption",
    "Workers",
]

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


class Backend(StrEnum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


PredictionsFile = Annotated[
    Path,
    typer.Argument(
        metavar="PREDICTIONS", help="Predictions under all views: .npz, .parquet, or a folder that --backend ray wrote."
    ),
]
LabelsFile = Annotated[
    Path,
    typer.Argument(
        metavar="LABELS",
        help="Labels: .csv or .parquet, wide (label_1, label_2, ...) or long (instance, annotator, label).",
    ),
]
TaskOption = Annotated[Task, typer.Option("--task", help="What the labels are.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides draws, folds and the bootstrap.")]
BackendOption = Annotated[
    Backend, typer.Option("--backend", help="Where the work is done: in this process, or by Ray on a cluster.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Workers of --backend ray; by default one a core.")
]
Address = Annotated[
    str | None, typer.Option("--address", help="Of the Ray cluster; by default the one here, else a new one.")
]
Annotators = Annotated[
    bool,
    typer.Option("--columns-are-annotators", help="Numbered label columns of a wide table are always the same people."),
]
