"""Weights that depend on the input: a conditional logit on features of the views (docs/method, eqs. 25 to 28).

A fit with constant weights comes first. Its views of positive weight are those that features compare with; they keep a
positive weight, so that they are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from scipy import special

from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.em import EM, ascend, total, vanishing_weights
from vbtta.inference.laplace import PROFILE_GRID, WeightInformation, check_level, inverse_information, reach_of
from vbtta.inference.linalg import check_covariance, inverse
from vbtta.models.parts.links import class_sum, contract, log_normal

_PRELIMINARY = EM(max_steps=200, tol=1e-4, accelerate=False)  # with constant weights: a start
FeatureChoice = Literal["auto", "all", "own", "pooled", "none"] | Callable[[Array], Array] | str
_CHOICES = ("auto", "all", "own", "pooled", "none")
_NAMES = {
    "classification": ("entropy", "margin", "divergence", "agreement", "log_sum_exp"),
    "regression": ("distance", "squared_distance"),
}
_FEW_CLASSES = 48  # up to which the largest outputs are found class by class
_FLAT = 1e-6  # spread of a feature, relative to its largest value, below which it is constant
_ENTRIES = 1 << 15  # of a (K, n) array in work
_FRACTIONS = 0.5 ** np.arange(10)  # of a Newton step
_MAX_STEP = 3.0  # of b
_SCALES, _SCALE_RATE = np.geomspace(0.01, 1, 41), 2.0  # candidates for t, and the rate of its exponential prior
_DECISIVE = 5.0  # log evidence against b = 0 from which t = 1
_AVERAGED_DRAWS = 200  # of ADVI whose weights are averaged over the sample
ProblemT = TypeVar("ProblemT", bound=Any)  # of a mixture, with `gate`, `jump` and `settle_gate`
StateT = TypeVar("StateT", bound=Any)  # of such a problem, with `weights` and `slopes`


class FeatureSet(NamedTuple):
    """Which features describe a view of an input."""

    task: str
    choice: str  # built-in ones: "all", "own" (of the view and of the identity alone), "pooled" over groups, or "none"
    function: str  # "package.module:name" of a user's own, or empty
    given: tuple[str, ...]  # names of those that the predictions hold
    spread: bool  # whether the spread over draws is one
    unit: Annotated[Array, "C|1"]  # of the outputs, in a regression
    reference: tuple[str, ...]  # views that a view is compared with; none: with itself

    @classmethod
    def of(
        cls, choice: FeatureChoice, predictions: ViewPredictions, task: str, unit: Array, weights: Array
    ) -> "FeatureSet":
        """The features of a model's option and of the calibration predictions, given constant weights (K,)."""
        function = "" if choice in _CHOICES else _name_of(choice)
        chosen = "all" if function or choice == "auto" else str(choice)
        if chosen == "none" and not predictions.feature_names:
            raise ValueError("features='none' needs ViewPredictions(features=...); give them, or leave it out")
        spread = task == "regression" and chosen != "none" and predictions.variance is not None
        names = zip(predictions.names, weights > 0, strict=True)
        used = tuple(name for name, positive in names if (positive if chosen == "all" else name == "identity"))
        used = () if chosen == "none" else used
        return cls(task, chosen, function, predictions.feature_names, spread, unit, used)

    def names(self, size: int) -> tuple[str, ...]:
        """Names of all features, `size` in number."""
        names = [*(() if self.choice == "none" else _NAMES[self.task]), *(["spread"] if self.spread else [])]
        own = [f"{self.function.partition(':')[2]}_{place}" for place in range(size - len(names) - len(self.given))]
        return (*names, *own, *self.given)

    def places(self, names: Sequence[str]) -> list[int]:
        """Positions of the reference among views."""
        return [place for place, name in enumerate(names) if name in self.reference]

    def raw(self, predictions: ViewPredictions) -> Array:
        """Features (n, K, F) of the views that the predictions hold."""
        outputs, parts = predictions.outputs, []
        if self.choice != "none":
            places, step = self.places(predictions.names), max(1, 4 * _ENTRIES // max(outputs[:1].size, 1))
            classes = self.task == "classification"
            single = classes and outputs.itemsize <= 4 and max(outputs.max(initial=0), -outputs.min(initial=0)) < 1e30
            precision = np.float32 if single else np.float64
            order: Any = "F" if classes and outputs.shape[2] <= _FEW_CLASSES else "C"  # inner loops over instances
            features = np.empty((*outputs.shape[:2], len(_NAMES[self.task])), order="F")
            for first in range(0, len(outputs), step):
                block = np.array(outputs[first : first + step], precision, order=order)
                features[first : first + step] = built_in(np, self.task, block, self.unit, places)
            parts.append(features)
        if self.spread:
            if predictions.variance is None:
                raise ValueError("the weights depend on the spread over draws: predictions need a variance")
            parts.append(np.sqrt((predictions.variance / self.unit**2).sum(axis=2))[:, :, None])
        if self.function:
            values = np.asarray(_load(self.function)(np.asarray(outputs, dtype=np.float64)), dtype=np.float64)
            if values.shape[:2] != outputs.shape[:2] or values.ndim != 3 or not np.isfinite(values).all():
                raise ValueError(
                    f"features={self.function!r} must return finite numbers, (n, K, F) for outputs of shape "
                    f"{outputs.shape}; got shape {values.shape}"
                )
            parts.append(values)
        missing = [name for name in self.given if name not in predictions.feature_names]
        if missing:
            raise ValueError(f"the policy needs the features {missing}: ViewPredictions(features=...), as in the fit")
        if self.given and predictions.features is not None:
            parts.append(predictions.features[:, :, [predictions.feature_names.index(name) for name in self.given]])
        raw = parts[0] if len(parts) == 1 else np.concatenate(parts or [outputs[:, :, :0]], axis=2)
        if self.choice != "pooled":
            return raw
        if predictions.groups is None:
            raise ValueError("the weights depend on averages over groups; give ViewPredictions(groups=...)")
        _, place = np.unique(predictions.groups, return_inverse=True)
        sums = np.zeros((place.max(initial=-1) + 1, *raw.shape[1:]))
        np.add.at(sums, place, raw)
        return np.asarray(sums[place] / np.bincount(place)[place, None, None])


def built_in(xp: ModuleType, task: str, outputs: Any, unit: Any, places: list[int]) -> Any:
    """Built-in features (n, K, F) of outputs (n, K, C), with NumPy or with torch, whose operations can be exported.

    Views are compared with the mean, in a regression the median, of those at `places`, or where there are none with
    themselves.
    """
    if task == "regression":
        outputs = reference = outputs / unit
        if places:
            ordered, half = xp.sort(outputs[:, places], 1), len(places) // 2
            ordered = getattr(ordered, "values", ordered)  # torch returns positions too
            reference = 0.5 * (ordered[:, half : half + 1] + ordered[:, len(places) - 1 - half :][:, :1])
        square = ((outputs - reference) ** 2).sum(-1)
        return xp.stack([xp.sqrt(square), square], -1)
    largest, second = _two_largest(xp, outputs)
    logits = outputs - largest[..., None]
    power = xp.exp(logits)
    total = class_sum(power.T).T if xp is np else power.sum(-1)
    log_total, reference = xp.log(total), power / total[..., None] if not places else None
    if reference is None:
        used = power if len(places) == power.shape[1] else power[:, places]
        share = 1 / (total[:, places] * len(places))
        reference = contract("ckn,kn->cn", used.T, share.T).T.astype(power.dtype) if xp is np else share[:, None] @ used
        reference = reference.reshape(-1, 1, power.shape[2])
    entropy = log_total - _dot(xp, power, logits) / total
    features = [
        entropy,
        (1 - xp.exp(second - largest)) / total,
        -entropy - _dot(xp, power, xp.log(reference + 1e-30)) / total,
        _dot(xp, power, reference) / total,
        np.add(largest, log_total, dtype=np.float64) if xp is np else largest + log_total,  # may be large
    ]
    return np.stack([values.T for values in features]).T if xp is np else xp.stack(features, -1)


def _two_largest(xp: ModuleType, outputs: Any) -> Any:
    """The two largest of the classes' outputs (n, K, C): (n, K) each."""
    if xp is not np:
        largest, place = outputs.max(-1, keepdim=True)
        return largest[..., 0], outputs.scatter(-1, place, -float("inf")).amax(-1)  # topk is slow
    if outputs.shape[2] <= _FEW_CLASSES:  # reductions over a short last axis are slow
        largest, *others = outputs.transpose(2, 0, 1)
        second = np.full_like(largest, -np.inf)
        for values in others:
            second, largest = np.maximum(second, np.minimum(largest, values)), np.maximum(largest, values)
        return largest, second
    place, rest = outputs.argmax(axis=2)[:, :, None], outputs.copy()  # faster than max
    np.put_along_axis(rest, place, -np.inf, axis=2)
    following = rest.argmax(axis=2)[:, :, None]
    return (np.take_along_axis(outputs, position, axis=2)[:, :, 0] for position in (place, following))


def _dot(xp: ModuleType, left: Any, right: Any) -> Any:
    """Sums (n, K) over classes of products, without the array of products where NumPy can."""
    if xp is np and left.strides[0] < left.strides[2]:
        return np.einsum("nkc,nkc->nk", left, right)
    return np.vecdot(left, right) if xp is np else (left * right).sum(-1)


def gated(xp: ModuleType, raw: Any, limits: Any, slopes: Any, log_weights: Any) -> Any:
    """Weights (n, K) of raw features (n, K, F) from the tables of a gate."""
    clipped = xp.minimum(xp.maximum(raw, limits[0]), limits[1]) - limits[0]
    score = log_weights + (np.tensordot(slopes, clipped.T, 1).T if xp is np else clipped @ slopes)
    score = xp.exp(score - xp.amax(score, -1)[:, None])
    return score / score.sum(-1)[:, None]


class Gate(NamedTuple):
    """Fitted weights that depend on the input.

    Attributes
    ----------
    names : F strings
        The features.
    coefficients : (F,) array
        b: how much a standard deviation of a feature adds to the logarithm of a view's weight; 0 for a feature that is
        constant, or a constant for every view.
    prior_scale : float
        t, the prior standard deviation of the coefficients.
    weights : (K,) array
        Base weights of the fitted views, those where all features are equal.
    scale : (F,) array
        Standard deviations of the features; 0 for constants.
    limits : (2, F) array
        Range on the calibration sample, to which features are clipped.
    """

    names: tuple[str, ...]
    coefficients: Annotated[Array, "F"]
    prior_scale: float
    centre: Annotated[Array, "F"] | None  # of the intervals
    covariance: Annotated[Array, "F F", check_covariance] | None
    weights: Annotated[Array, "K"]
    scale: Annotated[Array, "F"]
    limits: Annotated[Array, "2 F"]
    features: FeatureSet
    n_groups: int  # of the calibration sample; 0 where its inputs are independent

    def interval(self, level: float = 0.9) -> Array:
        """Intervals (F, 2) of the coefficients at a level; they hold the estimate too.

        By EM they are a Laplace approximation with t = 1: t is itself an estimate, and shrunken intervals would miss.
        By ADVI they come from Q.
        """
        check_level(level, known=self.covariance is not None)
        assert self.covariance is not None
        assert self.centre is not None
        reach = reach_of(level, self.n_groups) * np.sqrt(np.diagonal(self.covariance))
        lower, upper = self.centre - reach, self.centre + reach
        return np.stack([np.minimum(lower, self.coefficients), np.maximum(upper, self.coefficients)], axis=1)

    def tables(self) -> dict[str, Array]:
        """Arrays that give the weights: limits (2, F), coefficients in the features' units (F,), log weights (K,)."""
        slopes, log_weights = self.coefficients * _inverse(self.scale), np.log(self.weights[self.weights > 0])
        return {"limits": self.limits, "slopes": slopes, "log_weights": log_weights}

    def weights_for(self, predictions: ViewPredictions) -> Array:
        """Weights (n, K) of inputs whose views are those of positive base weight, in order."""
        return np.asarray(gated(np, self.features.raw(predictions), **self.tables()))

    def by_rows(self, predictions: ViewPredictions) -> Callable[[slice], Array]:
        """The same for parts of the rows, as they are asked for."""
        if self.features.choice == "pooled":
            weights = self.weights_for(predictions)
            return lambda rows: np.asarray(weights[rows])
        return lambda rows: self.weights_for(predictions.take(rows))

    def keep(self, views: Array) -> "Gate":
        """The same with only some of the views."""
        return self._replace(weights=self.weights[views] / self.weights[views].sum())

    def check_built_in(self) -> None:
        """Refuse features that a network cannot compute."""
        own = [*self.features.given, *([self.features.function] if self.features.function else [])]
        if own or self.features.spread:
            needed = own or "the spread over draws"
            raise ValueError(
                f"a module computes built-in features only; the weights depend on {needed}: fit without, as by "
                "fit_policy(..., model='mixture'), or predict with Policy.predict(ViewPredictions(...))"
            )


class Lookup(NamedTuple):
    """A gate at the labelled instances."""

    offset: Array  # (K, N): ln w_ik - ln v_k
    factor: Array  # (K, N): w_ik / v_k
    log_norm: Array  # (N,): ln sum_k v_k exp(b . phi_ik)
    values: Array  # (F, K, N): phi

    def rows(self, rows: slice | Array) -> "Lookup":
        """Some of the instances."""
        return Lookup(self.offset[:, rows], self.factor[:, rows], self.log_norm[rows], self.values[:, :, rows])


@dataclass(frozen=True, eq=False)
class GateData:
    """The calibration sample as a gate sees it."""

    features: FeatureSet
    count: Array  # (N,): labels of every instance, or with a noise model its weight
    values: Array  # (F, K, N): standardised features
    scale: Array  # (F,)
    limits: Array  # (2, F)
    required: Array  # (K,): views that features compare with
    prior_scale: float = 1.0  # t
    decisive: bool = True  # whether the evidence against b = 0 is
    _last: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        predictions: ViewPredictions,
        labels: LabelSets,
        choice: FeatureChoice,
        weights: Array,
        *,
        shared: bool,
        unit: Array | None,
    ) -> "GateData":
        """Aligned data and constant weights (K,).

        Labels of an instance share a view where a noise model does; `unit` (C,) is that of the outputs in a regression.
        """
        rows, instance = np.unique(labels.instance, return_inverse=True)
        importance = np.ones(len(rows)) if labels.instance_weights is None else labels.instance_weights[rows]
        count: Array = np.bincount(instance, labels.count)
        if shared:
            count = importance if unit is None else np.ones(len(rows))
        task, unit = ("classification", np.ones(1)) if unit is None else ("regression", unit)
        features = FeatureSet.of(choice, predictions, task, unit, weights)
        labelled = predictions if len(rows) == len(predictions) else predictions.take(rows)
        values = np.array(features.raw(labelled).transpose(2, 1, 0), order="C")  # (F, K, n)
        limits = np.stack([values.min(axis=(1, 2)), values.max(axis=(1, 2))])
        centred = values - values.mean(axis=1, keepdims=True)
        share = importance / importance.sum()
        centred -= (centred @ share)[:, :, None]
        scale = np.sqrt(np.square(centred, out=centred).mean(axis=1) @ share)
        n_built_in = len(_NAMES[task]) if features.choice != "none" else 0
        least = (task == "classification") * (np.arange(len(values)) < n_built_in)  # in nats
        scale[scale <= _FLAT * np.maximum(np.abs(limits).max(axis=0), least)] = 0
        values -= limits[0][:, None, None]
        values *= _inverse(scale)[:, None, None]
        required = np.isin(np.arange(len(weights)), features.places(predictions.names))
        return cls(features, count, values, scale, limits, required)

    @property
    def n_features(self) -> int:
        """F."""
        return len(self.scale)

    def with_prior(self, scale: float | None, gradient: Array, information: Array) -> "GateData":
        """The same with a prior scale t; where it is None that of largest evidence times prior density (eq. 27)."""
        if scale is None:
            values, vectors = np.linalg.eigh(information)
            square = _SCALES[:, None] ** 2 * np.maximum(values, 0)
            gain = _SCALES[:, None] ** 2 * (vectors.T @ gradient) ** 2 / (1 + square) - np.log1p(square)
            value = 0.5 * gain.sum(axis=1) - _SCALE_RATE * _SCALES
            scale = 1.0 if value.max() > _DECISIVE else float(_SCALES[np.argmax(value)])
            return replace(self, prior_scale=scale, decisive=bool(value.max() > _DECISIVE))
        return replace(self, prior_scale=scale)

    def positive(self, weights: Array) -> Array:
        """Base weights with required views above zero."""
        return _simplex(np.where(self.required, np.maximum(weights, 1e-280), weights), np.zeros(len(weights)))

    def trimmed(self, weights: Array, slopes: Array) -> list[Array]:
        """Base weights with vanishing ones at zero, most zeros first; required views stay."""
        averages = np.where(self.required, 1.0, self.average(weights, slopes))
        return [_simplex(np.where(kept > 0, weights, 0), np.zeros(len(kept))) for kept in vanishing_weights(averages)]

    def lookup(self, weights: Array, slopes: Array) -> Lookup:
        """Weights of all instances at base weights v and coefficients b."""
        last = self._last.get("lookup")
        if last is not None and last[0] is weights and last[1] is slopes:
            result: Lookup = last[2]
            return result
        score, used = np.einsum("fkn,f->kn", self.values, slopes), weights > 0
        top = score[used].max(axis=0)
        log_norm = top + np.log(weights[used] @ np.exp(score[used] - top))
        result = Lookup(score - log_norm, np.exp(score - log_norm), log_norm, self.values)
        self._last["lookup"] = weights, slopes, result
        return result

    def average(self, weights: Array, slopes: Array) -> Array:
        """Weights averaged over the calibration sample: (K,)."""
        average = weights * (self.lookup(weights, slopes).factor @ self.count) / self.count.sum()
        return np.where(weights > 0, np.maximum(average, 1e-300), 0)  # zero for unused views alone

    def expected_log_weight(self, weights: Array, slopes: Array, mass: Array, feature_mass: Array) -> float:
        """Sum over instances and views of r_ik ln w_ik, from sums of r_ik (K,) and of r_ik phi_ik (F,)."""
        linear = special.xlogy(mass, weights).sum() + feature_mass @ slopes
        return float(linear - self.count @ self.lookup(weights, slopes).log_norm)

    def log_prior(self, slopes: Array) -> float:
        """Log density of b."""
        return log_normal(slopes, self.prior_scale)

    def update(self, weights: Array, slopes: Array, mass: Array, feature_mass: Array) -> tuple[Array, Array]:
        """Base weights and coefficients that do not lower eq. 26: a Newton step, halved until it gains.

        The gradient in ln v_k is replaced by ln(sum_i r_ik / sum_i w_ik), so that weights shrink to zero as fast as
        without a gate.
        """
        K, used = len(weights), weights > 0

        def value(weights: Array, slopes: Array) -> float:
            return self.expected_log_weight(weights, slopes, mass, feature_mass) + self.log_prior(slopes)

        expected, expected_features, curvature = self.moments(weights, slopes)
        log_factor = np.zeros(K)
        log_factor[used] = np.log(np.maximum(mass[used], 1e-300) / np.maximum(expected[used], 1e-300))
        pull = slopes / self.prior_scale**2
        gradient = np.concatenate([expected * log_factor, feature_mass - expected_features - pull])
        curvature[K:, K:] += np.eye(len(slopes)) / self.prior_scale**2
        curvature[:K, :K] += self.count.sum() * np.outer(weights, weights)  # a common factor of v changes nothing
        size = np.sqrt(np.maximum(np.diagonal(curvature), 1e-280))
        scaled = curvature / np.outer(size, size) + 1e-9 * np.eye(len(size))
        step = np.linalg.solve(scaled, gradient / size) / size
        step[K:] /= max(1.0, np.abs(step[K:]).max(initial=0) / _MAX_STEP)
        least = value(weights, slopes)
        least -= 1e-13 * abs(least)
        for fraction in _FRACTIONS.tolist():
            moved = _simplex(weights, np.clip(fraction * step[:K], -50, 50)), slopes + fraction * step[K:]
            if value(*moved) >= least:
                return moved
        return _simplex(weights, log_factor), slopes

    def moments(self, weights: Array, slopes: Array) -> tuple[Array, Array, Array]:
        """Sums of w_ik (K,) and of w_ik phi_ik (F,), and the covariances under w of views and features, summed."""
        _, factor, _, values = self.lookup(weights, slopes)
        K = len(weights)
        step = max(1, _ENTRIES // K)

        def part_moments(part: slice) -> tuple[Array, Array, Array]:
            share, phi, count = weights[:, None] * factor[:, part], values[:, :, part], self.count[part]
            counted = share * count
            mean = np.einsum("kn,fkn->fn", share, phi)
            root = (phi * np.sqrt(counted)).reshape(len(phi), -1)
            cross = np.einsum("kn,fkn->kf", counted, phi)
            covariance = np.empty((K + len(phi), K + len(phi)))
            covariance[:K, :K] = np.diag(counted.sum(axis=1)) - counted @ share.T
            covariance[:K, K:] = cross - counted @ mean.T
            covariance[K:, :K] = covariance[:K, K:].T
            covariance[K:, K:] = root @ root.T - (mean * count) @ mean.T
            return counted.sum(axis=1), cross.sum(axis=0), covariance

        starts = range(0, len(self.count), step)
        return total(part_moments, [slice(first, min(first + step, len(self.count))) for first in starts])

    def gate(self, weights: Array, slopes: Array) -> Gate:
        """What remains when the data are gone, without intervals."""
        names, last = self.features.names(len(slopes)), (self.scale, self.limits, self.features, 0)
        return Gate(names, slopes, self.prior_scale, None, None, weights, *last)

    def finish(self, weights: Array, slopes: Array, known: WeightInformation) -> tuple[Gate, WeightInformation]:
        """The gate with intervals of b, and the information on the average weights (eq. 28), from that on (ln v, b).

        The prior of b is that of t = 1; the gradient of the likelihood at the mode is b / t^2.
        """
        K, n = len(weights), float(self.count.sum())
        prior = np.eye(K + len(slopes))
        prior[:K, :K] = n * np.outer(weights, weights) + np.diag(np.where(weights > 0, 1e-6, 1.0))
        covariance = inverse(known.information + prior)
        centre = slopes + covariance[K:, K:] @ (slopes / self.prior_scale**2 - slopes)
        slope = self.moments(weights, slopes)[2][:K] / n  # of the average weights in (ln v, b)
        if known.clustered is not None:
            covariance = covariance @ (known.clustered + prior) @ covariance
        of_average = slope @ covariance @ slope.T
        known = inverse_information(self.average(weights, slopes), of_average, known.profile, known.n_groups)
        gate = self.gate(weights, slopes)
        return gate._replace(centre=centre, covariance=covariance[K:, K:], n_groups=known.n_groups), known

    def sampled(self, weights: Array, slopes: Array) -> tuple[Gate, WeightInformation]:
        """The same from draws of base weights (M, K) and coefficients (M, F)."""
        few = slice(None, None, max(1, len(weights) // _AVERAGED_DRAWS))
        averages = np.array([self.average(v, b) for v, b in zip(weights[few], slopes[few], strict=True)])
        centre, slope, K = weights.mean(axis=0), slopes.mean(axis=0), weights.shape[1]
        covariance = np.atleast_2d(np.cov(averages.T))
        known = inverse_information(self.average(centre, slope), covariance, np.zeros((K, len(PROFILE_GRID))))
        return self.gate(centre, slope)._replace(centre=slope, covariance=np.atleast_2d(np.cov(slopes.T))), known


def with_gate(
    problem: ProblemT, first: StateT, before: Gate | None, features: Callable[[Array], GateData], scale: float | None,
    *, fitted: bool, resumed: bool,
) -> tuple[ProblemT, StateT]:  # fmt: skip
    """The problem with a gate, whose first update is the fit with constant weights, and its first state.

    `features` are those for constant weights. A fit that is `resumed` starts from another one; where that was `fitted`
    to the same views by the same model, `before` is its gate, if it has one.
    """
    constant = first if fitted else ascend(problem, first, _PRELIMINARY).state
    gate = features(constant.weights)
    slopes = np.zeros(gate.n_features)
    if before is not None and len(before.coefficients) == len(slopes):
        gate = replace(gate, prior_scale=before.prior_scale)
        first = first._replace(weights=gate.positive(before.weights), slopes=before.coefficients)
        return replace(problem, gate=gate), first
    constant = constant._replace(weights=gate.positive(constant.weights), slopes=slopes)
    first = first._replace(slopes=slopes)
    gated = replace(problem, gate=gate, jump=None if resumed else (first, constant))
    return gated.settle_gate(constant, scale), constant if resumed else first


def weight_scores(lookup: Lookup, weights: Array, share: Array) -> Array:
    """Derivatives (K + F, n) of every unit's log likelihood in (ln v, b), from the views' responsibilities (K, n)."""
    excess = share - weights[:, None] * lookup.factor
    return np.concatenate([excess, np.einsum("kn,fkn->fn", excess, lookup.values)])


def check_weights(weights: str, concentration: float | None, choice: FeatureChoice) -> None:
    """Refuse options that do not go with a kind of weights, and what names no features."""
    if concentration is not None and weights != "view":
        remedy = "use class_concentration" if weights == "view_class" else "leave it out"
        raise ValueError(f"concentration is the prior of weights='view'; with weights={weights!r} {remedy}")
    if choice != "auto" and weights != "input":
        raise ValueError(f"features={choice!r} needs weights='input'; with weights={weights!r} leave it out")
    if choice in _CHOICES:
        return
    if isinstance(choice, str) and ":" in choice:
        _load(choice)
    elif not callable(choice):
        known = ", ".join(map(repr, _CHOICES))
        raise ValueError(f"features must be {known} or a function of the outputs; got {choice!r}")
    elif "<" in _name_of(choice):
        raise ValueError(f"features={choice!r} cannot be found by its name; define the function in a module")


def _inverse(scale: Array) -> Array:
    """One over a scale, 0 where it is 0."""
    return np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)


def _simplex(weights: Array, log_factor: Array) -> Array:
    """Weights times factors, on the simplex; positive ones stay positive."""
    moved = np.where(weights > 0, np.maximum(weights * np.exp(log_factor), 1e-280), 0)
    return np.asarray(moved / moved.sum())


def _name_of(choice: FeatureChoice) -> str:
    """A function's "package.module:name"."""
    return choice if isinstance(choice, str) else f"{choice.__module__}:{choice.__qualname__}"


def _load(name: str) -> Callable[[Array], Array]:
    """The function of a "package.module:name"."""
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(import_module(module))  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"features={name!r} cannot be imported ({error}); put its module on Python's path") from error
