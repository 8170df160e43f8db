"""Matrices that rounding made singular."""

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TOO_LARGE = "numbers beyond the range of a float came up in the fit: rescale predictions and labels to sizes near 1"


def cholesky(matrix: NDArray[Any]) -> NDArray[Any]:
    """Cholesky factors (..., C, C); of matrices that rounding made indefinite, with the smallest ridge that helps."""
    if not np.isfinite(matrix).all():
        raise ValueError(_TOO_LARGE)
    try:
        return np.asarray(np.linalg.cholesky(matrix))
    except np.linalg.LinAlgError:
        diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)  # (..., C)
        size = np.sqrt(np.maximum(diagonal, np.maximum(1e-24 * diagonal.max(axis=-1, keepdims=True), 1e-300)))
    unit = matrix / size[..., :, None] / size[..., None, :]
    for ridge in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):
        with suppress(np.linalg.LinAlgError):
            return np.asarray(size[..., :, None] * np.linalg.cholesky(unit + ridge * np.eye(matrix.shape[-1])))
    raise ValueError(_TOO_LARGE)


def inverse(matrix: NDArray[Any]) -> NDArray[Any]:
    """Inverses of positive definite matrices (..., C, C), which rounding may have made singular."""
    try:
        return np.asarray(np.linalg.inv(matrix))
    except np.linalg.LinAlgError:
        root = np.linalg.inv(cholesky(matrix))
        return np.asarray(np.swapaxes(root, -1, -2) @ root)
