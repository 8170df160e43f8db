# ruff: noqa: D100
# %% [markdown]
# # Segmentation: which views of a map to trust, and by how much
#
# Two synthetic organs, a left and a right one, in noisy images. A small U-Net that saw one orientation only, so that
# a mirrored image needs its classes exchanged. The policy is fitted to 100 positions of 40 images.

# %%
import numpy as np
import torch
from torch import nn

from vbtta import TTAModule, collect_dense, fit_policy, metrics
from vbtta.augment import Blur, HorizontalFlip, Identity, Rotate, Rotate90, Shift, VerticalFlip, Zoom

# %% [markdown]
# ## Images and a network


# %%
def draw_images(n: int, seed: int, size: int = 32) -> tuple[torch.Tensor, np.ndarray]:
    """Images (N, 1, H, W) and masks (N, H, W): 0 background, 1 the left organ, 2 the right one."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:size, :size]
    masks = np.zeros((n, size, size), dtype=np.int64)
    for mask in masks:
        for organ, centre in ((1, 0.28), (2, 0.72)):
            y, x = size * (np.array([0.5, centre]) + rng.normal(size=2) * [0.12, 0.03])
            height, width = size * rng.uniform([0.14, 0.08], [0.26, 0.16])
            mask[((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 1] = organ
    brightness = rng.uniform(0.4, 0.9, size=(n, 1, 1)) * (masks > 0)
    images = brightness + 0.45 * rng.normal(size=masks.shape)
    return torch.tensor(images[:, None], dtype=torch.float32), masks


class UNet(nn.Module):
    """One level of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(
            nn.MaxPool2d(4), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=4)
        )
        self.end = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, 3, H, W); two channels say where a pixel is."""
        side = torch.linspace(-1, 1, images.shape[-1]).expand_as(images)
        down = torch.linspace(-1, 1, images.shape[-2])[:, None].expand_as(images)
        top = self.top(torch.cat([images, side, down], 1))
        return self.end(torch.cat([top, self.low(top)], 1))


torch.manual_seed(0)
torch.set_num_threads(1)
images, masks = draw_images(60, seed=0)
network = UNet()
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
for _ in range(150):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images), torch.tensor(masks)).backward()
    optimizer.step()

# %% [markdown]
# ## A policy
#
# `collect_dense` undoes every view before it compares with the masks. The mirror is there twice: as it is, and with
# left and right exchanged.

# %%
calibration, truth = draw_images(40, seed=1)
moved = [Shift(0.06, 0.0), Shift(0.0, 0.06), Rotate(8.0), Rotate(-8.0), Zoom(1.1), Blur(0.7)]
mirror = HorizontalFlip(swap_classes=((1, 2),))
views = [Identity(), HorizontalFlip(), mirror, VerticalFlip(), Rotate90(1), *moved]
predictions, labels = collect_dense(network, calibration, views, truth, positions=100, stratify=True)
policy = fit_policy(predictions, labels, task="classification")
print(predictions)
print(policy)
weight = dict(zip(policy.names, policy.weights, strict=True))
print(f"mirror {weight['hflip']:.2f}, with left and right exchanged {weight[mirror.name]:.2f}")

# %% [markdown]
# ## New images
#
# The module returns maps of probabilities. Scores are means over images.

# %%
test, test_masks = draw_images(60, seed=2)
module = TTAModule(network, views, policy).eval()
with torch.no_grad():
    turned = [Identity(), mirror, VerticalFlip(), Rotate90(1)]
    uniform = torch.stack([view.inverse(network(view(test))).softmax(1) for view in turned]).mean(0)
    results = {"network": network(test).softmax(1), "uniform": uniform, "policy": module(test)}
scores = {}
for name, proba in results.items():
    rows, columns = metrics.map_rows(test_masks, proba.double().numpy())
    nll = -np.log(columns[np.arange(len(rows)), rows]).mean()
    scores[name] = nll, metrics.dice(test_masks, proba.numpy(), background=0)
    print(f"{name:8s} NLL {scores[name][0]:.4f}, Dice {scores[name][1]:.3f}")

# %% [markdown]
# ## What the views disagree about

# %%
maps = module.maps(test[:1])
assert maps.entropy is not None
assert maps.mutual_information is not None
print(f"mean entropy {maps.entropy.mean():.3f}, mutual information {maps.mutual_information.mean():.3f}")
