"""The latent pool for continuous labels as a log density."""

import numpy as np
import pyro.distributions as dist
import torch

from vbtta.data.labels import Array
from vbtta.inference.advi import N_DRAWS, AdviTask, Guide
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.base import InMemory, Posterior
from vbtta.models.gaussian_latent import em
from vbtta.models.gaussian_latent.em import LatentProblem
from vbtta.models.gaussian_latent.posterior import LatentState, SampledLatentPosterior
from vbtta.models.gaussian_latent.spec import GaussianLatent
from vbtta.models.parts import tensors
from vbtta.models.parts.tensors import GaussianDensity, PositiveNormal, Views


class LatentDensity(GaussianDensity):
    """One weighted average of the views: v >= 0, an offset, one precision. It is a mixture of a single view."""

    def __init__(self, problem: LatentProblem, first: LatentState) -> None:
        settings, K, C = problem.prior, problem.data.n_views, problem.data.n_outputs
        pool = PositiveNormal(tensors.filled(1 / K, K), tensors.filled(settings.shrinkage**-0.5, K))
        priors = {
            "pool": dist.Independent(pool, 1),
            "offset": tensors.student(settings.offset_scale, C),
            **tensors.wishart(settings.nu, 1, C),
        }
        super().__init__(problem.data, settings.inverse_scale, problem.annotator_prior, priors)
        self._first, self._root = first, None
        if problem.scale.slope:
            log_omega = problem.scale.log_omega(self.tensors.mean.numpy().transpose(2, 0, 1))
            self._root = tensor(np.exp(0.5 * log_omega))[None, :, None].expand(1, -1, C)  # (1, n, C)

    def start(self) -> dict[str, Array]:
        """The plain average."""
        first = self._first
        return {"pool": first.pool, "offset": first.offset} | tensors.bartlett(first.precision[None], self.inverse_root)

    def views(self, values: Values, rows: Units) -> Views:
        """The average of some instances, as one view."""
        pooled = torch.einsum("mk,knc->mnc", values["pool"], self.tensors.mean[:, rows])
        location = (pooled + values["offset"][:, None])[:, None]  # (M, 1, n, C)
        root = None if self._root is None else self._root[:, rows]
        return Views(tensors.filled(0.0, len(location), 1, 1), location, self.precision_factor(values), root)


def pose(source: InMemory, spec: GaussianLatent, seed: int) -> AdviTask[Posterior]:
    """The density of a latent pool and its posterior."""
    problem, first = em.pose(source, spec)
    density = LatentDensity(problem, first)
    return AdviTask(density, lambda guide: _posterior(guide, problem, density), problem.unit_change)


def _posterior(guide: Guide, problem: LatentProblem, density: LatentDensity) -> SampledLatentPosterior:
    draws = guide.draw(N_DRAWS)
    K, C = problem.data.n_views, problem.data.n_outputs
    dof, inverse_scale = density.match_precision(draws)
    both = np.concatenate([draws["pool"], draws["offset"]], axis=1)  # (M, K + C)
    mean = both.mean(axis=0)
    people = None if problem.annotator_prior is None else tensors.annotator_state(guide, draws)
    return SampledLatentPosterior(
        state=LatentState(mean[:K], mean[K:], dof[0], inverse_scale[0], people, problem.scale.slope),
        standard=problem.data.standard,
        uncertainty=None,
        covariance=np.cov(both.T).reshape(K + C, K + C),
        guide=guide,
        kept=np.arange(K),
    )
