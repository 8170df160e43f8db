"""Classification as users meet it: labels of every kind, odd data, noise models."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.coverage import annotator_coverage, crowd
from problems import NAMES, class_problem
from vbtta import CategoricalMixture, LabelSets, ViewPredictions, fit_policy


def test_labels_of_every_kind_agree() -> None:
    logits, truth = class_problem()
    classes = np.array(["cat", "dog", "hen"])
    numbers = fit_policy(ViewPredictions(logits, names=NAMES), truth, task="classification", guard=False)
    words = fit_policy(
        ViewPredictions(logits, names=NAMES, classes=classes), classes[truth], task="classification", guard=False
    )
    counts = fit_policy(
        ViewPredictions(logits, names=NAMES),
        LabelSets.from_counts(np.eye(3)[truth]),
        task="classification",
        guard=False,
    )
    np.testing.assert_allclose(words.weights, numbers.weights)
    np.testing.assert_allclose(counts.weights, numbers.weights)
    assert set(words.predict(ViewPredictions(logits, names=NAMES, classes=classes)).label) <= set(classes)
    signs = np.where(truth > 0, 1.0, -1.0)
    binary = ViewPredictions(logits[:, :, :2], names=NAMES, classes=["-1", "1"])
    assert fit_policy(binary, signs, task="classification", guard=False).weights.sum() == pytest.approx(1)


def test_annotators_who_disagree_are_not_one_hot() -> None:
    logits, truth = class_problem(C=2, n=8)
    Y = np.stack([truth, 1 - truth], axis=1)
    for labels in (Y, LabelSets.from_array(np.tile(Y, (1, 1)), annotators="columns")):
        policy = fit_policy(ViewPredictions(logits, names=NAMES), labels, task="classification", guard=False)
        assert np.isfinite(policy.weights).all()
        policy.consensus(ViewPredictions(logits[:1], names=NAMES), [[0, 1]])
    many, truth = class_problem()
    with pytest.raises(ValueError, match="one-hot"):
        fit_policy(ViewPredictions(many), np.eye(3)[truth], task="classification")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_probabilities_are_refused_view_by_view(dtype: type) -> None:
    logits, truth = class_problem()
    proba = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    with pytest.raises(ValueError, match=r"look like probabilities.*'identity'"):
        fit_policy(ViewPredictions(proba.astype(dtype), names=NAMES), truth, task="classification")
    mixed = np.concatenate([logits[:, :2], np.round(proba[:, 2:], 3)], axis=1)
    with pytest.raises(ValueError, match="view 'blur'"):
        fit_policy(ViewPredictions(mixed, names=NAMES), truth, task="classification")
    policy = fit_policy(ViewPredictions(logits[:, :, :2], names=NAMES), truth % 2, task="classification", guard=False)
    stacked = np.zeros((1, 3, 2))
    stacked[:, :, 1] = 1.0  # a binary logit beside zeros is no probability
    assert policy.predict(ViewPredictions(stacked, names=NAMES)).proba.sum() == pytest.approx(1)


def test_one_output_and_wrong_labels_are_named() -> None:
    logits, truth = class_problem()
    with pytest.raises(ValueError, match="stack zeros"):
        fit_policy(ViewPredictions(logits[:, :, :1]), truth, task="classification")
    with pytest.raises(ValueError, match=r"label 7 is outside 0\.\.2"):
        fit_policy(ViewPredictions(logits), np.where(truth == 0, 7, truth), task="classification")
    with pytest.raises(ValueError, match="at least one instance needs a label"):
        fit_policy(ViewPredictions(logits), np.full(120, np.nan), task="classification")


def test_identical_views_leave_their_weights_open() -> None:
    logits, truth = class_problem()
    same = np.repeat(logits[:, :1], 3, axis=1)
    for model in (CategoricalMixture(noise="none"), CategoricalMixture(noise="none", calibrate=False)):
        interval = fit_policy(
            ViewPredictions(same), truth, task="classification", model=model, guard=False
        ).weight_interval()
        assert (interval[:, 1] - interval[:, 0] > 0.3).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 12),
    K=st.integers(1, 4),
    C=st.integers(2, 4),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    model=st.sampled_from(["auto", "mixture", "latent", CategoricalMixture(link="probit", noise="uniform")]),
    one_class=st.booleans(),
)
def test_odd_data_give_finite_answers(
    seed: int, n: int, K: int, C: int, scale: float, model: object, one_class: bool
) -> None:
    rng = np.random.default_rng(seed)
    predictions = ViewPredictions(scale * rng.normal(size=(n, K, C)))
    Y = np.zeros((n, 2)) if one_class else rng.integers(0, C, size=(n, 2)).astype(float)
    Y[rng.random(Y.shape) < 0.4] = np.nan
    Y[0, 0] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = fit_policy(predictions, Y, task="classification", model=model)  # type: ignore[arg-type]
    prediction = policy.predict(predictions)
    bounds = [member.elbo for member in policy.members or [policy]]
    for values in (policy.weights, policy.weight_interval(), bounds, prediction.proba, prediction.entropy):
        assert np.isfinite(values).all()
    assert np.isfinite(prediction.log_prob(np.zeros(n, dtype=int))).all()
    assert (prediction.mutual_information >= 0).all()
    assert (prediction.mutual_information <= prediction.entropy + 1e-12).all()
    np.testing.assert_allclose(prediction.proba.sum(axis=1), 1)


@pytest.mark.parametrize(
    ("hard", "pairs", "noise", "difficulty"),
    [(0.0, 0.0, "annotator", False), (0.3, 0.0, "annotator", True), (0.0, 0.8, "confusion", None)],
)
def test_held_out_scores_choose_the_noise_model(hard: float, pairs: float, noise: str, difficulty: bool | None) -> None:
    """Once for all members, and nearly always as simulated."""
    chosen = []
    for seed in range(5):
        predictions, labels, _, _ = crowd(np.random.default_rng(seed), 400, hard, np.linspace(0.95, 0.7, 4), 10, pairs)
        members = fit_policy(predictions, labels, task="classification").members
        chosen.append({(member.model.noise, member.model.difficulty) for member in members})  # type: ignore[attr-defined]
        assert len(chosen[-1]) == 1
    noise_models = [options.pop() for options in chosen]
    assert sum(kind == noise and difficulty in (None, level) for kind, level in noise_models) >= 4


def test_options_that_are_given_are_not_chosen() -> None:
    predictions, labels, _, _ = crowd(np.random.default_rng(0), 200, 0.0, np.linspace(0.95, 0.7, 3))
    for options in ({"difficulty": True}, {"noise": "confusion"}, {"noise": "confusion", "difficulty": False}):
        model = fit_policy(predictions, labels, task="classification", model=CategoricalMixture(**options)).model
        assert {name: getattr(model, name) for name in options} == options


@pytest.mark.parametrize("hard", [0.0, 0.25])
def test_annotators_intervals_hold_their_accuracies(hard: float) -> None:
    """150 inputs, three people. Of 30 intervals at 90 % about 27 hold; 22 are three standard errors fewer."""
    outcome = annotator_coverage(10, 150, 3, hard)
    assert outcome["coverage"] >= 22 / 30
    assert outcome["best_annotator"] >= 6 / 10  # confusion and difficulty together: a third
