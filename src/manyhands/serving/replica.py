"""A replica as its server sees it: a process with a network on one device, reached through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..core import ArchiveError, Event, ManyhandsError, RunError, Signature
from ..distributed import Device
from ..launcher import Engine, RunningJob
from ..storage import OutputMismatch
from .batcher import Batcher, RequestBatch
from .dtypes import Array
from .replica_process import JOB, MAX_MESSAGE, REPLY, Computing, PredictorSource, Starved, require_rows
from .replica_rendezvous import Arrival, ReplicaRendezvous
from .sandbox import Protection, remove_cgroup, resident_bytes
from .slots import NUM_SLOTS, Dims, ReplicaSlots, SlotLayout

ENDING_SECONDS = 10.0
"""For a process that is not wanted any more."""
ASIDE_BYTES = 1 << 20
"""Of a batch that is written on a thread of its own."""
STUCK_SECONDS = 30.0
"""That a batch is computed for nobody before its process is taken for stuck."""
MAX_LINES, MAX_LINE = 1000, 2000
"""What a process may print: lines, and characters of each; the rest is dropped."""
MAX_TENSORS, MAX_RANK, MAX_NAME = 256, 32, 64
"""Of a signature."""


class ServingReplica:
    """A worker of a batcher: takes batches, writes them into slots, and reports what came of them."""

    def __init__(
        self,
        computing: Computing,
        arrival: Arrival,
        signature: Signature,
        slots: ReplicaSlots,
        ending: asyncio.Future[None],
        kill: Callable[[], None],
    ) -> None:
        self.device, self.pid, self.signature = computing.device, arrival.pid, signature
        self.protection: Protection | None = None
        self.memory = computing.sandbox.memory if computing.sandbox is not None else None
        """Bytes that the process may use; None for any number."""
        self.num_rows = 0
        self._socket, self._ending, self._kill = arrival.socket, ending, kill
        self._loop = asyncio.get_running_loop()
        self._batcher: Batcher | None = None
        self._on_lost: Callable[[ServingReplica], None] = lambda replica: None
        self._on_failed: Callable[[str], str] = lambda detail: detail
        self._batches: dict[int, RequestBatch] = {}
        self._asked: dict[int, float] = {}
        """When each of them was sent."""
        self._free = list(range(NUM_SLOTS))
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="manyhands-slots")
        """Writes large batches: the loop goes on reading requests meanwhile."""
        self._sending = threading.Lock()
        self._slots = slots
        self._dims_in, self._dims_out = Dims(signature.inputs.values()), Dims(signature.outputs.values())
        self._loop.add_reader(self._socket.fileno(), self._hear)

    @classmethod
    async def start(
        cls,
        engine: Engine,
        meeting: ReplicaRendezvous,
        source: PredictorSource,
        device: Device,
        sizes: tuple[int, ...],
        *,
        quietly: bool = True,
    ) -> ServingReplica:
        """Starts a process, and returns when it has loaded and warmed up; raises what kept it from that."""
        key, coming = meeting.expect()
        sandbox = source.sandbox(device, f"manyhands-{key}")
        try:
            return await cls._start(
                engine, meeting, Computing(source, device, meeting.path, key, sizes, quietly, sandbox), coming
            )
        except Starved:
            if not quietly:
                raise
            return await cls.start(engine, meeting, source, device, sizes, quietly=False)

    @classmethod
    async def _start(
        cls, engine: Engine, meeting: ReplicaRendezvous, computing: Computing, coming: asyncio.Future[Arrival]
    ) -> ServingReplica:
        loop, device = asyncio.get_running_loop(), computing.device
        ending = loop.create_future()
        ending.add_done_callback(lambda done: None if done.cancelled() else done.exception())

        jobs: list[RunningJob] = []
        is_over = threading.Event()

        def work() -> None:
            failure: Exception | None = None
            try:
                jobs.append(engine.start(computing, [device]))
                if is_over.is_set():
                    jobs[0].kill()
                jobs[0].wait(_ignore, _Printer())
            except Exception as error:
                failure = error
            if computing.sandbox is not None:
                remove_cgroup(computing.sandbox.group)
            # The server's loop may be over by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ending, failure)

        threading.Thread(target=work, name="manyhands-replica", daemon=True).start()
        try:
            async with asyncio.timeout(computing.source.patience):
                await _first_of(coming, ending)
                opening = _Opening(coming.result().socket, ending)
                protection = await opening.protection()
                signature = await opening.signature()
                slots = opening.send_slots(SlotLayout(signature, computing.sizes[-1]))
                await opening.told("ready")
            replica = cls(computing, coming.result(), signature, slots, ending, jobs[0].kill)
            replica.protection = protection
        except BaseException as error:
            # A process that comes later finds that nobody expects it, and ends.
            meeting.forget(computing.key)
            if coming.done() and not coming.cancelled():
                coming.result().socket.close()
            is_over.set()
            for job in jobs:
                job.kill()
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
            if isinstance(error, TimeoutError):
                raise RunError(f"the model was not loaded within {computing.source.patience:.0f} s") from None
            raise
        return replica

    def join(
        self,
        batcher: Batcher,
        on_lost: Callable[[ServingReplica], None],
        on_failed: Callable[[str], str] = lambda detail: detail,
    ) -> None:
        """Begins to serve, unless it was lost while it waited for the others to load.

        Args:
            batcher: Where batches come from.
            on_lost: Called when the process has ended.
            on_failed: Called with the detail when the network raised; returns what clients may know of it.
        """
        self._batcher, self._on_lost, self._on_failed = batcher, on_lost, on_failed
        if self._socket.fileno() < 0:
            on_lost(self)
            return
        batcher.workers.append(self)
        batcher.wake()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def send(self, batch: RequestBatch) -> None:
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

    def end_if_too_large(self) -> bool:
        """Kills a process that uses more memory than it may; whether it did."""
        is_too_large = self.memory is not None and resident_bytes(self.pid) > self.memory
        if is_too_large:
            self.memory = None
            self._kill()
        return is_too_large

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
        else:
            self._take(message)

    def _take(self, message: bytes) -> None:
        """Takes a reply; a process that says anything else is not trusted with another batch."""
        assert self._batcher is not None
        try:
            slot, failed, micros = REPLY.unpack_from(message)
            batch = self._batches[slot]
            outputs = {} if failed else self._outputs(slot, batch, message)
        except (struct.error, KeyError, ValueError):
            self._kill()
            self._lose()
            return
        del self._batches[slot]
        self.num_rows -= batch.rows
        try:
            if failed:
                detail = message[REPLY.size :][:MAX_LINE].decode(errors="replace")
                self._batcher.failed(batch, self._on_failed(detail))
            else:
                self._batcher.answered(batch, outputs, micros / 1e6)
        finally:
            self._free.append(slot)

    def _outputs(self, slot: int, batch: RequestBatch, message: bytes) -> dict[str, Array]:
        return self._slots.outputs(slot, batch.size, self._dims_out.unpack(message, REPLY.size))

    def _lose(self) -> None:
        batches, self._batches = list(self._batches.values()), {}
        self.num_rows = 0
        self.close()
        if self._batcher is not None:
            for batch in batches:
                self._batcher.lost(batch)
            self._on_lost(self)


class _Opening:
    """What a process says before it serves: its sandbox, then the model's signature, then that it is ready.

    From the signature on the process may be in the hands of the model's author, so everything is checked.
    """

    def __init__(self, sock: socket.socket, ending: asyncio.Future[None]) -> None:
        self._socket, self._ending = sock, ending

    async def protection(self) -> Protection:
        told = await self.told("layers")
        return Protection(list(told["layers"]), list(told["missing"]))

    async def signature(self) -> Signature:
        try:
            signature = Signature.from_dict((await self.told("signature"))["signature"])
            _require_plain(signature)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ManyhandsError):
                raise
            raise RunError("the replica told a malformed signature") from None
        return signature

    def send_slots(self, layout: SlotLayout) -> ReplicaSlots:
        try:
            slots, fd = ReplicaSlots.create(layout)
        except (OSError, ValueError, OverflowError) as error:
            raise RunError(f"batches of {layout.slot_bytes} bytes cannot be held in memory: {error}") from None
        try:
            socket.send_fds(self._socket, [b"slots"], [fd])
        finally:
            os.close(fd)
        return slots

    async def told(self, key: str) -> dict[str, Any]:
        """The next message, which must have this key; raises what the process reports instead, or why it ended."""
        loop = asyncio.get_running_loop()
        coming = asyncio.ensure_future(loop.sock_recv(self._socket, MAX_MESSAGE))
        both: list[asyncio.Future[Any]] = [coming, self._ending]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # What it said last is still there when its process has ended.
            await asyncio.wait([coming], timeout=1.0)
        finally:
            coming.cancel()
        told: Any = None
        with contextlib.suppress(OSError, ValueError, RecursionError, asyncio.CancelledError):
            told = json.loads(await coming)
        if isinstance(told, dict) and isinstance(told.get("failed"), str):
            raise FAILURES.get(told["failed"], RunError)(str(told.get("text"))[:MAX_LINE])
        if isinstance(told, dict) and key in told:
            return told
        # Its socket is closed before its process has told why.
        await asyncio.wait([self._ending], timeout=ENDING_SECONDS)
        if self._ending.done():
            self._ending.result()
        raise RunError("the replica ended before it was ready")


FAILURES: dict[str, type[ManyhandsError]] = {
    "ArchiveError": ArchiveError,
    "OutputMismatch": OutputMismatch,
    "Starved": Starved,
}
"""Errors that a confined process reports by their names."""


def _require_plain(signature: Signature) -> None:
    """Refuses a signature that no archive could have."""
    specs = [*signature.inputs.items(), *signature.outputs.items()]
    if not signature.inputs or not signature.outputs or len(specs) > MAX_TENSORS:
        raise ValueError("tensors")
    for name, spec in specs:
        sizes_fit = all(size is None or (type(size) is int and 0 <= size < 1 << 40) for size in spec.shape)
        if not isinstance(name, str) or len(name) > MAX_NAME or len(spec.shape) > MAX_RANK or not sizes_fit:
            raise ValueError("names and sizes")
    require_rows(signature)


class _Printer:
    """Passes on what a process prints, so much and no more."""

    def __init__(self) -> None:
        self._left = MAX_LINES

    def __call__(self, rank: int, line: str, stream: str) -> None:
        self._left -= 1
        if self._left >= 0:
            print("".join(c if c.isprintable() else " " for c in line[:MAX_LINE]), file=sys.stderr)
        elif self._left == -1:
            print(f"a replica printed more than {MAX_LINES} lines; the rest is dropped", file=sys.stderr)


def _settle(ending: asyncio.Future[None], failure: Exception | None) -> None:
    if ending.done():
        return
    if failure is None:
        ending.set_result(None)
    else:
        ending.set_exception(failure)


def _ignore(rank: int, entry: Event) -> None:
    pass


async def _first_of(wanted: asyncio.Future[Arrival], ending: asyncio.Future[None]) -> None:
    """Waits for what is wanted; raises where the process ends before that."""
    both: list[asyncio.Future[Any]] = [wanted, ending]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if wanted.done() and not wanted.cancelled() and wanted.exception() is not None:
        # Its socket is closed before its process has told why.
        await asyncio.wait([ending], timeout=ENDING_SECONDS)
    if ending.done():
        if wanted.done() and not wanted.cancelled():
            wanted.exception()
        ending.result()
        raise RunError("the replica ended before it was ready")
    wanted.result()
