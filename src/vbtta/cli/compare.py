"""`vbtta compare`: the policy and all baselines, fitted on one sample and scored on another."""

__all__ = ["compare"]

from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.options import Annotators, LabelsFile, PredictionsFile, Seed, Task
from vbtta.cli.running import Debug, Json, Quiet, Talk, UsageError, as_json_text, command, writable


@command
def compare(
    predictions: PredictionsFile,
    labels: LabelsFile,
    test: Annotated[
        tuple[Path, Path],
        typer.Option("--test", metavar="PREDICTIONS LABELS", help="Predictions and labels to score on."),
    ],
    task: Annotated[
        Task | None, typer.Option("--task", help="What the labels are; by default classification where C > 1.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Names with commas between them; by default all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the comparison (.json); an interrupted one goes on.")
    ] = None,
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Of the bootstrap.")] = 2000,
    columns_are_annotators: Annotators = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare the policy with no augmentation, plain averages and other ways to weight views.

    Example:

        vbtta compare preds.npz labels.csv --test test.npz test.csv --out comparison.json
    """
    talk = Talk(as_json, quiet)
    writable(out, ".json")
    from vbtta.cli.files import read_pair, read_predictions
    from vbtta.cli.parts import Parts, ScoredParts, fingerprint
    from vbtta.comparison import compare as run
    from vbtta.comparison.methods import default_methods, entries
    from vbtta.report.documents import comparison_document

    kind = _task(read_predictions(predictions).mean.shape[2], task)
    names = default_methods(kind) if methods is None else [name.strip() for name in methods.split(",")]
    try:
        entries(names, kind, seed)
    except ValueError as error:
        raise UsageError(f"--methods {methods}: {error}") from error
    pairs = [
        read_pair(*paths, kind, talk, columns_are_annotators=columns_are_annotators)
        for paths in ((predictions, labels), test)
    ]
    key = fingerprint(kind, seed, *(part for pair in pairs for part in _content(*pair)))
    parts = Parts(out, key)
    store = ScoredParts(parts)
    for place, name in enumerate(names):  # one after the other, so that there is something to look at
        talk.note(f"{name} ({place + 1} of {len(names)})" + (": kept from before" if name in store else ""))
        if name not in store and not (name.startswith("original") and "identity" not in pairs[0][0].names):
            run(*pairs[0], *pairs[1], task=kind, methods=[name], resamples=1, seed=seed, store=store)
    outcome = run(*pairs[0], *pairs[1], task=kind, methods=names, resamples=resamples, seed=seed, store=store)
    document = comparison_document(outcome)
    if out is not None:
        write_json(out, document)
        parts.clear()
    talk.result(document, comparison_text(document, talk) + ("" if out is None else f"\n\nwrote {out}"))


def comparison_text(document: dict[str, Any], talk: Talk) -> str:
    """The comparison as a table and a few sentences, the best log-likelihood first."""
    from vbtta.report.words import gain_in_words

    metrics = document["metrics"]
    records = sorted(document["methods"], key=lambda record: (record["nll"] is None, record["nll"]))
    rows = [
        [
            record["method"],
            *("-" if record[metric] is None else f"{record[metric]:.4f}" for metric in metrics),
            _interval(record),
            str(record["views_used"]),
            f"{record['fit_seconds']:.2f}",
        ]
        for record in records
    ]
    table = talk.table(["method", *metrics, "NLL minus original", "views", "fit (s)"], rows)
    notes = [f"{note[0].upper()}{note[1:]}." for note in document["notes"]]
    size = f"{document['n_labels']:,g} labels of {document['n_instances']:,} test instances."
    return "\n".join([table, "", size, *notes, *gain_in_words(document)])


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document atomically."""
    from vbtta._support.files import atomic_path

    with atomic_path(path) as temporary:
        temporary.write_text(as_json_text(document) + "\n", encoding="utf-8")


def _interval(record: dict[str, Any]) -> str:
    value = record.get("nll_minus_original")
    if value is None or record["method"] == "original":
        return ""
    return f"{value:+.4f} [{record['nll_minus_original_low']:+.4f}, {record['nll_minus_original_high']:+.4f}]"


def _task(n_outputs: int, task: Task | None) -> str:
    if task is not None:
        return task.value
    return "classification" if n_outputs > 1 else "regression"


def _content(views: Any, labels: Any) -> list[Any]:
    """All that a comparison depends on."""
    arrays = [views.mean, labels.instance, labels.value, labels.count]
    arrays += [array for array in (views.variance, labels.annotator, views.classes) if array is not None]
    return [views.names, labels.annotator_names, *arrays]
