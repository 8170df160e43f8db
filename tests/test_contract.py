"""What every model promises, whatever its folder: one table of cases, driven through the public functions.

The bound of EM never falls; bounds lie below the evidence; permuted views permute weights; counts equal repeats; one
view is the predictor itself; a saved policy predicts the same to the last bit; batches and blocks do not matter;
TTAModule equals Policy.predict.
"""

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from golden import NAMES, class_data, laplace_labels, level_data, mixed_classes, number_data, ranking_data
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
    collect_views,
    fit_policy,
)
from vbtta.inference.em import ascend
from vbtta.models.base import InMemory, pose
from vbtta.models.parts import annotators

torch = pytest.importorskip("torch", reason="ADVI and TTAModule need torch")
pytest.importorskip("pyro", reason="ADVI needs the extra advi")

CLIMB = EM(tol=1e-11, max_steps=3000)
DRIFT = ADVI(steps=120, particles=2, learning_rate=0.1)
FEW_STEPS = {"max_steps": 6}, {"steps": 8}  # of EM and ADVI, where equal steps must give equal answers

# Names that differ between versions, and constants that no public argument reaches: here and nowhere else.
SMALL_BLOCKS = (
    ("vbtta.inference.em", "_LONGEST", 1),  # then 64 inputs a block
    ("vbtta.models.parts.standard", "_MOST_KEPT", 1),  # then blocks are laid out in every pass
    ("vbtta.models.parts.class_data", "_ENTRIES", 200),
    ("vbtta.inference.unconstrained", "CHUNK_ENTRIES", 500),
)


def outputs_of(predictions: ViewPredictions) -> np.ndarray:
    """The (N, K, C) array."""
    return np.asarray(getattr(predictions, "outputs" if hasattr(predictions, "outputs") else "mean"))


def chosen(predictions: ViewPredictions, rows: Any = slice(None), views: Any = slice(None)) -> ViewPredictions:
    """Some rows and views, in the order given."""
    variance = predictions.variance
    return ViewPredictions(
        outputs_of(predictions)[rows][:, views],
        None if variance is None else variance[rows][:, views],
        names=list(np.array(predictions.names)[views]),
    )


# -- cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A model, an engine and data that suit them."""

    name: str
    task: str
    model: Any
    data: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    engine: Any = CLIMB

    def fit(self, predictions: ViewPredictions, labels: LabelSets, **changes: Any) -> Policy:
        """The policy; short runs may end on the way."""
        options = {"task": self.task, "model": self.model, "engine": self.engine, "guard": False, **changes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return fit_policy(predictions, labels, **options)

    @property
    def few_steps(self) -> Any:
        """The engine with so few steps that it does not converge."""
        few_of_em, few_of_advi = FEW_STEPS
        return replace(self.engine, **(few_of_advi if isinstance(self.engine, ADVI) else few_of_em))

    def problem(self, **changes: Any) -> tuple[ViewPredictions, LabelSets]:
        """Predictions and labels."""
        predictions, labels = self.data(**{"seed": 5, "n": 40, **self.options, **changes})
        return predictions, labels


def _numbers(name: str, model: Any, engine: Any = CLIMB, **options: Any) -> Case:
    return Case(name, "regression", model, number_data, options, engine)


def _classes(name: str, model: Any, engine: Any = CLIMB, **options: Any) -> Case:
    return Case(name, "classification", model, class_data, options, engine)


def _probit(utility: np.ndarray) -> np.ndarray:
    """Probability of every class (..., C) to have the largest of independent utilities of unit variance."""
    if utility.shape[-1] == 2:
        first = special.ndtr((utility[..., 0] - utility[..., 1]) / np.sqrt(2))
        return np.stack([first, 1 - first], axis=-1)
    z = np.linspace(-9, 9, 401)  # deviations of the largest
    behind = special.ndtr(utility[..., :, None, None] + z[:, None] - utility[..., None, None, :])  # (..., C, Z, C)
    others = behind.prod(axis=-1) / special.ndtr(z)  # without the class itself
    return np.asarray((others * stats.norm.pdf(z)).sum(axis=-1) * (z[1] - z[0]))


ACCURACIES = {"uniform": (1, (19.0, 0.5)), "annotator": (2, (8.0, 2.0))}  # number of them, and counts of their prior
NOISES = {"none": {}, "uniform": {"labels": 3}, "annotator": {"labels": 3}, "confusion": {"labels": 3}}
LINKS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {  # options of data; class probabilities
    "softmax": ({}, partial(special.softmax, axis=-1)),
    "probit": ({"n": 16}, _probit),
}
pooled_numbers, pooled_classes = partial(_numbers, pooled=True), partial(_classes, pooled=True)

EM_CASES = (
    _numbers("gaussian mixture, affine", GaussianMixture(noise="none")),
    _numbers("gaussian mixture, shift, two outputs", GaussianMixture(noise="none", link="shift"), outputs=2),
    _numbers("gaussian mixture, affine, two outputs", GaussianMixture(noise="none"), outputs=2),
    _numbers("gaussian mixture, concentration", GaussianMixture(noise="none", concentration=1.5)),
    _numbers("gaussian mixture, heteroscedastic", GaussianMixture(noise="none", heteroscedastic=True), variance=True),
    _numbers(
        "gaussian mixture, scale by prediction, two outputs",
        GaussianMixture(noise="none", scale="prediction", heteroscedastic=True),
        outputs=2,
        variance=True,
    ),
    _numbers("gaussian mixture, constant scale", GaussianMixture(noise="none", scale="constant")),
    _numbers("gaussian mixture, annotator", GaussianMixture(noise="annotator"), labels=3),
    _numbers(
        "gaussian mixture, shift, annotator, two outputs",
        GaussianMixture(noise="annotator", link="shift"),
        labels=3,
        outputs=2,
    ),
    pooled_numbers("gaussian latent", GaussianLatent(noise="none")),
    pooled_numbers("gaussian latent, annotator, two outputs", GaussianLatent(noise="annotator"), labels=3, outputs=2),
    *(
        _classes(f"categorical mixture, {link}, {noise}", CategoricalMixture(link=link, noise=noise), **size, **sets)  # type: ignore[arg-type]
        for link, (size, _) in LINKS.items()
        for noise, sets in NOISES.items()
    ),
    _classes("categorical mixture, class weights", CategoricalMixture(weights="view_class", noise="none")),
    _classes(
        "categorical mixture, class weights, confusion",
        CategoricalMixture(weights="view_class", noise="confusion"),
        labels=3,
    ),
    *(
        _classes(
            f"categorical mixture, {noise}, no difficulty", CategoricalMixture(noise=noise, difficulty=False), labels=3
        )
        for noise in ("annotator", "confusion")
    ),
    _numbers("gaussian mixture, input weights", GaussianMixture(noise="none", weights="input")),
    _numbers(
        "gaussian mixture, own input weights, two outputs",
        GaussianMixture(noise="none", weights="input", features="own"),
        outputs=2,
    ),
    _numbers(
        "gaussian mixture, input weights, annotator", GaussianMixture(noise="annotator", weights="input"), labels=3
    ),
    *(
        _classes(
            f"categorical mixture, input weights, {noise}", CategoricalMixture(weights="input", noise=noise), **sets
        )  # type: ignore[arg-type]
        for noise, sets in NOISES.items()
    ),
    _classes(
        "categorical mixture, probit, own input weights",
        CategoricalMixture(link="probit", weights="input", noise="none", features="own"),
        n=16,
    ),
    _classes("categorical mixture, uncalibrated", CategoricalMixture(noise="none", calibrate=False)),
    _classes("categorical mixture, concentration", CategoricalMixture(noise="none", concentration=1.5)),
    *(
        _classes(
            f"categorical mixture, {link}, no offsets", CategoricalMixture(link=link, noise="none", offset_scale=0), **n
        )
        for link, (n, _) in LINKS.items()
    ),
    *(
        pooled_classes(
            f"categorical latent, {link}, no offsets",
            CategoricalLatent(link=link, noise="uniform", offset_scale=0, shrinkage=2.0),
            **size,
        )
        for link, (size, _) in LINKS.items()
    ),
    *(
        pooled_classes(
            f"categorical latent, {link}, {noise}",
            CategoricalLatent(link=link, noise=noise, shrinkage=2.0),
            **size,
            **sets,
        )
        for link, (size, _) in LINKS.items()
        for noise, sets in NOISES.items()
    ),
)
ADVI_CASES = (
    _numbers("gaussian mixture, ADVI", GaussianMixture(noise="none", v=0.05), DRIFT),
    _numbers("gaussian mixture, constant scale, ADVI", GaussianMixture(noise="none", scale="constant"), DRIFT),
    _numbers("gaussian mixture, annotator, ADVI", GaussianMixture(noise="annotator", v=0.05), DRIFT, labels=3),
    _numbers("gaussian mixture, Student t", GaussianMixture(component="student_t", noise="none")),
    _numbers("gaussian mixture, Student t, ADVI", GaussianMixture(component="student_t", noise="none"), DRIFT),
    _numbers(
        "gaussian mixture, Laplace, shift, ADVI",
        GaussianMixture(component="laplace", noise="none", link="shift", v=0.05),
        DRIFT,
    ),
    _numbers(
        "gaussian mixture, heteroscedastic, ADVI",
        GaussianMixture(heteroscedastic=True, noise="none", v=0.05),
        DRIFT,
        variance=True,
    ),
    pooled_numbers("gaussian latent, ADVI", GaussianLatent(noise="none", shrinkage=2.0), DRIFT),
    pooled_numbers(
        "gaussian latent, annotator, two outputs, ADVI",
        GaussianLatent(noise="annotator", shrinkage=2.0),
        DRIFT,
        labels=3,
        outputs=2,
    ),
    *(
        _classes(f"categorical mixture, {link}, ADVI", CategoricalMixture(link=link, noise="none"), DRIFT, **size)  # type: ignore[arg-type]
        for link, (size, _) in LINKS.items()
    ),
    _classes("categorical mixture, confusion, ADVI", CategoricalMixture(noise="confusion"), DRIFT, labels=3),
    _classes("categorical mixture, uniform, ADVI", CategoricalMixture(noise="uniform"), DRIFT, labels=3),
    _classes("categorical mixture, class weights, ADVI", CategoricalMixture(weights="view_class", noise="none"), DRIFT),
    _classes("categorical mixture, no offsets, ADVI", CategoricalMixture(noise="none", offset_scale=0), DRIFT),
    pooled_classes(
        "categorical latent, no offsets, ADVI", CategoricalLatent(noise="none", offset_scale=0, shrinkage=2.0), DRIFT
    ),
    _numbers(
        "gaussian mixture, input weights, ADVI",
        GaussianMixture(noise="none", weights="input", v=0.05),
        ADVI(steps=200, particles=2, learning_rate=0.1),
    ),
    _classes(
        "categorical mixture, input weights, confusion, ADVI",
        CategoricalMixture(weights="input", noise="confusion"),
        ADVI(steps=400, particles=4, learning_rate=0.05),
        labels=3,
    ),
    _classes("categorical mixture, uncalibrated, ADVI", CategoricalMixture(noise="none", calibrate=False), DRIFT),
    pooled_classes("categorical latent, ADVI", CategoricalLatent(noise="none", shrinkage=2.0), DRIFT),
    pooled_classes(
        "categorical latent, annotator, ADVI", CategoricalLatent(noise="annotator", shrinkage=2.0), DRIFT, labels=3
    ),
    Case("ordinal mixture", "ordinal", OrdinalMixture(), level_data, engine=DRIFT),
    Case("ranking mixture", "ranking", RankingMixture(), ranking_data, engine=DRIFT),
    _numbers("pyro model, numbers", PyroModel(laplace_labels), DRIFT),
    _classes("pyro model, classes", PyroModel(mixed_classes), DRIFT),
)
CASES = EM_CASES + ADVI_CASES


@cache
def fitted(case: Case) -> tuple[Policy, ViewPredictions, LabelSets]:
    """A case's policy, which several tests look at, and its data."""
    predictions, labels = case.problem()
    return case.fit(predictions, labels), predictions, labels


def every(cases: tuple[Case, ...]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def numbers_of(prediction: Any) -> dict[str, np.ndarray]:
    """All that a predictive distribution says."""
    if hasattr(prediction, "proba"):
        return {"proba": prediction.proba, "mutual_information": prediction.mutual_information}
    quantiles = prediction.quantile([0.1, 0.5])
    return {"mean": prediction.mean, "variance": prediction.variance, "low": quantiles[0], "median": quantiles[1]}


def assert_alike(prediction: Any, other: Any, atol: float) -> None:
    """Two predictive distributions agree."""
    expected = numbers_of(other)
    for name, values in numbers_of(prediction).items():
        np.testing.assert_allclose(values, expected[name], rtol=atol, atol=atol, err_msg=name)


# -- the bound ----------------------------------------------------------------------------------------


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@every(EM_CASES)
@pytest.mark.parametrize("accelerate", [False, True], ids=["plain", "accelerated"])
def test_the_bound_never_falls(case: Case, accelerate: bool) -> None:
    engine = EM(tol=0, max_steps=25, accelerate=accelerate)
    policy = case.fit(*case.problem(), engine=engine)
    bounds = policy.history.elbo
    assert np.isfinite(bounds).all()
    assert (np.diff(bounds) >= -1e-9 * (1 + np.abs(bounds[:-1]))).all()
    assert bounds[-1] > bounds[0]
    assert policy.elbo == bounds[-1]


@every(EM_CASES)
def test_no_small_move_from_the_end_raises_the_bound(case: Case) -> None:
    """An update whose steps are refused (a wrong sign, say) does not lower the bound, but stands still too early."""
    predictions, labels = case.problem()
    labels = predictions.align(labels)
    source = InMemory(predictions, labels)
    problem, first = pose(case.model.resolve(labels).settle(source)[0], source)
    end: Any = ascend(problem, first, EM(tol=1e-9, max_steps=3000)).state
    bound, vector = problem.evaluate(end)[0], problem.pack(end)
    inside = vector != 0  # weights at zero stay there
    if case.task == "regression" and end.annotators is not None:  # biases sum to zero, and a move would change that
        inside[-len(annotators.pack(end.annotators)) :] = False
    rng = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(10):
            move = size * rng.normal(size=len(vector)) * inside
            with np.errstate(all="ignore"):
                rises = [problem.evaluate(problem.unpack(vector + side * move, end))[0] - bound for side in (1, -1)]
            assert not max(rises) > 1e-3, size


@every(CASES)
def test_the_bound_is_the_sum_of_its_terms_and_the_history_starts_uniform(case: Case) -> None:
    policy = fitted(case)[0]
    total = sum(value if name.startswith("J") else -value for name, value in policy.elbo_terms.items())
    assert total == pytest.approx(policy.elbo, rel=1e-8, abs=1e-8)
    np.testing.assert_allclose(policy.history.weights[0], 1 / 3, atol=1e-9)
    np.testing.assert_allclose(policy.weights.sum(), 1)
    assert (policy.weights >= 0).all()


@every(tuple(case for case in ADVI_CASES if isinstance(case.engine, ADVI)))
def test_the_history_of_advi_ends_at_its_bound(case: Case) -> None:
    """Bounds of single steps and the reported one are computed apart; the last steps hardly move Q."""
    policy = fitted(case)[0]
    last = policy.history.elbo[-20:]
    assert abs(last.mean() - policy.elbo) < 5 * last.std() / np.sqrt(len(last)) + 0.5


@pytest.mark.parametrize("bound", ["renyi", "iwae"])
def test_tighter_bounds_are_the_sum_of_their_terms_and_end_their_history(bound: Any) -> None:
    case = next(case for case in ADVI_CASES if case.name == "gaussian mixture, ADVI")
    policy = case.fit(*case.problem(), engine=ADVI(steps=300, particles=8, learning_rate=0.1, bound=bound))
    terms, last = policy.elbo_terms, policy.history.elbo[-20:]
    assert policy.elbo == pytest.approx(terms["J_joint"] - terms["Pi_q"] + terms["J_tightening"])
    assert terms["J_tightening"] > 0
    assert abs(last.mean() - policy.elbo) < 5 * last.std() / np.sqrt(len(last)) + 0.5


def test_the_bound_at_point_estimates_is_likelihood_times_prior() -> None:
    """Intervals start from it: calibration and precision at their mode, the density of ln Lambda as its prior."""
    predictions, labels = number_data(5)
    source = InMemory(predictions, predictions.align(labels))
    posed: tuple[Any, Any] = pose(GaussianMixture(noise="none", scale="constant", v=0.3), source)
    problem, state = replace(posed[0], plug_in=True), posed[1]
    bounds = ascend(problem, state, EM(tol=0, max_steps=20, accelerate=False)).bounds
    assert (np.diff(bounds) >= -1e-9 * np.abs(bounds[:-1])).all()
    for _ in range(3):
        state = problem.update(state, problem.evaluate(state)[1])
    block, prior = problem.data.blocks[0], problem.prior
    slope, offset = state.theta_mean.T
    location = (1 + slope)[:, None] * block.mean[0] + offset[:, None]  # (K, n)
    precision = state.dof / state.inverse_scale[:, 0, 0]
    each = stats.norm(location, precision[:, None] ** -0.5).logpdf(block.value[0])
    expected = special.logsumexp(np.log(state.weights)[:, None] + each, axis=0) @ block.repeats
    expected += stats.norm(state.common_mean, prior.beta**-0.5).logpdf(state.theta_mean).sum()
    expected += stats.t(2, scale=prior.common_scale).logpdf(state.common_mean).sum()
    expected += 0.5 * (prior.nu * np.log(precision) - prior.inverse_scale[0, 0] * precision).sum()
    assert problem.evaluate(state)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("component", "outputs"), [("normal", 1), ("normal", 2), ("student_t", 1), ("student_t", 2), ("laplace", 1)]
)
def test_components_have_the_densities_of_their_names(component: Any, outputs: int) -> None:
    from vbtta.models.gaussian_mixture.density import MixtureDensity
    from vbtta.models.parts.tensors import Views

    predictions, labels = number_data(5, outputs=outputs)
    model = GaussianMixture(noise="none", component=component, scale="constant", v=0.3)
    problem, first = import_module("vbtta.models.gaussian_mixture.em").pose(
        InMemory(predictions, predictions.align(labels)), model
    )
    density = MixtureDensity(problem, first, component)
    sd, value, dof = 1.7, np.random.default_rng(0).normal(size=(7, outputs)), 5.0
    views = Views(torch.zeros(1, 1), torch.zeros(1, 7, outputs).double(), torch.eye(outputs)[None].double() / sd, None)
    log_density = density.log_components(views, torch.tensor(value), {"excess_dof": torch.tensor(dof - 2)})[0].numpy()
    if component == "normal":
        expected = stats.norm(0, sd).logpdf(value).sum(axis=1)
    elif component == "student_t":
        expected = stats.multivariate_t(np.zeros(outputs), sd**2 * np.eye(outputs), dof).logpdf(value)
    else:
        expected = stats.laplace(0, sd / np.sqrt(2)).logpdf(value[:, 0])
    np.testing.assert_allclose(log_density, expected, atol=1e-9)


def test_a_laplace_is_of_one_output() -> None:
    predictions, labels = number_data(5, outputs=2)
    with pytest.raises(ValueError, match="component='laplace' is for one output; with 2 use"):
        fit_policy(predictions, labels, task="regression", model=GaussianMixture(component="laplace"), engine="advi")


def test_annotators_without_labels_are_at_their_prior_and_intervals_hold_the_estimate() -> None:
    prior, state = annotators.initialise("annotator", 3.0, 4, np.array([0.2, 0.4]), None)
    assert annotators.divergence(state, prior) == pytest.approx(0, abs=1e-12)
    people = fitted(next(case for case in EM_CASES if case.name == "gaussian mixture, annotator"))[0].annotators
    low, high = np.moveaxis(people.noise_interval, -1, 0)  # type: ignore[union-attr]
    assert (low > 0).all()
    assert (low < people.noise).all()  # type: ignore[union-attr]
    assert (people.noise < high).all()  # type: ignore[union-attr]


# -- the evidence: an average of the likelihood over draws from the prior, on very few labels ----------

DRAWS, PRIOR_NU, PRIOR_V = 60_000, 4.0, 0.5
TINY_VIEWS = np.array([[[0.3], [1.0]], [[1.2], [-0.5]], [[-1.0], [0.3]], [[0.4], [1.6]], [[-0.2], [-1.3]]])
TINY_LOGITS = np.concatenate([1.5 * TINY_VIEWS, 0.2 - TINY_VIEWS[::-1]], axis=2)  # (5, 2, 2)
TINY_CLASSES = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [0, 0]])
TINY_ORDERS = [[0, 1], [1, 0], [0], [1], [0, 1]]


def _standard_labels() -> np.ndarray:
    """Numbers of mean 0 and deviation 1: the labels' units are then the standard ones, which priors are stated in."""
    values = np.array([0.2, 0.9, -0.7, 1.4, -0.5])
    return (values - values.mean()) / values.std()


def _mixed(weights: np.ndarray, log_each: np.ndarray) -> np.ndarray:
    """Sum over labels (j) of ln sum_k w_k exp(log_each): (M,)."""
    return special.logsumexp(np.log(weights)[:, None] + log_each, axis=2).sum(axis=1)


def _weights(rng: np.random.Generator) -> np.ndarray:
    return rng.dirichlet([1.0, 1.0], size=DRAWS)


def _gaussian_mixture(model: Any, rng: np.random.Generator, log_component: Any = None) -> np.ndarray:
    precision = rng.gamma(PRIOR_NU / 2, 2 / (PRIOR_NU * PRIOR_V), size=(DRAWS, 1, 2))
    common = rng.standard_t(3, size=(2, DRAWS, 1, 1)) * model.common_scale
    shift, slope = common + rng.normal(size=(2, DRAWS, 1, 2)) * model.beta**-0.5
    views = TINY_VIEWS[:, :, 0]
    location = views + shift + (slope * views if model.link == "affine" else 0)
    log_component = stats.norm.logpdf if log_component is None else log_component
    log_each = log_component(_standard_labels()[:, None], loc=location, scale=precision**-0.5)
    return _mixed(_weights(rng), log_each)


def _gaussian_latent(model: GaussianLatent, rng: np.random.Generator) -> np.ndarray:
    precision = rng.gamma(PRIOR_NU / 2, 2 / (PRIOR_NU * PRIOR_V), size=(DRAWS, 1))
    pool = _truncated(rng, np.full((DRAWS, 2), 0.5), model.shrinkage)
    offset = rng.standard_t(3, size=(DRAWS, 1)) * (2 / model.beta) ** 0.5
    location = pool @ TINY_VIEWS[:, :, 0].T + offset
    return np.asarray(stats.norm.logpdf(_standard_labels(), location, precision**-0.5).sum(axis=1))


def _truncated(rng: np.random.Generator, centre: np.ndarray, precision: Any) -> np.ndarray:
    """Normals above zero."""
    least = stats.norm.cdf(-centre * precision**0.5)
    return np.asarray(centre + stats.norm.ppf(least + (1 - least) * rng.random(centre.shape)) * precision**-0.5)


def _class_labels(proba: np.ndarray, model: Any, rng: np.random.Generator) -> np.ndarray:
    """Log likelihood of the class labels given the probabilities of the true classes (M, n, C)."""
    if model.noise == "none":
        log_proba = np.log(np.maximum(proba, 1e-300))  # temperatures have heavy tails
        return sum(log_proba[:, np.arange(5), TINY_CLASSES[:, u]].sum(axis=1) for u in range(2))  # type: ignore[return-value]
    if model.noise == "confusion":
        prior = np.array(model.confusion_prior) * np.ones((DRAWS, 1))
        if model.difficulty:  # by EM: annotators share the counts of their prior
            prior = prior * np.exp(rng.normal(size=(DRAWS, 2)))
        a, b = prior.T[:, :, None, None]
        right = rng.beta(a, b, size=(DRAWS, 2, 2))  # (M, U, C)
        matrices = np.stack(
            [np.stack([right[..., 0], 1 - right[..., 0]], -1), np.stack([1 - right[..., 1], right[..., 1]], -1)], 2
        )
    else:
        people, (a, b) = ACCURACIES[model.noise]
        right = np.broadcast_to(rng.beta(a, b, size=(DRAWS, people)), (DRAWS, 2))
        matrices = np.stack([np.stack([right, 1 - right], -1), np.stack([1 - right, right], -1)], axis=2)
    own = [matrices[:, u][:, :, TINY_CLASSES[:, u]].swapaxes(1, 2) for u in range(2)]  # (M, n, C) each
    if not model.difficulty:
        return np.asarray(np.log((proba * own[0] * own[1]).sum(axis=2)).sum(axis=1))
    hard, apparent = rng.beta(6.0, 20.0, size=(DRAWS, 1, 1)), special.softmax(TINY_LOGITS.mean(axis=1), axis=1)
    likelihood = (1 - hard) * own[0] * own[1]
    for d in range(2):  # the apparent class, which a label of a hard instance is with probability 0.4
        each = [0.4 * (TINY_CLASSES[:, u] == d)[:, None] + 0.6 * own[u] for u in range(2)]
        likelihood = likelihood + hard * apparent[:, d, None] * each[0] * each[1]
    return np.asarray(np.log((proba * likelihood).sum(axis=2)).sum(axis=1))


def _input_weights(weights: np.ndarray, scale: float, rng: np.random.Generator) -> np.ndarray:
    """Weights (M, n, K) from base weights (M, K) and coefficients of standardised features, drawn from their prior."""
    proba = special.softmax(TINY_LOGITS, axis=2)
    mean = proba.mean(axis=1, keepdims=True)
    features = np.stack(
        [
            special.entr(proba).sum(axis=2),
            np.abs(proba[:, :, 0] - proba[:, :, 1]),
            special.rel_entr(proba, mean).sum(axis=2),
            (proba * mean).sum(axis=2),
            special.logsumexp(TINY_LOGITS, axis=2),
        ],
        axis=2,
    )
    centred = features - features.mean(axis=1, keepdims=True)
    features = features / (centred - centred.mean(axis=0)).std(axis=(0, 1))
    score = np.einsum("mf,nkf->mnk", scale * rng.normal(size=(DRAWS, 5)), features)
    return np.asarray(special.softmax(np.log(weights)[:, None] + score, axis=2))


def _categorical_mixture(model: CategoricalMixture, rng: np.random.Generator) -> np.ndarray:
    weights = _weights(rng)[:, None]  # (M, 1, K)
    if model.weights == "input" and model.gate_scale is not None:
        weights = _input_weights(weights[:, 0], model.gate_scale, rng)
    if not model.calibrate:
        proba = np.einsum("mnk,nkc->mnc", np.broadcast_to(weights, (DRAWS, 5, 2)), LINKS[model.link][1](TINY_LOGITS))
        return _class_labels(proba, model, rng)
    common, own = rng.standard_t(2, size=(DRAWS, 1)) * model.kappa_scale, rng.normal(size=(DRAWS, 2)) * model.xi_scale
    offset = rng.normal(size=(DRAWS, 2)) * model.offset_scale
    proba = np.zeros((DRAWS, 5, 2))
    for k in range(2):
        utility = np.exp(common + own[:, k : k + 1])[:, :, None] * TINY_LOGITS[:, k] + offset[:, None]
        proba += weights[:, :, k, None] * LINKS[model.link][1](utility)
    return _class_labels(proba, model, rng)


def _categorical_latent(model: CategoricalLatent, rng: np.random.Generator) -> np.ndarray:
    centre = np.exp(rng.standard_t(2, size=(DRAWS, 1)) * model.kappa_scale) / 2
    pool = _truncated(rng, np.broadcast_to(centre, (DRAWS, 2)), model.shrinkage)
    offset = rng.normal(size=(DRAWS, 1, 2)) * model.offset_scale
    return _class_labels(LINKS[model.link][1](np.einsum("mk,nkc->mnc", pool, TINY_LOGITS) + offset), model, rng)


def _ordinal_mixture(model: OrdinalMixture, rng: np.random.Generator) -> np.ndarray:
    common, own = rng.normal(size=(DRAWS, 1)) * model.slope_scale, rng.normal(size=(DRAWS, 2)) * model.xi_scale
    cumulated = rng.dirichlet(np.ones(2), size=DRAWS)[:, :1]  # two levels, one cut point
    cut = np.sqrt(1 + np.exp(2 * common)) * stats.norm.ppf(np.clip(cumulated, 1e-12, 1 - 1e-12))
    scores = (TINY_VIEWS[:, :, 0] - TINY_VIEWS.mean()) / TINY_VIEWS.std()
    gap = cut[:, None] - np.exp(common + own)[:, None] * scores  # (M, n, K)
    sign = 1 - 2 * TINY_CLASSES[:, 0]
    return _mixed(_weights(rng), special.log_ndtr(sign[:, None] * gap))


def _ranking_mixture(model: RankingMixture, rng: np.random.Generator) -> np.ndarray:
    common, own = rng.normal(size=(DRAWS, 1)) * model.kappa_scale, rng.normal(size=(DRAWS, 2)) * model.xi_scale
    scores = TINY_LOGITS / np.sqrt(TINY_LOGITS.var(axis=2).mean())
    best = np.array([order[0] for order in TINY_ORDERS])
    gap = scores[np.arange(5), :, best] - scores[np.arange(5), :, 1 - best]  # (n, K)
    return _mixed(_weights(rng), special.log_expit(np.exp(common + own)[:, None] * gap))


def _tiny(task: str) -> tuple[ViewPredictions, LabelSets]:
    predictions = ViewPredictions(TINY_VIEWS if task in ("regression", "ordinal") else TINY_LOGITS)
    labels = {
        "regression": lambda: LabelSets.from_array(_standard_labels()),
        "classification": lambda: LabelSets.from_array(TINY_CLASSES, annotators=["ann", "bob"]),
        "ordinal": lambda: LabelSets.from_array(TINY_CLASSES[:, 0]),
        "ranking": lambda: LabelSets.from_rankings(TINY_ORDERS),
    }
    return predictions, labels[task]()


_PRIOR: dict[str, Any] = {"noise": "none", "beta": 1.0, "nu": PRIOR_NU, "v": PRIOR_V}
_COMMON: dict[str, Any] = {"common_scale": 0.3, "scale": "constant", "concentration": 1.0, **_PRIOR}
_PLAIN: dict[str, Any] = {"calibrate": False, "concentration": 1.0}
_GATED: dict[str, Any] = {"calibrate": False, "weights": "input", "gate_scale": 1.0}
EVIDENCE_CASES: tuple[tuple[str, Any, Callable[..., np.ndarray], tuple[str, ...]], ...] = (
    ("regression", GaussianMixture(link="shift", **_COMMON), _gaussian_mixture, ("em", "advi")),
    ("regression", GaussianMixture(link="affine", **_COMMON), _gaussian_mixture, ("em", "advi")),
    ("regression", GaussianLatent(shrinkage=4.0, **_PRIOR), _gaussian_latent, ("advi",)),
    *(
        (
            "classification",
            CategoricalMixture(link=link, noise=noise, difficulty=False, **_PLAIN),  # type: ignore[arg-type]
            _categorical_mixture,
            engines,
        )
        for link, engines in (("softmax", ("em", "advi")), ("probit", ("em",)))
        for noise in ("none", *ACCURACIES)
    ),
    *(
        ("classification", CategoricalMixture(noise=noise, difficulty=True, **_PLAIN), _categorical_mixture, ("em",))
        for noise in (*ACCURACIES, "confusion")
    ),
    *(
        (
            "classification",
            CategoricalMixture(noise="confusion", link=link, difficulty=False),
            _categorical_mixture,
            ("advi",),
        )  # type: ignore[arg-type]
        for link in LINKS
    ),
    ("classification", CategoricalMixture(noise="none"), _categorical_mixture, ("advi",)),
    (
        "classification",
        CategoricalLatent(noise="annotator", shrinkage=4.0, difficulty=False),
        _categorical_latent,
        ("advi",),
    ),
    ("classification", CategoricalMixture(noise="none", **_GATED), _categorical_mixture, ("advi",)),
    (
        "classification",
        CategoricalMixture(noise="annotator", difficulty=False, **_GATED),
        _categorical_mixture,
        ("advi",),
    ),
    ("classification", CategoricalLatent(noise="none", shrinkage=4.0), _categorical_latent, ("advi",)),
    ("ordinal", OrdinalMixture(), _ordinal_mixture, ("advi",)),
    ("ranking", RankingMixture(), _ranking_mixture, ("advi",)),
)


@pytest.mark.parametrize(("task", "model", "log_likelihood", "engines"), EVIDENCE_CASES)
def test_bounds_lie_below_the_evidence(
    task: str, model: Any, log_likelihood: Callable[..., np.ndarray], engines: tuple[str, ...]
) -> None:
    """Where all parameters have a prior and Q covers them; EM leaves calibration and pools at their modes."""
    heights = log_likelihood(model, np.random.default_rng(0))
    evidence = special.logsumexp(heights) - np.log(DRAWS)
    error = np.exp(heights - evidence).std() / np.sqrt(DRAWS)
    assert error < 0.02
    kinds = {"em": CLIMB, "advi": ADVI(steps=200, particles=2, learning_rate=0.1)}
    for engine in engines:
        policy = Case("tiny", task, model, _tiny, engine=kinds[engine]).fit(*_tiny(task))
        sampling = 4 * error + (0.05 if engine == "advi" else 0)  # of the evidence, and of ADVI's bound from 1024 draws
        mode = 2.0 if engine == "em" and model.noise == "confusion" else 0.0  # of the counts that annotators share
        assert evidence - 2 - mode < policy.elbo < evidence + sampling, engine


def test_the_bound_of_student_t_components_lies_below_the_evidence() -> None:
    """Their degrees of freedom are at the mode: the evidence is that given these, times their prior density."""
    prior = {"nu": PRIOR_NU, "v": PRIOR_V, "beta": 2.0, "common_scale": 0.5, "concentration": 1.0, "scale": "constant"}
    model = GaussianMixture(component="student_t", noise="none", **prior)  # type: ignore[arg-type]
    policy = Case("tiny", "regression", model, _tiny, engine=CLIMB).fit(*_tiny("regression"))
    tail = float(policy.posterior.state.tail)  # type: ignore[attr-defined]
    component = partial(stats.t.logpdf, df=tail)
    heights = _gaussian_mixture(model, np.random.default_rng(0), component) + stats.gamma(2, scale=10).logpdf(tail - 2)
    evidence = special.logsumexp(heights) - np.log(DRAWS)
    error = np.exp(heights - evidence).std() / np.sqrt(DRAWS)
    assert evidence - 2 < policy.elbo < evidence + 4 * error


@pytest.mark.parametrize("link", LINKS)
def test_the_bound_is_the_likelihood_where_only_weights_are_inferred(link: Any) -> None:
    model = CategoricalMixture(link=link, noise="none", calibrate=False)
    policy = Case("tiny", "classification", model, _tiny).fit(*_tiny("classification"))
    proba = np.einsum("k,nkc->nc", policy.weights, LINKS[link][1](TINY_LOGITS))
    assert policy.elbo == pytest.approx(np.log(proba[np.arange(5)[:, None], TINY_CLASSES]).sum(), rel=1e-6)


# -- symmetries ---------------------------------------------------------------------------------------


@every(CASES)
def test_permuted_views_permute_weights(case: Case) -> None:
    """ADVI draws other numbers then: its weights agree within what a short run leaves."""
    policy, predictions, labels = fitted(case)
    order = np.array([2, 0, 1])
    permuted = case.fit(chosen(predictions, views=order), labels)
    assert permuted.names == tuple(np.array(policy.names)[order])
    advi = isinstance(case.engine, ADVI)
    np.testing.assert_allclose(permuted.weights, policy.weights[order], atol=0.06 if advi else 1e-5)
    if not advi:
        assert permuted.elbo == pytest.approx(policy.elbo, rel=1e-7, abs=1e-7)
        assert_alike(permuted.predict(predictions), policy.predict(predictions), 1e-4)


@every(CASES)
def test_counts_equal_repeats(case: Case) -> None:
    predictions, labels = case.problem()
    times = np.arange(len(labels)) % 3 + 1
    counted = replace(labels, count=times.astype(np.float64))
    repeated = replace(
        labels,
        instance=np.repeat(labels.instance, times),
        value=np.repeat(labels.value, times, axis=0),
        count=np.ones(times.sum()),
        annotator=None if labels.annotator is None else np.repeat(labels.annotator, times),
    )
    assert counted.total == repeated.total
    policy, other = (case.fit(predictions, sets, engine=case.few_steps) for sets in (counted, repeated))
    np.testing.assert_allclose(policy.weights, other.weights, atol=1e-6)
    assert policy.elbo == pytest.approx(other.elbo, rel=1e-8, abs=1e-6)
    assert_alike(policy.predict(predictions), other.predict(predictions), 1e-5)


@every(tuple(case for case in CASES if case.task == "classification"))
def test_weights_of_instances_equal_repeated_instances(case: Case) -> None:
    predictions, labels = case.problem()
    times = np.arange(len(predictions)) % 3 + 1
    rows = np.repeat(np.arange(len(predictions)), times)
    problems = (predictions, labels.with_weights(times.astype(float))), (chosen(predictions, rows), labels.take(rows))
    policy, other = (case.fit(*problem, engine=case.few_steps) for problem in problems)
    atol = 0.06 if isinstance(case.engine, ADVI) else 1e-6  # ADVI draws other numbers where units are other ones
    np.testing.assert_allclose(policy.weights, other.weights, atol=atol)
    if not isinstance(case.engine, ADVI):
        assert policy.elbo == pytest.approx(other.elbo, rel=1e-8, abs=1e-6)
        np.testing.assert_allclose(policy.weight_interval(0.9), other.weight_interval(0.9), atol=1e-4)


@every(tuple(case for case in CASES if case.task == "classification"))
def test_tallies_equal_unnamed_labels(case: Case) -> None:
    predictions, labels = case.problem()
    tallies = np.zeros((len(predictions), predictions.outputs.shape[2]))
    np.add.at(tallies, (labels.instance, labels.value), 1)
    unnamed = replace(labels, annotator=None, annotator_names=())
    policy, other = (
        case.fit(predictions, sets, engine=case.few_steps) for sets in (LabelSets.from_counts(tallies), unnamed)
    )
    np.testing.assert_allclose(policy.weights, other.weights, atol=1e-6)
    assert policy.elbo == pytest.approx(other.elbo, rel=1e-8, abs=1e-6)


# -- the consensus ------------------------------------------------------------------------------------


def _without_noise(case: Case) -> bool:
    return case.task in ("classification", "regression") and getattr(case.model, "noise", None) == "none"


@every(tuple(case for case in CASES if _without_noise(case)))
def test_the_consensus_without_a_noise_model_respects_the_labels(case: Case) -> None:
    policy, predictions, labels = fitted(case)
    value = np.stack([labels.value[labels.instance == i][0] for i in range(len(predictions))])
    twice = LabelSets.from_table(np.tile(np.arange(len(value)), 2), np.concatenate([value, value]))
    consensus = policy.consensus(predictions, twice)
    if case.task == "classification":
        assert (consensus.label == value).all()
        return
    np.testing.assert_allclose(consensus.mean, value.reshape(consensus.mean.shape), atol=0.02 * value.std())
    noise = value.std() * np.random.default_rng(0).normal(size=(2, *value.shape)) * 2
    noisy = LabelSets.from_table(twice.instance, np.concatenate([value + noise[0], value + noise[1]]))
    error = (policy.consensus(predictions, noisy).mean - value.reshape(consensus.mean.shape)).std()
    assert error < noise.mean(axis=0).std()  # than that of the labels' mean: their spread says how noisy they are


# -- one view -----------------------------------------------------------------------------------------

CERTAIN = {  # priors that leave a view as it is
    GaussianMixture: {"beta": 1e10},
    GaussianLatent: {"beta": 1e10, "shrinkage": 1e10},
    CategoricalMixture: {"kappa_scale": 1e-5, "xi_scale": 1e-5, "offset_scale": 1e-5},
    CategoricalLatent: {"kappa_scale": 1e-5, "shrinkage": 1e10, "offset_scale": 1e-5},
}


@every(EM_CASES)
def test_one_view_that_is_not_calibrated_is_the_predictor_itself(case: Case) -> None:
    predictions, labels = case.problem()
    alone = chosen(predictions, views=[0])
    policy = case.fit(alone, labels, model=replace(case.model, **CERTAIN[type(case.model)]))
    prediction, outputs = policy.predict(alone), outputs_of(alone)[:, 0]
    assert policy.weights.tolist() == [1.0]
    if case.task == "regression":
        np.testing.assert_allclose(prediction.mean, outputs, atol=1e-5)
    else:
        np.testing.assert_allclose(prediction.proba, LINKS[case.model.link][1](outputs), atol=1e-4)


@every(CASES)
def test_one_view_has_all_the_weight_and_needs_no_other(case: Case) -> None:
    predictions, labels = case.problem()
    alone = chosen(predictions, views=[0])
    policy = case.fit(alone, labels, engine=case.few_steps)
    assert policy.weights.tolist() == [1.0]
    np.testing.assert_allclose(policy.weight_interval(0.9), [[1.0, 1.0]])
    whole, single = (numbers_of(policy.predict(views)) for views in (predictions, alone))
    for name, values in whole.items():
        assert np.array_equal(values, single[name])
    if hasattr(policy.predict(alone), "mutual_information"):
        np.testing.assert_allclose(single["mutual_information"], 0, atol=1e-9)


# -- some of the views --------------------------------------------------------------------------------


@every(CASES)
def test_views_are_left_out_in_any_order_and_those_left_share_the_weight(case: Case) -> None:
    policy, predictions, _ = fitted(case)
    whole = policy.restrict([0, 1, 2])
    np.testing.assert_allclose(whole.weights, policy.weights, atol=1e-12)
    assert_alike(whole.predict(predictions), policy.predict(predictions), 1e-12)
    heaviest, second, _ = np.argsort(-policy.weights)
    pair = policy.restrict(sorted([heaviest, second]))
    assert pair.weights.sum() == pytest.approx(1)
    if policy.gate is None:
        kept = pair.weights > 0
        np.testing.assert_allclose(pair.weights[kept], policy.weights[kept] / policy.weights[kept].sum(), atol=1e-12)
    low, high = pair.weight_interval(0.9).T
    assert ((low <= pair.weights + 1e-9) & (pair.weights <= high + 1e-9)).all()
    alone, later = policy.restrict([heaviest]), pair.restrict([int(heaviest > second)])
    assert alone.weights[heaviest] == later.weights[heaviest] == 1
    np.testing.assert_allclose(later.weight_interval(0.9), alone.weight_interval(0.9), atol=1e-9)
    assert_alike(later.predict(predictions), alone.predict(predictions), 1e-9)
    needed = chosen(predictions, views=[heaviest])
    assert_alike(alone.predict(needed), alone.predict(predictions), 0)


# -- groups -------------------------------------------------------------------------------------------


@every(
    tuple(case for case in EM_CASES if getattr(case.model, "weights", "") != "input")
)  # by groups gates are shrunken
def test_groups_change_intervals_and_nothing_else(case: Case) -> None:
    predictions, labels = case.problem()
    alone = case.fit(predictions, labels, engine=case.few_steps)
    for n_groups in (8, 1):
        groups = np.arange(len(predictions)) % n_groups
        policy = case.fit(predictions.with_groups(groups), labels, engine=case.few_steps)
        np.testing.assert_array_equal(policy.weights, alone.weights)
        assert policy.elbo == alone.elbo
        low, high = policy.weight_interval(0.9).T
        assert ((low <= policy.weights) & (policy.weights <= high)).all()
        if n_groups == 1:  # which says nothing about how groups differ
            assert (policy.weight_interval(0.9)[policy.weights > 0] == [0, 1]).all()
        else:
            assert not np.array_equal(policy.weight_interval(0.9), alone.weight_interval(0.9))


@every(tuple(case for case in CASES if getattr(case.model, "weights", "") == "input"))
def test_intervals_of_coefficients_hold_them_and_grow_with_the_level(case: Case) -> None:
    gate = fitted(case)[0].gate
    assert gate is not None
    narrow, wide = (gate.interval(level) for level in (0.5, 0.99))
    for low, high in (narrow.T, wide.T):
        assert ((low <= gate.coefficients) & (gate.coefficients <= high)).all()
    assert (np.diff(wide) > np.diff(narrow)).all()
    assert (wide[:, 0] < narrow[:, 0]).all()


# -- files, batches, blocks ---------------------------------------------------------------------------


@every(CASES)
def test_a_saved_policy_predicts_the_same_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    policy, predictions, labels = fitted(case)
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    for prediction, other in (
        (policy.predict(predictions), loaded.predict(predictions)),
        (policy.consensus(predictions, labels), loaded.consensus(predictions, labels)),
    ):
        expected = numbers_of(prediction)
        for name, values in numbers_of(other).items():
            assert np.array_equal(values, expected[name]), name
    assert np.array_equal(policy.weights, loaded.weights)
    assert np.array_equal(policy.weight_interval(0.9), loaded.weight_interval(0.9))
    assert np.array_equal(policy.score(predictions, labels), loaded.score(predictions, labels))
    assert np.array_equal(policy.history.elbo, loaded.history.elbo)
    assert (policy.elbo, policy.names, policy.engine) == (loaded.elbo, loaded.names, loaded.engine)


@every(CASES)
def test_batches_do_not_matter_to_predictions(case: Case) -> None:
    policy, predictions, _ = fitted(case)
    pieces = [
        numbers_of(policy.predict(chosen(predictions, rows)))
        for rows in np.array_split(np.arange(len(predictions)), [1, 6])
    ]
    for name, values in numbers_of(policy.predict(predictions)).items():
        joined = np.concatenate([piece[name] for piece in pieces])
        np.testing.assert_allclose(joined, values, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Policy]], Policy]:
    """Call a function with blocks of a few inputs; a constant that has moved is an error, not a skip."""

    def call(function: Callable[[], Policy]) -> Policy:
        with monkeypatch.context() as patch:
            for module, name, value in SMALL_BLOCKS:
                patch.setattr(import_module(module), name, value)
            return function()

    return call


@every(CASES)
def test_blocks_do_not_matter_to_fits(case: Case, in_small_blocks: Callable[..., Policy]) -> None:
    predictions, labels = case.problem(**({"n": 150} if case.task == "regression" else {}))
    fit = partial(case.fit, predictions, labels, engine=case.few_steps)
    whole, parts = fit(), in_small_blocks(fit)
    np.testing.assert_allclose(parts.history.elbo, whole.history.elbo, rtol=1e-9)
    np.testing.assert_allclose(parts.weights, whole.weights, atol=1e-8)
    assert_alike(parts.predict(predictions), whole.predict(predictions), 1e-7)


@every(EM_CASES)
def test_data_are_freed_with_the_last_reference(case: Case) -> None:
    """A cycle would keep them, and those of every fold, until the collector runs."""
    predictions, labels = case.problem()
    source = InMemory(predictions, predictions.align(labels))
    gc.collect()
    gc.disable()
    try:
        alive: list[weakref.ref[Any]] = [weakref.ref(predictions), weakref.ref(source)]
        problem, first = pose(case.model.resolve(source.labels).settle(source)[0], source)
        alive.append(weakref.ref(problem))
        ascend(problem, first, EM(max_steps=5))
        del predictions, source, problem, first
        assert not any(reference() for reference in alive)
    finally:
        gc.enable()


# -- TTAModule ----------------------------------------------------------------------------------------

WITHOUT_MODULE = ("ordinal", "ranking")


def _module_parts(predictions: ViewPredictions) -> tuple[Any, list[Any], Any]:
    """A linear network, views and inputs, such that outputs under the views are these predictions in single precision.

    An input holds the outputs of all views side by side; a view rolls them, the network reads the first.
    """
    from vbtta.augment import Identity, as_view

    outputs = outputs_of(predictions)
    n, views, size = outputs.shape
    network = torch.nn.Linear(views * size, size, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.eye(size, views * size))
    rolls = [as_view(partial(torch.roll, shifts=-k * size, dims=1), name=NAMES[k]) for k in range(1, views)]
    return network, [Identity(), *rolls], torch.tensor(outputs.reshape(n, -1), dtype=torch.float32)


@every(tuple(case for case in CASES if case.task not in WITHOUT_MODULE))
def test_the_module_equals_predict(case: Case) -> None:
    from vbtta import TTAModule

    policy, predictions, _ = fitted(case)
    network, views, inputs = _module_parts(predictions)
    collected = collect_views(network, inputs, views)
    np.testing.assert_allclose(outputs_of(collected), outputs_of(predictions), atol=1e-5)
    # Views that draw nothing have no variance, which a heteroscedastic policy asks for; means do not depend on it.
    prediction = policy.predict(ViewPredictions(outputs_of(collected), predictions.variance, names=collected.names))
    expected = prediction.mean if case.task == "regression" else prediction.proba
    output = TTAModule(network, views, policy)(inputs).detach().numpy()
    np.testing.assert_allclose(output, expected, atol=1e-5)


@every(tuple(case for case in CASES if case.task in WITHOUT_MODULE))
def test_the_module_says_what_it_cannot_do(case: Case) -> None:
    from vbtta import TTAModule

    policy, predictions, _ = fitted(case)
    network, views, _ = _module_parts(predictions)
    with pytest.raises(ValueError, match="no closed point prediction"):
        TTAModule(network, views, policy)
