"""Every world fulfils the same contract; device meshes for worlds of processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyhands.core import PeerLost, UsageError
from manyhands.distributed import DirectChannel, NullWorld, World
from manyhands.distributed.network import listen, reach_store, serve_store
from manyhands.distributed.torch_world import TorchWorld, _is_connection_error
from manyhands.testing import Faults, InjectedFault, WorldContract, run_threads


class TestNullWorld(WorldContract):
    sizes = (1,)

    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        return [fn(NullWorld())]


class TestThreadWorld(WorldContract):
    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        return run_threads(fn, size)


class TestGlooWorld(WorldContract):
    sizes = (2, 3)

    @pytest.fixture(autouse=True)
    def _ranks(self, run_ranks: Callable[..., list[Any]]) -> None:
        self._run = run_ranks

    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        return self._run(fn, size)


def shape_of_mesh(world: World) -> tuple[tuple[int, ...], tuple[str, ...], int]:
    mesh = world.mesh({"replicas": world.size, "shards": 1})
    group = mesh.get_group("replicas")
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor, group=group)
    return tuple(mesh.shape), tuple(mesh.mesh_dim_names), int(tensor)


def test_device_mesh_supports_torch_collectives(run_ranks: Callable[..., list[Any]]) -> None:
    world = NullWorld()
    assert shape_of_mesh(world) == ((1, 1), ("replicas", "shards"), 1)
    world.close()
    assert not torch.distributed.is_initialized()
    assert run_ranks(shape_of_mesh, 2) == [((2, 1), ("replicas", "shards"), 2)] * 2


def test_mesh_of_a_thread_world_raises() -> None:
    with pytest.raises(UsageError, match="a mesh can only be created from processes"):
        run_threads(lambda world: world.mesh({"replicas": 1}), 1)


def test_injected_fault_reaches_every_thread() -> None:
    def work(world: World) -> int:
        for _ in range(5):
            world.all_reduce(torch.ones(1))
        return world.rank

    outcomes = run_threads(work, 3, faults=Faults().fail_at(rank=1, operation=2))
    assert isinstance(outcomes[1], InjectedFault)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor, PeerLost)
        assert "rank 1 raised InjectedFault" in str(survivor)


def survive(world: World, victim: int, how: str) -> str:
    """Kill a rank during collectives; survivors return the reported reason and how soon it came."""
    tensor = torch.ones(1000)
    world.all_reduce(tensor)
    if world.rank == victim:
        os.kill(os.getpid(), getattr(signal, how))
    start = time.monotonic()
    try:
        for _ in range(10_000):
            world.all_reduce(tensor)
    except PeerLost as lost:
        text = f"{lost} | {time.monotonic() - start < 5}"
        world.channel.report({"kind": "survivor", "text": text})
        raise
    return "nothing happened"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_killed_peer_aborts_the_collective_and_is_named(engine: Any, how: str) -> None:
    from functools import partial

    from manyhands.core import WorkerFailed
    from manyhands.distributed import resolve

    heard: dict[int, str] = {}
    devices, _ = resolve("cpu*3")
    job = engine.start(partial(survive, victim=1, how=how), devices, timeout=60)
    with pytest.raises(WorkerFailed, match=f"rank 1 on .* was killed by signal .*{how}"):
        job.wait(lambda rank, entry: heard.update({rank: entry["text"]}), lambda *_: None)
    assert set(heard) == {0, 2}
    for text in heard.values():
        assert "all_reduce at" in text
        assert "test_worlds.py:" in text
        assert "rank 1 on" in text
        assert how in text
        assert text.endswith("True"), f"survivors must learn at once: {text}"


def wait_for_nobody(world: World) -> None:
    """Rank 0 dies while 1 and 2 wait for each other and never hear from it directly."""
    if world.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def test_peer_failure_outside_a_collective_wakes_waiting_ranks(engine: Any) -> None:
    from manyhands.core import WorkerFailed
    from manyhands.distributed import resolve

    devices, _ = resolve("cpu*3")
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 0"):
        engine.start(wait_for_nobody, devices, timeout=60).wait(lambda *_: None, lambda *_: None)
    assert time.monotonic() - start < 30


def collectives_along(world: World) -> list[Any]:
    """Every collective within one of two pairs of ranks."""
    pair = world.along({"rows": 2, "columns": 2}, "columns")
    total, other = torch.tensor([1.0 + world.rank]), torch.tensor([1.0 + world.rank])
    pair.all_reduce(total)
    pending = pair.start_all_reduce(other, "max")
    pending.wait()
    told = torch.tensor([world.rank])
    pair.broadcast(told, source=1)
    gathered = pair.all_gather(torch.tensor([world.rank]))
    swapped = torch.empty(2, 1)
    pair.start_all_to_all(torch.tensor([[10.0 * world.rank], [10.0 * world.rank + 1]]), swapped).wait()
    assert pair.waited == 0 < world.waited, "the whole world counts the time"
    numbers = [total.item(), other.item(), told.item(), gathered.flatten().tolist(), swapped.flatten().tolist()]
    return [pair.rank, pair.size, *numbers, pair.gather_objects(world.rank)]


def test_collectives_run_within_a_subgroup_of_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(collectives_along, 4) == [
        [0, 2, 3.0, 2.0, 1, [0, 1], [0.0, 10.0], [0, 1]],
        [1, 2, 3.0, 2.0, 1, [0, 1], [1.0, 11.0], [0, 1]],
        [0, 2, 7.0, 4.0, 3, [2, 3], [20.0, 30.0], [2, 3]],
        [1, 2, 7.0, 4.0, 3, [2, 3], [21.0, 31.0], [2, 3]],
    ]


@pytest.mark.parametrize("text", ["Broken pipe", "Connection reset by peer", "Socket Timeout", "NCCL error"])
def test_torch_connection_error_messages_are_recognized(text: str) -> None:
    assert _is_connection_error(RuntimeError(text))
    assert not _is_connection_error(RuntimeError("shapes (2, 3) and (4, 5) do not fit"))


def told_while_it_connects(world: World) -> list[str]:
    """Join a peer that was killed after it published its address, and learn of its failure while gloo waits for it."""
    world.close()
    listener = listen("127.0.0.1")
    server = serve_store(listener)
    port, said = server.port, []
    for generation in range(1, 3):
        rank_info = replace(world.rank_info, size=2, generation=generation, timeout=120.0)
        dead = os.fork()
        if not dead:
            TorchWorld(replace(rank_info, rank=1), DirectChannel(), reach_store("127.0.0.1", port, 60), "gloo")
        time.sleep(0.3)
        os.kill(dead, signal.SIGKILL)
        os.waitpid(dead, 0)
        channel = DirectChannel()
        news = threading.Timer(0.2, channel.handle_message, [{"lost": "host2 is gone", "generation": generation}])
        news.start()
        try:
            TorchWorld(rank_info, channel, reach_store("127.0.0.1", port, 60), "gloo")
        except PeerLost as lost:
            said.append(lost.who)
        news.join()
    return said


def test_connecting_rank_aborts_when_the_peer_is_reported_failed(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(told_while_it_connects, 1) == [["host2 is gone"] * 2]
