"""The README's code runs, and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_code_runs_and_prints_what_it_says() -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    number = r"\d+\.\d+"
    assert re.sub(number, "#", printed.getvalue()) == re.sub(number, "#", "".join(shown))
    found, said = ([float(x) for x in re.findall(number, t)] for t in (printed.getvalue(), "".join(shown)))
    assert found == pytest.approx(said, abs=0.01)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
