"""`diagnose`: all checks of one policy in one object, with a summary in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import printable, real_array, require
from vbtta._support.files import finite, to_plain
from vbtta.crossval import n_units
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions, require_views
from vbtta.diagnostics import checks
from vbtta.diagnostics.normality import Normality, normality_of
from vbtta.inference.em import EM
from vbtta.policy import Guard, Policy

_SMALL_P = 0.01  # p-values below are reported, given that several are looked at
_RARE = 0.001  # probability of so many rejections among Gaussian draws
_SENSITIVE = 0.2  # total variation of weights that depend on a prior
_ALIKE = 0.9  # overlap of redundant views
_MAX_HEAVY = 4  # views whose inputs are described


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
    copying: tuple[checks.Copying, ...] | None = None  # pairs of annotators, most suspicious first
    overlap: checks.Overlap | None = None  # views that explain the same labels
    influence: checks.Influence | None = None  # changes when one view is left out
    predictive: tuple[checks.PredictiveCheck, ...] | None = None  # statistics of the labels, observed and simulated
    sensitivity: tuple[checks.Sensitivity, ...] | None = None  # changes of the weights under other priors
    normality: Normality | None = None  # of the draws of stochastic views
    drift: checks.Drift | None = None  # of incoming views
    gate: checks.GateUse | None = None  # weights that depend on the input: on what, and for which inputs

    def __repr__(self) -> str:
        return f"Diagnosis({self.task}: {len(self.names)} views, {self.effective_views:.1f} effective)"

    def summary(self) -> str:
        """The findings in words, one line each; those that need attention start with an exclamation mark."""
        absent = {"annotators": ["Label noise is not modelled."], "normality": [_NO_DRAWS]}
        parts = [self._in_words(name) or absent.get(name, []) for name in _IN_WORDS]
        return printable("\n".join([*_views(self), *(line for lines in parts for line in lines)]), "\n")

    __str__ = summary

    def sections(self) -> dict[str, list[str]]:
        """Findings by the question that they answer, without those that figures show: for the report."""
        return {title: [line for name in names for line in self._in_words(name)] for title, names in _SECTIONS.items()}

    def _in_words(self, name: str) -> list[str]:
        return _IN_WORDS[name](getattr(self, name)) if getattr(self, name) else []

    @property
    def at_chance(self) -> tuple[str, ...]:
        """Annotators of class labels whose 90 % interval of accuracy includes that of guessing, or lies below it."""
        return _guessing(self.annotators)

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
    policy, predictions
        The policy and its calibration inputs.
    labels : LabelSets or array, optional
        Theirs: for the overlap and influence of views, predictive checks and prior sensitivity.
    draws : (n, K, M, C) array, optional
        Single draws of the views, for the tests of normality; by default those that `predictions` keep.
    incoming : ViewPredictions, optional
        Views of new inputs, without labels, to be compared with those of calibration time.
    refit : bool
        Whether to fit again without each view and under other priors (some dozens of fits).
    """
    require_views(predictions)
    drawn = predictions.draws if draws is None else real_array("draws", draws)
    sets, incoming = checks.label_sets(labels, policy), checks.two_class(policy, incoming)[1]
    policy, predictions = checks.two_class(policy, predictions)
    findings: dict[str, Any] = {}
    if sets is not None:
        data = predictions, predictions.align(sets)
        findings["copying"] = checks.copying_of(policy, *data)
        findings["overlap"] = checks.overlap_of(policy, *data)
        findings["predictive"] = checks.predictive_checks(policy, *data, seed=seed)
        if refit and isinstance(policy.engine, EM) and n_units(data[1], predictions.groups) > 1:
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


def _gate(gate: checks.GateUse) -> list[str]:
    names, pooled, coefficients, (low, high), views = gate._replace(interval=gate.interval.T)
    where = "averages over a group" if pooled else "features of the views' outputs"
    order = np.argsort(-np.abs(coefficients), kind="stable")
    effects = [f"{names[f]} {coefficients[f]:+.2f} ({low[f]:+.2f} to {high[f]:+.2f})" for f in order]
    clear = [effect for effect, f in zip(effects, order, strict=True) if low[f] > 0 or high[f] < 0]
    related = f"most on: {listing(effects[:2])}; related features share their effect, so that none is clear alone"
    lines = [f"Weights depend on {where}; {f'clearly on: {listing(clear)}' if clear else related}."]
    for name, share, contrast, examples in views[:_MAX_HEAVY]:
        f = int(np.abs(contrast * coefficients).argmax()) if len(contrast) else 0
        where = f", where its {names[f]} is {contrast[f]:+.1f} standard deviations from elsewhere" if share < 1 else ""
        lines.append(f"  {name} is the heaviest for {100 * share:.0f} % of the inputs{where}: {listing(examples)}")
    return lines


def annotators_in_words(annotators: Any, truth: Mapping[str, float] | None = None) -> list[str]:
    """Estimated quality of the annotators, next to the true accuracy where it is known."""
    if annotators is None or not annotators.names:
        return []
    estimates = []
    for k, name in enumerate(f"{name} " if len(annotators.names) > 1 else "" for name in annotators.names):
        if hasattr(annotators, "accuracy"):
            value, (low, high) = 100 * annotators.accuracy[k], 100 * annotators.accuracy_interval[k]
            known = f"; in truth {100 * truth[name.strip()]:.0f} %" if truth and name.strip() in truth else ""
            estimates.append(f"{name}{value:.0f} % right ({low:.0f} to {high:.0f} %{known})")
        else:
            error, bias = annotators.noise[k].mean(), annotators.bias[k].mean()
            estimates.append(f"{name}errs by {error:.3g} with a bias of {bias:+.3g}")
    if len(estimates) > 8:
        error = -annotators.accuracy if hasattr(annotators, "accuracy") else annotators.noise.mean(axis=1)
        worst = [estimates[k] for k in np.argsort(-error, kind="stable")]
        lines = [f"{len(estimates):,} annotators, the worst first: {listing(worst, 8)}."]
    else:
        lines = [f"{'Labels' if len(annotators.names) == 1 else 'Annotators'}: {', '.join(estimates)}."]
    if guessing := _guessing(annotators):
        lines.append(f"! No better than guessing, by their intervals of accuracy: {listing(guessing)}.")
    return lines


def _guessing(people: Any) -> tuple[str, ...]:
    if not hasattr(people, "accuracy"):
        return ()
    at_most = people.accuracy_interval[:, 0] <= 1 / people.confusion.shape[1]
    return tuple(people.names[u] for u in np.flatnonzero(at_most))


def _copying(pairs: Sequence[checks.Copying]) -> list[str]:
    suspects = [
        f"{first} and {second} ({100 * copied:.0f} % of {n}, p = {p_value:.1g})"
        for first, second, n, copied, p_value in pairs
        if p_value < _SMALL_P
    ]
    none = f"None of {len(pairs)} pairs of annotators seems to copy."
    return [f"! Annotators who seem to copy each other: {listing(suspects)}." if suspects else none]


def _overlap(overlap: checks.Overlap) -> list[str]:
    names, _, matrix = overlap
    pairs = sorted(((matrix[a, b], a, b) for a in range(len(names)) for b in range(a)), reverse=True)
    if alike := [f"{names[b]} and {names[a]} ({value:.2f})" for value, a, b in pairs if value >= _ALIKE]:
        return [f"Views that explain the same labels (overlap): {listing(alike)}."]
    nearest = [f"{names[b]} and {names[a]} (overlap {value:.2f})" for value, a, b in pairs[:1]]
    return [f"No two views explain the same labels; nearest are {text}." for text in nearest]


def _influence(influence: checks.Influence) -> list[str]:
    names, score, error = influence
    text = [f"{name} ({change:+.4f} per input)" for name, change in zip(names, score, strict=True)]
    missed = [text[k] for k in np.argsort(score, kind="stable") if score[k] < -2 * error[k]]
    harmful = [text[k] for k in np.flatnonzero(error) if score[k] > 2 * error[k]]
    lines = ["No single view is missed: held-out scores do not fall beyond two standard errors without it."]
    if missed:
        lines = [f"Held-out scores fall beyond two standard errors without {listing(missed)}."]
    return [*lines, f"! Held-out scores rise without {listing(harmful)}."] if harmful else lines


def _predictive(results: Sequence[checks.PredictiveCheck]) -> list[str]:
    lines = [
        f"! {name[0].upper()}{name[1:]}: observed {value:.4g}, the model expects {mean:.4g} ({low:.4g} to {high:.4g})."
        for name, value, mean, low, high, p_value in results
        if p_value < _SMALL_P
    ]
    return lines or [f"Simulated label sets look like the observed ones ({len(results)} statistics compared)."]


def _sensitivity(changes: Sequence[checks.Sensitivity]) -> list[str]:
    prior, factor, distance = max(changes, key=lambda change: change.distance)
    verdict = "! The weights depend on a prior" if distance > _SENSITIVE else "The weights do not depend on the priors"
    return [f"{verdict}: {100 * distance:.0f} % of the weight moves at most, with {prior} times {factor:.2g}."]


def _normality(part: Normality) -> list[str]:
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


def _drift(drift: checks.Drift) -> list[str]:
    title = "! Incoming views differ from calibration time:" if drift.drifted else "Incoming views look as before:"
    return [title] + [
        f"  {signal}: {mean:.4g} then, {new_mean:.4g} now ({shift:+.2f} standard deviations, p = {p_value:.2g})"
        for signal, mean, new_mean, shift, p_value in drift.checks
    ]


_NO_DRAWS = "Normality of the draws was not tested: there are none (collect_views(keep_draws=...))."
_IN_WORDS: dict[str, Callable[[Any], list[str]]] = {
    "gate": _gate,
    "annotators": annotators_in_words,
    "copying": _copying,
    "overlap": _overlap,
    "influence": _influence,
    "predictive": _predictive,
    "sensitivity": _sensitivity,
    "normality": _normality,
    "drift": _drift,
}
_SECTIONS = {
    "views": ("influence", "overlap", "gate", "sensitivity"),
    "quality": ("predictive", "normality", "drift"),
    "annotators": ("copying",),
}
