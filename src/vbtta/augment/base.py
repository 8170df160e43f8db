"""The view protocol: a name, whether the view is stochastic, and a function of a batch."""

__all__ = ["Augmentation", "Chain", "apply_view"]

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from vbtta._support.fingerprints import describe_fields
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, copy_of, is_floating, is_tensor


@runtime_checkable
class Augmentation(Protocol):
    """One view of the inputs: N rows in, N rows out.

    Attributes
    ----------
    name : str
        The view's name in policies and reports; unique in a set, `identity` for the unchanged input.
    stochastic : bool
        Whether the view draws random numbers. They come from `rng`, which holds one stream per row.

    Examples
    --------
    Anything with these three is a view:

    >>> class Negate:
    ...     name, stochastic = "negate", False
    ...
    ...     def __call__(self, batch, rng=None):
    ...         return -batch
    >>> isinstance(Negate(), Augmentation), apply_view(Negate(), np.array([[1.0, 2.0]]))
    (True, array([[-1., -2.]]))
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def stochastic(self) -> bool: ...  # noqa: D102

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch: ...  # noqa: D102


@dataclass(frozen=True)
class Number:
    """Annotation of a numeric parameter: its range, and its form in the view's name."""

    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    signed: bool = False
    unit: str = ""

    def check(self, parameter: str, value: Any) -> None:
        """Refuse a value that is not a finite number within the range."""
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ValueError(f"{parameter} must be a number; got {value!r}.")
        if not math.isfinite(value) or value <= self.above:
            bound = "" if self.above == -math.inf else f" and greater than {self.above:g}"
            raise ValueError(f"{parameter} must be finite{bound}{self.unit}; got {value}.")
        if value >= self.below:
            raise ValueError(f"{parameter} must be below {self.below:g}{self.unit}; got {value}.")
        if value > self.at_most:
            raise ValueError(f"{parameter} must be at most {self.at_most:g}{self.unit}; got {value}.")

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


Positive = Annotated[float, Number(above=0.0)]
Signed = Annotated[float, Number(signed=True)]


@dataclass(frozen=True)
class BuiltIn:
    """Base of the built-in views: frozen dataclasses whose fields are stored in files of views.

    A subclass gives its `label` and whether it is `stochastic` as class arguments, and works in `__call__`. Fields
    annotated with `Number` or `Choice` are checked, and shown in the name if they differ from their default:
    `label(value,value)`. `_check` checks other fields.
    """

    stochastic: ClassVar[bool] = False
    label: ClassVar[str] = ""
    name: str = field(default="", kw_only=True)

    def __init_subclass__(cls, label: str = "", stochastic: bool = False) -> None:
        cls.label, cls.stochastic = label or cls.label, stochastic or cls.stochastic

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"{type(self).__name__}: name must be a string; got {self.name!r}.")
        for item, rule in self._rules():
            rule.check(f"{type(self).__name__}: {item.name}", getattr(self, item.name))
        self._check()
        if not self.name:
            self._store(name=self.default_name())

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Transform a batch of N rows."""
        raise NotImplementedError

    def default_name(self) -> str:
        """Make the name from the label and the parameters."""
        values = ((getattr(self, item.name), item.default, rule) for item, rule in self._rules())
        texts = [rule.text(value) for value, default, rule in values if value != default]
        return f"{self.label}({','.join(texts)})" if texts else self.label

    def fingerprint_data(self) -> Any:
        """Class and parameters, for the fingerprint of the view."""
        return describe_fields(self, type(self).__name__, skip_none=True)

    def _check(self) -> None:
        """Refuse invalid fields, and bring the others to their stored form."""

    def _store(self, **values: Any) -> None:
        """Set fields of the frozen instance, during construction only."""
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def _rules(self) -> Iterator[tuple[Field[Any], Number | Choice]]:
        """Annotated fields with their annotations."""
        annotated = ((item, rule) for item in fields(self) for rule in getattr(item.type, "__metadata__", ()))
        return ((item, rule) for item, rule in annotated if isinstance(rule, Number | Choice))


@dataclass(frozen=True)
class Chain(BuiltIn):
    """Several views applied one after the other.

    Parameters
    ----------
    views : sequence of Augmentation
        The first is applied first. Stochastic ones take their numbers from the same streams in turn.

    Examples
    --------
    >>> from vbtta.augment import Affine, Chain
    >>> double, add_one = Affine([[2.0]], [0.0], name="double"), Affine([[1.0]], [1.0], name="add one")
    >>> chain = Chain([double, add_one])
    >>> chain.name, chain(np.array([[5.0]]))
    ('double+add one', array([[11.]]))
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

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether any of the views is stochastic."""
        return any(view.stochastic for view in self.views)

    def default_name(self) -> str:
        """Join the names of the views."""
        return "+".join(view.name for view in self.views)

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Apply the views in order."""
        for view in self.views:
            batch = view(batch, rng)
        return batch


def apply_view(view: Augmentation, batch: Batch, rng: RowStreams | None = None) -> Batch:
    """Apply a view; an error if the number of rows changed, or NaN or infinity appeared where the batch had none.

    A view that is not built in may work in place: it gets a copy.

    Parameters
    ----------
    view : Augmentation
        The view.
    batch : array, tensor, or a dict, tuple or list of such
        N rows.
    rng : RowStreams, optional
        One stream per row; needed if the view is stochastic.

    Examples
    --------
    >>> from vbtta.augment import as_view
    >>> apply_view(as_view(lambda x: x[:1], "first"), np.zeros((3, 2)))
    Traceback (most recent call last):
        ...
    ValueError: view first turned a batch of 3 rows into 1; a view must return one row for each row given.
    """
    try:
        result = view(own_copy(view, batch), rng)
    except (AttributeError, TypeError):
        if not isinstance(view, BuiltIn):
            raise
        if isinstance(batch, Mapping | tuple | list):
            raise TypeError(
                f"view {view.name} works on one array, and the batch is a {type(batch).__name__} of several: apply it "
                f"to a part, as in as_view(lambda batch: {{**batch, key: view(batch[key])}}, name={view.name!r})."
            ) from None
        if hasattr(batch, "iloc"):
            raise TypeError(f"view {view.name} works on arrays, and the batch is a table; use .to_numpy().") from None
        raise
    n_rows = {len(leaf) for leaf in _leaves(batch)}
    for leaf in _leaves(result):
        if not hasattr(leaf, "__len__"):
            raise ValueError(f"view {view.name} returned a {type(leaf).__name__} where an array of rows is needed.")
        if len(leaf) not in n_rows:
            raise ValueError(
                f"view {view.name} turned a batch of {max(n_rows)} rows into {len(leaf)}; "
                f"a view must return one row for each row given."
            )
    if not _is_finite(result) and _is_finite(batch):  # NaN of the inputs themselves is left to the predictor
        raise ValueError(
            f"view {view.name} returned NaN or infinity for a finite batch; check its parameters and the "
            f"range of values it expects."
        )
    return result


def own_copy(view: Augmentation, batch: Batch) -> Batch:
    """A copy of the batch for a view that may change it in place; the batch itself for built-in views."""
    return batch if _is_built_in(view) else copy_of(batch)


def check_streams(view: Augmentation, batch: Batch, rng: RowStreams | None) -> RowStreams:
    """Return `rng` if it has one stream per row of the batch."""
    if rng is None:
        raise ValueError(
            f"view {view.name} draws random numbers: call it with "
            f"rng=RowStreams(seed, view.name, draw, rows), one row number per row of the batch."
        )
    if len(rng) != len(batch):
        raise ValueError(f"view {view.name}: rng has {len(rng)} rows and the batch {len(batch)}; they must agree.")
    return rng


def check_floating(view: Augmentation, batch: Batch) -> None:
    """Refuse whole numbers, which would be rounded silently."""
    if not is_floating(batch):
        raise TypeError(
            f"view {view.name} needs floating-point inputs; got {batch.dtype}. "
            f"Convert the inputs first (images: divide by 255)."
        )


def check_images(view: Augmentation, batch: Batch) -> None:
    """Refuse batches that are not images (N, C, H, W)."""
    if batch.ndim != 4:
        raise ValueError(f"view {view.name} takes images (N, C, H, W); got shape {tuple(batch.shape)}.")


def _is_built_in(view: Augmentation) -> bool:
    return all(map(_is_built_in, view.views)) if isinstance(view, Chain) else isinstance(view, BuiltIn)


def _leaves(batch: Batch) -> Iterator[Any]:
    """The arrays of a batch."""
    if isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(part)
    else:
        yield batch


def _is_finite(batch: Batch) -> bool:
    floating = (leaf for leaf in _leaves(batch) if is_floating(leaf))
    return all(bool((leaf.isfinite() if is_tensor(leaf) else np.isfinite(leaf)).all()) for leaf in floating)
