"""Observed information of the views' weights under class labels, calibration eliminated."""

__all__ = ["weight_information"]

import numpy as np

from vbtta.infer import label_noise
from vbtta.infer.blocks import join, nodes, products
from vbtta.infer.calibration import CalibrationPrior
from vbtta.infer.categorical import Likelihood, ViewShares, utility_gradient, view_shares
from vbtta.infer.categorical_data import CategoricalBlock, CategoricalBlocks
from vbtta.infer.intervals import PROFILE_GRID, WeightInformation, eliminate
from vbtta.infer.label_noise import NoiseModel
from vbtta.labels import Array

_MOST_SCORED = 100_000  # labels, or instances with a noise model, from which the information is estimated
_MOST_CLASSES = 128  # up to which offsets are eliminated: with more the prior decides about each


def weight_information(
    data: CategoricalBlocks,
    likelihood: Likelihood,
    noise: tuple[NoiseModel, Array] | None,
    weights: Array,
    prior: CalibrationPrior,
) -> WeightInformation:
    """Outer products of the scores of (w, ln kappa, xi, o), the latter three eliminated under their priors.

    A unit is a label or, with a noise model, an instance; the noise (model and log A) is held at its posterior.
    """
    free = weights > 0
    n_units = data.n_instances if noise is not None else data.n_rows

    def one(block: CategoricalBlock) -> tuple[Array, Array, Array]:
        evidence = None if noise is None else label_noise.log_evidence(*noise, block.table)

        def some(part: slice) -> tuple[Array, Array, Array]:
            scores, size = _scores(block, likelihood, evidence, part, free)
            return products(scores * size, scores), _profile(scores[: len(weights)], free, size), size.sum()

        found: tuple[Array, Array, Array] = join(nodes(some, block.parts))
        return found

    outer, profile, seen = data.total(one, every=max(1, n_units // _MOST_SCORED))
    scale = (float(data.n_instances) if noise is not None else data.n_labels) / float(seen)
    information, profile = scale * outer, scale * profile
    n_offsets = len(information) - len(weights) - 1 - int(free.sum()) if likelihood.calibrate else 0
    nuisance = np.zeros(0)
    if likelihood.calibrate:
        nuisance = np.concatenate(
            [
                [1 / prior.kappa_scale**2],
                np.full(int(free.sum()), 1 / prior.xi_scale**2),
                np.full(n_offsets, 1 / prior.offset_scale**2),
            ]
        )
    return WeightInformation(weights, eliminate(information, len(weights), nuisance), profile)


def _scores(
    data: CategoricalBlock, likelihood: Likelihood, evidence: Array | None, part: slice, free: Array
) -> tuple[Array, Array]:
    """Scores (K + 1 + F + C, units) of a block's units and how often each counts."""
    logits, variance = data.logits(part), data.variances(part)
    if evidence is not None:
        shares = view_shares(logits, variance, likelihood, evidence[part].T, noisy=True)
        size = shares.size
    else:
        assert data.mass is not None
        mass = data.mass[part]
        instance, label = np.nonzero(mass)
        one_hot = np.zeros((mass.shape[1], len(label)))
        one_hot[label, np.arange(len(label))] = 1
        size = mass[instance, label]
        logits = logits[:, :, instance]
        variance = None if variance is None else variance[:, :, instance]
        shares = view_shares(logits, variance, likelihood, one_hot, noisy=False)
    load = (likelihood.class_weights is not None) * shares.size / shares.total
    ratio = shares.target / shares.mixture
    weight = shares.inverse * np.einsum("ckn,cn->kn", shares.proba, ratio)  # (K, n): rho
    if likelihood.class_weights is not None:
        weight += 1 - load
    if not likelihood.calibrate:
        return weight, size
    by_kappa, by_offset = _calibration_scores(shares, logits, variance, likelihood, ratio - load)
    rows = [weight, by_kappa.sum(axis=0, keepdims=True), by_kappa[free]]
    if len(by_offset) <= _MOST_CLASSES:
        rows.append(by_offset)
    return np.concatenate(rows), size


def _profile(rho: Array, free: Array, size: Array) -> Array:
    """Log likelihood where a dropped view takes each weight of the grid from all the others: (K, G)."""
    profile = np.zeros((len(rho), len(PROFILE_GRID)))
    for place, weight in enumerate(PROFILE_GRID):
        inside = np.maximum(1 - weight + weight * rho[~free], np.finfo(np.float64).tiny)
        profile[~free, place] = np.vecdot(np.log(inside), size)
    return profile


def _calibration_scores(
    shares: ViewShares, logits: Array, variance: Array | None, likelihood: Likelihood, ratio: Array
) -> tuple[Array, Array]:
    """Scores of ln kappa_k (K, n) and o (C, n)."""
    kappa = np.exp(likelihood.calibration.log_kappa)[:, None]
    if likelihood.link == "probit":
        by_kappa, by_utility = utility_gradient(shares, logits, variance, likelihood, ratio)
        return kappa * by_kappa.T, by_utility.sum(axis=1).T
    net = shares.scale * np.einsum("ckn,cn->kn", shares.joint, ratio)
    centred = np.einsum("ckn,cn->kn", shares.joint * logits, ratio) * shares.scale
    centred -= net * np.einsum("ckn,ckn->kn", shares.proba, logits) * shares.inverse
    return kappa * centred, shares.mixture * ratio - np.einsum("ckn,kn->cn", shares.proba, net * shares.inverse)
