"""Trials pooled: values, paired bootstrap intervals and the verdicts that follow from them.

A metric is the mean over trials of its value in each. A resample draws instances, by id, once for all trials and
methods: images that several networks were tested on stay together, so what is pooled is not counted as new evidence.
It also draws networks, or calibration samples where there is one network, and adds how far their mean lies from that
of all; with a single trial the intervals are over images alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cells import HALF, Cell
from vbtta.comparison import METRICS, HeldOut, resampled

__all__ = ["Pooled", "Verdict", "pool", "verdicts"]

Array = NDArray[Any]
_RESAMPLES = 2000
_AT_ONCE = 100
LARGER_IS_BETTER = ("accuracy",)


@dataclass(frozen=True)
class Pooled:
    """Methods x metrics, with the bootstrap's replicates."""

    task: str
    methods: tuple[str, ...]
    baselines: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Array  # (methods, metrics)
    by_seed: Array  # (seeds, methods, metrics)
    replicates: Array  # (resamples, methods, metrics)

    def loss(self, metric: str) -> dict[str, float]:
        """By method, turned so that less is better."""
        sign = -1.0 if metric in LARGER_IS_BETTER else 1.0
        column = self.metrics.index(metric)
        return {method: sign * float(self.values[m, column]) for m, method in enumerate(self.methods)}

    def best(self, metric: str, among: Sequence[str] | None = None) -> str:
        """The method with the best value."""
        loss = self.loss(metric)
        return min(among or self.methods, key=loss.__getitem__)

    def difference(self, method: str, reference: str, metric: str) -> tuple[float, float, float]:
        """A method minus another: value and 95 % interval."""
        m, r, s = self.methods.index(method), self.methods.index(reference), self.metrics.index(metric)
        low, high = np.quantile(self.replicates[:, m, s] - self.replicates[:, r, s], [0.025, 0.975])
        return float(self.values[m, s] - self.values[r, s]), float(low), float(high)

    def worse(self, method: str, reference: str, metric: str) -> bool:
        """Whether a method is worse than another beyond the interval."""
        _, low, high = self.difference(method, reference, metric)
        return high < 0 if metric in LARGER_IS_BETTER else low > 0


@dataclass(frozen=True)
class Verdict:
    """One claim about the default policy, and whether the numbers bear it out."""

    claim: str
    holds: bool
    evidence: str


def pool(task: str, cells: Mapping[Any, Sequence[Cell]], ids: Mapping[Any, Array], *, seed: int = 0) -> Pooled:
    """Cells of all trials, by seed or by seed and draw (the same methods in each), on instances with ids."""
    methods = [cell.method for cell in next(iter(cells.values()))]
    instances, position = np.unique(np.concatenate([ids[s] for s in cells]), return_inverse=True)
    places = dict(zip(cells, np.split(position, np.cumsum([len(ids[s]) for s in cells])[:-1]), strict=True))
    sums = {s: [cell.columns for cell in methods_of_seed] for s, methods_of_seed in cells.items()}
    tests = {s: _one_label_each(len(ids[s])) for s in cells}
    by_seed = np.stack([resampled(sums[s], tests[s], np.ones((1, len(ids[s]))))[0] for s in cells])
    generator = np.random.default_rng(seed)
    parts = []
    for _ in range(0, _RESAMPLES, _AT_ONCE):
        drawn = generator.integers(len(instances), size=(_AT_ONCE, len(instances)))
        times = np.stack([np.bincount(row, minlength=len(instances)) for row in drawn]).astype(np.float64)
        parts.append(np.mean([resampled(sums[s], tests[s], times[:, places[s]]) for s in cells], axis=0))
    baselines = tuple(cell.method for cell in next(iter(cells.values())) if cell.record["baseline"])
    values, replicates = by_seed.mean(axis=0), np.concatenate(parts)
    replicates += _drawn_trials(list(cells), by_seed - values, np.random.default_rng([seed, 1]))
    return Pooled(task, tuple(methods), baselines, METRICS[task], values, by_seed, replicates)


def _drawn_trials(trials: Sequence[Any], deviation: Array, generator: np.random.Generator) -> Array:
    """Mean deviations (resamples, methods, metrics) of drawn networks, or of drawn samples of one network."""
    networks = [trial[0] if isinstance(trial, tuple) else trial for trial in trials]
    units = networks if len(set(networks)) > 1 else list(range(len(trials)))
    known = list(dict.fromkeys(units))
    if len(known) == 1:
        return np.zeros((_RESAMPLES, *deviation.shape[1:]))
    means = np.stack([deviation[[unit == other for other in units]].mean(axis=0) for unit in known])
    drawn = generator.integers(len(known), size=(_RESAMPLES, len(known)))
    return np.asarray(means[drawn].mean(axis=1) * np.sqrt(len(known) / (len(known) - 1)))  # the variance without bias


def verdicts(pooled: Pooled) -> list[Verdict]:
    """What the default policy promises, against the numbers."""
    point = "accuracy" if pooled.task == "classification" else "mae"
    rivals = [method for method in pooled.methods if method != HALF]
    best = pooled.best("nll", rivals)
    results = [
        Verdict(
            "the default policy has the best NLL of all methods with all views, or is within the interval of the best",
            best == "vbtta" or not pooled.worse("vbtta", best, "nll"),
            "it is the best" if best == "vbtta" else _against(pooled, "vbtta", best, "nll"),
        )
    ]
    strongest = pooled.best(point, pooled.baselines)
    results.append(
        Verdict(
            f"its {_title(point)} is no worse than the best baseline's beyond the interval",
            not pooled.worse("vbtta", strongest, point),
            _against(pooled, "vbtta", strongest, point),
        )
    )
    if HALF in pooled.methods:
        lost = [metric for metric in ("nll", point) if pooled.worse(HALF, "vbtta", metric)]
        evidence = "; ".join(_against(pooled, HALF, "vbtta", metric) for metric in ("nll", point))
        results.append(Verdict("with half of the views it loses nothing beyond the interval", not lost, evidence))
    return results


def _against(pooled: Pooled, method: str, reference: str, metric: str) -> str:
    value, low, high = pooled.difference(method, reference, metric)
    return f"{_title(metric)} of {method} minus {reference}: {value:+.4f} [{low:+.4f}, {high:+.4f}]"


def _title(metric: str) -> str:
    return metric if metric in ("accuracy", "brier", "coverage") else metric.upper()


def _one_label_each(n: int) -> HeldOut:
    """All that resampling asks of the test labels: there is one of every instance."""
    rows = np.arange(n)
    return HeldOut(rows, rows, rows, np.ones(n), n)
