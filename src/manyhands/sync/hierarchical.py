"""Hierarchical sums: exact within each host, under a policy between hosts, to reduce traffic on the slow network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..distributed import Pending, World
from .policy import AllReduce, Policy, PolicyCollectives
from .policy_memory import PolicyMemory


def acting(policy: Policy, world: World) -> Policy:
    """Return the policy that takes effect among the ranks of `world`; every rank must call it.

    A policy with between="hosts" becomes the exact sum if all ranks are on one host.
    """
    if (
        policy.between == "hosts"
        and policy.changes_mathematics
        and len(set(world.gather_objects(world.rank_info.host))) == 1
    ):
        return AllReduce()
    return policy


class HierarchicalSum:
    """Sum a flat gradient exactly within each host, then under a policy between hosts.

    Each rank of a host exchanges one part of the host's sum with the other hosts. Under a policy that needs whole
    parameters, each rank exchanges all of it.
    """

    def __init__(self, policy: Policy, world: World, like: Tensor, size: int) -> None:
        inside, between = world.by_hosts()
        self._policy, self._inside, self._between = policy, PolicyCollectives(inside), PolicyCollectives(between)
        each = -(-size // inside.size)
        self._mine = slice(each * inside.rank, min(size, each * (inside.rank + 1)))
        self._part = torch.zeros(each, dtype=like.dtype, device=like.device)
        self._memory: PolicyMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that this rank sent to other hosts since the counter was reset."""
        return self._between.num_bytes

    @num_bytes.setter
    def num_bytes(self, count: int) -> None:
        self._between.num_bytes = count

    def reduce(self, gradient: Tensor, memory: PolicyMemory | None) -> Iterator[Pending]:
        """Replace a gradient by its sum over all ranks; if `memory` is None, the sum between hosts is exact too."""
        yield self._inside.all_reduce(gradient)
        if memory is not None and self._policy.needs_matrices:
            yield from self._policy.reduce(self._between, gradient, memory)
            if self._inside.rank > 0:
                # All ranks of a host have the same feedback; only one of them may add it to its next gradient.
                memory.feedback.zero_()
            return
        part = self._part.to(gradient.dtype).zero_()
        count = max(0, self._mine.stop - self._mine.start)
        part[:count].copy_(gradient[self._mine])
        yield from self._carry(part, count, memory)
        gathered, pending = self._inside.all_gather(part)
        yield pending
        gradient.copy_(gathered.view(-1)[: gradient.numel()])

    def _carry(self, part: Tensor, count: int, memory: PolicyMemory | None) -> Iterator[Pending]:
        """Sum this rank's part of the gradient over the hosts; `count` is its number of elements without padding."""
        if memory is None:
            yield self._between.all_reduce(part)
            return
        if self._memory is None:
            self._memory = PolicyMemory({"": part})
        self._memory.feedback.zero_()
        yield from self._policy.reduce(self._between, part, self._memory)
        memory.feedback[self._mine].copy_(self._memory.feedback[:count])
