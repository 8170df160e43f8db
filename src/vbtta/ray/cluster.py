"""A cluster: connection, workers whose loss is survived, and errors of workers told on the driver in one line."""

__all__ = ["Failure", "Fleet", "WorkerError", "blame", "check_workers", "connect", "of_ray", "remote_class"]

import json
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vbtta._support.checks import require, whole_number

_START = 120.0  # seconds within which the first worker must have started, and all others half of that after it

Call = tuple[str, tuple[Any, ...]]  # method and arguments


def connect(address: str | None = None) -> Any:
    """Ray, connected: to the cluster it is connected to already, to the one at an address, or to this machine.

    Parameters
    ----------
    address : str, optional
        As `ray.init` takes it, for instance "auto" or "ray://head:10001".
    """
    ray = require("ray", "ray")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default, of which it warns
        local = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(address=address, logging_level="warning", log_to_driver=False, **local)
    return ray


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
    """Workers that hold parts of the data between calls.

    A worker that is lost is not replaced: its parts go to those that are left, which repeat the calls that made the
    parts. Results do not depend on which worker holds which part, so nothing is lost or counted twice.

    Parameters
    ----------
    worker : type
        Class of the workers.
    arguments : tuple
        Arguments of the class.
    n_workers : int or None
        How many; by default one a core of the cluster.
    options : dict
        Of every worker, as `ray.remote` takes them.
    """

    def __init__(
        self, worker: type, arguments: tuple[Any, ...], n_workers: int | None, options: dict[str, Any]
    ) -> None:
        self.ray = connect()
        errors = self.ray.exceptions
        self._loss = (errors.RayActorError, errors.ObjectLostError, errors.OwnerDiedError)
        cores = int(self.ray.cluster_resources().get("CPU", 0))
        if n_workers is not None and not 1 <= n_workers <= cores:
            raise ValueError(
                f"workers must be between 1 and the {cores} cores of the cluster; got {n_workers}. Add nodes, or leave "
                "it out for one worker a core"
            )
        needs = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD", **options}
        remote = remote_class(self.ray, worker, needs)
        started = [remote.remote(*arguments) for _ in range(n_workers or cores)]
        ready = [actor.ready.remote() for actor in started]
        if not self.ray.wait(ready, num_returns=1, timeout=_START)[0]:
            raise RuntimeError(
                f"no worker has started in {_START:.0f} s: the cluster is busy with other work; wait for it to end"
            )
        _, late = self.ray.wait(ready, num_returns=len(ready), timeout=_START / 2)
        self.workers: dict[int, Any] = {}
        for place, (actor, answer) in enumerate(zip(started, ready, strict=True)):
            if answer in late:
                self.ray.kill(actor)
            else:
                self.workers[place] = actor
        self.owner: dict[int, int] = {}  # part -> worker
        self.history: dict[int, list[Call]] = {}  # part -> calls that made it

    def __len__(self) -> int:
        return len(self.workers)

    def close(self) -> None:
        """Stop all workers."""
        for worker in self.workers.values():
            self.ray.kill(worker)
        self.workers.clear()

    def anywhere(self, calls: Sequence[Call]) -> list[Any]:
        """Results of calls that any worker can answer, in order; as many at a time as there are workers."""
        results: list[Any] = [None] * len(calls)
        waiting = list(range(len(calls)))[::-1]
        running: dict[Any, tuple[int, int]] = {}
        idle = list(self.workers)
        while waiting or running:
            while waiting and idle:
                number, place = waiting.pop(), idle.pop()
                running[self._send(place, calls[number])] = (number, place)
            done, _ = self.ray.wait(list(running), num_returns=1)
            number, place = running.pop(done[0])
            try:
                results[number] = self._get(done[0])
                idle.append(place)
            except self._loss as error:
                self._lose(place, error)
                waiting.append(number)
                idle = [place for place in idle if place in self.workers]
        return results

    def give(self, calls: dict[int, Call]) -> None:
        """Give parts to workers, neighbours to the same one, by one call each."""
        self.owner, self.history = {}, {}
        for place in list(self.workers):
            try:
                self._get(self._send(place, ("drop", ())))
            except self._loss as error:
                self._lose(place, error)
        places, numbers = list(self.workers), sorted(calls)
        self.owner = {number: places[order * len(places) // len(numbers)] for order, number in enumerate(numbers)}
        self.history = {number: [] for number in numbers}
        self.each(calls)

    def each(self, calls: dict[int, Call]) -> dict[int, Any]:
        """Change parts by one call each, which is repeated where a worker is lost."""
        results: dict[int, Any] = {}
        while missing := [number for number in calls if number not in results]:
            running = {self._send(self.owner[number], calls[number]): number for number in missing}
            for answer, number in running.items():
                try:
                    results[number] = self._get(answer)
                    self.history[number].append(calls[number])
                except self._loss as error:
                    self._lose(self.owner[number], error)
            self._settle()
        return results

    def over_parts(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Lists that workers return for the parts they hold, one after the other."""
        shared = self.ray.put(arguments)
        results: dict[tuple[int, ...], list[Any]] = {}
        waiting = list(self.owner)
        while waiting:
            by_owner: dict[int, list[int]] = {}
            for number in sorted(waiting):
                by_owner.setdefault(self.owner[number], []).append(number)
            running = {self._send(place, (method, (numbers, shared))): place for place, numbers in by_owner.items()}
            waiting = []
            for answer, place in running.items():
                try:
                    results[tuple(by_owner[place])] = self._get(answer)
                except self._loss as error:
                    self._lose(place, error)
                    waiting += by_owner[place]
            self._settle()
        return [entry for numbers in sorted(results) for entry in results[numbers]]

    def _send(self, place: int, call: Call) -> Any:
        method, arguments = call
        return getattr(self.workers[place], method).remote(*arguments)

    def _get(self, answer: Any) -> Any:
        """An answer; an exception of the worker is raised here with the same message."""
        try:
            return self.ray.get(answer)
        except self._loss:
            raise
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, self._loss):
                raise cause from None
            raise of_ray(error) from WorkerError(str(error))

    def _lose(self, place: int, error: Exception) -> None:
        """Give up a worker."""
        worker = self.workers.pop(place, None)
        if worker is not None:
            self.ray.kill(worker)  # it may be cut off rather than dead
        if not self.workers:
            raise RuntimeError(
                f"all workers were lost, the last one with: {_last_line(error).rstrip('.')}. Start the cluster anew "
                "and run the same call again"
            ) from WorkerError(str(error))

    def _settle(self) -> None:
        """Give the parts of lost workers to those with the fewest, and repeat there the calls that made them."""
        while orphans := [number for number, place in self.owner.items() if place not in self.workers]:
            load = {place: list(self.owner.values()).count(place) for place in self.workers}
            for number in orphans:
                place = min(load, key=load.__getitem__)
                load[place] += 1
                self.owner[number] = place
            for number in orphans:
                try:
                    for call in self.history[number]:
                        if self.owner[number] in self.workers:  # else it is an orphan of the next round
                            self._get(self._send(self.owner[number], call))
                except self._loss as error:
                    self._lose(self.owner[number], error)


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

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """A failure that was sent as `json.dumps` writes it."""
        return cls(*json.loads(text))

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
