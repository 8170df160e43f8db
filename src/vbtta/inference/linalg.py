"""Stacks of small symmetric matrices, and the divergences between the distributions they describe."""

from functools import cache
from typing import Any

import numpy as np
from scipy import special

from vbtta._support.matrices import cholesky
from vbtta._support.matrices import inverse as inverse_of
from vbtta.data.labels import Array

TAIL_DOF = 2.0  # degrees of freedom of Student t priors
_LN2, _LNPI = np.log(2.0), np.log(np.pi)


def inverse_and_log_det(matrix: Array) -> tuple[Array, Array]:
    """Inverse and log determinant of positive definite matrices (..., C, C)."""
    if matrix.shape[-1] == 1:
        return 1 / matrix, np.log(matrix[..., 0, 0])
    if matrix.shape[-1] == 2:
        first, second = matrix[..., 0, 0], matrix[..., 1, 1]
        size = np.sqrt(first) * np.sqrt(second)  # entries may be so large or small that their product is not finite
        correlation = matrix[..., 0, 1] / size
        left = np.maximum((1 - correlation) * (1 + correlation), 1e-16)
        inverse = np.empty(matrix.shape)
        inverse[..., 0, 0], inverse[..., 1, 1] = 1 / (first * left), 1 / (second * left)
        inverse[..., 0, 1] = inverse[..., 1, 0] = -correlation / (size * left)
        return inverse, np.log(first) + np.log(second) + np.log(left)
    inverse, log_det = inverse_of(matrix), np.linalg.slogdet(matrix)[1]
    if not np.isfinite(log_det).all():  # singular by rounding
        log_det = -np.linalg.slogdet(inverse)[1]
    return 0.5 * (inverse + np.swapaxes(inverse, -1, -2)), log_det


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
    c = np.arange(size)
    return np.asarray(
        special.digamma(0.5 * (np.asarray(dof)[..., None] - c)).sum(axis=-1) + size * _LN2 - log_det_inverse_scale
    )


def wishart_log_normaliser(dof: Array, log_det_inverse_scale: Array, size: int) -> Array:
    """Logarithm of what stands before |Lambda|^((nu-C-1)/2) exp(-tr(V Lambda)/2) in the density."""
    dof = np.asarray(dof)
    gamma = special.gammaln(0.5 * (dof[..., None] - np.arange(size))).sum(axis=-1)
    return np.asarray(0.5 * dof * (log_det_inverse_scale - size * _LN2) - 0.25 * size * (size - 1) * _LNPI - gamma)


def kl_wishart(dof: Array, inverse_scale: Array, prior_dof: float, prior_inverse_scale: Array) -> Array:
    """KL(Wishart(nu_k, V_k) || Wishart(nu, V)) for a stack of k."""
    size = inverse_scale.shape[-1]
    inverse, log_det = inverse_and_log_det(inverse_scale)
    prior_log_det = inverse_and_log_det(prior_inverse_scale)[1]
    trace = dof * (np.einsum("kcd,cd->k", inverse, prior_inverse_scale) - size)
    return np.asarray(
        wishart_log_normaliser(dof, log_det, size)
        - wishart_log_normaliser(np.asarray(prior_dof), prior_log_det, size)
        + 0.5 * (dof - prior_dof) * wishart_log_det(dof, log_det, size)
        + 0.5 * trace
    )


def kl_normal(mean: Array, covariance: Array, precision: float) -> Array:
    """KL(Normal(m, S) || Normal(0, I/precision)) for stacks (..., D) and (..., D, D)."""
    size = mean.shape[-1]
    trace = np.trace(covariance, axis1=-2, axis2=-1) + (mean**2).sum(axis=-1)
    log_det = inverse_and_log_det(covariance)[1] + size * np.log(precision)
    return np.asarray(0.5 * (precision * trace - size - log_det))


def student_log_density(square: Any, scale: float) -> Any:
    """Lower bound on E ln t(x) where E x^2 = square, elementwise; the t is a normal of unknown precision."""
    degrees = TAIL_DOF
    constant = special.gammaln(0.5 * (degrees + 1)) - special.gammaln(0.5 * degrees)
    return np.asarray(
        constant
        - 0.5 * np.log(degrees * np.pi * scale**2)
        - 0.5 * (degrees + 1) * np.log1p(square / (degrees * scale**2))
    )


def student_precision(square: Any, scale: float) -> Any:
    """E of the precision of that normal, elementwise: with it, the normal's quadratic is tangent to the bound."""
    return (TAIL_DOF + 1) / (TAIL_DOF * scale**2 + square)


def kl_gamma(shape: Array, rate: Array, prior_shape: float, prior_rate: float) -> Array:
    """KL(Gamma(a, b) || Gamma(a0, b0)), elementwise, with rates."""
    return np.asarray(
        (shape - prior_shape) * special.digamma(shape)
        - special.gammaln(shape)
        + special.gammaln(prior_shape)
        + prior_shape * (np.log(rate) - np.log(prior_rate))
        + shape * (prior_rate / rate - 1)
    )


def kl_dirichlet(counts: Array, prior: Array) -> Array:
    """KL(Dirichlet(a) || Dirichlet(b)) along the last axis."""
    total = counts.sum(axis=-1, keepdims=True)
    expected_log = special.digamma(counts) - special.digamma(total)
    log_normaliser = special.gammaln(total[..., 0]) - special.gammaln(counts).sum(axis=-1)
    log_prior_normaliser = special.gammaln(prior.sum(axis=-1)) - special.gammaln(prior).sum(axis=-1)
    return np.asarray(log_normaliser - log_prior_normaliser + ((counts - prior) * expected_log).sum(axis=-1))


@cache
def _lower_triangle(size: int) -> tuple[Array, Array, Array]:
    """Rows and columns of the entries, and which of them are on the diagonal."""
    rows, columns = np.tril_indices(size)
    return rows, columns, np.flatnonzero(rows == columns)


class Reader:
    """Takes a vector apart, piece by piece."""

    def __init__(self, vector: Array) -> None:
        self._vector = vector
        self._place = 0

    def __call__(self, *shape: int) -> Array:
        """The next piece, in a shape."""
        size = int(np.prod(shape))
        self._place += size
        return self._vector[self._place - size : self._place].reshape(shape)
