"""Worlds that shrink and grow within an epoch: a host fails and returns, and the result is the same."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands import training
from manyhands.distributed import Device
from manyhands.launcher import LocalEngine
from manyhands.launcher.coordinator import Coordinator, LocalHost, Rendezvous
from manyhands.launcher.pickles import pack
from manyhands.launcher.processes import Process
from manyhands.launcher.rank import Assignment
from manyhands.storage import CheckpointStore
from tests.recovery.test_parts import Trap, in_backward
from tests.training.problems import problem

STEPS = 24


class Beside(LocalHost):
    """A second host, whose processes are on this machine too: it is gone when its rank is killed."""

    def handle_exit(self, slot: int, process: Process) -> None:
        if process.done:
            super().handle_exit(slot, process)
        else:
            self._coordinator.dismiss(self, "is gone")


class TwoHosts:
    """A job over a host with all ranks but one and another with the last, which is lost and may come back."""

    def __init__(self, engine: LocalEngine, job: training.Job, size: int, *, comes_back: bool, unit: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._comes_back = comes_back
        self._parcel = pack(Assignment.here(functools.partial(training.train, job=job), _devices(size), 60, True))
        zygote = engine.warm_up()
        here = LocalHost("host1", _devices(size - 1), zygote, self._parcel)
        self.coordinator = Coordinator(here, Rendezvous(), after_loss="regroup", timeout=60, unit=unit)
        self._zygote, self.beside = zygote, []
        self._join()
        self.coordinator.call()

    def _join(self) -> None:
        beside = Beside("host2", _devices(1), self._zygote, self._parcel)
        beside.open(self.coordinator)
        self.beside.append(beside)
        self.coordinator.admit(beside)

    def run(self) -> None:
        try:
            self.coordinator.wait(self._hear, lambda rank, text, stream: print(rank, text))
        finally:
            for beside in self.beside:
                beside.processes.finish()
            os.close(self._parcel)

    def _hear(self, rank: int, entry: dict[str, Any]) -> None:
        self.events.append(entry)
        print(rank, entry)
        is_smaller = any(e["kind"] == "recovered" for e in self.events)
        if entry["kind"] == "steps" and is_smaller and entry["steps"][-1] > 7 and self._comes_back:
            self._comes_back = False
            self._join()


def _devices(count: int) -> list[Device]:
    return [Device("cpu", 0, "", 1.0, slot) for slot in range(count)]


class Pace(mh.Callback):
    """Writes which samples were in which step, in which micro-batches; goes slowly while the host is away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        with (self.folder / f"ledger-{os.getpid()}").open("a") as file:
            file.write(f"{hand.num_steps}|{hand.rank}|{hand.size}|{list(hand.batch.sizes)}|{hand.batch.ids.tolist()}\n")
        if hand.world.rank_info.generation == 1 and hand.num_steps < STEPS - 2:
            time.sleep(0.1)


def train(
    engine: LocalEngine,
    task: mh.Task,
    strategy: str,
    folder: Path,
    *,
    size: int,
    comes_back: bool = False,
    unit: int = 1,
) -> TwoHosts:
    """The other host is lost inside the sixth step."""
    spec = mh.StrategySpec.parse(f"{strategy},precision=fp64").with_devices(size)
    callbacks = [Pace(folder), Trap(folder, size - 1, 5, in_backward)]
    job = training.Job(task=task, spec=spec, folder=folder, epochs=8, copy_every=2, callbacks=callbacks)
    folder.mkdir()
    hosts = TwoHosts(engine, job, size, comes_back=comes_back, unit=unit)
    hosts.run()
    return hosts


def recovered(hosts: TwoHosts, what: str) -> list[Any]:
    return [entry[what] for entry in hosts.events if entry["kind"] == "recovered"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    folder = tmp_path_factory.mktemp("calm")
    return mh.fit(
        problem("mlp", "adamw"),
        "single,precision=fp64",
        on="cpu",
        epochs=8,
        folder=folder,
        options=mh.options.Display(progress=False),
    )


def assert_same(folder: Path, hosts: TwoHosts, calm: mh.Run) -> None:
    losses: dict[int, float] = {}
    for entry in hosts.events:
        if entry["kind"] == "steps":
            losses |= dict(zip(entry["steps"], entry["losses"]["loss"], strict=True))
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(calm.losses, rel=1e-9)
    model = CheckpointStore(folder / "checkpoints").load().model
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(model[name], tensor, rtol=0, atol=1e-9)


def test_shrink_to_three_ranks_and_grow_to_four_keeps_each_sample_once(
    engine: LocalEngine, tmp_path: Path, calm: mh.Run
) -> None:
    task = problem("mlp", "adamw")
    hosts = train(engine, task, "replicas=4", tmp_path / "run", size=4, comes_back=True)
    assert recovered(hosts, "size") == [3, 4]
    assert_same(tmp_path / "run", hosts, calm)
    said: dict[tuple[int, int], tuple[int, list[int], list[int]]] = {}
    for path in sorted((tmp_path / "run").glob("ledger-*"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            step, rank, size, micros, ids = line.split("|")
            said[int(step), int(rank)] = int(size), eval(micros), eval(ids)
    counts = Counter(sample for _, _, ids in said.values() for sample in ids)
    assert counts == dict.fromkeys(range(len(task.data[0])), 8), "each sample once in every epoch"
    assert {step for step, _ in said} == set(range(1, STEPS + 1))
    assert {size for size, _, _ in said.values()} == {3, 4}
    assert max(rows for _, micros, _ in said.values() for rows in micros) == 4, "never more rows at a time than of four"
    assert {len(micros) for size, micros, _ in said.values() if size == 3} == {2}
    assert {len(micros) for size, micros, _ in said.values() if size == 4} == {1}


def test_shards_without_replica_are_resharded_from_memory_copies(
    engine: LocalEngine, tmp_path: Path, calm: mh.Run
) -> None:
    hosts = train(engine, problem("mlp", "adamw"), "shards=3", tmp_path / "run", size=3)
    assert recovered(hosts, "size") == [2]
    assert recovered(hosts, "step") == [4]
    assert "copies" in recovered(hosts, "source")[0]
    assert_same(tmp_path / "run", hosts, calm)


def test_failed_rank_removes_its_whole_tensor_parallel_group(engine: LocalEngine, tmp_path: Path, calm: mh.Run) -> None:
    task = problem("mlp", "adamw")
    hosts = train(engine, task, "tensor=2,replicas=2", tmp_path / "run", size=4, comes_back=True, unit=2)
    assert recovered(hosts, "size") == [1, 2], "groups of two ranks"
    assert "the memory of ranks 0, 1" in recovered(hosts, "source")
    assert any(
        "ranks on host1 wait until their group is complete" in e["text"] for e in hosts.events if e["kind"] == "notice"
    )
    assert_same(tmp_path / "run", hosts, calm)
