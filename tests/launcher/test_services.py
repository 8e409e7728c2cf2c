"""Services of the local engine; the Ray engine's pass the same contract in test_ray.py."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from manyhands.api.runtime import runtime
from manyhands.core import WorkerFailed
from manyhands.distributed import Device, World, resolve
from manyhands.launcher import Engine, LocalEngine
from manyhands.testing import ServiceContract


class TestLocalServices(ServiceContract):
    def place(self) -> tuple[Engine, Device]:
        return runtime.engine, resolve("cpu")[0][0]


class Cores:
    def __init__(self, world: World) -> None:
        self.world = world

    def seen(self) -> tuple[str, int, list[int]]:
        return str(self.world.rank_info.device), torch.get_num_threads(), sorted(os.sched_getaffinity(0))

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_services_on_virtual_cpus_use_disjoint_cores(engine: LocalEngine) -> None:
    first, second = (engine.start_service(Cores, device) for device in resolve("cpu*2")[0])
    with first, second:
        seen = [service.call("seen").result(30) for service in (first, second)]
    num_cores = len(os.sched_getaffinity(0))
    assert [name for name, _, _ in seen] == ["cpu#0", "cpu#1"]
    assert [threads for _, threads, _ in seen] == [max(1, num_cores // 2)] * 2
    if num_cores >= 2:
        assert not set(seen[0][2]) & set(seen[1][2])


def test_frozen_service_is_terminated(engine: LocalEngine) -> None:
    with engine.start_service(Cores, resolve("cpu")[0][0]) as service, pytest.raises(WorkerFailed, match="was frozen"):
        service.call("freeze").result(30)
