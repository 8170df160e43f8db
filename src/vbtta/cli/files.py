"""What the commands read and keep: predictions, labels, inputs, predictors, the files of a run, finished parts."""

__all__ = [
    "Parts", "ScoredParts", "comparison_table", "consensus_table", "content", "digest", "fingerprint", "load_predictor",
    "read_inputs", "read_pair", "read_predictions", "side_by_side", "write_run_report",
]  # fmt: skip

import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta._support.files import atomic_path, set_aside
from vbtta._support.fingerprints import array_digest
from vbtta.cli.running import Talk, UsageError, existing, nearest, refuse
from vbtta.comparison import Scored, table_cells
from vbtta.conformal import load_policy, unwrapped
from vbtta.data import files
from vbtta.data.labels import Array, LabelSets, frame_of, id_column
from vbtta.data.predictions import ViewPredictions
from vbtta.models.parts.class_data import refuse_probabilities
from vbtta.policy import Policy
from vbtta.ray.collect import read_inputs as read_cells
from vbtta.report.documents import provenance
from vbtta.report.html import write_report

_TABLES = (".csv", ".tsv", ".txt", ".parquet")
_CLASSES = (
    "; where labels are not 0, 1, ..., add an array `classes` to the predictions file, the names in the order of the "
    "outputs (in parquet: name the columns logit_<class>)"
)

# -- predictions and labels -----------------------------------------------------------------------


def read_predictions(path: Path) -> ViewPredictions:
    """Read predictions from an .npz or parquet file, or a folder that `vbtta views --backend ray` wrote."""
    path = path if path.is_dir() else existing(path, "predictions (.npz or .parquet)")
    return files.read_predictions(path, mmap=path.suffix == ".npz" and path.stat().st_size > 1 << 30)


def _table(path: Path) -> Path:
    if existing(path, "a table (.csv or .parquet)").suffix not in _TABLES:
        raise UsageError(f"{path}: tables are read from .csv or .parquet files")
    return path


def _read_multilabel(path: Path, views: ViewPredictions) -> LabelSets:
    """Read which labels every input has: a column of 0 and 1 for every output, empty where it is not known."""
    frame = frame_of(files.read_table(_table(path))).rename(columns=lambda name: name.removeprefix("label_"))
    key, n_outputs = id_column(frame.columns, str(path)), views.outputs.shape[2]
    wanted = [str(name) for name in (range(n_outputs) if views.classes is None else views.classes)]
    given = [name for name in frame.columns if name != key]
    missing = [name for name in wanted if name not in given]
    if missing or len(given) > n_outputs:
        problem = f"no column {missing[0]!r}{nearest(missing[0], given)}" if missing else f"{len(given)} columns"
        raise ValueError(f"{path}: multilabel needs a column for each of {n_outputs} outputs; it has {problem}")
    labels = (frame.set_index(key) if key else frame)[wanted]
    labels = labels.set_axis(range(n_outputs), axis=1) if views.classes is None else labels
    return LabelSets.from_multilabel(labels)


def read_pair(
    predictions: Path, labels: Path, task: str, talk: Talk, *, columns_are_annotators: bool = False
) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and their labels, paired; says what was read. Labels of multilabel tasks are those of two classes."""
    views = read_predictions(predictions)
    if task == "multilabel":
        refuse(
            columns_are_annotators, "--columns-are-annotators: columns of --task multilabel are classes; leave it out"
        )
        given = _read_multilabel(labels, views)
    else:
        given = files.read_labels(_table(labels), columns_are_annotators=columns_are_annotators)
    if given.ids is not None and views.ids is None:
        raise ValueError(
            f"{labels} names instances by id (such as {str(given.ids[0])!r}) but {predictions} has no ids: add an "
            "array `ids` to the predictions, or to pair by row leave that column out of the labels (call it 'instance' "
            "if it numbers the rows from 0)"
        )
    hint, n_outputs = "", views.outputs.shape[2]
    try:
        aligned = views.as_binary() if task == "multilabel" else views
        by_id = given.pairs_by_id(aligned.ids)
        sets = given.align(len(aligned), aligned.ids)
        if task == "regression":
            sets.continuous(n_outputs)
        elif task == "classification":
            refuse_probabilities(views)
            hint = _CLASSES if views.classes is None else ""
            sets.categorical(n_outputs, views.classes)
    except ValueError as error:
        raise ValueError(f"{labels} does not fit {predictions}: {str(error).rstrip('.')}{hint}") from error
    counts = {"instance": len(views), "label": int(sets.labels_per_instance.sum())}
    if sets.annotator is not None:
        counts["annotator"] = len(sets.annotator_names)
    counts |= {"output" if task == "regression" else "class": n_outputs, "view": len(views.names)}
    endings = {name: "" if count == 1 else "es" if name == "class" else "s" for name, count in counts.items()}
    described = ", ".join(f"{count:,} {name}{endings[name]}" for name, count in counts.items())
    talk.note(f"read {described} ({labels.name}, paired by {'id' if by_id else 'row'})")
    return views, sets


def consensus_table(policy: Policy, views: ViewPredictions, labels: LabelSets) -> dict[str, Array]:
    """The inferred true label of every input, its certainty, and the number of labels it was given."""
    truth: Any = policy.consensus(views, labels)
    columns = truth.columns()
    if policy.task == "classification" and not policy.multilabel:
        proba = {name: column for name, column in columns.items() if name.startswith("proba_")}
        columns = {"label": truth.label, "certainty": truth.proba.max(axis=1), **proba}
    ids = np.arange(len(views)) if views.ids is None else views.ids
    n_labels = labels.labels_per_instance.reshape(len(views), -1).sum(axis=1).astype(np.int64)
    return {"instance": ids, **columns, "labels": n_labels}


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
    columns = files.read_table(_table(path))
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
    folder = folder or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; a console script does not
    try:
        factory = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        remedy = "give package.module:function, and run vbtta where the package can be found"
        raise UsageError(f"--predictor {where}: {error}; {remedy}") from None
    network = factory()
    if weights is None:
        return network
    if not hasattr(network, "load_state_dict"):
        raise UsageError(f"--weights {weights}: {where} makes a {type(network).__name__}, which has no load_state_dict")
    path, torch = existing(weights, "weights (.pt)"), require("torch", "torch")
    try:
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch has a class of its own for each way a file can be wrong
        reason, remedy = " ".join(str(error).split())[:300], "write them with torch.save(model.state_dict(), path)"
        raise ValueError(f"{weights} holds no weights for {where} ({reason}); {remedy}") from None
    return network


# -- a run ----------------------------------------------------------------------------------------


def comparison_table(document: dict[str, Any], talk: Talk) -> str:
    """The comparison as a table, the best log-likelihood first."""
    metrics = document["metrics"]
    return talk.table(*table_cells(document["methods"], metrics, metrics, document["references"].get("original")))


def write_run_report(folder: Path, target: Path, talk: Talk, **parts: Any) -> list[str]:
    """Write the page of a run; the names of the files that it was made from."""
    policy = load_policy(folder / "policy.json")
    inner, used = unwrapped(policy)[0], [folder / "policy.json"]
    for prefix in ("", "test_"):
        views, labels = (
            next((path for end in ends if (path := folder / f"{prefix}{name}{end}").is_file()), None)
            for name, ends in (("predictions", (".npz", ".parquet")), ("labels", (".csv", ".parquet")))
        )
        if views is not None and labels is not None:
            pair = read_pair(views, labels, inner.task, talk)
            used += [views, labels]
            parts |= {"test": pair} if prefix else {"predictions": pair[0], "labels": pair[1]}
    documents: dict[str, Any] = {}
    for name in ("comparison", "diagnosis", "run"):
        if (path := folder / f"{name}.json").is_file():
            try:
                documents[name] = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} was not written by vbtta: {error}; make it again") from None
            used += [] if name == "run" else [path]
    run = documents.pop("run", {})
    circumstances = provenance(inner, {path.name: digest(path) for path in used}, run.get("options"))
    try:
        write_report(target, policy, story=run.get("story"), circumstances=circumstances, **documents, **parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a .json file that vbtta did not write ({error!r}); make it again") from error
    return [path.name for path in used]


# -- finished parts of long work -------------------------------------------------------------------


def content(views: Any, labels: Any) -> list[Any]:
    """The data that a comparison depends on."""
    arrays = [views.outputs, labels.instance, labels.value, labels.count]
    arrays += [array for array in (views.variance, labels.annotator, views.classes, views.groups) if array is not None]
    return [views.names, labels.annotator_names, *arrays]


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits of a hash of the parts; arrays count with all their bytes."""
    described = [array_digest(part) if isinstance(part, np.ndarray) else part for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
            with atomic_path(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, allow_pickle=False, **members)

    def clear(self) -> None:
        """Remove all parts: the output is complete."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40]
        return None if self.folder is None else self.folder / f"{self.key}-{fingerprint(name)[:8]}-{plain}.npz"


class ScoredParts(dict[str, Scored]):
    """Scored methods of a comparison, kept as parts; those kept before are read at the start."""

    def __init__(self, parts: Parts, names: Sequence[str], talk: Talk) -> None:
        super().__init__()
        self.parts, self.names, self.talk, self.start = parts, names, talk, time.perf_counter()
        for name in names:
            if (members := parts.load(name)) is not None:
                columns = {str(metric): members[f"metric_{metric}"] for metric in members["order"]}
                views = tuple(str(view) for view in members["views"])
                score = Scored(columns, views, float(members["seconds"]), float(members["share"]))
                super().__setitem__(name, score)
                talk.note(f"{name}: kept from before")
        self.n_kept = len(self)

    def __setitem__(self, name: str, score: Scored) -> None:
        super().__setitem__(name, score)
        members = {f"metric_{metric}": table for metric, table in score.columns.items()}
        members |= {"order": np.array(list(score.columns)), "views": np.array(score.views)}
        self.parts.save(name, {**members, "seconds": np.array(score.seconds), "share": np.array(score.share)})
        left, each = len(self.names) - len(self), (time.perf_counter() - self.start) / (len(self) - self.n_kept)
        estimate = f", about {left * each:.0f} s left" if left * each >= 1 else ""
        self.talk.note(f"{name}: done ({len(self)} of {len(self.names)}{estimate})")
