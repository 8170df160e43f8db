"""A cluster and the workers on it: calls that survive the loss of a node."""

__all__ = ["Fleet", "check_workers", "connect", "remote_class"]

import os
import warnings
from collections.abc import Sequence
from typing import Any

from vbtta._support.checks import whole_number
from vbtta._support.extras import require
from vbtta.scale.failures import WorkerError, in_a_line, of_ray

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
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do anyway, and warns about
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


def remote_class(ray: Any, make: type, options: dict[str, Any]) -> Any:
    """A class whose instances are workers."""
    try:
        remote = ray.remote(**options)(make)
    except (TypeError, ValueError) as error:
        raise ValueError(f"worker_options are not what ray.remote takes: {error}") from None
    _warn_where_none_fits(ray, options)
    return remote


def _warn_where_none_fits(ray: Any, options: dict[str, Any]) -> None:
    """Ray waits without a word for a node that can hold a worker."""
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


class Fleet:
    """Workers that hold parts of the data between calls.

    A worker that is lost is not replaced: its parts go to those that are left, which read them again. What a call
    returns does not depend on who holds what, so nothing is lost or counted twice.

    Parameters
    ----------
    make : callable
        Class of the workers.
    arguments : tuple
        What it is called with.
    n_workers : int or None
        How many; by default one a core of the cluster.
    options : dict
        Of every worker, as `ray.remote` takes them.
    """

    def __init__(self, make: type, arguments: tuple[Any, ...], n_workers: int | None, options: dict[str, Any]) -> None:
        self.ray = connect()
        cores = int(self.ray.cluster_resources().get("CPU", 0))
        if n_workers is not None and not 1 <= n_workers <= cores:
            raise ValueError(
                f"workers must be between 1 and the {cores} cores of the cluster; got {n_workers}. Add nodes, or leave "
                "it out for one worker a core"
            )
        needs = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD", **options}
        remote = remote_class(self.ray, make, needs)
        started = [remote.remote(*arguments) for _ in range(n_workers or cores)]
        ready = [worker.ready.remote() for worker in started]
        first, _ = self.ray.wait(ready, num_returns=1, timeout=_START)
        if not first:
            raise RuntimeError(
                f"no worker has started in {_START:.0f} s: the cluster is busy with other work; wait for it to end"
            )
        came, late = self.ray.wait(ready, num_returns=len(ready), timeout=_START / 2)
        for worker, answer in zip(started, ready, strict=True):
            if answer in late:
                self.ray.kill(worker)
        self.workers = {place: worker for place, (worker, answer) in enumerate(zip(started, ready, strict=True))
                        if answer in came}  # fmt: skip
        self.owner: dict[int, int] = {}  # part -> worker
        self.history: dict[int, list[Call]] = {}  # part -> calls that made it what it is

    def __len__(self) -> int:
        return len(self.workers)

    def close(self) -> None:
        """Let all workers go."""
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
            except self._lost_errors as error:
                self._lose(place, error)
                waiting.append(number)
                idle = [one for one in idle if one in self.workers]
        return results

    def give(self, calls: dict[int, Call]) -> dict[int, Any]:
        """Give parts to workers, neighbours to the same one, by calls that are repeated where a worker is lost."""
        self.owner, self.history = {}, {}
        for place in list(self.workers):
            try:
                self._get(self._send(place, ("drop", ())))
            except self._lost_errors as error:
                self._lose(place, error)
        places, numbers = list(self.workers), sorted(calls)
        for order, number in enumerate(numbers):
            self.owner[number] = places[order * len(places) // len(numbers)]
            self.history[number] = []
        return self.each(calls)

    def each(self, calls: dict[int, Call]) -> dict[int, Any]:
        """Change parts by one call each, and remember it."""
        results: dict[int, Any] = {}
        running = {self._send(self.owner[number], call): number for number, call in calls.items()}
        for answer, number in running.items():
            try:
                results[number] = self._get(answer)
            except self._lost_errors as error:
                self._lose(self.owner[number], error)
        for number, call in calls.items():
            self.history[number].append(call)
        self._settle()
        missing = [number for number in calls if number not in results]
        for number in missing:  # the replay made the change; its answer is asked for once more
            results[number] = self._replay(number)
        return results

    def over_parts(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Lists that workers return for the parts they hold, one after the other."""
        shared = self.ray.put(arguments)
        found: dict[tuple[int, ...], list[Any]] = {}
        waiting = self._by_owner(list(self.owner))
        while waiting:
            running = {
                self._send(place, (method, (numbers, shared))): (place, numbers) for place, numbers in waiting.items()
            }
            lost: list[int] = []
            for answer, (place, numbers) in running.items():
                try:
                    found[tuple(numbers)] = self._get(answer)
                except self._lost_errors as error:
                    self._lose(place, error)
                    lost += numbers
            self._settle()
            waiting = self._by_owner(lost)
        return [entry for numbers in sorted(found) for entry in found[numbers]]

    def _by_owner(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for number in sorted(numbers):
            groups.setdefault(self.owner[number], []).append(number)
        return groups

    def _send(self, place: int, call: Call) -> Any:
        method, arguments = call
        return getattr(self.workers[place], method).remote(*arguments)

    def _get(self, answer: Any) -> Any:
        """An answer; what went wrong there goes wrong here in the same words."""
        try:
            return self.ray.get(answer)
        except self._lost_errors:
            raise
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, self._lost_errors):
                raise cause from None
            raise of_ray(error) from WorkerError(str(error))

    @property
    def _lost_errors(self) -> tuple[type[Exception], ...]:
        errors = self.ray.exceptions
        return errors.RayActorError, errors.ObjectLostError, errors.OwnerDiedError

    def _lose(self, place: int, error: Exception) -> None:
        """A worker is gone."""
        worker = self.workers.pop(place, None)
        if worker is not None:
            self.ray.kill(worker)  # it may be cut off rather than dead
        if not self.workers:
            raise RuntimeError(
                f"all workers were lost, the last one with: {in_a_line(error).rstrip('.')}. Start the cluster anew and "
                "run the same call again"
            ) from WorkerError(str(error))

    def _settle(self) -> None:
        """Give the parts of lost workers to those with the fewest, and make them there what they were."""
        while orphans := [number for number, place in self.owner.items() if place not in self.workers]:
            load = {place: list(self.owner.values()).count(place) for place in self.workers}
            for number in orphans:
                place = min(load, key=lambda one: load[one])
                load[place] += 1
                self.owner[number] = place
            for number in orphans:
                if self.owner[number] not in self.workers:
                    continue  # lost in the meantime; next round
                for call in self.history[number]:
                    try:
                        self._get(self._send(self.owner[number], call))
                    except self._lost_errors as error:
                        self._lose(self.owner[number], error)
                        break

    def _replay(self, number: int) -> Any:
        """Once more the last call for a part that changed hands."""
        while True:
            try:
                return self._get(self._send(self.owner[number], self.history[number][-1]))
            except self._lost_errors as error:
                self._lose(self.owner[number], error)
                self._settle()
