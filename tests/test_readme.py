"""The README's code runs, and prints what it says."""

import importlib.util
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from vbtta import ViewPredictions
from vbtta.augment import Rotate

ROOT = Path(__file__).parents[1]


def test_the_code_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("readme_pages", ROOT / "docs" / "_site" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    _write_files(tmp_path)
    steps = pages.run(ROOT / "README.md", tmp_path, variables=_what_a_reader_has())
    assert [step.language for step in steps] == ["python", "bash"]
    assert pages.difference(steps[0]) is None
    made = ("policy.json", "report.html", "predictions.parquet")
    assert [name for name in made if (tmp_path / name).stat().st_size == 0] == []


def test_losses_of_few_labels_are_those_of_the_worst_sample_size() -> None:
    rows = json.loads((ROOT / "results" / "small" / "rows.json").read_text(encoding="utf-8"))["rows"]
    largest = {"classification": 0.0, "regression": 0.0}
    cells = groupby(sorted(rows, key=_cell), key=_cell)
    for (task, *_, size), cell in cells:
        loss = float(np.mean([row["default"]["error"] - row["raw"]["error"] for row in cell]))
        largest[task] = max(largest[task], loss if size <= 50 else 0.0)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{largest['classification']:.2f} points of accuracy and {largest['regression']:.2f} years" in text


def _cell(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["task"], row["data"], row["labels"], row["size"]


def _what_a_reader_has() -> dict[str, Any]:
    """A network that was trained on upright digits, and tilted ones with labels."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    images = nn.functional.interpolate(images, size=16, mode="bilinear")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(72, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[:600]), torch.tensor(digits.target[:600])).backward()
        optimizer.step()
    tilted = Rotate(12.0)(images[600:1000])
    return {"network": network, "images": tilted, "answers": digits.target[600:1000]}


def _write_files(folder: Path) -> None:
    """What the README says that the commands read."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=100)
    logits = rng.normal(size=(100, 2, 3)) + 2 * np.eye(3)[truth][:, None]
    for name, rows in (("preds.npz", slice(0, 80)), ("new_preds.npz", slice(80, 100))):
        ViewPredictions(logits[rows], names=["identity", "flip"]).save(folder / name)
    lines = [f"{row},{who},{truth[row]}" for row in range(80) for who in ("ann", "bob")]
    (folder / "labels.csv").write_text("\n".join(["instance,annotator,label", *lines, ""]), encoding="utf-8")
