"""The README's code runs, and prints what it says."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

from vbtta import ViewPredictions

ROOT = Path(__file__).parents[1]


def test_the_code_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("readme_pages", ROOT / "docs" / "_site" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    _write_files(tmp_path)
    steps = pages.run(ROOT / "README.md", tmp_path)
    assert [step.language for step in steps] == ["python", "python", "bash"]
    problems = [problem for step in steps[:2] if (problem := pages.difference(step)) is not None]
    assert not problems, "\n".join(problems)
    made = ("policy.json", "report.html", "predictions.parquet")
    assert [name for name in made if (tmp_path / name).stat().st_size == 0] == []


def _write_files(folder: Path) -> None:
    """What the README says that the commands read."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=100)
    logits = rng.normal(size=(100, 2, 3)) + 2 * np.eye(3)[truth][:, None]
    for name, rows in (("preds.npz", slice(0, 80)), ("new_preds.npz", slice(80, 100))):
        ViewPredictions(logits[rows], names=["identity", "flip"]).save(folder / name)
    lines = [f"{row},{who},{truth[row]}" for row in range(80) for who in ("ann", "bob")]
    (folder / "labels.csv").write_text("\n".join(["instance,annotator,label", *lines, ""]), encoding="utf-8")
