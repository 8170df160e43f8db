"""What the site's build adds to the pages: results, the command line, bare names, and a check of the docstrings."""

from __future__ import annotations

import ast
import doctest
import html
import inspect
import json
import os
import posixpath
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
PUBLIC = ("vbtta", "vbtta.augment")  # whose names the reference must hold; others are there as whole modules
EXAMPLES = (*PUBLIC, "vbtta.metrics")  # and show by examples
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)]*)?\)")
_SHOWN = (".svg", ".png", ".json")  # what the site has of the results besides their pages
_SHIM = "assets/iframe-worker/shim.js"
_FETCHED = "https://unpkg.com/iframe-worker/shim"
_FLOORS = {3: "what people look at", 2: "models and inputs", 1: "the statistics"}
_NAMES = {
    "README.md": "Overview",
    "bench": "Speed",
    "cifar10n": "CIFAR-10N",
    "learning_curve": "Learning curve",
    "pretrained": "Pretrained networks",
    "quality": "Quality",
    "shift": "Distribution shift",
    "strong": "Pretrained networks, quality",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Hang the results that are there under their tab."""
    for entry in config.nav or []:
        if "Results" in entry:
            entry["Results"] = [{_title(path): path} for path in result_pages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results' pages, pictures and numbers."""
    check_reference(Path(config.docs_dir) / "reference")
    for name, text in result_pages().items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix in _SHOWN:
            files.append(File.generated(config, f"results/{path.relative_to(RESULTS)}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Draw the import order and list the commands where a page asks for it, and lead its links to the site's pages."""
    markdown = re.sub(r"<!-- .*IMPORT_ORDER -->\n", lambda _: import_order() + "\n", markdown)
    markdown = re.sub(r"<!-- .*COMMAND_LINE -->\n", lambda _: command_line(), markdown)
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, name: str) -> str:
    """A page's links to files of the repository lead to the results' pages, or are words where the site has none."""
    if name.startswith("results/"):
        return markdown

    def lead(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        there = (ROOT / "docs" / name).parent.joinpath(target).resolve()
        if not there.exists() or ROOT / "docs" in there.parents:
            return match[0]
        if RESULTS not in there.parents:
            return words
        short = posixpath.relpath(f"results/{there.relative_to(RESULTS)}", posixpath.dirname(name))
        return f"{picture}[{words}]({short}{anchor or ''})"

    return _LINK.sub(lead, markdown)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Search without a server needs a small script, which the theme would fetch: take the one that lies here."""
    return output.replace(_FETCHED, get_relative_url(_SHIM, page.url))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The page for what is not found can be shown at any address, where the script is not: it goes without."""
    return re.sub(rf'<script src="{re.escape(_FETCHED)}[^"]*"></script>', "", output_content)


# -- results ----------------------------------------------------------------------------------------------------------


def result_pages() -> dict[str, str]:
    """The pages of the results by their place in the site: every Markdown file there, the speed, and an overview."""
    pages = {f"results/{path.relative_to(RESULTS)}": _page(path) for path in sorted(RESULTS.rglob("*.md"))}
    if (RESULTS / "bench").is_dir() and "results/bench/README.md" not in pages:
        pages["results/bench/README.md"] = _speed(sorted((RESULTS / "bench").glob("*.json")))
    listed = "\n".join(f"- [{_heading(text)}]({name.removeprefix('results/')})" for name, text in pages.items())
    first = pages.pop("results/README.md", "# Results\n\nWhat was measured, by scripts that are part of the project.\n")
    more = [line for line in listed.splitlines() if "](README.md)" not in line and line.split("](")[1] not in first]
    if more:
        first += "\n## All pages\n\n" + "\n".join(more) + "\n"
    return {"results/README.md": first, **pages}


def _page(path: Path) -> str:
    """A page of the results with its figures; links to other files of the repository are words, dead ones an error."""

    def keep(match: re.Match[str]) -> str:
        _, words, target, _ = match.groups()
        there = (path.parent / target).resolve()
        if there.is_dir():
            there = there / "README.md"
            if there.is_file():
                return f"[{words}]({target.rstrip('/')}/README.md)"
        if not there.exists():
            raise PluginError(f"{path.relative_to(RESULTS.parent)} leads to {target}, which is not there")
        inside = RESULTS.resolve() in there.parents
        return match.group(0) if inside and there.suffix in (*_SHOWN, ".md") else words

    text = _LINK.sub(keep, path.read_text(encoding="utf-8"))
    figures = [] if path.parent == RESULTS else sorted(path.parent.glob("*.svg"))
    return text + "".join(f"\n![{figure.stem}]({figure.name})\n" for figure in figures if figure.name not in text)


def _heading(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), "Results")


def _title(path: str) -> str:
    parts = path.split("/")
    name = parts[-2] if len(parts) > 2 else parts[-1]
    return _NAMES.get(name) or re.sub(r"(?<=[a-z])(?=\d)", " ", name.replace("_", " ")).capitalize()


def _speed(paths: list[Path]) -> str:
    """Every benchmark's numbers, as they are in its file."""
    lines = [
        "# Speed",
        "",
        "Ratios within one run, so that another machine finds similar ones; a limit is what the project promises.",
    ]
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        made, where = record["provenance"], record["circumstances"]
        rows = [f"| {name} | {value} |" for name, value in _flat(record["outcome"])]
        lines += ["", f"## {record['benchmark']}", "", "| what | value |", "| --- | ---: |", *rows, ""]
        lines += [
            f"{where['seconds']:.0f} s on {where['cores']} cores, {made['machine']}, commit {made['git'][:12]}, "
            f"{made['time'][:10]}."
        ]
    return "\n".join(lines) + "\n"


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, part in value.items() for row in _flat(part, f"{name}, {key}" if name else str(key))]
    return [(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))]


# -- the import order -------------------------------------------------------------------------------------------------


def import_order() -> str:
    """The layers of pyproject.toml as a drawing, topmost first, with each module's first line."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [layer.strip("()") for layer in contract["contracts"][0]["layers"]]
    first, second = layers.index("diagnostics"), layers.index("ray") if "ray" in layers else layers.index("module")
    rows = []
    for place, layer in enumerate(layers):
        floor = 3 if place < second else 2 if place < first else 1
        path = ROOT / "src" / "vbtta" / layer.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if not source.is_file():
            continue
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        words = html.escape(text.partition("\n")[0].replace("`", ""))
        rows.append(f'<div class="floor floor-{floor}"><code>{layer}</code> <span>{words}</span></div>')
    key = "".join(f'<span class="floor floor-{n}">{text}</span>' for n, text in _FLOORS.items())
    return f'<div class="floors"><p>{key}</p>{"".join(rows)}</div>\n'


# -- the command line -------------------------------------------------------------------------------------------------


def command_line() -> str:
    """All commands with their options, from the application itself."""
    os.environ["COLUMNS"] = "200"
    main = import_module("typer.main")
    group = main.get_command(import_module("vbtta.cli.app").app)
    lines: list[str] = []
    for name, command in group.commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        words, _, example = inspect.cleandoc(command.help or "").partition("Example:")
        records = [record for part in command.params if (record := _record(part, context))]
        lines += ["", f"## vbtta {name}", "", words.strip()]
        if example.strip():
            lines += ["", "```", inspect.cleandoc(example).strip(), "```"]
        lines += ["", "| argument or option | meaning |", "| --- | --- |"]
        lines += [f"| {_code(left)} | {_cell(right)} |" for left, right in records]
    return "\n".join(lines) + "\n"


def _record(part: Any, context: Any) -> tuple[str, str] | None:
    record = part.get_help_record(context)
    if record is None and getattr(part, "param_type_name", "") == "argument":
        record = (part.metavar or part.name.upper(), part.help or "")
    return record


def _code(text: str) -> str:
    return f"<code>{html.escape(' '.join(text.split())).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


# -- the reference ----------------------------------------------------------------------------------------------------


def check_reference(folder: Path) -> None:
    """Fail where a public name is not on a page of the reference, or lacks a docstring or an example."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))
    shown = re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)
    wanted = [f"{module}.{name}" for module in PUBLIC for name in import_module(module).__all__]
    absent = sorted(set(wanted) - set(shown))
    if absent:
        raise PluginError(f"the reference lacks {', '.join(absent)}: add a line '::: {absent[0]}' in docs/reference")
    silent = [name for path in shown for name in undocumented(path)]
    if silent:
        raise PluginError(f"no docstring: {', '.join(silent)}")
    told = [f"{module}.{name}" for module in EXAMPLES for name in public_names(module)]
    used = used_names(text)
    untold = [name for name in told if not has_example(name) and name.rpartition(".")[2] not in used]
    if untold:
        raise PluginError(f"no example, in the docstring or the code of the reference: {', '.join(untold)}")


def public_names(module: str) -> list[str]:
    """What a module exports: its `__all__`, or else what it defines without an underscore."""
    contents = vars(import_module(module))
    own = [name for name, value in contents.items() if getattr(value, "__module__", "") == module and name[0] != "_"]
    return list(contents.get("__all__", own))


def used_names(text: str) -> set[str]:
    """What the Python code of pages uses; the tests run it. To import a name is not to use it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def has_example(path: str) -> bool:
    """Whether a docstring shows what a call returns, in a way that doctest runs; constants need none."""
    module, _, name = path.rpartition(".")
    thing = getattr(import_module(module), name)
    examples = doctest.DocTestParser().get_examples(thing.__doc__ or "")
    skipped = any(example.options.get(doctest.SKIP) for example in examples)
    return not callable(thing) or (not skipped and any(example.want or example.exc_msg for example in examples))


def undocumented(path: str) -> list[str]:
    """A name and its public methods and properties, where they have no docstring of their own."""
    try:
        whole = import_module(path)
        parts = [part for part in public_names(path) if callable(getattr(whole, part))]
        return [name for part in parts for name in undocumented(f"{path}.{part}")]
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
    thing = getattr(import_module(module), name)
    missing = [] if (thing.__doc__ or "").strip() else [path]
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            value = getattr(value, "__func__", value)
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                documented = inspect.getdoc(getattr(thing, member)) or f"{member} :" in (thing.__doc__ or "")
                if not documented:
                    missing.append(f"{path}.{member}")
    return missing
