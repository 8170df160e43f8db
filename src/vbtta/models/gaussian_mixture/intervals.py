"""Observed information of the weights of a continuous mixture."""

import numpy as np
from scipy.linalg import block_diag

from vbtta.data.labels import Array
from vbtta.inference.blocks import Block, products
from vbtta.inference.laplace import PROFILE_GRID, WeightInformation, group_sums
from vbtta.inference.laplace import weight_information as information_of
from vbtta.inference.linalg import student_precision
from vbtta.models.gaussian_mixture.posterior import MixtureFactors
from vbtta.models.gaussian_mixture.steps import Density, Expectation, MixturePrior, expectation
from vbtta.models.parts.gate import Lookup, weight_scores
from vbtta.models.parts.standard import ContinuousBlocks


def weight_information(
    subsample: ContinuousBlocks,
    data: ContinuousBlocks,
    prior: MixturePrior,
    state: MixtureFactors,
    gate: Lookup | None = None,
) -> WeightInformation:
    """Sums of outer products of scores at the likelihood's maximum, calibration and precision eliminated."""
    # Scores of a subsample are scaled up to all data. A dropped view is profiled over a grid of weights, both at its
    # fitted calibration and at the common one with the others' precision. With a gate it is that on (ln v, b).
    views, K = state.views, len(state.views.weights)
    free = views.weights > 0
    flat = np.zeros(K)  # equal weights: dropped views have scores too
    density = Density.of(views, prior, flat, plug_in=True)
    pooled = np.einsum("k,kcd->cd", views.weights, views.precision)
    uncalibrated = views._replace(
        theta_mean=np.where(free[:, None], views.theta_mean, views.common_mean),
        inverse_scale=np.where(
            free[:, None, None], views.inverse_scale, views.dof[:, None, None] * np.linalg.inv(pooled)
        ),
    )
    plain = Density.of(uncalibrated, prior, flat, plug_in=True)

    n_groups = subsample.n_groups

    def block_sums(block: Block) -> tuple[Array, Array, Array, Array, Array | None]:
        expected = expectation(block, density, prior, state.annotators, gate)
        count = block.repeats if state.annotators is None else np.ones(expected.share.shape[1])
        gated = np.ones((K, 1)) if expected.gate is None else np.exp(expected.gate.offset)
        weights = views.weights[:, None] * gated  # (K, 1) or (K, j)
        ratio = _ratios(expected.share / count, views.weights) / gated
        scores = scores_of(expected, density, views.weights, weights * ratio, ratio)
        other = expectation(block, plain, prior, state.annotators, gate).share / count
        other = _ratios(other, views.weights) / gated
        weighted, grouped = scores * count, None
        if block.group is not None:
            one_each = block.instance is None or state.annotators is not None
            group = block.group if one_each else block.group[block.instance]
            grouped = group_sums(weighted, count, group, n_groups)
        return (
            products(weighted, scores),
            _profile(ratio, weights, count),
            _profile(other, weights, count),
            np.asarray(count.sum()),
            grouped,
        )

    outer, fitted, unfitted, seen, grouped = subsample.total(block_sums)
    total = data.n_labels if state.annotators is None else data.n_instances
    C, n_free = prior.n_outputs, int(free.sum())
    common = student_precision(views.common_mean**2, prior.common_scale)  # (D,)
    shared = prior.beta * (prior.beta / (common + n_free * prior.beta))  # (D,)
    inner = prior.beta * np.eye(n_free) - shared[:, None, None]  # (D, F, F)
    nuisance = block_diag(*inner, 0.5 * prior.nu * C * np.eye(n_free))
    scale = total / float(seen)
    profile = np.maximum(
        *(scale * (log_likelihood - log_likelihood.max(axis=1, keepdims=True)) for log_likelihood in (fitted, unfitted))
    )
    n_kept = K if gate is None else K + len(gate.values)
    return information_of(views.weights, scale * outer, nuisance, profile, grouped, n_kept)


def gate_score(
    data: ContinuousBlocks, density: Density, prior: MixturePrior, state: MixtureFactors, gate: Lookup
) -> tuple[Array, Array]:
    """Gradient (F,) of the log likelihood in a gate's coefficients, and the sum of its units' outer products (F, F)."""
    weights = state.views.weights

    def block_sums(block: Block) -> tuple[Array, Array]:
        expected = expectation(block, density, prior, state.annotators, gate)
        assert expected.gate is not None
        scores = weight_scores(expected.gate, weights, expected.share / expected.repeats)[len(weights) :]
        return scores @ expected.repeats, products(scores * expected.repeats, scores)

    return data.total(block_sums)


def _ratios(relative: Array, weights: Array) -> Array:
    """rho_jk (K, j): a view's density over the mixture's, from densities relative to their sum.

    With a gate the densities include exp(b . phi) and the ratios too.
    """
    return np.asarray(relative / np.einsum("k,kj->j", weights, relative))


def _profile(ratio: Array, weights: Array, count: Array) -> Array:
    """Log likelihood (K, G) with view k at the grid's weights and the others in proportion, less the maximum."""
    rest = np.maximum(1 - weights, 1e-12)
    others = np.maximum((1 - weights * ratio) / rest, 1e-300)  # (K, j): the mixture without view k
    columns = [np.vecdot(np.log(np.maximum((1 - w) * others + w * ratio, 1e-300)), count) for w in PROFILE_GRID]
    return np.stack(columns, axis=1)


def scores_of(expected: Expectation, density: Density, weights: Array, share: Array, ratio: Array) -> Array:
    """Derivatives of every label's log likelihood: weights, calibration, log precision; (K + F (D + 1), j)."""
    free = np.flatnonzero(weights > 0)
    first = ratio if expected.gate is None else weight_scores(expected.gate, weights, share)
    share = share[free]  # (F, j)
    residual = expected.residual[:, free]  # (C, F, j)
    C = len(residual)
    pull = np.einsum("kcd,dkj->ckj", density.residual_form[free], residual)  # Lambda e
    columns = [regressor[free] for regressor in expected.regressors]
    if expected.log_omega is None:
        columns += [np.ones_like(share)] * C
    calibration = [share * column * pull[d % C] for d, column in enumerate(columns)]
    distance = (residual * pull).sum(axis=0)
    if expected.truth is not None:
        distance += np.einsum("kcd,kjcd->kj", density.residual_form[free], expected.truth.covariance[free])
    precision = share * 0.5 * (C - distance)
    return np.concatenate([first, *calibration, precision])
