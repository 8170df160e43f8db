"""Stacks of small symmetric matrices, and the divergences between the distributions they describe."""

import math
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from scipy import special

from vbtta.data.labels import Array

TAIL_DOF = 2.0  # degrees of freedom of Student t priors
TOO_LARGE = "numbers beyond the range of a float came up in the fit: rescale predictions and labels, weights too"


def check_covariance(matrix: Array) -> None:
    """Refuse matrices (..., C, C) that are not symmetric and positive semi-definite, beyond rounding."""
    scaled = matrix / max(np.abs(matrix).max(initial=0), 1e-300)
    asymmetry = np.abs(scaled - np.swapaxes(scaled, -1, -2)).max(initial=0)
    if asymmetry > 1e-6 or np.linalg.eigvalsh(scaled).min(initial=0) < -1e-6:
        raise ValueError("the matrix is not symmetric and positive semi-definite")


def check_positive(values: Array) -> None:
    """Refuse numbers that are not positive."""
    if not (values > 0).all():
        raise ValueError("numbers must be positive")


def check_not_negative(values: Array) -> None:
    """Refuse negative numbers."""
    if not (values >= 0).all():
        raise ValueError("numbers must not be negative")


def cholesky(matrix: Array) -> Array:
    """Cholesky factors (..., C, C); of matrices that rounding made indefinite, with the smallest ridge that helps."""
    if not np.isfinite(matrix).all():
        raise ValueError(TOO_LARGE)
    try:
        return np.asarray(np.linalg.cholesky(matrix))
    except np.linalg.LinAlgError:
        diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)  # (..., C)
        size = np.sqrt(np.maximum(diagonal, np.maximum(1e-24 * diagonal.max(axis=-1, keepdims=True), 1e-300)))
    unit = matrix / size[..., :, None] / size[..., None, :]
    for ridge in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):
        with suppress(np.linalg.LinAlgError):
            return np.asarray(size[..., :, None] * np.linalg.cholesky(unit + ridge * np.eye(matrix.shape[-1])))
    raise ValueError(TOO_LARGE)


def inverse(matrix: Array) -> Array:
    """Inverses of positive definite matrices (..., C, C), which rounding may have made singular."""
    root = np.linalg.inv(cholesky(matrix))
    return np.asarray(np.swapaxes(root, -1, -2) @ root)


def inverse_and_log_det(matrix: Array) -> tuple[Array, Array]:
    """Inverse and log determinant of positive definite matrices (..., C, C)."""
    if matrix.shape[-1] == 1:
        return 1 / matrix, np.log(matrix[..., 0, 0])
    if matrix.shape[-1] == 2:  # twice as fast as the factors below, where every instance has a matrix
        first, second = matrix[..., 0, 0], matrix[..., 1, 1]
        size = np.sqrt(first) * np.sqrt(second)  # entries may be so large or small that their product is not finite
        correlation = matrix[..., 0, 1] / size
        left = np.maximum((1 - correlation) * (1 + correlation), 1e-16)
        inverted = np.empty(matrix.shape)
        inverted[..., 0, 0], inverted[..., 1, 1] = 1 / (first * left), 1 / (second * left)
        inverted[..., 0, 1] = inverted[..., 1, 0] = -correlation / (size * left)
        return inverted, np.log(first) + np.log(second) + np.log(left)
    factor = cholesky(matrix)
    root = np.linalg.inv(factor)
    return np.swapaxes(root, -1, -2) @ root, 2 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)


def log_cholesky(matrix: Array) -> Array:
    """Cholesky factors with logarithms on the diagonal, the lower triangle in a row: (..., C(C+1)/2)."""
    if matrix.shape[-1] == 1:
        return np.asarray(0.5 * np.log(matrix[..., 0]))
    rows, columns, diagonal = _lower_triangle(matrix.shape[-1])
    vector = cholesky(matrix)[..., rows, columns]
    vector[..., diagonal] = np.log(vector[..., diagonal])
    return np.asarray(vector)


def from_log_cholesky(vector: Array, size: int) -> Array:
    """The positive definite matrices (..., C, C) of :func:`log_cholesky`'s vectors."""
    if size == 1:
        return np.asarray(np.exp(2 * np.clip(vector, -300, 300))[..., None])
    rows, columns, diagonal = _lower_triangle(size)
    entries = vector.copy()
    entries[..., diagonal] = np.exp(np.clip(vector[..., diagonal], -300, 300))
    factor = np.zeros((*vector.shape[:-1], size, size))
    factor[..., rows, columns] = entries
    return np.asarray(factor @ np.swapaxes(factor, -1, -2))


def wishart_log_det(dof: Array, log_det_inverse_scale: Array, size: int) -> Array:
    """E ln|Lambda| of Wishart(nu, V), V the inverse scale: sum_c digamma((nu + 1 - c)/2) + C ln 2 - ln|V|."""
    digammas = special.digamma(0.5 * (np.asarray(dof)[..., None] - np.arange(size)))
    return np.asarray(digammas.sum(axis=-1) + size * math.log(2) - log_det_inverse_scale)


def wishart_log_normaliser(dof: Array, log_det_inverse_scale: Array, size: int) -> Array:
    """Logarithm of what stands before |Lambda|^((nu-C-1)/2) exp(-tr(V Lambda)/2) in the density."""
    gamma = special.gammaln(0.5 * (np.asarray(dof)[..., None] - np.arange(size))).sum(axis=-1)
    constant = 0.25 * size * (size - 1) * math.log(math.pi)
    return np.asarray(0.5 * dof * (log_det_inverse_scale - size * math.log(2)) - constant - gamma)


def kl_wishart(dof: Array, inverse_scale: Array, prior_dof: float, prior_inverse_scale: Array) -> Array:
    """KL(Wishart(nu_k, V_k) || Wishart(nu, V)) for a stack of k."""
    size = inverse_scale.shape[-1]
    inverse, log_det = inverse_and_log_det(inverse_scale)
    prior_log_det = inverse_and_log_det(prior_inverse_scale)[1]
    trace = dof * ((inverse * prior_inverse_scale).sum(axis=(1, 2)) - size)
    return np.asarray(
        wishart_log_normaliser(dof, log_det, size)
        - wishart_log_normaliser(np.asarray(prior_dof), prior_log_det, size)
        + 0.5 * (dof - prior_dof) * wishart_log_det(dof, log_det, size)
        + 0.5 * trace
    )


def student_log_density(square: Any, scale: float) -> Any:
    """Lower bound on E ln t(x) where E x^2 = square, elementwise; the t is a normal of unknown precision."""
    degrees = TAIL_DOF
    constant = math.lgamma(0.5 * (degrees + 1)) - math.lgamma(0.5 * degrees) - 0.5 * math.log(degrees * math.pi)
    return constant - math.log(scale) - 0.5 * (degrees + 1) * np.log1p(square / _scaled(scale))


def student_precision(square: Any, scale: float) -> Any:
    """Expected precision of the normal in `student_log_density`, elementwise: its quadratic is tangent to the bound."""
    return (TAIL_DOF + 1) / (_scaled(scale) + square)


def _scaled(scale: float) -> float:
    """Degrees of freedom times the squared scale, within the range of numbers."""
    return TAIL_DOF * min(max(scale * scale, 1e-300), 1e300)


def kl_gamma(shape: Array, rate: Array, prior_shape: float, prior_rate: float) -> Array:
    """KL(Gamma(a, b) || Gamma(a0, b0)), elementwise, with rates."""
    normalisers = special.gammaln(prior_shape) - special.gammaln(shape)
    tilt = (shape - prior_shape) * special.digamma(shape) + shape * (prior_rate / rate - 1)
    return np.asarray(normalisers + tilt + prior_shape * (np.log(rate) - np.log(prior_rate)))


def kl_dirichlet(counts: Array, prior: Array) -> Array:
    """KL(Dirichlet(a) || Dirichlet(b)) along the last axis."""
    expected_log = special.digamma(counts) - special.digamma(counts.sum(axis=-1, keepdims=True))
    log_normaliser, log_prior_normaliser = (
        special.gammaln(table.sum(axis=-1)) - special.gammaln(table).sum(axis=-1) for table in (counts, prior)
    )
    return np.asarray(log_normaliser - log_prior_normaliser + ((counts - prior) * expected_log).sum(axis=-1))


@cache
def _lower_triangle(size: int) -> tuple[Array, Array, Array]:
    """Rows and columns of the entries, and which of them are on the diagonal."""
    rows, columns = np.tril_indices(size)
    return rows, columns, np.flatnonzero(rows == columns)


class Reader:
    """Takes a vector apart, piece by piece."""

    def __init__(self, vector: Array) -> None:
        self._rest = vector

    def __call__(self, *shape: int) -> Array:
        """The next piece, in a shape."""
        size = math.prod(shape)
        part, self._rest = self._rest[:size], self._rest[size:]
        return part.reshape(shape)
