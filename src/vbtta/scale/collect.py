"""collect_views on a cluster: inputs of any number through a pool of models, predictions out as parquet files."""

__all__ = ["Collected", "collect_views"]

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from pickle import PicklingError
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta._support.extras import require
from vbtta._support.progress import Progress
from vbtta.augment.fingerprint import view_fingerprint
from vbtta.augment.foreign import as_views
from vbtta.collect import check_options
from vbtta.models.base import Output
from vbtta.predictions import ViewPredictions
from vbtta.scale.cluster import check_workers, connect, remote_class
from vbtta.scale.collector import Collector, Job
from vbtta.scale.failures import Failure, WorkerError, of_ray
from vbtta.scale.identity import identity
from vbtta.scale.inputs import Piece, pieces_of
from vbtta.scale.tables import load_predictions


class Collected(NamedTuple):
    """Where predictions were written."""

    folder: Path
    n_instances: int
    n_parts: int
    n_reused: int  # parts that were there already

    def load(self) -> ViewPredictions:
        """All of them in memory."""
        return load_predictions(self.folder)


def collect_views(
    model_factory: Callable[[], Any],
    dataset: Any,
    views: Any,
    out: str | os.PathLike[str],
    *,
    draws: int = 1,
    batch_size: int = 256,
    variance: Literal["delta"] | None = None,
    output: Output = None,
    seed: int = 0,
    progress: bool = False,
    classes: ArrayLike | None = None,
    read: Callable[[Any], Any] | None = None,
    key: str = "",
    rows_per_part: int = 16_384,
    workers: int | None = None,
    worker_options: dict[str, Any] | None = None,
    address: str | None = None,
) -> Collected:
    """Predict every input under every view, on a cluster: :func:`vbtta.collect_views` for inputs of any number.

    Input files are cut into parts of consecutive rows. Every worker of the pool makes the model once and then works on
    one part after another, batch by batch, so that its memory does not depend on the number of inputs. A part's
    predictions appear whole or not at all; a part that is there already is not computed again, so the same call goes
    on where an earlier one stopped, and the part of a worker that is lost is given to another. Draws are keyed by
    the row's number in the whole data set: the result does not depend on parts, batches or workers.

    Parameters
    ----------
    model_factory : callable
        Makes the model, which is what :func:`vbtta.models.as_model` takes. It is called on the workers.
    dataset : path or list of paths
        Parquet files, or folders of them, with a column `image` (image files; the model sees numbers from 0 to 1 of
        shape (n, 3, H, W)), a column `inputs` (lists of lists ..., tensors), or only numbers; and
        optionally `instance`, the inputs' ids, which are row numbers otherwise.
    views : list of views
        What :func:`vbtta.augment.as_views` takes.
    out : path
        Folder of the predictions, on a file system that all nodes share.
    draws, batch_size, variance, output, seed, progress, classes
        As in :func:`vbtta.collect_views`.
    read : callable, optional
        Makes inputs of a `pyarrow.Table`, where the columns are others than those above.
    key : str
        Whatever else the predictions depend on, such as a digest of the model's weights: parts made under another key
        are not taken for finished.
    rows_per_part : int
        Rows of a part, which is what is lost with a worker; more where a file has row groups of more than eight times
        as many, as a part is read from its group's start.
    workers : int, optional
        Models at work at a time; by default one a core of the cluster.
    worker_options : dict, optional
        What every worker needs, as `ray.remote` takes it, for instance ``{"num_gpus": 1}``.
    address : str, optional
        Of the cluster, as `ray.init` takes it; by default the one Ray is connected to, or this machine.

    Returns
    -------
    Collected
        Its `folder` is what :func:`vbtta.scale.fit_policy` takes.

    Examples
    --------
    The page "A cluster" (docs/cluster.md) runs it on three files, twice, and fits weights to what it wrote.
    """
    check_options(draws, 0, variance)
    seed = whole_number("seed", seed, 0)
    batch_size = whole_number("batch_size", batch_size, 1)
    rows_per_part = whole_number("rows_per_part", rows_per_part, 1)
    workers, worker_options = check_workers(workers, worker_options)
    if not callable(model_factory):
        raise TypeError(
            f"model_factory must be a function that makes the model, called on every worker; got "
            f"{type(model_factory).__name__}. Wrap it: lambda: model"
        )
    if read is not None and not callable(read):
        raise TypeError(f"read must be a function that makes inputs of a pyarrow.Table; got {type(read).__name__}")
    if not isinstance(key, str):
        raise ValueError(f"key must be a str, such as a digest of the model's weights; got {key!r}")
    view_list = as_views(views)
    pieces = pieces_of(dataset, rows_per_part, alike=read is None)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    prints = [(view.name, view_fingerprint(view)) for view in view_list]
    made_by, read_by, output_by = (identity(function) for function in (model_factory, read, output))
    named = None if classes is None else tuple(np.asarray(classes).tolist())
    described = [made_by, read_by, prints, draws, variance, output_by, seed, named, key]
    mark = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    job = Job(
        model_factory, view_list, draws, batch_size, variance == "delta", output, seed, named, read,
        str(folder.resolve()), mark,
    )  # fmt: skip
    expected = {job.target(piece).name for piece in pieces}
    strangers = sorted(path.name for path in folder.glob("*.parquet") if path.name not in expected)
    if strangers:
        raise ValueError(
            f"out: {folder} holds predictions of other inputs, views, options or of another model ({strangers[0]}); "
            "choose another folder, or remove them"
        )
    waiting = [piece for piece in pieces if not job.target(piece).exists()]
    n_rows = pieces[-1].first + pieces[-1].stop - pieces[-1].start
    with Progress("inputs", n_rows, progress) as bar:
        bar.advance(n_rows - sum(piece.stop - piece.start for piece in waiting))
        if waiting:
            _run(job, waiting, workers, worker_options, address, bar)
    return Collected(folder, n_rows, len(pieces), len(pieces) - len(waiting))


def _run(
    job: Job, pieces: list[Piece], workers: int | None, options: dict[str, Any], address: str | None, bar: Progress
) -> None:
    """Stream the pieces through a pool of actors."""
    ray = connect(address)
    data = require("ray.data", "ray")
    needs = {"num_cpus": 1, **options}
    remote_class(ray, Collector, needs)  # says what is wrong with them
    size = min(workers or max(int(ray.cluster_resources().get("CPU", 0)), 1), len(pieces))
    with _quiet(data.DataContext.get_current()):
        rows = data.from_items([{"piece": json.dumps(piece)} for piece in pieces], override_num_blocks=len(pieces))
        done = rows.map_batches(
            Collector,
            batch_size=1,
            fn_constructor_args=(_packed(job),),
            compute=data.ActorPoolStrategy(size=size),
            **needs,
        )
        try:
            for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
                for n_rows, told in zip(batch["rows"], batch["failure"], strict=True):
                    if told:
                        failure = Failure.from_json(str(told))
                        raise failure.error() from WorkerError(failure.trace)
                    bar.advance(int(n_rows))
        except ray.exceptions.RayError as error:
            raise of_ray(error) from WorkerError(str(error))


def _packed(job: Job) -> bytes:
    """A job to be sent; it is unpacked where a failure can be told in words."""
    try:
        return bytes(require("ray.cloudpickle", "ray").dumps(job))
    except (TypeError, ValueError, AttributeError, PicklingError) as error:
        raise ValueError(
            f"model_factory, read and views are sent to the workers, and one of them cannot be: {error}. Let "
            "model_factory make what it needs"
        ) from error


@contextmanager
def _quiet(context: Any) -> Any:
    """Ray Data without bars and reports of its own."""
    logger = logging.getLogger("ray.data")
    before = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        logger.setLevel(before[1])
