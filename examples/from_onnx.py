# ruff: noqa: D100
# %% [markdown]
# # From ONNX: a network of any framework
#
# The network is a file. Views are applied in Python, the file is run by ONNX Runtime, and the policy knows nothing of
# either. Here the file is exported from torch first; yours may come from anywhere.

# %%
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

from vbtta import Policy, collect_views, fit_policy
from vbtta.augment import Blur, Identity, Rotate, Shift, VerticalFlip, Zoom

digits = load_digits()
images = (digits.images[:, None] / 16).astype(np.float32)  # (1797, 1, 8, 8)
train, calibration, test = np.split(np.random.default_rng(1).permutation(len(images)), [300, 700])
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The file

# %%
torch.manual_seed(1)
network = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(torch.tensor(images[train])), torch.tensor(digits.target[train]))
    loss.backward()
    optimizer.step()
rows = torch.export.Dim("rows", min=1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it traces
    program = torch.export.export(network.eval(), (torch.tensor(images[:2]),), dynamic_shapes=({0: rows},))
    torch.onnx.export(program, (), folder / "digits.onnx", verbose=False)

# %% [markdown]
# ## Views, through ONNX Runtime
#
# A session, or the path of the file, is a model like any other. Image views want tensors; the adapter turns what they
# return into the arrays that the session takes.

# %%
session = onnxruntime.InferenceSession(folder / "digits.onnx", providers=["CPUExecutionProvider"])
views = [
    Identity(),
    Shift(0.125, 0.0),
    Shift(-0.125, 0.0),
    Rotate(8.0),
    Rotate(-8.0),
    Zoom(1.1),
    Blur(0.6),
    VerticalFlip(),
]
predictions = collect_views(session, images[calibration], views)
policy = fit_policy(predictions, digits.target[calibration], task="classification")
print(policy)

# %% [markdown]
# ## Later, elsewhere
#
# Only the views that have weight are computed.

# %%
policy.save(folder / "policy.json")
loaded = Policy.load(folder / "policy.json")
used = [view for view in views if loaded.weights[loaded.names.index(view.name)] > 0]
prediction = loaded.predict(collect_views(folder / "digits.onnx", images[test], used))
plain = collect_views(session, images[test], [Identity()]).outputs[:, 0].argmax(axis=1)
print(f"{len(used)} of {len(views)} views")
for name, label in (("weighted views", prediction.label), ("no views", plain)):
    print(f"{name:14s} accuracy {np.mean(label == digits.target[test]):.3f}")
