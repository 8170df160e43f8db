# ruff: noqa: D100
# %% [markdown]
# # A ViT of transformers
#
# From a data set of Hugging Face to a folder of the Hub; the network is trained here for want of weights.

# %%
import numpy as np
import torch
from datasets import Dataset
from transformers import ViTConfig, ViTForImageClassification

from vbtta import Policy, TTAModule, collect_views, fit_policy
from vbtta.augment import GaussianNoise, HorizontalFlip, Identity

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
network = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **sizes))  # or from_pretrained("...")


def images(n):
    """Bright columns or bright rows in noise."""
    labels, x = torch.arange(n) % 2, 0.7 * torch.randn(n, 3, 16, 16)
    x[labels == 1, :, :, 6:10] += 0.5
    x[labels == 0, :, 6:10] += 0.5
    return Dataset.from_dict({"pixel_values": x.numpy(), "labels": labels.numpy()}).with_format("torch")


optimiser, train, calibration, test = torch.optim.AdamW(network.parameters(), 1e-3), *map(images, (300, 200, 400))
for _ in range(30):
    optimiser.zero_grad()
    network(**train[:]).loss.backward()
    optimiser.step()
views = [Identity(), HorizontalFlip(), GaussianNoise(0.3)]
predictions = collect_views(network, calibration, views, key="pixel_values")
policy = fit_policy(predictions, np.asarray(calibration["labels"][:]), task="classification")
policy.save_pretrained("weights", data="Bars in noise.")  # policy.push_to_hub("me/weights") uploads the same
module = TTAModule(network, views, Policy.from_pretrained("weights"))
accuracy = float((module(pixel_values=test["pixel_values"][:]).argmax(1) == test["labels"][:]).float().mean())
