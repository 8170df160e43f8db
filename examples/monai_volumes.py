# ruff: noqa: D100
# %% [markdown]
# # Windows of MONAI with the views of a policy
# Balls in noisy volumes, a network that is trained here for want of weights, mirrors along three axes as views.

# %%
import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from torch.nn.functional import cross_entropy

from vbtta import fit_policy
from vbtta.augment import volume_flips
from vbtta.integrations import collect_items
from vbtta.integrations.monai import PolicyInferer


def draw(n: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Volumes (N, 1, 12, 16, 20) and masks (N, 12, 16, 20)."""
    rng = np.random.default_rng(seed)
    place, radius = rng.uniform(4, 12, size=(n, 3, 1, 1, 1)), rng.uniform(3, 6, size=(n, 1, 1, 1))
    masks = (np.sum((np.mgrid[:12, :16, :20] - place) ** 2, axis=1) < radius**2).astype(int)
    return torch.tensor(masks[:, None] + rng.normal(size=(n, 1, 12, 16, 20))).float(), masks


torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 2, 3, padding=1))
optimizer, (volumes, masks) = torch.optim.AdamW(network.parameters(), lr=0.01), draw(8, 0)
for _ in range(30):
    optimizer.zero_grad()
    cross_entropy(network(volumes), torch.tensor(masks)).backward()
    optimizer.step()
windows, views = SlidingWindowInferer((12, 12, 12), overlap=0.5), volume_flips()
dataset = [{"image": image, "label": torch.tensor(mask)[None]} for image, mask in zip(*draw(12, 1), strict=True)]


def load(i: int) -> tuple[torch.Tensor, np.ndarray]:
    """One item in memory at a time."""
    return dataset[i]["image"], dataset[i]["label"][0].numpy()


with torch.no_grad():
    collected = collect_items(lambda batch: windows(batch, network.eval()), len(dataset), load, views)
policy = fit_policy(*collected, task="classification")
inferer, (volumes, masks) = PolicyInferer(windows, views, policy), draw(12, 2)
with torch.no_grad():
    maps = {"views": inferer(volumes, network), "network": windows(volumes, network)}
loss = {name: cross_entropy(logits, torch.tensor(masks)).item() for name, logits in maps.items()}
print(policy, loss)
