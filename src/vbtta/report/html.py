"""The page: its parts put into one template, self-contained and escaped."""

__all__ = ["Examples", "render_report", "write_report"]

import base64
import io
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta._support.files import atomic_path
from vbtta.labels import Array, LabelSets
from vbtta.policy import KEPT, Policy
from vbtta.predictions import CategoricalPrediction, ViewPredictions
from vbtta.report.documents import provenance as describe_circumstances
from vbtta.report.figures import annotator_figures, comparison_figures, fit_figures, quality_figures
from vbtta.report.words import headline

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_MOST_VIEWS = 24  # of an example
_TITLES = {"nll": "NLL", "mse": "MSE", "mae": "MAE", "crps": "CRPS", "ece": "ECE", "coverage": "coverage of 90 %"}


class Examples(NamedTuple):
    """Some inputs as the views show them."""

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
    """Make a self-contained page about a policy; parts without data are left out.

    Parameters
    ----------
    policy : Policy
    predictions, labels : optional
        Of the calibration sample.
    test : (ViewPredictions, LabelSets), optional
        Where reliability and examples are shown; else the calibration sample.
    comparison, diagnosis : mappings, optional
        What :func:`comparison_document` and :func:`diagnosis_document` make.
    examples : Examples, optional
        Inputs to show; by default those the views disagree most about, without images. Rows count in `test` where
        it is given.
    story : mapping, optional
        `title`, `text` (sentences that come first) and `skill` (the annotators' true accuracies by name).
    circumstances : mapping, optional
        As :func:`vbtta.report.documents.provenance` makes it.

    Returns
    -------
    str
        HTML.
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
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vbtta.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template("report.html").render(
        title=story.get("title", "Test-time augmentation policy"),
        story=story.get("text", ()),
        headline=headline(policy, comparison),
        policy=policy,
        facts=_facts(policy),
        drawings=drawings,
        svg={name: require("markupsafe", "cli").Markup(drawing.svg) for name, drawing in drawings.items()},
        comparison=None if comparison is None else _table(comparison),
        examples=[] if shown[0] is None else _examples(policy, shown[0], examples),
        findings=[] if diagnosis is None else _findings(diagnosis),
        provenance=describe_circumstances(policy, {}) if circumstances is None else circumstances,
    )
    # Names from files may hold what a page cannot: control characters and lone surrogates.
    text = _UNPRINTABLE.sub("\ufffd", text.lstrip())
    return text.encode("utf-8", "replace").decode("utf-8")


def write_report(path: str | os.PathLike[str], policy: Policy, **parts: Any) -> None:
    """Write what :func:`render_report` makes to a file, atomically."""
    text = render_report(policy, **parts)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _facts(policy: Policy) -> list[tuple[str, str]]:
    kept = int(np.count_nonzero(policy.weights))
    return [
        ("views kept", f"{kept} of {len(policy.names)}"),
        ("model", type(policy.model).__name__),
        ("engine", f"{type(policy.engine).__name__}, {policy.n_steps} updates"),
        ("bound", f"{policy.elbo:.5g}"),
    ]


def _table(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Cells of the sortable table: what is shown, what it is sorted by, and the interval against no augmentation."""
    metrics, records = comparison["metrics"], comparison["methods"]
    best = {metric: _best([record[metric] for record in records], metric) for metric in metrics}
    against = next((name for name in ("original", "best") if name in comparison["references"]), None)
    rows = []
    for record in records:
        cells = []
        for metric in metrics:
            value = record[metric]
            cells.append(
                {
                    "value": "" if value is None else repr(float(value)),
                    "text": "–" if value is None else f"{value:.4f}",
                    "best": value is not None and round(value, 4) == best[metric],
                    "change": _change(record, metric, against, comparison),
                }
            )
        rows.append(
            {"method": record["method"], "cells": cells, **{k: record[k] for k in ("views_used", "fit_seconds")}}
        )
    reference = comparison["references"].get(against, "") if against else ""
    return {
        "titles": [_TITLES.get(metric, metric) for metric in metrics],
        "rows": rows,
        "reference": reference,
        "level": f"{100 * comparison['level']:g}",
        "size": f"{comparison['n_labels']:,g} labels of {comparison['n_instances']:,} test instances",
        "notes": comparison["notes"],
    }


def _best(values: list[float | None], metric: str) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if metric == "coverage":
        return round(known[int(np.argmin(np.abs(np.array(known) - 0.9)))], 4)
    return round(max(known) if metric == "accuracy" else min(known), 4)


def _change(record: Mapping[str, Any], metric: str, against: str | None, comparison: Mapping[str, Any]) -> str:
    key = f"{metric}_minus_{against}"
    if against is None or record.get(key) is None or record["method"] == comparison["references"][against]:
        return ""
    return f"{record[key]:+.4f} [{record[key + '_low']:+.4f}, {record[key + '_high']:+.4f}]"


def _findings(diagnosis: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = [str(line) for line in diagnosis.get("summary", ())]
    return [{"text": line.removeprefix("! ").strip(), "alert": line.startswith("! ")} for line in lines]


def _examples(policy: Policy, views: ViewPredictions, chosen: Examples | None) -> list[dict[str, Any]]:
    """What every view says of some inputs, and what the policy makes of it."""
    rows = _disputed(policy, views) if chosen is None else np.asarray(chosen.rows)
    if not len(rows) or rows.max() >= len(views):
        return []
    part = views.take(rows)
    prediction = policy.predict(part)
    order = np.argsort(-policy.weights, kind="stable")[:_MOST_VIEWS]
    found = []
    for e, row in enumerate(rows):
        entries = []
        for k in order:
            name = policy.names[k]
            if name not in views.names:
                continue
            image = None
            if chosen is not None and chosen.images is not None and name in chosen.names:
                image = _png(chosen.images[e, chosen.names.index(name)])
            said = _said(part.mean[e, part.names.index(name)], policy)
            weight = policy.weights[k]
            entries.append(
                {"name": name, "weight": f"{weight:.3f}", "said": said, "image": image, "grey": weight < KEPT}
            )
        if isinstance(prediction, CategoricalPrediction):
            verdict = f"{prediction.label[e]} ({100 * prediction.proba[e].max():.0f} %)"
        else:
            spread = np.sqrt(prediction.variance[e])
            verdict = ", ".join(f"{m:.4g} ± {s:.2g}" for m, s in zip(prediction.mean[e], spread, strict=True))
        name = str(row if views.ids is None else views.ids[row])
        found.append({"name": name, "verdict": verdict, "views": entries})
    return found


def _said(outputs: Array, policy: Policy) -> str:
    if policy.task != "classification":
        return ", ".join(f"{value:.4g}" for value in outputs[:4])
    proba = np.exp(outputs - outputs.max())
    best = int(outputs.argmax())
    label = best if policy.classes is None else policy.classes[best]
    return f"{label} ({100 * proba[best] / proba.sum():.0f} %)"


def _disputed(policy: Policy, views: ViewPredictions, most: int = 4) -> Array:
    """Inputs the views disagree most about."""
    some = np.arange(min(len(views), 5000))
    if policy.task != "classification":
        used = [name for name in policy.names if name in views.names]
        spread = views.select(used).mean[some].std(axis=1).sum(axis=1)
        return np.argsort(-spread, kind="stable")[:most]
    prediction = policy.predict(views.take(some))
    assert isinstance(prediction, CategoricalPrediction)
    return np.argsort(-prediction.mutual_information, kind="stable")[:most]


def _png(image: Array) -> str:
    """A data URI of an (H, W) or (H, W, 3) image."""
    buffer = io.BytesIO()
    require("matplotlib.image", "cli").imsave(buffer, image, cmap="gray", vmin=0, vmax=255, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
