"""One model and its data through ADVI: a density, an ascent, a posterior."""

__all__ = ["AdviFit", "fit_advi", "fit_unsupervised"]

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta.infer import label_noise, truth
from vbtta.infer.advi.ascent import AdviAscent, ascend, diverged, estimate_bound
from vbtta.infer.advi.guide import Guide, constrain
from vbtta.infer.advi.moments import match_dirichlet, match_gamma, match_wishart, precision_draws
from vbtta.infer.advi.ordered_posteriors import OrdinalPosterior, RankingPosterior, Score, score_of
from vbtta.infer.advi.posteriors import (
    N_DRAWS,
    AdviCategoricalPosterior,
    AdviLatentClassPosterior,
    AdviLatentPosterior,
    AdviMixturePosterior,
    weights_of,
)
from vbtta.infer.calibration import Calibration
from vbtta.infer.categorical_data import check_logits, refuse_probabilities
from vbtta.infer.categorical_latent import LatentClassProblem, categorical_latent_problem
from vbtta.infer.categorical_mixture import CategoricalProblem, categorical_problem
from vbtta.infer.continuous import MixtureState
from vbtta.infer.intervals import PoolDoubt
from vbtta.infer.label_noise import NoiseModel
from vbtta.infer.latent import LatentState
from vbtta.infer.latent_fit import LatentProblem, latent_problem
from vbtta.infer.mixture import MixtureProblem, mixture_problem
from vbtta.infer.mixture_posterior import MixtureFactors
from vbtta.infer.posterior import Posterior
from vbtta.infer.truth import AnnotatorState
from vbtta.labels import Array, LabelSets, class_positions
from vbtta.predictions import ViewPredictions
from vbtta.specs import (
    ADVI,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
    OrdinalMixture,
    PyroModel,
    RankingMixture,
)

_SMALL = 1 << 18  # entries of a step's arrays below which one thread is best


class AdviFit(NamedTuple):
    """What a policy needs of a fit."""

    posterior: Posterior
    bounds: Array  # (T,) in the labels' units
    weights: Array  # (T, K)
    bound: float
    terms: dict[str, float]
    converged: bool
    steps: tuple[Posterior, ...]


class _Task(NamedTuple):
    """A density with what turns Q into a posterior."""

    density: Any
    finish: Callable[[Guide], Posterior]
    unit_change: float


def fit_advi(
    predictions: ViewPredictions,
    labels: LabelSets,
    model: ModelSpec,
    engine: ADVI,
    *,
    seed: int,
    progress: bool = False,
) -> AdviFit:
    """Fit one resolved model to aligned data."""
    torch, _ = require("torch", "advi"), require("pyro", "advi")
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        return _fit(_task(predictions, labels, model, seed), engine, seed, labels.total, progress)


def fit_unsupervised(
    predictions: ViewPredictions, model: CategoricalMixture, engine: ADVI, *, seed: int, progress: bool = False
) -> AdviFit:
    """Fit weights to predictions alone."""
    torch, _ = require("torch", "advi"), require("pyro", "advi")
    from vbtta.infer.advi.categorical import UnsupervisedDensity

    check_logits(predictions)
    refuse_probabilities(predictions)
    K, C = predictions.mean.shape[1:]

    def finish(guide: Guide) -> Posterior:
        weights = guide.draw(N_DRAWS)["weights"].mean(axis=0)
        nothing = Calibration(np.zeros(K), np.zeros(C))
        return AdviCategoricalPosterior(
            link="softmax",
            weights=weights,
            class_weights=None,
            calibration=nothing,
            noise=None,
            noise_counts=None,
            named=False,
            information=None,
            guide=guide,
            kept=np.arange(K),
        )

    with torch.inference_mode(False), torch.enable_grad():
        density = UnsupervisedDensity(predictions.mean, model.concentration)
        return _fit(_Task(density, finish, 0.0), engine, seed, float(len(predictions)), progress)


def _fit(task: _Task, engine: ADVI, seed: int, n_labels: float, progress: bool) -> AdviFit:
    from vbtta.infer.advi.densities import UnconstrainedDensity

    density = UnconstrainedDensity(task.density)
    with _few_threads(density.density.width * engine.particles * min(engine.batch_size or np.inf, density.n_units)):
        found = ascend(density, engine, seed, n_labels, _report(engine.steps) if progress else None)
        bound, terms = estimate_bound(density, found.mean, found.factor, engine, seed)
    if not np.isfinite(bound):
        raise diverged(f"under the final draws with learning_rate={engine.learning_rate:g}")
    terms["J_joint"] += task.unit_change
    weights = weights_of(constrain(density.sites, found.means))
    return AdviFit(
        posterior=task.finish(Guide(density.sites, found.mean, found.factor)),
        bounds=found.bounds + task.unit_change,
        weights=weights,
        bound=bound + task.unit_change,
        terms=terms,
        converged=found.converged,
        steps=_steps(task, density.sites, found),
    )


@contextmanager
def _few_threads(entries: float) -> Iterator[None]:
    """One thread where the arrays are small: handing work over takes longer than doing it, above all on a busy host."""
    torch = require("torch", "advi")
    before = torch.get_num_threads()
    if entries < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _steps(task: _Task, sites: Any, found: AdviAscent) -> tuple[Posterior, ...]:
    kept = zip(found.means[: len(found.factors)], found.factors, strict=True)
    return tuple(task.finish(Guide(sites, mean, factor)) for mean, factor in kept)


def _report(steps: int) -> Callable[[int, float], None]:
    def show(step: int, bound: float) -> None:
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            print(f"vbtta: ADVI step {step + 1} of {steps}, bound {bound:.1f}", file=sys.stderr, flush=True)

    return show


def _task(predictions: ViewPredictions, labels: LabelSets, model: ModelSpec, seed: int) -> _Task:
    if isinstance(model, PyroModel):
        return _own(predictions, labels, model, seed)
    if isinstance(model, GaussianMixture):
        return _mixture(predictions, labels, model)
    if isinstance(model, GaussianLatent):
        return _latent(predictions, labels, model)
    if isinstance(model, OrdinalMixture):
        return _ordinal(predictions, labels, model)
    if isinstance(model, RankingMixture):
        return _ranking(predictions, labels, model)
    return _categorical(predictions, labels, model)


def _mixture(predictions: ViewPredictions, labels: LabelSets, spec: GaussianMixture) -> _Task:
    from vbtta.infer.advi.continuous import MixtureDensity

    annotators = spec.noise == "annotator"
    if annotators and spec.component != "normal":
        raise ValueError(
            f"component={spec.component!r} with noise='annotator' has no closed form over the truth; use noise='none', "
            "component='normal' or a PyroModel"
        )
    problem, first = mixture_problem(predictions, labels, spec, annotators=annotators)
    density = MixtureDensity(problem, first, spec.component)
    return _Task(density, lambda guide: _mixture_posterior(guide, problem, spec.component), problem.unit_change)


def _mixture_posterior(guide: Guide, problem: MixtureProblem, component: str) -> AdviMixturePosterior:
    draws = guide.draw(N_DRAWS)
    mean, covariance = guide.marginal("theta")
    K = problem.data.n_views
    D = len(mean) // K
    dof, inverse_scale = match_wishart(precision_draws(draws, problem.prior.inverse_scale))
    views = MixtureState(
        weights=draws["weights"].mean(axis=0),
        weight_counts=match_dirichlet(draws["weights"]),
        theta_mean=mean.reshape(K, D),
        theta_covariance=covariance.reshape(K, D, K, D)[np.arange(K), :, np.arange(K)],
        dof=dof,
        inverse_scale=inverse_scale,
    )
    tail = float(2 + np.median(draws["excess_dof"])) if component == "student_t" else 0.0
    people = None
    if problem.annotator_prior is not None:
        people = _annotators(guide, draws, problem.data.n_annotators, problem.data.n_outputs)
    return AdviMixturePosterior(
        prior=problem.prior,
        state=MixtureFactors(views, people),
        standard=problem.data.standard,
        information=None,
        guide=guide,
        kept=np.arange(K),
        component=component,
        tail=tail,
    )


def _annotators(guide: Guide, draws: dict[str, Array], U: int, C: int) -> AnnotatorState:
    """Gammas of the same moments, and the biases' normal (its covariance is averaged over outputs)."""
    shape, rate = match_gamma(draws["tau"])
    basis = truth.contrasts(U)
    mean, covariance = guide.marginal("bias")
    blocks = covariance.reshape(U - 1, C, U - 1, C)
    common = np.mean([blocks[:, c, :, c] for c in range(C)], axis=0)
    return AnnotatorState(shape, rate, basis @ mean.reshape(U - 1, C), basis @ common @ basis.T)


def _latent(predictions: ViewPredictions, labels: LabelSets, spec: GaussianLatent) -> _Task:
    from vbtta.infer.advi.continuous import LatentDensity

    problem, first = latent_problem(predictions, labels, spec, annotators=spec.noise == "annotator")
    return _Task(LatentDensity(problem, first), lambda guide: _latent_posterior(guide, problem), problem.unit_change)


def _latent_posterior(guide: Guide, problem: LatentProblem) -> AdviLatentPosterior:
    draws = guide.draw(N_DRAWS)
    K, C = problem.data.n_views, problem.data.n_outputs
    dof, inverse_scale = match_wishart(precision_draws(draws, problem.prior.inverse_scale))
    both = np.concatenate([draws["pool"], draws["offset"]], axis=1)  # (M, K + C)
    people = None if problem.annotator_prior is None else _annotators(guide, draws, problem.data.n_annotators, C)
    state = LatentState(
        both[:, :K].mean(axis=0),
        both[:, K:].mean(axis=0),
        dof[0],
        inverse_scale[0],
        people,
    )
    covariance = np.cov(both.T).reshape(K + C, K + C)
    return AdviLatentPosterior(
        state=state,
        standard=problem.data.standard,
        doubt=PoolDoubt.none(K),
        covariance=covariance,
        guide=guide,
        kept=np.arange(K),
    )


def _categorical(
    predictions: ViewPredictions, labels: LabelSets, spec: CategoricalMixture | CategoricalLatent
) -> _Task:
    from vbtta.infer.advi.categorical import CategoricalDensity, LatentClassDensity

    noise = spec.noise or label_noise.default_noise(labels)
    if isinstance(spec, CategoricalLatent):
        pool, _ = categorical_latent_problem(predictions, labels, spec, noise=noise)
        return _Task(LatentClassDensity(pool), lambda guide: _latent_class_posterior(guide, pool), 0.0)
    problem, _ = categorical_problem(predictions, labels, spec, noise=noise)
    return _Task(CategoricalDensity(problem), lambda guide: _categorical_posterior(guide, problem), 0.0)


def _categorical_posterior(guide: Guide, problem: CategoricalProblem) -> AdviCategoricalPosterior:
    draws = guide.draw(N_DRAWS)
    K, C = problem.data.n_views, problem.data.n_classes
    calibration = Calibration(np.zeros(K), np.zeros(C))
    if problem.spec.calibrate:
        log_kappa = draws["log_kappa"][:, None] + draws["xi"]
        calibration = Calibration(log_kappa.mean(axis=0), draws["offset"].mean(axis=0))
    by_class = draws["class_weights"] if problem.spec.weights == "view_class" else None
    return AdviCategoricalPosterior(
        link=problem.spec.link,
        weights=weights_of(draws).mean(axis=0),
        class_weights=None if by_class is None else by_class.mean(axis=0).T,
        calibration=calibration,
        noise=problem.noise,
        noise_counts=_noise_counts(draws, problem.noise),
        named=problem.named,
        information=None,
        guide=guide,
        kept=np.arange(K),
    )


def _latent_class_posterior(guide: Guide, problem: LatentClassProblem) -> AdviLatentClassPosterior:
    draws = guide.draw(N_DRAWS)
    K = problem.data.n_views
    covariance = np.cov(draws["pool"].T).reshape(K, K)
    return AdviLatentClassPosterior(
        link=problem.spec.link,
        pool=draws["pool"].mean(axis=0),
        offset=draws["offset"].mean(axis=0),
        noise=problem.noise,
        noise_counts=_noise_counts(draws, problem.noise),
        named=problem.named,
        doubt=PoolDoubt.none(K)._replace(covariance=covariance),
        guide=guide,
        kept=np.arange(K),
    )


def _noise_counts(draws: dict[str, Array], noise: NoiseModel | None) -> Array | None:
    if noise is None:
        return None
    if noise.kind == "confusion":
        return match_dirichlet(draws["confusion"])
    return match_dirichlet(np.stack([draws["accuracy"], 1 - draws["accuracy"]], axis=-1))


def _ordinal(predictions: ViewPredictions, labels: LabelSets, spec: OrdinalMixture) -> _Task:
    from vbtta.infer.advi.ordered import OrdinalDensity

    if predictions.mean.shape[2] != 1:
        raise ValueError(
            f"task='ordinal' takes one score an input and view, (N, K, 1); got {predictions.mean.shape[2]} outputs. "
            "For class logits use their expected level, or task='classification'"
        )
    levels = tuple(spec.levels or ())
    position = class_positions(labels.value.reshape(len(labels)), len(levels), np.asarray(levels))
    values = np.asarray(predictions.mean[labels.instance], dtype=np.float64)  # (J, K, 1)
    units = score_of(values, within=False)
    density = OrdinalDensity(units.apply(values)[:, :, 0], position, labels.count, len(levels), spec)

    def finish(guide: Guide) -> Posterior:
        weights = guide.draw(N_DRAWS)["weights"].mean(axis=0)
        return OrdinalPosterior(guide, weights, np.arange(len(weights)), units, levels)

    return _Task(density, finish, 0.0)


def _ranking(predictions: ViewPredictions, labels: LabelSets, spec: RankingMixture) -> _Task:
    from vbtta.infer.advi.ordered import RankingDensity

    orders = labels.rankings(predictions.mean.shape[2])
    values = np.asarray(predictions.mean[labels.instance], dtype=np.float64)  # (J, K, L)
    units: Score = score_of(values, within=True)
    density = RankingDensity(units.apply(values), orders, labels.count, spec)

    def finish(guide: Guide) -> Posterior:
        weights = guide.draw(N_DRAWS)["weights"].mean(axis=0)
        return RankingPosterior(guide, weights, np.arange(len(weights)), units)

    return _Task(density, finish, 0.0)


def _own(predictions: ViewPredictions, labels: LabelSets, model: PyroModel, seed: int) -> _Task:
    from vbtta.infer.advi.categorical import CategoricalDensity
    from vbtta.infer.advi.continuous import MixtureDensity
    from vbtta.infer.advi.own import OwnDensity

    if isinstance(model.function, str):
        raise ValueError(f"the function of the model is known by its name only, {model.function!r}; pass it")
    if isinstance(model.views, CategoricalMixture):
        spec = replace(model.views, noise="none", weights="view")
        classes, _ = categorical_problem(predictions, labels, spec, noise="annotator")
        classes = replace(classes, noise=None, _last={})
        density = OwnDensity(model.function, CategoricalDensity(classes), seed)
        return _Task(density, lambda guide: _categorical_posterior(guide, classes), 0.0)
    views = replace(model.views or GaussianMixture(), noise="none", component="normal")
    problem, first = mixture_problem(predictions, labels, views, annotators=False)
    own = OwnDensity(model.function, MixtureDensity(problem, first, "normal"), seed)
    return _Task(own, lambda guide: _mixture_posterior(guide, problem, "normal"), problem.unit_change)
