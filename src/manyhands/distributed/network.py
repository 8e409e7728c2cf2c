"""Network addresses and interfaces between hosts, and listeners that are bound to one address only."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch.distributed as dist

from ..core import SettingsError

LOOPBACK = "127.0.0.1"
FIRST_SECONDS = 1.0
"""Seconds that a new connection may be silent before it is closed."""
MAX_UNPROVED, MAX_UNPROVED_OF_ONE = 16, 8
"""Maximum number of unauthenticated connections at the same time: in total, and from one address."""


class PortTaken(SettingsError):
    """Raised when another program on this machine listens on the port."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT.

    >>> parse_endpoint("host1:7777")
    ('host1', 7777)
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(
            "an address must be written HOST:PORT", got=repr(text), remedy="write for example host1:7777"
        )
    return host.strip("[]"), int(port)


def resolve_host(name: str) -> str:
    """Return the IPv4 address of a host; raise SettingsError if its name has none."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(
            "the name of a host must resolve to an address",
            got=f"{name} ({error.strerror})",
            remedy="correct the name, or use the address",
        ) from None
    return str(found[0][4][0])


def address_towards(address: str) -> str:
    """Return the address from which this machine sends packets to another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise SettingsError(
                "the network must have a route to the host",
                got=f"{address} ({error.strerror})",
                remedy="check the network and the address",
            ) from None
        return str(probe.getsockname()[0])


def is_ours(address: str) -> bool:
    """Return whether an address is one of this machine's."""
    return is_loopback(address) or address in our_addresses()


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def is_this_host(name: str) -> bool:
    """Return whether a host name or an address belongs to this machine.

    >>> is_this_host("localhost")
    True
    """
    if name == socket.gethostname():
        return True
    try:
        return is_ours(resolve_host(name))
    except SettingsError:
        return False


def interface_of(address: str) -> str:
    """Return the name of the network interface of this machine that has an address."""
    if is_loopback(address):
        return "lo"
    found = our_addresses().get(address)
    if found is None:
        have = ", ".join(sorted(our_addresses()))
        raise SettingsError(
            f"the address must be one of this machine's ({have})", got=address, remedy="choose one of them"
        )
    return found


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address only; port 0 takes any free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        # Two sockets with SO_REUSEADDR may both bind; only one may listen.
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {address} must be free",
                got="a port that another program uses",
                remedy="stop that program, or choose another port",
            ) from None
        raise SettingsError(
            f"{address} must be an address of this machine",
            got=error.strerror,
            remedy=f"choose one of {', '.join(sorted(our_addresses()))}",
        ) from None
    return listener


class Unproved:
    """The connections to a listener that are not authenticated yet; if there are too many, the oldest is closed.

    New connections are never refused, so idle connections cannot keep out a host that has the secret.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}

    def add(self, connection: socket.socket, address: str) -> None:
        """Add a new connection, and close the oldest one if there are too many."""
        with self._guard:
            same = [one for one, theirs in self._addresses.items() if theirs == address]
            if len(same) >= MAX_UNPROVED_OF_ONE:
                self._close(same[0])
            elif len(self._addresses) >= MAX_UNPROVED:
                self._close(next(iter(self._addresses)))
            self._addresses[connection] = address

    def remove(self, connection: socket.socket) -> bool:
        """Remove a connection that is authenticated or has ended; return False if it was closed to admit others."""
        with self._guard:
            return self._addresses.pop(connection, None) is not None

    def close(self) -> None:
        """Close all connections."""
        with self._guard:
            for connection in list(self._addresses):
                self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        del self._addresses[connection]
        # Its own thread closes the socket when it reads the end of the stream.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def serve_store(listener: socket.socket) -> dist.TCPStore:
    """Serve a TCPStore on an existing listener; with a host name, torch would listen on every interface."""
    address, port = listener.getsockname()
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def reach_store(address: str, port: int, timeout: float) -> dist.TCPStore:
    """Connect to the TCPStore that another process serves with `serve_store`."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Let gloo listen on loopback within the context; by default it listens on the address of the host name."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if "lo" in psutil.net_if_addrs():
        os.environ[name] = "lo"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def our_addresses() -> dict[str, str]:
    """Return the names of this machine's network interfaces by IPv4 address."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
