"""Class labels as a log density, given the probabilities of the true classes: label noise, and the sum over classes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.inference.guide import match_dirichlet
from vbtta.inference.unconstrained import Units, Values, tensor
from vbtta.models.parts.class_data import CategoricalBlocks, CategoricalData
from vbtta.models.parts.label_noise import FittedNoise, NoiseModel
from vbtta.models.parts.tensors import LabelTensors, PriorTable, index_ranges, joint, sum_by_instance


class ClassDensity(PriorTable, ABC):
    """Temperatures and offsets have the EM engine's priors. Here they are inferred, where EM takes their mode."""

    def __init__(self, data: CategoricalBlocks, noise: NoiseModel | None, priors: dict[str, Any]) -> None:
        self.tensors, self.noise = _tensors(data), noise
        self.n_units, self.width = data.n_instances, data.n_views * data.n_classes
        self.priors = priors
        if noise is not None:
            name, prior = NOISE_DENSITIES[noise.kind].prior(tensor(noise.prior), data.n_annotators)
            self.priors[name] = prior

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
        log_label = NOISE_DENSITIES[self.noise.kind].log_label
        each = log_label(values, self.tensors.annotator[labels], label, self.noise.n_classes)  # (M, j, C)
        evidence = sum_by_instance(count[:, None] * each, owner, log_proba.shape[-2])
        return torch.logsumexp(evidence + log_proba, dim=-1).sum(dim=-1)


class NoiseDensity(NamedTuple):
    """A kind of label noise: name and prior of its site, ln A_u[c, y] of labels, and counts of the same moments."""

    prior: Callable[[Tensor, int], tuple[str, Any]]  # from the prior counts of an annotator and the number of them
    log_label: Callable[[Values, Tensor, Tensor, int], Tensor]  # (M, j, C) from annotators (j,), labels (j,) and C
    counts: Callable[[dict[str, Array]], Array]  # (U, 2) or (U, C, C) from draws


def _accuracy_prior(counts: Tensor, n_annotators: int) -> tuple[str, Any]:
    right, wrong = (count.expand(n_annotators).clone() for count in counts)
    return "accuracy", joint(dist.Beta(right, wrong, validate_args=False))


def _accuracy_log_label(values: Values, annotator: Tensor, label: Tensor, n_classes: int) -> Tensor:
    accuracy = values["accuracy"][..., annotator]  # (M, j)
    right, wrong = accuracy.log(), torch.log1p(-accuracy) - math.log(n_classes - 1)
    is_label = torch.nn.functional.one_hot(label, n_classes).to(torch.float64)  # (j, C)
    return wrong[..., None] + (right - wrong)[..., None] * is_label


def _accuracy_counts(draws: dict[str, Array]) -> Array:
    return match_dirichlet(np.stack([draws["accuracy"], 1 - draws["accuracy"]], axis=-1))


def _confusion_prior(counts: Tensor, n_annotators: int) -> tuple[str, Any]:
    matrices = counts.expand(n_annotators, *counts.shape)
    return "confusion", joint(dist.Dirichlet(matrices, validate_args=False))


def _confusion_log_label(values: Values, annotator: Tensor, label: Tensor, n_classes: int) -> Tensor:
    each = values["confusion"].log()[..., annotator, :, :]  # (M, j, C true, C given)
    return each.gather(-1, label[:, None, None].expand(*each.shape[:-1], 1))[..., 0]


def _confusion_counts(draws: dict[str, Array]) -> Array:
    return match_dirichlet(draws["confusion"])


_ACCURACY = NoiseDensity(_accuracy_prior, _accuracy_log_label, _accuracy_counts)
NOISE_DENSITIES = {
    "uniform": _ACCURACY,
    "annotator": _ACCURACY,
    "confusion": NoiseDensity(_confusion_prior, _confusion_log_label, _confusion_counts),
}


def fitted_noise(draws: dict[str, Array], noise: NoiseModel | None) -> FittedNoise | None:
    """The label noise with the moments of draws."""
    return None if noise is None else FittedNoise(noise, NOISE_DENSITIES[noise.kind].counts(draws))


def _tensors(data: CategoricalBlocks) -> LabelTensors:
    assert isinstance(data, CategoricalData)  # ADVI needs all data in memory
    variances = [data.variances(part) for part in data.parts]
    table = data.table
    order = np.argsort(table.instance, kind="stable")
    return LabelTensors(
        mean=_views_first([data.logits(part) for part in data.parts]),
        variance=None if data.variance is None else _views_first([part for part in variances if part is not None]),
        value=tensor(table.label[order]),
        annotator=tensor(table.annotator[order]),
        count=tensor(table.repeats[order]),
        **index_ranges(table.instance[order], table.n_instances),
        n_annotators=table.n_annotators,
    )


def _views_first(parts: list[Array]) -> Tensor:
    """Blocks (C, K, n) as one tensor (K, n, C)."""
    return tensor(np.concatenate([part.transpose(1, 2, 0) for part in parts], axis=1))
