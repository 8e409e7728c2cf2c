"""Limits on everything that an untrusted client can send: sizes, counts, times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..core import RequestRefused, SettingsError, is_above_zero, require_positive


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server; in bytes and seconds."""

    head: int = 32 << 10
    """Bytes of a request's line and headers; as many for the framing and the trailers of a chunked body."""
    headers: int = 100
    """Header lines of a request."""
    body: int = 256 << 20
    """Bytes of a body, also after decompression."""
    json: int = 8 << 20
    """Bytes of a body without binary tensors, also after decompression: parsed it takes many times that."""
    values: int = 1 << 21
    """Values of a JSON text: numbers, strings, lists and objects together."""
    inflation: int = 100
    """How many times larger a body may become when it is decompressed; 256 KiB are always allowed."""
    bodies: int = 1 << 30
    """Bytes of all bodies that are not answered yet, over all connections; what comes beyond is refused."""
    connections: int = 4096
    """Connections per listener, counted from accept on. One more evicts another one: see `ConnectionBudget`."""
    connections_per_address: int = 2048
    """Maximum number of these connections from one network: a /24 of IPv4, a /64 of IPv6."""
    calls: int = 1024
    """Unanswered gRPC calls over all connections."""
    streams: int = 256
    """Unanswered gRPC calls of one connection."""
    receive: float = 20.0
    """Seconds from a request's first byte to its last, and for the client to read the response."""
    idle: float = 75.0
    """Seconds that a connection may be idle between requests."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_above_zero(value):
                raise SettingsError(f"the limit {name} must be above 0", got=repr(value), remedy=f"raise {name}")
        if self.body > self.bodies:
            raise SettingsError(
                "the limit body must not be larger than the limit bodies",
                got=f"body={self.body}, bodies={self.bodies}",
                remedy="lower body, or raise bodies",
            )

    @classmethod
    def holding(cls, queue_mib: int) -> Limits:
        """Return the default limits with another limit for all bodies, in MiB.

        >>> Limits.holding(100).body == Limits.holding(100).bodies == 100 << 20
        True
        """
        require_positive(queue_mib=queue_mib)
        return cls(bodies=queue_mib << 20, body=min(cls.body, queue_mib << 20), json=min(cls.json, queue_mib << 20))


class Bodies:
    """Count the bytes of requests that a server holds, over all clients."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0

    def take(self, num: int) -> None:
        """Count more bytes; raises RequestRefused if the limit would be exceeded."""
        if self.num_bytes + num > self._limit:
            raise RequestRefused("UNAVAILABLE", f"overloaded: {self.num_bytes} bytes of requests are waiting", 1.0)
        self.num_bytes += num

    def add(self, num: int) -> None:
        """Count more bytes that are already in memory, without a check."""
        self.num_bytes += num

    def give_back(self, num: int) -> None:
        """Release bytes."""
        self.num_bytes -= num

    @contextmanager
    def holding(self, num: int) -> Iterator[None]:
        """Count more bytes while a block runs; raises RequestRefused if the limit would be exceeded."""
        self.take(num)
        try:
            yield
        finally:
            self.give_back(num)
