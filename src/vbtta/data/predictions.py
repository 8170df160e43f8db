"""A network's predictions under K views."""

from __future__ import annotations

__all__ = ["Rows", "ViewPredictions", "conflict", "draws_of", "pivot", "require_views", "row_hashes", "same_table"]

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import printable, real_array, row_numbers, shown, to_array
from vbtta._support.fingerprints import UNKNOWN
from vbtta.data import labels as tables
from vbtta.data.labels import Array, LabelSets

_ROWS_AT_A_TIME = 1 << 11
_LARGEST = 1e100  # a prediction, so that its square is a number too


class Rows(NamedTuple):
    """Hashes of the rows that a policy was fitted to; of 2,048 evenly spaced ones where there are more."""

    views: tuple[str, ...] = ()  # whose outputs were hashed
    hashes: tuple[str, ...] = ()


class ViewPredictions:
    """A model's predictions for N inputs under K views: C outputs each.

    Parameters
    ----------
    outputs : (N, K, C) array
        Averaged over the draws of a stochastic view: raw outputs in regression, **logits**
        in classification. Single and double precision are kept as they are, without a copy.
    variance : (N, K, C) array, optional
        Variance over the draws.
    names : K strings, optional
        Names of the views; the unaugmented one is `identity`. Generated where absent.
    ids : (N,) integers or strings, optional
        Identifiers of the inputs.
    classes : (C,) integers or strings, optional
        What the outputs of a classifier stand for; 0..C-1 where absent.
    groups : (N,) integers, strings, Series or table, optional
        Rows that belong together, such as images of a patient; held-out folds keep them together, and
        weight intervals allow for their correlation. A Series is paired with `ids` by its index, a table by its
        column of ids.
    draws : (n, K, M, C) array, optional
        The single draws of the first n inputs, for diagnostics; a choice of inputs leaves them behind.
    features : (N, K, F) array or table, optional
        What else is known of every input and view (image quality, orientation), for weights that depend on the input.
        A table has the columns `instance` (or `id`), `view` and one a feature.
    feature_names : F strings, optional
        Names of the features; generated where absent.
    fingerprints : dict, optional
        By view name, what made the predictions; policies compare them.
    """

    labels_an_input = 0  # of the two-class problems that `as_binary` makes; each output of an input is one

    def __init__(
        self, outputs: ArrayLike, variance: ArrayLike | None = None, *, names: Sequence[str] | None = None,
        ids: ArrayLike | None = None, classes: ArrayLike | None = None, groups: ArrayLike | None = None,
        draws: ArrayLike | None = None, features: ArrayLike | None = None,
        feature_names: Sequence[str] | Array | None = None, fingerprints: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.outputs = _floats(outputs, "outputs")
        if self.outputs.ndim != 3:
            shape = self.outputs.shape
            raise ValueError(f"outputs must be (N, K, C); got shape {shape}. A single output needs a last axis of 1")
        n_inputs, n_views, n_outputs = self.outputs.shape
        if n_views == 0 or n_outputs == 0:
            raise ValueError(f"outputs must have at least one view and one output; got shape {self.outputs.shape}")
        self.variance = None if variance is None else _floats(variance, "variance")
        if self.variance is not None and self.variance.shape != self.outputs.shape:
            raise ValueError(f"variance must be shaped like outputs, {self.outputs.shape}; got {self.variance.shape}")
        self.generated_names = names is None
        self.names = tuple(f"view_{k}" for k in range(n_views)) if names is None else _names(names, n_views)
        self.ids = None if ids is None else keys_of(ids, n_inputs, "ids")
        self.classes = None if classes is None else keys_of(classes, n_outputs, "classes")
        if not same_table(ids, groups):
            groups = tables.by_id(groups, self.ids, "groups", "the predictions")
        self.groups = None if groups is None else keys_of(groups, n_inputs, "groups", distinct=False)
        self.draws = None if draws is None else _floats(draws, "draws")
        if self.draws is not None:
            shape = self.draws.shape
            if len(shape) != 4 or shape[1::2] != (n_views, n_outputs) or shape[0] > n_inputs:
                raise ValueError(f"draws must be (n, {n_views}, M, {n_outputs}) with n at most {n_inputs}; got {shape}")
        if hasattr(features := tables.as_table(features), "columns"):
            features, feature_names = _by_view(features, self.ids, self.names)
        self.features, self.feature_names = _features(features, feature_names, self.outputs.shape)
        known = fingerprints or {}
        self.fingerprints = {name: str(known[name]) for name in self.names if name in known}
        if not isinstance(self.outputs, np.memmap):  # a mapped file is read, and checked, where it is used
            self.check_finite()

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        n_inputs, n_views, n_outputs = self.outputs.shape
        names = printable(", ".join(self.names[:6])) + (", ..." if n_views > 6 else "")
        return f"ViewPredictions(N={n_inputs}, K={n_views}, C={n_outputs}: {names})"

    def check_finite(self) -> None:
        """Raise where a prediction is not finite or a variance is negative."""
        for start in range(0, len(self.outputs), _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            _check_rows(self.outputs[rows], start, "outputs", self.names, smallest=-np.inf)
            if self.variance is not None:
                _check_rows(self.variance[rows], start, "variance", self.names, smallest=0)

    def align(self, labels: LabelSets | ArrayLike) -> LabelSets:
        """Labels of these inputs, or an array or table of them, by id where both sides have ids, else by row."""
        labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
        if self.labels_an_input and labels.ids is None and labels.columns not in (None, 1, self.labels_an_input):
            raise ValueError(f"labels have {labels.columns} columns, but there are {self.labels_an_input} outputs")
        return labels.align(len(self), self.ids)

    def take(self, rows: Array | slice) -> Self:
        """Some of the inputs."""
        rows = rows if isinstance(rows, slice) else row_numbers(rows, len(self))  # a slice copies nothing
        parts = {name: getattr(self, name) for name in ("outputs", "variance", "ids", "groups", "features")}
        kept = {name: None if values is None else values[rows] for name, values in parts.items()}
        return self._part(**kept, draws=None)

    def select(self, names: Iterable[str]) -> Self:
        """Some of the views, in the order given; views that are selected by name have names from then on."""
        selection = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in selection if name not in self.names]
        if unknown or not selection:
            reason = f"views {shown(unknown)} are not among" if unknown else "names must be at least one of"
            raise ValueError(f"{reason} the predictions' views {list(self.names)}")
        if tuple(selection) == self.names:
            return self._part(generated_names=False) if self.generated_names else self
        columns = [self.names.index(name) for name in _names(selection, len(selection))]
        parts = {name: getattr(self, name) for name in ("outputs", "variance", "draws", "features")}
        kept = {
            name: None if values is None else np.take(np.asarray(values), columns, 1) for name, values in parts.items()
        }
        prints = {name: text for name, text in self.fingerprints.items() if name in selection}
        return self._part(**kept, names=tuple(selection), generated_names=False, fingerprints=prints)

    def group_numbers(self, rows: Array) -> Array | None:
        """Groups of some rows, numbered from 0; None where there are no groups."""
        return None if self.groups is None else np.unique(self.groups[rows], return_inverse=True)[1]

    def with_groups(self, groups: ArrayLike) -> Self:
        """The same predictions with other groups: (N,) integers or strings, or a Series by id."""
        values = tables.by_id(groups, self.ids, "groups", "the predictions")
        return self._part(groups=keys_of(values, len(self), "groups", distinct=False))

    def as_binary(self) -> Self:
        """Every output as a two-class problem of its own: (N C, K, 2), with the logits 0 and that of the output.

        Rows are pairs of an input and an output, those of an input side by side and in one group. Labels are
        :meth:`LabelSets.from_multilabel`; ``fit_policy(task="multilabel")`` does both.
        """
        size, n_views, n_outputs = self.outputs.shape

        def paired(values: Array | None) -> Array | None:
            if values is None:
                return None
            rows = np.moveaxis(values, 2, 1).reshape(size * n_outputs, n_views)
            return np.stack([np.zeros_like(rows), rows], axis=2)

        names = np.arange(n_outputs) if self.classes is None else self.classes
        own = np.arange(size) if self.ids is None else self.ids
        named = self.ids is not None or self.classes is not None
        groups = np.repeat(own if self.groups is None else self.groups, n_outputs)
        features = None if self.features is None else np.repeat(self.features, n_outputs, axis=0)
        return self._part(
            outputs=paired(self.outputs), variance=paired(self.variance), classes=None, groups=groups,
            ids=tables.pair_ids(own, names) if named else None, features=features, draws=None,
            labels_an_input=n_outputs,
        )  # fmt: skip

    def _part(self, **changes: Any) -> Self:
        """A copy with other rows or views; what was valid stays so, and only rows of mapped files are checked."""
        part = copy.copy(self)
        vars(part).update(changes)
        if isinstance(self.outputs, np.memmap) and not isinstance(part.outputs, np.memmap):
            part.check_finite()
        return part

    def concat(self, others: Self | Sequence[Self], *, axis: str = "inputs") -> Self:
        """Append the same views of more inputs, or with ``axis="views"`` more views of the same inputs."""
        parts = [self, *([others] if isinstance(others, ViewPredictions) else others)]
        if not all(isinstance(part, ViewPredictions) for part in parts):
            raise ValueError(f"others must be ViewPredictions, one or a list of them; got {shown(others)}")
        if axis not in ("inputs", "views"):
            raise ValueError(f"axis must be 'inputs' or 'views'; got {shown(axis)}")
        for name in ("variance", "groups"):
            if len({getattr(part, name) is None for part in parts}) > 1:
                raise ValueError(f"some parts have {name} and some not; give it to all of them or none")
        if any(not _same(part.classes, self.classes) for part in parts):
            raise ValueError("parts have different classes; predictions of different models cannot be joined")
        columns, sizes = [list(part.feature_names) for part in parts], [part.outputs.shape[2] for part in parts]
        for quantity, values in (("features", columns), ("numbers of outputs", sizes)):
            if any(value != values[0] for value in values):
                raise ValueError(f"parts have different {quantity}: {shown(values)}")
        ids, groups, names = self.ids, self.groups, list(self.names)
        if axis == "inputs":
            parts = [self, *(part.select(self.names) for part in parts[1:])]
            _check_same_views(parts)
            ids, groups = (_joined([getattr(part, key) for part in parts]) for key in ("ids", "groups"))
        else:
            for part in parts:
                if len(part) != len(self) or not _same(part.ids, ids) or not _same(part.groups, groups):
                    raise ValueError("parts are of different inputs; axis='views' joins views of the same in one order")
            names = [name for part in parts for name in part.names]
        outputs, variance, features = (
            _joined([getattr(part, key) for part in parts], axis=("inputs", "views").index(axis))
            for key in ("outputs", "variance", "features")
        )
        generated = self.generated_names if axis == "inputs" else all(part.generated_names for part in parts)
        prints = {name: text for part in reversed(parts) for name, text in part.fingerprints.items()}
        names_given = None if generated else names
        return self.like(outputs, variance, ids, groups, names=names_given, features=features, fingerprints=prints)

    def like(self, outputs: Any, variance: Array | None, ids: Array | None, groups: Array | None, **rest: Any) -> Self:
        """Predictions of other inputs by the same network, and of the same views unless `rest` names others."""
        kept = {name: getattr(self, name) for name in ("classes", "fingerprints")}
        options = {"names": None if self.generated_names else self.names, **kept, **rest}
        options["feature_names"] = None if options.get("features") is None else self.feature_names
        return type(self)(outputs, variance, ids=ids, groups=groups, **options)

    @classmethod
    def from_table(cls, frame: Any) -> ViewPredictions:
        """Read a long table of any dataframe library, or a dict of columns, with one row an instance and view.

        The columns are `instance` (or `id`), `view`, and `output`, `output_1`, ... or, for classes, `logit_<class>`;
        optionally `variance_...` with the same endings, `group`, and `feature_<name>`.
        """
        from vbtta.data.files import one_row_a_view

        frame = tables.as_table(frame)
        names = frame if isinstance(frame, Mapping) else getattr(frame, "columns", None)
        if names is None:
            raise ValueError(f"the table must be a dataframe or a dict of columns; got {type(frame).__name__}")
        key = tables.id_column(names, "the table")
        table = {"instance" if name == key else str(name): np.asarray(frame[name]) for name in names}
        return one_row_a_view(table, "the table")

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row an instance and view, as :meth:`from_table` reads it."""
        size, n_views, n_outputs = self.outputs.shape
        ends = range(n_outputs) if self.classes is None else self.classes
        stem = "output" if self.classes is None else "logit"
        columns: dict[str, Any] = {"instance": np.repeat(np.arange(size) if self.ids is None else self.ids, n_views)}
        columns["view"] = list(self.names) * size
        columns |= {f"{stem}_{end}": self.outputs[:, :, c].ravel() for c, end in enumerate(ends)}
        if self.variance is not None:
            columns |= {f"variance_{end}": self.variance[:, :, c].ravel() for c, end in enumerate(ends)}
        if self.groups is not None:
            columns["group"] = np.repeat(self.groups, n_views)
        if self.features is not None:
            columns |= {f"feature_{name}": self.features[:, :, f].ravel() for f, name in enumerate(self.feature_names)}
        return tables.frame_of(columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an `.npz` file of plain arrays that can be mapped, or a `.parquet` file, atomically."""
        from vbtta.data.files import write_predictions

        write_predictions(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = False) -> ViewPredictions:
        """Read what :meth:`save` or a cluster wrote (a folder of parquet files); never unpickles.

        With ``mmap=True`` outputs and variance of an `.npz` file stay on disk and are read where they are used.
        """
        from vbtta.data.files import read_predictions

        return read_predictions(path, mmap=mmap)


def _floats(values: ArrayLike, name: str) -> Array:
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array; every view needs a prediction for every input")
    try:
        array = values if isinstance(values, np.memmap) else to_array(values)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64, casting="same_kind")
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an (N, K, C) array of real numbers; got {type(values).__name__}") from None


def same_table(ids: Any, values: Any) -> bool:
    """Whether ids and other values are columns of one pandas table, whose rows belong together."""
    indices: list[Any] = [getattr(part, "index", None) for part in (ids, values)]
    return all(hasattr(index, "equals") for index in indices) and bool(indices[0].equals(indices[1]))


def _by_view(table: Any, ids: Array | None, names: tuple[str, ...]) -> tuple[Array, list[str]]:
    """Columns (N, K, F) of a long table with one row an instance and view, and their names."""
    if tables.id_column(table.columns, "features") is None and any(getattr(getattr(table, "index", None), "names", [])):
        table = table.reset_index()
    present, key = list(table.columns), tables.id_column(table.columns, "features")
    if key is None or "view" not in present:
        raise ValueError(f"features need the columns instance (or id) and view; the table has {shown(present)}")
    columns, keys = [name for name in present if name not in (key, "view")], np.asarray(table[key])
    if ids is None and (key != "instance" or keys.dtype.kind not in "iu"):
        raise ValueError(f"features name their inputs by {key!r} but the predictions have no ids; give ids=...")
    rows, unknown = tables.look_up(keys, np.arange(len(np.unique(keys))) if ids is None else ids)
    views, strange = tables.look_up(np.asarray(table["view"]).astype(str), np.array(names))
    kept = ~(unknown | strange)
    if len(np.unique(rows[kept] * len(names) + views[kept])) < kept.sum():
        raise ValueError("features have several rows of one instance and view; give one of each")
    shape = (int(rows.max()) + 1 if ids is None else len(ids), len(names))
    features = {str(name): np.asarray(table[name])[kept] for name in columns}
    return pivot(features, list(features), rows[kept], views[kept], shape, "features"), list(features)


def pivot(
    table: Mapping[str, Array], columns: Sequence[str], row: Array, view: Array, shape: tuple[int, int], where: Any
) -> Array:
    """Columns of a table with one row an instance and view, as (N, K, F); NaN where there is none."""
    values = np.full((*shape, len(columns)), np.nan)
    for place, name in enumerate(columns):
        values[row, view, place] = real_array(f"{where}: column {name!r}", table[name])
    return values


def _features(
    features: ArrayLike | None, names: Sequence[str] | Array | None, shape: tuple[int, ...]
) -> tuple[Array | None, tuple[str, ...]]:
    """Features (N, K, F) and their names."""
    if features is None:
        return None, ()
    values = _floats(features, "features")
    if values.ndim != 3 or values.shape[:2] != shape[:2]:
        raise ValueError(f"features must be ({shape[0]}, {shape[1]}, F), a row an input and view; got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("features must be finite, for every input and view; leave out the feature, or those inputs")
    generated = [f"feature_{place}" for place in range(values.shape[2])]
    return values, _names(generated if names is None else names, values.shape[2], "feature_names")


def _names(names: Sequence[str] | Array, size: int, argument: str = "names") -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"{argument} must be a list of {size} strings; got {shown(names)}")
    texts = tuple(str(name).rstrip("\x00") for name in names)  # which arrays do not keep
    if len(texts) != size:
        raise ValueError(f"{argument} must be {size} strings, one a view or feature; got {len(texts)}")
    repeated = sorted({name for name in texts if texts.count(name) > 1})
    if repeated:
        raise ValueError(f"{argument} must differ; {repeated} occur more than once")
    return texts


def keys_of(values: ArrayLike, length: int, name: str, *, distinct: bool = True) -> Array:
    """Identifiers as integers or strings, never objects (which could only be saved as pickles)."""
    keys = np.asarray(values)
    if keys.dtype == object and tables.is_absent(keys).any():
        raise ValueError(f"{name} must be integers or strings; it has gaps")
    if keys.dtype.kind in "OS":
        keys = keys.astype(str)
    if keys.dtype.kind not in "iubfU" or keys.shape != (length,):
        raise ValueError(f"{name} must be {length} integers or strings; got shape {keys.shape}, dtype {keys.dtype}")
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        raise ValueError(f"{name} must be integers or strings; got {keys[~np.isfinite(keys)][0]}")
    values, times = np.unique(keys, return_counts=True)
    if distinct and len(values) != length:
        raise ValueError(f"{name} must differ from each other; {str(values[times > 1][0])!r} occurs more than once")
    return keys


def _joined(arrays: Sequence[Array | None], axis: int = 0) -> Array | None:
    """Arrays one after the other; None where one is missing."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present, axis=axis) if len(present) == len(arrays) else None


def _check_rows(block: Array, start: int, name: str, names: tuple[str, ...], smallest: float) -> None:
    wrong = ~(np.isfinite(block) & (block >= smallest))
    if block.dtype == np.float64:  # numbers of single precision are smaller
        wrong |= np.abs(block) > _LARGEST
    if wrong.any():
        row, view, output = (int(index) for index in np.argwhere(wrong)[0])
        value, remedy = block[row, view, output], "Leave out that view or that input"
        demand = "finite" if smallest < 0 else "finite and not negative"
        if np.isfinite(value) and abs(float(value)) > _LARGEST:
            demand = f"smaller than {_LARGEST:g}, or squares overflow"
        if np.isneginf(value):
            remedy += ", or clip log probabilities, as np.maximum(outputs, -30)"
        where = f"input {start + row}, view {names[view]!r}, output {output}"
        raise ValueError(f"{name} must be {demand}; {where} is {value}. {remedy}")


def _check_same_views(parts: Sequence[ViewPredictions]) -> None:
    """Views of one name are one view, as far as their fingerprints tell."""
    for name in parts[0].names:
        texts = list(dict.fromkeys(part.fingerprints.get(name, "") for part in parts))
        for earlier, text in combinations(texts, 2):
            if (difference := conflict(earlier, text)) is not None:
                raise ValueError(f"view {name!r} of a part is not that of the parts before: it {difference}")


def _same(first: Array | None, second: Array | None) -> bool:
    return first is second if first is None or second is None else np.array_equal(first, second)


def conflict(known: str, other: str) -> str | None:
    """The difference between two fingerprints in words; None if they agree or one is unknown."""
    known_view, known_output = (*known.split("/"), "")[:2]
    other_view, other_output = (*other.split("/"), "")[:2]
    if known_output and other_output and known_output != other_output:
        return f"has {other_output!r} outputs instead of {known_output!r}"
    if known_view in ("", UNKNOWN) or other_view in ("", UNKNOWN) or known_view == other_view:
        return None
    return "has other parameters"


def draws_of(text: str) -> int | None:
    """Number of draws of a stochastic view's predictions, as in "3f2a/raw/16"; None if the fingerprint has none."""
    parts = text.split("/")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else None


def require_views(predictions: object) -> None:
    """Refuse arrays in place of ViewPredictions."""
    if not isinstance(predictions, ViewPredictions):
        raise TypeError(
            f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
        )


def row_hashes(outputs: Any) -> tuple[str, ...]:
    """Twelve hexadecimal digits for the outputs of every row, rounded to single precision."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(outputs, dtype="<f4")
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=6).hexdigest() for row in single)
