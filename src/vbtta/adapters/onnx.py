"""An ONNX Runtime session as a predictor."""

__all__ = ["OnnxPredictor"]

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta._support.tensors import Batch, n_rows_of, to_array
from vbtta.adapters.base import Adapter, Output, select_output, to_outputs
from vbtta.data.labels import Array

_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


class OnnxPredictor(Adapter):
    """A network in ONNX form: a session, or the path of an .onnx file.

    Several inputs are given as a dict by their names, or as a tuple in their order; several outputs are chosen by name,
    by position, or by a function of the dict of all outputs.
    """

    def __init__(self, session: Any, output: Output = None) -> None:
        super().__init__(output)
        if isinstance(session, str | os.PathLike):
            if not Path(session).is_file():
                raise FileNotFoundError(f"no ONNX file at {session}")
            runtime = require("onnxruntime", "onnx")
            session = runtime.InferenceSession(os.fspath(session), providers=runtime.get_available_providers())
        self.session = session
        self.inputs = {entry.name: entry for entry in session.get_inputs()}
        self.output_names = [entry.name for entry in session.get_outputs()]

    def prepare(self, batch: Batch) -> Batch:
        """NumPy arrays of the types that the network takes."""
        names = list(self.inputs)
        if isinstance(batch, Mapping):
            absent = [name for name in names if name not in batch]
            if absent:
                raise ValueError(f"the ONNX model needs the inputs {names}; the batch lacks {absent}")
            return {name: self._cast(name, batch[name]) for name in names}
        if isinstance(batch, tuple | list):
            if len(batch) < len(names):
                raise ValueError(f"the ONNX model takes {len(names)} inputs; the batch has {len(batch)}")
            parts = tuple(map(self._cast, names, batch))  # parts beyond the inputs are labels
            return parts[0] if len(parts) == 1 else parts
        if len(names) > 1:
            raise ValueError(f"the ONNX model takes several inputs; give a dict of arrays with the keys {names}")
        return self._cast(names[0], batch)

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        n_rows, shape = n_rows_of(batch), next(iter(self.inputs.values())).shape
        if shape and isinstance(shape[0], int) and shape[0] != n_rows:
            raise ValueError(
                f"the ONNX model takes batches of exactly {shape[0]} rows and got {n_rows}: export it with a dynamic "
                f"batch axis"
            )
        if not isinstance(batch, Mapping):
            batch = dict(zip(self.inputs, batch if isinstance(batch, tuple) else (batch,), strict=True))
        results = self.session.run(None, {name: self._cast(name, batch[name]) for name in self.inputs})
        if len(results) == 1 and (self.output is None or callable(self.output)):
            results = results[0]
        elif not isinstance(self.output, int):
            results = dict(zip(self.output_names, results, strict=True))
        return to_outputs(select_output(results, self.output), batch)

    def _cast(self, name: str, values: Any) -> Array:
        """An input in the type that the network takes."""
        return np.ascontiguousarray(to_array(values), dtype=_TYPES.get(self.inputs[name].type))
