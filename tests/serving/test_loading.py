"""Loading steps back for those who serve, and gives that up where it would wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from manyhands.core import Predictor, RequestRefused
from manyhands.distributed import Device, resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import BatchSettings, RolloutGuard
from manyhands.serving import replica_process as computing
from manyhands.serving.catalogue import Catalogue, CatalogueSettings
from manyhands.serving.folder import VersionPolicy
from manyhands.serving.replica import ServingReplica
from manyhands.serving.replica_process import Given, Starved, quietly
from manyhands.serving.replica_rendezvous import ReplicaRendezvous
from manyhands.serving.version import ReplicaPlacement, Version
from manyhands.storage import OutputMismatch

from .conftest import publish
from .test_versions import Moody


@dataclass(frozen=True)
class Shy:
    """Says that there was no core for it as long as it has to step back."""

    compiles: bool = False
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> None:
        """Nothing confines it."""

    def open(self, device: str) -> Predictor:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            raise Starved("no core was free")
        return Moody()


def test_a_replica_that_got_no_core_is_loaded_like_any_other_work(engine: LocalEngine) -> None:
    async def start(device: Device) -> tuple[int, str]:
        meeting = ReplicaRendezvous()
        try:
            replica = await ServingReplica.start(engine, meeting, Shy(), device, (1,))
            policy = os.sched_getscheduler(replica.pid)
            replica.close()
            return policy, await replica.ended()
        finally:
            meeting.close()

    assert asyncio.run(start(resolve("cpu")[0][0])) == (os.SCHED_OTHER, "")


def test_what_is_unloaded_while_it_loads_does_not_come_back(engine: LocalEngine) -> None:
    async def run(device: Device) -> str:
        meeting = ReplicaRendezvous()
        try:
            version = Version("shy", 1, Shy(), ReplicaPlacement(engine, meeting, [device]), BatchSettings(max_rows=1))
            loading = asyncio.create_task(version.load(quietly=True))
            await asyncio.sleep(0)
            await version.end(patience=1.0)
            with pytest.raises(RequestRefused, match="unloaded while it was loading"):
                await loading
            return version.state
        finally:
            meeting.close()

    assert asyncio.run(run(resolve("cpu")[0][0])) == "END"


class Doubtful(Predictor):
    """Gives another kind of numbers than it says."""

    signature = Moody.signature

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"].long()}


def test_why_a_replica_could_not_warm_up_is_told(engine: LocalEngine) -> None:
    async def start(device: Device) -> None:
        meeting = ReplicaRendezvous()
        try:
            await ServingReplica.start(engine, meeting, Given(Doubtful()), device, (1,), quietly=False)
        finally:
            meeting.close()

    with pytest.raises(OutputMismatch, match=r"output 'y' must be float32\[\*, 1\] with 1 rows, but got int64\[1, 1\]"):
        asyncio.run(start(resolve("cpu")[0][0]))


@dataclass(frozen=True)
class Uneven:
    """The first process to come loads at once, the others when they may."""

    folder: Path
    compiles: bool = False
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> None:
        """Nothing confines it."""

    def open(self, device: str) -> Predictor:
        with contextlib.suppress(FileExistsError):
            (self.folder / "first").touch(exist_ok=False)
            return Moody()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return Moody()


def run_uneven(
    engine: LocalEngine, folder: Path, then: Callable[[Version, asyncio.Task[None]], Awaitable[None]]
) -> None:
    """Does something when the first of two replicas is ready; the version ends after that."""

    async def run() -> None:
        meeting = ReplicaRendezvous()
        place = ReplicaPlacement(engine, meeting, resolve("cpu*2")[0])
        version = Version("uneven", 1, Uneven(folder), place, BatchSettings(max_rows=1))
        loading = asyncio.create_task(version.load(quietly=False))
        try:
            await until(lambda: len(version.replicas) == 1)
            await then(version, loading)
        finally:
            await version.end(patience=1.0)
            meeting.close()

    asyncio.run(run())


async def until(wanted: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not wanted():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


def test_a_replica_that_dies_while_others_load_is_replaced(engine: LocalEngine, tmp_path: Path) -> None:
    async def then(version: Version, loading: asyncio.Task[None]) -> None:
        lost = version.replicas[0].pid
        os.kill(lost, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(lost))
        (tmp_path / "go").touch()
        await loading
        await until(lambda: len(version.batcher.workers) == 2 and lost not in {one.pid for one in version.replicas})

    run_uneven(engine, tmp_path, then)


def test_a_load_that_is_given_up_ends_the_replicas_that_were_ready(engine: LocalEngine, tmp_path: Path) -> None:
    async def then(version: Version, loading: asyncio.Task[None]) -> None:
        pid = version.replicas[0].pid
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not psutil.pid_exists(pid)

    run_uneven(engine, tmp_path, then)


def test_what_two_ask_for_at_once_is_loaded_once(engine: LocalEngine, adder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        publish(adder, tmp_path / "adder", number)
    settings = CatalogueSettings(
        root=tmp_path,
        policy=VersionPolicy.parse("latest"),
        probation=RolloutGuard(seconds=0),
        batch=BatchSettings(max_rows=1),
        poll=60.0,
    )
    loaded: list[int] = []

    def say(kind: str, **values: int) -> None:
        if kind == "version_loading":
            loaded.append(values["version"])

    async def run() -> list[int]:
        meeting = ReplicaRendezvous()
        catalogue = Catalogue(settings, ReplicaPlacement(engine, meeting, resolve("cpu")[0]), say)
        try:
            await catalogue.start()
            found = await asyncio.gather(catalogue.roll_back("adder"), catalogue.roll_back("adder"))
            # What is unloaded while one version is loaded does not load the next one.
            await catalogue.unload("adder")
            catalogue.model("adder").asked.add(1)
            loading = asyncio.create_task(catalogue.load("adder", 2))
            await until(lambda: len(loaded) == 3)
            await catalogue.unload("adder")
            with pytest.raises(RequestRefused):
                await loading
            return found
        finally:
            await catalogue.stop()
            meeting.close()

    assert asyncio.run(run()) == [1, 1]
    assert loaded == [2, 1, 1]


def test_loading_is_given_up_when_it_waited_too_long_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computing.waited(threading.get_native_id()) >= 0.0
    assert computing.waited(0) == 0.0
    monkeypatch.setattr(computing, "waited", lambda thread: 6.0)
    over = threading.Event()
    with pytest.raises(Starved, match="no core was free for 2 s"):
        quietly(over.wait)  # type: ignore[arg-type]
    over.set()
