"""Files that are whole or not there: write beside the target, then rename."""

__all__ = ["atomic_path"]

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = 40  # letters of the target's name, so that the temporary name is not too long for the file system


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the target's folder; it replaces the target when the block succeeds.

    A reader sees the old file or the new one, never a part of either, and a failure leaves no temporary file.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the name of a file in it")
    temporary = target.with_name(f".{target.name[:_PREFIX]}.{secrets.token_hex(8)}.part")
    with _renamed_errors(target, temporary):
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _renamed_errors(target: Path, temporary: Path) -> Iterator[None]:
    """Make errors about the temporary file name the target."""
    try:
        yield
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(target), None
        raise
