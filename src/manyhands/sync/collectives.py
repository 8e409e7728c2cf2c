"""The collectives that a policy may use, with a count of the bytes that they send."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed import Pending, World


class PolicyCollectives:
    """The collectives of the replicas, for a policy. Each method starts one; the policy waits for it by yielding it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.num_bytes = 0
        """Bytes that this replica sent since the counter was reset, assuming ring algorithms."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to replace a tensor by its sum over the replicas, in place."""
        self.num_bytes += 2 * _bytes(tensor) * (self.size - 1) // self.size
        return self._world.start_all_reduce(tensor)

    def all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Pending]:
        """Start to gather the tensors of all replicas, stacked in rank order."""
        self.num_bytes += _bytes(tensor) * (self.size - 1)
        if into is None:
            into = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return into, self._world.start_all_gather(tensor, into)

    def all_to_all(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Pending]:
        """Start to send row r of a tensor to replica r; row r of the result comes from replica r."""
        self.num_bytes += _bytes(tensor) * (self.size - 1) // self.size
        into = torch.empty_like(tensor) if into is None else into
        return into, self._world.start_all_to_all(tensor, into)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
