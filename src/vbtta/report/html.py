"""The page: all parts in one template, self-contained and escaped."""

__all__ = ["Examples", "render_report", "write_report"]

import base64
import io
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.checks import require
from vbtta._support.files import atomic_path
from vbtta.comparison import best_methods, change_text, metric_title
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction
from vbtta.policy import KEPT, Policy
from vbtta.report.documents import headline, provenance
from vbtta.report.figures import annotator_figures, comparison_figures, fit_figures, quality_figures

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_MAX_VIEWS = 24  # of an example


class Examples(NamedTuple):
    """Inputs to show, with their augmented images."""

    rows: Array  # (E,) of the predictions
    names: tuple[str, ...]  # K views
    images: Array | None = None  # (E, K, H, W) or (E, K, H, W, 3) uint8


def render_report(
    policy: Policy,
    *,
    predictions: ViewPredictions | None = None,
    labels: LabelSets | None = None,
    test: tuple[ViewPredictions, LabelSets] | None = None,
    comparison: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    examples: Examples | None = None,
    story: Mapping[str, Any] | None = None,
    circumstances: Mapping[str, Any] | None = None,
) -> str:
    """Make a self-contained HTML page about a policy; parts without data are left out.

    Parameters
    ----------
    policy : Policy
    predictions, labels : optional
        Of the calibration sample.
    test : (ViewPredictions, LabelSets), optional
        Where reliability and examples are shown; else the calibration sample.
    comparison, diagnosis : mappings, optional
        From :func:`comparison_document` and :func:`diagnosis_document`.
    examples : Examples, optional
        Inputs to show, rows of `test` where it is given; by default those the views disagree most about, without
        images.
    story : mapping, optional
        `title`, `text` (sentences that come first) and `skill` (the annotators' true accuracies by name).
    circumstances : mapping, optional
        From :func:`vbtta.report.documents.provenance`.
    """
    jinja2 = require("jinja2", "cli")
    story = story or {}
    shown, where = (test, "test labels") if test is not None else ((predictions, labels), "calibration labels")
    drawings = fit_figures(policy)
    if comparison is not None:
        drawings |= comparison_figures(comparison)
    if shown[0] is not None and shown[1] is not None:
        drawings |= quality_figures(policy, shown[0], shown[1], where)
    drawings |= annotator_figures(policy, story.get("skill"))
    facts = [
        ("views kept", f"{np.count_nonzero(policy.weights)} of {len(policy.names)}"),
        ("model", type(policy.model).__name__),
        ("engine", f"{type(policy.engine).__name__}, {policy.n_steps} updates"),
        ("bound", f"{policy.elbo:.5g}"),
    ]
    loader, strict = jinja2.PackageLoader("vbtta.report"), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.get_template("report.html").render(
        title=story.get("title", "Test-time augmentation policy"),
        story=story.get("text", ()),
        headline=headline(policy, comparison),
        policy=policy,
        facts=facts,
        drawings=drawings,
        svg={name: require("markupsafe", "cli").Markup(drawing.svg) for name, drawing in drawings.items()},
        comparison=None if comparison is None else _table(comparison),
        examples=[] if shown[0] is None else _examples(policy, shown[0], examples),
        findings=[
            {"text": line.removeprefix("! ").strip(), "alert": line.startswith("! ")}
            for line in map(str, (diagnosis or {}).get("summary", ()))
        ],
        provenance=provenance(policy, {}) if circumstances is None else circumstances,
    )
    # Names from files may contain control characters and lone surrogates, which a page must not.
    text = _UNPRINTABLE.sub("\ufffd", text.lstrip())
    return text.encode("utf-8", "replace").decode("utf-8")


def write_report(path: str | os.PathLike[str], policy: Policy, **parts: Any) -> None:
    """Write the page of :func:`render_report` to a file, atomically."""
    text = render_report(policy, **parts)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _table(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Cells of the sortable table: text, sort key, and the interval against no augmentation."""
    metrics, records, references = comparison["metrics"], comparison["methods"], comparison["references"]
    best = {metric: best_methods(records, metric) for metric in metrics}
    against = next((name for name in ("original", "best") if name in references), "")
    rows = []
    for record in records:
        method, changed = record["method"], against and record["method"] != references[against]
        cells = [
            {
                "value": "" if record[metric] is None else repr(float(record[metric])),
                "text": "–" if record[metric] is None else f"{record[metric]:.4f}",
                "best": method in best[metric],
                "change": change_text(record, metric, against) if changed else "",
            }
            for metric in metrics
        ]
        rows.append({"method": method, "cells": cells, **{k: record[k] for k in ("views_used", "fit_seconds")}})
    return {
        "titles": [metric_title(metric) for metric in metrics],
        "rows": rows,
        "reference": references.get(against, ""),
        "level": f"{100 * comparison['level']:g}",
        "size": f"{comparison['n_labels']:,g} labels of {comparison['n_instances']:,} test instances",
        "notes": comparison["notes"],
    }


def _examples(policy: Policy, views: ViewPredictions, chosen: Examples | None) -> list[dict[str, Any]]:
    """Outputs of every view for a few inputs, and the policy's prediction."""
    rows = _disputed(policy, views) if chosen is None else np.asarray(chosen.rows)
    if not len(rows) or rows.max() >= len(views):
        return []
    part = views.take(rows)
    prediction = policy.predict(part)
    order = np.argsort(-policy.weights, kind="stable")[:_MAX_VIEWS]
    shown = [(policy.names[k], policy.weights[k]) for k in order if policy.names[k] in views.names]
    examples = []
    for e, row in enumerate(rows):
        entries = []
        for name, weight in shown:
            image = None
            if chosen is not None and chosen.images is not None and name in chosen.names:
                image = _png(chosen.images[e, chosen.names.index(name)])
            output = _output_text(part.outputs[e, part.names.index(name)], policy)
            entries.append(
                {"name": name, "weight": f"{weight:.3f}", "output": output, "image": image, "grey": weight < KEPT}
            )
        if isinstance(prediction, CategoricalPrediction):
            verdict = f"{prediction.label[e]} ({100 * prediction.proba[e].max():.0f} %)"
        else:
            spread = np.sqrt(prediction.variance[e])
            verdict = ", ".join(f"{m:.4g} ± {s:.2g}" for m, s in zip(prediction.mean[e], spread, strict=True))
        name = str(row if views.ids is None else views.ids[row])
        examples.append({"name": name, "verdict": verdict, "views": entries})
    return examples


def _output_text(outputs: Array, policy: Policy) -> str:
    """The outputs of one view: the most probable class, or the first numbers."""
    if policy.task != "classification":
        return ", ".join(f"{value:.4g}" for value in outputs[:4])
    proba = np.exp(outputs - outputs.max())
    best = int(outputs.argmax())
    label = best if policy.classes is None else policy.classes[best]
    return f"{label} ({100 * proba[best] / proba.sum():.0f} %)"


def _disputed(policy: Policy, views: ViewPredictions, most: int = 4) -> Array:
    """Inputs the views disagree most about."""
    views = views.take(slice(0, 5000))
    prediction = policy.predict(views)
    if isinstance(prediction, CategoricalPrediction):
        return np.argsort(-prediction.mutual_information, kind="stable")[:most]
    used = [name for name in policy.names if name in views.names]
    return np.argsort(-views.select(used).outputs.std(axis=1).sum(axis=1), kind="stable")[:most]


def _png(image: Array) -> str:
    """A data URI of an (H, W) or (H, W, 3) image."""
    buffer = io.BytesIO()
    require("matplotlib.image", "cli").imsave(buffer, image, cmap="gray", vmin=0, vmax=255, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
