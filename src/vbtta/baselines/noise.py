"""Baselines that know of noise: annotators who err, and residuals whose spread varies."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vbtta.baselines.solvers import conditional_logit
from vbtta.data.labels import Array
from vbtta.distributions import ContinuousPrediction

_MAX_STEPS, _TOLERANCE = 100, 1e-5  # of the EM, and change of a probability at which it stops
_LEAST = 1e-10  # probability in a confusion matrix
_FAR = 3.0  # standard deviations to which the prediction counts in the scale


class Votes(NamedTuple):
    """Class labels, one entry each."""

    row: Array  # (J,): instances, which count from 0
    label: Array  # (J,)
    annotator: Array  # (J,); zeros where annotators are not named
    times: Array  # (J,): how often each was given


def infer_truth(votes: Votes, n_classes: int, log_prior: Callable[[Array], Array]) -> Array:
    """Posterior (N, C) of the true classes by EM, with a confusion matrix an annotator at its maximum likelihood.

    `log_prior` gives the log prior (N, C), or (C,), at its own maximum for a posterior.
    """
    n_rows, people = int(votes.row.max()) + 1, int(votes.annotator.max()) + 1
    truth = np.zeros((n_rows, n_classes))
    np.add.at(truth, (votes.row, votes.label), votes.times)
    truth /= truth.sum(axis=1, keepdims=True)
    for _ in range(_MAX_STEPS):
        counts = np.zeros((people, n_classes, n_classes))  # annotator, label, truth
        np.add.at(counts, (votes.annotator, votes.label), truth[votes.row] * votes.times[:, None])
        noise = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
        evidence = np.zeros_like(truth)
        log_noise = np.log(np.maximum(noise, _LEAST))
        np.add.at(evidence, votes.row, log_noise[votes.annotator, votes.label] * votes.times[:, None])
        before, truth = truth, special.softmax(log_prior(truth) + evidence, axis=1)
        if np.abs(truth - before).max() < _TOLERANCE:
            break
    return truth


def dawid_skene(votes: Votes, n_classes: int) -> Array:
    """Posterior of the true classes from labels alone (A. Dawid, A. Skene 1979)."""
    return infer_truth(votes, n_classes, lambda truth: np.log(np.maximum(truth.mean(axis=0), _LEAST)))


def stacked_truth(votes: Votes, log_proba: Array) -> Array:
    """Coefficients (K,) of stacked log probabilities (N, K, C), inferred together with the annotators' matrices.

    V. Raykar and others, "Learning from crowds" (2010), with a conditional logit of the views as the classifier.
    """
    coefficient = np.zeros(log_proba.shape[1])

    def log_prior(truth: Array) -> Array:
        coefficient[:] = conditional_logit(log_proba, truth)[1]
        return np.asarray(special.log_softmax(np.einsum("k,nkc->nc", coefficient, log_proba), axis=1))

    infer_truth(votes, log_proba.shape[2], log_prior)
    return coefficient


def student_density(mean: Array, y: Array, count: Array) -> Callable[[Array], ContinuousPrediction]:
    """Student t around point predictions (N, C), whose log scale is linear in the prediction, by maximum likelihood."""
    centre, unit, C = mean.mean(axis=0), np.maximum(mean.std(axis=0), 1e-300), mean.shape[1]
    x, residual = _covariate(mean, centre, unit), y - mean
    typical = np.sqrt(np.maximum(np.average(residual**2, axis=0, weights=count), 1e-12 * np.mean(y**2) + 1e-300))

    def loss(parameters: Array) -> float:
        log_scale, slope, dof = parameters[:C], parameters[C], 2 + np.exp(parameters[C + 1])
        square = ((residual / (typical * np.exp(log_scale))) ** 2).sum(axis=1) * np.exp(-2 * slope * x)
        norm = special.gammaln((dof + C) / 2) - special.gammaln(dof / 2) - C / 2 * np.log(dof)
        return -float(count @ (norm - log_scale.sum() - C * slope * x - (dof + C) / 2 * np.log1p(square / dof)))

    bounds = [(-5.0, 5.0)] * C + [(-2.0, 2.0), (-3.0, 6.0)]
    best = optimize.minimize(loss, np.append(np.zeros(C + 1), 1.5), bounds=bounds).x
    scale = np.diag((typical * np.exp(best[:C])) ** 2)
    return partial(_student, centre=centre, unit=unit, scale=scale, slope=best[C], dof=2 + np.exp(best[C + 1]))


def _covariate(mean: Array, centre: Array, unit: Array) -> Array:
    return np.asarray(np.clip(((mean - centre) / unit).mean(axis=1), -_FAR, _FAR))


def _student(mean: Array, centre: Array, unit: Array, scale: Array, slope: float, dof: float) -> ContinuousPrediction:
    stretch = np.exp(2 * slope * _covariate(mean, centre, unit))[:, None, None, None]
    return ContinuousPrediction(np.ones((len(mean), 1)), np.array([dof]), mean[:, None], stretch * scale)
