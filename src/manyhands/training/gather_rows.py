"""Gather rows of all replicas with gradients, for losses in which samples depend on each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed import World


def gather_rows(world: World, rows: Tensor) -> Tensor:
    """Concatenate the rows of all replicas; their numbers of rows may differ."""
    return rows if world.size == 1 else _gather(rows, world)


def _gather(*args: Any) -> Tensor:
    return _Gather.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(torch.autograd.Function):
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
