"""Communication costs: formulas for the time of collectives, and of pulls and pushes of parameter servers.

An `ExchangeGroup` describes how ranks are distributed over hosts. The ring of a collective uses the links inside each
host, and one network card per host.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Link

START = 20e-6
"""Assumed seconds until all ranks have started a collective on accelerators."""


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """Ranks that communicate with each other: their number, how many are on one host, and their links.

    >>> ExchangeGroup(size=16, per_host=8, inside=Link(name="a", bandwidth=1e11)).hosts
    2
    """

    size: int
    per_host: int
    inside: Link
    network: Link | None = None
    sharing: int = 1
    """Number of groups that use one host's network card at the same time."""
    start: float | None = None
    """Measured seconds to start a collective, in addition to hops and bytes; None for the default, START."""

    @property
    def beginning(self) -> float:
        """Return the seconds until all ranks have started a collective."""
        return START if self.start is None else self.start

    @property
    def hosts(self) -> int:
        """Return the number of hosts that the group spans."""
        return -(-self.size // self.per_host)

    def _way(self) -> tuple[float, float]:
        """Return the bytes per second of the ring's slowest link, and the average seconds of a hop."""
        inner = self.inside.within(min(self.size, self.per_host))
        if self.hosts == 1 or self.network is None:
            return inner, self.inside.latency
        outer = self.network.rate / self.sharing
        hops = (self.inside.latency * (self.size - self.hosts) + self.network.latency * self.hosts) / self.size
        return min(inner, outer), hops


def all_reduce(size: float, group: ExchangeGroup) -> float:
    """Return the seconds to all-reduce `size` bytes, by a ring or by a pipelined tree, whichever is faster."""
    if group.size == 1:
        return 0.0
    rate, hop = group._way()
    n = group.size
    ring = 2 * (n - 1) * hop + 2 * (n - 1) / n * size / rate
    tree = 2 * (n - 1).bit_length() * hop + 2 * size / rate
    return group.beginning + min(ring, tree)


def all_gather(size: float, group: ExchangeGroup) -> float:
    """Return the seconds to all-gather `size` bytes in total; a reduce-scatter takes as long."""
    if group.size == 1:
        return 0.0
    rate, hop = group._way()
    return group.beginning + (group.size - 1) * hop + (group.size - 1) / group.size * size / rate


def send(size: float, way: Link) -> float:
    """Return the seconds to send `size` bytes from one device to the next."""
    return START + way.latency + size / way.rate


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Parameter servers: `count` servers, of which the one with the most bytes holds the fraction `hottest`."""

    count: int
    hottest: float
    way: Link
    """The link between a worker and a server."""
    task_rate: float = 1.25e9
    """Maximum bytes per second of one server process; published times of steps without computation imply about 1e9."""

    start: float = START
    """Seconds of a pull or push in addition to the time for its bytes."""
    waits: bool = False
    """Whether workers pull all parameters before a step and after all pushes, rather than when they are needed."""

    def rounds(self, size: float, pushers: int) -> tuple[float, float]:
        """Return the seconds in which `pushers` workers pull `size` bytes each, and those for pushing as many."""
        served = pushers * max(self.hottest, 1 / self.count) * size / min(self.task_rate, self.way.rate)
        own = size / self.way.rate
        once = self.start + max(served, own) + self.way.latency
        return once, once
