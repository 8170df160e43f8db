"""Docstrings say :func:`name`, {"a", "b"} and `a, b : float`; the site shows links, choices as words, a row each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|meth|class|mod|attr):`~?([^`<]+)`")
_CHOICE = re.compile(r"^(\s*\w+ : )\{([^}\n]+)\}", flags=re.MULTILINE)  # the first would be taken for the default
_SEVERAL = re.compile(r"^(\w+(?:, \w+)+)( : .*)?\n((?:    .*\n?|\n(?=    ))+)", flags=re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites docstrings when they are loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: _link(match[1]), obj.docstring.value)
            text = _CHOICE.sub(lambda match: match[1] + match[2].replace(", ", " or "), text)
            obj.docstring.value = _SEVERAL.sub(_one_each, text)


def _link(name: str) -> str:
    """A name as code, and as a link where the reference has it, there mostly by its short name."""
    for path in (name, f"vbtta.{name}", f"vbtta.{name.rpartition('.')[2]}"):
        if path in _reference() or path.rpartition(".")[0] in _reference():
            return f"[`{name}`][{path}]"
    return f"`{name}`"


@cache
def _reference() -> frozenset[str]:
    """Functions and classes on the pages of the reference."""
    pages = sorted((Path(__file__).parents[1] / "reference").glob("*.md"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    return frozenset(re.findall(r"^::: (\S+)", text, flags=re.MULTILINE))


def _one_each(match: re.Match[str]) -> str:
    """Parameters described together, one by one: together all would be shown with the default of the first."""
    description, after = match[3].rstrip("\n"), "\n" * match[3].endswith("\n\n")
    return "".join(f"{name}{match[2] or ''}\n{description}\n" for name in match[1].split(", ")) + after
