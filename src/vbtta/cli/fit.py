"""`vbtta fit`: predictions and labels in, a policy out."""

__all__ = ["fit"]

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vbtta.cli import running
from vbtta.cli.running import UsageError


@running.command
def fit(
    predictions: running.PredictionsFile,
    labels: running.LabelsFile,
    task: Annotated[running.Task, Option(help="What the labels are.")],
    out: Annotated[Path, Option("--out", "-o", help="Where to write the policy (.json).")],
    report: Annotated[Path | None, Option(help="Write a page about the policy (.html) too.")] = None,
    model: Annotated[
        running.Model, Option(help="What is assumed; auto compares held-out scores.")
    ] = running.Model.auto,
    engine: Annotated[running.Engine, Option(help="How it is inferred.")] = running.Engine.auto,
    guard: Annotated[bool, Option(help="Fall back to the identity view where the views are worse.")] = True,
    budget: Annotated[int | None, Option(min=1, help="Use at most so many views, the best ones.")] = None,
    columns_are_annotators: running.Annotators = False,
    seed: running.Seed = 0,
    backend: running.BackendOption = running.Backend.local,
    workers: running.Workers = None,
    address: running.Address = None,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Infer how much weight each view deserves from predictions and labels.

    Example:

        vbtta fit preds.npz labels.csv --task classification --out policy.json --report report.html
    """
    talk = running.Talk(as_json, quiet)
    running.writable(out, ".json")
    running.writable(report, ".html")
    options: dict[str, Any] = {"task": task.value, "model": model.value, "guard": guard, "seed": seed}
    if backend is running.Backend.ray:
        if budget is not None or engine is running.Engine.advi or report is not None:
            raise UsageError(
                "--budget, --engine advi and --report need all data in memory; leave them out, or use --backend local"
            )
        where = {"workers": workers, "address": address, "columns_are_annotators": columns_are_annotators}
        policy = _on_cluster(predictions, labels, talk, {**options, **where})
        policy.save(out)
        return _show(talk, policy, out, None)
    from vbtta.cli.files import digest, read_pair
    from vbtta.fit import fit_policy
    from vbtta.report.documents import provenance
    from vbtta.report.html import write_report
    from vbtta.select import select_views

    views, sets = read_pair(predictions, labels, task.value, talk, columns_are_annotators=columns_are_annotators)
    if budget is not None and engine is running.Engine.advi:
        raise UsageError("--budget compares many fits, which ADVI is too slow for; leave out --engine advi")
    talk.note("fitting ...")
    chosen = {**options, "engine": engine.value} | ({} if budget is None else {"budget": budget})
    policy = (fit_policy if budget is None else select_views)(views, sets, **chosen)
    policy.save(out)
    if report is not None:
        files = {path.name: digest(path) for path in (predictions, labels)}
        recorded = {"model asked for" if key == "model" else key: value for key, value in options.items()}
        write_report(report, policy, predictions=views, labels=sets, circumstances=provenance(policy, files, recorded))
    return _show(talk, policy, out, report)


def _on_cluster(predictions: Path, labels: Path, talk: running.Talk, options: dict[str, Any]) -> Any:
    """The fit by Ray; labels in parquet files are read by the workers."""
    from vbtta.cli.files import read_labels
    from vbtta.ray import fit_policy

    for path, content in ((predictions, "predictions"), (labels, "labels")):
        if not path.exists():
            raise UsageError(f"{path}: no such file; give the path of the {content} (.parquet, or a folder of them)")
    in_parquet = labels.is_dir() or labels.suffix == ".parquet"
    named = options["columns_are_annotators"]
    given = labels if in_parquet else read_labels(labels, columns_are_annotators=named).sets
    talk.note("fitting ...")
    return fit_policy(predictions, given, **options)


def _show(talk: running.Talk, policy: Any, out: Path, report: Path | None) -> None:
    """Print the policy: sentences and a table of the weights."""
    from vbtta.report.documents import headline, policy_document

    document = policy_document(policy)
    views = sorted(document["views"], key=lambda view: -view["weight"])
    rows = [[view["name"], *(f"{view[key]:.3f}" for key in ("weight", "low", "high"))] for view in views]
    table = talk.table(["view", "weight", "5 %", "95 %"], rows)
    text = "\n".join([*headline(policy), "", table, "", f"wrote {out}"])
    written = {"policy": str(out), "report": None if report is None else str(report)}
    talk.result({**document, "written": written}, text if report is None else f"{text} and {report}")
