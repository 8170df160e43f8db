"""Docstrings say :func:`name` and {"a", "b"}; the site shows the name as code and the choices in words."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|meth|class|mod|attr):`~?([^`<]+)`")
_CHOICE = re.compile(r"^(\s*\w+ : )\{([^}\n]+)\}", flags=re.MULTILINE)  # the first would be taken for the default


class Roles(griffe.Extension):
    """Rewrites docstrings when they are loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _CHOICE.sub(lambda found: found[1] + found[2].replace(", ", " or "), text)
