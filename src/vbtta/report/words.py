"""What was found, in plain words."""

__all__ = ["annotators_in_words", "gain_in_words", "headline", "views_in_words"]

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vbtta.policy import KEPT, Policy

_NAMES = {"nll": "negative log-likelihood", "mse": "squared error", "crps": "CRPS"}


def headline(policy: Policy, comparison: Mapping[str, Any] | None = None) -> list[str]:
    """The sentences a report opens with."""
    sentences = views_in_words(policy)
    if policy.guard.fell_back:
        sentences.append("The views were worse than none, so the policy uses the unaugmented input only.")
    if not policy.converged:
        sentences.append("The fit has not converged: its numbers are provisional.")
    if comparison is not None:
        sentences += gain_in_words(comparison)
    guard = f"Against the identity view alone: {policy.guard.reason}."
    return [*sentences, *annotators_in_words(policy), guard]


def views_in_words(policy: Policy) -> list[str]:
    """Which views were kept, those of any weight, and which suppressed."""
    order = np.argsort(-policy.weights, kind="stable")
    kept = [policy.names[k] for k in order if policy.weights[k] > 0]
    light = [policy.names[k] for k in order if 0 < policy.weights[k] < KEPT]
    lost = [policy.names[k] for k in order if policy.weights[k] == 0]
    top = [f"{policy.names[k]} ({100 * policy.weights[k]:.0f} %)" for k in order[: min(3, len(kept))]]
    sentences = [f"{len(kept)} of {len(policy.names)} views are kept; the heaviest: {_list(top)}."]
    if light:
        sentences.append(f"Of little weight (below {100 * KEPT:.0f} %): {_list(light)}.")
    if lost:
        sentences.append(f"Suppressed (no weight): {_list(lost)}.")
    return sentences


def gain_in_words(comparison: Mapping[str, Any], method: str = "vbtta") -> list[str]:
    """What the policy gained over no augmentation, and over the plain average of all views."""
    records = {record["method"]: record for record in comparison["methods"]}
    if method not in records:
        return []
    found = records[method]
    main = "accuracy" if comparison["task"] == "classification" else "mse"
    sentences = []
    for metric in (main, "nll"):
        known = {name: records[name][metric] for name in ("original", "uniform") if name in records}
        if not known or found[metric] is None:
            continue
        words = {"original": "without augmentation", "uniform": "with equal weights"}
        against = _list([f"{_value(metric, value)} {words[name]}" for name, value in known.items()])
        title = _NAMES.get(metric, metric)
        text = f"Test {title}: {_value(metric, found[metric])} with the policy, {against}"
        change = found.get(f"{metric}_minus_original")
        if change is not None:
            low, high = found[f"{metric}_minus_original_low"], found[f"{metric}_minus_original_high"]
            sure = "beyond chance" if low > 0 or high < 0 else "which may be chance"
            text += (
                f"; the change against no augmentation is {_change(metric, change)} "
                f"({100 * comparison['level']:g} % interval {_change(metric, low)} to {_change(metric, high)}, {sure})"
            )
        sentences.append(text + ".")
    return sentences


def annotators_in_words(policy: Policy, truth: Mapping[str, float] | None = None) -> list[str]:
    """How good the annotators are thought to be, next to the truth where it is known."""
    people = policy.annotators
    if people is None or not people.names:
        return []
    if hasattr(people, "accuracy"):
        shown = [
            f"{name} {100 * value:.0f} % right ({100 * low:.0f} to {100 * high:.0f} %"
            + (f"; in truth {100 * truth[name]:.0f} %)" if truth and name in truth else ")")
            for name, value, (low, high) in zip(people.names, people.accuracy, people.accuracy_interval, strict=True)
        ]
        return [f"Annotators: {_list(shown)}."]
    shown = [
        f"{name} errs by {np.mean(noise):.3g} with a bias of {np.mean(bias):+.3g}"
        for name, noise, bias in zip(people.names, people.noise, people.bias, strict=True)
    ]
    return [f"Annotators: {_list(shown)}."]


def _value(metric: str, value: float) -> str:
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def _change(metric: str, value: float) -> str:
    return f"{100 * value:+.1f} points" if metric == "accuracy" else f"{value:+.3g}"


def _list(items: Sequence[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
