"""The E-step of class labels under calibrated views: one pass over the data, in blocks (docs/method).

    P(c | x_i) = sum_k w_k P_k(c | x_i),   P_k = softmax(kappa_k f_ik + o), or probit

Without noise an instance's labels are independent: sum_c n_ic ln P(c | x_i), n_ic how often class c was given. With a
noise model they share a truth: ln sum_c e_ic P(c | x_i), e_ic the evidence of all labels for class c. Either way the
joint responsibility of view k and class c is q_ic w_k P_k(c) / P(c), with q_ic = n_ic or the truth's posterior.
With class weights w_kc the mixture is divided by its sum Z_i over the classes.
"""

__all__ = ["Likelihood", "Sums", "ViewShares", "components", "run_pass", "utility_gradient", "view_shares"]

from typing import NamedTuple

import numpy as np

from vbtta.infer.blocks import join, nodes, products
from vbtta.infer.calibration import Calibration, CalibrationSums
from vbtta.infer.categorical_data import CategoricalBlock
from vbtta.infer.probit import log_probit, log_probit_vjp
from vbtta.labels import Array

_LOWEST = -600.0  # of a log probability: no product of a few underflows
_NEGLIGIBLE = 1e-12  # responsibility below which a view's probit gradient is not computed
_LARGEST = 1e15  # of rho: a dropped view may explain a label that no other does
_FULL_CURVATURE = 128  # classes up to which the offsets' curvature is a matrix


class Likelihood(NamedTuple):
    """What turns logits into responsibilities."""

    link: str
    calibrate: bool
    calibration: Calibration
    weights: Array  # (K,): w, or exp E ln w
    class_weights: Array | None  # (K, C)


class Sums(NamedTuple):
    """Additive statistics."""

    log_evidence: Array  # ()
    size: Array  # (): units, which are labels or, with a noise model, instances
    share: Array  # (K,): responsibilities of the views
    slope: Array  # (K,): sum of rho, rho_k a unit's probability under view k over that under the mixture
    information: Array  # (2K, 2K): sum of outer products of a unit's slopes in (w, kappa); zeros with class weights
    class_count: Array  # (C, K): the same by class; (0, 0) without class weights
    class_load: Array  # (C, K): sum of P_k(c)/Z, the slope of ln Z; likewise
    calibration: CalibrationSums


class ViewShares(NamedTuple):
    """Responsibilities of a block."""

    proba: Array  # (C, K, n): P_k(c), before division by its sum
    inverse: Array  # (K, n): one over that sum
    joint: Array  # (C, K, n): proba, times the class weights if any
    scale: Array  # (K, n): inverse, times the weights if they are not by class
    mixture: Array  # (C, n): sum_k w_k P_k(c)
    total: Array  # (n,): Z, 1 without class weights
    target: Array  # (C, n): q
    size: Array  # (n,): number of labels, or 1 with a noise model
    log_evidence: Array  # (n,)


def run_pass(block: CategoricalBlock, likelihood: Likelihood, evidence: Array | None) -> tuple[Sums, Array | None]:
    """Statistics of a block's instances and, with a noise model, the truth's posterior (n, C)."""
    truth = None if evidence is None else np.empty_like(evidence)
    target = block.mass if evidence is None else evidence
    assert target is not None

    def one(part: slice) -> Sums:
        logits, variance = block.logits(part), block.variances(part)
        shares = view_shares(logits, variance, likelihood, target[part].T, noisy=evidence is not None)
        if truth is not None:
            truth[part] = shares.target.T
        return _sums(shares, logits, variance, likelihood, noisy=evidence is not None)

    sums: Sums = join(nodes(one, block.parts))
    return sums, truth


def components(logits: Array, variance: Array | None, likelihood: Likelihood) -> tuple[Array, Array]:
    """Unnormalised probabilities of every class under every view, (C, K, n), and their sums' inverse (K, n)."""
    kappa = np.exp(likelihood.calibration.log_kappa)
    utility = logits * kappa[:, None]
    if likelihood.calibration.offset.any():
        utility += likelihood.calibration.offset[:, None, None]
    if likelihood.link == "probit":
        scale = _scale(variance, kappa)
        last = np.ascontiguousarray(utility.T)  # (n, K, C)
        log_proba = log_probit(last, 1.0 if scale is None else scale, out=last).T
        return np.exp(np.maximum(log_proba, _LOWEST)), np.ones(utility.shape[1:])
    np.maximum(utility, _LOWEST, out=utility)
    proba = np.exp(utility, out=utility)
    return proba, 1 / proba.sum(axis=0)


def view_shares(
    logits: Array, variance: Array | None, likelihood: Likelihood, target: Array, *, noisy: bool
) -> ViewShares:
    """Responsibilities of a block: `target` (C, n) counts labels or, if noisy, holds their log evidence."""
    proba, inverse = components(logits, variance, likelihood)
    if likelihood.class_weights is None:
        joint, scale = proba, likelihood.weights[:, None] * inverse
    else:
        joint, scale = proba * likelihood.class_weights.T[:, :, None], inverse
    mixture = np.einsum("ckn,kn->cn", joint, scale)
    total = mixture.sum(axis=0) if likelihood.class_weights is not None else np.ones(mixture.shape[1])
    if noisy:
        top = target.max(axis=0)
        found = np.exp(target - top) * mixture
        norm = found.sum(axis=0)
        size = np.ones(len(norm))
        return ViewShares(proba, inverse, joint, scale, mixture, total, found / norm, size, top + np.log(norm / total))
    size = target.sum(axis=0)
    log_evidence = (target * np.log(mixture)).sum(axis=0) - size * np.log(total)
    return ViewShares(proba, inverse, joint, scale, mixture, total, target, size, log_evidence)


def _sums(shares: ViewShares, logits: Array, variance: Array | None, likelihood: Likelihood, *, noisy: bool) -> Sums:
    by_class = likelihood.class_weights is not None
    ratio = shares.target / shares.mixture  # (C, n)
    relative = np.einsum("ckn,cn->kn", shares.joint, ratio)
    share = shares.scale * relative  # (K, n)
    class_count = class_load = np.zeros((0, 0))
    net_ratio, net = ratio, share  # what the labels say, less what the normaliser takes back
    gross = share
    if by_class:
        load = shares.size / shares.total
        class_count = np.einsum("ckn,kn,cn->ck", shares.joint, shares.scale, ratio)
        class_load = np.einsum("ckn,kn->ck", shares.proba, shares.inverse * load)
        net_ratio = ratio - load
        net = shares.scale * np.einsum("ckn,cn->kn", shares.joint, net_ratio)
        gross = 2 * share - net
    calibration, mean, by_kappa = _no_calibration(likelihood), None, None
    if likelihood.calibrate:
        weighted = shares.proba * logits  # (C, K, n)
        mean = weighted.sum(axis=0) * shares.inverse  # (K, n): E_k f
        calibration = _softmax_curvature(shares, logits, weighted, mean, share)
        if likelihood.link == "softmax":
            product = weighted if likelihood.class_weights is None else shares.joint * logits
            found = np.einsum("ckn,cn->kn", product, net_ratio) * shares.scale
            by_kappa = found - net * mean  # (K, n)
            mixed = np.einsum("ckn,kn->c", shares.proba, net * shares.inverse)
            calibration = calibration._replace(
                kappa=by_kappa.sum(axis=1), offset=(shares.mixture * net_ratio).sum(axis=1) - mixed
            )
        else:
            calibration = _probit_gradient(calibration, shares, logits, variance, likelihood, net_ratio, gross)
    slope, information = np.zeros(len(share)), np.zeros((2 * len(share), 2 * len(share)))
    if not by_class:
        relative *= shares.inverse  # rho, summed over an instance's labels
        np.minimum(relative, _LARGEST, out=relative)
        slope = relative.sum(axis=1)
        if noisy:
            slopes = relative if by_kappa is None else np.concatenate([relative, by_kappa])
        else:
            slopes = _label_slopes(shares, likelihood, logits, None if by_kappa is None else mean)
        information[: len(slopes), : len(slopes)] = products(slopes, slopes)
    size = shares.size.sum()
    return Sums(
        shares.log_evidence.sum(), size, share.sum(axis=1), slope, information, class_count, class_load, calibration
    )


def _label_slopes(shares: ViewShares, likelihood: Likelihood, logits: Array, mean: Array | None) -> Array:
    """Slopes of every label's log probability in w and, given E_k f, kappa, times the root of its count: (2K, j)."""
    label, instance = np.nonzero(shares.target)
    rho = shares.proba[label, :, instance] * shares.inverse[:, instance].T  # (j, K)
    rho /= shares.mixture[label, instance][:, None]
    np.minimum(rho, _LARGEST, out=rho)
    slopes = [rho]
    if mean is not None:
        slopes.append(likelihood.weights * rho * (logits[label, :, instance] - mean[:, instance].T))
    return np.asarray((np.concatenate(slopes, axis=1) * np.sqrt(shares.target[label, instance])[:, None]).T)


def _no_calibration(likelihood: Likelihood) -> CalibrationSums:
    K, C = len(likelihood.calibration.log_kappa), len(likelihood.calibration.offset)
    return CalibrationSums(np.zeros(K), np.zeros(C), np.zeros(K), np.zeros((C, K)), np.zeros(C))


def _softmax_curvature(
    shares: ViewShares, logits: Array, weighted: Array, mean: Array, share: Array
) -> CalibrationSums:
    """Sums of share times the covariance of (f, 1_c) under P_k.

    Offsets: of P_k's covariances over an instance's views the mixed one is taken, which is no smaller.
    """
    square = np.einsum("ckn,ckn->kn", weighted, logits) * shares.inverse
    per_view = share * shares.inverse
    mixed = np.einsum("ckn,kn->cn", shares.proba, per_view)  # (C, n): sum_k share P_k
    cross = np.einsum("ckn,kn->ck", weighted, per_view) - np.einsum("ckn,kn->ck", shares.proba, per_view * mean)
    offset = mixed.sum(axis=1)
    if len(mixed) <= _FULL_CURVATURE:
        offset = np.diag(offset) - products(mixed / np.maximum(shares.size, 1e-300), mixed)
    nothing = np.zeros(0)
    return CalibrationSums(nothing, nothing, (share * (square - mean**2)).sum(axis=1), cross, offset)


def _probit_gradient(
    curvature: CalibrationSums,
    shares: ViewShares,
    logits: Array,
    variance: Array | None,
    likelihood: Likelihood,
    ratio: Array,
    gross: Array,
) -> CalibrationSums:
    """The exact gradient; the curvature is halfway between the softmax's and the gradients' outer products."""
    by_kappa, by_utility = utility_gradient(shares, logits, variance, likelihood, ratio)
    enough = np.maximum(gross.T, 1e-300)  # (n, K)
    offset = curvature.offset_curvature * _PROBIT_INFORMATION
    spread = 0.5 * np.einsum("nkc,nk->c", by_utility**2, 1 / enough)
    return CalibrationSums(
        by_kappa.sum(axis=0),
        by_utility.sum(axis=(0, 1)),
        _PROBIT_INFORMATION * curvature.kappa_curvature + 0.5 * (by_kappa**2 / enough).sum(axis=0),
        _PROBIT_INFORMATION * curvature.cross_curvature,
        offset + (spread if offset.ndim == 1 else np.diag(spread)),
    )


def utility_gradient(
    shares: ViewShares, logits: Array, variance: Array | None, likelihood: Likelihood, ratio: Array
) -> tuple[Array, Array]:
    """Probit: gradients of sum_kc r ln P_k(c) with respect to kappa_k, (n, K), and the utilities, (n, K, C)."""
    responsibility = (shares.joint * shares.scale * ratio[:, None]).T  # (n, K, C)
    by_utility, by_kappa = np.zeros(responsibility.shape), np.zeros(responsibility.shape[:2])
    used = np.abs(responsibility).sum(axis=2) > _NEGLIGIBLE  # (n, K)
    kappa = np.exp(likelihood.calibration.log_kappa)
    utility = (logits * kappa[:, None] + likelihood.calibration.offset[:, None, None]).T
    scale = _scale(variance, kappa)
    found = log_probit_vjp(utility[used], 1.0 if scale is None else scale[used], responsibility[used])
    by_utility[used] = found.grad_mean
    by_kappa[used] = (found.grad_mean * logits.T[used]).sum(axis=1)
    if scale is not None and variance is not None:
        by_scale = (found.grad_scale / scale[used] * variance.T[used]).sum(axis=1)
        by_kappa[used] += np.broadcast_to(kappa, used.shape)[used] * by_scale
    return by_kappa, by_utility


_PROBIT_INFORMATION = 0.65  # half of what a probit of unit noise tells, relative to a softmax, where classes are close


def _scale(variance: Array | None, kappa: Array) -> Array | None:
    """Standard deviations of the utilities, (n, K, C): s^2 = kappa^2 g + 1."""
    if variance is None:
        return None
    return np.ascontiguousarray(np.sqrt(variance * (kappa**2)[:, None] + 1).T)
