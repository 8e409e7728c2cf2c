"""TopK: only the largest numbers of a gradient travel; the others wait until they have grown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed import Pending
from .collectives import PolicyCollectives
from .policy import Policy, require
from .policy_memory import PolicyMemory

EARLY, HALVES = 0.25, 10
"""The part of the numbers that travels after the warm-up, and the steps after which it is halved."""
MANY = 1 << 16
"""Numbers from which on a look at some of them pays."""


@dataclass(frozen=True)
class TopK(Policy):
    """A fraction of the numbers of a bucket, the largest ones, each with its place.

    After the warm-up, if there is one, more of them travel at first, half as many every so many steps: early gradients
    change quickly, and what waits is soon wrong.

    >>> print(TopK(0.01))
    topk(0.01)
    """

    name = "topk"
    fraction: float = 0.01
    warmup: int = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        require(is_number and 0 < self.fraction <= 1, "fraction lies above 0 and not above 1", self.fraction)

    def fraction_at(self, step: int) -> float:
        """The part of the numbers that travels so many steps after the warm-up.

        >>> [TopK(0.01).fraction_at(step) for step in (1, 11, 100)]
        [0.25, 0.125, 0.01]
        """
        early = EARLY * 0.5 ** ((step - 1) // HALVES) if self.warmup else 0.0
        return max(self.fraction, early)

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        count = max(1, round(self.fraction_at(memory.num_steps - self.warmup) * gradient.numel()))
        places = largest(gradient, count)
        values = gradient[places]
        memory.feedback.copy_(gradient).index_fill_(0, places, 0)
        sent = torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
        gathered, pending = wire.all_gather(sent)
        yield pending
        gradient.zero_()
        # One replica after another: within one no place comes twice, so that the order of additions is fixed.
        for part in gathered:
            there, numbers = (piece.clone() for piece in part.tensor_split([4 * count]))
            gradient.index_add_(0, there.view(torch.int32), numbers.view(gradient.dtype))


def largest(numbers: Tensor, count: int) -> Tensor:
    """The places of so many numbers, the largest by size; what is not a number counts as large.

    On a CPU a threshold from every so many of them leaves few to choose from, which is several times faster.

    >>> largest(torch.tensor([1.0, -3.0, 2.0]), 2).sort().values
    tensor([1, 2])
    """
    sizes = numbers.abs()
    if numbers.device.type == "cpu" and len(sizes) > MANY and 8 * count < len(sizes):
        some = sizes[:: len(sizes) // MANY]
        wanted = min(len(some), 16 + int(1.25 * count * len(some) / len(sizes)))
        threshold = some.topk(wanted, sorted=False).values.min()
        places = (~(sizes < threshold)).nonzero().squeeze(1)
        if len(places) >= count:
            return places[sizes[places].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices
