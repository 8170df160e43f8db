"""The latent pool for class labels: one weighted sum of logits, its mode, its noise and its intervals."""

import gc
import weakref
from dataclasses import replace

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
from vbtta.inference.laplace import PoolUncertainty, pool_intervals
from vbtta.models.categorical_latent.spec import CategoricalLatent

NOISES = ("none", "uniform", "annotator", "confusion")


def draw(rng, n, n_views, n_classes, *, pool=None, accuracy=(0.95, 0.8, 0.6), sharp=2.0):
    pool = rng.dirichlet(np.ones(n_views)) if pool is None else np.asarray(pool)
    logits = sharp * rng.normal(size=(n, n_views, n_classes))
    utility = np.einsum("k,nkc->nc", pool, logits) + rng.gumbel(size=(n, n_classes))
    truth = utility.argmax(axis=1)
    columns = [
        np.where(rng.random(n) < right, truth, (truth + rng.integers(1, n_classes, n)) % n_classes)
        for right in accuracy
    ]
    return logits, truth, np.stack(columns, axis=1)


def fit(logits, labels, noise="none", engine=None, **options):
    predictions = logits if isinstance(logits, ViewPredictions) else ViewPredictions(logits)
    labels = labels if isinstance(labels, LabelSets) else LabelSets.from_array(labels)
    problem, first = posed(predictions, labels, CategoricalLatent(**options), noise=noise)
    return problem, ascend(problem, first, EM() if engine is None else engine)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_classes=st.integers(2, 12),
    n_views=st.integers(1, 8),
    noise=st.sampled_from(NOISES),
    link=st.sampled_from(["softmax", "probit"]),
    shrinkage=st.sampled_from([0.1, 30.0, 1e6]),
    accelerate=st.booleans(),
)
def test_bound_never_falls(seed, n_classes, n_views, noise, link, shrinkage, accelerate):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40))
    logits, _, labels = draw(rng, n, n_views, n_classes, sharp=rng.choice([0.3, 3.0, 30.0]))
    instance, column = np.nonzero(rng.random(labels.shape) < 0.7)
    instance, column = (instance, column) if len(instance) else (np.array([0]), np.array([0]))
    sets = LabelSets.from_table(
        instance, labels[instance, column], annotator=column, count=rng.integers(1, 4, len(instance)), n_instances=n
    )
    variance = rng.gamma(1.0, size=logits.shape) if rng.random() < 0.5 else None
    engine = EM(max_steps=12, tol=0, accelerate=accelerate)
    problem, ascent = fit(ViewPredictions(logits, variance), sets, noise, engine, link=link, shrinkage=shrinkage)
    bounds = np.array(ascent.bounds)
    assert np.isfinite(bounds).all()
    assert (np.diff(bounds) >= -1e-9 * np.abs(bounds[0])).all()
    np.testing.assert_allclose(ascent.weights[0], 1 / n_views)  # step 1: uniform weights
    terms = problem.bound_terms(ascent.state, ascent.statistics)
    assert terms["J_S"] - sum(value for name, value in terms.items() if name != "J_S") == pytest.approx(bounds[-1])
    interval = problem.finish(ascent).weight_interval(0.9)
    assert np.isfinite(interval).all()
    assert (interval[:, 1] > 0).all()


def test_mode_is_that_of_an_independent_solver():
    rng = np.random.default_rng(0)
    logits, _, labels = draw(rng, 150, 4, 3, pool=[0.7, 0.3, 0.0, 0.0], accuracy=(0.9,))
    ascent = fit(logits, labels, shrinkage=20.0, engine=EM(tol=1e-12))[1]

    def energy(u):
        pool, offset, centre = u[:4], u[4:7], np.exp(u[7])
        utility = np.einsum("k,nkc->nc", pool, logits) + offset
        log_proba = special.log_softmax(utility, axis=1)[np.arange(150), labels[:, 0]]
        prior = 10.0 * ((pool - centre / 4) ** 2).sum() + 50 * (offset**2).sum() - stats.t.logpdf(u[7], 2, scale=0.4)
        return -log_proba.sum() + prior + 4 * special.log_ndtr(np.sqrt(20.0) * centre / 4)

    start = np.concatenate([np.full(4, 0.25), np.zeros(4)])
    bounds = [(0, None)] * 4 + [(None, None)] * 4
    optimum = optimize.minimize(energy, start, bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    state = ascent.state
    np.testing.assert_allclose(state.pool, optimum.x[:4], atol=2e-4)
    np.testing.assert_allclose(state.offset, optimum.x[4:7], atol=2e-4)
    constant = 2 * np.log(20.0 / (2 * np.pi)) - 3 * np.log(0.1 * np.sqrt(2 * np.pi))
    assert ascent.bounds[-1] == pytest.approx(-optimum.fun + constant, abs=1e-4)


@pytest.mark.parametrize("link", ["softmax", "probit"])
@pytest.mark.parametrize("noise", ["none", "confusion"])
def test_gradient_vanishes_at_convergence(link, noise):
    rng = np.random.default_rng(1)
    logits, _, labels = draw(rng, 80, 3, 3)
    predictions = ViewPredictions(logits, rng.gamma(1.0, size=logits.shape))
    problem, ascent = fit(predictions, labels, noise, EM(tol=1e-11), link=link, shrinkage=10.0)
    state = ascent.state

    def bound(step):
        return problem.evaluate(
            state._replace(pool=state.pool + step[:3], offset=state.offset + step[3:6], centre=state.centre + step[6])
        )[0]

    free = np.concatenate([state.pool > 1e-3, np.ones(4, dtype=bool)])
    gradient = np.array([(bound(d) - bound(-d)) / 2e-5 for d in 1e-5 * np.eye(7)[free]])
    assert np.linalg.norm(gradient) < 2e-2
    for k in np.flatnonzero(state.pool == 0):
        assert bound(1e-5 * np.eye(7)[k]) <= bound(np.zeros(7)) + 1e-9


@pytest.mark.parametrize("offset_scale", [0, 0.1])
@pytest.mark.parametrize("noise", ["none", "uniform"])
def test_many_classes_end_at_the_mode(noise, offset_scale):
    """The offsets' curvature is bounded by its diagonal."""
    rng = np.random.default_rng(6)
    logits, _, labels = draw(rng, 80, 3, 140, accuracy=(0.9,), sharp=3.0)
    engine = EM(tol=1e-12)
    problem, ascent = fit(logits, labels[:, 0], noise, engine, shrinkage=10.0, offset_scale=offset_scale)
    assert (np.diff(ascent.bounds) >= -1e-9 * np.abs(ascent.bounds[0])).all()
    state = ascent.state
    assert state.offset.any() == (offset_scale > 0)

    def slope(pool, offset):
        up, down = (
            problem.evaluate(state._replace(pool=state.pool + sign * pool, offset=state.offset + sign * offset))[0]
            for sign in (1e-5, -1e-5)
        )
        return (up - down) / 2e-5

    along = [slope(direction, 0) for direction in np.eye(3)[state.pool > 1e-3]]
    if offset_scale:
        along += [slope(0, direction) for direction in np.eye(140)[:5]]
    np.testing.assert_allclose(along, 0, atol=2e-2)


@pytest.mark.parametrize("noise", ["none", "uniform", "confusion"])
def test_a_pool_held_tightly_finds_its_gain_in_a_few_steps(noise):
    """Equal weights, held by the prior, are one view of average logits: the same gain, and no slower."""
    rng = np.random.default_rng(3)
    truth = rng.integers(4, size=300)
    logits = rng.normal(size=(300, 8, 4)) + 2 * np.eye(4)[truth][:, None]  # together they hardly ever err
    labels = np.where(rng.random((300, 2)) < 0.8, truth[:, None], rng.integers(4, size=(300, 2)))
    _, tight = fit(logits, labels, noise, EM(tol=1e-10), shrinkage=1e7)
    _, single = fit(logits.mean(axis=1, keepdims=True), labels, noise, EM(tol=1e-10), shrinkage=1e7)
    assert tight.converged
    assert len(tight.bounds) < 60
    assert tight.state.pool.sum() == pytest.approx(single.state.pool.sum(), rel=1e-3)
    np.testing.assert_allclose(tight.state.pool / tight.state.pool.sum(), 1 / 8, rtol=0.01)


def test_recovers_pool_and_annotators():
    rng = np.random.default_rng(2)
    pool, accuracy = np.array([0.8, 0.4, 0.0, 0.0]), (0.9, 0.75, 0.6)
    logits, truth, labels = draw(rng, 5000, 4, 5, pool=pool, accuracy=accuracy)
    sets = LabelSets.from_array(labels, annotators="columns")
    problem, ascent = fit(logits, sets, "confusion")
    assert ascent.converged
    assert len(ascent.bounds) <= 60
    posterior = problem.finish(ascent)
    np.testing.assert_allclose(posterior.weights, pool / pool.sum(), atol=0.03)
    assert posterior.gain == pytest.approx(pool.sum(), rel=0.07)
    annotators = posterior.describe_annotators(sets.annotator_names)
    np.testing.assert_allclose(annotators.accuracy, accuracy, atol=0.02)
    interval = posterior.weight_interval(0.95)
    assert ((interval[:, 0] <= pool / pool.sum()) & (pool / pool.sum() <= interval[:, 1])).all()
    used = np.flatnonzero(posterior.weights > 0)
    consensus = posterior.consensus(ViewPredictions(logits[:, used]), sets, sets.annotator)
    votes = np.stack([(labels == c).sum(axis=1) for c in range(5)], axis=1) + 1e-3 * rng.random((5000, 5))
    assert (consensus.label == truth).mean() > (votes.argmax(axis=1) == truth).mean() + 0.05
    assert (consensus.mutual_information <= consensus.entropy).all()


def test_shrinkage_from_the_evidence_tells_equal_views_from_unequal_ones():
    rng = np.random.default_rng(3)
    equal, _, equal_labels = draw(rng, 800, 6, 3, pool=np.full(6, 1 / 6), accuracy=(1.0,), sharp=3.0)
    unequal, _, others = draw(rng, 800, 6, 3, pool=[1.0, 0, 0, 0, 0, 0], accuracy=(1.0,), sharp=3.0)
    assert fit(equal, equal_labels)[0].shrinkage > 10 * fit(unequal, others)[0].shrinkage


def test_permutations_permute_and_counts_equal_repeats():
    rng = np.random.default_rng(4)
    logits, _, labels = draw(rng, 60, 3, 4)
    views, classes = rng.permutation(3), rng.permutation(4)
    before = fit(logits, labels, "confusion", EM(tol=1e-11))[1].state
    moved = logits[:, views][:, :, classes]
    after = fit(moved, np.argsort(classes)[labels], "confusion", EM(tol=1e-11))[1].state
    np.testing.assert_allclose(after.pool, before.pool[views], atol=1e-5)
    np.testing.assert_allclose(after.offset, before.offset[classes], atol=1e-5)
    counts = np.stack([(labels == c).sum(axis=1) for c in range(4)], axis=1)
    results = [fit(logits, sets, "none", shrinkage=5.0)[1].bounds for sets in (LabelSets.from_counts(counts), labels)]
    np.testing.assert_allclose(*results)


def test_one_annotator_equals_uniform():
    rng = np.random.default_rng(5)
    logits, _, labels = draw(rng, 50, 3, 3, accuracy=(0.8, 0.8))
    unnamed = LabelSets.from_table(np.repeat(np.arange(50), 2), labels.ravel(), n_instances=50)
    alone = replace(unnamed, annotator=np.zeros(100, dtype=int), annotator_names=("ann",))
    results = [
        fit(logits, sets, noise, shrinkage=5.0, accuracy_prior=(8, 2))[1].bounds
        for sets, noise in ((alone, "annotator"), (labels, "uniform"))
    ]
    np.testing.assert_allclose(*results)


def test_probit_of_two_classes_is_its_closed_form():
    rng = np.random.default_rng(6)
    logits, _, labels = draw(rng, 40, 2, 2, accuracy=(0.9,))
    variance = rng.gamma(1.0, size=logits.shape)
    problem, ascent = fit(ViewPredictions(logits, variance), labels, link="probit", shrinkage=1.0)
    posterior = problem.finish(ascent)
    used = np.flatnonzero(posterior.weights > 0)
    pool, offset = posterior.pool[used], posterior.offset
    gap = (logits[:, used, 1] - logits[:, used, 0]) @ pool + offset[1] - offset[0]
    spread = np.sqrt(variance[:, used].sum(axis=2) @ pool**2 + 2)
    proba = posterior.predict(ViewPredictions(logits[:, used], variance[:, used])).proba[:, 1]
    np.testing.assert_allclose(proba, special.ndtr(gap / spread), atol=1e-8)


def test_scores_predictions_and_kept_views():
    rng = np.random.default_rng(7)
    logits, _, labels = draw(rng, 60, 3, 3, accuracy=(0.9, 0.8))
    sets = LabelSets.from_array(labels)
    nobody = np.full(len(sets), -1)
    problem, ascent = fit(logits, sets, shrinkage=50.0)
    posterior = problem.finish(ascent)
    used = np.flatnonzero(posterior.weights > 0)
    views = ViewPredictions(logits[:, used])
    utility = np.einsum("k,nkc->nc", posterior.pool, logits) + posterior.offset
    prediction = posterior.predict(views)
    np.testing.assert_allclose(prediction.proba, special.softmax(utility, axis=1), atol=1e-12)
    assert (prediction.mutual_information >= 0).all()
    assert (prediction.mutual_information <= prediction.entropy).all()
    score = posterior.score(views, sets, nobody).sum()
    assert score == pytest.approx(float(ascent.statistics.sums.log_evidence))
    joint = np.stack([(labels == c).sum(axis=1) for c in range(3)], axis=1) * prediction.proba  # one label is right
    np.testing.assert_allclose(posterior.consensus(views, sets, nobody).proba, joint / joint.sum(axis=1)[:, None])
    kept = posterior.keep(np.array([0, 1]))
    assert kept.gain == pytest.approx(posterior.gain)
    assert kept.weight_interval(0.9).shape == (2, 2)
    scale = kept.gain / posterior.pool[:2].sum()
    assert scale > 1
    doubt = kept.uncertainty  # intervals do not depend on the scale of the pool
    scaled = PoolUncertainty(doubt.centre * 2, doubt.covariance * 4, doubt.slope / 2, doubt.stiffness / 4)
    np.testing.assert_allclose(pool_intervals(kept.weights, scaled, 0.9), kept.weight_interval(0.9))
    with pytest.raises(ValueError, match="outside"):
        posterior.consensus(views, LabelSets.from_array(np.full(60, 3)), nobody[:60])


@pytest.mark.parametrize(("link", "scales"), [("softmax", (100, 1e4, 1e6)), ("probit", (300, 1e4))])
def test_scale_of_the_logits_hardly_matters(link, scales):
    rng = np.random.default_rng(9)
    logits, _, labels = draw(rng, 200, 3, 4, pool=[0.6, 0.4, 0.0], accuracy=(0.95,))

    def loss(scale):
        ascent = fit(scale * logits, labels, link=link)[1]
        assert ascent.converged
        return -float(ascent.statistics.sums.log_evidence) / 200

    np.testing.assert_allclose([loss(scale) for scale in scales], loss(1.0), rtol=0.03)


@pytest.mark.parametrize("n_classes", [3, 60])  # few classes are copied, many are read from the predictions
@pytest.mark.parametrize("constant", [1e7, 1e45])
def test_a_constant_added_to_all_logits_is_immaterial(n_classes, constant):
    rng = np.random.default_rng(3)
    logits, _, labels = draw(rng, 60, 3, n_classes, pool=[0.7, 0.3, 0.0], accuracy=(0.9,))
    logits = np.round(logits) if constant < 2**50 else 0 * logits  # such that the sum is exact
    plain, moved = (fit(values, labels)[1].state.pool for values in (logits, logits + constant))
    np.testing.assert_allclose(plain, moved, rtol=1e-9)


def test_first_gain_is_chosen_on_a_sample(monkeypatch):
    rng = np.random.default_rng(10)
    logits, _, labels = draw(rng, 60, 3, 4)
    assert fit(logits, labels, engine=EM(max_steps=1, tol=0), shrinkage=1.0)[1].state.pool.sum() == pytest.approx(1)
    monkeypatch.setattr("vbtta.models.parts.class_data.MAX_START_INSTANCES", 20)
    assert fit(1e4 * logits, labels, engine=EM(max_steps=1, tol=0), shrinkage=1.0)[1].state.pool.sum() < 0.01


def test_no_reference_cycle_keeps_the_data():
    logits = np.random.default_rng(9).normal(size=(50, 3, 4))
    predictions, labels = ViewPredictions(logits), np.arange(50) % 4
    known = weakref.ref(predictions)
    gc.disable()
    try:
        fit_policy(predictions, labels, task="classification", model="latent")
        del predictions
        assert known() is None
    finally:
        gc.enable()


def test_bad_input_is_named():
    logits = np.random.default_rng(8).normal(size=(5, 2, 3))
    for values, labels, match in (
        (special.softmax(logits, axis=2), [0, 1, 2, 0, 1], r"output=torch\.log"),
        (logits[:, :, :1], [0, 0, 0, 0, 0], "stack zeros"),
        (logits, np.full(5, np.nan), "empty"),
        (logits, [0, 1, 2, 3, 1], "outside"),
    ):
        with pytest.raises(ValueError, match=match):
            fit_policy(ViewPredictions(values), LabelSets.from_array(labels), task="classification", model="latent")


def test_curvature_that_rounding_makes_indefinite_is_mended() -> None:
    """Separable classes in single precision: the sums of variances are all cancellation."""
    rng = np.random.default_rng(0)
    truth = rng.integers(300, size=400)
    logits = rng.normal(size=(400, 4, 300)).astype(np.float32)
    logits += (np.eye(300)[truth][:, None] * np.linspace(8, 0.5, 4)[:, None]).astype(np.float32)
    labels = LabelSets.from_array(truth).with_weights(np.full(400, 1e4))
    policy = fit_policy(ViewPredictions(logits), labels, task="classification", model="latent", guard=False)
    assert (policy.predict(ViewPredictions(logits)).label == truth).mean() > 0.99
    assert np.isfinite(policy.weight_interval()).all()
