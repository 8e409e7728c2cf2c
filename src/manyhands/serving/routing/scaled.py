"""Autoscaled router: servers placed by an engine, whose number follows the load; failed ones are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core import RequestRefused, SettingsError
from ...distributed import Device, World
from ...launcher import Engine, LocalEngine, Make, Service
from ..server import Server, ServeSettings
from .backend import Address
from .fleet import Fleet
from .router import Router, RouteSettings

LOOK_SECONDS = 0.5
AGAIN_SECONDS = 5.0
"""Seconds before another attempt to start a server that failed to start."""
_SERVERS = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Minimum and maximum number of servers, and the load thresholds between."""

    least: int = 1
    most: int = 1
    busy: int = 64
    """Requests in flight per server."""
    grow: float = 2.0
    """Seconds of overload before servers are added; shorter bursts are absorbed by queues."""
    calm: float = 30.0
    """Seconds of low load before servers are removed."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise SettingsError(
                "servers must be a range that starts at 1 or more",
                got=f"{self.least}..{self.most}",
                remedy='pass for example servers="1..4"',
            )

    @classmethod
    def parse(cls, text: str | int, busy: int) -> Scaling:
        """Parse a number, or a range such as "1..4".

        >>> Scaling.parse("1..4", 64).most, Scaling.parse(2, 64).least
        (4, 2)
        """
        match = _SERVERS.fullmatch(str(text).strip())
        if match is None:
            raise SettingsError(
                "servers must be a number or a range", got=repr(text), remedy='pass for example servers="1..4"'
            )
        return cls(least=int(match[1]), most=int(match[2] or match[1]), busy=busy)


class Scaler:
    """Decide how many servers there should be; the router acts on it."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._needs: deque[tuple[float, int]] = deque()
        """Times with the number of servers that were needed."""

    def wanted(self, num: int, num_busy: int, now: float) -> int:
        """Return the number of servers: more if all recent samples needed more, fewer after a calm period."""
        scaling = self._scaling
        self._needs.append((now, math.ceil(num_busy / scaling.busy)))
        while self._needs[0][0] < now - scaling.calm:
            self._needs.popleft()
        lately = min(need for at, need in self._needs if at >= now - scaling.grow)
        at_all = max(need for _, need in self._needs)
        return max(scaling.least, min(scaling.most, max(lately, min(at_all, num))))


class PlacedServer:
    """A server placed by an engine; the router asks it for its address."""

    def __init__(self, world: World, *, models: Path | Mapping[str, Any], settings: ServeSettings) -> None:
        where = world.rank_info.address
        listen = replace(settings.listen, host=where, manage_host=where, http=0, grpc=0, manage=0)
        here = replace(settings, listen=listen)
        self._engine = LocalEngine(preload=["manyhands.serving.replica_process"])
        try:
            self._server = Server(models, self._engine, [world.rank_info.device], here).start()
        except BaseException:
            self._engine.close()
            raise

    def address(self) -> str:
        """Return the address in the format of a router's settings."""
        server = self._server
        return f"{server.listen.host}:{server.grpc}/{server.http}/{server.manage}"

    def close(self) -> None:
        """Drain all requests and stop."""
        self._server.stop()
        self._engine.close()


@dataclass(eq=False)
class Post:
    """One of the servers, from the decision to start it; without an address until it answers."""

    service: Service | None = None
    address: Address | None = None


class ScaledRouter(Router):
    """Router that starts its servers, monitors them, and changes their number with the load."""

    def __init__(self, settings: RouteSettings, engine: Engine, make: Make, device: Device, scaling: Scaling) -> None:
        super().__init__(settings)
        self._engine, self._make, self._device, self._scaling = engine, make, device, scaling
        self._posts: list[Post] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before = 0.0
        self._starting = threading.Lock()
        self._is_over = False

    async def _open(self, fleet: Fleet) -> None:
        """Wait until the minimum number of servers answers."""
        self._posts = [Post() for _ in range(self._scaling.least)]
        found = await asyncio.gather(*(self._fill(post, fleet) for post in self._posts), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error
        self._begin(self._tend(fleet))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._start_no_more)
        await asyncio.gather(*(self._end(post) for post in self._posts))

    async def _tend(self, fleet: Fleet) -> None:
        scaler = Scaler(self._scaling)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for post in list(self._posts):
                failure = post.service.failure if post.service is not None and post.address is not None else None
                if failure is not None:
                    self._emit("server_lost", backend=str(post.address), reason=str(failure))
                    await self._leave(post, fleet)
            num_busy = sum(backend.num_busy for backend in fleet.backends.values())
            wanted = scaler.wanted(len(self._posts), num_busy, now)
            if wanted > len(self._posts) and now >= self._not_before:
                self._emit("servers", num=wanted, busy=num_busy)
                for _ in range(wanted - len(self._posts)):
                    self._posts.append(Post())
                    self._begin(self._try_to_fill(self._posts[-1], fleet))
            elif wanted < len(self._posts):
                self._emit("servers", num=wanted, busy=num_busy)
                filled = [post for post in self._posts if post.address is not None]
                for post in filled[wanted - len(self._posts) :]:
                    await self._leave(post, fleet)
                    self._begin(self._end(post))

    async def _fill(self, post: Post, fleet: Fleet) -> None:
        service = await asyncio.to_thread(self._start, post)
        post.address = Address.parse(await asyncio.wrap_future(service.call("address")))
        fleet.add(post.address)
        await fleet.look_up()

    def _start(self, post: Post) -> Service:
        with self._starting:
            if self._is_over:
                raise RuntimeError("the router has ended")
            post.service = self._engine.start_service(self._make, self._device)
            return post.service

    def _start_no_more(self) -> None:
        """From now on every service that was started is known."""
        with self._starting:
            self._is_over = True

    async def _try_to_fill(self, post: Post, fleet: Fleet) -> None:
        try:
            await self._fill(post, fleet)
        except Exception as error:
            self._emit("server_failed", reason=str(error))
            self._not_before = time.monotonic() + AGAIN_SECONDS
            self._posts.remove(post)
            await self._end(post)

    async def _leave(self, post: Post, fleet: Fleet) -> None:
        """Stop sending requests to a server."""
        self._posts.remove(post)
        if post.address is not None:
            with contextlib.suppress(RequestRefused):
                fleet.remove(post.address)
            await fleet.look_up()

    async def _end(self, post: Post) -> None:
        """Let a server finish its requests in flight, and end it."""
        if post.service is not None and post.address is None:
            await asyncio.to_thread(post.service.kill)
        elif post.service is not None:
            await asyncio.to_thread(post.service.stop, self.listen.drain + 5.0)

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
