r"""Delta-method variance: what an augmentation's spread becomes on its way through a smooth network.

    g = Df Sigma Df^T

with Df the Jacobian of f at the mean of the draws and Sigma the covariance of the augmentation (docs/method,
"Delta method"). For a linear network it equals the variance over draws; for small noise it comes close.
"""

__all__ = ["delta_variance", "noise_variance"]

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from vbtta._support.extras import missing_extra

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise missing_extra("torch", "torch") from error


def delta_variance(function: Callable[[Tensor], Tensor], centre: Tensor, draws: Iterable[Tensor]) -> Tensor:
    """Delta-method variance from draws of an augmentation: sum_m (Df eps_m)^2 / (M - 1).

    One Jacobian-vector product a draw; the denominator is that of the variance over draws.

    Parameters
    ----------
    function : callable
        From a batch (B, ...) to outputs (B, C); rows must not influence each other, as in evaluation mode.
    centre : tensor (B, ...)
        Mean of the draws.
    draws : iterable of M tensors (B, ...)
        At least two.

    Returns
    -------
    tensor (B, C)

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> delta_variance(lambda batch: batch.sum(1, keepdim=True), x, [x - 1, x + 1])
    tensor([[8.]])
    """
    total: Tensor | None = None
    n_draws = 0
    for draw in draws:
        square = _push_forward(function, centre, draw - centre).double() ** 2  # (B, C)
        total = square if total is None else total + square
        n_draws += 1
    if total is None or n_draws < 2:
        raise ValueError(f"the delta method needs at least 2 draws of a view; got {n_draws}. Raise draws=")
    return (total / (n_draws - 1)).to(centre.dtype)


def noise_variance(function: Callable[[Tensor], Tensor], centre: Tensor, std: float) -> Tensor:
    """Delta-method variance under independent normal noise, without draws: std^2 sum_d (df/dx_d)^2.

    Parameters
    ----------
    function : callable
        From a batch (B, ...) to outputs (B, C); rows must not influence each other.
    centre : tensor (B, ...)
        The inputs without noise.
    std : float
        Standard deviation of the noise.

    Returns
    -------
    tensor (B, C)

    Examples
    --------
    >>> noise_variance(lambda batch: 3 * batch, torch.ones(1, 1), 0.1)
    tensor([[0.0900]])
    """
    pulled: Any = torch.func.vjp(function, centre)
    outputs, pull_back = pulled
    columns = []
    for c in range(outputs.shape[1]):
        only = torch.zeros_like(outputs)
        only[:, c] = 1
        (slope,) = pull_back(only)  # row b holds the gradient of its own output c
        columns.append((slope.double() ** 2).flatten(1).sum(1))
    return (std**2 * torch.stack(columns, dim=1)).to(centre.dtype)


def _push_forward(function: Callable[[Tensor], Tensor], centre: Tensor, change: Tensor) -> Tensor:
    """The Jacobian at `centre` times a change of the inputs: (B, C)."""
    with warnings.catch_warnings():
        # the first derivative of a process makes torch compile rules with an interface it warns about
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        pushed: Any = torch.func.jvp(function, (centre,), (change,))
    tangent: Tensor = pushed[1]
    return tangent
