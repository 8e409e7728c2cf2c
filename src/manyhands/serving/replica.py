"""Server-side handle of a serving replica: a process with a model on one device, reached through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..core import Event, RunError, Signature
from ..distributed import Device
from ..launcher import Engine, RunningJob
from ..storage import OutputMismatch
from .batcher import Batcher, RequestBatch
from .cgroups import remove_cgroup
from .compute import JOB, REFUSED, REPLY
from .dtypes import Array
from .heap import resident_bytes
from .replica_opening import ENDING_SECONDS, MAX_LINE, LoadingMemory, Opening, require_slot_memory
from .replica_process import MAX_MESSAGE, Computing, NoFreeCore, PredictorSource
from .replica_rendezvous import Arrival, ReplicaRendezvous
from .sandbox import Protection, make_folder
from .slots import NUM_SLOTS, Dims, ReplicaSlots, SlotLayout
from .texts import TextRegion

CGROUP_SECONDS = 60.0
"""Seconds for which a thread tries to remove the cgroup of a process that has ended."""
ASIDE_BYTES = 1 << 20
"""Size in bytes from which a batch is copied into shared memory on a separate thread instead of the event loop."""
STUCK_SECONDS = 30.0
"""Age in seconds after which a batch whose requests have all ended marks its process as stuck."""
MAX_LINES = 1000
"""Lines of a process's printed output that are shown. The rest is dropped."""
FLOOD_LINES = 100_000
"""Number of lines after which a sandboxed process is killed: reading them takes time that other models need."""
STARTING, READING, WARMING_UP, CHECKING = "starting a replica", "reading the export", "warming up", "checking outputs"
"""Stages of a load, by which clients learn where it failed."""


class ServingReplica:
    """Send a batcher's batches to a replica process through shared-memory slots and report the results."""

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
        """Limit on the process's resident memory in bytes; None for no limit."""
        self._is_trusted = computing.sandbox is None
        """Whether the process runs the operator's own code, whose texts clients may see."""
        self.num_rows = 0
        self._socket, self._ending, self._kill = arrival.socket, ending, kill
        self._loop = asyncio.get_running_loop()
        self._batcher: Batcher | None = None
        self._on_lost: Callable[[ServingReplica], None] = lambda replica: None
        self._on_failed: Callable[[str], str] = lambda detail: detail
        self._batches: dict[int, RequestBatch] = {}
        self._asked: dict[int, float] = {}
        """Send time of the batch in each slot, in seconds of the monotonic clock."""
        self._order: list[int] = []
        """Slots in the order in which the process computes them."""
        self._began = 0.0
        """When the process began to compute the first of them."""
        self._is_hung = False
        self._free = list(range(NUM_SLOTS))
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="manyhands-slots")
        """Copies large batches, so that the event loop can keep reading requests."""
        self._sending = threading.Lock()
        self._slots = slots
        self._dims_in, self._dims_out = Dims(signature.inputs.values()), Dims(signature.outputs.values())
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    @classmethod
    async def start(
        cls,
        engine: Engine,
        rendezvous: ReplicaRendezvous,
        source: PredictorSource,
        device: Device,
        sizes: tuple[int, ...],
        *,
        bulk_rows: int = 0,
        quietly: bool = True,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> ServingReplica:
        """Start a replica process and return its handle once the model is loaded and warmed up.

        If the process gets no CPU core at idle priority, it is started once more at normal priority. `on_stage` is
        called with the name of each stage that the load reaches.

        Raises:
            RunError: The process exited early, reported a failure, or exceeded `source.patience`.
        """
        limit = await asyncio.to_thread(patience, source)
        key, coming = rendezvous.expect()
        sandbox = source.sandbox(device, f"manyhands-{key}")
        if sandbox is not None and sandbox.compiles:
            sandbox = dataclasses.replace(sandbox, folder=make_folder())
        try:
            on_stage(STARTING)
            computing = Computing(source, device, rendezvous.path, key, sizes, quietly, sandbox, bulk_rows)
            return await cls._start(engine, rendezvous, computing, coming, limit, on_stage)
        except NoFreeCore:
            if not quietly:
                raise
            return await cls.start(
                engine, rendezvous, source, device, sizes, bulk_rows=bulk_rows, quietly=False, on_stage=on_stage
            )
        except OutputMismatch:
            on_stage(CHECKING)
            raise

    @classmethod
    async def _start(
        cls,
        engine: Engine,
        rendezvous: ReplicaRendezvous,
        computing: Computing,
        coming: asyncio.Future[Arrival],
        limit: float,
        on_stage: Callable[[str], None],
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
                printer = _Printer(jobs[0].kill if computing.confines else None)
                jobs[0].wait(printer.drop, printer)
            except Exception as error:
                failure = error
            if computing.sandbox is not None:
                is_known = coming.done() and not coming.cancelled() and coming.exception() is None
                computing.sandbox.clean_up(coming.result().pid if is_known else 0)
            # The server's event loop may already be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ending, failure)
            if computing.sandbox is not None:
                remove_cgroup(computing.sandbox.group, CGROUP_SECONDS)

        def kill() -> None:
            for job in jobs:
                job.kill()

        threading.Thread(target=work, name="manyhands-replica", daemon=True).start()
        watching: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(limit):
                await _first_of(coming, ending)
                if computing.sandbox is not None:
                    memory = LoadingMemory(coming.result().pid, computing.sandbox.memory)
                    watching = asyncio.ensure_future(memory.watch(kill))
                opening = Opening(coming.result().socket, ending)
                protection = await opening.protection()
                on_stage(READING)
                signature = await opening.signature(texts=computing.sandbox is None)
                layout = SlotLayout(signature, computing.sizes[-1], computing.bulk_rows)
                if computing.sandbox is not None:
                    require_slot_memory(layout, computing.sandbox.memory)
                slots = opening.send_slots(layout)
                on_stage(WARMING_UP)
                await opening.receive("ready")
                if watching is not None:
                    # The warm-up may be over before the watch looks again.
                    memory.require()
            replica = cls(computing, coming.result(), signature, slots, ending, jobs[0].kill)
            replica.protection = protection
        except BaseException as error:
            # A process that connects after this finds no pending rendezvous for its key, and exits.
            rendezvous.forget(computing.key)
            if coming.done() and not coming.cancelled():
                coming.result().socket.close()
            is_over.set()
            kill()
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
            if isinstance(error, TimeoutError):
                raise RunError(f"the model was not loaded within {limit:.0f} s") from None
            if watching is not None and watching.done():
                watching.result()
            raise
        finally:
            if watching is not None:
                watching.cancel()
        return replica

    def join(
        self,
        batcher: Batcher,
        on_lost: Callable[[ServingReplica], None],
        on_failed: Callable[[str], str] = lambda detail: detail,
    ) -> None:
        """Start to serve batches; if the process has already exited, call `on_lost` instead.

        Args:
            batcher: Source of the batches.
            on_lost: Called when the process has ended.
            on_failed: Called with the error text when the model raised; returns the text that clients may see.
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
        # If the process has exited, _on_readable notices it and the batcher retries the batch on another replica.
        with self._sending, contextlib.suppress(OSError):
            if not self._order:
                self._began = time.monotonic()
            self._order.append(JOB.unpack_from(message)[0])
            self._socket.send(message)

    def end_if_stuck(self) -> None:
        """Kill the process if it has spent more than `STUCK_SECONDS` on a batch whose requests have all ended."""
        long_ago = time.monotonic() - STUCK_SECONDS
        if any(self._asked[slot] < long_ago and batch.is_over for slot, batch in self._batches.items()):
            self._kill()

    def end_if_hung(self, restart: float) -> bool:
        """Kill the process if it is blocked by a batch while other requests wait; return whether it was killed.

        `restart` is how long another process takes to start, in seconds.
        """
        batches = self._ordered()
        if self._is_hung or self._batcher is None or not batches:
            return False
        computing, *waiting = batches
        self._is_hung = self._batcher.is_hung(computing, waiting, time.monotonic() - self._began, restart)
        if self._is_hung:
            self._kill()
        return self._is_hung

    def _ordered(self) -> list[RequestBatch]:
        """Return the batches of the process; it computes the first one, unless that is still being copied."""
        return [self._batches[slot] for slot in list(self._order) if slot in self._batches]

    def end_if_too_large(self) -> bool:
        """Kill the process if its resident memory exceeds the limit; return whether it was killed."""
        is_too_large = self.memory is not None and resident_bytes(self.pid) > self.memory
        if is_too_large:
            self.memory = None
            self._kill()
        return is_too_large

    def close(self) -> None:
        """Close the socket and leave the batcher; the process exits when it sees the closed socket."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            with self._sending:
                self._socket.close()
        self._aside.shutdown(wait=False)
        if self._batcher is not None and self in self._batcher.workers:
            self._batcher.workers.remove(self)

    async def ended(self) -> str:
        """Wait for the process to exit (killed after `ENDING_SECONDS`); return the reason, or "" for a clean exit."""
        done, _ = await asyncio.wait([self._ending], timeout=ENDING_SECONDS)
        if not done:
            self._kill()
        try:
            await self._ending
        except RunError as error:
            return str(error)
        return ""

    def _on_readable(self) -> None:
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
        """Handle a reply to a batch; kill the process if the message is malformed."""
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
        with self._sending:
            # A process under the control of a model's author may answer before it was asked.
            self._order = [each for each in self._order if each != slot]
            self._began = time.monotonic()
        self.num_rows -= batch.rows
        try:
            if failed:
                detail = message[REPLY.size :][:MAX_LINE].decode(errors="replace")
                if failed == REFUSED and self._is_trusted:
                    self._batcher.failed(batch, detail, is_invalid=True)
                else:
                    self._batcher.failed(batch, self._on_failed(detail))
            else:
                self._batcher.answered(batch, outputs, micros / 1e6)
        finally:
            self._free.append(slot)

    def _outputs(self, slot: int, batch: RequestBatch, message: bytes) -> dict[str, Array]:
        views = self._slots.outputs(slot, batch.size, self._dims_out.unpack(message, REPLY.size))
        return {name: view.read() if isinstance(view, TextRegion) else view for name, view in views.items()}

    def _lose(self) -> None:
        computing, batches = next(iter(self._ordered()), None), list(self._batches.values())
        self._batches = {}
        self.num_rows = 0
        self.close()
        if self._batcher is not None:
            for batch in batches:
                if batch is not computing:
                    self._batcher.unsent(batch)
            if computing is not None:
                (self._batcher.hung if self._is_hung else self._batcher.lost)(computing)
            self._on_lost(self)


class _Printer:
    """Print a process's output to stderr, up to `MAX_LINES` lines of `MAX_LINE` characters.

    Args:
        on_flood: Called once when there are more than `FLOOD_LINES` lines; long lines count several times.
    """

    def __init__(self, on_flood: Callable[[], None] | None = None) -> None:
        self._num, self._on_flood = 0, on_flood

    def __call__(self, rank: int, line: str, stream: str) -> None:
        before = self._num
        self._count(1 + len(line) // MAX_LINE)
        if self._num <= MAX_LINES:
            print("".join(c if c.isprintable() else " " for c in line[:MAX_LINE]), file=sys.stderr)
        elif before <= MAX_LINES:
            print(f"a replica printed more than {MAX_LINES} lines; the rest is dropped", file=sys.stderr)

    def drop(self, rank: int, entry: Event) -> None:
        """Drop an event, but count its text, such as a native stack trace that was separated from the output."""
        text = entry.get("text") or ""
        self._count(text.count("\n") + 1 + len(text) // MAX_LINE)

    def _count(self, num: int) -> None:
        before, self._num = self._num, self._num + num
        if before <= FLOOD_LINES < self._num and self._on_flood is not None:
            self._on_flood()


def patience(source: PredictorSource) -> float:
    """Return the seconds that a source's load may take: it reads sizes of files, so it runs in a thread."""
    return source.patience


def _settle(ending: asyncio.Future[None], failure: Exception | None) -> None:
    if ending.done():
        return
    if failure is None:
        ending.set_result(None)
    else:
        ending.set_exception(failure)


async def _first_of(wanted: asyncio.Future[Arrival], ending: asyncio.Future[None]) -> None:
    """Wait for `wanted`; raise if the process exits first."""
    both: list[asyncio.Future[Any]] = [wanted, ending]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if wanted.done() and not wanted.cancelled() and wanted.exception() is not None:
        # The socket closes before the reason for the exit is known.
        await asyncio.wait([ending], timeout=ENDING_SECONDS)
    if ending.done():
        if wanted.done() and not wanted.cancelled():
            wanted.exception()
        ending.result()
        raise RunError("the replica ended before it was ready")
    wanted.result()
