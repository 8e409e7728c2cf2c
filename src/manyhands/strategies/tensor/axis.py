"""Axis: the ranks that compute layers together, and the ways between a rank's own tensors and those of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map

WHOLE, SUM = Replicate(), Partial()


class Axis:
    """A mesh of one axis. Every way works on what autograd follows, in both directions."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()

    def of(self, tensor: Tensor, placement: Placement, shape: Sequence[int] | None = None) -> DTensor:
        """What this rank computed, as its part of a tensor of all ranks; `shape` is that of the whole."""
        if shape is None:
            return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return DTensor.from_local(
            tensor, self.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def as_parted(self, tensor: Tensor) -> DTensor:
        """A tensor of all ranks; a plain one is the same on each of them."""
        return tensor if isinstance(tensor, DTensor) else self.of(tensor, WHOLE)

    def whole(self, tensor: Tensor, *, sums_gradient: bool = False) -> Tensor:
        """All of a tensor on this rank. `sums_gradient` where each rank's gradient is only its part of a sum."""
        if not isinstance(tensor, DTensor) and not (sums_gradient and tensor.requires_grad):
            return tensor
        parted = self.as_parted(tensor).redistribute(placements=[WHOLE])
        return parted.to_local(grad_placements=[SUM if sums_gradient else WHOLE])

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor, cut along a dim."""
        return self.as_parted(tensor).redistribute(placements=[Shard(dim % tensor.dim())]).to_local()

    def sharded(self, tensor: Tensor, dim: int, count: int) -> DTensor:
        """A tensor of which this rank computed its part along a dim, where the whole has so many."""
        dim %= tensor.dim()
        return self.of(tensor, Shard(dim), [*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]])

    def summed(self, tensor: Tensor, target: Placement = WHOLE) -> DTensor:
        """A tensor of which each rank computed a term."""
        return self.of(tensor, SUM).redistribute(placements=[target])

    def span(self, count: int) -> tuple[int, int]:
        """Where this rank's part of so many begins and how long it is, as torch cuts."""
        step = -(-count // self.size)
        begin = min(self.rank * step, count)
        return begin, min(step, count - begin)

    def local(self, parameter: Tensor, *, sums_gradient: bool = False) -> Tensor:
        """This rank's part of a parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local(grad_placements=[SUM] if sums_gradient else None)


def is_cut(tensor: Any, dim: int | None = None) -> TypeGuard[DTensor]:
    """Whether a tensor is cut, along this dim or along any."""
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[0], Shard):
        return False
    return dim is None or tensor.placements[0].dim == dim % tensor.dim()


def in_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A function on all tensors of nested data."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
