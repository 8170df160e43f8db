"""Log density of the mixture of calibrated views for ADVI; the view of each label is summed out."""

import math
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.advi import N_DRAWS, AdviTask, Guide, match_dirichlet
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.base import InMemory, Posterior
from vbtta.models.gaussian_mixture import em
from vbtta.models.gaussian_mixture.em import MixtureProblem
from vbtta.models.gaussian_mixture.posterior import MixtureState, SampledMixturePosterior
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.parts import tensors
from vbtta.models.parts.standard import SMALLEST_VARIANCE, scale_covariate
from vbtta.models.parts.tensors import GaussianDensity, Views


class MixtureDensity(GaussianDensity):
    """The mixture of calibrated views, with normal, Student-t or Laplace components."""

    def __init__(self, problem: MixtureProblem, first: MixtureState, component: str) -> None:
        settings, (K, D), C = problem.prior, first.theta_mean.shape, problem.data.n_outputs
        priors = {
            "weights": tensors.dirichlet(settings.concentration, K),
            "common": tensors.student(settings.common_scale, D),
            "deviation": tensors.normal(1 / math.sqrt(settings.beta), K, D),
            **tensors.wishart(settings.nu, K, C),
        }
        if settings.slope_scale:
            priors["scale_slope"] = tensors.normal(settings.slope_scale)
        if component == "student_t":
            priors["excess_dof"] = dist.Gamma(tensors.filled(2.0), tensors.filled(0.1), validate_args=False)
        self._features = None
        if problem.gate is not None:
            priors["slopes"] = tensors.normal(problem.gate.prior_scale, problem.gate.n_features)
            self._features = tensor(problem.gate.values)
        super().__init__(problem.data, settings.inverse_scale, problem.annotator_prior, priors)
        self.component, self._affine, self._first = component, settings.affine, first
        self._root = None
        if settings.heteroscedastic and self.tensors.variance is not None:
            self._root = 1 / torch.sqrt(1 + self.tensors.variance / tensor(settings.residual_variance))
        if component == "laplace" and C > 1:
            raise ValueError(f"component='laplace' is for one output; with {C} use 'normal' or 'student_t'")

    def start(self) -> dict[str, Array]:
        """EM's initial state: uniform weights, and every view calibrated on all labels."""
        K = len(self._first.weights)
        common = self._first.common_mean
        sites = {"weights": np.full(K, 1 / K), "common": common, "deviation": self._first.theta_mean - common}
        return sites | tensors.bartlett(self._first.precision, self.inverse_root)

    def views(self, values: Values, rows: Units) -> Views:
        """Calibrated views of some instances."""
        location, theta = self.tensors.mean[:, rows], values["common"][..., None, :] + values["deviation"]
        C = location.shape[2]
        if self._affine:
            location = (1 + theta[..., :C])[..., None, :] * location
        location = theta[..., -C:][..., None, :] + location
        root = None if self._root is None else self._root[:, rows]
        if "scale_slope" in values:
            covariate = tensor(scale_covariate(self.tensors.mean[:, rows].numpy(), 2))  # (K, n)
            tilt = torch.exp(-values["scale_slope"][..., None, None] * covariate)[..., None]
            root = tilt.expand(*tilt.shape[:-1], C) if root is None else root * tilt
        log_weights = tensors.log_view_weights(values, self._features, rows)
        return Views(log_weights, location, self.precision_factor(values), root)

    def calibrated(self, values: Values, rows: Units) -> dict[str, Tensor]:
        """Locations and standard deviations of the views, (n, K, C) each, for a user's own likelihood."""
        views = self.views(values, rows)
        covariance = torch.cholesky_inverse(views.factor)  # (K, C, C)
        scale = torch.diagonal(covariance, dim1=-2, dim2=-1).sqrt()[:, None]  # (K, 1, C)
        scale = scale.expand(views.location.shape) if views.root is None else scale / views.root
        return {"location": views.location.transpose(0, 1), "scale": scale.transpose(0, 1)}

    def log_components(self, views: Views, value: Tensor, values: Values) -> Tensor:
        """Log density of labels (j, C) under every view: (..., K, j)."""
        if self.component == "normal":
            return super().log_components(views, value, values)
        constant, distance = self.distances(views, value)
        C = value.shape[-1]
        if self.component == "student_t":
            dof = 2 + values["excess_dof"][..., None, None]
            constant = constant + torch.lgamma(0.5 * (dof + C)) - torch.lgamma(0.5 * dof)
            constant = constant - 0.5 * C * torch.log(math.pi * dof)
            return constant - 0.5 * (dof + C) * torch.log1p(distance / dof)
        return constant - 0.5 * math.log(2) - torch.sqrt(2 * distance + 1e-24)  # Laplace, unit variance


def pose(source: InMemory, spec: GaussianMixture, seed: int) -> AdviTask[Posterior]:
    """The density of a mixture and its posterior."""
    if spec.noise == "annotator" and spec.component != "normal":
        options = f"component={spec.component!r} with noise='annotator'"
        raise ValueError(f"{options} has no closed form; use noise='none', component='normal' or a PyroModel")
    return _task(source, spec)[1]


def pose_views(source: InMemory, spec: GaussianMixture) -> tuple[MixtureDensity, AdviTask[Posterior]]:
    """The priors and the posterior of the views, for a user's own likelihood."""
    return _task(source, replace(spec, noise="none", component="normal"))


def _task(source: InMemory, spec: GaussianMixture) -> tuple[MixtureDensity, AdviTask[Posterior]]:
    problem, first = em.pose(source, spec)
    if spec.component != "normal" and spec.v is None:
        problem, first = em.pose(source, replace(spec, v=_robust_variance(problem)))
    density = MixtureDensity(problem, first, spec.component)
    return density, AdviTask(density, lambda guide: _posterior(guide, problem, density), problem.unit_change)


def _robust_variance(problem: MixtureProblem) -> tuple[float, ...]:
    """Robust residual variance of a typical view, for the prior's v, in the labels' units: (C,)."""
    # Outliers inflate the mean square. As the prior mean, worth nu labels, it would keep components from being narrow.
    data = tensors.gaussian_tensors(problem.data)
    residual = (data.value - data.mean[:, data.instance]).numpy()  # (K, J, C)
    distance = np.abs(residual - np.median(residual, axis=1, keepdims=True))
    variance = np.median((np.median(distance, axis=1) / 0.6745) ** 2, axis=0)  # 0.6745: median |z| of N(0, 1)
    variance = np.clip(variance, SMALLEST_VARIANCE, problem.prior.residual_variance)
    return tuple(variance * problem.data.standard.scale**2)


def _posterior(guide: Guide, problem: MixtureProblem, density: MixtureDensity) -> SampledMixturePosterior:
    """The posterior as conjugate factors with the moments of the guide's draws."""
    draws = guide.draw(N_DRAWS)
    theta = draws["common"][:, None] + draws["deviation"]  # (M, K, D)
    K, D = theta.shape[1:]
    centred = theta - theta.mean(axis=0)
    weights, gate, information = draws["weights"].mean(axis=0), None, None
    if problem.gate is not None:
        gate, information = problem.gate.sampled(draws["weights"], draws["slopes"])
        weights = information.centre
    dof, inverse_scale = density.match_precision(draws)
    covariance = np.einsum("mkd,mke->kde", centred, centred) / (len(theta) - 1)
    common = draws["common"].mean(axis=0), np.zeros((D, D))  # its covariance is part of the one above
    slope = draws["scale_slope"].mean() if "scale_slope" in draws else np.zeros(())
    counts = match_dirichlet(draws["weights"])
    state = MixtureState(weights, counts, theta.mean(axis=0), covariance, *common, dof, inverse_scale, slope)
    if "excess_dof" in draws:
        state = state._replace(tail=2 + np.median(draws["excess_dof"]))
    people = None if problem.annotator_prior is None else tensors.annotator_state(guide, draws)
    return SampledMixturePosterior(
        prior=problem.prior,
        state=state._replace(annotators=people),
        standard=problem.data.standard,
        information=information,
        gate=gate,
        guide=guide,
        kept=np.arange(K),
        component=density.component,
    )
