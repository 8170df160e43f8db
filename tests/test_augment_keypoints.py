"""Coordinates of points under views, and back."""

import numpy as np
import pytest
import torch
from torch import nn

from vbtta import TTAModule, collect_dense, collect_views, fit_policy
from vbtta.augment import (
    Blur,
    Chain,
    Crop,
    Flip,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Keypoints,
    Rotate,
    Rotate90,
    Shift,
    VerticalFlip,
    Zoom,
    as_view,
    keypoint_views,
    load_views,
    save_views,
)

HEIGHT, WIDTH = 48, 64
VIEWS = [
    Identity(),
    HorizontalFlip(),
    VerticalFlip(),
    Flip([0]),
    Flip([1]),
    Flip([0, 1]),
    Rotate90(1),
    Rotate90(2),
    Rotate90(3),
    Rotate(20.0, padding="zeros"),
    Rotate(-35.0, padding="zeros"),
    Zoom(1.3, padding="zeros"),
    Zoom(0.7, padding="zeros"),
    Shift(0.1, -0.05, padding="zeros"),
    Crop("top_left", 0.8),
    Crop("bottom_right", 0.8),
    Blur(1.0),
    Chain([Rotate90(1), HorizontalFlip(), Shift(0.1, 0.0, padding="zeros"), Rotate(10.0, padding="zeros")]),
    Chain([HorizontalFlip(), Rotate90(3)]),
]


def blobs(points):
    """Images (N, 1, H, W) with a blot at every point (N, P, 2)."""
    y, x = torch.meshgrid(torch.arange(HEIGHT).double(), torch.arange(WIDTH).double(), indexing="ij")
    squares = (x - points[..., :1, None]) ** 2 + (y - points[..., 1:, None]) ** 2
    return torch.exp(-squares / 8).sum(1, keepdim=True)


def centroid(images):
    """Centres (N, 1, 2) of the brightness."""
    shares = images[:, 0] / images[:, 0].sum((1, 2), keepdim=True)
    x = (shares.sum(1) * torch.arange(images.shape[3])).sum(1)
    y = (shares.sum(2) * torch.arange(images.shape[2])).sum(1)
    return torch.stack([x, y], dim=1)[:, None]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_points_go_where_pixels_go(view):
    points = torch.tensor([[[26.0, 20.0]], [[36.5, 27.25]]], dtype=torch.float64)
    moved_points = centroid(view(blobs(points)))
    torch.testing.assert_close(view.inverse_points(moved_points, (HEIGHT, WIDTH)), points, atol=0.05, rtol=0)
    as_array = view.inverse_points(moved_points.numpy(), (HEIGHT, WIDTH))
    np.testing.assert_allclose(as_array, view.inverse_points(moved_points, (HEIGHT, WIDTH)), atol=1e-9)


def test_only_views_that_mirror_exchange_left_and_right():
    names = {view.name for view in keypoint_views(VIEWS[:13], (HEIGHT, WIDTH), swap=[(0, 1)])}
    assert names == {
        "identity", "hflip/swap(0,1)", "vflip/swap(0,1)", "flip(0)/swap(0,1)", "flip(1)/swap(0,1)", "flip(0,1)",
        "rotate90(+90)", "rotate90(+180)", "rotate90(+270)", "rotate(+20,zeros)", "rotate(-35,zeros)",
        "zoom(1.3,zeros)", "zoom(0.7,zeros)",
    }  # fmt: skip


class Hands(nn.Module):
    """Coordinates of the left and of the right blot: x, y, x, y."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def forward(self, images):
        half = images.shape[3] // 2
        columns = torch.arange(images.shape[3])
        points = [centroid(images * part) for part in (columns < half, columns >= half)]
        rows = torch.cat(points, dim=1)
        if self.unit:
            rows = (rows + 0.5) / torch.tensor([images.shape[3], images.shape[2]])
        return rows.flatten(1)


@pytest.mark.parametrize("coordinates", ["pixel", "unit"])
def test_coordinates_are_a_regression_with_views(coordinates, rng):
    points = torch.tensor(rng.uniform([[14, 14], [40, 14]], [[22, 34], [50, 34]], size=(60, 2, 2)))
    images, network = blobs(points), Hands(coordinates == "unit").eval()
    plain = [Identity(), HorizontalFlip(), VerticalFlip(), Shift(0.05, 0.1, padding="zeros"), GaussianNoise(1e-6)]
    points = (points + 0.5) / torch.tensor([WIDTH, HEIGHT]) if coordinates == "unit" else points
    truth = points.flatten(1).numpy()
    # a vertical flip of two hands side by side leaves left left: only the horizontal one exchanges them
    views = keypoint_views(plain, (HEIGHT, WIDTH), coordinates=coordinates)
    views[1] = Keypoints([HorizontalFlip()], (HEIGHT, WIDTH), coordinates, swap_classes=[(0, 1)])
    predictions = collect_views(network, images, views)
    scale = 64 if coordinates == "unit" else 1
    np.testing.assert_allclose(scale * predictions.outputs, scale * np.repeat(truth[:, None], 5, axis=1), atol=0.1)
    wrong = keypoint_views(plain, (HEIGHT, WIDTH), swap=[(0, 1)], coordinates=coordinates)
    far = collect_views(network, images, wrong).outputs[:, 2] - truth
    assert scale * np.abs(far).min(axis=0)[0] > 10
    noisy = truth + 0.5 / scale * rng.normal(size=truth.shape)
    policy = fit_policy(predictions, noisy[:, None], task="regression", guard=False)
    module = TTAModule(network, views, policy).eval()
    with torch.no_grad():
        np.testing.assert_allclose(module(images).numpy(), policy.predict(predictions).mean, atol=1e-6)


def test_heat_maps_are_maps_whose_classes_are_points(rng):
    """A channel for every point and one for none of them; a mirror exchanges the channels of left and right."""
    points = torch.tensor(rng.uniform([[14, 14], [40, 14]], [[22, 34], [50, 34]], size=(12, 2, 2)))
    images = blobs(points)

    def network(batch):
        left = torch.arange(batch.shape[3]) < batch.shape[3] // 2
        return torch.cat([0 * batch + 0.5, batch * left, batch * ~left], dim=1) * 8

    near = torch.stack([blobs(points[:, [p]])[:, 0] > 0.5 for p in range(2)])
    masks = (near[0] + 2 * near[1].int()).numpy()
    views = [Identity(), HorizontalFlip(), HorizontalFlip(swap_classes=[(1, 2)])]
    predictions, labels = collect_dense(network, images, views, masks, positions=100, stratify=True)
    np.testing.assert_allclose(predictions.outputs[:, 0], predictions.outputs[:, 2])
    policy = fit_policy(predictions, labels, task="classification", guard=False)
    assert policy.weights[1] < 0.1
    maps = TTAModule(as_module(network), views, policy).eval()(images)
    centroids = torch.cat([centroid(maps[:, [c]] * (maps[:, [c]] > 0.5)) for c in (1, 2)], dim=1)
    torch.testing.assert_close(centroids, points, atol=0.3, rtol=0)


def as_module(function):
    module = nn.Module()
    module.forward = function
    return module


def test_files_and_errors(tmp_path):
    views = keypoint_views([Identity(), HorizontalFlip()], (8, 10), swap=[(0, 1)], coordinates="unit")
    save_views(views, tmp_path / "views.toml")
    assert load_views(tmp_path / "views.toml") == views
    assert Keypoints([Identity()], (np.int64(8), np.int64(10))).size == (8, 10)
    with pytest.raises(ValueError, match=r"size must be height and width of the images, as \(256, 192\); got 8"):
        Keypoints([Identity()], 8)
    with pytest.raises(ValueError, match="sort is not built in and cannot move points back"):
        keypoint_views([as_view(np.sort, "sort")], (8, 10))
    with pytest.raises(ValueError, match="double is not built in and cannot move points back"):
        keypoint_views([as_view(np.square, "double", inverse=np.sqrt)], (8, 10))
    with pytest.raises(
        ValueError, match=r"hflip moves points of images \(8, 10\); got images \(2, 3, 10, 8\): set size="
    ):
        collect_views(
            lambda batch: batch[:, 0, 0], np.zeros((2, 3, 10, 8)), keypoint_views([HorizontalFlip()], (8, 10))
        )
    with pytest.raises(ValueError, match="mirrors axis 2 of volumes"):
        keypoint_views([Flip([2])], (8, 10))
    with pytest.raises(ValueError, match=r"keypoints are rows x, y, x, y, \.\.\.; got 3 outputs"):
        views[0].restore_rows(np.zeros((2, 3)))  # type: ignore[attr-defined]
    noise = keypoint_views([GaussianNoise(0.1)], (8, 10))
    with pytest.raises(ValueError, match="knows nothing of keypoints"):
        collect_views(nn.Sequential(nn.Flatten(), nn.Linear(80, 2)), torch.rand(2, 1, 8, 10), noise, variance="delta")
