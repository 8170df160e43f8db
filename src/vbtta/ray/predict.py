"""Predictions of a policy for a Ray data set."""

import hashlib
from typing import Any

import numpy as np

from vbtta._support.checks import require, takes, whole_number
from vbtta.adapters.base import Output, as_predictor
from vbtta.augment.foreign import as_views
from vbtta.collect import check_options
from vbtta.data.files import columns_of, parquet_files
from vbtta.policy import Policy
from vbtta.ray.cluster import check_workers, connect
from vbtta.ray.collect import ROW_IDS, Job, read_inputs


def predict(
    predictor_factory: Any, dataset: Any, views: Any, policy: Policy, *,
    draws: int = 1, batch_size: int = 256, output: Output = None, level: float = 0.9, seed: int = 0,
    workers: int | None = None, worker_options: dict[str, Any] | None = None, address: str | None = None,
) -> Any:  # fmt: skip
    """Predict the rows of a Ray data set: views, network and policy, batch by batch on a pool of workers.

    Parameters
    ----------
    dataset : ray.data.Dataset, or path or list of paths of parquet files
        Rows as :func:`vbtta.ray.collect_views` reads them. `instance` holds ids; stochastic views draw by them.
    views : list of views
        Those that the policy uses must be among them; no others are computed.
    level : float
        Of the intervals of a regression.
    predictor_factory, draws, batch_size, output, seed, workers, worker_options, address
        As in :func:`vbtta.ray.collect_views`; draws, output and seed as in the fit.

    Returns
    -------
    ray.data.Dataset
        Lazy: computed when it is read. The rows without `image` or `inputs`, with the columns of the command `vbtta
        predict`: `label`, `proba_<class>`, `entropy` and `mutual_information`, or `mean`, `std`, `lower` and `upper`.
    """
    check_options(draws, 0, None)
    batch_size, seed = whole_number("batch_size", batch_size, 1), whole_number("seed", seed, 0)
    workers, options = check_workers(workers, worker_options)
    takes("predictor_factory", predictor_factory)
    by_name = {view.name: view for view in as_views(views)}
    missing = [name for name in policy.used_names if name not in by_name]
    if missing:
        raise ValueError(f"the policy needs the views {missing}, which are not among {list(by_name)}")
    used = [by_name[name] for name in policy.used_names]
    ray, data = connect(address), require("ray.data", "ray")
    rows = dataset if hasattr(dataset, "map_batches") else data.read_parquet(parquet_files(dataset))
    drawing, schema = [view.name for view in used if view.stochastic], rows.schema()
    columns = schema.names if schema else ["instance"]  # without rows there is no schema
    own = ("mean", "std", "lower", "upper") if policy.task == "regression" else ("label", "entropy")
    for name in set(columns) & set(own):
        raise ValueError(f"dataset has the column {name!r}, which predictions have, too: rename it, or leave it out")
    if drawing and not set(ROW_IDS) & set(columns):
        raise ValueError(f"dataset needs a column 'instance', by which {', '.join(drawing)} draw; number the rows")
    size = workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
    job = Job(predictor_factory, used, draws, batch_size, False, output, seed, None, "", "")
    return rows.map_batches(
        Worker, batch_size=batch_size, batch_format="pyarrow",
        compute=data.ActorPoolStrategy(min_size=1, max_size=size),
        fn_constructor_args=(job, policy, level), **options,
    )  # fmt: skip


class Worker:
    """A predictor and a policy, which turn a table of inputs into one of predictions."""

    def __init__(self, job: Job, policy: Policy, level: float) -> None:
        self.job, self.policy, self.level = job, policy, level
        self.predictor = as_predictor(job.factory(), job.output)

    def __call__(self, table: Any) -> Any:
        """The rows of a batch with the policy's prediction, instead of columns of the same names."""
        if not len(table):
            return table
        ids = next(iter(columns_of(table, ROW_IDS).values()), np.arange(len(table)))
        if "instance" in table.column_names and table["instance"].null_count:
            raise ValueError("column 'instance' of dataset has gaps, and ids are needed to draw; number the rows")
        if ids.dtype.kind not in "iu" or ids.min(initial=0) < 0:  # rows draw by digests of their ids
            digests = [hashlib.sha256(str(name).encode()).digest()[:7] for name in ids.tolist()]
            ids = np.array([int.from_bytes(digest) for digest in digests], dtype=np.int64)
        with self.predictor.ready():
            predictions = self.job.collect(self.predictor, read_inputs(table), ids.astype(np.int64))
        arrow = require("pyarrow", "ray")
        columns = self.policy.predict(predictions).columns(self.level)
        table = table.drop_columns([name for name in table.column_names if name in ("image", "inputs", *columns)])
        for name, values in columns.items():
            table = table.append_column(name, arrow.array(values))
        return table
