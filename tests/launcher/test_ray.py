"""The Ray engine, on a real cluster of two nodes: services, servers that follow the load, a fit that loses a worker and
then a node; what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray  # sets environment variables of its own when it is first imported
import torch
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from torch import nn

import manyhands as mh
from manyhands.core import DeviceError, SettingsError, Signature, TensorSpec, read_events
from manyhands.distributed import Device
from manyhands.launcher import Engine
from manyhands.launcher.ray_engine import RayEngine, _cpus
from manyhands.testing import ServiceContract

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
"""Two hosts on the loopback device, so that nothing listens to the world."""


class Faults(mh.Callback):
    """A worker is killed at step 4, and step 12 waits until the second node is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 4 and hand.world.rank == 1 and hand.world.rank_info.generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if hand.num_steps == 12 and hand.size == 2:
            (self.folder / "kill").touch()
            while not hand.world.channel.has_lost(hand.world.rank_info.generation):
                time.sleep(0.05)


def task() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=(ROWS, ROWS.sum(1, keepdim=True)),
        batch_size=8,
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two raylets that leaves nothing behind: no process, no session folder."""
    environ = dict(os.environ)
    folder = tempfile.mkdtemp(prefix="mh-ray")
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir()
    common = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    head = {**common, "num_cpus": 3, "node_ip_address": HEAD, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(node_ip_address=SECOND, num_cpus=1, **common)
        ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ.update(environ)


def test_cpus_are_distributed_over_hosts() -> None:
    hosts = {"a": {"CPU": 2.0}, "b": {"CPU": 4.0}, "c": {}}
    assert [str(device) for device in _cpus(hosts, 5)] == ["a/cpu", "a/cpu", "b/cpu", "b/cpu", "b/cpu"]
    assert [device.host for device in _cpus(hosts, None)] == ["a", "b"]


def test_missing_ray_cluster_error_explains_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # no trace of another cluster
    with pytest.raises(SettingsError, match="needs a reachable Ray cluster.*ray start --head"):
        mh.fit(task(), on="ray", folder=tmp_path)


class RayServices(ServiceContract):
    """The contract that local services pass too, on the second node."""

    def place(self) -> tuple[Engine, Device]:
        engine = RayEngine("ray")
        return engine, engine.devices("ray", None)[0][1]


def test_ray_services_pass_the_engine_contract(nodes: Any, tmp_path: Path) -> None:
    contract = RayServices()
    for name in [name for name in dir(contract) if name.startswith("test_")]:
        getattr(contract, name)(*([tmp_path] if "gracefully" in name else []))


class Slow(mh.Predictor):
    """Takes its time."""

    signature = Signature({"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, 1))})

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(0.1)
        return {"y": inputs["x"] + 1}


def pid_behind(backend: str) -> int:
    """The process that listens there."""
    host, port = backend.split(":")
    (pid,) = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == int(port) and one.laddr.ip.endswith(host)
    }
    return pid


def test_servers_are_spread_over_hosts_and_sigkill_loses_no_request(nodes: Any) -> None:
    asked = {"inputs": [[1.0]]}
    with mh.serve(Slow(), on="ray", servers=2, listen=mh.serving.Listen(http=0, grpc=0, manage=0)) as router:
        placed = [each["address"] for each in router.state()["backends"] if each["up"]]
        assert {address.split(":")[0] for address in placed} == {HEAD, SECOND}

        def ask(client: httpx.Client) -> list[Any]:
            return [client.post("/v1/models/model:predict", json=asked).json() for _ in range(10)]

        with httpx.Client(base_url=router.url, timeout=60, verify=False) as client, ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, client) for _ in range(4)]
            os.kill(pid_behind(placed[0]), signal.SIGKILL)
            assert all(each.result() == [{"outputs": [[2.0]]}] * 10 for each in answers)


def test_fit_survives_worker_failure_and_node_failure(nodes: Any, tmp_path: Path) -> None:
    cluster, second = nodes
    devices, _ = RayEngine("ray").devices("ray", None)
    assert len(devices) == 2
    assert len({device.host for device in devices}) == 2
    with pytest.raises(DeviceError, match="needs 5 devices, but got 4 in the Ray cluster"):
        mh.fit(task(), mh.Mirrored(5), on="ray", folder=tmp_path)

    groups: list[dict[str, Any]] = []
    heard: list[str] = []

    def kill_node() -> None:
        while not (tmp_path / "kill").exists():
            time.sleep(0.05)
        groups.extend(placement_group_table().values())
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_node, daemon=True)
    killer.start()
    options = [
        mh.options.Display(progress=False),
        mh.options.Recovery(timeout=60),
        mh.options.Logging(log_to=lambda entry: heard.append(entry["kind"])),
    ]
    # Two groups of two. When the second node is gone three ranks are left, and one has no partner for a group.
    run = mh.fit(
        task(),
        "replicas=2,tensor=2",
        on="ray",
        epochs=2,
        folder=tmp_path,
        name="run",
        callbacks=[Faults(tmp_path)],
        options=options,
    )
    killer.join()
    (group,) = [group for group in groups if group["state"] == "CREATED"]
    assert group["strategy"] == "STRICT_SPREAD"
    assert sorted(bundle["CPU"] for bundle in group["bundles"].values()) == [1.0, 3.0]
    assert {"start", "steps", "lost", "recovered", "epoch", "end"} <= set(heard), "events come to the caller"
    whole = mh.fit(task(), mh.Single(), on="cpu", epochs=2, folder=tmp_path, options=mh.options.Display(progress=False))
    assert run.num_steps == 16
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(whole.losses), rtol=1e-5, atol=1e-7)
    events = list(read_events(run.path / "events.jsonl"))
    lost = [(entry["rank"], entry["reason"]) for entry in events if entry["kind"] == "lost"]
    assert lost[0][0] == 1
    assert "SIGKILL" in lost[0][1]
    assert "is gone" in lost[-1][1]
    recovered = [(entry["step"], entry["size"]) for entry in events if entry["kind"] == "recovered"]
    assert recovered[0] == (4, 2)
    assert recovered[-1][1] == 1
    assert any("2 ranks form a group" in entry["text"] for entry in events if entry["kind"] == "notice")
