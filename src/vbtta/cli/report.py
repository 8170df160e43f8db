"""`vbtta report`: a page from the files of a run."""

__all__ = ["report"]

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from vbtta.cli import running


@running.command
def report(
    folder: Annotated[Path, Argument(metavar="RUN-FOLDER", help="The folder with the files of a run.")],
    out: Annotated[
        Path | None, Option("--out", "-o", help="Where to write the page; by default report.html in the folder.")
    ] = None,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Make a self-contained HTML page from a folder with policy.json.

    What else is there goes in too: predictions.npz, labels.csv (or .parquet), test_predictions.npz, test_labels.csv,
    comparison.json, diagnosis.json, examples.npz, run.json.

    Example:

        vbtta report run-folder
    """
    talk = running.Talk(as_json, quiet)
    if not folder.is_dir():
        raise running.UsageError(f"{folder}: no such folder; give the one that holds policy.json")
    target = folder / "report.html" if out is None else out
    running.writable(target, ".html")
    running.existing(folder / "policy.json", "a policy that vbtta fit wrote, called policy.json")
    used = write_run_report(folder, target, talk)
    talk.result({"written": str(target), "used": used}, f"wrote {target} from {', '.join(used)}")


def write_run_report(folder: Path, target: Path, talk: running.Talk) -> list[str]:
    """Write the page of a run; the names of the files that it was made from."""
    from vbtta.cli.files import digest, read_pair
    from vbtta.policy import Policy
    from vbtta.report.documents import provenance
    from vbtta.report.html import write_report

    policy = Policy.load(folder / "policy.json")
    used = [folder / "policy.json"]
    parts: dict[str, Any] = {}
    for prefix in ("", "test_"):
        views = _first(folder, f"{prefix}predictions", ".npz", ".parquet")
        labels = _first(folder, f"{prefix}labels", ".csv", ".parquet")
        if views is not None and labels is not None:
            pair = read_pair(views, labels, policy.task, talk)
            used += [views, labels]
            parts |= {"test": pair} if prefix else {"predictions": pair[0], "labels": pair[1]}
    readers = {"comparison.json": _read_json, "diagnosis.json": _read_json, "examples.npz": _read_examples}
    for name, read in readers.items():
        if (folder / name).is_file():
            parts[name.partition(".")[0]] = read(folder / name)
            used.append(folder / name)
    run = _read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    circumstances = provenance(policy, {path.name: digest(path) for path in used}, run.get("options"))
    try:
        write_report(target, policy, story=run.get("story"), circumstances=circumstances, **parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a .json file that vbtta did not write ({error!r}); make it again") from error
    return [path.name for path in used]


def _first(folder: Path, name: str, *suffixes: str) -> Path | None:
    return next((folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").is_file()), None)


def _read_json(path: Path) -> Any:
    import json

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); make it again") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no object; make it again")
    return document


def _read_examples(path: Path) -> Any:
    import zipfile

    import numpy as np

    from vbtta.report.html import Examples

    try:
        with np.load(path, allow_pickle=False) as members:
            names = tuple(str(name) for name in members["names"])
            return Examples(members["rows"], names, members["images"] if "images" in members.files else None)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no examples (rows, names, images): {error}") from None
