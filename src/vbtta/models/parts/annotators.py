"""Annotators of continuous labels: a shared truth per instance, a bias and a precision per annotator.

Biases sum to zero; their covariance is diag(a) - a a^T / sum a, that of independent biases given their sum
(docs/method, eqs. 13 to 18a).
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from scipy import special

from vbtta._support.checks import positive, printable
from vbtta.data.labels import Array, LabelSets, frame_of
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import ContinuousPrediction, variance_factor
from vbtta.inference.em import Block
from vbtta.inference.linalg import Reader, check_positive, inverse_and_log_det, kl_gamma
from vbtta.models.parts.standard import Standard

MIN_LABEL_VARIANCE = 1e-6  # in standard units, of labels that are taken for the truth
ContinuousNoise = Literal["none", "annotator"]
ScaleChoice = Literal["prediction", "constant"]


class LabelFacts(Protocol):
    """What decides a noise model: label sets, or their counts on a cluster."""

    @property
    def overlap(self) -> bool:
        """Whether enough instances carry two labels or more."""

    @property
    def labels_per_value(self) -> float:
        """How often each of the different labels was given, on average."""

    @property
    def annotator_names(self) -> tuple[str, ...]:
        """The annotators, where they are named."""


def default_noise(noise: ContinuousNoise | None, labels: LabelFacts) -> ContinuousNoise:
    """The noise model asked for, or by default annotators where they are named and their labels overlap."""
    # Annotator noise and view noise can be told apart only where instances carry several labels: without them a noise
    # model would invent what it explains.
    if noise == "annotator" and not labels.overlap:
        reason = "hardly any instance has two labels: annotator noise and view noise cannot be told apart"
        warnings.warn(f"noise='annotator' was asked for but {reason}, and the split follows the prior", stacklevel=4)
    if noise is not None:
        return noise
    return "annotator" if labels.overlap and len(labels.annotator_names) > 1 else "none"


def check_scale(v: float | Sequence[float] | None) -> None:
    """Refuse a prior variance that is not positive."""
    for value in [] if v is None else v if isinstance(v, Sequence | np.ndarray) else [v]:
        positive(v=value)


class AnnotatorPrior(NamedTuple):
    """Hyperparameters in standard units."""

    shape: float  # a0
    rate: float  # b0
    gamma: float


class AnnotatorState(NamedTuple):
    """Q of the annotators' precisions and biases."""

    shape: Annotated[Array, "U", check_positive]
    rate: Annotated[Array, "U", check_positive]
    bias: Annotated[Array, "U C"]  # the mean of d
    free_variance: Annotated[Array, "U"]  # a, of d if biases were independent; the same for every output
    bias_variance: Annotated[Array, "U"]  # of d, whose sum is zero
    marginal_shape: Annotated[Array, "U", check_positive]  # of a Gamma as wide as tau is with the truth integrated out
    marginal_variance: Annotated[Array, "U"]  # of d, likewise

    @property
    def precision(self) -> Array:
        """E[tau_u]: (U,)."""
        return np.asarray(self.shape / self.rate)


class Truth(NamedTuple):
    """Q(t_i | z_i = k), and the log evidence of view k from the labels of i."""

    mean: Array  # (C, K, n)
    covariance: Array  # (K, n, C, C)
    log_evidence: Array  # (K, n), without the weight of the view


class AnnotatorStatistics(NamedTuple):
    """Additive sums over the labels of each annotator."""

    n_labels: Array  # (U,)
    squares: Array  # (U,): E|y - t - d-bar|^2
    residual: Array  # (U, C): y - E t
    information: Array  # (2, U): about bias and ln tau, in labels whose truth is known (docs/method, eq. 18a)


def contrasts(n_annotators: int) -> Array:
    """Orthonormal contrasts (U, U - 1): columns sum to zero."""
    U = n_annotators
    helmert = np.tril(np.ones((U, U)), -1)[1:].T - np.diag(np.arange(1.0, U), -1)[:, : U - 1]  # (U, U - 1)
    return np.asarray(helmert / np.linalg.norm(helmert, axis=0, keepdims=True))


def initialise(
    noise: ContinuousNoise | None, gamma: float, n_annotators: int, residual_variance: Array, previous: object
) -> tuple[AnnotatorPrior | None, AnnotatorState | None]:
    """Prior and first state, without biases, or `previous` if its annotators are as many; None without annotators."""
    # Where one annotator is much better than the rest, the truth follows that annotator and its noise is hardly
    # identified: with the residual variance itself as rate, the estimate is half as large again.
    if noise != "annotator":
        return None, None
    prior = AnnotatorPrior(0.5, 0.05 * float(residual_variance.mean()), gamma)
    shape, rate, free = (np.full(n_annotators, value) for value in (prior.shape, prior.rate, 1 / gamma))
    variance = _given_the_sum(free)
    bias = np.zeros((n_annotators, len(residual_variance)))
    state = AnnotatorState(shape, rate, bias, free, variance, shape, variance)
    before: AnnotatorState | None = getattr(getattr(previous, "state", None), "annotators", None)
    return prior, state if before is None or before.bias.shape != state.bias.shape else before


def _given_the_sum(free_variance: Array) -> Array:
    """Variances of independent biases given that they sum to zero: (U,)."""
    return np.asarray(free_variance * (1 - free_variance / free_variance.sum()))


def infer_truth(
    block: Block, annotators: AnnotatorState, mean: Array, precision: Array, log_precision: Array | float
) -> Truth:
    """Posterior of the truth under each view, from all labels of an instance (docs/method, eq. 15)."""
    # Views give means mu (C, K, n), precisions L (K, n or 1, C, C) and E ln|L| (K, n or 1).
    u, C, size = block.annotator, len(block.value), block.mean.shape[2]
    instance = np.arange(len(u)) if block.instance is None else block.instance
    tau = block.repeats * annotators.precision[u]  # (j,)
    shifted = block.value - annotators.bias[u].T  # (C, j): y - d
    total = np.bincount(instance, tau, size)  # (n,): s, the sum of tau
    centre = np.stack([np.bincount(instance, tau * row, size) for row in shifted]) / total  # (C, n)
    squares = ((shifted - centre[:, instance]) ** 2).sum(axis=0) + C * annotators.bias_variance[u]
    log_tau = special.digamma(annotators.shape[u]) - np.log(annotators.rate[u])
    constant = 0.5 * C * block.repeats * (log_tau - np.log(2 * np.pi)) - 0.5 * tau * squares
    covariance, log_det = inverse_and_log_det(precision + total[:, None, None] * np.eye(C))  # P^-1: (K, n, C, C)
    gap = np.moveaxis(centre[:, None] - mean, 0, -1)  # (K, n, C)
    pulled = np.einsum("kncd,knd->knc", covariance, gap) * total[:, None]  # t-bar - mu
    # s a + L mu - (s + L) t-bar = 0 leaves gap^T L P^-1 s gap, free of cancellation
    distance = np.einsum("knc,kncd,knd->kn", gap, np.broadcast_to(precision, covariance.shape), pulled)
    log_evidence = 0.5 * (log_precision - log_det - distance) + np.bincount(instance, constant, size)
    return Truth(mean + np.moveaxis(pulled, -1, 0), covariance, log_evidence)


def statistics(
    block: Block, annotators: AnnotatorState | None, truth: Truth | None, share: Array
) -> AnnotatorStatistics | None:
    """How far each annotator's labels are from the truth, under responsibilities (K, n); None without annotators."""
    if annotators is None or truth is None:
        return None
    U = len(annotators.shape)
    instance = np.arange(len(block.repeats)) if block.instance is None else block.instance
    expected = np.einsum("kn,ckn->cn", share, truth.mean)  # (C, n)
    spread = np.einsum("kn,ckn->n", share, (truth.mean - expected[:, None]) ** 2)
    spread += np.einsum("kn,kncc->n", share, truth.covariance)
    residual = block.value - expected[:, instance]  # (C, j)
    doubt = annotators.precision[block.annotator] * spread[instance] / len(residual)  # tau Var(t | all labels)
    known = np.clip(1 - doubt, 0, 1)  # (j,)
    squares = ((residual - annotators.bias[block.annotator].T) ** 2).sum(axis=0) + spread[instance]
    return AnnotatorStatistics(
        n_labels=np.bincount(block.annotator, block.repeats, U),
        squares=np.bincount(block.annotator, block.repeats * squares, U),
        residual=np.stack([np.bincount(block.annotator, block.repeats * row, U) for row in residual], axis=1),
        information=np.stack([np.bincount(block.annotator, block.repeats * row, U) for row in (known, known**2)]),
    )


def update(
    state: AnnotatorState | None, total: AnnotatorStatistics | None, prior: AnnotatorPrior | None
) -> AnnotatorState | None:
    """Precisions at the current biases, then biases at the new precisions; None without annotators."""
    if state is None or total is None or prior is None:
        return None
    n_outputs = total.residual.shape[1]
    doubt = n_outputs * total.n_labels * state.bias_variance
    shape = prior.shape + 0.5 * n_outputs * total.n_labels
    rate = prior.rate + 0.5 * (total.squares + doubt)
    precision = shape / rate
    free = 1 / (prior.gamma + total.n_labels * precision)  # (U,)
    bias = (free * precision)[:, None] * total.residual
    bias -= free[:, None] * (bias.sum(axis=0) / free.sum())
    of_bias, of_noise = total.information
    marginal = _given_the_sum(1 / (prior.gamma + of_bias * precision))
    return AnnotatorState(
        shape, rate, bias, free, _given_the_sum(free), prior.shape + 0.5 * n_outputs * of_noise, marginal
    )


def divergence(state: AnnotatorState | None, prior: AnnotatorPrior | None) -> float:
    """KL from the prior of precisions and biases; 0 without annotators."""
    if state is None or prior is None:
        return 0.0
    (U, C), free = state.bias.shape, state.free_variance
    log_det = np.log(free).sum() - np.log(free.mean()) + (U - 1) * np.log(prior.gamma)  # of the contrasts' covariance
    biases = 0.5 * C * (prior.gamma * state.bias_variance.sum() - (U - 1) - log_det)
    biases += 0.5 * prior.gamma * (state.bias**2).sum()
    return float(kl_gamma(state.shape, state.rate, prior.shape, prior.rate).sum() + biases)


def pack(state: AnnotatorState | None) -> Array:
    """Rates and biases as an unconstrained vector, empty without annotators; shapes depend on the data alone."""
    if state is None:
        return np.zeros(0)
    return np.concatenate([np.log(state.rate), state.bias.ravel(), np.log(state.free_variance)])


def unpack(take: Reader, like: AnnotatorState | None) -> AnnotatorState | None:
    """The state of a packed vector."""
    if like is None:
        return None
    U, C = like.bias.shape
    rate, bias = np.exp(np.clip(take(U), -300, 300)), take(U, C)
    free = np.exp(np.clip(take(U), -300, 300))
    return like._replace(rate=rate, bias=bias, free_variance=free, bias_variance=_given_the_sum(free))


class LabelPooling(ABC):
    """Consensus and scores of labels, for posteriors that predict numbers and may know their annotators."""

    state: Any  # of a model of continuous labels, with `annotators`: Q of them, or None
    standard: Standard

    @abstractmethod
    def predict(self, predictions: ViewPredictions) -> ContinuousPrediction:
        """The predictive distribution."""

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> ContinuousPrediction:
        """The truth of every input given its labels; `annotator` (J,) is -1 for unknown annotators.

        Without a noise model labels are as noisy as those of one instance differ; where none differ they are the truth.
        """
        people, prediction = self.state.annotators, self.predict(predictions)
        if people is None:
            people, annotator = _label_spread(labels, self.standard), np.zeros_like(annotator)
        return _pool_truth(prediction, labels, annotator, people, self.standard)[0]

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set, annotators included: (N+,)."""
        people, prediction = self.state.annotators, self.predict(predictions)
        if people is not None:
            scores = _pool_truth(prediction, labels, annotator, people, self.standard)[1]
        else:
            log_density = prediction.take(labels.instance).log_prob(labels.continuous(prediction.location.shape[2]))
            scores = np.bincount(labels.instance, labels.count * log_density, labels.n_instances)
        return np.asarray(scores[labels.labelled])

    def describe_annotators(self, names: tuple[str, ...]) -> "AnnotatorNoise | None":
        """Biases and noise levels of the annotators with their uncertainty."""
        people, unit = self.state.annotators, self.standard.scale
        if people is None:
            return None
        relative = special.gammaincinv(people.marginal_shape[:, None], [0.95, 0.05]) / people.marginal_shape[:, None]
        quantiles = people.precision[:, None] * relative  # of tau: (U, 2)
        return AnnotatorNoise(
            names,
            bias=people.bias * unit,
            bias_error=np.sqrt(people.marginal_variance)[:, None] * unit,
            noise=unit / np.sqrt(people.precision)[:, None],
            noise_interval=unit[:, None] / np.sqrt(quantiles)[:, None],
        )


def _pool_truth(
    prediction: ContinuousPrediction, labels: LabelSets, annotator: Array, people: AnnotatorState, standard: Standard
) -> tuple[ContinuousPrediction, Array]:
    """The truth's distribution from predictions and labels, and the log evidence of every input's labels (N,)."""
    # Components are taken as normals of the same covariance; an unknown annotator is unbiased and as noisy as the known
    # ones are on average.
    N, K, C = prediction.location.shape
    typical_shape = people.shape.mean()
    everybody = people._replace(
        shape=np.append(people.shape, typical_shape),
        rate=np.append(people.rate, typical_shape * (people.rate / people.shape).mean()),
        bias=np.concatenate([people.bias, np.zeros((1, C))]),
        free_variance=np.append(people.free_variance, 0.0),
        bias_variance=np.append(people.bias_variance, 0.0),
    )
    labelled = np.flatnonzero(np.bincount(labels.instance, minlength=N))
    scale = variance_factor(prediction.dof)[:, None, None] * prediction.scale
    covariance = scale[labelled] / (standard.scale[:, None] * standard.scale)  # (n, K, C, C)
    precision, log_det = inverse_and_log_det(covariance.swapaxes(0, 1))  # (K, n, C, C), (K, n)
    block = Block(
        mean=standard.apply(prediction.location[labelled]).transpose(2, 1, 0),
        variance=None,
        instance=np.searchsorted(labelled, labels.instance),
        value=standard.apply(labels.continuous(C)).T,
        repeats=labels.count,
        annotator=np.where(annotator < 0, len(people.shape), annotator),
    )
    pooled = infer_truth(block, everybody, block.mean, precision, -log_det)
    with np.errstate(divide="ignore"):
        log_share = np.log(prediction.weights)  # (N, K)
    log_share[labelled] += pooled.log_evidence.T
    location = prediction.location.copy()
    location[labelled] = standard.location + standard.scale * pooled.mean.transpose(2, 1, 0)
    scale[labelled] = standard.scale[:, None] * pooled.covariance.swapaxes(0, 1) * standard.scale
    evidence = special.logsumexp(log_share, axis=1)
    evidence -= np.bincount(labels.instance, labels.count, N) * np.log(standard.scale).sum()
    shares = special.softmax(log_share, axis=1)
    return ContinuousPrediction(shares, np.full(K, np.inf), location, scale), evidence


def _label_spread(labels: LabelSets, standard: Standard) -> AnnotatorState:
    """One annotator without bias whose variance is that of labels of the same instance."""
    value = standard.apply(labels.continuous(len(standard.scale)))  # (J, C)
    total = np.bincount(labels.instance, labels.count, labels.n_instances)
    squares = 0.0
    for column in value.T:
        mean = np.bincount(labels.instance, labels.count * column, len(total)) / np.where(total > 0, total, 1)
        squares += float(labels.count @ (column - mean[labels.instance]) ** 2)
    variance = squares / (value.shape[1] * max(np.maximum(total - 1, 0).sum(), 1))
    rate = np.array([max(variance, MIN_LABEL_VARIANCE)])
    none = np.zeros(1)
    return AnnotatorState(np.ones(1), rate, np.zeros((1, value.shape[1])), none, none, np.ones(1), none)


class AnnotatorNoise(NamedTuple):
    """Annotators of continuous labels, in the labels' units."""

    names: tuple[str, ...]
    bias: Array  # (U, C): what they add on average; biases sum to zero
    bias_error: Array  # (U, C): its standard deviation
    noise: Array  # (U, C): standard deviation of their labels around the truth
    noise_interval: Array  # (U, C, 2): 90 %

    def __repr__(self) -> str:
        return f"AnnotatorNoise({brief(self.names, self.noise.mean(axis=1))})"

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row an annotator; columns end in the output's number where there are several."""
        columns: dict[str, Array] = {}
        for c in range(self.bias.shape[1]):
            end = f"_{c}" if self.bias.shape[1] > 1 else ""
            low, high = self.noise_interval[:, c].T
            values = {"bias": self.bias[:, c], "bias_error": self.bias_error[:, c], "noise": self.noise[:, c]}
            columns |= {name + end: column for name, column in (values | {"low": low, "high": high}).items()}
        return frame_of(columns, list(self.names))


def brief(names: Sequence[str], values: Array, most: int = 4) -> str:
    """The first names with a number each, such as "3 annotators: ann 0.9, bob 0.8, ..."."""
    text = ", ".join(f"{printable(name)} {value:.3g}" for name, value in zip(names[:most], values[:most], strict=True))
    return f"{len(names)} annotator{'s' * (len(names) > 1)}: {text}{', ...' if len(names) > most else ''}"
