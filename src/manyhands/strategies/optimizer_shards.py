"""Sharded optimizer state: every rank has the whole network and its gradients, and updates its shard of each parameter.

A rank's optimizer holds DTensor views of its shards, so that its state is saved whole and resumes under any layout.
After an update the shards are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from ..core import StrategySpec
from ..distributed import World
from .mirrored import MirroredReplica
from .sharded import whole


class Shadows:
    """This rank's shards of a network's parameters, as views."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module) -> None:
        self._mesh = world.mesh(spec.axes)["shards"]
        self.ranks = world.along(spec.axes, "shards")
        # A network may override `parameters`, for example to list only what it trains.
        self.of: dict[nn.Parameter, nn.Parameter] = {p: self._shadow(p) for p in nn.Module.parameters(model)}

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Replace the network's parameters by their shards inside this context, for constructing an optimizer."""
        held = [(own, name, p) for own in (m._parameters for m in model.modules()) for name, p in own.items()]
        try:
            for own, name, parameter in held:
                own[name] = None if parameter is None else self.of[parameter]
            yield
        finally:
            for own, name, parameter in held:
                own[name] = parameter

    def link(self, *, gradients: bool) -> None:
        """Point the shards to the current memory of the parameters and of their gradients."""
        for parameter, shadow in self.of.items():
            if shadow is not parameter:
                shadow._local_tensor = self._mine(parameter.detach())  # type: ignore[attr-defined]
                has_gradient = gradients and parameter.grad is not None
                shadow.grad = self._parted(self._mine(parameter.grad), parameter) if has_gradient else None  # type: ignore[arg-type]

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the shards that other ranks have updated."""
        sharded = [parameter for parameter, shadow in self.of.items() if shadow is not parameter]
        kinds = {parameter.dtype for parameter in sharded}
        for dtype in sorted(kinds, key=str):
            same = [parameter for parameter in sharded if parameter.dtype == dtype]
            longest = [-(-len(p) // self.ranks.size) * (p.numel() // max(1, len(p))) for p in same]
            flat = torch.cat([_padded(self._mine(p).flatten(), size) for p, size in zip(same, longest, strict=True)])
            for rank, row in enumerate(self.ranks.all_gather(flat)):
                for parameter, part in zip(same, row.split(longest), strict=True):
                    held = self._part_of(parameter.data, rank)
                    held.copy_(part[: held.numel()].view(held.shape))

    def _shadow(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dim() == 0:
            return parameter
        parted = self._parted(self._mine(parameter.detach()), parameter)
        return nn.Parameter(parted, requires_grad=parameter.requires_grad)

    def _parted(self, local: Tensor, whole: Tensor) -> DTensor:
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _mine(self, tensor: Tensor) -> Tensor:
        return self._part_of(tensor, self.ranks.rank)

    def _part_of(self, tensor: Tensor, rank: int) -> Tensor:
        step = -(-len(tensor) // self.ranks.size)
        begin = min(rank * step, len(tensor))
        return tensor.narrow(0, begin, min(step, len(tensor) - begin))


class OptimizerShardedReplica(MirroredReplica):
    """One of several identical replicas with sharded optimizer state."""

    def __init__(
        self,
        spec: StrategySpec,
        world: World,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        shadows: Shadows,
    ) -> None:
        self._shadows = shadows
        super().__init__(spec, world, model, optimizers)
        self.names = {shadows.of[parameter]: name for name, parameter in model.named_parameters()}

    @property
    def is_capturable(self) -> bool:
        return False

    def update(self, key: str, where: Tensor | None = None) -> None:
        self._shadows.link(gradients=True)
        super().update(key, where)
        for parameter in self.groups[key].values():
            parameter.grad = None
        self._shadows.link(gradients=False)
        self._shadows.gather()

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        return whole(tensor)

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        if not isinstance(like, DTensor) or whole.shape != like.shape:
            return whole
        moved = whole.to(like.device, like.dtype)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: p for name, p in self.model.named_parameters() if self._shadows.of[p] in mine}


def sharded_optimizers(
    spec: StrategySpec, world: World, model: nn.Module, make: Callable[[nn.Module], Any]
) -> tuple[dict[str, Optimizer], Shadows]:
    """Return optimizers of this rank's shards, and the shards."""
    from .build_replica import optimizers_of

    shadows = Shadows(spec, world, model)
    with shadows.in_place(model):
        return optimizers_of(model, make), shadows


def _padded(flat: Tensor, size: int) -> Tensor:
    return torch.cat([flat, flat.new_zeros(size - flat.numel())]) if flat.numel() < size else flat
