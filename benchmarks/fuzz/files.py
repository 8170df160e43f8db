"""Files: view predictions (.npz, .parquet), policies (.json), tables of labels (.csv, .parquet), files of views."""

from __future__ import annotations

import csv
import io
import json
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz import base
from benchmarks.fuzz.base import Family, Rng, check, check_finite, mutate_bytes, mutate_tree, pick
from vbtta import (
    ADVI,
    CategoricalMixture,
    ConformalPolicy,
    GaussianMixture,
    LabelSets,
    Policy,
    SequentialPolicy,
    ViewPredictions,
    conformalize,
    fit_policy,
    fit_sequential,
)
from vbtta.augment import GaussianNoise, Identity, load_views, save_views
from vbtta.data.files import read_table, write_table


def write(rng: Rng, path: Path, data: bytes) -> Path:
    """The file, sometimes with another ending than its content suggests."""
    path.write_bytes(data)
    return path


def same(one: Any, other: Any) -> bool:
    """Whether two optional arrays are equal, dtype aside."""
    return (one is None) == (other is None) and (one is None or np.array_equal(np.asarray(one), np.asarray(other)))


# -- predictions -----------------------------------------------------------------------------------


@cache
def _predictions(kind: int) -> ViewPredictions:
    rng = np.random.default_rng(kind)
    outputs = rng.normal(size=(12, 3, 2))
    if kind == 0:
        return ViewPredictions(outputs)
    if kind == 1:
        names = ["identity", "flip", "é"]
        return ViewPredictions(outputs, outputs**2, names=names, ids=[f"i{n}" for n in range(12)], classes=["a", "b"])
    features = rng.normal(size=(12, 3, 1))
    return ViewPredictions(outputs.astype(np.float32), ids=range(12), groups=np.arange(12) // 3, features=features)


@cache
def _saved(kind: int, suffix: str, folder: Path) -> bytes:
    path = folder / f"source{suffix}"
    _predictions(kind).save(path)
    return path.read_bytes()


def npz(rng: Rng, folder: Path) -> str:
    """A changed file is refused, or read as it was; mapped or not."""
    kind = int(rng.integers(3))
    path = write(rng, folder / "views.npz", mutate_bytes(rng, _saved(kind, ".npz", folder)))
    return _read_predictions(path, _predictions(kind), mmap=bool(rng.integers(2)))


def parquet(rng: Rng, folder: Path) -> str:
    """The same of a parquet file; parquet does not checksum its pages, so numbers may differ but must be numbers."""
    kind = int(rng.integers(2))
    path = write(rng, folder / "views.parquet", mutate_bytes(rng, _saved(kind, ".parquet", folder)))
    return _read_predictions(path, None, mmap=False)


def _read_predictions(path: Path, source: ViewPredictions | None, *, mmap: bool) -> str:
    loaded = ViewPredictions.load(path, mmap=mmap)
    if source is not None:
        for key in ("outputs", "variance", "ids", "classes", "groups", "features", "names"):
            check(same(getattr(loaded, key), getattr(source, key)), f"{key} differs from what was saved")
        return "equal"
    try:
        loaded.check_finite()
    except ValueError:  # as in a fit, which knows of no file
        return "read, refused in use"
    check_finite("outputs", loaded.outputs)
    return "read"


def crafted_npz(rng: Rng, folder: Path) -> str:
    """Archives that a program made: wrong headers, wrong sizes, objects, bombs, other compressions, doubled members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of doubled names
        for name in ("outputs", pick(rng, ("variance", "names", "ids", "draws", "groups", "outputs", "features", "x"))):
            compression = pick(rng, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
            archive.writestr(f"{name}.npy", _member(rng), compression)
    data = buffer.getvalue()
    path = write(rng, folder / "views.npz", mutate_bytes(rng, data) if rng.random() < 0.3 else data)
    return _read_predictions(path, None, mmap=bool(rng.integers(2)))


def _member(rng: Rng) -> bytes:
    buffer = io.BytesIO()
    kind = int(rng.integers(6))
    if kind == 0:
        np.lib.format.write_array(buffer, np.asarray(rng.normal(size=tuple(rng.integers(0, 4, size=3)))))
    elif kind == 1:
        np.lib.format.write_array(buffer, np.array([1, "a", None], dtype=object), allow_pickle=True)
    elif kind == 2:
        array = base.odd_array(rng, (3, 2, 1))
        plain = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray) and array.dtype != object
        np.lib.format.write_array(buffer, array if plain else np.zeros(3))
    elif kind == 3:
        np.lib.format.write_array(buffer, np.zeros((int(rng.integers(1, 300)), 64, 16)))
    else:
        shape = [
            int(pick(rng, (0, 1, 2, 3, -1, 10**6, 2**31, 2**40, 2**63, 10**30))) for _ in range(int(rng.integers(4)))
        ]
        dtype = pick(rng, ("<f8", "<f4", "|O", "<U9", "|V0", "<U0", "<c16", "[('a','<f8')]", "nonsense", "<f8'", "|b1"))
        header = f"{{'descr': '{dtype}', 'fortran_order': {pick(rng, (True, False, 1))}, 'shape': {tuple(shape)}, }}"
        header += pick(rng, ("", " ", "\n", "(" * 500, "#", "'"))
        size = int(pick(rng, (len(header), len(header), 0, 2**16 - 1, len(header) + 9)))
        buffer.write(b"\x93NUMPY" + bytes([pick(rng, (1, 2, 3, 9)), 0]) + size.to_bytes(2, "little") + header.encode())
        buffer.write(rng.normal(size=int(rng.integers(30))).tobytes())
    return buffer.getvalue()


# -- policies --------------------------------------------------------------------------------------

_KINDS: dict[str, type[Any]] = {"policy": Policy, "sequential": SequentialPolicy, "conformal": ConformalPolicy}


@cache
def _fitted() -> list[tuple[str, Any, ViewPredictions, Any]]:
    """Policies of several models, once in a process: kind, policy, inputs and labels."""
    rng = np.random.default_rng(0)
    label, raters = rng.integers(3, size=120), [f"r{n % 3}" for n in range(120)]
    logits = ViewPredictions(np.eye(3)[label][:, None] * [[1.0], [2.0], [0.5]] + rng.normal(size=(120, 3, 3)),
                             names=["identity", "flip", "crop"], classes=["a", "b", "c"])  # fmt: skip
    truth = rng.normal(size=(120, 2))
    views = ViewPredictions(truth[:, None] + rng.normal(size=(120, 3, 2)) * 0.3, names=["identity", "flip", "crop"])
    crowd = LabelSets.from_table(np.repeat(np.arange(40), 3), np.repeat(label[:40], 3), raters, n_instances=120)
    numbers: dict[str, Any] = {"task": "regression", "guard": False}
    classes: dict[str, Any] = {"task": "classification", "guard": False}
    vectors = LabelSets.from_array(truth[:, None])
    levels = np.digitize(truth[:, 0], [-0.5, 0.5])
    score = ViewPredictions(views.outputs[:, :, :1], names=views.names)
    orders = LabelSets.from_rankings(np.argsort(-truth, axis=1).tolist())
    short = ADVI(steps=20, particles=2)
    hard = CategoricalMixture(noise="annotator", difficulty=True)
    return [
        ("policy", fit_policy(logits, label, task="classification"), logits, label),
        ("policy", fit_policy(views, vectors, task="regression"), views, vectors),
        ("policy", fit_policy(logits, crowd, model="latent", **classes), logits, crowd),
        ("policy", fit_policy(logits, crowd, model=CategoricalMixture(weights="view_class"), **classes), logits, crowd),
        ("policy", fit_policy(logits, crowd, model=hard, **classes), logits, crowd),
        ("policy", fit_policy(views, vectors, model=GaussianMixture(weights="input"), **numbers), views, vectors),
        ("policy", fit_policy(views, vectors, model="latent", **numbers).prune(0.2), views, vectors),
        ("policy", fit_policy(views, vectors, engine=short, **numbers), views, vectors),
        ("policy", fit_policy(logits, crowd, engine=short, **classes), logits, crowd),
        ("policy", fit_policy(score, levels, task="ordinal", engine=short), score, levels),
        ("policy", fit_policy(views, orders, task="ranking", engine=short), views, orders),
        ("sequential", fit_sequential(logits, label, task="classification", model="latent"), logits, label),
        ("conformal", conformalize(fit_policy(logits.take(slice(60)), label[:60], task="classification"),
                                   logits.take(slice(60, 120)), label[60:], level=0.8), logits, label),
    ]  # fmt: skip


@cache
def _policies(folder: Path) -> list[tuple[str, bytes, ViewPredictions, Any, bytes]]:
    """The same policies in files: kind, file, inputs, labels, and what they predict."""
    saved = []
    for kind, policy, inputs, labels in _fitted():
        path = folder / "source.json"
        policy.save(path)
        saved.append((kind, path.read_bytes(), inputs, labels, predicted(policy, inputs)))
        use(policy, inputs, labels)
    return saved


def use(policy: Any, inputs: ViewPredictions, labels: Any) -> None:
    """What a policy can do besides predicting; numbers must be finite."""
    if not isinstance(policy, Policy):
        return
    truth: Any = policy.consensus(inputs, labels)
    check_finite("the consensus", truth.proba if hasattr(truth, "proba") else truth.mean)
    check_finite("the score", policy.score(inputs, labels))
    if isinstance(policy.engine, ADVI):
        policy.draws(3)


def predicted(policy: Any, inputs: ViewPredictions) -> bytes:
    """All numbers of a prediction; they must be finite."""
    prediction = policy.predict(inputs)
    numbers = (
        prediction.proba if hasattr(prediction, "proba") else np.concatenate([prediction.mean, prediction.variance])
    )
    check_finite("the prediction", numbers)
    if isinstance(policy, Policy):
        check_finite("weights", policy.weights, policy.weight_interval(0.9))
        check(abs(policy.weights.sum() - 1) < 1e-6, "weights do not sum to one")
    if isinstance(policy, ConformalPolicy):
        numbers = np.concatenate([numbers.ravel(), policy.predict_set(inputs).ravel()])
    return bytes(np.ascontiguousarray(numbers).tobytes())


def policy_bytes(rng: Rng, folder: Path) -> str:
    """A policy file with changed bytes is refused, or predicts the same to the last bit."""
    kind, data, inputs, _, expected = pick(rng, _policies(folder))
    path = write(rng, folder / "policy.json", mutate_bytes(rng, data))
    policy = _KINDS[kind].load(path)
    check(predicted(policy, inputs) == expected, "a changed file predicts otherwise")
    return "equal"


def policy_tree(rng: Rng, folder: Path) -> str:
    """A policy with changed entries is refused with the checksum; without, refused or it predicts finite numbers."""
    kind, data, inputs, labels, expected = pick(rng, _policies(folder))
    tree = mutate_tree(rng, json.loads(data), _json_value)
    path = folder / "policy.json"
    path.write_text(json.dumps(tree), encoding="utf-8", errors="surrogatepass")
    verify = bool(rng.integers(2))
    with np.errstate(all="ignore"):
        policy = _KINDS[kind].load(path, verify=verify)
        if verify:
            check(predicted(policy, inputs) == expected, "a changed file predicts otherwise")
            return "equal"
        try:
            predicted(policy, inputs)
            use(policy, inputs, labels)
        except base.ALLOWED:
            return "edited, does not suit the inputs"
        except base.WrongError:
            return "edited, predicts numbers beyond range"  # legal entries such as 1e200, by the user's own hand
    return "edited"


def _json_value(rng: Rng) -> Any:
    kind = int(rng.integers(8))
    if kind < 3:
        return pick(rng, base.NUMBERS)
    if kind == 3:
        return pick(rng, [text for text in base.TEXTS if text != "\ud800"])
    if kind == 4:
        nested: Any = 0
        for _ in range(int(pick(rng, (2, 50, 300)))):
            nested = [nested]
        return nested
    return pick(rng, (None, True, False, [], {}, [1, 2], [[1, 2], [3]], {"a": 1}, "a", [None], 10**8, -5, 1e9))


def policy_text(rng: Rng, folder: Path) -> str:
    """Text that is no policy: deep nesting, huge numbers, doubled keys."""
    _, data, *_ = pick(rng, _policies(folder))
    depth = int(10 ** rng.uniform(0, 6))
    large = data.decode().replace('"weights": [0', '"weights": [' + "9" * min(depth, 5000), 1)
    texts = ["[" * depth, "{" * depth, '{"a":' * depth, "1" * depth, "-" + "9" * depth, '{"format": "vbtta-policy"}',
             '{"format": "vbtta-policy", "version": 1}', large,
             data.decode() * 2, '"' + "\\u0000" * 9, "", " ", "NaN", "\ufeff" + data.decode(), "null"]  # fmt: skip
    path = folder / "policy.json"
    path.write_text(pick(rng, texts), encoding="utf-8")
    Policy.load(path, verify=bool(rng.integers(2)))
    raise base.WrongError("text that is no policy was accepted")


# -- tables ----------------------------------------------------------------------------------------


def _table(rng: Rng) -> str:
    layout, n = int(rng.integers(4)), int(rng.integers(0, 8))
    header = ("instance,label", "instance,annotator,label,count", "label_1,label_2,label_3", "id,label_ann,label_bob")
    widths = [len(head.split(",")) for head in header]
    cells = [str(pick(rng, (0, 1, 2, 0.5, "cat", "dog", "", *base.TEXTS))) for _ in range(n * widths[layout])]
    cells = [cell if set(cell).isdisjoint(',"\r\n\ud800') else "q" for cell in cells]
    rows = [",".join(cells[row * widths[layout] : (row + 1) * widths[layout]]) for row in range(n)]
    return "\n".join([header[layout], *rows]) + "\n"


def table(rng: Rng, folder: Path) -> str:
    """Tables of labels with odd cells and changed bytes are refused, or become labels that pair with predictions."""
    data = _table(rng).encode()
    path = write(rng, folder / "labels.csv", mutate_bytes(rng, data) if rng.random() < 0.7 else data)
    labels = LabelSets.load(path)
    check_finite("labels", labels.value, labels.count)
    back = folder / "again.csv"
    labels.save(back)
    again = LabelSets.load(back)
    check(len(again) == len(labels) and again.total == labels.total, "labels differ after saving and loading")
    check(_by_id(again) == _by_id(labels), "values differ after saving and loading")
    return "read"


def _by_id(labels: LabelSets) -> list[tuple[str, str]]:
    """Instances and their labels: ids that are all numbers have another order, and "1.0" is 1 among them."""
    ids = [str(name).removesuffix(".0") for name in labels.table()["instance"]]
    return sorted(zip(ids, labels.value.astype(str), strict=True))


def parquet_labels(rng: Rng, folder: Path) -> str:
    """The same of parquet files."""
    path = folder / "labels.parquet"
    columns = {"instance": np.arange(5), "label": pick(rng, (np.arange(5.0), np.array(list("abcde"))))}
    write_table(path, columns)
    write(rng, path, mutate_bytes(rng, path.read_bytes()))
    labels = LabelSets.load(path)
    check_finite("labels", labels.value, labels.count)
    return "read"


def exported_cells(rng: Rng, folder: Path) -> str:
    """Text cells come back as they were, and a spreadsheet sees no formula."""
    cells = np.array([pick(rng, base.TEXTS) + pick(rng, ("", "x", "=")) for _ in range(int(rng.integers(1, 6)))])
    keep = [cell for cell in cells if set(cell).isdisjoint("\x00\ud800") and cell.strip()]
    if not keep:
        return "nothing to write"
    path = folder / "cells.csv"
    write_table(path, {"name": np.array([*keep, "word"])})
    with open(path, newline="", encoding="utf-8") as file:
        for (cell,) in csv.reader(file):
            check(cell.lstrip()[:1] not in ("=", "+", "-", "@"), f"{cell!r} is a formula")
    check(read_table(path)["name"].tolist() == [*keep, "word"], "cells differ after writing and reading")
    return "equal"


def views_file(rng: Rng, folder: Path) -> str:
    """Files of views, TOML and JSON, with changed bytes or entries."""
    suffix = pick(rng, (".toml", ".json"))
    path = folder / f"views{suffix}"
    save_views([Identity(), GaussianNoise(0.1)], path)
    data = path.read_bytes()
    if suffix == ".json" and rng.random() < 0.5:
        path.write_text(json.dumps(mutate_tree(rng, json.loads(data), _json_value)), encoding="utf-8")
    else:
        write(rng, path, mutate_bytes(rng, data))
    views = load_views(path)
    check(all(isinstance(view.name, str) for view in views), "a view has no name")
    return "read"


FAMILIES = (
    Family("npz, changed bytes", npz, 0.2),
    Family("npz, made by a program", crafted_npz, 0.06),
    Family("parquet predictions", parquet, 0.06),
    Family("policy, changed bytes", policy_bytes, 0.06),
    Family("policy, changed entries", policy_tree, 0.07),
    Family("policy, other text", policy_text, 0.01),
    Family("label tables", table, 0.12),
    Family("parquet labels", parquet_labels, 0.05),
    Family("exported cells", exported_cells, 0.02),
    Family("files of views", views_file, 0.04),
)
