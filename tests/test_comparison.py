"""Comparisons: the values are the metrics', intervals cover, references and costs are right, exports agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vbtta
from vbtta import CategoricalLatent, collect_dense, conformalize, fit_policy, fit_sequential, metrics
from vbtta.augment import flips
from vbtta.baselines import BASELINES, fit_baseline
from vbtta.comparison import HeldOut, _difference, bootstrap, columns, compare, default_methods, resampled
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, ContinuousPrediction

NAMES = ["identity", "flip", "crop"]
same_sample = pytest.mark.filterwarnings("ignore:test_predictions hold rows")  # values alone matter there


def classification(seed=0, n=200):
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, 3, n)
    logits = generator.normal(size=(n, 3, 3))
    logits[np.arange(n), :, truth] += [2, 1.5, 0]
    return ViewPredictions(logits, names=NAMES), truth


def regression(seed=0, n=200, outputs=1):
    generator = np.random.default_rng(seed)
    truth = generator.normal(size=(n, outputs))
    mean = truth[:, None] + generator.normal(size=(n, 3, outputs)) * np.array([0.5, 0.6, 1.5])[:, None]
    return ViewPredictions(mean, names=NAMES), truth[:, None]


def run(task, **options):
    make = classification if task == "classification" else regression
    train, test = make(0), make(1)
    return compare(*train, *test, task=task, **{"resamples": 200, **options})


def test_classification_values_are_the_metrics():
    outcome = run("classification", methods=["original", "uniform", "mixture_mle+t"])
    (views, labels), (test, y) = classification(0), classification(1)
    for name in outcome.methods:
        prediction = fit_baseline(name, views, labels, task="classification").predict(test)
        assert outcome[name, "accuracy"] == pytest.approx(metrics.accuracy(y, prediction.proba))
        assert outcome[name, "nll"] == pytest.approx(metrics.nll(prediction.log_prob(y)))
        assert outcome[name, "brier"] == pytest.approx(metrics.brier(y, prediction.proba))
        assert outcome[name, "ece"] == pytest.approx(metrics.ece(y, prediction.proba))


def test_regression_values_are_the_metrics():
    (views, labels), (test, y) = regression(0, outputs=2), regression(1, outputs=2)
    outcome = compare(views, labels, test, y, task="regression", methods=["uniform", "nnls"], resamples=10)
    for name in outcome.methods:
        prediction = fit_baseline(name, views, labels, task="regression").predict(test)
        target = y[:, 0]
        assert outcome[name, "mse"] == pytest.approx(metrics.mse(target, prediction.mean))
        assert outcome[name, "mae"] == pytest.approx(metrics.mae(target, prediction.mean))
        assert outcome[name, "nll"] == pytest.approx(metrics.nll(prediction.log_prob(target)))
        assert outcome[name, "crps"] == pytest.approx(metrics.crps(prediction.crps(target)))
        assert outcome[name, "coverage"] == pytest.approx(metrics.interval_coverage(target, *prediction.interval(0.9)))


@same_sample
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_test_labels_count_by_label_and_unlabelled_instances_are_left_out(task):
    views, y = classification(n=30) if task == "classification" else regression(n=30)
    rows = np.array([0, 0, 3, 7, 7, 7, 29])
    value = y.reshape(30)[rows] if task == "classification" else y[rows, 0] + np.arange(7)[:, None] * 0.1
    sets = LabelSets.from_table(rows, value, count=[1, 2, 1, 1, 3, 1, 1], n_instances=30)
    outcome = compare(views, y, views, sets, task=task, methods=["uniform"], resamples=10)
    assert (outcome.n_instances, outcome.n_labels) == (4, 10)
    prediction = fit_baseline("uniform", views, y, task=task).predict(views)
    if task == "classification":
        expected = metrics.brier(value, prediction.proba[rows], sets.count)
        assert outcome["uniform", "brier"] == pytest.approx(expected)
        assert outcome["uniform", "ece"] == pytest.approx(metrics.ece(value, prediction.proba[rows], sets.count))
    else:
        expected = metrics.mse(value, prediction.mean[rows], sets.count)
        assert outcome["uniform", "mse"] == pytest.approx(expected)
        by_label = views.take(rows)
        scores = fit_baseline("uniform", views, y, task=task).predict(by_label).crps(value)
        assert outcome["uniform", "crps"] == pytest.approx(metrics.crps(scores, sets.count))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_bootstrap_is_the_metric_of_resampled_instances(seed):
    generator = np.random.default_rng(seed)
    proba = generator.dirichlet(np.ones(3), 12)
    row = np.sort(generator.integers(0, 12, 20))
    rows, instance = np.unique(row, return_inverse=True)
    test = HeldOut(row, instance, generator.integers(0, 3, 20), generator.integers(1, 3, 20).astype(float), len(rows))
    values = [columns(CategoricalPrediction(proba, np.zeros(12), np.arange(3)), test)]
    replicates = bootstrap(values, test, resamples=3, seed=seed)
    drawn = np.random.default_rng(seed).integers(0, len(rows), (3, len(rows)))
    for r in range(3):
        labels = np.concatenate([np.flatnonzero(instance == i) for i in drawn[r]])
        arguments = test.y[labels], proba[row[labels]], test.times[labels]
        expected = [metrics.accuracy(*arguments), None, metrics.brier(*arguments), metrics.ece(*arguments)]
        expected[1] = metrics.nll(np.log(arguments[1][np.arange(len(labels)), arguments[0]]), arguments[2])
        np.testing.assert_allclose(replicates[r, 0], expected, atol=1e-12)
    assert resampled(values, test, np.ones((1, len(rows)))).shape == (1, 1, 4)


def test_bootstrap_does_not_depend_on_the_block_size(monkeypatch):
    whole = run("classification", methods=["original", "uniform"])
    monkeypatch.setattr("vbtta.comparison._CELLS", 700)
    np.testing.assert_allclose(
        whole.against_best.low, run("classification", methods=["original", "uniform"]).against_best.low
    )


def test_intervals_cover_the_true_difference():
    """The difference in squared error of two predictors with errors of variance 1 and 1.21 is 0.21."""
    generator = np.random.default_rng(3)
    every = np.arange(150)
    test = HeldOut(every, every, np.zeros((150, 1)), np.ones(150), 150)
    inside = 0
    for trial in range(400):
        squares = (generator.normal(size=(2, 150, 1)) * np.array([1, 1.1])[:, None, None]) ** 2
        replicates = bootstrap([{"mse": squares[0]}, {"mse": squares[1]}], test, resamples=400, seed=trial)
        difference = _difference(["first", "second"], squares.mean(axis=1), replicates, 0, 0.95)
        inside += difference.low[1, 0] <= 0.21 <= difference.high[1, 0]
    assert 0.91 <= inside / 400 <= 0.98


class _View:
    """A predictor that is one view, without a distribution."""

    def __init__(self, view):
        self.view = view

    def predict(self, predictions):
        return predictions.outputs[:, self.view]


@pytest.fixture(scope="module")
def everything():
    """All default methods of a regression."""
    return run("regression")


def test_references_are_original_and_the_baseline_with_the_best_nll(everything):
    outcome = everything
    losses = {name: outcome[name, "nll"] for name in BASELINES["regression"]}
    assert outcome.against_best.reference == min(losses, key=losses.get)
    assert outcome.against_original.reference == "original"
    m = outcome.methods.index("original")
    assert (outcome.against_original.low[m] == 0).all()
    assert (outcome.against_original.high[m] == 0).all()
    np.testing.assert_allclose(
        outcome.against_best.value - outcome.against_best.value[m], outcome.against_original.value
    )
    assert any("hindsight" in note for note in outcome.notes)


def test_default_methods_include_the_policies_and_every_baseline(everything):
    outcome = everything
    assert outcome.methods == (*BASELINES["regression"], "vbtta", "vbtta-mixture", "vbtta-latent")
    assert np.isfinite(outcome.values).all()
    assert type(outcome.fitted["vbtta-latent"].model).__name__ == "GaussianLatent"
    assert type(outcome.fitted["vbtta-mixture"].model).__name__ == "GaussianMixture"


def test_costs():
    def slow(predictions, labels):
        return fit_baseline("uniform", predictions, labels, task="classification")

    views, labels = classification()
    done = fit_baseline("class_tta", views, labels, task="classification")
    outcome = run("classification", methods=["original", "max", slow, done])
    assert outcome.methods == ("original", "max", "slow", "class_tta")
    assert outcome.views_used[:3].tolist() == [1, 3, 3]
    assert outcome.forward_passes[:3].tolist() == [1, 3, 3]
    assert (outcome.fit_seconds[:3] > 0).all()
    assert outcome.fit_seconds[3] == 0


def test_policies_say_which_views_they_need(everything):
    m = everything.methods.index("vbtta-mixture")
    assert everything.views_used[m] == np.count_nonzero(everything.fitted["vbtta-mixture"].weights)


def test_without_baselines_there_is_no_best_one():
    outcome = run("regression", methods={"mine": _View(1)})
    assert outcome.against_best is None
    assert outcome.against_original is None


def test_plain_arrays_get_a_residual_density():
    (views, y), (test, target) = regression(0), regression(1)
    outcome = compare(
        views, y, test, target, task="regression", methods={"mine": _View(1), "same": _view}, resamples=10
    )
    variance = np.mean((y[:, 0] - views.outputs[:, 1]) ** 2)
    residual = target[:, 0, 0] - test.outputs[:, 1, 0]
    expected = np.mean(0.5 * np.log(2 * np.pi * variance) + 0.5 * residual**2 / variance)
    assert outcome["mine", "nll"] == pytest.approx(expected)
    np.testing.assert_allclose(outcome.values[0], outcome.values[1])


def _view(predictions, labels):
    return _View(1)


def test_plain_probabilities():
    class Half:
        def predict(self, predictions):
            return np.full((len(predictions), 3), 1 / 3)

    outcome = run("classification", methods={"thirds": Half()})
    assert outcome["thirds", "nll"] == pytest.approx(np.log(3))


@same_sample
def test_without_identity_original_is_left_out_with_a_note():
    views, labels = classification()
    unnamed = ViewPredictions(views.outputs)
    outcome = compare(
        unnamed,
        labels,
        unnamed,
        labels,
        task="classification",
        methods=["original", "original+t", "uniform"],
        resamples=10,
    )
    assert outcome.methods == ("uniform",)
    assert outcome.against_original is None
    assert "no view is named identity" in outcome.notes[0]
    assert "No view is named identity, so original is left out." in outcome.to_markdown()
    with pytest.raises(ValueError, match="no method is left"):
        compare(unnamed, labels, unnamed, labels, task="classification", methods=["original"])


def test_same_seed_same_answer():
    first, second = (run("classification", methods=["original", "uniform"], seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.against_best.low, second.against_best.low)
    other = run("classification", methods=["original", "uniform"], seed=6)
    assert (other.against_best.low != first.against_best.low).any()


def test_markdown():
    outcome = run("classification", methods=["original", "uniform", "max"])
    text = outcome.to_markdown()
    assert text.startswith("| method | accuracy | NLL | brier | ECE | views | passes | fit (s) |\n| --- | ---: |")
    best = outcome.methods[int(np.argmin(outcome.values[:, 1]))]
    assert f"**{outcome[best, 'nll']:.4f}**" in text
    assert "Minus `original`, with 95 % paired bootstrap intervals" in text
    rows = [line for line in text.splitlines() if line.startswith("| max |")]
    assert len(rows) == 3
    low, high = outcome.against_original.low[2, 1], outcome.against_original.high[2, 1]
    assert f"[{low:+.4f}, {high:+.4f}]" in rows[1]
    assert "200 labels of 200 test instances." in text


def test_it_prints_as_a_table():
    outcome = run("regression", methods=["original", "uniform"], resamples=10)
    first, header, *rows = str(outcome).splitlines()
    assert first == repr(outcome)
    assert header.split()[:4] == ["method", "MSE", "MAE", "NLL"]
    assert {len(line) for line in rows} == {len(header)}
    nll = {row.split()[0]: float(row.split()[3]) for row in rows}
    assert list(nll.values()) == sorted(nll.values())
    assert nll["uniform"] == round(outcome["uniform", "nll"], 4)
    [uniform] = [row for row in rows if row.startswith("uniform")]
    assert f"{outcome.against_original.low[outcome.methods.index('uniform'), 2]:+.4f}, " in uniform
    assert "NLL minus" not in str(run("regression", methods=["uniform"], resamples=10))


def test_dataframe_has_all_of_it():
    outcome = run("regression", methods=["original", "uniform"])
    frame = outcome.to_frame()
    assert list(frame.index) == ["original", "uniform"]
    assert frame.loc["uniform", "mse"] == outcome["uniform", "mse"]
    assert frame.loc["uniform", "crps_minus_original_low"] == outcome.against_original.low[1, 3]
    assert frame.loc["uniform", "views_used"] == 3


@pytest.mark.parametrize("metric", ["accuracy", "nll", "ece"])
def test_plot_draws_every_method(metric, tmp_path):
    outcome = run("classification", methods=["original", "uniform", "max"])
    figure = outcome.plot(metric, against="original")
    (axes,) = figure.axes
    ticks = sorted(axes.get_yticklabels(), key=lambda tick: tick.get_position()[1])
    labels = [tick.get_text() for tick in ticks]
    assert {label.split()[0] for label in labels} == set(outcome.methods)
    values = [outcome[label.split()[0], metric] for label in labels]
    assert values == sorted(values, reverse=metric != "accuracy")  # the best on top
    figure.savefig(tmp_path / "comparison.png")
    with pytest.raises(ValueError, match="metric must be one of accuracy"):
        outcome.plot("mse")
    with pytest.raises(ValueError, match="against must be one of original, best"):
        outcome.plot(against="worst")


def test_errors_name_what_exists():
    with pytest.raises(ValueError, match=r"no regression method 'greedy'; there are original, .*vbtta-latent"):
        run("regression", methods=["greedy"])
    with pytest.raises(ValueError, match="no classification method 'best'"):
        run("classification", methods=["best"])
    with pytest.raises(ValueError, match="methods must be a list"):
        run("classification", methods="uniform")
    with pytest.raises(ValueError, match="occur more than once"):
        run("classification", methods=["uniform", "uniform"])
    with pytest.raises(TypeError, match="a method is a name"):
        run("classification", methods=[3])
    with pytest.raises(TypeError, match=r"must return something with \.predict"):
        run("classification", methods={"mine": lambda views, labels: 3})
    with pytest.raises(ValueError, match="must predict an array of shape"):
        run("regression", methods={"mine": type("P", (), {"predict": lambda self, views: np.zeros(3)})()})
    views, labels = regression()
    wrong = fit_baseline("uniform", *regression(outputs=3), task="regression")
    with pytest.raises(TypeError, match="ContinuousPrediction, which is not for classification"):
        run("classification", methods={"mine": wrong})
    with pytest.raises(ValueError, match="task must be one of"):
        compare(views, labels, views, labels, task="ranking")
    with pytest.raises(ValueError, match="level must be"):
        run("regression", level=95)
    with pytest.raises(ValueError, match="resamples must be"):
        run("regression", resamples=0)
    with pytest.raises(ValueError, match="test_labels are empty"):
        compare(views, labels, views, np.full(200, np.nan), task="regression")
    with pytest.raises(KeyError, match="there are mse"):
        run("regression", methods=["uniform"])["uniform", "brier"]


def test_bars_in_names_do_not_break_the_table():
    text = run("regression", methods={"a|b": "uniform", "c": "original"}).to_markdown()
    assert r"| a\|b |" in text


def test_passes_are_counted_by_the_draws_that_predictions_tell():
    (views, labels), (test, y) = regression(0), regression(1)
    prints = dict.fromkeys(NAMES, "-/raw") | {NAMES[1]: "-/raw/16"}
    test = ViewPredictions(test.outputs, names=NAMES, fingerprints=prints)
    outcome = compare(views, labels, test, y, task="regression", methods=["original", "uniform"], resamples=10)
    assert outcome.forward_passes.tolist() == [1, 18]


@same_sample
def test_the_function_is_public_and_its_module_does_not_hide_it():
    views, y = regression()
    outcome = vbtta.compare(views, y, views, y, task="regression", methods=["uniform"], resamples=10)
    assert outcome.methods == ("uniform",)


def test_test_rows_of_the_fit_are_noticed():
    views, y = regression()
    with pytest.warns(UserWarning, match=r"hold rows that the methods are fitted to \(at least 100 of 100\)"):
        compare(views, y, views.take(slice(100)), y[:100], task="regression", methods=["uniform"], resamples=10)
    policy = vbtta.fit_policy(views, y, task="regression", model="latent")
    other, z = regression(1)
    with pytest.warns(UserWarning, match="hold rows that 'mine' was fitted to"):
        compare(other, z, views, y, task="regression", methods={"mine": policy}, resamples=10)
    compare(other, z, *regression(2), task="regression", methods={"mine": policy}, resamples=10)  # no warning


def test_continuous_predictions_of_other_shapes_are_refused():
    class Wide:
        def predict(self, predictions):
            n = len(predictions)
            return ContinuousPrediction(
                np.ones((n, 1)), np.array([5.0]), np.zeros((n, 1, 2)), np.broadcast_to(np.eye(2), (n, 1, 2, 2))
            )

    with pytest.raises(ValueError, match="must predict"):
        run("regression", methods={"wide": Wide()})


def grouped_sample(n_groups, size, seed):
    """Two predictors' squared errors that are equal within a group: a group is one observation."""
    generator = np.random.default_rng(seed)
    errors = np.repeat(generator.normal(size=(2, n_groups)), size, axis=1)
    views = ViewPredictions(errors.T[:, :, None], names=["identity", "flip"])
    return views, np.repeat(np.arange(n_groups), size)


def test_intervals_are_over_groups():
    views, groups = grouped_sample(30, 40, seed=0)
    y, single = np.zeros(len(views)), np.arange(0, len(views), 40)
    methods = {"original": "original", "flip": _View(1)}
    options = {"task": "regression", "methods": methods, "resamples": 300}
    grouped = views.with_groups([f"image {g:02d}" for g in groups])
    by_group = compare(views, y, grouped, y, **options)
    of_singles = compare(views, y, views.take(single), y[single], **options)
    naive = compare(views, y, views, y, **options)
    assert by_group.n_instances == naive.n_instances == 1200
    assert any("over the 30 groups" in note for note in by_group.notes)
    np.testing.assert_allclose(by_group.values, naive.values)
    width, narrow, reference = (
        (outcome.against_original.high - outcome.against_original.low)[1, 0]
        for outcome in (by_group, naive, of_singles)
    )
    assert width == pytest.approx(reference, rel=1e-6)  # the same groups are drawn
    assert width > 4 * narrow


@same_sample
def test_all_methods_take_positions_of_maps():
    """Weighted labels in groups go into fits and scores alike: a weight of two is a label twice."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(12, 3, 8, 8))
    masks = (images + 0.7 * rng.gumbel(size=images.shape)).argmax(axis=1)

    def network(batch):
        return batch + 0.3 * np.roll(batch, 1, axis=-1)

    views, labels = collect_dense(network, images, flips(), masks, positions=25, stratify=True)
    outcome = compare(views, labels, views, labels, task="classification", resamples=20)
    assert set(outcome.methods) == set(default_methods("classification"))
    assert np.isfinite(outcome.values).all()
    proba = outcome.fitted["uniform"].predict(views).proba[np.arange(len(views)), labels.value]
    assert outcome["uniform", "nll"] == pytest.approx(np.average(-np.log(proba), weights=labels.instance_weights))


@same_sample
def test_overlap_by_image_is_that_of_whole_maps():
    """With every position drawn the estimates are the metrics of the maps; resamples are of images."""
    rng = np.random.default_rng(1)
    images = rng.normal(size=(10, 3, 6, 6))
    masks = (images + 0.7 * rng.gumbel(size=images.shape)).argmax(axis=1)
    masks[0] = 0  # nothing but background, and the network may find more
    views, labels = collect_dense(lambda batch: batch, images, flips(), masks, positions=36, classes=["no", "a", "b"])
    options = {"task": "classification", "methods": ["original", "uniform"], "resamples": 300, "level": 0.9}
    outcome = compare(views, labels, views, labels, metrics=["dice", "iou"], background="no", **options)
    assert outcome.metrics[-2:] == ("dice", "iou")
    assert outcome["original", "dice"] == pytest.approx(metrics.dice(masks, images, background=0))
    assert outcome["original", "iou"] == pytest.approx(metrics.iou(masks, images, background=0))
    assert outcome.against_original.low[1, -1] <= outcome.against_original.value[1, -1]
    assert "| Dice | IoU |" in outcome.to_markdown()
    outcome.plot("dice")
    for wrong in (
        {"task": "regression", "metrics": ["dice"]},
        {"metrics": ["f1"]},
        {"test_predictions": ViewPredictions(views.outputs, names=views.names), "metrics": "iou"},
    ):
        arguments = {"test_predictions": views, "test_labels": labels, **options, **wrong}
        with pytest.raises(ValueError, match="metrics may name 'dice' and 'iou'"):
            compare(views, labels, **arguments)


@same_sample
def test_overlap_by_image_counts_sampled_positions_by_their_weights():
    rng = np.random.default_rng(2)
    images = rng.normal(size=(30, 2, 16, 16)) + np.array([2.0, 0.0])[:, None, None]
    masks = (images + 0.7 * rng.gumbel(size=images.shape)).argmax(axis=1)
    options = {"task": "classification", "methods": ["original"], "resamples": 10, "metrics": "dice"}
    views, labels = collect_dense(lambda batch: batch, images, flips(), masks, positions=100, stratify=True)
    estimate = compare(views, labels, views, labels, **options)["original", "dice"]
    unweighted = labels.with_weights(np.ones(len(views)))
    naive = compare(views, unweighted, views, unweighted, **options)["original", "dice"]
    truth = metrics.dice(masks, images)
    assert abs(estimate - truth) < 0.02 < abs(naive - truth)


def test_sets_of_every_method_are_compared():
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=900)
    logits = 2 * np.eye(3)[label][:, None] + 1.5 * rng.normal(size=(900, 4, 3))
    views = ViewPredictions(logits, names=["identity", *"abc"])
    train, test = np.arange(600), np.arange(600, 900)
    pairs = views.take(train), label[train], views.take(test), label[test]
    outcome = compare(*pairs, task="classification", methods=["original", "aug_tta", "adaptta"], sets=0.8, resamples=50)
    assert outcome["aug_tta", "set_size_0.8"] < 0.9 * outcome["original", "set_size_0.8"]
    assert all(0.72 < outcome[name, "set_coverage_0.8"] < 0.88 for name in outcome.methods)
    baseline = fit_baseline("original", views.take(train[:300]), label[:300], task="classification")
    shuffled = np.random.default_rng(0).permutation(600)
    half = np.isin(train, shuffled[300:])
    sets = conformalize(baseline, views.take(train[half]), label[train[half]], level=0.8).predict_set(pairs[2])
    assert outcome["original", "set_size_0.8"] == pytest.approx(sets.sum(axis=1).mean())
    passes = outcome.fitted["adaptta"].passes(pairs[2]).mean()
    assert outcome.forward_passes.tolist() == [1, 4, pytest.approx(passes)]
    assert "size of sets (80 %)" in outcome.to_markdown()


def test_sets_of_fitted_policies_are_compared():
    """Thresholds of a policy that was fitted to the training rows are cross-conformal."""
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=900)
    logits = 2 * np.eye(3)[label][:, None] + 1.5 * rng.normal(size=(900, 4, 3))
    views = ViewPredictions(logits, names=["identity", *"abc"])
    train, test = np.arange(600), np.arange(600, 900)
    options = {"task": "classification", "model": CategoricalLatent(noise="none")}
    policy = fit_policy(views.take(train), label[train], **options)
    sequential = fit_sequential(views.take(train), label[train], tolerance=0.05, **options)
    crossed = conformalize(sequential, views.take(train), label[train], level=0.8, cross=True)
    pairs = views.take(train), label[train], views.take(test), label[test]
    methods = {"policy": policy, "sequential": sequential, "conformal": crossed}
    outcome = compare(*pairs, task="classification", methods=methods, sets=0.8, resamples=20)
    assert all(0.72 < outcome[name, "set_coverage_0.8"] < 0.88 for name in methods)
    size = crossed.predict_set(pairs[2]).sum(axis=1).mean()
    assert outcome["sequential", "set_size_0.8"] == outcome["conformal", "set_size_0.8"] == pytest.approx(size)


def test_widths_of_intervals_are_compared():
    rng = np.random.default_rng(0)
    y = rng.normal(size=400)
    views = ViewPredictions(y[:, None, None] + rng.normal(size=(400, 4, 1)), names=["identity", *"abc"])
    pairs = views.take(slice(200)), y[:200], views.take(slice(200, None)), y[200:]
    outcome = compare(*pairs, task="regression", methods=["original", "uniform"], sets=0.8, resamples=20)
    assert outcome["uniform", "set_size_0.8"] < 0.7 * outcome["original", "set_size_0.8"]
    assert 0.7 < outcome["uniform", "set_coverage_0.8"] < 0.9
