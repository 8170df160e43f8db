"""The predictor protocol, and the adapter that makes a predictor of a user's object."""

__all__ = ["Predictor", "as_predictor", "log_probability"]

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vbtta._support.checks import is_instance, is_tensor, require, to_array
from vbtta._support.tensors import Batch, RowList, is_numbers, n_rows_of
from vbtta.data.labels import Array, frame_of

Output = str | int | Callable[[Any], Any] | None

_MIN_PROBABILITY = 1e-7
_UNSEEN = 0.05  # of the probability, shared by classes that a tree or neighbours give 0: they are rare, not impossible
_KINDS = {"predict_proba": "log_probability", "decision_function": "decision", "predict": "raw"}  # by method
_TYPES = {"float": "float32", "double": "float64", "string": "object"}  # of ONNX whose names NumPy does not know


@runtime_checkable
class Predictor(Protocol):
    """A trained model: B rows in, (B, C) outputs out, or maps (B, C, H, W) or (B, C, D, H, W)."""

    classes: Array | None  # (C,) of a classifier's outputs, if the model knows them
    output_kind: str  # "raw", "log_probability" or "decision": a policy fitted to one refuses the others

    def ready(self) -> AbstractContextManager[object]:
        """A context in which the predictor may be called; it leaves the model unchanged."""

    def prepare(self, batch: Batch) -> Batch:
        """Bring a batch to the form of views and model: inputs without labels, in the right type and place."""

    def __call__(self, batch: Batch) -> Array:
        """Outputs of B rows: (B, C), or maps."""


def as_predictor(predictor: Any, output: Output = None, *, device: Any = None) -> Predictor:
    """Adapt a trained model of any framework.

    Parameters
    ----------
    predictor : object
        * a `torch.nn.Module`: called in evaluation mode; its mode is restored afterwards;
        * a fitted estimator with scikit-learn's methods: the logarithm of `predict_proba` or else
          `decision_function` of a classifier, `predict` of a regressor;
        * an ONNX Runtime session, or the path of an `.onnx` file; any function of a batch; a result of this function.
    output : str, int or callable, optional
        Which part of the model's return value: a key, a position, or a function of it; by default `logits`, where the
        model (as of transformers) names its outputs. For an estimator the method: "predict_proba", "decision_function"
        or "predict". Classifiers must give logits or log probabilities, which :func:`log_probability` makes.
    device : torch.device or str, optional
        Where a torch module takes its inputs; by default where its parameters are.
    """
    is_module = is_instance(predictor, "torch.nn", "Module")
    if is_instance(predictor, "vbtta.module", "TTAModule"):
        raise ValueError("predictor is a TTAModule, which applies its views by itself; pass the network, .network")
    if isinstance(predictor, type):
        raise TypeError(f"predictor must be a trained object, not a class: use {predictor.__name__}(...)")
    if isinstance(predictor, Predictor) and not is_module:
        if output is not None or device is not None:
            raise ValueError("predictor is already adapted; give output and device to as_predictor only once")
        return predictor
    if is_module:
        from vbtta.adapters.torch import TorchPredictor

        return TorchPredictor(predictor, output, device=device)
    if device is not None:
        raise ValueError(f"device is for torch modules; the predictor is a {type(predictor).__name__}")
    if isinstance(predictor, str | os.PathLike) or is_instance(predictor, "onnxruntime", "InferenceSession"):
        return OnnxPredictor(predictor, output)
    if hasattr(predictor, "predict") and hasattr(predictor, "fit"):
        return EstimatorPredictor(predictor, output)
    if hasattr(predictor, "postprocess") and hasattr(predictor, "model"):
        raise TypeError("predictor is a pipeline of transformers: give ProcessedPredictor(p.model, p.tokenizer or ...)")
    if callable(predictor):
        return FunctionPredictor(predictor, output)
    kind = type(predictor).__name__
    raise TypeError(f"predictor must be a torch module, estimator, ONNX Runtime session or function; got {kind}")


def log_probability(probability: Any) -> Any:
    """Logarithm of probabilities (..., C), at least 1e-7; NumPy arrays and torch tensors.

    A zero counts as 0.05 / C or the smallest other number of its row: that a tree or the neighbours of an input did not
    see a class is weak evidence. Taken for certainty, it would make labels look wrong where the estimator is.
    """
    limit, seen = _UNSEEN / probability.shape[-1], probability != 0  # what is not a number stays so
    library: Any = sys.modules["torch"] if is_tensor(probability) else np
    smallest = library.amin(library.where(seen, probability, limit), -1, keepdims=True)
    return library.log(library.clip(library.where(seen, probability, smallest), _MIN_PROBABILITY, None))


class Adapter:
    """Base of the adapters: the chosen output, and nothing to do before a call."""

    classes: Array | None = None

    def __init__(self, output: Output) -> None:
        self.output = output
        self.output_kind = "log_probability" if output is log_probability else "raw"

    def ready(self) -> AbstractContextManager[object]:
        """A context in which the predictor may be called."""
        return nullcontext()


class FunctionPredictor(Adapter):
    """Any function of a batch. Of a DataLoader's list of inputs and labels it gets the inputs."""

    def __init__(self, function: Callable[[Any], Any], output: Output = None) -> None:
        super().__init__(output)
        self.function = function

    def prepare(self, batch: Batch) -> Batch:
        """The batch without the labels that a DataLoader adds."""
        if not isinstance(batch, list) or isinstance(batch, RowList) or not batch or not _has_rows(batch):
            return batch
        if len(batch) > 2:
            raise ValueError(f"batches are lists of {len(batch)} parts: give the inputs alone, not their labels")
        return batch[0]

    def __call__(self, batch: Batch) -> Array:
        return to_outputs(select_output(self.function(batch), self.output), batch)


class EstimatorPredictor(Adapter):
    """A fitted classifier or regressor: scikit-learn's, or another library's with the same methods.

    Numeric tables (DataFrames) are given to views as arrays and to the estimator as tables again. `output` is a method,
    or a function of the result of `predict`.
    """

    def __init__(self, estimator: Any, output: Output = None) -> None:
        super().__init__(output)
        self.estimator = estimator
        self.method = _method(estimator, output)
        self.output_kind = _KINDS[self.method]
        if self.method != "predict":
            classes = getattr(estimator, "classes_", None)
            if classes is None:
                raise ValueError(f"the estimator {type(estimator).__name__} is not fitted: call its fit first")
            _check_single(classes)
            self.classes = np.asarray(classes)
        self.features = list(getattr(estimator, "feature_names_in_", ()))

    def prepare(self, batch: Batch) -> Batch:
        """The features without labels; a table of numbers as an array, so that views can work on it."""
        if isinstance(batch, tuple | list) and not isinstance(batch, RowList) and batch:
            batch = batch[0] if hasattr(batch[0], "shape") or isinstance(batch[0], RowList) else batch
        if self.features and isinstance(batch, Mapping):
            batch = frame_of({name: batch[name] for name in self.features if name in batch})
        columns = list(getattr(batch, "columns", self.features))
        if self.features and columns != self.features:
            raise ValueError(f"inputs have the columns {columns}; the estimator was fitted to {self.features}")
        return to_array(batch) if is_tensor(batch) else numbers_of(batch)

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C): log probabilities, decision values or predictions."""
        values = getattr(self.estimator, self.method)(self._with_names(to_array(batch) if is_tensor(batch) else batch))
        _check_single(values)
        if self.method == "predict_proba":
            values = log_probability(values)
        elif self.method == "decision_function" and np.ndim(values) == 1:
            values = np.stack([-values, values], axis=1) / 2  # two logits whose difference is the decision value
        elif callable(self.output):
            values = self.output(values)
        outputs = to_outputs(values, batch)
        if self.classes is not None and outputs.shape[1] != len(self.classes):
            columns = f"{self.method} of {type(self.estimator).__name__} has {outputs.shape[1]} columns"
            raise ValueError(f"{columns} for {len(self.classes)} classes (decision_function_shape='ovr' of an SVM)")
        return outputs

    def _with_names(self, batch: Batch) -> Batch:
        """Restore the column names, which an estimator fitted to a table asks for."""
        pandas, numbers = sys.modules.get("pandas"), isinstance(batch, np.ndarray) and self.features
        named = pandas and numbers and batch.shape[1:] == (len(self.features),)
        return pandas.DataFrame(batch, columns=self.features) if named else batch  # type: ignore[union-attr]


def _method(estimator: Any, output: Output) -> str:
    """The method that gives the outputs."""
    available = [method for method in _KINDS if hasattr(estimator, method)]
    if isinstance(output, str):
        if output not in available:
            raise ValueError(f"output must be one of the estimator's methods {available}; got {output!r}")
        return output
    if isinstance(output, int):
        raise ValueError(f"output must be the name of a method or a function for an estimator; got {output}")
    try:
        from sklearn.base import is_classifier

        has_classes = bool(is_classifier(estimator))  # hasattr(predict_proba) would include outlier detectors
    except (ImportError, AttributeError, TypeError):  # other libraries may lack scikit-learn's tags
        is_tagged = getattr(estimator, "_estimator_type", None) == "classifier"
        has_classes = is_tagged or hasattr(estimator, "predict_proba")
    if callable(output) or not has_classes:
        return "predict"
    if available[0] == "predict":
        kind, remedy = type(estimator).__name__, "wrap it in sklearn.calibration.CalibratedClassifierCV"
        raise ValueError(f"the classifier {kind} has neither predict_proba nor decision_function; {remedy}")
    return available[0]


def _check_single(values: Any) -> None:
    """Refuse lists, which estimators with several targets return."""
    if isinstance(values, list):
        raise ValueError("the estimator predicts several classifications at once; wrap one of them")


class OnnxPredictor(Adapter):
    """A network in ONNX form: a session, or the path of an .onnx file.

    Several inputs are a dict by name, or a tuple in their order; `output` may be a function of the dict of all outputs.
    """

    def __init__(self, session: Any, output: Output = None) -> None:
        super().__init__(output)
        if isinstance(session, str | os.PathLike):
            if not Path(session).is_file():
                raise FileNotFoundError(f"no ONNX file at {session}; other networks are given as objects")
            runtime = require("onnxruntime", "onnx")
            session = runtime.InferenceSession(os.fspath(session), providers=runtime.get_available_providers())
        self.session = session
        self.inputs = {entry.name: entry for entry in session.get_inputs()}
        self.output_names = [entry.name for entry in session.get_outputs()]

    def prepare(self, batch: Batch) -> Batch:
        """NumPy arrays of the types that the network takes, several as a dict; parts beyond its inputs are labels."""
        names = list(self.inputs)
        if not isinstance(batch, Mapping):
            batch = dict(zip(names, batch if isinstance(batch, tuple | list) else (batch,), strict=False))
        absent = [name for name in names if name not in batch]
        if absent:
            raise ValueError(f"the ONNX model takes a dict of arrays with the keys {names}; the batch lacks {absent}")
        kinds = {name: entry.type.removeprefix("tensor(").rstrip(")") for name, entry in self.inputs.items()}
        types = {name: _TYPES.get(kind, kind) for name, kind in kinds.items()}
        parts = {name: np.ascontiguousarray(to_array(batch[name]), dtype=types[name]) for name in names}
        return parts if len(names) > 1 else parts[names[0]]

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        n_rows, shape = n_rows_of(batch), next(iter(self.inputs.values())).shape
        if shape and isinstance(shape[0], int) and shape[0] != n_rows:
            remedy = "export it with a dynamic batch axis"
            raise ValueError(f"the ONNX model takes batches of exactly {shape[0]} rows and got {n_rows}: {remedy}")
        parts = self.prepare(batch)
        results = self.session.run(None, parts if isinstance(parts, Mapping) else dict.fromkeys(self.inputs, parts))
        if len(results) == 1 and (self.output is None or callable(self.output)):
            results = results[0]
        elif not isinstance(self.output, int):
            results = dict(zip(self.output_names, results, strict=True))
        return to_outputs(select_output(results, self.output), batch)


def select_output(raw: Any, output: Output) -> Any:
    """The part of a model's return value that `output` asks for."""
    if callable(output):
        return output(raw)
    logits = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if output is None and logits is not None:  # of transformers, or named so
        return logits
    if isinstance(raw, list) and is_numbers(raw) and output is None:
        return np.asarray(raw)
    if not isinstance(raw, Mapping | tuple | list):
        if output is not None:
            raise ValueError(f"output={output!r} cannot be taken from a single {type(raw).__name__}; leave output out")
        return raw
    parts = raw if isinstance(raw, Mapping) else dict(enumerate(raw))
    if output is None and len(parts) == 1:
        return next(iter(parts.values()))
    keys = ", ".join(map(repr, parts))
    if output is None:
        raise ValueError(f"the model returns several outputs ({keys}); choose one with output=")
    if parts is not raw and isinstance(output, int) and output < 0:
        output += len(parts)
    if output not in parts:
        raise ValueError(f"output={output!r} is not among what the model returns: {keys}")
    return parts[output]


def numbers_of(table: Any) -> Any:
    """A table of numbers as an array, so that views can work on it; other tables as pandas', anything else as it is."""
    if not hasattr(table, "columns"):
        return table
    table = table.to_pandas() if hasattr(table, "to_pandas") else table  # polars, Arrow
    kinds = {getattr(kind, "kind", "O") for kind in table.dtypes}
    plain = len(kinds) == 1 and all(isinstance(kind, np.dtype) for kind in table.dtypes)
    numbers = {} if plain else {"dtype": float, "na_value": np.nan}
    return table.to_numpy(**numbers) if kinds <= set("fiub") else table


def as_columns(outputs: Any, batch: Batch) -> Any:
    """Outputs of a batch as (B, C); maps (B, C, H, W) and (B, C, D, H, W) as they are."""
    shape, n_rows = tuple(getattr(outputs, "shape", ())), n_rows_of(batch)
    if shape == (n_rows,):
        return outputs.reshape(n_rows, 1)
    if len(shape) not in (2, 4, 5) or shape[0] != n_rows or 0 in shape[1:]:
        remedy = "it must return (B, C), (B,) or maps (B, C, H, W): use output=, or give it one column of a table"
        raise ValueError(f"the model returned shape {shape} for a batch of {n_rows} rows; {remedy}")
    return outputs


def to_outputs(values: Any, batch: Batch) -> Array:
    """Outputs of a batch as a NumPy array (B, C), or maps, of single or double precision."""
    array = to_array(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"the model must return real numbers; got {array.dtype}. Pick them with output=")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32 if is_tensor(values) else np.float64)
    return np.asarray(as_columns(array, batch))


def _has_rows(part: Any) -> bool:
    """Whether this is an array, or a list or tuple of arrays."""
    parts = isinstance(part, list | tuple) and all(map(_has_rows, part))
    return hasattr(part, "shape") or isinstance(part, RowList) or parts
