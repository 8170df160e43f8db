"""What one worker of a collection does: it keeps the model, and writes the predictions of one piece after another."""

__all__ = ["Collector", "Job"]

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.extras import require
from vbtta._support.files import atomic_path
from vbtta.augment.base import Augmentation
from vbtta.augment.fingerprint import prediction_fingerprint
from vbtta.collect import collect_rows
from vbtta.labels import Array
from vbtta.models.base import Model, Output, as_model
from vbtta.scale.failures import Failure, blame
from vbtta.scale.inputs import Piece, read_batches
from vbtta.scale.tables import About, prediction_table

_ROW_GROUP = 1 << 25  # bytes that are written at once; twice that while they are put together


@dataclass(frozen=True)
class Job:
    """What is done with every piece of the inputs."""

    factory: Callable[[], Any]
    views: list[Augmentation]
    draws: int
    batch_size: int
    delta: bool
    output: Output
    seed: int
    classes: tuple[Any, ...] | None
    read: Callable[[Any], Any] | None
    folder: str
    key: str

    def target(self, piece: Piece) -> Path:
        """Where a piece's predictions go; another model, seed or input has another name."""
        mark = hashlib.sha256(
            f"{self.key} {piece.stamp} {piece.first} {piece.start} {piece.stop}".encode()
        ).hexdigest()[:12]
        return Path(self.folder) / f"{piece.name}-{mark}.parquet"


class Collector:
    """An actor of the pool: a model that stays.

    Parameters
    ----------
    packed : bytes
        The job, unpacked by the first call, whose answer can say what is wrong with it.
    """

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.job: Job | None = None
        self.model: Model | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Work on pieces; their numbers of rows, and what went wrong."""
        pieces = [Piece(*json.loads(str(text))) for text in batch["piece"]]
        answers = [self._try(piece) for piece in pieces]
        return {
            "rows": np.array([piece.stop - piece.start for piece in pieces]),
            "failure": np.array(answers, dtype=object),
        }

    def _try(self, piece: Piece) -> str:
        """Work on a piece; what went wrong, or nothing."""
        where = ""
        try:
            job, model = self._ready()
            where = f"{piece.path}, rows {piece.start} to {piece.stop}"
            if not job.target(piece).exists():
                _write(job, model, piece)
        except Exception as error:  # it would fail on another worker, too; one that is lost raises nothing
            return json.dumps(Failure.of(error, where, "reading or writing"))
        return ""

    def _ready(self) -> tuple[Job, Model]:
        """The job and its model."""
        if self.job is None or self.model is None:
            with blame("unpacking model_factory, read and views"):
                self.job = require("ray.cloudpickle", "ray").loads(self.packed)
            assert self.job is not None
            with blame("model_factory"):
                self.model = as_model(self.job.factory(), self.job.output)
        return self.job, self.model


def _write(job: Job, model: Model, piece: Piece) -> None:
    """The predictions of a piece as a file."""
    seen: list[Array] = []
    with atomic_path(job.target(piece)) as path, closing(_PartFile(path, _about(job, model))) as part, model.ready():
        for first, ids, inputs in read_batches(piece, job.batch_size, job.read):
            with blame("the model or a view"):
                mean, variance = collect_rows(
                    model, inputs, job.views, first, draws=job.draws, delta=job.delta, seed=job.seed
                )
            if len(mean) != len(ids):
                raise ValueError(f"{len(ids)} rows gave {len(mean)} predictions")
            part.add(first, ids, mean, variance)
            seen.append(ids)
        found, times = np.unique(np.concatenate(seen), return_counts=True)
        if (times > 1).any():
            raise ValueError(f"instance {found[times > 1][0]} occurs more than once; number the instances anew")
        part.flush()


def _about(job: Job, model: Model) -> About:
    """What is known of the predictions before the first of them."""
    classes = job.classes
    if classes is None and model.classes is not None:
        classes = tuple(np.asarray(model.classes).tolist())
    prints = tuple(prediction_fingerprint(view, model.output_kind, job.draws) for view in job.views)
    return About(tuple(view.name for view in job.views), 0, classes, prints)


class _PartFile:
    """A parquet file of predictions that come batch by batch and are written a row group at a time."""

    def __init__(self, path: Path, about: About) -> None:
        self.path, self.about = path, about
        self.gathered: list[tuple[Array, Array, Array | None]] = []
        self.n_bytes = 0
        self.writer: Any = None

    def add(self, first: int, ids: Array, mean: Array, variance: Array | None) -> None:
        """Predictions (n, K, C) of inputs from `first` on."""
        n_outputs = mean.shape[2]
        if self.about.n_outputs not in (0, n_outputs):
            raise ValueError(
                f"the model returned {n_outputs} outputs from input {first} on and {self.about.n_outputs} before; it "
                "must always return the same number"
            )
        self.about = replace(self.about, n_outputs=n_outputs, has_variance=variance is not None)
        self.gathered.append((ids, mean, variance))
        self.n_bytes += mean.nbytes + (0 if variance is None else variance.nbytes)
        if self.n_bytes > _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        if not self.gathered:
            return
        ids, mean, variance = zip(*self.gathered, strict=True)
        spread = None if variance[0] is None else np.concatenate(variance)
        table = prediction_table(np.concatenate(ids), np.concatenate(mean), spread, self.about)
        if self.writer is None:  # hardly a number comes twice, so a dictionary takes time and room
            parquet = require("pyarrow.parquet", "ray")
            self.writer = parquet.ParquetWriter(self.path, table.schema, use_dictionary=False)
        self.writer.write_table(table)
        self.gathered, self.n_bytes = [], 0

    def close(self) -> None:
        """End the file."""
        if self.writer is not None:
            self.writer.close()
