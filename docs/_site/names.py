"""Names in docstrings, as :func:`name`, must be those of something: a misspelt one fails the build."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

SOURCE = Path(__file__).resolve().parents[2] / "src"
_ROLE = re.compile(r":[a-z]+:`~?([^`<]+)`")


def on_config(config: Any) -> Any:
    """Before anything is built."""
    check_roles(SOURCE)
    return config


def check_roles(source: Path) -> None:
    """Fail where a docstring's role leads nowhere."""
    trees = {
        _module(path, source): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))
    }
    known = {name for module, tree in trees.items() for name in (module, *_names(tree, module))}
    known |= {".".join(name.split(".")[-2:]) for name in known}  # Class.method, wherever the class is imported from
    wrong = [
        f"{place} says {target}"
        for module, tree in trees.items()
        for place, target in _targets(tree, module)
        if not known & {target, *(f"{around}.{target}" for around in _around(place))}
    ]
    if wrong:
        raise PluginError(f"no such name: {'; '.join(wrong)}")


def _module(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _around(place: str) -> list[str]:
    """A place, its class, module and packages."""
    parts = place.split(".")
    return [".".join(parts[:size]) for size in range(1, len(parts) + 1)]


def _names(node: ast.AST, place: str) -> Iterator[str]:
    """What is defined or imported in a module or class, by its full name."""
    for part in getattr(node, "body", ()):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            yield f"{place}.{part.name}"
            if isinstance(part, ast.ClassDef):
                yield from _names(part, f"{place}.{part.name}")
        elif isinstance(part, ast.ImportFrom | ast.Import):
            yield from (f"{place}.{alias.asname or alias.name}" for alias in part.names)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name) and target.id == "__all__":  # also what loads on first use
                    yield from (f"{place}.{name}" for name in ast.literal_eval(part.value or ast.List([])))
                elif isinstance(target, ast.Name):
                    yield f"{place}.{target.id}"


def _targets(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """Where a docstring has a role, and of what."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        for target in _ROLE.findall(ast.get_docstring(node) or ""):
            yield place, target
    for part in getattr(node, "body", ()):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            yield from _targets(part, f"{place}.{part.name}")
