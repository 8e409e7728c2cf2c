"""TopK: only the largest elements of a gradient are sent; the others accumulate as error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed import Pending
from .policy import Policy, PolicyCollectives, require
from .policy_memory import PolicyMemory

EARLY, HALVES = 0.25, 10
"""The fraction of elements sent right after the warm-up, and the number of steps after which it is halved."""
MANY = 1 << 16
"""Number of elements above which estimating a threshold from a sample is faster than selecting from all elements."""


@dataclass(frozen=True)
class TopK(Policy):
    """Sends only the fraction of a bucket's gradient elements with the largest magnitude, each with its index.

    If there is a warm-up, a larger fraction is sent after it, which is halved every few steps: early in training,
    gradients change quickly, so delayed elements are soon stale.

    >>> print(TopK(0.01))
    topk(0.01)
    """

    name = "topk"
    fraction: float = 0.01
    warmup: int = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        require(is_number and 0 < self.fraction <= 1, "fraction must be above 0 and at most 1", self.fraction)

    def fraction_at(self, step: int) -> float:
        """Return the fraction of elements to send in the given step, counted from 1 after the warm-up.

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
        # Add one replica after another: no index occurs twice in a replica's part, so the order of additions is fixed.
        for part in gathered:
            there, numbers = (piece.clone() for piece in part.tensor_split([4 * count]))
            gradient.index_add_(0, there.view(torch.int32), numbers.view(gradient.dtype))


def largest(numbers: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` elements with the largest magnitude; NaN counts as the largest.

    On a CPU, a threshold estimated from a sample first discards most elements, which is several times faster.

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
