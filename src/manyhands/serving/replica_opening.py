"""Opening of a replica: the checked messages of its process before it serves, and the memory that loading may take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from ..core import ArchiveError, ManyhandsError, RunError, Signature
from ..storage import OutputMismatch
from .heap import resident_bytes
from .replica_process import MAX_MESSAGE, NoFreeCore, require_rows
from .sandbox import Protection
from .slots import NUM_SLOTS, ReplicaSlots, SlotLayout

ENDING_SECONDS = 10.0
"""Seconds that a replica's process has to exit after its socket was closed, before it is killed."""
MIN_SLOT_BYTES = 1 << 30
"""Bytes of shared memory that any replica may have; beyond that, its memory limit applies."""
WATCH_SECONDS, WATCH_SLACK = 0.05, 64 << 20
"""Interval at which the memory of a process that loads a model is checked, and bytes beyond its limit it may have."""
MAX_TENSORS, MAX_RANK, MAX_NAME = 256, 32, 64
"""Limits on a signature: number of tensors, dimensions per tensor, and characters per tensor name."""
MAX_LINE = 2000
"""Characters of a line that a process prints, or of an error that it reports."""


class Opening:
    """Read a process's messages before it serves: its sandbox layers, the model's signature, then readiness.

    From the signature on, the model's author may control the process, so every message is validated.
    """

    def __init__(self, sock: socket.socket, ending: asyncio.Future[None]) -> None:
        self._socket, self._ending = sock, ending

    async def protection(self) -> Protection:
        message = await self.receive("layers")
        return Protection(list(message["layers"]), list(message["missing"]))

    async def signature(self, *, texts: bool) -> Signature:
        """Return the model's signature; only predictors in Python, which are not sandboxed, may have strings."""
        try:
            signature = Signature.from_dict((await self.receive("signature"))["signature"])
            _require_plain(signature, texts=texts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ManyhandsError):
                raise
            raise RunError("the replica reported an invalid signature") from None
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

    async def receive(self, key: str) -> dict[str, Any]:
        """Return the next message, which must contain `key`.

        Raises the failure that the process reports instead, or the reason why it exited.
        """
        loop = asyncio.get_running_loop()
        coming = asyncio.ensure_future(loop.sock_recv(self._socket, MAX_MESSAGE))
        both: list[asyncio.Future[Any]] = [coming, self._ending]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # The last message can still be read after the process has exited.
            await asyncio.wait([coming], timeout=1.0)
        finally:
            coming.cancel()
        message: Any = None
        with contextlib.suppress(OSError, ValueError, RecursionError, asyncio.CancelledError):
            message = json.loads(await coming)
        if isinstance(message, dict) and isinstance(message.get("failed"), str):
            raise FAILURES.get(message["failed"], RunError)(str(message.get("text"))[:MAX_LINE])
        if isinstance(message, dict) and key in message:
            return message
        # The socket closes before the reason for the exit is known.
        await asyncio.wait([self._ending], timeout=ENDING_SECONDS)
        if self._ending.done():
            self._ending.result()
        raise RunError("the replica ended before it was ready")


FAILURES: dict[str, type[ManyhandsError]] = {
    "ArchiveError": ArchiveError,
    "OutputMismatch": OutputMismatch,
    "NoFreeCore": NoFreeCore,
}
"""Exception classes that a sandboxed process may report by name."""


def _require_plain(signature: Signature, *, texts: bool) -> None:
    """Raise ValueError for a signature that no valid archive can have."""
    specs = [*signature.inputs.items(), *signature.outputs.items()]
    if not signature.inputs or not signature.outputs or len(specs) > MAX_TENSORS:
        raise ValueError("a signature must have inputs and outputs, and not too many of them")
    for name, spec in specs:
        sizes_fit = all(size is None or (type(size) is int and 0 <= size < 1 << 40) for size in spec.shape)
        if not isinstance(name, str) or len(name) > MAX_NAME or len(spec.shape) > MAX_RANK or not sizes_fit:
            raise ValueError("names, dimensions and sizes in a signature must be within their limits")
    require_rows(signature, texts=texts)


class LoadingMemory:
    """The resident memory of a process that loads a model, which may grow by a limit.

    Without a cgroup, shared memory counts for no limit of the process itself. The server holds it as well, so the
    kernel would not get it back by killing the process.
    """

    def __init__(self, pid: int, limit: int) -> None:
        self._pid, self._limit = pid, limit
        self._most = resident_bytes(pid) + limit + WATCH_SLACK

    def require(self) -> None:
        """Raise RunError if the memory exceeds the limit."""
        if resident_bytes(self._pid) > self._most:
            raise RunError(f"the model took more than {self._limit >> 20} MiB of memory while it was loaded")

    async def watch(self, kill: Callable[[], None]) -> None:
        """Check the memory again and again; kill the process and raise RunError when it exceeds the limit."""
        try:
            while True:
                self.require()
                await asyncio.sleep(WATCH_SECONDS)
        except RunError:
            kill()
            raise


def require_slot_memory(layout: SlotLayout, memory: int) -> None:
    """Raise RunError if the slots of a model, whose sizes its author chose, have more bytes than it may use."""
    most = max(memory, MIN_SLOT_BYTES)
    if NUM_SLOTS * layout.slot_bytes > most:
        raise RunError(
            f"batches of {layout.max_rows} rows take {NUM_SLOTS * layout.slot_bytes >> 20} MiB of shared memory, "
            f"but a replica of this model may have {most >> 20} MiB; lower max_rows"
        )
