"""A cluster: connection, workers whose loss is survived, and errors of workers told on the driver in one line."""

__all__ = ["Failure", "Fleet", "WorkerError", "blame", "check_workers", "connect", "of_ray", "remote_class"]

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from vbtta._support.checks import require, whole_number

_START = 120.0  # seconds within which the first worker must have started, and all others half of that after it

Call = tuple[str, tuple[Any, ...]]  # method and arguments


def connect(address: str | None = None) -> Any:
    """Ray, connected: to the cluster it is connected to already, to the one at an address, or to this machine."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default, of which it warns
        quiet = {"logging_level": "warning", "log_to_driver": False}
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            if address != "local":
                ray.init(address=address or "auto", **quiet)
                return ray
        except ConnectionError:  # there is no cluster
            if address:
                raise
        _start_here(ray, quiet)
    return ray


def _start_here(ray: Any, options: dict[str, Any]) -> None:
    """Start Ray on this machine, on the loopback interface: no other machine can connect."""
    constants: Any = import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER  # where it is not set Ray takes the loopback address, as on macOS
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for the processes that it starts
    constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(address="local", include_dashboard=False, **options)
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]


def _patience() -> float:
    """Seconds to wait for an answer; dead workers and nodes are noticed by Ray itself, and earlier."""
    return float(os.environ.get("VBTTA_RAY_TIMEOUT", 6 * 3600))


def check_workers(workers: Any, options: Any) -> tuple[int | None, dict[str, Any]]:
    """The arguments `workers` and `worker_options`, checked before anything is started."""
    if options is not None and not isinstance(options, dict):
        raise ValueError(
            f"worker_options must be a dict of what ray.remote takes, as {{'num_gpus': 1}}; got {options!r}"
        )
    return None if workers is None else whole_number("workers", workers, 1), options or {}


def remote_class(ray: Any, worker: type, options: dict[str, Any]) -> Any:
    """A class whose instances are Ray actors; warns where no node can hold one, as Ray waits silently."""
    try:
        remote = ray.remote(**options)(worker)
    except (TypeError, ValueError) as error:
        raise ValueError(f"worker_options are not what ray.remote takes: {error}") from None
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    needs = {name: amount for name, amount in {**named, **(options.get("resources") or {})}.items() if amount}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        asked = ", ".join(f"{amount} {name}" for name, amount in needs.items())
        warnings.warn(
            f"no node of the cluster has what a worker needs ({asked}), so none starts until one joins; see "
            "worker_options",
            stacklevel=2,
        )
    return remote


class Fleet:
    """Workers that answer calls and hold parts of the data between them; a worker may be lost.

    Its calls and parts go to the others, which repeat the calls that made the parts. Results do not depend on which
    worker holds which part, so nothing is lost or counted twice. So many `replacements` are started for lost workers.
    """

    def __init__(
        self, worker: type, arguments: tuple[Any, ...], n_workers: int, options: dict[str, Any], replacements: int = 0
    ) -> None:
        self.ray = connect()
        errors = self.ray.exceptions
        self._loss = (errors.RayActorError, errors.ObjectLostError, errors.OwnerDiedError)
        needs = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD", **options}
        self._new_worker = partial(remote_class(self.ray, worker, needs).remote, *arguments)
        self.replacements = replacements
        self.workers: dict[int, Any] = {}
        self._idle: list[int] = []
        self._busy: dict[Any, tuple[int, int | None]] = {}  # answer -> worker, number of its call (None: it starts)
        self._holder: dict[int, int] = {}  # part -> worker
        self._lasting: list[Call] = []  # calls that made the parts
        for place in range(n_workers):
            self._start(place)

    def __len__(self) -> int:
        return len(self.workers)

    def close(self) -> None:
        """Stop all workers."""
        for worker in self.workers.values():
            self.ray.kill(worker)
        self.workers.clear()

    def wait(self) -> None:
        """Wait until workers have started; those that are late are given up."""
        if not self.ray.wait(list(self._busy), num_returns=1, timeout=_START)[0]:
            raise RuntimeError(
                f"no worker has started in {_START:.0f} s: the cluster is busy with other work; wait for it to end"
            )
        _, late = self.ray.wait(list(self._busy), num_returns=len(self._busy), timeout=_START / 2)
        for answer in late:
            self.ray.kill(self.workers.pop(self._busy.pop(answer)[0]))

    def finished(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Numbers and results of calls that any worker can answer, as they come in."""
        waiting = list(range(len(calls)))[::-1]
        n_finished = 0
        while n_finished < len(calls):
            while waiting and self._idle:
                number, place = waiting.pop(), self._idle.pop()
                self._busy[self._send(place, calls[number])] = (place, number)
            answers, _ = self.ray.wait(list(self._busy), num_returns=1, timeout=_patience())
            if not answers:
                raise self._silence()
            answer = answers[0]
            place, called = self._busy.pop(answer)
            try:
                result = self._get(answer)
            except self._loss as error:
                self._lose(place, error)
                waiting += [] if called is None else [called]
                continue
            self._idle.append(place)
            if called is not None:
                n_finished += 1
                yield called, result

    def anywhere(self, calls: Sequence[Call]) -> list[Any]:
        """Results of calls that any worker can answer, in order."""
        results = dict(self.finished(calls))
        return [results[number] for number in range(len(calls))]

    def share_out(self, n_parts: int) -> None:
        """Assign parts to workers, neighbours to the same one; lasting calls make them."""
        places = list(self.workers)
        self._holder = {number: places[number * len(places) // n_parts] for number in range(n_parts)}
        self._lasting = []

    def over_parts(self, method: str, arguments: tuple[Any, ...], *, lasting: bool = False) -> list[Any]:
        """Lists that workers return for the parts they hold, one after the other; `lasting` calls change parts."""
        shared = self.ray.put(arguments)
        results: dict[tuple[int, ...], list[Any]] = {}
        waiting = set(self._holder)
        while waiting:
            moved = self._settle()
            waiting |= moved if lasting else set()
            numbers: dict[int, list[int]] = {}
            for number in sorted(waiting):
                numbers.setdefault(self._holder[number], []).append(number)
            running = {place: self._send(place, (method, (held, shared))) for place, held in numbers.items()}
            for place, answer in running.items():
                try:
                    results[tuple(numbers[place])] = self._get(answer)
                    waiting -= set(numbers[place])
                except self._loss as error:
                    self._lose(place, error)
        if lasting:
            self._lasting.append((method, (shared,)))
        return [entry for held in sorted(results) for entry in results[held]]

    def _settle(self) -> set[int]:
        """Give the parts of lost workers to those with the fewest, and repeat there the calls that made them."""
        moved: set[int] = set()
        while orphans := [number for number, place in self._holder.items() if place not in self.workers]:
            load = Counter(self._holder.values())
            for number in orphans:
                self._holder[number] = min(self.workers, key=load.__getitem__)
                load[self._holder[number]] += 1
            for number in orphans:
                place = self._holder[number]
                try:
                    for method, arguments in self._lasting:
                        if place in self.workers:  # else it is an orphan of the next round
                            self._get(self._send(place, (method, ([number], *arguments))))
                except self._loss as error:
                    self._lose(place, error)
            moved.update(orphans)
        return moved

    def _start(self, place: int) -> None:
        self.workers[place] = self._new_worker()
        self._busy[self.workers[place].ready.remote()] = (place, None)

    def _send(self, place: int, call: Call) -> Any:
        method, arguments = call
        return getattr(self.workers[place], method).remote(*arguments)

    def _get(self, answer: Any) -> Any:
        """An answer; an exception of the worker is raised here with the same message."""
        try:
            return self.ray.get(answer, timeout=_patience())
        except self._loss:
            raise
        except self.ray.exceptions.GetTimeoutError:
            raise self._silence() from None
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, self._loss):
                raise cause from None
            raise of_ray(error) from WorkerError(str(error))

    def _silence(self) -> RuntimeError:
        return RuntimeError(
            f"no worker has answered in {_patience():.0f} s: one may hang; look at the cluster's log, or give them "
            "more time with the environment variable VBTTA_RAY_TIMEOUT (seconds)"
        )

    def _lose(self, place: int, error: Exception) -> None:
        """Give up a worker."""
        worker = self.workers.pop(place, None)
        if worker is not None:
            self.ray.kill(worker)  # it may be cut off rather than dead
        self._idle = [other for other in self._idle if other != place]
        if self.replacements:
            self.replacements -= 1
            self._start(place)
        if not self.workers:
            raise RuntimeError(
                f"all workers were lost, the last one with: {_last_line(error).rstrip('.')}. Start the cluster anew "
                "and run the same call again"
            ) from WorkerError(str(error))


# -- failures -------------------------------------------------------------------------------------


class WorkerError(Exception):
    """The traceback of a worker, as the cause of an error on the driver."""


class _BlamedError(Exception):
    """Names the code whose exception is its cause."""


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Attribute exceptions raised inside to `what`."""
    try:
        yield
    except Exception as error:
        raise _BlamedError(what) from error


class Failure(NamedTuple):
    """An exception as text, which can be sent even where the exception itself cannot be pickled."""

    message: str
    ours: bool  # whether this package raised it, with a message that says what to do
    trace: str

    @classmethod
    def of(cls, error: Exception, where: str, otherwise: str) -> "Failure":
        """The failure of work on something; `otherwise` is named for exceptions outside :func:`blame`."""
        what, cause = otherwise, error
        if isinstance(error, _BlamedError) and isinstance(error.__cause__, Exception):
            what, cause = str(error), error.__cause__
        *_, (frame, _) = traceback.walk_tb(cause.__traceback__)
        in_package = str(frame.f_globals.get("__name__", "")).split(".")[0] == __name__.split(".")[0]
        told = isinstance(cause, ValueError | TypeError | ImportError) and not isinstance(cause, ModuleNotFoundError)
        text = str(cause) if in_package and told else f"{what} raised {type(cause).__name__}: {cause}"
        trace = "".join(traceback.format_exception(cause))
        return cls(f"{where}: {text}" if where else text, in_package and told, trace)

    def error(self) -> Exception:
        """What to raise on the driver, from the :class:`WorkerError` of `trace`."""
        return ValueError(self.message) if self.ours else RuntimeError(self.message)


def of_ray(error: Any) -> Exception:
    """The exception behind one of Ray: the one that a task raised, or the last line of Ray's own."""
    cause: Any = getattr(error, "cause", None)
    if type(cause).__name__ == "UserCodeException":
        cause = cause.__cause__
    if isinstance(cause, Exception) and not type(cause).__module__.startswith("ray."):
        return cause
    return RuntimeError(f"a worker failed: {_last_line(error)}")


def _last_line(error: BaseException) -> str:
    """The last line of an error that quotes a traceback."""
    return str(error).strip().split("\n")[-1].strip() or type(error).__name__
