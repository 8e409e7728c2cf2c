"""Links: latency and bandwidth between the ranks of a world, measured by a few all-reduces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from ..core import format_duration, format_rate
from ..distributed import World

SMALL, LARGEST = 1 << 16, 1 << 24
"""Bytes of the smallest and the largest message for measuring bandwidth."""
LONG = 0.05
"""Duration in seconds from which a message is long enough to measure the bandwidth."""


@dataclass(frozen=True)
class Links:
    """Measured links between ranks: latency in seconds, and bytes per second that each of them can send at once.

    >>> Links(0.001, 1e6).seconds(1_000_000)
    1.001
    """

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float, rounds: int = 1) -> float:
        """Return the seconds to send `num_bytes` from each rank in `rounds` consecutive collectives."""
        return rounds * self.latency + num_bytes / self.bandwidth

    def __str__(self) -> str:
        return f"{format_rate(self.bandwidth)}, {format_duration(self.latency)}"


def measure_links(world: World) -> Links:
    """Measure latency and bandwidth between the ranks of `world` by a few all-reduces; all ranks get the same result.

    Every rank must call it. On a slow network it takes some tenths of a second.
    """
    latency = median(_seconds(world, 8) for _ in range(5))
    size = SMALL
    while (taken := _seconds(world, size)) < LONG and size < LARGEST:
        size *= 4
    taken = min(taken, _seconds(world, size))
    sent = 2 * size * (world.size - 1) / world.size
    return Links(latency, sent / max(taken - latency, 1e-9))


def _seconds(world: World, num_bytes: int) -> float:
    """Return the slowest rank's seconds for one all-reduce of `num_bytes`."""
    message = torch.zeros(num_bytes // 4, device=world.device)
    world.barrier()
    began = time.perf_counter()
    world.start_all_reduce(message).wait()
    if message.is_cuda:
        torch.cuda.synchronize()
    return float(max(world.gather_objects(time.perf_counter() - began)))
