"""Human label noise: the default policy on CIFAR-10N against the margins it promises.

    python -m benchmarks.cifar10n --data DATA             # on the test part, with clean labels
    python -m benchmarks.cifar10n --part dev              # on the development part, where choices are made

1,000 calibration images with three human labels each, nothing else that is true; shares networks, predictions and
finished cells with the quality benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Task, data_hashes, load_task, run_cells, tasks
from benchmarks.pooled import Pooled, pool
from reproduction.provenance import provenance
from vbtta._support.files import atomic_path
from vbtta.distributions import CategoricalPrediction
from vbtta.fit import fit_policy
from vbtta.models.parts.label_noise import AnnotatorAccuracy

__all__ = ["main", "run"]

_NAME = "cifar10n-pretrained"
RIVALS = ("aug_tta", "class_tta", "greedy", "original+t")
_METHODS = ("original", "uniform", *RIVALS, "greedy+t", "vbtta", "vbtta-mixture", "vbtta-latent")


def run(
    quick: bool = False,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    part: str = "test",
    data: str | None = None,
    cache: str = ".cache",
    only_ready: bool = False,
) -> dict[str, Any]:
    """The margins and what was found; options as in :func:`benchmarks.quality.run`."""
    folder = data or os.environ.get("VBTTA_DATA")
    if not folder or not Path(folder).is_dir():
        return {"skipped": "no data folder: pass --data or set VBTTA_DATA"}
    ready = [seed for _, seed in tasks([_NAME], seeds[:1] if quick else seeds, cache, only_ready=only_ready or quick)]
    if not ready:
        return {"skipped": "no network is trained yet; run python -m benchmarks.train_models cifar10n-pretrained first"}
    cells, ids, labels = {}, {}, []
    for seed in ready:
        task = load_task(_NAME, seed, folder, cache, part=part, quick=quick)
        cells[seed] = run_cells(task, _METHODS, cache, part=part)
        ids[seed] = task.test.ids if task.test.ids is not None else np.arange(len(task.test))
        labels.append({"seed": seed, **label_quality(task)})
    pooled = pool("classification", cells, ids)
    return {
        "part": part,
        "provenance": provenance(),
        "seeds": ready,
        "margins": margins(pooled, labels),
        "methods": _rows(pooled, cells),
        "labels": labels,
        "data_sha256": {seed: data_hashes(_NAME, seed, cache) for seed in ready},
    }


def label_quality(task: Task) -> dict[str, float]:
    """How right the consensus and the majority of the labels are, and how right the annotators are thought to be."""
    policy = fit_policy(task.calibration, task.labels, task=task.kind, seed=task.seed)
    given = task.labels.value.reshape(len(task.truth), -1)  # (N, 3)
    votes = np.stack([(given == c).sum(axis=1) for c in range(task.calibration.outputs.shape[2])], axis=1)
    most = votes == votes.max(axis=1, keepdims=True)
    consensus = policy.consensus(task.calibration, task.labels)
    assert isinstance(consensus, CategoricalPrediction)
    assert isinstance(policy.annotators, AnnotatorAccuracy)
    return {
        "consensus": float(np.mean(consensus.proba.argmax(axis=1) == task.truth)),
        "majority": float(np.mean(most[np.arange(len(most)), task.truth] / most.sum(axis=1))),  # ties at random
        "annotators_estimated": float(np.mean(policy.annotators.accuracy)),
        "annotators_true": float(np.mean(given == task.truth[:, None])),
    }


def margins(pooled: Pooled, labels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The promises, each with whether it is kept and by how much."""
    value = {
        (m, s): float(pooled.values[i, j]) for i, m in enumerate(pooled.methods) for j, s in enumerate(pooled.metrics)
    }
    best = min(RIVALS, key=lambda rival: value[rival, "nll"])
    sharpest = max(RIVALS, key=lambda rival: value[rival, "accuracy"])
    below = 1 - value["vbtta", "nll"] / value[best, "nll"]
    difference, low, high = pooled.difference("vbtta", sharpest, "accuracy")
    gain = float(np.mean([row["consensus"] - row["majority"] for row in labels]))
    off = max(abs(row["annotators_estimated"] - row["annotators_true"]) for row in labels)
    return [
        _margin(
            "NLL at least 10 % below the best of AugTTA, ClassTTA, greedy and temperature-scaled identity",
            below >= 0.1,
            f"{value['vbtta', 'nll']:.4f}, {100 * below:.1f} % below {best}'s {value[best, 'nll']:.4f}",
        ),
        _margin("calibration error below 2 %", value["vbtta", "ece"] < 0.02, f"{100 * value['vbtta', 'ece']:.2f} %"),
        _margin(
            "accuracy no worse than theirs beyond the paired 95 % interval",
            high >= 0,
            f"minus {sharpest}: {100 * difference:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}]",
        ),
        _margin(
            "consensus labels at least 2.5 points above the majority vote", gain >= 0.025, f"{100 * gain:+.2f} points"
        ),
        _margin("estimated annotator accuracy within 0.02 of the truth", off <= 0.02, f"off by {off:.4f} at most"),
    ]


def _margin(claim: str, holds: bool, evidence: str) -> dict[str, Any]:
    return {"claim": claim, "holds": bool(holds), "evidence": evidence}


def _rows(pooled: Pooled, cells: dict[int, list[Cell]]) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "values": dict(zip(pooled.metrics, pooled.values[m].tolist(), strict=True)),
            "by_seed": [dict(zip(pooled.metrics, row.tolist(), strict=True)) for row in pooled.by_seed[:, m]],
            "minus_vbtta": {metric: pooled.difference(method, "vbtta", metric) for metric in pooled.metrics},
            "models": [methods[m].record.get("model") for methods in cells.values()],
        }
        for m, method in enumerate(pooled.methods)
    ]


def markdown(outcome: dict[str, Any]) -> str:
    """The outcome as a page."""
    made = outcome["provenance"]
    lines = [
        "# CIFAR-10N: three human labels an image",
        "",
        f"Pretrained networks, fine-tuned on noisy labels (seeds {', '.join(map(str, outcome['seeds']))}), 25 views, "
        f"1,000 calibration images with three human labels; scored on the {outcome['part']} part against clean labels. "
        "Means over seeds, paired 95 % bootstrap intervals over images.",
        "",
        *(f"* {'yes' if row['holds'] else '**no**'}: {row['claim']} ({row['evidence']})" for row in outcome["margins"]),
        "",
        "| method | accuracy (%) | NLL | Brier | ECE (%) | NLL minus vbtta |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in outcome["methods"]:
        value, (change, low, high) = row["values"], row["minus_vbtta"]["nll"]
        lines.append(
            f"| {row['method']} | {100 * value['accuracy']:.2f} | {value['nll']:.4f} | {value['brier']:.4f} | "
            f"{100 * value['ece']:.2f} | {change:+.4f} [{low:+.4f}, {high:+.4f}] |"
        )
    lines += [
        "",
        "| seed | consensus (%) | majority (%) | annotators, estimated | annotators, true |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['seed']} | {100 * row['consensus']:.2f} | {100 * row['majority']:.2f} | "
        f"{row['annotators_estimated']:.4f} | {row['annotators_true']:.4f} |"
        for row in outcome["labels"]
    ]
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    lines += ["", f"Made at {made['time']} from commit {made['git'][:12]} with {versions}."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="The default policy on CIFAR-10N against its margins.")
    parser.add_argument("--data", default=os.environ.get("VBTTA_DATA"), help="folder of the data sets (VBTTA_DATA)")
    parser.add_argument("--cache", default=".cache", help="folder for networks, predictions and finished cells")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--part", choices=["test", "dev"], default="test")
    parser.add_argument("--out", help="folder for the outcome; by default results/cifar10n, nothing for dev")
    parser.add_argument("--only-ready", action="store_true", help="leave out what is not trained yet")
    options = parser.parse_args(arguments)
    outcome = run(
        seeds=options.seeds,
        part=options.part,
        data=options.data,
        cache=options.cache,
        only_ready=options.only_ready,
    )
    if "skipped" in outcome:
        print(outcome["skipped"], file=sys.stderr)
        return 1
    out = options.out or ("results/cifar10n" if options.part == "test" else None)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        texts = {"results.json": json.dumps(outcome, indent=1) + "\n", "README.md": markdown(outcome)}
        for name, text in texts.items():
            with atomic_path(Path(out) / name) as temporary:
                temporary.write_text(text)
    print(markdown(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
