"""fit_policy: predictions under K views and label sets in, a policy out."""

__all__ = ["Source", "fit_policy", "fit_source"]

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta.crossval import cross_validated_scores
from vbtta.engines import fit_model, fit_without_labels, resolve
from vbtta.labels import Array, LabelSets
from vbtta.policy import Guard, GuardWarning, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import (
    ADVI,
    EM,
    CategoricalLatent,
    CategoricalMixture,
    EngineSpec,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
    OrdinalMixture,
    PyroModel,
    RankingMixture,
)

_MODELS: dict[str, dict[str, type[Any]]] = {
    "regression": {"mixture": GaussianMixture, "latent": GaussianLatent},
    "classification": {"mixture": CategoricalMixture, "latent": CategoricalLatent},
    "ordinal": {"mixture": OrdinalMixture},
    "ranking": {"mixture": RankingMixture},
}
_SLOW = "not checked: cross-validating ADVI would take ten more fits; compare held-out scores (Policy.score) by hand"
_FEWEST = 5  # labelled instances below which nothing is held out


class Source(Protocol):
    """Predictions and their labels, wherever they are, and how a model is fitted to them."""

    @property
    def labels(self) -> Any:
        """What :func:`vbtta.engines.resolve` asks of labels."""

    @property
    def n_labelled(self) -> int:
        """N+."""

    def fit(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int, progress: bool) -> Policy:
        """One resolved model on all views, or on the identity alone."""

    def scores(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int) -> Array:
        """Held-out log scores, of the same instances in the same order whatever the model."""


@dataclass(frozen=True)
class _InMemory:
    """Aligned predictions and labels."""

    predictions: ViewPredictions
    labels: LabelSets
    task: str

    @property
    def n_labelled(self) -> int:
        return len(self.labels.labelled)

    def fit(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int, progress: bool) -> Policy:
        views = self._views(alone)
        return fit_model(views, self.labels, model, engine, task=self.task, seed=seed, progress=progress)

    def scores(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int) -> Array:
        return cross_validated_scores(self._views(alone), self.labels, model, engine, task=self.task, seed=seed)

    def _views(self, alone: bool) -> ViewPredictions:
        return self.predictions.select(["identity"]) if alone else self.predictions


def fit_policy(
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike | None,
    *,
    task: str,
    model: ModelSpec | Callable[..., None] | Literal["auto", "mixture", "latent"] = "auto",
    engine: EngineSpec | Literal["auto", "em", "advi"] = "auto",
    guard: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> Policy:
    """Infer how much weight each view deserves, how it is calibrated and how good the annotators are.

    Parameters
    ----------
    predictions : ViewPredictions
        A model's predictions for the calibration inputs under K views.
    labels : LabelSets, array or None
        One label or more for some or all of the inputs; arrays go through :meth:`LabelSets.from_array`. None infers
        a classification's weights from the views' agreement and confidence alone, uncalibrated
        (`policy.unsupervised`).
    task : {"regression", "classification", "ordinal", "ranking"}
        Numbers; classes, whose logits the predictions are; ordered levels, from one score an input and view; rankings
        of the C items that the predictions score (:meth:`LabelSets.from_rankings`). The last two are fitted by ADVI.
    model : "auto", "mixture", "latent", a model record or a function
        What is assumed. "auto" takes the pool with the better cross-validated log score (with ADVI the mixture). A
        function is a Pyro model of the labels, as in :class:`PyroModel`.
    engine : "auto", "em", "advi" or an engine record
        How it is inferred; "auto" is EM where the model has one.
    guard : bool
        Whether to compare, by cross-validated log score, with the same model on the identity view alone, and fall
        back to that where the views are worse by more than one standard error.
    seed : int
        Decides the folds, and the draws of ADVI.
    progress : bool
        Whether to say on the standard error stream what is being done.

    Returns
    -------
    Policy

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=200)
    >>> views = np.stack([truth + 0.1 * rng.normal(size=200), rng.normal(size=200)], axis=1)[:, :, None]
    >>> predictions = ViewPredictions(views, names=["identity", "useless"])
    >>> policy = fit_policy(predictions, truth, task="regression")
    >>> policy.weights.round(1)
    array([1., 0.])
    """
    _options(task)
    whole_number("seed", seed, least=0)
    if not isinstance(predictions, ViewPredictions):
        raise TypeError(
            f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
        )
    if labels is None:
        return _unsupervised(predictions, task, model, engine, seed, progress)
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    if not len(labels):
        raise ValueError("labels are empty: at least one instance needs a label")
    predictions.check_finite()
    source = _InMemory(predictions, labels, task)
    return fit_source(source, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


def fit_source(
    source: Source,
    *,
    task: str,
    model: ModelSpec | Callable[..., None] | str,
    engine: EngineSpec | str,
    guard: bool,
    seed: int,
    progress: bool,
) -> Policy:
    """:func:`fit_policy` for data that may be anywhere."""
    options, labels = _options(task), source.labels
    how = _engine(engine, model, task)
    enough = source.n_labelled >= _FEWEST

    scores: Array | None = None
    if model == "auto" and enough and isinstance(how, EM):
        _say(progress, "choosing between mixture and latent pool")
        chosen, scores = _choose([kind() for kind in options.values()], source, how, seed)
    else:
        chosen = resolve(_model("mixture" if model == "auto" else model, options, task), labels)
    _say(progress, f"fitting {type(chosen).__name__}")
    policy = source.fit(chosen, how, alone=False, seed=seed, progress=progress)
    if not guard:
        return policy
    if isinstance(how, ADVI):
        return replace(policy, guard=Guard(False, False, 0.0, 0.0, _SLOW))
    _say(progress, "comparing with the identity view alone")
    return _guarded(policy, source, how, scores, seed, enough)


def _choose(candidates: list[ModelSpec], source: Source, engine: EngineSpec, seed: int) -> tuple[ModelSpec, Array]:
    """The candidate with the better cross-validated log score, and its scores."""
    models = [resolve(candidate, source.labels) for candidate in candidates]
    found = [source.scores(one, engine, alone=False, seed=seed) for one in models]
    best = int(np.argmax([scores.sum() for scores in found]))
    return models[best], found[best]


def _guarded(
    policy: Policy, source: Source, engine: EngineSpec, scores: Array | None, seed: int, enough: bool
) -> Policy:
    """The policy, or the identity's where the views are worse by more than one standard error."""
    skipped = {
        "no view is named 'identity', so there is nothing to compare with": "identity" not in policy.names,
        "identity is the only view": policy.names == ("identity",),
        f"fewer than {_FEWEST} labelled instances": not enough,
    }
    for reason, applies in skipped.items():
        if applies:
            return replace(policy, guard=Guard(False, False, 0.0, 0.0, reason))
    if scores is None:
        scores = source.scores(policy.model, engine, alone=False, seed=seed)
    difference = scores - source.scores(policy.model, engine, alone=True, seed=seed)
    total, error = float(difference.sum()), float(np.sqrt(len(difference)) * difference.std(ddof=1))
    worse = total < -error
    verdict = "worse than" if worse else "not worse than"
    reason = f"held-out log score {total:+.2f} (standard error {error:.2f}): {verdict} the identity view alone"
    outcome = Guard(True, worse, total, error, reason)
    if not worse:
        return replace(policy, guard=outcome)
    warnings.warn(
        f"the views do not help ({reason}); the policy uses the identity view only", GuardWarning, stacklevel=4
    )
    fallback = source.fit(policy.model, engine, alone=True, seed=0, progress=False)
    weights = np.zeros((fallback.n_steps, len(policy.names)))
    weights[:, policy.names.index("identity")] = 1
    return replace(
        fallback,
        names=policy.names,
        fitted=("identity",),
        guard=outcome,
        history=fallback.history._replace(weights=weights),
    )


def _options(task: str) -> dict[str, type[Any]]:
    """The models of a task by their short names."""
    if task not in _MODELS:
        raise ValueError(f"task must be one of {sorted(_MODELS)}; got {task!r}")
    return _MODELS[task]


def _unsupervised(
    predictions: ViewPredictions, task: str, model: Any, engine: EngineSpec | str, seed: int, progress: bool
) -> Policy:
    """Weights without labels."""
    if task != "classification":
        raise ValueError(f"labels=None is for task='classification'; task={task!r} needs labels")
    model = CategoricalMixture() if model in ("auto", "mixture") else model
    if not isinstance(model, CategoricalMixture):
        raise ValueError(f"labels=None fits a CategoricalMixture; got model={model!r}")
    for option, only in (("link", ("softmax",)), ("noise", (None, "none")), ("weights", ("view",))):
        if getattr(model, option) not in only:
            raise ValueError(
                f"labels=None cannot fit {option}={getattr(model, option)!r}; leave it out, or pass labels"
            )
    if not len(predictions):
        raise ValueError("predictions are empty: without labels at least one input is needed")
    how = ADVI() if engine in ("auto", "advi") else engine
    if not isinstance(how, ADVI):
        raise ValueError(f"labels=None needs engine='advi'; got {engine!r}")
    predictions.check_finite()
    policy = fit_without_labels(predictions, model, how, seed=seed, progress=progress)
    reason = "unsupervised: without labels nothing can be compared with the identity view"
    return replace(policy, guard=Guard(False, False, 0.0, 0.0, reason))


def _model(model: ModelSpec | Callable[..., None] | str, options: dict[str, type[Any]], task: str) -> ModelSpec:
    if isinstance(model, str):
        if model not in options:
            raise ValueError(f"model must be 'auto', {', '.join(map(repr, options))} or a model record; got {model!r}")
        return options[model]()  # type: ignore[no-any-return]
    if isinstance(model, type):
        raise ValueError(f"model must be a record, such as {model.__name__}(); got the class {model.__name__}")
    if callable(model):
        model = PyroModel(model)
    if isinstance(model, PyroModel):
        if task not in ("regression", "classification"):
            raise ValueError(f"a model of your own is for regression and classification; got task={task!r}")
        views: Any = _model(model.views or "mixture", {"mixture": options["mixture"]}, task)
        return replace(model, views=views)
    if not isinstance(model, tuple(options.values())):
        fitting = ", ".join(kind.__name__ for kind in options.values())
        raise ValueError(f"model {type(model).__name__} is not for task={task!r}; use one of {fitting}")
    return model


def _engine(engine: EngineSpec | str, model: Any, task: str) -> EngineSpec:
    closed = task in ("regression", "classification") and not callable(model) and not isinstance(model, PyroModel)
    if isinstance(engine, EM | ADVI):
        how = engine
    elif engine in ("auto", "em", "advi"):
        normal = getattr(model, "component", "normal") == "normal"
        how = EM() if engine == "em" or (engine == "auto" and closed and normal) else ADVI()
    else:
        raise ValueError(f"engine must be 'auto', 'em', 'advi', EM(...) or ADVI(...); got {engine!r}")
    if isinstance(how, EM) and not closed:
        what = f"task={task!r}" if task in ("ordinal", "ranking") else "a model of your own"
        raise ValueError(f"{what} has no closed form; use engine='advi'")
    return how


def _say(progress: bool, what: str) -> None:
    if progress:
        import sys

        print(f"vbtta: {what}", file=sys.stderr, flush=True)
