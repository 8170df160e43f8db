"""What several test files share."""

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240613)
