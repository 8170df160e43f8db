"""`diagnose`: all checks of one policy in one object that a person can read."""

__all__ = ["Diagnosis", "diagnose"]

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.extras import require
from vbtta._support.plain import to_plain
from vbtta.diagnostics.checks import PredictiveCheck, Sensitivity, predictive_checks, prior_sensitivity
from vbtta.diagnostics.drift import Drift, drift_of
from vbtta.diagnostics.normality import Normality, normality_of
from vbtta.diagnostics.summary import summary_of
from vbtta.diagnostics.views import Influence, Overlap, effective_views, influence_of, overlap_of
from vbtta.labels import Array, LabelSets
from vbtta.policy import Guard, Policy
from vbtta.predictions import ViewPredictions
from vbtta.specs import EM


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What :func:`diagnose` found; print it, or look at the parts. Parts that lacked their data are None.

    Attributes
    ----------
    names : K strings
    weights : (K,) array
    weight_interval : (K, 2) array
        90 %.
    effective_views : float
        Exponential of the weights' entropy.
    converged : bool
    guard : Guard
        Whether the views were checked against the identity view alone.
    annotators : AnnotatorAccuracy, AnnotatorNoise or None
        Estimates of the label noise.
    overlap : Overlap or None
    influence : Influence or None
    predictive : tuple of PredictiveCheck, or None
    sensitivity : tuple of Sensitivity, or None
    normality : Normality or None
        Of the draws of stochastic views.
    drift : Drift or None
        Of incoming views.
    """

    task: str
    names: tuple[str, ...]
    weights: Array
    weight_interval: Array
    effective_views: float
    converged: bool
    guard: Guard
    annotators: Any
    overlap: Overlap | None
    influence: Influence | None
    predictive: tuple[PredictiveCheck, ...] | None
    sensitivity: tuple[Sensitivity, ...] | None
    normality: Normality | None
    drift: Drift | None

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"Diagnosis({self.task}: {len(self.names)} views, {self.effective_views:.1f} effective)"

    def summary(self) -> str:
        """The findings in words, those that ask for attention marked with an exclamation mark."""
        return summary_of(self)

    def to_dict(self) -> dict[str, Any]:
        """All findings as JSON knows them; what is undefined is None."""
        return {field.name: _json(to_plain(getattr(self, field.name))) for field in fields(self)}

    def plot(self) -> Any:
        """A matplotlib Figure: QQ plots of the stochastic views' draws; needs draws."""
        if self.normality is None or not self.normality.tested.any():
            raise ValueError(
                "there are no draws of stochastic views; pass draws= to diagnose, or collect_views(keep_draws=...)"
            )
        found = self.normality
        shown = np.flatnonzero(found.tested)
        figure = require("matplotlib.figure", "cli").Figure(figsize=(2.6 * len(shown), 2.8), layout="constrained")
        for place, k in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), place + 1)
            axes.plot(found.qq_normal, found.qq_normal, color="0.6", linewidth=0.8)
            axes.plot(found.qq_normal, found.qq_draws[k], ".", markersize=3)
            axes.set_title(found.names[k], fontsize=9)
            axes.set_xlabel("normal quantile", fontsize=8)
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

    Returns
    -------
    Diagnosis

    Examples
    --------
    >>> from vbtta.fit import fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=300)
    >>> outputs = truth[:, None, None] + rng.normal(size=(300, 2, 1)) * [[0.5], [0.6]]
    >>> views = ViewPredictions(outputs, names=["identity", "flip"])
    >>> found = diagnose(fit_policy(views, truth, task="regression"), views, truth)
    >>> found
    Diagnosis(regression: 2 views, 2.0 effective)
    >>> print(found.summary().splitlines()[0])
    2 of 2 views are kept; they count as 2.0 equal ones.
    """
    drawn = predictions.draws if draws is None else np.asarray(draws)
    overlap = influence = predictive = sensitivity = None
    if labels is not None:
        sets = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
        overlap = overlap_of(policy, predictions, sets)
        predictive = predictive_checks(policy, predictions, sets, seed=seed)
        if refit and isinstance(policy.engine, EM):
            influence = influence_of(policy, predictions, sets, seed=seed)
            sensitivity = prior_sensitivity(policy, predictions, sets)
    return Diagnosis(
        task=policy.task,
        names=policy.names,
        weights=policy.weights,
        weight_interval=policy.weight_interval(0.9),
        effective_views=effective_views(policy.weights),
        converged=policy.converged,
        guard=policy.guard,
        annotators=policy.annotators,
        overlap=overlap,
        influence=influence,
        predictive=predictive,
        sensitivity=sensitivity,
        normality=None if drawn is None else normality_of(drawn, predictions.names, seed=seed),
        drift=None if incoming is None else drift_of(policy, predictions, incoming),
    )


def _json(value: Any) -> Any:
    """Numbers that JSON does not know become None."""
    if isinstance(value, dict):
        return {key: _json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_json(entry) for entry in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
