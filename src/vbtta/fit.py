"""fit_policy: predictions under K views and label sets in, a policy out."""

from __future__ import annotations

__all__ = ["Sample", "fit_model", "fit_policy", "fit_sample", "model_record", "policy_of", "quick_fit", "refit"]

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import one_of, whole_number
from vbtta._support.fingerprints import Rows, row_hashes
from vbtta.crossval import (
    MIN_UNITS,
    CrossValidated,
    compare_scores,
    cross_validate,
    folds_of,
    n_units,
    prior_counts,
    stack_scores,
)
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.advi import ADVI, fit_density
from vbtta.inference.em import EM, Fit, fit_problem
from vbtta.models.base import Engine, InMemory, Model, Posterior, load, models_of, nearest, pose, pose_density
from vbtta.models.parts.annotators import LabelFacts
from vbtta.models.pyro.spec import PyroModel
from vbtta.models.stack.spec import Stack, default_stack
from vbtta.policy import ConvergenceWarning, Guard, GuardWarning, History, Policy, stack_policies

_MAX_HASHED = 2048  # rows whose hashes a policy keeps
_SLOW = "not checked: cross-validating ADVI would take ten more fits; compare held-out scores (Policy.score) by hand"
_ROWS_OF_A_MAP = 20  # rows of a group, on average, from which they are positions of an image
_KNOWN, _MIN_ASKED = 0.995, 50  # share of labels that training data may know, and labels from which it is judged
_QUICK, _QUICK_RANGE = 3e-9, (1e-6, 1e-5)  # tolerance of fits for held-out scores: a label's, and its range
_LIKELY = 0.9  # probability below which the gain from the views is called doubtful


class Sample(Protocol):
    """A calibration sample, in memory or on a cluster, and how a model is fitted to it."""

    @property
    def labels(self) -> LabelFacts:
        """What decides the options that a model leaves open."""

    @property
    def n_units(self) -> int:
        """Number of labelled instances, or of groups of them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the views."""

    @property
    def maps(self) -> bool:
        """Whether rows are positions of maps, and their groups images."""

    def settle(self, model: Model, start: Posterior | None, *, alone: bool) -> tuple[Model, Posterior | None]:
        """A resolved model with the options that the data decide, and a posterior to start from."""

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        """Whether the evidence for weights that depend on the input is decisive."""

    def fit(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int, progress: bool
    ) -> Policy:
        """One resolved model on all views, or on the identity alone."""

    def scores(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int
    ) -> CrossValidated:
        """Held-out log scores, of the same instances in the same order whatever the model."""


@dataclass(frozen=True)
class _InMemory:
    """Aligned predictions and labels."""

    predictions: ViewPredictions
    labels: LabelSets

    @property
    def n_units(self) -> int:
        return n_units(self.labels, self.predictions.groups)

    @property
    def names(self) -> tuple[str, ...]:
        return self.predictions.names

    @property
    def maps(self) -> bool:
        return self.predictions.groups is not None and len(self.labels.labelled) >= _ROWS_OF_A_MAP * self.n_units

    def settle(self, model: Model, start: Posterior | None, *, alone: bool) -> tuple[Model, Posterior | None]:
        return model.settle(InMemory(self._views(alone), self.labels), start)

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        return len(self.names) > 1 and model.gate_wanted(InMemory(self.predictions, self.labels), start)

    def fit(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int, progress: bool
    ) -> Policy:
        return fit_model(self._views(alone), self.labels, model, engine, seed=seed, progress=progress, start=start)

    def scores(
        self, model: Model, engine: Engine, start: Posterior | None, *, alone: bool, seed: int
    ) -> CrossValidated:
        folds = folds_of(self.predictions, self.labels, seed)
        return cross_validate(quick_fit(model, engine, seed, start), self._views(alone), self.labels, folds)

    def _views(self, alone: bool) -> ViewPredictions:
        return self.predictions.select(["identity"]) if alone else self.predictions


def fit_policy(
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike | None,
    *,
    task: str,
    model: Model | Callable[..., None] | Literal["auto", "mixture", "latent"] = "auto",
    engine: Engine | Literal["auto", "em", "advi"] = "auto",
    guard: bool | Literal["hard"] = True,
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
        (`policy.unsupervised`). Do not use that where the network alone is good or probabilities matter: nothing is
        compared with the identity view, and views that agree on an error gain weight.
    task : {"regression", "classification", "multilabel", "ordinal", "ranking"}
        Numbers; classes, whose logits the predictions are; C labels of which an input may have any number (labels are
        (N, C) of 0 and 1): two-class problems that share weights and calibration; ordered levels, from one score an
        input and view; rankings of the C items that the predictions score (:meth:`LabelSets.from_rankings`). The last
        two are fitted by ADVI.
    model : "auto", "mixture", "latent", a model record or a function
        What is assumed. "auto" is a :class:`Stack` of mixture, latent pool, the raw network and, where the evidence for
        it is decisive, the mixture with weights that depend on the input, weighted by their held-out log scores (with
        ADVI, and for levels and rankings, the mixture). A function is a Pyro model of the labels, as in
        :class:`PyroModel`.
    engine : "auto", "em", "advi" or an engine record
        How it is inferred; "auto" is EM where the model has one.
    guard : bool or "hard"
        Whether to compare, by cross-validated log score, with the raw network: the identity view with one temperature
        or scale. `policy.guard` states the difference and the probability that the views help. "hard" takes the raw
        network where that is below one half.
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
    if task == "multilabel":
        return _fit_multilabel(
            predictions, labels, model=model, engine=engine, guard=guard, seed=seed, progress=progress
        )
    models_of(task)
    whole_number("seed", seed, least=0)
    one_of("guard", guard, (True, False, "hard"))
    if not isinstance(predictions, ViewPredictions):
        raise TypeError(
            f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
        )
    if labels is None:
        return _unsupervised(predictions, task, model, engine, seed, progress)
    labels = predictions.align(labels)
    if not len(labels):
        raise ValueError("labels are empty: at least one instance needs a label")
    predictions.check_finite()
    sample = _InMemory(predictions, labels)
    policy = fit_sample(sample, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)
    if policy.guard.checked and _nearly_perfect(predictions, labels, task):
        question = "the identity predicts nearly all labels exactly: were these training data?"
        return replace(policy, guard=policy.guard._replace(reason=f"{policy.guard.reason}; {question}"))
    return policy


def _nearly_perfect(predictions: ViewPredictions, labels: LabelSets, task: str) -> bool:
    """Whether the network alone knows the labels, as it does on the data that it was trained on."""
    if task not in ("classification", "regression") or len(labels) < _MIN_ASKED:
        return False
    said = predictions.outputs[labels.instance, predictions.names.index("identity")]
    if task == "classification":
        right = said.argmax(axis=1) == labels.categorical(said.shape[1], predictions.classes)
        return bool(np.average(right, weights=labels.count) > _KNOWN)
    value = labels.continuous(said.shape[1])
    return bool(np.mean((value - said) ** 2) < (1 - _KNOWN) ** 2 * value.var())


def _fit_multilabel(predictions: ViewPredictions, labels: Any, **options: Any) -> Policy:
    """Every output as a classification of two classes, all with the same weights; inputs are groups."""
    if not isinstance(predictions, ViewPredictions) or labels is None:
        raise TypeError(f"task='multilabel' needs ViewPredictions and labels; got {type(predictions).__name__}")
    sets = labels if isinstance(labels, LabelSets) else LabelSets.from_multilabel(labels)
    policy = fit_policy(predictions.as_binary(), sets, task="classification", **options)
    return replace(policy, multilabel=True, n_outputs=predictions.outputs.shape[2], classes=predictions.classes)


def fit_sample(
    sample: Sample,
    *,
    task: str,
    model: Model | Callable[..., None] | str,
    engine: Engine | str,
    guard: bool | str,
    seed: int,
    progress: bool,
) -> Policy:
    """:func:`fit_policy` for data in memory or on a cluster."""
    automatic = isinstance(model, str) and model == "auto"
    record = model_record(model, task)
    if automatic and not isinstance(_engine(engine, record), EM):
        record = model_record("mixture", task)  # held-out scores by ADVI would take too many fits
    engine = _engine(engine, record)
    record = record.resolve(sample.labels)
    stack = record.as_stack()
    if stack is not None:
        return _fit_stack(stack, sample, engine, guard, seed, progress)
    record = _best(record.scales, sample, engine, seed, progress) if guard else record
    record = _best(record.alternatives(maps=sample.maps), sample, engine, seed, progress)
    _report(progress, f"fitting {type(record).__name__}")
    settled = sample.settle(record, None, alone=False)[0] if isinstance(engine, EM) else record
    policy = replace(sample.fit(settled, engine, None, alone=False, seed=seed, progress=progress), model=record)
    if not guard:
        return policy
    raw = models_of(task)["mixture"].raw_network()
    reason = _obstacle(sample, engine, raw)
    if reason or raw is None:
        return replace(policy, guard=Guard(False, False, 0.0, 0.0, reason))
    _report(progress, "comparing with the raw network")
    raw = raw.resolve(sample.labels)
    settled_raw, start = sample.settle(raw, policy.posterior, alone=True)
    alone = replace(sample.fit(settled_raw, engine, start, alone=True, seed=seed, progress=False), model=raw)
    start = policy.posterior if record.one_optimum(sample.n_units, len(sample.names)) else alone.posterior
    scores = sample.scores(settled, engine, start, alone=False, seed=seed)
    of_raw = sample.scores(settled_raw, engine, alone.posterior, alone=True, seed=seed)
    verdict = _verdict(scores, of_raw, guard, warn=True)
    return alone.among(policy.names, guard=verdict) if verdict.fell_back else replace(policy, guard=verdict)


def _best(options: Sequence[Model], sample: Sample, engine: Engine, seed: int, progress: bool) -> Model:
    """Of several models that with the best held-out score, the first where nothing is held out."""
    if len(options) == 1 or isinstance(engine, ADVI) or sample.n_units < MIN_UNITS:
        return options[0]
    settled = [sample.settle(option, None, alone=False) for option in options]
    scores = [sample.scores(model, engine, None, alone=False, seed=seed).scores.sum() for model, _ in settled]
    chosen = options[int(np.argmax(scores))]
    _report(progress, f"by held-out scores: {chosen!r}")
    return chosen


def _obstacle(sample: Sample, engine: Engine, raw: Model | None) -> str:
    """Why the views cannot be compared with the raw network; empty where they can."""
    reasons = {
        "no raw network: the model has no temperature or scale of its own": raw is None,
        _SLOW: isinstance(engine, ADVI),
        "no view is named 'identity', so there is nothing to compare with": "identity" not in sample.names,
        "identity is the only view": sample.names == ("identity",),
        f"fewer than {MIN_UNITS} labelled instances, or groups of them": sample.n_units < MIN_UNITS,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _fit_stack(stack: Stack, sample: Sample, engine: Engine, guard: bool | str, seed: int, progress: bool) -> Policy:
    """Fit all members and weigh them by their held-out scores; by the prior where nothing can be held out."""
    # The raw network is fitted first: its label noise and temperature are where the members start.
    policies, scores, posteriors, members = list[Policy](), list[CrossValidated](), list[Posterior](), stack.members
    several = [model for model in members if len(model.scales) > 1]
    if several:  # the last decides for all
        place = several[-1].scales.index(_best(several[-1].scales, sample, engine, seed, progress))
        members = tuple(model.scales[place] if model in several else model for model in members)
    raw = stack.raw if "identity" in sample.names else None

    def fit(model: Model, start: Posterior | None, *, alone: bool) -> None:
        settled, start = sample.settle(model, start, alone=alone)
        policy = sample.fit(settled, engine, start, alone=alone, seed=seed, progress=False)
        posteriors.append(policy.posterior)
        policies.append(replace(policy, model=model).among(sample.names))
        if sample.n_units >= MIN_UNITS:
            one_optimum = model.one_optimum(sample.n_units, 1 if alone else len(sample.names))
            start = policy.posterior if one_optimum else posteriors[0] if raw is not None else None
            scores.append(sample.scores(settled, engine, start, alone=alone, seed=seed))

    if raw is not None:
        _report(progress, "fitting the raw network")
        fit(raw, None, alone=True)
    for open_model in members:
        _report(progress, f"fitting {type(open_model).__name__}, with held-out scores")
        model = open_model if raw is None else open_model.with_noise_of(posteriors[0])
        start = nearest(model, engine, posteriors, len(sample.names))
        if open_model.ungated in members and not sample.gate_wanted(model, start):
            continue
        fit(_best(model.alternatives(maps=sample.maps), sample, engine, seed, progress), start, alone=False)
    if raw is not None:  # the last member
        policies, scores = [*policies[1:], policies[0]], [*scores[1:], *scores[:1]]
    counts = prior_counts(len(policies) - (raw is not None), raw is not None, stack.prior_count)
    weights, covariance = counts / counts.sum(), np.zeros((len(policies), len(policies)))
    reason = _obstacle(sample, engine, stack.raw) if guard else "not asked for"
    verdict = Guard(False, False, 0.0, 0.0, reason)
    if scores:
        (weights, covariance), of_stack = stack_scores(scores, counts)
        verdict = verdict if reason else _verdict(of_stack, scores[-1], guard, warn=False)
    if verdict.fell_back:
        return replace(policies[-1], guard=verdict)
    return stack_policies(stack, engine, policies, weights, covariance, verdict)


def _verdict(views: CrossValidated, raw: CrossValidated, guard: bool | str, *, warn: bool) -> Guard:
    """How much better the views are than the raw network, and whether to do without them."""
    difference, error = compare_scores(views, raw)
    ratio = difference / error if error > 0 else np.sign(difference) * np.inf if difference else 0.0
    probability = float(special.ndtr(ratio))
    reason = f"the views help with probability {probability:.2f}, by {difference:.3f} +- {error:.3f} nats per input"
    if probability < _LIKELY:
        reason += "; one pass of the network, with one temperature or scale, does about as well (guard='hard')"
    verdict = Guard(True, guard == "hard" and probability < 0.5, difference, error, reason, probability)
    if verdict.fell_back:
        warnings.warn(f"{reason}: the policy is the raw network", GuardWarning, stacklevel=5)
    elif warn and difference < -error:
        warnings.warn(reason, GuardWarning, stacklevel=5)
    return verdict


def fit_model(
    predictions: ViewPredictions,
    labels: LabelSets,
    model: Model,
    engine: Engine,
    *,
    seed: int = 0,
    progress: bool = False,
    intervals: bool = True,
    start: Posterior | None = None,
) -> Policy:
    """Fit one resolved model to aligned data, from a posterior of other data or models; the seed matters to ADVI alone.

    Without ``intervals`` the policy predicts but has no intervals for its weights: enough for a held-out score.
    """
    source = InMemory(predictions, labels)
    if isinstance(engine, ADVI):
        fit = fit_density(
            lambda: pose_density(model, source, seed), engine, seed=seed, n_labels=labels.total, progress=progress
        )
    else:
        fit = fit_problem(*pose(model, source, start), engine, intervals=intervals)
    policy = policy_of(fit, model, engine, predictions, labels.annotator_names)
    return replace(policy, rows=_rows_of(policy, predictions, labels.labelled)) if intervals else policy


def _rows_of(policy: Policy, predictions: ViewPredictions, labelled: Array) -> Rows:
    """Hashes of the labelled rows, or of evenly spaced ones among them, by the views of positive weight."""
    used = tuple(name for name, weight in zip(policy.names, policy.weights, strict=True) if weight > 0)
    chosen = labelled[:: -(-len(labelled) // _MAX_HASHED)]
    return Rows(used, row_hashes(predictions.take(chosen).select(used).outputs))


def quick_fit(
    model: Model, engine: Engine, seed: int, start: Posterior | None = None
) -> Callable[[ViewPredictions, LabelSets], Policy]:
    """A fit for held-out scores: without intervals, and by EM at a coarser tolerance."""
    quick = replace(engine, keep_states=False)
    if isinstance(quick, EM):
        quick = replace(quick, max_steps=min(quick.max_steps, 300))

    def fit(predictions: ViewPredictions, labels: LabelSets) -> Policy:
        coarse = quick
        if isinstance(quick, EM):
            coarse = replace(quick, tol=max(quick.tol, float(np.clip(_QUICK * labels.total, *_QUICK_RANGE))))
        return fit_model(predictions, labels, model, coarse, seed=seed, intervals=False, start=start)

    return fit


def refit(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> Policy:
    """The policy's model, engine and views, fitted to other aligned data; the members of a stack keep their weights."""
    if policy.members:
        members = [refit(member, predictions, labels).among(member.names) for member in policy.members]
        covariance = np.zeros((len(members), len(members)))
        return stack_policies(policy.model, policy.engine, members, policy.member_weights, covariance, policy.guard)
    views = predictions.select(policy.fitted or policy.names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a near-optimum predicts as well
        return quick_fit(policy.model, policy.engine, 0, policy.posterior)(views, labels)


def policy_of(
    fit: Fit[Posterior], model: Model, engine: Engine, predictions: ViewPredictions, annotator_names: tuple[str, ...]
) -> Policy:
    """The policy of a fit; predictions are asked for their names and shape only."""
    if not fit.converged:
        warnings.warn(type(model).__name__ + engine.unconverged, ConvergenceWarning, stacklevel=4)
    return Policy(
        names=predictions.names,
        generated_names=predictions.generated_names,
        model=model,
        engine=engine,
        posterior=fit.posterior,
        history=History(fit.bounds, fit.weights),
        final_elbo=fit.bound,
        elbo_terms=fit.terms,
        converged=fit.converged,
        n_outputs=predictions.outputs.shape[2],
        classes=predictions.classes,
        fingerprints=predictions.fingerprints,
        annotator_names=annotator_names,
        steps=fit.steps,
    )


def _unsupervised(
    predictions: ViewPredictions, task: str, model: Any, engine: Engine | str, seed: int, progress: bool
) -> Policy:
    """Weights of a classifier's views from their agreement and confidence alone."""
    if task != "classification":
        raise ValueError(f"labels=None is for task='classification'; task={task!r} needs labels")
    record = model_record("mixture" if model == "auto" else model, task).without_labels()
    if not len(predictions):
        raise ValueError("predictions are empty: without labels at least one input is needed")
    engine = ADVI() if engine in ("auto", "advi") else engine
    if not isinstance(engine, ADVI):
        raise ValueError(f"labels=None needs engine='advi'; got {engine!r}")
    predictions.check_finite()
    fit = fit_density(
        lambda: load(record, "density").pose_unsupervised(predictions, record),
        engine,
        seed=seed,
        n_labels=float(len(predictions)),
        progress=progress,
    )
    reason = "unsupervised: without labels nothing can be compared with the identity view"
    policy = policy_of(fit, record, engine, predictions, ())
    return replace(policy, unsupervised=True, guard=Guard(False, False, 0.0, 0.0, reason))


def model_record(model: Model | Callable[..., None] | str, task: str) -> Model:
    """The record that is asked for, completed for the task."""
    if isinstance(model, str) and model == "auto":
        return default_stack(task)
    if isinstance(model, str):
        options = models_of(task)
        if model not in options:
            raise ValueError(f"model must be 'auto', {', '.join(map(repr, options))} or a model record; got {model!r}")
        return options[model]()
    if isinstance(model, type):
        raise ValueError(f"model must be a record, such as {model.__name__}(); got the class {model.__name__}")
    record = model if isinstance(model, Model) else PyroModel(model)
    return record.for_task(task)


def _engine(engine: Engine | str, model: Model) -> Engine:
    """The engine record that is asked for; by default EM where the model has a closed form."""
    if engine not in ("auto", "em", "advi") and not isinstance(engine, EM | ADVI):
        raise ValueError(f"engine must be 'auto', 'em', 'advi', EM(...) or ADVI(...); got {engine!r}")
    if isinstance(engine, str):
        engine = EM() if engine == "em" or (engine == "auto" and not model.obstacle) else ADVI()
    if isinstance(engine, EM) and model.obstacle:
        raise ValueError(f"{model.obstacle} has no closed form; use engine='advi'")
    return engine


def _report(progress: bool, message: str) -> None:
    if progress:
        print(f"vbtta: {message}", file=sys.stderr, flush=True)
