"""A progress line on the standard error stream."""

__all__ = ["Progress"]

import sys
import time
from typing import Self


class Progress:
    """Counts finished units (a plural noun) and estimates the time left; silent unless enabled."""

    def __init__(self, unit: str, total: int | None, enabled: bool) -> None:
        self.unit, self.total, self.enabled = unit, total, enabled
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
        text = f"{self.done:,} {self.unit} in {passed:.0f} s"
        if self.total:
            left = passed * (self.total - self.done) / max(self.done, 1)
            text = f"{self.done:,} of {self.total:,} {self.unit}, {passed:.0f} s passed, about {left:.0f} s left"
        print(f"\rvbtta: {text:<70}", end="", file=sys.stderr, flush=True)
