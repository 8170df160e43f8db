"""What the log densities of all models share, in torch: labels as tensors, priors, mixtures, noise, precisions."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.advi import Guide, match_dirichlet, match_gamma, match_wishart
from vbtta.inference.linalg import TAIL_DOF
from vbtta.inference.unconstrained import Density, Units, Values, tensor
from vbtta.models.parts.annotators import AnnotatorPrior, AnnotatorState, contrasts
from vbtta.models.parts.class_data import CategoricalBlocks, CategoricalData
from vbtta.models.parts.label_noise import FittedNoise, NoiseModel
from vbtta.models.parts.standard import ContinuousBlocks, ContinuousData

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class LabelTensors:
    """Labelled instances, and their labels in the order of the instances."""

    mean: Tensor  # (K, n, C)
    variance: Tensor | None  # (K, n, C)
    value: Tensor  # (J, C), or class positions (J,)
    annotator: Tensor  # (J,)
    count: Tensor  # (J,)
    instance: Tensor  # (J,)
    n_annotators: int

    @cached_property
    def first(self) -> Tensor:
        """Where the labels of each instance begin: (n + 1,)."""
        return torch.searchsorted(self.instance, torch.arange(self.mean.shape[1] + 1))

    def labels_of_rows(self, rows: Units) -> tuple[Units, Tensor]:
        """The labels of some instances, and the position in `rows` of the instance that each belongs to."""
        if isinstance(rows, slice) and rows == slice(None):
            return rows, self.instance
        rows = torch.arange(len(self.first) - 1)[rows]
        length = self.first[rows + 1] - self.first[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), length)
        offset = torch.arange(len(owner)) - torch.repeat_interleave(torch.cumsum(length, 0) - length, length)
        return self.first[rows][owner] + offset, owner


def sum_by_instance(values: Tensor, owner: Tensor, n: int) -> Tensor:
    """Sums (..., n, c) of values (..., j, c) over the labels of each instance; `owner` (j,)."""
    return torch.zeros(*values.shape[:-2], n, values.shape[-1], dtype=torch.float64).index_add(-2, owner, values)


class ScoreMixture(Density):
    """A mixture of views that give scores, multiplied by slopes exp(common + xi_k); units are labels."""

    def __init__(
        self, score: Array, count: Array, concentration: float | None, common: str, common_scale: float, xi_scale: float
    ) -> None:
        self._score, self._count, self._common = tensor(score), tensor(count), common  # (K, J, ...), (J,)
        K, self.n_units = self._score.shape[:2]
        self.width = 4 * self._score[:, 0].numel()
        self.priors = {"weights": dirichlet(concentration, K), common: normal(common_scale), "xi": normal(xi_scale, K)}

    def utility(self, values: Values, units: Units) -> Tensor:
        """Scores times slopes: (M, K, j, ...)."""
        score = self._score[:, units]
        slope = torch.exp(values[self._common][..., None] + values["xi"])
        return slope.reshape(*slope.shape, *(1,) * (score.ndim - 1)) * score

    @abstractmethod
    def log_views(self, values: Values, units: Units) -> Tensor:
        """Log probability of labels under every view: (M, K, j)."""

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Sum over labels of ln sum_k w_k P_k(y): (M,)."""
        mixed = torch.logsumexp(values["weights"].log()[..., None] + self.log_views(values, units), dim=-2)
        return (self._count[units] * mixed).sum(dim=-1)


class PositiveNormal(dist.Normal):
    """A normal truncated at zero."""

    support: Any = torch.distributions.constraints.positive

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        super().__init__(loc, scale, validate_args=False)
        self._log_mass: Tensor = torch.special.log_ndtr(loc / scale)

    def log_prob(self, value: Tensor) -> Tensor:
        """The normal's log density, minus the logarithm of its mass above zero."""
        log_density: Tensor = super().log_prob(value)  # type: ignore[no-untyped-call]
        return log_density - self._log_mass


def dirichlet(concentration: float | None, *shape: int) -> Any:
    """A symmetric Dirichlet prior; of concentration 1 where none is stated."""
    return dist.Dirichlet(filled(1.0 if concentration is None else concentration, *shape), validate_args=False)


def normal(scale: float, *shape: int) -> Any:
    """A normal prior around zero for a site of a shape."""
    return dist.Normal(filled(0.0, *shape), filled(scale, *shape), validate_args=False).to_event()


def student(scale: float, *shape: int) -> Any:
    """A prior with heavy tails around zero for a site of a shape."""
    return dist.StudentT(filled(TAIL_DOF, *shape), 0.0, scale, validate_args=False).to_event()


def filled(value: float, *shape: int) -> Tensor:
    """A tensor of doubles of one value."""
    return torch.full(shape, float(value), dtype=torch.float64)


def log_view_weights(values: Values, features: Tensor | None, rows: Units) -> Tensor:
    """Log weights (..., K, n) of some instances from features (F, K, N); (..., K, 1) where there are none."""
    base = values["weights"].log()[..., None]
    if features is None:
        return base
    return torch.log_softmax(base + torch.einsum("...f,fkn->...kn", values["slopes"], features[:, :, rows]), dim=-2)


class ViewsDensity(Density):
    """A density of views, whose likelihood a user's own may replace."""

    tensors: LabelTensors

    def calibrated(self, values: Values, rows: Units) -> dict[str, Tensor]:
        """Calibrated views of some instances, by their names in :class:`vbtta.models.pyro.density.PyroViews`."""
        raise NotImplementedError


class ClassDensity(ViewsDensity):
    """Temperatures and offsets have the EM engine's priors. Here they are inferred, where EM takes their mode."""

    def __init__(self, data: CategoricalBlocks, noise: NoiseModel | None, priors: dict[str, Any]) -> None:
        assert isinstance(data, CategoricalData)  # ADVI needs all data in memory
        self.tensors, self.noise, self._importance = _class_tensors(data), noise, tensor(data.whole.table.importance)
        self.n_units, self.width = data.n_instances, data.n_views * data.n_classes
        self.priors = priors
        if noise is not None:
            self._noise = NOISE_DENSITIES[noise.kind]
            self.priors[self._noise.site] = self._noise.prior(tensor(noise.prior), data.n_annotators)

    @abstractmethod
    def log_proba(self, values: Values, rows: Units) -> Tensor:
        """Log probabilities of the true classes: (M, n, C)."""

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Sum over labels or, with a noise model, over instances of the log of a sum over the true class: (M,)."""
        log_proba = self.log_proba(values, units)  # (M, n, C)
        labels, owner = self.tensors.labels_of_rows(units)
        label, count = self.tensors.value[labels], self.tensors.count[labels]
        if self.noise is None:
            return (count * log_proba[..., owner, label]).sum(dim=-1)
        annotator, site = self.tensors.annotator[labels], values[self._noise.site]
        log_label = self._noise.log_label(site, annotator, label, self.noise.n_classes)  # (M, j, C)
        importance = self._importance[units]
        evidence = sum_by_instance((count / importance[owner])[:, None] * log_label, owner, log_proba.shape[-2])
        return (importance * torch.logsumexp(evidence + log_proba, dim=-1)).sum(dim=-1)


class NoiseDensity(NamedTuple):
    """A kind of label noise."""

    site: str
    prior: Callable[[Tensor, int], Any]  # distribution of the site, from an annotator's prior counts and U
    log_label: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # ln A_u[c, y], (M, j, C): values, annotators, labels, C
    counts: Callable[[Array], Array]  # (U, 2) or (U, C, C) of the same moments as draws of the site


def _accuracy_log_label(accuracy: Tensor, annotator: Tensor, label: Tensor, n_classes: int) -> Tensor:
    share = accuracy[..., annotator]  # (M, j)
    right, wrong = share.log(), torch.log1p(-share) - math.log(n_classes - 1)
    is_label = torch.nn.functional.one_hot(label, n_classes).to(torch.float64)  # (j, C)
    return wrong[..., None] + (right - wrong)[..., None] * is_label


def _confusion_log_label(confusion: Tensor, annotator: Tensor, label: Tensor, n_classes: int) -> Tensor:
    log_matrix = confusion.log()[..., annotator, :, :]  # (M, j, C true, C given)
    return log_matrix.gather(-1, label[:, None, None].expand(*log_matrix.shape[:-1], 1))[..., 0]


_ACCURACY = NoiseDensity(
    site="accuracy",
    prior=lambda counts, U: dist.Beta(counts[0].repeat(U), counts[1].repeat(U), validate_args=False).to_event(),
    log_label=_accuracy_log_label,
    counts=lambda draws: match_dirichlet(np.stack([draws, 1 - draws], axis=-1)),
)
NOISE_DENSITIES = {
    "uniform": _ACCURACY,
    "annotator": _ACCURACY,
    "confusion": NoiseDensity(
        site="confusion",
        prior=lambda counts, U: dist.Dirichlet(counts.expand(U, *counts.shape), validate_args=False).to_event(),
        log_label=_confusion_log_label,
        counts=match_dirichlet,
    ),
}


def fitted_noise(draws: dict[str, Array], noise: NoiseModel | None) -> FittedNoise | None:
    """The label noise with the moments of draws."""
    if noise is None:
        return None
    density = NOISE_DENSITIES[noise.kind]
    return FittedNoise(noise, density.counts(draws[density.site]))


def _class_tensors(data: CategoricalData) -> LabelTensors:
    whole, table = data.whole, data.whole.table
    variances = [whole.variances(part) for part in whole.parts]
    return LabelTensors(
        mean=_views_first([whole.logits(part) for part in whole.parts]),
        variance=None if whole.variance is None else _views_first([part for part in variances if part is not None]),
        value=tensor(table.label),
        annotator=tensor(table.annotator),
        count=tensor(table.repeats),
        instance=tensor(table.instance),
        n_annotators=table.n_annotators,
    )


def _views_first(parts: list[Array]) -> Tensor:
    """Blocks (C, K, n) as one tensor (K, n, C)."""
    return tensor(np.concatenate([part.transpose(1, 2, 0) for part in parts], axis=1))


class Views(NamedTuple):
    """Calibrated views; tensors have a leading axis of particles where there are any."""

    log_weights: Tensor  # (..., K, n), or (..., K, 1) where they do not depend on the input
    location: Tensor  # (..., K, n, C)
    factor: Tensor  # (..., K, C, C): T, lower triangular
    root: Tensor | None  # (K, n, C): Omega^1/2


class GaussianDensity(ViewsDensity):
    """A mixture of calibrated views with the view and, where annotators are modelled, the truth summed out.

        Lambda = T T^T,   T = V^-1/2 A,   A lower triangular: A_cc^2 ~ ChiSquared(nu - c), A_cd ~ Normal(0, 1)

    is the Wishart distribution of the EM engine (Bartlett's decomposition; V is diagonal), in nearly normal parameters.
    """

    def __init__(
        self, data: ContinuousBlocks, inverse_scale: Array, annotators: AnnotatorPrior | None, priors: dict[str, Any]
    ) -> None:
        self.tensors, U, C = gaussian_tensors(data), data.n_annotators, data.n_outputs
        self.width = data.n_views * C
        self.n_units = len(self.tensors.count) if annotators is None else data.n_instances
        self.inverse_root = tensor(1 / np.sqrt(np.diagonal(inverse_scale)))  # (C,)
        self.priors, self.basis = priors, None
        if annotators is not None:
            shape, rate = filled(annotators.shape, U), filled(annotators.rate, U)
            self.priors["tau"] = dist.Gamma(shape, rate, validate_args=False).to_event()
            self.priors["bias"] = normal(1 / math.sqrt(annotators.gamma), U - 1, C)
            self.basis = tensor(contrasts(U))  # (U, U - 1)

    @abstractmethod
    def views(self, values: Values, rows: Units) -> Views:
        """Calibrated views of some instances."""

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Sum over labels of ln sum_k w_k p_k(y), or over instances with the truth integrated out: (M,)."""
        if self.basis is not None:
            return self._log_instances(values, units, values["tau"], self.basis @ values["bias"]).sum(dim=-1)
        data = self.tensors
        views = self.views(values, units if len(data.instance) == data.mean.shape[1] else data.instance[units])
        mixed = torch.logsumexp(views.log_weights + self.log_components(views, data.value[units], values), dim=-2)
        return (data.count[units] * mixed).sum(dim=-1)

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
        return half_log_det, ((residual @ views.factor) ** 2).sum(dim=-1)

    def precision_factor(self, values: Values) -> Tensor:
        """T = V^-1/2 A: (..., K, C, C)."""
        root = values["chi_squared"].sqrt()
        C = root.shape[-1]
        lower = torch.zeros(*root.shape, C, dtype=torch.float64)
        rows, columns = torch.tril_indices(C, C, -1)
        if C > 1:
            lower[..., rows, columns] = values["lower"]
        return self.inverse_root[:, None] * (torch.diag_embed(root) + lower)

    def match_precision(self, draws: dict[str, Array]) -> tuple[Array, Array]:
        """Degrees of freedom (K,) and inverse scales (K, C, C) of Wisharts with the moments of draws of Lambda."""
        factor = self.precision_factor({name: tensor(value) for name, value in draws.items()}).numpy()
        return match_wishart(factor @ np.swapaxes(factor, -1, -2))

    def _log_instances(self, values: Values, rows: Units, precision: Tensor, bias: Tensor) -> Tensor:
        """Log evidence of instances whose labels share a truth, y = t + d_u + noise: (M, n)."""
        # The labels of an instance act as one of precision s = sum tau at their weighted mean; the truth integrates
        # out. `precision` (M, U) and `bias` (M, U, C) are the annotators'.
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
            joint = matrix + strength
            log_normal = 0.5 * (matrix.log() - joint.log() - gap[..., 0] ** 2 * matrix * strength / joint)
        else:
            factor = views.factor[..., None, :, :]  # (M, K, 1, C, C)
            if views.root is not None:
                factor = views.root[..., None] * factor
            matrix = factor @ factor.transpose(-1, -2)
            joint = torch.linalg.cholesky(matrix + strength[..., None, None] * torch.eye(C, dtype=torch.float64))
            pulled = torch.cholesky_solve(matrix @ gap[..., None], joint)[..., 0]  # P^-1 L gap
            log_ratio = _log_diagonal(factor) - _log_diagonal(joint)
            log_normal = log_ratio - 0.5 * strength * (gap * pulled).sum(dim=-1)
        mixed = torch.logsumexp(views.log_weights + log_normal, dim=-2)
        return mixed + sum_by_instance(constant[..., None], owner, n)[..., 0]


def wishart(nu: float, n_views: int, C: int) -> dict[str, Any]:
    """The priors of A's sites."""
    degrees = (nu - torch.arange(C, dtype=torch.float64)).expand(n_views, C)
    priors = {"chi_squared": dist.Gamma(0.5 * degrees, filled(0.5, n_views, C), validate_args=False).to_event()}
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
    """Annotators of the same moments; the variance of their biases is averaged over outputs."""
    bias, (contrast, C) = guide.only("bias"), draws["bias"].shape[1:]
    blocks = (bias.factor @ bias.factor.T).reshape(contrast, C, contrast, C)
    common = np.mean([blocks[:, c, :, c] for c in range(C)], axis=0)
    basis = contrasts(contrast + 1)
    variance = np.einsum("uv,vw,uw->u", basis, common, basis)
    shape, rate = match_gamma(draws["tau"])  # the density has the truth integrated out
    return AnnotatorState(shape, rate, basis @ bias.mean.reshape(contrast, C), variance, variance, shape, variance)


def gaussian_tensors(data: ContinuousBlocks) -> LabelTensors:
    """Data with continuous labels, in standard units."""
    assert isinstance(data, ContinuousData)  # ADVI needs all data in memory
    blocks = data.blocks
    own = [np.arange(block.mean.shape[2]) if block.instance is None else block.instance for block in blocks]
    variances = [block.variance for block in blocks if block.variance is not None]
    return LabelTensors(
        mean=_views_first([block.mean for block in blocks]),
        variance=_views_first(variances) if variances else None,
        value=tensor(np.concatenate([block.value for block in blocks], axis=1).T),
        annotator=tensor(np.concatenate([block.annotator for block in blocks])),
        count=tensor(np.concatenate([block.repeats for block in blocks])),
        instance=tensor(np.concatenate([block.first + rows for block, rows in zip(blocks, own, strict=True)])),
        n_annotators=data.n_annotators,
    )


def _log_diagonal(factor: Tensor) -> Tensor:
    return torch.log(torch.diagonal(factor, dim1=-2, dim2=-1)).sum(dim=-1)
