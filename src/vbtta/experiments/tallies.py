"""Summaries of rows over trials: means with spreads, paired differences, and words for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vbtta.experiments.item import Row

__all__ = ["Difference", "Spread", "agreement", "number", "paired", "plural", "select", "spread"]


class Spread(NamedTuple):
    """Mean and standard deviation over trials."""

    mean: float
    sd: float

    def text(self, digits: int = 3) -> str:
        """Words for a table cell."""
        return f"{self.mean:.{digits}f} (± {self.sd:.{digits}f})"


class Difference(NamedTuple):
    """Mean of paired differences with its standard error, and in how many trials it is positive."""

    mean: float
    error: float
    positive: int
    trials: int

    def text(self, digits: int = 4) -> str:
        """Words for a claim's numbers."""
        return (
            f"{self.mean:+.{digits}f} (standard error {self.error:.{digits}f}, "
            f"positive in {self.positive} of {self.trials} trials)"
        )


def select(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Rows whose entries are as given, in order.

    Examples
    --------
    >>> select([{"seed": 0, "x": 1.0}, {"seed": 1, "x": 2.0}], seed=1)
    [{'seed': 1, 'x': 2.0}]
    """
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def number(row: Row, key: str) -> float:
    """One entry of a row as a float."""
    value = row[key]
    if not isinstance(value, int | float):
        raise TypeError(f"{key} must be a number; got {value!r}.")
    return float(value)


def spread(rows: Sequence[Row], key: str) -> Spread:
    """Mean and standard deviation of an entry over rows.

    Examples
    --------
    >>> spread([{"x": 1.0}, {"x": 3.0}], "x").mean
    2.0
    """
    values = np.array([number(row, key) for row in rows])
    return Spread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def paired(first: Sequence[Row], second: Sequence[Row], key: str) -> Difference:
    """First minus second, trial by trial; both must come in the same order of trials.

    Examples
    --------
    >>> paired([{"x": 2.0}, {"x": 4.0}], [{"x": 1.0}, {"x": 1.0}], "x")
    Difference(mean=2.0, error=1.0, positive=2, trials=2)
    """
    gaps = np.array([number(one, key) - number(two, key) for one, two in zip(first, second, strict=True)])
    error = float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.inf
    return Difference(float(gaps.mean()), error, int((gaps > 0).sum()), len(gaps))


def plural(count: int, what: str) -> str:
    """Return a count with its noun.

    Examples
    --------
    >>> plural(1, "seed"), plural(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def agreement(ours: Spread, paper: float, paper_sd: float, *, larger_is_better: bool, trials: int | None = None) -> str:
    """Whether a mean of ours lies within two standard deviations, both sides' together, of the paper's.

    Where both are means over so many trials, standard errors take the place of standard deviations.

    Examples
    --------
    >>> agreement(Spread(0.62, 0.05), 0.60, 0.05, larger_is_better=True)
    'agrees (within two standard deviations)'
    """
    gap = ours.mean - paper
    if abs(gap) <= 2 * math.hypot(ours.sd, paper_sd) / math.sqrt(trials or 1):
        return f"agrees (within two standard {'deviations' if trials is None else 'errors'})"
    return "better" if (gap > 0) == larger_is_better else "worse"
