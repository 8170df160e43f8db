"""conformalize covers what it says, agrees with MAPIE and crepes, and refuses what would break its guarantee."""

import json

import numpy as np
import pytest
from scipy import special

from vbtta import (
    CategoricalLatent,
    ConformalPolicy,
    GaussianLatent,
    LabelSets,
    Policy,
    ViewPredictions,
    conformalize,
    fit_policy,
)
from vbtta.conformal import Penalty, class_scores
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction

SPLITS = 200


class Softmax:
    """The first view's logits as probabilities."""

    def predict(self, predictions):
        proba = special.softmax(predictions.outputs[:, 0], axis=1)
        return CategoricalPrediction(proba, np.zeros(len(proba)), np.arange(proba.shape[1]))


class Normal:
    """The first view is the mean, and the exponential of the second the standard deviation."""

    def predict(self, predictions):
        mean, spread = predictions.outputs[:, :1], np.exp(predictions.outputs[:, 1])
        n = len(mean)
        return ContinuousPrediction(np.ones((n, 1)), np.array([np.inf]), mean, (spread**2)[:, None, :, None])


def classes(rng, n, n_classes=4):
    """Logits that are overconfident, and labels."""
    label = rng.choice(n_classes, size=n, p=np.arange(1, n_classes + 1) / 10)
    signal = rng.uniform(0, 2, size=(n, 1)) * np.eye(n_classes)[label] + rng.normal(size=(n, n_classes))
    signal[:, 0] -= 1  # the rare class is overlooked
    return ViewPredictions(3 * signal[:, None]), label


def numbers(rng, n):
    """Means, misstated spreads and skewed values."""
    spread = rng.uniform(-1, 1, size=n)
    truth = rng.normal(size=n) + np.exp(spread) * (rng.exponential(size=n) - 0.3)
    mean = truth - np.exp(spread) * (rng.exponential(size=n) - 0.5)
    return ViewPredictions(np.stack([mean, 0.5 * spread], axis=1)[:, :, None]), truth


def within_error(coverages, level, tolerance=4):
    """The mean of the splits' coverages is the level, up to Monte Carlo error and the 1/(n + 1) of a finite sample."""
    error = np.std(coverages) / np.sqrt(len(coverages))
    return level - tolerance * error < np.mean(coverages) < level + 1 / 101 + tolerance * error


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_sets_cover_at_every_level(method, rng):
    coverage = []
    for _ in range(SPLITS):
        calibration, test = classes(rng, 130), classes(rng, 200)
        conformal = conformalize(Softmax(), *calibration, level=[0.8, 0.9], method=method)
        sets = conformal.predict_set(test[0])
        coverage.append(sets[np.arange(200), test[1]].mean(axis=0))
    assert sets.shape == (200, 4, 2)
    assert np.all(sets[:, :, 0] <= sets[:, :, 1])
    assert within_error(np.array(coverage)[:, 0], 0.8)
    assert within_error(np.array(coverage)[:, 1], 0.9)


def test_intervals_cover_and_adapt(rng):
    coverage = []
    for _ in range(SPLITS):
        calibration, test = numbers(rng, 100), numbers(rng, 200)
        lower, upper = conformalize(Normal(), *calibration).predict_interval(test[0])
        coverage.append(np.mean((lower[:, 0] <= test[1]) & (test[1] <= upper[:, 0])))
    assert lower.shape == upper.shape == (200, 1)
    assert within_error(coverage, 0.9)
    width = (upper - lower)[:, 0]
    assert np.corrcoef(width, test[0].outputs[:, 1, 0])[0, 1] > 0.9


def test_every_class_is_covered_with_class_strata(rng):
    by_class: list[float] = []
    marginal: list[float] = []
    for _ in range(SPLITS):
        calibration, test = classes(rng, 300), classes(rng, 400)
        rare = test[1] == 0
        for strata, coverage in (("class", by_class), (None, marginal)):
            sets = conformalize(Softmax(), *calibration, level=0.8, strata=strata).predict_set(test[0])
            coverage.append(sets[rare, 0].mean())
    error = np.std(by_class) / np.sqrt(SPLITS)
    assert 0.8 - 4 * error < np.mean(by_class) < 0.8 + 1 / 20 + 4 * error
    assert np.mean(marginal) < 0.78  # without strata the rare class is not


def test_strata_of_inputs_have_their_own_thresholds(rng):
    predictions, truth = numbers(rng, 4000)
    where = np.where(rng.random(4000) < 0.5, "north", "south")
    shifted = np.where(where == "north", truth, truth + 5)
    half = np.arange(4000) < 2000
    conformal = conformalize(Normal(), predictions.take(half), shifted[half], strata=where[half])
    lower, upper = conformal.predict_interval(predictions.take(~half), strata=where[~half])
    inside = (lower[:, 0] <= shifted[~half]) & (shifted[~half] <= upper[:, 0])
    for name in ("north", "south"):
        assert inside[where[~half] == name].mean() == pytest.approx(0.9, abs=0.04)
    assert conformal.strata == ("north", "south")
    with pytest.raises(ValueError, match="strata must be given"):
        conformal.predict_interval(predictions)
    with pytest.raises(ValueError, match="strata has 'west', which was not in the calibration sample"):
        conformal.predict_interval(predictions, strata=["west"] * 4000)


def test_rows_of_new_groups_are_covered(rng):
    """Small groups have large errors, and rows of a group share theirs: rows are no independent draws."""
    coverage: dict[str, list] = {"groups": [], "rows": []}
    for _ in range(SPLITS):
        small = rng.random(40) < 0.5
        group = np.repeat(np.arange(40), np.where(small, 5, 35))
        truth = rng.normal(size=len(group))
        error = (rng.normal(size=40) * np.where(small, 3, 0.2))[group] + 0.1 * rng.normal(size=len(group))
        views = np.stack([truth + error, np.zeros(len(group))], axis=1)[:, :, None]
        known, new = group < 20, group >= 20
        for units, groups in (("groups", group[known]), ("rows", None)):
            calibration = ViewPredictions(views[known], groups=groups)
            conformal = conformalize(Normal(), calibration, truth[known], level=0.8)
            lower, upper = conformal.predict_interval(ViewPredictions(views[new]))
            inside = (lower[:, 0] <= truth[new]) & (truth[new] <= upper[:, 0])
            coverage[units].append(np.mean([inside[group[new] == place].mean() for place in range(20, 40)]))
    error = np.std(coverage["groups"]) / np.sqrt(SPLITS)
    assert 0.8 - 3 * error < np.mean(coverage["groups"]) < 0.8 + 1 / 21 + 3 * error
    assert np.mean(coverage["rows"]) < 0.7
    with pytest.raises(ValueError, match=r"level 0\.96 needs at least 24 labelled calibration inputs, or groups"):
        conformalize(Normal(), ViewPredictions(views, groups=group // 2), truth, level=0.96)


def noisy_sample(rng, n):
    """Two views' logits, true classes, and three people's labels of which a third is wrong."""
    truth = rng.integers(4, size=n)
    logits = 1.5 * np.eye(4)[truth][:, None] + rng.normal(size=(n, 2, 4))
    wrong = rng.random((n, 3)) < 0.3
    labels = np.where(wrong, rng.integers(4, size=(n, 3)), truth[:, None])
    return ViewPredictions(logits, names=["identity", "flip"]), truth, labels


def test_scores_weighted_by_the_consensus_cover_the_truth(rng):
    model = CategoricalLatent(noise="uniform")
    policy = fit_policy(*noisy_sample(rng, 800)[::2], task="classification", model=model)
    covered: dict[str, list] = {"label": [], "truth": []}
    sizes: dict[str, list] = {"label": [], "truth": []}
    for _ in range(40):
        predictions, _, labels = noisy_sample(rng, 400)
        test, truth, _ = noisy_sample(rng, 1000)
        for covers in covered:
            sets = conformalize(policy, predictions, labels, level=0.8, covers=covers).predict_set(test)
            covered[covers].append(sets[np.arange(1000), truth].mean())
            sizes[covers].append(sets.sum(axis=1).mean())
    assert np.mean(covered["truth"]) == pytest.approx(0.8, abs=0.02)
    assert np.mean(covered["label"]) > 0.85  # labels are harder to cover than truths
    assert np.mean(sizes["truth"]) < 0.8 * np.mean(sizes["label"])


def test_the_consensus_covers_true_numbers(rng):
    def sample(n):
        truth = rng.normal(size=n)
        views = truth[:, None] + rng.normal(size=(n, 2))
        labels = truth[:, None] + rng.normal(size=(n, 3))
        return ViewPredictions(views[:, :, None], names=["identity", "flip"]), truth, labels

    predictions, _, labels = sample(800)
    policy = fit_policy(
        predictions, LabelSets.from_array(labels, annotators=["a", "b", "c"]), task="regression", model="latent"
    )
    calibration, _, label_sets = sample(800)
    test, truth, _ = sample(4000)
    label_sets = LabelSets.from_array(label_sets, annotators=["a", "b", "c"])
    coverage = {}
    for covers in ("label", "truth"):
        lower, upper = conformalize(policy, calibration, label_sets, level=0.8, covers=covers).predict_interval(test)
        coverage[covers] = np.mean((lower[:, 0] <= truth) & (truth <= upper[:, 0]))
    assert coverage["truth"] == pytest.approx(0.8, abs=0.03)
    assert coverage["label"] > 0.9


def test_several_labels_of_an_input_count_with_their_shares(rng):
    predictions, label = classes(rng, 200)
    once = conformalize(Softmax(), predictions, label)
    twice = conformalize(Softmax(), predictions, np.stack([label, label], axis=1))
    np.testing.assert_allclose(once.thresholds, twice.thresholds)
    assert twice.n_units == pytest.approx(200)


def test_instance_weights_count(rng):
    predictions, truth = numbers(rng, 300)
    far = np.abs(truth - predictions.outputs[:, 0, 0]) > 1
    plain = conformalize(Normal(), predictions, truth)
    heavy = LabelSets.from_array(truth).with_weights(np.where(far, 3.0, 1.0))
    assert conformalize(Normal(), predictions, heavy).thresholds > plain.thresholds
    even = LabelSets.from_array(truth).with_weights(np.full(300, 7.0))
    np.testing.assert_allclose(conformalize(Normal(), predictions, even).thresholds, plain.thresholds)


def policy_and_sample(rng, n=150):
    truth = rng.normal(size=n)
    views = ViewPredictions(truth[:, None, None] + rng.normal(size=(n, 3, 1)), names=["identity", "flip", "crop"])
    return fit_policy(views, truth, task="regression", model=GaussianLatent(shrinkage=1.0), guard=False), views, truth


def test_rows_of_the_fit_are_refused_unless_crossed(rng):
    policy, views, truth = policy_and_sample(rng)
    with pytest.raises(ValueError, match=r"rows that the policy was fitted to .*cross=True"):
        conformalize(policy, views, truth)
    pruned = policy.prune(0.3)
    with pytest.raises(ValueError, match="rows that the policy was fitted to"):
        conformalize(pruned, views.select(pruned.used_names).take(slice(100)), truth[:100])
    _, others, values = policy_and_sample(rng)
    assert conformalize(policy, others, values).n_units == 150
    assert conformalize(policy, views, truth, cross=True).n_units == 150
    with pytest.raises(ValueError, match="cross=True refits a Policy or a SequentialPolicy; got Normal"):
        conformalize(Normal(), views, truth, cross=True)


def test_equal_outputs_of_other_inputs_are_no_rows_of_the_fit(rng):
    votes = rng.integers(0, 3, size=(300, 2, 3)).astype(float)
    label = rng.integers(3, size=300)
    views = ViewPredictions(votes, names=["identity", "flip"])
    first, second = np.arange(300) < 150, np.arange(300) >= 150
    few = views.outputs.copy()
    few[:, :, 1:] = 0  # nine different rows
    views = ViewPredictions(few, names=["identity", "flip"])
    policy = fit_policy(views.take(first), label[first], task="classification")
    conformalize(policy, views.take(second), label[second])


def test_cross_conformal_covers(rng):
    coverage = []
    for _ in range(60):
        policy, views, truth = policy_and_sample(rng, 60)
        _, test, values = policy_and_sample(rng, 60)
        lower, upper = conformalize(policy, views, truth, cross=True, level=0.8).predict_interval(test)
        coverage.append(np.mean((lower[:, 0] <= values) & (values <= upper[:, 0])))
    assert np.mean(coverage) == pytest.approx(0.8, abs=4 * np.std(coverage) / np.sqrt(60) + 0.02)


def test_strata_of_a_series_are_paired_by_id(rng):
    pandas = pytest.importorskip("pandas")
    predictions, label = classes(rng, 300)
    names = [f"image {row}" for row in range(300)]
    named = ViewPredictions(predictions.outputs, names=predictions.names, ids=names)
    where = np.where(np.arange(300) < 150, "first", "second")
    shuffled = pandas.Series(where, index=names).sample(frac=1, random_state=0)
    by_row, by_id = (conformalize(Softmax(), named, label, strata=strata) for strata in (where, shuffled))
    np.testing.assert_array_equal(by_id.thresholds, by_row.thresholds)
    np.testing.assert_array_equal(
        by_id.predict_set(named, strata=shuffled), by_row.predict_set(predictions, strata=where)
    )


def test_too_few_rows_are_named(rng):
    predictions, truth = numbers(rng, 18)
    with pytest.raises(ValueError, match=r"level 0\.95 needs at least 19 labelled calibration inputs.*there are 18"):
        conformalize(Normal(), predictions, truth, level=[0.5, 0.95])
    conformalize(Normal(), *numbers(rng, 19), level=0.95)
    policy, views, truth = policy_and_sample(rng)
    with pytest.raises(ValueError, match="cross=True finds thresholds by held-out scores, which need at least 5"):
        conformalize(policy, views.take(slice(1)), truth[:1], level=0.5, cross=True)
    predictions, label = classes(rng, 60)
    with pytest.raises(ValueError, match="stratum '0' has"):
        conformalize(Softmax(), predictions, np.where(label == 0, 1, label), strata="class")


def test_bad_arguments_are_named(rng):
    predictions, label = classes(rng, 60)
    for options, message in (
        ({"level": 1.0}, "level must be between 0 and 1"),
        ({"level": "0.9"}, "level must be between 0 and 1"),
        ({"method": "distributional"}, "method must be one of 'lac', 'aps', 'raps'; got 'distributional'"),
        ({"covers": "consensus"}, "covers must be one of"),
        ({"covers": "truth"}, "needs a policy with a consensus"),
        ({"strata": ["a"]}, "strata must be 'class' or 60 names"),
        ({"strata": np.where(np.arange(60) == 7, np.nan, 1.0)}, "that of row 7 is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            conformalize(Softmax(), predictions, label, **options)
    conformal = conformalize(Softmax(), predictions, label)
    with pytest.raises(ValueError, match="use predict_set"):
        conformal.predict_interval(predictions)
    with pytest.raises(ValueError, match="cannot be saved"):
        conformal.save("nowhere.json")
    with pytest.raises(TypeError, match="predictions must be ViewPredictions; got ndarray"):
        conformalize(Softmax(), predictions.outputs, label)
    with pytest.raises(TypeError, match=r"policy must be a Policy.* got None"):
        conformalize(None, predictions, label)
    several = (np.arange(60)[:, None] % 2 == np.arange(4) % 2).astype(int)
    policy = fit_policy(predictions, several, task="multilabel", model="mixture", guard=False)
    with pytest.raises(ValueError, match="policy predicts several labels an input"):
        conformalize(policy, predictions, several)
    with pytest.raises(ValueError, match="strata='class' is for classification"):
        conformalize(Normal(), *numbers(rng, 60), strata="class")


def test_files(rng, tmp_path):
    policy, views, truth = policy_and_sample(rng)
    where = rng.choice(["a", "b"], size=150)
    conformal = conformalize(policy, views, truth, cross=True, level=[0.5, 0.8], strata=where)
    path = tmp_path / "conformal.json"
    conformal.save(path)
    loaded = ConformalPolicy.load(path)
    for bound, other in zip(
        conformal.predict_interval(views, strata=where), loaded.predict_interval(views, strata=where), strict=True
    ):
        np.testing.assert_allclose(bound, other, rtol=1e-9)
    np.testing.assert_allclose(loaded.predict(views).mean, policy.predict(views).mean)
    assert repr(loaded) == repr(conformal)
    with pytest.raises(ValueError, match="is not a policy"):
        Policy.load(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "levels": [0.5]}))
    with pytest.raises(ValueError, match="damaged conformal policy"):
        ConformalPolicy.load(path)
    wrong = {"method": "foo", "covers": "foo", "levels": [0.5, 5.0], "strata": ["b", "a"], "n_units": [-1.0, 2.0]}
    wrong["thresholds"] = [[*row, *row] for row in data["thresholds"]]  # of two outputs
    for key, value in wrong.items():
        path.write_text(json.dumps({**data, key: value}))
        with pytest.raises(ValueError, match="damaged conformal policy"):
            ConformalPolicy.load(path, verify=False)
    with pytest.raises(ValueError, match="rows that the policy was fitted to"):
        conformalize(conformal, views, truth)


# -- references -------------------------------------------------------------------------------------------------------


class Ones(np.random.RandomState):
    """MAPIE's scores are randomised; with ones they are those of the classes above."""

    def uniform(self, *args, size=None, **options):
        return np.ones(size)


def test_scores_are_those_of_mapie(rng):
    sets = pytest.importorskip("mapie.conformity_scores.sets")
    raps = pytest.importorskip("mapie.conformity_scores.sets.raps")
    predictions, label = classes(rng, 300)
    proba = Softmax().predict(predictions).proba
    own = {name: class_scores(proba, name, Penalty(0.2, 2.0))[np.arange(300), label] for name in ("lac", "raps")}
    own["aps"] = class_scores(proba, "aps")[np.arange(300), label]
    theirs = {}
    for name, score in (("lac", sets.LACConformityScore()), ("aps", sets.APSConformityScore())):
        score.set_external_attributes(classes=np.arange(4), random_state=Ones())
        theirs[name] = score.get_conformity_scores(label, proba, y_enc=label)[:, 0]
    regularise = raps.RAPSConformityScore._regularize_conformity_score
    theirs["raps"] = regularise(np.array([2.0]), 0.2, theirs["aps"][:, None], score.cutoff)[:, 0, 0]
    for name, values in theirs.items():
        np.testing.assert_allclose(own[name], values, atol=1e-9, err_msg=name)


def test_sets_are_those_of_crepes(rng):
    crepes, extras = pytest.importorskip("crepes"), pytest.importorskip("crepes.extras")
    (predictions, label), (test, _) = classes(rng, 300), classes(rng, 200)
    proba, new = (Softmax().predict(part).proba for part in (predictions, test))
    scores = extras.hinge(proba, np.arange(4), label)
    np.testing.assert_allclose(class_scores(proba, "lac")[np.arange(300), label], scores, atol=1e-9)
    options = {"confidence": 0.877, "smoothing": False}
    theirs = crepes.ConformalClassifier().fit(scores).predict_set(extras.hinge(new), **options)
    own = conformalize(Softmax(), predictions, label, level=0.877)
    np.testing.assert_array_equal(own.predict_set(test), theirs.astype(bool))
    own = conformalize(Softmax(), predictions, label, level=0.877, strata="class")
    for place in range(4):
        fitted = crepes.ConformalClassifier().fit(scores[label == place])
        theirs = fitted.predict_set(extras.hinge(new)[:, [place]], **options)
        np.testing.assert_array_equal(own.predict_set(test)[:, [place]], theirs.astype(bool))


def test_intervals_of_normal_predictions_are_those_of_crepes(rng):
    crepes = pytest.importorskip("crepes")
    (predictions, truth), (test, _) = numbers(rng, 300), numbers(rng, 100)
    mean, spread = predictions.outputs[:, 0, 0], np.exp(predictions.outputs[:, 1, 0])
    fitted = crepes.ConformalRegressor().fit(truth - mean, sigmas=spread)
    theirs = fitted.predict_int(test.outputs[:, 0, 0], sigmas=np.exp(test.outputs[:, 1, 0]), confidence=0.8)
    own = conformalize(Normal(), predictions, truth, level=0.8).predict_interval(test)
    np.testing.assert_allclose(np.hstack(own), theirs, atol=1e-9)
