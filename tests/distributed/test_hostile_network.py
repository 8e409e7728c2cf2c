"""Processes without key and token on the ranks' network: they cannot execute code, and jobs report them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.attacks import ranks

from manyhands.core import PeerLost, SettingsError
from manyhands.distributed import DirectChannel, NullWorld, RankInfo, World
from manyhands.distributed.authentication import NotAuthentic, RankKey, SignedStore
from manyhands.distributed.links import measured, serving
from manyhands.distributed.network import listen, reach_store, serve_store
from manyhands.distributed.torch_world import TorchWorld, _Ports
from manyhands.launcher import LocalEngine
from manyhands.launcher.existing_cluster import _introduced


@pytest.mark.parametrize(
    "attack", [ranks.impersonate_rank, ranks.preset_store_keys, ranks.inject_into_listeners, ranks.fuzz_ports]
)
def test_unauthenticated_process_cannot_interfere_with_a_running_job(
    attack: Callable[..., Any], engine: LocalEngine
) -> None:
    outcome = attack(engine)
    assert outcome.is_refused_with_reason, outcome


@pytest.mark.parametrize("attack", [ranks.replay_message, ranks.flip_bits, ranks.fill_join_port])
def test_attacker_cannot_modify_messages_or_block_joining(attack: Callable[[], Any]) -> None:
    outcome = attack()
    assert outcome.is_refused_with_reason, outcome


class Impostor(TorchWorld):
    """Writes right addresses into the store, but has not the key of the others."""

    def _connect(self, backend: str) -> None:
        self._key = RankKey.random()
        super()._connect(backend)


def meets_an_impostor(world: World) -> str:
    world.close()
    server = serve_store(listen("127.0.0.1"))
    rank_info, key = replace(world.rank_info, size=2, timeout=30.0), RankKey.random()
    child = os.fork()
    if not child:
        try:
            Impostor(
                replace(rank_info, rank=1), DirectChannel(), reach_store("127.0.0.1", server.port, 30), "gloo", key
            )
        finally:
            os._exit(0)
    try:
        TorchWorld(rank_info, DirectChannel(), reach_store("127.0.0.1", server.port, 30), "gloo", key).close()
        return "nothing"
    except PeerLost as lost:
        return lost.who
    finally:
        os.waitpid(child, 0)


def test_peer_is_authenticated_before_data_is_exchanged(run_ranks: Callable[..., list[Any]]) -> None:
    (told,) = run_ranks(meets_an_impostor, 1)
    assert "the connection to rank 1 in group whole leads to a process that is not part of this job" in told


def opened_here(world: World) -> tuple[list[str], bool]:
    """Where this process listens, and whether anything like a key can be read from outside."""
    world.mesh({"replicas": 1, "shards": world.size})
    ports = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    public = Path("/proc/self/environ").read_text() + Path("/proc/self/cmdline").read_text() + str(dict(os.environ))
    return ports, bool(re.search("[0-9a-f]{64}", public))


def test_local_ranks_listen_on_loopback_and_do_not_expose_the_key(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = NullWorld()
    # A container's own name leads to its address on the network.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", next((name for name in psutil.net_if_addrs() if name != "lo"), "lo"))
    for ports, is_shown in [opened_here(alone), *run_ranks(opened_here, 2)]:
        assert set(ports) == {"127.0.0.1"}
        assert not is_shown
    alone.close()


def test_idle_connections_do_not_block_link_measurement() -> None:
    with contextlib.ExitStack() as held, serving(["127.0.0.1"], b"t" * 16) as (ways, token):
        for _ in range(20):
            held.enter_context(socket.create_connection(ways[0]))
        assert [link.address for link in measured("host2", ways, token)] == ["127.0.0.1"]
        assert measured("host2", ways, b"f" * 16) == []


def test_forged_store_values_are_rejected() -> None:
    server = serve_store(listen("127.0.0.1"))
    key = RankKey.random()
    store = SignedStore(reach_store("127.0.0.1", server.port, 5), key, patience=0.1)
    store.set("a", "mine")
    assert store.get("a") == b"mine"
    signed = server.get("a")
    for forged in (b"", b"x" * 40, signed[:-1] + b"f", signed):
        server.set("b", forged)
        with pytest.raises(NotAuthentic, match="the value of 'b' in the ranks' store has no valid signature"):
            store.get("b")


def test_ranks_with_different_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve_store(listen("127.0.0.1"))
    rank_info = RankInfo(rank=0, size=1, timeout=1.0)
    monkeypatch.setenv("MANYHANDS_TOKEN", "a" * 40)
    _, first = _introduced(server, rank_info, [])
    _, second = _introduced(server, rank_info, [])
    assert first.tag("x") != second.tag("x"), "what was overheard in one job must be worth nothing in the next"
    monkeypatch.setenv("MANYHANDS_TOKEN", "b" * 40)
    with pytest.raises(SettingsError, match="all ranks must have the same MANYHANDS_TOKEN"):
        _introduced(server, replace(rank_info, rank=1, size=2), [])
    monkeypatch.delenv("MANYHANDS_TOKEN")
    assert not _introduced(server, rank_info, [])[1].is_secret


class Rewound:
    """A store in which an attacker restores the values of an earlier job, which have valid signatures."""

    def __init__(self, store: Any) -> None:
        self._store, self._earlier = store, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._store.set(key, self._earlier.setdefault(key, self._store.get(key)))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


def test_values_of_an_earlier_job_do_not_restore_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TOKEN", "a" * 40)
    store: Any = Rewound(serve_store(listen("127.0.0.1")))
    rank_info = RankInfo(rank=0, size=1, timeout=1.0)
    earlier, now = (_introduced(store, rank_info, [])[1] for _ in range(2))
    assert earlier.tag("x") != now.tag("x")
    # Nor are the numbers accepted with which a connection was confirmed earlier.
    nonces = [_Ports(set()).add(store, rank_info, {1})[0] for _ in range(2)]
    assert nonces[0] != nonces[1]
