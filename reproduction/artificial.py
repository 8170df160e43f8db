"""The paper's artificial regression: 40 inputs, a random polynomial, noisy labels, a small network and its views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from reproduction import nets
from reproduction.paper_views import mixup_and_cutmix
from reproduction.store import cached_arrays, fingerprint
from vbtta import LabelSets, ViewPredictions, collect_views

Array = NDArray[np.float64]
_ORDERS = (0.9, 0.08, 0.02)  # shares of the variance: linear terms, products of two inputs, products of three
_ALPHAS = (0.1, 0.5, 0.9)
_FORMAT = 1  # part of the name of cached predictions: raise it when they would differ
_TERMS = (20, 10)  # products of two, and of three


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open, chosen once; the network has three linear layers, trained by AdamW on all labels."""

    distribution: str = "gaussian"  # of every input: N(0, 1), or gamma, Gamma(2, 2), shape and rate
    dimension: int = 40
    instances: int = 1000
    test_instances: int = 1000
    scale: float = 0.67  # of the polynomial: the uniform average of three mixups errs about as much as in the paper
    noise: float = 0.1  # standard deviation of a label around the polynomial
    extra_noise: float = 0.3  # standard deviation of an instance's second label around its first
    doubled: float = 0.3  # share of the instances that carry a second label
    width: int = 64
    epochs: int = 60
    batch_size: int = 100
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    folds: int = 5  # for out-of-fold views of the training instances
    seed: int = 0


class Sample(NamedTuple):
    """Training and test instances; truths are the polynomial without noise."""

    inputs: Array  # (N, D)
    labels: LabelSets
    truth: Array  # (N,)
    test_inputs: Array  # (T, D)
    test_truth: Array  # (T,)


class Networks(NamedTuple):
    """The network, and one for each fold that has not seen the fold's instances."""

    whole: nn.Module
    folds: list[nn.Module]
    held_out: list[NDArray[np.intp]]  # instances of each fold


class Views(NamedTuple):
    """Predictions under the six views, and the plain network's error."""

    out_of_fold: ViewPredictions  # of training instances, by networks that did not see them
    training: ViewPredictions  # of training instances, by the network trained on them
    test: ViewPredictions
    network_mse: float  # on the test instances, without augmentation


def draw_inputs(distribution: str, rng: np.random.Generator, n_rows: int, dimension: int) -> NDArray[np.float64]:
    """Independent coordinates, (n_rows, dimension): N(0, 1) or Gamma(2, 2), shape and rate.

    Examples
    --------
    >>> draw_inputs("gamma", np.random.default_rng(0), 4, 2).shape
    (4, 2)
    """
    if distribution == "gaussian":
        return rng.standard_normal((n_rows, dimension))
    if distribution == "gamma":
        return rng.gamma(2.0, 0.5, (n_rows, dimension))
    raise ValueError(f"distribution must be 'gaussian' or 'gamma'; got {distribution!r}.")


def mean_and_sd(distribution: str) -> tuple[float, float]:
    """Mean and standard deviation of a coordinate."""
    return (0.0, 1.0) if distribution == "gaussian" else (1.0, float(np.sqrt(0.5)))


def random_polynomial(
    rng: np.random.Generator, distribution: str, dimension: int, scale: float
) -> Callable[[Array], Array]:
    """A polynomial of degree three in the standardised inputs, of mean 0 and standard deviation `scale`.

    A linear term in every input, and a few products of two and of three different inputs, all with normal
    coefficients; 90, 8 and 2 % of the variance. The terms are uncorrelated, as inputs are independent.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> polynomial = random_polynomial(rng, "gaussian", 5, 2.0)
    >>> polynomial(rng.standard_normal((3, 5))).shape
    (3,)
    """
    mean, sd = mean_and_sd(distribution)
    members = [np.arange(dimension)[:, None]]
    members += [
        np.stack([rng.choice(dimension, order, replace=False) for _ in range(terms)])
        for order, terms in zip((2, 3), _TERMS, strict=True)
    ]
    coefficients = []
    for place, share in zip(members, _ORDERS, strict=True):
        drawn = rng.standard_normal(len(place))
        coefficients.append(drawn * scale * np.sqrt(share / (drawn @ drawn)))

    def polynomial(inputs: Array) -> Array:
        standard = (inputs - mean) / sd
        parts = [standard[:, place].prod(axis=2) @ c for place, c in zip(members, coefficients, strict=True)]
        return np.asarray(sum(parts))

    return polynomial


def make_sample(setting: Setting) -> Sample:
    """Inputs, labels and truths; a second label, noisier, for a share of the instances."""
    rng = np.random.default_rng([setting.seed, 40])
    polynomial = random_polynomial(rng, setting.distribution, setting.dimension, setting.scale)
    inputs = draw_inputs(setting.distribution, rng, setting.instances, setting.dimension)
    test_inputs = draw_inputs(setting.distribution, rng, setting.test_instances, setting.dimension)
    truth = polynomial(inputs)
    first = truth + setting.noise * rng.standard_normal(setting.instances)
    second = np.full(setting.instances, np.nan)
    chosen = rng.choice(setting.instances, round(setting.doubled * setting.instances), replace=False)
    second[chosen] = first[chosen] + setting.extra_noise * rng.standard_normal(len(chosen))
    labels = LabelSets.from_array(np.stack([first, second], axis=1))
    return Sample(inputs, labels, truth, test_inputs, polynomial(test_inputs))


def train_all(setting: Setting, sample: Sample) -> Networks:
    """Train one network on all instances, and one for each fold on the others."""
    everything = np.arange(setting.instances)
    rng = np.random.default_rng([setting.seed, setting.folds])
    held_out = np.array_split(rng.permutation(setting.instances), setting.folds)
    folds = []
    for place, out in enumerate(held_out):
        rows = np.setdiff1d(everything, out)
        seed = setting.seed + 1000 * (place + 1)
        folds.append(train_network(setting, sample.inputs[rows], sample.labels.take(rows), seed))
    return Networks(train_network(setting, sample.inputs, sample.labels, setting.seed), folds, held_out)


def collect(setting: Setting, sample: Sample, networks: Networks, draws: int) -> Views:
    """Predict under the six views, averaged over so many draws."""
    mean = np.empty((setting.instances, 6, 1))  # (N, K, C)
    for place, (network, out) in enumerate(zip(networks.folds, networks.held_out, strict=True)):
        # Partners are drawn from what the fold's network was trained on, as they are for new inputs.
        pool = sample.inputs[np.setdiff1d(np.arange(setting.instances), out)]
        mean[out] = _views(setting, network, sample.inputs[out], pool, draws, place + 1).outputs
    training = _views(setting, networks.whole, sample.inputs, sample.inputs, draws, 0)
    test = _views(setting, networks.whole, sample.test_inputs, sample.inputs, draws, setting.folds + 1)
    plain = float(np.mean((predict(networks.whole, sample.test_inputs) - sample.test_truth) ** 2))
    return _as_views({"out_of_fold": mean, "training": training.outputs, "test": test.outputs, "network_mse": plain})


def views_of(setting: Setting, sample: Sample, draws: Sequence[int], cache: Path | None) -> dict[int, Views]:
    """Views by number of draws, read from the cache folder where they are there; networks are trained if need be."""
    networks: list[Networks] = []

    def make(n: int) -> dict[str, NDArray[Any]]:
        if not networks:
            networks.append(train_all(setting, sample))
        views = collect(setting, sample, networks[0], n)
        arrays = {
            "out_of_fold": views.out_of_fold.outputs,
            "training": views.training.outputs,
            "test": views.test.outputs,
        }
        return {**arrays, "network_mse": np.asarray(views.network_mse)}

    paths = {n: cache and cache / f"artificial-{fingerprint(_FORMAT, n, asdict(setting))}.npz" for n in draws}
    return {n: _as_views(cached_arrays(path, functools.partial(make, n))) for n, path in paths.items()}


def train_network(setting: Setting, inputs: Array, labels: LabelSets, seed: int) -> nn.Module:
    """Fit a three-layer perceptron to all labels by least squares; every label is one training case."""
    network = nets.build("mlp", 1, seed=seed, inputs=setting.dimension, width=setting.width)
    x = torch.as_tensor(inputs[labels.instance], dtype=torch.float32)
    y = torch.as_tensor(labels.continuous(1), dtype=torch.float32)
    mean, sd = mean_and_sd(setting.distribution)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=setting.weight_decay)
    n_batches = max(1, round(len(x) / setting.batch_size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, setting.learning_rate, total_steps=setting.epochs * n_batches
    )
    x = (x - mean) / sd
    for _ in range(setting.epochs):
        for rows in torch.tensor_split(torch.randperm(len(x), generator=generator), n_batches):
            loss = functional.mse_loss(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return _OnRawInputs(network, mean, sd).eval()


def predict(network: nn.Module, inputs: Array) -> Array:
    """The network's outputs without augmentation: (N,)."""
    with torch.inference_mode():
        outputs: Array = network(torch.as_tensor(inputs, dtype=torch.float32))[:, 0].double().numpy()
    return outputs


class _OnRawInputs(nn.Module):
    """A network with the standardisation of its inputs inside, so that views are made of raw inputs."""

    def __init__(self, network: nn.Module, mean: float, sd: float) -> None:
        super().__init__()
        self.network, self.mean, self.sd = network, mean, sd

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.network((inputs - self.mean) / self.sd)
        return output


def _as_views(arrays: Mapping[str, Any]) -> Views:
    names = [f"{kind}({alpha:g})" for kind in ("mixup", "cutmix") for alpha in _ALPHAS]
    out_of_fold, training, test = (ViewPredictions(arrays[part], names=names) for part in Views._fields[:3])
    return Views(out_of_fold, training, test, float(arrays["network_mse"]))


def _views(
    setting: Setting, network: nn.Module, inputs: Array, pool: Array, draws: int, stream: int
) -> ViewPredictions:
    """Predictions under the paper's six views; streams differ between uses, so draws are never shared."""
    return collect_views(
        network,
        inputs.astype(np.float32),
        mixup_and_cutmix(pool.astype(np.float32), _ALPHAS),
        draws=draws,
        batch_size=2000,
        seed=100 * setting.seed + stream,
    )
