"""Network links: the interface that connects two hosts, and the measured latency and bandwidth."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core import SettingsError, format_duration, format_rate
from .messages import message
from .network import FIRST_SECONDS, LOOPBACK, Unproved, interface_of, listen, our_addresses, resolve_host
from .world import World

NUM_PINGS = 30
NUM_BYTES, CHUNK = 16 * 2**20, 2**16
SEND_SECONDS = 0.5
"""Maximum seconds in which a measurement sends; on a slow link, fewer than NUM_BYTES bytes give the bandwidth too."""
PATIENCE = 5.0
"""Seconds to wait for the answer of a host."""


@dataclass(frozen=True)
class Reach:
    """Whether a host is reachable from this one, by which interface, and how fast it answers."""

    host: str
    address: str = ""
    interface: str = ""
    seconds: float | None = None
    """The round-trip time; None if there was no answer."""
    why: str = ""
    """Why the host is not reachable; empty if it is."""


@message
@dataclass(frozen=True)
class MeasuredLink:
    """The measured link from a host to an address of the host of rank 0."""

    host: str
    interface: str
    address: str
    seconds: float
    """The median round-trip time."""
    bytes_per_second: float

    def __str__(self) -> str:
        speed = f"{format_rate(self.bytes_per_second)}, {format_duration(self.seconds)}"
        return f"{self.host} reaches {self.address} by {self.interface}: {speed}"


def reach(host: str, port: int, patience: float = PATIENCE) -> Reach:
    """Try to connect to a host; a closed port counts as an answer too.

    >>> reach("localhost", 9).interface
    'lo'
    """
    try:
        address = resolve_host(host)
    except SettingsError as error:
        return Reach(host, why=f"its name has no address ({error.got})")
    with socket.socket() as probe:
        probe.settimeout(patience)
        began = time.perf_counter()
        try:
            code = probe.connect_ex((address, port))
        except OSError as error:
            code = error.errno or errno.EIO
        seconds = time.perf_counter() - began
        if code not in (0, errno.ECONNREFUSED):
            is_silent = code in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINPROGRESS)
            problem = "no answer" if is_silent else errno.errorcode[code]
            return Reach(host, address, why=f"{problem} from {address} within {patience:.0f} s")
    return Reach(host, address, _interface_towards(address), seconds)


def measure(world: World) -> list[MeasuredLink]:
    """Measure the links from every host to the host of rank 0; all ranks must call this.

    Returns:
        The links, sorted by host, the fastest link of each host first.
    """
    hosts = world.gather_objects(world.rank_info.host)
    is_alone = len(set(hosts)) == 1
    with contextlib.ExitStack() as held:
        served: tuple[list[tuple[str, int]], bytes] | None = None
        if world.is_first:
            served = held.enter_context(serving(_addresses(is_alone), secrets.token_bytes(16)))
        ways, token = world.gather_objects(served)[0]
        found: list[MeasuredLink] = []
        for turn in sorted({hosts.index(host) for host in hosts[1:]} - ({0} if not is_alone else set())):
            mine = measured(world.rank_info.host, ways, token) if world.rank == turn else []
            found += world.gather_objects(mine)[turn]
    return sorted(found, key=lambda link: (hosts.index(link.host), -link.bytes_per_second))


def best(links: list[MeasuredLink]) -> dict[str, MeasuredLink]:
    """Return the fastest link of each host."""
    return {link.host: link for link in reversed(links)}


def measured(host: str, ways: Sequence[tuple[str, int]], token: bytes) -> list[MeasuredLink]:
    """Measure the links from this host to another.

    Args:
        host: Name of this host.
        ways: Addresses and ports on which the other host answers with `serving`; those that do not answer are omitted.
        token: The secret with which `serving` was called.
    """
    return [link for way in ways if (link := _measured(host, way, token)) is not None]


def _addresses(is_alone: bool) -> list[str]:
    outward = [address for address, name in our_addresses().items() if name != "lo"]
    return [LOOPBACK] if is_alone or not outward else outward


def _measured(host: str, way: tuple[str, int], token: bytes) -> MeasuredLink | None:
    """Measure the link to one address; return None if it does not answer, for example in an unreachable network."""
    try:
        with socket.create_connection(way, timeout=PATIENCE) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(token)
            times = list(_pings(link))
            interface = interface_of(link.getsockname()[0])
            return MeasuredLink(host, interface, way[0], statistics.median(times), _rate(link))
    except OSError:
        return None


def _rate(link: socket.socket) -> float:
    """Send bytes; return their number per second until the peer confirms that it has received all."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)  # bytes in this buffer are not sent yet
    payload, sent, began = bytes(CHUNK), 0, time.perf_counter()
    while sent < NUM_BYTES and time.perf_counter() - began < SEND_SECONDS:
        link.sendall(payload)
        sent += CHUNK
    link.shutdown(socket.SHUT_WR)
    if not link.recv(1):
        raise ConnectionError("the peer closed the connection")
    return sent / (time.perf_counter() - began)


def _pings(link: socket.socket) -> Iterator[float]:
    for _ in range(NUM_PINGS):
        began = time.perf_counter()
        link.sendall(b"?")
        if not link.recv(1):
            raise ConnectionError("the peer closed the connection")
        yield time.perf_counter() - began


@contextlib.contextmanager
def serving(addresses: list[str], token: bytes) -> Iterator[tuple[list[tuple[str, int]], bytes]]:
    """Answer measurements of `measured` on each address within the context, from peers that send the token.

    Yields:
        The addresses with their ports, and the token.
    """
    listeners = [listen(address) for address in addresses]
    threads = [threading.Thread(target=_answer_all, args=(item, token), name="links") for item in listeners]
    for thread in threads:
        thread.start()
    try:
        yield [item.getsockname() for item in listeners], token
    finally:
        for item in listeners:
            # close() alone would leave the thread blocked in accept().
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()
        for thread in threads:
            thread.join()


def _answer_all(listener: socket.socket, token: bytes) -> None:
    unproved = Unproved()
    while True:
        try:
            link, (address, _) = listener.accept()
        except OSError:
            unproved.close()
            return
        unproved.add(link, address)
        # In its own thread, so that a silent peer blocks no other.
        threading.Thread(target=_answer, args=(link, token, unproved), name="link", daemon=True).start()


def _answer(link: socket.socket, token: bytes, unproved: Unproved) -> None:
    with link, contextlib.suppress(OSError):
        link.settimeout(FIRST_SECONDS)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            is_known = secrets.compare_digest(link.recv(len(token)), token)
        finally:
            is_here = unproved.remove(link)
        if is_known and is_here:
            link.settimeout(PATIENCE)
            _take_bytes(link)


def _take_bytes(link: socket.socket) -> None:
    for _ in range(NUM_PINGS):
        if not link.recv(1):
            return
        link.sendall(b"!")
    buffer = bytearray(4 * CHUNK)
    while link.recv_into(buffer):
        pass
    link.sendall(b"!")


def _interface_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return interface_of(probe.getsockname()[0])
