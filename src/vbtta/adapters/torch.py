"""A torch module as a predictor, which is left unchanged, and the variance of its outputs by the delta method."""

__all__ = ["TorchPredictor", "call_module", "delta_variance", "evaluating", "noise_variance"]

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from vbtta._support.checks import missing_extra
from vbtta._support.tensors import Batch, RowList
from vbtta.adapters.base import Adapter, Output, as_columns, numbers_of, select_output, to_outputs
from vbtta.data.labels import Array

try:
    import torch
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    raise missing_extra("torch", "torch") from error


_LOCK = threading.Lock()
_IN_USE: dict[nn.Module, list[int]] = {}  # users of modules in evaluation mode, and the mode to restore


def _forget_threads() -> None:
    """After a fork: the threads that hold the lock or use a module are not in the new process."""
    global _LOCK
    _LOCK = threading.Lock()
    _IN_USE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class TorchPredictor(Adapter):
    """A module called in evaluation mode, without gradients, on its own device.

    A tuple is given as positional arguments, a dict as keyword arguments if `forward` has such parameters; parts that
    it does not take (the labels that a DataLoader adds) are left out.
    """

    def __init__(self, module: nn.Module, output: Output = None, *, device: Any = None) -> None:
        super().__init__(output)
        self.module = module
        self.device = device_of(module) if device is None else torch.device(device)
        self.dtype, self.classes = dtype_of(module), _class_names(module)
        self.required, self.accepted, self.needed, self.keywords = _signature(module)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Evaluation mode and no gradients; every submodule's mode is restored afterwards."""
        with evaluating(self.module), torch.no_grad():
            yield

    def prepare(self, batch: Batch) -> Batch:
        """Tensors on the module's device, floating-point ones in its precision; inputs only."""
        if isinstance(batch, Mapping):
            return {key: self.prepare(part) for key, part in batch.items()}
        if isinstance(batch, tuple | list) and not isinstance(batch, RowList) and batch and not np.isscalar(batch[0]):
            parts = tuple(self._tensor(part) for part in self._inputs(batch))
            return parts[0] if len(parts) == 1 else parts
        return self._tensor(batch)

    def outputs(self, batch: Batch) -> Tensor:
        """Outputs (B, C) as a tensor, differentiable where gradients are on."""
        raw = call_module(self.module, batch, self.needed, self.keywords)
        return as_columns(select_output(raw, self.output), batch)  # type: ignore[no-any-return]

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        batch = self.prepare(batch)
        return to_outputs(self.outputs(batch), batch)

    def _inputs(self, batch: Any) -> Any:
        """The parts of a batch that `forward` takes; parts after them are labels."""
        if self.accepted is None or len(batch) <= self.required:
            return batch
        if self.required < self.accepted:
            remedy = "give the inputs as a dict by argument name, or without labels"
            raise ValueError(f"batches have {len(batch)} parts, and forward has optional arguments: {remedy}")
        return batch[: self.accepted]

    def _tensor(self, values: Any) -> Any:
        values = numbers_of(values)
        if isinstance(values, RowList):
            if not all(isinstance(entry, Tensor) and entry.shape == values[0].shape for entry in values):
                return values  # texts and ragged rows are left to the module
            values = torch.stack(values)
        if isinstance(values, np.ndarray | list | tuple):
            array = np.ascontiguousarray(values)
            values = torch.from_numpy(array if array.flags.writeable else array.copy())
        if not isinstance(values, Tensor):
            return values
        return values.to(device=self.device, dtype=self.dtype if values.is_floating_point() else None)


def call_module(module: nn.Module, batch: Batch, needed: set[str], keywords: set[str] | None) -> Any:
    """Call a module with a batch: a tuple by position, a dict by name if its arguments have these names."""
    arguments = batch if isinstance(batch, tuple) else (batch,)
    named: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        known = {key: part for key, part in batch.items() if keywords is None or key in keywords}
        if len(known) == len(batch) or (known and needed <= set(known)):
            arguments, named = (), known
    if torch.compiler.is_compiling() or (isinstance(batch, Tensor) and batch.is_floating_point()):
        return module(*arguments, **named)
    expected = (RuntimeError,) if isinstance(batch, Tensor) else (AttributeError, TypeError)
    try:
        return module(*arguments, **named)
    except expected as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(f"the module does not take {_advice(batch, keywords)} ({reason})") from error


def _advice(batch: Batch, keywords: set[str] | None) -> str:
    """What a module got, and what to give it instead."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} inputs; convert them, images as batch / 255"
    if isinstance(batch, Mapping):
        parts = f"the parts {', '.join(map(str, batch))}; give one of them"
        return f"{parts}, or parts named as the arguments of forward, {', '.join(sorted(keywords or ()))}"
    if isinstance(batch, tuple):
        return f"{len(batch)} inputs; give those of its forward alone, without labels"
    kind = f"list of {type(batch[0]).__name__}" if isinstance(batch, list) else type(batch).__name__
    return f"a {kind}; make one tensor of it, as torch.stack([transform(row) for row in inputs])"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the mode of every submodule is restored when the last of all threads has left."""
    parts = list(module.modules())
    with _LOCK:
        for part in parts:
            _IN_USE.setdefault(part, [0, part.training])[0] += 1
        try:
            if any(part.training for part in parts):
                module.eval()
        except NotImplementedError:  # exported modules refuse eval() and ignore their mode; their submodules may not
            for part in parts:
                part.training = False
    try:
        yield
    finally:
        with _LOCK:
            for part in parts:
                if part not in _IN_USE:  # entered before a fork
                    continue
                _IN_USE[part][0] -= 1
                if not _IN_USE[part][0] and (mode := bool(_IN_USE.pop(part)[1])) is not part.training:
                    part.training = mode  # slow, so only if needed


def device_of(module: nn.Module) -> torch.device:
    """The single device of a module's parameters and buffers."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if any(device.type == "meta" for device in devices):
        raise ValueError("the module is on the meta device and has no values: load its weights before using it")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the module is spread over {names}: use module.to(device) or as_predictor(module, device=)")
    return devices.pop() if devices else torch.device("cpu")


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Precision of a module's first floating-point parameter."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), None)


def _class_names(module: nn.Module) -> Array | None:
    """Classes that the configuration of a transformers network names, as `id2label`; None where there are none."""
    config = getattr(_unwrapped(module), "config", None)
    table = getattr(config, "id2label", None)
    if not isinstance(table, Mapping) or getattr(config, "problem_type", None) == "regression":
        return None
    names = [str(table[place]) for place in sorted(table)]
    wrong = any(name.startswith("LABEL_") or (name.isdecimal() and name != str(i)) for i, name in enumerate(names))
    return None if wrong or len(set(names)) < len(names) else np.array(names)


def _unwrapped(module: nn.Module) -> Any:
    """The module itself, without those of torch for several devices and for compilation."""
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner: Any = module.module if parallel else module
    return getattr(inner, "_orig_mod", inner)


def _signature(module: nn.Module) -> tuple[int, int | None, set[str], set[str] | None]:
    """Numbers of arguments that `forward` requires and accepts, names it needs and takes; None if it takes any."""
    try:
        parameters = list(inspect.signature(_unwrapped(module).forward).parameters.values())
    except (TypeError, ValueError):  # scripted modules may have no signature
        return 1, None, set(), None
    kinds = {parameter.kind for parameter in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = max(1, sum(p.default is p.empty for p in positional))
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = None if inspect.Parameter.VAR_POSITIONAL in kinds else max(1, len(positional))
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    return required, accepted, needed, None if inspect.Parameter.VAR_KEYWORD in kinds else named


def delta_variance(function: Callable[[Tensor], Tensor], centre: Tensor, draws: Iterable[Tensor]) -> Tensor:
    """Delta-method variance of a view's outputs from M draws of it, (B, ...) each: sum_m (Df eps_m)^2 / (M - 1).

    The diagonal of Df Sigma Df^T with Df the Jacobian of the function, from (B, ...) to (B, C) with independent rows,
    at the mean of the draws `centre`, and Sigma the covariance of the augmentation (docs/method, "Delta method"). For a
    linear network it equals the variance over draws. One Jacobian-vector product a draw.
    """
    squares = []  # (B, C) each
    with warnings.catch_warnings():  # the first derivative of a process warns about torch's own compiled rules
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        for draw in draws:
            tangent = torch.func.jvp(function, (centre,), (draw - centre,))[1]
            squares.append(tangent.double() ** 2)
    if len(squares) < 2:
        raise ValueError(f"the delta method needs at least 2 draws of a view; got {len(squares)}. Raise draws=")
    return (torch.stack(squares).sum(0) / (len(squares) - 1)).to(centre.dtype)


def noise_variance(function: Callable[[Tensor], Tensor], centre: Tensor, std: float) -> Tensor:
    """Delta-method variance under independent normal noise, without draws: std^2 sum_d (df/dx_d)^2.

    `function` as in :func:`delta_variance`; `centre` is the input without noise.
    """
    derivative: Any = torch.func.vjp(function, centre)
    outputs, vector_product = derivative
    units = torch.eye(outputs.shape[1]).to(outputs)  # row b of a gradient is that of its own output c
    gradients = (vector_product(unit.expand_as(outputs))[0].double() for unit in units)
    columns = [(gradient**2).flatten(1).sum(1) for gradient in gradients]
    return (std**2 * torch.stack(columns, dim=1)).to(centre.dtype)
