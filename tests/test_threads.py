"""The same answers from sixteen threads, from forked DataLoader workers, and on a module in training mode."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vbtta import Policy, TTAModule, ViewPredictions, collect_views, fit_policy
from vbtta.adapters.torch import evaluating
from vbtta.augment import GaussianNoise, Identity, RowStreams, as_view

VIEWS = [Identity(), GaussianNoise(0.1)]


class Meeting(nn.Module):
    """Threads wait for each other inside the first calls, so that they overlap."""

    def __init__(self, n_threads: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3), nn.Dropout(0.5)
        self.barrier, self.seen = threading.Barrier(n_threads), threading.local()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not getattr(self.seen, "met", False):
            self.seen.met = True
            self.barrier.wait(60)
        return self.dropout(self.linear(batch))


def in_threads(n_threads: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(call, range(n_threads)))


@pytest.fixture(scope="module")
def policy() -> Policy:
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=80)
    outputs = 2 * np.eye(3)[label][:, None] + rng.normal(size=(80, 2, 3))
    predictions = ViewPredictions(outputs, names=[view.name for view in VIEWS])
    return fit_policy(predictions, label, task="classification", model="latent", guard=False)


def test_a_module_in_training_mode_is_in_evaluation_mode_for_all_threads() -> None:
    """One thread leaves while others are inside: their dropout stays off, and the mode comes back in the end."""
    inputs, network = torch.randn(40, 4), Meeting(16).train()
    single = collect_views(_copy(network), inputs, VIEWS, draws=2)
    parts = in_threads(16, lambda n: collect_views(network, inputs[: 10 + 2 * n], VIEWS, draws=2))
    for n, part in enumerate(parts):
        # kernels of torch round by the size of the batch on some processors; dropout would double or remove outputs
        np.testing.assert_allclose(part.outputs, single.outputs[: 10 + 2 * n], atol=1e-6)
    assert network.training
    assert network.dropout.training


class SlowModule(nn.Linear):
    """Its evaluation mode takes until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def eval(self) -> "SlowModule":
        self.entered.set()
        self.go_on.wait(60)
        return super().eval()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_take_over_what_a_thread_holds() -> None:
    """A thread is within a change of mode when the process is forked; the child has no such thread to wait for."""
    slow, other = SlowModule().train(), nn.Dropout().train()

    def enter() -> None:
        with evaluating(slow):
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    assert slow.entered.wait(60)
    process = os.fork()
    if not process:
        signal.alarm(20)  # ends the child if it waits
        with evaluating(other):
            inside = other.training
        os._exit(int(inside or not other.training))
    status = os.waitpid(process, 0)[1]
    slow.go_on.set()
    thread.join(60)
    assert status == 0
    assert slow.training


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_leaves_the_mode_that_its_parent_entered() -> None:
    network = nn.Dropout().train()
    with ExitStack() as stack:
        stack.enter_context(evaluating(network))
        process = os.fork()
        if not process:
            with suppress(BaseException):
                stack.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(process, 0)[1] == 0
    assert network.training


def _copy(network: Meeting) -> Meeting:
    alone = Meeting(1).train()
    alone.load_state_dict(network.state_dict())
    return alone


def test_modes_come_back_when_the_last_has_left() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    network[1].eval()
    outer = evaluating(network)
    with outer:
        with evaluating(network[0]):
            assert not network[0].training
        assert not network[0].training
    assert network[0].training
    assert network.training
    assert not network[1].training


def test_policies_and_modules_answer_sixteen_threads_alike(policy: Policy) -> None:
    rng = np.random.default_rng(1)
    predictions = ViewPredictions(rng.normal(size=(50, 2, 3)), names=[view.name for view in VIEWS])
    expected = policy.predict(predictions).proba  # type: ignore[union-attr]
    for proba in in_threads(16, lambda _: policy.predict(predictions).proba):  # type: ignore[union-attr]
        np.testing.assert_array_equal(proba, expected)
    inputs = torch.randn(20, 4)
    module = TTAModule(_copy(Meeting(1)), VIEWS, policy).train()

    def answer(_: Any) -> torch.Tensor:
        with torch.no_grad():  # a mode of the thread; with gradients the softmax rounds in another order
            return module(inputs)  # type: ignore[no-any-return]

    alone = answer(0)
    vars(module.network).update(barrier=threading.Barrier(16), seen=threading.local())
    for result in in_threads(16, answer):
        torch.testing.assert_close(result, alone, rtol=0, atol=0)


class Slow(nn.Module):
    """Draws from torch's generator some time after it was seeded."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return batch + torch.rand_like(batch)


def test_views_of_other_libraries_draw_the_same_in_all_threads() -> None:
    view = as_view(Slow(), "slow", stochastic=True)
    inputs = torch.zeros(4, 3)
    alone = view(inputs, RowStreams(0, "slow", 0, range(4)))
    assert len(alone.unique()) == 12
    for drawn in in_threads(16, lambda _: view(inputs, RowStreams(0, "slow", 0, range(4)))):
        assert torch.equal(drawn, alone)


class Rows(Dataset[Any]):
    """Predicts in the worker that loads a row."""

    def __init__(self, policy: Policy, module: nn.Module, inputs: torch.Tensor) -> None:
        self.policy, self.module, self.inputs = policy, module, inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = self.module(self.inputs[place : place + 1])[0]
            return output


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_of_a_loader_answer_alike(policy: Policy) -> None:
    torch.set_num_threads(1)
    inputs = torch.randn(8, 4)
    module = TTAModule(_copy(Meeting(1)), VIEWS, policy)
    rows = Rows(policy, module, inputs)
    expected = torch.stack([rows[place] for place in range(8)])
    loader = DataLoader(rows, batch_size=2, num_workers=2, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)
