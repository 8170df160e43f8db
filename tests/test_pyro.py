"""Pyro models of your own: equal to built-in ones where they say the same, names, plates, and what is refused."""

import functools
import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from problems import classes_of_a_view, numbers_of_a_view
from vbtta import ADVI, CategoricalMixture, ConvergenceWarning, LabelSets, Policy, PyroModel, fit_policy

torch = pytest.importorskip("torch", reason="ADVI needs the extra advi")
pyro = pytest.importorskip("pyro", reason="ADVI needs the extra advi")


def test_a_users_own_model(tmp_path: Path) -> None:
    """The example runs, and blames the careless annotator instead of a view."""
    path = Path(__file__).parents[1] / "examples" / "own_pyro_model.py"
    script = runpy.run_path(str(path))
    robust, plain = script["robust"], script["plain"]
    assert robust.weights[2] < 0.03 < plain.weights[2]
    assert script["tail"]["careless"] < 3 < script["tail"]["careful"]
    robust.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    assert "heavy_tailed_annotators" in str(loaded.model.function)  # type: ignore[attr-defined, union-attr]
    np.testing.assert_allclose(loaded.predict(script["predictions"]).mean, robust.predict(script["predictions"]).mean)
    with pytest.raises(ValueError, match="by its name only"):
        fit_policy(script["predictions"], script["labels"], task="regression", model=loaded.model)


def test_own_models_equal_built_in_ones_where_they_say_the_same() -> None:
    predictions, labels = classes_of_a_view(N=40)

    def same(predictions: Any, labels: Any, prior: Any) -> None:
        views = prior.sample(predictions)
        mixed = torch.logsumexp(views.log_weights[:, None] + views.log_proba, dim=1)  # (n, C)
        pyro.factor("labels", (labels.count * mixed[labels.instance, labels.value]).sum())

    engine = ADVI(steps=30, particles=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        own = fit_policy(predictions, labels, task="classification", model=same, engine=engine)
        built_in = fit_policy(
            predictions, labels, task="classification", model=CategoricalMixture(noise="none"), engine=engine
        )
        batch = ADVI(steps=30, particles=2, batch_size=10)
        part = fit_policy(predictions, labels, task="classification", model=PyroModel(same), engine=batch)
    np.testing.assert_allclose(own.history.elbo, built_in.history.elbo, rtol=1e-9)
    np.testing.assert_allclose(own.weights, built_in.weights, rtol=1e-6)
    assert np.isfinite(part.elbo)


def test_own_models_may_use_plates_and_any_names() -> None:
    """A plate is no parameter, and `tau`, `bias` or `pool` are not taken for those of a built-in model."""
    predictions, y = numbers_of_a_view(N=30)
    labels = LabelSets.from_array(np.stack([y, y + 0.1], axis=1), annotators="columns")

    def mixed(views: Any, labels: Any, width: Any) -> Any:
        scale = torch.sqrt(views.scale[labels.instance] ** 2 + width[labels.annotator, None, None] ** 2)
        each = pyro.distributions.Normal(views.location[labels.instance], scale).log_prob(labels.value[:, None])
        return labels.count * torch.logsumexp(views.log_weights + each.sum(dim=-1), dim=-1)

    def with_plates(predictions: Any, labels: Any, prior: Any) -> None:
        views = prior.sample(predictions)
        with pyro.plate("annotators", labels.n_annotators):
            width = pyro.sample("tau", pyro.distributions.HalfNormal(torch.ones((), dtype=torch.float64)))
        with pyro.plate("labels", len(labels.value)):
            pyro.factor("likelihood", mixed(views, labels, width))

    def without(predictions: Any, labels: Any, prior: Any) -> None:
        views, unit_scale = prior.sample(predictions), torch.ones(labels.n_annotators, dtype=torch.float64)
        width = pyro.sample("pool", pyro.distributions.HalfNormal(unit_scale).to_event(1))
        pyro.factor("likelihood", mixed(views, labels, width).sum())

    engine = ADVI(steps=20, particles=2, batch_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        policy, other = (
            fit_policy(predictions, labels, task="regression", model=model, engine=engine)
            for model in (with_plates, without)
        )
    names = ["chi_squared", "common", "deviation", "scale_slope", "tau", "weights"]
    assert sorted(policy.posterior.draws(3)) == names  # type: ignore[attr-defined]
    np.testing.assert_allclose(policy.history.elbo, other.history.elbo)
    np.testing.assert_allclose(policy.weight_interval(0.9), other.weight_interval(0.9))
    assert other.weights.shape == (3,)


def test_own_models_that_say_too_little_are_refused() -> None:
    predictions, y = numbers_of_a_view(N=20)

    def without_views(predictions: Any, labels: Any, prior: Any) -> None:
        pyro.factor("labels", labels.value.sum())

    def without_labels(predictions: Any, labels: Any, prior: Any) -> None:
        prior.sample(predictions)

    def odd_support(predictions: Any, labels: Any, prior: Any) -> None:
        prior.sample(predictions)
        pyro.sample("x", pyro.distributions.Uniform(2.0, 3.0))
        pyro.factor("labels", labels.value.sum())

    def truth_of_each(predictions: Any, labels: Any, prior: Any) -> None:
        location = prior.sample(predictions).location[:, 0, 0]
        truth = pyro.sample("truth", pyro.distributions.Normal(location, 1.0).to_event(1))
        pyro.factor("labels", -((labels.value[:, 0] - truth[labels.instance]) ** 2).sum())

    def reserved(predictions: Any, labels: Any, prior: Any) -> None:
        prior.sample(predictions)
        pyro.sample("class_weights", pyro.distributions.Normal(0.0, 1.0))
        pyro.factor("labels", labels.value.sum())

    def twice(predictions: Any, labels: Any, prior: Any) -> None:
        prior.sample(predictions)
        prior.sample(predictions)
        pyro.factor("labels", labels.value.sum())

    for model, message in (
        (without_views, "prior.sample"),
        (twice, "two sites of one name .*weights"),
        (without_labels, "pyro.factor"),
        (odd_support, "'x'"),
        (truth_of_each, "shapes depend on the number of inputs"),
        (reserved, "rename"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_policy(predictions, y, task="regression", model=model)
    with pytest.raises(ValueError, match="closed form"):
        fit_policy(predictions, y, task="regression", model=without_labels, engine="em")


@pytest.mark.filterwarnings("ignore::vbtta.ConvergenceWarning")
def test_any_callable_is_a_model_and_is_saved_by_name(tmp_path: Path) -> None:
    predictions, y = numbers_of_a_view(N=20)

    def model(extra: float, predictions: Any, labels: Any, prior: Any) -> None:
        views = prior.sample(predictions)
        gap = labels.value[:, None] - views.location[labels.instance]
        each = pyro.distributions.Normal(0.0, views.scale[labels.instance] + extra).log_prob(gap)
        pyro.factor("labels", torch.logsumexp(views.log_weights + each.sum(dim=-1), dim=-1).sum())

    engine = ADVI(steps=5.0, particles=2.0)  # type: ignore[arg-type]
    policy = fit_policy(predictions, y, task="regression", model=functools.partial(model, 0.1), engine=engine)
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json").model.function == "functools:partial"  # type: ignore[attr-defined, union-attr]
