"""fit_policy: predictions under K views and label sets in, a policy out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta import crossval
from vbtta._support.checks import one_of, shown, whole_number
from vbtta.crossval import MIN_UNITS, CrossValidated
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import Rows, ViewPredictions, require_views, row_hashes
from vbtta.inference.advi import ADVI, fit_density
from vbtta.inference.em import EM, Fit, fit_problem
from vbtta.inference.linalg import TOO_LARGE
from vbtta.models import base
from vbtta.models.base import Engine, InMemory, Model, Posterior, Source, Stack
from vbtta.models.parts.annotators import LabelFacts
from vbtta.models.parts.class_data import check_logits
from vbtta.models.pyro.spec import PyroModel
from vbtta.policy import ConvergenceWarning, Guard, GuardWarning, History, Policy, stack_policies

_MAX_HASHED = 2048  # rows whose hashes a policy keeps
_SLOW = "not checked: cross-validating ADVI would take ten more fits; compare held-out scores (Policy.score) by hand"
_ROWS_OF_A_MAP = 20  # rows of a group, on average, from which they are positions of an image
_TRAINING_SHARE, _MIN_LABELS = 0.995, 50  # accuracy that suggests training data, and labels needed to judge it
_LARGEST_GAIN = 0.1  # tolerance of the default stack's members: nats that the last EM cycle may gain, all labels
_QUICK, _QUICK_RANGE = 3e-8, (1e-6, 3e-5)  # tolerance of held-out fits: per label, and its limits
_MANY_UNITS, _NEAR_TOL = 300, 3e-4  # from which a fold's optimum is near that of all, and tolerance of its fit
_GATE_TOL = 1e-2  # of members whose weights depend on the input: their bound rises slowly without a better score
_START_SHARE = 0.5  # of an extra start's weights; the rest is spread equally
_LIKELY = 0.9  # probability below which the gain from the views is called doubtful
_FEW = 10  # labelled inputs below which the guard's reason is cautious


class Candidate(NamedTuple):
    """A model that may be fitted to a sample."""

    model: Model  # all options decided
    start: Posterior | None
    alone: bool = False  # whether it sees the identity view only
    near: bool = False  # whether fits to most of the sample are a few Newton steps away from the start
    weights: tuple[Array, ...] = ()  # (K,) each: extra starts of EM
    of_part: bool = False  # whether as many instances as held-out scores have are enough


class Sample(Protocol):
    """A calibration sample, in memory or on a cluster, and how a model is fitted to it."""

    @property
    def labels(self) -> LabelFacts:
        """Facts about the labels that decide open options of a model."""

    @property
    def n_units(self) -> int:
        """Number of labelled instances, or of groups of them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the views."""

    @property
    def maps(self) -> bool:
        """Whether rows are positions of maps, and their groups images."""

    def source(self, *, alone: bool) -> Source:
        """All views, or the identity alone, as models read them."""

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        """Whether the evidence for weights that depend on the input is decisive."""

    def fit(self, candidate: Candidate, engine: Engine, *, seed: int, progress: bool) -> Policy:
        """The policy of a candidate."""

    def scores(
        self, candidates: Sequence[Candidate], engine: Engine, *, seed: int, progress: bool, n_folds: int | None = None
    ) -> list[CrossValidated]:
        """Held-out log scores of the candidates, on the same instances in the same order; of the first folds."""


class _LocalSample(InMemory):
    """A sample in memory."""

    @property
    def n_units(self) -> int:
        return crossval.n_units(self.labels, self.predictions.groups)

    @property
    def names(self) -> tuple[str, ...]:
        return self.predictions.names

    @property
    def maps(self) -> bool:
        return self.predictions.groups is not None and len(self.labels.labelled) >= _ROWS_OF_A_MAP * self.n_units

    def source(self, *, alone: bool) -> InMemory:
        return self.select(["identity"]) if alone else self

    def gate_wanted(self, model: Model, start: Posterior | None) -> bool:
        return len(self.names) > 1 and model.gate_wanted(self._part(self.predictions.outputs[0].size), start)

    def fit(self, candidate: Candidate, engine: Engine, *, seed: int, progress: bool) -> Policy:
        return fit_candidate(candidate, engine, seed, self._part(1) if candidate.of_part else self, progress=progress)

    def _part(self, n_entries: int) -> InMemory:
        """The instances, or a sample of them where they are many and independent (:func:`crossval.sampled`)."""
        rows = self.labels.labelled
        if self.predictions.groups is not None or len(rows) <= crossval.MAX_INSTANCES:
            return self
        return self.take(np.sort(rows[crossval.sampled(len(rows), 0, n_entries)]))

    def scores(
        self, candidates: Sequence[Candidate], engine: Engine, *, seed: int, progress: bool, n_folds: int | None = None
    ) -> list[CrossValidated]:
        folds = crossval.folds_of(self.predictions, self.labels, seed)[:n_folds]
        fits = [partial(quick_fit, candidate, engine, seed) for candidate in candidates]
        return crossval.cross_validate(fits, self, folds, progress=progress)


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
    >>> truth, noise = np.random.default_rng(0).normal(size=(2, 200))
    >>> views = np.stack([truth + 0.1 * noise, noise], axis=1)[:, :, None]
    >>> fit_policy(ViewPredictions(views, names=["identity", "useless"]), truth, task="regression").weights.round(1)
    array([1., 0.])
    """
    options: dict[str, Any] = {"model": model, "engine": engine, "seed": seed, "progress": progress}
    if task == "multilabel":
        return _fit_multilabel(predictions, labels, guard=guard, **options)
    base.models_of(task)
    whole_number("seed", seed, least=0)
    one_of("guard", guard, (True, False, "hard"))
    require_views(predictions)
    if labels is None:
        return _unsupervised(predictions, task, **options)
    model_record(model, task)  # refuses a model of another task before the data are looked at
    labels = checked(predictions, labels, task)
    policy = fit_sample(_LocalSample(predictions, labels), task=task, guard=guard, **options)
    n_labelled = len(labels.labelled)
    subsample, heaviest = labels.labelled[:: -(-n_labelled // _MAX_HASHED)], policy.names[int(policy.weights.argmax())]
    hashes = row_hashes(predictions.take(subsample).select([heaviest]).outputs)  # of the view that pruning leaves
    policy = replace(policy, rows=Rows((heaviest,), hashes))
    if not guard:
        return policy
    cautions = {
        "the identity predicts nearly all labels exactly: were these training data?": policy.guard.checked
        and _nearly_perfect(predictions, labels, task),
        f"only {n_labelled} labelled inputs: weights and calibration mostly follow their priors": n_labelled < _FEW,
        "all labels are of one class: nothing is known of the others": task == "classification"
        and len(np.unique(labels.value)) == 1,
    }
    reason = "; ".join([policy.guard.reason, *(text for text, applies in cautions.items() if applies)])
    return replace(policy, guard=policy.guard._replace(reason=reason))


def checked(predictions: ViewPredictions, labels: LabelSets | ArrayLike, task: str) -> LabelSets:
    """The labels as the predictions' rows need them; refused if either cannot be those of the task."""
    aligned = predictions.align(labels)
    if not len(aligned):
        raise ValueError("labels are empty: at least one instance needs a label")
    predictions.check_finite()
    if task == "classification":
        check_logits(predictions)
    return aligned


def _nearly_perfect(predictions: ViewPredictions, labels: LabelSets, task: str) -> bool:
    """Whether the identity view predicts the labels as well as a network predicts its training data."""
    if task not in ("classification", "regression") or len(labels) < _MIN_LABELS:
        return False
    outputs = predictions.outputs[labels.instance, predictions.names.index("identity")]
    if task == "classification":
        right = outputs.argmax(axis=1) == labels.categorical(outputs.shape[1], predictions.classes)
        return bool(np.average(right, weights=labels.count) > _TRAINING_SHARE)
    value = labels.continuous(outputs.shape[1])
    return bool(np.mean((value - outputs) ** 2) < (1 - _TRAINING_SHARE) ** 2 * value.var())


def _fit_multilabel(predictions: ViewPredictions, labels: Any, **options: Any) -> Policy:
    """Every output as a classification of two classes, all with the same weights; inputs are groups."""
    if not isinstance(predictions, ViewPredictions) or labels is None:
        raise TypeError(f"task='multilabel' needs ViewPredictions and labels; got {type(predictions).__name__}")
    sets = labels if isinstance(labels, LabelSets) else LabelSets.from_multilabel(labels)
    policy = fit_policy(predictions.as_binary(), sets, task="classification", **options)
    return replace(policy, multilabel=True, n_outputs=predictions.outputs.shape[2], classes=predictions.classes)


@np.errstate(all="ignore")  # extreme numbers may overflow on the way; whether the bound is finite is checked
def fit_sample(
    sample: Sample, *, task: str, model: Any, engine: Engine | str, guard: bool | str, seed: int, progress: bool
) -> Policy:
    """:func:`fit_policy` for data in memory or on a cluster."""
    automatic = isinstance(model, str) and model == "auto"
    record = model_record(model, task)
    if automatic and not isinstance(_engine(engine, record), EM):
        record = model_record("mixture", task)  # held-out scores by ADVI would take too many fits
    engine = _engine(engine, record)
    coarse = float(np.clip(_LARGEST_GAIN / sample.n_units, EM.tol, 1e-4)) if automatic and engine == EM() else 0.0
    fitting, stack = _Fitting(sample, engine, seed, progress, coarse), record.as_stack()
    raw = base.models_of(task)["mixture"].raw_network() if stack is None else stack.raw
    reason = fitting.obstacle(raw) if guard else "not asked for"
    if stack is not None:
        return fitting.stack(stack, guard, reason)
    models, raw = fitting.decide_on_raw([record], raw) if guard else ([record], raw)
    record = fitting.decide(models)[0] if guard else record.resolve(sample.labels)
    record = fitting.best(record.alternatives(maps=sample.maps))
    policy = fitting.fit(record, None)
    if reason or raw is None:
        return replace(policy, guard=Guard(False, False, 0.0, 0.0, reason))
    alone = fitting.fit(raw.resolve(sample.labels), policy.posterior, alone=True)
    of_views, of_raw = fitting.scores([policy], alone)
    verdict = _verdict(of_views, of_raw, guard, warn=True)
    return alone.among(policy.names, guard=verdict) if verdict.fell_back else replace(policy, guard=verdict)


@dataclass(frozen=True)
class _Fitting:
    """The fits of one call of fit_policy; candidates and held-out scores are computed once and kept."""

    sample: Sample
    engine: Engine
    seed: int
    progress: bool
    coarse: float  # smallest EM tolerance of models of several views; the raw network uses the engine's own
    settled: dict[str, Candidate] = field(default_factory=dict)  # by model
    known: dict[str, CrossValidated] = field(default_factory=dict)  # held-out scores by model

    def settle(self, model: Model, start: Posterior | None, *, alone: bool = False) -> Candidate:
        """The candidate of a resolved model, with the options that the data decide."""
        if isinstance(self.engine, ADVI):
            return Candidate(model, start, alone)
        key = _key(model, alone)
        if key not in self.settled:
            self.settled[key] = Candidate(*model.settle(self.sample.source(alone=alone), start), alone)
        return self.settled[key]

    def fit(
        self, model: Model, start: Posterior | None, *, alone: bool = False, weights: Sequence[Array] = ()
    ) -> Policy:
        """The policy of a resolved model, started from equal weights, from a heavy identity and from others (K,)."""
        _report(self.progress, f"fitting {'the raw network' if alone else type(model).__name__}")
        candidate, engine = self.settle(model, start, alone=alone), self.engine
        if start is None and not alone:
            candidate = candidate._replace(start=None)  # histories of single models begin at uniform weights
        if isinstance(engine, EM) and not alone:
            optional = self.coarse > 0 and model.ungated is not None  # the default's member of gated weights
            engine = replace(engine, tol=max(engine.tol, _GATE_TOL if optional else self.coarse))
            names, candidate = self.sample.names, candidate._replace(of_part=optional)
            if "identity" in names and len(names) > 1:
                weights = [np.eye(len(names))[names.index("identity")], *weights]
            shares = tuple(_START_SHARE * row + (1 - _START_SHARE) / len(names) for row in weights)
            candidate = candidate._replace(weights=shares)
        return replace(self.sample.fit(candidate, engine, seed=self.seed, progress=self.progress), model=model)

    def scores(self, policies: Sequence[Policy], raw: Policy | None) -> list[CrossValidated]:
        """Held-out scores, the raw network's last; folds start from the policy if it has one optimum, else from raw."""
        candidates, start = {}, None if raw is None else raw.posterior
        for policy, alone in [*((policy, False) for policy in policies), *([(raw, True)] if raw else [])]:
            safe = policy.model.one_optimum(self.sample.n_units, len(policy.names))
            key = _key(policy.model, alone)
            near, first = safe and self.sample.n_units >= _MANY_UNITS, policy.posterior if safe else start
            if policy.model.ungated is not None:  # starts from constant weights, as the policy's fit did
                gated: Any = policy.posterior
                near, first = False, replace(gated, gate=None) if safe and len(policies) == 1 else None
            candidates[key] = self.settled[key]._replace(start=first, near=near)
        new = [key for key in candidates if key not in self.known]
        if new:
            self.known.update(zip(new, self._scores([candidates[key] for key in new]), strict=True))
        return [self.known[key] for key in candidates]

    def _scores(self, candidates: Sequence[Candidate], n_folds: int | None = None) -> list[CrossValidated]:
        return self.sample.scores(candidates, self.engine, seed=self.seed, progress=self.progress, n_folds=n_folds)

    def decide_on_raw(self, models: Sequence[Model], raw: Model | None) -> tuple[Sequence[Model], Model | None]:
        """Decide the open options that the raw network shares (label noise) by its held-out scores, which are fast."""
        if raw is None or "identity" not in self.sample.names or isinstance(self.engine, ADVI):
            return models, raw
        labels = self.sample.labels
        options = raw.adopt(models[0]).choices(labels)
        if len(options) == 1:
            return models, raw
        chosen = self.best([option.resolve(labels) for option in options], alone=True)
        return [model.adopt(chosen) for model in models], raw.adopt(chosen)

    def decide(self, models: Sequence[Model], start: Posterior | None = None) -> list[Model]:
        """Resolve the models. Options still open are decided by held-out scores of the last model that has any."""
        labels = self.sample.labels
        several = [model for model in models if len(model.choices(labels)) > 1]
        if several and not isinstance(self.engine, ADVI):
            chosen = self.best([option.resolve(labels) for option in several[-1].choices(labels)], start)
            models = [model.adopt(chosen) if model in several else model for model in models]
        return [model.resolve(labels) for model in models]

    def best(self, options: Sequence[Model], start: Posterior | None = None, *, alone: bool = False) -> Model:
        """The model with the best held-out score; the first if there are no held-out scores."""
        if len(options) == 1 or isinstance(self.engine, ADVI) or self.sample.n_units < MIN_UNITS:
            return options[0]
        candidates = [self.settle(option, start, alone=alone) for option in options]
        if self.sample.n_units >= crossval.MANY_UNITS:  # a third of them, and fits near the optimum, are enough
            scores = self._scores([candidate._replace(near=True) for candidate in candidates], n_folds=1)
        else:
            scores = self._scores(candidates)
            self.known.update(zip((_key(option, alone) for option in options), scores, strict=True))
        place = int(np.argmax([score.scores.sum() for score in scores]))
        chosen = options[place]
        if alone:
            self.settled[_key(chosen, alone)] = candidates[place]._replace(start=scores[place].posterior)
        _report(self.progress, f"by held-out scores: {chosen!r}")
        return chosen

    def obstacle(self, raw: Model | None) -> str:
        """Why the views cannot be compared with the raw network; empty if they can."""
        names, n_units = self.sample.names, self.sample.n_units
        reasons = {
            "no raw network: the model has no temperature or scale of its own": raw is None,
            _SLOW: isinstance(self.engine, ADVI),
            "no view is named 'identity', so there is nothing to compare with": "identity" not in names,
            "identity is the only view": names == ("identity",),
            f"fewer than {MIN_UNITS} labelled instances, or groups of them": n_units < MIN_UNITS,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def stack(self, stack: Stack, guard: bool | str, reason: str) -> Policy:
        """Fit all members and stack them by held-out scores; by the prior if nothing can be held out."""
        sample, posteriors, raw = self.sample, list[Posterior](), None
        open_members, network = self.decide_on_raw(stack.members, stack.raw)
        if network is not None and "identity" in sample.names:  # members start from its label noise
            raw = self.fit(network.resolve(sample.labels), None, alone=True)
            posteriors.append(raw.posterior)
        members = self.decide(open_members, posteriors[0] if posteriors else None)
        stack = replace(stack, members=tuple(members), raw=network and network.resolve(sample.labels))
        several_optima = [not model.one_optimum(sample.n_units, len(sample.names)) for model in members]
        fitted: dict[int, Policy] = {}
        for place in np.argsort(several_optima, kind="stable").tolist():
            open_model, pools = members[place], [fitted[m].weights for m in fitted if not several_optima[m]]
            model = open_model if raw is None else open_model.with_noise_of(raw.posterior)
            start = base.nearest(model, self.engine, posteriors, len(sample.names))
            if open_model.is_optional(members) and not sample.gate_wanted(model, start):
                continue
            model = self.best(model.alternatives(maps=sample.maps), start)
            fitted[place] = self.fit(model, start, weights=pools)
            posteriors.append(fitted[place].posterior)
        policies = [fitted[place] for place in sorted(fitted)]
        counts = crossval.prior_counts(len(policies), raw is not None, stack.prior_count)
        weights, covariance = counts / counts.sum(), np.zeros((len(counts), len(counts)))
        even_odds = None if raw is None else crossval.even_odds(raw.model, sample.labels)
        if even_odds is not None:
            weights = crossval.hedged(weights, crossval.trust(sample.n_units, even_odds))
        verdict = Guard(False, False, 0.0, 0.0, reason)
        if sample.n_units >= MIN_UNITS:
            scores = self.scores(policies, raw)
            (weights, covariance), of_stack = crossval.stack_scores(scores, counts, even_odds)
            verdict = verdict if reason else _verdict(of_stack, scores[-1], guard, warn=False)
        policies = [policy.among(sample.names) for policy in ([*policies, raw] if raw else policies)]
        if verdict.fell_back:
            return replace(policies[-1], guard=verdict)
        return stack_policies(stack, self.engine, policies, weights, covariance, verdict)


def _key(model: Model, alone: bool) -> str:
    return f"{model!r}{' of the identity' if alone else ''}"


def _verdict(views: CrossValidated, raw: CrossValidated, guard: bool | str, *, warn: bool) -> Guard:
    """The gain of the views over the raw network, and whether to fall back on it."""
    difference, error = crossval.compare_scores(views, raw)
    probability = float(special.ndtr(difference / error)) if error > 0 else 0.5 + 0.5 * float(np.sign(difference))
    reason = f"the views help with probability {probability:.2f}, by {difference:.3f} +- {error:.3f} nats per input"
    if probability < _LIKELY:
        result = "does better" if probability < 1 - _LIKELY else "does about as well"
        reason += f"; one pass of the network, with one temperature or scale, {result}"
    if probability < 0.5 and guard != "hard":
        reason += " (fit again with guard='hard' to use it alone)"
    verdict = Guard(True, guard == "hard" and probability < 0.5, difference, error, reason, probability)
    if verdict.fell_back:
        warnings.warn(f"{reason}: the policy is the raw network", GuardWarning, stacklevel=5)
    elif warn and difference < -error:
        warnings.warn(reason, GuardWarning, stacklevel=5)
    return verdict


@np.errstate(all="ignore")
def fit_candidate(
    candidate: Candidate, engine: Engine, seed: int, source: InMemory, *, progress: bool = False, intervals: bool = True
) -> Policy:
    """The policy of a candidate; without ``intervals`` of its weights it only predicts and scores."""
    model, source = candidate.model, source.select(["identity"]) if candidate.alone else source
    predictions, labels = source.predictions, source.labels
    if isinstance(engine, ADVI):
        fit = fit_density(
            lambda: base.pose_density(model, source, seed), engine, seed=seed, n_labels=labels.total, progress=progress
        )
    else:
        try:
            problem, first = base.pose(model, source, candidate.start)
            if candidate.near and problem.newton:
                engine = replace(engine, tol=max(engine.tol, _NEAR_TOL))
            fit = fit_problem(problem, first, engine, intervals=intervals, weights=candidate.weights)
        except (np.linalg.LinAlgError, ArithmeticError):
            raise ValueError(TOO_LARGE) from None
    return policy_of(fit, model, engine, predictions, labels.annotator_names)


def quick_fit(
    candidate: Candidate, engine: Engine, seed: int, source: InMemory, others: Sequence[Policy] = ()
) -> Policy:
    """A fit for held-out scores: without intervals, at a coarser tolerance, by default from others of the same data."""
    model, quick = candidate.model, replace(engine, keep_states=False)
    if isinstance(quick, EM):
        tol = float(np.clip(_QUICK * source.labels.total, *_QUICK_RANGE)) if model.ungated is None else _GATE_TOL
        quick = replace(quick, max_steps=min(quick.max_steps, 300), tol=max(quick.tol, tol))
    posteriors = [policy.posterior for policy in others if policy.gate is None]
    n_views = 1 if candidate.alone else len(source.predictions.names)
    start = candidate.start or base.nearest(model, quick, posteriors, n_views)
    return fit_candidate(candidate._replace(start=start), quick, seed, source, intervals=False)


def refit(policy: Policy, sample: InMemory) -> Policy:
    """The policy's model, engine and views, fitted to other aligned data; the members of a stack keep their weights."""
    if policy.stacked:
        members = [refit(member, sample).among(member.names) for member in policy.members]
        covariance = np.zeros((len(members), len(members)))
        return stack_policies(policy.model, policy.engine, members, policy.member_weights, covariance, policy.guard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a near-optimum predicts as well
        candidate = Candidate(policy.model, policy.posterior)
        return quick_fit(candidate, policy.engine, 0, sample.select(policy.fitted or policy.names))


def policy_of(
    fit: Fit[Posterior], model: Model, engine: Engine, predictions: ViewPredictions, annotator_names: tuple[str, ...]
) -> Policy:
    """The policy of a fit; only names and shape of the predictions are used."""
    if not fit.converged:
        warnings.warn(type(model).__name__ + engine.unconverged, ConvergenceWarning, stacklevel=4)
    return Policy(
        names=predictions.names,
        generated_names=predictions.generated_names,
        model=model,
        engine=engine,
        posterior=fit.posterior,
        history=History(fit.bounds, fit.weights, fit.other_optima),
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
    predictions: ViewPredictions, task: str, *, model: Any, engine: Engine | str, seed: int, progress: bool
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
    check_logits(predictions)
    fit = fit_density(
        lambda: base.load(record, "density").pose_unsupervised(predictions, record),
        engine,
        seed=seed,
        n_labels=float(len(predictions)),
        progress=progress,
    )
    reason = "unsupervised: without labels nothing can be compared with the identity view"
    policy = policy_of(fit, record, engine, predictions, ())
    return replace(policy, unsupervised=True, guard=Guard(False, False, 0.0, 0.0, reason))


def model_record(model: Model | Callable[..., None] | str, task: str) -> Model:
    """The model record, completed for the task; "auto" is a stack of the task's models and the raw network."""
    if isinstance(model, str):
        kinds: dict[str, Any] = dict(base.models_of(task))
        if model == "auto":
            mixture, raw = kinds["mixture"], kinds["mixture"].raw_network()
            if raw is None:
                return mixture()  # type: ignore[no-any-return]
            return Stack(members=(mixture(), mixture(weights="input"), kinds["latent"]()), raw=raw)
        if model not in kinds:
            raise ValueError(f"model must be 'auto', {', '.join(map(repr, kinds))} or a model record; got {model!r}")
        return kinds[model]()  # type: ignore[no-any-return]
    if isinstance(model, type):
        raise ValueError(f"model must be a record, such as {model.__name__}(); got the class {model.__name__}")
    return (model if isinstance(model, Model) else PyroModel(model)).for_task(task)


def _engine(engine: Engine | str, model: Model) -> Engine:
    """The engine record; by default EM if the model has closed-form updates."""
    if not isinstance(engine, EM | ADVI) and not (isinstance(engine, str) and engine in ("auto", "em", "advi")):
        raise ValueError(f"engine must be 'auto', 'em', 'advi', EM(...) or ADVI(...); got {shown(engine)}")
    if isinstance(engine, str):
        engine = EM() if engine == "em" or (engine == "auto" and not model.obstacle) else ADVI()
    if isinstance(engine, EM) and model.obstacle:
        raise ValueError(f"{model.obstacle} has no closed form; use engine='advi'")
    return engine


def _report(progress: bool, message: str) -> None:
    if progress:
        print(f"vbtta: {message}", file=sys.stderr, flush=True)
