"""The outcome of a comparison: a table that prints, exports and draws itself."""

__all__ = ["Comparison", "Difference"]

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta.comparison.scores import COVERAGE_LEVEL
from vbtta.labels import Array

_LARGER_IS_BETTER = ("accuracy",)


class Difference(NamedTuple):
    """Every method minus one of them, with intervals."""

    reference: str
    value: Array  # (methods, metrics)
    low: Array  # (methods, metrics)
    high: Array  # (methods, metrics)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods x metrics on one test set; made by :func:`vbtta.comparison.compare`.

    Attributes
    ----------
    task : str
    methods, metrics : tuples of str
    values : (methods, metrics) array
    against_original, against_best : Difference or None
        Differences from the identity view alone, and from the baseline with the best test NLL, with paired
        bootstrap intervals.
    fit_seconds : (methods,) array
        0 for what was fitted already.
    views_used : (methods,) int array
    forward_passes : (methods,) int array
        Model evaluations an input: draws summed over the views used.
    n_instances : int
        Test instances with a label.
    n_labels : float
    level : float
        Of the intervals.
    notes : tuple of str
    fitted : dict
        The fitted methods by name.
    """

    task: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Array
    against_original: Difference | None
    against_best: Difference | None
    fit_seconds: Array
    views_used: Array
    forward_passes: Array
    n_instances: int
    n_labels: float
    level: float
    notes: tuple[str, ...]
    fitted: dict[str, Any]

    def __repr__(self) -> str:
        return f"Comparison({self.task}: {len(self.methods)} methods on {self.n_instances:,} instances)"

    def __getitem__(self, key: tuple[str, str]) -> float:
        """One value by method and metric: ``comparison["uniform", "nll"]``."""
        method, metric = key
        for name, known in ((method, self.methods), (metric, self.metrics)):
            if name not in known:
                raise KeyError(f"{name!r} is not in the comparison; there are {', '.join(known)}")
        return float(self.values[self.methods.index(method), self.metrics.index(metric)])

    def to_records(self) -> list[dict[str, Any]]:
        """One dictionary of plain values a method, for JSON."""
        records: list[dict[str, Any]] = []
        for m, method in enumerate(self.methods):
            record: dict[str, Any] = {"method": method}
            for s, metric in enumerate(self.metrics):
                record[metric] = float(self.values[m, s])
                for name, difference in self._differences():
                    record[f"{metric}_minus_{name}"] = float(difference.value[m, s])
                    record[f"{metric}_minus_{name}_low"] = float(difference.low[m, s])
                    record[f"{metric}_minus_{name}_high"] = float(difference.high[m, s])
            record["fit_seconds"] = float(self.fit_seconds[m])
            record["views_used"] = int(self.views_used[m])
            record["forward_passes"] = int(self.forward_passes[m])
            records.append(record)
        return records

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one row a method, columns as in :meth:`to_records`."""
        return require("pandas", "cli").DataFrame(self.to_records()).set_index("method")

    def to_markdown(self) -> str:
        """The values, best in bold, then the differences with their intervals."""
        header = ["method", *(_title(metric) for metric in self.metrics), "views", "passes", "fit (s)"]
        best = [self._best(s) for s in range(len(self.metrics))]
        rows = [
            [
                method,
                *(_bold(f"{self.values[m, s]:.4f}", m in best[s]) for s in range(len(self.metrics))),
                str(int(self.views_used[m])),
                str(int(self.forward_passes[m])),
                f"{self.fit_seconds[m]:.2f}",
            ]
            for m, method in enumerate(self.methods)
        ]
        parts = [_table(header, rows)]
        for _, difference in self._differences():
            parts.append(
                f"Minus `{difference.reference}`, with {100 * self.level:g} % paired bootstrap intervals "
                "(bold where they exclude 0):"
            )
            parts.append(_table(["method", *(_title(metric) for metric in self.metrics)], self._rows(difference)))
        size = f"{self.n_labels:,g} labels of {self.n_instances:,} test instances."
        parts.append(" ".join([size, *(f"{note[0].upper()}{note[1:]}." for note in self.notes)]))
        return "\n\n".join(parts) + "\n"

    def plot(self, metric: str = "nll", against: str = "best") -> Any:
        """A matplotlib Figure: every method's difference in one metric, with its interval.

        Parameters
        ----------
        metric : str
        against : "best" or "original"
        """
        differences = dict(self._differences())
        if metric not in self.metrics:
            raise ValueError(f"metric must be one of {', '.join(self.metrics)}; got {metric!r}")
        if against not in differences:
            raise ValueError(f"against must be one of {', '.join(differences) or 'none here'}; got {against!r}")
        difference, s = differences[against], self.metrics.index(metric)
        order = np.argsort(-self._loss(s), kind="stable")  # the best on top
        figure = require("matplotlib.figure", "cli").Figure(
            figsize=(7, 1.2 + 0.28 * len(self.methods)), layout="constrained"
        )
        axes = figure.add_subplot()
        centre = difference.value[order, s]
        # A percentile interval need not hold the estimate (the calibration error's is biased upwards).
        reach = np.maximum([centre - difference.low[order, s], difference.high[order, s] - centre], 0)
        place = np.arange(len(order))
        axes.errorbar(centre, place, xerr=reach, fmt="o", color="tab:blue", capsize=3, markersize=4)
        axes.axvline(0, color="0.5", linewidth=0.8)
        axes.set_yticks(place, [f"{self.methods[m]}  ({self.values[m, s]:.4g})" for m in order])
        better = "larger" if metric in _LARGER_IS_BETTER else "nearer the level" if metric == "coverage" else "smaller"
        axes.set_xlabel(f"{_title(metric)} minus {difference.reference} ({better} is better)")
        return figure

    def _differences(self) -> list[tuple[str, Difference]]:
        pairs = (("original", self.against_original), ("best", self.against_best))
        return [(name, difference) for name, difference in pairs if difference is not None]

    def _rows(self, difference: Difference) -> list[list[str]]:
        rows = []
        for m, method in enumerate(self.methods):
            if method == difference.reference:
                continue
            cells = [method]
            for s in range(len(self.metrics)):
                low, high = difference.low[m, s], difference.high[m, s]
                text = f"{difference.value[m, s]:+.4f} [{low:+.4f}, {high:+.4f}]"
                cells.append(_bold(text, low > 0 or high < 0))
            rows.append(cells)
        return rows

    def _loss(self, s: int) -> Array:
        """A metric turned so that less is better: (methods,)."""
        if self.metrics[s] == "coverage":
            return np.abs(self.values[:, s] - COVERAGE_LEVEL)
        return -self.values[:, s] if self.metrics[s] in _LARGER_IS_BETTER else self.values[:, s]

    def _best(self, s: int) -> list[int]:
        """The methods with the best value of a metric, as printed."""
        loss = self._loss(s).round(4)
        return [int(m) for m in np.flatnonzero(loss == loss.min())]


def _title(metric: str) -> str:
    if metric == "coverage":
        return f"coverage ({100 * COVERAGE_LEVEL:g} %)"
    return metric if metric in ("accuracy", "brier") else metric.upper()


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
