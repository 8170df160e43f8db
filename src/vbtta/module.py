"""TTAModule: a network, its views and a policy as one torch module, ready for export."""

__all__ = ["TTAModule"]

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal, Self

import numpy as np

from vbtta._support.checks import missing_extra, whole_number
from vbtta._support.fingerprints import conflict, draws_of, view_fingerprint
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, copy_of, n_rows_of
from vbtta.adapters.base import as_predictor, select_output
from vbtta.augment.base import Augmentation, own_copy
from vbtta.augment.foreign import as_views
from vbtta.policy import Policy

try:
    import torch
    from torch import Tensor, nn

    from vbtta.adapters.torch import TorchPredictor, call_module, dtype_of, evaluating, precision
    from vbtta.models.parts.link_densities import class_probabilities
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "torch") from error

OutputKind = Literal["probability", "log_probability", "mean"]

# Default rows of one forward pass. With more, activations exceed a processor's cache and the allocator returns their
# memory between passes; with fewer, the overhead of the calls dominates.
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 32, 512


class TTAModule(nn.Module):
    """A network with the views of a policy: augments its input, and returns one calibrated prediction.

    Views of weight zero are never computed. Views that give images of one size share forward passes.

    Parameters
    ----------
    network : torch.nn.Module, or the result of ``as_predictor(module, output=...)``
        The network; it is called in evaluation mode, and its mode is restored afterwards.
    views : list of views
        All views of the policy with a positive weight, matched by name; others are ignored.
    policy : Policy
        Fitted to predictions of the same network and views.
    output : {"probability", "log_probability", "mean"}, optional
        Result of `forward`: class probabilities (B, C) or their logarithm in classification, means (B, C) in
        regression. By default "probability" or "mean".
    max_batch : int, optional
        Largest number of rows of a forward pass; views beyond it are computed in turn and added up, and a tensor of
        more rows is split. By default 32 on a CPU and 512 elsewhere. An exported module computes all views in one
        pass, or with `max_batch` in one pass each.
    draws : int, optional
        Draws of every stochastic view; by default as many as the policy was fitted to, if that is known, else 1.
    seed : int
        Determines those draws; rows are numbered within the batch.

    Examples
    --------
    >>> from vbtta import collect_views, fit_policy
    >>> from vbtta.augment import Identity, as_view
    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> network, views = nn.Linear(3, 1), [Identity(), as_view(torch.neg, name="minus")]
    >>> policy = fit_policy(collect_views(network, x, views), x.sum(1).numpy(), task="regression", guard=False)
    >>> TTAModule(network, views, policy)(x).shape
    torch.Size([50, 1])
    """

    def __init__(
        self,
        network: Any,
        views: Any,
        policy: Policy,
        *,
        output: OutputKind | None = None,
        max_batch: int | None = None,
        draws: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        adapter = as_predictor(network)
        if not isinstance(adapter, TorchPredictor):
            kind = type(network).__name__
            raise TypeError(f"TTAModule wraps torch modules; got {kind}. Use collect_views for others")
        given: object = policy
        if not isinstance(given, Policy):
            remedy = ". Read a file with Policy.load(path)" if isinstance(given, str | os.PathLike) else ""
            raise TypeError(f"policy must be a Policy; got {type(given).__name__}{remedy}")
        if draws is None:
            draws = max((draws_of(text) or 1 for text in policy.fingerprints.values()), default=1)
        self.max_batch = None if max_batch is None else whole_number("max_batch", max_batch, 1)
        self.draws, self.seed = whole_number("draws", draws, 1), whole_number("seed", seed, 0)
        self.output_kind: OutputKind = _output_kind(output, policy.task)
        self.network = adapter.module
        self.views = _used_views(as_views(views), policy, adapter.output_kind)
        self.n_outputs = policy.n_outputs
        members = policy.members or (policy,)
        self.pools = nn.ModuleList(
            _Pool(member, float(share), policy.used_names)
            for member, share in zip(members, policy.member_weights, strict=True)
        ).to(adapter.device)
        # transforms of other libraries may hold tensors, which must move with the module
        functions = (getattr(view, "function", None) for view in self.views)
        self.view_modules = nn.ModuleList(part for part in functions if isinstance(part, nn.Module))
        self._select, self._autocast = adapter.output, adapter.autocast
        self._needed, self._keywords = adapter.needed, adapter.keywords

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
        training = not exporting and any(part.training for part in self.network.modules())
        with evaluating(self.network) if training else nullcontext():
            totals: list[Tensor | None] = [None] * len(self._pools)
            for views, outputs in self._outputs(batch, exporting):
                for place, pool in enumerate(self._pools):
                    totals[place] = pool.add(totals[place], views, outputs)
        result = self._finish([total for total in totals if total is not None])
        if running and result.device.type == "cpu" and not result.isfinite().all():  # on other devices: a costly wait
            raise ValueError(
                f"the result is not finite: the network or one of the views {[view.name for view in self.views]} "
                f"returned NaN or infinity; collect_views says which, and for which input"
            )
        return result

    def train(self, mode: bool = True) -> Self:
        """Set the network's mode; views keep theirs (dropout depends on it)."""
        modes = [(part, part.training) for part in self.view_modules.modules()]
        super().train(mode)
        for part, was_training in modes:
            part.training = was_training
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Views and pooling of the policy, so that a file of another policy's weights is refused."""
        return {"views": [view.name for view in self.views], "kinds": [pool.kind for pool in self._pools]}

    def set_extra_state(self, state: Any) -> None:
        """Compare with the policy of the file."""
        if state != self.get_extra_state():
            raise ValueError(
                f"the weights belong to a policy with the views {state.get('views')} ({state.get('kinds')}); this "
                f"module has {[view.name for view in self.views]} ({[pool.kind for pool in self._pools]})"
            )

    def _outputs(self, batch: Batch, exporting: bool) -> Iterator[tuple[list[int], Tensor]]:
        """Indices of some views, and the network's outputs for them: (V, B, C)."""
        n_rows = batch.shape[0] if isinstance(batch, Tensor) else n_rows_of(batch)  # a symbol while exporting
        at_once = self._views_at_once(n_rows, exporting)
        pending: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}  # by shape of a row
        for k, view in enumerate(self.views):
            if view.stochastic:
                drawn = [self._call(_draw(view, batch, self.seed, m), n_rows) for m in range(self.draws)]
                yield [k], torch.stack(drawn).mean(0, keepdim=True)
                continue
            augmented = view(own_copy(view, batch))
            if augmented is batch and not exporting:
                augmented = copy_of(batch)  # a network may work in place
            if not isinstance(augmented, Tensor):
                yield [k], self._call(augmented, n_rows)[None]
                continue
            if not exporting and augmented.shape[0] != n_rows:
                raise ValueError(f"view {view.name} turned a batch of {n_rows} rows into {augmented.shape[0]}")
            shape = tuple(augmented.shape[1:])
            indices, tensors = pending.setdefault(shape, ([], []))
            indices.append(k)
            tensors.append(augmented)
            if len(indices) == at_once:
                yield indices, self._call_jointly(tensors, n_rows)
                del pending[shape]
        for indices, tensors in pending.values():
            yield indices, self._call_jointly(tensors, n_rows)

    def _views_at_once(self, n_rows: int, exporting: bool) -> int:
        """Number of views of one forward pass; the number of rows is unknown while exporting."""
        if exporting:
            return len(self.views) if self.max_batch is None else 1
        if torch.compiler.is_compiling():  # all or one, so that few batch sizes are compiled
            return len(self.views) if n_rows * len(self.views) <= self._max_rows() else 1
        return max(1, self._max_rows() // max(n_rows, 1))

    def _max_rows(self) -> int:
        return self.max_batch or (_ROWS_ON_CPU if self._device.type == "cpu" else _ROWS_ELSEWHERE)

    def _call_jointly(self, tensors: list[Tensor], n_rows: int) -> Tensor:
        """Outputs of several views of one shape from one forward pass: (V, B, C)."""
        if len(tensors) == 1:
            return self._call(tensors[0], n_rows)[None]
        outputs = self._call(torch.cat(tensors), len(tensors) * n_rows)
        return outputs.reshape(len(tensors), n_rows, outputs.shape[1])

    def _call(self, inputs: Batch, n_rows: int) -> Tensor:
        """Outputs of the network: (B, C)."""
        if isinstance(inputs, Tensor) and not torch.compiler.is_compiling() and n_rows > self._max_rows():
            parts = inputs.chunk(-(-n_rows // self._max_rows()))
            return torch.cat([self._call(part, part.shape[0]) for part in parts])
        with precision(self._autocast, self._device):
            raw = call_module(self.network, inputs, self._needed, self._keywords)
        outputs: Tensor = select_output(raw, self._select)
        if outputs.ndim == 1:
            outputs = outputs[:, None]
        same_rows = torch.compiler.is_exporting() or outputs.shape[0] == n_rows
        if outputs.ndim != 2 or outputs.shape[1] != self.n_outputs or not same_rows:
            raise ValueError(
                f"the network returned shape {tuple(outputs.shape)} for {n_rows} rows; the policy was fitted to "
                f"{self.n_outputs} outputs a row"
            )
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs

    def _finish(self, totals: list[Tensor]) -> Tensor:
        """The prediction from the sums of all members: (B, C)."""
        in_log = self.output_kind == "log_probability"
        if in_log and len(totals) == 1 and self._pools[0].is_latent_softmax:
            return torch.log_softmax(self._pools[0].utility(totals[0]), -1)
        parts = [pool.share * pool.finish(totals[place]) for place, pool in enumerate(self._pools)]
        result = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        return result.clamp_min(torch.finfo(result.dtype).tiny).log() if in_log else result

    @property
    def _pools(self) -> list["_Pool"]:
        return list(self.pools)  # type: ignore[arg-type]

    @property
    def _device(self) -> torch.device:
        return self._pools[0].offset.device

    def _check_batch(self, batch: Batch) -> None:
        """Refuse arrays and tensors of another device."""
        if isinstance(batch, np.ndarray):
            raise TypeError("TTAModule takes tensors; use torch.from_numpy(batch), or collect_views for arrays")
        device = next((tensor.device for tensor in self.network.parameters()), self._device)
        if device != self._device:
            raise ValueError(
                f"the network is on {device} and its policy on {self._device}: move the TTAModule, not the "
                f"network inside it, with .to(device)"
            )
        if isinstance(batch, Tensor) and batch.device != device:
            where = str(device)
            raise ValueError(f"the batch is on {batch.device} and the network on {where}: use batch.to({where!r})")

    def _in_precision(self, batch: Batch) -> Batch:
        """Floating-point tensors in the network's precision, as in collect_views."""
        dtype = dtype_of(self.network)
        if isinstance(batch, Tensor):
            return batch.to(dtype) if dtype is not None and batch.is_floating_point() else batch
        if isinstance(batch, Mapping):
            return {key: self._in_precision(part) for key, part in batch.items()}
        return tuple(self._in_precision(part) for part in batch) if isinstance(batch, tuple) else batch

    def _check_exportable(self) -> None:
        """Refuse to export random views and a network in training mode."""
        stochastic = [view.name for view in self.views if view.stochastic]
        if stochastic:
            raise ValueError(f"views {stochastic} draw random numbers, which an export would freeze; leave them out")
        if any(part.training for part in self.network.modules()):
            raise ValueError("the network is in training mode; call .eval() on the TTAModule before exporting it")


class _Pool(nn.Module):
    """The point prediction of one policy as a running sum over its views: see :class:`vbtta.models.base.Pooling`."""

    scale: Tensor  # (K, C)
    offset: Tensor  # (C,)
    weights: Tensor  # (K, C)

    def __init__(self, policy: Policy, share: float, names: tuple[str, ...]) -> None:
        super().__init__()
        pooling = policy.posterior.pooling()
        self.kind, self.link, self.share = pooling.kind, pooling.link, share
        self.by_class = policy.class_weights is not None
        # of the module's views: the row of the tables, or -1 for views that this policy does not use
        self.row_of = [policy.used_names.index(name) if name in policy.used_names else -1 for name in names]
        for name in ("scale", "offset", "weights"):
            self.register_buffer(name, torch.as_tensor(getattr(pooling, name), dtype=torch.float32))

    def add(self, total: Tensor | None, views: list[int], outputs: Tensor) -> Tensor | None:
        """The sum (B, C) with some views' outputs (V, B, C) added."""
        used = [place for place, view in enumerate(views) if self.row_of[view] >= 0]
        if not used:
            return total
        rows = [self.row_of[views[place]] for place in used]
        if len(used) < len(views):
            outputs = _rows_of(outputs, used)
        scaled = outputs * _rows_of(self.scale, rows)[:, None].to(outputs.dtype)
        if self.kind == "mixture":
            probability = class_probabilities(self.link, scaled + self.offset.to(outputs.dtype))
            scaled = probability * _rows_of(self.weights, rows)[:, None].to(outputs.dtype)
        part = scaled.sum(0)
        return part if total is None else total + part

    @property
    def is_latent_softmax(self) -> bool:
        """Whether log probabilities are a log-softmax."""
        return self.kind == "latent" and self.link == "softmax"

    def utility(self, total: Tensor) -> Tensor:
        """The pooled outputs with the offsets: (B, C)."""
        return total + self.offset.to(total.dtype)

    def finish(self, total: Tensor) -> Tensor:
        """Means or probabilities from the sum over all views: (B, C)."""
        if self.kind == "linear":
            return self.utility(total)
        if self.kind == "latent":
            return class_probabilities(self.link, self.utility(total))
        return total / total.sum(-1, keepdim=True) if self.by_class else total


def _output_kind(output: OutputKind | None, task: str) -> OutputKind:
    kinds: tuple[OutputKind, ...] = ("mean",) if task == "regression" else ("probability", "log_probability")
    if output is not None and output not in kinds:
        raise ValueError(f"output must be {' or '.join(map(repr, kinds))} for a {task} policy; got {output!r}")
    return output or kinds[0]


def _used_views(views: list[Augmentation], policy: Policy, output_kind: str) -> list[Augmentation]:
    """The views of positive weight in the order of the fit."""
    by_name = {view.name: view for view in views}
    if policy.generated_names:
        if len(views) != len(policy.names):
            raise ValueError(
                f"the policy was fitted to {len(policy.names)} unnamed views and got {len(views)}; fit it to named ones"
            )
        by_name = dict(zip(policy.names, views, strict=True))
    needed = policy.used_names
    missing = [name for name in needed if name not in by_name]
    if missing:
        raise ValueError(f"the policy needs the views {missing}, which are not among {list(by_name)}")
    for name in needed:
        difference = conflict(policy.fingerprints.get(name, ""), f"{view_fingerprint(by_name[name])}/{output_kind}")
        if difference is not None:
            raise ValueError(f"view {name!r} is not the one the policy was fitted to: it {difference}")
    return [by_name[name] for name in needed]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _draw(view: Augmentation, batch: Batch, seed: int, draw: int) -> Batch:
    return view(own_copy(view, batch), RowStreams(seed, view.name, draw, np.arange(n_rows_of(batch))))


def _rows_of(table: Tensor, rows: list[int]) -> Tensor:
    """Rows of a table, without copying the row numbers to a device."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return table[rows[0] : rows[-1] + 1]
    return torch.stack([table[row] for row in rows])
