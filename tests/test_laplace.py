"""Weight intervals of instances that come in groups, and Laplace approximations of pools."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate

from benchmarks.coverage import MODELS, TRUTH, correlated, coverage
from vbtta import CategoricalMixture, LabelSets, Policy, ViewPredictions, fit_policy
from vbtta.inference import laplace


def fitted(name: str, predictions: ViewPredictions, labels: Any) -> Policy:
    task, model = MODELS[name]
    return fit_policy(predictions, labels, task=task, model=model, guard=False)  # type: ignore[arg-type]


def widths(policy: Policy) -> np.ndarray:
    low, high = policy.weight_interval(0.9).T
    return high - low


@pytest.mark.parametrize("name", MODELS)
def test_intervals_of_groups_cover_and_naive_ones_do_not(name: str) -> None:
    share = coverage(name, 25, seed=3)
    assert share["clustered"] >= 0.78
    assert share["naive"] <= 0.6


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_one_instance_change_little(name: str) -> None:
    predictions, labels = correlated(name, np.random.default_rng(0), n_images=800, n_positions=1)
    alone = fitted(name, ViewPredictions(predictions.outputs), labels)
    grouped = fitted(name, predictions, labels)
    np.testing.assert_array_equal(grouped.weights, alone.weights)
    np.testing.assert_allclose(widths(grouped), widths(alone), rtol=0.12)


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_an_instance_are_no_evidence(name: str) -> None:
    predictions, labels = correlated(name, np.random.default_rng(1), n_images=300, n_positions=1)
    rows = np.repeat(np.arange(300), 9)
    copies = predictions.take(rows)
    values = LabelSets.from_array(np.asarray(labels.value)[rows])
    once, copied = fitted(name, predictions, labels), fitted(name, copies, values)
    independent = fitted(name, ViewPredictions(copies.outputs), values)
    np.testing.assert_allclose(widths(copied), widths(once), rtol=0.25)
    assert (widths(independent) < 0.5 * widths(once)).all()


def test_limits_of_a_dropped_view_grow_by_the_design_effect() -> None:
    random = np.random.default_rng(2)
    for name in MODELS:
        predictions, labels = correlated(name, random, n_images=60)
        useless = np.roll(predictions.outputs[:, :1], 20 * 7, axis=0)  # of other images
        outputs = np.concatenate([predictions.outputs, -useless], axis=1)
        grouped = fitted(name, ViewPredictions(outputs, groups=predictions.groups), labels)
        alone = fitted(name, ViewPredictions(outputs), labels)
        limit = grouped.weight_interval(0.9)[3]
        assert limit[0] == 0
        assert alone.weight_interval(0.9)[3, 1] < limit[1] < 0.6


@pytest.mark.parametrize("name", MODELS)
def test_one_group_says_nothing(name: str) -> None:
    predictions, labels = correlated(name, np.random.default_rng(4), n_images=30)
    policy = fitted(name, predictions.with_groups(np.zeros(len(predictions), dtype=int)), labels)
    free = policy.weights > 0
    assert (policy.weight_interval(0.9)[free] == [0, 1]).all()


@pytest.mark.parametrize("name", MODELS)
def test_several_raters(name: str) -> None:
    predictions, labels = correlated(name, np.random.default_rng(5), n_images=40)
    value = np.asarray(labels.value).ravel()
    flips = np.random.default_rng(6).random((len(value), 3)) < 0.1
    noise = 0.3 * np.random.default_rng(6).normal(size=(len(value), 3))
    several = np.abs(value[:, None] - flips) if value.dtype.kind in "iu" else value[:, None] + noise
    people = LabelSets.from_array(several, annotators="columns")
    grouped, alone = (fitted(name, sample, people) for sample in (predictions, ViewPredictions(predictions.outputs)))
    assert (widths(grouped) > 1.5 * widths(alone)).all()
    low, high = grouped.weight_interval(0.99).T
    assert ((low <= TRUTH) & (high >= TRUTH)).all()


def test_intervals_of_class_weights_and_files(tmp_path: Path) -> None:
    predictions, labels = correlated("CategoricalMixture", np.random.default_rng(7))
    model = CategoricalMixture(weights="view_class")
    policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
    assert np.isfinite(policy.weight_interval()).all()
    policy.save(tmp_path / "policy.json")
    np.testing.assert_array_equal(Policy.load(tmp_path / "policy.json").weight_interval(), policy.weight_interval())


def test_the_volume_around_a_mode_at_the_bound_is_an_integral() -> None:
    """One weight at zero, where its energy rises, and a free offset that is independent of it."""
    quadratic, linear = np.diag([3.0, 2.0]), np.array([-1.5, 0.8])
    mode = np.concatenate(laplace.solve(quadratic, linear, 1))
    np.testing.assert_allclose(mode, [0.0, 0.4])
    weight = integrate.quad(lambda v: np.exp(-1.5 * v - 1.5 * v**2), 0, np.inf)[0]
    expected = np.log(weight) + 0.5 * np.log(2 * np.pi / 2.0)
    assert laplace.log_volume(quadratic, linear, mode, 1) == pytest.approx(expected)
