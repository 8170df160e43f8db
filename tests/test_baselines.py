"""Every baseline against a case computed by hand or by another route, and what all of them share."""

import itertools
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from vbtta.baselines import BASELINES, fit_baseline, methods, solvers
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions

NAMES = ["identity", "flip", "crop", "noise"]
ALL = [(task, name) for task, names in BASELINES.items() for name in names]


def classification(seed=0, n=60, k=4, c=3):
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, c, n)
    logits = generator.normal(size=(n, k, c))
    logits[np.arange(n), :, truth] += np.linspace(2, 0, k)
    labels = np.where(generator.random((n, 2)) < 0.2, generator.integers(0, c, (n, 2)), truth[:, None])
    return ViewPredictions(logits, names=NAMES[:k]), LabelSets.from_array(labels)


def regression(seed=0, n=60, k=4, c=1):
    generator = np.random.default_rng(seed)
    truth = generator.normal(size=(n, 1, c)) * 3 + 1
    outputs = truth + generator.normal(size=(n, k, c)) * np.linspace(0.5, 2, k)[:, None]
    labels = truth + generator.normal(size=(n, 2, c)) * 0.3
    return ViewPredictions(outputs, names=NAMES[:k]), LabelSets.from_array(labels)


def problem(task, **options):
    return classification(**options) if task == "classification" else regression(**options)


def point(prediction):
    return prediction.proba if hasattr(prediction, "proba") else prediction.mean


def from_probabilities(*views):
    return ViewPredictions(np.log(np.stack(views, axis=1)), names=NAMES[: len(views)])


# -- fixed rules ----------------------------------------------------------------------------------


def test_fixed_rules_by_hand():
    views = from_probabilities([[0.8, 0.2], [0.4, 0.6]], [[0.5, 0.5], [0.1, 0.9]])
    labels = LabelSets.from_array([0, 1])

    def proba(name):
        return fit_baseline(name, views, labels, task="classification").predict(views).proba

    np.testing.assert_allclose(proba("original"), [[0.8, 0.2], [0.4, 0.6]])
    np.testing.assert_allclose(proba("uniform"), [[0.65, 0.35], [0.25, 0.75]])
    root = np.sqrt([[0.4, 0.1], [0.04, 0.54]])
    np.testing.assert_allclose(proba("geometric"), root / root.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(proba("max"), [[0.8 / 1.3, 0.5 / 1.3], [0.4 / 1.3, 0.9 / 1.3]])
    # Log-likelihoods: ln 0.8 + ln 0.6 = ln 0.48 against ln 0.5 + ln 0.9 = ln 0.45.
    assert fit_baseline("best_view", views, labels, task="classification").used == ("identity",)


def test_mutual_information_is_that_of_view_and_label():
    views = from_probabilities([[0.8, 0.2]], [[0.4, 0.6]])
    fitted = fit_baseline("uniform", views, LabelSets.from_array([0]), task="classification")
    entropy = special.entr([0.6, 0.4]).sum() - 0.5 * special.entr([0.8, 0.2, 0.4, 0.6]).sum()
    assert fitted.predict(views).mutual_information == pytest.approx([entropy])
    single = fit_baseline("original", views, LabelSets.from_array([0]), task="classification")
    assert single.predict(views).mutual_information == pytest.approx([0])


@pytest.mark.parametrize("method", ["geometric", "uniform+t", "max"])
def test_mutual_information_is_part_of_the_entropy(method):
    rng = np.random.default_rng(0)
    views, labels = ViewPredictions(5 * rng.normal(size=(200, 3, 4))), LabelSets.from_array(rng.integers(0, 4, 200))
    prediction = fit_baseline(method, views, labels, task="classification").predict(views)
    assert (prediction.mutual_information >= 0).all()
    assert (prediction.mutual_information <= prediction.entropy).all()


def test_entropy_pool_by_hand_and_tau_is_the_best():
    p = np.array([[0.9, 0.1], [0.5, 0.5]])
    entropy = special.entr(p).sum(axis=1)
    weights = np.exp(-entropy / 0.3) / np.exp(-entropy / 0.3).sum()
    np.testing.assert_allclose(np.exp(methods.entropy_pool(np.log(p)[None], 0.3))[0], weights @ p)

    views, labels = classification()
    fitted = fit_baseline("entropy", views, labels, task="classification")
    tau = fitted.rule.keywords["tau"]  # type: ignore[attr-defined]

    def likelihood(tau):
        return methods.entropy_pool(views.outputs, tau)[labels.instance, labels.value].sum()

    assert all(likelihood(tau) >= likelihood(tau * factor) - 1e-9 for factor in (0.5, 0.9, 1.1, 2))


# -- trained rules --------------------------------------------------------------------------------


def test_one_step_of_aug_tta_by_hand():
    # One input, logits (2, 0) and (0, 0), label 0: pooled (1, 0), p = (s, 1 - s); the gradient in theta_k is
    # (g . z_k - g . pooled) / 1 with g = (s - 1, 1 - s): first view (s - 1)(2 - 1), second (s - 1)(0 - 1).
    s = 1 / (1 + np.exp(-1))
    gradient = np.array([s - 1, 1 - s]) + 1e-4 * 0.5
    theta = np.array([0.5, 0.5]) - 0.01 * gradient
    weights = solvers.train_view_weights(np.array([[[2.0, 0.0], [0.0, 0.0]]]), np.array([[1.0, 0.0]]), epochs=1)
    np.testing.assert_allclose(weights, theta / theta.sum(), rtol=1e-12)


@pytest.mark.parametrize("per_class", [False, True])
def test_training_agrees_with_torch(per_class):
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(1100, 5, 3)) * 4
    truth = generator.integers(0, 3, 1100)
    logits[np.arange(1100), :, truth] += [3, 3, 0, 0, -8]
    theta = torch.full((5, 3) if per_class else (5, 1), 0.2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([theta], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(30 if per_class else 20):
        for first in (0, 1000):
            batch = torch.tensor(logits[first : first + 1000])
            share = theta if per_class else theta / theta.sum()
            loss = torch.nn.functional.cross_entropy((share * batch).sum(1), torch.tensor(truth[first : first + 1000]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            theta.data.clamp_(0)
    expected = theta.detach().numpy()
    views = ViewPredictions(logits)
    name = "class_tta" if per_class else "aug_tta"
    weights = fit_baseline(name, views, LabelSets.from_array(truth), task="classification").weights
    np.testing.assert_allclose(weights, expected if per_class else expected[:, 0] / expected.sum(), atol=1e-12)
    assert (weights == 0).any()  # the clamp was at work


def test_the_better_of_aug_and_class_tta_is_that_of_a_held_out_fifth():
    chosen = set()
    for seed in range(8):
        views, labels = classification(seed, n=40)
        order = np.random.default_rng(0).permutation(40)
        held, rest = order[:8], np.sort(order[8:])
        target = np.zeros((40, 3))
        np.add.at(target, (labels.instance, labels.value), 1)
        scores = []
        for train in (solvers.train_view_weights, solvers.train_class_weights):
            weights = train(views.outputs[rest], target[rest])
            log_proba = methods.logit_pool(views.outputs[held], weights)
            right = target[held, log_proba.argmax(axis=1)].sum()
            scores.append((right, (target[held] * log_proba).sum(), weights))
        best = max(scores, key=lambda entry: entry[:2])[2]
        fitted = fit_baseline("aug_or_class_tta", views, labels, task="classification")
        np.testing.assert_array_equal(fitted.weights, best)
        chosen.add(best.ndim)
    assert chosen == {1, 2}


def test_greedy_takes_what_a_plain_search_takes():
    views, labels = classification(n=40, k=3)
    fitted = fit_baseline("greedy", views, labels, task="classification")
    proba = special.softmax(views.outputs, axis=2)
    target = np.zeros((40, 3))
    np.add.at(target, (labels.instance, labels.value), 1)

    def calibrated(p):
        def loss(log_t):
            return -(target * special.log_softmax(np.log(p) / np.exp(log_t), axis=1)).sum()

        return -optimize.minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}).fun

    total, taken = np.zeros((40, 3)), np.zeros(3)
    for step in range(100):
        best = int(np.argmax([calibrated((total + proba[:, k]) / (step + 1)) for k in range(3)]))
        total += proba[:, best]
        taken[best] += 1
    np.testing.assert_allclose(fitted.weights, taken / 100)


def test_mixture_weights_by_hand():
    # Each label is explained by one view only: the weights are the shares of labels, 3 and 1 of 4.
    logits = np.array([[[0.0, -900.0], [-900.0, 0.0]]])
    labels = LabelSets.from_table([0, 0], [0, 1], count=[3, 1])
    fitted = fit_baseline("mixture_mle", ViewPredictions(logits), labels, task="classification")
    np.testing.assert_allclose(fitted.weights, [0.75, 0.25], atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 12), st.integers(1, 200))
def test_mixture_weights_are_certified_optimal(seed, n_views, n_labels):
    generator = np.random.default_rng(seed)
    log_likelihood = generator.normal(size=(n_labels, n_views)) * generator.choice([0.1, 1, 30])
    count = generator.integers(1, 4, n_labels).astype(float)
    weights = solvers.mixture_weights(log_likelihood, count)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    likelihood = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True))
    slope = (count / count.sum()) @ (likelihood / (likelihood @ weights)[:, None])
    assert slope.max() <= 1 + 1e-4  # no weights have a mean log-likelihood better by more than that


def test_mixture_weights_with_equal_views():
    weights = solvers.mixture_weights(np.log(np.full((5, 3), 0.2)), np.ones(5))
    np.testing.assert_allclose(weights, 1 / 3)


def test_bma_of_logits_by_hand():
    views, labels = classification(k=2, c=2)
    odds = views.outputs[:, :, 1] - views.outputs[:, :, 0]  # two classes: logistic regression on log odds
    x, y = odds[labels.instance], labels.value
    bic, average = [], []
    for subset in ([0], [1], [0, 1]):

        def loss(b, subset=subset):
            return np.logaddexp(0, np.where(y == 1, -1, 1) * (x[:, subset] @ b)).sum()

        optimum = optimize.minimize(loss, np.zeros(len(subset)), method="BFGS", options={"gtol": 1e-8})
        bic.append(len(subset) * np.log(len(y)) + 2 * optimum.fun)
        average.append(np.zeros(2))
        average[-1][subset] = optimum.x
    share = special.softmax(-np.array(bic) / 2)
    fitted = fit_baseline("bma", views, labels, task="classification")
    np.testing.assert_allclose(fitted.weights, share @ np.array(average), rtol=1e-5)
    expected = special.expit(odds @ fitted.weights)
    np.testing.assert_allclose(fitted.predict(views).proba[:, 1], expected, rtol=1e-10)


def test_bma_of_linear_models_by_hand():
    views, labels = regression(k=3)
    x, y = views.outputs[labels.instance, :, 0], labels.value[:, 0]
    bic, average = [], []
    for size in (1, 2, 3):
        for subset in itertools.combinations(range(3), size):
            b, squares, *_ = np.linalg.lstsq(x[:, subset], y, rcond=None)
            bic.append(len(y) * np.log(squares[0] / len(y)) + size * np.log(len(y)))
            average.append(np.zeros(3))
            average[-1][list(subset)] = b
    share = special.softmax(-np.array(bic) / 2)
    fitted = fit_baseline("bma", views, labels, task="regression")
    np.testing.assert_allclose(fitted.weights, share @ np.array(average), rtol=1e-8)


def test_bma_window_finds_what_all_subsets_find(monkeypatch):
    views, labels = regression(n=200)
    everything = fit_baseline("bma", views, labels, task="regression").weights
    monkeypatch.setattr(solvers, "_ALL_SUBSETS_UP_TO", 0)
    np.testing.assert_allclose(fit_baseline("bma", views, labels, task="regression").weights, everything, atol=0.02)


def test_nnls_by_hand():
    # y = 2 f_1 exactly, and the second view would need a negative weight if it were free.
    outputs = np.array([[[1.0], [0.0]], [[0.0], [1.0]], [[2.0], [1.0]]])
    labels = LabelSets.from_array([2.0, -1.0, 4.0])
    fitted = fit_baseline("nnls", ViewPredictions(outputs, names=["a", "b"]), labels, task="regression")
    np.testing.assert_allclose(fitted.weights, [2, 0], atol=1e-12)
    assert fitted.used == ("a",)
    prediction = fitted.predict(ViewPredictions(outputs[:, :1], names=["a"]))
    np.testing.assert_allclose(prediction.mean[:, 0], [2, 0, 4])
    np.testing.assert_allclose(prediction.variance[:, 0], 1 / 3)  # squared residuals 0, 1, 0


def test_best_view_and_residual_density_in_regression():
    outputs = np.array([[[1.0], [1.5]], [[2.0], [2.5]], [[6.0], [3.5]]])
    labels = LabelSets.from_array([1.0, 2.0, 3.0])
    fitted = fit_baseline("best_view", ViewPredictions(outputs), labels, task="regression")
    assert fitted.weights.tolist() == [0, 1]  # mean squares: 9/3 against 0.25
    y = np.array([1.0, 2.0, 3.0])
    expected = -0.5 * np.log(2 * np.pi * 0.25) - 0.5 * (y - outputs[:, 1, 0]) ** 2 / 0.25
    np.testing.assert_allclose(fitted.predict(ViewPredictions(outputs)).log_prob(y), expected)


def test_weights_by_output():
    views, labels = regression(c=2)
    for name in ("nnls", "bma"):
        fitted = fit_baseline(name, views, labels, task="regression")
        assert fitted.weights.shape == (4, 2)
        for output in range(2):
            alone = ViewPredictions(views.outputs[:, :, [output]], names=NAMES)
            output_labels = LabelSets.from_array(labels.value[:, output].reshape(60, 2))
            np.testing.assert_allclose(
                fitted.weights[:, output],  # type: ignore[index]
                fit_baseline(name, alone, output_labels, task="regression").weights,
            )


# -- temperature ----------------------------------------------------------------------------------


def test_temperature_by_hand():
    # One view says 0.9 for class 0 and is right 3 times of 4: softmax(log p / T) must say 0.75.
    views = from_probabilities([[0.9, 0.1]] * 4)
    labels = LabelSets.from_array([0, 0, 0, 1])
    fitted = fit_baseline("uniform+t", views, labels, task="classification")
    assert fitted.temperature == pytest.approx(np.log(9) / np.log(3))
    np.testing.assert_allclose(fitted.predict(views).proba, [[0.75, 0.25]] * 4)


def test_temperature_stays_in_range():
    views = from_probabilities([[0.9, 0.1]] * 2)
    hot = fit_baseline("uniform+t", views, LabelSets.from_array([1, 1]), task="classification")
    cold = fit_baseline("uniform+t", views, LabelSets.from_array([0, 0]), task="classification")
    assert (hot.temperature, cold.temperature) == (100.0, 0.01)
    assert repr(hot) == "Baseline(uniform+t, classification: 1 of 1 views)"
    mild = fit_baseline("uniform+t", from_probabilities([[0.9, 0.1]] * 4), [0, 0, 0, 1], task="classification")
    assert "limit" not in repr(mild)
    assert "limit" not in repr(mild)


@pytest.mark.parametrize("name", BASELINES["classification"])
def test_temperature_never_lowers_the_calibration_likelihood(name):
    views, labels = classification()

    def score(name):
        prediction = fit_baseline(name, views, labels, task="classification").predict(views)
        return np.log(prediction.proba[labels.instance, labels.value]).mean()

    assert score(name + "+t") >= score(name) - 1e-12


# -- what all of them share -----------------------------------------------------------------------


@pytest.mark.parametrize(("task", "name"), ALL)
def test_counts_equal_repeated_labels(task, name):
    views, labels = problem(task)
    rows = np.repeat(np.arange(len(labels)), 1 + np.arange(len(labels)) % 2)
    twice = LabelSets.from_table(labels.instance[rows], labels.value[rows], n_instances=60)
    counted = LabelSets.from_table(labels.instance, labels.value, count=1 + np.arange(len(labels)) % 2, n_instances=60)
    first, second = (point(fit_baseline(name, views, each, task=task).predict(views)) for each in (twice, counted))
    np.testing.assert_allclose(first, second, atol=1e-9)


@pytest.mark.parametrize(("task", "name"), ALL)
def test_permuting_views_permutes_weights(task, name):
    views, labels = problem(task)
    order = [2, 0, 3, 1]
    fitted = fit_baseline(name, views, labels, task=task)
    permuted = fit_baseline(name, views.select([NAMES[k] for k in order]), labels, task=task)
    if fitted.weights is not None:
        np.testing.assert_allclose(permuted.weights, fitted.weights[order], atol=1e-7)
    np.testing.assert_allclose(point(permuted.predict(views)), point(fitted.predict(views)), atol=1e-6)


@pytest.mark.parametrize(("task", "name"), ALL)
def test_used_views_are_enough_and_the_result_pickles(task, name):
    views, labels = problem(task)
    fitted = fit_baseline(name, views, labels, task=task)
    whole = point(fitted.predict(views))
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(point(fitted.predict(views.select(fitted.used))), whole)
    np.testing.assert_array_equal(point(pickle.loads(pickle.dumps(fitted)).predict(views)), whole)
    with pytest.raises(ValueError, match="are not among the predictions' views"):
        fitted.predict(ViewPredictions(views.outputs[:, :1], names=["other"]))


@pytest.mark.parametrize(("task", "name"), ALL)
def test_one_view_is_that_view(task, name):
    views, labels = problem(task, k=1)
    fitted = fit_baseline(name, views, labels, task=task)
    expected = special.softmax(views.outputs[:, 0], axis=1) if task == "classification" else views.outputs[:, 0]
    rescaled = ("bma", "nnls", "nnls_t", "class_tta", "aug_or_class_tta", "original_noise", "raykar", "dawid_skene")
    if name not in rescaled:
        np.testing.assert_allclose(point(fitted.predict(views)), expected, atol=1e-12)


@pytest.mark.parametrize("case", ["one label", "equal views", "huge", "constant", "separable", "many views", "single"])
@pytest.mark.parametrize(("task", "name"), ALL)
def test_odd_data_give_finite_predictions(task, name, case):
    generator = np.random.default_rng(0)
    n, k = (1 if case == "one label" else 20), (9 if case == "many views" else 3)
    outputs = generator.normal(size=(n, k, 3 if task == "classification" else 1))
    y = generator.integers(0, 3, n)
    cases: dict[str, np.ndarray] = {
        "equal views": np.repeat(outputs[:, :1], k, axis=1),
        "huge": outputs * 1e4,
        "constant": np.zeros_like(outputs),
        "separable": np.eye(3)[y][:, None] * 50 + outputs
        if task == "classification"
        else outputs * 0 + y[:, None, None],
        "single": outputs.astype(np.float32),
    }
    outputs = cases.get(case, outputs)
    views = ViewPredictions(outputs, names=["identity", *(f"view{i}" for i in range(1, k))])
    prediction = fit_baseline(name, views, y if task == "classification" else y.astype(float), task=task).predict(views)
    assert np.isfinite(point(prediction)).all()
    assert np.isfinite(prediction.log_prob(y)).all()
    if task == "classification":
        np.testing.assert_allclose(prediction.proba.sum(axis=1), 1)


def test_unlabelled_instances_ids_and_classes():
    views, labels = classification()
    named = ViewPredictions(
        views.outputs, names=NAMES, classes=["ant", "bee", "cow"], ids=[f"image{i}" for i in range(60)]
    )
    first = labels.instance < 20
    words = np.array(["ant", "bee", "cow"])[labels.value[first]]
    by_id = LabelSets.from_table([f"image{i}" for i in labels.instance[first]], words)
    fitted = fit_baseline("mixture_mle", named, by_id, task="classification")
    part = fit_baseline("mixture_mle", views.take(np.arange(20)), labels.take(np.arange(20)), task="classification")
    np.testing.assert_allclose(fitted.weights, part.weights)
    assert set(fitted.predict(named).label) <= {"ant", "bee", "cow"}
    other = ViewPredictions(views.outputs, names=NAMES, classes=["ant", "bee", "dog"])
    with pytest.raises(ValueError, match="dog"):
        fitted.predict(other)


def test_the_documentation_defines_every_baseline():
    page = (Path(__file__).resolve().parents[1] / "docs/reference/judging.md").read_text(encoding="utf-8")
    defined = dict(re.findall(r"^\| `(\w+)` \| ([CR ]+) \| \S", page, re.MULTILINE))
    letters = {"classification": "C", "regression": "R"}
    assert defined == {
        name: " ".join(letters[task] for task in BASELINES if name in BASELINES[task])
        for name in (*BASELINES["classification"], *BASELINES["regression"])
    }


def test_errors_say_what_exists():
    views, labels = classification()
    numbers, values = regression()
    with pytest.raises(ValueError, match=r"no classification baseline 'median'; there are original, uniform, .*\+t"):
        fit_baseline("median", views, labels, task="classification")
    with pytest.raises(ValueError, match="no classification baseline 'nnls'"):
        fit_baseline("nnls", views, labels, task="classification")
    with pytest.raises(ValueError, match="no regression baseline 'greedy'; there are original, uniform"):
        fit_baseline("greedy", numbers, values, task="regression")
    with pytest.raises(ValueError, match="a temperature is for classification"):
        fit_baseline("uniform+t", numbers, values, task="regression")
    with pytest.raises(ValueError, match=r"no classification baseline 'uniform\+x'"):
        fit_baseline("uniform+x", views, labels, task="classification")
    with pytest.raises(ValueError, match="task must be one of 'classification', 'regression'"):
        fit_baseline("uniform", views, labels, task="ranking")
    with pytest.raises(ValueError, match="needs a view named 'identity'"):
        fit_baseline("original", views.select(["flip"]), labels, task="classification")
    with pytest.raises(ValueError, match="labels are empty"):
        fit_baseline("uniform", views, LabelSets.from_array(np.full((60, 1), np.nan)), task="classification")
    unnamed = fit_baseline("uniform", ViewPredictions(views.outputs), labels, task="classification")
    with pytest.raises(ValueError, match=r"have 2 unnamed views but 'uniform' was fitted on .; name them"):
        unnamed.predict(ViewPredictions(views.outputs[:, :2]))


@pytest.mark.parametrize(("task", "name"), [("regression", "uniform"), ("classification", "class_tta")])
def test_another_number_of_outputs_is_refused(task, name):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=30) if task == "classification" else rng.normal(size=(30, 1, 3))
    fitted = fit_baseline(name, ViewPredictions(rng.normal(size=(30, 2, 3))), LabelSets.from_array(labels), task=task)
    with pytest.raises(ValueError, match=r"predictions have 2 outputs but .* was fitted on 3"):
        fitted.predict(ViewPredictions(rng.normal(size=(5, 2, 2))))


def test_learning_loss_takes_the_view_that_the_identity_says_is_best() -> None:
    """Inputs that the identity calls positive are seen right by the first view, the others by the second."""
    rng = np.random.default_rng(0)
    truth, identity = rng.normal(size=400), rng.choice([-1.0, 1.0], size=400) + 0.1 * rng.normal(size=400)
    wrong = truth + 3 * rng.normal(size=400)
    first, second = np.where(identity > 0, truth, wrong), np.where(identity > 0, wrong, truth)
    views = ViewPredictions(np.stack([identity, first, second], axis=1)[:, :, None], names=["identity", "one", "two"])
    fitted = fit_baseline("learning_loss", views, truth, task="regression")
    np.testing.assert_allclose(fitted.predict(views).mean[:, 0], truth, atol=1e-9)


def test_rules_that_stop_early_by_hand():
    proba = np.array([[[0.95, 0.05], [0.5, 0.5], [0.5, 0.5]], [[0.6, 0.4], [0.9, 0.1], [0.1, 0.9]]])
    for ends, n_views in (([1, 2, 3], [1, 2]), ([1, 3], [1, 3])):
        options = {"threshold": 0.7, "order": [0, 1, 2], "ends": np.array(ends)}
        assert methods.staged_pool(np.log(proba), **options, count=True).tolist() == n_views
        expected = [proba[0, 0], proba[1, : n_views[1]].mean(axis=0)]
        np.testing.assert_allclose(np.exp(methods.staged_pool(np.log(proba), **options)), expected)


@pytest.mark.parametrize("name", ["adaptta", "selective_tta"])
def test_rules_that_stop_early_are_as_often_right_as_all_views(name):
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=500)
    strength = np.where(rng.random(500) < 0.7, 8.0, 1.0)[:, None, None]
    views = ViewPredictions(
        strength * np.eye(3)[label][:, None] + rng.normal(size=(500, 4, 3)), names=["a", "identity", *"bc"]
    )
    uniform, fitted = (fit_baseline(method, views, label, task="classification") for method in ("uniform", name))
    accuracy = [(method.predict(views).label == label).mean() for method in (uniform, fitted)]
    assert accuracy[1] >= accuracy[0]
    passes = fitted.passes(views)
    assert passes.mean() < 3
    alone = passes == 1
    np.testing.assert_allclose(fitted.predict(views).proba[alone], special.softmax(views.outputs[alone, 1], axis=1))
    assert uniform.passes(views).tolist() == [4] * 500


# -- label noise ----------------------------------------------------------------------------------


def noisy_labels(n: int = 400) -> tuple[ViewPredictions, LabelSets, np.ndarray]:
    """Two good annotators and one who takes class 0 for class 1, always."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=n)
    logits = 2 * np.eye(3)[truth][:, None] + rng.normal(size=(n, 4, 3)) * np.array([1.0, 1.0, 3.0, 3.0])[:, None]
    votes = np.where(rng.random((n, 3)) < 0.15, rng.integers(0, 3, size=(n, 3)), truth[:, None])
    votes[:, 2] = np.where(truth == 0, 1, votes[:, 2])
    views = ViewPredictions(logits, names=["identity", "a", "b", "c"])
    return views, LabelSets.from_array(votes, annotators=["ann", "bob", "cid"]), truth


def votes_of(labels: LabelSets) -> solvers.Votes:
    assert labels.annotator is not None
    return solvers.Votes(labels.instance, labels.value, labels.annotator, labels.count)


def test_the_truth_of_labels_alone_is_that_of_crowd_kit() -> None:
    aggregation = pytest.importorskip("crowdkit.aggregation")
    pandas = pytest.importorskip("pandas")
    _, labels, _ = noisy_labels()
    votes = votes_of(labels)
    table = pandas.DataFrame({"task": votes.row, "worker": votes.annotator, "label": votes.label})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas, about crowd-kit
        expected = aggregation.DawidSkene(n_iter=200, tol=1e-9).fit_predict_proba(table).sort_index()[[0, 1, 2]]
    proba = solvers.dawid_skene(votes, 3)
    np.testing.assert_array_equal(proba.argmax(axis=1), expected.to_numpy().argmax(axis=1))
    assert np.abs(proba - expected.to_numpy()).mean() < 0.02  # the two stop at different steps


def test_an_annotator_who_always_errs_is_seen_through() -> None:
    views, labels, truth = noisy_labels()
    estimate = solvers.dawid_skene(votes_of(labels), 3).argmax(axis=1)
    majority = np.array([np.bincount(labels.value[labels.instance == i], minlength=3).argmax() for i in range(400)])
    assert (estimate == truth).mean() > (majority == truth).mean()
    scores = {
        name: fit_baseline(name, views, labels, task="classification").predict(views).log_prob(truth).mean()
        for name in ("original+t", "original_noise", "raykar", "dawid_skene")
    }
    assert scores["original_noise"] > scores["original+t"]
    assert min(scores["raykar"], scores["dawid_skene"]) > scores["original_noise"]


@pytest.mark.parametrize("name", ["original_noise", "raykar", "dawid_skene"])
def test_noise_aware_baselines_survive_small_samples(name: str) -> None:
    """Twenty inputs and eighteen views can be separated: coefficients without a ridge grow without limit."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 10, size=1020)
    logits = 3 * np.eye(10)[truth][:, None] + rng.normal(size=(1020, 1, 10)) + rng.normal(size=(1020, 18, 10))
    views = ViewPredictions(logits, names=["identity", *(f"view {k}" for k in range(17))])
    votes = np.where(rng.random((20, 3)) < 0.15, rng.integers(0, 10, size=(20, 3)), truth[:20, None])
    train, test = views.take(slice(20)), views.take(slice(20, None))
    labels = LabelSets.from_array(votes, annotators=["ann", "bob", "cid"])
    loss, unaided = (
        -fit_baseline(method, train, labels, task="classification").predict(test).log_prob(truth[20:]).mean()
        for method in (name, "original")
    )
    assert loss < unaided + 0.3  # without a ridge raykar's is above 10


def test_a_ridge_draws_coefficients_to_the_mean_of_the_views() -> None:
    views, _, truth = noisy_labels()
    log_proba, target = special.log_softmax(views.outputs, axis=2), np.eye(3)[truth]
    free, drawn, tied = (solvers.conditional_logit(log_proba, target, ridge)[1] for ridge in (0.0, 100.0, 1e9))
    np.testing.assert_allclose(tied, 0.25, atol=1e-4)
    assert np.abs(drawn - 0.25).max() < np.abs(free - 0.25).max()


def test_the_scale_of_the_student_t_depends_on_the_prediction() -> None:
    rng = np.random.default_rng(0)
    f = rng.normal(size=(4000, 2, 1)) * 3 + 10
    y = f.mean(axis=1)[:, 0] + np.exp(0.2 * (f.mean(axis=1)[:, 0] - 10)) * rng.standard_t(5, size=4000)
    views = ViewPredictions(f, names=["identity", "flip"])
    nnls, student = (fit_baseline(name, views, y, task="regression") for name in ("nnls", "nnls_t"))
    np.testing.assert_array_equal(student.weights, nnls.weights)
    prediction = student.predict(views)
    assert prediction.log_prob(y).mean() > nnls.predict(views).log_prob(y).mean() + 0.1
    x = f.mean(axis=1)[:, 0]
    slope = np.polyfit(x[np.abs(x - 10) < 4], np.log(prediction.scale[:, 0, 0, 0])[np.abs(x - 10) < 4] / 2, 1)[0]
    assert abs(slope - 0.2) < 0.02
    assert abs(float(prediction.dof[0]) - 5) < 1.5
