"""Collectives over the data-parallel replicas, as a training function calls them on its hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed import World
from .loss_totals import gather_rows


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
