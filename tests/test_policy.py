"""Policy as users meet it: views by name, intervals, files, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from problems import NAMES, class_problem
from vbtta import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    Policy,
    ViewPredictions,
    fit_policy,
)
from vbtta.data.predictions import row_hashes


def test_views_are_matched_by_name(helpful) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    policy = fit_policy(predictions, y, task="regression", guard=False)
    expected = policy.predict(predictions).mean
    np.testing.assert_allclose(policy.predict(predictions.select(["shift", "flip", "identity"])).mean, expected)
    extra = predictions.concat(ViewPredictions(predictions.outputs[:, :1], names=["more"]), axis="views")
    np.testing.assert_allclose(policy.predict(extra).mean, expected)
    with pytest.raises(ValueError, match=r"needs the views \['shift'\]"):
        policy.predict(predictions.select(["identity", "flip"]))
    with pytest.raises(ValueError, match="have names and those of the predictions have not"):
        policy.predict(ViewPredictions(predictions.outputs))
    unnamed = fit_policy(ViewPredictions(predictions.outputs), y, task="regression")
    with pytest.raises(ValueError, match="2 unnamed views but the policy was fitted to 3"):
        unnamed.predict(ViewPredictions(predictions.outputs[:, :2]))
    with pytest.raises(ValueError, match="2 outputs but the policy was fitted to 1"):
        policy.predict(ViewPredictions(np.zeros((2, 3, 2)), names=predictions.names))


@pytest.mark.parametrize("model", ["mixture", "latent"])
def test_pruning_drops_views(rng: np.random.Generator, model: str) -> None:
    truth = rng.normal(size=300)
    f = truth[:, None] + np.array([0.2, 0.3, 1.5]) * rng.normal(size=(300, 3))
    predictions = ViewPredictions(f[:, :, None], names=["identity", "good", "poor"])
    policy = fit_policy(predictions, truth, task="regression", model=model, guard=False)  # type: ignore[arg-type]
    pruned = policy.prune(min_weight=0.1)
    assert pruned.names == policy.names
    assert pruned.weights[2] == 0
    assert pruned.weights.sum() == pytest.approx(1)
    pruned.predict(predictions.select(["identity", "good"]))
    assert pruned.weight_interval().shape == (3, 2)
    with pytest.raises(ValueError, match="between 0 and 1"):
        policy.prune(min_weight=1.1)


@pytest.mark.parametrize(
    "model", [GaussianMixture(), GaussianMixture(concentration=0.5, heteroscedastic=True), GaussianLatent()]
)
def test_policies_survive_files(helpful, tmp_path: Path, model) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    predictions = ViewPredictions(predictions.outputs, np.full(predictions.outputs.shape, 0.1), names=predictions.names)
    labels = LabelSets.from_array(np.stack([y, y + 0.1], axis=1), annotators=["ann", "bob"])
    policy = fit_policy(predictions, labels, task="regression", model=model)
    path = tmp_path / "policy.json"
    policy.save(path)
    again = Policy.load(path)
    np.testing.assert_array_equal(again.weights, policy.weights)
    np.testing.assert_array_equal(again.weight_interval(0.8), policy.weight_interval(0.8))
    np.testing.assert_array_equal(again.predict(predictions).mean, policy.predict(predictions).mean)
    np.testing.assert_array_equal(again.predict(predictions).variance, policy.predict(predictions).variance)
    np.testing.assert_array_equal(again.consensus(predictions, labels).mean, policy.consensus(predictions, labels).mean)
    assert again.model == policy.model
    assert again.elbo == policy.elbo
    assert again.elbo_terms == policy.elbo_terms
    assert again.guard == policy.guard
    assert again.annotators.names == ("ann", "bob")
    np.testing.assert_array_equal(again.history.weights, policy.history.weights)
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_and_newer_files_are_refused(helpful, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    path = tmp_path / "policy.json"
    with pytest.raises(FileNotFoundError, match="no policy file"):
        Policy.load(path)
    fit_policy(predictions, y, task="regression", model="mixture", guard=False).save(path)
    text = path.read_text()
    data = json.loads(text)
    standard = data["posterior"]["standard"]
    for broken, message in {
        text[: len(text) // 2]: "not JSON",
        "[1, 2]": "not a policy",
        json.dumps({**data, "format": "other"}): "not a policy",
        json.dumps({**data, "version": 99}): "upgrade vbtta",
        json.dumps({key: value for key, value in data.items() if key != "posterior"}): "lacks 'posterior'",
        json.dumps({**data, "posterior": {}}): "damaged policy",
        json.dumps({**data, "task": "classification"}): "its task is 'classification'",
        json.dumps({**data, "task": [1]}): "its task is",
        json.dumps({**data, "classes": 3}): "classes must be 1 integers or strings",
        json.dumps({**data, "weights": [1, 0, 0]}): "disagree",
        json.dumps({**data, "model": {"kind": "Evil"}}): "unknown model",
        json.dumps({**data, "version": 0}): "upgrade vbtta",
        json.dumps({**data, "views": ["identity", "flip", "flip"]}): "not distinct",
        json.dumps({**data, "elbo": float("nan")}): "no number",
        json.dumps({**data, "posterior": {**data["posterior"], "standard": {**standard, "scale": [-1e300]}}}): (
            "does not predict"
        ),
    }.items():
        path.write_text(broken)
        with pytest.raises(ValueError, match=message):
            Policy.load(path, verify=False)
        with pytest.raises(ValueError, match=r"policy\.json"):
            Policy.load(path)


def test_a_mapped_file_with_nan_is_not_predicted_from(helpful, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    policy = fit_policy(predictions, y, task="regression", guard=False)
    with open(tmp_path / "nan.npz", "wb") as file:
        np.savez(file, outputs=np.full((3, 3, 1), np.nan), names=np.array(predictions.names))
    with pytest.raises(ValueError, match="must be finite"):
        policy.predict(ViewPredictions.load(tmp_path / "nan.npz", mmap=True))


@pytest.mark.parametrize("model", [GaussianMixture(), GaussianLatent(shrinkage=1e-3)])
def test_predictions_far_from_the_data_are_doubtful(model: GaussianMixture | GaussianLatent) -> None:
    """The doubt about the calibration grows with the distance: H G^-1 H^T in the predictive scale."""
    rng = np.random.default_rng(0)
    f = rng.normal(size=(12, 1, 1))
    policy = fit_policy(
        ViewPredictions(f), f[:, 0, 0] + 0.1 * rng.normal(size=12), task="regression", model=model, guard=False
    )
    near, far = policy.predict(ViewPredictions([[[0.0]], [[30.0]]])).variance[:, 0]
    slope_variance = 0.01 / (f**2).sum()  # of least squares with noise 0.1
    assert far - near == pytest.approx(900 * slope_variance, rel=0.7)


@pytest.mark.parametrize(
    ("weights", "n_labels"), [((0.6, 0.3, 0.1), 150), ((0.97, 0.0, 0.03), 150), ((0.95, 0.05, 0.0), 60)]
)
def test_weight_intervals_cover_at_their_rate(weights: tuple[float, ...], n_labels: int) -> None:
    rng = np.random.default_rng(0)
    truth, K = np.array(weights), len(weights)
    hits, n_problems = np.zeros(K), 200
    for _ in range(n_problems):
        f = rng.normal(size=(n_labels, K))
        z = rng.choice(K, size=n_labels, p=truth)
        y = f[np.arange(n_labels), z] + 0.4 * rng.normal(size=n_labels)
        policy = fit_policy(ViewPredictions(f[:, :, None]), y, task="regression", model="mixture", guard=False)
        interval = policy.weight_interval(0.9)
        assert (interval[:, 1] > 0).all()
        assert ((interval[:, 0] <= policy.weights) & (policy.weights <= interval[:, 1])).all()
        hits += (interval[:, 0] <= truth) & (truth <= interval[:, 1])
    assert (hits / n_problems >= 0.85).all()


def test_a_policy_remembers_the_labelled_rows_of_its_fit(tmp_path):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=5000)
    predictions = ViewPredictions(truth[:, None, None] + rng.normal(size=(5000, 2, 1)), names=["identity", "flip"])
    labels = np.where(np.arange(5000) < 60, truth, np.nan)
    few = fit_policy(predictions, labels, task="regression", model="mixture")
    assert few.rows.hashes == row_hashes(predictions.take(slice(60)).select(few.rows.views).outputs)
    many = fit_policy(predictions, truth, task="regression", model="mixture")
    assert 1024 < len(many.rows.hashes) <= 2048
    many.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json").prune(0.0).rows == many.rows


@pytest.mark.parametrize("weights", ["view", "view_class"])
@pytest.mark.parametrize("noise", ["none", "uniform", "annotator", "confusion"])
def test_policies_of_classes_survive_files(tmp_path: Path, noise: str, weights: str) -> None:
    logits, truth = class_problem()
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


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_probabilities_are_refused_at_prediction(dtype: type) -> None:
    logits, truth = class_problem()
    policy = fit_policy(ViewPredictions(logits, names=NAMES), truth, task="classification", guard=False)
    proba = special.softmax(logits, axis=2)
    views = ViewPredictions(proba.astype(dtype), names=NAMES)
    for call in (policy.predict, policy.weights_for, lambda rows: policy.score(rows, truth)):
        with pytest.raises(ValueError, match=r"look like probabilities.*Pass logits"):
            call(views)
    policy.predict(ViewPredictions(np.concatenate([proba[:, :1], logits[:, 1:]], axis=1), names=NAMES))


@pytest.mark.parametrize("model", [CategoricalMixture(), CategoricalLatent()])
def test_steps_on_the_way_have_no_intervals(model: CategoricalMixture | CategoricalLatent) -> None:
    logits, truth = class_problem()
    policy = fit_policy(
        ViewPredictions(logits), truth, task="classification", model=model, engine=EM(keep_states=True), guard=False
    )
    first = policy.at_step(1)
    np.testing.assert_allclose(first.weights, 1 / 3)
    first.predict(ViewPredictions(logits))
    with pytest.raises(ValueError, match="a step on the way"):
        first.weight_interval()


def test_predictions_without_class_names_get_the_policys() -> None:
    rng = np.random.default_rng(0)
    classes, truth = np.array(["cat", "dog", "eel"]), rng.integers(0, 3, size=90)
    logits = rng.normal(size=(90, 2, 3)) + 3 * np.eye(3)[truth][:, None]
    named = ViewPredictions(logits, names=["identity", "flip"], classes=classes)
    policy = fit_policy(named, classes[truth], task="classification")
    nameless = ViewPredictions(logits, names=["identity", "flip"])
    np.testing.assert_array_equal(policy.predict(nameless).label, policy.predict(named).label)
