"""Student-t against normal components: held-out log density on contaminated and on clean labels, in several settings.

A mixture is itself heavy-tailed where one of its views explains nothing: that view becomes the wide component that
stray labels need, and if they are normal around anything the normal mixture is the true model. There a tie is all that
can be asked for; where every view is needed for the labels proper, or stray labels have no common width, tails pay.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from vbtta import ADVI, ConvergenceWarning, GaussianMixture, ViewPredictions, fit_policy

__all__ = ["SETTINGS", "component_gain", "families"]

Array = np.ndarray[Any, Any]

TIE = 0.01  # nats a label
SETTINGS: dict[str, dict[str, Any]] = {
    "one view": {"used": 1, "spare": 0, "tail": np.inf},
    "two views": {"used": 2, "spare": 0, "tail": np.inf},
    "two views, strays of any size": {"used": 2, "spare": 0, "tail": 1.5},
    "two views and a spare one": {"used": 2, "spare": 1, "tail": np.inf},
    "two views and a spare one, strays of any size": {"used": 2, "spare": 1, "tail": 1.5},
}


def families(quick: bool) -> dict[str, Any]:
    """Gains of Student-t over normal in nats a held-out label, averaged over problems, with standard errors."""
    results = {}
    for name, setting in SETTINGS.items():
        row: dict[str, Any] = {}
        for labels in ("contaminated", "clean"):
            share = 0.1 if labels == "contaminated" else 0.0
            gains = [component_gain(seed, share=share, **setting) for seed in range(1 if quick else 4)]
            row[labels] = {"gain": float(np.mean(gains)), "each": gains}
        row["beats_or_ties_on_contaminated"] = row["contaminated"]["gain"] > (-TIE if setting["spare"] else 0)
        row["normal_wins_or_ties_on_clean"] = row["clean"]["gain"] < TIE
        results[name] = row
    return results


def component_gain(seed: int, *, used: int, spare: int, tail: float, share: float, n_labels: int = 300) -> float:
    """Mean held-out log density under Student-t components minus that under normal ones."""
    (predictions, y), (held, held_y) = (
        _data(np.random.default_rng([seed, part]), used, spare, tail, share, n_labels) for part in (0, 1)
    )

    def score(component: Literal["normal", "student_t"]) -> float:
        engine = ADVI(steps=500, particles=4, learning_rate=0.05)
        model = GaussianMixture(component=component, noise="none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            policy = fit_policy(predictions, y, task="regression", model=model, engine=engine)
        return float(policy.predict(held).log_prob(held_y).mean())

    return score("student_t") - score("normal")


def _data(
    rng: np.random.Generator, used: int, spare: int, tail: float, share: float, n_labels: int
) -> tuple[ViewPredictions, Array]:
    """Labels follow one of the views used; a share of them strays, by normal or by heavy-tailed amounts."""
    f = rng.normal(size=(n_labels, used + spare))
    y = f[np.arange(n_labels), rng.integers(used, size=n_labels)] + 0.3 * rng.normal(size=n_labels)
    width = np.sqrt(tail / rng.chisquare(tail, size=n_labels)) if np.isfinite(tail) else np.ones(n_labels)
    stray = 4 * width * rng.normal(size=n_labels)
    return ViewPredictions(f[:, :, None]), np.where(rng.random(n_labels) < share, y + stray, y)
