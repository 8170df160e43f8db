"""Annotators of continuous labels: bias and noise are recovered, and modelling them improves predictions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from problems import posed, random_problem
from vbtta import EM, GaussianLatent, GaussianMixture, LabelSets, ViewPredictions, fit_policy
from vbtta.inference.em import ascend
from vbtta.models.parts.annotators import contrasts


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_instances=st.integers(2, 60),
    n_views=st.integers(1, 6),
    n_outputs=st.integers(1, 3),
    n_columns=st.integers(1, 4),
    counts=st.booleans(),
    heteroscedastic=st.booleans(),
    latent=st.booleans(),
)
def test_the_bound_never_falls(
    seed: int,
    n_instances: int,
    n_views: int,
    n_outputs: int,
    n_columns: int,
    counts: bool,
    heteroscedastic: bool,
    latent: bool,
) -> None:
    predictions, labels = random_problem(
        np.random.default_rng(seed),
        n_instances=n_instances,
        n_views=n_views,
        n_outputs=n_outputs,
        n_columns=n_columns,
        gaps=0.4,
        counts=counts,
        annotators=True,
    )
    if latent:
        problem, first = posed(predictions, labels, GaussianLatent(), noise="annotator")
    else:
        spec = GaussianMixture(heteroscedastic=heteroscedastic)
        problem, first = posed(predictions, labels, spec, noise="annotator")  # type: ignore[assignment]
    for accelerate in (False, True):
        ascent = ascend(problem, first, EM(max_steps=15, accelerate=accelerate))
        bounds = np.array(ascent.bounds)
        assert np.isfinite(bounds).all()
        assert (np.diff(bounds) >= -1e-9 * (1 + np.abs(bounds[:-1]))).all()
        terms = problem.bound_terms(ascent.state, ascent.statistics)
        total = sum(value if name.startswith("J") else -value for name, value in terms.items())
        assert total - problem.unit_change == pytest.approx(bounds[-1], rel=1e-7, abs=1e-7)


def test_the_bound_lies_below_the_evidence() -> None:
    """The evidence by Monte Carlo from the prior: two views, three instances, two annotators."""
    rng = np.random.default_rng(1)
    f = rng.normal(size=(3, 2, 1))
    Y = f[:, 0] + 0.3 * rng.normal(size=(3, 2))
    spec = GaussianMixture(link="shift", beta=4.0, nu=6.0, gamma=4.0)
    labels = LabelSets.from_array(Y, annotators="columns")
    problem, first = posed(ViewPredictions(f), labels, spec, noise="annotator")
    ascent = ascend(problem, first, EM(max_steps=200))
    weights, prior, people = ascent.state.weights, problem.prior, problem.annotator_prior
    assert people is not None
    block, size = problem.data.blocks[0], 400_000
    theta = rng.normal(size=(size, 2)) / np.sqrt(prior.beta)
    precision = rng.gamma(0.5 * prior.nu, 2 / prior.inverse_scale[0, 0], size=(size, 2))
    tau = rng.gamma(people.shape, 1 / people.rate, size=(size, 2))
    bias = rng.normal(size=(size, 1)) / np.sqrt(people.gamma) * contrasts(2)[:, 0]
    log_likelihood = np.zeros(size)
    for i in range(3):
        y = block.value[0, 2 * i : 2 * i + 2] - bias  # (size, 2): labels of an instance are consecutive
        views = []
        for k in range(2):
            # y | t ~ N(t, 1/tau), t ~ N(mu, 1/precision): both labels jointly, t integrated out
            residual = y - (block.mean[0, k, i] + theta[:, k])[:, None]
            a, b, c = 1 / tau[:, 0], 1 / tau[:, 1], 1 / precision[:, k]
            determinant = a * b + a * c + b * c
            form = ((b + c) * residual[:, 0] ** 2 + (a + c) * residual[:, 1] ** 2) - 2 * c * residual.prod(axis=1)
            with np.errstate(divide="ignore"):
                views.append(
                    np.log(weights[k]) - np.log(2 * np.pi) - 0.5 * np.log(determinant) - 0.5 * form / determinant
                )
        log_likelihood += special.logsumexp(views, axis=0)
    likelihood = np.exp(log_likelihood - log_likelihood.max())
    evidence = log_likelihood.max() + np.log(likelihood.mean())
    error = likelihood.std() / likelihood.mean() / np.sqrt(size)
    assert error < 0.05
    assert evidence - 8 < ascent.bounds[-1] < evidence + 3 * error


def test_a_step_is_its_formulas_label_by_label(rng: np.random.Generator) -> None:
    """(15) to (18): the truth as the posterior of a joint normal, annotators from every label on its own."""
    K, C = 2, 2
    predictions, labels = random_problem(
        rng, n_instances=6, n_views=K, n_outputs=C, n_columns=3, counts=True, annotators=True
    )
    problem, first = posed(predictions, labels, GaussianMixture(scale="constant"), noise="annotator")
    state = problem.update(first, problem.evaluate(first)[1])  # biases and precisions that differ
    people, prior, block = state.annotators, problem.annotator_prior, problem.data.blocks[0]
    assert people is not None
    assert prior is not None
    assert block.instance is not None
    views, tau, n_people = state, people.precision, len(people.shape)
    doubt = C * people.bias_variance  # tr S_u
    log_rho, truth = np.empty((6, K)), np.empty((6, K, C))
    spread = np.empty((6, K))  # tr P^-1
    for i, k in np.ndindex(6, K):
        f, L = block.mean[:, k, i], views.precision[k]
        H = np.hstack([np.diag(f), np.eye(C)])
        mu = f + H @ views.theta_mean[k]
        P, pull, log_labels = L.copy(), L @ mu, 0.0
        own = np.flatnonzero(block.instance == i)
        for j in own.tolist():
            u, n = block.annotator[j], block.repeats[j]
            P, pull = P + n * tau[u] * np.eye(C), pull + n * tau[u] * (block.value[:, j] - people.bias[u])
        t = np.linalg.solve(P, pull)
        for j in own.tolist():
            u, n = block.annotator[j], block.repeats[j]
            log_tau = special.digamma(people.shape[u]) - np.log(people.rate[u])
            gap = block.value[:, j] - people.bias[u] - t
            log_labels += n * (0.5 * C * (log_tau - np.log(2 * np.pi)) - 0.5 * tau[u] * (gap @ gap + doubt[u]))
        V = views.inverse_scale[k]
        log_det = special.digamma(0.5 * (views.dof[k] - np.arange(C))).sum() + C * np.log(2) - np.linalg.slogdet(V)[1]
        form = (t - mu) @ L @ (t - mu) + np.trace(L @ H @ views.calibration_covariance(problem.prior.beta)[k] @ H.T)
        log_rho[i, k] = np.log(views.weights[k]) + 0.5 * (log_det - np.linalg.slogdet(P)[1] - form) + log_labels
        truth[i, k], spread[i, k] = t, np.trace(np.linalg.inv(P))
    _, sums = problem.evaluate(state)
    assert float(sums.log_evidence) == pytest.approx(special.logsumexp(log_rho, axis=1).sum())  # (15), (16)
    p = special.softmax(log_rho, axis=1)
    shape, rate = np.full(n_people, prior.shape), np.full(n_people, prior.rate)
    n_labels, residual = np.zeros(n_people), np.zeros((n_people, C))
    for j, i in enumerate(block.instance):
        u, n, y = block.annotator[j], block.repeats[j], block.value[:, j]
        squares = ((y - truth[i] - people.bias[u]) ** 2).sum(axis=1) + spread[i] + doubt[u]  # (K,)
        shape[u], rate[u] = shape[u] + 0.5 * C * n, rate[u] + 0.5 * n * p[i] @ squares
        n_labels[u], residual[u] = n_labels[u] + n, residual[u] + n * (y - p[i] @ truth[i])
    annotators = problem.update(state, sums).annotators
    assert annotators is not None
    np.testing.assert_allclose(annotators.shape, shape)  # (17)
    np.testing.assert_allclose(annotators.rate, rate)
    B, new = contrasts(n_people), shape / rate
    covariance = B @ np.linalg.inv(prior.gamma * np.eye(n_people - 1) + B.T @ np.diag(n_labels * new) @ B) @ B.T
    np.testing.assert_allclose(annotators.bias_variance, np.diagonal(covariance), atol=1e-12)  # (18)
    np.testing.assert_allclose(annotators.bias, covariance @ (new[:, None] * residual), atol=1e-10)


def crowd(
    rng: np.random.Generator, n_instances: int = 2000
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    truth = rng.normal(size=n_instances)
    f = np.stack([truth + 0.3 * rng.normal(size=n_instances), truth + 0.6 * rng.normal(size=n_instances)], axis=1)
    known = {"bias": np.array([0.5, -0.3, 0.0, 0.2, -0.4]), "noise": np.array([0.1, 0.2, 0.4, 0.8, 1.6])}
    Y = truth[:, None] + known["bias"] + known["noise"] * rng.normal(size=(n_instances, 5))
    Y[rng.random(Y.shape) < 0.5] = np.nan
    return truth, f[:, :, None], Y, known


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_annotators_are_recovered(model: str) -> None:
    truth, f, Y, known = crowd(np.random.default_rng(4))
    labels = LabelSets.from_array(Y, annotators=list("abcde"))
    predictions = ViewPredictions(f)
    policy = fit_policy(predictions, labels, task="regression", model=model, guard=False)  # type: ignore[arg-type]
    assert policy.model.noise == "annotator"  # type: ignore[attr-defined]
    annotators = policy.annotators
    np.testing.assert_allclose(annotators.bias[:, 0], known["bias"], atol=0.1)
    assert (annotators.bias_error[:, 0] < 0.08).all()
    np.testing.assert_allclose(annotators.noise[:, 0], known["noise"], rtol=0.12)
    assert (annotators.noise_interval[:, 0, 0] < annotators.noise[:, 0]).all()
    consensus = policy.consensus(predictions, labels)
    labelled = np.isfinite(Y).any(axis=1)
    mean_label = np.nanmean(Y[labelled], axis=1)
    assert np.mean((consensus.mean[labelled, 0] - truth[labelled]) ** 2) < 0.2 * np.mean(
        (mean_label - truth[labelled]) ** 2
    )
    inside = np.abs(consensus.mean[:, 0] - truth) < 1.645 * np.sqrt(consensus.variance[:, 0])
    assert 0.86 < inside.mean() < 0.94


def test_knowing_annotators_improves_the_weights() -> None:
    """With one dreadful annotator the plain mixture cannot see which view is better."""
    rng = np.random.default_rng(7)
    truth = rng.normal(size=400)
    f = np.stack([truth + 0.25 * rng.normal(size=400), truth + 0.5 * rng.normal(size=400)], axis=1)[:, :, None]
    Y = truth[:, None] + np.array([0.1, 0.1, 3.0]) * rng.normal(size=(400, 3))
    labels = LabelSets.from_array(Y, annotators="columns")
    clean = fit_policy(ViewPredictions(f), truth, task="regression", model="mixture", guard=False).weights
    distance = {
        noise: np.abs(
            fit_policy(
                ViewPredictions(f), labels, task="regression", model=GaussianMixture(noise=noise), guard=False
            ).weights
            - clean
        ).sum()
        for noise in ("none", "annotator")
    }
    assert distance["annotator"] < 0.5 * distance["none"]


def test_the_default_follows_the_labels(rng: np.random.Generator) -> None:
    f = rng.normal(size=(50, 2, 1))
    y = f[:, 0, 0]
    rows = np.arange(50)
    overlap = LabelSets.from_table(np.r_[rows, rows], np.r_[y, y + 0.1], annotator=np.r_[rows % 3, (rows + 1) % 3])
    apart = LabelSets.from_table(rows, y, annotator=rows % 3)
    options = {"task": "regression", "model": "mixture", "guard": False}
    assert fit_policy(ViewPredictions(f), overlap, **options).model.noise == "annotator"  # type: ignore[arg-type, attr-defined]
    assert fit_policy(ViewPredictions(f), apart, **options).model.noise == "none"  # type: ignore[arg-type, attr-defined]
    options["model"] = GaussianMixture(noise="annotator")
    with pytest.warns(UserWarning, match="cannot be told apart"):
        fit_policy(ViewPredictions(f), apart, **options)  # type: ignore[arg-type]


def test_strangers_are_as_good_as_the_average() -> None:
    truth, f, Y, _ = crowd(np.random.default_rng(4), 300)
    policy = fit_policy(
        ViewPredictions(f), LabelSets.from_array(Y, annotators=list("abcde")), task="regression", guard=False
    )
    label = np.array([truth[0] + 1.0])
    new = ViewPredictions(f[:1])
    known = policy.consensus(new, LabelSets.from_table([0], label, annotator=["a"])).mean
    stranger = policy.consensus(new, LabelSets.from_table([0], label, annotator=["z"])).mean
    alone = policy.predict(new).mean
    assert abs(known - alone) > abs(stranger - alone) > 0


@pytest.mark.parametrize("model", [GaussianMixture(noise="annotator"), GaussianLatent(noise="annotator")])
def test_an_unknown_annotator_counts_as_much_as_one_of_average_noise(model: GaussianMixture | GaussianLatent) -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=200)
    predictions = ViewPredictions((truth[:, None] + rng.normal(size=(200, 2)) * [0.5, 0.8])[:, :, None])
    votes = truth[:, None] + 0.3 * rng.normal(size=(200, 3))
    labels = LabelSets.from_array(votes, annotators=["ann", "bob", "cleo"])
    policy = fit_policy(predictions, labels, task="regression", model=model, guard=False)
    of_ann, of_dora = (
        policy.consensus(predictions, LabelSets.from_array(votes[:, :1], annotators=[name])).mean
        for name in ("ann", "dora")
    )
    np.testing.assert_allclose(of_ann, of_dora, atol=0.2)  # ann is a little better; were the label ignored: 1.3 apart


def test_consensus_without_a_noise_model_weighs_the_views(rng: np.random.Generator) -> None:
    f = np.array([[0.0, 10.0]])[:, :, None].repeat(200, axis=0) + 0.1 * rng.normal(size=(200, 2, 1))
    which = rng.random(200) < 0.5
    y = np.where(which, f[:, 0, 0], f[:, 1, 0])
    policy = fit_policy(
        ViewPredictions(f), y, task="regression", model=GaussianMixture(link="shift", noise="none"), guard=False
    )
    consensus = policy.consensus(ViewPredictions(f), y)
    np.testing.assert_allclose(consensus.mean[:, 0], y, atol=0.2)
    assert stats.pearsonr(policy.predict(ViewPredictions(f)).mean[:, 0], y).statistic < 0.5


@pytest.mark.parametrize("n_instances", [80, 300])
def test_intervals_include_the_uncertainty_about_the_truth(n_instances: int) -> None:
    """Were the truth taken for known, the best annotator would be inside in half of the fits."""
    noise, bias = np.array([0.2, 0.5, 1.0, 0.7, 0.4]), np.array([0.3, -0.3, 0.2, -0.2, 0.0])
    held = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        views = 2 * rng.normal(size=(n_instances, 1)) + 1.5 * rng.normal(size=(n_instances, 2))
        truth = views[np.arange(n_instances), rng.integers(0, 2, size=n_instances)] + 0.5 * rng.normal(size=n_instances)
        answers = truth[:, None] + bias + noise * rng.normal(size=(n_instances, 5))
        answers[np.arange(n_instances)[:, None], np.argsort(rng.random((n_instances, 5)))[:, 3:]] = np.nan
        labels = LabelSets.from_array(answers, annotators=list("abcde"))
        predictions = ViewPredictions(views[:, :, None], names=["identity", "flip"])
        people = fit_policy(predictions, labels, task="regression", model="mixture", guard=False).annotators
        low, high = people.noise_interval[:, 0].T
        held.append(
            [(low <= noise) & (noise <= high), np.abs(people.bias[:, 0] - bias) <= 1.645 * people.bias_error[:, 0]]
        )
    of_noise, of_bias = np.mean(held, axis=0)  # (5,) each, of intervals that should hold 90 %
    assert 0.84 < of_noise.mean() < 0.96
    assert 0.84 < of_bias.mean() < 0.96
    assert of_noise[0] > 0.75  # the best one; the standard error of 40 fits is 0.05
