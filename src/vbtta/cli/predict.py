"""`vbtta predict`: a policy and the views of new inputs in, one prediction an input out."""

__all__ = ["predict"]

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vbtta.cli import running


@running.command
def predict(
    predictions: running.PredictionsFile,
    policy: running.PolicyFile,
    out: Annotated[Path, Option("--out", "-o", help="Where to write the predictions (.parquet or .csv).")],
    level: Annotated[float, Option(min=0.01, max=0.999, help="Of the intervals of numbers.")] = 0.9,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Turn the views of new inputs into one predictive distribution each.

    Example:

        vbtta predict new_preds.npz --policy policy.json --out predictions.parquet
    """
    talk = running.Talk(as_json, quiet)
    running.writable(out, ".parquet", ".csv")
    from vbtta.cli.files import read_predictions
    from vbtta.policy import Policy

    views = read_predictions(predictions)
    rule = Policy.load(running.existing(policy, "a policy (.json)"))
    try:
        table = _columns(rule.predict(views), views.ids, level)
    except ValueError as error:
        raise ValueError(f"{policy} does not fit {predictions}: {error}") from error
    running.write_table(out, table)
    columns = ", ".join(list(table)[:6]) + (", ..." if len(table) > 6 else "")
    document = {"written": str(out), "rows": len(views), "columns": list(table)}
    talk.result(document, f"wrote {len(views):,} predictions to {out}: {columns}")


def _columns(prediction: Any, ids: Any, level: float) -> dict[str, Any]:
    """Columns of the output, one row an input."""
    import numpy as np

    from vbtta.distributions import CategoricalPrediction

    if isinstance(prediction, CategoricalPrediction):
        proba = prediction.proba
        table = {"instance": np.arange(len(proba)) if ids is None else ids, "label": prediction.label}
        table |= {f"proba_{name}": proba[:, c] for c, name in enumerate(prediction.classes)}
        return {**table, "entropy": prediction.entropy, "mutual_information": prediction.mutual_information}
    lower, upper = prediction.interval(level)
    table = {"instance": np.arange(len(lower)) if ids is None else ids}
    for c in range(lower.shape[1]):
        end = "" if lower.shape[1] == 1 else f"_{c + 1}"
        table |= {f"mean{end}": prediction.mean[:, c], f"std{end}": np.sqrt(prediction.variance[:, c])}
        table |= {f"lower{end}": lower[:, c], f"upper{end}": upper[:, c]}
    return table
