"""Workload to plan for: a traced network, its batch size, its input rate, and measurements.

Statistical efficiency is how many steps a batch size needs, from the gradient noise at two batch sizes.
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
    """Networks by precision, each traced with the same rows."""
    batch_size: int
    """Global batch size: a step has the same samples on any number of devices."""
    name: str = "task"
    feed: float | None = None
    """Samples per second that one host reads and prepares, if measured."""
    noise: float | None = None
    """Gradient noise scale in samples, beyond which a larger batch helps little."""
    captured: bool = True
    """Whether steps on accelerators are captured as CUDA graphs, so that the host hardly matters."""
    fused: bool | None = None
    """Whether operations between products run as one kernel, as torch.compile makes them; None follows the spec."""
    overlaps: bool = True
    """Whether gradients are exchanged while backward runs."""
    balanced: bool = True
    """Whether stages are balanced by time; else each has equally many blocks, as in other systems."""
    whole_tensors: bool = False
    """Whether a server holds whole parameters, so that the largest overloads one; manyhands shards them evenly."""
    gathered: float = 1.0
    """Ratio of a sharded parameter's bytes when it is gathered to those in memory."""
    wire: float = 1.0
    """Ratio of a gradient's bytes on the network to those of its parameter."""

    def network(self, precision: str) -> Network:
        """Return the network in this precision, or any if there is none."""
        return self.networks.get(precision) or next(iter(self.networks.values()))


def wire_share(sync: str) -> float:
    """Return the ratio of bytes on the network to the gradient's own, for a sync policy's text.

    >>> wire_share("bf16"), wire_share("topk(0.01)"), wire_share("allreduce")
    (0.5, 0.02, 1.0)
    """
    name, number = _parsed(sync)
    if name == "topk":
        return 0.02 if number is None else min(1.0, 2 * number)
    return {"bf16": 0.5, "fp16": 0.5, "int8": 0.26, "powersgd": 0.02}.get(name, 1.0)


def period(sync: str) -> float:
    """Return the number of steps from one exchange to the next.

    >>> period("allreduce"), period("localsteps(8)"), period("diloco")
    (1, 8.0, 100)
    """
    name, number = _parsed(sync)
    usual = {"localsteps": 16, "diloco": 100}.get(name)
    return 1 if usual is None else number or usual


def _parsed(sync: str) -> tuple[str, float | None]:
    """Return a policy's name and its first number."""
    number = re.search(r"\d+(?:\.\d+)?", sync.partition("(")[2])
    return re.split(r"[^a-z0-9_]", sync.lower(), maxsplit=1)[0], float(number[0]) if number else None


def is_lossy(sync: str) -> bool:
    """Return whether a policy changes the mathematics."""
    return sync.lower() != "allreduce"


def noise_scale(small: int, squares: Sequence[float], large: int, large_squares: Sequence[float]) -> float:
    """Return the gradient noise scale in samples, from squared gradient norms of small and of large batches.

    A batch of B samples has |G|² + tr Σ/B on average; two sizes give both. Beyond about this many samples, a
    larger batch hardly reduces the number of steps.

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
    """Return the ratio of steps to a target to those of an infinite batch.

    >>> steps_needed(100, 100)
    2.0
    """
    return 1 + noise / batch_size


def best_batch(noise: float, seconds: dict[int, float]) -> int:
    """Return the batch size that reaches a target soonest, given the seconds of a step with each.

    >>> best_batch(1000, {100: 1.0, 1000: 2.0, 10000: 11.0})
    1000
    """
    return min(seconds, key=lambda size: steps_needed(size, noise) * seconds[size])
