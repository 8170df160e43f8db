"""Options of every model of class labels, and of the mixture."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from vbtta._support.checks import one_of, positive, shown
from vbtta.models.base import Model, Posterior, Source
from vbtta.models.parts.annotators import LabelFacts
from vbtta.models.parts.class_data import CategoricalBlocks
from vbtta.models.parts.gate import FeatureChoice, check_weights
from vbtta.models.parts.label_noise import NOISES, FittedNoise, NoiseModel, default_noise
from vbtta.models.parts.links import LINKS


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
            if prior is not None and not (hasattr(prior, "__len__") and len(prior) == 2):
                raise ValueError(f"{name} must be two numbers; got {shown(prior)}")
            for value in prior or ():
                positive(**{name: value})

    def resolve(self, labels: LabelFacts) -> Self:
        """Decide the noise, and whether item difficulty can be told from it: where instances have several labels."""
        soft = getattr(labels, "soft", False)  # probabilities say how certain a label is
        noise = self.noise or ("none" if soft else default_noise(labels))
        possible = labels.overlap and noise != "none"
        return replace(self, noise=noise, difficulty=self.difficulty if possible or self.difficulty else False)

    def choices(self, labels: LabelFacts) -> tuple[Self, ...]:
        """Accuracies or confusion matrices, without and with item difficulty, where labels overlap; simplest first."""
        most = self.resolve(labels)  # the most detailed noise model that the labels allow
        if most.noise == "none" or not labels.overlap:
            return (self,)
        simple = "annotator" if len(labels.annotator_names) > 1 else "uniform"
        kinds = (most.noise,) if self.noise or most.noise == simple else (simple, most.noise)
        levels = (False, True) if self.difficulty is None else (self.difficulty,)
        options = [(kind, level) for kind in kinds for level in levels]
        if len(options) == 4:  # matrices would take errors on hard items for the annotators'
            options.remove((most.noise, False))
        return tuple(replace(self, noise=kind, difficulty=level) for kind, level in options)

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


@dataclass(frozen=True, kw_only=True)
class CategoricalMixture(ClassModel):
    """Class labels from a mixture of calibrated views (docs/method, "Categorical outputs", eqs. 20 to 24).

    Parameters
    ----------
    link : {"softmax", "probit"}
        How logits become probabilities (eq. 20).
    noise : {"none", "uniform", "annotator", "confusion"}, optional
        What separates a label from the true class (eq. 22): nothing, one accuracy for all, one accuracy an
        annotator, or a confusion matrix an annotator. By default one accuracy where labels are single or few; where
        enough instances carry two labels or more, and confusion matrices have ten labels a row on average, held-out
        scores decide (confusion where none are computed: with ADVI, or one model and ``guard=False``).
    difficulty : bool, optional
        Whether labels of hard instances may be the class that the views take it for (eq. 22a). By default held-out
        scores decide where instances have several labels; with ``guard=False`` one model has it, with ADVI none.
    calibrate : bool
        Whether temperatures and class offsets are inferred (eq. 21).
    weights : {"view", "view_class", "input"}
        One weight a view, one a view and class, or one a view that depends on the input through features of the views'
        outputs (eq. 25).
    features : {"auto", "all", "own", "pooled", "none"} or callable
        Features of ``weights="input"`` beside ``ViewPredictions(features=...)``. "all": entropy, margin and log-sum-exp
        of a view, its divergence from and agreement with the mean of the views; "own": with the identity instead. A
        function (n, K, C) -> (n, K, F) of a module adds to "all". "pooled": "own", averaged over groups. "auto" is
        "all"; for maps (groups of twenty rows or more) held-out scores decide between "own" and "pooled".
    gate_scale : float, optional
        Prior standard deviation of the coefficients of ``weights="input"`` (eq. 25); by default the evidence decides.
    concentration : float, optional
        Dirichlet concentration of the weights; without it they are at their maximum likelihood (eq. 23).
    kappa_scale : float
        Scale of the Student t prior of the common log inverse temperature (eq. 21).
    xi_scale, offset_scale : float
        Prior standard deviations of the views' deviations from it and of the class offsets; ``offset_scale=0``
        switches the offsets off.
    confusion_prior : (float, float)
        Dirichlet counts of a confusion row: on the diagonal, and in all off it.
    accuracy_prior : (float, float), optional
        Beta counts of an accuracy: right and wrong. By default (8, 2) for an annotator's, and (19, 0.5), few errors,
        where one accuracy is everybody's.
    class_concentration : float
        How strongly the class weights of ``weights="view_class"`` are drawn towards the common ones.
    """

    calibrate: bool = True
    weights: Literal["view", "view_class", "input"] = "view"
    features: FeatureChoice = "auto"
    gate_scale: float | None = None
    concentration: float | None = None
    xi_scale: float = 0.1
    class_concentration: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("weights", self.weights, ("view", "view_class", "input"))
        check_weights(self.weights, self.concentration, self.features)
        positive(
            concentration=self.concentration,
            gate_scale=self.gate_scale,
            class_concentration=self.class_concentration,
            xi_scale=self.xi_scale,
        )

    def one_optimum(self, n_units: int, n_views: int) -> bool:
        """By experience, where labels are many and temperatures alike; given these the likelihood is concave."""
        return n_views == 1 or (n_units >= 20 * n_views and self.xi_scale <= 0.1)

    @classmethod
    def raw_network(cls) -> "CategoricalMixture":
        """One temperature and no offsets."""
        return cls(offset_scale=0)

    def without_labels(self) -> Self:
        """Uncalibrated softmax views with one weight each."""
        for option, allowed in (("link", ("softmax",)), ("noise", (None, "none")), ("weights", ("view",))):
            if getattr(self, option) not in allowed:
                raise ValueError(
                    f"labels=None cannot fit {option}={getattr(self, option)!r}; leave it out, or pass labels"
                )
        return replace(self, noise="none", calibrate=False)
