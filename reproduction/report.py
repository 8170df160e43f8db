"""Tables, figures and the summary of results, made from their rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.items import ITEMS
from reproduction.records import Cell, judge
from reproduction.running import NOT_RECORDED, Outcome, made_by, read_outcome, write_outcome
from reproduction.store import write_text
from vbtta.plotting import save_svg

_PREFACE = """\
# Results beside the paper's

Made by `python -m reproduction` from the rows in this folder; do not edit. The paper is M. Kimura and H. Bondell,
"Test-Time Augmentation Meets Variational Bayes". Every number of ours has its spread, the standard deviation over
trials, and every claim of the paper in words has a verdict: *holds*, *holds if ...* or *does not hold*.
`python -m reproduction --verify` runs a random sample of the trials again and compares.

Results that name commit 6548a27 or a later one have the frozen defaults: later changes move them by rounding or by
the tolerance of held-out fits; regressions with 100 to 1,000 labels also by up to 0.0005 nats, as the prior of the
residual variance has changed for small samples with useless views (bbd1ea3). `vbtta-half` is from before
`select_views` kept the identity where labels are few; of 500 labels and more the choice hardly differs. The paper's
tables and figures in the profile `cpu` are older, with explicit models.
"""


def write_item(folder: Path, outcome: Outcome) -> None:
    """Write an item's rows, table and figures into a folder."""
    item = ITEMS[outcome.item]
    write_outcome(folder / "rows.json", outcome)
    text = f"# {item.title}\n\n{item.table(outcome.rows, item.profiles[outcome.profile]).strip()}\n"
    drawn = item.figures(outcome.rows)
    for name, figure in drawn.items():
        save_svg(figure, folder / f"{name}.svg")
    if drawn:
        text += "\n" + "\n".join(f"![{name}]({name}.svg)" for name in drawn) + "\n"
    write_text(folder / "table.md", text)


def write_summary(out: Path) -> None:
    """Write README.md for all items that have rows under `out`."""
    paths = {name: out / name / "rows.json" for name in ITEMS}
    sections = [_section(read_outcome(path), out / name) for name, path in paths.items() if path.is_file()]
    write_text(out / "README.md", "\n".join([_PREFACE, *sections]))


def _section(outcome: Outcome, folder: Path) -> str:
    name, item, rows = outcome.item, ITEMS[outcome.item], outcome.rows
    links = [f"[table]({name}/table.md)", f"[rows]({name}/rows.json)"]
    links += [f"[{path.stem}]({name}/{path.name})" for path in sorted(folder.glob("*.svg"))]
    made = f"Profile `{outcome.profile}`: drawn, not measured."
    if outcome.trials:
        codes = ", ".join(_short(code) for code in outcome.provenance["code"])
        made = (
            f"Profile `{outcome.profile}`: {len(outcome.trials)} trials, {outcome.provenance['seconds']:.0f} s by the "
            f"clock if run one by one; code {codes}; {_made(outcome.trials)}."
        )
    if outcome.profile == "smoke":
        made += " Far too small to judge the paper by: this profile checks that the code runs."
    parts = [f"## {name}: {item.title}", " · ".join(links), made]
    verdicts = [f"| {words} | **{verdict}** | {numbers} |" for words, verdict, numbers in judge(item.claims, rows)]
    if verdicts:
        parts.append("\n".join(["| the paper says | verdict | our numbers |", "| --- | --- | --- |", *verdicts]))
    cells = [
        f"| {cell.what} | {cell.paper:.3f} | {cell.ours:.3f} | {_spread(cell)} | {cell.verdict} |"
        for cell in item.cells(rows)
    ]
    if cells:
        head = ["| cell | paper | ours | spread | verdict |", "| --- | ---: | ---: | ---: | --- |"]
        parts.append("\n".join([*head, *cells]))
    return "\n\n".join(parts) + "\n"


def _spread(cell: Cell) -> str:
    return f"{cell.spread:.3f}" if cell.spread > 0 else "–"  # of one trial there is none


def _made(trials: Sequence[Mapping[str, Any]]) -> str:
    """Versions and machines of the trials, most of them first."""
    parts = []
    for entry in sorted(made_by(trials), key=lambda known: -known["trials"]):
        part = f"versions and machine {NOT_RECORDED}"
        if entry["versions"] != NOT_RECORDED:
            versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
            part = f"{versions}; {entry['machine']}, {entry['processor']}"
        parts.append(part if entry["trials"] == len(trials) else f"{entry['trials']} of them: {part}")
    return "; ".join(parts)


def _short(code: str) -> str:
    commit, _, rest = code.partition(" ")
    return f"`{commit[:10]}`{' ' + rest if rest else ''}"
