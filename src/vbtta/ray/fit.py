"""fit_policy on a cluster: the same options, the same policy; the data stay on the workers."""

__all__ = ["fit_policy"]

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta.crossval import CrossValidated, cross_validate, sampled, split
from vbtta.data.files import Chunk, open_chunks, views_of_schema
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_sample, policy_of, quick_fit
from vbtta.inference.em import EM, fit_problem
from vbtta.models.base import Engine, Model, pose
from vbtta.models.parts.class_data import check_logits
from vbtta.policy import Policy
from vbtta.ray.cluster import check_workers, connect
from vbtta.ray.data import Calibration, RemoteViews
from vbtta.ray.worker import label_reader


def fit_policy(
    dataset: Any,
    labels: LabelSets | ArrayLike | str | os.PathLike[str],
    *,
    task: str,
    model: Model | str = "auto",
    engine: EM | str = "auto",
    guard: bool | Literal["hard"] = True,
    seed: int = 0,
    progress: bool = False,
    names: Sequence[str] | None = None,
    workers: int | None = None,
    worker_options: dict[str, Any] | None = None,
    address: str | None = None,
    columns_are_annotators: bool = False,
) -> Policy:
    """Fit a policy to more data than one machine holds: :func:`vbtta.fit_policy` with the data spread over a cluster.

    Every worker keeps its blocks in memory. In a step the state of the fit goes out and sums over blocks come
    back, a few kilobytes; they are added in an order that depends on the number of blocks alone, which makes the
    answer that of :func:`vbtta.fit_policy`, whatever the number of workers. The parts of a worker that is
    lost go to the others. Held-out scores, of the members of a stack and for the guard, are of 20,000 instances at
    most, here on the driver.

    Parameters
    ----------
    dataset : path, list of paths, or ray.data.Dataset
        What :func:`vbtta.ray.collect_views` wrote: parquet files with the columns `instance`, `outputs` (K*C
        numbers) and, for heteroscedastic and probit models, `variance`; or an `.npz` file of
        :meth:`ViewPredictions.save`. Paths must be the same on all nodes.
    labels : LabelSets, array or path
        Labels in memory, copied to every node once; or parquet files with `instance` and `label` (and
        `annotator`, `count`), or `instance`, `label_1`, `label_2`, ..., of which every worker reads its share.
    task, model, engine, guard, seed, progress
        As in :func:`vbtta.fit_policy`; the engine is EM, and the task regression or classification.
    names : K strings, optional
        Names of the views, where the data set does not say.
    workers : int, optional
        How many; by default one a core of the cluster.
    worker_options : dict, optional
        What every worker needs, as `ray.remote` takes it, for instance ``{"memory": 8 << 30}``.
    address : str, optional
        Of the cluster, as `ray.init` takes it; by default the one Ray is connected to, or this machine.
    columns_are_annotators : bool
        Whether the numbered columns of wide label files are always the same people.

    Returns
    -------
    Policy

    Examples
    --------
    The page "A cluster" (docs/cluster.md) fits weights to predictions that it collects, with labels in a parquet file.
    """
    if task not in ("regression", "classification"):
        raise ValueError(f"task must be 'regression' or 'classification' on a cluster; got {task!r}")
    if isinstance(engine, str) and engine == "auto":
        engine = "em"
    if engine != "em" and not isinstance(engine, EM):
        raise ValueError(
            f"engine must be 'auto', 'em' or EM(...) on a cluster; got {engine!r}. ADVI runs in memory, with "
            "ADVI(batch_size=...) on a sample: vbtta.fit_policy"
        )
    if labels is None:
        raise ValueError("labels must be given on a cluster; without any, fit in memory: vbtta.fit_policy(..., None)")
    seed = whole_number("seed", seed, 0)
    workers, worker_options = check_workers(workers, worker_options)
    connect(address)
    reader = label_reader(labels, columns_are_annotators=columns_are_annotators)
    chunks = _ray_chunks(dataset, names) if hasattr(dataset, "to_arrow_refs") else open_chunks(dataset, names)
    with Calibration(chunks, reader, workers, worker_options) as calibration:
        remote = _Remote(calibration, task)
        return fit_sample(remote, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


def _ray_chunks(dataset: Any, names: Sequence[str] | None) -> list[Chunk]:
    """Blocks of a Ray data set, which is computed once and kept in the object store."""
    ray = connect()
    refs = dataset.materialize().to_arrow_refs()
    describe = ray.remote(num_cpus=0)(lambda table: (table.num_rows, table.schema))
    blocks = [(ref, *block) for ref, block in zip(refs, ray.get([describe.remote(ref) for ref in refs]), strict=True)]
    blocks = [block for block in blocks if block[1]]
    if not blocks:
        raise ValueError("dataset: the Ray data set holds no rows")
    views = views_of_schema(blocks[0][2], names, "the Ray data set")
    firsts = np.cumsum([0, *(n_rows for _, n_rows, _ in blocks)]).tolist()
    return [Chunk("block", ref, 0, first, n, views) for (ref, n, _), first in zip(blocks, firsts[:-1], strict=True)]


class _Remote:
    """Predictions and labels on a cluster, as :func:`vbtta.fit.fit_sample` wants them."""

    def __init__(self, calibration: Calibration, task: str) -> None:
        self.calibration, self.task = calibration, task
        self._samples: dict[int, tuple[ViewPredictions, LabelSets]] = {}
        if task == "classification":
            check_logits(calibration.views)

    @property
    def labels(self) -> Calibration:
        """What is known of the labels."""
        return self.calibration

    @property
    def n_units(self) -> int:
        """N+."""
        return self.calibration.n_instances

    @property
    def names(self) -> tuple[str, ...]:
        """Of the views."""
        return self.calibration.views.names

    def settle(self, model: Model) -> Model:
        """Options that the data decide are decided where they are."""
        return model.settle(RemoteViews(self.calibration, None))

    def fit(self, model: Model, engine: Engine, *, alone: bool, seed: int, progress: bool) -> Policy:
        """One resolved model; the data stay where they are."""
        assert isinstance(engine, EM)
        views = self.calibration.views.select(["identity"]) if alone else self.calibration.views
        fit = fit_problem(*pose(model, RemoteViews(self.calibration, ("identity",) if alone else None)), engine)
        return policy_of(fit, model, engine, views, self.calibration.annotator_names)

    def scores(self, model: Model, engine: Engine, *, alone: bool, seed: int) -> CrossValidated:
        """Held-out log scores of a sample, which is brought here once a seed."""
        order = sampled(self.n_units, seed)
        places = np.sort(order)
        if seed not in self._samples:
            layout = self.calibration.layout(self.task, views=None, with_variance=True)
            self._samples[seed] = self.calibration.take(places, layout)
        predictions, labels = self._samples[seed]
        folds = split(np.searchsorted(places, order), predictions.groups)
        views = predictions.select(["identity"]) if alone else predictions
        return cross_validate(quick_fit(model, engine, seed), views, labels, seed=seed, folds=folds)
