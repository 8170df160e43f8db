"""The command line: `vbtta`."""

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    import sys
    from importlib.util import find_spec

    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        print(f'vbtta: error: the command line needs {missing[0]}: pip install "vbtta[cli]"', file=sys.stderr)
        sys.exit(1)
    from vbtta.cli.app import app

    app(prog_name="vbtta")
