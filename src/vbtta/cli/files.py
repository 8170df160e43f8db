"""Predictions and labels from files, checked and echoed back."""

__all__ = ["describe", "digest", "read_labels", "read_pair", "read_predictions", "read_table"]

import csv
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta._support.words import shown
from vbtta.cli.running import Talk, UsageError, existing
from vbtta.infer.categorical_data import refuse_probabilities
from vbtta.labels import Array, LabelSets
from vbtta.predictions import ViewPredictions

_LABEL = re.compile(r"label_(.+)")


class Labels(NamedTuple):
    """Labels of a file and the layout they came in."""

    sets: LabelSets
    layout: str


def read_predictions(path: Path) -> ViewPredictions:
    """Read predictions from an .npz file, or a parquet file with one row an instance and view.

    A parquet file has the columns `instance` and `view`, outputs in `output`, `output_1`, ... or, for classes,
    `logit_<class>`, and optionally their variances in `variance_...` with the same endings. A folder is one that
    `vbtta views --backend ray` wrote.
    """
    if path.is_dir():
        from vbtta.scale.tables import load_predictions

        return load_predictions(path)
    existing(path, "predictions (.npz or .parquet)")
    if path.suffix == ".npz":
        return ViewPredictions.load(path, mmap=path.stat().st_size > 1 << 30)
    if path.suffix == ".parquet":
        return _predictions_of(read_table(path), path)
    raise UsageError(f"{path}: predictions are read from .npz or .parquet files; write one with ViewPredictions.save")


def read_labels(path: Path, *, columns_are_annotators: bool = False) -> Labels:
    """Read labels from a CSV or parquet file, in either layout.

    Long: `instance`, `label`, optionally `annotator` and `count`, one row a label. Wide: `label_1`, `label_2`, ...
    (or just `label`), one row an instance, empty where there is none, optionally with `instance`. Columns such as
    `label_ann` name their annotators; numbered ones are anonymous unless they are said to be annotators.
    """
    table = read_table(existing(path, "labels (.csv or .parquet)"))
    wide = {name: match.group(1) for name in table if (match := _LABEL.fullmatch(name))}
    if wide and "label" in table:
        raise ValueError(f"{path} has both a column 'label' (long) and {next(iter(wide))!r} (wide); keep one layout")
    if "label" in table and "instance" in table:
        return Labels(_some(_long(table, path), path), "long")
    if "label" in table:
        wide = {"label": "label"}
    if not wide:
        found = ", ".join(list(table)[:8])
        raise ValueError(
            f"{path} has no labels: give columns label_1, label_2, ... (wide) or instance, annotator, label (long); "
            f"it has {found}"
        )
    named = columns_are_annotators or not all(ending.isdigit() for ending in wide.values())
    return Labels(_some(_wide(table, wide, named and wide != {"label": "label"}, path), path), "wide")


def read_pair(
    predictions: Path, labels: Path, task: str, talk: Talk, *, columns_are_annotators: bool = False
) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and their labels, paired; says what was read."""
    views = read_predictions(predictions)
    found, layout = read_labels(labels, columns_are_annotators=columns_are_annotators)
    try:
        sets = found.align(len(views), views.ids)
        if task == "classification":
            _check_classes(views, sets)
        elif task == "regression":
            sets.continuous(views.mean.shape[2])
    except ValueError as error:
        raise ValueError(f"{labels} does not fit {predictions}: {error}") from error
    if task == "classification":
        _check_logits(views, predictions)
    by_id = found.ids is not None or (found.open_ended and views.ids is not None and views.ids.dtype.kind in "iu")
    talk.note(
        f"read {describe(views, sets, task)} ({labels.name}: {layout} layout, paired by {'id' if by_id else 'row'})"
    )
    return views, sets


def _check_classes(views: ViewPredictions, labels: LabelSets) -> None:
    """Raise where labels are not classes, with the remedy of those who write files."""
    n_classes = views.mean.shape[2]
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
            f"{path} holds probabilities ({str(error).partition(': ')[2].partition('.')[0]}); store logits in `mean`: "
            "np.log(np.maximum(p, 1e-12))"
        ) from error


def describe(views: ViewPredictions, labels: LabelSets, task: str) -> str:
    """What was read, in words: "3,000 instances, 8,211 labels, 3 annotators, 10 classes"."""
    parts = [_count(len(views), "instance"), _count(int(labels.total), "label")]
    if labels.annotator is not None:
        parts.append(_count(len(labels.annotator_names), "annotator"))
    n_outputs = views.mean.shape[2]
    parts.append(_count(n_outputs, "class" if task == "classification" else "output"))
    parts.append(_count(len(views.names), "view"))
    return ", ".join(parts)


def read_table(path: Path) -> dict[str, Array]:
    """Columns of a CSV or parquet file; empty cells of a CSV are None, numbers are numbers."""
    if path.suffix == ".parquet":
        parquet = require("pyarrow.parquet", "cli")
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a parquet file: {error}") from None
        return {name: _from_list(table[name].to_pylist()) for name in table.column_names}
    if path.suffix not in (".csv", ".tsv", ".txt"):
        raise UsageError(f"{path}: tables are read from .csv or .parquet files")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty; its first line must name the columns")
    header = [name.strip() for name in rows[0]]
    if len(set(header)) < len(header):
        raise ValueError(f"{path} names a column twice: {', '.join(header)}")
    body = [row for row in rows[1:] if row]
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} cells, but the first line names {len(header)} columns")
    cells = list(zip(*body, strict=True)) if body else [()] * len(header)
    return {name: _typed([cell.strip() for cell in column]) for name, column in zip(header, cells, strict=True)}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _long(table: dict[str, Array], path: Path) -> LabelSets:
    given = np.array([cell is not None for cell in table["label"].astype(object)], dtype=bool)
    if table["label"].dtype.kind == "f":
        given &= ~np.isnan(table["label"])
    columns = {name: _from_list(table[name][given].tolist()) for name in ("instance", "label", "annotator", "count")
               if name in table}  # fmt: skip
    try:
        return LabelSets.from_table(
            columns["instance"], columns["label"], columns.get("annotator"), columns.get("count")
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _some(labels: LabelSets, path: Path) -> LabelSets:
    """Labels, of which there must be one at least."""
    if not len(labels):
        raise ValueError(f"{path} holds no labels: the lines below its first are empty or missing; add some")
    return labels


def _wide(table: dict[str, Array], columns: dict[str, str], named: bool, path: Path) -> LabelSets:
    values = np.stack([table[name].astype(object) for name in columns], axis=1)  # (N, M)
    absent = np.array([[cell is None or cell != cell for cell in row] for row in values], dtype=bool)
    absent = absent.reshape(values.shape)
    rows, column = np.nonzero(~absent)
    label = _from_list(values[rows, column].tolist())
    people = np.array(list(columns.values()))[column] if named else None
    try:
        if "instance" in table:
            return LabelSets.from_table(table["instance"][rows], label, people)
        return LabelSets.from_table(rows, label, people, n_instances=len(values))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _predictions_of(table: dict[str, Array], path: Path) -> ViewPredictions:
    for name in ("instance", "view"):
        if name not in table:
            raise ValueError(f"{path} has no column {name!r}; predictions have one row an instance and view")
    outputs = [name for name in table if re.fullmatch(r"output(_.+)?|logit_.+", name)]
    if not outputs:
        raise ValueError(f"{path} has no outputs: name them output, output_1, ... or logit_<class>")
    ids, row = _first_seen(table["instance"])
    names, view = _first_seen(table["view"].astype(str))
    shape = (len(ids), len(names), len(outputs))
    times = np.bincount(row * len(names) + view, minlength=len(ids) * len(names))
    if (times != 1).any():
        where = int(np.argmax(times != 1))
        raise ValueError(
            f"{path}: instance {ids[where // len(names)]} has {times[where]} rows of view "
            f"{str(names[where % len(names)])!r}; every instance needs one row of every view"
        )
    mean = np.empty(shape)
    spread = [f"variance_{name.partition('_')[2]}" if "_" in name else "variance" for name in outputs]
    variance = np.empty(shape) if all(name in table for name in spread) else None
    for c, (output, width) in enumerate(zip(outputs, spread, strict=True)):
        mean[row, view, c] = _numbers(table[output], output, path)
        if variance is not None:
            variance[row, view, c] = _numbers(table[width], width, path)
    endings = [name.removeprefix("logit_") for name in outputs]
    classes = _typed(endings) if all(name.startswith("logit_") for name in outputs) else None
    try:
        return ViewPredictions(mean, variance, names=list(names), ids=ids, classes=classes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _numbers(column: Array, name: str, path: Path) -> Array:
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: column {name!r} must hold numbers; it has {shown(column[0])}") from None


def _first_seen(values: Array) -> tuple[Array, Array]:
    """Distinct values in the order of their first row, and every row's place among them."""
    distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    return distinct[order], place[inverse]


def _typed(cells: list[str]) -> Array:
    """Cells of a CSV column: whole numbers, numbers or text; empty ones are None."""
    given = [cell for cell in cells if cell]
    kinds: tuple[type[int] | type[float], ...] = (int, float)
    for kind in kinds:
        try:
            # "007" and "1_000" are names rather than numbers
            if given and (kind is float or all(str(int(cell)) == cell for cell in given)):
                if any("_" in cell for cell in given):
                    break
                return _from_list([kind(cell) if cell else None for cell in cells])
        except ValueError:
            continue
        if kind is int and given and all(cell.isdigit() for cell in given):
            break
    return _from_list([cell or None for cell in cells])


def _from_list(cells: list[object]) -> Array:
    """An array of plain values; with gaps an array of objects."""
    if any(cell is None for cell in cells):
        array = np.empty(len(cells), dtype=object)
        array[:] = cells
        return array
    return np.asarray(cells)


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"
