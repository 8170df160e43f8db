"""Continuous labels as a log density, given the views' locations and precisions.

    Lambda = T T^T,   T = V^-1/2 A,   A lower triangular: A_cc^2 ~ ChiSquared(nu - c), A_cd ~ Normal(0, 1)

is the Wishart distribution of the EM engine (Bartlett's decomposition; V is diagonal), in parameters that are nearly
normal.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.guide import Guide, match_gamma
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorState, contrasts
from vbtta.models.parts.standard import ContinuousBlocks, ContinuousData
from vbtta.models.parts.tensors import LabelTensors, PriorTable, filled, index_ranges, joint, normal, sum_by_instance

LOG_2PI = math.log(2 * math.pi)


class Views(NamedTuple):
    """Calibrated views; tensors have a leading axis of particles where there are any."""

    log_weights: Tensor  # (..., K)
    location: Tensor  # (..., K, n, C)
    factor: Tensor  # (..., K, C, C): T, lower triangular
    root: Tensor | None  # (K, n, C): Omega^1/2


class GaussianDensity(PriorTable, ABC):
    """A mixture of calibrated views with the view and, where annotators are modelled, the truth summed out."""

    def __init__(
        self,
        data: ContinuousBlocks,
        inverse_scale: Array,
        annotator_prior: AnnotatorPrior | None,
        priors: dict[str, Any],
    ) -> None:
        self.tensors = _tensors(data)
        U, C = data.n_annotators, data.n_outputs
        self.width = data.n_views * C
        self.n_units = len(self.tensors.count) if annotator_prior is None else data.n_instances
        self.inverse_root = tensor(1 / np.sqrt(np.diagonal(inverse_scale)))  # (C,)
        self.priors, self.basis = priors, None
        if annotator_prior is not None:
            shape, rate = filled(annotator_prior.shape, U), filled(annotator_prior.rate, U)
            self.priors["tau"] = joint(dist.Gamma(shape, rate, validate_args=False))
            self.priors["bias"] = normal(1 / math.sqrt(annotator_prior.gamma), U - 1, C)
            self.basis = tensor(contrasts(U))  # (U, U - 1)

    @abstractmethod
    def views(self, values: Values, rows: Units) -> Views:
        """Calibrated views of some instances."""

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Sum over labels of ln sum_k w_k p_k(y), or over instances with the truth integrated out: (M,)."""
        if self.basis is not None:
            return self._log_instances(values, units, values["tau"], self.basis @ values["bias"]).sum(dim=-1)
        views = self.views(values, self.tensors.rows_of_labels(units))
        each = self.log_components(views, self.tensors.value[units], values)
        mixed = torch.logsumexp(views.log_weights[..., None] + each, dim=-2)
        return (self.tensors.count[units] * mixed).sum(dim=-1)

    def log_components(self, views: Views, value: Tensor, values: Values) -> Tensor:
        """Log density of labels (j, C) under every view, normal here: (..., K, j)."""
        constant, distance = self.distances(views, value)
        return constant - 0.5 * (value.shape[-1] * LOG_2PI + distance)

    def distances(self, views: Views, value: Tensor) -> tuple[Tensor, Tensor]:
        """Half the log determinants of the precisions, and squared Mahalanobis distances of labels: (..., K, j)."""
        residual = value - views.location
        half_log_det = _log_diagonal(views.factor)[..., None]  # (..., K, 1)
        if views.root is not None:
            residual = residual * views.root
            half_log_det = half_log_det + views.root.log().sum(dim=-1)
        if value.shape[-1] == 1:
            return half_log_det, (residual[..., 0] * views.factor[..., 0]) ** 2
        return half_log_det, ((residual @ views.factor) ** 2).sum(dim=-1)

    def precision_factor(self, values: Values) -> Tensor:
        """T = V^-1/2 A: (..., K, C, C)."""
        root = values["chi_squared"].sqrt()
        C = root.shape[-1]
        if C == 1:
            return (self.inverse_root * root)[..., None]
        lower = torch.zeros(*root.shape, C, dtype=torch.float64)
        rows, columns = torch.tril_indices(C, C, -1)
        lower[..., rows, columns] = values["lower"]
        return self.inverse_root[:, None] * (torch.diag_embed(root) + lower)

    def _log_instances(self, values: Values, rows: Units, precision: Tensor, bias: Tensor) -> Tensor:
        """Log evidence of instances whose labels share a truth, y = t + d_u + noise: (M, n).

        The labels of an instance act as one of precision s = sum tau at their weighted mean; the truth integrates out.
        `precision` (M, U) and `bias` (M, U, C) are the annotators'.
        """
        views = self.views(values, rows)
        labels, owner = self.tensors.labels_of_rows(rows)
        annotator, count = self.tensors.annotator[labels], self.tensors.count[labels]
        tau = precision[..., annotator]  # (M, j)
        shifted = self.tensors.value[labels] - bias[..., annotator, :]  # (M, j, C)
        n, C = views.location.shape[-2:]
        weight = tau * count
        total = sum_by_instance(weight[..., None], owner, n)[..., 0]  # (M, n): s
        centre = sum_by_instance(weight[..., None] * shifted, owner, n) / total[..., None]  # (M, n, C)
        squares = ((shifted - centre[..., owner, :]) ** 2).sum(dim=-1)
        constant = 0.5 * C * count * (tau.log() - LOG_2PI) - 0.5 * weight * squares
        gap = centre[..., None, :, :] - views.location  # (M, K, n, C)
        strength = total[..., None, :]  # (M, 1, n)
        if C == 1:
            matrix = views.factor[..., 0] ** 2  # (M, K, 1)
            if views.root is not None:
                matrix = matrix * views.root[..., 0] ** 2
            both = matrix + strength
            each = 0.5 * (matrix.log() - both.log() - gap[..., 0] ** 2 * matrix * strength / both)
        else:
            factor = views.factor[..., None, :, :]  # (M, K, 1, C, C)
            if views.root is not None:
                factor = views.root[..., None] * factor
            matrix = factor @ factor.transpose(-1, -2)
            both = torch.linalg.cholesky(matrix + strength[..., None, None] * torch.eye(C, dtype=torch.float64))
            pulled = torch.cholesky_solve(matrix @ gap[..., None], both)[..., 0]  # P^-1 L gap
            log_ratio = _log_diagonal(factor) - _log_diagonal(both)
            each = log_ratio - 0.5 * strength * (gap * pulled).sum(dim=-1)
        mixed = torch.logsumexp(views.log_weights[..., None] + each, dim=-2)
        return mixed + sum_by_instance(constant[..., None], owner, n)[..., 0]


def wishart(nu: float, n_views: int, C: int) -> dict[str, Any]:
    """The priors of A's sites."""
    degrees = (nu - torch.arange(C, dtype=torch.float64)).expand(n_views, C)
    gamma = dist.Gamma(0.5 * degrees, torch.full_like(degrees, 0.5), validate_args=False)
    priors = {"chi_squared": joint(gamma)}
    if C > 1:
        priors["lower"] = normal(1.0, n_views, C * (C - 1) // 2)
    return priors


def bartlett(precision: Array, inverse_root: Tensor) -> dict[str, Array]:
    """The sites of A for precision matrices (K, C, C)."""
    factor = np.linalg.cholesky(precision) / inverse_root.numpy()[:, None]
    C = factor.shape[-1]
    sites = {"chi_squared": np.diagonal(factor, axis1=1, axis2=2) ** 2}
    if C > 1:
        sites["lower"] = factor[(slice(None), *np.tril_indices(C, -1))]
    return sites


def annotator_state(guide: Guide, draws: dict[str, Array]) -> AnnotatorState:
    """Annotators of the same moments; the covariance of their biases is averaged over outputs."""
    mean, covariance = guide.marginal("bias")
    contrast, C = draws["bias"].shape[1:]
    blocks = covariance.reshape(contrast, C, contrast, C)
    common = np.mean([blocks[:, c, :, c] for c in range(C)], axis=0)
    basis = contrasts(contrast + 1)
    return AnnotatorState(*match_gamma(draws["tau"]), basis @ mean.reshape(contrast, C), basis @ common @ basis.T)


def _tensors(data: ContinuousBlocks) -> LabelTensors:
    assert isinstance(data, ContinuousData)  # ADVI needs all data in memory
    blocks, n = data.blocks, 0
    instances, variances = [], []
    for block in blocks:
        size = block.mean.shape[2]
        instances.append(n + (np.arange(size) if block.instance is None else block.instance))
        variances += [] if block.variance is None else [block.variance]
        n += size
    return LabelTensors(
        mean=tensor(np.concatenate([block.mean for block in blocks], axis=2).transpose(1, 2, 0)),
        variance=tensor(np.concatenate(variances, axis=2).transpose(1, 2, 0)) if variances else None,
        value=tensor(np.concatenate([block.value for block in blocks], axis=1).T),
        annotator=tensor(np.concatenate([block.annotator for block in blocks])),
        count=tensor(np.concatenate([block.repeats for block in blocks])),
        **index_ranges(np.concatenate(instances), n),
        n_annotators=data.n_annotators,
    )


def _log_diagonal(factor: Tensor) -> Tensor:
    return torch.log(torch.diagonal(factor, dim1=-2, dim2=-1)).sum(dim=-1)
