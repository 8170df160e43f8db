"""fit_policy as users meet it: guard, options, odd data, bad input."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from vbtta import (
    EM,
    CategoricalMixture,
    ConvergenceWarning,
    GaussianMixture,
    LabelSets,
    Policy,
    ViewPredictions,
    fit_policy,
)
from vbtta.crossval import CrossValidated
from vbtta.policy import GuardWarning


def test_the_guard_falls_back_where_every_view_hurts() -> None:
    """The calibration folds are few and the views many: their weights are noise, and the identity is perfect."""
    fell_back = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=25)
        f = np.concatenate([truth[:, None] + 0.02 * rng.normal(size=(25, 1)), 3 * rng.normal(size=(25, 14))], axis=1)
        names = ["identity", *(f"bad_{k}" for k in range(14))]
        predictions = ViewPredictions(f[:, :, None], names=names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GuardWarning)
            policy = fit_policy(predictions, truth, task="regression", model="latent", guard="hard")
        assert policy.guard.checked
        if policy.guard.fell_back:
            fell_back += 1
            assert policy.names == tuple(names)
            np.testing.assert_array_equal(policy.weights, np.eye(15)[0])
            assert policy.history.weights.shape[1] == 15
            alone = policy.predict(predictions.select(["identity"]))
            np.testing.assert_array_equal(alone.mean, policy.predict(predictions).mean)
    assert fell_back >= 5


def test_the_guard_warns_when_it_falls_back() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=25)
        f = np.concatenate([truth[:, None] + 0.02 * rng.normal(size=(25, 1)), 3 * rng.normal(size=(25, 14))], axis=1)
        predictions = ViewPredictions(f[:, :, None], names=["identity", *(f"bad_{k}" for k in range(14))])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = fit_policy(predictions, truth, task="regression", model="latent", guard="hard")
        assert any(issubclass(w.category, GuardWarning) for w in caught) == policy.guard.fell_back


def test_the_guard_lets_helpful_views_pass(helpful) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    policy = fit_policy(predictions, y, task="regression")
    assert policy.guard.checked
    assert not policy.guard.fell_back
    assert policy.guard.difference > policy.guard.standard_error
    assert (policy.weights > 0.1).all()


def test_the_guard_says_when_it_is_skipped(helpful) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    unnamed = fit_policy(ViewPredictions(predictions.outputs), y, task="regression")
    assert not unnamed.guard.checked
    assert "identity" in unnamed.guard.reason
    few = fit_policy(predictions.take(slice(0, 4)), y[:4], task="regression")
    assert "fewer than 5" in few.guard.reason
    assert few.member_weights[-1] > 0.9  # the raw network's
    assert fit_policy(predictions, y, task="regression", guard=False).guard.reason == "not asked for"


def test_warnings_and_options(helpful) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    with pytest.warns(ConvergenceWarning, match="did not converge in 3 steps"):
        policy = fit_policy(predictions, y, task="regression", model="mixture", engine=EM(max_steps=3), guard=False)
    assert not policy.converged
    quiet = fit_policy(predictions, y, task="regression", model="mixture", engine=EM(max_steps=3, tol=0), guard=False)
    assert quiet.n_steps == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "classify"}, "task must be one of"),
        ({"model": "mix"}, "model must be"),
        ({"model": CategoricalMixture()}, "not for task='regression'"),
        ({"model": GaussianMixture}, "got the class GaussianMixture"),
        ({"model": GaussianMixture(component="laplace"), "engine": "em"}, "advi"),
        ({"model": GaussianMixture(nu=1.5)}, r"nu must exceed C \+ 1"),
        ({"engine": "gibbs"}, "engine must be"),
        ({"labels": np.full(300, np.nan)}, "at least one instance needs a label"),
        ({"labels": np.zeros(5)}, "labels are for 5 instances"),
        ({"labels": np.array(["a"] * 300)}, "must be numbers"),
        ({"labels": np.zeros((300, 1, 2))}, "2 output"),
    ],
)
def test_wrong_use_is_named(helpful, options, message: str) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    options = {"task": "regression", "labels": y, **options}
    with pytest.raises(ValueError, match=message):
        fit_policy(predictions, options.pop("labels"), **options)


@pytest.mark.parametrize("size", [1e150, 1e-150])
def test_numbers_whose_squares_are_none_are_refused(helpful, size: float) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    with pytest.raises(ValueError, match=r"rescale|squares overflow"):
        fit_policy(ViewPredictions(size * predictions.outputs), size * y, task="regression")


@pytest.mark.parametrize(
    ("shift", "guard", "falls", "warns"),
    [(-0.9, True, False, False), (-1.1, True, False, True), (-0.1, "hard", True, True), (0.1, "hard", False, False)],
)
def test_the_guard_warns_beyond_one_standard_error_and_falls_back_if_asked(
    helpful, monkeypatch: pytest.MonkeyPatch, shift, guard, falls, warns
) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    difference = np.tile([1.0, -1.0], 150) + shift / np.sqrt(300)  # 300 instances: a standard error of 1/sqrt(300)

    def scores(fits, sample, folds, *, progress):  # type: ignore[no-untyped-def]
        return [CrossValidated(held, None, np.zeros(300), np.ones(300)) for held in (difference, np.zeros(300))]

    monkeypatch.setattr("vbtta.crossval.cross_validate", scores)
    model = GaussianMixture(scale="constant")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GuardWarning)
        policy = fit_policy(predictions, y, task="regression", model=model, guard=guard)
    assert policy.guard.fell_back == falls
    assert bool(caught) == warns
    assert policy.guard.probability == pytest.approx(special.ndtr(shift), abs=2e-3)


def test_heteroscedastic_needs_a_variance(helpful) -> None:  # type: ignore[no-untyped-def]
    predictions, y = helpful
    model = GaussianMixture(heteroscedastic=True)
    with pytest.raises(ValueError, match="needs the views' variance"):
        fit_policy(predictions, y, task="regression", model=model)
    with_variance = ViewPredictions(
        predictions.outputs, np.full(predictions.outputs.shape, 0.1), names=predictions.names
    )
    policy = fit_policy(with_variance, y, task="regression", model=model, guard=False)
    with pytest.raises(ValueError, match="predictions need a variance"):
        policy.predict(predictions)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GaussianMixture(link="cubic"), "link must be one of"),  # type: ignore[arg-type]
        (lambda: GaussianMixture(beta=0.0), "beta must be a positive number"),
        (lambda: GaussianMixture(concentration=-1), "concentration must be a positive number"),
        (lambda: GaussianMixture(v=[1.0, np.nan]), "v must be a positive number"),
        (lambda: GaussianMixture(beta="a"), "beta must be a positive number, 1e-300 to 1e300; got 'a'"),  # type: ignore[arg-type]
        (lambda: EM(max_steps=0), "max_steps must be a whole number of at least 1; got 0"),
        (lambda: EM(max_steps=2.5), "max_steps must be a whole number"),  # type: ignore[arg-type]
        (lambda: EM(tol=-1), "tol must be a number between 0 and 1; got -1"),
        (lambda: CategoricalMixture(confusion_prior=(1.0,)), "two numbers"),  # type: ignore[arg-type]
    ],
)
def test_wrong_records_are_named(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("model", ["auto", "mixture", "latent", GaussianMixture(link="shift", noise="annotator")])
@pytest.mark.parametrize(
    "case",
    [
        "single label",
        "constant labels",
        "identical views",
        "perfect views",
        "constant views",
        "zero variance",
        "tiny",
    ],
)
def test_odd_data_give_finite_answers(case: str, model) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    f, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    if case == "single label":
        y = np.where(np.arange(20) == 7, y, np.nan)
    elif case == "constant labels":
        y = np.full(20, 3.0)
    elif case == "identical views":
        f = np.repeat(f[:, :1], 3, axis=1)
    elif case == "perfect views":
        f = np.repeat(y[:, None], 3, axis=1)
    elif case == "constant views":
        f = np.full((20, 3), 2.0)
    elif case == "zero variance":
        f, y = np.zeros((20, 3)), np.zeros(20)
    else:
        f, y = 1e-90 * f, 1e-90 * y
    predictions = ViewPredictions(f[:, :, None], names=["identity", "b", "c"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = fit_policy(predictions, y, task="regression", model=model)
    prediction = policy.predict(predictions)
    bounds = [member.elbo for member in policy.members or [policy]]
    for values in (policy.weights, policy.weight_interval(), bounds, prediction.mean, prediction.variance):
        assert np.isfinite(values).all()
    assert policy.weights.sum() == pytest.approx(1)
    assert np.isfinite(prediction.log_prob(np.nan_to_num(y))).all()
    assert np.isfinite(prediction.quantile(0.9)).all()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mean=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 2)),
        elements=st.one_of(st.floats(-1e3, 1e3), st.just(0.0), st.floats(allow_nan=True, allow_infinity=True)),
    ),
    label=st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3), st.just(float("inf"))), min_size=1, max_size=6),
    model=st.sampled_from(["auto", "mixture", "latent"]),
)
def test_whatever_goes_in_errors_or_finite_numbers_come_out(mean: np.ndarray, label: list[object], model: str) -> None:
    try:
        predictions = ViewPredictions(mean)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            policy = fit_policy(predictions, np.array(label, dtype=object), task="regression", model=model)  # type: ignore[arg-type]
    except ValueError:
        return
    prediction = policy.predict(predictions)
    assert np.isfinite(policy.weights).all()
    assert np.isfinite(prediction.mean).all()
    assert (prediction.variance > 0).all()
    assert np.isfinite(prediction.log_prob(np.zeros(prediction.mean.shape))).all()


def test_few_labels_and_a_single_class_are_cautioned_of():
    views = ViewPredictions(np.random.default_rng(0).normal(size=(12, 2, 3)), names=["identity", "flip"])
    few = fit_policy(views.take(slice(6)), np.arange(6) % 3, task="classification", model="latent")
    assert "only 6 labelled inputs" in few.guard.reason
    alike = fit_policy(views, np.ones(12, dtype=int), task="classification", model="latent")
    assert alike.guard.reason.endswith("all labels are of one class: nothing is known of the others")
    assert "mostly follow" not in alike.guard.reason


def test_an_input_of_absurd_outputs_leaves_a_policy_that_can_be_saved(tmp_path):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=30)
    outputs = truth[:, None] + rng.normal(size=(30, 3))
    outputs[3] = 1e80
    predictions = ViewPredictions(outputs[:, :, None], names=["identity", "a", "b"])
    labels = LabelSets.from_array(truth[:, None] + 0.1 * rng.normal(size=(30, 2)), annotators=["ann", "bob"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = fit_policy(predictions, labels, task="regression")
    assert np.isfinite(policy.guard.standard_error)
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json").guard == policy.guard


def test_numbers_beyond_a_float_are_refused_not_passed_on() -> None:
    """Weights over twelve orders of magnitude and a view without errors: the scale's slope has no maximum."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        truth = np.random.default_rng(seed).integers(0, 3, size=(7, 1)).astype(float)
        labels = LabelSets.from_array(truth[:, None]).with_weights(10 ** rng.uniform(-6, 6, size=7))
        predictions = ViewPredictions(np.repeat(1e8 * truth[:, None], 1 + 2 * (seed % 2), axis=1))
        model = GaussianMixture(weights="input", scale=None)
        try:
            policy = fit_policy(predictions, labels, task="regression", model=model)
        except ValueError as error:
            assert "rescale predictions and labels" in str(error)  # noqa: PT017
        else:
            assert np.isfinite(policy.predict(predictions).variance).all()  # type: ignore[union-attr]


def test_sizes_at_the_limit_of_floats_are_refused_in_words() -> None:
    model = CategoricalMixture(link="probit")
    rng = np.random.default_rng(0)
    outputs = np.stack([np.full((6, 2), 1e99), rng.normal(size=(6, 2))], axis=2)
    views = ViewPredictions(outputs, np.abs(outputs))
    with pytest.raises(ValueError, match="numbers beyond the range of a float came up in the fit") as error:
        fit_policy(views, np.zeros(6, dtype=int), task="classification", model=model, guard=False)
    assert type(error.value) is ValueError
