"""EM for the categorical mixture: closed forms for weights and noise, Newton steps for calibration and weights.

The joint responsibility of view k and class c is q_ic w_k P_k(c) / P(c), with q_ic how often class c was given or, with
a noise model, the truth's posterior (docs/method, eqs. 20 to 24a).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import special

from vbtta.data.labels import Array
from vbtta.inference import laplace
from vbtta.inference.em import Ascent, join, nodes, products, vanishing_weights
from vbtta.inference.laplace import WeightInformation, group_sums
from vbtta.inference.linalg import Reader, kl_dirichlet, student_precision
from vbtta.models.base import InMemory, Source, of_kind
from vbtta.models.categorical_mixture.posterior import CategoricalPosterior, ClassPosterior
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts import class_data, links
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks, ClassProblem, Statistics
from vbtta.models.parts.gate import Gate, GateData, Lookup, weight_scores, with_gate
from vbtta.models.parts.label_noise import FittedNoise
from vbtta.models.parts.links import Calibration

_MIN_SINGLE = 1e-35  # a probability in single precision
_MIN_NUMERATOR = 1e-150  # whose inverse's square is finite
_MAX_RATIO = 1e15  # of rho: a dropped view may explain a label that no other does
_FRACTIONS = (1.0, 0.5, 0.25, 0.05)  # of the calibration's Newton step, tried in turn
_PARTIAL = 0.3  # of Newton's step for the weights, where all of it would lower the bound
_NEAR = 0.7  # largest move, of weights, temperatures or coefficients, by all of a gate's Hessian
_DEFINITE = 0.02  # its smallest eigenvalue, on a unit diagonal, with which it is taken
_SETTLED = 0.2  # change of temperatures and offsets below which the weights take Newton steps
_MAX_LOSS = 0.01  # nats that zero weights may lose by a quadratic model of the bound, to be tried
_MAX_UNITS = 100_000  # labels, or instances with a noise model, from which the information is estimated
_MAX_OFFSET_CLASSES = 128  # up to which offsets are eliminated: with more the prior decides about each


class Likelihood(NamedTuple):
    """What turns logits into responsibilities."""

    link: links.Link
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
    information: Array  # (2K + F, 2K + F): outer products of a unit's slopes in (w, kappa, b); zeros with class weights
    class_count: Array  # (C, K): responsibilities by class; (0, 0) without class weights
    class_load: Array  # (C, K): sum of P_k(c)/Z, the slope of ln Z; likewise
    feature_mass: Array  # (F,): sum of responsibilities times features; (0,) without a gate
    feature_slope: Array  # (F,): slope of the log evidence in b
    kappa_excess: Array  # (K,): curvature in kappa beyond outer products, 0 in expectation under the model
    gate_excess: Array  # (2K + F, 2K + F): likewise of a gate, whose weights are not linear in (w, b); zeros without
    calibration: links.CalibrationSums


class ViewShares(NamedTuple):
    """Responsibilities of a block."""

    views: links.MixedViews
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
    proba, inverse = links.view_proba(likelihood.link, logits, variance, likelihood.calibration)
    if likelihood.class_weights is None:
        joint, scale = proba, likelihood.weights[:, None] * inverse
        if gate is not None:
            scale *= gate.factor
    else:
        joint, scale = proba * likelihood.class_weights.T[:, :, None], inverse
    mixture = links.contract("ckn,kn->cn", joint, scale)
    if proba.itemsize == 4:
        np.maximum(mixture, _MIN_SINGLE, out=mixture)
    total = mixture.sum(axis=0) if likelihood.class_weights is not None else np.ones(mixture.shape[1])
    views = links.MixedViews(logits, variance, likelihood.calibration, proba, inverse, joint, scale, mixture)
    if importance is not None:
        posterior, log_norm = class_data.truth_posterior(target.T, mixture)
        return ViewShares(views, total, posterior, importance, importance * (log_norm - np.log(total)))
    size = target.sum(axis=0)
    log_evidence = (target * np.log(mixture)).sum(axis=0) - size * np.log(total)
    return ViewShares(views, total, target, size, log_evidence)


def _sums(shares: ViewShares, likelihood: Likelihood, gate: Lookup | None, *, noisy: bool) -> ViewSums:
    views, link = shares.views, likelihood.link
    (K, C), by_class = (len(views.proba[0]), len(views.proba)), likelihood.class_weights is not None
    ratio = (shares.target * shares.size if noisy else shares.target) / views.mixture  # (C, n)
    relative = links.contract("ckn,cn->kn", views.joint, ratio)
    share = views.scale * relative  # (K, n)
    class_count = class_load = np.zeros((0, 0))
    net_ratio, net = ratio, share  # net of the normaliser's derivative
    if by_class:
        load = shares.size / shares.total
        class_count = np.einsum("ckn,kn,cn->ck", views.joint, views.scale, ratio)
        class_load = links.contract("ckn,kn->ck", views.proba, views.inverse * load)
        net_ratio = ratio - load
        net = views.scale * links.contract("ckn,cn->kn", views.joint, net_ratio)
    calibration = links.CalibrationSums.zeros(K, C)
    by_kappa = None
    if likelihood.calibrate:
        scores = link.scores(views, net_ratio, net)
        calibration = _calibration_sums(shares, share, scores, link.information, offsets=likelihood.offsets)
        by_kappa = scores.by_kappa if link.canonical else None
    F = 0 if gate is None else len(gate.values)
    slope, information, kappa_excess = np.zeros(K), np.zeros((2 * K + F, 2 * K + F)), np.zeros(K)
    size, feature_mass, feature_slope, gate_excess = shares.size.sum(), np.zeros(F), np.zeros(F), np.zeros((0, 0))
    if not by_class and (K > 1 or gate is not None):  # the weight of one view is known
        relative *= views.inverse  # rho, summed over an instance's labels
        by_feature = np.zeros((0, len(shares.size)))
        if gate is not None:  # base weights: rho times exp(b . phi) / Z
            factor = gate.factor
            relative *= factor
            size = factor @ shares.size
            weights = likelihood.weights[:, None] * factor
            excess = share - weights * shares.size
            by_feature, mean = (np.einsum("kn,fkn->fn", factors, gate.values) for factors in (excess, weights))
            feature_slope = by_feature.sum(axis=1)
            feature_mass = feature_slope + mean @ shares.size
        np.minimum(relative, _MAX_RATIO, out=relative)
        slope = relative.sum(axis=1)
        if gate is not None:  # less the normaliser's; a term in the sum of the base weights keeps it at one
            relative -= factor * shares.size
            gate_excess = _gate_excess(relative, by_kappa, excess, by_feature, mean, gate)
            information[:K, :K] = shares.size.sum()
        if noisy:
            kappas = np.zeros_like(relative) if by_kappa is None else by_kappa
            slopes = np.concatenate([relative, kappas, by_feature]) / np.sqrt(shares.size)
        else:
            slopes = _label_slopes(shares, likelihood.weights, gate, with_kappa=by_kappa is not None)
        information += products(slopes, slopes)
        if by_kappa is not None:
            square = views.scale * links.contract("ckn,cn->kn", views.squared, ratio)
            square -= views.mean * (2 * by_kappa + views.mean * share)
            kappa_excess = calibration.kappa_curvature - square.sum(axis=1)
    return ViewSums(
        shares.log_evidence.sum(), size, share.sum(axis=1), slope, information, class_count, class_load,
        feature_mass, feature_slope, kappa_excess, gate_excess, calibration,
    )  # fmt: skip


def _gate_excess(
    net: Array, by_kappa: Array | None, excess: Array, by_feature: Array, mean: Array, gate: Lookup
) -> Array:
    """Minus the Hessian of the log evidence in (w, kappa, b) less the outer products of slopes, but for kappa's own."""
    # sums over views and instances of products with features less their mean (F, n), of which there is no array
    F, K, _ = gate.values.shape
    upper, flat = np.zeros((2 * K + F, 2 * K + F)), gate.values.reshape(F, -1)
    upper[:K, :K] = products(net, gate.factor)
    upper[:K, 2 * K :] = products(gate.factor, by_feature) + products(net, mean) - np.vecdot(net, gate.values).T
    if by_kappa is not None:
        upper[:K, K : 2 * K] = products(gate.factor, by_kappa)
        upper[K : 2 * K, 2 * K :] = products(by_kappa, mean) - np.vecdot(by_kappa, gate.values).T
    upper[2 * K :, 2 * K :] = products(by_feature, mean) - 0.5 * products(flat * excess.ravel(), flat)
    return upper + upper.T


def _label_slopes(shares: ViewShares, weights: Array, gate: Lookup | None, *, with_kappa: bool) -> Array:
    """Slopes of every label's log probability in (w, kappa, b), times the root of its count: (2K + F, j)."""
    views = shares.views
    label, instance = np.nonzero(shares.target)
    rho = views.proba[label, :, instance] * views.inverse[:, instance].T  # (j, K)
    rho /= views.mixture[label, instance][:, None]
    by_feature = np.zeros((len(label), 0))
    if gate is not None:
        factor = gate.factor[:, instance].T
        by_feature = np.einsum("jk,fkj->jf", weights * factor * (rho - 1), gate.values[:, :, instance])
        rho *= factor
    np.minimum(rho, _MAX_RATIO, out=rho)
    by_kappa = np.zeros_like(rho)
    if with_kappa:  # of a canonical link
        by_kappa = weights * rho * (views.logits[label, :, instance] - views.mean[:, instance].T)
    slopes = np.concatenate([rho if gate is None else rho - factor, by_kappa, by_feature], axis=1)
    return np.asarray((slopes * np.sqrt(shares.target[label, instance])[:, None]).T)


def _calibration_sums(
    shares: ViewShares, share: Array, scores: links.ViewScores, information: float, *, offsets: bool
) -> links.CalibrationSums:
    """The gradient, and as curvature sums of share times `information` times the covariance of (f, 1_c) under P_k."""
    # Offsets: the diagonal of sum_k P_k's covariance without the means' outer product, which is no smaller.
    views = shares.views
    square = links.class_sum(views.squared) * views.inverse
    by_kappa, curved = scores.by_kappa.sum(axis=1), share * information
    kappa = (curved * (square - views.mean**2)).sum(axis=1)
    if not offsets:
        C, K = views.proba.shape[:2]
        return links.CalibrationSums.zeros(K, C)._replace(kappa=by_kappa, kappa_curvature=kappa)
    per_view = curved * views.inverse
    mixed = information * views.expected(share)  # (C, n): sum_k share P_k
    cross = links.contract("ckn,kn->ck", views.weighted, per_view)
    cross -= links.contract("ckn,kn->ck", views.proba, per_view * views.mean)
    return links.CalibrationSums(by_kappa, scores.by_offset.sum(axis=1), kappa, cross, mixed.sum(axis=1))


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


def weight_information(
    data: CategoricalBlocks,
    likelihood: Likelihood,
    noise: FittedNoise | None,
    weights: Array,
    prior: links.CalibrationPrior,
) -> WeightInformation:
    """Outer products of the scores of (w, ln kappa, xi, o), the latter three eliminated under their priors."""
    # With a gate (ln v, b) are in place of w. A unit is a label or, with a noise model, an instance; the noise is held
    # at its posterior.
    free = weights > 0
    n_kept = len(weights) + (0 if likelihood.gate is None else len(likelihood.gate.values))
    n_units = data.n_rows if noise is None else data.n_instances
    total_weight = data.n_labels if noise is None else data.n_instances
    read, n_groups = class_data.label_reader(noise), data.n_groups

    def block_products(block: CategoricalBlock) -> tuple[Array, Array, Array, Array | None]:
        reading = read(block)
        evidence = None if reading is None else reading.log_evidence

        def part_products(part: slice) -> tuple[Array, Array, Array, Array | None]:
            rho, scores, size, instance = _scores(block, likelihood, evidence, part, free)
            weighted, grouped, profile = scores * size, None, np.zeros((len(rho), len(laplace.PROFILE_GRID)))
            profile[~free] = laplace.weight_profile(rho[~free], 0.0, size)
            if block.group is not None:
                grouped = group_sums(weighted, size, block.group[part][instance], n_groups)
            return products(weighted, scores), profile, size.sum(), grouped

        sums: tuple[Array, Array, Array, Array | None] = join(nodes(part_products, block.parts))
        return sums

    every = 1 if n_groups else max(1, n_units // _MAX_UNITS)
    outer, profile, seen, grouped = data.total(block_products, every=every)
    scale = total_weight / float(seen) if every > 1 else 1.0
    nuisance = np.zeros(0)
    if likelihood.calibrate:
        F = int(free.sum())
        common = prior.common(likelihood.calibration.log_kappa)
        of_kappa = student_precision(common**2, prior.kappa_scale)
        precisions = (of_kappa, 1 / prior.xi_scale**2, prior.offset_precision)
        nuisance = np.repeat(precisions, (1, F, len(outer) - n_kept - 1 - F))
    return laplace.weight_information(weights, scale * outer, np.diag(nuisance), scale * profile, grouped, n_kept)


def _scores(
    block: CategoricalBlock, likelihood: Likelihood, evidence: Array | None, part: slice, free: Array
) -> tuple[Array, Array, Array, Array]:
    """Ratios rho (K, units), scores (K + 1 + F + C, units) of units, how often each counts, and its instance."""
    logits, variance = block.logits(part), block.variances(part)
    gate, instance = likelihood.gate_rows(block, part), np.arange(logits.shape[2])
    if evidence is not None:
        shares = view_shares(logits, variance, likelihood, evidence[part].T, block.table.importance[part], gate)
        size = shares.size
    else:
        assert block.mass is not None
        mass = block.mass[part]
        instance, label = np.nonzero(mass)
        one_hot = np.zeros((mass.shape[1], len(label)))
        one_hot[label, np.arange(len(label))] = 1
        size = mass[instance, label]
        logits = logits[:, :, instance]
        variance = None if variance is None else variance[:, :, instance]
        gate = None if gate is None else gate.rows(instance)
        shares = view_shares(logits, variance, likelihood, one_hot, None, gate)
    views = shares.views
    ratio = shares.target / views.mixture
    by_weight = views.inverse * links.contract("ckn,cn->kn", views.proba, ratio)  # (K, n): rho
    if likelihood.class_weights is not None:
        load = 1 / shares.total
        by_weight += 1 - load
        ratio = ratio - load
    share = views.scale * links.contract("ckn,cn->kn", views.joint, ratio)
    first = by_weight if gate is None else weight_scores(gate, likelihood.weights, share)
    if not likelihood.calibrate:
        return by_weight, first, size, instance
    scores = likelihood.link.scores(views, ratio, share)
    by_log_kappa = np.exp(likelihood.calibration.log_kappa)[:, None] * scores.by_kappa
    rows = [first, by_log_kappa.sum(axis=0, keepdims=True), by_log_kappa[free]]
    if likelihood.offsets and len(scores.by_offset) <= _MAX_OFFSET_CLASSES:
        rows.append(scores.by_offset)
    return by_weight, np.concatenate(rows), size, instance


class CategoricalState(NamedTuple):
    """Weights, calibration and Q of the noise."""

    weights: Array  # (K,); with class weights the common ones they are drawn to, with a gate the base weights
    weight_counts: Array | None  # (K,): Q(w), where w has a Dirichlet prior
    class_weights: Array | None  # (K, C)
    calibration: Calibration
    noise: FittedNoise | None
    slopes: Array = np.zeros(0)  # (F,): coefficients of the gate


@dataclass(frozen=True, eq=False)
class CategoricalProblem(ClassProblem[CategoricalState, ViewSums]):
    """Data and priors of a categorical mixture."""

    spec: CategoricalMixture
    gate: GateData | None = None
    jump: tuple[CategoricalState, CategoricalState] | None = None  # first state of a gate, and its first update

    @property
    def prior(self) -> links.CalibrationPrior:
        """The prior of the calibration."""
        return links.CalibrationPrior(self.spec.kappa_scale, self.spec.xi_scale, self.spec.offset_scale)

    def update(self, state: CategoricalState, statistics: Statistics[ViewSums]) -> CategoricalState:
        """One step of every factor, which does not lower the bound; a gate's first is the constant weights' fit."""
        # EM has closed forms for weights and noise. Newton steps (of the calibration, and once that has settled of the
        # weights) are tried first and taken where the bound does not fall.
        if self.jump is not None and state is self.jump[0]:
            return self.jump[1]
        sums, now = statistics.sums, state.calibration
        step = np.zeros(self.data.n_views + self.data.n_classes)
        if self.spec.calibrate:
            step = self.prior.direction(now, sums.calibration)
        size, (after, noise) = np.abs(step).max(), statistics.next_noise(state.noise)

        def candidates() -> Iterator[CategoricalState]:
            common = state.class_weights is None and state.weight_counts is None
            if self.data.n_views > 1 and common and size < _SETTLED:
                yield from self._newton(state._replace(noise=noise or after), step, sums)
            plain = self._update_weights(state, sums)._replace(noise=after)
            if noise is not None:
                yield plain._replace(noise=noise, calibration=now.moved(step))
            for fraction in _FRACTIONS if size > 1e-10 else ():
                yield plain._replace(calibration=now.moved(step, fraction))
            yield plain

        return self.first_acceptable(candidates(), statistics)

    def pack(self, state: CategoricalState) -> Array:
        """(sqrt w, b, sqrt w_kc, ln kappa_k, o, ln of the noise's counts)."""
        parts = [np.sqrt(state.weights if state.weight_counts is None else state.weight_counts), state.slopes]
        if state.class_weights is not None:
            parts.append(np.sqrt(state.class_weights).ravel())
        if self.spec.calibrate:
            parts += [*state.calibration]
        if state.noise is not None:
            parts.append(state.noise.pack())
        return np.concatenate(parts)

    def unpack(self, vector: Array, like: CategoricalState) -> CategoricalState:
        """The state of a vector."""
        K, C, take = self.data.n_views, self.data.n_classes, Reader(vector)
        weights, slopes = take(K) ** 2, take(len(like.slopes))
        by_class = None
        if like.class_weights is not None:
            by_class = take(K, C) ** 2
            by_class = by_class / by_class.sum(axis=0)
        calibrated = like.calibration
        if self.spec.calibrate:
            calibrated = Calibration(np.clip(take(K), -40, 20), np.clip(take(C), -50, 50))
        noise = None if like.noise is None else like.noise.unpack(take)
        counts = None if like.weight_counts is None else np.maximum(weights, 1e-10)
        return CategoricalState(weights / weights.sum(), counts, by_class, calibrated, noise, slopes)

    def trimmed(self, state: CategoricalState, statistics: Statistics[ViewSums]) -> list[CategoricalState]:
        """States with vanishing weights at zero; none under a Dirichlet, whose weights are positive."""
        if state.weight_counts is not None:
            return []
        if self.gate is not None:
            return [state._replace(weights=kept) for kept in self.gate.trimmed(state.weights, state.slopes)]
        candidates, sums = [], statistics.sums
        if state.class_weights is None:  # without those that clearly lower the bound, to second order
            information = sums.information[: self.data.n_views, : self.data.n_views]
            for kept in vanishing_weights(state.weights):
                change = kept - state.weights
                if sums.slope @ change - 0.5 * change @ information @ change > -_MAX_LOSS:
                    candidates.append(state._replace(weights=kept))
            return candidates
        for kept in vanishing_weights(self.weights(state)):
            common, by_class = state.weights * (kept > 0), state.class_weights * (kept > 0)[:, None]
            if common.sum() > 0 and (by_class.sum(axis=0) > 0).all():
                common, by_class = common / common.sum(), by_class / by_class.sum(axis=0)
                candidates.append(state._replace(weights=common, class_weights=by_class))
        return candidates

    def started_at(self, state: CategoricalState, weights: Array) -> CategoricalState | None:
        """A first state with other weights, where there may be several optima; none with a gate or class weights."""
        known = self.gate is not None or state.class_weights is not None
        if known or self.spec.one_optimum(self.data.n_instances, self.data.n_views):
            return None
        counts = None if state.weight_counts is None else weights * state.weight_counts.sum()
        return state._replace(weights=weights, weight_counts=counts)

    def weights(self, state: CategoricalState) -> Array:
        """The weights of the views, (K,): the mean over classes or inputs where they differ by these."""
        if self.gate is not None:
            return self.gate.average(state.weights, state.slopes)
        return state.weights if state.class_weights is None else np.asarray(state.class_weights.mean(axis=1))

    def posterior(
        self, state: CategoricalState, information: WeightInformation | None = None, gate: Gate | None = None
    ) -> CategoricalPosterior:
        """The fitted model without its data."""
        if self.gate is not None:
            gate = gate or self.gate.gate(state.weights, state.slopes)
        fitted = (self.weights(state), state.class_weights, state.calibration, state.noise)
        return CategoricalPosterior(self.spec.link, *fitted, information, gate)

    def finish(
        self, ascent: Ascent[CategoricalState, Statistics[ViewSums]], *, intervals: bool = True
    ) -> CategoricalPosterior:
        """The posterior at the end of an ascent, with the information for intervals unless unwanted."""
        state: CategoricalState = ascent.state
        if not intervals:
            return self.posterior(state)
        likelihood = self._likelihood(state)._replace(weights=state.weights)
        information = weight_information(self.data, likelihood, state.noise, self.weights(state), self.prior)
        if self.gate is None:
            return self.posterior(state, information)
        gate, known = self.gate.finish(state.weights, state.slopes, information)
        return self.posterior(state, known, gate)

    def resume(self, first: CategoricalState, posterior: ClassPosterior) -> CategoricalState:
        """The first state with what another fit found: all of it if of the same form, else temperature and noise."""
        noise = None if first.noise is None else first.noise.resume(posterior.noise)
        pool = posterior.pooling()
        offset = pool.offset[0] if self.spec.offset_scale > 0 else first.calibration.offset
        own = of_kind(posterior, CategoricalPosterior, self.data.n_views)
        if own is not None and (own.class_weights is None) == (first.class_weights is None):
            weights = own.weights
            if first.class_weights is not None:  # EM does not move weights away from zero
                weights = (weights + 1e-3 / len(weights)) / (1 + 1e-3)
            counts = None if first.weight_counts is None else np.maximum(weights * first.weight_counts.sum(), 1e-10)
            state = first._replace(weights=weights, weight_counts=counts, noise=noise)
            calibrated = own.calibration._replace(offset=offset)
            return state._replace(class_weights=own.class_weights, calibration=calibrated)
        if not self.spec.calibrate:
            return first._replace(noise=noise)
        gain = float((pool.weights * pool.scale).sum(axis=0).mean())
        calibrated = Calibration(np.full(self.data.n_views, np.log(max(gain, 1e-10))), offset)
        return first._replace(calibration=calibrated, noise=noise)

    def settle_gate(self, state: CategoricalState, scale: float | None) -> "CategoricalProblem":
        """The problem with the prior scale of its gate, by the evidence at a state of constant weights if open."""
        statistics, first = self.evaluate(state)[1], -len(state.slopes)
        score = statistics.sums.feature_slope, statistics.sums.information[first:, first:]
        problem = replace(self, gate=self.gate and self.gate.with_prior(scale, *score))
        problem.remember(state, statistics)
        return problem

    def _likelihood(self, state: CategoricalState) -> Likelihood:
        weights = state.weights
        if state.weight_counts is not None:
            weights = np.exp(special.digamma(state.weight_counts) - special.digamma(state.weight_counts.sum()))
        link, offsets = links.LINKS[self.spec.link], self.spec.offset_scale > 0
        gate = None if self.gate is None else self.gate.lookup(state.weights, state.slopes)
        options = (link, self.spec.calibrate, offsets)
        return Likelihood(*options, state.calibration, weights, state.class_weights, gate)

    def _block_pass(self, state: CategoricalState) -> class_data.BlockPass[ViewSums]:
        likelihood = self._likelihood(state)
        return lambda block, evidence: run_pass(block, likelihood, evidence)

    def _penalties(self, state: CategoricalState) -> dict[str, float]:
        terms = {}
        if state.weight_counts is not None and self.spec.concentration is not None:
            prior = np.full(self.data.n_views, self.spec.concentration)
            terms["KL_w"] = float(kl_dirichlet(state.weight_counts, prior))
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            terms["penalty_w"] = -log_class_prior(state.class_weights, state.weights, strength)
        if self.spec.calibrate:
            terms["penalty_calibration"] = -self.prior.log_density(state.calibration)
        if self.gate is not None:
            terms["penalty_gate"] = -self.gate.log_prior(state.slopes)
        if state.noise is not None:
            terms["KL_noise"] = state.noise.divergence()
        return terms

    def _newton(self, state: CategoricalState, step: Array, sums: ViewSums) -> Iterator[CategoricalState]:
        """Newton's step of weights, ln kappa_k and coefficients, and a part of it; `step` is the calibration's own."""
        # sum_j ln sum_k w_k P_jk - J sum_k w_k has its maximum on the simplex. Minus its Hessian is approximated by
        # outer products of slopes, exactly so for the weights, which are constrained to be non-negative. Temperatures
        # and a gate have more curvature than that where the model does not hold.
        K, now, slopes = self.data.n_views, state.calibration, state.slopes
        u = np.concatenate([state.weights, now.log_kappa, slopes])
        units = np.ones(len(u))
        units[K : 2 * K] = np.exp(now.log_kappa)  # from slopes in kappa to slopes in ln kappa
        curvature = sums.information * units * units[:, None]
        gradient = np.concatenate([sums.slope - sums.size, np.zeros(K), sums.feature_slope])
        if self.spec.calibrate:
            own = np.maximum(sums.kappa_excess, 0) * units[K : 2 * K] ** 2
            curvature[K : 2 * K, K : 2 * K] += self.prior.log_kappa_precision(now.log_kappa) + np.diag(own)
            gradient[K : 2 * K] = self.prior.gradient(now, sums.calibration)[:K]
        else:
            curvature[K : 2 * K, K : 2 * K] += np.eye(K)
        if self.gate is not None:
            curvature[2 * K :, 2 * K :] += np.eye(len(slopes)) / self.gate.prior_scale**2
            gradient[2 * K :] -= slopes / self.gate.prior_scale**2
        scale = np.sqrt(np.maximum(np.diagonal(curvature), 1e-300))  # a unit diagonal
        curvature = curvature / np.outer(scale, scale) + 1e-9 * np.eye(len(u))
        try:
            if self.gate is None:
                weights, others = laplace.solve(curvature, curvature @ (u * scale) + gradient / scale, K)
            else:
                rest = sums.gate_excess * units * units[:, None] / np.outer(scale, scale)
                weights, others = self._solution(curvature, rest, u * scale, gradient / scale, _NEAR * scale)
        except (RuntimeError, np.linalg.LinAlgError):  # no solution within the limit
            return
        weights, others = weights / scale[:K], others / scale[K:]
        weights = weights / weights.sum() if weights.sum() > 0 else state.weights
        if self.gate is not None:
            varying = self.gate.scale > 0  # features that are not constant
            weights, slopes = self.gate.positive(weights), slopes + np.clip(others[K:] - slopes, -1, 1) * varying
        moves = weights - state.weights, slopes - state.slopes
        if max(np.abs(moves[0]).max(), np.abs(moves[1]).max(initial=0)) <= 1e-12:
            return
        if links.LINKS[self.spec.link].canonical:
            step = np.concatenate([np.clip(others[:K] - now.log_kappa, -0.5, 0.5), step[K:]])
        yield state._replace(weights=weights, slopes=slopes, calibration=now.moved(step))
        weights, slopes = (
            old + _PARTIAL * move for old, move in zip((state.weights, state.slopes), moves, strict=True)
        )
        yield state._replace(weights=weights, slopes=slopes, calibration=now.moved(step, _PARTIAL))

    def _solution(self, outer: Array, rest: Array, now: Array, gradient: Array, reach: Array) -> tuple[Array, Array]:
        """The maximum of a quadratic model with non-negative weights, from outer products and the rest of its Hessian.

        All of the Hessian serves near the optimum: where it is clearly definite and no move exceeds `reach`. Elsewhere
        the positive part of the rest does.
        """
        K, hessian = self.data.n_views, outer + rest
        try:
            np.linalg.cholesky(hessian - _DEFINITE * np.eye(len(now)))
        except np.linalg.LinAlgError:
            pass
        else:
            weights, others = laplace.solve(hessian, hessian @ now + gradient, K)
            if (np.abs(np.concatenate([weights, others]) - now) < reach).all():
                return weights, others
        values, vectors = np.linalg.eigh(rest)
        hessian = outer + (vectors * np.maximum(values, 0)) @ vectors.T
        return laplace.solve(hessian, hessian @ now + gradient, K)

    def _update_weights(self, state: CategoricalState, sums: ViewSums) -> CategoricalState:
        if state.class_weights is not None:
            strength = self.spec.class_concentration
            by_class = update_class_weights(sums.class_count, sums.class_load, state.weights, strength)
            common = update_common_weights(by_class)
            return state._replace(weights=common, class_weights=by_class)
        if self.gate is not None:
            weights, slopes = self.gate.update(state.weights, state.slopes, sums.share, sums.feature_mass)
            return state._replace(weights=weights, slopes=slopes)
        counts = None if self.spec.concentration is None else self.spec.concentration + sums.share
        weights = sums.share if counts is None else counts
        return state._replace(weights=weights / weights.sum(), weight_counts=counts)

    def _on_subsample(self, places: Array) -> tuple["CategoricalProblem", CategoricalState]:
        return _posed(InMemory(*self.data.take(places)), self.spec)

    def _scaled(self, state: CategoricalState, log_kappa: Array) -> CategoricalState:
        return state._replace(calibration=state.calibration._replace(log_kappa=log_kappa))


def pose(
    source: Source, spec: CategoricalMixture, start: ClassPosterior | None = None
) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem of data and a model, and its first state: equal weights, kappa 1 unless logits are wide."""
    problem, first = _posed(source, spec)
    if start is not None:
        first = problem.resume(first, start)
    elif spec.calibrate:
        first = problem._scaled(first, problem.start_log_kappa(first))
    if first.class_weights is None and (start is None or len(start.weights) != problem.data.n_views):
        first = problem.coarse_start(first)
    if spec.weights != "input":
        return problem, first
    begin = None if start is not None else problem.evaluate(first)[1]
    features = partial(source.gate, spec.features, shared=problem.noise is not None, unit=None)
    own = of_kind(start, CategoricalPosterior, problem.data.n_views)
    gate, fitted, resumed = None if own is None else own.gate, own is not None, start is not None
    problem, first = with_gate(problem, first, gate, features, spec.gate_scale, fitted=fitted, resumed=resumed)
    if begin is not None:
        problem.remember(first, begin)
    return problem, first


def _posed(source: Source, spec: CategoricalMixture) -> tuple[CategoricalProblem, CategoricalState]:
    """The problem, and its first state with kappa 1."""
    data, noise = spec.lay_out(source)
    K, C = data.n_views, data.n_classes
    uniform = np.full(K, 1 / K)
    counts = None
    if spec.concentration is not None:
        counts = spec.concentration + uniform * (data.n_labels if noise is None else data.n_instances)
    first = CategoricalState(
        weights=uniform,
        weight_counts=counts,
        class_weights=np.full((K, C), 1 / K) if spec.weights == "view_class" else None,
        calibration=Calibration(np.zeros(K), np.zeros(C)),
        noise=None if noise is None else noise.start(data.n_annotators),
    )
    return CategoricalProblem(data, noise, spec), first
