"""What all commands share: options, the way they talk, and the way they fail."""

__all__ = [
    "Debug",
    "Json",
    "Quiet",
    "Talk",
    "UsageError",
    "as_json_text",
    "command",
    "complain",
    "existing",
    "writable",
]

import functools
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_RESUMED = ("compare", "views")  # keep what they finished, where they have somewhere to write

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on the error stream but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class UsageError(Exception):
    """The command was called in a wrong way: exit code 2."""


class Talk:
    """Results go to standard output, everything else to the error stream.

    Parameters
    ----------
    as_json : bool
        Whether the result is printed as one JSON document instead of text.
    quiet : bool
        Whether remarks are left out.
    """

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet

    @property
    def progress(self) -> bool:
        """Whether somebody looks at the error stream."""
        return not self.quiet and sys.stderr.isatty()

    def note(self, text: str) -> None:
        """Write a remark to the error stream."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def result(self, document: dict[str, Any], text: str = "") -> None:
        """Print the result: the document with --json, else the text."""
        print(as_json_text(document) if self.as_json else text.rstrip("\n"))

    def track(self, items: Sequence[Any], what: str) -> Any:
        """Iterate with a progress bar on the error stream."""
        if not self.progress or len(items) < 2:
            return iter(items)
        from rich.console import Console
        from rich.progress import track

        return track(items, description=what, console=Console(stderr=True), transient=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """A table for the terminal; the first column is text, the others are numbers."""
        from io import StringIO

        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for place, title in enumerate(header):
            table.add_column(Text(title), justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(_printable(cell)) for cell in row))
        stream = StringIO()
        Console(file=stream, width=1000, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: errors in one line, 2 for wrong use, 1 for failures; warnings in one line too."""

    @functools.wraps(function)
    def run(*args: Any, debug: bool = False, **options: Any) -> None:
        quiet = bool(options.get("quiet"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.showwarning = functools.partial(_show_warning, quiet)
                function(*args, debug=debug, **options)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            kept = "; what is finished is kept, the same command goes on from there"
            keeps = function.__name__ == "reproduce" or (
                function.__name__ in _RESUMED and options.get("out") is not None
            )
            complain(f"interrupted{kept if keeps else ''}")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of our output went away, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            complain(_message(error))
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None

    return run


def as_json_text(document: dict[str, Any]) -> str:
    """JSON, which knows no infinity: what is undefined is null."""
    return json.dumps(_finite(document), allow_nan=False, indent=2)


def complain(message: str) -> None:
    """One line on the error stream."""
    print(f"vbtta: error: {' '.join(_printable(message).split())}", file=sys.stderr, flush=True)


def existing(path: Path, what: str) -> Path:
    """A file that was named and must be there."""
    if not path.exists():
        raise UsageError(f"{path}: no such file; give the path of {what}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the path of {what}")
    return path


def writable(path: Path | None, *suffixes: str) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{path}: the name must end in {' or '.join(suffixes)}")
    folder = path.parent
    if not folder.is_dir():
        raise OSError(f"cannot write {path}: the folder {folder} does not exist; create it first")
    if path.is_dir():
        raise OSError(f"cannot write {path}: it is a folder; give the name of a file")
    if not os.access(folder, os.W_OK):
        raise OSError(f"cannot write {path}: no permission to write in {folder}; choose another folder")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer instances or views"
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    known = isinstance(error, UsageError | ValueError | TypeError | OSError | ImportError | KeyError)
    return text if known and text else f"{type(error).__name__}: {text}; --debug shows where"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show_warning(quiet: bool, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    if not quiet and issubclass(category, UserWarning):
        print(f"vbtta: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Text without control characters: names come from files, and a terminal obeys them."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
