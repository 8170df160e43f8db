"""Divergences and the Wishart's constants against torch and scipy."""

import numpy as np
import pytest
from scipy import special, stats

from vbtta.inference.linalg import inverse_and_log_det, kl_wishart, wishart_log_det, wishart_log_normaliser

PRIOR = np.array([[2.0, 0.3], [0.3, 1.0]])  # V, the inverse scale
SCALES = np.array([[[3.0, -0.4], [-0.4, 5.0]], [[0.5, 0.1], [0.1, 0.2]]])  # V_k
DOF, PRIOR_DOF = np.array([7.0, 4.5]), 4.0


def test_a_wishart_with_its_inverse_scale_has_scipys_density() -> None:
    place = np.array([[1.3, 0.2], [0.2, 0.8]])  # Lambda
    for dof, V in zip(DOF, SCALES, strict=True):
        log_density = wishart_log_normaliser(dof, np.linalg.slogdet(V)[1], 2)
        log_density += 0.5 * (dof - 3) * np.linalg.slogdet(place)[1] - 0.5 * np.trace(V @ place)
        assert log_density == pytest.approx(stats.wishart(dof, np.linalg.inv(V)).logpdf(place))


def test_divergence_of_wisharts_is_scipys_entropy_and_the_expected_log_prior() -> None:
    divergences = kl_wishart(DOF, SCALES, PRIOR_DOF, PRIOR)
    prior = stats.wishart(PRIOR_DOF, np.linalg.inv(PRIOR))
    for kl, dof, V in zip(divergences, DOF, SCALES, strict=True):
        mean = dof * np.linalg.inv(V)
        log_det = special.digamma([0.5 * dof, 0.5 * (dof - 1)]).sum() + 2 * np.log(2) - np.linalg.slogdet(V)[1]
        assert wishart_log_det(dof, np.linalg.slogdet(V)[1], 2) == pytest.approx(log_det)
        # the log prior is linear in Lambda and its log determinant
        expected = prior.logpdf(mean) + 0.5 * (PRIOR_DOF - 3) * (log_det - np.linalg.slogdet(mean)[1])
        assert kl == pytest.approx(-stats.wishart(dof, np.linalg.inv(V)).entropy() - expected)


def test_matrices_that_rounding_made_singular_are_inverted() -> None:
    """Columns whose sizes differ by eight orders, two of them equal: NumPy's inverse has no finite number."""
    columns = np.ones((3, 3)) * [1e8, 1e8, 1.0]
    matrix = columns.T @ columns + np.diag([0.0, 0.0, 0.1])
    inverse, log_det = inverse_and_log_det(matrix)
    assert np.isfinite(inverse).all()
    assert np.isfinite(log_det)
    assert (np.linalg.eigvalsh(inverse) >= -1e-12).all()
