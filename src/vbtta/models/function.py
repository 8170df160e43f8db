"""Any function of a batch as a model."""

__all__ = ["FunctionModel"]

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vbtta.labels import Array
from vbtta.models.base import Batch, Output, as_columns, log_probability, n_rows_of, select_output, to_numpy


class FunctionModel:
    """A function from a batch to outputs, called as it is.

    Parameters
    ----------
    function : callable
        B rows in, (B, C) or (B,) outputs out: NumPy arrays or tensors.
    output : str, int or callable, optional
        Which part of what it returns.
    """

    classes: Array | None = None

    def __init__(self, function: Callable[[Any], Any], output: Output = None) -> None:
        self.function = function
        self.output = output
        self.output_kind = "log_probability" if output is log_probability else "raw"

    def ready(self) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def prepare(self, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        result = to_numpy(select_output(self.function(batch), self.output))
        outputs: Array = as_columns(result, n_rows_of(batch))
        return outputs
