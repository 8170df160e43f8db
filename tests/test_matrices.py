"""Divergences and the Wishart's constants against torch and scipy."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from vbtta.inference.linalg import kl_normal, kl_wishart, wishart_log_det, wishart_log_normaliser

PRIOR = np.array([[2.0, 0.3], [0.3, 1.0]])  # V, the inverse scale
SCALES = np.array([[[3.0, -0.4], [-0.4, 5.0]], [[0.5, 0.1], [0.1, 0.2]]])  # V_k
DOF, PRIOR_DOF = np.array([7.0, 4.5]), 4.0


def test_divergence_from_a_normal_prior_whose_precision_is_beta(rng: np.random.Generator) -> None:
    mean, root, beta = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2)), 0.3
    covariance = root @ np.swapaxes(root, 1, 2) + 0.1 * np.eye(2)
    normal = torch.distributions.MultivariateNormal
    prior = normal(torch.zeros(2, dtype=torch.float64), precision_matrix=beta * torch.eye(2, dtype=torch.float64))
    expected = torch.distributions.kl_divergence(normal(torch.tensor(mean), torch.tensor(covariance)), prior)
    np.testing.assert_allclose(kl_normal(mean, covariance, beta), expected.numpy(), rtol=1e-10)


def test_a_wishart_with_its_inverse_scale_has_scipys_density() -> None:
    place = np.array([[1.3, 0.2], [0.2, 0.8]])  # Lambda
    for dof, V in zip(DOF, SCALES, strict=True):
        log_density = wishart_log_normaliser(dof, np.linalg.slogdet(V)[1], 2)
        log_density += 0.5 * (dof - 3) * np.linalg.slogdet(place)[1] - 0.5 * np.trace(V @ place)
        assert log_density == pytest.approx(stats.wishart(dof, np.linalg.inv(V)).logpdf(place))


def test_divergence_of_wisharts_is_scipys_entropy_and_the_expected_log_prior() -> None:
    found = kl_wishart(DOF, SCALES, PRIOR_DOF, PRIOR)
    prior = stats.wishart(PRIOR_DOF, np.linalg.inv(PRIOR))
    for kl, dof, V in zip(found, DOF, SCALES, strict=True):
        mean = dof * np.linalg.inv(V)
        log_det = special.digamma([0.5 * dof, 0.5 * (dof - 1)]).sum() + 2 * np.log(2) - np.linalg.slogdet(V)[1]
        assert wishart_log_det(dof, np.linalg.slogdet(V)[1], 2) == pytest.approx(log_det)
        # the log prior is linear in Lambda and its log determinant
        expected = prior.logpdf(mean) + 0.5 * (PRIOR_DOF - 3) * (log_det - np.linalg.slogdet(mean)[1])
        assert kl == pytest.approx(-stats.wishart(dof, np.linalg.inv(V)).entropy() - expected)
