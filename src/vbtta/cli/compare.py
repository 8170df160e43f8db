"""`vbtta compare`: the policy and all baselines, fitted on one sample and scored on another."""

__all__ = ["compare"]

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vbtta.cli import running


@running.command
def compare(
    predictions: running.PredictionsFile,
    labels: running.LabelsFile,
    test: Annotated[
        tuple[Path, Path], Option(metavar="PREDICTIONS LABELS", help="Predictions and labels to score on.")
    ],
    task: Annotated[
        running.Task | None, Option(help="What the labels are; by default classification where C > 1.")
    ] = None,
    methods: Annotated[str | None, Option(help="Names with commas between them; by default all.")] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Write the comparison (.json); an interrupted one goes on.")
    ] = None,
    resamples: Annotated[int, Option(min=1, help="Of the bootstrap.")] = 2000,
    columns_are_annotators: running.Annotators = False,
    seed: running.Seed = 0,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Compare the policy with no augmentation, plain averages and other ways to weight views.

    Example:

        vbtta compare preds.npz labels.csv --test test.npz test.csv --out comparison.json
    """
    talk = running.Talk(as_json, quiet)
    running.writable(out, ".json")
    from vbtta.cli.files import read_pair, read_predictions
    from vbtta.cli.parts import Parts, ScoredParts, fingerprint
    from vbtta.comparison import compare as run
    from vbtta.comparison import default_methods, entries
    from vbtta.report.documents import comparison_document

    several = read_predictions(predictions).outputs.shape[2] > 1
    kind = task.value if task is not None else "classification" if several else "regression"
    names = default_methods(kind) if methods is None else [name.strip() for name in methods.split(",")]
    try:
        entries(names, kind, seed)
    except ValueError as error:
        raise running.UsageError(f"--methods {methods}: {error}") from error
    pairs = [
        read_pair(*paths, kind, talk, columns_are_annotators=columns_are_annotators)
        for paths in ((predictions, labels), test)
    ]
    parts = Parts(out, fingerprint(kind, seed, *(part for pair in pairs for part in _content(*pair))))
    store = ScoredParts(parts, names)
    for place, name in enumerate(names, start=1):  # one at a time, to report progress
        talk.note(f"{name} ({place} of {len(names)})" + (": kept from before" if name in store else ""))
        if name not in store and not (name.startswith("original") and "identity" not in pairs[0][0].names):
            run(*pairs[0], *pairs[1], task=kind, methods=[name], resamples=1, seed=seed, store=store)
    outcome = run(*pairs[0], *pairs[1], task=kind, methods=names, resamples=resamples, seed=seed, store=store)
    document = comparison_document(outcome)
    if out is not None:
        running.write_json(out, document)
        parts.clear()
    text = "\n".join([comparison_table(document, talk), "", *comparison_sentences(document)])
    talk.result(document, text + ("" if out is None else f"\n\nwrote {out}"))


def comparison_table(document: dict[str, Any], talk: running.Talk) -> str:
    """The comparison as a table, the best log-likelihood first."""
    from vbtta.comparison import table_cells

    metrics = document["metrics"]
    return talk.table(*table_cells(document["methods"], metrics, metrics, document["references"].get("original")))


def comparison_sentences(document: dict[str, Any]) -> list[str]:
    """The size of the test set, the notes, and the gain in words."""
    from vbtta.comparison import closing_sentences
    from vbtta.report.documents import gain_in_words

    closing = closing_sentences(document["n_labels"], document["n_instances"], document["notes"])
    return [*closing, *gain_in_words(document)]


def _content(views: Any, labels: Any) -> list[Any]:
    """The data that a comparison depends on."""
    arrays = [views.outputs, labels.instance, labels.value, labels.count]
    arrays += [array for array in (views.variance, labels.annotator, views.classes) if array is not None]
    return [views.names, labels.annotator_names, *arrays]
