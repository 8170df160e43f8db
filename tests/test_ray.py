"""The same jobs on a cluster of several nodes on this machine: the same answers, whatever is lost on the way."""

import io
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from machines import STORE, patiently
from vbtta import (
    EM,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    Policy,
    ViewPredictions,
    collect_views,
    fit_policy,
)
from vbtta.augment import GaussianNoise, Identity
from vbtta.data.files import open_chunks, prediction_table, read_predictions
from vbtta.fit import fit_sample
from vbtta.inference.em import join, nodes, total
from vbtta.ray import collect_views as collect_on_cluster
from vbtta.ray import fit_policy as fit_on_cluster
from vbtta.ray import predict as predict_on_cluster
from vbtta.ray.cluster import Tasks, WorkerError
from vbtta.ray.collect import Job, collect_piece, pieces_of, read_batches, read_inputs
from vbtta.ray.fit import Calibration, Parts
from vbtta.ray.predict import Worker

pytestmark = [
    pytest.mark.slow,
    # Ray's own
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

NAMES = ("identity", "shrunk", "noisy", "useless")


class Machines:
    """A head and two more nodes, two cores each; nodes can be added and killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        patience = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}
        head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False, "_system_config": patience}
        self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address = self.cluster.address

    def add(self, name: str) -> Any:
        return patiently(lambda: self.cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={name: 1}))

    def kill(self, node: Any) -> None:
        """End a node's processes, and wait until the cluster knows: it would send a later test's work there."""
        import ray

        self.cluster.remove_node(node, allow_graceful=False)
        while any(each["NodeID"] == node.node_id and each["Alive"] for each in ray.nodes()):
            time.sleep(0.2)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else a busy machine starves the workers
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Machines()
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        cluster.add("second")
        yield cluster
        ray.shutdown()
        cluster.cluster.shutdown()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of little data."""
    monkeypatch.setattr("vbtta.inference.em._ENTRIES", 1 << 10)
    monkeypatch.setattr("vbtta.models.parts.class_data._ENTRIES", 1 << 11)


def numbers(n: int = 6000, seed: int = 0) -> tuple[ViewPredictions, LabelSets]:
    """Four views of a number; some instances have two labels and some none."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=n)
    f = truth[:, None] * np.array([1.0, 0.7, 1.0, 0.0]) + rng.normal(size=(n, 4)) * np.array([0.3, 0.3, 0.6, 1.0])
    rows = np.concatenate([rng.permutation(n)[: 4 * n // 5], rng.permutation(n)[: n // 5]])
    second = np.arange(len(rows)) >= 4 * n // 5  # by somebody else than the first
    people = np.array(["ann", "bob", "eve"])[(rows + second) % 3]
    value = truth[rows] + np.where(people == "ann", 0.1, 0.4) * rng.normal(size=len(rows))
    predictions = ViewPredictions(f[:, :, None], 0.1 * rng.gamma(1.0, size=(n, 4, 1)), names=NAMES, ids=np.arange(n))
    return predictions, LabelSets.from_table(rows, value, people)


def classes(n: int = 4000, seed: int = 0) -> tuple[ViewPredictions, LabelSets]:
    """Four views of three classes and two noisy labels each."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, n)
    logits = rng.normal(size=(n, 4, 3)) + np.array([2.5, 1.5, 1.0, 0.0])[:, None] * np.eye(3)[truth][:, None]
    votes = np.where(rng.random((n, 2)) < 0.85, truth[:, None], rng.integers(0, 3, (n, 2)))
    predictions = ViewPredictions(logits, 0.1 * rng.gamma(1.0, size=logits.shape), names=NAMES, ids=np.arange(n))
    return predictions, LabelSets.from_array(votes, annotators=["ann", "bob"])


def write(folder: Path, predictions: ViewPredictions, n_files: int = 3) -> Path:
    """Predictions as `collect_views` writes them, in files of unequal size with small row groups."""
    folder.mkdir()
    edges = np.linspace(0, 1, n_files + 1) ** 1.5 * len(predictions)
    for number, (start, stop) in enumerate(zip(edges[:-1].astype(int), edges[1:].astype(int), strict=True)):
        part = predictions.take(slice(start, stop))
        assert part.ids is not None
        pq.write_table(prediction_table(part), folder / f"part-{number}.parquet", row_group_size=700)
    return folder


def write_labels(path: Path, labels: LabelSets) -> Path:
    columns = {"instance": labels.instance, "label": labels.value}
    if labels.annotator is not None:
        columns["annotator"] = np.array(labels.annotator_names)[labels.annotator]
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


def assert_same(policy: Policy, expected: Policy, predictions: ViewPredictions) -> None:
    np.testing.assert_allclose(policy.weights, expected.weights, atol=1e-8)
    for ours, theirs in zip(policy.members or [policy], expected.members or [expected], strict=True):
        assert ours.elbo == pytest.approx(theirs.elbo, abs=1e-8 * abs(theirs.elbo))
    np.testing.assert_allclose(policy.weight_interval(0.9), expected.weight_interval(0.9), atol=1e-8)
    assert policy.n_steps == expected.n_steps
    prediction, other = policy.predict(predictions), expected.predict(predictions)
    for name in ("mean", "variance", "proba"):
        if hasattr(other, name):
            np.testing.assert_allclose(getattr(prediction, name), getattr(other, name), atol=1e-8)


# -- sums -----------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=6), st.integers(0, 2**32 - 1))
def test_sums_do_not_depend_on_who_adds(n: int, cuts: list[int], seed: int) -> None:
    values = list(np.random.default_rng(seed).normal(size=(n, 3)) * 10.0 ** np.arange(-8, 9, 8))

    def function(value: np.ndarray) -> tuple[np.ndarray, None]:
        return value, None

    edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
    parts = [node for start, stop in pairwise(edges) for node in nodes(function, values[start:stop], start)]
    expected = total(function, values)
    np.testing.assert_array_equal(join(parts)[0], expected[0])  # to the last bit
    np.testing.assert_allclose(expected[0], np.sum(values, axis=0), rtol=1e-12, atol=1e-7)
    assert expected[1] is None


# -- fitting --------------------------------------------------------------------------------------


def test_weights_bound_and_predictions_are_those_of_memory(
    machines: Machines, small_blocks: None, tmp_path: Path
) -> None:
    few, fewer = EM(max_steps=8, tol=0), EM(max_steps=3, tol=0)  # equal at every step
    plain, careful = GaussianMixture(noise="none"), GaussianMixture(heteroscedastic=True)
    probit = CategoricalMixture(link="probit", noise="none")
    regression = [(plain, EM()), (careful, few), (GaussianLatent(), few)]
    classification = [(CategoricalMixture(), few), (probit, fewer), (CategoricalLatent(), fewer)]
    cases: list[Any] = [
        ("regression", numbers(), regression, (1, 3)),
        ("classification", classes(), classification, (2,)),
    ]
    for task, (predictions, labels), models, sizes in cases:
        folder = write(tmp_path / task, predictions)
        expected = [
            fit_policy(predictions, labels, task=task, model=model, engine=engine, guard=False)
            for model, engine in models
        ]
        for n_workers in sizes:
            calibration = Calibration.of(open_chunks(folder), labels, task, Tasks(n_workers, {}))
            for (model, engine), policy in zip(models, expected, strict=True):
                cluster_policy = fit_sample(
                    calibration, task=task, model=model, engine=engine, guard=False, seed=0, progress=False
                )
                assert_same(cluster_policy, policy, predictions.take(slice(0, 50)))
                assert cluster_policy.annotator_names == policy.annotator_names


def test_choice_guard_and_labels_in_files(machines: Machines, tmp_path: Path) -> None:
    """`auto`, the guard's sample and its fallback are those of memory, with labels that only workers read."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=400)
    f = np.stack([truth + 0.1 * rng.normal(size=400), rng.normal(size=400)], axis=1)[:, :, None]
    predictions = ViewPredictions(f, names=["identity", "useless"], ids=np.array([f"i{row:04d}" for row in range(400)]))
    assert predictions.ids is not None
    order = rng.permutation(400)[:300]
    table = pa.table({"instance": predictions.ids[order], "label_1": truth[order], "label_2": [None] * 300})
    pq.write_table(table, tmp_path / "labels.parquet")
    labels = LabelSets.from_table(predictions.ids[order], truth[order])
    folder = write(tmp_path / "views", predictions)
    expected = fit_policy(predictions, labels, task="regression")
    policy = fit_on_cluster(folder, tmp_path / "labels.parquet", task="regression", workers=2)
    assert_same(policy, expected, predictions)
    assert type(policy.model) is type(expected.model)
    assert policy.guard.reason == expected.guard.reason
    strangers = pa.table({"instance": ["i0001", "nobody"], "label": [0.0, 1.0]})
    pq.write_table(strangers, tmp_path / "strangers.parquet")
    with pytest.raises(ValueError, match=r"labels name instance 'nobody'.*\(1 of 2 labels are not\)"):
        fit_on_cluster(folder, tmp_path / "strangers.parquet", task="regression", workers=1)


@pytest.mark.parametrize("lost", ["node", "worker"])
def test_a_loss_during_a_step(
    machines: Machines, small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The answer is that of an undisturbed fit, to the last bit."""
    predictions, labels = numbers()
    options: dict[str, Any] = {"model": "mixture", "engine": EM(max_steps=12, tol=0), "guard": False, "workers": 4}
    folder = write(tmp_path / "views", predictions)
    node, busy = machines.add("doomed"), tmp_path / "busy"
    busy.mkdir()
    expected = fit_on_cluster(folder, labels, task="regression", **options)
    plain, steps = Parts.sum, []

    def interrupted(parts: Parts, function: Callable[[Any], Any], every: int = 1) -> Any:
        steps.append(len(parts.data))
        if len(steps) != 8:
            return plain(parts, function, every)

        def waiting(block: Any) -> Any:
            """Report that the step has begun, and wait until the node or worker is gone."""
            (busy / f"begun-{os.getpid()}").touch()
            while not (busy / "killed").exists():
                time.sleep(0.02)
            return function(block)

        def kill_when_all_are_busy() -> None:
            while len(begun := list(busy.glob("begun-*"))) < 4:
                time.sleep(0.02)
            if lost == "node":
                machines.kill(node)
            else:
                os.kill(int(begun[0].name.removeprefix("begun-")), signal.SIGKILL)
            (busy / "killed").touch()

        threading.Thread(target=kill_when_all_are_busy, daemon=True).start()
        return plain(parts, waiting, every)

    monkeypatch.setattr(Parts, "sum", interrupted)
    policy = fit_on_cluster(folder, labels, task="regression", **options)
    assert (busy / "killed").exists()
    assert policy.elbo == expected.elbo
    np.testing.assert_array_equal(policy.weights, expected.weights)
    np.testing.assert_array_equal(policy.weight_interval(0.9), expected.weight_interval(0.9))
    assert_same(policy, fit_policy(predictions, labels, task="regression", **without_workers(options)), predictions)
    if lost == "worker":
        machines.kill(node)


def without_workers(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "workers"}


# -- collecting -----------------------------------------------------------------------------------


def inputs_in_files(folder: Path, n: int) -> np.ndarray:
    inputs = np.random.default_rng(0).normal(size=(n, 5))
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(n), [n // 5, n // 2])):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(inputs[rows].ravel()), 5)
        pq.write_table(pa.table({"inputs": lists}), folder / f"in-{number}.parquet", row_group_size=100)
    return inputs


def test_a_node_killed_during_collection(machines: Machines, tmp_path: Path) -> None:
    """Every row once, the draws those of memory; then a rerun finds all parts, and one that is missing is made."""
    inputs = inputs_in_files(tmp_path / "inputs", 1500)
    weights = np.random.default_rng(1).normal(size=(5, 2))
    views = [Identity(), GaussianNoise(0.2)]

    node, out, killed = machines.add("mortal"), tmp_path / "out", tmp_path / "killed"

    def make(interrupted: bool = True) -> Any:
        def model(batch: np.ndarray) -> np.ndarray:
            while interrupted and len(list(out.glob("*.parquet"))) >= 2 and not killed.exists():
                time.sleep(0.02)  # two parts are there: the others wait until the node is gone
            return batch @ weights

        return model

    expected = collect_views(make(False), inputs, views, draws=3, seed=7)

    def kill_when_busy() -> None:
        while len(list(out.glob("*.parquet"))) < 2:
            time.sleep(0.02)
        machines.kill(node)
        killed.touch()

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    options: dict[str, Any] = {"draws": 3, "seed": 7, "batch_size": 64, "key": "a"}
    collection = collect_on_cluster(make, tmp_path / "inputs", views, out, workers=4, **options)
    killer.join()
    assert (collection.n_instances, collection.n_parts, collection.n_reused) == (1500, 16, 0)
    loaded = collection.load()
    assert loaded.ids is not None
    assert loaded.variance is not None
    assert expected.variance is not None
    np.testing.assert_array_equal(loaded.ids, np.arange(1500))
    np.testing.assert_allclose(loaded.outputs, expected.outputs, atol=1e-12)
    np.testing.assert_allclose(loaded.variance, expected.variance, atol=1e-12)
    assert loaded.names == expected.names
    assert loaded.fingerprints == expected.fingerprints

    again = collect_on_cluster(make, tmp_path / "inputs", views, out, **options)
    assert again.n_reused == 16
    parts = sorted(out.glob("*.parquet"))
    before = {path: path.stat().st_mtime_ns for path in parts}
    parts[3].unlink()
    again = collect_on_cluster(make, tmp_path / "inputs", views, out, workers=1, **options)
    assert again.n_reused == 15
    assert [path for path in parts if path.stat().st_mtime_ns != before[path]] == [parts[3]]
    np.testing.assert_array_equal(again.load().outputs, loaded.outputs)
    data = bytearray(parts[5].read_bytes())
    data[len(data) // 2] ^= 1  # within a page: the footer is whole
    parts[5].write_bytes(data)
    with pytest.warns(UserWarning, match=rf"{parts[5].name} is damaged .*set aside .* and made again"):
        again = collect_on_cluster(make, tmp_path / "inputs", views, out, workers=1, **options)
    assert again.n_reused == 15
    np.testing.assert_array_equal(again.load().outputs, loaded.outputs)
    for changed in ({"seed": 8}, {"key": "b"}):
        with pytest.raises(ValueError, match="holds predictions of other inputs, views, options or another key"):
            collect_on_cluster(make, tmp_path / "inputs", views, out, **{**options, **changed})


def test_a_worker_that_dies_is_replaced(machines: Machines, tmp_path: Path) -> None:
    inputs, died = inputs_in_files(tmp_path / "inputs", 20), tmp_path / "died"

    def make() -> Any:
        def model(batch: np.ndarray) -> np.ndarray:
            if not died.exists():
                died.touch()
                os._exit(1)
            return batch[:, :1]

        return model

    collection = collect_on_cluster(make, tmp_path / "inputs", [Identity()], tmp_path / "out", key="a", workers=1)
    assert died.exists()
    np.testing.assert_array_equal(collection.load().outputs[:, 0], inputs[:, :1])


def test_parts_that_have_begun_are_finished_after_an_error(machines: Machines, tmp_path: Path) -> None:
    inputs = inputs_in_files(tmp_path / "inputs", 20)
    begun, failed, out = tmp_path / "begun", tmp_path / "failed", tmp_path / "out"

    def make() -> Any:
        def model(batch: np.ndarray) -> np.ndarray:
            if np.array_equal(batch[0], inputs[0]):  # the first file: fails while the second is worked on
                while not begun.exists():
                    time.sleep(0.02)
                raise OSError("no such luck")
            begun.touch()
            while not failed.exists():
                time.sleep(0.02)
            return batch[:, :1]

        return model

    with pytest.raises(RuntimeError, match="no such luck"):
        collect_on_cluster(make, tmp_path / "inputs", [Identity()], out, key="a", workers=2)
    failed.touch()
    for _ in range(3000):  # a minute at most, on a busy machine
        if list(out.glob("part-*.parquet")):
            break
        time.sleep(0.02)
    assert [path.name[:12] for path in out.glob("part-*.parquet")] == ["part-0000001"]


def test_what_is_wrong_with_a_model_is_said(machines: Machines, tmp_path: Path) -> None:
    inputs_in_files(tmp_path / "inputs", 20)

    def make() -> Any:
        return lambda batch: np.full((len(batch), 1), np.nan)

    with pytest.raises(ValueError, match=r"in-0\.parquet, rows 0 to 4: the model returned nan for input 0"):
        collect_on_cluster(make, tmp_path / "inputs", [Identity()], tmp_path / "out", key="a", workers=1)
    assert not list((tmp_path / "out").glob("*.parquet"))


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def sums() -> Callable[[np.ndarray], np.ndarray]:
    return lambda batch: batch.sum(axis=1)


def growing() -> Callable[[np.ndarray], np.ndarray]:
    """A model with more outputs for later inputs."""
    return lambda batch: np.zeros((len(batch), 1 + int(batch[0, 0])))


class UnsendableError(Exception):
    def __init__(self, first: str, other: str) -> None:
        super().__init__(first + other)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        (raising(KeyError("weights")), RuntimeError, "^predictor_factory raised KeyError: 'weights'$"),
        (
            lambda: raising(UnsendableError("a", "b")),
            RuntimeError,
            "the predictor or a view raised Unsendable",
        ),
        (lambda: 3, RuntimeError, "^predictor_factory raised TypeError: predictor must be a torch .*; got int$"),
        (sums, ValueError, r"in\.parquet, rows 0 to 4: ids must differ .*'7' occurs more than once"),
        (growing, ValueError, r"rows 0 to 4: parts have different numbers of outputs: \[1, 3\]"),
    ],
)
def test_a_worker_says_what_failed(tmp_path: Path, factory: Any, kind: type[Exception], message: str) -> None:
    from ray import cloudpickle

    ids = [7, 8, 9, 7 if "occurs" in message else 6]
    pq.write_table(pa.table({"a": np.arange(4.0), "instance": ids}), tmp_path / "in.parquet")
    job = Job(factory, [Identity()], 1, 2, False, None, 0, None, str(tmp_path / "out"), "")
    (tmp_path / "out").mkdir()
    with pytest.raises(kind, match=message) as raised:
        collect_piece(message, cloudpickle.dumps(job), pieces_of(tmp_path / "in.parquet")[0])
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert not list((tmp_path / "out").iterdir())


def test_errors_of_workers_are_short(machines: Machines, tmp_path: Path) -> None:
    """Not Ray's, whose traceback is the cause."""
    inputs_in_files(tmp_path / "inputs", 20)
    with pytest.raises(RuntimeError, match=r"^predictor_factory raised FileNotFoundError: weights\.pt$") as caught:
        collect_on_cluster(
            raising(FileNotFoundError("weights.pt")),
            tmp_path / "inputs",
            [Identity()],
            tmp_path / "out",
            key="a",
            workers=1,
        )
    assert isinstance(caught.value.__cause__, WorkerError)

    def fail(error: Exception | None) -> None:
        if error is None:
            os._exit(1)
        raise error

    with pytest.raises(ValueError, match=r"worker_options are not what ray\.remote takes: .*nonsense"):
        Tasks(1, {"nonsense": 1}).start(fail, [])
    with pytest.warns(UserWarning, match="until a node joins that has what one needs: 1 CPU, 8 GPU"):
        Tasks(1, {"num_gpus": 8})
    tasks = Tasks(1, {"max_retries": 0})
    with pytest.raises(KeyError, match=r"^'x'$") as lookup:
        tasks.results(fail, [(KeyError("x"),)])
    assert isinstance(lookup.value.__cause__, WorkerError)
    with pytest.raises(RuntimeError, match=r"^a worker failed, and so did those that took over: ") as dead:
        tasks.results(fail, [(None,)])
    assert "\n" not in str(dead.value)


@pytest.mark.parametrize("value", ["abc", "nan", "-1", "0", ""])
def test_a_limit_of_time_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VBTTA_RAY_TIMEOUT", value)
    expected = f"VBTTA_RAY_TIMEOUT must be a positive number of seconds; got {value!r}"
    with pytest.raises(ValueError, match=expected):
        Tasks(1, {})


def test_silence_ends_a_call(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VBTTA_RAY_TIMEOUT", "0.2")
    with pytest.raises(RuntimeError, match=r"no worker has answered in 0 s: .*VBTTA_RAY_TIMEOUT"):
        Tasks(1, {}).results(lambda: time.sleep(30), [()])


LOCAL = """
from vbtta.ray.cluster import connect
ray = connect("local")
print(ray.nodes()[0]["NodeManagerAddress"])
"""


def test_a_local_start_is_on_the_loopback_interface() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOCAL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["127.0.0.1"]


# -- a driver that is killed ------------------------------------------------------------------------

MORTAL = """
import json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np, ray
from vbtta import EM
from vbtta.augment import GaussianNoise, Identity
from vbtta.ray import collect_views, fit_policy
from vbtta.ray.fit import Parts

address, inputs, labels, out, dies = sys.argv[1:]
ray.init(address=address, logging_level="error", log_to_driver=False)

def make():
    def model(batch):
        while dies == "collecting" and len(list(Path(out).glob("*.parquet"))) >= 2:
            time.sleep(0.02)  # the driver dies when two parts are there
        return batch @ np.arange(1.0, 6.0)[:, None]
    return model

def die_when_two_parts_are_there():
    while len(list(Path(out).glob("*.parquet"))) < 2:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)

plain, steps = Parts.sum, []

def mortal(*arguments):
    steps.append(1)
    if len(steps) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)

if dies == "collecting":
    threading.Thread(target=die_when_two_parts_are_there, daemon=True).start()
if dies == "fitting":
    Parts.sum = mortal
found = collect_views(make, inputs, [Identity(), GaussianNoise(0.2)], out, key="sum", draws=2, workers=2)
policy = fit_policy(out, labels, task="regression", model="mixture", engine=EM(max_steps=12, tol=0), guard=False,
                    workers=2)
numbers = [policy.elbo, *policy.weights, *policy.weight_interval(0.9).ravel(), found.load().outputs.sum()]
print(json.dumps({"reused": found.n_reused, "numbers": [float(value).hex() for value in numbers]}))
"""


def test_a_driver_that_is_killed_and_restarted(machines: Machines, tmp_path: Path) -> None:
    """Killed while views are collected and again while weights are fitted; the answer is equal to the last bit."""
    x = inputs_in_files(tmp_path / "inputs", 600)
    value = x @ np.arange(1.0, 6.0) + np.random.default_rng(2).normal(size=600)
    labels = write_labels(tmp_path / "labels.parquet", LabelSets.from_table(np.arange(600), value))

    def run(out: str, dies: str = "") -> Any:
        paths = [str(path) for path in (tmp_path / "inputs", labels, tmp_path / out)]
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MORTAL, machines.address, *paths, dies],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    undisturbed = json.loads(run("whole").stdout.splitlines()[-1])
    assert run("parts", "collecting").returncode == -signal.SIGKILL
    assert run("parts", "fitting").returncode == -signal.SIGKILL
    document = json.loads(run("parts").stdout.splitlines()[-1])
    assert document["reused"] == 7
    assert document["numbers"] == undisturbed["numbers"]
    for path in (tmp_path / "whole").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()


# -- the driver's memory --------------------------------------------------------------------------

DRIVER = """
import json, resource, sys
import numpy as np, ray
from vbtta import EM, GaussianMixture
from vbtta.augment import Identity
from vbtta.ray import collect_views, fit_policy

def make():
    return lambda batch: batch @ np.array([[1.0], [0.2]])

address, inputs, labels, out = sys.argv[1:]
ray.init(address=address, logging_level="error", log_to_driver=False)
collected = collect_views(make, inputs, [Identity(), Identity(name="again")], out, key="sum", workers=2,
                          batch_size=16384)
policy = fit_policy(out, labels, task="regression", model=GaussianMixture(), engine=EM(max_steps=2, tol=0),
                    guard=False, workers=2)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"kilobytes": peak, "instances": collected.n_instances, "weights": policy.weights.tolist()}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_of_the_driver_is_flat(machines: Machines, tmp_path: Path) -> None:
    """Within 50 MB from 1e5 to 1e6 instances of which 1e4 have labels, collecting and fitting."""
    rng, peaks = np.random.default_rng(0), {}
    for n in (100_000, 1_000_000):
        columns = {"a": rng.normal(size=n), "b": rng.normal(size=n)}
        pq.write_table(pa.table(columns), tmp_path / f"inputs-{n}.parquet", row_group_size=65536)
        labelled = np.sort(rng.permutation(n)[:10_000])
        labels = LabelSets.from_table(labelled, columns["a"][labelled] + 0.1 * rng.normal(size=10_000))
        write_labels(tmp_path / f"labels-{n}.parquet", labels)
        files = (f"inputs-{n}.parquet", f"labels-{n}.parquet", f"out-{n}")
        paths = [str(tmp_path / file) for file in files]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DRIVER, machines.address, *paths],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        document = json.loads(done.stdout.splitlines()[-1])
        assert document["instances"] == n
        peaks[n] = document["kilobytes"] / 1000
    assert peaks[1_000_000] - peaks[100_000] < 50


# -- the command line, data of other kinds, and errors --------------------------------------------


def test_commands(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vbtta.cli.app import app

    monkeypatch.chdir(tmp_path)
    Path("cluster_model.py").write_text(
        "import numpy as np\n\ndef make():\n    return lambda batch: batch @ np.ones((2, 1))\n"
    )
    Path("views.toml").write_text('[[views]]\nview = "Identity"\n\n[[views]]\nview = "GaussianNoise"\nstd = 0.5\n')
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1]}), "inputs.parquet")
    pq.write_table(pa.table({"instance": np.arange(300), "label": x.sum(axis=1)}), "labels.parquet")

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, list(args))
        assert done.exit_code == 0, done.stderr
        return done.stdout

    views = ["views", "--predictor", "cluster_model:make", "--data", "inputs.parquet", "--views", "views.toml"]
    collection = json.loads(run(*views, "--out", "preds", "--backend", "ray", "--key", "a", "--workers", "1", "--json"))
    assert (collection["inputs"], collection["parts"], collection["parts_found"]) == (300, 1, 0)
    run(*views, "--out", "preds.npz")
    fit = ["--task", "regression", "--model", "mixture", "--json", "--out"]
    on_cluster = ["--backend", "ray", "--workers", "1"]
    document = json.loads(run("fit", "preds", "labels.parquet", *fit, "ray.json", *on_cluster))
    expected = json.loads(run("fit", "preds.npz", "labels.parquet", *fit, "local.json"))
    assert document["views"] == expected["views"]
    wrong = CliRunner().invoke(app, ["fit", "preds", "labels.parquet", *fit, "x.json", *on_cluster, "--budget", "1"])
    assert wrong.exit_code == 2
    assert "leave out --backend ray" in wrong.stderr


def test_a_ray_data_set_is_written_first(machines: Machines, tmp_path: Path) -> None:
    from ray import data

    dataset = data.from_arrow(pa.table({"a": [1.0]}))
    with pytest.raises(ValueError, match=r"dataset\.write_parquet\(folder\), and give the folder"):
        collect_on_cluster(sums, dataset, [Identity()], tmp_path / "out", key="a")
    with pytest.raises(ValueError, match=r"dataset\.write_parquet\(folder\), and give the folder"):
        fit_on_cluster(dataset, [1.0], task="regression")


def test_a_policy_predicts_a_ray_data_set(machines: Machines, tmp_path: Path) -> None:
    from ray import data

    def linear_model() -> Callable[[Any], Any]:  # sent to the workers by value: they cannot import the tests
        return lambda batch: np.asarray(batch) @ np.array([[2.0], [1.0]])

    x = np.random.default_rng(0).normal(size=(300, 2))
    views = [Identity(), GaussianNoise(0.5)]
    options = {"draws": 3, "seed": 5}
    predictions = collect_views(linear_model(), x, views, **options)
    policy = fit_policy(predictions, predictions.outputs.mean(axis=1), task="regression", guard=False)
    assert len(policy.used_names) == 2
    expected = policy.predict(predictions).columns(0.8)
    table = pa.table({"instance": np.arange(300), "inputs": x.tolist(), "site": ["north"] * 300}).take(
        np.random.default_rng(1).permutation(300)
    )
    predict = partial(predict_on_cluster, linear_model, views=[*views, GaussianNoise(9.0)], policy=policy, level=0.8)
    frame = predict(dataset=data.from_arrow(table).repartition(4), batch_size=32, workers=2, **options).to_pandas()
    frame = frame.sort_values("instance")
    assert list(frame) == ["instance", "site", "mean", "std", "lower", "upper"]
    for name, values in expected.items():
        np.testing.assert_allclose(frame[name], values, atol=1e-9)
    with pytest.raises(ValueError, match="needs a column 'instance', by which noise"):
        predict(dataset=data.from_arrow(table.drop_columns("instance")))
    truth = data.from_arrow(table.append_column("mean", pa.array(np.zeros(300))))
    with pytest.raises(ValueError, match=r"dataset has the column 'mean', which predictions have, too: rename it"):
        predict(dataset=truth)
    with pytest.raises(ValueError, match=r"needs the views \['noise\(0.5\)'\]"):
        predict_on_cluster(linear_model, data.from_arrow(table), [Identity()], policy)
    with pytest.raises(ValueError, match=r"predictor_factory must take \(\): 3 is not a callable object"):
        predict_on_cluster(3, data.from_arrow(table), views, policy)


def test_a_policy_predicts_images_in_files(machines: Machines, tmp_path: Path) -> None:
    pictures, sizes = [], np.arange(40) % 5
    for size in sizes:
        image, file = np.zeros((8, 8, 3), dtype=np.uint8), io.BytesIO()
        image[:, :size] = 255
        Image.fromarray(image).save(file, format="PNG")
        pictures.append(file.getvalue())
    names = [f"picture {row}" for row in range(40)]
    pq.write_table(pa.table({"instance": names, "image": pictures}), tmp_path / "images.parquet")
    outputs = np.stack([-np.abs(sizes - wanted) for wanted in range(5)], axis=1).astype(float)
    predictions = ViewPredictions(np.stack([outputs, outputs], axis=1), names=["identity", "noise(0.1)"])
    policy = fit_policy(predictions, sizes, task="classification", guard=False)

    def make() -> Callable[[Any], Any]:
        return lambda batch: -np.abs(8 * batch.mean(axis=(1, 2, 3))[:, None] - np.arange(5))

    from ray import data

    views = [Identity(), GaussianNoise(0.1)]
    arrays = [
        {"instance": name, "image": np.asarray(Image.open(io.BytesIO(file)))}
        for name, file in zip(names, pictures, strict=True)
    ]
    for path in (tmp_path, [tmp_path / "images.parquet"], data.from_items(arrays)):
        frame = predict_on_cluster(make, path, views, policy, batch_size=16, workers=1).to_pandas()
        assert frame["instance"].tolist() == names
        assert (frame["label"] == sizes).mean() > 0.9
        np.testing.assert_allclose(frame[[f"proba_{c}" for c in range(5)]].sum(axis=1), 1)


def test_the_example_predicts_on_workers(machines: Machines) -> None:
    path = Path(__file__).parents[1] / "examples" / "ray_predict.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40
    ran = runpy.run_path(str(path), run_name="__main__")  # workers get functions of a program by value
    assert ran["accuracy"] > 0.9
    predictions = collect_views(ran["make"](), ran["inputs"][ran["test"]], ran["views"][:1])
    alone = (predictions.outputs[:, 0].argmax(axis=1) == ran["labels"][ran["test"]]).mean()
    assert ran["accuracy"] > alone - 0.02


def test_files_that_do_not_name_their_views(tmp_path: Path) -> None:
    numbered = ViewPredictions(np.zeros((5, 2, 1)), ids=np.arange(5))
    numbered.save(tmp_path / "numbered.npz")
    with pytest.raises(ValueError, match=r"numbered\.npz is not a parquet file: .*\.save\('views\.parquet'\)"):
        open_chunks(tmp_path / "numbered.npz")
    assert open_chunks(write(tmp_path / "numbered", numbered, 1))[0].empty.names == ("view_0", "view_1")
    pq.write_table(pa.table({"outputs": [[1.0, 2.0]]}), tmp_path / "lists.parquet")
    with pytest.raises(ValueError, match=r"lists\.parquet does not say which views it holds: save it with"):
        open_chunks(tmp_path / "lists.parquet")


def test_weights_and_groups_on_the_way(machines: Machines, tmp_path: Path) -> None:
    """Instance weights of label files and groups of predictions reach the workers."""
    predictions, _ = numbers(300)
    grouped = ViewPredictions(predictions.outputs, names=NAMES, ids=predictions.ids, groups=np.arange(300) // 10)
    chunks = open_chunks(write(tmp_path / "views", grouped))
    np.testing.assert_array_equal(np.concatenate([chunk.read().groups for chunk in chunks]), grouped.groups)
    predictions.save(tmp_path / "plain.parquet")
    assert all(chunk.read().groups is None for chunk in open_chunks(tmp_path / "plain.parquet"))
    series = pd.Series(np.arange(300.0), index=pd.Index(np.arange(300), name="id")).sample(frac=1, random_state=0)
    labels = LabelSets.from_array(series).with_weights(1.0 + series)
    labels.save(tmp_path / "labels.parquet")
    rows = np.arange(100, 220)
    for sets in (LabelSets.load(tmp_path / "labels.parquet"), labels):
        with pytest.warns(UserWarning, match="predictions have groups: on a cluster weight intervals"):
            share = Calibration.of(chunks, sets, "regression", Tasks(1, {}))
        part, of_part = share.take(rows)
        np.testing.assert_array_equal(part.outputs, grouped.outputs[rows])
        np.testing.assert_array_equal(of_part.instance_weights, 1.0 + rows)
        np.testing.assert_array_equal(of_part.value, rows)


def test_inputs_of_tables() -> None:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (4, 3), (255, 0, 0)).save(file, "PNG")
    images = read_inputs(pa.table({"image": [{"bytes": file.getvalue(), "path": None}] * 2}))
    assert images.shape == (2, 3, 3, 4)
    np.testing.assert_array_equal(images[:, 0], 1.0)
    pixels = np.zeros((2, 3, 4, 3), dtype=np.uint8)
    pixels[..., 0] = 255
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    for column in (tensors, pa.array(pixels.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))))):
        np.testing.assert_array_equal(read_inputs(pa.table({"image": column})), images)
    grey = read_inputs(pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(pixels[..., 0] / 255)}))
    np.testing.assert_array_equal(grey, images[:, :1])
    nested = read_inputs(pa.table({"inputs": [[[1.0, 2.0], [3.0, 4.0]]] * 3}))
    np.testing.assert_array_equal(nested, [[[1.0, 2.0], [3.0, 4.0]]] * 3)
    np.testing.assert_array_equal(
        read_inputs(pa.table({"instance": [7, 8], "a": [1, 2], "b": [3, 4]})), [[1, 3], [2, 4]]
    )
    with pytest.raises(ValueError, match="differ in shape or have gaps; resize or pad them"):
        read_inputs(pa.table({"inputs": [[1.0], [1.0, 2.0, 3.0]]}))
    with pytest.raises(ValueError, match="must be numbers"):
        read_inputs(pa.table({"a": ["x", "y"]}))
    np.testing.assert_array_equal(read_inputs(pa.table({"id": [7, 8], "a": [1, 2]})), [[1], [2]])
    for name in ("image_id", "label", "__index_level_0__"):
        with pytest.raises(ValueError, match=f"column '{name}' is no feature; rename it to 'instance' or leave it out"):
            read_inputs(pa.table({name: [7, 8], "a": [1, 2]}))


def test_a_column_id_holds_the_ids(tmp_path: Path) -> None:
    """As `instance` does, and it is no feature."""
    pq.write_table(pa.table({"id": [12, 11, 10], "a": [1.0, 2.0, 3.0]}), tmp_path / "rows.parquet")
    (piece,) = pieces_of(tmp_path / "rows.parquet")
    ((_, ids, inputs),) = read_batches(piece, 10)
    np.testing.assert_array_equal(ids, [12, 11, 10])
    np.testing.assert_array_equal(inputs, [[1.0], [2.0], [3.0]])


def test_a_large_row_group_is_not_held(tmp_path: Path) -> None:
    """Of 40 MB in one row group, which is one piece, a reader holds little."""
    inputs = np.random.default_rng(0).normal(size=(40_000, 256)).astype(np.float32)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"inputs": pa.FixedSizeListArray.from_arrays(pa.array(inputs.ravel()), 256)}), path)
    [piece] = pieces_of(path)
    assert (piece.start, piece.n_rows) == (0, 40_000)
    before = pa.total_allocated_bytes()
    most = 0
    for first, _, batch in read_batches(piece, 500):
        np.testing.assert_array_equal(batch, inputs[first : first + 500])
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 20e6


def test_every_row_group_with_rows_is_a_piece(tmp_path: Path) -> None:
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    with pq.ParquetWriter(paths[0], pa.schema({"a": pa.float64()})) as writer:
        for n in (3, 0, 2):
            writer.write_table(pa.table({"a": np.arange(float(n))}), row_group_size=3)
    pq.write_table(pa.table({"a": np.arange(5.0)}), paths[1], row_group_size=4)
    pieces = pieces_of(paths)
    assert [(piece.file, piece.start, piece.first, piece.n_rows) for piece in pieces] == [
        (0, 0, 0, 3), (0, 3, 3, 2), (1, 0, 5, 4), (1, 4, 9, 1),
    ]  # fmt: skip
    read = [batch for piece in pieces for batch in read_batches(piece, 2)]
    assert [first for first, *_ in read] == [0, 2, 3, 5, 7, 9]
    assert np.concatenate([ids for _, ids, _ in read]).tolist() == [*range(10)]
    assert np.concatenate([inputs for *_, inputs in read]).ravel().tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]


def test_input_files_that_do_not_match(tmp_path: Path) -> None:
    def both(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
        pq.write_table(pa.table(first), tmp_path / "0.parquet")
        pq.write_table(pa.table(other), tmp_path / "1.parquet")
        return [str(tmp_path / "0.parquet"), str(tmp_path / "1.parquet")]

    with pytest.raises(ValueError, match=r"1\.parquet has the columns b, a, but .*0\.parquet has a, b; give all files"):
        pieces_of(both({"a": [1.0], "b": [1.0]}, {"b": [1.0], "a": [1.0]}))
    with pytest.raises(ValueError, match=r"1\.parquet has the columns a, instance, but .*0\.parquet has a; give"):
        pieces_of(both({"a": [1.0]}, {"a": [1.0], "instance": [7]}))


def test_instances_that_two_files_hold(tmp_path: Path) -> None:
    folder = write(tmp_path / "views", ViewPredictions(np.zeros((5, 2, 1)), ids=np.arange(5)), 1)
    (folder / "again.parquet").write_bytes((folder / "part-0.parquet").read_bytes())
    with pytest.raises(
        ValueError, match=r"dataset: the files of .*views cannot be joined: .*'0' occurs more than once"
    ):
        read_predictions(folder)


def test_errors_name_the_remedy(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"ADVI runs in memory"):
        fit_on_cluster(tmp_path, [1.0], task="regression", engine="advi")
    with pytest.raises(ValueError, match="task must be 'regression' or 'classification' on a cluster"):
        fit_on_cluster(tmp_path, [1.0], task="ranking")
    with pytest.raises(FileNotFoundError, match="all nodes must see it"):
        open_chunks(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no \.parquet files"):
        open_chunks(tmp_path)
    predictions, _ = numbers(50)
    write(tmp_path / "views", predictions)
    with pytest.raises(ValueError, match="labels are for 49 instances but the predictions for 50"):
        fit_on_cluster(tmp_path / "views", np.zeros(49), task="regression")
    with pytest.raises(ValueError, match=r"predictor_factory must take \(\)"):
        collect_on_cluster(object(), tmp_path, [Identity()], tmp_path, key="a")  # type: ignore[arg-type]
    inputs = tmp_path / "inputs.parquet"
    pq.write_table(pa.table({"a": [1.0]}), inputs)
    options: list[dict[str, Any]] = [
        {"workers": "2"}, {"workers": 0}, {"seed": "x"}, {"batch_size": 0}, {"worker_options": 1},
        {"key": b"x"}, {"key": None},
    ]  # fmt: skip
    for option in options:
        with pytest.raises(ValueError, match=f"^{next(iter(option))} must be .*; got"):
            collect_on_cluster(sums, inputs, [Identity()], tmp_path / "out", **{"key": "a", **option})
        if not option.keys() & {"batch_size", "key"}:
            with pytest.raises(ValueError, match=f"^{next(iter(option))} must be .*; got"):
                fit_on_cluster(tmp_path / "views", np.zeros(50), task="regression", **option)
    with pytest.raises(ValueError, match="labels must be given on a cluster"):
        fit_on_cluster(tmp_path, None, task="regression")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dataset must be a path or a list of paths; got 3"):
        collect_on_cluster(sums, 3, [Identity()], tmp_path / "out", key="a")
    lock = threading.Lock()
    with pytest.raises(RuntimeError, match=r"sending predictor_factory and views raised TypeError: cannot pickle"):
        collect_on_cluster(lambda: lock, inputs, [Identity()], tmp_path / "locked", key="a")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "vbtta\[ray\]"'):
        fit_on_cluster(tmp_path, [1.0], task="regression")


def test_workers_replace_columns_and_refuse_gaps_in_ids() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))

    def linear_model() -> Callable[[Any], Any]:
        return lambda batch: batch.sum(axis=1)

    predictions = collect_views(linear_model(), x, [Identity()])
    policy = fit_policy(predictions, predictions.outputs.mean(axis=1), task="regression", guard=False)
    worker = Worker(Job(linear_model, [Identity()], 1, 40, False, None, 0, None, "", ""), policy, 0.9)
    table = pa.table({"inputs": x.tolist(), "mean": np.zeros(40), "instance": np.arange(40)})
    result = worker(table)
    expected = policy.predict(predictions).columns(0.9)
    assert result.column_names == ["instance", *expected]
    np.testing.assert_allclose(result["mean"].to_numpy(), expected["mean"])
    assert len(worker(table.slice(0, 0))) == 0
    gaps = table.set_column(2, "instance", pa.array([None, *range(39)]))
    with pytest.raises(ValueError, match="column 'instance' of dataset has gaps"):
        worker(gaps)
