"""The pages and examples of integrations run with the real packages, and print what they show."""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("integration_pages", ROOT / "docs" / "_site" / "pages.py")
assert spec is not None
assert spec.loader is not None
pages = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))

# What an example has computed, by the name of its file; each has fewer than 40 lines.
EXAMPLES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "timm_torchvision": lambda ran: ran["accuracy"]["views"] > max(0.9, ran["accuracy"]["network"] - 0.01),
    "huggingface_images": lambda ran: ran["accuracy"] > 0.9,
    "monai_volumes": lambda ran: ran["loss"]["views"] < ran["loss"]["network"] < 0.5,
    "nnunet": lambda ran: ran["loss"]["policy"] < ran["loss"]["mirroring"] + 0.02 < 0.5,
    "ray_predict": lambda ran: ran["accuracy"] > 0.9 and len(ran["policy"].used_names) > 1,
    "smp_segmentation": lambda ran: ran["dice"]["views"] > ran["dice"]["network"] > 0.5,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_run_and_print_what_they_show(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    problems = [
        problem for step in pages.run(page, tmp_path, strict=False) if (problem := pages.difference(step)) is not None
    ]
    assert not problems, "\n".join(problems)


def test_the_app_is_as_short_as_the_examples() -> None:
    lines = (ROOT / "examples" / "serve.py").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_do_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    assert EXAMPLES[name](runpy.run_path(str(path), run_name="__main__"))
