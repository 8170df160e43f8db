# ruff: noqa: D100
# %% [markdown]
# # nnU-Net with weighted mirroring
# Balls in noisy volumes; tiny network and plan are made here, where `initialize_from_trained_model_folder` reads them.

# %%
import numpy as np
import torch
from nnunetv2.inference.predict_from_raw_data import PlansManager, nnUNetPredictor
from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetNumpy
from torch.nn.functional import cross_entropy

from vbtta import fit_policy
from vbtta.integrations.nnunet import collect_cases, policy_predictor

torch.manual_seed(0)
rng, layers = np.random.default_rng(0), (torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.Conv3d(8, 2, 3, padding=1))
place, radius = rng.uniform(4, 8, size=(36, 3, 1, 1, 1)), rng.uniform(2, 5, size=(36, 1, 1, 1))
masks = (((np.mgrid[:12, :12, :12] - place) ** 2).sum(1) < radius**2).astype(np.int8)  # (36, 12, 12, 12)
volumes = (masks + rng.normal(size=masks.shape)).astype(np.float32)[:, None]
network, x, y = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]), torch.tensor(volumes), torch.tensor(masks)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    cross_entropy(network(x[:12]), y[:12].long()).backward()
    optimizer.step()
cases = [f"case{i}" for i in range(12, 24)]
for case, volume, mask in zip(cases, volumes[12:], masks[12:], strict=False):  # as nnU-Net preprocesses them
    nnUNetDatasetNumpy.save_case(volume, mask[None], {}, case)
tiny = {"patch_size": [8, 8, 8], "data_identifier": "tiny", "architecture": {}}
plans = PlansManager({"configurations": {"tiny": tiny}, "label_manager": "LabelManager", "plans_name": "tiny"})
dataset = {"labels": {"background": 0, "ball": 1}, "channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}
trained = (network.eval(), plans, plans.get_configuration("tiny"), [network.state_dict()], dataset, "", (0, 1, 2))
(own := nnUNetPredictor(device=torch.device("cpu"))).manual_initialization(*trained)
policy = fit_policy(*collect_cases(own, ".", cases), task="classification")
(ours := policy_predictor(policy, device=torch.device("cpu"))).manual_initialization(*trained)
maps = [torch.stack([each.predict_logits_from_preprocessed_data(v).float() for v in x[24:]]) for each in (own, ours)]
loss = dict(zip(("mirroring", "policy"), (cross_entropy(part, y[24:].long()).item() for part in maps), strict=True))
