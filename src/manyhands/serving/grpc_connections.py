"""Connections of a gRPC listener by network: gRPC accepts them itself and limits nothing but their number."""

from __future__ import annotations

import asyncio
import heapq
import os
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterable

from .connections import network_of

LOOK_SECONDS = 0.05
"""Seconds between two looks at the connections."""
_SILENT = struct.Struct("52xI")
"""The field tcpi_last_data_recv of struct tcp_info: milliseconds since the client sent something."""


class GrpcConnections:
    """Ends connections of networks that have too many, by shutting down their sockets.

    A proxy in front of gRPC would count connections when it accepts them, but made a call take a fifth longer. The
    sockets of this process are looked at instead, a few times a second, at no cost to calls.

    Args:
        port: The port of the listener.
        most: The number of connections that stay.
        most_per_network: The number of those from one network.
    """

    def __init__(self, port: int, most: int, most_per_network: int) -> None:
        self._port, self._most, self._most_per_network = port, most, most_per_network
        self._known: dict[int, tuple[int, str | None]] = {}
        """Open descriptors of sockets: the inode, and the network of a client of this listener."""

    async def watch(self) -> None:
        """Look at the connections from time to time, for at most a tenth of the time."""
        seconds = 0.0
        while True:
            await asyncio.sleep(max(LOOK_SECONDS, 10 * seconds))
            began = time.perf_counter()
            self.shed()
            seconds = time.perf_counter() - began

    def shed(self) -> int:
        """End the connections that are too many, and return their number.

        Of the network that has the most, the connection gives way whose client has been silent for the longest time.
        """
        numbers = os.listdir("/proc/self/fd")
        if len(numbers) <= min(self._most, self._most_per_network):
            return 0
        networks = self._by_network(map(int, numbers))
        num = 0
        for network, excess in self._excess(networks).items():
            silent = heapq.nlargest(excess, networks[network], key=self._silent)
            num += sum(self._end(number) for number in silent)
        return num

    def _excess(self, networks: dict[str, list[int]]) -> Counter[str]:
        """Return how many connections of each network are too many."""
        excess: Counter[str] = Counter()
        total = sum(map(len, networks.values()))
        sizes = [(-len(numbers), network) for network, numbers in networks.items()]
        heapq.heapify(sizes)
        while sizes and (total > self._most or -sizes[0][0] > self._most_per_network):
            size, network = sizes[0]
            heapq.heapreplace(sizes, (size + 1, network))
            excess[network] += 1
            total -= 1
        return excess

    def _by_network(self, numbers: Iterable[int]) -> dict[str, list[int]]:
        before, self._known = self._known, {}
        networks: dict[str, list[int]] = {}
        for number in numbers:
            try:
                status = os.fstat(number)
            except OSError:
                continue
            if not stat.S_ISSOCK(status.st_mode):
                continue
            known = before.get(number)
            if known is None or known[0] != status.st_ino:
                known = status.st_ino, self._network(number)
            self._known[number] = known
            if known[1] is not None:
                networks.setdefault(known[1], []).append(number)
        return networks

    def _network(self, number: int) -> str | None:
        """Return the network of a client of this listener; None for any other socket."""
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                    return None
                return network_of(str(sock.getpeername()[0]))
        except OSError:
            return None

    def _silent(self, number: int) -> int:
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                return int(_SILENT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENT.size))[0])
        except OSError:
            return 0

    def _end(self, number: int) -> bool:
        """Shut a connection down; gRPC then closes it. Descriptors are reused, so it is identified once more."""
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                if os.fstat(sock.fileno()).st_ino != self._known[number][0]:
                    return False
                sock.shutdown(socket.SHUT_RDWR)
                return True
        except OSError:
            return False
