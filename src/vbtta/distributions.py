"""Predictive distributions: class probabilities, and mixtures of Student-t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import between, real_array, row_numbers, shown
from vbtta.data.labels import Array, by_id, class_positions, frame_of
from vbtta.inference.linalg import cholesky

_NORMAL_FROM = 1e8  # degrees of freedom: a t is a normal to 1e-8, and differences of log-gamma functions lose digits
_PANELS = np.array([1e-7, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5])
_PANELS = np.concatenate([_PANELS, 1 - _PANELS[-2::-1]])  # between quantiles at these a mixture's CDF is smooth


@dataclass(frozen=True, eq=False, kw_only=True)
class _OfInputs:
    """What predictions of all kinds have: ids of the inputs and, of early stops, how many views each took."""

    ids: Array | None = None
    passes: Array | None = None

    def __repr__(self) -> str:
        shape = getattr(self, "location" if hasattr(self, "location") else "proba").shape
        return f"{type(self).__name__}(N={shape[0]}, C={shape[-1]})"

    def take(self, rows: Array | slice) -> Self:
        """The prediction of some inputs, which may repeat."""
        rows = row_numbers(rows, len(getattr(self, "location" if hasattr(self, "location") else "proba")))
        arrays = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("dof", "classes")}
        return replace(self, **{name: None if array is None else array[rows] for name, array in arrays.items()})

    def columns(self, level: float = 0.9) -> dict[str, Array]:
        """A table with one row an input."""
        raise NotImplementedError

    def to_frame(self, level: float = 0.9, index: Any = None) -> Any:
        """:meth:`columns`, and `passes`, as a pandas DataFrame; its index are the ids of the inputs, where given."""
        passes = {} if self.passes is None else {"passes": self.passes}
        return frame_of(self.columns(level) | passes, self.ids if index is None else index)


@dataclass(frozen=True, eq=False, repr=False)
class ContinuousPrediction(_OfInputs):
    """A predictive distribution for every input: a mixture of Student-t, one component a view.

    Attributes
    ----------
    weights : (N, K) array
    dof : (K,) array
        Degrees of freedom; infinite for a normal.
    location : (N, K, C) array
    scale : (N, K, C, C) array
        Scale matrices; the covariance is dof/(dof - 2) times that.
    ids, passes : (N,) arrays, optional
        Of the inputs: the index of `to_frame`, and the number of views that an early stop took.
    """

    weights: Array
    dof: Array
    location: Array
    scale: Array

    @classmethod
    def pool(cls, parts: Sequence[ContinuousPrediction], shares: Array) -> ContinuousPrediction:
        """The average of several distributions of the same inputs, with shares (N, M)."""
        return cls(
            np.concatenate([part.weights * shares[:, m, None] for m, part in enumerate(parts)], axis=1),
            np.concatenate([part.dof for part in parts]),
            np.concatenate([part.location for part in parts], axis=1),
            np.concatenate([part.scale for part in parts], axis=1),
        )

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

    @property
    def std(self) -> Array:
        """Standard deviation of every output: (N, C)."""
        return np.sqrt(self.variance)

    def quantile(self, q: float | ArrayLike) -> Array:
        """Quantiles of every output: (N, C) for one q, (Q, N, C) for several."""
        levels = real_array("q", q)
        if levels.ndim > 1 or not levels.size or not np.all((levels > 0) & (levels < 1)):
            raise ValueError(f"q must be between 0 and 1, a number or a list of them; got {shown(q)}")
        values = [self._quantile(float(p)) for p in levels.flat]
        return values[0] if levels.ndim == 0 else np.stack(values)

    def cdf(self, y: ArrayLike) -> Array:
        """Distribution function of every output at y, (N,) or (N, C): (N, C)."""
        return self._cdf(self._targets(y))

    def interval(self, level: float) -> tuple[Array, Array]:
        """Equal-tailed interval of every output: lower and upper, (N, C) each."""
        between("level", level, 1e-6, 1 - 1e-6)
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    def columns(self, level: float = 0.9) -> dict[str, Array]:
        """A table with one row an input: mean, std and the ends of an interval, numbered where there are several."""
        lower, upper = self.interval(level)
        values = {"mean": self.mean, "std": self.std, "lower": lower, "upper": upper}
        ends = [f"_{c + 1}" for c in range(lower.shape[1])] if lower.shape[1] > 1 else [""]
        return {f"{name}{end}": part[:, c] for c, end in enumerate(ends) for name, part in values.items()}

    def log_prob(self, y: ArrayLike) -> Array:
        """Log density at y, (N,) or (N, C): (N,)."""
        with np.errstate(divide="ignore"):
            log_weights = np.log(self.weights)
        return np.asarray(special.logsumexp(log_weights + self._log_components(self._targets(y)), axis=1))

    def draw(self, generator: np.random.Generator) -> Array:
        """One draw of every input: (N, C)."""
        rows, view = np.arange(len(self.weights)), draw_positions(generator, self.weights)
        dof, factor = self.dof[view], cholesky(self.scale[rows, view])  # (N,), (N, C, C)
        finite = np.where(np.isinf(dof), 1.0, dof)
        stretch = np.where(np.isinf(dof), 1.0, np.sqrt(finite / generator.chisquare(finite)))
        normal = generator.standard_normal(factor.shape[:2])
        return np.asarray(self.location[rows, view] + stretch[:, None] * np.einsum("ncd,nd->nc", factor, normal))

    def crps(self, y: ArrayLike) -> Array:
        """Continuous ranked probability score of every output at y, (N,) or (N, C): (N, C)."""
        # The integral of (F(x) - 1{x >= y})^2, by Gauss-Legendre on panels between the mixture's own (approximate)
        # quantiles and y, so that no component, however narrow, falls between the nodes.
        targets = self._targets(y)
        edges = np.sort([*(self._quantile(float(q), steps=12) for q in _PANELS), targets], axis=0)  # (P, N, C)
        nodes, shares = np.polynomial.legendre.leggauss(8)
        total = np.zeros_like(targets)
        for left, right in pairwise(edges):
            half, beyond = 0.5 * (right - left), left >= targets  # y is an edge: every panel lies on one side of it
            for position, share in zip(nodes, shares, strict=True):
                below = self._cdf(left + half * (1 + position))
                total += share * half * np.where(beyond, 1 - below, below) ** 2
        return total

    @cached_property
    def _moments(self) -> tuple[Array, Array]:
        """Mean (N, C) and covariance (N, C, C)."""
        mean = np.einsum("nk,nkc->nc", self.weights, self.location)
        deviation = self.location - mean[:, None]  # (N, K, C)
        covariance = np.einsum("nk,nkcd->ncd", self.weights * variance_factor(self.dof), self.scale)
        covariance += np.einsum("nk,nkc,nkd->ncd", self.weights, deviation, deviation)
        return mean, covariance

    @cached_property
    def _spread(self) -> Array:
        return np.asarray(np.sqrt(np.diagonal(self.scale, axis1=2, axis2=3)))  # (N, K, C)

    def _log_components(self, y: Array) -> Array:
        """Log density (N, K) of vectors y (N, C) under every component."""
        C, degrees = self.location.shape[2], np.minimum(self.dof, _NORMAL_FROM)
        factor = cholesky(self.scale)  # (N, K, C, C)
        residual = (y[:, None] - self.location)[..., None]  # (N, K, C, 1)
        distance = (np.linalg.solve(factor, residual)[..., 0] ** 2).sum(axis=2)  # (N, K)
        log_det = 2 * np.log(np.diagonal(factor, axis1=2, axis2=3)).sum(axis=2)
        constant = (
            special.gammaln(0.5 * (degrees + C)) - special.gammaln(0.5 * degrees) - 0.5 * C * np.log(np.pi * degrees)
        )
        student = constant - 0.5 * (degrees + C) * np.log1p(distance / degrees)
        normal = -0.5 * (C * np.log(2 * np.pi) + distance)
        return np.asarray(np.where(self.dof > _NORMAL_FROM, normal, student) - 0.5 * log_det)

    def _cdf(self, x: Array) -> Array:
        """Marginal distribution functions (N, C) at x (N, C)."""
        below = (x[:, None] - self.location) / self._spread  # (N, K, C)
        for k, degrees in enumerate(self.dof):
            below[:, k] = special.ndtr(below[:, k]) if degrees > _NORMAL_FROM else special.stdtr(degrees, below[:, k])
        return np.asarray(np.einsum("nk,nkc->nc", self.weights, below))

    def _quantile(self, q: float, steps: int = 60) -> Array:
        """The q-quantile of every output's marginal, (N, C), by bisection."""
        # The quantile lies between those of the components. 60 steps halve the bracket down to rounding.
        component = self.location + self._spread * special.stdtrit(self.dof, q)[:, None]  # (N, K, C)
        used = self.weights[:, :, None] > 0
        low, high = np.where(used, component, np.inf).min(axis=1), np.where(used, component, -np.inf).max(axis=1)
        for _ in range(steps):
            middle = 0.5 * (low + high)
            short = self._cdf(middle) < q
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return np.asarray(0.5 * (low + high))

    def _targets(self, y: ArrayLike) -> Array:
        n_inputs, _, n_outputs = self.location.shape
        targets: Array = real_array("y", by_id(y, self.ids, "y", "the prediction"))
        if targets.shape == (n_inputs,) and n_outputs == 1:
            targets = targets[:, None]
        if targets.shape != (n_inputs, n_outputs):
            raise ValueError(f"y must be ({n_inputs}, {n_outputs}), one value an input and output; got {targets.shape}")
        if not np.all(np.isfinite(targets)):
            raise ValueError("y must be finite; leave out inputs without a value")
        return targets


@dataclass(frozen=True, eq=False, repr=False)
class CategoricalPrediction(_OfInputs):
    """Class probabilities of every input.

    Attributes
    ----------
    proba : (N, C) array
    mutual_information : (N,) array
        Between label and view, in nats: the disagreement of the views (:func:`view_information`). It is 0 where all
        agree, and at most the entropy.
    classes : (C,) array
        What the columns stand for.
    ids, passes : (N,) arrays, optional
        As in :class:`ContinuousPrediction`.
    """

    proba: Array
    mutual_information: Array
    classes: Array

    @classmethod
    def pool(cls, parts: Sequence[CategoricalPrediction], shares: Array) -> CategoricalPrediction:
        """The average of several distributions of the same inputs, with shares (N, M).

        The entropy given member and view is the average of the members' entropies given the view.
        """
        proba, left_open = np.zeros(parts[0].proba.shape), np.zeros(len(shares))
        for share, part in zip(shares.T, parts, strict=True):
            proba += share[:, None] * part.proba
            left_open += share * (part.entropy - part.mutual_information)
        return cls(proba, np.maximum(entropy(proba) - left_open, 0), parts[0].classes)

    @property
    def label(self) -> Array:
        """The most probable class of every input: (N,)."""
        return np.asarray(self.classes[self.proba.argmax(axis=1)])

    @property
    def entropy(self) -> Array:
        """Entropy of the class probabilities in nats: (N,)."""
        return entropy(self.proba)

    def columns(self, level: float = 0.9) -> dict[str, Array]:
        """A table with one row an input: the label, every class's probability, entropy and mutual information."""
        proba = {f"proba_{name}": self.proba[:, c] for c, name in enumerate(self.classes)}
        return {"label": self.label, **proba, "entropy": self.entropy, "mutual_information": self.mutual_information}

    def log_prob(self, y: ArrayLike) -> Array:
        """Log probability of the classes y, (N,): (N,). A Series or table is paired by id, as in other scores."""
        value = np.asarray(by_id(y, self.ids, "y", "the prediction"))
        if value.shape != self.proba.shape[:1]:
            raise ValueError(f"y must be ({len(self.proba)},), one class an input; got shape {value.shape}")
        position = class_positions(value, self.proba.shape[1], self.classes)
        return np.log(np.maximum(self.proba[np.arange(len(value)), position], np.finfo(np.float64).tiny))


@dataclass(frozen=True, eq=False, repr=False)
class MultiLabelPrediction(_OfInputs):
    """Probabilities of C labels of which an input may have any number.

    Attributes
    ----------
    proba, mutual_information : (N, C) arrays
        Probability that the input has the label, and the disagreement of the views about it in nats.
    classes : (C,) array
    ids : (N,) array, optional
    """

    proba: Array
    mutual_information: Array
    classes: Array

    @property
    def label(self) -> Array:
        """Which labels are more probable than not: (N, C)."""
        return np.asarray(self.proba > 0.5)

    @property
    def entropy(self) -> Array:
        """Entropy of every label in nats: (N, C)."""
        return np.asarray(special.entr(self.proba) + special.entr(1 - self.proba))

    def columns(self, level: float = 0.9) -> dict[str, Array]:
        """A table with one row an input: every label's probability."""
        return {f"proba_{name}": self.proba[:, c] for c, name in enumerate(self.classes)}


Prediction = ContinuousPrediction | CategoricalPrediction


def merge(parts: Sequence[tuple[Array | slice, Prediction]], n_inputs: int) -> Prediction:
    """One prediction from those of several models for disjoint rows that are all of `n_inputs`."""
    # Numbers become mixtures of all models' components; those of other rows' models have weight 0.
    classes = [(rows, part) for rows, part in parts if isinstance(part, CategoricalPrediction)]
    if classes:
        proba, information = np.empty((n_inputs, classes[0][1].proba.shape[1])), np.empty(n_inputs)
        for rows, part in classes:
            proba[rows], information[rows] = part.proba, part.mutual_information
        return CategoricalPrediction(proba, information, classes[0][1].classes)
    mixtures = [(rows, part) for rows, part in parts if isinstance(part, ContinuousPrediction)]
    dof = np.concatenate([mixture.dof for _, mixture in mixtures])
    n_outputs = mixtures[0][1].location.shape[2]
    weights, location = np.zeros((n_inputs, len(dof))), np.zeros((n_inputs, len(dof), n_outputs))
    scale = np.tile(np.eye(n_outputs), (n_inputs, len(dof), 1, 1))
    start = 0
    for rows, mixture in mixtures:
        own = slice(start, start + len(mixture.dof))
        weights[rows, own], location[rows, own], scale[rows, own] = mixture.weights, mixture.location, mixture.scale
        start = own.stop
    return ContinuousPrediction(weights, dof, location, scale)


def draw_positions(generator: np.random.Generator, proba: Array) -> Array:
    """A draw of every row of probabilities (N, C): positions (N,)."""
    above = generator.random(len(proba))[:, None] > np.cumsum(proba, axis=1)
    return np.asarray(np.minimum(above.sum(axis=1), proba.shape[1] - 1))


def entropy(proba: Array) -> Array:
    """Entropy in nats along the last axis; zero probabilities contribute nothing."""
    log_proba = np.log(np.maximum(proba, np.finfo(np.float64).tiny))
    return np.asarray(0.0 - np.vecdot(proba, log_proba))  # far faster than SciPy's entr; never -0.0


def view_information(proba: Array, shares: Array) -> Array:
    """Mutual information of class and view in nats, between 0 and the entropy of the class: (N,).

    The class has probabilities (N, C); given the class, a view has its share (N, K, C) in a mixture, w_k p_k(c). Of any
    other pool than a mixture this is the views' disagreement about what the pool leaves open.
    """
    tiny = np.finfo(np.float64).tiny
    joint = shares * (proba / np.maximum(shares.sum(axis=1), tiny))[:, None]
    by_view = np.where(joint > 0, joint / np.maximum(joint.sum(axis=2, keepdims=True), tiny), 1.0)  # P(c | k)
    left_open = -(joint * np.log(by_view)).sum(axis=(1, 2))
    return np.asarray(np.maximum(entropy(proba) - left_open, 0))


def variance_factor(dof: Array) -> Array:
    """Covariance over scale, d/(d - 2): (K,); 1 for a normal."""
    finite = np.where(np.isinf(dof), 3.0, dof)
    return np.where(np.isinf(dof), 1.0, finite / (finite - 2))
