"""Loading yields to replicas that serve, unless it would then wait indefinitely."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from manyhands.core import Predictor, RequestRefused, RunError
from manyhands.distributed import Device, resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Batching, Rollout
from manyhands.serving import replica_process as computing
from manyhands.serving.catalogue import Catalogue, CatalogueSettings
from manyhands.serving.replica import ServingReplica
from manyhands.serving.replica_process import Given, NoFreeCore, quietly
from manyhands.serving.replica_rendezvous import ReplicaRendezvous
from manyhands.serving.version import ReplicaPlacement, Version
from manyhands.serving.version_loader import MAX_LOADS, MAX_RETRIES, LoadSlots
from manyhands.storage import OutputMismatch

from .conftest import publish
from .test_versions import Moody


@dataclass(frozen=True)
class Shy:
    """Says that there was no core for it as long as it has to step back."""

    compiles: bool = False
    kind: str = "predictor"
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> None:
        """Nothing confines it."""

    def open(self, device: str) -> Predictor:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            raise NoFreeCore("no core was free")
        return Moody()


def test_replica_without_a_free_core_is_loaded_at_normal_priority(engine: LocalEngine) -> None:
    async def start(device: Device) -> tuple[int, str]:
        rendezvous = ReplicaRendezvous()
        try:
            replica = await ServingReplica.start(engine, rendezvous, Shy(), device, (1,))
            policy = os.sched_getscheduler(replica.pid)
            replica.close()
            return policy, await replica.ended()
        finally:
            rendezvous.close()

    assert asyncio.run(start(resolve("cpu")[0][0])) == (os.SCHED_OTHER, "")


def test_version_unloaded_during_loading_stays_unloaded(engine: LocalEngine) -> None:
    async def run(device: Device) -> str:
        rendezvous = ReplicaRendezvous()
        try:
            version = Version("shy", 1, Shy(), ReplicaPlacement(engine, rendezvous, [device]), Batching(max_rows=1))
            loading = asyncio.create_task(version.load(quietly=True))
            await asyncio.sleep(0)
            await version.end(patience=1.0)
            with pytest.raises(RequestRefused, match="unloaded while it was being loaded"):
                await loading
            return version.state
        finally:
            rendezvous.close()

    assert asyncio.run(run(resolve("cpu")[0][0])) == "END"


class Doubtful(Predictor):
    """Gives another kind of numbers than it says."""

    signature = Moody.signature

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"].long()}


def test_warm_up_output_mismatch_is_raised(engine: LocalEngine) -> None:
    async def start(device: Device) -> None:
        rendezvous = ReplicaRendezvous()
        try:
            await ServingReplica.start(engine, rendezvous, Given(Doubtful()), device, (1,), quietly=False)
        finally:
            rendezvous.close()

    with pytest.raises(OutputMismatch, match=r"output 'y' must be float32\[\*, 1\] with 1 row, but got int64\[1, 1\]"):
        asyncio.run(start(resolve("cpu")[0][0]))


@dataclass(frozen=True)
class Uneven:
    """The first process to come loads at once, the others when they may."""

    folder: Path
    compiles: bool = False
    kind: str = "predictor"
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
        rendezvous = ReplicaRendezvous()
        place = ReplicaPlacement(engine, rendezvous, resolve("cpu*2")[0])
        version = Version("uneven", 1, Uneven(folder), place, Batching(max_rows=1))
        loading = asyncio.create_task(version.load(quietly=False))
        try:
            await until(lambda: len(version.replicas) == 1)
            await then(version, loading)
        finally:
            await version.end(patience=1.0)
            rendezvous.close()

    asyncio.run(run())


async def until(wanted: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not wanted():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


def test_replica_that_dies_while_others_load_is_replaced(engine: LocalEngine, tmp_path: Path) -> None:
    async def then(version: Version, loading: asyncio.Task[None]) -> None:
        lost = version.replicas[0].pid
        os.kill(lost, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(lost))
        (tmp_path / "go").touch()
        await loading
        await until(lambda: len(version.batcher.workers) == 2 and lost not in {one.pid for one in version.replicas})

    run_uneven(engine, tmp_path, then)


def test_cancelled_load_stops_the_replicas_that_were_ready(engine: LocalEngine, tmp_path: Path) -> None:
    async def then(version: Version, loading: asyncio.Task[None]) -> None:
        pid = version.replicas[0].pid
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not psutil.pid_exists(pid)

    run_uneven(engine, tmp_path, then)


def test_concurrent_load_requests_for_one_version_load_it_once(
    engine: LocalEngine, adder: Path, tmp_path: Path
) -> None:
    for number in (1, 2):
        publish(adder, tmp_path / "adder", number)
    settings = CatalogueSettings(
        root=tmp_path,
        rollout=Rollout(probation=0, poll=60.0),
        batching=Batching(max_rows=1),
    )
    loaded: list[int] = []

    def say(kind: str, **values: int) -> None:
        if kind == "version_loading":
            loaded.append(values["version"])

    async def run() -> list[int]:
        rendezvous = ReplicaRendezvous()
        catalogue = Catalogue(settings, ReplicaPlacement(engine, rendezvous, resolve("cpu")[0]), say)
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
            rendezvous.close()

    assert asyncio.run(run()) == [1, 1]
    assert loaded == [2, 1, 1]


def test_low_priority_loading_is_aborted_when_no_core_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computing.waited(threading.get_native_id()) >= 0.0
    assert computing.waited(0) == 0.0
    monkeypatch.setattr(computing, "waited", lambda thread: 6.0)
    over = threading.Event()
    with pytest.raises(NoFreeCore, match="no core was free for 2 s"):
        quietly(over.wait)  # type: ignore[arg-type]
    over.set()


@contextlib.asynccontextmanager
async def catalogue_of(
    root: Path, engine: LocalEngine, say: Callable[..., None] = lambda kind, **values: None
) -> AsyncIterator[Catalogue]:
    settings = CatalogueSettings(
        root=root,
        rollout=Rollout(probation=0, poll=0.05),
        batching=Batching(max_rows=1),
    )
    rendezvous = ReplicaRendezvous()
    catalogue = Catalogue(settings, ReplicaPlacement(engine, rendezvous, resolve("cpu")[0]), say)
    try:
        yield catalogue
    finally:
        await catalogue.stop()
        rendezvous.close()


def test_models_load_swap_and_roll_back_while_another_model_hangs(
    engine: LocalEngine, adder: Path, tmp_path: Path
) -> None:
    """The model that never ends its warm-up comes first in the folder."""
    publish(adder, tmp_path / "a-hanging", 1)
    publish(adder, tmp_path / "adder", 1)

    async def warm_up(version: Version) -> None:
        if version.model == "a-hanging":
            await asyncio.Event().wait()

    async def run() -> None:
        async with catalogue_of(tmp_path, engine) as catalogue:
            catalogue.loader.warm_up = warm_up

            def serves(number: int) -> bool:
                model = catalogue.models.get("adder")
                return model is not None and model.current is not None and model.current.number == number

            starting = asyncio.create_task(catalogue.start())
            try:
                await until(lambda: serves(1))
                publish(adder, tmp_path / "adder", 2)
                await until(lambda: serves(2))
                assert await asyncio.wait_for(catalogue.roll_back("adder"), 20) == 1
                await asyncio.wait_for(catalogue.load("adder", 2), 20)
                await until(lambda: serves(2))
                assert catalogue.model("a-hanging").versions[1].state == "LOADING"
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(run())


def test_retries_of_failed_loads_leave_load_slots_for_other_models() -> None:
    async def run() -> tuple[int, int]:
        slots = LoadSlots()
        held = {True: 0, False: 0}

        async def load(has_failed: bool) -> None:
            async with slots.hold(has_failed=has_failed):
                held[has_failed] += 1
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(load(has_failed)) for has_failed in [True] * 10 + [False] * 10]
        for _ in range(10):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return held[True], held[False]

    assert asyncio.run(run()) == (MAX_RETRIES, MAX_LOADS - MAX_RETRIES)


@dataclass(frozen=True)
class Hanging:
    """Never returns from loading, or loads at once; has these seconds for its load, then for its warm-up."""

    returns: bool
    folder: Path
    limits: list[float]
    compiles: bool = False
    kind: str = "predictor"

    @property
    def patience(self) -> float:
        return self.limits.pop(0)

    def sandbox(self, device: Device, group: str) -> None:
        """Nothing confines it."""

    def open(self, device: str) -> Predictor:
        (self.folder / "pid").write_text(str(os.getpid()))
        while not self.returns:
            time.sleep(1)
        return Moody()


def test_hung_load_and_hung_warm_up_time_out(engine: LocalEngine, tmp_path: Path) -> None:
    async def load(source: Hanging) -> str:
        rendezvous = ReplicaRendezvous()
        try:
            place = ReplicaPlacement(engine, rendezvous, resolve("cpu")[0])
            version = Version("m", 1, source, place, Batching(max_rows=1))
            version.warm_up = lambda _: asyncio.Event().wait()  # type: ignore[assignment, return-value]
            with pytest.raises(RunError):
                await asyncio.wait_for(version.load(quietly=False), 60)
            await until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
            return version.detail
        finally:
            rendezvous.close()

    assert asyncio.run(load(Hanging(True, tmp_path, [60.0, 1.0]))) == "the warm-up did not end within 1 s"
    assert asyncio.run(load(Hanging(False, tmp_path, [3.0]))) == "the model was not loaded within 3 s"


def test_folder_scan_does_not_block_the_event_loop(
    engine: LocalEngine, adder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that answers only after the event loop has done something else."""
    publish(adder, tmp_path / "adder", 1)
    scanning, is_alive, outcomes = threading.Event(), threading.Event(), []
    scandir = os.scandir

    def slow(path: str | Path) -> object:
        if str(path) == str(tmp_path):
            scanning.set()
            outcomes.append(is_alive.wait(120))
        return scandir(path)

    async def run() -> None:
        async with catalogue_of(tmp_path, engine) as catalogue:
            monkeypatch.setattr(os, "scandir", slow)
            starting = asyncio.create_task(catalogue.start())
            await until(scanning.is_set)
            is_alive.set()
            await starting
            assert catalogue.model("adder").current is not None

    asyncio.run(run())
    assert all(outcomes)


def test_oversized_folder_is_reported_once_and_known_models_stay_served(
    engine: LocalEngine, adder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.serving.folder.MAX_ENTRIES", 50)
    publish(adder, tmp_path / "adder", 1)
    publish(adder, tmp_path / "full", 1)
    reported: list[str] = []

    def say(kind: str, **values: str) -> None:
        if kind == "folder_too_large":
            reported.append(values["model"])

    async def run() -> None:
        async with catalogue_of(tmp_path, engine, say) as catalogue:
            await catalogue.start()
            for number in range(100):
                (tmp_path / f"flood-{number}").mkdir()
                (tmp_path / "full" / f"flood-{number}").mkdir()
            await until(lambda: set(reported) == {"", "full"})
            publish(adder, tmp_path / "adder", 2)
            await until(lambda: "2" in [str(v.number) for v in catalogue.model("adder").available])
            assert catalogue.model("full").current is not None

    asyncio.run(run())
    assert sorted(reported) == ["", "full"]
