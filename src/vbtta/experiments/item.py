"""What every table and figure of the paper is to the runner: trials in, rows out, words and pictures from rows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ITEMS", "Cell", "Claim", "DataMissing", "Item", "Places", "Profile", "Row", "load_item", "run_all"]

# One measured thing, flat and JSON-able.
Row = dict[str, str | int | float | bool | list[float] | None]
Profile = Literal["smoke", "cpu", "paper"]
Verdict = Literal["holds", "does not hold"] | str  # or "holds if ...": the condition in words

ITEMS = (
    "figure1",
    "table1",
    "figure3",
    "figure4",
    "table2",
    "table3",
    "figure5",
    "table4",
    "figure6",
    "figure7",
    "extensions",
)


class DataMissing(Exception):  # noqa: N818  (a state of the machine, not a fault of the code)
    """Raised by a trial whose data set is not there; the message names it and says where to get it."""


@dataclass(frozen=True)
class Places:
    """Where a trial finds its data and keeps what is expensive.

    Parameters
    ----------
    data : Path, optional
        Folder of the data sets; None where there is none.
    cache : Path, optional
        Folder for checkpoints of networks; None keeps nothing.
    threads : int
        Threads a trial may use.
    """

    data: Path | None = None
    cache: Path | None = None
    threads: int = 1


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours."""

    what: str
    paper: float
    ours: float
    spread: float  # standard deviation of ours over the trials
    verdict: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper in words, and what our numbers say about it."""

    words: str
    verdict: Verdict
    numbers: str


class Item(Protocol):
    """A module of ``vbtta.experiments`` that makes one table or figure.

    ``Config`` and ``Trial`` are frozen dataclasses of JSON-able fields. A trial is an independent piece of work that
    depends on nothing but its own fields and the data. ``table``, ``cells``, ``claims`` and ``figures`` look at
    rows only and compute nothing again.
    """

    TITLE: str  # one line for the list of items
    VERSION: int  # raised when the same trial would give other rows
    PROFILES: Mapping[str, Any]  # profile -> Config

    def trials(self, config: Any) -> Sequence[Any]:
        """Independent pieces of work."""

    def run_trial(self, trial: Any, places: Places) -> list[Row]:
        """Do one of them."""

    def run(self, config: Any, places: Places) -> list[Row]:
        """Do all of them in this process."""

    def table(self, rows: Sequence[Row], config: Any) -> str:
        """Markdown, with a caption that says what differs from the paper's protocol."""

    def cells(self, rows: Sequence[Row]) -> list[Cell]:
        """Return the paper's numbers beside ours."""

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Judge the paper's claims by our numbers."""

    def figures(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Draw matplotlib figures by name; may be empty."""


def load_item(name: str) -> Item:
    """Import the module of an item, by its name."""
    if name not in ITEMS:
        raise ValueError(f"unknown item {name!r}; choose from {', '.join(ITEMS)}.")
    return cast(Item, importlib.import_module(f"vbtta.experiments.{name}"))


def run_all(item: Item, config: Any, places: Places) -> list[Row]:
    """Rows of all trials, one after the other: what an item's ``run`` does."""
    return [row for trial in item.trials(config) for row in item.run_trial(trial, places)]
