"""What goes wrong on a worker, told on the driver in one line: what failed, on what, and why."""

__all__ = ["Failure", "WorkerError", "blame", "in_a_line", "of_ray"]

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_PACKAGE = __name__.split(".")[0]


class WorkerError(Exception):
    """The traceback of a worker, as the cause of an error on the driver."""


class _BlamedError(Exception):
    """Who is to blame for the exception that caused this one."""


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Whatever is raised inside is the fault of `what`."""
    try:
        yield
    except Exception as error:
        raise _BlamedError(what) from error


class Failure(NamedTuple):
    """An exception in words, which travel even where it does not."""

    message: str
    ours: bool  # whether this package raised it, in words that say what to do
    trace: str

    @classmethod
    def of(cls, error: Exception, where: str, otherwise: str) -> "Failure":
        """What was caught at work on something; `otherwise` is to blame for what is not under :func:`blame`."""
        what, cause = otherwise, error
        if isinstance(error, _BlamedError) and isinstance(error.__cause__, Exception):
            what, cause = str(error), error.__cause__
        ours = _is_ours(cause)
        words = str(cause) if ours else f"{what} raised {type(cause).__name__}: {cause}"
        return cls(f"{where}: {words}" if where else words, ours, "".join(traceback.format_exception(cause)))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """A failure that was sent as `json.dumps` writes it."""
        return cls(*json.loads(text))

    def error(self) -> Exception:
        """What to raise on the driver, from the :class:`WorkerError` of `trace`."""
        return ValueError(self.message) if self.ours else RuntimeError(self.message)


def of_ray(error: Any) -> Exception:
    """The exception behind one of Ray: the one that a task raised, or Ray's own in a line."""
    cause: Any = getattr(error, "cause", None)
    if type(cause).__name__ == "UserCodeException":
        cause = cause.__cause__
    if isinstance(cause, Exception) and not type(cause).__module__.startswith("ray."):
        return cause
    return RuntimeError(f"a worker failed: {in_a_line(error)}")


def in_a_line(error: BaseException) -> str:
    """The last line of an error that quotes a traceback."""
    return str(error).strip().split("\n")[-1].strip() or type(error).__name__


def _is_ours(error: Exception) -> bool:
    """Whether this package complains of something, rather than fails over code that it was given."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    in_package = str(frame.f_globals.get("__name__", "")).split(".")[0] == _PACKAGE
    told = isinstance(error, ValueError | TypeError | ImportError) and not isinstance(error, ModuleNotFoundError)
    return in_package and told
