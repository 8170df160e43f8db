"""The probit integral: values, gradients and memory, against SciPy's quadrature and mpmath."""

import tracemalloc

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import integrate
from scipy.special import log_ndtr, ndtr, softmax

from vbtta.models.parts import probit
from vbtta.models.parts.probit import log_probit, log_probit_vjp


def two_class(mean, scale):
    """ln P of both classes in closed form."""
    z = (mean[..., 0] - mean[..., 1]) / np.hypot(scale[..., 0], scale[..., 1])
    return np.stack([log_ndtr(z), log_ndtr(-z)], axis=-1)


def by_adaptive_quadrature(mean, scale):
    """P of all classes, with the scales of every class among the break points."""

    def integrand(v):
        x = (v - mean) / scale
        log_cdf = log_ndtr(x)
        return np.exp(log_cdf.sum() - log_cdf - 0.5 * x**2) / scale / np.sqrt(2 * np.pi)

    lower, upper = (mean - 9 * scale).max(), (mean + 9 * scale).max()
    points = np.unique(mean + scale * np.arange(-9, 10)[:, None])
    points = points[(points > lower) & (points < upper)]
    value, _ = integrate.quad_vec(
        integrand, lower, upper, points=points, epsabs=1e-13, epsrel=1e-12, norm="max", limit=5000
    )
    return value


def random_rows(rng, n_rows, n_classes, ratio):
    """Rows whose scales differ by up to `ratio`; close and distant means."""
    scale = 10 ** rng.uniform(0, np.log10(ratio), (n_rows, n_classes)) * 0.01
    scale *= 10 ** rng.uniform(0, 4 - np.log10(ratio), (n_rows, 1))
    spread = rng.choice([0.0, 0.5, 3.0, 10.0], (n_rows, 1)) * np.median(scale, axis=1, keepdims=True)
    return np.clip(rng.normal(size=(n_rows, n_classes)) * spread, -50, 50), scale


def test_two_classes_equal_the_closed_form():
    rng = np.random.default_rng(0)
    mean = rng.uniform(-50, 50, (5000, 2)) * rng.choice([0.01, 0.1, 1.0], (5000, 1))
    scale = 10 ** rng.uniform(-2, 2, (5000, 2))
    log_proba, expected = log_probit(mean, scale), two_class(mean, scale)
    assert_allclose(np.exp(log_proba), np.exp(expected), rtol=0, atol=1e-10)
    improbable = (expected < -20) & (expected > -100)
    assert improbable.sum() > 100
    assert_allclose(log_proba[improbable], expected[improbable], rtol=1e-8)


def test_two_classes_keep_their_digits_in_the_tail():
    gap = np.linspace(0, 28, 300)
    mean = np.stack([gap, np.zeros_like(gap)], axis=1)
    assert_allclose(log_probit(mean), two_class(mean, np.ones_like(mean)), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("n_classes", [3, 10, 100])
@pytest.mark.parametrize(("ratio", "tolerance"), [(1.0, 1e-8), (10.0, 1e-8), (1e4, 1e-5)])
def test_agrees_with_adaptive_quadrature(n_classes, ratio, tolerance):
    mean, scale = random_rows(np.random.default_rng(n_classes), 12 if n_classes < 100 else 3, n_classes, ratio)
    expected = np.stack([by_adaptive_quadrature(*row) for row in zip(mean, scale, strict=True)])
    assert_allclose(np.exp(log_probit(mean, scale)), expected, rtol=0, atol=tolerance)


def test_improbable_classes_agree_with_high_precision():
    mean = np.array([3.0, 2.5, -1.0, -6.0, -14.0])

    def log_reference(c):
        def density(v):
            rest = (mpmath.ncdf(v, m, 1) for i, m in enumerate(mean) if i != c)
            return mpmath.npdf(v, mean[c], 1) * mpmath.fprod(rest)

        with mpmath.workdps(30):
            return float(mpmath.log(mpmath.quad(density, list(np.linspace(-30, 12, 22)))))

    expected = [log_reference(c) for c in range(len(mean))]
    assert expected[-1] < -80
    assert_allclose(log_probit(mean), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("n_classes", [2, 3, 5, 10, 30, 100, 1000])
def test_equal_classes_are_equally_probable(n_classes):
    proba = np.exp(log_probit(np.full(n_classes, 7.0), 3.0))
    assert_allclose(proba, 1 / n_classes, rtol=0, atol=1e-8 / n_classes)


@settings(max_examples=150, deadline=None)
@given(
    n_classes=st.integers(2, 40),
    log_ratio=st.floats(0, 4),
    spread=st.sampled_from([0.0, 0.3, 2.0, 10.0, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_raw_rows_sum_to_one(n_classes, log_ratio, spread, seed):
    rng = np.random.default_rng(seed)
    scale = 10 ** (rng.uniform(0, log_ratio, (4, n_classes)) + rng.uniform(-2, 2 - log_ratio))
    mean = np.clip(spread * rng.normal(size=(4, n_classes)), -50, 50)
    log_proba = log_probit(mean, scale)
    assert np.isfinite(log_proba).all()
    assert (log_proba <= 0).all()
    assert_allclose(np.exp(log_proba).sum(axis=1), 1, rtol=0, atol=1e-8 if log_ratio <= 1 else 1e-6)


def test_shift_unit_and_order_do_not_matter():
    rng = np.random.default_rng(3)
    mean, scale = random_rows(rng, 40, 7, 100.0)
    order = rng.permutation(7)
    expected = np.exp(log_probit(mean, scale))
    assert_allclose(np.exp(log_probit(mean + 1e3, scale)), expected, rtol=0, atol=1e-8)
    assert_allclose(np.exp(log_probit(mean * 1e3, scale * 1e3)), expected, rtol=0, atol=1e-8)
    assert_allclose(np.exp(log_probit(mean[:, order], scale[:, order])), expected[:, order], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("scale", "top_scale"), [(1.0, 1.0), (0.01, 1.0), (1.0, 0.01), (0.01, 0.01), (10.0, 0.1)])
@pytest.mark.parametrize("n_tops", [1, 4])
def test_hopeless_classes_stay_finite_and_ordered(scale, top_scale, n_tops):
    gap = np.linspace(0.0, 100.0, 2001)
    mean = np.zeros((len(gap), n_tops + 1))
    mean[:, -1] = -gap
    scales = np.r_[np.full(n_tops, top_scale), scale]
    result = log_probit_vjp(mean, scales, np.eye(n_tops + 1)[-1])
    assert all(np.isfinite(part).all() for part in result)
    log_proba = result.log_proba[:, -1]
    assert (np.diff(log_proba) < 1e-9).all()
    assert (result.grad_mean[:, -1] > -1e-9).all()
    pairwise = log_ndtr(-gap / np.hypot(scale, top_scale))  # beating one rival is easier than beating all
    assert (log_proba <= pairwise * (1 - 1e-2) + 1e-6).all()
    assert (log_proba >= n_tops * 1.1 * pairwise - n_tops * 10).all()


@pytest.mark.parametrize(("scale", "top_scale"), [(1.0, 1.0), (0.01, 0.01), (0.1, 1.0), (1.0, 0.1), (0.01, 1.0)])
def test_hopeless_classes_are_pulled_up_by_the_right_force(scale, top_scale):
    total = np.hypot(scale, top_scale)
    z = -np.geomspace(20.0, 1e4, 60)
    hazard = np.exp(-0.5 * z**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(z))
    mean = np.stack([np.zeros_like(z), z * total], axis=1)
    result = log_probit_vjp(mean, [top_scale, scale], [0.0, 1.0])
    assert_allclose(result.log_proba[:, 1], log_ndtr(z), rtol=1e-2)
    assert_allclose(result.grad_mean, hazard[:, None] / total * [-1.0, 1.0], rtol=1e-2)
    assert_allclose(result.grad_scale, -(hazard * z)[:, None] / total**2 * [top_scale, scale], rtol=2e-2)


def test_gradient_of_two_classes_equals_the_closed_form():
    rng = np.random.default_rng(4)
    scale = 10 ** rng.uniform(-1, 1, (200, 2))
    mean = rng.normal(size=(200, 2)) * 2
    total = np.hypot(scale[:, 0], scale[:, 1])
    z = (mean[:, 0] - mean[:, 1]) / total
    hazard = np.exp(-0.5 * z**2 - log_ndtr(z)) / np.sqrt(2 * np.pi)
    result = log_probit_vjp(mean, scale, [1.0, 0.0])
    expected_mean = hazard[:, None] / total[:, None] * [1.0, -1.0]
    expected_scale = (-hazard * z / total**2)[:, None] * scale
    assert_allclose(result.grad_mean, expected_mean, rtol=1e-6, atol=1e-8)
    assert_allclose(result.grad_scale, expected_scale, rtol=1e-6, atol=1e-8)
    assert_allclose(np.exp(result.log_proba[:, 0]), ndtr(z), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("n_classes", "ratio", "spread"),
    [
        (2, 1.0, 1.0),
        (3, 1.0, 3.0),
        (10, 1.0, 3.0),
        (10, 10.0, 2.0),
        (10, 1e4, 3.0),
        (60, 1.0, 2.0),
        (20, 100.0, 5.0),
    ],
)
def test_gradient_equals_finite_differences(n_classes, ratio, spread):
    rng = np.random.default_rng(n_classes)
    mean, scale = rng.normal(size=n_classes) * spread, 10 ** rng.uniform(0, np.log10(ratio), n_classes)
    weight = rng.dirichlet(np.ones(n_classes))
    result = log_probit_vjp(mean, scale, weight)
    step = np.diag(2e-3 * scale)  # a row per class, and four points for a difference of fourth order
    points = np.array([1.0, -1.0, 2.0, -2.0])[:, None, None] * step
    coefficient = np.array([8.0, -8.0, -1.0, 1.0]) / 12
    for gradient, values in [
        (result.grad_mean, log_probit(mean + points, scale)),
        (result.grad_scale, log_probit(np.broadcast_to(mean, points.shape), scale + points)),
    ]:
        difference = np.tensordot(coefficient, values @ weight, axes=1) / np.diag(step)
        assert_allclose(gradient, difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ratio", [1.0, 10.0, 1e4])
def test_gradient_respects_shift_and_unit(ratio):
    rng = np.random.default_rng(5)
    mean, scale = random_rows(rng, 200, 6, ratio)
    weight = rng.dirichlet(np.ones(6), 200)
    possible = log_probit(mean, scale).min(axis=1) > -150
    assert possible.sum() > 50
    mean, scale, weight = mean[possible], scale[possible], weight[possible]
    _, grad_mean, grad_scale = log_probit_vjp(mean, scale, weight)
    unit = np.concatenate([mean * grad_mean, scale * grad_scale], axis=1)
    for total in (grad_mean, unit):  # P does not change if all means shift, or all means and scales stretch
        assert (np.abs(total.sum(axis=1)) <= 1e-5 * np.abs(total).sum(axis=1)).all()


def test_gradient_and_value_agree_and_weights_enter_linearly():
    rng = np.random.default_rng(6)
    mean, scale = random_rows(rng, 30, 8, 10.0)
    first, second = rng.normal(size=(2, 30, 8))
    first_result, two = log_probit_vjp(mean, scale, first), log_probit_vjp(mean, scale, second)
    both = log_probit_vjp(mean, scale, first + 2 * second)
    assert_allclose(first_result.log_proba, log_probit(mean, scale), rtol=1e-12, atol=1e-12)
    for name in ("grad_mean", "grad_scale"):
        expected = getattr(first_result, name) + 2 * getattr(two, name)
        assert_allclose(getattr(both, name), expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_one_class_is_certain():
    assert_array_equal(log_probit(np.array([[3.0], [-50.0]]), 0.01), 0.0)
    for part in log_probit_vjp([[3.0], [-50.0]], 1.0, 1.0):
        assert_array_equal(part, np.zeros((2, 1)))


def test_shapes_broadcast_and_strides_do_not_matter():
    rng = np.random.default_rng(7)
    mean, scale = rng.normal(size=(5, 4, 3)), rng.uniform(0.5, 2, (5, 4, 1))
    expected = log_probit(mean, np.broadcast_to(scale, mean.shape))
    assert expected.shape == mean.shape
    assert_array_equal(log_probit(mean, scale), expected)
    assert_array_equal(log_probit(mean[2, 1], scale[2, 1]), expected[2, 1])
    assert log_probit(np.empty((0, 3))).shape == (0, 3)
    strided = np.zeros((5, 4, 6))[..., ::2]
    strided[...] = mean
    assert_array_equal(log_probit(strided, scale), expected)
    assert_array_equal(strided, mean)  # the input is not written to
    assert log_probit_vjp(mean, scale, 1.0).grad_scale.shape == mean.shape


def test_many_classes_in_chunks_of_nodes_agree_with_one_chunk(monkeypatch):
    rng = np.random.default_rng(8)
    mean, scale = random_rows(rng, 9, 50, 1e3)
    weight = rng.dirichlet(np.ones(50), 9)
    expected = log_probit_vjp(mean, scale, weight)
    monkeypatch.setattr(probit, "BLOCK_SIZE", 2000)
    for part, whole in zip(log_probit_vjp(mean, scale, weight), expected, strict=True):
        assert_allclose(part, whole, rtol=1e-9, atol=1e-9 * np.abs(whole).max())


@pytest.mark.parametrize(("n_rows", "n_classes", "ratio"), [(40_000, 10, 1.0), (100, 1000, 1.0), (16, 1000, 1e4)])
def test_memory_is_bounded(n_rows, n_classes, ratio):
    mean, scale = random_rows(np.random.default_rng(9), n_rows, n_classes, ratio)
    tracemalloc.start()
    try:
        log_probit(mean, scale)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16e6


def test_fast_log_ndtr_is_accurate():
    x = np.linspace(-60, 40, 300_001)
    assert_allclose(probit.fast_log_ndtr(x), log_ndtr(x), rtol=1e-12, atol=1e-12)


def test_sampled_utilities_agree():
    rng = np.random.default_rng(10)
    mean, scale = np.array([0.5, 0.0, -1.0, 0.2]), np.array([1.0, 0.3, 3.0, 0.1])
    winner = (mean + scale * rng.normal(size=(400_000, 4))).argmax(axis=1)
    share = np.bincount(winner, minlength=4) / len(winner)
    assert_allclose(np.exp(log_probit(mean, scale)), share, rtol=0, atol=5 * 0.5 / np.sqrt(len(winner)))
    assert np.abs(softmax(mean) - share).max() > 0.1  # another link would not pass
