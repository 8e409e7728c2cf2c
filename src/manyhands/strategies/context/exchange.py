"""Differentiable collectives along the context axis.

Every rank computes with its own copy of what is replicated, so a gradient is a partial sum: the true gradient of a
replicated tensor is the sum over the ranks. The backward of each collective follows from that: a gather scatters the
sum, and a sum is summed again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...distributed import World
from .partition import SequencePartition


class ContextRanks:
    """The ranks among which a sequence is split."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size

    def gather(self, local: Tensor, dim: int, partition: SequencePartition) -> Tensor:
        """Return the whole tensor from the items that each rank holds along a dim."""
        return _apply(_ContextGather, local, dim, partition, self)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, on all of them."""
        return _apply(_ContextSum, tensor, self)

    def with_whole_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor; backward continues with the sum of the ranks' gradients, on all of them."""
        return _apply(_WholeGradient, tensor, self)

    def with_shared_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor; backward continues with this rank's share of a gradient that all ranks have."""
        return _apply(_SharedGradient, tensor, self.size)

    def all_gather(self, local: Tensor, dim: int, partition: SequencePartition) -> Tensor:
        """Gather without gradients."""
        if self.size == 1:
            return local
        counts = partition.counts
        rows = local.movedim(dim, 0)
        sent = as_bytes(rows.reshape(len(rows), math.prod(rows.shape[1:])))
        padded = sent.new_zeros(max(counts), sent.shape[1])
        padded[: len(sent)] = sent
        parts = self.world.all_gather(padded)
        found = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        found = found.index_select(0, partition.order().to(found.device))
        found = found if found.dtype is local.dtype else found.view(local.dtype)
        return found.reshape(partition.size, *rows.shape[1:]).movedim(0, dim)

    def reduce_scatter(self, whole: Tensor, dim: int, partition: SequencePartition) -> Tensor:
        """Return this rank's items of the sum over the ranks, without gradients."""
        if self.size == 1:
            return whole
        counts = partition.counts
        rows = whole.movedim(dim, 0)
        sent = rows.new_zeros(self.size, max(counts), math.prod(rows.shape[1:]))
        for rank, count in enumerate(counts):
            sent[rank, :count] = rows.index_select(0, partition.positions(rank).to(rows.device)).reshape(
                count, sent.shape[2]
            )
        received = torch.empty_like(sent)
        if sent.numel():
            self.world.start_all_to_all(as_bytes(sent), as_bytes(received)).wait()
        count = counts[self.rank]
        return received[:, :count].sum(0).reshape(count, *rows.shape[1:]).movedim(0, dim)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of a dtype that every back-end can send; collectives that only move data need no other."""
    if tensor.dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
        return tensor
    return tensor.contiguous().view(torch.uint8)


class _ContextGather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, partition: SequencePartition, ranks: ContextRanks) -> Tensor:
        ctx.dim, ctx.partition, ctx.ranks = dim, partition, ranks
        whole = ranks.all_gather(local, dim, partition)
        return whole.view_as(whole) if whole is local else whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.ranks.reduce_scatter(gradient, ctx.dim, ctx.partition), None, None, None


class _ContextSum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks = ranks
        total = tensor.clone()
        ranks.world.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.ranks.world.all_reduce(total)
        return total, None


class _WholeGradient(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.ranks.world.all_reduce(total)
        return total, None


class _SharedGradient(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.size, None


def _apply(kind: type[Function], *args: Any) -> Tensor:
    found: Tensor = kind.apply(*args)
    return found
