"""TTAModule: a network, its views and a policy as one torch module, ready for export."""

__all__ = ["TTAModule"]

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal, Self

import numpy as np

from vbtta._support.checks import whole_number
from vbtta._support.extras import missing_extra
from vbtta._support.fingerprints import conflict, draws_of
from vbtta._support.random import RowStreams
from vbtta.augment.base import Augmentation, Batch, copy_of, own_copy
from vbtta.augment.fingerprint import view_fingerprint
from vbtta.augment.foreign import as_views
from vbtta.infer.pooling import pooling_of
from vbtta.models.base import as_model, n_rows_of, select_output
from vbtta.policy import Policy

try:
    import torch
    from torch import Tensor, nn

    from vbtta.models.torch import TorchModel, call_module, evaluating, precision
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "torch") from error

OutputKind = Literal["probability", "log_probability", "mean"]

# Rows of one forward pass unless told otherwise: with more, activations leave a processor's cache and the allocator
# gives their memory back in between; with fewer, calls cost more than what they compute.
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 32, 512
_NODES, _REACH = 33, 8.0  # of the probit integral: utilities have unit variance here


class TTAModule(nn.Module):
    """A network that looks at its input through the views of a policy and returns one calibrated prediction.

    Views of weight zero are never computed. Views that give images of one size share forward passes.

    Parameters
    ----------
    model : torch.nn.Module, or what ``as_model(module, output=...)`` returned
        The network; it is used in evaluation mode and left in the mode it was in.
    views : list of views
        All views of the policy with a positive weight, matched by name; others are ignored.
    policy : Policy
        Fitted to predictions of the same network and views.
    output : {"probability", "log_probability", "mean"}, optional
        What `forward` returns: class probabilities (B, C) or their logarithm in classification, means (B, C) in
        regression. By default "probability" or "mean".
    max_batch : int, optional
        Most rows of a forward pass of the network; views beyond that are computed in turn and added up, and a tensor
        of more rows goes through in parts. By default 32 on a CPU and 512 elsewhere. An exported module computes all
        views in one pass, or with `max_batch` in one pass each.
    draws : int, optional
        Draws of every stochastic view; by default as many as the policy was fitted to, where that is known, else 1.
    seed : int
        Decides those draws; rows are numbered within the batch.

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import ViewPredictions, fit_policy
    >>> from vbtta.augment import Identity, as_view
    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> model, views = nn.Linear(3, 1), [Identity(), as_view(torch.neg, name="minus")]
    >>> from vbtta.collect import collect_views
    >>> policy = fit_policy(collect_views(model, x, views), x.sum(1).numpy(), task="regression", guard=False)
    >>> TTAModule(model, views, policy)(x).shape
    torch.Size([50, 1])
    """

    scale: Tensor  # (K, C)
    offset: Tensor  # (C,)
    weights: Tensor  # (K, C)

    def __init__(
        self,
        model: Any,
        views: Any,
        policy: Policy,
        *,
        output: OutputKind | None = None,
        max_batch: int | None = None,
        draws: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        adapter = as_model(model)
        if not isinstance(adapter, TorchModel):
            raise TypeError(f"TTAModule wraps torch modules; got {type(model).__name__}. Use collect_views for others")
        _check_policy(policy)
        max_batch = None if max_batch is None else whole_number("max_batch", max_batch, 1)
        draws = (
            max((draws_of(text) or 1 for text in policy.fingerprints.values()), default=1) if draws is None else draws
        )
        draws, seed = whole_number("draws", draws, 1), whole_number("seed", seed, 0)
        pooling = pooling_of(policy.posterior)
        self.output_kind: OutputKind = _output_kind(output, policy.task)
        self.kind, self.link = pooling.kind, pooling.link
        self.by_class = policy.class_weights is not None
        self.model = adapter.module
        self.views = _used_views(as_views(views), policy, adapter.output_kind)
        # other libraries' transforms may hold tensors, which must move with the module
        held = [getattr(view, "function", getattr(view, "transform", None)) for view in self.views]
        self.view_modules = nn.ModuleList(part for part in held if isinstance(part, nn.Module))
        self.max_batch, self.draws, self.seed = max_batch, draws, seed
        self._select, self._autocast = adapter.output, adapter.autocast
        self._needed, self._keywords = adapter.needed, adapter.keywords
        for name in ("scale", "offset", "weights"):
            values = torch.as_tensor(getattr(pooling, name), dtype=torch.float32, device=adapter.device)
            self.register_buffer(name, values)

    def extra_repr(self) -> str:
        """Name the views and the output."""
        return f"views=[{', '.join(view.name for view in self.views)}], output={self.output_kind!r}"

    def forward(self, batch: Any) -> Tensor:
        """Inputs of B rows, as the network takes them, to probabilities, their logarithm or means: (B, C)."""
        exporting = torch.compiler.is_exporting()
        running = not torch.compiler.is_compiling()
        if exporting:
            self._check_exportable()
        elif running:
            self._check_batch(batch)
            batch = self._in_precision(batch)
        training = not exporting and any(part.training for part in self.model.modules())
        with evaluating(self.model) if training else nullcontext():
            total: Tensor | None = None
            for first, outputs in self._outputs(batch, exporting):
                part = self._pool(first, outputs)
                total = part if total is None else total + part
        assert total is not None
        result = self._finish(total)
        if running and result.device.type == "cpu" and not result.isfinite().all():  # elsewhere one would have to wait
            raise ValueError(
                f"the result is not finite: the network or one of the views {[view.name for view in self.views]} "
                f"returned NaN or infinity; collect_views says which, and for which input"
            )
        return result

    def train(self, mode: bool = True) -> Self:
        """Set the network's mode; views keep theirs, on which what they do may depend (dropout)."""
        modes = [(part, part.training) for part in self.view_modules.modules()]
        super().train(mode)
        for part, kept in modes:
            part.training = kept
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """What a file of weights says of the policy, so that another one's are refused."""
        return {"views": [view.name for view in self.views], "kind": self.kind, "link": self.link}

    def set_extra_state(self, state: Any) -> None:
        """Compare with the file's policy."""
        if state != self.get_extra_state():
            raise ValueError(
                f"the weights belong to a policy with the views {state.get('views')} ({state.get('kind')}); this "
                f"module has {[view.name for view in self.views]} ({self.kind})"
            )

    def _outputs(self, batch: Batch, exporting: bool) -> Iterator[tuple[list[int], Tensor]]:
        """Which views, and what the network says of them: (V, B, C)."""
        n_rows = batch.shape[0] if isinstance(batch, Tensor) else n_rows_of(batch)  # a symbol while exporting
        at_once = self._views_at_once(n_rows, exporting)
        waiting: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}
        for k, view in enumerate(self.views):
            if view.stochastic:
                drawn = [self._call(_drawn(view, batch, self.seed, m), n_rows) for m in range(self.draws)]
                yield [k], torch.stack(drawn).mean(0, keepdim=True)
                continue
            seen = view(own_copy(view, batch))
            if seen is batch and not exporting:
                seen = copy_of(batch)  # a network may work in place
            if not isinstance(seen, Tensor):
                yield [k], self._call(seen, n_rows)[None]
                continue
            if not exporting and seen.shape[0] != n_rows:
                raise ValueError(f"view {view.name} turned a batch of {n_rows} rows into {seen.shape[0]}")
            which, tensors = waiting.setdefault(tuple(seen.shape[1:]), ([], []))
            which.append(k)
            tensors.append(seen)
            if len(which) == at_once:
                yield which, self._joint(tensors, n_rows)
                del waiting[tuple(seen.shape[1:])]
        for which, tensors in waiting.values():
            yield which, self._joint(tensors, n_rows)

    def _views_at_once(self, n_rows: int, exporting: bool) -> int:
        """Views of one forward pass; while exporting, the number of rows is not known."""
        if exporting:
            return len(self.views) if self.max_batch is None else 1
        if torch.compiler.is_compiling():  # all or one, so that few sizes of batches need a compilation of their own
            return len(self.views) if n_rows * len(self.views) <= self._most_rows() else 1
        return max(1, self._most_rows() // max(n_rows, 1))

    def _most_rows(self) -> int:
        usual = _ROWS_ON_CPU if self.offset.device.type == "cpu" else _ROWS_ELSEWHERE
        return self.max_batch or usual

    def _joint(self, tensors: list[Tensor], n_rows: int) -> Tensor:
        """Outputs of several views of one shape from one forward pass: (V, B, C)."""
        if len(tensors) == 1:
            return self._call(tensors[0], n_rows)[None]
        outputs = self._call(torch.cat(tensors), len(tensors) * n_rows)
        return outputs.reshape(len(tensors), n_rows, outputs.shape[1])

    def _call(self, inputs: Batch, n_rows: int) -> Tensor:
        """Outputs of the network: (B, C)."""
        if isinstance(inputs, Tensor) and not torch.compiler.is_compiling() and n_rows > self._most_rows():
            parts = inputs.chunk(-(-n_rows // self._most_rows()))
            return torch.cat([self._pass(part, part.shape[0]) for part in parts])
        return self._pass(inputs, n_rows)

    def _pass(self, inputs: Batch, n_rows: int) -> Tensor:
        """One forward pass: (B, C)."""
        with precision(self._autocast, self.offset.device):
            raw = call_module(self.model, inputs, self._needed, self._keywords)
        outputs: Tensor = select_output(raw, self._select)
        if outputs.ndim == 1:
            outputs = outputs[:, None]
        counted = torch.compiler.is_exporting() or outputs.shape[0] == n_rows
        if outputs.ndim != 2 or outputs.shape[1] != len(self.offset) or not counted:
            raise ValueError(
                f"the network returned shape {tuple(outputs.shape)} for {n_rows} rows; the policy was fitted to "
                f"{len(self.offset)} outputs a row"
            )
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs

    def _pool(self, views: list[int], outputs: Tensor) -> Tensor:
        """The share of some views (V, B, C) in the pool: (B, C)."""
        scale = _rows_of(self.scale, views)
        if self.kind != "mixture":
            return (outputs * scale[:, None].to(outputs.dtype)).sum(0)
        weights = _rows_of(self.weights, views)
        utility = outputs * scale[:, None].to(outputs.dtype) + self.offset.to(outputs.dtype)
        return (self._link(utility) * weights[:, None].to(outputs.dtype)).sum(0)

    def _finish(self, total: Tensor) -> Tensor:
        if self.kind == "linear":
            return total + self.offset.to(total.dtype)
        if self.kind == "latent":
            utility = total + self.offset.to(total.dtype)
            if self.link == "softmax" and self.output_kind == "log_probability":
                return torch.log_softmax(utility, -1)
            total = self._link(utility)
        elif self.by_class:
            total = total / total.sum(-1, keepdim=True)
        if self.output_kind == "probability":
            return total
        return total.clamp_min(torch.finfo(total.dtype).tiny).log()

    def _link(self, utility: Tensor) -> Tensor:
        return torch.softmax(utility, -1) if self.link == "softmax" else _probit(utility)

    def _check_batch(self, batch: Batch) -> None:
        if isinstance(batch, np.ndarray):
            raise TypeError("TTAModule takes tensors; use torch.from_numpy(batch), or collect_views for arrays")
        where = next((tensor.device for tensor in self.model.parameters()), self.offset.device)
        if where != self.offset.device:
            raise ValueError(
                f"the network is on {where} and its policy on {self.offset.device}: move the TTAModule, not the "
                f"network inside it, with .to(device)"
            )
        if isinstance(batch, Tensor) and batch.device != where:
            raise ValueError(f"the batch is on {batch.device} and the network on {where}: use batch.to({str(where)!r})")

    def _in_precision(self, batch: Batch) -> Batch:
        """Floating-point tensors in the network's precision, as collect_views has them."""
        dtype = next((tensor.dtype for tensor in self.model.parameters() if tensor.is_floating_point()), None)
        if isinstance(batch, Tensor):
            return batch.to(dtype) if dtype is not None and batch.is_floating_point() else batch
        if isinstance(batch, Mapping):
            return {key: self._in_precision(part) for key, part in batch.items()}
        return tuple(self._in_precision(part) for part in batch) if isinstance(batch, tuple) else batch

    def _check_exportable(self) -> None:
        drawing = [view.name for view in self.views if view.stochastic]
        if drawing:
            raise ValueError(f"views {drawing} draw random numbers, which an export would freeze; leave them out")
        if any(part.training for part in self.model.modules()):
            raise ValueError("the network is in training mode; call .eval() on the TTAModule before exporting it")


def _check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        remedy = ". Read a file with Policy.load(path)" if isinstance(policy, str | os.PathLike) else ""
        raise TypeError(f"policy must be a Policy; got {type(policy).__name__}{remedy}")


def _output_kind(output: OutputKind | None, task: str) -> OutputKind:
    fitting: tuple[OutputKind, ...] = ("mean",) if task == "regression" else ("probability", "log_probability")
    if output is None:
        return fitting[0]
    if output not in fitting:
        raise ValueError(f"output must be {' or '.join(map(repr, fitting))} for a {task} policy; got {output!r}")
    return output


def _used_views(views: list[Augmentation], policy: Policy, output_kind: str) -> list[Augmentation]:
    """The views of positive weight in the order of the fit."""
    by_name = {view.name: view for view in views}
    if policy.generated_names:
        if len(views) != len(policy.names):
            raise ValueError(
                f"the policy was fitted to {len(policy.names)} unnamed views and got {len(views)}; fit it to named ones"
            )
        by_name = dict(zip(policy.names, views, strict=True))
    fitted = policy.fitted or policy.names
    needed = [name for name, weight in zip(fitted, policy.posterior.weights, strict=True) if weight > 0]
    missing = [name for name in needed if name not in by_name]
    if missing:
        raise ValueError(f"the policy needs the views {missing}, which are not among {list(by_name)}")
    for name in needed:
        what = conflict(policy.fingerprints.get(name, ""), f"{view_fingerprint(by_name[name])}/{output_kind}")
        if what is not None:
            raise ValueError(f"view {name!r} is not the one the policy was fitted to: it {what}")
    return [by_name[name] for name in needed]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drawn(view: Augmentation, batch: Batch, seed: int, draw: int) -> Batch:
    return view(own_copy(view, batch), RowStreams(seed, view.name, draw, np.arange(n_rows_of(batch))))


def _rows_of(table: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a table, without copying the row numbers to a device."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return table[rows[0] : rows[-1] + 1]
    return torch.stack([table[row] for row in rows])


def _probit(utility: Tensor) -> Tensor:
    """Probability that each normal utility of unit variance is the largest: (..., C).

    The integral over the largest utility v of phi(v - u_c) prod_{i != c} Phi(v - u_i), by the trapezoid rule
    within 8 standard deviations of the largest mean.
    """
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=utility.dtype, device=utility.device)
    gap = utility.amax(-1, keepdim=True)[..., None] + nodes - utility[..., None]  # (..., C, Q)
    below = (0.5 * (1 + torch.erf(gap * 0.5**0.5))).clamp_min(torch.finfo(utility.dtype).tiny)
    density = torch.exp(-0.5 * gap**2)
    log_below = below.log()
    joint = density * torch.exp(log_below.sum(-2, keepdim=True) - log_below)
    total = joint.sum(-1)
    return total / total.sum(-1, keepdim=True)
