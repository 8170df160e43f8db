"""Networks and trainer: the seed decides, and a resumed run ends where an uninterrupted one does."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from reproduction import nets, training
from reproduction.training import TrainingConfig, augment_batch, predict, train


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stripes() -> tuple[np.ndarray, np.ndarray]:
    """Noisy images with horizontal (class 0) or vertical (class 1) stripes."""
    rng = np.random.default_rng(0)
    labels = np.arange(96) % 2
    stripe = np.zeros((8, 8))
    stripe[::2] = 120
    images = np.where(labels[:, None, None] == 0, stripe, stripe.T) + rng.integers(100, size=(96, 8, 8))
    return images[:, None].astype(np.uint8), labels


@pytest.fixture
def config() -> TrainingConfig:
    options = {"size": 8, "width": 4}
    return TrainingConfig(
        "classification",
        "convnet",
        2,
        options,
        epochs=6,
        batch_size=16,
        learning_rate=0.05,
        crop=1,
        flip=False,
    )


def weights(network: torch.nn.Module) -> Tensor:
    return torch.cat([value.flatten().double() for value in network.state_dict().values()])


class TestNets:
    @pytest.mark.parametrize(
        ("name", "options", "shape"),
        [
            ("resnet18", {"width": 4}, (2, 3, 32, 32)),
            ("small_resnet", {"width": 4, "channels": 1}, (2, 1, 28, 28)),
            ("small_resnet", {"width": 4, "stem_stride": 2}, (2, 3, 64, 64)),
            ("convnet", {}, (2, 1, 28, 28)),
            ("mlp", {"inputs": 40}, (2, 40)),
        ],
    )
    def test_shapes_and_seeds(self, name, options, shape):
        state = torch.get_rng_state()
        first, same, other = (nets.build(name, 7, seed=seed, **options) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(weights(first), weights(same))
        assert not torch.equal(weights(first), weights(other))
        assert first(torch.zeros(shape)).shape == (2, 7)

    def test_width_64_is_resnet18(self):
        # The well-known count of the CIFAR variant: 11,173,962 parameters.
        network = nets.build("resnet18", 10, seed=0)
        assert sum(p.numel() for p in network.parameters()) == 11_173_962

    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"name must be one of .*resnet18.*; got 'vgg'"):
            nets.build("vgg", 10, seed=0)


class TestAugmentBatch:
    def test_nothing_asked_nothing_done(self):
        images = torch.rand(5, 3, 6, 7)
        assert torch.equal(augment_batch(images, 0, False, torch.Generator()), images)

    def test_flips_only(self):
        images = torch.rand(50, 3, 6, 7)
        result = augment_batch(images, 0, True, torch.Generator().manual_seed(0))
        flipped = (result == images.flip(3)).flatten(1).all(dim=1)
        kept = (result == images).flatten(1).all(dim=1)
        assert (flipped ^ kept).all()
        assert 10 < flipped.sum() < 40

    def test_shifts_are_crops_of_the_reflected_image(self):
        images = torch.rand(60, 3, 6, 7)
        result = augment_batch(images, 2, False, torch.Generator().manual_seed(0))
        padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="reflect")
        crops = torch.stack([padded[:, :, i : i + 6, j : j + 7] for i in range(5) for j in range(5)])
        matches = (crops == result).flatten(2).all(dim=2)  # (25 shifts, images)
        assert (matches.sum(dim=0) == 1).all()
        assert matches.any(dim=1).sum() > 15  # many different shifts


class TestTrain:
    def test_learns(self, stripes, config):
        network = train(config, *stripes)
        assert not network.training
        assert np.mean(predict(network, stripes[0]).argmax(axis=1) == stripes[1]) > 0.95

    @pytest.mark.parametrize("loss", ["squared", "absolute"])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_regression_in_the_users_units(self, config, loss, optimizer):
        rng = np.random.default_rng(0)
        levels = rng.integers(50, 200, size=200)
        images = (levels[:, None, None, None] + rng.integers(10, size=(200, 1, 8, 8))).astype(np.uint8)
        targets = 1000.0 + 5.0 * levels
        rate = 0.02 if optimizer == "sgd" else 0.005
        regression = dataclasses.replace(
            config,
            task="regression",
            outputs=1,
            loss=loss,
            optimizer=optimizer,
            learning_rate=rate,
            epochs=10,
        )
        error = predict(train(regression, images, targets), images)[:, 0] - targets
        assert np.abs(error).mean() < 0.25 * targets.std()

    def test_the_seed_decides(self, stripes, config):
        torch.manual_seed(1)
        first = weights(train(config, *stripes))
        torch.manual_seed(2)
        assert torch.equal(first, weights(train(config, *stripes)))
        assert not torch.equal(first, weights(train(dataclasses.replace(config, seed=1), *stripes)))

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_resumed_equals_uninterrupted(self, stripes, config, optimizer, tmp_path, monkeypatch):
        config = dataclasses.replace(config, optimizer=optimizer)
        expected = weights(train(config, *stripes))
        whole_epoch = training._Training.epoch
        done: list[int] = []

        def interrupted(*arguments):
            if len(done) == 3:
                raise KeyboardInterrupt
            done.append(1)
            return whole_epoch(*arguments)

        monkeypatch.setattr(training._Training, "epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config, *stripes, cache=tmp_path)
        monkeypatch.setattr(training._Training, "epoch", whole_epoch)
        assert torch.equal(weights(train(config, *stripes, cache=tmp_path)), expected)
        assert len(list(tmp_path.iterdir())) == 1

    def test_finished_network_is_loaded_and_other_data_trains_anew(self, stripes, config, tmp_path, monkeypatch):
        images, labels = stripes
        expected = weights(train(config, images, labels, cache=tmp_path))
        calls = []
        whole_epoch = training._Training.epoch

        def counted(*arguments):
            calls.append(1)
            return whole_epoch(*arguments)

        monkeypatch.setattr(training._Training, "epoch", counted)
        assert torch.equal(weights(train(config, images, labels, cache=tmp_path)), expected)
        assert not calls
        train(config, images, 1 - labels, cache=tmp_path)
        assert len(calls) == config.epochs

    def test_damaged_checkpoint_is_named(self, stripes, config, tmp_path):
        train(config, *stripes, cache=tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ValueError, match="Delete it to train anew"):
            train(config, *stripes, cache=tmp_path)

    def test_threads_are_put_back(self, stripes, config):
        train(dataclasses.replace(config, epochs=1), *stripes, threads=2)
        assert torch.get_num_threads() == 1

    def test_progress(self, stripes, config, capsys):
        train(dataclasses.replace(config, epochs=2), *stripes, progress=True)
        assert "epoch 2/2" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("images", "targets", "message"),
        [
            (np.zeros((4, 1, 8, 8)), np.zeros(4), "images must be uint8"),
            (np.zeros((4, 8, 8), np.uint8), np.zeros(4), "images must be uint8"),
            (np.zeros((4, 1, 8, 8), np.uint8), np.zeros(3), "one row per image; got 3 for 4"),
            (np.zeros((4, 1, 8, 8), np.uint8), np.full(4, 2), r"class numbers in 0\.\.1"),
            (np.zeros((0, 1, 8, 8), np.uint8), np.zeros(0), "at least one image"),
        ],
    )
    def test_bad_data(self, config, images, targets, message):
        with pytest.raises(ValueError, match=message):
            train(config, images, targets)

    def test_bad_targets_in_regression(self, config):
        regression = dataclasses.replace(config, task="regression", outputs=1)
        with pytest.raises(ValueError, match="must be finite"):
            train(regression, np.zeros((2, 1, 8, 8), np.uint8), np.array([1.0, np.nan]))

    @pytest.mark.parametrize(
        "change",
        [{"task": "ranking"}, {"optimizer": "lbfgs"}, {"loss": "huber"}, {"epochs": 0}, {"batch_size": 0}],
    )
    def test_bad_configuration(self, config, change):
        (name,) = change
        with pytest.raises(ValueError, match=f"{name} must be"):
            dataclasses.replace(config, **change)
