"""Pieces of a network that several ranks hold together, along shards, tensor ranks or both.

Layers are split along the tensor axis as in `TensorParallel`; the rest of each parameter is sharded by rows. For a step
the shards gather the parameters once for all micro-batches, and at its end reduce-scatter the gradients: between steps
a rank holds only its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..core import StrategySpec
from ..distributed import World
from ..graph import Contexts, layer_of
from .local_updates import own_part
from .piece_parameters import Holding
from .tensor import Layout, TensorSharding, in_tensors, plain, reorder, replicating


class HeldInParts(Holding):
    """One rank's shards of the parameters of its pieces."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, layout: Layout | None) -> None:
        self._shards, tensor = world.along(spec.axes, "shards"), world.along(spec.axes, "tensor")
        names = tuple(axis for axis in ("shards", "tensor") if axis in spec.axes)
        self._mesh = world.mesh(spec.axes)[names if len(names) > 1 else names[0]]
        self._sharding = None if layout is None else TensorSharding(spec, world, model, layout)
        self._layout = layout
        self.layers = () if layout is None else tuple(layout.ways)
        self.notes = () if layout is None else tuple(layout.notes)
        self.reports_loss = tensor.is_first
        self._num_tensor = tensor.size
        self._parts: dict[Tensor, nn.Parameter] = {}
        self._inner: dict[str, Tensor] = {}
        """By name, a tensor without values with the layout after the shards have gathered it."""
        self._names: dict[Tensor, str] = {}
        self._open: dict[Tensor, Tensor] = {}

    # -- between steps ---------------------------------------------------------------------------------------------

    def hold(self, model: nn.Module) -> None:
        if self._sharding is not None:
            self._sharding.shard(model)
        made: dict[Tensor, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                self._inner[name] = parameter.detach().to("meta")
                made[parameter] = self._at_rest(parameter)
                self._names[made[parameter]] = name
        for module in model.modules():
            for last, held in module._parameters.items():
                if held is not None and held in made:
                    module._parameters[last] = made[held]
        for parameter in made.values():
            part = parameter
            if isinstance(parameter, DTensor):
                part = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            self._parts[parameter] = part

    def _at_rest(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this shard's part of a parameter; a scalar is kept whole."""
        if self._shards.size == 1 or parameter.dim() == 0:
            return parameter
        mine = self._mine(own_part(parameter.detach())).clone()
        return nn.Parameter(self._wrapped(mine, parameter), requires_grad=parameter.requires_grad)

    def _wrapped(self, mine: Tensor, inner: Tensor) -> DTensor:
        """Wrap a shard's rows as a DTensor of the whole parameter."""
        rows: Placement = Shard(0)
        placements = [rows]
        if isinstance(inner, DTensor):
            split = inner.placements[0]
            if split == Shard(0):
                rows = _StridedShard(0, split_factor=self._num_tensor)
            placements = [rows, split]
        return DTensor.from_local(
            mine, self._mesh, placements, run_check=False, shape=inner.shape, stride=inner.stride()
        )

    def _mine(self, tensor: Tensor) -> Tensor:
        return self._rows(tensor, self._shards.rank)

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        step = -(-len(tensor) // self._shards.size)
        begin = min(rank * step, len(tensor))
        return tensor.narrow(0, begin, min(step, len(tensor) - begin))

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._parts[parameter]

    def copies(self, parameter: nn.Parameter) -> int:
        shards = 1 if self._is_sharded(parameter) else self._shards.size
        inner = self._inner[self._names[parameter]]
        is_sharded = isinstance(inner, DTensor) and not inner.placements[0].is_replicate()
        return shards * (1 if is_sharded else self._num_tensor)

    def _is_sharded(self, tensor: Tensor) -> bool:
        return self._shards.size > 1 and tensor.dim() > 0

    # -- in a step -------------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext() if self._sharding is None else self._sharding.scope()

    def back(self) -> AbstractContextManager[object]:
        return nullcontext() if self._sharding is None else replicating()

    def again(self, contexts: Contexts | None) -> Contexts:
        first, second = super().again(contexts)
        return first, _both(second, self.scope())

    @torch.no_grad()
    def open(self) -> None:
        if self._open or self._shards.size == 1:
            return
        for same in self._by_kind(p for p in self._parts if self._is_sharded(p)):
            sizes = [self._longest(p) for p in same]
            flat = torch.cat([_padded(self._parts[p].flatten(), n) for p, n in zip(same, sizes, strict=True)])
            rows = [row.split(sizes) for row in self._shards.all_gather(flat)]
            for place, parameter in enumerate(same):
                inner = self._inner[self._names[parameter]]
                local = torch.empty(own_part(inner).shape, dtype=parameter.dtype, device=flat.device)
                for rank, row in enumerate(rows):
                    held = self._rows(local, rank)
                    held.copy_(row[place][: held.numel()].view(held.shape))
                gathered = self._as_inner(local, inner)
                self._open[parameter] = gathered.requires_grad_(parameter.requires_grad)

    def _by_kind(self, parameters: Iterator[Tensor]) -> list[list[Tensor]]:
        """Group parameters by dtype; each group is sent in one collective."""
        found: dict[str, list[Tensor]] = {}
        for parameter in parameters:
            found.setdefault(str(parameter.dtype), []).append(parameter)
        return [found[kind] for kind in sorted(found)]

    def _longest(self, parameter: Tensor) -> int:
        local = own_part(self._inner[self._names[parameter]])
        return -(-len(local) // self._shards.size) * (local.numel() // max(1, len(local)))

    def _as_inner(self, local: Tensor, inner: Tensor) -> Tensor:
        if not isinstance(inner, DTensor):
            return local
        return DTensor.from_local(
            local, inner.device_mesh, inner.placements, run_check=False, shape=inner.shape, stride=inner.stride()
        )

    def work(self, tensor: Tensor) -> Tensor:
        return self._open.get(tensor, tensor)

    @torch.no_grad()
    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        used = [p for p in parameters if self.work(p).grad is not None]
        local: dict[Tensor, Tensor] = dict(zip(used, self._complete(used), strict=True))
        for same in self._by_kind(p for p in used if self._is_sharded(p)):
            sizes = [self._longest(p) for p in same]
            rows = torch.stack([
                torch.cat([
                    _padded(self._rows(local[p], rank).flatten(), size) for p, size in zip(same, sizes, strict=True)
                ])
                for rank in range(self._shards.size)
            ])  # fmt: skip
            landed = torch.empty_like(rows)
            self._shards.start_all_to_all(rows, landed).wait()
            for parameter, summed in zip(same, landed.sum(0).split(sizes), strict=True):
                part = self._parts[parameter]
                part.grad = summed[: part.numel()].view(part.shape)
        for parameter in used:
            if not self._is_sharded(parameter):
                if self._shards.size > 1:
                    self._shards.all_reduce(local[parameter])
                self._parts[parameter].grad = local[parameter]
        self._open.clear()

    def _complete(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this tensor rank's shards of gradients; partial sums are reduced over the ranks in one collective."""
        if self._sharding is None:
            return [self.work(p).grad for p in parameters]  # type: ignore[misc]
        return self._sharding.completed([self.work(p) for p in parameters])

    def link(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            part = self._parts[parameter]
            if part is not parameter:
                has_gradient = part.grad is not None
                parameter.grad = _like(part.grad, parameter) if has_gradient else None  # type: ignore[arg-type]

    def shut(self) -> None:
        self._open.clear()

    def close(self) -> None:
        self.shut()
        for parameter, part in self._parts.items():
            part.grad = parameter.grad = None

    # -- layers and other operations -------------------------------------------------------------------------------

    def plain(self, tensor: Tensor) -> Tensor:
        return tensor if self._sharding is None else plain(self._sharding.axis, tensor)

    def substitute(self, node: fx.Node, path: str) -> Callable[..., Any] | None:
        if self._layout is None or self._sharding is None:
            return None
        axis, layer = self._sharding.axis, layer_of(node)
        if layer is not None:
            way, stats = self._layout.ways[layer.path], self.stats

            def compute(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                forward = own if stats is None else stats.forward_of(module, own)
                return way.run(axis, module, forward, *args, **kwargs)

            return layer.by(compute)
        if path in self._layout.whole and callable(node.target):
            function = node.target
            return lambda *args, **kwargs: function(*in_tensors(self.plain, args), **in_tensors(self.plain, kwargs))
        return None

    # -- gathering -------------------------------------------------------------------------------------------------

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        inner = self._inner.get(name)
        if inner is None or tensor.shape != inner.shape:
            return self._reordered(tensor.full_tensor(), tensor, name, back=True)
        local = tensor.to_local()
        if self._is_sharded(tensor):
            into = torch.empty(own_part(inner).shape, dtype=tensor.dtype, device=local.device)
            longest = -(-len(into) // self._shards.size) * (into.numel() // max(1, len(into)))
            for rank, row in enumerate(self._shards.all_gather(_padded(local.flatten(), longest))):
                held = self._rows(into, rank)
                held.copy_(row[: held.numel()].view(held.shape))
            local = into
        gathered = self._as_inner(local, inner)
        whole = gathered.full_tensor() if isinstance(gathered, DTensor) else gathered
        return self._reordered(whole, gathered, name, back=True)

    def _reordered(self, whole: Tensor, like: Any, name: str, *, back: bool = False) -> Tensor:
        sections = None if self._sharding is None else self._sharding.sections.get(name)
        if sections is None or whole.dim() == 0 or not isinstance(like, DTensor):
            return whole
        place = like.placements[-1]
        return reorder(whole, place.dim, sections, self._num_tensor, back=back) if isinstance(place, Shard) else whole

    def joined(self, part: Tensor, name: str) -> Tensor:
        like = self._named(name)
        return self.whole(_like(part.contiguous(), like), name) if isinstance(like, DTensor) else part

    def shard_of(self, whole: Tensor, name: str) -> Tensor:
        return own_part(self.part_for(whole, self._named(name), name))

    def _named(self, name: str) -> Tensor:
        return next(parameter for parameter, other in self._names.items() if other == name)

    def part_for(self, whole: Tensor, like: Tensor, name: str) -> Tensor:
        if not isinstance(like, DTensor) or isinstance(whole, DTensor) or whole.shape != like.shape:
            return whole
        mine = self._reordered(whole, like, name)
        place = like.placements[-1]
        if self._sharding is not None and isinstance(place, Shard):
            mine = mine.narrow(place.dim, *self._sharding.axis.span(mine.shape[place.dim]))
        if len(like.placements) > (self._sharding is not None) and self._shards.size > 1:
            mine = self._mine(mine)
        return _like(mine.to(like.device, like.dtype).contiguous(), like)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _like(part: Tensor, like: Any) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _padded(flat: Tensor, size: int) -> Tensor:
    return torch.cat([flat, flat.new_zeros(size - flat.numel())]) if flat.numel() < size else flat
