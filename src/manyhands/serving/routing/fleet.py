"""Backends of a router: address lookup, health checks and load balancing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from ...core import RequestRefused
from ..batcher import ATTEMPTS
from ..security import ServingTls
from .backend import Address, Backend, BackendOverloaded, Lost

CHECK_SECONDS = 0.5
"""Seconds between two health checks of a backend."""
SILENCE_SECONDS = 3.0
"""Seconds without an answer to a health check after which a backend is given up."""
GRACE_SECONDS = 2.0
"""Seconds that a request whose backend failed waits for another backend while none is up."""
LOOKUP_SECONDS = 2.0
"""Seconds between two DNS lookups of the configured host names."""
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"

Answered = TypeVar("Answered")


class Fleet:
    """The set of backends, given as addresses or as host names that are resolved periodically.

    `admit` is called with a backend that has become healthy, before it receives requests.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        tls: ServingTls | None,
        limit: int,
        emit: Callable[..., None],
        admit: Callable[[Backend], Awaitable[None]],
    ) -> None:
        self.backends: dict[Address, Backend] = {}
        self._written = list(addresses)
        self._tls, self._limit, self._emit, self._admit = tls, limit, emit, admit
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._lookup: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._reported_up: set[Backend] = set()
        """Backends that were last reported as up."""

    @property
    def up(self) -> list[Backend]:
        """Return the backends that receive requests."""
        return [backend for backend in self.backends.values() if backend.is_up]

    async def start(self) -> None:
        """Check all backends once, then start the periodic lookups."""
        await self.look_up()
        await asyncio.gather(*(self._check(backend) for backend in self.backends.values()))
        self._lookup = asyncio.ensure_future(self._keep_looking_up())

    async def stop(self) -> None:
        """Cancel all background tasks and close all backends."""
        tasks = [*self._tasks.values(), *self._leaving, *([self._lookup] if self._lookup is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(backend.close() for backend in self.backends.values()))

    def add(self, address: Address) -> None:
        """Add a backend; it receives requests as soon as it is ready."""
        if address not in self._written:
            self._written.append(address)

    def remove(self, address: Address) -> None:
        """Stop sending requests to a backend; it finishes those in flight."""
        if address not in self._written:
            raise RequestRefused("NOT_FOUND", f"there is no backend {address}")
        self._written.remove(address)

    async def look_up(self) -> None:
        """Resolve the configured names and add or remove backends to match the result."""
        wanted: dict[Address, str] = {}
        for written in self._written:
            hosts = await _hosts_of(written.host)
            for host in hosts or [each.host for each in self.backends if each.at(written.host) == written]:
                wanted[written.at(host)] = written.host
        for address, name in wanted.items():
            if address not in self.backends:
                backend = self.backends[address] = Backend(address, name, self._tls, self._limit)
                self._tasks[address] = asyncio.ensure_future(self._watch(backend))
        for address in [address for address in self.backends if address not in wanted]:
            backend = self.backends.pop(address)
            backend.is_up = False
            self._tasks.pop(address).cancel()
            leaving = asyncio.ensure_future(self._part(backend))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._emit("backend_removed", backend=str(address))

    async def ask(
        self, send: Callable[[Backend, float], Coroutine[Any, Any, Answered]], seconds: float
    ) -> tuple[Answered, Backend]:
        """Send a request to a backend, retry it on others if necessary, and return the answer and the backend.

        A request whose backend failed is retried until the deadline, at most `ATTEMPTS` times if it was in flight. A
        request that all available backends refuse as overloaded is refused.
        """
        until = time.monotonic() + seconds
        tried: set[Backend] = set()
        refused: BackendOverloaded | None = None
        lost, num_lost, wait = 0.0, 0, 0.02
        while True:
            now = time.monotonic()
            if now >= until:
                raise RequestRefused("DEADLINE_EXCEEDED", "the deadline has passed")
            backend = self.pick(tried)
            if backend is None:
                # A request whose backend failed is not refused because the others are overloaded or briefly down.
                if refused is not None and not lost:
                    raise refused
                if not self.up and now > lost + GRACE_SECONDS:
                    raise RequestRefused("UNAVAILABLE", "no backend is ready", 1.0)
                await asyncio.sleep(min(wait, until - now))
                wait = min(2 * wait, 0.5)
                tried.clear()
                continue
            tried.add(backend)
            try:
                return await send(backend, until - now), backend
            except Lost as failure:
                lost = lost or now
                num_lost += failure.with_request
                if num_lost == ATTEMPTS:
                    # The request itself may be what crashes the servers; retrying it would affect other requests.
                    raise RequestRefused("INTERNAL", "servers failed while computing this request") from None
            except BackendOverloaded as refusal:
                refused = refusal
            except TimeoutError:
                raise RequestRefused("DEADLINE_EXCEEDED", "the deadline has passed") from None

    def pick(self, tried: Collection[Backend]) -> Backend | None:
        """Return the less loaded of two random backends that were not tried, or None."""
        free = [backend for backend in self.backends.values() if backend.is_up and backend not in tried]
        if len(free) > 2:
            free = random.sample(free, 2)
        random.shuffle(free)
        return min(free, key=lambda backend: backend.num_busy, default=None)

    async def _keep_looking_up(self) -> None:
        while True:
            await asyncio.sleep(LOOKUP_SECONDS)
            await self.look_up()

    async def _part(self, backend: Backend) -> None:
        """Close a removed backend once its in-flight requests have been answered."""
        try:
            while backend.num_busy:
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            await backend.close()

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._check(backend)

    async def _check(self, backend: Backend) -> None:
        try:
            answer = await backend.fetch(READY, b"", SILENCE_SECONDS, is_probe=True)
        except TimeoutError:
            backend.give_up(f"silent for {SILENCE_SECONDS:g} s")
        except BackendOverloaded:
            backend.is_up, backend.reason = False, "overloaded"
        except Lost as lost:
            # A backend that refuses connections may be shutting down and still finish its in-flight requests.
            backend.is_up, backend.reason = False, backend.reason or "has closed its connections"
            if lost.in_silence:
                backend.give_up(backend.reason)
        else:
            if answer.status != 200:
                # The backend finishes its in-flight requests and accepts no new ones.
                backend.is_up, backend.reason = False, "not ready"
            elif not backend.is_up:
                await self._try_to_admit(backend)
        if backend.is_up != (backend in self._reported_up):
            self._report_state(backend)

    async def _try_to_admit(self, backend: Backend) -> None:
        try:
            await self._admit(backend)
        except RequestRefused as refusal:
            if backend.reason != refusal.reason:
                self._emit("backend_differs", backend=str(backend.address), reason=refusal.reason)
            backend.reason = refusal.reason
        else:
            backend.is_up, backend.reason = True, ""

    def _report_state(self, backend: Backend) -> None:
        if backend.is_up:
            self._reported_up.add(backend)
            self._emit("backend_up", backend=str(backend.address))
        else:
            self._reported_up.discard(backend)
            self._emit("backend_down", backend=str(backend.address), reason=backend.reason)


async def _hosts_of(name: str) -> list[str]:
    """Return the addresses that a host name resolves to; empty if the lookup fails."""
    with contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
        hosts = {(f"[{entry[4][0]}]" if entry[0] == socket.AF_INET6 else str(entry[4][0])) for entry in found}
        # A name such as localhost resolves to the same host in IPv4 and IPv6.
        return sorted(host for host in hosts if not host.startswith("[")) or sorted(hosts)
    return []
