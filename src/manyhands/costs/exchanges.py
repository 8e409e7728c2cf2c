"""Exchanges: how long a sum, a gathering or a server's round takes over given links; formulas, with their sources.

An `ExchangeGroup` says how ranks lie over hosts; rings run through the links inside a host first, then through its
network card.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Link

START = 20e-6
"""Seconds to start an exchange on an accelerator and to be sure that all others have."""


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """Ranks that exchange with each other.

    >>> Group(size=16, per_host=8, inside=Link(name="a", bandwidth=1e11)).hosts
    2
    """

    size: int
    per_host: int
    inside: Link
    network: Link | None = None
    sharing: int = 1
    """Groups that use one host's network card at the same time."""
    start: float | None = None
    """Seconds besides hops and bytes, where they were measured."""

    @property
    def beginning(self) -> float:
        """Seconds until an exchange is under way."""
        return START if self.start is None else self.start

    @property
    def hosts(self) -> int:
        """Hosts that it spans."""
        return -(-self.size // self.per_host)

    def _way(self) -> tuple[float, float]:
        """The slowest link's bytes per second and the seconds of a hop around the ring, on average."""
        inner = self.inside.rate
        if self.hosts == 1 or self.network is None:
            return inner, self.inside.latency
        outer = self.network.rate / self.sharing
        hops = (self.inside.latency * (self.size - self.hosts) + self.network.latency * self.hosts) / self.size
        return min(inner, outer), hops


def all_reduce(size: float, group: ExchangeGroup) -> float:
    """Sums `size` bytes over a group: a ring, or a pipelined tree where there are many ranks and few bytes."""
    if group.size == 1:
        return 0.0
    rate, hop = group._way()
    n = group.size
    ring = 2 * (n - 1) * hop + 2 * (n - 1) / n * size / rate
    tree = 4 * n.bit_length() * hop + 2 * size / rate
    return group.beginning + min(ring, tree)


def all_gather(size: float, group: ExchangeGroup) -> float:
    """Gives all ranks the whole of `size` bytes of which each holds a part; a reduce-scatter takes as long."""
    if group.size == 1:
        return 0.0
    rate, hop = group._way()
    return group.beginning + (group.size - 1) * hop + (group.size - 1) / group.size * size / rate


def send(size: float, way: Link) -> float:
    """From one device to the next."""
    return START + way.latency + size / way.rate


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Parameter servers: `count` shards, of which the hottest holds the share `hottest`."""

    count: int
    hottest: float
    way: Link
    """Between a worker and a server."""
    task_rate: float = 1.25e9
    """Bytes per second that one server process serves at the most; published null steps imply about 1e9."""

    start: float = START
    """Seconds of a round besides its bytes."""
    waits: bool = False
    """Whether workers fetch all parameters before they begin, after all others have pushed, rather than as needed."""

    def rounds(self, size: float, pushers: int) -> tuple[float, float]:
        """Seconds in which all pull their parameters and all push their gradients, each way by itself."""
        served = pushers * max(self.hottest, 1 / self.count) * size / min(self.task_rate, self.way.rate)
        own = size / self.way.rate
        once = self.start + max(served, own) + self.way.latency
        return once, once
