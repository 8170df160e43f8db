"""Noise between true class and label: expectations, updates and divergences of every kind."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special

from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics import diagnose
from vbtta.fit import fit_policy
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts import label_noise

KINDS = ("uniform", "annotator", "confusion")


def tables(kind, seed=0, n=30, n_classes=4):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, n_classes, size=(n, 3)).astype(float)
    values[rng.random(values.shape) < 0.2] = np.nan
    values[0, 0] = 1
    labels = LabelSets.from_array(values, annotators="columns")
    table = label_noise.label_table(labels, labels.categorical(n_classes), kind)
    truth = rng.dirichlet(np.ones(n_classes), size=table.n_instances)
    return labels, table, truth


def noise(kind, n_classes, **options):
    return CategoricalMixture(noise=kind, **options).noise_model(n_classes)


def evidence(model, log_noise, table):
    return label_noise.LabelReading(model.of_kind, log_noise, None, model.n_classes, table).log_evidence


def updated(model, truth, table):
    return label_noise.FittedNoise(model, model.prior + model.of_kind.counts(truth[table.groups.owner], table))


def full_matrices(model, log_noise):
    """ln A_u[c, y] written out: (U, C, C)."""
    if model.kind == "confusion":
        return log_noise
    C = model.n_classes
    right, wrong = log_noise[:, 0], log_noise[:, 1] - np.log(C - 1)
    return np.where(np.eye(C, dtype=bool), right[:, None, None], wrong[:, None, None])


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_is_the_sum_over_an_instances_labels(kind):
    _, table, _ = tables(kind)
    model = noise(kind, 4)
    counts = model.prior + np.random.default_rng(1).random((table.n_annotators, *model.prior.shape))
    log_noise = label_noise.log_expected(counts)
    expected = np.zeros((table.n_instances, 4))
    matrices = full_matrices(model, log_noise)
    for i, y, u, n in zip(table.instance, table.label, table.annotator, table.repeats, strict=True):
        expected[i] += n * matrices[u][:, y]
    np.testing.assert_allclose(evidence(model, log_noise, table), expected)
    np.testing.assert_allclose(label_noise.FittedNoise(model, counts).reader()(table).log_evidence, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_update_maximises_expected_evidence_less_divergence(kind):
    _, table, truth = tables(kind)
    model = noise(kind, 4)

    def bound(fitted):
        return (truth * fitted.reader()(table).log_evidence).sum() - fitted.divergence()

    best = updated(model, truth, table)
    rng = np.random.default_rng(3)
    for _ in range(20):
        other = best._replace(counts=best.counts * np.exp(0.1 * rng.normal(size=best.counts.shape)))
        assert bound(best) >= bound(other) - 1e-9
    total = best.counts.sum() - model.start(table.n_annotators).counts.sum()
    assert total == pytest.approx(table.repeats.sum())


def test_expected_logarithms_are_those_of_beta_and_dirichlet():
    draws = np.random.default_rng(0).dirichlet([8.5, 3.0, 1.5], size=200_000)
    np.testing.assert_allclose(
        label_noise.log_expected(np.array([[8.5, 3.0, 1.5]]))[0], np.log(draws).mean(axis=0), atol=0.01
    )


def test_one_annotator_is_the_uniform_model():
    labels, _, truth = tables("uniform")
    position = labels.categorical(4)
    alone = replace(labels, annotator=np.zeros(len(labels), dtype=int), annotator_names=("ann",))
    counts = [
        updated(noise(kind, 4, accuracy_prior=(8, 2)), truth, label_noise.label_table(sets, position, kind)).counts
        for kind, sets in (("uniform", labels), ("annotator", alone))
    ]
    np.testing.assert_allclose(*counts)


def test_uniform_is_the_confusion_model_of_two_classes_with_the_same_matrix():
    model = noise("uniform", 2)
    confusion = noise("confusion", 2)
    labels = LabelSets.from_array([[0, 1], [1, 1]])
    table = label_noise.label_table(labels, labels.categorical(2), "uniform")
    log_noise = np.log(np.array([[0.8, 0.2]]))
    both = np.log(np.array([[[0.8, 0.2], [0.2, 0.8]]]))
    np.testing.assert_allclose(evidence(model, log_noise, table), evidence(confusion, both, table))


def test_priors_are_those_of_the_specification():
    confusion = noise("confusion", 10)
    assert confusion.prior[0, 0] == 8.5
    assert confusion.prior[0, 1] == 0.5
    assert noise("annotator", 10).prior.tolist() == [8, 2]
    assert noise("none", 10) is None


@pytest.mark.parametrize("kind", KINDS)
def test_description_holds_known_annotators(kind):
    rng = np.random.default_rng(0)
    truth, accuracy = rng.integers(0, 3, size=4000), (0.95, 0.7)
    columns = [np.where(rng.random(4000) < a, truth, (truth + rng.integers(1, 3, 4000)) % 3) for a in accuracy]
    labels = LabelSets.from_array(np.stack(columns, axis=1), annotators=["ann", "bob"])
    table = label_noise.label_table(labels, labels.categorical(3), kind)
    model = noise(kind, 3)
    description = label_noise.describe(updated(model, np.eye(3)[truth], table), labels.annotator_names)
    if kind == "uniform":
        assert description.names == ("all",)
        np.testing.assert_allclose(description.accuracy, [np.mean(accuracy)], atol=0.02)
    else:
        assert description.names == ("ann", "bob")
        np.testing.assert_allclose(description.accuracy, accuracy, atol=0.02)
    assert (description.accuracy_interval[:, 0] < description.accuracy).all()
    assert (description.accuracy < description.accuracy_interval[:, 1]).all()
    assert np.ptp(description.accuracy_interval, axis=1).max() < 0.04
    np.testing.assert_allclose(description.confusion.sum(axis=2), 1)


def test_interval_is_the_beta_posterior():
    model = noise("annotator", 5)
    description = label_noise.describe(label_noise.FittedNoise(model, np.array([[20.0, 5.0]])), ("ann",))
    assert special.betainc(20, 5, description.accuracy_interval[0, 0]) == pytest.approx(0.05)
    assert special.betainc(20, 5, description.accuracy_interval[0, 1]) == pytest.approx(0.95)


def test_intervals_of_accuracies_cover_them_under_confusion():
    rng = np.random.default_rng(1)
    accuracy, n, n_classes, runs = np.array([0.95, 0.8, 0.65]), 300, 4, 300
    model = noise("confusion", n_classes)
    inside = np.zeros(3)
    for _ in range(runs):
        truth = rng.integers(0, n_classes, size=(n, 1))
        wrong = (truth + rng.integers(1, n_classes, size=(n, 3))) % n_classes
        votes = np.where(rng.random((n, 3)) < accuracy, truth, wrong)
        labels = LabelSets.from_array(votes, annotators="columns")
        table = label_noise.label_table(labels, labels.categorical(n_classes), "confusion")
        fitted = updated(model, np.eye(n_classes)[truth[:, 0]], table)
        low, high = label_noise.describe(fitted, labels.annotator_names).accuracy_interval.T
        inside += (low <= accuracy) & (accuracy <= high)
    assert (inside / runs > 0.84).all()
    assert (inside / runs < 0.96).all()


def test_accuracy_under_confusion_without_labels_is_that_of_its_prior():
    model = noise("confusion", 4, accuracy_prior=(6.0, 2.0))
    description = label_noise.describe(model.start(1), ("ann",))
    assert description.accuracy[0] == pytest.approx(0.75)
    np.testing.assert_allclose(special.betainc(6, 2, description.accuracy_interval[0]), [0.05, 0.95])


def test_confusion_by_default_needs_overlap_and_ten_labels_a_row():
    single = np.zeros(100, dtype=int)
    assert label_noise.default_noise(LabelSets.from_array(single)) == "uniform"
    few = np.column_stack([np.zeros(300), np.where(np.arange(300) < 19, 1.0, np.nan)])
    assert label_noise.default_noise(LabelSets.from_array(few)) == "uniform"
    few[19, 1] = 1
    assert label_noise.default_noise(LabelSets.from_array(few)) == "confusion"
    assert label_noise.default_noise(LabelSets.from_counts([[0, 18], [2, 0]])) == "confusion"
    assert label_noise.default_noise(LabelSets.from_counts([[0, 17], [2, 0]])) == "uniform"
    pairs = np.arange(40).reshape(20, 2) % 4  # ten labels of each of four classes, five of them from each annotator
    assert label_noise.default_noise(LabelSets.from_array(pairs)) == "confusion"
    assert label_noise.default_noise(LabelSets.from_array(pairs, annotators=["ann", "bob"])) == "annotator"


def test_too_many_matrices_name_the_remedy():
    model = noise("confusion", 1000)
    with pytest.raises(ValueError, match="noise='annotator'"):
        model.start(500)


def difficult(kind, seed=0):
    """A table with apparent classes, a noise model with item difficulty, and Q of its parameters."""
    _, table, truth = tables(kind, seed=seed, n=12)
    rng = np.random.default_rng(seed + 1)
    apparent = rng.dirichlet(np.ones(4), size=table.n_instances)
    table = replace(table, apparent_class=apparent)
    start = noise(kind, 4).start(table.n_annotators)
    fitted = start._replace(
        counts=start.counts + rng.random(start.counts.shape), levels=np.array([15.0, 9.0]), tally=np.zeros(1)
    )
    return table, truth, apparent, fitted


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_hard_instances_may_be_the_apparent_class(kind):
    table, _, apparent, fitted = difficult(kind)
    matrices = np.exp(full_matrices(fitted.model, label_noise.log_expected(fitted.counts)))
    easy, hard = np.exp(label_noise.log_expected(fitted.levels))
    for i in range(table.n_instances):
        own = [(table.label[j], matrices[table.annotator[j]]) for j in np.flatnonzero(table.instance == i)]
        for c in range(4):
            total = easy * np.prod([matrix[c, y] for y, matrix in own])
            for d in range(4):
                each = [0.4 * (y == d) + 0.6 * matrix[c, y] for y, matrix in own]
                total += hard * apparent[i, d] * np.prod(each)
            assert np.exp(fitted.reader()(table).log_evidence[i, c]) == pytest.approx(total)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_with_difficulty_do_not_lower_the_bound(kind):
    table, truth, _, fitted = difficult(kind)

    def bound(noise):
        return np.log((truth * np.exp(noise.reader()(table).log_evidence)).sum(axis=1)).sum() - noise.divergence()

    heights = [bound(fitted)]
    for _ in range(8):
        reading = fitted.reader()(table)
        posterior = truth * np.exp(reading.log_evidence)
        fitted = fitted.update(reading.sums(posterior / posterior.sum(axis=1, keepdims=True)))
        heights.append(bound(fitted))
    assert (np.diff(heights) >= -1e-10).all()
    assert heights[-1] > heights[0]
    assert fitted.tally.sum() == pytest.approx(table.repeats.sum())
    assert fitted.levels.sum() == pytest.approx(26 + table.n_instances)


def crowd(seed, n=300, n_classes=4, hard=0.0):
    """Views and labels by three of twelve annotators each; on hard inputs labels may be what the input looks like."""
    rng = np.random.default_rng(seed)
    accuracy = np.array([0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.9, 0.85, 0.8, 0.6, 0.25, 0.25])
    truth, is_hard = rng.integers(0, n_classes, n), rng.random(n) < hard
    apparent = np.where(is_hard & (rng.random(n) < 0.5), (truth + rng.integers(1, n_classes, n)) % n_classes, truth)
    logits = 0.8 * rng.normal(size=(n, 3, n_classes)) + 0.6 * rng.normal(size=(n, 1, n_classes))
    logits += np.where(is_hard, 0.9, 2.2)[:, None, None] * np.eye(n_classes)[truth][:, None]
    logits += np.where(is_hard, 1.2, 0)[:, None, None] * np.eye(n_classes)[apparent][:, None]
    people = np.argsort(rng.random((n, 12)), axis=1)[:, :3]
    votes = np.where(
        rng.random((n, 3)) < accuracy[people],
        truth[:, None],
        (truth[:, None] + rng.integers(1, n_classes, (n, 3))) % n_classes,
    )
    votes = np.where(is_hard[:, None] & (rng.random((n, 3)) < 0.4), apparent[:, None], votes)
    labels = LabelSets.from_table(np.repeat(np.arange(n), 3), votes.ravel(), [f"{u:02d}" for u in people.ravel()])
    return ViewPredictions(logits), labels, truth, accuracy * (1 - 0.4 * hard) + 0.2 * hard


@pytest.mark.parametrize("hard", [0.0, 0.3])
def test_intervals_hold_accuracies_and_spammers_are_found(hard):
    inside, error, claims = [], [], []
    for seed in range(6):
        predictions, labels, truth, accuracy = crowd(seed, hard=hard)
        model = CategoricalMixture(noise="annotator")
        policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
        low, high = policy.annotators.accuracy_interval.T
        inside.append((low <= accuracy) & (accuracy <= high))
        error.append(policy.annotators.accuracy - accuracy)
        consensus = policy.consensus(predictions, labels)
        claims.append(consensus.proba.max(axis=1).mean() - (consensus.label == truth).mean())
    assert 0.84 < np.mean(inside) < 0.99
    assert abs(np.mean(error, axis=0)[10:].mean()) < 0.08  # spammers, right in about one of four cases
    assert abs(np.mean(claims)) < 0.06


def test_item_difficulty_is_for_overlapping_labels_and_em():
    predictions, labels, _, _ = crowd(0, n=60)
    options = {"task": "classification", "guard": False}
    single = LabelSets.from_array(labels.value[::3])
    assert fit_policy(predictions, single, model=CategoricalMixture(), **options).model.difficulty is False  # type: ignore[attr-defined]
    policy = fit_policy(predictions, labels, model=CategoricalMixture(noise="confusion"), **options)
    assert policy.label_noise.levels is not None
    with pytest.raises(ValueError, match="needs a noise model"):
        CategoricalMixture(noise="none", difficulty=True)
    pytest.importorskip("pyro", reason="ADVI needs the extra advi")
    model = CategoricalMixture(noise="confusion", difficulty=True)
    with pytest.raises(ValueError, match="needs engine='em'"):
        fit_policy(predictions, labels, model=model, engine="advi", **options)


def test_tables_of_annotators():
    policy = fit_policy(*crowd(0, n=60)[:2], task="classification", model="mixture", guard=False)
    assert repr(policy.annotators).startswith("AnnotatorAccuracy(12 annotators: 00 ")
    assert len(repr(policy.annotators)) < 120
    frame = policy.annotators.to_frame()
    assert frame.index[3] == "03"
    assert frame.loc["03", "accuracy"] == policy.annotators.accuracy[3]
    assert ((frame.low < frame.accuracy) & (frame.accuracy < frame.high)).all()


def test_annotators_who_copy_are_reported():
    rng = np.random.default_rng(0)
    predictions, _, truth, _ = crowd(3, n=200, hard=0.3)
    votes = np.where(rng.random((200, 4)) < 0.7, truth[:, None], rng.integers(0, 4, (200, 4)))
    options = {"task": "classification", "model": CategoricalMixture(noise="annotator"), "guard": False}
    for copied in (False, True):
        votes[:, 3] = np.where((rng.random(200) < 0.5) & copied, votes[:, 2], votes[:, 3])
        labels = LabelSets.from_array(votes, annotators=["ann", "bob", "cleo", "dan"])
        diagnosis = diagnose(fit_policy(predictions, labels, **options), predictions, labels, refit=False)
        assert len(diagnosis.copying) == 6
        suspects = [(pair.first, pair.second) for pair in diagnosis.copying if pair.p_value < 0.01]
        assert suspects == ([("cleo", "dan")] if copied else [])
    assert diagnosis.copying[0].copied == pytest.approx(0.5, abs=0.15)  # type: ignore[index]
    assert "! Annotators who seem to copy each other: cleo and dan" in diagnosis.summary()


def test_who_never_errs_is_not_ranked_below_who_does() -> None:
    """Doubt about the truth widens an interval; it does not pull the estimate to the prior."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=300)
    views = ViewPredictions(6 * np.eye(3)[truth][:, None] + rng.normal(size=(300, 2, 3)))
    wrong = rng.random(300) < 0.05
    votes = np.stack([truth, np.where(wrong, (truth + 1) % 3, truth)], axis=1)
    labels = LabelSets.from_array(votes, annotators=["never", "sometimes"])
    people = fit_policy(views, labels, task="classification", guard=False).annotators
    never, sometimes = people.accuracy
    assert never > sometimes
    assert people.accuracy_interval[0, 1] > 0.999
    assert people.accuracy_interval[1, 0] < 1 - wrong.mean() < people.accuracy_interval[1, 1]


def test_accuracies_are_not_pulled_towards_each_other():
    """A strong shared prior moves Q, not the reported accuracies: they are those of a fit with hardly any prior."""
    predictions, labels, _, _ = crowd(3, n=600)

    def fitted(prior):
        model = CategoricalMixture(noise="annotator", difficulty=False, accuracy_prior=prior)
        return fit_policy(predictions, labels, task="classification", model=model, guard=False)

    strong, weak = fitted((80.0, 20.0)), fitted((0.08, 0.02))
    order = np.argsort(weak.annotators.names)
    counts = strong.label_noise.counts[order]
    pulled = counts[:, 0] / counts.sum(axis=1) - weak.annotators.accuracy[order]
    assert pulled[0] < -0.005
    assert pulled[-1] > 0.01
    np.testing.assert_allclose((strong.annotators.accuracy - weak.annotators.accuracy)[order], 0, atol=0.003)


def test_the_fast_trigamma_is_scipys_to_four_digits() -> None:
    x = np.geomspace(1e-3, 1e5, 50)
    np.testing.assert_allclose(label_noise._trigamma(x), special.polygamma(1, x), rtol=1e-4)
