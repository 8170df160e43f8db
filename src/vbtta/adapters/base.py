"""The predictor protocol, and the adapter that makes a predictor of a user's object."""

__all__ = ["Predictor", "as_predictor", "log_probability"]

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vbtta._support.tensors import Batch, RowList, is_instance, is_numbers, is_tensor, n_rows_of, to_array
from vbtta.data.labels import Array

Output = str | int | Callable[[Any], Any] | None

_MIN_PROBABILITY = 1e-7  # probabilities of exactly 0 are common (trees, neighbours) and have no logarithm


@runtime_checkable
class Predictor(Protocol):
    """A trained model: B rows in, (B, C) outputs out, or maps (B, C, H, W) or (B, C, D, H, W).

    Attributes
    ----------
    classes : (C,) array or None
        Classes of a classifier's outputs, if the model knows them.
    output_kind : str
        Kind of the outputs ("raw", "log_probability", "decision"): a policy fitted to one refuses the others.
    """

    classes: Array | None
    output_kind: str

    def ready(self) -> AbstractContextManager[object]:
        """A context in which the predictor may be called; it leaves the model unchanged."""

    def prepare(self, batch: Batch) -> Batch:
        """Bring a batch to the form of views and model: inputs without labels, in the right type and place."""

    def __call__(self, batch: Batch) -> Array:
        """Outputs of B rows: (B, C), or maps."""


def as_predictor(predictor: Any, output: Output = None, *, device: Any = None, autocast: Any = None) -> Predictor:
    """Adapt a trained model of any framework.

    Parameters
    ----------
    predictor : object
        * a `torch.nn.Module`: called in evaluation mode; its mode is restored afterwards;
        * a fitted estimator with scikit-learn's methods: the logarithm of `predict_proba` or else
          `decision_function` of a classifier, `predict` of a regressor;
        * an ONNX Runtime session, or the path of an `.onnx` file;
        * any function of a batch;
        * a result of this function.
    output : str, int or callable, optional
        Which part of the model's return value: a key, a position, or a function of it; by default `logits`, where the
        model (of transformers) names its outputs. For an estimator the method:
        "predict_proba", "decision_function" or "predict". Classifiers must give logits or log probabilities;
        :func:`log_probability` makes the latter of probabilities.
    device : torch.device or str, optional
        Where a torch module takes its inputs; by default where its parameters are.
    autocast : bool or torch.dtype, optional
        Whether a torch module runs in mixed precision, and in which.

    Examples
    --------
    >>> predictor = as_predictor(lambda batch: batch.sum(axis=1))
    >>> predictor(np.ones((2, 3)))
    array([[3.],
           [3.]])
    """
    is_module = is_instance(predictor, "torch.nn", "Module")
    if isinstance(predictor, type):
        raise TypeError(f"predictor must be a trained object, not a class: use {predictor.__name__}(...)")
    if isinstance(predictor, Predictor) and not is_module:
        if output is not None or device is not None or autocast is not None:
            raise ValueError("predictor is already adapted; give output, device and autocast to as_predictor only once")
        return predictor
    if is_module:
        from vbtta.adapters.torch import TorchPredictor

        return TorchPredictor(predictor, output, device=device, autocast=autocast)
    if device is not None or autocast is not None:
        raise ValueError(f"device and autocast are for torch modules; the predictor is a {type(predictor).__name__}")
    if isinstance(predictor, str | os.PathLike) or is_instance(predictor, "onnxruntime", "InferenceSession"):
        from vbtta.adapters.onnx import OnnxPredictor

        return OnnxPredictor(predictor, output)
    if hasattr(predictor, "predict") and hasattr(predictor, "fit"):
        from vbtta.adapters.sklearn import EstimatorPredictor

        return EstimatorPredictor(predictor, output)
    if callable(predictor):
        return FunctionPredictor(predictor, output)
    raise TypeError(
        f"predictor must be a torch module, a fitted estimator, an ONNX Runtime session or a function; "
        f"got {type(predictor).__name__}"
    )


def log_probability(probability: Any) -> Any:
    """Logarithm of probabilities, those below 1e-7 raised to it; NumPy arrays and torch tensors.

    Examples
    --------
    >>> log_probability(np.array([[0.0, 1.0]])).round(1)
    array([[-16.1,   0. ]])
    """
    if is_tensor(probability):
        return probability.clamp_min(_MIN_PROBABILITY).log()
    return np.log(np.maximum(np.asarray(probability), _MIN_PROBABILITY))


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
    """Any function of a batch, from B rows to (B, C) or (B,) outputs.

    Inputs of several parts are given as a tuple or a dict. A list of two is what a DataLoader makes of inputs and
    labels: only the inputs are used.
    """

    def __init__(self, function: Callable[[Any], Any], output: Output = None) -> None:
        super().__init__(output)
        self.function = function

    def prepare(self, batch: Batch) -> Batch:
        """The batch without the labels that a DataLoader adds."""
        if not isinstance(batch, list) or isinstance(batch, RowList) or not batch or not _has_rows(batch):
            return batch
        if len(batch) > 2:
            raise ValueError(
                f"batches are lists of {len(batch)} parts, and which of them the function takes is not known: give it "
                f"its inputs alone, as in (tuple(parts[:-1]) for parts in loader)"
            )
        return batch[0]

    def __call__(self, batch: Batch) -> Array:
        return to_outputs(select_output(self.function(batch), self.output), batch)


def select_output(raw: Any, output: Output) -> Any:
    """The part of a model's return value that `output` asks for."""
    if callable(output):
        return output(raw)
    if output is None and hasattr(raw, "logits"):  # a ModelOutput of transformers
        return raw.logits
    if isinstance(raw, Mapping):
        if output is None and len(raw) == 1:
            return next(iter(raw.values()))
        keys = ", ".join(repr(key) for key in raw)
        if output is None:
            raise ValueError(f"the model returns several outputs ({keys}); choose one with output=")
        if output not in raw:
            raise ValueError(f"output={output!r} is not among what the model returns: {keys}")
        return raw[output]
    if isinstance(raw, list) and is_numbers(raw) and output is None:
        return np.asarray(raw)
    if isinstance(raw, tuple | list):
        output = 0 if output is None and len(raw) == 1 else output
        if not isinstance(output, int):
            raise ValueError(f"the model returns {len(raw)} outputs; choose one by its position, as output=0")
        if not -len(raw) <= output < len(raw):
            raise ValueError(f"output={output} does not exist: the model returns {len(raw)} outputs")
        return raw[output]
    if output is not None:
        raise ValueError(f"output={output!r} cannot be taken from a single {type(raw).__name__}; leave output out")
    return raw


def as_columns(outputs: Any, batch: Batch) -> Any:
    """Outputs of a batch as (B, C); maps (B, C, H, W) and (B, C, D, H, W) as they are."""
    shape, n_rows = tuple(getattr(outputs, "shape", ())), n_rows_of(batch)
    if shape == (n_rows,):
        return outputs.reshape(n_rows, 1)
    if len(shape) not in (2, 4, 5) or shape[0] != n_rows or 0 in shape[1:]:
        raise ValueError(
            f"the model returned shape {shape} for a batch of {n_rows} rows; it must return (B, C), or (B,) for a "
            f"single output, or maps (B, C, H, W): pick or reshape its result with output="
        )
    return outputs


def to_outputs(values: Any, batch: Batch) -> Array:
    """Outputs of a batch as a NumPy array (B, C), or maps, of single or double precision."""
    array = to_array(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"the model must return real numbers; got {array.dtype}. Pick them with output=")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32 if is_tensor(values) else np.float64)
    outputs: Array = as_columns(array, batch)
    return outputs


def _has_rows(part: Any) -> bool:
    """Whether this is an array, or a list or tuple of arrays."""
    return (
        hasattr(part, "shape")
        or isinstance(part, RowList)
        or (isinstance(part, list | tuple) and all(map(_has_rows, part)))
    )
