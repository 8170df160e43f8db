"""Noise between true class and label: expectations, updates and divergences of every kind."""

import numpy as np
import pytest
from scipy import special

from vbtta.infer import label_noise
from vbtta.labels import LabelSets
from vbtta.specs import CategoricalMixture

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
    model = label_noise.noise_model(kind, 4, CategoricalMixture())
    counts = label_noise.start(model, table.n_annotators) + np.random.default_rng(1).random(
        (table.n_annotators, *model.prior.shape)
    )
    log_noise = label_noise.log_expected(counts)
    expected = np.zeros((table.n_instances, 4))
    matrices = full_matrices(model, log_noise)
    for i, y, u, n in zip(table.instance, table.label, table.annotator, table.repeats, strict=True):
        expected[i] += n * matrices[u][:, y]
    np.testing.assert_allclose(label_noise.log_evidence(model, log_noise, table), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_update_maximises_expected_evidence_less_divergence(kind):
    _, table, truth = tables(kind)
    model = label_noise.noise_model(kind, 4, CategoricalMixture())

    def bound(counts):
        evidence = label_noise.log_evidence(model, label_noise.log_expected(counts), table)
        return (truth * evidence).sum() - label_noise.divergence(model, counts)

    best = label_noise.update(model, truth, table)
    rng = np.random.default_rng(3)
    for _ in range(20):
        assert bound(best) >= bound(best * np.exp(0.1 * rng.normal(size=best.shape))) - 1e-9
    total = best.sum() - label_noise.start(model, table.n_annotators).sum()
    assert total == pytest.approx(table.repeats.sum())


def test_expected_logarithms_are_those_of_beta_and_dirichlet():
    draws = np.random.default_rng(0).dirichlet([8.5, 3.0, 1.5], size=200_000)
    np.testing.assert_allclose(
        label_noise.log_expected(np.array([[8.5, 3.0, 1.5]]))[0], np.log(draws).mean(axis=0), atol=0.01
    )


def test_one_annotator_is_the_uniform_model():
    labels, _, truth = tables("uniform")
    position = labels.categorical(4)
    alone = LabelSets.from_table(labels.instance, labels.value, ["ann"] * len(labels), n_instances=labels.n_instances)
    spec = CategoricalMixture()
    counts = [
        label_noise.update(label_noise.noise_model(kind, 4, spec), truth, label_noise.label_table(some, position, kind))
        for kind, some in (("uniform", labels), ("annotator", alone))
    ]
    np.testing.assert_allclose(*counts)


def test_uniform_is_the_confusion_model_of_two_classes_with_the_same_matrix():
    model = label_noise.noise_model("uniform", 2, CategoricalMixture())
    confusion = label_noise.noise_model("confusion", 2, CategoricalMixture())
    labels = LabelSets.from_array([[0, 1], [1, 1]])
    table = label_noise.label_table(labels, labels.categorical(2), "uniform")
    log_noise = np.log(np.array([[0.8, 0.2]]))
    both = np.log(np.array([[[0.8, 0.2], [0.2, 0.8]]]))
    np.testing.assert_allclose(
        label_noise.log_evidence(model, log_noise, table), label_noise.log_evidence(confusion, both, table)
    )


def test_priors_are_those_of_the_specification():
    confusion = label_noise.noise_model("confusion", 10, CategoricalMixture())
    assert confusion.prior[0, 0] == 8.5
    assert confusion.prior[0, 1] == 0.5
    assert label_noise.noise_model("annotator", 10, CategoricalMixture()).prior.tolist() == [8, 2]
    assert label_noise.noise_model("none", 10, CategoricalMixture()) is None


@pytest.mark.parametrize("kind", KINDS)
def test_description_holds_known_annotators(kind):
    rng = np.random.default_rng(0)
    truth, accuracy = rng.integers(0, 3, size=4000), (0.95, 0.7)
    columns = [np.where(rng.random(4000) < a, truth, (truth + rng.integers(1, 3, 4000)) % 3) for a in accuracy]
    labels = LabelSets.from_array(np.stack(columns, axis=1), annotators=["ann", "bob"])
    table = label_noise.label_table(labels, labels.categorical(3), kind)
    model = label_noise.noise_model(kind, 3, CategoricalMixture())
    found = label_noise.describe(model, label_noise.update(model, np.eye(3)[truth], table), labels.annotator_names)
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
    model = label_noise.noise_model("annotator", 5, CategoricalMixture())
    found = label_noise.describe(model, np.array([[20.0, 5.0]]), ("ann",))
    assert special.betainc(20, 5, found.accuracy_interval[0, 0]) == pytest.approx(0.05)
    assert special.betainc(20, 5, found.accuracy_interval[0, 1]) == pytest.approx(0.95)


def test_intervals_of_accuracies_cover_them_under_confusion():
    rng = np.random.default_rng(1)
    accuracy, n, n_classes, runs = np.array([0.95, 0.8, 0.65]), 300, 4, 300
    model = label_noise.noise_model("confusion", n_classes, CategoricalMixture())
    inside = np.zeros(3)
    for _ in range(runs):
        truth = rng.integers(0, n_classes, size=(n, 1))
        wrong = (truth + rng.integers(1, n_classes, size=(n, 3))) % n_classes
        given = np.where(rng.random((n, 3)) < accuracy, truth, wrong)
        labels = LabelSets.from_array(given, annotators="columns")
        table = label_noise.label_table(labels, labels.categorical(n_classes), "confusion")
        counts = label_noise.update(model, np.eye(n_classes)[truth[:, 0]], table)
        low, high = label_noise.describe(model, counts, labels.annotator_names).accuracy_interval.T
        inside += (low <= accuracy) & (accuracy <= high)
    assert (inside / runs > 0.84).all()
    assert (inside / runs < 0.96).all()


def test_accuracy_under_confusion_without_labels_is_that_of_its_prior():
    model = label_noise.noise_model("confusion", 4, CategoricalMixture(accuracy_prior=(6.0, 2.0)))
    found = label_noise.describe(model, label_noise.start(model, 1), ("ann",))
    assert found.accuracy[0] == pytest.approx(0.75)
    np.testing.assert_allclose(special.betainc(6, 2, found.accuracy_interval[0]), [0.05, 0.95])


def test_default_needs_overlap():
    single = np.zeros(100, dtype=int)
    assert label_noise.default_noise(LabelSets.from_array(single)) == "none"
    few = np.column_stack([np.zeros(300), np.where(np.arange(300) < 19, 1.0, np.nan)])
    assert label_noise.default_noise(LabelSets.from_array(few)) == "none"
    few[19, 1] = 1
    assert label_noise.default_noise(LabelSets.from_array(few)) == "confusion"
    assert label_noise.default_noise(LabelSets.from_counts([[0, 2], [1, 0]])) == "confusion"


def test_too_many_matrices_name_the_remedy():
    model = label_noise.noise_model("confusion", 1000, CategoricalMixture())
    with pytest.raises(ValueError, match="noise='annotator'"):
        label_noise.start(model, 500)
