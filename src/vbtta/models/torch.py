"""A torch module as a model: evaluation mode, its device and precision, nothing left changed."""

__all__ = ["TorchModel", "call_module", "evaluating", "precision"]

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from vbtta._support.extras import missing_extra
from vbtta.labels import Array
from vbtta.models.base import Batch, Output, as_columns, log_probability, n_rows_of, select_output, to_numpy

try:
    import torch
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    raise missing_extra("torch", "torch") from error


class TorchModel:
    """A module called in evaluation mode, without gradients, on its own device.

    Parameters
    ----------
    module : torch.nn.Module
        A tuple batch goes in as positional arguments, a dict as keyword arguments where the module's `forward` has
        such parameters. Parts beyond what `forward` takes (the labels that a DataLoader adds) are left out, as are
        keys that it does not name where it has all that it needs.
    output : str, int or callable, optional
        Which part of what it returns.
    device : torch.device or str, optional
        Where it takes its inputs; by default where its parameters are.
    autocast : bool or torch.dtype, optional
        Mixed precision.
    """

    classes: Array | None = None

    def __init__(self, module: nn.Module, output: Output = None, *, device: Any = None, autocast: Any = None) -> None:
        self.module = module
        self.output = output
        self.output_kind = "log_probability" if output is log_probability else "raw"
        self.device = device_of(module) if device is None else torch.device(device)
        self.autocast = autocast
        floating = (tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
        self.dtype: torch.dtype | None = next(floating, None)
        self.required, self.accepted, self.needed, self.keywords = _signature(module)

    def ready(self) -> AbstractContextManager[object]:
        """Evaluation mode and no gradients; afterwards every submodule is as it was."""
        stack = ExitStack()
        stack.enter_context(evaluating(self.module))
        stack.enter_context(torch.no_grad())
        return stack

    def prepare(self, batch: Batch) -> Batch:
        """Tensors on the module's device, floating-point ones in its precision; inputs only."""
        if isinstance(batch, Mapping):
            return {key: self.prepare(part) for key, part in batch.items()}
        if isinstance(batch, tuple | list) and batch and not np.isscalar(batch[0]):
            parts = tuple(self._tensor(part) for part in self._inputs(batch))
            return parts[0] if len(parts) == 1 else parts
        return self._tensor(batch)

    def outputs(self, batch: Batch) -> Tensor:
        """Outputs (B, C) as a tensor, differentiable where gradients are on."""
        with precision(self.autocast, self.device):
            raw = call_module(self.module, batch, self.needed, self.keywords)
        chosen: Tensor = as_columns(select_output(raw, self.output), n_rows_of(batch))
        return chosen

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        return to_numpy(self.outputs(self.prepare(batch)))

    def _inputs(self, batch: Any) -> Any:
        """The parts of a batch that `forward` takes; what comes after them are labels."""
        if self.accepted is None or len(batch) <= self.required:
            return batch
        if self.required < self.accepted:
            raise ValueError(
                f"batches have {len(batch)} parts, and the module's forward has {self.required} required and "
                f"{self.accepted - self.required} optional arguments: give the inputs as a dict by argument name, or "
                f"without labels"
            )
        return batch[: self.accepted]

    def _tensor(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            tensor = values
        elif isinstance(values, np.ndarray | list | tuple):
            array = np.ascontiguousarray(values)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        else:
            return values
        matching = self.dtype if tensor.is_floating_point() else None
        return tensor.to(device=self.device, dtype=matching)


def call_module(module: nn.Module, batch: Batch, needed: set[str], keywords: set[str] | None) -> Any:
    """What a module returns for a batch: a tuple by position, a dict by name where its arguments are so named."""
    if isinstance(batch, Mapping):
        named = dict(batch) if keywords is None else {key: part for key, part in batch.items() if key in keywords}
        if len(named) == len(batch) or (named and needed <= set(named)):
            return module(**named)
    if isinstance(batch, tuple):
        return module(*batch)
    if not isinstance(batch, Tensor) or batch.is_floating_point() or torch.compiler.is_compiling():
        return module(batch)
    try:
        return module(batch)
    except RuntimeError as error:
        raise TypeError(
            f"the module does not take {str(batch.dtype).removeprefix('torch.')} inputs; convert them, images as "
            f"batch / 255 ({str(error).partition(chr(10))[0]})"
        ) from error


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    if not any(mode for _, mode in modes):
        yield
        return
    try:
        try:
            module.eval()
        except NotImplementedError:  # exported modules refuse it, and ignore their mode; others inside must know
            for part, _ in modes:
                part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def precision(autocast: Any, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision for the module, and for it alone: a view's coordinates would be too coarse in it."""
    if not autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=autocast if isinstance(autocast, torch.dtype) else None)


def device_of(module: nn.Module) -> torch.device:
    """The one device of a module's parameters and buffers; an error where there are several or none with values."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if any(device.type == "meta" for device in devices):
        raise ValueError("the module is on the meta device and has no values: load its weights before using it")
    if len(devices) > 1:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(
            f"the module is spread over {found}: move it with model.to(device), or name the device of its inputs with "
            f"as_model(model, device=...)"
        )
    return devices.pop() if devices else torch.device("cpu")


def _signature(module: nn.Module) -> tuple[int, int | None, set[str], set[str] | None]:
    """How many arguments `forward` requires and accepts by position, and which by name; None where it takes any."""
    inner = module
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = module.module
    inner = getattr(inner, "_orig_mod", inner)  # what torch.compile wraps
    try:
        parameters = list(inspect.signature(inner.forward).parameters.values())
    except (TypeError, ValueError):  # scripted modules may have no signature
        return 1, None, set(), None
    kinds = {parameter.kind for parameter in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = max(1, sum(p.default is p.empty for p in positional))
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = None if inspect.Parameter.VAR_POSITIONAL in kinds else max(1, len(positional))
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    return required, accepted, needed, None if inspect.Parameter.VAR_KEYWORD in kinds else named
