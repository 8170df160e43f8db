"""`vbtta fit`: predictions and labels in, a policy out."""

__all__ = ["fit"]

from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.options import (
    Address,
    Annotators,
    Backend,
    BackendOption,
    Engine,
    LabelsFile,
    Model,
    PredictionsFile,
    Seed,
    TaskOption,
    Workers,
)
from vbtta.cli.running import Debug, Json, Quiet, Talk, UsageError, command, writable


@command
def fit(
    predictions: PredictionsFile,
    labels: LabelsFile,
    task: TaskOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the policy (.json).")],
    report: Annotated[Path | None, typer.Option("--report", help="Write a page about the policy (.html) too.")] = None,
    model: Annotated[
        Model, typer.Option("--model", help="What is assumed; auto compares held-out scores.")
    ] = Model.auto,
    engine: Annotated[Engine, typer.Option("--engine", help="How it is inferred.")] = Engine.auto,
    guard: Annotated[bool, typer.Option(help="Fall back to the identity view where the views are worse.")] = True,
    budget: Annotated[
        int | None, typer.Option("--budget", min=1, help="Use at most so many views, the best ones.")
    ] = None,
    columns_are_annotators: Annotators = False,
    seed: Seed = 0,
    backend: BackendOption = Backend.local,
    workers: Workers = None,
    address: Address = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Infer how much weight each view deserves from predictions and labels.

    Example:

        vbtta fit preds.npz labels.csv --task classification --out policy.json --report report.html
    """
    talk = Talk(as_json, quiet)
    writable(out, ".json")
    writable(report, ".html")
    from vbtta.cli.files import digest, read_pair
    from vbtta.fit import fit_policy
    from vbtta.report.documents import provenance
    from vbtta.report.html import write_report
    from vbtta.select import select_views

    if backend is Backend.ray and (budget is not None or engine is Engine.advi or report is not None):
        raise UsageError(
            "--budget, --engine advi and --report need all data in memory; leave them out, or use --backend local"
        )
    if backend is Backend.ray:
        options = {"task": task.value, "model": model.value, "guard": guard, "seed": seed}
        where = {"workers": workers, "address": address, "columns_are_annotators": columns_are_annotators}
        policy = _on_cluster(predictions, labels, talk, {**options, **where})
        policy.save(out)
        _say(talk, policy, out, None)
        return
    views, sets = read_pair(predictions, labels, task.value, talk, columns_are_annotators=columns_are_annotators)
    if budget is not None and engine is Engine.advi:
        raise UsageError("--budget compares many fits, which ADVI is too slow for; leave out --engine advi")
    talk.note("fitting ...")
    if budget is None:
        policy = fit_policy(
            views, sets, task=task.value, model=model.value, engine=engine.value, guard=guard, seed=seed
        )
    else:
        policy = select_views(
            views, sets, budget=budget, task=task.value, model=model.value, engine=engine.value, guard=guard, seed=seed
        )
    policy.save(out)
    if report is not None:
        files = {path.name: digest(path) for path in (predictions, labels)}
        options = {"task": task.value, "model asked for": model.value, "guard": guard, "seed": seed}
        write_report(report, policy, predictions=views, labels=sets, circumstances=provenance(policy, files, options))
    _say(talk, policy, out, report)


def _on_cluster(predictions: Path, labels: Path, talk: Talk, options: dict[str, Any]) -> Any:
    """The same by Ray; labels in parquet files are read by the workers."""
    from vbtta.cli.files import read_labels
    from vbtta.scale import fit_policy

    for path, what in ((predictions, "predictions"), (labels, "labels")):
        if not path.exists():
            raise UsageError(f"{path}: no such file; give the path of the {what} (.parquet, or a folder of them)")
    in_parquet = labels.is_dir() or labels.suffix == ".parquet"
    named = options["columns_are_annotators"]
    given = labels if in_parquet else read_labels(labels, columns_are_annotators=named).sets
    talk.note("fitting ...")
    return fit_policy(predictions, given, **options)


def _say(talk: Talk, policy: Any, out: Path, report: Path | None) -> None:
    """The policy in words."""
    from vbtta.report.documents import policy_document
    from vbtta.report.words import headline

    rows = [
        [view["name"], f"{view['weight']:.3f}", f"{view['low']:.3f}", f"{view['high']:.3f}"]
        for view in sorted(policy_document(policy)["views"], key=lambda view: -view["weight"])
    ]
    words = "\n".join(headline(policy))
    text = f"{words}\n\n{talk.table(['view', 'weight', '5 %', '95 %'], rows)}\n\nwrote {out}"
    written = {"policy": str(out), "report": None if report is None else str(report)}
    talk.result({**policy_document(policy), "written": written}, text if report is None else f"{text} and {report}")
