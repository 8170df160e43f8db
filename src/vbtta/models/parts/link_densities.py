"""Class links in torch: log probabilities for ADVI, and probabilities for networks and their exports, by link name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbtta.models.parts.probit import log_probit, log_probit_vjp

_MIN_LOG_PROBABILITY = -600.0
_NODES, _REACH = 33, 8.0  # nodes and half-width (standard deviations) of the exported probit integral


class LinkDensity(NamedTuple):
    """A class link as functions of torch tensors."""

    log_probabilities: Callable[[Tensor, Tensor | None], Tensor]  # of utilities (..., C) and their variances
    probabilities: Callable[[Tensor], Tensor]  # of utilities (..., C), in operations that ONNX has


def log_probabilities(
    link: str, logits: Tensor, variance: Tensor | None, kappa: Tensor, offset: Tensor | None
) -> Tensor:
    """Log class probabilities (..., K, n, C) of utilities kappa_k f_k + o."""
    utility = kappa[..., None, None] * logits
    if offset is not None:
        utility = utility + offset[..., None, None, :]
    if variance is not None:
        variance = kappa[..., None, None] ** 2 * variance
    return LINK_DENSITIES[link].log_probabilities(utility, variance)


def class_probabilities(link: str, utility: Tensor) -> Tensor:
    """Class probabilities (..., C) of utilities without variances over draws; the operations can be exported."""
    return LINK_DENSITIES[link].probabilities(utility)


def _log_softmax(utility: Tensor, variance: Tensor | None) -> Tensor:
    return torch.log_softmax(utility, dim=-1)


def _softmax(utility: Tensor) -> Tensor:
    if utility.ndim < 5:
        return torch.softmax(utility, -1)
    return torch.softmax(utility.movedim(-1, 2), 2).movedim(2, -1)  # views of maps, stored (1, B, C, ...): no copy


def _log_probit(utility: Tensor, variance: Tensor | None) -> Tensor:
    scale = torch.ones((), dtype=torch.float64) if variance is None else torch.sqrt(variance + 1)
    log_proba: Tensor = _LogProbit.apply(utility, scale.expand(utility.shape))  # type: ignore[no-untyped-call]
    return torch.clamp(log_proba, min=_MIN_LOG_PROBABILITY)


class _LogProbit(torch.autograd.Function):
    """Log probit probabilities with the exact gradient of their quadrature."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Tensor) -> Tensor:
        """Log probability that each utility is the largest; NaN if any input is not finite."""
        ctx.save_for_backward(mean, scale)
        ctx.finite = bool(torch.isfinite(mean).all() and torch.isfinite(scale).all())
        if not ctx.finite:
            return torch.full_like(mean, torch.nan)
        return torch.from_numpy(log_probit(mean.detach().numpy(), scale.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Vector-Jacobian products for mean and scale."""
        mean, scale = ctx.saved_tensors
        if not ctx.finite:
            return torch.zeros_like(mean), torch.zeros_like(scale)
        gradient = log_probit_vjp(mean.detach().numpy(), scale.detach().numpy(), cotangent.numpy())
        return torch.from_numpy(gradient.grad_mean), torch.from_numpy(gradient.grad_scale)


def _probit(utility: Tensor) -> Tensor:
    """Probability that each normal utility of unit variance is the largest: (..., C)."""
    # The integral over the largest utility v of phi(v - u_c) prod_{i != c} Phi(v - u_i), by the trapezoid rule within 8
    # standard deviations of the largest mean.
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=utility.dtype, device=utility.device)
    gap = utility.amax(-1, keepdim=True)[..., None] + nodes - utility[..., None]  # (..., C, Q)
    below = (0.5 * (1 + torch.erf(gap * 0.5**0.5))).clamp_min(torch.finfo(utility.dtype).tiny)
    density = torch.exp(-0.5 * gap**2)
    log_below = below.log()
    total = (density * torch.exp(log_below.sum(-2, keepdim=True) - log_below)).sum(-1)
    return total / total.sum(-1, keepdim=True)


LINK_DENSITIES = {"softmax": LinkDensity(_log_softmax, _softmax), "probit": LinkDensity(_log_probit, _probit)}
