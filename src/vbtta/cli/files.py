"""What the commands read: predictions, labels, inputs, predictors, and the files of a run."""

import hashlib
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta._support.files import set_aside
from vbtta.cli.running import Talk, UsageError, existing, nearest, refuse
from vbtta.comparison import table_cells
from vbtta.conformal import load_policy, unwrapped
from vbtta.data import files
from vbtta.data.labels import Array, LabelSets, frame_of, id_column
from vbtta.data.predictions import ViewPredictions
from vbtta.policy import Policy
from vbtta.ray.collect import read_inputs as read_cells
from vbtta.report.documents import provenance
from vbtta.report.html import write_report

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
    known = existing(path, "a table (.csv or .parquet)").suffix in (".csv", ".parquet")
    refuse(not known, f"{path}: tables are read from .csv or .parquet files")
    return path


def _read_multilabel(path: Path, views: ViewPredictions) -> LabelSets:
    """Read which labels every input has: a column of 0 and 1 for every output, empty where it is not known."""
    frame = frame_of(files.read_table(_table(path))).rename(columns=lambda name: name.removeprefix("label_"))
    key, n_outputs = id_column(frame.columns, str(path)), views.outputs.shape[2]
    class_names = [str(name) for name in (range(n_outputs) if views.classes is None else views.classes)]
    columns = [name for name in frame.columns if name != key]
    missing = [name for name in class_names if name not in columns]
    if missing or len(columns) > n_outputs:
        problem = f"no column {missing[0]!r}{nearest(missing[0], columns)}" if missing else f"{len(columns)} columns"
        raise ValueError(f"{path}: multilabel needs a column for each of {n_outputs} outputs; it has {problem}")
    labels = (frame.set_index(key) if key else frame)[class_names]
    labels = labels.set_axis(range(n_outputs), axis=1) if views.classes is None else labels
    return LabelSets.from_multilabel(labels)


def read_pair(predictions: Path, labels: Path, task: str, talk: Talk) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and their labels, paired; says what was read. Labels of multilabel tasks are those of two classes."""
    views = read_predictions(predictions)
    sets = _read_multilabel(labels, views) if task == "multilabel" else files.read_labels(_table(labels))
    if sets.ids is not None and views.ids is None:
        remedy = "add an array `ids` to it, or number its rows from 0 in a column 'instance' of the labels"
        named = f"{labels} names instances by id (such as {str(sets.ids[0])!r})"
        raise ValueError(f"{named} but {predictions} has no ids; {remedy}")
    n_outputs = views.outputs.shape[2]
    try:
        aligned = views.as_binary() if task == "multilabel" else views
        by_id = sets.pairs_by_id(aligned.ids)
        sets = sets.align(len(aligned), aligned.ids)
        if task == "regression":
            sets.continuous(n_outputs)
        elif task == "classification":
            sets.categorical(n_outputs, views.classes)
    except ValueError as error:
        reason, other_labels, _ = str(error).rstrip(".").partition("; labels other than")
        remedy = "; are these classes? --task classification" if task == "regression" else ""
        remedy = _CLASSES if other_labels else remedy
        raise ValueError(f"{labels} does not fit {predictions}: {reason}{remedy}") from error
    counts = {"instance": len(views), "label": int(sets.labels_per_instance.sum())}
    if sets.annotator is not None:
        counts["annotator"] = len(sets.annotator_names)
    counts |= {"output" if task == "regression" else "class": n_outputs, "view": len(views.names)}
    plural = {"class": "classes"}
    nouns = {name: name if count == 1 else plural.get(name, f"{name}s") for name, count in counts.items()}
    described = ", ".join(f"{count:,} {nouns[name]}" for name, count in counts.items())
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
    """Inputs (N, ...) and, from tables with a column `instance` or `id`, their ids."""
    if path.suffix == ".npz":
        arrays = files.read_npz(path)
        if "inputs" not in arrays:
            raise ValueError(f"{path} has no array `inputs`; write it with numpy.savez({path.name!r}, inputs=...)")
        return arrays["inputs"], arrays.get("ids")
    if path.suffix == ".npy":
        try:
            with open(path, "rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False), None
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; write it with numpy.save") from None
    if path.suffix == ".parquet":
        with files.reading(path):
            table = require("pyarrow.parquet", "cli").read_table(path, page_checksum_verification=True)
    else:
        table = require("pyarrow", "cli").table(files.read_table(_table(path)))
    return read_cells(table, str(path)), next(iter(files.columns_of(table, ["instance", "id"]).values()), None)


def read_part(path: Path) -> ViewPredictions | None:
    """Predictions under one view that an earlier run kept, or None; a damaged file is set aside."""
    try:
        return files.read_predictions(path) if path.is_file() else None
    except ValueError as error:
        set_aside(path, error)
        return None


def side_by_side(parts: Sequence[ViewPredictions], ids: Array | None) -> ViewPredictions:
    """Predictions under single views as those under all of them; a view that does not draw has no variance."""
    zero = np.zeros_like(parts[0].outputs) if any(part.variance is not None for part in parts) else None
    variances = [zero if part.variance is None else part.variance for part in parts]
    first, *others = (part.like(part.outputs, v, ids, None) for part, v in zip(parts, variances, strict=True))
    return first.concat(others, axis="views")


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
    try:
        network = factory()
    except TypeError as error:
        remedy = "give a function without arguments that returns the predictor"
        raise UsageError(f"--predictor {where}: {error}; {remedy}") from error
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
    return talk.table(table_cells(document["methods"], document["metrics"], document["references"].get("original")))


def write_run_report(folder: Path, target: Path, talk: Talk, *, replaces: bool = True, **parts: Any) -> list[str]:
    """Write the page of a run, without data only if it `replaces` no other or may; the files that it is made of."""
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
    if len(used) == 1:
        lack = f"{folder} has no predictions.npz with labels.csv"
        refuse(target.exists() and not replaces, f"{target} may have more than a new page: {lack}; add them, or --out")
        talk.note(f"{lack}: calibration and hard inputs are left out")
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
