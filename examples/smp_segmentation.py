# ruff: noqa: D100
# %% [markdown]
# # A network of segmentation_models_pytorch
#
# Discs in noise, a U-Net that is trained here for want of weights, mirrors and quarter turns as views.

# %%
import numpy as np
import segmentation_models_pytorch as smp
import torch

from vbtta import TTAModule, collect_dense, fit_policy, metrics
from vbtta.augment import HorizontalFlip, Identity, Rotate90, VerticalFlip


def draw(n: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Images (N, 3, 32, 32) and masks (N, 32, 32)."""
    rng = np.random.default_rng(seed)
    place, radius = rng.uniform(8, 24, size=(n, 2, 1, 1, 1)), rng.uniform(4, 9, size=(n, 1, 1))
    masks = (np.sum((np.mgrid[:32, :32][None, :, None] - place) ** 2, axis=1)[:, 0] < radius**2).astype(int)
    return torch.tensor(masks[:, None] + 0.8 * rng.normal(size=(n, 3, 32, 32))).float(), masks


# %%
torch.manual_seed(0)
network = smp.Unet("tu-tf_mobilenetv3_small_minimal_100", encoder_weights=None, classes=2)
optimizer, (images, masks) = torch.optim.AdamW(network.parameters(), lr=0.003), draw(64, 0)
for _ in range(40):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(network(images), torch.tensor(masks)).backward()
    optimizer.step()
views = [Identity(), HorizontalFlip(), VerticalFlip(), Rotate90(1), Rotate90(2), Rotate90(3)]
images, masks = draw(40, 1)
policy = fit_policy(*collect_dense(network, images, views, masks), task="classification")
module, (images, masks) = TTAModule(network, views, policy).eval(), draw(40, 2)
with torch.no_grad():
    maps = {"views": module(images), "network": network.eval()(images).softmax(1)}
dice = {name: metrics.dice(masks, proba.numpy(), background=0) for name, proba in maps.items()}
print(policy, dice)
