"""The latent pool for class labels as a log density, with the true class summed out."""

import math

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.advi import N_DRAWS, AdviTask, Guide
from vbtta.inference.unconstrained import Sample, Units, Values
from vbtta.models.base import InMemory, Posterior
from vbtta.models.categorical_latent import em
from vbtta.models.categorical_latent.em import LatentClassProblem
from vbtta.models.categorical_latent.posterior import SampledLatentClassPosterior
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.models.parts.link_densities import log_probabilities
from vbtta.models.parts.tensors import ClassDensity, PositiveNormal, filled, fitted_noise, normal, student


class LatentClassDensity(ClassDensity):
    """One weighted sum of the views' logits."""

    def __init__(self, problem: LatentClassProblem) -> None:
        self.link = problem.spec.link
        self._scale = filled(1 / math.sqrt(problem.shrinkage), problem.data.n_views)
        priors = {"log_centre": student(problem.spec.kappa_scale)}
        if problem.spec.offset_scale:
            priors["offset"] = normal(problem.spec.offset_scale, problem.data.n_classes)
        super().__init__(problem.data, problem.noise, priors)

    def prior(self, sample: Sample) -> Values:
        """Sample every site; each view's weight has a prior around its share of a common inverse temperature."""
        values = super().prior(sample)
        centre = torch.exp(values["log_centre"])[..., None] / len(self._scale)
        centre = centre.expand(*centre.shape[:-1], len(self._scale))
        values["pool"] = sample("pool", dist.Independent(PositiveNormal(centre, self._scale.expand(centre.shape)), 1))
        return values

    def start(self) -> dict[str, Array]:
        """The plain average."""
        K = len(self._scale)
        return {"pool": np.full(K, 1 / K)}

    def log_proba(self, values: Values, rows: Units) -> Tensor:
        """Log probabilities of the pooled utility: (M, n, C)."""
        pooled = torch.einsum("mk,knc->mnc", values["pool"], self.tensors.mean[:, rows])
        kappa = torch.ones(len(pooled), 1, dtype=torch.float64)
        variance = None
        if self.tensors.variance is not None:
            variance = torch.einsum("mk,knc->mnc", values["pool"] ** 2, self.tensors.variance[:, rows])[:, None]
        return log_probabilities(self.link, pooled[:, None], variance, kappa, values.get("offset"))[:, 0]


def pose(source: InMemory, spec: CategoricalLatent, seed: int) -> AdviTask[Posterior]:
    """The density of a latent pool and its posterior."""
    problem, _ = em.pose(source, spec.without_difficulty())
    return AdviTask(LatentClassDensity(problem), lambda guide: _posterior(guide, problem))


def _posterior(guide: Guide, problem: LatentClassProblem) -> SampledLatentClassPosterior:
    draws = guide.draw(N_DRAWS)
    return SampledLatentClassPosterior(
        link=problem.spec.link,
        pool=draws["pool"].mean(axis=0),
        offset=draws["offset"].mean(axis=0) if "offset" in draws else np.zeros(problem.data.n_classes),
        noise=fitted_noise(draws, problem.noise),
        uncertainty=None,
        guide=guide,
        kept=np.arange(problem.data.n_views),
    )
