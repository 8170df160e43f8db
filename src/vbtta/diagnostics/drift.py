"""Do incoming views still look like those of calibration time? No labels needed."""

__all__ = ["Drift", "DriftCheck", "drift_of", "view_signals"]

from typing import NamedTuple

import numpy as np

from vbtta.diagnostics.normality import holm
from vbtta.labels import Array
from vbtta.policy import Policy
from vbtta.predictions import CategoricalPrediction, ViewPredictions

_NOTABLE = 0.1  # standard deviations: smaller shifts are found in large samples, and matter to nobody


class DriftCheck(NamedTuple):
    """One signal, then and now."""

    signal: str
    reference: float  # mean at calibration time
    incoming: float  # mean now
    shift: float  # difference in standard deviations of calibration time
    p_value: float  # Kolmogorov-Smirnov, Holm-corrected


class Drift(NamedTuple):
    """Whether incoming views differ from those of calibration time."""

    drifted: bool
    checks: tuple[DriftCheck, ...]
    n_reference: int
    n_incoming: int


def view_signals(policy: Policy, predictions: ViewPredictions) -> dict[str, Array]:
    """Signals of every input that need no label: by name, (N,) each.

    Classes: confidence of the prediction, weight of the views that vote for the predicted class, mutual information
    of label and view. Numbers: predicted standard deviation, and the views' disagreement (weighted standard deviation
    of their outputs), both on average over outputs, and the prediction itself.
    """
    prediction = policy.predict(predictions)
    used = [k for k in range(len(policy.names)) if policy.weights[k] > 0]
    outputs = np.asarray(predictions.select([policy.names[k] for k in used]).mean, dtype=np.float64)  # (N, K, C)
    weights = policy.weights[used]
    if isinstance(prediction, CategoricalPrediction):
        chosen = prediction.proba.argmax(axis=1)
        return {
            "confidence": prediction.proba.max(axis=1),
            "agreement": (outputs.argmax(axis=2) == chosen[:, None]) @ weights,
            "mutual information": prediction.mutual_information,
        }
    centre = np.einsum("k,nkc->nc", weights, outputs)
    between = np.sqrt(np.einsum("k,nkc->nc", weights, (outputs - centre[:, None]) ** 2))
    signals = {"predicted deviation": np.sqrt(prediction.variance).mean(axis=1), "disagreement": between.mean(axis=1)}
    for c in range(prediction.mean.shape[1]):
        signals["prediction" if prediction.mean.shape[1] == 1 else f"prediction {c}"] = prediction.mean[:, c]
    return signals


def drift_of(policy: Policy, reference: ViewPredictions, incoming: ViewPredictions, *, level: float = 0.01) -> Drift:
    """Compare incoming views with those of calibration time, signal by signal.

    Drift is reported where a signal's distribution differs at the level, corrected for their number, and its mean has
    moved by a tenth of a standard deviation or more, or its spread by as much.
    """
    from scipy import stats

    before, now = view_signals(policy, reference), view_signals(policy, incoming)
    p_values = holm([stats.ks_2samp(before[name], now[name], method="asymp").pvalue for name in before])
    checks, drifted = [], False
    for (name, then), p_value in zip(before.items(), p_values, strict=True):
        scale = max(float(then.std()), 1e-12 * max(1.0, float(np.abs(then).max())))
        shift = float(now[name].mean() - then.mean()) / scale
        wider = abs(float(now[name].std()) / scale - 1)
        checks.append(DriftCheck(name, float(then.mean()), float(now[name].mean()), shift, float(p_value)))
        drifted |= bool(p_value < level) and max(abs(shift), wider) >= _NOTABLE
    return Drift(drifted, tuple(checks), len(reference), len(incoming))
