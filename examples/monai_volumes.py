# ruff: noqa: D100
# %% [markdown]
# # Windows of MONAI with the views of a policy
#
# Balls in noisy volumes, a network that is trained here for want of weights, mirrors along three axes as views.

# %%
import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from torch import nn
from torch.nn.functional import cross_entropy

from vbtta import fit_policy
from vbtta.augment import volume_flips
from vbtta.integrations import collect_items
from vbtta.integrations.monai import PolicyInferer

torch.manual_seed(0)
rng, layers = np.random.default_rng(0), (nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 3, padding=1))
place, radius = rng.uniform(4, 12, size=(32, 3, 1, 1, 1)), rng.uniform(3, 6, size=(32, 1, 1, 1))
masks = torch.tensor(((np.mgrid[:12, :16, :20] - place) ** 2).sum(1) < radius**2).long()  # (32, 12, 16, 20)
volumes, network = (masks + torch.randn(masks.shape))[:, None], nn.Sequential(*layers)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
for _ in range(30):
    optimizer.zero_grad()
    cross_entropy(network(volumes[:8]), masks[:8]).backward()
    optimizer.step()

# %%
windows, views = SlidingWindowInferer((12, 12, 12), overlap=0.5), volume_flips()
items = list(zip(volumes[8:20], masks[8:20].numpy(), strict=True))  # or a data set that loads one item at a time
with torch.no_grad():
    collected = collect_items(lambda batch: windows(batch, network.eval()), len(items), items.__getitem__, views)
    policy, x, y = fit_policy(*collected, task="classification"), volumes[20:], masks[20:]
    maps = {"views": PolicyInferer(windows, views, policy)(x, network), "network": windows(x, network)}
loss = {name: cross_entropy(logits, y).item() for name, logits in maps.items()}
print(policy, loss)
