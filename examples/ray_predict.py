# ruff: noqa: D100
# %% [markdown]
# # A policy on a Ray data set
#
# Fitted here to a small sample, applied on the workers of a cluster (without an address, of this machine).

# %%
import numpy as np
import ray
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

from vbtta import collect_views, fit_policy
from vbtta.augment import GaussianNoise, Identity
from vbtta.ray import predict

digits = load_digits()
inputs, labels = digits.data / 16, digits.target
train, calibration, test = np.split(np.random.default_rng(0).permutation(len(labels)), [500, 900])


def make():
    """The trained model; called once on every worker, where it may read weights from a file."""
    return RandomForestClassifier(50, random_state=0).fit(inputs[train], labels[train])


views = [Identity(), GaussianNoise(0.1), GaussianNoise(0.2)]
predictions = collect_views(make(), inputs[calibration], views, draws=4)
policy = fit_policy(predictions, labels[calibration], task="classification")

# %% [markdown]
# Rows have an `instance`, by which random views draw, and `inputs` or an `image`; results are a data set as well.

# %%
rows = ray.data.from_items([{"instance": int(row), "inputs": inputs[row]} for row in test])
result = predict(make, rows, views, policy, draws=4, workers=2).to_pandas().set_index("instance")
accuracy = float((result.loc[test, "label"] == labels[test]).mean())
print(policy, result[["label", "entropy"]].head(3), accuracy, sep="\n")
