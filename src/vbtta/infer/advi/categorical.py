"""Class labels: the mixture of calibrated views and the latent pool, as densities with z and the true class summed out.

Temperatures and offsets have the EM engine's priors, and are inferred here instead of put at their mode.
"""

__all__ = ["CategoricalDensity", "LatentClassDensity", "UnsupervisedDensity", "log_probabilities"]

import math
from typing import Any

import numpy as np

from vbtta._support.extras import require
from vbtta.infer.advi.continuous import PositiveNormal
from vbtta.infer.advi.densities import Sample, Units, Values, tensor
from vbtta.infer.categorical_data import CategoricalBlocks, CategoricalData
from vbtta.infer.categorical_latent import LatentClassProblem
from vbtta.infer.categorical_mixture import CategoricalProblem
from vbtta.infer.label_noise import NoiseModel
from vbtta.infer.probit import log_probit, log_probit_vjp
from vbtta.labels import Array

torch = require("torch", "advi")
dist = require("pyro.distributions", "advi")

_LOWEST = -600.0  # of a log probability


class ClassTensors:
    """Logits of labelled instances, and which labels are whose."""

    def __init__(self, data: CategoricalBlocks) -> None:
        assert isinstance(data, CategoricalData)  # the engine needs all of it at once
        parts = data.parts
        self.logits = tensor(
            np.concatenate([data.logits(part).transpose(1, 2, 0) for part in parts], axis=1)
        )  # (K, n, C)
        variances = [data.variances(part) for part in parts]
        self.variance = None
        if variances[0] is not None:
            found = [variance.transpose(1, 2, 0) for variance in variances if variance is not None]
            self.variance = tensor(np.concatenate(found, axis=1))
        table = data.table
        order = np.argsort(table.instance, kind="stable")
        self.instance = tensor(table.instance[order].astype(np.int64))
        self.label = tensor(table.label[order].astype(np.int64))
        self.annotator = tensor(table.annotator[order].astype(np.int64))
        self.count = tensor(table.repeats[order])
        self.first = tensor(np.searchsorted(table.instance[order], np.arange(table.n_instances + 1)).astype(np.int64))
        self.n_annotators = table.n_annotators

    def labels_of_rows(self, rows: Units) -> tuple[Units, Any]:
        """The labels of some instances, and which of those instances each belongs to."""
        if isinstance(rows, slice) and rows == slice(None):
            return rows, self.instance
        rows = torch.arange(len(self.first) - 1)[rows]
        length = self.first[rows + 1] - self.first[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), length)
        offset = torch.arange(len(owner)) - torch.repeat_interleave(torch.cumsum(length, 0) - length, length)
        return self.first[rows][owner] + offset, owner


class _ClassDensity:
    """What mixture and pool share: label noise, and the sum over an instance's true class."""

    tensors: ClassTensors
    noise: NoiseModel | None
    _priors: dict[str, Any]

    def prior(self, sample: Sample) -> Values:
        """Draw every site."""
        return {name: sample(name, prior) for name, prior in self._priors.items()}

    def start(self) -> dict[str, Array]:
        """Uniform weights, nothing calibrated, everybody as good as the prior says."""
        return {}

    def log_mixture(self, values: Values, rows: Units) -> Any:
        """Log probabilities of the true classes: (..., n, C)."""
        raise NotImplementedError

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Sum over labels or, with a noise model, over instances of the log of a sum over the true class."""
        log_proba = self.log_mixture(values, units)  # (M, n, C)
        labels, owner = self.tensors.labels_of_rows(units)
        if self.noise is None:
            label, count = self.tensors.label[labels], self.tensors.count[labels]
            return (count * log_proba[..., owner, label]).sum(dim=-1)
        evidence = self._evidence(values, labels, owner, log_proba.shape[-2])
        return torch.logsumexp(evidence + log_proba, dim=-1).sum(dim=-1)

    def _evidence(self, values: Values, labels: Units, owner: Any, n: int) -> Any:
        """Sum over an instance's labels of ln A_u[c, y]: (M, n, C)."""
        assert self.noise is not None
        label, who = self.tensors.label[labels], self.tensors.annotator[labels]
        count = self.tensors.count[labels]
        C = self.noise.n_classes
        if self.noise.kind == "confusion":
            each = values["confusion"].log()[..., who, :, :]  # (M, j, C true, C given)
            each = each.gather(-1, label[:, None, None].expand(*each.shape[:-1], 1))[..., 0]
        else:
            accuracy = values["accuracy"][..., who]  # (M, j)
            right, wrong = accuracy.log(), torch.log1p(-accuracy) - math.log(C - 1)
            hit = torch.nn.functional.one_hot(label, C).to(torch.float64)  # (j, C)
            each = wrong[..., None] + (right - wrong)[..., None] * hit
        each = count[:, None] * each
        return torch.zeros(*each.shape[:-2], n, C, dtype=torch.float64).index_add(-2, owner, each)

    def _noise_priors(self) -> dict[str, Any]:
        if self.noise is None:
            return {}
        counts, U = tensor(self.noise.prior), self.tensors.n_annotators
        if self.noise.kind == "confusion":
            return {"confusion": dist.Dirichlet(counts.expand(U, *counts.shape), validate_args=False).to_event(2)}
        right, wrong = (counts[place].expand(U).clone() for place in (0, 1))
        return {"accuracy": dist.Beta(right, wrong, validate_args=False).to_event(1)}


class CategoricalDensity(_ClassDensity):
    """The mixture of calibrated views."""

    def __init__(self, problem: CategoricalProblem) -> None:
        spec, data = problem.spec, problem.data
        self.tensors, self.noise = ClassTensors(data), problem.noise
        self.spec = spec
        K, C = data.n_views, data.n_classes
        self.n_units, self.width = data.n_instances, K * C
        self._strength = spec.class_concentration
        self._n_classes = C
        concentration = 1.0 if spec.concentration is None else spec.concentration
        self._priors = {"weights": dist.Dirichlet(_full(concentration, K), validate_args=False)}
        if spec.calibrate:
            self._priors |= {
                "log_kappa": _normal(spec.kappa_scale),
                "xi": _normal(spec.xi_scale, K),
                "offset": _normal(spec.offset_scale, C),
            }
        self._priors |= self._noise_priors()

    def prior(self, sample: Sample) -> Values:
        """Draw every site; class weights are drawn around the common ones."""
        values = super().prior(sample)
        if self.spec.weights == "view_class":
            around = 1 + self._strength * values["weights"][..., None, :]
            around = around.expand(*around.shape[:-2], self._n_classes, around.shape[-1])
            values["class_weights"] = sample("class_weights", dist.Dirichlet(around, validate_args=False).to_event(1))
        return values

    def log_views(self, values: Values, rows: Units) -> Any:
        """Log probabilities of the classes under every view: (..., K, n, C)."""
        logits = self.tensors.logits[:, rows]
        if not self.spec.calibrate:
            kappa = torch.ones(values["weights"].shape, dtype=torch.float64)
            return log_probabilities(logits, self._variance(rows), kappa, None, self.spec.link)
        kappa = torch.exp(values["log_kappa"][..., None] + values["xi"])
        return log_probabilities(logits, self._variance(rows), kappa, values["offset"], self.spec.link)

    def log_mixture(self, values: Values, rows: Units) -> Any:
        """Ln sum_k w_k P_k(c), divided by its sum over the classes where weights are by class."""
        log_views = self.log_views(values, rows)
        if self.spec.weights == "view":
            return torch.logsumexp(values["weights"].log()[..., None, None] + log_views, dim=-3)
        by_class = values["class_weights"].log().transpose(-1, -2)[..., None, :]  # (..., K, 1, C)
        mixed = torch.logsumexp(by_class + log_views, dim=-3)
        return mixed - torch.logsumexp(mixed, dim=-1, keepdim=True)

    def _variance(self, rows: Units) -> Any:
        return None if self.tensors.variance is None else self.tensors.variance[:, rows]


class LatentClassDensity(_ClassDensity):
    """One weighted sum of the views' logits."""

    def __init__(self, problem: LatentClassProblem) -> None:
        spec, data = problem.spec, problem.data
        self.tensors, self.noise, self.link = ClassTensors(data), problem.noise, spec.link
        K, C = data.n_views, data.n_classes
        self.n_units, self.width = data.n_instances, K * C
        self._scale = _full(1 / math.sqrt(problem.shrinkage), K)
        self._priors = {
            "log_centre": _normal(spec.kappa_scale),
            "offset": _normal(spec.offset_scale, C),
            **self._noise_priors(),
        }

    def prior(self, sample: Sample) -> Values:
        """The pool lies around the share of a common inverse temperature."""
        values = super().prior(sample)
        centre = torch.exp(values["log_centre"])[..., None] / len(self._scale)
        centre = centre.expand(*centre.shape[:-1], len(self._scale))
        values["pool"] = sample("pool", PositiveNormal(centre, self._scale.expand(centre.shape)).to_event(1))
        return values

    def start(self) -> dict[str, Array]:
        """The plain average."""
        K = len(self._scale)
        return {"pool": np.full(K, 1 / K)}

    def log_mixture(self, values: Values, rows: Units) -> Any:
        """Log probabilities of the pooled utility: (M, n, C)."""
        pooled = torch.einsum("mk,knc->mnc", values["pool"], self.tensors.logits[:, rows])
        one = torch.ones(len(pooled), 1, dtype=torch.float64)
        variance = None
        if self.tensors.variance is not None:
            variance = torch.einsum("mk,knc->mnc", values["pool"] ** 2, self.tensors.variance[:, rows])[:, None]
        return log_probabilities(pooled[:, None], variance, one, values["offset"], self.link)[:, 0]


class UnsupervisedDensity:
    """Weights without labels: what the views, weighted, are sure of, and whether they agree.

        ln P(w) = ln Dirichlet(w) - sum_i [ H(p_i) + KL(m_i || p_i) ],   p_i = sum_k w_k P_k(. | x_i)

    H is the entropy of the weighted average, as in M. Zhang, S. Levine and C. Finn, "MEMO: test time robustness via
    adaptation and augmentation" (2022), there minimised in the network's parameters, here in the weights. Alone it
    would favour whichever view is most confident; the second term asks that views agree with the plain average m_i.
    """

    def __init__(self, logits: Array, concentration: float | None) -> None:
        log_proba = torch.log_softmax(tensor(logits).transpose(0, 1), dim=-1)  # (K, n, C)
        self._proba = torch.exp(log_proba)
        self._average = self._proba.mean(dim=0)  # (n, C): m
        self._entropy = _entropy(self._average)  # (n,)
        K, self.n_units, C = self._proba.shape
        self.width = K * C
        self._prior = dist.Dirichlet(_full(1.0 if concentration is None else concentration, K), validate_args=False)

    def prior(self, sample: Sample) -> Values:
        """The weights."""
        return {"weights": sample("weights", self._prior)}

    def start(self) -> dict[str, Array]:
        """Uniform weights."""
        return {}

    def log_likelihood(self, values: Values, units: Units) -> Any:
        """Minus entropy and disagreement of some instances: (M,)."""
        weighted = torch.einsum("mk,knc->mnc", values["weights"], self._proba[:, units])
        agreement = self._average[units] * torch.log(torch.clamp(weighted, min=1e-300))  # -KL(m || p) - H(m)
        return (self._entropy[units] + agreement.sum(dim=-1) - _entropy(weighted)).sum(dim=-1)


def _entropy(proba: Any) -> Any:
    return -(proba * torch.log(torch.clamp(proba, min=1e-300))).sum(dim=-1)


def log_probabilities(logits: Any, variance: Any, kappa: Any, offset: Any, link: str) -> Any:
    """Log class probabilities (..., K, n, C) of utilities kappa_k f_k + o."""
    utility = kappa[..., None, None] * logits
    if offset is not None:
        utility = utility + offset[..., None, None, :]
    if link == "softmax":
        return torch.log_softmax(utility, dim=-1)
    scale = torch.ones((), dtype=torch.float64)
    if variance is not None:
        scale = torch.sqrt(kappa[..., None, None] ** 2 * variance + 1)
    return torch.clamp(Probit.apply(utility, scale.expand(utility.shape)), min=_LOWEST)


class Probit(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Log probit probabilities with the exact gradient of their quadrature."""

    @staticmethod
    def forward(ctx: Any, mean: Any, scale: Any) -> Any:
        """Log probability that each utility is the largest; not a number where an ascent went astray."""
        ctx.save_for_backward(mean, scale)
        ctx.astray = not bool(torch.isfinite(mean).all() and torch.isfinite(scale).all())
        if ctx.astray:
            return torch.full_like(mean, torch.nan)
        return torch.from_numpy(log_probit(mean.detach().numpy(), scale.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, Any]:
        """Gradients of the weighted sum."""
        mean, scale = ctx.saved_tensors
        if ctx.astray:
            return torch.zeros_like(mean), torch.zeros_like(scale)
        found = log_probit_vjp(mean.detach().numpy(), scale.detach().numpy(), cotangent.numpy())
        return torch.from_numpy(found.grad_mean), torch.from_numpy(found.grad_scale)


def _normal(scale: float, *shape: int) -> Any:
    width = _full(scale, *shape)
    return dist.Normal(torch.zeros_like(width), width, validate_args=False).to_event(len(shape))


def _full(value: float, *shape: int) -> Any:
    return torch.full(shape, float(value), dtype=torch.float64)
