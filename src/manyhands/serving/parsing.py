"""Parse large texts in a separate process: JSON parsers hold the GIL, which would block other requests.

The process is started with the first such text. It has lower priority than the server, pauses for requests that wait
for its core, and has a memory limit.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import heapq
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, TypeVar

from ..core import ManyhandsError, RequestRefused
from ..distributed import Device, World
from ..launcher import Engine, Service
from .http import BadRequest
from .scheduling import pausing, restore_slice, step_aside

Read = TypeVar("Read")
INLINE = 64 << 10
"""Maximum bytes of a text that is parsed in the server itself, which takes a millisecond at most."""
NICENESS = 15
MEMORY = 512 << 20
"""Memory limit in bytes for parsing a text."""
SECONDS = 20.0
"""Maximum seconds per text; after that the process is killed."""
MAX_WAITING = 64
PAUSE_SECONDS = 0.0005
"""Longest time for which parsing keeps a core that other threads of the server wait for."""


class Parser:
    """Process side: call a function and return its result, or the reason of its refusal."""

    def __init__(self, world: World) -> None:
        step_aside(NICENESS)
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        most = int(used.split()[1]) * 1024 + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        # JSON values contain no reference cycles.
        gc.disable()

    def parse(self, work: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, str] | None]:
        """Return the result of a function, or the status or code and the reason of its refusal."""
        try:
            with pausing(PAUSE_SECONDS):
                return work(*(bytes(arg) if isinstance(arg, memoryview) else arg for arg in args)), None
        except BadRequest as error:
            return None, (error.status, error.reason)
        except RequestRefused as refusal:
            return None, (refusal.code, refusal.reason)
        except MemoryError:
            return None, (413, f"the text takes more than {MEMORY} bytes when it is parsed; send binary tensors")
        finally:
            ctypes.CDLL(None).malloc_trim(0)


@dataclass(order=True)
class Waiting:
    """A queued text; small ones go first."""

    size: int
    number: int
    work: Callable[..., Any] = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)
    answer: asyncio.Future[Any] = field(compare=False)


class Parsing:
    """Server side: send one text at a time to the process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._service: Service | None = None
        self._waiting: list[Waiting] = []
        self._num = 0
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "manyhands-parsing", restore_slice)

    async def run(self, size: int, work: Callable[..., Read], *args: Any) -> Read:
        """Run a function in the process and return its result; its BadRequest or RequestRefused is raised here."""
        if len(self._waiting) >= MAX_WAITING:
            raise RequestRefused("UNAVAILABLE", f"overloaded: {MAX_WAITING} large JSON texts are waiting", 1.0)
        self._num += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, Waiting(size, self._num, work, args, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._parse_all())
        result, refusal = await answer
        if refusal is None:
            return result  # type: ignore[no-any-return]
        code, reason = refusal
        raise BadRequest(code, reason) if isinstance(code, int) else RequestRefused(code, reason)

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._service is not None:
            await asyncio.to_thread(self._service.kill)
        self._thread.shutdown(wait=False)

    async def _parse_all(self) -> None:
        while self._waiting:
            one = heapq.heappop(self._waiting)
            if one.answer.done():
                continue
            try:
                result = await self._parse(one)
            except (ManyhandsError, TimeoutError, OSError) as error:
                reason = "the text could not be parsed in time" if isinstance(error, TimeoutError) else "parsing failed"
                result = None, ("UNAVAILABLE", f"{reason}; send binary tensors, or a smaller text")
            if not one.answer.done():
                one.answer.set_result(result)

    async def _parse(self, one: Waiting) -> Any:
        loop = asyncio.get_running_loop()
        called = await loop.run_in_executor(self._thread, self._call, one)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(called), SECONDS)
        except TimeoutError:
            service, self._service = self._service, None
            if service is not None:
                await asyncio.to_thread(service.kill)
            raise

    def _call(self, one: Waiting) -> Any:
        if self._service is None or not self._service.is_alive:
            self._service = self._engine.start_service(Parser, Device("cpu"))
        # Buffers are written to shared memory without the interpreter's lock, which pickling bytes would hold.
        args = (PickleBuffer(arg) if isinstance(arg, bytes | bytearray) else arg for arg in one.args)
        return self._service.call("parse", one.work, *args)
