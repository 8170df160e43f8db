"""Stacked policies: an average of members, weighted by held-out scores."""

import json
import warnings

import numpy as np
import pytest
from scipy import optimize, special

from benchmarks.gate import gated_data
from vbtta import (
    CategoricalLatent,
    CategoricalMixture,
    ConvergenceWarning,
    GaussianLatent,
    GaussianMixture,
    GuardWarning,
    LabelSets,
    Policy,
    Stack,
    ViewPredictions,
    fit_policy,
)
from vbtta.crossval import stacking_weights

NAMES = ["identity", "flip", "blur", "noise"]


@pytest.fixture(scope="module")
def classes():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, size=200)
    common = 2.5 * np.eye(4)[truth] + rng.normal(size=(200, 4))
    outputs = common[:, None] + rng.normal(size=(200, 4, 4)) * np.array([0.8, 0.8, 1.5, 5.0])[:, None]
    votes = np.where(rng.random((200, 3)) < 0.25, rng.integers(0, 4, size=(200, 3)), truth[:, None])
    return ViewPredictions(outputs, names=NAMES), LabelSets.from_array(votes), truth


@pytest.fixture(scope="module")
def numbers():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=150)
    outputs = truth[:, None] + rng.normal(size=(150, 4)) * [0.4, 0.4, 0.6, 3.0]
    return ViewPredictions(outputs[:, :, None], names=NAMES), truth + 0.1 * rng.normal(size=150)


@pytest.fixture(scope="module")
def stack(classes):
    return fit_policy(classes[0], classes[1], task="classification")


@pytest.fixture(scope="module")
def regression_stack(numbers):
    return fit_policy(*numbers, task="regression")


def test_the_weights_of_the_members_are_the_mode():
    rng = np.random.default_rng(0)
    scores, sizes = rng.normal(size=(40, 3)), rng.uniform(0.5, 2, size=40)

    def loss(free):
        weights = special.softmax([0, *free])
        return -(sizes @ np.log(np.exp(scores) @ weights) + 1.5 * np.log(weights).sum())

    best = optimize.minimize(loss, [0.0, 0.0], tol=1e-12)
    weights, covariance = stacking_weights(scores, sizes, 1.5)
    np.testing.assert_allclose(weights, special.softmax([0, *best.x]), atol=1e-5)
    np.testing.assert_allclose(covariance.sum(axis=0), 0, atol=1e-12)
    assert (np.diagonal(covariance) > 0).all()


def test_without_evidence_the_shares_are_equal_and_with_much_of_it_one_member_remains():
    np.testing.assert_allclose(stacking_weights(np.zeros((1_000, 3)), np.ones(1_000), 1.0)[0], 1 / 3)
    better = np.tile([0.0, -1.0], (20_000, 1))
    assert stacking_weights(better, np.ones(20_000), 1.0)[0][1] < 1e-3


def test_the_prediction_is_the_average_of_the_members(classes, stack):
    predictions, labels, _ = classes
    assert [type(member.model) for member in stack.members] == [
        CategoricalMixture, CategoricalLatent, CategoricalMixture,
    ]  # fmt: skip
    assert stack.members[-1].used_names == ("identity",)
    assert stack.member_weights.sum() == pytest.approx(1)
    shares = stack.member_weights
    expected = sum(w * member.predict(predictions).proba for w, member in zip(shares, stack.members, strict=True))
    prediction = stack.predict(predictions)
    np.testing.assert_allclose(prediction.proba, expected)
    assert ((prediction.mutual_information >= 0) & (prediction.mutual_information <= prediction.entropy + 1e-12)).all()
    scores = [np.log(w) + m.score(predictions, labels) for w, m in zip(shares, stack.members, strict=True)]
    np.testing.assert_allclose(stack.score(predictions, labels), special.logsumexp(scores, axis=0))
    total = sum(w * member.weights for w, member in zip(shares, stack.members, strict=True))
    np.testing.assert_allclose(stack.weights, total)


def test_rows_are_predicted_alike_in_blocks_of_any_size(classes, stack, monkeypatch):
    whole = stack.predict(classes[0])
    monkeypatch.setattr("vbtta.policy._PREDICTED_ENTRIES", 7 * 16)  # seven rows of four views and classes
    parts = stack.predict(classes[0])
    np.testing.assert_array_equal(parts.proba, whole.proba)
    np.testing.assert_array_equal(parts.mutual_information, whole.mutual_information)
    assert len(stack.predict(classes[0].take(slice(0))).proba) == 0


def test_numbers_are_averaged_as_densities(numbers, regression_stack):
    predictions, labels = numbers
    members = zip(regression_stack.member_weights, regression_stack.members, strict=True)
    log_densities = [np.log(share) + member.predict(predictions).log_prob(labels) for share, member in members]
    prediction = regression_stack.predict(predictions)
    np.testing.assert_allclose(prediction.log_prob(labels), special.logsumexp(log_densities, axis=0))
    lower, upper = prediction.interval(0.9)
    assert 0.8 < np.mean((lower[:, 0] < labels) & (labels < upper[:, 0])) < 0.98


def test_labels_speak_for_the_members_that_predicted_them(classes, stack):
    predictions, labels, truth = classes
    consensus = stack.consensus(predictions, labels)
    shares = special.softmax(
        np.stack([np.log(w) + m.score(predictions, labels)
                  for w, m in zip(stack.member_weights, stack.members, strict=True)], axis=1), axis=1)  # fmt: skip
    parts = np.stack([member.consensus(predictions, labels).proba for member in stack.members], axis=1)
    np.testing.assert_allclose(consensus.proba, np.einsum("nm,nmc->nc", shares, parts))
    assert (consensus.label == truth).mean() > 0.9
    unlabelled = LabelSets.from_array(np.where(np.arange(200)[:, None] < 100, np.nan, labels.value.reshape(200, 3)))
    np.testing.assert_allclose(
        stack.consensus(predictions, unlabelled).proba[:100], stack.predict(predictions).proba[:100]
    )


@pytest.mark.parametrize("kind", ["stack", "regression_stack"])
def test_a_file_gives_the_same_predictions_to_the_last_bit(kind, request, tmp_path, classes, numbers):
    policy = request.getfixturevalue(kind)
    predictions, labels = (classes if kind == "stack" else numbers)[:2]
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json")
    assert again.model == policy.model
    np.testing.assert_array_equal(again.member_weights, policy.member_weights)
    np.testing.assert_array_equal(again.score(predictions, labels), policy.score(predictions, labels))
    np.testing.assert_array_equal(again.weight_interval(), policy.weight_interval())
    assert again.guard == policy.guard


def test_a_damaged_stack_is_refused(stack, tmp_path):
    path = tmp_path / "policy.json"
    stack.save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"member_weights": [', '"member_weights": [-'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"damaged policy: its members' weights are not positive shares"):
        Policy.load(path, verify=False)
    document = json.loads(text) | {"n_outputs": 10**8, "classes": None}  # of which arrays would be made
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=r"damaged policy: its members have other outputs"):
        Policy.load(path, verify=False)


@pytest.mark.parametrize("name", ["elbo", "gain"])
def test_what_only_members_have_is_refused_with_their_names(stack, name):
    with pytest.raises(ValueError, match=f"a stack has no {name} of its own.*CategoricalMixture, CategoricalLatent"):
        getattr(stack, name)
    with pytest.raises(ValueError, match="a stack has no at_step"):
        stack.at_step(1)
    assert np.isfinite(stack.members[0].elbo)


def test_intervals_hold_the_weights(stack, regression_stack):
    for policy in (stack, regression_stack):
        low, high = policy.weight_interval(0.9).T
        assert ((low >= 0) & (low <= policy.weights) & (policy.weights <= high) & (high <= 1)).all()
        assert (policy.weight_interval(0.99)[:, 1] >= high).all()


def test_members_of_little_weight_are_dropped_and_one_alone_is_just_that():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=3_000)
    outputs = np.stack([truth + 5 * rng.normal(size=3_000), *(truth + 0.5 * rng.normal(size=(5, 3_000)))], axis=1)
    predictions = ViewPredictions(outputs[:, :, None], names=["identity", *"abcde"])
    model = Stack(members=(GaussianMixture(), GaussianLatent()), raw=GaussianMixture.raw_network())
    policy = fit_policy(predictions, truth, task="regression", model=model)
    assert policy.members == (policy,)
    assert isinstance(policy.model, GaussianLatent)
    np.testing.assert_array_equal(policy.member_weights, [1.0])
    assert policy.guard.probability > 0.99


def test_with_few_labels_the_raw_network_has_most_of_the_weight(classes):
    predictions, _, truth = classes
    few = np.where(np.arange(200) < 4, truth, np.nan)
    policy = fit_policy(predictions, few, task="classification")
    share = 4 / 84  # odds of 4 to 80 that the views help; of that the raw network has half
    np.testing.assert_allclose(policy.member_weights, [0.25 * share, 0.25 * share, 1 - 0.5 * share])
    assert not policy.guard.checked


def test_useless_views_do_not_blur_a_good_network():
    """With the residuals of the median view as the prior's scale, the mixture of 20 labels lost 0.57 nats an input."""
    lost = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        truth = rng.normal(0, 2, 1020)
        outputs = np.column_stack([truth + rng.normal(0, 0.2, 1020), rng.normal(0, 2, (1020, 5))])[..., None]
        labels, views = truth + rng.normal(0, 0.3, 1020), ViewPredictions(outputs, names=["identity", *"abcde"])
        train, test = views.take(slice(20)), views.take(slice(20, None))
        raw = GaussianMixture.raw_network()
        fits = [
            fit_policy(train, labels[:20], task="regression", model=model, guard=False) for model in ("auto", "mixture")
        ]
        fits.append(fit_policy(train.select(["identity"]), labels[:20], task="regression", model=raw, guard=False))
        default, mixture, alone = (fit.predict(test).log_prob(labels[20:]).mean() for fit in fits)
        lost.append((alone - default, alone - mixture))
    of_default, of_mixture = np.mean(lost, axis=0)
    assert of_default < 0.01
    assert of_mixture < 0.2


def test_the_guard_is_a_statement_with_a_probability(classes, stack, numbers):
    guard = stack.guard
    assert guard.checked
    assert guard.probability == pytest.approx(special.ndtr(guard.difference / guard.standard_error))
    assert f"help with probability {guard.probability:.2f}" in guard.reason
    unguarded = fit_policy(classes[0], classes[1], task="classification", guard=False)
    assert not unguarded.guard.checked
    np.testing.assert_array_equal(unguarded.member_weights, stack.member_weights)


def test_the_hard_guard_takes_the_raw_network_where_the_views_do_not_help():
    rng = np.random.default_rng(3)
    truth = rng.normal(size=40)
    views = np.hstack([truth[:, None] + 0.1 * rng.normal(size=(40, 1)), rng.normal(size=(40, 8))])
    predictions = ViewPredictions(views[:, :, None], names=["identity", *"abcdefgh"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuardWarning)
        policy = fit_policy(predictions, truth, task="regression", guard="hard")
    assert policy.guard.fell_back == (policy.guard.probability < 0.5)
    assert policy.guard.fell_back
    assert policy.used_names == ("identity",)
    np.testing.assert_allclose(policy.predict(predictions).mean, predictions.outputs[:, 0], atol=1e-3)
    with pytest.raises(ValueError, match="guard must be one of"):
        fit_policy(predictions, truth, task="regression", guard="soft")


def test_the_raw_network_has_one_temperature_and_no_offset(classes, stack):
    predictions, _, _ = classes
    raw = stack.members[-1]
    logits = np.log(raw.predict(predictions).proba)
    ratio = np.diff(logits, axis=1) / np.diff(predictions.outputs[:, 0], axis=1)
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=0.02)


def test_groups_count_as_one_piece_of_evidence_each(numbers):
    predictions, labels = numbers
    repeated = np.repeat(np.arange(150), 20)
    grouped = predictions.take(repeated).with_groups(repeated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        policy = fit_policy(grouped, labels[repeated], task="regression")
        naive = fit_policy(predictions.take(repeated), labels[repeated], task="regression")
    assert policy.guard.standard_error > 3 * naive.guard.standard_error


def test_pruned_stacks_need_their_views_only(classes, stack):
    predictions = classes[0]
    pruned = stack.prune(0.15)
    assert set(pruned.used_names) < set(stack.used_names)
    assert pruned.weights.sum() == pytest.approx(1)
    proba = pruned.predict(predictions.select(pruned.used_names)).proba
    np.testing.assert_allclose(proba.sum(axis=1), 1)


def test_instance_weights_multiply_the_score_of_a_stack(classes):
    predictions, labels, _ = classes
    model = Stack(members=(CategoricalMixture(noise="none"), CategoricalLatent(noise="none")))
    stack = fit_policy(predictions, labels, task="classification", model=model, guard=False)
    weighted = labels.with_weights(np.full(200, 2.0))
    np.testing.assert_allclose(stack.score(predictions, weighted), 2 * stack.score(predictions, labels), rtol=1e-9)


def test_a_record_says_what_is_stacked(numbers):
    predictions, labels = numbers
    model = Stack(members=(GaussianMixture(), GaussianLatent(shrinkage=1.0)), prior_count=5.0)
    policy = fit_policy(predictions, labels, task="regression", model=model)
    assert policy.model.prior_count == 5.0  # type: ignore[attr-defined]
    assert len(policy.members) == 2
    again = fit_policy(predictions, labels, task="regression", model=policy.model)
    np.testing.assert_array_equal(again.weights, policy.weights)
    with pytest.raises(ValueError, match="members must be model records"):
        Stack(members=())
    with pytest.raises(ValueError, match="is not for task='classification'"):
        fit_policy(predictions, labels, task="classification", model=model)


def test_a_module_computes_what_predict_does():
    torch = pytest.importorskip("torch")
    from vbtta import TTAModule, collect_views
    from vbtta.augment import Identity, as_view

    torch.manual_seed(0)
    network, inputs = torch.nn.Linear(6, 3), torch.randn(120, 6)
    views = [Identity(), *(as_view(lambda x, k=k: x.roll(k, 1), name=f"roll {k}") for k in (1, 2))]
    predictions = collect_views(network, inputs, views)
    for task, labels in (
        ("classification", np.asarray(predictions.outputs[:, 0]).argmax(axis=1)),
        ("regression", np.asarray(predictions.outputs).mean(axis=1)[:, None]),
    ):
        if task == "regression":
            labels = labels + 0.3 * np.random.default_rng(0).normal(size=labels.shape)
        policy = fit_policy(predictions, labels, task=task)
        assert len(policy.members) > 1
        prediction = policy.predict(predictions)
        expected = prediction.proba if task == "classification" else prediction.mean
        module = TTAModule(network, views, policy)
        np.testing.assert_allclose(module(inputs).detach().numpy(), expected, atol=1e-5)
    in_log = TTAModule(network, views, fit_policy(predictions, np.zeros(120) + np.arange(120) % 3,
                                                  task="classification"), output="log_probability")  # fmt: skip
    assert torch.isfinite(in_log(inputs)).all()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_weights_that_depend_on_the_input_join_where_the_evidence_is_decisive(task, tmp_path):
    predictions, labels = gated_data(task, 0, 400)
    policy = fit_policy(predictions, labels, task=task)
    gates = [member.gate is not None for member in policy.members]
    assert sum(gates) == 1
    assert policy.gate is policy.members[gates.index(True)].gate
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(loaded.weights_for(predictions), policy.weights_for(predictions))


def test_without_such_evidence_no_gate_is_stacked(stack, regression_stack):
    for policy in (stack, regression_stack):
        assert any(member.ungated in policy.model.members for member in policy.model.members)
        assert policy.gate is None


def test_members_take_over_the_noise_of_single_labels_that_the_raw_network_infers():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 5, size=150)
    outputs = (4 * np.eye(5)[truth])[:, None] + rng.normal(size=(150, 12, 5))
    outputs[:, 6:] = rng.normal(size=(150, 6, 5))  # views that only wrong labels speak for
    labels = np.where(rng.random(150) < 0.25, rng.integers(0, 5, size=150), truth)
    predictions = ViewPredictions(outputs, names=["identity", *(f"view {k}" for k in range(11))])
    policy = fit_policy(predictions, labels, task="classification")
    raw = policy.members[-1]
    counts = raw.label_noise.counts[0]
    for member in policy.members[:-1]:
        assert member.model.accuracy_prior == tuple(counts)  # type: ignore[attr-defined]
    assert policy.annotators.accuracy == raw.annotators.accuracy  # not counted twice
    alone = fit_policy(predictions, labels, task="classification", model="mixture", guard=False)
    score = {name: p.predict(predictions).log_prob(truth).mean() for name, p in (("stack", policy), ("mixture", alone))}
    assert score["stack"] > score["mixture"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_ten_copies_of_a_view_change_next_to_nothing(task):
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, size=1_300) if task == "classification" else rng.normal(size=1_300)
    signal = 2 * np.eye(3)[truth] if task == "classification" else truth[:, None]
    views = signal[:, None] + rng.normal(size=(1_300, 4, signal.shape[1])) * [[[1.0], [1.0], [1.5], [2.0]]]
    names = ["identity", "a", "b", "c"]
    losses = []
    for copies in (0, 10):
        outputs = np.concatenate([views, *[views[:, 1:2]] * copies], axis=1)
        predictions = ViewPredictions(outputs, names=[*names, *(f"copy {k}" for k in range(copies))])
        policy = fit_policy(predictions.take(slice(300)), truth[:300], task=task)
        prediction = policy.predict(predictions.take(slice(300, 1_300)))
        if task == "classification":
            losses.append(-np.log(prediction.proba[np.arange(1_000), truth[300:]]).mean())
        else:
            losses.append(-prediction.log_prob(truth[300:]).mean())
    assert abs(losses[1] - losses[0]) < 0.01


def test_more_views_than_inputs():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=540)
    views = 2 * np.eye(3)[truth][:, None] + 1.5 * rng.normal(size=(540, 50, 3))
    predictions = ViewPredictions(views, names=["identity", *(f"view {k}" for k in range(49))])
    policy = fit_policy(predictions.take(slice(40)), truth[:40], task="classification")
    test = predictions.take(slice(40, 540))
    alone = fit_policy(test.select(["identity"]), truth[40:], task="classification", model="mixture", guard=False)
    assert policy.score(test, truth[40:]).mean() > alone.score(test, truth[40:]).mean() + 0.1
