"""Tables, figures and the summary of results, made from their rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vbtta._support.files import atomic_path
from vbtta.experiments.item import ITEMS, Cell, Claim, load_item
from vbtta.experiments.provenance import NOT_RECORDED, made_by
from vbtta.experiments.running import Outcome, read_outcome, write_outcome
from vbtta.plotting import save_svg

__all__ = ["markdown_table", "write_item", "write_summary"]

_PREFACE = """\
# Results beside the paper's

Made by `vbtta reproduce` from the rows in this folder; do not edit. The paper is M. Kimura and H. Bondell,
"Test-Time Augmentation Meets Variational Bayes". Every number of ours has its spread, the standard deviation over
trials, and every claim of the paper in words has a verdict: *holds*, *holds if ...* or *does not hold*.
`vbtta reproduce --verify` runs a random sample of the trials again and compares.
"""


def write_item(folder: Path, outcome: Outcome) -> None:
    """Write an item's rows, table and figures into a folder."""
    item = load_item(outcome.item)
    write_outcome(folder / "rows.json", outcome)
    config = item.PROFILES[outcome.profile]
    text = f"# {item.TITLE}\n\n{item.table(outcome.rows, config).strip()}\n"
    drawn = item.figures(outcome.rows)
    for name, figure in drawn.items():
        save_svg(figure, folder / f"{name}.svg")
    if drawn:
        text += "\n" + "\n".join(f"![{name}]({name}.svg)" for name in drawn) + "\n"
    _write(folder / "table.md", text)


def write_summary(out: Path) -> None:
    """Write README.md for all items that have rows under `out`."""
    parts = [_PREFACE]
    for name in ITEMS:
        path = out / name / "rows.json"
        if path.is_file():
            parts.append(_section(read_outcome(path), out / name))
    _write(out / "README.md", "\n".join(parts))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers.

    Examples
    --------
    >>> print(markdown_table(["view", "weight"], [["flip", "0.5"]]))
    | view | weight |
    | --- | ---: |
    | flip | 0.5 |
    """
    lines = [list(header), ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _section(outcome: Outcome, folder: Path) -> str:
    item = load_item(outcome.item)
    rows = outcome.rows
    facts = outcome.provenance
    pictures = [path.name for path in sorted(folder.glob("*.svg"))]
    links = [f"[table]({outcome.item}/table.md)", f"[rows]({outcome.item}/rows.json)"]
    links += [f"[{name.removesuffix('.svg')}]({outcome.item}/{name})" for name in pictures]
    warning = " Far too small to judge the paper by: this profile checks that the code runs." * (
        outcome.profile == "smoke"
    )
    codes = ", ".join(_short(code) for code in facts["code"])
    made = f"Profile `{outcome.profile}`: " + (
        f"{len(outcome.trials)} trials, {facts['seconds']:.0f} s by the clock if run one by one; code {codes}; "
        f"{_made(outcome.trials)}."
        if outcome.trials
        else "drawn, not measured."
    )
    made += warning
    parts = [f"## {outcome.item}: {item.TITLE}", " · ".join(links), made]
    cells, claims = item.cells(rows), item.claims(rows)
    if claims:
        parts.append(_claims(claims))
    if cells:
        parts.append(_cells(cells))
    return "\n\n".join(parts) + "\n"


def _claims(claims: Sequence[Claim]) -> str:
    rows = [f"| {claim.words} | **{claim.verdict}** | {claim.numbers} |" for claim in claims]
    return "\n".join(["| the paper says | verdict | our numbers |", "| --- | --- | --- |", *rows])


def _cells(cells: Sequence[Cell]) -> str:
    rows = [
        f"| {cell.what} | {cell.paper:.3f} | {cell.ours:.3f} | {cell.spread:.3f} | {cell.verdict} |" for cell in cells
    ]
    return "\n".join(["| cell | paper | ours | spread | verdict |", "| --- | ---: | ---: | ---: | --- |", *rows])


def _made(trials: Sequence[Mapping[str, Any]]) -> str:
    """Versions and machines of the trials, most of them first."""
    parts = []
    for entry in sorted(made_by(trials), key=lambda one: -one["trials"]):
        if entry["versions"] == NOT_RECORDED:
            part = f"versions and machine {NOT_RECORDED}"
        else:
            versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
            part = f"{versions}; {entry['machine']}, {entry['processor']}"
        parts.append(part if entry["trials"] == len(trials) else f"{entry['trials']} of them: {part}")
    return "; ".join(parts)


def _short(code: str) -> str:
    commit, _, rest = code.partition(" ")
    return f"`{commit[:10]}`{' ' + rest if rest else ''}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
