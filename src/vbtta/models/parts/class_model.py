"""What the models of class labels share: their options, and an EM problem with label noise and first temperatures."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from vbtta._support.checks import one_of, positive
from vbtta.data.labels import Array
from vbtta.inference.em import EM, Problem, ascend
from vbtta.models.base import Model, Posterior, Source
from vbtta.models.parts import calibration
from vbtta.models.parts.annotators import LabelFacts
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks, CategoricalData
from vbtta.models.parts.label_noise import NOISES, FittedNoise, NoiseModel, NoiseSums, default_noise
from vbtta.models.parts.links import LINKS

MAX_START_INSTANCES = 2_000  # on which the first temperatures are chosen
_COARSE_INSTANCES, _COARSE = 4_000, EM(tol=1e-5, max_steps=100)  # on which a fit to many more is prepared


@dataclass(frozen=True, kw_only=True)
class ClassModel(Model):
    """Options of every model of class labels."""

    link: str = "softmax"
    noise: str | None = None
    difficulty: bool | None = None
    kappa_scale: float = 0.4
    offset_scale: float = 0.1
    confusion_prior: tuple[float, float] = (8.5, 4.5)
    accuracy_prior: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        one_of("link", self.link, tuple(LINKS))
        one_of("noise", self.noise, (None, *NOISES))
        one_of("difficulty", self.difficulty, (None, True, False))
        if self.difficulty and self.noise == "none":
            raise ValueError("difficulty=True needs a noise model; noise is 'none'")
        positive(kappa_scale=self.kappa_scale, offset_scale=self.offset_scale or None)
        for name in ("confusion_prior", "accuracy_prior"):
            prior = getattr(self, name)
            if prior is not None and len(prior) != 2:
                raise ValueError(f"{name} must be two numbers; got {prior}")
            for value in prior or ():
                positive(**{name: value})

    def resolve(self, labels: LabelFacts) -> Self:
        """Decide the noise, and whether item difficulty can be told from it: where instances have several labels."""
        soft = getattr(labels, "soft", False)  # probabilities say how certain a label is
        noise = self.noise or ("none" if soft else default_noise(labels))
        possible = labels.overlap and noise != "none"
        return replace(self, noise=noise, difficulty=self.difficulty if possible or self.difficulty else False)

    def with_noise_of(self, raw: Posterior) -> Self:
        """The model with the accuracy of single labels that the raw network infers as its prior.

        Views that fit few labels take wrong ones for evidence against each other, so that no noise remains; the raw
        network cannot.
        """
        noise: FittedNoise | None = getattr(raw, "noise", None)
        if noise is None or self.noise != "uniform" or self.accuracy_prior is not None:
            return self
        right, wrong = noise.counts[0].tolist()
        return replace(self, accuracy_prior=(right, wrong))

    def without_difficulty(self) -> Self:
        """The model for an engine that has no item difficulty."""
        if self.difficulty:
            raise ValueError("difficulty=True needs engine='em'; leave it out for ADVI")
        return replace(self, difficulty=False)

    def noise_model(self, n_classes: int, *, named: bool = False) -> NoiseModel | None:
        """The noise model of the resolved options; `named` says whether labels name their annotators."""
        assert self.noise is not None
        kind = NOISES[self.noise]
        if kind is None:
            return None
        accuracy = self.accuracy_prior or kind.accuracy_prior
        prior = kind.prior(n_classes, self.confusion_prior, accuracy)
        named, difficulty = named and kind.per_annotator, self.difficulty is not False
        return NoiseModel(self.noise, prior, n_classes, accuracy, named, difficulty)

    def lay_out(self, source: Source) -> tuple[CategoricalBlocks, NoiseModel | None]:
        """Labelled instances as the link wants them, and the noise model."""
        assert self.noise is not None
        link = LINKS[self.link]
        data = source.categorical(noise=self.noise, with_variance=link.uses_variance, classes_last=link.classes_last)
        return data, self.noise_model(data.n_classes, named=source.named)


class _State(Protocol):
    @property
    def noise(self) -> FittedNoise | None: ...


class _Sums(Protocol):
    @property
    def log_evidence(self) -> Array: ...


StateT = TypeVar("StateT", bound=_State)
SumsT = TypeVar("SumsT", bound=_Sums)
BlockPass = Callable[[CategoricalBlock, Array | None], tuple[SumsT, Array | None]]


class Statistics(NamedTuple, Generic[SumsT]):
    """Result of a pass over the data."""

    sums: SumsT
    noise: FittedNoise | None  # the next Q of the noise
    bound: float


@dataclass(frozen=True, eq=False)
class ClassProblem(Problem[StateT, Statistics[SumsT], Posterior], Generic[StateT, SumsT]):
    """Data and noise model of class labels; derived classes add weights, calibration and their priors."""

    data: CategoricalBlocks
    noise: NoiseModel | None
    newton: ClassVar[bool] = True
    common_start: ClassVar[bool] = False  # whether all ln kappa_k start from one value
    _last: dict[str, tuple[StateT, Statistics[SumsT]]] = field(default_factory=dict, init=False, repr=False)

    def evaluate(self, state: StateT) -> tuple[float, Statistics[SumsT]]:
        """Bound and statistics at a state: one pass, unless it is the last evaluated state."""
        last = self._last.get("evaluation")
        if last is not None and last[0] is state:
            return last[1].bound, last[1]
        block_pass = self._block_pass(state)
        read = None if state.noise is None else state.noise.reader()
        difficulty = self.noise is not None and self.noise.difficulty

        def block_statistics(block: CategoricalBlock) -> tuple[SumsT, NoiseSums | None]:
            """Serialised to workers: captures nothing else."""
            reading = None if read is None else read(block.looked_at if difficulty else block.table)
            sums, truth = block_pass(block, None if reading is None else reading.log_evidence)
            return sums, None if reading is None or truth is None else reading.sums(truth)

        sums, counts = self.data.total(block_statistics)
        noise = None if state.noise is None or counts is None else state.noise.update(counts)
        bound = float(sums.log_evidence) - sum(self._penalties(state).values())
        statistics = Statistics(sums, noise, bound)
        self._last["evaluation"] = state, statistics
        return bound, statistics

    def bound_terms(self, state: StateT, statistics: Statistics[SumsT]) -> dict[str, float]:
        """The bound, term by term: J_S minus the rest."""
        return {"J_S": float(statistics.sums.log_evidence), **self._penalties(state)}

    def first_acceptable(self, candidates: Iterable[StateT], statistics: Statistics[SumsT]) -> StateT | None:
        """The first candidate whose bound is not lower."""
        least = statistics.bound - 1e-13 * abs(statistics.bound)
        return next((state for state in candidates if self.evaluate(state)[0] >= least), None)

    def start_log_kappa(self, first: StateT) -> Array:
        """Where to start ln kappa_k: 0, or for wide logits the candidate of the highest bound, on a subsample."""
        data = self.data
        if data.widest.max() <= calibration.WIDE:
            return np.zeros(data.n_views)
        if data.n_instances > MAX_START_INSTANCES or not isinstance(data, CategoricalData):
            places = np.linspace(0, data.n_instances - 1, min(MAX_START_INSTANCES, data.n_instances)).astype(int)
            subsample, state = self._on_subsample(places)
            return subsample.start_log_kappa(state)
        candidates = calibration.starts(np.median(data.whole.ranges, axis=0), common=self.common_start)
        if len(candidates) == 1:
            return candidates[0]
        return max(candidates, key=lambda log_kappa: self.evaluate(self._scaled(first, log_kappa))[0])

    def coarse_start(self, first: StateT) -> StateT:
        """Where to start from: with very many instances the optimum of some of them."""
        n_instances = self.data.n_instances
        if n_instances < 2 * _COARSE_INSTANCES:
            return first
        subsample, _ = self._on_subsample(np.linspace(0, n_instances - 1, _COARSE_INSTANCES).astype(int))
        state: StateT = ascend(subsample, first, _COARSE).state
        return state

    @abstractmethod
    def _block_pass(self, state: StateT) -> BlockPass[SumsT]:
        """Sums over a block and, with evidence of the labels (n, C), the posterior of the true classes (n, C)."""

    @abstractmethod
    def _penalties(self, state: StateT) -> dict[str, float]:
        """Divergences of Q from its priors, and minus the log priors of what is at its mode."""

    @abstractmethod
    def _on_subsample(self, places: Array) -> tuple["ClassProblem[StateT, SumsT]", StateT]:
        """The problem of some labelled instances and its first state."""

    @abstractmethod
    def _scaled(self, state: StateT, log_kappa: Array) -> StateT:
        """A first state with inverse temperatures."""
