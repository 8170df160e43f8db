# ruff: noqa: D100
# %% [markdown]
# # Keypoints: coordinates of two points
#
# A bright and a dim blot in noise, and a network that returns x, y, x, y; what it says of turned images is turned back.

# %%
import numpy as np
import torch
from torch import nn

from vbtta import TTAModule, collect_views, fit_policy
from vbtta.augment import HorizontalFlip, Identity, Rotate, Rotate90, Shift, keypoint_views


def draw(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, 24, 24) and the coordinates (N, 4) of two points."""
    rng, (y, x) = np.random.default_rng(seed), np.mgrid[:24, :24]
    points = rng.uniform(5, 18, size=(n, 2, 2))
    squares = (x - points[..., :1, None]) ** 2 + (y - points[..., 1:, None]) ** 2
    images = (np.exp(-squares / 4) * [[[2.0]], [[1.0]]]).sum(1) + 0.2 * rng.normal(size=(n, 24, 24))
    return torch.tensor(images[:, None]).float(), torch.tensor((points.reshape(n, 4) + 0.5) / 24).float()


# %%
torch.manual_seed(0)
layers = [nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)]
network, (images, points) = nn.Sequential(*layers), draw(1000, 0)
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
for rows in torch.arange(1000).repeat(20).split(50):
    optimizer.zero_grad()
    (network(images[rows]) - points[rows]).square().mean().backward()
    optimizer.step()
moves = [Identity(), HorizontalFlip(), Rotate90(1), Rotate90(2), Rotate90(3), Rotate(10.0), Shift(0.08, 0.0)]
views, (images, points) = keypoint_views(moves, (24, 24), coordinates="unit"), draw(200, 1)
policy = fit_policy(collect_views(network, images, views), points[:, None].numpy(), task="regression")
images, points = draw(300, 2)
error = [24 * (part(images) - points).abs().mean().item() for part in (network, TTAModule(network, views, policy))]
print(policy, f"pixels: network {error[0]:.2f}, views {error[1]:.2f}", sep="\n")
