"""The continuous mixture: the bound rises, lies below the evidence, and the answers are right."""

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from problems import posed, random_problem
from vbtta import EM, GaussianLatent, GaussianMixture, LabelSets, Policy, Stack, ViewPredictions, fit_policy
from vbtta.inference.em import ascend, extrapolated_weights
from vbtta.inference.linalg import TAIL_DOF, inverse_and_log_det
from vbtta.models.gaussian_mixture.em import MixtureProblem
from vbtta.models.gaussian_mixture.posterior import MixtureState


def never_falls(bounds: list[float]) -> bool:
    steps = np.diff(bounds)
    return bool((steps >= -1e-10 * (1 + np.abs(bounds[:-1]))).all())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_instances=st.integers(2, 100),
    n_views=st.integers(1, 8),
    n_outputs=st.integers(1, 3),
    n_columns=st.integers(1, 2),
    link=st.sampled_from(["affine", "shift"]),
    counts=st.booleans(),
    heteroscedastic=st.booleans(),
    scale=st.sampled_from(["constant", "prediction"]),
    concentration=st.sampled_from([None, 0.3, 2.0]),
    component=st.sampled_from(["normal", "student_t"]),
    edge=st.booleans(),
)
def test_the_bound_never_falls(
    seed: int,
    n_instances: int,
    n_views: int,
    n_outputs: int,
    n_columns: int,
    link: str,
    counts: bool,
    heteroscedastic: bool,
    scale: str,
    concentration: float | None,
    component: str,
    edge: bool,
) -> None:
    rng = np.random.default_rng(seed)
    predictions, labels = random_problem(
        rng,
        n_instances=n_instances,
        n_views=n_views,
        n_outputs=n_outputs,
        n_columns=n_columns,
        gaps=0.3,
        counts=counts,
    )
    options = {"heteroscedastic": heteroscedastic, "concentration": concentration, "component": component}
    spec = GaussianMixture(link=link, scale=scale, **options)  # type: ignore[arg-type]
    problem, first = posed(predictions, labels, spec, noise="none")
    if edge and n_views > 1 and concentration is None:  # start on the edge of the simplex
        weights = np.r_[0.0, rng.dirichlet(np.ones(n_views - 1))]
        first = first._replace(weights=weights)
    for accelerate in (False, True):
        ascent = ascend(problem, first, EM(max_steps=20, accelerate=accelerate))
        assert never_falls(ascent.bounds)
        assert np.isfinite(ascent.bounds).all()
        terms = problem.bound_terms(ascent.state, ascent.statistics)
        total = sum(value if name.startswith("J") else -value for name, value in terms.items())
        assert total - problem.unit_change == pytest.approx(ascent.bounds[-1], rel=1e-8, abs=1e-8)
        if edge and n_views > 1 and concentration is None:
            assert ascent.state.weights[0] == 0


def test_seven_terms_by_their_definitions(rng: np.random.Generator) -> None:
    """Every term by brute force from the densities, not from the sums the code keeps."""
    predictions, labels = random_problem(rng, n_instances=12, n_views=3, n_outputs=2, n_columns=2, counts=True)
    problem, first = posed(predictions, labels, GaussianMixture(heteroscedastic=True, scale="constant"), noise="none")
    state = ascend(problem, first, EM(max_steps=3, accelerate=False)).state
    _, sums = problem.evaluate(state)
    terms = problem.bound_terms(state, sums)
    views, prior, C = state, problem.prior, 2
    block = problem.data.blocks[0]
    instance = np.arange(block.value.shape[1]) if block.instance is None else block.instance
    log_p = np.empty((3, len(instance)))
    data_term = np.empty_like(log_p)
    for k, j in itertools.product(range(3), range(len(instance))):
        f, y = block.mean[:, k, instance[j]], block.value[:, j]
        assert block.variance is not None
        omega = 1 / (1 + block.variance[:, k, instance[j]] / prior.residual_variance)
        H = np.hstack([np.diag(f), np.eye(C)])
        r = y - f - H @ views.theta_mean[k]
        e = np.outer(r, r) + H @ views.calibration_covariance(prior.beta)[k] @ H.T
        root = np.diag(np.sqrt(omega))
        precision = views.dof[k] * np.linalg.inv(views.inverse_scale[k])
        log_det = (
            special.digamma(0.5 * (views.dof[k] - np.arange(C))).sum()
            + C * np.log(2)
            - np.linalg.slogdet(views.inverse_scale[k])[1]
        )
        data_term[k, j] = 0.5 * log_det + 0.5 * np.log(omega).sum() - 0.5 * C * np.log(2 * np.pi)
        data_term[k, j] -= 0.5 * np.trace(precision @ root @ e @ root)
        log_p[k, j] = data_term[k, j] + np.log(views.weights[k])
    p = np.exp(log_p - special.logsumexp(log_p, axis=0)) * block.repeats
    plain = p / block.repeats
    assert terms["J_S"] - problem.unit_change == pytest.approx((p * data_term).sum())
    assert terms["J_z"] == pytest.approx((p * np.log(views.weights)[:, None]).sum())
    assert terms["Pi_z"] == pytest.approx((p * np.log(plain)).sum())
    draws = np.random.default_rng(0)
    sigma, q_log, size = 0.0, 0.0, 20_000
    common = draws.multivariate_normal(views.common_mean, views.common_covariance, size=size)
    theta_log = stats.multivariate_normal(views.common_mean, views.common_covariance).logpdf(common).mean()
    typical = np.sqrt((common**2).mean(axis=0))  # where the bound on E ln t stands
    theta_prior = stats.t(TAIL_DOF, scale=prior.common_scale).logpdf(typical).sum()
    for k in range(3):  # the others by Monte Carlo under Q
        wishart = stats.wishart(views.dof[k], np.linalg.inv(views.inverse_scale[k]))
        sample = wishart.rvs(size, random_state=draws)
        sigma += stats.wishart(prior.nu, np.linalg.inv(prior.inverse_scale)).logpdf(sample.transpose(1, 2, 0)).mean()
        q_log += wishart.logpdf(sample.transpose(1, 2, 0)).mean()
        own = views.theta_covariance[k]
        offset = views.theta_mean[k] + prior.beta * (common - views.common_mean) @ own
        deviation = draws.multivariate_normal(np.zeros(2 * C), own, size=size)
        theta_prior += stats.norm(0, prior.beta**-0.5).logpdf(offset + deviation - common).sum(axis=1).mean()
        theta_log += stats.multivariate_normal(np.zeros(2 * C), own).logpdf(deviation).mean()
    assert terms["J_Sigma"] == pytest.approx(sigma, abs=0.1)
    assert terms["Pi_Sigma"] == pytest.approx(q_log, abs=0.1)
    assert terms["J_mu"] == pytest.approx(theta_prior, abs=0.1)
    assert terms["Pi_mu"] == pytest.approx(theta_log, abs=0.1)


def test_a_step_is_its_formulas_label_by_label(rng: np.random.Generator) -> None:
    """(4) to (8) with every label on its own, not from the sums the code keeps."""
    K, C = 3, 2
    predictions, labels = random_problem(rng, n_instances=12, n_views=K, n_outputs=C, n_columns=2, counts=True)
    problem, first = posed(predictions, labels, GaussianMixture(heteroscedastic=True, scale="constant"), noise="none")
    state = problem.update(first, problem.evaluate(first)[1])  # no longer uniform
    _, sums = problem.evaluate(state)
    next_state, views, prior, block = problem.update(state, sums), state, problem.prior, problem.data.blocks[0]
    assert block.instance is not None
    assert block.variance is not None
    labelled = range(len(block.instance))
    log_p = np.empty((K, len(labelled)))
    designs, residuals, roots = {}, {}, {}
    for k, j in itertools.product(range(K), labelled):
        f = block.mean[:, k, block.instance[j]]
        omega = 1 / (1 + block.variance[:, k, block.instance[j]] / prior.residual_variance)
        H, r, root = np.hstack([np.diag(f), np.eye(C)]), block.value[:, j] - f, np.diag(np.sqrt(omega))
        designs[k, j], residuals[k, j], roots[k, j] = H, r, root
        V, nu = views.inverse_scale[k], views.dof[k]
        log_det = special.digamma(0.5 * (nu - np.arange(C))).sum() + C * np.log(2) - np.linalg.slogdet(V)[1]
        gap = r - H @ views.theta_mean[k]
        square = np.outer(gap, gap) + H @ views.calibration_covariance(prior.beta)[k] @ H.T
        log_p[k, j] = np.log(views.weights[k]) + 0.5 * (log_det + np.log(omega).sum() - C * np.log(2 * np.pi))
        log_p[k, j] -= 0.5 * np.trace(nu * np.linalg.inv(V) @ root @ square @ root)
    p = special.softmax(log_p, axis=0) * block.repeats  # (8)
    np.testing.assert_allclose(sums.mass, p.sum(axis=1), rtol=1e-8)
    assert float(sums.log_evidence) == pytest.approx(block.repeats @ special.logsumexp(log_p, axis=0))
    np.testing.assert_allclose(next_state.weights, p.sum(axis=1) / block.repeats.sum(), rtol=1e-8)  # (7)
    np.testing.assert_allclose(next_state.dof, prior.nu + p.sum(axis=1), rtol=1e-8)  # (6)
    D = 2 * C  # the joint normal of theta_0 and all theta_k: its precision G and linear term
    square = views.common_mean**2 + np.diagonal(views.common_covariance)
    G, pull = np.zeros(((K + 1) * D, (K + 1) * D)), np.zeros((K + 1) * D)
    G[:D, :D] = np.diag((TAIL_DOF + 1) / (TAIL_DOF * prior.common_scale**2 + square)) + K * prior.beta * np.eye(D)
    for k in range(K):
        precision, own = views.dof[k] * np.linalg.inv(views.inverse_scale[k]), slice((k + 1) * D, (k + 2) * D)
        G[own, own], G[:D, own], G[own, :D] = prior.beta * np.eye(D), -prior.beta * np.eye(D), -prior.beta * np.eye(D)
        for j in labelled:
            weighted = p[k, j] * designs[k, j].T @ roots[k, j] @ precision @ roots[k, j]
            G[own, own] += weighted @ designs[k, j]
            pull[own] += weighted @ residuals[k, j]
    joint_mean, joint_covariance = np.linalg.solve(G, pull), np.linalg.inv(G)
    np.testing.assert_allclose(next_state.common_mean, joint_mean[:D], rtol=1e-6, atol=1e-9)  # (4)
    np.testing.assert_allclose(next_state.common_covariance, joint_covariance[:D, :D], rtol=1e-6, atol=1e-9)
    for k in range(K):
        own, V = slice((k + 1) * D, (k + 2) * D), prior.inverse_scale.copy()
        m, covariance = joint_mean[own], joint_covariance[own, own]
        np.testing.assert_allclose(next_state.theta_mean[k], m, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(next_state.calibration_covariance(prior.beta)[k], covariance, rtol=1e-6, atol=1e-9)
        for j in labelled:
            H, gap = designs[k, j], residuals[k, j] - designs[k, j] @ m
            V += p[k, j] * roots[k, j] @ (np.outer(gap, gap) + H @ covariance @ H.T) @ roots[k, j]
        np.testing.assert_allclose(next_state.inverse_scale[k], V, rtol=1e-6, atol=1e-9)  # (5), (6)


def log_marginal(residual: np.ndarray, design: np.ndarray, beta: float, nu: float, V: float) -> float:
    """ln of the integral of prod N(r | H theta, 1/Lambda) over theta (exactly) and Lambda (by quadrature)."""
    n = len(residual)
    if n == 0:
        return 0.0

    log_precision = np.linspace(-9, 12, 421)
    spectrum, axes = np.linalg.eigh(design @ design.T / beta)
    variance = np.maximum(spectrum, 0)[:, None] + np.exp(-log_precision)  # (n, grid)
    squares = ((axes.T @ residual)[:, None] ** 2 / variance).sum(axis=0)
    height = -0.5 * (squares + np.log(2 * np.pi * variance).sum(axis=0))
    height += stats.gamma(0.5 * nu, scale=2 / V).logpdf(np.exp(log_precision)) + log_precision
    return float(height.max() + np.log(integrate.simpson(np.exp(height - height.max()), x=log_precision)))


@pytest.mark.parametrize("link", ["affine", "shift"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_lies_below_the_exact_evidence(link: str, seed: int) -> None:
    """Exact by enumeration of z and quadrature over Lambda: K = 2, J = 4, both with w fixed and under a Dirichlet."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=(4, 2, 1))
    y = f[:, 0, 0] + 0.5 * rng.normal(size=4)
    for concentration in (None, 1.5):
        spec = GaussianMixture(
            link=link, concentration=concentration, scale="constant", beta=0.5, common_scale=1e-6, nu=4.0
        )  # type: ignore[arg-type]
        problem, first = posed(ViewPredictions(f), LabelSets.from_array(y), spec, noise="none")
        ascent = ascend(problem, first, EM(max_steps=100))
        block, prior, weights = problem.data.blocks[0], problem.prior, ascent.state.weights
        V = float(prior.inverse_scale[0, 0])
        marginal = {}
        for k in range(2):
            for subset in itertools.product([False, True], repeat=4):
                inside = np.array(subset)
                residual = (block.value[0] - block.mean[0, k])[inside]
                ones = np.ones(inside.sum())
                design = np.stack([block.mean[0, k][inside], ones], axis=1) if link == "affine" else ones[:, None]
                marginal[k, subset] = log_marginal(residual, design, prior.beta, prior.nu, V)
        paths = []
        for first_view in itertools.product([False, True], repeat=4):
            n = sum(first_view)
            if concentration is None:
                with np.errstate(divide="ignore"):
                    log_prior = special.xlogy(n, weights[0]) + special.xlogy(4 - n, weights[1])
            else:
                a = concentration
                log_prior = special.betaln(a + n, a + 4 - n) - special.betaln(a, a)
            paths.append(log_prior + marginal[0, first_view] + marginal[1, tuple(not x for x in first_view)])
        evidence = special.logsumexp(paths)
        assert ascent.bounds[-1] < evidence
        assert ascent.bounds[-1] > evidence - 10  # and not by a trivial margin


def test_one_view_with_known_precision_is_conjugate_regression(rng: np.random.Generator) -> None:
    f, sd = rng.normal(size=60), 0.4
    y = 1.5 + 0.7 * f + sd * rng.normal(size=60)
    model = GaussianMixture(noise="none", nu=1e12, v=sd**2, beta=2.0, common_scale=1e-7, scale="constant")
    policy = fit_policy(ViewPredictions(f[:, None, None]), y, task="regression", model=model, guard=False)
    posterior = policy.posterior
    location, scale = posterior.standard.location[0], posterior.standard.scale[0]  # type: ignore[attr-defined]
    design = np.stack([(f - location) / scale, np.ones(60)], axis=1)
    precision = (scale / sd) ** 2
    G = 2.0 * np.eye(2) + precision * design.T @ design
    m = np.linalg.solve(G, precision * design.T @ ((y - f) / scale))
    views = posterior.state  # type: ignore[attr-defined]
    np.testing.assert_allclose(views.theta_mean[0], m, rtol=1e-6)
    np.testing.assert_allclose(views.theta_covariance[0], np.linalg.inv(G), rtol=1e-6)


def test_one_view_with_known_precision_has_no_gap_below_the_evidence(rng: np.random.Generator) -> None:
    f, sd, beta = rng.normal(size=60), 0.4, 2.0
    y = 1.5 + 0.7 * f + sd * rng.normal(size=60)
    model = GaussianMixture(noise="none", nu=1e8, v=sd**2, beta=beta, common_scale=1e-7, scale="constant")
    policy = fit_policy(ViewPredictions(f[:, None, None]), y, task="regression", model=model, guard=False)
    location, scale = (float(part[0]) for part in policy.posterior.standard[:2])  # type: ignore[attr-defined]
    design = np.stack([f - location, np.full(60, scale)], axis=1)  # H in the labels' units
    evidence = stats.multivariate_normal(np.zeros(60), sd**2 * np.eye(60) + design @ design.T / beta).logpdf(y - f)
    # but for the common calibration's Student-t, whose precision Q takes as independent of it
    spread = np.linspace(0.5, 3, 2001)
    gap = -(stats.t(TAIL_DOF).logpdf(spread) + 0.5 * np.log(2 * np.pi * np.e * spread**2)).max()
    assert policy.elbo == pytest.approx(evidence - 2 * gap, abs=1e-4)


def test_one_view_with_a_flat_prior_is_least_squares(rng: np.random.Generator) -> None:
    f = rng.normal(size=(300, 1, 2)) * [1.0, 40.0] + [0.0, 500.0]
    y = f[:, 0] * [0.5, 2.0] + [3.0, -7.0] + rng.normal(size=(300, 2)) * [0.3, 9.0]
    model = GaussianMixture(beta=1e-9, scale="constant")
    policy = fit_policy(ViewPredictions(f), y[:, None], task="regression", model=model, guard=False)
    mean = policy.predict(ViewPredictions(f)).mean
    for c in range(2):
        slope, offset = np.polyfit(f[:, 0, c], y[:, c], 1)
        # a full precision couples the outputs: close to least squares per output, not equal to it
        np.testing.assert_allclose(mean[:, c], offset + slope * f[:, 0, c], rtol=0, atol=0.05 * y[:, c].std())
    single = fit_policy(ViewPredictions(f[:, :, :1]), y[:, 0], task="regression", model=model, guard=False)
    slope, offset = np.polyfit(f[:, 0, 0], y[:, 0], 1)
    np.testing.assert_allclose(
        single.predict(ViewPredictions(f[:, :, :1])).mean[:, 0], offset + slope * f[:, 0, 0], rtol=1e-6, atol=1e-6
    )


def test_data_from_the_model_return_its_parameters() -> None:
    rng = np.random.default_rng(5)
    J, K = 20_000, 5
    weights = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    slope, offset, sd = np.array([1.2, 0.8, 1.0, 1.5, 0.6]), np.array([0.0, 2.0, -1.5, 1.0, -3.0]), 0.3
    noise = sd * np.array([1.0, 0.7, 1.4, 0.5, 1.0])
    f = 2 * rng.normal(size=(J, K))
    z = rng.choice(K, size=J, p=weights)
    rows = np.arange(J)
    y = offset[z] + slope[z] * f[rows, z] + noise[z] * rng.normal(size=J)
    policy = fit_policy(ViewPredictions(f[:, :, None]), y, task="regression", model="mixture", guard=False)
    np.testing.assert_allclose(policy.weights, weights, atol=0.02)
    at_zero = policy.posterior.predict(ViewPredictions(np.zeros((1, K, 1))))
    two = policy.posterior.predict(ViewPredictions(np.ones((1, K, 1))))
    np.testing.assert_allclose(two.location - at_zero.location, slope[None, :, None], rtol=0.05)  # type: ignore[union-attr]
    np.testing.assert_allclose(at_zero.location[0, :, 0], offset, rtol=0.05, atol=0.05)  # type: ignore[union-attr]
    np.testing.assert_allclose(np.sqrt(at_zero.scale[0, :, 0, 0]), noise, rtol=0.05)  # type: ignore[union-attr]


def fit(f: np.ndarray, y: object, **options: object):  # type: ignore[no-untyped-def]
    options = {"model": "mixture", "guard": False, **options}
    return fit_policy(ViewPredictions(f), y, task="regression", **options)  # type: ignore[arg-type]


@pytest.fixture
def views(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    truth = rng.normal(size=300)
    f = np.stack([0.8 * truth, truth + 0.5 * rng.normal(size=300), 0.2 + truth], axis=1)
    f += 0.3 * rng.normal(size=(300, 3))
    return f[:, :, None], truth + 0.2 * rng.normal(size=300)


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_permuting_views_permutes_weights(views, model: str) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    order = [2, 0, 1]
    np.testing.assert_allclose(
        fit(f[:, order], y, model=model).weights, fit(f, y, model=model).weights[order], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_units_do_not_matter(views, model: str) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    scale, shift = 1234.5, -77.0
    plain, scaled = fit(f, y, model=model), fit(shift + scale * f, shift + scale * y, model=model)
    np.testing.assert_allclose(scaled.weights, plain.weights, rtol=1e-6, atol=1e-9)
    a, b = plain.predict(ViewPredictions(f)), scaled.predict(ViewPredictions(shift + scale * f))
    np.testing.assert_allclose(b.mean, shift + scale * a.mean, rtol=1e-6)
    np.testing.assert_allclose(b.variance, scale**2 * a.variance, rtol=1e-6)
    assert scaled.elbo == pytest.approx(plain.elbo - len(y) * np.log(scale), rel=1e-6)


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_counts_equal_repeated_labels(views, model: str) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    rows = np.arange(len(y))
    twice = LabelSets.from_table(np.r_[rows, rows], np.r_[y, y], n_instances=len(y))
    counted = LabelSets.from_table(rows, y, count=np.full(len(y), 2), n_instances=len(y))
    a, b = fit(f, twice, model=model), fit(f, counted, model=model)
    np.testing.assert_allclose(a.weights, b.weights, rtol=1e-6, atol=1e-9)
    assert a.elbo == pytest.approx(b.elbo, rel=1e-9)


@pytest.mark.parametrize(("shift", "factor"), [(0.0, 1.0), (-32.0, 0.5), (1000.0, 1.0), (0.0, 0.001), (5.0, 300.0)])
@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_predictions_in_other_units_are_calibrated(model: str, shift: float, factor: float) -> None:
    rng = np.random.default_rng(0)
    truth = 40 + 15 * rng.normal(size=60)
    views = shift + factor * (truth[:, None] + 5 * rng.normal(size=(60, 4)))
    policy = fit_policy(ViewPredictions(views[:, :, None]), truth, task="regression", model=model, guard=False)
    prediction = policy.predict(ViewPredictions(views[:, :, None]))
    assert np.abs(prediction.mean[:, 0] - truth).mean() < 5
    assert 2 < np.sqrt(prediction.variance.mean()) < 8


def test_few_labels_leave_a_good_network_nearly_as_it_is() -> None:
    """The common calibration is shrunken to the identity, and views to the common one."""
    rng = np.random.default_rng(0)
    error = np.zeros(2)
    for _ in range(40):
        truth = rng.normal(size=8)
        views = truth[:, None] + 0.4 * rng.normal(size=(8, 6))
        models = GaussianMixture(), GaussianMixture(beta=0.01, nu=3.0)  # with and without a common calibration
        for place, model in enumerate(models):
            policy = fit_policy(ViewPredictions(views[:, :, None]), truth, task="regression", model=model, guard=False)
            prediction = policy.predict(ViewPredictions(np.linspace(-2, 2, 9)[:, None, None].repeat(6, axis=1)))
            error[place] += np.abs(prediction.mean[:, 0] - np.linspace(-2, 2, 9)).mean() / 40
    assert error[0] < 0.1
    assert error[0] < 0.5 * error[1]


def test_one_view_without_calibration_is_the_model_itself(views) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    policy = fit(f[:, :1], y, model=GaussianMixture(link="shift", beta=1e15))
    np.testing.assert_allclose(policy.predict(ViewPredictions(f[:, :1])).mean, f[:, 0], atol=1e-9)


def test_a_useless_view_is_suppressed_and_copies_share(rng: np.random.Generator) -> None:
    truth = rng.normal(size=500)
    good = truth + 0.3 * rng.normal(size=500)
    y = truth + 0.3 * rng.normal(size=500)
    noise = rng.normal(size=500)
    for model in ("mixture", "latent"):
        weights = fit(np.stack([good, noise], axis=1)[:, :, None], y, model=model).weights
        assert weights[1] < 0.02
        pair = fit(np.stack([good, good, noise], axis=1)[:, :, None], y, model=model).weights
        assert pair[0] == pytest.approx(pair[1], abs=1e-6)
        assert pair[0] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("engine", ["em", "advi"])
def test_the_scale_follows_the_prediction(rng: np.random.Generator, engine: str) -> None:
    if engine == "advi":
        pytest.importorskip("torch")
    truth = rng.normal(size=800)
    noise = 0.3 * np.exp(0.5 * truth)
    views = truth[:, None] + 0.05 * rng.normal(size=(800, 2))
    y = truth + noise * rng.normal(size=800)
    model = GaussianMixture(scale="prediction", v=0.1)
    policy = fit(views[:, :, None], y, model=model, engine=engine)
    prediction = policy.predict(ViewPredictions(views[:, :, None]))
    ratio = np.sqrt(prediction.variance[:, 0]) / noise
    assert np.polyfit(truth, np.log(ratio), 1)[0] == pytest.approx(0, abs=0.08)
    assert ratio.mean() == pytest.approx(1, abs=0.12)
    plain = fit(views[:, :, None], y, model=GaussianMixture(scale="constant", v=0.1))
    assert policy.score(ViewPredictions(views[:, :, None]), y).sum() > (
        plain.score(ViewPredictions(views[:, :, None]), y).sum() + 50
    )


def test_a_constant_scale_stays_nearly_constant(rng: np.random.Generator) -> None:
    truth = rng.normal(size=800)
    views = truth[:, None] + 0.3 * rng.normal(size=(800, 2))
    policy = fit(views[:, :, None], truth, model=GaussianMixture(scale="prediction"))
    variance = policy.predict(ViewPredictions(np.array([-1.5, 1.5])[:, None, None].repeat(2, axis=1))).variance[:, 0]
    assert abs(np.log(variance[1] / variance[0])) < 0.4


def test_a_view_counts_less_where_its_draws_vary(rng: np.random.Generator) -> None:
    truth = rng.normal(size=2000)
    variance = rng.choice([0.01, 4.0], size=(2000, 2))
    f = truth[:, None] + np.sqrt(variance) * rng.normal(size=(2000, 2))
    y = truth + 0.1 * rng.normal(size=2000)
    predictions = ViewPredictions(f[:, :, None], variance[:, :, None])
    scores = {}
    for heteroscedastic in (False, True):
        model = GaussianMixture(heteroscedastic=heteroscedastic, v=0.02)
        policy = fit_policy(predictions.take(slice(0, 1000)), y[:1000], task="regression", model=model, guard=False)
        scores[heteroscedastic] = policy.predict(predictions.take(slice(1000, 2000))).log_prob(y[1000:]).mean()
    assert scores[True] > scores[False] + 0.2


def test_predictive_intervals_cover() -> None:
    rng = np.random.default_rng(3)
    f = rng.normal(size=(21_500, 3))
    z = rng.choice(3, size=21_500, p=[0.5, 0.3, 0.2])
    y = 1.3 * f[np.arange(21_500), z] + 0.4 * rng.normal(size=21_500)
    predictions = ViewPredictions(f[:, :, None])
    policy = fit_policy(predictions.take(slice(0, 1500)), y[:1500], task="regression", model="mixture", guard=False)
    lower, upper = policy.predict(predictions.take(slice(1500, None))).interval(0.9)
    fresh = y[1500:, None]
    assert 0.88 <= float(((lower <= fresh) & (fresh <= upper)).mean()) <= 0.92


def test_start_is_uniform_and_steps_are_kept(views) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    policy = fit(f, y, engine=EM(keep_states=True))
    assert policy.history.weights.shape == (policy.n_steps, 3)
    np.testing.assert_allclose(policy.history.weights[0], 1 / 3)
    first = policy.at_step(1)
    prediction = first.predict(ViewPredictions(f))
    np.testing.assert_allclose(prediction.mean, prediction.location.mean(axis=1))
    last = policy.at_step(policy.n_steps)
    np.testing.assert_array_equal(last.weights, policy.weights)
    assert last.elbo == policy.elbo
    for step in (0, 1.5):
        with pytest.raises(ValueError, match="whole number between 1 and"):
            policy.at_step(step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_states=True"):
        fit(f, y).at_step(1)


def two_optima(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Four views with common errors, some of which stray: the bound has several optima."""
    rng = np.random.default_rng(seed)
    truth, common = rng.normal(size=(60, 1)), 0.5 * rng.standard_t(3, size=(60, 1))
    strays = rng.normal(size=(60, 4)) * [0.3, 0.4, 0.5, 0.6] * rng.choice([0.3, 1.5], size=(60, 1))
    return truth + common + strays, truth[:, 0] + 0.2 * rng.normal(size=60)


@pytest.mark.parametrize("seed", [20, 29])
def test_the_highest_of_several_optima_is_taken_and_the_others_are_reported(seed: int, tmp_path: Path) -> None:
    f, y = two_optima(seed)
    predictions = ViewPredictions(f[:, :, None], names=["identity", "a", "b", "c"])
    model = GaussianMixture(scale="constant", noise="none")
    problem, first = posed(predictions, LabelSets.from_array(y), model, noise="none")
    single = ascend(problem, first, EM())
    bound, weights = single.bounds[-1] + problem.unit_change, problem.weights(single.state)
    for engine in (EM(keep_states=True), EM(accelerate=False, max_steps=5000)):
        policy = fit_policy(predictions, y, task="regression", model=model, engine=engine, guard=False)
        assert policy.elbo > bound + 0.1
        assert np.abs(policy.weights - weights).max() > 0.02
        assert never_falls(policy.history.elbo)
        np.testing.assert_allclose(policy.history.weights[0], 1 / 4)
        for other in policy.history.other_optima:
            assert policy.elbo - 1 < other.elbo < policy.elbo
            assert np.abs(other.weights - policy.weights).max() > 0.02
        if engine.accelerate:
            best = policy
            assert policy.history.other_optima[0].elbo == pytest.approx(bound, abs=1e-4)
            np.testing.assert_allclose(policy.history.other_optima[0].weights, weights, atol=1e-3)
            np.testing.assert_array_equal(policy.at_step(policy.n_steps).weights, policy.weights)
        np.testing.assert_allclose(policy.weights, best.weights, atol=0.01)  # plain EM stops a little short
    best.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json").among(("c", "b", "a", "identity", "new"))
    np.testing.assert_array_equal(
        again.history.other_optima[0].weights, [*best.history.other_optima[0].weights[::-1], 0]
    )


def test_one_optimum_is_reported_as_one(views) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    policy = fit_policy(
        ViewPredictions(f, names=["identity", "b", "c"]), y, task="regression", model="mixture", guard=False
    )
    assert policy.history.other_optima == ()


def test_the_mixture_of_a_stack_starts_from_the_pools_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool, which has one optimum, is fitted first; members keep their order."""
    f, y = two_optima(20)
    seen, started_at = [], MixtureProblem.started_at

    def recorded(problem: MixtureProblem, state: MixtureState, weights: np.ndarray) -> MixtureState | None:
        seen.append(weights)
        return started_at(problem, state, weights)

    monkeypatch.setattr(MixtureProblem, "started_at", recorded)
    model = Stack(members=(GaussianMixture(scale="constant"), GaussianLatent(scale="constant")))
    policy = fit_policy(ViewPredictions(f[:, :, None]), y, task="regression", model=model)
    assert [type(member.model) for member in policy.members] == [GaussianMixture, GaussianLatent]
    np.testing.assert_allclose(seen, [0.5 * policy.members[1].weights + 0.125])


def test_blocks_do_not_change_the_answer(views, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    f, y = views
    whole = fit(f, y)
    monkeypatch.setattr("vbtta.inference.em._ENTRIES", 1)
    parts = fit(f, y)
    np.testing.assert_allclose(parts.weights, whole.weights, rtol=1e-9)
    assert parts.elbo == pytest.approx(whole.elbo, rel=1e-12)


def test_acceleration_saves_passes() -> None:
    """On eighteen correlated views, where plain EM creeps: all passes count, those of rejected leaps too."""
    rng = np.random.default_rng(2)
    truth = rng.normal(size=2000)
    shared = 0.4 * rng.normal(size=2000)
    f = (truth + shared)[:, None] + np.linspace(0.1, 0.6, 18) * rng.normal(size=(2000, 18))
    predictions, labels = ViewPredictions(f[:, :, None]), LabelSets.from_array(truth + 0.3 * rng.normal(size=2000))
    problem, first = posed(predictions, labels, GaussianMixture(), noise="none")
    plain = ascend(problem, first, EM(max_steps=3000, accelerate=False))
    fast = ascend(problem, first, EM(max_steps=3000))
    assert fast.bounds[-1] >= plain.bounds[-1] - 1e-6 * abs(plain.bounds[-1])
    assert 2 * fast.passes <= plain.passes


def test_an_extrapolated_update_follows_several_plain_ones() -> None:
    """With the components known, weights alone are updated: the quadratic model's five updates are nearly EM's."""
    rng = np.random.default_rng(0)
    likelihood = rng.gamma(40.0, size=(2000, 4))  # close to each other: weights change slowly
    weights = np.array([0.5, 0.4, 0.06, 0.04])

    def update(now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        share = now * likelihood / (likelihood @ now)[:, None]
        return share.mean(axis=0), share.T @ share

    after, overlap = update(weights)
    extrapolated = extrapolated_weights(weights, after, overlap)
    expected = after
    for _ in range(4):
        expected, _ = update(expected)
    moved = np.abs(expected - weights)[2:]
    assert (moved > 4 * np.abs(after - weights)[2:]).all()
    np.testing.assert_allclose(extrapolated[2:], expected[2:], atol=0.15 * moved.min())  # others make one step
    assert (
        extrapolated_weights(np.full(4, 0.25), np.array([0.26, 0.25, 0.25, 0.24]), overlap)[0] == 0.26
    )  # large changes
    reborn = extrapolated_weights(np.array([0.6, 0.4, 1e-200]), np.array([0.599, 0.4, 1e-3]), np.eye(3))
    assert np.isfinite(reborn).all()


@pytest.mark.parametrize("size", [1e-170, 1.0, 1e160])
def test_small_matrices_of_any_size_are_inverted(size):
    matrix = size * np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]]])
    inverse, log_det = inverse_and_log_det(matrix)
    np.testing.assert_allclose(inverse @ matrix, np.broadcast_to(np.eye(2), (2, 2, 2)), atol=1e-12)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix / size)[1] + 2 * np.log(size), rtol=1e-12)


@pytest.mark.parametrize(("link", "n_outputs"), [("affine", 1), ("shift", 2)])
def test_a_vast_beta_leaves_views_as_they_are(link, n_outputs):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(60, n_outputs))
    views = y[:, None] + 0.1 * rng.normal(size=(60, 2, n_outputs))
    model = GaussianMixture(link=link, beta=1e160)
    labels = LabelSets.from_array(y[:, None])
    policy = fit_policy(ViewPredictions(views), labels, task="regression", model=model, guard=False)
    pooled = np.einsum("k,nkc->nc", policy.weights, views)
    np.testing.assert_allclose(policy.predict(ViewPredictions(views)).mean, pooled, atol=1e-6)


@pytest.mark.parametrize("link", ["affine", "shift"])
def test_a_view_without_labels_does_not_decide_the_variance(link):
    """Under a Dirichlet it keeps a weight and the prior's vast doubt about its calibration."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=300)
    views = truth[:, None] + rng.normal(size=(300, 3)) * [0.1, 0.15, 0.3]
    predictions = ViewPredictions(views[:, :, None])
    sure, dirichlet = (
        fit_policy(predictions, truth, task="regression", model=GaussianMixture(link=link, concentration=concentration))
        for concentration in (None, 1.0)
    )
    assert (dirichlet.weights > 0).all()
    spread = [np.sqrt(policy.predict(predictions).variance.mean()) for policy in (sure, dirichlet)]
    assert spread[1] == pytest.approx(spread[0], rel=0.1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [1, 2, 3, 30, 100])
@pytest.mark.parametrize(
    "model",
    ["mixture", "latent", GaussianMixture(weights="input"), GaussianMixture(component="student_t", concentration=1.0)],
    ids=["mixture", "latent", "by input", "heavy tails"],
)
def test_degenerate_data_are_fitted_without_a_warning(model: Any, n: int) -> None:
    truth = np.random.default_rng(n).normal(size=n)
    same, constant = np.repeat(truth[:, None], 3, axis=1), np.full((n, 3), 2.0)
    for views, y in (
        (same, truth),
        (1e-9 * same, 1e-9 * truth),
        (1e6 + same, 1e6 + truth),
        (constant, truth),
        (constant, constant[:, 0]),
    ):
        policy = fit(views[:, :, None], y, model=model)
        prediction = policy.predict(ViewPredictions(views[:, :, None]))
        assert np.isfinite(prediction.mean).all()
        assert np.isfinite(prediction.variance).all()


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::vbtta.ConvergenceWarning")
@pytest.mark.parametrize(("seed", "n_views"), [(0, 5), (6, 5), (27, 2), (35, 2), (16, 2)])
def test_numbers_that_overflow_on_the_way_give_finite_fits_or_are_refused(seed: int, n_views: int) -> None:
    rng = np.random.default_rng(seed)
    views, values, weights = rng.normal(size=(4, n_views, 1)), rng.normal(size=(4, 1)), rng.uniform(-6, 6, size=4)
    labels = LabelSets.from_array(30 * values).with_weights(10.0**weights)
    if seed == 16:
        with pytest.raises(ValueError, match="rescale predictions and labels"):
            fit(0.1 * views, labels, model=GaussianMixture(link="shift"))
        return
    policy = fit(0.1 * views, labels, model=GaussianMixture(link="shift"))
    assert np.isfinite(policy.elbo)
    assert np.isfinite(policy.predict(ViewPredictions(0.1 * views)).mean).all()


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_a_fit_to_large_data_takes_less_than_a_copy_of_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vbtta.inference.em._cores", lambda: 2)  # every thread has temporary arrays
    rng = np.random.default_rng(0)
    truth = rng.normal(size=100_000)
    predictions = ViewPredictions(truth[:, None, None] + rng.normal(size=(100_000, 36, 1)))
    tracemalloc.start()
    try:
        fit_policy(predictions, truth, task="regression", model=model, engine=EM(max_steps=3, tol=0), guard=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.9 * predictions.outputs.nbytes
