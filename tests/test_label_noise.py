"""Noise between true class and label: expectations, updates and divergences of every kind."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special

from vbtta.data.labels import LabelSets
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
    return label_noise.NOISES[model.kind].log_evidence(table, log_noise, model.n_classes)


def updated(model, truth, table):
    return model.update(label_noise.NOISES[model.kind].expected_counts(truth[table.instance], table))


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
    np.testing.assert_allclose(label_noise.FittedNoise(model, counts).evidence()(table), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_update_maximises_expected_evidence_less_divergence(kind):
    _, table, truth = tables(kind)
    model = noise(kind, 4)

    def bound(fitted):
        return (truth * fitted.evidence()(table)).sum() - fitted.divergence()

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
        updated(noise(kind, 4, accuracy_prior=(8, 2)), truth, label_noise.label_table(some, position, kind)).counts
        for kind, some in (("uniform", labels), ("annotator", alone))
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
    found = label_noise.describe(updated(model, np.eye(3)[truth], table), labels.annotator_names)
    if kind == "uniform":
        assert found.names == ("all",)
        np.testing.assert_allclose(found.accuracy, [np.mean(accuracy)], atol=0.02)
    else:
        assert found.names == ("ann", "bob")
        np.testing.assert_allclose(found.accuracy, accuracy, atol=0.02)
    assert (found.accuracy_interval[:, 0] < found.accuracy).all()
    assert (found.accuracy < found.accuracy_interval[:, 1]).all()
    assert np.ptp(found.accuracy_interval, axis=1).max() < 0.04
    np.testing.assert_allclose(found.confusion.sum(axis=2), 1)


def test_interval_is_the_beta_posterior():
    model = noise("annotator", 5)
    found = label_noise.describe(label_noise.FittedNoise(model, np.array([[20.0, 5.0]])), ("ann",))
    assert special.betainc(20, 5, found.accuracy_interval[0, 0]) == pytest.approx(0.05)
    assert special.betainc(20, 5, found.accuracy_interval[0, 1]) == pytest.approx(0.95)


def test_intervals_of_accuracies_cover_them_under_confusion():
    rng = np.random.default_rng(1)
    accuracy, n, n_classes, runs = np.array([0.95, 0.8, 0.65]), 300, 4, 300
    model = noise("confusion", n_classes)
    inside = np.zeros(3)
    for _ in range(runs):
        truth = rng.integers(0, n_classes, size=(n, 1))
        wrong = (truth + rng.integers(1, n_classes, size=(n, 3))) % n_classes
        given = np.where(rng.random((n, 3)) < accuracy, truth, wrong)
        labels = LabelSets.from_array(given, annotators="columns")
        table = label_noise.label_table(labels, labels.categorical(n_classes), "confusion")
        fitted = updated(model, np.eye(n_classes)[truth[:, 0]], table)
        low, high = label_noise.describe(fitted, labels.annotator_names).accuracy_interval.T
        inside += (low <= accuracy) & (accuracy <= high)
    assert (inside / runs > 0.84).all()
    assert (inside / runs < 0.96).all()


def test_accuracy_under_confusion_without_labels_is_that_of_its_prior():
    model = noise("confusion", 4, accuracy_prior=(6.0, 2.0))
    found = label_noise.describe(model.start(1), ("ann",))
    assert found.accuracy[0] == pytest.approx(0.75)
    np.testing.assert_allclose(special.betainc(6, 2, found.accuracy_interval[0]), [0.05, 0.95])


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
