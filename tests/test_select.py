"""select_views keeps the budget, finds what helps, and its curve survives a file."""

import numpy as np
import pytest

from vbtta import GaussianLatent, GaussianMixture, LabelSets, Policy, ViewPredictions, fit_policy
from vbtta.fit import quick_fit
from vbtta.select import select_views

NOISE = {"identity": 0.3, "good a": 0.3, "good b": 0.3, "copy of a": 0.3, "bad": 1.5, "useless": 30.0}
FAST = {"task": "regression", "model": GaussianLatent(shrinkage=1.0)}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=150)
    views = {name: truth + size * rng.normal(size=150) for name, size in NOISE.items()}
    views["copy of a"] = views["good a"] + 1e-3 * rng.normal(size=150)
    mean = np.stack(list(views.values()), axis=1)[:, :, None]
    return ViewPredictions(mean, names=list(views)), truth + 0.05 * rng.normal(size=150)


@pytest.fixture(scope="module")
def three(problem):
    return select_views(*problem, budget=3, **FAST)


def test_the_budget_is_kept_and_the_right_views_are_found(problem, three):
    used = {name for name, weight in zip(three.names, three.weights, strict=True) if weight > 0}
    assert len(used) <= 3
    assert "identity" in used
    assert "good b" in used
    assert used & {"good a", "copy of a"}
    assert not used & {"bad", "useless"}
    assert used == set(three.selection.chosen.views)
    assert three.weights.sum() == pytest.approx(1)


def test_the_policy_is_a_fit_of_the_chosen_views(problem, three):
    predictions, labels = problem
    alone = fit_policy(predictions.select(three.selection.chosen.views), labels, **FAST)
    prediction, expected = three.predict(predictions), alone.predict(predictions)
    np.testing.assert_allclose(prediction.mean, expected.mean, atol=1e-9)
    assert three.names == predictions.names
    assert three.history.weights.shape == (three.n_steps, 6)
    only = predictions.select(three.selection.chosen.views)
    np.testing.assert_allclose(three.predict(only).mean, prediction.mean)


def test_the_curve_rises_with_cost_and_knows_the_full_set(problem, three):
    curve = three.selection.curve
    costs = [point.cost for point in curve]
    assert costs == sorted(costs)
    assert curve[0].cost == 1
    assert any(len(point.views) == 6 and point.difference == 0 for point in curve)
    assert three.selection.chosen in curve
    assert curve[0].score < three.selection.chosen.score


def test_the_curve_survives_a_file(three, tmp_path):
    three.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json")
    assert again.selection == three.selection
    np.testing.assert_allclose(again.weights, three.weights)


def test_a_budget_of_one_takes_one_view(problem):
    policy = select_views(*problem, budget=1, **FAST)
    assert np.count_nonzero(policy.weights) == 1


def test_costs_change_the_choice(problem):
    cost = dict.fromkeys(NOISE, 1.0) | {"good b": 10.0}
    policy = select_views(*problem, budget=3, cost=cost, **FAST)
    assert "good b" not in policy.selection.chosen.views
    assert policy.selection.chosen.cost <= 3


def test_views_without_names_are_selected_by_place(problem):
    predictions, labels = problem
    unnamed = ViewPredictions(predictions.outputs)
    policy = select_views(unnamed, labels, budget=2, **FAST)
    assert policy.predict(unnamed).mean.shape == (150, 1)


def test_bad_input_is_named(problem):
    predictions, labels = problem
    with pytest.raises(ValueError, match="pays for a view"):
        select_views(predictions, labels, budget=0.5, **FAST)
    with pytest.raises(ValueError, match="pays for a view"):
        select_views(predictions, labels, budget=float("nan"), **FAST)
    with pytest.raises(ValueError, match="says nothing of the views"):
        select_views(predictions, labels, budget=2, cost={"identity": 1.0}, **FAST)
    with pytest.raises(ValueError, match="cost must be a dict"):
        select_views(predictions, labels, budget=2, cost=[1.0], **FAST)
    with pytest.raises(ValueError, match="positive"):
        select_views(predictions, labels, budget=2, cost=dict.fromkeys(predictions.names, 0.0), **FAST)
    with pytest.raises(ValueError, match="labels must be given"):
        select_views(predictions, None, budget=2, **FAST)
    with pytest.raises(ValueError, match=r"task='ordinal' has no closed form; use fit_policy and Policy\.prune"):
        select_views(predictions, labels, budget=2, task="ordinal")
    with pytest.raises(ValueError, match="component='laplace' has no closed form"):
        select_views(predictions, labels, budget=2, task="regression", model=GaussianMixture(component="laplace"))
    few = np.where(np.arange(150) < 4, labels, np.nan)
    with pytest.raises(ValueError, match="at least 5 labelled"):
        select_views(predictions, few, budget=2, **FAST)


def test_shrinkage_is_chosen_once_and_suits_the_number_of_views(problem, monkeypatch):
    used: dict[int, set] = {}

    def recording(candidate, engine, seed, sample, others=()):
        used.setdefault(len(sample.predictions.names), set()).add(candidate.model.shrinkage)
        return quick_fit(candidate, engine, seed, sample, others)

    monkeypatch.setattr("vbtta.select.quick_fit", recording)
    select_views(*problem, budget=3, task="regression", model="latent")
    assert set(used) == {1, 3, 6}
    [at_all] = used[6]
    for size, shrinkages in used.items():
        np.testing.assert_allclose(sorted(shrinkages), [at_all * (size / 6) ** 2])


def test_the_largest_affordable_set_is_kept_unless_a_smaller_one_is_clearly_better():
    """Thirty images cannot tell views of one quality apart; the best of many scores would pick a few by luck."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=30)
    views = truth[:, None] + 0.5 * rng.normal(size=(30, 8))
    selection = select_views(ViewPredictions(views[:, :, None]), truth, budget=6, **FAST).selection
    assert len(selection.chosen.views) == 6
    assert selection.chosen in selection.curve
    assert 0 < selection.stability < 1


def test_the_scores_of_the_curve_include_the_luck_of_the_search():
    """All views are noise but one: the set found in a fold is scored on rows that it did not see."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=60)
    views = np.concatenate([truth[:, None] + rng.normal(size=(60, 1)), rng.normal(size=(60, 15))], axis=1)
    names = ["identity", *(f"noise {k}" for k in range(15))]
    predictions = ViewPredictions(views[:, :, None], names=names)
    policy = select_views(predictions, truth, budget=4, **FAST)
    fresh_truth = rng.normal(size=4_000)
    fresh = np.concatenate([fresh_truth[:, None] + rng.normal(size=(4_000, 1)), rng.normal(size=(4_000, 15))], axis=1)
    score = policy.score(ViewPredictions(fresh[:, :, None], names=names), fresh_truth).mean()
    assert policy.selection.chosen.score < score + 0.1
    assert policy.score(predictions, truth).mean() > policy.selection.chosen.score  # the fit's own rows flatter it


def test_stacks_are_searched(problem):
    predictions, labels = problem
    policy = select_views(predictions, labels, budget=3, task="regression")
    assert np.count_nonzero(policy.weights) <= 3
    assert {"identity", "good b"} <= set(policy.selection.chosen.views)
    assert len(policy.members) > 1
    only = predictions.select(policy.used_names)
    np.testing.assert_allclose(policy.predict(only).mean, policy.predict(predictions).mean)


def test_the_guard_says_that_identity_was_not_chosen(problem):
    predictions, labels = problem
    costs = dict.fromkeys(predictions.names, 1.0) | {"identity": 10.0}
    policy = select_views(predictions, labels, budget=2, cost=costs, **FAST)
    assert policy.guard.reason.startswith("the view 'identity' was not chosen")
    unguarded = select_views(predictions, labels, budget=2, cost=costs, guard=False, **FAST)
    assert unguarded.guard.reason == "not asked for"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": 2.0}, "cost must be a dict"),
        ({"cost": dict.fromkeys(NOISE, "1")}, "cost must be positive"),
        ({"seed": None}, "seed must be a whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(problem, options, message):
    with pytest.raises(ValueError, match=message):
        select_views(*problem, **{"budget": 2, **FAST, **options})


@pytest.mark.parametrize("weight", ["a", -1, float("nan")])
def test_prune_takes_a_share(three, weight):
    with pytest.raises(ValueError, match="min_weight must be a number between 0 and 1"):
        three.prune(weight)


def test_an_unknown_option_is_select_views_own():
    predictions = ViewPredictions(np.random.default_rng(0).normal(size=(20, 2, 1)))
    with pytest.raises(TypeError, match=r"select_views\(\) got an unexpected keyword argument 'costs'"):
        select_views(predictions, np.zeros(20), budget=1, task="regression", costs=[1, 1])


def test_views_that_only_some_inputs_need_are_kept():
    """Two fifths of the inputs are turned: every turn is needed; of the identity and its copies, one."""
    rng, n = np.random.default_rng(0), 400
    truth, turn = rng.integers(0, 5, size=n), np.where(rng.random(n) < 0.4, rng.integers(1, 4, size=n), 0)
    logits = 0.6 * rng.normal(size=(n, 10, 5))
    for view in range(4):
        logits[turn == view, view, truth[turn == view]] += 3.5
    upright = turn == 0
    logits[upright, 4:] = logits[upright, :1] + 0.8 * rng.normal(size=(upright.sum(), 6, 5))
    turns = ("identity", "turn1", "turn2", "turn3")
    predictions = ViewPredictions(logits, names=[*turns, *(f"mild{k}" for k in range(6))])
    policy = select_views(predictions, truth, budget=4, task="classification")
    assert set(turns[1:]) < set(policy.selection.chosen.views)
    weighted = LabelSets.from_array(truth).with_weights(np.full(n, 0.5))
    chosen = select_views(predictions, weighted, budget=4, task="classification").selection.chosen
    assert set(turns[1:]) < set(chosen.views)


def test_few_labels_do_not_cost_the_network_that_the_stack_relies_on():
    """The choice predicts new inputs as well as a fit of the heaviest views of all, which keeps the identity."""
    behind = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        truth = rng.integers(0, 5, size=1530)
        common = 2 * np.eye(5)[truth] + 0.7 * rng.normal(size=(1530, 5))
        sizes = np.linspace(0.6, 1.2, 12)[:, None]
        logits = common[:, None] + sizes * rng.normal(size=(1530, 12, 5))
        logits[:, 6:] = np.roll(logits[:, 6:], 1, axis=2)  # of other classes
        predictions = ViewPredictions(logits, names=["identity", *(f"view{k}" for k in range(11))])
        labelled, rest, y = predictions.take(slice(30)), predictions.take(slice(30, None)), truth[:30]
        policy = select_views(labelled, y, budget=3, task="classification")
        assert "identity" in policy.selection.chosen.views
        weights = fit_policy(labelled, y, task="classification").weights
        heaviest = [predictions.names[k] for k in np.argsort(-weights)[:3]]
        other = fit_policy(labelled.select(heaviest), y, task="classification")
        scores = (fit.predict(rest).log_prob(truth[30:]).mean() for fit in (policy, other))
        behind.append(-np.subtract(*scores))
    assert np.mean(behind) < 0.003
