"""`diagnose`: all checks of one policy in one object, with a summary in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import require
from vbtta._support.files import finite, to_plain
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics import checks
from vbtta.diagnostics.normality import Normality, normality_of
from vbtta.inference.em import EM
from vbtta.policy import Guard, Policy

_SMALL_P = 0.01  # p-values below are reported, given that several are looked at
_RARE = 0.001  # probability of so many rejections among Gaussian draws
_SENSITIVE = 0.2  # total variation of weights that depend on a prior
_ALIKE = 0.9  # overlap of redundant views
_MAX_HEAVY = 6  # views whose inputs are described


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The findings of :func:`diagnose`; print it, or look at the parts. Parts that lacked their data are None."""

    task: str
    names: tuple[str, ...]
    weights: Array
    weight_interval: Array  # 90 %
    effective_views: float  # exponential of the weights' entropy
    converged: bool
    guard: Guard
    annotators: Any
    copying: tuple[checks.Copying, ...] | None = None  # pairs of annotators of class labels, most suspicious first
    overlap: checks.Overlap | None = None  # views that explain the same labels
    influence: checks.Influence | None = None  # changes when one view is left out
    predictive: tuple[checks.PredictiveCheck, ...] | None = None  # statistics of the labels, observed and simulated
    sensitivity: tuple[checks.Sensitivity, ...] | None = None  # changes of the weights under other priors
    normality: Normality | None = None  # of the draws of stochastic views
    drift: checks.Drift | None = None  # of incoming views
    gate: checks.GateUse | None = None  # weights that depend on the input: on what, and for which inputs

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"Diagnosis({self.task}: {len(self.names)} views, {self.effective_views:.1f} effective)"

    def summary(self) -> str:
        """The findings in words, one line each; those that need attention start with an exclamation mark."""
        parts = (_views, _gate, _noise, _copying, _overlap, _influence, _predictive, _sensitivity, _normality, _drift)
        return "\n".join(line for part in parts for line in part(self))

    def to_dict(self) -> dict[str, Any]:
        """All findings as plain data for JSON; undefined numbers are None."""
        return {field.name: finite(to_plain(getattr(self, field.name))) for field in fields(self)}

    def plot(self) -> Any:
        """A matplotlib Figure: QQ plots of the stochastic views' draws."""
        part = self.normality
        if part is None or not part.tested.any():
            raise ValueError("there are no draws of stochastic views; pass draws=, or collect_views(keep_draws=...)")
        shown = np.flatnonzero(part.tested)
        figure = require("matplotlib.figure", "cli").Figure(figsize=(2.6 * len(shown), 2.8), layout="constrained")
        for place, k in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), place + 1, title=part.names[k], xlabel="normal quantile")
            axes.plot(part.qq_normal, part.qq_normal, color="0.6", linewidth=0.8)
            axes.plot(part.qq_normal, part.qq_draws[k], ".", markersize=3)
        return figure


def diagnose(
    policy: Policy,
    predictions: ViewPredictions,
    labels: LabelSets | ArrayLike | None = None,
    draws: ArrayLike | None = None,
    *,
    incoming: ViewPredictions | None = None,
    refit: bool = True,
    seed: int = 0,
) -> Diagnosis:
    """Check a policy's assumptions on the data it was fitted to.

    Parameters
    ----------
    policy : Policy
    predictions : ViewPredictions
        Of the calibration inputs.
    labels : LabelSets or array, optional
        Theirs: for the overlap and influence of views, predictive checks and prior sensitivity.
    draws : (n, K, M, C) array, optional
        Single draws of the views, for the tests of normality; by default those that `predictions` keep.
    incoming : ViewPredictions, optional
        Views of new inputs, without labels, to be compared with those of calibration time.
    refit : bool
        Whether to fit again without each view and under other priors (some dozens of fits).
    seed : int
        For folds and simulations.

    Examples
    --------
    >>> from vbtta.fit import fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=300)
    >>> outputs = truth[:, None, None] + rng.normal(size=(300, 2, 1)) * [[0.5], [0.6]]
    >>> views = ViewPredictions(outputs, names=["identity", "flip"])
    >>> diagnosis = diagnose(fit_policy(views, truth, task="regression"), views, truth)
    >>> diagnosis
    Diagnosis(regression: 2 views, 2.0 effective)
    >>> print(diagnosis.summary().splitlines()[0])
    2 of 2 views are kept; they count as 2.0 equal ones.
    """
    drawn = predictions.draws if draws is None else np.asarray(draws)
    read = LabelSets.from_multilabel if policy.multilabel else LabelSets.from_array
    incoming = checks.two_class(policy, incoming)[1]
    policy, predictions = checks.two_class(policy, predictions)
    findings: dict[str, Any] = {}
    if labels is not None:
        data = predictions, labels if isinstance(labels, LabelSets) else read(labels)
        findings["copying"] = checks.copying_of(policy, *data)
        findings["overlap"] = checks.overlap_of(policy, *data)
        findings["predictive"] = checks.predictive_checks(policy, *data, seed=seed)
        if refit and isinstance(policy.engine, EM):
            findings["influence"] = checks.influence_of(policy, *data, seed=seed)
            findings["sensitivity"] = checks.prior_sensitivity(policy, *data)
    names = ("task", "names", "weights", "converged", "guard", "annotators")
    return Diagnosis(
        **{name: getattr(policy, name) for name in names},
        weight_interval=policy.weight_interval(0.9),
        effective_views=checks.effective_views(policy.weights),
        **findings,
        normality=None if drawn is None else normality_of(drawn, predictions.names, seed=seed),
        drift=None if incoming is None else checks.drift_of(policy, predictions, incoming),
        gate=checks.gate_of(policy, predictions),
    )


def listing(items: Sequence[str], most: int = 6) -> str:
    """The items with commas, and how many more there are: "a, b and 1 more"."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _views(diagnosis: Diagnosis) -> list[str]:
    names, weights = diagnosis.names, diagnosis.weights
    kept = np.flatnonzero(weights)
    lines = [f"{len(kept)} of {len(names)} views are kept; they count as {diagnosis.effective_views:.1f} equal ones."]
    for k in kept[np.argsort(-weights[kept], kind="stable")][:8]:
        low, high = diagnosis.weight_interval[k]
        lines.append(f"  {names[k]}: {weights[k]:.3f} (90 % interval {low:.3f} to {high:.3f})")
    if not diagnosis.converged:
        lines.append("! The fit did not converge: raise EM(max_steps=...).")
    mark = "! " if diagnosis.guard.fell_back else ""
    return [*lines, f"{mark}Against the network alone: {diagnosis.guard.reason}."]


def _gate(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.gate is None:
        return []
    names, pooled, coefficients, interval, views = diagnosis.gate
    where = "averages over a group" if pooled else "features of the views' outputs"
    order = np.argsort(-np.abs(coefficients), kind="stable")
    clear = [
        f"{names[f]} {coefficients[f]:+.2f} ({interval[f, 0]:+.2f} to {interval[f, 1]:+.2f})"
        for f in order
        if interval[f, 0] > 0 or interval[f, 1] < 0
    ]
    lines = [f"Weights depend on {where}; clearly on: {listing(clear) or 'none of them'}."]
    for name, share, contrast, examples in views[:_MAX_HEAVY]:
        f = int(np.abs(contrast * coefficients).argmax()) if len(contrast) else 0
        because = (
            f", where its {names[f]} is {contrast[f]:+.1f} standard deviations from elsewhere" if share < 1 else ""
        )
        lines.append(f"  {name} is the heaviest for {100 * share:.0f} % of the inputs{because}: {listing(examples)}")
    return lines


def annotators_in_words(annotators: Any, truth: Mapping[str, float] | None = None) -> list[str]:
    """Estimated quality of the annotators, next to the true accuracy where it is known."""
    if annotators is None or not annotators.names:
        return []
    known = truth or {}
    if hasattr(annotators, "accuracy"):
        rows = zip(annotators.names, annotators.accuracy, annotators.accuracy_interval, strict=True)
        estimates = [
            f"{name} {100 * value:.0f} % right ({100 * low:.0f} to {100 * high:.0f} %"
            + (f"; in truth {100 * known[name]:.0f} %)" if name in known else ")")
            for name, value, (low, high) in rows
        ]
    else:
        estimates = [
            f"{name} errs by {np.mean(noise):.3g} with a bias of {np.mean(bias):+.3g}"
            for name, noise, bias in zip(annotators.names, annotators.noise, annotators.bias, strict=True)
        ]
    return [f"Annotators: {listing(estimates, 8)}."]


def _noise(diagnosis: Diagnosis) -> list[str]:
    return annotators_in_words(diagnosis.annotators) or ["Label noise is not modelled."]


def _copying(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.copying:
        return []
    suspects = [
        f"{pair.first} and {pair.second} ({100 * pair.copied:.0f} % of {pair.n_instances}, p = {pair.p_value:.1g})"
        for pair in diagnosis.copying
        if pair.p_value < _SMALL_P
    ]
    none = f"None of {len(diagnosis.copying)} pairs of annotators seems to copy."
    return [f"! Annotators who seem to copy each other: {listing(suspects)}." if suspects else none]


def _overlap(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.overlap is None or len(diagnosis.overlap.names) < 2:
        return []
    names, _, matrix = diagnosis.overlap
    pairs = sorted(((matrix[a, b], a, b) for a in range(len(names)) for b in range(a)), reverse=True)
    if pairs[0][0] < _ALIKE:
        value, a, b = pairs[0]
        return [f"No two views explain the same labels; nearest are {names[b]} and {names[a]} (overlap {value:.2f})."]
    alike = [f"{names[b]} and {names[a]} ({value:.2f})" for value, a, b in pairs if value >= _ALIKE]
    return [f"Views that explain the same labels (overlap): {listing(alike)}."]


def _influence(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.influence is None:
        return []
    names, score, error = diagnosis.influence
    text = [f"{names[k]} ({score[k]:+.4f} per input)" for k in range(len(names))]
    missed = [text[k] for k in np.argsort(score, kind="stable") if score[k] < -2 * error[k]]
    harmful = [text[k] for k in range(len(names)) if score[k] > 2 * error[k] > 0]
    lines = ["No single view is missed: held-out scores do not fall beyond two standard errors without it."]
    if missed:
        lines = [f"Held-out scores fall beyond two standard errors without {listing(missed)}."]
    return [*lines, f"! Held-out scores rise without {listing(harmful)}."] if harmful else lines


def _predictive(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.predictive is None:
        return []
    lines = [
        f"! {check.statistic[0].upper()}{check.statistic[1:]}: observed {check.observed:.4g}, the model expects "
        f"{check.expected:.4g} ({check.low:.4g} to {check.high:.4g})."
        for check in diagnosis.predictive
        if check.p_value < _SMALL_P
    ]
    return lines or [f"Simulated label sets look like the observed ones in all {len(diagnosis.predictive)} respects."]


def _sensitivity(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.sensitivity:
        return []
    prior, factor, distance = max(diagnosis.sensitivity, key=lambda change: change.distance)
    verdict = "! The weights depend on a prior" if distance > _SENSITIVE else "The weights do not depend on the priors"
    return [f"{verdict}: {100 * distance:.0f} % of the weight moves at most, with {prior} times {factor:.2g}."]


def _normality(diagnosis: Diagnosis) -> list[str]:
    part = diagnosis.normality
    if part is None:
        return ["Normality of the draws was not tested: there are none (collect_views(keep_draws=...))."]
    tests = {"Henze-Zirkler": part[1], "Anderson-Darling": part[2], "Shapiro-Wilk": part[3]}
    lines = []
    for k in np.flatnonzero(part.tested):
        n = int(part.tested[k])
        shares = {name: share[k] for name, share in tests.items() if not np.isnan(share[k])}
        # binomial probability of so many or more rejections
        chance = min(float(special.bdtrc(round(share * n) - 1, n, part.level)) for share in shares.values())
        few = "" if len(shares) == 3 else "; too few draws for Henze-Zirkler, which needs two more than outputs"
        lines.append(
            f"{'! ' if chance < _RARE else ''}{part.names[k]}: draws are not Gaussian for so many of {n} inputs: "
            f"{', '.join(f'{100 * share:.0f} % ({name})' for name, share in shares.items())}; "
            f"{100 * part.level:.0f} % is expected by chance{few}."
        )
    return lines or ["Normality of the draws was not tested: no view's draws vary."]


def _drift(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.drift is None:
        return []
    drifted = diagnosis.drift.drifted
    changes = [
        f"  {signal}: {then:.4g} then, {now:.4g} now ({shift:+.2f} standard deviations, p = {p_value:.2g})"
        for signal, then, now, shift, p_value in diagnosis.drift.checks
    ]
    return ["! Incoming views differ from calibration time:" if drifted else "Incoming views look as before:", *changes]
