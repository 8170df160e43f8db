"""Ray: connection, tasks that are run again when a worker is lost, and errors of workers in one line."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vbtta._support.checks import require, whole_number


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
        # Start one on this machine, on the loopback interface, as on macOS: no other machine can connect.
        constants: Any = import_module("ray._private.ray_constants")
        before = constants.ENABLE_RAY_CLUSTER
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read by the processes that Ray starts
        constants.ENABLE_RAY_CLUSTER = False
        try:
            ray.init(address="local", include_dashboard=False, **quiet)
        finally:
            constants.ENABLE_RAY_CLUSTER = before
            del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    return ray


def check_workers(workers: Any, options: Any) -> tuple[int | None, dict[str, Any]]:
    """The arguments `workers` and `worker_options`, checked before anything is started."""
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"worker_options must be a dict for ray.remote, as {{'num_gpus': 1}}; got {options!r}")
    return None if workers is None else whole_number("workers", workers, 1), options or {}


class Tasks:
    """Functions run on a cluster. Results stay on the nodes until they are asked for.

    Ray runs a task again when its worker or node is lost (`max_retries`, 3), and remakes lost results the same way.
    """

    def __init__(self, n_workers: int | None, options: dict[str, Any]) -> None:
        _patience()  # a wrong value is refused before anything is started
        self._ray = connect()
        self.n_workers = n_workers or max(int(self._ray.cluster_resources().get("CPU", 0)), 1)
        self._options = {"num_cpus": 1, "max_calls": 0, **options}  # workers stay, also those with devices
        self._functions: dict[Callable[..., Any], Any] = {}
        self._warn_if_none_can_run()

    def start(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, spread: bool = False
    ) -> list[Any]:
        """References to the results of calls, which run near their data, or spread over the nodes."""
        if function not in self._functions:
            try:
                self._functions[function] = self._ray.remote(**self._options)(function)
            except (TypeError, ValueError) as error:
                raise ValueError(f"worker_options are not what ray.remote takes: {error}") from None
        task = self._functions[function]
        if spread and "scheduling_strategy" not in self._options:
            task = task.options(scheduling_strategy="SPREAD")
        return [task.remote(*arguments) for arguments in calls]

    def results(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results of calls, here and in order."""
        return list(self._answer(self.start(function, calls), _patience()))

    def finished(self, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Calls as they finish; as many run at a time as there are workers, and none is started after an error."""
        waiting, busy = calls[::-1], dict[Any, tuple[Any, ...]]()
        try:
            while waiting or busy:
                while waiting and len(busy) < self.n_workers:
                    call = waiting.pop()
                    busy[self.start(function, [call], spread=True)[0]] = call
                done = self._ray.wait(list(busy), timeout=_patience())[0] or list(busy)  # the next line raises
                self._answer(done[0], 10.0)
                yield busy.pop(done[0])
        except BaseException as error:
            # After an error of a worker the others end by themselves: Ray may abort the driver if a task is cancelled
            # while it starts or ends (a failed check in its task manager).
            if not isinstance(error.__cause__, WorkerError):
                for reference in busy:
                    self._ray.cancel(reference, force=True)
            raise

    def _answer(self, references: Any, seconds: float) -> Any:
        """What references stand for; an exception of a worker is raised here with the same message."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(references, timeout=seconds)
        except errors.GetTimeoutError:
            remedy = "look at the cluster's log, or set the environment variable VBTTA_RAY_TIMEOUT (seconds)"
            raise RuntimeError(f"no worker has answered in {_patience():.0f} s: one may hang; {remedy}") from None
        except errors.RayError as error:
            cause: Any = getattr(error, "cause", None)
            if type(cause).__name__ == "UserCodeException":
                cause = cause.__cause__
            if not isinstance(cause, Exception) or type(cause).__module__.startswith("ray."):
                last_line = str(error).strip().split("\n")[-1].strip() or type(error).__name__
                cause = RuntimeError(f"a worker failed, and so did those that took over: {last_line}")
            raise cause from WorkerError(str(error))

    def _warn_if_none_can_run(self) -> None:
        """Ray waits silently where no node has what a task needs."""
        needs = {"CPU": self._options["num_cpus"], "GPU": self._options.get("num_gpus", 0)}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
            needed = f"{needs['CPU']} CPU, {needs['GPU']} GPU; see worker_options"
            warnings.warn(f"no worker starts until a node joins that has what one needs: {needed}", stacklevel=4)


def _patience() -> float:
    """Seconds to wait for an answer; dead workers and nodes are noticed by Ray itself, and earlier."""
    setting = os.environ.get("VBTTA_RAY_TIMEOUT", "21600")
    if not setting.replace(".", "", 1).isdecimal() or not float(setting):
        raise ValueError(f"VBTTA_RAY_TIMEOUT must be a positive number of seconds; got {setting!r:.80}")
    return float(setting)


class WorkerError(Exception):
    """The traceback of a worker, as the cause of an error on the driver."""


class _ExplainedError(RuntimeError):
    """Names the code that raised it."""


@contextmanager
def explained(source: str, where: str = "") -> Iterator[None]:
    """Turn exceptions raised inside into ones that can be pickled and say what raised them, and where."""
    try:
        yield
    except (ValueError, _ExplainedError) as error:
        kind = ValueError if isinstance(error, ValueError) else _ExplainedError
        raise kind(f"{where}{error}") from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise _ExplainedError(f"{where}{source} raised {type(error).__name__}: {reason}") from error
