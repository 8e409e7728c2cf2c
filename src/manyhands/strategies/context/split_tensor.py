"""SplitTensor: a tensor of which each rank holds the part of its tokens, with the shape of the whole.

What a program reads of it, such as its shape, is that of the whole tensor. Operations on it are computed by the rules
of `rules.py` on the local part, which is an ordinary tensor with ordinary gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .exchange import ContextRanks
from .partition import SequencePartition


@dataclass(frozen=True)
class SequenceDim:
    """The dim of a tensor that contains the split sequence: `outer` x sequence x `inner` items in one dim."""

    dim: int
    partition: SequencePartition
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dim in the whole tensor."""
        return self.outer * self.partition.size * self.inner

    @property
    def is_plain(self) -> bool:
        """Whether the dim contains nothing else."""
        return self.outer == self.inner == 1

    def at(self, dim: int) -> SequenceDim:
        """Return the same for another dim."""
        return SequenceDim(dim, self.partition, self.outer, self.inner)

    def is_like(self, other: SequenceDim) -> bool:
        """Return whether two dims hold the same items on every rank, wherever the dims are."""
        return self.at(0) == other.at(0)


class SplitTensor(Tensor):
    """A tensor whose tokens are split over the ranks of the context axis."""

    local: Tensor
    place: SequenceDim
    ranks: ContextRanks
    is_copy: bool
    """Whether the local part is a copy of what is a view on one device, so that it must not be changed in place."""
    rule: Callable[..., Any]

    @staticmethod
    def of(local: Tensor, place: SequenceDim, ranks: ContextRanks, *, is_copy: bool = False) -> SplitTensor:
        """Wrap this rank's part."""
        shape = [*local.shape[: place.dim], place.size, *local.shape[place.dim + 1 :]]
        made: Any = Tensor._make_wrapper_subclass(SplitTensor, shape, dtype=local.dtype, device=local.device)
        made.local, made.place, made.ranks, made.is_copy = local, place, ranks, is_copy
        tensor: SplitTensor = made
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} was called on a split sequence in a way that cannot be followed")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SplitTensor({tuple(whole_shape(self))}, place={self.place}, local={self.local!r})"


def is_split(value: Any) -> bool:
    """Return whether a value is a split tensor."""
    return type(value) is SplitTensor


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole tensor."""
    if type(tensor) is SplitTensor:
        place, local = tensor.place, tensor.local
        return torch.Size([*local.shape[: place.dim], place.size, *local.shape[place.dim + 1 :]])
    return tensor.shape


def take(tensor: Tensor, place: SequenceDim, ranks: ContextRanks) -> Tensor:
    """Return this rank's part of a tensor that all ranks have; a view if its items are consecutive."""
    if place.is_plain:
        ranges = place.partition.ranges[ranks.rank]
        parts = [tensor.narrow(place.dim, start, stop - start) for start, stop in ranges]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, place.dim) if parts else tensor.narrow(place.dim, 0, 0)
    inner = SequenceDim(place.dim + 1, place.partition)
    parted = tensor.unflatten(place.dim, (place.outer, place.partition.size, place.inner))
    return take(parted, inner, ranks).flatten(place.dim, place.dim + 2)


def split(tensor: Tensor, place: SequenceDim, ranks: ContextRanks) -> SplitTensor:
    """Split a tensor that all ranks have."""
    return SplitTensor.of(take(tensor, place, ranks), place, ranks, is_copy=True)


def whole(tensor: Any) -> Any:
    """Return a tensor that all ranks have, with gradients; other values are returned as they are."""
    if type(tensor) is not SplitTensor:
        return tensor
    place, ranks, local = tensor.place, tensor.ranks, tensor.local
    if place.is_plain:
        return ranks.gather(local, place.dim, place.partition)
    count = place.partition.counts[ranks.rank]
    parted = local.unflatten(place.dim, (place.outer, count, place.inner))
    return ranks.gather(parted, place.dim + 1, place.partition).flatten(place.dim, place.dim + 2)


def all_whole(values: Any) -> Any:
    """Return nested values with whole tensors."""
    return tree_map(whole, values)


def resplit(tensor: Tensor, place: SequenceDim, ranks: ContextRanks) -> Tensor:
    """Return this rank's part of a tensor as split at `place`; a tensor that is split differently is gathered first."""
    if type(tensor) is SplitTensor:
        if tensor.place == place:
            return tensor.local
        tensor = whole(tensor)
    return take(tensor, place, ranks)


def reshaped(place: SequenceDim, before: Sequence[int], after: Sequence[int]) -> SequenceDim | None:
    """Return where the sequence is after a reshape; None if it would span several dims.

    >>> flat = reshaped(SequenceDim(1, SequencePartition.balanced(6, 2)), (4, 6, 8), (24, 8))
    >>> flat.dim, flat.outer, flat.inner
    (0, 4, 1)
    """
    ahead = math.prod(before[: place.dim]) * place.outer
    behind = math.prod(before[place.dim + 1 :]) * place.inner
    count = place.partition.size
    for dim, size in enumerate(after):
        first, last = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if not first or not last or ahead % first or behind % last:
            continue
        outer, inner = ahead // first, behind // last
        if size == outer * count * inner:
            return SequenceDim(dim, place.partition, outer, inner)
    return None


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share their memory, so that a change of one changes the other."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
