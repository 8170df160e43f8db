"""What several test files share."""

import os

import numpy as np
import pytest
from hypothesis import settings

# A busy machine is no failure, and a change is judged by the same examples as the one before it; elsewhere they vary.
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unhurried")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240613)
