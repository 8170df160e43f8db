"""Views of arrays, the protocol's checks, and functions as views."""

import copy
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn

from vbtta._support.checks import require
from vbtta._support.fingerprints import view_fingerprint
from vbtta._support.random import RowStreams
from vbtta.augment import (
    Affine,
    Augmentation,
    Chain,
    CutMix,
    FeatureDropout,
    GaussianNoise,
    Identity,
    Mixup,
    Pool,
    apply_view,
    as_view,
    as_views,
)

SMALLEST_P = 1e-4  # the streams are fixed by their seeds, so a test that passes once passes always


def streams(view, n_rows, seed=0, draw=0):
    return RowStreams(seed, view.name, draw, range(n_rows))


def stochastic_views(pool):
    return [GaussianNoise(0.1), FeatureDropout(0.3), Mixup(0.5, pool), CutMix(0.5, pool)]


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_mixup_share_is_beta(alpha):
    view = Mixup(alpha, np.ones((5, 3)))
    share = view(np.zeros((20_000, 3)), streams(view, 20_000))
    assert np.all(share == share[:, :1])  # one lambda for the whole row
    check_beta(share[:, 0], alpha)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_cutmix_has_one_beta_share_per_feature(alpha):
    view = CutMix(alpha, np.ones((5, 2)))
    mask = view(np.zeros((20_000, 2)), streams(view, 20_000))
    for column in mask.T:
        check_beta(column, alpha)
    assert abs(np.corrcoef(mask.T)[0, 1]) < 4.5 / math.sqrt(len(mask))


def test_cutmix_keeps_the_rest_of_x():
    shares, view = (CutMix(0.5, np.full((5, 3), partner)) for partner in (1.0, 2.0))
    mask = shares(np.zeros((50, 3)), streams(shares, 50))  # M, as x is 0 and x* is 1
    mixed = view(np.full((50, 3), 7.0), streams(view, 50))
    np.testing.assert_allclose(mixed, (1 - mask) * 7 + mask * 2, rtol=1e-12)


def check_beta(sample, alpha):
    assert stats.kstest(sample, stats.beta(alpha, alpha).cdf).pvalue > SMALLEST_P
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(sample.mean() - 0.5) < 4 * math.sqrt(variance / len(sample))
    assert abs(sample.var() / variance - 1) < 0.03


def test_mixup_keeps_the_rest_of_x_and_draws_partners_evenly():
    pool = np.eye(4)
    view = Mixup(0.5, pool)
    mixed = view(np.full((8_000, 4), 7.0), streams(view, 8_000))
    share = (7.0 - mixed).max(axis=1) / 7.0  # (1 - lambda) 7 where the partner is 0
    partner = mixed.argmax(axis=1)
    np.testing.assert_allclose(mixed, (1 - share[:, None]) * 7.0 + share[:, None] * pool[partner], atol=1e-12)
    assert stats.chisquare(np.bincount(partner[share > 1e-6], minlength=4)).pvalue > SMALLEST_P


def test_cutmix_takes_all_features_of_a_row_from_one_partner():
    view = CutMix(4.0, np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]))
    signs = np.sign(view(np.zeros((500, 3)), streams(view, 500)))
    assert np.all(signs == signs[:, :1])
    assert abs(signs[:, 0].mean()) < 0.2


def test_noise_has_the_stated_moments_and_respects_the_clip():
    view = GaussianNoise(0.2)
    noise = view(np.zeros((5_000, 4)), streams(view, 5_000))
    assert stats.kstest(noise.ravel() / 0.2, stats.norm.cdf).pvalue > SMALLEST_P
    clipped = GaussianNoise(5.0, clip=(0, 1))
    result = clipped(np.full((50, 4), 0.5), streams(clipped, 50))
    assert result.min() == 0.0
    assert result.max() == 1.0
    assert clipped.name == "noise(5,0..1)"


def test_dropout_replaces_the_stated_share():
    view = FeatureDropout(0.3, fill=-1.0)
    result = view(np.full((4_000, 5), 2.0), streams(view, 4_000))
    assert set(np.unique(result)) == {-1.0, 2.0}
    assert abs((result == -1.0).mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / result.size)
    assert view.name == "dropout(0.3,-1)"


def test_affine_maps_the_last_axis():
    rng = np.random.default_rng(0)
    matrix, offset, batch = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=(6, 3))
    expected = np.array([matrix @ row + offset for row in batch])
    view = Affine(matrix, offset)
    np.testing.assert_allclose(view(batch), expected)
    np.testing.assert_allclose(view(torch.from_numpy(batch)).numpy(), expected)
    assert view == Affine(matrix.tolist(), offset.tolist())
    assert view != Affine(matrix, offset + 1)
    assert view.name != Affine(matrix, offset + 1).name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_views_of_a_row_do_not_depend_on_the_batch(kind):
    rng = np.random.default_rng(1)
    array, pool = rng.normal(size=(300, 4)), rng.normal(size=(9, 4))
    batch: Any = torch.from_numpy(array) if kind == "torch" else array
    for view in stochastic_views(pool):
        whole = view(batch, streams(view, 300))
        for size in (1, 7, 256):
            pieces = [
                view(batch[i : i + size], RowStreams(0, view.name, 0, range(i, min(i + size, 300))))
                for i in range(0, 300, size)
            ]
            together = np.concatenate([np.asarray(piece) for piece in pieces])
            np.testing.assert_array_equal(together, np.asarray(whole), err_msg=view.name)
        assert not np.array_equal(np.asarray(whole), np.asarray(view(batch, streams(view, 300, draw=1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_numpy_and_torch_give_the_same_and_keep_the_type(dtype):
    rng = np.random.default_rng(2)
    array, pool = rng.normal(size=(20, 2, 3)), rng.normal(size=(5, 2, 3))
    tensor = torch.from_numpy(array).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2}[dtype]
    for view in [*stochastic_views(pool), *stochastic_views(torch.from_numpy(pool)), Identity()]:
        from_array = view(array, streams(view, 20))
        from_tensor = view(tensor, streams(view, 20))
        assert from_tensor.dtype == dtype
        np.testing.assert_allclose(from_tensor.double().numpy(), from_array, atol=tolerance, rtol=tolerance)
        assert view(array.astype(np.float32), streams(view, 20)).dtype == np.float32


def test_chain_applies_in_order_and_shares_the_streams():
    first, second = Affine([[2.0]], name="double"), GaussianNoise(0.5)
    chain = Chain([first, second])
    assert chain.name == "double+noise(0.5)"
    assert chain.stochastic
    assert not Chain([first]).stochastic
    batch = np.ones((5, 1))
    expected = 2.0 * batch + 0.5 * RowStreams(0, chain.name, 0, range(5)).normal(size=(5, 1))
    np.testing.assert_allclose(chain(batch, streams(chain, 5)), expected)


def test_built_in_views_follow_the_protocol_and_pickle():
    pool = np.ones((3, 2))
    views = [Identity(), Affine(np.eye(2)), *stochastic_views(pool), Chain([Identity(), Mixup(0.1, pool)])]
    for view in views:
        assert isinstance(view, Augmentation)
        assert pickle.loads(pickle.dumps(view)) == view
    names = [view.name for view in views]
    assert len(set(names)) == len(names)
    assert Identity().name == "identity"
    assert GaussianNoise(0.05).name == "noise(0.05)"


def test_functions_become_views():
    def negate(batch):
        return -batch

    def jitter(batch, rng):
        return batch + rng.normal(0.0, 1.0, batch.shape)

    plain, drawing = as_views([negate, jitter])
    assert (plain.name, plain.stochastic) == ("negate", False)
    assert (drawing.name, drawing.stochastic) == ("jitter", True)
    batch = np.ones((4, 2))
    np.testing.assert_array_equal(plain(batch, streams(plain, 4)), -batch)
    expected = batch + streams(drawing, 4).normal(size=(4, 2))
    np.testing.assert_array_equal(apply_view(drawing, batch, streams(drawing, 4)), expected)
    assert as_view(plain, "other").name == "other"
    assert as_view(GaussianNoise(0.1), "hiss") == GaussianNoise(0.1, name="hiss")
    assert as_view(plain) is plain


class OwnView:
    name = "own"
    stochastic = False

    def __call__(self, batch, rng=None):
        return batch + 1


def test_any_object_with_the_protocol_is_a_view():
    view = OwnView()
    assert as_views([view]) == [view]
    renamed = as_view(view, "mine")
    assert renamed.name == "mine"
    np.testing.assert_array_equal(renamed(np.zeros((2, 1))), np.ones((2, 1)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: batch[:-1], "view bad turned a batch of 4 rows into 3"),
        (lambda batch: np.concatenate([batch, batch]), "view bad turned a batch of 4 rows into 8"),
        (lambda batch: batch * np.nan, "view bad returned NaN or infinity"),
        (lambda batch: batch + np.inf, "view bad returned NaN or infinity"),
        (lambda batch: None, "view bad returned a NoneType"),
    ],
)
def test_apply_view_refuses_what_no_model_should_see(function, message):
    batch = np.ones((4, 3))
    view = as_view(function, "bad")
    with pytest.raises(ValueError, match=message):
        apply_view(view, batch)
    with pytest.raises(ValueError, match=message):
        apply_view(as_view(lambda x: {"a": function(x["a"].copy()), "b": x["b"]}, "bad"), {"a": batch, "b": batch})


def test_apply_view_checks_tensors_and_leaves_gaps_of_the_input_alone():
    with pytest.raises(ValueError, match="returned NaN"):
        apply_view(as_view(lambda x: x.log(), "log"), -torch.ones(2, 3))
    with pytest.raises(ValueError, match="turned a batch of 2 rows into 1"):
        apply_view(as_view(lambda x: x[:1], "first"), torch.ones(2, 3))
    gaps = np.array([[np.nan, 1.0]])
    np.testing.assert_array_equal(apply_view(Identity(), gaps), gaps)
    whole_numbers = torch.arange(4)[:, None]
    assert apply_view(Identity(), whole_numbers) is whole_numbers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianNoise(-0.1), "GaussianNoise: std must be a finite number above 0; got -0.1"),
        (lambda: GaussianNoise("0.1"), "GaussianNoise: std must be a finite number above 0; got '0.1'"),
        (lambda: GaussianNoise(0.1, clip=(1, 0)), "clip must be .low, high."),
        (lambda: FeatureDropout(1.0), "p must be a finite number above 0 and below 1; got 1.0"),
        (lambda: FeatureDropout(0.5, fill=math.nan), "fill must be a finite number; got nan"),
        (lambda: Affine([[1.0, 2.0]]), "A must be a square matrix"),
        (lambda: Affine(np.eye(2), [1.0]), r"b must have shape \(2,\)"),
        (lambda: Affine([[math.inf]]), "must be finite"),
        (lambda: Mixup(0.0, np.ones((2, 2))), "Mixup: alpha must be a finite number above 0"),
        (lambda: Mixup(0.5, np.ones(3)), "pool must be"),
        (lambda: Mixup(0.5, np.ones((0, 3))), r"pool must be \(P, ...\)"),
        (lambda: Chain([]), "at least one view"),
        (lambda: as_views([]), "at least one view"),
        (lambda: as_views([Identity(), Identity()]), "identity occurs more than once"),
        (lambda: as_view(lambda x: x), "a lambda has no name of its own: give it one with vbtta.augment.as_view"),
        (lambda: GaussianNoise(0.1)(np.ones((2, 2))), "call it with rng=RowStreams"),
        (
            lambda: GaussianNoise(0.1)(np.ones((2, 2)), RowStreams(0, "v", 0, [1])),
            "rng has 1 rows and the batch 2",
        ),
        (
            lambda: Mixup(1, np.ones((2, 3)))(np.ones((1, 2)), RowStreams(0, "v", 0, [1])),
            "pool rows have",
        ),
        (lambda: Affine(np.eye(2))(np.ones((1, 3))), "maps 2 features; the batch has 3"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_view(3), "a view must be callable: .*; got int"),
        (lambda: as_view(Identity), r"not a class: use Identity\(...\)"),
        (lambda: as_view(abs, stochastic=True), "takes no rng"),
        (
            lambda: GaussianNoise(1.0)(np.ones((2, 2), int), RowStreams(0, "v", 0, [0, 1])),
            "needs floating-point",
        ),
    ],
)
def test_wrong_types_are_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_pools_are_equal_by_content_and_no_tables():
    rows = np.arange(6.0).reshape(3, 2)
    assert Pool(rows) == Pool(torch.from_numpy(rows))
    assert Pool(rows) != Pool(rows + 1)
    with pytest.raises(TypeError, match="pool is a table, whose columns may differ from those of the inputs"):
        Mixup(0.5, pd.DataFrame(rows, columns=["b", "a"]))


def test_array_views_need_no_torch_and_image_views_name_the_pip_command():
    program = """
import sys
from dataclasses import dataclass
sys.modules["torch"] = None
import numpy as np
import vbtta.augment as augment
from vbtta._support.random import RowStreams
view = augment.Mixup(0.5, np.ones((2, 2)))
assert view(np.zeros((1, 2)), RowStreams(0, view.name, 0, [0])).shape == (1, 2)
assert augment.load_views
for attempt in (augment.HorizontalFlip, lambda: augment.Gamma(2.0), augment.flips):
    try:
        attempt()
    except ImportError as error:
        assert 'pip install "vbtta[torch]"' in str(error), error
    else:
        raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_require_tells_missing_from_broken(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r'no_such_thing is needed .* pip install "vbtta\[onnx\]"'):
        require("no_such_thing.part", "onnx")
    (tmp_path / "broken_package.py").write_text("import something_else_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_else_missing"):
        require("broken_package", "onnx")
    assert require("math", "onnx") is math


def test_what_replaces_a_value_replaces_nan_too():
    for batch in (np.full((2, 1, 6, 6), np.nan, np.float32), torch.full((2, 1, 6, 6), math.nan)):
        dropped = FeatureDropout(0.999, fill=3.0)(batch, RowStreams(0, "v", 0, range(2)))
        assert (np.asarray(dropped) == 3).mean() > 0.9
        assert dropped.dtype == batch.dtype


@dataclass(frozen=True)
class Table:
    values: np.ndarray
    name: str = "table"
    stochastic: bool = False

    def __call__(self, batch, rng=None):
        return batch


def test_fingerprints_tell_views_apart_that_print_alike():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert view_fingerprint(as_view(first, "a")) == view_fingerprint(as_view(copy.deepcopy(first), "b"))
    assert view_fingerprint(as_view(first)) != view_fingerprint(as_view(second))
    values = np.zeros(5000)
    changed = values.copy()
    changed[2000] = 1.0
    assert repr(Table(values)) == repr(Table(changed))
    assert view_fingerprint(Table(values)) == view_fingerprint(Table(values.copy(), name="other"))
    assert view_fingerprint(Table(values)) != view_fingerprint(Table(changed))


def test_a_module_of_ones_own_has_no_fingerprint():
    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

    assert view_fingerprint(as_view(Scale(2.0))) == view_fingerprint(as_view(Scale(3.0))) == "-"


def test_modules_that_draw_are_recognised():
    assert as_view(nn.Dropout(0.5)).stochastic
    assert as_view(nn.LSTM(2, 2, num_layers=2, dropout=0.1)).stochastic
    assert not as_view(nn.Dropout(0.5).eval()).stochastic
    assert not as_view(nn.Linear(2, 2)).stochastic


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Identity(name=3), ValueError, "Identity: name must be a string; got 3"),
        (lambda: GaussianNoise(0.1, clip=1), ValueError, "clip must be"),
        (lambda: Chain([Identity(), abs]), ValueError, "is not a view; .*as_view"),
        (lambda: Chain(3), ValueError, "Chain: views must be a list"),
        (lambda: as_views(None), TypeError, "got NoneType"),
        (lambda: as_views(3), TypeError, "got int"),
        (lambda: as_views("views.json"), TypeError, "load_views"),
    ],
)
def test_what_is_no_view_is_refused_in_one_line(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_view_that_makes_several_rows_of_each_is_refused():
    batch = np.random.default_rng(0).uniform(size=(3, 1, 4, 4))
    several = as_view(lambda batch, rng: np.stack([batch for _ in rng]), "several")
    with pytest.raises(ValueError, match=r"view several turned rows \(1, 4, 4\) into \(3, 1, 4, 4\)"):
        apply_view(several, batch, RowStreams(0, "several", 0, range(3)))
    shot_noise = as_view(lambda batch, rng: rng.poisson(batch * 255) / 255, "shot noise")
    assert apply_view(shot_noise, batch, RowStreams(0, "shot noise", 0, range(3))).shape == batch.shape
    parts = {"image": batch, "mask": batch[:, 0]}  # rows of the mask are shaped as those of one channel
    assert apply_view(as_view(lambda batch: batch, "same"), parts).keys() == parts.keys()
    spectrogram = as_view(lambda batch: np.abs(np.fft.rfft(batch.reshape(len(batch), 4, 4))), "spectrogram")
    assert apply_view(spectrogram, batch.reshape(3, 16)).shape == (3, 4, 3)
