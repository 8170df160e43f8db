"""The mixture of calibrated views for class labels as a log density, with the view and the true class summed out."""

from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.advi import N_DRAWS, AdviTask, Guide, weights_of
from vbtta.inference.unconstrained import Density, Sample, Units, Values, tensor
from vbtta.models.base import InMemory, Posterior
from vbtta.models.categorical_mixture import em
from vbtta.models.categorical_mixture.em import CategoricalProblem
from vbtta.models.categorical_mixture.posterior import SampledCategoricalPosterior
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts import tensors
from vbtta.models.parts.gate import GateData
from vbtta.models.parts.label_noise import NoiseModel
from vbtta.models.parts.link_densities import log_probabilities
from vbtta.models.parts.links import Calibration
from vbtta.models.parts.tensors import ClassDensity, dirichlet, fitted_noise, normal, student


class CategoricalDensity(ClassDensity):
    """The mixture of calibrated views."""

    def __init__(self, problem: CategoricalProblem) -> None:
        self.spec = spec = problem.spec
        K, C = problem.data.n_views, problem.data.n_classes
        priors = {"weights": dirichlet(spec.concentration, K)}
        if spec.calibrate:
            priors |= {"log_kappa": student(spec.kappa_scale), "xi": normal(spec.xi_scale, K)}
        if spec.calibrate and spec.offset_scale:
            priors["offset"] = normal(spec.offset_scale, C)
        self._features = None
        if problem.gate is not None:
            priors["slopes"] = normal(problem.gate.prior_scale, problem.gate.n_features)
            self._features = tensor(problem.gate.values)
        super().__init__(problem.data, problem.noise, priors)

    def prior(self, sample: Sample) -> Values:
        """Sample every site; class weights have a prior around the common ones."""
        values = super().prior(sample)
        if self.spec.weights == "view_class":
            around = 1 + self.spec.class_concentration * values["weights"][..., None, :]
            around = around.expand(*around.shape[:-2], self.tensors.mean.shape[2], around.shape[-1])
            values["class_weights"] = sample("class_weights", dist.Dirichlet(around, validate_args=False).to_event(1))
        return values

    def log_views(self, values: Values, rows: Units) -> Tensor:
        """Log probabilities of the classes under every view: (..., K, n, C)."""
        logits, variance = self.tensors.mean[:, rows], self.tensors.variance
        if variance is not None:
            variance = variance[:, rows]
        if not self.spec.calibrate:
            return log_probabilities(self.spec.link, logits, variance, torch.ones_like(values["weights"]), None)
        kappa = torch.exp(values["log_kappa"][..., None] + values["xi"])
        return log_probabilities(self.spec.link, logits, variance, kappa, values.get("offset"))

    def calibrated(self, values: Values, rows: Units) -> dict[str, Tensor]:
        """Log probabilities of the classes, (n, K, C), for a user's own likelihood."""
        return {"log_proba": self.log_views(values, rows).transpose(0, 1)}

    def log_proba(self, values: Values, rows: Units) -> Tensor:
        """Ln sum_k w_k P_k(c), divided by its sum over the classes where weights are by class."""
        log_views = self.log_views(values, rows)
        if self.spec.weights != "view_class":
            log_weights = tensors.log_view_weights(values, self._features, rows)[..., None]
            return torch.logsumexp(log_weights + log_views, dim=-3)
        by_class = values["class_weights"].log().transpose(-1, -2)[..., None, :]  # (..., K, 1, C)
        return torch.log_softmax(torch.logsumexp(by_class + log_views, dim=-3), dim=-1)


class UnsupervisedDensity(Density):
    """Weights without labels, from the confidence of the weighted average and the agreement of the views.

        ln P(w) = ln Dirichlet(w) - sum_i [ H(p_i) + KL(m_i || p_i) ],   p_i = sum_k w_k P_k(. | x_i)

    H is the entropy, as in MEMO (Zhang, Levine and Finn 2022); the second term penalises distance from the average m_i.
    """

    def __init__(self, logits: Array, concentration: float | None) -> None:
        self._proba = torch.softmax(tensor(logits).transpose(0, 1), dim=-1)  # (K, n, C)
        self._average = self._proba.mean(dim=0)  # (n, C): m
        self._entropy = _entropy(self._average)  # (n,)
        K, self.n_units, C = self._proba.shape
        self.width = K * C
        self.priors = {"weights": dirichlet(concentration, K)}

    def log_likelihood(self, values: Values, units: Units) -> Tensor:
        """Minus entropy and disagreement of some instances: (M,)."""
        weighted = torch.einsum("mk,knc->mnc", values["weights"], self._proba[:, units])
        agreement = self._average[units] * torch.log(torch.clamp(weighted, min=1e-300))  # -KL(m || p) - H(m)
        return (self._entropy[units] + agreement.sum(dim=-1) - _entropy(weighted)).sum(dim=-1)


def _entropy(proba: Tensor) -> Tensor:
    return -(proba * torch.log(torch.clamp(proba, min=1e-300))).sum(dim=-1)


def pose(source: InMemory, spec: CategoricalMixture, seed: int) -> AdviTask[Posterior]:
    """The density of a mixture and its posterior."""
    return _task(em.pose(source, spec.without_difficulty())[0])[1]


def pose_views(source: InMemory, spec: CategoricalMixture) -> tuple[CategoricalDensity, AdviTask[Posterior]]:
    """The priors and the posterior of the views, for a user's own likelihood; labels keep their annotators."""
    problem, _ = em.pose(source, replace(spec, noise="annotator", weights="view", features="auto", difficulty=False))
    return _task(replace(problem, noise=None))


def pose_unsupervised(predictions: ViewPredictions, spec: CategoricalMixture) -> AdviTask[Posterior]:
    """The density of the views' agreement and confidence, without labels; `spec` has neither calibration nor noise."""
    density = UnsupervisedDensity(predictions.outputs, spec.concentration)
    return AdviTask(density, lambda guide: _posterior(guide, spec, predictions.outputs.shape[2], None, None))


def _task(problem: CategoricalProblem) -> tuple[CategoricalDensity, AdviTask[Posterior]]:
    density, C = CategoricalDensity(problem), problem.data.n_classes
    return density, AdviTask(density, lambda guide: _posterior(guide, problem.spec, C, problem.noise, problem.gate))


def _posterior(
    guide: Guide, spec: CategoricalMixture, n_classes: int, noise: NoiseModel | None, data: GateData | None
) -> SampledCategoricalPosterior:
    draws = guide.draw(N_DRAWS)
    weights, gate, information = weights_of(draws).mean(axis=0), None, None
    if data is not None:
        gate, information = data.sampled(draws["weights"], draws["slopes"])
        weights = information.centre
    calibration = Calibration(np.zeros(len(weights)), np.zeros(n_classes))
    if spec.calibrate:
        log_kappa = draws["log_kappa"][:, None] + draws["xi"]
        offset = draws["offset"].mean(axis=0) if spec.offset_scale else calibration.offset
        calibration = Calibration(log_kappa.mean(axis=0), offset)
    return SampledCategoricalPosterior(
        link=spec.link,
        weights=weights,
        class_weights=draws["class_weights"].mean(axis=0).T if spec.weights == "view_class" else None,
        calibration=calibration,
        noise=fitted_noise(draws, noise),
        information=information,
        gate=gate,
        guide=guide,
        kept=np.arange(len(weights)),
    )
