"""`vbtta reproduce`: the paper's tables and figures, made again beside its own numbers."""

__all__ = ["reproduce"]

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.running import Debug, Json, Quiet, Talk, UsageError, command


class Profile(StrEnum):
    """How much work."""

    smoke = "smoke"
    cpu = "cpu"
    paper = "paper"


@command
def reproduce(
    items: Annotated[
        list[str] | None,
        typer.Argument(metavar="ITEM...", help="Names of items, all, or ls to list them; all is meant with --verify."),
    ] = None,
    profile: Annotated[
        Profile, typer.Option("--profile", help="smoke: seconds; cpu: two cores and hours; paper: the full protocol.")
    ] = Profile.cpu,
    data: Annotated[
        Path | None, typer.Option("--data", envvar="VBTTA_DATA", help="Folder of the data sets, for real images.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for rows, tables, figures and README.md; results, or runs/smoke for smoke."
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder for finished trials and networks; OUT/.trials by default.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes of one thread each.")] = 2,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run a random sample of the trials under OUT again and compare.")
    ] = False,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Trials an item that --verify runs.")] = 2,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sample; another one each time by default.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make the paper's tables and figures again: rows with provenance, tables, figures, and a summary of verdicts.

    An interrupted run goes on where it stopped.

    Example:

        vbtta reproduce figure3 --profile smoke --out results
    """
    from vbtta.experiments.item import ITEMS, Places

    talk = Talk(as_json, quiet)
    if items == ["ls"]:
        return _list(talk)
    if not items and not verify:
        raise UsageError("name at least one item, or all; vbtta reproduce ls lists them")
    items = items or ["all"]
    unknown = [name for name in items if name not in (*ITEMS, "all")]
    if unknown:
        raise UsageError(f"{unknown[0]}: no such item; choose from ls, all, {', '.join(ITEMS)}")
    if data is not None and not data.is_dir():
        raise UsageError(f"--data {data}: no such folder; give the folder of the data sets")
    everything = "all" in items
    names = list(ITEMS) if everything else list(dict.fromkeys(items))
    if out is None:  # a trial of the code does not write over results
        out = Path("runs/smoke" if profile is Profile.smoke and not verify else "results")
    store = out / ".trials" if cache is None else cache
    places = Places(data, store / "networks")
    if verify:
        return _verify(names, everything, out, places, sample, seed, jobs, talk)
    return _run(names, everything, profile.value, out, store, places, jobs, talk)


def _list(talk: Talk) -> None:
    from vbtta.experiments.item import ITEMS, load_item

    titles = {name: load_item(name).TITLE for name in ITEMS}
    talk.result(titles, "\n".join(f"{name:<12}{title}" for name, title in titles.items()))


def _run(
    names: list[str], everything: bool, profile: str, out: Path, store: Path, places: Any, jobs: int, talk: Talk
) -> None:
    from vbtta.experiments.item import DataMissing, load_item
    from vbtta.experiments.report import write_item, write_summary
    from vbtta.experiments.running import run_items

    document: dict[str, Any] = {"profile": profile, "out": str(out), "items": {}, "skipped": {}}
    lines = []
    for name, found in zip(names, run_items(names, profile, places, store, jobs=jobs, note=talk.note), strict=True):
        if isinstance(found, DataMissing):
            talk.note(f"{name}: skipped, {found}")
            document["skipped"][name] = str(found)
            continue
        write_item(out / name, found)
        write_summary(out)
        claims = load_item(name).claims(found.rows)
        document["items"][name] = [
            {"claim": claim.words, "verdict": claim.verdict, "numbers": claim.numbers} for claim in claims
        ]
        lines += [f"{name}: {claim.verdict}: {claim.words}" for claim in claims] or [f"{name}: done"]
    if document["items"]:
        lines.append(f"wrote {out / 'README.md'}")
    talk.result(document, "\n".join(lines))
    if document["skipped"] and not everything:
        name, reason = next(iter(document["skipped"].items()))
        raise OSError(f"{name} was not made: {reason}")


def _verify(
    names: list[str],
    everything: bool,
    out: Path,
    places: Any,
    sample: int,
    seed: int | None,
    jobs: int,
    talk: Talk,
) -> None:
    from vbtta.experiments.item import DataMissing
    from vbtta.experiments.running import ResultsDiffer, read_outcome
    from vbtta.experiments.running import verify as run_again

    found: dict[str, Any] = {}
    lines, skipped, different = [], {}, []
    for name in names:
        path = out / name / "rows.json"
        if path.is_file():
            outcome = read_outcome(path)
            again = min(sample, len(outcome.trials))
            talk.note(f"{name}: running {again} of {len(outcome.trials)} trials again")
            try:
                gap = run_again(outcome, places, sample=sample, seed=seed, jobs=jobs)
            except DataMissing as missing:
                skipped[name] = found[name] = {"skipped": str(missing)}
                lines.append(f"{name}: skipped, {missing}")
            except ResultsDiffer as difference:
                found[name] = {"different": str(difference)}
                different.append(str(difference))
                lines.append(f"{name}: differs")
            else:
                found[name] = {"trials": again, "largest_difference": gap}
                lines.append(f"{name}: {again} trials agree, largest difference {gap:.1e}")
        elif not everything:
            raise OSError(f"{path} does not exist; run `vbtta reproduce {name} --out {out}` first")
    if not found:
        raise OSError(f"{out} holds no results; run `vbtta reproduce all --out {out}` first")
    if skipped:
        lines.append(f"{len(skipped)} of {len(found)} items skipped for want of data")
    talk.result(found, "\n".join(lines))
    if different:
        raise ResultsDiffer("; ".join(different))
    if len(skipped) == len(found):
        raise OSError(f"nothing was checked: {next(iter(skipped.values()))['skipped']}")
