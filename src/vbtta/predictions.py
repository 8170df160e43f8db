"""What goes in and what comes out: a model's predictions under K views, and one predictive distribution."""

__all__ = ["CategoricalPrediction", "ContinuousPrediction", "Prediction", "ViewPredictions", "view_information"]

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta import mixtures
from vbtta._support.files import atomic_path
from vbtta._support.fingerprints import conflict
from vbtta._support.npz import read_npz
from vbtta._support.words import shown
from vbtta.labels import Array, class_positions

_ROWS_AT_A_TIME = 1 << 14
_LARGEST = 1e100  # a prediction, so that its square is a number too


class ViewPredictions:
    """A model's predictions for N inputs under K views: C outputs each.

    Parameters
    ----------
    mean : (N, K, C) array
        Outputs, averaged over the draws of a stochastic view: raw outputs in regression, **logits**
        in classification. Single and double precision are kept as they are, without a copy.
    variance : (N, K, C) array, optional
        Variance over the draws.
    names : K strings, optional
        Names of the views; the unaugmented one is `identity`. Generated where absent.
    ids : (N,) integers or strings, optional
        Identifiers of the inputs.
    classes : (C,) integers or strings, optional
        What the outputs of a classifier stand for; 0..C-1 where absent.
    draws : (n, K, M, C) array, optional
        The single draws of the first n inputs, for diagnostics; a choice of inputs leaves them behind.
    fingerprints : dict, optional
        By view name, what made the predictions; policies compare them.

    Examples
    --------
    >>> views = ViewPredictions(np.zeros((5, 2, 1)), names=["identity", "flip"])
    >>> views
    ViewPredictions(N=5, K=2, C=1: identity, flip)
    >>> views.select(["flip"]).mean.shape
    (5, 1, 1)
    """

    def __init__(
        self,
        mean: ArrayLike,
        variance: ArrayLike | None = None,
        *,
        names: Sequence[str] | None = None,
        ids: ArrayLike | None = None,
        classes: ArrayLike | None = None,
        draws: ArrayLike | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        self.mean = _floats(mean, "mean")
        if self.mean.ndim != 3:
            raise ValueError(
                f"mean must be (N, K, C); got shape {self.mean.shape}. A single output needs a last axis of length 1"
            )
        n_inputs, n_views, n_outputs = self.mean.shape
        if n_views == 0 or n_outputs == 0:
            raise ValueError(f"mean must have at least one view and one output; got shape {self.mean.shape}")
        self.variance = None if variance is None else _floats(variance, "variance")
        if self.variance is not None and self.variance.shape != self.mean.shape:
            raise ValueError(f"variance must be shaped like mean, {self.mean.shape}; got {self.variance.shape}")
        self.generated_names = names is None
        self.names = tuple(f"view_{k}" for k in range(n_views)) if names is None else _names(names, n_views)
        self.ids = None if ids is None else _keys(ids, n_inputs, "ids")
        self.classes = None if classes is None else _keys(classes, n_outputs, "classes")
        self.draws = None if draws is None else _draws(draws, self.mean.shape)
        known = fingerprints or {}
        self.fingerprints = {name: str(known[name]) for name in self.names if name in known}
        if not isinstance(self.mean, np.memmap):  # a mapped file is read, and checked, where it is used
            self.check_finite()

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        n_inputs, n_views, n_outputs = self.mean.shape
        shown = ", ".join(self.names[:6]) + (", ..." if n_views > 6 else "")
        return f"ViewPredictions(N={n_inputs}, K={n_views}, C={n_outputs}: {shown})"

    def check_finite(self) -> None:
        """Raise where a prediction is not finite or a variance is negative."""
        for start in range(0, len(self.mean), _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            _check_rows(self.mean[rows], start, "mean", self.names, smallest=-np.inf)
            if self.variance is not None:
                _check_rows(self.variance[rows], start, "variance", self.names, smallest=0)

    def take(self, rows: Array | slice) -> Self:
        """Some of the inputs."""
        return self._like(
            self.mean[rows],
            None if self.variance is None else self.variance[rows],
            ids=None if self.ids is None else self.ids[rows],
        )

    def select(self, names: Iterable[str]) -> Self:
        """Some of the views, in the order given."""
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in wanted if name not in self.names]
        if unknown:
            raise ValueError(f"views {shown(unknown)} are not among the predictions' views {list(self.names)}")
        if tuple(wanted) == self.names:
            return self
        columns = [self.names.index(name) for name in wanted]
        variance = None if self.variance is None else self.variance[:, columns]
        draws = None if self.draws is None else self.draws[:, columns]
        return self._like(self.mean[:, columns], variance, names=wanted, ids=self.ids, draws=draws)

    def concat(self, others: Self | Sequence[Self], *, axis: str = "inputs") -> Self:
        """Append the same views of more inputs, or with ``axis="views"`` more views of the same inputs."""
        parts = [self, *([others] if isinstance(others, ViewPredictions) else others)]
        if not all(isinstance(part, ViewPredictions) for part in parts):
            raise ValueError(f"others must be ViewPredictions, one or a list of them; got {others!r}")
        if axis not in ("inputs", "views"):
            raise ValueError(f"axis must be 'inputs' or 'views'; got {axis!r}")
        if len({part.variance is None for part in parts}) > 1:
            raise ValueError("some parts have a variance and some not; give all of them one or none")
        if any(not _same(part.classes, self.classes) for part in parts):
            raise ValueError("parts have different classes; predictions of different models cannot be joined")
        along = 0 if axis == "inputs" else 1
        if axis == "inputs":
            parts = [self, *(part.select(self.names) for part in parts[1:])]
            _check_same_views(parts)
            have_ids = all(part.ids is not None for part in parts)
            ids = np.concatenate([part.ids for part in parts if part.ids is not None]) if have_ids else None
            names: Sequence[str] | None = None if self.generated_names else self.names
        else:
            if any(part.mean.shape[0] != len(self) or not _same(part.ids, self.ids) for part in parts):
                raise ValueError(
                    "parts are of different inputs; axis='views' joins views of the same inputs in one order"
                )
            ids = self.ids
            generated = all(part.generated_names for part in parts)
            names = None if generated else [name for part in parts for name in part.names]
        if len({part.mean.shape[2] for part in parts}) > 1:
            raise ValueError(f"parts have different numbers of outputs: {[part.mean.shape[2] for part in parts]}")
        variances = [part.variance for part in parts if part.variance is not None]
        return self._like(
            np.concatenate([part.mean for part in parts], axis=along),
            np.concatenate(variances, axis=along) if variances else None,
            names=names,
            ids=ids,
            fingerprints={name: text for part in reversed(parts) for name, text in part.fingerprints.items()},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an `.npz` file of plain arrays, uncompressed so that it can be mapped, atomically."""
        members = {"mean": np.asarray(self.mean)}
        if not self.generated_names:
            members["names"] = np.array(self.names)
        for key in ("variance", "ids", "classes", "draws"):
            if getattr(self, key) is not None:
                members[key] = np.asarray(getattr(self, key))
        if self.fingerprints:
            members["fingerprints"] = np.array([self.fingerprints.get(name, "") for name in self.names])
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **members)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = False) -> Self:
        """Read what :meth:`save` wrote; never unpickles.

        With ``mmap=True`` mean and variance stay on disk and are read where they are used.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(f"no predictions file at {path}; write one with ViewPredictions.save")
        members = read_npz(path, mapped=("mean", "variance") if mmap else ())
        if "mean" not in members:
            raise ValueError(f"{path} has no array 'mean' of shape (N, K, C); it has {sorted(members)}")
        names = [str(name) for name in members["names"]] if "names" in members else None
        try:
            return cls(
                members["mean"],
                members.get("variance"),
                names=names,
                ids=members.get("ids"),
                classes=members.get("classes"),
                draws=members.get("draws"),
                fingerprints=_fingerprints(names, members.get("fingerprints")),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _like(
        self,
        mean: Array,
        variance: Array | None,
        *,
        names: Sequence[str] | None = None,
        ids: Array | None,
        draws: Array | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> Self:
        names = None if names is None and self.generated_names else names or self.names
        prints = self.fingerprints if fingerprints is None else fingerprints
        return type(self)(mean, variance, names=names, ids=ids, classes=self.classes, draws=draws, fingerprints=prints)


@dataclass(frozen=True, eq=False)
class ContinuousPrediction:
    """A predictive distribution for every input: a mixture of Student-t, one component a view.

    Attributes
    ----------
    weights : (N, K) array
    dof : (K,) array
        Degrees of freedom; infinite for a normal.
    location : (N, K, C) array
    scale : (N, K, C, C) array
        Scale matrices; the covariance is dof/(dof - 2) times that.

    Examples
    --------
    >>> normal = ContinuousPrediction(
    ...     np.ones((2, 1)), np.array([np.inf]), np.array([[[0.0]], [[5.0]]]), np.ones((2, 1, 1, 1))
    ... )
    >>> normal.mean[:, 0], normal.quantile(0.975)[:, 0].round(2)
    (array([0., 5.]), array([1.96, 6.96]))
    """

    weights: Array
    dof: Array
    location: Array
    scale: Array

    def __repr__(self) -> str:
        return f"ContinuousPrediction(N={self.location.shape[0]}, C={self.location.shape[2]})"

    @property
    def mean(self) -> Array:
        """Mean, the point prediction: (N, C)."""
        return self._moments[0]

    @property
    def covariance(self) -> Array:
        """Covariance of the outputs: (N, C, C)."""
        return self._moments[1]

    @property
    def variance(self) -> Array:
        """Variance of every output: (N, C)."""
        return np.diagonal(self._moments[1], axis1=1, axis2=2).copy()

    def quantile(self, q: float | ArrayLike) -> Array:
        """Quantiles of every output: (N, C) for one q, (Q, N, C) for several."""
        levels = np.asarray(q, dtype=np.float64)
        if levels.ndim > 1 or not levels.size or not np.all((levels > 0) & (levels < 1)):
            raise ValueError(f"q must be between 0 and 1, a number or a list of them; got {q!r}")
        found = [mixtures.quantile(float(p), self.weights, self.dof, self.location, self._spread) for p in levels.flat]
        return found[0] if levels.ndim == 0 else np.stack(found)

    def interval(self, level: float) -> tuple[Array, Array]:
        """Equal-tailed interval of every output: lower and upper, (N, C) each."""
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, such as 0.9; got {level}")
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    def log_prob(self, y: ArrayLike) -> Array:
        """Log density at y, (N,) or (N, C): (N,)."""
        return mixtures.log_density(self._targets(y), self.weights, self.dof, self.location, self.scale)

    def crps(self, y: ArrayLike) -> Array:
        """Continuous ranked probability score of every output at y, (N,) or (N, C): (N, C)."""
        return mixtures.crps(self._targets(y), self.weights, self.dof, self.location, self._spread)

    @cached_property
    def _moments(self) -> tuple[Array, Array]:
        return mixtures.moments(self.weights, self.dof, self.location, self.scale)

    @cached_property
    def _spread(self) -> Array:
        return np.asarray(np.sqrt(np.diagonal(self.scale, axis1=2, axis2=3)))  # (N, K, C)

    def _targets(self, y: ArrayLike) -> Array:
        n_inputs, _, n_outputs = self.location.shape
        targets = np.asarray(y, dtype=np.float64)
        if targets.shape == (n_inputs,) and n_outputs == 1:
            targets = targets[:, None]
        if targets.shape != (n_inputs, n_outputs):
            raise ValueError(f"y must be ({n_inputs}, {n_outputs}), one value an input and output; got {targets.shape}")
        if not np.all(np.isfinite(targets)):
            raise ValueError("y must be finite; leave out inputs without a value")
        return targets


@dataclass(frozen=True, eq=False)
class CategoricalPrediction:
    """Class probabilities of every input.

    Attributes
    ----------
    proba : (N, C) array
    mutual_information : (N,) array
        Between label and view, in nats: what the views disagree about (:func:`view_information`). It is 0 where all
        say the same, and never more than the entropy.
    classes : (C,) array
        What the columns stand for.

    Examples
    --------
    >>> found = CategoricalPrediction(np.array([[0.5, 0.5], [0.1, 0.9]]), np.zeros(2), np.array(["cat", "dog"]))
    >>> found.label, found.entropy.round(2)
    (array(['cat', 'dog'], dtype='<U3'), array([0.69, 0.33]))
    """

    proba: Array
    mutual_information: Array
    classes: Array

    def __repr__(self) -> str:
        return f"CategoricalPrediction(N={self.proba.shape[0]}, C={self.proba.shape[1]})"

    @property
    def label(self) -> Array:
        """The most probable class of every input: (N,)."""
        return np.asarray(self.classes[self.proba.argmax(axis=1)])

    @property
    def entropy(self) -> Array:
        """Entropy of the class probabilities in nats: (N,)."""
        return _entropy(self.proba)

    def log_prob(self, y: ArrayLike) -> Array:
        """Log probability of the classes y, (N,): (N,)."""
        value = np.asarray(y)
        if value.shape != self.proba.shape[:1]:
            raise ValueError(f"y must be ({len(self.proba)},), one class an input; got shape {value.shape}")
        position = class_positions(value, self.proba.shape[1], self.classes)
        smallest = np.finfo(np.float64).tiny
        return np.log(np.maximum(self.proba[np.arange(len(value)), position], smallest))


Prediction = ContinuousPrediction | CategoricalPrediction


def view_information(proba: Array, shares: Array) -> Array:
    """Mutual information of class and view in nats, between 0 and the entropy of the class: (N,).

    The class has the predicted probabilities, proba (N, C). Given the class, a view has its part in what a mixture of
    the views says of that class: shares (N, K, C) are weight times probability, w_k p_k(c). Of a mixture that is its
    own mutual information; of any other pool the views' disagreement about what the pool leaves open.

    Examples
    --------
    Two views that contradict each other, in a pool that leaves all open and in one that is nearly sure:

    >>> shares = np.array([[[0.45, 0.05], [0.05, 0.45]]])
    >>> [view_information(np.array([proba]), shares).round(2).item() for proba in ([0.5, 0.5], [0.99, 0.01])]
    [0.37, 0.02]
    """
    tiny = np.finfo(np.float64).tiny
    joint = shares * (proba / np.maximum(shares.sum(axis=1), tiny))[:, None]
    by_view = np.where(joint > 0, joint / np.maximum(joint.sum(axis=2, keepdims=True), tiny), 1.0)  # P(c | k)
    left_open = -(joint * np.log(by_view)).sum(axis=(1, 2))
    return np.asarray(np.maximum(_entropy(proba) - left_open, 0))


def _entropy(proba: Array) -> Array:
    """Entropy in nats of probabilities (N, C): (N,)."""
    return np.asarray(-(proba * np.log(np.where(proba > 0, proba, 1.0))).sum(axis=1))


def _floats(values: ArrayLike, name: str) -> Array:
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array; every view needs a prediction for every input")
    try:
        array = np.asanyarray(values) if isinstance(values, np.memmap) else np.asarray(values)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64, casting="same_kind")
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an (N, K, C) array of real numbers; got {type(values).__name__}") from None


def _draws(draws: ArrayLike, shape: tuple[int, ...]) -> Array:
    values = _floats(draws, "draws")
    n_inputs, n_views, n_outputs = shape
    fits = values.ndim == 4 and values.shape[1] == n_views and values.shape[3] == n_outputs
    if not fits or len(values) > n_inputs:
        raise ValueError(f"draws must be (n, {n_views}, M, {n_outputs}) with n at most {n_inputs}; got {values.shape}")
    return values


def _fingerprints(names: Sequence[str] | None, texts: Array | None) -> dict[str, str]:
    if names is None or texts is None:
        return {}
    return {name: str(text) for name, text in zip(names, texts, strict=True) if str(text)}


def _names(names: Sequence[str], n_views: int) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"names must be a list of {n_views} strings; got {names!r}")
    found = tuple(str(name) for name in names)
    if len(found) != n_views:
        raise ValueError(f"names must be {n_views} strings, one a view; got {len(found)}")
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise ValueError(f"names must differ; {twice} occur more than once")
    return found


def _keys(values: ArrayLike, length: int, name: str) -> Array:
    """Identifiers as integers or strings, never objects (which could only be saved as pickles)."""
    keys = np.asarray(values)
    if keys.dtype.kind in "OS":
        keys = keys.astype(str)
    if keys.dtype.kind not in "iubfU" or keys.shape != (length,):
        raise ValueError(f"{name} must be {length} integers or strings; got shape {keys.shape}, dtype {keys.dtype}")
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        raise ValueError(f"{name} must be integers or strings; got {keys[~np.isfinite(keys)][0]}")
    found, times = np.unique(keys, return_counts=True)
    if len(found) != length:
        raise ValueError(f"{name} must differ from each other; {str(found[times > 1][0])!r} occurs more than once")
    return keys


def _check_rows(block: Array, start: int, name: str, names: tuple[str, ...], smallest: float) -> None:
    wrong = ~(np.isfinite(block) & (block >= smallest))
    if block.dtype == np.float64:  # single precision ends long before
        wrong |= np.abs(block) > _LARGEST
    if wrong.any():
        row, view, output = (int(index) for index in np.argwhere(wrong)[0])
        demand = "finite" if smallest < 0 else "finite and not negative"
        if np.isfinite(block[row, view, output]) and abs(block[row, view, output]) > _LARGEST:
            demand = f"smaller than {_LARGEST:g}, or squares overflow"
        raise ValueError(
            f"{name} must be {demand}; input {start + row}, view {names[view]!r}, output {output} is "
            f"{block[row, view, output]}. Leave out that view or that input"
        )


def _check_same_views(parts: Sequence[ViewPredictions]) -> None:
    """Views of one name are one view, as far as their fingerprints tell."""
    known: dict[str, list[str]] = {}
    for part in parts:
        for name, text in part.fingerprints.items():
            for earlier in known.setdefault(name, []):
                what = conflict(earlier, text)
                if what is not None:
                    raise ValueError(f"view {name!r} of a part is not that of the parts before: it {what}")
            if text not in known[name]:
                known[name].append(text)


def _same(first: Array | None, second: Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
