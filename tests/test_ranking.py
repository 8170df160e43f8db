"""Rankings: weights, temperature, and the items that come first."""

from pathlib import Path

import numpy as np
import pytest

from vbtta import ADVI, LabelSets, Policy, ViewPredictions, fit_policy

pytest.importorskip("pyro", reason="ADVI needs the extra advi")


def test_rankings_recover_weights_and_temperature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    N, L = 500, 4
    f = 1.5 * rng.normal(size=(N, 3, L))
    z = rng.choice(3, size=N, p=[0.6, 0.3, 0.1])
    orders = [np.argsort(-(2 * f[i, z[i]] + rng.gumbel(size=L)))[: 2 + 2 * (i % 2)].tolist() for i in range(N)]
    labels = LabelSets.from_rankings(orders)
    predictions = ViewPredictions(f)
    policy = fit_policy(predictions, labels, task="ranking", engine=ADVI(steps=300, particles=4, learning_rate=0.05))
    np.testing.assert_allclose(policy.weights, np.bincount(z) / N, atol=0.07)
    kappa = np.exp(policy.posterior.draws()["log_kappa"]).mean() / policy.posterior.score_units.scale  # type: ignore[attr-defined]
    assert kappa == pytest.approx(2, rel=0.15)

    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    prediction = loaded.predict(predictions)
    first = np.array([order[0] for order in orders])
    assert prediction.log_prob(first).mean() > np.log(1 / L) + 0.3
    everything = [LabelSets.from_rankings([order] + [None] * (N - 1)) for order in ([0], [1], [2], [3])]
    total = sum(np.exp(loaded.score(predictions, ranking))[0] for ranking in everything)
    assert total == pytest.approx(1)  # some item is the best
    assert loaded.consensus(predictions, labels).proba.shape == (N, L)
