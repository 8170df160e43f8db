"""Ordered levels: cut points, weights, and labels that are no levels."""

from pathlib import Path

import numpy as np
import pytest

from problems import numbers_of_a_view
from vbtta import ADVI, LabelSets, Policy, ViewPredictions, fit_policy

pytest.importorskip("pyro", reason="ADVI needs the extra advi")

QUICK = ADVI(steps=400, particles=4, learning_rate=0.05)


def test_ordinal_recovers_cut_points_and_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    N = 800
    f = 10 + 2 * (rng.normal(size=(N, 1)) + 0.8 * rng.normal(size=(N, 3)))
    z = rng.choice(3, size=N, p=[0.6, 0.3, 0.1])
    cuts = np.array([7.5, 10.0, 12.0])
    y = np.digitize(f[np.arange(N), z] + 0.8 * rng.normal(size=N), cuts) + 1
    predictions = ViewPredictions(f[:, :, None], names=["identity", "flip", "crop"])
    policy = fit_policy(predictions, y, task="ordinal", engine=QUICK)
    cut_points = policy.cut_points  # type: ignore[attr-defined]
    np.testing.assert_allclose(cut_points.value, cuts, atol=0.35)
    assert (cut_points.interval[:, 0] < cut_points.value).all()
    assert cut_points.noise == pytest.approx(0.8, abs=0.2)
    shares = np.bincount(z) / N
    np.testing.assert_allclose(policy.weights, shares, atol=0.07)

    policy.save(tmp_path / "policy.json")
    prediction = Policy.load(tmp_path / "policy.json").predict(predictions)
    assert prediction.classes.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(prediction.proba.sum(axis=1), 1)
    assert prediction.log_prob(y).mean() > -0.9
    np.testing.assert_allclose(policy.score(predictions, LabelSets.from_array(y)), prediction.log_prob(y))
    assert policy.consensus(predictions, y).log_prob(y).mean() > prediction.log_prob(y).mean()
    words = np.array(["low", "fair", "good", "best"])[y - 1]
    with pytest.raises(ValueError, match="levels"):
        fit_policy(predictions, words, task="ordinal", engine=QUICK)
    with pytest.raises(ValueError, match="ordinal"):
        fit_policy(predictions, y, task="ordinal", engine="em")


def test_numbers_are_no_levels() -> None:
    predictions, y = numbers_of_a_view(N=60)
    with pytest.raises(ValueError, match="60 different values with fractions"):
        fit_policy(predictions, y, task="ordinal")
