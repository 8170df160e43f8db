"""What several test files share."""

import os

import numpy as np
import pytest
from hypothesis import settings

from vbtta import ViewPredictions

# A busy machine is no failure, and a change is judged by the same examples as the one before it; elsewhere they vary.
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unhurried")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240613)


@pytest.fixture
def helpful(rng: np.random.Generator) -> tuple[ViewPredictions, np.ndarray]:
    """Numbers under three views that are better together than alone, and labels."""
    truth = rng.normal(size=300)
    f = truth[:, None] + 0.5 * rng.normal(size=(300, 3))
    return ViewPredictions(f[:, :, None], names=["identity", "flip", "shift"]), truth + 0.1 * rng.normal(size=300)
