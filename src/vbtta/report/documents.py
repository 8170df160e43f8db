"""Policies, comparisons and diagnoses as plain data for JSON files, and as sentences."""

import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from vbtta._support.files import finite, to_plain
from vbtta._version import __version__
from vbtta.comparison import Comparison
from vbtta.conformal import ConformalPolicy
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics import Diagnosis
from vbtta.diagnostics.diagnosis import listing
from vbtta.policy import KEPT, Policy
from vbtta.sequential import SequentialPolicy

_UNKNOWN = {"options": "not recorded", "seed": "not recorded"}
_METRICS = {"nll": "negative log-likelihood", "mse": "squared error"}
_REFERENCES = {"original": "without augmentation", "uniform": "with equal weights"}


def comparison_document(outcome: Comparison) -> dict[str, Any]:
    """A comparison without the fitted methods."""
    names = ("task", "metrics", "level", "n_instances", "n_labels", "notes")
    return {
        **to_plain({name: getattr(outcome, name) for name in names}),
        "references": {name: difference.reference for name, difference in outcome.references.items()},
        "methods": finite(outcome.to_records()),
    }


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis in words, as a summary and in sections, and in numbers."""
    words = {"summary": diagnosis.summary().splitlines(), "sections": diagnosis.sections()}
    return {**words, "findings": diagnosis.to_dict()}


def policy_document(policy: Policy) -> dict[str, Any]:
    """The result of a fit, in short."""
    interval = policy.weight_interval(0.9)
    return {
        "task": policy.task,
        "model": policy.model_name,
        "engine": type(policy.engine).__name__,
        "converged": policy.converged,
        "n_steps": policy.n_steps,
        "elbo": None if policy.stacked else policy.elbo,
        "guard": policy.guard.reason,
        "views": [
            {"name": name, "weight": float(weight), "low": float(low), "high": float(high)}
            for name, weight, (low, high) in zip(policy.names, policy.weights, interval, strict=True)
        ],
        "annotators": to_plain(policy.annotators),
    }


def versions() -> dict[str, str]:
    """Versions of the package, of Python, and of the installed libraries that results depend on."""
    known = {"vbtta": __version__, "python": platform.python_version()}
    for name in ("numpy", "scipy", "torch", "pyro-ppl", "onnxruntime", "ray", "matplotlib"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def provenance(policy: Policy, files: Mapping[str, str], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions, options, hashes of the data and time, to reproduce the result."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "model": policy.model_name,
        "engine": repr(policy.engine),
        "options": {key: str(value) for key, value in (options or _UNKNOWN).items()},
        "files": dict(files),
    }


def headline(policy: Policy, comparison: Mapping[str, Any] | None = None) -> list[str]:
    """The gain from the views and its uncertainty."""
    sentences = [] if comparison is None else gain_in_words(comparison)
    if policy.guard.fell_back:
        sentences.append("The views did not help, so the policy uses the unaugmented input only.")
    sentences.append(f"Against the network alone, by cross-validation: {policy.guard.reason}.")
    if not policy.converged:
        sentences.append("The fit has not converged: its numbers are provisional.")
    return sentences


def cost_in_words(policy: Policy, sequential: SequentialPolicy | None, views: ViewPredictions | None) -> list[str]:
    """The cost of a prediction."""
    if sequential is not None:
        return stops_in_words(sequential, views)
    n_used, n_views = np.count_nonzero(policy.weights), len(policy.names)
    if n_used == 1:
        return [f"One pass of the network per input; {n_views} views were tried."]
    return [f"{n_used} passes of the network per input, one for each view that has weight, instead of one."]


def stops_in_words(sequential: SequentialPolicy, views: ViewPredictions | None = None) -> list[str]:
    """Stages, loss and, where there are views, the share of inputs that stop after each stage."""
    if len(sequential.policies) == 1:
        return ["Every input takes all views: no early stop keeps the loss within the tolerance."]
    sizes = ", ".join(str(len(stage)) for stage in sequential.stages)
    loss = f"at most {sequential.loss_upper:.4f} nats an input are lost (95 % confidence)"
    sentences = [f"Views come in stages of {sizes}; an input stops early by its expected gain: {loss}."]
    if views is not None and set(sequential.names) <= set(views.names):
        passes = sequential.passes(views)
        stages = ", ".join(f"{n} for {100 * np.mean(passes == n):.0f} %" for n in np.unique(passes))
        sentences.append(f"{passes.mean():.2f} of {len(sequential.names)} passes on average: {stages} of the inputs.")
    return sentences


def guarantee_in_words(conformal: ConformalPolicy) -> str:
    """What the sets or intervals of a conformal policy cover."""
    kind = "Intervals" if conformal.method == "distributional" else "Sets of classes"
    levels = " and ".join(f"{level:g}" for level in conformal.levels)
    sample = f"on average over inputs like the {conformal.n_units.sum():,.0f} of the calibration"
    return f"{kind} ({conformal.method}) hold the {conformal.covers} with probability {levels}, {sample}."


def advice(policy: Policy, comparison: Mapping[str, Any] | None = None) -> list[str]:
    """Suggested next steps."""
    n_used = np.count_nonzero(policy.weights)
    steps = []
    if not policy.converged:
        steps.append("Fit again with more steps, such as engine=EM(max_steps=5000).")
    if policy.guard.checked and policy.guard.probability < 0.9:
        remedy = "collect more labels, try other views, or use one pass with one temperature or scale (guard='hard')"
        steps.append(f"The gain is doubtful: {remedy}.")
    elif n_used > 1:
        steps.append("Use it on new inputs: TTAModule(network, views, policy), or vbtta predict.")
    if n_used > 4:
        steps.append("Fewer passes: select_views(..., budget=4) chooses views, fit_sequential stops for easy inputs.")
    if comparison is None:
        steps.append("Judge it on labels that took no part in the fit: vbtta compare.")
    if policy.annotators is None:
        steps.append("A second label for some inputs would tell wrong labels from wrong views.")
    return [*steps, "For sets or intervals that cover with a stated probability: conformalize."]


def views_in_words(policy: Policy) -> list[str]:
    """The views with weight, with little weight and with none."""
    order = [(policy.names[k], policy.weights[k]) for k in np.argsort(-policy.weights, kind="stable")]
    kept = [f"{name} ({100 * weight:.0f} %)" for name, weight in order if weight > 0]
    light = [name for name, weight in order if 0 < weight < KEPT]
    lost = [name for name, weight in order if weight == 0]
    sentences = [f"{len(kept)} of {len(order)} views are kept; the heaviest: {', '.join(kept[:3])}."]
    if light:
        sentences.append(f"Of little weight (below {100 * KEPT:.0f} %): {listing(light, 8)}.")
    if lost:
        sentences.append(f"Suppressed (no weight): {listing(lost, 8)}.")
    return sentences


def gain_in_words(comparison: Mapping[str, Any]) -> list[str]:
    """The policy's gain over no augmentation, and over the plain average of all views."""
    records = {record["method"]: record for record in comparison["methods"]}
    record, sentences = records.get("vbtta", {}), []
    for metric in ("accuracy" if comparison["task"] == "classification" else "mse", "nll"):
        known = {name: records[name][metric] for name in _REFERENCES if name in records}
        if not known or record.get(metric) is None:
            continue
        against = ", ".join(f"{_value(metric, value)} {_REFERENCES[name]}" for name, value in known.items())
        title = _METRICS.get(metric, metric)
        text = f"Test {title}: {_value(metric, record[metric])} with the policy, {against}"
        if record.get(f"{metric}_minus_original") is not None:
            ends = [record[f"{metric}_minus_original{end}"] for end in ("", "_low", "_high")]
            change, low, high = (f"{100 * end:+.1f}" if metric == "accuracy" else f"{end:+.3g}" for end in ends)
            change += " points" if metric == "accuracy" else ""
            text += (
                f"; the change against no augmentation is {change} ({100 * comparison['level']:g} % interval {low} to "
                f"{high}, {'beyond chance' if ends[1] > 0 or ends[2] < 0 else 'which may be chance'})"
            )
        sentences.append(text + ".")
    return sentences


def _value(metric: str, value: float) -> str:
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"
