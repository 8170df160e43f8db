"""One pass of class labels under a pooled utility sum_k v_k f_ik + o: evidence, gradient and curvature.

With q the truth's posterior and F = (f, 1_c) the gradient is sum_i E_q F - E_P F, and the curvature of the log
evidence sum_i Cov_P F - Cov_q F: what complete data would tell, less what is missing. Without noise nothing is
missing, and every label counts.
"""

__all__ = ["PoolSums", "pool_proba", "run_pool_pass"]

from typing import NamedTuple

import numpy as np

from vbtta.infer.blocks import join, nodes, products
from vbtta.infer.categorical_data import CategoricalBlock
from vbtta.infer.probit import log_probit, log_probit_vjp
from vbtta.labels import Array

_LOWEST = -600.0  # of a log probability
_FULL_CURVATURE = 128  # classes up to which the offsets' curvature is a matrix
_PROBIT_INFORMATION = 0.65  # half of what a probit of unit noise tells, relative to a softmax


class PoolSums(NamedTuple):
    """Additive statistics; derivatives are with respect to (v, o)."""

    log_evidence: Array  # ()
    gradient: Array  # (K + C,)
    complete: Array  # (K + C, K + C): curvature if the truth were known
    missing: Array  # (K + C, K + C)


def run_pool_pass(
    block: CategoricalBlock, link: str, pool: Array, offset: Array, evidence: Array | None
) -> tuple[PoolSums, Array | None]:
    """Statistics of a block's instances and, with a noise model, the truth's posterior (n, C)."""
    truth = None if evidence is None else np.empty_like(evidence)

    def one(part: slice) -> PoolSums:
        logits, variance = block.logits(part), block.variances(part)
        proba = pool_proba(logits, variance, link, pool, offset)
        if evidence is not None and truth is not None:
            found = evidence[part].T
            top = found.max(axis=0)
            posterior = np.exp(found - top) * proba
            norm = posterior.sum(axis=0)
            posterior /= norm
            truth[part] = posterior.T
            size, log_evidence = np.ones(len(norm)), float((top + np.log(norm)).sum())
        else:
            assert block.mass is not None
            posterior = block.mass[part].T
            size, log_evidence = posterior.sum(axis=0), float((posterior * np.log(proba)).sum())
        sums = _sums(logits, variance, link, pool, offset, proba, posterior, size, evidence is not None)
        return sums._replace(log_evidence=np.asarray(log_evidence))

    sums: PoolSums = join(nodes(one, block.parts))
    return sums, truth


def pool_proba(logits: Array, variance: Array | None, link: str, pool: Array, offset: Array) -> Array:
    """Class probabilities (C, n) of pooled logits (C, K, n)."""
    utility = np.einsum("ckn,k->cn", logits, pool) + offset[:, None]
    if link == "probit":
        log_proba = log_probit(np.ascontiguousarray(utility.T), _scale(variance, pool)).T
        return np.asarray(np.exp(np.maximum(log_proba, _LOWEST)))
    utility -= utility.max(axis=0)
    proba = np.exp(np.maximum(utility, _LOWEST, out=utility), out=utility)
    return np.asarray(proba / proba.sum(axis=0))


def _sums(
    logits: Array,
    variance: Array | None,
    link: str,
    pool: Array,
    offset: Array,
    proba: Array,
    posterior: Array,
    size: Array,
    noisy: bool,
) -> PoolSums:
    complete = _covariance(logits, proba * size, size)
    nothing = np.asarray(0.0)
    if link == "softmax":
        residual = posterior - proba * size  # (C, n)
        gradient = np.concatenate([np.einsum("ckn,cn->k", logits, residual), residual.sum(axis=1)])
        missing = _covariance(logits, posterior, size) if noisy else np.zeros_like(complete)
        if len(offset) > _FULL_CURVATURE:  # the offsets' complete curvature is bounded by its diagonal
            missing[len(pool) :] = missing[:, len(pool) :] = 0
        return PoolSums(nothing, gradient, complete, missing)
    utility = np.einsum("ckn,k->cn", logits, pool) + offset[:, None]
    scale = _scale(variance, pool)
    found = log_probit_vjp(np.ascontiguousarray(utility.T), scale, posterior.T)
    by_pool = np.einsum("nc,ckn->kn", found.grad_mean, logits)
    if variance is not None:
        by_pool += pool[:, None] * np.einsum("nc,ckn->kn", found.grad_scale / scale, variance)
    each = np.concatenate([by_pool, found.grad_mean.T])  # (K + C, n)
    complete = _PROBIT_INFORMATION * complete + 0.5 * products(each / np.maximum(size, 1e-300), each)
    return PoolSums(nothing, each.sum(axis=1), complete, np.zeros_like(complete))


def _covariance(logits: Array, proba: Array, size: Array) -> Array:
    """Sum over instances of the covariances of (f, 1_c) under proba / size, times size: (K + C, K + C)."""
    C, K, n = logits.shape
    flat = logits.transpose(1, 0, 2).reshape(K, C * n)
    mean = np.einsum("ckn,cn->kn", logits, proba)  # (K, n), times size
    inverse = 1 / np.maximum(size, 1e-300)
    result = np.empty((K + C, K + C))
    result[:K, :K] = products(flat * proba.reshape(-1), flat) - products(mean * inverse, mean)
    cross = np.einsum("ckn,cn->ck", logits, proba) - products(proba * inverse, mean)
    result[K:, :K], result[:K, K:] = cross, cross.T
    result[K:, K:] = np.diag(proba.sum(axis=1))
    if C <= _FULL_CURVATURE:
        result[K:, K:] -= products(proba * inverse, proba)
    return result


def _scale(variance: Array | None, pool: Array) -> Array | float:
    """Standard deviations of the pooled utilities, (n, C): s^2 = sum_k v_k^2 g_k + 1."""
    if variance is None:
        return 1.0
    return np.asarray(np.sqrt(np.einsum("ckn,k->nc", variance, pool**2) + 1))
