"""The E-step of class labels under calibrated views: one pass over the data, in blocks (docs/method).

    P(c | x_i) = sum_k w_k P_k(c | x_i),   P_k the link of kappa_k f_ik + o

Without noise an instance's labels are independent: sum_c n_ic ln P(c | x_i), n_ic how often class c was given. With a
noise model they share a truth: ln sum_c e_ic P(c | x_i), e_ic the evidence of all labels for class c. Either way the
joint responsibility of view k and class c is q_ic w_k P_k(c) / P(c), with q_ic = n_ic or the truth's posterior.
With class weights w_kc, drawn towards common ones, the mixture is divided by its sum Z_i over the classes:

    ln prior = a sum_c sum_k w_k ln(w_kc / w_k),   w_kc and w at their mode

For a given w this is the Dirichlet(1 + a w) of each class, relative to its peak, which is at w itself; a is its
strength, in labels. (Were the density not divided by its peak, the joint mode would have all classes on one view: the
peak is highest there.) ln Z_i lies below its tangent in the weights, so each class's weights maximise
sum_k R_kc ln w_kc - B_kc w_kc, R the responsibilities and B the tangent's slopes: the bound cannot fall.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference.blocks import join, nodes, products
from vbtta.models.parts.calibration import Calibration, CalibrationSums
from vbtta.models.parts.class_data import CategoricalBlock
from vbtta.models.parts.gate import Lookup
from vbtta.models.parts.links import MAX_CURVATURE_CLASSES, Link, MixedViews, ViewScores, contract, view_proba

_MIN_SINGLE = 1e-35  # a probability in single precision
_MIN_NUMERATOR = 1e-150  # whose inverse's square is finite
_MAX_RATIO = 1e15  # of rho: a dropped view may explain a label that no other does


class Likelihood(NamedTuple):
    """What turns logits into responsibilities."""

    link: Link
    calibrate: bool
    offsets: bool  # whether class offsets are inferred
    calibration: Calibration
    weights: Array  # (K,): w, or exp E ln w; base weights where there is a gate
    class_weights: Array | None  # (K, C)
    gate: Lookup | None = None

    def gate_rows(self, block: CategoricalBlock, part: slice) -> Lookup | None:
        """The gate of a part of a block."""
        return None if self.gate is None else self.gate.rows(slice(block.first + part.start, block.first + part.stop))


class ViewSums(NamedTuple):
    """Additive statistics."""

    log_evidence: Array  # ()
    size: Array  # (): units, which are labels or, with a noise model, instances; (K,) with a gate, times exp(b . phi)/Z
    share: Array  # (K,): responsibilities of the views
    slope: Array  # (K,): sum of rho, rho_k a unit's probability under view k over that under the mixture
    information: Array  # (2K, 2K): sum of outer products of a unit's slopes in (w, kappa); zeros with class weights
    class_count: Array  # (C, K): responsibilities by class; (0, 0) without class weights
    class_load: Array  # (C, K): sum of P_k(c)/Z, the slope of ln Z; likewise
    feature_mass: Array  # (F,): sum of responsibilities times features; (0,) without a gate
    calibration: CalibrationSums


class ViewShares(NamedTuple):
    """Responsibilities of a block."""

    views: MixedViews
    total: Array  # (n,): Z, 1 without class weights
    target: Array  # (C, n): q
    size: Array  # (n,): number of labels or, with a noise model, the instance's weight
    log_evidence: Array  # (n,)


def run_pass(block: CategoricalBlock, likelihood: Likelihood, evidence: Array | None) -> tuple[ViewSums, Array | None]:
    """Statistics of a block's instances and, with a noise model, the truth's posterior (n, C)."""
    truth = None if evidence is None else np.empty_like(evidence)
    target = block.mass if evidence is None else evidence
    assert target is not None

    def part_sums(part: slice) -> ViewSums:
        noisy = truth is not None
        importance, gate = block.table.importance[part] if noisy else None, likelihood.gate_rows(block, part)
        shares = view_shares(block.logits(part), block.variances(part), likelihood, target[part].T, importance, gate)
        if truth is not None:
            truth[part] = shares.target.T
        return _sums(shares, likelihood, gate, noisy=noisy)

    sums: ViewSums = join(nodes(part_sums, block.parts))
    return sums, truth


def view_shares(
    logits: Array,
    variance: Array | None,
    likelihood: Likelihood,
    target: Array,
    importance: Array | None,
    gate: Lookup | None,
) -> ViewShares:
    """Responsibilities of a block: `target` (C, n) counts labels or, given weights (n,), holds their log evidence."""
    proba, inverse = view_proba(likelihood.link, logits, variance, likelihood.calibration)
    if likelihood.class_weights is None:
        joint, scale = proba, likelihood.weights[:, None] * inverse
        if gate is not None:
            scale *= np.exp(gate.offset)
    else:
        joint, scale = proba * likelihood.class_weights.T[:, :, None], inverse
    mixture = contract("ckn,kn->cn", joint, scale)
    if proba.itemsize == 4:
        np.maximum(mixture, _MIN_SINGLE, out=mixture)
    total = mixture.sum(axis=0) if likelihood.class_weights is not None else np.ones(mixture.shape[1])
    views = MixedViews(logits, variance, likelihood.calibration, proba, inverse, joint, scale, mixture)
    if importance is not None:
        top = target.max(axis=0)
        posterior = np.exp(target - top) * mixture
        norm = posterior.sum(axis=0)
        return ViewShares(views, total, posterior / norm, importance, importance * (top + np.log(norm / total)))
    size = target.sum(axis=0)
    log_evidence = (target * np.log(mixture)).sum(axis=0) - size * np.log(total)
    return ViewShares(views, total, target, size, log_evidence)


def _sums(shares: ViewShares, likelihood: Likelihood, gate: Lookup | None, *, noisy: bool) -> ViewSums:
    views, link = shares.views, likelihood.link
    (K, C), by_class = (len(views.proba[0]), len(views.proba)), likelihood.class_weights is not None
    ratio = (shares.target * shares.size if noisy else shares.target) / views.mixture  # (C, n)
    relative = contract("ckn,cn->kn", views.joint, ratio)
    share = views.scale * relative  # (K, n)
    class_count = class_load = np.zeros((0, 0))
    net_ratio, net, gross = ratio, share, share  # net of the normaliser's derivative, and the two's absolute sum
    if by_class:
        load = shares.size / shares.total
        class_count = np.einsum("ckn,kn,cn->ck", views.joint, views.scale, ratio)
        class_load = contract("ckn,kn->ck", views.proba, views.inverse * load)
        net_ratio = ratio - load
        net = views.scale * contract("ckn,cn->kn", views.joint, net_ratio)
        gross = 2 * share - net
    calibration = CalibrationSums(np.zeros(K), np.zeros(C), np.zeros(K), np.zeros((C, K)), np.zeros(C))
    by_kappa = None
    if likelihood.calibrate:
        scores = link.scores(views, net_ratio, net)
        calibration = _softmax_curvature(shares, share, scores, offsets=likelihood.offsets)
        if scores.by_utility is None:
            by_kappa = scores.by_kappa
        else:
            calibration = _averaged_curvature(calibration, scores.by_kappa, scores.by_utility, gross, link.information)
    slope, information = np.zeros(K), np.zeros((2 * K, 2 * K))
    size = shares.size.sum()
    if not by_class:
        relative *= views.inverse  # rho, summed over an instance's labels
        if gate is not None:  # base weights: rho times exp(b . phi) / Z
            factor = np.exp(gate.offset)
            relative *= factor
            size = factor @ shares.size
        np.minimum(relative, _MAX_RATIO, out=relative)
        slope = relative.sum(axis=1)
        if noisy:
            slopes = relative if by_kappa is None else np.concatenate([relative, by_kappa])
            slopes = slopes / np.sqrt(shares.size)
        else:
            slopes = _label_slopes(shares, likelihood.weights, gate, with_kappa=by_kappa is not None)
        information[: len(slopes), : len(slopes)] = products(slopes, slopes)
    return ViewSums(
        shares.log_evidence.sum(),
        size,
        share.sum(axis=1),
        slope,
        information,
        class_count,
        class_load,
        np.zeros(0) if gate is None else np.einsum("kn,fkn->f", share, gate.values),
        calibration,
    )


def _label_slopes(shares: ViewShares, weights: Array, gate: Lookup | None, *, with_kappa: bool) -> Array:
    """Slopes of every label's log probability in w and kappa, times the root of its count: (2K, j), or (K, j)."""
    views = shares.views
    label, instance = np.nonzero(shares.target)
    rho = views.proba[label, :, instance] * views.inverse[:, instance].T  # (j, K)
    rho /= views.mixture[label, instance][:, None]
    if gate is not None:
        rho *= np.exp(gate.offset[:, instance].T)
    np.minimum(rho, _MAX_RATIO, out=rho)
    slopes = [rho]
    if with_kappa:  # of a canonical link
        slopes.append(weights * rho * (views.logits[label, :, instance] - views.mean[:, instance].T))
    return np.asarray((np.concatenate(slopes, axis=1) * np.sqrt(shares.target[label, instance])[:, None]).T)


def _softmax_curvature(shares: ViewShares, share: Array, scores: ViewScores, *, offsets: bool) -> CalibrationSums:
    """The gradient, and as curvature sums of share times the covariance of (f, 1_c) under P_k."""
    # Offsets: of P_k's covariances over an instance's views the mixed one is taken, which is no smaller.
    views = shares.views
    square = contract("ckn,ckn->kn", views.weighted, views.logits) * views.inverse
    by_kappa, kappa = scores.by_kappa.sum(axis=1), (share * (square - views.mean**2)).sum(axis=1)
    if not offsets:
        C, K = views.proba.shape[:2]
        return CalibrationSums(by_kappa, np.zeros(C), kappa, np.zeros((C, K)), np.zeros(C))
    per_view = share * views.inverse
    mixed = views.expected(share)  # (C, n): sum_k share P_k
    cross = contract("ckn,kn->ck", views.weighted, per_view)
    cross -= contract("ckn,kn->ck", views.proba, per_view * views.mean)
    offset = mixed.sum(axis=1)
    if len(mixed) <= MAX_CURVATURE_CLASSES:
        offset = np.diag(offset) - products(mixed / np.maximum(shares.size, 1e-300), mixed)
    return CalibrationSums(by_kappa, scores.by_offset.sum(axis=1), kappa, cross, offset)


def _averaged_curvature(
    softmax: CalibrationSums, by_kappa: Array, by_utility: Array, gross: Array, information: float
) -> CalibrationSums:
    """The mean of the softmax's curvature times the link's relative information and the gradients' outer products."""
    factor, inverse = 0.5 * information, 1 / np.maximum(gross, 1e-300)  # (K, n)
    offset = factor * softmax.offset_curvature
    spread = 0.5 * np.einsum("ckn,kn->c", by_utility**2, inverse)
    return softmax._replace(
        kappa_curvature=factor * softmax.kappa_curvature + 0.5 * (by_kappa**2 * inverse).sum(axis=1),
        cross_curvature=factor * softmax.cross_curvature,
        offset_curvature=offset + (spread if offset.ndim == 1 else np.diag(spread)),
    )


def log_class_prior(class_weights: Array, common: Array, strength: float) -> float:
    """Log prior of the class weights (K, C) and the common ones (K,)."""
    inside = common > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(class_weights[inside]) - np.log(common[inside])[:, None]
    return float(strength * common[inside] @ ratio.sum(axis=1))


def update_class_weights(count: Array, load: Array, common: Array, strength: float) -> Array:
    """Class weights (K, C) from responsibilities and slopes, (C, K) each."""
    # w_kc = (R_kc + a w_k) / (B_kc + m_c), where m_c makes them sum to one: a root that Newton reaches from the left.
    # Denominators are kept as differences from the view's that starts at weight 1: where it has next to no
    # responsibility, B_kc + m_c would cancel to nothing.
    top = np.maximum(count + strength * common, 0)  # (C, K)
    top[top < _MIN_NUMERATOR] = 0
    positive = top > 0
    first = np.where(positive, top - load, -np.inf).argmax(axis=1)[:, None]
    gap = load - np.take_along_axis(load, first, axis=1) + np.take_along_axis(top, first, axis=1)
    base = np.where(positive, np.maximum(gap, top), 1.0)  # B_kc + m_c at the start; no less than the numerator
    shift = np.zeros((len(top), 1))
    for _ in range(200):
        weights = top / (base + shift)
        excess = weights.sum(axis=1, keepdims=True) - 1
        shift = shift + np.maximum(excess, 0) / (weights / (base + shift)).sum(axis=1, keepdims=True)
        if np.abs(excess).max() < 1e-14:
            break
    weights = top / (base + shift)
    return np.asarray((weights / weights.sum(axis=1, keepdims=True)).T)


def update_common_weights(class_weights: Array) -> Array:
    """Common weights (K,) at their mode given the class weights: proportional to the geometric means over classes."""
    inside = np.asarray((class_weights > 0).all(axis=1))
    level = np.where(inside, np.log(np.where(inside[:, None], class_weights, 1)).mean(axis=1), -np.inf)
    return np.asarray(special.softmax(level))
