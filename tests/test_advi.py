"""ADVI: agreement with EM, bounds and evidence, families, fits without labels, bad input."""

import builtins
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, special, stats

from problems import classes_of_a_view, numbers_of_a_view, posed
from vbtta import (
    ADVI,
    EM,
    CategoricalLatent,
    CategoricalMixture,
    ConvergenceWarning,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    OrdinalMixture,
    Policy,
    PyroModel,
    RankingMixture,
    ViewPredictions,
    fit_policy,
)
from vbtta.inference import advi as ascent
from vbtta.inference.advi import Guide, Site, WeightDraws, constrain
from vbtta.models.base import record_from_dict, record_to_dict

torch = pytest.importorskip("torch", reason="ADVI needs the extra advi")
pyro = pytest.importorskip("pyro", reason="ADVI needs the extra advi")

QUICK = ADVI(steps=400, particles=4, learning_rate=0.05)


def pooled(task: str, seed: int = 0, N: int = 250) -> tuple[ViewPredictions, Any]:
    """Labels follow a weighted average of three views, none of them useless; classes carry three labels each."""
    rng = np.random.default_rng(seed)
    share = np.array([0.6, 0.4, 0.25])
    if task == "regression":
        f = rng.normal(size=(N, 1)) + 0.7 * rng.normal(size=(N, 3))
        return ViewPredictions(f[:, :, None]), f @ share + 0.1 + 0.3 * rng.normal(size=N)
    f = 2 * rng.normal(size=(N, 3, 3))
    proba = special.softmax(np.einsum("k,nkc->nc", share, f), axis=1)
    truth = (proba.cumsum(axis=1) < rng.random((N, 1))).sum(axis=1)
    y = np.where(rng.random((N, 3)) > 0.85, rng.integers(3, size=(N, 3)), truth[:, None])
    return ViewPredictions(f), LabelSets.from_array(y, annotators="columns")


# -- the engine ----------------------------------------------------------------------------------


class Normal:
    """A normal density, whose evidence is 1."""

    n_units = 1

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.mean, self.start = rng.normal(size=3), np.zeros(3)
        root = 0.3 * (np.eye(3) + 0.5 * rng.normal(size=(3, 3)))
        self.covariance = root @ root.T
        self._precision = np.linalg.inv(self.covariance)

    def value(self, vectors: np.ndarray) -> np.ndarray:
        residual = vectors - self.mean
        log_det = np.linalg.slogdet(2 * np.pi * self.covariance)[1]
        return -0.5 * np.einsum("md,de,me->m", residual, self._precision, residual) - 0.5 * log_det

    def value_and_gradient(self, vectors: np.ndarray, units: Any = None) -> tuple[np.ndarray, np.ndarray]:
        return self.value(vectors), -(vectors - self.mean) @ self._precision


@pytest.mark.parametrize("bound", ["elbo", "renyi", "iwae"])
def test_a_normal_posterior_is_found_exactly(bound: Any) -> None:
    target = Normal(0)
    engine = ADVI(steps=1000, bound=bound)
    posterior = ascent.ascend_draws(target, engine, 0, 10.0)
    np.testing.assert_allclose(posterior.mean, target.mean, atol=1e-3)
    np.testing.assert_allclose(posterior.factor @ posterior.factor.T, target.covariance, atol=2e-3)
    assert ascent.estimate_bound(target, posterior.mean, posterior.factor, engine, 0)[0] == pytest.approx(0, abs=1e-3)
    assert posterior.converged


def test_one_particle_makes_all_bounds_the_elbo() -> None:
    predictions, y = numbers_of_a_view()
    options: dict[str, Any] = {"task": "regression", "model": GaussianMixture(), "guard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        elbo, *others = (
            fit_policy(predictions, y, engine=ADVI(steps=60, particles=1, bound=bound), **options)
            for bound in ("elbo", "iwae", "renyi")
        )
    for other in others:
        np.testing.assert_allclose(other.history.elbo, elbo.history.elbo, rtol=1e-9)
        assert other.elbo == pytest.approx(elbo.elbo)


def _tiny() -> tuple[ViewPredictions, np.ndarray, GaussianMixture]:
    f = np.array([[0.0, 1.0], [1.0, -0.5], [-1.0, 0.3], [0.5, 1.5]])
    y = np.array([0.2, 0.9, 0.4, 1.4])
    model = GaussianMixture(link="shift", scale="constant", concentration=1.0, v=0.5, beta=1.0)
    return ViewPredictions(f[:, :, None]), y, model


def _tiny_evidence() -> float:
    """The exact evidence of the tiny problem: a sum over all assignments, each view's labels integrated in closed form.

    The common offset t_0 ~ Student-t(2) of scale s is integrated out last. Given it, with labels of residuals r in a
    view, offset t ~ N(t_0, 1/beta), precision l ~ Gamma(nu/2, V/2): one integral over l.
    """
    predictions, y, spec = _tiny()
    problem, _ = posed(predictions, LabelSets.from_array(y), spec, noise="none")
    standard, prior = problem.data.standard, problem.prior
    f, value = standard.apply(predictions.outputs)[:, :, 0], standard.apply(y[:, None])[:, 0]
    gamma = stats.gamma(prior.nu / 2, scale=2 / prior.inverse_scale[0, 0])
    precision = gamma.ppf((np.arange(500) + 0.5) / 500)  # midpoints of equal probability

    def block(residual: np.ndarray) -> float:
        n = len(residual)
        total = prior.beta + n * precision
        square = (residual**2).sum() * precision - (precision * residual.sum()) ** 2 / total
        size = 0.5 * n * np.log(precision / (2 * np.pi)) + 0.5 * np.log(prior.beta / total)
        return float(np.exp(size - 0.5 * square).mean())

    def density(common: float) -> float:
        total = 0.0
        for code in range(2 ** len(y)):
            z = (code >> np.arange(len(y))) & 1
            counts = np.bincount(z, minlength=2)
            weight = np.exp(special.gammaln(counts + 1).sum() - special.gammaln(len(y) + 2))
            total += weight * np.prod([block((value - f[:, k] - common)[z == k]) for k in range(2)])
        return float(total * stats.t(2, scale=prior.common_scale).pdf(common))

    evidence = integrate.quad(density, -np.inf, np.inf, epsrel=1e-5)[0]
    return float(np.log(evidence) - len(y) * np.log(standard.scale[0]))


def test_bounds_tighten_and_stay_below_the_evidence() -> None:
    predictions, y, spec = _tiny()
    evidence = _tiny_evidence()
    options: dict[str, Any] = {"task": "regression", "model": spec, "guard": False}
    em = fit_policy(predictions, y, engine=EM(), **options).elbo
    engines = [
        ADVI(steps=300, learning_rate=0.1),
        ADVI(steps=300, learning_rate=0.1, bound="renyi"),
        ADVI(steps=300, learning_rate=0.1, bound="iwae"),
        ADVI(steps=300, learning_rate=0.1, bound="iwae", particles=64),
    ]
    elbo, renyi, iwae, many = (fit_policy(predictions, y, engine=engine, **options).elbo for engine in engines)
    assert em < evidence
    assert elbo < renyi < iwae < many < evidence + 0.02
    assert many > evidence - 0.1


def test_bounds_for_classes_stay_below_the_evidence() -> None:
    """Without calibration the evidence is a sum over the views that the labels may follow."""
    rng = np.random.default_rng(0)
    f, y = 2 * rng.normal(size=(5, 3, 2)), np.array([0, 1, 1, 0, 1])
    proba = special.softmax(f, axis=2)[np.arange(5), :, y]  # (J, K)
    total = 0.0
    for z in np.ndindex(*(3,) * 5):
        counts = np.bincount(z, minlength=3)
        weight = np.exp(special.gammaln(3) + special.gammaln(counts + 1).sum() - special.gammaln(8))
        total += weight * proba[np.arange(5), list(z)].prod()
    model = CategoricalMixture(concentration=1.0, noise="none", calibrate=False)
    options: dict[str, Any] = {"task": "classification", "model": model, "guard": False}
    em = fit_policy(ViewPredictions(f), y, engine="em", **options)
    advi = fit_policy(ViewPredictions(f), y, engine=ADVI(steps=300, learning_rate=0.05), **options)
    assert em.elbo < np.log(total)
    assert np.log(total) - 0.1 < advi.elbo < np.log(total) + 0.01
    # EM's Q takes the views that labels follow for independent of the weights; ADVI sums them out
    assert em.elbo < advi.elbo


# -- agreement with EM -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "model", "n_labels"),
    [
        ("regression", GaussianMixture(concentration=1.0), 1),
        ("regression", GaussianMixture(concentration=1.0, link="shift", heteroscedastic=True), 1),
        ("regression", GaussianLatent(), 1),
        ("classification", CategoricalMixture(concentration=1.0, noise="none"), 1),
        ("classification", CategoricalMixture(concentration=1.0, noise="none", calibrate=False), 1),
        ("classification", CategoricalMixture(concentration=1.0, noise="confusion"), 3),
        ("classification", CategoricalMixture(concentration=1.0, noise="annotator"), 3),
        ("classification", CategoricalLatent(noise="uniform"), 3),
    ],
)
def test_em_and_advi_agree(task: str, model: Any, n_labels: int, tmp_path: Path) -> None:
    """Mean weights; a pool has no Dirichlet prior, and EM leaves it at its mode, so there no weight may be near zero.

    At zero the two differ by what they are: the mode is at the edge, the mean above it.
    """
    predictions: ViewPredictions
    labels: Any
    if isinstance(model, GaussianLatent | CategoricalLatent):
        predictions, labels = pooled(task)
    elif task == "regression":
        predictions, labels = numbers_of_a_view()
        variance = np.random.default_rng(1).exponential(0.02, size=predictions.outputs.shape)
        predictions = ViewPredictions(predictions.outputs, variance)
    else:
        predictions, labels = classes_of_a_view(n_labels=n_labels, accuracy=0.85 if n_labels > 1 else 1.0)
    advi = fit_policy(predictions, labels, task=task, model=model, engine=QUICK)
    em = fit_policy(predictions, labels, task=task, model=model, engine="em", guard=False)
    np.testing.assert_allclose(advi.weights, em.weights, atol=0.03)
    assert advi.weights.sum() == pytest.approx(1)
    assert advi.converged
    assert not advi.guard.checked
    assert "ADVI" in advi.guard.reason

    interval = advi.weight_interval(0.9)
    assert (interval[:, 0] <= advi.weights).all()
    assert (interval[:, 1] >= advi.weights).all()
    assert advi.history.elbo.shape == (400,)
    assert advi.history.weights.shape == (400, 3)
    np.testing.assert_allclose(advi.history.weights[0], 1 / 3, atol=1e-9)
    plus = sum(value for name, value in advi.elbo_terms.items() if name.startswith("J"))
    minus = sum(value for name, value in advi.elbo_terms.items() if not name.startswith("J"))
    assert plus - minus == pytest.approx(advi.elbo)

    advi.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    prediction, other, reference = (policy.predict(predictions) for policy in (advi, loaded, em))
    value = "mean" if task == "regression" else "proba"
    np.testing.assert_allclose(getattr(prediction, value), getattr(other, value))
    np.testing.assert_allclose(getattr(prediction, value), getattr(reference, value), atol=0.06)
    np.testing.assert_allclose(loaded.weight_interval(0.9), interval)
    assert loaded.engine == QUICK
    kept = loaded.prune(0.2)
    assert kept.weight_interval(0.9).shape == (3, 2)
    kept.predict(predictions)
    drawn = next(value for name, value in kept.draws(5).items() if name in ("weights", "pool"))
    assert drawn.shape == (5, len(kept.used_names))


def test_annotators_of_numbers_agree_with_em() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(size=150)
    f = truth[:, None] + rng.normal(size=(150, 2)) * [0.5, 1.0]
    y = truth[:, None] + [0.3, -0.3] + rng.normal(size=(150, 2)) * [0.2, 0.6]
    predictions, labels = ViewPredictions(f[:, :, None]), LabelSets.from_array(y, annotators="columns")
    model = GaussianMixture(concentration=1.0, noise="annotator")
    engine = ADVI(steps=700, particles=4, learning_rate=0.05)
    advi = fit_policy(predictions, labels, task="regression", model=model, engine=engine, guard=False)
    em = fit_policy(predictions, labels, task="regression", model=model, guard=False)
    np.testing.assert_allclose(advi.weights, em.weights, atol=0.03)
    np.testing.assert_allclose(advi.annotators.bias, em.annotators.bias, atol=0.02)
    np.testing.assert_allclose(advi.annotators.noise, em.annotators.noise, rtol=0.2)
    np.testing.assert_allclose(
        advi.consensus(predictions, labels).mean, em.consensus(predictions, labels).mean, atol=0.15
    )


def test_probit_and_class_weights_run_and_agree_with_em() -> None:
    predictions, labels = classes_of_a_view(N=60)
    engine = ADVI(steps=150, particles=2, learning_rate=0.1)
    model = CategoricalMixture(link="probit", noise="none", concentration=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        advi = fit_policy(predictions, labels, task="classification", model=model, engine=engine)
        by_class = fit_policy(
            predictions,
            labels,
            task="classification",
            model=CategoricalMixture(weights="view_class", noise="none"),
            engine=engine,
        )
    em = fit_policy(predictions, labels, task="classification", model=model, guard=False)
    np.testing.assert_allclose(advi.weights, em.weights, atol=0.1)
    assert by_class.class_weights is not None
    np.testing.assert_allclose(by_class.class_weights.sum(axis=0), 1)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_the_density_is_that_of_labels_one_by_one(n_outputs: int) -> None:
    """Annotators: the closed form equals the joint normal of an instance's labels; gradients equal differences."""
    from problems import random_problem
    from vbtta.inference.unconstrained import UnconstrainedDensity
    from vbtta.models.gaussian_mixture.density import MixtureDensity

    rng = np.random.default_rng(0)
    predictions, labels = random_problem(
        rng, n_instances=6, n_views=2, n_outputs=n_outputs, n_columns=3, gaps=0.2, annotators=True
    )
    problem, first = posed(predictions, labels, GaussianMixture(), noise="annotator")
    density = MixtureDensity(problem, first, "normal")
    flat = UnconstrainedDensity(density)
    u = flat.start + 0.2 * rng.normal(size=(3, len(flat.start)))
    draws = constrain(flat.sites, u)
    values = {name: torch.from_numpy(value) for name, value in draws.items()}
    log_likelihood = density.log_likelihood(values, slice(None)).numpy()

    data = density.tensors
    views, C = density.views(values, slice(None)), n_outputs
    bias = np.einsum("ue,mec->muc", density.basis.numpy(), draws["bias"])
    covariate = np.clip(
        data.mean.numpy().mean(axis=2), -3, 3
    )  # (K, n): the standard deviation is exp(b x) times as large
    for m in range(3):
        total = 0.0
        for i in range(data.mean.shape[1]):
            mine = np.flatnonzero(data.instance.numpy() == i)
            who = data.annotator.numpy()[mine]
            y = data.value.numpy()[mine].ravel()
            noise = np.kron(np.diag(1 / draws["tau"][m, who]), np.eye(C))
            each = []
            for k in range(2):
                factor = views.factor[m, k].numpy()
                covariance = np.exp(2 * draws["scale_slope"][m] * covariate[k, i]) * np.linalg.inv(factor @ factor.T)
                shared = np.kron(np.ones((len(mine), len(mine))), covariance)
                location = views.location[m, k, i].numpy() + bias[m, who]
                each.append(stats.multivariate_normal(location.ravel(), shared + noise).logpdf(y))
            total += special.logsumexp(np.log(draws["weights"][m]) + each)
        assert log_likelihood[m] == pytest.approx(total)

    value, gradient = flat.value_and_gradient(u)
    step = 1e-6 * np.eye(u.shape[1])
    slopes = [(flat.value(u + row) - flat.value(u - row)) / 2e-6 for row in step]
    np.testing.assert_allclose(gradient, np.stack(slopes, axis=1), rtol=1e-4, atol=1e-3)
    parts = [flat.value_and_gradient(u, np.array([i]))[0] for i in range(flat.n_units)]
    np.testing.assert_allclose(np.mean(parts, axis=0), value)  # a batch estimates the whole


def test_transforms_are_torchs() -> None:
    sites = (
        Site("a", "real", (2,)),
        Site("b", "positive", ()),
        Site("c", "unit_interval", (2,)),
        Site("d", "simplex", (2, 4)),
    )
    u = np.random.default_rng(0).normal(size=(5, 2 + 1 + 2 + 6))
    values = constrain(sites, u)
    simplex = torch.distributions.biject_to(torch.distributions.constraints.simplex)
    np.testing.assert_allclose(values["d"], simplex(torch.from_numpy(u[:, 5:].reshape(5, 2, 3))).numpy(), rtol=1e-12)
    np.testing.assert_allclose(values["b"], np.exp(u[:, 2]))
    draws = Guide(sites, u[0], np.eye(11)).draw(6)
    np.testing.assert_allclose(draws["a"].mean(axis=0), u[0, :2])  # the midpoints lie evenly around the mean


def test_draws_of_q_have_its_mean_and_covariance() -> None:
    mean, factor = np.array([1.0, -2.0]), np.array([[0.5, 0.0], [0.8, 0.3]])
    guide = Guide((Site("a", "real", (2,)),), mean, factor)
    draws = guide.draw(20_000)["a"]
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=1e-9)
    np.testing.assert_allclose(np.cov(draws.T), factor @ factor.T, atol=0.02)
    np.testing.assert_allclose(guide.only("a").factor @ guide.only("a").factor.T, factor @ factor.T)


@pytest.mark.parametrize("n_views", [2, 3, 6])
def test_intervals_are_the_quantiles_of_q(n_views: int) -> None:
    """Of logit-normal weights the quantiles are known, for the others many independent draws find them."""
    rng = np.random.default_rng(n_views)
    sites = (Site("weights", "simplex", (n_views,)), Site("theta", "real", (9,)))
    D = n_views + 8
    factor = np.tril(0.05 * rng.normal(size=(D, D)), -1) + np.diag(rng.uniform(0.1, 0.3, size=D))
    guide = Guide(sites, 0.3 * rng.normal(size=D), factor)
    interval = WeightDraws(guide, np.arange(n_views)).weight_interval(0.9)
    edge = guide.mean[0] + factor[0, 0] * special.ndtri([0.05, 0.95])
    exact = special.expit(edge - np.log(n_views - 1))
    np.testing.assert_allclose(interval[0], exact, rtol=1e-3)
    noise = rng.normal(size=(200_000, D))
    many = constrain(sites, guide.mean + noise @ factor.T)["weights"]
    low, high = np.quantile(many, [0.05, 0.95], axis=0)
    np.testing.assert_allclose(np.diff(interval, axis=1)[:, 0], high - low, rtol=0.015)
    only = guide.only("theta")
    np.testing.assert_allclose(only.factor @ only.factor.T, factor[n_views - 1 :] @ factor[n_views - 1 :].T, atol=1e-12)


def test_a_built_in_prior_is_a_pyro_model() -> None:
    from vbtta.inference.unconstrained import UnconstrainedDensity
    from vbtta.models.categorical_mixture.density import CategoricalDensity

    predictions, labels = classes_of_a_view(N=20)
    spec = CategoricalMixture(weights="view_class", noise="none")
    density = CategoricalDensity(posed(predictions, labels, spec, noise="none")[0])
    flat = UnconstrainedDensity(density)
    u = flat.start[None]
    values = {name: torch.as_tensor(value[0]) for name, value in constrain(flat.sites, u).items()}
    trace = pyro.poutine.trace(pyro.poutine.condition(lambda: density.prior(pyro.sample), data=values)).get_trace()
    volume = 0.0
    for site in flat.sites:
        transform = torch.distributions.biject_to(getattr(torch.distributions.constraints, site.kind))
        free = torch.from_numpy(u[0, flat.slices[site.name]].reshape(site.unconstrained_shape))
        if site.kind != "real":
            volume += float(transform.log_abs_det_jacobian(free, values[site.name]).sum())
    likelihood = density.log_likelihood({name: value[None] for name, value in values.items()}, slice(None))
    assert flat.value(u)[0] == pytest.approx(float(trace.log_prob_sum() + likelihood[0]) + volume)


# -- other components and models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_spare", "tail", "least", "engine"),
    [
        (0, np.inf, 0.03, ADVI(steps=500, particles=2, learning_rate=0.05)),
        (0, np.inf, 0.03, EM()),
        (0, 1.5, 0.03, EM()),
        (1, np.inf, -0.01, EM()),
        (1, 1.5, 0.03, EM()),
    ],
    ids=["ADVI", "all views used", "strays of any size", "a spare view", "a spare view, strays of any size"],
)
def test_student_t_pays_on_contaminated_labels(n_spare: int, tail: float, least: float, engine: ADVI | EM) -> None:
    """One label in ten strays, by normal or by heavier-tailed amounts.

    A view that explains nothing becomes the wide component that normal strays need: the normal mixture is then the
    true model, heavy-tailed by itself, and a tie is all to ask for.
    """
    assert _gain(n_spare, tail, 0.1, engine) > least


@pytest.mark.parametrize("n_spare", [0, 1])
def test_student_t_costs_nothing_on_clean_labels(n_spare: int) -> None:
    assert abs(_gain(n_spare, np.inf, 0.0, EM())) < 0.01


def _gain(n_spare: int, tail: float, share: float, engine: ADVI | EM) -> float:
    """Held-out log density a label, Student-t minus normal."""

    def data(seed: int) -> tuple[ViewPredictions, np.ndarray]:
        rng = np.random.default_rng(seed)
        f = rng.normal(size=(300, 2 + n_spare))
        y = f[np.arange(300), rng.choice(2, size=300)] + 0.3 * rng.normal(size=300)
        width = np.sqrt(tail / rng.chisquare(tail, size=300)) if np.isfinite(tail) else np.ones(300)
        return ViewPredictions(f[:, :, None]), y + (rng.random(300) < share) * 4 * width * rng.normal(size=300)

    (predictions, y), (held, held_y) = data(0), data(1)
    scores = {}
    for component in ("student_t", "normal"):
        model = GaussianMixture(component=component, noise="none")  # type: ignore[arg-type]
        policy = fit_policy(predictions, y, task="regression", model=model, engine=engine, guard=False)
        scores[component] = float(policy.predict(held).log_prob(held_y).mean())
    return scores["student_t"] - scores["normal"]


def test_a_laplace_component_predicts_a_laplace() -> None:
    rng = np.random.default_rng(0)
    f = rng.normal(size=800)
    y = f + rng.laplace(scale=0.5, size=800)
    predictions = ViewPredictions(f[:, None, None])
    policies = {
        component: fit_policy(
            predictions, y, task="regression", model=GaussianMixture(component=component, link="shift"), engine=QUICK
        )
        for component in ("laplace", "normal")
    }
    prediction = policies["laplace"].predict(predictions)
    np.testing.assert_allclose(prediction.variance.mean(), 0.5, rtol=0.15)
    centre, size = prediction.mean[0, 0], np.sqrt(prediction.variance[0, 0] / 2)
    points = centre + size * np.array([-3.0, -0.5, 0.3, 2.0])
    log_density = [prediction.log_prob(np.full(800, point))[0] for point in points]
    np.testing.assert_allclose(log_density, stats.laplace(centre, size).logpdf(points), atol=0.01)
    assert prediction.log_prob(y).mean() > policies["normal"].predict(predictions).log_prob(y).mean()
    labels = np.stack([y, y + 0.1], axis=1)
    assert np.isfinite(policies["laplace"].consensus(predictions, labels).mean).all()


def test_weights_without_labels_leave_out_views_that_are_unsure_or_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    N, C = 300, 4
    truth = rng.integers(C, size=N)
    good = 3 * np.eye(C)[truth][:, None] + rng.normal(size=(N, 3, C))
    alone = 6 * np.eye(C)[rng.integers(C, size=N)][:, None]
    unsure = 0.1 * rng.normal(size=(N, 1, C))
    predictions = ViewPredictions(np.concatenate([good, alone, unsure], axis=1))
    policy = fit_policy(predictions, None, task="classification", engine=ADVI(steps=300, learning_rate=0.05))
    assert policy.unsupervised
    assert "unsupervised" in repr(policy)
    assert "unsupervised" in policy.guard.reason
    assert policy.weights[:3].min() > policy.weights[3:].max()
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    assert loaded.unsupervised
    uniform = special.softmax(predictions.outputs, axis=2).mean(axis=1)[np.arange(N), truth]
    assert loaded.predict(predictions).log_prob(truth).mean() > np.log(uniform).mean()
    for options in ({"task": "regression"}, {"engine": "em"}, {"model": "latent"}):
        with pytest.raises(ValueError, match="labels=None"):
            fit_policy(predictions, None, **{"task": "classification", **options})  # type: ignore[arg-type]


# -- running ------------------------------------------------------------------------------------------


def test_runs_repeat_and_seeds_matter() -> None:
    predictions, y = numbers_of_a_view(N=60)
    options: dict[str, Any] = {
        "task": "regression",
        "model": GaussianMixture(),
        "engine": ADVI(steps=40, batch_size=20),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        policy, same, other = (fit_policy(predictions, y, seed=seed, **options) for seed in (0, 0, 1))
    np.testing.assert_array_equal(policy.history.elbo, same.history.elbo)
    np.testing.assert_array_equal(policy.weights, same.weights)
    assert not np.array_equal(policy.history.elbo, other.history.elbo)


def test_minibatches_find_the_same_weights() -> None:
    predictions, y = numbers_of_a_view(N=600)
    options: dict[str, Any] = {"task": "regression", "model": GaussianMixture()}
    whole = fit_policy(predictions, y, engine=QUICK, **options)
    part = fit_policy(
        predictions, y, engine=ADVI(steps=1000, particles=4, batch_size=100, learning_rate=0.05), **options
    )
    np.testing.assert_allclose(part.weights, whole.weights, atol=0.04)


def test_states_are_kept_on_request() -> None:
    predictions, y = numbers_of_a_view(N=60)
    with pytest.warns(ConvergenceWarning, match="ADVI"):
        policy = fit_policy(
            predictions, y, task="regression", model=GaussianMixture(), engine=ADVI(steps=5, keep_states=True)
        )
    np.testing.assert_allclose(policy.at_step(1).weights, 1 / 3, atol=0.01)
    assert policy.at_step(3).n_steps == 3


@pytest.mark.parametrize(
    "engine", [ADVI(steps=300, learning_rate=1e-7), ADVI(steps=20), ADVI(steps=300, learning_rate=1e-7, bound="iwae")]
)
def test_a_run_that_did_not_get_anywhere_has_not_converged(engine: ADVI) -> None:
    predictions, y = numbers_of_a_view(N=300)
    with pytest.warns(ConvergenceWarning, match="learning_rate"):
        policy = fit_policy(predictions, y, task="regression", model="mixture", engine=engine)
    assert not policy.converged


def test_large_data_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vbtta.inference import unconstrained as densities
    from vbtta.models.gaussian_mixture.density import MixtureDensity

    predictions, y = numbers_of_a_view(N=50)
    problem, first = posed(predictions, LabelSets.from_array(y), GaussianMixture(), noise="none")
    flat = densities.UnconstrainedDensity(MixtureDensity(problem, first, "student_t"))
    u = flat.start + 0.1 * np.random.default_rng(0).normal(size=(2, len(flat.start)))
    whole, rows = flat.value_and_gradient(u), np.arange(0, 50, 3)
    batch = flat.value_and_gradient(u, rows)
    monkeypatch.setattr(densities, "CHUNK_ENTRIES", 50)
    for result, other in ((flat.value_and_gradient(u), whole), (flat.value_and_gradient(u, rows), batch)):
        np.testing.assert_allclose(result[0], other[0])
        np.testing.assert_allclose(result[1], other[1], atol=1e-9)


# -- bad input ----------------------------------------------------------------------------------------


def test_a_diverging_run_is_retried_once_and_then_reported() -> None:
    class Cliff(Normal):
        def value_and_gradient(self, vectors: np.ndarray, units: Any = None) -> tuple[np.ndarray, np.ndarray]:
            if np.abs(vectors).max() > 8:
                return np.full(len(vectors), np.nan), np.zeros_like(vectors)
            return super().value_and_gradient(vectors, units)

    target = Cliff(0)
    assert np.isfinite(ascent.ascend_draws(target, ADVI(steps=200, learning_rate=2.0), 0, 10.0).mean).all()
    with pytest.raises(ascent.DivergenceError, match=r"learning_rate=1000, .* try a smaller"):
        ascent.ascend_draws(target, ADVI(steps=200, learning_rate=1000.0), 0, 10.0)


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("regression", GaussianMixture()),
        ("regression", GaussianMixture(noise="annotator")),  # of two outputs, where matrices cannot be factored
        ("classification", CategoricalMixture(link="probit", noise="none")),
    ],
)
def test_steps_that_are_far_too_long_are_named(task: str, model: Any) -> None:
    rng = np.random.default_rng(0)
    f = rng.normal(size=(30, 2, 2))
    labels = LabelSets.from_array(rng.integers(2, size=30))
    if task == "regression":
        labels = LabelSets.from_array(f[:, :1] + 0.1 * rng.normal(size=(30, 2, 2)), annotators="columns")
    engine = ADVI(steps=60, learning_rate=1e5)
    with pytest.raises(RuntimeError, match="try a smaller"):
        fit_policy(ViewPredictions(f), labels, task=task, model=model, engine=engine)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ADVI(bound="evidence"), "bound"),  # type: ignore[arg-type]
        (lambda: ADVI(alpha=0.5), "alpha"),
        (lambda: ADVI(bound="renyi", alpha=2.0), "alpha"),
        (lambda: ADVI(particles=0), "particles"),
        (lambda: ADVI(batch_size=0), "batch_size"),
        (lambda: ADVI(learning_rate=-1.0), "learning_rate"),
        (lambda: OrdinalMixture(levels=[1]), "levels"),
        (lambda: PyroModel(3), "function"),  # type: ignore[arg-type]
        (lambda: PyroModel(lambda predictions: None), r"\(predictions, labels, prior\)"),  # type: ignore[arg-type,misc]
        (lambda: PyroModel(lambda p, y, prior: None, GaussianMixture(component="laplace")), "component='laplace'"),
        (lambda: PyroModel(lambda p, y, prior: None, CategoricalMixture(noise="confusion")), "noise='confusion'"),
        (lambda: LabelSets.from_rankings([[0, 0]]), "twice"),
        (lambda: LabelSets.from_rankings([[-1, 0]]), "positions"),
        (lambda: LabelSets.from_array([1.0]).rankings(2), "from_rankings"),
        (lambda: LabelSets.from_rankings([[0, 5]]).rankings(3), "item 5"),
    ],
)
def test_wrong_use_is_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("options", [{"link": "probit"}, {"noise": "confusion"}, {"weights": "view_class"}])
def test_what_cannot_be_learned_without_labels_is_refused(options: dict[str, Any]) -> None:
    predictions, _ = classes_of_a_view(N=20)
    with pytest.raises(ValueError, match=f"labels=None cannot fit {next(iter(options))}="):
        fit_policy(predictions, None, task="classification", model=CategoricalMixture(**options))


def test_without_labels_some_input_is_needed() -> None:
    with pytest.raises(ValueError, match="predictions are empty"):
        fit_policy(ViewPredictions(np.empty((0, 2, 3))), None, task="classification")


def test_heavy_tails_with_annotators_are_refused() -> None:
    predictions, y = numbers_of_a_view(N=30)
    labels = LabelSets.from_array(np.stack([y, y], axis=1), annotators="columns")
    model = GaussianMixture(component="student_t", noise="annotator")
    with pytest.raises(ValueError, match="PyroModel"):
        fit_policy(predictions, labels, task="regression", model=model)


@pytest.mark.parametrize("spec", [ADVI(bound="renyi", alpha=0.3), OrdinalMixture(levels=("a", "b")), RankingMixture()])
def test_records_come_back(spec: Any) -> None:
    assert record_from_dict(record_to_dict(spec)) == spec


def test_a_missing_extra_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions, y = numbers_of_a_view(N=30)
    real = builtins.__import__

    def gone(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == "pyro":
            raise ModuleNotFoundError("no pyro", name="pyro")
        return real(name, *rest, **options)

    for name in [name for name in sys.modules if name.split(".")[0] == "pyro"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib, "import_module", lambda name: gone(name))
    monkeypatch.setattr("vbtta._support.checks.import_module", lambda name: gone(name))
    with pytest.raises(ImportError, match=r'pip install "vbtta\[advi\]"'):
        fit_policy(predictions, y, task="regression", model="mixture", engine="advi")


@pytest.mark.filterwarnings("ignore::vbtta.ConvergenceWarning")
def test_a_caller_without_gradients_may_fit() -> None:
    predictions, y = numbers_of_a_view(N=60)
    plain = fit_policy(predictions, y, task="regression", model="mixture", engine=ADVI(steps=5), guard=False)
    with torch.inference_mode():
        within = fit_policy(predictions, y, task="regression", model="mixture", engine=ADVI(steps=5), guard=False)
    np.testing.assert_array_equal(within.weights, plain.weights)


def test_a_view_without_labels_does_not_decide_the_variance() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=300)
    predictions = ViewPredictions((truth[:, None] + rng.normal(size=(300, 3)) * [0.1, 0.15, 0.3])[:, :, None])
    policy = fit_policy(predictions, truth, task="regression", model="mixture", engine=QUICK)
    assert np.sqrt(policy.predict(predictions).variance.mean()) < 0.15
    module = fit_policy(predictions, truth, task="regression", model="mixture", guard=False)
    np.testing.assert_allclose(policy.predict(predictions).mean, module.predict(predictions).mean, atol=0.05)


@pytest.mark.parametrize("noise", [1e-6, 1e-3])
def test_a_bound_that_is_far_down_has_not_converged(noise: float) -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=150)
    views = truth[:, None] + noise * rng.normal(size=(150, 3))
    with pytest.warns(ConvergenceWarning):
        fit_policy(
            ViewPredictions(views[:, :, None]),
            truth,
            task="regression",
            model=GaussianMixture(concentration=1.0),
            engine=ADVI(steps=100, particles=4, learning_rate=0.05),
        )
