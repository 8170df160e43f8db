"""A fit to a stream of blocks, none of which is kept."""

__all__ = ["StreamingFit"]

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from vbtta.engines import resolve
from vbtta.labels import Array, LabelSets
from vbtta.policy import Guard, History, Policy
from vbtta.predictions import ViewPredictions
from vbtta.scale.opening import Opening
from vbtta.scale.stream_steps import ClassStream, ContinuousStream
from vbtta.specs import EM, CategoricalMixture, GaussianMixture

_NUMBER = float | int | np.floating | np.integer
_UNCHECKED = Guard(False, False, 0.0, 0.0, "not checked: a stream cannot be held out; score a later block by hand")


class StreamingFit:
    """Fit a mixture to blocks that come one after the other; memory is for 5,000 labels at first, then for one block.

    Parameters
    ----------
    task : {"regression", "classification"}
    model : "mixture", GaussianMixture or CategoricalMixture
        What is assumed. Noise that is left open is decided by the first block.
    decay : float
        How fast the share of a new block falls, between 0.5 (excluded) and 1: small values forget the first blocks
        sooner, large ones average over more of them. A block of b labels after n has the share
        (n / b + delay)^-decay.
    delay : float
        Lowers the share of the first blocks.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> stream = StreamingFit(task="regression")
    >>> for _ in range(5):
    ...     truth = rng.normal(size=400)
    ...     views = np.stack([truth + 0.1 * rng.normal(size=400), rng.normal(size=400)], axis=1)[:, :, None]
    ...     stream = stream.partial_fit(ViewPredictions(views, names=["identity", "useless"]), truth)
    >>> stream.policy.weights.round(1)
    array([1., 0.])
    """

    def __init__(
        self,
        *,
        task: str,
        model: GaussianMixture | CategoricalMixture | str = "mixture",
        decay: float = 0.7,
        delay: float = 1.0,
    ) -> None:
        kinds: dict[str, type[Any]] = {"regression": GaussianMixture, "classification": CategoricalMixture}
        if task not in kinds:
            raise ValueError(f"task must be 'regression' or 'classification'; got {task!r}")
        if not isinstance(decay, _NUMBER) or not 0.5 < decay <= 1:
            raise ValueError(f"decay must be above 0.5 and at most 1, or the fit does not settle; got {decay!r}")
        if not isinstance(delay, _NUMBER) or not 0 <= delay < np.inf:
            raise ValueError(f"delay must be a number of at least 0; got {delay!r}")
        chosen = kinds[task]() if model == "mixture" else model
        if not isinstance(chosen, kinds[task]):
            raise ValueError(
                f"model must be 'mixture' or {kinds[task].__name__}(...) in a stream of {task} data; got {model!r}. "
                "Other models need all data: vbtta.scale.fit_policy"
            )
        if getattr(chosen, "component", "normal") != "normal":
            raise ValueError(f"component={chosen.component!r} has no closed form; a stream needs component='normal'")
        if getattr(chosen, "weights", "view") != "view":
            raise ValueError(f"weights={chosen.weights!r} cannot be streamed; use weights='view'")
        self.task, self.model = task, chosen
        self.decay, self.delay = decay, delay
        self.n_blocks = 0
        self.n_labels = 0.0  # J so far
        self._opening = Opening()
        self._fit: ContinuousStream | ClassStream | None = None
        self._views: ViewPredictions | None = None
        self._annotators: tuple[str, ...] = ()
        self._history: list[tuple[float, Array]] = []

    def partial_fit(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Self:
        """Learn from one block of instances: their predictions (the same views in every block) and labels.

        Blocks should be drawn at random, or rows be shuffled over blocks: the last ones count more than the first.
        The first 5,000 labels are kept, and fitted as one; they give units, priors and the start. People unknown to
        the first block are refused.
        """
        if not isinstance(predictions, ViewPredictions):
            raise TypeError(
                f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
            )
        labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
        labels = labels.align(len(predictions), predictions.ids)
        if not len(labels):
            raise ValueError("labels are empty: a block needs at least one label")
        model: Any = self.model if self._views is not None else resolve(self.model, labels)
        if self._views is not None:
            predictions, labels = self._matched(predictions, labels)
        opening, together = (self._opening, None) if self._opening.over else self._opening.add(predictions, labels)
        n_labels = self.n_labels + labels.total
        if together is not None:
            start: Any = ClassStream if self.task == "classification" else ContinuousStream
            self._fit = start(*together, model)
        else:
            assert self._fit is not None
            rate = (self.n_labels / labels.total + self.delay) ** -self.decay
            self._fit.step(predictions, labels, min(rate, 1.0), n_labels)
        if self._views is None:
            self.model, self._views, self._annotators = model, predictions.take(slice(0)), labels.annotator_names
        self._opening, self.n_labels = opening, n_labels
        self.n_blocks += 1
        self._history.append((self._fit.bound(self.n_labels), self._fit.weights))
        return self

    @property
    def policy(self) -> Policy:
        """What has been learned so far. Its bound is an estimate, and it has no intervals for the weights."""
        if self._fit is None or self._views is None:
            raise ValueError("nothing was fitted yet; call partial_fit with a first block")
        bounds, weights = zip(*self._history, strict=True)
        return Policy(
            task=self.task,
            names=self._views.names,
            generated_names=self._views.generated_names,
            model=self.model,
            engine=EM(max_steps=max(1, self.n_blocks), tol=0),
            posterior=self._fit.posterior(),
            history=History(np.array(bounds), np.array(weights)),
            elbo=bounds[-1],
            elbo_terms={},
            converged=False,
            n_outputs=self._views.mean.shape[2],
            classes=self._views.classes,
            fingerprints=self._views.fingerprints,
            annotator_names=self._annotators,
            guard=_UNCHECKED,
        )

    def _matched(self, predictions: ViewPredictions, labels: LabelSets) -> tuple[ViewPredictions, LabelSets]:
        """A later block with the first one's views and annotators, in its order."""
        first = self._views
        assert first is not None
        predictions = predictions.select(first.names)
        if predictions.mean.shape[2] != first.mean.shape[2]:
            raise ValueError(
                f"predictions have {predictions.mean.shape[2]} outputs, those of the first block {first.mean.shape[2]}"
            )
        if labels.annotator is None and self._annotators:
            raise ValueError("labels name no annotators, those of the first block do; name them in every block")
        if labels.annotator_names == self._annotators:
            return predictions, labels
        place = {name: number for number, name in enumerate(self._annotators)}
        strangers = [name for name in labels.annotator_names if name not in place]
        if strangers:
            raise ValueError(
                f"labels: annotator {strangers[0]!r} is not in the first block; start with one that has labels of all"
            )
        codes = np.array([place[name] for name in labels.annotator_names], dtype=np.intp)
        return predictions, replace(labels, annotator=codes[labels.annotator], annotator_names=self._annotators)
