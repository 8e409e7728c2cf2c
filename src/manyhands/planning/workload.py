"""Workload: what is to be planned, as numbers: a traced network, its batch, its feed, and what was measured of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..costs import Network


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and how it is trained, whatever it runs on."""

    networks: Mapping[str, Network] = field(hash=False)
    """By precision; each traced with the same rows."""
    batch_size: int
    """Global: a step has the same samples on any number of devices."""
    name: str = "task"
    feed: float | None = None
    """Samples per second that one host reads and prepares, where that was measured."""
    noise: float | None = None
    """The gradient noise scale in samples: beyond about so many a larger batch helps little."""
    recorded: bool = True
    """Whether steps on accelerators are recorded, so that the host hardly matters."""
    overlaps: bool = True
    """Whether gradients are exchanged while backward runs."""
    balanced: bool = True
    """Whether stages are cut by their time; else each has as many blocks, as other systems do it."""
    whole_tensors: bool = False
    """Whether a server holds parameters whole, so that the largest makes one of them hot; ours are cut evenly."""
    wire: float = 1.0
    """Bytes of a gradient on the wire over those of its parameter."""

    def network(self, precision: str) -> Network:
        """The network in this precision, or the one there is."""
        return self.networks.get(precision) or next(iter(self.networks.values()))


def wire_share(sync: str) -> float:
    """Bytes on the wire over the gradient's own, for a policy by its text.

    >>> wire_share("bf16"), wire_share("topk(0.01)"), wire_share("allreduce")
    (0.5, 0.02, 1.0)
    """
    name, number = _parsed(sync)
    if name == "topk":
        return 0.02 if number is None else min(1.0, 2 * number)
    return {"bf16": 0.5, "fp16": 0.5, "int8": 0.26, "powersgd": 0.02}.get(name, 1.0)


def period(sync: str) -> float:
    """Steps from one exchange to the next.

    >>> period("allreduce"), period("localsteps(8)"), period("diloco")
    (1, 8.0, 100)
    """
    name, number = _parsed(sync)
    usual = {"localsteps": 16, "diloco": 100}.get(name)
    return 1 if usual is None else number or usual


def _parsed(sync: str) -> tuple[str, float | None]:
    """A policy's name and its first number."""
    number = re.search(r"\d+(?:\.\d+)?", sync.partition("(")[2])
    return re.split(r"[^a-z0-9_]", sync.lower(), maxsplit=1)[0], float(number[0]) if number else None


def is_lossy(sync: str) -> bool:
    """Whether a policy changes the mathematics."""
    return sync.lower() != "allreduce"
