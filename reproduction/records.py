"""The records of the reproduction: items, their trials' rows, numbers of the paper and claims with verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, str | int | float | bool | list[float] | None]  # one measurement, flat and JSON-able
Rows = Sequence[Row]
PROFILES = ("smoke", "cpu", "paper")  # that every item has; those with images have "pretrained", too
Config = TypeVar("Config")
Trial = TypeVar("Trial")


class DataMissing(Exception):  # noqa: N818  (a state of the machine, not a fault of the code)
    """Raised by a trial whose data set is not there; the message names it and says where to get it."""


@dataclass(frozen=True)
class Places:
    """Where trials find their data and cache networks and predictions (None: nowhere), and their number of threads."""

    data: Path | None = None
    cache: Path | None = None
    threads: int = 1


class Cell(NamedTuple):
    """One number of the paper beside ours; `spread` is the standard deviation of ours over the trials."""

    what: str
    paper: float
    ours: float
    spread: float
    verdict: str


class Claim(NamedTuple):
    """A claim: words, predicate (True, False, or a verdict in words) and evidence, the last two from rows."""

    words: str | Callable[[Rows], str]
    predicate: Callable[[Rows], bool | str]
    evidence: Callable[[Rows], str]


class Verdict(NamedTuple):
    """A claim judged by rows."""

    claim: str
    verdict: str  # "holds", "holds if ..." or "does not hold"
    numbers: str


@dataclass(frozen=True)
class Item(Generic[Config, Trial]):
    """One table or figure of the paper.

    Configurations and trials are frozen dataclasses of JSON-able fields. A trial is independent work that depends on
    its own fields and the data only. Tables, cells, claims and figures are functions of rows and compute nothing again.
    """

    title: str
    version: int  # raised when the same trial would give other rows
    profiles: Mapping[str, Config]  # one configuration for each of PROFILES or more
    trials: Callable[[Config], Sequence[Trial]]
    run_trial: Callable[[Trial, Places], list[Row]]
    table: Callable[[Rows, Config], str]  # Markdown; the caption says what differs from the paper's protocol
    claims: tuple[Claim, ...] = ()
    cells: Callable[[Rows], list[Cell]] = lambda rows: []  # the paper's numbers beside ours
    figures: Callable[[Rows], Mapping[str, Figure]] = lambda rows: {}


def run_all(item: Item[Config, Trial], config: Config, places: Places) -> list[Row]:
    """Rows of all trials, one after the other in this process."""
    return [row for trial in item.trials(config) for row in item.run_trial(trial, places)]


def judge(claims: Sequence[Claim], rows: Rows) -> list[Verdict]:
    """Verdicts on claims.

    Examples
    --------
    >>> judge([Claim("One is less than two", lambda rows: 1 < 2, lambda rows: "1 and 2")], [])
    [Verdict(claim='One is less than two', verdict='holds', numbers='1 and 2')]
    """
    return [
        Verdict(words if isinstance(words, str) else words(rows), _in_words(predicate(rows)), evidence(rows))
        for words, predicate, evidence in claims
    ]


def _in_words(answer: bool | str) -> str:
    return answer if isinstance(answer, str) else "holds" if answer else "does not hold"
