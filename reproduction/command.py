"""The command line of the reproduction."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_PROGRAM = "python -m reproduction"
_DESCRIPTION = """\
Make the paper's tables and figures again: rows with provenance, tables, figures, and a summary of verdicts.
An interrupted run goes on where it stopped.
"""
_EXAMPLE = f"Example: {_PROGRAM} figure3 --profile smoke --out results"


class UsageError(Exception):
    """The command was called in a wrong way: exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {_PROGRAM} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors are one line, with code 2 for wrong use, 1 for failures and 130 for an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if options.quiet else "default")
            warnings.showwarning = _show_warning
            _command(options)
    except KeyboardInterrupt:
        _complain("interrupted; what is finished is kept, the same command goes on from there")
        return 130
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(_message(error))
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("items", metavar="ITEM", nargs="*", help="names of items, all, or ls to list them; all is meant with --verify")
    profiles = "smoke: seconds; cpu: two cores and hours; pretrained: fine-tuned networks; paper: the full protocol"
    add("--profile", choices=("smoke", "cpu", "pretrained", "paper"), default="cpu", help=f"{profiles} (default: cpu)")
    data = os.environ.get("VBTTA_DATA")
    add("--data", type=Path, default=data and Path(data), help="folder of the data sets, for real images (VBTTA_DATA)")
    out = "folder for rows, tables, figures and README.md (default: results, runs/smoke or results/pretrained)"
    add("--out", "-o", type=Path, help=out)
    add("--cache", type=Path, help="folder for finished trials and networks (default: OUT/.trials)")
    add("--jobs", "-j", type=_positive, default=2, help="processes of one thread each (default: 2)")
    add("--verify", action="store_true", help="run a random sample of the trials under OUT again and compare")
    add("--sample", type=_positive, default=2, help="trials an item that --verify runs (default: 2)")
    add("--seed", type=int, help="seed of the sample (default: another one each time)")
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", "-q", action="store_true", help="print nothing on the error stream but errors")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _command(options: argparse.Namespace) -> None:
    from reproduction.items import ITEMS
    from reproduction.records import Places

    if options.items == ["ls"]:
        titles = {name: item.title for name, item in ITEMS.items()}
        return _print(options, titles, [f"{name:<15}{title}" for name, title in titles.items()])
    if not options.items and not options.verify:
        raise UsageError(f"name at least one item, or all; {_PROGRAM} ls lists them")
    unknown = [name for name in options.items if name not in (*ITEMS, "all")]
    if unknown:
        raise UsageError(f"{unknown[0]}: no such item; choose from ls, all, {', '.join(ITEMS)}")
    if options.data is not None and not options.data.is_dir():
        raise UsageError(f"--data {options.data}: no such folder; give the folder of the data sets")
    everything = not options.items or "all" in options.items
    names = list(ITEMS) if everything else list(dict.fromkeys(options.items))
    without = [name for name in names if options.profile not in ITEMS[name].profiles]
    if without and not everything:
        raise UsageError(
            f"{without[0]} has no profile {options.profile}; choose {', '.join(ITEMS[without[0]].profiles)}"
        )
    names = [name for name in names if name not in without]
    # These profiles do not write over the results of the others; smoke results are not kept.
    folders = {"smoke": "results" if options.verify else "runs/smoke", "pretrained": "results/pretrained"}
    out = options.out or Path(folders.get(options.profile, "results"))
    store = options.cache or out / ".trials"
    places = Places(options.data, store / "networks")
    if options.verify:
        return _verify(options, names, everything, out, places)
    return _run(options, names, everything, out, store, places)


def _run(options: argparse.Namespace, names: list[str], everything: bool, out: Path, store: Path, places: Any) -> None:
    from reproduction import running
    from reproduction.items import ITEMS
    from reproduction.records import DataMissing, judge
    from reproduction.report import write_item, write_summary

    made: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    lines = []

    def note(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    outcomes = running.run_items(names, options.profile, places, store, jobs=options.jobs, note=note)
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, DataMissing):
            note(f"{name}: skipped, {outcome}")
            skipped[name] = str(outcome)
            continue
        write_item(out / name, outcome)
        write_summary(out)
        verdicts = judge(ITEMS[name].claims, outcome.rows)
        made[name] = [verdict._asdict() for verdict in verdicts]
        lines += [f"{name}: {verdict.verdict}: {verdict.claim}" for verdict in verdicts] or [f"{name}: done"]
    if made:
        lines.append(f"wrote {out / 'README.md'}")
    _print(options, {"profile": options.profile, "out": str(out), "items": made, "skipped": skipped}, lines)
    if skipped and not everything:
        name, reason = next(iter(skipped.items()))
        raise OSError(f"{name} was not made: {reason}")


def _verify(options: argparse.Namespace, names: list[str], everything: bool, out: Path, places: Any) -> None:
    from reproduction import running
    from reproduction.records import DataMissing

    checked: dict[str, Any] = {}
    lines, skipped, different = [], [], []
    for name in names:
        path = out / name / "rows.json"
        if not path.is_file():
            if not everything:
                raise OSError(f"{path} does not exist; run `{_PROGRAM} {name} --out {out}` first")
            continue
        outcome = running.read_outcome(path)
        again = min(options.sample, len(outcome.trials))
        if not options.quiet:
            print(f"{name}: running {again} of {len(outcome.trials)} trials again", file=sys.stderr, flush=True)
        try:
            gap = running.verify(outcome, places, sample=options.sample, seed=options.seed, jobs=options.jobs)
        except DataMissing as missing:
            skipped.append(str(missing))
            checked[name] = {"skipped": str(missing)}
            lines.append(f"{name}: skipped, {missing}")
        except running.ResultsDiffer as difference:
            different.append(str(difference))
            checked[name] = {"different": str(difference)}
            lines.append(f"{name}: differs")
        else:
            checked[name] = {"trials": again, "largest_difference": gap}
            lines.append(f"{name}: {again} trials agree, largest difference {gap:.1e}")
    if not checked:
        raise OSError(f"{out} holds no results; run `{_PROGRAM} all --out {out}` first")
    if skipped:
        lines.append(f"{len(skipped)} of {len(checked)} items skipped for want of data")
    _print(options, checked, lines)
    if different:
        raise running.ResultsDiffer("; ".join(different))
    if len(skipped) == len(checked):
        raise OSError(f"nothing was checked: {skipped[0]}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def _print(options: argparse.Namespace, document: dict[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(document, allow_nan=False, indent=2) if options.json else "\n".join(lines))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    known = isinstance(error, UsageError | ValueError | OSError | ImportError)
    return str(error) if known and str(error) else f"{type(error).__name__}: {error}; --debug shows where"


def _complain(message: str) -> None:
    print(f"reproduction: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    if issubclass(category, UserWarning):
        print(f"reproduction: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
