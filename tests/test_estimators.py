"""VBTTAClassifier and VBTTARegressor keep scikit-learn's contract, and leave frozen estimators as they are."""

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, ShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from vbtta import GaussianLatent, GuardWarning, LabelSets, fit_policy
from vbtta.augment import GaussianNoise, Identity
from vbtta.collect import collect_views
from vbtta.estimators import VBTTAClassifier, VBTTARegressor


class Shrink:
    """A view whose printed form has no address in it, so that parallel test runs agree on the tests' names."""

    name = "shrink"
    stochastic = False

    def __call__(self, batch, rng=None):
        return 0.9 * batch

    def __repr__(self):
        return "Shrink()"


VIEWS = [Identity(), Shrink()]
QUICK = {"model": "latent", "guard": False}


def exemptions(estimator):
    return {"check_supervised_y_2d": "a column of labels is one label an input, as in (N, M), and needs no warning"}


@parametrize_with_checks(
    [
        VBTTARegressor(Ridge(), VIEWS, cv=3, **QUICK),
        VBTTAClassifier(LogisticRegression(), VIEWS, cv=3, model="mixture", guard=False),
    ],
    expected_failed_checks=exemptions,
)
@pytest.mark.filterwarnings("ignore::vbtta.policy.ConvergenceWarning")
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def regression():
    X, y = make_regression(160, 5, noise=10.0, random_state=0)
    return X[:80], y[:80], X[80:], y[80:]


@pytest.fixture(scope="module")
def classification():
    X, y = make_classification(240, 6, n_informative=4, n_classes=3, random_state=0)
    return X[:120], y[:120], X[120:], y[120:]


def test_a_frozen_estimator_is_used_as_it_is_and_survives_clone(regression):
    X, y, X_new, y_new = regression
    model = Ridge().fit(X, y)
    coefficients = model.coef_.copy()
    weighted = VBTTARegressor(model, VIEWS, **QUICK)
    again = clone(weighted)
    assert again.estimator is model
    assert again is not weighted
    again.fit(X_new, y_new)
    np.testing.assert_array_equal(model.coef_, coefficients)
    assert again.estimator_ is model
    policy = fit_policy(collect_views(model, X_new, VIEWS), y_new, task="regression", model="latent", guard=False)
    np.testing.assert_allclose(again.predict(X_new), policy.predict(collect_views(model, X_new, VIEWS)).mean[:, 0])
    assert not hasattr(clone(VBTTARegressor(model, VIEWS, cv=3)).estimator, "coef_")
    frozen = VBTTARegressor(FrozenEstimator(model), VIEWS, **QUICK).fit(X_new, y_new)
    np.testing.assert_allclose(frozen.predict(X_new), again.predict(X_new))


def test_out_of_fold_views_are_those_of_models_that_did_not_see_the_row(regression):
    X, y, _, _ = regression
    seen = []

    class Memory(Ridge):  # type: ignore[misc]
        def fit(self, X, y, sample_weight=None):
            self.rows_ = {tuple(row) for row in X}
            return super().fit(X, y)

        def predict(self, X):
            seen.append(any(tuple(row) in self.rows_ for row in X))
            return super().predict(X)

    VBTTARegressor(Memory(), [Identity()], cv=4, **QUICK).fit(X, y)
    assert seen == [False] * 4


def test_standard_deviation_and_distribution(regression):
    X, y, X_new, y_new = regression
    weighted = VBTTARegressor(Ridge().fit(X, y), VIEWS, **QUICK).fit(X_new, y_new)
    mean, std = weighted.predict(X_new, return_std=True)
    np.testing.assert_allclose(mean, weighted.predict(X_new))
    inside = np.abs(y_new - mean) < 2 * std
    assert 0.85 < inside.mean() <= 1
    lower, upper = weighted.predict_distribution(X_new).interval(0.9)
    assert (lower < upper).all()
    assert weighted.score(X_new, y_new) > 0.9


def test_label_sets_with_gaps(regression):
    X, y, X_new, y_new = regression
    model = Ridge().fit(X, y)
    rng = np.random.default_rng(0)
    several = y_new[:, None] + rng.normal(size=(80, 3))
    several[rng.random((80, 3)) < 0.4] = np.nan
    several[:5] = np.nan
    weighted = VBTTARegressor(model, VIEWS, **QUICK).fit(X_new, several)
    same = VBTTARegressor(model, VIEWS, **QUICK).fit(X_new, LabelSets.from_array(several))
    np.testing.assert_allclose(weighted.predict(X_new), same.predict(X_new))
    out_of_fold = VBTTARegressor(Ridge(), VIEWS, cv=3, **QUICK).fit(X_new, several)
    assert out_of_fold.score(X_new, y_new) > 0.9


def test_several_outputs(regression):
    X, y, X_new, y_new = regression
    model = Ridge().fit(X, np.stack([y, -y], axis=1))
    weighted = VBTTARegressor(model, VIEWS, **QUICK).fit(X_new, np.stack([y_new, -y_new], axis=1)[:, None])
    mean, std = weighted.predict(X_new, return_std=True)
    assert mean.shape == std.shape == (80, 2)


def test_weights_count_like_repetitions_and_zero_removes(regression):
    X, y, X_new, y_new = regression
    model = Ridge().fit(X, y)
    weight = np.random.default_rng(0).integers(0, 3, size=80)
    once = VBTTARegressor(model, VIEWS, **QUICK).fit(X_new, y_new, sample_weight=weight)
    repeated = VBTTARegressor(model, VIEWS, **QUICK).fit(np.repeat(X_new, weight, axis=0), np.repeat(y_new, weight))
    np.testing.assert_allclose(once.policy_.weights, repeated.policy_.weights, atol=1e-6)
    with pytest.warns(UserWarning, match="takes no sample_weight"):
        VBTTARegressor(make_pipeline(Ridge()), VIEWS, cv=2, **QUICK).fit(X_new, y_new, sample_weight=weight)
    with pytest.raises(ValueError, match=r"at least one non-zero|no labels of positive weight"):
        VBTTARegressor(model, VIEWS, **QUICK).fit(X_new, y_new, sample_weight=np.zeros(80))


def test_weights_do_not_turn_single_labels_into_label_sets(classification):
    X, y, X_new, y_new = classification
    weighted = VBTTAClassifier(LogisticRegression().fit(X, y), VIEWS, model="mixture", guard=False)
    assert weighted.fit(X_new, y_new, sample_weight=np.full(120, 3.0)).policy_.model.noise == "uniform"  # type: ignore[attr-defined]
    three = np.repeat(y_new[:, None], 3, axis=1)
    assert weighted.fit(X_new, three).policy_.model.noise == "confusion"  # type: ignore[attr-defined]


def test_classes_of_any_kind_and_calibrated_probabilities(classification):
    X, y, X_new, y_new = classification
    words = np.array(["red", "green", "blue"])[y]
    weighted = VBTTAClassifier(LogisticRegression().fit(X, words), VIEWS, **QUICK)
    weighted.fit(X_new, np.array(["red", "green", "blue"])[y_new])
    assert list(weighted.classes_) == ["blue", "green", "red"]
    proba = weighted.predict_proba(X_new)
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    np.testing.assert_allclose(np.exp(weighted.predict_log_proba(X_new)), proba)
    assert set(weighted.predict(X_new)) <= set(words)
    assert weighted.score(X_new, np.array(["red", "green", "blue"])[y_new]) > 0.5


def test_a_class_that_a_fold_misses_keeps_its_column(classification):
    X, y, _, _ = classification
    rare = y.copy()
    rare[:] = np.where(rare == 2, 1, rare)
    rare[:2] = 7
    folds = [(np.arange(60, 120), np.arange(60)), (np.arange(60), np.arange(60, 120))]
    weighted = VBTTAClassifier(LogisticRegression(), VIEWS, cv=folds, **QUICK).fit(X, rare)
    assert weighted.predict_proba(X).shape == (120, 3)
    assert list(weighted.classes_) == [0, 1, 7]


def test_groups_and_splitters(regression):
    X, y, _, _ = regression
    groups = np.repeat(np.arange(8), 10)
    VBTTARegressor(Ridge(), VIEWS, cv=GroupKFold(4), **QUICK).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="exactly once"):
        VBTTARegressor(Ridge(), VIEWS, cv=ShuffleSplit(3, random_state=0), **QUICK).fit(X, y)


def test_tables_pipelines_and_searches(regression):
    pandas = pytest.importorskip("pandas")
    X, y, X_new, y_new = regression
    names = list("abcde")
    table, new = pandas.DataFrame(X, columns=names), pandas.DataFrame(X_new, columns=names)
    weighted = VBTTARegressor(Ridge().fit(table, y), VIEWS, **QUICK).fit(new, y_new)
    assert list(weighted.feature_names_in_) == names
    weighted.predict(new)
    with pytest.raises(ValueError, match="feature names"):
        weighted.predict(new[names[::-1]])
    pipe = make_pipeline(StandardScaler(), VBTTARegressor(Ridge(), VIEWS, cv=2, **QUICK)).fit(X, y)
    assert pipe.score(X_new, y_new) > 0.9
    frozen = VBTTARegressor(Ridge().fit(X, y), VIEWS, guard=False)
    search = GridSearchCV(frozen, {"model": ["mixture", GaussianLatent(shrinkage=1.0)]}, cv=2)
    assert search.fit(X_new, y_new).best_score_ > 0.9
    nested = GridSearchCV(VBTTARegressor(Ridge(), VIEWS, cv=2, **QUICK), {"estimator__alpha": [0.1, 10.0]}, cv=2)
    assert nested.fit(X, y).best_params_["estimator__alpha"] in (0.1, 10.0)


@pytest.mark.parametrize("name", ["id", "patient_id", "item", "ID", "Item"])
def test_ids_in_a_column_are_no_feature(regression, name):
    X, y, X_new, y_new = regression
    ids, plain = np.arange(len(X_new))[::-1] + 1000, pd.DataFrame(X_new, columns=list("abcde"))
    table, frozen = plain.assign(**{name: ids}), Ridge().fit(pd.DataFrame(X, columns=list("abcde")), y)
    for estimator, cv in ((Ridge(), 3), (frozen, "frozen")):
        with pytest.raises(ValueError, match=rf"X has a column '{name}', .* X\.set_index\('{name}'\)"):
            VBTTARegressor(estimator, VIEWS, cv=cv, **QUICK).fit(table, y_new)
        weighted = VBTTARegressor(estimator, VIEWS, cv=cv, **QUICK).fit(table.set_index(name), pd.Series(y_new, ids))
        same = VBTTARegressor(estimator, VIEWS, cv=cv, **QUICK).fit(plain, y_new)
        np.testing.assert_allclose(weighted.predict(table.set_index(name)), same.predict(plain))
    trained = Ridge().fit(table, y_new)  # by choice
    VBTTARegressor(trained, VIEWS, **QUICK).fit(table, y_new).predict(table)
    repeated = plain.assign(**{name: np.arange(len(plain)) // 2})  # a feature of that name
    VBTTARegressor(Ridge(), VIEWS, cv=3, **QUICK).fit(repeated, y_new)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_searches_with_several_labels_a_row(kind, request):
    X, y, X_new, y_new = request.getfixturevalue(kind)
    wrapper, model = (VBTTARegressor, Ridge()) if kind == "regression" else (VBTTAClassifier, LogisticRegression())
    frozen = wrapper(model.fit(X, y), VIEWS, **QUICK)
    table = np.stack([y_new, np.roll(y_new, 1)], axis=1)
    search = GridSearchCV(frozen, {"draws": [1, 2]}, cv=KFold(2), error_score="raise").fit(X_new, table)
    predicted = search.predict(X_new)
    if kind == "classification":
        expected = (table == predicted[:, None]).mean()
    else:
        expected = 1 - ((table - predicted[:, None]) ** 2).mean() / table.var()
    assert search.score(X_new, table) == pytest.approx(expected)
    gaps = table.astype(object)
    gaps[:, 1] = None  # one label is left
    assert search.best_estimator_.score(X_new, gaps) == pytest.approx(search.best_estimator_.score(X_new, y_new))


def test_stochastic_views_follow_the_random_state(regression):
    X, y, X_new, y_new = regression
    model = Ridge().fit(X, y)
    views = [Identity(), GaussianNoise(0.5)]
    first, second, other = (
        VBTTARegressor(model, views, draws=2, random_state=seed, **QUICK).fit(X_new, y_new).predict(X_new)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 0
    VBTTARegressor(model, views, random_state=np.random.RandomState(0), **QUICK).fit(X_new, y_new)


def test_a_torch_network_with_images():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 3)).train()
    images = np.random.default_rng(0).random((60, 3, 4, 4), dtype=np.float32)
    labels = network(torch.from_numpy(images)).argmax(1).numpy()
    weighted = VBTTAClassifier(network, VIEWS, **QUICK).fit(images, labels)
    assert weighted.predict(images).shape == (60,)
    assert weighted.score(images, labels) > 0.8
    assert network.training
    with pytest.raises(ValueError, match="has no fit method"):
        VBTTAClassifier(network, VIEWS, cv=3).fit(images, labels)


def test_bad_input_is_named(regression):
    X, y, _, _ = regression
    with pytest.raises(NotFittedError, match="use cv=5"):
        VBTTARegressor(Ridge(), VIEWS).fit(X, y)
    with pytest.raises(NotFittedError):
        VBTTARegressor(Ridge().fit(X, y), VIEWS).predict(X)
    with pytest.raises(ValueError, match="rows and y"):
        VBTTARegressor(Ridge().fit(X, y), VIEWS).fit(X, y[:5])


def test_real_data_with_noisy_views_are_not_worse_than_the_model_alone():
    X, y = load_diabetes(return_X_y=True)
    weighted = VBTTARegressor(Ridge(1.0), [Identity(), GaussianNoise(0.02)], cv=5, draws=4).fit(X[:300], y[:300])
    plain = Ridge(1.0).fit(X[:300], y[:300])
    assert weighted.score(X[300:], y[300:]) > plain.score(X[300:], y[300:]) - 0.02


def test_probabilities_of_classes_name_their_way(classification):
    X, y, X_new, _ = classification
    estimator = LogisticRegression().fit(X, y)
    proba = estimator.predict_proba(X_new)
    with pytest.raises(ValueError, match=r"columns of fractions, no classes; .* LabelSets\.from_probabilities\(y\)"):
        VBTTAClassifier(estimator, VIEWS, **QUICK).fit(X_new, proba)
    weighted = VBTTAClassifier(estimator, VIEWS, **QUICK).fit(X_new, LabelSets.from_probabilities(proba))
    assert weighted.policy_.weights.sum() == pytest.approx(1)


def test_words_are_the_sorted_outputs_of_a_network_without_names():
    X, y = make_classification(60, 4, n_informative=4, n_redundant=0, n_classes=3, random_state=0)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    words = np.array(["ant", "bee", "cat"])[y]
    options = {"model": "mixture", "guard": False}
    named, plain = (
        VBTTAClassifier(net, VIEWS, **options).fit(X, words),
        VBTTAClassifier(net, VIEWS, **options).fit(X, y),
    )
    assert named.classes_.tolist() == ["ant", "bee", "cat"]
    np.testing.assert_allclose(named.predict_proba(X), plain.predict_proba(X))
    assert (named.predict(X) == np.array(["ant", "bee", "cat"])[plain.predict(X)]).all()
    with pytest.raises(ValueError, match=r"2 different words, and the estimator 3 outputs .* 0\.\.2"):
        VBTTAClassifier(net, VIEWS, **options).fit(X, np.where(y == 0, "ant", "bee"))


def test_groups_reach_the_guard() -> None:
    """Two groups are two draws, too few to hold any out, whatever the number of rows."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 2))
    target = inputs[:, 0] + 0.1 * rng.normal(size=60)
    estimator = Ridge().fit(inputs, target)
    options = {"model": "latent", "random_state": 0}
    groups = np.repeat(["a", "b"], 30)
    for cv in ("frozen", GroupKFold(2)):
        grouped = VBTTARegressor(estimator, [Identity(), GaussianNoise(0.1)], cv=cv, **options)
        grouped.fit(inputs, target, groups=groups)
        assert "groups" in grouped.policy_.guard.reason
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GuardWarning)  # the views are noise
            if cv == "frozen":
                assert grouped.fit(inputs, target).policy_.guard.checked


def test_errors_of_a_tree_are_not_blamed_on_clean_labels():
    """Pure leaves claim certainty: a tree that errs in a fifth of the inputs must not make their labels look wrong."""
    inputs, labels = make_classification(
        1_500, n_features=12, n_informative=6, n_classes=4, flip_y=0, class_sep=1.0, random_state=0
    )
    tree = DecisionTreeClassifier(min_samples_leaf=4, random_state=0).fit(inputs[:600], labels[:600])
    fitted = VBTTAClassifier(tree, [Identity(), GaussianNoise(0.3)]).fit(inputs[600:850], labels[600:850])
    noise = [member.annotators.accuracy[0] for member in fitted.policy_.members]
    assert min(noise) > 0.95
    truth = labels[850:]
    log_loss = -np.log(fitted.predict_proba(inputs[850:])[np.arange(len(truth)), truth]).mean()
    assert log_loss < 1.1  # 1.3 of the class shares alone, more than 3 of the tree itself


def test_ids_of_a_table_of_labels_are_not_dropped():
    """Their order may be another one than that of the rows of X."""
    X, label = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20) % 2
    table = pa.table({"id": [f"i{row}" for row in range(20)], "label": label})
    with pytest.raises(ValueError, match=r"y has a column of ids; give LabelSets\.from_table"):
        VBTTAClassifier(LogisticRegression(), [Identity()]).fit(X, table)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_names_of_columns_are_annotators(kind, request):
    X, y, X_new, y_new = request.getfixturevalue(kind)
    wrapper, model = (VBTTARegressor, Ridge()) if kind == "regression" else (VBTTAClassifier, LogisticRegression())
    people = {"ann": y_new, "bob": np.where(np.arange(len(y_new)) % 3, y_new, 0), "cem": np.roll(y_new, 1)}
    frozen = wrapper(model.fit(X, y), VIEWS, model="mixture", guard=False).fit(X_new, pd.DataFrame(people))
    assert frozen.policy_.annotators.names == tuple(people)


def test_long_tables_name_their_way(classification):
    X, y, X_new, y_new = classification
    frozen = VBTTAClassifier(LogisticRegression().fit(X, y), VIEWS, **QUICK)
    for key in ("item", "image"):
        table = pd.DataFrame({key: np.repeat(np.arange(120), 2), "worker": "ann", "label": np.repeat(y_new, 2)})
        with pytest.raises(ValueError, match=r"of a long table give LabelSets\.from_table\(y\)"):
            frozen.fit(X_new, table)
