"""Student-t mixtures against SciPy and direct integration."""

import numpy as np
import pytest
from scipy import integrate, stats

from vbtta.distributions import ContinuousPrediction
from vbtta.models.gaussian_mixture.posterior import laplace_nodes


@pytest.fixture
def prediction(rng: np.random.Generator) -> ContinuousPrediction:
    N, K, C = 12, 3, 2
    root = 0.5 * rng.normal(size=(N, K, C, C))
    return ContinuousPrediction(
        weights=rng.dirichlet(np.ones(K), N),
        dof=np.array([3.0, 20.0, np.inf]),
        location=rng.normal(size=(N, K, C)),
        scale=root @ root.swapaxes(2, 3) + 0.01 * np.eye(C),
    )


def _cdf(prediction: ContinuousPrediction, x: float, n: int, c: int) -> float:
    spread = np.sqrt(prediction.scale[n, :, c, c])
    return float(prediction.weights[n] @ stats.t.cdf((x - prediction.location[n, :, c]) / spread, prediction.dof))


def test_log_prob_is_scipys(prediction: ContinuousPrediction, rng: np.random.Generator) -> None:
    y = rng.normal(size=(12, 2))
    expected = [
        np.log(
            sum(
                prediction.weights[n, k]
                * (
                    stats.multivariate_normal(prediction.location[n, k], prediction.scale[n, k])
                    if np.isinf(prediction.dof[k])
                    else stats.multivariate_t(prediction.location[n, k], prediction.scale[n, k], df=prediction.dof[k])
                ).pdf(y[n])
                for k in range(3)
            )
        )
        for n in range(12)
    ]
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-10)


def test_quantiles_and_intervals_invert_the_cdf(prediction: ContinuousPrediction) -> None:
    quantiles = prediction.quantile([0.025, 0.5, 0.99])
    assert quantiles.shape == (3, 12, 2)
    for level, row in zip([0.025, 0.5, 0.99], quantiles, strict=True):
        assert _cdf(prediction, row[4, 1], 4, 1) == pytest.approx(level, abs=1e-10)
    lower, upper = prediction.interval(0.9)
    assert _cdf(prediction, upper[3, 0], 3, 0) - _cdf(prediction, lower[3, 0], 3, 0) == pytest.approx(0.9, abs=1e-10)


@pytest.mark.parametrize("far", [0.0, 5.0, 200.0])
def test_crps_is_the_integral(prediction: ContinuousPrediction, far: float) -> None:
    y = np.zeros((12, 2)) + far
    crps = prediction.crps(y)
    for n in (0, 7):
        below = integrate.quad(lambda x, n=n: _cdf(prediction, x, n, 1) ** 2, -np.inf, far, limit=400)[0]
        above = integrate.quad(lambda x, n=n: (1 - _cdf(prediction, x, n, 1)) ** 2, far, np.inf, limit=400)[0]
        assert crps[n, 1] == pytest.approx(below + above, rel=1e-6)


def test_moments_by_sampling(prediction: ContinuousPrediction, rng: np.random.Generator) -> None:
    n, size = 5, 400_000
    which = rng.choice(3, size=size, p=prediction.weights[n])
    draws = np.empty((size, 2))
    for k in range(3):
        inside = which == k
        normal = rng.multivariate_normal(np.zeros(2), prediction.scale[n, k], size=inside.sum())
        dof = prediction.dof[k]
        stretch = 1.0 if np.isinf(dof) else np.sqrt(dof / rng.chisquare(dof, size=inside.sum()))[:, None]
        draws[inside] = prediction.location[n, k] + normal * stretch
    np.testing.assert_allclose(prediction.mean[n], draws.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(prediction.covariance[n], np.cov(draws.T), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(prediction.variance, np.diagonal(prediction.covariance, axis1=1, axis2=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.quantile(1.0), "between 0 and 1"),
        (lambda p: p.interval(0), "level must be a number between 1e-06 and 0.999999; got 0"),
        (lambda p: p.log_prob(np.zeros(12)), r"y must be \(12, 2\)"),
        (lambda p: p.crps(np.full((12, 2), np.nan)), "finite"),
    ],
)
def test_bad_arguments_are_named(prediction: ContinuousPrediction, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(prediction)


def test_a_mixture_of_normals_has_the_density_of_a_laplace():
    size, share = laplace_nodes()
    x = np.array([0.5, 1.0, 3.0])[:, None]
    density = (share * np.exp(-0.5 * x**2 / size) / np.sqrt(2 * np.pi * size)).sum(axis=1)
    np.testing.assert_allclose(density, stats.laplace.pdf(x[:, 0], scale=np.sqrt(0.5)), atol=2e-4)
    np.testing.assert_allclose([share.sum(), share @ size], 1)


def test_draws_have_the_distribution_of_the_mixture(prediction: ContinuousPrediction, rng: np.random.Generator) -> None:
    draws = np.stack([prediction.draw(rng) for _ in range(2_000)])  # (draws, N, C)
    for n in range(12):
        cdf = np.array([_cdf(prediction, x, n, 1) for x in draws[:, n, 1]])
        assert stats.kstest(cdf, "uniform").pvalue > 1e-4  # of twelve tests
