"""Observed information of the views' weights under class labels, calibration eliminated."""

import numpy as np

from vbtta.data.labels import Array
from vbtta.inference.blocks import join, nodes, products
from vbtta.inference.laplace import PROFILE_GRID, WeightInformation, group_sums
from vbtta.inference.laplace import weight_information as information_of
from vbtta.inference.linalg import student_precision
from vbtta.models.categorical_mixture.steps import Likelihood, view_shares
from vbtta.models.parts import calibration
from vbtta.models.parts.calibration import CalibrationPrior
from vbtta.models.parts.class_data import CategoricalBlock, CategoricalBlocks
from vbtta.models.parts.gate import weight_scores
from vbtta.models.parts.label_noise import FittedNoise
from vbtta.models.parts.links import contract

_MAX_UNITS = 100_000  # labels, or instances with a noise model, from which the information is estimated
_MAX_OFFSET_CLASSES = 128  # up to which offsets are eliminated: with more the prior decides about each


def weight_information(
    data: CategoricalBlocks,
    likelihood: Likelihood,
    noise: FittedNoise | None,
    weights: Array,
    prior: CalibrationPrior,
) -> WeightInformation:
    """Outer products of the scores of (w, ln kappa, xi, o), the latter three eliminated under their priors."""
    # With a gate (ln v, b) are in place of w. A unit is a label or, with a noise model, an instance; the noise is held
    # at its posterior.
    free = weights > 0
    n_kept = len(weights) + (0 if likelihood.gate is None else len(likelihood.gate.values))
    n_units = data.n_rows if noise is None else data.n_instances
    evidence_of = None if noise is None else noise.evidence()
    n_groups = data.n_groups

    def block_products(block: CategoricalBlock) -> tuple[Array, Array, Array, Array | None]:
        difficulty = noise is not None and noise.model.difficulty
        evidence = None if evidence_of is None else evidence_of(block.looked_at if difficulty else block.table)

        def part_products(part: slice) -> tuple[Array, Array, Array, Array | None]:
            rho, scores, size, instance = _scores(block, likelihood, evidence, part, free)
            weighted, grouped = scores * size, None
            if block.group is not None:
                grouped = group_sums(weighted, size, block.group[part][instance], n_groups)
            return products(weighted, scores), _profile(rho, free, size), size.sum(), grouped

        sums: tuple[Array, Array, Array, Array | None] = join(nodes(part_products, block.parts))
        return sums

    every = max(1, n_units // _MAX_UNITS) if not n_groups else 1
    outer, profile, seen, grouped = data.total(block_products, every=every)
    scale = (data.n_labels if noise is None else data.n_instances) / float(seen) if every > 1 else 1.0
    nuisance = np.zeros(0)
    if likelihood.calibrate:
        F = int(free.sum())
        common = calibration.common_log_kappa(likelihood.calibration.log_kappa, prior)
        of_kappa = student_precision(common**2, prior.kappa_scale)
        precisions = (of_kappa, 1 / prior.xi_scale**2, prior.offset_precision)
        nuisance = np.repeat(precisions, (1, F, len(outer) - n_kept - 1 - F))
    return information_of(weights, scale * outer, np.diag(nuisance), scale * profile, grouped, n_kept)


def gate_score(data: CategoricalBlocks, likelihood: Likelihood, noise: FittedNoise | None) -> tuple[Array, Array]:
    """Gradient (F,) of the log likelihood in a gate's coefficients, and the sum of its units' outer products (F, F)."""
    K, evidence_of = len(likelihood.weights), None if noise is None else noise.evidence()
    uncalibrated = likelihood._replace(calibrate=False)  # no scores of temperatures
    difficulty = noise is not None and noise.model.difficulty

    def block_sums(block: CategoricalBlock) -> tuple[Array, Array]:
        evidence = None if evidence_of is None else evidence_of(block.looked_at if difficulty else block.table)

        def part_sums(part: slice) -> tuple[Array, Array]:
            _, scores, size, _ = _scores(block, uncalibrated, evidence, part, likelihood.weights > 0)
            return scores[K:] @ size, products(scores[K:] * size, scores[K:])

        sums: tuple[Array, Array] = join(nodes(part_sums, block.parts))
        return sums

    return data.total(block_sums)


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
    by_weight = views.inverse * contract("ckn,cn->kn", views.proba, ratio)  # (K, n): rho
    if likelihood.class_weights is not None:
        load = 1 / shares.total
        by_weight += 1 - load
        ratio = ratio - load
    share = views.scale * contract("ckn,cn->kn", views.joint, ratio)
    first = by_weight if gate is None else weight_scores(gate, likelihood.weights, share)
    if not likelihood.calibrate:
        return by_weight, first, size, instance
    scores = likelihood.link.scores(views, ratio, share)
    by_log_kappa = np.exp(likelihood.calibration.log_kappa)[:, None] * scores.by_kappa
    rows = [first, by_log_kappa.sum(axis=0, keepdims=True), by_log_kappa[free]]
    if likelihood.offsets and len(scores.by_offset) <= _MAX_OFFSET_CLASSES:
        rows.append(scores.by_offset)
    return by_weight, np.concatenate(rows), size, instance


def _profile(rho: Array, free: Array, size: Array) -> Array:
    """Log likelihood where a dropped view takes each weight of the grid from all the others: (K, G)."""
    profile = np.zeros((len(rho), len(PROFILE_GRID)))
    for place, weight in enumerate(PROFILE_GRID):
        inside = np.maximum(1 - weight + weight * rho[~free], np.finfo(np.float64).tiny)
        profile[~free, place] = np.vecdot(np.log(inside), size)
    return profile
