"""Workload for which a plan is made: a traced network, its batch size, its input rate, and measurements.

Also statistical efficiency: how many steps a batch size needs, from the gradient noise at two batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core import SettingsError
from ..costs import Network


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and how it is trained, independent of the hardware."""

    networks: Mapping[str, Network] = field(hash=False)
    """The traced network by precision, each with the same number of rows."""
    batch_size: int
    """Global batch size: the samples of a step, on any number of devices."""
    name: str = "task"
    """Name of the task, for texts."""
    feed: float | None = None
    """Samples per second that one host reads and prepares; None if it was not measured, which counts as unlimited."""
    noise: float | None = None
    """Gradient noise scale in samples, above which a larger batch saves few steps; None if it was not measured."""
    captured: bool = True
    """Whether steps on accelerators are captured as CUDA graphs, so that the host launches no single operations."""
    fused: bool | None = None
    """Whether operations between matrix products are fused, as by torch.compile; None: as the spec's capture says."""
    overlaps: bool = True
    """Whether gradients are exchanged while backward runs."""
    balanced: bool = True
    """Whether pipeline stages are balanced by time; otherwise all have equally many blocks, as in other systems."""
    whole_tensors: bool = False
    """Whether parameter servers hold whole parameters, so that the server of the largest one is overloaded.

    manyhands shards parameters evenly over its servers; this describes other systems.
    """
    gathered: float = 1.0
    """Ratio of the bytes sent to gather a sharded parameter to its bytes in memory."""
    wire: float = 1.0
    """Ratio of the bytes sent for a gradient to the bytes of its parameter."""

    def network(self, precision: str) -> Network:
        """Return the network traced in this precision, or else in any other."""
        return self.networks.get(precision) or next(iter(self.networks.values()))


def wire_share(sync: str) -> float:
    """Return the ratio of sent bytes to those of the exact sum under a sync policy, given as text.

    >>> wire_share("bf16"), wire_share("topk(0.01)"), wire_share("allreduce")
    (0.5, 0.02, 1.0)
    """
    name, number = _parsed(sync)
    if name == "topk":
        return 0.02 if number is None else min(1.0, 2 * number)
    return {"bf16": 0.5, "fp16": 0.5, "int8": 0.26, "powersgd": 0.02}.get(name, 1.0)


def period(sync: str) -> float:
    """Return the number of steps from one gradient exchange to the next under a sync policy, given as text.

    >>> period("allreduce"), period("localsteps(8)"), period("diloco")
    (1, 8.0, 100)
    """
    name, number = _parsed(sync)
    usual = {"localsteps": 16, "diloco": 100}.get(name)
    return 1 if usual is None else number or usual


def _parsed(sync: str) -> tuple[str, float | None]:
    """Return the name in a sync policy's text, and the first number in its brackets or None."""
    number = re.search(r"\d+(?:\.\d+)?", sync.partition("(")[2])
    return re.split(r"[^a-z0-9_]", sync.lower(), maxsplit=1)[0], float(number[0]) if number else None


def is_lossy(sync: str) -> bool:
    """Return whether a sync policy, given as text, changes the mathematics."""
    return sync.lower() != "allreduce"


def noise_scale(small: int, squares: Sequence[float], large: int, large_squares: Sequence[float]) -> float:
    """Return the gradient noise scale in samples: batches larger than that hardly reduce the number of steps.

    The squared gradient norm of a batch of B samples is |G|² + tr Σ/B on average, where G is the mean gradient and Σ
    the covariance of the samples' gradients. Two batch sizes determine both; the result is tr Σ/|G|².

    Args:
        small: The smaller batch size.
        squares: Squared gradient norms of batches of that size.
        large: The larger batch size.
        large_squares: Squared gradient norms of batches of that size.

    >>> noise_scale(8, [1 + 160 / 8], 32, [1 + 160 / 32])
    160.0
    """
    if not 0 < small < large:
        raise SettingsError(
            "the two batch sizes must be positive and ascending",
            got=f"{small} and {large}",
            remedy="pass the smaller one first",
        )
    first, second = sum(squares) / len(squares), sum(large_squares) / len(large_squares)
    signal = (large * second - small * first) / (large - small)
    noise = (first - second) / (1 / small - 1 / large)
    return max(0.0, noise) / signal if signal > 0 else float("inf")


def steps_needed(batch_size: float, noise: float) -> float:
    """Return the number of steps to a target loss with a batch size, relative to an infinitely large batch.

    >>> steps_needed(100, 100)
    2.0
    """
    return 1 + noise / batch_size


def relative_steps(batch_size: float, usual: float, noise: float) -> float:
    """Return the number of steps to a target loss with a batch size, relative to those with the batch size `usual`.

    >>> relative_steps(200, 100, 100), relative_steps(200, 100, float("inf"))
    (0.75, 0.5)
    """
    if noise == float("inf"):
        return usual / batch_size
    return steps_needed(batch_size, noise) / steps_needed(usual, noise)


def best_batch(noise: float, seconds: dict[int, float]) -> int:
    """Return the batch size that reaches a target loss soonest.

    `noise` is the gradient noise scale in samples, and `seconds` has the seconds of a step by batch size.

    >>> best_batch(1000, {100: 1.0, 1000: 2.0, 10000: 11.0})
    1000
    """
    return min(seconds, key=lambda size: steps_needed(size, noise) * seconds[size])
