"""Diagnostics: tests hold their level and have power, simulated labels fit, influence and drift point the right way."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import vbtta
from vbtta import EM, CategoricalMixture, LabelSets, ViewPredictions, diagnostics, fit_policy
from vbtta.augment import CutMix, GaussianNoise, Mixup, RowStreams
from vbtta.collect import collect_views
from vbtta.diagnostics import diagnose, effective_views, henze_zirkler, normality_of
from vbtta.diagnostics.checks import drift_of, influence_of, overlap_of, predictive_checks, prior_sensitivity
from vbtta.diagnostics.diagnosis import listing
from vbtta.diagnostics.normality import anderson_darling, holm, qq_points

NAMES = ["identity", "twin", "noise"]


def ages(seed=0, n=400, labels=1, spread=1.0):
    """Two good views with one error each, a useless one, and labels around the truth."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=n)
    f = np.stack([truth + 0.4 * rng.normal(size=n), truth + 0.5 * rng.normal(size=n), rng.normal(size=n)], axis=1)
    y = truth[:, None] + 0.3 * spread * rng.normal(size=(n, labels))
    return ViewPredictions(f[:, :, None], names=NAMES), y


def crowd(seed=0, n=400, accuracy=0.8):
    """Calibrated logits and three people who are right so often, or else anywhere."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=(n, 1, 4)) + 0.5 * rng.normal(size=(n, 3, 4)) * np.array([0.5, 1, 4])[:, None]
    proba = np.exp(logits[:, 0]) / np.exp(logits[:, 0]).sum(axis=1, keepdims=True)
    truth = (rng.random((n, 1)) > proba.cumsum(axis=1)).sum(axis=1)
    wrong = (truth[:, None] + rng.integers(1, 4, (n, 3))) % 4
    y = np.where(rng.random((n, 3)) < accuracy, truth[:, None], wrong)
    return ViewPredictions(logits, names=NAMES), y


# -- normality ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(30, 2), (150, 2), (60, 3), (40, 7)])
def test_the_henze_zirkler_statistic_is_pingouins(n, d, rng):
    import pingouin

    for sample in (rng.normal(size=(n, d)), rng.gamma(2.0, size=(n, d)) @ rng.normal(size=(d, d)) + 5):
        result, expected = henze_zirkler(sample), pingouin.multivariate_normality(sample)
        assert result.statistic == pytest.approx(expected.hz, abs=1e-6)
        if d <= 2 and n >= 100:  # where the asymptotic p-value holds
            assert result.p_value == pytest.approx(expected.pval, abs=0.05)


@pytest.mark.parametrize(("n", "d"), [(100, 1), (120, 2), (30, 2), (30, 5)])
def test_henze_zirkler_p_values_are_uniform_under_the_null(n, d, rng):
    p_values = [henze_zirkler(rng.normal(size=(n, d))).p_value for _ in range(1000)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize(("n", "d"), [(100, 1), (30, 2)])
def test_henze_zirkler_rejects_as_often_as_it_says(n, d):
    samples = np.random.default_rng(5).normal(size=(2500, n, d))
    p_values = np.array([henze_zirkler(sample).p_value for sample in samples])
    for level in (0.05, 0.5, 0.95):
        # errors of the share itself and of the simulated null distribution, which all samples have in common
        error = np.sqrt(level * (1 - level) * (1 / len(p_values) + 1 / 3999))
        assert (p_values <= level).mean() == pytest.approx(level, abs=3 * error)


def test_henze_zirkler_takes_large_samples_in_reasonable_time(rng):
    assert henze_zirkler(rng.normal(size=3000), simulations=99).p_value > 0.05
    assert henze_zirkler(rng.exponential(size=3000), simulations=99).p_value == 0.01


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), d=st.integers(1, 4))
def test_henze_zirkler_does_not_depend_on_units(seed, d):
    rng = np.random.default_rng(seed)
    sample = rng.exponential(size=(40, d))
    change = rng.normal(size=(d, d)) + 3 * np.eye(d)
    moved = henze_zirkler(sample @ change + rng.normal(size=d))
    assert moved.statistic == pytest.approx(henze_zirkler(sample).statistic, rel=1e-6)


def test_directions_without_variance_are_left_out(rng):
    sample = rng.exponential(size=(60, 2))
    padded = np.column_stack([sample, sample.sum(axis=1), np.full(60, 7.0)])
    assert henze_zirkler(padded).dimension == 2
    assert henze_zirkler(padded).statistic == pytest.approx(henze_zirkler(sample).statistic)
    with pytest.raises(ValueError, match="must vary"):
        henze_zirkler(np.ones((10, 2)))
    with pytest.raises(ValueError, match="finite array"):
        henze_zirkler([[np.nan, 1.0], [2.0, 3.0]])


def test_anderson_darling_holds_its_level_and_has_power(rng):
    normal, skewed = rng.normal(size=(60, 800)), rng.exponential(size=(60, 100))
    assert stats.kstest(anderson_darling(normal), "uniform").pvalue > 0.01
    assert (anderson_darling(skewed) < 0.05).mean() > 0.9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_steps_down(values):
    corrected, p = holm(values), np.array(values)
    order = np.argsort(p)
    expected, running = np.empty(len(p)), 0.0
    for step, place in enumerate(order):
        running = max(running, (len(p) - step) * p[place])
        expected[place] = min(running, 1)
    np.testing.assert_allclose(corrected, expected)
    assert (corrected >= p).all()


@pytest.mark.parametrize("draws", [8, 40])
def test_scores_of_few_draws_are_exactly_normal(draws, rng):
    scores = np.concatenate([qq_points(5 + 3 * rng.normal(size=(draws, 1))).ravel() for _ in range(400)])
    assert stats.kstest(scores, "norm").pvalue > 0.01


def test_mixup_at_a_tail_point_is_rejected_and_gaussian_noise_is_not(rng):
    pool = rng.normal(size=(10_000, 2))
    tail = np.broadcast_to([3.0, 3.0], (200, 2))

    def p_value(view):
        return henze_zirkler(view(tail, RowStreams(0, view.name, 0, range(200)))).p_value

    assert p_value(Mixup(0.5, pool)) < 0.001
    assert p_value(CutMix(0.5, pool)) < 0.001
    assert p_value(GaussianNoise(0.3)) > 0.05


def test_draws_of_collected_views_are_tested_in_output_space(rng):
    pool, inputs = rng.normal(size=(500, 3)), 2 + rng.normal(size=(40, 3))
    linear = rng.normal(size=(3, 2))
    views = [vbtta.augment.Identity(), GaussianNoise(0.2), Mixup(0.5, pool)]
    predictions = collect_views(lambda batch: batch @ linear, inputs, views, draws=60, keep_draws=40)
    normality = normality_of(predictions.draws, predictions.names)
    assert list(normality.tested) == [0, 40, 40]
    assert np.isnan(normality.henze_zirkler[0])
    for shares in (normality.henze_zirkler, normality.anderson_darling, normality.shapiro_wilk):
        assert shares[1] < 0.2
        assert shares[2] > 0.8
    np.testing.assert_allclose(normality.qq_draws[1], normality.qq_normal, atol=0.3)
    assert np.isnan(normality.qq_draws[0]).all()


def test_normality_refuses_what_it_cannot_test():
    with pytest.raises(ValueError, match="must be \\(n, K, M, C\\)"):
        normality_of(np.zeros((5, 2, 3)))
    with pytest.raises(ValueError, match="at least 8 draws"):
        normality_of(np.zeros((5, 2, 3, 1)))
    with pytest.raises(ValueError, match="names must be 2 strings"):
        normality_of(np.zeros((5, 2, 10, 1)), ["one"])


# -- views --------------------------------------------------------------------------------------


def test_effective_views():
    assert effective_views(np.full(5, 0.2)) == pytest.approx(5)
    assert effective_views(np.array([1.0, 0, 0])) == 1


def test_copies_of_a_view_overlap_and_different_views_do_not():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=600)
    first = rng.random(600) < 0.5  # one view is right where the other is far off
    good, bad = truth + 0.05 * rng.normal(size=(2, 600)), truth + 3 * rng.normal(size=(2, 600))
    a, b = np.where(first, good[0], bad[0]), np.where(first, bad[1], good[1])
    predictions = ViewPredictions(np.stack([a, a + 1e-3 * rng.normal(size=600), b], axis=1)[:, :, None], names=NAMES)
    few = EM(max_steps=10, tol=0, accelerate=False)  # before the copy is dropped, as it would be in the end
    policy = fit_policy(predictions, truth, task="regression", model="mixture", engine=few, guard=False)
    overlap = overlap_of(policy, predictions, LabelSets.from_array(truth))
    assert overlap.share.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.diagonal(overlap.matrix), 1)
    assert np.all((overlap.matrix >= 0) & (overlap.matrix <= 1 + 1e-12))
    assert overlap.names == tuple(NAMES)
    assert overlap.matrix[0, 1] > 0.8
    assert max(overlap.matrix[2, :2]) < 0.2


def test_influence_says_which_view_is_missed():
    predictions, y = ages(n=600)
    policy = fit_policy(predictions, y, task="regression", model="latent", guard=False)
    influence = influence_of(policy, predictions, LabelSets.from_array(y))
    assert influence.score[0] < -2 * influence.standard_error[0] < 0
    assert influence.score[0] < influence.score[1] < 0
    assert abs(influence.score[2]) < 3 * influence.standard_error[2] + 1e-3
    assert all(influence.score[k] == 0 for k in range(3) if policy.weights[k] == 0)


# -- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_label_sets_of_the_model_pass_the_predictive_checks(model):
    predictions, y = crowd(n=800)
    policy = fit_policy(predictions, y, task="classification", model=model, guard=False)
    checks = predictive_checks(policy, predictions, LabelSets.from_array(y))
    assert {"share of pairs of labels that agree", "frequency of class 0"} <= {check.statistic for check in checks}
    assert min(check.p_value for check in checks) > 0.01
    assert all(check.low <= check.expected <= check.high for check in checks)


def test_small_crowds_raise_no_false_alarms():
    p_values_of: dict[str, list[float]] = {}
    for seed in range(60):
        predictions, y = crowd(seed=seed, n=60 + 20 * (seed % 3), accuracy=(0.8, 0.95)[seed % 2])
        labels = LabelSets.from_array(y, annotators="columns")
        model = CategoricalMixture(noise="confusion")
        policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
        for check in predictive_checks(policy, predictions, labels, simulations=100, seed=seed):
            p_values_of.setdefault(check.statistic, []).append(check.p_value)
    assert {name: np.mean(np.array(p_values) < 0.05) < 0.15 for name, p_values in p_values_of.items()} == dict.fromkeys(
        p_values_of, True
    )


def test_errors_of_another_kind_than_the_noise_models_are_found():
    predictions, y = crowd(n=400)
    y[(y == 0) & (np.random.default_rng(1).random(y.shape) < 0.7)] = 1  # one class is called another
    labels = LabelSets.from_array(y, annotators="columns")
    least = {}
    for noise in ("annotator", "uniform", "confusion"):
        model = CategoricalMixture(noise=noise)
        policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
        checks = {check.statistic: check for check in predictive_checks(policy, predictions, labels)}
        least[noise] = checks["frequency of class 0"].p_value
    assert least["annotator"] < 0.01
    assert least["uniform"] < 0.01
    assert least["confusion"] > 0.05


def test_strangers_are_simulated_as_the_average_annotator():
    predictions, y = crowd(n=100)
    policy = fit_policy(
        predictions,
        LabelSets.from_array(y, annotators="columns"),
        task="classification",
        model=CategoricalMixture(noise="confusion"),
        guard=False,
    )
    for labels in (LabelSets.from_array(y), LabelSets.from_array(y, annotators=["new", "newer", "newest"])):
        checks = predictive_checks(policy, predictions, labels)
        assert min(check.p_value for check in checks) > 0.01


def test_numbers_pass_the_predictive_checks_with_and_without_annotators():
    predictions, y = ages(n=800, labels=2)
    for labels in (LabelSets.from_array(y, annotators="columns"), LabelSets.from_array(y[:, 0])):
        policy = fit_policy(predictions, labels, task="regression", model="latent", guard=False)
        checks = predictive_checks(policy, predictions, labels)
        assert ("spread among the labels of an instance" in {check.statistic for check in checks}) == (
            labels.annotator is not None
        )
        assert min(check.p_value for check in checks) > 0.01


def test_a_wrong_model_fails_the_predictive_checks():
    predictions, y = crowd(n=800, accuracy=0.95)
    # without a noise model labels are independent given the views: they agree more often than that
    policy = fit_policy(predictions, y, task="classification", model=CategoricalMixture(noise="none"), guard=False)
    checks = {check.statistic: check for check in predictive_checks(policy, predictions, LabelSets.from_array(y))}
    agreement = checks["share of pairs of labels that agree"]
    assert agreement.p_value < 0.01
    assert agreement.observed > agreement.high
    predictions, y = ages()
    heavy = y + (np.random.default_rng(1).random(y.shape) < 0.02) * 30
    policy = fit_policy(predictions, heavy, task="regression", model="latent", guard=False)
    results = predictive_checks(policy, predictions, LabelSets.from_array(heavy))
    assert min(check.p_value for check in results) < 0.01


def test_the_agreement_of_pairs_counts_counts():
    predictions, y = crowd(n=60)
    counts = np.stack([(y == c).sum(axis=1) for c in range(4)], axis=1)
    policy = fit_policy(predictions, y, task="classification", model="mixture", guard=False)
    pairs = np.mean([(y[:, a] == y[:, b]) for a, b in ((0, 1), (0, 2), (1, 2))])
    for labels in (LabelSets.from_array(y), LabelSets.from_counts(counts)):
        checks = {check.statistic: check for check in predictive_checks(policy, predictions, labels, simulations=5)}
        assert checks["share of pairs of labels that agree"].observed == pytest.approx(pairs)


def test_prior_sensitivity_names_the_prior_that_matters():
    predictions, y = ages(n=30)
    policy = fit_policy(predictions, y, task="regression", model=vbtta.GaussianLatent(shrinkage=300.0), guard=False)
    sensitivities = prior_sensitivity(policy, predictions, LabelSets.from_array(y))
    assert {sensitivity.prior for sensitivity in sensitivities} == {"shrinkage", "beta"}
    worst = max(sensitivities, key=lambda sensitivity: sensitivity.distance)
    assert worst.prior == "shrinkage"
    assert 0.01 < worst.distance <= 1


# -- drift --------------------------------------------------------------------------------------


def test_drift_is_seen_where_there_is_some_and_only_there():
    predictions, y = ages(0, n=1000)
    policy = fit_policy(predictions, y, task="regression", model="mixture", guard=False)
    same, _ = ages(1, n=1000)
    assert not drift_of(policy, predictions, same).drifted
    apart = ViewPredictions(same.outputs + np.array([0, 1.0, 0])[:, None], names=NAMES)
    drift = drift_of(policy, predictions, apart)
    assert drift.drifted
    assert {check.signal for check in drift.checks} == {"predicted deviation", "disagreement", "prediction"}
    views, labels = crowd(0, n=1000)
    policy = fit_policy(views, labels, task="classification", model="mixture", guard=False)
    same, _ = crowd(1, n=1000)
    assert not drift_of(policy, views, same).drifted
    duller = drift_of(policy, views, ViewPredictions(0.5 * same.outputs, names=NAMES))
    shift = {check.signal: check.shift for check in duller.checks}
    assert duller.drifted
    assert shift["confidence"] < -0.2


# -- all together -------------------------------------------------------------------------------


def test_a_diagnosis_reads_as_text_and_as_json(rng):
    predictions, y = crowd(n=300)
    labels = LabelSets.from_array(y, annotators="columns")
    policy = fit_policy(predictions, labels, task="classification", model="latent", guard=False)
    draws = predictions.outputs[:30, :, None] + rng.normal(size=(30, 3, 40, 4)) * np.array([0, 1, 1])[:, None, None]
    draws[:, 2] = np.exp(draws[:, 2])
    incoming = ViewPredictions(predictions.outputs * 0.3, names=NAMES)
    diagnosis = diagnose(policy, predictions, labels, draws, incoming=incoming)
    text = str(diagnosis)
    assert text == diagnosis.summary()
    assert "views are kept" in text
    assert "Annotators: annotator_0 " in text
    assert "! noise: draws are not Gaussian for" in text
    assert "! Incoming views differ from calibration time" in text
    assert "! twin: draws" not in text
    assert "Diagnosis(classification: 3 views" in repr(diagnosis)
    assert len(diagnosis.plot().axes) == 2
    plain = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert plain["normality"]["henze_zirkler"][0] is None
    assert plain["effective_views"] == pytest.approx(diagnosis.effective_views)


def test_annotators_who_guess_are_named(rng):
    truth = rng.integers(3, size=300)
    views = ViewPredictions(2 * np.eye(3)[truth][:, None] + rng.normal(size=(300, 2, 3)), names=["identity", "flip"])
    skill = {"ann": 0.9, "bob": 0.8, "spam": 1 / 3, "foe": 0.1}
    guesses = rng.integers(1, 3, size=(300, 4)) + truth[:, None]  # another class
    votes = np.where(rng.random((300, 4)) < [*skill.values()], truth[:, None], guesses % 3)
    for people, guessing in ((["ann", "bob", "spam", "foe"], ("spam", "foe")), (["ann", "bob"], ())):
        labels = LabelSets.from_array(votes[:, : len(people)], annotators=people)
        policy = fit_policy(views, labels, task="classification", model=CategoricalMixture(noise="annotator"))
        diagnosis = diagnose(policy, views)
        assert diagnosis.at_chance == guessing
        line = f"! No better than guessing, by their intervals of accuracy: {', '.join(guessing)}."
        assert (line in str(diagnosis).splitlines()) == bool(guessing)


def test_a_diagnosis_without_labels_or_draws_says_what_is_missing():
    predictions, y = ages(n=100)
    policy = fit_policy(predictions, y, task="regression", model="latent", guard=False)
    diagnosis = diagnose(policy, predictions)
    assert diagnosis.overlap is None
    assert diagnosis.influence is None
    assert "not tested: there are none" in str(diagnosis)
    quick = diagnose(policy, predictions, y, refit=False)
    assert quick.influence is None
    assert quick.predictive is not None


def test_draws_are_taken_from_the_predictions(rng):
    predictions, y = ages(n=100)
    kept = ViewPredictions(
        predictions.outputs, names=NAMES, draws=predictions.outputs[:20, :, None] + rng.normal(size=(20, 3, 30, 1))
    )
    policy = fit_policy(predictions, y, task="regression", model="latent", guard=False)
    assert diagnose(policy, kept).normality.tested.tolist() == [20, 20, 20]


def test_the_function_is_public():
    assert vbtta.diagnose is diagnostics.diagnose


def test_henze_zirkler_keeps_outputs_of_very_different_size() -> None:
    sample = np.random.default_rng(0).normal(size=(50, 2))
    plain = henze_zirkler(sample)
    scaled = henze_zirkler(sample * [2e5, 1.0] + [3.0, -1.0])
    assert scaled.statistic == pytest.approx(plain.statistic)
    assert scaled.dimension == plain.dimension == 2


def test_too_few_draws_for_the_multivariate_test_are_no_acceptance(rng):
    normality = normality_of(rng.exponential(size=(20, 1, 10, 10)) ** 3)
    assert np.isnan(normality.henze_zirkler[0])
    assert normality.anderson_darling[0] == 1


def test_henze_zirkler_does_not_reject_by_rounding_in_many_dimensions(rng):
    p_values = [henze_zirkler(rng.normal(size=(130, 100)), simulations=99).p_value for _ in range(40)]
    assert np.mean(np.array(p_values) <= 0.05) < 0.2


def test_a_listing_counts_what_it_leaves_out():
    assert listing(["a", "b", "c"], most=2) == "a, b and 1 more"
    assert listing(["a", "b"], most=2) == "a, b"


def test_rows_of_a_group_are_one_observation_of_the_predictive_checks():
    """Labels of a group are one draw, repeated: as single rows they seem far from what is predicted."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 50)
    outputs = np.repeat(rng.normal(size=(60, 2, 2)), 50, axis=0) + 0.01 * rng.normal(size=(3000, 2, 2))
    views = ViewPredictions(outputs, names=["identity", "flip"])
    policy = fit_policy(
        views, (outputs.mean(1) + rng.gumbel(size=(3000, 2))).argmax(1), task="classification", guard=False
    )
    smallest = []
    for _ in range(8):
        labels = (outputs.mean(1)[::50] + rng.gumbel(size=(60, 2))).argmax(1)[groups]
        checks = [
            predictive_checks(policy, part, LabelSets.from_array(labels)) for part in (views, views.with_groups(groups))
        ]
        smallest.append([min(check.p_value for check in part) for part in checks])
    naive, grouped = np.median(smallest, axis=0)
    assert naive < 0.01
    assert grouped > 0.05


def test_a_gate_is_described_by_its_heavy_views_and_their_inputs():
    rng = np.random.default_rng(0)
    truth, better = rng.integers(0, 3, size=400), (rng.random(400) < 0.3).astype(int)
    logits = 0.3 * rng.normal(size=(400, 2, 3))
    logits[np.arange(400), better, truth] += 3
    views = ViewPredictions(logits, names=["identity", "turned"], ids=[f"scan {n}" for n in range(400)])
    model = CategoricalMixture(weights="input")
    policy = fit_policy(views, truth, task="classification", model=model, guard=False)
    diagnosis = diagnose(policy, views, truth, refit=False)
    first, second = diagnosis.gate.views
    assert (first.name, second.name) == ("identity", "turned")
    assert second.share == pytest.approx(better.mean(), abs=0.03)
    assert all(better[int(name.removeprefix("scan "))] for name in second.examples)
    assert second.contrast[diagnosis.gate.features.index("entropy")] < -1
    assert "turned is the heaviest for " in diagnosis.summary()
    assert diagnosis.to_dict()["gate"]["views"][1]["name"] == "turned"
    constant = fit_policy(views, truth, task="classification", model="mixture", guard=False)
    assert diagnose(constant, views, truth, refit=False).gate is None


@pytest.mark.parametrize("digits", [0, 12])
def test_annotators_who_copy_numbers_are_named(digits: int) -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(40, 10, size=300)
    predictions = ViewPredictions(
        (truth[:, None] + 4 * rng.normal(size=(300, 2)))[:, :, None], names=["identity", "flip"]
    )
    answers = np.round(truth[:, None] + 3 * rng.normal(size=(300, 4)), digits)
    copied = answers.copy()
    copied[:100, 1] = copied[:100, 0]
    for values, pairs in ((answers, []), (copied, [("a", "b")])):
        labels = LabelSets.from_array(values, annotators=list("abcd"))
        policy = fit_policy(predictions, labels, task="regression", model="latent", guard=False)
        copying = diagnose(policy, predictions, labels).copying or ()
        assert [(pair.first, pair.second) for pair in copying if pair.p_value < 0.01] == pairs


def test_one_labelled_input_is_diagnosed_without_held_out_scores() -> None:
    views = ViewPredictions(np.zeros((1, 2, 1)), names=["identity", "flip"])
    policy = fit_policy(views, [[1.0]], task="regression", model="latent", guard=False)
    assert diagnose(policy, views, [[1.0]]).influence is None
