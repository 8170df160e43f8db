"""Labels and predictive distributions combined: what the truth of a labelled input is."""

__all__ = ["normalise", "pool_truth"]

import numpy as np

from vbtta.infer import truth
from vbtta.infer.blocks import Block
from vbtta.infer.standard import Standard
from vbtta.infer.truth import AnnotatorState
from vbtta.labels import Array, LabelSets
from vbtta.mixtures import variance_factor
from vbtta.predictions import ContinuousPrediction


def pool_truth(
    prediction: ContinuousPrediction,
    labels: LabelSets,
    annotator: Array,
    people: AnnotatorState,
    standard: Standard,
) -> tuple[ContinuousPrediction, Array]:
    """Combine predictive distributions with labels through the annotators.

    Components are taken as normals of the same covariance; an annotator the fit did not meet is unbiased and as noisy
    as those it met are on average. Returns the truth's distribution and the log evidence of every input's labels (N,).
    """
    N, K, C = prediction.location.shape
    typical_shape = people.shape.mean()
    everybody = AnnotatorState(
        shape=np.append(people.shape, typical_shape),
        rate=np.append(people.rate, typical_shape * (people.rate / people.shape).mean()),
        bias=np.concatenate([people.bias, np.zeros((1, C))]),
        bias_covariance=np.pad(people.bias_covariance, (0, 1)),
    )
    spread = variance_factor(prediction.dof)  # (K,)
    covariance = spread[:, None, None] * prediction.scale / (standard.scale[:, None] * standard.scale)  # (N, K, C, C)
    precision = np.linalg.inv(covariance).swapaxes(0, 1)  # (K, N, C, C)
    labelled = np.flatnonzero(np.bincount(labels.instance, minlength=N))
    block = Block(
        mean=np.moveaxis(standard.apply(prediction.location[labelled]), (0, 1, 2), (2, 1, 0)),
        variance=None,
        instance=np.searchsorted(labelled, labels.instance),
        value=standard.apply(labels.continuous(C)).T,
        repeats=labels.count,
        annotator=np.where(annotator < 0, len(people.shape), annotator),
    )
    log_precision = np.linalg.slogdet(precision[:, labelled])[1]
    pooled = truth.infer_truth(block.mean, precision[:, labelled], log_precision, truth.summarise(block, everybody))
    with np.errstate(divide="ignore"):
        log_share = np.log(prediction.weights)  # (N, K)
    log_share[labelled] += pooled.log_evidence.T
    location = prediction.location.copy()
    location[labelled] = standard.location + standard.scale * np.moveaxis(pooled.mean, (0, 1, 2), (2, 1, 0))
    scale = spread[:, None, None] * prediction.scale
    scale[labelled] = standard.scale[:, None] * pooled.covariance.swapaxes(0, 1) * standard.scale
    top = log_share.max(axis=1, keepdims=True)
    evidence = top[:, 0] + np.log(np.exp(log_share - top).sum(axis=1))
    total = np.bincount(labels.instance, labels.count, N)
    evidence -= total * np.log(standard.scale).sum()
    return ContinuousPrediction(normalise(log_share), np.full(K, np.inf), location, scale), evidence


def normalise(log_share: Array) -> Array:
    """Shares that sum to one along the last axis, from logarithms (N, K)."""
    share = np.exp(log_share - log_share.max(axis=1, keepdims=True))
    return np.asarray(share / share.sum(axis=1, keepdims=True))
