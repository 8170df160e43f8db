"""What a model is to the rest of the package, and which adapter makes one of the user's object."""

__all__ = ["Model", "as_model", "log_probability"]

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vbtta.labels import Array

Batch = Any  # an array or tensor of B rows, or a dict, tuple or list of such
Output = str | int | Callable[[Any], Any] | None

_FLOOR = 1e-7  # probabilities of exactly 0 are common (trees, neighbours) and have no logarithm


@runtime_checkable
class Model(Protocol):
    """A trained model: B rows in, (B, C) outputs out.

    Attributes
    ----------
    classes : (C,) array or None
        What the outputs of a classifier stand for, where the model knows.
    output_kind : str
        What the outputs are ("raw", "log_probability", "decision"): a policy fitted to one refuses the others.
    """

    classes: Array | None
    output_kind: str

    def ready(self) -> AbstractContextManager[object]:
        """A context in which the model may be called; it leaves the model as it was."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """Bring a batch to what views and model work on: its inputs only, in the right type and place."""
        ...

    def __call__(self, batch: Batch) -> Array:
        """Outputs of B rows: (B, C)."""
        ...


def as_model(model: Any, output: Output = None, *, device: Any = None, autocast: Any = None) -> Model:
    """Put a trained model of any framework behind one face.

    Parameters
    ----------
    model : object
        * a `torch.nn.Module`: called in evaluation mode and put back into the mode it was in;
        * a fitted estimator with scikit-learn's methods: the logarithm of `predict_proba` or else
          `decision_function` of a classifier, `predict` of a regressor;
        * an ONNX Runtime session, or the path of an `.onnx` file;
        * any function of a batch;
        * what this function returned.
    output : str, int or callable, optional
        Which part of what the model returns: a key, a position, or a function of it. For an estimator the method:
        "predict_proba", "decision_function" or "predict". Classifiers must give logits or log probabilities;
        :func:`log_probability` makes the latter of probabilities.
    device : torch.device or str, optional
        Where a torch module takes its inputs; by default where its parameters are.
    autocast : bool or torch.dtype, optional
        Whether a torch module runs in mixed precision, and in which.

    Returns
    -------
    Model

    Examples
    --------
    >>> model = as_model(lambda batch: batch.sum(axis=1))
    >>> model(np.ones((2, 3)))
    array([[3.],
           [3.]])
    """
    if isinstance(model, type):
        raise TypeError(f"model must be a trained object, not a class: use {model.__name__}(...)")
    if _is_adapter(model):
        if output is not None or device is not None or autocast is not None:
            raise ValueError("model is already adapted; give output, device and autocast to as_model only once")
        adapted: Model = model
        return adapted
    if _is_instance(model, "torch.nn", "Module"):
        from vbtta.models.torch import TorchModel

        return TorchModel(model, output, device=device, autocast=autocast)
    if device is not None or autocast is not None:
        raise ValueError(f"device and autocast are for torch modules; the model is a {type(model).__name__}")
    if isinstance(model, str | os.PathLike) or _is_instance(model, "onnxruntime", "InferenceSession"):
        from vbtta.models.onnx import OnnxModel

        return OnnxModel(model, output)
    if hasattr(model, "predict") and hasattr(model, "fit"):
        from vbtta.models.sklearn import EstimatorModel

        return EstimatorModel(model, output)
    if callable(model):
        from vbtta.models.function import FunctionModel

        return FunctionModel(model, output)
    raise TypeError(
        f"model must be a torch module, a fitted estimator, an ONNX Runtime session or a function; "
        f"got {type(model).__name__}"
    )


def log_probability(probability: Any) -> Any:
    """Logarithm of probabilities, those below 1e-7 raised to it; NumPy arrays and torch tensors.

    Examples
    --------
    >>> log_probability(np.array([[0.0, 1.0]])).round(1)
    array([[-16.1,   0. ]])
    """
    if _is_tensor(probability):
        return probability.clamp_min(_FLOOR).log()
    return np.log(np.maximum(np.asarray(probability), _FLOOR))


def select_output(raw: Any, output: Output) -> Any:
    """The part of a model's return value that `output` asks for."""
    if callable(output):
        return output(raw)
    if isinstance(raw, Mapping):
        keys = ", ".join(repr(key) for key in raw)
        if output is None:
            raise ValueError(f"the model returns several outputs ({keys}); choose one with output=")
        if output not in raw:
            raise ValueError(f"output={output!r} is not among what the model returns: {keys}")
        return raw[output]
    if isinstance(raw, tuple | list):
        if not isinstance(output, int):
            raise ValueError(f"the model returns {len(raw)} outputs; choose one by its position, as output=0")
        if not -len(raw) <= output < len(raw):
            raise ValueError(f"output={output} does not exist: the model returns {len(raw)} outputs")
        return raw[output]
    if output is not None:
        raise ValueError(f"output={output!r} cannot be taken from a single {type(raw).__name__}; leave output out")
    return raw


def as_columns(outputs: Any, n_rows: int) -> Any:
    """Outputs as (B, C), or an error that says what is wrong with their shape."""
    shape = tuple(getattr(outputs, "shape", ()))
    if len(shape) == 1 and shape[0] == n_rows:
        return outputs.reshape(n_rows, 1)
    if len(shape) != 2 or shape[0] != n_rows or shape[1] == 0:
        raise ValueError(
            f"the model returned shape {shape} for a batch of {n_rows} rows; it must return (B, C), or (B,) for a "
            f"single output: pick or reshape its result with output="
        )
    return outputs


def to_numpy(values: Any) -> Array:
    """Real numbers as a NumPy array of single or double precision, from a tensor or anything array-like."""
    if _is_tensor(values):
        values = values.detach()
        torch = sys.modules["torch"]
        return np.asarray((values if values.dtype == torch.float64 else values.float()).cpu().numpy())
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"the model must return real numbers; got {array.dtype}. Pick them with output=")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def n_rows_of(batch: Batch) -> int:
    """Number of rows of a batch, whatever it is made of."""
    if isinstance(batch, Mapping):
        return n_rows_of(next(iter(batch.values())))
    if isinstance(batch, tuple | list):
        return n_rows_of(batch[0])
    return int(batch.shape[0]) if hasattr(batch, "shape") else len(batch)


def _is_adapter(model: Any) -> bool:
    return isinstance(model, Model) and not _is_instance(model, "torch.nn", "Module")


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _is_instance(obj: Any, module: str, name: str) -> bool:
    """Whether an object is of a class of a package that may not even be installed; imports nothing."""
    known = sys.modules.get(module)
    return known is not None and isinstance(obj, getattr(known, name, ()))
