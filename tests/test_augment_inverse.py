"""Inverses of views: for all sizes, dimensions and libraries; what a view does not see; exchanged classes."""

from dataclasses import replace
from typing import Any

import kornia
import numpy as np
import pytest
import torch
import ttach
from hypothesis import given, settings
from hypothesis import strategies as st

from vbtta.augment import (
    Affine,
    Blur,
    Brightness,
    Chain,
    Contrast,
    Crop,
    CutMix,
    FeatureDropout,
    Flip,
    Gamma,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
    Rotate,
    Rotate90,
    RowStreams,
    Shift,
    VerticalFlip,
    Zoom,
    as_view,
    as_views,
    d4,
    five_crop,
    flips,
    invert_view,
    standard_images,
    volume_flips,
)
from vbtta.augment.base import check_invertible, reorder_classes
from vbtta.augment.images import POSITIONS

EXACT = [*flips(), *d4(), Flip((0,)), Flip((0, 1)), Chain((Rotate90(1), HorizontalFlip(), Rotate90(3)))]
sizes = st.tuples(st.integers(2, 17), st.integers(2, 17))
shares = st.floats(-0.6, 0.6)
warps = st.one_of(
    st.builds(Rotate, st.floats(-180, 180)),
    st.builds(Zoom, st.floats(0.7, 2.0)),
    st.builds(Crop, st.sampled_from(POSITIONS), st.floats(0.5, 1.0)),
    st.builds(lambda angle, factor: Chain((Rotate(angle), Zoom(factor))), st.floats(-30, 30), st.floats(0.8, 1.3)),
    st.builds(lambda angle: Chain((Rotate90(1), Rotate(angle), HorizontalFlip())), st.floats(-30, 30)),
)

turns = st.one_of(
    st.builds(Flip, st.sampled_from([(0,), (1,), (0, 1)])),
    st.builds(Rotate90, st.integers(1, 3)),
    st.builds(Shift, shares, shares, st.just("zeros")),
)
paddings = st.sampled_from(["zeros", "border", "reflection"])
moves = st.one_of(
    turns,
    st.builds(Shift, shares, shares, paddings),
    st.builds(Rotate, st.floats(-180, 180), paddings),
    st.builds(Zoom, st.floats(0.7, 1.5), paddings),
    st.builds(Crop, st.sampled_from(POSITIONS), st.floats(0.6, 1.0)),
)


def smooth(height, width, channels=2):
    y, x = np.mgrid[:height, :width] / np.array([height, width]).max()
    waves = [0.5 * np.sin(2 * x + 1.5 * y + channel) + 0.5 * np.cos(2.5 * y - x) for channel in range(channels)]
    return torch.tensor(np.stack(waves)[None], dtype=torch.float32)


@given(size=sizes, view=st.sampled_from(EXACT), numpy=st.booleans())
def test_flips_and_turns_are_undone_exactly(size, view, numpy):
    images: Any = torch.rand(2, 3, *size)
    images = images.numpy() if numpy else images
    augmented = view(images)
    restored, seen = invert_view(view, augmented, augmented, images)
    np.testing.assert_array_equal(restored, images)
    assert seen is None
    assert type(restored) is type(images)


@given(size=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)))
def test_flips_and_turns_of_volumes_are_undone_exactly(size):
    volumes = torch.rand(2, 3, *size)
    for view in [*volume_flips(), *d4(), Chain((Flip((0,)), Rotate90(1)))]:
        augmented = view(volumes)
        restored, seen = invert_view(view, augmented, augmented, volumes)
        assert torch.equal(restored, volumes)
        assert seen is None
    assert len({tuple(view(volumes).flatten().tolist()) for view in volume_flips()}) <= 8


@given(size=sizes, x=shares, y=shares)
def test_shifts_are_undone_exactly_where_the_view_sees(size, x, y):
    view = Shift(x, y, "border")
    images = torch.rand(1, 2, *size)
    augmented = view(images)
    restored, seen = invert_view(view, augmented, augmented, images)
    assert torch.equal(restored, torch.where(seen, images, 0))
    down, right = (min(round(abs(share) * n), n - 1) for share, n in zip((y, x), size, strict=True))
    assert int(seen.sum()) == (size[0] - down) * (size[1] - right)


@given(view=warps, size=st.tuples(st.integers(50, 81), st.integers(50, 81)))
@settings(max_examples=60)
def test_interpolating_views_are_undone_on_smooth_images(view, size):
    images = smooth(*size)
    augmented = view(images)
    restored, seen = invert_view(view, augmented, augmented, images)
    assert seen.shape == (1, 1, *size)
    error = (restored - images).abs()[:, :, seen[0, 0]]  # type: ignore[index]
    assert len(error.flatten()) > 0
    assert error.mean() < 1e-3
    np.testing.assert_allclose(view.inverse(augmented.numpy()), restored, atol=1e-6)


@given(view=st.one_of(warps, st.builds(Shift, shares, shares)), depth=st.integers(1, 3))
@settings(max_examples=20)
def test_slices_of_volumes_are_transformed_and_undone_as_images(view, depth):
    slices = smooth(21, 30, channels=2 * depth).reshape(2, depth, 21, 30)
    augmented = view(slices[None])
    expected = view(slices.transpose(0, 1))
    torch.testing.assert_close(augmented[0], expected.transpose(0, 1))
    restored, seen = invert_view(view, augmented, augmented, slices[None])
    maps, mask = invert_view(view, expected, expected, slices.transpose(0, 1))
    torch.testing.assert_close(restored[0], maps.transpose(0, 1))
    assert torch.equal(seen, mask[:, :, None].expand_as(seen))  # type: ignore[index]


def test_colours_of_volumes_are_those_of_one_large_image():
    volumes = torch.rand(2, 1, 3, 8, 7)
    for view in (Brightness(0.1), Contrast(1.3), Gamma(0.7)):
        as_image = view(volumes.reshape(2, 1, 24, 7)).reshape(volumes.shape)
        torch.testing.assert_close(view(volumes), as_image)
        assert torch.equal(view.inverse(volumes), volumes)
    torch.testing.assert_close(Blur(0.7)(volumes)[:, :, 1], Blur(0.7)(volumes[:, :, 1]))


@given(views=st.lists(turns, min_size=1, max_size=4), size=sizes, depth=st.integers(0, 3))
def test_chains_of_whole_pixels_see_what_stays_in_the_image(views, size, depth):
    if depth:  # axes of volumes are one more
        views = [Flip([axis + 1 for axis in view.axes]) if isinstance(view, Flip) else view for view in views]
    shape = (1, 2, depth, *size) if depth else (1, 2, *size)
    view, images = Chain(views), torch.rand(shape) + 1
    augmented = view(images)
    restored, seen = invert_view(view, augmented, augmented, images)
    seen = torch.ones_like(images[:, :1], dtype=torch.bool) if seen is None else seen
    assert torch.equal(restored, torch.where(seen, images, 0))


@given(views=st.lists(moves, min_size=1, max_size=4), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=300)
def test_chains_see_no_position_that_padding_touched(views, size):
    """Ones stay ones but for the padding; the share of padding is at most 0.001, and rounding adds to it."""
    images = torch.ones(1, 1, *size, dtype=torch.float64)
    zero_padded = Chain([replace(view, padding="zeros") if hasattr(view, "padding") else view for view in views])
    for view, padded in ((Chain(views), Chain(views)), (Chain(views), zero_padded)):
        augmented = padded(images)
        restored, seen = invert_view(view, augmented, augmented, images)
        if seen is not None:
            error = (restored - images).abs()[seen]
            assert error.numel() == 0 or error.max() < 1.1e-3


@given(views=st.lists(moves, min_size=2, max_size=3), size=st.tuples(st.integers(50, 81), st.integers(50, 81)))
@settings(max_examples=60)
def test_chains_are_undone_on_smooth_images(views, size):
    view, images = Chain(views), smooth(*size)
    augmented = view(images)
    restored, seen = invert_view(view, augmented, augmented, images)
    error = (restored - images).abs() if seen is None else (restored - images).abs()[:, :, seen[0, 0]]
    assert error.numel() == 0 or error.mean() < 1e-3 * len(views)


def test_chains_with_views_of_ones_own_see_what_stays_in_the_image():
    images = torch.rand(1, 1, 9, 12) + 1
    turn = as_view(lambda batch: batch.rot90(1, (-2, -1)), "turn", inverse=lambda maps: maps.rot90(-1, (-2, -1)))
    light = as_view(lambda batch: batch.clamp(0, 1), "light", inverse=lambda maps: maps)
    for own in (turn, light):
        view = Chain([Shift(0.3, 0.0, "zeros"), own, Rotate(10.0, "zeros")])
        ours = Chain([Shift(0.3, 0.0, "zeros"), Rotate90(1) if own is turn else Identity(), Rotate(10.0, "zeros")])
        augmented = ours(images)
        expected, mask = invert_view(ours, augmented, augmented, images)
        restored, seen = invert_view(view, augmented, augmented, images)
        assert torch.equal(restored, expected)
        assert torch.equal(seen, mask)


def test_axes_of_length_one_are_seen_where_the_image_stays():
    row = torch.arange(1.0, 8.0).reshape(1, 1, 1, 7)
    for view, count in {Rotate(30.0): 1, Rotate(90.0): 1, Rotate(180.0): 7, Zoom(2.0): 3, Shift(0.3, 0.3): 5}.items():
        augmented = view(row)
        restored, seen = invert_view(view, augmented, augmented, row)
        assert int(seen.sum()) == count
        torch.testing.assert_close(restored[seen], row[seen])


def test_what_a_view_does_not_see():
    outputs = torch.zeros(1, 1, 8, 12)
    assert Zoom(0.8).seen(outputs)[..., 2:-2, 2:-2].all()  # type: ignore[index]  # the outermost mix with the padding
    seen = Zoom(2.0).seen(outputs)[0, 0]  # type: ignore[index]  # the middle half: 4 of 8 rows, 6 of 12 columns
    assert seen.sum() == 24
    assert seen[2:6, 3:9].all()
    seen = Crop("top_right", 0.5).seen(outputs)[0, 0]  # type: ignore[index]
    assert seen.sum() == 24
    assert seen[:4, 6:].all()
    corner = Rotate(45).seen(torch.zeros(1, 1, 21, 21))[0, 0]  # type: ignore[index]
    assert not corner[0, 0]
    assert corner[10, 2]
    there_and_back = Chain((Shift(0.25, 0.0), Shift(-0.25, 0.0)))
    assert there_and_back.seen(outputs)[0, 0, 0].tolist() == [True] * 9 + [False] * 3  # type: ignore[index]
    turned = Chain((Shift(0.25, 0.0), Rotate90(1)))  # outputs are 12 x 8 there
    assert turned.seen(torch.zeros(1, 1, 12, 8))[0, 0, 0].tolist() == [True] * 9 + [False] * 3  # type: ignore[index]
    assert Blur(0.5).seen(outputs) is Brightness(0.1).seen(outputs) is HorizontalFlip().seen(outputs) is None
    nan = torch.full((1, 1, 8, 12), torch.nan)
    assert Zoom(2.0).seen(nan).sum() == 24  # values do not matter


def test_views_that_do_not_move_anything_have_the_identity_inverse():
    outputs = torch.rand(3, 2, 6, 7)
    kinds = ("brightness", "contrast", "gamma", "blur")
    still = [view for view in standard_images() if view.name.split("(")[0] in kinds]
    assert len(still) == 7
    for view in [Identity(), GaussianNoise(0.1), FeatureDropout(0.5), *still]:
        assert torch.equal(view.inverse(outputs), outputs)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize(
    "view", [*EXACT[:8], Shift(0.3, -0.2), Rotate(20.0), Zoom(1.3), Crop("center", 0.7)], ids=lambda view: view.name
)
def test_outputs_at_a_stride_come_to_the_resolution_of_the_inputs(view, stride):
    images = smooth(64, 48)
    augmented = view(images)
    outputs = torch.nn.functional.avg_pool2d(augmented, stride)
    restored, seen = invert_view(view, outputs, augmented, images)
    assert restored.shape == images.shape
    inner = torch.zeros(1, 1, 64, 48, dtype=torch.bool)
    inner[..., 8:-8, 8:-8] = True
    inner = (inner if seen is None else inner & seen)[0, 0]
    assert (restored - images).abs()[:, :, inner].mean() < 0.02
    low = view.inverse(outputs)  # and at its own
    assert low.shape[2:] == (64 // stride, 48 // stride)


def test_other_resolutions_are_refused():
    images = torch.zeros(1, 1, 9, 8)
    for size in ((4, 4), (9, 4), (10, 8)):
        with pytest.raises(ValueError, match="rounded up: pad the inputs"):
            invert_view(Identity(), torch.zeros(1, 2, *size), images, images)


def test_views_without_an_inverse_are_refused_with_a_remedy():
    pool = np.zeros((2, 3, 4, 4))
    others = [Mixup(0.5, pool), CutMix(0.5, pool), Affine(np.eye(4)), as_view(torch.sort, name="sort")]
    for view in [*others, Chain((HorizontalFlip(), Mixup(0.5, pool)))]:
        with pytest.raises(ValueError, match="has no inverse, which maps need: leave it out") as caught:
            check_invertible([Identity(), view])
        assert view.name in str(caught.value)
        assert "\n" not in str(caught.value)
    given_one = as_view(lambda batch: batch.roll(1, -1), "roll", inverse=lambda outputs: outputs.roll(-1, -1))
    images = torch.rand(2, 1, 4, 5)
    restored, seen = invert_view(given_one, given_one(images), images, images)
    assert torch.equal(restored, images)
    assert seen.all()
    check_invertible([*five_crop(), *standard_images(), as_view(HorizontalFlip(), "mine")])


def test_a_wrong_inverse_is_named():
    turn = as_view(lambda batch: batch.rot90(1, (-2, -1)), "turn", inverse=lambda outputs: outputs)
    images = torch.rand(2, 1, 4, 5)
    with pytest.raises(ValueError, match=r"the inverse of view turn returned maps \(5, 4\) for inputs \(4, 5\)"):
        invert_view(turn, turn(images), turn(images), images)


def test_exchanged_classes():
    view = HorizontalFlip(swap_classes=((1, 2),))
    assert view.name == "hflip/swap(1,2)"
    outputs = torch.rand(2, 4, 3, 5)
    expected = outputs.flip(-1)[:, [0, 2, 1, 3]]
    assert torch.equal(view.inverse(outputs), expected)
    np.testing.assert_array_equal(view.inverse(outputs.numpy()), expected)
    rows = np.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(reorder_classes(view, rows), rows[:, [0, 2, 1, 3]])
    chain = Chain((view, VerticalFlip(swap_classes=((0, 1),))))  # undone from the end: 0 with 1, then 1 with 2
    np.testing.assert_array_equal(reorder_classes(chain, rows), rows[:, [1, 0, 2, 3]][:, [0, 2, 1, 3]])
    np.testing.assert_array_equal(chain.inverse(outputs), outputs.flip(-2)[:, [1, 0, 2, 3]].flip(-1)[:, [0, 2, 1, 3]])
    wrapped = Chain([as_view(lambda batch: batch, "same")], swap_classes=[(0, 3)])
    np.testing.assert_array_equal(reorder_classes(wrapped, rows), rows[:, [3, 1, 2, 0]])
    with pytest.raises(ValueError, match="swap_classes names class 2; there are 2 outputs"):
        view.inverse(outputs[:, :2])
    for bad in ((1, 2), ((1, 1),), ((0, 1), (1, 2)), ((-1, 0),), "ab", ()):
        with pytest.raises(ValueError, match="swap_classes must be pairs of different classes"):
            HorizontalFlip(swap_classes=bad)


def test_ttach_has_inverses_that_agree_with_ours():
    images = torch.rand(2, 3, 6, 8)
    transforms = [ttach.HorizontalFlip(), ttach.VerticalFlip(), ttach.Rotate90([0, 90, 180]), ttach.Multiply([1, 2])]
    for view in as_views(ttach.Compose(transforms)):
        factor = 2 if "Multiply" in view.name else 1
        augmented = view(images)
        restored, seen = invert_view(view, augmented, augmented, images)
        torch.testing.assert_close(restored, factor * images)
        assert seen is None  # all is seen
    ours = {"HorizontalFlip": HorizontalFlip(), "Rotate90(90)": Rotate90(1)}
    for view in as_views(ttach.Compose([ttach.HorizontalFlip(), ttach.Rotate90([0, 90])])):
        if view.name in ours:
            assert torch.equal(view.inverse(images), ours[view.name].inverse(images))  # type: ignore[attr-defined]
    crops = as_views(ttach.Compose([ttach.FiveCrops(4, 4)]))
    with pytest.raises(ValueError, match="has no inverse"):
        check_invertible(crops)


class Roll:
    """A view of one's own that draws how far it moves each row."""

    name, stochastic = "roll", True

    def __call__(self, batch, rng=None):
        return torch.stack([row.roll(int(n), -1) for row, n in zip(batch, rng.integers(4), strict=True)])

    def inverse(self, outputs, rng=None):
        return torch.stack([row.roll(-int(n), -1) for row, n in zip(outputs, rng.integers(4), strict=True)])


def test_a_view_of_ones_own_undoes_what_it_drew_under_any_name():
    images = torch.rand(6, 2, 4, 5)
    for view in (Roll(), as_view(Roll(), "again"), as_view(Roll(), inverse=Roll().inverse)):
        streams = [RowStreams(0, view.name, 0, range(6)) for _ in range(2)]
        augmented = view(images, streams[0])
        assert not torch.equal(augmented, images)
        assert torch.equal(invert_view(view, augmented, augmented, images, streams[1])[0], images)


def test_kornia_undoes_what_it_drew():
    images = smooth(40, 48).repeat(3, 1, 1, 1)
    rotation = kornia.augmentation.RandomRotation(30.0, p=1.0)
    for transform in (kornia.augmentation.RandomHorizontalFlip(p=0.5), rotation):
        view = as_view(transform)
        streams = [RowStreams(0, view.name, 0, range(3)) for _ in range(3)]
        augmented = view(images, streams[0])
        restored = view.inverse(augmented, streams[1])  # type: ignore[attr-defined]
        seen = view.seen(augmented, streams[2])  # type: ignore[attr-defined]
        assert seen.shape == (3, 1, 40, 48)
        both = invert_view(view, augmented, augmented, images, RowStreams(0, view.name, 0, range(3)))
        assert torch.equal(both[0], restored)
        assert torch.equal(both[1], seen)  # type: ignore[arg-type]
        assert seen.float().mean() > 0.6
        inner = (..., slice(3, -3), slice(3, -3))  # kornia pads with zeros, which mix at the border
        assert ((restored - images).abs() * seen)[inner].mean() < 1e-3
    assert not seen.all()


def test_monai_undoes_what_it_drew_and_agrees_with_ours():
    transforms = pytest.importorskip("monai.transforms")
    images = smooth(40, 48).repeat(3, 1, 1, 1)
    exact = {
        "flip": (transforms.Flip(1), HorizontalFlip()),
        "turn": (transforms.Rotate90(1), Rotate90(1)),
        "both": (
            transforms.Compose([transforms.Flip(0), transforms.Rotate90(1)]),
            Chain((VerticalFlip(), Rotate90(1))),
        ),
    }
    for name, (transform, ours) in exact.items():
        view = as_view(transform, name)
        assert not view.stochastic
        augmented = view(images)
        assert torch.equal(augmented, ours(images))
        restored, seen = invert_view(view, augmented, augmented, images)
        assert torch.equal(restored, images)
        assert seen.all()
        np.testing.assert_array_equal(view(images.numpy()), augmented)
    volumes = torch.rand(2, 1, 3, 4, 5)
    view = as_view(transforms.Flip((0, 2)), "volume")
    assert torch.equal(view.inverse(view(volumes)), volumes)  # type: ignore[attr-defined]
    drawn = transforms.RandAffine(1.0, rotate_range=0.4, padding_mode="border", cache_grid=False)
    random = transforms.Compose([transforms.RandFlip(0.5, spatial_axis=1), drawn])
    view = as_view(random, "random")
    assert view.stochastic
    streams = [RowStreams(0, view.name, 0, range(3)) for _ in range(3)]
    augmented = view(images, streams[0])
    assert not torch.allclose(augmented[0], augmented[1])
    restored, seen = view.inverse(augmented, streams[1]), view.seen(augmented, streams[2])  # type: ignore[attr-defined]
    assert 0.5 < seen.float().mean() < 1
    inner = (..., slice(3, -3), slice(3, -3))  # values of the padding mix at the border
    assert ((restored - images).abs() * seen)[inner].mean() < 1e-3
    check_invertible([view])
    with pytest.raises(ValueError, match="has no inverse"):
        check_invertible([as_view(transforms.RandGaussianNoise(1.0), "noise")])
    choice = as_view(transforms.OneOf([transforms.Flip(0), transforms.Flip(1)]), "one of two")
    assert choice.stochastic  # although neither part draws
    streams = [RowStreams(0, choice.name, 0, range(8)) for _ in range(2)]
    images = torch.rand(8, 1, 5, 6)
    augmented = choice(images, streams[0])
    assert {torch.equal(row, image.flip(1)) for row, image in zip(augmented, images, strict=True)} == {True, False}
    assert torch.equal(choice.inverse(augmented, streams[1]), images)  # type: ignore[attr-defined]
