"""The delta method equals the variance over draws where the network is linear, and nearly so for small noise."""

import numpy as np
import pytest
import torch
from torch import nn

from vbtta.augment import GaussianNoise, Identity, Mixup
from vbtta.collect import collect_views


@pytest.fixture
def inputs():
    return np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def network(linear):
    torch.manual_seed(0)
    if linear:
        return nn.Linear(5, 3)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))


def test_equal_to_monte_carlo_for_a_linear_network_draw_by_draw(inputs):
    pool = np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32)
    views = [Identity(), Mixup(0.5, pool)]
    delta = collect_views(network(True), inputs, views, draws=8, variance="delta")
    drawn = collect_views(network(True), inputs, views, draws=8)
    np.testing.assert_allclose(delta.variance, drawn.variance, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(delta.outputs, drawn.outputs)
    assert (delta.variance[:, 0] == 0).all()  # type: ignore[index]


def test_gaussian_noise_is_exact_without_draws(inputs):
    linear = network(True)
    delta = collect_views(linear, inputs, [GaussianNoise(0.3)], variance="delta")
    exact = 0.09 * (linear.weight.detach().numpy() ** 2).sum(axis=1)
    np.testing.assert_allclose(delta.variance[:, 0], np.broadcast_to(exact, (6, 3)), rtol=1e-5)  # type: ignore[index]


def test_small_noise_on_a_curved_network(inputs):
    views = [GaussianNoise(0.01)]
    delta = collect_views(network(False), inputs, views, variance="delta")
    drawn = collect_views(network(False), inputs, views, draws=3000)
    np.testing.assert_allclose(delta.variance, drawn.variance, rtol=0.1)


def test_large_noise_on_a_curved_network_is_another_number(inputs):
    views = [GaussianNoise(2.0)]
    delta = collect_views(network(False), inputs, views, variance="delta")
    drawn = collect_views(network(False), inputs, views, draws=500)
    assert not np.allclose(delta.variance, drawn.variance, rtol=0.2)


def test_what_cannot_be_differentiated_is_refused(inputs):
    with pytest.raises(ValueError, match="needs a torch module"):
        collect_views(lambda batch: batch, inputs, [GaussianNoise(0.1)], variance="delta")
    with pytest.raises(ValueError, match="use draws=2 or more"):
        collect_views(network(True), inputs, [Mixup(0.5, inputs)], variance="delta")
    with pytest.raises(ValueError, match="'delta'"):
        collect_views(network(True), inputs, [Identity()], variance="exact")
