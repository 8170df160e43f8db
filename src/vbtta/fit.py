"""fit_policy: predictions under K views and label sets in, a policy out."""

__all__ = ["fit_policy"]

import warnings
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from vbtta.crossval import cross_validated_scores
from vbtta.engines import fit_model, resolve
from vbtta.labels import Array, LabelSets
from vbtta.policy import Guard, GuardWarning, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    EngineSpec,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
)

_MODELS: dict[str, dict[str, type[ModelSpec]]] = {
    "regression": {"mixture": GaussianMixture, "latent": GaussianLatent},
    "classification": {"mixture": CategoricalMixture, "latent": CategoricalLatent},
}
_FEWEST = 5  # labelled instances below which nothing is held out


def fit_policy(
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike,
    *,
    task: str,
    model: ModelSpec | Literal["auto", "mixture", "latent"] = "auto",
    engine: EngineSpec | Literal["auto", "em"] = "auto",
    guard: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> Policy:
    """Infer how much weight each view deserves, how it is calibrated and how good the annotators are.

    Parameters
    ----------
    predictions : ViewPredictions
        A model's predictions for the calibration inputs under K views.
    labels : LabelSets or array
        One label or more for some or all of the inputs; arrays go through :meth:`LabelSets.from_array`.
    task : {"regression", "classification"}
    model : "auto", "mixture", "latent" or a model record
        What is assumed. "auto" takes the pool with the better cross-validated log score.
    engine : "auto", "em" or an engine record
        How it is inferred.
    guard : bool
        Whether to compare, by cross-validated log score, with the same model on the identity view alone, and fall
        back to that where the views are worse by more than one standard error.
    seed : int
        Decides the folds.
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
    options = _MODELS.get(task)
    if options is None:
        raise ValueError(f"task must be one of {sorted(_MODELS)}; got {task!r}")
    if not isinstance(predictions, ViewPredictions):
        raise TypeError(
            f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
        )
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    labels = labels.align(len(predictions), predictions.ids)
    if not len(labels):
        raise ValueError("labels are empty: at least one instance needs a label")
    predictions.check_finite()
    how = _engine(engine)
    enough = len(labels.labelled) >= _FEWEST

    scores: Array | None = None
    if model == "auto" and enough:
        _say(progress, "choosing between mixture and latent pool")
        chosen, scores = _choose([kind() for kind in options.values()], predictions, labels, how, task, seed)
    else:
        chosen = resolve(_model("mixture" if model == "auto" else model, options, task), labels)
    _say(progress, f"fitting {type(chosen).__name__}")
    policy = fit_model(predictions, labels, chosen, how, task=task)
    if not guard:
        return policy
    _say(progress, "comparing with the identity view alone")
    return _guarded(policy, predictions, labels, how, scores, seed, enough)


def _choose(
    candidates: list[ModelSpec], predictions: ViewPredictions, labels: LabelSets, engine: EM, task: str, seed: int
) -> tuple[ModelSpec, Array]:
    """The candidate with the better cross-validated log score, and its scores."""
    models = [resolve(candidate, labels) for candidate in candidates]
    found = [cross_validated_scores(predictions, labels, one, engine, task=task, seed=seed) for one in models]
    best = int(np.argmax([scores.sum() for scores in found]))
    return models[best], found[best]


def _guarded(
    policy: Policy,
    predictions: ViewPredictions,
    labels: LabelSets,
    engine: EM,
    scores: Array | None,
    seed: int,
    enough: bool,
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
    task = policy.task
    if scores is None:
        scores = cross_validated_scores(predictions, labels, policy.model, engine, task=task, seed=seed)
    alone = predictions.select(["identity"])
    difference = scores - cross_validated_scores(alone, labels, policy.model, engine, task=task, seed=seed)
    total, error = float(difference.sum()), float(np.sqrt(len(difference)) * difference.std(ddof=1))
    worse = total < -error
    verdict = "worse than" if worse else "not worse than"
    reason = f"held-out log score {total:+.2f} (standard error {error:.2f}): {verdict} the identity view alone"
    outcome = Guard(True, worse, total, error, reason)
    if not worse:
        return replace(policy, guard=outcome)
    warnings.warn(
        f"the views do not help ({reason}); the policy uses the identity view only", GuardWarning, stacklevel=3
    )
    fallback = fit_model(alone, labels, policy.model, engine, task=task)
    weights = np.zeros((fallback.n_steps, len(policy.names)))
    weights[:, policy.names.index("identity")] = 1
    return replace(
        fallback,
        names=policy.names,
        fitted=("identity",),
        guard=outcome,
        history=fallback.history._replace(weights=weights),
    )


def _model(model: ModelSpec | str, options: dict[str, type[ModelSpec]], task: str) -> ModelSpec:
    if isinstance(model, str):
        if model not in options:
            raise ValueError(f"model must be 'auto', {', '.join(map(repr, options))} or a model record; got {model!r}")
        return options[model]()
    if not isinstance(model, tuple(options.values())):
        fitting = ", ".join(kind.__name__ for kind in options.values())
        raise ValueError(f"model {type(model).__name__} is not for task={task!r}; use one of {fitting}")
    return model


def _engine(engine: EngineSpec | str) -> EM:
    if isinstance(engine, EM):
        return engine
    if engine in ("auto", "em"):
        return EM()
    raise ValueError(f"engine must be 'auto', 'em' or EM(...); got {engine!r}")


def _say(progress: bool, what: str) -> None:
    if progress:
        import sys

        print(f"vbtta: {what}", file=sys.stderr, flush=True)
