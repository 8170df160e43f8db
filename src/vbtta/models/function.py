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
        B rows in, (B, C) or (B,) outputs out: NumPy arrays or tensors. Inputs of several parts are given as a tuple or
        a dict; of a list of two, which is what a DataLoader makes of inputs and labels, only the inputs go in.
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
        """The batch as it is, without the labels that a DataLoader adds."""
        if not isinstance(batch, list) or not batch or not all(_has_rows(part) for part in batch):
            return batch
        if len(batch) > 2:
            raise ValueError(
                f"batches are lists of {len(batch)} parts, and which of them the function takes is not known: give it "
                f"its inputs alone, as in (tuple(parts[:-1]) for parts in loader)"
            )
        return batch[0]

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        result = to_numpy(select_output(self.function(batch), self.output))
        outputs: Array = as_columns(result, n_rows_of(batch))
        return outputs


def _has_rows(part: Any) -> bool:
    return hasattr(part, "shape") or (isinstance(part, list | tuple) and all(_has_rows(one) for one in part))
