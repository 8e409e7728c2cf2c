"""A replica as its server sees it: a process with a network on one device, reached through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..cluster import Device, Engine, Job
from ..core import Event, RunError
from .batcher import Batch, Batcher
from .computing import JOB, MAX_MESSAGE, REPLY, Computing, Source, Starved
from .meeting import Arrival, Meeting
from .slots import NUM_SLOTS, Dims, Layout, Slots

ENDING_SECONDS = 10.0
"""For a process that is not wanted any more."""
ASIDE_BYTES = 1 << 20
"""Of a batch that is written on a thread of its own."""
STUCK_SECONDS = 30.0
"""That a batch is computed for nobody before its process is taken for stuck."""


class Replica:
    """A worker of a batcher: takes batches, writes them into slots, and reports what came of them."""

    def __init__(self, device: Device, arrival: Arrival, max_rows: int, ending: asyncio.Future[None]) -> None:
        self.device, self.pid, self.signature = device, arrival.pid, arrival.signature
        self.num_rows = 0
        self._socket, self._ending = arrival.socket, ending
        self._loop = asyncio.get_running_loop()
        self._batcher: Batcher | None = None
        self._on_lost: Callable[[Replica], None] = lambda replica: None
        self._batches: dict[int, Batch] = {}
        self._asked: dict[int, float] = {}
        """When each of them was sent."""
        self._kill: Callable[[], None] = lambda: None
        self._free = list(range(NUM_SLOTS))
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="manyhands-slots")
        """Writes large batches: the loop goes on reading requests meanwhile."""
        self._sending = threading.Lock()
        layout = Layout(arrival.signature, max_rows)
        self._slots, fd = Slots.create(layout)
        try:
            socket.send_fds(self._socket, [b"slots"], [fd])
        finally:
            os.close(fd)
        self._dims_in = Dims(arrival.signature.inputs.values())
        self._dims_out = Dims(arrival.signature.outputs.values())
        self._is_ready = self._loop.create_future()
        self._loop.add_reader(self._socket.fileno(), self._hear)

    @classmethod
    async def start(
        cls,
        engine: Engine,
        meeting: Meeting,
        source: Source,
        device: Device,
        sizes: tuple[int, ...],
        *,
        quietly: bool = True,
    ) -> Replica:
        """Starts a process, and returns when it has loaded and warmed up; raises what kept it from that."""
        key, coming = meeting.expect()
        try:
            return await cls._start(
                engine, meeting, Computing(source, device, meeting.path, key, sizes, quietly), coming
            )
        except Starved:
            return await cls.start(engine, meeting, source, device, sizes, quietly=False)

    @classmethod
    async def _start(
        cls, engine: Engine, meeting: Meeting, computing: Computing, coming: asyncio.Future[Arrival]
    ) -> Replica:
        loop, device = asyncio.get_running_loop(), computing.device
        ending = loop.create_future()
        ending.add_done_callback(lambda done: None if done.cancelled() else done.exception())

        jobs: list[Job] = []
        is_over = threading.Event()

        def work() -> None:
            failure: Exception | None = None
            try:
                jobs.append(engine.start(computing, [device]))
                if is_over.is_set():
                    jobs[0].kill()
                jobs[0].wait(_ignore, lambda rank, line, stream: print(line, file=sys.stderr))
            except Exception as error:
                failure = error
            # The server's loop may be over by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ending, failure)

        threading.Thread(target=work, name="manyhands-replica", daemon=True).start()
        replica: Replica | None = None
        try:
            await _first_of(coming, ending)
            replica = cls(device, coming.result(), computing.sizes[-1], ending)
            await _first_of(replica._is_ready, ending)
            replica._kill = jobs[0].kill
        except BaseException:
            # A process that comes later finds that nobody expects it, and ends.
            meeting.forget(computing.key)
            if replica is not None:
                replica.close()
            elif coming.done() and not coming.cancelled():
                coming.result().socket.close()
            is_over.set()
            for job in jobs:
                job.kill()
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
            raise
        return replica

    def join(self, batcher: Batcher, on_lost: Callable[[Replica], None]) -> None:
        """Begins to serve, unless it was lost while it waited for the others to load."""
        self._batcher, self._on_lost = batcher, on_lost
        if self._socket.fileno() < 0:
            on_lost(self)
            return
        batcher.workers.append(self)
        batcher.wake()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def send(self, batch: Batch) -> None:
        slot = self._free.pop()
        self._batches[slot], self._asked[slot] = batch, time.monotonic()
        self.num_rows += batch.rows
        views = self._slots.inputs(slot, batch.size, batch.shapes)
        write, message = batch.writing(views), JOB.pack(slot, batch.size) + self._dims_in.pack(batch.shapes)
        if sum(view.nbytes for view in views.values()) < ASIDE_BYTES:
            self._write(write, message)
        else:
            self._aside.submit(self._write, write, message)

    def _write(self, write: Callable[[], None], message: bytes) -> None:
        write()
        # Where the other side is gone, _hear finds out and the batch is computed elsewhere.
        with self._sending, contextlib.suppress(OSError):
            self._socket.send(message)

    def end_if_stuck(self) -> None:
        """Kills a process that has long been computing what nobody waits for: it may never end, and others wait."""
        long_ago = time.monotonic() - STUCK_SECONDS
        if any(self._asked[slot] < long_ago and batch.is_over for slot, batch in self._batches.items()):
            self._kill()

    def close(self) -> None:
        """Lets the process go: it ends by itself."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            with self._sending:
                self._socket.close()
        self._aside.shutdown(wait=False)
        if self._batcher is not None and self in self._batcher.workers:
            self._batcher.workers.remove(self)

    async def ended(self) -> str:
        """Why the process ended, empty where that was wished for; one that was let go and does not end is killed."""
        done, _ = await asyncio.wait([self._ending], timeout=ENDING_SECONDS)
        if not done:
            self._kill()
        try:
            await self._ending
        except RunError as error:
            return str(error)
        return ""

    def _hear(self) -> None:
        try:
            message = self._socket.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose()
        elif not self._is_ready.done():
            self._is_ready.set_result(None)
        else:
            self._take(message)

    def _take(self, message: bytes) -> None:
        assert self._batcher is not None
        slot, failed, micros = REPLY.unpack_from(message)
        batch = self._batches.pop(slot)
        self.num_rows -= batch.rows
        try:
            if failed:
                self._batcher.failed(batch, message[REPLY.size :].decode(errors="replace"))
            else:
                shapes = self._dims_out.unpack(message, REPLY.size)
                self._batcher.answered(batch, self._slots.outputs(slot, batch.size, shapes), micros / 1e6)
        finally:
            self._free.append(slot)

    def _lose(self) -> None:
        batches, self._batches = list(self._batches.values()), {}
        self.num_rows = 0
        self.close()
        if not self._is_ready.done():
            self._is_ready.set_exception(RunError("the replica ended before it was ready"))
        if self._batcher is not None:
            for batch in batches:
                self._batcher.lost(batch)
            self._on_lost(self)


def _settle(ending: asyncio.Future[None], failure: Exception | None) -> None:
    if ending.done():
        return
    if failure is None:
        ending.set_result(None)
    else:
        ending.set_exception(failure)


def _ignore(rank: int, entry: Event) -> None:
    pass


async def _first_of(wanted: asyncio.Future[Arrival] | asyncio.Future[None], ending: asyncio.Future[None]) -> None:
    """Waits for what is wanted; raises where the process ends before that."""
    await asyncio.wait([wanted, ending], return_when=asyncio.FIRST_COMPLETED)
    if wanted.done() and not wanted.cancelled() and wanted.exception() is not None:
        # Its socket is closed before its process has told why.
        await asyncio.wait([ending], timeout=ENDING_SECONDS)
    if ending.done():
        if wanted.done() and not wanted.cancelled():
            wanted.exception()
        ending.result()
        raise RunError("the replica ended before it was ready")
    wanted.result()
