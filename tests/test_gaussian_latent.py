"""The latent pool: a convex problem with the right solution, and intervals that cover."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from problems import posed
from vbtta import EM, GaussianLatent, GaussianMixture, LabelSets, ViewPredictions, fit_policy
from vbtta.inference import laplace
from vbtta.inference.em import ascend


def pooled(
    rng: np.random.Generator, J: int, weights: np.ndarray, noise: float, C: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    f = rng.normal(size=(J, len(weights), C))
    y = np.einsum("k,jkc->jc", weights, f) + 0.5 + noise * rng.normal(size=(J, C))
    return f, y


def test_the_mode_is_the_convex_solution() -> None:
    rng = np.random.default_rng(0)
    f, y = pooled(rng, 200, np.array([0.7, 0.3, 0.0, 0.0]), 0.5)
    problem, first = posed(
        ViewPredictions(f), LabelSets.from_array(y), GaussianLatent(shrinkage=3.0, scale="constant"), noise="none"
    )
    state = ascend(problem, first, EM(tol=1e-13)).state
    block, precision = problem.data.blocks[0], float(state.precision[0, 0])

    def energy(u: np.ndarray) -> float:
        residual = block.value[0] - u[:4] @ block.mean[0] - u[4]
        return float(
            0.5 * precision * residual @ residual
            + 1.5 * ((u[:4] - 0.25) ** 2).sum()
            + 1.5 * np.log1p(u[4] ** 2 / (2 * problem.prior.offset_scale**2))
        )

    solution = optimize.minimize(
        energy,
        np.r_[np.full(4, 0.25), 0],
        bounds=[(0, None)] * 4 + [(None, None)],
        tol=1e-15,
        options={"maxiter": 10_000},
    ).x
    np.testing.assert_allclose(np.r_[state.pool, state.offset], solution, atol=1e-4)


def test_weights_gain_and_noise_are_recovered() -> None:
    rng = np.random.default_rng(1)
    f, y = pooled(rng, 5000, 1.2 * np.array([0.6, 0.4, 0.0]), 0.3, C=2)
    policy = fit_policy(ViewPredictions(f), y[:, None], task="regression", model="latent", guard=False)
    np.testing.assert_allclose(policy.weights, [0.6, 0.4, 0.0], atol=0.02)
    assert policy.gain == pytest.approx(1.2, abs=0.03)
    variance = policy.predict(ViewPredictions(f)).covariance
    np.testing.assert_allclose(variance.mean(axis=0), 0.09 * np.eye(2), atol=0.01)


@pytest.mark.parametrize(("weights", "shared"), [((0.55, 0.35, 0.1, 0.0), 0.0), ((0.4, 0.3, 0.3), 1.0)])
def test_intervals_cover(weights: tuple[float, ...], shared: float) -> None:
    """Also near the prior's centre, where shrinkage makes the estimate, but not the truth, certain."""
    rng = np.random.default_rng(2)
    truth, n_problems = np.array(weights), 120
    hits = np.zeros(len(truth))
    for _ in range(n_problems):
        f = shared * rng.normal(size=(100, 1)) + rng.normal(size=(100, len(truth)))
        y = f @ truth + rng.normal(size=100)
        policy = fit_policy(ViewPredictions(f[:, :, None]), y, task="regression", model="latent", guard=False)
        interval = policy.weight_interval(0.9)
        assert ((interval[:, 0] <= policy.weights) & (policy.weights <= interval[:, 1])).all()
        assert (interval[:, 1] > 0).all()
        hits += (interval[:, 0] <= truth) & (truth <= interval[:, 1])
    assert (hits / n_problems >= 0.83).all()


def test_few_labels_stay_near_the_average() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(size=6)
    f = truth[:, None, None] + 0.5 * rng.normal(size=(6, 8, 1))
    policy = fit_policy(ViewPredictions(f), truth, task="regression", model="latent", guard=False)
    assert (policy.weights > 0.02).sum() >= 4
    assert np.isfinite(policy.predict(ViewPredictions(f)).variance).all()


def test_auto_takes_the_better_pool() -> None:
    """Averaging helps where errors are independent; a mixture where each label follows one view."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=600)
    independent = truth[:, None] + 0.7 * rng.normal(size=(600, 4))
    apart = 3 * rng.normal(size=(600, 2))
    y = apart[np.arange(600), rng.integers(0, 2, 600)] + 0.1 * rng.normal(size=600)
    for views, labels, expected in ((independent, truth, GaussianLatent), (apart, y, GaussianMixture)):
        policy = fit_policy(ViewPredictions(views[:, :, None]), labels, task="regression")
        assert isinstance(policy.members[int(policy.member_weights.argmax())].model, expected)
        assert policy.member_weights.max() > 0.9


@pytest.mark.parametrize("n", [20, 60, 200])
def test_uncertainty_is_that_of_the_pool_where_views_are_far_worse(n):
    """The prior of the residual variance looks at the average of the views, not at each of them."""
    rng = np.random.default_rng(n)
    truth = 2 * rng.normal(size=(n + 2000, 1))
    views = truth + 0.8 * rng.normal(size=(n + 2000, 4))
    y = views.mean(axis=1) + 0.05 * rng.normal(size=n + 2000)
    policy = fit_policy(ViewPredictions(views[:n, :, None]), y[:n], task="regression", model="latent")
    prediction = policy.predict(ViewPredictions(views[n:, :, None]))
    assert np.sqrt(prediction.variance.mean()) == pytest.approx(0.05, rel=0.25)


def test_a_pool_whose_views_are_all_offset_is_finite() -> None:
    quadratic = 1e17 * np.array([[3, 3, 1, 1, 1], [3, 3, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1.0]])
    pool, offset = laplace.solve(quadratic, np.array([0.05, 0.05, 0.0, 0.0, 0.0]), 2)
    assert np.isfinite(pool).all()
    assert np.isfinite(offset).all()


def test_a_singular_precision_of_the_offsets_is_solved() -> None:
    quadratic = np.array([[2.0, 0.5, 0.5], [0.5, 1.0, 1.0], [0.5, 1.0, 1.0]])
    pool, offset = laplace.solve(quadratic, np.array([1.0, 0.2, 0.2]), 1)
    solution = np.concatenate([pool, offset])
    np.testing.assert_allclose(quadratic[1:] @ solution, 0.2, atol=2e-3)  # a ridge makes the matrix regular


def test_variances_stay_positive_where_the_uncertainty_cancels() -> None:
    """Views that are equal: what is uncertain is how they share their weight, which changes no prediction."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(60, 1, 1))
    predictions = ViewPredictions(np.repeat(truth, 20, axis=1))
    policy = fit_policy(predictions, truth[:, 0], task="regression", model="latent", guard=False)
    direction = np.append(rng.normal(size=20), 0)
    direction[:-1] -= direction[:-1].mean()
    posterior = replace(policy.posterior, covariance=1e18 * np.outer(direction, direction))  # type: ignore[type-var]
    prediction: Any = replace(policy, posterior=posterior).predict(predictions)
    assert (prediction.variance > 0).all()
    assert np.isfinite(prediction.interval(0.9)).all()


@pytest.mark.parametrize("n", [20, 46])
def test_many_equal_views_are_fitted(n: int) -> None:
    """Non-negative least squares of SciPy before 1.15 did not end here."""
    truth = np.random.default_rng(n).normal(size=(n, 1, 1))
    predictions = ViewPredictions(np.repeat(truth, 50, axis=1))
    policy = fit_policy(predictions, truth, task="regression", model="latent", guard=False)
    np.testing.assert_allclose(policy.predict(predictions).mean, truth[:, 0], atol=1e-3)  # type: ignore[union-attr]


def test_intervals_of_groups_do_not_depend_on_a_constant_error_of_all_views() -> None:
    """The offset takes it up, in the groups' slopes as in the fit."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(30), 4)
    truth = rng.normal(size=120) + np.repeat(rng.normal(size=30), 4)
    outputs = truth[:, None] + rng.normal(size=(120, 3)) * [0.5, 0.7, 0.9]
    labels = truth + 0.3 * rng.normal(size=120) + np.repeat(0.3 * rng.normal(size=30), 4)
    exact, biased = (
        fit_policy(
            ViewPredictions((outputs + error)[:, :, None], groups=groups),
            labels,
            task="regression",
            model=GaussianLatent(scale="constant"),
            guard=False,
        ).weight_interval(0.9)
        for error in (0.0, 3.0)
    )
    np.testing.assert_allclose(exact, biased, atol=0.003)  # the prior of the offset is weak, not absent
