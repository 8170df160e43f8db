"""Classification as users meet it: labels of every kind, odd data, intervals, files."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import special

from benchmarks.coverage import annotator_coverage, crowd
from vbtta import EM, CategoricalLatent, CategoricalMixture, LabelSets, Policy, ViewPredictions, fit_policy

NAMES = ["identity", "flip", "blur"]


def problem(seed: int = 0, n: int = 120, C: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, C, size=n)
    logits = rng.normal(size=(n, 3, C))
    logits[np.arange(n), :, truth] += [2.5, 2.0, 0.3]
    return logits, truth


def test_labels_of_every_kind_agree() -> None:
    logits, truth = problem()
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
    logits, truth = problem(C=2, n=8)
    Y = np.stack([truth, 1 - truth], axis=1)
    for labels in (Y, LabelSets.from_array(np.tile(Y, (1, 1)), annotators="columns")):
        policy = fit_policy(ViewPredictions(logits, names=NAMES), labels, task="classification", guard=False)
        assert np.isfinite(policy.weights).all()
        policy.consensus(ViewPredictions(logits[:1], names=NAMES), [[0, 1]])
    many, truth = problem()
    with pytest.raises(ValueError, match="one-hot"):
        fit_policy(ViewPredictions(many), np.eye(3)[truth], task="classification")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_probabilities_are_refused_view_by_view(dtype: type) -> None:
    logits, truth = problem()
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


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_probabilities_are_refused_at_prediction(dtype: type) -> None:
    logits, truth = problem()
    policy = fit_policy(ViewPredictions(logits, names=NAMES), truth, task="classification", guard=False)
    proba = special.softmax(logits, axis=2)
    views = ViewPredictions(proba.astype(dtype), names=NAMES)
    for call in (policy.predict, policy.weights_for, lambda rows: policy.score(rows, truth)):
        with pytest.raises(ValueError, match=r"look like probabilities.*Pass logits"):
            call(views)
    policy.predict(ViewPredictions(np.concatenate([proba[:, :1], logits[:, 1:]], axis=1), names=NAMES))


def test_one_output_and_wrong_labels_are_named() -> None:
    logits, truth = problem()
    with pytest.raises(ValueError, match="stack zeros"):
        fit_policy(ViewPredictions(logits[:, :, :1]), truth, task="classification")
    with pytest.raises(ValueError, match=r"label 7 is outside 0\.\.2"):
        fit_policy(ViewPredictions(logits), np.where(truth == 0, 7, truth), task="classification")
    with pytest.raises(ValueError, match="at least one instance needs a label"):
        fit_policy(ViewPredictions(logits), np.full(120, np.nan), task="classification")


def test_identical_views_leave_their_weights_open() -> None:
    logits, truth = problem()
    same = np.repeat(logits[:, :1], 3, axis=1)
    for model in (CategoricalMixture(noise="none"), CategoricalMixture(noise="none", calibrate=False)):
        interval = fit_policy(
            ViewPredictions(same), truth, task="classification", model=model, guard=False
        ).weight_interval()
        assert (interval[:, 1] - interval[:, 0] > 0.3).all()


@pytest.mark.parametrize("model", [CategoricalMixture(), CategoricalLatent()])
def test_steps_on_the_way_have_no_intervals(model: CategoricalMixture | CategoricalLatent) -> None:
    logits, truth = problem()
    policy = fit_policy(
        ViewPredictions(logits), truth, task="classification", model=model, engine=EM(keep_states=True), guard=False
    )
    first = policy.at_step(1)
    np.testing.assert_allclose(first.weights, 1 / 3)
    first.predict(ViewPredictions(logits))
    with pytest.raises(ValueError, match="a step on the way"):
        first.weight_interval()


@pytest.mark.parametrize("weights", ["view", "view_class"])
@pytest.mark.parametrize("noise", ["none", "uniform", "annotator", "confusion"])
def test_policies_survive_files(tmp_path: Path, noise: str, weights: str) -> None:
    logits, truth = problem()
    rng = np.random.default_rng(1)
    Y = np.where(rng.random((120, 2)) < 0.2, rng.integers(0, 3, size=(120, 2)), truth[:, None])
    labels = LabelSets.from_array(Y, annotators=["ann", "bob"])
    predictions = ViewPredictions(logits, names=NAMES, classes=["x", "y", "z"])
    model = CategoricalMixture(noise=noise, weights=weights)  # type: ignore[arg-type]
    policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(again.predict(predictions).proba, policy.predict(predictions).proba)
    np.testing.assert_array_equal(
        again.consensus(predictions, labels).proba, policy.consensus(predictions, labels).proba
    )
    np.testing.assert_array_equal(again.weight_interval(), policy.weight_interval())
    assert (policy.class_weights is None) == (weights == "view")
    if noise != "none":
        assert again.annotators.accuracy.shape[0] in (1, 2)


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


def test_predictions_without_class_names_get_the_policys() -> None:
    rng = np.random.default_rng(0)
    classes, truth = np.array(["cat", "dog", "eel"]), rng.integers(0, 3, size=90)
    logits = rng.normal(size=(90, 2, 3)) + 3 * np.eye(3)[truth][:, None]
    named = ViewPredictions(logits, names=["identity", "flip"], classes=classes)
    policy = fit_policy(named, classes[truth], task="classification")
    nameless = ViewPredictions(logits, names=["identity", "flip"])
    np.testing.assert_array_equal(policy.predict(nameless).label, policy.predict(named).label)


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
    found = [options.pop() for options in chosen]
    assert sum(kind == noise and difficulty in (None, level) for kind, level in found) >= 4


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
