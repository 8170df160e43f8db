"""`vbtta fit`: predictions and labels in, a policy out."""

__all__ = ["fit"]

from pathlib import Path
from typing import Annotated

import typer

from vbtta.cli.options import Annotators, Engine, LabelsFile, Model, PredictionsFile, Seed, TaskOption
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
    from vbtta.report.documents import policy_document, provenance
    from vbtta.report.html import write_report
    from vbtta.report.words import headline
    from vbtta.select import select_views

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
    rows = [
        [view["name"], f"{view['weight']:.3f}", f"{view['low']:.3f}", f"{view['high']:.3f}"]
        for view in sorted(policy_document(policy)["views"], key=lambda view: -view["weight"])
    ]
    words = "\n".join([*headline(policy), f"Against the identity view alone: {policy.guard.reason}."])
    text = f"{words}\n\n{talk.table(['view', 'weight', '5 %', '95 %'], rows)}\n\nwrote {out}"
    written = {"policy": str(out), "report": None if report is None else str(report)}
    talk.result({**policy_document(policy), "written": written}, text if report is None else f"{text} and {report}")
