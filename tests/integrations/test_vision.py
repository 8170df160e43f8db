"""torchvision's transforms, and networks of timm and segmentation_models_pytorch."""

import random

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.data.random_erasing import RandomErasing
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from vbtta import TTAModule, collect_dense, collect_views, fit_policy
from vbtta._support.random import RowStreams
from vbtta.augment import Chain, HorizontalFlip, Identity, as_view, as_views, flips

IMAGES = torch.rand(6, 3, 32, 40, generator=torch.Generator().manual_seed(0))
STOCHASTIC = [
    v2.RandomRotation(20),
    v2.RandomResizedCrop((32, 40), antialias=True),
    v2.RandomHorizontalFlip(),
    v2.RandomErasing(1.0),
    v2.ColorJitter(0.5, 0.5),
    v2.TrivialAugmentWide(),
    v2.GaussianNoise(),
    v2.Compose([v2.CenterCrop(24), v2.RandomAffine(10)]),
    v2.RandomOrder([v2.RandomInvert(), v2.RandomSolarize(0.5)]),
    v1.RandomChoice([v1.RandomInvert(1.0), v1.RandomVerticalFlip(1.0), v1.Grayscale(3)]),  # by Python's generator
    RandomErasing(1.0, mode="pixel", device="cpu"),  # timm's, likewise
]
DETERMINISTIC = [v2.Resize((16, 20)), v2.Compose([v2.CenterCrop(24), v2.Grayscale(3)]), v2.Normalize([0.5], [0.2])]


def streams(view, rows, seed=0, draw=0):
    return RowStreams(seed, view.name, draw, np.asarray(rows)) if view.stochastic else None


@pytest.mark.parametrize("transform", STOCHASTIC, ids=lambda part: f"{type(part).__module__}.{type(part).__name__}")
def test_draws_belong_to_seed_view_draw_and_row(transform):
    view = as_view(transform)
    assert view.stochastic
    state, words = torch.random.get_rng_state(), random.getstate()
    whole = view(IMAGES, streams(view, range(6)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert random.getstate() == words
    parts = torch.cat([view(IMAGES[3:], streams(view, range(3, 6))), view(IMAGES[:3], streams(view, range(3)))])
    torch.testing.assert_close(parts, whole[[3, 4, 5, 0, 1, 2]], rtol=0, atol=0)
    others = [view(IMAGES, streams(view, range(6), seed, draw)) for seed, draw in ((1, 0), (0, 1), (2, 0), (0, 2))]
    assert any(not torch.equal(other, whole) for other in others)


@pytest.mark.parametrize("transform", DETERMINISTIC, ids=lambda part: type(part).__name__)
def test_transforms_that_draw_nothing_take_the_whole_batch(transform):
    view = as_view(transform)
    assert not view.stochastic
    torch.testing.assert_close(view(IMAGES), transform(IMAGES))


def test_crops_are_views_of_their_own():
    views = as_views([Identity(), v2.TenCrop(24)])
    assert [view.name for view in views[1:3]] == ["crop(top_left)", "crop(top_right)"]
    assert [view.name for view in views[5:7]] == ["crop(center)", "mirrored crop(top_left)"]
    for view, crop in zip(views[1:], v2.TenCrop(24)(IMAGES), strict=True):
        torch.testing.assert_close(view(IMAGES), crop)
    assert len(as_views(v2.FiveCrop(24))) == 5
    with pytest.raises(TypeError, match="FiveCrop stands for several views; use as_views"):
        as_view(v2.FiveCrop(24))
    images = torch.rand(2, 3, 32, 32)
    crops = as_views(v2.Compose([v2.Resize(28), v2.TenCrop(24), v2.Normalize([0.5] * 3, [0.5] * 3)]))
    expected = v2.Normalize([0.5] * 3, [0.5] * 3)(v2.TenCrop(24)(v2.Resize(28)(images)))
    assert len(crops) == 10
    for view, crop in zip(crops, expected, strict=True):
        assert not view.stochastic
        torch.testing.assert_close(view(images), crop)
    jittered = as_views(v2.Compose([v2.FiveCrop(24), v2.ColorJitter(0.5)]))
    assert all(view.stochastic for view in jittered)


def classification(network, views, **options):
    predictions = collect_views(network, IMAGES.repeat(20, 1, 1, 1), views, **options)
    truth = predictions.outputs[:, 0].argmax(axis=1)
    truth[::5] = (truth[::5] + 1) % predictions.outputs.shape[2]
    return predictions, fit_policy(predictions, truth, task="classification", guard=False)


def test_a_network_of_timm_with_views_of_torchvision():
    network = timm.create_model("resnet10t", num_classes=4).eval()
    views = [
        Identity(),
        HorizontalFlip(),
        as_view(v2.RandomRotation(10), "rotation"),
        as_view(v2.ColorJitter(0.2), "jitter"),
        *as_views(v2.FiveCrop(24)),
    ]
    predictions, policy = classification(network, views, draws=2)
    assert predictions.names == tuple(view.name for view in views)
    module = TTAModule(network, views, policy, draws=2).eval()
    new = collect_views(network, IMAGES, views, draws=2)
    with torch.no_grad():
        np.testing.assert_allclose(module(IMAGES).numpy(), policy.predict(new).proba, atol=1e-5)
    np.testing.assert_allclose(new.outputs[:, 1], network(IMAGES.flip(-1)).detach().numpy(), atol=1e-5)


def test_the_preparation_of_timm_is_part_of_a_view():
    network = timm.create_model("test_vit", num_classes=3).eval()
    prepare = create_transform(**resolve_data_config(model=network), is_training=False)
    prepared = as_view(prepare, "identity")
    images = (255 * IMAGES).to(torch.uint8).float() / 255
    views = [prepared, Chain([HorizontalFlip(), prepared], name="hflip")]
    outputs = collect_views(network, images, views).outputs
    with torch.no_grad():
        np.testing.assert_allclose(outputs[:, 0], network(prepare(images)).numpy(), atol=1e-5)
        np.testing.assert_allclose(outputs[:, 1], network(prepare(images.flip(-1))).numpy(), atol=1e-5)


@pytest.mark.parametrize("architecture", ["Unet", "FPN", "DeepLabV3Plus", "Segformer"])
def test_networks_of_segmentation_models_pytorch(architecture):
    torch.manual_seed(0)
    network = getattr(smp, architecture)("resnet18", encoder_weights=None, classes=3).eval()
    images = torch.rand(4, 3, 64, 64)
    masks = torch.randint(0, 3, (4, 64, 64)).numpy()
    predictions, labels = collect_dense(network, images, flips(), masks, positions=50)
    policy = fit_policy(predictions, labels, task="classification", guard=False)
    module = TTAModule(network, flips(), policy).eval()
    with torch.no_grad():
        maps = module(images)
        mirrored = network(images.flip(-1)).flip(-1)
    assert maps.shape == (4, 3, 64, 64)
    torch.testing.assert_close(maps.sum(1), torch.ones(4, 64, 64))
    row, place = (int(part) for part in predictions.ids[7].split(":"))  # type: ignore[index]
    np.testing.assert_allclose(predictions.outputs[7, 1], mirrored[row].flatten(1)[:, place], atol=1e-4)
    np.testing.assert_allclose(maps[row].flatten(1)[:, place], policy.predict(predictions).proba[7], atol=1e-4)


def test_a_second_head_is_left_out_by_output():
    network = smp.Unet("resnet18", encoder_weights=None, classes=2, aux_params={"classes": 5}).eval()
    images, masks = torch.rand(2, 3, 32, 32), np.zeros((2, 32, 32), dtype=int)
    with pytest.raises(ValueError, match="output="):
        collect_dense(network, images, flips(), masks, positions=5)
    assert collect_dense(network, images, flips(), masks, positions=5, output=0)[0].outputs.shape[2] == 2
    assert collect_views(network, images, flips(), output=1).outputs.shape[2] == 5


def test_torchvisions_transforms_as_views_of_maps():
    mirror = as_view(v2.Lambda(v2.functional.horizontal_flip), "mirror", stochastic=False, inverse=torch.fliplr)
    assert not mirror.stochastic
    network = nn.Conv2d(3, 2, 3, padding=1)
    flip = as_view(v2.functional.horizontal_flip, "flip", inverse=v2.functional.horizontal_flip)
    masks = np.zeros((6, 32, 40), dtype=int)
    predictions, _ = collect_dense(network, IMAGES, [HorizontalFlip(), flip], masks, positions=30)
    np.testing.assert_allclose(predictions.outputs[:, 0], predictions.outputs[:, 1])
    with pytest.raises(ValueError, match="RandomRotation has no inverse"):
        collect_dense(network, IMAGES, [v2.RandomRotation(10)], masks)


@pytest.mark.parametrize(
    "transform",
    [v2.CenterCrop(10), v2.RandomCrop(10), as_views(v2.FiveCrop(10))[1], as_views(v2.FiveCrop(10))[4]],
    ids=["CenterCrop", "RandomCrop", "corner", "centre"],
)
def test_transforms_of_lists_and_arrays_are_those_of_tensors(transform):
    """v2 hands what is neither a tensor nor an image on as it is, without a word."""
    inputs = (255 * IMAGES).to(torch.uint8)
    pictures = [v2.functional.to_pil_image(image) for image in inputs]
    seen: dict[str, list[torch.Tensor]] = {}

    def kept(name, batch):
        seen.setdefault(name, []).extend(torch.as_tensor(v2.functional.to_image(row)) for row in batch)
        return np.zeros((len(batch), 1))

    state = torch.random.get_rng_state()
    collect_views(lambda batch: kept("tensor", batch), inputs, [transform], batch_size=4)
    collect_views(lambda batch: kept("list", batch), pictures, [transform], batch_size=4)
    collect_views(lambda batch: kept("array", [torch.as_tensor(row) for row in batch]), inputs.numpy(), [transform])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert seen["tensor"][0].shape == (3, 10, 10)
    for name in ("list", "array"):
        torch.testing.assert_close(torch.stack(seen[name]), torch.stack(seen["tensor"]))


def test_pictures_become_tensors_in_a_view():
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    pictures = [v2.functional.to_pil_image(image) for image in IMAGES]
    views = {"identity": v2.Compose(to_tensor), "turned": v2.Compose([v2.RandomRotation((90, 90)), *to_tensor])}
    network = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    outputs = collect_views(network, [picture.resize((32, 32)) for picture in pictures], views).outputs
    turned = outputs[:, 0].reshape(6, 3, 2, 2)[:, :, [[0, 1], [0, 1]], [[1, 1], [0, 0]]]
    np.testing.assert_allclose(outputs[:, 1], turned.reshape(6, 12), atol=1e-6)
