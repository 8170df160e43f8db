"""Summaries of rows over trials: selections, means with spreads, paired differences, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from reproduction.records import Row, Rows

T = TypeVar("T")


class Spread(NamedTuple):
    """Mean and standard deviation over trials."""

    mean: float
    sd: float

    def text(self, digits: int = 3) -> str:
        """Text of a table cell."""
        return f"{self.mean:.{digits}f} (± {self.sd:.{digits}f})"


class Difference(NamedTuple):
    """Mean of paired differences with its standard error, and in how many trials it is positive."""

    mean: float
    error: float
    positive: int
    trials: int

    @property
    def clear(self) -> bool:
        """Whether the mean is more than two standard errors above 0."""
        return self.mean > 2 * self.error

    def verdict(self) -> bool | str:
        """Whether a difference is positive, with the condition where it is not clearly so."""
        if self.clear or self.mean <= 0:
            return self.clear
        return "holds if a difference of less than two standard errors counts"

    def text(self, digits: int = 4) -> str:
        """Text of a claim's evidence."""
        return (
            f"{self.mean:+.{digits}f} (standard error {self.error:.{digits}f}, "
            f"positive in {self.positive} of {self.trials} trials)"
        )


def select(rows: Rows, **wanted: object) -> list[Row]:
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


def numbers(row: Row, key: str) -> list[float]:
    """A list of numbers in a row."""
    value = row[key]
    if not isinstance(value, list):
        raise TypeError(f"{key} must be a list; got {value!r}.")
    return value


def mean_weights(rows: Rows) -> list[float]:
    """Weights of the views, averaged over rows."""
    return [sum(column) / len(column) for column in zip(*(numbers(row, "weights") for row in rows), strict=True)]


def spread(rows: Rows, key: str) -> Spread:
    """Mean and standard deviation of an entry over rows.

    Examples
    --------
    >>> spread([{"x": 1.0}, {"x": 3.0}], "x").mean
    2.0
    """
    values = np.array([number(row, key) for row in rows])
    return Spread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def paired(first: Rows, second: Rows, key: str, second_key: str | None = None) -> Difference:
    """First minus second, trial by trial; both must come in the same order of trials.

    `second_key`: the entry of the second rows, where it has another name.

    Examples
    --------
    >>> paired([{"x": 2.0}, {"x": 4.0}], [{"x": 1.0}, {"x": 1.0}], "x")
    Difference(mean=2.0, error=1.0, positive=2, trials=2)
    """
    pairs = zip(first, second, strict=True)
    gaps = np.array([number(one, key) - number(other, second_key or key) for one, other in pairs])
    error = float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.inf
    return Difference(float(gaps.mean()), error, int((gaps > 0).sum()), len(gaps))


def partly(holds: Mapping[str, bool], words: str, joint: str = ", ") -> bool | str:
    """A verdict on parts: True or False where all agree, else the words with the parts that ``{passed}``, ``{failed}``.

    Examples
    --------
    >>> partly({"mixup": True, "cutmix": False}, "holds if left out: {failed}"), partly({"mixup": True}, "")
    ('holds if left out: cutmix', True)
    """
    if len(set(holds.values())) == 1:
        return all(holds.values())
    passed, failed = (joint.join(part for part in holds if holds[part] is wanted) for wanted in (True, False))
    return words.format(passed=passed, failed=failed)


def listed(values: Mapping[str, T], form: Callable[[T], str], joint: str = "; ") -> str:
    """Names with their values.

    Examples
    --------
    >>> listed({"mixup": 0.25, "cutmix": 0.5}, "{:.1f}".format)
    'mixup 0.2; cutmix 0.5'
    """
    return joint.join(f"{name} {form(value)}" for name, value in values.items())


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


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers.

    Examples
    --------
    >>> print(markdown_table(["view", "weight"], [["flip", "0.5"]]))
    | view | weight |
    | --- | ---: |
    | flip | 0.5 |
    """
    lines = [list(header), ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
