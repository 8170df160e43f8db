"""Files that are whole or not there: write beside the target, then rename."""

__all__ = ["atomic_path"]

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHORT = 40  # of the target's name: the temporary one must not be too long where the target's is not


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the target's folder; it replaces the target when the block succeeds.

    A reader sees the old file or the new one, never half of either, and a failure leaves no litter.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the name of a file in it")
    temporary = target.with_name(f".{target.name[:_SHORT]}.{secrets.token_hex(8)}.part")
    with _called(target, temporary):
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _called(target: Path, temporary: Path) -> Iterator[None]:
    """Errors about the temporary file name the target: nobody asked for the other."""
    try:
        yield
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(target), None
        raise
