"""Simulated hosts on one machine: network namespaces with their own addresses, connected by a switch. Needs root.

with NamespaceHosts(3, rate="100mbit") as hosts:
    hosts[1].run(["manyhands", "devices"])
    hosts[2].link_down()
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..distributed import World
from ..launcher import meet

NAMESPACES = Path("/run/netns")
_NAMES = Path("/etc/netns")
"""Folder in which `ip netns exec` looks for a namespace's own version of /etc/hosts."""
_CLONE_NEWNET = 0x40000000
PORT = 29500
_count = itertools.count()


@dataclass(frozen=True)
class NamespaceHost:
    """A simulated host: a network namespace with a host name and an address."""

    name: str
    address: str
    namespace: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on the host, which sees the host's name and network; the caller must end it.

        `options` are those of subprocess.Popen.
        """
        return subprocess.Popen(self._inside(command), **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program on the host until it ends; `options` are those of subprocess.run."""
        return subprocess.run(self._inside(command), **options)

    def link_down(self) -> None:
        """Disconnect the host from the network; packets to and from it are dropped silently."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def link_up(self) -> None:
        """Reconnect the host to the network."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def mute(self, address: str) -> None:
        """Drop the packets that this host sends to an address; packets from that address still arrive."""
        _ip("-n", self.namespace, "route", "add", "blackhole", f"{address}/32")

    def unmute(self, address: str) -> None:
        """Send packets to an address again, after `mute`."""
        _ip("-n", self.namespace, "route", "del", "blackhole", f"{address}/32")

    def limit_rate(self, rate: str | None) -> None:
        """Limit what this host sends, in the syntax of tc: "100mbit"; None removes the limit."""
        _call("tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root", expected=(0, 2))
        if rate is not None:
            limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            _call("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", *limit)

    def enter(self) -> None:
        """Move the calling thread, and threads that it creates later, to this host's network namespace."""
        with (NAMESPACES / self.namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def _inside(self, command: Sequence[str]) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        return ["ip", "netns", "exec", self.namespace, *named]


class NamespaceHosts(Sequence[NamespaceHost]):
    """Context with simulated hosts that can reach only each other: host1 at 10.77.0.1, host2 at 10.77.0.2, ….

    Their switch is in a namespace too, so the network of this machine is not changed, and several such objects can
    exist at a time.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        """Define `count` hosts, which exist inside the context.

        `rate` limits the bandwidth with which each host sends, in the syntax of `tc`, such as "100mbit".
        """
        mark = f"mh{os.getpid()}-{next(_count)}"
        self._switch, self._rate = f"{mark}-switch", rate
        self._hosts = [
            NamespaceHost(f"host{number}", f"10.77.0.{number}", f"{mark}-{number}") for number in range(1, count + 1)
        ]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self._hosts)
        for number, host in enumerate(self._hosts):
            _ip("netns", "add", host.namespace)
            (_own_folder(host.namespace) / "hosts").write_text(names)
            port = f"port{number}"
            _ip("-n", host.namespace, "link", "add", "eth0", "type", "veth", "peer", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
            if self._rate is not None:
                host.limit_rate(self._rate)

    def add_wire(self, name: str, subnet: str) -> None:
        """Connect the first two hosts by an additional direct link: an interface `name` with addresses in `subnet`.

        For the subnet "10.78.0" their addresses are 10.78.0.1 and 10.78.0.2.
        """
        first, second = self._hosts[:2]
        _ip("-n", first.namespace, "link", "add", name, "type", "veth", "peer", name, "netns", second.namespace)
        for number, host in enumerate((first, second), start=1):
            _ip("-n", host.namespace, "addr", "add", f"{subnet}.{number}/24", "dev", name)
            _ip("-n", host.namespace, "link", "set", name, "up")

    def partition(self, *others: int) -> None:
        """Partition the network: separate the hosts at these positions, counted from 0, from all other hosts."""
        _ip("-n", self._switch, "link", "add", "other", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "other", "up")
        for number in others:
            _ip("-n", self._switch, "link", "set", f"port{number}", "master", "other")

    def heal(self) -> None:
        """End a network partition, so that all hosts can communicate again."""
        for number in range(len(self._hosts)):
            _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch")
        _ip("-n", self._switch, "link", "del", "other")

    def joined(self, fn: Callable[[World], Any], *, timeout: float = 60.0) -> Callable[[World], Any]:
        """Return a function for the ranks of a local engine that moves each rank to a host and calls `fn` there.

        engine.start(hosts.joined(work), resolve("cpu*3")[0]) runs work(world) with a rank on each of three hosts.
        `timeout` is in seconds, for the collectives of this world.
        """
        hosts = list(self._hosts)

        def work(world: World) -> Any:
            host = hosts[world.rank % len(hosts)]
            world.close()
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
            host.enter()
            rank_info = replace(world.rank_info, host=host.name, timeout=timeout)
            there = meet(hosts[0].address, PORT, rank_info, world.channel)
            try:
                return fn(there)
            finally:
                there.close()

        return work

    def close(self) -> None:
        """Remove all hosts; programs that still run on them have a network without connections."""
        for namespace in (*(host.namespace for host in self._hosts), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(_NAMES / namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            _NAMES.rmdir()  # only where it is empty

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __iter__(self) -> Iterator[NamespaceHost]:
        return iter(self._hosts)


def _own_folder(namespace: str) -> Path:
    """Create the configuration folder of a namespace and return it; retry if another process removes the parent."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            (_NAMES / namespace).mkdir(parents=True)
            return _NAMES / namespace


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str, expected: Sequence[int] = (0,)) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in expected:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
