"""`vbtta diagnose`: whether a policy's assumptions are met, and whether new inputs still look as before."""

__all__ = ["diagnose"]

from pathlib import Path
from typing import Annotated

from typer import Option

from vbtta.cli import running


@running.command
def diagnose(
    predictions: running.PredictionsFile,
    policy: running.PolicyFile,
    labels: Annotated[
        Path | None, Option(help="Labels of the predictions, for more checks (.csv or .parquet).")
    ] = None,
    incoming: Annotated[Path | None, Option(help="Predictions for new inputs, to be compared with the others.")] = None,
    refit: Annotated[bool, Option(help="Fit again without each view and under other priors.")] = True,
    out: Annotated[Path | None, Option("--out", "-o", help="Write the findings (.json).")] = None,
    columns_are_annotators: running.Annotators = False,
    seed: running.Seed = 0,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Check a policy's assumptions on the predictions it was fitted to.

    Example:

        vbtta diagnose preds.npz --policy policy.json --labels labels.csv
    """
    talk = running.Talk(as_json, quiet)
    running.writable(out, ".json")
    from vbtta.cli.files import read_pair, read_predictions
    from vbtta.diagnostics import diagnose as check
    from vbtta.policy import Policy
    from vbtta.report.documents import diagnosis_document

    rule = Policy.load(running.existing(policy, "a policy (.json)"))
    if labels is None:
        views, sets = read_predictions(predictions), None
    else:
        views, sets = read_pair(predictions, labels, rule.task, talk, columns_are_annotators=columns_are_annotators)
    new = None if incoming is None else read_predictions(incoming)
    for path, part in ((predictions, views), (incoming, new)):
        try:
            if part is not None:
                rule.predict(part.take(slice(0, 1)))
        except ValueError as error:
            raise ValueError(f"{policy} does not fit {path}: {error}") from error
    talk.note("checking ...")
    diagnosis = check(rule, views, sets, incoming=new, refit=refit, seed=seed)
    document = diagnosis_document(diagnosis)
    if out is not None:
        running.write_json(out, document)
    talk.result(document, diagnosis.summary() + ("" if out is None else f"\n\nwrote {out}"))
