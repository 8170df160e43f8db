"""What the log densities of all models share, in torch: labelled instances as tensors, priors, mixtures of scores."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.unconstrained import Sample, Units, Values, tensor


@dataclass(frozen=True)
class LabelTensors:
    """Labelled instances, and their labels in the order of the instances."""

    mean: Tensor  # (K, n, C)
    variance: Tensor | None  # (K, n, C)
    value: Tensor  # (J, C), or class positions (J,)
    annotator: Tensor  # (J,)
    count: Tensor  # (J,)
    instance: Tensor  # (J,)
    first: Tensor  # (n + 1,): where the labels of each instance begin
    n_annotators: int

    def rows_of_labels(self, labels: Units) -> Units:
        """The instances of some labels."""
        return labels if len(self.instance) == self.mean.shape[1] else self.instance[labels]

    def labels_of_rows(self, rows: Units) -> tuple[Units, Tensor]:
        """The labels of some instances, and the position in `rows` of the instance that each belongs to."""
        if isinstance(rows, slice) and rows == slice(None):
            return rows, self.instance
        rows = torch.arange(len(self.first) - 1)[rows]
        length = self.first[rows + 1] - self.first[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), length)
        offset = torch.arange(len(owner)) - torch.repeat_interleave(torch.cumsum(length, 0) - length, length)
        return self.first[rows][owner] + offset, owner


def index_ranges(instance: Array, n_instances: int) -> dict[str, Tensor]:
    """The instances (J,) of sorted labels, and where the labels of each instance begin, as fields of the tensors."""
    first = np.searchsorted(instance, np.arange(n_instances + 1))
    return {"instance": tensor(instance), "first": tensor(first)}


def sum_by_instance(values: Tensor, owner: Tensor, n: int) -> Tensor:
    """Sums (..., n, c) of values (..., j, c) over the labels of each instance; `owner` (j,)."""
    return torch.zeros(*values.shape[:-2], n, values.shape[-1], dtype=torch.float64).index_add(-2, owner, values)


class PriorTable:
    """A density whose sites have priors that do not depend on each other; others extend :meth:`prior`."""

    priors: dict[str, Any]  # distributions by site name

    def prior(self, sample: Sample) -> Values:
        """Sample every site."""
        return {name: sample(name, prior) for name, prior in self.priors.items()}

    def start(self) -> dict[str, Array]:
        """Start values of sites; the others start at their prior's mean."""
        return {}


class ScoreMixture(PriorTable, ABC):
    """A mixture of views that give scores, multiplied by slopes exp(common + xi_k); units are labels."""

    def __init__(
        self, score: Array, count: Array, concentration: float | None, common: str, common_scale: float, xi_scale: float
    ) -> None:
        self._score, self._count, self._common = tensor(score), tensor(count), common  # (K, J, ...), (J,)
        K, self.n_units = self._score.shape[:2]
        self.width = 4 * self._score[:, 0].numel()
        self.priors = {
            "weights": dirichlet(concentration, K),
            common: normal(common_scale),
            "xi": normal(xi_scale, K),
        }

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
    width = filled(scale, *shape)
    return joint(dist.Normal(torch.zeros_like(width), width, validate_args=False))


def joint(distribution: Any, dimensions: int | None = None) -> Any:
    """A distribution of whole arrays, from one of entries: over the last batch dimensions, or all of them."""
    return distribution.to_event(dimensions)


def filled(value: float, *shape: int) -> Tensor:
    """A tensor of doubles of one value."""
    return torch.full(shape, float(value), dtype=torch.float64)
