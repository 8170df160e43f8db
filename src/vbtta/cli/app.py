"""The typer application: its commands, its version and its exit codes."""

__all__ = ["app"]

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vbtta._version import __version__
from vbtta.cli.compare import compare
from vbtta.cli.demo import demo
from vbtta.cli.diagnose import diagnose
from vbtta.cli.fit import fit
from vbtta.cli.predict import predict
from vbtta.cli.report import report
from vbtta.cli.running import complain
from vbtta.cli.views import views


class _OneLineErrors(TyperGroup):
    """Wrong use is one line on the error stream and exit code 2, without a usage box around it."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command and, in standalone mode, end the process."""
        standalone_mode = options.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            name = getattr(getattr(error, "ctx", None), "command_path", "vbtta")
            complain(f"{error.format_message().rstrip('.')}; see {name} --help")
            sys.exit(int(getattr(error, "exit_code", 2)))
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="vbtta",
    cls=_OneLineErrors,
    help="Weighted test-time augmentation: which views of an input deserve how much weight.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vbtta {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for _command in (demo, views, fit, predict, compare, diagnose, report):
    app.command()(_command)
