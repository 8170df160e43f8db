"""The page: figures, tables and examples in one template, self-contained and escaped."""

import base64
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta import metrics, plotting
from vbtta._support.checks import printable, require
from vbtta._support.files import atomic_path
from vbtta.comparison import best_methods, change_text, metric_title
from vbtta.conformal import ConformalPolicy, unwrapped
from vbtta.data.labels import Array, LabelSets, class_positions
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.checks import annotator_places, label_sets, two_class
from vbtta.diagnostics.diagnosis import annotators_in_words, listing
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction, Prediction, variance_factor
from vbtta.models.base import InMemory
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.label_noise import AnnotatorAccuracy
from vbtta.policy import KEPT, Policy
from vbtta.report import documents
from vbtta.report.maps import MapExample
from vbtta.sequential import SequentialPolicy

_MAX_VIEWS = 24  # of an example
_MAX_PEOPLE = 15  # best, and worst, annotators of a figure
_MAX_RATERS = 500  # rows of the table of annotators
_MAX_SCORED = 1000  # labelled inputs of the curve of cost and quality
_MAX_INPUTS = 3000  # labelled inputs that are shown, a regular sample where there are more
_LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])


def render_report(
    policy: Policy | SequentialPolicy | ConformalPolicy,
    *,
    predictions: ViewPredictions | None = None,
    labels: LabelSets | ArrayLike | None = None,
    test: tuple[ViewPredictions, LabelSets | ArrayLike] | None = None,
    comparison: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    images: Sequence[Array] | None = None,
    maps: Sequence[MapExample] = (),
    story: Mapping[str, Any] | None = None,
    circumstances: Mapping[str, Any] | None = None,
) -> str:
    """Make a self-contained HTML page about a policy; parts without data are left out.

    `predictions` and `labels` are those of the calibration sample, `test` is a pair of them for reliability and hard
    inputs, of which `images` ((H, W) or (H, W, 3), uint8) are pictures, and `maps` come from :func:`map_examples`.
    `comparison` and `diagnosis` are documents (:func:`comparison_document`, :func:`diagnosis_document`), `story` has
    `title` and `text` (sentences that come first), `circumstances` come from
    :func:`vbtta.report.documents.provenance`.
    """
    jinja2 = require("jinja2", "cli")
    story = story or {}
    inner, sequential, conformal = unwrapped(policy)
    fit_labels, test_labels = (label_sets(part, inner) for part in (labels, None if test is None else test[1]))
    views, answers, where = predictions, fit_labels, "calibration labels"
    if test is not None:
        views, answers, where = test[0], test_labels, "test labels"
    policy, views = two_class(inner, views)
    answers = None if views is None or answers is None else views.align(answers)
    drawings = weight_figures(policy) | curve_figures(policy, sequential, views, answers) | annotator_figures(policy)
    if comparison is not None:
        drawings |= comparison_figures(comparison)
    if answers is not None:
        drawings |= quality_figures(policy, views, answers, where)
    if policy.gate is not None and views is not None:
        drawings |= gate_figures(policy, views)
    if conformal is not None and test is not None and answers is not None:
        drawings |= set_figures(conformal, test[0], answers)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vbtta.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    text: str = environment.get_template("report.html").render(
        title=story.get("title", "Test-time augmentation policy"),
        story=story.get("text", ()),
        headline=documents.headline(policy, comparison),
        views=documents.views_in_words(policy),
        people=annotators_in_words(policy.annotators),
        raters=_raters(policy, fit_labels),
        cost=documents.cost_in_words(policy, sequential, views),
        advice=documents.advice(policy, comparison),
        guard=policy.guard,
        kept=f"{np.count_nonzero(policy.weights)} of {len(policy.names)}",
        drawings=drawings,
        guarantee=None if conformal is None else documents.guarantee_in_words(conformal),
        comparison=None if comparison is None else _table(comparison),
        metric_title=metric_title,
        change_text=change_text,
        examples=[] if views is None or maps else _examples(policy, views, answers, images),
        maps=[(f"{name}: Dice {dice:.3f}", [(t, _png(p)) for t, p in panels.items()]) for name, dice, panels in maps],
        findings={"views": [], "quality": [], "annotators": [], **(diagnosis or {}).get("sections", {})},
        provenance=documents.provenance(policy, {}) if circumstances is None else circumstances,
    )
    script = text.rpartition("<script>")[2].partition("</script>")[0]  # the only script that the page allows
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return text.lstrip().replace("SCRIPT-DIGEST", digest, 1)


def _shown(value: Any) -> Any:
    """Text without control characters, with no-break spaces before percent signs; drawings are not changed."""
    return printable(value, "\n\t").replace(" %", "\u00a0%").replace(" +- ", " ± ") if type(value) is str else value


def write_report(
    path: str | os.PathLike[str], policy: Policy | SequentialPolicy | ConformalPolicy, **parts: Any
) -> None:
    """Write the page of :func:`render_report` to a file, atomically."""
    text = render_report(policy, **parts)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _table(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The sortable table, with changes from no augmentation, else from the best baseline."""
    best = {metric: best_methods(comparison["methods"], metric) for metric in comparison["metrics"]}
    return {**comparison, "best": best, "against": next(iter(comparison["references"]), "")}


def _raters(policy: Policy, labels: LabelSets | None) -> dict[str, Any] | None:
    """The sortable table of annotators: number of labels and estimates."""
    if policy.annotators is None or len(policy.annotators.names) < 2:
        return None
    frame = policy.annotators.to_frame().iloc[:_MAX_RATERS, :10]
    if labels is not None and labels.annotator is not None:
        n_labels = dict(zip(labels.annotator_names, np.bincount(labels.annotator, labels.count), strict=False))
        frame.insert(0, "labels", [n_labels.get(name, 0) for name in frame.index])
    rows = zip(frame.index, frame.to_numpy().tolist(), strict=True)
    return {"titles": list(frame.columns), "rows": rows, "more": len(policy.annotators.names) - len(frame)}


def _examples(
    policy: Policy, views: ViewPredictions, labels: LabelSets | None, images: Sequence[Array] | None
) -> list[tuple[Any, ...]]:
    """Inputs that the views disagree about: name, the policy's prediction, picture, and the outputs of every view."""
    rows = _disputed(policy, views)
    part = views.take(rows)
    votes = None if labels is None else labels.take(rows)
    prediction, by_input = policy.predict(part), policy.weights_for(part)
    known = [k for k, name in enumerate(policy.names) if name in views.names]
    examples = []
    for e, row in enumerate(rows):
        entries = []
        for k in sorted(known, key=lambda k: -by_input[e, k])[:_MAX_VIEWS]:
            outputs, weight = part.outputs[e, part.names.index(policy.names[k])], by_input[e, k]
            average = "" if policy.gate is None else f" (average {policy.weights[k]:.3f})"
            text = listing([f"{value:.4g}" for value in outputs], 4)
            if isinstance(prediction, CategoricalPrediction):
                text = f"{100 * special.softmax(outputs).max():.0f} % for {prediction.classes[outputs.argmax()]}"
            entries.append((policy.names[k], f"{weight:.3f}{average}", text, weight < KEPT))
        if isinstance(prediction, CategoricalPrediction):
            verdict = f"{prediction.label[e]} ({100 * prediction.proba[e].max():.0f} %)"
        else:
            numbers = zip(prediction.mean[e], prediction.std[e], strict=True)
            verdict = listing([f"{mean:.4g} ± {std:.2g}" for mean, std in numbers], 4)
        name = str(row if views.ids is None else views.ids[row])
        if votes is not None and (votes.instance == e).any():
            verdict += f", labelled {listing([_label(votes, views, j) for j in np.flatnonzero(votes.instance == e)])}"
        examples.append((name, verdict, None if images is None else _png(images[row]), entries))
    return examples


def _label(labels: LabelSets, views: ViewPredictions, place: Any) -> str:
    """A label as text; a position among named classes by its name."""
    value = labels.value[place]
    if views.classes is not None and labels.value.dtype.kind in "iub":
        value = views.classes[class_positions(labels.value[[place]], len(views.classes), views.classes)[0]]
    if np.ndim(value):
        return listing([f"{number:.4g}" for number in value], 4)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _disputed(policy: Policy, views: ViewPredictions, most: int = 4) -> Array:
    """Inputs that the views disagree most about; with a single view, those of the highest entropy."""
    views = views.take(slice(0, 5000))
    prediction = policy.predict(views)
    if isinstance(prediction, CategoricalPrediction):
        return np.lexsort((-prediction.entropy, -prediction.mutual_information))[:most]
    used = [name for name in policy.names if name in views.names]
    return np.argsort(-views.select(used).outputs.std(axis=1).sum(axis=1), kind="stable")[:most]


def _png(image: Array) -> str:
    """A data URI of an (H, W) or (H, W, 3) image."""
    buffer = io.BytesIO()
    require("matplotlib.image", "cli").imsave(buffer, image, cmap="gray", vmin=0, vmax=255, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


# -- figures --------------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """An inline SVG, its caption, and its content in words."""

    svg: str
    caption: str
    words: str = ""


def _drawing(name: str, figure: Any, caption: str, words: str = "", titles: Any = None) -> dict[str, Drawing]:
    """A figure by its name in the page, with tooltips; words, else the caption, are its text alternative."""
    return {name: Drawing(plotting.to_svg(figure, words or caption, name.replace("_", "-"), titles), caption, words)}


def weight_figures(policy: Policy) -> dict[str, Drawing]:
    """Weights with intervals; the numbers are tooltips."""
    names, weights, interval = policy.names, policy.weights, policy.weight_interval(0.9)
    titles = {
        f"view-{k}": f"{name}: {weight:.4f} (90 % interval {low:.4f} to {high:.4f})"
        for k, (name, weight, (low, high)) in enumerate(zip(names, weights, interval, strict=True))
    }
    most = plotting.MAX_BARS
    shown = f"the {most} heaviest of {len(names)} views" if len(names) > most else "every view"
    caption = f"Weight of {shown} with its 90 % interval; grey: less than 1 %. Point at a bar for its numbers."
    figure = plotting.weights(names, weights, interval)
    return _drawing("weights", figure, caption, documents.views_in_words(policy)[0], titles)


def curve_figures(
    policy: Policy, sequential: SequentialPolicy | None, views: ViewPredictions | None, labels: LabelSets | None
) -> dict[str, Drawing]:
    """Score against cost: for thresholds of the early stop, else for selected sets, else for the heaviest views."""
    if sequential is not None and sequential.curve:
        points: Any = [(point.cost, point.score, point.standard_error) for point in sequential.curve]
        chosen = [point.threshold for point in sequential.curve].index(sequential.threshold)
        caption = "Held-out log score against the mean cost of an input, for every threshold of the early stop."
    elif policy.selection is not None:
        points = [(point.cost, point.score, point.difference_error) for point in policy.selection.curve]
        chosen = [point.views for point in policy.selection.curve].index(policy.selection.chosen.views)
        caption = "Held-out log score of the best sets of views against what they cost; "
        caption += f"budget {policy.selection.budget:g}."
    elif (n_used := np.count_nonzero(policy.posterior.weights)) > 1 and views is not None and labels is not None:
        points, chosen = _heaviest_scores(policy, views, labels, n_used), -1
        caption = "Log score of the heaviest views alone, without a new fit, against their number."
    else:
        return {}
    cost, score, error = np.array(points).T
    figure = plotting.cost_curve(cost, score, error, chosen)
    return _drawing("cost_curve", figure, f"{caption} Bars are standard errors of the difference from all views.")


def _heaviest_scores(policy: Policy, views: ViewPredictions, labels: LabelSets, n_used: Any) -> Array:
    """Number, mean log score and standard error of its difference from all views, of the 1, 2, 4, ... heaviest."""
    rows = labels.labelled[:: -(-len(labels.labelled) // _MAX_SCORED) or 1]
    sample, order = InMemory(views.take(rows), labels.take(rows)), np.argsort(-policy.posterior.weights, kind="stable")
    sizes = [*(2**power for power in range(6) if 2**power < n_used), n_used]
    scores = np.stack([policy.restrict(np.sort(order[:size])).log_scores(sample) for size in sizes])
    return np.stack([sizes, scores.mean(axis=1), (scores - scores[-1]).std(axis=1) / np.sqrt(len(scores[0]))], axis=1)


def gate_figures(policy: Policy, views: ViewPredictions) -> dict[str, Drawing]:
    """Weights against the features that they depend on."""
    member = next(part for part in policy.members if part.gate is not None)
    gate, used = member.gate, views.select(member.used_names)
    assert gate is not None
    figure = plotting.gate(gate.names, gate.features.raw(used), used.names, gate.weights_for(used))
    effects = ", ".join(f"{name} {value:+.2f}" for name, value in zip(gate.names, gate.coefficients, strict=True))
    caption = f"Mean weight of a view against its features. Coefficients per standard deviation: {effects}."
    return _drawing("gate", figure, caption)


def set_figures(conformal: ConformalPolicy, views: ViewPredictions, labels: LabelSets) -> dict[str, Drawing]:
    """Sizes of the sets at the first level, or coverage of the intervals at all levels; strata may only be classes."""
    if conformal.strata is not None and not conformal.by_class:
        return {}
    conformal = replace(conformal, one_level=False)
    level = f"{100 * conformal.levels[0]:g} %"
    if unwrapped(conformal)[0].task == "classification":
        sets = conformal.predict_set(views)[:, :, 0]
        size, position = sets.sum(axis=1), labels.categorical(sets.shape[1], views.classes)
        inside, count = sets[labels.instance, position], np.bincount(position, labels.count)
        held = 100 * np.average(inside, weights=labels.count)
        caption = f"Sizes of the sets of {level}: {size.mean():.2f} classes on average, "
        known = np.flatnonzero(count)  # classes that have labels
        by_class = 100 * np.bincount(position, inside * labels.count)[known] / count[known]
        names = np.arange(sets.shape[1]) if views.classes is None else views.classes
        ends = [f"{by_class[place]:.1f} % ({names[known[place]]})" for place in (by_class.argmin(), by_class.argmax())]
        caption += f"{held:.1f} % of test labels inside; by class from {ends[0]} to {ends[1]}."
        share = np.bincount(size, minlength=2) / len(size)
        return _drawing("set_sizes", plotting.set_sizes(share), caption)
    lower, upper = conformal.predict_interval(views)  # (N, C, L) each
    y = labels.continuous(lower.shape[1])[:, :, None]
    inside = (lower[labels.instance] <= y) & (y <= upper[labels.instance])
    covered = np.average(inside.mean(axis=1), axis=0, weights=labels.count)
    width = float((upper - lower)[..., 0].mean())
    caption = f"Share of test labels inside conformal intervals; those of {level} are {width:.4g} wide on average."
    return _drawing("interval_coverage", plotting.coverage(conformal.levels, covered), caption)


def comparison_figures(comparison: Mapping[str, Any]) -> dict[str, Drawing]:
    """Differences in log-likelihood from no augmentation, else from the best baseline."""
    against, reference = next(iter(comparison["references"].items()), ("", ""))
    key, methods = f"nll_minus_{against}", comparison["methods"]
    records = [record for record in methods if record.get(key) is not None and record["method"] != reference]
    if not records:
        return {}
    names = [record["method"] for record in records]
    value, low, high = (np.array([record[key + end] for record in records]) for end in ("", "_low", "_high"))
    changes = ", ".join(f"{name} {change:+.3f}" for name, change in zip(names, value, strict=True))
    figure = plotting.differences(names, value, low, high, f"NLL minus that of {reference} (less is better)")
    level = f"{100 * comparison['level']:g} %"
    caption = f"Negative log-likelihood on test labels against {reference}, with {level} paired bootstrap intervals."
    return _drawing("differences", figure, caption, f"NLL minus that of {reference}: {changes}")


def _expected_labels(policy: Policy, truth: Prediction, labels: LabelSets) -> Prediction:
    """The distribution of every label given that of its input's truth, a row a label; noise must be modelled."""
    annotators = policy.annotators
    assert annotators is not None  # one that the fit did not meet: unbiased, else like the average of the others
    annotator = annotator_places(annotators.names, labels)
    if isinstance(truth, CategoricalPrediction):
        assert isinstance(annotators, AnnotatorAccuracy)
        matrices = np.vstack([annotators.confusion, annotators.confusion.mean(axis=0)[None]])  # (U + 1, C, C)
        proba = np.empty_like(truth.proba)
        for place in np.unique(annotator):
            proba[annotator == place] = truth.proba[annotator == place] @ matrices[place]
        return CategoricalPrediction(proba, np.zeros(len(proba)), truth.classes)
    assert isinstance(annotators, AnnotatorNoise)
    bias = np.vstack([annotators.bias, 0 * annotators.bias[0]])[annotator]  # (J, C)
    variance = annotators.noise**2 + annotators.bias_error**2
    variance = np.vstack([variance, variance.mean(axis=0)])[annotator]  # (J, C)
    noise = variance[:, None] / variance_factor(truth.dof)[:, None]  # (J, K, C), as scales
    scale = truth.scale + noise[..., None] * np.eye(bias.shape[1])
    return ContinuousPrediction(truth.weights, truth.dof, truth.location + bias[:, None], scale)


def quality_figures(policy: Policy, views: ViewPredictions, labels: LabelSets, where: str) -> dict[str, Drawing]:
    """Reliability of class probabilities, or interval coverage of numbers; test labels without annotators are truth."""
    rows = labels.labelled
    if not len(rows):
        return {}
    noisy = policy.annotators is not None and (labels.annotator is not None or where == "calibration labels")
    if len(rows) > _MAX_INPUTS:
        rows = rows[np.linspace(0, len(rows) - 1, _MAX_INPUTS).astype(np.intp)]
        where = f"{where} of {_MAX_INPUTS:,} inputs"
    where += ", taken as the truth" if policy.annotators is not None and not noisy else ""
    labels = labels.take(rows)
    prediction = policy.predict(views.take(rows)).take(labels.instance)
    if noisy:
        prediction = _expected_labels(policy, prediction, labels)
    if isinstance(prediction, CategoricalPrediction):
        y = labels.categorical(prediction.proba.shape[1], views.classes)
        confidence, hit = prediction.proba.max(axis=1), metrics.hits(y, prediction.proba)
        right = float(np.average(hit, weights=labels.count))
        through = ", from the predicted classes and the annotator's estimated error rates" if noisy else ""
        caption = f"Reliability on {where}: how often the most probable label was given, against its probability"
        caption += f"{through}. Points on the dashed line mean calibrated confidence."
        sure, gap = float(np.average(confidence, weights=labels.count)), metrics.ece(y, prediction.proba, labels.count)
        words = f"On {where}, the most probable label has a probability of {100 * sure:.1f} % on average, and is given "
        words += f"in {100 * right:.1f} % of the cases. Expected calibration error: {100 * gap:.1f} points."
        return _drawing("reliability", plotting.reliability(confidence, hit, labels.count), caption, words)
    y = labels.continuous(prediction.mean.shape[1])
    covered = [metrics.interval_coverage(y, *prediction.interval(float(q)), labels.count) for q in _LEVELS]
    through = ": those of the truth, moved by the annotator's bias and widened by the noise" if noisy else ""
    caption = f"Interval coverage on {where}: how many lie in the intervals predicted for them{through}. "
    caption += "Points on the dashed line mean calibrated intervals."
    half, most = (f"{100 * covered[place]:.1f} %" for place in (4, 8))
    words = f"Intervals of 50 % hold {half} of the {where}, intervals of 90 % hold {most}."
    return _drawing("coverage", plotting.coverage(_LEVELS, np.array(covered)), caption, words)


def annotator_figures(policy: Policy) -> dict[str, Drawing]:
    """Estimated skill of the annotators, the best first; of many only the best and the worst."""
    annotators = policy.annotators
    if annotators is None or len(annotators.names) < 2:
        return {}
    if isinstance(annotators, AnnotatorAccuracy):
        value, interval, label = annotators.accuracy, annotators.accuracy_interval, "share of labels that are right"
        order = np.argsort(-value, kind="stable")
    else:
        value, interval = annotators.noise.mean(axis=1), annotators.noise_interval.mean(axis=1)
        label = "standard deviation of labels around the truth"
        order = np.argsort(value, kind="stable")
    caption = "Estimates of the fit for every annotator, with 90 % intervals."
    if len(order) > 2 * _MAX_PEOPLE:
        ends = f"the {_MAX_PEOPLE} best and the {_MAX_PEOPLE} worst of {len(order):,} annotators"
        caption = f"Estimates for {ends}, with 90 % intervals. The median of all is {np.median(value):.3g}."
        order = np.concatenate([order[:_MAX_PEOPLE], order[-_MAX_PEOPLE:]])
    names = [annotators.names[u] for u in order]
    figure = plotting.differences(names, value[order], interval[order, 0], interval[order, 1], label, None)
    return _drawing("annotators", figure, caption, annotators_in_words(annotators)[0])
