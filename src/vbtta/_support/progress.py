"""A progress line on the standard error stream."""

__all__ = ["Progress"]

import sys
import time
from typing import Self


class Progress:
    """Counts what is done and says how long the rest will take; silent unless asked for.

    Parameters
    ----------
    what : str
        Plural of what is counted.
    total : int or None
        How many there are, where known.
    enabled : bool
        Whether to write anything.
    """

    def __init__(self, what: str, total: int | None, enabled: bool) -> None:
        self.what, self.total, self.enabled = what, total, enabled
        self.done = 0
        self._started = self._written = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.enabled:
            self._write()
            print(file=sys.stderr, flush=True)

    def advance(self, n: int) -> None:
        """Count `n` more; writes at most five times a second."""
        self.done += n
        if self.enabled and time.monotonic() - self._written > 0.2:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        passed = self._written - self._started
        text = f"{self.done:,} {self.what} in {passed:.0f} s"
        if self.total:
            left = passed * (self.total - self.done) / max(self.done, 1)
            text = f"{self.done:,} of {self.total:,} {self.what}, {passed:.0f} s passed, about {left:.0f} s left"
        print(f"\rvbtta: {text:<70}", end="", file=sys.stderr, flush=True)
