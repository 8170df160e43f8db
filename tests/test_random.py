"""Row-keyed streams: independent of the batch, and distributed as they say."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vbtta._support.random import RowStreams

METHODS = {
    "uniform": lambda streams, shape: streams.uniform(size=(len(streams), *shape)),
    "normal": lambda streams, shape: streams.normal(size=(len(streams), *shape)),
    "beta symmetric": lambda streams, shape: streams.beta(0.3, 0.3, (len(streams), *shape)),
    "beta skew": lambda streams, shape: streams.beta(0.5, 2.0, (len(streams), *shape)),
    "integers": lambda streams, shape: streams.integers(10, size=(len(streams), *shape)),
}
N_ROWS = 20_000
SMALLEST_P = 1e-4  # the streams are fixed by their seeds, so a test that passes once passes always
PINNED = [0.6936822853164445, 0.1584598455507492]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (90,)])
def test_numbers_of_a_row_do_not_depend_on_the_batch(method, shape):
    draw = METHODS[method]
    rows = np.arange(300)
    whole = RowStreams(3, "mixup(0.5)", 2, rows)
    first, second = draw(whole, shape), draw(whole, shape)
    assert first.shape == (300, *shape)
    assert not np.array_equal(first, second)
    for size in (1, 7, 128):
        pieces = [RowStreams(3, "mixup(0.5)", 2, rows[i : i + size]) for i in range(0, 300, size)]
        np.testing.assert_array_equal(np.concatenate([draw(piece, shape) for piece in pieces]), first)
        np.testing.assert_array_equal(np.concatenate([draw(piece, shape) for piece in pieces]), second)
    shuffled = np.random.default_rng(0).permutation(300)
    np.testing.assert_array_equal(draw(RowStreams(3, "mixup(0.5)", 2, shuffled), shape), first[shuffled])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    rows=st.lists(st.integers(0, 2**62), min_size=1, max_size=90),
    n_words=st.integers(1, 40),
)
def test_numbers_are_those_of_numpys_philox_for_few_rows_and_for_many(seed, rows, n_words):
    streams = RowStreams(seed, "view", 1, rows)
    key = next(iter(streams)).bit_generator.state["state"]["key"]
    words = [np.random.Philox(key=key, counter=[0, 0, row, 0]).random_raw(n_words) for row in rows]
    np.testing.assert_array_equal(streams.random((len(rows), n_words)), ((np.array(words) >> 12) + 0.5) * 2.0**-52)


def test_every_part_of_the_key_matters():
    base = RowStreams(0, "a", 0, range(50)).uniform(size=(50, 4))
    for other in [(1, "a", 0), (0, "b", 0), (0, "a", 1)]:
        different = RowStreams(*other, range(50)).uniform(size=(50, 4))
        assert not np.any(different == base)
    assert not np.any(RowStreams(0, "a", 0, range(50, 100)).uniform(size=(50, 4)) == base)


def test_first_numbers_stay_the_same_from_version_to_version():
    np.testing.assert_array_equal(RowStreams(0, "identity", 0, [0, 1]).uniform(), PINNED)


DISTRIBUTIONS = [
    ("uniform", lambda s: s.uniform(), stats.uniform()),
    ("normal", lambda s: s.normal(), stats.norm()),
    ("beta(2, 5)", lambda s: s.beta(2.0, 5.0), stats.beta(2.0, 5.0)),
    *((f"beta({a}, {a})", lambda s, a=a: s.beta(a, a), stats.beta(a, a)) for a in (0.1, 0.5, 0.9, 1.0, 4.0)),
]


@pytest.mark.parametrize(("draw", "law"), [case[1:] for case in DISTRIBUTIONS], ids=[c[0] for c in DISTRIBUTIONS])
def test_distribution_over_rows_and_along_a_row(draw, law):
    over_rows = draw(RowStreams(1, "view", 0, range(N_ROWS)))
    one_row = np.concatenate([draw(RowStreams(1, "view", m, [5])) for m in range(2_000)])
    for sample in (over_rows, one_row):
        assert stats.kstest(sample, law.cdf).pvalue > SMALLEST_P
        standard_error = law.std() / math.sqrt(len(sample))
        assert abs(sample.mean() - law.mean()) < 4 * standard_error
        fourth = law.stats(moments="k") + 3.0
        assert abs(sample.var() / law.var() - 1.0) < 4 * math.sqrt((fourth - 1.0) / len(sample))


def test_integers_are_even_and_within_bounds():
    numbers = RowStreams(2, "view", 0, range(N_ROWS)).integers(7, size=(N_ROWS, 3))
    counts = np.bincount(numbers.ravel(), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts).pvalue > SMALLEST_P
    assert set(RowStreams(2, "view", 0, range(9)).integers(1)) == {0}


def test_no_correlation_between_rows_draws_views_seeds_and_positions():
    base = RowStreams(0, "view", 0, range(N_ROWS)).normal(size=(N_ROWS, 2))
    limit = 4.5 / math.sqrt(N_ROWS)
    partners = [
        base[:, 1],
        np.roll(base[:, 0], 1),
        RowStreams(0, "view", 1, range(N_ROWS)).normal(),
        RowStreams(1, "view", 0, range(N_ROWS)).normal(),
        RowStreams(0, "views", 0, range(N_ROWS)).normal(),
        RowStreams(0, "view", 0, range(N_ROWS, 2 * N_ROWS)).normal(),
    ]
    for partner in partners:
        for power in (1, 2):
            assert abs(np.corrcoef(base[:, 0] ** power, partner**power)[0, 1]) < limit


def test_tiny_shape_parameters_stay_within_0_and_1():
    numbers = RowStreams(0, "view", 0, range(2_000)).beta(1e-3, 1e-3, (2_000, 3))
    assert np.all((numbers >= 0) & (numbers <= 1))
    assert abs(numbers.mean() - 0.5) < 0.03


def test_no_rows_and_no_numbers():
    assert RowStreams(0, "view", 0, []).uniform(size=(0, 3)).shape == (0, 3)
    assert RowStreams(0, "view", 0, range(100)).normal(size=(100, 0)).shape == (100, 0)
    assert len(RowStreams(0, "view", 0, range(4))) == 4


@pytest.mark.parametrize("shape", [(3,), (3, 2, 4)])
def test_array_parameters_give_each_row_its_part(shape):
    """Shot noise on a batch: as many numbers as the batch has, and those of a row whatever batch it is in."""
    mean = np.random.default_rng(0).uniform(50, 200, shape)
    draws = {
        "poisson": lambda streams, part: streams.poisson(part),
        "gamma": lambda streams, part: streams.gamma(part, 2.0, size=part.shape),
        "scale": lambda streams, part: streams.gamma(5.0, scale=part),
        "binomial": lambda streams, part: streams.binomial(part.astype(int), 0.5),
        "beta": lambda streams, part: streams.beta(part, 2.0),
        "beta symmetric": lambda streams, part: streams.beta(part, part),
        "integers": lambda streams, part: streams.integers(part.astype(int), 300),
    }
    for name, draw in draws.items():
        whole = draw(RowStreams(0, "v", 0, range(3)), mean)
        parts = [draw(RowStreams(0, "v", 0, [row]), mean[row : row + 1]) for row in range(3)]
        assert whole.shape == shape, name
        np.testing.assert_array_equal(whole, np.concatenate(parts), name)
    whole = RowStreams(0, "v", 0, range(2000)).poisson(np.repeat([10.0, 1000.0], 1000))
    np.testing.assert_allclose([whole[:1000].mean(), whole[1000:].mean()], [10, 1000], rtol=0.05)


def test_vector_parameters_are_the_same_for_every_row():
    streams = RowStreams(0, "v", 0, range(3))
    assert streams.multinomial(5, [0.2, 0.3, 0.5]).shape == (3, 3)
    assert streams.multivariate_normal(np.zeros(3), np.eye(3), size=(3, 4)).shape == (3, 4, 3)
    assert set(streams.choice([1, 2, 3], size=(3, 99)).ravel()) == {1, 2, 3}


def test_integers_take_the_arguments_of_numpy():
    streams = RowStreams(0, "v", 0, range(3))
    numbers = streams.integers(0, 255, (3, 900), np.uint8, True)
    assert numbers.dtype == np.uint8
    assert (numbers.min(), numbers.max()) == (0, 255)
    low = np.array([0, 10, 20])
    np.testing.assert_array_equal(streams.integers(low, low + 1), low)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowStreams(0, "v", 0, [-1]), "rows must not be negative; got -1"),
        (lambda: RowStreams(0, "v", 0, np.array([0.5])), "rows must be a one-dimensional array of whole numbers"),
        (lambda: RowStreams(0, "v", 0, np.zeros((2, 2), int)), "rows must be a one-dimensional"),
        (lambda: RowStreams(0, "v", 0, [0]).integers(0), "high must be between 1 and"),
        (lambda: RowStreams(0, "v", 0, [0, 1]).integers([1, 3], 3), r"high must be between \[2 4\] and"),
        (lambda: RowStreams(0, "v", 0, [0, 1]).poisson(np.ones(3)), r"the number of rows, 2; got \(3,\)"),
        (lambda: RowStreams(0, "v", 0, [0]).beta(0.0, 1.0), "a must be a positive number, 1e-300 to 1e300; got 0.0"),
        (lambda: RowStreams(0, "v", 0, [0]).beta(1.0, math.inf), "b must be a positive number"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
