"""Predictions for all inputs under all views, batch by batch."""

from __future__ import annotations

__all__ = ["Collector", "check_options", "collect_views", "measure_cost"]

import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from vbtta._support.checks import is_tensor, printable, whole_number
from vbtta._support.fingerprints import prediction_fingerprint
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, Progress, batches_of, copy_of, n_rows_of
from vbtta.adapters.base import Output, Predictor, as_predictor
from vbtta.augment.arrays import GaussianNoise
from vbtta.augment.base import Augmentation, apply_view, part_of, reorder_classes
from vbtta.augment.foreign import as_views
from vbtta.augment.keypoints import Keypoints
from vbtta.data.labels import Array, by_id, index_of
from vbtta.data.predictions import ViewPredictions, same_table


def collect_views(
    predictor: Any, inputs: Any, views: Any, *,
    draws: int = 1, keep_draws: int = 0, batch_size: int = 256, variance: Literal["delta"] | None = None,
    output: Output = None, key: Any = None, seed: int = 0, progress: bool = False,
    ids: ArrayLike | None = None, classes: ArrayLike | None = None, groups: ArrayLike | None = None,
) -> ViewPredictions:  # fmt: skip
    """Predict every input under every view.

    Parameters
    ----------
    predictor, output : object; str, int or callable, optional
        What :func:`vbtta.adapters.as_predictor` takes: a torch module, a fitted estimator, an ONNX Runtime session, a
        function; and which part of its return value. Classifiers must give logits (or log probabilities).
    inputs : array, tensor, table, list of rows; dict or tuple of those; DataLoader or iterator of batches
        N rows in all. Rows of a list may be texts, images or anything that views and predictor take. Data sets of
        Hugging Face are dicts, or give them. Labels in the batches of a DataLoader are not used.
    views : list of views
        What :func:`vbtta.augment.as_views` takes.
    draws : int
        Draws of every stochastic view, M; the result has their mean and, from two on, their variance.
    keep_draws : int
        Number of inputs, from the first, whose single draws are kept as well (`ViewPredictions.draws`).
    batch_size : int
        Inputs of a batch, unless `inputs` come in batches. It does not change the result.
    variance : {"delta"}, optional
        "delta" takes the variance from the derivative of a torch module instead of from the spread of the draws; the
        mean is still that of the draws. Gaussian noise needs one draw, other views need two.
    key : optional
        The part of a dict, or column of a table, that views work on, such as "pixel_values"; see
        :func:`vbtta.augment.apply_view`.
    seed : int
        Determines the draws, together with the view's name, the draw and the row.
    progress : bool
        Whether to write progress to the standard error stream.
    ids, classes, groups : arrays, optional
        Identifiers of the N inputs (by default the index of a pandas table), the classes of the C outputs (estimators
        and networks of transformers know theirs), and which inputs belong together.
    """
    check_options(draws, keep_draws, variance)
    seed = whole_number("seed", seed, 0)
    view_list = as_views(views)
    adapted = as_predictor(predictor, output)
    batches, n_rows = batches_of(inputs, batch_size)
    indexed = hasattr(inputs, "iloc") and inputs.index.nlevels == 1 and inputs.index.is_unique
    index = index_of(inputs, "inputs") if indexed else None
    groups = by_id(groups, index, "groups", "the inputs") if same_table(ids, groups) else groups
    ids = index if ids is None else by_id(ids, index, "ids", "the inputs")
    collector = Collector(adapted, view_list, draws, seed, delta=variance == "delta", keep_draws=keep_draws, key=key)
    gathered: tuple[list[Array], list[Array], list[Array]] = ([], [], [])
    start = 0
    with Progress("inputs", n_rows, progress) as bar, adapted.ready():
        for batch in batches:
            parts = collector.collect(batch, start)
            for arrays, part in zip(gathered, parts, strict=True):
                if part is not None:
                    arrays.append(part)
            start += len(parts[0])
            bar.advance(len(parts[0]))
    if n_rows is not None and start != n_rows:
        raise ValueError(f"inputs have {n_rows} rows but gave {start}")
    means, variances, single_draws = gathered
    mean = np.concatenate(means)
    means.clear()  # at most twice the result is in memory
    of_draws, kept = (np.concatenate(parts) if parts else None for parts in (variances, single_draws))
    return ViewPredictions(mean, of_draws, ids=ids, groups=groups, draws=kept, **collector.description(classes))


def measure_cost(
    predictor: Any, inputs: Any, views: Any, *, draws: int = 1, output: Output = None, key: Any = None, repeats: int = 5
) -> dict[str, float]:
    """Milliseconds of every view on one batch, augmentation included: medians, as `select_views(cost=...)` takes them.

    Arguments are those of :func:`collect_views`; of inputs that come in batches the first is used. Views take turns,
    `repeats` times, so that a disturbance affects all alike.
    """
    repeats = whole_number("repeats", repeats, 1)
    view_list = as_views(views)
    adapted = as_predictor(predictor, output)
    batches, _ = batches_of(inputs, sys.maxsize)
    times: dict[str, list[float]] = {view.name: [] for view in view_list}
    collector = Collector(adapted, view_list, draws, 0, key=key)
    with adapted.ready():
        batch = adapted.prepare(next(batches))
        rows = np.arange(n_rows_of(batch))
        for run in range(repeats + 1):
            for view in view_list:
                begin = time.perf_counter()
                collector.moments(view, batch, rows)
                if run > 0:  # the first call may compile or allocate
                    times[view.name].append(1000 * (time.perf_counter() - begin))
    return {name: float(np.median(values)) for name, values in times.items()}


def check_options(draws: int, keep_draws: int, variance: str | None) -> None:
    """Refuse invalid options of a collection."""
    whole_number("draws", draws, 1)
    whole_number("keep_draws", keep_draws, 0)
    if variance not in (None, "delta"):
        raise ValueError(f"variance must be None (over the draws) or 'delta'; got {variance!r}")


@dataclass
class Collector:
    """Predicts one batch after the other under every view, and checks the outputs."""

    predictor: Predictor
    views: list[Augmentation]
    draws: int
    seed: int
    delta: bool = False
    keep_draws: int = 0
    n_outputs: int | None = None
    key: Any = None

    def description(self, classes: ArrayLike | None) -> dict[str, Any]:
        """Names, classes and fingerprints for the predictions."""
        kind, own = self.predictor.output_kind, self.predictor.classes
        if classes is None and own is not None and len(own) == self.n_outputs:  # `output` may have chosen other outputs
            classes = own
        return {
            "names": [view.name for view in self.views],
            "classes": classes,
            "fingerprints": {view.name: prediction_fingerprint(view, kind, self.draws) for view in self.views},
        }

    def collect(self, inputs: Any, first: int | Array) -> tuple[Array, Array | None, Array | None]:
        """Mean and variance (n, K, C) of a batch, and single draws (b, K, M, C) of the rows that keep them."""
        batch = self.predictor.prepare(inputs)
        if self.n_outputs is None:
            self._warn_of_clipping(batch)
        rows = first if isinstance(first, np.ndarray) else np.arange(first, first + n_rows_of(batch))
        means, variances, draws = zip(*(self.moments(view, batch, rows) for view in self.views), strict=True)
        mean = np.stack(means, axis=1)
        variance = None
        if self.delta or (self.draws > 1 and any(view.stochastic for view in self.views)):
            zero = np.zeros_like(means[0])
            variance = np.stack([zero if part is None else part for part in variances], axis=1).astype(mean.dtype)
        return mean, variance, None if draws[0] is None else np.stack(draws, axis=1)

    def moments(self, view: Augmentation, batch: Batch, rows: Array) -> tuple[Array, Array | None, Array | None]:
        """Mean (B, C), variance and single draws (b, M, C) of one view."""
        n_draws = self.draws if view.stochastic else 1
        keep = max(0, min(self.keep_draws - int(rows[0]), len(rows))) if len(rows) else 0
        mean = deviation = np.zeros(())
        single_draws: list[Array] = []
        for m, augmented in enumerate(self._draw(view, batch, rows, n_draws)):
            outputs = self.outputs_of(view, batch, augmented, rows, m)
            single_draws.append(outputs[:keep].copy())
            if m == 0:
                mean, deviation, dtype = outputs, np.zeros(outputs.shape), outputs.dtype
                continue
            change = outputs.astype(np.float64) - mean  # Welford's running moments: one pass, no cancellation
            mean = mean + change / (m + 1)
            deviation = deviation + change * (outputs - mean)
        mean = mean.astype(dtype, copy=False)
        self.check(mean, rows, printable(view.name))
        variance: Array | None = None
        if self.delta:
            variance = np.asarray(reorder_classes(view, self._delta_variance(view, batch, rows, mean.shape)))
        elif n_draws > 1:
            variance = deviation / (n_draws - 1)
        repeats = self.draws if n_draws == 1 else 1
        return mean, variance, np.stack(single_draws * repeats, axis=1) if keep else None

    def outputs_of(self, view: Augmentation, batch: Batch, augmented: Batch, rows: Array, draw: int) -> Array:
        """Outputs (B, C) for one draw of a view."""
        outputs = self.predict(batch, augmented)
        if outputs.ndim != 2:
            raise ValueError(f"the model returns maps, of shape {outputs.shape}: use collect_dense, or output=")
        return np.asarray(reorder_classes(view, outputs))

    def predict(self, batch: Batch, augmented: Batch) -> Array:
        """The predictor's outputs; it may work in place, so it gets a copy of the batch itself."""
        return self.predictor(copy_of(augmented) if augmented is batch else augmented)

    def streams(self, view: Augmentation, draw: int, rows: Array) -> RowStreams | None:
        """Streams of one draw, from their beginning; None for a deterministic view."""
        return RowStreams(self.seed, view.name, draw, rows) if view.stochastic else None

    def _draw(self, view: Augmentation, batch: Batch, rows: Array, n_draws: int) -> Iterator[Batch]:
        """The augmented batches; made from their streams again rather than kept."""
        for m in range(n_draws):
            yield apply_view(view, batch, self.streams(view, m, rows), self.key)

    def check(self, mean: Array, rows: Array, name: str) -> None:
        """Refuse outputs that are not finite, and a number of outputs that changes."""
        if not np.isfinite(mean).all():
            row, c = (int(index) for index in np.argwhere(~np.isfinite(mean))[0])
            remedy = "leave out the view or the input, or give log probabilities a floor (adapters.log_probability)"
            raise ValueError(f"the model returned {mean[row, c]} for input {rows[row]} under view {name}; {remedy}")
        if self.n_outputs not in (None, mean.shape[1]):
            raise ValueError(f"the model must return the same number of outputs; got {mean.shape[1]} under view {name}")
        self.n_outputs = mean.shape[1]

    def _warn_of_clipping(self, batch: Batch) -> None:
        """Warn where views of colours are for images of another range than those of the first batch."""
        ranges = {view.name: limits for view in self.views if (limits := getattr(view, "value_range", None))}
        if not ranges or not hasattr(images := part_of(batch, self.key), "min"):
            return
        low, high = float(images.min()), float(images.max())
        clipped = [name for name, limits in ranges.items() if low < limits[0] - 1e-3 or high > limits[1] + 1e-3]
        if clipped:
            least, most = ranges[clipped[0]]
            warnings.warn(
                f"inputs are between {low:.4g} and {high:.4g}, and {', '.join(clipped)} clip them to {least:.4g} to "
                f"{most:.4g}: give these views mean= and std= of the normalisation, or inputs between 0 and 1",
                stacklevel=4,
            )

    def _delta_variance(self, view: Augmentation, batch: Batch, rows: Array, shape: tuple[int, ...]) -> Array:
        """Delta-method variance of a torch module: (B, C)."""
        outputs = getattr(self.predictor, "outputs", None)
        if outputs is None or not is_tensor(batch) or not batch.is_floating_point():
            raise ValueError("variance='delta' needs a torch module and a floating-point tensor as input; or use draws")
        if not view.stochastic:
            return np.zeros(shape)
        if isinstance(view, Keypoints):
            raise ValueError("variance='delta' knows nothing of keypoints; use draws= for the variance over draws")
        from vbtta.adapters.torch import delta_variance, noise_variance

        if isinstance(view, GaussianNoise) and view.clip is None:
            return np.asarray(noise_variance(outputs, batch, view.std).cpu().numpy())
        if self.draws < 2:
            raise ValueError(f"variance='delta' needs draws of view {view.name} for its spread: use draws=2 or more")
        centre: Any = sum(self._draw(view, batch, rows, self.draws)) / self.draws
        return np.asarray(delta_variance(outputs, centre, self._draw(view, batch, rows, self.draws)).cpu().numpy())
