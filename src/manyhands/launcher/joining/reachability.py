"""Which joined hosts reach each other: each sends datagrams to all others, and reports hosts that have become silent.

Hosts keep a connection with the first host only, but ranks connect to each other. Two hosts that reach the first host
but not each other would fail in every collective, with an error that does not name them.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import selectors
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from .token import JoinToken

ROUND_SECONDS = 0.5
"""Seconds between two datagrams to the same host."""
SILENT_SECONDS = 3.0
"""Seconds without a datagram from a host that was heard before, after which it is reported."""
MAX_DATAGRAM = 1024


class PeerBeats:
    """Heartbeats between hosts, authenticated by the job's token.

    A host from which no datagram has ever arrived is not reported: a firewall may pass the connections of ranks, but no
    datagrams. A host that was heard before and then rejoins is reported SILENT_SECONDS after its introduction.
    """

    def __init__(self, host: str, address: str, token: JoinToken, selector: selectors.BaseSelector) -> None:
        self._host, self._token, self._selector = host, token, selector
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind((address, 0))
        selector.register(self._socket, selectors.EVENT_READ, self._receive)
        self._salt = ""
        self._peers: dict[str, tuple[str, int]] = {}
        self._heard: dict[str, tuple[float, int]] = {}
        """By name of a host: when its last datagram arrived, and the datagram's number."""
        self._numbers = itertools.count(time.time_ns())
        self._next = 0.0

    @property
    def port(self) -> int:
        """The port at which this host receives datagrams."""
        return int(self._socket.getsockname()[1])

    def introduce(self, peers: Mapping[str, tuple[str, int]], salt: str) -> None:
        """Send datagrams to these hosts (names with addresses and ports) from now on, authenticated with `salt` too."""
        before, self._peers = self._peers, {name: where for name, where in peers.items() if name != self._host}
        self._salt = salt
        now = time.monotonic()
        for name in self._heard:
            if self._peers.get(name) != before.get(name):
                self._heard[name] = now, self._heard[name][1]

    def tick(self) -> None:
        """Send a datagram to every host, if that is due."""
        now = time.monotonic()
        if now < self._next:
            return
        if now - self._next > 2 * ROUND_SECONDS:
            # This program was busy or frozen, and has not read what the others have sent.
            self._heard = {name: (now, number) for name, (_, number) in self._heard.items()}
        self._next = now + ROUND_SECONDS
        for name, where in self._peers.items():
            number = str(next(self._numbers))
            proof = self._token.prove("peer", self._salt, self._host, name, number)
            # A link that is down, or a port that no socket has, is noticed by the silence.
            with contextlib.suppress(OSError, OverflowError):
                self._socket.sendto("\0".join([self._host, number, proof]).encode(), where)

    def unheard(self) -> list[str]:
        """Return the hosts whose datagrams have arrived before, but not in the last SILENT_SECONDS."""
        since = time.monotonic() - SILENT_SECONDS
        return sorted(name for name in self._peers if name in self._heard and self._heard[name][0] < since)

    def close(self) -> None:
        """Stop receiving datagrams, and close the socket."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            name, number, proof = self._socket.recv(MAX_DATAGRAM).decode().split("\0")
            expected = self._token.prove("peer", self._salt, name, self._host, number)
            is_newer = int(number) > self._heard.get(name, (0.0, 0))[1]
            if name in self._peers and is_newer and hmac.compare_digest(proof.encode(), expected.encode()):
                self._heard[name] = time.monotonic(), int(number)


def excluded_hosts(pairs: Iterable[Collection[str]], num_ranks: Mapping[str, int]) -> set[str]:
    """Return a small set of hosts to exclude, so that the remaining hosts all reach each other.

    The two hosts of each of `pairs` do not reach each other. Of a pair, the host that is in more pairs is excluded; if
    both are in the same number of pairs, it is the one with fewer ranks.

    >>> sorted(excluded_hosts([("b", "c"), ("c", "d")], {"b": 1, "c": 1, "d": 1}))
    ['c']
    >>> sorted(excluded_hosts([("b", "c")], {"b": 2, "c": 1}))
    ['c']
    """
    left = {frozenset(pair) for pair in pairs}
    found: set[str] = set()
    while left:
        degree = Counter(name for pair in left for name in pair)
        worst = min(degree, key=lambda name: (-degree[name], num_ranks.get(name, 0), name))
        found.add(worst)
        left = {pair for pair in left if worst not in pair}
    return found
