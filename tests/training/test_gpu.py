"""Training on a CUDA device: alone, split in two, in bf16, resumed, exported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.distributed import Device, DirectChannel, RankInfo, TorchWorld, World
from manyhands.testing import WorldContract
from manyhands.training import Hand

from ..grouped_options import fit_options
from .problems import Cnn, classify, generator, mlp, problem
from .test_fit import StopAt

pytestmark = pytest.mark.gpu


def fit(task: mh.Task, strategy: Any, on: str, **settings: Any) -> mh.Run:
    return mh.fit(task, strategy, **fit_options(on=on, progress=False, timeout=60, **settings))


@pytest.mark.parametrize("name", ["mlp", "cnn", "gan"])
def test_one_gpu_and_two_replicas_on_it_equal_cpu(name: str, tmp_path: Path) -> None:
    task = problem(name, "adamw")
    cpu = fit(task, mh.Single(precision="fp64"), "cpu", epochs=2, folder=tmp_path)
    alone = fit(task, mh.Single(precision="fp64"), "cuda:0", epochs=2, folder=tmp_path)
    halves = fit(task, mh.Mirrored(precision="fp64", accumulate=1), "cuda:0*2", epochs=2, folder=tmp_path)
    for other in (alone, halves):
        for key, values in cpu.history.items():
            np.testing.assert_allclose(list(other.history[key].values()), list(values.values()), rtol=1e-9)
        for key, value in cpu.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=1e-8, msg=key)


def test_resume_on_gpu_is_bitwise_identical(tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: torch.nn.Sequential(mlp(), torch.nn.Dropout(0.3)),
        loss=classify,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(torch.randn(400, 12, generator=generator(0)), torch.randint(0, 5, (400,), generator=generator(1))),
        batch_size=8,
    )
    whole = fit(task, mh.Single(), "cuda:0", epochs=2, folder=tmp_path, name="whole")
    fit(task, mh.Single(), "cuda:0", epochs=2, folder=tmp_path, name="parts", callbacks=[StopAt(40)])
    resumed = fit(task, mh.Single(), "cuda:0", epochs=2, folder=tmp_path, name="parts", resume=True)
    assert resumed.losses == whole.losses
    assert len(whole.losses) == 100


def test_bfloat16_run_exports_and_predicts_on_gpu(tmp_path: Path) -> None:
    data = (torch.randn(64, 1, 6, 6, generator=generator(0)), torch.randint(0, 5, (64,), generator=generator(1)))
    task = problem("cnn").replace(data=data)
    plain = fit(task, mh.Single(), "cuda:0", epochs=3, folder=tmp_path)
    half = fit(task, mh.Single(precision="bf16"), "cuda:0", epochs=3, folder=tmp_path)
    np.testing.assert_allclose(half.losses, plain.losses, rtol=0.05)
    assert half.losses != plain.losses
    half.export(tmp_path / "models")
    expected = half.model()(data[0])
    found = mh.load(tmp_path / "models", device="cuda:0")(data[0])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
    assert isinstance(half.model(), Cnn)
    found = mh.predict(half, data[0], on="cuda:0").float()
    torch.testing.assert_close(found, expected.detach(), rtol=0.1, atol=0.1)


class NcclContract(WorldContract):
    """The kit on a world that is already there; not collected by itself, because nccl stays with its process."""

    __test__ = False
    sizes = (1,)

    def __init__(self, world: World) -> None:
        self._world = world

    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        return [fn(self._world)]


def nccl_alone() -> None:
    """Two ranks cannot share a GPU under nccl; one shows that tensors of both kinds find their backend."""
    rank_info = RankInfo(device=Device("cuda", 0))
    world = TorchWorld(rank_info, DirectChannel(), torch.distributed.HashStore(), "cpu:gloo,cuda:nccl")
    kit = NcclContract(world)
    for name in [name for name in dir(kit) if name.startswith("test_")]:
        getattr(kit, name)()
    tensor = torch.ones(3, device="cuda:0")
    world.all_reduce(tensor)
    assert world.all_gather(tensor).tolist() == [[1.0] * 3]
    assert Hand(world, mh.StrategySpec()).sum(2.0).item() == 2.0
    assert world.mesh({"replicas": 1}).get_group("replicas") is not None
    world.close()


def test_nccl_works_with_one_rank() -> None:
    """In a process of its own: nccl keeps sockets and threads until the process ends."""
    program = "from tests.training.test_gpu import nccl_alone; nccl_alone(); print('passed')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip().endswith("passed"), done.stderr


def test_devices_reports_gpu_memory_and_capability() -> None:
    device = mh.devices()[0]
    assert device.kind == "cuda"
    assert device.remedy == ""
    assert device.memory > 0
    assert device.capability
