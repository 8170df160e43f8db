"""Run the code of a page and compare what it prints with what the page shows.

    python docs/_site/pages.py docs/slips.md          # run, write the outputs into the page and its pictures beside it

A page's python and bash blocks run in order, in one namespace and one folder. A text block shows what the block before
it printed; numbers may differ in the last digits. Of bash only `vbtta` commands run, and of their output the words
count. A picture that the code saves as `name.svg` is what the page shows as `assets/pictures/name.svg`. Besides these
there are only installation commands, in sh blocks, and drawings, in blocks without a language.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import markdown

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "assets" / "pictures"
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_RUN = ("python", "bash")
_BY_HAND = ("pip install ", "git clone ", "cd ", "make ")  # commands that change the machine, in sh blocks
_ARROW = "──▶"  # of a drawing
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?")


class Step(NamedTuple):
    """One block that ran: its language, source, what it printed, and what the page shows (None where nothing)."""

    language: str
    source: str
    printed: str
    shown: str | None


def has_code(page: Path) -> bool:
    """Whether there is anything to run."""
    return any(match[1] in _RUN for match in _FENCE.finditer(page.read_text(encoding="utf-8")))


def not_run(text: str) -> list[str]:
    """The blocks of a page that are neither run, nor the output of one that is, nor of the excluded kinds."""
    blocks, before, end = [], "", 0
    for match in _FENCE.finditer(text):
        language, source = match[1], match[2]
        follows = before in _RUN and not text[end : match.start()].strip()
        allowed = (
            language in _RUN
            or (language == "text" and follows)
            or (language == "sh" and all(line.startswith(_BY_HAND) for line in source.splitlines()))
            or (language == "" and _ARROW in source)
            or (language == "diff" and source.startswith("diff --git"))  # the tests apply it
        )
        if not allowed:
            blocks.append(match[0])
        before, end = language, match.end()
    n_shown = len(re.findall("<pre>", markdown.markdown(text, extensions=["fenced_code"])))
    n_fences = len(list(_FENCE.finditer(text)))
    return blocks + [f"{n_shown - n_fences} indented blocks; use fences"] * (n_shown != n_fences)


def run(page: Path, folder: Path, *, strict: bool = True, variables: Mapping[str, Any] | None = None) -> list[Step]:
    """Run a page in a folder, with the names that the reader brings; where it is strict a warning is an error."""
    text = page.read_text(encoding="utf-8")
    fences = [(match[1], match[2]) for match in _FENCE.finditer(text)]
    lines = [text.count("\n", 0, match.start()) + 1 for match in _FENCE.finditer(text)]
    names: dict[str, Any] = {"__name__": "__main__", **(variables or {})}
    steps = []
    with _in(folder), warnings.catch_warnings():
        warnings.simplefilter("error" if strict else "ignore")
        for package in ("torch", "onnxscript", "copyreg", "ray"):  # their own, while a module is exported
            warnings.filterwarnings("ignore", module=package)
        for place, (language, source) in enumerate(fences):
            if language not in _RUN:
                continue
            following = fences[place + 1] if place + 1 < len(fences) else ("", "")
            shown = following[1] if following[0] == "text" else None
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if language == "python":
                    exec(compile("\n" * lines[place] + source, str(page), "exec"), names)  # tracebacks name the line
                else:
                    _commands(source)
            steps.append(Step(language, source, printed.getvalue(), shown))
    return steps


def difference(step: Step) -> str | None:
    """How what was printed differs from what the page shows; None where it does not."""
    if step.shown is None:
        return None if not step.printed else f"prints, but the page shows nothing: {step.printed!r}"
    printed, shown = (_normal(text) for text in (step.printed, step.shown))
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", shown):
        return f"printed\n{step.printed}\nbut the page shows\n{step.shown}"
    if step.language == "bash":  # seconds, and numbers that the library's own tests look after
        return None
    pairs = zip(*([float(n.replace(",", "")) for n in _NUMBER.findall(t)] for t in (printed, shown)), strict=True)
    far = [(a, b) for a, b in pairs if not math.isclose(a, b, rel_tol=0.05, abs_tol=0.02)]
    return f"printed {far[0][0]} where the page shows {far[0][1]}" if far else None


def _normal(text: str) -> str:
    """Words and numbers without the layout, which depends on the numbers' length."""
    return " ".join(re.sub(r"[─━┃│╭╮╰╯┏┓┗┛┡┩-]{2,}", "", text).split())


def _commands(source: str) -> None:
    from vbtta.cli.app import app

    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] != "vbtta":
            raise ValueError(f"only vbtta commands run here; got {line!r}. Mark other commands as sh")
        with contextlib.redirect_stderr(io.StringIO()) as complaints:
            try:
                app(words[1:], standalone_mode=True, prog_name="vbtta")
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"{line}: {complaints.getvalue()}") from end


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    """Write the outputs of pages into them, and their pictures beside them."""
    for page in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            steps = run(page.resolve(), Path(folder))
            text = page.read_text(encoding="utf-8")
            for step in steps:
                problem = difference(step)
                if problem is None:
                    continue
                fence = f"```{step.language}\n{step.source}```"
                if step.shown is None:
                    text = text.replace(fence, f"{fence}\n\n```text\n{step.printed.rstrip()}\n```", 1)
                else:
                    old = f"{fence}\n\n```text\n{step.shown}```"
                    assert old in text, "a text block follows its code after one empty line"
                    text = text.replace(old, f"{fence}\n\n```text\n{step.printed.rstrip()}\n```", 1)
                print(f"{page}: updated")
            page.write_text(text, encoding="utf-8")
            PICTURES.mkdir(parents=True, exist_ok=True)
            for picture in Path(folder).glob("*.svg"):
                shutil.copy(picture, PICTURES / picture.name)


if __name__ == "__main__":
    main()
