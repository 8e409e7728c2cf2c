"""Loading steps back for those who serve, and gives that up where it would wait for ever."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass

import pytest

from manyhands.cluster import Device, LocalEngine, resolve
from manyhands.core import Predictor, RequestRefused
from manyhands.serving import BatchSettings, computing
from manyhands.serving.computing import Starved, quietly
from manyhands.serving.meeting import Meeting
from manyhands.serving.replica import Replica
from manyhands.serving.version import Place, Version

from .test_versions import Moody


@dataclass(frozen=True)
class Shy:
    """Says that there was no core for it as long as it has to step back."""

    compiles: bool = False

    def open(self, device: str) -> Predictor:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            raise Starved("no core was free")
        return Moody()


def test_a_replica_that_got_no_core_is_loaded_like_any_other_work(engine: LocalEngine) -> None:
    async def start(device: Device) -> tuple[int, str]:
        meeting = Meeting()
        try:
            replica = await Replica.start(engine, meeting, Shy(), device, (1,))
            policy = os.sched_getscheduler(replica.pid)
            replica.close()
            return policy, await replica.ended()
        finally:
            meeting.close()

    assert asyncio.run(start(resolve("cpu")[0][0])) == (os.SCHED_OTHER, "")


def test_what_is_unloaded_while_it_loads_does_not_come_back(engine: LocalEngine) -> None:
    async def run(device: Device) -> str:
        meeting = Meeting()
        try:
            version = Version("shy", 1, Shy(), Place(engine, meeting, [device]), BatchSettings(max_rows=1))
            loading = asyncio.create_task(version.load(quietly=True))
            await asyncio.sleep(0)
            await version.end(patience=1.0)
            with pytest.raises(RequestRefused, match="unloaded while it was loading"):
                await loading
            return version.state
        finally:
            meeting.close()

    assert asyncio.run(run(resolve("cpu")[0][0])) == "END"


def test_loading_is_given_up_when_it_waited_too_long_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computing.waited(threading.get_native_id()) >= 0.0
    assert computing.waited(0) == 0.0
    monkeypatch.setattr(computing, "waited", lambda thread: 6.0)
    over = threading.Event()
    with pytest.raises(Starved, match="no core was free for 2 s"):
        quietly(over.wait)  # type: ignore[arg-type]
    over.set()
