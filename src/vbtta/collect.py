"""A model's predictions for all inputs under all views, batch by batch."""

__all__ = ["check_options", "collect_rows", "collect_views", "measure_cost"]

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.batches import batches_of
from vbtta._support.checks import whole_number
from vbtta._support.progress import Progress
from vbtta._support.random import RowStreams
from vbtta._support.words import shown
from vbtta.augment.arrays import GaussianNoise
from vbtta.augment.base import Augmentation, apply_view, copy_of, is_tensor
from vbtta.augment.fingerprint import prediction_fingerprint
from vbtta.augment.foreign import as_views
from vbtta.labels import Array
from vbtta.models.base import Batch, Model, Output, as_model, n_rows_of
from vbtta.predictions import ViewPredictions


def collect_views(
    model: Any,
    inputs: Any,
    views: Any,
    *,
    draws: int = 1,
    keep_draws: int = 0,
    batch_size: int = 256,
    variance: Literal["delta"] | None = None,
    output: Output = None,
    seed: int = 0,
    progress: bool = False,
    ids: ArrayLike | None = None,
    classes: ArrayLike | None = None,
) -> ViewPredictions:
    """Predict every input under every view.

    Parameters
    ----------
    model : object
        What :func:`vbtta.models.as_model` takes: a torch module, a fitted estimator, an ONNX Runtime session, a
        function. It is left as it was found. Classifiers must give logits (or log probabilities).
    inputs : array, tensor, table; dict or tuple of those; DataLoader or iterator of batches
        N rows in all. Of batches that a DataLoader makes of inputs and labels only the inputs are used.
    views : list of views
        What :func:`vbtta.augment.as_views` takes.
    draws : int
        Draws of every stochastic view, M; the result has their mean and, from two on, their variance.
    keep_draws : int
        Of how many inputs, from the first, to keep the single draws as well (`ViewPredictions.draws`).
    batch_size : int
        Inputs worked on at once, where `inputs` does not come in batches. It does not change the result.
    variance : {"delta"}, optional
        "delta" takes the variance from the derivative of a torch module instead of from the spread of the draws.
        The mean is that of the draws all the same, so one draw is a noisy mean; that of Gaussian noise is all its
        variance needs, other views need two.
    output : str, int or callable, optional
        Which part of the model's return value; see :func:`vbtta.models.as_model`.
    seed : int
        Decides the draws, together with the view's name, the draw and the row: nothing else matters.
    progress : bool
        Whether to show on the standard error stream how far it is.
    ids, classes : arrays, optional
        Identifiers of the N inputs, and what the C outputs stand for (estimators know their classes).

    Returns
    -------
    ViewPredictions

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> inputs = np.arange(6.0).reshape(3, 2)
    >>> views = collect_views(lambda batch: batch.sum(axis=1), inputs, [Identity(), GaussianNoise(0.1)], draws=4)
    >>> views
    ViewPredictions(N=3, K=2, C=1: identity, noise(0.1))
    >>> views.variance[:, 0, 0]
    array([0., 0., 0.])
    """
    check_options(draws, keep_draws, variance)
    seed = whole_number("seed", seed, 0)
    view_list = as_views(views)
    adapted = as_model(model, output)
    batches, n_rows = batches_of(inputs, batch_size)
    spread = variance == "delta" or (draws > 1 and any(view.stochastic for view in view_list))
    store = _Store(n_rows, spread)
    kept: list[Array] = []
    start = 0
    with Progress("inputs", n_rows, progress) as bar, adapted.ready():
        for batch in batches:
            ready = adapted.prepare(batch)
            rows = np.arange(start, start + n_rows_of(ready))
            job = _Job(adapted, ready, rows, draws, seed, variance == "delta", keep_draws)
            for k, view in enumerate(view_list):
                mean, var, raw = job.run(view)
                store.put(k, len(view_list), rows, mean, var, view.name)
                if raw is not None:
                    kept.append(raw)
            start += len(rows)
            bar.advance(len(rows))
    if n_rows is not None and start != n_rows:
        raise ValueError(f"inputs have {n_rows} rows but gave {start}")
    mean, var = store.finish()
    return ViewPredictions(
        mean,
        var,
        names=[view.name for view in view_list],
        ids=ids,
        classes=adapted.classes if classes is None else classes,
        draws=_join_draws(kept, len(view_list)),
        fingerprints={view.name: prediction_fingerprint(view, adapted.output_kind, draws) for view in view_list},
    )


def collect_rows(
    model: Model, inputs: Any, views: list[Augmentation], first: int, *, draws: int, delta: bool, seed: int
) -> tuple[Array, Array | None]:
    """Mean and variance (n, K, C) of one batch, whose rows count from `first` in the whole data set."""
    batch = model.prepare(inputs)
    rows = np.arange(first, first + n_rows_of(batch))
    job = _Job(model, batch, rows, draws, seed, delta, 0)
    store = _Store(None, delta or (draws > 1 and any(view.stochastic for view in views)))
    for k, view in enumerate(views):
        mean, variance, _ = job.run(view)
        store.put(k, len(views), rows, mean, variance, view.name)
    return store.finish()


def measure_cost(
    model: Any, inputs: Any, views: Any, *, draws: int = 1, output: Output = None, repeats: int = 5
) -> dict[str, float]:
    """Milliseconds that every view takes on one batch, augmentation included: medians of repeated runs.

    Parameters
    ----------
    model, inputs, views, draws, output
        As in :func:`collect_views`; the inputs are one batch. Of those that come in batches the first is taken.
    repeats : int
        Runs of every view, in turns so that a disturbance hits all alike.

    Returns
    -------
    dict
        By view name, as `select_views(cost=...)` takes it.

    Examples
    --------
    >>> from vbtta.augment import Identity
    >>> list(measure_cost(lambda batch: batch, np.zeros((2, 1)), [Identity()]))
    ['identity']
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {repeats}")
    view_list = as_views(views)
    adapted = as_model(model, output)
    batches, n_rows = batches_of(inputs, 1)
    batch = next(batches) if n_rows is None else inputs
    times: dict[str, list[float]] = {view.name: [] for view in view_list}
    with adapted.ready():
        ready = adapted.prepare(batch)
        job = _Job(adapted, ready, np.arange(n_rows_of(ready)), draws, 0, False, 0)
        for view in view_list:  # the first call may compile or allocate
            job.run(view)
        for _ in range(repeats):
            for view in view_list:
                begin = time.perf_counter()
                job.run(view)
                times[view.name].append(1000 * (time.perf_counter() - begin))
    return {name: float(np.median(found)) for name, found in times.items()}


@dataclass(frozen=True)
class _Job:
    """One batch, to be seen through one view after the other."""

    model: Model
    batch: Batch
    rows: Array
    draws: int
    seed: int
    delta: bool
    keep_draws: int

    def run(self, view: Augmentation) -> tuple[Array, Array | None, Array | None]:
        """Mean (B, C), variance and the single draws (b, M, C) of the rows that keep them."""
        n_draws = self.draws if view.stochastic else 1
        keep = max(0, min(self.keep_draws - int(self.rows[0]), len(self.rows))) if len(self.rows) else 0
        mean = deviation = np.zeros(())
        raw: list[Array] = []
        first: Array | None = None
        for m in range(n_draws):
            seen = apply_view(view, self.batch, self.streams(view, m))
            outputs = self.model(copy_of(seen) if seen is self.batch else seen)  # (B, C); a model may work in place
            raw.append(outputs[:keep].copy())
            if first is None:
                first, mean, deviation = outputs, outputs, np.zeros(outputs.shape)
                continue
            # Welford's running moments: one pass, no cancellation
            change = outputs.astype(np.float64) - mean
            mean = mean + change / (m + 1)
            deviation = deviation + change * (outputs - mean)
        assert first is not None
        mean = mean.astype(first.dtype, copy=False)
        var: Array | None = None
        if self.delta:
            var = self.delta_of(view, n_draws, first.shape)
        elif n_draws > 1:
            var = deviation / (n_draws - 1)
        if not keep:
            return mean, var, None
        return mean, var, np.stack(raw * (self.draws if n_draws == 1 else 1), axis=1)

    def streams(self, view: Augmentation, draw: int) -> RowStreams | None:
        return RowStreams(self.seed, view.name, draw, self.rows) if view.stochastic else None

    def delta_of(self, view: Augmentation, n_draws: int, shape: tuple[int, ...]) -> Array:
        """Delta-method variance of a torch module: (B, C)."""
        outputs = getattr(self.model, "outputs", None)
        if outputs is None or not is_tensor(self.batch) or not self.batch.is_floating_point():
            raise ValueError(
                "variance='delta' differentiates the model: it needs a torch module and one floating-point tensor as "
                "input; use draws= for the variance over draws"
            )
        if not view.stochastic:
            return np.zeros(shape)
        from vbtta.delta import delta_variance, noise_variance

        if isinstance(view, GaussianNoise) and view.clip is None:
            return np.asarray(noise_variance(outputs, self.batch, view.std).cpu().numpy())
        if n_draws < 2:
            raise ValueError(
                f"variance='delta' takes the spread of view {view.name} from its draws: use draws=2 or more"
            )
        drawn = sum(self.drawn(view, n_draws)) / n_draws
        return np.asarray(delta_variance(outputs, drawn, self.drawn(view, n_draws)).cpu().numpy())

    def drawn(self, view: Augmentation, n_draws: int) -> Iterator[Any]:
        """The augmented batches, made anew from their streams rather than kept."""
        return (apply_view(view, self.batch, self.streams(view, m)) for m in range(n_draws))


class _Store:
    """Results where they are needed once: one array where the number of rows is known, else parts to be joined."""

    def __init__(self, n_rows: int | None, with_variance: bool) -> None:
        self.n_rows, self.with_variance = n_rows, with_variance
        self.parts: list[tuple[Array, Array | None]] = []

    def put(self, k: int, n_views: int, rows: Array, mean: Array, variance: Array | None, name: str) -> None:
        """Store view k of some rows."""
        if not np.isfinite(mean).all():
            row, c = (int(index) for index in np.argwhere(~np.isfinite(mean))[0])
            raise ValueError(
                f"the model returned {mean[row, c]} for input {rows[row]} under view {name}, output {c}; leave out "
                f"that view or that input, or give log probabilities a floor (output=vbtta.models.log_probability)"
            )
        if self.n_rows is None and k == 0:
            self.parts.append(self.empty(len(rows), n_views, mean))
        elif not self.parts:
            self.parts.append(self.empty(self.n_rows or 0, n_views, mean))
        means, variances = self.parts[-1]
        if mean.shape[1] != self.parts[0][0].shape[2]:
            raise ValueError(
                f"the model returned {mean.shape[1]} outputs under view {name} from input {rows[0]} on and "
                f"{means.shape[2]} before; it must always return the same number"
            )
        where = rows if self.n_rows is not None else slice(None)
        means[where, k] = mean
        if variances is not None:
            variances[where, k] = 0 if variance is None else variance

    def empty(self, n_rows: int, n_views: int, like: Array) -> tuple[Array, Array | None]:
        shape = (n_rows, n_views, like.shape[1])
        return np.empty(shape, like.dtype), np.empty(shape, like.dtype) if self.with_variance else None

    def finish(self) -> tuple[Array, Array | None]:
        """Mean and variance (N, K, C); parts are let go as they are copied."""
        if len(self.parts) == 1:
            return self.parts.pop()
        total = sum(len(mean) for mean, _ in self.parts)
        means, variances = self.empty(total, self.parts[0][0].shape[1], self.parts[0][0][0])
        end = total
        while self.parts:
            mean, variance = self.parts.pop()
            means[end - len(mean) : end] = mean
            if variances is not None:
                variances[end - len(mean) : end] = variance
            end -= len(mean)
        return means, variances


def _join_draws(kept: list[Array], n_views: int) -> Array | None:
    """Draws of batches and views in turn, (b, M, C) each, as (n, K, M, C)."""
    if not kept:
        return None
    return np.concatenate([np.stack(kept[at : at + n_views], axis=1) for at in range(0, len(kept), n_views)])


def check_options(draws: int, keep_draws: int, variance: str | None) -> None:
    """Refuse options that no collection can have."""
    for name, value, least in (("draws", draws, 1), ("keep_draws", keep_draws, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {shown(value)}")
    if variance not in (None, "delta"):
        raise ValueError(f"variance must be None (over the draws) or 'delta'; got {variance!r}")
