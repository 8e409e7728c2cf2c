"""Collectives over the data-parallel replicas, as a training function calls them on its hand.

Losses in which samples depend on each other gather the rows of all replicas, with gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed import World


class Collectives:
    """Sums, means and other exchanges of values between replicas."""

    def __init__(self, world: World, replicas: World) -> None:
        self.world = world
        self.replicas = replicas
        """The data-parallel ranks as a world: each takes other samples; ranks along other axes share the same ones."""
        self.rank, self.size, self.device = replicas.rank, replicas.size, world.device
        self.is_first = world.is_first

    def sum(self, value: Tensor | float) -> Tensor:
        """Return the sum over the replicas."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.all_reduce(tensor)
        return tensor

    def mean(self, value: Tensor | float) -> Tensor:
        """Return the mean over the replicas.

        >>> from manyhands.distributed import NullWorld
        >>> Collectives(NullWorld(), NullWorld()).mean(3.0)
        tensor(3.)
        """
        return self.sum(torch.as_tensor(value, device=self.device) * 1.0) / self.size

    def gather(self, value: Tensor | float) -> Tensor:
        """Concatenate the rows of all replicas in rank order; scalars are stacked. Gradients flow back.

        >>> from manyhands.distributed import NullWorld
        >>> Collectives(NullWorld(), NullWorld()).gather(3.0)
        tensor([3.])
        """
        tensor = torch.as_tensor(value, device=self.device)
        return gather_rows(self.replicas, tensor.unsqueeze(0) if tensor.dim() == 0 else tensor)

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        """Return the value of replica `source` on all replicas."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Block until every rank has called this."""
        self.world.barrier()


def gather_rows(world: World, rows: Tensor) -> Tensor:
    """Concatenate the rows of all replicas; their numbers of rows may differ."""
    return rows if world.size == 1 else _gather(rows, world)


def _gather(*args: Any) -> Tensor:
    return _RowGather.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _RowGather(torch.autograd.Function):
    """Gather with rows padded to the longest replica; backward all-reduces gradients and keeps this replica's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        sizes = world.all_gather(torch.tensor([len(rows)], device=rows.device)).flatten().tolist()
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        ctx.world, ctx.start, ctx.stop = world, sum(sizes[: world.rank]), sum(sizes[: world.rank + 1])
        return torch.cat([part[:size] for part, size in zip(world.all_gather(padded), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        ctx.world.all_reduce(gradient)
        return gradient[ctx.start : ctx.stop], None
