"""Which figures a page has, each with its caption and the words for those who cannot see it."""

__all__ = ["Drawing", "annotator_figures", "comparison_figures", "fit_figures", "quality_figures"]

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vbtta import metrics, plotting
from vbtta.labels import LabelSets
from vbtta.policy import Policy
from vbtta.predictions import CategoricalPrediction, ViewPredictions
from vbtta.report.expected import by_label, expected_labels

_MOST = 3000  # labelled inputs that are looked at, a regular sample where there are more
_LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
_BY_ANNOTATOR = {
    "classes": ", from the predicted classes and what the fit thinks the annotator makes of them",
    "numbers": ": those of the truth, moved by the annotator's bias and widened by the annotator's noise, as the fit "
    "sees them",
}


class Drawing(NamedTuple):
    """An inline SVG with its caption."""

    svg: str
    caption: str


def fit_figures(policy: Policy) -> dict[str, Drawing]:
    """Weights, their history, the bound's history, and the cost-quality curve where views were selected."""
    names, weights, interval = policy.names, policy.weights, policy.weight_interval(0.9)
    titles = {
        f"view-{k}": f"{names[k]}: {weights[k]:.4f} (90 % interval {interval[k, 0]:.4f} to {interval[k, 1]:.4f})"
        for k in range(len(names))
    }
    order = np.argsort(-weights, kind="stable")
    alt = "Weights: " + ", ".join(f"{names[k]} {weights[k]:.3f}" for k in order[:10])
    found = {
        "weights": Drawing(
            plotting.to_svg(plotting.weights(names, weights, interval), alt, "weights", titles),
            "Weight of every view with its 90 % interval; grey views have less than 1 %. Rest the pointer on a "
            "bar for its numbers.",
        )
    }
    if policy.n_steps > 1:
        figure = plotting.weight_history(names, policy.history.weights)
        found["weight_history"] = Drawing(
            plotting.to_svg(figure, f"Weights over {policy.n_steps} updates", "weight-history"),
            "Weights after every update of the fit, from equal weights on.",
        )
        first, last = policy.history.elbo[0], policy.history.elbo[-1]
        alt = f"The bound over {policy.n_steps} updates, from {first:.4g} to {last:.4g}"
        found["bound_history"] = Drawing(
            plotting.to_svg(plotting.bound_history(policy.history.elbo), alt, "bound-history"),
            "The bound on the log evidence after every update; it never falls.",
        )
    if policy.selection is not None:
        curve = policy.selection.curve
        chosen = [point.views for point in curve].index(policy.selection.chosen.views)
        cost, score, error = (
            np.array([getattr(point, name) for point in curve]) for name in ("cost", "score", "standard_error")
        )
        alt = f"Cost and quality of {len(curve)} sets of views; the chosen one costs {curve[chosen].cost:g}"
        found["cost_curve"] = Drawing(
            plotting.to_svg(plotting.cost_curve(cost, score, error, chosen), alt, "cost-curve"),
            f"What more views buy. Bars are standard errors of the difference from all views; budget "
            f"{policy.selection.budget:g}.",
        )
    return found


def comparison_figures(comparison: Mapping[str, Any]) -> dict[str, Drawing]:
    """Differences in log-likelihood from no augmentation, else from the best baseline."""
    records = [record for record in comparison["methods"] if record["nll"] is not None]
    against = next((name for name in ("original", "best") if name in comparison["references"]), None)
    if against is None or not records:
        return {}
    reference = comparison["references"][against]
    key = f"nll_minus_{against}"
    records = [r for r in sorted(records, key=lambda r: r["nll"]) if r["method"] != reference and r[key] is not None]
    if not records:
        return {}
    value, low, high = (np.array([record[key + end] for record in records]) for end in ("", "_low", "_high"))
    names = [record["method"] for record in records]
    figure = plotting.differences(names, value, low, high, f"NLL minus that of {reference} (less is better)")
    alt = f"NLL minus that of {reference}: " + ", ".join(
        f"{name} {change:+.3f}" for name, change in zip(names, value, strict=True)
    )
    level = 100 * comparison["level"]
    return {
        "differences": Drawing(
            plotting.to_svg(figure, alt, "differences"),
            f"Negative log-likelihood on test labels against {reference}, with {level:g} % paired bootstrap intervals.",
        )
    }


def quality_figures(policy: Policy, views: ViewPredictions, labels: LabelSets, where: str) -> dict[str, Drawing]:
    """Reliability of class probabilities, or residuals and interval coverage of numbers.

    Where noise is modelled, labels are compared with what the policy expects of who gave them, and not with what it
    thinks the truth is; test labels that name nobody are taken as the truth.
    """
    labels = labels.align(len(views), views.ids)
    rows = labels.labelled
    if not len(rows):
        return {}
    noisy = policy.annotators is not None and (labels.annotator is not None or where == "calibration labels")
    if len(rows) > _MOST:
        rows = rows[np.linspace(0, len(rows) - 1, _MOST).astype(np.intp)]
        where = f"{where} of {_MOST:,} inputs"
    where += ", taken as the truth" if policy.annotators is not None and not noisy else ""
    labels = labels.take(rows)
    prediction = by_label(policy.predict(views.take(rows)), labels.instance)
    if noisy:
        prediction = expected_labels(policy, prediction, labels)
    if isinstance(prediction, CategoricalPrediction):
        y = labels.categorical(prediction.proba.shape[1], views.classes)
        confidence = prediction.proba.max(axis=1)
        hit = (prediction.proba.argmax(axis=1) == y).astype(np.float64)
        right = float(np.average(hit, weights=labels.count))
        alt = f"Reliability: mean confidence {confidence.mean():.3f}, share of labels that agree {right:.3f}"
        figure = plotting.reliability(confidence, hit, labels.count)
        return {
            "reliability": Drawing(
                plotting.to_svg(figure, alt, "reliability"),
                f"Reliability on {where}: how often the most probable label was given, against its probability"
                f"{_BY_ANNOTATOR['classes'] if noisy else ''}. Points on the broken line mean honest confidence.",
            )
        }
    y = labels.continuous(prediction.mean.shape[1])
    mean = prediction.mean
    figure = plotting.residuals(mean.ravel(), (y - mean).ravel())
    alt = f"Residuals: root mean square {np.sqrt(np.mean((y - mean) ** 2)):.4g}"
    less = "label minus prediction" + (" and the annotator's bias" if noisy else "")
    found = {"residuals": Drawing(plotting.to_svg(figure, alt, "residuals"), f"Residuals on {where}: {less}.")}
    covered = [metrics.interval_coverage(y, *prediction.interval(float(q)), labels.count) for q in _LEVELS]
    alt = f"Coverage: intervals of 90 % hold {100 * covered[8]:.1f} % of the labels"
    found["coverage"] = Drawing(
        plotting.to_svg(plotting.coverage(_LEVELS, np.array(covered)), alt, "coverage"),
        f"Interval coverage on {where}: how many lie in the intervals predicted for them"
        f"{_BY_ANNOTATOR['numbers'] if noisy else ''}. Points on the broken line mean honest intervals.",
    )
    return found


def annotator_figures(policy: Policy, truth: Mapping[str, float] | None = None) -> dict[str, Drawing]:
    """How skilled the annotators are thought to be."""
    people = policy.annotators
    if people is None or not people.names:
        return {}
    known = None
    if hasattr(people, "accuracy"):
        value, interval, label = people.accuracy, people.accuracy_interval, "share of labels that are right"
        if truth and all(name in truth for name in people.names):
            known = np.array([truth[name] for name in people.names])
    else:
        value, interval = people.noise.mean(axis=1), people.noise_interval.mean(axis=1)
        label = "standard deviation of labels around the truth"
    alt = f"Annotators, {label}: " + ", ".join(
        f"{name} {number:.3g}" for name, number in zip(people.names[:10], value[:10], strict=True)
    )
    figure = plotting.annotators(people.names, value, interval, label, known)
    return {
        "annotators": Drawing(
            plotting.to_svg(figure, alt, "annotators"), "What the fit thinks of every annotator, with 90 % intervals."
        )
    }
