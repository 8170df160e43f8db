"""The figures of a page, each with its caption and a text alternative."""

__all__ = ["Drawing", "annotator_figures", "comparison_figures", "fit_figures", "quality_figures"]

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vbtta import metrics, plotting
from vbtta.comparison import by_label
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.checks import annotator_places
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction, variance_factor
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.label_noise import AnnotatorAccuracy
from vbtta.policy import Policy

_MAX_INPUTS = 3000  # labelled inputs that are shown, a regular sample where there are more
_LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])


class Drawing(NamedTuple):
    """An inline SVG with its caption."""

    svg: str
    caption: str


def _drawing(name: str, figure: Any, alt: str, caption: str, titles: Mapping[str, str] | None = None) -> Drawing:
    return Drawing(plotting.to_svg(figure, alt, name.replace("_", "-"), titles), caption)


def fit_figures(policy: Policy) -> dict[str, Drawing]:
    """Weights, their history, the bound's history, and the cost-quality curve where views were selected."""
    names, weights, interval, n_steps = policy.names, policy.weights, policy.weight_interval(0.9), policy.n_steps
    titles = {
        f"view-{k}": f"{names[k]}: {weights[k]:.4f} (90 % interval {interval[k, 0]:.4f} to {interval[k, 1]:.4f})"
        for k in range(len(names))
    }
    heaviest = np.argsort(-weights, kind="stable")[:10]
    alt = "Weights: " + ", ".join(f"{names[k]} {weights[k]:.3f}" for k in heaviest)
    caption = (
        "Weight of every view with its 90 % interval; grey views have less than 1 %. Rest the pointer on a bar for "
    )
    caption += "its numbers."
    drawings = {"weights": _drawing("weights", plotting.weights(names, weights, interval), alt, caption, titles)}
    if n_steps > 1:
        bound, history = policy.history
        alt, caption = (
            f"Weights over {n_steps} updates",
            "Weights after every update of the fit, from equal weights on.",
        )
        figure = plotting.weight_history(names, history)
        drawings["weight_history"] = _drawing("weight_history", figure, alt, caption)
        alt = f"The bound over {n_steps} updates, from {bound[0]:.4g} to {bound[-1]:.4g}"
        caption = "The bound on the log evidence after every update; it never falls."
        drawings["bound_history"] = _drawing("bound_history", plotting.bound_history(bound), alt, caption)
    if policy.selection is not None:
        curve = policy.selection.curve
        chosen = [point.views for point in curve].index(policy.selection.chosen.views)
        cost, score, error = np.array([(point.cost, point.score, point.standard_error) for point in curve]).T
        alt = f"Cost and quality of {len(curve)} sets of views; the chosen one costs {curve[chosen].cost:g}"
        caption = "Held-out score against cost. Bars are standard errors of the difference from all views; budget "
        caption += f"{policy.selection.budget:g}."
        figure = plotting.cost_curve(cost, score, error, chosen)
        drawings["cost_curve"] = _drawing("cost_curve", figure, alt, caption)
    return drawings


def comparison_figures(comparison: Mapping[str, Any]) -> dict[str, Drawing]:
    """Differences in log-likelihood from no augmentation, else from the best baseline."""
    against = next((name for name in ("original", "best") if name in comparison["references"]), None)
    if against is None:
        return {}
    reference, key = comparison["references"][against], f"nll_minus_{against}"
    known = [record for record in comparison["methods"] if record["nll"] is not None and record[key] is not None]
    records = [r for r in sorted(known, key=lambda record: record["nll"]) if r["method"] != reference]
    if not records:
        return {}
    names = [record["method"] for record in records]
    value, low, high = (np.array([record[key + end] for record in records]) for end in ("", "_low", "_high"))
    changes = ", ".join(f"{name} {change:+.3f}" for name, change in zip(names, value, strict=True))
    figure = plotting.differences(names, value, low, high, f"NLL minus that of {reference} (less is better)")
    caption = (
        f"Negative log-likelihood on test labels against {reference}, with {100 * comparison['level']:g} % paired "
    )
    alt, caption = f"NLL minus that of {reference}: {changes}", caption + "bootstrap intervals."
    return {"differences": _drawing("differences", figure, alt, caption)}


def _expected_labels(policy: Policy, truth: Prediction, labels: LabelSets) -> Prediction:
    """The distribution of every label given that of its input's truth, a row a label; noise must be modelled.

    An annotator the fit did not meet is unbiased and otherwise like the average of those it met.
    """
    annotators = policy.annotators
    assert annotators is not None
    annotator = annotator_places(annotators.names, labels)
    if isinstance(truth, CategoricalPrediction):
        assert isinstance(annotators, AnnotatorAccuracy)
        matrices = np.concatenate(
            [annotators.confusion, annotators.confusion.mean(axis=0, keepdims=True)]
        )  # (U + 1, C, C)
        proba = np.empty_like(truth.proba)
        for place in np.unique(annotator):
            proba[annotator == place] = truth.proba[annotator == place] @ matrices[place]
        return CategoricalPrediction(proba, np.zeros(len(proba)), truth.classes)
    assert isinstance(annotators, AnnotatorNoise)
    C = annotators.bias.shape[1]
    bias = np.concatenate([annotators.bias, np.zeros((1, C))])[annotator]  # (J, C)
    variance = annotators.noise**2 + annotators.bias_error**2
    variance = np.concatenate([variance, variance.mean(axis=0, keepdims=True)])[annotator]  # (J, C)
    noise = variance[:, None] / variance_factor(truth.dof)[:, None]  # (J, K, C), as scales
    return ContinuousPrediction(
        truth.weights, truth.dof, truth.location + bias[:, None], truth.scale + noise[..., None] * np.eye(C)
    )


def quality_figures(policy: Policy, views: ViewPredictions, labels: LabelSets, where: str) -> dict[str, Drawing]:
    """Reliability of class probabilities, or residuals and interval coverage of numbers.

    Where noise is modelled, labels are compared with the predicted labels of their annotators, not with the predicted
    truth; test labels without annotators are taken as the truth.
    """
    labels = labels.align(len(views), views.ids)
    rows = labels.labelled
    if not len(rows):
        return {}
    noisy = policy.annotators is not None and (labels.annotator is not None or where == "calibration labels")
    if len(rows) > _MAX_INPUTS:
        rows = rows[np.linspace(0, len(rows) - 1, _MAX_INPUTS).astype(np.intp)]
        where = f"{where} of {_MAX_INPUTS:,} inputs"
    where += ", taken as the truth" if policy.annotators is not None and not noisy else ""
    labels = labels.take(rows)
    prediction = by_label(policy.predict(views.take(rows)), labels.instance)
    if noisy:
        prediction = _expected_labels(policy, prediction, labels)
    if isinstance(prediction, CategoricalPrediction):
        y = labels.categorical(prediction.proba.shape[1], views.classes)
        confidence, hit = prediction.proba.max(axis=1), metrics.hits(y, prediction.proba)
        right = float(np.average(hit, weights=labels.count))
        through = ", from the predicted classes and the annotator's estimated error rates" if noisy else ""
        alt = f"Reliability: mean confidence {confidence.mean():.3f}, share of labels that agree {right:.3f}"
        caption = f"Reliability on {where}: how often the most probable label was given, against its probability"
        caption += f"{through}. Points on the dashed line mean calibrated confidence."
        figure = plotting.reliability(confidence, hit, labels.count)
        return {"reliability": _drawing("reliability", figure, alt, caption)}
    mean = prediction.mean
    y = labels.continuous(mean.shape[1])
    covered = [metrics.interval_coverage(y, *prediction.interval(float(q)), labels.count) for q in _LEVELS]
    through = bias = ""
    if noisy:
        through = ": those of the truth, moved by the annotator's bias and widened by the annotator's noise"
        bias = " and the annotator's bias"
    alt, caption = f"Residuals: root mean square {np.sqrt(np.mean((y - mean) ** 2)):.4g}", f"Residuals on {where}: "
    figure = plotting.residuals(mean.ravel(), (y - mean).ravel())
    drawings = {"residuals": _drawing("residuals", figure, alt, f"{caption}label minus prediction{bias}.")}
    alt = f"Coverage: intervals of 90 % hold {100 * covered[8]:.1f} % of the labels"
    caption = f"Interval coverage on {where}: how many lie in the intervals predicted for them{through}. "
    caption += "Points on the dashed line mean calibrated intervals."
    figure = plotting.coverage(_LEVELS, np.array(covered))
    return {**drawings, "coverage": _drawing("coverage", figure, alt, caption)}


def annotator_figures(policy: Policy, truth: Mapping[str, float] | None = None) -> dict[str, Drawing]:
    """Estimated skill of the annotators."""
    annotators = policy.annotators
    if annotators is None or not annotators.names:
        return {}
    known = None
    if isinstance(annotators, AnnotatorAccuracy):
        value, interval, label = annotators.accuracy, annotators.accuracy_interval, "share of labels that are right"
        if truth and all(name in truth for name in annotators.names):
            known = np.array([truth[name] for name in annotators.names])
    else:
        value, interval = annotators.noise.mean(axis=1), annotators.noise_interval.mean(axis=1)
        label = "standard deviation of labels around the truth"
    values = ", ".join(f"{name} {number:.3g}" for name, number in zip(annotators.names[:10], value[:10], strict=True))
    figure = plotting.annotators(annotators.names, value, interval, label, known)
    caption = "Estimates of the fit for every annotator, with 90 % intervals."
    return {"annotators": _drawing("annotators", figure, f"Annotators, {label}: {values}", caption)}
