"""Problems for the engines alone."""

from dataclasses import replace
from typing import Any

from vbtta import LabelSets, ViewPredictions
from vbtta.models.base import InMemory, pose


def posed(predictions: ViewPredictions, labels: LabelSets, model: Any, *, noise: str) -> tuple[Any, Any]:
    """The problem of a model with a noise, and its first state."""
    return pose(replace(model, noise=noise), InMemory(predictions, labels))
