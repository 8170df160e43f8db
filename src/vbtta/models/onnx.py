"""An ONNX Runtime session as a model."""

__all__ = ["OnnxModel"]

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.extras import require
from vbtta.labels import Array
from vbtta.models.base import Batch, Output, as_columns, log_probability, n_rows_of, select_output, to_numpy

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


class OnnxModel:
    """A network in ONNX form.

    Parameters
    ----------
    session : onnxruntime.InferenceSession, or the path of an .onnx file
        Several inputs are given as a dict by their names, or as a tuple in their order.
    output : str, int or callable, optional
        Name or position of the output, or a function of the dict of all outputs; needed only where there are several.
    """

    classes: Array | None = None

    def __init__(self, session: Any, output: Output = None) -> None:
        if isinstance(session, str | os.PathLike):
            if not Path(session).is_file():
                raise FileNotFoundError(f"no ONNX file at {session}")
            runtime = require("onnxruntime", "onnx")
            session = runtime.InferenceSession(os.fspath(session), providers=runtime.get_available_providers())
        self.session = session
        self.inputs = session.get_inputs()
        self.output_names = [entry.name for entry in session.get_outputs()]
        self.output = output
        self.output_kind = "log_probability" if output is log_probability else "raw"

    def ready(self) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def prepare(self, batch: Batch) -> Batch:
        """NumPy arrays of the types that the network takes."""
        if isinstance(batch, Mapping):
            known = {entry.name: entry for entry in self.inputs}
            absent = [name for name in known if name not in batch]
            if absent:
                raise ValueError(f"the ONNX model needs the inputs {list(known)}; the batch lacks {absent}")
            return {name: _cast(batch[name], entry) for name, entry in known.items()}
        if isinstance(batch, tuple | list):
            if len(batch) < len(self.inputs):
                raise ValueError(f"the ONNX model takes {len(self.inputs)} inputs; the batch has {len(batch)}")
            parts = tuple(_cast(part, entry) for part, entry in zip(batch, self.inputs, strict=False))
            return parts[0] if len(parts) == 1 else parts
        if len(self.inputs) > 1:
            names = [entry.name for entry in self.inputs]
            raise ValueError(f"the ONNX model takes several inputs; give a dict of arrays with the keys {names}")
        return _cast(batch, self.inputs[0])

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        n_rows = n_rows_of(batch)
        fixed = self.inputs[0].shape[0] if self.inputs[0].shape else None
        if isinstance(fixed, int) and fixed != n_rows:
            raise ValueError(
                f"the ONNX model takes batches of exactly {fixed} rows and got {n_rows}: export it with a dynamic "
                f"batch axis"
            )
        if isinstance(batch, Mapping):
            feed = dict(batch)
        else:
            parts = batch if isinstance(batch, tuple) else (batch,)
            feed = {entry.name: part for entry, part in zip(self.inputs, parts, strict=True)}
        feed = {name: _cast(feed[name], entry) for name, entry in ((entry.name, entry) for entry in self.inputs)}
        results = self.session.run(None, feed)
        raw: Any
        if callable(self.output):
            raw = self.output(results[0] if len(results) == 1 else dict(zip(self.output_names, results, strict=True)))
        elif isinstance(self.output, int) or (len(results) == 1 and self.output is None):
            raw = select_output(results, self.output or 0)
        else:
            raw = select_output(dict(zip(self.output_names, results, strict=True)), self.output)
        outputs: Array = as_columns(to_numpy(raw), n_rows)
        return outputs


def _cast(values: Any, entry: Any) -> Array:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.ascontiguousarray(values, dtype=_TYPES.get(entry.type))
