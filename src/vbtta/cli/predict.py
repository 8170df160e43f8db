"""`vbtta predict`: a policy and the views of new inputs in, one prediction an input out."""

__all__ = ["predict"]

from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.options import PredictionsFile
from vbtta.cli.running import Debug, Json, Quiet, Talk, command, existing, writable


@command
def predict(
    predictions: PredictionsFile,
    policy: Annotated[Path, typer.Option("--policy", "-p", help="The policy (.json) that vbtta fit wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the predictions (.parquet or .csv).")],
    level: Annotated[float, typer.Option("--level", min=0.01, max=0.999, help="Of the intervals of numbers.")] = 0.9,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Turn the views of new inputs into one predictive distribution each.

    Example:

        vbtta predict new_preds.npz --policy policy.json --out predictions.parquet
    """
    talk = Talk(as_json, quiet)
    writable(out, ".parquet", ".csv")
    from vbtta.cli.files import read_predictions
    from vbtta.policy import Policy

    views = read_predictions(predictions)
    rule = Policy.load(existing(policy, "a policy (.json)"))
    try:
        found = rule.predict(views)
    except ValueError as error:
        raise ValueError(f"{policy} does not fit {predictions}: {error}") from error
    table = _table(found, views.ids, level)
    _write(table, out)
    n_rows, columns = len(views), ", ".join(list(table)[:6]) + (", ..." if len(table) > 6 else "")
    document = {"written": str(out), "rows": n_rows, "columns": list(table)}
    talk.result(document, f"wrote {n_rows:,} predictions to {out}: {columns}")


def _table(found: Any, ids: Any, level: float) -> dict[str, Any]:
    """Columns of the output, one row an input."""
    import numpy as np

    from vbtta.predictions import CategoricalPrediction

    if isinstance(found, CategoricalPrediction):
        table = {"instance": np.arange(len(found.proba)) if ids is None else ids, "label": found.label}
        table |= {f"proba_{name}": found.proba[:, c] for c, name in enumerate(found.classes)}
        return {**table, "entropy": found.entropy, "mutual_information": found.mutual_information}
    lower, upper = found.interval(level)
    table = {"instance": np.arange(len(lower)) if ids is None else ids}
    for c in range(lower.shape[1]):
        end = "" if lower.shape[1] == 1 else f"_{c + 1}"
        table |= {f"mean{end}": found.mean[:, c], f"std{end}": np.sqrt(found.variance[:, c])}
        table |= {f"lower{end}": lower[:, c], f"upper{end}": upper[:, c]}
    return table


def _write(table: dict[str, Any], out: Path) -> None:
    from vbtta._support.extras import require
    from vbtta._support.files import atomic_path

    with atomic_path(out) as temporary:
        if out.suffix == ".parquet":
            columns = require("pyarrow", "cli").table(table)
            require("pyarrow.parquet", "cli").write_table(columns, temporary)
            return
        import csv

        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table)
            writer.writerows(zip(*(column.tolist() for column in table.values()), strict=True))
