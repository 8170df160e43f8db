"""Predictions and labels at a sample of the positions of maps: segmentation and dense regression."""

from __future__ import annotations

__all__ = ["collect_dense"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import is_tensor, require, to_array, whole_number
from vbtta._support.tensors import Batch, Progress, batches_of
from vbtta.adapters.base import Output, as_predictor
from vbtta.augment.base import Augmentation, apply_view, check_invertible, invert_view, is_partial, part_of
from vbtta.augment.foreign import as_views
from vbtta.collect import Collector, check_options
from vbtta.data.labels import Array, LabelSets, by_id, class_positions
from vbtta.data.predictions import ViewPredictions


def collect_dense(
    predictor: Any, inputs: Any, views: Any, targets: Any, *,
    positions: int = 200, stratify: bool = False, ignore: float | Sequence[float] | None = None,
    raters: Sequence[Any] | None = None, draws: int = 1, batch_size: int = 8, output: Output = None, key: Any = None,
    seed: int = 0, progress: bool = False, ids: ArrayLike | None = None, classes: ArrayLike | None = None,
) -> tuple[ViewPredictions, LabelSets]:  # fmt: skip
    """Predict maps under every view, and keep them and the targets at random positions of every input.

    A position (pixel, voxel) is an instance of the result; the input it belongs to is its group. Only positions that
    are labelled and that every view sees are drawn. Only one batch of maps of one view is in memory at a time.

    Parameters
    ----------
    predictor : object
        What :func:`vbtta.adapters.as_predictor` takes. It returns maps (B, C, H, W) or (B, C, D, H, W): logits of C
        classes, or one value. Maps at a stride (H / 2 or H / 4, rounded up) are brought to the size of the inputs
        (bilinear).
    inputs : array, tensor, dict, list, DataLoader or iterator of batches
        (N, channels, H, W) or (N, channels, D, H, W), or dicts with such a part. A list holds single inputs
        (channels, H, W), which may differ in size; each is a batch of its own.
    views : list of views
        What :func:`vbtta.augment.as_views` takes, with inverses.
    targets : array, or list of arrays
        Maps of the inputs' size: (N, H, W), or (N, R, H, W) from R raters; a list where sizes or numbers of raters
        differ. Whole numbers are classes, floating-point numbers the values of a single output. NaN is no label.
    positions, stratify : int, bool
        Positions drawn per input, without repetition; and whether the classes of an input share them equally, as far as
        they have as many. The labels then have the inverse sampling rates as `instance_weights`.
    ignore : number or list of numbers, optional
        Values of the targets that mean "no label", such as 255.
    raters : sequence, optional
        Names of the R raters, or a list of names for every input. By default columns of raters are numbered where all
        inputs have as many, and anonymous otherwise.
    draws, batch_size, output, key, seed, progress, classes
        As in :func:`vbtta.collect_views`; the seed determines the positions, too.
    ids : (N,) array, optional
        Identifiers of the inputs: the groups of the result, whose own ids are ``"<input>:<position>"``, the position
        counted row by row. Row numbers by default.
    """
    check_options(draws, 0, None)
    positions, seed = whole_number("positions", positions, 1), whole_number("seed", seed, 0)
    view_list = as_views(views)
    check_invertible(view_list)
    adapted = as_predictor(predictor, output)
    collector = _MapCollector(adapted, view_list, draws, seed, key=key)
    truth = _Targets(targets, [] if ignore is None else np.atleast_1d(ignore).tolist(), raters, ids)
    names = np.arange(len(truth)) if ids is None else np.asarray(by_id(ids, None, "ids", "the inputs"))
    if names.shape != (len(truth),):
        raise ValueError(f"ids must be {len(truth)}, one a target; got shape {names.shape}")
    batches, n_inputs = batches_of(inputs, batch_size) if not isinstance(inputs, list) else (None, len(inputs))
    if batches is None:  # inputs of different sizes: batches of one
        batches = map(_alone, inputs)
    if n_inputs not in (None, len(truth)):
        raise ValueError(f"there are {n_inputs} inputs and {len(truth)} targets; every input needs its target")
    moments: list[Array] = []  # mean and variance, allocated once
    positions_drawn: list[_Drawn] = []
    start = filled = 0
    with Progress("inputs", len(truth), progress) as bar, adapted.ready():
        for raw in batches:
            batch = adapted.prepare(raw)
            images = part_of(batch, key)
            shape = tuple(getattr(images, "shape", ()))
            if len(shape) not in (4, 5):
                raise ValueError(f"inputs must be (N, channels, H, W) or (N, channels, D, H, W); a batch is {shape}")
            n_rows = shape[0]
            if start + n_rows > len(truth):
                raise ValueError(f"there are more inputs than the {len(truth)} targets; every input needs its target")
            visible = collector.visible(images, start)
            options = (positions, stratify, seed, shape[2:])
            drawn = [_draw(truth, start + row, mask, *options) for row, mask in enumerate(visible)]
            sizes = [len(chosen.position) for chosen in drawn]
            places = np.concatenate([chosen.position for chosen in drawn])
            collector.places = np.repeat(np.arange(n_rows), sizes), places
            if len(places):
                mean, variance, _ = collector.collect(batch, start)
                for row, chosen in enumerate(drawn):
                    _check_labels(chosen, truth.name(start + row), mean.shape[2], classes, stratify)
                parts = [mean] if variance is None else [mean, variance]
                if not moments:
                    moments = [np.empty((len(truth) * positions, *part.shape[1:]), part.dtype) for part in parts]
                for array, part in zip(moments, parts, strict=True):
                    array[filled : filled + len(part)] = part
                filled += len(mean)
            positions_drawn += drawn
            start += n_rows
            bar.advance(n_rows)
    if start != len(truth):
        raise ValueError(f"there are {start} inputs and {len(truth)} targets; every input needs its target")
    identified = raters is not None or (len(truth.n_raters) == 1 and truth.n_raters != {1})  # by name or column
    people = truth.people if identified else []
    moments = [array[:filled] for array in moments]
    return _joined(moments, positions_drawn, names, people, **collector.description(classes))


def _alone(entry: Any) -> Batch:
    """A batch of one input."""
    if isinstance(entry, Mapping):
        return {key: _alone(part) for key, part in entry.items()}
    return entry[None] if is_tensor(entry) else np.asarray(entry)[None]


@dataclass
class _MapCollector(Collector):
    """Predicts maps, undoes the views, and keeps the outputs at `places`: inputs of the batch and flat positions."""

    places: tuple[Array, Array] = field(default=(np.zeros(0, np.intp), np.zeros(0, np.intp)))
    _common: dict[tuple[int, ...], Array] = field(default_factory=dict)

    def outputs_of(self, view: Augmentation, batch: Batch, augmented: Batch, rows: Array, draw: int) -> Array:
        """Outputs (n, C) at the places."""
        maps: Any = self.predict(batch, augmented)
        images, changed = part_of(batch, self.key), part_of(augmented, self.key)
        if maps.ndim != images.ndim:
            raise ValueError(f"the model returned shape {maps.shape}, no maps; use collect_views for rows (B, C)")
        maps = require("torch", "torch").from_numpy(maps) if is_tensor(images) else maps
        restored = to_array(invert_view(view, maps, changed, images, self.streams(view, draw, rows))[0])
        row, position = self.places
        return np.asarray(restored.reshape(*restored.shape[:2], -1)[row, :, position])

    def check(self, mean: Array, rows: Array, name: str) -> None:
        """Refuse outputs that are not finite; an error names the input."""
        super().check(mean, rows[self.places[0]], name)

    def visible(self, batch: Batch, first: int) -> Array:
        """Whether all views see a position, for every input: (B, P)."""
        size, rows = tuple(batch.shape[2:]), np.arange(first, first + len(batch))
        partial = [view for view in self.views if is_partial(view)]
        if size not in self._common:
            fixed = [self._seen(view, batch[:1], rows[:1], 0) for view in partial if not view.stochastic]
            self._common = {size: np.logical_and.reduce([np.ones((1, *size), dtype=bool), *fixed])}
        random = [self._seen(view, batch, rows, m) for view in partial if view.stochastic for m in range(self.draws)]
        mask = np.logical_and.reduce([np.broadcast_to(self._common[size], (len(batch), *size)), *random])
        if not mask.any(axis=tuple(range(1, mask.ndim))).all():
            names = [view.name for view in partial]
            raise ValueError(f"no position of inputs {size} is seen by all views; leave out some of {names}")
        return np.asarray(mask.reshape(len(batch), -1))

    def _seen(self, view: Augmentation, batch: Batch, rows: Array, draw: int) -> Array:
        """Which positions a view sees: (1 or B, H, W)."""
        augmented = apply_view(view, batch, self.streams(view, draw, rows))[:, :1] * 1.0
        seen = view.seen(augmented, self.streams(view, draw, rows))  # type: ignore[attr-defined]
        return np.ones((1, *batch.shape[2:]), dtype=bool) if seen is None else to_array(seen)[:, 0]


@dataclass
class _Targets:
    """Target maps, one entry an input."""

    maps: Any
    ignore: list[float]
    raters: Sequence[Any] | None
    ids: ArrayLike | None
    people: list[str] = field(default_factory=list)  # names of all raters met
    n_raters: set[int] = field(default_factory=set)  # of the inputs met

    def __post_init__(self) -> None:
        if not hasattr(self.maps, "__len__") or isinstance(self.maps, str | dict) or len(self.maps) == 0:
            raise ValueError(f"targets must be maps (N, H, W) or (N, R, H, W), or a list; got {type(self.maps)}")
        raters: Any = self.raters
        self.by_input = bool(raters) and isinstance(raters[0], list | tuple | np.ndarray)
        if self.by_input and len(raters or ()) != len(self.maps):
            raise ValueError(f"raters must be names, or a list for each of {len(self.maps)} inputs; got {len(raters)}")

    def __len__(self) -> int:
        return len(self.maps)

    def name(self, row: int) -> str:
        """An input's targets in errors."""
        return f"targets[{row}]" if self.ids is None else f"targets[{row}] ({np.asarray(self.ids)[row]})"

    def of(self, row: int, size: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """Values (R, P) of an input's raters, a mask of the labelled, and the raters' positions (R,) in `people`."""
        values, name = to_array(self.maps[row]), self.name(row)
        if values.shape[-len(size) :] != size or values.ndim not in (len(size), len(size) + 1):
            raise ValueError(
                f"{name} has shape {values.shape} for inputs {size}, channels first; only raters may be an axis more"
            )
        if values.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be numbers; got {values.dtype}")
        values = values.reshape(-1, int(np.prod(size)))
        raters = self.raters[row] if self.raters is not None and self.by_input else self.raters
        if raters is not None and len(raters) != len(values):
            raise ValueError(f"raters names {len(raters)} raters for {name}, which has {len(values)}")
        if raters is None and len(values) > 1 and np.isin(values, (0, 1)).all() and (values.sum(axis=0) == 1).all():
            raise ValueError(f"{name} is one-hot: give class numbers, targets.argmax(1), or raters=[...] for raters")
        self.n_raters.add(len(values))
        names = [f"rater_{r}" for r in range(len(values))] if raters is None else [str(name) for name in raters]
        self.people += [name for name in names if name not in self.people]
        labelled = np.ones(values.shape, dtype=bool) if values.dtype.kind != "f" else np.isfinite(values)
        rater = np.array([self.people.index(name) for name in names], dtype=np.int32)
        return values, labelled & ~np.isin(values, self.ignore), rater


class _Drawn(NamedTuple):
    """Positions of one input: n of them, with the labels (J,) there."""

    position: Array
    weight: Array | None
    instance: Array  # (J,) among the n
    value: Array
    rater: Array
    kinds: Array  # distinct labels of the whole input


def _draw(
    truth: _Targets, row: int, visible: Array, count: int, stratify: bool, seed: int, size: tuple[int, ...]
) -> _Drawn:
    """Draw positions of one input, and take the labels there."""
    values, labelled, people = truth.of(row, size)
    valid = np.flatnonzero(labelled.any(axis=0) & visible)
    random = np.random.default_rng([seed, row])
    weight: Array | None = None
    if not stratify:
        position = np.sort(random.choice(valid, min(count, len(valid)), replace=False))
    else:
        majority, distinct = values[0, valid], np.unique(values[labelled])
        if len(values) > 1 and len(distinct):  # the value that most raters gave, the smallest of several
            votes = [((values[:, valid] == value) & labelled[:, valid]).sum(axis=0) for value in distinct]
            majority = distinct[np.argmax(votes, axis=0)]
        kinds, kind = np.unique(majority, return_inverse=True)
        sizes, quotas, left = np.bincount(kind, minlength=len(kinds)), np.zeros(len(kinds), dtype=np.intp), count
        for order, member in enumerate(np.argsort(sizes, kind="stable")):  # large classes take unused quotas
            quotas[member] = min(sizes[member], left // (len(kinds) - order))
            left -= quotas[member]
        drawn = [random.choice(valid[kind == k], n, replace=False) for k, n in enumerate(quotas)]
        position = np.concatenate([valid[:0], *drawn])
        weight = np.repeat(sizes / np.maximum(quotas, 1), quotas)
        weight *= len(weight) / max(weight.sum(), 1.0)
    rater, instance = np.nonzero(labelled[:, position])
    value = values[rater, position[instance]]
    kinds = np.unique(values[labelled])
    return _Drawn(position.astype(np.int32), weight, instance.astype(np.int32), value, people[rater], kinds)


def _joined(
    moments: list[Array], drawn: list[_Drawn], inputs: Array, people: list[str], **rest: Any
) -> tuple[ViewPredictions, LabelSets]:
    """Predictions and labels of all places; labels are anonymous without people."""
    if not moments:
        raise ValueError("no position of the targets is labelled; check ignore and the values of the targets")
    sizes = [len(part.position) for part in drawn]
    starts = np.cumsum([0, *sizes[:-1]])
    labels = LabelSets.from_table(
        np.concatenate([start + part.instance for start, part in zip(starts, drawn, strict=True)]),
        np.concatenate([part.value for part in drawn]),
        np.array(people)[np.concatenate([part.rater for part in drawn])] if people else None,
        n_instances=sum(sizes),
    )
    weights = [part.weight for part in drawn if part.weight is not None]
    ids = np.array([f"{name}:{place}" for name, part in zip(inputs, drawn, strict=True) for place in part.position])
    predictions = ViewPredictions(*moments, ids=ids, groups=np.repeat(inputs, sizes), **rest)
    return predictions, labels.with_weights(np.concatenate(weights)) if weights else labels


def _check_labels(drawn: _Drawn, name: str, n_outputs: int, classes: ArrayLike | None, stratify: bool) -> None:
    """Refuse labels that do not fit the outputs."""
    if n_outputs == 1:
        if drawn.value.dtype.kind != "f":
            remedy = "targets.astype(float) for a regression, or two logits, torch.cat([0 * maps, maps], 1)"
            raise ValueError(f"the model returns one map and the targets are whole numbers: give {remedy}, for classes")
        if stratify:
            raise ValueError("stratify=True draws by class; the targets of a single output are no classes")
        return
    if classes is None and (drawn.kinds != np.rint(drawn.kinds)).any():
        raise ValueError(f"{name} are not class numbers; a regression takes one map, output=lambda maps: maps[:, :1]")
    try:
        class_positions(drawn.kinds, n_outputs, None if classes is None else np.asarray(classes))
    except ValueError as error:
        raise ValueError(f"{name}: {error}; values that are no classes are left out by ignore=") from None
