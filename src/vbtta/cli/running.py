"""Shared by all commands: options, output, files to write, and errors."""

import functools
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from vbtta._support.checks import printable
from vbtta._support.files import atomic_path, checked_target, finite
from vbtta._support.tensors import Progress

Task = StrEnum("Task", ["classification", "regression", "multilabel"])
Model = StrEnum("Model", ["auto", "mixture", "latent"])
Engine = StrEnum("Engine", ["auto", "em", "advi"])
Backend = StrEnum("Backend", ["local", "ray"])

_PREDICTIONS = "Predictions under all views: .npz, .parquet, or a folder that --backend ray wrote."
_LABELS = "Labels: .csv or .parquet, wide (label_1, label_2, ...) or long (instance, annotator, label)."
_SETS = "Write sets of classes, or intervals, that cover with this probability."
Out = functools.partial(Option, "--out", "-o")
PredictionsFile = Annotated[Path, Argument(metavar="PREDICTIONS", help=_PREDICTIONS)]
LabelsFile = Annotated[Path, Argument(metavar="LABELS", help=_LABELS)]
Pair = functools.partial(Option, metavar="PREDICTIONS LABELS")
PolicyFile = Annotated[Path, Option("--policy", "-p", help="The policy (.json) that vbtta fit wrote.")]
Predictor = functools.partial(Option, metavar="PACKAGE.MODULE:FACTORY")
Described = functools.partial(Option, "--views")
Sets = Annotated[list[float] | None, Option(min=0.01, max=0.999, help=_SETS)]
Seed = Annotated[int, Option(min=0, help="Decides draws, folds and the bootstrap.")]
BackendOption = Annotated[Backend, Option(help="Where the work is done: in this process, or by Ray on a cluster.")]
Workers = Annotated[int | None, Option(min=1, help="Workers of --backend ray; by default one a core.")]
Address = Annotated[str | None, Option(help="Of the Ray cluster; by default the one here, else a new one.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Say nothing on the error stream but errors.")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]


_REMEDIES = {  # in Python, and here
    "guard='hard'": "--hard-guard",
    "give both ids (an index, a column 'id', ids=; several labels an input also classes=), or pair by row: "
    "labels.to_numpy(), or row numbers in a column 'instance'": "give labels a column 'id' with these",
}


class UsageError(Exception):
    """The command was called in a wrong way: exit code 2."""


class Talk:
    """Results go to standard output, as text or one JSON document; remarks, unless quiet, to the error stream."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet, self._output = as_json, quiet, sys.stdout

    @property
    def progress(self) -> bool:
        """Whether the error stream is a terminal and remarks are wanted."""
        return not self.quiet and sys.stderr.isatty()

    def note(self, text: str) -> None:
        """Write a remark to the error stream."""
        if not self.quiet:
            print(printable(text, "\n\t"), file=sys.stderr, flush=True)

    def result(self, document: dict[str, Any], text: str = "") -> None:
        """Print the result: the document with --json, else the text."""
        text = as_json_text(document) if self.as_json else printable(_on_command_line(text.rstrip("\n")), "\n\t")
        print(text, file=self._output, flush=True)

    def track(self, items: Sequence[Any], unit: str) -> Iterator[Any]:
        """Iterate and count on the error stream."""
        with Progress(unit, len(items), self.progress) as bar:
            for item in items:
                yield item
                bar.advance(1)

    def table(self, rows: Sequence[Sequence[str]]) -> str:
        """A table for the terminal, its titles first; the first column is text, the others are numbers."""
        from vbtta.comparison import aligned

        first, *rest = aligned([[printable(cell) for cell in row] for row in rows], gap="   ")
        return "\n".join([first, "─" * len(first), *rest])


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command, which gets a Talk and the options --json, --quiet and --debug.

    Errors and warnings are one line each; the exit code is 2 for wrong use and 1 for failures.
    """

    @functools.wraps(function)
    def run(as_json: bool = False, quiet: bool = False, debug: bool = False, **options: Any) -> None:
        try:
            talk = Talk(as_json, quiet)
            with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # predictors print, and Ray does
                warnings.simplefilter("default")
                warnings.showwarning = functools.partial(_show_warning, quiet)
                function(talk, **options)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            kept = function.__name__ == "views" and not options["dense"]
            complain("interrupted" + "; what is finished is kept, the same command goes on from there" * kept)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of the output ended, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            complain(_message(error))
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None

    _, *own = inspect.signature(function).parameters.values()
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in (("as_json", Json), ("quiet", Quiet), ("debug", Debug))
    ]
    run.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *common)}
    return run


def as_json_text(document: dict[str, Any]) -> str:
    """JSON, with null for numbers that are not finite."""
    return json.dumps(finite(document), allow_nan=False, indent=2)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(as_json_text(document) + "\n", encoding="utf-8")


def complain(message: str, kind: str = "error") -> None:
    """One line on the error stream."""
    print(f"vbtta: {kind}:", printable(_on_command_line(" ".join(message.split()))), file=sys.stderr, flush=True)


def _on_command_line(text: str) -> str:
    """A text whose remedies are options and columns, not arguments."""
    for argument, option in _REMEDIES.items():
        text = text.replace(argument, option)
    return text


def nearest(word: str, options: Iterable[str]) -> str:
    """A question after the option that was meant, to end an error with; nothing where none is near."""
    near = get_close_matches(word, options, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def needs(partner: str, present: object, **options: object) -> None:
    """Refuse options that mean nothing without their partner."""
    for name, value in options.items():
        if not present and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} goes with {partner}; give both, or leave out {option}")


def refuse(problem: bool, message: str) -> None:
    """Raise where there is a problem with the options."""
    if problem:
        raise UsageError(message)


def existing(path: Path, content: str) -> Path:
    """A file that was named and must be there."""
    if path.is_dir() or not path.exists():
        problem = " is a folder" if path.is_dir() else ": no such file"
        raise UsageError(f"{path}{problem}; give the path of {content}")
    return path


def writable(path: Path | None, *suffixes: str) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise UsageError(f"{path}: the name must end in {' or '.join(suffixes)}")
    checked_target(path)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer instances or views"
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    known = isinstance(error, UsageError | ValueError | TypeError | OSError | ImportError | KeyError)
    return text if known and text else f"{type(error).__name__}: {text}; --debug shows where"


def _show_warning(quiet: bool, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    if not quiet and issubclass(category, UserWarning):
        complain(str(message), "warning")
