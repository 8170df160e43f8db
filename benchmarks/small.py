"""Small calibration samples: the default against the raw network and its own best member.

    python -m benchmarks.train_models cifar10n-light utkface-light mnist1000 food101-light --seeds 0 --data DATA
    python -m benchmarks.small --data DATA --cache .cache       # writes results/small

Networks are small ones, trained on a part of the images. Samples are drawn from the calibration part and scored on
the test part against clean labels. All cells get their first sample before any gets its second. Finished samples are
kept, so an interrupted run goes on where it stopped.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from benchmarks.learning_curve import drawn_labels
from benchmarks.train_models import Part, Prepared, is_ready, prepare
from reproduction.provenance import provenance
from vbtta._support.files import atomic_path
from vbtta.fit import fit_policy
from vbtta.models.base import models_of
from vbtta.policy import ConvergenceWarning, Policy

SIZES = (10, 25, 50, 100, 200, 500)
_SCORED = 5_000  # test inputs
_FRESH = 22  # part of the samples' seeds: defaults were chosen with other samples
_ALLOWED = {"classification": 0.2, "regression": 0.05}  # upper limits of the loss in error
_ERROR = {"classification": "error rate (%)", "regression": "absolute error (years)"}


def score_sample(prepared: Prepared, size: int, each: int, draw: int) -> dict[str, Any]:
    """Scores of the default, of its best member and of the raw network, fitted to one random sample."""
    source, target = prepared.parts["calibration"], prepared.parts["test"]
    columns = _people(prepared)
    if source.predictions.classes is not None:
        columns = np.asarray(source.predictions.classes)[columns]
    raw_model = models_of(prepared.task)["mixture"].raw_network()
    assert raw_model is not None
    rng = np.random.default_rng([_FRESH, size, each, draw])
    chosen = np.sort(rng.permutation(len(columns))[:size])
    labels = drawn_labels(columns[chosen], each, rng, people=prepared.task == "regression")
    sample = source.predictions.take(chosen)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        policy = fit_policy(sample, labels, task=prepared.task, seed=draw)
        seconds = time.process_time() - start
        raw = fit_policy(sample.select(["identity"]), labels, task=prepared.task, model=raw_model, guard=False)
    return {
        "data": prepared.name,
        "task": prepared.task,
        "size": size,
        "labels": each,
        "draw": draw,
        "seconds": round(seconds, 2),
        "default": _scores(policy, target),
        "raw": _scores(raw, target),
        "members": {_kind(member): _scores(member, target)["nll"] for member in policy.members},
    }


def _kind(member: Policy) -> str:
    """Which member it is, the same in every sample whatever its noise model."""
    if (member.fitted or member.names) == ("identity",):
        return "raw network"
    return f"{type(member.model).__name__} {getattr(member.model, 'weights', '')}".strip()


def _people(prepared: Prepared) -> np.ndarray:
    """All labels of the calibration part, (N, J)."""
    labels = prepared.parts["calibration"].labels
    return np.stack([labels[key] for key in sorted(labels) if key.startswith("label_")], axis=1)


def _scores(policy: Policy, target: Part) -> dict[str, float]:
    prediction: Any = policy.predict(target.predictions.take(slice(0, _SCORED)))
    truth = target.labels["clean"][:_SCORED]
    if policy.task == "classification":
        truth = truth if policy.classes is None else np.asarray(policy.classes)[truth]
        error = 100 * np.mean(prediction.label != truth)
    else:
        error = np.abs(prediction.mean[:, 0] - truth).mean()
    return {"nll": float(-prediction.log_prob(truth).mean()), "error": float(error)}


def markdown(document: dict[str, Any]) -> str:
    """Mean differences over the samples, with 95 % limits of the mean."""
    rows, made = document["rows"], document["provenance"]
    lines = [
        "# Small calibration samples",
        "",
        "The default policy minus the raw network (one temperature or scale under the same noise model) and minus its "
        "best member (of the best mean), means over random calibration samples with 95 % intervals. NLL "
        "in nats; negative is better. Networks of seed 0; scored on up to 5,000 test inputs with clean labels.",
        "",
        "| data | labels each | inputs | samples | NLL of raw | NLL minus raw | worst sample | NLL minus best member "
        "| error minus raw |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    missed: dict[str, list[str]] = {}
    keys = sorted({(row["data"], row["labels"], row["size"]) for row in rows})
    for data, labels, size in keys:
        cell = [row for row in rows if (row["data"], row["labels"], row["size"]) == (data, labels, size)]
        raw = np.array([row["raw"]["nll"] for row in cell])
        nll = np.array([row["default"]["nll"] for row in cell])
        gap = _behind_best_member(cell, nll)
        error = np.array([row["default"]["error"] - row["raw"]["error"] for row in cell])
        parts = [data, str(labels), str(size), str(len(cell)), f"{raw.mean():.3f}", _mean(nll - raw)]
        lines.append(f"| {' | '.join([*parts, f'{(nll - raw).max():+.3f}', _mean(gap), _mean(error)])} |")
        limit = error.mean() + _half_width(error)
        failures = {
            "NLL above the raw network's by more than 0.003": (nll - raw, (nll - raw).mean() > 0.003),
            "NLL above the best member's by more than 0.01": (gap, gap.mean() > 0.01),
            "upper limit of the error's loss above 0.2 points or 0.05 years": (
                error,
                limit > _ALLOWED[cell[0]["task"]],
            ),
        }
        for goal, (values, failed) in failures.items():
            two = ", ".join(f"{value:+.3f}" for value in np.sort(values)[:-3:-1])
            place = f"{data} {labels} x {size} ({_mean(values)}; the two largest {two})"
            missed.setdefault(goal, []).extend([place] * bool(failed))
    tasks = sorted({row["task"] for row in rows})
    lines += ["", "Errors: " + "; ".join(f"{task}, {_ERROR[task]}" for task in tasks) + ".", "", "Goals missed:", ""]
    lines += [f"- {goal}: {'; '.join(places) or 'nowhere'}" for goal, places in missed.items()]
    counts = [sum((row["data"], row["labels"], row["size"]) == key for row in rows) for key in keys]
    few = f" A cell has {min(counts)} to {max(counts)} samples of 20: with so few, limits can fail by width alone."
    lines += [
        "",
        "Samples are not those that defaults were chosen with. Fits took up to "
        f"{max(row['seconds'] for row in rows):.0f} processor seconds.{few if min(counts) < 20 else ''}",
        "",
        f"Made at {made['time']} from commit {made['git'][:12]}.",
    ]
    return "\n".join(lines) + "\n"


def _behind_best_member(cell: list[dict[str, Any]], nll: np.ndarray) -> np.ndarray:
    """The default's NLL minus that of one member, the same in all samples: the member of the best mean.

    The best member of each sample is known to an oracle only. Members of too little weight are dropped: a difference is
    over the samples of which a kind is a member, half of them or more.
    """
    kinds = sorted({kind for row in cell for kind in row["members"]})
    gaps = [
        np.array([own - row["members"][kind] for own, row in zip(nll, cell, strict=True) if kind in row["members"]])
        for kind in kinds
    ]
    return max((gap for gap in gaps if 2 * len(gap) >= len(cell)), key=np.mean)


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {_half_width(values):.3f}"


def _half_width(values: np.ndarray) -> float:
    n = len(values)
    return float(special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n)) if n > 1 else np.nan


def main() -> int:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description="The default on small calibration samples.")
    parser.add_argument("names", nargs="*", default=["cifar10n-light", "utkface-light", "mnist1000", "food101-light"])
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="networks and predictions of the quality benchmark")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/small"))
    options = parser.parse_args()
    path = options.out / "rows.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    made = provenance()
    if document.get("samples") != _FRESH or document["provenance"]["git"] != made["git"]:  # by other code
        document = {"samples": _FRESH, "provenance": made, "rows": []}
    done = {(row["data"], row["size"], row["labels"], row["draw"]) for row in document["rows"]}
    options.out.mkdir(parents=True, exist_ok=True)
    ready = [name for name in options.names if is_ready(name, 0, options.cache)]
    for name in sorted(set(options.names) - set(ready)):
        print(f"{name}: no network in {options.cache}; run benchmarks.train_models first", file=sys.stderr)
    for draw, size, name in itertools.product(range(options.draws), SIZES, ready):
        prepared = prepare(name, 0, options.data, options.cache)
        for each in sorted({1, _people(prepared).shape[1]}):
            if (name, size, each, draw) in done:
                continue
            document["rows"].append(score_sample(prepared, size, each, draw))
            for file, text in ((path, json.dumps(document)), (options.out / "README.md", markdown(document))):
                with atomic_path(file) as temporary:
                    temporary.write_text(text, encoding="utf-8")
            print(name, size, each, draw, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
