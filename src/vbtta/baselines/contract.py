"""What every baseline shares: its views by name, its weights, and prediction from the views it needs."""

__all__ = ["Baseline", "CategoricalRule", "ContinuousRule"]

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from vbtta.baselines.pools import TEMPERATURES
from vbtta.labels import Array
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, Prediction, ViewPredictions

CategoricalRule = Callable[[Array], Array]  # logits (N, K, C) -> log probabilities (N, C)
ContinuousRule = Callable[[Array], Array]  # outputs (N, K, C) -> point predictions (N, C)


@dataclass(frozen=True, eq=False)
class Baseline:
    """A fitted aggregator; make one with :func:`vbtta.baselines.fit_baseline`.

    Attributes
    ----------
    name : str
        The method.
    task : "classification" or "regression"
    names : K strings
        The views it was fitted on.
    weights : (K,) or (K, C) array, or None
        One weight a view, or one a view and class (output); None where there are none, as for the maximum.
    used : strings
        The views it needs for a prediction.
    n_outputs : int
        C.
    temperature : float
        What log probabilities are divided by; 1 unless the name ends in "+t". Between 0.01 and 100.
    variance : (C,) array or None
        Mean squared residual of the calibration labels (regression).
    """

    name: str
    task: str
    names: tuple[str, ...]
    weights: Array | None
    used: tuple[str, ...]
    n_outputs: int
    rule: CategoricalRule | ContinuousRule
    generated_names: bool = False
    temperature: float = 1.0
    variance: Array | None = None
    classes: Array | None = None

    def __repr__(self) -> str:
        limit = f", temperature at its limit {self.temperature:g}" if self.temperature_at_limit else ""
        return f"Baseline({self.name}, {self.task}: {len(self.used)} of {len(self.names)} views{limit})"

    @property
    def temperature_at_limit(self) -> bool:
        """Whether the labels ask for a temperature beyond the range: all of them predicted, or none better than chance.

        Then the limit says little about the predictions' confidence, and more labels are needed.
        """
        return self.temperature in TEMPERATURES

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """Aggregate the views of new inputs into one predictive distribution."""
        outputs = np.asarray(self._needed(predictions).mean, dtype=np.float64)
        if self.variance is not None:
            return _gaussian(self.rule(outputs), self.variance)
        log_proba = self.rule(outputs)
        if self.temperature != 1:
            log_proba = special.log_softmax(log_proba / self.temperature, axis=1)
        classes = predictions.classes if predictions.classes is not None else self.classes
        return CategoricalPrediction(
            proba=np.exp(log_proba),
            mutual_information=_disagreement(outputs, self._pool_weights()),
            classes=np.arange(log_proba.shape[1]) if classes is None else classes,
        )

    def _needed(self, predictions: ViewPredictions) -> ViewPredictions:
        n_views = predictions.mean.shape[1]
        generated = self.generated_names or predictions.generated_names
        if generated and n_views != len(self.names):
            raise ValueError(
                f"predictions have {n_views} views but {self.name!r} was fitted on {len(self.names)}; generated names "
                "cannot be matched, so name the views with ViewPredictions(names=[...])"
            )
        missing = [name for name in self.used if name not in predictions.names]
        if missing:
            raise ValueError(f"views {missing} are missing from the predictions; {self.name!r} needs {list(self.used)}")
        if predictions.mean.shape[2] != self.n_outputs:
            raise ValueError(
                f"predictions have {predictions.mean.shape[2]} outputs but {self.name!r} was fitted on {self.n_outputs}"
            )
        known, given = self.classes, predictions.classes
        if known is not None and given is not None and not np.array_equal(known, given):
            raise ValueError(
                f"predictions have classes {given.tolist()} but {self.name!r} was fitted on {known.tolist()}"
            )
        return predictions.select(self.used)

    def _pool_weights(self) -> Array:
        """Weights of the used views on the simplex, for the views' disagreement: (K,)."""
        equal = np.full(len(self.used), 1 / len(self.used))
        if self.weights is None or self.weights.ndim == 2:
            return equal
        share = self.weights[[self.names.index(name) for name in self.used]]
        return share / share.sum() if (share >= 0).all() and share.sum() > 0 else equal


def _disagreement(logits: Array, weights: Array) -> Array:
    """Mutual information of label and view when views are drawn by their weights: (N,)."""
    proba = special.softmax(logits, axis=2)
    pooled = np.einsum("k,nkc->nc", weights, proba)
    within = np.einsum("k,nkc->n", weights, special.entr(proba))
    return np.asarray(np.maximum(special.entr(pooled).sum(axis=1) - within, 0.0))


def _gaussian(mean: Array, variance: Array) -> ContinuousPrediction:
    """Normal densities of one width around point predictions (N, C)."""
    n_inputs, n_outputs = mean.shape
    return ContinuousPrediction(
        weights=np.ones((n_inputs, 1)),
        dof=np.array([np.inf]),
        location=mean[:, None],
        scale=np.broadcast_to(np.diag(variance), (n_inputs, 1, n_outputs, n_outputs)),
    )
