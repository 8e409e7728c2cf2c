"""A port that the server holds while the process that listens on it is replaced."""

from __future__ import annotations

import asyncio
import errno
import socket

OTHER = {"0.0.0.0": "::", "::": "0.0.0.0", "localhost": "::1"}  # noqa: S104 - it is compared with a setting
"""Addresses that a gRPC listener has too if it is given one of these."""


class PortReservation:
    """Bound sockets that do not listen and keep other users of the machine from taking a port.

    The process that listens makes its own socket. With SO_REUSEPORT, sockets of the same user
    share a port, and only those that listen get connections. SO_REUSEADDR is not set: with it any process could bind
    the port while no socket listens on it. A process of the same user can still listen on the port with SO_REUSEPORT.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self.port = 0

    async def open(self, host: str, port: int) -> int:
        """Reserve a port on all addresses of a host and return it; raises OSError if it is not free."""
        self.port = port
        last = OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine")
        for family, address in await addresses_of(host):
            try:
                self._reserve(family, (address, self.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    self.close()
                    raise
                # An address without an interface, as ::1 where IPv6 is disabled; the gRPC listener skips it too.
                last = error
        if not self._sockets:
            raise last
        return self.port

    def close(self) -> None:
        """Release the port."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def _reserve(self, family: int, address: tuple[str, int]) -> None:
        if self.port:
            # Another server of the same user shares its port too; this finds that it is in use.
            with _socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        sock = _socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
        self._sockets.append(sock)
        self.port = int(sock.getsockname()[1])


def _socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


async def addresses_of(host: str) -> list[tuple[int, str]]:
    """Return the families and addresses that a gRPC listener on a host has."""
    loop = asyncio.get_running_loop()
    found: dict[tuple[int, str], None] = {}
    for name in (host, OTHER.get(host, host)):
        for family, _, _, _, address in await loop.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            found[int(family), str(address[0])] = None
    return list(found)
