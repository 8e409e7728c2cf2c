"""Axis: the ranks that compute layers together, and conversions between local tensors and DTensors."""

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
    """A one-dimensional device mesh; all conversions are differentiable."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()

    def of(self, tensor: Tensor, placement: Placement, shape: Sequence[int] | None = None) -> DTensor:
        """Wrap what this rank computed as its shard of a DTensor; `shape` is that of the whole tensor."""
        if shape is None:
            return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return DTensor.from_local(
            tensor, self.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def as_parted(self, tensor: Tensor) -> DTensor:
        """Return a DTensor; a plain tensor is taken as replicated."""
        return tensor if isinstance(tensor, DTensor) else self.of(tensor, WHOLE)

    def whole(self, tensor: Tensor, *, sums_gradient: bool = False) -> Tensor:
        """Return the whole tensor on this rank; `sums_gradient` if each rank's gradient is a partial sum."""
        if not isinstance(tensor, DTensor) and not (sums_gradient and tensor.requires_grad):
            return tensor
        parted = self.as_parted(tensor).redistribute(placements=[WHOLE])
        return parted.to_local(grad_placements=[SUM if sums_gradient else WHOLE])

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor along a dim."""
        return self.as_parted(tensor).redistribute(placements=[Shard(dim % tensor.dim())]).to_local()

    def sharded(self, tensor: Tensor, dim: int, count: int) -> DTensor:
        """Wrap this rank's shard along a dim as a DTensor; `count` is the whole tensor's size there."""
        dim %= tensor.dim()
        return self.of(tensor, Shard(dim), [*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]])

    def summed(self, tensor: Tensor, target: Placement = WHOLE) -> DTensor:
        """Wrap this rank's partial sum as a DTensor, reduced to the target placement."""
        return self.of(tensor, SUM).redistribute(placements=[target])

    def span(self, count: int) -> tuple[int, int]:
        """Return the start and length of this rank's shard of `count` items, as torch splits them."""
        step = -(-count // self.size)
        begin = min(self.rank * step, count)
        return begin, min(step, count - begin)

    def local(self, parameter: Tensor, *, sums_gradient: bool = False) -> Tensor:
        """Return this rank's shard of a parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local(grad_placements=[SUM] if sums_gradient else None)


def is_sharded(tensor: Any, dim: int | None = None) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded, along this dim or along any."""
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[0], Shard):
        return False
    return dim is None or tensor.placements[0].dim == dim % tensor.dim()


def in_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to all tensors of nested data."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
