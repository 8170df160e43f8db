"""The categorical mixture: a bound that rises and stays below the evidence, and weights that are right."""

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from problems import posed
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_policy
from vbtta.inference.em import EM, ascend
from vbtta.inference.linalg import kl_dirichlet
from vbtta.models.categorical_mixture.em import CategoricalState, update_class_weights
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts.class_data import categorical_data
from vbtta.models.parts.links import (
    LINKS,
    Calibration,
    CalibrationPrior,
    CalibrationSums,
    start_candidates,
    view_proba,
)
from vbtta.models.parts.probit import log_probit

NOISES = ("none", "uniform", "annotator", "confusion")
EXACT = EM(tol=1e-12, max_steps=5000)


def draw(rng, n, n_views, n_classes, *, weights=None, kappa=1.0, accuracy=(0.95, 0.8, 0.6), sharp=2.0):
    """Logits, true classes and labels from the model itself."""
    weights = rng.dirichlet(np.ones(n_views)) if weights is None else np.asarray(weights)
    logits = sharp * rng.normal(size=(n, n_views, n_classes))
    view = rng.choice(n_views, p=weights, size=n)
    utility = kappa * logits[np.arange(n), view] + rng.gumbel(size=(n, n_classes))
    truth = utility.argmax(axis=1)
    columns = [
        np.where(rng.random(n) < right, truth, (truth + rng.integers(1, n_classes, n)) % n_classes)
        for right in accuracy
    ]
    return logits, truth, np.stack(columns, axis=1)


def fit(logits, labels, spec=None, noise="none", engine=None, **options):
    spec = CategoricalMixture(**options) if spec is None else spec
    predictions = logits if isinstance(logits, ViewPredictions) else ViewPredictions(logits)
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    problem, first = posed(predictions, labels, spec, noise=noise)
    return problem, ascend(problem, first, EM() if engine is None else engine)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_classes=st.integers(2, 12),
    n_views=st.integers(1, 8),
    noise=st.sampled_from(NOISES),
    link=st.sampled_from(["softmax", "softmax", "probit"]),
    weights=st.sampled_from(["view", "view_class"]),
    concentration=st.sampled_from([None, 0.5]),
    accelerate=st.booleans(),
)
def test_bound_never_falls(seed, n_classes, n_views, noise, link, weights, concentration, accelerate):
    rng = np.random.default_rng(seed)
    n = 12 if link == "probit" else int(rng.integers(3, 60))
    logits, _, labels = draw(rng, n, n_views, n_classes, sharp=rng.choice([0.3, 3.0, 30.0]))
    instance, column = np.nonzero(rng.random(labels.shape) < 0.7)
    instance, column = (instance, column) if len(instance) else (np.array([0]), np.array([0]))
    sets = LabelSets.from_table(
        instance, labels[instance, column], annotator=column, count=rng.integers(1, 4, len(instance)), n_instances=n
    )
    variance = rng.gamma(1.0, size=logits.shape) if rng.random() < 0.5 else None
    spec = CategoricalMixture(
        link=link, weights=weights, concentration=None if weights == "view_class" else concentration
    )
    steps = 8 if link == "probit" else 25
    engine = EM(max_steps=steps, tol=0, accelerate=accelerate)
    problem, ascent = fit(ViewPredictions(logits, variance), sets, spec, noise, engine)
    bounds = np.array(ascent.bounds)
    assert np.isfinite(bounds).all()
    assert (np.diff(bounds) >= -1e-9 * np.abs(bounds[0])).all()
    np.testing.assert_allclose(ascent.weights[0], 1 / n_views)  # step 1: uniform weights
    terms = problem.bound_terms(ascent.state, ascent.statistics)
    assert terms["J_S"] - sum(value for name, value in terms.items() if name != "J_S") == pytest.approx(bounds[-1])
    interval = problem.finish(ascent).weight_interval(0.9)
    assert np.isfinite(interval).all()
    assert (interval[:, 1] > 0).all()


def exact_log_joint(problem, state, labels):
    """ln P(S, calibration | w), or ln P(S, calibration) under a Dirichlet, by enumeration of all truths and views."""
    data = problem.data
    kappa, offset = np.exp(state.calibration.log_kappa), state.calibration.offset
    proba = special.softmax(kappa[:, None] * data.whole.mean + offset, axis=2)  # (N, K, C)
    log_prior = problem.prior.log_density(state.calibration)
    table, (n, n_views, n_classes) = data.whole.table, proba.shape
    if problem.noise is None:
        units = [
            (i, y) for i, y, r in zip(table.instance, table.label, table.repeats, strict=True) for _ in range(int(r))
        ]
        choices = itertools.product(range(n_views), repeat=len(units))
        terms = [
            sum(np.log(proba[i, k, y]) for k, (i, y) in zip(views, units, strict=True))
            + log_views(views, state, problem)
            for views in choices
        ]
        return special.logsumexp(terms) + log_prior
    terms = []
    for views in itertools.product(range(n_views), repeat=n):
        for truth in itertools.product(range(n_classes), repeat=n):
            one_hot = np.eye(n_classes)[list(truth)]
            label_counts = problem.noise.of_kind.counts(one_hot[table.groups.owner], table)
            prior = np.broadcast_to(state.noise.prior, label_counts.shape)
            counts = prior + label_counts
            log_labels = (log_beta(counts) - log_beta(prior)).sum()
            if problem.noise.kind != "confusion":  # which of the wrong classes
                log_labels -= (counts - prior)[:, 1].sum() * np.log(n_classes - 1)
            joint = sum(np.log(proba[i, k, c]) for i, (k, c) in enumerate(zip(views, truth, strict=True)))
            terms.append(joint + log_labels + log_views(views, state, problem))
    if state.noise.strength is not None:  # prior counts that annotators share, at their mode
        log_prior += stats.norm.logpdf(np.log(state.noise.strength / problem.spec.confusion_prior)).sum()
    return special.logsumexp(terms) + log_prior


def log_beta(counts):
    return special.gammaln(counts).sum(axis=-1) - special.gammaln(counts.sum(axis=-1))


def log_views(views, state, problem):
    counts = np.bincount(views, minlength=len(state.weights))
    if state.weight_counts is None:
        return special.xlogy(counts, state.weights).sum()
    prior = np.full(len(counts), problem.spec.concentration)
    return log_beta(prior + counts) - log_beta(prior)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("concentration", [None, 0.7])
def test_bound_lies_below_the_exact_joint(noise, concentration):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        logits, _, labels = draw(rng, 3, 2, 2, accuracy=(0.9, 0.7))
        sets = LabelSets.from_array(labels, annotators="columns")
        problem, first = posed(
            ViewPredictions(logits),
            sets,
            CategoricalMixture(concentration=concentration, difficulty=False),
            noise=noise,
        )
        ascent = ascend(problem, first, EM(keep_states=True, max_steps=30))
        for state in (ascent.states[0], ascent.states[len(ascent.states) // 2], ascent.state):
            exact = exact_log_joint(problem, state, sets)
            bound = problem.evaluate(state)[0]
            assert bound <= exact + 1e-9
            if noise == "none" and concentration is None:
                assert bound == pytest.approx(exact)  # nothing is approximated


@pytest.mark.parametrize("link", ["softmax", "probit"])
@pytest.mark.parametrize("noise", ["none", "confusion"])
@pytest.mark.parametrize("weights", ["view", "view_class"])
def test_gradient_is_the_bounds_and_vanishes_at_convergence(link, noise, weights):
    rng = np.random.default_rng(0)
    logits, _, labels = draw(rng, 60, 3, 3, weights=[0.5, 0.3, 0.2])
    predictions = ViewPredictions(logits, rng.gamma(1.0, size=logits.shape))
    spec = CategoricalMixture(link=link, weights=weights)
    problem, first = posed(predictions, LabelSets.from_array(labels), spec, noise=noise)

    def numerical(state):
        steps = 1e-5 * np.eye(6)
        values = [
            [problem.evaluate(state._replace(calibration=state.calibration.moved(s)))[0] for s in (d, -d)]
            for d in steps
        ]
        return np.array([(up - down) / 2e-5 for up, down in values])

    anywhere = first._replace(calibration=Calibration(0.3 * rng.normal(size=3), 0.2 * rng.normal(size=3)))
    statistics = problem.evaluate(anywhere)[1]
    exact = problem.prior.gradient(anywhere.calibration, statistics.sums.calibration)
    np.testing.assert_allclose(exact, numerical(anywhere), atol=1e-5)

    ascent = ascend(problem, first, EM(tol=1e-11, max_steps=3000))
    assert np.linalg.norm(numerical(ascent.state)) < 2e-2  # of a bound whose curvature is in the hundreds
    if weights == "view":
        views = ascent.statistics.sums
        slack = views.slope - float(views.size)  # what moving weight to a view would gain
        assert (slack <= 1e-2).all()
        assert np.abs(slack[ascent.state.weights > 0]).max() < 1e-2


def test_components_are_the_links_of_calibrated_logits():
    rng = np.random.default_rng(0)
    logits, variance = rng.normal(size=(3, 2, 5)), rng.gamma(1.0, size=(3, 2, 5))  # (C, K, n)
    log_kappa, offset = np.log([0.5, 3.0]), np.array([0.4, 0.0, -1.0])
    utility = np.exp(log_kappa)[:, None] * logits + offset[:, None, None]
    scale = np.sqrt(np.exp(2 * log_kappa)[:, None] * variance + 1)
    expected = {
        "softmax": special.softmax(utility, axis=0),
        "probit": np.exp(log_probit(utility.T, scale.T)).T,
    }
    for link, proba in expected.items():
        density, inverse = view_proba(LINKS[link], logits, variance, Calibration(log_kappa, offset))
        np.testing.assert_allclose(density * inverse, proba, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_convex_solution(seed):
    rng = np.random.default_rng(seed)
    true = [0.6, 0.4, 0, 0, 0] if seed % 2 else None
    accuracy = (1.0, 1.0) if seed % 2 else (0.9, 0.8)
    logits, _, labels = draw(rng, 400, 5, 4, weights=true, accuracy=accuracy)
    _, ascent = fit(logits, labels, engine=EXACT, calibrate=False)
    proba = special.softmax(logits, axis=2)
    instance = np.repeat(np.arange(400), 2)
    likelihood = proba[instance, :, labels.ravel()]  # (J, K)
    optimum = optimize.minimize(
        lambda w: -np.log(likelihood @ w).sum(),
        np.full(5, 0.2),
        jac=lambda w: -(likelihood / (likelihood @ w)[:, None]).sum(axis=0),
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(5)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    np.testing.assert_allclose(ascent.weights[-1], optimum.x, atol=1e-5)
    at_edge = optimum.x < 1e-7
    assert (ascent.weights[-1][at_edge] == 0).all()
    if true is not None:
        assert at_edge.any()


def test_recovers_the_truth_from_three_annotators():
    rng = np.random.default_rng(5)
    weights, kappa, accuracy = np.array([0.5, 0.3, 0.2, 0.0]), 0.6, (0.9, 0.75, 0.6)
    logits, truth, labels = draw(rng, 5000, 4, 5, weights=weights, kappa=kappa, accuracy=accuracy, sharp=4.0)
    sets = LabelSets.from_array(labels, annotators="columns")
    for noise in ("annotator", "confusion"):
        problem, ascent = fit(logits, sets, noise=noise)
        assert ascent.converged
        assert len(ascent.bounds) <= 60
        posterior = problem.finish(ascent)
        np.testing.assert_allclose(posterior.weights, weights, atol=0.03)
        np.testing.assert_allclose(posterior.kappa[:3], kappa, rtol=0.15)
        annotators = posterior.describe_annotators(sets.annotator_names)
        np.testing.assert_allclose(annotators.accuracy, accuracy, atol=0.02)
        matrices = np.where(np.eye(5, dtype=bool), np.array(accuracy)[:, None, None], 0)
        matrices += (1 - np.eye(5)) * (1 - np.array(accuracy))[:, None, None] / 4
        np.testing.assert_allclose(annotators.confusion, matrices, atol=0.05)
        interval = posterior.weight_interval(0.99)
        assert ((interval[:, 0] <= weights + 1e-3) & (weights <= interval[:, 1])).all()
        used = np.flatnonzero(posterior.weights > 0)
        views = ViewPredictions(logits[:, used])
        consensus = posterior.consensus(views, sets, sets.annotator).label
        votes = np.stack([(labels == c).sum(axis=1) for c in range(5)], axis=1)
        majority = (votes + 1e-3 * rng.random(votes.shape)).argmax(axis=1)
        assert (consensus == truth).mean() > (majority == truth).mean() + 0.04


def test_one_annotator_equals_uniform():
    rng = np.random.default_rng(1)
    logits, _, labels = draw(rng, 80, 3, 4, accuracy=(0.8, 0.8))
    instance = np.repeat(np.arange(80), 2)
    unnamed = LabelSets.from_table(instance, labels.ravel(), n_instances=80)
    alone = replace(unnamed, annotator=np.zeros(160, dtype=int), annotator_names=("ann",))
    results = [
        fit(logits, sets, noise=noise, accuracy_prior=(8, 2))[1]
        for sets, noise in ((alone, "annotator"), (labels, "uniform"))
    ]
    np.testing.assert_allclose(*(ascent.bounds for ascent in results))
    np.testing.assert_allclose(*(ascent.weights[-1] for ascent in results))


def test_probit_of_two_classes_is_its_closed_form():
    rng = np.random.default_rng(2)
    logits, _, labels = draw(rng, 60, 3, 2, accuracy=(0.9,))
    variance = rng.gamma(1.0, size=logits.shape)
    problem, ascent = fit(ViewPredictions(logits, variance), labels, link="probit", engine=EM(tol=1e-10))
    posterior = problem.finish(ascent)
    used = np.flatnonzero(posterior.weights > 0)
    kappa, offset = posterior.kappa[used], posterior.calibration.offset
    gap = kappa * (logits[:, used, 1] - logits[:, used, 0]) + offset[1] - offset[0]
    spread = np.sqrt(kappa**2 * variance[:, used].sum(axis=2) + 2)
    expected = special.ndtr(gap / spread) @ posterior.weights[used]
    proba = posterior.predict(ViewPredictions(logits[:, used], variance[:, used])).proba
    np.testing.assert_allclose(proba[:, 1], expected, atol=1e-8)
    chosen = np.where(labels[:, 0] == 1, expected, 1 - expected)
    bound = np.log(chosen).sum() + problem.prior.log_density(ascent.state.calibration)
    assert ascent.bounds[-1] == pytest.approx(bound, abs=1e-6)


@pytest.mark.parametrize("weights", ["view", "view_class"])
@pytest.mark.parametrize("noise", ["none", "confusion"])
def test_permutations_permute(noise, weights):
    rng = np.random.default_rng(3)
    logits, _, labels = draw(rng, 60, 3, 4)
    views, classes = rng.permutation(3), rng.permutation(4)
    engine = EM(max_steps=30, tol=0, accelerate=False)
    before = fit(logits, labels, noise=noise, weights=weights, engine=engine)[1].state
    moved = logits[:, views][:, :, classes]
    after = fit(moved, np.argsort(classes)[labels], noise=noise, weights=weights, engine=engine)[1].state
    np.testing.assert_allclose(after.weights, before.weights[views], atol=1e-8)
    np.testing.assert_allclose(after.calibration.log_kappa, before.calibration.log_kappa[views], atol=1e-8)
    np.testing.assert_allclose(after.calibration.offset, before.calibration.offset[classes], atol=1e-8)
    if weights == "view_class":
        np.testing.assert_allclose(after.class_weights, before.class_weights[views][:, classes], atol=1e-8)
    if noise == "confusion":
        np.testing.assert_allclose(after.noise.counts, before.noise.counts[:, classes][:, :, classes], rtol=1e-7)


@pytest.mark.parametrize("noise", NOISES)
def test_counts_equal_repeats(noise):
    rng = np.random.default_rng(4)
    logits, _, labels = draw(rng, 40, 3, 3, accuracy=(0.8,))
    rows = np.arange(40)
    people = rng.integers(0, 2, 40)
    counted = LabelSets.from_table(rows, labels[:, 0], people, count=np.full(40, 2), n_instances=40)
    with pytest.warns(UserWarning, match="'[01]' labels instance 0 twice"):
        repeated = LabelSets.from_table(np.tile(rows, 2), np.tile(labels[:, 0], 2), np.tile(people, 2), n_instances=40)
    results = [fit(logits, sets, noise=noise) for sets in (counted, repeated)]
    np.testing.assert_allclose(*(ascent.bounds for _, ascent in results))
    interval, other = (problem.finish(ascent).weight_interval(0.9) for problem, ascent in results)
    np.testing.assert_allclose(interval, other, atol=1e-8)


def test_counts_table_equals_labels():
    rng = np.random.default_rng(4)
    logits, _, labels = draw(rng, 40, 2, 3)
    counts = np.stack([(labels == c).sum(axis=1) for c in range(3)], axis=1)
    results = [fit(logits, sets, noise="confusion")[1].bounds for sets in (LabelSets.from_counts(counts), labels)]
    np.testing.assert_allclose(*results)


def test_many_classes_are_read_in_place_with_the_same_result(monkeypatch):
    rng = np.random.default_rng(6)
    logits, _, labels = draw(rng, 80, 3, 5)
    labels = labels.astype(float)
    labels[::7] = np.nan
    expected = fit(logits, labels, noise="confusion")[1].bounds
    monkeypatch.setattr("vbtta.models.parts.class_data._FEW_CLASSES", 2)
    monkeypatch.setattr("vbtta.models.parts.class_data._ENTRIES", 100)
    problem, ascent = fit(logits, labels, noise="confusion")
    assert problem.data.whole.stored is None
    np.testing.assert_allclose(ascent.bounds, expected)


def test_one_view_uncalibrated_is_the_plain_model():
    rng = np.random.default_rng(7)
    logits, _, labels = draw(rng, 30, 1, 4, accuracy=(0.9,))
    problem, ascent = fit(logits, labels, calibrate=False)
    posterior = problem.finish(ascent)
    prediction = posterior.predict(ViewPredictions(logits))
    np.testing.assert_allclose(prediction.proba, special.softmax(logits[:, 0], axis=1))
    np.testing.assert_allclose(prediction.mutual_information, 0, atol=1e-12)
    scores = posterior.score(ViewPredictions(logits), LabelSets.from_array(labels), np.full(30, -1))
    assert scores.sum() == pytest.approx(ascent.bounds[-1])


def test_class_weights_shrink_to_the_common_ones():
    rng = np.random.default_rng(8)
    logits, _, labels = draw(rng, 150, 3, 3, accuracy=(0.9,))
    loose, tight = (
        fit(logits, labels, weights="view_class", class_concentration=a, engine=EM(tol=1e-9, max_steps=4000))[1].state
        for a in (1.0, 300.0)
    )
    spread = [np.abs(s.class_weights - s.class_weights.mean(axis=1, keepdims=True)).max() for s in (loose, tight)]
    assert spread[1] < 0.2 * spread[0]
    np.testing.assert_allclose(loose.class_weights.sum(axis=0), 1)


def test_class_weights_are_a_maximum_even_where_the_first_view_has_no_responsibility():
    rng = np.random.default_rng(0)
    common = np.array([1e-17, 0.3, 0.7])
    count = rng.gamma(1.0, size=(4, 3)) * 20
    count[:, 0] = [1e-15, 1e-30, 1e-160, 5.0]
    load = 50 + 30 * rng.random((4, 3))
    load[:, 0] = 6.6  # far below the others', so that the start is this view's
    weights = update_class_weights(count, load, common, 20.0)
    np.testing.assert_allclose(weights.sum(axis=0), 1)
    multiplier = (count + 20 * common).T / weights - load.T  # at the maximum the same for all views
    np.testing.assert_allclose(multiplier, multiplier[:1] * np.ones((3, 1)), rtol=1e-9)


def test_overconfident_views_without_responsibility_keep_finite_class_weights():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 5, size=300)
    right = np.array([0.9, 0.85, 0.5, 0.2])
    view_classes = np.where(rng.random((300, 4)) < right, truth[:, None], rng.integers(0, 5, size=(300, 4)))
    view_classes[:, 3] = np.where(view_classes[:, 3] >= 3, 0, view_classes[:, 3])  # a view that never says some classes
    logits = 40 * np.eye(5)[view_classes] + rng.normal(size=(300, 4, 5))
    for noise in ("none", "uniform"):
        problem, ascent = fit(logits, truth, noise=noise, weights="view_class", engine=EM(max_steps=400, tol=1e-10))
        assert np.isfinite(ascent.bounds).all()
        assert (np.diff(ascent.bounds) >= -1e-9 * abs(ascent.bounds[0])).all()
        np.testing.assert_allclose(ascent.state.class_weights.sum(axis=0), 1)
        assert problem.finish(ascent).weights.max() > 0.3


def test_consensus_and_score_include_the_noise():
    rng = np.random.default_rng(9)
    logits, _, labels = draw(rng, 60, 2, 3)
    sets = LabelSets.from_array(labels, annotators="columns")
    problem, ascent = fit(logits, sets, noise="confusion", concentration=1.0, difficulty=False)
    posterior = problem.finish(ascent)
    views = ViewPredictions(logits)
    prior = posterior.predict(views)
    few = sets.take(np.arange(5))
    subset = views.take(np.arange(8))
    few = LabelSets.from_table(few.instance, few.value, few.annotator, n_instances=8)
    stranger = np.full(len(few), -1)
    for who, counts in ((few.annotator, posterior.noise.counts), (stranger, None)):
        consensus = posterior.consensus(subset, few, who)
        np.testing.assert_allclose(consensus.proba[5:], prior.proba[5:8])  # no labels, no news
        np.testing.assert_allclose(consensus.proba.sum(axis=1), 1)
        average = posterior.noise.counts.mean(axis=0, keepdims=True)  # a stranger is as the others on average
        mean = np.repeat(average, 3, axis=0) if counts is None else counts
        matrix, people = mean / mean.sum(axis=2, keepdims=True), few.annotator
        log_truth = np.log(prior.proba[:5]) + np.stack(
            [
                sum(np.log(matrix[people[j], :, int(few.value[j])]) for j in np.flatnonzero(few.instance == i))  # type: ignore[index]
                for i in range(5)
            ]
        )
        np.testing.assert_allclose(consensus.proba[:5], special.softmax(log_truth, axis=1))
        expected = [
            np.log(
                prior.proba[i]
                @ np.prod([matrix[people[j], :, int(few.value[j])] for j in np.flatnonzero(few.instance == i)], axis=0)  # type: ignore[index]
            )
            for i in range(5)
        ]
        np.testing.assert_allclose(posterior.score(subset, few, who), expected)


def test_kept_views_predict_as_if_the_others_had_no_weight():
    rng = np.random.default_rng(10)
    logits, _, labels = draw(rng, 60, 3, 3)
    for weights in ("view", "view_class"):
        problem, ascent = fit(logits, labels, weights=weights)
        kept = problem.finish(ascent).keep(np.array([0, 2]))
        assert kept.weights.sum() == pytest.approx(1)
        used = np.array([0, 2])[kept.weights > 0]
        assert np.isfinite(kept.predict(ViewPredictions(logits[:, used])).proba).all()
        assert kept.weight_interval(0.9).shape == (2, 2)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("link", ["softmax", "probit"])
def test_odd_labels_give_finite_results(noise, link):
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(6, 2, 4)) * np.array([1.0, 1e4])[:, None]
    cases = [
        LabelSets.from_array(np.zeros(6, dtype=int)),  # one class only
        LabelSets.from_array([0, 1, 1, 0, 1, 0]),  # classes that never occur
        LabelSets.from_table([0], [3], ["ann"], n_instances=6),  # one label
        LabelSets.from_table([0, 1, 1], [3, 2, 3], ["ann", "bob", "ann"], n_instances=6),  # an annotator with one
    ]
    for labels in cases:
        problem, ascent = fit(logits, labels, noise=noise, link=link, engine=EM(max_steps=20, tol=0))
        posterior = problem.finish(ascent)
        assert np.isfinite(ascent.bounds).all()
        assert np.isfinite(posterior.weight_interval(0.9)).all()
        used = np.flatnonzero(posterior.weights > 0)
        views = ViewPredictions(logits[:, used])
        who = np.zeros(len(labels), dtype=int)
        assert np.isfinite(posterior.predict(views).proba).all()
        assert np.isfinite(posterior.consensus(views, labels, who).proba).all()
        assert np.isfinite(posterior.score(views, labels, who)).all()


@pytest.mark.parametrize(("link", "scales"), [("softmax", (100, 1e4, 1e6)), ("probit", (100, 1e4))])
def test_scale_of_the_logits_hardly_matters(link, scales):
    rng = np.random.default_rng(16)
    logits, _, labels = draw(rng, 250, 3, 4, weights=[0.6, 0.4, 0.0], accuracy=(0.95,))

    def loss(scale):
        ascent = fit(scale * logits, labels, link=link)[1]
        assert ascent.converged
        return -float(ascent.statistics.sums.log_evidence) / 250

    plain = loss(1.0)
    np.testing.assert_allclose([loss(scale) for scale in scales], plain, rtol=0.03)


def test_start_is_one_unless_logits_are_wide(monkeypatch):
    rng = np.random.default_rng(17)
    logits, _, labels = draw(rng, 60, 3, 4)

    def start(values):
        return posed(ViewPredictions(values), LabelSets.from_array(labels), CategoricalMixture(), noise="none")[
            1
        ].calibration.log_kappa

    assert (start(logits) == 0).all()
    masked = np.concatenate([logits, np.full((60, 3, 1), -1e9)], axis=2)
    assert (start(masked) == 0).all()  # a class ruled out is no reason to doubt the others
    wide = start(1e4 * logits)
    assert (wide < -5).all()
    monkeypatch.setattr("vbtta.models.parts.class_data.MAX_START_INSTANCES", 20)
    np.testing.assert_allclose(start(1e4 * logits), wide, atol=3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n_views=st.integers(1, 5), accelerate=st.booleans())
def test_bound_never_falls_under_huge_logits(seed, n_views, accelerate):
    rng = np.random.default_rng(seed)
    logits, _, labels = draw(rng, 40, n_views, 4, sharp=rng.choice([300.0, 1e4, 1e6]))
    problem, first = posed(ViewPredictions(logits), LabelSets.from_array(labels), CategoricalMixture(), noise="none")
    kappa_one = first._replace(calibration=Calibration(np.zeros(n_views), np.zeros(4)))
    for start in (first, kappa_one):
        bounds = np.array(ascend(problem, start, EM(max_steps=25, tol=0, accelerate=accelerate)).bounds)
        assert np.isfinite(bounds).all()
        assert (np.diff(bounds) >= -1e-12 * np.abs(bounds[0])).all()


def test_far_extrapolations_of_noise_counts_do_not_lower_the_bound():
    """A network that is too modest about very many classes: temperature and noise are extrapolated together."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 1000, 400)
    logits = rng.normal(size=(400, 12, 1000))[:, :1] + 6 * np.eye(1000)[y][:, None]
    model = CategoricalMixture(noise="uniform", offset_scale=0)
    policy = fit_policy(ViewPredictions(logits), y, task="classification", model=model, guard=False)
    assert (np.diff(policy.history.elbo) >= -1e-9 * np.abs(policy.history.elbo[0])).all()


def refuse(logits, labels, match, **options):
    model = CategoricalMixture(**options)
    with pytest.raises(ValueError, match=match):
        fit_policy(ViewPredictions(logits), LabelSets.from_array(labels), task="classification", model=model)


def test_bad_input_is_named():
    rng = np.random.default_rng(12)
    logits = rng.normal(size=(5, 2, 3))
    refuse(special.softmax(logits, axis=2), [0, 1, 2, 0, 1], r"output=torch\.log")
    refuse(special.softmax(logits, axis=2).astype(np.float32), [0, 1, 2, 0, 1], "probabilities")
    refuse(logits[:, :, :1], [0, 0, 0, 0, 0], "stack zeros")
    refuse(logits, [0, 1, 2, 3, 1], "label 3 is outside")
    refuse(logits, ["a", "b", "a", "b", "a"], "classes")
    refuse(logits[:, :, :2], [-1, 1, 1, -1, 1], "classes")
    refuse(logits, np.eye(3)[[0, 1, 2, 0, 1]], "from_counts")
    refuse(logits, np.full((5, 2), np.nan), "empty")
    with pytest.raises(ValueError, match="class_concentration"):
        CategoricalMixture(weights="view_class", concentration=1.0)


def test_named_classes_map_labels():
    rng = np.random.default_rng(13)
    logits = rng.normal(size=(6, 2, 2))
    plain = fit(logits, [0, 1, 1, 0, 1, 0])[1].bounds
    for classes, labels in (
        ([-1, 1], [-1, 1, 1, -1, 1, -1]),
        (["cat", "dog"], ["cat", "dog", "dog", "cat", "dog", "cat"]),
    ):
        views = ViewPredictions(logits, classes=classes)
        problem, ascent = fit(views, labels)
        np.testing.assert_allclose(ascent.bounds, plain)
        posterior = problem.finish(ascent)
        used = [name for name, weight in zip(views.names, posterior.weights, strict=True) if weight > 0]
        assert set(posterior.predict(views.select(used)).label) <= set(classes)


def test_dirichlet_weights_have_the_divergence_in_the_bound():
    rng = np.random.default_rng(14)
    logits, _, labels = draw(rng, 50, 3, 3)
    problem, ascent = fit(logits, labels, concentration=0.5, noise="uniform")
    state: CategoricalState = ascent.state
    assert state.weight_counts.sum() == pytest.approx(50 + 1.5)
    terms = problem.bound_terms(state, ascent.statistics)
    assert terms["KL_w"] == pytest.approx(float(kl_dirichlet(state.weight_counts, np.full(3, 0.5))))


def test_data_are_not_copied_where_classes_are_many():
    rng = np.random.default_rng(15)
    logits = rng.normal(size=(20, 2, 100)).astype(np.float32)
    predictions = ViewPredictions(logits)
    data = categorical_data(predictions, LabelSets.from_array(np.arange(20)), noise="none", with_variance=False)
    assert data.whole.stored is None
    assert np.shares_memory(data.whole.mean, logits)


def test_prior_of_temperatures_is_a_student_t_around_its_mode():
    prior = CalibrationPrior(0.4, 0.1, 0.1)
    log_kappa = np.array([1.3, 1.1, 1.6])
    state = Calibration(log_kappa, np.zeros(2))

    def density(common):
        offsets = 2 * stats.norm.logpdf(0, scale=0.1)
        return stats.t.logpdf(common, 2, scale=0.4) + stats.norm.logpdf(log_kappa - common, scale=0.1).sum() + offsets

    best = optimize.minimize_scalar(lambda common: -density(common), bounds=(0, 2), method="bounded")
    assert prior.common(log_kappa) == pytest.approx(best.x, abs=1e-5)
    assert prior.log_density(state) == pytest.approx(-best.fun)


@pytest.mark.parametrize("scale", [1 / 50, 50.0])
def test_logits_far_off_scale_are_calibrated(scale):
    """The prior expects a temperature near 1; its tails give way to labels."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(200, 1, 3))
    truth = (logits[:, 0] + rng.gumbel(size=(200, 3))).argmax(axis=1)
    kappa = [np.exp(fit(factor * logits, truth[:, None])[1].state.calibration.log_kappa) for factor in (1, scale)]
    np.testing.assert_allclose(kappa[1] * scale, kappa[0], rtol=0.1)


@pytest.mark.parametrize("n_classes", [4, 150])
def test_a_step_is_the_solution_of_the_whole_system(n_classes):
    rng = np.random.default_rng(4)
    prior, K = CalibrationPrior(0.4, 0.1, 0.1), 3
    state = Calibration(0.2 * rng.normal(size=K), 0.1 * rng.normal(size=n_classes))
    diagonal = rng.gamma(2.0, size=n_classes)
    sums = CalibrationSums(
        rng.normal(size=K),
        rng.normal(size=n_classes),
        10 * rng.gamma(2.0, size=K),
        0.1 * rng.normal(size=(n_classes, K)),
        diagonal,
    )
    kappa = np.exp(state.log_kappa)
    cross = sums.cross_curvature * kappa
    first = np.diag(kappa**2 * sums.kappa_curvature) + prior.log_kappa_precision(state.log_kappa)
    whole = np.block([[first, cross.T], [cross, np.diag(diagonal + 100)]])
    expected = np.linalg.solve(whole, prior.gradient(state, sums))
    np.testing.assert_allclose(prior.direction(state, sums), expected, rtol=1e-7)


def test_offsets_of_scale_zero_stay_at_zero():
    rng = np.random.default_rng(5)
    logits, _, labels = draw(rng, 100, 3, 4)
    state = fit(logits, labels, offset_scale=0)[1].state
    assert not state.calibration.offset.any()
    near = fit(logits, labels, offset_scale=1e-5)[1].state
    np.testing.assert_allclose(state.calibration.log_kappa, near.calibration.log_kappa, atol=1e-3)
    with pytest.raises(ValueError, match="offset_scale"):
        CategoricalMixture(offset_scale=-0.1)


def test_temperatures_start_at_one_unless_logits_are_wide():
    np.testing.assert_array_equal(start_candidates(np.array([6.0, 9.0]), common=False), [[0, 0]])
    assert len(start_candidates(np.array([8.0, 1e4]), common=False)) == 7
    assert len(start_candidates(np.array([8.0, 1e4]), common=True)) == 4


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_a_fit_to_many_logits_takes_less_than_a_copy_of_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are laid out again in every pass, with the same answer as if they were stored."""
    monkeypatch.setattr("vbtta.inference.em._cores", lambda: 2)  # every thread has temporary arrays
    rng = np.random.default_rng(0)
    truth = rng.integers(10, size=60_000)
    predictions = ViewPredictions((rng.normal(size=(60_000, 30, 10)) + np.eye(10)[truth][:, None]).astype(np.float32))
    options: dict[str, Any] = {"task": "classification", "model": model, "engine": EM(max_steps=2, tol=0)}
    fit_policy(predictions.take(slice(90)), truth[:90], guard=False, **options)  # what is imported is not counted
    tracemalloc.start()
    try:
        policy = fit_policy(predictions, truth, guard=False, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < predictions.outputs.nbytes
    monkeypatch.setattr("vbtta.models.parts.class_data._MOST_STORED", 1 << 30)
    np.testing.assert_array_equal(fit_policy(predictions, truth, guard=False, **options).weights, policy.weights)


def test_a_stack_of_many_logits_takes_less_than_two_copies_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is that of a fold's training rows; folds are freed before the next one, and before scoring."""
    monkeypatch.setattr("vbtta.inference.em._cores", lambda: 1)
    rng = np.random.default_rng(0)
    truth = rng.integers(12, size=20_000)
    names = ["identity", *(f"view{k}" for k in range(39))]
    predictions = ViewPredictions(rng.normal(size=(20_000, 40, 12)) + 2 * np.eye(12)[truth][:, None], names=names)
    options: dict[str, Any] = {"task": "classification", "engine": EM(max_steps=2, tol=0)}
    fit_policy(predictions.take(slice(90)), truth[:90], **options)  # what is imported is not counted
    tracemalloc.start()
    try:
        fit_policy(predictions, truth, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.75 * predictions.outputs.nbytes
