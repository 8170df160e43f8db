"""collect_dense: positions, labels, raters, weights, and what it refuses; weights of left and right organs."""

import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import kornia
import numpy as np
import pandas as pd
import pytest
import torch
import ttach
from torch import nn

from vbtta import TTAModule, collect_dense, collect_views, fit_policy
from vbtta.augment import (
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
    Rotate90,
    Shift,
    VerticalFlip,
    Zoom,
    as_view,
    as_views,
    d4,
    volume_flips,
)

VIEWS = [Identity(), HorizontalFlip(), Rotate90(1), Shift(0.25, 0.0), Zoom(1.25)]


def images_of(n=4, height=12, width=16, seed=0):
    return torch.rand(n, 2, height, width, generator=torch.Generator().manual_seed(seed))


def masks_of(images, classes=3):
    return (images[:, 0] * classes).long().numpy()


class Pointwise(nn.Module):
    """Equivariant by construction: three logits from the two channels of a pixel."""

    def __init__(self, stride=1):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv2d(2, 3, 1)
        self.stride = stride
        nn.init.normal_(self.mix.weight)

    def forward(self, images):
        return nn.functional.avg_pool2d(self.mix(images), self.stride) if self.stride > 1 else self.mix(images)


class Strided(nn.Module):
    """A network at a stride, its last position at the border."""

    def __init__(self, network, stride):
        super().__init__()
        self.network, self.stride = network, stride

    def forward(self, images):
        return nn.functional.avg_pool2d(self.network(images), self.stride, ceil_mode=True)


def places(predictions, size):
    image, position = zip(*(entry.split(":") for entry in predictions.ids), strict=True)
    return np.array(image, dtype=int), np.unravel_index(np.array(position, dtype=int), size)


def test_outputs_and_labels_are_those_of_the_positions():
    images, network = images_of(), Pointwise()
    masks = masks_of(images)
    predictions, labels = collect_dense(network, images, VIEWS, masks, positions=30, batch_size=3)
    assert predictions.outputs.shape == (4 * 30, 5, 3)
    image, (row, column) = places(predictions, (12, 16))
    np.testing.assert_array_equal(predictions.groups, image)
    assert column.max() < 12  # the shift moves the last quarter out of sight
    whole = network(images).detach().numpy()
    expected = whole[image, :, row, column]
    for k, view in enumerate(VIEWS[:4]):  # an equivariant network says the same under flips, turns and shifts
        np.testing.assert_allclose(predictions.outputs[:, k], expected, atol=1e-6, err_msg=view.name)
    np.testing.assert_array_equal(labels.value, masks[image, row, column])
    np.testing.assert_array_equal(labels.instance, np.arange(120))
    assert labels.annotator is labels.instance_weights is None
    assert len(set(predictions.ids)) == 120
    for size in (1, 4):
        again, _ = collect_dense(network, images, VIEWS, masks, positions=30, batch_size=size)
        np.testing.assert_allclose(again.outputs, predictions.outputs, atol=1e-6)
        np.testing.assert_array_equal(again.ids, predictions.ids)
    again, _ = collect_dense(network, images, VIEWS, masks, positions=30, seed=1)
    assert set(again.ids) != set(predictions.ids)


def test_inputs_as_arrays_loaders_and_lists_agree():
    images, network = images_of(), Pointwise()
    masks = masks_of(images)
    expected, _ = collect_dense(network, images, VIEWS, masks, positions=9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, torch.tensor(masks)), batch_size=3)
    for inputs in (images.numpy(), loader, list(images), iter([images[:1], images[1:]])):
        predictions, _ = collect_dense(network, inputs, VIEWS, masks, positions=9)
        np.testing.assert_allclose(predictions.outputs, expected.outputs, atol=1e-6)
        np.testing.assert_array_equal(predictions.ids, expected.ids)
    weight, bias = (value.detach().numpy() for value in (network.mix.weight, network.mix.bias))

    def function(batch):
        return np.einsum("oc,nchw->nohw", weight[:, :, 0, 0], batch) + bias[:, None, None]

    predictions, _ = collect_dense(function, images.numpy(), VIEWS, masks, positions=9)
    np.testing.assert_allclose(predictions.outputs, expected.outputs, atol=1e-5)


def test_images_of_different_sizes():
    parts = [images_of(1, *size, seed=seed)[0] for seed, size in enumerate([(8, 8), (12, 16), (16, 8)])]
    masks = [masks_of(part[None])[0] for part in parts]
    predictions, labels = collect_dense(Pointwise(), parts, d4(), masks, positions=10, ids=["a", "b", "c"])
    assert list(predictions.groups) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    for entry, value, outputs in zip(predictions.ids, labels.value, predictions.outputs, strict=True):
        name, position = entry.split(":")
        k = "abc".index(name)
        assert value == masks[k].flat[int(position)]
        np.testing.assert_allclose(outputs, outputs[:1].repeat(8, 0), atol=1e-6)


def test_maps_at_a_stride_of_three():
    images, network = images_of(4, 9, 12), Pointwise(3)
    masks = masks_of(images)
    predictions, _ = collect_dense(network, images, [Identity(), HorizontalFlip()], masks, positions=108)
    whole = nn.functional.interpolate(network(images), size=(9, 12), mode="bilinear", align_corners=False)
    np.testing.assert_allclose(
        predictions.outputs[:, 0].reshape(4, 9, 12, 3), whole.detach().permute(0, 2, 3, 1), atol=1e-5
    )


@pytest.mark.parametrize(("size", "stride"), [((30, 30), 8), ((100, 100), 16), ((13, 18), 4)])
def test_a_stride_that_was_rounded_down_is_not_taken_for_another(size, stride):
    images, masks = torch.rand(2, 2, *size), np.zeros((2, *size), dtype=int)
    with pytest.raises(ValueError, match="rounded up: pad the inputs"):
        collect_dense(Pointwise(stride), images, [Identity(), HorizontalFlip()], masks)


@pytest.mark.parametrize("stride", [2, 4])
def test_outputs_at_a_stride_are_compared_at_the_resolution_of_the_targets(stride):
    images, network = images_of(3, 16, 24), Pointwise(stride)
    predictions, _ = collect_dense(network, images, d4(), masks_of(images), positions=50)
    image, (row, column) = places(predictions, (16, 24))
    upsampled = nn.functional.interpolate(network(images), size=(16, 24), mode="bilinear").detach().numpy()
    for k in range(8):
        np.testing.assert_allclose(predictions.outputs[:, k], upsampled[image, :, row, column], atol=1e-5)


@pytest.mark.parametrize(("stride", "size"), [(2, (13, 17)), (4, (13, 18)), (4, (5, 30))])
def test_strides_that_do_not_divide_the_size(stride, size):
    images, network, views = images_of(3, *size), Strided(Pointwise(), stride), [Identity(), HorizontalFlip()]
    predictions, labels = collect_dense(network, images, views, masks_of(images), positions=40)
    image, (row, column) = places(predictions, size)
    coarse = network(images).detach()
    whole = [stride * length for length in coarse.shape[2:]]
    upsampled = nn.functional.interpolate(coarse, size=whole, mode="bilinear").numpy()
    np.testing.assert_allclose(predictions.outputs[:, 0], upsampled[image, :, row, column], atol=1e-5)
    policy = fit_policy(predictions, labels, task="classification", guard=False, model="mixture")
    maps = TTAModule(network, views, policy)(images).detach().numpy()
    np.testing.assert_allclose(maps[image, :, row, column], policy.predict(predictions).proba, atol=1e-5)


class Segmenter(nn.Module):
    """As transformers' networks: a dict by name in, a record with logits at a stride out."""

    def __init__(self):
        super().__init__()
        self.inner = Strided(Pointwise(), 4)

    def forward(self, pixel_values, size):
        return SimpleNamespace(logits=self.inner(pixel_values) * size[:, :1, None, None])


@pytest.mark.parametrize("key", [None, "pixel_values"])
def test_parts_of_dicts_are_mapped(key):
    """The views work on one part, and maps are undone in its geometry, in collect_dense and in the module."""
    images = images_of(4, 13, 18)
    size = torch.full((4, 1), 2) if key is None else torch.full((4, 1), 2.0)
    inputs, views = {"pixel_values": images, "size": size}, [Identity(), HorizontalFlip(), Rotate90(1), Zoom(1.25)]
    expected, _ = collect_dense(Strided(Pointwise(), 4), images, views, masks_of(images), positions=30)
    rows = [{name: part[row] for name, part in inputs.items()} for row in range(4)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=3)
    for source in (inputs, loader, rows):
        predictions, labels = collect_dense(Segmenter(), source, views, masks_of(images), positions=30, key=key)
        np.testing.assert_allclose(predictions.outputs, 2 * expected.outputs, atol=1e-5)
    policy = fit_policy(predictions, labels, task="classification", guard=False, model="mixture")
    maps = TTAModule(Segmenter(), views, policy, key=key)(**inputs).detach().numpy()
    image, (row, column) = places(predictions, (13, 18))
    np.testing.assert_allclose(maps[image, :, row, column], policy.predict(predictions).proba, atol=1e-5)
    details = TTAModule(Segmenter(), views, policy, key=key).maps(inputs)
    np.testing.assert_allclose(details.probability, maps, atol=1e-5)
    with pytest.raises(ValueError, match="key='image' is not among the parts of the batch: 'pixel_values', 'size'"):
        collect_dense(Segmenter(), inputs, views, masks_of(images), key="image")


def test_volumes():
    volumes = torch.rand(2, 1, 4, 5, 6)
    targets = (volumes[:, 0] > 0.5).long().numpy()
    predictions, labels = collect_dense(
        lambda batch: torch.cat([0 * batch, batch - 0.5], 1), volumes, volume_flips(), targets, positions=40
    )
    assert predictions.outputs.shape == (80, 8, 2)
    np.testing.assert_array_equal(predictions.outputs, predictions.outputs[:, :1].repeat(8, 1))
    np.testing.assert_array_equal(predictions.outputs[:, 0].argmax(1), labels.value)


def test_regression_with_gaps():
    images = images_of()
    depth = images[:, 0].double().numpy() + 0.01 * np.random.default_rng(0).normal(size=(4, 12, 16))
    depth[:, :6] = np.nan
    depth[2] = np.nan
    predictions, labels = collect_dense(lambda batch: batch[:, :1], images, VIEWS[:3], depth, positions=1000)
    image, (row, column) = places(predictions, (12, 16))
    assert len(predictions) == 3 * 6 * 16  # all there are
    assert set(image) == {0, 1, 3}
    np.testing.assert_array_equal(labels.value, depth[image, row, column])
    policy = fit_policy(predictions, labels, task="regression")
    np.testing.assert_allclose(policy.predict(predictions).mean[:, 0], labels.value, atol=0.05)


def test_draws_of_random_views_do_not_depend_on_batches():
    images, masks = images_of(), masks_of(images_of())
    views = [Identity(), GaussianNoise(0.1)]
    first, second = (
        collect_dense(Pointwise(), images, views, masks, positions=7, draws=3, batch_size=size)[0] for size in (1, 4)
    )
    np.testing.assert_allclose(first.outputs, second.outputs, atol=1e-6)
    np.testing.assert_allclose(first.variance, second.variance, atol=1e-6)
    assert (first.variance[:, 1] > 0).all()  # type: ignore[index]
    assert (first.variance[:, 0] == 0).all()  # type: ignore[index]


def test_transforms_of_other_libraries_are_undone():
    images, network = images_of(), Pointwise()
    mirror = as_view(kornia.augmentation.RandomHorizontalFlip(p=0.5), "mirror")
    turn = as_view(kornia.augmentation.RandomRotation(30.0, p=1.0), "turn")
    others = as_views(ttach.Compose([ttach.HorizontalFlip(), ttach.Rotate90([0, 90])]))
    views = [*others, mirror, turn]
    predictions, _ = collect_dense(network, images, views, masks_of(images), positions=1000, draws=2, batch_size=3)
    assert 0 < len(predictions) < 4 * 12 * 16  # corners are not seen
    image, (row, column) = places(predictions, (12, 16))
    expected = network(images).detach().numpy()[image, :, row, column]
    for k in range(5):
        np.testing.assert_allclose(predictions.outputs[:, k], expected, atol=1e-5, err_msg=predictions.names[k])
    policy = fit_policy(
        predictions.select(["identity", "mirror"]), expected.argmax(1), task="classification", guard=False
    )
    with torch.no_grad():
        result = TTAModule(network, views, policy)(images)
    assert result.shape == (4, 3, 12, 16)


def test_several_raters_with_gaps_and_names():
    images = images_of(3)
    masks = np.stack([masks_of(images), np.full((3, 12, 16), 2), masks_of(images)], axis=1)
    masks[0, 1] = 255
    masks[1, :2, :, :8] = 255
    predictions, labels = collect_dense(Pointwise(), images, d4(), masks, positions=25, ignore=255)
    assert labels.annotator_names == ("rater_0", "rater_1", "rater_2")
    image, (row, column) = places(predictions, (12, 16))
    for j, instance in enumerate(labels.instance):
        assert labels.value[j] == masks[image[instance], labels.annotator[j], row[instance], column[instance]]  # type: ignore[index]
    assert (labels.value != 255).all()
    assert labels.total == (masks[image, :, row, column] != 255).sum()
    _, named = collect_dense(Pointwise(), images, d4(), masks, positions=25, ignore=[255], raters=["ann", "bob", "cy"])
    assert named.annotator_names == ("ann", "bob", "cy")


def test_raters_that_differ_from_image_to_image():
    images = images_of(3)
    single = masks_of(images)
    maps = [np.stack([single[0]] * 2), np.stack([single[1]] * 4), single[2]]
    _, labels = collect_dense(Pointwise(), images, d4(), maps, positions=5)
    assert labels.annotator is None
    np.testing.assert_array_equal(labels.labels_per_instance, np.repeat([2, 4, 1], 5))
    _, labels = collect_dense(
        Pointwise(), images, d4(), maps, positions=5, raters=[("ann", "bob"), ("bob", "cy", "di", "ed"), ("ann",)]
    )
    assert labels.annotator_names == ("ann", "bob", "cy", "di", "ed")
    assert labels.annotator[-1] == 0  # type: ignore[index]
    with pytest.raises(ValueError, match=r"raters names 2 raters for targets\[1\], which has 4"):
        collect_dense(Pointwise(), images, d4(), maps, raters=["ann", "bob"])


def test_stratified_positions_are_weighted_back():
    images = torch.rand(5, 2, 40, 40)
    masks = np.zeros((5, 40, 40), dtype=np.uint8)
    masks[:, :4, :10] = 1  # 40 of 1600 pixels
    masks[1:, 20:22, :4] = 2  # 8 of them
    _, labels = collect_dense(Pointwise(), images, [Identity()], masks, positions=60, stratify=True)
    counts = [np.bincount(labels.value[labels.instance // 60 == i], minlength=3).tolist() for i in range(5)]
    assert counts == [[30, 30, 0]] + [[26, 26, 8]] * 4
    weight = labels.instance_weights
    for i in range(5):
        inside = labels.instance // 60 == i
        shares = np.bincount(labels.value[inside], weights=weight[inside], minlength=3) / 60  # type: ignore[index]
        np.testing.assert_allclose(shares, np.bincount(masks[i].ravel(), minlength=3) / 1600, atol=1e-12)


def test_memory_does_not_grow_with_the_views():
    images = np.zeros((60, 1, 32, 32), dtype=np.float32)
    masks = np.zeros((60, 32, 32), dtype=np.uint8)
    views = [as_view(np.negative, f"minus {k}", inverse=np.copy) for k in range(12)]
    maps: list[weakref.ref] = []
    alive = []

    def network(batch):
        alive.append(sum(entry() is not None for entry in maps))
        outputs = np.concatenate([batch, batch, batch], axis=1)
        maps.append(weakref.ref(outputs))
        return outputs

    tracemalloc.start()
    predictions, _ = collect_dense(network, images, views, masks, positions=50, batch_size=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(alive) == 30 * 12
    assert max(alive) <= 1
    batch = 2 * 3 * 32 * 32 * 4
    assert peak < 1.5 * predictions.outputs.nbytes + 20 * batch
    assert peak < 0.5 * 60 * 12 * 3 * 32 * 32 * 4  # all maps


class Organs(nn.Module):
    """Tells left from right by the column, as networks trained on one orientation do, and errs by position."""

    def __init__(self, size=24):
        super().__init__()
        self.error = nn.Parameter(2.5 * torch.randn(3, size, size, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        side = torch.linspace(-1, 1, images.shape[-1]).expand_as(images)
        organ = 6 * (images - 0.5)
        return torch.cat([-organ, organ - 6 * side, organ + 6 * side], 1) + self.error


def organs(n=12, size=24):
    rng = np.random.default_rng(0)
    masks = np.zeros((n, size, size), dtype=int)
    for mask in masks:
        for label, left in ((1, 2), (2, 14)):
            top, start = rng.integers(2, 12, size=1).item(), left + rng.integers(0, 3, size=1).item()
            mask[top : top + 8, start : start + 6] = label
    noise = 0.45 * rng.normal(size=(n, 1, size, size))
    return torch.tensor((masks > 0)[:, None] + noise, dtype=torch.float32), masks


def test_mirrored_organs_need_exchanged_classes():
    images, masks = organs()
    weights, scores = [], []
    for swap in (None, ((1, 2),)):
        views = [Identity(), HorizontalFlip(name="mirror", swap_classes=swap)]
        predictions, labels = collect_dense(Organs(), images, views, masks, stratify=True)
        policy = fit_policy(predictions, labels, task="classification", model="mixture")
        weights.append(policy.weights[1])
        scores.append(policy.score(predictions, labels).sum())
    assert weights[0] < 0.05
    assert 0.3 < weights[1] < 0.7
    assert scores[1] > scores[0]


def test_exchanged_classes_of_rows():
    inputs = torch.rand(20, 3)
    network = nn.Linear(3, 3)
    views = [Identity(), as_view(torch.neg, "minus"), Identity(name="swapped", swap_classes=((0, 2),))]
    outputs = collect_views(network, inputs, views).outputs
    np.testing.assert_array_equal(outputs[:, 2], outputs[:, 0][:, [2, 1, 0]])
    noisy = GaussianNoise(0.1, swap_classes=((0, 1),), name="noise")
    plain = GaussianNoise(0.1, name="noise")
    for options in ({"draws": 4}, {"draws": 4, "variance": "delta"}):
        swapped, kept = (collect_views(network, inputs, [view], **options) for view in (noisy, plain))
        np.testing.assert_array_equal(swapped.variance, kept.variance[:, :, [1, 0, 2]])  # type: ignore[index]
        np.testing.assert_array_equal(swapped.outputs, kept.outputs[:, :, [1, 0, 2]])


def nan_inside(batch):
    maps = torch.cat([batch, batch[:, :1]], 1)
    maps[1] = torch.nan
    return maps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.zeros((4, 12, 15), int)}, r"targets\[0\] has shape \(12, 15\) for inputs \(12, 16\)"),
        ({"targets": np.zeros((3, 12, 16), int)}, "there are 4 inputs and 3 targets"),
        ({"inputs": iter([images_of(), images_of()])}, "more inputs than the 4 targets"),
        ({"inputs": iter([images_of()[:2]])}, "there are 2 inputs and 4 targets"),
        (
            {"targets": np.where(np.arange(4 * 12 * 16).reshape(4, 12, 16) == 700, 7, 0), "positions": 1},
            r"targets\[3\]: label 7 is outside 0..2",  # one pixel, which need not be among those drawn
        ),
        ({"targets": np.full((4, 12, 16), 7)}, r"targets\[0\]: label 7 is outside 0..2; .* left out by ignore="),
        ({"targets": np.full((4, 12, 16), 255), "ignore": 255}, "no position of the targets is labelled"),
        ({"views": [Identity(), Mixup(0.5, np.zeros((2, 2, 12, 16)))]}, r"view mixup\(0.5\) has no inverse"),
        ({"views": [Shift(0.9, 0.0), Shift(-0.9, 0.0)]}, "is seen by all views; leave out some of"),
        ({"predictor": nan_inside}, "returned nan for input 1 under view identity"),
        ({"predictor": lambda batch: batch.flatten(1)}, "no maps; use collect_views for rows"),
        ({"predictor": lambda batch: batch[:, :, 1:]}, "rounded up: pad the inputs to a multiple of that"),
        ({"predictor": lambda batch: batch[:, :1]}, "give targets.astype.float. for a regression, or two logits"),
        ({"inputs": torch.zeros(4, 12, 16)}, r"inputs must be \(N, channels, H, W\)"),
        ({"targets": [np.full((12, 16), "a")] * 4}, r"targets\[0\] must be numbers"),
        ({"targets": 3}, "targets must be maps"),
        ({"ids": ["a", "b"]}, "ids must be 4, one a target"),
        ({"positions": 0}, "positions must be a whole number of at least 1"),
        ({"raters": [["a"], ["b"]]}, "a list for each of 4 inputs; got 2"),
        (
            {"targets": np.full((4, 12, 16), 7), "ids": list("abcd")},
            r"targets\[0\] \(a\): label 7 is outside 0..2; labels other than 0..2 need classes=",
        ),
        (
            {"targets": np.eye(3, dtype=int)[np.zeros((4, 12, 16), int)].transpose(0, 3, 1, 2)},
            r"one-hot: give .*argmax",
        ),
        ({"ids": pd.Series(list("abcd"), index=[3, 2, 1, 0])}, r"but the inputs have no ids; .*ids\.to_numpy"),
        ({"targets": np.full((4, 12, 16), 0.5)}, r"not class numbers; a regression takes one map, output="),
    ],
)
def test_bad_input_is_refused_in_one_line(change, message):
    images = images_of()
    arguments = {"predictor": Pointwise(), "inputs": images, "views": VIEWS, "targets": masks_of(images)} | change
    with pytest.raises(ValueError, match=message) as caught:
        collect_dense(
            arguments.pop("predictor"), *(arguments.pop(key) for key in ("inputs", "views", "targets")), **arguments
        )
    assert "\n" not in str(caught.value)


def test_rows_are_told_to_use_the_other_function():
    with pytest.raises(ValueError, match=r"the model returns maps, of shape \(4, 3, 12, 16\): use collect_dense"):
        collect_views(Pointwise(), images_of(), [Identity(), VerticalFlip()])
