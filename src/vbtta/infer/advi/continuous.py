"""Continuous labels: the mixture of calibrated views and the latent pool, as densities.

    Lambda = T T^T,   T = V^-1/2 A,   A lower triangular: A_cc^2 ~ ChiSquared(nu - c), A_cd ~ Normal(0, 1)

is the Wishart of the EM engine (Bartlett's decomposition; V is diagonal), in parameters that are nearly normal.
"""

__all__ = ["LatentDensity", "MixtureDensity", "laplace_nodes"]

import math
from typing import Any, NamedTuple

import numpy as np

from vbtta._support.extras import require
from vbtta.infer.advi.densities import Sample, Units, Values, tensor
from vbtta.infer.advi.families import laplace_nodes
from vbtta.infer.latent import LatentState
from vbtta.infer.latent_fit import LatentProblem
from vbtta.infer.mixture import MixtureProblem
from vbtta.infer.mixture_posterior import MixtureFactors
from vbtta.infer.standard import ContinuousBlocks, ContinuousData
from vbtta.infer.truth import AnnotatorPrior, contrasts
from vbtta.labels import Array

torch = require("torch", "advi")
dist = require("pyro.distributions", "advi")

_LOG_2PI = math.log(2 * math.pi)


class Views(NamedTuple):
    """Calibrated views as a likelihood needs them; a leading axis of particles where there are any."""

    log_weights: Any  # (..., K)
    location: Any  # (..., K, n, C)
    factor: Any  # (..., K, C, C): T, lower triangular
    root: Any  # (K, n, C): Omega^1/2, or None


class ContinuousTensors:
    """Labelled instances in standard units, and which labels are whose."""

    def __init__(self, data: ContinuousBlocks) -> None:
        assert isinstance(data, ContinuousData)  # the engine needs all of it at once
        blocks = data.blocks
        self.mean = tensor(np.concatenate([block.mean for block in blocks], axis=2).transpose(1, 2, 0))  # (K, n, C)
        self.variance = None
        if blocks[0].variance is not None:
            variance = np.concatenate([block.variance for block in blocks if block.variance is not None], axis=2)
            self.variance = tensor(variance.transpose(1, 2, 0))
        self.value = tensor(np.concatenate([block.value for block in blocks], axis=1).T)  # (J, C)
        self.count = tensor(np.concatenate([block.repeats for block in blocks]))  # (J,)
        self.annotator = tensor(np.concatenate([block.annotator for block in blocks]))  # (J,)
        self.instance, self.first = _instances(data)  # (J,), and where the labels of each instance begin: (n + 1,)
        self.single = bool(len(self.instance) == self.mean.shape[1])

    def rows_of_labels(self, labels: Units) -> Units:
        """The instances of some labels."""
        return labels if self.single else self.instance[labels]

    def labels_of_rows(self, rows: Units) -> tuple[Units, Any]:
        """The labels of some instances, and which of those instances each belongs to."""
        if isinstance(rows, slice) and rows == slice(None):
            return rows, self.instance
        rows = torch.arange(len(self.first) - 1)[rows]
        length = self.first[rows + 1] - self.first[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), length)
        offset = torch.arange(len(owner)) - torch.repeat_interleave(torch.cumsum(length, 0) - length, length)
        return self.first[rows][owner] + offset, owner


class MixtureDensity:
    """The mixture of calibrated views, z and the truth summed out."""

    def __init__(self, problem: MixtureProblem, first: MixtureFactors, component: str) -> None:
        self.tensors = ContinuousTensors(problem.data)
        self.settings, self.component = problem.prior, component
        self.annotators = problem.annotator_prior
        K, C = problem.data.n_views, problem.data.n_outputs
        self.n_annotators = problem.data.n_annotators
        D = first.views.theta_mean.shape[1]
        self.n_units = problem.data.n_instances if self.annotators else len(self.tensors.count)
        self.width = K * C
        self._first = first
        self._inverse_root = tensor(1 / np.sqrt(np.diagonal(self.settings.inverse_scale)))  # (C,)
        self._contrasts = tensor(contrasts(self.n_annotators))
        self._root = None
        if self.settings.heteroscedastic and self.tensors.variance is not None:
            self._root = 1 / torch.sqrt(1 + self.tensors.variance / tensor(self.settings.residual_variance))
        concentration = 1.0 if self.settings.concentration is None else self.settings.concentration
        self._priors: dict[str, Any] = {
            "weights": dist.Dirichlet(_full(concentration, K), validate_args=False),
            "theta": _normal((K, D), self.settings.beta),
            **_wishart(self.settings.nu, (K,), C),
        }
        if component == "student_t":
            self._priors["excess_dof"] = dist.Gamma(_full(2.0), _full(0.1), validate_args=False)
        if self.annotators is not None:
            self._priors |= _annotators(self.annotators, self.n_annotators, C)
        self._nodes = None
        if component == "laplace" and C > 1:
            size, share = laplace_nodes()
            self._nodes = tensor(size), tensor(np.log(share))

    def prior(self, sample: Sample) -> Values:
        """Weights, calibration, precisions; degrees of freedom and annotators where modelled."""
        return {name: sample(name, prior) for name, prior in self._priors.items()}

    def start(self) -> dict[str, Array]:
        """Where EM starts: uniform weights, every view fitted to all labels."""
        views = self._first.views
        factor = np.linalg.cholesky(views.precision) / self._inverse_root.numpy()[:, None]
        return {"weights": np.full(len(views.weights), 1 / len(views.weights)), "theta": views.theta_mean} | _bartlett(
            factor
        )

    def views(self, values: Values, rows: Units) -> Views:
        """Calibrated views of some instances."""
        mean, theta = self.tensors.mean[:, rows], values["theta"]
        C = mean.shape[2]
        location = theta[..., -C:][..., None, :]
        gain = (1 + theta[..., :C])[..., None, :] if self.settings.affine else 1.0
        location = location + gain * mean
        root = None if self._root is None else self._root[:, rows]
        return Views(values["weights"].log(), location, self._factor(values), root)

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Sum over labels of ln sum_k w_k p_k(y), or over instances with the truth integrated out."""
        if self.annotators is not None:
            labels, owner = self.tensors.labels_of_rows(units)
            return shared_truth(self.views(values, units), values, self.tensors, labels, owner, self._contrasts).sum(
                dim=-1
            )
        views = self.views(values, self.tensors.rows_of_labels(units))
        each = self.log_components(views, self.tensors.value[units], values)
        mixed = torch.logsumexp(views.log_weights[..., None] + each, dim=-2)
        return (self.tensors.count[units] * mixed).sum(dim=-1)

    def log_components(self, views: Views, value: Any, values: Values) -> Any:
        """Log density of labels (j, C) under every view: (..., K, j)."""
        residual = value - views.location
        C = residual.shape[-1]
        constant = torch.log(torch.diagonal(views.factor, dim1=-2, dim2=-1)).sum(dim=-1)[..., None]  # (..., K, 1)
        if views.root is not None:
            residual = residual * views.root
            constant = constant + views.root.log().sum(dim=-1)
        if C == 1:
            distance = (residual[..., 0] * views.factor[..., 0]) ** 2
        else:
            distance = ((residual @ views.factor) ** 2).sum(dim=-1)
        if self.component == "student_t":
            dof = 2 + values["excess_dof"][..., None, None]
            constant = constant + torch.lgamma(0.5 * (dof + C)) - torch.lgamma(0.5 * dof)
            constant = constant - 0.5 * C * torch.log(math.pi * dof)
            return constant - 0.5 * (dof + C) * torch.log1p(distance / dof)
        if self.component == "laplace":
            return constant + self._log_laplace(distance, C)
        return constant - 0.5 * (C * _LOG_2PI + distance)

    def _log_laplace(self, distance: Any, n_outputs: int) -> Any:
        """Unit variance: exp(-sqrt 2 |r|) / sqrt 2; for several outputs the normal of exponential variance."""
        if self._nodes is None:
            return -0.5 * math.log(2) - torch.sqrt(2 * distance + 1e-24)
        size, log_share = self._nodes
        each = log_share - 0.5 * n_outputs * (_LOG_2PI + size.log()) - 0.5 * distance[..., None] / size
        return torch.logsumexp(each, dim=-1)

    def _factor(self, values: Values) -> Any:
        return _precision_factor(values, self._inverse_root)


class LatentDensity:
    """One weighted average of the views: v >= 0, an offset, one precision."""

    def __init__(self, problem: LatentProblem, first: LatentState) -> None:
        self.tensors = ContinuousTensors(problem.data)
        self.annotators = problem.annotator_prior
        K, C = problem.data.n_views, problem.data.n_outputs
        self.n_annotators = problem.data.n_annotators
        self.n_units = problem.data.n_instances if self.annotators else len(self.tensors.count)
        self.width = K * C
        self._first = first
        self._inverse_root = tensor(1 / np.sqrt(np.diagonal(problem.prior.inverse_scale)))
        self._contrasts = tensor(contrasts(self.n_annotators))
        self._priors: dict[str, Any] = {
            "pool": PositiveNormal(_full(1 / K, K), _full(1 / math.sqrt(problem.prior.shrinkage), K)).to_event(1),
            "offset": _normal((C,), problem.prior.beta),
            **_wishart(problem.prior.nu, (1,), C),
        }
        if self.annotators is not None:
            self._priors |= _annotators(self.annotators, self.n_annotators, C)

    def prior(self, sample: Sample) -> Values:
        """Pool, offset, precision, and annotators where modelled."""
        return {name: sample(name, prior) for name, prior in self._priors.items()}

    def start(self) -> dict[str, Array]:
        """The plain average."""
        factor = np.linalg.cholesky(self._first.precision) / self._inverse_root.numpy()[:, None]
        return {"pool": self._first.pool, "offset": self._first.offset} | _bartlett(factor[None])

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Sum over labels, or over instances with the truth integrated out."""
        rows = units if self.annotators is not None else self.tensors.rows_of_labels(units)
        pooled = torch.einsum("mk,knc->mnc", values["pool"], self.tensors.mean[:, rows])
        location = (pooled + values["offset"][:, None])[:, None]  # (M, 1, n, C)
        factor = _precision_factor(values, self._inverse_root)
        views = Views(torch.zeros(len(location), 1, dtype=torch.float64), location, factor, None)
        if self.annotators is not None:
            labels, owner = self.tensors.labels_of_rows(units)
            return shared_truth(views, values, self.tensors, labels, owner, self._contrasts).sum(dim=-1)
        residual = self.tensors.value[units] - location
        distance = ((residual @ factor) ** 2).sum(dim=-1)[:, 0]
        half_log_det = torch.log(torch.diagonal(factor, dim1=-2, dim2=-1)).sum(dim=-1)  # (M, 1)
        each = half_log_det - 0.5 * (residual.shape[-1] * _LOG_2PI + distance)
        return (self.tensors.count[units] * each).sum(dim=-1)


class PositiveNormal(dist.Normal):  # type: ignore[misc, name-defined]
    """A normal cut off at zero."""

    support = torch.distributions.constraints.positive

    def __init__(self, loc: Any, scale: Any, validate_args: Any = False) -> None:
        super().__init__(loc, scale, validate_args=False)
        self._log_mass = torch.special.log_ndtr(loc / scale)

    def log_prob(self, value: Any) -> Any:
        """The normal's, divided by its mass above zero."""
        return super().log_prob(value) - self._log_mass


def shared_truth(
    views: Views, values: Values, tensors: ContinuousTensors, labels: Units, owner: Any, basis: Any
) -> Any:
    """Log evidence of instances whose labels share a truth, y = t + d_u + noise: (M, n).

    Labels of an instance act as one of precision s = sum tau at their weighted mean; the truth integrates out.
    """
    value, who, count = tensors.value[labels], tensors.annotator[labels], tensors.count[labels]
    tau = values["tau"][..., who]  # (M, j)
    bias = basis @ values["bias"]  # (M, U, C)
    shifted = value - bias[..., who, :]  # (M, j, C)
    n, C = views.location.shape[-2:]
    weight = tau * count
    total = _sum_by(owner, weight[..., None], n)[..., 0]  # (M, n): s
    centre = _sum_by(owner, weight[..., None] * shifted, n) / total[..., None]  # (M, n, C)
    squares = ((shifted - centre[..., owner, :]) ** 2).sum(dim=-1)
    constant = 0.5 * C * count * (tau.log() - _LOG_2PI) - 0.5 * weight * squares
    gap = centre[..., None, :, :] - views.location  # (M, K, n, C)
    strength = total[..., None, :]  # (M, 1, n)
    if C == 1:
        precision = views.factor[..., 0] ** 2  # (M, K, 1)
        if views.root is not None:
            precision = precision * views.root[..., 0] ** 2
        both = precision + strength
        each = 0.5 * (precision.log() - both.log() - gap[..., 0] ** 2 * precision * strength / both)
    else:
        factor = views.factor[..., None, :, :]  # (M, K, 1, C, C)
        if views.root is not None:
            factor = views.root[..., None] * factor
        matrix = factor @ factor.transpose(-1, -2)
        both = torch.linalg.cholesky(matrix + strength[..., None, None] * torch.eye(C, dtype=torch.float64))
        pulled = torch.cholesky_solve((matrix @ gap[..., None]), both)[..., 0]  # P^-1 L gap
        log_ratio = _log_diagonal(factor) - _log_diagonal(both)
        each = log_ratio - 0.5 * strength * (gap * pulled).sum(dim=-1)
    mixed = torch.logsumexp(views.log_weights[..., None] + each, dim=-2)
    return mixed + _sum_by(owner, constant[..., None], n)[..., 0]


def _precision_factor(values: Values, inverse_root: Any) -> Any:
    """T = V^-1/2 A: (..., K, C, C)."""
    root = values["chi_squared"].sqrt()
    C = root.shape[-1]
    if C == 1:
        return (inverse_root * root)[..., None]
    factor = torch.diag_embed(root)
    rows, columns = torch.tril_indices(C, C, -1)
    lower = torch.zeros_like(factor)
    lower[..., rows, columns] = values["lower"]
    return inverse_root[:, None] * (factor + lower)


def _bartlett(factor: Array) -> dict[str, Array]:
    """The sites of A (K, C, C)."""
    C = factor.shape[-1]
    sites = {"chi_squared": np.diagonal(factor, axis1=1, axis2=2) ** 2}
    if C > 1:
        sites["lower"] = factor[(slice(None), *np.tril_indices(C, -1))]
    return sites


def _wishart(nu: float, shape: tuple[int, ...], C: int) -> dict[str, Any]:
    degrees = (nu - torch.arange(C, dtype=torch.float64)).expand(*shape, C)
    priors = {"chi_squared": dist.Gamma(0.5 * degrees, torch.full_like(degrees, 0.5), validate_args=False).to_event()}
    if C > 1:
        priors["lower"] = _normal((*shape, C * (C - 1) // 2), 1.0)
    return priors


def _annotators(prior: AnnotatorPrior, U: int, C: int) -> dict[str, Any]:
    shape, rate = _full(prior.shape, U), _full(prior.rate, U)
    return {
        "tau": dist.Gamma(shape, rate, validate_args=False).to_event(1),
        "bias": _normal((U - 1, C), prior.gamma),
    }


def _normal(shape: tuple[int, ...], precision: float) -> Any:
    scale = _full(1 / math.sqrt(precision), *shape)
    return dist.Normal(torch.zeros_like(scale), scale, validate_args=False).to_event(len(shape))


def _full(value: float, *shape: int) -> Any:
    return torch.full(shape, float(value), dtype=torch.float64)


def _sum_by(owner: Any, values: Any, n: int) -> Any:
    """Sums (..., n, c) of values (..., j, c) by owner (j,)."""
    return torch.zeros(*values.shape[:-2], n, values.shape[-1], dtype=torch.float64).index_add(-2, owner, values)


def _log_diagonal(factor: Any) -> Any:
    return torch.log(torch.diagonal(factor, dim1=-2, dim2=-1)).sum(dim=-1)


def _instances(data: ContinuousData) -> tuple[Any, Any]:
    """The instance of every label, and the first label of every instance."""
    parts, n = [], 0
    for block in data.blocks:
        size = block.mean.shape[2]
        parts.append(n + (np.arange(size) if block.instance is None else block.instance))
        n += size
    instance = np.concatenate(parts)
    first = np.searchsorted(instance, np.arange(n + 1))
    return tensor(instance.astype(np.int64)), tensor(first.astype(np.int64))
