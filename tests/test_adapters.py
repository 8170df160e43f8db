"""Predictors of every framework behind one protocol, left unchanged, with errors that name the remedy."""

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification, make_regression
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.svm import SVC
from torch import nn

from vbtta import collect_views, fit_policy
from vbtta.adapters import Predictor, as_predictor, log_probability
from vbtta.augment import Identity


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, mask):
        return {"logits": self.linear(x) * mask, "features": x}


@pytest.fixture
def batch():
    return np.random.default_rng(0).normal(size=(5, 3))


def test_torch_module_keeps_every_submodules_mode(batch):
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    network.train()
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model = as_predictor(network)
    with model.ready():
        first, second = model(batch), model(batch)
    np.testing.assert_array_equal(first, second)  # dropout is off
    assert [network.training, network[1].training, network[2].training] == [True, False, True]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_mode_is_restored_after_an_error():
    network = nn.Sequential(nn.Linear(3, 4)).train()
    model = as_predictor(network)
    with pytest.raises(RuntimeError), model.ready():
        model(np.zeros((2, 7)))
    assert network.training


def test_an_exported_module_is_a_model_and_what_surrounds_it_is_evaluated(batch):
    network = nn.Linear(3, 4).eval()
    example = torch.tensor(batch, dtype=torch.float32)
    exported = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    model = as_predictor(nn.Sequential(exported, nn.Dropout(0.5)))
    with model.ready():
        np.testing.assert_allclose(model(batch), network(example).detach().numpy(), atol=1e-6)
    assert model.module[1].training  # type: ignore[attr-defined]


def test_dict_and_tuple_inputs_and_outputs(batch):
    network = TwoHeads()
    mask = np.ones((5, 1))
    by_name = as_predictor(network, "logits")
    expected = network(torch.tensor(batch, dtype=torch.float32), torch.ones(5, 1))["logits"].detach().numpy()
    np.testing.assert_allclose(by_name(by_name.prepare({"x": batch, "mask": mask})), expected)
    np.testing.assert_allclose(by_name(by_name.prepare((batch, mask))), expected)
    np.testing.assert_allclose(as_predictor(network, lambda raw: raw["logits"])((batch, mask)), expected)
    np.testing.assert_allclose(as_predictor(network)((batch, mask)), expected)
    with pytest.raises(ValueError, match="choose one with output="):
        as_predictor(lambda rows: {"classes": rows, "features": rows})(batch)
    with pytest.raises(ValueError, match="'logits', 'features'"):
        as_predictor(network, "logit")((batch, mask))


def test_labels_of_a_batch_are_left_out_and_optional_arguments_are_not_guessed(batch):
    plain = as_predictor(nn.Linear(3, 2))
    assert plain.prepare([batch, np.arange(5)]).shape == (5, 3)

    class Optional(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x)

    with pytest.raises(ValueError, match="give the inputs as a dict"):
        as_predictor(Optional(3, 2)).prepare([batch, np.arange(5)])


def test_wrong_shapes_are_named(batch):
    with pytest.raises(ValueError, match=r"returned shape \(5, 3, 1\) for a batch of 5 rows"):
        as_predictor(lambda x: x[:, :, None])(batch)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) for a batch of 5 rows"):
        as_predictor(lambda x: x[1:])(batch)
    with pytest.raises(ValueError, match="real numbers"):
        as_predictor(lambda x: np.array(["a"] * len(x)))(batch)


def test_a_module_on_no_or_several_devices_is_refused():
    with pytest.raises(ValueError, match="meta device"):
        as_predictor(nn.Linear(3, 2, device="meta"))


def test_estimators_give_logs_decisions_or_predictions(batch):
    X, y = make_classification(60, 4, n_classes=3, n_informative=3, n_redundant=0, random_state=0)
    logistic = LogisticRegression().fit(X, y)
    model = as_predictor(logistic)
    assert model.output_kind == "log_probability"
    np.testing.assert_allclose(np.exp(model(X)), logistic.predict_proba(X))
    np.testing.assert_array_equal(model.classes, [0, 1, 2])
    forest = as_predictor(RandomForestClassifier(5, random_state=0).fit(X, y))
    assert np.isfinite(forest(X)).all()  # probabilities of exactly 0 are floored
    assert as_predictor(RidgeClassifier().fit(X, y)).output_kind == "decision"
    binary = RidgeClassifier().fit(X, y == 0)
    two = as_predictor(binary)(X)
    np.testing.assert_allclose(two[:, 1] - two[:, 0], binary.decision_function(X))
    X, y = make_regression(30, 3, random_state=0)
    line = LinearRegression().fit(X, y)
    np.testing.assert_allclose(as_predictor(line)(X)[:, 0], line.predict(X))
    with pytest.raises(ValueError, match="methods \\['predict'\\]"):
        as_predictor(line, "predict_proba")


def test_estimators_that_cannot_be_used_say_why():
    X, y = make_classification(60, 4, n_classes=3, n_informative=3, n_redundant=0, random_state=0)
    with pytest.raises(ValueError, match="not fitted"):
        as_predictor(LogisticRegression())
    pairs = as_predictor(SVC(decision_function_shape="ovo").fit(X[y < 4], (y + 2 * (X[:, 0] > 0))))
    with pytest.raises(ValueError, match="ovr"):
        pairs(X)


def test_tables_keep_their_column_names():
    pandas = pytest.importorskip("pandas")
    X, y = make_regression(30, 3, random_state=0)
    table = pandas.DataFrame(X, columns=["a", "b", "c"])
    model = as_predictor(LinearRegression().fit(table, y))
    ready = model.prepare(table)
    assert isinstance(ready, np.ndarray)
    model(ready)  # a missing name would be a warning, which is an error here
    with pytest.raises(ValueError, match="fitted to"):
        model.prepare(table[["c", "b", "a"]])


def sum_session(path, rows):
    """x (rows, 3) and scale (rows, 1) to total = x * scale and twice = 2 x, written node by node."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    real = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["total"]), helper.make_node("Add", ["x", "x"], ["twice"])],
        "sums",
        [helper.make_tensor_value_info("x", real, [rows, 3]), helper.make_tensor_value_info("scale", real, [rows, 1])],
        [helper.make_tensor_value_info(name, real, [rows, 3]) for name in ("total", "twice")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


def test_onnx_session(tmp_path, batch):
    runtime = pytest.importorskip("onnxruntime")
    path = sum_session(tmp_path / "model.onnx", "rows")
    scale = np.arange(5.0)[:, None]
    model = as_predictor(path, "total")
    for inputs in ({"x": batch, "scale": scale}, (batch, scale)):
        np.testing.assert_allclose(model(model.prepare(inputs)), batch * scale, atol=1e-6)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(as_predictor(session, 1)((batch, scale)), 2 * batch, atol=1e-6)
    difference = as_predictor(session, lambda outputs: outputs["twice"] - outputs["total"])
    np.testing.assert_allclose(difference((batch, scale)), (2 - scale) * batch, atol=1e-6)
    with pytest.raises(ValueError, match="choose one with output="):
        as_predictor(session)((batch, scale))
    with pytest.raises(ValueError, match="dict of arrays"):
        model.prepare(batch)
    with pytest.raises(ValueError, match="lacks \\['scale'\\]"):
        model.prepare({"x": batch})
    fixed = as_predictor(sum_session(tmp_path / "fixed.onnx", 4), "total")
    with pytest.raises(ValueError, match="exactly 4 rows"):
        fixed((batch, scale))
    with pytest.raises(FileNotFoundError, match="no ONNX file"):
        as_predictor(tmp_path / "absent.onnx")


def test_dispatch_refuses_what_is_no_model():
    assert isinstance(as_predictor(lambda x: x), Predictor)
    again = as_predictor(lambda x: x)
    assert as_predictor(again) is again
    with pytest.raises(ValueError, match="only once"):
        as_predictor(again, 0)
    with pytest.raises(TypeError, match="not a class"):
        as_predictor(LinearRegression)
    with pytest.raises(TypeError, match="must be a torch module"):
        as_predictor(3)
    with pytest.raises(ValueError, match="for torch modules"):
        as_predictor(lambda x: x, device="cpu")


def test_log_probability_of_tensors_and_arrays_agree():
    values = np.array([[0.0, 0.25, 0.75]])
    np.testing.assert_allclose(log_probability(torch.tensor(values)).numpy(), log_probability(values))
    proba = np.exp(log_probability(np.array([[0.0, 0.25, 0.75], [0.0, 0.001, 0.999], [0.0, 1e-9, 1.0]])))
    np.testing.assert_allclose(proba[:, 0], [0.05 / 3, 0.001, 1e-7])  # never above another class of the row
    broken = np.array([[np.nan, 0.5, 0.5]])
    assert np.isnan(log_probability(broken)[0, 0])
    assert torch.isnan(log_probability(torch.tensor(broken))[0, 0])
    assert as_predictor(lambda x: x, log_probability).output_kind == "log_probability"


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("torch", "vbtta.adapters.torch", "torch"),
        ("torch", "vbtta.module", "torch"),
        ("sklearn", "vbtta.estimators", "cli"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, package, module, extra):
    monkeypatch.setitem(sys.modules, package, None)
    for name in list(sys.modules):
        if name in (module, "vbtta.adapters.torch") or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf'{package} is needed .* pip install "vbtta\[{extra}\]"'):
        importlib.import_module(module)


def test_a_missing_onnx_runtime_is_named(monkeypatch, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "vbtta\[onnx\]"'):
        as_predictor(path)


class Named(nn.Module):
    def forward(self, x, scale=2.0):
        return x * scale


def test_keys_that_forward_does_not_take_are_left_out():
    batch = {"x": torch.ones(2, 1), "labels": torch.zeros(2)}
    np.testing.assert_array_equal(as_predictor(Named())(batch), [[2.0], [2.0]])
    whole = as_predictor(lambda batch: batch["x"])  # a function takes the dict as it is
    np.testing.assert_array_equal(whole(batch), [[1.0], [1.0]])


def test_a_module_that_takes_a_dict_still_gets_all_of_it():
    class Whole(nn.Module):
        def forward(self, batch):
            return batch["x"] + batch["labels"][:, None]

    batch = {"x": torch.ones(2, 1), "labels": torch.ones(2)}
    np.testing.assert_array_equal(as_predictor(Whole())(batch), [[2.0], [2.0]])


@pytest.mark.parametrize(
    ("names", "known"),
    [
        ({1: "dog", 0: "cat", 2: "cow"}, ["cat", "dog", "cow"]),
        ({0: "0", 1: "1", 2: "2"}, ["0", "1", "2"]),
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, None),  # what transformers has where nobody named them
        ({0: "1", 1: "2", 2: "3"}, None),  # whole numbers as labels would be read as these names
        ({0: "cat", 1: "dog"}, None),  # of other outputs
        ({}, None),
    ],
)
def test_classes_that_a_configuration_names(names, known):
    network = nn.Linear(4, 3)
    network.config = SimpleNamespace(id2label=names)  # type: ignore[assignment]
    x = torch.randn(30, 4)
    predictions = collect_views(network, x, [Identity()])
    assert (None if predictions.classes is None else predictions.classes.tolist()) == known
    collected = collect_views(network, x, [Identity()], classes=["a", "b", "c"])
    assert collected.classes.tolist() == ["a", "b", "c"]
    labels = predictions.outputs[:, 0].argmax(axis=1)  # positions
    policy = fit_policy(predictions, labels, task="classification", model="mixture", guard=False)
    np.testing.assert_array_equal(
        policy.predict(predictions).label, labels if known is None else np.array(known)[labels]
    )
