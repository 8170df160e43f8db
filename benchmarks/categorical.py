"""Speed and memory of the categorical mixture: a step against one softmax, many classes, the probit link."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
from scipy import special

from benchmarks.em import fastest
from benchmarks.problems import posed
from vbtta import EM, CategoricalMixture, LabelSets, ViewPredictions
from vbtta.inference.em import ascend


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; every ratio is of times within this run."""
    shrink = 10 if quick else 1
    return {
        "softmax": fit_against_softmax(50_000 // shrink, 16, 10),
        "many_classes": memory_of_many_classes(10_000 // shrink, 16, 1000),
        "probit": probit_against_softmax(5_000 // shrink, 16, 10),
    }


def fit_against_softmax(n_inputs: int, n_views: int, n_classes: int) -> dict[str, float]:
    """A default fit, three labels an input: time per step against one softmax over (N, K, C), and its steps."""
    predictions, labels = crowd(n_inputs, n_views, n_classes)
    softmax_seconds = fastest(lambda: special.softmax(predictions.outputs, axis=2), repeats=3)
    problem, first = posed(predictions, labels, CategoricalMixture(), noise="confusion")
    start = time.perf_counter()
    ascent = ascend(problem, first, EM())
    seconds = time.perf_counter() - start
    steps = len(ascent.bounds)
    return {
        "N": n_inputs,
        "softmax_seconds": softmax_seconds,
        "fit_seconds": seconds,
        "steps": steps,
        "steps_limit": 60,
        "ratio_per_step": seconds / steps / softmax_seconds,
        "limit": 30.0,
    }


def memory_of_many_classes(n_inputs: int, n_views: int, n_classes: int) -> dict[str, float]:
    """Peak memory of a fit, its logits included, in units of the logits."""
    predictions, labels = crowd(n_inputs, n_views, n_classes)
    tracemalloc.start()
    problem, first = posed(predictions, labels, CategoricalMixture(), noise="none")
    ascent = ascend(problem, first, EM())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "N": n_inputs,
        "C": n_classes,
        "steps": len(ascent.bounds),
        "logits_of_memory": 1 + peak / predictions.outputs.nbytes,
        "limit": 4.0,
    }


def probit_against_softmax(n_inputs: int, n_views: int, n_classes: int) -> dict[str, float]:
    """One pass with the probit link, an integral of some fifty nodes, against one with the softmax link."""
    predictions, labels = crowd(n_inputs, n_views, n_classes)
    seconds = {}
    for link in ("softmax", "probit"):
        problem, first = posed(predictions, labels, CategoricalMixture(link=link), noise="none")
        # a fresh but equal state each time: the problem remembers the last one it looked at
        seconds[link] = fastest(lambda p=problem, s=first: p.evaluate(s._replace(weights=s.weights.copy())), repeats=3)  # type: ignore[misc]
    return {**seconds, "ratio": seconds["probit"] / seconds["softmax"], "limit": 250.0}


def crowd(n_inputs: int, n_views: int, n_classes: int) -> tuple[ViewPredictions, LabelSets]:
    """Logits of views of unequal quality, and three noisy labels an input."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, n_classes, size=n_inputs)
    logits = rng.normal(size=(n_inputs, n_views, n_classes)).astype(np.float32)
    rows = np.arange(n_inputs)
    for k, strength in enumerate(np.linspace(4.0, 0.5, n_views, dtype=np.float32)):
        logits[rows, k, truth] += strength
    wrong = rng.random((n_inputs, 3)) < 0.2
    labels = np.where(wrong, rng.integers(0, n_classes, size=(n_inputs, 3)), truth[:, None])
    return ViewPredictions(logits), LabelSets.from_array(labels)
