"""TTAModule: a network, its views and a policy as one torch module, ready for export."""

__all__ = ["Maps", "Stage", "TTAModule"]

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from vbtta._support.checks import missing_extra, to_array, whole_number
from vbtta._support.fingerprints import view_fingerprint
from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, copy_of, n_rows_of, rows_of
from vbtta.adapters.base import as_predictor, select_output
from vbtta.augment.arrays import Identity
from vbtta.augment.base import Augmentation, augment, invert_view, is_partial, part_of, reorder_classes
from vbtta.augment.foreign import as_views
from vbtta.conformal import ConformalPolicy
from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions, conflict, draws_of
from vbtta.policy import Policy
from vbtta.sequential import SequentialPolicy, class_features, gain_features

try:
    import torch
    from torch import Tensor, nn

    from vbtta.adapters.torch import TorchPredictor, call_module, dtype_of, evaluating
    from vbtta.models.parts.gate import Gate, built_in, gated
    from vbtta.models.parts.link_densities import class_probabilities
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "torch") from error

OutputKind = Literal["probability", "log_probability", "mean"]

# Default rows of one forward pass. With more, activations exceed a processor's cache and the allocator returns their
# memory between passes; with fewer, the overhead of the calls dominates.
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 32, 512
_POSITIONS_OF_A_PASS = 1 << 20  # before it is known whether the network returns maps
_POSITIONS_AT_ONCE = 1 << 15  # of `TTAModule.maps`
_NUMBERS_ON_CPU, _NUMBERS_ELSEWHERE = 1 << 17, 1 << 24  # of maps, pooled at once: temporary arrays stay in the cache

ViewOutputs = tuple[list[int], Tensor, Tensor | None]  # see `TTAModule._outputs`
_augment = torch.compiler.disable(augment)  # type: ignore[no-untyped-call]
_NOT_FINITE = "the result is not finite; collect_views says under which view, and for which input"
_UNSEEN = -1e9  # logarithm of a weight, for positions that a view does not see


class _Sums(NamedTuple):
    """What the views computed so far add up to, at the rows or positions of a member of the policy."""

    total: Tensor  # (B, C, ...): weighted sum; with a gate, weighted average
    weight: Any = 0.0  # (1 or B, 1 or C, ...): of the views so far, without a gate
    log_weight: Any = None  # (B, 1, ...): its logarithm up to a constant, with a gate
    identity: Any = None  # (B, C, ...): outputs that a gate compares with
    masked: bool = False  # whether a view missed positions


@dataclass(frozen=True)
class Maps:
    """Predictive distributions of maps, as tensors; what the task does not have is None.

    Class probabilities (B, C, H, W); the entropy (B, H, W) of the class in nats, and the mutual information of class
    and view: what the views disagree about. Mean and variance (B, C, H, W) of a regression.
    """

    probability: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


class TTAModule(nn.Module):
    """A network with the views of a policy: augments its input, and returns one calibrated prediction.

    Views of weight zero are never computed. Views that give images of one size share forward passes. Where the network
    returns maps (B, C, H, W) or (B, C, D, H, W), so does the module, at the size of the inputs: views are undone one
    after the other and added up, and where a view does not see a position the others' weights are renormalised. Where
    no view sees it, the network's output for the unchanged input takes the place of the views'.

    Parameters
    ----------
    network : torch.nn.Module, or the result of ``as_predictor(module, output=...)``
        The network; it is called in evaluation mode, and its mode is restored afterwards.
    views : list of views
        All views of the policy with a positive weight, matched by name; others are ignored.
    policy : Policy or SequentialPolicy
        Fitted to predictions of the same network and views. Of a sequential policy every stage is computed for the rows
        of the batch that are left, together; the result has no gradient and is that of `policy.predict`. Its stages are
        `module.stages`: compile them with ``stage.compile()`` and export them one by one, for `SequentialPolicy.run`.
    output : {"probability", "log_probability", "mean"}, optional
        Result of `forward`: class probabilities (B, C) or their logarithm in classification, means (B, C) in
        regression. By default "probability" or "mean".
    max_batch : int, optional
        Largest number of rows of a forward pass; views beyond it are computed in turn and added up, and a tensor of
        more rows is split. By default 32 on a CPU and 512 elsewhere, and one view at a time for maps. An exported
        module computes all views in one pass, or with `max_batch` in one pass each.
    draws, seed : int
        Draws of every stochastic view, by default as many as the policy was fitted to; rows are numbered in the batch.
    key : optional
        The part of a dict that views work on, as in :func:`vbtta.collect_views`.
    """

    def __init__(
        self, network: Any, views: Any, policy: Policy | SequentialPolicy, *,
        output: OutputKind | None = None, max_batch: int | None = None, draws: int | None = None, seed: int = 0,
        key: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        adapter = as_predictor(network)
        if not isinstance(adapter, TorchPredictor):
            kind = type(network).__name__
            raise TypeError(f"TTAModule wraps torch modules; got {kind}. Use collect_views for others")
        self.sequential = policy if isinstance(policy, SequentialPolicy) else None
        policy = policy.policies[-1] if isinstance(policy, SequentialPolicy) else policy
        argument: object = policy
        if not isinstance(argument, Policy):
            remedy = ". Read a file with Policy.load(path)" if isinstance(argument, str | os.PathLike) else ""
            if isinstance(argument, ConformalPolicy):
                remedy = ". Give conformal.policy, and make sets of its predictions by conformal.predict_set"
            raise TypeError(f"policy must be a Policy; got {type(argument).__name__}{remedy}")
        if draws is None:
            draws = max((draws_of(text) or 1 for text in policy.fingerprints.values()), default=1)
        self.max_batch = None if max_batch is None else whole_number("max_batch", max_batch, 1)
        self.key, self.draws, self.seed = key, whole_number("draws", draws, 1), whole_number("seed", seed, 0)
        kinds: tuple[OutputKind, ...] = ("mean",) if policy.task == "regression" else ("probability", "log_probability")
        if output is not None and output not in kinds:
            choice = " or ".join(map(repr, kinds))
            raise ValueError(f"output must be {choice} for a {policy.task} policy; got {output!r}")
        self.output_kind: OutputKind = output or kinds[0]
        self.network = adapter.module
        self.views = _used_views(as_views(views), policy, adapter.output_kind)
        self.n_outputs, names = policy.n_outputs, policy.used_names
        self._gives_maps: bool | None = None  # not known before the first call
        self._identity_alone = policy.gate is not None  # other views' outputs are compared with its own
        self.policy = replace(policy, generated_names=False)
        # a gate compares maps of the views with that of the identity, which is then computed first
        order = sorted(range(len(self.views)), key=lambda k: policy.gate is not None and names[k] != "identity")
        self.views, self.view_names = [self.views[k] for k in order], tuple(names[k] for k in order)
        self.pools: Any = nn.ModuleList(
            _Pool(member, float(share), self.view_names)
            for member, share in zip(policy.members, policy.member_weights, strict=True)
        ).to(adapter.device)
        # transforms of other libraries may hold tensors, which must move with the module
        functions = (getattr(view, "function", None) for view in self.views)
        self.view_modules = nn.ModuleList(part for part in functions if isinstance(part, nn.Module))
        self._select, self._needed, self._keywords = adapter.output, adapter.needed, adapter.keywords
        self.stages: tuple[Stage, ...] = ()  # not registered: the network is already
        if self.sequential is not None:
            steps = zip(self.sequential.policies, self.sequential.stages, strict=True)
            options = {"max_batch": max_batch, "draws": draws, "seed": seed, "key": key}
            self.stages = tuple(Stage(network, views, part, names, **options) for part, names in steps)
            others = (part for stage in self.stages for part in stage.view_modules)
            self.view_modules.extend(part for part in others if part not in list(self.view_modules))

    def extra_repr(self) -> str:
        """Name the views and the output."""
        return f"views=[{', '.join(view.name for view in self.views)}], output={self.output_kind!r}"

    def __call__(self, *args: Any, **parts: Any) -> Any:
        """A batch, or the parts of a dict by name, as models of transformers take them."""
        if args or not parts or "batch" in parts:
            return super().__call__(*args, **parts)
        return super().__call__(parts)

    def forward(self, batch: Any) -> Tensor:
        """Inputs of B rows, as the network takes them, to probabilities, their logarithm or means: (B, C), or maps."""
        exporting, running = torch.compiler.is_exporting(), not torch.compiler.is_compiling()
        if self.sequential is not None:
            if exporting:
                raise ValueError("a sequential module has one graph a stage; export each of module.stages")
            return self._in_stages(batch, self.sequential)  # type: ignore[no-any-return]
        if exporting:
            self._check_exportable()
        elif running:
            self._check_batch(batch)
            batch = self._in_precision(batch)
        with self._evaluating(exporting):
            sums: list[Any] = [None] * len(self.pools)
            for views, outputs, seen in self._outputs(batch, exporting):
                if self.policy.multilabel:  # two classes a label, as positions of a map have them
                    outputs = torch.stack([torch.zeros_like(outputs), outputs], dim=2)
                for place, pool in enumerate(self.pools):
                    sums[place] = pool.add(sums[place], views, outputs, seen)
                del outputs, seen  # before the next view is computed
        result = self.finish(sums)
        result = result[:, 1] if self.policy.multilabel else result
        check = running and result.device.type == "cpu"  # on other devices a costly wait
        if check and not result.sum().isfinite() and not result.isfinite().all():  # the sum is fast, but may overflow
            raise ValueError(_NOT_FINITE)
        return result

    def maps(self, batch: Any) -> Maps:
        """Probability, entropy and mutual information of maps (mean and variance in regression), as Policy.predict.

        One input after the other, with the outputs of all views for it in memory.
        """
        self._check_batch(batch)
        batch = self._in_precision(batch)
        images = part_of(batch, self.key)
        if not len(images):
            raise ValueError("the batch is empty; maps need at least one input")
        with evaluating(self.network), torch.no_grad():
            parts = [self._uncertainty(rows_of(batch, slice(row, row + 1)), row) for row in range(len(images))]
        arrays = ((name, np.stack([part[name].T for part in parts])) for name in parts[0])  # (B, P) or (B, C, P)
        size = images.shape[2:]
        return Maps(**{name: torch.from_numpy(a.reshape(*a.shape[:-1], *size)).to(images) for name, a in arrays})

    def _uncertainty(self, single: Batch, row: int) -> dict[str, Array]:
        """Arrays (P, C) or (P,) by name, for the P positions of one input."""
        n_views, n_positions = len(self.views), int(np.prod(part_of(single, self.key).shape[2:]))
        held = np.empty((n_positions, n_views, self.n_outputs), dtype=np.float32)
        seen = np.zeros((n_positions, n_views), dtype=bool)
        for views, outputs, mask in self._outputs(single, False, row):
            if outputs.ndim == 3:
                raise ValueError("the network returns rows (B, C), not maps; use Policy.predict for their uncertainty")
            if not outputs.isfinite().all():
                name = self.view_names[views[0]]
                raise ValueError(f"the network gave NaN or infinity for input {row} under view {name}; leave one out")
            positions = slice(None) if mask is None else mask.reshape(-1).cpu().numpy()
            held[positions, views[0]] = outputs.reshape(-1, n_positions).T.cpu().numpy()[positions]
            seen[positions, views[0]] = True
        pooled = any(pool.gate is not None and pool.gate.pooled for pool in self.pools)
        if pooled and not seen.all():
            raise ValueError(
                "maps() needs views that see all of an input where weights depend on averages over it; leave out the "
                "others, fit CategoricalMixture(weights='input', features='own'), or call the module for probabilities"
            )
        at_once = n_positions if pooled else _POSITIONS_AT_ONCE
        result: dict[str, Array] = {}
        patterns, pattern = np.unique(np.packbits(seen, axis=1), axis=0, return_inverse=True)
        for code in range(len(patterns)):
            places = np.flatnonzero(pattern.reshape(-1) == code)
            used = np.flatnonzero(seen[places[0]])
            names, policy = [self.view_names[k] for k in used], self.policy
            if len(used) < n_views:
                policy = policy.restrict([(policy.fitted or policy.names).index(name) for name in names])
            for start in range(0, len(places), at_once):
                block = places[start : start + at_once]
                options: dict[str, Any] = {"names": names, "classes": policy.classes, "groups": np.zeros(len(block))}
                prediction = policy.predict(ViewPredictions(held[np.ix_(block, used)], **options))
                for name in ("probability", "entropy", "mutual_information", "mean", "variance"):
                    if (values := getattr(prediction, "proba" if name == "probability" else name, None)) is not None:
                        result.setdefault(name, np.empty((n_positions, *values.shape[1:]), "f4"))[block] = values
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_stages(self, batch: Batch, sequential: SequentialPolicy) -> Tensor:
        """Every stage for the rows that are left, by the rule of `SequentialPolicy.predict`."""
        self._check_batch(batch)
        batch, rows, outputs = self._in_precision(batch), np.arange(n_rows_of(batch)), list[Tensor]()
        with evaluating(self.network), torch.no_grad():
            for place, (stage, names) in enumerate(zip(self.stages, accumulate(sequential.stages), strict=True)):
                if stage.views:  # pruning may leave a stage without a view of its own
                    outputs = [torch.cat([*outputs, stage.by_view(batch, rows)])]  # (V, B, C, ...)
                if not place:
                    result = torch.empty_like(outputs[0][0])
                    sequential.check_groups(maps=result.ndim > 2)
                known = _rows_of(outputs[0], [names.index(name) for name in stage.view_names])
                last = place + 1 == len(self.stages) or not len(rows)
                result[rows], features = stage.point(known, last)
                go_on = np.zeros(0) if last else sequential.go_on(place, features, len(rows))
                left = torch.from_numpy(np.flatnonzero(go_on))
                if not len(left):
                    break
                rows, outputs, batch = rows[left.numpy()], [outputs[0][:, left]], rows_of(batch, left)
        if not result.isfinite().all():
            raise ValueError(_NOT_FINITE)
        return _log(result) if self.output_kind == "log_probability" else result

    def _apply(self, function: Any, recurse: bool = True) -> Self:
        """Move the module; its stages are no submodules."""
        for stage in self.stages:
            stage.pools._apply(function)
        return super()._apply(function, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        """Set the network's mode; views keep theirs (dropout depends on it)."""
        modes = [(part, part.training) for part in self.view_modules.modules()]
        super().train(mode)
        for part, was_training in modes:
            part.training = was_training
        return self

    def _outputs(self, batch: Batch, exporting: bool, first: int | Array = 0) -> Iterator[ViewOutputs]:
        """Indices of some views, the outputs (V, B, C, ...) for them, and the mask (1 or B, 1, ...) of what they see.

        Maps come view by view, in the geometry of the batch. At positions that none of the views sees, the outputs for
        the batch itself stand in for those of every view. `first` is the number of the first row, or of every row less
        its place.
        """
        n_rows = batch.shape[0] if isinstance(batch, Tensor) else n_rows_of(batch)  # a symbol while exporting
        unseen: Any = True
        for views, outputs, seen in self._outputs_of_views(batch, n_rows, exporting, first):
            if unseen is not False:
                unseen = False if seen is None else ~seen & unseen
            yield views, outputs, seen
            del outputs, seen
        if unseen is not False and (torch.compiler.is_compiling() or unseen.any()):
            outputs, _ = self._restored(Identity(), self._call(copy_of(batch), n_rows), batch, batch)
            for k in range(len(self.views)):
                yield [k], outputs[None], unseen

    def _outputs_of_views(
        self, batch: Batch, n_rows: int, exporting: bool, first: int | Array
    ) -> Iterator[ViewOutputs]:
        """Outputs of the views, as in `_outputs`."""
        at_once = self._views_at_once(batch, n_rows, exporting)
        pending: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}  # by shape of a row
        for k, view in enumerate(self.views):
            if view.stochastic:
                yield self._drawn(k, batch, n_rows, first)
                continue
            augmented = augment(view, batch, key=self.key)
            if augmented is batch and not exporting:
                augmented = copy_of(batch)  # a network may work in place
            if not isinstance(augmented, Tensor):
                outputs, seen = self._restored(view, self._call(augmented, n_rows), augmented, batch)
                yield [k], outputs[None], seen
                continue
            if not exporting and augmented.shape[0] != n_rows:
                raise ValueError(f"view {view.name} turned a batch of {n_rows} rows into {augmented.shape[0]}")
            shape = tuple(augmented.shape[1:])
            indices, tensors = pending.setdefault(shape, ([], []))
            indices.append(k)
            tensors.append(_by_rows(augmented))
            del augmented
            if len(indices) == at_once or (k == 0 and self._identity_alone and not exporting):
                yield from self._call_jointly(*pending.pop(shape), batch, n_rows)
        for indices, tensors in pending.values():
            yield from self._call_jointly(indices, tensors, batch, n_rows)

    def _drawn(self, k: int, batch: Batch, n_rows: int, first: int | Array) -> ViewOutputs:
        """Mean outputs (1, B, C, ...) of a stochastic view, and the mask of what all draws see."""
        view, total, seen = self.views[k], None, None
        for m in range(self.draws):
            augmented = _augment(view, batch, _streams(view, batch, self.seed, m, first), self.key)
            outputs = self._call(augmented, n_rows)
            rng = _streams(view, batch, self.seed, m, first) if outputs.ndim > 2 else None
            outputs, mask = self._restored(view, outputs, augmented, batch, rng)
            total = outputs if total is None else total + outputs
            if mask is not None:
                seen = mask if seen is None else seen & mask
        assert total is not None
        return [k], (total / self.draws)[None], seen

    def _restored(
        self, view: Augmentation, outputs: Tensor, augmented: Batch, batch: Batch, rng: RowStreams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs of a view for the inputs themselves, and the mask (1 or B, 1, ...) of the positions that it sees."""
        if outputs.ndim == 2:
            return reorder_classes(view, outputs), None
        return invert_view(view, outputs, part_of(augmented, self.key), part_of(batch, self.key), rng)

    def _views_at_once(self, batch: Batch, n_rows: int, exporting: bool) -> int:
        """Number of views of one forward pass; the number of rows is unknown while exporting."""
        if exporting:
            return len(self.views) if self.max_batch is None else 1
        if self.max_batch is None and isinstance(batch, Tensor) and batch.ndim > 3:
            n_positions = len(self.views) * n_rows * batch.shape[2:].numel()
            if self._gives_maps or (self._gives_maps is None and n_positions > _POSITIONS_OF_A_PASS):
                return 1  # maps of several views at once would need memory for all of them
        if torch.compiler.is_compiling():  # all or one, so that few batch sizes are compiled
            return len(self.views) if n_rows * len(self.views) <= self._max_rows() else 1
        return max(1, self._max_rows() // max(n_rows, 1))

    def _max_rows(self) -> int:
        return self.max_batch or (_ROWS_ON_CPU if self._device.type == "cpu" else _ROWS_ELSEWHERE)

    def _call_jointly(
        self, views: list[int], tensors: list[Tensor], batch: Batch, n_rows: int
    ) -> Iterator[ViewOutputs]:
        """Outputs of several views of one shape from one forward pass, as in `_outputs`."""
        joint = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        outputs = self._call(joint, len(tensors) * n_rows)
        if outputs.ndim == 2:
            rows = zip(views, outputs.reshape(len(tensors), n_rows, outputs.shape[1]), strict=True)
            yield views, torch.stack([reorder_classes(self.views[k], part) for k, part in rows]), None
            return
        parts = [outputs[place * n_rows : (place + 1) * n_rows] for place in range(len(views))]
        del joint, outputs  # of maps only those in use are kept
        for k in views:
            maps, seen = invert_view(self.views[k], parts.pop(0), tensors.pop(0), batch)
            yield [k], maps[None], seen
            del maps, seen

    def _call(self, inputs: Batch, n_rows: int) -> Tensor:
        """Outputs of the network: (B, C), or maps (B, C, H, W) or (B, C, D, H, W)."""
        if isinstance(inputs, Tensor) and not torch.compiler.is_compiling() and n_rows > self._max_rows():
            parts = inputs.chunk(-(-n_rows // self._max_rows()))
            return torch.cat([self._call(part, part.shape[0]) for part in parts])
        raw = call_module(self.network, inputs, self._needed, self._keywords)
        outputs: Tensor = select_output(raw, self._select)
        outputs = outputs[:, None] if getattr(outputs, "ndim", 0) == 1 else outputs
        shape = tuple(getattr(outputs, "shape", ()))
        same_rows = torch.compiler.is_exporting() or shape[:1] == (n_rows,)
        if len(shape) not in (2, 4, 5) or shape[1] != self.n_outputs or not same_rows:
            fitted = f"the policy was fitted to {self.n_outputs} outputs a row"
            raise ValueError(f"the network returned shape {shape} for {n_rows} rows; {fitted}")
        if not torch.compiler.is_compiling():
            self._gives_maps = outputs.ndim > 2
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs

    def finish(self, sums: list[Any]) -> Tensor:
        """The prediction (B, C, ...) from the sums of all members."""
        total: Any = 0.0
        share: Any = 0.0
        for pool, part in zip(self.pools, sums, strict=True):
            values, visible = pool.finish(part)
            weight = pool.share if visible is None else pool.share * visible
            total, share = (values if len(sums) == 1 else total + weight * values), share + weight
        if isinstance(share, Tensor) and len(sums) > 1:  # not all members see all positions
            total = total / share
        return _log(total) if self.output_kind == "log_probability" else total

    def _evaluating(self, exporting: bool) -> AbstractContextManager[None]:
        training = not exporting and any(part.training for part in self.network.modules())
        return evaluating(self.network) if training or not torch.compiler.is_compiling() else nullcontext()

    @property
    def _device(self) -> torch.device:
        return torch.device(self.pools[0].offset.device)

    def _check_batch(self, batch: Batch) -> None:
        """Refuse arrays and tensors of another device."""
        if not isinstance(batch, Tensor | Mapping | tuple):
            remedy = "torch.from_numpy(batch) or torch.stack(batch), or collect_views for anything else"
            raise TypeError(f"TTAModule takes tensors, or dicts or tuples of them; use {remedy}")
        device = next((tensor.device for tensor in self.network.parameters()), self._device)
        if device != self._device:
            raise ValueError(f"the network is on {device}, its policy on {self._device}: move the TTAModule by .to()")
        if isinstance(batch, Tensor) and batch.device != device:
            raise ValueError(f"the batch is on {batch.device} and the network on {device}: use batch.to('{device}')")

    def _in_precision(self, batch: Batch) -> Batch:
        """Floating-point tensors in the network's precision, as in collect_views."""
        if isinstance(batch, Tensor):
            return batch.to(dtype_of(self.network) or batch.dtype) if batch.is_floating_point() else batch
        if isinstance(batch, Mapping):
            return {key: self._in_precision(part) for key, part in batch.items()}
        return tuple(self._in_precision(part) for part in batch) if isinstance(batch, tuple) else batch

    def _check_exportable(self) -> None:
        """Refuse to export random views and a network in training mode."""
        if stochastic := [view.name for view in self.views if view.stochastic]:
            raise ValueError(f"views {stochastic} draw random numbers, which an export would freeze; leave them out")
        if any(part.training for part in self.network.modules()):
            raise ValueError("the network is in training mode; call .eval() on the TTAModule before exporting it")


class _Pool(nn.Module):
    """The point prediction of one policy as a running sum over its views: see :class:`vbtta.models.base.Pooling`."""

    scale: Tensor  # (K, C)
    offset: Tensor  # (K, C)
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
        self.gate = None if pooling.gate is None else _Gate(pooling.gate, policy.used_names)

    def add(self, sums: Any, views: list[int], outputs: Tensor, seen: Tensor | None) -> Any:
        """The sums with some views' outputs (V, B, C, ...) added where they are seen, (1 or B, 1, ...).

        A gate that compares all views has their outputs instead, by row of the tables.
        """
        used = [place for place, view in enumerate(views) if self.row_of[view] >= 0]
        if not used:
            return sums
        rows = [self.row_of[views[place]] for place in used]
        outputs = outputs if len(used) == len(views) else _rows_of(outputs, used)
        if self.gate is not None and self.gate.compares_all:
            if seen is not None:
                raise ValueError("features='all' needs views that see all of a map; fit with features='own'")
            return (sums or {}) | dict(zip(rows, outputs, strict=True))
        if sums is None:
            sums = _Sums(torch.zeros_like(outputs[0]))
            if self.gate is not None:
                never = torch.full_like(outputs[0, :, :1], _UNSEEN)
                sums = sums._replace(log_weight=never, identity=outputs[0] if self.gate.places else None)
        sums = sums._replace(masked=sums.masked or seen is not None)
        if self.gate is not None:
            for row, maps in zip(rows, outputs, strict=True):
                sums = self._add_gated(sums, self.gate, row, maps, seen)
            return sums
        scale, offset, weights = self._tables(rows, outputs)
        for block in _blocks(outputs[0]):
            terms = self._terms(outputs[(slice(None), *block)], scale, offset)
            shares = weights if seen is None else weights * seen[block]
            if len(rows) == 1:
                sums.total[block].addcmul_(terms[0], shares[0])
            else:
                sums.total[block].add_((terms * shares).sum(0))
        shares = weights if self.by_class else weights[:, :, :1]
        return sums._replace(weight=sums.weight + (shares if seen is None else shares * seen).sum(0))

    def _add_gated(self, sums: _Sums, gate: "_Gate", row: int, outputs: Tensor, seen: Tensor | None) -> _Sums:
        """The sums with one view's outputs (B, C, ...), whose weight depends on them and on the identity's.

        The average moves towards the view by its share of the weights so far.
        """
        identity = outputs if sums.identity is None else sums.identity
        blocks, (scale, offset, _) = _blocks(outputs), self._tables([row], outputs[None])
        if gate.pooled:
            mean = gate.mean_features(outputs, identity, seen)
        for block in blocks:
            total, weight = sums.total[block], sums.log_weight[block]
            terms = self._terms(outputs[block][None], scale, offset)[0]
            score = gate.score(row, mean if gate.pooled else gate.features(outputs[block], identity[block]))
            score = score.to(terms.dtype) if seen is None else torch.where(seen[block], score, _UNSEEN).to(terms.dtype)
            average = torch.lerp(total, terms, torch.sigmoid(score - weight))
            log_weight = torch.maximum(score, weight) + torch.log1p(torch.exp(-(score - weight).abs()))
            if len(blocks) == 1:  # gradients need the former sums
                return sums._replace(total=average, log_weight=log_weight)
            total.copy_(average)
            weight.copy_(log_weight)
        return sums

    def _tables(self, rows: list[int], outputs: Tensor) -> tuple[Tensor, ...]:
        """Scale, offset and weights (V, 1, C, ...) of some views, for their outputs (V, B, C, ...)."""
        shape = (len(rows), 1, outputs.shape[2], *[1] * (outputs.ndim - 3))
        tables = (self.scale, self.offset, self.weights)
        return tuple(_rows_of(table, rows).reshape(shape).to(outputs.dtype) for table in tables)

    def _terms(self, outputs: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """What views contribute to the sums before they are weighted: (V, B, C, ...)."""
        terms = (_by_rows(outputs) * scale).add_(offset)
        return self._probabilities(terms, 2) if self.kind == "mixture" else terms

    def _probabilities(self, utility: Tensor, axis: int) -> Tensor:
        """Class probabilities of utilities with the classes along an axis."""
        if self.link == "softmax":
            return torch.softmax(utility, axis)
        return class_probabilities(self.link, utility.movedim(axis, -1)).movedim(-1, axis)

    def finish(self, sums: Any) -> tuple[Tensor, Tensor | None]:
        """Means or probabilities (B, C, ...) over the views that see a position; where any does (None: everywhere)."""
        if not isinstance(sums, _Sums):
            assert self.gate is not None
            outputs = torch.stack([sums[row] for row in range(len(self.scale))])  # (K, B, C, ...)
            positions = outputs.movedim(2, -1)
            gates: Tensor = self.gate(positions.flatten(1, -2).transpose(0, 1)).T  # (K, positions)
            scale, offset, _ = self._tables(list(range(len(self.scale))), outputs)
            terms = self._terms(outputs, scale, offset)
            return (terms * gates.reshape(positions.shape[:-1]).unsqueeze(2)).sum(0), None
        total, visible = sums.total, None
        if sums.masked and self.gate is not None:
            visible = (sums.log_weight > _UNSEEN / 2).to(total.dtype)
        elif sums.masked:
            total = total / torch.where(sums.weight > 0, sums.weight, 1.0)
            visible = (sums.weight[:, :1] > 0).to(total.dtype)
        if self.kind == "latent":
            total = self._probabilities(total, 1)
        return total / total.sum(1, keepdim=True) if self.by_class else total, visible


class _Gate(nn.Module):
    """Weights that depend on the outputs of a view and of those that it is compared with."""

    def __init__(self, gate: Gate, names: tuple[str, ...]) -> None:
        super().__init__()
        gate.check_built_in()
        self.task, self.places = gate.features.task, gate.features.places(names)
        self.pooled, self.compares_all = gate.features.choice == "pooled", gate.features.choice == "all"
        tables = gate.tables()
        # logits are moved by a constant, so that single precision keeps the digits of log_sum_exp that slopes enlarge
        self.shift, size = 0.0, "log_sum_exp"
        if size in gate.names:
            self.shift = float(np.float32(tables["limits"][0, gate.names.index(size)]))
            tables["limits"] = tables["limits"] - self.shift * (np.array(gate.names) == size)
        for name, values in {"unit": gate.features.unit, **tables}.items():
            self.register_buffer(name, torch.as_tensor(values, dtype=torch.float32))

    def forward(self, outputs: Tensor) -> Tensor:
        """The weights (B, K) from the outputs (B, K, C) of all views."""
        unit, *tables = (table.to(outputs.dtype) for table in self.buffers())
        raw = built_in(torch, self.task, outputs - self.shift, unit, self.places)
        return gated(torch, raw, *tables)  # type: ignore[no-any-return]

    def features(self, outputs: Tensor, identity: Tensor) -> Tensor:
        """Features (B, ..., F) of a view's outputs (B, C, ...)."""
        pair = torch.stack([identity.movedim(1, -1), outputs.movedim(1, -1)], -2)  # (B, ..., 2, C)
        unit = self.get_buffer("unit").to(outputs.dtype)
        raw = built_in(torch, self.task, pair.flatten(0, -3) - self.shift, unit, [0])[:, 1]
        return raw.reshape(*pair.shape[:-2], raw.shape[-1])  # type: ignore[no-any-return]

    def mean_features(self, outputs: Tensor, identity: Tensor, seen: Tensor | None) -> Tensor:
        """Averages (B, 1, ..., F) over the positions that are seen, in double precision: slopes may be large."""
        if outputs.ndim < 3:
            raise ValueError("features='pooled' averages over maps (B, C, H, W), and the network returns rows")
        total: Any = 0.0
        count: Any = 0.0
        space, mask = tuple(range(1, outputs.ndim - 1)), torch.ones_like(outputs[:1, :1]) if seen is None else seen
        for block in _blocks(outputs):
            visible = mask[block].movedim(1, -1).double()
            total = total + (self.features(outputs[block], identity[block]) * visible).sum(space, keepdim=True)
            count = count + visible.sum(space, keepdim=True)
        return total / count  # type: ignore[no-any-return]

    def score(self, row: int, features: Tensor) -> Tensor:
        """Logarithms (B, 1, ...) of a view's weight up to a constant, from features (B, ..., F)."""
        limits, slopes, log_weights = (self.get_buffer(name) for name in ("limits", "slopes", "log_weights"))
        clipped = torch.minimum(torch.maximum(features, limits[0]), limits[1]) - limits[0]
        return (log_weights[row] + (clipped * slopes).sum(-1, keepdim=True)).movedim(-1, 1)


class Stage(TTAModule):
    """The views that a stage adds: inputs of B rows to the network's outputs (B, V, C), or maps (B, V, ..., C)."""

    def __init__(self, network: Any, views: Any, policy: Policy, names: tuple[str, ...], **options: Any) -> None:
        super().__init__(network, views, policy, **options)
        self.views = [view for name in names for view in self.views if view.name == name]
        self._identity_alone = False  # outputs of all views are kept

    def forward(self, batch: Any) -> Tensor:
        """Outputs of the stage's views, in the order of `SequentialPolicy.stages`."""
        with self._evaluating(torch.compiler.is_exporting()):
            return self.by_view(batch).movedim(0, -1).movedim(1, -1)

    def by_view(self, batch: Any, row_numbers: Array | None = None) -> Tensor:
        """The same, views first: (V, B, C, ...); row numbers, by default 0, 1, ..., are those of stochastic views."""
        exporting = torch.compiler.is_exporting()
        if exporting:
            self._check_exportable()
        first = 0 if row_numbers is None else row_numbers - np.arange(len(row_numbers))
        parts = list(self._outputs(batch, exporting, first))
        outputs = torch.cat([part[1] for part in parts])
        if outputs.ndim > 3 and any(map(is_partial, self.views)):
            raise ValueError("stages of maps need views that see all of an input; leave out those that do not")
        order = np.argsort([view for part in parts for view in part[0]]).tolist()
        return _rows_of(outputs, order)

    def point(self, outputs: Tensor, last: bool) -> tuple[Tensor, Array]:
        """Probabilities or means (B, C, ...) from all views so far (V, B, C, ...), and what the rule looks at."""
        if last or self.policy.task == "classification":
            values = self.finish([pool.add(None, list(range(len(outputs))), outputs, None) for pool in self.pools])
            if last:  # all rows stop
                return values, np.empty(0)
            highest, second = values.topk(2, dim=1).values.unbind(1)
            entropy = torch.special.entr(values).sum(1)
            return values, class_features(to_array(entropy.flatten()), to_array((highest - second).flatten()))
        shape = outputs[0].movedim(1, -1).shape
        groups = np.repeat(np.arange(shape[0]), int(np.prod(shape[1:-1])))
        positions = to_array(outputs.movedim(0, -1).movedim(1, -1).flatten(0, -3))
        views = ViewPredictions(positions, names=self.view_names, groups=groups).select(self.policy.used_names)
        prediction: Any = self.policy.posterior.predict(views)
        means = torch.from_numpy(prediction.mean).to(outputs).reshape(shape).movedim(-1, 1)
        return means, gain_features(self.policy, prediction, views)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the network, as ``torch.compile`` does; views run as they are."""
        self.network: Any = torch.compile(self.network, *arguments, **options)


def _used_views(views: list[Augmentation], policy: Policy, output_kind: str) -> list[Augmentation]:
    """The views of positive weight in the order of the fit."""
    by_name = {view.name: view for view in views}
    if policy.generated_names:
        if len(views) != len(policy.names):
            raise ValueError(f"the policy was fitted to {len(policy.names)} unnamed views and got {len(views)}")
        by_name = dict(zip(policy.names, views, strict=True))
    needed = policy.used_names
    if missing := [name for name in needed if name not in by_name]:
        raise ValueError(f"the policy needs the views {missing}, which are not among {list(by_name)}")
    for name in needed:
        difference = conflict(policy.fingerprints.get(name, ""), f"{view_fingerprint(by_name[name])}/{output_kind}")
        if difference is not None:
            raise ValueError(f"view {name!r} is not the one the policy was fitted to: it {difference}")
    return [by_name[name] for name in needed]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _streams(view: Augmentation, batch: Batch, seed: int, draw: int, first: int | Array) -> RowStreams:
    return RowStreams(seed, view.name, draw, first + np.arange(n_rows_of(batch)))


def _blocks(maps: Tensor) -> list[Any]:
    """Parts of maps (B, C, ...) along the first axis of space, small enough for a processor's cache, as indices."""
    if maps.ndim < 3 or maps.requires_grad or torch.compiler.is_compiling():
        return [()]
    at_once = _NUMBERS_ON_CPU if maps.device.type == "cpu" else _NUMBERS_ELSEWHERE
    length = max(1, at_once // (maps[:, :, 0].numel() or 1))
    whole = slice(None)
    return [(whole, whole, slice(start, start + length)) for start in range(0, maps.shape[2], length)]


def _log(probability: Tensor) -> Tensor:
    return probability.clamp_min(torch.finfo(probability.dtype).tiny).log()


def _by_rows(maps: Tensor) -> Tensor:
    """Turned images or maps (B, C, ..., H, W) stored row by row: torch is quick with single matrices only."""
    if maps.ndim < 4 or maps.stride(-1) == 1 or maps.requires_grad or torch.compiler.is_compiling():
        return maps
    copy = torch.empty_like(maps, memory_format=torch.contiguous_format)
    for target, source in zip(copy.flatten(0, -3), maps.flatten(0, -3), strict=True):
        target.copy_(source)
    return copy


def _rows_of(table: Tensor, rows: list[int]) -> Tensor:
    """Rows of a table, without copying the row numbers to a device."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return table[rows[0] : rows[-1] + 1]
    return torch.stack([table[row] for row in rows])
