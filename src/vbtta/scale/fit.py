"""fit_policy on a cluster: the same options, the same policy; the data stay on the workers."""

__all__ = ["fit_policy"]

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import whole_number
from vbtta.crossval import cross_validate, sampled, split
from vbtta.engines import fit_posed
from vbtta.fit import fit_source
from vbtta.infer.categorical_data import check_logits
from vbtta.infer.categorical_latent import pose_categorical_latent
from vbtta.infer.categorical_mixture import pose_categorical
from vbtta.infer.latent_fit import pose_latent
from vbtta.infer.mixture import pose_mixture
from vbtta.labels import Array, LabelSets
from vbtta.policy import Policy
from vbtta.predictions import ViewPredictions
from vbtta.scale.cluster import check_workers, connect
from vbtta.scale.data import Calibration
from vbtta.scale.label_tables import label_reader
from vbtta.scale.tables import open_sources
from vbtta.specs import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    EngineSpec,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
)


def fit_policy(
    dataset: Any,
    labels: LabelSets | ArrayLike | str | os.PathLike[str],
    *,
    task: str,
    model: ModelSpec | str = "auto",
    engine: EM | str = "auto",
    guard: bool = True,
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
    lost go to the others. Models are chosen, and the guard is checked, on 20,000 instances at most, here on the driver.

    Parameters
    ----------
    dataset : path, list of paths, or ray.data.Dataset
        What :func:`vbtta.scale.collect_views` wrote: parquet files with the columns `instance`, `mean` (K*C numbers)
        and, for heteroscedastic and probit models, `variance`; or an `.npz` file of :meth:`ViewPredictions.save`.
        Paths must be the same on all nodes.
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
    sources = open_sources(dataset, names)
    with Calibration(sources, reader, workers, worker_options) as calibration:
        remote = _Remote(calibration, task)
        return fit_source(remote, task=task, model=model, engine=engine, guard=guard, seed=seed, progress=progress)


class _Remote:
    """Predictions and labels on a cluster, as :func:`vbtta.fit.fit_source` wants them."""

    def __init__(self, calibration: Calibration, task: str) -> None:
        self.calibration, self.task = calibration, task
        self.about = calibration.about.predictions(None, np.zeros((0, calibration.about.size)), None)
        if task == "classification":
            check_logits(self.about)

    @property
    def labels(self) -> Calibration:
        """What is known of the labels."""
        return self.calibration

    @property
    def n_labelled(self) -> int:
        """N+."""
        return self.calibration.n_instances

    def fit(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int, progress: bool) -> Policy:
        """One resolved model; the data stay where they are."""
        assert isinstance(engine, EM)
        about = self.about.select(["identity"]) if alone else self.about
        problem, first = self._pose(model, ("identity",) if alone else None)
        return fit_posed(problem, first, model, engine, about, self.calibration.annotator_names, task=self.task)

    def scores(self, model: ModelSpec, engine: EngineSpec, *, alone: bool, seed: int) -> Array:
        """Held-out log scores of a sample, which is brought here once."""
        order = sampled(self.n_labelled, seed)
        places = np.sort(order)
        predictions, labels = self._sample(places, seed)
        folds = split(np.searchsorted(places, order))
        views = predictions.select(["identity"]) if alone else predictions
        return cross_validate(views, labels, model, engine, task=self.task, seed=seed, folds=folds).scores

    def _sample(self, places: Array, seed: int) -> tuple[ViewPredictions, LabelSets]:
        known = self._samples.get(seed)
        if known is None:
            layout = self.calibration.layout(self.task, views=None, with_variance=True)
            known = self._samples[seed] = self.calibration.take(places, layout)
        return known

    @cached_property
    def _samples(self) -> dict[int, tuple[ViewPredictions, LabelSets]]:
        return {}

    def _pose(self, model: ModelSpec, views: tuple[str, ...] | None) -> tuple[Any, Any]:
        source = self.calibration
        if isinstance(model, GaussianMixture):
            if model.component != "normal":
                raise ValueError(
                    f"component={model.component!r} has no closed form; fit it in memory with engine='advi'"
                )
            if model.heteroscedastic and not source.about.has_variance:
                raise ValueError(
                    "heteroscedastic=True needs the views' variance over draws, a column 'variance' of the dataset; "
                    "collect the views with draws=2 or more, or leave the option off"
                )
            continuous = source.continuous(views=views, with_variance=model.heteroscedastic)
            return pose_mixture(continuous, model, annotators=model.noise == "annotator")
        if isinstance(model, GaussianLatent):
            continuous = source.continuous(views=views, with_variance=False)
            return pose_latent(continuous, model, annotators=model.noise == "annotator")
        assert isinstance(model, CategoricalMixture | CategoricalLatent)
        assert model.noise is not None
        probit = model.link == "probit"
        noise, named = model.noise, source.named and model.noise in ("annotator", "confusion")
        with_variance = probit and source.about.has_variance
        logits = source.categorical(views=views, noise=noise, with_variance=with_variance, classes_last=probit)
        if isinstance(model, CategoricalMixture):
            return pose_categorical(logits, model, noise=noise, named=named)
        return pose_categorical_latent(logits, model, noise=noise, named=named)
