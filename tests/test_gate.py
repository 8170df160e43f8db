"""Weights that depend on the input: recovery, no cost where they are not needed, features, files, modules."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, special

from benchmarks.gate import BASE, RECORDS, TRUE, fit, gated_data, log_score
from golden import class_data, number_data
from vbtta import (
    EM,
    CategoricalMixture,
    LabelSets,
    Policy,
    Stack,
    ViewPredictions,
    fit_policy,
)

TASKS = pytest.mark.parametrize("task", RECORDS)


# -- recovery -------------------------------------------------------------------------------------


@TASKS
def test_known_coefficients_and_weights_are_recovered(task: str) -> None:
    predictions, labels = gated_data(task, 0, 3000)
    policy = fit(task, predictions, labels, features="none")
    assert policy.gate is not None
    assert policy.gate.names == ("sharp", "tilted")
    np.testing.assert_allclose(policy.gate.coefficients / policy.gate.scale, TRUE, atol=0.15)
    assert predictions.features is not None
    expected = special.softmax(np.log(BASE) + predictions.features @ TRUE, axis=1)
    np.testing.assert_allclose(policy.weights_for(predictions), expected, atol=0.1)
    np.testing.assert_allclose(policy.weights_for(predictions).mean(axis=0), policy.weights, atol=1e-12)


@TASKS
def test_intervals_of_the_coefficients_cover(task: str) -> None:
    """50 samples of 250 labels, two coefficients each; benchmarks/gate.py has a thousand."""
    hits = []
    for seed in range(50):
        predictions, labels = gated_data(task, seed, 250)
        gate = fit(task, predictions, labels, features="none").gate
        assert gate is not None
        lower, upper = gate.interval(0.9).T
        hits += list((lower <= TRUE * gate.scale) & (TRUE * gate.scale <= upper))
    assert 0.82 <= np.mean(hits) <= 0.98  # 0.9 within about 2.5 standard errors


@TASKS
def test_a_gate_that_is_not_needed_costs_next_to_nothing(task: str) -> None:
    costs = []
    for seed in range(8):
        predictions, labels = gated_data(task, seed, 4300, slopes=np.zeros(2))
        predictions = ViewPredictions(predictions.outputs)
        fitted, held_out = predictions.take(slice(300)), predictions.take(slice(300, None))
        policies = (fit(task, fitted, labels[:300], weights=weights) for weights in ("view", "input"))
        constant, gated = (log_score(policy, held_out, labels[300:]) for policy in policies)
        costs.append(constant - gated)
    assert np.mean(costs) < 0.003


@TASKS
def test_a_gate_that_is_needed_pays(task: str) -> None:
    predictions, labels = gated_data(task, 1, 1600)
    fitted, held_out = predictions.take(slice(400)), predictions.take(slice(400, None))
    scores = [
        log_score(fit(task, fitted, labels[:400], **options), held_out, labels[400:])
        for options in ({"weights": "view"}, {"features": "none"})
    ]
    assert scores[1] > scores[0] + 0.03


def test_the_fit_is_the_maximum_of_the_penalised_likelihood() -> None:
    """Uncalibrated views: only base weights and coefficients are inferred, here by a general optimiser."""
    predictions, labels = gated_data("classification", 2, 150)
    model = CategoricalMixture(weights="input", noise="none", features="none", calibrate=False, gate_scale=0.7)
    policy = fit_policy(
        predictions, labels, task="classification", model=model, guard=False, engine=EM(tol=1e-12, max_steps=3000)
    )
    assert policy.gate is not None
    assert predictions.features is not None
    features = predictions.features / policy.gate.scale
    proba = special.softmax(predictions.outputs, axis=2)[np.arange(150), :, labels]

    def loss(parameters: np.ndarray) -> float:
        log_weights = special.log_softmax(np.append(parameters[:2], 0) + features @ parameters[2:], axis=1)
        prior = -0.5 * (parameters[2:] ** 2).sum() / 0.7**2 - 2 * np.log(0.7 * np.sqrt(2 * np.pi))
        return -float(special.logsumexp(log_weights + np.log(proba), axis=1).sum() + prior)

    optimum = optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8})
    assert policy.elbo == pytest.approx(-optimum.fun, abs=1e-5)
    np.testing.assert_allclose(policy.gate.coefficients, optimum.x[2:], atol=2e-3)


# -- features -------------------------------------------------------------------------------------


@TASKS
def test_constant_and_collinear_features_do_no_harm(task: str) -> None:
    predictions, labels = gated_data(task, 3, 400)
    values = predictions.features
    assert values is not None
    by_input = np.repeat(np.random.default_rng(0).normal(size=(400, 1, 1)), 3, axis=1)  # the same for all views
    by_view = np.broadcast_to(np.arange(3.0)[None, :, None], (400, 3, 1))  # the same for all inputs
    more = np.concatenate([values, np.ones((400, 3, 1)), by_input, by_view, 2 * values[:, :, :1] + 1], axis=2)
    plain = fit(task, predictions, labels, features="none")
    full = fit(task, ViewPredictions(predictions.outputs, features=more), labels, features="none")
    assert full.gate is not None
    assert full.gate.coefficients[2:5].tolist() == [0, 0, 0]
    assert np.isfinite(full.gate.interval()).all()
    held_out, answers = gated_data(task, 4, 2000)
    assert held_out.features is not None
    extra = np.zeros((2000, 3, 3))
    wide = np.concatenate([held_out.features, extra, 2 * held_out.features[:, :, :1] + 1], axis=2)
    scores = (
        log_score(plain, held_out, answers),
        log_score(full, ViewPredictions(held_out.outputs, features=wide), answers),
    )
    assert abs(scores[0] - scores[1]) < 0.005


@TASKS
@pytest.mark.parametrize("choice", ["all", "own"])
def test_built_in_features_are_those_of_the_method(task: str, choice: str) -> None:
    data = class_data if task == "classification" else number_data
    predictions, labels = data(seed=0, n=60)
    gate = fit(task, predictions, labels, features=choice).gate
    assert gate is not None
    raw = gate.features.raw(predictions)
    outputs = predictions.outputs
    if task == "classification":
        proba = special.softmax(outputs, axis=2)
        reference = proba.mean(axis=1, keepdims=True) if choice == "all" else proba[:, :1]
        ordered = np.sort(proba, axis=2)
        expected = [
            special.entr(proba).sum(axis=2),
            ordered[:, :, -1] - ordered[:, :, -2],
            special.rel_entr(proba, np.broadcast_to(reference, proba.shape)).sum(axis=2),
            (proba * reference).sum(axis=2),
            special.logsumexp(outputs, axis=2),
        ]
    else:
        reference = np.median(outputs, axis=1, keepdims=True) if choice == "all" else outputs[:, :1]
        distance = np.abs(outputs - reference)[:, :, 0] / gate.features.unit
        expected = [distance, distance**2]
    np.testing.assert_allclose(raw, np.stack(expected, axis=2), atol=1e-9)
    np.testing.assert_allclose(gate.limits[1], raw.max(axis=(0, 1)), atol=1e-9)


@pytest.mark.parametrize("n_classes", [2, 10, 60])
@pytest.mark.parametrize("weights", ["view", "input"])
def test_single_precision_gives_the_same_predictions(n_classes: int, weights: str) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(n_classes, size=80)
    outputs = 3 * np.eye(n_classes)[label][:, None] + rng.normal(size=(80, 4, n_classes))
    single = ViewPredictions(outputs.astype(np.float32), names=["identity", "a", "b", "c"])
    double = ViewPredictions(single.outputs.astype(np.float64), names=single.names)
    policy = fit("classification", double, label, weights=weights)
    for rows in (slice(None), slice(3, 4)):
        expected, prediction = policy.predict(double.take(rows)), policy.predict(single.take(rows))
        np.testing.assert_allclose(prediction.proba, expected.proba, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(prediction.mutual_information, expected.mutual_information, atol=2e-5)
        np.testing.assert_allclose(
            policy.weights_for(single.take(rows)), policy.weights_for(double.take(rows)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("weights", ["view", "input"])
def test_huge_logits_of_single_precision_stay_finite(weights: str) -> None:
    predictions, labels = class_data(seed=0, n=60)
    policy = fit("classification", predictions, labels, weights=weights)
    for size in (100.0, 1e6, 3e38):
        outputs = (predictions.outputs / np.abs(predictions.outputs).max() * size).astype(np.float32)
        prediction: Any = policy.predict(ViewPredictions(outputs, names=predictions.names))
        np.testing.assert_allclose(prediction.proba.sum(axis=1), 1)
        assert np.isfinite(prediction.mutual_information).all()


def test_extrapolation_is_bounded() -> None:
    """Features beyond the calibration sample's range count as those at its end."""
    predictions, labels = gated_data("regression", 5, 400)
    policy = fit("regression", predictions, labels, features="none")
    assert policy.gate is not None
    ends = np.zeros((2, 3, 2))
    ends[0, 0], ends[1, 0] = policy.gate.limits[1], 1e6
    about = predictions.feature_names
    far = ViewPredictions(np.zeros((2, 3, 1)), names=predictions.names, features=ends, feature_names=about)
    weights = policy.weights_for(far)
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights > 0).all()


def test_the_spread_over_draws_is_a_feature_of_numbers() -> None:
    predictions, labels = number_data(seed=0, n=60, variance=True)
    policy = fit("regression", predictions, labels)
    assert policy.gate is not None
    assert policy.gate.names == ("distance", "squared_distance", "spread")
    with pytest.raises(ValueError, match="need a variance"):
        policy.predict(ViewPredictions(predictions.outputs, names=predictions.names))


def largest(outputs: np.ndarray) -> np.ndarray:
    """A user's own feature."""
    return np.asarray(outputs.max(axis=2, keepdims=True))


def test_a_function_of_the_outputs_is_saved_by_its_name(tmp_path: Path) -> None:
    predictions, labels = class_data(seed=0, n=60)
    policy = fit("classification", predictions, labels, features=largest)
    assert policy.gate is not None
    assert policy.gate.names[-1] == "largest_0"
    policy.save(tmp_path / "policy.json")
    assert f'"features": "{__name__}:largest"' in (tmp_path / "policy.json").read_text()
    loaded = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(loaded.predict(predictions).proba, policy.predict(predictions).proba)
    np.testing.assert_array_equal(loaded.gate.interval(0.8), policy.gate.interval(0.8))  # type: ignore[union-attr]


@TASKS
def test_given_features_are_saved_and_asked_for(task: str, tmp_path: Path) -> None:
    predictions, labels = gated_data(task, 0, 100)
    policy = fit(task, predictions, labels)
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(loaded.weights_for(predictions), policy.weights_for(predictions))
    spread = policy.among((*predictions.names, "left out")).weights_for(predictions)  # as after select_views
    np.testing.assert_array_equal(
        spread, np.column_stack([policy.weights_for(predictions), np.zeros(len(predictions))])
    )
    with pytest.raises(ValueError, match="needs the features"):
        loaded.predict(ViewPredictions(predictions.outputs, names=predictions.names))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "mine"}, "features must be"),
        ({"features": lambda outputs: outputs}, "define the function in a module"),
        ({"concentration": 1.0}, "concentration is the prior of weights='view'"),
        ({"gate_scale": 0.0}, "gate_scale"),
    ],
)
@TASKS
def test_options_are_checked(task: str, options: dict[str, Any], message: str) -> None:
    predictions, labels = gated_data(task, 0, 20)
    with pytest.raises(ValueError, match=message):
        fit(task, predictions, labels, **options)


# -- views ----------------------------------------------------------------------------------------


def test_useless_views_have_no_weight_and_need_not_be_computed() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, size=500)
    good = 3 * np.eye(4)[truth][:, None] + rng.normal(size=(500, 2, 4))
    predictions = ViewPredictions(
        np.concatenate([good, 3 * rng.normal(size=(500, 2, 4))], axis=1), names=["identity", "flip", "noise", "static"]
    )
    policy = fit("classification", predictions, truth)
    assert policy.weights[2:].tolist() == [0, 0]
    needed = predictions.select(["flip", "identity"])
    np.testing.assert_allclose(policy.predict(needed).proba, policy.predict(predictions).proba)
    assert (policy.weight_interval(0.9)[2:, 1] > 0).all()
    assert policy.weights_for(predictions)[:, 2:].max() == 0


@TASKS
def test_pruned_weights_are_a_softmax_over_the_kept_views(task: str) -> None:
    predictions, labels = gated_data(task, 0, 300)
    policy = fit(task, predictions, labels, features="none")
    pruned = policy.prune(float(np.sort(policy.weights)[1]))  # without the lightest view
    kept = pruned.weights > 0
    assert kept.sum() == 2
    weights = policy.weights_for(predictions)[:, kept]
    np.testing.assert_allclose(
        pruned.weights_for(predictions)[:, kept], weights / weights.sum(axis=1, keepdims=True), atol=1e-12
    )
    assert np.isfinite(pruned.predict(predictions).log_prob(labels)).all()


def test_constant_policies_have_the_same_weights_for_all_inputs() -> None:
    predictions, labels = class_data(seed=0, n=60)
    policy = fit("classification", predictions, labels, weights="view")
    assert policy.gate is None
    np.testing.assert_array_equal(policy.weights_for(predictions), np.tile(policy.weights, (60, 1)))


@pytest.mark.parametrize("noise", ["none", "uniform"])
def test_instance_weights_count_like_instances_given_twice(noise: str) -> None:
    predictions, labels = gated_data("classification", 0, 200)
    times = np.arange(200) % 2 + 1
    rows = np.repeat(np.arange(200), times)
    weighted = LabelSets.from_array(labels).with_weights(times.astype(float))
    policy = fit("classification", predictions, weighted, noise=noise, features="none", gate_scale=1.0)
    other = fit("classification", predictions.take(rows), labels[rows], noise=noise, features="none", gate_scale=1.0)
    expected = other.weights_for(predictions)
    assert np.ptp(expected[:, 0]) > 0.3
    np.testing.assert_allclose(policy.weights_for(predictions), expected, atol=1e-3)


def test_the_bound_never_falls_with_difficulty_and_instance_weights() -> None:
    predictions, labels = gated_data("classification", 1, 150)
    rng = np.random.default_rng(0)
    votes = np.where(rng.random((150, 3)) < 0.2, rng.integers(0, 4, size=(150, 3)), labels[:, None])
    sets = LabelSets.from_array(votes, annotators=list("abc")).with_weights(rng.uniform(0.5, 3, size=150))
    policy = fit("classification", predictions, sets, noise="annotator", difficulty=True)
    assert policy.label_noise.model.difficulty
    assert (np.diff(policy.history.elbo) >= -1e-9 * abs(policy.elbo)).all()


@TASKS
def test_intervals_of_groups_are_wider(task: str) -> None:
    """Copies of every input say nothing new; the intervals of their groups are those of the inputs."""
    predictions, labels = gated_data(task, 0, 200)
    rows = np.repeat(np.arange(200), 4)
    copies = predictions.take(rows)
    grouped = ViewPredictions(copies.outputs, features=copies.features, groups=rows)
    options = {"features": "none", "gate_scale": 1.0}
    single, copied, clustered = (
        fit(task, views, answers, **options)
        for views, answers in ((predictions, labels), (copies, labels[rows]), (grouped, labels[rows]))
    )
    for interval in (lambda policy: policy.gate.interval(), lambda policy: policy.weight_interval()):
        width = [np.diff(interval(policy), axis=1).mean() for policy in (single, copied, clustered)]
        assert width[1] < 0.65 * width[0]
        assert width[2] == pytest.approx(width[0], rel=0.25)


# -- stacks ---------------------------------------------------------------------------------------


@TASKS
def test_weights_of_a_stack_are_averages_over_its_members(task: str, tmp_path: Path) -> None:
    predictions, labels = gated_data(task, 0, 150)
    members = RECORDS[task](weights="input", features="none"), RECORDS[task]()
    policy = fit_policy(predictions, labels, task=task, model=Stack(members=members, prior_count=1e4), guard=False)
    gated, constant = policy.members
    assert policy.gate is gated.gate
    weights = policy.member_weights
    expected = weights[0] * gated.weights_for(predictions) + weights[1] * constant.weights
    np.testing.assert_allclose(policy.weights_for(predictions), expected, atol=1e-12)
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    np.testing.assert_array_equal(loaded.weights_for(predictions), policy.weights_for(predictions))


# -- modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["all", "own"])
def test_an_exported_module_equals_predict(tmp_path: Path, choice: str) -> None:
    torch = pytest.importorskip("torch")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vbtta import TTAModule, collect_views
    from vbtta.augment import Identity, as_view

    torch.manual_seed(0)
    x = torch.randn(80, 6)
    network, views = torch.nn.Linear(6, 3).eval(), [Identity(), as_view(torch.neg, name="minus")]
    predictions = collect_views(network, x, views)
    labels = (x[:, 0] > 0).long().numpy()
    policy = fit("classification", predictions, labels, features=choice, gate_scale=1.0)
    assert np.ptp(policy.weights_for(predictions)[:, 0]) > 0.1
    module = TTAModule(network, views, policy).eval()
    expected = policy.predict(predictions).proba
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-5)
    path = tmp_path / "module.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it traces
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))
        torch.onnx.export(program, (), path, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x[:7].numpy()})
    np.testing.assert_allclose(output, expected[:7], atol=1e-5)


def test_maps_have_weights_by_position() -> None:
    torch = pytest.importorskip("torch")
    from vbtta import TTAModule, collect_views
    from vbtta.augment import HorizontalFlip, Identity

    torch.manual_seed(0)
    pixels = torch.randn(300, 2, 1, 1)
    network, views = torch.nn.Conv2d(2, 3, 3, padding=1).eval(), [Identity(), HorizontalFlip()]
    rows = torch.nn.Sequential(network, torch.nn.Flatten()).eval()
    predictions = collect_views(rows, pixels, views)
    rng = np.random.default_rng(0)
    outputs = predictions.outputs + rng.normal(size=predictions.outputs.shape)
    labels = outputs[np.arange(300), rng.integers(0, 2, size=300)].argmax(axis=1)
    policy = fit("classification", ViewPredictions(outputs, names=predictions.names), labels, gate_scale=1.0)
    assert policy.weights.min() > 0.1
    assert np.ptp(policy.weights_for(ViewPredictions(outputs, names=predictions.names))[:, 0]) > 0.1
    images = torch.randn(2, 2, 4, 5)
    maps = TTAModule(network, views, policy)(images).detach()
    expected = TTAModule(network, views, policy).maps(images).probability
    np.testing.assert_allclose(maps.numpy(), expected.numpy(), atol=1e-5)


def image_data(seed: int, *, by_image: bool) -> tuple[ViewPredictions, np.ndarray]:
    """Rows of 40 images; the sharper of two views is right, by image or by row."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(40), 30)
    right = rng.integers(0, 2, size=40)[groups] if by_image else rng.integers(0, 2, size=1200)
    labels = rng.integers(0, 3, size=1200)
    outputs = 2.0 * rng.normal(size=(1200, 3, 3))
    signal = np.where(rng.random(1200) < 0.5, 6.0, 1.0) if by_image else np.full(1200, 5.0)
    outputs[np.arange(1200), 1 + right, labels] += signal
    return ViewPredictions(outputs, names=["identity", "a", "b"], groups=groups), labels


@pytest.mark.parametrize(("by_image", "choice"), [(True, "pooled"), (False, "own")])
def test_held_out_scores_decide_between_features_of_positions_and_of_images(
    by_image: bool, choice: str, tmp_path: Path
) -> None:
    predictions, labels = image_data(0, by_image=by_image)
    policy = fit("classification", predictions, labels)
    assert policy.model.features == policy.gate.features.choice == choice  # type: ignore[attr-defined]
    weights = policy.weights_for(predictions)
    assert (np.ptp(weights[predictions.groups == 3], axis=0).max() < 1e-12) == by_image
    if by_image:
        with pytest.raises(ValueError, match=r"averages over groups; give ViewPredictions\(groups"):
            policy.predict(ViewPredictions(predictions.outputs, names=predictions.names))
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json").predict(predictions)
    np.testing.assert_allclose(again.proba, policy.predict(predictions).proba, rtol=1e-12)


@pytest.mark.parametrize("choice", ["own", "pooled"])
def test_maps_are_added_up_view_by_view(choice: str) -> None:
    torch = pytest.importorskip("torch")
    from vbtta import TTAModule, collect_dense
    from vbtta.augment import Blur, HorizontalFlip, Identity, Rotate90, Zoom

    torch.manual_seed(0)
    network = torch.nn.Conv2d(1, 3, 3, padding=1).eval()
    images = torch.randn(12, 1, 8, 10)
    views = [HorizontalFlip(), Identity(), Rotate90(2), Blur(1.0)]
    seen, mirrored = network(images).detach(), network(images.flip(-1)).detach().flip(-1)
    logits = torch.where(torch.rand(12, 1, 8, 10) < 0.5, seen, mirrored)
    targets = (logits * 4 + torch.randn(12, 3, 8, 10)).argmax(1).numpy()
    collected = collect_dense(network, images, views, targets, positions=80)
    policy = fit("classification", *collected, features=choice, gate_scale=1.0)
    assert np.ptp(policy.weights_for(collected[0]), axis=0).max() > 0.05
    module = TTAModule(network, views, policy)
    rows = policy.predict(collected[0].take(np.flatnonzero(collected[0].groups == 0))).proba  # all 80 positions
    place = [int(name.partition(":")[2]) for name in collected[0].ids[:80]]  # type: ignore[index]
    maps = module(images).detach()
    np.testing.assert_allclose(maps[0].reshape(3, -1).T[place], rows, atol=1e-5)
    np.testing.assert_allclose(maps, module.maps(images).probability, atol=1e-5)
    np.testing.assert_allclose(maps, TTAModule(network, views, policy, max_batch=24)(images).detach(), atol=1e-5)
    partial = [Identity(), HorizontalFlip(), Zoom(0.7)]  # of which the last does not see the border
    policy = fit("classification", *collect_dense(network, images, partial, targets), features="own", gate_scale=1.0)
    module = TTAModule(network, partial, policy)
    np.testing.assert_allclose(module(images).detach(), module.maps(images).probability, atol=1e-5)


@TASKS
def test_features_without_a_gate_and_a_gate_without_features_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=r"features='own' needs weights='input'; with weights='view' leave it out"):
        RECORDS[task](features="own")
    predictions, labels = gated_data(task, 0, 50)
    without = ViewPredictions(predictions.outputs, names=predictions.names)
    with pytest.raises(ValueError, match=r"features='none' needs ViewPredictions\(features=\.\.\.\); give them"):
        fit(task, without, labels, features="none")


def test_modules_refuse_features_that_they_cannot_compute() -> None:
    torch = pytest.importorskip("torch")
    from vbtta import TTAModule
    from vbtta.augment import Identity, as_view

    predictions, labels = gated_data("classification", 0, 60)
    named = ViewPredictions(predictions.outputs, names=["identity", "a", "b"], features=predictions.features)
    policy = fit("classification", named, labels)
    with pytest.raises(ValueError, match=r"built-in features only.*model=.mixture.*Policy.predict"):
        TTAModule(torch.nn.Linear(4, 4), [Identity(), *(as_view(torch.neg, name=name) for name in "ab")], policy)
