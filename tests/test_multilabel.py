"""Soft labels, several labels an input, and the best k classes."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special

from vbtta import (
    CategoricalMixture,
    LabelSets,
    Policy,
    TTAModule,
    ViewPredictions,
    collect_views,
    fit_policy,
    select_views,
)
from vbtta.augment import Identity, as_view
from vbtta.distributions import MultiLabelPrediction
from vbtta.metrics import accuracy, nll, top_k_accuracy

N, K, C = 150, 3, 4


def several(seed=0):
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(N, C))
    present = (rng.random((N, C)) < special.expit(logits)).astype(int)
    outputs = 2.0 * logits[:, None] + rng.normal(size=(N, K, C)) * np.array([0.5, 1.0, 8.0])[:, None]
    return ViewPredictions(outputs, names=["identity", "flip", "noise"]), present


def test_labels_of_one_input_share_weights_and_calibration(tmp_path):
    predictions, present = several()
    policy = fit_policy(predictions, present, task="multilabel", model="mixture")
    assert (policy.task, policy.n_outputs) == ("multilabel", C)
    binary = predictions.as_binary()
    same = fit_policy(binary, present.ravel(), task="classification", model="mixture")
    np.testing.assert_array_equal(policy.weights, same.weights)
    prediction = policy.predict(predictions)
    np.testing.assert_allclose(prediction.proba.ravel(), same.predict(binary).proba[:, 1])
    np.testing.assert_array_equal(prediction.label, prediction.proba > 0.5)
    raw = special.expit(predictions.outputs[:, 0])
    log_score = [np.where(present, np.log(p), np.log1p(-p)).mean() for p in (prediction.proba, raw)]
    assert log_score[0] > log_score[1] + 0.02  # the raw logits are twice too large
    policy.save(tmp_path / "policy.json")
    back = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(back.predict(predictions).proba, prediction.proba)
    assert policy.score(predictions, present).shape == (N * C,)
    assert policy.consensus(predictions, present).proba.shape == (N, C)
    assert list(prediction.to_frame().columns) == [f"proba_{c}" for c in range(C)]


def test_several_labels_are_paired_by_id_and_name():
    predictions, present = several()
    ids = [f"image-{i}" for i in range(N)]
    named = ViewPredictions(predictions.outputs, names=predictions.names, ids=ids, classes=list("abcd"))
    table = pd.DataFrame(present.astype(float), index=ids, columns=list("abcd"))
    table.iloc[3, 1] = np.nan
    mixed = table[list("dbca")].sample(frac=1, random_state=0)
    by_id = named.as_binary().align(LabelSets.from_multilabel(mixed))
    expected = table.to_numpy().ravel()
    np.testing.assert_array_equal(by_id.value, expected[~np.isnan(expected)])
    np.testing.assert_array_equal(by_id.instance, np.flatnonzero(~np.isnan(expected)))
    assert named.as_binary().groups[:5].tolist() == ["image-0"] * 4 + ["image-1"]  # type: ignore[index]
    policy = fit_policy(named, mixed, task="multilabel", model="mixture", guard=False)
    assert policy.predict(named).classes.tolist() == list("abcd")
    with pytest.raises(ValueError, match="Y must be"):
        fit_policy(named, 2 * present, task="multilabel")


@pytest.mark.parametrize("model", ["auto", "mixture", "latent"])
def test_a_module_of_several_labels_predicts_as_the_policy(model):
    torch.manual_seed(0)
    network, x = torch.nn.Linear(3, C), torch.randn(N, 3)
    views = [Identity(), as_view(lambda batch: batch * torch.tensor([1.0, 1.0, -1.0]), name="mirror")]
    predictions = collect_views(network, x, views)
    present = (predictions.outputs.mean(axis=1) + np.random.default_rng(0).logistic(size=(N, C)) > 0).astype(int)
    policy = fit_policy(predictions, present, task="multilabel", model=model, guard=False)
    expected = policy.predict(predictions).proba
    np.testing.assert_allclose(TTAModule(network, views, policy)(x).detach(), expected, atol=1e-5)
    logs = TTAModule(network, views, policy, output="log_probability")(x).exp().detach()
    np.testing.assert_allclose(logs, expected, atol=1e-5)


def test_soft_labels_are_the_expected_log_probability():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, C))
    soft = special.softmax(1.5 * logits, axis=1)
    outputs = 3.0 * logits[:, None] + 0.3 * rng.normal(size=(N, 2, C))
    predictions = ViewPredictions(outputs, names=["identity", "flip"])
    policy = fit_policy(predictions, LabelSets.from_probabilities(soft), task="classification", model="mixture")
    assert policy.model.noise == "none"  # type: ignore[attr-defined]
    proba = policy.predict(predictions).proba
    assert np.abs(proba - soft).mean() < 0.03  # twice too sharp before
    np.testing.assert_allclose(
        policy.score(predictions, LabelSets.from_probabilities(soft)), (soft * np.log(proba)).sum(axis=1), atol=0.02
    )
    hard = np.eye(C)[soft.argmax(axis=1)]
    options = {"task": "classification", "model": CategoricalMixture(noise="none"), "guard": False}
    one_hot = fit_policy(predictions, LabelSets.from_probabilities(hard), **options)
    np.testing.assert_allclose(one_hot.weights, fit_policy(predictions, hard.argmax(axis=1), **options).weights)
    frame = pd.DataFrame(soft, columns=list("abcd"), index=[f"i{n}" for n in range(N)])
    named = ViewPredictions(outputs, ids=frame.index, classes=list("abcd"))
    labels = named.align(LabelSets.from_probabilities(frame.sample(frac=1, random_state=0)[list("cabd")]))
    back = np.zeros((N, C))
    back[labels.instance, labels.categorical(C, named.classes)] = labels.count
    np.testing.assert_allclose(back, soft)
    for wrong in (2 * soft, -soft, soft[0]):
        with pytest.raises(ValueError, match="rows that sum to 1"):
            LabelSets.from_probabilities(wrong)


def test_top_k_accuracy_of_one_is_accuracy():
    rng = np.random.default_rng(0)
    proba, y = rng.dirichlet(np.ones(8), size=200), rng.integers(8, size=200)
    values = [top_k_accuracy(y, proba, k) for k in range(1, 9)]
    assert values[0] == accuracy(y, proba)
    assert values == sorted(values)
    assert values[-1] == 1
    ranks = (proba > proba[np.arange(200), y][:, None]).sum(axis=1)
    assert top_k_accuracy(y, proba) == np.mean(ranks < 5)
    assert top_k_accuracy([0, 1], [[0.5, 0.5], [0.4, 0.6]], 1, weights=[1, 3]) == 0.75  # ties count against the label
    with pytest.raises(ValueError, match="k must be"):
        top_k_accuracy(y, proba, 0)
    assert nll(np.log(proba[np.arange(200), y])) > 0


@pytest.mark.filterwarnings("ignore::vbtta.GuardWarning")
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_labels_that_the_network_knows_raise_a_question(task):
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=120)
    logits = 4.0 * np.eye(3)[y][:, None] + rng.normal(size=(120, 2, 3)) * np.array([0.3, 1.0])[:, None]
    labels = y if task == "classification" else logits[:, 0, 0] + 1e-4 * rng.normal(size=120)
    views = ViewPredictions(logits if task == "classification" else logits[:, :, :1], names=["identity", "flip"])
    asked = fit_policy(views, labels, task=task, model="mixture").guard.reason
    assert asked.endswith("were these training data?")
    other = np.where(np.arange(120) % 10 == 0, 0, labels) if task == "classification" else labels + rng.normal(size=120)
    assert "training data" not in fit_policy(views, other, task=task, model="mixture").guard.reason


def test_views_of_several_labels_are_not_selected_by_fits():
    predictions = ViewPredictions(np.random.default_rng(0).normal(size=(50, 2, C)))
    with pytest.raises(ValueError, match=r"or 'multilabel' in fit_policy \(then .prune\(\)\); got 'multilabel'"):
        select_views(predictions, np.ones((50, C), int), budget=1, task="multilabel")


def test_predictions_are_shown_in_one_line():
    prediction = MultiLabelPrediction(np.full((500, C), 0.5), np.zeros((500, C)), np.arange(C))
    assert repr(prediction) == f"MultiLabelPrediction(N=500, C={C})"
