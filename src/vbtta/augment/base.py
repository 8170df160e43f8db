"""What a view is: a name, whether it draws, and a function of a batch."""

__all__ = ["Augmentation", "BuiltIn", "Chain", "apply_view"]

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from vbtta._support.random import RowStreams

Batch = Any  # an array or tensor of N rows, or a dict, tuple or list of such


@runtime_checkable
class Augmentation(Protocol):
    """One view of the inputs: N rows in, N rows out.

    Attributes
    ----------
    name : str
        What policies and reports call the view; unique in a set, `identity` for the untouched input.
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
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def stochastic(self) -> bool:  # noqa: D102
        ...

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:  # noqa: D102
        ...


@dataclass(frozen=True)
class BuiltIn:
    """Base of the built-in views: frozen dataclasses whose fields are what a file of views stores.

    A subclass checks its fields in `check`, names itself in `default_name` and works in `__call__`.
    """

    stochastic: ClassVar[bool] = False
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"{type(self).__name__}: name must be a string; got {self.name!r}.")
        self.check()
        if not self.name:
            object.__setattr__(self, "name", self.default_name())

    def check(self) -> None:
        """Refuse parameters that make no sense, and bring the others to their stored form."""

    def default_name(self) -> str:
        """Make the name from the parameters."""
        raise NotImplementedError

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Transform a batch of N rows."""
        raise NotImplementedError

    def streams(self, batch: Batch, rng: RowStreams | None) -> RowStreams:
        """Return `rng` if it has one stream per row of the batch, or say what is missing."""
        if rng is None:
            raise ValueError(
                f"view {self.name} draws random numbers: call it with "
                f"rng=RowStreams(seed, view.name, draw, rows), one row number per row of the batch."
            )
        if len(rng) != len(batch):
            raise ValueError(f"view {self.name}: rng has {len(rng)} rows and the batch {len(batch)}; they must agree.")
        return rng

    def store(self, **values: Any) -> None:
        """Set fields of the frozen instance (for `check` only)."""
        for key, value in values.items():
            object.__setattr__(self, key, value)


@dataclass(frozen=True)
class Chain(BuiltIn):
    """Several views one after the other.

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

    def check(self) -> None:
        """Refuse an empty chain, and what is no view."""
        given: Any = self.views
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(f"Chain: views must be a list of views; got {given!r}.")
        self.store(views=tuple(self.views))
        if not self.views:
            raise ValueError("Chain needs at least one view; Identity() leaves the batch as it is.")
        for link in self.views:
            if isinstance(link, type) or not isinstance(link, Augmentation):
                raise ValueError(f"Chain: {link!r} is not a view; make one of a function with as_view(function).")

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether any link draws."""
        return any(view.stochastic for view in self.views)

    def default_name(self) -> str:
        """Join the names of the links."""
        return "+".join(view.name for view in self.views)

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        """Apply the views in order."""
        for view in self.views:
            batch = view(batch, rng)
        return batch


def apply_view(view: Augmentation, batch: Batch, rng: RowStreams | None = None) -> Batch:
    """Apply a view and refuse a result that no model should see.

    A view that is not built in may work in place: it gets a copy.

    Parameters
    ----------
    view : Augmentation
        The view.
    batch : array, tensor, or a dict, tuple or list of such
        N rows.
    rng : RowStreams, optional
        One stream per row; needed if the view is stochastic.

    Returns
    -------
    The view's result, unchanged.

    Raises
    ------
    ValueError
        If the number of rows changed, or NaN or infinity appeared where the batch had none.
    TypeError
        If a view of arrays is given a dict or tuple of them.

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
        if isinstance(view, BuiltIn) and isinstance(batch, (Mapping, tuple, list)):
            raise TypeError(
                f"view {view.name} works on one array, and the batch is a {type(batch).__name__} of several: apply it "
                f"to a part, as in as_view(lambda batch: {{**batch, key: view(batch[key])}}, name={view.name!r})."
            ) from None
        if isinstance(view, BuiltIn) and hasattr(batch, "iloc"):
            raise TypeError(f"view {view.name} works on arrays, and the batch is a table; use .to_numpy().") from None
        raise
    for leaf in _leaves(result):
        if not hasattr(leaf, "__len__"):
            raise ValueError(f"view {view.name} returned a {type(leaf).__name__} where an array of rows is needed.")
    n_rows = {len(leaf) for leaf in _leaves(batch)}
    for leaf in _leaves(result):
        if len(leaf) not in n_rows:
            raise ValueError(
                f"view {view.name} turned a batch of {max(n_rows)} rows into {len(leaf)}; "
                f"a view must return one row for each row given."
            )
    # Inputs with gaps of their own (NaN in a table) are the model's business, not the view's fault.
    if not _is_finite(result) and _is_finite(batch):
        raise ValueError(
            f"view {view.name} returned NaN or infinity for a finite batch; check its parameters and the "
            f"range of values it expects."
        )
    return result


def own_copy(view: Augmentation, batch: Batch) -> Batch:
    """A copy of the batch for a view that may change it in place; the batch itself for the built-in ones."""
    return copy_of(batch) if _is_foreign(view) else batch


def is_tensor(batch: Batch) -> bool:
    """Whether this is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(batch, torch.Tensor)


def is_floating(batch: Batch) -> bool:
    """Whether an array or tensor holds floating-point numbers."""
    if is_tensor(batch):
        return bool(batch.is_floating_point())
    return np.asarray(batch).dtype.kind == "f"


def like(values: np.ndarray[Any, Any], batch: Batch) -> Any:
    """Bring NumPy values to the type, precision and device of the batch."""
    if is_tensor(batch):
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=batch.device, dtype=batch.dtype)
    return values.astype(batch.dtype, copy=False)


def per_row(values: np.ndarray[Any, Any], batch: Batch) -> Any:
    """Bring one number per row, (N,), to a shape that broadcasts over the batch."""
    return like(values.reshape(-1, *(1,) * (batch.ndim - 1)), batch)


def number(value: float, *, signed: bool = False) -> str:
    """Write a number for a name: the shortest text that gives it back, 15 rather than 15.0."""
    text = repr(float(value)).removesuffix(".0")
    return f"+{text}" if signed and value > 0 else text


def choose(mask: np.ndarray[Any, Any], chosen: Any, other: Any, batch: Batch) -> Any:
    """Entries of one batch where the mask is true and of the other elsewhere, NaN of neither side carried over."""
    if is_tensor(batch):
        torch = sys.modules["torch"]
        return torch.where(torch.from_numpy(np.ascontiguousarray(mask)).to(batch.device), chosen, other)
    return np.where(mask, chosen, other)


def _is_foreign(view: Augmentation) -> bool:
    if isinstance(view, Chain):
        return any(_is_foreign(link) for link in view.views)
    return not isinstance(view, BuiltIn)


def copy_of(batch: Batch) -> Batch:
    """A copy of every array of a batch."""
    if is_tensor(batch):
        return batch.clone()
    if type(batch) is dict:
        return {key: copy_of(part) for key, part in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(copy_of(part) for part in batch)
    return batch.copy() if isinstance(batch, np.ndarray) else copy.deepcopy(batch)


def _leaves(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


def _is_finite(batch: Batch) -> bool:
    for leaf in _leaves(batch):
        if is_tensor(leaf):
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                return False
        else:
            array = np.asarray(leaf)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return False
    return True
