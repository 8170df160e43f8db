"""A fitted pool's point prediction as plain arrays, for those who compute it elsewhere (a network, an export).

    linear:   sum_k s_k f_k + b
    mixture:  sum_k w_k P(s_k f_k + b), divided by its sum over the classes where weights are by class
    latent:   P(sum_k s_k f_k + b)

with P the softmax or the probability that a normal utility of unit variance is the largest.
"""

__all__ = ["Pooling", "pooling_of"]

from typing import Any, NamedTuple

import numpy as np

from vbtta.infer import continuous
from vbtta.infer.categorical_latent_posterior import LatentClassPosterior
from vbtta.infer.categorical_posterior import CategoricalPosterior
from vbtta.infer.latent_fit import LatentPosterior
from vbtta.infer.mixture_posterior import MixturePosterior
from vbtta.labels import Array


class Pooling(NamedTuple):
    """How the views of positive weight, in the order of the fit, become one prediction in the user's units."""

    kind: str  # "linear", "mixture" or "latent"
    link: str  # "softmax" or "probit"; "" for a linear pool
    scale: Array  # (K, C)
    offset: Array  # (C,)
    weights: Array  # (K, C); ones where the weights are in the scale


def pooling_of(posterior: Any) -> Pooling:
    """The point prediction of a posterior, without variances over draws."""
    if isinstance(posterior, MixturePosterior):
        return _continuous_mixture(posterior)
    if isinstance(posterior, LatentPosterior):
        pool = posterior.state.pool[posterior.weights > 0]
        standard, C = posterior.standard, len(posterior.state.offset)
        offset = standard.location * (1 - pool.sum()) + standard.scale * posterior.state.offset
        return Pooling("linear", "", np.repeat(pool[:, None], C, axis=1), offset, np.ones((len(pool), C)))
    if isinstance(posterior, CategoricalPosterior):
        used, offset = posterior.weights > 0, posterior.calibration.offset
        C = len(offset)
        weights = np.repeat(posterior.weights[:, None], C, axis=1)
        if posterior.class_weights is not None:
            weights = posterior.class_weights
        scale = np.repeat(posterior.kappa[used][:, None], C, axis=1)
        return Pooling("mixture", posterior.link, scale, offset, weights[used])
    if isinstance(posterior, LatentClassPosterior):
        used, C = posterior.weights > 0, len(posterior.offset)
        pool = (posterior.gain * posterior.weights)[used]
        scale = np.repeat(pool[:, None], C, axis=1)
        return Pooling("latent", posterior.link, scale, posterior.offset, np.ones_like(scale))
    raise ValueError(
        f"a {type(posterior).__name__} has no closed point prediction outside Policy.predict; fit with engine='em'"
    )


def _continuous_mixture(posterior: MixturePosterior) -> Pooling:
    """sum_k w_k (l + s (a_k + g_k (f_k - l)/s)), with l, s the labels' location and scale, a and g the calibration."""
    used, C = posterior.weights > 0, posterior.prior.n_outputs
    weights = posterior.predictive_weights[used][:, None]
    shift, gain = continuous.calibration(posterior.state.views.theta_mean[used], C)  # (K, C) each
    scale = np.broadcast_to(weights * gain, (len(weights), C)).copy()
    standard = posterior.standard
    offset = standard.location * (1 - scale.sum(axis=0)) + standard.scale * (weights * shift).sum(axis=0)
    return Pooling("linear", "", scale, offset, np.ones((len(weights), C)))
