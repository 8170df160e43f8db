"""What the commands read and keep: predictions, labels, inputs, predictors, the files of a run, finished parts."""

__all__ = [
    "Parts", "ScoredParts", "comparison_table", "content", "digest", "fingerprint", "load_predictor", "read_inputs",
    "read_labels", "read_pair", "read_predictions", "side_by_side", "write_arrays", "write_run_report",
]  # fmt: skip

import hashlib
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta._support.files import atomic_path, set_aside
from vbtta._support.fingerprints import array_digest
from vbtta.cli.running import Talk, UsageError, existing
from vbtta.comparison import Scored, table_cells
from vbtta.conformal import load_policy, unwrapped
from vbtta.data import files
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.models.parts.class_data import refuse_probabilities
from vbtta.ray.collect import read_inputs as read_cells
from vbtta.report.documents import provenance
from vbtta.report.html import Examples, write_report
from vbtta.report.maps import maps_of

_TABLES = (".csv", ".tsv", ".txt", ".parquet")

# -- predictions and labels -----------------------------------------------------------------------


def read_predictions(path: Path) -> ViewPredictions:
    """Read predictions from an .npz or parquet file, or a folder that `vbtta views --backend ray` wrote."""
    if not path.is_dir() and existing(path, "predictions (.npz or .parquet)").suffix not in (".npz", ".parquet"):
        raise UsageError(
            f"{path}: predictions are read from .npz or .parquet files; write one with ViewPredictions.save"
        )
    return files.read_predictions(path, mmap=path.suffix == ".npz" and path.stat().st_size > 1 << 30)


def read_labels(path: Path, *, columns_are_annotators: bool = False) -> files.Labels:
    """Read labels from a CSV or parquet file, long or wide."""
    if existing(path, "labels (.csv or .parquet)").suffix not in _TABLES:
        raise UsageError(f"{path}: tables are read from .csv or .parquet files")
    return files.read_labels(path, columns_are_annotators=columns_are_annotators)


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
        f"read {_described(views, sets, task)} ({labels.name}: {layout} layout, paired by {'id' if by_id else 'row'})"
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


def _described(views: ViewPredictions, labels: LabelSets, task: str) -> str:
    """What was read, in words: "3,000 instances, 8,211 labels, 3 annotators, 10 classes"."""
    counts = {"instance": len(views), "label": int(labels.labels_per_instance.sum())}
    if labels.annotator is not None:
        counts["annotator"] = len(labels.annotator_names)
    counts["class" if task == "classification" else "output"] = views.outputs.shape[2]
    counts["view"] = len(views.names)
    endings = {name: "" if count == 1 else "es" if name == "class" else "s" for name, count in counts.items()}
    return ", ".join(f"{count:,} {name}{endings[name]}" for name, count in counts.items())


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- inputs and predictors ------------------------------------------------------------------------


def read_inputs(path: Path) -> tuple[Array, Array | None]:
    """Inputs (N, ...) and, from tables with a column `instance`, their ids."""
    if path.suffix in (".npy", ".npz"):
        try:
            loaded = np.load(path, allow_pickle=False)
            if path.suffix == ".npy":
                return loaded, None
            return loaded["inputs"], (loaded["ids"] if "ids" in loaded.files else None)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{path} holds no plain array `inputs`: {error}") from None
    if path.suffix == ".parquet" and "image" in files.footers([str(path)], "")[0].schema.to_arrow_schema().names:
        table = require("pyarrow.parquet", "cli").read_table(path, columns=["image"])
        return read_cells(table, str(path)), None
    if path.suffix not in _TABLES:
        raise UsageError(f"{path}: tables are read from .csv or .parquet files")
    columns = files.read_table(path)
    ids = columns.pop("instance", None)
    try:
        return np.stack([column.astype(np.float64) for column in columns.values()], axis=1), ids
    except (TypeError, ValueError):
        raise ValueError(f"{path}: all columns but `instance` must be numbers without gaps") from None


def side_by_side(names: Sequence[str], collected: Sequence[Mapping[str, Array]], ids: Array | None) -> ViewPredictions:
    """Arrays of single views as predictions of all of them; a view that does not draw has no variance."""
    arrays = {key: [members[key] for members in collected] for key in ("outputs", "draws") if key in collected[0]}
    if any("variance" in members for members in collected):
        arrays["variance"] = [members.get("variance", np.zeros_like(members["outputs"])) for members in collected]
    joined = {key: np.concatenate(values, axis=1) for key, values in arrays.items()}
    prints = {name: str(members["fingerprint"]) for name, members in zip(names, collected, strict=True)}
    return ViewPredictions(**joined, names=names, ids=ids, classes=collected[0].get("classes"), fingerprints=prints)


def load_predictor(where: str, weights: Path | None, folder: str | None = None) -> Any:
    """The predictor that a factory of the user makes, with modules found as from the folder, by default this one."""
    module, _, name = where.partition(":")
    if not module or not name:
        raise UsageError(
            f"--predictor {where}: give a module and a function that makes the predictor, as package.module:make"
        )
    folder = folder or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; a console script does not
    try:
        factory = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"--predictor {where}: there is no module {error.name}; run vbtta where it can be found"
        ) from None
    except AttributeError:
        raise UsageError(f"--predictor {where}: {module} has no {name}") from None
    network = factory()
    if weights is None:
        return network
    if not hasattr(network, "load_state_dict"):
        raise UsageError(f"--weights {weights}: {where} makes a {type(network).__name__}, which has no load_state_dict")
    existing(weights, "weights (.pt)")
    torch = require("torch", "torch")
    try:
        state = torch.load(weights, weights_only=True, map_location="cpu")
    except Exception:  # torch has a class of its own for each way a file can be wrong
        raise ValueError(
            f"{weights} is no file of weights: it must hold a state_dict and no other object; write it with "
            "torch.save(model.state_dict(), path)"
        ) from None
    try:
        network.load_state_dict(state)
    except Exception as error:  # likewise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{weights} holds no weights for {where}: {' '.join(lines[1:2] or lines[:1])[:300]}") from None
    return network


# -- a run ----------------------------------------------------------------------------------------


def comparison_table(document: dict[str, Any], talk: Talk) -> str:
    """The comparison as a table, the best log-likelihood first."""
    metrics = document["metrics"]
    return talk.table(*table_cells(document["methods"], metrics, metrics, document["references"].get("original")))


def content(views: Any, labels: Any) -> list[Any]:
    """The data that a comparison depends on."""
    arrays = [views.outputs, labels.instance, labels.value, labels.count]
    arrays += [array for array in (views.variance, labels.annotator, views.classes, views.groups) if array is not None]
    return [views.names, labels.annotator_names, *arrays]


def write_run_report(folder: Path, target: Path, talk: Talk) -> list[str]:
    """Write the page of a run; the names of the files that it was made from."""
    policy = load_policy(folder / "policy.json")
    used = [folder / "policy.json"]
    parts: dict[str, Any] = {}
    for prefix in ("", "test_"):
        views = _first(folder, f"{prefix}predictions", ".npz", ".parquet")
        labels = _first(folder, f"{prefix}labels", ".csv", ".parquet")
        if views is not None and labels is not None:
            pair = read_pair(views, labels, unwrapped(policy)[0].task, talk)
            used += [views, labels]
            parts |= {"test": pair} if prefix else {"predictions": pair[0], "labels": pair[1]}
    readers: dict[str, Callable[[Path], Any]] = {
        "comparison.json": _read_json,
        "diagnosis.json": _read_json,
        "examples.npz": partial(_read_arrays, make=_examples_of, content="examples (rows, names, images)"),
        "maps.npz": partial(_read_arrays, make=maps_of, content="maps (names, dice, titles, panels)"),
    }
    for name, read in readers.items():
        if (folder / name).is_file():
            parts[name.partition(".")[0]] = read(folder / name)
            used.append(folder / name)
    run = _read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    circumstances = provenance(unwrapped(policy)[0], {path.name: digest(path) for path in used}, run.get("options"))
    try:
        write_report(target, policy, story=run.get("story"), circumstances=circumstances, **parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a .json file that vbtta did not write ({error!r}); make it again") from error
    return [path.name for path in used]


def _first(folder: Path, name: str, *suffixes: str) -> Path | None:
    return next((folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").is_file()), None)


def _read_json(path: Path) -> Any:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); make it again") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no object; make it again")
    return document


def _read_arrays(path: Path, make: Callable[[Mapping[str, Array]], Any], content: str) -> Any:
    try:
        with np.load(path, allow_pickle=False) as members:
            return make(members)
    except (ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no {content}: {error}; make it again") from None


def _examples_of(members: Mapping[str, Array]) -> Examples:
    names = tuple(str(name) for name in members["names"])
    return Examples(members["rows"], names, members.get("images"))


# -- finished parts of long work -------------------------------------------------------------------


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits of a hash of the parts; arrays count with all their bytes."""
    described = [array_digest(part) if isinstance(part, np.ndarray) else part for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_arrays(path: Path, members: Mapping[str, Array]) -> None:
    """Write an .npz file of plain arrays, atomically."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **members)


class Parts:
    """A folder of arrays beside an output (None: nothing is kept); the key is a fingerprint of data and options."""

    def __init__(self, output: Path | None, key: str) -> None:
        self.folder = None if output is None else output.with_name(f"{output.name}.parts")
        self.key = key

    def load(self, name: str) -> dict[str, Array] | None:
        """A part that was kept, or None."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            return files.read_npz(path)
        except ValueError as error:
            set_aside(path, error)
            return None

    def save(self, name: str, members: Mapping[str, Array]) -> None:
        """Keep a part."""
        path = self._path(name)
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            write_arrays(path, members)

    def clear(self) -> None:
        """Remove all parts: the output is complete."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40]
        return self.folder / f"{self.key}-{fingerprint(name)[:8]}-{plain}.npz"


class ScoredParts(dict[str, Scored]):
    """Scored methods of a comparison, kept as parts; those kept before are read at the start."""

    def __init__(self, parts: Parts, names: Iterable[str]) -> None:
        super().__init__()
        self.parts = parts
        for name in names:
            members = parts.load(name)
            if members is not None:
                columns = {str(metric): members[f"metric_{metric}"] for metric in members["order"]}
                views = tuple(str(view) for view in members["views"])
                share = float(members["share"])
                super().__setitem__(name, Scored(columns, views, float(members["seconds"]), share))

    def __setitem__(self, name: str, score: Scored) -> None:
        super().__setitem__(name, score)
        members = {f"metric_{metric}": table for metric, table in score.columns.items()}
        members |= {"order": np.array(list(score.columns)), "views": np.array(score.views)}
        self.parts.save(name, {**members, "seconds": np.array(score.seconds), "share": np.array(score.share)})
