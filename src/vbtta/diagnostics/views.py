"""Contributions of the views: how many count, which explain the same labels, the loss without each, and drift."""

import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.crossval import cross_validate
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.normality import holm
from vbtta.distributions import CategoricalPrediction
from vbtta.fit import fit_model, quick_fit
from vbtta.inference.em import EM
from vbtta.metrics import entropy
from vbtta.policy import ConvergenceWarning, Policy

_MAX_INSTANCES = 4_000  # of a check that fits many times
_MIN_SHIFT = 0.1  # standard deviations: smaller shifts are significant in large samples, and harmless


class Overlap(NamedTuple):
    """Which views explain the same label sets."""

    names: tuple[str, ...]  # the views of positive weight
    share: Array  # (K,): of the label sets that a view explains, by the posterior of the view given the labels
    matrix: Array  # (K, K): 1 where two views explain the same sets in the same proportions, 0 where never the same


class Influence(NamedTuple):
    """Changes when one view is left out; zero for views without weight."""

    names: tuple[str, ...]
    bound: Array  # (K,): bound without the view minus the bound with it
    score: Array  # (K,): the same of the cross-validated log score of an instance, on average
    standard_error: Array  # (K,): of `score`


class DriftCheck(NamedTuple):
    """A signal at calibration time and now."""

    signal: str
    reference: float  # mean at calibration time
    incoming: float  # mean now
    shift: float  # difference in standard deviations of calibration time
    p_value: float  # Kolmogorov-Smirnov, Holm-corrected


class Drift(NamedTuple):
    """Whether incoming views differ from those of calibration time."""

    drifted: bool
    checks: tuple[DriftCheck, ...]
    n_reference: int
    n_incoming: int


def effective_views(weights: Array) -> float:
    """Exponential of the weights' entropy: K where all are equal, 1 where one has all the weight.

    Examples
    --------
    >>> effective_views(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    return float(np.exp(entropy(weights)))


def overlap_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> Overlap:
    """How often two views explain the same labels.

    The posterior probability r_ik that view k made the labels of instance i, proportional to w_k times the
    probability of these labels under the calibrated view alone, label noise included, has overlap
    sum_i r_ik r_il / sqrt(sum_i r_ik^2 sum_i r_il^2).
    """
    names = policy.fitted or policy.names
    used = np.flatnonzero(policy.posterior.weights > 0)
    labels = labels.align(len(predictions), predictions.ids)
    log_share = [
        policy.restrict([k]).score(predictions, labels) + np.log(policy.posterior.weights[k]) for k in used.tolist()
    ]
    share = special.softmax(np.stack(log_share, axis=1), axis=1)  # (N+, K)
    gram = share.T @ share
    size = np.sqrt(np.diagonal(gram))
    size = np.where(size > 0, size, 1.0)
    return Overlap(tuple(names[k] for k in used), share.mean(axis=0), gram / np.outer(size, size))


def labelled_sample(labels: LabelSets, seed: int) -> Array:
    """Rows of labelled instances, all or a random choice of them, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(labels.labelled)[:_MAX_INSTANCES])


def influence_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, seed: int = 0) -> Influence:
    """Fit without each view of positive weight in turn: change of the bound and of held-out scores.

    Negative changes speak for a view. Only models that EM fits; from 4,000 labelled instances at most. Of a stack, its
    heaviest member is fitted.
    """
    policy = policy.heaviest_member
    if not isinstance(policy.engine, EM):
        raise ValueError(f"influence refits by EM; the policy was fitted by {type(policy.engine).__name__}")
    engine = replace(policy.engine, keep_states=False)
    labels = labels.align(len(predictions), predictions.ids)
    rows = labelled_sample(labels, seed)
    views, given = predictions.select(policy.names).take(rows), labels.take(rows)
    fitted = policy.fitted or policy.names

    def bound_and_scores(names: list[str]) -> tuple[float, Array]:
        part = views.select(names)
        bound = fit_model(part, given, policy.model, engine).elbo
        return bound, cross_validate(quick_fit(policy.model, engine, seed), part, given, seed=seed).scores

    bound, score, error = np.zeros((3, len(policy.names)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # only differences matter
        full_bound, full_scores = bound_and_scores(list(fitted))
        for k, name in enumerate(policy.names):
            if policy.weights[k] == 0 or len(fitted) == 1:
                continue
            reduced_bound, scores = bound_and_scores([other for other in fitted if other != name])
            change = scores - full_scores
            bound[k], score[k] = reduced_bound - full_bound, change.mean()
            error[k] = change.std(ddof=1) / np.sqrt(len(change))
    return Influence(policy.names, bound, score, error)


def view_signals(policy: Policy, predictions: ViewPredictions) -> dict[str, Array]:
    """Signals of every input that need no label: by name, (N,) each.

    Classes: confidence of the prediction, weight of the views that vote for the predicted class, mutual information
    of label and view. Numbers: predicted standard deviation, and the views' disagreement (weighted standard deviation
    of their outputs), both on average over outputs, and the prediction itself.
    """
    prediction = policy.predict(predictions)
    used = np.flatnonzero(policy.weights > 0)
    outputs = np.asarray(predictions.select([policy.names[k] for k in used]).outputs, dtype=np.float64)  # (N, K, C)
    weights = policy.weights[used]
    if isinstance(prediction, CategoricalPrediction):
        chosen = prediction.proba.argmax(axis=1)
        return {
            "confidence": prediction.proba.max(axis=1),
            "agreement": (outputs.argmax(axis=2) == chosen[:, None]) @ weights,
            "mutual information": prediction.mutual_information,
        }
    centre = np.einsum("k,nkc->nc", weights, outputs)
    between = np.sqrt(np.einsum("k,nkc->nc", weights, (outputs - centre[:, None]) ** 2))
    signals = {"predicted deviation": np.sqrt(prediction.variance).mean(axis=1), "disagreement": between.mean(axis=1)}
    for c in range(prediction.mean.shape[1]):
        signals["prediction" if prediction.mean.shape[1] == 1 else f"prediction {c}"] = prediction.mean[:, c]
    return signals


def drift_of(policy: Policy, reference: ViewPredictions, incoming: ViewPredictions, *, level: float = 0.01) -> Drift:
    """Compare incoming views with those of calibration time, signal by signal; no labels needed.

    Drift is reported where a signal's distribution differs at the level, corrected for their number, and its mean has
    shifted by a tenth of a standard deviation or more, or its spread by as much.
    """
    from scipy import stats

    before, now = view_signals(policy, reference), view_signals(policy, incoming)
    p_values = holm([stats.ks_2samp(before[name], now[name], method="asymp").pvalue for name in before])
    checks, drifted = [], False
    for (name, then), p_value in zip(before.items(), p_values, strict=True):
        scale = max(float(then.std()), 1e-12 * max(1.0, float(np.abs(then).max())))
        shift = float(now[name].mean() - then.mean()) / scale
        spread_change = abs(float(now[name].std()) / scale - 1)
        checks.append(DriftCheck(name, float(then.mean()), float(now[name].mean()), shift, float(p_value)))
        drifted |= bool(p_value < level) and max(abs(shift), spread_change) >= _MIN_SHIFT
    return Drift(drifted, tuple(checks), len(reference), len(incoming))
