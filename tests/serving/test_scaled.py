"""Servers that an engine places behind a router: autoscaling, and replacement of failed servers."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

import manyhands as mh
from manyhands.core import SettingsError, WorkerFailed
from manyhands.distributed import Device
from manyhands.launcher import Engine
from manyhands.serving import Listen, RouteSettings, ScaledRouter, Scaling, Server
from manyhands.serving.routing.backend import Address, Backend
from manyhands.serving.routing.scaled import Post, Scaler

from .conftest import Start
from .test_router import address, backends_of, until
from .test_versions import Moody, ask_moody


def test_short_burst_or_pause_does_not_change_the_number_of_servers() -> None:
    scaler = Scaler(Scaling(least=1, most=4, busy=10, grow=2, calm=30))
    num, history = 1, []
    loads = {0: 0, 5: 100, 6: 0, 10: 25, 20: 100, 30: 5, 40: 25, 41: 5}
    for second in range(80):
        busy = loads[max(at for at in loads if at <= second)]
        num = scaler.wanted(num, busy, float(second))
        history.append(num)
    assert history[:12] == [1] * 12, "one second of a hundred requests is no load"
    assert history[12:22] == [3] * 10
    assert history[22:60] == [4] * 38, "there are four at most, and for 30 seconds after they were needed"
    assert history[61:71] == [3] * 10
    assert history[71:] == [1] * 9


@pytest.mark.parametrize(("text", "found"), [("0", "0..0"), ("3..2", "3..2"), ("many", "'many'"), (-1, "-1")])
def test_invalid_number_or_range_of_servers_is_rejected(text: str | int, found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        mh.serve({"moody": Moody()}, servers=text)


def test_servers_option_requires_a_cluster() -> None:
    with pytest.raises(SettingsError, match='servers= needs a cluster.*Pass on="ray"'):
        mh.serve({"moody": Moody()}, on="cpu", servers="1..2")


def test_failed_server_is_removed_once_during_scale_down(events: list[dict[str, Any]]) -> None:
    class Calm:
        """A fleet without requests."""

        backends: ClassVar[dict[Address, Backend]] = {}

        def remove(self, address: Address) -> None:
            removed.append(address.grpc)

        async def look_up(self) -> None: ...

    removed: list[int] = []
    ended: list[float] = []
    router = ScaledRouter(RouteSettings(), Nearby(None), None, Device("cpu"), Scaling(most=3, calm=0))  # type: ignore[arg-type]
    router.on_event = events.append
    services = [
        SimpleNamespace(failure=failure, stop=ended.append) for failure in (None, None, WorkerFailed(0, "a", "b"))
    ]
    router._posts = [Post(one, Address("a", port, 1, 2)) for port, one in enumerate(services)]  # type: ignore[arg-type]

    async def run() -> None:
        tending = asyncio.create_task(router._tend(Calm()))  # type: ignore[arg-type]
        while not ended and not tending.done():
            await asyncio.sleep(0.01)
        assert not tending.done()
        tending.cancel()

    asyncio.run(run())
    assert removed == [2, 1]
    assert len(router._posts) == len(ended) == 1


class Placed:
    """A service whose server runs in this program."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.failure: Exception | None = None

    def call(self, method: str) -> Future[str]:
        answer: Future[str] = Future()
        answer.set_result(address(self.server))
        return answer

    def stop(self, seconds: float) -> None:
        self.server.stop()


class Nearby(Engine):
    """Places servers in this program; the second one cannot be started at first."""

    def __init__(self, start: Start) -> None:
        self._start, self.placed, self.refusals = start, list[Placed](), ["no room"]

    def start(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def start_service(self, make: Any, device: Device, **kwargs: Any) -> Any:
        if self.placed and self.refusals:
            raise RuntimeError(self.refusals.pop())
        self.placed.append(Placed(self._start(make)))
        return self.placed[-1]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a router says that looks often."""
    monkeypatch.setattr("manyhands.serving.routing.scaled.AGAIN_SECONDS", 0.1)
    monkeypatch.setattr("manyhands.serving.routing.scaled.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("manyhands.serving.routing.fleet.CHECK_SECONDS", 0.05)
    return []


def test_servers_scale_up_and_down_with_load_and_failed_ones_are_replaced(
    start: Start, events: list[dict[str, Any]]
) -> None:
    engine = Nearby(start)
    scaling = Scaling(least=1, most=2, busy=2, grow=0.2, calm=0.5)
    settings = RouteSettings(listen=Listen(http=0, grpc=0, manage=0))
    router = ScaledRouter(settings, engine, {"moody": Moody()}, Device("cpu"), scaling)  # type: ignore[arg-type]
    router.on_event = events.append
    codes: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            codes.append(ask_moody(router.url, 100).status_code)

    def are_up(*placed: Placed) -> bool:
        state = backends_of(router)
        return {name for name, each in state.items() if each["up"]} == {
            f"127.0.0.1:{one.server.grpc}" for one in placed
        }

    with router.start():
        assert are_up(*engine.placed)
        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: len(engine.placed) == 2 and are_up(*engine.placed))
        first, second = engine.placed
        first.failure = WorkerFailed(0, "here", "was killed")
        until(lambda: len(engine.placed) == 3 and are_up(second, engine.placed[2]))
        over.set()
        for thread in threads:
            thread.join()
        until(lambda: are_up(second))
        answered = [each["answered"] for each in backends_of(router).values()]
        time.sleep(0.2)
        assert ask_moody(router.url, 1).json() == {"outputs": [[2.0]]}
        now = [each["answered"] for each in backends_of(router).values()]
        assert now == [answered[0] + 1], "looks at a server are no requests"
    assert set(codes) == {200}
    kinds = [entry["kind"] for entry in events]
    assert kinds.count("server_failed") == kinds.count("server_lost") == 1
    with pytest.raises(httpx.ConnectError):
        ask_moody(second.server.url, 1)
