r"""Delta-method variance of a view's outputs, from the derivative of a smooth network.

    g = Df Sigma Df^T

with Df the Jacobian of f at the mean of the draws and Sigma the covariance of the augmentation (docs/method,
"Delta method"). For a linear network it equals the variance over draws; for small noise it is close to it.
"""

__all__ = ["delta_variance", "noise_variance"]

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from vbtta._support.checks import missing_extra

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
        From a batch (B, ...) to outputs (B, C); rows must be independent, as in evaluation mode.
    centre : tensor (B, ...)
        Mean of the draws.
    draws : iterable of M tensors (B, ...)
        At least two.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> delta_variance(lambda batch: batch.sum(1, keepdim=True), x, [x - 1, x + 1])
    tensor([[8.]])
    """
    squares = [_jacobian_product(function, centre, draw - centre).double() ** 2 for draw in draws]  # (B, C) each
    if len(squares) < 2:
        raise ValueError(f"the delta method needs at least 2 draws of a view; got {len(squares)}. Raise draws=")
    return (torch.stack(squares).sum(0) / (len(squares) - 1)).to(centre.dtype)


def noise_variance(function: Callable[[Tensor], Tensor], centre: Tensor, std: float) -> Tensor:
    """Delta-method variance under independent normal noise, without draws: std^2 sum_d (df/dx_d)^2.

    Parameters
    ----------
    function, centre
        As in :func:`delta_variance`; the centre is the input without noise.
    std : float
        Standard deviation of the noise.

    Examples
    --------
    >>> noise_variance(lambda batch: 3 * batch, torch.ones(1, 1), 0.1)
    tensor([[0.0900]])
    """
    derivative: Any = torch.func.vjp(function, centre)
    outputs, vector_product = derivative
    columns = []
    for c in range(outputs.shape[1]):
        unit = torch.zeros_like(outputs)
        unit[:, c] = 1
        (gradient,) = vector_product(unit)  # row b holds the gradient of its own output c
        columns.append((gradient.double() ** 2).flatten(1).sum(1))
    return (std**2 * torch.stack(columns, dim=1)).to(centre.dtype)


def _jacobian_product(function: Callable[[Tensor], Tensor], centre: Tensor, change: Tensor) -> Tensor:
    """The Jacobian at `centre` times a change of the inputs: (B, C)."""
    with warnings.catch_warnings():  # the first derivative of a process warns about torch's own compiled rules
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        product: Any = torch.func.jvp(function, (centre,), (change,))
    tangent: Tensor = product[1]
    return tangent
