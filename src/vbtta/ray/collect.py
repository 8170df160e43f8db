"""collect_views on a cluster: parquet files of inputs, a pool of predictors, parquet files of predictions."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import require, takes, whole_number
from vbtta._support.files import atomic_path, set_aside
from vbtta._support.fingerprints import view_fingerprint
from vbtta._support.tensors import Progress
from vbtta.adapters.base import Output, Predictor, as_predictor
from vbtta.augment.base import Augmentation
from vbtta.augment.foreign import as_views
from vbtta.collect import Collector, check_options
from vbtta.data.files import columns_of, footers, open_chunks, parquet_files, prediction_table, read_predictions
from vbtta.data.images import decode_images
from vbtta.data.labels import Array, id_like
from vbtta.data.predictions import ViewPredictions
from vbtta.ray.cluster import Tasks, check_workers, connect, explained

ROW_IDS = ("instance", "id")  # columns of ids, the first that is there
_BUFFER = 1 << 18  # bytes of a column read at once; a whole group's columns may be larger than memory
_ROW_GROUP = 1 << 25  # bytes that are written at once; twice that while they are put together


class Piece(NamedTuple):
    """A row group of one input file: what one task works on."""

    path: str
    file: int  # its number
    group: int
    start: int  # row of the file
    first: int  # row of the whole data set
    n_rows: int
    stamp: str  # changes with the file


class Collected(NamedTuple):
    """Where predictions were written."""

    folder: Path
    n_instances: int
    n_parts: int
    n_reused: int  # parts of an earlier run

    def load(self) -> ViewPredictions:
        """All of them in memory."""
        return read_predictions(self.folder)


def collect_views(
    predictor_factory: Callable[[], Any], dataset: Any, views: Any, out: str | os.PathLike[str], *,
    key: str | None = None, draws: int = 1, batch_size: int = 256, variance: Literal["delta"] | None = None,
    output: Output = None, seed: int = 0, progress: bool = False, classes: ArrayLike | None = None,
    workers: int | None = None, worker_options: dict[str, Any] | None = None, address: str | None = None,
) -> Collected:  # fmt: skip
    """Predict every input under every view, on a cluster: :func:`vbtta.collect_views` for inputs of any number.

    Every row group of the input files gives one file, whole or not at all. The same call continues an earlier one that
    stopped. Draws are keyed by the row's number: the result does not depend on row groups, batches or workers.

    Parameters
    ----------
    predictor_factory : callable
        Makes the predictor, as :func:`vbtta.collect_views` takes it. It is called once on every worker.
    dataset : path or list of paths
        Parquet files, or folders of them, with a column `image` (image files, or arrays (H, W) or (H, W, channels); the
        predictor sees numbers from 0 to 1 of shape (n, channels, H, W)), a column `inputs` (lists of lists ...,
        tensors), or only numbers; and optionally `instance` or `id`, the inputs' ids, by default row numbers.
    out : path
        Folder of the predictions, on a file system that all nodes share.
    key : str
        Required: a name for the network and the version of its weights, and for `output` where it is a function.
        Finished parts are used again under the same key only.
    views, draws, batch_size, variance, output, seed, progress, classes
        As in :func:`vbtta.collect_views`.
    workers, worker_options : optional
        How many work at a time, by default one a core of the cluster; and what each needs, as `ray.remote` takes it,
        for instance ``{"num_gpus": 1}``.
    address : str, optional
        Of the cluster, as `ray.init` takes it; by default the one Ray is connected to, or this machine.

    Returns
    -------
    Collected
        Its `folder` is what :func:`vbtta.ray.fit_policy` takes.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(f"key must be a name of the network's weights, such as key='resnet50 of May'; got {key!r}")
    check_options(draws, 0, variance)
    seed = whole_number("seed", seed, 0)
    batch_size = whole_number("batch_size", batch_size, 1)
    workers, worker_options = check_workers(workers, worker_options)
    takes("predictor_factory", predictor_factory)
    view_list = as_views(views)
    pieces = pieces_of(dataset)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    prints = [(view.name, view_fingerprint(view)) for view in view_list]
    named = None if classes is None else tuple(np.asarray(classes).tolist())
    described = [key, prints, draws, variance, None if callable(output) else output, seed, named]
    mark = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    job = Job(
        predictor_factory, view_list, draws, batch_size, variance == "delta", output, seed, named,
        str(folder.resolve()), mark,
    )  # fmt: skip
    expected = {job.target(piece).name for piece in pieces}
    unexpected = sorted(path.name for path in folder.glob("*.parquet") if path.name not in expected)
    if unexpected:
        contents = f"predictions of other inputs, views, options or another key ({unexpected[0]})"
        raise ValueError(f"out: {folder} holds {contents}; choose another folder, or remove them")
    with ThreadPoolExecutor(16) as pool:
        finished = list(pool.map(lambda piece: _is_finished(job.target(piece), piece.n_rows), pieces))
    waiting = [piece for piece, done in zip(pieces, finished, strict=True) if not done]
    n_rows = pieces[-1].first + pieces[-1].n_rows
    with Progress("inputs", n_rows, progress) as bar:
        bar.advance(n_rows - sum(piece.n_rows for piece in waiting))
        if waiting:
            with explained("sending predictor_factory and views", "let predictor_factory make what it needs: "):
                packed = require("ray.cloudpickle", "ray").dumps(job)
            digest, sent = hashlib.sha256(packed).hexdigest(), connect(address).put(packed)
            calls = [(digest, sent, piece) for piece in waiting]
            for *_, piece in Tasks(workers, worker_options).finished(collect_piece, calls):
                bar.advance(piece.n_rows)
    return Collected(folder, n_rows, len(pieces), len(pieces) - len(waiting))


def _is_finished(path: Path, n_rows: int) -> bool:
    """Whether an earlier run wrote this part, with valid checksums; a damaged part is set aside."""
    if not path.exists():
        return False
    try:
        rows = [chunk.table(("instance", "outputs", "variance")).num_rows for chunk in open_chunks([path])]
        if sum(rows) != n_rows:
            raise ValueError(f"it has {sum(rows)} of {n_rows} rows")
    except ValueError as error:
        set_aside(path, error)
        return False
    return True


# -- on the workers -------------------------------------------------------------------------------


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
    folder: str
    mark: str  # digest of all that the predictions depend on, besides the inputs

    def target(self, piece: Piece) -> Path:
        """File of a piece's predictions, sorted as the rows are; another key, seed or input has another name."""
        text = f"{self.mark} {piece.stamp} {piece.first} {piece.start} {piece.n_rows}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return Path(self.folder) / f"part-{piece.file:07d}-{piece.start:012d}-{digest}.parquet"

    def collect(self, predictor: Predictor, inputs: Any, rows: Any, ids: Array | None = None) -> ViewPredictions:
        """The views of a batch; draws are keyed by rows, the first or all of them."""
        collector = Collector(predictor, self.views, self.draws, self.seed, delta=self.delta)
        outputs, variance, _ = collector.collect(inputs, rows)
        return ViewPredictions(outputs, variance, ids=ids, **collector.description(self.classes))


_made: dict[str, tuple[Job, Predictor]] = {}  # by this worker: the last job by the digest of its bytes


def collect_piece(digest: str, packed: bytes, piece: Piece) -> None:
    """Write the predictions of a piece, whole or not at all, unless they are there."""
    if digest not in _made:
        _made.clear()
        with explained("unpacking predictor_factory and views"):
            job: Job = require("ray.cloudpickle", "ray").loads(packed)
        with explained("predictor_factory"):
            _made[digest] = job, as_predictor(job.factory(), job.output)
    job, predictor = _made[digest]
    with explained("reading or writing", f"{piece.path}, rows {piece.start} to {piece.start + piece.n_rows}: "):
        if job.target(piece).exists():
            return
        with atomic_path(job.target(piece)) as path, predictor.ready():
            tables = map(prediction_table, _row_groups(job, predictor, piece))
            first = next(tables)
            # Numbers are rarely repeated: a dictionary of them would cost time and space.
            options = {"use_dictionary": False, "write_page_checksum": True}
            with require("pyarrow.parquet", "ray").ParquetWriter(path, first.schema, **options) as writer:
                for table in chain([first], tables):
                    writer.write_table(table)


def _row_groups(job: Job, predictor: Predictor, piece: Piece) -> Iterator[ViewPredictions]:
    """Predictions of a piece, as many rows at a time as are written at once."""
    batches: list[ViewPredictions] = []
    for first, ids, inputs in read_batches(piece, job.batch_size):
        with explained("the predictor or a view"):
            batches.append(job.collect(predictor, inputs, first, ids))
        if sum(batch.outputs.nbytes * (1 if batch.variance is None else 2) for batch in batches) > _ROW_GROUP:
            yield batches[0].concat(batches[1:])
            batches.clear()
    if batches:
        yield batches[0].concat(batches[1:])


# -- inputs: images, arrays, or plain columns of numbers -------------------------------------------


def pieces_of(dataset: Any) -> list[Piece]:
    """The row groups of the input files, in order; only footers are read."""
    paths = parquet_files(dataset)
    files = footers(paths, "dataset")
    names = [file.schema.to_arrow_schema().names for file in files]
    pieces: list[Piece] = []
    first = 0
    for number, (path, file, columns) in enumerate(zip(paths, files, names, strict=True)):
        if columns != names[0]:
            difference = f"{path} has the columns {', '.join(columns)}, but {paths[0]} has {', '.join(names[0])}"
            raise ValueError(f"dataset: {difference}; give all files the same ones in the same order")
        state, start = os.stat(path), 0
        stamp = f"{os.path.basename(path)} {state.st_size} {state.st_mtime_ns}"
        for group in range(file.num_row_groups):
            if n_rows := file.row_group(group).num_rows:
                pieces.append(Piece(path, number, group, start, first + start, n_rows, stamp))
                start += n_rows
        first += start
    if not pieces:
        raise ValueError(f"dataset: {dataset} holds no rows")
    return pieces


def read_batches(piece: Piece, batch_size: int) -> Iterator[tuple[int, Array, Array]]:
    """First row in the whole data set, ids and inputs of batches."""
    arrow, parquet = require("pyarrow", "ray"), require("pyarrow.parquet", "ray")
    with parquet.ParquetFile(piece.path, buffer_size=_BUFFER, pre_buffer=False) as file:
        first = piece.first
        for batch in file.iter_batches(batch_size=batch_size, row_groups=[piece.group]):
            table = arrow.Table.from_batches([batch])
            ids = next(iter(columns_of(table, ROW_IDS).values()), np.arange(first, first + len(table)))
            yield first, ids, read_inputs(table, piece.path)
            first += len(table)


def read_inputs(table: Any, where: str = "dataset") -> Array:
    """A predictor's inputs (n, ...) from a table, as :func:`collect_views` describes its columns."""
    names = table.column_names
    if "inputs" in names and "image" not in names:
        return _tensor(table["inputs"].combine_chunks(), f"column 'inputs' of {where}")
    if "image" in names:
        column = table["image"].combine_chunks()
        if hasattr(column.type, "shape") or hasattr(column.type, "value_type"):  # arrays (H, W) or (H, W, channels)
            array = _tensor(column, f"column 'image' of {where}")
            array = np.moveaxis(array if array.ndim == 4 else array[..., None], -1, 1)
            return array.astype(np.float32) / (255 if array.dtype.kind in "iu" else 1)
        files: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in column.to_pylist()]
        return decode_images(files, mode="RGB", where=where).astype(np.float32) / 255
    features = [name for name in names if name not in ROW_IDS]
    if strange := [*id_like(features), *({"label"} & set(features))]:
        raise ValueError(f"{where}: column {strange[0]!r} is no feature; rename it to 'instance' or leave it out")
    try:
        return np.stack([table[name].to_numpy().astype(np.float64) for name in features], axis=1)
    except (TypeError, ValueError):
        need = "no column 'image' or 'inputs', so all but 'instance' must be numbers"
        raise ValueError(f"{where} has {need}; it has {', '.join(names)}. Write a column 'inputs'") from None


def _tensor(column: Any, where: str) -> Array:
    """A column of tensors, or of lists of lists ..., as one array."""
    if hasattr(column, "to_numpy_ndarray"):
        return np.asarray(column.to_numpy_ndarray())
    try:
        return _stacked(column.to_numpy(zero_copy_only=False))
    except (TypeError, ValueError):
        raise ValueError(f"dataset: the arrays of {where} differ in shape or have gaps; resize or pad them") from None


def _stacked(arrays: Array) -> Array:
    """Arrays of arrays ... of numbers as one array."""
    return np.stack([_stacked(np.asarray(array)) for array in arrays]) if arrays.dtype == object else arrays
