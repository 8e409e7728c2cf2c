"""A version of a model and its life cycle: loaded by separate processes, available, drained, ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import ManyhandsError, RequestRefused, RunError, Signature
from ..distributed import Device
from ..launcher import Engine
from .batcher import Arrays, Batcher, Done, Ticket
from .metrics import VersionMetrics
from .options import Batching
from .replica import STARTING, WARMING_UP, ServingReplica, patience
from .replica_opening import MAX_LINE
from .replica_process import NETWORK, PredictorSource
from .replica_rendezvous import ReplicaRendezvous
from .slots import SlotLayout

START, LOADING, AVAILABLE, UNLOADING, END = "START", "LOADING", "AVAILABLE", "UNLOADING", "END"
"""States, named as in TensorFlow Serving."""
SLOWEST_RETRY = 30.0
CALM_SECONDS = 60.0
"""Seconds after which the loss of another replica does not increase the backoff."""
_SWEEP = 0.05
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"`:,;()<>]+/)+")
"""The folders of an absolute path, up to the name of the file."""


@dataclass(frozen=True)
class ReplicaPlacement:
    """Where replicas run: the engine that starts them, their rendezvous and their devices."""

    engine: Engine
    rendezvous: ReplicaRendezvous
    devices: Sequence[Device]


class Version:
    """One version: its replicas, its queue and its metrics."""

    def __init__(
        self, model: str, number: int, source: PredictorSource, place: ReplicaPlacement, settings: Batching
    ) -> None:
        self.model, self.number = model, number
        self.state = START
        self.error = ""
        """The stage at which a load failed, for clients; empty if none failed."""
        self.detail = ""
        """Why a load failed, for the log and for management: it may hold what the model raised."""
        self.metrics = VersionMetrics()
        self.replicas: list[ServingReplica] = []
        self.on_event: Callable[..., None] = lambda kind, **values: None
        self.warm_up: Callable[[Version], Awaitable[None]] = nothing
        self.shadow: Callable[[Arrays, int, float], None] | None = None
        """Called with the inputs, rows and deadline of every request."""
        self._source, self._place, self._settings = source, place, settings
        # Code of the user may rely on `max_rows`.
        self._bulk_rows = settings.bulk_rows if source.kind == NETWORK and not settings.sizes else 0
        self._batcher: Batcher | None = None
        self._signature: Signature | None = None
        self._stages: dict[Device, str] = {}
        """The stage that the load of each device's replica has reached."""
        self._losses: dict[Device, tuple[float, float]] = {}
        """Time of the last loss of a device's replica, and the backoff before the next one starts."""
        self._start_seconds = 0.0
        """How long the last replica took to start."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_available(self) -> bool:
        """Whether it answers requests."""
        return self.state == AVAILABLE

    @property
    def is_over(self) -> bool:
        """Whether it will not answer requests any more."""
        return self.state in (UNLOADING, END)

    @property
    def batcher(self) -> Batcher:
        """The batcher, once the version is loaded."""
        assert self._batcher is not None
        return self._batcher

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs, once it is loaded."""
        assert self._signature is not None
        return self._signature

    @property
    def num_queued(self) -> int:
        """Number of rows in the queue."""
        return self._batcher.num_queued if self._batcher is not None else 0

    async def load(self, *, quietly: bool) -> None:
        """Load and warm up a replica on every device, each in a process; raises if one fails.

        With `quietly` the processes load at idle CPU priority, so that serving versions are not slowed down.
        """
        self.state, self.error, self.detail = LOADING, "", ""
        try:
            await self._start_all(quietly=quietly)
            await self._warm_up()
        except BaseException as error:
            if isinstance(error, Exception) and not self.error:
                self.fail(STARTING, error)
            await self.end(patience=0)
            raise
        if self.state == LOADING:
            self.state = AVAILABLE

    def fail(self, stage: str, reason: Exception | str) -> None:
        """Keep why the load failed: the stage for clients, the reason for the log and for management."""
        self.error = f"loading failed while {stage}; the server's log has the details"
        is_ours = isinstance(reason, str | ManyhandsError)
        self.detail = without_folders(str(reason) if is_ours else f"{type(reason).__name__}: {reason}")

    async def _warm_up(self) -> None:
        """Compute the recorded requests, within the time that a replica has to load."""
        limit = await asyncio.to_thread(patience, self._source)
        try:
            async with asyncio.timeout(limit):
                await self.warm_up(self)
        except TimeoutError:
            error = RunError(f"the warm-up did not end within {limit:.0f} s")
            self.fail(WARMING_UP, error)
            raise error from None
        except Exception as error:
            self.fail(WARMING_UP, error)
            raise

    async def _start_all(self, *, quietly: bool) -> None:
        started = await asyncio.gather(
            *(self._start(device, quietly=quietly) for device in self._place.devices), return_exceptions=True
        )
        for device, outcome in zip(self._place.devices, started, strict=True):
            if isinstance(outcome, Exception):
                self.fail(self._stages.get(device, STARTING), outcome)
            if isinstance(outcome, BaseException):
                raise outcome
        if self.is_over:
            raise RequestRefused("ABORTED", "the version was unloaded while it was being loaded")
        self._batcher = Batcher(self._settings, list(self.signature.inputs), asyncio.get_running_loop().call_soon)
        self._batcher.on_batch = self.metrics.count_batch
        layout = SlotLayout(self.signature, self._settings.max_rows, self._bulk_rows)
        sizes = self._batcher.sizes
        sizes.rows_fitting, sizes.bulk_fitting = layout.rows_fitting, layout.bulk_fitting
        for replica in list(self.replicas):
            replica.join(self._batcher, self._lose, self._fail)
        self._spawn(self._sweep())

    def submit(self, inputs: Arrays, rows: int, *, deadline: float, priority: int, done: Done) -> Ticket:
        """Submit a request to the batcher; raises RequestRefused if it cannot be answered."""
        self.require_available()
        ticket = self.batcher.submit(inputs, rows, deadline=deadline, priority=priority, done=done)
        if self.shadow is not None:
            self.shadow(inputs, rows, deadline)
        return ticket

    def require_available(self) -> None:
        """Raise RequestRefused unless the version is available."""
        if self.state != AVAILABLE:
            raise RequestRefused("UNAVAILABLE", f"{self.model} version {self.number} is not available", 1.0)

    async def end(self, patience: float) -> None:
        """Stop accepting requests, drain those in flight and end the processes."""
        try:
            if self.state == AVAILABLE:
                self.state = UNLOADING
                until = time.monotonic() + patience
                while self.batcher.num_live and time.monotonic() < until:
                    await asyncio.sleep(0.005)
        finally:
            replicas, tasks = list(self.replicas), list(self._tasks)
            self._close()
        await asyncio.gather(*tasks, *(replica.ended() for replica in replicas), return_exceptions=True)

    def _close(self) -> None:
        self.state = END
        for task in self._tasks:
            task.cancel()
        if self._batcher is not None:
            self._batcher.refuse_all(RequestRefused("UNAVAILABLE", "the model was unloaded", 1.0))
        for replica in self.replicas:
            replica.close()
        self.replicas.clear()

    async def _start(self, device: Device, *, quietly: bool) -> ServingReplica:
        """Start a replica and return it when it is ready; from then on this version owns and ends it."""
        sizes = self._settings.sizes or tuple(sorted({1, self._settings.max_rows}))
        place = self._place

        def reach(stage: str) -> None:
            self._stages[device] = stage

        began = time.monotonic()
        replica = await ServingReplica.start(
            place.engine,
            place.rendezvous,
            self._source,
            device,
            sizes,
            bulk_rows=self._bulk_rows,
            quietly=quietly,
            on_stage=reach,
        )
        self._start_seconds = time.monotonic() - began
        self._signature = self._signature or replica.signature
        if replica.signature != self._signature:
            replica.close()
            raise RunError("a replica reported a different signature than the first replica of its version")
        self.replicas.append(replica)
        if replica.protection is not None and replica.memory is not None:
            kind = "replica_unprotected" if replica.protection.missing else "replica_protected"
            self.on_event(kind, device=str(device), pid=replica.pid, sandbox=str(replica.protection))
        return replica

    def _fail(self, detail: str) -> str:
        """Log a model's error under a random number and return a text with only that number for the client."""
        number = secrets.token_hex(4)
        self.on_event("model_failed", error=number, detail=without_folders(detail))
        return f"{self.model} version {self.number}, error {number} in the server's log"

    def _lose(self, replica: ServingReplica) -> None:
        """Handle the death of a replica: its requests are already queued again, and another replica is started."""
        if replica in self.replicas:
            self.replicas.remove(replica)
        if not self.is_over:
            self._spawn(self._replace(replica))

    async def _replace(self, lost: ServingReplica) -> None:
        reason = await lost.ended()
        self.on_event("replica_lost", device=str(lost.device), pid=lost.pid, reason=without_folders(reason))
        wait = 0.1
        await asyncio.sleep(self._backoff(lost.device))
        while not self.is_over:
            try:
                # Requests wait for this replica, so it loads at normal priority.
                replica = await self._start(lost.device, quietly=False)
            except ManyhandsError as error:
                self.on_event("replica_failed", device=str(lost.device), reason=without_folders(str(error)))
                await asyncio.sleep(wait)
                wait = min(2 * wait, SLOWEST_RETRY)
                continue
            replica.join(self.batcher, self._lose, self._fail)
            self.on_event("replica_replaced", device=str(replica.device), pid=replica.pid)
            return

    def _backoff(self, device: Device) -> float:
        """Return the seconds before a replica is replaced: 0 at first, doubled for each loss soon after another."""
        last, wait = self._losses.get(device, (-CALM_SECONDS, 0.0))
        now = time.monotonic()
        wait = min(max(0.1, 2 * wait), SLOWEST_RETRY) if now - last < CALM_SECONDS else 0.0
        self._losses[device] = now, wait
        return wait

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            self.batcher.expire()
            for replica in self.replicas:
                replica.end_if_stuck()
                if replica.end_if_hung(self._start_seconds):
                    self.on_event("replica_hung", device=str(replica.device), pid=replica.pid)
                if replica.end_if_too_large():
                    self.on_event("replica_too_large", device=str(replica.device), pid=replica.pid)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def without_folders(text: str) -> str:
    """Return the first line of a text that a model may have written, without folders and control characters.

    >>> without_folders("ValueError: bad file '/home/me/build/net.py'")
    "ValueError: bad file 'net.py'"
    """
    line = text.partition("\n")[0][:MAX_LINE]
    return _FOLDERS.sub("", "".join(c if c.isprintable() else " " for c in line))


async def nothing(version: Version) -> None:
    """Do nothing: the default warm-up of a version, beyond that of its replicas."""


async def end_all(versions: Sequence[Version], patience: float) -> None:
    """End several versions concurrently, ignoring errors of each."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(version.end(patience) for version in versions), return_exceptions=True)
