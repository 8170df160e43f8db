"""One pass of class labels under a pooled utility sum_k v_k f_ik + o: evidence, gradient and curvature.

With q the truth's posterior and F = (f, 1_c) the gradient of a canonical link is sum_i E_q F - E_P F, and the curvature
of the log evidence sum_i Cov_P F - Cov_q F: that of complete data, less that of the missing truths. Without noise
nothing is missing, and every label counts.
"""

from typing import NamedTuple

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference.blocks import join, nodes, products
from vbtta.models.parts.class_data import CategoricalBlock
from vbtta.models.parts.links import MAX_CURVATURE_CLASSES, Link, contract


class PoolCurvature(NamedTuple):
    """A curvature in (v, o)."""

    pool: Array  # (K, K)
    cross: Array  # (C, K)
    offset: Array  # (C, C), or its diagonal (C,) where classes are many

    def offset_eigenvalues(self) -> Array:
        """Of the offsets' part: (C,)."""
        return self.offset if self.offset.ndim == 1 else np.linalg.eigvalsh(self.offset)


class PoolSums(NamedTuple):
    """Additive statistics; derivatives are with respect to (v, o)."""

    log_evidence: Array  # ()
    gradient: Array  # (K + C,); zeros for offsets that are not inferred, in the curvatures too
    complete: PoolCurvature  # if the truth were known
    missing: PoolCurvature  # of the missing truths


def minus(one: PoolCurvature, other: PoolCurvature) -> PoolCurvature:
    """The difference of two curvatures."""
    return PoolCurvature(*(first - second for first, second in zip(one, other, strict=True)))


def run_pool_pass(
    block: CategoricalBlock,
    link: Link,
    pool: Array,
    offset: Array,
    evidence: Array | None,
    *,
    offsets: bool,
    scores: Array | None = None,
) -> tuple[PoolSums, Array | None]:
    """Statistics of a block's instances and, with a noise model, the truth's posterior (n, C).

    `offsets` says whether class offsets are inferred; `scores` (K + C, n) takes the gradients of the instances.
    """
    truth = None if evidence is None else np.empty_like(evidence)

    def part_sums(part: slice) -> PoolSums:
        logits, variance = block.logits(part), block.variances(part)
        utility, spread = _pooled(logits, variance, pool, offset)
        proba, inverse = link.proba(utility.copy(order="K"), spread)
        proba = proba * inverse  # in double precision, as all arrays (C, n) are
        if evidence is not None and truth is not None:
            log_evidence = evidence[part].T
            top = log_evidence.max(axis=0)
            posterior = np.exp(log_evidence - top) * proba
            norm = posterior.sum(axis=0)
            posterior /= norm
            truth[part] = posterior.T
            size = block.table.importance[part]
            total = (size * (top + np.log(norm))).sum()
            posterior *= size
        else:
            assert block.mass is not None
            posterior = block.mass[part].T
            size, total = posterior.sum(axis=0), (posterior * np.log(proba)).sum()
        in_utility, in_variance = link.gradient(utility.T, None if spread is None else spread.T, posterior.T)
        by_utility = in_utility.T  # (C, n)
        by_pool = contract("ckn,cn->kn", logits, by_utility)
        if in_variance is not None and variance is not None:
            by_pool += 2 * pool[:, None] * np.einsum("nc,ckn->kn", in_variance, variance)
        flat = _by_view(logits)
        complete = _covariance(logits, flat, proba * size, size, offsets=offsets)
        missing = PoolCurvature(*map(np.zeros_like, complete))
        if not link.canonical:  # the mean of a softmax's curvature and the gradients' outer products
            complete = _averaged(complete, by_pool, by_utility, size, link.information, offsets=offsets)
        elif truth is not None:
            missing = _covariance(logits, flat, posterior, size, offsets=offsets)
            if missing.offset.ndim == 1:  # the offsets' complete curvature is bounded by its diagonal
                missing = PoolCurvature(missing.pool, *map(np.zeros_like, missing[1:]))
        gradients = np.concatenate([by_pool, offsets * by_utility])
        if scores is not None:
            scores[:, part] = gradients
        return PoolSums(np.asarray(total), gradients.sum(axis=1), complete, missing)

    sums: PoolSums = join(nodes(part_sums, block.parts))
    return sums, truth


def pool_proba(link: Link, logits: Array, variance: Array | None, pool: Array, offset: Array) -> Array:
    """Class probabilities (C, n) of pooled logits (C, K, n)."""
    proba, inverse = link.proba(*_pooled(logits, variance, pool, offset))
    return proba * inverse


def _pooled(logits: Array, variance: Array | None, pool: Array, offset: Array) -> tuple[Array, Array | None]:
    """Pooled utilities, the largest of an instance 0, and their variances sum_k v_k^2 g_k: (C, n) each."""
    utility = contract("ckn,k->cn", logits, pool) + offset[:, None]
    utility -= utility.max(axis=0)
    return utility, None if variance is None else np.einsum("ckn,k->cn", variance, pool**2)


def _classes_last(logits: Array) -> bool:
    """Whether classes, not instances, are next to each other in memory."""
    return logits.strides[0] < logits.strides[2]


def _by_view(logits: Array) -> Array:
    """Logits (C, K, n) as (K, C n) or, where classes are last in memory, (K, n C)."""
    order = (1, 2, 0) if _classes_last(logits) else (1, 0, 2)
    return logits.transpose(order).reshape(logits.shape[1], -1)


def _covariance(logits: Array, flat: Array, proba: Array, size: Array, *, offsets: bool) -> PoolCurvature:
    """Sum over instances of the covariances of (f, 1_c) under proba / size, times size."""
    C, K, _ = logits.shape
    mean = contract("ckn,cn->kn", logits, proba)  # (K, n), times size
    inverse = 1 / np.maximum(size, 1e-300)
    weights = (proba.T if _classes_last(logits) else proba).reshape(-1).astype(flat.dtype, copy=False)
    pool = products(flat * weights, flat) - products(mean * inverse, mean)
    if not offsets:
        return PoolCurvature(pool, np.zeros((C, K)), np.zeros(C))
    cross = contract("ckn,cn->ck", logits, proba) - products(proba * inverse, mean)
    offset = proba.sum(axis=1)
    if C <= MAX_CURVATURE_CLASSES:
        offset = np.diag(offset) - products(proba * inverse, proba)
    return PoolCurvature(pool, cross, offset)


def _averaged(
    softmax: PoolCurvature, by_pool: Array, by_utility: Array, size: Array, information: float, *, offsets: bool
) -> PoolCurvature:
    """The mean of the softmax's curvature times the link's relative information and the gradients' outer products."""
    inverse = 0.5 / np.maximum(size, 1e-300)
    pool, cross, offset = (0.5 * information * part for part in softmax)
    pool = pool + products(by_pool * inverse, by_pool)
    if offsets:
        cross = cross + products(by_utility * inverse, by_pool)
        of_offsets = products(by_utility * inverse, by_utility)
        offset = offset + (of_offsets if offset.ndim == 2 else np.diagonal(of_offsets))
    return PoolCurvature(pool, cross, offset)
