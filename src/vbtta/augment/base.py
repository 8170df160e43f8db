"""The view protocol: a name, whether the view is stochastic, and a function of a batch."""

__all__ = ["Augmentation", "Chain", "apply_view", "check_invertible", "invert_view", "reorder_classes"]

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Protocol, dataclass_transform, runtime_checkable

import numpy as np

from vbtta._support.checks import is_tensor
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, RowList, as_batch, copy_of, is_floating, resized, to_tensor
from vbtta.data.labels import Array


@runtime_checkable
class Augmentation(Protocol):
    """One view of the inputs: N rows in, N rows out.

    Its name in policies and reports is unique in a set, and `identity` for the unchanged input. A stochastic view draws
    random numbers from `rng`, which holds one stream per row.

    For maps (segmentation) a view also has ``inverse(outputs, rng=None)``: outputs (N, C, H, W) of the augmented
    inputs in the geometry of the inputs. If it does not see all positions it has ``seen(outputs, rng=None)`` too: a
    mask (1 or N, 1, H, W) of those it sees, or None for all.
    """

    @property
    def name(self) -> str:
        """Unique in a set of views."""

    @property
    def stochastic(self) -> bool:
        """Whether it draws random numbers."""

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch: ...  # noqa: D102


@dataclass(frozen=True)
class Number:
    """Annotation of a numeric parameter: its range, and its form in the view's name."""

    above: float = -math.inf
    below: float = math.inf
    signed: bool = False

    def check(self, parameter: str, value: Any) -> None:
        """Refuse a value that is not a finite number within the range."""
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        largest = sys.float_info.max  # isfinite fails for larger integers
        if not is_number or not -largest <= value <= largest or not self.above < value < self.below:
            limits = {f" above {self.above:g}": self.above, f" below {self.below:g}": self.below}
            words = " and".join(words for words, limit in limits.items() if math.isfinite(limit))
            raise ValueError(f"{parameter} must be a finite number{words}; got {value!r}.")

    def text(self, value: float) -> str:
        """The shortest text that gives the number back, 15 rather than 15.0."""
        text = repr(float(value)).removesuffix(".0")
        return f"+{text}" if self.signed and value > 0 else text


@dataclass(frozen=True)
class Choice:
    """Annotation of a parameter that is one of a few words."""

    options: tuple[str, ...]

    def check(self, parameter: str, value: Any) -> None:
        """Refuse other values."""
        if value not in self.options:
            raise ValueError(f"{parameter} must be one of {', '.join(self.options)}; got {value!r}.")

    text = str


MIN_SEEN_SHARE = 1 - 1e-3  # of a position's value, from inside the augmented input
Symmetry = tuple[bool, frozenset[int]]  # whether the last two axes are exchanged, and the axes mirrored then
Positive = Annotated[float, Number(above=0.0)]
Signed = Annotated[float, Number(signed=True)]
Probability = Annotated[float, Number(above=0.0, below=1.0)]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class BuiltIn:
    """Base of the built-in views; subclasses become frozen dataclasses, whose fields are stored in files of views.

    A subclass gives its `label` and whether it is `stochastic` as class arguments, and works in `__call__`. Fields
    annotated with `Number` or `Choice` are checked, and shown in the name if they differ from their default:
    `label(value,value)`. `_check` checks other fields. Views that move positions undo it in `_undo`, with zeros where
    they see nothing; `partial` says whether there are such positions, `invertible` whether the view can be undone.
    `swap_classes` are pairs that the view turns into each other, as a mirror does left and right.
    """

    stochastic: ClassVar[bool] = False
    invertible: ClassVar[bool] = True
    partial: ClassVar[bool] = False
    label: ClassVar[str] = ""
    of_texts: ClassVar[bool] = False
    value_range: ClassVar[tuple[float, float] | None] = None  # that inputs are clipped to
    name: str = field(default="", kw_only=True)
    swap_classes: Sequence[Sequence[int]] | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, label: str = "", stochastic: bool = False) -> None:
        cls.label, cls.stochastic = label or cls.label, stochastic or cls.stochastic
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"{type(self).__name__}: name must be a string; got {self.name!r}.")
        for item, rule in self._rules():
            rule.check(f"{type(self).__name__}: {item.name}", getattr(self, item.name))
        self._check()
        if self.swap_classes is not None:
            self._store(swap_classes=_class_pairs(type(self).__name__, self.swap_classes))
        if not self.name:
            self._store(name=self.full_name())

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        raise NotImplementedError

    def full_name(self) -> str:
        """The name made from label and parameters, with the exchanged classes."""
        pairs = (",".join(map(str, pair)) for pair in self.swap_classes or ())
        return self._default_name() + "".join(f"/swap({pair})" for pair in pairs)

    def inverse(self, outputs: Batch, rng: RowStreams | None = None) -> Batch:
        """Outputs (N, C, H, W) or (N, C, D, H, W) for the augmented inputs, in the geometry of the inputs.

        Positions that the view does not see are zero; classes of `swap_classes` are exchanged.
        """
        check_invertible([self])
        return _exchange(self, self._undo(outputs, rng))

    def seen(self, outputs: Batch, rng: RowStreams | None = None) -> Batch | None:
        """Mask (1 or N, 1, H, W) of the positions of the inputs that the view sees; None for all.

        `outputs` are those of the augmented inputs; only their shape, type and device matter.
        """
        if not self.partial:
            return None
        ones = ones_like(outputs if self.stochastic else outputs[:1])
        inputs = ones_like(self._undo(ones, copy(rng)))
        return self._undo(self._cover(inputs, copy(rng)), rng) >= MIN_SEEN_SHARE

    def inverse_points(self, points: Batch, size: Sequence[int]) -> Batch:
        """Points (N, P, 2) of the augmented image as (x, y) in pixels, back in the image of size (H, W).

        Whole numbers are centres of pixels. Points of `swap_classes`, as a left and a right hand, are exchanged.
        """
        check_invertible([self])
        return _exchange(self, move_points(points, self._affine(*size)))

    def restore_rows(self, outputs: Batch) -> Batch:
        """Outputs (N, C) for the augmented inputs as outputs for the inputs."""
        return _exchange(self, outputs)

    def _default_name(self) -> str:
        """The name made from label and parameters."""
        values = ((getattr(self, item.name), item.default, rule) for item, rule in self._rules())
        texts = [rule.text(value) for value, default, rule in values if value != default]
        return f"{self.label}({','.join(texts)})" if texts else self.label

    def _affine(self, height: int, width: int) -> Array:
        """Matrix (3, 3) from (x, y, 1) in the augmented image to the image of this size."""
        return np.eye(3)

    def _size_after(self, height: int, width: int) -> tuple[int, int]:
        """Size of the augmented image."""
        return height, width

    def _symmetry(self, n_axes: int) -> Symmetry | None:
        """What a flip or turn does to a batch, by axes counted from the last, -1; None for other views."""
        return None

    def _undo(self, outputs: Batch, rng: RowStreams | None) -> Batch:
        """Outputs back in the geometry of the inputs, zero where nothing is seen."""
        return outputs

    def _cover(self, mask: Batch, rng: RowStreams | None) -> Batch:
        """How much of an augmented position's value is no padding, given that of the positions of the inputs."""
        return mask

    def _check(self) -> None:
        """Refuse invalid fields, and bring the others to their stored form."""

    def _store(self, **values: Any) -> None:
        """Set fields of the frozen instance, during construction only."""
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def _rules(self) -> Iterator[tuple[Field[Any], Number | Choice]]:
        """Annotated fields with their annotations."""
        return ((item, rule) for item in fields(self) for rule in getattr(item.type, "__metadata__", ()))


class Chain(BuiltIn):
    """Several views applied one after the other.

    Stochastic ones take their numbers from the same streams in turn.
    """

    views: tuple[Augmentation, ...]

    def _check(self) -> None:
        views: Any = self.views
        if isinstance(views, str) or not isinstance(views, Iterable):
            raise ValueError(f"Chain: views must be a list of views; got {views!r}.")
        self._store(views=tuple(views))
        if not self.views:
            raise ValueError("Chain needs at least one view; Identity() leaves the batch as it is.")
        for view in self.views:
            if isinstance(view, type) or not isinstance(view, Augmentation):
                raise ValueError(f"Chain: {view!r} is not a view; make one of a function with as_view(function).")
        draws, partial = any(view.stochastic for view in self.views), any(map(is_partial, self.views))
        self._store(stochastic=draws, partial=partial, invertible=not any(map(_lacks_inverse, self.views)))
        self._store(of_texts=any(getattr(view, "of_texts", False) for view in self.views))
        self._store(value_range=next(filter(None, (getattr(view, "value_range", None) for view in self.views)), None))

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Apply the views in order, flips and turns all at once."""
        if is_tensor(batch) and batch.ndim in (4, 5) and (symmetry := self._symmetry(batch.ndim)):
            return turn_and_mirror(batch, symmetry)
        for view in self.views:
            batch = view(batch, rng)
        return batch

    def _symmetry(self, n_axes: int) -> Symmetry | None:
        turned, mirrored = False, frozenset[int]()
        for view in self.views:
            symmetry = view._symmetry(n_axes) if isinstance(view, BuiltIn) else None
            if symmetry is None:
                return None
            turned, mirrored = turned ^ symmetry[0], _exchanged(mirrored, symmetry[0]) ^ symmetry[1]
        return turned, mirrored

    def _default_name(self) -> str:
        return "+".join(view.name for view in self.views)

    def _undo(self, outputs: Batch, rng: RowStreams | None) -> Batch:
        """Undo the last view first; exchanges of classes are done at the end, together."""
        if is_tensor(outputs) and (symmetry := self._symmetry(outputs.ndim)):
            return turn_and_mirror(outputs, symmetry, undo=True)
        drawing = [view for view in self.views if view.stochastic]
        if len(drawing) > 1 and not all(isinstance(view, BuiltIn) for view in drawing):  # the streams are shared
            raise ValueError(f"view {self.name} chains several views that draw, and cannot be undone; leave it out.")
        for view in reversed(self.views):
            undo: Any = view._undo if isinstance(view, BuiltIn) else getattr(view, "inverse", None)
            outputs = undo(outputs, rng)
        return outputs

    def _cover(self, mask: Batch, rng: RowStreams | None) -> Batch:
        """Other libraries' views move the mask as they move images, unless their inverse changes nothing."""
        for view in self.views:
            if isinstance(view, BuiltIn):
                mask = view._cover(mask, rng)
                continue
            undone = view.inverse(mask, copy(rng))  # type: ignore[attr-defined]
            if undone.shape != mask.shape or not (undone == mask).all():
                mask = view(mask, copy(rng))
        return mask

    def _affine(self, height: int, width: int) -> Array:
        matrix, size = np.eye(3), (height, width)
        for view in self.views:
            if not isinstance(view, BuiltIn):
                raise ValueError(f"view {view.name} is not built in and cannot move points back; leave it out.")
            matrix, size = matrix @ view._affine(*size), view._size_after(*size)
        return matrix

    def _size_after(self, height: int, width: int) -> tuple[int, int]:
        for view in self.views:
            height, width = view._size_after(height, width)  # type: ignore[attr-defined]
        return height, width


def augment(view: Augmentation, batch: Batch, rng: RowStreams | None = None, key: Any = None) -> Batch:
    """Apply a view without checks; one that is not built in may work in place and gets a copy."""
    if isinstance(batch, Mapping):
        key = _only_part(batch, texts=getattr(view, "of_texts", False)) if key is None and _is_built_in(view) else key
        if key is not None:
            return {**batch, key: augment(view, part_of(batch, key), rng)}
    if hasattr(batch, "columns") and (key is not None or _is_built_in(view)):
        return _on_columns(view, batch, rng, key)
    result = view(batch if _is_built_in(view) else copy_of(batch), rng)
    has_rows = isinstance(batch, RowList) or (hasattr(batch, "iloc") and batch.ndim == 1)
    return RowList(result) if has_rows and type(result) in (list, tuple) else as_batch(result)


def apply_view(view: Augmentation, batch: Batch, rng: RowStreams | None = None, key: Any = None) -> Batch:
    """Apply a view; an error if the number of rows changed, or NaN or infinity appeared where the batch had none.

    Parameters
    ----------
    view, rng : Augmentation, RowStreams
        The view, which gets a copy of the batch if it is not built in; streams of a stochastic view, one per row.
    batch : array, tensor, table, list of rows, or a dict, tuple or list of such
        N rows. Built-in views change the floating-point columns of a table.
    key : optional
        The part of a dict, or the column of a table, that the view works on. By default all of it, and for built-in
        views the only part of floating-point numbers, or for views of texts the only one of texts.
    """
    try:
        result = augment(view, batch, rng, key)
    except (AttributeError, TypeError) as error:
        part = part_of(batch, key) if key is not None else batch
        if not isinstance(part, (Mapping | tuple | list) if isinstance(view, BuiltIn) else Mapping):
            raise
        remedy = "apply it to a part by key=" if isinstance(part, Mapping) else "give its parts as a dict, and key="
        kind = f"dict of {', '.join(map(repr, part))}" if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, RowList):
            kind, remedy = f"list of {type(part[0]).__name__}", "make one array of it, or use as_view(f) of such lists"
        raise TypeError(f"view {view.name} does not take a {kind} ({error}): {remedy}.") from error
    n_rows = {len(leaf) for leaf in _leaves(batch)}
    shapes = {getattr(leaf, "shape", ())[1:] for leaf in _leaves(batch)} - {()}  # of the rows
    for leaf in _leaves(result):
        if isinstance(leaf, str) or not hasattr(leaf, "__len__"):
            raise ValueError(f"view {view.name} returned a {type(leaf).__name__}; return an array, or a list of texts.")
        if len(leaf) not in n_rows:
            raise ValueError(f"view {view.name} turned a batch of {max(n_rows)} rows into {len(leaf)}; keep them all.")
        if (row := tuple(getattr(leaf, "shape", ())[1:])) not in shapes and row[1:] in shapes:
            raise ValueError(f"view {view.name} turned rows {row[1:]} into {row}; return one row for each.")
    if not _is_finite(result) and _is_finite(batch):  # NaN of the inputs themselves is left to the predictor
        raise ValueError(f"view {view.name} returned NaN or infinity for a finite batch; check its parameters.")
    return result


def check_invertible(views: Iterable[Augmentation]) -> None:
    """Refuse views without an inverse."""
    for view in views:
        if _lacks_inverse(view):
            remedy = "leave it out, or give it one by as_view(function, inverse=function)"
            raise ValueError(f"view {view.name} has no inverse, which maps need: {remedy}.")


def invert_view(
    view: Augmentation, outputs: Batch, augmented: Batch, batch: Batch, rng: RowStreams | None = None
) -> tuple[Batch, Batch | None]:
    """Outputs (N, C, H, W) for an augmented batch in the geometry of the batch, and the mask of positions seen.

    Outputs at a stride of the augmented inputs are brought to their resolution first (bilinear); where the stride does
    not divide a size, the last output reaches beyond the inputs and is cut.

    Parameters
    ----------
    outputs, augmented, batch : arrays or tensors, shape (N, C, H, W) or (N, C, D, H, W)
        The outputs, the inputs under the view, and the inputs.
    rng : RowStreams, optional
        Streams like those that a stochastic view was applied with, from their beginning.
    """
    check_invertible([view])
    outputs = _at_size(outputs, tuple(augmented.shape[2:]))
    again = copy(rng)  # the inverse and the mask draw the same numbers
    result = view.inverse(outputs, rng)  # type: ignore[attr-defined]
    sizes = tuple(result.shape[2:]), tuple(batch.shape[2:])
    if sizes[0] != sizes[1]:
        raise ValueError(f"the inverse of view {view.name} returned maps {sizes[0]} for inputs {sizes[1]}.")
    return result, view.seen(outputs, again) if hasattr(view, "seen") else None


def reorder_classes(view: Augmentation, outputs: Batch) -> Batch:
    """Outputs (N, C) with the classes exchanged, or the points moved back, that a view or a part of a chain moves."""
    return view.restore_rows(outputs) if isinstance(view, BuiltIn) else outputs


def move_points(points: Batch, matrix: Array) -> Batch:
    """Points (N, P, 2) under an affine map (3, 3) of (x, y, 1)."""
    linear, offset = matrix[:2, :2].T, matrix[:2, 2]
    if is_tensor(points):
        linear, offset = points.new_tensor(linear), points.new_tensor(offset)
    return points @ linear + offset


def turn_and_mirror(images: Any, symmetry: Symmetry, *, undo: bool = False) -> Any:
    """Images, a tensor, under a symmetry or its inverse; moved ones do not share the memory of the given."""
    turned, mirrored = symmetry
    axes = _exchanged(mirrored, turned) if undo else mirrored
    images = images.transpose(-1, -2) if turned else images
    return images.flip(tuple(axes)) if turned or axes else images


def _exchanged(axes: frozenset[int], turned: bool) -> frozenset[int]:
    """Mirrored axes, after a turn instead of before it."""
    return frozenset({-1: -2, -2: -1}.get(axis, axis) for axis in axes) if turned else axes


def check_streams(view: Augmentation, batch: Batch, rng: RowStreams | None) -> RowStreams:
    """Return `rng` if it has one stream per row of the batch."""
    if rng is None:
        raise ValueError(f"view {view.name} draws: call it with rng=RowStreams(seed, view.name, draw, rows).")
    if isinstance(batch, tuple):
        raise TypeError(f"it has {len(batch)} parts")
    if len(rng) != len(batch):
        raise ValueError(f"view {view.name}: rng has {len(rng)} rows and the batch {len(batch)}; they must agree.")
    return rng


def check_floating(view: Augmentation, batch: Batch) -> None:
    """Refuse whole numbers, which would be rounded silently."""
    if isinstance(batch, RowList) or not is_floating(batch):
        remedy = "Convert the inputs first (images: divide by 255)"
        raise TypeError(f"view {view.name} needs floating-point inputs; got {batch.dtype}. {remedy}.")


def check_images(view: Augmentation, batch: Batch, *, volumes: bool = False) -> None:
    """Refuse batches that are not images (N, C, H, W), nor volumes (N, C, D, H, W) where those are allowed."""
    if batch.ndim != 4 and not (volumes and batch.ndim == 5):
        kinds = "images (N, C, H, W) or volumes (N, C, D, H, W)" if volumes else "images (N, C, H, W)"
        raise ValueError(f"view {view.name} takes {kinds}; got shape {tuple(batch.shape)}.")
    if batch.ndim == 4 and batch.shape[1] > 4 and batch.shape[-1] in (1, 3, 4) and batch.shape[2] > 4:
        problem = f"{tuple(batch.shape)} has its colours last"
        raise ValueError(f"view {view.name} takes images (N, C, H, W); {problem}: give np.moveaxis(images, -1, 1).")


def is_partial(view: Augmentation) -> bool:
    """Whether a view may miss positions."""
    return bool(getattr(view, "partial", hasattr(view, "seen")))


def ones_like(outputs: Batch) -> Batch:
    """Maps (N, 1, ...) of ones, in the type and on the device of outputs (N, C, ...)."""
    first = outputs[:, :1]
    return first.new_ones(first.shape) if is_tensor(first) else np.ones_like(first)


def _lacks_inverse(view: Augmentation) -> bool:
    return not view.invertible if isinstance(view, BuiltIn) else getattr(view, "inverse", None) is None


def _class_pairs(kind: str, pairs: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of classes, each class at most once."""
    try:
        checked = tuple((int(first), int(second)) for first, second in pairs)
    except (TypeError, ValueError):
        checked = ()
    classes = [entry for pair in checked for entry in pair]
    if not checked or len(set(classes)) < len(classes) or min(classes) < 0:
        raise ValueError(f"{kind}: swap_classes must be pairs of different classes, as ((1, 2),); got {pairs!r}.")
    return checked


def _exchange(view: Augmentation, outputs: Batch) -> Batch:
    """Outputs (N, C, ...) with classes exchanged, those of a chain's last view first."""
    for part in reversed(view.views) if isinstance(view, Chain) else ():
        outputs = _exchange(part, outputs)
    pairs, order = getattr(view, "swap_classes", None) or (), list(range(outputs.shape[1]))
    for pair in pairs:
        if max(pair) >= len(order):
            raise ValueError(f"view {view.name}: swap_classes names class {max(pair)}; there are {len(order)} outputs.")
        order[pair[0]], order[pair[1]] = pair[1], pair[0]
    return outputs[:, order] if pairs else outputs


def _at_size(outputs: Batch, size: tuple[int, ...]) -> Batch:
    """Maps (N, C, ...) at the resolution of the inputs: at an integer stride, or a power of two that is rounded up."""
    own = tuple(outputs.shape[2:])
    if own == size:
        return outputs
    powers = (2, 4, 8, 16, 32)
    stride = next((n for n in powers if own == tuple(-(-length // n) for length in size)), 0)
    if not stride and not any(own == tuple(length // n for length in size) for n in powers):  # not rounded down
        factor = size[0] // max(own[0], 1)
        stride = factor if tuple(factor * length for length in own) == size else 0
    if not stride:
        remedy = "return their size, or it at a stride of 2, 4, ..., rounded up: pad the inputs to a multiple of that"
        raise ValueError(f"the model returned maps {own} for inputs {size}; it must {remedy}.")
    maps = outputs if is_tensor(outputs) else to_tensor(outputs)
    maps = resized(maps, tuple(stride * length for length in own))[(..., *map(slice, size))]
    return maps if is_tensor(outputs) else maps.numpy()


def _is_built_in(view: Augmentation) -> bool:
    return all(map(_is_built_in, view.views)) if isinstance(view, Chain) else isinstance(view, BuiltIn)


def part_of(batch: Batch, key: Any = None) -> Any:
    """The part that views work on of a dict, by its key or as the only one that they can, or a column of a table."""
    if not isinstance(batch, Mapping) and (key is None or not hasattr(batch, "columns")):
        return batch
    key = _only_part(batch) if key is None else key
    parts = list(batch if isinstance(batch, Mapping) else batch.columns)
    if key not in parts:
        raise ValueError(f"key={key!r} is not among the parts of the batch: {', '.join(map(repr, parts))}.")
    return batch[key] if isinstance(batch, Mapping) else as_batch(np.asarray(batch[key]))


def _only_part(batch: Mapping[Any, Any], *, texts: bool = False) -> Any:
    """The key of the only part of floating-point numbers, or of texts; None if there are several."""
    arrays = [key for key, part in batch.items() if hasattr(part, "shape") and is_floating(part)]
    keys = [key for key, part in batch.items() if isinstance(part, RowList)] if texts else arrays
    return keys[0] if len(keys) == 1 else None


def _on_columns(view: Augmentation, table: Any, rng: RowStreams | None, key: Any) -> Any:
    """A table with a column, or those of floats, under a view; the identity leaves any table as it is."""
    if view.name == "identity":
        return table
    kinds = (getattr(kind, "kind", str(kind)[:5]) for kind in table.dtypes)  # of pandas a letter, of polars a name
    floats = [name for name, kind in zip(table.columns, kinds, strict=True) if kind in ("f", "Float")]
    if key is None and not floats:
        raise ValueError(f"view {view.name} works on numbers, and the table has no column of floats: name one by key=.")
    if key is None:
        values = np.stack([np.asarray(table[name], dtype=float) for name in floats], axis=1)  # NA is NaN
        changed = dict(zip(floats, view(values, rng).T, strict=True))
    else:
        changed = {key: list(augment(view, part_of(table, key), rng))}
    if hasattr(table, "with_columns"):  # polars
        return table.with_columns([type(table[name])(name, column) for name, column in changed.items()])
    result = table.copy()
    for name, column in changed.items():
        result[name] = column
    return result


def _leaves(batch: Batch) -> Iterator[Any]:
    """The arrays of a batch."""
    if isinstance(batch, Mapping | tuple | list) and not isinstance(batch, RowList):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(part)
    else:
        yield batch


def _is_finite(batch: Batch) -> bool:
    floating = (leaf for leaf in _leaves(batch) if not isinstance(leaf, RowList) and is_floating(leaf))
    return all(bool((leaf.isfinite() if is_tensor(leaf) else np.isfinite(np.asarray(leaf))).all()) for leaf in floating)
