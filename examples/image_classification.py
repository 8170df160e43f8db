# ruff: noqa: D100
# %% [markdown]
# # Image classification: from a trained network to one module with views inside
#
# Scikit-learn's handwritten digits, a small network trained on labels of which one in five is wrong, nine views, of
# which three turn digits over. The labels of the calibration sample are clean here; `crowd_labels.py` has noisy ones.

# %%
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from vbtta import TTAModule, collect_views, compare, diagnose, fit_policy, select_views
from vbtta.augment import Blur, Identity, Rotate, Rotate90, Shift, VerticalFlip

# %% [markdown]
# ## A network

# %%
digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)  # (1797, 1, 8, 8), in [0, 1]
classes = digits.target
rng = np.random.default_rng(0)
train, calibration, test = np.split(rng.permutation(len(images)), [300, 700])
noisy = np.where(rng.random(300) < 0.2, rng.integers(0, 10, size=300), classes[train])

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
inputs, targets = images[train], torch.tensor(noisy)
for _ in range(40):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(inputs), targets).backward()
    optimizer.step()

# %% [markdown]
# ## Predictions under every view
#
# One pass over the calibration images for each view; `held_out` is for judging only.

# %%
moved = [Shift(0.125, 0.0), Shift(-0.125, 0.0), Rotate(10.0), Rotate(-10.0), Blur(0.7)]
turned = [VerticalFlip(), Rotate90(1), Rotate90(2)]
views = [Identity(), *moved, *turned]
predictions = collect_views(network, images[calibration], views)
held_out = collect_views(network, images[test], views)
print(predictions)

# %% [markdown]
# ## The policy
#
# The uniform average suffers from the views that turn digits over; the policy gives them little weight, though not
# none: 0, 1, 3 and 8 look much the same upside down. The guard compares with the identity view alone.

# %%
policy = fit_policy(predictions, classes[calibration], task="classification")
print(policy)
print(policy.guard.reason)
weight = dict(zip(policy.names, policy.weights, strict=True))
print("on those that turn digits over:", round(sum(weight[view.name] for view in turned), 3))

# %%
methods = {name: name for name in ("original", "original+t", "uniform", "aug_tta")} | {"vbtta": policy}
outcome = compare(
    predictions, classes[calibration], held_out, classes[test], task="classification", methods=methods, resamples=200
)
print(outcome.to_markdown().partition("\n\n")[0])

# %% [markdown]
# ## Is anything wrong?

# %%
print(diagnose(policy, predictions, classes[calibration], incoming=held_out, refit=False))

# %% [markdown]
# ## Three views, one module
#
# `select_views` finds the three that are worth computing, and the module returns calibrated probabilities.

# %%
small = select_views(predictions, classes[calibration], budget=3, task="classification", model=policy.model)
print(small)
module = TTAModule(network, views, small).eval()
with torch.no_grad():
    probabilities = module(images[test])
accuracy = np.mean(probabilities.argmax(dim=1).numpy() == classes[test])
print(f"accuracy {accuracy:.3f} with {len(module.views)} views")
