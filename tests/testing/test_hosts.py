"""Simulated hosts: connections, links that go down, partitions, rate limits, and clean-up."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.testing import NamespaceHosts

pytestmark = pytest.mark.root


def reaches(hosts: NamespaceHosts, here: int, there: int) -> bool:
    """Whether a host answers another within a moment."""
    code = f"import socket; socket.create_connection(({hosts[there].address!r}, 9), timeout=0.7)"
    # No process listens there: a refused connection is an answer.
    return "refused" in hosts[here].run(["python3", "-c", code], capture_output=True, text=True).stderr


def test_hosts_are_reachable_until_the_link_is_down() -> None:
    with NamespaceHosts(3) as hosts, NamespaceHosts(2) as others:
        assert [host.address for host in hosts][:2] == [host.address for host in others]
        assert reaches(hosts, 0, 2)
        hosts[2].link_down()
        assert not reaches(hosts, 0, 2)
        hosts[2].link_up()
        assert reaches(hosts, 0, 2)
        hosts.partition(1, 2)
        assert reaches(hosts, 1, 2)
        assert not reaches(hosts, 0, 1)
        hosts.heal()
        assert reaches(hosts, 0, 1)
        named = hosts[1].run(["sh", "-c", "hostname; getent hosts host3"], capture_output=True, text=True).stdout
        assert named.split()[:2] == ["host2", "10.77.0.3"]
        names = [host.namespace for host in (*hosts, *others)]
    for folder in ("/run/netns", "/etc/netns"):
        assert not [name for name in names if (Path(folder) / name).exists()]


def test_ranks_on_emulated_hosts_all_reduce_at_the_link_rate(engine: LocalEngine) -> None:
    def work(world: World) -> tuple[float, float, str]:
        data = torch.ones(250_000) * (world.rank + 1)
        began = time.monotonic()
        world.all_reduce(data)
        return float(data.sum()), time.monotonic() - began, world.rank_info.host

    def run(**options: Any) -> list[Any]:
        with NamespaceHosts(2, **options) as hosts:
            return engine.start(hosts.joined(work), resolve("cpu*2")[0]).wait(lambda *_: None, print)

    assert [(total, host) for total, _, host in run()] == [(750_000.0, "host1"), (750_000.0, "host2")]
    # A million bytes at 20 Mbit/s; less the burst that may go at once.
    assert min(seconds for _, seconds, _ in run(rate="20mbit")) > 0.3


def test_failed_host_creation_leaves_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = NamespaceHosts(1, rate="nonsense")
    with pytest.raises(RuntimeError, match="tc .*rate"):
        hosts.__enter__()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert hosts[0].namespace not in listed
