"""Metrics agree with hand-computed numbers, weigh labels by their counts, and refuse what is no prediction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import metrics

PROBA = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9]])
LABELS = np.array([0, 2, 2, 2])


def test_regression_metrics_by_hand():
    y = np.array([[1.0, 2.0], [3.0, 5.0]])
    mean = np.array([[2.0, 2.0], [3.0, 1.0]])
    assert metrics.mse(y, mean) == (0.5 + 8.0) / 2
    assert metrics.mae(y, mean) == (0.5 + 2.0) / 2
    assert metrics.mse(y, mean, weights=[3, 1]) == (3 * 0.5 + 8.0) / 4
    assert metrics.interval_coverage(y, mean - 1, mean + 1) == 0.75


def test_classification_metrics_by_hand():
    assert metrics.accuracy(LABELS, PROBA) == 0.75
    assert metrics.accuracy(LABELS, PROBA, weights=[1, 5, 1, 1]) == 3 / 8
    first, second = 0.09 + 0.04 + 0.01, 0.01 + 0.36 + 0.49
    third, fourth = 0.09 + 0.09 + 0.36, 0.0025 + 0.0025 + 0.01
    assert metrics.brier(LABELS, PROBA) == pytest.approx((first + second + third + fourth) / 4)


def test_nll_and_crps_are_means_of_scores():
    assert metrics.nll(np.log([0.5, 0.25]), weights=[1, 3]) == pytest.approx(7 / 4 * np.log(2))
    assert metrics.crps([1.0, 2.0]) == 1.5


def test_ece_by_hand():
    # Each label sits in a bin of its own: gaps 0.3, -0.6, 0.6, 0.1.
    assert metrics.ece(LABELS, PROBA) == pytest.approx((0.3 + 0.6 + 0.6 + 0.1) / 4)
    # One bin: the gaps cancel.
    assert metrics.ece(LABELS, PROBA, bins=1) == pytest.approx(abs(0.3 - 0.6 + 0.6 + 0.1) / 4)


def test_confidence_on_an_edge_belongs_to_the_bin_below():
    proba = np.array([[0.6, 0.4], [0.61, 0.39], [1.0, 0.0]])
    _, home = metrics.calibration_gaps([0, 0, 0], proba, bins=5)
    assert home.tolist() == [2, 3, 4]


@given(st.integers(0, 10_000))
def test_counts_equal_repeated_labels_and_order_does_not_matter(seed):
    generator = np.random.default_rng(seed)
    proba = generator.dirichlet(np.ones(3), size=12).round(1)
    proba[:, 2] = 1 - proba[:, 0] - proba[:, 1]
    proba = np.abs(proba)
    proba /= proba.sum(axis=1, keepdims=True)
    y, count = generator.integers(0, 3, 12), generator.integers(1, 4, 12)
    rows = generator.permutation(np.repeat(np.arange(12), count))
    assert metrics.ece(y[rows], proba[rows]) == pytest.approx(metrics.ece(y, proba, count), abs=1e-12)
    for name in ("accuracy", "brier"):
        metric = getattr(metrics, name)
        assert metric(y[rows], proba[rows]) == pytest.approx(metric(y, proba, count))


def test_calibrated_predictions_have_small_ece():
    generator = np.random.default_rng(0)
    proba = generator.dirichlet(np.ones(4), size=50_000)
    y = (generator.random((50_000, 1)) > proba.cumsum(axis=1)).sum(axis=1)
    assert metrics.ece(y, proba) < 0.01
    assert metrics.ece(y, proba**2 / (proba**2).sum(axis=1, keepdims=True)) > 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.mse([1.0], [[1.0]]), "mean must be shaped like y"),
        (lambda: metrics.mse([], []), "no labels"),
        (lambda: metrics.mse([np.nan], [1.0]), "y has NaN"),
        (lambda: metrics.mse([1.0], [1.0], [-1.0]), "weights must be finite"),
        (lambda: metrics.mse([1.0], [1.0], [1.0, 1.0]), "weights must be"),
        (lambda: metrics.mse(1.0, 1.0), "y must be"),
        (lambda: metrics.nll([[0.1]]), "log_prob must be"),
        (lambda: metrics.nll([np.nan]), "NaN for label 0"),
        (lambda: metrics.crps([-0.1]), "not be negative"),
        (lambda: metrics.crps(0.1), "scores must be"),
        (lambda: metrics.crps([[]]), "scores must be"),
        (lambda: metrics.interval_coverage([1.0], [2.0], [0.0]), "swapped"),
        (lambda: metrics.accuracy([0], [[2.0, -1.0]]), "softmax"),
        (lambda: metrics.accuracy([2], [[0.5, 0.5]]), "got 2"),
        (lambda: metrics.accuracy([0.0], [[0.5, 0.5]]), "dtype float64"),
        (lambda: metrics.accuracy([0, 1], [[0.5, 0.5]]), "one class a row"),
        (lambda: metrics.accuracy([0], [0.5, 0.5]), "proba must be"),
        (lambda: metrics.ece([0], [[0.5, 0.5]], bins=0), "bins must be"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_overlap_of_maps_by_image():
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 3, size=(2, 4, 6, 5))
    truth[3], predicted[3] = 0, 0
    proba = np.moveaxis(np.eye(4)[predicted], -1, 1)
    dices, ious = metrics.dice_scores(truth, predicted, 4), metrics.iou_scores(truth, proba)
    for image in range(4):
        for label in range(4):
            a, b = truth[image] == label, predicted[image] == label
            if not (a | b).any():
                assert np.isnan(dices[image, label])
                assert np.isnan(ious[image, label])
                continue
            assert dices[image, label] == pytest.approx(2 * (a & b).sum() / (a.sum() + b.sum()))
            assert ious[image, label] == pytest.approx((a & b).sum() / (a | b).sum())
    assert np.isnan(dices[:, 3]).all()
    assert metrics.dice(truth, predicted, 4) == pytest.approx(np.nanmean(dices, axis=1).mean())
    assert metrics.iou(truth, proba, background=0) == pytest.approx(np.nanmean(ious[:3, 1:], axis=1).mean())
    hidden = truth.copy()
    hidden[:, 0] = 255
    np.testing.assert_array_equal(
        metrics.dice_scores(hidden, predicted, 3, ignore=255), metrics.dice_scores(truth[:, 1:], predicted[:, 1:], 3)
    )
    rows, columns = metrics.map_rows(hidden, proba, ignore=255)
    assert metrics.accuracy(rows, columns) == (truth == predicted)[:, 1:].mean()


def test_average_precision_agrees_with_scikit_learn():
    average_precision_score = pytest.importorskip("sklearn.metrics").average_precision_score
    rng = np.random.default_rng(1)
    truth, score = rng.integers(0, 2, size=(5, 7, 6)), rng.integers(0, 9, size=(5, 7, 6)) / 9  # many ties
    expected = [average_precision_score(a.ravel(), b.ravel()) for a, b in zip(truth, score, strict=True)]
    np.testing.assert_allclose(metrics.average_precisions(truth, score), expected)
    truth[2] = 0
    assert metrics.average_precision(truth, score) == pytest.approx(np.mean(np.delete(expected, 2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.dice(np.zeros((1, 2, 2), int), np.zeros((1, 2, 3), int), 2), "maps must be shaped like y"),
        (lambda: metrics.dice(np.zeros((1, 2, 2), int), np.zeros((1, 2, 2), int)), "n_classes must be given"),
        (lambda: metrics.iou(np.full((1, 2, 2), 255), np.zeros((1, 2, 2), int), 2), r"y must be class positions 0..1"),
        (lambda: metrics.iou(np.full((1, 2, 2), 9), np.zeros((1, 2, 2), int), 2, ignore=9), "no image has a class"),
        (
            lambda: metrics.dice(np.zeros((1, 2, 2), int), np.full((1, 2, 2, 2), np.nan)),
            "maps must be numbers; got NaN",
        ),
        (lambda: metrics.average_precision([[0, 0]], [[0.1, 0.2]]), "no positive in any image"),
        (lambda: metrics.average_precision([[0, 2]], [[0.1, 0.2]]), "of 0 and 1"),
        (lambda: metrics.map_rows(np.zeros((1, 2, 2)), np.zeros((1, 3, 2, 1))), r"proba must be \(N, C, ...\)"),
    ],
)
def test_bad_maps_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_odd_arguments_are_refused_in_one_line_or_read():
    for values in (["\r\n"], np.array(["2026-11-18"], dtype="datetime64[D]")):
        with pytest.raises(ValueError, match="y must be class positions") as error:
            metrics.accuracy(values, [[0.5, 0.5]])
        assert "\n" not in str(error.value)
    assert metrics.brier_scores(np.zeros(0), np.zeros((0, 2))).shape == (0,)
    with pytest.raises(ValueError, match="maps must be numbers"):
        metrics.dice_scores(
            np.zeros((1, 2, 2), dtype=int), np.full((1, 3, 2, 2), np.datetime64("2026-11-18"), dtype=object)
        )


def test_pandas_objects_are_not_paired_by_position():
    pd = pytest.importorskip("pandas")

    y = pd.Series([0, 1, 1], index=["a", "b", "c"])
    proba = pd.DataFrame([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], index=y.index)
    assert metrics.accuracy(y, proba) == metrics.accuracy(y.to_numpy(), proba) == 1
    for call in (
        lambda: metrics.accuracy(y, proba.iloc[::-1]),
        lambda: metrics.ece(y, proba, weights=pd.Series([1, 2, 3])),
        lambda: metrics.mse(y, y.iloc[::-1]),
        lambda: metrics.interval_coverage(y, y - 1, y.iloc[::-1]),
        lambda: metrics.nll(pd.Series([-1.0, -2.0], index=[1, 0]), pd.Series([1, 2])),
    ):
        with pytest.raises(ValueError, match=r"have different pandas indices or ids: .*\.loc\[.*\.to_numpy\(\)"):
            call()
