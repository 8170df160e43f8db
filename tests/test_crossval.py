"""Folds, groups that stay together, and clustered standard errors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    ViewPredictions,
    fit_policy,
    select_views,
)
from vbtta.crossval import CrossValidated, compare_scores, cross_validate, even_odds, n_units, split, stack_scores
from vbtta.fit import Candidate, fit_candidate, quick_fit
from vbtta.models.base import InMemory, Model


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60).filter(lambda groups: len(set(groups)) > 1), st.integers(0, 3)
)
def test_groups_are_never_cut(groups: list[int], seed: int) -> None:
    names = np.array(groups)
    rows = np.random.default_rng(seed).permutation(len(names))
    folds = split(rows, names)
    for train, held in folds:
        assert not set(names[train]) & set(names[held])
    np.testing.assert_array_equal(np.sort(np.concatenate([held for _, held in folds])), np.arange(len(names)))
    assert len(folds) == min(5, len(set(groups)))


def test_folds_of_equal_groups_are_of_equal_size() -> None:
    folds = split(np.arange(100), np.repeat(np.arange(20), 5))
    assert [len(held) for _, held in folds] == [20] * 5


def test_groups_count_as_one_draw_each() -> None:
    """Copies of rows in one group change neither the mean difference nor its standard error."""
    rng = np.random.default_rng(0)
    once, zeros = rng.normal(size=40), np.zeros(40)
    units = np.arange(40)

    def scored(scores: np.ndarray, groups: np.ndarray | None) -> CrossValidated:
        return CrossValidated(scores, groups, np.zeros(len(scores)), np.ones(len(scores)))

    plain = compare_scores(scored(once, None), scored(zeros, None))
    np.testing.assert_allclose(compare_scores(scored(once, units), scored(zeros, units)), plain)
    copied = [scored(np.repeat(scores, 7), np.repeat(units, 7)) for scores in (once, zeros)]
    np.testing.assert_allclose(compare_scores(*copied), plain)


def test_the_guard_counts_groups_not_rows() -> None:
    """Forty rows of four groups are four draws: too few to hold any out."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=40)
    views = truth[:, None, None] + 0.1 * rng.normal(size=(40, 2, 1))
    groups = np.repeat(["a", "b", "c", "d"], 10)
    names = ["identity", "flip"]
    grouped = fit_policy(ViewPredictions(views, names=names, groups=groups), truth, task="regression")
    assert not grouped.guard.checked
    assert "groups" in grouped.guard.reason
    assert n_units(LabelSets.from_array(truth), groups) == 4
    rows = fit_policy(ViewPredictions(views, names=names), truth, task="regression")
    assert rows.guard.checked
    with pytest.raises(ValueError, match="groups of them; got 4"):
        select_views(ViewPredictions(views, names=names, groups=groups), truth, budget=1, task="regression")


def test_copied_rows_in_a_group_leave_the_guard_in_doubt() -> None:
    """A view that helps by chance on few groups: with rows as draws the guard is sure, with groups it is not."""
    rng = np.random.default_rng(2)
    truth = rng.normal(size=40)
    views = truth[:, None] + 0.4 * rng.normal(size=(40, 2))
    groups = np.repeat(np.arange(40), 10)
    rows = np.repeat(views, 10, axis=0)[:, :, None]
    labels = np.repeat(truth, 10)
    options = {"task": "regression", "model": GaussianLatent()}
    errors = [
        fit_policy(
            ViewPredictions(rows, names=["identity", "flip"], groups=given_groups), labels, **options
        ).guard.standard_error
        for given_groups in (groups, None)
    ]
    assert errors[0] > 2 * errors[1]


def test_rows_of_a_group_count_by_their_design_effect() -> None:
    """Copies count as one row, independent rows as many, and equal scores say nothing."""
    rng = np.random.default_rng(0)
    scores, groups = rng.normal(size=(50, 2)), np.repeat(np.arange(50), 8)

    def weights(scores: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        members = [
            CrossValidated(column, groups, np.arange(len(column)) % 5, np.ones(len(column))) for column in scores.T
        ]
        return stack_scores(members, np.ones(2), None)[0][0]

    lead = np.array([0.4, 0.0])
    better = scores + lead
    np.testing.assert_allclose(weights(better[groups], groups), weights(better, None), rtol=0.03)
    independent = rng.normal(size=(400, 2)) + lead
    np.testing.assert_allclose(weights(independent, groups), weights(independent, None), atol=0.03)
    np.testing.assert_allclose(weights(np.zeros((400, 2)), groups), 0.5)


def test_the_raw_network_takes_the_odds_against_the_views() -> None:
    """Few instances, or a loss, leave most of the weight to the raw network; a large gain takes it all away."""

    def raw_share(n: int, gain: float) -> float:
        scores = np.zeros(n), np.full(n, -gain)
        members = [CrossValidated(each, None, np.arange(n) % 5, np.ones(n)) for each in scores]
        (weights, covariance), held_out = stack_scores(members, np.ones(2), 20.0)
        assert weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(covariance.sum(axis=0), 0, atol=1e-12)
        assert (held_out.scores >= np.minimum(*scores)).all()
        return float(weights[1])

    assert raw_share(20, 0.0) == pytest.approx(0.75)  # even odds, and half of the stack
    assert raw_share(10, 0.0) > raw_share(20, 0.0) > raw_share(1_000, 0.0) > 0.5
    assert raw_share(50, -0.5) > 0.95
    assert raw_share(50, 2.0) < 0.03


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("model", [CategoricalMixture(), CategoricalLatent(shrinkage=20.0)])
def test_a_few_newton_steps_from_the_fit_to_all_rows_score_as_converged_folds(model: Model, labels: int) -> None:
    rng = np.random.default_rng(labels)
    truth = rng.integers(0, 4, size=600)
    logits = rng.normal(size=(600, 6, 4)) + np.linspace(0.5, 2, 6)[:, None] * np.eye(4)[truth][:, None]
    votes = np.where(rng.random((600, labels)) < 0.85, truth[:, None], rng.integers(0, 4, size=(600, labels)))
    predictions = ViewPredictions(logits)
    sample = InMemory(predictions, predictions.align(votes))
    settled = replace(model.resolve(sample.labels), noise="uniform", difficulty=False)
    cold = Candidate(settled, None)
    near = cold._replace(start=fit_candidate(cold, EM(), 0, sample).posterior, near=True)
    fits = [
        partial(quick_fit, near, EM(), 0),
        lambda part, _: fit_candidate(cold, EM(tol=1e-9), 0, part, intervals=False),
    ]
    scores, converged = cross_validate(fits, sample, split(rng.permutation(600)))
    assert abs(np.mean(scores.scores - converged.scores)) < 1e-3


def test_single_labels_take_more_instances_to_trust_the_views() -> None:
    """Their noise hides which view is right; several labels, and labels that are taken for true, do not."""
    raw = CategoricalMixture.raw_network()
    single, several = LabelSets.from_array([0, 1, 1]), LabelSets.from_array([[0, 0], [1, 1], [1, 0]])
    assert even_odds(raw, single) > even_odds(raw, several) == even_odds(replace(raw, noise="none"), single)
    assert even_odds(GaussianMixture.raw_network(), LabelSets.from_array([0.5, 1.0])) == even_odds(raw, several)
