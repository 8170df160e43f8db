"""MONAI and nnU-Net with a policy."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vbtta import TTAModule, ViewPredictions, collect_dense, fit_policy
from vbtta.augment import HorizontalFlip, Identity, Rotate90, as_view, flips, volume_flips
from vbtta.integrations import collect_items
from vbtta.integrations.monai import PolicyInferer
from vbtta.integrations.nnunet import PolicyMirroring, collect_cases, policy_predictor

CLASSES = 3


def uniform_policy(views):
    """The average of the views' logits."""
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(300, len(views), CLASSES))
    labels = (3 * outputs.mean(axis=1) + rng.gumbel(size=(300, CLASSES))).argmax(axis=1)
    predictions = ViewPredictions(outputs, names=[view.name for view in views])
    policy = fit_policy(predictions, labels, task="classification", model="latent", guard=False)
    pool = np.full(len(views), 1 / len(views))
    posterior: Any = policy.posterior
    return replace(policy, posterior=replace(posterior, pool=pool, offset=np.zeros(CLASSES), noise=None))


class Mirroring:
    """The parts of nnUNetPredictor that its mirroring step needs."""

    def __init__(self, network, use_mirroring=True, has_regions=False):
        self.network, self.use_mirroring = network, use_mirroring
        self.label_manager = SimpleNamespace(has_regions=has_regions)


class PolicyPredictor(PolicyMirroring, Mirroring):
    pass


def network_3d():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.LeakyReLU(), nn.Conv3d(4, CLASSES, 3, padding=1)).eval()


def mirrored_logits(network, x, axes):
    views = volume_flips(axes)
    return sum(view.inverse(network(view(x))) for view in views) / len(views)


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2), (1,)])
def test_equal_weights_are_nnunets_mirroring(axes):
    network, x = network_3d(), torch.rand(1, 1, 5, 6, 7)
    predictor = PolicyPredictor(uniform_policy(volume_flips(axes)), network=network)
    expected = mirrored_logits(network, x, axes).log_softmax(1)
    torch.testing.assert_close(predictor._internal_maybe_mirror_and_predict(x), expected, atol=1e-5, rtol=0)


def test_the_policy_follows_a_new_network_and_can_be_turned_off():
    axes, x = (0, 1, 2), torch.rand(1, 1, 4, 4, 4)
    predictor = PolicyPredictor(uniform_policy(volume_flips(axes)), network=network_3d())
    before = predictor._internal_maybe_mirror_and_predict(x)
    with torch.no_grad():  # as nnU-Net loads the next fold's parameters
        predictor.network[0].weight.mul_(3)
    after = predictor._internal_maybe_mirror_and_predict(x)
    assert (after - before).abs().max() > 1e-3
    predictor.network = network_3d()
    torch.testing.assert_close(predictor._internal_maybe_mirror_and_predict(x), before)
    predictor.use_mirroring = False
    torch.testing.assert_close(predictor._internal_maybe_mirror_and_predict(x), predictor.network(x))


def test_regions_are_refused():
    policy = uniform_policy(volume_flips((0,)))
    predictor = PolicyPredictor(policy, network=network_3d(), has_regions=True)
    with pytest.raises(ValueError, match="trained on regions"):
        predictor._internal_maybe_mirror_and_predict(torch.rand(1, 1, 4, 4, 4))


def test_mirrors_exchange_classes():
    views = volume_flips((0, 1, 2), swap={1: [(1, 2)], 2: [(2, 1)]})
    names = [view.name for view in views]
    assert names[1:4] == ["flip(0)", "flip(1)/swap(1,2)", "flip(2)/swap(1,2)"]
    assert names[-2:] == ["flip(1,2)", "flip(0,1,2)"]  # two exchanges cancel
    names = [view.name for view in volume_flips((0, 2), swap={2: [(3, 4)]})]
    assert names == ["identity", "flip(0)", "flip(2)/swap(3,4)", "flip(0,2)/swap(3,4)"]


def plans(patch_size):
    """A tiny plan with the entries that prediction needs."""
    n_axes = len(patch_size)
    kernels, conv = [[3] * n_axes] * 2, f"torch.nn.modules.conv.Conv{n_axes}d"
    layers = {"n_stages": 2, "features_per_stage": [4, 8], "strides": [[1] * n_axes, [2] * n_axes]}
    layers |= {"conv_op": conv, "kernel_sizes": kernels, "n_conv_per_stage": [1, 1], "n_conv_per_stage_decoder": [1]}
    layers |= {"conv_bias": True, "nonlin": "torch.nn.LeakyReLU"}
    unet = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
    architecture = {"network_class_name": unet, "arch_kwargs": layers, "_kw_requires_import": ["conv_op", "nonlin"]}
    configuration = {"patch_size": list(patch_size), "data_identifier": "tiny", "architecture": architecture}
    return {"configurations": {"tiny": configuration}, "label_manager": "LabelManager", "plans_name": "tiny"}


def initialised(predictor, network, manager, axes):
    labels = {"background": 0, "left": 1, "right": 2}
    dataset = {"labels": labels, "channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}
    configuration, state = manager.get_configuration("tiny"), [network.state_dict()]
    predictor.manual_initialization(network, manager, configuration, state, dataset, "nnUNetTrainer", axes)
    return predictor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patch_size", [(8, 8, 8), (8, 8)])
def test_nnunet_predicts_and_collects_with_a_policy(tmp_path, patch_size):
    nnunet = pytest.importorskip("nnunetv2.inference.predict_from_raw_data", exc_type=ImportError)
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetNumpy
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    axes, manager = tuple(range(len(patch_size))), nnunet.PlansManager(plans(patch_size))
    torch.manual_seed(0)
    architecture = plans(patch_size)["configurations"]["tiny"]["architecture"].values()
    network = get_network_from_plans(*architecture, 1, CLASSES, deep_supervision=False).eval()
    options = {"device": torch.device("cpu"), "allow_tqdm": False, "use_gaussian": False}  # in half precision: coarse
    own = initialised(nnunet.nnUNetPredictor(**options), network, manager, axes)
    ours = initialised(policy_predictor(uniform_policy(volume_flips(axes)), **options), network, manager, axes)
    window = torch.rand(1, 1, *patch_size)
    with torch.inference_mode():
        expected = own._internal_maybe_mirror_and_predict(window).softmax(1)
    torch.testing.assert_close(ours._internal_maybe_mirror_and_predict(window).exp(), expected, atol=1e-5, rtol=0)
    volume = torch.rand(1, 10, 12, 11)
    maps = [part.predict_logits_from_preprocessed_data(volume).float().softmax(0) for part in (own, ours)]
    torch.testing.assert_close(maps[1], maps[0], atol=2e-3, rtol=0)  # nnU-Net adds windows up in half precision

    rng = np.random.default_rng(0)
    for case in ("b", "a"):
        mask = rng.integers(-1, CLASSES, size=(1, 10, 12, 11)).astype(np.int8)
        nnUNetDatasetNumpy.save_case(rng.normal(size=mask.shape).astype(np.float32), mask, {}, str(tmp_path / case))
    predictions, labels = collect_cases(ours, str(tmp_path), ["b", "a"], positions=20)
    n_slices = 1 if len(patch_size) == 3 else 10
    assert predictions.names == tuple(view.name for view in volume_flips(axes))
    assert predictions.groups.tolist() == ["b"] * 20 * n_slices + ["a"] * 20 * n_slices
    assert ours.use_mirroring
    data, mask = nnUNetDatasetNumpy(str(tmp_path), ["a"]).load_case("a")[:2]
    own.use_mirroring = False
    logits = own.predict_logits_from_preprocessed_data(torch.from_numpy(data)).float().numpy()
    name, position = str(predictions.ids[-1]).rsplit(":")  # type: ignore[index]
    place = int(position) + (0 if n_slices == 1 else 12 * 11 * int(name.partition("/")[2]))
    np.testing.assert_allclose(predictions.outputs[-1, 0], logits.reshape(CLASSES, -1)[:, place], atol=2e-3)
    assert labels.value[-1] == max(mask.ravel()[place], 0)


def test_an_inferer_of_a_policy_gives_log_probabilities():
    views = flips()
    network, images = nn.Conv2d(1, CLASSES, 3, padding=1), torch.rand(2, 1, 8, 9)
    policy = uniform_policy(views)
    inferer = PolicyInferer(lambda inputs, network: network(inputs), views, policy)
    expected = sum(view.inverse(network(view(images))) for view in views) / len(views)
    torch.testing.assert_close(inferer(images, network), expected.log_softmax(1))
    probability = PolicyInferer(inferer.inferer, views, policy, output="probability")(images, network)
    torch.testing.assert_close(probability, expected.softmax(1))
    other = nn.Conv2d(1, CLASSES, 3, padding=1)
    assert (inferer(images, other) - inferer(images, network)).abs().max() > 1e-3


def test_collecting_from_a_data_set_equals_collect_dense():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, CLASSES, 3, padding=1), nn.Dropout(0.5))
    images, masks = torch.rand(4, 1, 8, 9), torch.randint(0, CLASSES, (4, 1, 8, 9))
    items = [{"image": image, "label": mask} for image, mask in zip(images, masks, strict=True)]
    expected, labels = collect_dense(network, images, flips(), masks[:, 0].numpy(), positions=15)

    def load(i: int) -> tuple[Any, Any]:
        return items[i]["image"], items[i]["label"][0].numpy()

    for predictor in (network, lambda batch: network.eval()(batch)):
        predictions, values = collect_items(predictor, len(items), load, flips(), positions=15)
        np.testing.assert_allclose(predictions.outputs, expected.outputs, atol=1e-6)
        assert predictions.ids.tolist() == expected.ids.tolist()
        assert values.value.tolist() == labels.value.tolist()


def test_windows_of_monai_give_the_map_of_the_whole_image():
    monai = pytest.importorskip("monai")
    from monai.inferers import SimpleInferer, SlidingWindowInferer  # type: ignore[attr-defined]

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 3, padding=1))
    images = torch.rand(2, 1, 48, 40)
    views = [Identity(), HorizontalFlip(), Rotate90(1), as_view(monai.transforms.Flip(0), "monai flip")]
    policy = uniform_policy(views)
    module = TTAModule(network, views, policy, output="log_probability")
    windows = SlidingWindowInferer(roi_size=24, sw_batch_size=3, overlap=0.5, mode="gaussian", sigma_scale=0.05)
    with torch.no_grad():
        whole, tiled = module(images), windows(images, module)
        assert tiled.shape == whole.shape
        window_map = SlidingWindowInferer(roi_size=(-1, -1))(images, module)
        torch.testing.assert_close(window_map, whole)
        torch.testing.assert_close(PolicyInferer(windows, views, policy)(images, network), tiled)
        of_metadata = PolicyInferer(SimpleInferer(), views, policy)(monai.data.MetaTensor(images), network)
        torch.testing.assert_close(of_metadata.as_tensor(), whole)
        # a window that reaches beyond the receptive field around the region sees the same
        inner: Any = SlidingWindowInferer(roi_size=24, overlap=0.0)(images, module)
        torch.testing.assert_close(inner[..., 2:22, 2:14], whole[..., 2:22, 2:14], atol=1e-5, rtol=0)


def test_a_monai_data_set_is_collected():
    monai = pytest.importorskip("monai")
    rng = np.random.default_rng(0)
    items = [{"image": rng.random((1, 8, 8)).astype(np.float32), "label": np.zeros((1, 8, 8))} for _ in range(3)]
    to_tensors = monai.transforms.EnsureTyped(keys=["image", "label"])
    network, data = nn.Conv2d(1, CLASSES, 3, padding=1), monai.data.Dataset(items, transform=to_tensors)
    inferer = monai.inferers.SlidingWindowInferer(roi_size=8)

    def load(i: int) -> tuple[Any, Any]:
        return data[i]["image"].as_tensor(), data[i]["label"][0].numpy()

    predictions, labels = collect_items(lambda batch: inferer(batch, network), len(data), load, flips(), positions=10)
    assert predictions.outputs.shape == (30, 4, CLASSES)
    assert set(labels.value.tolist()) == {0}


def test_volume_flips_refuse_axes_that_they_would_pass_over():
    with pytest.raises(ValueError, match="every axis of swap"):
        volume_flips((0, 1), swap={2: [(1, 2)]})
    with pytest.raises(ValueError, match="must be different"):
        volume_flips((0, 0))
