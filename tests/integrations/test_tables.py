"""Tables of polars as inputs."""

import numpy as np
import polars as pl
from torch import nn

from vbtta import collect_views
from vbtta.augment import GaussianNoise, Identity


def test_built_in_views_change_the_floats_of_a_polars_table():
    table = pl.DataFrame({"a": [1.0, 2.0, 3.0], "n": [4, 5, 6], "word": ["x", "y", "z"]})
    views = [Identity(), GaussianNoise(0.1)]
    outputs = collect_views(lambda batch: batch["a"] * batch["n"], table, views, batch_size=2).outputs[:, :, 0]
    np.testing.assert_array_equal(outputs[:, 0], [4.0, 10.0, 18.0])
    changed = collect_views(lambda batch: batch, np.array([[1.0], [2.0], [3.0]]), views).outputs[:, 1, 0]
    np.testing.assert_allclose(outputs[:, 1], changed * [4, 5, 6])


def test_modules_take_polars_tables_of_numbers():
    rows, network = np.random.default_rng(0).normal(size=(5, 3)), nn.Linear(3, 2)
    views = [Identity(), GaussianNoise(0.1)]
    outputs = collect_views(network, pl.DataFrame(rows), views).outputs
    np.testing.assert_array_equal(outputs, collect_views(network, rows, views).outputs)
