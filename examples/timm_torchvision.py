# ruff: noqa: D100
# %% [markdown]
# # A network of timm, views of torchvision
#
# Digits, a small network of timm that is trained here for want of weights, and views of `torchvision.transforms.v2`.

# %%
import numpy as np
import timm
import torch
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from vbtta import TTAModule, collect_views, fit_policy
from vbtta.augment import Identity, as_view, as_views

digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
train, calibration, test = np.split(np.random.default_rng(0).permutation(len(images)), [600, 1000])
torch.manual_seed(0)
network = timm.create_model("test_resnet", in_chans=1, num_classes=10)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
for rows in np.array_split(np.tile(train, 16), 160):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(network(images[rows]), torch.tensor(digits.target[rows])).backward()
    optimizer.step()

# %%
turn, cut = v2.RandomRotation(8), v2.RandomResizedCrop(32, (0.7, 1.0), antialias=True)
views = [Identity(), as_view(turn, "rotation"), as_view(cut, "crop"), v2.GaussianBlur(5), *as_views(v2.FiveCrop(28))]
policy = fit_policy(
    collect_views(network, images[calibration], views, draws=4), digits.target[calibration], task="classification"
)
module = TTAModule(network, views, policy, draws=4).eval()
with torch.no_grad():
    weighted, alone = module(images[test]).argmax(1).numpy(), network.eval()(images[test]).argmax(1).numpy()
accuracy = {name: np.mean(label == digits.target[test]) for name, label in (("views", weighted), ("network", alone))}
print(policy, accuracy)
