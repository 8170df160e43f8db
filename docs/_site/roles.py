"""Docstrings say :func:`name`; the site shows a link where the name is public and plain code elsewhere."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|meth|class|mod|attr):`~?([^`<]+)`")


class Roles(griffe.Extension):
    """Rewrites roles when a docstring is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
