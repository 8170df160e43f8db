"""Predictions and labels of a command: read, paired, and described to the user."""

__all__ = ["describe", "digest", "read_labels", "read_pair", "read_predictions", "read_table"]

import hashlib
from pathlib import Path

from vbtta.cli.running import Talk, UsageError, existing
from vbtta.data import files
from vbtta.data.files import Labels
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.models.parts.class_data import refuse_probabilities


def read_predictions(path: Path) -> ViewPredictions:
    """Read predictions from an .npz or parquet file, or a folder that `vbtta views --backend ray` wrote."""
    if not path.is_dir() and existing(path, "predictions (.npz or .parquet)").suffix not in (".npz", ".parquet"):
        raise UsageError(
            f"{path}: predictions are read from .npz or .parquet files; write one with ViewPredictions.save"
        )
    return files.read_predictions(path, mmap=path.suffix == ".npz" and path.stat().st_size > 1 << 30)


def read_labels(path: Path, *, columns_are_annotators: bool = False) -> Labels:
    """Read labels from a CSV or parquet file, long or wide."""
    _check_table(existing(path, "labels (.csv or .parquet)"))
    return files.read_labels(path, columns_are_annotators=columns_are_annotators)


def read_table(path: Path) -> dict[str, Array]:
    """Columns of a CSV or parquet file."""
    _check_table(path)
    return files.read_table(path)


def _check_table(path: Path) -> None:
    if path.suffix not in (".csv", ".tsv", ".txt", ".parquet"):
        raise UsageError(f"{path}: tables are read from .csv or .parquet files")


def read_pair(
    predictions: Path, labels: Path, task: str, talk: Talk, *, columns_are_annotators: bool = False
) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and their labels, paired; says what was read."""
    views = read_predictions(predictions)
    given, layout = read_labels(labels, columns_are_annotators=columns_are_annotators)
    if given.ids is not None and views.ids is None:
        raise ValueError(
            f"{labels} names instances by id (such as {str(given.ids[0])!r}) but {predictions} has no ids: add an "
            "array `ids` to the predictions, or leave that column out of the labels to pair by row"
        )
    try:
        by_id = given.pairs_by_id(views.ids)
        sets = given.align(len(views), views.ids)
        if task == "classification":
            _check_classes(views, sets)
        elif task == "regression":
            sets.continuous(views.outputs.shape[2])
    except ValueError as error:
        raise ValueError(f"{labels} does not fit {predictions}: {error}") from error
    if task == "classification":
        _check_logits(views, predictions)
    talk.note(
        f"read {describe(views, sets, task)} ({labels.name}: {layout} layout, paired by {'id' if by_id else 'row'})"
    )
    return views, sets


def _check_classes(views: ViewPredictions, labels: LabelSets) -> None:
    """Raise where labels are not classes, with the remedy of those who write files."""
    n_classes = views.outputs.shape[2]
    try:
        labels.categorical(n_classes, views.classes)
    except ValueError as error:
        if views.classes is not None:
            raise
        problem = str(error).partition(";")[0]
        raise ValueError(
            f"{problem}; where labels are not 0..{n_classes - 1}, add an array `classes` to the predictions file, "
            f"{n_classes} names in the order of the outputs (in parquet: name the columns logit_<class>)"
        ) from error


def _check_logits(views: ViewPredictions, path: Path) -> None:
    """Raise where a file holds probabilities, with the remedy of those who write files."""
    try:
        refuse_probabilities(views)
    except ValueError as error:
        raise ValueError(
            f"{path} holds probabilities ({str(error).partition(': ')[2].partition('.')[0]}); store logits in "
            "`outputs`: np.log(np.maximum(p, 1e-12))"
        ) from error


def describe(views: ViewPredictions, labels: LabelSets, task: str) -> str:
    """What was read, in words: "3,000 instances, 8,211 labels, 3 annotators, 10 classes"."""
    parts = [_count(len(views), "instance"), _count(int(labels.labels_per_instance.sum()), "label")]
    if labels.annotator is not None:
        parts.append(_count(len(labels.annotator_names), "annotator"))
    n_outputs = views.outputs.shape[2]
    parts.append(_count(n_outputs, "class" if task == "classification" else "output"))
    parts.append(_count(len(views.names), "view"))
    return ", ".join(parts)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"
