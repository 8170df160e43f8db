"""Links: gradients, fast paths that equal the general ones, and a new entry of the table that needs nothing else."""

import numpy as np
import pytest
from scipy import special

from problems import posed
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.inference.em import EM, ascend
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.models.categorical_mixture.em import Likelihood, view_shares
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.parts.links import LINKS, Calibration, Link


class ComplementaryLogLog(Link):
    """P(1) = 1 - exp(-exp(u_1 - u_0))."""

    information = 1.92

    def log_proba(self, utility, variance):
        rate = np.exp(np.clip(utility[..., 1] - utility[..., 0], -600, 6))
        return np.stack([-rate, np.log(-np.expm1(-rate))], axis=-1)

    def gradient(self, utility, variance, weight):
        rate = np.exp(np.clip(utility[:, 1] - utility[:, 0], -600, 6))
        by_difference = weight[:, 1] * rate / np.expm1(rate) - weight[:, 0] * rate
        return np.stack([-by_difference, by_difference], axis=1), None


@pytest.mark.parametrize("link", [*LINKS.values(), ComplementaryLogLog()], ids=lambda link: type(link).__name__)
def test_gradients_are_those_of_the_log_probabilities(link):
    rng = np.random.default_rng(0)
    utility, weight = rng.normal(size=(6, 2)), rng.normal(size=(6, 2))
    variance = rng.gamma(1.0, size=(6, 2)) if link.uses_variance else None
    np.testing.assert_allclose(np.exp(link.log_proba(utility, variance)).sum(axis=1), 1)
    np.testing.assert_allclose(link.log_proba(utility + 3, variance), link.log_proba(utility, variance), rtol=1e-9)
    by_utility, by_variance = link.gradient(utility, variance, weight)

    def slope(change, in_variance):
        values = [
            link.log_proba(utility, variance + step) if in_variance else link.log_proba(utility + step, variance)
            for step in (change, -change)
        ]
        return (weight * (values[0] - values[1])).sum(axis=1) / 2e-5

    for c, change in enumerate(1e-5 * np.eye(2)):
        np.testing.assert_allclose(by_utility[:, c], slope(change, False), atol=1e-6)
        if by_variance is not None:
            np.testing.assert_allclose(by_variance[:, c], slope(change, True), atol=1e-6)


@pytest.mark.parametrize("by_class", [False, True])
def test_fast_softmax_equals_the_general_link(by_class):
    rng = np.random.default_rng(1)
    C, K, n = 4, 3, 20
    logits = rng.normal(size=(C, K, n))
    logits -= logits.max(axis=0)
    weights = rng.dirichlet(np.ones(K))
    class_weights = rng.dirichlet(np.ones(K), size=C).T if by_class else None
    calibration = Calibration(0.3 * rng.normal(size=K), 0.2 * rng.normal(size=C))
    softmax = LINKS["softmax"]
    likelihood = Likelihood(softmax, True, True, calibration, weights, class_weights)
    views = view_shares(logits, None, likelihood, rng.poisson(1.0, size=(C, n)).astype(float), None, None).views
    ratio = rng.normal(size=(C, n)) / views.mixture
    share = views.scale * np.einsum("ckn,cn->kn", views.joint, ratio)
    fast, general = softmax.scores(views, ratio, share), Link.scores(softmax, views, ratio, share)
    np.testing.assert_allclose(fast.by_kappa, general.by_kappa, atol=1e-10)
    np.testing.assert_allclose(fast.by_offset, general.by_offset, atol=1e-10)
    utility = rng.normal(size=(C, n))
    for proba, inverse in (softmax.proba(utility.copy(), None), Link.proba(softmax, utility.copy(), None)):
        np.testing.assert_allclose(proba * inverse, special.softmax(utility, axis=0))


@pytest.mark.parametrize("noise", ["none", "uniform", "confusion"])
@pytest.mark.parametrize("model", [CategoricalMixture, CategoricalLatent])
def test_a_link_is_one_entry_of_the_table(model, noise, monkeypatch):
    monkeypatch.setitem(LINKS, "cloglog", ComplementaryLogLog())
    rng = np.random.default_rng(2)
    score = 2 * rng.normal(size=(300, 1)) + rng.normal(size=(300, 3)) * [0.1, 1.0, 3.0]
    truth = rng.random((300, 1)) < -np.expm1(-np.exp(score[:, :1]))
    labels = LabelSets.from_array(np.where(rng.random((300, 2)) < 0.9, truth, ~truth).astype(int))
    predictions = ViewPredictions(np.stack([np.zeros_like(score), score], axis=2))
    ends = {}
    for link in ("softmax", "cloglog"):
        problem, first = posed(predictions, labels, model(link=link), noise=noise)
        ascent = ascend(problem, first, EM(max_steps=100))
        assert (np.diff(ascent.bounds) >= -1e-9 * abs(ascent.bounds[0])).all()
        interval = problem.finish(ascent).weight_interval(0.9)
        assert (interval[:, 1] > 0).all()
        ends[link] = ascent.bounds[-1]
    assert ends["cloglog"] > ends["softmax"]  # the labels were drawn through it
