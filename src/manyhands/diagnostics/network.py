"""Checks of communication between ranks: loopback, the host name, and an all-reduce of two processes."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable

import psutil
import torch

from ..distributed import World, resolve, this_host
from ..launcher import LocalEngine
from .finding import Finding, broken, slow

NUM_REDUCES = 200
SLOW_SECONDS = 2e-3
"""Seconds of a small all-reduce above which a problem is reported; on an idle machine it takes a tenth of this."""
_PATIENCE = 60.0


def loopback(address: str = "127.0.0.1") -> Finding:
    """Check that a process can connect to `address`, by default the loopback interface of this machine."""
    try:
        with socket.socket() as listener:
            listener.bind((address, 0))
            listener.listen(1)
            start = time.perf_counter()
            with socket.create_connection(listener.getsockname(), timeout=5):
                seconds = time.perf_counter() - start
    except OSError as error:
        return broken(
            "loopback",
            f"{address} cannot be reached: {error}",
            "the ranks of a run connect to each other there",
            "ip link set lo up, and make sure that the firewall accepts packets from lo",
        )
    return Finding("loopback", f"reached in {1e6 * seconds:.0f} µs")


def host_name(name: str | None = None, resolved: str | None = None, ours: frozenset[str] | None = None) -> Finding:
    """Check that the host name resolves to an address of this machine, because gloo selects its interface by it."""
    name = this_host() if name is None else name
    resolved = _address(name) if resolved is None else resolved
    ours = _our_addresses() if ours is None else ours
    why = "custom training loops with torch.distributed, and runs on several machines, select their interface by it"
    remedy = f"add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to the right interface"
    if not resolved:
        return slow("host name", f"{name} resolves to nothing", why, remedy)
    if resolved not in ours and not resolved.startswith("127."):
        return slow("host name", f"{name} resolves to {resolved}, which is not this machine", why, remedy)
    return Finding("host name", f"{name} is {resolved}")


def all_reduce(seconds: float | None = None, start: Callable[[], LocalEngine] = LocalEngine) -> Finding:
    """Check the latency of an all-reduce between two ranks, which are started like those of a run."""
    try:
        seconds = _measure(start()) if seconds is None else seconds
    except Exception as error:
        return broken(
            "all-reduce",
            f"an all-reduce of two ranks failed: {type(error).__name__}: {error}",
            "no strategy with several processes can run",
            "fix the problems above first; the message names the failed rank and the reason",
        )
    text = f"{1e6 * seconds:.0f} µs between two processes"
    if seconds <= SLOW_SECONDS:
        return Finding("all-reduce", text)
    return slow("all-reduce", text, "every step of several processes waits for it", "end other programs on this host")


def _measure(engine: LocalEngine) -> float:
    devices, _ = resolve("cpu*2")
    with contextlib.closing(engine):
        job = engine.start(_time_reduces, devices, timeout=_PATIENCE)
        return float(max(job.wait(lambda rank, entry: None, lambda rank, text, stream: None)))


def _time_reduces(world: World) -> float:
    """Return the median seconds of a small all-reduce, after a warm-up."""
    tensor, times = torch.zeros(1), []
    for _ in range(NUM_REDUCES):
        start = time.perf_counter()
        world.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return statistics.median(times[NUM_REDUCES // 10 :])


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _our_addresses() -> frozenset[str]:
    return frozenset(item.address for items in psutil.net_if_addrs().values() for item in items)
